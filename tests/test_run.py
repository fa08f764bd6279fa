"""One run from its spec to its metrics: complete, repeatable, written last."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from tiny import (
    CLASSES,
    RECIPE,
    SIZE,
    STUDY,
    TRAIN,
    changed,
    dataset,
    init,
    one_line,
    repeatable,
    softmax_weights,
    source,
    spec,
    store_source,
    write_npz,
)

from linvit import data, datasets, run, sources
from linvit.config import Init
from linvit.evaluate import count_flops, count_parameters, evaluate
from linvit.files import is_whole
from linvit.fit import Interrupted, NonFiniteLoss
from linvit.grid import RunSpec
from linvit.init import CopyError
from linvit.run import best_of, build_distillation, build_student, git_commit, train
from linvit.trained import load_model, save_model
from linvit.vit import build_vit
from linvit.watch import PROGRESS

KEYS = {
    "name",
    "spec",
    "top1",
    "top5",
    "best",
    "history",
    "parameters",
    "flops",
    "train_images_per_second",
    "eval_images_per_second",
    "wall_seconds",
    "peak_memory_bytes",
    "ranks",
    "device",
    "precision",
    "versions",
    "commit",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A folder with the images and a prepared source."""
    folder = tmp_path_factory.mktemp("study")
    write_npz(folder / "bands.npz")
    store_source(folder)
    return folder


def spec_in(study: Path, variant: str = "relu", start: str | Init = "random", **changes) -> RunSpec:
    chosen = init(start) if isinstance(start, str) else start
    return spec(study / "bands.npz", variant, chosen, **{"source": source() if chosen.needs_source else None} | changes)


def run_in(study: Path, folder: Path, spec: RunSpec) -> dict:
    metrics = train(spec, folder, sources_folder=study, data_root=study)
    written = (folder / "metrics.json").read_bytes()
    assert is_whole(written)
    assert metrics == {key: value for key, value in json.loads(written).items() if key != "sha256"}
    return metrics


@pytest.fixture(scope="module")
def distilled(study, tmp_path_factory) -> tuple[RunSpec, Path, dict]:
    """A finished run with everything in it: the spec, its folder, its metrics."""
    chosen = spec_in(study, "relu", "mlpcopy-distill", recipe=changed(RECIPE, eval_every=2))
    folder = tmp_path_factory.mktemp("run") / chosen.name
    return chosen, folder, run_in(study, folder, chosen)


# --- what a run leaves ------------------------------------------------------------------------------------


def test_metrics_hold_everything_that_is_promised(distilled):
    chosen, _, metrics = distilled
    assert set(metrics) == KEYS
    assert metrics["name"] == chosen.name == "bands/wee/relu/mlpcopy-distill/old/seed0"
    assert RunSpec.from_json(json.dumps(metrics["spec"])) == chosen
    assert 0 <= metrics["top1"] <= 100
    assert metrics["top5"] == 100  # of three classes
    assert metrics["device"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    assert set(metrics["versions"]) == {"python", "linvit", "torch", "torchvision", "timm", "numpy"}
    assert metrics["versions"]["timm"] == timm.__version__
    for timing in ("train_images_per_second", "eval_images_per_second", "wall_seconds", "peak_memory_bytes"):
        assert metrics[timing] > 0
    assert metrics["peak_memory_bytes"] > 50e6  # bytes: this process has torch loaded
    assert metrics["wall_seconds"] < 60


def test_the_history_has_a_record_an_epoch_with_its_losses(distilled):
    *_, metrics = distilled
    assert [record["epoch"] for record in metrics["history"]] == [1, 2, 3]
    for record in metrics["history"]:
        assert set(record) - {"top1", "top5"} == {"epoch", "lr", "loss", "task_loss", "distill_loss"}
        assert record["loss"] == pytest.approx(record["task_loss"] + record["distill_loss"])
    assert [record["epoch"] for record in metrics["history"] if "top1" in record] == [2, 3]


def test_the_reported_accuracy_is_the_last_epochs_and_the_best_stands_apart(distilled):
    *_, metrics = distilled
    assert metrics["top1"] == metrics["history"][-1]["top1"]
    assert metrics["best"] == best_of(metrics["history"])
    assert set(metrics["best"]) == {"epoch", "top1", "top5"}


def test_the_best_epoch_is_never_reported_as_the_result(study, tmp_path, monkeypatch):
    """The accuracy falls from epoch to epoch: top-1 is the last all the same."""
    accuracies = iter([90.0, 80.0, 70.0])
    monkeypatch.setattr(run, "evaluate", lambda *_: {"top1": next(accuracies), "top5": 99.0})
    metrics = run_in(study, tmp_path, spec_in(study))
    assert (metrics["top1"], metrics["top5"]) == (70.0, 99.0)
    assert metrics["best"] == {"epoch": 1, "top1": 90.0, "top5": 99.0}


def test_the_best_epoch_is_the_first_of_highest_top_1():
    def record(epoch, **accuracy):
        return {"epoch": epoch, "loss": 1.0, **accuracy}

    history = [
        record(1, top1=50.0, top5=80.0),
        record(2),
        record(3, top1=70.0, top5=70.0),
        record(4, top1=70.0, top5=90.0),
        record(5, top1=60.0, top5=99.0),
    ]
    assert best_of(history) == {"epoch": 3, "top1": 70.0, "top5": 70.0}
    assert best_of([record(1)]) is None
    assert best_of([]) is None


def test_the_saved_model_is_the_one_that_was_evaluated(distilled, study):
    chosen, folder, metrics = distilled
    model = build_vit(SIZE, chosen.variant, num_classes=CLASSES)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    test = datasets.read(chosen.dataset, "test", study)
    found = evaluate(model, data.evaluation_batches(test, chosen.dataset, chosen.recipe, chosen.size))
    assert found == {"top1": metrics["top1"], "top5": metrics["top5"]}
    assert metrics["parameters"] == count_parameters(model)
    assert metrics["flops"] == count_flops(model, SIZE)
    assert load_model(folder / "model.safetensors")[0] == chosen


def test_a_finished_run_leaves_spec_model_and_metrics_alone(distilled):
    chosen, folder, _ = distilled
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "model.safetensors", "spec.json"]
    assert RunSpec.from_json((folder / "spec.json").read_text()) == chosen


def test_the_metrics_are_written_last(study, tmp_path, monkeypatch):
    written = []

    def telling(write):
        def told(path, content):
            written.append((path.name, sorted(other.name for other in tmp_path.iterdir()) if tmp_path.exists() else []))
            write(path, content)

        return told

    monkeypatch.setattr(run, "write_text", telling(run.write_text))
    monkeypatch.setattr(run, "write_sealed", telling(run.write_sealed))
    run_in(study, tmp_path, spec_in(study))
    assert [name for name, _ in written] == ["spec.json", "metrics.json"]
    assert written[-1][1] == ["checkpoint.pt", "model.safetensors", "progress.json", "spec.json"]


class Failure(Exception):
    pass


def fail(*_, **__):
    raise Failure


@pytest.mark.parametrize("step", ["save_model", "count_flops", "images_per_second", "count_parameters"])
def test_a_run_that_fails_after_training_leaves_no_metrics_and_is_not_trained_again(study, tmp_path, monkeypatch, step):
    chosen = spec_in(study, "ttt")
    with monkeypatch.context() as patch:
        patch.setattr(run, step, fail)
        with pytest.raises(Failure):
            run_in(study, tmp_path / "a", chosen)
    assert not (tmp_path / "a" / "metrics.json").exists()
    whole = run_in(study, tmp_path / "b", chosen)
    monkeypatch.setattr(data.ArrayBatches, "augmented", fail)
    assert repeatable(run_in(study, tmp_path / "a", chosen)) == repeatable(whole)
    assert not (tmp_path / "a" / "checkpoint.pt").exists()


def test_a_metrics_file_is_never_half_written(study, tmp_path, monkeypatch):
    chosen = spec_in(study)
    run_in(study, tmp_path, chosen)
    before = (tmp_path / "metrics.json").read_bytes()
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: fail() if Path(to).name == "metrics.json" else replace(self, to)
    )
    with pytest.raises(Failure):
        train(chosen, tmp_path, sources_folder=study, data_root=study)
    assert (tmp_path / "metrics.json").read_bytes() == before
    assert (tmp_path / "checkpoint.pt").exists()


def test_temporary_files_of_a_killed_run_are_not_mistaken_for_real_ones(study, tmp_path):
    whole = run_in(study, tmp_path / "whole", spec_in(study))
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".checkpoint.7.pt", ".metrics.7.json", ".spec.7.json", ".model.7.safetensors"):
        (folder / name).write_bytes(b"half")
    assert repeatable(run_in(study, folder, spec_in(study))) == repeatable(whole)


@pytest.mark.parametrize("align", [None, {"epochs": 2}])
def test_a_run_of_other_settings_in_its_folder_costs_no_step_of_a_run(study, tmp_path, align):
    """The other one has no stage of alignment and is done, and its end leaves what is not its own."""
    chosen = spec_in(study, "relu", "fullcopy-distill", recipe=changed(RECIPE, align=align, eval_every=3))
    whole, asked = run_in(study, tmp_path / "whole", chosen), iter([False] * 7 + [True])
    with pytest.raises(Interrupted):
        train(chosen, tmp_path / "run", sources_folder=study, data_root=study, stop=lambda: next(asked))
    (tmp_path / "run" / PROGRESS).unlink()
    run_in(study, tmp_path / "run", spec_in(study))
    asked = iter([True])
    with pytest.raises(Interrupted) as stopped:
        train(chosen, tmp_path / "run", sources_folder=study, data_root=study, stop=lambda: next(asked))
    assert "stopped in epoch 3 after step 3" in str(stopped.value)
    assert repeatable(run_in(study, tmp_path / "run", chosen)) == repeatable(whole)
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def test_a_loss_that_is_no_number_leaves_no_metrics(study, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_normalized", lambda images, dataset: images * math.nan)
    with pytest.raises(NonFiniteLoss, match="epoch 1, step 1"):
        run_in(study, tmp_path, spec_in(study))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "spec.json"]


# --- repeating --------------------------------------------------------------------------------------------

EVERYTHING = [
    ("softmax", "fullcopy"),
    ("elu", "mimetic"),
    ("relu", "mlpcopy-distill"),
    ("relu", "copy-map3e3"),
    ("relu", "copy-transfer"),
    ("mhla", "copy-lolcats"),
    ("ttt", "copy-radlads"),
    ("inline", "impulse-distill"),
    ("mhla", "fullcopy-distill"),
    ("ttt", "random-distill"),
]


@pytest.mark.parametrize(("variant", "start"), EVERYTHING)
def test_a_spec_run_twice_gives_the_same_metrics_to_the_bit_apart_from_timings(study, tmp_path, variant, start):
    chosen = spec_in(study, variant, start, recipe=changed(RECIPE, drop_path=0.2, epochs=2))
    torch.manual_seed(1)
    first = run_in(study, tmp_path / "a", chosen)
    torch.manual_seed(2)
    again = run_in(study, tmp_path / "b", RunSpec.from_json(chosen.to_json()))
    assert repeatable(first) == repeatable(again)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert models[0] == models[1]


def test_another_seed_is_another_run(study, tmp_path):
    losses = {
        seed: run_in(study, tmp_path / str(seed), spec_in(study, seed=seed))["history"][0]["loss"] for seed in (0, 1)
    }
    assert losses[0] != losses[1]


def test_the_number_of_workers_changes_nothing(study, tmp_path):
    recipe = changed(RECIPE, random_erasing=0.3, epochs=2)
    chosen = spec_in(study, recipe=recipe)
    metrics = [
        train(chosen, tmp_path / str(workers), sources_folder=study, data_root=study, workers=workers)
        for workers in (0, 2)
    ]
    assert repeatable(metrics[0]) == repeatable(metrics[1])


# --- the parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["random", "mlpcopy"])
@pytest.mark.parametrize("variant", ["relu", "ttt"])
def test_a_distilled_run_differs_from_the_plain_one_and_says_so(study, tmp_path, variant, start):
    plain = run_in(study, tmp_path / "plain", spec_in(study, variant, start))
    helped = run_in(study, tmp_path / "helped", spec_in(study, variant, f"{start}-distill"))
    assert all(record["distill_loss"] is None for record in plain["history"])
    assert all(record["distill_loss"] > 0 for record in helped["history"])
    # The same start and the same images: the first difference is in what is learned.
    assert [r["task_loss"] for r in plain["history"]] != [r["task_loss"] for r in helped["history"]]
    assert helped["history"][-1]["distill_loss"] < helped["history"][0]["distill_loss"]
    for record in plain["history"]:
        assert record["loss"] == record["task_loss"]


def test_the_weight_scales_the_distillation_loss(study, tmp_path):
    """At a rate of almost nothing, ten times the weight is ten times the loss."""
    still = changed(RECIPE, lr=1e-12, min_lr=1e-12, epochs=1, warmup_epochs=0)
    losses = [
        run_in(study, tmp_path / str(weight), spec_in(study, "relu", init("copy-distill", weight), recipe=still))
        for weight in (5.0, 50.0)
    ]
    one, ten = (metrics["history"][0] for metrics in losses)
    assert ten["distill_loss"] == pytest.approx(10 * one["distill_loss"], rel=1e-4)
    assert ten["task_loss"] == pytest.approx(one["task_loss"], rel=1e-4)


def test_the_teacher_is_the_source_frozen_and_unchanged_by_training(study):
    chosen = spec_in(study, "relu", "random-distill")
    weights = sources.load(study / "old" / "wee")
    student = build_student(chosen, weights)
    distillation = build_distillation(chosen, weights, student)
    assert distillation.weight == 50
    teacher = dict(distillation.teacher.named_parameters())
    assert not any(parameter.requires_grad for parameter in teacher.values())
    for name, tensor in teacher.items():
        assert torch.equal(tensor, weights.tensors[name]), name
    assert build_distillation(spec_in(study, "relu", "copy"), weights, student) is None


@pytest.mark.parametrize(("start", "groups"), [("copy", ".attn."), ("mlpcopy", ".mlp."), ("fullcopy", "")])
def test_a_run_starts_from_what_its_init_copies(study, start, groups):
    weights = sources.load(study / "old" / "wee")
    student = build_student(spec_in(study, "relu", start), weights).state_dict()
    for name, tensor in student.items():
        copied = groups in name and not name.startswith("head.")
        assert torch.equal(tensor, weights.tensors[name]) == copied, name


def test_a_run_does_not_read_more_data_than_it_needs(study, tmp_path, monkeypatch):
    splits = []
    original = datasets.read

    def read(dataset, split, *arguments, **options):
        splits.append(split)
        return original(dataset, split, *arguments, **options)

    monkeypatch.setattr(datasets, "read", read)
    train(spec_in(study, "softmax", "pretrained"), tmp_path, sources_folder=study, data_root=study)
    assert splits == ["test"]


def test_the_pretrained_source_is_evaluated_as_it_is_with_its_own_head(study, tmp_path):
    chosen = spec_in(study, "softmax", "pretrained")
    metrics = run_in(study, tmp_path, chosen)
    model = build_vit(SIZE, num_classes=CLASSES)
    model.load_state_dict(softmax_weights())
    test = datasets.read(chosen.dataset, "test", study)
    expected = evaluate(model, data.evaluation_batches(test, chosen.dataset, chosen.recipe, SIZE))
    assert {key: metrics[key] for key in ("top1", "top5")} == expected
    assert (metrics["history"], metrics["best"], metrics["train_images_per_second"]) == ([], None, None)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in softmax_weights().items())
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_source_with_another_head_cannot_be_evaluated_as_it_is(study, tmp_path):
    prepared = store_source(tmp_path, classes=CLASSES + 1)
    chosen = spec_in(study, "softmax", "pretrained", source=prepared)
    with pytest.raises(CopyError, match=r"head\.weight"):
        train(chosen, tmp_path / "run", sources_folder=tmp_path, data_root=study)


def test_a_source_without_a_classifier_cannot_be_evaluated_as_it_is(study, tmp_path):
    """As the self-supervised ones."""
    prepared = store_source(tmp_path, classes=0)
    chosen = spec_in(study, "softmax", "pretrained", source=prepared)
    with pytest.raises(
        CopyError, match=r"^head\.bias: the source has no such parameter; it has no classifier"
    ) as caught:
        train(chosen, tmp_path / "run", sources_folder=tmp_path, data_root=study)
    one_line(caught.value)


@pytest.mark.parametrize(("mean", "warnings"), [(0.4, 0), (0.5, 1)])
def test_images_normalised_otherwise_than_the_sources_are_told_in_one_line(study, tmp_path, caplog, mean, warnings):
    prepared = source()
    images = {"mean": [mean], "std": [0.2]}
    sources.store(softmax_weights(), prepared, tmp_path / prepared.folder, {"images": images})
    train(spec_in(study, "softmax", "pretrained"), tmp_path / "run", sources_folder=tmp_path, data_root=study)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == warnings
    for text in told:
        assert all(part in one_line(text) for part in ("old/wee", "bands", "(0.5,)", "(0.4,)"))


def test_the_softmax_reference_starts_as_its_source(study, tmp_path):
    """FullCopy into the Softmax ViT: everything but the head, so that it knows the classes after a few steps."""
    still = changed(RECIPE, lr=1e-12, min_lr=1e-12, epochs=1, warmup_epochs=0)
    run_in(study, tmp_path, spec_in(study, "softmax", "fullcopy", recipe=still))
    saved, original = load_file(tmp_path / "model.safetensors"), softmax_weights()
    for name, tensor in saved.items():
        if name.startswith("head."):
            assert not torch.allclose(tensor, original[name], atol=1e-3)
        else:
            torch.testing.assert_close(tensor, original[name], atol=1e-6, rtol=0)


def test_every_image_is_trained_on_once_an_epoch(study, tmp_path, monkeypatch):
    seen = []
    original = data.ArrayBatches.epoch

    def epoch(self, number, start):
        for images, labels in original(self, number, start):
            seen.append((number, len(labels)))
            yield images, labels

    monkeypatch.setattr(data.ArrayBatches, "epoch", epoch)
    run_in(study, tmp_path, spec_in(study))
    assert seen == [(number, n) for number in (1, 2, 3) for n in (8, 8, 5)]
    assert sum(n for _, n in seen) == 3 * TRAIN


@pytest.mark.parametrize("missing", ["data", "source"])
def test_a_run_without_its_inputs_fails_before_anything_is_trained(study, tmp_path, missing):
    chosen = spec_in(study, "relu", "copy")
    if missing == "data":
        chosen = chosen.model_copy(update={"dataset": dataset(tmp_path / "nowhere.npz")})
    folders = {"sources_folder": tmp_path if missing == "source" else study, "data_root": study}
    with pytest.raises(ValueError, match="not found"):
        train(chosen, tmp_path / "run", **folders)
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# --- the commit -------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_is_that_of_the_code_whatever_is_configured(monkeypatch, tmp_path):
    def git(*command: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=b"]
        done = subprocess.run(["git", "-C", tmp_path, *names, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    code, config = tmp_path / "linvit" / "run.py", tmp_path / "config.yaml"
    code.parent.mkdir()
    for file in (code, config):
        file.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "a")
    monkeypatch.setattr(run, "__file__", str(code))
    commit = git("rev-parse", "--short=12", "HEAD")
    config.write_text("2")
    assert git_commit() == commit
    code.write_text("2")
    assert git_commit() == f"{commit}-dirty"


def test_outside_of_a_repository_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 128, "", "fatal: not a repository")
    )
    assert git_commit() is None


def test_on_a_machine_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


def test_a_saved_model_is_the_same_bytes_each_time(tmp_path):
    model = build_vit(SIZE, STUDY.variants["mhla"], num_classes=CLASSES)
    for name in ("a", "b"):
        save_model(model, spec("bands.npz"), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
