"""What needs no cluster: resources, the journal, verdicts, the lock of a dead driver."""

import json
import os
import pickle
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "workflow" / "executor"))

from snakemake_executor_plugin_submitit import driver, status
from snakemake_executor_plugin_submitit.arrays import Work, batches, plain
from snakemake_executor_plugin_submitit.executor import Executor
from snakemake_executor_plugin_submitit.journal import Journal, comparable
from snakemake_executor_plugin_submitit.local import visible_gpus
from snakemake_executor_plugin_submitit.resources import Request, request_of, signal_delay, slurm_parameters
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
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
        ({"gpu": "one"}, "resource gpu must be a whole number of at least 0, not 'one'"),
        ({"runtime": 1.5}, "resource runtime must be a whole number of at least 0, not 1.5"),
        ({"mem_mb": -1}, "resource mem_mb must be a whole number of at least 0, not -1"),
        ({"nodes": 0}, "resource nodes must be a whole number of at least 1, not 0"),
        ({"tasks": True}, "resource tasks must be a whole number of at least 1, not True"),
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
    work.result(1).write_bytes(pickle.dumps(("success", None)))
    assert verdict(work, "RUNNING").error is None


def test_an_error_of_one_of_several_ranks_waits_for_the_end_and_its_cause(tmp_path: Path) -> None:
    work = Work(None, Request("r"), id="5", folder=tmp_path, note={"ranks": 2})
    work.result(1).write_bytes(pickle.dumps(("error", "Traceback\nConnectionError: peer")))
    for state in ("RUNNING", "PENDING", "COMPLETING"):
        assert verdict(work, state) is None
    assert verdict(work, "NODE_FAIL", grace=60) is None  # it may yet be requeued
    assert verdict(work, "OUT_OF_MEMORY").error.startswith("OUT_OF_MEMORY; one of 2 ranks said: ConnectionError: peer")
    work.gone = None
    assert verdict(work, "FAILED", grace=60) is None  # the other rank was killed: why is not known yet
    work.result(0).write_bytes(pickle.dumps(("error", "ValueError: no")))
    assert verdict(work, "NODE_FAIL", grace=60) is None
    assert "one of 2 ranks said: ValueError: no" in verdict(work, "FAILED", grace=60).error
    alone = Work(None, Request("r"), id="5", folder=tmp_path, note={"ranks": 1})
    assert verdict(alone, "RUNNING").error.startswith("ValueError: no")


def test_a_result_runs_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "harm"),)

    work = Work(None, Request("r"), id="5", folder=tmp_path, note={"ranks": 1})
    work.result().write_bytes(pickle.dumps(("success", Harmful())))
    assert verdict(work, "RUNNING") is None
    assert not (tmp_path / "harm").exists()


def test_the_folder_is_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    Executor.make_folder(SimpleNamespace(settings=ExecutorSettings(folder=folder)))
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(WorkflowError, match="file must be a folder of your own"):
        Executor.make_folder(SimpleNamespace(settings=ExecutorSettings(folder=tmp_path / "file")))


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


@pytest.mark.parametrize(
    ("option", "host"), [("--directory={}", "here"), ("-d {}", "here"), ("--unlock -d {}", "elsewhere")]
)
def test_the_dead_driver_is_looked_for_where_snakemake_will_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, host: str
) -> None:
    folder = tmp_path / ".snakemake/submitit"
    folder.mkdir(parents=True)
    driver.note_driver(folder, [])
    note = json.loads((folder / "driver.json").read_text())
    (folder / "driver.json").write_text(json.dumps({**note, "started": 0} | ({} if host == "here" else {"host": host})))
    monkeypatch.setattr(sys, "argv", ["snakemake", "--jobs", "1", *option.format(tmp_path).split(), "all"])
    ExecutorSettings()
    assert not (folder / "driver.json").exists()


def test_one_driver_a_folder(tmp_path: Path) -> None:
    locks = [tmp_path / "0.lock", tmp_path / "1.lock"]
    for lock in locks:
        lock.touch()
    driver.note_driver(tmp_path, locks[:1])
    driver.note_driver(tmp_path, locks[:1])  # its own note is no obstacle
    note = json.loads((tmp_path / "driver.json").read_text())

    def name(**other: object) -> None:
        (tmp_path / "driver.json").write_text(json.dumps({**note, **other}))

    parent = {"pid": os.getppid(), "started": psutil.Process(os.getppid()).create_time()}
    name(**parent)
    with pytest.raises(WorkflowError, match=rf"works in this folder: process {os.getppid()} on .*, started 2"):
        driver.note_driver(tmp_path, locks[1:])
    driver.forget_driver(tmp_path)  # not ours to forget
    assert (tmp_path / "driver.json").exists()
    name(**parent, host="elsewhere")
    with pytest.raises(WorkflowError, match=r"on elsewhere, started .* repeat this command with --unlock"):
        driver.note_driver(tmp_path, locks[1:])
    driver.forget_dead_driver(tmp_path)
    assert locks[0].exists()
    driver.forget_dead_driver(tmp_path, unlock=True)
    driver.note_driver(tmp_path, locks[1:])
    name(**parent)
    driver.forget_dead_driver(tmp_path, unlock=True)  # nobody can vouch for the death of one that lives
    assert (tmp_path / "driver.json").exists()
    name(pid=os.getppid(), started=0)
    driver.note_driver(tmp_path, locks[1:])
    driver.forget_driver(tmp_path)
    assert not (tmp_path / "driver.json").exists()


def test_visible_gpus_are_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == [3, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6b")
    with pytest.raises(WorkflowError, match="takes indices such as 0,1"):
        visible_gpus()
