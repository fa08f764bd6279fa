"""The paper's figures, drawn from a runs frame [arXiv:2609.35745, Figs. 2 to 5, A, B], and one of other losses."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from linvit.figures.gains import fig3, fig4, figA, figB
from linvit.figures.losses import losses
from linvit.figures.sizes import fig2
from linvit.figures.style import save
from linvit.figures.weights import fig5

FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "figA": figA,
    "figB": figB,
    "losses": losses,
}
"""By name; `linvit.report` tells which of them a grid can fill."""

__all__ = ["FIGURES", "save"]
