"""An operator in place of a block's attention: with what it takes over, and a refusal of what it would lose."""

import copy
from typing import Any

import timm.layers
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.attention.able import operators
from linvit.attention.base import GeometryError, is_own
from linvit.config import ConfigError, Variant, reason_of


def replacement(vit: VisionTransformer, index: int, operator: type, variant: Variant) -> nn.Module:
    """A variant's operator for a block, freshly initialised, with the device, dtype and biases of its attention.

    Raises:
        ConfigError: the operator refuses its arguments.
        GeometryError: it does not work on this ViT, or would lose a part of the block's attention.
    """
    where = f"variant {variant.name!r}, block {index}"
    old: Any = getattr(vit.blocks[index], "attn", None)
    _refuse_what_would_be_lost(vit, old, where)
    try:
        attention = operator(
            vit.embed_dim,
            old.num_heads,
            grid_size=vit.patch_embed.grid_size,
            num_prefix_tokens=vit.num_prefix_tokens,
            qkv_bias=old.qkv.bias is not None,
            **variant.kwargs,
        )
    except GeometryError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"variants.{variant.name}: {variant.target} refused its arguments: {reason_of(error)}"
        ) from error
    if old.proj.bias is None:
        attention.proj.bias = None
    _take_qk_norms(attention, old, where)
    if getattr(attention, "needs_grid", True):
        _refuse_changing_grids(vit, where)
    return attention.to(old.qkv.weight)


def _refuse_what_would_be_lost(vit: VisionTransformer, old: Any, where: str) -> None:
    """Operators stand for timm's `Attention` with its defaults; whatever else was there would silently go."""
    if hasattr(old, "softmax_view"):  # an operator, which has no options of timm's but the norms of queries and keys
        return
    if type(old) is not timm.layers.Attention:
        kind = "none" if old is None else type(old).__name__
        raise GeometryError(f"{where}: its attention is {kind}; allowed: timm's Attention with one qkv layer")
    if old.num_heads * old.head_dim != vit.embed_dim or old.proj.out_features != vit.embed_dim:
        raise GeometryError(
            f"{where}: {old.num_heads} heads of width {old.head_dim} on tokens of width {vit.embed_dim}; "
            "allowed: heads that make up the width"
        )
    parts = {
        "norm": isinstance(old.norm, nn.Identity),
        "gate": getattr(old, "gate", None) is None,
        "attn_drop": not old.attn_drop.p,
        "proj_drop": not old.proj_drop.p,
    }
    for part, absent in parts.items():
        if not absent:
            raise GeometryError(
                f"{where}: a ViT with attention.{part} cannot be linearised, no operator has it; "
                "allowed: scale_attn_norm, gates and dropout of attention off"
            )


def _take_qk_norms(attention: nn.Module, old: nn.Module, where: str) -> None:
    for name in ("q_norm", "k_norm"):
        norm = getattr(old, name, nn.Identity())
        if isinstance(norm, nn.Identity) or is_own(name, old):
            continue
        if not getattr(attention, "takes_qk_norm", False):
            raise GeometryError(
                f"{where}: a ViT with attention.{name} (qk_norm) needs an operator that applies it, "
                f"{type(attention).__name__} does not; allowed: {operators(lambda kind: kind.takes_qk_norm)}"
            )
        norm = copy.deepcopy(norm)
        if hasattr(norm, "reset_parameters"):
            norm.reset_parameters()
        setattr(attention, name, norm)


def _refuse_changing_grids(vit: VisionTransformer, where: str) -> None:
    changing = {
        "dynamic_img_size": vit.dynamic_img_size,
        "patch_drop_rate": not isinstance(vit.patch_drop, nn.Identity),
    }
    for option, is_on in changing.items():
        if is_on:
            raise GeometryError(
                f"{where}: this operator needs a fixed grid, so {option} must be off; "
                f"allowed with it: {operators(lambda kind: not kind.needs_grid)}"
            )
