"""Which of the catalogue's operators can do what: told where another one cannot."""

from collections.abc import Callable
from typing import Any

from linvit.catalogue import VARIANTS
from linvit.config import resolve_class
from linvit.config.mistakes import names


def operators(can: Callable[[Any], bool]) -> str:
    """The names of those whose class can."""
    return names(name for name, variant in VARIANTS.items() if can(resolve_class(variant.target)))
