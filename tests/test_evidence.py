"""The statistics against scipy and by hand, and rules in each direction."""

import numpy as np
import pytest
from scipy import stats

from linvit.evidence import ABOUT_EQUAL, GREATER, NO_GAIN, NOT_WORSE, Effect, Verdict, contradicting, effect_of, holm

HOLDS, FAILS, UNTESTABLE = Verdict


def seen(n: int, mean: float, low: float, high: float, p: float) -> Effect:
    """An effect by the ends of its 95 % interval."""
    effect = Effect(n, mean, (high - low) / 2 / stats.t.ppf(0.975, n - 1), p)
    assert n == 1 or (effect.low, effect.high) == (pytest.approx(low), pytest.approx(high))
    return effect


def test_five_positive_pairs_have_the_smallest_exact_p():
    assert effect_of([1.0, 2.0, 0.5, 1.5, 3.0], "greater").p == pytest.approx(1 / 32)
    assert effect_of([1.0, 2.0, 0.5, 1.5, 3.0], "two-sided").p == pytest.approx(2 / 32)
    # Of 8 choices of signs, only +++ and -++ sum to the observed 2 or more.
    assert effect_of([-0.5, 1.0, 1.5], "greater").p == pytest.approx(2 / 8)


def test_more_pairs_are_a_seeded_monte_carlo_close_to_exact():
    values = np.random.default_rng(1).normal(0.3, 1, 17)
    first, second = (effect_of(values, "greater") for _ in range(2))
    assert first == second
    signs = 1 - 2 * ((np.arange(2**17)[:, None] >> np.arange(17)) & 1)
    assert first.p == pytest.approx(((signs @ values) >= values.sum() - 1e-12).mean(), abs=0.015)


def test_interval_is_students():
    values = [0.3, -0.1, 0.8, 0.4]
    effect = effect_of(values, "two-sided")
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (effect.n, effect.mean) == (4, pytest.approx(0.35))
    assert (effect.low, effect.high) == (pytest.approx(low), pytest.approx(high))


def test_one_pair_has_neither_interval_nor_p():
    effect = effect_of([0.5], "greater")
    assert (effect.n, effect.mean) == (1, 0.5)
    assert np.isnan([effect.low, effect.high, effect.p]).all()
    assert effect_of([], "greater").n == 0


@pytest.mark.parametrize(
    ("rule", "effect", "verdict"),
    [
        (GREATER, seen(5, 1.0, 0.5, 1.5, 0.031), HOLDS),
        (GREATER, seen(5, 1.0, -0.5, 2.5, 0.06), UNTESTABLE),
        (GREATER, seen(5, 0.3, -0.2, 0.8, 0.12), UNTESTABLE),
        (GREATER, seen(5, -0.1, -0.6, 0.4, 0.7), FAILS),
        (GREATER, seen(5, 0.3, 0.2, 0.4, 0.31), UNTESTABLE),
        (GREATER, seen(5, -1.0, -2.0, 0.0, 0.99), FAILS),
        (GREATER, seen(4, 1.0, 0.9, 1.1, 0.0625), UNTESTABLE),
        (NO_GAIN, seen(9, 0.1, -0.3, 0.5, 0.3), HOLDS),
        (NO_GAIN, seen(9, -2.0, -3.0, -1.0, 1.0), HOLDS),
        (NO_GAIN, seen(9, 0.3, 0.1, 0.5, 0.01), FAILS),
        (NO_GAIN, seen(9, 0.3, 0.1, 0.5, 0.08), UNTESTABLE),
        (NO_GAIN, seen(2, 0.3, -2.0, 2.6, 0.5), UNTESTABLE),
        (NO_GAIN, seen(1, 0.3, np.nan, np.nan, np.nan), UNTESTABLE),
        (ABOUT_EQUAL, seen(9, 0.3, 0.1, 0.5, 0.01), HOLDS),
        (ABOUT_EQUAL, seen(9, 1.2, 0.8, 1.6, 0.01), FAILS),
        (ABOUT_EQUAL, seen(9, -3.0, -4.0, -2.0, 0.01), FAILS),
        (ABOUT_EQUAL, seen(9, -3.0, -4.0, -2.0, 0.06), UNTESTABLE),
        (ABOUT_EQUAL, seen(9, 0.9, 0.5, 1.3, 0.01), UNTESTABLE),
        (ABOUT_EQUAL, seen(9, 1.2, -0.1, 2.5, 0.1), UNTESTABLE),
        (NOT_WORSE, seen(9, -0.5, -0.9, -0.1, 0.01), HOLDS),
        (NOT_WORSE, seen(9, 2.0, 1.0, 3.0, 1.0), HOLDS),
        (NOT_WORSE, seen(9, -2.0, -3.0, -1.0, 0.01), FAILS),
        (NOT_WORSE, seen(9, -2.0, -3.0, -1.0, 0.06), UNTESTABLE),
        (NOT_WORSE, seen(9, -0.9, -1.5, -0.3, 0.01), UNTESTABLE),
        (NOT_WORSE, seen(9, -1.1, -2.3, 0.1, 0.06), UNTESTABLE),
    ],
)
def test_rules_decide_in_each_direction(rule, effect, verdict):
    decided, reason = rule.decide(effect)
    assert decided is verdict
    assert reason


@pytest.mark.parametrize(
    ("a", "b", "good", "bad"),
    [
        ("random-distill", "random", [2.0, 2.1, 1.9], [-2.0, -2.1, -1.9]),
        ("mlpcopy-distill", "fullcopy-distill", [0.1, -0.1, 0.0], [-3.0, -3.1, -2.9]),
    ],
)
def test_every_rule_hears_a_single_operator(a, b, good, bad):
    rule = GREATER if b == "random" else ABOUT_EQUAL
    assert not rule.contradicts(effect_of(good, rule.alternative))
    assert rule.contradicts(effect_of(bad, rule.alternative))
    assert not rule.contradicts(effect_of(bad[:1], rule.alternative))


def test_parts_of_few_pairs_contradict_nothing():
    large, few = effect_of([-1.0, -1.2, -0.8, -1.1, -0.9], "greater"), effect_of([-1.0, -1.2, -0.8, -1.1], "greater")
    assert GREATER.contradicts(few)
    assert contradicting(GREATER, {"large": large, "few": few}) == ["large"]
    assert contradicting(GREATER, {"few": few}) == []


def test_the_more_parts_the_wider_are_the_intervals_that_contradict():
    part = effect_of([0.9, 0.1, 0.5, 0.4, 0.6], "greater")
    assert NO_GAIN.contradicts(part)
    assert contradicting(NO_GAIN, {"a": part}) == ["a"]
    assert contradicting(NO_GAIN, dict.fromkeys("abcdefghijklm", part)) == []


def test_parts_without_an_effect_seldom_contradict():
    random = np.random.default_rng(0)
    found = [
        bool(contradicting(NO_GAIN, {part: effect_of(random.normal(0, 0.3, 9), "greater") for part in "abcdefgh"}))
        for _ in range(100)
    ]
    assert sum(found) <= 8  # 2.5 in 100 are expected


def test_holms_correction_by_hand():
    # 0.01 x 4; 0.02 x 3; 0.02 x 2 is not below the one before; 0.5 x 1.
    assert holm([0.5, 0.02, 0.01, 0.02]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_what_is_no_test_is_not_counted_by_the_correction():
    assert holm([0.01, np.nan, 0.03]) == pytest.approx([0.02, np.nan, 0.03], nan_ok=True)
    assert np.isnan(holm([np.nan])).all()
    assert len(holm([])) == 0
