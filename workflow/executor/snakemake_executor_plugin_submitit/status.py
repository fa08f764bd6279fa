"""What has become of a job: its result file decides; where there is none, or only some ranks failed, the cluster."""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .arrays import Work

LINES = 20  # of a failed job's log, shown to the user
FAILED = "FAILED"
# The cluster will start the job, or start it again.
QUEUED = {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True)
class Verdict:
    """The end of a job. An error says why."""

    error: str | None = None


class Listing:
    """The files of the jobs' folders, read once a poll: one directory, not one file per job."""

    def __init__(self) -> None:
        self.names: dict[Path, set[str]] = {}

    def has(self, path: Path) -> bool:
        if path.parent not in self.names:
            try:
                self.names[path.parent] = set(os.listdir(path.parent))
            except OSError:
                self.names[path.parent] = set()
        return path.name in self.names[path.parent]


class PlainUnpickler(pickle.Unpickler):
    """Reads submitit's results, a word with a text or None, and runs nothing that somebody else put into the file."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"a result holds no {module}.{name}")


def result_of(work: Work, listing: Listing) -> Verdict | None:
    """The verdict of the result files of all ranks; None while one is missing and none is an error."""
    complete = True
    for rank in range(ranks_of(work)):
        path = work.result(rank)
        if not listing.has(path):
            complete = False
            continue
        try:
            outcome, value = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, EOFError, pickle.UnpicklingError):
            complete = False
            continue
        if outcome == "error":
            return Verdict(f"{str(value).strip().splitlines()[-1]}{tail(work.log(rank))}")
    return Verdict() if complete else None


def ranks_of(work: Work) -> int:
    return work.note.get("ranks", 1)


def judge(
    work: Work,
    state: str | None,
    alive: Callable[[str | None], bool],
    grace: float,
    why: Callable[[Work, str | None], str],
    listing: Listing,
) -> Verdict | None:
    """The verdict on a job, given the state that the cluster has just reported for it; None while it lives.

    One rank's error is no verdict on several: it may only say that another was killed, by a scheduler that will start
    the job again, or for memory.

    Args:
        grace: seconds that the job must have been gone; its result may still be on its way between file servers,
            and a failed node's job may yet be requeued.
    """
    result = result_of(work, listing)
    if result is not None and not is_of_one_rank(result, work):
        return result
    if alive(state):
        work.gone = None
        return None
    if result is not None and state == FAILED and all(listing.has(work.result(rank)) for rank in range(ranks_of(work))):
        return for_several(result, work, state, why)  # none was killed, and Slurm does not start it again
    now = time.monotonic()
    if work.gone is None:
        work.gone = now
    if now - work.gone < grace:
        return None
    refresh(work.folder)
    result = result_of(work, Listing())
    if result is None:
        return Verdict(f"the job ended without a result: {why(work, state)}{tail(work.log())}")
    return for_several(result, work, state, why) if is_of_one_rank(result, work) else result


def is_of_one_rank(result: Verdict, work: Work) -> bool:
    """Whether it is the error of one of several."""
    return result.error is not None and ranks_of(work) > 1


def for_several(result: Verdict, work: Work, state: str | None, why: Callable[[Work, str | None], str]) -> Verdict:
    return Verdict(f"{why(work, state)}; one of {ranks_of(work)} ranks said: {result.error}")


def stays_over(work: Work, state: str | None, cancel: Callable[[list[str]], set[str]]) -> bool:
    """Whether a job that has ended will not start again.

    Slurm queues one anew whose node failed after its end; it would work on outputs that are in use by then. Such a job
    is cancelled first, and is over once that was possible.
    """
    return state not in QUEUED or work.id is None or work.id in cancel([work.id])


def refresh(folder: Path) -> None:
    """Makes a network file system look at the folder again."""
    try:
        folder.chmod(folder.stat().st_mode)
    except OSError:
        return


def tail(log: Path) -> str:
    """The last lines of a log, and where it is."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            lines = file.read().decode(errors="replace").splitlines()[-LINES:]
    except OSError:
        return f"\nno log at {log}"
    return "\n".join(["", f"--- last lines of {log}", *lines, "---"])
