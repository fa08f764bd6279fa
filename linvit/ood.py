"""A trained run on a further test split of its data set, out of distribution [arXiv:2609.35745, Table 2]."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from linvit import data, datasets
from linvit.config import ConfigError, Dataset
from linvit.device import pick_device
from linvit.evaluate import evaluate
from linvit.files import write_sealed
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


def evaluate_ood(run: Path, dataset: Dataset, out: Path, *, data_root: Path, workers: int = 0) -> dict:
    """Evaluate the model in a run's folder on one data set; write what was found into `out` and return it.

    Images are prepared as for the run's own test split, with its statistics.

    Raises:
        UserError: there is no model, or the data set is not there or is no test split of the run's.
    """
    device = pick_device()
    spec, model = load_model(run / MODEL)
    if dataset.test_of != spec.dataset.name:
        raise ConfigError(f"data set {dataset.name!r} is no test split of {spec.dataset.name!r} (test_of)")
    images = datasets.read(dataset, "test", data_root)
    restricted = Restricted(model, datasets.scored_labels(dataset), spec.dataset.classes).to(device)
    batches = data.evaluation_batches(images, spec.dataset, spec.recipe, spec.size, device=device, workers=workers)
    accuracy = evaluate(restricted, batches, spec.recipe.precision)
    found = {
        "run": json.loads(spec.to_json()),
        "dataset": json.loads(dataset.model_dump_json(exclude_defaults=True)),
        "images": len(images),
        "top1": accuracy["top1"],
        "top5": accuracy["top5"],
        "versions": versions(),
        "commit": git_commit(),
    }
    write_sealed(out, found)
    return found
