"""Event files: what they hold, that a run that goes on repeats no step, and that metrics know nothing of them."""

import json
import sys
from pathlib import Path

import pytest
from test_cli import refusal
from test_watch import after, carry_out
from tiny import repeatable, spec, write_npz

from linvit.events import SCALARS, Events
from linvit.fit import Interrupted
from linvit.ranks import Ranks
from linvit.run import views_of
from linvit.watch import Standing


@pytest.fixture
def study(tmp_path) -> Path:
    write_npz(tmp_path / "bands.npz")
    return tmp_path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each tag, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_event_files_hold_every_epoch_and_change_no_metric(study):
    pytest.importorskip("tensorboard")
    told, alone = carry_out(study, "told", tensorboard=True), carry_out(study, "alone")
    assert repeatable(told) == repeatable(alone)
    assert not list((study / "alone").glob("events*"))
    shown = scalars(study / "told")
    assert [step for step, _ in shown.pop("images_per_second")] == [1, 2, 3]
    assert SCALARS.keys() - shown.keys() == {"loss/distillation"}  # nothing is distilled
    for tag, found in shown.items():
        assert found == [(record["epoch"], pytest.approx(record[SCALARS[tag]])) for record in told["history"]]


def test_a_run_that_goes_on_repeats_no_step(study):
    pytest.importorskip("tensorboard")
    with pytest.raises(Interrupted):
        carry_out(study, "run", stop=after(4), tensorboard=True)
    whole = carry_out(study, "run", tensorboard=True)
    found = scalars(study / "run")["loss/total"]
    assert found == [(record["epoch"], pytest.approx(record["loss"])) for record in whole["history"]]


def test_an_epoch_whose_checkpoint_was_lost_is_taken_back(tmp_path):
    pytest.importorskip("tensorboard")
    for begin, loss in ((0, 1.0), (1, 2.0)):
        events = Events(tmp_path)
        events.begin(Standing(3, 1, epoch=begin))
        for epoch in range(begin + 1, 4):
            events.epoch(Standing(3, 1, epoch=epoch), {"epoch": epoch, "loss": loss})
        events.end(None)
    assert scalars(tmp_path)["loss/total"] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_only_the_first_rank_writes_them(tmp_path):
    assert views_of(tmp_path, True, Ranks(1, 2)) == []


def test_without_tensorboard_one_line_says_so_before_anything_is_read(study, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (study / "spec.json").write_text(spec(study / "nosuch.npz").to_json())
    line = refusal(capsys, "train", study / "spec.json", "--out", study / "run", "--tensorboard")
    assert line == "linvit: error: tensorboard is not installed; pip install 'linvit[tensorboard]', or do without"
    assert json.loads((study / "run/spec.json").read_text())
