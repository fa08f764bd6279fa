"""Attention distillation in a training loop of one's own: any ViT as teacher, hybrids, compiled, shared, in AMP."""

import os
import subprocess
import sys
from pathlib import Path

import family
import models
import pytest
import timm
import torch
import torch.nn.functional as F
from processes import start_ranks
from torch import Tensor, nn

from linvit.attention.softmax import softmax_map
from linvit.distill import AttentionDistillation, DistillError
from linvit.maps import MapError
from linvit.vit import linearize

torch.set_num_threads(1)

TARGETS = ("output", "heads", "map")
ROOT = Path(__file__).parents[1]


def pair(variant: str = "relu", blocks=None, **options) -> tuple[nn.Module, nn.Module]:
    """timm's own ViT as teacher, and a linear student of the same kind."""
    teacher = family.vit(50, **options)
    student = linearize(family.vit(20, **options), variant, blocks=blocks)
    models.perturb(student, 0.1, seed=3)
    return teacher, student


def gradients(student: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    student.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def step(model: nn.Module, distillation: AttentionDistillation, images: Tensor) -> Tensor:
    """The loss of a usual loop."""
    return F.cross_entropy(model(images), torch.arange(len(images)) % 3) + distillation(images)


def expected(target: str, **options) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients of the plain loop, in eager float32."""
    teacher, student = pair(**options)
    with AttentionDistillation(teacher, student, target) as distillation:
        loss = step(student.train(), distillation, models.images(batch=4))
        return loss.item(), gradients(student, loss)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def hooks(*vits: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for vit in vits for m in vit.modules())


# --- what is matched ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}, {"distilled": True}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_timm_model_is_a_teacher_and_the_mean_over_blocks_is_matched(target, options):
    teacher, student = pair("elu", **options)
    images, seen = models.images(), {}
    for vit in (teacher, student):
        for index, block in enumerate(vit.blocks):
            layer = block.attn.proj if target == "heads" else block.attn
            key = (vit is teacher, index)
            layer.register_forward_hook(
                lambda module, inputs, output, key=key: seen.__setitem__(key, (module, inputs[0], output))
            )
    with AttentionDistillation(teacher, student, target, weight=2.0) as distillation:
        student.train()(images)
        loss = distillation(images)
    of_block = {
        "output": lambda module, x, output: output,
        "heads": lambda module, x, output: x,
        "map": lambda module, x, output: (
            softmax_map(module, x) if isinstance(module, timm.layers.Attention) else module.attention_map(x)
        ),
    }[target]
    squares = [(of_block(*seen[False, i]) - of_block(*seen[True, i])).square().mean() for i in range(2)]
    torch.testing.assert_close(loss, sum(squares))


@pytest.mark.parametrize("target", TARGETS)
def test_all_blocks_of_a_hybrid_are_matched(target):
    """The one that kept its attention sees other tokens than the teacher's, so it has a loss as well."""
    losses = []
    for index in range(2):
        teacher, student = pair("relu", blocks=[0])
        if index == 1:
            student.blocks[1].load_state_dict(family.vit(99).blocks[1].state_dict())
        with AttentionDistillation(teacher, student, target) as distillation:
            student.train()(models.images())
            losses.append(distillation(models.images()).item())
    assert losses[0] != losses[1]


def test_a_teachers_registers_are_left_out_where_the_student_has_patches_alone():
    teacher = family.vit(50, reg_tokens=2)
    student = linearize(family.vit(20, class_token=False, global_pool="avg"), "mhla")
    of_teacher, of_student = [], []
    for vit, outputs in ((teacher, of_teacher), (student, of_student)):
        for block in vit.blocks:
            block.attn.register_forward_hook(lambda *call, outputs=outputs: outputs.append(call[2]))
    with AttentionDistillation(teacher, student, weight=2.0) as distillation:
        student.train()(models.images())
        loss = distillation(models.images())
    squares = [(s - t[:, 3:]).square().mean() for s, t in zip(of_student, of_teacher, strict=True)]
    torch.testing.assert_close(loss, sum(squares))


# --- misuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "outputs"}, "target"),
        ({"distance": "l2", "target": "map"}, "distance"),
        ({"weight": 0.0}, "weight"),
        ({"weight": "50"}, "weight"),
        ({"reduction": "max"}, "reduction"),
    ],
)
def test_settings_that_are_not_defined_are_one_line(settings, words):
    teacher, student = pair()
    with pytest.raises(DistillError, match=f"attention distillation: .*{words}") as caught:
        AttentionDistillation(teacher, student, **settings)
    assert "\n" not in str(caught.value)
    assert hooks(teacher, student) == 0


@pytest.mark.parametrize(
    ("teacher", "student", "words"),
    [
        (lambda: timm.create_model("resnet10t"), lambda: family.vit(), "ResNet has no attention to match"),
        (lambda: family.vit(), lambda: nn.Identity(), "Identity has no attention to match"),
        (
            lambda: family.vit(reg_tokens=1),
            lambda: family.vit(),
            r"the student has the tokens cls_token\[0\], the teacher",
        ),
        (lambda: family.vit(), lambda: family.vit(distilled=True), r"dist_token\[0\], the teacher cls_token\[0\]"),
        (lambda: family.vit(), lambda: linearize(family.vit(depth=3), "relu"), "differ in blocks: 2 and 3"),
    ],
)
def test_models_that_cannot_be_matched_are_refused(teacher, student, words):
    with pytest.raises(DistillError, match=words):
        AttentionDistillation(teacher(), student())


def test_a_map_that_an_operator_of_a_hybrid_lacks_is_refused_before_a_hook_is_set():
    options = {"class_token": False, "global_pool": "avg"}
    teacher, student = pair("mhla", blocks=[1], **options)
    with pytest.raises(MapError, match="MhlaAttention has no attention map"):
        AttentionDistillation(teacher, student, "map")
    assert hooks(teacher, student) == 0


def test_a_hybrids_head_outputs_are_compared_in_every_block():
    teacher, student = pair("ttt", blocks=[1], class_token=False, global_pool="avg")
    with pytest.raises(DistillError, match="differ in the output projection's input width: 16 and 24"):
        AttentionDistillation(teacher, student, "heads")


def test_the_loss_ends_with_its_block():
    teacher, student = pair()
    with pytest.raises(KeyError), AttentionDistillation(teacher, student):
        raise KeyError("an error of the loop's own")
    assert hooks(teacher, student) == 0


def test_a_pass_without_a_graph_is_an_error_and_no_silent_loss():
    teacher, student = pair()
    with AttentionDistillation(teacher, student) as distillation:
        with torch.no_grad():
            student.train()(models.images())
        with pytest.raises(RuntimeError, match="kept no graph"):
            distillation(models.images())
        with torch.no_grad():  # to look at the loss alone
            student(models.images())
            assert distillation(models.images()) > 0


# --- loops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_compiled_student_learns_the_same(target):
    loss, reference = expected(target)
    teacher, student = pair()
    model = torch.compile(student, backend="aot_eager")
    with AttentionDistillation(teacher, model, target) as distillation:
        for _ in range(2):
            ours = step(model.train(), distillation, models.images(batch=4))
        assert ours.item() == pytest.approx(loss, rel=1e-5)
        assert_close(gradients(student, ours), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("blocks", [None, [1]])
def test_blocks_that_are_computed_again_are_recorded_once(target, blocks):
    loss, reference = expected(target, blocks=blocks)
    teacher, student = pair(blocks=blocks)
    student.set_grad_checkpointing()
    with AttentionDistillation(teacher, student, target) as distillation:
        for _ in range(2):
            ours = step(student.train(), distillation, models.images(batch=4))
            assert ours.item() == pytest.approx(loss, rel=1e-6)
            assert_close(gradients(student, ours), reference, rtol=1e-6, atol=1e-7)


def test_passes_that_are_not_distilled_are_not_kept():
    teacher, student = pair()
    with AttentionDistillation(teacher, student) as distillation:
        for _ in range(3):
            student.train()(models.images())
        assert len(distillation._of_student) == len(student.blocks)


@pytest.mark.parametrize("target", TARGETS)
def test_autocast_changes_gradients_by_rounding_alone(target):
    loss, reference = expected(target)
    teacher, student = pair()
    with AttentionDistillation(teacher, student, target) as distillation:
        with torch.autocast("cpu", torch.bfloat16):
            ours = step(student.train(), distillation, models.images(batch=4))
        assert ours.dtype == torch.float32
        assert ours.item() == pytest.approx(loss, rel=0.02)
        found = gradients(student, ours)
    for name, gradient in reference.items():
        assert (found[name] - gradient).norm() < 0.2 * gradient.norm() + 0.02, name


RANK = """
import sys, torch
import models, test_distill_loops as loops
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
rank, target, out = torch.distributed.get_rank(), sys.argv[1], sys.argv[2]
teacher, student = loops.pair()
student.set_grad_checkpointing(target == "map")
model = DistributedDataParallel(student)
with loops.AttentionDistillation(teacher, model, target) as distillation:
    mine = models.images(batch=4)[2 * rank : 2 * rank + 2]
    for _ in range(2):
        labels = (torch.arange(4) % 3)[2 * rank : 2 * rank + 2]
        loss = loops.F.cross_entropy(model(mine), labels) + distillation(mine)
        found = loops.gradients(student, loss)
torch.save((loss.item(), found), f"{out}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("target", ["output", "map"])
def test_two_processes_learn_what_one_learns(target, tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", RANK, target, str(tmp_path)]
    ranks = start_ranks([command] * 2, {**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    loss, reference = expected(target)
    (first, ours), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (first + second) / 2 == pytest.approx(loss, rel=1e-5)
    assert_close(ours, others, rtol=0, atol=0)
    assert_close(ours, reference, rtol=1e-4, atol=1e-5)
