"""Damaged files: named and refused, or made again; what is read all the same is what was written."""

import datetime
import gzip
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from damage import Damage, Kept, damages, edits, lead_nowhere, writes
from fakes import metrics, write_evaluation
from tally import Tally
from tiny import CLASSES, RECIPE, SIZE, arrays, dataset, one_line, softmax_weights, spec, store_source, write_npz

from linvit import accuracy, datasets, decoded, incomplete, progress, results, sources
from linvit.cli.command import _read
from linvit.config import UserError
from linvit.convert import export
from linvit.files import write_sealed
from linvit.fit import adamw
from linvit.grid import Evaluation, RunSpec
from linvit.rates import Rate, Rates, read_rates, write_rates
from linvit.run import train
from linvit.trained import load_model, save_model
from linvit.vit import build_vit

torture = pytest.mark.torture
MINI = spec("bands.npz", size=SIZE.model_copy(update={"name": "mini"}))


@dataclass
class Subject:
    """A file, what reads it, and whether it is made again where it is damaged; what is not is refused by name."""

    path: Path
    read: Callable[[], Any]
    is_made_again: bool = False

    def outcome(self) -> Any:
        """What the reader finds; None where it refuses in one line that names the file."""
        try:
            return self.read()
        except UserError as error:
            told = one_line(error)
        assert str(self.path) in told
        return None


def content_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def fresh() -> tuple:
    torch.manual_seed(0)
    model = build_vit(SIZE, num_classes=CLASSES)
    return model, adamw(model, RECIPE)


def checkpoint(folder: Path) -> Subject:
    model, optimizer = fresh()
    model(torch.randn(2, 1, 16, 16)).sum().backward()
    optimizer.step()
    path = folder / "checkpoint.pt"
    progress.save(path, "a run", model, optimizer, progress.Progress(step=1, losses=[(1.0, None, 2)]))

    def read() -> tuple:
        model, optimizer = fresh()
        found = progress.restore(path, "a run", model, optimizer, progress.Schedule(epochs=3, steps=4, eval_every=2))
        state = [content_of(values) for values in optimizer.state_dict()["state"].values()]
        return found, content_of(model.state_dict()), state

    return Subject(path, read)


def published(folder: Path) -> Subject:
    path = folder / "published.pth"
    torch.save({"model": softmax_weights()}, path)
    source = sources.Source(name="old", size=SIZE, path=str(path))

    def read() -> dict:
        sources.fetch(source, folder.parent / "fetched")
        return content_of(sources.load(folder.parent / "fetched").tensors)

    return Subject(path, read)


def prepared(folder: Path, name: str) -> Subject:
    place = folder / store_source(folder).folder

    def read() -> tuple:
        found = sources.load(place)
        return content_of(found.tensors), found.grid_size, found.statistics

    return Subject(place / name, read)


def pixels(split: datasets.Images) -> tuple[bytes, list]:
    return split.images.numpy().tobytes(), split.labels.tolist()


def cache(folder: Path, name: str) -> Subject:
    of = dataset(write_npz(folder.parent / "bands.npz"))

    def read() -> tuple:
        return pixels(decoded.read(of, "train", folder.parent, folder))

    read()
    return Subject(folder / of.name / name, read, is_made_again=True)


def npz(folder: Path) -> Subject:
    of = dataset(write_npz(folder / "bands.npz"), train_size=None, test_size=None)
    return Subject(folder / "bands.npz", lambda: pixels(datasets.read(of, "train", folder)))


def idx(folder: Path, part: str) -> Subject:
    images, labels = arrays(21)
    for name, array in {"images-idx3": images, "labels-idx1": labels}.items():
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), mtime=0))
    of = dataset("unused", npz=None, idx=str(folder), train_size=None)
    return Subject(folder / f"train-{part}-ubyte.gz", lambda: pixels(datasets.read(of, "train", folder)))


def model(folder: Path) -> Subject:
    of = spec("bands.npz")
    torch.manual_seed(0)
    save_model(build_vit(of.size, of.variant, num_classes=CLASSES), of, folder / "model.safetensors")

    def read() -> tuple:
        found, model = load_model(folder / "model.safetensors")
        return found, content_of(model.state_dict())

    return Subject(folder / "model.safetensors", read)


def converted(folder: Path, name: str) -> Subject:
    of = spec("bands.npz")
    torch.manual_seed(0)
    save_model(build_vit(of.size, of.variant, num_classes=CLASSES), of, folder.parent / "run/model.safetensors")
    export(folder.parent / "run", folder)

    def read() -> tuple:
        found = accuracy._converted(folder, of.dataset)
        return content_of(found.model.state_dict()), found.origin, found.statistics, found.recipe, found.size

    return Subject(folder / name, read)


def collected(collect: Callable, path: Path) -> str:
    return incomplete.to_csv(collect([path]))


def run_metrics(folder: Path) -> Subject:
    path = folder / "metrics.json"
    write_sealed(path, metrics(MINI, 50.0))
    return Subject(path, lambda: collected(results.collect, path))


def ood_metrics(folder: Path) -> Subject:
    of = Evaluation(run=MINI, dataset=dataset("other.npz", name="other", test_of="bands", train_size=None))
    write_evaluation(folder, of, 25.0)
    path = folder / f"{of.name}.json"
    write_sealed(path, json.loads(path.read_text()))
    return Subject(path, lambda: collected(results.collect_ood, path))


def rates(folder: Path) -> Subject:
    row = Rate(
        size="wee",
        variant="relu",
        distill=None,
        precision="auto",
        batch_size=8,
        train_images_per_second=1.5,
        eval_images_per_second=2.5,
    )
    path = folder / "throughput.json"
    write_rates(Rates(device="cpu", threads=1, versions={}, date=datetime.date(2026, 1, 1), rates=(row,)), path)
    return Subject(path, lambda: read_rates(path))


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "checkpoint.pt": checkpoint,
    "a published checkpoint": published,
    "a source's weights": lambda folder: prepared(folder, "weights.safetensors"),
    "source.json": lambda folder: prepared(folder, "source.json"),
    "decoded images": lambda folder: cache(folder, "train.bin"),
    "index of decoded images": lambda folder: cache(folder, "train.npz"),
    "npz": npz,
    "idx, images": lambda folder: idx(folder, "images-idx3"),
    "idx, labels": lambda folder: idx(folder, "labels-idx1"),
    "model.safetensors": model,
    "a converted model": lambda folder: converted(folder, "model.safetensors"),
    "its config.json": lambda folder: converted(folder, "config.json"),
    "metrics.json": run_metrics,
    "ood/*.json": ood_metrics,
    "throughput.json": rates,
}
JSON = [name for name in SUBJECTS if name.endswith("json")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "of the file").mkdir()
    return tmp_path / "of the file"


@pytest.mark.parametrize("flips", [25, pytest.param(1000, marks=torture)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_changes_no_result(folder: Path, tally: Tally, name: str, flips: int) -> None:
    subject = SUBJECTS[name](folder)
    inject(subject, damages(subject.path.read_bytes(), flips), name, tally)


@pytest.mark.parametrize("name", JSON)
def test_a_file_edited_by_hand_changes_no_result(folder: Path, tally: Tally, name: str) -> None:
    subject = SUBJECTS[name](folder)
    inject(subject, edits(subject.path.read_bytes()), name, tally)


Content = dict[str, Any]


def progressed(**changes: Any) -> Callable[[Content], None]:
    return lambda content: content["progress"].update(changes)


def trained(**changes: Callable[[torch.Tensor], Any]) -> Callable[[Content], None]:
    """Change what the optimizer knows of each parameter."""

    def change(content: Content) -> None:
        for state in content["optimizer"]["state"].values():
            state.update({name: make(state[name]) for name, make in changes.items()})

    return change


def weighed(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[Content], None]:
    return lambda content: content["model"].update({name: make(content["model"][name])})


def grouped(**changes: Any) -> Callable[[Content], None]:
    return lambda content: [group.update(changes) for group in content["optimizer"]["param_groups"]] and None


def lacking(*way: str | int) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for key in way[:-1]:
            content = content[key]
        del content[way[-1]]

    return change


def overlapping(tensor: torch.Tensor) -> torch.Tensor:
    """As large as it says, but all of it at the last of its places; what writes one after the other runs out of it."""
    return torch.zeros(tensor.numel()).as_strided(tensor.shape, [0] * tensor.ndim, tensor.numel() - 1)


RECORD = {"epoch": 1, "lr": 0.1, "loss": 1.0, "task_loss": 1.0, "distill_loss": None}
EVALUATED = RECORD | {"epoch": 2, "top1": 50.0, "top5": 60.0}
ODD: dict[str, tuple[Callable[[Content], Any], str]] = {
    "no history": (progressed(history=None), "progress.history: "),
    "numbers for epochs": (progressed(history=[1, 2, 3]), "progress.history.0: found 1; allowed: keys with values"),
    "empty epochs": (progressed(history=[{}]), "progress.history.0.epoch: missing"),
    "a rate that is text": (progressed(history=[RECORD | {"lr": "x"}]), "progress.history.0.lr: found 'x'"),
    "an unknown key": (progressed(history=[RECORD | {"x": 1.0}]), "unknown key"),
    "the same epoch twice": (progressed(history=[RECORD, RECORD]), "its epochs are not counted from 1"),
    "an evaluation too few": (progressed(history=[RECORD, RECORD | {"epoch": 2}]), "evaluations of other epochs"),
    "an evaluation too many": (progressed(history=[EVALUATED | {"epoch": 1}]), "evaluations of other epochs"),
    "half an evaluation": (progressed(history=[RECORD, RECORD | {"epoch": 2, "top1": 1.0}]), "top1 without top5"),
    "an accuracy above all": (progressed(history=[RECORD, EVALUATED | {"top1": 101.0}]), "up to 100"),
    "more epochs than the run's": (
        progressed(history=[RECORD, EVALUATED, EVALUATED | {"epoch": 3}, EVALUATED | {"epoch": 4}], step=0, losses=[]),
        "4 epochs and 0 steps of a run of 3 epochs of 4 steps",
    ),
    "a step behind the last": (
        progressed(history=[RECORD, EVALUATED, EVALUATED | {"epoch": 3}]),
        "3 epochs and 1 steps of a run of 3 epochs of 4 steps",
    ),
    "more steps than an epoch's": (progressed(step=5, losses=[(1.0, None, 2)] * 5), "0 epochs and 5 steps of a run"),
    "a step below 0": (progressed(step=-1), "progress.step: found -1; allowed: 0 or above"),
    "half a step": (progressed(step=1.0), "progress.step: found 1.0; allowed: a whole number"),
    "a step that is text": (progressed(step="a"), "progress.step: found 'a'"),
    "a step without a loss": (progressed(losses=[]), "0 losses of 1 steps"),
    "a third of a loss": (progressed(losses=[(1,)]), "progress.losses.0"),
    "a loss that is NaN": (progressed(losses=[(math.nan, None, 8)]), "progress.losses.0.0: found nan"),
    "a loss of no images": (progressed(losses=[(1.0, None, 0)]), "progress.losses.0.2: found 0"),
    "a distillation loss": (progressed(losses=[(1.0, 2.0, 8)]), "distillation losses of another run"),
    "seconds that are text": (progressed(seconds="a"), "progress.seconds: found 'a'"),
    "infinite seconds": (progressed(earlier_seconds=math.inf), "progress.earlier_seconds: found inf"),
    "images below 0": (progressed(images=-5), "progress.images: found -5"),
    "an unknown part": (progressed(x=1), "progress.x: unknown key"),
    "no progress": (lacking("progress"), "progress: missing"),
    "an identity that is a tensor": (lambda content: content.update(identity=torch.zeros(3)), "not a run's checkpoint"),
    "no model": (lambda content: content.update(model=None), "model: found nothing"),
    "a weight less": (lacking("model", "head.weight"), "other parameters than the model's: head.weight"),
    "a weight that is a number": (weighed("head.weight", lambda _: 1.0), "model.head.weight: "),
    "a weight of another shape": (weighed("head.weight", lambda _: torch.zeros(1)), "head.weight is no dense"),
    "a weight that repeats a value": (
        weighed("head.weight", lambda weight: torch.zeros(1).expand(weight.shape)),
        "head.weight is no dense torch.float32 of shape [3, 16]",
    ),
    "a weight of whole numbers": (weighed("head.weight", lambda weight: weight.long()), "head.weight is no dense"),
    "a sparse weight": (
        weighed("head.weight", lambda weight: weight.to_sparse()),
        "it refers to torch._utils._rebuild_s",
    ),
    "a moment of another shape": (trained(exp_avg=lambda _: torch.zeros(1)), "exp_avg is no dense torch.float32"),
    "both moments of another shape": (
        trained(exp_avg=lambda _: torch.zeros(1), exp_avg_sq=lambda _: torch.zeros(1)),
        "exp_avg is no dense",
    ),
    "a moment that repeats a value": (
        trained(exp_avg_sq=lambda moment: torch.zeros(1).expand(moment.shape)),
        "exp_avg_sq is no dense",
    ),
    "a moment of whole numbers": (trained(exp_avg=lambda moment: moment.long()), "exp_avg is no dense"),
    "an empty count": (trained(step=lambda _: torch.zeros(0)), "step is no dense torch.float32 of shape []"),
    "a count that is none": (trained(step=lambda _: None), "optimizer.state.0.step: "),
    "an infinite count": (trained(step=lambda _: torch.tensor(math.inf)), "a number of steps of inf"),
    "a count below 0": (trained(step=lambda _: torch.tensor(-1.0)), "a number of steps of -1"),
    "a moment less": (lacking("optimizer", "state", 0, "exp_avg"), "an optimizer's state of exp_avg_sq, step, not"),
    "no moments": (lambda content: content["optimizer"].update(state={}), "an optimizer that has done no step"),
    "a rate of the optimizer's": (grouped(lr="x"), "optimizer.param_groups.0.lr: found 'x'"),
    "a group less": (lambda content: content["optimizer"]["param_groups"].pop(), "other parameters than the optimizer"),
    "other parameters": (grouped(params=[0, 0]), "other parameters than the optimizer's"),
}


@pytest.mark.parametrize(("change", "told"), ODD.values(), ids=ODD)
def test_a_checkpoint_that_no_run_has_written_is_refused(
    folder: Path, tally: Tally, change: Callable[[Content], Any], told: str
) -> None:
    """With sound bytes; fused AdamW would write into moments of any shape, and past their end."""
    subject = checkpoint(folder)
    rewrite(subject.path, change)
    with tally.fault("a checkpoint of a stranger's") as count:
        with pytest.raises(progress.CheckpointError) as refused:
            subject.read()
        text = one_line(refused.value)
        assert told in text
        count.compare(text.startswith(f"{subject.path}: damaged ("), True)


@pytest.mark.parametrize(
    "change",
    [
        grouped(weight_decay=99.0),
        grouped(maximize=True),
        grouped(betas=3),
        grouped(fused=None, foreach=True, amsgrad=True),
        lambda _: None,
    ],
)
def test_hyper_parameters_in_a_checkpoint_change_nothing(folder: Path, change: Callable[[Content], Any]) -> None:
    subject = checkpoint(folder)
    whole, options = subject.read(), fresh()[1].state_dict()["param_groups"]
    rewrite(subject.path, change)
    assert subject.read() == whole
    model, optimizer = fresh()
    progress.restore(subject.path, "a run", model, optimizer)
    assert optimizer.state_dict()["param_groups"] == options


def test_moments_that_share_memory_get_their_own(folder: Path) -> None:
    subject = checkpoint(folder)
    rewrite(subject.path, trained(exp_avg=overlapping, exp_avg_sq=overlapping))
    model, optimizer = fresh()
    progress.restore(subject.path, "a run", model, optimizer)
    for state in optimizer.state.values():
        assert state["exp_avg"].is_contiguous()
        assert len({state[name].untyped_storage().data_ptr() for name in progress.MOMENTS}) == 2
    model(torch.randn(2, 1, 16, 16)).sum().backward()
    optimizer.step()


def rewrite(path: Path, change: Callable[[Content], Any]) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("way", ["zero length", "cut off", "random bytes", "a page of zeros", "a link to nowhere"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=torture)])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("is_decoded", [True, False])
def test_an_image_that_cannot_be_read_is_named(
    folder: Path, tally: Tally, way: str, workers: int, split: str, is_decoded: bool
) -> None:
    path = write_pictures(folder / "set") / split / "class1/1.png"
    content = path.read_bytes()
    spoil = {
        "zero length": writes(b""),
        "cut off": writes(content[: len(content) // 2]),
        "random bytes": writes(random.Random(0).randbytes(200)),
        "a page of zeros": writes(content[:60] + bytes(len(content) - 60)),
        "a link to nowhere": lead_nowhere,
    }
    spoil[way](path)
    of = dataset("unused", npz=None, folder="set", train_size=None, test_size=None)
    options = {"data_root": folder, "decoded_folder": folder / "decoded" if is_decoded else None, "workers": workers}
    with tally.fault("a damaged image") as count:
        with pytest.raises(UserError) as told:
            train(spec("unused", dataset=of), folder / "run", sources_folder=folder, **options)
        count.compare(one_line(told.value).startswith(f"{path}: cannot be read as an image: "), True)


def write_pictures(folder: Path) -> Path:
    """Two images of each class, of different sizes, in both splits."""
    images, labels = arrays(2 * CLASSES, side=40)
    for split in ("train", "val"):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(image[: 20 + number]).save(place / f"{number}.png")
    return folder


@pytest.mark.parametrize("flips", [25, pytest.param(1000, marks=torture)])
def test_a_damaged_spec_is_refused_or_another_runs(folder: Path, tally: Tally, flips: int) -> None:
    """A person may edit it, to run something else by hand; but nothing takes that for the run of the configuration."""
    path = folder / "spec.json"
    path.write_text(MINI.to_json() + "\n")
    kept, content = Kept(folder), path.read_bytes()
    for _, damage in (*damages(content, flips), *edits(content)):
        with tally.fault("damage to spec.json") as count:
            damage(path)
            try:
                found = _read(RunSpec, str(path))
            except UserError as error:
                told = one_line(error)
            else:
                told = str(path) if found == MINI else refusal(folder, found)
            count.compare(str(path) in told, True)
        kept.restore()


def refusal(folder: Path, other: RunSpec) -> str:
    """What is said of another run's metrics in the place of this one's."""
    write_sealed(folder / "metrics.json", metrics(other, 50.0))
    with pytest.raises(results.ResultsError, match="other settings") as refused:
        results.collect([folder / "metrics.json"], {MINI.name: MINI})
    return one_line(refused.value).replace("metrics.json", "spec.json")


def inject(subject: Subject, ways: Iterator[Damage], name: str, tally: Tally) -> None:
    """Damage it in each way, read it, and bring it back."""
    kept, whole = Kept(subject.path.parent), subject.read()
    for way, damage in ways:
        with tally.fault(f"damage to {name}") as count:
            damage(subject.path)
            found = subject.outcome()
            if found is not None:
                count.compare(found, whole)
            elif subject.is_made_again:
                pytest.fail(f"{name}: {way}: refused, not made again")
        kept.restore()
    assert subject.read() == whole
