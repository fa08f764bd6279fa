"""Every variant in timm's own VisionTransformer, and operators that are not ours."""

import models
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.attention import Attention, GeometryError
from linvit.config import ConfigError, Variant, resolve_class
from linvit.vit import build_vit, fix_positions, linearize

torch.set_num_threads(1)

VARIANTS = models.STUDY.variants
GRID = (2, 4)
# Paper, Sec. 2: class token, learned positions, pooling.
SKELETONS = {
    "softmax": (True, True, "token"),
    "elu": (True, True, "token"),
    "relu": (True, True, "token"),
    "inline": (True, True, "token"),
    "mhla": (False, False, "avg"),
    "ttt": (False, False, "avg"),
}


class Gate(Attention):
    """An operator from outside the package, with an argument of its own; refuses to be built when told to."""

    own_parameters = ("gate",)
    built = 0

    def __init__(self, dim, num_heads, *, slope=1.0, fails_at=None, **skeleton):
        super().__init__(dim, num_heads, **skeleton)
        type(self).built += 1
        if fails_at == type(self).built:
            raise GeometryError("not this one")
        if not isinstance(slope, float):
            raise TypeError("slope is\nnot a number\n  at all")  # torch's own messages have several lines
        self.gate = nn.Parameter(torch.full((num_heads, 1, 1), slope))

    def mix(self, q, k, v):
        return self.gate * v


def gate(**kwargs) -> Variant:
    return Variant(name="gate", target=f"{__name__}:Gate", kwargs=kwargs)


def outside_attention(vit: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in vit.state_dict().items() if ".attn." not in name}


def assert_untouched(vit: VisionTransformer, before: dict[str, nn.Module]) -> None:
    after = dict(vit.named_modules())
    assert after.keys() == before.keys()
    assert all(after[name] is module for name, module in before.items())


def test_the_catalogue_has_the_papers_skeletons():
    found = {name: (v.class_token, v.positions == "learned", v.pool) for name, v in VARIANTS.items()}
    assert found == SKELETONS


@pytest.mark.parametrize("name", SKELETONS)
def test_a_variant_is_a_plain_timm_vit_but_for_its_attention(name):
    class_token, learned, pool = SKELETONS[name]
    vit = build_vit(models.SIZE, VARIANTS[name], num_classes=3)
    assert type(vit) is VisionTransformer
    assert (vit.has_class_token, vit.num_prefix_tokens, vit.global_pool) == (class_token, int(class_token), pool)
    # The names and shapes are the Softmax ViT's, whatever the pooling, so that its weights can be copied.
    expected = outside_attention(models.on_grid(None, (4, 4)))
    if not class_token:
        del expected["cls_token"]
        expected["pos_embed"] = torch.Size([1, 16, 16])
    assert outside_attention(vit) == expected
    assert {vit.norm.eps, *(block.norm1.eps for block in vit.blocks)} == {1e-6}
    frozen = {name for name, parameter in vit.named_parameters() if not parameter.requires_grad}
    assert frozen == (set() if learned else {"pos_embed"})
    target = resolve_class(VARIANTS[name].target)
    assert [type(block.attn) for block in vit.blocks] == [target, target]
    assert len({id(block.attn.qkv.weight) for block in vit.blocks}) == 2


@pytest.mark.parametrize("name", SKELETONS)
def test_every_trainable_parameter_of_a_variant_takes_part(name):
    vit = models.student(name)
    logits = vit(models.images())
    assert logits.shape == (2, 3)
    (logits * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    useless = {name for name, p in vit.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert not useless
    assert name in ("mhla", "ttt") or vit.pos_embed.grad.any()


@pytest.mark.parametrize("name", SKELETONS)
def test_linearize_takes_any_grid_and_dtype_and_leaves_the_rest_alone(name):
    class_token, _, pool = SKELETONS[name]
    vit = models.on_grid(None, GRID, class_token=class_token, global_pool=pool, qkv_bias=False).double()
    kept = {name: p for name, p in vit.named_parameters() if ".attn." not in name}
    assert linearize(vit, VARIANTS[name]) is vit
    after = dict(vit.named_parameters())
    assert all(after[name] is parameter for name, parameter in kept.items())
    assert {parameter.dtype for parameter in after.values()} == {torch.float64}
    assert vit.blocks[0].attn.qkv.bias is None
    assert vit(torch.randn(2, 3, 8, 16, dtype=torch.float64)).shape == (2, 3)


def test_register_tokens_are_prefix_tokens_too():
    vit = linearize(models.on_grid(None, GRID, reg_tokens=3), VARIANTS["inline"])
    assert vit.blocks[0].attn.num_prefix_tokens == 4
    assert vit(torch.randn(1, 3, 8, 16)).shape == (1, 3)


@pytest.mark.parametrize("name", SKELETONS)
def test_projections_start_as_those_of_timms_vit(name):
    vit = build_vit(models.SIZE.model_copy(update={"dim": 64}), VARIANTS[name], num_classes=3)
    for layer in (
        models.on_grid(None, GRID, dim=64).blocks[0].attn.qkv,
        vit.blocks[1].attn.qkv,
        vit.blocks[1].attn.proj,
    ):
        assert 0.019 < layer.weight.std() < 0.021
        assert not layer.bias.any()


def test_stochastic_depth_grows_with_depth():
    vit = build_vit(models.SIZE.model_copy(update={"depth": 3}), VARIANTS["relu"], num_classes=3, drop_path=0.2)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in vit.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2])


def test_fixed_positions_depend_on_offsets_alone_and_prefix_tokens_have_none():
    vit = models.on_grid(None, GRID, dim=32, reg_tokens=1)
    fix_positions(vit)
    prefix, table = vit.pos_embed[0].split([2, 8])
    assert not prefix.any()
    # The inner product of two sin-cos positions is a function of how far apart they are in rows and columns.
    products = (table @ table.T).reshape(2, 4, 2, 4)
    by_offset: dict[tuple[int, int], list[float]] = {}
    for r, c, s, d in torch.cartesian_prod(*map(torch.arange, products.shape)).tolist():
        by_offset.setdefault((abs(r - s), abs(c - d)), []).append(products[r, c, s, d].item())
    assert all(values == pytest.approx([values[0]] * len(values), abs=1e-4) for values in by_offset.values())
    assert by_offset[0, 0][0] == pytest.approx(32 / 2)
    assert max(values[0] for offset, values in by_offset.items() if offset != (0, 0)) < 15.9


def test_a_class_from_outside_the_package_is_used_with_its_arguments():
    vit = build_vit(models.SIZE, gate(slope=2.5), num_classes=3)
    assert all(isinstance(block.attn, Gate) and (block.attn.gate == 2.5).all() for block in vit.blocks)
    assert vit(models.images()).shape == (2, 3)


@pytest.mark.parametrize(
    "target",
    [
        "no_such_package.module:Attention",
        "linvit.attention.kernel:NoSuchAttention",
        "linvit.no_such_module:Attention",
    ],
)
def test_a_target_that_does_not_import_is_one_line(target):
    vit = models.on_grid(None, GRID)
    before = dict(vit.named_modules())
    with pytest.raises(ConfigError) as caught:
        linearize(vit, Variant(name="mine", target=target))
    assert target in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_untouched(vit, before)


@pytest.mark.parametrize("target", ["linvit.attention.kernel:EPS", "os:mkdir", "pathlib:Path"])
def test_a_target_that_is_no_class_of_modules_is_not_called(target):
    vit = models.on_grid(None, GRID)
    before = dict(vit.named_modules())
    with pytest.raises(
        ConfigError, match=rf"variants\.mine: {target} is no class of modules; allowed: a torch\.nn\.Module"
    ):
        linearize(vit, Variant(name="mine", target=target))
    assert_untouched(vit, before)


@pytest.mark.parametrize(
    ("target", "kwargs", "words"),
    [
        ("linvit.attention.kernel:ReluAttention", {"windw": 7}, "windw"),
        ("linvit.attention.mhla:MhlaAttention", {"window": "7"}, "'str'"),
        ("linvit.attention.mhla:MhlaAttention", {"mixing": "sine"}, "allowed: linear, cos, exp, local"),
        ("torch.nn:Linear", {}, "grid_size"),
        (f"{__name__}:Gate", {"slope": "steep"}, "slope is not a number at all"),
    ],
)
def test_a_target_that_refuses_its_arguments_is_one_line(target, kwargs, words):
    vit = models.on_grid(None, GRID, class_token=False, global_pool="avg")
    before = dict(vit.named_modules())
    with pytest.raises(ConfigError) as caught:
        linearize(vit, Variant(name="mine", target=target, kwargs=kwargs))
    assert_untouched(vit, before)
    message = str(caught.value)
    assert message.startswith(f"variants.mine: {target} refused its arguments: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("variant", [VARIANTS["mhla"], VARIANTS["ttt"], gate(fails_at=2)], ids=lambda v: v.name)
def test_a_vit_that_cannot_be_linearised_is_left_untouched(variant):
    Gate.built = 0  # the last of these is built for the first block, and refused for the second
    vit = models.on_grid(None, GRID)
    before = dict(vit.named_modules())
    with pytest.raises(GeometryError):
        linearize(vit, variant)
    assert_untouched(vit, before)


@pytest.mark.parametrize(
    ("changes", "told"), [({"pos_embed": "none"}, "adds no positions"), ({"embed_dim": 18}, "width 18")]
)
def test_fixed_positions_need_a_place_and_a_width(changes, told):
    vit = VisionTransformer(img_size=16, patch_size=4, **{"embed_dim": 16, "depth": 1, "num_heads": 2, **changes})
    with pytest.raises(ConfigError, match=f"positions sincos: .*{told}") as caught:
        fix_positions(vit)
    assert "\n" not in str(caught.value)
