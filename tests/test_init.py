"""Initialisations: what each sets, to what, and that it sets nothing else."""

import copy
import dataclasses
import re

import models
import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.attention.kernel import ReluAttention
from linvit.config import ConfigError, Init, Size, Variant
from linvit.init import CopyError, CopyWeights, Impulse, Mimetic, initialize
from linvit.init.copy import BACKBONE

torch.set_num_threads(1)

INITS = models.STUDY.inits

# Table A and Table G, in the words of the paper; a part is a component of timm's parameter names.
ALL = {"attn", "mlp", "norm1", "norm2", "norm", "patch_embed", "pos_embed", "cls_token"}
COPIED = {
    "random": set(),
    "copy": {"attn"},
    "mlpcopy": {"mlp"},
    "fullcopy": ALL,
    "fullcopy-notoken": ALL - {"cls_token"},
    "fullcopy-notoken-nopos": ALL - {"cls_token", "pos_embed"},
    "fullcopy-notoken-nopos-nopatch": ALL - {"cls_token", "pos_embed", "patch_embed"},
}
# Large enough for nine kernel shifts and a repeat, and for statistics over the entries of a matrix.
WIDE = Size(name="wide", dim=160, depth=2, heads=10, patch_size=4, image_size=24)


class Undeclared(ReluAttention):
    """An operator whose author forgot to say that a parameter has no counterpart."""

    def __init__(self, dim, num_heads, **skeleton):
        super().__init__(dim, num_heads, **skeleton)
        self.gain = nn.Parameter(torch.ones(num_heads))


class Hidden(Undeclared):
    """The same, with a view of its own that passes the parameter over."""

    def softmax_view(self):
        return {name: p for name, p in self.named_parameters() if name != "gain"}


def part_of(name: str) -> str:
    path = name.split(".")
    return path[2] if path[0] == "blocks" else path[0]


def state(vit: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vit.state_dict().items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


def attention(vit: VisionTransformer, block: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_q, W_k as [H, d, C], W_v and W_proj as [C, C], in float64."""
    attn = vit.blocks[block].attn
    q, k, v = attn.qkv.weight.detach().double().chunk(3)
    d = attn.head_dim
    return q.unflatten(0, (-1, d)), k.unflatten(0, (-1, d)), v, attn.proj.weight.detach().double()


# --- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distill", ["", "-distill"])
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("variant", ["relu", "mhla", "ttt"])
def test_a_copy_sets_exactly_its_parts_to_the_sources_bits(variant, name, distill):
    student, source = models.student(variant), models.source()
    expected = state(student)
    for key in expected:
        if part_of(key) not in COPIED[name] or (key == "pos_embed" and variant != "relu"):
            continue
        if part_of(key) != "attn":
            expected[key] = source.tensors[key]
        elif variant == "ttt" and ".qkv." in key:  # the 3C standard rows; 3d more belong to the convolution
            expected[key][: 3 * models.SIZE.dim] = source.tensors[key]
        elif (".qkv." in key or ".proj." in key) and variant != "ttt":
            expected[key] = source.tensors[key]
    untouched = state(student)
    initialize(student, source if COPIED[name] or distill else None, INITS[name + distill], seed=0)
    assert not differing(state(student), expected)
    assert bool(differing(untouched, expected)) == bool(COPIED[name]), "source and student were alike from the start"


def test_a_softmax_student_of_everything_is_the_source():
    source = models.source(num_classes=3)
    student = initialize(models.student("softmax"), source, INITS["pretrained"]).eval()
    reference = models.on_grid(None, (4, 4)).eval()
    reference.load_state_dict(source.tensors)
    torch.testing.assert_close(student(models.images()), reference(models.images()))


def test_the_head_is_new_unless_it_is_named():
    student = models.student("softmax", num_classes=3)
    before = state(student)
    initialize(student, models.source(num_classes=7), INITS["fullcopy"])
    assert {name for name in before if name not in differing(state(student), before)} == {"head.weight", "head.bias"}
    with pytest.raises(CopyError, match=r"head\.\w+: the source's shape \[7.*\] is not the student's \[3"):
        initialize(student, models.source(num_classes=7), INITS["pretrained"])


@pytest.mark.parametrize("grid", [(2, 4), (6, 6), (2, 8), (4, 4)])
@pytest.mark.parametrize("class_token", [True, False])
def test_positions_of_another_grid_are_resampled_as_timm_does(grid, class_token):
    source = models.source()
    student = models.on_grid("relu", grid, class_token=class_token, global_pool="token" if class_token else "avg")
    CopyWeights(source, BACKBONE)(student)
    reference = resample_abs_pos_embed(source.tensors["pos_embed"], new_size=list(grid), old_size=[4, 4])
    # A student without class token has no position for one; (2, 8) holds as many patches as (4, 4), elsewhere.
    assert torch.equal(student.pos_embed, reference if class_token else reference[:, 1:])
    assert grid != (2, 8) or not torch.equal(reference, source.tensors["pos_embed"])


@pytest.mark.parametrize(
    ("change", "groups", "message"),
    [
        (lambda t: t.pop("blocks.1.attn.proj.bias"), {"attention"}, "blocks.1.attn.proj.bias: the source has no such"),
        (lambda t: t.pop("pos_embed"), BACKBONE, "pos_embed: the source has no such"),
        (
            lambda t: t.update({"blocks.0.attn.q_norm.weight": torch.ones(8)}),
            {"attention"},
            "blocks.0.attn.q_norm.weight: the student has no such",
        ),
        (
            lambda t: t.update({"blocks.2.mlp.fc1.bias": torch.ones(64)}),
            {"mlp"},
            "blocks.2.mlp.fc1.bias: the student has no such",
        ),
        (lambda t: t.update({"mask_token": torch.ones(1, 4, 16)}), {"mlp"}, "mask_token: belongs to no group"),
        (
            lambda t: t.update({"blocks.0.mlp.fc1.bias": torch.ones(60)}),
            {"mlp"},
            "blocks.0.mlp.fc1.bias: the source's shape [60] is not the student's [64]",
        ),
        (
            lambda t: t.update({"blocks.1.norm1.weight": torch.ones(1)}),  # would broadcast
            BACKBONE,
            "blocks.1.norm1.weight: the source's shape [1] is not the student's [16]",
        ),
    ],
    ids=["lacks", "lacks-positions", "extra", "deeper", "unknown", "shape", "shape-that-broadcasts"],
)
def test_a_parameter_without_counterpart_is_named(change, groups, message):
    source = models.source()
    change(source.tensors)
    with pytest.raises(CopyError, match="^" + re.escape(message)):
        CopyWeights(source, frozenset(groups))(models.student("relu"))


def test_a_mistake_elsewhere_does_not_concern_a_copy_of_something_else():
    source = models.source()
    del source.tensors["blocks.0.attn.qkv.weight"]
    student = models.student("relu")
    CopyWeights(source, frozenset({"mlp"}))(student)
    assert torch.equal(student.blocks[1].mlp.fc2.weight, source.tensors["blocks.1.mlp.fc2.weight"])


@pytest.mark.parametrize(
    ("operator", "message"), [(Undeclared, "the source has no such"), (Hidden, "neither in softmax_view")]
)
def test_a_parameter_that_its_operator_does_not_declare_is_named(operator, message):
    student = models.student(Variant(name="mine", target=f"{__name__}:{operator.__name__}"))
    with pytest.raises(CopyError, match=rf"^blocks\.0\.attn\.gain: {message}"):
        CopyWeights(models.source(), frozenset({"attention"}))(student)


def test_a_copy_without_source_is_refused():
    with pytest.raises(CopyError, match=r"'mlpcopy' copies mlp, but no source"):
        initialize(models.student("relu"), None, INITS["mlpcopy"])


# --- analytic starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["relu", "inline", "mhla"])
@pytest.mark.parametrize("name", ["mimetic", "impulse", "mimetic-distill", "impulse-distill"])
def test_an_analytic_start_sets_the_projections_and_nothing_else(variant, name):
    student = models.student(variant)
    before = state(student)
    initialize(student, None, INITS[name])
    after = state(student)
    # Multiplying by 18 is exact only once: patches are scaled, the class token's position is not, nor a fixed table.
    if name.startswith("impulse") and variant != "mhla":
        before["pos_embed"][:, 1:] *= 18
    projections = {f"{layer}.{kind}" for layer in ("qkv", "proj") for kind in ("weight", "bias")}
    assert differing(before, after) == {f"blocks.{i}.attn.{p}" for i in range(2) for p in projections}
    assert not any(tensor.any() for key, tensor in after.items() if re.search(r"attn\.(qkv|proj)\.bias", key))


@pytest.mark.parametrize("step", [Mimetic, Impulse])
def test_an_analytic_start_is_its_seeds_alone(step):
    start = models.student("relu")
    first, again, other = (copy.deepcopy(start) for _ in range(3))
    torch.manual_seed(1)
    step(3)(first)
    torch.manual_seed(2)
    global_state = torch.get_rng_state()
    step(3)(again)
    assert torch.equal(torch.get_rng_state(), global_state), "it drew from the generator that training draws from"
    step(4)(other)
    assert not differing(state(first), state(again))
    assert differing(state(first), state(other)) == {
        f"blocks.{i}.attn.{layer}.weight" for i in range(2) for layer in ("qkv", "proj")
    }
    q, k, v, _ = attention(first)
    q1, k1, v1, _ = attention(first, block=1)
    assert len({round(t.sum().item(), 9) for t in (*q, *k, v, *q1, *k1, v1)}) == 10, "two heads or blocks share noise"


def test_an_analytic_start_combines_with_a_copy_of_the_mlps():
    student, source = models.student("relu"), models.source()
    initialize(student, source, Init(name="both", copy=("mlp",), analytic="mimetic"))
    alone = models.student("relu")
    Mimetic(0)(alone)
    assert torch.equal(student.blocks[0].attn.qkv.weight, alone.blocks[0].attn.qkv.weight)
    assert torch.equal(student.blocks[0].mlp.fc1.weight, source.tensors["blocks.0.mlp.fc1.weight"])


def test_impulse_shapes_attention_to_the_positions_that_it_starts_with():
    # With positions from a source, the projections must be solved for those, not for the ones they replace.
    size = WIDE.model_copy(update={"depth": 1})
    student = models.student("relu", size)
    initialize(student, models.source(size), Init(name="both", copy=("positions",), analytic="impulse"))
    assert min(share_of_hits(student)) > 0.7


def noisy_identity(scale: float, identity: float, C: int, generator: torch.Generator) -> Tensor:
    Z = torch.randn(C, C, generator=generator, dtype=torch.float64) / C**0.5
    return scale * Z + identity * torch.eye(C, dtype=torch.float64)


@pytest.mark.parametrize("variant", ["relu", "mhla"])
def test_mimetic_factors_a_noisy_identity(variant):
    student = models.student(variant, WIDE)
    Mimetic(7)(student)
    C, H, d = 160, 10, 16
    draws = torch.Generator().manual_seed(7)
    for block in range(2):
        W_q, W_k, W_v, W_proj = attention(student, block)
        for head in range(H):
            A = noisy_identity(0.7, 0.7, C, draws)
            product = W_q[head].T @ W_k[head]
            # Optimal: of rank d, and off by no more than the singular values left out (Eckart and Young).
            S = torch.linalg.svdvals(A)
            found = torch.linalg.svdvals(product)
            torch.testing.assert_close(found[:d], S[:d], rtol=1e-5, atol=1e-5)
            assert found[d:].max() < 1e-5
            assert (A - product).norm().item() == pytest.approx(S[d:].norm().item(), rel=1e-6)
            # The scale is shared evenly between queries and keys.
            for half in (W_q[head], W_k[head]):
                torch.testing.assert_close(half @ half.T, S[:d].diag(), rtol=1e-5, atol=1e-5)
        # proj is applied after v, and has full rank: nothing is lost but float32.
        value = noisy_identity(0.4, -0.4, C, draws)
        torch.testing.assert_close(W_proj @ W_v, value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(W_proj.T @ W_proj, W_v @ W_v.T, rtol=1e-5, atol=1e-5)


def test_mimetic_signs_and_sizes_are_those_of_the_paper():
    # Without knowledge of the draws: queries meet their own keys (+), values are subtracted from their tokens (-).
    student = models.student("relu", WIDE)
    Mimetic(11)(student)
    C = 160
    for block in range(2):
        W_q, W_k, W_v, W_proj = attention(student, block)
        diagonals = torch.stack([(q.T @ k).diag() for q, k in zip(W_q, W_k, strict=True)])
        assert (diagonals.mean(1) > 0.05).all()
        assert (diagonals > 0).double().mean() > 0.9
        A = W_proj @ W_v
        noise = A[~torch.eye(C, dtype=torch.bool)]
        assert (A.diag() < 0).all()
        assert A.diag().mean().item() == pytest.approx(-0.4, abs=6 * 0.4 / C)
        assert noise.var().item() == pytest.approx(0.16 / C, rel=6 * (2 / noise.numel()) ** 0.5)
        assert abs(noise.mean()) < 6 * 0.4 / C**0.5 / noise.numel() ** 0.5


def share_of_hits(vit: VisionTransformer) -> list[float]:
    """Per head, how often the largest positional logit of a query is the key at the head's shift."""
    h, w = vit.patch_embed.grid_size
    P = F.layer_norm(vit.pos_embed.detach()[0, -h * w :].double(), (vit.embed_dim,))
    W_q, W_k, *_ = attention(vit)
    # Where the key lies from the query: here, above, right, left, below, then the corners, then from the start.
    shifts = [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]
    shares = []
    for head, (q, k) in enumerate(zip(W_q, W_k, strict=True)):
        row, column = shifts[head % 9]
        nearest = (P @ q.T @ k @ P.T).argmax(1).tolist()
        pairs = [
            (r * w + c, (r + row) * w + c + column)
            for r in range(h)
            for c in range(w)
            if 0 <= r + row < h and 0 <= c + column < w
        ]
        shares.append(sum(nearest[query] == key for query, key in pairs) / len(pairs))
    return shares


@pytest.mark.parametrize("variant", ["relu", "mhla"])
@pytest.mark.parametrize("grid", [(6, 6), (4, 6), (3, 3), (2, 3)], ids=str)
def test_impulse_heads_attend_to_one_neighbour_each(variant, grid):
    # Heads are 16 wide: the last two grids have fewer patches than that, where the original code divides by zero.
    student = models.on_grid(variant, grid, dim=160, heads=10, depth=1)
    prefix = student.num_prefix_tokens
    before = state(student)
    Impulse(0)(student)
    assert all(tensor.isfinite().all() for tensor in state(student).values())
    assert torch.equal(student.pos_embed[:, prefix:], before["pos_embed"][:, prefix:] * (18 if prefix else 1))
    W_q, W_k, W_v, W_proj = attention(student)
    for half in (*W_q, *W_k):
        assert half.norm().item() == pytest.approx(7, rel=1e-5)
    # As in Mimetic.
    assert (W_proj @ W_v).diag().mean().item() == pytest.approx(-0.4, abs=6 * 0.4 / 160)
    shares = share_of_hits(student)
    assert min(shares) > (0.7 if grid[0] * grid[1] >= 16 else 0.99)
    # Head 9 starts over: it attends to the query's own place, as head 0 does, and no head between them.
    assert shares[9] == shares[0] == 1


def test_an_untrained_student_attends_to_no_neighbour():
    # So that the test above cannot pass by chance.
    assert max(share_of_hits(models.student("relu", WIDE.model_copy(update={"depth": 1})))) < 0.3


def test_weights_are_not_changed_by_copying_from_them():
    source = models.source()
    before = dataclasses.replace(source, tensors={name: tensor.clone() for name, tensor in source.tensors.items()})
    student = models.student("relu")
    CopyWeights(source, BACKBONE)(student)
    models.perturb(student, 1.0, seed=0)  # a student that shared memory with its source would drag it along
    assert not differing(source.tensors, before.tensors)


def test_a_strategy_that_distils_is_refused_with_the_two_calls_that_do_it():
    with pytest.raises(
        ConfigError, match=r"initialize\(..., 'fullcopy'\), then linvit.AttentionDistillation"
    ) as caught:
        initialize(models.student("relu"), models.source(), "fullcopy-distill")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="no strategy 'half-distill'; allowed: random, "):
        initialize(models.student("relu"), models.source(), "half-distill")
