"""Signals that ask a job to end, and processes that end with the one that started them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """A block in which processes may be forked that no such signal reaches until they are ready for it (`released`).

    Before that they have this process's handlers, or those of a library, which end them with a message of its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def released() -> None:
    """For a process that was forked in such a block: from now on they reach it, and those first that came meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


def when_gone(parent: int, act: Callable[[], object]) -> None:
    """Act, in a thread, once the process that started this one is no more, or now if it is no more already."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        act()

    threading.Thread(target=watch, daemon=True).start()
