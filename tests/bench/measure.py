"""One run of the toy workflow through an executor, with what it took: calls to Slurm, polls, seconds, memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tiny_slurm import Cluster

HERE = Path(__file__).parent
PLUGIN = HERE.parent.parent / "workflow" / "executor"
POLL_SECONDS = 5
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "srun")  # whose calls are counted

SNAKEFILE = """
rule all:
    input: expand("out/{i}", i=range(config["count"]))
rule tell:
    output: "out/{i}"
    params: call=config["call"]
    resources: slurm_partition="main", runtime=10, mem_mb=100
    shell: "date +%s.%N > {output}"
"""

# Stands first on PATH in the place of a command of Slurm. Jobs inherit it, and their calls are told apart. The other
# executor's jobs drop SLURM_CONF, which a site with its configuration in the usual place does not need.
WRAPPER = """#!/bin/bash
export SLURM_CONF={conf}
echo "${{EPOCHREALTIME/,/.}} ${{SLURM_JOB_ID:-driver}} {command}" >> {log}
exec {path} "$@"
"""


@dataclass(frozen=True)
class Variant:
    """An executor, and what it is told beyond what all are told."""

    name: str
    plugin: str
    options: tuple[str, ...] = ()
    call: str = ""


@dataclass(frozen=True)
class Run:
    """What one run of the workflow took.

    Args:
        told: the command line, without the program.
        code: exit code of the driver.
        done: outputs that were made.
        calls, calls_of_jobs: how often the driver, and the jobs, called each command of Slurm.
        polls: how often the executor looked after jobs.
        seconds: from the first sbatch to the last output; None if there was none.
        wall, cpu: seconds of the driver, `cpu` with its child processes.
        rss_mb: peak resident memory of the driver, MiB.
    """

    executor: str
    jobs: int
    told: list[str]
    code: int
    done: int
    calls: dict[str, int]
    calls_of_jobs: dict[str, int]
    polls: int
    seconds: float | None
    wall: float
    cpu: float
    rss_mb: float

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.done == self.jobs


def measure(variant: Variant, jobs: int, cluster: Cluster, folder: Path, peer: Path | None = None) -> Run:
    """Runs the workflow in a new folder, to its end.

    Args:
        peer: folder with the other executor, for its own runs.
    """
    folder.mkdir(parents=True)
    (folder / "Snakefile").write_text(SNAKEFILE)
    log = folder / "calls.log"
    path = wrap_commands(folder / "bin", log, cluster.environment)
    plugin = peer if variant.plugin == "slurm" else PLUGIN
    environment = {
        **cluster.environment,
        "PATH": path,
        "PYTHONPATH": f"{plugin}{os.pathsep}{HERE}",
        "HOME": str(folder),
    }
    told = options(variant, jobs)
    began = time.time()
    with (folder / "driver.log").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, str(HERE / "counted.py"), variant.plugin, str(log), *told],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        code, cpu, rss_mb = wait(driver, seconds=600 + 20 * jobs)
    wall = time.time() - began
    cluster.query("scancel", "--quiet", "--me")  # after a failure: nothing of it may disturb the next run
    cluster.wait_for(lambda: not cluster.query("squeue", "-h"), 120, "an empty queue")
    # As the jobs tell it: Snakemake touches the outputs when it learns of the end of a job.
    ends = [float(text) for path in (folder / "out").glob("*") if (text := path.read_text())]
    first, calls, calls_of_jobs = read_calls(log.read_text() if log.exists() else "")
    polls = calls.pop("poll", 0)
    return Run(
        executor=variant.name,
        jobs=jobs,
        told=told,
        code=code,
        done=len(ends),
        calls=calls,
        calls_of_jobs=calls_of_jobs,
        polls=polls,
        seconds=round(max(ends) - first, 2) if ends else None,
        wall=round(wall, 2),
        cpu=round(cpu, 2),
        rss_mb=round(rss_mb, 1),
    )


def options(variant: Variant, jobs: int) -> list[str]:
    return [
        f"--executor={variant.plugin}",
        f"--jobs={jobs}",
        "--max-jobs-per-timespan=10000/1s",
        f"--seconds-between-status-checks={POLL_SECONDS}",
        "--latency-wait=60",
        *variant.options,
        "--config",
        f"count={jobs}",
        f"call={variant.call}",
    ]


def wrap_commands(folder: Path, log: Path, environment: dict[str, str]) -> str:
    """Writes a wrapper for each command that there is; returns the PATH that finds them first."""
    folder.mkdir()
    for command in COMMANDS:
        if found := shutil.which(command, path=environment["PATH"]):
            script = folder / command
            script.write_text(WRAPPER.format(command=command, path=found, log=log, conf=environment["SLURM_CONF"]))
            script.chmod(0o755)
    return f"{folder}{os.pathsep}{environment['PATH']}"


def wait(process: subprocess.Popen, seconds: float) -> tuple[int, float, float]:
    """Waits for the end of the process, or kills it after so many seconds.

    Returns:
        exit code, CPU seconds with those of its child processes, peak resident memory without theirs (MiB).
    """
    deadline, peak = time.monotonic() + seconds, 0
    while True:
        # Not ru_maxrss, which a process inherits from the one that started it.
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text()):
            peak = int(found[1])
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime, peak / 1024
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.05)


def read_calls(text: str) -> tuple[float, dict[str, int], dict[str, int]]:
    """When the first sbatch was called, and the driver's and the jobs' calls by command."""
    first, calls, calls_of_jobs = float("nan"), Counter(), Counter()
    for line in text.splitlines():
        moment, caller, command = line.split()
        if caller == "driver":
            calls[command] += 1
            if command == "sbatch" and calls[command] == 1:
                first = float(moment)
        else:
            calls_of_jobs[command] += 1
    return first, dict(calls), dict(calls_of_jobs)
