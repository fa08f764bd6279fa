"""The paper's Figures 2 and 4 (with A and B), drawn from a runs frame [arXiv:2609.35745, Figs. 2, 4, A, B].

Figures are built without pyplot, so drawing one leaves no state behind.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from linvit.config import UserError
from linvit.files import replacing
from linvit.results import (
    DATASETS,
    MINUS,
    MISSING,
    NO_SOURCE,
    STARTS,
    VARIANTS,
    default_runs,
    in_order,
    label,
    references,
    sizes_in_order,
)

# Okabe and Ito's colours, which stay apart under colour-vision deficiency.
COLORS = {
    "random": "#56B4E9",
    "mimetic": "#E69F00",
    "impulse": "#CC79A7",
    "copy": "#D55E00",
    "mlpcopy": "#0072B2",
    "fullcopy": "#009E73",
    "softmax": "#333333",
}
MARKERS = {"random": "o", "mimetic": "s", "impulse": "^", "copy": "D"}
ATTENTION_ONLY = ("random", "mimetic", "impulse", "copy")
COMPONENTS = ("random", "copy", "mlpcopy", "fullcopy")
STYLE = sns.axes_style("whitegrid") | {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
REFERENCE = {"color": COLORS["softmax"], "linestyle": "--", "linewidth": 1.2}
ERROR_BAR = {"linestyle": "none", "elinewidth": 1.0, "capsize": 2}
BLOCKS = {
    "gain": {"hatch": "/////", "lightness": 0.65},
    "loss": {"hatch": "xxxxx", "lightness": 1.0},
    "only": {"hatch": ".....", "lightness": 0.85},
}
"""How the block of Distill is drawn: a gain above the bar, a loss within it, or w/ Distill with no run without."""
LOSS_COLOR = "#A00000"
BLOCK_NAMES = {"gain": "gain with Distill", "loss": "loss with Distill", "only": "w/ Distill, no run without"}


def fig2(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Attention-only initialisations and the Softmax reference; a panel per operator and data set.

    Across several sizes, a line joins one initialisation's means and the markers grow with the model; with a
    single size, x is the initialisation and small dots are the seeds. `source` defaults to the most used one.
    """
    runs, note = _of_one_source(runs, source)
    students, reference = _students(runs, ATTENTION_ONLY), references(runs)
    students = students[~students["distill"]]
    sizes, starts = sizes_in_order(students), in_order(students["start"], STARTS)
    draw, ticks = (_across_sizes, sizes) if len(sizes) > 1 else (_across_seeds, [label(start) for start in starts])
    with rc_context(STYLE):
        figure, panels = _panels(students, ("dataset",))
        for (dataset, variant), ax in panels.items():
            panel = students[(students["dataset"] == dataset) & (students["variant"] == variant)]
            draw(ax, panel, reference[reference["dataset"] == dataset], sizes, starts)
            _ticks(ax, ticks, is_empty=panel.empty)
        handles = [Line2D([], [], color=COLORS[start], marker=MARKERS[start], label=label(start)) for start in starts]
        _finish(figure, handles, reference, "Top-1 accuracy (%)", f"{note}; {_seeds_note(students)}")
    return figure


def fig4(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """What each copied component brings, and the gain with Distill on top; a panel per operator, data set, size.

    Numbers over the bars are the gains with Distill in points. `source` defaults to the most used one.
    """
    runs, note = _of_one_source(runs, source)
    students, reference = _students(runs, COMPONENTS), references(runs)
    starts = in_order(students["start"], STARTS)
    drawn = set()
    with rc_context(STYLE):
        figure, panels = _panels(students, ("dataset", "size"))
        for (dataset, size, variant), ax in panels.items():
            row, row_reference = (f[(f["dataset"] == dataset) & (f["size"] == size)] for f in (students, reference))
            panel = row[row["variant"] == variant]
            ax.set_ylim(_bar_limits(pd.concat([row, row_reference])["top1"]))
            drawn |= _bars(ax, panel, starts)
            _reference_line(ax, row_reference)
            _ticks(ax, [label(start) for start in starts], is_empty=panel.empty)
        handles = [Patch(facecolor="#888888", label="without Distill")] if starts else []
        handles += [Patch(**_block("#888888", kind), label=BLOCK_NAMES[kind]) for kind in BLOCKS if kind in drawn]
        note = (
            "Bars start at each axis' lower end, not at zero; numbers are the gains with Distill in points.\n"
            f"{note}; {_seeds_note(students)}"
        )
        _finish(figure, handles, reference, "Top-1 accuracy (%), truncated axis", note)
    return figure


FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {"fig2": fig2, "fig4": fig4}


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


def _of_one_source(runs: pd.DataFrame, source: str | None) -> tuple[pd.DataFrame, str]:
    """Default runs of one source and of none, and a note that names it."""
    runs = default_runs(runs)
    used = runs.loc[runs["source"] != NO_SOURCE, "source"]
    source = source or (NO_SOURCE if used.empty else used.value_counts().index[0])
    return runs[runs["source"].isin([source, NO_SOURCE])], f"Source: {source}"


def _students(runs: pd.DataFrame, starts: Sequence[str]) -> pd.DataFrame:
    return runs[(runs["variant"] != "softmax") & runs["start"].isin(starts)]


def _panels(students: pd.DataFrame, row_keys: Sequence[str]) -> tuple[Figure, dict[tuple, Axes]]:
    """A figure with a row per value of `row_keys` and a column per operator; its panels by (*row, variant)."""
    orders = {"dataset": in_order(students["dataset"], DATASETS), "size": sizes_in_order(students)}
    rows = sorted(
        students[list(row_keys)].drop_duplicates().itertuples(index=False, name=None),
        key=lambda row: [orders[key].index(value) for key, value in zip(row_keys, row, strict=True)],
    )
    variants = in_order(students["variant"], VARIANTS)
    shape = (max(len(rows), 1), max(len(variants), 1))
    height = 1.7 if len(rows) <= 4 else 1.3
    figure = Figure(figsize=(1.0 + 1.7 * max(shape[1], 3), 1.3 + height * shape[0]), layout="constrained")
    axes = figure.subplots(*shape, sharex=True, sharey="row", squeeze=False)
    for ax, variant in zip(axes[0], variants, strict=False):
        ax.set_title(VARIANTS.get(variant, variant))
    for ax, (dataset, *size) in zip(axes[:, 0], rows, strict=False):
        ax.set_ylabel("\n".join([DATASETS.get(dataset, dataset), *size]))
    if not rows:
        axes[0, 0].set_axis_off()
        axes[0, 0].text(0.5, 0.5, "No runs of these initialisations.", ha="center", transform=axes[0, 0].transAxes)
    return figure, {(*row, variant): axes[i, j] for i, row in enumerate(rows) for j, variant in enumerate(variants)}


def _across_sizes(ax: Axes, panel: pd.DataFrame, reference: pd.DataFrame, sizes: list[str], starts: list[str]) -> None:
    """Means by model size, joined; initialisations stand a little apart so that none hides another."""
    for i, start in enumerate(starts):
        top1 = panel[panel["start"] == start].groupby("size")["top1"].agg(["mean", "std"])
        places = [sizes.index(size) for size in top1.index]
        top1 = top1.assign(x=places).sort_values("x")
        x = top1["x"] + 0.16 * (i - (len(starts) - 1) / 2)
        ax.plot(x, top1["mean"], color=COLORS[start], linewidth=1)
        _mean(ax, x, top1["mean"], top1["std"], start, area=14 + 22 * top1["x"])
    top1 = reference[reference["size"].isin(sizes)].groupby("size")["top1"].mean()
    top1 = top1.reindex([size for size in sizes if size in top1.index])
    ax.plot([sizes.index(size) for size in top1.index], top1, **REFERENCE, marker=".")


def _across_seeds(ax: Axes, panel: pd.DataFrame, reference: pd.DataFrame, _: list[str], starts: list[str]) -> None:
    """Means by initialisation, with each seed as a small dot beside it."""
    for x, start in enumerate(starts):
        top1 = panel.loc[panel["start"] == start, "top1"]
        if top1.empty:
            ax.text(x, 0.02, MISSING, ha="center", color="#888888", transform=ax.get_xaxis_transform())
            continue
        if len(top1) > 1:
            ax.scatter([x + 0.06 * len(starts)] * len(top1), top1, 6, COLORS[start], alpha=0.8, linewidths=0)
        _mean(ax, x, top1.mean(), top1.std(), start, area=34)
    _reference_line(ax, reference)


def _mean(ax: Axes, x: Any, mean: Any, std: Any, start: str, area: Any) -> None:
    """Markers with error bars; a standard deviation of one seed is NaN, which draws none."""
    color = COLORS[start]
    ax.errorbar(x, mean, std, **ERROR_BAR, ecolor=color)
    ax.scatter(x, mean, area, color, marker=MARKERS[start], zorder=3, edgecolors="white", linewidths=0.4)


def _reference_line(ax: Axes, reference: pd.DataFrame) -> None:
    """The reference's mean, within a band of one standard deviation where there are several seeds."""
    if reference.empty:
        return
    mean, std = reference["top1"].mean(), reference["top1"].std()
    ax.axhline(mean, **REFERENCE)
    if len(reference) > 1:
        ax.axhspan(mean - std, mean + std, color=COLORS["softmax"], alpha=0.12, linewidth=0)


def _bar_limits(top1: pd.Series) -> tuple[float, float]:
    """Limits that leave room below the lowest bar and for a number above the highest."""
    spread = max(top1.max() - top1.min(), 1.0)
    return max(top1.min() - 0.3 * spread, 0), top1.max() + 0.2 * spread


def _bars(ax: Axes, panel: pd.DataFrame, starts: list[str]) -> set[str]:
    """A bar per start without Distill, and the block of Distill; returns which kinds of block were drawn."""
    bottom, drawn = ax.get_ylim()[0], set()
    for x, start in enumerate(starts):
        runs = panel[panel["start"] == start]
        plain, distilled = runs.loc[~runs["distill"], "top1"], runs.loc[runs["distill"], "top1"]
        base = bottom if plain.empty else plain.mean()
        ax.bar(x, base - bottom, 0.72, bottom, color=COLORS[start])
        if not distilled.empty:
            gain = distilled.mean() - base
            kind = "only" if plain.empty else "gain" if gain >= 0 else "loss"
            drawn.add(kind)
            ax.bar(x, gain, 0.72, base, **_block(COLORS[start], kind), linewidth=0.8)
        for offset, top1 in ((-0.18, plain), (0.18, distilled)):
            if len(top1) > 1:
                ax.errorbar(x + offset, top1.mean(), top1.std(), **ERROR_BAR, ecolor="black")
        if len(plain) and len(distilled):
            _number(ax, x, max(top1.mean() + (top1.std() if len(top1) > 1 else 0) for top1 in (plain, distilled)), gain)
    return drawn


def _number(ax: Axes, x: float, y: float, gain: float) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}
    gain = round(gain, 1)
    text = f"{gain:+.1f}".replace("-", MINUS) if gain else "0.0"
    font = {"fontsize": 6.5, "color": LOSS_COLOR, "weight": "bold"} if gain < 0 else {"fontsize": 6.5}
    ax.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", bbox=box, zorder=5, **font)


def _block(color: str, kind: str) -> dict:
    lightness = BLOCKS[kind]["lightness"]
    face = [lightness + (1 - lightness) * channel for channel in to_rgb(color)]
    return {"facecolor": face, "edgecolor": color, "hatch": BLOCKS[kind]["hatch"]}


def _ticks(ax: Axes, names: Sequence[str], *, is_empty: bool) -> None:
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, len(names) - 0.4)
    if is_empty:
        ax.text(0.5, 0.5, "no runs", ha="center", color="#888888", transform=ax.transAxes)


def _finish(figure: Figure, handles: list, reference: pd.DataFrame, y_label: str, note: str) -> None:
    if not handles:
        return
    if not reference.empty:
        handles = [*handles, Line2D([], [], **REFERENCE, label="Softmax reference")]
    figure.supylabel(y_label, fontsize=9)
    figure.supxlabel(note, fontsize=7, color="#555555")
    fits_one_line = len(handles) <= 3 or figure.get_figwidth() > 7
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if fits_one_line else 2)


def _seeds_note(students: pd.DataFrame) -> str:
    counts = students.groupby(["dataset", "size", "variant", "init", "source"])["seed"].nunique()
    if counts.empty or counts.max() == 1:
        return "one seed (n = 1)"
    spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return f"mean ± standard deviation over n = {spread} seeds"
