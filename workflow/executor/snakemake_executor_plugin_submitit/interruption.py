"""How a job ends before its time: the signals of a scheduler, and what becomes of the job.

submitit requeues on its own signal (USR2: time limit, preemption) and ignores TERM. Here a callable may first finish
its step, TERM counts as well, and a job that somebody cancelled is never requeued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from submitit.core.job_environment import JobEnvironment, SignalHandler
from submitit.core.logger import get_logger

EARLY = 60  # s; Slurm may send the signal that much before its due time
PAUSES = (2, 5, 10, 20)  # s, between attempts to reach the controller
OTHER_RANKS_WAIT = 300  # s, for rank 0 to requeue the job


class Interruption:
    """Takes over submitit's signals for the running job.

    Args:
        notice: seconds between the signal and the time limit.
    """

    def __init__(self, notice: int) -> None:
        usual: Any = signal.getsignal(JobEnvironment._usr_sig())
        self.handler: SignalHandler = usual.__self__
        self.handler.has_timed_out = self.timed_out
        self.requeue_once, self.handler.env._requeue = self.handler.env._requeue, self.requeue_patiently
        self.notice = notice
        self.process = os.getpid()
        self.started = time.monotonic()
        self.target: Any = None
        self.terminated = False
        self.leaving = False
        self.listen(self.receive)

    def listen(self, action: Any) -> None:
        signal.signal(signal.SIGTERM, action)
        signal.signal(JobEnvironment._usr_sig(), action)

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Asks the target to stop at its next step, or requeues at once if it cannot be asked."""
        if os.getpid() != self.process:
            return ignored_in_child(signum)
        self.terminated |= signum == signal.SIGTERM
        stop = getattr(self.target, "stop", None)
        if stop is None:
            return self.requeue()
        get_logger().warning(f"{signal.Signals(signum).name}: asked to stop at the next step")
        stop()

    def leave_if_ended(self) -> None:
        """Leaves the job, without a result, if the scheduler is ending it; returns if what failed is its own fault.

        Slurm sends TERM to every process of a job. A data loader's worker dies of it, and the library raises in this
        process, perhaps before it has got the signal itself.
        """
        if self.terminated or not self.still_wanted():
            self.requeue()

    def requeue(self) -> None:
        """Leaves the job so that it starts again, unless it was cancelled. Does not return.

        Raises:
            UncompletedJobError: it reached its time limit and cannot, or may not again, be continued.
        """
        # Requeueing makes Slurm end this process with TERM, which must not start all this again.
        self.listen(signal.SIG_IGN)
        quiet_children()
        self.leaving = True
        environment = self.handler.env
        if not self.still_wanted():
            get_logger().warning("this job was cancelled, or is requeued already: leaving")
            sys.exit(128 + signal.SIGTERM)
        if environment.global_rank and environment.name() == "slurm":
            time.sleep(OTHER_RANKS_WAIT)
            sys.exit(1)
        if environment.global_rank:
            environment._requeue(0)
        self.handler.checkpoint_and_try_requeue(JobEnvironment._usr_sig())

    def timed_out(self) -> bool:
        limit = self.handler._delayed._timeout_min * 60
        return time.monotonic() - self.started >= limit - self.notice - EARLY - 30

    def still_wanted(self) -> bool:
        """Whether Slurm would still let this job run: false once it is cancelled or requeued."""
        environment = self.handler.env
        if environment.name() != "slurm":
            return True
        for pause in PAUSES:
            # Not the raw id: an array's last job has the array's own, which stands for all its jobs.
            command = ["scontrol", "show", "job", "--oneliner", environment.job_id]
            result = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
            if result.returncode == 0:
                return "JobState=RUNNING" in result.stdout or "JobState=SUSPENDED" in result.stdout
            time.sleep(pause)
        return not self.terminated

    def requeue_patiently(self, countdown: int) -> None:
        for pause in PAUSES:
            try:
                return self.requeue_once(countdown)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                get_logger().warning(f"{error}; next attempt in {pause} s")
                time.sleep(pause)
        return self.requeue_once(countdown)


def quiet_children() -> None:
    """Takes away what a library does when a child dies; PyTorch's data loader then raises, wherever this process is."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ignored_in_child(signum: int) -> None:
    """Slurm signals every process of a job: data loaders that were forked from it have these handlers too."""
    if signum == signal.SIGTERM:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
