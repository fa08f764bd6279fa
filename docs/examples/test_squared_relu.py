"""What to test of an operator: its formula, what copies leave alone, that it learns, in which precision it works."""

import pytest
import timm
import torch
import torch.nn.functional as F
from squared_relu import SquaredReluAttention

import linvit

torch.set_num_threads(1)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def small_vit(seed: int = 0, **options):
    torch.manual_seed(seed)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.models.VisionTransformer(**(shape | options))


def operator(**kwargs) -> SquaredReluAttention:
    torch.manual_seed(1)
    attention = SquaredReluAttention(8, 2, grid_size=(2, 3), num_prefix_tokens=1, **kwargs).double()
    torch.nn.init.normal_(attention.qkv.weight)  # large, so that no term of the formula hides behind another
    return attention


def test_it_is_the_quadratic_formula():
    attention, x = operator(power=3.0), torch.randn(2, 7, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x).reshape(2, 7, 3, 2, 4).permute(2, 0, 3, 1, 4)
    scores = q.clamp(min=0) ** 3 @ (k.clamp(min=0) ** 3).mT
    expected = attention.proj((scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)


def test_the_rows_of_its_map_are_distributions():
    rows = operator().attention_map(torch.randn(2, 7, 8, dtype=torch.float64))
    assert (rows >= 0).all()
    sums = rows.sum(-1)
    assert (sums > 0.5).any()
    assert (((sums - 1).abs() < 1e-3) | (sums == 0)).all()  # nothing, where no key has anything of the query


def test_copies_account_for_every_parameter():
    teacher, student = small_vit(seed=2), linvit.linearize(small_vit(), SquaredReluAttention)
    linvit.initialize(student, teacher, "fullcopy")
    assert torch.equal(student.blocks[0].attn.qkv.weight, teacher.blocks[0].attn.qkv.weight)
    assert torch.equal(student.blocks[0].attn.gate, torch.ones(2, 1, 1))


@pytest.mark.parametrize("target", ["output", "heads", "map"])
def test_it_learns_its_task_and_from_a_teacher(target):
    teacher, student = small_vit(seed=2), linvit.linearize(small_vit(), SquaredReluAttention)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    with linvit.AttentionDistillation(teacher, student, target) as distillation:
        for _ in range(10):
            loss = F.cross_entropy(student(IMAGES), torch.tensor([0, 1])) + distillation(IMAGES)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert student.blocks[0].attn.gate.grad.any()


def test_images_of_any_size_and_norms_of_queries_and_keys():
    student = linvit.linearize(small_vit(dynamic_img_size=True, qk_norm=True), SquaredReluAttention)
    assert student(torch.randn(1, 3, 24, 32)).shape == (1, 3)


def test_bfloat16_is_close_to_float32():
    student = linvit.linearize(small_vit(), SquaredReluAttention).eval()
    with torch.autocast("cpu", torch.bfloat16):
        half = student(IMAGES)
    torch.testing.assert_close(half.float(), student(IMAGES), rtol=0.05, atol=0.05)
