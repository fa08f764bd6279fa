"""A run's trained model as a file that carries the spec it was trained by, and a checksum of both."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from linvit.config import UserError, reason_of
from linvit.files import replacing
from linvit.grid import RunSpec
from linvit.sources import to_safetensors
from linvit.vit import build_vit

MODEL = "model.safetensors"


class ModelError(UserError):
    """A run's trained model that is missing or damaged."""


def save_model(model: VisionTransformer, spec: RunSpec, path: Path) -> None:
    """The trained parameters as safetensors, with the spec and a checksum of all in the file's metadata.

    Under one key: the order of several would be another each time.
    """
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    run = {"spec": spec.to_json(), "sha256": digest_of(spec.to_json(), state)}
    with replacing(path) as temporary:
        temporary.write_bytes(to_safetensors(state, {"run": json.dumps(run)}))


def load_model(path: Path) -> tuple[RunSpec, VisionTransformer]:
    """What `save_model` wrote: the spec that the model was trained by, and the model on the CPU.

    Raises:
        ModelError: the file is missing or damaged, or the operator's code has changed its parameters since.
    """
    if not path.is_file():
        raise ModelError(_why_missing(path))
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        # Models of before there were checksums hold the spec alone.
        run = json.loads(metadata["run"]) if "run" in metadata else metadata
        if "spec" not in run:
            raise ModelError("it has no run's spec, as a model has that linvit convert wrote: config.json is missing")
        state, spec = load_file(path), RunSpec.from_json(run["spec"])
        if run.get("sha256") not in (None, digest_of(run["spec"], state)):
            raise ModelError("damaged: the checksum in it does not hold")
        model = build_vit(spec.size, spec.variant, num_classes=spec.dataset.classes)
        model.load_state_dict(state)
    except (SafetensorError, OSError, TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        reason = shorten(reason_of(error), 200, placeholder=" ...")
        raise ModelError(f"{path}: not a trained model that this code can read: {reason}{_remedy(path)}") from error
    return spec, model


def _why_missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path.parent}: no such folder"
    remedy = _remedy(path) or "; allowed: the folder of a finished run, or one that linvit convert wrote"
    return f"{path}: not found{remedy}"


def _remedy(path: Path) -> str:
    is_of_run = (path.parent / "metrics.json").exists()
    return "; delete metrics.json beside it, and Snakemake trains the run again" if is_of_run else ""


def digest_of(text: str, state: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text, such as a spec, and of every parameter's name, kind, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
