"""ViT^3's test-time-training block: two small models fitted to each image's keys and values, then asked its queries.

Han et al. 2026 [arXiv:2512.01643]. The inner step is part of the forward pass, in training and inference alike.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, full_precision, linear, summaries

SCALE = 9**-0.5  # the inner loss's scale, of both branches


class TttAttention(Attention):
    """One closed-form gradient step of a SwiGLU and of a 3x3 depthwise convolution; patch tokens only.

    `qkv` has 3C rows for the SwiGLU branch and 3d more for the convolution; `proj` maps C + d to C.
    """

    own_parameters = ("w1", "w2", "w3", "proj")

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True, **skeleton: Any) -> None:
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
        with full_precision(*self.heads(self.qkv(x))) as (q, k, v, *images):
            out, conv = self.mix(q, k, v), self.mix_conv(*images)
            # The convolution is one head more.
            out = torch.cat([out.transpose(1, 2), conv.unsqueeze(2)], dim=2).flatten(2)
        return self.proj(out.to(x.dtype))

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[B, N, 3C + 3d] -> three [B, H, N, d] of the SwiGLU, three [B d, 1, h, w] of the convolution."""
        C, d = self.num_heads * self.head_dim, self.head_dim
        *swiglu, q, k, v = qkv.split([C, C, C, d, d, d], dim=-1)
        return (*map(self.split, swiglu), *(t.mT.reshape(-1, 1, *self.grid_size) for t in (q, k, v)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The SwiGLU branch: three [B, H, N, d] -> [B, H, N, d]."""
        w1, w2 = self._step(k, v)
        return (q @ w1) * F.silu(q @ w2)

    def _step(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the SwiGLU after its inner step, each [B, H, d, d]."""
        w1, w2 = self.w1.to(k.dtype), self.w2.to(k.dtype)
        z1, z2 = k @ w1, k @ w2
        gate = z2.sigmoid()
        silu = z2 * gate
        slope = gate + silu * (1 - gate)  # of silu, at z2
        return self._stepped(w1, k, v * silu), self._stepped(w2, k, v * z1 * slope)

    @staticmethod
    def _stepped(w: Tensor, k: Tensor, error: Tensor) -> Tensor:
        """A weight after its inner step: its gradient is -step k^T error."""
        direction, *_ = summaries(k, error)
        step = SCALE / k.shape[-2]  # applied to the column norms, not to the tokens
        return w + direction * (step / (step * norm(direction, -2) + 1))

    def mix_conv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The convolution branch: three [B d, 1, h, w] -> [B, N, d]."""
        # The gradient of <conv(k, w), error> in w.
        direction = _Correlation.apply(k, v)
        step = SCALE / k[0].numel()
        update = direction * (step / (step * norm(direction, (-2, -1)) + 1))
        kernels = update.unflatten(0, (-1, self.head_dim)) + self.w3.to(update.dtype)
        return convolved(q, kernels.flatten(0, 1)).reshape(-1, self.head_dim, k[0].numel()).mT

    def softmax_view(self) -> dict[str, Tensor]:
        """The 3C standard rows of `qkv`."""
        rows = 3 * self.num_heads * self.head_dim
        return {name: tensor[:rows] for name, tensor in super().softmax_view().items()}


def norm(x: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """The Euclidean norm along dimensions, kept; its gradient at zero is zero."""
    return (x.square().sum(dim, keepdim=True) + 1e-30).sqrt()


class _Correlation(torch.autograd.Function):
    """The 3x3 correlation of images and errors, both [n, 1, h, w], on padding 1 -> [n, 1, 3, 3].

    Its gradients are convolutions again, where autograd would go through nine images, shifted.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, errors: Tensor) -> Tensor:
        ctx.save_for_backward(images, errors)
        h, w = images.shape[-2:]
        padded = F.pad(images, (1, 1, 1, 1))
        cells = [(padded[..., i : i + h, j : j + w] * errors).sum((-2, -1)) for i in range(3) for j in range(3)]
        return torch.stack(cells, dim=-1).unflatten(-1, (3, 3))

    @staticmethod
    def backward(ctx: Any, kernels: Tensor) -> tuple[Tensor, Tensor]:
        images, errors = ctx.saved_tensors
        return convolved(errors, kernels.flip(-2, -1)), convolved(images, kernels)


def convolved(images: Tensor, kernels: Tensor) -> Tensor:
    """Each of the images [n, 1, h, w] with its kernel of [n, 1, 3, 3], on padding 1."""
    # Their number by the shape: len() would fix the batch of an exported program.
    return F.conv2d(images.transpose(0, 1), kernels, padding=1, groups=images.shape[0]).transpose(0, 1)
