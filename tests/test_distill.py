"""The attention-matching loss: its value by hand, where its gradient goes, and what it leaves alone."""

import copy

import models
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.config import Distill
from linvit.distill import AttentionDistillation

torch.set_num_threads(1)

LINEAR = ("elu", "relu", "inline", "mhla", "ttt")


def pair(variant: str, **changes) -> tuple[VisionTransformer, VisionTransformer]:
    """A teacher with a head and a student, both of random weights; `changes` are to the student's size."""
    teacher = models.student("softmax", seed=50, num_classes=7, drop_path=0.5)
    return teacher, models.student(variant, models.SIZE.model_copy(update=changes))


def loss_of(teacher: VisionTransformer, student: VisionTransformer, x: Tensor, **settings) -> Tensor:
    """The loss right after the student's pass."""
    distillation = AttentionDistillation(teacher, student, Distill(**{"weight": 1.0, **settings}))
    student.train()(x)
    loss = distillation(x)
    distillation.remove()
    return loss


def recorded(vit: VisionTransformer, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every block's attention, in eval mode; of a copy, so that no hook of ours is left."""
    vit = copy.deepcopy(vit).eval()
    seen: list[tuple[Tensor, Tensor]] = []
    for block in vit.blocks:
        block.attn.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        vit(x)
    return seen


def map_of(vit: VisionTransformer, name: str, block: int, tokens: Tensor) -> Tensor:
    attn = vit.blocks[block].attn
    q, k, _ = models.split_heads(attn.qkv(tokens), attn.num_heads)
    return models.quadratic_map(name, q, k)


def count_calls(module: nn.Module) -> list[int]:
    calls = [0]
    module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("variant", LINEAR)
def test_output_loss_is_the_weighted_mean_squared_error_of_attention_outputs(variant, reduction):
    teacher, student = pair(variant)
    x = models.images()
    per_block = []
    for (_, s), (_, t) in zip(recorded(student, x), recorded(teacher, x), strict=True):
        t = t[:, 1:] if variant in ("mhla", "ttt") else t  # no class token: the patch tokens alone
        assert s.shape == t.shape
        per_block.append(sum(((a - b) ** 2).item() for a, b in zip(s.flatten(), t.flatten(), strict=True)) / s.numel())
    assert per_block[0] != pytest.approx(per_block[1], rel=0.01)
    expected = 2.5 * sum(per_block) / (2 if reduction == "mean" else 1)
    assert loss_of(teacher, student, x, weight=2.5, reduction=reduction).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("variant", ["elu", "relu", "inline"])
def test_map_loss_is_the_weighted_mean_squared_error_of_attention_maps(variant, reduction):
    teacher, student = pair(variant)
    x = models.images()
    total = 0.0
    for block, ((s, _), (t, _)) in enumerate(zip(recorded(student, x), recorded(teacher, x), strict=True)):
        difference = map_of(student, variant, block, s) - map_of(teacher, "softmax", block, t)
        assert difference.shape == (2, 2, 17, 17)
        total += difference.square().mean().item()
    expected = 3e3 * total / (2 if reduction == "mean" else 1)
    loss = loss_of(teacher, student, x, target="map", weight=3e3, reduction=reduction)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("target", ["output", "map"])
def test_a_student_that_is_its_teacher_has_no_loss(target):
    teacher, student = pair("softmax")
    # Drop path is active in the student alone, so it gets none; the teacher's must be off, though it was training.
    student.load_state_dict({k: v for k, v in teacher.state_dict().items() if "head" not in k}, strict=False)
    teacher.train()
    assert loss_of(teacher, student, models.images(), target=target).item() < 1e-12


@pytest.mark.parametrize("variant", LINEAR)
def test_gradients_reach_every_attention_of_the_student_and_nothing_of_the_teacher(variant):
    teacher, student = pair(variant)
    loss = loss_of(teacher, student, models.images())
    assert not teacher.training
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    missed = {
        name for name, p in student.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    }
    # All but what follows the last attention.
    after = ("norm.", "head.", "blocks.1.norm2.", "blocks.1.mlp.")
    assert missed == {name for name, _ in student.named_parameters() if name.startswith(after)}


@pytest.mark.parametrize("target", ["output", "map"])
@pytest.mark.parametrize(
    "parameter", ["blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"]
)
def test_gradient_agrees_with_finite_differences(target, parameter):
    teacher, student = pair("elu")  # smooth, unlike relu
    x = models.images()
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0, target=target))
    value = student.train().get_parameter(parameter)

    def loss() -> Tensor:
        student(x)
        return distillation(x)

    loss().backward()
    # Along the gradient the difference is largest, so float32 resolves it.
    direction = value.grad / value.grad.norm()
    step = 1e-2
    with torch.no_grad():
        value.add_(step * direction)
        ahead = loss().item()
        value.sub_(2 * step * direction)
        behind = loss().item()
    assert (ahead - behind) / (2 * step) == pytest.approx(value.grad.norm().item(), rel=5e-3)


def test_the_teacher_runs_once_a_call_and_its_head_never():
    teacher, student = pair("relu")
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0))
    passes, heads, students = (count_calls(m) for m in (teacher.patch_embed, teacher.head, student.patch_embed))
    for call in (1, 2, 3):
        student.train()(models.images(seed=call))
        distillation(models.images(seed=call))
        assert (passes, heads, students) == ([call], [0], [call])


def test_each_call_is_of_its_own_images():
    teacher, student = pair("ttt")
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0))
    student.train()
    losses = []
    for seed in (1, 2, 1):
        student(models.images(seed=seed))
        losses.append(distillation(models.images(seed=seed)).item())
    assert losses[0] == losses[2] != losses[1]


def test_evaluation_passes_of_the_student_are_not_recorded():
    teacher, student = pair("relu")
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0))
    x = models.images()
    student.train()(x)
    expected = distillation(x).item()
    student.eval()(models.images(seed=9))
    student.train()(x)
    student.eval()(models.images(batch=5))
    assert distillation(x).item() == expected


@pytest.mark.parametrize("passes", ["none", "evaluation", "two"])
def test_a_call_without_exactly_one_training_pass_is_an_error_that_passes(passes):
    teacher, student = pair("relu")
    x = models.images()
    expected = loss_of(teacher, student, x).item()
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0))
    for _ in range({"none": 0, "evaluation": 1, "two": 2}[passes]):
        student.train(passes == "two")(x)
    with pytest.raises(RuntimeError, match="student in training mode"):
        distillation(x)
    # What was recorded for the call that failed does not spoil the next one.
    student.train()(x)
    assert distillation(x).item() == expected


def test_remove_leaves_both_models_as_they_were():
    teacher, student = pair("relu")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    distillation = AttentionDistillation(teacher, student, Distill(weight=1.0))
    assert all(len(block.attn._forward_hooks) == 1 for vit in (teacher, student) for block in vit.blocks)
    distillation.remove()
    assert not any(module._forward_hooks for vit in (teacher, student) for module in vit.modules())
    student.train()(models.images())
    with pytest.raises(RuntimeError):
        distillation(models.images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"depth": 3}, "blocks: 2 and 3"), ({"dim": 24}, "width: 16 and 24"), ({"patch_size": 8}, "grid")],
)
@pytest.mark.parametrize("target", ["output", "map"])
def test_models_that_differ_in_shape_are_refused(changes, word, target):
    with pytest.raises(ValueError, match=f"teacher and student differ in {word}"):
        AttentionDistillation(*pair("relu", **changes), Distill(weight=1.0, target=target))


def test_maps_of_differently_many_heads_are_refused():
    # One head's map would be broadcast over the teacher's two.
    with pytest.raises(ValueError, match="heads"):
        AttentionDistillation(*pair("relu", heads=1), Distill(weight=1.0, target="map"))


def test_outputs_of_differently_many_heads_are_matched():
    teacher, student = pair("relu", heads=4)
    assert loss_of(teacher, student, models.images()).item() > 0


def test_maps_of_different_tokens_are_refused():
    with pytest.raises(ValueError, match="prefix tokens"):
        AttentionDistillation(*pair("mhla"), Distill(weight=1.0, target="map"))


def test_a_teacher_without_the_students_class_token_is_refused():
    # There is nothing to match that token with, and the teacher's last token must not stand for all.
    variant = models.STUDY.variants["softmax"].model_copy(update={"class_token": False, "pool": "avg"})
    with pytest.raises(ValueError, match="token"):
        AttentionDistillation(models.student(variant), models.student("relu"), Distill(weight=1.0))


def test_a_loss_without_weight_is_refused():
    with pytest.raises(ValueError, match="weight"):
        AttentionDistillation(*pair("relu"), Distill())


@pytest.mark.parametrize("target", ["output", "map"])
def test_loss_is_float32_and_close_under_autocast(target):
    teacher, student = pair("relu")
    x = models.images()
    expected = loss_of(teacher, student, x, target=target).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(teacher, student, x, target=target)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.05)
