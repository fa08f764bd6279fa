"""What the figures share: colours, panels, the reference's line, legends and notes, and how a figure is saved.

Figures are built without pyplot, so drawing one leaves no state behind. They are made for a page's width of
7 inches.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator

from linvit.config import UserError
from linvit.files import replacing
from linvit.report import most_used_source
from linvit.results import DATASETS, NO_SOURCE, VARIANTS, in_order, sizes_in_order

# Okabe and Ito's colours, which stay apart under colour-vision deficiency. In grey, markers, hatches and names tell.
COLORS = {
    "random": "#56B4E9",
    "mimetic": "#E69F00",
    "impulse": "#CC79A7",
    "copy": "#D55E00",
    "mlpcopy": "#0072B2",
    "fullcopy": "#009E73",
    "softmax": "#333333",
}
"""One colour per initialisation, in every figure."""
INK, AXIS, GRID, NOTE, ALARM = "#262626", "#cccccc", "#e4e4e4", "#555555", "#d00000"
STYLE = sns.axes_style("whitegrid") | {
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": AXIS,
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
REFERENCE = {"color": COLORS["softmax"], "linestyle": "--", "linewidth": 1.0}
ERROR_BAR = {"linestyle": "none", "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8}
LEVEL = {"color": "#777777", "linewidth": 0.7, "linestyle": ":"}
"""A value that lines are to be seen beside."""
RANDOM = ("random", False)
"""The initialisation that all others are compared with, and that it is not distilled."""
ABREAST = 3
"""Panels in a line, where they have no columns of their own."""

Row = tuple[str, ...]
"""A data set, or a data set and a size."""


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as png (200 dpi) or pdf, by suffix; the same figure gives the same bytes.

    Raises:
        UserError: another suffix.
    """
    # Neither a date nor the writer's version belongs to the picture.
    metadata = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Creator": None, "Producer": None}}
    suffix = Path(path).suffix
    if suffix not in metadata:
        raise UserError(f"{path}: no format for suffix {suffix!r}; allowed: {', '.join(metadata)}")
    with rc_context(STYLE), replacing(path) as temporary:
        figure.savefig(temporary, dpi=200, metadata=metadata[suffix])


def of_one_source(runs: pd.DataFrame, source: str | None) -> tuple[pd.DataFrame, str]:
    """Runs of one source (the most used one unless named) and of none, and the source's name.

    Raises:
        UserError: no run has the named source.
    """
    if source and source not in set(runs["source"]):
        raise UserError(f"no run has the source {source!r}; allowed: {', '.join(sorted(set(runs['source'])))}")
    source = source or most_used_source(runs.to_dict("records"))
    return runs[runs["source"].isin([source, NO_SOURCE])], source


def students(runs: pd.DataFrame, starts: Sequence[str]) -> pd.DataFrame:
    return runs[(runs["variant"] != "softmax") & runs["start"].isin(starts)]


def rows_of(runs: pd.DataFrame, keys: Sequence[str] = ("dataset", "size")) -> list[Row]:
    """The distinct data sets, or data sets and sizes, in order."""
    orders = {"dataset": in_order(runs["dataset"], DATASETS), "size": sizes_in_order(runs)}
    return sorted(
        runs[list(keys)].drop_duplicates().itertuples(index=False, name=None),
        key=lambda row: [orders[key].index(value) for key, value in zip(keys, row, strict=True)],
    )


def runs_of(runs: pd.DataFrame, row: Row) -> pd.DataFrame:
    of_row = runs[runs["dataset"] == row[0]]
    return of_row if len(row) == 1 else of_row[of_row["size"] == row[1]]


def panels(
    rows: Sequence[Row], variants: Sequence[str], what: str = "initialisations"
) -> tuple[Figure, dict[tuple[Row, str], Axes]]:
    """A line of panels per row and a column per operator; the rows of a single operator stand abreast.

    `what` is told where there are none.
    """
    if len(variants) == 1 and len(rows) > 1:
        figure, axes = abreast(rows)
        return figure, {(row, variants[0]): ax for row, ax in axes.items()}
    shape = max(len(rows), 1), max(len(variants), 1)
    height = 1.5 if len(rows) <= 4 else 1.0
    figure = _figure(1.0 + 1.2 * shape[1], 1.2 + height * shape[0])
    axes = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
    for ax, variant in zip(axes[0], variants, strict=False):
        ax.set_title(VARIANTS.get(variant, variant))
    for ax, row in zip(axes[:, 0], rows, strict=False):
        ax.set_ylabel(name_of(row, rows, "\n"))
    if not rows:
        say_empty(axes[0, 0], what)
    return figure, {(row, variant): axes[i, j] for i, row in enumerate(rows) for j, variant in enumerate(variants)}


def abreast(rows: Sequence[Row]) -> tuple[Figure, dict[Row, Axes]]:
    """A panel per row, `ABREAST` in a line, each with a scale of its own."""
    n = max(len(rows), 1)
    columns, lines = min(n, ABREAST), -(-n // ABREAST)
    figure = _figure(0.4 + 2.2 * columns, 1.0 + 1.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, row in zip(axes, rows, strict=False):
        ax.set_title(name_of(row, rows, ", "))
    for ax in axes[n:]:
        ax.set_axis_off()
    if not rows:
        say_empty(axes[0])
    return figure, dict(zip(rows, axes, strict=False))


def reference_line(ax: Axes, reference: pd.DataFrame) -> None:
    """The reference's mean, as in `mean_line`."""
    mean_line(ax.axhline, ax.axhspan, reference, REFERENCE)


def mean_line(line: Callable, span: Callable, runs: pd.DataFrame, style: dict) -> None:
    """The mean of some runs, within a band of one standard deviation where there are several seeds.

    `line` and `span` draw along one axis: `ax.axhline` and `ax.axhspan`, or `ax.axvline` and `ax.axvspan`.
    """
    if runs.empty:
        return
    mean, std = runs["top1"].mean(), runs["top1"].std()
    line(mean, **style)
    if len(runs) > 1:
        span(mean - std, mean + std, color=style["color"], alpha=0.12, linewidth=0)


def mean_curve(ax: Axes, x: pd.Index, spread: pd.DataFrame, look: Mapping[str, Any], **marker: Any) -> None:
    """Means as a line, in a band of one standard deviation to either side: the columns mean and std, a row per x."""
    ax.plot(x, spread["mean"], **look, **marker)
    low, high = spread["mean"] - spread["std"], spread["mean"] + spread["std"]
    ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def ticks(ax: Axes, names: Sequence[str], *, is_empty: bool) -> None:
    """Names along x, turned where they are long."""
    is_long = max(map(len, names), default=0) > 6
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
    ax.set_xticks(range(len(names)), names, **turned)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, len(names) - 0.4)
    if is_empty:
        say_no_runs(ax)


def log_ticks(low: float, high: float) -> Locator:
    """Ticks that a log axis over this span can be read by: at least two, and not so many that labels meet."""
    decades = math.log10(high / low)
    if decades < 0.4:
        return MaxNLocator(4)
    return LogLocator(subs=(1, 2, 3, 4, 6, 8) if decades < 1.1 else (1, 3) if decades < 6 else (1,))


def tint(color: str, lightness: float) -> tuple[float, ...]:
    """A colour mixed with white."""
    return tuple(lightness + (1 - lightness) * channel for channel in to_rgb(color))


def note_of(shown: pd.DataFrame, source: str, what: str = "mean ± standard deviation") -> str:
    """The source, the size where there is but one, and how many seeds a mean is of."""
    sizes = shown["size"].unique()
    size = f"; size: {sizes[0]}" if len(sizes) == 1 else ""
    counts = shown.groupby(["dataset", "size", "variant", "init", "source"])["seed"].nunique()
    if counts.empty or counts.max() == 1:
        return f"Source: {source}{size}; one seed (n = 1)"
    spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return f"Source: {source}{size}; {what} over n = {spread} seeds"


def finish(figure: Figure, handles: Sequence[Artist], y_label: str, note: str, *, has_reference: bool) -> None:
    """The legend above the panels, the note below."""
    if not handles:
        return
    if has_reference:
        handles = [*handles, Line2D([], [], **REFERENCE, label="Softmax reference")]
    figure.supylabel(y_label, fontsize=8)
    width = figure.get_figwidth()
    note = "\n".join(textwrap.fill(line, int(16 * width)) for line in note.splitlines())
    figure.supxlabel(note, fontsize=6.5, color=NOTE)
    inches = sum(0.5 + 0.065 * len(handle.get_label()) for handle in handles)
    lines = math.ceil(inches / width)
    figure.legend(handles=handles, loc="outside upper center", ncols=math.ceil(len(handles) / lines))


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(max(width, 3.4), height), layout="constrained")


def name_of(row: Row, rows: Sequence[Row], separator: str) -> str:
    """A row's title; its size is left to the note where all have the same."""
    dataset, *size = row
    is_told = size and len({row[1] for row in rows}) > 1
    return separator.join([DATASETS.get(dataset, dataset), *(size if is_told else [])])


def say_no_runs(ax: Axes) -> None:
    """Said in a panel whose neighbours have some."""
    ax.text(0.5, 0.5, "no runs", ha="center", color="#888888", transform=ax.transAxes)


def say_empty(ax: Axes, what: str = "initialisations") -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, f"No runs of these {what}.", ha="center", transform=ax.transAxes)
