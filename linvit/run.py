"""One run, from its spec to its metrics: source, initialise, fit, evaluate. The whole study on one page."""

import json
import logging
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from timm.models.vision_transformer import VisionTransformer

from linvit import __version__, data, datasets, sources
from linvit.config import UserError, reason_of
from linvit.device import peak_memory_bytes, pick_device
from linvit.distill import AttentionDistillation
from linvit.evaluate import count_flops, count_parameters, evaluate, images_per_second
from linvit.files import replacing, write_text
from linvit.fit import Progress, fit
from linvit.grid import RunSpec, Source
from linvit.init import CopyWeights, initialize
from linvit.init.copy import BACKBONE
from linvit.vit import build_vit

log = logging.getLogger(__name__)

PACKAGES = ("torch", "torchvision", "timm", "numpy")
MODEL = "model.safetensors"


class ModelError(UserError):
    """A run's trained model that is missing or damaged."""


def train(
    spec: RunSpec,
    folder: Path,
    *,
    sources_folder: Path,
    data_root: Path,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict:
    """Carry out one run in its folder and return its metrics.

    The folder gets `spec.json` first, `checkpoint.pt` while training, then `model.safetensors` and, last,
    `metrics.json`. A run that was interrupted, or that `stop` ended after one of its steps, goes on from its
    checkpoint.
    """
    start, commit = time.perf_counter(), git_commit()
    device = pick_device()
    options = {"device": device, "workers": workers}
    write_text(folder / "spec.json", spec.to_json() + "\n")
    train_data = datasets.read(spec.dataset, "train", data_root) if spec.init.train else None
    test_data = datasets.read(spec.dataset, "test", data_root)
    weights = load_weights(spec.source, sources_folder) if spec.source else None
    student = build_student(spec, weights).to(device)
    test = data.evaluation_batches(test_data, spec.dataset, spec.recipe, spec.size, **options)

    def evaluated() -> dict[str, float]:
        return evaluate(student, test, spec.recipe.precision)

    if spec.init.train:
        progress = fit(
            student,
            data.training_batches(train_data, spec.dataset, spec.recipe, spec.size, spec.stream, **options),
            spec.recipe,
            spec.stream,
            num_classes=spec.dataset.classes,
            auxiliary=build_distillation(spec, weights, student),
            evaluate=evaluated,
            checkpoint=folder / "checkpoint.pt",
            identity=spec.to_json(),
            stop=stop,
        )
        accuracy = progress.history[-1]
    else:
        progress, accuracy = Progress(), evaluated()
    save_model(student, spec, folder / MODEL)
    metrics = results_of(spec, student, progress, accuracy) | {
        "wall_seconds": time.perf_counter() - start + progress.earlier_seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "commit": commit,
    }
    write_text(folder / "metrics.json", json.dumps(metrics, indent=1) + "\n")
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return metrics


def results_of(spec: RunSpec, student: VisionTransformer, progress: Progress, accuracy: dict[str, float]) -> dict:
    """What a run found: its accuracy, in percent, how it got there, and what the model costs."""
    return {
        "name": spec.name,
        "spec": json.loads(spec.to_json()),
        "top1": accuracy["top1"],
        "top5": accuracy["top5"],
        "best": best_of(progress.history),
        "history": progress.history,
        "parameters": count_parameters(student),
        "flops": count_flops(student, spec.size),
        "train_images_per_second": progress.images / progress.seconds if progress.seconds else None,
        "eval_images_per_second": images_per_second(student, spec.size),
    }


def load_weights(source: Source, sources_folder: Path) -> sources.Weights:
    """A prepared source's weights; those that can be fetched are fetched again where only the manifest is left."""
    folder = sources_folder / source.folder
    if (folder / sources.MANIFEST).exists() and not (folder / sources.WEIGHTS).exists() and source.train is None:
        log.info("fetching %s again", source.folder)
        sources.fetch(source, folder)
    return sources.load(folder)


def build_student(spec: RunSpec, weights: sources.Weights | None) -> VisionTransformer:
    """The model a run starts from: a random one by the run's seed, then its initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.stream("model"))
        student = build_vit(spec.size, spec.variant, num_classes=spec.dataset.classes, drop_path=spec.recipe.drop_path)
    return initialize(student, spec.init, weights, spec.stream("analytic"))


def build_distillation(
    spec: RunSpec, weights: sources.Weights | None, student: VisionTransformer
) -> AttentionDistillation | None:
    """The run's auxiliary loss, with the source as the teacher, on the student's device."""
    if spec.init.distill is None:
        return None
    teacher = build_vit(spec.size, num_classes=0)
    CopyWeights(weights, BACKBONE)(teacher)
    return AttentionDistillation(teacher.to(student.head.weight.device), student, spec.init.distill)


def prepare_source(source: Source, folder: Path, **options) -> dict:
    """Bring a source into its folder, training it first if the pipeline makes it, and return its manifest.

    The options are those of `train`.
    """
    if source.train is None:
        return sources.fetch(source, folder)
    metrics = train(source.train, folder / "run", sources_folder=folder, **options)
    origin = {key: metrics[key] for key in ("spec", "top1", "commit", "versions")}
    return sources.store(sources.read_checkpoint(folder / "run" / MODEL), source, folder, origin)


def save_model(model: VisionTransformer, spec: RunSpec, path: Path) -> None:
    """The trained parameters as safetensors, with the spec in the file's metadata."""
    with replacing(path) as temporary:
        temporary.write_bytes(sources.to_safetensors(model.state_dict(), {"spec": spec.to_json()}))


def load_model(path: Path) -> tuple[RunSpec, VisionTransformer]:
    """What `save_model` wrote: the spec that the model was trained by, and the model on the CPU.

    Raises:
        ModelError: the file is missing or damaged, or the operator's code has changed its parameters since.
    """
    if not path.is_file():
        raise ModelError(f"{path}: not found; delete metrics.json beside it, and Snakemake trains the run again")
    try:
        with safe_open(path, "pt") as file:
            spec = RunSpec.from_json(file.metadata()["spec"])
        model = build_vit(spec.size, spec.variant, num_classes=spec.dataset.classes)
        model.load_state_dict(sources.read_checkpoint(path))
    except (SafetensorError, OSError, TypeError, KeyError, ValidationError, RuntimeError) as error:
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ModelError(f"{path}: not a trained model that this code can read: {reason}") from error
    return spec, model


def versions() -> dict[str, str]:
    """Of Python, this package and those that the numbers depend on."""
    return {"python": platform.python_version(), "linvit": __version__} | {name: version(name) for name in PACKAGES}


def best_of(history: list[dict]) -> dict | None:
    """The evaluated epoch of highest top-1, the first of equals; chosen on the test set, so never reported as top-1."""
    evaluated = [record for record in history if "top1" in record]
    if not evaluated:
        return None
    best = max(evaluated, key=lambda record: record["top1"])
    return {key: best[key] for key in ("epoch", "top1", "top5")}


def git_commit() -> str | None:
    """The commit this code is at, marked where files differ from it; None outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() or None
