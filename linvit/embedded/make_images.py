"""Draws the embedded subset from the full Fashion-MNIST.

    python -m linvit.embedded.make_images OUT.npz [--folder /usr/share/datasets/fashion-mnist] [--holdout]

The first images of each class, in the order of the official splits: 100 a class to train on, 500 a class to test
on. With `--holdout` the test images are training images too, the next 500 of each class: a set to choose
hyper-parameters on, which leaves the official test split alone.
"""

import argparse
from pathlib import Path

import numpy as np

from linvit.archives import read_idx
from linvit.files import replacing

CLASSES, TRAIN_PER_CLASS, TEST_PER_CLASS = 10, 100, 500


def first_of_each_class(labels: np.ndarray, start: int, count: int) -> np.ndarray:
    """Indices of the `start`-th to `start + count`-th image of every class, in the split's order."""
    chosen = [np.flatnonzero(labels == label)[start : start + count] for label in range(CLASSES)]
    return np.sort(np.concatenate(chosen))


def make(folder: Path, out: Path, holdout: bool) -> None:
    arrays = {}
    for split, source, start, count in (
        ("train", "train", 0, TRAIN_PER_CLASS),
        ("test", "train" if holdout else "t10k", TRAIN_PER_CLASS if holdout else 0, TEST_PER_CLASS),
    ):
        labels = read_idx(folder / f"{source}-labels-idx1-ubyte.gz")
        chosen = first_of_each_class(labels, start, count)
        arrays[f"{split}_images"] = read_idx(folder / f"{source}-images-idx3-ubyte.gz")[chosen]
        arrays[f"{split}_labels"] = labels[chosen]
    with replacing(out) as temporary:
        np.savez_compressed(temporary, **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--holdout", action="store_true")
    options = parser.parse_args()
    make(options.folder, options.out, options.holdout)
