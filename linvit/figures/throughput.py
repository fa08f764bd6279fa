"""Throughput against accuracy: images per second in evaluation."""

from itertools import product

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, NullFormatter

from linvit.figures.style import (
    AXIS,
    COLORS,
    ERROR_BAR,
    RANDOM,
    STYLE,
    abreast,
    finish,
    log_ticks,
    note_of,
    of_one_source,
    rows_of,
    runs_of,
    students,
)
from linvit.rates import Rates
from linvit.report import SHOWN_STARTS
from linvit.results import STARTS, VARIANTS, default_runs, in_order, label, references, sizes_in_order

SPEED = "eval_images_per_second"
DECADES = 0.55
"""That the x-axis spans at least, so that a few per cent do not look like much."""
WIDTH = 4.6
"""Inches, at least, for the legend."""
MARKERS = ("o", "s", "^", "v", "P", "X")
"""Of operators, in order; the source's is a diamond."""


def throughput(runs: pd.DataFrame, rates: Rates | None = None, source: str | None = None) -> Figure:
    """Top-1 against images per second in evaluation: a panel per data set, a marker per operator.

    A hollow marker is Random, a filled one the initialisation whose mean over seeds is best; the larger, the larger
    the model. Speeds are those of the table of rates, or else medians of what the runs measured, perhaps on different
    devices and beside others. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown = with_speed(pd.concat([students(runs, SHOWN_STARTS), references(runs)]), rates)
    best, looks = _best(shown), _looks(shown)
    with rc_context(STYLE):
        figure, axes = abreast(rows_of(shown, ["dataset"]))
        figure.set_size_inches(max(figure.get_figwidth(), WIDTH), figure.get_figheight() + 0.5)
        for row, ax in axes.items():
            of_row = runs_of(shown, row)
            _speed_axis(ax, of_row[SPEED])
            for _, run in best[best["dataset"] == row[0]].iterrows():
                _column(ax, run, of_row, looks[run["variant"], run["size"]])
        device = f"as measured on {rates.device}" if rates else "as the runs measured it"
        note = f"Speed of evaluation, {device}. Filled: each operator's best initialisation.\n{note_of(shown, source)}"
        finish(figure, _handles(best, shown, looks), "Top-1 accuracy (%)", note, has_reference=False)
    return figure


def with_speed(runs: pd.DataFrame, rates: Rates | None) -> pd.DataFrame:
    """The runs with one speed for each operator and size: their median or, of those that the table has, the table's."""
    if rates is None:
        return runs.assign(**{SPEED: runs.groupby(["size", "variant"])[SPEED].transform("median")})
    table = {(rate.size, rate.variant): rate.eval_images_per_second for rate in rates.rates}
    told = [table.get(key) for key in zip(runs["size"], runs["variant"], strict=True)]
    return runs.assign(**{SPEED: pd.Series(told, runs.index, dtype=float)}).dropna(subset=SPEED)


def _best(shown: pd.DataFrame) -> pd.DataFrame:
    """A row for each data set, size and operator: its best initialisation, the mean and spread of that one."""
    cell = ["dataset", "size", "variant"]
    means = shown.groupby([*cell, "start", "distill"])
    means = means.agg(top1=("top1", "mean"), std=("top1", "std"), **{SPEED: (SPEED, "mean")}).reset_index()
    return means.loc[means.groupby(cell)["top1"].idxmax()]


def _looks(shown: pd.DataFrame) -> dict[tuple[str, str], dict]:
    """A marker by operator and size."""
    variants = in_order(shown.loc[shown["variant"] != "softmax", "variant"], VARIANTS)
    markers = {variant: MARKERS[i % len(MARKERS)] for i, variant in enumerate(variants)} | {"softmax": "D"}
    return {
        (variant, size): {"marker": marker, "markersize": 4.5 + 1.5 * i, "linestyle": "none"}
        for variant, marker in markers.items()
        for i, size in enumerate(sizes_in_order(shown))
    }


def _column(ax: Axes, best: pd.Series, of_row: pd.DataFrame, look: dict) -> None:
    is_reference = best["variant"] == "softmax"
    of_cell = of_row[(of_row["size"] == best["size"]) & (of_row["variant"] == best["variant"])]
    random = of_cell.loc[(of_cell["start"] == "random") & ~of_cell["distill"], "top1"]
    x, color = best[SPEED], COLORS["softmax" if is_reference else best["start"]]
    if not is_reference and len(random):
        ax.plot([x, x], [random.mean(), best["top1"]], color=AXIS, linewidth=1.2, zorder=1)
        ax.errorbar(x, random.mean(), random.std(), **ERROR_BAR, ecolor=COLORS["random"])
        ax.plot(x, random.mean(), **look, color=COLORS["random"], markerfacecolor="white")
    if is_reference or (best["start"], best["distill"]) != RANDOM:
        ax.errorbar(x, best["top1"], best["std"], **ERROR_BAR, ecolor=color)
        ax.plot(x, best["top1"], **look, color=color, zorder=3)


def _speed_axis(ax: Axes, speeds: pd.Series) -> None:
    ax.set_xscale("log")
    middle = (speeds.min() * speeds.max()) ** 0.5
    span = max(speeds.max() / speeds.min() * 1.6, 10**DECADES) ** 0.5
    ticks = log_ticks(middle / span, middle * span)
    below = max(tick for tick in ticks.tick_values(speeds.min(), speeds.max()) if tick <= speeds.min())
    ax.set_xlim(min(middle / span, below), middle * span)  # no operator is left of the first label
    ax.xaxis.set_major_locator(ticks)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("Images per second")


def _handles(best: pd.DataFrame, shown: pd.DataFrame, looks: dict[tuple[str, str], dict]) -> list[Line2D]:
    """Operators by marker, then initialisations by colour."""
    drawn = best[best["variant"] != "softmax"]
    found = set(drawn[["start", "distill"]].itertuples(index=False, name=None))
    lines = [line for line in product(in_order(drawn["start"], STARTS), (False, True)) if line in found - {RANDOM}]
    markers = {variant: look["marker"] for (variant, _), look in looks.items()}
    handles = [
        _handle(markers[variant], "#777777", VARIANTS.get(variant, variant))
        for variant in in_order(drawn["variant"], VARIANTS)
    ]
    if len(drawn) < len(best):
        handles.append(_handle("D", COLORS["softmax"], "Softmax reference"))
    if RANDOM in set(shown[["start", "distill"]].itertuples(index=False, name=None)):
        handles.append(_handle("o", COLORS["random"], "Random", markerfacecolor="white"))
    return handles + [_handle("o", COLORS[start], label(start, distill)) for start, distill in lines]


def _handle(marker: str, color: str, text: str, **look: str) -> Line2D:
    return Line2D([], [], marker=marker, markersize=5, color=color, linestyle="none", label=text, **look)
