"""Stopping a run when it is asked to, and going on as if nothing had happened."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import RECIPE, changed, repeatable, source, spec, store_source, write_npz

from linvit.fit import Interrupted
from linvit.grid import RunSpec
from linvit.run import train


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_npz(folder / "bands.npz")
    store_source(folder / "sources")
    return folder


def distilled(study: Path, **recipe) -> RunSpec:
    return spec(study / "bands.npz", "relu", "mlpcopy-distill", source=source(), recipe=changed(RECIPE, **recipe))


def run(study: Path, run_spec: RunSpec, folder: Path, stop=lambda: False) -> dict:
    return train(run_spec, folder, sources_folder=study / "sources", data_root=study, stop=stop)


@pytest.mark.parametrize("recipe", [{}, {"auto_augment": "rand-m5-inc1", "mixup": 0.8}])
def test_a_run_stopped_after_every_step_ends_bit_identical(study, tmp_path, recipe) -> None:
    run_spec = distilled(study, **recipe)
    undisturbed = run(study, run_spec, tmp_path / "undisturbed")
    stops = 0
    for _ in itertools.count():
        try:
            stopped = run(study, run_spec, tmp_path / "stopped", stop=lambda: True)
            break
        except Interrupted:
            stops += 1
            assert (tmp_path / "stopped/checkpoint.pt").exists()
            assert not (tmp_path / "stopped/metrics.json").exists()
    assert stops == 9  # three epochs of three steps
    assert repeatable(stopped) == repeatable(undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_stops_a_run_at_its_next_step_with_a_checkpoint(study, tmp_path, number) -> None:
    run_spec = distilled(study, epochs=2000)
    command = [sys.executable, "-m", "linvit", "train", run_spec.to_json(), "--out", str(tmp_path)]
    command += ["--sources", str(study / "sources"), "--data", str(study), "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    checkpoint = tmp_path / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    before = checkpoint.stat().st_mtime_ns
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped in epoch" in errors.splitlines()[-1]
    assert checkpoint.stat().st_mtime_ns >= before
