"""A study that runs in well under a second: 16-pixel images of three classes, a ViT of two blocks, 16 wide."""

import json
from pathlib import Path

import numpy as np
import torch

from linvit import sources
from linvit.config import Dataset, Init, Recipe, Size, load_study
from linvit.grid import RunSpec, Source
from linvit.vit import build_vit

torch.set_num_threads(1)

CONFIG = Path(__file__).parents[1] / "config.yaml"
STUDY = load_study(CONFIG)

CLASSES, TRAIN, TEST = 3, 21, 12
SIZE = Size(name="wee", dim=16, depth=2, heads=2, patch_size=4, image_size=16, channels=1)
RGB = SIZE.model_copy(update={"channels": 3})
RECIPE = Recipe(
    name="short",
    epochs=3,
    warmup_epochs=1,
    batch_size=8,
    crop_scale=(0.5, 1.0),
    color_jitter=0.2,
    eval_crop=1.0,
    interpolation="bilinear",
)
COPIES = ("attention", "mlp", "norms", "patch_embed", "positions", "class_token")
TIMINGS = {"wall_seconds", "peak_memory_bytes", "train_images_per_second", "eval_images_per_second", "commit", "sha256"}
"""The keys of metrics.json that may differ between two runs of one spec."""


def arrays(n: int, *, side: int = 16, channels: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright band at a place of its own for each class: bytes [n, H, W(, C)] and labels [n]."""
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % CLASSES
    images = generator.integers(0, 160, (n, side, side) + ((channels,) if channels else ()))
    for image, label in zip(images, labels, strict=True):
        image[label * side // CLASSES : (label + 1) * side // CLASSES] += 80
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_npz(path: Path, *, train: int = TRAIN, test: int = TEST, **shape) -> Path:
    train_images, train_labels = arrays(train, seed=1, **shape)
    test_images, test_labels = arrays(test, seed=2, **shape)
    np.savez(
        path,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )
    return path


def dataset(path: Path | str, channels: int = 1, **changes) -> Dataset:
    fields = {
        "name": "bands",
        "npz": str(path),
        "classes": CLASSES,
        "train_size": TRAIN,
        "test_size": TEST,
        "mean": (0.4,) * channels,
        "std": (0.2,) * channels,
    }
    return Dataset(**fields | changes)


def changed(part, **changes):
    """A part of the study with some fields replaced, checked again."""
    return type(part).model_validate_json(json.dumps(json.loads(part.model_dump_json(by_alias=True)) | changes))


def init(name: str, weight: float = 50.0) -> Init:
    """An initialisation of config.yaml as a grid gives it to a run: with its weight filled in."""
    found = STUDY.inits[name]
    if found.distill is None:
        return found
    return found.model_copy(update={"distill": found.distill.model_copy(update={"weight": weight})})


def spec(path: Path | str, variant: str = "relu", start: str | Init = "random", **changes) -> RunSpec:
    """A run on the npz file at `path`."""
    fields = {
        "dataset": dataset(path),
        "size": SIZE,
        "variant": STUDY.variants[variant].settings(),
        "init": init(start) if isinstance(start, str) else start,
        "recipe": RECIPE,
        "seed": 0,
    }
    return RunSpec(**fields | changes)


def source(size: Size = SIZE, **origin) -> Source:
    return Source(name="old", size=size, **(origin or {"path": "old.safetensors"}))


def softmax_weights(size: Size = SIZE, classes: int = CLASSES, seed: int = 7) -> dict[str, torch.Tensor]:
    """A Softmax ViT's state dict, every tensor of it random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = build_vit(size, num_classes=classes).state_dict()
        return {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in state.items()}


def store_source(folder: Path, size: Size = SIZE, **options) -> Source:
    """Prepare a stand-in source under `folder`, as the rule `source` would."""
    prepared = source(size)
    sources.store(softmax_weights(size, **options), prepared, folder / prepared.folder, {"path": "made up"})
    return prepared


def repeatable(metrics: dict) -> dict:
    """What must be bit-identical when a spec is run again."""
    return {key: value for key, value in metrics.items() if key not in TIMINGS}


def study_config(npz: Path) -> dict:
    """A whole configuration around the npz file, as a mapping."""
    return {
        "grid": "all",
        "sizes": {"wee": json.loads(SIZE.model_dump_json(exclude={"name"}))},
        "variants": {"relu": {"target": "linvit.attention.kernel:ReluAttention"}},
        "inits": {"random": None, "copy": {"copy": ["attention"]}},
        "sources": {"old": {"wee": {"path": "old.safetensors"}}},
        "recipes": {"short": json.loads(RECIPE.model_dump_json(exclude={"name"}))},
        "datasets": {
            "bands": {"npz": str(npz), "classes": CLASSES, "mean": [0.4], "std": [0.2], "recipe": "short"},
        },
        "grids": {
            "all": [
                {
                    "datasets": ["bands"],
                    "sizes": ["wee"],
                    "variants": ["relu"],
                    "inits": ["random", "copy"],
                    "sources": ["old"],
                    "seeds": [0, 1],
                }
            ]
        },
    }


def one_line(error: BaseException | str) -> str:
    """The text of an error meant for a person, after checking that it is a single non-empty line."""
    text = str(error)
    assert text.strip(), "the error says nothing"
    assert "\n" not in text, text
    return text
