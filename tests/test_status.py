"""What a grid's files tell of it: one folder for each state, time left by its formula, and no torch."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from fakes import CONFIG
from test_plan import rates, study
from tiny import TRAIN

from linvit.config import Study, load_study
from linvit.files import write_sealed
from linvit.grid import expand
from linvit.screen import text
from linvit.status import SILENT, UNUSABLE, Look, State, _share, last_error, status_of
from linvit.watch import Standing, duration

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nRuntimeError: worn out\n'


def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def grid(tmp_path) -> Study:
    """Four runs of three epochs; with copies, a source that is fetched."""
    return study(tmp_path)


def begun(study: Study, number: int, *, age: float = 0.0, **standing) -> Path:
    """A run's folder as it looks once training has begun, last changed so many seconds ago."""
    name, spec = list(expand(study).items())[number]
    folder = Path(study.results, "runs", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(spec.to_json() + "\n")
    if standing:
        fields = {key: value for key, value in standing.items() if key not in ("error", "interrupted", "host", "pid")}
        ended = {key: value for key, value in standing.items() if key not in fields}
        (folder / "progress.json").write_text(json.dumps(vars(Standing(**{"epochs": 3, "steps": 4} | fields)) | ended))
    then = time.time() - age
    for path in folder.iterdir():
        os.utime(path, (then, then))
    return folder


def finish(study: Study, number: int, seconds: float = 12.0) -> None:
    folder = begun(study, number)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({"spec": spec, "wall_seconds": seconds}))


def states(study: Study, **options) -> list[str]:
    return [look.state for look in status_of(study, **options).runs]


def told(study: Study) -> tuple[str, str]:
    """The first run's state, and why."""
    look = status_of(study).runs[0]
    return look.state, look.note


def test_every_state_is_told_from_a_runs_folder_alone(grid):
    finish(grid, 0)
    begun(grid, 1, epoch=1, step=2)
    begun(grid, 2, epoch=1, age=SILENT + 3600)
    found = status_of(grid)
    assert [look.state for look in found.runs] == ["done", "running", "interrupted", "waiting"]
    assert [look.share for look in found.runs] == [1.0, 0.5, pytest.approx(1 / 3), 0.0]
    assert found.share == pytest.approx((1 + 0.5 + 1 / 3) / 4)
    assert found.runs[2].note == "silent for 75 min"
    assert not found.is_over


def test_a_run_that_is_silent_for_less_than_asked_is_running(grid):
    begun(grid, 0, age=3600)
    assert states(grid)[0] == "interrupted"
    assert states(grid, silent=4000)[0] == "running"


@pytest.mark.parametrize(
    ("process", "told_of"),
    [
        ({"host": socket.gethostname(), "pid": dead()}, ("interrupted", "killed: its process is gone")),
        ({"host": socket.gethostname(), "pid": os.getpid()}, ("running", "")),
        ({"host": "another", "pid": dead()}, ("running", "")),
        ({"host": socket.gethostname(), "pid": "x"}, ("running", "")),
        ({"host": 3}, ("running", "")),
    ],
)
def test_a_run_whose_process_was_killed_on_this_machine_is_interrupted_until_it_begins_anew(grid, process, told_of):
    folder = begun(grid, 0, epoch=1, **process)
    assert told(grid) == told_of
    os.utime(folder / "progress.json", (time.time() - 60,) * 2)
    (folder / "spec.json").touch()
    assert told(grid) == ("running", "")


@pytest.mark.parametrize(("interrupted", "state"), [(False, "failed"), (True, "interrupted")])
def test_what_a_run_says_of_its_end_is_told_until_it_begins_anew(grid, interrupted, state):
    folder = begun(grid, 0, epoch=1, error="NonFiniteLoss: at epoch 2", interrupted=interrupted)
    assert told(grid) == (state, "NonFiniteLoss: at epoch 2")
    os.utime(folder / "progress.json", (time.time() - 60,) * 2)
    (folder / "spec.json").touch()
    assert states(grid)[0] == "running"


def test_a_log_that_ends_with_an_error_is_a_failure_until_the_run_begins_anew(grid):
    folder = begun(grid, 0, age=60)
    (folder / "train.log").write_text("23:59:59 epoch 1/3: loss 1.0\n" + TRACEBACK)
    assert told(grid) == ("failed", "RuntimeError: worn out")
    os.utime(folder / "train.log", (time.time() - 90,) * 2)
    assert states(grid)[0] == "running"


def test_a_run_that_fails_before_its_first_file_has_failed(grid):
    name = next(iter(expand(grid)))
    folder = Path(grid.results, "runs", name)
    folder.mkdir(parents=True)
    (folder / "train.log").write_text("ModuleNotFoundError: No module named 'torch'\n")
    assert states(grid)[0] == "waiting"  # a line alone may be anything
    (folder / "train.log").write_text("linvit: error: data/bands.npz: not found\n")
    assert told(grid) == ("failed", "data/bands.npz: not found")


def test_a_result_of_other_settings_is_not_done(grid):
    finish(grid, 0)
    spec = next(Path(grid.results).rglob("spec.json"))
    spec.write_text(spec.read_text().replace('"epochs":3', '"epochs":30'))
    assert states(grid)[0] == "waiting"


def test_the_log_of_a_run_with_other_settings_says_nothing_of_this_one(grid):
    """Logs are appended to: its last line is of the run before its rate was lowered."""
    folder = begun(grid, 0)
    (folder / "train.log").write_text("linvit: error: loss is not finite\n")
    assert told(grid) == ("failed", "loss is not finite")
    spec = folder / "spec.json"
    spec.write_text(spec.read_text().replace('"epochs":3', '"epochs":30'))
    assert states(grid)[0] == "waiting"


def test_a_result_whose_values_were_changed_is_not_done(grid):
    finish(grid, 0)
    metrics = next(Path(grid.results).rglob("metrics.json"))
    write_sealed(metrics, json.loads(metrics.read_bytes()))
    assert states(grid)[0] == "done"
    metrics.write_text(metrics.read_text().replace("12.0", "13.0"))
    assert told(grid) == ("failed", UNUSABLE)


@pytest.mark.parametrize("content", ["", '{"spec": ', "[]", '{"top1": 50.0}', '{"spec": {}, "top1": 50.0}'])
def test_metrics_that_reports_could_not_use_are_not_done(grid, content):
    finish(grid, 0)
    folder = next(Path(grid.results).rglob("metrics.json")).parent
    (folder / "metrics.json").write_text(content)
    state, note = told(grid)
    assert (state, note.partition(":")[0]) == ("failed", "metrics.json")
    os.utime(folder / "metrics.json", (time.time() - 90,) * 2)
    assert states(grid)[0] == "running"  # it began anew since


def test_runs_that_are_only_evaluated_weigh_nothing_and_leave_the_others_their_images(tmp_path):
    specs = expand(load_study(CONFIG), "paper")
    untrained = next(name for name, spec in specs.items() if not spec.init.train)
    imagenet = next(name for name, spec in specs.items() if spec.init.train and spec.dataset.name == "imagenet")
    pets = next(name for name, spec in specs.items() if spec.init.train and spec.dataset.name == "pets")
    names = (untrained, imagenet, pets)
    images = {name: specs[name].recipe.epochs * specs[name].dataset.train_size for name in names[1:]}
    found = _share({name: specs[name] for name in names}, {name: Look(name, "done") for name in names[:2]})
    assert found == pytest.approx(images[imagenet] / sum(images.values()))
    assert _share({untrained: specs[untrained]}, {untrained: Look(untrained, "done")}) == 1.0


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"epochs": "x"}', '{"new": 1}', "[" * 100_000])
def test_a_damaged_file_of_progress_leaves_a_running_run_without_numbers(grid, content):
    (begun(grid, 0, epoch=1) / "progress.json").write_text(content)
    look = status_of(grid).runs[0]
    assert (look.state, look.share) == ("running", 0.0)
    assert look.name in text(status_of(grid))


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", None),
        ("23:59:59 epoch 1/3: loss 1.0\n", None),
        (TRACEBACK, "RuntimeError: worn out"),
        (TRACEBACK + "23:59:59 resumed after epoch 1, step 0\n", None),
        (TRACEBACK + "23:59:59 x.py:1: UserWarning: old\n  warn()\n", None),
        ("x" * 10_000 + "\n" + TRACEBACK + "\n", "RuntimeError: worn out"),
        ("linvit: error: no such file\n", "no such file"),
    ],
)
def test_the_last_error_of_a_log(tmp_path, log, error):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == error


def test_time_left_is_by_runs_of_the_kind_then_by_the_table_of_rates(grid):
    assert status_of(grid).seconds_left is None
    table = rates(("relu", None, 21.0, 12.0))
    # Three epochs of TRAIN images and, every two epochs and at the end, 12 images to test on.
    by_table = 3 * TRAIN / 21 + 2
    assert status_of(grid, rates=table).seconds_left == pytest.approx(4 * by_table)
    begun(grid, 1, epoch=1, step=2, seconds=10.0, seconds_left=10.0)
    assert status_of(grid, rates=table).seconds_left == pytest.approx(3 * 20 + 10)
    finish(grid, 0, seconds=16.0)
    found = status_of(grid, rates=table)
    assert found.seconds_left == pytest.approx(2 * 16 + 8)
    assert found.untimed == 0
    assert "1 of 4 runs done, 38% of the training; 40 s left, 1 at a time" in text(found)


def test_what_has_failed_is_not_waited_for(grid):
    for number in range(3):
        finish(grid, number)
    begun(grid, 3, epoch=1, error="ValueError: no")
    found = status_of(grid)
    assert found.is_over
    assert found.seconds_left == 0
    assert text(found).splitlines()[0].endswith("83% of the training")


def test_a_data_set_or_source_that_failed_is_told_since_runs_wait_for_it(grid):
    log = Path(grid.results, "sources/old/wee/source.log")
    log.parent.mkdir(parents=True)
    log.write_text("linvit: error: old.safetensors: not found\n")
    found = status_of(grid)
    assert [(look.name, look.state) for look in found.others] == [("source old/wee", "failed")]
    assert text(found).endswith("failed\n  old.safetensors: not found\n    source old/wee")
    log.with_name("source.json").write_text("{}")
    assert not status_of(grid).others


def test_the_screen_groups_failures_and_cuts_long_lists(grid, monkeypatch):
    monkeypatch.setattr("linvit.screen.SHOWN", 2)
    for number in range(3):
        begun(grid, number, epoch=1, loss=1.25, error="ValueError: no")
    begun(grid, 3, epoch=1, loss=1.25, top1=50.0, images_per_second=1234.4, seconds_left=7.0)
    lines = text(status_of(grid)).splitlines()
    assert [line.split()[0] for line in lines[2:7]] == list(get_args(State))
    assert lines[-1] == "... and 1 more: --all"
    assert lines.count("  ValueError: no") == 1
    names = list(expand(grid))
    assert [name for name in names if f"    {name}" in lines] == names[:2]
    assert next(line for line in lines if line.startswith(names[3])).split()[1:] == [
        *("33%", "2/3", "1.250", "50.0", "1,234", "7", "s")
    ]
    assert [name for name in names if f"    {name}" in text(status_of(grid), everything=True)] == names[:3]


def test_a_status_needs_neither_torch_nor_numpy():
    code = "import sys, linvit.screen; print({'torch', 'numpy', 'pandas'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5969, "99 min"), (6000, "2 h"), (355_000, "99 h"), (360_000, "4 d")],
)
def test_durations_are_told_in_one_unit(seconds, told):
    assert duration(seconds) == told
