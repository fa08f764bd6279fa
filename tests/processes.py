"""Processes that tests start beside their own, and what such are told to end by."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


def start_ranks(commands: Sequence[list[str]], environment: Mapping[str, str] = os.environ, **options: Any) -> list:
    """A process for each command, told of the others as torchrun tells it; the options are Popen's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(command, env={**environment, **shared, "RANK": str(rank)}, **options)
        for rank, command in enumerate(commands)
    ]
