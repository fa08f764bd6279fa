"""A toy workflow in a folder of its own, and drivers of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_slurm import Cluster

HERE = Path(__file__).parent
PLUGIN = HERE.parent.parent / "workflow" / "executor"
OPTIONS = {
    "executor": "submitit",
    "jobs": "100",
    "max-jobs-per-timespan": "10000/1s",
    "seconds-between-status-checks": "1",
    "latency-wait": "5",
    "rerun-triggers": "mtime input params",
    "submitit-grace-seconds": "4",
    "submitit-submit-retries": "1",
}


class Workflow:
    """A folder with a Snakefile, and drivers of it."""

    def __init__(self, folder: Path, cluster: Cluster | None) -> None:
        self.folder = folder
        self.cluster = cluster
        self.drivers: list[subprocess.Popen] = []
        base = cluster.environment if cluster else {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.environment = {**base, "PYTHONPATH": f"{PLUGIN}:{HERE}", "HOME": str(folder)}
        shutil.copy(HERE / "toy.py", folder)

    def write(self, snakefile: str) -> None:
        (self.folder / "Snakefile").write_text(textwrap.dedent(snakefile))

    def start(self, *flags: str, defaults: dict[str, str] = OPTIONS, **options: str) -> subprocess.Popen:
        """A driver in the background. Its output goes to driver<n>.log."""
        command = [sys.executable, "-m", "snakemake", "--keep-going", "--ignore-incomplete"]
        for name, value in {**defaults, **{k.replace("_", "-"): v for k, v in options.items()}}.items():
            command += [f"--{name}", *value.split(" ")]
        with (self.folder / f"driver{len(self.drivers)}.log").open("w") as log:
            driver = subprocess.Popen(
                [*command, *flags],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.drivers.append(driver)
        return driver

    def finish(self, driver: subprocess.Popen, seconds: float = 300) -> int:
        try:
            return driver.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the driver still runs after {seconds} s\n{self.said()}")

    def run(self, *flags: str, code: int = 0, **options: Any) -> str:
        """Drives the workflow to its end and returns what the driver said."""
        driver = self.start(*flags, **options)
        assert self.finish(driver) == code, self.said()
        return self.said()

    def said(self, number: int = -1) -> str:
        return (self.folder / f"driver{range(len(self.drivers))[number]}.log").read_text()

    def path(self, name: str) -> Path:
        return self.folder / name

    def wait_for(self, condition, seconds: float = 180, what: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                queue = self.cluster.query("squeue") if self.cluster else ""
                pytest.fail(f"waited {seconds} s in vain for {what}\n{self.said()}\n{queue}")
            time.sleep(0.2)

    def id_of(self, log_line: str) -> str:
        """The cluster's id in what the driver said: `Submitted 1 x name: <id>`."""
        match = re.search(rf"Submitted \d+ x {log_line}: (\S+?),? ", self.said())
        assert match, self.said()
        return match[1]

    def starts(self, name: str) -> int:
        """How often a toy job was started."""
        path = self.path(f"{name}.starts")
        return len(path.read_text().splitlines()) if path.exists() else 0

    def steps(self, name: str) -> int:
        """Steps that a toy job has taken."""
        marker = self.path(f"{name}.started")
        return int(marker.read_text() or 0) if marker.exists() else 0

    def state(self, name: str) -> dict:
        return json.loads(self.path(f"{name}.json").read_text())

    def submissions(self) -> int:
        return sum(self.said(i).count("Submitted ") for i in range(len(self.drivers)))

    def stop(self) -> None:
        for driver in self.drivers:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
