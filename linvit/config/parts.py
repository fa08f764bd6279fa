"""What a study is made of: the entries of the catalogue and of the grids in `config.yaml`.

Every part is a frozen pydantic model that refuses unknown keys.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from linvit.config.errors import ConfigError
from linvit.config.mistakes import dotted, names, number_of, shown

NO_SOURCE = "none"
"""In place of a source's name, in runs that use none."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _that(holds: Callable[[Any], object], allowed: str) -> AfterValidator:
    """Values for which something holds, which a message puts into words."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"found {shown(value)}; allowed: {allowed}")
        return value

    return AfterValidator(check)


def _like(pattern: str, allowed: str) -> AfterValidator:
    """Text that matches a pattern."""
    return _that(re.compile(pattern).fullmatch, allowed)


LARGEST = 2**31 - 1
"""Of counts; more than any model, data set or schedule has."""
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Deviation = Annotated[float, Field(gt=0, le=1)]
# Below, float32 has hardly a draw between 0 and 1 left, and torch refuses the smallest.
Alpha = Annotated[float, Field(ge=0), _that(lambda alpha: alpha == 0 or alpha >= 0.01, "0, or 0.01 and above")]
Beta = Annotated[float, Field(ge=0, lt=1)]
CHANNELS = (1, 3)
"""Of an image: grey, or red, green and blue."""
Channels = Annotated[int, _that(CHANNELS.__contains__, "1 or 3")]
# Images are resized to a model's side over it.
Crop = Annotated[float, Field(ge=0.1, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, _like(r".+", "text that is not empty")]
# Names become folders: no separators, no dot at either end.
Name = Annotated[
    str,
    _like(
        r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9_-])?",
        "up to 64 of the letters a to z and A to Z, digits, '_', '-' and '.'; first a letter or digit, last no '.'",
    ),
]
Folder = Annotated[str, _like(r"(?!~)[^{}]+", "the path of a folder, without { and }, its ~ written out")]
Target = Annotated[
    str,
    _like(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", "package.module:Class, or file:Class of a file beside config.yaml"),
]
Sha256 = Annotated[str, _like(r"[0-9a-f]{64}", "64 digits 0 to 9 and a to f")]
_NUMBER = r"\d+(\.\d+)?"
_POSITIVE = rf"(?=[\d.]*[1-9]){_NUMBER}"
# timm drops a section without a number, and stops at another one that it does not know.
_POLICIES = (
    rf"rand(-(m\d+|n[1-9]\d*|p(0(\.\d+)?|1(\.0+)?)|mstd{_NUMBER}|mmax\d+|inc[01]|t(weights|3a|3aw)))*",
    rf"augmix(-(m\d+|w[1-9]\d*|d\d+|a{_POSITIVE}|b[01]|mstd{_NUMBER}))*",
    rf"(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})*",
)
AutoAugment = Annotated[
    str,
    _like(
        "|".join(_POLICIES),
        "timm's notation: rand with m, n, p, mstd, mmax, inc and t; augmix with m, w, d, a, b and mstd; "
        "original, originalr, v0, v0r and 3a with mstd; such as rand-m9-mstd0.5-inc1",
    ),
]
Group = Literal["attention", "mlp", "norms", "patch_embed", "class_token", "positions", "head"]
"""The groups of weights a copy can name; `linvit.init.copy` says which parameter is in which."""
DISTANCES = {"output": ("mse", "l2"), "heads": ("mse",), "map": ("mse", "cross_entropy")}
"""What a distillation loss can match, and by which distances; `linvit.distill` has the formulas."""


class Part(BaseModel):
    """One entry of the catalogue: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Size(Part):
    """A ViT's dimensions. `image_size` and `patch_size` are in pixels."""

    name: Name
    dim: PositiveInt
    """Width of a token; a multiple of `heads`."""
    depth: PositiveInt
    """Blocks."""
    heads: PositiveInt
    """Attention heads of a block."""
    patch_size: PositiveInt = 16
    """Side of a patch in pixels."""
    image_size: PositiveInt = 224
    """Side of an image in pixels; a multiple of `patch_size`."""
    channels: Channels = 3
    """1 for grey images, 3 for colour."""

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
    target: Target
    """`package.module:Class`; the class need not be in this package."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the class's constructor."""
    class_token: bool = True
    """Whether there is one; false for operators that take patch tokens alone."""
    positions: Literal["learned", "sincos"] = "learned"
    """Learned embeddings, as in DeiT, or fixed 2-D sine and cosine waves."""
    pool: Literal["token", "avg"] = "token"
    """What the classifier sees: the class token, or the mean of the patch tokens."""
    analytic_inits: bool = True
    """Whether Mimetic and Impulse are defined: they shape a standard QK^T and V-proj product."""
    attention_map: bool = False
    """Whether the operator has a map that map distillation can match."""

    @field_validator("kwargs")
    @classmethod
    def _means_its_numbers(cls, kwargs: dict) -> dict:
        _refuse_numbers_as_text(kwargs)
        return kwargs

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
    """Mean-squared error; for outputs also the L2 distance, for maps cross-entropy."""
    weight: PositiveFloat | None = None
    """lambda, by which the loss is multiplied."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over blocks."""

    @property
    def loss(self) -> str:
        """Its name in tables: the target, with the distance where that is not mean-squared (`map-cross_entropy`).

        The reduction over blocks is named where it is not the usual one: the sum in Attention Transfer, else the mean.
        """
        name = self.target if self.distance == "mse" else f"{self.target}-{self.distance}"
        usual = "sum" if self.distance == "cross_entropy" else "mean"
        return name if self.reduction == usual else f"{name}-{self.reduction}"

    @model_validator(mode="after")
    def _compares_alike(self) -> "Distill":
        allowed = DISTANCES[self.target]
        if self.distance not in allowed:
            raise ValueError(
                f"distance {self.distance!r} is not defined for target {self.target!r}; allowed: {names(allowed)}"
            )
        return self


class Init(Part):
    """An initialisation: weights to copy, an analytic start, a distillation loss, in any combination."""

    name: Name
    copied: tuple[Group, ...] = Field(default=(), alias="copy")
    """Groups of weights that come from the source."""
    analytic: Literal["mimetic", "impulse"] | None = None
    """A start of the attention that is computed, without a source."""
    distill: Distill | None = None
    """The loss that is added to the task's, with the source as the teacher; `{}` is the paper's."""
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
    torchvision: Text | None = None
    """Name of a class of `torchvision.datasets`."""
    timm: Text | None = None
    """`hfds/` and a folder of Hugging Face or WebDataset shards; timm's other readers stream, or have a key here."""
    folder: Text | None = None
    """A folder of images, a folder a class in each split; relative to `data`."""
    npz: Text | None = None
    """A file with a split's images and labels as arrays, or `package:file`."""
    idx: Text | None = None
    """A folder of idx files, as MNIST's kin are published."""
    train: dict[str, Any] | str | None = None
    """The training split: keyword arguments for torchvision and timm, a name for folder and idx."""
    test: dict[str, Any] | str | None = None
    """The test split, given alike."""
    classes: PositiveInt
    """How many there are."""
    class_names: Text | None = None
    """A file, or `package:file`, with a class a line in the order of labels: folders are named by one, or by its
    number. Without it, labels are places in the sorted folder names."""
    subset: Text | None = None
    """A file like `class_names` with the classes that occur; logits of the others are dropped."""
    test_of: str | None = None
    """The data set of which this is a further test split, out of distribution; its models alone see it."""
    train_size: PositiveInt | None = None
    """Images in the training split; checked when it is read."""
    test_size: PositiveInt | None = None
    """Images in the test split; checked when it is read."""
    mean: tuple[Fraction, ...] = IMAGENET_MEAN
    """Of pixels between 0 and 1, a value a channel: images are normalised by it."""
    std: tuple[Deviation, ...] = IMAGENET_STD
    """As `mean`."""

    @field_validator("train", "test")
    @classmethod
    def _means_its_numbers(cls, split: dict | str | None) -> dict | str | None:
        if isinstance(split, Mapping):
            _refuse_numbers_as_text(split)
        return split

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
    """A recipe's name, or one for each size."""

    def recipe_for(self, size: str) -> str:
        if isinstance(self.recipe, str):
            return self.recipe
        by_size = self.recipe or {}
        if size not in by_size:
            raise ConfigError(f"datasets.{self.name}.recipe: none for size {size!r}; it has {names(by_size)}")
        return by_size[size]

    def settings(self) -> Dataset:
        return Dataset(**self.model_dump(exclude={"recipe"}))


class Align(Part):
    """A stage before training: the attentions alone learn their teacher's outputs, on the teacher's own tokens.

    `lr` falls along half a cosine to the recipe's `min_lr`; data, optimizer and batches are the recipe's too.
    """

    epochs: PositiveInt
    """Over the training images; they come before the recipe's own."""
    lr: PositiveFloat = 2e-3
    """The learning rate it starts with."""


class Recipe(Part):
    """How a model is trained. `lr` is absolute: it is never rescaled by the batch size."""

    name: Name
    epochs: PositiveInt
    """Passes over the training split."""
    warmup_epochs: NonNegativeInt = 0
    """Of these, those in which the learning rate rises."""
    batch_size: PositiveInt = 512
    """Images in an update, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Images in one forward pass of a rank, whose gradients are added up; by default its whole part of the batch."""
    lr: PositiveFloat = 2e-3
    """The highest learning rate, of AdamW."""
    min_lr: NonNegativeFloat = 1e-6
    """The last step's, at the end of half a cosine."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: NonNegativeFloat = 0.05
    """Of matrices; vectors and positions have none."""
    clip_grad: PositiveFloat | None = 3.0
    """The largest norm of a gradient; null for no limit."""
    label_smoothing: Fraction = 0.1
    """The share of a label that all classes have in common."""
    drop_path: Fraction = 0.0
    """The chance that the last block is left out for an image; for the others it rises in a line from 0."""
    distill_weight: PositiveFloat = 50.0
    """lambda, where the initialisation's `distill` names none."""
    crop_scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """Random crops' share of the image's area, from and to."""
    crop_ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """Their width over their height, from and to."""
    flip: Fraction = 0.5
    """The chance that an image is mirrored."""
    color_jitter: NonNegativeFloat = 0.4
    """How far brightness, contrast and saturation may change, each by a factor of 1 minus to 1 plus this."""
    auto_augment: AutoAugment | None = None
    """timm's notation, such as `rand-m9-mstd0.5-inc1`."""
    mixup: Alpha = 0.0
    """Mixup's alpha; 0 for none."""
    cutmix: Alpha = 0.0
    """CutMix's alpha; 0 for none."""
    random_erasing: Fraction = 0.0
    """The chance that a rectangle of an image is filled with noise."""
    eval_crop: Crop = 0.9
    """The share of a test image's side that its central crop has."""
    eval_every: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """How images are resized."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward passes. "auto": bfloat16 on GPUs that have it, else float32; `metrics.json` says which."""
    compile: bool = False
    """Whether the model is compiled by torch for training."""
    grad_checkpointing: bool = False
    """Whether blocks are computed again in the backward pass, which takes less memory and more time."""
    align: Align | None = None
    """A stage before training, for runs with a source."""

    @property
    def passes(self) -> int:
        """Epochs in all: how often each training image is seen."""
        return self.epochs + (self.align.epochs if self.align else 0)

    @property
    def forward_size(self) -> int:
        """The most images in one forward pass, in training and in evaluation."""
        return self.micro_batch_size or self.batch_size

    @model_validator(mode="after")
    def _is_ordered(self) -> "Recipe":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} must be below epochs {self.epochs}")
        for key, rate in {"lr": self.lr, "align.lr": self.align.lr if self.align else self.lr}.items():
            if self.min_lr > rate:
                raise ValueError(f"min_lr {self.min_lr} is above {key} {rate}")
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
    """A name in `datasets`."""
    recipe: str
    """A name in `recipes`."""
    seed: Seed = 0
    """Of everything that is random in its training."""


class SourceEntry(Part):
    """A pre-trained Softmax ViT of one size: exactly one of `timm`, `url` (with `sha256`), `path`, `train`.

    `path` is a file, relative to the working directory, or `package:file` for one inside a package.
    """

    timm: Text | None = None
    """A model of timm's, whose weights its hub has."""
    url: Text | None = None
    """Where its file is downloaded from."""
    path: Text | None = None
    """Its file."""
    train: TrainEntry | None = None
    """The pipeline trains it, on a data set by a recipe."""
    sha256: Sha256 | None = None
    """The file's checksum, in hexadecimal digits; optional for `path`."""
    mean: tuple[Fraction, ...] | None = None
    """With `std`, of the images it was trained on, where these are not the data sets' own: runs from it use them."""
    std: tuple[Deviation, ...] | None = None
    """With `mean`."""

    @model_validator(mode="after")
    def _has_both_statistics(self) -> "SourceEntry":
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std go together, with a value a channel each")
        return self

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
    """Names in `datasets` that are no `test_of` another."""
    sizes: tuple[str, ...] = Field(min_length=1)
    """Names in `sizes`."""
    variants: tuple[str, ...] = Field(min_length=1)
    """Names in `variants`."""
    inits: tuple[str, ...] = Field(min_length=1)
    """Names in `inits`."""
    sources: tuple[str, ...] = ()
    """Names in `sources`; runs that need none are made once."""
    seeds: tuple[Seed, ...] = Field(min_length=1)
    """One run each."""
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
            raise ValueError(f"named twice: {names(map(str, twice))}")
        return values


def _exactly_one(part: Part, keys: tuple[str, ...]) -> None:
    given = [key for key in keys if getattr(part, key) is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of {names(keys)} is needed, found {names(given) or 'none'}")


def _refuse_numbers_as_text(value: Any, *steps: str | int) -> None:
    """Of arguments whose types only their receiver knows: `1e-6`, which YAML reads as text."""
    if isinstance(value, Mapping | list):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_numbers_as_text(entry, *steps, key)
    elif isinstance(value, str) and "e" in value.lower() and (number := number_of(value)):
        raise ValueError(f"{dotted(steps)} is the text {shown(value)}; allowed: the number; write {number}")
