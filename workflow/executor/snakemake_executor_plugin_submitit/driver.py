"""Who drives the workflow in this folder, so that a driver that was killed does not lock out the next one.

Snakemake's lock is a file, and `kill -9` leaves it behind. A driver therefore notes its process and the lock files it
holds; the next one removes exactly those, and only if that process ran on this very host and is gone. Any other lock
stays, and Snakemake refuses to start.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path


def note_driver(folder: Path, locks: Iterable[str]) -> None:
    """Notes this process and the files by which it holds Snakemake's lock."""
    import psutil

    note = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "locks": sorted(str(Path(lock).absolute()) for lock in locks),
    }
    (folder / "driver.json").write_text(json.dumps(note))


def forget_driver(folder: Path) -> None:
    (folder / "driver.json").unlink(missing_ok=True)


def forget_dead_driver(folder: Path) -> None:
    """Removes what a dead driver of this host left: its note, and the lock files that are named in it."""
    path = folder / "driver.json"
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if note["host"] != socket.gethostname() or lives(note["pid"], note["started"]):
        return
    for lock in note["locks"]:
        Path(lock).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def lives(pid: int, started: float) -> bool:
    """Whether the process that started at that time (seconds since the epoch) still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
