"""Analytic starts of the attention: Mimetic and Impulse. Biases start at zero; nothing else is touched."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from linvit.attention.base import Projections
from linvit.config import UserError

KERNEL_ORDER = (4, 1, 5, 3, 7, 0, 2, 6, 8)  # cells of a 3x3 kernel, row-major, in the order heads take them
POSITION_SCALE = 18.0
ATTENTION_NORM = 7.0
TARGET_LOGIT = 1000.0


class AnalyticError(UserError):
    """An operator, or positions, that an analytic start is not defined for."""


@dataclass(frozen=True)
class Mimetic:
    """W_q^T W_k close to the identity, proj o v close to minus the identity.

    Trockman & Kolter 2023 [arXiv:2305.09828, Sec. 3].
    """

    seed: int

    @torch.no_grad()
    def __call__(self, student: VisionTransformer) -> None:
        _check_projections(student)
        generator = torch.Generator().manual_seed(self.seed)
        for block in student.blocks:
            heads = [factors(noisy_identity(block.attn, 0.7, 0.7, generator), _d(block)) for _ in range(_h(block))]
            set_query_key(block.attn, heads)
            set_value_proj(block.attn, generator)


@dataclass(frozen=True)
class Impulse:
    """Each head attends, by its positions alone, to one fixed neighbour on the grid.

    Zheng et al. 2025 [arXiv:2505.19985]. Learned patch positions are multiplied by 18, so that they outweigh
    the content at the start; a fixed sin-cos table, of order one already, is left as it is.
    """

    seed: int

    @torch.no_grad()
    def __call__(self, student: VisionTransformer) -> None:
        _check_projections(student)
        if student.pos_embed is None:
            raise AnalyticError("impulse is solved for a ViT's positions, and this one has no pos_embed")
        generator = torch.Generator().manual_seed(self.seed)
        positions = student.pos_embed[0, -student.patch_embed.num_patches :]
        if student.pos_embed.requires_grad:
            positions.mul_(POSITION_SCALE)
        normed = F.layer_norm(positions.double(), positions.shape[-1:])
        for block in student.blocks:
            inverse = truncated_pinv(normed, _d(block))
            heads = []
            for head in range(_h(block)):
                target = impulse_logits(student.patch_embed.grid_size, head, generator)
                q, k = factors(inverse @ target @ inverse.mT, _d(block))
                heads.append((ATTENTION_NORM * q / q.norm(), ATTENTION_NORM * k / k.norm()))
            set_query_key(block.attn, heads)
            set_value_proj(block.attn, generator)


def noisy_identity(attn: Projections, noise: float, identity: float, generator: torch.Generator) -> Tensor:
    """noise Z + identity I, with i.i.d. Z of variance 1/C: [C, C], float64."""
    C = attn.num_heads * attn.head_dim
    Z = torch.randn(C, C, generator=generator, dtype=torch.float64) / math.sqrt(C)
    return noise * Z + identity * torch.eye(C, dtype=torch.float64)


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two [rank, C] with left^T right the best approximation of `matrix` of that rank, the scale split evenly."""
    U, S, Vh = torch.linalg.svd(matrix)
    root = S[:rank].sqrt()
    return (U[:, :rank] * root).mT, root[:, None] * Vh[:rank]


def set_query_key(attn: Projections, heads: list[tuple[Tensor, Tensor]]) -> None:
    """Write per-head (W_q, W_k), each [d, C], into the first 2C rows of `qkv`."""
    queries, keys = zip(*heads, strict=True)
    C = attn.num_heads * attn.head_dim
    attn.qkv.weight[: 2 * C] = torch.cat([*queries, *keys]).to(attn.qkv.weight)
    if attn.qkv.bias is not None:
        attn.qkv.bias.zero_()


def set_value_proj(attn: Projections, generator: torch.Generator) -> None:
    """proj(v(x)) = (0.4 Z - 0.4 I) x, as in Mimetic, for both initialisations."""
    C = attn.num_heads * attn.head_dim
    # x -> proj(v(x)) has the matrix W_proj W_v, so its left factor is proj and its right one v.
    proj, value = factors(noisy_identity(attn, 0.4, -0.4, generator), C)
    attn.qkv.weight[2 * C :] = value.to(attn.qkv.weight)
    attn.proj.weight.copy_(proj.mT)
    if attn.proj.bias is not None:
        attn.proj.bias.zero_()


def truncated_pinv(P: Tensor, rank: int) -> Tensor:
    """[n, C] -> [C, n], the pseudo-inverse through the top `rank` eigenvectors of P^T P.

    Numerically zero eigenvalues are left out: a grid with fewer patches than `rank` has them.
    """
    values, vectors = torch.linalg.eigh(P.mT @ P)
    values, vectors = values[-rank:], vectors[:, -rank:]
    kept = values > values.max() * max(P.shape) * torch.finfo(P.dtype).eps
    return (vectors[:, kept] / values[kept]) @ vectors[:, kept].mT @ P.mT


def impulse_logits(grid_size: tuple[int, int], head: int, generator: torch.Generator) -> Tensor:
    """[h w, h w]: 1000 where the key lies at the head's shift from the query, small noise elsewhere."""
    h, w = grid_size
    row_shift, column_shift = (cell - 1 for cell in divmod(KERNEL_ORDER[head % len(KERNEL_ORDER)], 3))
    noise = torch.empty(h * w, h * w, dtype=torch.float64)
    logits = 3 * nn.init.trunc_normal_(noise, std=0.6, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    key_rows, key_columns = rows + row_shift, columns + column_shift
    inside = (key_rows >= 0) & (key_rows < h) & (key_columns >= 0) & (key_columns < w)
    logits[(rows * w + columns)[inside], (key_rows * w + key_columns)[inside]] = TARGET_LOGIT
    return logits


def _check_projections(student: VisionTransformer) -> None:
    """Both starts shape a product of queries and keys, and one of values and output projection."""
    C = student.embed_dim
    for index, block in enumerate(student.blocks):
        if (block.attn.qkv.weight.shape, block.attn.proj.weight.shape) != ((3 * C, C), (C, C)):
            raise AnalyticError(
                f"blocks.{index}.attn: analytic starts need projections of queries, keys, values and heads alone; "
                f"{type(block.attn).__name__} has others"
            )


def _h(block: Block) -> int:
    return block.attn.num_heads


def _d(block: Block) -> int:
    return block.attn.head_dim
