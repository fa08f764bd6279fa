"""The workflow on the paper's whole grid: what a plan costs beside a bare Snakefile, and a report of cached runs.

No run is made: metrics files hold made-up accuracies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from tabulate import tabulate

from linvit.config import Study, load_study
from linvit.grid import evaluations, expand, sources_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import plausible, write_evaluation, write_metrics
from timing import circumstances, described, write

ROOT = Path(__file__).parents[2]
MAX_RATIO, MAX_MIB, MAX_REPORT_SECONDS, MAX_FIGURE_SECONDS = 3.0, 500, 60, 15
BARE = """
rule all:
    input:
        expand("done/{{job}}", job=range({jobs})),


rule job:
    output:
        "done/{{job}}",
    shell:
        "touch {{output}}"
"""


@dataclass(frozen=True)
class Call:
    """One call of Snakemake: the jobs that it planned or made, its seconds, and the most memory that it had."""

    what: str
    jobs: int
    seconds: float
    mib: float


def snakemake(what: str, folder: Path, *options: str) -> Call:
    """Call Snakemake in a folder.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    log = folder / "snakemake.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "workflow/executor")])}
    start = time.perf_counter()
    with log.open("w") as out:
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *options]
        process = psutil.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        # Not what `wait4` tells: that begins with the memory of this process, which has torch in it.
        most = 0
        while process.poll() is None:
            most = max(most, process.memory_info().rss)
            time.sleep(0.05)
    seconds, said = time.perf_counter() - start, log.read_text()
    if process.returncode:
        raise RuntimeError(f"{what}: Snakemake failed\n{said[-2000:]}")
    total = re.search(r"^total +(\d+)$", said, re.MULTILINE)
    return Call(what, int(total[1]) if total else 0, seconds, most / 2**20)


def copy_workflow(folder: Path) -> Study:
    """What the workflow consists of, in a folder without results."""
    for name in ("linvit", "workflow", "envs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, folder)
    return load_study(folder / "config.yaml")


def cache(study: Study, grid: str, folder: Path) -> int:
    """Everything that comes before a grid's report, as if it had been made; returns the number of its runs."""
    runs, results = expand(study, grid), folder / study.results
    manifests = [results / "data" / f"{name}.json" for name in study.datasets]
    manifests += [results / "sources" / source.folder / "source.json" for source in sources_of(study).values()]
    for path in manifests:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for spec in runs.values():
        write_metrics(results / "runs", spec, plausible(spec))
    for evaluation in evaluations(study, grid).values():
        write_evaluation(results / "runs", evaluation, plausible(evaluation.run) / 2)
    return len(runs)


def measure_plans(grid: str, folder: Path, repeats: int) -> list[Call]:
    """Dry runs of the grid and of a Snakefile with as many jobs that says nothing else, in turns."""
    copy_workflow(ours := folder / "ours")
    options = ("--dry-run", "--quiet", "rules")
    first = snakemake("plan", ours, *options, "--config", f"grid={grid}")
    (bare := folder / "bare").mkdir()
    (bare / "Snakefile").write_text(BARE.format(jobs=first.jobs - 1))
    calls = []
    for _ in range(repeats):
        calls.append(snakemake("plan", ours, *options, "--config", f"grid={grid}"))
        calls.append(snakemake("plan, bare", bare, *options))
    return calls


def measure_reports(grid: str, folder: Path) -> list[Call]:
    """The report of a grid whose runs are all cached, one figure of it again, and Snakemake's own page."""
    study = copy_workflow(folder)
    cache(study, grid, folder)
    options = ("--profile", "workflow/profiles/local", "--config", f"grid={grid}")
    whole = snakemake("report", folder, *options)
    (folder / study.results / "grids" / grid / "fig2.png").unlink()
    figure = snakemake("one figure", folder, *options)
    return [whole, figure, snakemake("page", folder, *options, "--report", "report.html")]


def medians(calls: Sequence[Call]) -> dict[str, Call]:
    """By what was called: the median of its seconds, the most memory."""
    names = dict.fromkeys(call.what for call in calls)
    return {name: _median([call for call in calls if call.what == name]) for name in names}


def _median(calls: Sequence[Call]) -> Call:
    seconds = statistics.median(call.seconds for call in calls)
    return Call(calls[0].what, calls[0].jobs, seconds, max(call.mib for call in calls))


def goals(found: dict[str, Call]) -> dict[str, bool]:
    """Goal -> whether it is met."""
    plan, figure = found["plan"], found["one figure"]
    return {
        f"a plan takes at most {MAX_RATIO:.0f} times a bare Snakefile's": plan.seconds
        <= MAX_RATIO * found["plan, bare"].seconds,
        f"and less than {MAX_MIB} MiB": plan.mib < MAX_MIB,
        f"the report of cached runs takes less than {MAX_REPORT_SECONDS} s": found["report"].seconds
        < MAX_REPORT_SECONDS,
        # One job beside the rule that asks for everything.
        f"a deleted figure alone is made again, in less than {MAX_FIGURE_SECONDS} s": figure.jobs == 2
        and figure.seconds < MAX_FIGURE_SECONDS,
    }


def page(results: dict[str, Any], found: dict[str, Call]) -> str:
    """The results as Markdown."""
    headers = ["call", "jobs", "seconds", "÷ bare", "MiB"]
    bare = found["plan, bare"].seconds
    rows = [
        [call.what, call.jobs or "–", f"{call.seconds:.1f}", f"{call.seconds / bare:.2f}", f"{call.mib:.0f}"]
        for call in found.values()
    ]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=["left", *["right"] * 4])
    lines = [
        "# The workflow on the paper's grid\n",
        table,
        "\n*plan*: a dry run with nothing cached; *bare*: that of a Snakefile with as many jobs and no more; *report*: "
        "tables, figures and claims with all metrics cached; *one figure*: the same after one of them was deleted; "
        "*page*: `snakemake --report`.\n",
        *(f"- {goal}: {'met' if is_met else 'NOT met'}" for goal, is_met in results["goals"].items()),
        f"\n{described(results['on'])} snakemake {version('snakemake')}.\n",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the workflow's plan and report of a whole grid.")
    parser.add_argument("--grid", default="paper", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="plans of each kind (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for the results (%(default)s)")
    told = parser.parse_args(arguments)
    on = circumstances(torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="linvit-") as name:
        (reports := Path(name) / "reports").mkdir()
        calls = measure_plans(told.grid, Path(name), told.repeats) + measure_reports(told.grid, reports)
    found = medians(calls)
    results = {"on": on, "grid": told.grid, "goals": goals(found), "calls": [asdict(call) for call in calls]}
    write(told.out, "workflow", results, page(results, found))
    print((told.out / "workflow.md").read_text())


if __name__ == "__main__":
    main()
