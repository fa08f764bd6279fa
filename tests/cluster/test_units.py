"""What needs no cluster: resources, the journal, verdicts, the lock of a dead driver."""

import json
import os
import pickle
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "workflow" / "executor"))

from snakemake_executor_plugin_submitit import driver, status
from snakemake_executor_plugin_submitit.arrays import Work, batches, plain
from snakemake_executor_plugin_submitit.journal import Journal, comparable
from snakemake_executor_plugin_submitit.local import visible_gpus
from snakemake_executor_plugin_submitit.resources import Request, request_of, signal_delay, slurm_parameters
from snakemake_executor_plugin_submitit.slurm import ENDED
from snakemake_interface_common.exceptions import WorkflowError


def parameters(in_process: bool = True, **resources: object) -> dict:
    return slurm_parameters(request_of("rule", 2, resources, in_process), "token", 10, 120, "")


def test_ranks_are_one_per_gpu_and_node_for_callables_only() -> None:
    ranks = parameters(gpu=2, nodes=2)
    assert (ranks["nodes"], ranks["ntasks_per_node"], ranks["gpus_per_node"]) == (2, 2, 2)
    assert "--kill-on-bad-exit=1" in ranks["srun_args"]
    nested = parameters(in_process=False, gpu=2, nodes=2)
    assert (nested["nodes"], nested["ntasks_per_node"], nested["gpus_per_node"]) == (2, 1, 2)
    assert nested["srun_args"][1:] == ["--nodes=1", "--ntasks=1"]
    mpi = parameters(in_process=False, tasks=8, nodes=2)
    assert (mpi["ntasks_per_node"], mpi["srun_args"][1:]) == (4, ["--nodes=1", "--ntasks=1"])


def test_every_rank_has_a_result_of_its_own() -> None:
    assert request_of("rule", 1, {"gpu": 2, "nodes": 2}, True).ranks == 4
    assert request_of("rule", 1, {"gpu": 2, "nodes": 2}, False).ranks == 1


def test_memory_per_cpu_replaces_the_default_memory() -> None:
    assert parameters(mem_mb=100)["additional_parameters"] == {"requeue": True, "mem": "100M"}
    per_cpu = parameters(mem_mb=100, mem_mb_per_cpu=50)
    assert per_cpu["additional_parameters"] == {"requeue": True, "mem-per-cpu": "50M"}


def test_extra_options_are_long_ones() -> None:
    request = request_of("rule", 1, {"slurm_extra": "--nice=5 --exclude 'n[1-2]' --exclusive"}, True)
    assert request.extra == (("nice", "5"), ("exclude", "n[1-2]"), ("exclusive", True))
    with pytest.raises(WorkflowError, match="long options such as --nice=100, not '-p'"):
        request_of("rule", 1, {"slurm_extra": "-p main"}, True)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"gpu": "one"}, "resource gpu must be a whole number, not 'one'"),
        ({"tasks": 3, "nodes": 2}, "tasks=3 must be a multiple of nodes=2"),
    ],
)
def test_resources_that_make_no_sense_are_refused(resources: dict, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        request_of("rule", 1, resources, True)


def test_the_notice_never_fills_a_short_job() -> None:
    assert [signal_delay(minutes, 120) for minutes in (1, 4, 60)] == [15, 60, 120]


def test_equal_requests_share_an_array_up_to_its_size() -> None:
    works = [Work(None, Request(name)) for name in "aabaa"]
    assert [[work.request.name for work in batch] for batch in batches(works, 3)] == [["a", "a", "a"], ["a"], ["b"]]


def test_parameters_of_callables_are_plain() -> None:
    assert plain({"a": (1, Path("x"))}, "params") == {"a": [1, "x"]}
    with pytest.raises(WorkflowError, match=r"params\.model is a object"):
        plain(object(), "params.model")


def test_fingerprints_do_not_depend_on_addresses() -> None:
    assert comparable({"a": [object(), Path("x"), {1: None}]}) == {"a": ["object", "x", {"1": None}]}


def test_the_journal_tells_what_is_open_even_after_a_line_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    note = {"backend": "slurm", "folder": "f"}
    journal.intend("t1", [{"a": "1"}, {"b": "2"}, {"c": "3"}], [note] * 3)
    journal.submitted("t1", "7", array=True)
    journal.ended("7_1")
    journal.intend("t2", [{"d": "4"}], [note])
    journal.intend("t3", [{"e": "5"}], [note])
    journal.ended(None, "t3")
    with path.open("a") as file:
        file.write('{"token": "t4", "jo')
    for _ in range(2):  # reading writes it anew
        opened = {(record.id, *record.members) for record in Journal(path).open}
        assert opened == {("7_0", "a"), ("7_2", "c"), (None, "d")}


def verdict(work: Work, state: str | None, grace: float = 0) -> status.Verdict | None:
    alive = lambda state: state is not None and state not in ENDED  # noqa: E731
    return status.judge(work, state, alive, grace, lambda work, state: str(state), status.Listing())


def test_verdicts(tmp_path: Path) -> None:
    work = Work(None, Request("r"), id="5", folder=tmp_path, note={"ranks": 2})
    for state in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STATE_OF_2030"):
        assert verdict(work, state) is None
    assert verdict(work, "NODE_FAIL", grace=60) is None
    assert work.gone is not None
    assert verdict(work, "PENDING") is None
    assert work.gone is None
    assert "ended without a result: None" in verdict(work, None).error
    work.result(0).write_bytes(pickle.dumps(("success", None)))
    assert verdict(work, "RUNNING") is None
    work.result(1).write_bytes(pickle.dumps(("error", "Traceback\nValueError: no")))
    assert verdict(work, "RUNNING").error.startswith("ValueError: no")
    work.result(1).write_bytes(pickle.dumps(("success", None)))
    assert verdict(work, None).error is None


@pytest.mark.parametrize(
    ("host", "lives", "removed"), [("here", False, True), ("here", True, False), ("x", False, False)]
)
def test_only_the_lock_of_a_driver_that_is_known_to_be_dead_is_removed(
    tmp_path: Path, host: str, lives: bool, removed: bool
) -> None:
    lock = tmp_path / "0.output.lock"
    lock.touch()
    driver.note_driver(tmp_path, [str(lock)])
    note = json.loads((tmp_path / "driver.json").read_text())
    assert note["pid"] == os.getpid()
    note["host"] = socket.gethostname() if host == "here" else host
    note["started"] -= 0 if lives else 1000
    (tmp_path / "driver.json").write_text(json.dumps(note))
    driver.forget_dead_driver(tmp_path)
    assert lock.exists() != removed


def test_visible_gpus_are_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == [3, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6b")
    with pytest.raises(WorkflowError, match="takes indices such as 0,1"):
        visible_gpus()


def test_a_failing_squeue_is_no_verdict(tmp_path: Path) -> None:
    from snakemake_executor_plugin_submitit.executor import Executor

    work = Work("job", Request("r"), id="5", folder=tmp_path, note={"ranks": 1})
    backend = SimpleNamespace(alive=lambda state: False, why=lambda work, state: "gone")
    executor = SimpleNamespace(works={"job": work}, backend=backend, grace=0)
    assert not Executor.ended(executor, SimpleNamespace(job="job"), None, status.Listing())
