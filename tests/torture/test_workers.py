"""Processes that load images: signalled with their run or bereft of it, above all while they start in each epoch."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import PIL.Image
import psutil
import pytest
from processes import ENDINGS
from tally import Tally
from tiny import CLASSES, RECIPE, TEST, TRAIN, arrays, changed, dataset, repeatable, spec
from victim import hear_the_terminal, kill, wait_for
from whole import read_all

from linvit.grid import RunSpec
from linvit.run import train

log = logging.getLogger(__name__)

TIMES = 6
STARTING = 0.05
"""Seconds in which a loading process becomes one that outlives signals."""
PROMPT = 30.0
"""Seconds within which a run ends that was asked to; loading processes that nobody needs would last for 20."""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, which are read by loading processes in training and in evaluation."""
    root = tmp_path_factory.mktemp("images")
    for split, n, seed in (("train", TRAIN, 1), ("val", TEST, 2)):
        for number, (pixels, label) in enumerate(zip(*arrays(n, seed=seed), strict=True)):
            path = root / f"bands/{split}/class{label}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels).save(path)
    return root


def spec_of(epochs: int) -> RunSpec:
    data = dataset("unused", npz=None, folder="bands", classes=CLASSES)
    return spec("unused", dataset=data, recipe=changed(RECIPE, epochs=epochs, random_erasing=0.3, eval_every=1))


class Job:
    """A run that is started, by its command in a session of its own, as often as it takes."""

    def __init__(self, run: RunSpec, images: Path, folder: Path) -> None:
        self.run, self.images, self.folder = run, images, folder
        self.options = {"sources_folder": folder, "data_root": images}

    def start(self) -> None:
        command = [sys.executable, "-m", "linvit", "train", self.run.to_json(), "--out", str(self.folder)]
        command += ["--data", str(self.images), "--threads", "1", "--workers", "2"]
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "said.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stderr=log, start_new_session=True, preexec_fn=hear_the_terminal, cwd=self.folder
            )
        self.loading = set()
        before = self._written()
        wait_for(lambda: self._written() > before or self.is_over(), "a checkpoint")

    def _written(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "checkpoint.pt").stat().st_mtime_ns
        return 0

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_loading_processes(self) -> None:
        """Until such appear that were not there just before, or the run ends without."""
        known = self._children()
        while not self.is_over():
            found = self._children()
            if found - known:
                self.loading = found
                return
            known = found

    def _children(self) -> set[psutil.Process]:
        with suppress(psutil.Error):
            return set(psutil.Process(self.process.pid).children())
        return set()

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it said; none of its processes is left."""
        try:
            code = self.process.wait(PROMPT)
        finally:
            kill(self.process)
        wait_for(lambda: not any(map(is_at_work, self.loading)), "loading processes to end", PROMPT)
        return code, (self.folder / "said.log").read_text()


def is_at_work(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def signal_all(job: Job, number: int, seconds: float) -> None:
    """The run and its processes, so long after these have appeared; they end as they should, or were done."""
    job.wait_for_loading_processes()
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.killpg(job.process.pid, number)
    code, said = job.end()
    assert not [line for line in said.splitlines() if "Traceback" in line or "Exception" in line], said
    if code == 1:
        assert said.splitlines()[-1].startswith("linvit: error: stopped in "), said
        assert (job.folder / "checkpoint.pt").exists()
    else:  # done, or going on with an evaluation: it listens from its first step on
        assert code in (0, 130 if number == signal.SIGINT else -number), said
        assert code == 0 or "epoch" not in said.replace("resumed after epoch", ""), said
    read_all(job.folder)


def kill_run(job: Job, seconds: float) -> None:
    """The run alone, so long after its processes have appeared."""
    job.wait_for_loading_processes()
    time.sleep(seconds)
    kill(job.process)
    job.end()
    read_all(job.folder)


WAYS: dict[str, Callable[[Job, float], None]] = {
    "SIGKILL to the run": kill_run,
    **{f"{number.name} to all of it": lambda job, s, number=number: signal_all(job, number, s) for number in ENDINGS},
}


def test_a_run_is_signalled_as_its_loading_processes_start(images, tmp_path, tally: Tally) -> None:
    job = Job(spec_of(epochs=100), images, tmp_path / "run")
    with tally.fault("SIGTERM to all of it, loading processes starting"):
        job.start()
        signal_all(job, signal.SIGTERM, 0)
        assert job.process.returncode == 1


@pytest.mark.torture
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_ended_as_its_loading_processes_start(images, tmp_path, tally: Tally, way: str) -> None:
    """At random moments, again and again."""
    seed = random.randrange(2**32)
    log.warning("seed %d", seed)
    chance, job = random.Random(seed), Job(spec_of(epochs=12), images, tmp_path / "run")
    for _ in range(TIMES):
        with tally.fault(f"{way}, loading processes starting"):
            job.start()
            WAYS[way](job, chance.uniform(0, STARTING))
    with tally.fault(f"{way}, loading processes starting: the same command once more") as count:
        found = repeatable(train(job.run, job.folder, workers=2, **job.options))
        count.compare(found, repeatable(train(job.run, tmp_path / "whole", **job.options)))
