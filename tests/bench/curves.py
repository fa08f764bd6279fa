"""How the benchmarks draw operators: a colour and a marker each, on logarithmic axes, in the style of the figures."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from linvit.figures.style import COLORS

# Okabe and Ito's colours again, here for operators; markers tell them apart in grey.
LINES = {
    "softmax": {"color": COLORS["softmax"], "linestyle": "--", "marker": "x"},
    "elu": {"color": "#0072B2", "marker": "o"},
    "relu": {"color": "#56B4E9", "marker": "s"},
    "inline": {"color": "#009E73", "marker": "^"},
    "inline, local": {"color": "#E69F00", "marker": "v"},
    "mhla": {"color": "#D55E00", "marker": "D"},
    "ttt": {"color": "#CC79A7", "marker": "P"},
}
OTHERS = {"color": "#888888", "marker": "."}


def draw(ax: Axes, curves: Mapping[str, Mapping[float, float]], ticks: Sequence[float]) -> None:
    """One line a name, x -> y, on logarithmic axes with these ticks along x."""
    for name, points in curves.items():
        x, y = zip(*sorted(points.items()), strict=True)
        ax.plot(x, y, **LINES.get(name, OTHERS), label=name, linewidth=1.1, markersize=4, markeredgewidth=0.8)
    ax.set(xscale="log", yscale="log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.grid(which="major", axis="both")
