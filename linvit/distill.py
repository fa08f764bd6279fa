"""The attention-matching loss: a frozen Softmax teacher's attention, block by block [arXiv:2609.35745, Sec. B.4].

The paper's two losses match outputs or maps by their mean-squared error. Those of the works it builds on are here too:

- Attention Transfer [arXiv:2411.09702; `models_dual_vit.py` of its code]: maps, by cross-entropy, summed over blocks.
  There the last blocks (6 of ViT-L's 24) are left out; here none are.
- LoLCATs [arXiv:2410.10254; `distill_attention_xent_mse.py`]: the heads' outputs before the output projection,
  [B, H, N, d], by mean-squared error, averaged over blocks.
- RADLADS [arXiv:2505.03005, Sec. 4.2; `rwkv6attn.py`]: outputs, by the L2 distance of tokens, averaged over blocks.

Each is added to the task's loss and each block sees the student's own tokens, as in the paper; the stage of LoLCATs and
RADLADS without a task's loss, in which each block sees the teacher's tokens, is `linvit.align`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from linvit.config import Distill, UserError, first_mistake
from linvit.maps import map_of
from linvit.vit import prefix_tokens

Capture = Callable[[Tensor, Tensor], Tensor]
Distance = Callable[[Tensor, Tensor], Tensor]

EPS = 1e-6
"""What a map's entries count as at least in a cross-entropy: a linear attention's may be exactly zero."""


class DistillError(UserError):
    """A teacher and a student that cannot be matched."""


class AttentionDistillation:
    """The weighted loss between a student's attention and its teacher's, on the same images.

    Call it after the student's forward pass in training mode; it runs the teacher's, as far as its last attention.
    A student without class token is matched on the patch tokens alone. All blocks are matched, those of a hybrid that
    kept their attention too: they see other tokens than the teacher's.

        with AttentionDistillation(teacher, student) as distillation:
            for images, labels in batches:
                loss = criterion(student(images), labels) + distillation(images)

    The student may be compiled, wrapped in DistributedDataParallel, under autocast and compute its blocks again in the
    backward pass (`set_grad_checkpointing`). One that is compiled must not have run before, since what is compiled
    without hooks goes on without them.

    Args:
        teacher: A timm ViT; it is frozen and put in eval mode.
        student: As deep and as wide as the teacher, on the same grid.
        target: What is matched. "output": the attention module's output, after its projection; "heads": what enters
            the projection; "map": the attention map.
        weight: lambda, by which the loss is multiplied.
        distance: "mse", "l2" (for outputs) or "cross_entropy" (for maps), as below.
        reduction: Whether blocks are averaged ("mean") or summed ("sum").

    Raises:
        DistillError: settings that are not defined, or models that differ in shape.
        MapError: target "map" where an operator has none.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        target: Literal["output", "heads", "map"] = "output",
        weight: float = 50.0,
        *,
        distance: Literal["mse", "l2", "cross_entropy"] = "mse",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        try:
            Distill(target=target, weight=weight, distance=distance, reduction=reduction)
        except ValidationError as error:
            raise DistillError(f"attention distillation: {first_mistake(error, Distill)}") from None
        self.teacher, self.student = matched(teacher, student, target)
        self.teacher.requires_grad_(False).eval()
        self.weight = weight
        self.reduction = reduction
        distances: dict[str, Distance] = {"mse": F.mse_loss, "l2": l2, "cross_entropy": cross_entropy}
        self.distance = distances[distance]
        # Tokens that only the teacher has come first; for maps they would also be keys.
        self.extra_tokens = self.teacher.num_prefix_tokens - self.student.num_prefix_tokens
        self._of_student: list[Tensor] = []
        self._of_teacher: list[Tensor] = []
        self._passes = 0
        heard = [  # all of it before the first hook: a map may be missing
            (_hooked(block.attn, target), self._recorder(record, _capture(block.attn, target)))
            for vit, record in ((self.student, self._of_student), (self.teacher, self._of_teacher))
            for block in vit.blocks
        ]
        self._last = heard[-1][0]
        self._hooks = [self.student.register_forward_pre_hook(self._listen)]
        self._hooks += [module.register_forward_hook(recorder) for module, recorder in heard]

    @classmethod
    def from_settings(cls, teacher: nn.Module, student: nn.Module, settings: Distill) -> Self:
        """The loss of an initialisation, whose weight must be known."""
        if settings.weight is None:
            raise DistillError("a distillation loss needs a weight")
        return cls(teacher, student, **settings.model_dump())

    def __call__(self, images: Tensor) -> Tensor:
        """lambda x L_distill for the images [B, 3, H, W] that the student has just seen; a scalar."""
        of_student, passes, self._passes = _emptied(self._of_student), self._passes, 0
        if passes != 1 or len(of_student) != len(self.teacher.blocks):
            raise RuntimeError("run the student in training mode on these images first, once for each call")
        if torch.is_grad_enabled() and not any(seen.requires_grad for seen in of_student) and _learns(self.student):
            raise RuntimeError("the student's pass kept no graph: no_grad, or checkpointing with use_reentrant=True")
        self._of_teacher.clear()  # of passes that someone else made
        self.teacher.eval()  # whatever holds it may have put it into training mode with all else
        with torch.inference_mode(), ending_after(self._last):
            self.teacher.forward_features(images)
        pairs = zip(of_student, _emptied(self._of_teacher), strict=True)
        losses = torch.stack([self.distance(s.float(), self._wanted(t)) for s, t in pairs])
        return self.weight * getattr(losses, self.reduction)()

    def remove(self) -> None:
        """Take the hooks off both models."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _wanted(self, recorded: Tensor) -> Tensor:
        """What the student should show; a copy, since autograd keeps no tensor of inference mode."""
        return recorded[:, self.extra_tokens :].to(torch.float32, copy=True)

    def _listen(self, student: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if student.training:
            self._passes += 1
            self._of_student.clear()  # of a pass that was not distilled

    def _recorder(self, record: list[Tensor], capture: Capture) -> Callable:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Evaluation passes of the student are nobody's business; the teacher is always in eval mode. A block that
            # checkpointing computes again must do all that it did, maps included, but has been heard already.
            if module.training or record is self._of_teacher:
                seen = capture(inputs[0], output)
                if self._passes or record is self._of_teacher:
                    record.append(seen)

        return hook


def l2(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over tokens of ||s - t|| / sqrt(C), for two [B, N, C]; its gradient where they are equal is zero.

    The division by sqrt(C) is in RADLADS' code, not in its text.
    """
    return torch.linalg.vector_norm(student - teacher, dim=-1).mean() * student.shape[-1] ** -0.5


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over heads and queries of -sum_j t_j log max(s_j, EPS), for two maps [B, H, N, N].

    Attention Transfer's students have Softmax maps, without zeros; those of kernels are bounded from below instead.
    """
    return -(teacher * student.clamp_min(EPS).log()).sum(-1).mean()


class _Ended(Exception):
    """Not an error: how a hook leaves a pass."""


@contextmanager
def ending_after(module: nn.Module) -> Iterator[None]:
    """End the pass of a model inside here once this module of it, and its other hooks, have been called.

    What a Softmax ViT has after its last attention, an MLP and a norm, is several percent of it.
    """

    def end(*_: object) -> None:
        raise _Ended

    hook = module.register_forward_hook(end)
    try:
        with suppress(_Ended):
            yield
    finally:
        hook.remove()


def _hooked(attn: nn.Module, target: str) -> nn.Module:
    """The module whose call shows the target."""
    return attn.get_submodule("proj") if target == "heads" else attn


def _capture(attn: nn.Module, target: str) -> Capture:
    """The target, of what the hooked module takes and gives."""
    if target == "map":
        of_tokens = map_of(attn)
        return lambda tokens, _: of_tokens(tokens)
    return (lambda taken, _: taken) if target == "heads" else (lambda _, given: given)


def _learns(student: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in student.parameters())


def _emptied(record: list[Tensor]) -> list[Tensor]:
    """What was recorded, the record starting anew."""
    recorded = record.copy()
    record.clear()
    return recorded


def matched(teacher: nn.Module, student: nn.Module, target: str) -> tuple[VisionTransformer, VisionTransformer]:
    """Both models, out of what may be wrapped around them, their attentions alike.

    Raises:
        DistillError: they are one model, no ViTs, or not alike; the text says in what.
    """
    teacher, student = unwrap_model(teacher), unwrap_model(student)
    if teacher is student:
        raise DistillError("teacher and student are one model; a student is distilled from another")
    _check_alike(teacher, student, target)
    return teacher, student


def _check_alike(teacher: VisionTransformer, student: VisionTransformer, target: str) -> None:
    for vit in (teacher, student):
        if not isinstance(vit, VisionTransformer) or not all(hasattr(block, "attn") for block in vit.blocks):
            raise DistillError(f"{type(vit).__name__} has no attention to match; allowed: timm's VisionTransformer")
    alike: dict[str, list[tuple[Any, Any]]] = {
        "blocks": [(len(teacher.blocks), len(student.blocks))],
        "width": [(teacher.embed_dim, student.embed_dim)],
        "grid": [(teacher.patch_embed.grid_size, student.patch_embed.grid_size)],
    }
    attentions = [(t.attn, s.attn) for t, s in zip(teacher.blocks, student.blocks, strict=False)]
    if target != "output":
        alike["heads"] = [(t.num_heads, s.num_heads) for t, s in attentions]
    if target == "heads":
        alike["the output projection's input width"] = [(t.proj.in_features, s.proj.in_features) for t, s in attentions]
    if target == "map":
        alike["prefix tokens"] = [(teacher.num_prefix_tokens, student.num_prefix_tokens)]
    for what, pairs in alike.items():
        for of_teacher, of_student in pairs:
            if of_teacher != of_student:
                raise DistillError(f"teacher and student differ in {what}: {of_teacher} and {of_student}")
    if not isinstance(student.patch_drop, nn.Identity):
        raise DistillError(
            "the student drops patches, whose attention nothing is matched to; allowed: patch_drop_rate 0"
        )
    of_teacher, of_student = (prefix_tokens(dict(vit.named_parameters())) for vit in (teacher, student))
    if of_student and of_student != of_teacher:
        teachers = ", ".join(of_teacher) or "none"
        raise DistillError(
            f"the student has the tokens {', '.join(of_student)}, the teacher {teachers}; allowed: the same, or none"
        )
