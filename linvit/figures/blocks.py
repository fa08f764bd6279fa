"""How far each block's attention is from its source's, by initialisation, before and after training."""

from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullLocator

from linvit.figures.curves import handles_of, lines_of, look_of, measure_panels
from linvit.figures.style import (
    LEVEL,
    STYLE,
    finish,
    log_ticks,
    mean_curve,
    note_of,
    of_one_source,
    rows_of,
    runs_of,
    say_no_runs,
    students,
)
from linvit.report import SHOWN_STARTS
from linvit.results import BLOCK_DTYPES, VARIANTS, default_runs, in_order, read_frame

WHEN = {"before": False, "after": True}
NOTE = "Mean-squared error of attention outputs, over the mean square of the source's (dotted: of zeros)."


def read_blocks(csv: Path) -> pd.DataFrame:
    """A table of `linvit blocks`.

    Raises:
        ResultsError: as of `read_runs`.
    """
    return read_frame(csv, BLOCK_DTYPES, ("run", "trained", "block"))


def blocks(errors: pd.DataFrame, source: str | None = None) -> Figure:
    """Relative error of each block's attention output: a column per operator, before training above after it.

    Lines are means over seeds, bands one standard deviation. `source` defaults to the most used one.
    """
    kept = errors[errors["run"].isin(default_runs(errors.drop_duplicates("run"))["run"])]
    shown, source = of_one_source(kept, source)
    shown = students(shown, SHOWN_STARTS)
    rows, variants = rows_of(shown), in_order(shown["variant"], VARIANTS)
    with rc_context(STYLE):
        figure, axes = measure_panels(rows, variants, list(WHEN), width=1.45)
        for (row, variant, when), ax in axes.items():
            panel = runs_of(shown[(shown["variant"] == variant) & (shown["trained"] == WHEN[when])], row)
            if panel.empty:
                say_no_runs(ax)
            else:
                _panel(ax, panel)
        for ax in axes.values():
            if ax.lines:
                ax.yaxis.set_major_locator(log_ticks(*ax.get_ylim()))
        for ax in figure.axes[-len(variants) :] if rows else ():
            ax.set_xlabel("Block")
        finish(figure, handles_of(shown), "Relative error", f"{NOTE}\n{note_of(shown, source)}", has_reference=False)
    return figure


def _panel(ax: Axes, panel: pd.DataFrame) -> None:
    ax.axhline(1, **LEVEL)
    lines = lines_of(panel)
    for number, (start, distill) in enumerate(lines):
        of_line = panel[(panel["start"] == start) & (panel["distill"] == distill)]
        by_block = of_line.groupby("block")["error"].agg(["mean", "std"])
        x = by_block.index + 0.05 * (number - (len(lines) - 1) / 2)  # none hides another
        mean_curve(ax, x, by_block, look_of(start, distill), marker="o", markersize=2.5)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
