"""The paper's distillation losses beside those of the works it builds on, each over its weights."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linvit.figures.style import COLORS, ERROR_BAR, REFERENCE, STYLE, mean_line, of_one_source, say_empty, students
from linvit.results import DATASETS, VARIANTS, in_order, references

LOSSES = {
    "output": "Outputs, mean-squared error (the paper)",
    "map": "Maps, mean-squared error (the paper, Fig. 5)",
    "map-cross_entropy": "Maps, cross-entropy (Attention Transfer)",
    "heads": "Head outputs, mean-squared error (LoLCATs)",
    "output-l2": "Outputs, L2 distance (RADLADS)",
}
"""What is matched and how, by `distill_target`."""
OWN_WEIGHTS = {"output": 50.0, "map-cross_entropy": 3.0, "heads": 1000.0, "output-l2": 1.0}
"""The paper's lambda, and those of the others' code; the paper names none for maps."""
COLUMN = ["dataset", "size", "source", "variant"]
MEAN = COLORS["mlpcopy"]
BEHIND = {"zorder": 1}
COPY = {"color": COLORS["copy"], "linestyle": ":", "linewidth": 1.4}


def losses(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Copy-initialised students by loss and weight: a panel per loss, a row per weight, a dot per seed.

    Diamonds are means ± standard deviation, filled at the work's own weight. Lines are Copy without a loss and the
    Softmax reference. Every operator, data set, size and source (or the one given) has a column of panels.
    """
    runs = of_one_source(runs, source)[0] if source else runs
    copies = students(runs, ["copy"])
    distilled, plain, reference = copies[copies["distill"]], copies[~copies["distill"]], references(runs)
    names = in_order(distilled["distill_target"], LOSSES)
    columns = list(distilled[COLUMN].drop_duplicates().itertuples(index=False, name=None))
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = _panels([distilled[distilled["distill_target"] == name] for name in names], len(columns))
        for column, key in enumerate(columns):
            for name, ax in zip(names, axes[:, column], strict=True):
                of_loss = _where(distilled, [*COLUMN, "distill_target"], [*key, name])
                _rows(ax, of_loss, OWN_WEIGHTS.get(name))
                mean_line(ax.axvline, ax.axvspan, _where(plain, COLUMN, key), COPY | BEHIND)
                mean_line(ax.axvline, ax.axvspan, _where(reference, COLUMN[:3], key[:3]), REFERENCE | BEHIND)
                ax.set_title(LOSSES.get(name, name), loc="left")
            axes[-1, column].set_xlabel(f"Top-1 accuracy (%)\n{_title(*key)}")
        if names:
            figure.legend(handles=_handles(), loc="outside upper center", ncols=2)
    return figure


def _panels(by_loss: Sequence[pd.DataFrame], columns: int) -> tuple[Figure, np.ndarray]:
    """Panels as high as their losses have weights."""
    weights = [of_loss["distill_weight"].nunique() for of_loss in by_loss] or [3]
    size = 1.2 + 3.6 * max(columns, 1), 1.1 + 0.3 * len(weights) + 0.2 * sum(weights)
    figure = Figure(figsize=size, layout="constrained")
    heights = [n + 0.4 for n in weights]
    axes = figure.subplots(len(weights), max(columns, 1), sharex="col", squeeze=False, height_ratios=heights)
    if not by_loss:
        say_empty(axes[0, 0], "losses")
    return figure, axes


def _where(runs: pd.DataFrame, names: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    for name, value in zip(names, values, strict=True):
        runs = runs[runs[name] == value]
    return runs


def _rows(ax: Axes, of_loss: pd.DataFrame, own: float | None) -> None:
    """A row per weight, the least on top."""
    weights = sorted(of_loss["distill_weight"].unique())
    for y, weight in enumerate(weights):
        top1 = of_loss.loc[of_loss["distill_weight"] == weight, "top1"]
        ax.scatter(top1, [y + 0.3] * len(top1), 7, "#777777", linewidths=0)
        ax.errorbar(top1.mean(), y, xerr=top1.std(), **ERROR_BAR, ecolor=MEAN)
        face = MEAN if weight == own else "white"
        ax.scatter(top1.mean(), y, 30, face, marker="D", edgecolors=MEAN, linewidths=1, zorder=3)
    ax.set_yticks(range(len(weights)), [f"λ = {weight:,.10g}" for weight in weights])
    ax.set_ylim(len(weights) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.08)


def _title(dataset: str, size: str, source: str, variant: str) -> str:
    return f"{DATASETS.get(dataset, dataset)}, {size}, {VARIANTS.get(variant, variant)}; source: {source}"


def _handles() -> list[Line2D]:
    mean = {"linestyle": "none", "marker": "D", "markeredgecolor": MEAN, "markersize": 5}
    return [
        Line2D([], [], **mean, markerfacecolor=MEAN, label="mean ± std, the work's own λ"),
        Line2D([], [], **mean, markerfacecolor="white", label="mean ± std, another λ"),
        Line2D([], [], linestyle="none", marker=".", color="#777777", label="a seed"),
        Line2D([], [], **COPY, label="Copy, no loss"),
        Line2D([], [], **REFERENCE, label="Softmax reference"),
    ]
