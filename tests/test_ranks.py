"""Several processes that share a run: the same updates as one process makes, every image counted once, no hang."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import start_ranks
from tiny import RECIPE, changed, dataset, one_line, source, spec, store_source, write_npz

from linvit.data import evaluation_batches, training_batches
from linvit.datasets import DataError, read
from linvit.fit import Interrupted
from linvit.grid import RunSpec
from linvit.ranks import Ranks
from linvit.run import train

TEST_IMAGES = 11  # uneven, like the last batches of 21 images by eights


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_npz(folder / "bands.npz", test=TEST_IMAGES)
    store_source(folder / "sources")
    return folder


def run_spec(study: Path, init: str = "random", **recipe) -> RunSpec:
    data = dataset(study / "bands.npz", test_size=TEST_IMAGES)
    recipe = changed(RECIPE, epochs=7, **recipe)
    return spec("unused", "relu", init, dataset=data, recipe=recipe, source=source() if init != "random" else None)


def start(study: Path, run: RunSpec, *folders: Path) -> list[subprocess.Popen]:
    """The run's processes, one for each folder, with what torchrun would tell them."""
    command = [sys.executable, "-m", "linvit", "train", run.to_json(), "--threads", "1"]
    command += ["--sources", str(study / "sources"), "--data", str(study)]
    commands = [[*command, "--out", str(folder)] for folder in folders]
    return start_ranks(commands, stderr=subprocess.PIPE, text=True)


def finished(processes: list[subprocess.Popen]) -> list[str]:
    """What each said, after both ended well."""
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


@pytest.mark.parametrize(
    ("init", "recipe"),
    [
        ("random", {}),
        ("mlpcopy-distill", {"clip_grad": 0.5, "eval_every": 3}),
        ("fullcopy-distill", {"align": {"epochs": 2}}),
        ("copy-distill", {"auto_augment": "rand-m5-inc1", "micro_batch_size": 3, "grad_checkpointing": True}),
    ],
)
def test_two_ranks_find_what_one_process_finds(study, tmp_path, init, recipe) -> None:
    run = run_spec(study, init, **recipe)
    alone = train(run, tmp_path / "alone", sources_folder=study / "sources", data_root=study)
    said = finished(start(study, run, *[tmp_path / "shared"] * 2))
    shared = json.loads((tmp_path / "shared/metrics.json").read_text())
    assert len(alone["history"]) == len(shared["history"]) == 7  # 21 steps
    of_all = (metrics.get("alignment", []) + metrics["history"] for metrics in (alone, shared))
    for one, other in zip(*of_all, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert (alone["ranks"], shared["ranks"]) == (1, 2)
    assert (tmp_path / "shared/model.safetensors").exists()
    assert not (tmp_path / "shared/checkpoint.pt").exists()
    last = f"epoch {run.recipe.passes}/{run.recipe.passes}"
    assert (last in said[0], last in said[1]) == (True, False)


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint_from_which_both_go_on(study, tmp_path) -> None:
    run = run_spec(study, "copy-distill")
    endless = run.model_copy(update={"recipe": changed(run.recipe, epochs=3000)})
    processes = start(study, endless, *[tmp_path / "endless"] * 2)
    wait_for(tmp_path / "endless/checkpoint.pt")
    processes[1].send_signal(signal.SIGUSR2)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    lines = [text.splitlines()[-1] for text in said]
    assert lines[0] == lines[1]
    assert "stopped in epoch" in lines[0]
    reached = int(lines[0].split("epoch ")[1].split()[0]) - 1

    processes = start(study, endless, *[tmp_path / "endless"] * 2)
    again = tmp_path / "endless/checkpoint.pt"
    before = again.stat().st_mtime_ns
    wait_for(again, newer_than=before)
    processes[0].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all(f"resumed after epoch {reached}, step" in text for text in said)


def test_a_rank_that_is_killed_ends_the_others_with_an_error(study, tmp_path) -> None:
    endless = run_spec(study)
    endless = endless.model_copy(update={"recipe": changed(endless.recipe, epochs=3000)})
    processes = start(study, endless, tmp_path, tmp_path)
    wait_for(tmp_path / "checkpoint.pt")
    processes[1].kill()
    _, said = processes[0].communicate(timeout=300)
    assert processes[0].returncode == 1
    assert "Connection" in said or "peer" in said
    processes[1].communicate()


def test_a_checkpoint_that_only_one_rank_sees_is_refused(study, tmp_path) -> None:
    """As on a file system that is late to show it."""
    run = run_spec(study)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "seen", sources_folder=study / "sources", data_root=study, stop=lambda: True)
    processes = start(study, run, tmp_path / "seen", tmp_path / "unseen")
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all("not the same on all 2 ranks" in text.splitlines()[-1] for text in said)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 21])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_even_and_hold_every_image_once(n, size) -> None:
    parts = [list(range(n))[Ranks(rank, size).part(n)] for rank in range(size)]
    assert [image for part in parts for image in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert (min(map(len, parts)) > 0) == (n >= size)


@pytest.mark.parametrize("auto_augment", [None, "rand-m5-inc1"])
def test_the_parts_of_all_ranks_are_the_batches_of_one(study, auto_augment) -> None:
    run = run_spec(study, auto_augment=auto_augment)
    data = read(run.dataset, "train", study)

    def batches(ranks: Ranks, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = training_batches(data, run.dataset, run.recipe, run.size, run.stream, ranks=ranks)
        return list(made.epoch(2, start))

    whole = batches(Ranks())
    parts = [batches(Ranks(rank, 3)) for rank in range(3)]
    assert [len(labels) for _, labels in parts[0]] == [2, 2, 1]
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
    resumed = batches(Ranks(1, 3), start=1)
    assert torch.equal(resumed[0][0], parts[1][1][0])


def test_the_shares_of_all_ranks_are_the_test_set(study) -> None:
    run = run_spec(study)
    data = read(run.dataset, "test", study)

    def images(ranks: Ranks) -> torch.Tensor:
        return torch.cat([i for i, _ in evaluation_batches(data, run.dataset, run.recipe, run.size, ranks=ranks)])

    shares = [images(Ranks(rank, 4)) for rank in range(4)]
    assert [len(share) for share in shares] == [3, 3, 3, 2]
    assert torch.equal(torch.stack([shares[i % 4][i // 4] for i in range(TEST_IMAGES)]), images(Ranks()))


def test_a_batch_with_fewer_images_than_ranks_is_refused(study) -> None:
    run = run_spec(study, batch_size=4)
    data = read(run.dataset, "train", study)
    with pytest.raises(DataError) as caught:
        training_batches(data, run.dataset, run.recipe, run.size, run.stream, ranks=Ranks(0, 2))
    assert "the last batch of 21 images has 1, fewer than the 2 ranks" in one_line(caught.value)


def wait_for(path: Path, newer_than: int = 0) -> None:
    deadline = time.monotonic() + 300
    while not path.exists() or path.stat().st_mtime_ns <= newer_than:
        assert time.monotonic() < deadline, f"waited in vain for {path}"
        time.sleep(0.05)
