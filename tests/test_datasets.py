"""Reading data sets: the embedded one, torchvision's, folders, npz and idx files, and what is refused."""

import gzip
import inspect
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision.datasets
from layouts import LABELS, WRITERS, grey
from tiny import RECIPE, RGB, SIZE, STUDY, TEST, TRAIN, arrays, dataset, one_line, spec, write_npz

from linvit.archives import read_idx
from linvit.data import evaluation_batches, training_batches
from linvit.datasets import DataError, Images, image_at, read, scored_labels
from linvit.embedded.make_images import first_of_each_class, make

FASHION = Path("/usr/share/datasets/fashion-mnist")
EMBEDDED = files("linvit.embedded")
TORCHVISION = [name for name, entry in STUDY.datasets.items() if entry.torchvision]
has_fashion = pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")


def refusal(*arguments, **options) -> str:
    """The one line with which reading a data set is refused."""
    with pytest.raises(DataError) as caught:
        read(*arguments, **options)
    return one_line(caught.value)


@pytest.fixture
def npz(tmp_path):
    return write_npz(tmp_path / "bands.npz")


# --- the embedded images ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> dict[str, np.ndarray]:
    with np.load(EMBEDDED / "fashion_mnist.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.mark.parametrize(("split", "of_each_class"), [("train", 100), ("test", 500)])
def test_the_embedded_images_are_class_balanced(embedded, split, of_each_class):
    images, labels = embedded[f"{split}_images"], embedded[f"{split}_labels"]
    assert images.shape == (10 * of_each_class, 28, 28)
    assert images.dtype == labels.dtype == np.uint8
    assert np.bincount(labels).tolist() == [of_each_class] * 10


def test_the_embedded_images_are_small_and_come_with_their_licence():
    assert (EMBEDDED / "fashion_mnist.npz").stat().st_size <= 3 * 2**20
    licence = (EMBEDDED / "LICENSE.fashion-mnist").read_text()
    assert "MIT License" in licence
    assert "Zalando" in licence


def test_no_embedded_test_image_is_a_training_image(embedded):
    train, test = ({image.tobytes() for image in embedded[f"{split}_images"]} for split in ("train", "test"))
    assert train.isdisjoint(test)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_embedded_set_is_read_as_the_configuration_describes_it(embedded, split):
    found = read(STUDY.datasets["fashion-1k"].settings(), split, "unused")
    assert torch.equal(found.images, torch.from_numpy(embedded[f"{split}_images"])[:, None])
    assert found.labels.tolist() == embedded[f"{split}_labels"].tolist()


def test_the_configurations_statistics_are_those_of_the_images(embedded):
    entry = STUDY.datasets["fashion-1k"]
    pixels = embedded["train_images"] / 255
    assert abs(pixels.mean() - entry.mean[0]) < 0.01
    assert abs(pixels.std() - entry.std[0]) < 0.01


@has_fashion
def test_the_embedded_images_are_those_that_make_images_draws(tmp_path, embedded):
    make(FASHION, tmp_path / "again.npz", holdout=False)
    with np.load(tmp_path / "again.npz") as again:
        assert set(again.files) == set(embedded)
        assert all(np.array_equal(again[name], embedded[name]) for name in embedded)


@has_fashion
def test_the_embedded_test_images_come_from_the_official_test_split(embedded):
    official = {image.tobytes() for image in read_idx(FASHION / "t10k-images-idx3-ubyte.gz")}
    assert all(image.tobytes() in official for image in embedded["test_images"])


def write_idx(path: Path, array: np.ndarray, *, kind: int = 8, keep: int | None = None) -> Path:
    """An array of bytes in MNIST's format; `keep` cuts the file off before it is compressed."""
    header = struct.pack(">HBB", 0, kind, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress((header + array.astype(np.uint8).tobytes())[:keep]))
    return path


def write_splits(folder: Path, *, per_class: int = 700) -> None:
    """A full set in miniature: each image holds its number and its split."""
    for prefix, mark in (("train", 1), ("t10k", 2)):
        labels = np.arange(10 * per_class) % 10
        images = np.zeros((len(labels), 2, 2))
        images[:, 0, 0], images[:, 0, 1], images[:, 1, 0] = np.arange(len(labels)) // 256, labels, mark
        images[:, 1, 1] = np.arange(len(labels)) % 256
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)


@pytest.mark.parametrize("holdout", [False, True])
def test_make_images_takes_the_first_of_each_class_and_a_holdout_only_from_the_training_split(tmp_path, holdout):
    write_splits(tmp_path)
    make(tmp_path, tmp_path / "out.npz", holdout)
    with np.load(tmp_path / "out.npz") as out:
        images = {split: out[f"{split}_images"] for split in ("train", "test")}
        labels = {split: out[f"{split}_labels"] for split in ("train", "test")}
    assert (images["train"][:, 1, 0] == 1).all()
    assert (images["test"][:, 1, 0] == (1 if holdout else 2)).all()
    numbers = {split: images[split][:, 0, 0].astype(int) * 256 + images[split][:, 1, 1] for split in images}
    assert numbers["train"].tolist() == list(range(1000))
    assert numbers["test"].tolist() == list(range(1000, 6000) if holdout else range(5000))
    for split in images:
        assert (images[split][:, 0, 1] == labels[split]).all()


def test_the_first_of_each_class_keep_the_splits_order():
    labels = np.array([1, 0, 1, 2, 0, 1, 0, 2, *range(3, 10), *range(3, 10)])
    assert first_of_each_class(labels, 0, 1).tolist() == [0, 1, 3, 8, 9, 10, 11, 12, 13, 14]
    assert first_of_each_class(labels, 1, 1)[:3].tolist() == [2, 4, 7]


# --- npz and idx ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (1,)])
def test_an_npz_of_any_layout_is_read_as_channels_first(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 7, *shape)).astype(np.uint8)
    labels = np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels)
    found = read(dataset(tmp_path / "a.npz", train_size=6), "train", ".")
    expected = images.transpose(0, 3, 1, 2) if shape else images[:, None]
    assert np.array_equal(found.images.numpy(), expected)
    assert found.images.dtype == torch.uint8
    assert found.labels.tolist() == labels.tolist()
    assert len(found) == 6


def test_channels_first_images_stay_as_they_are(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 5, 7)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", test_images=images, test_labels=np.arange(6) % 3)
    found = read(dataset(tmp_path / "a.npz", test_size=6), "test", ".")
    assert np.array_equal(found.images.numpy(), images)


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 4, 5)])
def test_an_idx_file_is_read_as_it_was_written(tmp_path, shape):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    assert np.array_equal(read_idx(write_idx(tmp_path / "a.gz", array)), array)


def test_an_idx_set_is_found_by_the_names_of_its_splits(tmp_path):
    for split, n in (("train", 6), ("t10k", 3)):
        images, labels = arrays(n)
        write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte.gz", labels)
    settings = dataset("unused", npz=None, idx=str(tmp_path), train="train", test="t10k", train_size=6, test_size=3)
    assert len(read(settings, "train", ".")) == 6
    assert torch.equal(read(settings, "test", ".").images, torch.from_numpy(arrays(3)[0])[:, None])
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    text = refusal(settings, "test", ".")
    assert str(tmp_path / "t10k-labels-idx1-ubyte.gz") in text
    assert "dataset-fashion-mnist" in text


def damaged_idx(path: Path, damage: str) -> Path:
    array = np.arange(60).reshape(3, 4, 5)
    whole = write_idx(path, array).read_bytes()
    if damage == "compressed stream cut off":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "pixels missing":
        write_idx(path, array, keep=40)
    elif damage == "header cut off":
        write_idx(path, array, keep=10)
    elif damage == "hardly begun":
        write_idx(path, array, keep=2)
    elif damage == "not compressed":
        path.write_bytes(b"<!doctype html>")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "of floats":
        write_idx(path, array, kind=13)
    elif damage == "bytes too many":
        path.write_bytes(gzip.compress(gzip.decompress(whole) + b"\0"))
    return path


IDX_DAMAGES = [
    "compressed stream cut off",
    "pixels missing",
    "header cut off",
    "hardly begun",
    "not compressed",
    "empty",
    "of floats",
    "bytes too many",
]


@pytest.mark.parametrize("damage", IDX_DAMAGES)
def test_a_damaged_idx_file_is_named_in_one_line(tmp_path, damage):
    path = damaged_idx(tmp_path / "train-images-idx3-ubyte.gz", damage)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(3))
    assert f"{path} cannot be read: " in refusal(dataset("unused", npz=None, idx=str(tmp_path)), "train", ".")


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((6, 4, 4)), np.arange(6)),
        (np.zeros((6, 4), np.uint8), np.arange(6)),
        (np.zeros((6, 4, 4), np.uint8), np.zeros(6)),
        (np.zeros((6, 4, 4), np.uint8), np.zeros((6, 1), int)),
        (np.uint8(3), np.arange(6)),
        (np.zeros((6, 4, 4), np.uint8), np.array(list("abcabc"))),
    ],
)
def test_arrays_that_are_no_images_and_labels_are_refused(tmp_path, images, labels):
    """Images from 0 to 1 would be seen as black."""
    np.savez(tmp_path / "a.npz", test_images=images, test_labels=labels)
    assert "allowed: uint8 [n, H, W]" in refusal(dataset(tmp_path / "a.npz", test_size=None), "test", ".")


@pytest.mark.parametrize(
    "shape",
    [(6, 16, 16, 4), (6, 4, 16, 16), (6, 2, 8, 8), (6, 16, 16, 2), (6, 0, 8, 8), (6, 0, 0), (6, 16, 0), (0, 0, 3)],
)
def test_arrays_without_pixels_or_of_other_channels_are_refused(tmp_path, shape):
    np.savez(tmp_path / "a.npz", test_images=np.zeros(shape, np.uint8), test_labels=np.arange(shape[0]) % 3)
    text = refusal(dataset(tmp_path / "a.npz", test_size=None), "test", ".")
    assert text == f"data set 'bands': images are {list(shape)}; allowed: pixels of 1 or 3 channels"


@pytest.mark.parametrize("damage", ["truncated", "no zip", "labels missing", "fewer labels than images"])
def test_a_damaged_npz_file_is_named_in_one_line(tmp_path, npz, damage):
    if damage == "truncated":
        npz.write_bytes(npz.read_bytes()[:2000])
    elif damage == "no zip":
        npz.write_bytes(b"<!doctype html>")
    else:
        images, labels = arrays(TRAIN)
        few = {"train_labels": labels[:-1]} if damage.startswith("fewer") else {}
        np.savez(npz, train_images=images, **few)
    text = refusal(dataset(npz, train_size=None), "train", ".")
    assert "'bands'" in text


# --- torchvision ------------------------------------------------------------------------------------------


class Arrays:
    """Like CIFAR and STL-10: all images as one array."""

    def __init__(self, array: np.ndarray, **labels) -> None:
        self.data = array
        vars(self).update(labels)

    def __len__(self) -> int:
        return len(self.data)


class Files:
    """Like Food-101, Flowers-102 and Pets: images of any size, decoded one by one."""

    def __init__(self, n: int, classes: int) -> None:
        generator = np.random.default_rng(0)
        self._images = [
            PIL.Image.fromarray(generator.integers(0, 256, (20 + i % 7, 25 - i % 5, 3)).astype(np.uint8))
            for i in range(n)
        ]
        self._labels = [i % classes for i in range(n)]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        return self._images[index], self._labels[index]


def fake_reader(name: str, n: int, classes: int, calls: list[dict]) -> Callable:
    """A stand-in for a class of torchvision.datasets, holding what that class holds."""

    def reader(root, **arguments):
        calls.append({"root": root, **arguments})
        array = np.random.default_rng(1).integers(0, 256, (n, 12, 12, 3)).astype(np.uint8)
        labels = [i % classes for i in range(n)]
        return {
            "CIFAR10": lambda: Arrays(array, targets=labels),
            "CIFAR100": lambda: Arrays(array, targets=labels),
            "STL10": lambda: Arrays(array.transpose(0, 3, 1, 2), labels=np.array(labels)),
        }.get(name, lambda: Files(n, classes))()

    return reader


@pytest.fixture
def fake(monkeypatch):
    """Puts a stand-in for a torchvision class in place and returns the list of its calls."""

    def put(name: str, n: int = 11, classes: int = 5) -> list[dict]:
        calls: list[dict] = []
        monkeypatch.setattr(torchvision.datasets, name, fake_reader(name, n, classes, calls))
        return calls

    return put


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("split", ["train", "test"])
def test_torchvisions_class_takes_the_arguments_of_the_configuration(name, split):
    entry = STUDY.datasets[name]
    constructor = getattr(torchvision.datasets, entry.torchvision).__init__
    inspect.signature(constructor).bind(None, "root", download=False, **getattr(entry, split))


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_missing_torchvision_set_is_told_with_what_where_and_how(tmp_path, name, split):
    """By torchvision's own classes, which check the values of their arguments before they look for files."""
    text = refusal(STUDY.datasets[name].settings(), split, tmp_path / "data")
    assert f"data set {name!r} not found" in text
    assert str(tmp_path / "data") in text
    assert "download: true" in text
    assert STUDY.datasets[name].torchvision in text


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_torchvision_set_is_read_with_the_configurations_arguments(fake, tmp_path, name, split):
    entry = STUDY.datasets[name]
    calls = fake(entry.torchvision)
    settings = entry.settings().model_copy(update={f"{split}_size": 11, "classes": 5})
    found = read(settings, split, tmp_path, download=True)
    assert len(found) == 11
    assert calls == [{"root": tmp_path, "download": True, **getattr(entry, split)}]


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_torchvision_set_gives_batches_of_images_and_their_own_labels(fake, tmp_path, name):
    entry = STUDY.datasets[name]
    fake(entry.torchvision)
    settings = entry.settings().model_copy(update={"train_size": 11, "test_size": 11, "classes": 5})
    run = spec("unused", dataset=settings, size=RGB)
    batches = training_batches(read(settings, "train", tmp_path), settings, RECIPE, RGB, run.stream)
    found = list(batches.epoch(1))
    assert [len(labels) for _, labels in found] == [8, 3]
    assert len(batches) == 2
    assert all(images.shape[1:] == (3, 16, 16) and images.dtype == torch.float32 for images, _ in found)
    assert sorted(torch.cat([labels for _, labels in found]).tolist()) == sorted(i % 5 for i in range(11))
    test = evaluation_batches(read(settings, "test", tmp_path), settings, RECIPE, RGB)
    assert torch.cat([labels for _, labels in test]).tolist() == [i % 5 for i in range(11)]


@pytest.mark.parametrize("name", ["cifar10", "stl10"])
def test_an_array_like_torchvision_set_keeps_its_pixels(fake, tmp_path, name):
    entry = STUDY.datasets[name]
    fake(entry.torchvision)
    found = read(entry.settings().model_copy(update={"test_size": 11, "classes": 5}), "test", tmp_path)
    expected = np.random.default_rng(1).integers(0, 256, (11, 12, 12, 3)).astype(np.uint8).transpose(0, 3, 1, 2)
    assert isinstance(found, Images)
    assert np.array_equal(found.images.numpy(), expected)


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_torchvision_set_of_the_wrong_size_is_refused(fake, tmp_path, name, split):
    entry = STUDY.datasets[name]
    fake(entry.torchvision)
    text = refusal(entry.settings(), split, tmp_path)
    assert text == f"data set {name!r}: 11 {split} images, expected {getattr(entry, f'{split}_size')}"


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize(
    ("classes", "reason"),
    [(4, "labels outside 0..3"), (7, "images of 5 classes, expected 7: none of class 5")],
)
def test_a_torchvision_set_of_other_classes_than_configured_is_refused(fake, tmp_path, name, classes, reason):
    entry = STUDY.datasets[name]
    fake(entry.torchvision)
    settings = entry.settings().model_copy(update={"train_size": 11, "classes": classes})
    assert refusal(settings, "train", tmp_path) == f"data set {name!r}: train {reason}"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_set_as_its_authors_publish_it_gives_the_split_of_the_configuration(monkeypatch, tmp_path, name, split):
    for module in ("cifar", "stl10", "flowers102"):  # the miniatures' checksums are others
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda path, md5: Path(path).is_file())
    WRITERS[name](tmp_path)
    sizes = {f"{key}_size": len(LABELS[key]) for key in ("train", "test")}
    found = read(STUDY.datasets[name].settings().model_copy(update={"classes": 3, **sizes}), split, tmp_path)
    images = [found[i] for i in range(len(found))]
    assert sorted(label for _, label in images) == sorted(LABELS[split])
    for image, label in images:
        assert abs(np.asarray(image.convert("RGB"), float) - grey(label, split)).max() <= 1


def test_the_six_sets_are_in_miniature_too():
    assert list(WRITERS) == TORCHVISION


@pytest.mark.parametrize(("mode", "suffix"), [("I;16", "png"), ("I", "tif"), ("F", "tif")])
def test_an_image_of_more_than_8_bits_a_channel_is_refused_and_not_made_white(tmp_path, mode, suffix):
    for split in ("train", "val"):
        for label in "abc":
            (tmp_path / "set" / split / label).mkdir(parents=True)
            path = tmp_path / "set" / split / label / f"0.{suffix}"
            PIL.Image.fromarray(np.full((16, 16), 40_000, np.uint16)).convert(mode).save(path)
    found = read(dataset("unused", npz=None, folder="set", train_size=3, test_size=3), "test", tmp_path)
    with pytest.raises(DataError, match=rf"0\.{suffix}: cannot be read as an image: of mode {mode}; allowed: 8 bits"):
        image_at(found, 0)


def test_a_name_that_torchvision_does_not_know_is_refused(tmp_path):
    settings = dataset("unused", npz=None, torchvision="CIFAR11")
    assert "no 'CIFAR11'" in refusal(settings, "train", tmp_path)


@pytest.mark.parametrize("arguments", [{"splitt": "train"}, {"split": "trian"}])
def test_arguments_that_torchvision_does_not_take_are_told_with_the_data_sets_name(tmp_path, arguments):
    settings = dataset("unused", npz=None, torchvision="Flowers102", train=arguments)
    assert "'bands'" in refusal(settings, "train", tmp_path)


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("File not found or corrupted.")])
def test_a_download_that_fails_is_told_in_one_line(monkeypatch, tmp_path, error):
    """urllib's errors are OSErrors: so it is on a compute node without a network."""

    def reader(root, **arguments):
        raise error

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", reader)
    text = refusal(STUDY.datasets["cifar10"].settings(), "train", tmp_path, download=True)
    assert "'cifar10'" in text
    assert str(tmp_path) in text


# --- folders ----------------------------------------------------------------------------------------------


def write_folder(root: Path, *, train: int = 7, val: int = 4, classes: int = 3) -> Path:
    """ImageNet's layout: a folder a class, images of many sizes and kinds."""
    generator = np.random.default_rng(3)
    modes = ["RGB", "L", "RGBA", "P"]
    for split, n in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / "pictures" / split / f"n{label:02}"
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = generator.integers(0, 256, (18 + 3 * i, 30 - 2 * i, 3)).astype(np.uint8)
                PIL.Image.fromarray(pixels).convert(modes[i % 4]).save(folder / f"{i}.png")
    return root


def pictures(**changes):
    fields = {"npz": None, "folder": "pictures", "train_size": 21, "test_size": 12, "channels": 3}
    return dataset("unused", **fields | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data"))


def test_a_folder_is_read_with_val_as_its_test_split(folder):
    train, test = read(pictures(), "train", folder), read(pictures(), "test", folder)
    assert (len(train), len(test)) == (21, 12)
    assert Path(test.root) == folder / "pictures" / "val"
    assert [label for _, label in test] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_folder_may_name_its_splits(folder):
    assert len(read(pictures(test="train", test_size=21), "test", folder)) == 21


def test_images_of_every_kind_become_three_channels(folder):
    for images, labels in evaluation_batches(read(pictures(), "test", folder), pictures(), RECIPE, RGB):
        assert images.shape == (len(labels), 3, 16, 16)
        assert images.isfinite().all()


def test_images_of_every_kind_become_grey_for_a_grey_model(folder):
    settings = pictures(channels=1)
    batches = training_batches(read(settings, "train", folder), settings, RECIPE, SIZE, spec("unused").stream)
    assert [images.shape for images, _ in batches.epoch(1)] == [(8, 1, 16, 16), (8, 1, 16, 16), (5, 1, 16, 16)]


@pytest.mark.parametrize(
    ("changes", "split", "reason"),
    [
        ({"train_size": 20}, "train", "21 train images, expected 20"),
        ({"test_size": 13}, "test", "12 test images, expected 13"),
        ({"classes": 4}, "train", "3 classes, not 4: n00, n01, n02"),
        ({"classes": 2}, "test", "3 classes, not 2"),
        ({"folder": "nowhere"}, "train", "not found"),
        ({"train": "nowhere"}, "train", "not found"),
    ],
)
def test_a_folder_that_is_not_what_was_configured_is_refused(folder, changes, split, reason):
    text = refusal(pictures(**changes), split, folder)
    assert reason in text
    assert "'bands'" in text


def test_a_missing_folder_is_told_with_what_where_and_how(tmp_path):
    text = refusal(pictures(), "test", tmp_path)
    assert "data set 'bands' not found" in text
    assert str(tmp_path / "pictures" / "val") in text
    assert "one folder of images a class" in text


def test_splits_of_different_classes_are_refused_with_the_odd_one(tmp_path):
    """Labels are places in a sorted list of names: one name more, and every later label means another class."""
    write_folder(tmp_path)
    (tmp_path / "pictures" / "val" / "n01").rename(tmp_path / "pictures" / "val" / "n99")
    for split in ("train", "test"):
        text = refusal(pictures(), split, tmp_path)
        assert "'n01'" in text or "'n99'" in text


@pytest.mark.parametrize("classes", [[], ["a", "b", "c"]], ids=["no classes", "classes without images"])
def test_a_folder_without_images_is_told_in_one_line(tmp_path, classes):
    for name in ("", *classes):
        (tmp_path / "pictures" / "train" / name).mkdir(parents=True, exist_ok=True)
    assert "'bands'" in refusal(pictures(train_size=None), "train", tmp_path)


# --- folders whose names say which class they hold --------------------------------------------------------

SYNSETS = [f"n{number:08}" for number in (1440764, 1443537, 1484850, 1491361, 1494475, 1496331)]


def write_named(root: Path, names: list[str]) -> Path:
    """A flat folder of one image a class, its grey telling its place in `names`."""
    for number, name in enumerate(names):
        (root / "shifted" / name).mkdir(parents=True)
        PIL.Image.new("L", (8, 8), 10 * number).save(root / "shifted" / name / "0.png")
    return root


def shifted(root: Path, names: list[str], subset: list[str] | None = None, **changes):
    """A test split of another data set, with its lists of classes in files."""
    (root / "classes.txt").write_text("\n".join(names) + "\n")
    (root / "subset.txt").write_text("\n".join(subset or []))
    fields = {
        "npz": None,
        "folder": "shifted",
        "test": ".",
        "test_of": "pictures",
        "classes": len(names),
        "class_names": str(root / "classes.txt"),
        "subset": str(root / "subset.txt") if subset else None,
        "train_size": None,
        "test_size": None,
    }
    return dataset("unused", **fields | changes)


def greys_by_label(data) -> dict[int, int]:
    return {label: int(np.asarray(image.convert("L"))[0, 0]) for image, label in data}


def test_folders_that_are_numbers_are_the_classes_of_those_numbers(tmp_path):
    """ImageNet-V2's: as text, 10 and 11 come before 2."""
    numbers = [str(number) for number in range(12)]
    assert sorted(numbers) != numbers
    found = read(shifted(write_named(tmp_path, numbers), [f"n{n:02}" for n in range(12)]), "test", tmp_path)
    assert greys_by_label(found) == {number: 10 * number for number in range(12)}


def test_folders_that_are_numbers_are_refused_where_nothing_says_which_classes_they_are(tmp_path):
    write_named(tmp_path, [str(number) for number in range(12)])
    settings = shifted(tmp_path, SYNSETS * 2, class_names=None)
    text = refusal(settings, "test", tmp_path)
    assert "numbers for names" in text
    assert "class_names" in text


def test_folders_that_are_numbers_of_one_length_have_only_one_order(tmp_path):
    write_named(tmp_path, [f"{number:02}" for number in range(12)])
    found = read(shifted(tmp_path, SYNSETS * 2, class_names=None), "test", tmp_path)
    assert greys_by_label(found) == {number: 10 * number for number in range(12)}


def test_folders_of_some_classes_have_the_labels_of_the_whole_list(tmp_path):
    """ImageNet-A's and -R's 200 of 1,000; a place among their own names would be another class."""
    some = [SYNSETS[5], SYNSETS[1], SYNSETS[2]]
    settings = shifted(write_named(tmp_path, some), SYNSETS, subset=some)
    assert greys_by_label(read(settings, "test", tmp_path)) == {5: 0, 1: 10, 2: 20}
    assert scored_labels(settings) == [1, 2, 5]


def test_a_list_in_another_order_than_the_alphabets_decides(tmp_path):
    settings = shifted(write_named(tmp_path, SYNSETS), SYNSETS[::-1])
    assert greys_by_label(read(settings, "test", tmp_path)) == {5 - number: 10 * number for number in range(6)}


@pytest.mark.parametrize(
    ("names", "subset", "reason"),
    [
        ([*SYNSETS[:5], "tench"], None, "folder 'tench' is no class of {root}/classes.txt"),
        ([*SYNSETS[:5], "6"], None, "folder '6' is no class of {root}/classes.txt"),
        (SYNSETS[:3], SYNSETS[1:4], f"folder {SYNSETS[0]!r} is no class of {{root}}/subset.txt"),
        (SYNSETS[:5], None, "has 5 classes, not 6"),
        (SYNSETS[:2], SYNSETS[:3], "has 2 classes, not 3"),
        ([*SYNSETS[:5], "0"], None, "test images of 5 classes, expected 6: none of class 5"),
        (SYNSETS[:2], [SYNSETS[0], "n99"], "subset.txt: no class 'n99' in {root}/classes.txt"),
    ],
)
def test_folders_of_other_classes_than_the_lists_are_refused(tmp_path, names, subset, reason):
    settings = shifted(write_named(tmp_path, names), SYNSETS, subset)
    text = refusal(settings, "test", tmp_path)
    assert reason.format(root=tmp_path) in text
    assert "'bands'" in text


def test_a_list_of_classes_that_is_none_is_refused(tmp_path):
    write_named(tmp_path, SYNSETS)
    assert "has 6 classes, not 7" in refusal(shifted(tmp_path, SYNSETS, classes=7), "test", tmp_path)
    assert "nowhere.txt" in refusal(shifted(tmp_path, SYNSETS, class_names="nowhere.txt"), "test", tmp_path)
    assert "_info/none" in refusal(shifted(tmp_path, SYNSETS, class_names="timm.data:_info/none"), "test", tmp_path)


def test_a_subset_holds_for_labels_in_files_too(tmp_path):
    npz = write_npz(tmp_path / "bands.npz")
    settings = shifted(tmp_path, ["a", "b", "c"], ["a", "b"], folder=None, test=None, npz=str(npz))
    assert "test labels outside the classes of" in refusal(settings, "test", tmp_path)
    everything = shifted(tmp_path, ["a", "b", "c"], folder=None, test=None, npz=str(npz))
    assert len(read(everything, "test", tmp_path)) == TEST


@pytest.mark.parametrize(("name", "classes"), [("a", 200), ("r", 200), ("sketch", 1000), ("v2", 1000)])
def test_the_sets_of_table_2_are_scored_over_the_classes_that_they_hold(name, classes):
    entry = STUDY.datasets[f"imagenet-{name}"]
    labels = scored_labels(entry)
    assert len(labels) == classes
    assert (entry.test_of, entry.classes) == ("imagenet", 1000)
    if entry.subset:
        # timm ships the numbers as well, as its authors have them.
        numbers = files("timm.data") / "_info" / f"imagenet_{name}_indices.txt"
        assert labels == [int(line) for line in numbers.read_text().split()]


def test_imagenets_own_folders_sorted_are_the_classes_in_their_order():
    """So that models trained on them have the labels of the further test splits."""
    names = (files("timm.data") / "_info" / "imagenet_synsets.txt").read_text().split()
    assert names == sorted(names)


# --- shards -----------------------------------------------------------------------------------------------


def encoded(label: int, number: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (20 + number % 3, 18), (60 * label + number,) * 3).save(file, "PNG")
    return file.getvalue()


def write_webdataset(folder: Path, *, shards: int = 2, images: int = 3) -> None:
    """The layout of timm's own ImageNet shards: an image, its class and a record of it under one name."""
    folder.mkdir()
    for split, n in (("train", shards), ("validation", 1)):
        for shard in range(n):
            with tarfile.open(folder / f"imagenet1k-{split}-{shard:04}.tar", "w") as tar:
                for number in range(shard * images, (shard + 1) * images):
                    label = (number + 1) % 3
                    record = json.dumps({"label": label, "filename": f"{number}.JPEG"})
                    parts = {"jpg": encoded(label, number), "cls": str(label).encode(), "json": record.encode()}
                    for suffix, content in parts.items():
                        info = tarfile.TarInfo(f"n01440764_{number}.{suffix}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))


def write_parquet(folder: Path) -> None:
    """The layout of Hugging Face's own ImageNet."""
    hf = pytest.importorskip("datasets", reason="shards are read with the package 'datasets'")
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["tench", "goldfish", "shark"])})
    (folder / "data").mkdir(parents=True)
    for split, numbers in (("train", range(6)), ("validation", range(3))):
        labels = [(number + 1) % 3 for number in numbers]
        images = [{"bytes": encoded(*item), "path": None} for item in zip(labels, numbers, strict=True)]
        rows = hf.Dataset.from_dict({"image": images, "label": labels}, features=features)
        rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


def shards(**changes):
    fields = {"npz": None, "timm": "hfds/shards", "train_size": 6, "test_size": 3, "channels": 3}
    return dataset("unused", **fields | changes)


KEYS = {"input_key": "jpg", "target_key": "cls"}
LAYOUTS = {
    "parquet": (write_parquet, shards()),
    "webdataset": (
        write_webdataset,
        shards(train={"split": "train", **KEYS}, test={"split": "validation", **KEYS}),
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def sharded(request, tmp_path_factory):
    """A folder of shards and its settings."""
    hf = pytest.importorskip("datasets", reason="shards are read with the package 'datasets'")
    root, (write, settings) = tmp_path_factory.mktemp("sharded"), LAYOUTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.config, "HF_DATASETS_CACHE", root / "cache")
        write(root / "shards")
        yield root, settings


@pytest.mark.parametrize(("split", "n"), [("train", 6), ("test", 3)])
def test_shards_are_read_image_by_image(sharded, split, n):
    root, settings = sharded
    found = read(settings, split, root)
    assert len(found) == n
    for number in (*range(n), 0):
        image, label = found[number]
        assert label == (number + 1) % 3
        assert (np.asarray(image) == 60 * label + number).all()
        assert image.size == (20 + number % 3, 18)


def test_shards_give_batches_that_depend_on_seed_and_step_alone(sharded):
    root, settings = sharded
    data, run = read(settings, "train", root), spec("unused", dataset=settings, size=RGB)
    recipe = RECIPE.model_copy(update={"batch_size": 4})
    batches = training_batches(data, settings, recipe, RGB, run.stream)
    whole = list(batches.epoch(2))
    (late,) = training_batches(data, settings, recipe, RGB, run.stream, workers=1).epoch(2, start=1)
    assert torch.equal(late[0], whole[1][0])
    assert sorted(torch.cat([labels for _, labels in whole]).tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_size": 7}, "6 train images, expected 7"),
        ({"classes": 2}, "train labels outside 0..1"),
        ({"classes": 4}, "train images of 3 classes, expected 4: none of class 3"),
        ({"train": {"split": "trian"}}, "trian"),
        ({"train": {"split": "train", "input_key": "picture"}}, "picture"),
        ({"train": {"split": "train", "tpyo": 1}}, "tpyo"),
        ({"timm": "hfds/nowhere"}, "parquet, or WebDataset's tar files"),
    ],
)
def test_shards_that_are_not_what_was_configured_are_refused(sharded, changes, reason):
    root, settings = sharded
    text = refusal(settings.model_copy(update=changes), "train", root)
    assert reason in text
    assert "'bands'" in text


def test_a_shard_that_is_cut_off_is_told_with_the_reason(sharded, tmp_path):
    root, settings = sharded
    shutil.copytree(root / "shards", tmp_path / "shards")
    for path in (tmp_path / "shards").rglob("*train*"):
        path.write_bytes(path.read_bytes()[:700])
    text = refusal(settings, "train", tmp_path)
    assert str(tmp_path / "shards") in text
    assert "unexpected end of data" in text or "magic bytes" in text


def test_shards_without_the_package_that_reads_them_name_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("linvit.datasets.find_spec", lambda name: None)
    (tmp_path / "shards").mkdir()
    assert "pip install 'linvit[shards]'" in refusal(shards(), "train", tmp_path)


# --- what is refused, whatever the reader -----------------------------------------------------------------


def test_a_missing_npz_is_told_with_what_where_and_how(tmp_path):
    text = refusal(dataset(tmp_path / "nowhere.npz"), "train", ".")
    assert "data set 'bands' not found" in text
    assert str(tmp_path / "nowhere.npz") in text
    assert "to get it" in text


@pytest.mark.parametrize(("split", "n"), [("train", TRAIN), ("test", TEST)])
def test_a_split_of_another_size_is_refused(npz, split, n):
    text = refusal(dataset(npz, **{f"{split}_size": n + 1}), split, ".")
    assert text == f"data set 'bands': {n} {split} images, expected {n + 1}"
    assert len(read(dataset(npz, **{f"{split}_size": None}), split, ".")) == n


@pytest.mark.parametrize("classes", [1, 2])
def test_labels_outside_of_the_classes_are_refused(npz, classes):
    assert refusal(dataset(npz, classes=classes), "test", ".") == (
        f"data set 'bands': test labels outside 0..{classes - 1}"
    )


def test_negative_labels_are_refused(tmp_path):
    images, labels = arrays(6)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels.astype(np.int64) - 1)
    assert "outside 0..2" in refusal(dataset(tmp_path / "a.npz", train_size=6), "train", ".")
