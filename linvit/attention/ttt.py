"""ViT^3's test-time-training block: two small models fitted to each image's keys and values, then asked its queries.

Han et al. 2026 [arXiv:2512.01643]. The inner step is part of the forward pass, in training and inference alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, full_precision, linear

SCALE = 9**-0.5  # the inner loss's scale, of both branches


class TttAttention(Attention):
    """One closed-form gradient step of a SwiGLU and of a 3x3 depthwise convolution; patch tokens only.

    `qkv` has 3C rows for the SwiGLU branch and 3d more for the convolution; `proj` maps C + d to C.
    """

    own_parameters = ("w1", "w2", "w3", "proj")

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True, **skeleton) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, **skeleton)
        self._refuse_prefix_tokens()
        d = self.head_dim
        self.qkv = linear(dim, 3 * dim + 3 * d, bias=qkv_bias)
        self.proj = linear(dim + d, dim)
        self.w1, self.w2 = (nn.Parameter(torch.empty(1, num_heads, d, d)) for _ in range(2))
        self.w3 = nn.Parameter(torch.empty(d, 1, 3, 3))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self.check(x, attn_mask, is_causal)
        d = self.head_dim
        swiglu, conv = self.qkv(x).split([3 * self.num_heads * d, 3 * d], dim=-1)
        with full_precision(swiglu, conv) as (swiglu, conv):
            out = self.merge(self.mix(*self.heads(swiglu)))
            out = torch.cat([out, self.mix_conv(*conv.chunk(3, dim=-1))], dim=-1)
        return self.proj(out.to(x.dtype))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The SwiGLU branch: three [B, H, N, d] -> [B, H, N, d]."""
        w = torch.cat([self.w1, self.w2], dim=-1).to(q.dtype)
        z1, z2 = (k @ w).chunk(2, dim=-1)
        gate = z2.sigmoid()
        silu = z2 * gate
        slope = gate + silu * (1 - gate)  # of silu, at z2
        # The inner gradient is -step * direction; its scale is applied to the column norms, not to the tokens.
        direction = k.mT @ torch.cat([v * silu, v * z1 * slope], dim=-1)
        step = SCALE / k.shape[-2]
        w = w + direction * (step / (step * norm(direction, -2) + 1))
        z1, z2 = (q @ w).chunk(2, dim=-1)
        return z1 * F.silu(z2)

    def mix_conv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The convolution branch: three [B, N, d] -> [B, N, d]."""
        B, N, d = q.shape
        q, k, v = (t.mT.reshape(B * d, 1, *self.grid_size) for t in (q, k, v))
        # The gradient of <conv(k, w), error> in w: the correlation of k with the error, per image and channel.
        direction = (F.unfold(k, 3, padding=1) @ v.reshape(B * d, N, 1)).reshape(B, d, 9)
        step = SCALE / N
        update = (direction * (step / (step * norm(direction, -1) + 1))).reshape(B, d, 1, 3, 3)
        kernels = (self.w3.to(q.dtype) + update).reshape(B * d, 1, 3, 3)
        return F.conv2d(q.reshape(1, B * d, *self.grid_size), kernels, padding=1, groups=B * d).reshape(B, d, N).mT

    def softmax_view(self) -> dict[str, Tensor]:
        """The 3C standard rows of `qkv`."""
        rows = 3 * self.num_heads * self.head_dim
        return {name: tensor[:rows] for name, tensor in super().softmax_view().items()}


def norm(x: Tensor, dim: int) -> Tensor:
    """The Euclidean norm along a dimension, kept; its gradient at zero is zero."""
    return (x.square().sum(dim, keepdim=True) + 1e-30).sqrt()
