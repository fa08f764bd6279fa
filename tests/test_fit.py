"""The training loop: its schedule, what it does with a loss that is no number, and how it goes on after a kill."""

import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    CLASSES,
    RECIPE,
    RGB,
    SIZE,
    STUDY,
    changed,
    dataset,
    one_line,
    repeatable,
    spec,
    store_source,
    write_npz,
)
from torch import nn

from linvit import fit as fitting
from linvit.config import Recipe
from linvit.data import training_batches
from linvit.datasets import Images
from linvit.distill import AttentionDistillation
from linvit.fit import CHECK_EVERY, Interrupted, Loop, NonFiniteLoss, fit, learning_rate, mixing, parameter_groups
from linvit.grid import RunSpec
from linvit.progress import CheckpointError, Progress, restore, save
from linvit.run import build_student, train
from linvit.vit import build_vit
from linvit.watch import Watch

STREAM = spec("unused").stream


def tiny_vit(variant: str = "relu", **options) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_vit(SIZE, STUDY.variants[variant], num_classes=CLASSES, **options)


def linear_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


@dataclass
class Held:
    """Batches of 4x4 noise; `spoil` may change an epoch's step."""

    n: int = 10
    batch_size: int = 4
    spoil: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda epoch, step, images: images

    def __len__(self) -> int:
        return -(-self.n // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        images = torch.randn(self.n, 1, 4, 4, generator=torch.Generator().manual_seed(epoch))
        labels = torch.arange(self.n) % CLASSES
        for step, (x, y) in enumerate(zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)):
            if step >= start:
                yield self.spoil(epoch, step, x), y


def fitted(model: nn.Module | None = None, batches: Held | None = None, recipe: Recipe = RECIPE, **options) -> Progress:
    return fit(model or linear_model(), batches or Held(), recipe, STREAM, num_classes=CLASSES, **options)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- learning rate ----------------------------------------------------------------------------------------

SCHEDULES = [
    (Recipe(name="r", epochs=300, warmup_epochs=50), 98),
    (Recipe(name="r", epochs=600, warmup_epochs=100), 2),
    (Recipe(name="r", epochs=45, warmup_epochs=5, lr=1e-3, min_lr=1e-5), 16),
    (Recipe(name="r", epochs=3, warmup_epochs=1, min_lr=0.0), 7),
    (Recipe(name="r", epochs=4, warmup_epochs=0), 5),
    (Recipe(name="r", epochs=10, warmup_epochs=1), 1),
]


@pytest.mark.parametrize(("recipe", "steps"), SCHEDULES)
def test_the_rate_rises_linearly_to_the_peak_and_falls_by_half_a_cosine_to_the_floor(recipe, steps):
    rates = [learning_rate(recipe, step, steps) for step in range(recipe.epochs * steps)]
    warmup = recipe.warmup_epochs * steps
    assert rates[0] == pytest.approx(recipe.lr / max(1, warmup))
    if warmup:
        assert rates[warmup - 1] == recipe.lr
        assert rates[warmup // 2] == pytest.approx(recipe.lr * (warmup // 2 + 1) / warmup)
        assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert rates[warmup] == recipe.lr
    assert rates[-1] == pytest.approx(recipe.min_lr, abs=1e-15)
    assert all(a > b for a, b in itertools.pairwise(rates[warmup:]))
    middle = (warmup + len(rates) - 1) / 2
    if middle.is_integer():
        assert rates[int(middle)] == pytest.approx((recipe.lr + recipe.min_lr) / 2)


def test_a_single_step_after_the_warm_up_is_at_the_peak():
    recipe = Recipe(name="r", epochs=2, warmup_epochs=1)
    assert [learning_rate(recipe, step, 1) for step in range(2)] == [recipe.lr, recipe.lr]


def test_each_epoch_records_the_rate_of_its_last_step():
    history = fitted().history
    steps = len(Held())
    assert [record["lr"] for record in history] == [
        learning_rate(RECIPE, epoch * steps - 1, steps) for epoch in (1, 2, 3)
    ]
    assert history[-1]["lr"] == pytest.approx(RECIPE.min_lr)


def test_the_optimizer_steps_at_the_scheduled_rates(monkeypatch):
    """With one weight and a constant gradient, an AdamW step is as long as its rate."""
    steps = []

    class Counting(torch.optim.AdamW):
        def step(self, *arguments):
            steps.append([(group["lr"], group["betas"], group["weight_decay"]) for group in self.param_groups])
            return super().step(*arguments)

    monkeypatch.setattr(torch.optim, "AdamW", Counting)
    recipe = changed(RECIPE, betas=[0.8, 0.95], weight_decay=0.3)
    fitted(recipe=recipe)
    n = len(Held())
    assert steps == [
        [(learning_rate(recipe, step, n), (0.8, 0.95), decay) for decay in (0.3, 0.0)] for step in range(3 * n)
    ]


# --- parameter groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", STUDY.variants)
def test_vectors_tokens_and_positions_are_not_decayed_and_everything_else_is(variant):
    model = tiny_vit(variant)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model, RECIPE)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (RECIPE.weight_decay, 0.0)
    listed = [*decayed["params"], *plain["params"]]
    assert sorted(names[p] for p in listed) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    undecayed = {names[p] for p in plain["params"]}
    assert undecayed == {n for n, p in model.named_parameters() if p.requires_grad and p.ndim <= 1} | (
        {"cls_token", "pos_embed"} if STUDY.variants[variant].class_token else set()
    )
    assert {"blocks.0.attn.qkv.weight", "patch_embed.proj.weight", "head.weight"} <= {
        names[p] for p in decayed["params"]
    }


def test_fixed_positions_are_left_alone():
    model = tiny_vit("ttt")
    positions = model.pos_embed.clone()
    fit(model, _Images(), RECIPE, STREAM, num_classes=CLASSES)
    assert torch.equal(model.pos_embed, positions)


def test_weight_decay_shrinks_what_the_loss_does_not_move():
    """A weight whose input is always zero moves by the decay alone."""
    model = linear_model()
    before = model[1].weight.clone()
    recipe = changed(RECIPE, epochs=1, warmup_epochs=0, weight_decay=0.5, lr=0.1, min_lr=0.1)

    def dark(epoch, step, images):
        return torch.cat([torch.zeros_like(images[..., :2, :]), images[..., 2:, :]], dim=-2)

    fitted(model, Held(spoil=dark), recipe)
    torch.testing.assert_close(model[1].weight[:, :8], before[:, :8] * (1 - 0.1 * 0.5) ** 3)
    assert not torch.allclose(model[1].weight[:, 8:], before[:, 8:] * (1 - 0.1 * 0.5) ** 3, atol=1e-3)


# --- gradients --------------------------------------------------------------------------------------------


def gradient_norm(model: nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()


@pytest.mark.parametrize("limit", [1e-4, 1e-2])
def test_gradients_are_clipped_to_the_limit(limit):
    free, clipped = linear_model(), linear_model()
    fitted(free, recipe=changed(RECIPE, clip_grad=None))
    fitted(clipped, recipe=changed(RECIPE, clip_grad=limit))
    assert gradient_norm(clipped) == pytest.approx(limit, rel=1e-3)
    assert gradient_norm(free) > 10 * limit


def test_gradients_below_the_limit_are_left_alone():
    models = [linear_model(), linear_model()]
    for model, limit in zip(models, (None, 1e6), strict=True):
        fitted(model, recipe=changed(RECIPE, clip_grad=limit))
    assert equal(state_of(models[0]), state_of(models[1]))


def test_gradients_do_not_pile_up_from_step_to_step():
    """One image again and again: the last gradient is that of the last weights alone."""
    model = linear_model()
    fitted(model, Held(n=4), changed(RECIPE, clip_grad=None, epochs=1, warmup_epochs=0, lr=1e-9, min_lr=1e-9))
    found = gradient_norm(model)
    (images, labels), *_ = Held(n=4).epoch(1)
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels, label_smoothing=RECIPE.label_smoothing).backward()
    assert found == pytest.approx(gradient_norm(model), rel=1e-4)


@pytest.mark.parametrize("size", [1, 3, 4, 99])
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(size):
    """Batches of 4, 4 and 2."""
    whole, parts = linear_model(), linear_model()

    def auxiliary(model: nn.Module) -> Callable:
        return lambda images: model(images).square().mean()

    records = [
        fitted(model, recipe=changed(RECIPE, micro_batch_size=given), auxiliary=auxiliary(model)).history
        for model, given in ((whole, None), (parts, size))
    ]
    torch.testing.assert_close(state_of(parts), state_of(whole))
    for one, other in zip(*records, strict=True):
        assert other == pytest.approx(one)


# --- ways to compute --------------------------------------------------------------------------------------


@pytest.fixture
def quick_compiler(monkeypatch) -> list[int]:
    """torch.compile without the generation of code; one entry for each graph that it made."""
    graphs, original = [], torch.compile

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, **options: original(model, backend=backend, **options))
    return graphs


@pytest.mark.parametrize("way", [{"compile": True}, {"grad_checkpointing": True}], ids=str)
@pytest.mark.parametrize("start", ["random", "copy-distill"])
def test_another_way_to_compute_trains_the_same_model_under_the_same_names(tmp_path, quick_compiler, way, start):
    npz, prepared = write_npz(tmp_path / "bands.npz"), store_source(tmp_path)
    source = prepared if start != "random" else None
    plain = spec(npz, "relu", start, recipe=changed(RECIPE, drop_path=0.2), source=source)
    other = plain.model_copy(update={"recipe": changed(plain.recipe, **way)})
    folders = {"sources_folder": tmp_path, "data_root": tmp_path}
    expected, found = train(plain, tmp_path / "plain", **folders), train(other, tmp_path / "other", **folders)
    for one, two in zip(expected["history"], found["history"], strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    names = load_file(tmp_path / "plain" / "model.safetensors").keys()
    assert load_file(tmp_path / "other" / "model.safetensors").keys() == names
    with pytest.raises(Interrupted):
        train(other, tmp_path / "stopped", stop=lambda: True, **folders)
    assert torch.load(tmp_path / "stopped" / "checkpoint.pt", weights_only=True)["model"].keys() == names
    assert repeatable(train(other, tmp_path / "stopped", **folders)) == repeatable(found)
    assert bool(quick_compiler) == ("compile" in way)


@pytest.mark.parametrize("variant", STUDY.variants)
@pytest.mark.parametrize("distilled", [False, True], ids=["plain", "distilled"])
@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["unmixed", "mixed"])
def test_no_step_waits_for_the_device(monkeypatch, variant, distilled, mixed):
    """On torch's device without values, whatever would read one back, and so wait, is an error.

    Mixed precision and the fused optimizer do not know that device.
    """
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, foreach=False))
    device, recipe = torch.device("meta"), changed(RECIPE, micro_batch_size=3, **mixed)
    data = Images(torch.zeros(11, 1, 12, 12, dtype=torch.uint8), torch.arange(11) % CLASSES)
    batches = training_batches(data, dataset("unused"), recipe, SIZE, STREAM, device=device)
    model = tiny_vit(variant, drop_path=0.2).to(device)
    teacher = build_vit(SIZE, num_classes=0).to(device)
    auxiliary = AttentionDistillation(teacher, model, weight=1.0) if distilled else None
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe))
    loop = Loop(model.train(), batches, recipe, STREAM, optimizer, mixing(recipe, CLASSES), auxiliary)
    steps = [loop.step(1, step, *batch) for step, batch in enumerate(batches.epoch(1))]
    assert [n for *_, n in steps] == [8, 3]
    with pytest.raises(RuntimeError, match="meta"):
        steps[0][0].item()


# --- losses -----------------------------------------------------------------------------------------------


def test_recorded_losses_are_means_over_images_of_a_model_that_hardly_moves():
    """Batches of 4, 4 and 2: the odd last one counts by its images."""
    model = linear_model()
    images, labels = (torch.cat(parts) for parts in zip(*Held().epoch(1), strict=True))
    expected = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).item()
    recipe = changed(RECIPE, epochs=1, warmup_epochs=0, lr=1e-9, min_lr=1e-9, label_smoothing=0.1)
    progress = fitted(model, recipe=recipe)
    mean = pytest.approx(expected, rel=1e-4)
    assert progress.history == [{"epoch": 1, "lr": 1e-9, "loss": mean, "task_loss": mean, "distill_loss": None}]
    assert progress.images == 10
    assert progress.seconds > 0


def test_the_auxiliary_loss_is_added_recorded_and_called_after_the_forward_pass():
    model = linear_model()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("model"))

    def auxiliary(images: torch.Tensor) -> torch.Tensor:
        calls.append("auxiliary")
        assert images.shape[1:] == (1, 4, 4)
        return 100 * model[1].bias.square().sum() + 7

    progress = fitted(model, Held(n=80), changed(RECIPE, lr=0.05), auxiliary=auxiliary)
    assert calls == ["model", "auxiliary"] * 3 * 20
    for record in progress.history:
        assert record["distill_loss"] >= 7
        assert record["loss"] == pytest.approx(record["task_loss"] + record["distill_loss"])
    # It was minimised, too.
    assert progress.history[-1]["distill_loss"] - 7 < 0.2 * (progress.history[0]["distill_loss"] - 7)


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_evaluation_comes_every_so_many_epochs_and_at_the_end(every, evaluated):
    progress = fitted(recipe=changed(RECIPE, epochs=5, eval_every=every), evaluate=lambda: {"top1": 50.0, "top5": 60.0})
    assert [record["epoch"] for record in progress.history if "top1" in record] == evaluated
    assert progress.history[-1]["top5"] == 60.0


def test_the_model_is_trained_in_training_mode_after_each_evaluation():
    model = linear_model()
    modes = []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    fitted(model, evaluate=lambda: (model.eval(), {"top1": 1.0, "top5": 1.0})[1])
    assert all(modes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_learns(precision):
    """Bands of three classes are told apart; so are they in mixed precision."""
    recipe = changed(RECIPE, epochs=20, precision=precision, label_smoothing=0.0, lr=1e-2)
    model = tiny_vit("softmax")
    history = fit(model, _Images(), recipe, STREAM, num_classes=CLASSES).history
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


class _Images:
    """Three kinds of image at the model's own size."""

    def __len__(self) -> int:
        return 4

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(epoch)
        for step in range(4):
            labels = torch.randint(0, CLASSES, (8,), generator=generator)
            images = torch.randn(8, 1, 16, 16, generator=generator)
            for image, label in zip(images, labels, strict=True):
                image[:, 5 * label : 5 * label + 5] += 2
            if step >= start:
                yield images, labels


# --- a loss that is no number -----------------------------------------------------------------------------


def spoiled(at_epoch: int, at_step: int, value: float = math.nan) -> Callable:
    """From this step (counted from 1) on."""

    def spoil(epoch: int, step: int, images: torch.Tensor) -> torch.Tensor:
        return images * value if (epoch, step + 1) >= (at_epoch, at_step) else images

    return spoil


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("epoch", "step"), [(1, 1), (2, 3), (3, 1), (2, CHECK_EVERY), (2, CHECK_EVERY + 1), (3, 2 * CHECK_EVERY + 5)]
)
def test_a_loss_that_is_no_number_stops_the_run_naming_epoch_step_and_the_last_finite_losses(
    monkeypatch, epoch, step, value
):
    batches = Held(n=2 * (2 * CHECK_EVERY + 5), batch_size=2, spoil=spoiled(epoch, step, value))
    finite = []

    class Watched(fitting.Losses):
        def add(self, task, extra, images):
            finite.append(task.item())
            super().add(task, extra, images)

    monkeypatch.setattr(fitting, "Losses", Watched)
    with pytest.raises(NonFiniteLoss) as caught:
        fitted(batches=batches)
    text = one_line(caught.value)
    assert f"at epoch {epoch}, step {step}: nan" in text
    before = finite[(epoch - 1) * len(batches) : (epoch - 1) * len(batches) + step - 1][-3:]
    # At the first step of an epoch, the mean of the one before has to do.
    earlier = finite[: (epoch - 1) * len(batches)][-len(batches) :]
    mean = f"{sum(earlier) / len(earlier):.4g} on average in epoch {epoch - 1}" if earlier else "none"
    assert text.endswith("last finite: " + (", ".join(f"{loss:.4g}" for loss in before) or mean))


def test_errors_count_epochs_on_from_the_stages_before():
    """As the log does."""
    with pytest.raises(NonFiniteLoss, match=r"at epoch 9, step 1: .* on average in epoch 8$"):
        fitted(batches=Held(spoil=spoiled(2, 1)), watch=Watch(before=7))


def test_an_infinite_distillation_loss_stops_the_run_too():
    def auxiliary(images: torch.Tensor) -> torch.Tensor:
        return images.sum() * 0 + math.inf

    with pytest.raises(NonFiniteLoss, match=r"at epoch 1, step 1: [\d.]+ \+ inf \(distill\)"):
        fitted(auxiliary=auxiliary)


def test_the_last_good_checkpoint_survives_and_the_run_goes_on_from_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(NonFiniteLoss, match="epoch 3, step 2"):
        fitted(batches=Held(spoil=spoiled(3, 2)), checkpoint=path, identity="run")
    model, whole = linear_model(), linear_model()
    progress = restore(path, "run", model, torch.optim.AdamW(parameter_groups(model, RECIPE)))
    assert progress.epochs == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    fitted(model, checkpoint=path, identity="run")
    fitted(whole)
    assert equal(state_of(model), state_of(whole))


# --- mixing -----------------------------------------------------------------------------------------------


def labelled(n: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that are their label all over."""
    labels = torch.arange(n) % classes
    return labels.float()[:, None, None, None].expand(n, 1, 64, 64).clone(), labels


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_targets_say_how_much_of_each_class_an_image_holds(mixup, cutmix, n):
    mix = mixing(changed(RECIPE, mixup=mixup, cutmix=cutmix), CLASSES)
    images, labels = labelled(n)
    partial = 0
    for seed in range(30):
        torch.manual_seed(seed)
        mixed, targets = mix(images, labels)
        assert mixed.shape == images.shape
        assert targets.shape == (n, CLASSES)
        torch.testing.assert_close(targets.sum(1), torch.ones(n))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ torch.arange(3.0), atol=1e-4, rtol=0)
        partial += int(((targets > 0.01) & (targets < 0.99)).any())
    assert (partial > 5) == (n > 1)


def test_both_kinds_of_mixing_come_by_chance():
    mix = mixing(changed(RECIPE, mixup=0.8, cutmix=1.0), CLASSES)
    images, labels = labelled(4)
    whole = []
    for seed in range(200):
        torch.manual_seed(seed)
        mixed, _ = mix(images, labels)
        whole.append(all(len(image.unique()) == 1 for image in mixed))  # mixup keeps a uniform image uniform
    assert 70 < sum(whole) < 140


def test_without_mixing_a_batch_is_left_as_it_is():
    images, labels = labelled(4)
    found = mixing(RECIPE, CLASSES)(images, labels)
    assert found[0] is images
    assert found[1] is labels


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (9, 4), (1, 4), (3, 2)])
def test_mixing_trains_on_odd_last_batches_and_on_one_of_a_single_image(mixup, cutmix, n, batch_size):
    recipe = changed(RECIPE, mixup=mixup, cutmix=cutmix)
    models = [linear_model(), linear_model()]
    histories = [fitted(model, Held(n, batch_size), recipe).history for model in models]
    assert histories[0] == histories[1]
    assert equal(state_of(models[0]), state_of(models[1]))
    assert all(math.isfinite(record["loss"]) for record in histories[0])
    if n > 1:
        assert histories[0] != fitted(batches=Held(n, batch_size)).history


@pytest.mark.parametrize("size", [SIZE, RGB], ids=["grey", "colour"])
@pytest.mark.parametrize("start", ["random", "mlpcopy-distill"])
def test_xu_et_als_recipe_trains_end_to_end(tmp_path, size, start):
    """RandAugment, mixup, cutmix, erasing, no clipping; here with drop path as well."""
    changes = {"epochs": 2, "warmup_epochs": 1, "batch_size": 8, "drop_path": 0.1, "lr": 1e-3}
    recipe = changed(STUDY.recipes["xu2024"], **changes)
    assert recipe.auto_augment
    assert min(recipe.mixup, recipe.cutmix, recipe.random_erasing) > 0
    npz = write_npz(tmp_path / "bands.npz", channels=size.channels if size.channels > 1 else 0)
    prepared = store_source(tmp_path, size) if start != "random" else None
    run = spec(npz, "relu", start, size=size, recipe=recipe, source=prepared, dataset=dataset(npz, size.channels))
    metrics = [train(run, tmp_path / name, sources_folder=tmp_path, data_root=tmp_path) for name in ("a", "b")]
    assert repeatable(metrics[0]) == repeatable(metrics[1])
    assert all(math.isfinite(record["loss"]) for record in metrics[0]["history"])


# --- drop path --------------------------------------------------------------------------------------------


def test_drop_path_rises_from_block_to_block_to_the_recipes_rate():
    run = spec("unused", recipe=changed(RECIPE, drop_path=0.3), size=changed(SIZE, depth=4))
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in build_student(run, None).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert not any(getattr(block.drop_path1, "drop_prob", 0.0) for block in build_student(spec("unused"), None).blocks)


def test_drop_path_draws_anew_at_each_step_and_alike_in_each_run():
    histories = []
    for drop_path in (0.5, 0.5, 0.0):
        model = tiny_vit("relu", drop_path=drop_path)
        histories.append(fit(model, _Images(), RECIPE, STREAM, num_classes=CLASSES).history)
    assert histories[0] == histories[1] != histories[2]


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A good checkpoint after one epoch of three."""
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(NonFiniteLoss):
        fitted(batches=Held(spoil=spoiled(2, 1)), checkpoint=path, identity="run")
    return path


class Stop(Exception):
    pass


def test_a_resumed_run_ends_bit_identical_to_an_undisturbed_one(tmp_path):
    recipe = changed(RECIPE, epochs=5, mixup=0.8, cutmix=1.0)
    path = tmp_path / "checkpoint.pt"
    whole, resumed = tiny_vit("ttt", drop_path=0.2), tiny_vit("ttt", drop_path=0.2)
    expected = fit(whole, _Images(), recipe, STREAM, num_classes=CLASSES, evaluate=lambda: {"top1": 1.0, "top5": 1.0})
    for stop_at in (2, 4):

        def stop(epoch=stop_at):
            if len(history_of(path)) >= epoch:
                raise Stop
            return {"top1": 1.0, "top5": 1.0}

        with pytest.raises(Stop):
            fit(
                tiny_vit("ttt", drop_path=0.2),
                _Images(),
                recipe,
                STREAM,
                num_classes=CLASSES,
                checkpoint=path,
                evaluate=stop,
            )
        torch.manual_seed(stop_at)
    found = fit(
        resumed,
        _Images(),
        recipe,
        STREAM,
        num_classes=CLASSES,
        checkpoint=path,
        evaluate=lambda: {"top1": 1.0, "top5": 1.0},
    )
    assert found.history == expected.history
    assert found.images == expected.images == 5 * 32
    assert equal(state_of(resumed), state_of(whole))


def history_of(path: Path) -> list[dict]:
    return torch.load(path, weights_only=True)["progress"]["history"] if path.exists() else []


def test_a_finished_run_is_not_trained_again(tmp_path):
    path = tmp_path / "checkpoint.pt"
    model = linear_model()
    expected = fitted(model, checkpoint=path, identity="run")

    def never(epoch, step, images):
        raise AssertionError("trained")

    again = linear_model()
    found = fitted(again, Held(spoil=never), checkpoint=path, identity="run")
    assert replace(found, earlier_seconds=0.0) == expected
    assert found.earlier_seconds > 0
    assert equal(state_of(again), state_of(model))


def test_a_checkpoint_is_written_after_every_epoch(tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(fitting, "save", lambda *state, since: epochs.append(state[-1].epochs))
    fitted(checkpoint=tmp_path / "checkpoint.pt")
    assert epochs == [1, 2, 3]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"recipe": changed(RECIPE, lr=1e-3)}, {"variant": STUDY.variants["elu"].settings()}],
    ids=["seed", "recipe", "variant"],
)
def test_a_checkpoint_of_another_run_is_set_aside_and_not_resumed(tmp_path, caplog, change):
    path = tmp_path / "checkpoint.pt"
    run = spec("a.npz")
    with pytest.raises(Interrupted):
        fitted(checkpoint=path, identity=run.to_json(), stop=lambda: True)
    content = path.read_bytes()
    model, fresh = linear_model(), linear_model()
    fitted(model, checkpoint=path, identity=run.model_copy(update=change).to_json())
    fitted(fresh)
    assert equal(state_of(model), state_of(fresh))
    (aside,) = tmp_path.glob("checkpoint.*.old")
    assert aside.read_bytes() == content
    assert f"with other settings: set aside as {aside}" in caplog.text


@pytest.mark.parametrize("name", ["checkpoint.pt", "checkpoint.align.pt"])
def test_a_checkpoint_that_was_set_aside_is_taken_up_when_its_settings_come_back(tmp_path, caplog, name):
    """However many others there were meanwhile, each of which was stopped, too."""
    path, identities = tmp_path / name, ["one", "other", "third"]
    caplog.set_level("INFO", "linvit")
    for steps in (1, 2):
        for identity in identities:
            caplog.clear()
            with pytest.raises(Interrupted):
                fitted(checkpoint=path, identity=identity, stop=lambda: True)
            assert (f"resumed after epoch 0, step {steps - 1}" in caplog.text) == (steps > 1)
    assert len(list(tmp_path.iterdir())) == len(identities)


def test_a_run_killed_in_an_evaluation_trains_no_step_again(tmp_path):
    path, steps = tmp_path / "checkpoint.pt", []
    whole = fitted(evaluate=lambda: {"top1": 50.0, "top5": 60.0})

    def killed() -> dict[str, float]:
        raise KeyboardInterrupt

    model = linear_model()
    recipe = changed(RECIPE, eval_every=2)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, recipe=recipe, checkpoint=path, evaluate=killed)
    model.register_forward_hook(lambda *_: steps.append(1))
    progress = fitted(model, recipe=recipe, checkpoint=path, evaluate=lambda: {"top1": 50.0, "top5": 60.0})
    assert len(steps) == len(Held())  # those of the third epoch
    assert [record["loss"] for record in progress.history] == [record["loss"] for record in whole.history]
    assert progress.history[1]["top1"] == 50.0
    assert progress.images == whole.images


@pytest.mark.parametrize("keep", [0, 1, 4, 30, 0.1, 0.5, 0.9, 0.99, -1])
def test_a_truncated_checkpoint_is_refused_by_name(checkpoint, keep):
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(CheckpointError) as caught:
        fitted(checkpoint=checkpoint, identity="run")
    assert str(checkpoint) in one_line(caught.value)


GARBAGE = {
    "zeros": bytes(4096),
    "html": b"<!doctype html><title>not found</title>",
    "text": b"hello world\n",  # read as a pickle, it looks up something that is not there
    "newline": b"\n",
    "a stack it does not have": b"R\xaf",
    "a string that is none": b"U\xdcb\xb7",
    "a number cut off": b"r\xa1",
    "a pickle": pickle.dumps({"identity": "run"}),
    "a pickle cut off": pickle.dumps({"identity": "run", "model": list(range(300))})[:200],
    "random": bytes(i * 97 % 251 for i in range(5000)),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_by_name(checkpoint, content):
    checkpoint.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        fitted(checkpoint=checkpoint, identity="run")
    assert str(checkpoint) in one_line(caught.value)


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3), {}, "run"], ids=str)
def test_a_file_of_torchs_that_is_no_checkpoint_is_refused_by_name(checkpoint, content):
    torch.save(content, checkpoint)
    with pytest.raises(CheckpointError) as caught:
        fitted(checkpoint=checkpoint, identity="run")
    assert str(checkpoint) in one_line(caught.value)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(checkpoint, tmp_path):
    torch.save({"identity": "run", "model": Malicious(tmp_path / "run")}, checkpoint)
    with pytest.raises(CheckpointError):
        fitted(checkpoint=checkpoint, identity="run")
    assert not (tmp_path / "run").exists()


def test_a_temporary_file_is_never_taken_for_a_checkpoint(checkpoint):
    """What a kill while writing leaves behind is neither read nor in the way."""
    good = checkpoint.read_bytes()
    for name in (".checkpoint.1.pt", f".checkpoint.{os.getpid()}.pt", ".checkpoint.99999.pt"):
        (checkpoint.parent / name).write_bytes(good[: len(good) // 2])
    model, whole = linear_model(), linear_model()
    assert fitted(model, checkpoint=checkpoint, identity="run").epochs == 3
    fitted(whole)
    assert equal(state_of(model), state_of(whole))


def test_saving_and_restoring_keeps_everything(tmp_path):
    model = tiny_vit("mhla")
    optimizer = torch.optim.AdamW(parameter_groups(model, RECIPE), lr=1e-3)
    model(torch.randn(2, 1, 16, 16)).square().sum().backward()
    optimizer.step()
    record = {"epoch": 1, "lr": 0.1, "loss": 0.1, "task_loss": 0.1, "distill_loss": None, "top1": 3.0, "top5": 9.0}
    progress = Progress([record], step=1, losses=[(0.5, None, 2)], seconds=1.5, images=21)
    save(tmp_path / "c.pt", "λ", model, optimizer, progress)
    other = tiny_vit("mhla")
    other_optimizer = torch.optim.AdamW(parameter_groups(other, RECIPE), lr=1e-3)
    assert restore(tmp_path / "c.pt", "λ", other, other_optimizer) == progress
    assert equal(state_of(other), state_of(model))
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


# --- kill -9 ----------------------------------------------------------------------------------------------

KILLED = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from linvit import data, fit, run
from linvit.grid import RunSpec

spec, folder, sources, when = sys.argv[1:]
hang_at = 3

def hang():
    Path(folder, "hanging").touch()
    time.sleep(600)

if when == "in the middle of an epoch":
    epoch_of = data.ArrayBatches.epoch
    def epoch(self, number, start):
        for step, batch in enumerate(epoch_of(self, number, start)):
            if (number, step) == (hang_at, 1):
                hang()
            yield batch
    data.ArrayBatches.epoch = epoch
elif when == "while writing a checkpoint":
    save = torch.save
    def save_half(state, file):
        save(state, file)
        if len(state["progress"]["history"]) == hang_at:
            file.truncate(file.tell() // 2)
            hang()
    torch.save = save_half
elif when == "after training":
    run.count_flops = lambda *_: hang()

run.train(RunSpec.from_json(spec), Path(folder), sources_folder=Path(sources), data_root=Path("."))
"""


def killed(run: RunSpec, folder: Path, sources: Path, when: str) -> None:
    """Run in a process of its own and kill it, kill -9, at the given moment of its third epoch."""
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", KILLED, run.to_json(), str(folder), str(sources), when])
    try:
        deadline = time.monotonic() + 120
        while not (folder / "hanging").exists():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it never got there"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / "hanging").unlink()


@pytest.mark.parametrize(
    ("variant", "start", "when", "done"),
    [
        ("relu", "mlpcopy-distill", "in the middle of an epoch", 2),
        ("ttt", "random", "in the middle of an epoch", 2),
        ("mhla", "copy-distill", "while writing a checkpoint", 2),
        ("softmax", "fullcopy", "after training", 4),
    ],
)
def test_a_killed_run_ends_bit_identical_to_an_undisturbed_one(tmp_path, variant, start, when, done):
    npz, prepared = write_npz(tmp_path / "bands.npz"), store_source(tmp_path)
    recipe = changed(RECIPE, epochs=4, drop_path=0.1, mixup=0.8)
    run = spec(npz, variant, start, recipe=recipe, source=prepared if start != "random" else None)
    killed(run, tmp_path / "killed", tmp_path, when)
    assert not (tmp_path / "killed" / "metrics.json").exists()
    assert len(history_of(tmp_path / "killed" / "checkpoint.pt")) == done
    torch.manual_seed(99)
    for folder in ("killed", "whole"):
        train(run, tmp_path / folder, sources_folder=tmp_path, data_root=tmp_path)
    metrics = [json.loads((tmp_path / folder / "metrics.json").read_text()) for folder in ("killed", "whole")]
    assert repeatable(metrics[0]) == repeatable(metrics[1])
    models = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("killed", "whole")]
    assert models[0] == models[1]
    assert len(metrics[0]["history"]) == 4
    assert not (tmp_path / "killed" / "checkpoint.pt").exists()
