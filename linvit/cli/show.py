"""What a configuration has to choose from, in a line each or whole."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from tabulate import tabulate

from linvit.catalogue import named
from linvit.cli.command import Command, add_config, parts_of
from linvit.config import (
    Block,
    ConfigError,
    DatasetEntry,
    Init,
    Part,
    Recipe,
    Size,
    SourceEntry,
    VariantEntry,
    load_study,
)
from linvit.config.mistakes import meant, names
from linvit.grid import expand


def show(options: argparse.Namespace) -> None:
    """List what there is to choose from, or one entry whole.

    TABLE is one of the configuration's; without a config.yaml, variants, inits and sizes are those of the package.
    """
    if options.table not in TABLES:
        raise ConfigError(f"no table {options.table!r}; allowed: {names(TABLES)}{meant(options.table, TABLES)}")
    parts = parts_of(options.table, options.config)
    if options.name:
        part = named(parts, options.name, options.table.removesuffix("s"))
        print(yaml.safe_dump({options.name: _plain(part)}, sort_keys=False, default_flow_style=None, width=100), end="")
    elif options.table == "grids":
        study = load_study(options.config)
        print(_lines({name: _grid(blocks, len(expand(study, name))) for name, blocks in parts.items()}))
    else:
        print(_lines({name: TOLD[options.table](part) for name, part in parts.items()}))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("name", metavar="NAME", nargs="?", help="an entry to show whole, as YAML")
    add_config(parser)


def _lines(rows: Mapping[str, tuple[str, ...]]) -> str:
    return tabulate([(name, *row) for name, row in rows.items()], tablefmt="plain", disable_numparse=True)


def _plain(part: Part | Mapping | Sequence) -> Any:
    """As the configuration has it, with its defaults."""
    if isinstance(part, Part):
        unset = {key for key, field in type(part).model_fields.items() if getattr(part, key) is field.default is None}
        return part.model_dump(mode="json", by_alias=True, exclude={"name", *unset})
    if isinstance(part, Mapping):
        return {key: _plain(value) for key, value in part.items()}
    return [_plain(value) for value in part]


def _size(size: Size) -> tuple[str, ...]:
    rows, columns = size.grid_size
    images = f"images {size.channels}x{size.image_size}x{size.image_size}"
    return f"{size.depth} blocks", f"{size.dim} wide", f"{size.heads} heads", f"{rows}x{columns} patches", images


def _variant(variant: VariantEntry) -> tuple[str, ...]:
    takes = "class token" if variant.class_token else "patch tokens alone"
    losses = f"distilled by {', '.join(variant.distilled)}"
    analytic = "" if variant.analytic_inits else "; no mimetic, impulse"
    return variant.target, f"{takes}, {variant.positions} positions", losses + analytic


def _init(init: Init) -> tuple[str, ...]:
    start = f"copies {', '.join(init.copied)}" if init.copied else init.analytic or "random"
    if init.distill is None:
        return start, "" if init.train else "evaluated as it is"
    weight = f" x {init.distill.weight:g}" if init.distill.weight else ""
    return start, f"distils {init.distill.loss}{weight}"


def _source(sizes: Mapping[str, SourceEntry]) -> tuple[str, ...]:
    return ("; ".join(f"{size}: {_origin(entry)}" for size, entry in sizes.items()),)


def _origin(entry: SourceEntry) -> str:
    if entry.train:
        return f"trained on {entry.train.dataset} by {entry.train.recipe}"
    return str(entry.timm or entry.url or entry.path)


def _dataset(dataset: DatasetEntry) -> tuple[str, ...]:
    train, test = (f"{size:,}" if size else "?" for size in (dataset.train_size, dataset.test_size))
    images = f"{test} test images" if dataset.test_of else f"{train} + {test} images"
    recipes = [dataset.recipe] if isinstance(dataset.recipe, str) else dict.fromkeys((dataset.recipe or {}).values())
    how = f"out of distribution for {dataset.test_of}" if dataset.test_of else f"by {', '.join(recipes)}"
    return f"{dataset.classes:,} classes", images, how


def _recipe(recipe: Recipe) -> tuple[str, ...]:
    batch = f"batches of {recipe.batch_size:,}"
    return f"{recipe.epochs} epochs ({recipe.warmup_epochs} of warm-up)", batch, f"lr {recipe.lr:g}", _extras(recipe)


def _extras(recipe: Recipe) -> str:
    """What it has beyond the paper's own recipe."""
    keys = ("drop_path", "auto_augment", "mixup", "cutmix", "random_erasing", "compile", "grad_checkpointing")
    values = {key: getattr(recipe, key) for key in keys}
    told = [key if value is True else f"{key} {value}" for key, value in values.items() if value]
    align = [f"{recipe.align.epochs} epochs of align before"] if recipe.align else []
    return ", ".join([*align, *told])


def _grid(blocks: tuple[Block, ...], runs: int) -> tuple[str, ...]:
    axes = ("datasets", "sizes", "variants", "inits", "seeds")
    counts = (len({value for block in blocks for value in getattr(block, axis)}) for axis in axes)
    told = (f"{n} {axis if n > 1 else axis.removesuffix('s')}" for n, axis in zip(counts, axes, strict=True))
    return f"{runs:,} runs", ", ".join(told)


TOLD: dict[str, Callable[..., tuple[str, ...]]] = {
    "variants": _variant,
    "inits": _init,
    "sizes": _size,
    "sources": _source,
    "datasets": _dataset,
    "recipes": _recipe,
}
"""What the line of an entry tells of it."""
TABLES = (*TOLD, "grids")

COMMANDS = (Command(show, _arguments, "linvit show variants"),)
