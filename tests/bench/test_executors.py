"""What the benchmark makes of its logs and figures; no Slurm is needed."""

import subprocess
import sys

import pytest
from executors import CALLABLE, NESTED, PEER, PEER_ARRAYS, goals, page, ratio, table
from measure import Run, read_calls, wait


def run(variant=CALLABLE, jobs: int = 10, seconds: float = 1.0, **changes) -> Run:
    values = {
        "executor": variant.name,
        "jobs": jobs,
        "told": [f"--jobs={jobs}"],
        "code": 0,
        "done": jobs,
        "calls": {"sbatch": 1, "squeue": 2},
        "calls_of_jobs": {"srun": jobs},
        "polls": 2,
        "seconds": seconds,
        "wall": 5.0,
        "cpu": 1.0,
        "rss_mb": 90.0,
    }
    return Run(**values | changes)


def test_calls_of_the_driver_and_of_its_jobs_are_told_apart() -> None:
    first, calls, calls_of_jobs = read_calls(
        "10.5 driver scontrol\n11.25 driver sbatch\n12.0 7 srun\n12.5 8 srun\n13.0 driver sbatch\n14.0 driver poll\n"
    )
    assert first == 11.25
    assert calls == {"scontrol": 1, "sbatch": 2, "poll": 1}
    assert calls_of_jobs == {"srun": 2}


def test_time_is_compared_with_a_run_of_as_many_jobs_that_succeeded() -> None:
    ours, peer = run(seconds=2.0), run(PEER, seconds=8.0)
    assert ratio(ours, [ours, peer], PEER) == 0.25
    assert ratio(run(jobs=11), [peer], PEER) is None
    assert ratio(ours, [run(PEER, seconds=8.0, done=9)], PEER) is None
    assert ratio(ours, [run(PEER, seconds=8.0, code=1)], PEER) is None


@pytest.mark.parametrize(("jobs", "sbatch", "met"), [(1000, 2, True), (1000, 3, False), (2500, 4, True)])
def test_one_sbatch_more_than_the_chunks_need_is_allowed(jobs: int, sbatch: int, met: bool) -> None:
    verdicts = goals([run(), run(jobs=jobs, calls={"sbatch": sbatch})])
    assert next(verdict for goal, verdict in verdicts.items() if f"sbatch for {jobs:,} jobs" in goal) == met


def test_goals() -> None:
    runs = [run(seconds=2.0), run(NESTED), run(PEER, seconds=6.0), run(PEER_ARRAYS, seconds=5.0)]
    assert list(goals(runs).values()) == [True, True, True, False]
    assert list(goals([run(), run(NESTED, polls=1)]).values()) == [True, False, None, None]
    assert next(iter(goals([run(code=1)]).values())) is None


def test_the_table_has_a_row_a_run_and_a_cell_a_header() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table([run(seconds=2.0), run(PEER, seconds=8.0), run(PEER_ARRAYS, code=1, done=3)]).splitlines()
    ]
    header, _, ours, peer, failed = rows
    assert {len(row) for row in rows} == {len(header)}
    cells = dict(zip(header, ours, strict=True))
    assert (cells["sbatch"], cells["sacct"], cells["jobs' calls"], cells["÷ slurm"]) == ("1", "0", "10", "0.25")
    assert cells["÷ slurm, arrays"] == "–"
    assert dict(zip(header, peer, strict=True))["÷ slurm"] == "1.00"
    assert "failed (3 done)" in failed


def test_the_page_says_what_each_was_told_and_which_goals_are_met() -> None:
    runs = [run(seconds=2.0), run(PEER, seconds=4.0)]
    machine = {"cpus": 2, "load": 0.5, "slots": 16, "slurm": "22.05"}
    text = page({"date": "today", "machine": machine, "versions": {"snakemake": "9"}, "goals": goals(runs)}, runs)
    assert "- callables: at most a third of the time of slurm: NOT met" in text
    assert "- callables: at most a third of the time of slurm, arrays: not measured" in text
    assert "- slurm: `--jobs=10`" in text


def test_the_peak_is_that_of_the_process_itself() -> None:
    code = "import time; kept = bytearray(50 << 20); time.sleep(0.3); raise SystemExit(3)"
    code, cpu, peak = wait(subprocess.Popen([sys.executable, "-c", code]), 30)
    assert code == 3
    assert 0 < cpu < 10
    assert 50 < peak < 80
    assert wait(subprocess.Popen(["sleep", "60"]), 0)[0] == -9
