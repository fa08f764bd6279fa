"""Files: written so that a reader never meets half of one, checksummed, or found inside a package."""

import errno
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

SEAL = "sha256"
"""The key of a checksum in a JSON file. Without it the file is as good as its writer, such as a person."""
SEALED = f',\n "{SEAL}": "'.encode()
"""What stands between a file's values and their checksum."""


class WriteError(OSError):
    """A file that the file system does not take: a full disk, a quota, a read-only folder."""

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written ({self.strerror})"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    Raises:
        WriteError: names `path` and why it cannot be written; it is as it was.
    """
    path = Path(path)
    try:
        with scratch(path) as temporary:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        if not _is_of_writing(error, path):
            raise
        raise WriteError(error.errno, error.strerror, str(path)) from error


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, gone when the block ends; what killed processes left of theirs goes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    # The suffix stays last: writers such as matplotlib choose a format by it.
    # On a shared file system another machine may have a process of the same number.
    temporary = path.with_name(f".{path.stem}.{socket.gethostname()}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _is_of_writing(error: OSError, path: Path) -> bool:
    """Whether it came from the file system and is not about another file, such as one that was read meanwhile."""
    if error.errno is None or error.filename is None:
        return error.errno is not None
    return Path(error.filename) in path.parents or Path(error.filename).parent == path.parent


def _sweep(path: Path) -> None:
    """Remove temporary files for `path` of processes of this machine that are no more."""
    pattern = re.compile(rf"\.{re.escape(path.stem)}\.{re.escape(socket.gethostname())}\.(\d+)\b.*")
    for other in path.parent.iterdir():
        if (found := pattern.fullmatch(other.name)) and not lives(int(found[1])):
            with suppress(OSError):  # another user's, or another process removes it too
                other.unlink()


def lives(process: int) -> bool:
    """Whether this machine has a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OverflowError:  # no process has such a number
        return False
    except PermissionError:  # another user's
        pass
    return True


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_sealed(path: str | Path, content: Mapping) -> None:
    """Write JSON with a checksum of its values beside them."""
    write_text(path, json.dumps({**content, SEAL: _digest(_layout(content))}, indent=1) + "\n")


def is_whole(text: bytes) -> bool:
    """Whether the values of a JSON object are those that it was written with; one without a checksum is believed."""
    before, _, behind = text.rpartition(SEALED)
    if behind == _digest(before + b"\n}").encode() + b'"\n}\n':
        return True  # as it was written, to the byte: thousands of files are looked at so
    content = json.loads(text)
    digest = content.pop(SEAL, None)
    # Laid out in another way; or of an earlier version, whose checksum is of sorted keys.
    return digest is None or digest in map(_digest, (_layout(content), json.dumps(content, sort_keys=True).encode()))


def _layout(content: Mapping) -> bytes:
    return json.dumps(content, indent=1).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def regular(path: str | Path) -> Path:
    """The path, unless to read what is there might take for ever: a pipe without a writer, a device.

    Raises:
        OSError: it leads to neither a file nor a folder.
    """
    path = Path(path)
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return path


def sha256_of(path: str | Path) -> str:
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resource(path: str) -> Traversable:
    """A file by its path, or inside a package as `package:file`; it need not exist."""
    package, colon, name = path.partition(":")
    try:
        return files(package) / name if colon else Path(path)
    except (ModuleNotFoundError, ValueError, TypeError):  # a path that happens to hold a colon
        return Path(path)
