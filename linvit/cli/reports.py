"""Tables, figures and claims from finished runs, without the workflow."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linvit.cli.command import Command, add_grid, add_out
from linvit.config import ConfigError, load_study
from linvit.grid import evaluations, expand
from linvit.report import SECTIONS, figures_in, history_figures_in, need_of, title_of

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Found:
    """What a report is made of."""

    runs: "DataFrame"
    history: "DataFrame | None"
    """Of their epochs, where their metrics are there."""
    ood: "DataFrame | None"
    """Evaluations out of distribution."""
    told: str
    """Of what, in words."""


def report(options: argparse.Namespace) -> None:
    """Write the tables, figures and claims that finished runs fill.

    RUNS is a folder of runs or a table of them (csv); by default the finished runs of a grid. What they cannot fill is
    told with what it needs. Nothing is trained or evaluated.
    """
    from linvit import incomplete, results

    found = _of_grid(options) if options.runs is None else _of_path(options.runs)
    results.write_runs(found.runs, options.out / "runs.csv")
    for name, table in (("history", found.history), ("ood", found.ood)):
        if table is not None:
            results.write_runs(table, options.out / f"{name}.csv")
    written = [*_tables(found, options.out), *_figures(found, options.out)]
    untestable = _claims(found, options.out)
    print(f"{options.out}: {found.told}")
    if left_out := incomplete.left_out(found.runs, found.ood):
        print(incomplete.in_short(left_out))
    print(f"written: {', '.join(['runs', *written, 'claims'])}")
    for name in SECTIONS:
        if name not in written:
            print(f"not filled: {title_of(name)}, which needs {need_of(name)}")
    if untestable:
        print(f"not testable on these runs, as claims.md tells: {', '.join(untestable)}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS", nargs="?", type=Path, help="a folder of runs, or a table of them (csv)")
    add_grid(parser)
    add_out(parser, "the folder to write; default: report", default=Path("report"))


def _of_grid(options: argparse.Namespace) -> Found:
    from linvit import results

    study = load_study(options.config)
    grid, folder = options.grid or study.grid, Path(study.results) / "runs"
    runs, evaluated = expand(study, grid), evaluations(study, grid)
    metrics = _existing(folder / name / "metrics.json" for name in runs)
    if not metrics:
        raise ConfigError(
            f"grid {grid!r} has no finished runs under {folder}; "
            f"snakemake --profile workflow/profiles/local --config grid={grid} makes them"
        )
    ood = _existing(folder / f"{name}.json" for name in evaluated)
    found, history = results.collect_with_history(metrics, runs)
    told = f"{len(found):,} of the {len(runs):,} runs of grid {grid}"
    return Found(found, history, results.collect_ood(ood, evaluated) if ood else None, told)


def _of_path(path: Path) -> Found:
    from linvit import results

    if path.is_file():
        runs, epochs, beside = results.read_runs(path), path.with_name("history.csv"), path.with_name("ood.csv")
        return Found(
            runs,
            results.read_history(epochs) if epochs.exists() else None,
            results.read_ood(beside) if beside.exists() else None,
            f"{len(runs):,} runs of {path}",
        )
    metrics, ood = sorted(path.rglob("metrics.json")), sorted(path.rglob("ood/*.json"))
    if not metrics:
        raise ConfigError(f"{path}: no finished runs there, which metrics.json tells of; allowed: such as results/runs")
    runs, history = results.collect_with_history(metrics)
    return Found(runs, history, results.collect_ood(ood) if ood else None, f"{len(runs):,} runs of {path}")


def _existing(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]


def _tables(found: Found, out: Path) -> list[str]:
    from linvit.tables import write_tables

    return write_tables(found.runs, out, found.ood)


def _figures(found: Found, out: Path) -> list[str]:
    from linvit.figures import FIGURES, HISTORY_FIGURES, save

    rows = found.runs.to_dict("records")
    pictures = {name: FIGURES[name](found.runs) for name in figures_in(rows)}
    if found.history is not None:
        trained = [row for row in rows if row["epochs"]]
        pictures |= {name: HISTORY_FIGURES[name](found.runs, found.history) for name in history_figures_in(trained)}
    for name, drawn in pictures.items():
        for suffix in ("png", "pdf"):
            save(drawn, out / f"{name}.{suffix}")
    return list(pictures)


def _claims(found: Found, out: Path) -> list[str]:
    """The names of those that these runs cannot test."""
    from linvit import page
    from linvit.claims import claims_text, judge
    from linvit.evidence import Verdict

    judgements = judge(found.runs, found.ood)
    for suffix in ("md", "html"):
        page.write(out / f"claims.{suffix}", claims_text(found.runs, found.ood, judgements))
    return [judgement.claim.name for judgement in judgements if judgement.verdict == Verdict.UNTESTABLE]


COMMANDS = (Command(report, _arguments, "linvit report --grid mini --out report"),)
