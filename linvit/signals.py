"""Signals that ask a job to end, and processes that end with the one that started them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """A block in which processes may be forked that no such signal reaches until they are ready for it (`released`).

    Before that they have this process's handlers, or those of a library, which end them with a message of its own. This
    process takes its own signals at the block's end: in a fork, an exception of a handler would be lost.
    """
    received: list[int] = []
    # Blocked for what is forked; here, where another thread may be handed a signal, only noted.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    handlers = _replaced(lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in received:
            signal.raise_signal(number)


def _replaced(handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """The handlers that had to make way for this one: none outside of the main thread, nor where they ignore."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in ENDINGS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in heard}


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
