"""Kernelised linear attention, phi(q) (phi(k)^T v) normalised by phi(q) . sum phi(k).

Katharopoulos et al. 2020 [arXiv:2006.16236, Sec. 3.2]. There is no 1/sqrt(d) scale.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.base import Attention, full_precision, summaries

EPS = 1e-6  # added to the normaliser, as in the original library


class KernelAttention(Attention):
    """Linear attention with a non-negative feature map `phi`, [..., d] -> [..., d]."""

    needs_grid = False
    takes_qk_norm = True

    @staticmethod
    def phi(x: Tensor) -> Tensor:
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with full_precision(q, k, v) as (q, k, v):
            kv, k_sum, _ = summaries(self.phi(k), v)
            # One product gives the sums of the values and, in its last column, the normaliser.
            out = self.phi(q) @ torch.cat([kv, k_sum.mT], dim=-1)
            return out[..., :-1] * (out[..., -1:] + EPS).reciprocal()

    def attention_map(self, x: Tensor) -> Tensor:
        """[B, N, C] -> the row-normalised kernel map [B, H, N, N] (paper, Sec. B.4)."""
        q, k, _ = self.heads(self.qkv(x))
        with full_precision(q, k) as (q, k):
            scores = self.phi(q) @ self.phi(k).mT
            return scores / (scores.sum(-1, keepdim=True) + EPS)


class EluAttention(KernelAttention):
    """phi(x) = elu(x) + 1."""

    @staticmethod
    def phi(x: Tensor) -> Tensor:
        return _EluPlusOne.apply(x)


class _EluPlusOne(torch.autograd.Function):
    """F.elu(x) + 1, but without expm1, which takes several times as long as exp on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        phi = x.clamp(max=0).exp_().add_(F.relu(x))
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return grad * phi.clamp(max=1)  # the slope is 1 above zero, below it exp(x)


class ReluAttention(KernelAttention):
    """phi(x) = relu(x)."""

    @staticmethod
    def phi(x: Tensor) -> Tensor:
        return F.relu(x)
