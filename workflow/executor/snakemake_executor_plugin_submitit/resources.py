"""A job's resources, by the names the Snakemake ecosystem uses, as what sbatch is asked for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

DEFAULT_MINUTES = 60  # a job without `runtime`; submitit cannot leave the time limit to the partition

# Options of sbatch that have a resource, of which the number of ranks or the notice before the time limit depends.
RESOURCE_OF = {
    "account": "slurm_account",
    "constraint": "constraint",
    "cpus-per-task": "threads",
    "gpus": "gpu",
    "gpus-per-node": "gpu",
    "gpus-per-socket": "gpu",
    "gpus-per-task": "gpu",
    "gres": "gres",
    "mem": "mem_mb",
    "mem-per-cpu": "mem_mb_per_cpu",
    "nodes": "nodes",
    "ntasks": "tasks",
    "ntasks-per-gpu": "tasks",
    "ntasks-per-node": "tasks",
    "partition": "slurm_partition",
    "qos": "slurm_qos",
    "time": "runtime",
}
# Without these of its own making the executor does not find its jobs again, or cannot continue them.
RESERVED = (
    "array",
    "chdir",
    "clusters",
    "comment",
    "error",
    "job-name",
    "no-requeue",
    "output",
    "parsable",
    "quiet",
    "requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
)


@dataclass(frozen=True)
class Request:
    """What one job asks for. Jobs with equal requests share an array.

    Args:
        name: the rule or group.
        minutes: time limit; None if the workflow sets none.
        mem_mb, mem_mb_per_cpu: MiB, per node and per CPU.
        gpu: GPUs per node, be they asked for by number or, in gres, by type.
        tasks: Slurm tasks, on all nodes together.
        ranks: how many of them run the job: all for a callable, one for a nested snakemake, whose commands may
            start their own (MPI).
        extra: options of sbatch, as (name, value); the value True is a flag.
    """

    name: str
    threads: int = 1
    minutes: int | None = None
    mem_mb: int | None = None
    mem_mb_per_cpu: int | None = None
    gpu: int = 0
    gres: str | None = None
    nodes: int = 1
    tasks: int = 1
    ranks: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    extra: tuple[tuple[str, str | bool], ...] = ()


def request_of(name: str, threads: int, resources: Mapping[str, Any], in_process: bool) -> Request:
    """The request of a job.

    Args:
        in_process: the job is a callable, of which several GPUs or nodes start one rank per GPU and node.

    Raises:
        WorkflowError: a resource has a value that makes no sense.
    """

    def limit(key: str) -> int | None:
        return None if resources.get(key) is None else number(key, 0)

    def number(key: str, default: int, least: int = 0) -> int:
        value = default if resources.get(key) is None else resources[key]
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise WorkflowError(f"rule {name}: resource {key} must be a whole number of at least {least}, not {value!r}")

    def text(key: str) -> str | None:
        value = resources.get(key)
        return str(value) if value not in (None, "") else None

    nodes, gpu, typed = number("nodes", 1, least=1), number("gpu", 0), gpus_in(text("gres"))
    if gpu and typed:
        raise WorkflowError(f"rule {name}: resources gpu={gpu} and gres={text('gres')} both ask for GPUs: set gpu to 0")
    gpu = gpu or typed
    tasks = number("tasks", nodes * (max(gpu, 1) if in_process else 1), least=1)
    if tasks % nodes:
        raise WorkflowError(f"rule {name}: resource tasks={tasks} must be a multiple of nodes={nodes}")
    return Request(
        name=name,
        threads=threads,
        minutes=limit("runtime"),
        mem_mb=limit("mem_mb"),
        mem_mb_per_cpu=limit("mem_mb_per_cpu"),
        gpu=gpu,
        gres=text("gres"),
        nodes=nodes,
        tasks=tasks,
        ranks=tasks if in_process else 1,
        partition=text("slurm_partition"),
        account=text("slurm_account"),
        qos=text("slurm_qos"),
        constraint=text("constraint"),
        extra=extra_options(name, text("slurm_extra") or ""),
    )


def gpus_in(gres: str | None) -> int:
    """GPUs per node in `gpu:a100:4,nvme:1`."""
    entries = [entry.removeprefix("gres/").removeprefix("gres:").split(":") for entry in (gres or "").split(",")]
    counts = [rest[-1] if rest else "1" for kind, *rest in entries if kind == "gpu"]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def extra_options(name: str, options: str) -> tuple[tuple[str, str | bool], ...]:
    """Reads `--nice=100 --exclude n1 --exclusive`.

    Raises:
        WorkflowError: an option is not given by its long name, or is not free.
    """
    found: list[tuple[str, str | bool]] = []
    words = shlex.split(options)
    for i, word in enumerate(words):
        match = re.fullmatch(r"--([\w-]+)(?:=(.*))?", word, re.DOTALL)
        if match:
            refuse_taken(name, match[1])
            found.append((match[1], True if match[2] is None else match[2]))
        elif i and found and found[-1][1] is True and words[i - 1] == f"--{found[-1][0]}":
            found[-1] = (found[-1][0], word)
        else:
            raise WorkflowError(f"rule {name}: slurm_extra takes long options such as --nice=100, not {word!r}")
    return tuple(found)


def refuse_taken(name: str, option: str) -> None:
    """Refuses an option of sbatch, or its abbreviation, that the executor sets itself.

    Raises:
        WorkflowError: it is one.
    """
    written = option.replace("_", "-")  # as submitit does
    for taken in (*RESOURCE_OF, *RESERVED):
        if taken.startswith(written):
            instead = f"use the resource {RESOURCE_OF[taken]}" if taken in RESOURCE_OF else "the executor needs its own"
            raise WorkflowError(f"rule {name}: slurm_extra must not set --{option}: {instead}")


def signal_delay(minutes: int, wanted: int) -> int:
    """Seconds of notice before a time limit; at most a quarter of it, lest the signal comes as the job starts."""
    return max(1, min(wanted, minutes * 60 // 4))


def slurm_parameters(request: Request, token: str, parallelism: int, notice: int, setup: str) -> dict[str, Any]:
    """Parameters of submitit's SlurmExecutor. The token, as the job's comment, finds it again by squeue."""
    given = {
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "gres": request.gres,
        "gpus_per_node": None if gpus_in(request.gres) else request.gpu or None,
        "setup": [setup] if setup else None,
    }
    # Slurm takes one of the two, and a profile's default may have set the other.
    memory = ("mem", request.mem_mb) if request.mem_mb_per_cpu is None else ("mem-per-cpu", request.mem_mb_per_cpu)
    additional = {} if memory[1] is None else {memory[0]: f"{memory[1]}M"}
    # Steps inherit neither the CPUs nor, for a nested snakemake, should they start one process per task.
    srun = [f"--cpus-per-task={request.threads}"]
    if request.ranks != request.tasks:
        srun += ["--nodes=1", "--ntasks=1"]
    elif request.ranks > 1:
        srun += ["--kill-on-bad-exit=1"]  # the other ranks would wait for the lost one until the time limit
    return {
        "job_name": request.name,
        "comment": token,
        "time": request.minutes or DEFAULT_MINUTES,
        "nodes": request.nodes,
        "ntasks_per_node": request.tasks // request.nodes,
        "cpus_per_task": request.threads,
        "signal_delay_s": notice,
        "array_parallelism": parallelism,
        "stderr_to_stdout": True,
        "srun_args": srun,
        "additional_parameters": {"requeue": True, **additional, **dict(request.extra)},
        **{name: value for name, value in given.items() if value is not None},
    }
