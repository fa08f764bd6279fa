"""The benchmark of executors, in small."""

import sys
from pathlib import Path

import tiny_slurm

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from executors import CALLABLE, goals
from measure import measure


def test_a_run_is_measured(cluster: tiny_slurm.Cluster, tmp_path: Path) -> None:
    run = measure(CALLABLE, 6, cluster, tmp_path / "run")
    assert run.succeeded, (tmp_path / "run" / "driver.log").read_text()
    assert run.calls == {"scontrol": 1, "sbatch": 1, "squeue": run.polls}
    assert run.polls >= 1
    assert run.calls_of_jobs["srun"] == 6
    assert 0 < run.seconds < run.wall
    assert run.rss_mb > 30
    assert list(goals([run]).values()) == [True, True, None, None]
