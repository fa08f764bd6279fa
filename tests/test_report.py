"""What a grid can show is told from its specs, and agrees with what its runs then fill."""

import subprocess
import sys
from random import Random

import pandas as pd
import pytest
from fakes import CONFIG, grid_runs, plausible, run, write_metrics

from linvit import figures, published
from linvit.config import Distill, Init, load_study, read_yaml, study_from
from linvit.grid import evaluations, expand
from linvit.report import (
    FIGURES,
    figures_of,
    identity,
    identity_of,
    is_component,
    printed_tables,
    start_of,
    tables_of,
)
from linvit.results import collect
from linvit.tables import write_tables

ALL_BUT_HEAD = ("attention", "mlp", "norms", "patch_embed", "positions", "class_token")
STUDY = load_study(CONFIG)
TABLES = ("top1", *published.tables())


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


def test_another_recipe_is_another_data_set_out_of_distribution_too():
    first = next(iter(evaluations(STUDY, "paper").values()))
    other = first.model_copy(update={"run": first.run.model_copy(update={"other_recipe": True})})
    assert identity_of(first)["dataset"] == "imagenet-a"
    assert identity_of(other)["dataset"] == f"imagenet-a@{first.run.recipe.name}"
    assert printed_tables([identity_of(first)]) == ["table2"]
    assert printed_tables([identity_of(other)]) == []


AXES = {
    "inits": [
        *("random", "copy", "copy-distill", "mlpcopy", "mlpcopy-distill", "fullcopy-distill", "copy-map1e4"),
        *("copy-map3e3", "copy-output10", "copy-output100", "copy-lolcats", "copy-transfer", "mycopy"),
    ],
    "datasets": ["imagenet", "pets"],
    "sizes": ["tiny", "small", "base"],
    "variants": ["relu", "elu", "softmax"],
    "sources": ["deit", "dino"],
}


@pytest.mark.parametrize("number", range(16))
def test_a_partial_grid_is_promised_what_its_runs_give(number, tmp_path):
    random = Random(number)
    config = read_yaml(CONFIG)
    config["inits"]["mycopy"] = {"copy": ["attention"]}
    config["sources"]["dino"] = {size: {"timm": "a_vit"} for size in AXES["sizes"]}
    blocks = [
        {axis: random.sample(names, random.randint(1, 2)) for axis, names in AXES.items()} | {"seeds": [0]}
        for _ in range(random.randint(1, 2))
    ]
    # A pair that the rule of default runs tells apart, or not, is in every other grid.
    if number % 2:
        blocks[0]["inits"] = ["copy", random.choice(AXES["inits"][6:])]
    specs = expand(study_from({**config, "grids": {"some": blocks}, "grid": "some"})).values()
    runs = collect([write_metrics(tmp_path / "runs", spec, plausible(spec)) for spec in specs])
    write_tables(runs, tmp_path)
    assert tables_of(specs) == [name for name in TABLES if (tmp_path / f"{name}.md").exists()]
    drawn = {name: draw(runs) for name, draw in figures.FIGURES.items()}
    is_empty = {name: any("No runs of these" in text for text in texts_of(figure)) for name, figure in drawn.items()}
    promised = figures_of(specs)
    assert not [name for name in promised if is_empty[name]]
    # FullCopy's gain over Copy alone is no Figure 3, nor are the paper's losses alone a figure of others.
    assert {name for name in FIGURES if not is_empty[name]} - set(promised) <= {"fig3", "losses"}


def texts_of(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_planning_needs_nothing_that_only_jobs_need():
    code = "import sys, linvit.report; print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
