"""Miniatures of torchvision's six data sets, in the files that their authors publish: three classes, eleven images.

An image is of one grey, which tells its class and its split.
"""

import json
import pickle
from pathlib import Path

import numpy as np
import PIL.Image
import scipy.io

LABELS = {"train": [0, 1, 2, 0, 1, 2], "test": [2, 0, 1], "other": [0, 1]}
"""Of each split's images; no run ever sees the others."""
CLASSES = ("abyssinian", "Beagle", "sphynx")


def grey(label: int, split: str) -> int:
    return 60 * label + 20 * list(LABELS).index(split) + 10


def pixels(split: str, *shape: int) -> np.ndarray:
    """Bytes [n, *shape], a grey an image."""
    greys = [grey(label, split) for label in LABELS[split]]
    return np.array(greys, np.uint8).reshape(-1, *[1] * len(shape)) * np.ones(shape, np.uint8)


def write_jpeg(path: Path, label: int, split: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (24, 17 + label), (grey(label, split),) * 3).save(path)


def write_cifar10(root: Path) -> None:
    """The training images in five files."""
    folder = root / "cifar-10-batches-py"
    files = {f"data_batch_{i + 1}": ("train", slice(i, i + 1 if i < 4 else None)) for i in range(5)}
    for name, (split, part) in (files | {"test_batch": ("test", slice(None))}).items():
        write_pickle(folder / name, {"data": pixels(split, 3072)[part], "labels": LABELS[split][part]})
    write_pickle(folder / "batches.meta", {"label_names": CLASSES})


def write_cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    for split in ("train", "test"):
        coarse = [0] * len(LABELS[split])
        content = {"data": pixels(split, 3072), "fine_labels": LABELS[split], "coarse_labels": coarse}
        write_pickle(folder / split, content)
    write_pickle(folder / "meta", {"fine_label_names": CLASSES, "coarse_label_names": ["animal"]})


def write_pickle(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


def write_stl10(root: Path) -> None:
    """Labels from 1; the unlabelled images have none."""
    folder = root / "stl10_binary"
    folder.mkdir()
    for split, name in (("train", "train"), ("test", "test"), ("other", "unlabeled")):
        pixels(split, 3, 96, 96).tofile(folder / f"{name}_X.bin")
        if split != "other":
            (np.array(LABELS[split], np.uint8) + 1).tofile(folder / f"{name}_y.bin")


def write_food101(root: Path) -> None:
    """Lists of files by class; the order of the classes is the alphabet's, not the file's."""
    for split in ("train", "test"):
        listed = {CLASSES[label].lower(): [] for label in (2, 0, 1)}
        for number, label in enumerate(LABELS[split]):
            name = f"{CLASSES[label].lower()}/{split}{number}"
            listed[CLASSES[label].lower()].append(name)
            write_jpeg(root / "food-101" / "images" / f"{name}.jpg", label, split)
        (root / "food-101" / "meta").mkdir(exist_ok=True)
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listed))


def write_flowers102(root: Path) -> None:
    """Images numbered from 1 through all splits; labels from 1. `other` is the validation split."""
    folder = root / "flowers-102"
    images = [(label, split) for split in LABELS for label in LABELS[split]]
    for number, (label, split) in enumerate(images, 1):
        write_jpeg(folder / "jpg" / f"image_{number:05}.jpg", label, split)
    numbers = {
        key: [number for number, (_, split) in enumerate(images, 1) if split == name]
        for key, name in (("trnid", "train"), ("valid", "other"), ("tstid", "test"))
    }
    scipy.io.savemat(folder / "setid.mat", numbers)
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": [label + 1 for label, _ in images]})


def write_pets(root: Path) -> None:
    """Lines of name, class from 1, species, breed."""
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for split, name in (("train", "trainval"), ("test", "test")):
        lines = []
        for number, label in enumerate(LABELS[split]):
            write_jpeg(folder / "images" / f"{CLASSES[label]}_{split}{number}.jpg", label, split)
            lines.append(f"{CLASSES[label]}_{split}{number} {label + 1} {1 + label % 2} 1\n")
        (folder / "annotations" / f"{name}.txt").write_text("".join(lines))


WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "stl10": write_stl10,
    "food101": write_food101,
    "flowers102": write_flowers102,
    "pets": write_pets,
}
