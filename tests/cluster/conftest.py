"""A real Slurm for the session, and toy workflows that are driven through it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_slurm
from toy_workflow import Workflow


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than ten seconds; leave out with -m 'not slow'")


@pytest.fixture(scope="session")
def cluster() -> Iterator[tiny_slurm.Cluster]:
    if absent := tiny_slurm.missing():
        reason = f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Not below pytest's own folder: its paths are too long for Slurm's sockets, and it keeps old ones.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = tiny_slurm.Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        try:
            cluster.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def flow(tmp_path: Path, cluster: tiny_slurm.Cluster) -> Iterator[Workflow]:
    workflow = Workflow(tmp_path, cluster)
    yield workflow
    workflow.stop()
    cluster.query("scancel", "--quiet", "-u", str(os.getuid()))


@pytest.fixture
def local_flow(tmp_path: Path) -> Iterator[Workflow]:
    workflow = Workflow(tmp_path, None)
    yield workflow
    workflow.stop()
