"""What those who look on at a run are told, what they leave behind, and that they change nothing."""

import io
import json
import logging
import re

import pytest
from tiny import repeatable, spec, store_source, write_npz

from linvit import watch
from linvit.fit import Interrupted
from linvit.progress import Progress
from linvit.run import train
from linvit.watch import Journal, Standing, Terminal, View, Watch


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def study(tmp_path):
    write_npz(tmp_path / "bands.npz")
    store_source(tmp_path / "sources")
    return tmp_path


def carry_out(study, name: str, **options) -> dict:
    chosen = spec(study / "bands.npz", "relu", "random")
    return train(chosen, study / name, sources_folder=study / "sources", data_root=study, **options)


def after(steps: int):
    """Asks a run to stop after so many steps."""
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


def test_time_left_and_images_per_second_leave_out_what_earlier_processes_did(monkeypatch):
    clock = iter([100.0, 102.0, 104.0, 110.0, 111.0])
    monkeypatch.setattr(watch.time, "perf_counter", lambda: next(clock))
    seen = []

    class Recorder(View):
        def step(self, standing: Standing) -> None:
            seen.append((standing.taken, standing.images_per_second, standing.seconds, standing.seconds_left))

    told = Watch(Recorder())
    told.begin(Progress(history=[{"epoch": 1, "loss": 3.0}], step=1, earlier_seconds=50.0), epochs=3, steps=3)
    told.step(8, 2.0)
    told.step(8, None)
    told.epoch({"epoch": 2, "loss": 1.0, "top1": 40.0})  # six seconds of evaluation
    told.step(10, None)
    assert seen == [
        (5, 4.0, 52.0, 2.0 * 4),
        (6, 4.0, 54.0, 2.0 * 3),
        (7, 26 / 5, 61.0, 11 / 3 * 2),
    ]
    assert told._standing.loss == 1.0


def test_a_stage_counts_on_from_the_seconds_and_epochs_before_it(monkeypatch):
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(watch.time, "perf_counter", lambda: next(clock))
    told = Watch().part(2, 5, seconds=30.0)
    told.begin(Progress(history=[{"epoch": 1, "loss": 3.0}], earlier_seconds=10.0), epochs=3, steps=3)
    told.step(8, 2.0)
    assert (told._standing.taken, told._standing.total, told._standing.seconds) == (10, 15, 42.0)
    assert told._standing.seconds_left == 2.0 * 5


def test_the_line_holds_what_is_known():
    assert Standing(45, 16).line == "epoch 1/45, step 0/16"
    whole = Standing(45, 16, 12, 9, 1.2344, 71.23, 1190.4, 60.0, 272.0)
    assert whole.line == "epoch 13/45, step 9/16, loss 1.234, top-1 71.2, 1,190 images/s, 5 min left"
    assert Standing(45, 16, epoch=45).line.startswith("epoch 45/45")


def test_a_terminal_shows_one_line_and_a_log_a_line_an_epoch(study, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    carry_out(study, "logged")
    told = [record.getMessage() for record in caplog.records if record.name == "linvit.watch"]
    assert [re.sub(r"\d+\.\d+", "x", line) for line in told] == [
        f"epoch {epoch}/3: loss x, top-1 x" for epoch in (1, 2, 3)
    ]
    caplog.clear()
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    carry_out(study, "shown")
    shown = re.split(r"[\r\n]+", screen.getvalue().strip())
    assert not [record for record in caplog.records if record.name == "linvit.watch"]
    assert screen.getvalue().count("\n") <= 1
    assert re.match(r"100% .*epoch 3/3, step 0/3, loss \d\.\d{3}, top-1 [\d.]+, [\d,]+ images/s, 0 s left$", shown[-1])


def test_a_stopped_run_leaves_where_it_stands_and_why_and_a_finished_one_nothing(study):
    with pytest.raises(Interrupted):
        carry_out(study, "run", stop=after(5))  # which an evaluation asks once, too
    found = json.loads((study / "run" / watch.PROGRESS).read_text())
    assert found["interrupted"] is True
    assert found["error"].startswith("Interrupted: stopped in epoch 2 after step 1")
    assert (found["epochs"], found["steps"], found["epoch"]) == (3, 3, 1)
    whole = carry_out(study, "run")
    assert not (study / "run" / watch.PROGRESS).exists()
    assert repeatable(whole) == repeatable(carry_out(study, "undisturbed"))


def test_a_run_that_fails_before_training_says_why(study):
    (study / "bands.npz").unlink()
    with pytest.raises(ValueError, match="bands"):
        carry_out(study, "run")
    found = json.loads((study / "run" / watch.PROGRESS).read_text())
    assert found["interrupted"] is False
    assert "bands.npz" in found["error"]
    assert "\n" not in found["error"]


def test_a_run_does_not_end_because_it_cannot_be_told_of(study, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "write_text", full)
    assert carry_out(study, "run")["history"][-1]["epoch"] == 3


def test_a_journal_is_written_now_and_then_and_at_the_end_of_each_epoch(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    journal, standing = Journal(tmp_path), Standing(3, 4)
    journal.begin(standing)
    for step, (now[0], kept) in enumerate([(1.0, 0), (watch.EVERY + 1, 2), (watch.EVERY + 2, 2)], 1):
        standing.step = step
        journal.step(standing)
        assert json.loads(journal.path.read_text())["step"] == kept
    standing.epoch, standing.step = 1, 0
    journal.epoch(standing, {})
    assert json.loads(journal.path.read_text())["epoch"] == 1


def test_a_bar_of_a_run_that_never_began_is_no_error():
    Terminal().end(None)
