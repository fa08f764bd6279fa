"""Accuracies as tables, long as CSV, laid out as Markdown, HTML and LaTeX.

`top1` shows all of a grid's runs, mean ± standard deviation over seeds; the others are the paper's tables, ours
beside the printed numbers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from linvit import incomplete, page
from linvit.files import write_text
from linvit.published import Table, tables
from linvit.report import printed_tables, title_of
from linvit.results import (
    DATASETS,
    MINUS,
    MISSING,
    NO_SOURCE,
    STARTS,
    VARIANTS,
    beside_sources,
    default_runs,
    in_order,
    label,
    references,
    signed,
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
    orders: dict[str, list] = {
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


def compare(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Ours beside the paper's, one row a printed number.

    Columns: row, column; mean, std (the sample's, NaN for one run) and n of the runs that are there, of `runs` that
    the paper has; paper, paper_std; difference (ours minus the paper's). Accuracies are in percent.
    """
    records = runs.to_dict("records")
    rows = []
    for cell in table.cells():
        top1 = pd.Series([run["top1"] for run in records if cell.runs.match(run)], dtype=float)
        ours = {"mean": top1.mean(), "std": top1.std(), "n": len(top1), "runs": cell.runs.seeds}
        paper = {"paper": cell.value, "paper_std": cell.std, "difference": top1.mean() - cell.value}
        rows.append({"row": cell.row, "column": cell.column, **ours, **paper})
    return pd.DataFrame(rows).astype({"paper_std": float})


def write_tables(runs: pd.DataFrame, folder: str | Path, ood: pd.DataFrame | None = None) -> list[str]:
    """Write `top1` and those of the paper's tables that the runs can fill, as csv, Markdown, HTML and LaTeX; and
    `runs.html`, a line per run.

    Where results are left out, the csv files have a column `left_out` with their number, the same in every row.

    Args:
        ood: Out-of-distribution results, which Table 2 is made of.

    Returns:
        The names of the tables.
    """
    left_out = incomplete.left_out(runs)
    page.write(Path(folder) / "runs.html", _all_runs(runs))
    summary = summarise(runs)
    _write(Path(folder) / "top1", summary, [*_sections(summary)], left_out, "# Top-1 accuracy (%)\n")
    runs = default_runs(runs)
    if ood is not None:
        left_out |= incomplete.left_out(ood)
        runs = pd.concat([runs, default_runs(ood)])
    printed = printed_tables(runs.to_dict("records"))
    for name in printed:
        table = tables()[name]
        numbers = compare(table, runs)
        _write(Path(folder) / name, numbers, [_beside_the_paper(name, table, numbers)], left_out)
    return ["top1", *printed]


def _write(
    path: Path, numbers: pd.DataFrame, sections: list["_Section"], left_out: Mapping[str, str], *heading: str
) -> None:
    told = numbers.assign(**{incomplete.COLUMN: len(left_out)}) if left_out else numbers
    write_text(path.with_suffix(".csv"), told.to_csv(index=False, lineterminator="\n"))
    sections = [replace(section, left_out=incomplete.in_short(left_out)) for section in sections]
    note = incomplete.note(left_out)
    text = "\n".join([*heading, *([note] if note else []), *map(_markdown, sections)])
    for suffix in (".md", ".html"):
        page.write(path.with_suffix(suffix), text)
    write_text(path.with_suffix(".tex"), "\n".join(["% Needs \\usepackage{booktabs}.", *map(_latex, sections)]))


def _all_runs(runs: pd.DataFrame) -> str:
    shown = pd.DataFrame(
        {
            "run": runs["run"],
            "top-1 (%)": runs["top1"].map("{:.2f}".format),
            "top-5 (%)": runs["top5"].map("{:.2f}".format),
            "epochs": runs["epochs"].astype(str),
            "parameters (M)": (runs["parameters"] / 1e6).map("{:.2f}".format),
            "GFLOPs": (runs["flops"] / 1e9).map("{:.3g}".format),
            "hours": (runs["wall_seconds"] / 3600).map("{:.2f}".format),
            "peak memory (GB)": (runs["peak_memory_bytes"] / 1e9).map("{:.2f}".format),
            "commit": runs["commit"].fillna("unknown"),
        }
    )
    alignment = ["left", *["right"] * (shown.shape[1] - 2), "left"]
    table = shown.to_markdown(index=False, disable_numparse=True, colalign=alignment)
    left_out = incomplete.left_out(runs)
    note = incomplete.note(left_out, named=len(left_out))
    return f"# All runs\n\n{len(runs):,} runs; accuracies are the last epoch's.\n\n{note}{table}\n"


@dataclass(frozen=True)
class _Section:
    """One table as it is printed."""

    name: str
    title: str
    caption: str
    """The title where there is no heading above it, as in LaTeX."""
    note: str
    table: pd.DataFrame
    """Cells as text."""
    text_columns: int = 1
    """The first ones, which are aligned to the left."""
    left_out: str = ""
    """That some results are, if so."""


def _sections(summary: pd.DataFrame) -> Iterator[_Section]:
    """One for each data set, size and source: a row per initialisation, a column per variant."""
    beside = beside_sources(summary)
    for (dataset, size, source), cells in beside.groupby(["dataset", "size", "source"], sort=False):
        reference = references(cells).head(1)
        rows = cells.drop(reference.index) if len(cells) > len(reference) else cells
        names = [DATASETS.get(dataset, dataset), size] + ([f"source {source}"] if source != NO_SOURCE else [])
        title, note = ", ".join(names), f"{_reference_note(reference)} {_seeds_note(rows)}"
        yield _Section(f"top1-{title}", title, f"Top-1 accuracy (%), {title}", note, _layout(rows))


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


def _row_label(row: Any) -> str:
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


def _beside_the_paper(name: str, table: Table, numbers: pd.DataFrame) -> _Section:
    """Three lines a row: ours, the paper's, the difference."""
    texts = {(cell.row, cell.column): _three_lines(cell) for cell in numbers.itertuples()}
    lines = [
        {"": row if i == 0 else "", " ": line}
        | {column: texts.get((row, column), ("",) * 3)[i] for column in table.columns}
        for row in table.rows
        for i, line in enumerate(("ours", "paper", "difference"))
    ]
    there, all_runs = numbers[["n", "runs"]].min(axis=1).sum(), numbers["runs"].sum()
    missing = f"; {all_runs - there} are missing" if there < all_runs else ""
    title = f"{title_of(name)}: {table.title}"
    what = (
        f"{table.what}: ours, the paper's [arXiv:2609.35745] and the difference; mean ± standard deviation over seeds."
    )
    note = f"{what} {there} of {all_runs} runs are there{missing}."
    return _Section(name, title, title, note, pd.DataFrame(lines), text_columns=2)


def _three_lines(cell: Any) -> tuple[str, str, str]:
    ours = _cell(cell.mean, cell.std) if cell.n else MISSING
    lacks = f" ({cell.n} of {cell.runs} runs)" if cell.n < cell.runs else ""
    return ours + lacks, _cell(cell.paper, cell.paper_std), signed(cell.difference, 1)


def _markdown(section: _Section) -> str:
    alignment = ["left"] * section.text_columns + ["right"] * (section.table.shape[1] - section.text_columns)
    table = section.table.to_markdown(index=False, disable_numparse=True, colalign=alignment)
    return f"## {section.title}\n\n{section.note}\n\n{table}\n"


def _latex(section: _Section) -> str:
    """A booktabs table; n and the reference stand in its caption."""
    text_columns = section.text_columns
    table = section.table.to_latex(
        index=False,
        escape=True,
        column_format="l" * text_columns + "r" * (section.table.shape[1] - text_columns),
        caption=_escaped(f"{section.caption}. {section.note} {section.left_out}".rstrip()),
        label="tab:" + re.sub(r"[^a-z0-9]+", "-", section.name.lower()),
        position="htbp",
    )
    return table.replace("±", r"$\pm$").replace(MINUS, "$-$").replace(MISSING, "--")


def _escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
