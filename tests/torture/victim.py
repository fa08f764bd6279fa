"""A study of mini runs, with their data set and their source, to be broken in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import yaml
from study import ROOT, Study
from tiny import repeatable
from whole import read_all

HERE = Path(__file__).parent
RUNS = "runs/fashion-1k/mini/relu/mlpcopy-distill/own"
PATIENCE = 900
"""Seconds for anything that should happen at all."""


def mini_config(seeds: int, epochs: int) -> dict:
    """Runs of size `mini` on the embedded images, aligned first, evaluated after each epoch, and a source like them."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    recipe = config["recipes"]["fashion-mini"]
    config["recipes"]["quick"] = {**recipe, "epochs": epochs, "warmup_epochs": 1, "eval_every": 1}
    config["recipes"]["aligned"] = {**config["recipes"]["quick"], "align": {"epochs": 1, "lr": 1.0e-3}}
    config["datasets"]["fashion-1k"]["recipe"] = "aligned"
    config["sources"]["own"] = {"mini": {"train": {"dataset": "fashion-1k", "recipe": "quick"}}}
    block = {"datasets": ["fashion-1k"], "sizes": ["mini"], "variants": ["relu"], "inits": ["mlpcopy-distill"]}
    config["grids"] = {"victim": [{**block, "sources": ["own"], "seeds": list(range(seeds))}]}
    return {**config, "grid": "victim"}


class Victim(Study):
    """A study that is started, broken and started again as a person would."""

    def __init__(self, folder: Path, seeds: int = 1, epochs: int = 3) -> None:
        super().__init__(folder)
        self.configure(mini_config(seeds, epochs))
        self.targets = [f"results/{RUNS}/seed{seed}/metrics.json" for seed in range(seeds)]
        shutil.copy(HERE / "saboteur.py", folder / "sitecustomize.py")
        self.commands = 0
        self.seconds = 0.0
        """That the last command took."""

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def start(self, *options: str) -> subprocess.Popen:
        """Snakemake in a process group of its own, as a terminal's foreground job; it makes all runs."""
        command = [sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/local", "--cores", "1"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        self.began = time.monotonic()
        self.commands += 1
        with self._said.open("w") as log:
            return subprocess.Popen(
                [*command, *self.targets, *options],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=hear_the_terminal,
            )

    def finish(self, driver: subprocess.Popen) -> int:
        code = driver.wait(PATIENCE)
        self.seconds = time.monotonic() - self.began
        return code

    def said(self) -> str:
        """What the last command has said so far."""
        return self._said.read_text()

    @property
    def _said(self) -> Path:
        return self.folder / f"said{self.commands}.log"

    def prepare(self, other: "Victim") -> None:
        """Take over another's data set and source, so that only the runs are left to do."""
        for part in ("data", "sources"):
            shutil.copytree(other.results / part, self.results / part)

    def run_again(self) -> dict[str, dict]:
        """Bring all to its end as a person would, by the same command, and return what must always be the same."""
        assert self.finish(self.start()) == 0, self.said()
        assert self.leftovers() == []
        return self.metrics()

    def metrics(self) -> dict[str, dict]:
        """What must be the same whatever happened, by run."""
        paths = [self.folder / target for target in self.targets]
        return {path.parent.name: repeatable(json.loads(path.read_text())) for path in paths if path.exists()}

    def read_all(self) -> None:
        read_all(self.results)

    def sabotage(self, *faults: dict) -> None:
        """Its processes suffer these faults, one after the other (saboteur.py)."""
        self._plan.write_text(json.dumps([{"nth": 1, **fault} for fault in faults]))

    def left(self) -> int:
        """Faults that no process has suffered yet."""
        return len(json.loads(self._plan.read_text()))

    @property
    def _plan(self) -> Path:
        return self.folder / "faults.json"

    def files(self, seed: int = 0) -> set[str]:
        """Names in the folder of the run with this seed."""
        return {path.name for path in (self.results / RUNS / f"seed{seed}").iterdir()}

    def log(self, seed: int = 0) -> str:
        """What the run with this seed has said so far."""
        return (self.results / RUNS / f"seed{seed}/train.log").read_text()

    def jobs(self) -> list[psutil.Process]:
        """The processes of linvit that work in the study's folder."""
        return [process for process, command in self._processes() if "linvit" in command]

    def end(self) -> None:
        """Whatever a failed test has left at work."""
        for process, _ in self._processes():
            kill(process)

    def _processes(self) -> list[tuple[psutil.Process, list[str]]]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended meanwhile
                if process.cwd() == str(self.folder):
                    found.append((process, process.cmdline()))
        return found

    def leftovers(self) -> list[str]:
        """Temporary files under the results."""
        return sorted(path.name for path in self.results.rglob(".*") if path.is_file())


def usual_run(undisturbed: Victim) -> float:
    """Seconds that a run takes: data set, source and two runs took four times that."""
    return undisturbed.seconds / 4


def hear_the_terminal() -> None:
    """Under `nohup`, or in the background of a script, these are ignored, which processes hand on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def kill(process: psutil.Process | subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)
