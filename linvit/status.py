"""How far a grid is, told by its files alone: beside any scheduler, and from any machine that sees them.

No torch and no scheduler's command: a run is what its folder says of it. Where that names a process of this machine, it
is looked at, too.
"""

import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from pydantic_core import from_json

from linvit.config import Study
from linvit.files import lives
from linvit.grid import RunSpec, evaluations, expand, trained_sources
from linvit.plan import holds, task_of
from linvit.rates import Rates, workload_of
from linvit.watch import PROGRESS, Standing, duration

SILENT = 15 * 60.0
"""Seconds without a change after which a run is no longer taken for running."""
SAMPLE = 3
"""Finished runs of a kind whose times are read."""
TAIL = 4096
"""Bytes of a log in which its last error is looked for."""
UNUSABLE = "metrics.json: damaged or of other settings; delete it to run again"
TIMED = re.compile(r"\d\d:\d\d:\d\d ")

State = Literal["done", "running", "interrupted", "failed", "waiting"]
Kind = tuple
"""Of runs that take equally long: data set, recipe, workload."""


@dataclass(frozen=True)
class Look:
    """What a run's folder, or another job's file, told at one time."""

    name: str
    state: State
    note: str = ""
    """Why it ended, or for how long it has been silent."""
    standing: Standing | None = None
    """Of a run whose training has begun and is not done."""

    @property
    def share(self) -> float:
        """Of its training, from 0 to 1."""
        if self.state == "done":
            return 1.0
        return self.standing.taken / self.standing.total if self.standing and self.standing.total else 0.0


@dataclass(frozen=True)
class Status:
    """A grid at one time."""

    grid: str
    runs: tuple[Look, ...]
    others: tuple[Look, ...]
    """Data sets, sources and evaluations out of distribution that have failed, and sources in training."""
    share: float
    """Of the grid's training, by images where all data sets tell their sizes."""
    seconds_left: float | None
    """Of one device, for all that has not failed and whose pace is known; None where nothing's is."""
    untimed: int
    """Runs that are left out of it."""

    def of(self, state: State) -> list[Look]:
        return [look for look in self.runs if look.state == state]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be waited for."""
        return all(look.state in ("done", "failed") for look in self.runs)


def status_of(study: Study, grid: str | None = None, rates: Rates | None = None, *, silent: float = SILENT) -> Status:
    """Look at every run of a grid, once.

    Args:
        rates: For the time that runs will take of which none of the same kind has been seen at work.
        silent: Seconds without a change after which a run counts as interrupted.

    Raises:
        ConfigError: as of `expand`.
    """
    grid, results, now = grid or study.grid, Path(study.results), time.time()
    specs = expand(study, grid)
    looks = {name: look_at(name, results / "runs" / name, spec, now, silent) for name, spec in specs.items()}
    others = [look for look in _others(study, grid, specs, now, silent) if look.state in ("failed", "running")]
    seconds = _seconds_left(specs, looks, results, rates)
    known = [value for value in seconds.values() if value is not None]
    return Status(
        grid=grid,
        runs=tuple(looks.values()),
        others=tuple(others),
        share=_share(specs, looks),
        seconds_left=sum(known) if known or not seconds else None,
        untimed=len(seconds) - len(known),
    )


def look_at(name: str, folder: Path, spec: RunSpec, now: float, silent: float = SILENT, log: str = "train.log") -> Look:
    """What a run's folder says of it; files of a run with other settings say nothing."""
    wanted, own, metrics = json.loads(spec.to_json()), folder / "spec.json", folder / "metrics.json"
    if not own.exists():
        return job(name, None, folder / log)
    if _read(own) != wanted:  # and so is the log, or its end may be
        return Look(name, "waiting")
    if holds(metrics, spec=spec):
        return Look(name, "done")
    begun, found = _changed(own), _read(folder / PROGRESS)
    if _changed(metrics) >= begun:
        return Look(name, "failed", UNUSABLE)
    error, interrupted = found.pop("error", None), found.pop("interrupted", False)
    host, process = found.pop("host", None), found.pop("pid", None)
    look = Look(name, "running", standing=_standing(found))
    is_of_now = _changed(folder / PROGRESS) >= begun
    if error and is_of_now:
        return replace(look, state="interrupted" if interrupted else "failed", note=error)
    if _changed(folder / log) >= begun and (error := last_error(folder / log)):
        return replace(look, state="failed", note=error)
    if is_of_now and _is_gone(host, process):
        return replace(look, state="interrupted", note="killed: its process is gone")
    since = now - max(_changed(folder / file) for file in ("spec.json", PROGRESS, "checkpoint.pt", log))
    if since > silent:
        return replace(look, state="interrupted", note=f"silent for {duration(since)}")
    return look


def _is_gone(host: object, process: object) -> bool:
    """Whether it was a process of this machine, and is no more."""
    return host == socket.gethostname() and isinstance(process, int) and not lives(process)


def job(name: str, made: Path | None, log: Path) -> Look:
    """A job that leaves no more than a file and a log."""
    if made and made.exists():
        return Look(name, "done")
    error = last_error(log)
    return Look(name, "failed", error) if error else Look(name, "waiting")


def last_error(log: Path) -> str | None:
    """The line with which a log ends, if it is an error: of this program, or the last of a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return None
    last = lines[-1].strip() if lines else ""
    if last.startswith("linvit: error: "):
        return last.removeprefix("linvit: error: ")
    # What a run says of itself is timed: after such a line, a traceback is over and done with.
    since = next((i for i in reversed(range(len(lines))) if TIMED.match(lines[i])), -1) + 1
    return last if any(line.startswith("Traceback ") for line in lines[since:]) else None


def _others(study: Study, grid: str, specs: Mapping[str, RunSpec], now: float, silent: float) -> Iterable[Look]:
    """The jobs that a grid's runs wait for, and those that wait for runs."""
    data, sources, runs = (Path(study.results) / part for part in ("data", "sources", "runs"))
    for name in dict.fromkeys(spec.dataset.name for spec in specs.values()):
        yield job(f"data set {name}", data / f"{name}.json", data / f"{name}.log")
    trained = trained_sources(specs.values())
    for name in dict.fromkeys(spec.source.folder for spec in specs.values() if spec.source):
        look = job(f"source {name}", sources / name / "source.json", sources / name / "source.log")
        training = trained[name].train if name in trained else None
        if look.state != "done" and training:
            look = look_at(look.name, sources / name / "run", training, now, silent, "../source.log")
        yield look
    for name in evaluations(study, grid):
        yield job(name, runs / f"{name}.json", runs / f"{name}.log")


def _share(specs: Mapping[str, RunSpec], looks: Mapping[str, Look]) -> float:
    images = {name: task_of(spec, False).images for name, spec in specs.items()}
    told = {name: n for name, n in images.items() if n is not None}
    # Runs that are only evaluated have none: a grid of nothing else is told by their number.
    weights = told if len(told) == len(images) and any(told.values()) else dict.fromkeys(images, 1)
    return sum(weights[name] * look.share for name, look in looks.items()) / sum(weights.values())


def _seconds_left(
    specs: Mapping[str, RunSpec], looks: Mapping[str, Look], results: Path, rates: Rates | None
) -> dict[str, float | None]:
    """Of one device, for each run that has not ended: by others of its kind, else by the table of rates."""
    measured = _measured(specs, looks, results)
    by_workload = rates.by_workload if rates else {}

    def seconds(spec: RunSpec) -> float | None:
        if found := measured.get(_kind(spec)):
            return mean(found)
        hours = task_of(spec, False).hours(by_workload.get(workload_of(spec)))
        return None if hours is None else 3600 * hours

    whole = {name: seconds(specs[name]) for name, look in looks.items() if look.state not in ("done", "failed")}
    return {name: None if value is None else value * (1 - looks[name].share) for name, value in whole.items()}


def _measured(specs: Mapping[str, RunSpec], looks: Mapping[str, Look], results: Path) -> dict[Kind, list[float]]:
    """Seconds that whole runs take, by kind: of a few that are done, else of those under way."""
    done, under_way = defaultdict(list), defaultdict(list)
    for name, look in looks.items():
        if look.state == "done":
            done[_kind(specs[name])].append(name)
        elif look.standing and look.standing.seconds and look.share:
            under_way[_kind(specs[name])].append(look.standing.seconds / look.share)
    for kind, names in done.items():
        found = (_read(results / "runs" / name / "metrics.json").get("wall_seconds") for name in names[:SAMPLE])
        if known := [value for value in found if isinstance(value, int | float)]:
            under_way[kind] = known
    return under_way


def _kind(spec: RunSpec) -> Kind:
    return spec.dataset.name, spec.recipe.name, spec.init.train, workload_of(spec)


def _read(path: Path) -> dict:
    """A file's object; empty where it is missing or damaged."""
    try:
        found = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _standing(found: dict) -> Standing | None:
    """Where a run stands; None if its training has not begun, or the file is of another version."""
    try:
        numbers = (value for key, value in found.items() if key != "stage")
        return Standing(**found) if all(isinstance(value, int | float | None) for value in numbers) else None
    except TypeError:
        return None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
