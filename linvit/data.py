"""Labelled images by data-set name, and the batches that training and evaluation see.

Sets that torchvision, an npz or idx files hold as one array stay in memory and are augmented in batches; all
others are read file by file through a DataLoader. Either way, what a batch holds depends on the seed, the epoch
and the step alone, never on the number of workers or on what ran before.
"""

import gzip
import logging
import math
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps
import timm.data
import torch
import torchvision.datasets
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from linvit.augment import RandomResizedCrop, color_jitter, random_flip
from linvit.config import Dataset, Recipe, Size, UserError
from linvit.files import resource

log = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]
Stream = Callable[..., int]
"""A seed for a purpose: `RunSpec.stream`."""


class DataError(UserError):
    """A data set that is missing, or not the one its name says."""


@dataclass(frozen=True)
class Images:
    """A split in memory: uint8 images [n, C, H, W] and labels [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        """As a torchvision data set gives it, for transforms that work on single images."""
        return F.to_pil_image(self.images[index]), int(self.labels[index])


Split = Images | torch.utils.data.Dataset


class Batches(Protocol):
    """The training set, batch by batch, the last one smaller where the numbers do not divide."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Normalised images [B, C, H, W] and labels [B] of one epoch in its own order, from step `start` on."""


# --- reading ----------------------------------------------------------------------------------------------


def read(dataset: Dataset, split: str, root: str | Path, *, download: bool = False) -> Split:
    """The "train" or "test" split of a data set, its size checked.

    Raises:
        DataError: one line with what is missing, where it was looked for, and how to get it.
    """
    readers = {"npz": _read_npz, "idx": _read_idx, "torchvision": _read_torchvision, "folder": _read_folder}
    kind = next(kind for kind in readers if getattr(dataset, kind) is not None)
    data = readers[kind](dataset, split, Path(root), download)
    expected = getattr(dataset, f"{split}_size")
    if expected and len(data) != expected:
        raise DataError(f"data set {dataset.name!r}: {len(data)} {split} images, expected {expected}")
    if isinstance(data, Images) and not 0 <= int(data.labels.min()) <= int(data.labels.max()) < dataset.classes:
        raise DataError(f"data set {dataset.name!r}: {split} labels outside 0..{dataset.classes - 1}")
    return data


def _read_npz(dataset: Dataset, split: str, root: Path, download: bool) -> Images:
    with as_file(resource(dataset.npz)) as path:
        if not path.is_file():
            raise _missing(dataset, path, "put the file there")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _images(arrays[f"{split}_images"], arrays[f"{split}_labels"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise _damaged(dataset, path, error) from error


def _read_idx(dataset: Dataset, split: str, root: Path, download: bool) -> Images:
    name = getattr(dataset, split) or split
    paths = [Path(dataset.idx) / f"{name}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
    for path in paths:
        if not path.is_file():
            raise _missing(dataset, path, "install it, for Fashion-MNIST Debian's package dataset-fashion-mnist")
    images, labels = map(read_idx, paths)
    return _images(images, labels)


def _read_torchvision(dataset: Dataset, split: str, root: Path, download: bool) -> Split:
    reader = getattr(torchvision.datasets, dataset.torchvision, None)
    if reader is None:
        raise DataError(f"data set {dataset.name!r}: torchvision.datasets has no {dataset.torchvision!r}")
    arguments = getattr(dataset, split) or {}
    try:
        data = reader(root, download=download, **arguments)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data set {dataset.name!r}: torchvision's {dataset.torchvision} refused {arguments}: {_reason(error)}"
        ) from error
    except (RuntimeError, OSError) as error:
        how = f"run once with --config download=true, or put torchvision's {dataset.torchvision} files there"
        if download:
            how = f"the download failed ({_reason(error)}); put torchvision's {dataset.torchvision} files there"
        raise _missing(dataset, root, how) from error
    array = getattr(data, "data", None)
    if array is None:
        return data
    return _images(np.asarray(array), np.asarray(data.targets if hasattr(data, "targets") else data.labels))


def _read_folder(dataset: Dataset, split: str, root: Path, download: bool) -> Split:
    defaults = {"train": "train", "test": "val"}
    folders = {key: root / dataset.folder / (getattr(dataset, key) or name) for key, name in defaults.items()}
    folder = folders[split]
    if not folder.is_dir():
        raise _missing(dataset, folder, "put one folder of images a class there (ImageNet's layout)")
    try:
        data = torchvision.datasets.ImageFolder(folder)
    except FileNotFoundError as error:
        raise DataError(f"data set {dataset.name!r}: {folder}: {_reason(error)}") from error
    if len(data.classes) != dataset.classes:
        raise DataError(f"data set {dataset.name!r}: {folder} has {len(data.classes)} classes, not {dataset.classes}")
    # Labels are places in the sorted list of class names, so both splits must have the same ones.
    for other in folders.values():
        names = sorted(path.name for path in other.iterdir() if path.is_dir()) if other.is_dir() else data.classes
        if names != data.classes:
            odd = min(set(names) ^ set(data.classes))
            raise DataError(f"data set {dataset.name!r}: class {odd!r} is not in both {folder} and {other}")
    return data


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes from a gzipped idx file, the format of MNIST and its kin.

    Raises:
        DataError: it is not a whole file of that kind.
    """
    try:
        with gzip.open(path) as file:
            _, kind, dimensions = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            array = np.frombuffer(file.read(), np.uint8)
        if kind == 8:
            return array.reshape(shape)
        reason = f"elements of kind {kind}, not unsigned bytes"
    except (OSError, ValueError, EOFError, struct.error, zlib.error) as error:
        reason = _reason(error)
    raise DataError(f"{path}: not a whole gzipped idx file: {reason}")


def _images(array: np.ndarray, labels: np.ndarray) -> Images:
    """From [n, H, W], [n, H, W, C] or [n, C, H, W] bytes."""
    if len(array) != len(labels):
        raise DataError(f"{len(array)} images but {len(labels)} labels")
    images = torch.from_numpy(array.copy())
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] in (1, 3):
        images = images.permute(0, 3, 1, 2)
    return Images(images.contiguous(), torch.from_numpy(labels.astype(np.int64)))


def _missing(dataset: Dataset, where: Path, how: str) -> DataError:
    return DataError(f"data set {dataset.name!r} not found: looked for {where}; to get it: {how}")


def _damaged(dataset: Dataset, where: Path, error: Exception) -> DataError:
    return DataError(f"data set {dataset.name!r}: {where} cannot be read: {_reason(error)}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- batches ----------------------------------------------------------------------------------------------


def training_batches(
    data: Split,
    dataset: Dataset,
    recipe: Recipe,
    size: Size,
    stream: Stream,
    *,
    device: torch.device = torch.device("cpu"),
    workers: int = 0,
) -> Batches:
    """The augmented training set; `stream` seeds order and augmentation."""
    if recipe.batch_size > len(data):
        log.warning(
            "batch_size %d exceeds the %d images: one smaller step an epoch, at the same learning rate",
            recipe.batch_size,
            len(data),
        )
    per_image = recipe.auto_augment or recipe.random_erasing
    if isinstance(data, Images) and not per_image:
        return ArrayBatches(data, dataset, recipe, size, stream, device)
    return FileBatches(data, dataset, recipe, size, stream, device, workers)


def evaluation_batches(
    data: Split,
    dataset: Dataset,
    recipe: Recipe,
    size: Size,
    *,
    device: torch.device = torch.device("cpu"),
    workers: int = 0,
) -> Iterable[Batch]:
    """The test set: resized, cropped at the centre, normalised, in order."""
    if isinstance(data, Images):
        return ArrayEvaluation(data, dataset, recipe, size, device)
    transform = _per_image_transform(dataset, recipe, size, training=False)
    return torch.utils.data.DataLoader(
        Transformed(data, transform, size.channels), recipe.batch_size, num_workers=workers, pin_memory=_pins(device)
    )


@dataclass(frozen=True)
class ArrayBatches:
    """An in-memory training set, augmented batch by batch on the device."""

    data: Images
    dataset: Dataset
    recipe: Recipe
    size: Size
    stream: Stream
    device: torch.device

    def __len__(self) -> int:
        return -(-len(self.data) // self.recipe.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = epoch_order(len(self.data), epoch, self.stream)
        for step, indices in enumerate(order.split(self.recipe.batch_size)[start:], start):
            generator = torch.Generator().manual_seed(self.stream("augment", epoch, step))
            images = _to_channels(self.data.images[indices].to(self.device), self.size.channels)
            yield self.augment(images.float() / 255, generator), self.data.labels[indices].to(self.device)

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
class FileBatches:
    """A training set of images that are decoded and augmented one by one, by worker processes."""

    data: Split
    dataset: Dataset
    recipe: Recipe
    size: Size
    stream: Stream
    device: torch.device
    workers: int

    def __len__(self) -> int:
        return -(-len(self.data) // self.recipe.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        transform = _per_image_transform(self.dataset, self.recipe, self.size, training=True)
        seed = self.stream("augment", epoch)
        yield from torch.utils.data.DataLoader(
            Transformed(self.data, transform, self.size.channels, seed),
            self.recipe.batch_size,
            sampler=epoch_order(len(self.data), epoch, self.stream)[start * self.recipe.batch_size :].tolist(),
            num_workers=self.workers,
            pin_memory=_pins(self.device),
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


def _pins(device: torch.device) -> bool:
    return device.type == "cuda"
