"""Which runs are paired, what their parts are, and what single comparisons find."""

import pytest
from fakes import frame, pairs_of, run

from linvit.comparisons import POOLED, REFERENCE, Comparison, Finding, Share, Side, paired, parts_of, peaks
from linvit.config import Distill
from linvit.evidence import GREATER, NO_GAIN, NOT_WORSE, Verdict
from linvit.results import MINUS, MISSING, beside_sources

HOLDS, FAILS, UNTESTABLE = Verdict
RANDOM, COPY, MLPCOPY, FULLCOPY = map(Side, ("random", "copy", "mlpcopy", "fullcopy"))
FULLCOPY_D = Side("fullcopy", distill=True)


def concluded(comparison: Comparison | Share, rows: list[dict]) -> Finding:
    """A finding on runs that all stand beside one source, as if there were no other comparison."""
    tested = comparison.test(frame(rows).assign(source="deit"))
    return tested.conclude(tested.p)


def sweep(target: str, top1s: dict[float, list[float]], **changes) -> list[dict]:
    """Copy w/ Distill at several weights, a run a seed."""
    return [
        run(
            "copy-distill",
            top1,
            seed,
            init=f"copy-{target}{weight:g}",
            distill_target=target,
            distill_weight=weight,
            **changes,
        )
        for weight, values in top1s.items()
        for seed, top1 in enumerate(values)
    ]


def test_pairs_share_everything_but_the_initialisation():
    rows = [run("copy", 71.0, 0), run("random", 70.0, 0), run("random", 60.0, 1), run("random", 50.0, 0, "elu")]
    pairs = paired(frame(rows).assign(source="deit"), COPY, RANDOM)
    assert pairs.to_dict("records") == [
        {"dataset": "pets", "size": "tiny", "source": "deit", "variant": "relu", "seed": 0}
        | {"distill": False, "difference": 1.0}
    ]


def test_a_fine_tuned_reference_pairs_by_seed_and_an_untrained_one_with_all():
    students = [run("fullcopy-distill", 80.0 + seed, seed) for seed in range(3)]
    tuned = [run("fullcopy", 79.0, seed, "softmax") for seed in range(2)]
    assert list(paired(frame(students + tuned), FULLCOPY_D, REFERENCE)["difference"]) == [1.0, 2.0]
    evaluated = [run("pretrained", 79.0, 7, "softmax", epochs=0)]
    assert list(paired(frame(students + evaluated), FULLCOPY_D, REFERENCE)["difference"]) == [1.0, 2.0, 3.0]


def test_the_table_has_each_variant_and_the_pooled_effect():
    rows = pairs_of("copy", "random", [1.0, 2.0, 3.0]) + pairs_of("copy", "random", [-1.0, -2.0], variant="elu")
    finding = concluded(Comparison(COPY, RANDOM, NO_GAIN), rows)
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
    finding = concluded(Share(MLPCOPY, FULLCOPY, RANDOM), rows)
    assert (finding.verdict, finding.effect) == (verdict, f"share {share}")


def test_a_comparison_of_too_few_pairs_is_no_test():
    few, enough = (
        Comparison(COPY, RANDOM, NO_GAIN).test(frame(pairs_of("copy", "random", [1.0] * n)).assign(source="deit"))
        for n in (4, 5)
    )
    assert few.p != few.p
    assert enough.p == 1 / 32
    assert few.conclude(few.p).verdict is UNTESTABLE


def test_the_corrected_p_is_what_counts():
    tested = Comparison(COPY, RANDOM, GREATER).test(frame(pairs_of("copy", "random", [1.0] * 5)).assign(source="deit"))
    assert tested.conclude(0.031).verdict is HOLDS
    finding = tested.conclude(0.062)
    assert (finding.verdict, finding.p, finding.corrected) == (UNTESTABLE, "0.031", "0.062")
    assert finding.reason == "the pooled difference is positive, but corrected p is not below 0.05"


def test_parts_are_the_values_of_each_axis_and_a_single_size_is_no_part():
    rows = pairs_of("copy", "random", [1.0, 2.0]) + pairs_of("copy", "random", [3.0], variant="elu")
    pairs = paired(frame(rows).assign(source="deit"), COPY, RANDOM)
    axes = ("variant", "size", "source")
    assert list(parts_of(pairs, axes)) == ["ELU", "ReLU", POOLED]
    rows += pairs_of("copy", "random", [4.0], size="base")
    parts = parts_of(paired(frame(rows).assign(source="deit"), COPY, RANDOM), axes)
    assert {name: list(part["difference"]) for name, part in parts.items()} == {
        "ELU": [3.0],
        "ReLU": [1.0, 2.0, 4.0],
        "size tiny": [1.0, 2.0, 3.0],
        "size base": [4.0],
        POOLED: [1.0, 2.0, 3.0, 4.0],
    }


def test_a_gain_from_one_source_alone_contradicts_that_there_is_none():
    rows = [run("random", 70.0, seed, variant=v) for seed in range(5) for v in ("elu", "relu")]
    for source, gain in (("deit", -1.0), ("mae", 0.5)):
        rows += [run("copy", 70.0 + gain, seed, variant=v, source=source) for seed in range(5) for v in ("elu", "relu")]
    tested = Comparison(COPY, RANDOM, NO_GAIN, axes=("source",)).test(beside_sources(frame(rows)))
    finding = tested.conclude(tested.p)
    assert finding.verdict is FAILS
    assert finding.reason.startswith("contradicted by source mae alone; over all pairs, ")
    assert list(finding.table["n"]) == ["10", "10", "10"]


def test_a_side_of_both_pairs_each_run_with_its_like():
    stripped, whole = Side("fullcopy-notoken", distill=None), Side("fullcopy", distill=None)
    rows = pairs_of("fullcopy-notoken", "fullcopy", [-0.1, -0.3, -0.2])
    rows += pairs_of("fullcopy-notoken-distill", "fullcopy-distill", [0.2, 0.0, 0.1], base=80.0)
    finding = concluded(Comparison(stripped, whole, NOT_WORSE, axes=("distill",)), rows)
    table = finding.table.set_index("Part")
    assert finding.title == f"FullCopy minus class token {MINUS} FullCopy"
    assert table["Difference"].to_dict() == {
        "without Distill": f"{MINUS}0.20",
        "with Distill": "+0.10",
        POOLED: f"{MINUS}0.05",
    }
    assert finding.verdict is HOLDS
    assert concluded(Comparison(stripped, whole, NOT_WORSE, axes=("distill",)), rows[:6]).verdict is UNTESTABLE


def test_a_peak_is_the_weight_with_the_best_mean_of_its_target_operator_and_data_set():
    rows = sweep("output", {10: [70.0, 72.0], 50: [73.0, 71.0], 100: [75.0, 60.0]})
    rows += sweep("map", {3e3: [71.0, 71.0], 3e4: [74.0, 69.0]})
    rows += [*sweep("output", {10: [90.0], 50: [80.0]}, variant="elu"), run("copy"), run("fullcopy-distill")]
    found = peaks(frame(rows))
    assert {(row.variant, row.distill_target, row.distill_weight) for row in found.itertuples()} == {
        ("relu", "output", 50.0),
        ("relu", "map", 3e4),
        ("elu", "output", 10.0),
    }
    pairs = paired(found, Side("copy", True, "map"), Side("copy", True, "output"))
    assert list(pairs["difference"]) == [1.0, -2.0]


def test_a_weight_that_two_inits_share_counts_once():
    twice = [*sweep("output", {50: [70.0, 71.0]}), run("copy-distill", 70.0, 0), run("copy-distill", 71.0, 1)]
    assert len(peaks(frame(twice))) == 2
    assert peaks(frame([run("copy")])).empty


def test_losses_that_are_summed_over_blocks_are_another_sweep():
    assert Distill().loss == "output"
    assert Distill(reduction="sum").loss == "output-sum"
    assert Distill(target="map", distance="cross_entropy", reduction="sum").loss == "map-cross_entropy"
    assert Distill(target="map", distance="cross_entropy").loss == "map-cross_entropy-mean"
    swept = frame(sweep("output", {50.0: [80.0]}) + sweep("output-sum", {50.0: [70.0]})).assign(source="deit")
    assert peaks(swept)[["distill_target", "top1"]].to_dict("records") == [
        {"distill_target": "output", "top1": 80.0},
        {"distill_target": "output-sum", "top1": 70.0},
    ]
