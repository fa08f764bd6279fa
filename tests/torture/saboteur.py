"""A study's sitecustomize: the Python processes that start in its folder inject the faults of `faults.json`, in turn.

A process comes to the first of those that are left, and takes it from the list:

    {"write": "checkpoint.pt", "at": "half", "nth": 2, "signal": 9}   in the second write of that file, half of it done
    {"write": "metrics.json", "at": "begin", "nth": 1, "errno": 122}  that write fails with this error
    {"write": "metrics.json", "at": "within", "nth": 1}               between two bytes of it, as it is being written
    {"call": "linvit.fit:Loop.step", "nth": 3, "signal": 9}           before the third call of that function

A write is of a file that is written under a temporary name and renamed. It is seen by Python's audit events, so that no
code of the product is another than without the fault. At `begin` the temporary file is about to be opened, at `half`
half of it is written, at `whole` all of it, and at `renamed` it has just got its name; `within`, the system ends the
process in the write itself, after some bytes.
"""

import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

PLAN = Path("faults.json").absolute()
WITHIN = 100
"""Bytes that are written by then, fewer than any of these files has."""


class Moment:
    """Something that a process comes to again and again, and what happens at the n-th time."""

    def __init__(self, nth: int, happen: Callable[[], None]) -> None:
        self.left, self.happen = nth, happen

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.happen()


class Write:
    """An audit hook that comes to a moment of each write of a file."""

    def __init__(self, name: str, at: str, moment: Moment) -> None:
        self.path, self.at, self.moment, self.written = Path(name), at, moment, False

    def __call__(self, event: str, arguments: tuple) -> None:
        if (
            event == "open"
            and self.at in ("begin", "within")
            and "w" in (arguments[1] or "")
            and self._is_temporary(arguments[0])
        ):
            self.moment()
        elif event == "os.rename" and Path(os.fsdecode(arguments[1])).name == self.path.name:
            self.written = True
            if self.at == "half" and self.moment.left == 1:
                os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)
            if self.at in ("half", "whole"):
                self.moment()
        elif event == "os.remove" and self.at == "renamed" and self.written and self._is_temporary(arguments[0]):
            self.written = False
            self.moment()

    def _is_temporary(self, path: object) -> bool:
        name = Path(os.fsdecode(path)).name if isinstance(path, str | bytes | os.PathLike) else ""
        return name.startswith(f".{self.path.stem}.{socket.gethostname()}.") and name.endswith(self.path.suffix)


class Call(importlib.abc.MetaPathFinder):
    """An importer of one module that comes to the moment before each call of a function of it."""

    def __init__(self, function: str, moment: Moment) -> None:
        self.module, _, self.function = function.partition(":")
        self.moment = moment

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), self.patch(module))
        return spec

    def patch(self, module: object) -> None:
        *owners, name = self.function.split(".")
        owner = module
        for attribute in owners:
            owner = getattr(owner, attribute)
        original = getattr(owner, name)

        def doomed(*arguments: object, **options: object) -> object:
            self.moment()
            return original(*arguments, **options)

        setattr(owner, name, doomed)


def die_within_a_write() -> None:
    """Of the first one that makes a file longer than some bytes, once these are written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    for limit, size in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, WITHIN)):
        resource.setrlimit(limit, (size, resource.getrlimit(limit)[1]))


def inject(plan: list[dict]) -> None:
    """The first of the faults, unless another process has suffered it by now."""
    if json.loads(PLAN.read_text()) == plan:
        rest = PLAN.with_suffix(".rest")
        rest.write_text(json.dumps(plan[1:]))
        rest.replace(PLAN)
        if "errno" in plan[0]:
            raise OSError(plan[0]["errno"], os.strerror(plan[0]["errno"]))
        if plan[0].get("at") == "within":
            die_within_a_write()
        else:
            os.kill(os.getpid(), plan[0]["signal"])


if PLAN.exists() and (plan := json.loads(PLAN.read_text())):
    moment = Moment(plan[0]["nth"], lambda: inject(plan))
    if "write" in plan[0]:
        sys.addaudithook(Write(plan[0]["write"], plan[0]["at"], moment))
    else:
        sys.meta_path.insert(0, Call(plan[0]["call"], moment))
