"""Which weights of a pre-trained Softmax ViT survive when its attention is made linear.

The names below make a linear ViT of one's own; each is imported when it is first used, since building a workflow's
DAG imports this package where there is no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linvit.align import Alignment
    from linvit.attention import Attention
    from linvit.config import Init, UserError, Variant
    from linvit.distill import AttentionDistillation
    from linvit.folders import load
    from linvit.init import initialize
    from linvit.maps import attention_map
    from linvit.timm_models import register
    from linvit.vit import linearize

__version__ = "0.1.0"

__all__ = [
    "Alignment",
    "Attention",
    "AttentionDistillation",
    "Init",
    "UserError",
    "Variant",
    "attention_map",
    "initialize",
    "linearize",
    "load",
    "register",
]

_MODULES = {
    "Alignment": "linvit.align",
    "Attention": "linvit.attention",
    "AttentionDistillation": "linvit.distill",
    "Init": "linvit.config",
    "UserError": "linvit.config",
    "Variant": "linvit.config",
    "attention_map": "linvit.maps",
    "initialize": "linvit.init",
    "linearize": "linvit.vit",
    "load": "linvit.folders",
    "register": "linvit.timm_models",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
