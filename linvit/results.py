"""Runs as a table: every run's `metrics.json` becomes one row of one tidy frame.

The names, orders and groupings that tables, figures and claims share are here too, so that all three speak
of the same initialisations. Nothing here imports torch.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from linvit import incomplete
from linvit.config import NO_SOURCE, Dataset, UserError, first_mistake, reason_of
from linvit.config.mistakes import shown
from linvit.files import is_whole, write_text
from linvit.grid import Evaluation, RunSpec
from linvit.report import are_default, identity, identity_of

logger = logging.getLogger(__name__)

MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
STARTS = {
    "random": "Random",
    "mimetic": "Mimetic",
    "impulse": "Impulse",
    "copy": "Copy",
    "mlpcopy": "MLPCopy",
    "fullcopy": "FullCopy",
    "fullcopy-notoken": "FullCopy minus class token",
    "fullcopy-notoken-nopos": "FullCopy minus class token, positions",
    "fullcopy-notoken-nopos-nopatch": "FullCopy minus class token, positions, patch embedding",
    "pretrained": "Pretrained",
}
"""What the weights start from, with display names, in the order of Tables A and G [arXiv:2609.35745]."""
VARIANTS = {"elu": "ELU", "relu": "ReLU", "inline": "InLine", "mhla": "MHLA", "ttt": "TTT", "softmax": "Softmax"}
DATASETS = {
    "imagenet": "ImageNet-1K",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "food101": "Food-101",
    "flowers102": "Flowers-102",
    "pets": "Oxford-IIIT Pets",
    "fashion-1k": "Fashion-1K",
    "fashion-mnist": "Fashion-MNIST",
    "imagenet-a": "ImageNet-A",
    "imagenet-r": "ImageNet-R",
    "imagenet-sketch": "ImageNet-Sketch",
    "imagenet-v2": "ImageNet-V2",
}
DTYPES = {
    "run": "str",
    "dataset": "str",
    "size": "str",
    "variant": "str",
    "init": "str",
    "start": "str",
    "distill": "bool",
    "distill_target": "str",
    "distill_weight": "float64",
    "source": "str",
    "recipe": "str",
    "seed": "int64",
    "top1": "float64",
    "top5": "float64",
    "best_top1": "float64",
    "best_epoch": "int64",
    "epochs": "int64",
    "parameters": "int64",
    "flops": "int64",
    "train_images_per_second": "float64",
    "eval_images_per_second": "float64",
    "wall_seconds": "float64",
    "peak_memory_bytes": "int64",
    "commit": "str",
}
"""The columns of a runs frame. Accuracies are in percent; `epochs` are all passes over the training images, 0 for a
run that is not trained."""
OOD_COLUMNS = (
    *("run", "dataset", "size", "variant", "init", "start", "distill", "distill_target", "source", "seed"),
    *("top1", "top5"),
)
OOD_DTYPES = {column: DTYPES[column] for column in OOD_COLUMNS} | {"images": "int64"}
"""The columns of a frame of evaluations out of distribution; `dataset` is the one evaluated on."""

HISTORY_DTYPES = {
    "run": "str",
    "epoch": "int64",
    "images": "float64",
    "lr": "float64",
    "loss": "float64",
    "task_loss": "float64",
    "distill_loss": "float64",
    "top1": "float64",
    "top5": "float64",
}
"""The columns of a history frame, a row an epoch: `images` are those trained on so far, missing where the data set does
not tell its size; `distill_loss` is weighted; accuracies are there for epochs that were evaluated."""

BLOCK_COLUMNS = (
    *("run", "dataset", "size", "variant", "init", "start", "distill", "distill_target", "source", "seed"),
    "parameters",
)
BLOCK_DTYPES = {column: DTYPES[column] for column in BLOCK_COLUMNS} | {
    "trained": "bool",
    "block": "int64",
    "error": "float64",
}
"""The columns of a frame of blocks' distillation errors, a row a block (from 1), before training and after it."""

RANGES = {
    **dict.fromkeys(("top1", "top5", "best_top1"), (0, 100)),
    **dict.fromkeys(("loss", "task_loss", "distill_loss"), (-np.inf, np.inf)),
}
"""Of numbers, which are all finite; those of other columns are from 0 on."""
FROM_ZERO = (0, np.inf)
ALLOWED = {"str": "text", "bool": "True or False", "int64": "a whole number (64 bits)", "float64": "a number"}
MAY_LACK = frozenset({"distill_target", "distill_weight", "train_images_per_second", "commit"})
"""Columns in which a value may be missing."""
SETTINGS = ("dataset", "size", "variant", "init", "source", "seed")
"""What makes a run another one than those beside it."""

Percent = Annotated[float, Field(ge=0, le=100)]


class ResultsError(UserError):
    """A metrics file or a table of runs that cannot be used; its text names the file and what is wrong."""


class DamagedError(ResultsError):
    """A file that is there, but is not what was written."""


class _Checked(BaseModel):
    # Keys that the frame does not need may come and go.
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


Read = TypeVar("Read", bound=_Checked)


class _Best(_Checked):
    epoch: NonNegativeInt
    top1: Percent


class _Epoch(_Checked):
    epoch: NonNegativeInt
    lr: NonNegativeFloat | None = None
    loss: float | None = None
    task_loss: float | None = None
    distill_loss: float | None = None
    top1: Percent | None = None
    top5: Percent | None = None


class _Metrics(_Checked):
    name: str
    spec: RunSpec
    top1: Percent
    top5: Percent
    best: _Best | None
    """None where no epoch was trained."""
    history: tuple[_Epoch, ...]
    alignment: tuple[_Epoch, ...] = ()
    parameters: NonNegativeInt
    flops: NonNegativeInt
    train_images_per_second: NonNegativeFloat | None
    eval_images_per_second: NonNegativeFloat
    wall_seconds: NonNegativeFloat
    peak_memory_bytes: NonNegativeInt
    commit: str | None


class _Evaluated(_Checked):
    run: RunSpec
    dataset: Dataset
    images: PositiveInt
    top1: Percent
    top5: Percent


def collect(paths: Iterable[str | Path], expected: Mapping[str, RunSpec] | None = None) -> pd.DataFrame:
    """Read metrics files into a frame with the columns of `DTYPES`, one row a run, sorted by name.

    Runs of different commits are warned of, not refused. Those whose files are damaged are left out and warned of;
    the frame tells which (`linvit.incomplete`).

    Args:
        expected: The runs there should be, by name; what was run with other settings is refused.

    Raises:
        ResultsError: a file is missing, of other settings, or two files hold the same run; or all are damaged.
    """
    return _runs_of(*_metrics_of(paths, expected))


def collect_history(paths: Iterable[str | Path], expected: Mapping[str, RunSpec] | None = None) -> pd.DataFrame:
    """Read the epochs of metrics files into a frame with the columns of `HISTORY_DTYPES`, sorted by run and epoch.

    Arguments and errors are those of `collect`; runs that were not trained have no rows.
    """
    return _history_of(*_metrics_of(paths, expected))


def collect_with_history(
    paths: Iterable[str | Path], expected: Mapping[str, RunSpec] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What `collect` and `collect_history` give, of files that are read, and warned of, once."""
    found, left_out = _metrics_of(paths, expected)
    return _runs_of(found, left_out), _history_of(found, left_out)


def collect_ood(paths: Iterable[str | Path], expected: Mapping[str, Evaluation] | None = None) -> pd.DataFrame:
    """Read evaluations out of distribution into a frame with the columns of `OOD_DTYPES`, sorted by data set and run.

    Damaged ones are left out as by `collect`.

    Args:
        expected: The evaluations there should be, by name; what was evaluated with other settings is refused.

    Raises:
        ResultsError: a file is missing, of other settings, or two files hold the same one; or all are damaged.
    """
    rows: dict[str, dict] = {}
    usable, left_out = _usable(paths, _read_evaluated, lambda path: path.with_suffix("").parts[-8:])
    for path, found in usable:
        evaluation = Evaluation(run=found.run, dataset=found.dataset)
        if evaluation.name in rows:
            raise ResultsError(f"{path}: {evaluation.name!r} is there twice")
        if expected is not None and evaluation != expected.get(evaluation.name):
            raise ResultsError(f"{path}: is of other settings than the configuration's; delete it to evaluate again")
        rows[evaluation.name] = identity_of(evaluation) | found.model_dump(include={"images", "top1", "top5"})
    if not rows:
        raise ResultsError("nothing out of distribution to collect: no block of the grid has the key ood")
    frame = pd.DataFrame(list(rows.values()), columns=list(OOD_DTYPES)).astype(OOD_DTYPES)
    return incomplete.mark(frame.sort_values(["dataset", "run"], ignore_index=True), left_out)


def read_runs(csv: str | Path) -> pd.DataFrame:
    """Read a frame of `collect` that `write_runs` wrote.

    Raises:
        ResultsError: as of `read_frame`.
    """
    return read_frame(csv, DTYPES, ("run",), SETTINGS)


def read_history(csv: str | Path) -> pd.DataFrame:
    """Like `read_runs`, a frame of `collect_history`."""
    return read_frame(csv, HISTORY_DTYPES, ("run", "epoch"), may_lack=HISTORY_DTYPES.keys() - {"run", "epoch"})


def read_ood(csv: str | Path) -> pd.DataFrame:
    """Like `read_runs`, a frame of `collect_ood`."""
    return read_frame(csv, OOD_DTYPES, ("run", "dataset"), SETTINGS)


def read_frame(
    csv: str | Path, dtypes: Mapping[str, str], *keys: Sequence[str], may_lack: Collection[str] = MAY_LACK
) -> pd.DataFrame:
    """Read a frame with these columns that `write_runs` wrote, and a person may have edited.

    Args:
        keys: Columns whose values are no two rows' together; the first ones name a row, too.
        may_lack: Columns in which a value may be missing.

    Raises:
        ResultsError: the file cannot be read, a column is missing or there twice, a value is none of its column's, or
            two rows are the same.
    """
    try:
        frame = incomplete.read_csv(csv, dict.fromkeys((name for name in dtypes if dtypes[name] == "str"), "str"))
    except OSError as error:
        raise ResultsError(f"{csv}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ResultsError(f"{csv}: not a table of runs: {_why_none(error)}") from None
    if missing := [column for column in dtypes if column not in frame]:
        raise ResultsError(f"{csv}: missing columns: {', '.join(missing)}")
    if twice := [column for column in dtypes if f"{column}.1" in frame]:  # as pandas names the second one
        raise ResultsError(f"{csv}: columns that are there twice: {', '.join(twice)}")
    if wrong := _first_wrong(frame, dtypes, may_lack) or _first_repeated(frame, keys):
        row, why = wrong
        raise ResultsError(f"{csv}: {_named(row, frame[list(keys[0])].loc[row])}: {why}")
    return frame[list(dtypes)].astype(dtypes)


def _first_wrong(frame: pd.DataFrame, dtypes: Mapping[str, str], may_lack: Collection[str]) -> tuple[int, str] | None:
    """The first row with a value that is none of its column's, and which one."""
    for column, dtype in dtypes.items():
        right = _are_right(frame[column], dtype) | (frame[column].isna() & (column in may_lack))
        for row in frame.index[~right][:1]:
            (value,) = frame.loc[[row], column].tolist()
            found = "nothing" if pd.isna(value) else shown(value)
            return row, f"{column}: found {found}; allowed: {_allowed(column, dtype)}"
    return None


def _first_repeated(frame: pd.DataFrame, keys: Iterable[Sequence[str]]) -> tuple[int, str] | None:
    for key in keys:
        for row in frame.index[frame.duplicated(list(key))][:1]:
            return row, f"another row has the same {', '.join(key)}; allowed: one"
    return None


def _are_right(values: pd.Series, dtype: str) -> pd.Series:
    """Which are of the column's type and in its range; they are as pandas reads what it is told no type of."""
    if dtype == "str":
        return values.notna()
    if dtype == "bool":
        return values.astype(str).isin(("True", "False"))
    # Integers that no type holds stay Python's, and are more than a float can be.
    numbers = pd.to_numeric(values.astype(str) if values.dtype == object else values, errors="coerce")
    low, high = RANGES.get(str(values.name), FROM_ZERO)
    in_range = np.isfinite(numbers) & numbers.between(low, high)
    return in_range & (numbers % 1 == 0) & (numbers <= np.iinfo(dtype).max) if dtype == "int64" else in_range


def _allowed(column: str, dtype: str) -> str:
    low, high = RANGES.get(column, FROM_ZERO) if dtype in ("int64", "float64") else (-np.inf, np.inf)
    bounds = [f"{word} {bound}" for word, bound in (("from", low), ("to", high)) if np.isfinite(bound)]
    return " ".join((ALLOWED[dtype], *bounds))


def _named(row: int, key: pd.Series) -> str:
    """A row by its run and what else tells it from others: `pets/tiny/relu/copy/deit/seed0, epoch 3`."""
    if key.isna().any():
        return f"row {row + 1}"
    run, *others = (text if (text := str(value)).isprintable() else shown(text) for value in key)
    return ", ".join((run, *(f"{column} {value}" for column, value in zip(key.index[1:], others, strict=True))))


def _why_none(error: ValueError) -> str:
    """What is wrong with a table, where pandas says it in words of its own."""
    if isinstance(error, pd.errors.EmptyDataError):
        return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    return reason_of(error)


def write_runs(runs: pd.DataFrame, csv: str | Path) -> None:
    """Write a frame of `collect`, `collect_history` or `collect_ood`; what it lacks has rows of its own at the end."""
    write_text(csv, incomplete.to_csv(runs))


def label(start: str, distill: bool = False) -> str:
    """An initialisation's display name, such as `MLPCopy w/ Distill`."""
    return STARTS.get(start, start) + (" w/ Distill" if distill else "")


def signed(value: float, digits: int) -> str:
    """A difference with its sign."""
    # Adding zero turns a rounded -0.0 into 0.0.
    return MISSING if np.isnan(value) else f"{round(value, digits) + 0:+.{digits}f}".replace("-", MINUS)


def in_order(values: Iterable[str], known: Iterable[str]) -> list[str]:
    """Distinct values: the known ones in their order, then the others as they appear."""
    found = list(dict.fromkeys(values))
    known = [value for value in known if value in found]
    return known + [value for value in found if value not in known]


def sizes_in_order(runs: pd.DataFrame) -> list[str]:
    """Model sizes, from the fewest parameters to the most."""
    return list(runs.groupby("size")["parameters"].median().sort_values().index)


def default_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs without the loss ablation's, as `linvit.report.are_default` tells them."""
    return runs[pd.Series(are_default(runs.to_dict("records")), runs.index, dtype=bool)]


def references(runs: pd.DataFrame) -> pd.DataFrame:
    """The Softmax reference of each data set, size and source: the source itself where it was evaluated with
    its own head, else the fine-tuned one [arXiv:2609.35745, Sec. 4]."""
    is_reference = (runs["variant"] == "softmax") & runs["start"].isin(["fullcopy", "pretrained"]) & ~runs["distill"]
    found = runs[is_reference]
    own_head = found["start"] == "pretrained"
    has_own_head = own_head.groupby([found[key] for key in ("dataset", "size", "source")]).transform("any")
    return found[own_head | ~has_own_head.astype(bool)]


def beside_sources(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that use no source, repeated beside each source of their data set and size; the order is kept."""
    cell = ["dataset", "size"]
    sources = frame.loc[frame["source"] != NO_SOURCE, [*cell, "source"]].drop_duplicates()
    beside = frame.merge(sources, on=cell, how="left", suffixes=("", "_beside"))
    source = beside.pop("source_beside").fillna(NO_SOURCE)
    kept = beside["source"].isin([NO_SOURCE]) | (beside["source"] == source)
    return beside.assign(source=source)[kept].reset_index(drop=True)


def _usable(
    paths: Iterable[str | Path], read: Callable[[Path], Read], name_of: Callable[[Path], Sequence[str]]
) -> tuple[list[tuple[Path, Read]], dict[str, str]]:
    """What files hold, each with its path; and why others cannot be used, by the names that their places give them."""
    found, left_out = [], {}
    for path in map(Path, paths):
        try:
            found.append((path, read(path)))
        except DamagedError as error:
            left_out["/".join(name_of(path))] = str(error)
    if left_out and not found:
        first, *others = left_out.values()
        more = f" (and {len(others):,} more, so that none is left)" if others else ""
        raise ResultsError(f"{first}{more}; deleted, {'they are' if others else 'it is'} made again")
    incomplete.warn(left_out, of=len(found) + len(left_out))
    return found, left_out


def _read(path: Path, kind: type[Read]) -> Read:
    try:
        content = path.read_bytes()
        found = kind.model_validate_json(content)
    except FileNotFoundError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise DamagedError(f"{path}: {first_mistake(error, kind)}") from None
    if not is_whole(content):
        raise DamagedError(f"{path}: its values are not those that were written (sha256)")
    return found


def _read_evaluated(path: Path) -> _Evaluated:
    return _read(path, _Evaluated)


def _read_metrics(path: Path) -> _Metrics:
    metrics = _read(path, _Metrics)
    spec = metrics.spec
    if metrics.name != spec.name:
        raise DamagedError(f"{path}: name {metrics.name!r} is not its spec's, {spec.name!r}")
    epochs = metrics.history[-1].epoch if metrics.history else 0
    if spec.init.train and epochs != spec.recipe.epochs:
        raise DamagedError(f"{path}: history ends at epoch {epochs} of {spec.recipe.epochs}")
    return metrics


def _metrics_of(
    paths: Iterable[str | Path], expected: Mapping[str, RunSpec] | None
) -> tuple[list[_Metrics], dict[str, str]]:
    """What metrics files hold, each run once; and why others cannot be used, by run."""
    found, left_out = _usable(paths, _read_metrics, lambda path: path.parent.parts[-6:])
    read: dict[str, Path] = {}
    for path, metrics in found:
        if metrics.name in read:
            raise ResultsError(f"{path}: run {metrics.name!r} is already in {read[metrics.name]}")
        if expected is not None and metrics.spec != expected.get(metrics.name):
            raise ResultsError(f"{path}: was run with other settings than the configuration's; delete it to run again")
        read[metrics.name] = path
    if not read:
        raise ResultsError("no metrics files to collect")
    return [metrics for _, metrics in found], left_out


def _runs_of(found: Sequence[_Metrics], left_out: Mapping[str, str]) -> pd.DataFrame:
    runs = pd.DataFrame([_row(metrics) for metrics in found], columns=list(DTYPES)).astype(DTYPES)
    _warn_of_commits(runs)
    return incomplete.mark(runs.sort_values("run", ignore_index=True), left_out)


def _history_of(found: Sequence[_Metrics], left_out: Mapping[str, str]) -> pd.DataFrame:
    rows = [(metrics.name, *row) for metrics in found for row in _epochs(metrics)]
    history = pd.DataFrame(rows, columns=list(HISTORY_DTYPES)).astype(HISTORY_DTYPES)
    return incomplete.mark(history.sort_values(["run", "epoch"], ignore_index=True), left_out)


def _epochs(metrics: _Metrics) -> Iterator[tuple]:
    """The columns of a history frame after the first; epochs of alignment, whose loss is another, only count."""
    size = metrics.spec.dataset.train_size
    for epoch in metrics.history:
        number = len(metrics.alignment) + epoch.epoch
        images = number * size if size else None
        yield (number, images, *(getattr(epoch, column) for column in list(HISTORY_DTYPES)[3:]))


def _row(metrics: _Metrics) -> dict:
    spec = metrics.spec
    return {
        **identity(spec),
        "best_top1": metrics.best.top1 if metrics.best else metrics.top1,
        "best_epoch": len(metrics.alignment) + metrics.best.epoch if metrics.best else 0,
        "epochs": spec.recipe.passes if spec.init.train else 0,
        **metrics.model_dump(exclude={"name", "spec", "best", "history", "alignment"}),
    }


def _warn_of_commits(runs: pd.DataFrame) -> None:
    counts = runs["commit"].fillna("unknown").value_counts(sort=False)
    if len(counts) > 1:
        logger.warning(
            "runs come from different commits: %s", ", ".join(f"{commit} ({n})" for commit, n in counts.items())
        )
