"""A run that takes half a second, in this process or in one forked from it, to be broken at will."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from saboteur import Moment, Write, die_within_a_write
from tiny import one_line, repeatable, spec

from linvit.files import WriteError
from linvit.fit import Interrupted
from linvit.run import train


class Run:
    """A tiny run in a folder of its own."""

    def __init__(self, npz: Path, folder: Path) -> None:
        self.npz, self.folder = npz, folder
        self.checkpoint = folder / "checkpoint.pt"

    def __call__(self, stop=lambda: False) -> dict:
        options = {"sources_folder": self.folder, "data_root": self.npz.parent}
        return repeatable(train(spec(self.npz), self.folder, stop=stop, **options))

    def metrics(self) -> dict:
        """Those that an earlier process has written."""
        return repeatable(json.loads((self.folder / "metrics.json").read_text()))

    def stop_after_a_step(self) -> None:
        with pytest.raises(Interrupted):
            self(stop=lambda: True)

    def refused(self, why: str) -> str:
        """The name of the file that cannot be written; nothing else has changed."""
        before = self.checkpoint.read_bytes()
        with pytest.raises(WriteError) as told:
            self()
        assert one_line(told.value) == f"{told.value.filename}: cannot be written ({why})"
        assert self.checkpoint.read_bytes() == before
        assert list(self.folder.glob(".*")) == []
        return Path(told.value.filename).name

    def killed_in(self, name: str, at: str, nth: int) -> bool:
        """Whether a process that goes on with the run is killed in the n-th write of a file (saboteur.py)."""
        die = die_within_a_write if at == "within" else lambda: os.kill(os.getpid(), signal.SIGKILL)
        return self._died(self._start(lambda: sys.addaudithook(Write(name, at, Moment(nth, die)))))

    def killed_after(self, seconds: float) -> bool:
        """Whether one is still at work so long after its start, and dies then."""
        child = self._start()
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        return self._died(child)

    def _start(self, prepare: Callable[[], object] = lambda: None) -> int:
        child = os.fork()
        if child == 0:
            try:
                prepare()
                self()
            finally:
                os._exit(0)
        return child

    def _died(self, child: int) -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGKILL, -signal.SIGXFSZ)
