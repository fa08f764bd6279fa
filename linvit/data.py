"""The batches that training and evaluation see.

Sets in memory are augmented in batches; all others are read file by file through a DataLoader. Either way, what a
batch holds depends on the seed, the epoch and the step alone, never on the number of workers or on what ran before.
"""

import logging
import math
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps
import timm.data
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from linvit.augment import RandomResizedCrop, color_jitter, random_flip
from linvit.config import Dataset, Recipe, Size
from linvit.datasets import DataError, Images, Split
from linvit.ranks import Ranks

log = logging.getLogger(__name__)

OUTLIVED_SECONDS = 20  # by loading processes, after a signal that ends the job

Batch = tuple[Tensor, Tensor]
Stream = Callable[..., int]
"""A seed for a purpose: `RunSpec.stream`."""


class Batches(Protocol):
    """The training set, batch by batch, the last one smaller where the numbers do not divide."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Normalised images [B, C, H, W] and labels [B] of one epoch in its own order, from step `start` on.

        Of each batch, a rank gets its part.
        """


def training_batches(
    data: Split,
    dataset: Dataset,
    recipe: Recipe,
    size: Size,
    stream: Stream,
    *,
    device: torch.device = torch.device("cpu"),
    workers: int = 0,
    ranks: Ranks = Ranks(),
) -> Batches:
    """The augmented training set; `stream` seeds order and augmentation.

    Raises:
        DataError: a batch has fewer images than there are ranks.
    """
    if recipe.batch_size > len(data):
        log.warning(
            "batch_size %d exceeds the %d images: one smaller step an epoch, at the same learning rate",
            recipe.batch_size,
            len(data),
        )
    smallest = len(data) % recipe.batch_size or recipe.batch_size
    if smallest < ranks.size:
        raise DataError(
            f"recipe {recipe.name!r}: with batch_size {recipe.batch_size} the last batch of {len(data)} images has "
            f"{smallest}, fewer than the {ranks.size} ranks; use fewer ranks or another batch_size"
        )
    per_image = recipe.auto_augment or recipe.random_erasing
    if isinstance(data, Images) and not per_image:
        return ArrayBatches(data, dataset, recipe, size, stream, device, ranks)
    return FileBatches(data, dataset, recipe, size, stream, device, ranks, workers)


def evaluation_batches(
    data: Split,
    dataset: Dataset,
    recipe: Recipe,
    size: Size,
    *,
    device: torch.device = torch.device("cpu"),
    workers: int = 0,
    ranks: Ranks = Ranks(),
) -> Iterable[Batch]:
    """The test set, or a rank's share of it: resized, cropped at the centre, normalised, in order."""
    data = _share(data, ranks)
    if isinstance(data, Images):
        return ArrayEvaluation(data, dataset, recipe, size, device)
    transform = _per_image_transform(dataset, recipe, size, training=False)
    return torch.utils.data.DataLoader(
        Transformed(data, transform, size.channels), recipe.batch_size, **_loading(device, workers)
    )


@dataclass(frozen=True)
class _TrainingSet:
    """What both kinds of training set are made of."""

    data: Split
    dataset: Dataset
    recipe: Recipe
    size: Size
    stream: Stream
    device: torch.device
    ranks: Ranks

    def __len__(self) -> int:
        return -(-len(self.data) // self.recipe.batch_size)


class ArrayBatches(_TrainingSet):
    """An in-memory training set, augmented batch by batch on the device."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = epoch_order(len(self.data), epoch, self.stream)
        for step, indices in enumerate(order.split(self.recipe.batch_size)[start:], start):
            generator = torch.Generator().manual_seed(self.stream("augment", epoch, step))
            images = _to_channels(self.data.images[indices].to(self.device), self.size.channels)
            # Every rank augments all images, since the draws of each depend on the batch it is in.
            mine = self.ranks.part(len(indices))
            yield self.augment(images.float() / 255, generator)[mine], self.data.labels[indices][mine].to(self.device)

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Images in [0, 1] -> augmented and normalised."""
        recipe = self.recipe
        crop = RandomResizedCrop(self.size.image_size, recipe.crop_scale, recipe.crop_ratio, recipe.interpolation)
        images = random_flip(crop(images, generator).clamp(0, 1), recipe.flip, generator)
        if recipe.color_jitter:
            images = color_jitter(images, recipe.color_jitter, generator)
        return F.normalize(images, list(self.dataset.mean), list(self.dataset.std))


@dataclass(frozen=True)
class ArrayEvaluation:
    """An in-memory test set."""

    data: Images
    dataset: Dataset
    recipe: Recipe
    size: Size
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        for indices in torch.arange(len(self.data)).split(self.recipe.batch_size):
            images = _to_channels(self.data.images[indices].to(self.device), self.size.channels)
            yield self.prepare(images.float() / 255), self.data.labels[indices].to(self.device)

    def prepare(self, images: Tensor) -> Tensor:
        side = self.size.image_size
        mode = F.InterpolationMode(self.recipe.interpolation)
        images = F.resize(images, [math.floor(side / self.recipe.eval_crop)], mode, antialias=True)
        images = F.center_crop(images, [side, side]).clamp(0, 1)
        return F.normalize(images, list(self.dataset.mean), list(self.dataset.std))


@dataclass(frozen=True)
class FileBatches(_TrainingSet):
    """A training set of images that are decoded and augmented one by one, by worker processes."""

    workers: int

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        transform = _per_image_transform(self.dataset, self.recipe, self.size, training=True)
        seed = self.stream("augment", epoch)
        batches = epoch_order(len(self.data), epoch, self.stream).split(self.recipe.batch_size)[start:]
        yield from torch.utils.data.DataLoader(
            Transformed(self.data, transform, self.size.channels, seed),
            batch_sampler=[batch[self.ranks.part(len(batch))].tolist() for batch in batches],
            **_loading(self.device, self.workers),
        )


@dataclass(frozen=True)
class Transformed(torch.utils.data.Dataset):
    """Images through a transform that draws the same numbers for an image whichever process runs it."""

    data: Split | Sequence
    transform: Callable[[PIL.Image.Image], Tensor]
    channels: int
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.data[index]
        if self.seed is not None:
            # timm's transforms draw from all three.
            seed = (self.seed + index) % 2**32
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
        return self.transform(image.convert("L" if self.channels == 1 else "RGB")), label


def _share(data: Split, ranks: Ranks) -> Split:
    """Every so manieth image, so that each is in one rank's share."""
    if ranks.size == 1:
        return data
    mine = slice(ranks.rank, None, ranks.size)
    if isinstance(data, Images):
        return Images(data.images[mine], data.labels[mine])
    return torch.utils.data.Subset(data, range(len(data))[mine])


def epoch_order(n: int, epoch: int, stream: Stream) -> Tensor:
    """The order of the images in one epoch, a permutation of 0..n-1."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(stream("order", epoch)))


def _posterize(image: PIL.Image.Image, bits: int, **_: object) -> PIL.Image.Image:
    """Keep the highest `bits` of each channel, 0 to 8; Pillow takes 1 to 8, and RandAugment draws a 0 now and then."""
    return PIL.ImageOps.posterize(image, bits) if bits else image.point(lambda _: 0)


timm.data.auto_augment.NAME_TO_OP |= dict.fromkeys(("Posterize", "PosterizeIncreasing"), _posterize)


def _per_image_transform(dataset: Dataset, recipe: Recipe, size: Size, *, training: bool) -> Callable:
    return timm.data.create_transform(
        (size.channels, size.image_size, size.image_size),
        is_training=training,
        scale=recipe.crop_scale,
        ratio=recipe.crop_ratio,
        hflip=recipe.flip,
        # timm, like the recipes it comes from, lets AutoAugment policies take the place of colour jitter.
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
        re_prob=recipe.random_erasing,
        re_mode="pixel",
        interpolation=recipe.interpolation,
        mean=dataset.mean,
        std=dataset.std,
        crop_pct=recipe.eval_crop,
    )


def _to_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == channels:
        return images
    return F.rgb_to_grayscale(images) if channels == 1 else images.expand(-1, channels, -1, -1)


def _outlive_signals(worker: int) -> None:
    """A scheduler signals every process of a job, but the run still needs its images to finish a step.

    Not for ever: TERM is also how this process is ended when nobody needs it any more.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(OUTLIVED_SECONDS))


def _loading(device: torch.device, workers: int) -> dict[str, Any]:
    """How a DataLoader works, whatever it loads."""
    return {"num_workers": workers, "worker_init_fn": _outlive_signals, "pin_memory": device.type == "cuda"}


def default_workers(threads: int | None) -> int:
    """Processes that decode images beside a run of so many threads: one fewer, so that all of them fit its CPUs."""
    return max(0, (threads or 1) - 1)
