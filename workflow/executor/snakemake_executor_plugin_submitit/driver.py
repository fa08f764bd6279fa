"""Who drives the workflow in this folder, so that a driver that was killed does not lock out the next one.

Snakemake's lock is a file, and `kill -9` leaves it behind. A driver therefore notes its process and the lock files it
holds; the next one removes exactly those, and only if that process ran on this very host and is gone. Any other lock
stays, and Snakemake refuses to start, until somebody says `--unlock`.

That lock is one for each output: drivers with different targets could share a folder, but not the journal in it.
Therefore the note also keeps a second driver out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

NAME = "driver.json"


def note_driver(folder: Path, locks: Iterable[str]) -> None:
    """Notes this process and the files by which it holds Snakemake's lock.

    Raises:
        WorkflowError: another driver works here, or worked on another host and was not seen to end.
    """
    import psutil

    refuse_second_driver(folder)
    note = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "locks": sorted(str(Path(lock).absolute()) for lock in locks),
    }
    (folder / NAME).write_text(json.dumps(note))


def read_note(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return None


def ran_here(note: dict[str, Any]) -> bool:
    """Whether the note, of a driver or of a job, is of this machine."""
    return note.get("host") == socket.gethostname()


def is_ours(note: dict[str, Any]) -> bool:
    return ran_here(note) and note["pid"] == os.getpid() and lives(note["pid"], note["started"])


def forget_driver(folder: Path) -> None:
    """Removes this process's own note."""
    note = read_note(folder)
    if note and is_ours(note):
        (folder / NAME).unlink()


def refuse_second_driver(folder: Path) -> None:
    note = read_note(folder)
    if note is None or is_ours(note):
        return
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(note["started"]))
    who = f"process {note['pid']} on {note['host']}, started {since}"
    if not ran_here(note):
        raise WorkflowError(
            f"another driver may work in this folder: {who}; if it is gone, repeat this command with --unlock"
        )
    if lives(note["pid"], note["started"]):
        raise WorkflowError(f"another driver works in this folder: {who}")


def forget_dead_driver(folder: Path, unlock: bool = False) -> None:
    """Removes what a dead driver left: its note, and the lock files that are named in it.

    Args:
        unlock: somebody vouches for the death of one on another host.
    """
    note = read_note(folder)
    if note is None or (lives(note["pid"], note["started"]) if ran_here(note) else not unlock):
        return
    for lock in note["locks"]:
        Path(lock).unlink(missing_ok=True)
    (folder / NAME).unlink(missing_ok=True)


def lives(pid: int, started: float) -> bool:
    """Whether the process that started at that time (seconds since the epoch) still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
