"""Numbers that are none, and data sets at the ends of what can be: one clear error, or the right result."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tally import Tally
from tiny import (
    CLASSES,
    RECIPE,
    SIZE,
    STUDY,
    arrays,
    changed,
    dataset,
    init,
    one_line,
    repeatable,
    softmax_weights,
    source,
    spec,
    store_source,
)

from linvit.config import Recipe, RunEnded, UserError
from linvit.data import ArrayBatches, evaluation_batches
from linvit.datasets import Images
from linvit.evaluate import evaluate
from linvit.fit import fit
from linvit.grid import RunSpec
from linvit.run import train
from linvit.sources import SourceError, fetch, to_safetensors
from linvit.vit import build_vit

torture = pytest.mark.torture
VARIANTS = ("softmax", "elu", "relu", "inline", "mhla", "ttt")
FILE_BY_FILE = changed(RECIPE, random_erasing=0.3)
"""A recipe whose images go through loading processes."""


def write(folder: Path, images: np.ndarray, labels: np.ndarray, **changes) -> RunSpec:
    """A run whose training split these are; its test split has as many, and every class."""
    classes = changes.pop("classes", CLASSES)
    test_images, test_labels = arrays(4 * classes)
    test_labels = np.arange(4 * classes) % classes
    splits = {"train_images": images, "train_labels": labels, "test_images": test_images, "test_labels": test_labels}
    np.savez(folder / "data.npz", **splits)
    of = dataset(folder / "data.npz", train_size=None, test_size=None, classes=classes)
    return spec(folder / "data.npz", dataset=of, **{"recipe": RECIPE} | changes)


def run(folder: Path, chosen: RunSpec, workers: int = 0, name: str = "run") -> dict:
    return train(chosen, folder / name, sources_folder=folder, data_root=folder, workers=workers)


def check(metrics: dict) -> None:
    """Every number of the history is one."""
    values = [value for record in metrics["history"] for value in record.values() if value is not None]
    assert all(math.isfinite(value) for value in values)
    assert 0 <= metrics["top1"] <= metrics["top5"] <= 100


# --- losses, gradients, weights ---------------------------------------------------------------------------


class Spoilt(torch.autograd.Function):
    """A loss of zero whose gradient is anything."""

    @staticmethod
    def forward(context: object, weight: torch.Tensor, gradient: float) -> torch.Tensor:
        context.gradient, context.shape = gradient, weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(context: object, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full(context.shape, context.gradient), None


def fit_with(recipe: Recipe, auxiliary: Callable, checkpoint: Path) -> None:
    """A training on noise with an auxiliary loss of the model's weights."""
    images, labels = arrays(21)
    split = Images(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))
    of, stream = dataset("unused"), spec("unused").stream
    torch.manual_seed(0)
    model = build_vit(SIZE, STUDY.variants["relu"].settings(), num_classes=CLASSES)
    fit(
        model,
        ArrayBatches(split, of, recipe, SIZE, stream),
        recipe,
        stream,
        num_classes=CLASSES,
        auxiliary=lambda _: auxiliary(model),
        evaluate=lambda: evaluate(model, evaluation_batches(split, of, recipe, SIZE)),
        checkpoint=checkpoint,
    )


@pytest.mark.parametrize("step", [1, 4, 9])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_ends_the_run(
    tmp_path: Path, tally: Tally, value: float, clip: float | None, step: int
) -> None:
    """Of nine steps with finite losses; after the last one, no loss is left to show what became of the weights."""
    steps = iter(range(1, 10))

    def auxiliary(model: torch.nn.Module) -> torch.Tensor:
        return Spoilt.apply(model.head.weight, value if next(steps) == step else 0.0)

    with tally.fault("a gradient of NaN or inf") as count:
        with pytest.raises(RunEnded) as told:
            fit_with(changed(RECIPE, clip_grad=clip), auxiliary, tmp_path / "checkpoint.pt")
        count.compare("not finite" in one_line(told.value) or "NaN" in one_line(told.value), True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 9])
def test_an_auxiliary_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, tally: Tally, value: float, step: int
) -> None:
    steps = iter(range(1, 10))

    def auxiliary(model: torch.nn.Module) -> torch.Tensor:
        return 0 * model.head.bias.sum() + (value if next(steps) == step else 0.0)

    with tally.fault("a distillation loss of NaN or inf") as count:
        with pytest.raises(RunEnded) as told:
            fit_with(RECIPE, auxiliary, tmp_path / "checkpoint.pt")
        place = f"loss is not finite at epoch {1 + (step - 1) // 3}, step {1 + (step - 1) % 3}: "
        count.compare(place in one_line(told.value), True)


def test_a_rate_that_diverges_ends_the_run(tmp_path: Path, tally: Tally) -> None:
    with tally.fault("a loss that diverges") as count:
        chosen = write(tmp_path, *arrays(21), recipe=changed(RECIPE, lr=1e30, min_lr=1e30))
        with pytest.raises(RunEnded) as told:
            run(tmp_path, chosen)
        count.compare((tmp_path / "run/metrics.json").exists(), False)
        one_line(told.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_source_with_weights_that_are_no_numbers_is_refused(tmp_path: Path, tally: Tally, value: float) -> None:
    weights = softmax_weights()
    for number, name in enumerate(weights):
        spoilt = {key: tensor.clone() for key, tensor in weights.items()}
        spoilt[name].view(-1)[number % spoilt[name].numel()] = value
        path = tmp_path / "old.safetensors"
        path.write_bytes(to_safetensors(spoilt, {}))
        with tally.fault("a weight of NaN or inf in a source") as count:
            with pytest.raises(SourceError) as told:
                fetch(source(path=str(path)), tmp_path / "fetched")
            count.compare(f"{name} holds values that are not finite" in one_line(told.value), True)


def test_a_model_whose_answers_are_no_numbers_has_no_accuracy(tally: Tally) -> None:
    """Wherever the NaN is among its weights."""
    images, labels = arrays(6)
    split = Images(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))
    batches = evaluation_batches(split, dataset("unused"), RECIPE, SIZE)
    for variant in VARIANTS:
        model = build_vit(SIZE, STUDY.variants[variant].settings(), num_classes=CLASSES)
        for parameter in model.parameters():
            kept = parameter.detach().clone()
            with tally.fault("a weight of NaN in a trained model"), torch.no_grad():
                parameter.fill_(math.nan)
                with pytest.raises(RunEnded, match="logits are NaN for 100 % of the test images: it has no accuracy"):
                    evaluate(model, batches)
                parameter.copy_(kept)
        assert evaluate(model, batches)["top5"] == 100


# --- data -------------------------------------------------------------------------------------------------

LABELS = {
    "a label too high": (lambda labels: np.where(labels == 0, CLASSES, labels), "train labels outside 0..2"),
    "a negative label": (lambda labels: np.where(labels == 0, -1, labels), "train labels outside 0..2"),
    "labels from one on": (lambda labels: labels + 1, "train labels outside 0..2"),
    "one label too high": (lambda labels: np.concatenate([labels[1:], [255]]), "train labels outside 0..2"),
    "a class missing": (lambda labels: np.where(labels == 1, 0, labels), "of 2 classes, expected 3: none of class 1"),
    "labels that are no integers": (lambda labels: labels + 0.5, "and integers [n]"),
    "fewer labels": (lambda labels: labels[:-1], "21 train images but 20 labels"),
    "no images": (lambda labels: labels[:0], "none of class 0"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_cannot_be_are_refused_before_training(tmp_path: Path, tally: Tally, name: str) -> None:
    change, reason = LABELS[name]
    images, labels = arrays(21)
    labels = change(labels.astype(np.int64))
    chosen = write(tmp_path, images[: len(labels)] if len(labels) == 0 else images, labels)
    with tally.fault("labels that cannot be") as count:
        with pytest.raises(UserError) as told:
            run(tmp_path, chosen)
        count.compare(reason in one_line(told.value), True)
        assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize("grey", [0, pytest.param(255, marks=torture)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_images_that_are_the_same_all_over_are_trained_on(
    tmp_path: Path, tally: Tally, variant: str, grey: int
) -> None:
    store_source(tmp_path)
    images, labels = np.full((21, 16, 16), grey, np.uint8), np.arange(21) % CLASSES
    start = "fullcopy" if variant == "softmax" else "fullcopy-distill"
    chosen = write(tmp_path, images, labels, variant=variant, start=start, source=source())
    with tally.fault("images of one grey"):
        check(run(tmp_path, chosen))


@pytest.mark.parametrize("recipe", [RECIPE, FILE_BY_FILE], ids=["in batches", "file by file"])
@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["plain", "mixed"])
def test_a_batch_larger_than_the_data_set_is_all_of_it(
    tmp_path: Path, tally: Tally, recipe: Recipe, mixing: dict, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = write(tmp_path, *arrays(5), recipe=changed(recipe, batch_size=4096, **mixing))
    with tally.fault("a batch larger than the data set"):
        check(run(tmp_path, chosen))
        assert "batch_size 4096 exceeds the 5 images" in caplog.text


@pytest.mark.parametrize("recipe", [RECIPE, FILE_BY_FILE], ids=["in batches", "file by file"])
def test_one_image_is_a_data_set(tmp_path: Path, tally: Tally, recipe: Recipe) -> None:
    """Of one class: there is nothing to learn, and nothing to get wrong."""
    chosen = write(tmp_path, *arrays(1), classes=1, recipe=recipe)
    with tally.fault("a single image") as count:
        metrics = run(tmp_path, chosen)
        check(metrics)
        count.compare((metrics["top1"], [record["loss"] for record in metrics["history"]]), (100.0, [0.0] * 3))


def test_more_workers_than_images(tmp_path: Path, tally: Tally) -> None:
    chosen = write(tmp_path, *arrays(3), recipe=changed(FILE_BY_FILE, epochs=1, warmup_epochs=0))
    with tally.fault("more workers than images") as count:
        alone, helped = (repeatable(run(tmp_path, chosen, workers, str(workers))) for workers in (0, 6))
        count.compare(helped, alone)


# --- determinism ------------------------------------------------------------------------------------------

STARTS = ("random", "mimetic", "copy", "fullcopy-distill")
REPEATED = ("mhla", "fullcopy-distill")


@pytest.mark.parametrize(
    ("variant", "start"),
    [
        pytest.param(variant, start, marks=() if (variant, start) == REPEATED else torture)
        for variant in VARIANTS[1:]
        for start in STARTS
        if start != "mimetic" or variant not in ("mhla", "ttt")
    ],
)
def test_a_spec_gives_the_same_metrics_and_model_whatever_the_workers(
    tmp_path: Path, tally: Tally, variant: str, start: str
) -> None:
    store_source(tmp_path)
    given = source() if init(start).needs_source else None
    recipe = changed(FILE_BY_FILE, mixup=0.8, drop_path=0.1, epochs=2)
    chosen = write(tmp_path, *arrays(21), variant=variant, start=start, recipe=recipe, source=given)
    first, model = repeatable(run(tmp_path, chosen)), (tmp_path / "run/model.safetensors").read_bytes()
    for workers in (0, 1, 3):
        with tally.fault("the same spec again, with other workers") as count:
            count.compare(repeatable(run(tmp_path, chosen, workers, "again")), first)
            count.compare((tmp_path / "again/model.safetensors").read_bytes(), model)
