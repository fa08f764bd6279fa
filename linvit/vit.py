"""timm's `VisionTransformer`, unmodified, with its attention swapped for an operator."""

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.attention import GeometryError
from linvit.config import ConfigError, Size, Variant, reason_of, resolve_class
from linvit.grid import SOFTMAX


def build_vit(size: Size, variant: Variant = SOFTMAX, *, num_classes: int, drop_path: float = 0.0) -> VisionTransformer:
    """A freshly initialised ViT of this size with the variant's skeleton and attention (paper, Table A).

    The final norm stays before pooling whatever the pool, so that its name is the Softmax ViT's.
    """
    vit = VisionTransformer(
        img_size=size.image_size,
        patch_size=size.patch_size,
        in_chans=size.channels,
        num_classes=num_classes,
        embed_dim=size.dim,
        depth=size.depth,
        num_heads=size.heads,
        class_token=variant.class_token,
        global_pool=variant.pool,
        fc_norm=False,
        drop_path_rate=drop_path,
    )
    if variant.positions == "sincos":
        fix_positions(vit)
    return linearize(vit, variant)


def linearize(vit: VisionTransformer, variant: Variant) -> VisionTransformer:
    """Swap every block's attention for the variant's operator, freshly initialised, in place.

    Raises:
        ConfigError: the target is not an attention with the operators' constructor.
        GeometryError: the operator does not work on this ViT's grid or prefix tokens; the ViT is untouched.
    """
    operator = resolve_class(variant.target)
    if not (isinstance(operator, type) and issubclass(operator, nn.Module)):
        raise ConfigError(
            f"variants.{variant.name}: {variant.target} is no class of modules; allowed: a torch.nn.Module"
        )
    attentions = [_operator_for(vit, block, operator, variant) for block in vit.blocks]
    for block, attention in zip(vit.blocks, attentions, strict=True):
        block.attn = attention.train(block.attn.training)
    return vit


def _operator_for(vit: VisionTransformer, block: nn.Module, operator: type, variant: Variant) -> nn.Module:
    old = block.attn
    for option in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(old, option, nn.Identity()), nn.Identity):
            raise GeometryError(f"variant {variant.name!r}: a ViT with attention.{option} cannot be linearised")
    try:
        return operator(
            vit.embed_dim,
            old.num_heads,
            grid_size=vit.patch_embed.grid_size,
            num_prefix_tokens=vit.num_prefix_tokens,
            qkv_bias=old.qkv.bias is not None,
            **variant.kwargs,
        ).to(old.qkv.weight)
    except GeometryError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"variants.{variant.name}: {variant.target} refused its arguments: {reason_of(error)}"
        ) from error


def fix_positions(vit: VisionTransformer) -> None:
    """Replace learned positions by fixed 2-D sin-cos ones, [1, p + h w, C]; prefix tokens get zeros."""
    table = build_sincos2d_pos_embed(vit.patch_embed.grid_size, dim=vit.embed_dim)
    prefix = torch.zeros(vit.pos_embed.shape[1] - len(table), vit.embed_dim)
    vit.pos_embed = nn.Parameter(torch.cat([prefix, table])[None], requires_grad=False)
