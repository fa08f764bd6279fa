"""The attention-matching loss: a frozen Softmax teacher's attention, block by block [arXiv:2609.35745, Sec. B.4].

The paper's two losses match outputs or maps by their mean-squared error. Those of the works it builds on are here too:

- Attention Transfer [arXiv:2411.09702; `models_dual_vit.py` of its code]: maps, by cross-entropy, summed over blocks.
  There the last blocks (6 of ViT-L's 24) are left out; here none are.
- LoLCATs [arXiv:2410.10254; `distill_attention_xent_mse.py`]: the heads' outputs before the output projection,
  [B, H, N, d], by mean-squared error, averaged over blocks.
- RADLADS [arXiv:2505.03005, Sec. 4.2; `rwkv6attn.py`]: outputs, by the L2 distance of tokens, averaged over blocks.

Each is added to the task's loss and each block sees the student's own tokens, as in the paper; LoLCATs and RADLADS
have a stage without a task's loss, in which each block sees the teacher's tokens.
"""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.config import Distill, UserError

EPS = 1e-6
"""What a map's entries count as at least in a cross-entropy: a linear attention's may be exactly zero."""


class DistillError(UserError):
    """A teacher and a student that cannot be matched."""


class AttentionDistillation:
    """The weighted loss between a student's attention and its teacher's, on the same images.

    Call it after the student's forward pass in training mode; it runs the teacher's, without its head.
    A student without class token is matched on the patch tokens alone.

    Args:
        teacher: A Softmax ViT; it is frozen and put in eval mode.
        student: As deep and as wide as the teacher, on the same grid.
        settings: What is matched ("output": the attention module's output, after its projection; "heads": what
            enters the projection; "map": the attention map), by which distance (`mse`, `l2`, `cross_entropy`
            below), the weight lambda, and whether blocks are averaged or summed.

    Raises:
        DistillError: models that differ in shape, or a weight that is missing.
    """

    def __init__(self, teacher: VisionTransformer, student: VisionTransformer, settings: Distill) -> None:
        _check_alike(teacher, student, settings.target)
        if settings.weight is None:
            raise DistillError("a distillation loss needs a weight")
        self.teacher = teacher.requires_grad_(False).eval()
        self.weight = settings.weight
        self.reduction = settings.reduction
        self.distance = {"mse": F.mse_loss, "l2": l2, "cross_entropy": cross_entropy}[settings.distance]
        self.capture = {"output": _output, "heads": _input, "map": _map}[settings.target]
        # Tokens that only the teacher has come first; for maps they would also be keys.
        self.extra_tokens = teacher.num_prefix_tokens - student.num_prefix_tokens
        self._of_student: list[Tensor] = []
        self._of_teacher: list[Tensor] = []
        self._listening = False
        self._hooks = [student.register_forward_pre_hook(self._listen)]
        self._hooks += [
            _hooked(block.attn, settings.target).register_forward_hook(self._recorder(record))
            for vit, record in ((student, self._of_student), (teacher, self._of_teacher))
            for block in vit.blocks
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """lambda x L_distill for the images [B, 3, H, W] that the student has just seen; a scalar."""
        of_student, self._listening = _emptied(self._of_student), False
        if len(of_student) != len(self.teacher.blocks):
            raise RuntimeError("run the student in training mode on these images first, once for each call")
        self._of_teacher.clear()  # of passes that someone else made
        with torch.inference_mode():
            self.teacher.forward_features(images)
        pairs = zip(of_student, _emptied(self._of_teacher), strict=True)
        losses = torch.stack([self.distance(s.float(), self._wanted(t)) for s, t in pairs])
        return self.weight * getattr(losses, self.reduction)()

    def remove(self) -> None:
        """Take the hooks off both models."""
        for hook in self._hooks:
            hook.remove()

    def _wanted(self, recorded: Tensor) -> Tensor:
        """What the student should show; a copy, since autograd keeps no tensor of inference mode."""
        return recorded[:, self.extra_tokens :].to(torch.float32, copy=True)

    def _listen(self, student: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._listening = student.training

    def _recorder(self, record: list[Tensor]):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Evaluation passes of the student are nobody's business; the teacher is always in eval mode. A block that
            # checkpointing computes again must do all that it did, maps included, but has been heard already.
            if module.training or record is self._of_teacher:
                seen = self.capture(module, inputs[0], output)
                if self._listening or record is self._of_teacher:
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


def _hooked(attn: nn.Module, target: str) -> nn.Module:
    """The module whose call shows the target."""
    return attn.proj if target == "heads" else attn


def _output(attn: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return output


def _input(proj: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return x


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
    if target != "output":
        alike["heads"] = (teacher.blocks[0].attn.num_heads, student.blocks[0].attn.num_heads)
    if target == "heads":
        widths = tuple(vit.blocks[0].attn.proj.in_features for vit in (teacher, student))
        alike["the output projection's input width"] = widths
    if target == "map":
        alike["prefix tokens"] = (teacher.num_prefix_tokens, student.num_prefix_tokens)
    for what, (of_teacher, of_student) in alike.items():
        if of_teacher != of_student:
            raise DistillError(f"teacher and student differ in {what}: {of_teacher} and {of_student}")
    if student.num_prefix_tokens > teacher.num_prefix_tokens:
        raise DistillError(
            f"the student has {student.num_prefix_tokens} prefix tokens, the teacher only {teacher.num_prefix_tokens}"
        )
