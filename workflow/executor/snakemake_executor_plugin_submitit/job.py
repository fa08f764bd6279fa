"""What runs in a job: a class called in this process, or a nested snakemake. Pickled at submission, hence small."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission
from submitit.helpers import TorchDistributedEnvironment

from .interruption import Interruption, quiet_children


@dataclass
class Call:
    """A rule's class, called in the job's own process so that it hears the scheduler's signals.

    Args:
        call: `package.module:Class`; constructed with the fields below as keywords and called without arguments.
        input, output, log: paths, relative to the working directory.
        params, resources: plain values.
        notice: seconds between the signal and the time limit.
    """

    call: str
    input: list[str]
    output: list[str]
    params: dict[str, Any]
    log: list[str]
    threads: int
    resources: dict[str, Any]
    notice: int

    def __call__(self) -> None:
        interruption = Interruption(self.notice)
        environment = JobEnvironment()
        forget_result(environment)
        if environment.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
            if environment.num_nodes == 1:  # a node's name need not be one that it can look up
                os.environ["MASTER_ADDR"] = "127.0.0.1"
        for path in (*self.output, *self.log):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        log = self.log[0] if self.log and environment.global_rank == 0 else None
        with also_written_to(log):
            # squeue shows many jobs of one name: this tells which is which.
            sys.stderr.write(f"job {environment.job_id}: {self.call} for {', '.join(self.output)}\n")
            sys.stderr.flush()
            self.run(interruption)
        missing = [path for path in self.output if environment.global_rank == 0 and not Path(path).exists()]
        if missing:
            interruption.leave_if_ended()
            raise FileNotFoundError(f"{self.call} ended without making {', '.join(missing)}")

    def run(self, interruption: Interruption) -> None:
        """Calls the class; an exception whose class says `interrupted` requeues the job.

        What fails while the scheduler ends the job is no result: it ends for the scheduler's reason.
        """
        try:
            target = interruption.target = pkgutil.resolve_name(self.call)(
                input=list(self.input),
                output=list(self.output),
                params=dict(self.params),
                log=list(self.log),
                threads=self.threads,
                resources=dict(self.resources),
            )
            target()
        except SystemExit as end:
            # submitit takes no note of SystemExit; from here it would look like a killed job.
            if interruption.leaving:
                raise
            if end.code not in (None, 0):
                interruption.leave_if_ended()
                raise RuntimeError(f"{self.call} ended with exit code {end.code}") from end
        except Exception as error:
            quiet_children()
            if getattr(type(error), "interrupted", False):
                interruption.requeue()
            traceback.print_exc()
            interruption.leave_if_ended()
            raise

    def checkpoint(self) -> DelayedSubmission:
        """What a requeued job runs: the same call, which finds its own checkpoint."""
        return DelayedSubmission(self)


@dataclass
class Nested:
    """A rule's job, run by a snakemake of its own. It starts anew when preempted and fails at its time limit."""

    command: str
    notice: int

    def __call__(self) -> None:
        interruption = Interruption(self.notice)
        forget_result(JobEnvironment())
        # The profile of the driver would send this job to the cluster again.
        environment = {name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"}
        process = subprocess.Popen(["bash", "-c", self.command], env=environment, preexec_fn=deaf)  # noqa: S603, S607
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                end_family(process.pid)
        if code < 0 or code > 128:
            time.sleep(2)  # the signal that ended it is on its way to this process too
        if code and not interruption.leaving:
            interruption.leave_if_ended()
            raise RuntimeError(f"the job's snakemake ended with exit code {code}")


def forget_result(environment: JobEnvironment) -> None:
    """Removes the result of this rank's former start, which must not be taken for the end of this one.

    What a kill left of its writing goes too: submitit refuses to write over it.
    """
    path = environment.paths.result_pickle
    path.unlink(missing_ok=True)
    path.with_suffix(f"{path.suffix}.save_tmp").unlink(missing_ok=True)


def deaf() -> None:
    """Ignores submitit's signal, which Slurm sends to every process of a job and which would end most of them."""
    signal.signal(JobEnvironment._usr_sig(), signal.SIG_IGN)


def deaf_to_all() -> None:
    deaf()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_family(pid: int) -> None:
    """Kills a process and its descendants."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def also_written_to(path: str | None) -> Iterator[None]:
    """Copies standard output and error, those of child processes too, to a file as well.

    The copying is done by a process of its own: what was written survives a hard end of this one.
    """
    if path is None:
        yield
        return
    kept = os.dup(1), os.dup(2)
    tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, preexec_fn=deaf_to_all)  # noqa: S603, S607
    stdin = cast(IO[bytes], tee.stdin)
    os.dup2(stdin.fileno(), 1)
    os.dup2(stdin.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(timeout=10)
