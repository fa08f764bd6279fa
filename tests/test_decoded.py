"""Decoded splits on disk: the same pixels, mapped; made once; made again when they are damaged or no longer right."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from scipy.stats import ks_2samp
from tiny import CLASSES, RECIPE, RGB, SIZE, arrays, changed, dataset, spec, write_npz
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from linvit import data, datasets, decoded
from linvit.config import Dataset
from linvit.data import FileBatches, PackedBatches, evaluation_batches, training_batches
from linvit.datasets import Images, Packed
from linvit.ranks import Ranks

N = 9


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images of many sizes, in colour, grey and with a palette, in a folder a class."""
    random = np.random.default_rng(0)
    for number in range(N):
        for split in ("train", "val"):
            place = tmp_path / "set" / split / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (20 + 3 * number, 40 - 2 * number, 3)).astype(np.uint8)
            image = PIL.Image.fromarray(pixels)
            image = {7: image.convert("L"), 8: image.convert("P")}.get(number, image)
            image.save(place / f"{number}.png")
    return tmp_path


def of_files(**changes) -> Dataset:
    return dataset("unused", 3, npz=None, folder="set", train_size=N, test_size=N, **changes)


def of_arrays(folder: Path) -> Dataset:
    return dataset(write_npz(folder / "bands.npz"))


def read(settings: Dataset, folder: Path, split: str = "train"):
    return decoded.read(settings, split, folder, folder / "decoded")


def pixels_of(settings: Dataset, folder: Path, split: str = "train") -> Path:
    return folder / "decoded" / settings.name / f"{split}.bin"


@pytest.fixture
def written(monkeypatch) -> list[Path]:
    """The files that are made."""
    paths, write = [], decoded._write
    monkeypatch.setattr(decoded, "_write", lambda data, path, key: (paths.append(path), write(data, path, key)))
    return paths


# --- the same images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
def test_decoded_files_hold_the_images_of_the_files(folder, split):
    plain, found = datasets.read(of_files(), split, folder), read(of_files(), folder, split)
    assert isinstance(found, Packed)
    assert len(found) == N
    for (image, label), (other, other_label) in zip(plain, (found[i] for i in range(N)), strict=True):
        assert label == other_label
        assert np.array_equal(image.convert("RGB"), other.convert("RGB"))
        assert np.array_equal(image.convert("L"), other.convert("L"))
    sizes = [image.size[::-1] for image, _ in plain]
    assert found.sizes(torch.arange(N)).tolist() == [list(size) for size in sizes]


@pytest.mark.parametrize("split", ["train", "test"])
def test_decoded_arrays_are_the_arrays(tmp_path, split):
    settings = of_arrays(tmp_path)
    plain, found = datasets.read(settings, split, tmp_path), read(settings, tmp_path, split)
    assert isinstance(found, Images)
    assert torch.equal(found.images, plain.images)
    assert torch.equal(found.labels, plain.labels)


def test_pixels_are_those_of_the_file_and_shared_by_all_who_map_it(tmp_path):
    settings = of_arrays(tmp_path)
    found = read(settings, tmp_path)
    path = pixels_of(settings, tmp_path)
    assert path.read_bytes() == found.images.numpy().tobytes()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) in maps.read_text()
    # A job that writes into them changes them for itself alone.
    before = path.read_bytes()
    found.images.zero_()
    assert path.read_bytes() == before


def test_without_a_folder_nothing_is_written(tmp_path):
    settings = of_arrays(tmp_path)
    decoded.read(settings, "train", tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["bands.npz"]


@pytest.mark.parametrize("change", [{"test_of": "other", "train_size": None}, {"train_size": 100_001}], ids=str)
def test_large_sets_and_further_test_splits_are_left_alone(folder, written, change):
    settings = of_files()
    held = datasets.read(settings, "test", folder)
    settings = settings.model_copy(update=change)
    assert decoded.decoded(held, settings, "test", folder, folder / "decoded") is held
    assert written == []


def test_where_it_cannot_be_written_the_files_are_read(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded, "_images_of", full)
    assert isinstance(read(of_files(), folder), datasets.Folder)
    assert "train.bin: cannot be written (No space left on device): images are decoded" in caplog.text


# --- made once, and again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_a_split_is_decoded_once(folder, written, kind):
    settings = of_files() if kind == "files" else of_arrays(folder)
    for _ in range(3):
        read(settings, folder)
    assert written == [pixels_of(settings, folder)]
    read(settings, folder, "test")
    assert len(written) == 2


def rewrite(change: Callable[[bytes], bytes], suffix: str) -> Callable[[Path], None]:
    return lambda path: path.with_suffix(suffix).write_bytes(change(path.with_suffix(suffix).read_bytes()))


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "truncated": rewrite(lambda content: content[:-7], ".bin"),
    "empty": rewrite(lambda content: b"", ".bin"),
    "a bit flipped": rewrite(lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:], ".bin"),
    "index deleted": lambda path: path.with_suffix(".npz").unlink(),
    "index truncated": rewrite(lambda content: content[: len(content) // 2], ".npz"),
    "index empty": rewrite(lambda content: b"", ".npz"),
    "index of html": rewrite(lambda content: b"<!doctype html>", ".npz"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_made_again(folder, written, damage):
    path = pixels_of(of_files(), folder)
    expected = read(of_files(), folder)
    whole = path.read_bytes()
    damage(path)
    found = read(of_files(), folder)
    assert written == [path, path]
    assert path.read_bytes() == whole
    assert torch.equal(found.pixels, torch.frombuffer(bytearray(whole), dtype=torch.uint8))
    assert torch.equal(found.labels, expected.labels)


def replaced(folder: Path) -> None:
    PIL.Image.new("RGB", (30, 30)).save(folder / "set/train/class0/0.png")


def touched(folder: Path) -> None:
    os.utime(folder / "set/train/class0/0.png", (1, 1))


@pytest.mark.parametrize("change", [replaced, touched])
def test_files_that_have_changed_are_decoded_again(folder, written, change):
    read(of_files(), folder)
    change(folder)
    found = read(of_files(), folder)
    assert len(written) == 2
    assert np.array_equal(found[0][0], datasets.read(of_files(), "train", folder)[0][0].convert("RGB"))


def test_labels_are_those_that_the_folders_names_have_now(folder):
    names = folder / "names.txt"
    settings = of_files(class_names=str(names))
    names.write_text("\n".join(f"class{label}" for label in range(CLASSES)))
    before = read(settings, folder).labels
    names.write_text("\n".join(f"class{label}" for label in reversed(range(CLASSES))))
    assert read(settings, folder).labels.tolist() == (CLASSES - 1 - before).tolist()


def test_a_split_of_many_bytes_is_left_alone(folder, written, monkeypatch):
    held = datasets.read(of_files(), "train", folder)
    exact = sum(3 * image.width * image.height for image, _ in held)
    assert decoded._bytes_of(held) == pytest.approx(exact, rel=0.01)  # all nine are looked at
    monkeypatch.setattr(decoded, "LARGEST_BYTES", exact // 2)
    assert not isinstance(read(of_files(), folder), Packed)
    assert not written


def test_the_first_rank_decodes_before_the_others_look(folder):
    order = []

    class Told(Ranks):
        def wait(self) -> None:
            order.append((self.rank, decoded_there()))

    def decoded_there() -> bool:
        return pixels_of(of_files(), folder).exists()

    decoded.read(of_files(), "train", folder, folder / "decoded", Told(1, 2))
    decoded.read(of_files(), "train", folder, folder / "decoded", Told(0, 2))
    # Here alone, the second rank decodes by itself: but it has waited first.
    assert order == [(1, False), (0, True)]


def test_arrays_that_have_changed_are_written_again(tmp_path, written):
    settings = of_arrays(tmp_path)
    read(settings, tmp_path)
    images, labels = arrays(21, seed=9)
    np.savez(tmp_path / "bands.npz", train_images=images, train_labels=labels)
    assert np.array_equal(read(settings, tmp_path).images[:, 0].numpy(), images)
    assert len(written) == 2


def test_two_jobs_that_decode_at_once_both_find_the_images(folder):
    code = (
        "import sys; from pathlib import Path; from linvit import decoded; from linvit.config import Dataset; "
        "part = Dataset.model_validate_json(sys.argv[1]); "
        "found = decoded.read(part, 'train', Path('.'), Path('decoded')); "
        "print(type(found).__name__, found.pixels.sum())"
    )
    command = [sys.executable, "-c", code, of_files().model_dump_json()]
    jobs = [subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {job.communicate(timeout=300)[0] for job in jobs}
    expected = read(of_files(), folder)
    assert said == {f"Packed tensor({expected.pixels.sum()})\n"}
    assert sorted(path.name for path in (folder / "decoded/bands").iterdir()) == ["train.bin", "train.npz"]


# --- batches of it ----------------------------------------------------------------------------------------


def batches_of(held, recipe=RECIPE, *, channels: int = 3, workers: int = 0) -> data.Batches:
    size = RGB if channels == 3 else SIZE
    return training_batches(held, dataset("unused", channels), recipe, size, spec("unused").stream, workers=workers)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("start", [0, 1])
def test_batches_depend_on_seed_epoch_and_step_alone(folder, channels, start):
    held = read(of_files(), folder)
    torch.manual_seed(0)
    batches = batches_of(held, changed(RECIPE, batch_size=4), channels=channels)
    assert isinstance(batches, PackedBatches)
    whole = list(batches.epoch(2))
    assert [images.shape for images, _ in whole] == [(n, channels, 16, 16) for n in (4, 4, 1)]
    torch.manual_seed(1)
    again = batches_of(held, changed(RECIPE, batch_size=4), channels=channels, workers=3)
    for (images, labels), (others, other_labels) in zip(whole[start:], again.epoch(2, start), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    assert not torch.equal(whole[0][0], next(again.epoch(3))[0])


def test_an_error_in_the_thread_that_prepares_batches_is_raised(folder):
    held = read(of_files(), folder)
    broken = Packed(held.pixels[:100], held.shapes, held.labels)
    with pytest.raises(RuntimeError):
        list(batches_of(broken).epoch(1))


def test_crops_are_those_that_pillow_makes(folder):
    """Given the same box: within the rounding of whole bytes, where pixels are averaged and where they are repeated."""
    held = read(of_files(), folder)
    for interpolation in ("bilinear", "bicubic"):
        batches = batches_of(held, changed(RECIPE, interpolation=interpolation))
        for index, box in ((0, (0, 0, 20, 40)), (2, (3, 4, 8, 10)), (6, (5, 2, 20, 25))):
            mode = F.InterpolationMode(interpolation)
            pillow = F.pil_to_tensor(F.resized_crop(held[index][0], *box, [16, 16], mode))
            difference = batches.cropped(index, torch.tensor(box)).int() - pillow.int()
            assert difference.abs().max() <= 2


def test_crops_are_distributed_as_torchvisions_of_each_image(folder):
    held = read(of_files(), folder)
    crop = batches_of(held, changed(RECIPE, crop_scale=[0.08, 1.0])).augmentation.crop
    index, n = 5, 3000
    height, width = held.shapes[index, :2].tolist()
    ours = crop.boxes(held.sizes(torch.full((n,), index)), torch.Generator().manual_seed(1)).double()
    torch.manual_seed(2)
    image = torch.empty(3, height, width)
    theirs = torch.tensor([RandomResizedCrop.get_params(image, crop.scale, crop.ratio) for _ in range(n)]).double()
    for statistic in (lambda b: b[:, 2] * b[:, 3] / (height * width), lambda b: b[:, 3] / b[:, 2], lambda b: b[:, 0]):
        assert ks_2samp(statistic(ours).numpy(), statistic(theirs).numpy()).pvalue > 1e-4


def test_without_augmentation_batches_are_the_images_resized(folder):
    held = read(of_files(), folder)
    off = {"crop_scale": (1.0, 1.0), "crop_ratio": (0.1, 10.0), "flip": 0.0, "color_jitter": 0.0}
    batches = batches_of(held, changed(RECIPE, batch_size=N, **off))
    (images, labels) = next(batches.epoch(1))
    order = batches.order(1)[0]
    assert torch.equal(labels, held.labels[order])
    assert images.mean((1, 2, 3)).tolist() == pytest.approx(
        [(held.pixels_of(i).float().mean().item() / 255 - 0.4) / 0.2 for i in order.tolist()], abs=0.3
    )


def test_policies_for_single_images_and_evaluation_see_the_decoded_images_as_the_files(folder):
    plain, held = datasets.read(of_files(), "train", folder), read(of_files(), folder)
    recipe = changed(RECIPE, auto_augment="rand-m5-inc1", random_erasing=0.2)
    assert isinstance(batches_of(held, recipe), FileBatches)
    for one, other in zip(batches_of(plain, recipe).epoch(1), batches_of(held, recipe).epoch(1), strict=True):
        assert torch.equal(one[0], other[0])
    settings = dataset("unused", 3)
    found = [list(evaluation_batches(images, settings, RECIPE, RGB)) for images in (plain, held)]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(*found, strict=True))
