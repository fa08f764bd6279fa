"""Attention maps [B, H, N, N], for the loss that matches them and for plots."""

from collections.abc import Callable

import timm.layers
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from linvit.attention.able import operators
from linvit.attention.softmax import softmax_map
from linvit.config import UserError


class MapError(UserError):
    """An attention that has no map, or a block that the model lacks."""


def map_of(attention: nn.Module) -> Callable[[Tensor], Tensor]:
    """What gives a block's map [B, H, N, N] for the tokens [B, N, C] that its attention takes.

    Raises:
        MapError: the operator has none.
    """
    of_operator: Callable[[Tensor], Tensor] | None = getattr(attention, "attention_map", None)
    if of_operator is not None:
        return of_operator
    if isinstance(attention, timm.layers.Attention):
        return lambda tokens: softmax_map(attention, tokens)
    have_one = operators(lambda kind: hasattr(kind, "attention_map"))
    raise MapError(f"{type(attention).__name__} has no attention map; allowed: {have_one}")


@torch.no_grad()
def attention_map(model: nn.Module, images: Tensor, block: int | None = -1) -> Tensor:
    """What each query of a block attends to, in eval mode.

    Args:
        model: A timm ViT, linearised or not.
        images: [B, 3, H, W], on the model's device, prepared as for the model.
        block: A block's index, negative ones from the end; None for all of them.

    Returns:
        float32 [B, H, N, N], queries by keys, prefix tokens first; [blocks, B, H, N, N] for all. Rows sum to 1,
        but for those of ReLU without a key of positive product, which are zero; InLine's entries may be negative.

    Raises:
        MapError: the block's operator has no map (MHLA, TTT), or there is no such block.
    """
    vit = unwrap_model(model)
    if not isinstance(vit, VisionTransformer):
        raise MapError(f"a {type(vit).__name__} has no attention maps; allowed: timm's VisionTransformer")
    depth = len(vit.blocks)
    if block is not None and not (isinstance(block, int) and -depth <= block < depth):
        raise MapError(f"block {block!r} is none of the model's; allowed: {-depth} to {depth - 1}, or None for all")
    chosen = list(vit.blocks) if block is None else [vit.blocks[block]]
    maps: list[Tensor] = []
    hooks = [_recorded(chosen_block.attn, maps) for chosen_block in chosen]
    modes = [(module, module.training) for module in vit.modules()]
    try:
        vit.eval().forward_features(images)
    finally:
        for module, training in modes:
            module.training = training
        for hook in hooks:
            hook.remove()
    return torch.stack(maps) if block is None else maps[0]


def _recorded(attention: nn.Module, maps: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    of_tokens = map_of(attention)
    return attention.register_forward_pre_hook(lambda _, inputs: maps.append(of_tokens(inputs[0]).float()))
