"""Snakemake with the polls of its executor noted beside the calls to Slurm: counted.py EXECUTOR LOG ARGUMENT ..."""

import importlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from snakemake.cli import main


def count_polls(executor: type, log: Path) -> None:
    """Notes each time that the executor looks after jobs, whatever it asks Slurm for."""
    check = executor.check_active_jobs

    async def counted(self: Any, active_jobs: list) -> AsyncIterator[Any]:
        if active_jobs:
            with log.open("a") as file:
                file.write(f"{time.time():.6f} driver poll\n")
        async for job in check(self, active_jobs):
            yield job

    executor.check_active_jobs = counted


if __name__ == "__main__":
    name, log, *arguments = sys.argv[1:]
    count_polls(importlib.import_module(f"snakemake_executor_plugin_{name}").Executor, Path(log))
    main(arguments)
