"""Labelled images by data-set name: torchvision's sets, image folders, shards, npz and idx files."""

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import numpy as np
import PIL.Image
import torch
import torchvision.datasets
from timm.data.readers import create_reader
from timm.data.readers.reader import Reader
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from linvit.archives import read_idx, read_npz
from linvit.config import Dataset, UserError, reason_of
from linvit.config.parts import CHANNELS
from linvit.files import regular, resource


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

    def sizes(self, indices: Tensor) -> Tensor:
        """Heights and widths [B, 2] of these images."""
        return torch.tensor(self.images.shape[-2:]).expand(len(indices), 2)


@dataclass(frozen=True)
class Packed:
    """A decoded split of images of many sizes: their bytes in a row, each image's as [H, W, C]."""

    pixels: Tensor
    shapes: Tensor
    """[n, 3]: height, width, channels."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        return F.to_pil_image(self.pixels_of(index)), int(self.labels[index])

    def pixels_of(self, index: int) -> Tensor:
        """uint8 [C, H, W], in place."""
        height, width, channels = self.shapes[index].tolist()
        start = int(self.starts[index])
        return self.pixels[start : start + height * width * channels].view(height, width, channels).permute(2, 0, 1)

    def sizes(self, indices: Tensor) -> Tensor:
        """Heights and widths [B, 2] of these images."""
        return self.shapes[indices, :2]

    @cached_property
    def starts(self) -> Tensor:
        return self.shapes.prod(1).cumsum(0) - self.shapes.prod(1)


@dataclass(frozen=True)
class Shards(torch.utils.data.Dataset):
    """A split that timm's reader finds image by image, as encoded files."""

    reader: Reader
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        file, label = self.reader[index]
        return PIL.Image.open(file), int(label)


class Files(Protocol):
    """A split of image files, as torchvision's data sets give them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[PIL.Image.Image, int]: ...


Split = Images | Packed | Files


def read(dataset: Dataset, split: str, root: str | Path, *, download: bool = False) -> Split:
    """The "train" or "test" split of a data set, its size and its classes checked.

    Raises:
        DataError: one line with what is missing, where it was looked for, and how to get it.
    """
    readers = {
        "npz": _read_npz,
        "idx": _read_idx,
        "torchvision": _read_torchvision,
        "timm": _read_timm,
        "folder": _read_folder,
    }
    kind = next(kind for kind in readers if getattr(dataset, kind) is not None)
    data = readers[kind](dataset, split, Path(root), download)
    expected = getattr(dataset, f"{split}_size")
    if expected and len(data) != expected:
        raise DataError(f"data set {dataset.name!r}: {len(data)} {split} images, expected {expected}")
    _check_labels(dataset, split, data)
    return data


def image_at(data: Split, index: int) -> tuple[PIL.Image.Image, int]:
    """An image, decoded, and its label.

    Raises:
        DataError: names the file that is no whole image.
    """
    place = _place_of(data, index)
    try:
        if isinstance(place, Path):
            regular(place)
        image, label = data[index]
        _refuse_deep(image)
        image.load()
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"{place}: cannot be read as an image: {reason_of(error)}") from error
    return image, label


def _refuse_deep(image: PIL.Image.Image) -> None:
    """Pillow would cut off at 255 what is of more than 8 bits a channel, that is, make it white."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"of mode {image.mode}; allowed: 8 bits a channel")


def _place_of(data: Any, index: int) -> Path | str:
    """The file of an image, or its number where it is none of its own."""
    if isinstance(data, torch.utils.data.Subset):
        return _place_of(data.dataset, data.indices[index])
    if hasattr(data, "samples"):
        return Path(data.samples[index][0])
    # torchvision's other sets of files.
    paths = next((getattr(data, key) for key in ("_image_files", "_images") if hasattr(data, key)), None)
    place = paths[index] if paths is not None else None
    return Path(place) if isinstance(place, str | Path) else f"image {index}"


def scored_labels(dataset: Dataset) -> list[int]:
    """The labels that occur in a data set: all, or those of its subset."""
    if dataset.subset is None:
        return list(range(dataset.classes))
    labels = _labels_by_name(dataset)
    names = _lines(dataset, dataset.subset)
    strange = [name for name in names if name not in labels]
    if strange:
        raise DataError(
            f"data set {dataset.name!r}: {dataset.subset}: no class {strange[0]!r} in {dataset.class_names}"
        )
    return sorted(labels[name] for name in names)


def _labels_by_name(dataset: Dataset) -> dict[str, int]:
    """The label of each class name, and of each label written as a number."""
    names = _lines(dataset, dataset.class_names)
    if len(names) != dataset.classes:
        raise DataError(
            f"data set {dataset.name!r}: {dataset.class_names} has {len(names)} classes, not {dataset.classes}"
        )
    return {str(label): label for label in range(len(names))} | {name: label for label, name in enumerate(names)}


def _lines(dataset: Dataset, path: str) -> list[str]:
    try:
        return resource(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise DataError(f"data set {dataset.name!r}: {path} cannot be read: {reason_of(error)}") from error


def _check_labels(dataset: Dataset, split: str, data: Split) -> None:
    """Every class has images, and no image another class."""
    # torchvision keeps them under one of these names, that of Food-101, Flowers-102 and Pets a private one.
    labels = next((getattr(data, key) for key in ("labels", "targets", "_labels") if hasattr(data, key)), None)
    if labels is None:
        return
    expected, found = set(scored_labels(dataset)), set(np.unique(np.asarray(labels)).tolist())
    if found - expected:
        allowed = f"the classes of {dataset.subset}" if dataset.subset else f"0..{dataset.classes - 1}"
        raise DataError(f"data set {dataset.name!r}: {split} labels outside {allowed}")
    if expected - found:
        raise DataError(
            f"data set {dataset.name!r}: {split} images of {len(found)} classes, expected {len(expected)}: "
            f"none of class {min(expected - found)}"
        )


def _read_npz(dataset: Dataset, split: str, root: Path, download: bool) -> Images:
    with as_file(resource(dataset.npz)) as path:
        if not path.is_file():
            raise _missing(dataset, path, "put the file there")
        names = (f"{split}_images", f"{split}_labels")
        try:
            arrays = read_npz(path, names)
        except KeyError as error:
            raise DataError(
                f"data set {dataset.name!r}: {path}: {reason_of(error)}; allowed: arrays {' and '.join(names)}"
            ) from None
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise _damaged(dataset, path, error) from error
    return _images(dataset, split, *arrays)


def _read_idx(dataset: Dataset, split: str, root: Path, download: bool) -> Images:
    name = getattr(dataset, split) or split
    paths = [Path(dataset.idx) / f"{name}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
    arrays = []
    for path in paths:
        if not path.is_file():
            raise _missing(dataset, path, "install it, for Fashion-MNIST Debian's package dataset-fashion-mnist")
        try:
            arrays.append(read_idx(path))
        except Exception as error:  # as above
            raise _damaged(dataset, path, error) from error
    return _images(dataset, split, *arrays)


def _read_torchvision(dataset: Dataset, split: str, root: Path, download: bool) -> Split:
    reader = getattr(torchvision.datasets, dataset.torchvision, None)
    if reader is None or dataset.torchvision not in torchvision.datasets.__all__:
        raise DataError(f"data set {dataset.name!r}: torchvision.datasets has no {dataset.torchvision!r}")
    arguments = getattr(dataset, split) or {}
    try:
        data = reader(root, download=download, **arguments)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data set {dataset.name!r}: torchvision's {dataset.torchvision} refused {arguments}: {reason_of(error)}"
        ) from error
    except (RuntimeError, OSError) as error:
        files = f"torchvision's {dataset.torchvision} files there"
        how = f"run once with download: true in the configuration, or put {files}"
        if download:
            how = f"the download failed ({reason_of(error)}); put {files}"
        raise _missing(dataset, root, how) from error
    array = getattr(data, "data", None)
    if array is None:
        return data
    labels = data.targets if hasattr(data, "targets") else data.labels
    return _images(dataset, split, np.asarray(array), np.asarray(labels))


def _read_timm(dataset: Dataset, split: str, root: Path, download: bool) -> Split:
    folder = shards_folder(dataset, root)
    if not folder.is_dir():
        raise _missing(dataset, folder, "put the data set's shards there (parquet, or WebDataset's tar files)")
    if find_spec("datasets") is None:
        raise DataError(f"data set {dataset.name!r} needs the package 'datasets'; pip install 'linvit[shards]'")
    arguments = getattr(dataset, split) or {"split": {"train": "train", "test": "validation"}[split]}
    try:
        reader = create_reader(f"hfds/{folder}", **arguments)
        labels = reader.dataset.select_columns(reader.label_key).with_format("numpy")[:][reader.label_key]
        reader[0]  # a column of images that is not there is noticed only now
    except Exception as error:  # of an argument, a column or a shard: datasets raises many kinds
        reason = reason_of(error.__cause__ or error)
        raise DataError(f"data set {dataset.name!r}: {folder} cannot be read with {arguments}: {reason}") from error
    return Shards(reader, labels)


def shards_folder(dataset: Dataset, root: Path) -> Path:
    """Where the shards of a `timm` data set lie."""
    return (root / dataset.timm.removeprefix("hfds/")).absolute()


def _colours_of(path: str) -> PIL.Image.Image:
    """An image as torchvision's folders give it."""
    with PIL.Image.open(path) as image:
        _refuse_deep(image)
        return image.convert("RGB")


class Folder(torchvision.datasets.ImageFolder):
    """Images whose labels are read from the names of their folders, as the data set says."""

    def __init__(self, root: Path, dataset: Dataset) -> None:
        self.dataset = dataset
        super().__init__(root, loader=_colours_of)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names, labels = super().find_classes(directory)
        if self.dataset.class_names:
            by_name = _labels_by_name(self.dataset)
            scored = set(scored_labels(self.dataset))
            labels = {name: by_name.get(name) for name in names}
            strange = [name for name, label in labels.items() if label not in scored]
            if strange:
                allowed = self.dataset.subset or self.dataset.class_names
                raise DataError(
                    f"data set {self.dataset.name!r}: {directory}: folder {strange[0]!r} is no class of {allowed}"
                )
        elif all(name.isdecimal() for name in names) and names != sorted(names, key=int):
            raise DataError(
                f"data set {self.dataset.name!r}: {directory}: numbers for names, which as text are in another order; "
                "say with class_names which classes they are, or write them with leading zeros"
            )
        return names, labels


def _read_folder(dataset: Dataset, split: str, root: Path, download: bool) -> Split:
    defaults = {"train": "train", "test": "val"}
    folders = {key: root / dataset.folder / (getattr(dataset, key) or defaults[key]) for key in dataset.splits}
    folder = folders[split]
    if not folder.is_dir():
        raise _missing(dataset, folder, "put one folder of images a class there (ImageNet's layout)")
    try:
        data = Folder(folder, dataset)
    except FileNotFoundError as error:
        raise DataError(f"data set {dataset.name!r}: {folder}: {reason_of(error)}") from error
    classes = len(scored_labels(dataset))
    if len(data.classes) != classes:
        found = shorten(", ".join(data.classes), 100, placeholder=" ...")
        raise DataError(f"data set {dataset.name!r}: {folder} has {len(data.classes)} classes, not {classes}: {found}")
    # Labels are places in the sorted list of class names, so both splits must have the same ones.
    for other in folders.values():
        names = sorted(path.name for path in other.iterdir() if path.is_dir()) if other.is_dir() else data.classes
        if names != data.classes:
            odd = min(set(names) ^ set(data.classes))
            raise DataError(f"data set {dataset.name!r}: class {odd!r} is not in both {folder} and {other}")
    return data


def _images(dataset: Dataset, split: str, array: np.ndarray, labels: np.ndarray) -> Images:
    """From [n, H, W], [n, H, W, C] or [n, C, H, W] bytes."""
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"data set {dataset.name!r}: images are {array.dtype} {list(array.shape)} and labels {labels.dtype} "
            f"{list(labels.shape)}; allowed: uint8 [n, H, W], [n, H, W, C] or [n, C, H, W], and integers [n]"
        )
    if len(array) != len(labels):
        raise DataError(f"data set {dataset.name!r}: {len(array)} {split} images but {len(labels)} labels")
    images = torch.from_numpy(array.copy())
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] in CHANNELS:
        images = images.permute(0, 3, 1, 2)
    if images.shape[1] not in CHANNELS or 0 in images.shape[2:]:
        raise DataError(
            f"data set {dataset.name!r}: images are {list(array.shape)}; allowed: pixels of 1 or 3 channels"
        )
    return Images(images.contiguous(), torch.from_numpy(labels.astype(np.int64)))


def _missing(dataset: Dataset, where: Path, how: str) -> DataError:
    return DataError(f"data set {dataset.name!r} not found: looked for {where}; to get it: {how}")


def _damaged(dataset: Dataset, where: Path, error: Exception) -> DataError:
    return DataError(f"data set {dataset.name!r}: {where} cannot be read: {reason_of(error)}")
