"""The attention-matching loss: a frozen Softmax teacher's attention, block by block [arXiv:2609.35745, Sec. B.4]."""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.config import Distill, UserError


class DistillError(UserError):
    """A teacher and a student that cannot be matched."""


class AttentionDistillation:
    """The weighted loss between a student's attention and its teacher's, on the same images.

    Call it after the student's forward pass in training mode; it runs the teacher's, without its head.
    A student without class token is matched on the patch tokens alone.

    Args:
        teacher: A Softmax ViT; it is frozen and put in eval mode.
        student: As deep and as wide as the teacher, on the same grid.
        settings: What is matched ("output": the attention module's output, after its projection; "map": the
            attention map), the weight lambda, and whether blocks are averaged or summed.
    """

    def __init__(self, teacher: VisionTransformer, student: VisionTransformer, settings: Distill) -> None:
        _check_alike(teacher, student, settings.target)
        if settings.weight is None:
            raise DistillError("a distillation loss needs a weight")
        self.teacher = teacher.requires_grad_(False).eval()
        self.weight = settings.weight
        self.reduction = settings.reduction
        self.capture = {"output": _output, "map": _map}[settings.target]
        # Tokens that only the teacher has come first; for maps they would also be keys.
        self.extra_tokens = teacher.num_prefix_tokens - student.num_prefix_tokens
        self._of_student: list[Tensor] = []
        self._of_teacher: list[Tensor] = []
        self._hooks = [
            *(block.attn.register_forward_hook(self._recorder(self._of_student)) for block in student.blocks),
            *(block.attn.register_forward_hook(self._recorder(self._of_teacher)) for block in teacher.blocks),
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """lambda x L_distill for the images [B, 3, H, W] that the student has just seen; a scalar."""
        of_student = _emptied(self._of_student)
        if len(of_student) != len(self.teacher.blocks):
            raise RuntimeError("run the student in training mode on these images first, once for each call")
        self._of_teacher.clear()  # of passes that someone else made
        with torch.no_grad():
            self.teacher.forward_features(images)
        pairs = zip(of_student, _emptied(self._of_teacher), strict=True)
        losses = torch.stack([F.mse_loss(s.float(), t[:, self.extra_tokens :].float()) for s, t in pairs])
        return self.weight * getattr(losses, self.reduction)()

    def remove(self) -> None:
        """Take the hooks off both models."""
        for hook in self._hooks:
            hook.remove()

    def _recorder(self, record: list[Tensor]):
        def hook(attn: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Evaluation passes of the student are nobody's business; the teacher is always in eval mode.
            if attn.training or record is self._of_teacher:
                record.append(self.capture(attn, inputs[0], output))

        return hook


def _output(attn: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return output


def _map(attn: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return attn.attention_map(x)


def _emptied(record: list[Tensor]) -> list[Tensor]:
    """What was recorded, the record starting anew."""
    recorded = record.copy()
    record.clear()
    return recorded


def _check_alike(teacher: VisionTransformer, student: VisionTransformer, target: str) -> None:
    alike = {
        "blocks": (len(teacher.blocks), len(student.blocks)),
        "width": (teacher.embed_dim, student.embed_dim),
        "grid": (teacher.patch_embed.grid_size, student.patch_embed.grid_size),
    }
    if target == "map":
        alike["heads"] = (teacher.blocks[0].attn.num_heads, student.blocks[0].attn.num_heads)
        alike["prefix tokens"] = (teacher.num_prefix_tokens, student.num_prefix_tokens)
    for what, (of_teacher, of_student) in alike.items():
        if of_teacher != of_student:
            raise DistillError(f"teacher and student differ in {what}: {of_teacher} and {of_student}")
    if student.num_prefix_tokens > teacher.num_prefix_tokens:
        raise DistillError(
            f"the student has {student.num_prefix_tokens} prefix tokens, the teacher only {teacher.num_prefix_tokens}"
        )
