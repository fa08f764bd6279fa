"""What ships with the package: a Softmax ViT that knows Fashion-MNIST, with the story of its making."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from linvit import data, datasets, sources
from linvit.config import load_study
from linvit.evaluate import evaluate
from linvit.files import resource
from linvit.grid import source_of
from linvit.init import CopyWeights
from linvit.init.copy import GROUPS
from linvit.vit import build_vit

STUDY = load_study(Path(__file__).parent.parent / "config.yaml")
PATH = "linvit.embedded:fashion_vit.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """The shipped source with its own head."""
    folder = tmp_path_factory.mktemp("source")
    sources.fetch(source_of(STUDY, "fashion", "mini"), folder)
    vit = build_vit(STUDY.sizes["mini"], num_classes=10)
    CopyWeights(sources.load(folder), frozenset(GROUPS))(vit)
    return vit


@pytest.mark.parametrize("name", ["fashion-1k", "fashion-mnist"])
def test_it_classifies_test_images(model: torch.nn.Module, name: str) -> None:
    dataset = STUDY.datasets[name].settings()
    if dataset.idx and not Path(dataset.idx).is_dir():
        pytest.skip("the full Fashion-MNIST is not installed")
    batches = data.evaluation_batches(
        datasets.read(dataset, "test", "data"), dataset, STUDY.recipes["fashion-source"], STUDY.sizes["mini"]
    )
    assert evaluate(model, batches)["top1"] >= 84


def test_it_carries_its_provenance_and_is_small() -> None:
    path = Path(str(resource(PATH)))
    assert path.stat().st_size <= 1_000_000
    with safe_open(path, "pt") as file:
        provenance = json.loads(file.metadata()["linvit"])
    made = source_of(STUDY, "fashion-trained", "mini").train
    # The catalogue still says how it was made.
    assert provenance["spec"] == json.loads(made.to_json())
    assert provenance["top1"] >= 84
    assert made.dataset.train == "train"
    assert made.dataset.test == "t10k"
