"""The attention-matching loss: its value by hand, where its gradient goes, and what it leaves alone."""

import copy
import math

import models
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.config import DISTANCES, Distill
from linvit.distill import AttentionDistillation, DistillError, cross_entropy, ending_after, l2

torch.set_num_threads(1)

LINEAR = ("elu", "relu", "inline", "mhla", "ttt")
LOSSES = [(target, distance) for target, distances in DISTANCES.items() for distance in distances]


def pair(variant: str, **changes) -> tuple[VisionTransformer, VisionTransformer]:
    """A teacher with a head and a student, both of random weights; `changes` are to the student's size."""
    teacher = models.student("softmax", seed=50, num_classes=7, drop_path=0.5)
    return teacher, models.student(variant, models.SIZE.model_copy(update=changes))


def loss_of(teacher: VisionTransformer, student: VisionTransformer, x: Tensor, **settings) -> Tensor:
    """The loss right after the student's pass."""
    distillation = AttentionDistillation.from_settings(teacher, student, Distill(**{"weight": 1.0, **settings}))
    student.train()(x)
    loss = distillation(x)
    distillation.remove()
    return loss


def recorded(vit: VisionTransformer, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every block's attention, in eval mode; of a copy, so that no hook of ours is left."""
    vit = copy.deepcopy(vit).to(x.dtype).eval()
    seen: list[tuple[Tensor, Tensor]] = []
    for block in vit.blocks:
        block.attn.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        vit(x)
    return seen


def projected(vit: VisionTransformer, block: int, output: Tensor) -> Tensor:
    """What went into a block's output projection, from what came out of it."""
    proj = vit.blocks[block].attn.proj
    weight, bias = (tensor.detach().to(output) for tensor in (proj.weight, proj.bias))
    return torch.linalg.solve(weight, (output - bias).mT).mT


def map_of(vit: VisionTransformer, name: str, block: int, tokens: Tensor) -> Tensor:
    attn = copy.deepcopy(vit.blocks[block].attn).to(tokens.dtype)
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


@pytest.mark.parametrize("variant", LINEAR)
def test_l2_loss_is_the_mean_distance_of_tokens_over_the_root_of_their_width(variant):
    """RADLADS' code: the vector norm of the difference of outputs, averaged, times width ** -0.5."""
    teacher, student = pair(variant)
    x = models.images().double()
    distances = []
    for (_, s), (_, t) in zip(recorded(student, x), recorded(teacher, x), strict=True):
        t = t[:, 1:] if variant in ("mhla", "ttt") else t
        for a, b in zip(s.flatten(0, 1).tolist(), t.flatten(0, 1).tolist(), strict=True):
            distances.append(math.sqrt(sum((i - j) ** 2 for i, j in zip(a, b, strict=True)) / len(a)))
    loss = loss_of(teacher, student, x.float(), distance="l2", weight=2.5)
    assert loss.item() == pytest.approx(2.5 * sum(distances) / len(distances), rel=1e-5)


@pytest.mark.parametrize("variant", ["elu", "relu", "inline", "mhla"])
def test_heads_loss_is_the_mean_over_blocks_of_the_mean_squared_error_before_the_projection(variant):
    """LoLCATs' code: for each layer the MSE of [batch, heads, tokens, head width], averaged over layers."""
    teacher, student = pair(variant)
    x = models.images().double()
    per_block = []
    for block, ((_, s), (_, t)) in enumerate(zip(recorded(student, x), recorded(teacher, x), strict=True)):
        s, t = projected(student, block, s), projected(teacher, block, t)
        t = t[:, 1:] if variant == "mhla" else t
        squares = [(a - b) ** 2 for a, b in zip(s.flatten().tolist(), t.flatten().tolist(), strict=True)]
        per_block.append(sum(squares) / len(squares))
    loss = loss_of(teacher, student, x.float(), target="heads", weight=2.5)
    assert loss.item() == pytest.approx(2.5 * sum(per_block) / 2, rel=1e-5)


def test_the_teachers_head_outputs_are_its_map_times_its_values():
    teacher, _ = pair("relu")
    x = models.images().double()
    for block, (tokens, output) in enumerate(recorded(teacher, x)):
        attn = copy.deepcopy(teacher.blocks[block].attn).double()
        q, k, v = models.split_heads(attn.qkv(tokens), attn.num_heads)
        by_hand = (models.quadratic_map("softmax", q, k) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(projected(teacher, block, output), by_hand)


@pytest.mark.parametrize("variant", ["elu", "relu"])
def test_cross_entropy_is_averaged_over_heads_and_queries_and_summed_over_blocks(variant):
    """Attention Transfer's code; the student's entries count as 1e-6 at least."""
    teacher, student = pair(variant)
    x = models.images().double()
    total, zeros = 0.0, 0
    for block, ((s, _), (t, _)) in enumerate(zip(recorded(student, x), recorded(teacher, x), strict=True)):
        s, t = map_of(student, variant, block, s), map_of(teacher, "softmax", block, t)
        queries = list(zip(s.flatten(0, 2).tolist(), t.flatten(0, 2).tolist(), strict=True))
        zeros += sum(row.count(0.0) for row, _ in queries)
        total += sum(-b * math.log(max(a, 1e-6)) for row in queries for a, b in zip(*row, strict=True)) / len(queries)
    assert (zeros > 0) == (variant == "relu")
    loss = loss_of(teacher, student, x.float(), target="map", distance="cross_entropy", reduction="sum", weight=3.0)
    assert loss.item() == pytest.approx(3 * total, rel=1e-5)


def distributions(*shape: int, seed: int) -> Tensor:
    """Rows that sum to 1, in float64."""
    rows = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    return rows / rows.sum(-1, keepdim=True)


@pytest.mark.parametrize("distance", [l2, cross_entropy])
def test_gradients_of_distances_agree_with_finite_differences(distance):
    student, teacher = distributions(2, 3, 4, 5, seed=1), distributions(2, 3, 4, 5, seed=2)
    assert torch.autograd.gradcheck(lambda s: distance(s, teacher), student.requires_grad_())


def test_cross_entropy_is_least_where_the_maps_agree_and_is_then_the_teachers_entropy():
    teacher = distributions(2, 3, 4, 5, seed=1)
    entropy = -sum(p * math.log(p) for p in teacher.flatten().tolist()) / (2 * 3 * 4)
    assert cross_entropy(teacher, teacher).item() == pytest.approx(entropy)
    for seed in range(2, 7):
        assert cross_entropy(distributions(2, 3, 4, 5, seed=seed), teacher).item() > entropy


def test_cross_entropy_of_a_map_with_zeros_is_finite_and_so_is_its_gradient():
    teacher = distributions(1, 1, 2, 4, seed=1).float()
    student = torch.tensor([[[[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]], requires_grad=True)
    loss = cross_entropy(student, teacher)
    loss.backward()
    (first, second) = teacher[0, 0].tolist()
    by_hand = (first[0] + first[1]) * math.log(2) - (first[2] + first[3] + sum(second)) * math.log(1e-6)
    assert loss.item() == pytest.approx(by_hand / 2, rel=1e-5)
    assert torch.isfinite(student.grad).all()


def test_the_gradient_of_l2_is_zero_where_outputs_are_equal():
    student = torch.ones(2, 3, 4, requires_grad=True)
    l2(student, torch.ones(2, 3, 4)).backward()
    assert not student.grad.any()


@pytest.mark.parametrize(("target", "distance"), [loss for loss in LOSSES if loss[1] != "cross_entropy"])
def test_a_student_that_is_its_teacher_has_no_loss(target, distance):
    teacher, student = pair("softmax")
    # Drop path is active in the student alone, so it gets none; the teacher's must be off, though it was training.
    student.load_state_dict({k: v for k, v in teacher.state_dict().items() if "head" not in k}, strict=False)
    teacher.train()
    loss = loss_of(teacher, student, models.images(), target=target, distance=distance)
    assert loss.item() < (1e-6 if distance == "l2" else 1e-12)


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


@pytest.mark.parametrize(("target", "distance"), LOSSES)
@pytest.mark.parametrize(
    "parameter", ["blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "patch_embed.proj.weight"]
)
def test_gradient_agrees_with_finite_differences(target, distance, parameter):
    teacher, student = pair("elu")  # smooth, unlike relu
    x = models.images()
    distillation = AttentionDistillation.from_settings(
        teacher, student, Distill(weight=1.0, target=target, distance=distance)
    )
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
    distillation = AttentionDistillation(teacher, student, weight=1.0)
    passes, heads, students = (count_calls(m) for m in (teacher.patch_embed, teacher.head, student.patch_embed))
    for call in (1, 2, 3):
        student.train()(models.images(seed=call))
        distillation(models.images(seed=call))
        assert (passes, heads, students) == ([call], [0], [call])


def test_each_call_is_of_its_own_images():
    teacher, student = pair("ttt")
    distillation = AttentionDistillation(teacher, student, weight=1.0)
    student.train()
    losses = []
    for seed in (1, 2, 1):
        student(models.images(seed=seed))
        losses.append(distillation(models.images(seed=seed)).item())
    assert losses[0] == losses[2] != losses[1]


def test_evaluation_passes_of_the_student_are_not_recorded():
    teacher, student = pair("relu")
    distillation = AttentionDistillation(teacher, student, weight=1.0)
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
    distillation = AttentionDistillation(teacher, student, weight=1.0)
    for _ in range({"none": 0, "evaluation": 1, "two": 2}[passes]):
        student.train(passes == "two")(x)
    with pytest.raises(RuntimeError, match="student in training mode"):
        distillation(x)
    # What was recorded for the call that failed does not spoil the next one.
    student.train()(x)
    assert distillation(x).item() == expected


@pytest.mark.parametrize("target", DISTANCES)
def test_remove_leaves_both_models_as_they_were(target):
    teacher, student = pair("relu")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    distillation = AttentionDistillation(teacher, student, weight=1.0, target=target)
    assert all(sum(len(m._forward_hooks) for m in vit.modules()) == len(vit.blocks) for vit in (teacher, student))
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
@pytest.mark.parametrize("target", DISTANCES)
def test_models_that_differ_in_shape_are_refused(changes, word, target):
    with pytest.raises(ValueError, match=f"teacher and student differ in {word}"):
        AttentionDistillation(*pair("relu", **changes), weight=1.0, target=target)


@pytest.mark.parametrize("target", ["heads", "map"])
def test_heads_of_another_number_are_refused(target):
    # One head's map would be broadcast over the teacher's two.
    with pytest.raises(ValueError, match="teacher and student differ in heads: 2 and 1"):
        AttentionDistillation(*pair("relu", heads=1), weight=1.0, target=target)


def test_head_outputs_beside_others_are_refused():
    # The projection of ttt takes the convolution's output too: one head's width more.
    with pytest.raises(ValueError, match="differ in the output projection's input width: 16 and 24"):
        AttentionDistillation(*pair("ttt"), weight=1.0, target="heads")


def test_outputs_of_differently_many_heads_are_matched():
    teacher, student = pair("relu", heads=4)
    assert loss_of(teacher, student, models.images()).item() > 0


def test_maps_of_different_tokens_are_refused():
    with pytest.raises(ValueError, match="prefix tokens"):
        AttentionDistillation(*pair("mhla"), weight=1.0, target="map")


def test_a_teacher_without_the_students_class_token_is_refused():
    # There is nothing to match that token with, and the teacher's last token must not stand for all.
    variant = models.STUDY.variants["softmax"].model_copy(update={"class_token": False, "pool": "avg"})
    with pytest.raises(ValueError, match="token"):
        AttentionDistillation(models.student(variant), models.student("relu"), weight=1.0)


def test_a_loss_without_weight_is_refused():
    with pytest.raises(ValueError, match="weight"):
        AttentionDistillation.from_settings(*pair("relu"), Distill())


@pytest.mark.parametrize(("target", "distance"), LOSSES)
def test_loss_is_float32_and_close_under_autocast(target, distance):
    teacher, student = pair("relu")
    x = models.images()
    expected = loss_of(teacher, student, x, target=target, distance=distance).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(teacher, student, x, target=target, distance=distance)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("target", "distance"), LOSSES)
@pytest.mark.parametrize("variant", ["relu", "mhla"])
def test_blocks_that_are_computed_again_change_no_gradient_and_are_heard_once(variant, target, distance):
    """With drop path: what is computed again is what was."""
    if target == "map" and variant == "mhla":
        pytest.skip("has no map")
    gradients = []
    for again in (False, True):
        teacher = models.student("softmax", seed=50, num_classes=7)
        student = models.student(variant, drop_path=0.3)
        student.set_grad_checkpointing(again)
        calls = count_calls(student.blocks[0].attn.qkv)
        distillation = AttentionDistillation.from_settings(
            teacher, student, Distill(weight=1.0, target=target, distance=distance)
        )
        torch.manual_seed(0)
        for step in (1, 2):
            x = models.images(seed=step)
            (student.train()(x).square().mean() + distillation(x)).backward()
        gradients.append([p.grad for p in student.parameters() if p.requires_grad])
        # A map reads qkv once more in each pass.
        assert calls[0] == 2 * (2 if target == "map" else 1) * (2 if again else 1)
    assert all(map(torch.equal, *gradients))


def test_a_compiled_student_is_heard_and_has_the_same_gradients():
    gradients = []
    for compiled in (False, True):
        teacher, student = pair("relu")
        distillation = AttentionDistillation(teacher, student, weight=1.0)
        model = torch.compile(student, backend="aot_eager", dynamic=False) if compiled else student
        for seed in (1, 2):
            x = models.images(seed=seed)
            (model.train()(x).square().mean() + distillation(x)).backward()
            model.eval()(x)
        gradients.append([p.grad for p in student.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_is_not_distilled_from_itself():
    student = models.student("relu")
    with pytest.raises(DistillError, match="teacher and student are one model"):
        AttentionDistillation(student, student)
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_a_teacher_that_was_put_into_training_mode_is_put_back():
    teacher, student = pair("relu")
    images = models.images()
    expected = loss_of(teacher, student, images)
    with AttentionDistillation(teacher, student, weight=1.0) as distillation:
        nn.ModuleList([teacher, student]).train()
        student(images)
        assert torch.equal(distillation(images), expected)
    assert not teacher.training


def test_the_teachers_pass_ends_after_its_last_attention_and_its_other_passes_do_not():
    """What comes later is not matched; a teacher that is used for something else meanwhile stays whole."""
    old, new = models.student("softmax", seed=9), models.student("relu")
    ran = []
    old.blocks[-1].mlp.register_forward_hook(lambda *_: ran.append("last mlp"))
    old.blocks[0].mlp.register_forward_hook(lambda *_: ran.append("first mlp"))
    with AttentionDistillation(old, new) as distillation:
        new.train()(models.images())
        distillation(models.images())
        assert ran == ["first mlp"]
        old(models.images())
    assert ran == ["first mlp", "first mlp", "last mlp"]


def test_an_error_inside_a_pass_that_ends_early_is_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes"), ending_after(model[1]):
        model(torch.zeros(1, 2))


def test_a_student_that_drops_patches_is_refused_at_the_start():
    teacher, student = models.on_grid("softmax", (4, 4)), models.on_grid("relu", (4, 4), patch_drop_rate=0.5)
    with pytest.raises(DistillError, match="the student drops patches") as caught:
        AttentionDistillation(teacher, student)
    assert "\n" not in str(caught.value)
    assert not student._forward_pre_hooks
