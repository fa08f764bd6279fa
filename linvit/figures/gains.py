"""Figures 3, 4, A and B: what copied components bring, and what Distill adds [arXiv:2609.35745]."""

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from linvit.figures.style import (
    COLORS,
    ERROR_BAR,
    REFERENCE,
    STYLE,
    abreast,
    finish,
    note_of,
    of_one_source,
    panels,
    reference_line,
    rows_of,
    runs_of,
    students,
    ticks,
    tint,
)
from linvit.report import COMPONENTS, is_component
from linvit.results import STARTS, VARIANTS, default_runs, in_order, label, references, signed

BLOCKS: dict[str, dict] = {
    "gain": {"hatch": "/////", "lightness": 0.65},
    "more": {"hatch": "\\\\\\\\\\", "lightness": 0.35},
    "loss": {"hatch": "xxxxx", "lightness": 1.0},
    "only": {"hatch": ".....", "lightness": 0.85},
}
"""How a block of Distill is drawn: a gain, a second one on top of it, a loss, or w/ Distill with no run without."""
BLOCK_NAMES = {"gain": "gain with Distill", "loss": "loss with Distill", "only": "w/ Distill, no run without"}
GAIN_NAMES = {
    ("copy", "gain"): "Copy w/ Distill",
    ("fullcopy", "more"): "FullCopy w/ Distill, on top",
    ("fullcopy", "loss"): "FullCopy w/ Distill, below",
}
LOSS_COLOR = "#A00000"
GREY = "#888888"
BAR = 0.72


def fig3(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """The gain over Copy at Small: a bar for Copy w/ Distill, on top what FullCopy w/ Distill adds.

    A panel per data set, a bar per operator. Gains are means over pairs of one seed, in points; the dashed line is
    the Softmax reference's. A grid without Small is shown whole. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    gains = _narrowed(_gains_over_copy(runs), size="small")
    variants, drawn = in_order(gains["variant"], VARIANTS), set()
    with rc_context(STYLE):
        figure, axes = abreast(rows_of(gains))
        for row, ax in axes.items():
            for x, variant in enumerate(variants):
                of_row = runs_of(gains, row)
                drawn |= _gain_bar(ax, x, of_row[of_row["variant"] == variant])
            ax.axhline(0, color="black", linewidth=0.6)
            ticks(ax, [VARIANTS.get(variant, variant) for variant in variants], is_empty=False)
        shown = {key: name for key, name in GAIN_NAMES.items() if key in drawn}
        handles = [Patch(**_block(COLORS[start], kind), label=name) for (start, kind), name in shown.items()]
        has_reference = bool(gains["reference"].notna().any())
        finish(figure, handles, "Gain over Copy (points)", note_of(gains, source), has_reference=has_reference)
    return figure


def fig4(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """What each copied component brings to ReLU at Small, and the gain with Distill on top; a panel per data set.

    A grid without these is shown whole: a panel per operator, data set and size. Numbers over the bars are the gains
    with Distill in points. `source` defaults to the most used one.
    """
    runs, source = of_one_source(default_runs(runs), source)
    return _components(_narrowed(_component_runs(runs), size="small", variant="relu"), references(runs), source)


def figA(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Figure 4 for every operator at Small."""
    return _components_at(runs, source, "small")


def figB(runs: pd.DataFrame, source: str | None = None) -> Figure:
    """Figure 4 for every operator at Tiny."""
    return _components_at(runs, source, "tiny")


def _components_at(runs: pd.DataFrame, source: str | None, size: str) -> Figure:
    runs, source = of_one_source(default_runs(runs), source)
    shown = _component_runs(runs)
    return _components(shown[shown["size"] == size], references(runs), source, what=f"initialisations at size {size}")


def _components(shown: pd.DataFrame, reference: pd.DataFrame, source: str, **told: str) -> Figure:
    reference = reference.merge(shown[["dataset", "size"]].drop_duplicates())
    starts, drawn = in_order(shown["start"], STARTS), set()
    with rc_context(STYLE):
        figure, axes = panels(rows_of(shown), in_order(shown["variant"], VARIANTS), **told)
        for (row, variant), ax in axes.items():
            of_row, of_reference = runs_of(shown, row), runs_of(reference, row)
            panel = of_row[of_row["variant"] == variant]
            ax.set_ylim(_bar_limits(pd.concat([of_row, of_reference])["top1"]))
            ax.yaxis.set_major_locator(_Percent(nbins=5, steps=[1, 2, 2.5, 5, 10]))
            drawn |= _bars(ax, panel, starts)
            reference_line(ax, of_reference)
            ticks(ax, [label(start) for start in starts], is_empty=panel.empty)
        handles = [Patch(facecolor=GREY, label="without Distill")] if starts else []
        handles += [Patch(**_block(GREY, kind), label=name) for kind, name in BLOCK_NAMES.items() if kind in drawn]
        note = (
            "Bars start at each axis' lower end, not at zero; numbers are the gains with Distill in points.\n"
            f"{_operator(shown)}{note_of(shown, source)}"
        )
        finish(figure, handles, "Top-1 accuracy (%), truncated axis", note, has_reference=not reference.empty)
    return figure


def _component_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Students of the component study, without the data sets and sizes that Figure 2 alone looks at."""
    shown = students(runs, COMPONENTS)
    is_studied = pd.Series([is_component(run) for run in shown.to_dict("records")], shown.index, dtype=bool)
    return shown[is_studied.groupby([shown["dataset"], shown["size"]]).transform("any").astype(bool)]


def _narrowed(runs: pd.DataFrame, **values: str) -> pd.DataFrame:
    """The runs with these values, or all of them where none has."""
    narrow = runs[(runs[list(values)] == pd.Series(values)).all(axis=1)]
    return runs if narrow.empty else narrow


def _gains_over_copy(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a run of Copy or FullCopy w/ Distill: its `gain` over the same seed's Copy, and the `reference`'s."""
    cell = ["dataset", "size", "variant"]
    found = students(runs, ["copy", "fullcopy"])
    copied = found.loc[(found["start"] == "copy") & ~found["distill"], [*cell, "seed", "top1"]]
    gains = found[found["distill"]].merge(copied, on=[*cell, "seed"], suffixes=("", "_copy"))
    reference = references(runs).groupby(["dataset", "size"])["top1"].mean().rename("reference")
    gains = gains.join(reference, on=["dataset", "size"])
    return gains.assign(gain=gains["top1"] - gains["top1_copy"], reference=gains["reference"] - gains["top1_copy"])


def _gain_bar(ax: Axes, x: int, gains: pd.DataFrame) -> set[tuple[str, str]]:
    """One operator's bar and dashed line; returns which kinds of block were drawn."""
    bottom, drawn = 0.0, set()
    for start, offset in (("copy", -0.18), ("fullcopy", 0.18)):
        gain = gains.loc[gains["start"] == start, "gain"]
        if gain.empty:
            continue
        mean = gain.mean()
        kind = "gain" if start == "copy" else "more" if mean >= bottom else "loss"
        ax.bar(x, mean - bottom, BAR, bottom, **_block(COLORS[start], kind), linewidth=0.8)
        if len(gain) > 1:
            ax.errorbar(x + offset, mean, gain.std(), **ERROR_BAR, ecolor="black")
        # What is on top of a loss starts at zero.
        bottom = max(mean, 0.0)
        drawn.add((start, kind))
    ax.plot([x - 0.45, x + 0.45], [gains["reference"].mean()] * 2, **REFERENCE)
    return drawn


class _Percent(MaxNLocator):
    """Ticks up to 100: room for a number may lie above."""

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        return [tick for tick in super().tick_values(vmin, vmax) if tick <= 100]


def _bar_limits(top1: pd.Series) -> tuple[float, float]:
    """Limits that leave room below the lowest bar and for a number above the highest."""
    spread = max(top1.max() - top1.min(), 1.0)
    return max(top1.min() - 0.3 * spread, 0), top1.max() + 0.25 * spread


def _bars(ax: Axes, panel: pd.DataFrame, starts: list[str]) -> set[str]:
    """A bar per start without Distill, and the block of Distill; returns which kinds of block were drawn."""
    bottom, drawn = ax.get_ylim()[0], set()
    for x, start in enumerate(starts):
        runs = panel[panel["start"] == start]
        plain, distilled = runs.loc[~runs["distill"], "top1"], runs.loc[runs["distill"], "top1"]
        base = bottom if plain.empty else plain.mean()
        ax.bar(x, base - bottom, BAR, bottom, color=COLORS[start], edgecolor="white")
        if not distilled.empty:
            gain = distilled.mean() - base
            kind = "only" if plain.empty else "gain" if gain >= 0 else "loss"
            drawn.add(kind)
            ax.bar(x, gain, BAR, base, **_block(COLORS[start], kind), linewidth=0.8)
        for offset, top1 in ((-0.18, plain), (0.18, distilled)):
            if len(top1) > 1:
                ax.errorbar(x + offset, top1.mean(), top1.std(), **ERROR_BAR, ecolor="black")
        if len(plain) and len(distilled):
            _number(ax, x, max(top1.mean() + (top1.std() if len(top1) > 1 else 0) for top1 in (plain, distilled)), gain)
    return drawn


def _number(ax: Axes, x: float, y: float, gain: float) -> None:
    # An outline, so that neither a hatch nor the reference's line runs into it, and no more of them is hidden.
    outline = [withStroke(linewidth=1.8, foreground="white")]
    # Two digits fit a bar.
    text = signed(gain, 1 if abs(gain) < 9.95 else 0) if round(gain, 1) else "0.0"
    font = {"fontsize": 6, "color": LOSS_COLOR, "weight": "bold"} if round(gain, 1) < 0 else {"fontsize": 6}
    ax.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", path_effects=outline, zorder=5, **font)


def _block(color: str, kind: str) -> dict:
    return {"facecolor": tint(color, BLOCKS[kind]["lightness"]), "edgecolor": color, "hatch": BLOCKS[kind]["hatch"]}


def _operator(shown: pd.DataFrame) -> str:
    """Names the operator that no title names."""
    variants = shown["variant"].unique()
    return f"Operator: {VARIANTS.get(variants[0], variants[0])}. " if len(variants) == 1 else ""
