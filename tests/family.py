"""Small ViTs of timm's family, one for each part that DeiT lacks."""

import models
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ResPostBlock, VisionTransformer

FAMILY = {
    "class token": {},
    "register tokens": {"reg_tokens": 3},
    "distilled": {"distilled": True},
    "dynamic image size": {"dynamic_img_size": True},
    "norms of queries and keys": {"qk_norm": True},
    "LayerScale": {"init_values": 0.1},
    "positions of patches alone": {"no_embed_class": True, "reg_tokens": 2},
    "no positions": {"pos_embed": "none"},
    "norm before": {"pre_norm": True},
    "norm after pooling": {"class_token": False, "global_pool": "avg"},
    "attention that pools": {"class_token": False, "global_pool": "map"},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "norms after the branches": {"block_fn": ResPostBlock},
}


def vit(seed: int = 0, **options) -> VisionTransformer:
    """A ViT of two blocks with random weights throughout; the options are timm's."""
    torch.manual_seed(seed)
    kind = VisionTransformerDistilled if options.pop("distilled", False) else VisionTransformer
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = kind(**(shape | options))
    models.perturb(model, 0.2, seed + 1)
    return model
