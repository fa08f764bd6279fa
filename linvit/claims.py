"""The paper's claims C1 to C11, judged on a runs frame [arXiv:2609.35745, Secs. 4, 5, C.4].

A claim is made of comparisons. Each looks at differences between paired runs and decides by a rule that the page
states. What a grid is too small to decide is called not testable, never a failure.
"""

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from linvit import incomplete
from linvit.comparisons import MIN_SHARE, REFERENCE, Comparison, Finding, Share, Side, peaks
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
    Verdict,
    holm,
)
from linvit.results import (
    DATASETS,
    MINUS,
    NO_SOURCE,
    beside_sources,
    default_runs,
    in_order,
    sizes_in_order,
)

EFFECT = "Pooled effect (points) [95 %]"
NUMBERS = {EFFECT, "Difference", "95 % interval", "n", "p", "p, corrected"}
"""Columns of the page that are aligned to the right."""


@dataclass(frozen=True)
class Claim:
    name: str
    statement: str
    paper: str
    """The paper's own verdict, and where it stands there."""
    comparisons: tuple[Comparison | Share, ...]
    on: Literal["runs", "peaks", "ood"] = "runs"
    """What is compared: the default runs, those at the peaks of the loss ablation, or out-of-distribution results."""


@dataclass(frozen=True)
class Judgement:
    """A claim with its findings: it holds if all of them do, and does not if any does not."""

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        verdicts = {finding.verdict for finding in self.findings}
        return next(v for v in (Verdict.FAILS, Verdict.UNTESTABLE, Verdict.HOLDS) if v in verdicts)


RANDOM, MIMETIC, COPY, MLPCOPY, FULLCOPY = map(Side, ("random", "mimetic", "copy", "mlpcopy", "fullcopy"))
RANDOM_D, COPY_D, MLPCOPY_D, FULLCOPY_D = (Side(side.start, distill=True) for side in (RANDOM, COPY, MLPCOPY, FULLCOPY))
OUTPUT_PEAK, MAP_PEAK = Side("copy", distill=True, peak="output"), Side("copy", distill=True, peak="map")
WHOLE, *STRIPPED = (
    Side(start, distill=None)
    for start in ("fullcopy", "fullcopy-notoken", "fullcopy-notoken-nopos", "fullcopy-notoken-nopos-nopatch")
)

CLAIMS = (
    Claim(
        "C1",
        "Copy gives no reliable gain over Random, for any operator, size or source.",
        "holds (Secs. 4.2, 4.3; Fig. 2, Table 1)",
        (Comparison(COPY, RANDOM, NO_GAIN, axes=("variant", "size", "source")),),
    ),
    Claim(
        "C2",
        "For TTT, Copy is worse than Random.",
        "holds (Sec. 4.2; Fig. 2, Table 1)",
        (Comparison(RANDOM, COPY, GREATER, ("ttt",)),),
    ),
    Claim("C3", "Mimetic beats Copy.", "holds (Sec. 4.2; Fig. 2)", (Comparison(MIMETIC, COPY, GREATER),)),
    Claim(
        "C4",
        "MLPCopy clearly beats Random and Copy, and carries most of FullCopy's gain.",
        "holds (Sec. 5.2; Figs. 4, A, B, Table F)",
        (
            Comparison(MLPCOPY, RANDOM, GREATER),
            Comparison(MLPCOPY, COPY, GREATER),
            Share(MLPCOPY, FULLCOPY, RANDOM),
        ),
    ),
    Claim(
        "C5",
        "Distill lifts every initialisation.",
        "holds, but for Copy with MHLA on Flowers (Secs. 5.1, 5.3; Figs. 3, 4, A, B)",
        (
            Comparison(RANDOM_D, RANDOM, GREATER),
            Comparison(COPY_D, COPY, GREATER),
            Comparison(MLPCOPY_D, MLPCOPY, GREATER),
            Comparison(FULLCOPY_D, FULLCOPY, GREATER),
        ),
    ),
    Claim(
        "C6",
        "Copy w/ Distill beats Random w/ Distill.",
        "holds for almost every operator and data set (Secs. 5.3, C.1; Figs. A, B)",
        (Comparison(COPY_D, RANDOM_D, GREATER),),
    ),
    Claim(
        "C7",
        "MLPCopy w/ Distill is about equal to FullCopy w/ Distill.",
        "holds (Sec. 5.3; Figs. 4, A, B)",
        (Comparison(MLPCOPY_D, FULLCOPY_D, ABOUT_EQUAL),),
    ),
    Claim(
        "C8",
        "The best recipe, FullCopy w/ Distill, matches or passes the Softmax reference.",
        "holds on most data sets (Secs. 5.3, C.1; Figs. 4, A, B)",
        (Comparison(FULLCOPY_D, REFERENCE, NOT_WORSE),),
    ),
    Claim(
        "C9",
        "For ELU and ReLU, matching maps and outputs peak alike; for InLine, matching maps is worse.",
        "holds (Sec. 5.4; Fig. 5)",
        (
            Comparison(MAP_PEAK, OUTPUT_PEAK, ABOUT_EQUAL, ("elu", "relu")),
            Comparison(OUTPUT_PEAK, MAP_PEAK, GREATER, ("inline",)),
        ),
        on="peaks",
    ),
    Claim(
        "C10",
        "Copy gives no out-of-distribution gain over Random.",
        "holds (Sec. 4.3; Table 2)",
        # Several sets that two models are evaluated on are not several pairs of models.
        (Comparison(COPY, RANDOM, NO_GAIN, over=("source", "dataset")),),
        on="ood",
    ),
    Claim(
        "C11",
        "Dropping class token, positions and patch embedding from FullCopy costs little.",
        "holds (Sec. C.4; Table G)",
        tuple(Comparison(side, WHOLE, NOT_WORSE, axes=("distill",)) for side in STRIPPED),
    ),
)


def judge(runs: pd.DataFrame, ood: pd.DataFrame | None = None) -> list[Judgement]:
    """Every claim's verdict on these runs, p corrected over all comparisons.

    Args:
        ood: Out-of-distribution results, which C10 is about.
    """
    ood = runs.head(0) if ood is None else ood
    frames = {
        "runs": beside_sources(default_runs(runs)),
        "peaks": peaks(runs),
        "ood": beside_sources(default_runs(ood)),
    }
    tested = [[comparison.test(frames[claim.on]) for comparison in claim.comparisons] for claim in CLAIMS]
    corrected = iter(holm([test.p for tests in tested for test in tests]))
    return [
        Judgement(claim, tuple(test.conclude(next(corrected)) for test in tests))
        for claim, tests in zip(CLAIMS, tested, strict=True)
    ]


def claims_text(runs: pd.DataFrame, ood: pd.DataFrame | None = None, judgements: list[Judgement] | None = None) -> str:
    """The page of claims in Markdown: a summary, the rules, then each claim with its effect per variant."""
    judgements = judgements or judge(runs, ood)
    sections = [_introduction(runs, ood), _summary(judgements), _rules(), *map(_section, judgements)]
    return "\n\n".join(sections) + "\n"


def _introduction(runs: pd.DataFrame, ood: pd.DataFrame | None) -> str:
    axes = {
        "data sets": [DATASETS.get(dataset, dataset) for dataset in in_order(runs["dataset"], DATASETS)],
        "sizes": sizes_in_order(runs),
        "sources": [source for source in runs["source"].unique() if source != NO_SOURCE],
        "seeds": sorted(runs["seed"].unique()),
    }
    listed = "; ".join(f"{name}: {', '.join(map(str, values)) or 'none'}" for name, values in axes.items())
    commits = ", ".join(runs["commit"].fillna("unknown").unique())
    shifted = "" if ood is None else f" Out-of-distribution results: {len(ood)}."
    note = incomplete.note(incomplete.left_out(runs, ood)).rstrip()
    left_out = f"\n\n{note}" if note else ""
    return f"# The paper's claims on these runs\n\nRuns: {len(runs):,}; {listed}; code: {commits}.{shifted}{left_out}"


def _summary(judgements: list[Judgement]) -> str:
    rows = [
        {
            "Claim": judgement.claim.name if i == 0 else "",
            "Verdict": f"**{judgement.verdict}**" if i == 0 else "",
            "The paper's": judgement.claim.paper if i == 0 else "",
            "Comparison": finding.title,
            EFFECT: finding.effect,
            "p": finding.p,
            "p, corrected": finding.corrected,
            "Comparison alone": str(finding.verdict),
        }
        for judgement in judgements
        for i, finding in enumerate(judgement.findings)
    ]
    caveat = (
        "A verdict says what these runs support, no more: fewer data sets, sizes or seeds do not replace the paper's "
        "full grid of seven data sets, up to three sizes and three seeds."
    )
    return f"## Summary\n\n{_markdown(pd.DataFrame(rows))}\n\n{caveat}"


def _rules() -> str:
    share = (
        f"Share of a gain: holds if the 95 % interval of the ratio of the two pooled gains (paired bootstrap over "
        f"pairs) lies at {MIN_SHARE} or above, does not hold if it lies below; otherwise not testable."
    )
    rules = "\n".join(f"- {text}" for text in (*(rule.text for rule in RULES), share))
    return (
        "## How a verdict is reached\n\n"
        "Runs are paired by data set, size, source, operator and seed, and differ in the initialisation alone; a run "
        "without a source stands in pairs of every source, and differences are then averaged over sources. Out of "
        "distribution they are averaged over the sets, too, that the same two models are evaluated on. They are of "
        f"last-epoch top-1, A {MINUS} B, in percentage points; intervals are 95 % t-intervals over pairs. p is from a "
        f"sign-flip permutation test of the mean over all pairs, exact up to {EXACT_PAIRS} pairs and of {RESAMPLES:,} "
        "seeded draws above. Pairs count as independent, although those of one seed share their images' order and may "
        "share a run.\n\n"
        "p is corrected by Holm's method for the number of this page's pooled comparisons of enough pairs. "
        "Intervals are not, and the p of a part decides nothing. A part contradicts by an interval that holds for all "
        f"parts of at least {MIN_PAIRS} pairs together (Bonferroni); those in the tables are 95 % each.\n\n"
        f"{rules}\n\n"
        f"Fewer than {MIN_PAIRS} pairs decide nothing: even if all agree, the test cannot reach p < {ALPHA}. "
        "A statement about all operators (C1: all sizes and sources, too; C11: without and with Distill) does not hold "
        "where a single one contradicts it, whatever the average.\n\n"
        "A peak (C9) is the weight with the best mean over seeds, found for each data set and operator and apart for "
        "outputs and maps. Of more weights the best is higher by chance: both should have been tried at as many.\n\n"
        "A claim of several comparisons holds if all of them hold and does not hold if any does not; otherwise it is "
        "not testable."
    )


def _section(judgement: Judgement) -> str:
    findings = (
        f"### {finding.title}\n\n{_markdown(finding.table)}\n\n{finding.verdict.capitalize()}: {finding.reason}."
        for finding in judgement.findings
    )
    claim = judgement.claim
    heading = f"## {claim.name}: {claim.statement}\n\nVerdict: **{judgement.verdict}**. The paper's: {claim.paper}."
    return "\n\n".join([heading, *findings])


def _markdown(table: pd.DataFrame) -> str:
    alignment = ["right" if column in NUMBERS else "left" for column in table]
    return table.to_markdown(index=False, disable_numparse=True, colalign=alignment)
