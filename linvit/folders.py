"""A linear ViT as a folder: `model.safetensors` and the `config.json` by which timm builds it again.

`timm.create_model("local-dir:<folder>", pretrained=True)` opens one after `linvit.register()`; so does what timm itself
saved of a registered model. What linvit wrote has a checksum of both files in its configuration; timm overlooks it.
"""

import json
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
from safetensors.torch import load_file
from timm.models._hub import save_config_for_hf
from timm.models.vision_transformer import VisionTransformer

from linvit.checkpoints import check
from linvit.config import UserError, reason_of
from linvit.config.mistakes import shown
from linvit.files import SEAL, replacing
from linvit.sources import to_safetensors
from linvit.timm_models import register
from linvit.trained import MODEL, ModelError, digest_of, load_model

CONFIG = "config.json"
PICKLED = (".bin", ".pth", ".pt", ".tar")
"""Files of torch's that timm looks for where there is no `model.safetensors`."""


def save(model: VisionTransformer, folder: Path, model_args: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Write a model that `timm.create_model("linvit", **model_args)` makes, the weights before the configuration."""
    with replacing(folder / MODEL) as temporary:
        temporary.write_bytes(to_safetensors(model.state_dict(), {"format": "pt"}))
    with replacing(folder / CONFIG) as temporary:
        save_config_for_hf(model, str(temporary), model_config={"linvit": provenance}, model_args=model_args)
        config = json.loads(temporary.read_bytes())
        temporary.write_text(json.dumps(config | {SEAL: _seal(config, folder)}, indent=2), encoding="utf-8")


def has_config(folder: Path) -> bool:
    """Whether something is there by the name of timm's configuration, sound or not."""
    return (folder / CONFIG).exists() or (folder / CONFIG).is_symlink()


def load(folder: str | Path) -> VisionTransformer:
    """The model in a folder that `linvit convert` or timm wrote, or in that of a finished run.

    Returns:
        The model on the CPU, in eval mode.

    Raises:
        ModelError: there is none, it is damaged, or it is no ViT.
    """
    folder = Path(folder)
    if not has_config(folder):
        if not (folder / MODEL).is_file():
            raise ModelError(f"{folder}: no model; allowed: a folder with {CONFIG} and {MODEL}, or of a finished run")
        return load_model(folder / MODEL)[1].eval()
    config = read_config(folder)
    check_files(folder, config)
    register()
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except UserError as error:
        raise ModelError(f"{folder}: {error}") from error
    except Exception as error:  # whatever a damaged file or a strange configuration makes timm raise
        raise ModelError(f"{folder}: not a model that timm and this code can read: {_reason(error)}") from error
    if not isinstance(model, VisionTransformer):
        raise ModelError(f"{folder}: a {type(model).__name__}; allowed: timm's VisionTransformer")
    _check_classes(model, config, folder / CONFIG)
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's configuration; only its form is checked.

    Raises:
        ModelError: it cannot be read, or is none of timm's.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder / CONFIG}: cannot be read: {reason_of(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("pretrained_cfg", {}), dict):
        raise ModelError(f"{folder / CONFIG}: not a configuration of timm's; allowed: keys with values")
    return config


def check_files(folder: Path, config: dict[str, Any]) -> None:
    """Whether they are as linvit wrote them, and what torch wrote is no danger to read; of timm's, nothing tells.

    Raises:
        ModelError: names the file.
    """
    path = folder / MODEL
    try:
        is_damaged = SEAL in config and config[SEAL] != _seal(config, folder)
        if not path.exists():
            for path in sorted(path for path in folder.iterdir() if path.suffix in PICKLED):
                check(path)
    except Exception as error:  # whatever damaged files make the readers raise
        raise ModelError(f"{path}: cannot be read: {_reason(error)}") from error
    if is_damaged:
        raise ModelError(
            f"{folder / MODEL} or {folder / CONFIG} is damaged: they are not what was written together; whoever has "
            f"changed them on purpose removes the key {SEAL}"
        )


def _check_classes(model: VisionTransformer, config: dict[str, Any], path: Path) -> None:
    """Where they differ, timm starts another classifier at random."""
    for key, told in {"num_classes": config, "pretrained_cfg.num_classes": config.get("pretrained_cfg", {})}.items():
        if (found := told.get("num_classes", model.num_classes)) != model.num_classes:
            raise ModelError(f"{path}: {key}: found {shown(found)}; allowed: {model.num_classes}, as the model has")


def _seal(config: dict[str, Any], folder: Path) -> str:
    told = {key: value for key, value in config.items() if key != SEAL}
    return digest_of(json.dumps(told, sort_keys=True), load_file(folder / MODEL))


def _reason(error: Exception) -> str:
    return shorten(reason_of(error), 200, placeholder=" ...")
