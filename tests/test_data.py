"""The batches that training and evaluation see: drawn from seeds alone, on both paths."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import psutil
import pytest
import timm.data
import torch
from processes import ENDINGS
from tiny import RECIPE, RGB, SIZE, STUDY, TRAIN, arrays, changed, dataset, one_line, spec
from torchvision.transforms.v2 import functional as F

from linvit import data
from linvit.config import Dataset, printable
from linvit.data import epoch_order, evaluation_batches, training_batches
from linvit.datasets import DataError, Images

# --- training batches -------------------------------------------------------------------------------------

RANDAUGMENT = RECIPE.model_copy(update={"auto_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.25})
ERASING = RECIPE.model_copy(update={"random_erasing": 0.5})
NUMBERED = dataset("unused", classes=TRAIN)


def numbered(channels: int = 1) -> Images:
    """Each image has a class of its own, so that a batch's labels say which images it holds."""
    images, _ = arrays(TRAIN, channels=channels if channels > 1 else 0)
    array = torch.from_numpy(images)
    return Images(array[:, None] if channels == 1 else array.permute(0, 3, 1, 2), torch.arange(TRAIN))


class Decoded(torch.utils.data.Dataset):
    """The same images, as a set that is read file by file."""

    def __init__(self, held: Images) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        return self.held[index]


PATHS = {
    "in memory": (numbered, RECIPE),
    "file by file": (lambda: Decoded(numbered()), RECIPE),
    "RandAugment and erasing": (numbered, RANDAUGMENT),
    "erasing": (lambda: Decoded(numbered()), ERASING),
}
every_path = pytest.mark.parametrize(("split", "recipe"), PATHS.values(), ids=PATHS)


def batches_of(split, recipe, *, seed: int = 0, workers: int = 0, **changes) -> data.Batches:
    recipe = recipe.model_copy(update=changes)
    return training_batches(split(), NUMBERED, recipe, SIZE, spec("unused", seed=seed).stream, workers=workers)


def epoch_of(batches: data.Batches, epoch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    images, labels = zip(*batches.epoch(epoch), strict=True)
    return list(images), list(labels)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@every_path
def test_an_epoch_drawn_twice_is_the_same_whatever_ran_before(split, recipe):
    torch.manual_seed(0)
    batches = batches_of(split, recipe)
    images, labels = epoch_of(batches, 3)
    torch.manual_seed(1)
    np.random.seed(1)
    for again in (batches, batches_of(split, recipe)):
        next(again.epoch(1))
        images_again, labels_again = epoch_of(again, 3)
        assert same(labels, labels_again)
        assert same(images, images_again)


@every_path
def test_epochs_and_seeds_differ_in_order_and_in_augmentation(split, recipe):
    draws = [
        epoch_of(batches_of(split, recipe), 1),
        epoch_of(batches_of(split, recipe), 2),
        epoch_of(batches_of(split, recipe, seed=1), 1),
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        (images, labels), (others, other_labels) = draws[i], draws[j]
        assert not same(labels, other_labels)
        by_label = {int(label): image for label, image in zip(torch.cat(labels), torch.cat(images), strict=True)}
        differ = [
            not torch.equal(by_label[int(label)], image)
            for label, image in zip(torch.cat(other_labels), torch.cat(others), strict=True)
        ]
        assert sum(differ) > 0.8 * TRAIN


@every_path
def test_no_two_batches_share_their_draws(split, recipe):
    """One image over and over: what differs between batches is the augmentation alone."""
    one = numbered()
    copies = Images(one.images[:1].expand(16, -1, -1, -1), torch.arange(16))
    held = Decoded(copies) if isinstance(split(), Decoded) else copies
    batches = training_batches(held, NUMBERED, recipe, SIZE, spec("unused").stream)
    drawn = [images for epoch in (1, 2, 3) for images, _ in batches.epoch(epoch)]
    assert len(drawn) == 6
    for i, images in enumerate(drawn):
        assert not any(torch.equal(images, other) for other in drawn[:i])
    assert len({image.numpy().tobytes() for images in drawn for image in images}) > 0.9 * 6 * 8


@every_path
@pytest.mark.parametrize("batch_size", [1, 4, 8, 20, 21, 100])
def test_an_epoch_holds_every_image_once_and_the_odd_last_batch(split, recipe, batch_size):
    batches = batches_of(split, recipe, batch_size=batch_size)
    images, labels = epoch_of(batches, 1)
    sizes = [batch_size] * (TRAIN // batch_size) + ([TRAIN % batch_size] if TRAIN % batch_size else [])
    assert [len(label) for label in labels] == sizes == [len(image) for image in images]
    assert len(batches) == len(sizes)
    assert sorted(torch.cat(labels).tolist()) == list(range(TRAIN))
    assert torch.cat(labels).tolist() != list(range(TRAIN))


@every_path
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_an_epoch_may_be_taken_up_at_any_step(split, recipe, start):
    """The batches that were still to come, to the bit; after the last step, none."""
    batches = batches_of(split, recipe)
    whole = list(batches.epoch(2))
    rest = list(batches.epoch(2, start))
    assert len(rest) == 3 - start
    for (images, labels), (expected, expected_labels) in zip(rest, whole[start:], strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("name", ["file by file", "RandAugment and erasing"])
def test_batches_do_not_depend_on_the_number_of_workers(name):
    split, recipe = PATHS[name]
    alone = epoch_of(batches_of(split, recipe, workers=0), 2)
    helped = epoch_of(batches_of(split, recipe, workers=2), 2)
    assert same(alone[0], helped[0])
    assert same(alone[1], helped[1])


@every_path
def test_batches_do_not_depend_on_what_the_model_is(split, recipe):
    """Runs of one seed see the same images in the same order, whatever the variant and the initialisation."""
    runs = [spec("unused", "relu"), spec("unused", "inline", "mimetic"), spec("unused", "softmax")]
    drawn = [epoch_of(training_batches(split(), NUMBERED, recipe, SIZE, run.stream), 1) for run in runs]
    assert all(same(drawn[0][0], other[0]) and same(drawn[0][1], other[1]) for other in drawn[1:])


@every_path
def test_labels_stay_with_their_images(split, recipe):
    """With augmentation switched off, each image is its own, normalised."""
    off = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "color_jitter": 0.0, "auto_augment": None}
    images, labels = epoch_of(batches_of(split, recipe, random_erasing=0.0, **off), 1)
    expected = (numbered().images[torch.cat(labels)] / 255 - 0.4) / 0.2
    torch.testing.assert_close(torch.cat(images), expected, atol=1e-5, rtol=0)


@every_path
def test_training_images_are_augmented(split, recipe):
    images, labels = epoch_of(batches_of(split, recipe), 1)
    plain = (numbered().images[torch.cat(labels)] / 255 - 0.4) / 0.2
    moved = (torch.cat(images) - plain).abs().mean((1, 2, 3)) > 0.05
    assert moved.float().mean() > 0.8


@pytest.mark.parametrize("recipe", [RECIPE, RANDAUGMENT], ids=["in memory", "file by file"])
def test_the_data_sets_statistics_are_applied(recipe):
    grey = Images(torch.full((8, 3, 16, 16), 128, dtype=torch.uint8), torch.arange(8))
    off = {"flip": 0.0, "color_jitter": 0.0, "auto_augment": None, "random_erasing": 1e-9}
    settings = dataset("unused", 3, classes=8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    recipe = recipe.model_copy(update=off if recipe is RANDAUGMENT else off | {"random_erasing": 0.0})
    expected = (torch.tensor(128 / 255) - torch.tensor(settings.mean)) / torch.tensor(settings.std)
    for drawn in (
        training_batches(grey, settings, recipe, RGB, spec("unused").stream).epoch(1),
        evaluation_batches(grey, settings, recipe, RGB),
    ):
        for images, _ in drawn:
            torch.testing.assert_close(images, expected[:, None, None].expand_as(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("channels", "size"), [(1, RGB), (3, SIZE)])
def test_images_are_brought_to_the_models_channels(channels, size):
    settings = dataset("unused", size.channels, classes=TRAIN)
    for recipe in (RECIPE, RANDAUGMENT):
        batches = training_batches(numbered(channels), settings, recipe, size, spec("unused").stream)
        assert {images.shape[1] for images, _ in batches.epoch(1)} == {size.channels}
    for images, _ in evaluation_batches(numbered(channels), settings, RECIPE, size):
        assert images.shape[1] == size.channels
        if channels == 1:
            assert torch.equal(images[:, 0], images[:, 1])


def test_the_order_of_an_epoch_is_a_permutation():
    order = epoch_order(100, 4, spec("unused").stream)
    assert sorted(order.tolist()) == list(range(100))
    assert not torch.equal(order, epoch_order(100, 5, spec("unused").stream))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("recipe", ["xu2024", "transfer", "fashion-mini"])
def test_no_draw_of_a_recipes_augmentation_fails(recipe, channels):
    """4,000 draws: RandAugment's rarest magnitudes too, on grey images and colour ones."""
    recipe = STUDY.recipes[recipe].model_copy(update={"batch_size": 100})
    size = SIZE if channels == 1 else RGB
    settings = dataset("unused", channels, classes=2000)
    images = torch.from_numpy(arrays(2000, channels=3)[0]).permute(0, 3, 1, 2)[:, :channels]
    batches = training_batches(Images(images, torch.arange(2000)), settings, recipe, size, spec("unused").stream)
    for epoch in (1, 2):
        for drawn, _ in batches.epoch(epoch):
            assert drawn.isfinite().all()
            assert drawn.shape == (100, channels, 16, 16)


@pytest.mark.parametrize("policy", ["rand-m2", "rand-m9", "rand-m9-n3-inc1", "augmix-m5-w4-d2", "original", "v0", "3a"])
def test_no_draw_of_timms_other_policies_fails(policy):
    """On grey images: each policy that the configuration accepts."""
    recipe = changed(RECIPE, auto_augment=policy, batch_size=100)
    images = torch.from_numpy(arrays(1000)[0])[:, None]
    held = Images(images, torch.arange(1000))
    for drawn, _ in training_batches(held, dataset("unused", classes=1000), recipe, SIZE, spec("unused").stream).epoch(
        1
    ):
        assert drawn.isfinite().all()


def test_the_per_image_path_is_timms_with_the_recipes_settings(monkeypatch):
    seen = {}
    original = timm.data.create_transform
    monkeypatch.setattr(timm.data, "create_transform", lambda *a, **k: (seen.update(k), original(*a, **k))[1])
    recipe = STUDY.recipes["xu2024"]
    batches = training_batches(numbered(3), dataset("unused", 3, classes=TRAIN), recipe, RGB, spec("unused").stream)
    next(batches.epoch(1))
    assert seen["is_training"] is True
    assert (seen["scale"], seen["ratio"], seen["hflip"]) == (recipe.crop_scale, recipe.crop_ratio, 0.5)
    assert (seen["auto_augment"], seen["color_jitter"]) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (seen["re_prob"], seen["re_mode"], seen["interpolation"]) == (0.25, "pixel", "bicubic")
    assert (seen["mean"], seen["std"]) == ((0.4,) * 3, (0.2,) * 3)


def test_erasing_happens_at_the_rate_asked_for():
    """On uniform images, an erased one is one with noise in it."""
    held = Images(torch.full((1000, 1, 16, 16), 128, dtype=torch.uint8), torch.arange(1000))
    recipe = RECIPE.model_copy(update={"random_erasing": 0.25, "color_jitter": 0.0, "batch_size": 500})
    batches = training_batches(held, dataset("unused", classes=1000), recipe, SIZE, spec("unused").stream)
    erased = torch.cat([images.std((1, 2, 3)) > 1e-3 for images, _ in batches.epoch(1)])
    assert 0.2 < erased.float().mean() < 0.3


# --- evaluation batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [numbered, lambda: Decoded(numbered())], ids=["in memory", "file by file"])
@pytest.mark.parametrize("batch_size", [1, 4, 21, 50])
@pytest.mark.parametrize("workers", [0])
def test_evaluation_sees_each_image_once_in_order_and_as_it_is(split, batch_size, workers):
    recipe = RECIPE.model_copy(update={"batch_size": batch_size})
    batches = evaluation_batches(split(), NUMBERED, recipe, SIZE, workers=workers)
    for _ in range(2):  # the same at every epoch
        images, labels = zip(*batches, strict=True)
        assert max(map(len, labels)) == min(batch_size, TRAIN)
        assert torch.cat(labels).tolist() == list(range(TRAIN))
        expected = (numbered().images / 255 - 0.4) / 0.2
        torch.testing.assert_close(torch.cat(images), expected, atol=1e-5, rtol=0)


def test_evaluation_draws_no_random_numbers():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    list(evaluation_batches(numbered(), NUMBERED, RECIPE, SIZE))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("side", "crop", "resized"), [(16, 1.0, 16), (16, 0.5, 32), (16, 0.9, 17), (8, 0.8, 10), (32, 0.875, 36)]
)
def test_evaluation_resizes_as_timm_does_and_crops_the_centre(side, crop, resized, interpolation):
    recipe = changed(RECIPE, eval_crop=crop, interpolation=interpolation)
    size = changed(SIZE, image_size=side)
    held = numbered()
    found = torch.cat([images for images, _ in evaluation_batches(held, NUMBERED, recipe, size)])
    expected = F.resize(held.images / 255, [resized, resized], F.InterpolationMode(interpolation), antialias=True)
    start = round((resized - side) / 2)
    expected = expected[..., start : start + side, start : start + side].clamp(0, 1)
    torch.testing.assert_close(found, (expected - 0.4) / 0.2, atol=1e-4, rtol=0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("side", "crop"), [(16, 1.0), (16, 0.9), (32, 0.9), (32, 0.875), (48, 0.95)])
def test_both_paths_prepare_the_same_test_images(side, crop, interpolation):
    """In memory and file by file: the same pixels, but for Pillow's whole bytes."""
    recipe = changed(RECIPE, eval_crop=crop, interpolation=interpolation)
    size = changed(SIZE, image_size=side)
    held = numbered()
    one, other = (
        torch.cat([images for images, _ in evaluation_batches(split, NUMBERED, recipe, size)])
        for split in (held, Decoded(held))
    )
    difference = (one - other).abs() * NUMBERED.std[0] * 255
    # Pillow rounds and clips between its two passes, which shows where bicubic overshoots.
    assert difference.mean().item() < 0.7
    assert difference.max().item() < (2.5 if interpolation == "bilinear" else 15)


def test_a_spec_of_the_papers_default_recipe_evaluates_at_248_pixels(monkeypatch):
    """timm: floor(224 / 0.9)."""
    sizes = []
    original = F.resize
    monkeypatch.setattr(data.F, "resize", lambda images, size, *a, **k: (sizes.append(size), original(images, size))[1])
    held = Images(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    size = STUDY.sizes["tiny"]
    next(iter(evaluation_batches(held, dataset("unused", 3), STUDY.recipes["transfer"], size)))
    assert sizes == [[248]]


def test_a_batch_larger_than_the_training_set_is_warned_of(caplog):
    run = spec("unused")
    with caplog.at_level("WARNING", "linvit"):
        training_batches(numbered(), NUMBERED, RECIPE.model_copy(update={"batch_size": TRAIN}), SIZE, run.stream)
        assert caplog.messages == []
        training_batches(numbered(), NUMBERED, RECIPE.model_copy(update={"batch_size": TRAIN + 1}), SIZE, run.stream)
    assert [f"batch_size {TRAIN + 1} exceeds the {TRAIN} images" in text for text in caplog.messages] == [True]


def test_images_that_are_made_smaller_are_resized_one_by_one_with_antialiasing():
    """A chessboard of single pixels, half as large, is grey."""
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255
    held = Images(board.to(torch.uint8).expand(4, 1, 64, 64), torch.zeros(4, dtype=torch.long))
    settings = Dataset(name="board", npz="unused", classes=1, mean=(0.0,), std=(1.0,))
    recipe = RECIPE.model_copy(update={"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "color_jitter": 0.0})
    size = SIZE.model_copy(update={"image_size": 32, "channels": 1})
    made = training_batches(held, settings, recipe, size, lambda *_: 0)
    images, _ = next(made.epoch(1))
    assert images.std() < 0.1
    assert images.mean() == pytest.approx(0.5, abs=0.02)


# --- processes that load images ---------------------------------------------------------------------------


@pytest.fixture
def after_fork() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Have processes forked in this test begin with a call."""
    calls = []
    os.register_at_fork(after_in_child=lambda: [call() for call in calls])
    yield calls.append
    calls.clear()


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_to_loading_processes_as_they_start_changes_nothing(after_fork, capfd, number):
    """As a scheduler or a terminal sends it to every process of a job."""
    split, recipe = PATHS["file by file"]
    alone = epoch_of(batches_of(split, recipe), 2)
    after_fork(lambda: os.kill(os.getpid(), number))
    helped = epoch_of(batches_of(split, recipe, workers=2), 2)
    assert same(alone[0], helped[0])
    assert capfd.readouterr().err == ""
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(ENDINGS)


ORPHAN = """
import os, signal, sys, time
import torch
from linvit.data import Loader, _loading

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    print(os.getpid(), flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)

parent = os.getpid()
os.register_at_fork(after_in_parent=die, after_in_child=wait)
next(iter(Loader(range(8), 4, **_loading(torch.device("cpu"), 1))))
"""


def test_a_loading_process_whose_run_was_killed_as_it_started_ends():
    """torch's own watch begins later, and would take what adopts it for the run."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as run:
        loading = psutil.Process(int(run.stdout.readline()))
    deadline = time.monotonic() + 60
    while loading.is_running() and loading.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on alone"
        time.sleep(0.1)


class Samples(torch.utils.data.Dataset):
    """Files, as torchvision's folders of images hold them."""

    def __init__(self, *paths: Path) -> None:
        self.samples = [(str(path), 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[PIL.Image.Image, int]:
        path, label = self.samples[index]
        return PIL.Image.open(path), label


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["a.png", "a\nlinvit.datasets.b.png", "a\u2028b\udcff.png", "å b.png"])
def test_an_image_that_cannot_be_read_is_told_by_its_whole_name_on_one_line(tmp_path, workers, name):
    path = tmp_path / name
    path.write_text("no image")
    batches = evaluation_batches(Samples(path), NUMBERED, RECIPE, SIZE, workers=workers)
    with pytest.raises(DataError) as caught:
        list(batches)
    assert one_line(caught.value).startswith(f"{printable(str(path))}: cannot be read as an image: cannot identify")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["a pipe", "a device"])
def test_what_is_no_regular_file_is_refused_rather_than_waited_for(tmp_path, make):
    path = tmp_path / "a.png"
    make(path)
    with pytest.raises(DataError) as caught:
        list(evaluation_batches(Samples(path), NUMBERED, RECIPE, SIZE))
    assert one_line(caught.value).startswith(f"{path}: cannot be read as an image: ")
    assert "no regular file" in str(caught.value)
