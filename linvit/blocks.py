"""What the blocks of trained runs do beside their source's: how far outputs are apart, and what is attended to."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from linvit import data, datasets
from linvit.config import UserError
from linvit.device import pick_device
from linvit.evaluate import count_parameters
from linvit.figures.maps import Maps
from linvit.grid import RunSpec, Source
from linvit.maps import MapError, attention_map
from linvit.ranks import Ranks
from linvit.report import identity
from linvit.results import VARIANTS, label
from linvit.run import build_student, build_teacher, load_weights
from linvit.trained import MODEL, load_model

log = logging.getLogger(__name__)


class BlocksError(UserError):
    """Runs whose blocks cannot be compared with a source's."""


@dataclass(frozen=True)
class Opened:
    """A run with its trained model, and the source beside which it is shown."""

    spec: RunSpec
    student: VisionTransformer
    source: Source


def opened(folders: Sequence[Path]) -> list[Opened]:
    """Runs, each with its own source or, if it uses none, the first one of the others of its size and data set.

    Raises:
        ModelError: a folder has no trained model, or one that this code cannot read.
        BlocksError: a run has no source to be shown beside.
    """
    found = [load_model(folder / MODEL) for folder in folders]
    sources: dict[tuple[str, str], Source] = {}
    for spec, _ in found:
        if spec.source:
            sources.setdefault((spec.dataset.name, spec.size.name), spec.source)
    for spec, _ in found:
        if (spec.dataset.name, spec.size.name) not in sources:
            raise BlocksError(f"{spec.name}: uses no source; name a run of this data set and size that does, too")
    return [Opened(spec, model, spec.source or sources[spec.dataset.name, spec.size.name]) for spec, model in found]


def block_errors(
    folders: Sequence[Path], *, sources_folder: Path, data_root: Path, images: int = 256, batch_size: int = 64
) -> list[dict]:
    """The relative error of each block's attention output, before training and after it.

    It is the mean-squared error between student and source, over the mean square of the source's: 0 for a perfect copy,
    1 for a block that gives out nothing. As in distillation, each block sees its own model's tokens, and tokens that
    only the source has are left out. Images are test images, evenly spread.

    Returns:
        Rows with the columns of `results.BLOCK_DTYPES`.

    Raises:
        BlocksError, ModelError: as of `opened`.
    """
    device, rows = pick_device(), []
    for run in opened(folders):
        weights = load_weights(run.source, sources_folder)
        teacher = build_teacher(run.spec.size, weights).to(device)
        shown = shown_images(run.spec, images, data_root).split(batch_size)
        start = build_student(run.spec, weights if run.spec.source else None)
        columns = identity(run.spec) | {"source": run.source.name, "parameters": count_parameters(run.student)}
        for trained, student in ((False, start), (True, run.student)):
            errors = relative_errors(student.to(device), teacher, [batch.to(device) for batch in shown])
            rows += [
                columns | {"trained": trained, "block": block, "error": error} for block, error in enumerate(errors, 1)
            ]
        log.info("%s: %d blocks measured", run.spec.name, len(errors))
    return rows


def relative_errors(student: VisionTransformer, teacher: VisionTransformer, batches: Sequence[Tensor]) -> list[float]:
    """Per block, sum (s - t)^2 / sum t^2 over images, tokens and channels of both models' attention outputs."""
    extra = teacher.num_prefix_tokens - student.num_prefix_tokens
    differences, squares = [], []
    for images in batches:
        of_student, of_teacher = _outputs(student, images), _outputs(teacher, images)[:, :, extra:]
        differences.append((of_student - of_teacher).square().sum((1, 2, 3)))
        squares.append(of_teacher.square().sum((1, 2, 3)))
    return (torch.stack(differences).sum(0) / torch.stack(squares).sum(0)).tolist()


def maps_beside(
    folders: Sequence[Path], *, sources_folder: Path, data_root: Path, images: int, blocks: Sequence[int] | None = None
) -> Maps:
    """What the source and the students of some runs attend to on the same test images.

    A block's map is averaged over heads, and over the queries that pooling looks at: the class token where the model
    pools that one, else all patches; keys are patches.

    Args:
        blocks: From 0, negative ones from the end; by default the first, the middle and the last.

    Raises:
        BlocksError: the runs differ in data set, size or source, there is no such block, or as of `opened`.
    """
    runs, device = opened(folders), pick_device()
    spec, source = runs[0].spec, runs[0].source
    _check_alike(runs)
    chosen = _indices(spec.size.depth, blocks)
    shown = shown_images(spec, images, data_root).to(device)
    teacher = build_teacher(spec.size, load_weights(source, sources_folder)).to(device)
    models = [("Softmax", teacher), *((_title(run.spec), run.student.to(device)) for run in runs)]
    return Maps(
        images=_pixels(shown, spec),
        blocks=tuple(block + 1 for block in chosen),
        names=tuple(name for name, _ in models),
        maps=tuple(tuple(_patch_map(model, shown, block) for block in chosen) for _, model in models),
        source=source.name,
    )


def shown_images(spec: RunSpec, n: int, data_root: Path) -> Tensor:
    """Of a run's test split as it evaluates them: n images [n, C, H, W], evenly spread over the split."""
    split = datasets.read(spec.dataset, "test", data_root)
    spread = Ranks(0, max(1, len(split) // n))  # a rank's share is every so manieth image
    batches = data.evaluation_batches(split, spec.dataset, spec.recipe, spec.size, ranks=spread)
    return torch.cat([images for images, _ in islice(batches, -(-n // spec.recipe.forward_size))])[:n]


@torch.inference_mode()
def _outputs(model: VisionTransformer, images: Tensor) -> Tensor:
    """What each block's attention gives out: [blocks, B, N, C]."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for block in model.blocks:
            hook = block.attn.register_forward_hook(lambda module, inputs, output: outputs.append(output.float()))
            hooks.callback(hook.remove)
        model.eval().forward_features(images)
    return torch.stack(outputs)


def _patch_map(model: VisionTransformer, images: Tensor, block: int) -> np.ndarray | None:
    """[B, h, w]: the mean over heads of what pooled queries attend to; None where the operator has no map."""
    try:
        attention = attention_map(model, images, block).mean(1)
    except MapError:
        return None
    prefix = model.num_prefix_tokens
    queries = attention[:, :1] if model.global_pool == "token" else attention[:, prefix:]
    return queries[:, :, prefix:].mean(1).unflatten(-1, model.patch_embed.grid_size).cpu().numpy()


def _indices(depth: int, blocks: Sequence[int] | None) -> list[int]:
    """Blocks from 0, each once."""
    for block in blocks or ():
        if not -depth <= block < depth:
            raise BlocksError(f"block {block} is none of the models'; allowed: {-depth} to {depth - 1}")
    return list(dict.fromkeys(block % depth for block in blocks or (0, depth // 2, depth - 1)))


def _check_alike(runs: Sequence[Opened]) -> None:
    first = runs[0]
    for run in runs:
        for what in ("dataset", "size"):
            if getattr(run.spec, what) != getattr(first.spec, what):
                raise BlocksError(f"{run.spec.name} and {first.spec.name} differ in {what}: draw them apart")
        if run.source != first.source:
            raise BlocksError(f"{run.spec.name} and {first.spec.name} differ in source: draw them apart")


def _title(spec: RunSpec) -> str:
    row = identity(spec)
    start = label(row["start"], row["distill"]).replace(" w/", "\nw/")
    return f"{VARIANTS.get(spec.variant.name, spec.variant.name)}\n{start}"


def _pixels(images: Tensor, spec: RunSpec) -> np.ndarray:
    """[n, H, W, C] from 0 to 1, of normalised images."""
    mean, std = torch.tensor([spec.dataset.mean, spec.dataset.std])[..., None, None]
    return (images.cpu() * std + mean).clamp(0, 1).movedim(1, -1).numpy()
