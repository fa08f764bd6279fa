"""What shorter recipes reach: accuracy against training images seen, beyond the paper."""

from itertools import cycle

import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator

from linvit.figures.curves import by_images, trained
from linvit.figures.style import (
    STYLE,
    finish,
    mean_curve,
    note_of,
    of_one_source,
    panels,
    reference_line,
    rows_of,
    runs_of,
)
from linvit.results import DATASETS, VARIANTS, default_runs, in_order, label, references

MARKERS = "os^Dv"
Look = dict[str, object]


def recipes(runs: pd.DataFrame, history: pd.DataFrame, source: str | None = None) -> Figure:
    """Top-1 by training images seen, a line per recipe: a column per operator, a line of panels per initialisation.

    Shown are initialisations that were trained by several recipes; lines are means over seeds, bands one standard
    deviation. Images of a stage before training count. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    shown, seen = by_images(_by_several(_apart(trained(runs, history).dropna(subset="top1"))))
    reference = _apart(references(runs))
    rows, variants = rows_of(shown), in_order(shown["variant"], VARIANTS)
    looks = _looks(shown)
    with rc_context(STYLE):
        figure, axes = panels(rows, variants, "initialisations by several recipes")
        for (row, variant), ax in axes.items():
            panel = runs_of(shown[shown["variant"] == variant], row)
            for recipe, look in looks.items():
                of_recipe = panel[panel["recipe"] == recipe].groupby("images")["top1"].agg(["mean", "std"])
                mean_curve(ax, of_recipe.index, of_recipe, look)
            # A line of panels is a data set and an initialisation; the reference is the data set's.
            reference_line(ax, runs_of(reference, (row[0].split("\n")[0], row[1])))
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
            ax.xaxis.set_minor_locator(LogLocator(subs=()))
        for ax in figure.axes[-len(variants) :] if rows else ():
            ax.set_xlabel(seen)
        handles = [Line2D([], [], **look, label=recipe) for recipe, look in looks.items()]
        finish(figure, handles, "Top-1 (%)", note_of(shown, source), has_reference=not reference.empty)
    return figure


def _apart(runs: pd.DataFrame) -> pd.DataFrame:
    """Data sets by their titles, without the recipes that `dataset` names where they are not the data set's own."""
    names = runs["dataset"].str.split("@").str[0]
    return runs.assign(dataset=[DATASETS.get(name, name) for name in names])


def _by_several(shown: pd.DataFrame) -> pd.DataFrame:
    """The cells that several recipes trained, their initialisation told with the data set."""
    cell = ["dataset", "size", "variant", "start", "distill"]
    several = shown.groupby(cell)["recipe"].transform("nunique") > 1
    shown = shown[several]
    columns = (shown[key] for key in ("dataset", "start", "distill"))
    return shown.assign(dataset=[f"{name}\n{label(*line)}" for name, *line in zip(*columns, strict=True)])


def _looks(shown: pd.DataFrame) -> dict[str, Look]:
    """By recipe, the one of most images first."""
    names = shown.groupby("recipe")["images"].max().sort_values(ascending=False, kind="stable").index
    colors = sns.color_palette("colorblind", len(names))
    return {
        name: {"color": color, "marker": marker, "markersize": 2.5, "linewidth": 1.1}
        for name, color, marker in zip(names, colors, cycle(MARKERS), strict=False)
    }
