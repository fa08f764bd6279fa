"""Initialisations: each is a list of steps over a freshly built student (paper, Table A)."""

from collections.abc import Callable

from timm.models.vision_transformer import VisionTransformer

from linvit.catalogue import INITS, named
from linvit.config import ConfigError, Init
from linvit.init.analytic import AnalyticError, Impulse, Mimetic
from linvit.init.copy import CopyError, CopyWeights
from linvit.sources import Weights

__all__ = ["AnalyticError", "CopyError", "CopyWeights", "Impulse", "Mimetic", "initialize", "steps"]

Step = Callable[[VisionTransformer], None]


def initialize(
    student: VisionTransformer, teacher: VisionTransformer | Weights | None, strategy: str | Init, *, seed: int = 0
) -> VisionTransformer:
    """Give a student its start from a pre-trained Softmax ViT, in place (paper, Table A).

    What the strategy does not name stays as it is: for the paper's initialisations the student is freshly built, with
    its random start, and not a copy of the teacher.

    Args:
        student: A ViT, linearised in all its blocks or in some.
        teacher: The ViT to copy from, of the student's width and depth, or its weights; None where nothing is copied.
        strategy: "random", "copy" (the attention), "mlpcopy", "fullcopy" (all but the classifier), "mimetic",
            "impulse", or an `Init` of other groups of weights.
        seed: Of what "mimetic" and "impulse" draw.

    Returns:
        The student itself.

    Raises:
        ConfigError: no such strategy.
        CopyError: a parameter that is neither copied nor excused, named; nothing has been copied then.
        AnalyticError: "mimetic" or "impulse" for an operator or positions that they are not defined for.
    """
    init = _named(strategy) if isinstance(strategy, str) else strategy
    if "attention" in init.copied and isinstance(teacher, VisionTransformer):
        _check_heads(student, teacher)
    for step in steps(init, _weights_of(teacher), seed):
        step(student)
    return student


def _named(strategy: str) -> Init:
    start = strategy.removesuffix("-distill")
    if start != strategy and start in INITS:
        raise ConfigError(
            f"strategy {strategy!r}: distillation is a loss of the training; allowed: initialize(..., {start!r}), "
            "then linvit.AttentionDistillation(teacher, student) in the loop"
        )
    return named(INITS, strategy, "strategy")


def steps(init: Init, weights: Weights | None, seed: int) -> list[Step]:
    """The steps that an initialisation is made of. `seed` feeds the analytic ones."""
    chosen: list[Step] = []
    if init.copied:
        if weights is None:
            raise CopyError(f"init {init.name!r} copies {', '.join(init.copied)}, but no source was given")
        chosen.append(CopyWeights(weights, frozenset(init.copied)))
    if init.analytic:  # after the copies: Impulse is solved for the positions that the student ends up with
        starts: dict[str, Callable[[int], Step]] = {"mimetic": Mimetic, "impulse": Impulse}
        chosen.append(starts[init.analytic](seed))
    return chosen


def _check_heads(student: VisionTransformer, teacher: VisionTransformer) -> None:
    """Of equal shapes, rows of `qkv` would silently come to other heads."""
    of_student, of_teacher = ({block.attn.num_heads for block in vit.blocks} for vit in (student, teacher))
    if of_student != of_teacher:
        told = (" or ".join(map(str, sorted(heads))) for heads in (of_teacher, of_student))
        raise CopyError("the teacher's attention has {} heads, the student's {}".format(*told))


def _weights_of(teacher: VisionTransformer | Weights | None) -> Weights | None:
    if teacher is None or isinstance(teacher, Weights):
        return teacher
    if not isinstance(teacher, VisionTransformer):
        raise CopyError(f"teacher: a {type(teacher).__name__}; allowed: timm's VisionTransformer, or linvit's Weights")
    tensors = {name: parameter.detach() for name, parameter in teacher.named_parameters()}
    return Weights(tensors, teacher.patch_embed.grid_size)
