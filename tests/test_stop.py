"""Stopping a run when it is asked to, and going on as if nothing had happened."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import ENDINGS
from tiny import RECIPE, changed, one_line, repeatable, source, spec, store_source, write_npz

from linvit.cli.command import stop_on_signal
from linvit.fit import Interrupted
from linvit.grid import RunSpec
from linvit.run import train
from linvit.signals import held


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
def test_a_run_stopped_after_every_step_and_in_every_evaluation_ends_bit_identical(study, tmp_path, recipe) -> None:
    run_spec = distilled(study, eval_every=1, **recipe)
    undisturbed = run(study, run_spec, tmp_path / "undisturbed")
    where = []
    for number in itertools.count():
        # Each second process ends an evaluation that it goes on with, and is asked to stop later.
        asked = itertools.chain([number % 2 == 0], itertools.repeat(True))
        try:
            stopped = run(study, run_spec, tmp_path / "stopped", stop=lambda asked=asked: next(asked))
            break
        except Interrupted as error:
            where.append(one_line(error))
            assert (tmp_path / "stopped/checkpoint.pt").exists()
            assert not (tmp_path / "stopped/metrics.json").exists()
    in_evaluations = [line for line in where if line.endswith(", in its evaluation")]
    assert len(in_evaluations) > 1
    assert len(where) - len(in_evaluations) > 4
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


@pytest.mark.parametrize("number", ENDINGS)
def test_whatever_asks_a_process_to_end_is_heard(handlers, number) -> None:
    signal.signal(number, signal.SIG_DFL)  # where tests run in the background, Ctrl-C may be ignored
    stop = stop_on_signal()
    assert not stop()  # and from now on it listens
    signal.raise_signal(number)
    assert stop()
    with pytest.raises(KeyboardInterrupt):  # who asks for the second time does not want to wait
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_another_thread_is_handed_is_taken_when_it_is_held_no_more(handlers) -> None:
    """In a fork, what its handler raises would be printed and lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []

    def hand_over() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.raise_signal(signal.SIGINT)

    def block() -> None:
        with held():
            thread = threading.Thread(target=hand_over)
            thread.start()
            thread.join()
            reached.append("the block's end")
        reached.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["the block's end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_under_nohup_outlives_its_terminal(handlers) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = stop_on_signal()
    assert not stop()  # and from now on it listens
    signal.raise_signal(signal.SIGHUP)
    assert not stop()


def test_a_run_that_is_asked_to_stop_when_it_is_done_keeps_its_checkpoint(study, tmp_path) -> None:
    """Who asks may not see its metrics as whole: a Snakemake that is killed then makes them again, from there."""
    metrics = tmp_path / "metrics.json"
    done = run(study, distilled(study), tmp_path, stop=metrics.exists)
    metrics.unlink()
    again = run(study, distilled(study), tmp_path, stop=lambda: not metrics.exists())  # and not one step more
    assert repeatable(again) == repeatable(done)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_job_ends_with_the_process_that_started_it() -> None:
    job = "import os, time; from linvit.cli.command import end_with; end_with(os.getppid()); print(flush=True); "
    job += "time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {job!r}])"
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    driver.stdout.readline()
    (process,) = psutil.Process(driver.pid).children()
    driver.kill()
    assert process.wait(300) is None or not process.is_running()
