"""Learning curves, what initialisations save, throughput and blocks' errors: what is on their axes, by formula."""

import json

import pandas as pd
import pytest
from fakes import frame, grid_runs, run, write_metrics
from matplotlib.collections import PolyCollection
from test_figures import PARTIAL, legend, texts
from test_plan import rates
from tiny import CONFIG, STUDY

from linvit.config import ConfigError, load_study
from linvit.figures import FIGURES, HISTORY_FIGURES, NAMES, draw, save
from linvit.figures.blocks import blocks
from linvit.figures.curves import curves
from linvit.figures.recipes import recipes
from linvit.figures.savings import Crossing, crossing, savings
from linvit.figures.style import COLORS, log_ticks
from linvit.figures.throughput import SPEED, throughput, with_speed
from linvit.grid import expand
from linvit.report import BY_HAND, history_figures_of
from linvit.report import HISTORY_FIGURES as TITLES
from linvit.results import BLOCK_DTYPES, HISTORY_DTYPES, collect, collect_history, read_history, write_runs

IMAGES = 100
"""Of a made-up data set, an epoch."""


def history(runs: pd.DataFrame, top1: dict[str, list[float]]) -> pd.DataFrame:
    """Epochs of the runs: accuracies by init, one an epoch, a point more for each seed."""
    rows = [
        {"run": row.run, "epoch": epoch, "images": epoch * IMAGES, "task_loss": 3.0 / epoch, "top1": value + row.seed}
        for row in runs.itertuples()
        for epoch, value in enumerate(top1[row.init], 1)
    ]
    return pd.DataFrame(rows, columns=list(HISTORY_DTYPES)).astype(HISTORY_DTYPES)


def drawn(ax, color: str) -> list[list[float]]:
    """Heights of the lines of a colour that have points of their own."""
    return [list(line.get_ydata()) for line in ax.lines if line.get_color() == color and len(line.get_xdata()) > 2]


def test_every_figure_is_known_to_both_sides():
    assert (*FIGURES, *HISTORY_FIGURES, *BY_HAND) == NAMES
    assert set(HISTORY_FIGURES) == set(TITLES)


def test_curves_are_means_over_seeds_with_their_spread():
    runs = frame([run(init, 60.0, seed) for init in ("random", "copy-distill") for seed in (0, 2)])
    figure = curves(runs, history(runs, {"random": [10.0, 20.0, 40.0], "copy-distill": [30.0, 50.0, 60.0]}))
    loss, top1 = figure.axes
    assert drawn(loss, COLORS["random"]) == [[3.0, 1.5, 1.0]]
    assert drawn(top1, COLORS["random"]) == [[11.0, 21.0, 41.0]]
    (band, _) = (shape for shape in top1.collections if isinstance(shape, PolyCollection))
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (pytest.approx(11 - 2**0.5), pytest.approx(41 + 2**0.5))
    assert legend(figure) == ["Random", "Copy", "w/ Distill"]


def test_epochs_that_were_not_evaluated_leave_no_gap():
    runs = frame([run("random", 60.0)])
    _, top1 = curves(runs, history(runs, {"random": [10.0, float("nan"), 30.0, 40.0]})).axes
    assert drawn(top1, COLORS["random"]) == [[10.0, 30.0, 40.0]]


def test_many_data_sets_show_accuracies_alone():
    runs = frame([run("random", dataset=name) for name in ("pets", "stl10", "cifar10")])
    figure = curves(runs, history(runs, {"random": [1.0, 2.0, 3.0]}))
    assert [ax.get_ylabel() for ax in figure.axes] == ["CIFAR-10", "STL-10", "Oxford-IIIT Pets"]


def test_an_operator_that_a_data_set_lacks_has_no_runs_on_its_neighbours_axes():
    rows = [run(init, variant=variant) for init in ("random", "copy") for variant in ("relu", "ttt")]
    runs = frame([*rows, *(run(init, dataset="cifar10") for init in ("random", "copy"))])
    found = history(runs, {"random": [10.0, float("nan"), 30.0], "copy": [20.0, float("nan"), 40.0]})
    for figure in (curves(runs, found), savings(runs, found)):
        relu, ttt = figure.axes[::2], figure.axes[1::2]
        assert ["no runs" in texts(ax) for ax in ttt] == [True, True, False, False]
        assert not any("no runs" in texts(ax) for ax in relu)
        assert [list(ax.get_xticks()) for ax in ttt] == [list(ax.get_xticks()) for ax in relu]


def test_loss_and_accuracy_are_on_the_same_epochs():
    runs = frame([run("random", dataset=name) for name in ("pets", "cifar10")])
    found = history(runs, {"random": [float("nan")] * 14 + [10.0] + [float("nan")] * 14 + [30.0]})
    loss, top1, *_ = curves(runs, found).axes
    assert loss.get_xlim() == top1.get_xlim()
    assert list(loss.get_xticks()) == list(top1.get_xticks())
    assert loss.get_xlim()[0] < 1


@pytest.mark.parametrize("low", [1e-9, 1e-3, 0.02, 0.19, 0.37, 0.7, 0.97])
@pytest.mark.parametrize("decades", [0.05, 0.3, 0.41, 0.8, 1.05, 1.2, 3.0, 5.9, 8.0])
def test_a_log_axis_has_labels_enough_to_be_read_by(low, decades):
    high = low * 10**decades
    ticks = log_ticks(low, high).tick_values(low, high)
    assert 2 <= sum(low <= tick <= high for tick in ticks) <= 12


@pytest.mark.parametrize(
    ("level", "found"),
    [
        (5.0, Crossing(100, is_bound=True)),
        (10.0, Crossing(100, is_bound=True)),
        (25.0, Crossing(250, is_bound=False)),
        (30.0, Crossing(300, is_bound=False)),
        (31.0, None),
    ],
)
def test_a_crossing_is_on_the_straight_line_to_the_first_evaluation_that_reaches_it(level, found):
    assert crossing(pd.Series([10.0, 20.0, 30.0, 15.0], [100, 200, 300, 400]), level) == found


def test_savings_are_shares_of_randoms_images():
    inits = {
        "random": [10.0, 20.0, 30.0, 40.0],
        "copy": [10.0, 20.0, 30.0, 39.0],
        "mlpcopy": [20.0, 30.0, 50.0, 60.0],
        "fullcopy": [45.0, 50.0, 60.0, 70.0],
    }
    runs = frame([run(init) for init in inits])
    figure = savings(runs, history(runs, inits))
    curve, needed = figure.axes
    assert [tick.get_text() for tick in needed.get_yticklabels()] == ["Copy", "MLPCopy", "FullCopy"]
    assert texts(needed) == ["not reached", "62%", "\N{LESS-THAN OR EQUAL TO} 25%"]
    rings = [(line.get_xdata()[0], line.get_ydata()[0]) for line in curve.lines if len(line.get_xdata()) == 1]
    assert rings == [(250.0, 40.0)]
    assert needed.get_xlabel() == "Training images seen"


def test_savings_are_in_epochs_where_a_data_set_does_not_tell_its_size():
    inits = {"random": [10.0, 20.0], "copy": [20.0, 30.0]}
    runs = frame([run(init) for init in inits])
    figure = savings(runs, history(runs, inits).assign(images=float("nan")))
    assert figure.axes[-1].get_xlabel() == "Epochs"
    assert texts(figure.axes[-1]) == ["\N{LESS-THAN OR EQUAL TO} 50%"]


def test_other_losses_and_sources_leave_curves_alone():
    rows = [run("random"), run("copy-distill")]
    extra = [
        run("copy-distill", init="copy-map3e3", distill_target="map"),
        run("copy-distill", source="mae"),
    ]
    inits = {"random": [10.0, 20.0, 30.0], "copy-distill": [20.0, 30.0, 40.0], "copy-map3e3": [90.0, 91.0, 92.0]}
    for figure in HISTORY_FIGURES.values():
        runs, alone = frame([*rows, run("copy-distill"), *extra]).drop_duplicates("run"), frame(rows)
        with_all, without = figure(runs, history(runs, inits)), figure(alone, history(alone, inits))
        for ax, other in zip(with_all.axes, without.axes, strict=True):
            assert [list(line.get_ydata()) for line in ax.lines] == [list(line.get_ydata()) for line in other.lines]


@pytest.mark.parametrize("name", HISTORY_FIGURES)
@pytest.mark.parametrize("rows", PARTIAL.values(), ids=PARTIAL)
def test_partial_grids_are_drawn(name, rows, tmp_path):
    runs = frame(rows)
    found = history(runs, {init: [1.0, 2.0, 3.0] for init in runs["init"]})
    save(HISTORY_FIGURES[name](runs, found), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    save(throughput(runs), tmp_path / "figure.pdf")


@pytest.mark.parametrize("grid", ["demo", "losses", "quick"])
def test_a_grid_is_promised_the_curves_that_its_runs_give(grid, tmp_path):
    specs = expand(STUDY, grid).values()
    runs = grid_runs(tmp_path, grid)
    found = collect_history(tmp_path.rglob("metrics.json"))
    for name, figure in HISTORY_FIGURES.items():
        is_empty = any("No runs of these" in text for ax in figure(runs, found).axes for text in texts(ax))
        assert is_empty == (name not in history_figures_of(specs))


@pytest.mark.parametrize(
    ("inits", "promised"),
    [
        (["random"], ["curves"]),
        (["copy", "mlpcopy"], ["curves"]),
        (["random", "random-distill"], ["curves", "savings"]),
        (["pretrained"], []),
    ],
)
def test_savings_are_promised_where_something_stands_beside_random(inits, promised):
    specs = [spec for spec in expand(load_study(CONFIG), "paper").values() if spec.init.name in inits]
    assert history_figures_of(specs) == promised


def test_recipes_are_lines_over_all_images_seen():
    """Of the cells that several recipes trained; the reference is the data set's, whatever its own recipe."""
    runs = frame([run("fullcopy-distill", 60.0, seed) for seed in (0, 2)] + [run("copy", 60.0)])
    short = frame([run("fullcopy-distill", 60.0, seed, dataset="pets@short", recipe="short") for seed in (0, 2)])
    both = pd.concat([runs, short], ignore_index=True)
    found = history(both, {"fullcopy-distill": [10.0, 20.0, 40.0], "copy": [1.0, 1.0, 1.0]})
    figure = recipes(both, found[(found["epoch"] < 3) | ~found["run"].str.contains("short")])
    (ax,) = figure.axes
    lines = [line for line in ax.lines if len(line.get_xdata()) > 1]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [
        ([100.0, 200.0, 300.0], [11.0, 21.0, 41.0]),
        ([100.0, 200.0], [11.0, 21.0]),
    ]
    assert legend(figure)[-1] == "short"


def test_a_stage_before_training_counts_in_the_history(tmp_path):
    spec = next(spec for spec in expand(STUDY, "quick").values() if spec.recipe.align)
    path = write_metrics(tmp_path, spec, 80.0)
    metrics = json.loads(path.read_text())
    alignment = [{"epoch": epoch, "loss": 1.0} for epoch in (1, 2)]
    path.write_text(json.dumps(metrics | {"alignment": alignment}))
    found = collect_history([path])
    assert list(found["epoch"]) == [3, 4, 5, 6, 7]
    assert list(found["images"]) == [3000, 4000, 5000, 6000, 7000]
    assert collect([path]).loc[0, "best_epoch"] == 7


def test_a_history_has_a_row_an_epoch_and_survives_its_file(tmp_path):
    spec = next(iter(expand(STUDY, "demo").values()))
    found = collect_history([write_metrics(tmp_path, spec, 80.0)])
    assert list(found["epoch"]) == list(range(1, spec.recipe.epochs + 1))
    assert list(found["images"]) == [spec.dataset.train_size * epoch for epoch in found["epoch"]]
    assert list(found["top1"].dropna().index + 1) == [15, 30, 45]
    write_runs(found, tmp_path / "history.csv")
    pd.testing.assert_frame_equal(read_history(tmp_path / "history.csv"), found)


def test_a_figure_of_histories_without_their_table_is_told_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="figure 'curves' also needs a table of histories"):
        draw("curves", tmp_path / "runs.csv")


# --- throughput -------------------------------------------------------------------------------------------


def test_speed_is_the_tables_or_the_runs_median():
    rows = [run("random", variant="relu", **{SPEED: speed}) for speed in (10.0, 30.0, 90.0)]
    rows += [run("random", variant="ttt", **{SPEED: 5.0})]
    assert list(with_speed(frame(rows), None)[SPEED]) == [30.0, 30.0, 30.0, 5.0]
    table = rates(("relu", None, 3.0, 4.0), ("elu", None, 5.0, 6.0))
    table = table.model_copy(update={"rates": tuple(rate.model_copy(update={"size": "tiny"}) for rate in table.rates)})
    assert list(with_speed(frame(rows), table)[SPEED]) == [4.0, 4.0, 4.0]  # none of TTT's


def test_throughput_shows_random_and_the_best_of_each_operator():
    rows = [run("random", 60.0, seed) for seed in (0, 1)] + [run("copy", 70.0), run("fullcopy-distill", 80.0)]
    rows += [run("random", 65.0, variant="ttt", **{SPEED: 2.0}), run("fullcopy", 90.0, variant="softmax")]
    figure = throughput(frame(rows))
    (ax,) = figure.axes
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() in ("o", "s", "D")}
    assert dots == {(1.0, 60.0), (1.0, 80.0), (2.0, 65.0), (1.0, 90.0)}
    assert legend(figure) == ["ReLU", "TTT", "Softmax reference", "Random", "FullCopy w/ Distill"]


@pytest.mark.parametrize("speeds", [(3850.0, 8600.0), (700.0, 710.0), (1180.0, 830e3)])
def test_no_operator_is_left_of_the_first_speed_that_is_told(speeds):
    rows = [run("random", variant=name, **{SPEED: speed}) for name, speed in zip(("ttt", "relu"), speeds, strict=True)]
    (ax,) = throughput(frame(rows)).axes
    low, high = ax.get_xlim()
    told = [tick for tick in ax.get_xticks() if low * 0.999 <= tick <= high]
    assert min(told) <= min(speeds)
    assert len(told) >= 3


# --- blocks -----------------------------------------------------------------------------------------------


def blocks_frame(rows: list[dict]) -> pd.DataFrame:
    return pd.DataFrame(rows)[list(BLOCK_DTYPES)].astype(BLOCK_DTYPES)


def test_blocks_of_an_operator_that_a_data_set_lacks_have_no_runs():
    measured = {"trained": False, "block": 1, "error": 0.9}
    rows = [run(dataset="cifar10") | measured, run() | measured, run(variant="ttt") | measured]
    figure = blocks(blocks_frame(rows))
    assert [texts(ax) for ax in figure.axes] == [[], ["no runs"], ["no runs"], ["no runs"], [], [], *[["no runs"]] * 2]


def test_blocks_stand_beside_each_other_before_and_after_training():
    rows = [
        run(init) | {"trained": trained, "block": block, "error": error * block}
        for init, error in (("random", 1.0), ("copy-distill", 0.5))
        for trained in (False, True)
        for block in (1, 2, 3)
    ]
    figure = blocks(blocks_frame(rows))
    assert [ax.get_ylabel() for ax in figure.axes] == ["before training", "after training"]
    for ax in figure.axes:
        assert drawn(ax, COLORS["random"]) == [[1.0, 2.0, 3.0]]
        assert drawn(ax, COLORS["copy"]) == [[0.5, 1.0, 1.5]]
