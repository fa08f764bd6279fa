"""One run, from its spec to its metrics: source, initialise, fit, evaluate. The whole study on one page."""

import json
import logging
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from linvit import __version__, data, decoded, sources
from linvit.align import align
from linvit.config import Size
from linvit.data import Stream
from linvit.device import name_of, peak_memory_bytes, pick_device, precision_on
from linvit.distill import AttentionDistillation
from linvit.evaluate import count_flops, count_parameters, evaluate, images_per_second
from linvit.events import Events
from linvit.files import write_sealed, write_text
from linvit.fit import fit
from linvit.grid import RunSpec, Source
from linvit.init import CopyWeights, initialize
from linvit.init.copy import BACKBONE
from linvit.progress import Progress
from linvit.ranks import Ranks
from linvit.trained import MODEL, save_model
from linvit.vit import build_vit
from linvit.watch import Journal, Terminal, View, Watch

log = logging.getLogger(__name__)

CHECKPOINT, ALIGNED = "checkpoint.pt", "checkpoint.align.pt"
PACKAGES = ("torch", "torchvision", "timm", "numpy")


def train(
    spec: RunSpec,
    folder: Path,
    *,
    sources_folder: Path,
    data_root: Path,
    decoded_folder: Path | None = None,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    ranks: Ranks = Ranks(),
) -> dict:
    """Carry out one run in its folder and return its metrics.

    The folder gets `spec.json` first, `checkpoint.pt` while training, then `model.safetensors` and, last,
    `metrics.json`, all by the first rank. A run that was interrupted, or that `stop` ended after one of its steps,
    goes on from its checkpoint. Small data sets are mapped from their decoded pixels in `decoded_folder`, which are
    made there if need be; without it, each run reads its own. Until there are metrics, `progress.json` tells how far
    the run is, or why it ended before its time. With `tensorboard`, event files stay beside them; metrics are the same.
    """
    if ranks.first:
        write_text(folder / "spec.json", spec.to_json() + "\n")
    with Watch(*views_of(folder, tensorboard, ranks)) as watch:
        options: dict[str, Any] = {"decoded_folder": decoded_folder, "workers": workers, "stop": stop, "ranks": ranks}
        return _train(spec, folder, watch, sources_folder=sources_folder, data_root=data_root, **options)


def _train(
    spec: RunSpec,
    folder: Path,
    watch: Watch,
    *,
    sources_folder: Path,
    data_root: Path,
    decoded_folder: Path | None,
    workers: int,
    stop: Callable[[], bool],
    ranks: Ranks,
) -> dict:
    start, commit = time.perf_counter(), git_commit()
    device = pick_device()
    options: dict[str, Any] = {"device": device, "workers": workers, "ranks": ranks}
    weights = load_weights(spec.source, sources_folder, ranks) if spec.source else None  # before images are decoded
    train_data = decoded.read(spec.dataset, "train", data_root, decoded_folder, ranks) if spec.init.train else None
    test_data = decoded.read(spec.dataset, "test", data_root, decoded_folder, ranks)
    warn_of_other_statistics(spec, weights)
    student = build_student(spec, weights).to(device)
    test = data.evaluation_batches(test_data, spec.dataset, spec.recipe, spec.size, **options)

    evaluated = partial(evaluate, student, test, spec.recipe.precision, ranks)

    def stage(stream: Stream, checkpoint: str, part: Watch) -> dict:
        """What both stages of training have, each with random numbers and a checkpoint of its own."""
        return {
            "batches": data.training_batches(train_data, spec.dataset, spec.recipe, spec.size, stream, **options),
            "recipe": spec.recipe,
            "stream": stream,
            "num_classes": spec.dataset.classes,
            "checkpoint": folder / checkpoint,
            "identity": identity_on(device, spec),
            "stop": stop,
            "watch": part,
            "ranks": ranks,
        }

    progress, aligned, passes, begin = Progress(), Progress(), spec.recipe.passes, time.perf_counter()
    if spec.init.train:
        if spec.recipe.align:
            part = watch.part(0, passes, stage="alignment")
            alone = stage(partial(spec.stream, "align"), ALIGNED, part)
            aligned = align(build_teacher(spec.size, weights).to(device), student, spec.recipe.align, **alone)
        part = watch.part(aligned.epochs, passes, time.perf_counter() - begin + aligned.earlier_seconds)
        main = stage(spec.stream, CHECKPOINT, part)
        main |= {"auxiliary": build_distillation(spec, weights, student), "evaluate": partial(evaluated, stop)}
        progress = fit(student, **main)
    accuracy = progress.history[-1] if progress.history else evaluated()
    metrics = results_of(spec, student, progress, accuracy, aligned) | {
        "wall_seconds": time.perf_counter() - start + aligned.earlier_seconds + progress.earlier_seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
        "device": name_of(device),
        "precision": precision_on(device, spec.recipe.precision),
        "ranks": ranks.size,
        "versions": versions(),
        "commit": commit,
    }
    if ranks.first:
        save_model(student, spec, folder / MODEL)
        write_sealed(folder / "metrics.json", metrics)
    if ranks.first and not stop():  # whoever asks it to stop may not hear of its end, and start it again
        # Its own alone: a run of other settings may come back for those that were set aside.
        for checkpoint in (*checkpoints_in(folder, spec), *folder.glob(".checkpoint.*")):
            checkpoint.unlink(missing_ok=True)
    return metrics


def views_of(folder: Path, tensorboard: bool, ranks: Ranks) -> list[View]:
    """Who looks on at a run; at ranks other than the first, nobody."""
    if not ranks.first:
        return []
    return [Terminal(), Journal(folder), *([Events(folder)] if tensorboard else [])]


def checkpoints_in(folder: Path, spec: RunSpec) -> list[Path]:
    """The last one of each stage of a run's training."""
    names = [CHECKPOINT, *([ALIGNED] if spec.recipe.align else [])]
    return [folder / name for name in names] if spec.init.train else []


def identity_on(device: torch.device, spec: RunSpec) -> str:
    """What a checkpoint belongs to: a run does not go on in another precision than it began in."""
    precision = precision_on(device, spec.recipe.precision)
    return spec.to_json() if precision in (spec.recipe.precision, "float32") else f"{spec.to_json()} {precision}"


def results_of(
    spec: RunSpec, student: VisionTransformer, progress: Progress, accuracy: dict[str, float], aligned: Progress
) -> dict:
    """What a run found: its accuracy, in percent, how it got there, and what the model costs."""
    return {
        "name": spec.name,
        "spec": json.loads(spec.to_json()),
        "top1": accuracy["top1"],
        "top5": accuracy["top5"],
        "best": best_of(progress.history),
        **({"alignment": aligned.history} if aligned.history else {}),
        "history": progress.history,
        "parameters": count_parameters(student),
        "flops": count_flops(student, spec.size),
        "train_images_per_second": progress.images / progress.seconds if progress.seconds else None,
        "eval_images_per_second": images_per_second(student, spec.size),
    }


def load_weights(source: Source, sources_folder: Path, ranks: Ranks = Ranks()) -> sources.Weights:
    """A prepared source's weights; those that can be fetched are fetched again where only the manifest is left."""
    folder = sources_folder / source.folder
    lost = (folder / sources.MANIFEST).exists() and not (folder / sources.WEIGHTS).exists() and source.train is None
    if lost and ranks.first:
        log.info("fetching %s again", source.folder)
        sources.fetch(source, folder)
    ranks.wait()
    return sources.load(folder)


def warn_of_other_statistics(spec: RunSpec, weights: sources.Weights | None) -> None:
    """A source that sees images normalised otherwise than in its training is not quite the model it was."""
    given = (spec.dataset.mean, spec.dataset.std)
    if weights and weights.statistics and weights.statistics != given:
        log.warning(
            "source %s was trained on images of (mean, std) %s, but those of %s are normalised by %s",
            spec.source.folder,
            weights.statistics,
            spec.dataset.name,
            given,
        )


def build_student(spec: RunSpec, weights: sources.Weights | None) -> VisionTransformer:
    """The model a run starts from: a random one by the run's seed, then its initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.stream("model"))
        student = build_vit(spec.size, spec.variant, num_classes=spec.dataset.classes, drop_path=spec.recipe.drop_path)
    return initialize(student, weights, spec.init, seed=spec.stream("analytic"))


def build_distillation(
    spec: RunSpec, weights: sources.Weights | None, student: VisionTransformer
) -> AttentionDistillation | None:
    """The run's auxiliary loss, with the source as the teacher, on the student's device."""
    if spec.init.distill is None:
        return None
    teacher = build_teacher(spec.size, weights)
    return AttentionDistillation.from_settings(teacher.to(student.head.weight.device), student, spec.init.distill)


def build_teacher(size: Size, weights: sources.Weights) -> VisionTransformer:
    """The source without its head."""
    teacher = build_vit(size, num_classes=0)
    CopyWeights(weights, BACKBONE)(teacher)
    return teacher


def prepare_source(source: Source, folder: Path, *, ranks: Ranks = Ranks(), **options: Any) -> None:
    """Bring a source into its folder, training it first if the pipeline makes it.

    The options are those of `train`.
    """
    if source.train is None:
        if ranks.first:
            sources.fetch(source, folder)
        return
    metrics = train(source.train, folder / "run", sources_folder=folder, ranks=ranks, **options)
    if ranks.first:
        origin = {key: metrics[key] for key in ("spec", "top1", "commit", "versions")}
        sources.store(load_file(folder / "run" / MODEL), source, folder, origin)


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
    """The commit this code is at, marked where the package's files differ from it; None outside of a repository.

    A changed config.yaml is no other code: a run's spec tells it.
    """
    package = str(Path(__file__).parent)
    try:
        commit = _git(package, "describe", "--always", "--abbrev=12").stdout.strip()
        changed = _git(package, "diff", "--quiet", "HEAD", "--", package).returncode
    except FileNotFoundError:  # no git on this machine
        return None
    return commit + ("-dirty" if changed else "") if commit else None


def _git(folder: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=False)  # noqa: S603, S607
