"""A small file system of one's own, to be filled up and locked."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system in memory, mounted at `folder`."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder = folder
        folder.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode != 0:
            pytest.skip(f"no file system may be mounted here ({mounted.stderr.strip()})")

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)

    @contextmanager
    def full(self, but_for: int = 0) -> Iterator[None]:
        """Only so many bytes are free."""
        filler = self.folder / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free - but_for)
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self._mount_again("ro")
        try:
            yield
        finally:
            self._mount_again("rw")

    def _mount_again(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", self.folder], check=True)
