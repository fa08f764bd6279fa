"""InLine attention: an identity kernel, normalised by subtraction so that the map stays injective.

Han et al. 2024 [arXiv:2412.06590]. The paper uses the attention-only form [arXiv:2609.35745, Sec. B.1].
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, full_precision, summaries


class InlineAttention(Attention):
    """A_ij = (s/N) q_i.k_j + (1/N) (1 - s q_i.kbar), with s = d^-1/2; rows sum to 1, entries may be negative.

    Args:
        local_residual: Add the original block's input-dependent 3x3 residual on the values (off in the paper).
    """

    def __init__(self, dim: int, num_heads: int, *, local_residual: bool = False, **skeleton: Any) -> None:
        super().__init__(dim, num_heads, **skeleton)
        self.scale = self.head_dim**-0.5
        self.local = LocalKernel(dim, num_heads) if local_residual else None
        self.needs_grid = local_residual

    own_parameters = ("local",)
    needs_grid = False
    takes_qk_norm = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with full_precision(q, k, v) as (q, k, v):
            N = k.shape[-2]
            kv, k_sum, v_sum = summaries(k, v)
            # q (k^T v / N) + (1 - q.kbar) vbar, with the scale and the mean keys folded into the small matrix.
            kv = (kv - k_sum.mT @ (v_sum / N)) * (self.scale / N)
            return (q @ kv).add_(v_sum / N)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self.check(x, attn_mask, is_causal)
        q, k, v = self.heads(self.qkv(x))
        out = self.merge(self.mix(q, k, v))
        if self.local is not None:
            residual = self.local(x, v[:, :, self.num_prefix_tokens :], self.grid_size)
            out = out + F.pad(residual, (0, 0, self.num_prefix_tokens, 0))
        return self.proj(out.to(x.dtype))

    def attention_map(self, x: Tensor) -> Tensor:
        """[B, N, C] -> the signed, subtraction-normalised map [B, H, N, N] (paper, Sec. B.4)."""
        q, k, _ = self.heads(self.qkv(x))
        with full_precision(q, k) as (q, k):
            centred = k - k.mean(-2, keepdim=True)
            return (self.scale * q @ centred.mT + 1) / k.shape[-2]


class LocalKernel(nn.Module):
    """A 3x3 depthwise kernel per image, predicted from its mean token, applied to values on the grid."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads)

    def forward(self, x: Tensor, values: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Tokens [B, N, C] and patch values [B, H, h w, d] -> [B, h w, C]."""
        B, _, C = x.shape
        kernels = self.fc2(F.gelu(self.fc1(x.mean(1).unsqueeze(-1)))).reshape(B * C, 1, 3, 3)
        image = values.mT.reshape(1, B * C, *grid_size)
        return F.conv2d(image, kernels, padding=1, groups=B * C).reshape(B, C, -1).mT
