"""Throughput against accuracy: images per second in evaluation."""

from itertools import product

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from linvit.figures.style import (
    AXIS,
    COLORS,
    ERROR_BAR,
    GRID,
    STYLE,
    abreast,
    finish,
    note_of,
    of_one_source,
    rows_of,
    runs_of,
    students,
)
from linvit.rates import Rates
from linvit.report import SHOWN_STARTS
from linvit.results import STARTS, VARIANTS, default_runs, in_order, label, references

SPEED = "eval_images_per_second"
RANDOM = ("random", False)
DECADES = 0.55
"""That the x-axis spans at least, so that a few per cent do not look like much."""
NAME = 0.16
"""The part of the x-axis that an operator's name takes; with a size, twice as much."""


def throughput(runs: pd.DataFrame, rates: Rates | None = None, source: str | None = None) -> Figure:
    """Top-1 against images per second in evaluation: a panel per data set, an operator (and size) per column.

    From a hollow dot, Random, to a filled one, the initialisation whose mean over seeds is best. Speeds are those of
    the table of rates where it has them, else medians of what the runs measured, perhaps on different devices and
    beside others. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown = with_speed(pd.concat([students(runs, SHOWN_STARTS), references(runs)]), rates)
    best = _best(shown)
    with rc_context(STYLE):
        figure, axes = abreast(rows_of(shown, ["dataset"]))
        figure.set_figheight(figure.get_figheight() + 0.6)  # for the names
        for row, ax in axes.items():
            of_row = runs_of(shown, row)
            _speed_axis(ax, of_row[SPEED])
            for _, run in best[best["dataset"] == row[0]].iterrows():
                _column(ax, run, of_row)
            _names(ax, best[best["dataset"] == row[0]])
        device = f"as measured on {rates.device}" if rates else "as the runs measured it"
        note = f"Speed of evaluation, {device}. Filled: each operator's best initialisation.\n{note_of(shown, source)}"
        finish(figure, _handles(best, shown), "Top-1 accuracy (%)", note, has_reference=False)
    return figure


def with_speed(runs: pd.DataFrame, rates: Rates | None) -> pd.DataFrame:
    """The runs with one speed for each operator and size: the table's, else their median."""
    table = {(rate.size, rate.variant): rate.eval_images_per_second for rate in (rates.rates if rates else ())}
    told = [table.get(key) for key in zip(runs["size"], runs["variant"], strict=True)]
    measured = runs.groupby(["size", "variant"])[SPEED].transform("median")
    return runs.assign(**{SPEED: pd.Series(told, runs.index, dtype=float).fillna(measured)})


def _best(shown: pd.DataFrame) -> pd.DataFrame:
    """A row for each data set, size and operator: its best initialisation, the mean and spread of that one."""
    cell = ["dataset", "size", "variant"]
    means = shown.groupby([*cell, "start", "distill"])
    means = means.agg(top1=("top1", "mean"), std=("top1", "std"), **{SPEED: (SPEED, "mean")}).reset_index()
    return means.loc[means.groupby(cell)["top1"].idxmax()]


def _column(ax: Axes, best: pd.Series, of_row: pd.DataFrame) -> None:
    is_reference = best["variant"] == "softmax"
    of_cell = of_row[(of_row["size"] == best["size"]) & (of_row["variant"] == best["variant"])]
    random = of_cell.loc[(of_cell["start"] == "random") & ~of_cell["distill"], "top1"]
    x, look = best[SPEED], _look("softmax" if is_reference else best["start"])
    ax.axvline(x, color=GRID, linewidth=0.6, zorder=0)
    if not is_reference and len(random):
        ax.plot([x, x], [random.mean(), best["top1"]], color=AXIS, linewidth=1.6, zorder=1)
        ax.errorbar(x, random.mean(), random.std(), **ERROR_BAR, ecolor=COLORS["random"])
        ax.plot(x, random.mean(), **_look("random") | {"markerfacecolor": "white"})
    if is_reference or (best["start"], best["distill"]) != RANDOM:
        ax.errorbar(x, best["top1"], best["std"], **ERROR_BAR, ecolor=look["color"])
        ax.plot(x, best["top1"], **look, zorder=3)


def _names(ax: Axes, best: pd.DataFrame) -> None:
    """Operators above the panel, one over the other where their columns are close."""
    has_sizes = len(set(best["size"])) > 1
    ends: list[float] = []
    for _, run in best.sort_values(SPEED).iterrows():
        name = VARIANTS.get(run["variant"], run["variant"]) + (f" {run['size']}" if has_sizes else "")
        place = ax.transAxes.inverted().transform(ax.transData.transform((run[SPEED], 0)))[0]
        level = next((i for i, end in enumerate(ends) if end <= place), len(ends))
        ends[level : level + 1] = [place + NAME * (1 + has_sizes)]
        at = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
        ax.annotate(name, (run[SPEED], 1), xytext=(0, 3 + 8 * level), **at)
    ax.set_title(ax.get_title(), pad=6 + 8 * max(len(ends), 1))


def _look(start: str) -> dict:
    marker = "D" if start == "softmax" else "o"
    return {"marker": marker, "markersize": 5, "color": COLORS[start], "linestyle": "none"}


def _speed_axis(ax: Axes, speeds: pd.Series) -> None:
    ax.set_xscale("log")
    middle = (speeds.min() * speeds.max()) ** 0.5
    span = max(speeds.max() / speeds.min() * 1.6, 10**DECADES) ** 0.5
    ax.set_xlim(middle / span, middle * span)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("Images per second")
    ax.margins(y=0.12)


def _handles(best: pd.DataFrame, shown: pd.DataFrame) -> list[Line2D]:
    drawn = best[best["variant"] != "softmax"]
    found = set(drawn[["start", "distill"]].itertuples(index=False, name=None))
    lines = [line for line in product(in_order(drawn["start"], STARTS), (False, True)) if line in found - {RANDOM}]
    handles = [Line2D([], [], **_look(start), label=label(start, distill)) for start, distill in lines]
    if RANDOM in set(shown[["start", "distill"]].itertuples(index=False, name=None)):
        handles.insert(0, Line2D([], [], **_look("random") | {"markerfacecolor": "white"}, label="Random"))
    if len(drawn) < len(best):
        handles.append(Line2D([], [], **_look("softmax"), label="Softmax reference"))
    return handles
