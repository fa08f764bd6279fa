"""How jobs end, without a cluster: what a job makes of signals and failures, and the executor of results."""

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "workflow" / "executor"))

from snakemake_executor_plugin_submitit import job, status
from snakemake_executor_plugin_submitit.arrays import Work
from snakemake_executor_plugin_submitit.executor import Executor
from snakemake_executor_plugin_submitit.interruption import Interruption
from snakemake_executor_plugin_submitit.job import Call, Nested, forget_result
from snakemake_executor_plugin_submitit.resources import Request
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import ENDED, Slurm
from submitit.core.job_environment import SignalHandler
from submitit.core.utils import DelayedSubmission, JobPaths, temporary_save_path


class Reports:
    """An executor's surroundings for one job, and what it does there."""

    def __init__(self, work: Work, reachable: bool = True) -> None:
        self.works, self.closing, self.grace, self.done = {"job": work}, {}, 0, []
        self.settings = ExecutorSettings()
        self.logger = SimpleNamespace(info=self.done.append, warning=self.done.append)
        self.journal = SimpleNamespace(ended=lambda id: self.done.append(f"ended {id}"))
        self.backend = SimpleNamespace(
            alive=lambda state: state is not None and state not in ENDED,
            why=lambda work, state: str(state),
            cancel=lambda ids: self.done.append("cancel") or (set(ids) if reachable else set()),
            cancel_everything=lambda ids: set(ids) if reachable else set(),
        )

    def report_job_success(self, info: object) -> None:
        self.done.append("success")

    def ended(self, state: str | None) -> bool:
        states = None if state is None else {"5": state}
        return Executor.ended(self, SimpleNamespace(job="job", external_jobid=None), states, status.Listing())


def test_a_failing_squeue_is_no_verdict(tmp_path: Path) -> None:
    assert not Reports(Work("job", Request("r"), id="5", folder=tmp_path, note={"ranks": 1})).ended(None)


def test_a_job_that_slurm_would_start_again_is_cancelled_before_its_result_counts(tmp_path: Path) -> None:
    work = Work("job", Request("r"), id="5", folder=tmp_path, note={"ranks": 1})
    work.result().write_bytes(pickle.dumps(("success", None)))
    reports = Reports(work, reachable=False)
    assert not reports.ended("PENDING")
    assert reports.done == ["cancel"]
    for state, done in [("PENDING", ["cancel", "success"]), ("RUNNING", ["success"]), ("COMPLETED", ["success"])]:
        reports = Reports(work)
        assert reports.ended(state)
        assert reports.done == done


def test_what_could_not_be_cancelled_stays_in_the_journal(tmp_path: Path) -> None:
    work = Work("job", Request("r"), id="5")
    for reachable, done in [
        (True, ["ended 5", "Cancelled 1 jobs."]),
        (False, ["Cancelled 0 jobs.", "1 jobs could not be cancelled: the next start takes care of them."]),
    ]:
        reports = Reports(work, reachable)
        Executor.cancel_jobs(reports, [])
        assert reports.done == done


def test_cancel_tells_which_jobs_slurm_took_note_of(command: Path) -> None:
    write_command(command / "scancel", 'for id; do [ "$id" != 700 ] || exit 1; done')
    said = []
    slurm = Slurm(ExecutorSettings(max_array_size=1), None, said.append)
    ids = {f"{id:03}" for id in range(1000)}  # two calls of scancel, of which the second fails
    assert slurm.cancel(ids) == {id for id in ids if id < "500"}
    assert len(said) == 1


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs come before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def write_command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def interruption(tmp_path: Path) -> Iterator[Interruption]:
    """Of a job on Slurm, with submitit's handlers in place as they are in a job."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD)}
    requeued = []
    environment = SimpleNamespace(
        name=lambda: "slurm", job_id="5", global_rank=0, _requeue=requeued.append, requeued=requeued
    )
    submission = DelayedSubmission(Call("", [], [], {}, [], 1, {}, 120))
    submission.set_timeout(60, 3)
    handler = SignalHandler(environment, JobPaths(tmp_path, "5", 0), submission)
    signal.signal(signal.SIGUSR2, handler.checkpoint_and_try_requeue)
    yield Interruption(120)
    for number, action in kept.items():
        signal.signal(number, action)


class Broken:
    """Fails in the ways of a program whose helper process is gone."""

    def __init__(self, params: dict, **rest: object) -> None:
        self.how = params["how"]

    def __call__(self) -> None:
        if self.how == "raises":
            raise RuntimeError("DataLoader worker exited unexpectedly")
        if self.how == "exits":
            sys.exit(3)


@pytest.mark.parametrize("how", ["raises", "exits", "forgets its output"])
@pytest.mark.parametrize(
    ("state", "terminated", "code", "requeued"),
    [
        ("COMPLETING", False, 128 + signal.SIGTERM, []),  # the worker was first to hear of it
        ("PENDING", True, 128 + signal.SIGTERM, []),
        ("CANCELLED", True, 128 + signal.SIGTERM, []),
        ("RUNNING", True, -1, [3]),  # preemption with a time of grace
        ("RUNNING", False, None, []),
    ],
)
def test_what_fails_because_the_job_is_ended_is_no_result(
    interruption: Interruption,
    command: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    state: str,
    terminated: bool,
    code: int | None,
    requeued: list,
) -> None:
    write_command(command / "scontrol", f"echo JobId=5 JobState={state} Reason=None")
    interruption.terminated = terminated
    environment = SimpleNamespace(job_id="5", num_tasks=1, global_rank=0, paths=interruption.handler._job_paths)
    monkeypatch.setattr(job, "Interruption", lambda notice: interruption)
    monkeypatch.setattr(job, "JobEnvironment", lambda: environment)
    call = Call(f"{__name__}:Broken", [], ["missing"], {"how": how}, [], 1, {}, 120)
    with pytest.raises((RuntimeError, FileNotFoundError) if code is None else SystemExit) as failure:
        call()
    assert code is None or failure.value.code == code
    assert interruption.handler.env.requeued == requeued


def test_a_new_start_forgets_the_result_of_the_former(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path, "5", 1)
    paths.result_pickle.write_bytes(b"former")
    paths.result_pickle.with_suffix(".pkl.save_tmp").write_bytes(b"cut sho")
    forget_result(SimpleNamespace(paths=paths))
    assert not paths.result_pickle.exists()
    with temporary_save_path(paths.result_pickle) as temporary:  # submitit refuses where one lies already
        temporary.write_bytes(b"new")


def test_only_callables_get_the_notice() -> None:
    async def prepare() -> None:
        pass

    rule = SimpleNamespace(
        name="r", workflow=SimpleNamespace(deployment_settings=SimpleNamespace(deployment_method=())), conda_env=None
    )
    notices = {}
    for call in ("a:B", ""):
        job = SimpleNamespace(
            rule=rule, params={"call": call}, is_group=lambda: False, is_shadow=False, prepare=prepare, threads=1
        )
        job.input, job.output, job.log, job.resources = [], [], [], {}
        executor = SimpleNamespace(
            settings=ExecutorSettings(),
            workflow=SimpleNamespace(async_run=lambda coroutine: coroutine.close()),
            nested=lambda job, notice: Nested("", notice),
        )
        work = Work(job, Request("r", minutes=60))
        assert Executor.prepare(executor, work)
        notices[call] = work.task.notice
    assert notices == {"a:B": 120, "": 1}
