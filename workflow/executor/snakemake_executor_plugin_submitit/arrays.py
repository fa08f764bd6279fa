"""From Snakemake's ready jobs to what is submitted: one array per rule and request, in chunks."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from .journal import members_of, singles
from .resources import Request, request_of


@dataclass(eq=False)
class Work:
    """A job on its way through the cluster.

    Args:
        job: Snakemake's.
        task: what runs in the cluster's job (`job.Call` or `job.Nested`); None if it runs already.
        id: the cluster's, `4711` or `4711_3`; None while it waits to be started.
        folder: where its pickles and logs are.
        gone: when (time.monotonic) the cluster was first seen not to know it any more.
    """

    job: Any
    request: Request
    task: Any = None
    id: str | None = None
    folder: Path = Path()
    gone: float | None = None
    note: dict[str, Any] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)

    def log(self, rank: int = 0) -> Path:
        return self.folder / f"{self.id}_{rank}_log.out"

    def result(self, rank: int = 0) -> Path:
        return self.folder / f"{self.id}_{rank}_result.pkl"

    def describe(self, backend: str, **more: Any) -> None:
        """Writes the note by which a later driver finds the job and what it left."""
        output = [str(path) for path in self.job.output]
        folder = str(self.folder)
        self.note = {"backend": backend, "folder": folder, "ranks": self.request.ranks, "output": output, **more}


def work_of(job: Any) -> Work:
    """The job with its request, as yet without a task.

    Raises:
        WorkflowError: a resource makes no sense, or asks for ranks of a callable that cannot have them.
    """
    name = re.sub(r"[^\w.-]", "_", str(job.groupid if job.is_group() else job.rule.name))
    in_process = runs_in_process(job)
    if not in_process:
        refuse_lonely_ranks(job)
    request = request_of(name, job.threads, plain_resources(job), in_process)
    return Work(job=job, request=request, members=members_of(job))


def names_call(job: Any) -> bool:
    """Whether the rule's parameter `call` names a class."""
    return bool(dict(job.params.items()).get("call"))


def refuse_lonely_ranks(job: Any) -> None:
    """A callable with several ranks must not run as a command: that is one process, and the other GPUs would idle.

    Raises:
        WorkflowError: it would.
    """
    for single in singles(job):
        name = single.rule.name
        if names_call(single) and request_of(name, single.threads, plain_resources(single), True).ranks > 1:
            raise WorkflowError(
                f"rule {name}: its GPUs, nodes or tasks are for several ranks of its callable, but --sdm, shadow or "
                "group makes it a command of one process: leave those out, or ask for one GPU"
            )


def runs_in_process(job: Any) -> bool:
    """Whether the rule names a callable, and nothing asks for an environment of the job's own."""
    if job.is_group() or not names_call(job):
        return False
    methods = job.rule.workflow.deployment_settings.deployment_method
    own_conda = DeploymentMethod.CONDA in methods and job.rule.conda_env
    own_container = DeploymentMethod.APPTAINER in methods and job.rule.container_img
    return not (own_conda or own_container or job.is_shadow)


def plain_resources(job: Any) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int) else str(value)
        for name, value in job.resources.items()
        if not name.startswith("_") and value is not None
    }


def plain(value: Any, where: str) -> Any:
    """The value as numbers, text, lists and dicts, which any version of any library can unpickle.

    Raises:
        WorkflowError: it is something else.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, Mapping):
        return {plain(key, where): plain(inner, where) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, where) for inner in value]
    raise WorkflowError(f"{where} is a {type(value).__name__}; a callable takes numbers, text, lists and dicts")


def call_of(job: Any, notice: int) -> Any:
    """The task of a rule that names a callable."""
    from .job import Call

    params = dict(job.params.items())
    return Call(
        call=str(params.pop("call")),
        input=[str(path) for path in job.input],
        output=[str(path) for path in job.output],
        params={name: plain(value, f"rule {job.rule.name}: params.{name}") for name, value in params.items()},
        log=[str(path) for path in job.log],
        threads=int(job.threads),
        resources=plain_resources(job),
        notice=notice,
    )


def batches(works: Iterable[Work], size: int) -> Iterator[list[Work]]:
    """Groups of equal requests, in the order given, of at most `size` jobs."""
    groups: dict[Request, list[Work]] = {}
    for work in works:
        groups.setdefault(work.request, []).append(work)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def new_token() -> str:
    """Names a submission: its folder, and its comment in squeue. Sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
