"""What a study is made of: the catalogue and the grids of `config.yaml`, checked before anything runs.

Every part is a frozen pydantic model that refuses unknown keys. Nothing here imports torch: a login node
that only builds the DAG reads this module.
"""

import json
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

NO_SOURCE = "none"
"""In place of a source's name, in runs that use none."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Names become folders, so they hold neither separators nor a leading dot.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = NonNegativeInt
AUTO_AUGMENT = r"^(rand|augmix|original|originalr|v0|v0r|3a)(-[a-z]+\d*(\.\d+)?)*$"
Group = Literal["attention", "mlp", "norms", "patch_embed", "class_token", "positions", "head"]
"""The groups of weights a copy can name; `linvit.init.copy` says which parameter is in which."""
DISTANCES = {"output": ("mse", "l2"), "heads": ("mse",), "map": ("mse", "cross_entropy")}
"""What a distillation loss can match, and by which distances; `linvit.distill` has the formulas."""


class UserError(ValueError):
    """A mistake that a person can mend; its text is one line that says where, what, and what is allowed."""


class RunEnded(RuntimeError):
    """A run that ended before its time, for a reason that its text tells in one line."""


class ConfigError(UserError):
    """A mistake in the configuration."""


def reason_of(error: Exception) -> str:
    """Another library's error on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def first_mistake(error: ValidationError) -> str:
    """The first mistake that pydantic found, as `key: what is wrong`."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where + ': ' if where else ''}{first['msg']}"


class Part(BaseModel):
    """One entry of the catalogue: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Size(Part):
    """A ViT's dimensions. `image_size` and `patch_size` are in pixels."""

    name: Name
    dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    patch_size: PositiveInt = 16
    image_size: PositiveInt = 224
    channels: PositiveInt = 3

    @model_validator(mode="after")
    def _divides(self) -> "Size":
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        return self

    @property
    def grid_size(self) -> tuple[int, int]:
        """Patches as (rows, columns)."""
        return (self.image_size // self.patch_size,) * 2


class Variant(Part):
    """An attention operator and the skeleton it sits in; the defaults are the Softmax ViT's own."""

    name: Name
    target: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]
    """`package.module:Class`; the class need not be in this package."""
    kwargs: dict[str, Any] = {}
    class_token: bool = True
    positions: Literal["learned", "sincos"] = "learned"
    pool: Literal["token", "avg"] = "token"
    analytic_inits: bool = True
    """Whether Mimetic and Impulse are defined: they shape a standard QK^T and V-proj product."""
    attention_map: bool = False
    """Whether the operator has a map that map distillation can match."""

    @model_validator(mode="after")
    def _pools_what_it_has(self) -> "Variant":
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool 'token' needs class_token: true; allowed without one: 'avg'")
        return self


class VariantEntry(Variant):
    """A variant in the catalogue, with what tells which losses are defined for it; runs do not depend on that."""

    head_outputs: bool = True
    """Whether the output projection takes the outputs of the heads alone, as wide as Softmax attention's."""
    map_distribution: bool = False
    """Whether the map's rows are distributions, without negative entries, as cross-entropy needs."""

    @model_validator(mode="after")
    def _has_the_map(self) -> "VariantEntry":
        if self.map_distribution and not self.attention_map:
            raise ValueError("map_distribution: true needs attention_map: true")
        return self

    @property
    def distilled(self) -> dict[str, tuple[str, ...]]:
        """What a loss can match of it: the targets, each with its distances."""
        losses = dict(DISTANCES)
        if not self.head_outputs:
            del losses["heads"]
        if not self.attention_map:
            del losses["map"]
        elif not self.map_distribution:
            losses["map"] = ("mse",)
        return losses

    def settings(self) -> Variant:
        return Variant(**self.model_dump(exclude={"head_outputs", "map_distribution"}))


class Distill(Part):
    """The auxiliary attention-matching loss. A weight of None is the recipe's `distill_weight`."""

    target: Literal["output", "heads", "map"] = "output"
    """The attention module's output, the heads' outputs before its projection, or the attention map."""
    distance: Literal["mse", "l2", "cross_entropy"] = "mse"
    weight: PositiveFloat | None = None
    reduction: Literal["mean", "sum"] = "mean"
    """Over blocks."""

    @property
    def loss(self) -> str:
        """Its name in tables: the target, with the distance where that is not mean-squared (`map-cross_entropy`)."""
        return self.target if self.distance == "mse" else f"{self.target}-{self.distance}"

    @model_validator(mode="after")
    def _compares_alike(self) -> "Distill":
        allowed = DISTANCES[self.target]
        if self.distance not in allowed:
            raise ValueError(
                f"distance {self.distance!r} is not defined for target {self.target!r}; allowed: {_names(allowed)}"
            )
        return self


class Init(Part):
    """An initialisation: weights to copy, an analytic start, a distillation loss, in any combination."""

    name: Name
    copied: tuple[Group, ...] = Field(default=(), alias="copy")
    analytic: Literal["mimetic", "impulse"] | None = None
    distill: Distill | None = None
    train: bool = True
    """False: evaluate the copied model as it is (the Softmax reference on its own data set)."""

    model_config = ConfigDict(serialize_by_alias=True)

    @model_validator(mode="after")
    def _composes(self) -> "Init":
        if len(set(self.copied)) < len(self.copied):
            raise ValueError("copy names a group twice")
        if self.analytic and "attention" in self.copied:
            raise ValueError(f"analytic {self.analytic!r} and copy of 'attention' would both set the attention")
        if not self.train and (self.distill or "head" not in self.copied):
            raise ValueError("train: false needs copy to hold 'head' and no distill")
        return self

    @property
    def needs_source(self) -> bool:
        return bool(self.copied or self.distill)


class Dataset(Part):
    """Where labelled images come from: exactly one of `torchvision`, `timm`, `folder`, `npz`, `idx`.

    `train` and `test` are the keyword arguments (torchvision, timm) or the file names (folder, npz, idx) of the
    two splits. Classes, and sizes where given, are checked on load.
    """

    name: Name
    torchvision: str | None = None
    timm: str | None = None
    """`hfds/` and a folder of Hugging Face or WebDataset shards; timm's other readers stream, or have a key here."""
    folder: str | None = None
    npz: str | None = None
    idx: str | None = None
    train: dict[str, Any] | str | None = None
    test: dict[str, Any] | str | None = None
    classes: PositiveInt
    class_names: str | None = None
    """A file, or `package:file`, with a class a line in the order of labels: folders are named by one, or by its
    number. Without it, labels are places in the sorted folder names."""
    subset: str | None = None
    """A file like `class_names` with the classes that occur; logits of the others are dropped."""
    test_of: str | None = None
    """The data set of which this is a further test split, out of distribution; its models alone see it."""
    train_size: PositiveInt | None = None
    test_size: PositiveInt | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[PositiveFloat, ...] = IMAGENET_STD

    @model_validator(mode="after")
    def _has_one_reader(self) -> "Dataset":
        _exactly_one(self, ("torchvision", "timm", "folder", "npz", "idx"))
        reader = "torchvision" if self.torchvision else "timm" if self.timm else None
        for split in ("train", "test"):
            if reader and not isinstance(getattr(self, split), dict | None):
                raise ValueError(f"{split} of a {reader} data set is a mapping of its keyword arguments")
            if not reader and not isinstance(getattr(self, split), str | None):
                raise ValueError(f"{split} of this data set is a name; keyword arguments are for torchvision and timm")
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std differ in length")
        return self

    @model_validator(mode="after")
    def _is_read_by_number(self) -> "Dataset":
        if self.timm and not re.match(r"hfds/.", self.timm):
            raise ValueError(f"timm {self.timm!r} gives images in no fixed order; allowed: hfds/ and a folder")
        return self

    @model_validator(mode="after")
    def _is_whole_or_a_test_split(self) -> "Dataset":
        if self.subset and not (self.class_names and self.test_of):
            raise ValueError("subset needs class_names and test_of")
        if self.test_of and (self.train or self.train_size):
            raise ValueError(f"a test split of {self.test_of!r} has neither train nor train_size")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test",) if self.test_of else ("train", "test")


class DatasetEntry(Dataset):
    """A data set in the catalogue, with the recipe it is trained by: one name, or one a size.

    One that is a `test_of` another has none.
    """

    recipe: str | dict[str, str] | None = None

    def recipe_for(self, size: str) -> str:
        if isinstance(self.recipe, str):
            return self.recipe
        if size not in self.recipe:
            raise ConfigError(f"datasets.{self.name}.recipe: none for size {size!r}; it has {_names(self.recipe)}")
        return self.recipe[size]

    def settings(self) -> Dataset:
        return Dataset(**self.model_dump(exclude={"recipe"}))


class Recipe(Part):
    """How a model is trained. `lr` is absolute: it is never rescaled by the batch size."""

    name: Name
    epochs: PositiveInt
    warmup_epochs: NonNegativeInt = 0
    batch_size: PositiveInt = 512
    """Images in an update, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Images in one forward pass of a rank, whose gradients are added up; by default its whole part of the batch."""
    lr: PositiveFloat = 2e-3
    min_lr: NonNegativeFloat = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.05
    clip_grad: PositiveFloat | None = 3.0
    label_smoothing: Fraction = 0.1
    drop_path: Fraction = 0.0
    distill_weight: PositiveFloat = 50.0
    crop_scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    crop_ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    flip: Fraction = 0.5
    color_jitter: NonNegativeFloat = 0.4
    auto_augment: Annotated[str, StringConstraints(pattern=AUTO_AUGMENT)] | None = None
    """timm's notation, such as `rand-m9-mstd0.5-inc1`."""
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    random_erasing: Fraction = 0.0
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 0.9
    eval_every: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward passes. "auto": bfloat16 on GPUs that have it, else float32; `metrics.json` says which."""
    compile: bool = False
    """Whether the model is compiled by torch for training."""
    grad_checkpointing: bool = False
    """Whether blocks are computed again in the backward pass, which takes less memory and more time."""

    @model_validator(mode="after")
    def _is_ordered(self) -> "Recipe":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} must be below epochs {self.epochs}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        for key in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"{key} {[low, high]} is not [low, high]")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale {list(self.crop_scale)} must lie within (0, 1]")
        return self


class TrainEntry(Part):
    """A source that the pipeline trains itself: a Softmax ViT on a named data set by a named recipe."""

    dataset: str
    recipe: str
    seed: Seed = 0


class SourceEntry(Part):
    """A pre-trained Softmax ViT of one size: exactly one of `timm`, `url` (with `sha256`), `path`, `train`.

    `path` is a file, relative to the working directory, or `package:file` for one inside a package.
    """

    timm: str | None = None
    url: str | None = None
    path: str | None = None
    train: TrainEntry | None = None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None

    @model_validator(mode="after")
    def _has_one_origin(self) -> "SourceEntry":
        _exactly_one(self, ("timm", "url", "path", "train"))
        if self.url and not self.sha256:
            raise ValueError("url needs sha256")
        if self.sha256 and not (self.url or self.path):
            raise ValueError("sha256 is for url and path")
        return self


class Block(Part):
    """One product of axes; a grid is the union of its blocks."""

    datasets: tuple[str, ...] = Field(min_length=1)
    sizes: tuple[str, ...] = Field(min_length=1)
    variants: tuple[str, ...] = Field(min_length=1)
    inits: tuple[str, ...] = Field(min_length=1)
    sources: tuple[str, ...] = ()
    seeds: tuple[Seed, ...] = Field(min_length=1)
    recipe: str | None = None
    """In place of each data set's own; the run's name then says so."""
    ood: tuple[str, ...] = ()
    """Further test splits of the block's data set, on which its trained models are evaluated too."""
    purpose: str = Field(default="", max_length=48, alias="for")
    """The tables and figures that need its runs, for `linvit plan`; blocks may share one."""

    @field_validator("datasets", "sizes", "variants", "inits", "sources", "seeds", "ood")
    @classmethod
    def _is_unique(cls, values: tuple) -> tuple:
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"named twice: {_names(map(str, twice))}")
        return values


class Study(Part):
    """A whole `config.yaml`: the catalogue, the named grids, and which grid to run."""

    grid: str
    results: str = "results"
    data: str = "data"
    """The folder that torchvision and folder data sets are looked for in."""
    download: bool = False
    """Whether missing torchvision data sets may be downloaded."""
    sizes: dict[Name, Size]
    variants: dict[Name, VariantEntry]
    inits: dict[Name, Init]
    recipes: dict[Name, Recipe]
    datasets: dict[Name, DatasetEntry]
    sources: dict[Name, dict[str, SourceEntry]] = {}
    grids: dict[Name, tuple[Block, ...]]

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
                if source.train:
                    self._check_trained_on(f"sources.{name}.{size}.train.dataset", source.train.dataset)
                    _known(f"sources.{name}.{size}.train.recipe", source.train.recipe, self.recipes)
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
            raise ValueError(f"{key}.recipe: missing")
        recipes = [dataset.recipe] if isinstance(dataset.recipe, str) else dataset.recipe.values()
        for recipe in recipes:
            _known(f"{key}.recipe", recipe, self.recipes)
        for size in () if isinstance(dataset.recipe, str) else dataset.recipe:
            _known(f"{key}.recipe", size, self.sizes)

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
        _refuse_exotic(config)
        # Through JSON, so that lists become tuples while a string never becomes a number.
        return Study.model_validate_json(json.dumps(_with_names(config)))
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_one_line(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def load_study(path: str | Path, **overrides: Any) -> Study:
    """Read and check a configuration file; `overrides` replace top-level keys."""
    config = read_yaml(path)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(config).__name__}")
    return study_from({**config, **overrides}, str(path))


def read_yaml(path: str | Path) -> Any:
    """Parse YAML, refusing a key that stands twice in one mapping (plain YAML keeps the last, silently)."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a text that is no UTF-8, a date that is none
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As written: once merge keys (`<<`) are resolved, an overridden key stands twice too."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {twice[0]!r}", node.start_mark)
        return node


def resolve_class(target: str) -> type:
    """The class that `package.module:Class` names."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"target {target!r} cannot be imported: {error}") from None


def _refuse_exotic(value: Any, where: str = "") -> None:
    """Refuse what YAML reads from a slip of the pen: keys that are no text, dates, bytes."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where or 'config'}: key {key!r} is read as {type(key).__name__}; quote it")
            _refuse_exotic(entry, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _refuse_exotic(entry, f"{where}.{index}")
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        raise ConfigError(f"{where}: {value!s} is read as a {kind}; allowed: text, numbers, true, false")


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


def _exactly_one(part: Part, keys: tuple[str, ...]) -> None:
    given = [key for key in keys if getattr(part, key) is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of {_names(keys)} is needed, found {_names(given) or 'none'}")


def _known(key: str, value: str, allowed: Mapping) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not defined; allowed: {_names(allowed)}")


def _names(values: Any) -> str:
    return ", ".join(values)


def _one_line(error: ValidationError) -> str:
    """The first mistake as `key: what is wrong; allowed: ...`, and how many more there are."""
    first, *more = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        message = f"unknown key; allowed: {_names(_allowed_keys(first['loc'][:-1]))}"
    elif first["type"] == "missing":
        message = "missing"
    else:
        message = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"])
    rest = f" (and {len(more)} more {'mistakes' if len(more) > 1 else 'mistake'})" if more else ""
    return " ".join(f"{key}: {message}{rest}".split()) if key else f"{message}{rest}"


def _allowed_keys(location: tuple) -> list[str]:
    """The keys of the part at a place in the configuration, as a person writes them."""
    part: type[Part] = Study
    if location:
        table, *path = location
        # The first steps are names and numbers; what follows are keys of the entry.
        part, depth = {"sources": (SourceEntry, 2), "grids": (Block, 2)}.get(table, (None, 1))
        part = part or Study.model_fields[table].annotation.__args__[1]
        for key in path[depth:]:
            part = {"train": TrainEntry, "distill": Distill}.get(key, part)
    return [field.alias or key for key, field in part.model_fields.items() if key != "name"]
