"""Learned positions from one ViT to another: on its grid, and for those of the tokens before it that it has."""

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from linvit.config import UserError
from linvit.sources import Weights
from linvit.vit import prefix_tokens


class CopyError(UserError):
    """A parameter that a copy can neither fill nor excuse."""


def resampled_positions(weights: Weights, student: VisionTransformer) -> Tensor:
    """The source's positions on the student's grid, [1, p + h w, C], as timm resamples them.

    Tokens that the student lacks are dropped, with their positions. A source that adds no positions to its tokens
    (`no_embed_class`) gives a student that does zeros.

    Raises:
        CopyError: a token without position in the source, or whose position the student cannot take.
    """
    tokens, table = prefix_tokens(weights.tensors), weights.tensors["pos_embed"]
    rows, columns = weights.grid_size
    embedded = table.shape[1] - rows * columns
    if embedded not in (0, len(tokens)):
        raise CopyError(
            f"pos_embed: the source has {table.shape[1]} positions; expected those of a {rows}x{columns} grid, "
            f"with or without one for each of {len(tokens)} tokens before it"
        )
    table = resample_abs_pos_embed(
        table, list(student.patch_embed.grid_size), [rows, columns], num_prefix_tokens=embedded
    )
    prefix = table[:, :embedded] if embedded else table.new_zeros(1, len(tokens), table.shape[-1])
    kept = [tokens.index(token) for token in _embedded_tokens(student, tokens, bool(embedded))]
    return torch.cat([prefix[:, kept], table[:, embedded:]], dim=1)


def _embedded_tokens(student: VisionTransformer, of_source: list[str], embedded: bool) -> list[str]:
    """The student's tokens that have a position, each of which the source must have."""
    tokens = prefix_tokens(dict(student.named_parameters()))
    if student.pos_embed.shape[1] > student.patch_embed.num_patches:
        for token in tokens:
            if token not in of_source:
                raise CopyError(f"pos_embed: the source has no {token}, so no position for the student's")
        return tokens
    for token in tokens:
        if embedded and token in of_source:
            raise CopyError(f"pos_embed: the source adds a position to {token}, the student (no_embed_class) none")
    return []
