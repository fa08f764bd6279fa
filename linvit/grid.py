"""From a study to its runs: products of axes, united, with each distinct run in it once."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from linvit.config import (
    NO_SOURCE,
    Block,
    ConfigError,
    Dataset,
    Init,
    Name,
    Part,
    Recipe,
    Seed,
    Size,
    SourceEntry,
    Study,
    Variant,
    VariantEntry,
    first_mistake,
)
from linvit.config.mistakes import undefined

SOFTMAX = Variant(name="softmax", target="linvit.attention.softmax:SoftmaxAttention", attention_map=True)
"""What every source and teacher is: a timm ViT as it is."""

RANDOM = Init(name="random")


class Source(Part):
    """A pre-trained Softmax ViT of one size, with everything that decides its weights."""

    name: Name
    size: Size
    timm: str | None = None
    url: str | None = None
    path: str | None = None
    train: "RunSpec | None" = None
    sha256: str | None = None

    @property
    def folder(self) -> str:
        """Where it lies, under `results/sources/`."""
        return f"{self.name}/{self.size.name}"


class RunSpec(Part):
    """One training run, complete: two runs with equal specs are the same run.

    As JSON, fields equal to their defaults are left out, so that a new option does not make old runs stale.
    """

    dataset: Dataset
    size: Size
    variant: Variant
    init: Init
    source: Source | None = None
    recipe: Recipe
    seed: Seed
    other_recipe: bool = False
    """Whether the recipe is not the data set's own, and so part of the name."""
    role: Literal["student", "source"] = Field(default="student")

    @model_validator(mode="after")
    def _is_defined(self) -> "RunSpec":
        """Whether its parts go together, whoever has put them together."""
        if len(self.dataset.mean) != self.size.channels:
            raise ValueError(
                f"datasets.{self.dataset.name}.mean: {len(self.dataset.mean)} values, but size {self.size.name!r} has "
                f"{self.size.channels} channels"
            )
        if self.variant.positions == "sincos" and self.size.dim % 4:
            raise ValueError(
                f"variant {self.variant.name!r} has positions sincos, but dim {self.size.dim} of size "
                f"{self.size.name!r} is no multiple of 4"
            )
        if self.init.analytic and not self.variant.analytic_inits:
            raise ValueError(
                f"init {self.init.name!r} ({self.init.analytic}) is not defined for variant {self.variant.name!r}: "
                "it has no standard query-key product (analytic_inits: false)"
            )
        if self.init.needs_source and self.source is None:
            raise ValueError(f"init {self.init.name!r} needs a source")
        if self.recipe.align and self.init.train and not self.init.needs_source:
            raise ValueError(
                f"recipe {self.recipe.name!r} aligns attentions with a source's, but init {self.init.name!r} has none; "
                "allowed: one that copies or distils"
            )
        return self

    @property
    def name(self) -> str:
        """The run's path: data set, size, variant, initialisation, source, seed."""
        dataset = self.dataset.name + (f"@{self.recipe.name}" if self.other_recipe else "")
        source = self.source.name if self.source else NO_SOURCE
        return f"{dataset}/{self.size.name}/{self.variant.name}/{self.init.name}/{source}/seed{self.seed}"

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> "RunSpec":
        return cls.model_validate_json(text)

    def stream(self, *purpose: str | int) -> int:
        """A seed for one purpose, such as `("epoch", 3)`.

        Streams of sources and students never meet, whatever their seeds: a student that drew the numbers its
        source once started from would not be a random one. They do not depend on variant, initialisation or
        data set, so that runs which differ in those alone are paired by seed.
        """
        text = "/".join(map(str, (self.role, self.seed, *purpose)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Evaluation(Part):
    """A trained run on a further test split of its data set, out of distribution."""

    run: RunSpec
    dataset: Dataset

    @property
    def name(self) -> str:
        """Its path: the run's, then the data set."""
        return f"{self.run.name}/ood/{self.dataset.name}"


def expand(study: Study, grid: str | None = None) -> dict[str, RunSpec]:
    """All distinct runs of a grid, by name, in the order of its blocks.

    Raises:
        ConfigError: a combination that is not defined, or two different runs under one name.
    """
    grid = grid or study.grid
    if grid not in study.grids:
        raise ConfigError(undefined("grid", grid, study.grids))
    runs: dict[str, RunSpec] = {}
    for number, block in enumerate(study.grids[grid]):
        try:
            specs = list(runs_of(study, block))
        except ConfigError as error:
            raise ConfigError(f"grids.{grid}.{number}: {error}") from None
        for spec in specs:
            if runs.setdefault(spec.name, spec) != spec:
                raise ConfigError(f"grids.{grid}: two different runs would be named {spec.name!r}")
    return runs


def evaluations(study: Study, grid: str | None = None) -> dict[str, Evaluation]:
    """All distinct evaluations out of distribution that a grid's blocks ask for, by name."""
    found = (
        Evaluation(run=run, dataset=study.datasets[name].settings())
        for block in study.grids[grid or study.grid]
        if block.ood
        for run in runs_of(study, block)
        for name in block.ood
    )
    return {evaluation.name: evaluation for evaluation in found}


def sources_of(study: Study) -> dict[str, Source]:
    """Every source of the catalogue, by folder (`deit/tiny`)."""
    sources = (source_of(study, name, size) for name, sizes in study.sources.items() for size in sizes)
    return {source.folder: source for source in sources}


def trained_sources(runs: Iterable[RunSpec]) -> dict[str, Source]:
    """The sources among those of some runs that the pipeline trains itself, by folder."""
    return {run.source.folder: run.source for run in runs if run.source and run.source.train}


def source_of(study: Study, name: str, size: str) -> Source:
    """One source of the catalogue, resolved.

    Raises:
        ConfigError: the source has no checkpoint of this size, or would train one of parts that do not go together.
    """
    sizes = study.sources[name]
    if size not in sizes:
        raise ConfigError(f"sources.{name}: no checkpoint of size {size!r}; it has {', '.join(sizes)}")
    entry = sizes[size]
    try:
        train = _training_of(study, entry, size) if entry.train else None
    except ConfigError as error:
        raise ConfigError(f"sources.{name}.{size}.train: {error}") from None
    fields = entry.model_dump(exclude={"train", "mean", "std"})
    return Source(name=name, size=study.sizes[size], train=train, **fields)


def _training_of(study: Study, entry: SourceEntry, size: str) -> RunSpec:
    dataset = study.datasets[entry.train.dataset]
    return _spec_of(
        dataset=dataset.settings(),
        size=study.sizes[size],
        variant=SOFTMAX,
        init=RANDOM,
        recipe=study.recipes[entry.train.recipe],
        seed=entry.train.seed,
        role="source",
    )


def runs_of(study: Study, block: Block) -> Iterator[RunSpec]:
    """The runs of one block, point by point of its product: one that uses no source comes up once for each source."""
    axes = (block.datasets, block.sizes, block.variants, block.inits, block.sources or (None,), block.seeds)
    for dataset, size, variant, init, source, seed in product(*axes):
        entry = study.datasets[dataset]
        recipe = study.recipes[block.recipe or entry.recipe_for(size)]
        used = _source_for(study, study.inits[init], source, size)
        settings = _normalised(entry.settings(), study.sources[source][size]) if used else entry.settings()
        yield _spec_of(
            dataset=settings,
            size=study.sizes[size],
            variant=study.variants[variant].settings(),
            init=_weighted(study.inits[init], study.variants[variant], recipe),
            source=used,
            recipe=recipe,
            seed=seed,
            other_recipe=block.recipe is not None and block.recipe != entry.recipe_for(size),
        )


def _normalised(dataset: Dataset, source: SourceEntry) -> Dataset:
    """The data set with the statistics of the images that the source was trained on, where it names them."""
    return dataset.model_copy(update={"mean": source.mean, "std": source.std}) if source.mean else dataset


def _spec_of(**parts: Any) -> RunSpec:
    try:
        return RunSpec(**parts)
    except ValidationError as error:
        raise ConfigError(first_mistake(error, RunSpec)) from None


def _weighted(init: Init, variant: VariantEntry, recipe: Recipe) -> Init:
    """The initialisation with its loss's weight filled in, or an error where the variant does not define the loss."""
    if init.distill is None:
        return init
    _check_loss(init, variant)
    weight = init.distill.weight or recipe.distill_weight
    return init.model_copy(update={"distill": init.distill.model_copy(update={"weight": weight})})


def _check_loss(init: Init, variant: VariantEntry) -> None:
    target, distance = init.distill.target, init.distill.distance
    if target not in variant.distilled:
        what, key = {"heads": ("head outputs", "head_outputs"), "map": ("attention maps", "attention_map")}[target]
        raise ConfigError(
            f"init {init.name!r} distils {what}, but variant {variant.name!r} has none ({key}: false); "
            f"allowed: target {', '.join(variant.distilled)}"
        )
    if distance not in variant.distilled[target]:
        raise ConfigError(
            f"init {init.name!r} matches maps by cross-entropy, but those of variant {variant.name!r} are no "
            f"distributions (map_distribution: false); allowed: distance {', '.join(variant.distilled[target])}"
        )


def _source_for(study: Study, init: Init, source: str | None, size: str) -> Source | None:
    if not init.needs_source:
        return None
    if source is None:
        raise ConfigError(f"init {init.name!r} needs a source, but its block names none under 'sources'")
    return source_of(study, source, size)
