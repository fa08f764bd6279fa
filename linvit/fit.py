"""The only training loop: AdamW, warm-up and cosine per step, resumable at every step [arXiv:2609.35745, Table C]."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from linvit.config import Interrupted, Recipe, RunEnded
from linvit.data import Batches, Stream
from linvit.device import autocast, to_device
from linvit.progress import CheckpointError, Progress, Schedule, exchange, restore, save
from linvit.ranks import Ranks
from linvit.watch import Watch

log = logging.getLogger(__name__)

CHECK_EVERY = 20  # steps between looks at the losses; a look waits for the device


class NonFiniteLoss(RunEnded):
    """The loss became NaN or infinite."""

    advice = "lower the recipe's lr, or set its precision: float32"


def fit(
    model: nn.Module,
    batches: Batches,
    recipe: Recipe,
    stream: Stream,
    *,
    num_classes: int,
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    auxiliary: Callable[[Tensor], Tensor] | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    checkpoint: Path | None = None,
    identity: str = "",
    stop: Callable[[], bool] = lambda: False,
    watch: Watch = Watch(),
    ranks: Ranks = Ranks(),
) -> Progress:
    """Train `model` in place; several ranks make the updates that one would, but for drop path and for whom an image
    is mixed with.

    Args:
        stream: Seeds for the order of images, augmentation, mixing and drop path. They are drawn anew at each
            step, so that a resumed run ends bit-identical to an undisturbed one.
        criterion: The task's loss of the model's outputs and the labels; cross-entropy of logits where not given.
        auxiliary: A loss of the batch's images to add, called after the model's forward pass.
        evaluate: Metrics of the model as it is, recorded every `recipe.eval_every` epochs and at the end. It may
            raise Interrupted: the checkpoint is of just before it.
        checkpoint: Written after each epoch, and before it is evaluated; training resumes from it where it exists.
        identity: What the checkpoint must belong to (the run's spec); another run's is set aside.
        stop: Asked after each step; once true on a rank, a checkpoint is written and all ranks end.
        watch: Told of every step and epoch.

    Raises:
        NonFiniteLoss: names epoch, step and the last finite losses.
        CheckpointError: the checkpoint is damaged.
        Interrupted: `stop` asked for it.
    """
    optimizer = adamw(model, recipe)
    begin = time.perf_counter()
    schedule = Schedule(recipe.epochs, len(batches), recipe.eval_every if evaluate else None, auxiliary is not None)
    progress = _resumed(checkpoint, identity, model, optimizer, schedule, ranks)
    if progress.epochs or progress.step:
        log.info("resumed after epoch %d, step %d", watch.before + progress.epochs, progress.step)

    def keep() -> None:
        if checkpoint and ranks.first:
            save(checkpoint, identity, model, optimizer, progress, since=begin)
        ranks.wait()

    others = (mixing(recipe, num_classes), auxiliary, ranks, criterion, watch.before)
    loop = Loop(trainable(model, recipe, ranks), batches, recipe, stream, optimizer, *others)
    if progress.epochs < recipe.epochs:
        watch.begin(progress, recipe.epochs, len(batches))
    while progress.epochs < recipe.epochs:
        is_whole = loop.epoch(progress, watch.step, stop)
        where = f"stopped in epoch {loop.before + progress.epochs + 1} after step {progress.step}"
        if not is_whole:
            keep()
            raise Interrupted(where)
        record = loop.record(progress)
        if evaluate and schedule.is_evaluated(record["epoch"]):
            keep()  # an evaluation may take longer than the notice before a time limit
            try:
                record |= evaluate()
            except Interrupted:
                raise Interrupted(f"{where}, in its evaluation") from None
        watch.epoch(record)
        progress.finish_epoch(record)
        keep()
    return progress


@dataclass(frozen=True)
class Loop:
    """The updates of a model, one after the other, and what each of them needs."""

    model: nn.Module
    batches: Batches
    recipe: Recipe
    stream: Stream
    optimizer: torch.optim.Optimizer
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    auxiliary: Callable[[Tensor], Tensor] | None = None
    ranks: Ranks = Ranks()
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None
    before: int = 0
    """Epochs of the run's earlier stages, with which errors count."""

    def epoch(self, progress: Progress, tick: Callable[[int, float | None], object], stop: Callable[[], bool]) -> bool:
        """Take the steps that the epoch under way lacks, and tell `progress`; false if `stop` cut it short.

        `tick` is told the images of each step, and the losses' mean as it was last read.
        """
        self.model.train()
        epoch, begin, stopped = progress.epochs + 1, time.perf_counter(), False
        losses = Losses(progress, self.ranks, self.before)
        for step, (images, labels) in enumerate(self.batches.epoch(epoch, progress.step), progress.step):
            task, extra, n = self.step(epoch, step, images, labels)
            losses.add(task, extra, n)
            progress.step = step + 1
            tick(n, losses.recent)
            if stopped := self.ranks.any(stop()):
                break
        progress.losses = losses.read()
        progress.seconds += time.perf_counter() - begin
        return not stopped

    def record(self, progress: Progress) -> dict:
        """Of the epoch whose steps are all taken: its number, its last rate, its losses."""
        rate = self.optimizer.param_groups[0]["lr"]
        return {"epoch": progress.epochs + 1, "lr": rate, **progress.mean_losses()}

    def step(self, epoch: int, step: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """One update; returns this rank's part of the task's loss and of the auxiliary one, and the batch's images."""
        device = next(self.model.parameters()).device
        images, labels = to_device(images, device), to_device(labels, device)
        n = self.ranks.total(len(labels))
        torch.manual_seed(self.stream("step", epoch, step))
        images, targets = self.mix(images, labels)
        if not self.ranks.first:  # mixed alike, but each with a drop path of its own
            torch.manual_seed(self.stream("step", epoch, step, self.ranks.rank))
        rate = learning_rate(self.recipe, (epoch - 1) * len(self.batches) + step, len(self.batches))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        task, extra = self.gradients(images, targets, n)
        if self.recipe.clip_grad:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.optimizer.step()
        return task, extra, n

    def gradients(self, images: Tensor, targets: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        """Add up the gradients of this rank's micro-batches; returns its part of both losses' means over n images."""
        size = self.recipe.micro_batch_size or len(images)
        micro_batches = list(zip(images.split(size), targets.split(size), strict=True))
        parts = []
        for number, (inputs, wanted) in enumerate(micro_batches, 1):
            with self.ranks.averaging(self.model, number == len(micro_batches)):
                task, extra = self.losses(inputs, wanted)
                share = len(inputs) / n
                loss = task if extra is None else task + extra
                # Ranks average their gradients, so that each counts as one of that many.
                (loss * (share * self.ranks.size)).backward()
            parts.append((task.detach() * share, None if extra is None else extra.detach() * share))
        tasks, extras = zip(*parts, strict=True)
        return sum(tasks), None if self.auxiliary is None else sum(extras)

    def losses(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The task's loss and the auxiliary one, means over the images."""
        with autocast(images.device, self.recipe.precision):
            outputs = self.model(images)
            extra = self.auxiliary(images) if self.auxiliary else None
        return (self.criterion or self.cross_entropy)(outputs, targets), extra

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.recipe.label_smoothing)


class Losses:
    """The losses of an epoch's steps, read from the device now and then rather than at every step.

    Each rank adds its part of a step's mean losses.
    """

    def __init__(self, progress: Progress, ranks: Ranks, before: int = 0) -> None:
        self.epoch = before + progress.epochs + 1
        self.ranks = ranks
        self.recent: float | None = None
        """The mean of both losses' sum over the steps that were read last."""
        self._last_epoch = progress.history[-1] if progress.history else None
        self._pending: list[tuple[Tensor, Tensor | None, int]] = []
        self._read: list[tuple] = [tuple(entry) for entry in progress.losses]

    def add(self, task: Tensor, extra: Tensor | None, images: int) -> None:
        self._pending.append((task, extra, images))
        if len(self._pending) == CHECK_EVERY:
            self._check()

    def read(self) -> list[tuple[float, float | None, int]]:
        """(task, distillation, images) of every step so far."""
        self._check()
        return list(self._read)

    def _check(self) -> None:
        if not self._pending:
            return
        tasks, extras, images = map(list, zip(*self._pending, strict=True))
        self._pending.clear()
        tasks = self.ranks.sum(torch.stack(tasks)).tolist()
        if extras[0] is not None:
            extras = self.ranks.sum(torch.stack(extras)).tolist()
        for values in zip(tasks, extras, images, strict=True):
            if not all(math.isfinite(value) for value in values if value is not None):
                raise NonFiniteLoss(self._message(values))
            self._read.append(values)
        self.recent = sum(task + (extra or 0.0) for task, extra, _ in self._read[-len(images) :]) / len(images)

    def _message(self, values: tuple) -> str:
        last = ", ".join(_losses_text(*entry[:2]) for entry in self._read[-3:]) or "none"
        if not self._read and self._last_epoch:
            mean = _losses_text(self._last_epoch["task_loss"], self._last_epoch["distill_loss"])
            last = f"{mean} on average in epoch {self.epoch - 1}"
        found = _losses_text(*values[:2])
        return f"loss is not finite at epoch {self.epoch}, step {len(self._read) + 1}: {found}; last finite: {last}"


def _losses_text(task: float, extra: float | None) -> str:
    return f"{task:.4g}" if extra is None else f"{task:.4g} + {extra:.4g} (distill)"


def trainable(model: nn.Module, recipe: Recipe, ranks: Ranks = Ranks()) -> nn.Module:
    """What the steps call; its parameters and buffers are the model's own, under the names that they have there."""
    called: Any = model
    if recipe.grad_checkpointing:
        called.set_grad_checkpointing()
    if recipe.compile:
        # A graph for each size of batch: which came first, in this process or one before, must not matter.
        called = torch.compile(called, dynamic=False)
    return ranks.replica(called)


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The rate of a step (from 0): linear warm-up, then half a cosine down to `min_lr` at the last step."""
    warmup = recipe.warmup_epochs * steps_per_epoch
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, recipe.epochs * steps_per_epoch - 1 - warmup)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.lr, betas=recipe.betas, fused=True)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict]:
    """Trainable parameters, without weight decay for vectors and positional embeddings."""
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim <= 1 or name in exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]


def mixing(recipe: Recipe, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mixup, CutMix or either by chance, over batches of any size; without them, the batch as it is."""
    choices: list[nn.Module] = []
    if recipe.mixup:
        choices.append(v2.MixUp(alpha=recipe.mixup, num_classes=num_classes))
    if recipe.cutmix:
        choices.append(v2.CutMix(alpha=recipe.cutmix, num_classes=num_classes))
    if not choices:
        return lambda images, labels: (images, labels)
    return choices[0] if len(choices) == 1 else v2.RandomChoice(choices)


def _resumed(
    checkpoint: Path | None,
    identity: str,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    schedule: Schedule,
    ranks: Ranks,
) -> Progress:
    """Where the checkpoint left the run; its start if there is none, or one of a run with other settings."""

    def restored() -> Progress | None:
        is_there = checkpoint is not None and checkpoint.exists()
        return restore(checkpoint, identity, model, optimizer, schedule) if is_there else None

    found = restored()
    if checkpoint and ranks.any(found is None):
        if ranks.first:
            exchange(checkpoint, identity)
        ranks.wait()
        found = restored()
    progress = found or Progress()
    # A file system that is slow to tell may show the checkpoint, or its newest version, to some ranks only.
    steps = torch.tensor([progress.epochs, progress.step])
    if ranks.any(not torch.equal(ranks.sum(steps), ranks.size * steps)):
        raise CheckpointError(f"{checkpoint}: not the same on all {ranks.size} ranks; start this run again")
    return progress
