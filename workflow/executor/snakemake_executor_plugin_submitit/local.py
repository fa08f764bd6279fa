"""The back end for one machine: as many jobs at once as it has cores, memory and GPUs for, each with its own GPUs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from .arrays import Work, new_token
from .driver import lives, ran_here
from .journal import Journal
from .resources import Request
from .settings import ExecutorSettings

FOREVER = 60 * 24 * 3650  # minutes; submitit's own default ends jobs after two
RUNNING = "running"


class Local:
    name = "local"

    def __init__(self, settings: ExecutorSettings, journal: Journal, say: Callable[[str], None]) -> None:
        import psutil

        self.settings = settings
        self.journal = journal
        self.cores = len(os.sched_getaffinity(0))
        self.mem_mb = psutil.virtual_memory().total // 2**20
        self.gpus = visible_gpus()
        # When each process began, a former driver's too: after a reboot its number may be somebody else's.
        self.started = {r.id: r.note["started"] for r in journal.open if r.id and is_here(r.note)}
        # Jobs are started both when they are submitted and, by another thread, when others have ended.
        self.lock = threading.Lock()
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.processes: list[Any] = []  # submitit's jobs: to collect the exit of ended processes
        self.largest = 10_000  # there are no arrays here

    def submit(self, works: list[Work]) -> None:
        with self.lock:
            self.waiting.extend(works)
        self.start_what_fits()

    def start_what_fits(self) -> None:
        """Starts waiting jobs, first come first served; one that is too large for the machine runs alone."""
        with self.lock:
            self.start_under_lock()

    def start_under_lock(self) -> None:
        self.running = [work for work in self.running if self.runs(work)]
        for work in list(self.waiting):
            free = [gpu for gpu in self.gpus if all(gpu not in other.note["gpus"] for other in self.running)]
            if self.running and not self.fits(work.request, len(free)):
                return
            self.waiting.remove(work)
            self.start(work, free[: work.request.gpu])

    def fits(self, request: Request, free_gpus: int) -> bool:
        requests = [work.request for work in self.running]
        threads = sum(other.threads * other.ranks for other in requests) + request.threads * request.ranks
        memory = sum(other.mem_mb or 0 for other in requests) + (request.mem_mb or 0)
        return threads <= self.cores and memory <= self.mem_mb and min(request.gpu, len(self.gpus)) <= free_gpus

    def start(self, work: Work, gpus: list[int]) -> None:
        import psutil
        from submitit import LocalExecutor
        from submitit.helpers import clean_env

        token, request = new_token(), work.request
        work.folder = self.settings.folder.absolute() / request.name / token
        executor = LocalExecutor(work.folder, max_num_timeout=self.settings.max_timeouts)
        minutes = request.minutes or FOREVER
        executor.update_parameters(
            timeout_min=minutes,
            signal_delay_s=work.task.notice,
            tasks_per_node=request.ranks,
            gpus_per_node=len(gpus),
            visible_gpus=gpus,
            stderr_to_stdout=True,
        )
        work.describe(self.name, host=socket.gethostname(), gpus=gpus)
        self.journal.intend(token, [work.members], [work.note])
        with clean_env():
            job = executor.submit(work.task)
        work.id = job.job_id
        started = psutil.Process(int(work.id)).create_time()
        self.journal.submitted(token, work.id, array=False, started=started)
        work.note["started"] = self.started[work.id] = started
        self.processes.append(job)
        self.running.append(work)

    def runs(self, work: Work) -> bool:
        self.processes = [job for job in self.processes if not job.done()]
        return lives(int(work.id or 0), work.note["started"])

    def states(self) -> dict[str, str] | None:
        self.start_what_fits()
        with self.lock:
            self.started = {id: started for id, started in self.started.items() if lives(int(id), started)}
            return dict.fromkeys(self.started, RUNNING)

    def alive(self, state: str | None) -> bool:
        return state is not None

    def why(self, work: Work, state: str | None) -> str:
        return "its process ended or was killed"

    def cancel(self, ids: Iterable[str]) -> set[str]:
        """Kills the processes, unless they have ended and their numbers are other processes' now; returns the ids."""
        from .job import end_family

        ids = set(ids)
        for id in ids:
            if id in self.started and lives(int(id), self.started[id]):
                end_family(int(id))
        return ids

    def cancel_everything(self, ids: Iterable[str]) -> set[str]:
        """Cancels the jobs, and those that have not been started yet or were started a moment ago."""
        with self.lock:
            self.waiting.clear()
            return self.cancel(set(ids) | {work.id for work in self.running if work.id and self.runs(work)})

    def by_token(self, tokens: set[str]) -> list[str]:
        """Processes that work in a folder of one of these submissions."""
        import psutil

        found = {}
        for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
            words = process.info["cmdline"] or []
            if "submitit.local._local" in words and any(token in words[-1] for token in tokens):
                found[str(process.info["pid"])] = process.info["create_time"]
        with self.lock:
            self.started.update(found)
        return list(found)


def is_here(note: dict[str, Any]) -> bool:
    """Whether the note is of a process of this machine."""
    return note["backend"] == Local.name and ran_here(note)


def visible_gpus() -> list[int]:
    """Indices of the GPUs that this process may use.

    Raises:
        WorkflowError: they are named by something else than indices, which submitit cannot hand out.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if not re.fullmatch(r"[\d,\s]*", visible):
            raise WorkflowError(f"CUDA_VISIBLE_DEVICES={visible}: the local back end takes indices such as 0,1")
        return [int(index) for index in re.findall(r"\d+", visible)]
    if shutil.which("nvidia-smi") is None:
        return []
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)  # noqa: S607
    return list(range(len(re.findall(r"^GPU \d+:", result.stdout, re.MULTILINE))))
