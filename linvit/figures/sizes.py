"""Figure 2: initialisations of the attention alone, across model sizes [arXiv:2609.35745, Fig. 2]."""

from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linvit.figures.style import (
    COLORS,
    ERROR_BAR,
    REFERENCE,
    STYLE,
    finish,
    note_of,
    of_one_source,
    panels,
    reference_line,
    rows_of,
    runs_of,
    students,
    ticks,
)
from linvit.report import ATTENTION_ONLY
from linvit.results import MISSING, STARTS, VARIANTS, default_runs, in_order, label, references, sizes_in_order

MARKERS = {"random": "o", "mimetic": "s", "impulse": "^", "copy": "D"}


def fig2(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Attention-only initialisations and the Softmax reference; a panel per operator and data set.

    Across several sizes, a line joins one initialisation's means and the markers grow with the model; with a
    single size, x is the initialisation and small dots are the seeds. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown, reference = students(runs, ATTENTION_ONLY), references(runs)
    shown = shown[~shown["distill"]]
    sizes, starts = sizes_in_order(shown), in_order(shown["start"], STARTS)
    with rc_context(STYLE):
        figure, axes = panels(rows_of(shown, ["dataset"]), in_order(shown["variant"], VARIANTS))
        for (row, variant), ax in axes.items():
            of_row = runs_of(shown, row)
            panel, of_reference = of_row[of_row["variant"] == variant], runs_of(reference, row)
            if len(sizes) > 1:
                _across_sizes(ax, panel, of_reference, sizes, starts)
                ticks(ax, sizes, is_empty=panel.empty)
            else:
                _across_seeds(ax, panel, of_reference, starts)
                ticks(ax, [label(start) for start in starts], is_empty=panel.empty)
        handles = [Line2D([], [], color=COLORS[start], marker=MARKERS[start], label=label(start)) for start in starts]
        note = note_of(shown, source)
        finish(figure, handles, "Top-1 accuracy (%)", note, has_reference=not reference.empty)
    return figure


def _across_sizes(ax: Axes, panel: pd.DataFrame, reference: pd.DataFrame, sizes: list[str], starts: list[str]) -> None:
    """Means by model size, joined; initialisations stand a little apart so that none hides another."""
    for i, start in enumerate(starts):
        top1 = panel[panel["start"] == start].groupby("size")["top1"].agg(["mean", "std"])
        places = [sizes.index(size) for size in top1.index]
        top1 = top1.assign(x=places).sort_values("x")
        x = top1["x"] + 0.16 * (i - (len(starts) - 1) / 2)
        ax.plot(x, top1["mean"], color=COLORS[start], linewidth=0.9)
        _mean(ax, x, top1["mean"], top1["std"], start, area=16 + 14 * top1["x"])
    top1 = reference[reference["size"].isin(sizes)].groupby("size")["top1"].mean()
    top1 = top1.reindex([size for size in sizes if size in top1.index])
    ax.plot([sizes.index(size) for size in top1.index], top1, **REFERENCE, marker=".", markersize=4)


def _across_seeds(ax: Axes, panel: pd.DataFrame, reference: pd.DataFrame, starts: list[str]) -> None:
    """Means by initialisation, with each seed as a small dot beside it."""
    for x, start in enumerate(starts):
        top1 = panel.loc[panel["start"] == start, "top1"]
        if top1.empty:
            ax.text(x, 0.02, MISSING, ha="center", color="#888888", transform=ax.get_xaxis_transform())
            continue
        if len(top1) > 1:
            ax.scatter([x + 0.06 * len(starts)] * len(top1), top1, 5, COLORS[start], alpha=0.8, linewidths=0)
        _mean(ax, x, top1.mean(), top1.std(), start, area=24)
    reference_line(ax, reference)


def _mean(ax: Axes, x: Any, mean: Any, std: Any, start: str, area: Any) -> None:
    """Markers with error bars; a standard deviation of one seed is NaN, which draws none."""
    color = COLORS[start]
    ax.errorbar(x, mean, std, **ERROR_BAR, ecolor=color)
    ax.scatter(x, mean, area, color, marker=MARKERS[start], zorder=3, edgecolors="white", linewidths=0.4)
