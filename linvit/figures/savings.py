"""How much training an initialisation saves: accuracy against training images seen."""

from dataclasses import dataclass

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from linvit.figures.curves import DETAILED, by_images, handles_of, lines_of, look_of, measure_panels, trained
from linvit.figures.style import LEVEL, RANDOM, STYLE, finish, note_of, of_one_source, rows_of, runs_of, say_no_runs
from linvit.results import VARIANTS, default_runs, in_order, label

NOTE = (
    "Rings: as accurate as Random at its end (dotted), in % of Random's training; "
    "lines between evaluations are straight.\n"
    "\N{LESS-THAN OR EQUAL TO}: at its first evaluation it was as accurate already."
)


@dataclass(frozen=True)
class Crossing:
    """Where a curve reaches an accuracy."""

    images: float
    is_bound: bool
    """Whether it was there when it was first evaluated, and may have been before."""


def savings(runs: pd.DataFrame, history: pd.DataFrame, source: str | None = None) -> Figure:
    """Top-1 by training images seen, and the images that each initialisation needs to do as well as Random at its end.

    A column per operator; lines and bars are of means over seeds. Where a data set does not tell its size, epochs
    stand for images. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown, seen = by_images(_beside_random(trained(runs, history).dropna(subset="top1")))
    rows, variants = rows_of(shown), in_order(shown["variant"], VARIANTS)
    measures = ["top1", "needed"] if len(rows) <= DETAILED else ["needed"]
    with rc_context(STYLE):
        figure, axes = measure_panels(rows, variants, measures, width=1.75, low=0.4 + 0.12 * len(lines_of(shown)))
        for row in rows:
            _row(runs_of(shown, row), {key[1:]: ax for key, ax in axes.items() if key[0] == row})
        for ax in figure.axes[-len(variants) :] if rows else ():
            ax.set_xlabel(seen)
        note = note_of(shown.drop_duplicates("run"), source, "means")
        finish(figure, handles_of(shown), "", f"{NOTE}\n{note}", has_reference=False)
    return figure


def crossing(curve: pd.Series, level: float) -> Crossing | None:
    """Where a curve (accuracies, indexed by images) first reaches a level, on straight lines; None if it never does."""
    reached = curve.index[curve >= level]
    if not len(reached):
        return None
    place = curve.index.get_loc(reached[0])
    if place == 0:
        return Crossing(reached[0], is_bound=True)
    before, after = curve.index[place - 1], reached[0]
    part = (level - curve[before]) / (curve[after] - curve[before])
    return Crossing(before + part * (after - before), is_bound=False)


def _beside_random(shown: pd.DataFrame) -> pd.DataFrame:
    """Without the cells that have no Random, or nothing else."""
    cell = [shown[key] for key in ("dataset", "size", "variant")]
    is_random = (shown["start"] == "random") & ~shown["distill"]
    has_both = is_random.groupby(cell).transform("any") & (~is_random).groupby(cell).transform("any")
    return shown[has_both.astype(bool)]


def _row(of_row: pd.DataFrame, axes: dict[tuple[str, str], Axes]) -> None:
    """One data set and size: a panel, or two, for each operator."""
    lines = [line for line in lines_of(of_row) if line != RANDOM]
    for variant, panel in of_row.groupby("variant"):
        means = {line: _mean(panel, *line) for line in lines_of(panel)}
        end = means[RANDOM].index[-1]
        found = {line: crossing(curve, means[RANDOM].iloc[-1]) for line, curve in means.items() if line != RANDOM}
        if ax := axes.get((variant, "top1")):
            _curves(ax, means, found)
        _bars(axes[variant, "needed"], lines, found, end)
    for (variant, _), ax in axes.items():
        if variant not in set(of_row["variant"]):
            say_no_runs(ax)
            ax.grid(False)
        ax.set_xlim(0, of_row["images"].max() * 1.3)
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _mean(panel: pd.DataFrame, start: str, distill: bool) -> pd.Series:
    of_line = panel[(panel["start"] == start) & (panel["distill"] == distill)]
    return of_line.groupby("images")["top1"].mean()


def _curves(ax: Axes, means: dict[tuple[str, bool], pd.Series], found: dict[tuple[str, bool], Crossing | None]) -> None:
    level = means[RANDOM].iloc[-1]
    ax.axhline(level, **LEVEL)
    for line, curve in means.items():
        marker = {"marker": "o", "markersize": 2.5} if len(curve) <= 15 else {}
        ax.plot(curve.index, curve, **look_of(*line), **marker)
    for line, reached in found.items():
        if reached and not reached.is_bound:
            ring = {"markersize": 5, "markerfacecolor": "white", "markeredgecolor": look_of(*line)["color"]}
            ax.plot(reached.images, level, marker="o", **ring, zorder=4)


def _bars(ax: Axes, lines: list[tuple[str, bool]], found: dict[tuple[str, bool], Crossing | None], end: float) -> None:
    """A line per initialisation from no images to those it needs, the share of Random's behind it."""
    ax.axvline(end, **LEVEL)
    for y, line in enumerate(lines):
        if line not in found:
            continue
        reached, look = found[line], look_of(*line)
        if reached is None:
            _beside(ax, 0, y, "not reached")
            continue
        face = look["color"] if reached.is_bound else "white"
        ax.plot([0, reached.images], [y, y], **look)
        ax.plot(reached.images, y, marker="<" if reached.is_bound else "o", markersize=5, color=look["color"], mfc=face)
        bound = "\N{LESS-THAN OR EQUAL TO} " if reached.is_bound else ""
        _beside(ax, reached.images, y, f"{bound}{reached.images / end:.0%}")
    ax.set_yticks(range(len(lines)), [label(*line) for line in lines])
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.grid(False)


def _beside(ax: Axes, x: float, y: float, text: str) -> None:
    # A ground of its own, so that the dotted line does not run through it.
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    style = {"va": "center", "fontsize": 6.5, "bbox": ground}
    ax.annotate(text, (x, y), (5, 0), textcoords="offset points", **style)
