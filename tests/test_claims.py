"""Verdicts of built cases in each direction, and the statistics against scipy and by hand."""

import numpy as np
import pytest
from fakes import frame, grid_runs, run
from scipy import stats

from linvit.claims import (
    CLAIMS,
    COPY,
    COPY_D,
    FULLCOPY_D,
    MLPCOPY,
    RANDOM,
    REFERENCE,
    Comparison,
    Share,
    judge,
    paired,
    write_claims,
)
from linvit.evidence import ABOUT_EQUAL, GREATER, NO_GAIN, NOT_WORSE, Effect, Verdict, effect_of
from linvit.results import MINUS, MISSING

HOLDS, FAILS, UNTESTABLE = Verdict


def pairs_of(a: str, b: str, differences, base: float = 70.0, **changes) -> list[dict]:
    """Runs of two inits, one pair a seed, whose differences in top-1 are as given."""
    rows = [(run(a, base + d, seed, **changes), run(b, base, seed, **changes)) for seed, d in enumerate(differences)]
    return [row for pair in rows for row in pair]


def verdicts(rows) -> dict[str, Verdict]:
    return {judgement.claim.name: judgement.verdict for judgement in judge(frame(rows))}


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
        (GREATER, Effect(5, 1.0, 0.5, 1.5, 0.031), HOLDS),
        (GREATER, Effect(5, 1.0, -0.5, 2.5, 0.06), UNTESTABLE),
        (GREATER, Effect(5, 0.3, -0.2, 0.8, 0.12), FAILS),
        (GREATER, Effect(5, -1.0, -2.0, 0.0, 0.99), FAILS),
        (GREATER, Effect(4, 1.0, 0.9, 1.1, 0.0625), UNTESTABLE),
        (NO_GAIN, Effect(9, 0.1, -0.3, 0.5, 0.3), HOLDS),
        (NO_GAIN, Effect(9, -2.0, -3.0, -1.0, 1.0), HOLDS),
        (NO_GAIN, Effect(9, 0.3, 0.1, 0.5, 0.01), FAILS),
        (NO_GAIN, Effect(2, 0.3, -2.0, 2.6, 0.5), UNTESTABLE),
        (NO_GAIN, Effect(1, 0.3, np.nan, np.nan, np.nan), UNTESTABLE),
        (ABOUT_EQUAL, Effect(9, 0.3, 0.1, 0.5, 0.01), HOLDS),
        (ABOUT_EQUAL, Effect(9, 1.2, 0.8, 1.6, 0.01), FAILS),
        (ABOUT_EQUAL, Effect(9, -3.0, -4.0, -2.0, 0.01), FAILS),
        (ABOUT_EQUAL, Effect(9, 0.9, 0.5, 1.3, 0.01), UNTESTABLE),
        (ABOUT_EQUAL, Effect(9, 1.2, -0.1, 2.5, 0.1), UNTESTABLE),
        (NOT_WORSE, Effect(9, -0.5, -0.9, -0.1, 0.01), HOLDS),
        (NOT_WORSE, Effect(9, 2.0, 1.0, 3.0, 1.0), HOLDS),
        (NOT_WORSE, Effect(9, -2.0, -3.0, -1.0, 0.01), FAILS),
        (NOT_WORSE, Effect(9, -0.9, -1.5, -0.3, 0.01), UNTESTABLE),
        (NOT_WORSE, Effect(9, -1.1, -2.3, 0.1, 0.06), UNTESTABLE),
    ],
)
def test_rules_decide_in_each_direction(rule, effect, verdict):
    decided, reason = rule.decide(effect)
    assert decided is verdict
    assert reason


def test_pairs_share_everything_but_the_initialisation():
    rows = [run("copy", 71.0, 0), run("random", 70.0, 0), run("random", 60.0, 1), run("random", 50.0, 0, "elu")]
    pairs = paired(frame(rows).assign(source="deit"), COPY, RANDOM)
    assert pairs.to_dict("records") == [
        {"dataset": "pets", "size": "tiny", "source": "deit", "variant": "relu", "seed": 0, "difference": 1.0}
    ]


def test_a_fine_tuned_reference_pairs_by_seed_and_an_untrained_one_with_all():
    students = [run("fullcopy-distill", 80.0 + seed, seed) for seed in range(3)]
    tuned = [run("fullcopy", 79.0, seed, "softmax") for seed in range(2)]
    assert list(paired(frame(students + tuned), FULLCOPY_D, REFERENCE)["difference"]) == [1.0, 2.0]
    evaluated = [run("pretrained", 79.0, 7, "softmax", epochs=0)]
    assert list(paired(frame(students + evaluated), FULLCOPY_D, REFERENCE)["difference"]) == [1.0, 2.0, 3.0]


def test_runs_without_a_source_pair_with_every_source_but_count_once():
    rows = [run("random", 70.0), run("copy", 71.0), run("copy", 73.0, source="mae")]
    finding = judge(frame(rows))[0].findings[0]
    assert finding.effect == "+2.00"
    assert finding.table.iloc[-1]["n"] == "1"


def test_what_holds_on_average_does_not_hold_against_an_operator():
    """Two operators gain from Copy in every seed, three lose as much: on average, no gain."""
    rows = []
    for variant, gain in (("elu", 1.2), ("relu", 1.2), ("inline", -0.5), ("mhla", -0.8), ("ttt", -1.1)):
        rows += pairs_of("copy", "random", [gain, gain + 0.1, gain - 0.1], variant=variant)
    finding = judge(frame(rows))[0].findings[0]
    assert NO_GAIN.decide(effect_of([1.2] * 6 + [-0.5] * 3 + [-0.8] * 3 + [-1.1] * 3, "greater"))[0] is HOLDS
    assert finding.verdict is FAILS
    assert finding.reason.startswith("contradicted by ELU, ReLU alone; over all operators, ")


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


def test_the_table_has_each_variant_and_the_pooled_effect():
    rows = pairs_of("copy", "random", [1.0, 2.0, 3.0]) + pairs_of("copy", "random", [-1.0, -2.0], variant="elu")
    finding = Comparison(COPY, RANDOM, NO_GAIN).judge(frame(rows).assign(source="deit"))
    table = finding.table.set_index("Operator")
    assert list(table.index) == ["ELU", "ReLU", "all, pooled"]
    assert list(table["Difference"]) == [f"{MINUS}1.50", "+2.00", "+0.60"]
    assert list(table["n"]) == ["2", "3", "5"]
    assert list(table["Seeds"]) == ["0, 1", "0, 1, 2", "0, 1, 2"]
    # 2 ± t(0.975, 2) * 1 / sqrt(3), with t = 4.302653.
    assert table.loc["ReLU", "95 % interval"] == f"[{MINUS}0.48, +4.48]"


def test_softmax_runs_are_no_students():
    rows = pairs_of("copy", "random", [5.0, 5.0], variant="softmax")
    assert paired(frame(rows).assign(source="deit"), COPY, RANDOM).empty


def test_the_loss_ablation_is_left_out():
    rows = pairs_of("copy-distill", "copy", [1.0] * 5)
    extra = [run("copy-distill", 10.0, s, init="copy-output10", distill_weight=10.0) for s in range(5)]
    extra += [run("copy-distill", 10.0, s, init="copy-map3e3", distill_target="map") for s in range(5)]
    findings = next(j for j in judge(frame(rows + extra)) if j.claim.name == "C5").findings
    copied = next(f for f in findings if f.title == f"{COPY_D} {MINUS} {COPY}")
    assert copied.effect == "+1.00 [+1.00, +1.00]"
    assert copied.verdict is HOLDS


@pytest.mark.parametrize(
    ("part", "whole", "verdict", "share"),
    [
        ([72.0] * 5, [74.0] * 5, HOLDS, "0.50 [0.50, 0.50]"),
        ([71.0] * 5, [74.0] * 5, FAILS, "0.25 [0.25, 0.25]"),
        ([71.0] * 5, [69.0] * 5, UNTESTABLE, MISSING),
        ([76.0] * 5, [74.0] * 5, HOLDS, "1.50 [1.50, 1.50]"),
        ([74.0, 70.0, 72.0, 74.0, 70.0], [74.0] * 5, UNTESTABLE, "0.50 [0.10, 0.90]"),
        ([72.0] * 4, [74.0] * 4, UNTESTABLE, "0.50 [0.50, 0.50]"),
        ([73.0], [74.0], UNTESTABLE, "0.75"),
    ],
)
def test_share_of_a_gain(part, whole, verdict, share):
    rows = [run("random", 70.0, seed) for seed in range(len(part))]
    rows += [run("mlpcopy", top1, seed) for seed, top1 in enumerate(part)]
    rows += [run("fullcopy", top1, seed) for seed, top1 in enumerate(whole)]
    finding = Share(MLPCOPY, CLAIMS[3].comparisons[2].whole, RANDOM).judge(frame(rows).assign(source="deit"))
    assert (finding.verdict, finding.effect) == (verdict, f"share {share}")


def test_copy_no_better_than_random_holds_and_a_gain_does_not():
    assert verdicts(pairs_of("copy", "random", [0.1, -0.2, 0.0, 0.1, 0.0]))["C1"] is HOLDS
    assert verdicts(pairs_of("copy", "random", [0.1, -0.2, 0.0, 0.1]))["C1"] is UNTESTABLE
    assert verdicts(pairs_of("copy", "random", [2.1, 1.9, 2.0, 2.2, 2.0]))["C1"] is FAILS
    assert verdicts(pairs_of("copy", "random", [3.0, -2.0]))["C1"] is UNTESTABLE


def test_three_seeds_of_one_data_set_cannot_test_ttt_alone():
    three = pairs_of("copy", "random", [-1.0, -1.2, -0.8], variant="ttt")
    assert verdicts(three)["C2"] is UNTESTABLE
    elsewhere = pairs_of("copy", "random", [-1.0, -1.2, -0.8], variant="ttt", dataset="stl10")
    assert verdicts(three + elsewhere)["C2"] is HOLDS
    assert verdicts(pairs_of("copy", "random", [-1.0] * 6, variant="relu"))["C2"] is UNTESTABLE


def test_a_claim_of_several_holds_only_if_all_do():
    all_gain = [
        row
        for start in ("random", "copy", "mlpcopy", "fullcopy")
        for row in pairs_of(f"{start}-distill", start, [1.0] * 5)
    ]
    assert verdicts(all_gain)["C5"] is HOLDS
    assert verdicts([row for row in all_gain if row["start"] != "copy"])["C5"] is UNTESTABLE
    lost = [row | {"top1": 60.0} if row["init"] == "copy-distill" else row for row in all_gain]
    assert verdicts(lost)["C5"] is FAILS
    lost_and_missing = [row for row in lost if row["start"] != "random"]
    assert verdicts(lost_and_missing)["C5"] is FAILS


def test_equality_and_the_reference_in_both_directions():
    near = pairs_of("mlpcopy-distill", "fullcopy-distill", [0.1, -0.1, 0.0, 0.1, -0.1])
    far = pairs_of("mlpcopy-distill", "fullcopy-distill", [-3.1, -3.0, -2.9, -3.0, -3.0])
    assert verdicts(near)["C7"] is HOLDS
    assert verdicts(far)["C7"] is FAILS
    for reference, verdict in ((70.2, HOLDS), (75.0, FAILS)):
        softmax = [run("fullcopy", reference + 0.1 * seed, seed, "softmax") for seed in range(5)]
        assert verdicts(near + softmax)["C8"] is verdict


def test_an_empty_grid_tests_nothing():
    assert set(verdicts([]).values()) == {UNTESTABLE}


def test_the_page_sums_up_first_and_says_how_it_judged(tmp_path):
    runs = grid_runs(tmp_path, "mini")
    write_claims(runs, tmp_path / "claims.md")
    page = (tmp_path / "claims.md").read_text()
    assert f"Runs: {len(runs)}; data sets: Fashion-1K; sizes: mini; sources: fashion; seeds: 0, 1, 2; code: " in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Summary", "## How a verdict is reached"]
    assert [heading[3:5] for heading in headings[2:]] == [f"C{i}" for i in range(1, 9)]
    assert "do not replace the paper's full grid" in page
    assert f"| C2      | **not testable on this grid** | Random {MINUS} Copy (TTT)" in page
    assert "with n = 3 pairs the smallest attainable p is 0.125" in page
    for rule in (GREATER, NO_GAIN, ABOUT_EQUAL, NOT_WORSE):
        assert rule.text in page
