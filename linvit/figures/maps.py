"""Attention maps of a source and of students, side by side."""

import textwrap
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure, SubFigure

from linvit.figures.style import INK, NOTE, STYLE

LABEL = {"fontsize": 5.5, "labelpad": 1.5, "color": INK}
SIDE = 0.72
"""Inches of a panel's side."""
MEASURE = (
    "What the class token attends to (in models without one: what patches do, on average); means over heads.\n"
    "Each map has a scale of its own: numbers are its largest entry over the mean."
)
BELOW_ZERO = " Green: negative."
MAGMA = colormaps["magma"](np.linspace(0, 1, 128))
SIGNED = ListedColormap(np.vstack([np.linspace(to_rgba("#5fe3b0"), to_rgba("#0b3d2e"), 128), MAGMA]))
"""Magma from zero up; green, which it lacks, below."""


@dataclass(frozen=True)
class Maps:
    """What models attend to on the same images."""

    images: np.ndarray
    """[n, H, W, C], from 0 to 1."""
    blocks: tuple[int, ...]
    """From 1."""
    names: tuple[str, ...]
    """Of the models, the source first."""
    maps: tuple[tuple[np.ndarray | None, ...], ...]
    """[n, h, w] by model and block; None where an operator has no map."""
    source: str


def maps(found: Maps) -> Figure:
    """A line per image; beside it, for each block, the map of each model."""
    n, models, blocks = len(found.images), len(found.names), len(found.blocks)
    widths = [1.1, *[models + 0.2] * blocks]
    lines_of_name = max(name.count("\n") for name in found.names)
    with rc_context(STYLE):
        height = 0.95 + 0.1 * lines_of_name + (SIDE + 0.14) * n
        figure = Figure(figsize=(max(SIDE * sum(widths), 3.4), height), layout="constrained")
        left, *parts = figure.subfigures(1, 1 + blocks, width_ratios=widths)
        _images(left, found.images, "\n" * lines_of_name)
        for number, (part, block) in enumerate(zip(parts, found.blocks, strict=True)):
            part.suptitle(f"Block {block}", fontsize=8)
            axes = _axes(part, n, models)
            for column, name, of_model in zip(axes.T, found.names, found.maps, strict=True):
                column[0].set_title(name, fontsize=6)
                for line, ax in enumerate(column):
                    of_block = of_model[number]
                    _map(ax, None if of_block is None else of_block[line])
        figure.supxlabel(_note(found, figure.get_figwidth()), fontsize=6, color=NOTE)
    return figure


def _note(found: Maps, width: float) -> str:
    is_signed = any((shown < 0).any() for of_model in found.maps for shown in of_model if shown is not None)
    lines = f"{MEASURE}{BELOW_ZERO if is_signed else ''}\nSource: {found.source}".splitlines()
    return "\n".join(textwrap.fill(line, int(22 * width)) for line in lines)


def _images(part: SubFigure, images: np.ndarray, above: str) -> None:
    # Titles and labels that are empty keep the images beside their maps.
    part.suptitle(" ", fontsize=8)
    axes = _axes(part, len(images), 1)[:, 0]
    axes[0].set_title(f"{above}Image", fontsize=6)
    for ax, image in zip(axes, images, strict=True):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        ax.set_xlabel(" ", **LABEL)


def _axes(figure: SubFigure, lines: int, columns: int) -> np.ndarray:
    axes = figure.subplots(lines, columns, squeeze=False)
    for ax in axes.ravel():
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.grid(False)
    return axes


def _map(ax: Axes, shown: np.ndarray | None) -> None:
    if shown is None:
        ax.set_facecolor("#f2f2f2")
        ax.set_aspect("equal")
        ax.text(0.5, 0.5, "no map", ha="center", va="center", color="#888888", fontsize=6, transform=ax.transAxes)
        return
    peak = np.abs(shown).max()
    scale = {"cmap": SIGNED, "vmin": -peak} if shown.min() < 0 else {"cmap": "magma", "vmin": 0}
    ax.imshow(shown, vmax=peak, **scale)
    ax.set_xlabel(f"\N{MULTIPLICATION SIGN}{shown.max() / shown.mean():.1f}", **LABEL)
