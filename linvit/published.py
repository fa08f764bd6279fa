"""The paper's printed numbers, and which runs each of them is the mean of [arXiv:2609.35745].

They stand in `published.yaml`. Nothing here imports torch or pandas.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError, model_validator

from linvit.config import NO_SOURCE, ConfigError, Part, first_mistake, read_yaml

PATH = Path(__file__).with_name("published.yaml")
SEEDS = 3
"""Of every number that is a mean [arXiv:2609.35745, Sec. B.3]."""

Percent = Annotated[float, Field(ge=0, le=100)]
Value = Percent | tuple[Percent, Percent] | None


class Runs(Part):
    """What the runs of one cell have in common, as columns of a table of runs."""

    dataset: str
    size: str
    variant: str
    start: str
    distill: bool = False
    source: str
    """A run without a source counts beside any."""
    seeds: PositiveInt = SEEDS
    """How many there are."""

    def match(self, run: Mapping[str, Any]) -> bool:
        keys = ("dataset", "size", "variant", "start", "distill")
        return run["source"] in (self.source, NO_SOURCE) and all(run[key] == getattr(self, key) for key in keys)


class Cell(Part):
    """One printed number: a mean, where it is given a standard deviation, and the runs that reproduce it."""

    row: str
    column: str
    value: Percent
    std: Percent | None
    runs: Runs | None
    """None where no run of ours can be."""


class Row(Part):
    runs: dict[str, Any] = Field(default={})
    values: tuple[Value, ...]


class Table(Part):
    """One of the paper's tables, as it is laid out there."""

    title: str
    what: str
    runs: dict[str, Any] | None = None
    columns: dict[str, dict[str, Any]]
    rows: dict[str, Row]

    @model_validator(mode="after")
    def _is_whole(self) -> "Table":
        for name, row in self.rows.items():
            if len(row.values) != len(self.columns):
                raise ValueError(f"rows.{name}.values: {len(row.values)} values for {len(self.columns)} columns")
        try:
            list(self.cells())
        except ValidationError as error:
            raise ValueError(first_mistake(error, Runs)) from None
        return self

    def cells(self) -> Iterator[Cell]:
        """The table's numbers, row by row."""
        for name, row in self.rows.items():
            for (column, runs), number in zip(self.columns.items(), row.values, strict=True):
                if number is None:
                    continue
                value, std = number if isinstance(number, tuple) else (number, None)
                selected = None if self.runs is None else Runs(**{**self.runs, **runs, **row.runs})
                yield Cell(row=name, column=column, value=value, std=std, runs=selected)


def load(path: str | Path = PATH) -> dict[str, Table]:
    """Read and check a file of printed tables, by name.

    Raises:
        ConfigError: one line that names the file, the key and what is wrong.
    """
    try:
        # Through JSON, so that lists become tuples.
        return TypeAdapter(dict[str, Table]).validate_json(json.dumps(read_yaml(path)))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error, dict[str, Table])}") from None


@cache
def tables() -> dict[str, Table]:
    """The paper's."""
    return load()
