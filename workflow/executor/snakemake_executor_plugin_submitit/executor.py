"""The executor that Snakemake drives: it submits what is ready, watches it, and cancels it."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface

from . import arrays, attach, driver
from .arrays import Work
from .journal import Journal
from .local import Local
from .resources import DEFAULT_MINUTES, signal_delay
from .slurm import Refused, Slurm
from .status import Listing, judge, stays_over

LOCAL_POLL_SECONDS = 1
LOCAL_GRACE_SECONDS = 2


class Executor(RemoteExecutor):
    """Jobs as submitit's, on Slurm or on this machine."""

    def __post_init__(self) -> None:
        self.settings = self.executor_settings
        self.make_folder()
        locks = getattr(self.workflow.persistence, "_lockfile", {}).values()
        driver.note_driver(self.settings.folder, locks)
        self.journal = Journal(self.settings.folder / "journal.jsonl")
        self.backend = self.choose_backend()
        self.works: dict[Any, Work] = {}  # all that was started and has not ended
        self.closing: dict[Any, str | None] = {}  # ended, but not yet entered in Snakemake's own records
        self.nested_cores: int | None = None
        self.states_at_start: dict[str, str] | None = None
        attach.settle(self)

    def make_folder(self) -> None:
        """Jobs run what lies in it, so it is for nobody else.

        Raises:
            WorkflowError: it is not this user's own.
        """
        folder = self.settings.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise WorkflowError(f"--submitit-folder {folder} must be a folder of your own: {error.strerror}") from error

    def choose_backend(self) -> Slurm | Local:
        name = self.settings.backend or ("slurm" if shutil.which("sbatch") else "local")
        if name == "slurm":
            if shutil.which("sbatch") is None or shutil.which("srun") is None:
                raise WorkflowError("there is no sbatch or srun here; use --submitit-backend local")
            return Slurm(self.settings, self.journal, self.logger.warning)
        self.next_seconds_between_status_checks = LOCAL_POLL_SECONDS
        return Local(self.settings, self.journal, self.logger.warning)

    @property
    def grace(self) -> float:
        return self.settings.grace_seconds if self.backend.name == "slurm" else LOCAL_GRACE_SECONDS

    def run_job(self, job: JobExecutorInterface) -> None:
        self.run_jobs([job])

    def run_jobs(self, jobs: list[JobExecutorInterface]) -> None:
        """Attaches to those that run already, and submits the others as arrays."""
        works = []
        for job in jobs:
            self.run_job_pre(job)
            try:
                works.append(arrays.work_of(job))
            except WorkflowError as error:
                self.report_job_error(SubmittedJobInfo(job), msg=f"{error}. ")
        attached, fresh = attach.attach(self, works)
        for work in attached:
            self.report(work)
        for batch in arrays.batches(fresh, self.backend.largest):
            self.submit(batch)

    def submit(self, batch: list[Work]) -> None:
        ready = [work for work in batch if self.prepare(work)]
        if not ready:
            return
        # Known before it is submitted: a Ctrl-C may come at any moment.
        self.works.update({work.job: work for work in ready})
        try:
            self.backend.submit(ready)
        except Refused as error:
            for work in ready:
                del self.works[work.job]
                self.report_job_error(SubmittedJobInfo(work.job), msg=f"sbatch refused the job: {error}. ")
            return
        self.logger.info(f"Submitted {len(ready)} x {ready[0].request.name}: {span(ready)}, logs in {ready[0].folder}")
        for work in ready:
            self.report(work)

    def prepare(self, work: Work) -> bool:
        """Gives the work its task, and does for a callable what a nested snakemake would do: folders, old outputs."""
        job, minutes = work.job, work.request.minutes or DEFAULT_MINUTES
        in_process = arrays.runs_in_process(job)
        # A nested job cannot use the notice for a checkpoint: it would only lose the time.
        notice = signal_delay(minutes, self.settings.signal_delay_seconds if in_process else 1)
        try:
            if in_process:
                work.task = arrays.call_of(job, notice)
                self.workflow.async_run(job.prepare())
            else:
                work.task = self.nested(job, notice)
        except WorkflowError as error:
            self.report_job_error(SubmittedJobInfo(job), msg=f"{error}. ")
            return False
        return True

    def nested(self, job: JobExecutorInterface, notice: int) -> Any:
        from .job import Nested

        self.nested_cores = job.threads
        os.environ.update(self.envvars())  # to be inherited; those of storage providers may come from options
        return Nested(command=self.format_job_exec(job), notice=notice)

    @property
    def cores(self) -> Any:
        return self.nested_cores or super().cores

    def additional_general_args(self) -> str:
        return "--executor local"

    def report(self, work: Work) -> None:
        self.works[work.job] = work
        self.report_job_submission(SubmittedJobInfo(work.job, external_jobid=work.id))

    async def sleep(self) -> None:
        """The pause between two polls, cut short when there is nothing left to wait for."""
        until = time.monotonic() + self.next_seconds_between_status_checks
        while self.wait and time.monotonic() < until:
            await asyncio.sleep(min(0.5, until - time.monotonic()))

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Yields the jobs that live; reports the others."""
        if not active_jobs:
            return
        async with self.status_rate_limiter:
            states = await asyncio.to_thread(self.backend.states)
        listing = Listing()
        for info in active_jobs:
            if not self.ended(info, states, listing):
                yield info

    def ended(self, info: SubmittedJobInfo, states: dict[str, str] | None, listing: Listing) -> bool:
        """Reports the job if it has ended. Without states from the cluster only a result counts."""
        work = self.works[info.job]
        if work.id is None:
            return False
        state = states.get(work.id) if states is not None else None
        alive = self.backend.alive if states is not None else lambda state: True
        was_there = work.gone is None
        verdict = judge(work, state, alive, self.grace, self.backend.why, listing)
        if verdict is None and was_there and work.gone is not None:
            self.logger.info(f"Job {work.id} has left the queue: waiting up to {self.grace:.0f} s for its result")
        if verdict is None or not stays_over(work, state, self.backend.cancel):
            return False
        self.closing[info.job] = work.id
        del self.works[info.job]
        info.external_jobid = work.id
        if verdict.error is None:
            self.report_job_success(info)
        else:
            self.report_job_error(info, msg=f"{verdict.error}\n", aux_logs=[str(work.log())])
        return True

    def handle_job_success(self, job: JobExecutorInterface) -> None:
        self.close(job)

    def handle_job_error(self, job: JobExecutorInterface) -> None:
        self.close(job)

    def close(self, job: JobExecutorInterface) -> None:
        """Enters the end in the journal, now that Snakemake has dealt with the outputs."""
        if job in self.closing:
            self.journal.ended(self.closing.pop(job))

    def print_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **kwargs: Any) -> None:
        if job_info.job.is_group() and msg:
            self.logger.error(msg)  # Snakemake's report of a group's error leaves the message out
        super().print_job_error(job_info, msg=msg, **kwargs)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancels everything that runs: more than `active_jobs`, which is empty while their state is asked for."""
        works = list(self.works.values())
        ids = {work.id for work in works if work.id}
        left = ids - self.backend.cancel_everything(ids)
        for id in ids - left:
            self.journal.ended(id)
        self.logger.info(f"Cancelled {len(works) - len(left)} jobs.")
        if left:
            self.logger.warning(f"{len(left)} jobs could not be cancelled: the next start takes care of them.")

    def shutdown(self) -> None:
        super().shutdown()
        driver.forget_driver(self.settings.folder)


def span(works: list[Work]) -> str:
    """Their ids: `4711`, or `4711_0 to 4711_99`."""
    ids = [work.id for work in works if work.id]
    if not ids:
        return "waiting for a free place"
    return ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"
