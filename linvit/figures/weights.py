"""Figure 5: attention outputs or maps matched, over the loss's weight [arXiv:2609.35745, Fig. 5, Sec. B.4]."""

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from linvit.figures.style import (
    COLORS,
    ERROR_BAR,
    STYLE,
    abreast,
    finish,
    note_of,
    of_one_source,
    rows_of,
    runs_of,
    students,
)
from linvit.results import VARIANTS, in_order

# All start from Copy, so all have its colour, each operator in a shade and with a marker of its own.
SHADES = ("#8F3F00", COLORS["copy"], "#EE9A5E")
MARKERS = ("o", "s", "^", "D", "v")
TARGETS: dict[str, dict] = {"output": {"linestyle": "-"}, "map": {"linestyle": (0, (3, 1.5))}}


def fig5(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Copy w/ Distill against lambda: a panel per data set, a line per operator and per target, outputs or maps.

    `source` defaults to the most used one.
    """
    runs, source = of_one_source(runs, source)
    shown = _swept(students(runs, ["copy"]))
    variants = in_order(shown["variant"], VARIANTS)
    looks = {
        variant: {"color": SHADES[i % len(SHADES)], "marker": MARKERS[i % len(MARKERS)]}
        for i, variant in enumerate(variants)
    }
    with rc_context(STYLE):
        figure, axes = abreast(rows_of(shown))
        for row, ax in axes.items():
            _sweeps(ax, runs_of(shown, row), looks)
            ax.set_xscale("log")
            ax.set_xlabel("λ")
        handles = [Line2D([], [], **look, markersize=4, label=VARIANTS.get(name, name)) for name, look in looks.items()]
        targets = [target for target in TARGETS if (shown["distill_target"] == target).any()]
        handles += [Line2D([], [], color="black", **TARGETS[target], label=f"match {target}") for target in targets]
        finish(figure, handles, "Top-1 accuracy (%)", note_of(shown, source), has_reference=False)
    return figure


def _swept(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the paper's losses where the same was also run with another weight or target."""
    runs = runs[runs["distill_target"].isin(TARGETS)]
    of_loss = runs["distill_target"] + runs["distill_weight"].astype(str)
    return runs[of_loss.groupby([runs[key] for key in ("dataset", "size", "variant")]).transform("nunique") > 1]


def _sweeps(ax: Axes, panel: pd.DataFrame, looks: dict[str, dict]) -> None:
    """Means over seeds; operators stand a little apart so that none hides another."""
    for i, (variant, look) in enumerate(looks.items()):
        for target, line in TARGETS.items():
            of_line = panel[(panel["variant"] == variant) & (panel["distill_target"] == target)]
            top1 = of_line.groupby("distill_weight")["top1"].agg(["mean", "std"])
            x = top1.index * 1.08 ** (i - (len(looks) - 1) / 2)
            ax.errorbar(x, top1["mean"], top1["std"], **ERROR_BAR, ecolor=look["color"])
            ax.plot(x, top1["mean"], **look, **line, linewidth=1, markersize=3.5, markeredgewidth=0)
