"""Any ViT of timm's family: linearised whole or in part, started from another, or refused whole."""

import copy

import family
import models
import pytest
import timm
import torch
from family import FAMILY
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ParallelThingsBlock
from torch import nn

from linvit.attention import GeometryError
from linvit.attention.kernel import ReluAttention
from linvit.catalogue import VARIANTS
from linvit.config import ConfigError, Init
from linvit.init import AnalyticError, CopyError, initialize
from linvit.sources import Weights
from linvit.vit import linearize

torch.set_num_threads(1)

ANY_TOKENS = ("elu", "relu", "inline", "softmax")
EVERYTHING = Init(
    name="everything", copy=("attention", "mlp", "norms", "patch_embed", "positions", "class_token", "head")
)


class Doubled(ReluAttention):
    """An operator from outside the package."""

    def mix(self, q, k, v):
        return 2 * super().mix(q, k, v)


def state(vit: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in vit.state_dict().items()}


def refused(vit: nn.Module, variant, **options) -> str:
    """What is said when a ViT is refused, which must be as it was and in one line."""
    modules, before = dict(vit.named_modules()), state(vit)
    with pytest.raises((GeometryError, ConfigError)) as caught:
        linearize(vit, variant, **options)
    after = dict(vit.named_modules())
    assert after.keys() == modules.keys()
    assert all(after[name] is module for name, module in modules.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- linearised ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ANY_TOKENS)
@pytest.mark.parametrize("kind", FAMILY)
def test_a_vit_of_the_family_is_linearised_and_keeps_the_rest(kind, variant):
    vit = family.vit(**FAMILY[kind])
    kept = {name: p for name, p in vit.named_parameters() if ".attn." not in name}
    names = {name for name, _ in vit.named_parameters()}
    assert linearize(vit, variant) is vit
    after = dict(vit.named_parameters())
    assert after.keys() == names
    assert all(after[name] is parameter for name, parameter in kept.items())
    models.perturb(vit, 0.2, seed=3)
    (vit(models.images()).square().sum()).backward()
    assert {name for name, p in vit.named_parameters() if p.grad is None or not p.grad.any()} == set()


@pytest.mark.parametrize("variant", ["mhla", "ttt"])
@pytest.mark.parametrize("kind", ["norm after pooling", "attention that pools", "no biases", "LayerScale"])
def test_an_operator_for_patches_takes_vits_without_prefix_tokens(kind, variant):
    vit = family.vit(**{"class_token": False, "global_pool": "avg", **FAMILY[kind]})
    assert linearize(vit, variant)(models.images()).shape == (2, 3)


@pytest.mark.parametrize("variant", ANY_TOKENS)
def test_queries_and_keys_of_a_vit_with_norms_are_normed(variant):
    vit = linearize(family.vit(qk_norm=True), variant)
    attn = vit.blocks[0].attn.double()
    assert all((norm.weight == 1).all() and not norm.bias.any() for norm in (attn.q_norm, attn.k_norm))
    models.perturb(vit, 0.3, seed=3)
    x = models.tokens(attn, (4, 4))
    q, k, v = models.split_heads(attn.qkv(x), 2)
    by_hand = models.quadratic_map(variant, attn.q_norm(q), attn.k_norm(k)) @ v
    torch.testing.assert_close(attn(x), attn.proj(by_hand.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("variant", ANY_TOKENS)
def test_images_of_any_size_go_through_an_operator_without_grid(variant):
    vit = linearize(family.vit(dynamic_img_size=True), variant).eval()
    small = vit(models.images())
    assert vit(torch.randn(1, 3, 24, 8)).shape == (1, 3)
    assert torch.equal(vit(models.images()), small)


@pytest.mark.parametrize(
    ("blocks", "linear"),
    [([-1], [2]), ([0, -1], [0, 2]), ((1, 1, -2), [1]), (range(3), [0, 1, 2]), ([], []), (None, [0, 1, 2])],
)
def test_a_hybrid_keeps_the_attention_of_the_other_blocks(blocks, linear):
    vit = family.vit(depth=3)
    before, reference = [block.attn for block in vit.blocks], copy.deepcopy(vit)
    linearize(vit, "relu", blocks=blocks)
    kinds = [type(block.attn) for block in vit.blocks]
    assert [index for index, kind in enumerate(kinds) if kind is ReluAttention] == linear
    assert all(vit.blocks[index].attn is before[index] for index in range(3) if index not in linear)
    # Up to the first block that was changed it is the same model.
    images, unchanged = models.images(), min(linear, default=3)
    ours, theirs = (
        model.eval().forward_intermediates(images, norm=False, intermediates_only=True) for model in (vit, reference)
    )
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [i < unchanged for i in range(3)]


@pytest.mark.parametrize("blocks", [[3], [-4], ["1"], [True], [0.5]])
def test_a_block_that_is_not_there_is_refused(blocks):
    message = refused(family.vit(depth=3), "relu", blocks=blocks)
    assert message == f"blocks: {blocks[0]!r} is none of the model's; allowed: whole numbers, -3 to 2"


@pytest.mark.parametrize(
    "variant", ["relu", VARIANTS["relu"], "linvit.attention.kernel:ReluAttention", ReluAttention], ids=str
)
def test_a_variant_is_named_given_or_imported(variant):
    assert type(linearize(family.vit(), variant).blocks[1].attn) is ReluAttention


def test_a_class_of_ones_own_is_an_operator():
    torch.manual_seed(0)
    ours = linearize(family.vit(), Doubled).blocks[0].attn.double()
    reference = ReluAttention(16, 2, grid_size=(4, 4), num_prefix_tokens=1).double()
    reference.load_state_dict(ours.state_dict())
    x = models.tokens(ours, (4, 4))
    torch.testing.assert_close(ours(x), reference(x) * 2 - reference.proj.bias)


def test_a_linear_vit_can_be_linearised_again():
    vit = linearize(linearize(family.vit(qk_norm=True), "relu"), "inline")
    assert not isinstance(vit.blocks[0].attn.q_norm, nn.Identity)
    assert isinstance(linearize(linearize(models.on_grid("mhla", (4, 4)), "ttt"), "relu").blocks[0].attn, ReluAttention)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("swin", "no variant 'swin'; allowed: softmax, elu, relu, inline, mhla, ttt"),
        ("linvit.attention:Nothing", "target 'linvit.attention:Nothing' cannot be imported"),
        (nn.Linear, "variants.Linear: torch.nn.modules.linear:Linear refused its arguments"),
    ],
)
def test_what_is_no_operator_is_refused(variant, words):
    assert refused(family.vit(), variant).startswith(words)


@pytest.mark.parametrize(
    ("options", "variant", "words"),
    [
        ({"attn_drop_rate": 0.1}, "relu", "attention.attn_drop"),
        ({"proj_drop_rate": 0.1}, "relu", "attention.proj_drop"),
        ({"scale_attn_norm": True}, "relu", "attention.norm"),
        ({"attn_layer": "diff"}, "relu", "its attention is DiffAttention; allowed: timm's Attention"),
        ({"block_fn": ParallelScalingBlock}, "relu", "its attention is none; allowed"),
        ({"block_fn": DiffParallelScalingBlock}, "relu", "its attention is none; allowed"),
        ({"block_fn": ParallelThingsBlock}, "relu", "its attention is none; allowed"),
        ({"qk_norm": True, "class_token": False, "global_pool": "avg"}, "mhla", "attention.q_norm (qk_norm)"),
        ({"qk_norm": True, "class_token": False, "global_pool": "avg"}, "ttt", "attention.q_norm (qk_norm)"),
        ({}, "mhla", "patch tokens only"),
        ({"reg_tokens": 2, "class_token": False, "global_pool": "avg"}, "ttt", "patch tokens only"),
        (
            {"dynamic_img_size": True, "class_token": False, "global_pool": "avg"},
            "mhla",
            "dynamic_img_size must be off",
        ),
        ({"dynamic_img_size": True, "class_token": False, "global_pool": "avg"}, "ttt", "dynamic_img_size must be off"),
        ({"patch_drop_rate": 0.5, "class_token": False, "global_pool": "avg"}, "ttt", "patch_drop_rate must be off"),
        (
            {"dynamic_img_size": True},
            VARIANTS["inline"].model_copy(update={"kwargs": {"local_residual": True}}),
            "dynamic_img_size must be off",
        ),
    ],
)
def test_what_an_operator_would_lose_or_cannot_do_is_refused(options, variant, words):
    assert words in refused(family.vit(**options), variant)


def test_a_gate_is_refused():
    vit = family.vit()
    for block in vit.blocks:
        block.attn.gate = nn.Linear(16, 16)
    assert "attention.gate" in refused(vit, "relu")


def test_heads_that_do_not_make_up_the_width_are_refused():
    vit = family.vit()
    vit.blocks[1].attn = timm.layers.Attention(16, 2, attn_head_dim=4)
    assert refused(vit, "relu").startswith("variant 'relu', block 1: 2 heads of width 4 on tokens of width 16")


@pytest.mark.parametrize(
    "other",
    [
        lambda: timm.create_model("resnet10t"),
        lambda: timm.create_model("eva02_tiny_patch14_224", depth=1),
        lambda: nn.DataParallel(family.vit()),
    ],
    ids=["resnet", "eva", "wrapped"],
)
def test_a_model_of_another_kind_is_refused(other):
    with pytest.raises(ConfigError, match="cannot be linearised; allowed: timm's VisionTransformer"):
        linearize(other(), "relu")


# --- started from a teacher ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY)
def test_a_copy_of_everything_is_the_teacher(kind):
    """So no parameter of the family is forgotten."""
    teacher, student = (family.vit(seed, **FAMILY[kind]).eval() for seed in (10, 20))
    images = models.images()
    assert not torch.equal(student(images), teacher(images))
    initialize(linearize(student, "softmax"), teacher, EVERYTHING)
    assert all(torch.equal(tensor, student.state_dict()[name]) for name, tensor in teacher.state_dict().items())
    torch.testing.assert_close(student(images), teacher(images))


@pytest.mark.parametrize("variant", ["relu", "inline"])
@pytest.mark.parametrize("kind", FAMILY)
def test_fullcopy_sets_all_but_the_classifier_and_copy_the_attention_alone(kind, variant):
    teacher = family.vit(10, **FAMILY[kind])
    for strategy, left in (("fullcopy", {"head", "head_dist"}), ("copy", None)):
        student = linearize(family.vit(20, **FAMILY[kind]), variant)
        before = state(student)
        assert initialize(student, teacher, strategy) is student
        for name, tensor in student.state_dict().items():
            copied = ".attn." in name if left is None else name.split(".")[0] not in left
            assert torch.equal(tensor, (teacher.state_dict() if copied else before)[name]), name


def test_a_hybrid_is_filled_in_all_its_blocks():
    teacher, student = family.vit(10), linearize(family.vit(20), "relu", blocks=[1])
    initialize(student, teacher, "copy")
    for index in range(2):
        ours, theirs = student.blocks[index].attn.state_dict(), teacher.blocks[index].attn.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    patches = family.vit(20, class_token=False, global_pool="avg", fc_norm=False)
    initialize(linearize(patches, "ttt", blocks=[1]), teacher, "copy")
    assert torch.equal(patches.blocks[0].attn.proj.weight, teacher.blocks[0].attn.proj.weight)
    assert torch.equal(patches.blocks[1].attn.qkv.weight[:48], teacher.blocks[1].attn.qkv.weight)


def test_a_teachers_weights_do_as_well_as_itself():
    teacher = family.vit(10)
    students = [linearize(family.vit(20), "relu") for _ in range(2)]
    initialize(students[0], teacher, "fullcopy")
    initialize(students[1], Weights(teacher.state_dict(), (4, 4)), "fullcopy")
    assert all(torch.equal(a, b) for a, b in zip(students[0].parameters(), students[1].parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["random", "mimetic", "impulse"])
def test_what_copies_nothing_needs_no_teacher(strategy):
    student = linearize(family.vit(20, proj_bias=False), "relu")
    before = state(student)
    initialize(student, None, strategy, seed=3)
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert bool(changed) == (strategy != "random")
    again = linearize(family.vit(20, proj_bias=False), "relu")
    again.load_state_dict(before)
    initialize(again, None, strategy, seed=4)
    assert torch.equal(again.blocks[0].attn.qkv.weight, student.blocks[0].attn.qkv.weight) == (strategy == "random")


@pytest.mark.parametrize(
    ("of_teacher", "of_student", "tokens"),
    [
        ({"reg_tokens": 2}, {}, ["cls"]),  # registers that the student lacks are dropped
        ({"reg_tokens": 2}, {"class_token": False, "global_pool": "avg", "reg_tokens": 2}, ["reg0", "reg1"]),
        ({"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}, []),
        ({"distilled": True}, {}, ["cls"]),
        ({"no_embed_class": True}, {}, ["zero"]),
        ({"no_embed_class": True, "reg_tokens": 2}, {"reg_tokens": 2}, ["zero"] * 3),
        ({"no_embed_class": True}, {"no_embed_class": True}, []),
        ({"class_token": False, "global_pool": "avg"}, {"no_embed_class": True}, []),
    ],
)
@pytest.mark.parametrize("img_size", [16, (24, 8)])
def test_positions_go_over_by_the_tokens_that_both_have(of_teacher, of_student, tokens, img_size):
    teacher, student = family.vit(10, **of_teacher), family.vit(20, img_size=img_size, **of_student)
    initialize(student, teacher, Init(name="positions", copy=("positions",)))
    table = teacher.pos_embed
    embedded = table.shape[1] - 16
    rows = {"cls": table[:, :1], "reg0": table[:, 1:2], "reg1": table[:, 2:3], "zero": torch.zeros(1, 1, 16)}
    grid = timm.layers.resample_abs_pos_embed(
        table[:, embedded:], list(student.patch_embed.grid_size), [4, 4], num_prefix_tokens=0
    )
    assert torch.equal(student.pos_embed, torch.cat([*(rows[token] for token in tokens), grid], dim=1))


@pytest.mark.parametrize(
    ("of_teacher", "of_student", "words"),
    [
        ({}, {"reg_tokens": 2}, r"pos_embed: the source has no reg_token\[0\], so no position for the student's"),
        ({}, {"no_embed_class": True}, r"pos_embed: the source adds a position to cls_token\[0\], the student .* none"),
        ({}, {"pos_embed": "none"}, "pos_embed: the student has no such parameter, and nothing excuses it"),
    ],
)
def test_positions_without_counterpart_are_named(of_teacher, of_student, words):
    student = family.vit(20, **of_student)
    before = state(student)
    with pytest.raises(CopyError, match=words):
        initialize(student, family.vit(10, **of_teacher), Init(name="positions", copy=("positions",)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


@pytest.mark.parametrize(
    ("of_teacher", "of_student", "parameter"),
    [
        ({}, {"init_values": 0.1}, "blocks.0.ls1.gamma: the source has no such parameter"),
        ({"init_values": 0.1}, {}, "blocks.0.ls1.gamma: the student has no such parameter"),
        ({}, {"reg_tokens": 1}, "reg_token: the source has no such parameter"),
        ({"qk_norm": True}, {}, "blocks.0.attn.k_norm.bias: the student has no such parameter"),
        ({"proj_bias": False}, {}, "blocks.0.attn.proj.bias: the source has no such parameter"),
        ({"pre_norm": True}, {}, "patch_embed.proj.bias: the source has no such parameter"),
        ({"depth": 3}, {}, "blocks.2.attn.proj.bias: the student has no such parameter"),
    ],
)
def test_a_part_that_one_of_them_lacks_is_named(of_teacher, of_student, parameter):
    with pytest.raises(CopyError) as caught:
        initialize(linearize(family.vit(20, **of_student), "relu"), family.vit(10, **of_teacher), "fullcopy")
    assert str(caught.value).startswith(parameter)


def test_analytic_starts_refuse_what_they_are_not_defined_for():
    ttt = models.on_grid("ttt", (4, 4))
    for strategy in ("mimetic", "impulse"):
        with pytest.raises(
            AnalyticError, match=r"blocks\.0\.attn: analytic starts need projections .* TttAttention has"
        ):
            initialize(ttt, None, strategy)
    with pytest.raises(AnalyticError, match="this one has no pos_embed"):
        initialize(family.vit(pos_embed="none"), None, "impulse")


def test_a_strategy_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"no strategy 'fulcopy'; allowed: random, .*; did you mean 'fullcopy'"):
        initialize(family.vit(), None, "fulcopy")


def test_a_teacher_of_other_heads_is_refused_where_attention_is_copied():
    """Their shapes are equal."""
    student, teacher = family.vit(30), family.vit(31, num_heads=4)
    with pytest.raises(CopyError, match="the teacher's attention has 4 heads, the student's 2"):
        initialize(student, teacher, "copy")
    initialize(student, teacher, "mlpcopy")


def test_a_student_with_another_last_norm_is_told_how_to_build_it():
    student, teacher = family.vit(32, class_token=False, global_pool="avg"), family.vit(33)
    with pytest.raises(CopyError, match=r"fc_norm\.bias: .*; build the student with fc_norm=False"):
        initialize(student, teacher, "fullcopy")


def test_a_teacher_of_another_kind_is_refused():
    with pytest.raises(CopyError, match="teacher: a Linear; allowed: timm's VisionTransformer"):
        initialize(family.vit(34), nn.Linear(2, 2), "copy")


def test_blocks_are_a_list():
    with pytest.raises(ConfigError, match="blocks: found 1; allowed: a list of numbers, -2 to 1"):
        linearize(family.vit(35), "relu", blocks=1)
