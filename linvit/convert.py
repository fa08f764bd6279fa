"""From a pre-trained Softmax ViT, or a finished run, to a linear ViT in a folder that timm opens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from linvit import __version__, checkpoints
from linvit.config import ConfigError, Init, UserError, Variant, reason_of
from linvit.config.mistakes import meant
from linvit.folders import CONFIG, save
from linvit.init import initialize
from linvit.sources import SourceError
from linvit.timm_models import LINVIT, OF_WEIGHTS, configuration_of, register
from linvit.trained import MODEL, load_model
from linvit.vit import prefix_tokens

ANY_SIZE = "vit_small_patch16_224"
"""timm's plain ViT, of which a run's model is one; its arguments say the size."""


@dataclass(frozen=True)
class Pretrained:
    """A Softmax ViT as timm builds it, and how to get it with its weights."""

    architecture: str
    args: dict[str, Any]
    configuration: dict[str, Any]
    """timm's, of images and layers."""
    load: Callable[[], VisionTransformer]


def convert(
    source: str,
    folder: Path,
    *,
    variant: Variant,
    init: Init,
    blocks: Sequence[int] | None = None,
    architecture: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    seed: int = 0,
) -> VisionTransformer:
    """Make a linear ViT of a Softmax one, write it into a folder, and return it.

    The architecture, the operator and the initialisation are checked before weights are fetched.

    Args:
        source: timm's name of a model, with or without a tag; a folder that timm opens; or a checkpoint's file.
        init: What to copy, or how to start; what it does not name starts as a ViT's own, by `seed`.
        blocks: Those to linearise; all by default.
        architecture: timm's name of what a file's weights are of; needed for files alone.
        model_kwargs: timm's arguments of the source, such as `img_size`.
        num_classes: Of the new model; by default the source's.

    Raises:
        UserError: one line with what does not fit.
    """
    if init.distill:
        raise ConfigError(
            f"init {init.name!r} distils while it trains, and nothing is trained here; convert with the init that it "
            "starts from, and distil with linvit train or linvit.AttentionDistillation"
        )
    register()
    pretrained = _pretrained(source, architecture, dict(model_kwargs or {}))
    args = _student_args(pretrained, variant, blocks, num_classes)
    student = _built(args, pretrained.configuration, seed)
    initialize(student, pretrained.load() if init.copied else None, init, seed=seed)
    told = {"source": Path(source).name, "init": json.loads(init.model_dump_json(exclude_defaults=True)), "seed": seed}
    save(student, folder, args, told | {"version": __version__})
    return student.eval()


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, and none that timm opens."""
    return folder.is_dir() and not (folder / CONFIG).exists() and (folder / "spec.json").exists()


def export(run: Path, folder: Path) -> VisionTransformer:
    """Write a finished run's model into a folder that timm opens, and return it.

    Raises:
        ModelError: the run has no model, or a damaged one.
    """
    spec, model = load_model(run / MODEL)
    register()
    args = {
        "base": ANY_SIZE,
        "variant": _settings(spec.variant),
        "num_classes": spec.dataset.classes,
        "img_size": spec.size.image_size,
        "patch_size": spec.size.patch_size,
        "in_chans": spec.size.channels,
        "embed_dim": spec.size.dim,
        "depth": spec.size.depth,
        "num_heads": spec.size.heads,
        **_skeleton(spec.variant),
    }
    images = {
        "input_size": (spec.size.channels, spec.size.image_size, spec.size.image_size),
        "mean": spec.dataset.mean,
        "std": spec.dataset.std,
        "crop_pct": spec.recipe.eval_crop,
        "interpolation": spec.recipe.interpolation,
    }
    exported = _built(args, configuration_of(ANY_SIZE) | images, seed=0)
    exported.load_state_dict(model.state_dict())
    save(exported, folder, args, {"spec": json.loads(spec.to_json()), "version": __version__})
    return exported.eval()


def _pretrained(source: str, architecture: str | None, kwargs: dict[str, Any]) -> Pretrained:
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
        raise SourceError(f"{source}: timm cannot give its weights: {reason_of(error)[:200]}") from error


def _check_known(name: str, problem: str) -> None:
    if not timm.is_model(name.partition(".")[0]):
        raise ConfigError(f"{problem}: {name!r}{meant(name.partition('.')[0], timm.list_models())}")


def _outline(pretrained: Pretrained) -> VisionTransformer:
    """The source without its values.

    Raises:
        ConfigError: it is no ViT of timm's `VisionTransformer` family, or refuses its arguments.
    """
    try:
        with torch.device("meta"):
            model = timm.create_model(pretrained.architecture, **pretrained.args)
    except UserError:
        raise
    except Exception as error:  # unknown arguments, or sizes that do not fit one another
        raise ConfigError(f"{pretrained.architecture}: refused its arguments: {reason_of(error)[:200]}") from error
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"{pretrained.architecture}: a {type(model).__name__} cannot be linearised; allowed: timm's "
            "VisionTransformer and its subclasses"
        )
    return model


def _student_args(
    pretrained: Pretrained, variant: Variant, blocks: Sequence[int] | None, num_classes: int | None
) -> dict[str, Any]:
    """By which timm builds the new model."""
    outline = _outline(pretrained)
    tokens = prefix_tokens(dict(outline.named_parameters()))
    others = [token for token in tokens if token != "cls_token[0]"]  # noqa: S105 - a token of a ViT
    if others and not variant.class_token:
        raise ConfigError(
            f"variant {variant.name!r} takes patch tokens alone, {pretrained.architecture} has {', '.join(others)}; "
            "allowed: a ViT with a class token or none, or a variant that takes others too"
        )
    args = pretrained.args | {"base": pretrained.architecture, "variant": _settings(variant)}
    if tokens or outline.global_pool != "avg":  # where the source has a variant's skeleton already, nothing changes
        args |= _skeleton(variant)
    args |= {"blocks": list(blocks)} if blocks is not None else {}
    return args | ({"num_classes": num_classes} if num_classes is not None else {})


def _skeleton(variant: Variant) -> dict[str, Any]:
    """What of the Softmax ViT's skeleton a variant changes, as timm's arguments."""
    tokens = {} if variant.class_token else {"class_token": False}
    return tokens | ({"global_pool": "avg", "fc_norm": False} if variant.pool == "avg" else {})


def _settings(variant: Variant) -> dict[str, Any]:
    return json.loads(
        Variant(**variant.model_dump(include=set(Variant.model_fields))).model_dump_json(exclude_defaults=True)
    )


def _built(args: dict[str, Any], configuration: dict[str, Any], seed: int) -> VisionTransformer:
    """A new model with a ViT's own random start."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm.create_model(LINVIT, pretrained_cfg=configuration, **args)
    except UserError:
        raise
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{args['base']}: refused the variant's skeleton: {reason_of(error)[:200]}") from error
