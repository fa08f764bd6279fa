"""Disks that are full, over quota or read-only: one clear error, what was there is intact, all goes on afterwards."""

import contextlib
import errno
import itertools
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk import Disk
from tally import Tally
from tiny import spec
from tiny_run import Run
from victim import Victim

import linvit.run
from linvit.cli import main
from linvit.files import WriteError
from linvit.watch import PROGRESS

PAGE = 4096
OTHERS = (errno.ENOSPC, errno.EIO, errno.ESTALE)
WRITES = 9
"""Of a run of three epochs with an evaluation each: its spec, two checkpoints an epoch, its model and its metrics."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", 16)
    yield disk
    disk.unmount()


def test_a_disk_that_is_full_from_any_page_on(disk: Disk, npz: Path, whole: dict, tally: Tally) -> None:
    run = Run(npz, disk.folder / "run")
    run.stop_after_a_step()
    refused = set()
    for room in range(0, run.checkpoint.stat().st_size, 4 * PAGE):
        with tally.fault("a full disk"), disk.full(but_for=room):
            refused.add(run.refused(os.strerror(errno.ENOSPC)))
    assert refused == {"spec.json", "checkpoint.pt"}
    with tally.fault("a full disk: the same command once more") as count:
        count.compare(run(), whole)


@pytest.mark.parametrize("refused", ["model.safetensors", "metrics.json"])
def test_a_disk_that_is_full_when_training_is_done(
    disk: Disk, npz: Path, whole: dict, tally: Tally, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """What an epoch's checkpoint needs is free until then, and more than the model needs."""
    run = Run(npz, disk.folder / "run")
    save = linvit.run.save_model
    with tally.fault("a full disk"), contextlib.ExitStack() as filled:

        def fill_and_save(model: object, of: object, path: Path) -> None:
            if refused == "metrics.json":
                save(model, of, path)
            filled.enter_context(disk.full())
            if refused != "metrics.json":
                save(model, of, path)

        monkeypatch.setattr(linvit.run, "save_model", fill_and_save)
        with pytest.raises(WriteError, match=rf"/{refused}: cannot be written \(No space left on device\)"):
            run()
        assert list(run.folder.glob(".*")) == []
    monkeypatch.undo()
    with tally.fault("a full disk: the same command once more") as count:
        count.compare(run(), whole)
        assert not run.checkpoint.exists()


def test_a_limit_on_the_size_of_files(npz: Path, whole: dict, tally: Tally, tmp_path: Path) -> None:
    """As of `ulimit -f`; no file system has to be mounted for it."""
    run = Run(npz, tmp_path)
    run.stop_after_a_step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tally.fault(os.strerror(errno.EFBIG)) as count:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.checkpoint.stat().st_size // 2, hard))
        try:
            assert run.refused(os.strerror(errno.EFBIG)) == "checkpoint.pt"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        count.compare(run(), whole)


@pytest.mark.parametrize("nth", range(1, WRITES + 1))
@pytest.mark.parametrize(
    "number", [errno.EDQUOT, *(pytest.param(number, marks=pytest.mark.torture) for number in OTHERS)]
)
def test_a_file_server_that_refuses_a_write_at_its_end(
    npz: Path, whole: dict, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, nth: int
) -> None:
    """As of a quota on NFS, which is told when the file is flushed."""
    run, fsync, calls = Run(npz, tmp_path), os.fsync, itertools.count(1)

    def refuse(file: int) -> None:
        # A journal that is not written is no loss.
        if f".{Path(PROGRESS).stem}." not in os.readlink(f"/proc/self/fd/{file}") and next(calls) == nth:
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse)
    with tally.fault(os.strerror(number)) as count:
        with pytest.raises(WriteError, match=re.escape(f"cannot be written ({os.strerror(number)})")):
            run()
        assert list(tmp_path.glob(".*")) == []
        count.compare(run(), whole)


@pytest.mark.usefixtures("handlers")
def test_a_read_only_disk_keeps_what_it_has(
    disk: Disk, npz: Path, whole: dict, tally: Tally, capsys: pytest.CaptureFixture
) -> None:
    run = Run(npz, disk.folder / "run")
    run.stop_after_a_step()
    with tally.fault("a read-only folder"), disk.read_only():
        assert run.refused(os.strerror(errno.EROFS)) == "spec.json"
        command = ["train", spec(npz).to_json(), "--out", str(disk.folder / "new/run"), "--data", str(npz.parent)]
        assert main(command) == 1
        told = f"{disk.folder}/new/run/spec.json: cannot be written (Read-only file system)"
        advice = "choose a place that can be written to"
        assert capsys.readouterr().err.splitlines() == [f"linvit: error: {told}; {advice}"]
    with tally.fault("a read-only folder: the same command once more") as count:
        count.compare(run(), whole)


@pytest.fixture
def results(victim: Victim, undisturbed: Victim) -> Iterator[Disk]:
    """A disk for the victim's results alone."""
    disk = Disk(victim.results, 32)
    victim.prepare(undisturbed)
    yield disk
    disk.unmount()


@pytest.mark.torture
@pytest.mark.parametrize("refused", ["runs/.*/checkpoint.pt", "sources/own/mini/run/checkpoint.pt"])
def test_snakemake_tells_of_a_full_disk(
    victim: Victim, results: Disk, expected: dict, tally: Tally, refused: str
) -> None:
    if refused.startswith("sources"):
        shutil.rmtree(victim.results / "sources")
    with tally.fault("a full disk, told by Snakemake") as count:
        with results.full(but_for=50 * PAGE):
            assert victim.finish(victim.start()) != 0
        told = rf"linvit: error: results/{refused}: cannot be written \(No space left on device\)"
        assert len(re.findall(told, victim.said())) == 1
        assert "Traceback" not in victim.said()
        count.compare(victim.run_again()["seed0"], expected["seed0"])


@pytest.mark.torture
def test_a_full_disk_for_decoded_images_stops_no_run(
    victim: Victim, results: Disk, expected: dict, tally: Tally
) -> None:
    shutil.rmtree(victim.results / "data/fashion-1k")
    victim.sabotage({"write": "train.bin", "at": "begin", "errno": errno.ENOSPC})
    with tally.fault("a full disk, told by Snakemake") as count:
        count.compare(victim.run_again()["seed0"], expected["seed0"])
        assert victim.left() == 0
        assert "train.bin: cannot be written (No space left on device): images are decoded" in victim.log()


@pytest.mark.torture
def test_snakemake_refuses_a_read_only_folder_of_results(
    victim: Victim, results: Disk, expected: dict, tally: Tally
) -> None:
    with tally.fault("a read-only folder, told by Snakemake") as count:
        with results.read_only():
            assert victim.finish(victim.start()) != 0
        assert "results: results cannot be written: results is read-only" in victim.said()
        assert "Traceback" not in victim.said()
        count.compare(victim.run_again()["seed0"], expected["seed0"])
