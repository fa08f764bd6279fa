"""Linear ViTs in timm's registry: the catalogue's, `timm.create_model("linvit_relu_small_patch16_224")`, and any other
ViT of timm's with an operator in some of its blocks or all, `timm.create_model("linvit", base=..., variant=...)`.

The operator is a part of the architecture's name, and no tag behind a dot: timm takes a tag for the name of an
architecture's weights. It looks up what builds a model by the part before the dot alone, and writes that part alone
into the `config.json` of saved models, so that an operator named by a tag would be lost there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, is_model, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from linvit.catalogue import SIZES, VARIANTS, named
from linvit.config import ConfigError, Size, Variant
from linvit.vit import fix_positions, linearize, variant_vit

__all__ = ["register"]

LINVIT = "linvit"
"""The architecture that is any ViT of timm's, linearised."""
OF_WEIGHTS = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load", "tag")
"""What timm's configuration of a model tells of where its weights come from."""

MODELS: dict[str, tuple[Variant, Size]] = {
    f"linvit_{variant.name}_{size.name}_patch{size.patch_size}_{size.image_size}": (variant, size)
    for variant, size in product(VARIANTS.values(), SIZES.values())
}
# Read by timm when it registers a model of this module. There are no weights to download; the images are DeiT's.
default_cfgs = generate_default_cfgs(
    {
        name: {
            "input_size": (size.channels, size.image_size, size.image_size),
            "fixed_input_size": True,
            "crop_pct": 0.9,
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        for name, (_, size) in MODELS.items()
    }
    | {LINVIT: {}}
)


def register() -> list[str]:
    """Enter the catalogue's models into timm's registry; a second time changes nothing.

    Each takes what timm's own ViTs take: `num_classes`, `img_size`, `drop_path_rate`, `features_only`,
    `checkpoint_path` and the other arguments of `VisionTransformer`. Without a checkpoint the weights are random.
    The model `linvit` is the one that converted folders name; it takes `base` (timm's name of a ViT), `variant` (a
    name of the catalogue, or the settings of a `Variant`), `blocks` (all by default) and what the base takes.

    Returns:
        The catalogue's names: an operator and a size each, `linvit_<variant>_<size>_patch16_224`.
    """
    if not is_model(LINVIT):
        register_model(linvit)
    for name in MODELS:
        if not is_model(name):
            # timm expects an entry point to be a name of its module.
            globals()[name] = register_model(_entry_point(name))
    return list(MODELS)


def _entry_point(name: str) -> Callable[..., VisionTransformer]:
    variant, size = MODELS[name]

    def entry_point(pretrained: bool = False, **options: Any) -> VisionTransformer:
        size_options = {
            "patch_size": size.patch_size,
            "embed_dim": size.dim,
            "depth": size.depth,
            "num_heads": size.heads,
        }
        return build_model_with_cfg(
            partial(variant_vit, variant),
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"},
            **(size_options | options),
        )

    entry_point.__name__ = entry_point.__qualname__ = name
    return entry_point


def linvit(
    pretrained: bool = False,
    *,
    base: str,
    variant: str | Mapping[str, Any],
    blocks: Sequence[int] | None = None,
    pretrained_cfg: dict[str, Any] | None = None,
    **options: Any,
) -> VisionTransformer:
    """timm's entry point of a linearised ViT of any architecture."""
    return build_model_with_cfg(
        partial(_linearized, base, variant, blocks),
        LINVIT,
        pretrained,
        pretrained_cfg=pretrained_cfg or configuration_of(base),
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"},
        **options,
    )


def configuration_of(base: str) -> dict[str, Any]:
    """What timm knows of a model's images and layers, without where its weights are."""
    config = timm.get_pretrained_cfg(base).to_dict()
    return {key: value for key, value in config.items() if key not in OF_WEIGHTS} | {"architecture": LINVIT}


def _linearized(
    base: str, variant: str | Mapping[str, Any], blocks: Sequence[int] | None, **options: Any
) -> VisionTransformer:
    if not is_model(base.partition(".")[0]):  # nor anything that timm would fetch, such as hf-hub:...
        raise ConfigError(f"base: no model of timm's: {base!r}")
    chosen = named(VARIANTS, variant, "variant") if isinstance(variant, str) else Variant.model_validate(dict(variant))
    model = timm.create_model(base, **options)
    if chosen.positions == "sincos":
        fix_positions(model)
    return linearize(model, chosen, blocks=blocks)
