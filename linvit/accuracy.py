"""A model's accuracy on a data set's test split: a run's own, one out of distribution [arXiv:2609.35745, Table 2], or
that of a model in a folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm.data
import torch
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit import data, datasets
from linvit.config import ConfigError, Dataset, Recipe, Size, first_mistake
from linvit.device import pick_device
from linvit.evaluate import evaluate
from linvit.folders import CONFIG, load
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
    opened = _converted(folder, dataset) if (folder / CONFIG).is_file() else _of_run(folder, dataset)
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


def _converted(folder: Path, dataset: Dataset) -> Opened:
    model = load(folder)
    _check_classes(model.num_classes, dataset)
    images = timm.data.resolve_model_data_config(model)
    channels, height, width = images["input_size"]
    if height != width:
        raise ConfigError(f"{folder}: images of {height}x{width} pixels; allowed: square ones")
    try:
        recipe = Recipe(
            name="evaluation", epochs=1, eval_crop=images["crop_pct"], interpolation=images["interpolation"]
        )
    except ValidationError as error:
        raise ConfigError(f"{folder / CONFIG}: {first_mistake(error, Recipe)}") from None
    size = Size.model_construct(
        name="converted",
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=model.blocks[0].attn.num_heads,
        image_size=height,
        channels=channels,
    )
    statistics = {"mean": tuple(images["mean"]), "std": tuple(images["std"])}
    config = json.loads((folder / CONFIG).read_bytes())
    origin = {key: config[key] for key in ("architecture", "model_args", "linvit") if key in config}
    return Opened(model, {"model": origin}, statistics, recipe, size)


def _check_classes(classes: int, dataset: Dataset) -> None:
    if classes != dataset.classes:
        raise ConfigError(f"the model has {classes} classes, data set {dataset.name!r} {dataset.classes}")
