"""A study of one mini run, with its data set and its source, to be broken in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml
from study import ROOT, Study
from tiny import repeatable

HERE = Path(__file__).parent
PATIENCE = 300
"""Seconds for anything that should happen at all."""


def mini_config(seeds: int = 1) -> dict:
    """Runs of size `mini` on the embedded images, three epochs with an evaluation each, and a source trained alike."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    recipe = config["recipes"]["fashion-mini"]
    config["recipes"]["quick"] = {**recipe, "epochs": 3, "warmup_epochs": 1, "eval_every": 1}
    config["datasets"]["fashion-1k"]["recipe"] = "quick"
    config["sources"]["own"] = {"mini": {"train": {"dataset": "fashion-1k", "recipe": "quick"}}}
    block = {"datasets": ["fashion-1k"], "sizes": ["mini"], "variants": ["relu"], "inits": ["mlpcopy-distill"]}
    config["grids"] = {"victim": [{**block, "sources": ["own"], "seeds": list(range(seeds))}]}
    return {**config, "grid": "victim"}


class Victim(Study):
    """A study that is started, broken and started again as a person would."""

    def __init__(self, folder: Path, config: dict | None = None) -> None:
        super().__init__(folder)
        self.configure(config or mini_config())
        shutil.copy(HERE / "saboteur.py", folder / "sitecustomize.py")
        self.seconds = 0.0

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def start(self, *options: str) -> subprocess.Popen:
        """Snakemake in a process group of its own, as a terminal's foreground job; by default it makes all runs."""
        command = [sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/local", "--cores", "1"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        self.began = time.monotonic()
        with (self.folder / "said.log").open("w") as log:
            return subprocess.Popen(
                [*command, *(options or self.targets())],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, driver: subprocess.Popen) -> int:
        code = driver.wait(PATIENCE)
        self.seconds = time.monotonic() - self.began
        return code

    def said(self) -> str:
        """What Snakemake last said."""
        return (self.folder / "said.log").read_text()

    def targets(self) -> list[str]:
        """The metrics of all runs of the study's grid."""
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        paths = []
        for block in config["grids"][config["grid"]]:
            axes = [block[axis] for axis in ("datasets", "sizes", "variants", "inits", "sources")]
            place = "/".join(axis[0] for axis in axes)
            paths += [f"results/runs/{place}/seed{seed}/metrics.json" for seed in block["seeds"]]
        return paths

    def metrics(self) -> dict[str, dict]:
        """What must be the same whatever happened, by run; that of the source's training among them."""
        found = sorted(self.results.rglob("metrics.json"))
        return {str(path.relative_to(self.results)): repeatable(json.loads(path.read_text())) for path in found}

    def sabotage(self, **fault: object) -> None:
        """The next process that comes to this moment suffers this fault (saboteur.py)."""
        (self.folder / "fault.done").unlink(missing_ok=True)
        (self.folder / "fault.json").write_text(json.dumps({"nth": 1, **fault}))

    @property
    def struck(self) -> bool:
        return (self.folder / "fault.done").exists()

    def jobs(self) -> list[psutil.Process]:
        """The processes of linvit that work in the study's folder."""
        return [process for process in psutil.process_iter() if self._is_job(process)]

    def _is_job(self, process: psutil.Process) -> bool:
        try:
            return "linvit" in process.cmdline() and process.cwd() == str(self.folder)
        except psutil.Error:
            return False

    def leftovers(self) -> list[str]:
        """Temporary files under the results."""
        return sorted(path.name for path in self.results.rglob(".*") if path.is_file() and path.name[0] == ".")


def kill(process: psutil.Process | subprocess.Popen) -> None:
    os.kill(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
