"""What a former driver left in the cluster: jobs to take over, jobs to be rid of, and outputs to adopt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_common.exceptions import WorkflowError

from .arrays import Work, work_of
from .driver import lives
from .journal import Record, fingerprint, member_key
from .status import Listing, judge, result_of, stays_over

if TYPE_CHECKING:
    from .executor import Executor

PATIENCE = 120  # s, for a cancelled job to be gone


def attach(executor: Executor, works: list[Work]) -> tuple[list[Work], list[Work]]:
    """Takes over the jobs that run with the same inputs and parameters; returns them, and those to submit.

    A former job that makes the same outputs from anything else would write into ours: it is cancelled first.

    Raises:
        WorkflowError: such a job does not end.
    """
    by_member: dict[str, dict[int, Record]] = {}
    for record in executor.journal.open:
        for member in record.members:
            by_member.setdefault(member, {})[id(record)] = record
    attached, fresh, rivals = [], [], {}
    for work in works:
        found: dict[int, Record] = {}
        for member in work.members:
            found |= by_member.get(member, {})
        obstacles = {key: obstacle(executor, work, record) for key, record in found.items()}
        if len(found) == 1 and not any(obstacles.values()):
            take_over(executor, work, *found.values())
            attached.append(work)
        else:
            fresh.append(work)
            rivals |= {key: (record, obstacles[key]) for key, record in found.items()}
    dispose(executor, list(rivals.values()))
    return attached, fresh


def obstacle(executor: Executor, work: Work, record: Record) -> str | None:
    """Why the record's job cannot be taken for this work."""
    if record.id is None:
        return "was being submitted when its driver died"
    if record.members != work.members:
        return "makes the same files from other inputs or settings"
    if record.note["backend"] != executor.backend.name:
        return f"ran with the back end {record.note['backend']}"
    # Snakemake wants the job although it has ended: it failed while no driver was there to see it.
    result = result_of(Work(work.job, work.request, id=record.id, **place(record)), Listing())
    if result is not None:
        return f"failed: {result.error}" if result.error else None
    states = executor.states_at_start
    return None if states is None or executor.backend.alive(states.get(record.id)) else "is gone"


def place(record: Record) -> dict[str, Any]:
    return {"folder": Path(record.note["folder"]), "note": record.note}


def take_over(executor: Executor, work: Work, record: Record) -> None:
    executor.journal.open.remove(record)
    work.id, work.note, work.folder = record.id, record.note, Path(record.note["folder"])
    if executor.backend.name == "local":
        executor.backend.running.append(work)
    executor.logger.info(f"Attached to job {work.id} of {work.request.name}, submitted by a former driver")


def dispose(executor: Executor, rivals: list[tuple[Record, str | None]]) -> None:
    """Cancels jobs and waits until they are gone.

    Raises:
        WorkflowError: they are not gone in time, or run where this back end cannot reach them.
    """
    if not rivals:
        return
    backend = executor.backend
    for record, reason in rivals:
        executor.logger.warning(f"Job {record.id or record.token} of a former driver {reason}: it is submitted anew")
        if record.note["backend"] != backend.name and may_run(record):
            raise WorkflowError(f"job {record.id or record.token} may still run: use the former back end once more")
    ours = [record for record, _ in rivals if record.note["backend"] == backend.name]
    ids = [record.id for record in ours if record.id]
    ids += backend.by_token({record.token for record in ours if record.id is None})
    deadline = time.monotonic() + PATIENCE
    backend.cancel(ids)
    while left := living(backend, set(ids)):
        if time.monotonic() > deadline:
            raise WorkflowError(f"jobs {', '.join(left)} of a former driver were cancelled but do not end")
        time.sleep(1)
    for record, _ in rivals:
        executor.journal.forget(record)


def may_run(record: Record) -> bool:
    """Whether a job of the other back end may run; of Slurm's jobs nothing is known without Slurm."""
    return record.note["backend"] != "local" or lives(int(record.id or 0), record.note.get("started", 0))


def living(backend: Any, ids: set[str]) -> list[str]:
    """Those of the ids, of jobs or of arrays, that the cluster still runs; all, if it does not answer."""
    states = backend.states()
    if states is None:
        return sorted(ids)
    return [id for id, state in states.items() if backend.alive(state) and {id, id.split("_")[0]} & ids]


def settle(executor: Executor) -> None:
    """Looks, before anything is submitted, at jobs of a former driver whose outputs Snakemake takes for done.

    Such outputs may be half written, by a job that still runs, or be made with other parameters than today's, since
    the former driver never recorded what they were made with.

    Raises:
        WorkflowError: outputs of a job that failed, or ran with other parameters, are there.
    """
    if not executor.journal.open:
        return
    executor.states_at_start = executor.backend.states()
    jobs = {member_key(job): job for job in executor.dag.jobs if not executor.dag.needrun(job)}
    problems = []
    for record in list(executor.journal.open):
        done = {key: jobs[key] for key in record.members if key in jobs}
        if done and len(done) == len(record.members) and record.note["backend"] == executor.backend.name:
            problems.append(adopt(executor, record, done))
    if any(problems):
        raise WorkflowError("\n".join(filter(None, problems)))


def adopt(executor: Executor, record: Record, jobs: dict[str, Any]) -> str | None:
    """Records the outputs as complete, once the job that makes them has succeeded; else says what is wrong."""
    outputs = ", ".join(str(path) for job in jobs.values() for path in job.output)
    if any(fingerprint(job) != record.members[key] for key, job in jobs.items()):
        return f"job {record.id} of a former driver made {outputs} with other settings: delete them"
    error = wait_for_end(executor, work_of(next(iter(jobs.values()))), record)
    if error:
        return f"job {record.id} of a former driver left {outputs} but failed: delete them\n{error}"
    for job in jobs.values():
        executor.workflow.async_run(executor.workflow.persistence.finished(job))
    executor.journal.forget(record)
    executor.logger.info(f"Adopted {outputs} from job {record.id} of a former driver")
    return None


def wait_for_end(executor: Executor, work: Work, record: Record) -> str | None:
    """The error with which the job ended, if it did."""
    backend = executor.backend
    if record.id is None:
        return "it was never seen to start"
    work.id, work.note, work.folder = record.id, record.note, Path(record.note["folder"])
    states = executor.states_at_start
    while True:
        alive = backend.alive if states is not None else lambda state: True
        verdict = judge(work, (states or {}).get(work.id), alive, executor.grace, backend.why, Listing())
        if verdict and stays_over(work, (states or {}).get(work.id), backend.cancel):
            return verdict.error
        time.sleep(1)
        states = backend.states()
