"""The figures: the paper's [arXiv:2609.35745, Figs. 2 to 5, A, B], one of other losses, and those about training."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from linvit import incomplete, report
from linvit.config import ConfigError
from linvit.figures.blocks import blocks, read_blocks
from linvit.figures.curves import curves
from linvit.figures.gains import fig3, fig4, figA, figB
from linvit.figures.losses import losses
from linvit.figures.recipes import recipes
from linvit.figures.savings import savings
from linvit.figures.sizes import fig2
from linvit.figures.style import ALARM, save
from linvit.figures.throughput import throughput
from linvit.figures.weights import fig5
from linvit.rates import Rates, read_rates
from linvit.results import read_history, read_runs


def _marked(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """The same figure, with a note that says so first where results are left out of its runs."""

    @wraps(draw)
    def drawn(runs: pd.DataFrame, *tables: pd.DataFrame | Rates | None, **choice: str | None) -> Figure:
        figure = draw(runs, *tables, **choice)
        if left_out := incomplete.left_out(runs):
            note = f"{incomplete.in_short(left_out)}\n{figure.get_supxlabel()}"
            figure.supxlabel(note, fontsize=6.5, color=ALARM)
        return figure

    return drawn


FIGURES: dict[str, Callable[..., Figure]] = {
    draw.__name__: _marked(draw) for draw in (fig2, fig3, fig4, fig5, figA, figB, losses)
}
"""Of a runs frame, by name; `linvit.report` tells which of them a grid can fill."""
HISTORY_FIGURES: dict[str, Callable[..., Figure]] = {
    draw.__name__: _marked(draw) for draw in (curves, savings, recipes)
}
"""Of a runs frame and its history."""
NAMES = (*FIGURES, *HISTORY_FIGURES, *report.BY_HAND)

__all__ = ["FIGURES", "HISTORY_FIGURES", "NAMES", "draw", "save"]


def draw(
    name: str, table: Path, *, source: str | None = None, history: Path | None = None, rates: Path | None = None
) -> Figure:
    """A figure by its name.

    Args:
        table: Of runs; for `blocks`, of what `linvit blocks` measured.
        source: Show runs of this one.
        history: The table of histories, for figures of them.
        rates: The table of rates, for `throughput`.

    Raises:
        ConfigError: there is no such figure, or a table that it needs is not given.
        UserError: a table cannot be read, or has no run of the source.
    """
    if name not in NAMES:
        raise ConfigError(f"no figure {name!r}; allowed: {', '.join(NAMES)}")
    if name in FIGURES:
        return FIGURES[name](read_runs(table), source=source)
    if name == "blocks":
        return blocks(read_blocks(table), source=source)
    if name == "throughput":
        return _marked(throughput)(read_runs(table), read_rates(rates) if rates else None, source=source)
    if history is None:
        raise ConfigError(f"figure {name!r} also needs a table of histories (linvit collect --history): --history")
    return HISTORY_FIGURES[name](read_runs(table), read_history(history), source=source)
