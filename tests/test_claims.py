"""Verdicts of built cases in each direction, and the page that tells them."""

from itertools import product

from fakes import frame, grid_runs, ood_frame, pairs_of, run

from linvit.claims import CLAIMS, COPY, COPY_D, claims_text, judge
from linvit.evidence import ABOUT_EQUAL, GREATER, NO_GAIN, NOT_WORSE, Verdict, effect_of
from linvit.published import tables
from linvit.results import MINUS, MISSING

HOLDS, FAILS, UNTESTABLE = Verdict


def verdicts(rows) -> dict[str, Verdict]:
    return {judgement.claim.name: judgement.verdict for judgement in judge(frame(rows))}


def test_runs_without_a_source_pair_with_every_source_but_count_once():
    rows = [run("random", 70.0), run("copy", 71.0), run("copy", 73.0, source="mae")]
    finding = judge(frame(rows))[0].findings[0]
    assert finding.effect == "+2.00"
    assert finding.table.iloc[-1]["n"] == "1"


def test_what_holds_on_average_does_not_hold_against_an_operator():
    """Two operators gain from Copy in every seed, three lose as much: on average, no gain."""
    rows = []
    for variant, gain in (("elu", 1.2), ("relu", 1.2), ("inline", -0.5), ("mhla", -0.8), ("ttt", -1.1)):
        gains = [gain, gain + 0.1, gain - 0.1]
        for dataset in ("cifar10", "stl10"):
            rows += pairs_of("copy", "random", gains, variant=variant, dataset=dataset)
    finding = judge(frame(rows))[0].findings[0]
    assert NO_GAIN.decide(effect_of([1.2] * 12 + [-0.5] * 6 + [-0.8] * 6 + [-1.1] * 6, "greater"))[0] is HOLDS
    assert finding.verdict is FAILS
    assert finding.reason.startswith("contradicted by ELU, ReLU alone; over all pairs, ")
    of_one = judge(frame([row for row in rows if row["dataset"] == "stl10"]))[0].findings[0]
    assert of_one.verdict is HOLDS  # three pairs of an operator decide nothing


def test_the_loss_ablation_is_left_out():
    rows = pairs_of("copy-distill", "copy", [1.0] * 10)
    extra = [run("copy-distill", 10.0, s, init="copy-output10", distill_weight=10.0) for s in range(10)]
    extra += [run("copy-distill", 10.0, s, init="copy-map3e3", distill_target="map") for s in range(10)]
    findings = next(j for j in judge(frame(rows + extra)) if j.claim.name == "C5").findings
    copied = next(f for f in findings if f.title == f"{COPY_D} {MINUS} {COPY}")
    assert copied.effect == "+1.00 [+1.00, +1.00]"
    assert copied.verdict is HOLDS


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
        for row in pairs_of(f"{start}-distill", start, [1.0] * 10)
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


def test_sets_out_of_distribution_make_no_further_pairs():
    rows = []
    for variant, gain in (("elu", 0.7), ("ttt", -0.2)):
        for dataset, shift in (("imagenet-a", 0.3), ("imagenet-r", -0.3)):
            gains = [gain + shift - 0.1, gain + shift, gain + shift + 0.1]
            rows += pairs_of("copy", "random", gains, variant=variant, dataset=dataset)
    judgements = {j.claim.name: j for j in judge(frame([]), ood_frame(rows))}
    table = judgements["C10"].findings[0].table
    assert table["n"].tolist() == ["3", "3", "6"]
    assert table["Difference"].tolist() == ["+0.70", f"{MINUS}0.20", "+0.25"]
    assert judgements["C10"].verdict is HOLDS


def test_the_papers_own_numbers_contradict_none_of_its_claims():
    """Tables 1, F and G, and Table 2 out of distribution, as three seeds with the printed spread, or a usual one."""
    rows, shifted = {}, {}
    for name, table in tables().items():
        for cell in table.cells():
            if cell.runs is None:
                continue
            for seed in range(cell.runs.seeds):
                noise = (cell.std or 0.1) * (0, 1, -1)[seed]
                like = cell.runs.start + ("-distill" if cell.runs.distill else "")
                excluded = {"seeds", "start", "distill"} | ({"source"} if like.startswith("random") else set())
                of_cell = cell.runs.model_dump(exclude=excluded)
                made = run(like, cell.value + noise, seed, **of_cell)
                (shifted if name == "table2" else rows)[made["run"]] = made
    judgements = judge(frame(rows.values()), ood_frame(shifted.values()))
    found = {judgement.claim.name: judgement.verdict for judgement in judgements}
    assert FAILS not in found.values()
    assert HOLDS in found.values()


def test_an_empty_grid_tests_nothing():
    assert set(verdicts([]).values()) == {UNTESTABLE}


def test_the_page_sums_up_first_and_says_how_it_judged(tmp_path):
    runs = grid_runs(tmp_path, "mini")
    page = claims_text(runs)
    assert f"Runs: {len(runs)}; data sets: Fashion-1K; sizes: mini; sources: fashion; seeds: 0, 1, 2; code: " in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Summary", "## How a verdict is reached"]
    assert [heading[3:].split(":")[0] for heading in headings[2:]] == [f"C{i}" for i in range(1, 12)]
    assert "do not replace the paper's full grid" in page
    summary = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")]
        for row in page.splitlines()
        if "| C" in row
    }
    assert summary["C2"][2:5] == ["**not testable on this grid**", CLAIMS[1].paper, f"Random {MINUS} Copy (TTT)"]
    assert summary["C2"][7] == MISSING
    assert "corrected by Holm's method for the number of this page's pooled comparisons" in page
    assert "with n = 3 pairs the smallest attainable p is 0.125" in page
    for rule in (GREATER, NO_GAIN, ABOUT_EQUAL, NOT_WORSE):
        assert rule.text in page


def test_every_claim_has_the_papers_verdict_beside_its_own():
    page = claims_text(frame([]))
    for claim in CLAIMS:
        assert claim.paper.startswith("holds")
        assert f"{claim.statement}\n\nVerdict: **{UNTESTABLE}**. The paper's: {claim.paper}." in page


def test_more_comparisons_ask_more_of_each():
    """Six pairs that agree reach p = 1/64: enough alone, too few among five comparisons."""
    alone = pairs_of("mimetic", "copy", [1.0, 1.1, 0.9, 1.0, 1.2, 0.8])
    assert verdicts(alone)["C3"] is HOLDS
    others = [
        row
        for a in ("mlpcopy", "mlpcopy-distill", "copy-distill", "fullcopy-distill")
        for row in (run(a, 70.0, s) for s in range(6))
    ]
    assert verdicts(alone + others)["C3"] is UNTESTABLE


def sweeps(variant: str, output: float, maps: float) -> list[dict]:
    """Sweeps of three weights in eight seeds whose peaks are as given."""
    return [
        run("copy-distill", peak - drop + 0.1 * seed, seed, variant, init=f"copy-{target}{weight:g}")
        | {"distill_target": target, "distill_weight": weight}
        for target, peak, best in (("output", output, 50.0), ("map", maps, 3e4))
        for weight, drop in ((best, 0.0), (best / 5, 2.0), (best * 5, 3.0))
        for seed in range(8)
    ]


def test_peaks_alike_and_apart():
    alike = sweeps("elu", 80.0, 80.1) + sweeps("relu", 75.0, 74.8)
    assert verdicts(alike + sweeps("inline", 78.0, 76.0))["C9"] is HOLDS
    assert verdicts(alike + sweeps("inline", 78.0, 78.0))["C9"] is FAILS
    assert verdicts(sweeps("elu", 80.0, 77.0) + sweeps("inline", 78.0, 76.0))["C9"] is FAILS
    assert verdicts(alike)["C9"] is UNTESTABLE


def test_the_out_of_distribution_claim_is_judged_on_those_results_alone():
    def judged(gain: float) -> Verdict:
        rows = [
            row
            for dataset, variant in product(("imagenet-a", "imagenet-r"), ("elu", "ttt"))
            for row in pairs_of("copy", "random", [gain, gain + 0.1, gain - 0.1], dataset=dataset, variant=variant)
        ]
        of_claim = {j.claim.name: j for j in judge(frame([run("copy", 99.0), run("random", 1.0)]), ood_frame(rows))}
        assert of_claim["C10"].findings[0].table["n"].iloc[-1] == "6"
        return of_claim["C10"].verdict

    assert judged(-0.2) is HOLDS
    assert judged(1.0) is FAILS
    assert verdicts(pairs_of("copy", "random", [0.0] * 9))["C10"] is UNTESTABLE


def test_what_fullcopy_can_do_without():
    def stripped(loss: float) -> list[dict]:
        names = ("fullcopy-notoken", "fullcopy-notoken-nopos", "fullcopy-notoken-nopos-nopatch")
        whole = [run(f"fullcopy{d}", 80.0 + s, s) for d in ("", "-distill") for s in range(3)]
        return whole + [run(f"{n}{d}", 80.0 + s - loss, s) for n in names for d in ("", "-distill") for s in range(3)]

    assert verdicts(stripped(0.2))["C11"] is HOLDS
    assert verdicts(stripped(2.0))["C11"] is FAILS
    assert verdicts(stripped(0.2)[:-1])["C11"] is HOLDS
    assert verdicts(stripped(0.2)[:-6])["C11"] is UNTESTABLE
