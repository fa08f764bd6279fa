"""The first stage of a quick conversion: attentions alone, each on its teacher's tokens, before anything else learns.

As in LoLCATs [arXiv:2410.10254, "attention transfer"] and RADLADS [arXiv:2505.03005, step 1], which convert language
models. The paper has no such stage.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from linvit.config import Align, Recipe
from linvit.data import Batches
from linvit.distill import ending_after, matched
from linvit.fit import NonFiniteLoss, fit
from linvit.progress import Progress


def align(
    teacher: VisionTransformer,
    student: VisionTransformer,
    stage: Align,
    batches: Batches,
    recipe: Recipe,
    **options: Any,
) -> Progress:
    """Teach the student's attentions what their teacher's give for the same tokens; all other weights stay.

    Args:
        stage: Says for how long, and how fast; all else is the recipe's.
        options: Of `fit`.

    Raises:
        RunEnded: as of `fit`.
    """
    with Alignment(teacher, student) as alignment:
        try:
            return fit(alignment, batches, alignment_of(recipe, stage), criterion=lambda loss, _: loss, **options)
        except NonFiniteLoss as error:
            error.advice = "lower the recipe's align.lr, or set its precision: float32"
            raise


class Alignment(nn.Module):
    """A student's attentions, and the distance of their outputs from their teacher's.

    Each takes the tokens that the teacher's own attention takes, so that no block waits for those before it to be
    right. Its parameters are the attentions' alone: nothing else is trained, or in a checkpoint.

        with Alignment(teacher, student) as alignment:
            for images, _ in batches:
                loss = alignment(images)

    Args:
        teacher: A timm ViT; it is frozen and put in eval mode.
        student: As deep and as wide as the teacher, on the same grid.

    Raises:
        DistillError: models that differ in shape.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        source, vit = matched(teacher, student, "output")
        self.attentions = nn.ModuleList(block.attn for block in vit.blocks)
        self.extra_tokens = source.num_prefix_tokens - vit.num_prefix_tokens
        self._teacher = (source.requires_grad_(False).eval(),)  # in a tuple, so that it is no part of this module
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._hooks = [block.attn.register_forward_hook(self._record) for block in source.blocks]

    def forward(self, images: Tensor) -> Tensor:
        """The mean-squared error of the outputs for the images [B, 3, H, W], averaged over blocks; a scalar."""
        errors = [
            F.mse_loss(attention(tokens).float(), wanted.float())
            for attention, (tokens, wanted) in zip(self.attentions, self._of_teacher(images), strict=True)
        ]
        return torch.stack(errors).mean()

    @torch.compiler.disable  # hooks, and nothing to be gained: the teacher is not trained
    def _of_teacher(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What each of its attentions takes and gives, both [B, N, C], without tokens that the student lacks."""
        (teacher,) = self._teacher
        self._seen.clear()
        with torch.no_grad(), ending_after(teacher.blocks[-1].attn):
            teacher.forward_features(images)
        return [(tokens[:, self.extra_tokens :], output[:, self.extra_tokens :]) for tokens, output in self._seen]

    def _record(self, attention: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._seen.append((inputs[0], output))

    def __enter__(self) -> "Alignment":
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()


def alignment_of(recipe: Recipe, stage: Align) -> Recipe:
    """The recipe of the stage: without warm-up or mixed images, and its attentions are no blocks to checkpoint."""
    schedule = {"epochs": stage.epochs, "lr": stage.lr, "warmup_epochs": 0, "align": None}
    return recipe.model_copy(update={**schedule, "mixup": 0.0, "cutmix": 0.0, "grad_checkpointing": False})
