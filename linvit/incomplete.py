"""Results that are left out of a table because their files are damaged: told wherever the table is shown.

They go with a frame (`frame.attrs`) and its file: rows at its end that have no more than a name and a reason.
"""

import io
import logging
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

logger = logging.getLogger(__name__)

COLUMN = "left_out"
"""Of a table's file: why there is no result; empty where there is one."""
NAMED = 10
"""So many are named one by one, where the table itself names all."""


def left_out(*frames: pd.DataFrame | None) -> dict[str, str]:
    """Results that the frames lack, by name, and why: the file and what is wrong with it."""
    return {name: why for frame in frames if frame is not None for name, why in frame.attrs.get(COLUMN, {}).items()}


def mark(frame: pd.DataFrame, left_out: Mapping[str, str]) -> pd.DataFrame:
    """The frame, with what it lacks."""
    frame.attrs[COLUMN] = dict(left_out)
    return frame


def warn(left_out: Mapping[str, str], of: int) -> None:
    """Log what is left out of so many results, one by one up to a number."""
    if left_out:
        logger.warning("%d of %d results are LEFT OUT, their files being damaged:", len(left_out), of)
    for line in _listed(left_out, NAMED):
        logger.warning("%s", line)


def in_short(left_out: Mapping[str, str]) -> str:
    """A sentence for captions; empty where nothing is left out."""
    if not left_out:
        return ""
    n = len(left_out)
    return f"INCOMPLETE: {n:,} result{'s are' if n > 1 else ' is'} left out, damaged on disk."


def note(left_out: Mapping[str, str], named: int = NAMED) -> str:
    """A paragraph of Markdown and a list; empty where nothing is left out."""
    if not left_out:
        return ""
    items = "\n".join(f"- {line}" for line in _listed(left_out, named))
    return f"**{in_short(left_out)}** Delete these files, and Snakemake makes them again.\n\n{items}\n\n"


def to_csv(frame: pd.DataFrame) -> str:
    """A table's file."""
    rows = pd.DataFrame({"run": left_out(frame).keys(), COLUMN: left_out(frame).values()})
    whole = frame.assign(**{COLUMN: ""})
    lines = rows.reindex(columns=whole.columns).to_csv(index=False, header=False, lineterminator="\n")
    return whole.to_csv(index=False, lineterminator="\n") + (lines if len(rows) else "")


def read_csv(path: str | Path, dtypes: Mapping[str, str]) -> pd.DataFrame:
    """What `to_csv` gave; a file without its last column lacks nothing. Other columns are of what types pandas finds.

    Raises:
        OSError, ValueError: as of `pandas.read_csv`.
    """
    text = Path(path).read_text(encoding="utf-8")
    options = {"keep_default_na": False, "na_values": [""], "low_memory": False}
    # Blank lines count, as they do for what is to be skipped.
    told = {"usecols": lambda column: column in ("run", COLUMN), "dtype": str, "skip_blank_lines": False}
    names = pd.read_csv(io.StringIO(text), **told, **options)
    rows = names[names[COLUMN].notna()] if {"run", COLUMN} <= set(names) else names.head(0)
    frame = pd.read_csv(io.StringIO(text), dtype=dtypes, skiprows=[row + 1 for row in rows.index], **options)
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the first cells for names of rows
        raise ValueError("rows have more cells than there are columns")
    return mark(frame, dict(zip(rows["run"], rows[COLUMN], strict=True)) if len(rows) else {})


def _listed(left_out: Mapping[str, str], named: int) -> list[str]:
    lines = list(left_out.values())
    return lines[:named] + ([f"and {len(lines) - named:,} more, named in the table of runs"] if lines[named:] else [])
