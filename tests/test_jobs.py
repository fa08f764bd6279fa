"""The workflow's jobs as classes: constructed as an executor does, called, stopped, called again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import RECIPE, changed, repeatable, source, spec, store_source, write_npz

from linvit import jobs
from linvit.fit import Interrupted
from linvit.grid import RANDOM
from linvit.jobs import Job, PrepareSource, Train
from linvit.run import train


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_npz(tmp_path / "bands.npz")
    store_source(tmp_path / "sources")
    return tmp_path


def job(kind: type[Job], study: Path, output: str, **params: str) -> Job:
    """As the executor plugin constructs it, from a rule's inputs, outputs and so on."""
    return kind(
        input=["results/data/bands.json"],
        output=[str(study / output)],
        params={"data": str(study), "sources": str(study / "sources"), "decoded": str(study / "decoded"), **params},
        log=[],
        threads=1,
        resources={"mem_mb": 100},
    )


def test_a_run_that_is_stopped_and_called_again_equals_an_undisturbed_one(study) -> None:
    run = spec(study / "bands.npz", "relu", "mlpcopy-distill", source=source())
    undisturbed = train(run, study / "alone", sources_folder=study / "sources", data_root=study)
    first = job(Train, study, "run/metrics.json", spec=run.to_json())
    first.stop()
    with pytest.raises(Interrupted) as stopped:
        first()
    assert type(stopped.value).interrupted
    assert (study / "run/checkpoint.pt").exists()
    job(Train, study, "run/metrics.json", spec=run.to_json())()
    metrics = json.loads((study / "run/metrics.json").read_text())
    assert repeatable(metrics) == repeatable(json.loads(json.dumps(undisturbed)))


def test_a_source_is_prepared_in_the_folder_of_its_manifest(study) -> None:
    made = source(train=spec(study / "bands.npz", "softmax", RANDOM, role="source"))
    job(PrepareSource, study, f"made/{made.folder}/source.json", source=made.model_dump_json(exclude_defaults=True))()
    manifest = json.loads((study / "made" / made.folder / "source.json").read_text())
    assert manifest["spec"]["role"] == "source"
    assert (study / "made" / made.folder / "weights.safetensors").exists()


def test_threads_and_data_loading_processes_are_the_rules(study, monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(jobs.torch, "set_num_threads", lambda n: seen.update(threads=n))
    monkeypatch.setattr(jobs, "train", lambda run, folder, **options: seen.update(options, folder=folder))
    made = job(Train, study, "run/metrics.json", spec=spec(study / "bands.npz").to_json())
    made.threads = 4
    made()
    assert (seen["threads"], seen["workers"], seen["folder"]) == (4, 3, study / "run")
    assert not seen["stop"]()
    made.stop()
    assert seen["stop"]()


def test_a_signal_that_reaches_the_loading_processes_too_stops_a_run_at_its_next_step(study) -> None:
    """As a scheduler sends it: to every process of the job."""
    recipe = changed(RECIPE, epochs=2000, auto_augment="rand-m5-inc1")
    run = spec(study / "bands.npz", recipe=recipe)
    code = (
        "import signal, sys; from linvit.jobs import Train; "
        "params = {'data': '.', 'sources': '.', 'decoded': '.', 'spec': sys.argv[1]}; "
        "train = Train(output=['run/metrics.json'], params=params, threads=3); "
        "signal.signal(signal.SIGTERM, lambda *_: train.stop()); train()"
    )
    command = [sys.executable, "-c", code, run.to_json()]
    process = subprocess.Popen(command, cwd=study, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (study / "run/checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert "Interrupted: stopped in epoch" in said
