"""Copying groups of weights from a Softmax ViT, with every parameter accounted for.

Paper, Sec. B.2 and Table A: attention is qkv and proj, MLPs are fc1 and fc2; the norms go with neither. What the
paper's ViTs lack is in the group whose place it has: norms of queries and keys in `attention`; LayerScale, norms of
embeddings and of pooled features in `norms`; register and distillation tokens, and an attention that pools in place of
a token, in `class_token`; the distillation token's classifier in `head`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import timm.layers
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.attention import is_own
from linvit.init.positions import CopyError, resampled_positions
from linvit.sources import Weights

GROUPS = {
    "attention": r"blocks\.\d+\.attn\.",
    "mlp": r"blocks\.\d+\.mlp\.",
    "norms": r"(blocks\.\d+\.(norm[12]|ls[12])|norm|norm_pre|fc_norm)\.",
    "patch_embed": r"patch_embed\.",
    "class_token": r"((cls|dist|reg)_token$|attn_pool\.)",
    "positions": r"pos_embed$",
    "head": r"head(_dist)?\.",
}
BACKBONE = frozenset(GROUPS) - {"head"}
HINTS = {
    "attention": "; if it is the operator's own, name it in own_parameters",
    "head": "; it has no classifier, so its 'head' cannot be copied (as init 'pretrained' does)",
}
"""What to do about a parameter that the source lacks, by group."""
FC_NORM_HINT = "; build the student with fc_norm=False, so that its last norm is the source's"


def groups_in(model: nn.Module) -> list[str]:
    """The groups that a model's parameters are in, but for fixed ones."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [group for group, pattern in GROUPS.items() if any(re.match(pattern, name) for name in names)]


@dataclass(frozen=True)
class CopyWeights:
    """Copy whole groups from a source; a parameter of a named group is copied, excused by name, or an error.

    Excused are the operator's `own_parameters`, fixed positions, and tokens or a pooling attention that the student
    lacks.
    """

    weights: Weights
    groups: frozenset[str]

    @torch.no_grad()
    def __call__(self, student: VisionTransformer) -> None:
        for target, _, value in self.pairs(student):
            target.copy_(value)

    def pairs(self, student: VisionTransformer) -> list[tuple[Tensor, str, Tensor]]:
        """(student's tensor, name, source's tensor) of everything that is copied.

        Raises:
            CopyError: names the parameter that has no counterpart, or one of another shape.
        """
        targets = {name: t for name, t in targets_of(student).items() if group_of(name) in self.groups}
        source = {name: t for name, t in self.weights.tensors.items() if group_of(name) in self.groups}
        missing = sorted(targets.keys() - source.keys())
        if missing:
            hint = FC_NORM_HINT if missing[0].startswith("fc_norm.") else HINTS.get(group_of(missing[0]), "")
            raise CopyError(f"{missing[0]}: the source has no such parameter{hint}")
        left_over = sorted(name for name in source.keys() - targets.keys() if not _lacks(student, name))
        if left_over:
            raise CopyError(f"{left_over[0]}: the student has no such parameter, and nothing excuses it")
        if "pos_embed" in targets:
            source["pos_embed"] = resampled_positions(self.weights, student)
        for name, target in targets.items():
            if target.shape != source[name].shape:
                raise CopyError(
                    f"{name}: the source's shape {list(source[name].shape)} is not the student's {list(target.shape)}"
                )
        return [(target, name, source[name]) for name, target in targets.items()]


def targets_of(student: VisionTransformer) -> dict[str, Tensor]:
    """The student's parameters that Softmax weights can fill, by the Softmax ViT's names.

    Raises:
        CopyError: an attention parameter that is neither in the operator's Softmax view nor declared its own.
    """
    targets = {name: p for name, p in student.named_parameters() if group_of(name) != "attention"}
    if _fixes_positions(student):
        del targets["pos_embed"]  # they are the variant's own
    for index, block in enumerate(student.blocks):
        view = _softmax_view(block.attn)
        for name, _ in block.attn.named_parameters():
            if name not in view and not is_own(name, block.attn):
                raise CopyError(f"blocks.{index}.attn.{name}: neither in softmax_view() nor in own_parameters")
        targets |= {f"blocks.{index}.attn.{name}": tensor for name, tensor in view.items()}
    return targets


def group_of(name: str) -> str:
    """The group that a timm parameter name belongs to."""
    for group, pattern in GROUPS.items():
        if re.match(pattern, name):
            return group
    raise CopyError(f"{name}: belongs to no group of weights; groups: {', '.join(GROUPS)}")


def _softmax_view(attention: nn.Module) -> dict[str, Tensor]:
    """What Softmax weights can fill of an operator, or of the attention that a hybrid keeps."""
    if type(attention) is timm.layers.Attention:
        return dict(attention.named_parameters())
    view: Callable[[], dict[str, Tensor]] | None = getattr(attention, "softmax_view", None)
    if view is None:
        raise CopyError(f"{type(attention).__name__} has no softmax_view(), so nothing can be copied into it")
    return view()


def _fixes_positions(student: VisionTransformer) -> bool:
    return student.pos_embed is not None and not student.pos_embed.requires_grad


def _lacks(student: VisionTransformer, name: str) -> bool:
    """Whether the student is built without the part that a Softmax parameter belongs to."""
    if name == "pos_embed":
        return _fixes_positions(student)
    if group_of(name) == "class_token":
        part = name.partition(".")[0]
        return getattr(student, part, None) is None
    if group_of(name) == "attention":
        _, index, _, parameter = name.split(".", 3)
        return int(index) < len(student.blocks) and is_own(parameter, student.blocks[int(index)].attn)
    return False
