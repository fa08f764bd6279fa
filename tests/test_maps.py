"""Attention maps for plots: by each operator's formula, of any ViT that has them."""

import models
import pytest
import torch

from linvit.maps import MapError, attention_map
from linvit.vit import linearize

torch.set_num_threads(1)


def by_formula(vit, name: str, images: torch.Tensor) -> list[torch.Tensor]:
    """The map of each block from the tokens that its attention is given."""
    maps = []
    for block in vit.blocks:
        block.attn.register_forward_pre_hook(
            lambda attn, inputs: maps.append(
                models.quadratic_map(name, *models.split_heads(attn.qkv(inputs[0]), attn.num_heads)[:2])
            )
        )
    with torch.no_grad():
        vit.eval()(images)
    return maps


@pytest.mark.parametrize("name", [None, "softmax", "elu", "relu", "inline"])
def test_a_map_is_the_operators_formula_on_the_blocks_own_tokens(name):
    """Of timm's own attention too."""
    vit, images = models.on_grid(name, (4, 4), drop_path_rate=0.5).train(), models.images()
    vit.norm.eval()
    models.perturb(vit, 0.2, seed=1)
    maps = attention_map(vit, images, block=None)
    last, first = attention_map(vit, images), attention_map(vit, images, block=0)
    assert vit.training
    assert not vit.norm.training
    assert not any(module._forward_pre_hooks for module in vit.modules())
    assert maps.shape == (2, 2, 2, 17, 17)
    sums = maps.sum(-1)
    assert (((sums - 1).abs() < 1e-3) | ((sums == 0) & (name == "relu"))).all()
    assert torch.equal(maps[-1], last)
    assert torch.equal(maps[0], first)
    torch.testing.assert_close(maps, torch.stack(by_formula(vit, name or "softmax", images)))


def test_a_hybrid_has_the_map_of_each_block():
    vit = linearize(models.on_grid(None, (4, 4)), "relu", blocks=[1])
    assert (attention_map(vit, models.images(), block=0) > 0).all()
    assert (attention_map(vit, models.images(), block=1) == 0).any()


def test_queries_and_keys_are_normed_before_their_map():
    """qk_norm: the map is of the normed queries and keys, so their scale does not matter."""
    vit, images = linearize(models.on_grid(None, (4, 4), qk_norm=True), "elu"), models.images()
    models.perturb(vit, 0.2, seed=1)
    before = attention_map(vit, images, block=0)
    with torch.no_grad():
        vit.blocks[0].attn.qkv.weight.mul_(10)
        vit.blocks[0].attn.qkv.bias.mul_(10)
    torch.testing.assert_close(attention_map(vit, images, block=0), before, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mhla", "ttt"])
def test_an_operator_without_map_is_refused(name):
    vit = models.on_grid(name, (4, 4)).train()
    with pytest.raises(MapError, match=r"Attention has no attention map; allowed: softmax, elu, relu, inline$"):
        attention_map(vit, models.images())
    assert vit.training


@pytest.mark.parametrize("block", [2, -3])
def test_a_block_that_is_not_there_is_refused(block):
    with pytest.raises(MapError, match=f"block {block} is none of the model's; allowed: -2 to 1"):
        attention_map(models.on_grid("relu", (4, 4)), models.images(), block=block)


def test_what_is_no_vit_or_no_block_is_refused():
    images = torch.zeros(1, 3, 32, 32)
    with pytest.raises(MapError, match="a Linear has no attention maps; allowed: timm's VisionTransformer"):
        attention_map(torch.nn.Linear(2, 2), images)
    with pytest.raises(MapError, match="block 'last' is none of the model's"):
        attention_map(models.student("relu"), images, block="last")
