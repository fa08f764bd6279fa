"""Initialisations: each is a list of steps over a freshly built student (paper, Table A)."""

from collections.abc import Callable

from timm.models.vision_transformer import VisionTransformer

from linvit.config import Init
from linvit.init.analytic import Impulse, Mimetic
from linvit.init.copy import CopyError, CopyWeights
from linvit.sources import Weights

__all__ = ["CopyError", "CopyWeights", "Impulse", "Mimetic", "initialize", "steps"]

Step = Callable[[VisionTransformer], None]


def initialize(student: VisionTransformer, init: Init, weights: Weights | None, seed: int) -> VisionTransformer:
    """Apply an initialisation to a student that already has its random start, in place."""
    for step in steps(init, weights, seed):
        step(student)
    return student


def steps(init: Init, weights: Weights | None, seed: int) -> list[Step]:
    """The steps that an initialisation is made of. `seed` feeds the analytic ones."""
    chosen: list[Step] = []
    if init.copied:
        if weights is None:
            raise CopyError(f"init {init.name!r} copies {', '.join(init.copied)}, but no source was given")
        chosen.append(CopyWeights(weights, frozenset(init.copied)))
    if init.analytic:  # after the copies: Impulse is solved for the positions that the student ends up with
        chosen.append({"mimetic": Mimetic, "impulse": Impulse}[init.analytic](seed))
    return chosen
