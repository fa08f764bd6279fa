"""MHLA: linear attention within windows whose key-value summaries a learned matrix mixes.

Zhang et al., ICLR 2026 [arXiv:2601.07832]; five-by-five depthwise convolution and norms as in the authors' code.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, GeometryError, full_precision, summaries

EPS = 1e-6


class MhlaAttention(Attention):
    """Token-level multi-head linear attention over square windows; patch tokens only.

    Args:
        window: Side of a window in tokens; by default half the grid's shorter side (7 on 14 x 14).
        mixing: Start of the window-mixing matrix: "linear", "cos", "exp" or "local".
        norms: Whether to keep the authors' LayerNorm before, and RMSNorm on queries and keys.

    Raises:
        GeometryError: windows that do not tile the grid, or prefix tokens.
    """

    own_parameters = ("block_mix", "lepe", "norm", "q_norm", "k_norm")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int | None = None,
        mixing: str = "linear",
        norms: bool = True,
        **skeleton: Any,
    ) -> None:
        super().__init__(dim, num_heads, **skeleton)
        self._refuse_prefix_tokens()
        rows, columns = self.grid_size
        self.window = max(1, min(rows, columns) // 2) if window is None else window
        if self.window < 1 or rows % self.window or columns % self.window:
            raise GeometryError(f"MhlaAttention: windows of {self.window} tokens do not tile a {rows}x{columns} grid")
        self.windows = (rows // self.window, columns // self.window)
        self.block_mix = nn.Linear(math.prod(self.windows), math.prod(self.windows), bias=False)
        with torch.no_grad():
            self.block_mix.weight.copy_(mixing_matrix(self.windows, mixing))
        self.lepe = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-5) if norms else nn.Identity()
        self.q_norm = RMSNorm(dim) if norms else nn.Identity()
        self.k_norm = RMSNorm(dim) if norms else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self.check(x, attn_mask, is_causal)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = (self._to_windows(F.relu(norm(t)) + EPS) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        with full_precision(q, k, self._to_windows(v)) as windows:
            out = self._from_windows(self.mix(*windows))
        out = out.to(x.dtype) + self._positional(v).to(x.dtype)
        return self.proj(out)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three [B, H, b, e^2, d] (windows, tokens within) -> the same shape."""
        mixed = self.block_mix.weight.to(k.dtype)
        kv, k_sum, _ = summaries(k, v)
        kv = torch.einsum("ij,bhjde->bhide", mixed, kv)
        # One product gives the numerators and, in its last column, q_j . z_j: the authors' code mixes these products at
        # equal position inside the window, not the sums z_j.
        out = q @ torch.cat([kv, k_sum.mT], dim=-1)
        denominator = torch.einsum("ij,bhjt->bhit", mixed, out[..., -1]).unsqueeze(-1) + EPS
        return out[..., :-1] * denominator.reciprocal()

    def _positional(self, v: Tensor) -> Tensor:
        """The depthwise convolution of the values on the whole grid, [B, N, C] -> [B, N, C]."""
        return self.lepe(v.mT.unflatten(-1, self.grid_size)).flatten(2).mT

    def _to_windows(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, H, b, e^2, d], windows in raster order."""
        (rows, columns), e = self.windows, self.window
        x = x.reshape(x.shape[0], rows, e, columns, e, self.num_heads, self.head_dim)
        return x.permute(0, 5, 1, 3, 2, 4, 6).reshape(x.shape[0], self.num_heads, rows * columns, e * e, self.head_dim)

    def _from_windows(self, x: Tensor) -> Tensor:
        """[B, H, b, e^2, d] -> [B, N, C]."""
        (rows, columns), e = self.windows, self.window
        x = x.reshape(x.shape[0], self.num_heads, rows, columns, e, e, self.head_dim)
        return x.permute(0, 2, 4, 3, 5, 1, 6).reshape(x.shape[0], rows * e * columns * e, -1)


class RMSNorm(nn.RMSNorm):
    """In float32, whatever the precision of tokens and weight."""

    def forward(self, x: Tensor) -> Tensor:
        with full_precision(x, self.weight) as (x, weight):
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def mixing_matrix(windows: tuple[int, int], mixing: str) -> Tensor:
    """The start of the b x b mixing matrix from distances between window centres; columns sum to 1."""
    rows, columns = windows
    centres = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(columns)))
    distance = torch.cdist(centres, centres)
    relative = distance / distance.max().clamp_min(1)
    starts = {
        "linear": lambda: 1 - relative,
        "cos": lambda: torch.cos(math.pi / 4 * relative),
        "exp": lambda: torch.exp(-distance / 3),
        "local": lambda: (distance <= 1.5).float(),
    }
    if mixing not in starts:
        raise ValueError(f"mixing {mixing!r} is not defined; allowed: {', '.join(starts)}")
    matrix = starts[mixing]()
    return matrix / matrix.sum(0, keepdim=True)
