"""Snakemake ended in the middle of a grid, in every way, and started again: nothing is lost, nothing repeated."""

import os
import random
import re
import signal
import subprocess
import time

import pytest
from tally import Tally
from victim import Victim, kill, wait_for

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


@pytest.mark.parametrize("way", WAYS)
def test_ended_in_the_middle_of_a_grid(grid: Victim, tally: Tally, expected: dict, way: str) -> None:
    done: dict[str, int] = {}
    for _ in range(TIMES):
        driver = grid.start()
        wait_for(lambda driver=driver: grid.jobs() or driver.poll() is not None, "a job")
        time.sleep(random.uniform(0, 8))
        done |= finished(grid)
        if driver.poll() is not None:
            break  # all is done
        with tally.fault(way):
            WAYS[way](driver)
            grid.finish(driver)
            wait_for(lambda: not grid.jobs(), "its jobs to end")
            grid.read_all()
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
    starts = re.findall(r"output: (\S+/metrics\.json)\n.*?jobid: (\d+)", grid.said(), re.DOTALL)
    jobs = {number: path for path, number in starts}
    ends = re.findall(r"Finished jobid: (\d+) \(Rule: train\)", grid.said())
    return {jobs[number]: (grid.folder / jobs[number]).stat().st_mtime_ns for number in ends}


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
        assert len(grid.jobs()) == 1
        assert grid.finish(first) == 0
        count.compare(grid.metrics(), expected)
