"""What a former driver left in the cluster: jobs to take over, jobs to be rid of, and outputs to adopt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_common.exceptions import WorkflowError

from .arrays import Work
from .driver import lives
from .journal import Record, fingerprint, member_key, singles
from .local import Local, is_here
from .resources import Request
from .status import Listing, Verdict, judge, result_of, stays_over

if TYPE_CHECKING:
    from .executor import Executor

PATIENCE = 120  # s, for a cancelled job to be gone


def attach(executor: Executor, works: list[Work]) -> tuple[list[Work], list[Work]]:
    """Takes over the jobs that run with the same inputs and parameters; returns them, and those to submit.

    A former job that makes the same outputs from anything else would write into ours: it is cancelled first.

    Raises:
        WorkflowError: such a job does not end.
    """
    by_member: dict[str, list[Record]] = {}
    for record in executor.journal.open:
        for member in record.members:
            by_member.setdefault(member, []).append(record)
    listing = Listing()
    attached, fresh = [], []
    rivals: dict[Record, str | None] = {}
    for work in works:
        found = dict.fromkeys(record for member in work.members for record in by_member.get(member, []))
        obstacles = {record: obstacle(executor, work, record, listing) for record in found}
        if len(found) == 1 and not any(obstacles.values()):
            take_over(executor, work, *found)
            attached.append(work)
        else:
            fresh.append(work)
            rivals |= obstacles
    dispose(executor, rivals, listing)
    return attached, fresh


def obstacle(executor: Executor, work: Work, record: Record, listing: Listing) -> str | None:
    """Why the record's job cannot be taken for this work."""
    if record.id is None:
        return "was being submitted when its driver died"
    if record.members != work.members:
        return "makes the same files from other inputs or settings"
    if record.note["backend"] != executor.backend.name:
        return f"ran with the back end {record.note['backend']}"
    result = end_of(record, listing)
    if result is not None:
        return f"failed: {result.error}" if result.error else staleness(executor, work.job, record)
    if out_of_reach(executor, record, listing):
        return "runs elsewhere"
    states = executor.states_at_start
    return None if states is None or executor.backend.alive(states.get(record.id)) else "is gone"


def staleness(executor: Executor, job: Any, record: Record) -> str | None:
    """Why what an ended job left is not what Snakemake asks for, although inputs and settings are the same."""
    reasons = [executor.dag.reason(single) for single in singles(job)]
    if any(reason.forced or reason.code_changed or reason.software_stack_changed for reason in reasons):
        return "has ended, and is asked for once more"
    return executor.workflow.async_run(outdated(job, just_ended(record, executor)))


async def outdated(job: Any, just_ended: bool) -> str | None:
    """What is wrong with the outputs of a job that has ended, by their times and those of the inputs."""
    if not job.output or not all([await path.exists() for path in job.output]):
        # Right after the end they may not be visible yet, and Snakemake itself waits for them.
        return None if job.output and just_ended else "has ended, but its outputs are not there"
    for single in singles(job):
        oldest = await single.output_mintime
        if oldest and any([await path.exists() and await path.is_newer(oldest) for path in single.input]):
            return "has ended, but an input is newer than its outputs"
    return None


def just_ended(record: Record, executor: Executor) -> bool:
    result = work_from(record).result()
    return result.exists() and time.time() - result.stat().st_mtime < executor.workflow.execution_settings.latency_wait


def work_from(record: Record) -> Work:
    """The record's job, as far as its result can be looked up."""
    return Work(None, Request(""), id=record.id, folder=Path(record.note["folder"]), note=record.note)


def end_of(record: Record, listing: Listing) -> Verdict | None:
    """What the job's results say, on any machine; None while it may run, as it may if one of several ranks failed."""
    if record.id is None:
        return None
    verdict = result_of(work_from(record), listing)
    return None if verdict and verdict.error and record.note["ranks"] > 1 else verdict


def take_over(executor: Executor, work: Work, record: Record) -> None:
    executor.journal.open.remove(record)
    work.id, work.note, work.folder = record.id, record.note, Path(record.note["folder"])
    if isinstance(executor.backend, Local):
        executor.backend.running.append(work)
    executor.logger.info(f"Attached to job {work.id} of {work.request.name}, submitted by a former driver")


def dispose(executor: Executor, rivals: dict[Record, str | None], listing: Listing) -> None:
    """Cancels jobs and waits until they are gone.

    Raises:
        WorkflowError: they are not gone in time, or run where this back end cannot reach them.
    """
    if not rivals:
        return
    backend = executor.backend
    if refused := [problem for record in rivals if (problem := out_of_reach(executor, record, listing))]:
        raise WorkflowError("\n".join(refused))
    for record, reason in rivals.items():
        executor.logger.warning(f"Job {record.id or record.token} of a former driver {reason}: it is submitted anew")
    ours = [record for record in rivals if record.note["backend"] == backend.name]
    deadline = time.monotonic() + PATIENCE
    while (found := backend.by_token({record.token for record in ours if record.id is None})) is None:
        if time.monotonic() > deadline:
            raise WorkflowError("squeue does not tell what became of a former driver's last submission")
        time.sleep(1)
    ids = {record.id for record in ours if record.id} | set(found)
    backend.cancel(ids)
    while left := living(backend, ids):
        if time.monotonic() > deadline:
            raise WorkflowError(f"jobs {', '.join(left)} of a former driver were cancelled but do not end")
        time.sleep(1)
    for record in rivals:
        executor.journal.forget(record)


def out_of_reach(executor: Executor, record: Record, listing: Listing) -> str | None:
    """Says so if the job may run where this back end neither sees nor ends it: another machine, or another back end."""
    if end_of(record, listing) is not None:
        return None
    job, note = f"job {record.id or record.token} of a former driver may still run", record.note
    if note["backend"] == Local.name and not is_here(note):
        return f"{job} on {note.get('host')}: go on there or, if that machine is gone, delete {executor.journal.path}"
    if note["backend"] == executor.backend.name:
        return None
    if note["backend"] == Local.name and not lives(int(record.id or 0), note.get("started", 0)):
        return None
    return f"{job}: use the back end {note['backend']} once more"


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
    jobs = {member_key(job): job for job in executor.dag.jobs}
    ours = [record for record in executor.journal.open if record.members.keys() & jobs.keys()]
    executor.states_at_start = states_after_grace(executor, ours)
    listing = Listing()
    problems = []
    for record in ours:
        done = {key: jobs[key] for key in record.members if key in jobs and not executor.dag.needrun(jobs[key])}
        if len(done) == len(record.members) and record.note["backend"] == executor.backend.name:
            problems.append(adopt(executor, record, done, listing))
    if any(problems):
        raise WorkflowError("\n".join(filter(None, problems)))
    drop_gone(executor, [record for record in executor.journal.open if not record.members.keys() & jobs.keys()])


def states_after_grace(executor: Executor, records: list[Record]) -> dict[str, str] | None:
    """States of all jobs, after the time that a job needs to be requeued or its result to become visible."""
    states, deadline = executor.backend.states(), time.monotonic() + executor.grace
    if gone := vanished(executor, records, states):
        executor.logger.info(f"{gone} jobs of a former driver seem to be gone: waiting {executor.grace} s for them")
    while vanished(executor, records, states) and time.monotonic() < deadline:
        time.sleep(1)
        states = executor.backend.states()
    return states


def vanished(executor: Executor, records: list[Record], states: dict[str, str] | None) -> int:
    """How many of this back end's jobs are not there any more and left no result."""
    if states is None:
        return 0
    backend, listing = executor.backend, Listing()
    own = [record for record in records if record.note["backend"] == backend.name]
    dead = [record for record in own if record.id and not backend.alive(states.get(record.id))]
    return sum(end_of(record, listing) is None and not out_of_reach(executor, record, listing) for record in dead)


def drop_gone(executor: Executor, records: list[Record]) -> None:
    """Drops records, of jobs that today's workflow does not have, that are over and left nothing to be judged."""
    backend, states, listing = executor.backend, executor.states_at_start, Listing()
    records = [record for record in records if record.note["backend"] == backend.name]
    submitted = backend.by_token({record.token for record in records if record.id is None})
    for record in records:
        over = submitted == [] if record.id is None else states is not None and record.id not in states
        left = any(Path(path).exists() for path in record.note.get("output", []))
        if over and not left and not out_of_reach(executor, record, listing):
            executor.journal.forget(record)


def adopt(executor: Executor, record: Record, jobs: dict[str, Any], listing: Listing) -> str | None:
    """Records the outputs as complete, once the job that makes them has succeeded; else says what is wrong."""
    outputs = ", ".join(str(path) for job in jobs.values() for path in job.output)
    if any(fingerprint(job) != record.members[key] for key, job in jobs.items()):
        return f"job {record.id} of a former driver made {outputs} with other settings: delete them"
    if problem := out_of_reach(executor, record, listing):
        return problem
    error = wait_for_end(executor, record, listing, outputs)
    if error:
        return f"job {record.id} of a former driver left {outputs} but failed: delete them\n{error}"
    for job in jobs.values():
        executor.workflow.async_run(executor.workflow.persistence.finished(job))
    executor.journal.forget(record)
    executor.logger.info(f"Adopted {outputs} from job {record.id} of a former driver")
    return None


def wait_for_end(executor: Executor, record: Record, listing: Listing, outputs: str) -> str | None:
    """The error with which the job ended, if it did."""
    job = record.id
    if job is None:
        return "it was never seen to start"
    backend, work = executor.backend, work_from(record)

    def look(states: dict[str, str] | None, grace: float, listing: Listing) -> Verdict | None:
        state = (states or {}).get(job)
        alive = backend.alive if states is not None else lambda state: True
        verdict = judge(work, state, alive, grace, backend.why, listing)
        return verdict if verdict and stays_over(work, state, backend.cancel) else None

    verdict = look(executor.states_at_start, 0, listing)  # a job that is gone has had its grace
    if verdict is None:
        executor.logger.info(f"Waiting for job {record.id} of a former driver, which still makes {outputs}")
    while verdict is None:
        time.sleep(1)
        verdict = look(backend.states(), executor.grace, Listing())
    return verdict.error
