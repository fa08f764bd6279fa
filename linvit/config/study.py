"""A whole `config.yaml`, checked before anything runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from linvit.config.errors import ConfigError
from linvit.config.mistakes import first_mistake, shown, undefined
from linvit.config.parts import (
    NO_SOURCE,
    Block,
    DatasetEntry,
    Folder,
    Init,
    Name,
    Part,
    Recipe,
    Size,
    SourceEntry,
    VariantEntry,
)
from linvit.config.targets import check_targets
from linvit.config.yaml_file import read_yaml, refuse_exotic


class Study(Part):
    """A whole `config.yaml`: the catalogue, the named grids, and which grid to run."""

    grid: str
    """The grid that is run where none is named."""
    results: Folder = "results"
    """The folder that everything is written to."""
    data: Folder = "data"
    """The folder that torchvision and folder data sets are looked for in."""
    download: bool = False
    """Whether missing torchvision data sets may be downloaded."""
    tensorboard: bool = False
    """Whether runs write event files beside their metrics."""
    sizes: dict[Name, Size]
    """ViTs' dimensions."""
    variants: dict[Name, VariantEntry]
    """Attention operators."""
    inits: dict[Name, Init]
    """Initialisations."""
    recipes: dict[Name, Recipe]
    """Training recipes."""
    datasets: dict[Name, DatasetEntry]
    """Labelled images."""
    sources: dict[Name, dict[str, SourceEntry]] = Field(default={})
    """Pre-trained Softmax ViTs: a name, then one for each size."""
    grids: dict[Name, Annotated[tuple[Block, ...], Field(min_length=1)]]
    """Which runs there are: lists of blocks."""

    @model_validator(mode="after")
    def _refers_to_what_exists(self) -> "Study":
        _known("grid", self.grid, self.grids)
        for name, dataset in self.datasets.items():
            self._check_dataset(f"datasets.{name}", dataset)
        for name, sizes in self.sources.items():
            if name == NO_SOURCE:
                raise ValueError(f"sources.{name}: the name of runs without a source; choose another")
            for size, source in sizes.items():
                _known(f"sources.{name}", size, self.sizes)
                if source.mean and len(source.mean) != (channels := self.sizes[size].channels):
                    raise ValueError(f"sources.{name}.{size}.mean: needs a value for each of {channels} channels")
                if source.train:
                    self._check_trained_on(f"sources.{name}.{size}.train.dataset", source.train.dataset)
                    self._check_recipe_of_source(f"sources.{name}.{size}.train.recipe", source.train.recipe)
        for name, blocks in self.grids.items():
            for number, block in enumerate(blocks):
                for axis in ("sizes", "variants", "inits", "sources"):
                    for value in getattr(block, axis):
                        _known(f"grids.{name}.{number}.{axis}", value, getattr(self, axis))
                for value in block.datasets:
                    self._check_trained_on(f"grids.{name}.{number}.datasets", value)
                for value in block.ood:
                    self._check_ood(f"grids.{name}.{number}.ood", value, block)
                if block.recipe:
                    _known(f"grids.{name}.{number}.recipe", block.recipe, self.recipes)
        return self

    def _check_dataset(self, key: str, dataset: DatasetEntry) -> None:
        if dataset.test_of:
            self._check_trained_on(f"{key}.test_of", dataset.test_of)
            if dataset.recipe:
                raise ValueError(f"{key}.recipe: nothing is trained on a test split of {dataset.test_of!r}")
            if dataset.classes != self.datasets[dataset.test_of].classes:
                raise ValueError(f"{key}.classes: not those of {dataset.test_of!r}, whose models it is for")
            return
        if dataset.recipe is None:
            raise ValueError(f"{key}.recipe: missing; it has no default, but for a test split (test_of)")
        recipes = [dataset.recipe] if isinstance(dataset.recipe, str) else dataset.recipe.values()
        for recipe in recipes:
            _known(f"{key}.recipe", recipe, self.recipes)
        for size in () if isinstance(dataset.recipe, str) else dataset.recipe:
            _known(f"{key}.recipe", size, self.sizes)

    def _check_recipe_of_source(self, key: str, name: str) -> None:
        _known(key, name, self.recipes)
        if self.recipes[name].align:
            raise ValueError(f"{key}: {name!r} aligns attentions with a source's, and a source has none")

    def _check_trained_on(self, key: str, name: str) -> None:
        _known(key, name, self.datasets)
        if self.datasets[name].test_of:
            raise ValueError(f"{key}: {name!r} is a test split of {self.datasets[name].test_of!r}; it has no training")

    def _check_ood(self, key: str, name: str, block: Block) -> None:
        _known(key, name, self.datasets)
        others = [dataset for dataset in block.datasets if dataset != self.datasets[name].test_of]
        if others:
            raise ValueError(f"{key}: {name!r} is no test split of {others[0]!r} (test_of)")


def study_from(config: Mapping, origin: str = "config.yaml") -> Study:
    """Check a parsed configuration.

    Raises:
        ConfigError: one line with the key, what was wrong and what is allowed.
    """
    try:
        refuse_exotic(config)
        # Through JSON, so that lists become tuples while a string never becomes a number.
        return Study.model_validate_json(json.dumps(_with_names(config)))
    except ValidationError as error:
        raise ConfigError(f"{origin}: {first_mistake(error, Study)}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def load_study(path: str | Path, **overrides: Any) -> Study:
    """Read and check a configuration file; `overrides` replace top-level keys.

    Raises:
        ConfigError: one line with the file, the key or line, what was wrong and what is allowed.
    """
    config = read_yaml(path)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path}: found {shown(config)}; allowed: keys with values, as in the repository's own")
    study = study_from({**config, **overrides}, str(path))
    check_targets(study.variants, str(path), Path(path).parent)
    return study


def _with_names(config: Mapping) -> dict:
    """The configuration with each entry's key as its `name`."""
    named = dict(config)
    for table in ("sizes", "variants", "inits", "recipes", "datasets"):
        if isinstance(config.get(table), Mapping):
            named[table] = {key: _with_name(f"{table}.{key}", key, entry) for key, entry in config[table].items()}
    return named


def _with_name(where: str, key: str, entry: Any) -> Any:
    if not isinstance(entry, Mapping | None):
        return entry
    if entry and "name" in entry:
        raise ConfigError(f"{where}.name: unknown key; an entry's key is its name")
    return {"name": key, **(entry or {})}


def _known(key: str, value: str, allowed: Mapping) -> None:
    if value not in allowed:
        raise ValueError(undefined(key, value, allowed))
