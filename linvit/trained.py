"""A run's trained model as a file that carries the spec it was trained by."""

from pathlib import Path
from textwrap import shorten

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from linvit.config import UserError, reason_of
from linvit.files import replacing
from linvit.grid import RunSpec
from linvit.sources import to_safetensors
from linvit.vit import build_vit

MODEL = "model.safetensors"


class ModelError(UserError):
    """A run's trained model that is missing or damaged."""


def save_model(model: VisionTransformer, spec: RunSpec, path: Path) -> None:
    """The trained parameters as safetensors, with the spec in the file's metadata."""
    with replacing(path) as temporary:
        temporary.write_bytes(to_safetensors(model.state_dict(), {"spec": spec.to_json()}))


def load_model(path: Path) -> tuple[RunSpec, VisionTransformer]:
    """What `save_model` wrote: the spec that the model was trained by, and the model on the CPU.

    Raises:
        ModelError: the file is missing or damaged, or the operator's code has changed its parameters since.
    """
    if not path.is_file():
        raise ModelError(f"{path}: not found; delete metrics.json beside it, and Snakemake trains the run again")
    try:
        with safe_open(path, "pt") as file:
            spec = RunSpec.from_json(file.metadata()["spec"])
        model = build_vit(spec.size, spec.variant, num_classes=spec.dataset.classes)
        model.load_state_dict(load_file(path))
    except (SafetensorError, OSError, TypeError, KeyError, ValidationError, UserError, RuntimeError) as error:
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ModelError(f"{path}: not a trained model that this code can read: {reason}") from error
    return spec, model
