"""Throughput: the real training step is what is measured, and only what the table lacks."""

import json

import pytest
import torch
from tiny import SIZE, STUDY, changed, one_line, source, spec

from linvit import throughput
from linvit.grid import RunSpec
from linvit.rates import RatesError, Workload, read_rates, workload_of
from linvit.throughput import fill, measure, rates_of

CPU = torch.device("cpu")
PLAIN = spec("unused.npz")
DISTILLED = spec("unused.npz", start="copy-distill", source=source())


def wanted(*runs: RunSpec) -> dict[Workload, RunSpec]:
    return {workload_of(run): run for run in runs}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(throughput, "pick_device", lambda: CPU)


@pytest.fixture
def built(monkeypatch) -> list[tuple]:
    """The models that are built, each with its weights as they were then."""
    models, build = [], throughput.build_vit

    def recording(*arguments, **options):
        model = build(*arguments, **options)
        models.append((model, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        return model

    monkeypatch.setattr(throughput, "build_vit", recording)
    return models


@pytest.fixture
def measured(monkeypatch) -> list[tuple[Workload, int]]:
    """What is measured, at two and three images a second, with at most four images in memory."""
    calls = []

    def pretending(run: RunSpec, batch_size: int, device: torch.device) -> tuple[float, float]:
        calls.append((workload_of(run), batch_size))
        if batch_size > 4:
            raise torch.OutOfMemoryError("no room")
        return 2.0, 3.0

    monkeypatch.setattr(throughput, "rates_of", pretending)
    return calls


# --- what is measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", STUDY.variants)
def test_the_step_that_is_measured_trains_the_student(built, variant):
    training, evaluation = rates_of(spec("unused.npz", variant), 6, CPU)
    assert training > 0
    assert evaluation > 0
    ((student, before),) = built
    after = student.state_dict()
    assert not torch.equal(after["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("start", ["copy-distill", "copy-map1e4"])
def test_a_distilled_student_has_a_teacher_that_stays_as_it_is(built, start):
    rates_of(spec("unused.npz", start=start, source=source()), 4, CPU)
    (student, before), (teacher, teacher_before) = built
    assert not torch.equal(student.state_dict()["head.weight"], before["head.weight"])
    assert all(torch.equal(tensor, teacher_before[name]) for name, tensor in teacher.state_dict().items())
    assert len(teacher.blocks[0].attn._forward_hooks) == 1


def test_a_step_sees_the_whole_batch_at_once_by_the_runs_recipe(monkeypatch):
    """Also where the recipe adds up the gradients of smaller batches."""
    seen = []
    step = throughput.Loop.step

    def watching(loop, epoch, number, images, labels):
        seen.append((loop.recipe, tuple(images.shape), number))
        return step(loop, epoch, number, images, labels)

    monkeypatch.setattr(throughput.Loop, "step", watching)
    recipe = changed(PLAIN.recipe, micro_batch_size=2, precision="bfloat16", mixup=0.8, clip_grad=None)
    rates_of(PLAIN.model_copy(update={"recipe": recipe}), 6, CPU)
    assert [shape for _, shape, _ in seen] == [(6, 1, SIZE.image_size, SIZE.image_size)] * len(seen)
    assert [number for *_, number in seen] == list(range(len(seen)))
    assert {used for used, *_ in seen} == {changed(recipe, batch_size=6, micro_batch_size=None)}


# --- the table --------------------------------------------------------------------------------------------


def test_the_table_gets_a_row_for_each_workload_with_what_it_was_measured_on(tmp_path):
    table = fill(tmp_path / "bench" / "table.json", wanted(PLAIN, DISTILLED))
    assert [(rate.workload, rate.batch_size, rate.error) for rate in table.rates] == [
        (Workload("wee", "relu", distill, "auto"), 8, None) for distill in (None, "output")
    ]
    assert all(rate.train_images_per_second > 0 and rate.eval_images_per_second > 0 for rate in table.rates)
    assert (table.device, table.threads, table.versions["torch"]) == ("cpu", 1, torch.__version__.split("+")[0])
    assert read_rates(tmp_path / "bench" / "table.json") == table


def test_only_what_the_table_lacks_is_measured(tmp_path, measured):
    path = tmp_path / "table.json"
    first = fill(path, wanted(PLAIN), batch_size=4)
    second = fill(path, wanted(DISTILLED, PLAIN), batch_size=2)
    assert measured == [(workload_of(PLAIN), 4), (workload_of(DISTILLED), 2)]
    assert second.rates[:1] == first.rates
    assert fill(path, wanted(PLAIN, DISTILLED)) == second
    assert len(measured) == 2


def test_what_was_measured_before_an_error_is_kept(tmp_path, monkeypatch, measured):
    path, pretending = tmp_path / "table.json", throughput.rates_of

    def failing(run: RunSpec, *arguments):
        if run.init.distill:
            raise RuntimeError("broken")
        return pretending(run, *arguments)

    monkeypatch.setattr(throughput, "rates_of", failing)
    with pytest.raises(RuntimeError, match="broken"):
        fill(path, wanted(PLAIN, DISTILLED), batch_size=4)
    assert [rate.workload for rate in read_rates(path).rates] == [workload_of(PLAIN)]


@pytest.mark.parametrize(("micro", "asked"), [(None, 8), (3, 3)])
def test_the_batch_is_the_part_of_the_recipes_that_a_forward_pass_sees(tmp_path, measured, micro, asked):
    run = PLAIN.model_copy(update={"recipe": changed(PLAIN.recipe, micro_batch_size=micro)})
    fill(tmp_path / "table.json", wanted(run))
    assert measured[0][1] == asked


def test_a_batch_that_does_not_fit_is_halved_until_it_does(measured):
    rate = measure(PLAIN, 19, CPU)
    assert [n for _, n in measured] == [19, 9, 4]
    assert (rate.batch_size, rate.train_images_per_second, rate.eval_images_per_second) == (4, 2.0, 3.0)
    assert rate.error == "out of memory with 9 images a batch"


def test_a_model_of_which_no_image_fits_is_recorded_and_not_tried_again(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(throughput, "rates_of", full)
    with caplog.at_level("WARNING"):
        (rate,) = fill(tmp_path / "table.json", wanted(PLAIN), batch_size=2).rates
    assert (rate.train_images_per_second, rate.eval_images_per_second) == (None, None)
    assert rate.error == "out of memory with 1 images a batch"
    assert len(caplog.records) == 2
    monkeypatch.setattr(throughput, "rates_of", lambda *_: pytest.fail("measured again"))
    assert fill(tmp_path / "table.json", wanted(PLAIN)).rates == (rate,)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("device", "NVIDIA A100", "device NVIDIA A100, here it is cpu"),
        ("threads", 7, "threads 7, here it is 1"),
        ("versions", {"torch": "1.0"}, "torch 1.0, here it is"),
    ],
)
def test_a_table_of_another_device_is_refused_and_stays(tmp_path, measured, key, value, told):
    path = tmp_path / "table.json"
    fill(path, wanted(PLAIN), batch_size=1)
    table = json.loads(path.read_text())
    del table["sha256"]  # as who edits it by hand must
    table[key] = table[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(table))
    with pytest.raises(RatesError) as caught:
        fill(path, wanted(DISTILLED))
    assert told in one_line(caught.value)
    assert len(measured) == 1
    assert json.loads(path.read_text()) == table
