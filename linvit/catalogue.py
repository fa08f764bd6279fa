"""The paper's parts that come with the package: sizes, operators with their skeletons, and Table A's initialisations.

`config.yaml`, which lies beside a study and not in the package, has them too; a test holds the two against each other.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from linvit.config import ConfigError, Group, Init, Size, VariantEntry
from linvit.config.mistakes import meant, names

_PartT = TypeVar("_PartT", bound=Size | VariantEntry | Init)
_AnyT = TypeVar("_AnyT")


def _by_name(parts: Iterable[_PartT]) -> dict[str, _PartT]:
    return {part.name: part for part in parts}


PATCHES: dict[str, Any] = {"class_token": False, "positions": "sincos", "pool": "avg"}
"""The skeleton of operators that take patch tokens alone."""
BACKBONE: tuple[Group, ...] = ("attention", "mlp", "norms", "patch_embed", "positions", "class_token")

SIZES = _by_name(
    [
        Size(name="tiny", dim=192, depth=12, heads=3),
        Size(name="small", dim=384, depth=12, heads=6),
        Size(name="base", dim=768, depth=12, heads=12),
    ]
)
VARIANTS = _by_name(
    [
        VariantEntry(
            name="softmax",
            target="linvit.attention.softmax:SoftmaxAttention",
            attention_map=True,
            map_distribution=True,
        ),
        VariantEntry(
            name="elu", target="linvit.attention.kernel:EluAttention", attention_map=True, map_distribution=True
        ),
        VariantEntry(
            name="relu", target="linvit.attention.kernel:ReluAttention", attention_map=True, map_distribution=True
        ),
        VariantEntry(name="inline", target="linvit.attention.inline:InlineAttention", attention_map=True),
        VariantEntry(name="mhla", target="linvit.attention.mhla:MhlaAttention", **PATCHES),
        VariantEntry(
            name="ttt",
            target="linvit.attention.ttt:TttAttention",
            analytic_inits=False,
            head_outputs=False,
            **PATCHES,
        ),
    ]
)
INITS = _by_name(
    [
        Init(name="random"),
        Init(name="mimetic", analytic="mimetic"),
        Init(name="impulse", analytic="impulse"),
        Init(name="copy", copy=("attention",)),
        Init(name="mlpcopy", copy=("mlp",)),
        Init(name="fullcopy", copy=BACKBONE),
    ]
)


def named(parts: Mapping[str, _AnyT], name: str, what: str) -> _AnyT:
    """The part of this name.

    Raises:
        ConfigError: there is none; the text names those that there are.
    """
    if name not in parts:
        raise ConfigError(f"no {what} {name!r}; allowed: {names(parts)}{meant(name, parts)}")
    return parts[name]
