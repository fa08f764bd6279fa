"""Learning curves by initialisation."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from linvit.figures.style import (
    COLORS,
    STYLE,
    Row,
    finish,
    mean_curve,
    name_of,
    note_of,
    of_one_source,
    reference_line,
    rows_of,
    runs_of,
    say_empty,
    say_no_runs,
    students,
)
from linvit.report import SHOWN_STARTS
from linvit.results import STARTS, VARIANTS, default_runs, in_order, label, references

LINES = {False: "-", True: (0, (3, 1.2))}
"""Without and with Distill."""
MEASURES = {"task_loss": "Training loss\n(of the task)", "top1": "Top-1 (%)"}
Y_LABELS = MEASURES | {"needed": "As accurate\nas Random after", "before": "before training", "after": "after training"}
COLUMNS = ["run", "dataset", "size", "variant", "init", "start", "distill", "source", "recipe", "seed", "parameters"]
"""Of a run, that its epochs are shown by."""
DETAILED = 2
"""Data sets and sizes that have a panel for each measure; of more, accuracies alone are shown."""


def curves(runs: pd.DataFrame, history: pd.DataFrame, source: str | None = None) -> Figure:
    """The task's training loss and top-1 accuracy by epoch: a column per operator, lines are means over seeds.

    Bands are one standard deviation. The loss is of augmented, perhaps mixed images, so that accuracy is no function
    of it. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown, reference = trained(runs, history), references(runs)
    rows, variants = rows_of(shown), in_order(shown["variant"], VARIANTS)
    measures = list(MEASURES) if len(rows) <= DETAILED else ["top1"]
    with rc_context(STYLE):
        figure, axes = measure_panels(rows, variants, measures, width=1.45)
        cells = dict(tuple(shown.groupby(["dataset", "size", "variant"])))
        for (row, variant, measure), ax in axes.items():
            panel = cells.get((*row, variant))
            if panel is None:
                say_no_runs(ax)
                continue
            for start, distill in lines_of(panel):
                of_line = panel[(panel["start"] == start) & (panel["distill"] == distill)]
                _mean_curve(ax, of_line.dropna(subset=measure), measure, look_of(start, distill))
            if measure == "top1":
                reference_line(ax, runs_of(reference, row))
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            ax.margins(x=0.02)
        for ax in figure.axes[-len(variants) :] if rows else ():
            ax.set_xlabel("Epoch")
        note = note_of(shown.drop_duplicates("run"), source)
        finish(figure, handles_of(shown), "", note, has_reference=not reference.empty)
    return figure


def trained(runs: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    """The students' epochs, each with its run's columns; accuracies are the epoch's."""
    return history.merge(students(runs, SHOWN_STARTS)[COLUMNS], on="run")


def by_images(shown: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Epochs by images seen, and what that axis is called; by epochs where a data set does not tell its size."""
    if shown["images"].notna().all():
        return shown, "Training images seen"
    return shown.assign(images=shown["epoch"].astype(float)), "Epochs"


def lines_of(panel: pd.DataFrame) -> list[tuple[str, bool]]:
    """The initialisations in a panel, without and with Distill."""
    found = set(panel[["start", "distill"]].drop_duplicates().itertuples(index=False, name=None))
    return [line for line in product(in_order(panel["start"], STARTS), LINES) if line in found]


def look_of(start: str, distill: bool) -> dict[str, Any]:
    return {"color": COLORS[start], "linestyle": LINES[distill], "linewidth": 1.1}


def handles_of(shown: pd.DataFrame) -> list[Line2D]:
    """A legend of colours and, where there are both, of what dashes mean."""
    handles = [Line2D([], [], color=COLORS[start], label=label(start)) for start in in_order(shown["start"], STARTS)]
    if shown["distill"].any():
        handles.append(Line2D([], [], color="#888888", linestyle=LINES[True], label="w/ Distill"))
    return handles


def measure_panels(
    rows: Sequence[Row], variants: Sequence[str], measures: Sequence[str], *, width: float, low: float = 1.0
) -> tuple[Figure, dict[tuple[Row, str, str], Axes]]:
    """For each row a line of panels per measure, a column per operator; many lines are `low` inches high.

    The panels of a row have one x-axis.
    """
    lines = [(row, measure) for row in rows for measure in measures]
    shape = max(len(lines), 1), max(len(variants), 1)
    size = max(0.7 + width * shape[1], 3.4), 1.1 + (1.5 if len(lines) <= 4 else low) * shape[0]
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*shape, sharey="row", squeeze=False)
    if not lines:
        say_empty(axes[0, 0])
    for top in range(0, len(lines), len(measures)):
        _share_x(axes[top : top + len(measures)])
    for ax, variant in zip(axes[0], variants, strict=False):
        ax.set_title(VARIANTS.get(variant, variant))
    for ax, (row, measure) in zip(axes[:, 0], lines, strict=False):
        name = name_of(row, rows, "\n") if len(rows) > 1 else ""
        ax.set_ylabel("\n".join(filter(None, (name, Y_LABELS[measure] if len(measures) > 1 else ""))))
    found = {(*line, variant): axes[i, j] for i, line in enumerate(lines) for j, variant in enumerate(variants)}
    return figure, {(row, variant, measure): ax for (row, measure, variant), ax in found.items()}


def _share_x(axes: np.ndarray) -> None:
    """One axis for all of some panels [lines, columns], told below the lowest."""
    first, *others = axes.ravel()
    for ax in others:
        ax.sharex(first)
    for ax in axes[:-1].ravel():
        ax.tick_params(labelbottom=False)


def _mean_curve(ax: Axes, runs: pd.DataFrame, measure: str, look: dict[str, Any]) -> None:
    by_epoch = runs.groupby("epoch")[measure].agg(["mean", "std"])
    marker = {"marker": "o", "markersize": 2.5} if 0 < len(by_epoch) <= 15 else {}
    mean_curve(ax, by_epoch.index, by_epoch, look, **marker)
