"""Paired differences and what they decide: effect sizes, sign-flip tests and the rules that make verdicts.

A rule says what must be seen for a statement to hold and for it not to hold; what the data are too few to decide
is not testable, never a failure.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy import stats

from linvit.results import MINUS, MISSING, signed

ALPHA = 0.05
CONFIDENCE = 0.95
MIN_PAIRS = 5
"""Fewer pairs decide nothing: even if all agree, a sign-flip test cannot reach `ALPHA`."""
MARGIN = 1.0
"""Points of top-1 within which two initialisations count as about equal."""
EXACT_PAIRS = 16
"""Up to this many pairs every choice of signs is tried; above, `RESAMPLES` random ones."""
RESAMPLES = 9_999


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNTESTABLE = "not testable on this grid"


@dataclass(frozen=True)
class Effect:
    """Paired differences in points: mean, t-interval and p of a sign-flip test; NaN where n is too small."""

    n: int
    mean: float
    error: float
    """Standard error of the mean."""
    p: float
    confidence: float = CONFIDENCE
    """Of the interval."""

    @property
    def low(self) -> float:
        return self.mean - self._half

    @property
    def high(self) -> float:
        return self.mean + self._half

    @property
    def _half(self) -> float:
        return float(stats.t.ppf((1 + self.confidence) / 2, self.n - 1) * self.error) if self.n > 1 else np.nan


Decision = tuple[Verdict, str]


@dataclass(frozen=True)
class Rule:
    """How a pooled effect becomes a verdict and its reason; `alternative` is the test's, as scipy names them.

    A statement about all operators is not true on average alone: `contradicts` tells whether the effect of a
    part of the pairs, such as those of a single operator, says the opposite, its interval being widened for the
    number of parts.
    """

    text: str
    alternative: str
    decide: Callable[[Effect], Decision]
    contradicts: Callable[[Effect], bool]


def effect_of(differences: Iterable[float], alternative: str) -> Effect:
    """Mean, 95 % t-interval and sign-flip permutation test of paired differences.

    The test is exact up to `EXACT_PAIRS` pairs and a seeded Monte Carlo above.
    """
    values = np.asarray(differences, dtype=float)
    n, mean = len(values), float(values.mean()) if len(values) else np.nan
    if n < 2:
        return Effect(n, mean, np.nan, np.nan)
    test = stats.permutation_test(
        (values,),
        lambda signed, axis: signed.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**n if n <= EXACT_PAIRS else RESAMPLES,
        batch=1_000,
        alternative=alternative,
        rng=np.random.default_rng(0),
    )
    return Effect(n, mean, float(stats.sem(values)), float(test.pvalue))


def contradicting(rule: "Rule", parts: Mapping[str, Effect]) -> list[str]:
    """Which parts of the pairs say the opposite, at 95 % for all of them together (Bonferroni).

    Parts of fewer than `MIN_PAIRS` pairs decide nothing.
    """
    large = {name: effect for name, effect in parts.items() if effect.n >= MIN_PAIRS}
    widened = {name: replace(e, confidence=1 - (1 - CONFIDENCE) / len(large)) for name, e in large.items()}
    return [name for name, effect in widened.items() if rule.contradicts(effect)]


def holm(ps: Iterable[float]) -> np.ndarray:
    """p corrected for how many there are, by Holm's step-down method; NaN is no test and stays NaN."""
    ps = np.asarray(ps, dtype=float)
    order = np.argsort(ps)[: np.isfinite(ps).sum()]  # NaN sorts last
    corrected = np.full(len(ps), np.nan)
    corrected[order] = np.maximum.accumulate(ps[order] * np.arange(len(order), 0, -1)).clip(max=1)
    return corrected


def share_of(part: Iterable[float], whole: Iterable[float]) -> tuple[float, float, float]:
    """The ratio of two mean gains and its 95 % interval, by a seeded paired bootstrap; NaN where there is none."""
    gains = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    if len(gains[0]) == 0 or gains[1].mean() <= 0:
        return np.nan, np.nan, np.nan
    share = gains[0].mean() / gains[1].mean()
    if len(gains[0]) < 2:
        return share, np.nan, np.nan
    low, high = stats.bootstrap(
        gains,
        lambda part, whole, axis: part.mean(axis=axis) / whole.mean(axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return share, float(low), float(high)


def _differs(effect: Effect) -> bool:
    return (effect.low > 0 or effect.high < 0) and abs(effect.mean) > MARGIN


def _is_worse(effect: Effect) -> bool:
    return effect.high < 0 and effect.mean < -MARGIN


def _greater(effect: Effect) -> Decision:
    if effect.mean > 0 and effect.p < ALPHA:
        return Verdict.HOLDS, f"the pooled difference is {points(effect.mean)} points with corrected p below {ALPHA}"
    if effect.mean <= 0 and effect.high < MARGIN:
        return Verdict.FAILS, f"the pooled difference is not positive, and a gain of {MARGIN} points is ruled out"
    if effect.mean > 0:
        return Verdict.UNTESTABLE, f"the pooled difference is positive, but corrected p is not below {ALPHA}"
    return _too_wide(effect)


def _no_gain(effect: Effect) -> Decision:
    if effect.low > 0:
        return _if_corrected(effect, "the whole interval is above 0: a reliable gain")
    if effect.high < MARGIN:
        return Verdict.HOLDS, f"the interval reaches 0 or below and stays under a gain of {MARGIN} points"
    return _too_wide(effect)


def _about_equal(effect: Effect) -> Decision:
    if effect.low > -MARGIN and effect.high < MARGIN:
        return Verdict.HOLDS, f"the whole interval is within ±{MARGIN} points"
    if _differs(effect):
        return _if_corrected(effect, f"the interval excludes 0 and the pooled difference is beyond ±{MARGIN} points")
    return _too_wide(effect)


def _not_worse(effect: Effect) -> Decision:
    if effect.low > -MARGIN:
        return Verdict.HOLDS, f"the whole interval is above {MINUS}{MARGIN} points"
    if _is_worse(effect):
        return _if_corrected(effect, f"the interval is below 0 and the pooled difference below {MINUS}{MARGIN} points")
    return _too_wide(effect)


def _if_corrected(effect: Effect, reason: str) -> Decision:
    """A difference refutes a statement only if it is one among all comparisons of the page."""
    if effect.p < ALPHA:
        return Verdict.FAILS, f"{reason}, with corrected p below {ALPHA}"
    return Verdict.UNTESTABLE, f"{reason}, but corrected p is not below {ALPHA}"


def _too_wide(effect: Effect) -> Decision:
    return Verdict.UNTESTABLE, "the interval is too wide for the rule to decide"


GREATER = Rule(
    f"A greater than B: holds if the pooled difference is positive and its one-sided p, corrected, is below {ALPHA}; "
    f"does not hold if the difference is not positive and its 95 % interval ends below {MARGIN} points; otherwise not "
    "testable. Contradicted by a part whose interval lies below 0.",
    "greater",
    _greater,
    lambda effect: effect.high < 0,
)
NO_GAIN = Rule(
    "No reliable gain of A over B: does not hold if the 95 % interval lies above 0 and the one-sided p for a gain, "
    f"corrected, is below {ALPHA}; holds if the interval reaches 0 or below and ends below {MARGIN} points; otherwise "
    "not testable. Contradicted by a part whose interval lies above 0.",
    "greater",
    _no_gain,
    lambda effect: effect.low > 0,
)
ABOUT_EQUAL = Rule(
    f"A about equal to B: holds if the 95 % interval lies within ±{MARGIN} points; does not hold if it excludes 0, the "
    f"pooled difference is beyond ±{MARGIN} points and its two-sided p, corrected, below {ALPHA}; otherwise not "
    f"testable. Contradicted by a part whose interval excludes 0 and whose difference is beyond ±{MARGIN} points.",
    "two-sided",
    _about_equal,
    _differs,
)
NOT_WORSE = Rule(
    f"A not worse than B: holds if the 95 % interval's lower end is above {MINUS}{MARGIN} points; does not hold if its "
    f"upper end is below 0, the pooled difference below {MINUS}{MARGIN} points and its one-sided p for a loss, "
    f"corrected, below {ALPHA}; otherwise not testable. Contradicted by a part whose interval lies below 0 and whose "
    f"difference is below {MINUS}{MARGIN} points.",
    "less",
    _not_worse,
    _is_worse,
)
RULES = (GREATER, NO_GAIN, ABOUT_EQUAL, NOT_WORSE)


def points(value: float) -> str:
    return signed(value, 2)


def interval(effect: Effect) -> str:
    return MISSING if np.isnan(effect.low) else f"[{points(effect.low)}, {points(effect.high)}]"


def with_interval(effect: Effect) -> str:
    return points(effect.mean) + ("" if np.isnan(effect.low) else f" {interval(effect)}")


def p_value(p: float) -> str:
    if np.isnan(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
