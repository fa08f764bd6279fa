"""What the figures show, read from their axes; and that files come out whole and the same twice."""

from itertools import pairwise, product

import matplotlib.pyplot as plt
import pytest
from fakes import frame, grid_runs, run
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from linvit.figures import FIGURES, save
from linvit.figures.gains import BLOCKS, fig3, fig4, figA, figB
from linvit.figures.sizes import MARKERS, fig2
from linvit.figures.style import COLORS
from linvit.figures.weights import SHADES, fig5
from linvit.report import ATTENTION_ONLY, COMPONENTS
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
    rows = [run("mlpcopy", top1, seed) for seed, top1 in enumerate((70.0, 72.0))] + [run("random", 70.0)]
    figure = fig4(frame(rows))
    assert len(figure.axes[0].containers) == 3
    assert "n = 1 to 2 seeds" in figure.get_supxlabel()


def test_fig4_has_a_row_per_data_set_and_size_and_a_column_per_operator():
    cells = product(("stl10", "imagenet"), ("base", "tiny"), ("relu", "ttt"))
    figure = fig4(frame([run("mlpcopy", dataset=d, size=s, variant=v) for d, s, v in cells]))
    assert [ax.get_title() for ax in figure.axes[:2]] == ["ReLU", "TTT"]
    labels = [ax.get_ylabel() for ax in figure.axes[::2]]
    assert labels == ["ImageNet-1K\ntiny", "ImageNet-1K\nbase", "STL-10\ntiny", "STL-10\nbase"]


TRANSFERS = ["CIFAR-10", "CIFAR-100", "STL-10", "Food-101", "Flowers-102", "Oxford-IIIT Pets"]
OPERATORS = ["ELU", "ReLU", "InLine", "MHLA", "TTT"]


def test_the_papers_fig2_has_seven_data_sets_and_three_sizes(paper_runs):
    figure = fig2(paper_runs)
    assert len(figure.axes) == 35
    assert [ax.get_ylabel() for ax in figure.axes[::5]] == ["ImageNet-1K", *TRANSFERS]
    assert [ax.get_title() for ax in figure.axes[:5]] == OPERATORS
    imagenet, cifar = figure.axes[0], figure.axes[5]
    assert {
        len(line.get_xdata()) for line in imagenet.lines if line.get_linestyle() == "-" and len(line.get_xdata())
    } == {3}
    assert {len(line.get_xdata()) for line in cifar.lines if line.get_linestyle() == "-" and len(line.get_xdata())} == {
        2
    }


def test_the_papers_fig4_is_relu_at_small_and_a_and_b_are_all_operators(paper_runs):
    figure = fig4(paper_runs)
    assert [ax.get_title() for ax in figure.axes] == TRANSFERS
    assert "Operator: ReLU. Source: deit; size: small; " in figure.get_supxlabel()
    for draw, size in ((figA, "small"), (figB, "tiny")):
        figure = draw(paper_runs)
        assert [ax.get_ylabel() for ax in figure.axes[::5]] == TRANSFERS
        assert [ax.get_title() for ax in figure.axes[:5]] == OPERATORS
        assert f"size: {size}; mean ± standard deviation over n = 3 seeds" in figure.get_supxlabel()


def test_the_papers_fig3_and_fig5_have_a_panel_per_data_set(paper_runs):
    figure = fig3(paper_runs)
    assert [ax.get_title() for ax in figure.axes] == TRANSFERS
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == OPERATORS
    assert "size: small" in figure.get_supxlabel()
    figure = fig5(paper_runs)
    assert [ax.get_title() for ax in figure.axes] == ["CIFAR-100", "Flowers-102", "Oxford-IIIT Pets"]
    assert legend(figure) == ["ELU", "ReLU", "InLine", "match output", "match map"]


def test_fig3_stacks_gains_over_the_same_seeds_copy():
    rows = [run("copy", 70.0, 0), run("copy", 72.0, 1), run("copy-distill", 75.0, 0), run("copy-distill", 79.0, 1)]
    rows += [run("fullcopy-distill", 80.0, 0), run("random", 10.0), run("fullcopy", 85.0, variant="softmax")]
    figure = fig3(frame(rows))
    (ax,) = figure.axes
    # Copy w/ Distill: 5 and 7; FullCopy w/ Distill: 10, of the one seed it has.
    assert bars(ax) == [(0.0, 6.0, "/////"), (6.0, 10.0, BLOCKS["more"]["hatch"])]
    (target,) = (line for line in ax.lines if line.get_linestyle() == "--")
    # 85 above the Copy of seeds 0, 1 and 0 again.
    assert list(target.get_ydata()) == pytest.approx([85 - (70 + 72 + 70) / 3] * 2)
    assert legend(figure) == ["Copy w/ Distill", "FullCopy w/ Distill, on top", "Softmax reference"]


def test_fig3_of_losses():
    rows = [run("copy", 70.0), run("copy-distill", 68.0), run("fullcopy-distill", 74.0)]
    (ax,) = fig3(frame(rows)).axes
    assert [(low, high) for low, high, _ in bars(ax)] == [(-2.0, 0.0), (0.0, 4.0)]
    rows = [run("copy", 70.0), run("copy-distill", 76.0), run("fullcopy-distill", 74.0)]
    figure = fig3(frame(rows))
    assert bars(figure.axes[0])[1] == (4.0, 6.0, "xxxxx")
    assert legend(figure) == ["Copy w/ Distill", "FullCopy w/ Distill, below"]


def test_fig5_draws_a_line_per_operator_and_target():
    rows = [run("copy-distill", 70.0 + seed, seed) for seed in (0, 2)]
    rows += [run("copy-distill", 74.0, init="copy-output10", distill_weight=10.0)]
    rows += [
        run("copy-distill", top1, init=f"copy-map{weight:g}", distill_target="map", distill_weight=weight)
        for weight, top1 in ((3e3, 68.0), (1e5, 69.0))
    ]
    rows += [run("copy-distill", 50.0, variant="ttt"), run("mlpcopy-distill", 60.0)]
    rows += [run("copy-distill", 10.0, init="copy-output10", distill_weight=10.0, source="mae")]
    figure = fig5(frame(rows))
    (ax,) = figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_linewidth() == 1]
    assert lines == [([10.0, 50.0], [74.0, 71.0]), ([3e3, 1e5], [68.0, 69.0])]
    assert ax.get_xscale() == "log"
    assert legend(figure) == ["ReLU", "match output", "match map"]


def luminance(color: str) -> float:
    """Relative luminance, near enough for what a grey print shows."""
    red, green, blue = to_rgb(color)
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def test_in_grey_what_shares_a_panel_differs_by_more_than_colour():
    assert len({MARKERS[start] for start in ATTENTION_ONLY}) == len(ATTENTION_ONLY)
    assert len({block["hatch"] for block in BLOCKS.values()}) == len(BLOCKS)
    shades = sorted(map(luminance, SHADES))
    assert all(high > 1.5 * low for low, high in pairwise(shades))


def test_an_initialisation_has_the_same_colour_in_every_figure(tmp_path):
    runs = grid_runs(tmp_path, "mini")

    def edges(figure) -> set[str]:
        patches = [bar for ax in figure.axes for bar in ax.patches if isinstance(bar, Rectangle)]
        return {to_hex(bar.get_edgecolor()).upper() for bar in patches if bar.get_hatch()}

    dots = [dots for dots in fig2(runs).axes[0].collections if isinstance(dots, PathCollection)]
    assert {to_hex(dot.get_facecolor()[0]).upper() for dot in dots} == {COLORS[start] for start in ATTENTION_ONLY}
    assert edges(fig3(runs)) == {COLORS[start] for start in ("copy", "fullcopy")}
    assert edges(fig4(runs)) == {COLORS[start] for start in COMPONENTS}
    assert COLORS["copy"] in SHADES


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"fig5", "losses"}))
def test_the_loss_ablation_and_other_sources_do_not_leak_in(name):
    draw, changes = FIGURES[name], {"size": "small"} if name == "figA" else {}
    inits = (("random", 70.0), ("copy", 71.0), ("copy-distill", 73.0), ("fullcopy-distill", 75.0))
    rows = [run(init, top1, seed, **changes) for init, top1 in inits for seed in (0, 1)]
    extra = [
        run("copy-distill", 10.0, init="copy-map3e3", distill_target="map", **changes),
        run("copy-distill", 10.0, init="copy-output10", distill_weight=10.0, **changes),
        *(run(init, 10.0, source="mae", **changes) for init in ("copy", "copy-distill")),
    ]
    figure, alone = draw(frame(rows + extra)), draw(frame(rows))
    assert figure.axes[0].get_ylim() == alone.axes[0].get_ylim()
    assert bars(figure.axes[0]) == bars(alone.axes[0])
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


@pytest.mark.parametrize(("draw", "size"), [(figA, "small"), (figB, "tiny")])
def test_an_empty_figure_of_one_size_names_it(draw, size):
    (ax,) = draw(frame([run("fullcopy", size="mini")])).axes
    assert texts(ax) == [f"No runs of these initialisations at size {size}."]
