"""Checkpoints as their authors published them, brought to timm's layout with every tensor accounted for.

Names are those of the authors' training code: MoCo v3 (github.com/facebookresearch/moco-v3, moco/builder.py), DINO and
iBOT (github.com/bytedance/ibot, main_ibot.py), MAE (github.com/facebookresearch/mae, models_mae.py), DeiT
(github.com/facebookresearch/deit, models.py). Their ViTs are timm's or copies of it: only prefixes differ.
"""

import argparse
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor

from linvit.archives import check_zip
from linvit.config import UserError
from linvit.files import regular
from linvit.pickles import SCALARS, check_pickles

STATE_DICTS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student")
"""Entries that hold a model; the first that is there is taken: timm's order, then DINO's and iBOT's."""

TRAINING_STATE = {"optimizer", "best_acc1", "dino_loss", "ibot_loss"}
"""Entries that may hold tensors of no model."""

_SCALAR = np.float64().__reduce__()[0]
# What entries beside the weights are pickled with: DeiT, MAE, DINO and iBOT store their arguments, and the last two a
# learning rate out of a numpy array, by a function whose module depends on numpy's version. None of it runs code.
SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"]},
    *((_SCALAR, name) for name in SCALARS),
]


class CheckpointError(UserError):
    """A file that is no checkpoint of plain tensors, or one of a model that cannot be a source."""


@dataclass(frozen=True)
class Layout:
    """How a published state dict names a ViT: patterns that its keys start with."""

    name: str
    backbone: str
    """What precedes timm's own names; the first layout whose backbone a key starts with is the file's."""
    dropped: dict[str, str]
    """What is left out, by group."""

    def group_of(self, key: str) -> str | None:
        return next((group for group, pattern in self.dropped.items() if re.match(pattern, key)), None)


LAYOUTS = (
    Layout(
        "MoCo v3",
        r"base_encoder\.",
        {"projector": r"base_encoder\.head\.", "momentum_encoder": r"momentum_encoder\.", "predictor": r"predictor\."},
    ),
    Layout("DINO, iBOT", r"backbone\.", {"head": r"head\.", "mask_token": r"backbone\.masked_embed$"}),
    Layout("timm", r"", {"decoder": r"decoder_", "mask_token": r"(mask_token|masked_embed)$"}),  # MAE, iBOT's student
)


@dataclass(frozen=True)
class Checkpoint:
    """A ViT's tensors by timm's names, the layout they were found in, and how many tensors were left out, by group."""

    tensors: dict[str, Tensor]
    layout: str
    dropped: dict[str, int]

    @property
    def conversion(self) -> dict:
        """For a source's manifest; empty where the file held nothing but these tensors."""
        return {"converted": {"layout": self.layout, "dropped": self.dropped}} if self.dropped else {}


def read(path: Path, *, of_study: bool = True) -> Checkpoint:
    """A checkpoint from safetensors or a PyTorch file, on the CPU; never runs code of the file.

    Args:
        of_study: Whether to refuse what has a Softmax ViT's parameters but is no source of the study.

    Raises:
        CheckpointError: says what the file is instead; the path is for the caller to name.
    """
    try:
        raw = load_file(path) if path.suffix == ".safetensors" else load(path)
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise CheckpointError(f"cannot be read as a checkpoint of plain tensors: {_reason(error)}") from error
    return convert(raw, of_study=of_study)


def convert(raw: Any, *, of_study: bool = True) -> Checkpoint:
    """Find the ViT in what a file holds and name its tensors as timm does.

    Raises:
        CheckpointError: it holds no state dict, tensors that no layout accounts for, or what cannot be a source.
    """
    state, dropped = _state_of(raw)
    if of_study:
        _refuse_other_models(raw, state)
    layout = next(layout for layout in LAYOUTS if any(re.match(layout.backbone, key) for key in state))
    tensors, unknown = {}, []
    for key, tensor in state.items():
        if group := layout.group_of(key):
            dropped[group] += 1
        elif prefix := re.match(layout.backbone, key):
            tensors[key[prefix.end() :]] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointError(
            f"a {layout.name} file with an unknown parameter {min(unknown)!r} ({len(unknown)} in all)"
        )
    return Checkpoint(tensors, layout.name, dict(dropped))


def load(path: Path, device: torch.device | str = "cpu") -> Any:
    """What torch.save wrote, as far as it is tensors, numbers, text and containers of them; never runs its code.

    Raises:
        Exception: of many kinds, as damaged files make torch raise.
    """
    check(path)
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        return torch.load(path, map_location=device, weights_only=True)


def check(path: Path) -> None:
    """Refuse a file of torch's that is damaged, or of which more would be made than is in it.

    Raises:
        Exception: of many kinds, as damaged files make the readers raise.
    """
    check_zip(regular(path))
    check_pickles(path)


def is_stored(tensor: Tensor) -> bool:
    """Whether all its values are there: a tensor may be of any shape over a few bytes that it repeats."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _state_of(raw: Any) -> tuple[dict[str, Tensor], Counter]:
    """The state dict in a file, without the prefixes of wrappers, and the number of tensors in each entry beside it."""
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"holds a {type(raw).__name__}, not a state dict")
    name = next((key for key in STATE_DICTS if isinstance(raw.get(key), Mapping)), None)
    beside = Counter({key: _count(value) for key, value in raw.items() if key != name}) if name else Counter()
    unknown = sorted(map(str, (+beside).keys() - TRAINING_STATE - set(STATE_DICTS)))
    if unknown:
        raise CheckpointError(f"beside {name!r} it holds tensors in an unknown entry {unknown[0]!r}")
    state = raw[name] if name else raw
    if not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError("its keys are no parameters' names")
    names = clean_state_dict(state)
    if len(names) < len(state):
        raise CheckpointError("two of its parameters differ only by a wrapper's prefix, such as 'module.'")
    return names, +beside  # + leaves out entries without tensors, such as the epoch


def _count(value: Any) -> int:
    """Of the tensors in nested dictionaries and lists, each once: containers may hold one another, or themselves."""
    found, waiting = {}, [value]
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = isinstance(value, Tensor)
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(found.values())


def _refuse_other_models(raw: Mapping, state: Mapping) -> None:
    """Refuse what has a Softmax ViT's parameters but is another model."""
    if "dist_token" in state:
        raise CheckpointError(
            "a distilled DeiT: it was trained with a second token and head (dist_token, head_dist), which the Softmax "
            "ViTs of the study lack; use the DeiT without distillation"
        )
    if "head.weight" in state and 0 < _trained_parameters(raw) <= 2:
        raise CheckpointError(
            "a linear probe: its optimizer trained the head alone; use the file of the pre-training "
            "(MoCo v3: vit-b-300ep.pth.tar, not linear-vit-b-300ep.pth.tar)"
        )


def _trained_parameters(raw: Mapping) -> int:
    """How many parameters the optimizer in a training's checkpoint had; 0 where there is none."""
    optimizer = raw.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    lists = [group.get("params") for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    return sum(len(parameters) for parameters in lists if isinstance(parameters, list))


def _reason(error: Exception) -> str:
    """One sentence: what torch says goes on for a page, and advises to run the file's code."""
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it refers to {unsafe[1]}, and only tensors are unpickled"
    return re.split(r"\.\s|\n", str(error).strip())[0] or type(error).__name__
