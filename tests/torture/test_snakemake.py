"""Snakemake ended in the middle of a grid, in every way, and started again: nothing is lost, nothing repeated."""

import os
import random
import re
import signal
import subprocess
import time

import pytest
from tally import Tally
from victim import Victim, kill, usual_run, wait_for

pytestmark = pytest.mark.torture

LOCKED = "Directory cannot be locked"


def kill_driver(driver: subprocess.Popen) -> None:
    """As the kernel does where memory runs out."""
    kill(driver)


def kill_group(driver: subprocess.Popen) -> None:
    os.killpg(driver.pid, signal.SIGKILL)


def press_ctrl_c(driver: subprocess.Popen) -> None:
    """A terminal tells every process of the foreground."""
    os.killpg(driver.pid, signal.SIGINT)


def close_terminal(driver: subprocess.Popen) -> None:
    os.killpg(driver.pid, signal.SIGHUP)


def end_politely(driver: subprocess.Popen) -> None:
    """Snakemake starts nothing new, and ends when what runs has ended."""
    driver.send_signal(signal.SIGTERM)


WAYS = {
    "SIGKILL to Snakemake": kill_driver,
    "SIGKILL to Snakemake and its jobs": kill_group,
    "Ctrl-C": press_ctrl_c,
    "a terminal that closes": close_terminal,
    "SIGTERM to Snakemake": end_politely,
}


LEAVE_A_LOCK = {kill_driver, kill_group, close_terminal}
TIMES = 2
AT_ONCE = 0.5
"""Seconds in which Snakemake hears a signal, and has said what it started before."""


@pytest.mark.parametrize("way", WAYS)
def test_ended_in_the_middle_of_a_grid(
    grid: Victim, undisturbed: Victim, tally: Tally, expected: dict, chance: random.Random, way: str
) -> None:
    """The first time in the first of its runs, whatever the moment; the second time, where any is left by then."""
    done: dict[str, int] = {}
    for number in range(TIMES):
        driver, first = grid.start(), number == 0
        wait_for(lambda driver=driver: grid.jobs() or driver.poll() is not None, "a job")
        moment = time.monotonic() + chance.uniform(0, usual_run(undisturbed))
        wait_for(lambda moment=moment, first=first: time.monotonic() > moment or (first and grid.metrics()), "a moment")
        done |= finished(grid)
        if not first and driver.poll() is not None:
            break  # all is done
        with tally.fault(way):
            assert driver.poll() is None, grid.said()
            WAYS[way](driver)
            time.sleep(AT_ONCE)
            begun = started(grid)
            grid.finish(driver)
            wait_for(lambda: not grid.jobs(), "its jobs to end")
            grid.read_all()
            assert started(grid) == begun
        if WAYS[way] in LEAVE_A_LOCK:
            unlock(grid)
    with tally.fault(f"{way}: the same command once more") as count:
        count.compare(grid.run_again(), expected)
        assert {path: (grid.folder / path).stat().st_mtime_ns for path in done} == done


@pytest.mark.parametrize("way", ["SIGKILL to Snakemake", "Ctrl-C", "a terminal that closes"])
def test_no_job_goes_on_without_its_snakemake(endless: Victim, tally: Tally, way: str) -> None:
    with tally.fault(f"{way}: a run without end"):
        driver = endless.start()
        wait_for(lambda: (endless.folder / endless.targets[0]).with_name("checkpoint.pt").exists(), "a checkpoint")
        WAYS[way](driver)
        endless.finish(driver)
        wait_for(lambda: not endless.jobs(), "its job to end")
        assert "linvit: error: stopped in epoch" in endless.log()


def finished(grid: Victim) -> dict[str, int]:
    """When each of the metrics was written whose run Snakemake has seen the end of."""
    jobs = started(grid)
    ends = re.findall(r"Finished jobid: (\d+) \(Rule: train\)", grid.said())
    return {jobs[number]: (grid.folder / jobs[number]).stat().st_mtime_ns for number in ends}


def started(grid: Victim) -> dict[str, str]:
    """The metrics that the last Snakemake's jobs were to make, by their numbers."""
    starts = re.findall(r"output: (\S+/metrics\.json)\n.*?jobid: (\d+)", grid.said(), re.DOTALL)
    return {number: path for path, number in starts}


def unlock(grid: Victim) -> None:
    """What Snakemake cannot do any more, it says how to do."""
    assert grid.finish(grid.start()) != 0
    assert LOCKED in grid.said()
    assert "--unlock" in grid.said()
    assert grid.finish(grid.start("--unlock")) == 0


def test_started_twice_at_once_in_a_folder(grid: Victim, tally: Tally, expected: dict) -> None:
    with tally.fault("a second Snakemake in the same folder") as count:
        first = grid.start()
        wait_for(lambda: grid.jobs(), "the first one's job")
        second = grid.start()
        assert second.wait(60) != 0
        assert LOCKED in grid.said()
        assert not started(grid)
        assert grid.finish(first) == 0
        count.compare(grid.metrics(), expected)
