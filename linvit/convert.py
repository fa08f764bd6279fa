"""From a pre-trained Softmax ViT, or a finished run, to a linear ViT in a folder that timm opens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from linvit import __version__
from linvit.config import ConfigError, Init, UserError, Variant, reason_of
from linvit.folders import CONFIG, save
from linvit.init import CopyWeights, initialize
from linvit.pretrained import Pretrained, find, outline
from linvit.sources import Weights
from linvit.timm_models import LINVIT, configuration_of, register
from linvit.trained import MODEL, load_model
from linvit.vit import prefix_tokens

ANY_SIZE = "vit_small_patch16_224"
"""timm's plain ViT, of which a run's model is one; its arguments say the size."""


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
    _check_folder(Path(source), folder)
    if init.distill:
        raise ConfigError(
            f"init {init.name!r} distils while it trains, and nothing is trained here; convert with the init that it "
            "starts from, and distil with linvit train or linvit.AttentionDistillation"
        )
    register()
    pretrained = find(source, architecture, dict(model_kwargs or {}))
    expected = outline(pretrained)
    args = _student_args(pretrained, expected, variant, blocks, num_classes)
    student = _built(args, pretrained.configuration, seed)
    weights = Weights(dict(expected.named_parameters()), expected.patch_embed.grid_size)
    CopyWeights(weights, frozenset(init.copied)).pairs(student)
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
        ConfigError: the folder to write is a run's.
    """
    _check_folder(run, folder)
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


def _check_folder(source: Path, folder: Path) -> None:
    """Weights that were expensive are not written over: neither the source's nor a run's."""
    written = folder.resolve()
    if source.exists() and source.resolve() in (written, written / MODEL):
        raise ConfigError(f"{folder}: would be written over its own source, {source}; allowed: another folder")
    if (folder / "spec.json").exists():
        raise ConfigError(f"{folder}: is a run's folder, whose model would be lost; allowed: another folder")


def _student_args(
    pretrained: Pretrained,
    expected: VisionTransformer,
    variant: Variant,
    blocks: Sequence[int] | None,
    num_classes: int | None,
) -> dict[str, Any]:
    """By which timm builds the new model."""
    tokens = prefix_tokens(dict(expected.named_parameters()))
    others = [token for token in tokens if token != "cls_token[0]"]  # noqa: S105 - a token of a ViT
    if others and not variant.class_token:
        raise ConfigError(
            f"variant {variant.name!r} takes patch tokens alone, {pretrained.architecture} has {', '.join(others)}; "
            "allowed: a ViT with a class token or none, or a variant that takes others too"
        )
    args = pretrained.args | {"base": pretrained.architecture, "variant": _settings(variant)}
    if tokens or expected.global_pool != "avg":  # where the source has a variant's skeleton already, nothing changes
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
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ConfigError(f"{args['base']}: refused the variant's skeleton: {reason}") from error
