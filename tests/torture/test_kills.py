"""Jobs killed at chosen and at random moments, and started again by Snakemake: the results are the same."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tally import Tally
from tiny_run import Run
from victim import Victim, kill, usual_run, wait_for
from whole import read_all

WRITES = {
    "data manifest": ("fashion-1k.json", False),
    "decoded images": ("train.bin", False),
    "index of decoded images": ("test.npz", False),
    "source weights": ("weights.safetensors", False),
    "source manifest": ("source.json", False),
    "spec": ("spec.json", True),
    "alignment's checkpoint": ("checkpoint.align.pt", True),
    "checkpoint": ("checkpoint.pt", True),
    "model": ("model.safetensors", True),
    "metrics": ("metrics.json", True),
}
"""Each kind of file that a run and what it needs write, and whether data set and source are there already."""
MOMENTS = ("begin", "within", "half", "whole", "renamed")

CALLS = {
    "decoding": ("linvit.decoded:_images_of", 2, False),
    "source's training": ("linvit.fit:Loop.step", 20, False),  # of 16 an epoch
    "alignment": ("linvit.fit:Loop.step", 10, True),  # of one epoch
    "training": ("linvit.fit:Loop.step", 36, True),
    "evaluation": ("linvit.evaluate:autocast", 100, True),  # of 79 an evaluation
    "final measurements": ("linvit.run:images_per_second", 1, True),
}
"""A function, the call of it that is not survived, and whether data set and source are there already."""

ROUNDS, KILLS = 10, 5

TINY_KILLS = 300
TINY_WRITES = (
    ("spec.json", 1),
    ("checkpoint.pt", 1),
    ("checkpoint.pt", 1),
    ("checkpoint.pt", 2),
    ("model.safetensors", 1),
    ("metrics.json", 1),
)
"""A file, and the write of it that a process does not survive; the next one goes on."""

forking = pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use a GPU")


@forking
@pytest.mark.parametrize("at", MOMENTS)
def test_a_tiny_run_killed_in_every_write(npz: Path, whole: dict, tmp_path: Path, tally: Tally, at: str) -> None:
    run = Run(npz, tmp_path)
    for name, nth in TINY_WRITES:
        with tally.fault("SIGKILL, a tiny run being written"):
            assert run.killed_in(name, at, nth)
            read_all(tmp_path)
    with tally.fault("SIGKILL, a tiny run: started once more") as count:
        count.compare(run(), whole)
        assert {path.name for path in tmp_path.iterdir()} == {"spec.json", "model.safetensors", "metrics.json"}


@forking
@pytest.mark.torture
def test_a_tiny_run_killed_at_random_moments(
    npz: Path, whole: dict, tmp_path: Path, tally: Tally, chance: random.Random
) -> None:
    run, kills, began = Run(npz, tmp_path / "run"), 0, time.monotonic()
    run()
    usual = time.monotonic() - began
    while kills < TINY_KILLS:
        shutil.rmtree(run.folder, ignore_errors=True)
        while run.killed_after(chance.uniform(0, usual)):
            with tally.fault("SIGKILL, a tiny run at a random moment"):
                read_all(run.folder)
                kills += 1
        with tally.fault("SIGKILL, a tiny run: started once more") as count:
            count.compare(run.metrics(), whole)


@pytest.mark.torture
@pytest.mark.parametrize("kind", WRITES)
def test_killed_in_each_moment_of_a_write(
    victim: Victim, undisturbed: Victim, tally: Tally, expected: dict, kind: str
) -> None:
    name, prepared = WRITES[kind]
    if prepared:
        victim.prepare(undisturbed)
    victim.sabotage(*({"write": name, "at": moment, "signal": signal.SIGKILL} for moment in MOMENTS))
    with tally.fault(f"SIGKILL, {kind} being written", len(MOMENTS)) as count:
        driver = victim.start(f"--retries={len(MOMENTS)}")
        for left in reversed(range(len(MOMENTS))):
            wait_for(lambda left=left: victim.left() <= left or driver.poll() is not None, "a fault")
            victim.read_all()
        assert victim.finish(driver) == 0, victim.said()
        assert victim.left() == 0
        assert victim.leftovers() == []
        count.compare(victim.metrics()["seed0"], expected["seed0"])


@pytest.mark.torture
@pytest.mark.parametrize("place", CALLS)
def test_killed_in_the_middle_of_work(
    victim: Victim, undisturbed: Victim, tally: Tally, expected: dict, place: str
) -> None:
    function, nth, prepared = CALLS[place]
    if prepared:
        victim.prepare(undisturbed)
    victim.sabotage({"call": function, "nth": nth, "signal": signal.SIGKILL})
    with tally.fault(f"SIGKILL, during {place}") as count:
        assert victim.finish(victim.start()) != 0
        assert victim.left() == 0
        victim.read_all()
        count.compare(victim.run_again()["seed0"], expected["seed0"])


@pytest.mark.torture
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_at_random_moments(
    victim: Victim, undisturbed: Victim, tally: Tally, expected: dict, chance: random.Random, number: int
) -> None:
    """Again and again; in each fifth round, also while data set and source are prepared."""
    if number % 5:
        victim.prepare(undisturbed)
    kills, usual = 0, usual_run(undisturbed)
    with tally.fault("SIGKILL, at a random moment", KILLS) as count:
        while kills < KILLS:
            shutil.rmtree(victim.results / "runs", ignore_errors=True)
            driver = victim.start(f"--retries={KILLS}")
            while kills < KILLS and kill_after(victim, driver, chance.uniform(0, usual)):
                kills += 1
                victim.read_all()
            assert victim.finish(driver) == 0, victim.said()
            assert victim.leftovers() == []
            count.compare(victim.metrics()["seed0"], expected["seed0"])


def kill_after(victim: Victim, driver: subprocess.Popen, seconds: float) -> bool:
    """Kill what is at work so long after the next job's start, or next after that; false where all is done by then."""
    for pause in (seconds, 0):
        wait_for(lambda: victim.jobs() or driver.poll() is not None, "a job")
        time.sleep(pause)
    jobs = victim.jobs()
    for job in jobs:
        kill(job)
    return bool(jobs)


@pytest.mark.torture
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_asked_to_stop_in_a_step(
    victim: Victim, undisturbed: Victim, tally: Tally, expected: dict, number: int
) -> None:
    """It stops after that very step, not at the epoch's end; the first epoch, of 16, is the alignment's."""
    victim.prepare(undisturbed)
    with tally.fault(f"{signal.Signals(number).name}, in a step") as count:
        victim.sabotage({"call": "linvit.fit:Loop.step", "nth": 36, "signal": number})
        assert victim.finish(victim.start()) != 0
        assert victim.log().rstrip().splitlines()[-1].startswith("linvit: error: stopped in epoch 3 after step 4; ")
        found = victim.run_again()
        assert "resumed after epoch 2, step 4" in victim.log()
        count.compare(found["seed0"], expected["seed0"])


@pytest.mark.torture
def test_a_run_keeps_its_last_checkpoint_and_when_it_is_done_its_model(victim: Victim, undisturbed: Victim) -> None:
    """The best epoch is a line of the metrics: no result is of it, so that no weights of it are kept."""
    victim.prepare(undisturbed)
    kept = {"spec.json", "train.log"}
    victim.sabotage({"call": "linvit.fit:Loop.step", "nth": 56, "signal": signal.SIGKILL})
    assert victim.finish(victim.start()) != 0
    assert victim.files() == kept | {"checkpoint.align.pt", "checkpoint.pt", "progress.json"}
    victim.run_again()
    assert victim.files() == kept | {"metrics.json", "model.safetensors"}
