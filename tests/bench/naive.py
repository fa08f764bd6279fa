"""Each operator straight from its formula, as its authors' code has it: what the fast ones are measured against.

A function takes an operator, for its weights, and tokens [B, N, C]; it gives what the operator gives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def elu(operator: nn.Module, x: Tensor) -> Tensor:
    return _kernel(operator, x, lambda t: F.elu(t) + 1)


def relu(operator: nn.Module, x: Tensor) -> Tensor:
    return _kernel(operator, x, F.relu)


def _kernel(operator: nn.Module, x: Tensor, phi) -> Tensor:
    """The einsums of `LinearAttention` in fast-transformers, Katharopoulos et al.'s library."""
    B, N, C = x.shape
    q, k, v = operator.qkv(x).reshape(B, N, 3, operator.num_heads, operator.head_dim).unbind(2)
    q, k = phi(q), phi(k)
    kv = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
    return operator.proj(torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).reshape(B, N, C))


def inline(operator: nn.Module, x: Tensor) -> Tensor:
    """With the local residual where the operator has one."""
    B, N, C = x.shape
    qkv = operator.qkv(x).reshape(B, N, 3, operator.num_heads, operator.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    q = q * operator.scale
    kv = (k.transpose(-2, -1) / N) @ v
    out = q @ kv + (1 - q @ k.mean(dim=2, keepdim=True).transpose(-2, -1)) * v.mean(dim=2, keepdim=True)
    out = out.transpose(1, 2).reshape(B, N, C)
    if operator.local is not None:
        p, (h, w) = operator.num_prefix_tokens, operator.grid_size
        values = v.transpose(1, 2).reshape(B, N, C)[:, p:].transpose(1, 2).reshape(1, B * C, h, w)
        hidden = F.gelu(operator.local.fc1(x.mean(dim=1).unsqueeze(-1)))
        kernels = operator.local.fc2(hidden).reshape(B * C, 1, 3, 3)
        residual = F.conv2d(values, kernels, padding=1, groups=B * C).reshape(B, C, h * w).transpose(1, 2)
        out = torch.cat([out[:, :p], out[:, p:] + residual], dim=1)
    return operator.proj(out)


def mhla(operator: nn.Module, x: Tensor) -> Tensor:
    B, N, C = x.shape
    (rows, columns), (h, w), e = operator.windows, operator.grid_size, operator.window
    H, d, b = operator.num_heads, operator.head_dim, rows * columns

    def windowed(t: Tensor) -> Tensor:
        t = t.reshape(B, rows, e, columns, e, H, d).permute(0, 5, 1, 3, 2, 4, 6)
        return t.reshape(B * H, b, e * e, d)

    def mixed(t: Tensor) -> Tensor:
        return torch.einsum("ij,bjmn->bimn", operator.block_mix.weight, t)

    q, k, v = operator.qkv(operator.norm(x)).reshape(B, N, 3, C).unbind(2)
    lepe = operator.lepe(v.transpose(1, 2).reshape(B, C, h, w)).reshape(B, C, N).transpose(1, 2)
    q = F.relu(operator.q_norm(q)) + 1e-6
    k = F.relu(operator.k_norm(k)) + 1e-6
    q, k, v = windowed(q), windowed(k), windowed(v)
    kv = mixed(k.transpose(-2, -1) @ v)
    normaliser = mixed((q * k.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)) + 1e-6
    out = (q @ kv) / normaliser
    out = out.reshape(B, H, rows, columns, e, e, d).permute(0, 2, 4, 3, 5, 1, 6).reshape(B, N, C)
    return operator.proj(out + lepe)


def ttt(operator: nn.Module, x: Tensor) -> Tensor:
    B, N, C = x.shape
    (h, w), d, scale = operator.grid_size, operator.head_dim, 9**-0.5
    *swiglu, q2, k2, v2 = operator.qkv(x).split([C, C, C, d, d, d], dim=-1)
    q, k, v = (t.reshape(B, N, operator.num_heads, d).transpose(1, 2) for t in swiglu)
    w1, w2 = _swiglu_step(k, v, operator.w1, operator.w2, scale)
    out = ((q @ w1) * F.silu(q @ w2)).transpose(1, 2).reshape(B, N, C)
    q2, k2, v2 = (t.reshape(B, h, w, d).permute(0, 3, 1, 2) for t in (q2, k2, v2))
    w3 = _conv_step(k2, v2, operator.w3, scale)
    conv = F.conv2d(q2.reshape(1, B * d, h, w), w3, padding=1, groups=B * d).reshape(B, d, N).transpose(1, 2)
    return operator.proj(torch.cat([out, conv], dim=-1))


def _swiglu_step(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    z1, z2 = k @ w1, k @ w2
    gate = torch.sigmoid(z2)
    error = -v / k.shape[2] * scale
    g1 = k.transpose(-2, -1) @ (error * (z2 * gate))
    g2 = k.transpose(-2, -1) @ (error * z1 * (gate * (1 + z2 * (1 - gate))))
    g1 = g1 / (g1.norm(dim=-2, keepdim=True) + 1)
    g2 = g2 / (g2.norm(dim=-2, keepdim=True) + 1)
    return w1 - g1, w2 - g2


def _conv_step(k: Tensor, v: Tensor, w3: Tensor, scale: float) -> Tensor:
    """The gradient is a correlation of keys and errors, here cell by cell of the kernel."""
    B, d, h, w = k.shape
    error = -v / (h * w) * scale
    k = F.pad(k, (1, 1, 1, 1))
    cells = [(k[:, :, i : i + h, j : j + w] * error).sum(dim=(-2, -1)) for i in range(3) for j in range(3)]
    g = torch.stack(cells, dim=-1).reshape(B * d, 1, 3, 3)
    g = g / (g.norm(dim=(-2, -1), keepdim=True) + 1)
    return w3.repeat(B, 1, 1, 1) - g
