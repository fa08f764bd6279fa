"""The paper's figures, drawn from a runs frame [arXiv:2609.35745, Figs. 2 to 5, A, B], and one of other losses."""

from collections.abc import Callable
from functools import wraps

import pandas as pd
from matplotlib.figure import Figure

from linvit import incomplete
from linvit.figures.gains import fig3, fig4, figA, figB
from linvit.figures.losses import losses
from linvit.figures.sizes import fig2
from linvit.figures.style import ALARM, save
from linvit.figures.weights import fig5


def _marked(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """The same figure, with a note that says so first where results are left out of its runs."""

    @wraps(draw)
    def drawn(runs: pd.DataFrame, **choice: str) -> Figure:
        figure = draw(runs, **choice)
        if left_out := incomplete.left_out(runs):
            note = f"{incomplete.in_short(left_out)}\n{figure.get_supxlabel()}"
            figure.supxlabel(note, fontsize=6.5, color=ALARM)
        return figure

    return drawn


FIGURES: dict[str, Callable[..., Figure]] = {
    draw.__name__: _marked(draw) for draw in (fig2, fig3, fig4, fig5, figA, figB, losses)
}
"""By name; `linvit.report` tells which of them a grid can fill."""

__all__ = ["FIGURES", "save"]
