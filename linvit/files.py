"""Files: written so that a reader never meets half of one, checksummed, or found inside a package."""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: writers such as matplotlib choose a format by it.
    # On a shared file system another machine may have a process of the same number.
    temporary = path.with_name(f".{path.stem}.{socket.gethostname()}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256_of(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resource(path: str) -> Traversable:
    """A file by its path, or inside a package as `package:file`; it need not exist."""
    package, colon, name = path.partition(":")
    try:
        return files(package) / name if colon else Path(path)
    except (ModuleNotFoundError, ValueError, TypeError):  # a path that happens to hold a colon
        return Path(path)
