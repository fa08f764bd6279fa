"""Small operators, ViTs and sources with random weights, and attention maps written from their formulas."""

from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.attention.inline import InlineAttention
from linvit.attention.kernel import EluAttention, ReluAttention
from linvit.attention.mhla import MhlaAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.attention.ttt import TttAttention
from linvit.config import Size, Variant, load_study
from linvit.grid import SOFTMAX
from linvit.sources import Weights
from linvit.vit import build_vit, fix_positions, linearize

STUDY = load_study(Path(__file__).parents[1] / "config.yaml")
SIZE = Size(name="two-blocks", dim=16, depth=2, heads=2, patch_size=4, image_size=16)

# name -> (class, own arguments, prefix tokens it is used with)
OPERATORS = {
    "softmax": (SoftmaxAttention, {}, 1),
    "elu": (EluAttention, {}, 1),
    "relu": (ReluAttention, {}, 1),
    "inline": (InlineAttention, {}, 1),
    "inline_local": (InlineAttention, {"local_residual": True}, 1),
    "mhla": (MhlaAttention, {"window": 2}, 0),
    "ttt": (TttAttention, {}, 0),
}


def operator(
    name: str, grid: tuple[int, int] = (2, 4), *, dim: int = 8, heads: int = 2, scale: float | None = 0.4, **changes
) -> nn.Module:
    """An operator in float64 whose every parameter, starts of zero and one included, is off its start by `scale`."""
    cls, own, prefix = OPERATORS[name]
    torch.manual_seed(0)
    module = cls(dim, heads, **{"grid_size": grid, "num_prefix_tokens": prefix, **own, **changes}).double()
    if scale is not None:
        perturb(module, scale, seed=1)
    return module


def tokens(module: nn.Module, grid: tuple[int, int], batch: int = 2, seed: int = 2) -> Tensor:
    """Random tokens [B, N, C] of the operator's dtype for a grid and the prefix tokens it was built with."""
    prefix = getattr(module, "num_prefix_tokens", 1)
    generator = torch.Generator().manual_seed(seed)
    weight = module.qkv.weight
    x = torch.randn(batch, prefix + grid[0] * grid[1], weight.shape[1], generator=generator, dtype=torch.float64)
    return x.to(weight.dtype)


@torch.no_grad()
def perturb(module: nn.Module, scale: float, seed: int) -> None:
    """Add noise to every parameter; only upwards to mixing matrices, whose weighted sums are divided by."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.add_((noise.abs() if "block_mix" in name else noise).to(parameter))


def student(variant: str | Variant, size: Size = SIZE, *, seed: int = 0, **options) -> VisionTransformer:
    """A ViT of a configured variant, every parameter off its start, so that a zero or a one is never a coincidence."""
    variant = STUDY.variants[variant] if isinstance(variant, str) else variant
    torch.manual_seed(seed)
    vit = build_vit(size, variant, **{"num_classes": 3, **options})
    fixed = vit.pos_embed.detach().clone() if variant.positions == "sincos" else None
    perturb(vit, 0.2, seed + 1)
    if fixed is not None:
        vit.pos_embed.data.copy_(fixed)
    return vit


def on_grid(
    variant: str | None, grid: tuple[int, int], *, dim: int = 16, heads: int = 2, **options
) -> VisionTransformer:
    """A timm ViT with a variant's skeleton on any grid, linearised; without a variant, timm's own as it is."""
    chosen = STUDY.variants[variant or "softmax"]
    torch.manual_seed(0)
    skeleton = {"class_token": chosen.class_token, "global_pool": chosen.pool, "fc_norm": False, **options}
    vit = VisionTransformer(
        img_size=(4 * grid[0], 4 * grid[1]),
        patch_size=4,
        **{"embed_dim": dim, "depth": 2, "num_heads": heads, "num_classes": 3, **skeleton},
    )
    if variant and chosen.positions == "sincos":
        fix_positions(vit)
    return linearize(vit, chosen) if variant else vit


def source(size: Size = SIZE, *, seed: int = 100, num_classes: int = 7) -> Weights:
    """The random weights of a Softmax ViT."""
    vit = student(SOFTMAX, size, seed=seed, num_classes=num_classes)
    return Weights({name: tensor.clone() for name, tensor in vit.state_dict().items()}, size.grid_size)


def images(size: Size = SIZE, batch: int = 2, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, size.channels, size.image_size, size.image_size, generator=generator)


def split_heads(qkv: Tensor, heads: int) -> list[Tensor]:
    """[B, N, 3C] -> q, k, v as [B, H, N, d]: rows of qkv in the order q, k, v, each head-major."""
    B, N, width = qkv.shape
    d = width // 3 // heads
    return [part.reshape(B, N, heads, d).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


def quadratic_map(name: str, q: Tensor, k: Tensor) -> Tensor:
    """The attention map [B, H, N, N] by the formula of the paper that each operator is from."""
    N, d = q.shape[-2:]
    if name == "softmax":
        weights = (q @ k.mT / d**0.5).exp()
        return weights / weights.sum(-1, keepdim=True)
    if name == "inline":
        mean = k.sum(-2, keepdim=True) / N
        return (q @ k.mT / d**0.5) / N + (1 - q @ mean.mT / d**0.5) / N
    phi = {"elu": lambda x: torch.where(x > 0, x + 1, x.exp()), "relu": lambda x: x.clamp(min=0)}[name]
    scores = phi(q) @ phi(k).mT
    return scores / (scores.sum(-1, keepdim=True) + 1e-6)
