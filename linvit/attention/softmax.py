"""Softmax attention, the reference: timm's own module behind the operators' constructor.

Dosovitskiy et al. 2021 [arXiv:2010.11929].
"""

import timm.layers
from torch import Tensor

from linvit.attention.base import linear


class SoftmaxAttention(timm.layers.Attention):
    """softmax(q k^T / sqrt(d)) v, computed by timm (fused where the hardware has it)."""

    own_parameters: tuple[str, ...] = ()
    needs_grid = False
    takes_qk_norm = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        # timm leaves a ViT's own start to the ViT, which an attention that is swapped in later misses.
        self.qkv = linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = linear(dim, dim)

    def attention_map(self, x: Tensor) -> Tensor:
        """[B, N, C] -> the map [B, H, N, N]; rows sum to 1."""
        return softmax_map(self, x)

    def softmax_view(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def softmax_map(attn: timm.layers.Attention, x: Tensor) -> Tensor:
    """The map [B, H, N, N] of any timm Softmax attention on tokens [B, N, C]."""
    B, N, _ = x.shape
    q, k, _ = attn.qkv(x).reshape(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    return (q.float() * attn.scale @ k.float().mT).softmax(-1)
