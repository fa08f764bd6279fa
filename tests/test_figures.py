"""What the figures show, read from their axes; and that files come out whole and the same twice."""

from itertools import product

import matplotlib.pyplot as plt
import pytest
from fakes import frame, grid_runs, run
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from linvit.figures import ATTENTION_ONLY, COLORS, COMPONENTS, FIGURES, fig2, fig4, save
from linvit.results import MINUS


def bars(ax) -> list[tuple[float, float, str | None]]:
    """Bars as (lower end, upper end, hatch)."""
    found = [patch for container in ax.containers if hasattr(container, "patches") for patch in container.patches]
    ends = [sorted((bar.get_y(), bar.get_y() + bar.get_height())) for bar in found if isinstance(bar, Rectangle)]
    return [(low, high, bar.get_hatch()) for (low, high), bar in zip(ends, found, strict=True)]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_every_start_has_its_own_colour():
    colors = [to_rgb(color) for color in COLORS.values()]
    assert len(set(colors)) == len(colors)
    assert set(COLORS) == {*ATTENTION_ONLY, *COMPONENTS, "softmax"}


def test_fig2_has_a_panel_per_operator_and_names_what_is_in_it(tmp_path):
    figure = fig2(grid_runs(tmp_path, "mini"))
    assert [ax.get_title() for ax in figure.axes] == ["ELU", "ReLU", "InLine", "MHLA", "TTT"]
    assert legend(figure) == ["Random", "Mimetic", "Impulse", "Copy", "Softmax reference"]
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert ticks == ["Random", "Mimetic", "Impulse", "Copy"]


def test_fig2_of_one_size_draws_mean_seeds_and_reference():
    copies = [run("copy", top1, seed) for seed, top1 in enumerate((70.0, 72.0, 77.0))]
    reference = [run("fullcopy", 90.0, variant="softmax")]
    (ax,) = fig2(frame(copies + reference)).axes
    seeds, mean = (dots.get_offsets()[:, 1] for dots in ax.collections if isinstance(dots, PathCollection))
    assert list(seeds) == [70.0, 72.0, 77.0]
    assert list(mean) == [73.0]
    assert [list(line.get_ydata()) for line in ax.lines if line.get_linestyle() == "--"] == [[90.0, 90.0]]


def test_fig2_joins_sizes_and_grows_markers():
    means = {"tiny": 70.0, "small": 75.0, "base": 80.0}
    rows = [
        run("copy", top1 + shift, seed, size=size) for size, top1 in means.items() for seed, shift in ((0, 1), (1, -1))
    ]
    (ax,) = fig2(frame(rows)).axes
    assert list(ax.lines[0].get_ydata()) == [70.0, 75.0, 80.0]
    areas = next(dots for dots in ax.collections if isinstance(dots, PathCollection)).get_sizes()
    assert list(areas) == sorted(set(areas))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["tiny", "small", "base"]


def test_fig4_stacks_a_gain_and_cuts_a_loss_into_the_bar():
    rows = [run("copy", 70.0), run("copy-distill", 72.5), run("mlpcopy", 80.0), run("mlpcopy-distill", 78.0)]
    figure = fig4(frame(rows))
    (ax,) = figure.axes
    bottom = ax.get_ylim()[0]
    assert 0 < bottom < 70
    copy, gain, mlpcopy, loss = bars(ax)
    assert copy == (bottom, 70.0, None)
    assert gain == (70.0, 72.5, "/////")
    assert mlpcopy == (bottom, 80.0, None)
    assert loss == (78.0, 80.0, "xxxxx")
    assert texts(ax) == ["+2.5", f"{MINUS}2.0"]
    assert legend(figure) == ["without Distill", "gain with Distill", "loss with Distill"]
    assert "truncated" in figure.get_supylabel()


def test_fig4_shows_distill_without_its_counterpart(tmp_path):
    figure = fig4(grid_runs(tmp_path, "demo"))
    assert "w/ Distill, no run without" in legend(figure)
    for ax in figure.axes:
        assert bars(ax)[-1][2] == "....."


def test_fig4_draws_error_bars_and_states_n():
    rows = [run("copy", top1, seed) for seed, top1 in enumerate((70.0, 72.0))] + [run("random", 70.0)]
    figure = fig4(frame(rows))
    assert len(figure.axes[0].containers) == 3
    assert "n = 1 to 2 seeds" in figure.get_supxlabel()


def test_fig4_has_a_row_per_data_set_and_size():
    rows = [run("copy", dataset=d, size=s) for d, s in product(("stl10", "imagenet"), ("base", "tiny"))]
    labels = [ax.get_ylabel() for ax in fig4(frame(rows)).axes]
    assert labels == ["ImageNet-1K\ntiny", "ImageNet-1K\nbase", "STL-10\ntiny", "STL-10\nbase"]


@pytest.mark.parametrize("draw", FIGURES.values())
def test_the_loss_ablation_and_other_sources_do_not_leak_in(draw):
    rows = [run("random", 70.0), run("copy", 71.0), run("copy", 72.0, seed=1), run("copy-distill", 73.0)]
    extra = [
        run("copy-distill", 10.0, init="copy-map3e3", distill_target="map"),
        run("copy-distill", 10.0, init="copy-output10", distill_weight=10.0),
        run("copy", 10.0, source="mae"),
    ]
    figure = draw(frame(rows + extra))
    assert figure.axes[0].get_ylim()[0] > 60
    assert "Source: deit" in figure.get_supxlabel()
    assert "Source: mae" in draw(frame(rows + extra), source="mae").get_supxlabel()


PARTIAL = {
    "empty": [],
    "softmax only": [run("fullcopy", variant="softmax")],
    "one run": [run("random", 70.0)],
    "no reference": [run("random", 70.0), run("copy", 71.0), run("mlpcopy-distill", 75.0)],
    "equal scores": [run("random", 0.0), run("copy", 0.0), run("copy-distill", 0.0)],
    "gaps": [run("random", size="tiny"), run("copy", size="small"), run("copy", dataset="stl10", variant="ttt")],
    "unknown operator": [run("random", variant="mine"), run("copy", variant="mine")],
}


@pytest.mark.parametrize("draw", FIGURES.values())
@pytest.mark.parametrize("rows", PARTIAL.values(), ids=PARTIAL)
def test_partial_grids_are_drawn(draw, rows, tmp_path):
    save(draw(frame(rows)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_files_are_whole_and_the_same_twice(name, suffix, magic, tmp_path):
    runs = grid_runs(tmp_path, "demo")
    first, second = (tmp_path / f"{i}{suffix}" for i in (1, 2))
    for path in (first, second):
        save(FIGURES[name](runs), path)
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [first.name, second.name]


def test_other_formats_are_refused_and_no_global_state_is_left(tmp_path):
    font = plt.rcParams["font.size"]
    figure = fig2(frame([run()]))
    with pytest.raises(ValueError, match=r"figure.svg: no format .* allowed: .png, .pdf"):
        save(figure, tmp_path / "figure.svg")
    assert plt.get_fignums() == []
    assert plt.rcParams["font.size"] == font
