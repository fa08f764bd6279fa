"""What a claim is made of: pairs of runs that differ in nothing but the initialisation, tested and decided upon.

Differences are of last-epoch top-1 in percentage points. A comparison is tested first and concluded once its p is
corrected for how many comparisons there are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from linvit.evidence import (
    MIN_PAIRS,
    Decision,
    Effect,
    Rule,
    Verdict,
    contradicting,
    effect_of,
    interval,
    p_value,
    points,
    share_of,
    with_interval,
)
from linvit.results import MINUS, MISSING, VARIANTS, in_order, label, references

MIN_SHARE = 0.5
POOLED = "all, pooled"
CELL = ["dataset", "size", "source"]
KEYS = [*CELL, "variant", "seed"]
PAIR = ["dataset", "size", "variant", "seed", "distill"]
Axis = Literal["variant", "size", "source", "distill"]


@dataclass(frozen=True)
class Side:
    """One of two things compared: an initialisation, the Softmax reference, or the peak of a sweep of weights."""

    start: str
    distill: bool | None = False
    """None is both, each paired with its like."""
    peak: Literal["output", "map"] | None = None
    """Of matching outputs or maps; among the runs that `peaks` gives."""

    def __str__(self) -> str:
        if self == REFERENCE:
            return "Softmax reference"
        return f"peak of {self.peak} matching" if self.peak else label(self.start, bool(self.distill))


REFERENCE = Side("softmax")


@dataclass(frozen=True)
class Finding:
    """One comparison's outcome; `table` has a row per part of the pairs and a pooled one, as text."""

    title: str
    effect: str
    p: str
    corrected: str
    table: pd.DataFrame
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Tested:
    """A comparison's pooled p, NaN where it is no test, and the finding that follows once p is corrected."""

    p: float
    conclude: Callable[[float], Finding]


@dataclass(frozen=True)
class Comparison:
    """Top-1 of `a` minus that of `b`, over the given variants (all if empty), pooled and by each of the axes."""

    a: Side
    b: Side
    rule: Rule
    variants: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ("variant",)
    over: tuple[str, ...] = ("source",)
    """What differences are averaged over before they count: several of the same two models are one pair."""

    def test(self, runs: pd.DataFrame) -> Tested:
        pairs = paired(runs, self.a, self.b)
        if self.variants:
            pairs = pairs[pairs["variant"].isin(self.variants)]
        parts = {name: averaged(part, self.over) for name, part in parts_of(pairs, self.axes).items()}
        effects = {name: effect_of(part["difference"], self.rule.alternative) for name, part in parts.items()}
        pooled = effects[POOLED]
        heading = "Operator" if self.axes == ("variant",) else "Part"
        table = _table(heading, parts, {name: _effect_row(effect) for name, effect in effects.items()})

        def conclude(corrected: float) -> Finding:
            decision = self._decide(replace(pooled, p=corrected), effects)
            return Finding(self.title, with_interval(pooled), p_value(pooled.p), p_value(corrected), table, *decision)

        return Tested(pooled.p if pooled.n >= MIN_PAIRS else np.nan, conclude)

    @property
    def title(self) -> str:
        operators = ", ".join(VARIANTS[variant] for variant in self.variants)
        return f"{self.a} {MINUS} {self.b}" + (f" ({operators})" if operators else "")

    def _decide(self, pooled: Effect, effects: dict[str, Effect]) -> Decision:
        if not pooled.n:
            return Verdict.UNTESTABLE, "the grid has no pair of these two"
        if pooled.n < MIN_PAIRS:
            least = 0.5**pooled.n
            return Verdict.UNTESTABLE, f"with n = {pooled.n} pairs the smallest attainable p is {least:.3g}"
        verdict, reason = self.rule.decide(pooled)
        against = contradicting(self.rule, {name: effect for name, effect in effects.items() if name != POOLED})
        if against and verdict is not Verdict.FAILS:
            return Verdict.FAILS, f"contradicted by {', '.join(against)} alone; over all pairs, {reason}"
        return verdict, reason


@dataclass(frozen=True)
class Share:
    """The share of `whole`'s gain over `base` that `part` carries; holds from `MIN_SHARE` on."""

    part: Side
    whole: Side
    base: Side

    def test(self, runs: pd.DataFrame) -> Tested:
        gains = [averaged(paired(runs, side, self.base), ("source",)) for side in (self.part, self.whole)]
        parts = parts_of(gains[0].merge(gains[1], on=PAIR, suffixes=("_part", "_whole")), ("variant",))
        shares = {name: share_of(part["difference_part"], part["difference_whole"]) for name, part in parts.items()}
        table = _table("Operator", parts, {name: self._row(part, shares[name]) for name, part in parts.items()})
        title = f"{self.part}'s share of {self.whole}'s gain over {self.base}"
        effect = f"share {_share(shares[POOLED])} {_share_interval(shares[POOLED])}".removesuffix(f" {MISSING}")
        decision = self._decide(len(parts[POOLED]), *shares[POOLED])
        return Tested(np.nan, lambda _: Finding(title, effect, MISSING, MISSING, table, *decision))

    def _decide(self, n: int, share: float, low: float, high: float) -> Decision:
        if 0 < n < MIN_PAIRS:
            return Verdict.UNTESTABLE, f"{n} pairs are fewer than {MIN_PAIRS}"
        if np.isnan(share):
            lack = f"{self.whole} gains nothing over {self.base}, so there is no gain to share"
            return Verdict.UNTESTABLE, lack if n else "the grid has no such three runs"
        if low >= MIN_SHARE:
            return Verdict.HOLDS, f"the whole interval of the share is at least {MIN_SHARE}"
        if high < MIN_SHARE:
            return Verdict.FAILS, f"the whole interval of the share is below {MIN_SHARE}"
        return Verdict.UNTESTABLE, f"the share's interval does not tell whether it is at least {MIN_SHARE}"

    def _row(self, gains: pd.DataFrame, share: tuple[float, float, float]) -> dict[str, str]:
        return {
            f"Gain of {self.part}": points(gains["difference_part"].mean()),
            f"Gain of {self.whole}": points(gains["difference_whole"].mean()),
            "Share": _share(share),
            "95 % interval": _share_interval(share),
            "n": str(len(gains)),
        }


def paired(runs: pd.DataFrame, a: Side, b: Side) -> pd.DataFrame:
    """Differences in top-1, a minus b, of runs that share data set, size, source, variant and seed.

    `distill` is a's. A reference that was not trained has no seed of its own and pairs with every seed.
    """
    left = _top1_of(runs, a)
    if b == REFERENCE:
        reference = references(runs)[[*CELL, "seed", "epochs", "top1"]]
        pairs = left.merge(reference, on=CELL, suffixes=("_a", "_b")).rename(columns={"seed_a": "seed"})
        pairs = pairs[(pairs["epochs"] == 0) | (pairs["seed"] == pairs["seed_b"])].drop_duplicates([*KEYS, "distill"])
    else:
        on = KEYS if b.distill is not None else [*KEYS, "distill"]
        pairs = left.merge(_top1_of(runs, b)[[*on, "top1"]], on=on, suffixes=("_a", "_b"), validate="one_to_one")
    return pairs.assign(difference=pairs["top1_a"] - pairs["top1_b"])[[*KEYS, "distill", "difference"]]


def averaged(pairs: pd.DataFrame, over: tuple[str, ...]) -> pd.DataFrame:
    """Differences averaged over sources, since a run without a source stands beside each, or over more than that."""
    keys = [key for key in (*KEYS, "distill") if key not in over]
    return pairs.groupby(keys, sort=False, as_index=False)["difference"].mean()


def peaks(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of Copy w/ Distill at the weight with the best mean over seeds, for outputs and for maps.

    Each data set, size, source and operator has peaks of its own.
    """
    swept = runs[(runs["variant"] != "softmax") & (runs["start"] == "copy") & runs["distill"]]
    cell = [*CELL, "variant", "distill_target"]
    means = swept.groupby([*cell, "distill_weight"], as_index=False)["top1"].mean()
    best = means.loc[means.groupby(cell)["top1"].idxmax(), [*cell, "distill_weight"]]
    return swept.merge(best).drop_duplicates([*KEYS, "distill_target"])


def parts_of(pairs: pd.DataFrame, axes: tuple[Axis, ...]) -> dict[str, pd.DataFrame]:
    """The pairs by each value of each axis, and all of them."""
    names: dict[str, Mapping] = {"variant": VARIANTS, "distill": {False: "without Distill", True: "with Distill"}}
    parts = {}
    for axis in axes:
        values = in_order(pairs[axis], names.get(axis, ()))
        # One size or one source is what is pooled anyway.
        for value in values if axis == "variant" or len(values) > 1 else ():
            name = names[axis].get(value, value) if axis in names else f"{axis} {value}"
            parts[name] = pairs[pairs[axis] == value]
    return {**parts, POOLED: pairs}


def _top1_of(runs: pd.DataFrame, side: Side) -> pd.DataFrame:
    mask = (runs["variant"] != "softmax") & (runs["start"] == side.start)
    if side.distill is not None:
        mask &= runs["distill"] == side.distill
    if side.peak:
        mask &= runs["distill_target"] == side.peak
    return runs.loc[mask, [*KEYS, "distill", "top1"]]


def _table(heading: str, parts: dict[str, pd.DataFrame], rows: dict[str, dict[str, str]]) -> pd.DataFrame:
    seeds = [", ".join(map(str, sorted(part["seed"].unique()))) or MISSING for part in parts.values()]
    return pd.DataFrame([{heading: name, **row} for name, row in rows.items()]).assign(Seeds=seeds)


def _effect_row(effect: Effect) -> dict[str, str]:
    row = {"Difference": points(effect.mean), "95 % interval": interval(effect)}
    return {**row, "n": str(effect.n), "p": p_value(effect.p)}


def _share(share: tuple[float, float, float]) -> str:
    return MISSING if np.isnan(share[0]) else f"{share[0]:.2f}"


def _share_interval(share: tuple[float, float, float]) -> str:
    return MISSING if np.isnan(share[1]) else f"[{share[1]:.2f}, {share[2]:.2f}]"
