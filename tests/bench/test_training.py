"""What the benchmark of the training step makes of its seconds; nothing is timed."""

import pytest
import torch
from timing import circumstances
from training import STUDY, Case, bare_step, cases, distilled, goals, page, ratios, stepping, with_real_batches

from linvit.datasets import Images

CPU = torch.device("cpu")
SECONDS = {
    "data": {"small": {"bare": 1.9, "ours": 2.0, "batches": 0.1}, "large": {"bare": 1.8, "ours": 2.0, "batches": 0.9}},
    "distilled": {"small: relu": {"plain": 1.0, "distilled": 1.3}, "small: elu": {"plain": 1.0, "distilled": 1.5}},
    "ways": {"small": {"plain": 2.0, "bfloat16": 1.0, "compile": 1.8, "channels_last": 2.2}},
}


def test_ratios_are_of_the_bare_loop_and_the_plain_step():
    of = ratios(SECONDS)
    assert of["data"]["small"] == pytest.approx({"ours": 0.95, "batches alone": 0.1 / 1.9})
    assert of["distilled"] == pytest.approx({"small: relu": 1.3, "small: elu": 1.5})
    assert of["ways"]["small"] == pytest.approx({"bfloat16": 0.5, "compile": 0.9, "channels_last": 1.1})


def test_goals_are_judged_case_by_case_and_told_on_the_page():
    of = ratios(SECONDS)
    verdicts = goals(of)
    assert list(verdicts.values()) == [True, False, True, False]
    text = page({"circumstances": circumstances(CPU), "ratios": of, "goals": verdicts})
    assert text.count(": met") == text.count(": NOT met") == 2
    assert "| small: elu" in text


def test_the_embedded_set_is_trained_by_its_own_recipe():
    (case,) = cases(CPU, quick=True)
    assert (len(case.images), case.batch_size) == (1000, STUDY.recipes["fashion-mini"].batch_size)
    assert case.recipe.precision == "float32"


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "bare"])
def test_both_loops_train(ours):
    (whole,) = cases(CPU, quick=True)
    case = Case("few", whole.run, whole.images, 4)
    model = case.model(CPU)
    before = model.head.weight.clone()
    if ours:
        stepping(case, case.loop(model, CPU))()
    else:
        images, labels = next(case.batches(case.recipe, CPU).epoch(1))
        bare_step(model, torch.optim.AdamW(model.parameters(), fused=True), images, labels)
    assert not torch.equal(model.head.weight, before)


def test_a_step_with_a_teacher_is_measured_beside_one_without():
    (whole,) = cases(CPU, quick=True)
    seconds = distilled(Case("few", whole.run, whole.images, 4), "relu", CPU, 1)
    assert set(seconds) == {"plain", "distilled"}
    assert all(value > 0 for value in seconds.values())


def test_an_epoch_is_measured_in_both_loops():
    (whole,) = cases(CPU, quick=True)
    few = Images(whole.images.images[:8], whole.images.labels[:8])
    seconds = with_real_batches(Case("few", whole.run, few, 4), CPU, 1)
    assert set(seconds) == {"bare", "ours", "batches"}
    assert all(value > 0 for value in seconds.values())
