"""Linear attention by squared ReLU with a learned gate for each head: an operator from outside of linvit."""

from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import Attention

EPS = 1e-6


class SquaredReluAttention(Attention):
    """gate phi(q) (phi(k)^T v) / (phi(q) . sum_n phi(k)_n + eps), phi(x) = relu(x)^power; [B, N, C] -> [B, N, C]."""

    own_parameters = ("gate",)  # which Softmax attention lacks: a copy leaves it at its start
    needs_grid = False  # images of any size will do
    takes_qk_norm = True  # `heads` applies the norms of queries and keys that a ViT may have

    def __init__(self, dim: int, num_heads: int, *, power: float = 2.0, **skeleton: Any) -> None:
        super().__init__(dim, num_heads, **skeleton)
        self.power = power
        self.gate = nn.Parameter(torch.ones(num_heads, 1, 1))

    def phi(self, x: Tensor) -> Tensor:
        return x.float().relu().pow(self.power)  # float32: sums over tokens lose too much in half precision

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.phi(q), self.phi(k)
        return self.gate * (q @ (k.mT @ v.float())) / (q @ k.sum(-2, keepdim=True).mT + EPS)

    def attention_map(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(self.qkv(x))
        scores = self.phi(q) @ self.phi(k).mT
        return scores / (scores.sum(-1, keepdim=True) + EPS)
