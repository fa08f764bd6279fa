"""Splits that are decoded once: their pixels in one file that all jobs of a node map into memory and so share.

Pixels keep their resolution, so that what is drawn from them is what would be drawn from the files. What is kept is
derived: a file that is missing, damaged or of other images than those that are there now is made again.
"""

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linvit import datasets
from linvit.archives import read_npz
from linvit.config import Dataset, reason_of
from linvit.datasets import Images, Packed, Shards, Split
from linvit.files import WriteError, replacing, sha256_of
from linvit.ranks import Ranks

log = logging.getLogger(__name__)

LARGEST = 100_000
"""Images of a data set that is decoded. All sets of the paper are, but ImageNet."""
LARGEST_BYTES = 100 * 10**9
"""Of a split's pixels; Food-101's take some 60."""
SAMPLE = 16
"""Images that tell how many bytes all have."""


class Kept(NamedTuple):
    """A decoded split on disk: its bytes [total], the shapes of its images [n, 3] and their labels [n]."""

    pixels: Tensor
    shapes: Tensor
    labels: Tensor


def read(dataset: Dataset, split: str, root: Path, folder: Path | None, ranks: Ranks = Ranks()) -> Split:
    """A split as `datasets.read` finds it; a small one from its decoded pixels under `folder`, made if need be.

    The first rank makes them before the others look.

    Raises:
        DataError: as of `datasets.read`.
    """
    data = datasets.read(dataset, split, root)
    if folder is None:
        return data
    if not ranks.first:
        ranks.wait()
    found = decoded(data, dataset, split, root, folder)
    if ranks.first:
        ranks.wait()
    return found


def decoded(data: Split, dataset: Dataset, split: str, root: Path, folder: Path) -> Split:
    """The same split with its pixels mapped from `folder`; as it is where it is too large, or cannot be written."""
    if dataset.test_of or max(len(data), dataset.train_size or 0) > LARGEST or _bytes_of(data) > LARGEST_BYTES:
        return data
    key = _key_of(data, dataset, split, root)
    if key is None:
        return data
    path = folder / dataset.name / f"{split}.bin"
    kept = _found(path, key)
    if kept is None:
        try:
            _write(data, path, key)
        except WriteError as error:
            log.warning("%s: images are decoded in every epoch", error)
            return data
        kept = _found(path, key)
    if kept is None:  # another job may have decoded other images just now
        return data
    return Images(kept.pixels.view(data.images.shape), data.labels) if isinstance(data, Images) else Packed(*kept)


def _bytes_of(data: Split) -> int:
    """About how many a split's pixels take, by some of its images."""
    if isinstance(data, Images):
        return data.images.numel()
    sizes = [datasets.image_at(data, index)[0].size for index in range(0, len(data), max(1, len(data) // SAMPLE))]
    return 3 * len(data) * sum(width * height for width, height in sizes) // len(sizes)


def _key_of(data: Split, dataset: Dataset, split: str, root: Path) -> str | None:
    """What pixels and labels depend on: arrays' bytes, files' names, sizes and times, labels by the names of folders;
    None where it cannot be told."""
    if isinstance(data, Images):
        content = [list(data.images.shape), hashlib.sha256(data.images.numpy().data).hexdigest()]
    elif (paths := _files_of(data, dataset, root)) is not None:
        content = [(str(path), found.st_size, found.st_mtime_ns) for path in paths if (found := path.stat())]
    else:
        return None
    labels = getattr(data, "targets", None)
    text = json.dumps([dataset.model_dump(mode="json", exclude={"mean", "std"}), split, content, labels])
    return hashlib.sha256(text.encode()).hexdigest()


def _files_of(data: Split, dataset: Dataset, root: Path) -> list[Path] | None:
    if hasattr(data, "samples"):  # torchvision's ImageFolder and its kin
        return [Path(path) for path, _ in data.samples]
    # Its other sets of files keep the folder under this name.
    folder = datasets.shards_folder(dataset, root) if isinstance(data, Shards) else getattr(data, "_base_folder", None)
    return None if folder is None else sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _found(path: Path, key: str) -> Kept | None:
    """What `_write` wrote for this key, if it is whole."""
    index = path.with_suffix(".npz")
    if not (path.is_file() and index.is_file()):
        return None
    try:
        of, digest, shapes, labels = read_npz(index, ("key", "sha256", "shapes", "labels"))
    except Exception as error:  # whatever a damaged file makes the readers raise
        log.warning("%s: damaged (%s); the images are decoded again", index, reason_of(error))
        return None
    if str(of) != key:
        return None
    if sha256_of(path) != str(digest):
        log.warning("%s: damaged; the images are decoded again", path)
        return None
    pixels = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return Kept(pixels, torch.from_numpy(shapes), torch.from_numpy(labels))


def _write(data: Split, path: Path, key: str) -> None:
    """The pixels, then what tells that they are whole. Jobs that do so at once write the same bytes."""
    shapes, labels, digest = [], [], hashlib.sha256()
    log.info("decoding %d images into %s", len(data), path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        for pixels, label in _images_of(data):
            shapes.append(pixels.shape)
            labels.append(label)
            digest.update(pixels.data)
            file.write(pixels.data)
    arrays: dict[str, Any] = {
        "key": key,
        "sha256": digest.hexdigest(),
        "shapes": np.array(shapes),
        "labels": np.array(labels),
    }
    content = io.BytesIO()
    np.savez(content, **arrays)
    with replacing(path.with_suffix(".npz")) as temporary:
        temporary.write_bytes(content.getvalue())


def _images_of(data: Split) -> Iterator[tuple[np.ndarray, int]]:
    """Each image's bytes, [C, H, W] of those of one size, [H, W, C] of others, and its label."""
    if isinstance(data, Images):
        yield from zip(data.images.numpy(), data.labels.tolist(), strict=True)
        return
    for image, label in (datasets.image_at(data, index) for index in range(len(data))):
        pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
        yield pixels.reshape(*pixels.shape[:2], -1), int(label)
