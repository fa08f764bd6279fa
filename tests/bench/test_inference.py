"""What the benchmark of whole ViTs measures, where it stops, and what it makes of its figures."""

import json

import inference
import pytest
import torch
from inference import MODES, Row, batch_of, cell, too_slow
from models import STUDY

CPU = torch.device("cpu")


def test_a_batch_has_as_many_pixels_at_every_resolution() -> None:
    assert [batch_of(resolution, CPU) for resolution in (224, 320, 448, 896, 1792)] == [16, 8, 4, 1, 1]


def test_ratios_are_of_seconds_for_one_image_and_of_throughput_for_many() -> None:
    shared = {"variant": "elu", "resolution": 224, "tokens": 196, "seconds": 0.5, "softmax_seconds": 1.0}
    assert cell(Row(**shared, mode=MODES[0], batch=1)) == "500 (0.50)"
    assert cell(Row(**shared, mode=MODES[1], batch=8)) == "2.00 (2.00)"
    assert cell(Row(**shared | {"softmax_seconds": None}, mode=MODES[1], batch=8)) == "2.00"


def test_what_takes_too_long_or_too_much_memory_is_told() -> None:
    def raises(error: Exception):
        raise error

    assert too_slow(lambda: None, CPU, 60) is None
    assert "the limit is 0 s" in too_slow(lambda: None, CPU, 0)
    assert too_slow(lambda: raises(torch.OutOfMemoryError()), CPU, 60) == "out of memory"
    assert too_slow(lambda: torch.empty(1 << 50), CPU, 60) == "out of memory"
    with pytest.raises(RuntimeError, match="a fault"):
        too_slow(lambda: raises(RuntimeError("a fault")), CPU, 60)


def test_a_small_run_writes_whole_files(tmp_path, monkeypatch) -> None:
    def forward_of(study, size, variant, *others):
        call = original(study, size, variant, *others)
        if (variant, size.image_size) == ("softmax", 64):
            stopped.append(call)
        return call

    original, stopped = inference.forward_of, []
    monkeypatch.setattr(inference, "forward_of", forward_of)
    monkeypatch.setattr(inference, "too_slow", lambda call, *_: "it took too long" if call in stopped else None)
    inference.main(["--size=mini", "--resolutions", "32", "64", "--repeats=1", f"--out={tmp_path}"])
    written = json.loads((tmp_path / "inference.json").read_text())
    variants = list(STUDY.variants)
    assert written["stopped"] == {"softmax": "64 px, one image: it took too long"}
    at = {r: [row for row in written["rows"] if row["resolution"] == r] for r in (32, 64)}
    assert [row["variant"] for row in at[32]] == 2 * variants
    assert [row["variant"] for row in at[64]] == 2 * [name for name in variants if name != "softmax"]
    assert all(row["softmax_seconds"] is None for row in at[64])
    text = (tmp_path / "inference.md").read_text()
    assert "- softmax stops at 64 px, one image: it took too long" in text
    assert "## In batches" in text
    assert (tmp_path / "inference.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "inference.pdf").read_bytes().startswith(b"%PDF")
