"""Pre-trained Softmax ViTs from wherever they are, as one safetensors file in timm's layout with its provenance."""

import json
import logging
import math
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import timm
import timm.data
import torch
from pydantic import ConfigDict, PositiveFloat, ValidationError, model_validator
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from linvit import checkpoints
from linvit.config import IMAGENET_MEAN, IMAGENET_STD, Part, Size, UserError, first_mistake, reason_of
from linvit.files import replacing, resource, scratch, sha256_of, write_text
from linvit.grid import Source
from linvit.vit import build_vit

log = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"
MANIFEST = "source.json"
LEVELS = 64
"""Of a file's own history; each preparation adds one."""


class SourceError(UserError):
    """A checkpoint that is missing, damaged, or not the Softmax ViT it should be."""


@dataclass(frozen=True)
class Weights:
    """A Softmax ViT's parameters by timm's names, and the grid (rows, columns) its positions lie on."""

    tensors: dict[str, Tensor]
    grid_size: tuple[int, int]
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Mean and std that its training images were normalised by, where its history tells."""


def fetch(source: Source, folder: Path) -> dict:
    """Bring a source given by timm tag, URL or path into `folder` and return its manifest."""
    if source.timm:
        try:
            model = timm.create_model(source.timm, pretrained=True)
        except Exception as error:  # an unknown tag, no network, a broken download: timm and its hub raise many kinds
            raise SourceError(
                f"source {source.folder!r}: timm cannot give {source.timm!r}: {_reason(error)}"
            ) from error
        _check_heads(model, source)
        return store(model.state_dict(), source, folder, _timm_origin(source.timm, model))
    if source.url:
        return _fetch_url(source, folder)
    with as_file(resource(source.path)) as path:
        if not path.is_file():
            raise SourceError(f"source {source.folder!r}: no file {source.path!r}; put the checkpoint there")
        if source.sha256:
            _check_sha256(sha256_of(path), source.sha256, source.path)
        return _store_published(path, source, folder, {"path": source.path, "sha256": sha256_of(path)})


def _fetch_url(source: Source, folder: Path) -> dict:
    # The format is told by the path's suffix; a query may follow it.
    with scratch(folder / f"download{Path(urlsplit(source.url).path).suffix}") as path:
        try:
            torch.hub.download_url_to_file(source.url, str(path), progress=False)
        except (OSError, ValueError) as error:
            raise SourceError(f"source {source.folder!r}: cannot fetch {source.url}: {_reason(error)}") from error
        _check_sha256(sha256_of(path), source.sha256, source.url)
        return _store_published(path, source, folder, {"url": source.url, "sha256": source.sha256})


def _store_published(path: Path, source: Source, folder: Path, origin: dict) -> dict:
    """Store a file in its authors' layout, with what it says of its own history and what was left out of it."""
    try:
        checkpoint, metadata = checkpoints.read(path), _metadata(path)
        _check_history(metadata)
    except checkpoints.CheckpointError as error:
        raise SourceError(f"source {source.folder!r}: {source.path or source.url}: {error}") from error
    return store(checkpoint.tensors, source, folder, {**origin, **metadata, **checkpoint.conversion})


def _check_heads(model: torch.nn.Module, source: Source) -> None:
    """No tensor's shape tells how many heads it is of."""
    blocks = getattr(model, "blocks", None)
    heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None) if blocks else None
    if heads not in (None, source.size.heads):
        raise SourceError(
            f"source {source.folder!r}: {source.timm} has {heads} heads, size {source.size.name!r} {source.size.heads}"
        )


def _timm_origin(tag: str, model: torch.nn.Module) -> dict:
    """The tag, and how timm prepares images for it."""
    config = timm.data.resolve_model_data_config(model)
    statistics = {key: list(config[key]) for key in ("mean", "std")}
    images = {**statistics, "interpolation": config["interpolation"], "crop_pct": config["crop_pct"]}
    return {"timm": tag, "timm_version": timm.__version__, "images": images}


def store(tensors: dict[str, Tensor], source: Source, folder: Path, origin: dict) -> dict:
    """Check that these are a Softmax ViT's parameters of the source's size, write them, return the manifest."""
    _check_tensors(tensors, source.folder)
    weights = Weights(tensors, _grid_of(tensors, source))
    check(weights, source.size, source.folder)
    metadata = {"name": source.folder, "grid_size": list(weights.grid_size), **origin}
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(to_safetensors(tensors, {"linvit": json.dumps(metadata)}))
    manifest = {**metadata, "weights_sha256": sha256_of(folder / WEIGHTS)}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def load(folder: Path) -> Weights:
    """Read a stored source.

    Raises:
        SourceError: it is missing, its bytes are not those its manifest names, or the manifest not what they say.
    """
    command = f"linvit source {folder.parent.name}/{folder.name}"
    if not (folder / MANIFEST).exists():
        raise SourceError(f"{folder / MANIFEST}: not found; {command} prepares it, where config.yaml has that source")
    # Deleted, Snakemake would make them, too, but then runs that are done as well as those that need them.
    again = f"{command} makes both again, and no run that is done"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        found, expected = sha256_of(folder / WEIGHTS), manifest.pop("weights_sha256")
        grid_size, statistics = tuple(manifest["grid_size"]), _statistics_in(manifest)
    except FileNotFoundError as error:
        raise SourceError(f"{error.filename}: not found; {again}") from None
    except OSError as error:
        raise SourceError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{folder / MANIFEST}: damaged; {again}") from error
    if found != expected:
        raise SourceError(
            f"{folder / WEIGHTS}: is not what {folder / MANIFEST} says "
            f"(sha256 is {found}, expected {expected}); {again}"
        )
    # The weights say the same of themselves, and that is among the bytes that the checksum is of.
    if _metadata(folder / WEIGHTS).get("provenance") != manifest:
        raise SourceError(f"{folder / MANIFEST}: is not what {folder / WEIGHTS} says of itself; {again}")
    return Weights(load_file(folder / WEIGHTS), grid_size, statistics)


def to_safetensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    return save(
        # Cloned, since tensors that share memory cannot be stored.
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        metadata,
    )


def check(weights: Weights, size: Size, name: str) -> None:
    """Account for every parameter: those of a Softmax ViT of this size, with or without a head, and no other.

    The grid may differ from the size's: positions are resampled when copied.
    """
    found = {key: tensor.shape for key, tensor in weights.tensors.items()}
    classes = next(iter(found.get("head.weight", ())), 0)
    with torch.device("meta"):
        expected = build_vit(size, num_classes=classes).state_dict()
    shapes = {key: tensor.shape for key, tensor in expected.items()}
    shapes["pos_embed"] = (1, 1 + math.prod(weights.grid_size), size.dim)
    for problem, keys in (("lacks", shapes.keys() - found.keys()), ("has an unknown", found.keys() - shapes.keys())):
        if keys:
            raise SourceError(f"source {name!r} {problem} parameter {min(keys)!r} ({len(keys)} in all)")
    for key, shape in shapes.items():
        if tuple(found[key]) != tuple(shape):
            raise SourceError(
                f"source {name!r}: {key} has shape {list(found[key])}, expected {list(shape)} for size {size.name!r}"
            )


def _check_tensors(tensors: dict[str, Tensor], name: str) -> None:
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise SourceError(f"source {name!r} has an unknown parameter {key!r}, a {type(value).__name__}")
        if not checkpoints.is_stored(value) or not value.is_floating_point():
            raise SourceError(f"source {name!r}: {key} is no dense tensor of floats whose values are all in the file")
        if not value.isfinite().all():
            raise SourceError(f"source {name!r}: {key} holds values that are not finite (NaN or inf)")


def _grid_of(tensors: dict[str, Tensor], source: Source) -> tuple[int, int]:
    """The grid a checkpoint's positions lie on; a square one, as every published source has."""
    if "pos_embed" not in tensors:
        raise SourceError(f"source {source.folder!r} lacks parameter 'pos_embed': not a timm ViT's state dict")
    shape = list(tensors["pos_embed"].shape)
    patches = shape[1] - 1 if len(shape) == 3 else 0
    side = math.isqrt(max(patches, 0))
    if not side or side * side != patches:
        raise SourceError(f"source {source.folder!r}: pos_embed {shape} is no class token and square grid of positions")
    return side, side


def _metadata(path: Path) -> dict:
    """What an earlier `store` wrote into a safetensors file, under one key."""
    if path.suffix != ".safetensors":
        return {}
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    try:
        return {"provenance": json.loads(metadata["linvit"])} if "linvit" in metadata else {}
    except (ValueError, RecursionError) as error:
        raise checkpoints.CheckpointError(f"its metadata 'linvit' is no JSON: {reason_of(error)}") from error


def _check_history(metadata: dict) -> None:
    """Whether `load` will make of it what it finds: it would take for damage what no second fetch mends."""
    try:
        _check_levels(metadata)
        _statistics_in(json.loads(json.dumps(metadata, allow_nan=False)))  # NaN is not the same when it is read again
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = first_mistake(error, _Statistics) if isinstance(error, ValidationError) else reason_of(error)
        raise checkpoints.CheckpointError(
            f"its metadata 'linvit' is not what linvit source writes: {reason}"
        ) from error


def _check_levels(value: Any) -> None:
    """Readers and writers of JSON give up at a depth that is not always the same."""
    layer = [value]
    for _ in range(LEVELS):
        inner = (part.values() if isinstance(part, dict) else part if isinstance(part, list) else () for part in layer)
        layer = [value for values in inner for value in values]
    if layer:
        raise ValueError(f"more than {LEVELS} levels")


class _Statistics(Part):
    """Of a training's images, among what else is told of it."""

    model_config = ConfigDict(extra="ignore")

    mean: tuple[float, ...]
    std: tuple[PositiveFloat, ...]

    @model_validator(mode="after")
    def _is_of_the_same_channels(self) -> "_Statistics":
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std differ in length")
        return self


def _statistics_in(manifest: dict) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """From timm's configuration or the spec of a training by the pipeline, of this file or the one it was made of."""
    while "images" not in manifest and "spec" not in manifest:
        if "provenance" not in manifest:
            return None
        manifest = manifest["provenance"]
    defaults = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}  # which a spec leaves out
    found = manifest["images"] if "images" in manifest else defaults | manifest["spec"]["dataset"]
    statistics = _Statistics.model_validate_json(json.dumps(found))
    return statistics.mean, statistics.std


def _reason(error: Exception) -> str:
    """Its first line: what torch and timm say of a checkpoint goes on for a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_sha256(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise SourceError(f"{name}: sha256 is {found}, expected {expected}")
