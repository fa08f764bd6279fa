"""The back end that talks to Slurm: sbatch through submitit, squeue, scancel, scontrol. Never sacct."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .arrays import Work, new_token
from .journal import Journal
from .resources import slurm_parameters
from .settings import ExecutorSettings

# What squeue still lists for some minutes after a job's end. Whatever else it says, the job lives: requeued,
# suspended and completing jobs, jobs held after a failed node, and states that a later Slurm may invent.
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
# Without these, a cluster that is found by variables would be hidden along with the settings that must be.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SUBMITIT_PREEMPT_SIGNAL")
# Each option of Slurm's commands has such a variable: SQUEUE_PARTITION would make jobs elsewhere look gone.
OPTION_VARIABLES = ("SLURM_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
IDS_PER_SCANCEL = 500

# Refusals of the request itself, in Slurm's words; others may pass: a busy controller, a limit on submitted jobs.
PERMANENT = re.compile(
    r"invalid (partition|account|qos|feature|generic resource|node name|time limit)"
    r"|requested node configuration is not available|requested time limit is invalid|more processors requested",
    re.IGNORECASE,
)


class Refused(Exception):
    """Slurm did not take the jobs; the message is its own."""


class Slurm:
    name = "slurm"

    def __init__(self, settings: ExecutorSettings, journal: Journal, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.journal = journal
        self.say = say
        # Submissions change os.environ for a moment, while another thread asks for the state of jobs.
        self.environment = without_options(os.environ)
        self.largest = settings.max_array_size or self.max_array_size()
        self.unconfirmed: set[str] = set()

    def ask(self, *command: str, seconds: float = 60) -> str:
        """What the command prints.

        Raises:
            subprocess.SubprocessError, OSError: it failed, or took longer than the seconds given.
        """
        result = subprocess.run(  # noqa: S603
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
            start_new_session=True,
        )
        return result.stdout

    def max_array_size(self) -> int:
        """Jobs that one array may have: an array's largest index stays below Slurm's MaxArraySize."""
        try:
            match = re.search(r"^MaxArraySize\s*=\s*(\d+)", self.ask("scontrol", "show", "config"), re.MULTILINE)
        except (subprocess.SubprocessError, OSError):
            match = None
        return max(1, int(match[1]) - 1) if match else 1000

    def submit(self, works: list[Work]) -> None:
        """Submits the jobs, of one request, as one array, and gives them their ids.

        Raises:
            Refused: sbatch refused, for what time does not change or each time that it was asked.
        """
        for attempt in range(self.settings.submit_retries + 1):
            try:
                return self.submit_once(works)
            except Refused as error:
                if attempt == self.settings.submit_retries or PERMANENT.search(str(error)):
                    raise
                self.say(f"sbatch refused {len(works)} x {works[0].request.name}: {error}; again in {2 << attempt} s")
                time.sleep(2 << attempt)

    def submit_once(self, works: list[Work]) -> None:
        from submitit import SlurmExecutor

        if self.unconfirmed:
            self.undo("an earlier sbatch failed")
        token, settings = new_token(), self.settings
        folder = settings.folder.absolute() / works[0].request.name / token
        executor = SlurmExecutor(folder, max_num_timeout=settings.max_timeouts, python=patient_python())
        executor.update_parameters(
            **slurm_parameters(
                works[0].request, token, settings.array_parallelism, works[0].task.notice, settings.setup
            )
        )
        for work in works:
            work.folder = folder
            work.describe(self.name)
        self.unconfirmed.add(token)
        self.journal.intend(token, [work.members for work in works], [work.note for work in works])
        ids = self.sbatch(executor, works)
        self.journal.submitted(token, ids[0].split("_")[0], array=len(works) > 1)
        for work, id in zip(works, ids, strict=True):
            work.id = id
        self.unconfirmed.discard(token)

    def sbatch(self, executor: Any, works: list[Work]) -> list[str]:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            with clean_environment(), executor.batch():
                jobs = [executor.submit(work.task) for work in works]
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            words = str(error).strip().replace("\n", " ")
            self.undo(words)
            shutil.rmtree(executor.folder, ignore_errors=True)
            raise Refused(words) from error
        return [job.job_id for job in jobs]

    def undo(self, words: str) -> None:
        """Cancels what Slurm took although sbatch failed, as for "socket timed out", lest a second try doubles it.

        Raises:
            Refused: Slurm does not answer, and nothing is submitted until it does.
        """
        ids = self.by_token(self.unconfirmed)
        if ids is None or not set(ids) <= self.cancel(ids):
            raise Refused(f"{words}; Slurm does not answer whether it took the jobs, or does not cancel them")
        for token in self.unconfirmed:
            self.journal.ended(None, token)
        self.unconfirmed.clear()

    def states(self) -> dict[str, str] | None:
        """Id -> state of all jobs of this user that Slurm knows, by one squeue; None if it does not answer."""
        lines = self.squeue("-r", "-t", "all", "-o", "%i|%T")
        return None if lines is None else dict(line.split("|", 1) for line in lines)

    def squeue(self, *options: str) -> list[str] | None:
        """Its lines on this user's jobs, those in hidden partitions included; None if it does not answer."""
        try:
            text = self.ask("squeue", "--all", "-h", "-u", str(os.getuid()), *options)
        except (subprocess.SubprocessError, OSError) as error:
            self.say(f"squeue does not answer; waiting ({str(getattr(error, 'stderr', '') or error).strip()})")
            return None
        return [line for line in text.splitlines() if "|" in line]

    def alive(self, state: str | None) -> bool:
        return state is not None and state not in ENDED

    def why(self, work: Work, state: str | None) -> str:
        """What Slurm says about the end of a job that left no result."""
        try:
            text = self.ask("scontrol", "show", "job", "--oneliner", work.id or "", seconds=20)
        except (subprocess.SubprocessError, OSError):
            text = ""
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        state = found.get("JobState", state) or "no longer known to Slurm"
        code, _, signal = found.get("ExitCode", "0:0").partition(":")
        details = {
            "CANCELLED": "somebody cancelled it (scancel)",
            "OUT_OF_MEMORY": "it needs a larger mem_mb",
            "TIMEOUT": "it did not stop when its time limit was near; it needs a larger runtime",
            "NODE_FAIL": f"node {found.get('NodeList', '')} failed",
            "FAILED": f"exit code {code}" + (f", signal {signal}" if signal != "0" else "") + hint(int(code), signal),
        }
        return f"{state}: {details[state]}" if state in details else state

    def cancel(self, ids: Iterable[str]) -> set[str]:
        """Cancels the jobs; returns those of which Slurm took note."""
        everything, cancelled = sorted(ids), set()
        for start in range(0, len(everything), IDS_PER_SCANCEL):
            some = everything[start : start + IDS_PER_SCANCEL]
            try:
                self.ask("scancel", "--quiet", *some)
                cancelled.update(some)
            except (subprocess.SubprocessError, OSError) as error:
                self.say(f"scancel failed: {str(getattr(error, 'stderr', '') or error).strip()}")
        return cancelled

    def cancel_everything(self, ids: Iterable[str]) -> set[str]:
        """Cancels the jobs, those included of which sbatch had not yet told the id; returns as `cancel` does."""
        return self.cancel(set(ids) | set(self.by_token(set(self.unconfirmed)) or []))

    def by_token(self, tokens: set[str]) -> list[str] | None:
        """Ids of the submissions that Slurm still has; None if it does not answer."""
        if not tokens:
            return []
        lines = self.squeue("-o", "%F|%k")
        if lines is None:
            return None
        return sorted({line.split("|")[0] for line in lines if line.partition("|")[2] in tokens})


def hint(code: int, signal: str) -> str:
    return " (killed; perhaps for memory)" if code == 137 or signal == "9" else ""


def patient_python() -> str:
    """A python that a signal cannot end while it still imports; one that comes so early is lost, not the job."""
    from submitit.core.job_environment import JobEnvironment

    return f"""bash -c 'trap "" {JobEnvironment.USR_SIG}; exec "$0" "$@"' {shlex.quote(sys.executable)}"""


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a user's shell, or the driver's own job, says to Slurm's commands."""
    return {name: value for name, value in environment.items() if name in KEPT or not name.startswith(OPTION_VARIABLES)}


@contextmanager
def clean_environment() -> Iterator[None]:
    """Submission from within a job must not inherit that job's own settings."""
    from submitit.helpers import clean_env

    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    with clean_env():
        os.environ.update(kept)
        yield
