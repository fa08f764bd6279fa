"""How fast a device works: the table that `linvit bench --throughput` writes and `linvit plan` reads."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from linvit.config import ConfigError, Part, Study, UserError, first_mistake
from linvit.files import is_whole, write_sealed
from linvit.grid import RunSpec, expand, trained_sources


class RatesError(UserError):
    """A table of rates that cannot be read, or that is another device's."""


class Workload(NamedTuple):
    """What decides how fast a device carries out a run: its model's parts, what it distils, how it computes."""

    size: str
    variant: str
    distill: str | None
    precision: str
    compile: bool = False
    grad_checkpointing: bool = False

    def __str__(self) -> str:
        distill = f"+{self.distill}" if self.distill else ""
        ways = [self.precision] if self.precision != "auto" else []
        ways += [way for way in ("compile", "grad_checkpointing") if getattr(self, way)]
        return " ".join([f"{self.size}/{self.variant}{distill}", *ways])


class Rate(Part):
    """One row: the images per second of a workload, in training and in evaluation."""

    size: str
    variant: str
    distill: str | None
    precision: str
    compile: bool = False
    grad_checkpointing: bool = False
    batch_size: PositiveInt
    """Images in a forward pass; fewer than asked for where `error` says that these did not fit."""
    train_images_per_second: PositiveFloat | None
    eval_images_per_second: PositiveFloat | None
    error: str | None = None

    @property
    def workload(self) -> Workload:
        return Workload(*(getattr(self, field) for field in Workload._fields))


class Rates(Part):
    """A table of rates, all of one device, by the same number of CPU threads and versions."""

    device: str
    threads: PositiveInt
    versions: dict[str, str]
    date: datetime.date
    """Of the last row."""
    rates: tuple[Rate, ...] = ()
    sha256: str | None = Field(default=None, exclude=True)
    """The file's checksum."""

    @property
    def by_workload(self) -> dict[Workload, Rate]:
        return {rate.workload: rate for rate in self.rates}


def workload_of(run: RunSpec) -> Workload:
    loss, recipe = run.init.distill.loss if run.init.distill else None, run.recipe
    ways = (recipe.precision, recipe.compile, recipe.grad_checkpointing)
    return Workload(run.size.name, run.variant.name, loss, *ways)


def workloads_of(
    study: Study,
    grid: str | None = None,
    *,
    sizes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
) -> dict[Workload, RunSpec]:
    """The distinct workloads of a grid, each with the first run, or training of a source, that has it.

    Args:
        sizes, variants: Only workloads of these.

    Raises:
        ConfigError: as of `expand`; a size or variant that the grid does not have.
    """
    runs = list(expand(study, grid).values())
    runs += [source.train for source in trained_sources(runs).values()]
    found: dict[Workload, RunSpec] = {}
    for run in runs:
        found.setdefault(workload_of(run), run)
    for axis, names in (("size", sizes), ("variant", variants)):
        if names:
            found = _only(found, axis, names)
    return found


def _only(workloads: dict[Workload, RunSpec], axis: str, names: Sequence[str]) -> dict[Workload, RunSpec]:
    there = dict.fromkeys(getattr(workload, axis) for workload in workloads)
    for name in names:
        if name not in there:
            raise ConfigError(f"no run of the grid has {axis} {name!r}; allowed: {', '.join(there)}")
    return {workload: run for workload, run in workloads.items() if getattr(workload, axis) in names}


def default_path(study: Study) -> Path:
    return Path(study.results) / "bench" / "throughput.json"


def read_rates(path: Path) -> Rates | None:
    """A table that `write_rates` wrote, None where there is none.

    Raises:
        RatesError: the file cannot be read or is no such table.
    """
    try:
        content = path.read_bytes()
        rates = Rates.model_validate_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RatesError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise RatesError(f"{path}: no table of throughput: {first_mistake(error, Rates)}; delete it") from None
    if not is_whole(content):
        raise RatesError(f"{path}: its values are not those that were written (sha256); delete it")
    return rates.model_copy(update={"sha256": None})


def write_rates(rates: Rates, path: Path) -> None:
    write_sealed(path, rates.model_dump(mode="json"))
