"""A linear ViT as a folder: `model.safetensors` and the `config.json` by which timm builds it again.

`timm.create_model("local-dir:<folder>", pretrained=True)` opens one after `linvit.register()`; so does what timm itself
saved of a registered model.
"""

from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
from timm.models._hub import save_config_for_hf
from timm.models.vision_transformer import VisionTransformer

from linvit.config import UserError, reason_of
from linvit.files import replacing
from linvit.sources import to_safetensors
from linvit.timm_models import register
from linvit.trained import MODEL, ModelError, load_model

CONFIG = "config.json"


def save(model: VisionTransformer, folder: Path, model_args: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Write a model that `timm.create_model("linvit", **model_args)` makes, the weights before the configuration."""
    with replacing(folder / MODEL) as temporary:
        temporary.write_bytes(to_safetensors(model.state_dict(), {"format": "pt"}))
    with replacing(folder / CONFIG) as temporary:
        save_config_for_hf(model, str(temporary), model_config={"linvit": provenance}, model_args=model_args)


def load(folder: str | Path) -> VisionTransformer:
    """The model in a folder that `linvit convert` or timm wrote, or in that of a finished run.

    Returns:
        The model on the CPU, in eval mode.

    Raises:
        ModelError: there is none, it is damaged, or it is no ViT.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        if not (folder / MODEL).is_file():
            raise ModelError(f"{folder}: no model; allowed: a folder with {CONFIG} and {MODEL}, or of a finished run")
        return load_model(folder / MODEL)[1].eval()
    register()
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except UserError as error:
        raise ModelError(f"{folder}: {error}") from error
    except Exception as error:  # whatever a damaged file or a strange configuration makes timm raise
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ModelError(f"{folder}: not a model that timm and this code can read: {reason}") from error
    if not isinstance(model, VisionTransformer):
        raise ModelError(f"{folder}: a {type(model).__name__}; allowed: timm's VisionTransformer")
    return model.eval()
