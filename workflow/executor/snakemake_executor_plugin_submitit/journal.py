"""Which job of the workflow is which job of the cluster, kept in a file, so that a driver that dies loses nothing.

Snakemake keeps such a mark too, but a nested snakemake overwrites it. One line an event:

    {"token": "1f…", "jobs": [{"members": {…}, "index": 0, "note": {…}}, …]}   before sbatch
    {"token": "1f…", "id": "4711", "array": true, "note": {…}}                 after it
    {"end": "4711_3", "token": ""}                                             the driver has seen its end

A member is one job of Snakemake (a group has several): its outputs, and a fingerprint of its inputs and parameters,
because a job that was started with other parameters must not be taken for this one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Record:
    """A job that was submitted and whose end no driver has seen.

    Args:
        id: the cluster's; None if the driver died before it was known.
        members: outputs (hashed) -> fingerprint.
        note: the back end, the folder, and what else finds the job again.
    """

    token: str
    id: str | None
    members: dict[str, str]
    note: dict[str, Any] = field(default_factory=dict)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def members_of(job: Any) -> dict[str, str]:
    """Outputs and fingerprint of a job, or of each job of a group."""
    return {member_key(single): fingerprint(single) for single in singles(job)}


def singles(job: Any) -> list[Any]:
    """The jobs of a group, or the one job."""
    return list(job.jobs) if job.is_group() else [job]


def member_key(job: Any) -> str:
    return digest([job.rule.name, sorted(map(str, job.output)), dict(job.wildcards_dict)])


def fingerprint(job: Any) -> str:
    """Of what makes a run stale for Snakemake: the inputs, and those parameters that it compares, in any order."""
    params = sorted(json.dumps(comparable(value), sort_keys=True) for value in job.non_derived_params)
    return digest([sorted(map(str, job.input)), params])


def comparable(value: Any) -> Any:
    """The value as far as it can be compared between two processes."""
    if isinstance(value, (str, Path)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): comparable(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((comparable(inner) for inner in value), key=json.dumps)
    if isinstance(value, Iterable):
        return [comparable(inner) for inner in value]
    return type(value).__name__


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.open: list[Record] = read(path)
        # Only what is still open is of interest; a year of runs must not slow down a start.
        lines: list[dict[str, Any]] = []
        for record in self.open:
            lines.append(
                {"token": record.token, "jobs": [{"members": record.members, "index": 0, "note": record.note}]}
            )
            if record.id is not None:
                lines.append({"token": record.token, "id": record.id, "array": False})
        temporary = path.with_suffix(".new")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        temporary.replace(path)

    def write(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def intend(self, token: str, members: list[dict[str, str]], notes: list[dict[str, Any]]) -> None:
        jobs = [
            {"members": m, "index": i, "note": note} for i, (m, note) in enumerate(zip(members, notes, strict=True))
        ]
        self.write(token=token, jobs=jobs)

    def submitted(self, token: str, id: str, array: bool, **note: Any) -> None:
        self.write(token=token, id=id, array=array, note=note)

    def ended(self, id: str | None, token: str = "") -> None:
        self.write(end=id, token=token)

    def forget(self, record: Record) -> None:
        self.open.remove(record)
        self.ended(record.id, record.token)


def read(path: Path) -> list[Record]:
    """The open records. A line that a dying driver left unfinished is passed over."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    records: dict[str, list[Record]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        token = event.get("token", "")
        if "jobs" in event:
            waiting.setdefault(token, []).extend(event["jobs"])
        elif "id" in event:
            for job in waiting.pop(token, []):
                id = f"{event['id']}_{job['index']}" if event["array"] else event["id"]
                record = Record(token, id, job["members"], {**job["note"], **event.get("note", {})})
                records.setdefault(id, []).append(record)
        elif event["end"] is None:
            waiting.pop(token, None)
        else:
            records.pop(event["end"], None)
    lost = [Record(token, None, job["members"], job["note"]) for token, jobs in waiting.items() for job in jobs]
    return [record for found in records.values() for record in found] + lost
