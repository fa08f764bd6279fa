"""Top-1 accuracy as tables: mean ± standard deviation over seeds, long as CSV, laid out as Markdown and LaTeX."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from linvit.files import write_text
from linvit.results import (
    DATASETS,
    MISSING,
    NO_SOURCE,
    STARTS,
    VARIANTS,
    beside_sources,
    in_order,
    label,
    references,
    sizes_in_order,
)

KEYS = ["dataset", "size", "source", "variant", "init", "start", "distill", "distill_target", "distill_weight"]


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """Top-1 over the seeds of each cell, in percent: the columns of `KEYS`, then mean, std and n.

    `std` is the sample's (n - 1 in the denominator), NaN for one seed. Initialisations are kept apart by name,
    so that the loss ablation never mixes with the default distillation.
    """
    top1 = runs.groupby(KEYS, dropna=False)["top1"].agg(["mean", "std", "count"]).reset_index()
    top1 = top1.rename(columns={"count": "n"})
    orders = {
        "dataset": in_order(runs["dataset"], DATASETS),
        "size": sizes_in_order(runs),
        "distill": [False, True],
        "start": in_order(runs["start"], STARTS),
        "variant": in_order(runs["variant"], VARIANTS),
    }
    ranks = {f"{key}_rank": top1[key].map(order.index).astype(int) for key, order in orders.items()}
    ranks["ablation_rank"] = ~_is_named_after_its_start(top1)
    # Sources come after initialisations, so that rows without a source keep their place beside each source.
    by = ["dataset_rank", "size_rank", "ablation_rank", "distill_rank", "start_rank"]
    by += ["distill_target", "distill_weight", "init", "source", "variant_rank"]
    return top1.assign(**ranks).sort_values(by, ignore_index=True)[[*KEYS, "mean", "std", "n"]]


def write_tables(runs: pd.DataFrame, folder: str | Path) -> None:
    """Write `top1.csv`, `top1.md` and `top1.tex` into a folder."""
    summary = summarise(runs)
    sections = list(_sections(summary))
    write_text(Path(folder) / "top1.csv", summary.to_csv(index=False, lineterminator="\n"))
    write_text(Path(folder) / "top1.md", "\n".join(["# Top-1 accuracy (%)\n", *map(_markdown, sections)]))
    write_text(Path(folder) / "top1.tex", "\n".join(["% Needs \\usepackage{booktabs}.", *map(_latex, sections)]))


@dataclass(frozen=True)
class _Section:
    """One data set, size and source."""

    title: str
    note: str
    table: pd.DataFrame
    """Cells as text: a row per initialisation, a column per variant."""


def _sections(summary: pd.DataFrame) -> Iterator[_Section]:
    beside = beside_sources(summary)
    for (dataset, size, source), cells in beside.groupby(["dataset", "size", "source"], sort=False):
        reference = references(cells).head(1)
        rows = cells.drop(reference.index) if len(cells) > len(reference) else cells
        names = [DATASETS.get(dataset, dataset), size] + ([f"source {source}"] if source != NO_SOURCE else [])
        yield _Section(", ".join(names), f"{_reference_note(reference)} {_seeds_note(rows)}", _layout(rows))


def _layout(rows: pd.DataFrame) -> pd.DataFrame:
    """A section's cells as text, with n in each where it is not the same in all."""
    is_uniform = len(set(rows["n"])) == 1
    text = [_cell(row.mean, row.std, None if is_uniform else row.n) for row in rows[["mean", "std", "n"]].itertuples()]
    named = rows.assign(text=text, row=[_row_label(row) for row in rows.itertuples()])
    wide = named.pivot_table("text", "row", "variant", aggfunc="first").fillna(MISSING)
    wide = wide.reindex(index=named["row"].unique(), columns=in_order(named["variant"], VARIANTS))
    wide.columns = [VARIANTS.get(variant, variant) for variant in wide]
    return wide.rename_axis("Initialisation").reset_index()


def _cell(mean: float, std: float, n: int | None = None) -> str:
    spread = "" if pd.isna(std) else f" ± {std:.1f}"
    return f"{mean:.1f}{spread}" + (f" (n = {n})" if n else "")


def _row_label(row: tuple) -> str:
    is_default = row.init in (row.start, f"{row.start}-distill")
    return label(row.start, row.distill) if is_default else row.init


def _is_named_after_its_start(cells: pd.DataFrame) -> pd.Series:
    return (cells["init"] == cells["start"]) | (cells["init"] == cells["start"] + "-distill")


def _reference_note(reference: pd.DataFrame) -> str:
    if reference.empty:
        return "Softmax reference: not run."
    row = reference.iloc[0]
    return f"Softmax reference ({label(row['start'])}): {_cell(row['mean'], row['std'], row['n'])}."


def _seeds_note(rows: pd.DataFrame) -> str:
    counts = sorted(rows["n"].unique())
    if counts == [1]:
        return "One seed (n = 1), so no standard deviation."
    return "Mean ± standard deviation over " + (f"n = {counts[0]} seeds." if len(counts) == 1 else "n seeds.")


def _markdown(section: _Section) -> str:
    table = section.table.to_markdown(
        index=False, disable_numparse=True, colalign=["left"] + ["right"] * (section.table.shape[1] - 1)
    )
    return f"## {section.title}\n\n{section.note}\n\n{table}\n"


def _latex(section: _Section) -> str:
    """A booktabs table; n and the reference stand in its caption."""
    table = section.table.to_latex(
        index=False,
        escape=True,
        column_format="l" + "r" * (section.table.shape[1] - 1),
        caption=_escaped(f"Top-1 accuracy (%), {section.title}. {section.note}"),
        label="tab:top1-" + re.sub(r"[^a-z0-9]+", "-", section.title.lower()),
        position="htbp",
    )
    return table.replace("±", r"$\pm$").replace(MISSING, "--")


def _escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
