"""Runs that never ran: metrics files and frames with made-up accuracies."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from linvit.config import Distill, load_study
from linvit.grid import Evaluation, RunSpec, expand
from linvit.results import DTYPES, OOD_DTYPES, collect

CONFIG = Path(__file__).parents[1] / "config.yaml"
PARAMETERS = {"mini": 200_000, "tiny": 5_700_000, "small": 22_000_000, "base": 86_600_000}
GAINS = {"random": 0.0, "mimetic": 1.0, "impulse": 0.4, "copy": 0.2, "mlpcopy": 4.0, "fullcopy": 4.5, "pretrained": 6.0}
SHIFTS = {"elu": -1.0, "relu": -2.0, "inline": 0.0, "mhla": 0.5, "ttt": 1.0, "softmax": 2.0}


def metrics(spec: RunSpec, score: float, **changes) -> dict:
    """A complete metrics file's content; `changes` replace keys."""
    epochs = spec.recipe.epochs if spec.init.train else 0
    history = [{"epoch": epoch, "lr": 1e-3, "loss": 1.0, "task_loss": 1.0} for epoch in range(1, epochs + 1)]
    for record in history:  # accuracy rises in proportion
        if record["epoch"] % spec.recipe.eval_every == 0 or record["epoch"] == epochs:
            record |= {"top1": score * record["epoch"] / epochs, "top5": 99.0}
    return {
        "name": spec.name,
        "spec": json.loads(spec.to_json()),
        "top1": score,
        "top5": 99.0,
        "best": {"epoch": epochs, "top1": score + 0.25, "top5": 99.0},
        "history": history,
        "parameters": PARAMETERS.get(spec.size.name, 1),
        "flops": 1_000_000,
        "train_images_per_second": 100.0 if history else None,
        "eval_images_per_second": 200.0,
        "wall_seconds": 12.5,
        "peak_memory_bytes": 10_000_000,
        "versions": {"torch": "2.0"},
        "commit": "abc",
    } | changes


def write_metrics(folder: Path, spec: RunSpec, score: float, **changes) -> Path:
    path = folder / spec.name / "metrics.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics(spec, score, **changes)), encoding="utf-8")
    return path


def write_evaluation(folder: Path, evaluation: Evaluation, score: float) -> None:
    """A file of `linvit evaluate`, for a run out of distribution."""
    path = folder / f"{evaluation.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    of_what = json.loads(evaluation.model_dump_json(exclude_defaults=True))
    path.write_text(json.dumps({**of_what, "images": 100, "top1": score, "top5": 99.0, "commit": "abc"}))


def plausible(spec: RunSpec) -> float:
    """An accuracy with the paper's pattern, a data set's level and scale, a size's gain and a seed's noise."""
    letters = sum(map(ord, spec.dataset.name))
    level = 60 + letters % 20 + 2 * list(PARAMETERS).index(spec.size.name)
    gain = GAINS.get(spec.init.name.split("-")[0], 0.3)
    if spec.init.distill:
        gain += 2.0 - 0.35 * gain - _off_peak(spec.init.distill, spec.variant.name)
    noise = (spec.stream("fake", spec.dataset.name, spec.variant.name, spec.init.name) % 1000) / 1000 - 0.5
    return round(min(level + (0.5 + letters % 3) * (SHIFTS[spec.variant.name] + gain) + 0.8 * noise, 99.0), 2)


def _off_peak(distill: Distill, variant: str) -> float:
    """What a weight far from the best costs; maps are no match for an operator whose own are signed."""
    best = {"output": 50.0, "map": 3e4, "map-cross_entropy": 3.0, "heads": 100.0, "output-l2": 10.0}[distill.loss]
    signed = distill.target == "map" and variant == "inline"
    return 0.4 * abs(math.log10(distill.weight / best)) + (0.8 if signed else 0.0)


def grid_runs(folder: Path, grid: str, top1: Callable[[RunSpec], float] = plausible) -> pd.DataFrame:
    """The frame of a whole grid of the repository's configuration."""
    specs = expand(load_study(CONFIG), grid).values()
    return collect([write_metrics(folder, spec, top1(spec)) for spec in specs])


def run(like: str = "random", top1: float = 80.0, seed: int = 0, variant: str = "relu", **changes) -> dict:
    """One row of a runs frame, with start and distillation as in the init it is like; `changes` replace columns."""
    start, distill = like.removesuffix("-distill"), like.endswith("-distill")
    sourceless = like in ("random", "mimetic", "impulse")
    row = {
        "dataset": "pets",
        "size": "tiny",
        "variant": variant,
        "init": like,
        "start": start,
        "distill": distill,
        "distill_target": "output" if distill else None,
        "distill_weight": 50.0 if distill else None,
        "source": "none" if sourceless else "deit",
        "recipe": "transfer",
        "seed": seed,
        "top1": top1,
        "top5": 99.0,
        "best_top1": top1,
        "best_epoch": 1,
        "epochs": 1,
        "flops": 1,
        "train_images_per_second": 1.0,
        "eval_images_per_second": 1.0,
        "wall_seconds": 1.0,
        "peak_memory_bytes": 1,
        "commit": None,
    } | changes
    name = "/".join(str(row[key]) for key in ("dataset", "size", "variant", "init", "source"))
    return {"run": f"{name}/seed{row['seed']}", "parameters": PARAMETERS[row["size"]], **row}


def pairs_of(a: str, b: str, differences: Iterable[float], base: float = 70.0, **changes) -> list[dict]:
    """Runs of two inits, one pair a seed, whose differences in top-1 are as given."""
    rows = [(run(a, base + d, seed, **changes), run(b, base, seed, **changes)) for seed, d in enumerate(differences)]
    return [row for pair in rows for row in pair]


def ood_frame(rows: Iterable[dict]) -> pd.DataFrame:
    """Runs of a frame as out-of-distribution results, which hold less."""
    return pd.DataFrame(rows, columns=[column for column in OOD_DTYPES if column != "images"])


def frame(rows: Iterable[dict]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(DTYPES)).astype(DTYPES)
