"""A pre-trained ViT as timm builds it: by its name there, in a folder that timm opens, or in a checkpoint's file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from linvit import checkpoints
from linvit.config import ConfigError, UserError, reason_of
from linvit.config.mistakes import meant, names
from linvit.folders import CONFIG, check_files
from linvit.sources import SourceError
from linvit.timm_models import LINVIT, OF_WEIGHTS, configuration_of


@dataclass(frozen=True)
class Pretrained:
    """A Softmax ViT as timm builds it, and how to get it with its weights."""

    architecture: str
    args: dict[str, Any]
    configuration: dict[str, Any]
    """timm's, of images and layers."""
    load: Callable[[], VisionTransformer]


def find(source: str, architecture: str | None, kwargs: dict[str, Any]) -> Pretrained:
    """The ViT that a source names; weights of timm's are not fetched yet.

    Args:
        source: timm's name of a model, with or without a tag; a folder that timm opens; or a checkpoint's file.
        architecture: timm's name of what a file's weights are of.
        kwargs: timm's arguments of the model.

    Raises:
        UserError: one line with what is not there, or is no model of timm's.
    """
    path = Path(source)
    if path.is_dir():
        return _of_folder(path, kwargs)
    if path.is_file():
        return _of_file(path, architecture, kwargs)
    _check_known(source, "no file, no folder, and no model of timm's")
    load = partial(timm.create_model, source, pretrained=True, **kwargs)
    return Pretrained(source, kwargs, configuration_of(source), partial(_loaded, source, load))


def _of_folder(path: Path, kwargs: dict[str, Any]) -> Pretrained:
    if not (path / CONFIG).is_file():
        raise SourceError(f"{path}: no {CONFIG}; allowed: a folder that timm opens, or of a finished run")
    try:
        config = json.loads((path / CONFIG).read_bytes())
        architecture, args = config["architecture"], dict(config.get("model_args", {}))
        images = {key: value for key, value in config["pretrained_cfg"].items() if key not in OF_WEIGHTS}
        classes = config.get("num_classes", images.get("num_classes"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{path / CONFIG}: not timm's: {reason_of(error)}") from error
    if architecture.startswith(LINVIT):
        raise SourceError(f"{path}: a {architecture}, which is linearised already; allowed: a Softmax ViT")
    _check_known(architecture, f"{path / CONFIG}: no model of timm's")
    check_files(path, config)
    load = partial(timm.create_model, f"local-dir:{path}", pretrained=True, **kwargs)
    configuration = images | {"architecture": LINVIT, "num_classes": classes}
    return Pretrained(architecture, args | kwargs, configuration, partial(_loaded, str(path), load))


def _of_file(path: Path, architecture: str | None, kwargs: dict[str, Any]) -> Pretrained:
    if architecture is None:
        raise ConfigError(
            f"{path}: a file's tensors do not tell their architecture; name it by --model, such as "
            "deit_small_patch16_224"
        )
    _check_known(architecture, "--model: no model of timm's")
    try:
        tensors = checkpoints.read(path, of_study=False).tensors
    except checkpoints.CheckpointError as error:
        raise SourceError(f"{path}: {error}") from error
    args = {"num_classes": len(tensors.get("head.weight", ()))} | kwargs
    return Pretrained(
        architecture, args, configuration_of(architecture), partial(_filled, path, architecture, args, tensors)
    )


def _filled(path: Path, architecture: str, args: dict[str, Any], tensors: dict[str, Tensor]) -> VisionTransformer:
    model = timm.create_model(architecture, **args)
    expected = model.state_dict()
    for problem, keys in (("lacks", expected.keys() - tensors.keys()), ("has", tensors.keys() - expected.keys())):
        if keys:
            raise SourceError(f"{path}: {problem} {min(keys)!r} ({len(keys)} in all), unlike a {architecture}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise SourceError(
                f"{path}: {name} has shape {list(tensors[name].shape)}, a {architecture} {list(tensor.shape)}; "
                "give what differs by --model-kwargs"
            )
    model.load_state_dict(tensors)
    return model


def _loaded(source: str, load: Callable[[], VisionTransformer]) -> VisionTransformer:
    try:
        return load()
    except Exception as error:  # no network, a broken download, a damaged file: timm and its hub raise many kinds
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise SourceError(
            f"{source}: timm cannot give its weights: {reason}; a file of them can be given in its place, with --model"
        ) from error


def _check_known(name: str, problem: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ConfigError(f"{problem}: {name!r}{meant(architecture, timm.list_models())}")
    tagged = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and name not in tagged:
        raise ConfigError(f"{name}: no weights of this tag; allowed: {names(tagged)}{meant(name, tagged)}")


def outline(pretrained: Pretrained) -> VisionTransformer:
    """The source without its values.

    Raises:
        ConfigError: it is no ViT of timm's `VisionTransformer` family, or refuses its arguments.
    """
    try:
        with torch.device("meta"):
            model = timm.create_model(
                pretrained.architecture, pretrained_cfg=pretrained.configuration, **pretrained.args
            )
    except UserError:
        raise
    except Exception as error:  # unknown arguments, or sizes that do not fit one another
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ConfigError(f"{pretrained.architecture}: refused its arguments: {reason}") from error
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"{pretrained.architecture}: a {type(model).__name__} cannot be linearised; allowed: timm's "
            "VisionTransformer and its subclasses"
        )
    return model
