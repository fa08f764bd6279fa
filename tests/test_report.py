"""What a grid can show is told from its specs, and agrees with what its runs then fill."""

import subprocess
import sys

import pandas as pd
import pytest
from fakes import CONFIG, grid_runs, run

from linvit import figures
from linvit.config import Distill, Init, load_study
from linvit.grid import evaluations, expand
from linvit.report import FIGURES, figures_of, identity, is_component, printed_tables, start_of, tables_of

ALL_BUT_HEAD = ("attention", "mlp", "norms", "patch_embed", "positions", "class_token")
STUDY = load_study(CONFIG)


@pytest.mark.parametrize(
    ("init", "start"),
    [
        (Init(name="a"), "random"),
        (Init(name="a", distill=Distill()), "random"),
        (Init(name="a", analytic="mimetic"), "mimetic"),
        (Init(name="a", analytic="impulse", distill=Distill()), "impulse"),
        (Init(name="a", copy=("attention",)), "copy"),
        (Init(name="a", copy=("attention",), distill=Distill(target="map")), "copy"),
        (Init(name="a", copy=("mlp",)), "mlpcopy"),
        (Init(name="a", copy=ALL_BUT_HEAD[::-1]), "fullcopy"),
        (Init(name="a", copy=(*ALL_BUT_HEAD, "head")), "pretrained"),
        (Init(name="mine-distill", copy=("attention", "mlp"), distill=Distill()), "mine"),
        (Init(name="mine", analytic="mimetic", copy=("mlp",)), "mine"),
    ],
)
def test_start_comes_from_what_an_init_does(init, start):
    assert start_of(init) == start


def test_every_init_of_the_catalogue_starts_as_it_is_named():
    starts = {name: start_of(init) for name, init in STUDY.inits.items()}
    losses = ("copy-map", "copy-output", "copy-transfer", "copy-lolcats", "copy-radlads")
    ablation = {name: "copy" for name in starts if name.startswith(losses)}
    assert starts == {name: name.removesuffix("-distill") for name in starts} | ablation


def test_every_figure_is_known_to_both_sides():
    assert set(FIGURES) == set(figures.FIGURES)


@pytest.mark.parametrize(
    ("grid", "tables", "drawn"),
    [
        ("demo", ["top1"], ["fig2", "fig4"]),
        ("mini", ["top1"], ["fig2", "fig3", "fig4"]),
        ("losses", ["top1"], ["fig2", "fig3", "fig4", "fig5", "losses"]),
        (
            "paper",
            ["top1", "table1", "table2", "tableF", "tableG"],
            ["fig2", "fig3", "fig4", "fig5", "figA", "figB"],
        ),
    ],
)
def test_what_the_grids_show(grid, tables, drawn):
    specs = expand(STUDY, grid).values()
    assert tables_of(specs, evaluations(STUDY, grid).values()) == tables
    assert figures_of(specs) == drawn


def test_softmax_runs_alone_fill_no_figure():
    specs = [spec for spec in expand(STUDY, "mini").values() if spec.variant.name == "softmax"]
    assert figures_of(specs) == []


def test_out_of_distribution_results_fill_table_2():
    assert printed_tables([run("copy", dataset="imagenet-a", size="base", variant="ttt")]) == ["table2"]
    assert printed_tables([run("copy", dataset="imagenet-a", size="base", variant="mhla")]) == []


def test_the_identity_of_a_spec_is_that_of_its_row(tmp_path):
    runs = grid_runs(tmp_path, "mini")
    known = pd.DataFrame([identity(spec) for spec in expand(STUDY, "mini").values()]).sort_values("run")
    pd.testing.assert_frame_equal(known.reset_index(drop=True), runs[list(known)], check_dtype=False)


def test_runs_of_the_component_study():
    names = ("random", "mimetic", "copy", "mlpcopy", "copy-distill", "mimetic-distill", "fullcopy-notoken")
    assert [row["init"] for row in map(run, names) if is_component(row)] == ["mlpcopy", "copy-distill"]


def test_a_sweep_needs_two_weights():
    specs = list(expand(STUDY, "paper").values())
    copies = [spec for spec in specs if spec.init.name in ("copy-distill", "copy-map1e4")]
    assert "fig5" in figures_of(copies)
    assert "fig5" not in figures_of([spec for spec in copies if spec.init.name == "copy-distill"])


def test_other_losses_than_the_papers_have_a_figure_of_their_own():
    specs = {spec.init.name: spec for spec in expand(STUDY, "losses").values()}
    for name in ("copy-transfer", "copy-lolcats", "copy-radlads"):
        drawn = figures_of([specs["copy-distill"], specs[name]])
        assert "losses" in drawn
        assert "fig5" not in drawn
    assert "losses" not in figures_of([specs["copy-distill"], specs["copy-map3e3"]])


def test_planning_needs_nothing_that_only_jobs_need():
    code = "import sys, linvit.report; print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
