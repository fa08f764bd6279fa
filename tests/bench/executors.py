"""Many trivial jobs through our executor and through Snakemake's own for Slurm: calls to Slurm, seconds, memory.

Both run on the same Slurm, one after the other, and are told the same as far as their options allow. Snakemake imports
every executor that it finds, in every job, and the other one calls scontrol as it is imported. It is therefore not
installed: it lies in the folder given by --peer, and only its own runs see it. They see ours too, which takes 0.02 s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import distributions, version
from pathlib import Path
from platform import platform, python_version
from typing import Any

from tabulate import tabulate

from linvit.files import write_text

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))

from measure import COMMANDS, POLL_SECONDS, Run, Variant, measure
from tiny_slurm import Cluster, missing

DRIVERS = COMMANDS[:-1]  # no driver calls srun
MAX_ARRAY_SIZE = 1001  # Slurm's default: arrays of 1,000 jobs

CALLABLE = Variant("submitit, callables", "submitit", call="trivial:Tell")
NESTED = Variant("submitit, nested", "submitit")
# Slurm has no accounting here, and the other executor would ask sacct, because there is one. Its first pause between
# two polls, and the shortest, has an option of its own; each poll that finds no job ended adds ten seconds to it.
PEER_OPTIONS = (
    "--slurm-status-command=squeue",
    f"--slurm-init-seconds-before-status-checks={POLL_SECONDS}",
    "--slurm-no-account",
)
PEER = Variant("slurm", "slurm", PEER_OPTIONS)
# Its arrays carry the command lines of all their jobs in one argument. Linux ends an argument at 128 KiB; beyond that,
# from about 90 jobs, each of its jobs runs the first one's command.
PEER_ARRAYS = Variant("slurm, arrays", "slurm", (*PEER_OPTIONS, "--slurm-array-jobs=all", "--slurm-array-limit=50"))

NOTES = """
Seconds: from the first sbatch to the last output. ÷: these, divided by those of the other executor with as many jobs.
Calls are the driver's, but for the column of the jobs' own (srun among them). The jobs are all alike and do nothing.
"""


def ratio(run: Run, runs: list[Run], peer: Variant) -> float | None:
    """Seconds of the run over those of the peer's with as many jobs."""
    for other in runs:
        if (other.executor, other.jobs) == (peer.name, run.jobs) and other.succeeded and run.succeeded:
            return run.seconds / other.seconds
    return None


def goals(runs: list[Run]) -> dict[str, bool | None]:
    """Goal -> whether it is met; None if nothing was measured that could tell."""
    ours = [run for run in runs if run.executor in (CALLABLE.name, NESTED.name)]
    callables = [run for run in ours if run.executor == CALLABLE.name]
    largest = max(callables, key=lambda run: run.jobs)
    allowed = 1 + -(-largest.jobs // (MAX_ARRAY_SIZE - 1))
    few = largest.calls.get("sbatch", 0) <= allowed if largest.succeeded else None
    verdicts = {
        f"at most {allowed} sbatch for {largest.jobs:,} jobs": few,
        "at most one squeue a poll": all(run.calls.get("squeue", 0) <= run.polls for run in ours),
    }
    for peer in (PEER, PEER_ARRAYS):
        ratios = [found for run in callables if (found := ratio(run, runs, peer)) is not None]
        verdicts[f"callables: at most a third of the time of {peer.name}"] = max(ratios) <= 1 / 3 if ratios else None
    return verdicts


def table(runs: list[Run]) -> str:
    """One row a run."""
    headers = ["executor", "jobs", *DRIVERS, "jobs' calls", "polls", "seconds"]
    headers += [f"÷ {PEER.name}", f"÷ {PEER_ARRAYS.name}", "driver: wall s", "CPU s", "MiB"]
    rows = []
    for run in runs:
        seconds = f"{run.seconds:.1f}" if run.succeeded else f"failed ({run.done} done)"
        ratios = [ratio(run, runs, peer) for peer in (PEER, PEER_ARRAYS)]
        counts = [run.jobs, *(run.calls.get(command, 0) for command in DRIVERS), sum(run.calls_of_jobs.values())]
        shares = ["–" if value is None else f"{value:.2f}" for value in ratios]
        driver = [f"{run.wall:.1f}", f"{run.cpu:.1f}", f"{run.rss_mb:.0f}"]
        rows.append([run.executor, *counts, run.polls, seconds, *shares, *driver])
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align)


def page(results: dict[str, Any], runs: list[Run]) -> str:
    """The results as Markdown."""
    machine = results["machine"]
    met = {True: "met", False: "NOT met", None: "not measured"}
    return "\n".join(
        [
            "# Executors on one Slurm\n",
            table(runs),
            NOTES,
            *(f"- {goal}: {met[verdict]}" for goal, verdict in results["goals"].items()),
            f"\n{results['date']}, {machine['cpus']} CPUs (load {machine['load']:.1f} at the start), "
            f"{machine['slots']} jobs at a time, MaxArraySize {MAX_ARRAY_SIZE}, no accounting;",
            f"Slurm {machine['slurm']}, "
            + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
            + ".\n",
            "What each was told:\n",
            *dict.fromkeys(f"- {run.executor}: `{' '.join(run.told)}`" for run in runs),
            "",
        ]
    )


def carry_out(plan: list[tuple[Variant, int]], peer: Path | None) -> tuple[list[Run], dict[str, Any]]:
    """Measures one after the other on a Slurm of their own.

    Returns:
        the runs, and what they ran on.
    """
    machine = {"platform": platform(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder, max_array_size=MAX_ARRAY_SIZE)
    runs = []
    try:
        cluster.start()
        machine["slurm"] = cluster.run("sbatch", "--version").split()[-1]
        machine["slots"] = int(cluster.run("sinfo", "-h", "-p", "main", "-o", "%c"))
        for number, (variant, jobs) in enumerate(plan):
            print(f"{variant.name}, {jobs} jobs ...", flush=True)
            run = measure(variant, jobs, cluster, folder / f"run{number}", peer)
            if not run.succeeded:
                print((folder / f"run{number}" / "driver.log").read_text()[-4000:])
            runs.append(run)
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return runs, machine


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare executors on a Slurm that is started for it.")
    parser.add_argument("--jobs", type=int, default=1000, help="callables in one run (%(default)s)")
    parser.add_argument("--peer-jobs", type=int, default=100, help="jobs in each run to compare (%(default)s)")
    parser.add_argument("--peer", type=Path, help="folder with snakemake-executor-plugin-slurm; without it, only ours")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for the results (%(default)s)")
    told = parser.parse_args(arguments)
    if absent := missing():
        parser.exit(1, f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client\n")
    if told.peer and not (told.peer / "snakemake_executor_plugin_slurm").is_dir():
        parser.exit(1, f"--peer: no snakemake_executor_plugin_slurm in {told.peer}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the Slurm must not outlive this process
    compared = [CALLABLE, NESTED, *([PEER, PEER_ARRAYS] if told.peer else [])]
    # The largest comes last: Slurm lists ended jobs for some minutes.
    runs, machine = carry_out([*((variant, told.peer_jobs) for variant in compared), (CALLABLE, told.jobs)], told.peer)
    results = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions(told.peer),
        "goals": goals(runs),
        "runs": [asdict(run) for run in runs],
    }
    write_text(told.out / "executors.json", json.dumps(results, indent=2) + "\n")
    write_text(told.out / "executors.md", page(results, runs))
    print((told.out / "executors.md").read_text())


def versions(peer: Path | None) -> dict[str, str]:
    ours = {name: version(name) for name in ("snakemake", "submitit")}
    others = {found.name: found.version for found in distributions(path=[str(peer)])} if peer else {}
    return {"Python": python_version(), **ours, **others}


if __name__ == "__main__":
    main()
