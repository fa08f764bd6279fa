"""What the operators share: the projections of timm's `Attention`, its call, and how weights map onto it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from linvit.config import UserError


class GeometryError(UserError):
    """The operator cannot work on this grid, or with these prefix tokens."""


class Projections(Protocol):
    """What analytic starts shape: the widths and the projections that an attention has in common with timm's."""

    num_heads: int
    head_dim: int
    qkv: nn.Linear
    proj: nn.Linear


class Attention(nn.Module):
    """Multi-head token mixing with timm's parameters: `qkv` (C -> 3C, rows q, k, v, head-major) and `proj`.

    An operator implements `mix`, or overrides `forward` when it needs the tokens themselves.

    Args:
        dim: Width C of a token.
        num_heads: Heads H, each of width d = C / H.
        grid_size: Patch tokens as (rows, columns), in raster order after the prefix tokens.
        num_prefix_tokens: Class and register tokens, which come first and lie on no grid.
        qkv_bias: Whether `qkv` has a bias.
    """

    own_parameters: tuple[str, ...] = ()
    """Names of the parameters (or their modules) with no counterpart in Softmax attention."""
    needs_grid: bool = True
    """Whether tokens must be as many as the grid's and the prefix; without it, images of any size will do."""
    takes_qk_norm: bool = False
    """Whether `heads` applies `q_norm` and `k_norm`, a ViT's norms of each head's queries and keys [..., d]."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise GeometryError(f"dim {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.qkv = linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = linear(dim, dim)
        if self.takes_qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Route values between tokens: three [B, H, N, d] -> [B, H, N, d]."""
        raise NotImplementedError

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Mix tokens: [B, N, C] -> [B, N, C], with timm's signature. Masks are refused."""
        self.check(x, attn_mask, is_causal)
        out = self.mix(*self.heads(self.qkv(x)))
        return self.proj(self.merge(out).to(x.dtype))

    def check(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        """Refuse masks, which no operator here defines, and, where the grid matters, another number of tokens."""
        name = type(self).__name__
        if attn_mask is not None or is_causal:
            raise ValueError(f"{name} attends to all tokens; attn_mask and is_causal are not supported")
        rows, columns = self.grid_size
        expected = self.num_prefix_tokens + rows * columns
        if self.needs_grid and x.shape[1] != expected:
            raise GeometryError(
                f"{name} got {x.shape[1]} tokens, expected {expected}: "
                f"{self.num_prefix_tokens} prefix and a {rows}x{columns} grid"
            )

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[B, N, 3C] -> three [B, H, N, d], contiguous; queries and keys normed where a ViT has norms for them."""
        q, k, v = (self.split(part) for part in qkv.chunk(3, dim=-1))
        return (self.q_norm(q), self.k_norm(k), v) if self.takes_qk_norm else (q, k, v)

    def split(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, H, N, d], contiguous: every product would copy a strided view again."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2).contiguous()

    @staticmethod
    def merge(heads: Tensor) -> Tensor:
        """[B, H, N, d] -> [B, N, C]."""
        return heads.transpose(1, 2).flatten(2)

    def softmax_view(self) -> dict[str, Tensor]:
        """The parts of this module's parameters that Softmax attention has too, by its parameter names.

        Copying writes into these; every other parameter must be named in `own_parameters`.
        """
        return {name: tensor for name, tensor in self.named_parameters() if not is_own(name, self)}

    def _refuse_prefix_tokens(self) -> None:
        if self.num_prefix_tokens:
            raise GeometryError(
                f"{type(self).__name__} takes patch tokens only, got num_prefix_tokens={self.num_prefix_tokens}; "
                "build the ViT with class_token=False, global_pool='avg' and fc_norm=False"
            )


def is_own(name: str, attention: nn.Module) -> bool:
    """Whether an attention declares the parameter of this name, or the module it is in, its own."""
    return any(f"{name}.".startswith(f"{own}.") for own in getattr(attention, "own_parameters", ()))


def linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """A Linear with a ViT's own start: truncated normal of std 0.02, zero bias."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


@contextmanager
def full_precision(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in float32 and autocast off: sums over tokens and divisions lose too much in half precision."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def summaries(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What linear attention keeps of its tokens, k^T v and the sums of k and of v.

    Keys [..., N, d] and values [..., N, m] -> [..., d, m], [..., 1, d], [..., 1, m].
    """
    return _Summaries.apply(k, v)


class _Summaries(torch.autograd.Function):
    """Autograd would make the gradient of k^T, transposed, and add that of each sum in a pass of its own."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(k, v)
        return k.mT @ v, k.sum(-2, keepdim=True), v.sum(-2, keepdim=True)

    @staticmethod
    def backward(ctx: Any, kv: Tensor, k_sum: Tensor, v_sum: Tensor) -> tuple[Tensor, Tensor]:
        k, v = ctx.saved_tensors
        return (v @ kv.mT).add_(k_sum), (k @ kv).add_(v_sum)
