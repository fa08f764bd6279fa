"""The paper's claims C1 to C8, judged on a runs frame [arXiv:2609.35745, Secs. 3 to 5].

A claim is made of comparisons. Each pairs runs that differ in nothing but the initialisation, looks at the
differences in top-1 (percentage points) and decides by a rule that the page states. What a grid is too small
to decide is called not testable, never a failure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from linvit.evidence import (
    ABOUT_EQUAL,
    ALPHA,
    EXACT_PAIRS,
    GREATER,
    MIN_PAIRS,
    NO_GAIN,
    NOT_WORSE,
    RESAMPLES,
    RULES,
    Decision,
    Effect,
    Rule,
    Verdict,
    effect_of,
    interval,
    p_value,
    points,
    share_of,
    with_interval,
)
from linvit.files import write_text
from linvit.results import (
    DATASETS,
    MINUS,
    MISSING,
    NO_SOURCE,
    VARIANTS,
    beside_sources,
    default_runs,
    in_order,
    label,
    references,
    sizes_in_order,
)

MIN_SHARE = 0.5
CELL = ["dataset", "size", "source"]
KEYS = [*CELL, "variant", "seed"]
PAIR = ["dataset", "size", "variant", "seed"]


@dataclass(frozen=True)
class Finding:
    """One comparison's outcome; `table` has a row per variant and a pooled one, as text."""

    title: str
    effect: str
    p: str
    table: pd.DataFrame
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Side:
    """One of two things compared: an initialisation, or the Softmax reference."""

    start: str
    distill: bool = False

    def __str__(self) -> str:
        return "Softmax reference" if self == REFERENCE else label(self.start, self.distill)


REFERENCE = Side("softmax")


@dataclass(frozen=True)
class Comparison:
    """Top-1 of `a` minus that of `b`, over the given variants (all if empty)."""

    a: Side
    b: Side
    rule: Rule
    variants: tuple[str, ...] = ()

    def judge(self, runs: pd.DataFrame) -> Finding:
        pairs = over_sources(paired(runs, self.a, self.b))
        if self.variants:
            pairs = pairs[pairs["variant"].isin(self.variants)]
        effect = self._effect(pairs)
        table = _by_variant(pairs, lambda part: _effect_row(self._effect(part)))
        title = f"{self.a} {MINUS} {self.b}" + "".join(f" ({VARIANTS[variant]})" for variant in self.variants)
        return Finding(title, with_interval(effect), p_value(effect.p), table, *self._decide(effect, pairs))

    def _effect(self, pairs: pd.DataFrame) -> Effect:
        return effect_of(pairs["difference"], self.rule.alternative)

    def _decide(self, pooled: Effect, pairs: pd.DataFrame) -> Decision:
        if not pooled.n:
            return Verdict.UNTESTABLE, "the grid has no pair of these two"
        if pooled.n < MIN_PAIRS:
            least = 0.5**pooled.n
            return Verdict.UNTESTABLE, f"with n = {pooled.n} pairs the smallest attainable p is {least:.3g}"
        verdict, reason = self.rule.decide(pooled)
        against = [
            VARIANTS.get(variant, variant)
            for variant in in_order(pairs["variant"], VARIANTS)
            if self.rule.contradicts(self._effect(pairs[pairs["variant"] == variant]))
        ]
        if against and verdict is not Verdict.FAILS:
            return Verdict.FAILS, f"contradicted by {', '.join(against)} alone; over all operators, {reason}"
        return verdict, reason


@dataclass(frozen=True)
class Share:
    """The share of `whole`'s gain over `base` that `part` carries; holds from `MIN_SHARE` on."""

    part: Side
    whole: Side
    base: Side

    def judge(self, runs: pd.DataFrame) -> Finding:
        gains = [over_sources(paired(runs, side, self.base)) for side in (self.part, self.whole)]
        gains = gains[0].merge(gains[1], on=PAIR, suffixes=("_part", "_whole"))
        title = f"{self.part}'s share of {self.whole}'s gain over {self.base}"
        row, (verdict, reason) = self._row(gains), self._decide(gains)
        effect = f"share {row['Share']} {row['95 % interval']}".removesuffix(f" {MISSING}")
        return Finding(title, effect, MISSING, _by_variant(gains, self._row), verdict, reason)

    def _decide(self, gains: pd.DataFrame) -> Decision:
        share, low, high = share_of(gains["difference_part"], gains["difference_whole"])
        if 0 < len(gains) < MIN_PAIRS:
            return Verdict.UNTESTABLE, f"{len(gains)} pairs are fewer than {MIN_PAIRS}"
        if np.isnan(share):
            lack = f"{self.whole} gains nothing over {self.base}, so there is no gain to share"
            return Verdict.UNTESTABLE, lack if len(gains) else "the grid has no such three runs"
        if low >= MIN_SHARE:
            return Verdict.HOLDS, f"the whole interval of the share is at least {MIN_SHARE}"
        if high < MIN_SHARE:
            return Verdict.FAILS, f"the whole interval of the share is below {MIN_SHARE}"
        return Verdict.UNTESTABLE, f"the share's interval does not tell whether it is at least {MIN_SHARE}"

    def _row(self, gains: pd.DataFrame) -> dict[str, str]:
        part, whole = gains["difference_part"], gains["difference_whole"]
        share, low, high = share_of(part, whole)
        return {
            f"Gain of {self.part}": points(part.mean()),
            f"Gain of {self.whole}": points(whole.mean()),
            "Share": MISSING if np.isnan(share) else f"{share:.2f}",
            "95 % interval": MISSING if np.isnan(low) else f"[{low:.2f}, {high:.2f}]",
            "n": str(len(gains)),
        }


@dataclass(frozen=True)
class Claim:
    name: str
    statement: str
    comparisons: tuple[Comparison | Share, ...]


@dataclass(frozen=True)
class Judgement:
    """A claim with its findings: it holds if all of them do, and does not if any does not."""

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        verdicts = {finding.verdict for finding in self.findings}
        return next(v for v in (Verdict.FAILS, Verdict.UNTESTABLE, Verdict.HOLDS) if v in verdicts)


CAVEAT = (
    "Several tests at the 5 % level on one data set do not replace the paper's full grid of seven data sets and up to "
    "three sizes. Each test alone takes chance for an effect one time in twenty, and nothing here corrects for their "
    "number. A verdict says what these runs support, no more."
)
RANDOM, MIMETIC, COPY, MLPCOPY, FULLCOPY = map(Side, ("random", "mimetic", "copy", "mlpcopy", "fullcopy"))
RANDOM_D, COPY_D, MLPCOPY_D, FULLCOPY_D = (Side(side.start, distill=True) for side in (RANDOM, COPY, MLPCOPY, FULLCOPY))

CLAIMS = (
    Claim("C1", "Copy gives no reliable gain over Random, for any operator.", (Comparison(COPY, RANDOM, NO_GAIN),)),
    Claim("C2", "For TTT, Copy is worse than Random.", (Comparison(RANDOM, COPY, GREATER, ("ttt",)),)),
    Claim("C3", "Mimetic beats Copy.", (Comparison(MIMETIC, COPY, GREATER),)),
    Claim(
        "C4",
        "MLPCopy clearly beats Random and Copy, and carries most of FullCopy's gain.",
        (
            Comparison(MLPCOPY, RANDOM, GREATER),
            Comparison(MLPCOPY, COPY, GREATER),
            Share(MLPCOPY, FULLCOPY, RANDOM),
        ),
    ),
    Claim(
        "C5",
        "Distill lifts every initialisation.",
        (
            Comparison(RANDOM_D, RANDOM, GREATER),
            Comparison(COPY_D, COPY, GREATER),
            Comparison(MLPCOPY_D, MLPCOPY, GREATER),
            Comparison(FULLCOPY_D, FULLCOPY, GREATER),
        ),
    ),
    Claim("C6", "Copy w/ Distill beats Random w/ Distill.", (Comparison(COPY_D, RANDOM_D, GREATER),)),
    Claim(
        "C7",
        "MLPCopy w/ Distill is about equal to FullCopy w/ Distill.",
        (Comparison(MLPCOPY_D, FULLCOPY_D, ABOUT_EQUAL),),
    ),
    Claim(
        "C8",
        "The best recipe, FullCopy w/ Distill, matches or passes the Softmax reference.",
        (Comparison(FULLCOPY_D, REFERENCE, NOT_WORSE),),
    ),
)


def judge(runs: pd.DataFrame) -> list[Judgement]:
    """Every claim's verdict on these runs, without those of the loss ablation."""
    runs = beside_sources(default_runs(runs))
    return [Judgement(claim, tuple(comparison.judge(runs) for comparison in claim.comparisons)) for claim in CLAIMS]


def write_claims(runs: pd.DataFrame, path: str | Path) -> None:
    """Write the page of claims: a summary, the rules, then each claim with its effect per variant."""
    judgements = judge(runs)
    sections = [_introduction(runs), _summary(judgements), _rules(), *map(_section, judgements)]
    write_text(path, "\n\n".join(sections) + "\n")


def paired(runs: pd.DataFrame, a: Side, b: Side) -> pd.DataFrame:
    """Differences in top-1, a minus b, of runs that share data set, size, source, variant and seed.

    A reference that was not trained has no seed of its own and pairs with every seed.
    """
    left = _top1_of(runs, a)
    if b != REFERENCE:
        pairs = left.merge(_top1_of(runs, b), on=KEYS, suffixes=("_a", "_b"), validate="one_to_one")
    else:
        reference = references(runs)[[*CELL, "seed", "epochs", "top1"]]
        pairs = left.merge(reference, on=CELL, suffixes=("_a", "_b")).rename(columns={"seed_a": "seed"})
        pairs = pairs[(pairs["epochs"] == 0) | (pairs["seed"] == pairs["seed_b"])].drop_duplicates(KEYS)
    return pairs.assign(difference=pairs["top1_a"] - pairs["top1_b"])[[*KEYS, "difference"]]


def over_sources(pairs: pd.DataFrame) -> pd.DataFrame:
    """Differences averaged over sources: a run without a source stands beside each, and must not count as many."""
    return pairs.groupby(PAIR, sort=False, as_index=False)["difference"].mean()


def _top1_of(runs: pd.DataFrame, side: Side) -> pd.DataFrame:
    mask = (runs["variant"] != "softmax") & (runs["start"] == side.start) & (runs["distill"] == side.distill)
    return runs.loc[mask, [*KEYS, "top1"]]


def _by_variant(pairs: pd.DataFrame, row_of: Callable[[pd.DataFrame], dict[str, str]]) -> pd.DataFrame:
    variants = in_order(pairs["variant"], VARIANTS)
    parts = {VARIANTS.get(variant, variant): pairs[pairs["variant"] == variant] for variant in variants}
    parts["all, pooled"] = pairs
    seeds = [", ".join(map(str, sorted(part["seed"].unique()))) or MISSING for part in parts.values()]
    rows = [{"Operator": name, **row_of(part)} for name, part in parts.items()]
    return pd.DataFrame(rows).assign(Seeds=seeds)


def _effect_row(effect: Effect) -> dict[str, str]:
    row = {"Difference": points(effect.mean), "95 % interval": interval(effect)}
    return {**row, "n": str(effect.n), "p": p_value(effect.p)}


def _introduction(runs: pd.DataFrame) -> str:
    axes = {
        "data sets": [DATASETS.get(dataset, dataset) for dataset in in_order(runs["dataset"], DATASETS)],
        "sizes": sizes_in_order(runs),
        "sources": [source for source in runs["source"].unique() if source != NO_SOURCE],
        "seeds": sorted(runs["seed"].unique()),
    }
    listed = "; ".join(f"{name}: {', '.join(map(str, values)) or 'none'}" for name, values in axes.items())
    commits = ", ".join(runs["commit"].fillna("unknown").unique())
    return f"# The paper's claims on these runs\n\nRuns: {len(runs)}; {listed}; code: {commits}."


def _summary(judgements: list[Judgement]) -> str:
    rows = [
        {
            "Claim": judgement.claim.name if i == 0 else "",
            "Verdict": f"**{judgement.verdict}**" if i == 0 else "",
            "Comparison": finding.title,
            "Pooled effect (points) [95 %]": finding.effect,
            "p": finding.p,
            "Comparison alone": str(finding.verdict),
        }
        for judgement in judgements
        for i, finding in enumerate(judgement.findings)
    ]
    return f"## Summary\n\n{_markdown(pd.DataFrame(rows))}\n\n{CAVEAT}"


def _rules() -> str:
    share = (
        f"Share of a gain: holds if the 95 % interval of the ratio of the two pooled gains (paired bootstrap over "
        f"pairs) lies at {MIN_SHARE} or above, does not hold if it lies below; otherwise not testable."
    )
    rules = "\n".join(f"- {text}" for text in (*(rule.text for rule in RULES), share))
    return (
        "## How a verdict is reached\n\n"
        "Runs are paired by data set, size, source, operator and seed, and differ in the initialisation alone; a run "
        f"without a source stands in pairs of every source, and differences are then averaged over sources. They are "
        f"of last-epoch top-1, A {MINUS} B, in "
        "percentage points; intervals are 95 % t-intervals over pairs. p is from a sign-flip permutation test of the "
        f"mean over all pairs, exact up to {EXACT_PAIRS} pairs and of {RESAMPLES:,} seeded draws above. Pairs count as "
        "independent, although those of one seed share their images' order and may share a run.\n\n"
        f"{rules}\n\n"
        f"Fewer than {MIN_PAIRS} pairs decide nothing: even if all agree, the test cannot reach p < {ALPHA}. "
        "A statement about all operators does not hold where a single one contradicts it, whatever the average.\n\n"
        "A claim of several comparisons holds if all of them hold and does not hold if any does not; otherwise it is "
        "not testable."
    )


def _section(judgement: Judgement) -> str:
    findings = (
        f"### {finding.title}\n\n{_markdown(finding.table)}\n\n{finding.verdict.capitalize()}: {finding.reason}."
        for finding in judgement.findings
    )
    heading = f"## {judgement.claim.name}: {judgement.claim.statement}\n\nVerdict: **{judgement.verdict}**."
    return "\n\n".join([heading, *findings])


def _markdown(table: pd.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True)
