"""What becomes of a former driver's jobs, and what Slurm is asked for: no cluster, but real files and processes."""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "workflow" / "executor"))

from snakemake_executor_plugin_submitit import arrays, attach
from snakemake_executor_plugin_submitit.job import Call
from snakemake_executor_plugin_submitit.journal import Journal, Record, fingerprint
from snakemake_executor_plugin_submitit.local import Local
from snakemake_executor_plugin_submitit.resources import Request, gpus_in, request_of, slurm_parameters
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.slurm import Refused, Slurm
from snakemake_interface_common.exceptions import WorkflowError
from toy_workflow import Workflow

HERE = socket.gethostname()


@pytest.fixture
def stranger() -> Iterator[psutil.Process]:
    """A process that has nothing to do with any workflow."""
    process = subprocess.Popen(["sleep", "60"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def survives(process: psutil.Process) -> bool:
    try:
        process.wait(0.3)
        return False
    except psutil.TimeoutExpired:
        return True


class File(str):
    """As much of a file of Snakemake as its times take."""

    async def exists(self) -> bool:
        return Path(self).exists()

    async def is_newer(self, time: float) -> bool:
        return not self.startswith("ancient") and Path(self).stat().st_mtime > time


class Job:
    """As much of a job of Snakemake as the executor looks at."""

    def __init__(self, input: list[str], output: list[str], **params: Any) -> None:
        self.rule = SimpleNamespace(name="rule")
        self.input, self.output = [File(path) for path in input], [File(path) for path in output]
        self.params, self.non_derived_params = params, list(params.values())
        self.wildcards_dict: dict[str, str] = {}

    def is_group(self) -> bool:
        return False

    @property
    async def output_mintime(self) -> float:
        return min(Path(path).stat().st_mtime for path in self.output)


class Driver:
    """An executor around a back end, the local one by default, that starts with the journal in the folder."""

    def __init__(self, folder: Path, backend: Any = None, job: Job | None = None, **reasons: bool) -> None:
        reason = {"forced": False, "code_changed": False, "software_stack_changed": False} | reasons
        self.journal = Journal(folder / "journal.jsonl")
        self.backend = backend or Local(SimpleNamespace(), self.journal, print)
        self.dag = SimpleNamespace(jobs=[job] if job else [], reason=lambda job: SimpleNamespace(**reason))
        self.dag.needrun = lambda job: True
        settings = SimpleNamespace(latency_wait=5)
        self.workflow = SimpleNamespace(async_run=asyncio.run, execution_settings=settings)
        self.logger = logging.getLogger("driver")
        self.states_at_start: dict[str, str] | None = None
        self.grace = 0.0

    def attach(self, job: Job) -> int:
        """Tells how many jobs were taken over: the one, or none."""
        attached, fresh = attach.attach(self, [arrays.Work(job, Request("rule"), members=arrays.members_of(job))])
        assert len(attached) + len(fresh) == 1
        return len(attached)


def leave(folder: Path, job: Job, id: str = "5", result: Any = None, age: float = 60, **note: Any) -> None:
    """A former driver's job in the journal, and its result."""
    journal = Journal(folder / "journal.jsonl")
    note = {"backend": "local", "host": HERE, "folder": str(folder), "ranks": 1, "output": [*job.output]} | note
    journal.intend("token", [arrays.members_of(job)], [note])
    journal.submitted("token", id, array=False, started=note.get("started", 0))
    if result is not None:
        path = folder / f"{id}_0_result.pkl"
        path.write_bytes(pickle.dumps(result))
        os.utime(path, (time.time() - age,) * 2)


def touch(path: Path, age: float) -> str:
    path.touch()
    os.utime(path, (time.time() - age,) * 2)
    return str(path)


# ---- the local back end


def test_a_process_with_a_reused_number_is_not_killed(tmp_path: Path, stranger: psutil.Process) -> None:
    job = Job([], ["out"], epochs=1)
    leave(tmp_path, job, str(stranger.pid), started=stranger.create_time() - 1000)
    driver = Driver(tmp_path)
    assert driver.attach(Job([], ["out"], epochs=2)) == 0
    driver.backend.cancel([str(stranger.pid)])
    driver.backend.cancel_everything([str(stranger.pid)])
    assert survives(stranger)
    assert driver.journal.open == []


def test_a_job_of_the_former_driver_is_killed(tmp_path: Path, stranger: psutil.Process) -> None:
    leave(tmp_path, Job([], ["out"], epochs=1), str(stranger.pid), started=stranger.create_time())
    assert Driver(tmp_path).attach(Job([], ["out"], epochs=2)) == 0
    assert stranger.status() == psutil.STATUS_ZOMBIE


def test_a_job_on_another_machine_is_neither_killed_nor_taken_for_gone(
    tmp_path: Path, stranger: psutil.Process
) -> None:
    job = Job([], [str(tmp_path / "out")])
    leave(tmp_path, job, str(stranger.pid), started=stranger.create_time(), host="elsewhere")
    driver = Driver(tmp_path, None, job)
    attach.settle(driver)
    with pytest.raises(WorkflowError, match=rf"job {stranger.pid} .* may still run on elsewhere: go on there"):
        driver.attach(job)
    driver.backend.cancel([str(stranger.pid)])
    assert survives(stranger)
    assert len(Journal(tmp_path / "journal.jsonl").open) == 1
    driver.dag.needrun = lambda job: False  # its outputs are there, but perhaps half written
    with pytest.raises(WorkflowError, match="may still run on elsewhere"):
        attach.settle(driver)


def test_a_job_that_ended_on_another_machine_is_taken_over(tmp_path: Path) -> None:
    job = Job([], [touch(tmp_path / "out", 60)])
    leave(tmp_path, job, host="elsewhere", result=("success", None))
    assert Driver(tmp_path).attach(job) == 1


# ---- an ended job's outputs


def test_an_ended_job_is_taken_over_only_with_outputs_newer_than_its_inputs(tmp_path: Path) -> None:
    def taken(job: Job, age: float = 60, **reasons: bool) -> int:
        (tmp_path / "journal.jsonl").unlink(missing_ok=True)
        leave(tmp_path, job, result=("success", None), age=age)
        return Driver(tmp_path, **reasons).attach(job)

    job = Job([touch(tmp_path / "in", 100)], [touch(tmp_path / "out", 50)])
    assert taken(job) == 1
    assert taken(job, forced=True) == 0
    assert taken(job, code_changed=True) == 0
    touch(tmp_path / "in", 10)
    assert taken(job) == 0
    (tmp_path / "out").unlink()
    assert taken(job) == 0
    assert taken(job, age=1) == 1  # the file system may not show it yet
    assert taken(Job([str(tmp_path / "in")], [])) == 0


def test_a_live_job_is_taken_over_even_if_forced(tmp_path: Path, stranger: psutil.Process) -> None:
    job = Job([], ["out"])
    leave(tmp_path, job, str(stranger.pid), started=stranger.create_time())
    driver = Driver(tmp_path, None, job, forced=True)
    attach.settle(driver)
    assert driver.attach(job) == 1


def test_an_error_of_one_rank_is_no_end_of_the_others(tmp_path: Path) -> None:
    job = Job([], [str(tmp_path / "out")])
    leave(tmp_path, job, backend="slurm", ranks=2, result=("error", "killed"))
    driver = Driver(tmp_path, Cluster({"5": "RUNNING"}), job)
    attach.settle(driver)
    assert driver.attach(job) == 1


# ---- the grace of jobs that seem to be gone


class Cluster:
    """Answers each question for states with the next of those given; the last stays."""

    name = "slurm"

    def __init__(self, *answers: dict[str, str] | None, tokens: tuple[list[str] | None, ...] = ([],)) -> None:
        self.answers, self.tokens = list(answers), list(tokens)
        self.cancelled: list[str] = []

    def states(self) -> dict[str, str] | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def by_token(self, tokens: set[str]) -> list[str] | None:
        if not tokens:
            return []
        return self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]

    def alive(self, state: str | None) -> bool:
        return state == "RUNNING"

    def why(self, work: arrays.Work, state: str | None) -> str:
        return str(state)

    def cancel(self, ids: Any) -> None:
        self.cancelled += ids


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of waiting pass at once."""
    now = [time.monotonic()]
    monkeypatch.setattr(attach.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(attach.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


@pytest.mark.parametrize(
    ("answers", "taken"),
    [
        (({"5": "NODE_FAIL"}, {"5": "NODE_FAIL"}, {"5": "RUNNING"}), 1),  # requeued within the grace
        (({"5": "NODE_FAIL"}, None), 1),  # nobody says that it is gone
        (({},), 0),
    ],
)
def test_a_job_is_gone_only_after_the_grace(tmp_path: Path, no_pauses: None, answers: tuple, taken: int) -> None:
    job = Job([], [str(tmp_path / "out")])
    leave(tmp_path, job, backend="slurm")
    driver = Driver(tmp_path, Cluster(*answers), job)
    driver.grace = 10
    attach.settle(driver)
    assert driver.attach(job) == taken


def test_waiting_for_a_job_whose_outputs_are_there_is_said(
    tmp_path: Path, no_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job([], [touch(tmp_path / "out", 1)])
    leave(tmp_path, job, backend="slurm")
    driver = Driver(tmp_path, Cluster({"5": "RUNNING"}, {"5": "RUNNING"}, {}), job)
    driver.dag.needrun = lambda job: False
    with caplog.at_level("INFO"), pytest.raises(WorkflowError, match=r"left .*out but failed: delete them"):
        attach.settle(driver)
    assert caplog.text.count(f"Waiting for job 5 of a former driver, which still makes {tmp_path}/out") == 1


# ---- no answer is not the answer "none"


def lost(folder: Path, job: Job) -> None:
    """A submission whose driver died before it knew the id."""
    note = {"backend": "slurm", "folder": str(folder), "ranks": 1, "output": [*job.output]}
    Journal(folder / "journal.jsonl").intend("token", [arrays.members_of(job)], [note])


def test_a_lost_submission_waits_until_squeue_tells_what_became_of_it(tmp_path: Path, no_pauses: None) -> None:
    job = Job([], ["out"])
    lost(tmp_path, job)
    driver = Driver(tmp_path, Cluster({}, tokens=(None, None, ["7"])), job)
    assert driver.attach(job) == 0
    assert driver.backend.cancelled == ["7"]
    assert driver.journal.open == []


def test_a_lost_submission_is_not_doubled_while_squeue_is_silent(tmp_path: Path, no_pauses: None) -> None:
    job = Job([], ["out"])
    lost(tmp_path, job)
    driver = Driver(tmp_path, Cluster({}, tokens=(None,)), job)
    with pytest.raises(WorkflowError, match="squeue does not tell what became"):
        driver.attach(job)
    assert len(Journal(tmp_path / "journal.jsonl").open) == 1


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Programs of these names, found first."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")


def slurm(folder: Path) -> Slurm:
    settings = ExecutorSettings(folder=folder / "jobs", max_array_size=10)
    return Slurm(settings, Journal(folder / "journal.jsonl"), lambda words: None)


def test_after_a_failed_sbatch_nothing_is_submitted_until_squeue_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = f"sed 's/^/7|/' {tmp_path}/tokens"
    commands(
        tmp_path,
        monkeypatch,
        srun="",
        sbatch=f"grep -oP 'comment=\\K\\S+' ${{@: -1}} | tr -d '\"' >> {tmp_path}/tokens; echo timed out >&2; exit 1",
        squeue="exit 1",
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
    )
    backend = slurm(tmp_path)
    task = Call("m:C", [], ["out"], {}, [], 1, {}, notice=60)
    work = arrays.Work(Job([], ["out"]), request_of("rule", 1, {}, True), task=task, members={"a": "1"})
    for _ in range(2):
        with pytest.raises(Refused, match="Slurm does not answer whether it took the jobs"):
            backend.submit_once([work])
    assert len((tmp_path / "tokens").read_text().split()) == 1
    assert [record.id for record in Journal(tmp_path / "journal.jsonl").open] == [None]
    assert not (tmp_path / "cancelled").exists()
    commands(tmp_path, monkeypatch, squeue=tokens)
    with pytest.raises(Refused, match="timed out"):
        backend.submit_once([work])
    assert (tmp_path / "cancelled").read_text() == "--quiet 7\n" * 2
    assert Journal(tmp_path / "journal.jsonl").open == []


def test_slurm_is_asked_for_all_jobs_whatever_the_shell_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = ("SQUEUE_PARTITION", "SQUEUE_FORMAT", "SCANCEL_STATE", "SCONTROL_ALL", "SLURM_CLUSTERS", "SLURM_JOB_ID")
    for name in filters:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    note = (
        f'echo "$0 $@ $(env | grep -oE "^(SLURM|SQUEUE|SCANCEL|SCONTROL)_[A-Z_]*=" | tr -d "\\n")" >> {tmp_path}/asked'
    )
    commands(tmp_path, monkeypatch, squeue=f'{note}; echo "4_1|RUNNING"', scancel=note, scontrol=note)
    backend = slurm(tmp_path)
    assert backend.states() == {"4_1": "RUNNING"}
    assert backend.by_token({"RUNNING"}) == ["4_1"]
    backend.cancel(["4"])
    backend.why(arrays.Work(None, None, id="4"), None)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 4
    assert all(line.endswith(" SLURM_CONF=") for line in asked)
    assert all("squeue --all " in line for line in asked[:2])


# ---- the journal


def test_the_journal_drops_what_is_over_and_left_nothing(tmp_path: Path) -> None:
    over = Job([], [str(tmp_path / "over")])
    judged = Job([], [touch(tmp_path / "judged", 1)])
    running = Job([], [str(tmp_path / "running")])
    failing = Job([], [str(tmp_path / "failing")])
    for id, job in zip("1234", (over, judged, running, failing), strict=True):
        leave(tmp_path, job, id, backend="slurm")
    leave(tmp_path, Job([], ["other"]), "5", host="elsewhere")
    wanted = Job([], [str(tmp_path / "wanted")])

    def left(answer: dict[str, str] | None) -> list[str]:
        attach.settle(Driver(tmp_path, Cluster(answer), wanted))
        return [record.id for record in Journal(tmp_path / "journal.jsonl").open]

    assert left(None) == ["1", "2", "3", "4", "5"]
    assert left({"3": "RUNNING", "4": "NODE_FAIL"}) == ["2", "3", "4", "5"]


def test_a_long_journal_is_read_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    note = {"backend": "slurm", "folder": "f"}
    with journal.path.open("w"):
        journal.intend("t", [{str(i): "1"} for i in range(20_000)], [note] * 20_000)
        journal.submitted("t", "7", array=True)
    with journal.path.open("a") as file:
        file.writelines(f'{{"end": "7_{i}"}}\n' for i in range(19_999))
    start = time.perf_counter()
    assert [record.id for record in Journal(journal.path).open] == ["7_19999"]
    assert time.perf_counter() - start < 3  # quadratic, it takes more than ten


def test_records_are_told_apart_by_identity() -> None:
    assert Record("t", None, {}) != Record("t", None, {})


def test_a_fingerprint_is_of_what_snakemake_compares() -> None:
    job = Job(["b", "a"], ["out"], spec="x", kinds={"p", "q", "r"})
    same = Job(["a", "b"], ["out"], kinds={"r", "q", "p"}, spec="x")
    same.params["data"] = "/elsewhere"  # derived: known to params, but not compared
    assert fingerprint(job) == fingerprint(same)
    assert fingerprint(job) != fingerprint(Job(["a", "b"], ["out"], spec="y", kinds={"p", "q", "r"}))
    assert fingerprint(job) != fingerprint(Job(["a"], ["out"], spec="x", kinds={"p", "q", "r"}))


def test_folders_are_listed_once_for_many_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job([], [touch(tmp_path / f"out{i}", 1)]) for i in range(20)]
    for i, job in enumerate(jobs):
        leave(tmp_path, job, str(i), result=("success", None), backend="slurm")
    driver = Driver(tmp_path, Cluster({}))
    listed: list[Path] = []
    listing = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listing(path))
    attached, _ = attach.attach(driver, [arrays.Work(j, Request("rule"), members=arrays.members_of(j)) for j in jobs])
    assert (len(attached), len(listed)) == (20, 1)


# ---- resources


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        (None, 0),
        ("gpu", 1),
        ("gpu:4", 4),
        ("gpu:a100", 1),
        ("gpu:a100:4", 4),
        ("gpu:1g.5gb:2", 2),
        ("nvme:1,gpu:a100:2,gpu:h100:1", 3),
        ("shard:4", 0),
    ],
)
def test_gpus_are_counted_in_gres(gres: str | None, count: int) -> None:
    assert gpus_in(gres) == count


def test_typed_gpus_have_a_rank_each() -> None:
    request = request_of("rule", 1, {"gres": "gpu:a100:4", "gpu": 0, "nodes": 2}, True)
    assert (request.gpu, request.ranks) == (4, 8)
    given = slurm_parameters(request, "token", 10, 120, "")
    assert (given["gres"], given["ntasks_per_node"], "gpus_per_node" in given) == ("gpu:a100:4", 4, False)
    nested = request_of("rule", 1, {"gres": "gpu:a100:4"}, False)
    assert (nested.gpu, nested.ranks, nested.tasks) == (4, 1, 1)
    with pytest.raises(WorkflowError, match="gpu=1 and gres=gpu:a100:4 both ask for GPUs: set gpu to 0"):
        request_of("rule", 1, {"gres": "gpu:a100:4", "gpu": 1}, True)


@pytest.mark.parametrize("resources", [{"gpu": 2}, {"gres": "gpu:a100:2"}, {"nodes": 2}])
def test_a_callable_with_ranks_is_refused_where_it_would_be_a_command(resources: dict) -> None:
    job = Job([], ["out"], call="m:C")
    job.threads, job.resources = 1, resources
    with pytest.raises(WorkflowError, match="rule rule: its GPUs, nodes or tasks are for several ranks"):
        arrays.refuse_lonely_ranks(job)
    group = SimpleNamespace(is_group=lambda: True, jobs=[job])
    with pytest.raises(WorkflowError, match="ask for one GPU"):
        arrays.refuse_lonely_ranks(group)
    command = Job([], ["out"])
    command.threads, command.resources = 1, resources
    arrays.refuse_lonely_ranks(command)
    job.resources = {"gpu": 1}
    arrays.refuse_lonely_ranks(group)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--comment=x", "must not set --comment: the executor needs its own"),
        ("--nice=1 --array 0-3", "must not set --array"),
        ("--no-requeue", "must not set --no-requeue"),
        ("--job_name=x", "must not set --job_name"),
        ("--out=x", "must not set --out:"),
        ("--time=5", "must not set --time: use the resource runtime"),
        ("--ntasks=2", "must not set --ntasks: use the resource tasks"),
        ("--gpus-per-task=1", "must not set --gpus-per-task: use the resource gpu"),
    ],
)
def test_slurm_extra_cannot_undo_what_the_executor_needs(options: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        request_of("rule", 1, {"slurm_extra": options}, True)


def test_slurm_extra_may_set_all_else() -> None:
    options = "--gres-flags=enforce-binding --ntasks-per-core=1 --exclusive --mem-bind=local --hold"
    assert len(request_of("rule", 1, {"slurm_extra": options}, True).extra) == 5


# ---- a whole driver, on this machine

SUM = """
    configfile: "config.json"
    rule all:
        input: "sum.json"
    rule sum:
        input: "in.txt"
        output: "sum.json"
        params:
            call=lambda wildcards, output: "toy:Counter",
            steps=1,
            until=lambda wildcards, output: config["until"],
        shell: "false"
"""


def test_a_job_outlives_a_change_of_what_snakemake_does_not_compare_but_no_newer_input(local_flow: Workflow) -> None:
    local_flow.write(SUM)
    local_flow.path("in.txt").touch()
    local_flow.path("config.json").write_text('{"until": "go"}')
    local_flow.start(submitit_backend="local")
    local_flow.wait_for(lambda: local_flow.starts("sum") == 1, what="the job")
    local_flow.drivers[0].kill()
    local_flow.drivers[0].wait()
    local_flow.path("config.json").write_text('{"until": "elsewhere/go"}')
    second = local_flow.start(submitit_backend="local")
    local_flow.wait_for(lambda: "Attached to job" in local_flow.said(), what="the second driver")
    second.kill()
    second.wait()
    local_flow.path("go").touch()
    local_flow.wait_for(lambda: local_flow.path("sum.json").exists(), what="the end")
    time.sleep(1)
    local_flow.path("in.txt").touch()
    local_flow.path("elsewhere").mkdir()
    local_flow.path("elsewhere/go").touch()
    said = local_flow.run(submitit_backend="local")
    assert "has ended, but an input is newer than its outputs: it is submitted anew" in said
    assert local_flow.starts("sum") == 2


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", 1),
        ("sbatch: error: invalid partition specified: gpu", 1),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", 1),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", 1),
        ("sbatch: error: Socket timed out on send/recv operation", 3),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", 3),
    ],
)
def test_what_time_does_not_change_is_refused_at_once(tmp_path, monkeypatch, words: str, tries: int) -> None:
    asked = []

    def refused(works: list) -> None:
        asked.append(works)
        raise Refused(words)

    commands(tmp_path, monkeypatch, srun="", sbatch="", squeue="", scancel="")
    backend = slurm(tmp_path)
    backend.settings.submit_retries = 2
    monkeypatch.setattr(backend, "submit_once", refused)
    monkeypatch.setattr("snakemake_executor_plugin_submitit.slurm.time.sleep", lambda seconds: None)
    with pytest.raises(Refused):
        backend.submit([arrays.Work(Job([], ["out"]), request_of("rule", 1, {}, True))])
    assert len(asked) == tries
