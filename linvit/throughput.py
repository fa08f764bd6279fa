"""Images per second of a grid's models on this device, by the training step and the evaluation that runs go through."""

import datetime
import logging
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from linvit.data import ArrayBatches
from linvit.datasets import Images
from linvit.device import autocast, name_of, pick_device
from linvit.distill import AttentionDistillation
from linvit.evaluate import images_per_second, median_seconds
from linvit.fit import Loop, adamw, mixing, trainable
from linvit.grid import RunSpec
from linvit.rates import Rate, Rates, RatesError, Workload, read_rates, workload_of, write_rates
from linvit.run import versions
from linvit.vit import build_vit

log = logging.getLogger(__name__)


def fill(path: Path, wanted: Mapping[Workload, RunSpec], *, batch_size: int | None = None) -> Rates:
    """Measure the workloads that the table at `path` lacks, and write it after each of them.

    Args:
        wanted: Workloads, each with a run to take the sizes of everything from.
        batch_size: Images in a forward pass, in place of what each run's recipe says.

    Raises:
        RatesError: the table is damaged, or of another device, number of threads or versions.
    """
    device = pick_device()
    table = _table_of(path, device)
    lacking = [run for workload, run in wanted.items() if workload not in table.by_workload]
    log.info("%s: has %d of %d workloads", path, len(wanted) - len(lacking), len(wanted))
    for run in lacking:
        asked = batch_size or run.recipe.forward_size
        rows = (*table.rates, measure(run, asked, device))
        table = table.model_copy(update={"rates": rows, "date": _today()})
        write_rates(table, path)
    return table


def measure(run: RunSpec, batch_size: int, device: torch.device) -> Rate:
    """Train and evaluate a run's model on made-up images; the batch is halved until it fits into memory."""
    workload, error = workload_of(run), None
    for images in _halved(batch_size):
        try:
            training, evaluation = rates_of(run, images, device)
        except torch.OutOfMemoryError:
            error = f"out of memory with {images} images a batch"
            log.warning("%s: %s", workload, error)
            continue
        log.info("%s: %.4g images/s in training, %.4g in evaluation", workload, training, evaluation)
        return _rate(workload, images, training, evaluation, error)
    return _rate(workload, batch_size, None, None, error)


def rates_of(run: RunSpec, batch_size: int, device: torch.device) -> tuple[float, float]:
    """Images per second in training (an update per batch) and in evaluation, medians of a few batches in memory."""
    recipe = run.recipe.model_copy(update={"batch_size": batch_size, "micro_batch_size": None})
    student = build_vit(run.size, run.variant, num_classes=run.dataset.classes, drop_path=recipe.drop_path).to(device)
    batches = ArrayBatches(_made_up(run, batch_size), run.dataset, recipe, run.size, run.stream, device)
    optimizer, mix = adamw(student, recipe), mixing(recipe, run.dataset.classes)
    loop = Loop(trainable(student, recipe), batches, recipe, run.stream, optimizer, mix, _distillation(run, student))
    (images, labels), steps = next(batches.epoch(1)), count()
    student.train()
    seconds = median_seconds(lambda: loop.step(1, next(steps), images, labels), device)
    with autocast(device, recipe.precision):
        return batch_size / seconds, images_per_second(student, run.size, batch_size=batch_size)


def _distillation(run: RunSpec, student: VisionTransformer) -> AttentionDistillation | None:
    """The run's auxiliary loss, with a teacher of random weights."""
    if run.init.distill is None:
        return None
    teacher = build_vit(run.size, num_classes=0)
    return AttentionDistillation.from_settings(teacher.to(student.head.weight.device), student, run.init.distill)


def _made_up(run: RunSpec, n: int) -> Images:
    size = run.size
    images = torch.randint(0, 256, (n, size.channels, size.image_size, size.image_size), dtype=torch.uint8)
    return Images(images, torch.arange(n) % run.dataset.classes)


def _halved(n: int) -> Iterator[int]:
    while n:
        yield n
        n //= 2


def _rate(workload: Workload, images: int, training: float | None, evaluation: float | None, error: str | None) -> Rate:
    rates: dict[str, Any] = {"train_images_per_second": training, "eval_images_per_second": evaluation}
    return Rate(**workload._asdict(), batch_size=images, **rates, error=error)


def _table_of(path: Path, device: torch.device) -> Rates:
    """The table that is there, or an empty one for this device."""
    here = Rates(device=name_of(device), threads=torch.get_num_threads(), versions=versions(), date=_today())
    table = read_rates(path)
    if table is None:
        return here
    was, now = _circumstances(table), _circumstances(here)
    for key, value in now.items():
        if was.get(key) != value:
            raise RatesError(
                f"{path}: was measured with {key} {was.get(key)}, here it is {value}; delete it or choose another --out"
            )
    return table


def _circumstances(table: Rates) -> dict[str, str | int]:
    """What all rows of a table have in common; how many threads feed a GPU is no matter."""
    threads = {"threads": table.threads} if table.device == "cpu" else {}
    return {"device": table.device, **threads, **table.versions}


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
