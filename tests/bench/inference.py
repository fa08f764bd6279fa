"""Whole ViTs of every variant against Softmax, by resolution: seconds an image, one at a time and in batches.

The variants are those of `config.yaml`. At each resolution all of them took turns in one process; a variant goes no
further once one of its forward passes has taken longer than the limit, or found no memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from curves import draw
from matplotlib import rc_context
from matplotlib.figure import Figure
from operators import markdown
from timing import circumstances, described, interleaved, write

from linvit.config import Size, Study, load_study
from linvit.device import autocast, pick_device
from linvit.figures.style import STYLE, save
from linvit.vit import build_vit

CONFIG = Path(__file__).parents[2] / "config.yaml"
RESOLUTIONS = (224, 320, 448, 640, 896, 1280, 1792)
SOFTMAX = "softmax"
MODES = ("one image", "batched")


@dataclass(frozen=True)
class Row:
    """A variant at a resolution; seconds are of one image's share of a batch."""

    variant: str
    resolution: int
    tokens: int
    mode: str
    batch: int
    seconds: float
    softmax_seconds: float | None


def batch_of(resolution: int, device: torch.device) -> int:
    """Images in a batch: as many pixels at every resolution, up to one image that has more."""
    images = 256 if device.type == "cuda" else 16
    return max(1, round(images * 224**2 / resolution**2))


def forward_of(study: Study, size: Size, variant: str, batch: int, device: torch.device, precision: str) -> Callable:
    """A forward pass of a ViT with random weights over random images."""
    torch.manual_seed(0)
    vit = build_vit(size, study.variants[variant], num_classes=1000).to(device).eval()
    images = torch.randn(batch, size.channels, size.image_size, size.image_size, device=device)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        with autocast(device, precision):
            return vit(images)

    return forward


def measure(told: argparse.Namespace, study: Study, device: torch.device) -> tuple[list[Row], dict[str, str]]:
    """The rows, and why a variant went no further: variant -> reason."""
    rows, stopped = [], {}
    for resolution in told.resolutions:
        for mode in MODES:
            size = study.sizes[told.size].model_copy(update={"image_size": resolution})
            batch = 1 if mode == MODES[0] else batch_of(resolution, device)
            if mode == MODES[1] and batch == 1:
                continue  # that is one image at a time
            calls = {}
            for variant in [name for name in study.variants if name not in stopped]:
                call = forward_of(study, size, variant, batch, device, told.precision)
                if reason := too_slow(call, device, told.limit):
                    stopped[variant] = f"{resolution} px, {mode}: {reason}"
                else:
                    calls[variant] = call
            print(f"{resolution} px, {mode}: {', '.join(calls) or 'none'}", flush=True)
            seconds = interleaved(calls, device, repeats=told.repeats, warmup=0)
            softmax = seconds.get(SOFTMAX)
            shared = (resolution, (resolution // size.patch_size) ** 2, mode, batch)
            rows += [
                Row(variant, *shared, found / batch, None if softmax is None else softmax / batch)
                for variant, found in seconds.items()
            ]
    return rows, stopped


def too_slow(call: Callable[[], object], device: torch.device, limit: float) -> str | None:
    """Why a forward pass cannot be repeated, after one; it warms up the others."""
    try:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    except (torch.OutOfMemoryError, MemoryError):
        return "out of memory"
    except RuntimeError as error:  # what the CPU's allocator raises
        if "can't allocate memory" not in str(error):
            raise
        return "out of memory"
    return f"a forward pass took {seconds:.1f} s, the limit is {limit:g} s" if seconds > limit else None


def page(results: dict[str, Any], rows: list[Row]) -> str:
    """The results as Markdown."""
    size, precision = results["size"], results["precision"]
    stops = [f"- {variant} stops at {reason}" for variant, reason in results["stopped"].items()]
    return "\n\n".join(
        [
            f"# Inference: whole ViTs, {size}, {precision}",
            "![Seconds an image by resolution](inference.png)",
            *(
                part
                for mode in MODES
                if (of := [row for row in rows if row.mode == mode])
                for part in section(mode, of)
            ),
            "In brackets: divided by Softmax's (timm's, fused) in the same turns.",
            "\n".join(stops or ["No variant stopped before the largest resolution."]),
            described(results["circumstances"]) + "\n",
        ]
    )


def section(mode: str, rows: list[Row]) -> list[str]:
    """A mode's heading and table: a row a resolution, a column a variant."""
    headings = {MODES[0]: "## One image at a time: ms", MODES[1]: "## In batches: images a second"}
    variants = list(dict.fromkeys(row.variant for row in rows))
    cells = []
    for resolution in dict.fromkeys(row.resolution for row in rows):
        at = {row.variant: row for row in rows if row.resolution == resolution}
        any_of = next(iter(at.values()))
        who = [f"{resolution:,}", f"{any_of.tokens:,}", any_of.batch]
        cells.append([*who, *(cell(at[variant]) if variant in at else "–" for variant in variants)])
    return [headings[mode], markdown(cells, ["px", "tokens", "batch", *variants])]


def cell(row: Row) -> str:
    number = f"{1e3 * row.seconds:,.0f}" if row.mode == MODES[0] else f"{1 / row.seconds:,.2f}"
    if row.variant == SOFTMAX or row.softmax_seconds is None:
        return number
    ratio = row.seconds / row.softmax_seconds
    return f"{number} ({ratio if row.mode == MODES[0] else 1 / ratio:.2f})"


def figure(rows: list[Row], title: str) -> Figure:
    """Seconds an image by resolution, a panel a mode, a line a variant."""
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    with rc_context(STYLE):
        drawn = Figure(figsize=(1 + 3 * len(modes), 3.2), layout="constrained")
        panels = drawn.subplots(1, len(modes), sharey=True, squeeze=False)[0]
        for ax, mode in zip(panels, modes, strict=True):
            curves: dict[str, dict[float, float]] = {}
            for row in (row for row in rows if row.mode == mode):
                curves.setdefault(row.variant, {})[row.resolution] = row.seconds
            draw(ax, curves, sorted({row.resolution for row in rows if row.mode == mode}))
            ax.set(title=mode.capitalize(), xlabel="resolution (px)")
        panels[0].set_ylabel("seconds per image")
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
        drawn.supxlabel(title, fontsize=6.5)
    return drawn


def main(arguments: list[str] | None = None) -> None:
    study, device = load_study(CONFIG), pick_device()
    parser = argparse.ArgumentParser(description="Measure whole ViTs at inference on this device.")
    parser.add_argument(
        "--size", choices=study.sizes, default="small" if device.type == "cuda" else "tiny", help="(%(default)s)"
    )
    parser.add_argument("--resolutions", type=int, nargs="+", default=list(RESOLUTIONS), help="in pixels (%(default)s)")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default="bfloat16" if device.type == "cuda" else "float32",
        help="(%(default)s)",
    )
    parser.add_argument("--limit", type=float, default=15.0, help="seconds of a forward pass (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of which a median is (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the two smallest resolutions, one turn: a minute")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for the results (%(default)s)")
    told = parser.parse_args(arguments)
    if told.quick:
        told.resolutions, told.repeats = told.resolutions[:2], 1
    found = circumstances(device)
    rows, stopped = measure(told, study, device)
    results = {"circumstances": found, "size": told.size, "precision": told.precision, "stopped": stopped}
    results["rows"] = [asdict(row) for row in rows]
    write(told.out, "inference", results, page(results, rows))
    drawn = figure(rows, f"ViT, {told.size}, {told.precision}; {found['device']}, threads: {found['threads']}")
    for suffix in ("png", "pdf"):
        save(drawn, told.out / f"inference.{suffix}")
    print(told.out / "inference.md")


if __name__ == "__main__":
    main()
