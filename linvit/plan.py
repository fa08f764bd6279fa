"""What a grid costs before it is run: its runs by table and figure, what is cached, images, hours of a device."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill

from pydantic_core import from_json
from tabulate import tabulate

from linvit.config import Dataset, Part, Study
from linvit.files import is_whole
from linvit.grid import Evaluation, RunSpec, Source, evaluations, expand, runs_of, trained_sources
from linvit.rates import Rate, Rates, Workload, workload_of

WIDTH = 100


@dataclass(frozen=True)
class Task:
    """One training or evaluation: how often it sees the images of its data set's two splits."""

    workload: Workload
    dataset: Dataset
    epochs: int
    evaluations: int
    cached: bool

    @property
    def images(self) -> int | None:
        """To train on; None where the data set does not tell its size."""
        if self.epochs and self.dataset.train_size is None:
            return None
        return self.epochs * (self.dataset.train_size or 0)

    @property
    def test_images(self) -> int | None:
        """To evaluate on."""
        return self.evaluations * self.dataset.test_size if self.dataset.test_size else None

    def hours(self, rate: Rate | None) -> float | None:
        """Of one device at this rate, without reading and augmenting images; None where it cannot be told."""
        if None in (self.images, self.test_images) or rate is None or rate.train_images_per_second is None:
            return None
        training = self.images / rate.train_images_per_second
        return (training + self.test_images / rate.eval_images_per_second) / 3600


@dataclass(frozen=True)
class Line:
    """What one purpose needs."""

    name: str
    needed: int
    """Runs, or evaluations."""
    tasks: tuple[Task, ...]
    """Those of them that no earlier line needs."""

    @property
    def todo(self) -> list[Task]:
        return [task for task in self.tasks if not task.cached]

    @property
    def cached(self) -> int:
        return len(self.tasks) - len(self.todo)


@dataclass(frozen=True)
class Plan:
    """A grid's lines, and what is known of the device that they would be carried out on."""

    grid: str
    points: int
    """Of the blocks' products: the runs there would be if no two points were the same run."""
    runs: tuple[Line, ...]
    """By what the blocks are for."""
    sources: Line
    """That the pipeline trains."""
    ood: Line
    rates: Rates | None

    @property
    def lines(self) -> list[Line]:
        return [*self.runs, *(line for line in (self.sources, self.ood) if line.tasks)]

    @property
    def todo(self) -> list[Task]:
        return [task for line in self.lines for task in line.todo]

    @property
    def distinct(self) -> int:
        return sum(len(line.tasks) for line in self.runs)

    @cached_property
    def by_workload(self) -> dict[Workload, Rate]:
        return self.rates.by_workload if self.rates else {}

    def hours(self, task: Task) -> float | None:
        return task.hours(self.by_workload.get(task.workload))


def plan_of(study: Study, grid: str | None = None, rates: Rates | None = None) -> Plan:
    """What a grid needs, and what of it is cached in the study's results.

    Raises:
        ConfigError: as of `expand`.
    """
    grid, results = grid or study.grid, Path(study.results)
    runs = expand(study, grid)
    points, lines, seen = 0, [], set()
    for purpose, names in _names_by_purpose(study, grid).items():
        new = [name for name in dict.fromkeys(names) if name not in seen]
        lines.append(Line(purpose, len(set(names)), tuple(_training(runs[name], results) for name in new)))
        points += len(names)
        seen.update(new)
    sources = tuple(_source(source, results) for source in trained_sources(runs.values()).values())
    ood = tuple(_evaluation(evaluation, results) for evaluation in evaluations(study, grid).values())
    return Plan(
        grid=grid,
        points=points,
        runs=tuple(lines),
        sources=Line("Sources", len(sources), sources),
        ood=Line("Evaluations out of distribution", len(ood), ood),
        rates=rates,
    )


def _names_by_purpose(study: Study, grid: str) -> dict[str, list[str]]:
    """The names of all points of the blocks' products, by what the blocks are for."""
    names: dict[str, list[str]] = {}
    for number, block in enumerate(study.grids[grid]):
        purpose = block.purpose or f"grids.{grid}.{number}"
        names.setdefault(purpose, []).extend(run.name for run in runs_of(study, block))
    return names


def _training(run: RunSpec, results: Path) -> Task:
    return task_of(run, holds(results / "runs" / run.name / "metrics.json", spec=run))


def _source(source: Source, results: Path) -> Task:
    return task_of(source.train, holds(results / "sources" / source.folder / "source.json", spec=source.train))


def task_of(run: RunSpec, cached: bool) -> Task:
    """A run as work to be done, unless its result is `cached`."""
    if not run.init.train:
        return Task(workload_of(run), run.dataset, epochs=0, evaluations=1, cached=cached)
    # Every so many epochs and after the last one. Epochs of alignment, which are shorter, count as any other.
    evaluations = -(-run.recipe.epochs // run.recipe.eval_every)
    return Task(workload_of(run), run.dataset, run.recipe.passes, evaluations, cached)


def _evaluation(evaluation: Evaluation, results: Path) -> Task:
    run, path = evaluation.run, results / "runs" / f"{evaluation.name}.json"
    cached = _training(run, results).cached and holds(path, run=run, dataset=evaluation.dataset)
    return Task(workload_of(run), evaluation.dataset, 0, 1, cached)


def holds(path: Path, **settings: Part) -> bool:
    """Whether a result is there as it was written, and was made with these settings."""
    try:
        content = path.read_bytes()
        found = from_json(content)  # histories are long, and grids large
        parts = {key: json.loads(part.model_dump_json(exclude_defaults=True)) for key, part in settings.items()}
        return all(found[key] == part for key, part in parts.items()) and is_whole(content)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def text(plan: Plan, table: Path) -> str:
    """The plan on one screen; `table` is the file of its rates."""
    rows = [
        (line.name, f"{line.needed:,}", f"{len(line.tasks):,}", f"{line.cached:,}", *_costs(plan, line.todo))
        for line in plan.lines
    ]
    headers = ("for", "needs", "not above", "cached", "M images", "hours")
    return "\n\n".join(
        (
            tabulate(_totals(plan), tablefmt="plain", disable_numparse=True),
            tabulate(rows, headers, colalign=("left", *["right"] * 5), disable_numparse=True),
            "\n".join(fill(note, WIDTH, break_on_hyphens=False) for note in _notes(plan, table)),
        )
    )


def _totals(plan: Plan) -> list[tuple[str, str]]:
    images, hours = _costs(plan, plan.todo)
    rates = plan.rates
    device = f" on one {rates.device} (threads: {rates.threads}), as measured {rates.date}" if rates else ""
    cached = sum(line.cached for line in plan.runs)
    further = [(line.name, f"{line.needed:,}; {line.cached:,} cached") for line in plan.lines[len(plan.runs) :]]
    return [
        ("grid", plan.grid),
        ("runs", f"{plan.distinct:,}, of {plan.points:,} points in its blocks' products; {cached:,} cached"),
        *((name.lower(), value) for name, value in further),
        ("images", f"{images} million to train on"),
        ("hours", hours + device),
    ]


def _costs(plan: Plan, tasks: Sequence[Task]) -> tuple[str, str]:
    """Millions of images, and hours, for what is told of them."""
    images, hours = [task.images for task in tasks], [plan.hours(task) for task in tasks]
    return _sum(images, 1e6), _sum(hours)


def _sum(values: Sequence[float | None], unit: float = 1.0) -> str:
    """A sum as text, marked as a lower bound where some values are unknown; "?" where all are."""
    known = [value for value in values if value is not None]
    if values and not known:
        return "?"
    total = sum(known) / unit
    mark = "" if len(known) == len(values) else "\N{GREATER-THAN OR EQUAL TO} "
    return mark + (f"{total:,.2f}" if total < 10 else f"{total:,.0f}")


def _notes(plan: Plan, table: Path) -> list[str]:
    tasks, known = plan.todo, plan.by_workload
    notes = [
        "not above: of those needed, what no line above needs too; of these are the cached ones, and of what is not "
        "cached the images (millions, to train on) and hours (of one device, without reading and augmenting images)."
    ]
    if unsized := dict.fromkeys(task.dataset.name for task in tasks if None in (task.images, task.test_images)):
        notes.append(f"Left out, as datasets.*.train_size or test_size does not tell: {', '.join(unsized)}.")
    if lacking := dict.fromkeys(str(task.workload) for task in tasks if task.workload not in known):
        notes.append(f"Left out of hours, having no rate in {table}: {', '.join(lacking)}. To fill it:")
        notes.append(f"linvit bench --throughput --grid {plan.grid}")
    failed = dict.fromkeys(known[task.workload] for task in tasks if task.workload in known)
    return notes + [_failure(rate) for rate in failed if rate.error]


def _failure(rate: Rate) -> str:
    outcome = f"measured with {rate.batch_size}" if rate.train_images_per_second else "left out of hours"
    return f"{rate.workload}: {rate.error}; {outcome}."
