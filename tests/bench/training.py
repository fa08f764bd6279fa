"""The training step beside a bare loop on the same model: real batches, a teacher, and ways to compute.

The bare loop has its batches in memory, and does nothing but forward, backward and step. All else is ours: `fit.Loop`
with the set's own batches, order, augmentation, schedule, clipping and losses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from timing import circumstances, described, interleaved, write

from linvit import datasets
from linvit.config import Recipe, load_study
from linvit.data import Batches, training_batches
from linvit.datasets import Images
from linvit.device import pick_device
from linvit.distill import AttentionDistillation
from linvit.fit import Loop, adamw, mixing, trainable
from linvit.grid import RunSpec, expand
from linvit.progress import Progress
from linvit.vit import build_vit

CONFIG = Path(__file__).parents[2] / "config.yaml"
STUDY = load_study(CONFIG)
DATA_BAR, DISTILLED_BAR = 0.95, 1.4
WAYS = {
    "bfloat16": {"precision": "bfloat16"},
    "compile": {"compile": True},
    "grad_checkpointing": {"grad_checkpointing": True},
}

NOTES = """
Real batches: images per second of the loop over the set itself, divided by those of the bare loop. "Batches alone" is
the time to make them without training, as a part of the bare loop's: on a CPU it adds to the step's, and is what bounds
the ratio; clipping, schedule and losses are the rest.

Distilled: seconds of a step with a teacher, divided by those without (a forward pass more is 1.33). Ways: seconds of a
step, divided by those of the plain float32 one. A ViT has one convolution, so that runs have no use for channels_last.
"""


@dataclass(frozen=True)
class Case:
    """A model and a set: a run, its training images, and how many of them a batch and a round have."""

    name: str
    run: RunSpec
    images: Images
    batch_size: int

    @property
    def recipe(self) -> Recipe:
        changes = {"batch_size": self.batch_size, "micro_batch_size": None, "precision": "float32"}
        return self.run.recipe.model_copy(update=changes)

    def model(self, device: torch.device, variant: str | None = None) -> VisionTransformer:
        chosen = STUDY.variants[variant] if variant else self.run.variant
        torch.manual_seed(0)
        return build_vit(self.run.size, chosen, num_classes=self.run.dataset.classes).to(device).train()

    def batches(self, recipe: Recipe, device: torch.device) -> Batches:
        run = self.run
        return training_batches(self.images, run.dataset, recipe, run.size, run.stream, device=device)

    def loop(
        self,
        model: VisionTransformer,
        device: torch.device,
        auxiliary: Callable[[Tensor], Tensor] | None = None,
        **changes: Any,
    ) -> Loop:
        """Ours, by the recipe with some changes."""
        recipe = self.recipe.model_copy(update=changes)
        optimizer, mix = adamw(model, recipe), mixing(recipe, self.run.dataset.classes)
        batches = self.batches(recipe, device)
        return Loop(trainable(model, recipe), batches, recipe, self.run.stream, optimizer, mix, auxiliary)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The embedded set on the small ViT; images of CIFAR's size on ViT-Ti at 224 pixels."""
    run = next(run for run in expand(STUDY, "mini").values() if run.variant.name == "relu")
    images = datasets.read(run.dataset, "train", Path("data"))
    yield Case("embedded set, ViT-mini at 32", run, images, run.recipe.batch_size)
    if quick:
        return
    large = device.type == "cuda"
    runs = expand(STUDY, "paper").values()
    run = next(r for r in runs if (r.dataset.name, r.size.name, r.variant.name) == ("cifar10", "tiny", "relu"))
    n, batch_size = (8192, 512) if large else (64, 16)
    made_up = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    yield Case("32-pixel images, ViT-Ti at 224", run, Images(made_up, torch.arange(n) % 10), batch_size)


def bare_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def with_real_batches(case: Case, device: torch.device, repeats: int) -> dict[str, float]:
    """One epoch: seconds of the bare loop, of ours, and of making its batches alone."""
    model = case.model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    held = list(case.batches(case.recipe, device).epoch(1))
    loop = case.loop(case.model(device), device)

    def bare() -> None:
        for images, labels in held:
            bare_step(model, optimizer, images, labels)

    calls = {
        "bare": bare,
        "ours": lambda: loop.epoch(Progress(), lambda *_: None, lambda: False),
        "batches": lambda: list(loop.batches.epoch(1)),
    }
    return interleaved(calls, device, repeats=repeats)


def distilled(case: Case, variant: str, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds of the same student's step, without and with a teacher."""
    plain, student = case.model(device, variant), case.model(device, variant)
    teacher = build_vit(case.run.size, num_classes=0).to(device)
    distillation = AttentionDistillation(teacher, student, weight=50.0)
    steps = {
        "plain": stepping(case, case.loop(plain, device)),
        "distilled": stepping(case, case.loop(student, device, distillation)),
    }
    return interleaved(steps, device, repeats=repeats)


def ways(case: Case, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds of a step as it is and in each other way to compute it."""
    steps = {"plain": stepping(case, case.loop(case.model(device), device))}
    steps |= {name: stepping(case, case.loop(case.model(device), device, **way)) for name, way in WAYS.items()}
    channels_last = case.model(device).to(memory_format=torch.channels_last)
    steps["channels_last"] = stepping(case, case.loop(channels_last, device), torch.channels_last)
    return interleaved(steps, device, repeats=repeats, warmup=2)


def stepping(case: Case, loop: Loop, memory_format: torch.memory_format = torch.contiguous_format) -> Callable:
    """One step of the loop a call, always on the same images."""
    device = next(loop.model.parameters()).device
    images, labels = next(case.batches(case.recipe, device).epoch(1))
    images, steps = images.contiguous(memory_format=memory_format), cycle(range(len(loop.batches)))
    return lambda: loop.step(1, next(steps), images, labels)


def measure(device: torch.device, quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by part, case and call."""
    found: dict[str, dict[str, dict[str, float]]] = {"data": {}, "distilled": {}, "ways": {}}
    for case in cases(device, quick):
        small = case.run.size.name == "mini"
        repeats = 9 if small else 3
        print(case.name, flush=True)
        found["data"][case.name] = with_real_batches(case, device, repeats)
        for variant in STUDY.variants if small else ("softmax", "relu"):
            found["distilled"][f"{case.name}: {variant}"] = distilled(case, variant, device, repeats)
        found["ways"][case.name] = ways(case, device, repeats)
    return found


def ratios(found: dict) -> dict[str, dict[str, Any]]:
    """Those of the page: by part and case."""
    return {
        "data": {
            name: {"ours": s["bare"] / s["ours"], "batches alone": s["batches"] / s["bare"]}
            for name, s in found["data"].items()
        },
        "distilled": {name: s["distilled"] / s["plain"] for name, s in found["distilled"].items()},
        "ways": {
            name: {way: seconds / s["plain"] for way, seconds in s.items() if way != "plain"}
            for name, s in found["ways"].items()
        },
    }


def goals(of: dict) -> dict[str, bool]:
    """Goal -> whether it is met, for each case that was measured."""
    data = {
        f"{name}: real batches at {DATA_BAR} of the bare loop's images per second or more": s["ours"] >= DATA_BAR
        for name, s in of["data"].items()
    }
    return data | {
        f"{name}: a distilled step at {DISTILLED_BAR} times the plain one's or less": ratio <= DISTILLED_BAR
        for name, ratio in of["distilled"].items()
    }


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    of = results["ratios"]
    names = list(of["data"])
    data = [[name, f"{of['data'][name]['ours']:.2f}", f"{of['data'][name]['batches alone']:.3f}"] for name in names]
    teacher = [[name, f"{ratio:.2f}"] for name, ratio in of["distilled"].items()]
    by_way = [[name, *(f"{ratio:.2f}" for ratio in row.values())] for name, row in of["ways"].items()]
    options = {"tablefmt": "github", "disable_numparse": True}
    return "\n".join(
        [
            "# The training step\n",
            tabulate(data, ["real batches", "images/s ÷ bare loop", "batches alone"], **options),
            "",
            tabulate(teacher, ["student", "distilled ÷ plain"], **options),
            "",
            tabulate(by_way, ["step ÷ plain float32", *next(iter(of["ways"].values()))], **options),
            NOTES,
            *(f"- {goal}: {'met' if met else 'NOT met'}" for goal, met in results["goals"].items()),
            f"\n{described(results['circumstances'])}\n",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the training step beside a bare loop.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch, as runs have (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the embedded set alone")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for the results (%(default)s)")
    told = parser.parse_args(arguments)
    torch.set_num_threads(told.threads)
    device = pick_device()
    where = circumstances(device)
    seconds = measure(device, told.quick)
    found = ratios(seconds)
    results = {"circumstances": where, "seconds": seconds, "ratios": found, "goals": goals(found)}
    write(told.out, "training", results, page(results))
    print((told.out / "training.md").read_text())


if __name__ == "__main__":
    main()
