"""What the figure of losses shows, read from its axes."""

import pytest
from fakes import CONFIG, frame, grid_runs, run
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from linvit.cli import main
from linvit.config import load_study
from linvit.figures import save
from linvit.figures.losses import COPY, LOSSES, MEAN, OWN_WEIGHTS, losses
from linvit.figures.style import REFERENCE
from linvit.grid import expand
from linvit.report import start_of
from linvit.results import write_runs


def lossy(target: str, weight: float, top1: float = 80.0, seed: int = 0, **changes) -> dict:
    init = f"copy-{target}{weight:g}"
    return run("copy-distill", top1, seed, init=init, distill_target=target, distill_weight=weight, **changes)


def diamonds(ax: Axes) -> list[tuple[float, bool]]:
    """Means from the top down, and whether they are filled."""
    found = [dots for dots in ax.collections if isinstance(dots, PathCollection)][1::2]
    return [(dots.get_offsets()[0, 0], to_hex(dots.get_facecolors()[0]) == MEAN.lower()) for dots in found]


def seeds(ax: Axes) -> list[list[float]]:
    found = [dots for dots in ax.collections if isinstance(dots, PathCollection)][::2]
    return [list(dots.get_offsets()[:, 0]) for dots in found]


def line(ax: Axes, style: dict) -> list[float]:
    return [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == style["linestyle"]]


def rows(ax: Axes) -> list[str]:
    return [tick.get_text() for tick in ax.get_yticklabels()]


def titles(figure: Figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def test_the_losses_grid_fills_every_panel_with_its_weights_in_order(tmp_path):
    figure = losses(grid_runs(tmp_path, "losses"))
    assert titles(figure) == list(LOSSES.values())
    assert rows(figure.axes[1]) == ["λ = 3,000", "λ = 10,000", "λ = 30,000", "λ = 100,000", "λ = 300,000"]
    assert rows(figure.axes[2]) == ["λ = 0.3", "λ = 3", "λ = 30"]
    filled = [[is_filled for _, is_filled in diamonds(ax)] for ax in figure.axes]
    assert filled == [
        [False, False, True, False, False],
        [False] * 5,
        [False, True, False],
        [False, False, True],
        [True, False, False, False],
    ]


def test_each_works_own_weight_is_the_configurations():
    inits = ("copy-distill", "copy-transfer", "copy-lolcats", "copy-radlads")
    runs = {spec.init.name: spec.init for spec in expand(load_study(CONFIG), "losses").values()}
    assert {runs[name].distill.loss: runs[name].distill.weight for name in inits} == OWN_WEIGHTS
    assert {start_of(runs[name]) for name in inits} == {"copy"}


def test_a_row_shows_its_mean_over_its_seeds():
    of_two = [lossy("heads", 10.0, top1, seed) for seed, top1 in enumerate((70.0, 72.0, 77.0))]
    (ax,) = losses(frame([*of_two, lossy("heads", 1000.0, 75.0)])).axes
    assert diamonds(ax) == [(73.0, False), (75.0, True)]
    assert seeds(ax) == [[70.0, 72.0, 77.0], [75.0]]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first weight on top


def test_lines_are_copy_without_a_loss_and_the_softmax_reference():
    others = [run("random", 10.0), run("fullcopy", 20.0), run("mlpcopy-distill", 30.0)]
    references = [run("copy", 60.0), run("copy", 62.0, seed=1), run("fullcopy", 90.0, variant="softmax")]
    figure = losses(frame([lossy("output", 50.0), lossy("map", 3e3), *references, *others]))
    for ax in figure.axes:
        assert line(ax, COPY) == [61.0]
        assert line(ax, REFERENCE) == [90.0]
        assert len(seeds(ax)) == 1


def test_operators_data_sets_and_sources_do_not_mix():
    changes = [{}, {"variant": "elu"}, {"dataset": "stl10"}, {"source": "mae"}]
    figure = losses(frame([lossy("heads", 1000.0, 70.0 + i, **change) for i, change in enumerate(changes)]))
    assert [diamonds(ax) for ax in figure.axes] == [[(70.0 + i, True)] for i in range(4)]
    assert "Oxford-IIIT Pets, tiny, ELU; source: deit" in figure.axes[1].get_xlabel()


@pytest.mark.parametrize(
    "runs", [[], [run("random")], [lossy("mine", 2.0)], [lossy("heads", 1.0), lossy("map", 1.0, variant="elu")]]
)
def test_partial_grids_are_drawn(runs, tmp_path):
    save(losses(frame(runs)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_it_is_drawn_by_command(tmp_path):
    write_runs(frame([lossy("heads", 1000.0)]), tmp_path / "runs.csv")
    out = tmp_path / "losses.pdf"
    assert main(["figure", "losses", str(tmp_path / "runs.csv"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"%PDF")
