"""The batches that training and evaluation see.

Decoded sets are augmented in batches; all others are read file by file through a DataLoader. Either way, what a batch
holds depends on the seed, the epoch and the step alone, never on the number of workers or on what ran before.
"""

import logging
import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps
import timm.data
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from linvit.augment import Augmentation, Draws, RandomResizedCrop
from linvit.config import Dataset, Recipe, Size
from linvit.datasets import DataError, Images, Packed, Split, image_at
from linvit.device import to_device
from linvit.ranks import Ranks
from linvit.signals import held, released, when_gone

log = logging.getLogger(__name__)

OUTLIVED_SECONDS = 20  # by loading processes, after a signal that ends the job
CHUNK = 64  # images that a loading process hands over at a time: a whole batch of 4,096 would be 2.4 GB and late
TOGETHER = 256  # images that are augmented at once: batches of fewer go together, for what an operation costs by itself

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
    kind: Callable[..., Batches] | None = {Images: ArrayBatches, Packed: PackedBatches}.get(type(data))
    # Batches of images of one size are resized without antialiasing, which is for making them larger.
    shrinks = isinstance(data, Images) and min(data.images.shape[-2:]) > size.image_size
    if kind is None or per_image or shrinks:
        kind = FileBatches
    return kind(data, dataset, recipe, size, stream, device, ranks, workers)


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
    return Loader(Transformed(data, transform, size.channels), recipe.forward_size, **_loading(device, workers))


@dataclass(frozen=True)
class _TrainingSet:
    """What all kinds of training set are made of."""

    data: Split
    dataset: Dataset
    recipe: Recipe
    size: Size
    stream: Stream
    device: torch.device = torch.device("cpu")
    ranks: Ranks = Ranks()
    workers: int = 0

    def __len__(self) -> int:
        return -(-len(self.data) // self.recipe.batch_size)

    def order(self, epoch: int) -> tuple[Tensor, ...]:
        """The images of each batch of an epoch."""
        return epoch_order(len(self.data), epoch, self.stream).split(self.recipe.batch_size)


class ArrayBatches(_TrainingSet):
    """A training set of decoded images of one size, augmented in batches on the device."""

    data: Images

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = self.order(epoch)
        together = max(1, TOGETHER // self.recipe.batch_size)
        # From the same steps on, whatever the start: sums over images may be rounded by who is summed beside whom.
        for first in range(start - start % together, len(order), together):
            drawn = [self.draw(epoch, step, batch) for step, batch in enumerate(order[first : first + together], first)]
            yield from self.augmented(drawn)[max(0, start - first) :]

    def draw(self, epoch: int, step: int, batch: Tensor) -> tuple[Tensor, Draws]:
        """This rank's images of the batch, and what chance decides for them."""
        generator = torch.Generator().manual_seed(self.stream("augment", epoch, step))
        # Drawn for all ranks' images alike, since the draws of each depend on the batch it is in.
        draws = self.augmentation.draw(self.data.sizes(batch), generator)
        mine = self.ranks.part(len(batch))
        return batch[mine], draws[mine]

    def augmented(self, drawn: list[tuple[Tensor, Draws]]) -> list[Batch]:
        """Several batches, all at once."""
        indices, draws = zip(*drawn, strict=True)
        sizes, together = [len(batch) for batch in indices], torch.cat(indices)
        images = _normalized(self.pixels(together, Draws.joined(draws)), self.dataset)
        labels = to_device(self.data.labels[together], self.device)
        return list(zip(images.split(sizes), labels.split(sizes), strict=True))

    def pixels(self, indices: Tensor, draws: Draws) -> Tensor:
        """Augmented images in [0, 1] on the device."""
        images = to_device(self.data.images[indices], self.device)
        return self.augmentation(_to_channels(images, self.size.channels).float().div_(255), draws)

    @cached_property
    def augmentation(self) -> Augmentation:
        recipe = self.recipe
        crop = RandomResizedCrop(self.size.image_size, recipe.crop_scale, recipe.crop_ratio, recipe.interpolation)
        return Augmentation(crop, recipe.flip, recipe.color_jitter)


class PackedBatches(ArrayBatches):
    """A training set of decoded images of many sizes: cropped one by one on the host, augmented further in batches."""

    data: Packed  # type: ignore[assignment]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return one_ahead(super().epoch(epoch, start))

    def pixels(self, indices: Tensor, draws: Draws) -> Tensor:
        with ThreadPoolExecutor(max(1, self.workers)) as threads:
            images = torch.stack(list(threads.map(self.cropped, indices.tolist(), draws.boxes)))
        return self.augmentation.finish(to_device(images, self.device).float().div_(255), draws)

    def cropped(self, index: int, box: Tensor) -> Tensor:
        return _to_channels(self.augmentation.crop.single(self.data.pixels_of(index), box), self.size.channels)


def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each made in a thread while the one before it is used; they must not draw from global state."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


@dataclass(frozen=True)
class ArrayEvaluation:
    """A test set of decoded images of one size."""

    data: Images
    dataset: Dataset
    recipe: Recipe
    size: Size
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        for indices in torch.arange(len(self.data)).split(self.recipe.forward_size):
            images = _to_channels(to_device(self.data.images[indices], self.device), self.size.channels)
            yield self.prepare(images.float() / 255), to_device(self.data.labels[indices], self.device)

    def prepare(self, images: Tensor) -> Tensor:
        side = self.size.image_size
        mode = F.InterpolationMode(self.recipe.interpolation)
        images = F.resize(images, [math.floor(side / self.recipe.eval_crop)], mode, antialias=True)
        return _normalized(F.center_crop(images, [side, side]).clamp(0, 1), self.dataset)


class FileBatches(_TrainingSet):
    """A training set of images that are decoded and augmented one by one, by worker processes."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        transform = _per_image_transform(self.dataset, self.recipe, self.size, training=True)
        batches = [batch[self.ranks.part(len(batch))].split(CHUNK) for batch in self.order(epoch)[start:]]
        chunks = iter(
            Loader(
                Transformed(self.data, transform, self.size.channels, self.stream("augment", epoch)),
                batch_sampler=[chunk.tolist() for batch in batches for chunk in batch],
                **_loading(self.device, self.workers),
            )
        )
        for batch in batches:
            # Put together on the device: memory of the host that copies start from holds single chunks alone.
            loaded = [[to_device(part, self.device) for part in chunk] for chunk in islice(chunks, len(batch))]
            images, labels = map(torch.cat, zip(*loaded, strict=True))
            yield images, labels


class Loader(torch.utils.data.DataLoader):
    """A DataLoader that tells of an image that cannot be read as one process would.

    Signals to the whole job do not end its processes, not even while they start (`_serve`).
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        try:
            with held():
                batches = super().__iter__()
            yield from batches
        except DataError as error:  # of another process: with that one's traceback in its text, and the error last
            raise DataError(error.args[0].rpartition("linvit.datasets.DataError: ")[-1].strip()) from None


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
        image, label = image_at(self.data, index)
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
    return torch.utils.data.Subset(data, range(len(data))[mine])  # type: ignore[arg-type]


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
    """[..., C, H, W] of one channel or three -> of as many as asked for."""
    if images.shape[-3] == channels:
        return images
    return F.rgb_to_grayscale(images) if channels == 1 else images.repeat_interleave(channels, -3)


def _normalized(images: Tensor, dataset: Dataset) -> Tensor:
    """By the data set's statistics, in place."""
    mean, std = to_device(torch.tensor([dataset.mean, dataset.std]), images.device)[..., None, None]
    return images.sub_(mean).div_(std)


def _serve(run: int, worker: int) -> None:
    """Have a loading process live as long as the run, the process of that number, that it loads for.

    A scheduler or a terminal signals every process of a job, but the run still needs its images to finish a step. Not
    for ever: TERM is also how this process is ended when nobody needs it any more. And torch looks only later whether
    the run is still there.
    """
    for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(OUTLIVED_SECONDS))
    released()
    when_gone(run, lambda: os._exit(1))


def _loading(device: torch.device, workers: int) -> dict[str, Any]:
    """How a DataLoader works, whatever it loads."""
    return {"num_workers": workers, "worker_init_fn": partial(_serve, os.getpid()), "pin_memory": device.type == "cuda"}


def default_workers(threads: int | None) -> int:
    """Processes that decode images beside a run of so many threads: one fewer, so that all of them fit its CPUs."""
    return max(0, (threads or 1) - 1)
