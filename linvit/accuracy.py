"""A model's accuracy on a data set's test split: a run's own, one out of distribution [arXiv:2609.35745, Table 2], or
that of a model in a folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm.data
import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt, ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit import data, datasets
from linvit.config import ConfigError, Dataset, Part, Recipe, Size, first_mistake
from linvit.config.parts import Crop
from linvit.device import pick_device
from linvit.evaluate import evaluate
from linvit.folders import CONFIG, has_config, load, read_config
from linvit.run import git_commit, versions
from linvit.trained import MODEL, load_model


class Restricted(nn.Module):
    """A classifier [B, ...] -> [B, n] that can only answer with some of its labels: the others' logits are -inf."""

    def __init__(self, model: nn.Module, labels: list[int], classes: int) -> None:
        super().__init__()
        self.model = model
        dropped = torch.ones(classes, dtype=torch.bool)
        dropped[labels] = False
        self.register_buffer("dropped", dropped)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).masked_fill(self.dropped, -torch.inf)


@dataclass(frozen=True)
class Opened:
    """A model, what it is told by in results, and how its images are prepared."""

    model: VisionTransformer
    origin: dict[str, Any]
    statistics: dict[str, tuple[float, ...]]
    recipe: Recipe
    size: Size


def accuracy_of(folder: Path, dataset: Dataset, *, data_root: Path, workers: int = 0) -> dict[str, Any]:
    """Top-1 and top-5 in percent of the model in a folder, converted or a run's, and what they were found on.

    Images are prepared as for the run's own test split, with its statistics; for a converted model as its
    configuration says.

    Raises:
        UserError: there is no model, or the data set is not there or is none of the model's.
    """
    opened = _converted(folder, dataset) if has_config(folder) else _of_run(folder, dataset)
    device, images = pick_device(), datasets.read(dataset, "test", data_root)
    restricted = Restricted(opened.model, datasets.scored_labels(dataset), dataset.classes).to(device)
    prepared = dataset.model_copy(update=opened.statistics)
    batches = data.evaluation_batches(images, prepared, opened.recipe, opened.size, device=device, workers=workers)
    return {
        **opened.origin,
        "dataset": json.loads(dataset.model_dump_json(exclude_defaults=True)),
        "images": len(images),
        **evaluate(restricted, batches, opened.recipe.precision),
        "versions": versions(),
        "commit": git_commit(),
    }


def _of_run(run: Path, dataset: Dataset) -> Opened:
    spec, model = load_model(run / MODEL)
    if spec.dataset.name not in (dataset.name, dataset.test_of):
        raise ConfigError(f"data set {dataset.name!r} is no test split of {spec.dataset.name!r} (test_of)")
    _check_classes(spec.dataset.classes, dataset)
    statistics = {"mean": spec.dataset.mean, "std": spec.dataset.std}
    return Opened(model, {"run": json.loads(spec.to_json())}, statistics, spec.recipe, spec.size)


class Preparation(Part):
    """How a model's images are prepared, as timm's configurations say it."""

    model_config = ConfigDict(extra="ignore")

    input_size: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: tuple[float, ...]
    std: tuple[PositiveFloat, ...]
    crop_pct: Crop
    interpolation: Literal["bilinear", "bicubic"]


def _converted(folder: Path, dataset: Dataset) -> Opened:
    model, config = load(folder), read_config(folder)
    _check_classes(model.num_classes, dataset)
    own = timm.data.resolve_model_data_config(model)
    images = _images_of(own, config, folder / CONFIG)
    channels, height, width = own["input_size"]
    if height != width:
        raise ConfigError(f"{folder}: images of {height}x{width} pixels; allowed: square ones")
    for key in ("mean", "std"):
        if len(getattr(images, key)) != channels:
            found = len(getattr(images, key))
            raise ConfigError(f"{folder / CONFIG}: pretrained_cfg.{key}: found {found} values; allowed: {channels}")
    recipe = Recipe(name="evaluation", epochs=1, eval_crop=images.crop_pct, interpolation=images.interpolation)
    size = Size.model_construct(
        name="converted",
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=model.blocks[0].attn.num_heads,
        image_size=height,
        channels=channels,
    )
    origin = {key: config[key] for key in ("architecture", "model_args", "linvit") if key in config}
    return Opened(model, {"model": origin}, {"mean": images.mean, "std": images.std}, recipe, size)


def _images_of(own: dict[str, Any], config: dict[str, Any], path: Path) -> Preparation:
    """What the configuration says, and for what it leaves out, what timm says of the model itself."""
    told = {key: value for key, value in config.get("pretrained_cfg", config).items() if value is not None}
    try:
        return Preparation.model_validate_json(json.dumps(own | told))
    except ValidationError as error:
        raise ConfigError(f"{path}: pretrained_cfg.{first_mistake(error, Preparation)}") from None


def _check_classes(classes: int, dataset: Dataset) -> None:
    if classes != dataset.classes:
        raise ConfigError(f"the model has {classes} classes, data set {dataset.name!r} {dataset.classes}")
