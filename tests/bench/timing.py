"""What the benchmarks share: calls timed against each other in one process, and how their results are written."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from linvit.device import name_of
from linvit.files import write_text


def interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int = 7, warmup: int = 1
) -> dict[str, float]:
    """Median seconds of each call. They take turns, so that what disturbs the machine disturbs them alike.

    Where calls are shorter than 20 ms, each turn repeats them, so that the clock and its caller do not count.
    """
    loops = {name: _loops(call, device, warmup) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, device, loops[name]) / loops[name])
    return {name: statistics.median(found) for name, found in seconds.items()}


def _loops(call: Callable[[], object], device: torch.device, warmup: int) -> int:
    for _ in range(warmup):
        call()
    return max(1, round(0.02 / max(_seconds(call, device, 1), 1e-6)))


def _seconds(call: Callable[[], object], device: torch.device, loops: int) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(loops):
        call()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def circumstances(device: torch.device) -> dict[str, Any]:
    """When, on what and with what a benchmark ran."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": name_of(device),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": python_version(), **{name: version(name) for name in ("torch", "torchvision", "timm")}},
    }


def described(found: Mapping[str, Any]) -> str:
    """The circumstances as a line of a page."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"{found['date']}: {found['device']}, {found['cpus']} CPUs (load {found['load']} at the start), "
        f"{found['threads']} threads; {versions}."
    )


def write(out: Path, name: str, results: Mapping[str, Any], page: str) -> None:
    """A benchmark's numbers, and its section of the page."""
    write_text(out / f"{name}.json", json.dumps(results, indent=2) + "\n")
    write_text(out / f"{name}.md", page)
