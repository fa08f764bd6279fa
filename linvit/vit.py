"""timm's `VisionTransformer`, unmodified, with its attention swapped for an operator."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.attention.replace import replacement
from linvit.catalogue import VARIANTS, named
from linvit.config import ConfigError, Size, Variant, resolve_class
from linvit.grid import SOFTMAX

ViT = TypeVar("ViT", bound=VisionTransformer)


def build_vit(size: Size, variant: Variant = SOFTMAX, *, num_classes: int, drop_path: float = 0.0) -> VisionTransformer:
    """A freshly initialised ViT of this size with the variant's skeleton and attention (paper, Table A)."""
    return variant_vit(
        variant,
        img_size=size.image_size,
        patch_size=size.patch_size,
        in_chans=size.channels,
        num_classes=num_classes,
        embed_dim=size.dim,
        depth=size.depth,
        num_heads=size.heads,
        drop_path_rate=drop_path,
    )


def variant_vit(variant: Variant, **options: Any) -> VisionTransformer:
    """timm's ViT with a variant's skeleton and attention; `options` are timm's, and may change the skeleton.

    The final norm stays before pooling whatever the pool, so that its name is the Softmax ViT's.
    """
    skeleton = {"class_token": variant.class_token, "global_pool": variant.pool, "fc_norm": False}
    vit = VisionTransformer(**(skeleton | options))
    if variant.positions == "sincos":
        fix_positions(vit)
    return linearize(vit, variant)


def linearize(model: ViT, variant: str | type | Variant, *, blocks: Iterable[int] | None = None) -> ViT:
    """Swap the attention of a ViT's blocks for an operator, freshly initialised, in place.

    Everything else of the model stays: its weights, class and register tokens, positions, LayerScale, pooling, heads.
    Norms of queries and keys (`qk_norm`) go over to operators that apply them, at their start.

    Args:
        model: A timm `VisionTransformer` or a subclass, such as a distilled DeiT; of any weights.
        variant: A name of the catalogue ("elu", "relu", "inline", "mhla", "ttt", "softmax"), a `Variant`, an operator
            class, or its `package.module:Class`.
        blocks: The blocks to change, negative ones from the end; all by default. The others keep their attention.

    Returns:
        The model itself.

    Raises:
        ConfigError: no such variant or block, a model of another kind, or a target that is no operator.
        GeometryError: the operator does not work on this ViT's grid or prefix tokens, or would drop a part of its
            attention. After any error the model is as it was.
    """
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"a {type(model).__name__} cannot be linearised; allowed: timm's VisionTransformer and its subclasses, "
            "without a wrapper"
        )
    variant, operator = _resolved(variant)
    if not (isinstance(operator, type) and issubclass(operator, nn.Module)):
        raise ConfigError(
            f"variants.{variant.name}: {variant.target} is no class of modules; allowed: a torch.nn.Module"
        )
    attentions = {index: replacement(model, index, operator, variant) for index in _chosen(blocks, len(model.blocks))}
    for index, attention in attentions.items():
        block = model.blocks[index]
        block.attn = attention.train(block.attn.training)
    return model


def prefix_tokens(parameters: Mapping[str, Tensor]) -> list[str]:
    """The tokens before a ViT's patches, in order, by the parameters that they are of: `cls_token[0]`, ..."""
    names = ("cls_token", "dist_token", "reg_token")
    return [f"{name}[{i}]" for name in names if name in parameters for i in range(parameters[name].shape[1])]


def fix_positions(vit: VisionTransformer) -> None:
    """Replace learned positions by fixed 2-D sin-cos ones, [1, p + h w, C]; prefix tokens get zeros.

    Raises:
        ConfigError: the ViT has no positions, or a width that is no multiple of 4.
    """
    if vit.pos_embed is None:
        raise ConfigError("positions sincos: this ViT adds no positions to its tokens; allowed: pos_embed='learn'")
    if vit.embed_dim % 4:
        raise ConfigError(f"positions sincos: width {vit.embed_dim}; allowed: a multiple of 4")
    table = build_sincos2d_pos_embed(vit.patch_embed.grid_size, dim=vit.embed_dim)
    prefix = torch.zeros(vit.pos_embed.shape[1] - len(table), vit.embed_dim)
    vit.pos_embed = nn.Parameter(torch.cat([prefix, table])[None], requires_grad=False)


def _resolved(variant: str | type | Variant) -> tuple[Variant, type]:
    """A variant and its operator's class."""
    if isinstance(variant, type):
        return Variant.model_construct(
            name=variant.__name__, target=f"{variant.__module__}:{variant.__name__}"
        ), variant
    if isinstance(variant, str):
        outside = ":" in variant
        variant = (
            Variant.model_construct(name=variant, target=variant) if outside else named(VARIANTS, variant, "variant")
        )
    return variant, resolve_class(variant.target)


def _chosen(blocks: Iterable[int] | None, depth: int) -> list[int]:
    """Indices from 0, each once, in order."""
    if blocks is None:
        return list(range(depth))
    if not isinstance(blocks, Iterable):
        raise ConfigError(f"blocks: found {blocks!r}; allowed: a list of numbers, {-depth} to {depth - 1}")
    for block in (blocks := list(blocks)):
        if not isinstance(block, int) or isinstance(block, bool) or not -depth <= block < depth:
            raise ConfigError(
                f"blocks: {block!r} is none of the model's; allowed: whole numbers, {-depth} to {depth - 1}"
            )
    return sorted({block % depth for block in blocks})
