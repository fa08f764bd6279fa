"""A callable with steps and checkpoints, as long jobs have them, for toy workflows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def job_id() -> str:
    """As squeue shows it."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", str(os.getpid()))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Interrupted(Exception):
    interrupted = True


class Counter:
    """Counts to `steps`, one step in `pause` seconds, and tells in its output from where it was resumed.

    Params:
        until: a file; counting goes on, beyond `steps` if need be, until it is there.
        every: steps between periodic checkpoints; 0 for none.
        exit: ends the process hard at step 10 of the first attempt, as the kernel does for memory.
    """

    def __init__(self, input: list, output: list, params: dict, log: list, threads: int, resources: dict) -> None:
        self.output = Path(output[0])
        self.checkpoint_file = self.output.with_suffix(".checkpoint")
        self.params = params
        self.resources = resources
        self.stopping = False

    def stop(self) -> None:
        self.stopping = True

    def __call__(self) -> None:
        state = {"step": 0, "resumed": [], "mem_mb": self.resources.get("mem_mb")}
        with self.output.with_suffix(".starts").open("a") as starts:
            print(job_id(), file=starts)
        if self.checkpoint_file.exists():
            state = json.loads(self.checkpoint_file.read_text())
            state["resumed"].append(state["step"])
        until = Path(self.params.get("until", "."))
        while state["step"] < self.params["steps"] or not until.exists():
            self.step(state)
        temporary = self.output.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(self.output)

    def step(self, state: dict) -> None:
        time.sleep(self.params.get("pause", 0.2))
        state["step"] += 1
        say(f"step {state['step']}")
        self.output.with_suffix(".started").write_text(str(state["step"]))
        every = self.params.get("every", 0)
        if self.stopping or (every and state["step"] % every == 0):
            temporary = self.checkpoint_file.with_suffix(".tmp")
            temporary.write_text(json.dumps(state))
            temporary.replace(self.checkpoint_file)
        if self.stopping:
            raise Interrupted
        if self.params.get("exit") and state["step"] == 10 and state["mem_mb"] == self.params["exit"]:
            os._exit(137)


class Deaf(Counter):
    """Cannot be asked to stop: submitit's own checkpoint and requeue, at once."""

    stop = None


class Helped(Counter):
    """Has a helper, and fails the moment that is gone, as PyTorch's data loader does."""

    def __call__(self) -> None:
        self.helper = subprocess.Popen(["sleep", "600"])
        signal.signal(signal.SIGCHLD, self.look_after)
        super().__call__()

    def look_after(self, signum: int, frame: object) -> None:
        if self.helper.poll() is not None:
            raise RuntimeError("the helper exited unexpectedly")


class Ranks:
    """Every rank writes what it was told about itself."""

    def __init__(self, output: list, **rest: object) -> None:
        self.output = Path(output[0])

    def __call__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
        told = {name: os.environ.get(name) for name in names} | {"node": os.environ.get("SLURMD_NODENAME")}
        (self.output.parent / f"rank{told['RANK']}.json").write_text(json.dumps(told))
        if told["RANK"] == "0":
            self.output.write_text("done")


class Peers:
    """Rank 1 is killed, which rank 0 notices first."""

    def __init__(self, **rest: object) -> None:
        pass

    def __call__(self) -> None:
        if os.environ["RANK"] == "0":
            raise ConnectionError("connection closed by peer")
        time.sleep(3)
        os._exit(137)


class Failing:
    def __init__(self, params: dict, **rest: object) -> None:
        self.message = params["message"]

    def __call__(self) -> None:
        say("about to fail")
        raise ValueError(self.message)


class Idle:
    """Forgets its output."""

    def __init__(self, **rest: object) -> None:
        pass

    def __call__(self) -> None:
        pass
