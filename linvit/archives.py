"""Archives, of which a few bytes may stand for more than memory holds: what they declare is checked before."""

import gzip
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

SHARE = 4
"""Of the machine's memory, this part may be unpacked: what is read is copied twice on its way into a tensor."""

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Arrays out of an npz file; no pickles.

    Raises:
        Exception: of many kinds, as damaged files make numpy and zipfile raise; what is too large is a ValueError.
    """
    with zipfile.ZipFile(path) as archive:
        members = [archive.getinfo(f"{name}.npy") for name in names]
        _check_size(sum(member.file_size for member in members))
        for member in members:
            with archive.open(member) as file:
                _check_header(file, member.file_size)
    with np.load(path, allow_pickle=False) as arrays:
        return [arrays[name] for name in names]


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes out of a gzipped idx file, the format of MNIST and its kin.

    Raises:
        Exception: as of `read_npz`.
    """
    with gzip.open(path) as file:
        _, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if kind != 8:
            raise ValueError(f"elements of kind {kind}, not unsigned bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        size = math.prod(shape)
        _check_size(size)
        content = file.read(size + 1)  # and no more, however long the stream goes on
    if len(content) != size:
        raise ValueError(f"its header says {size:,} bytes, it holds {'more' if len(content) > size else len(content)}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def check_zip(path: Path) -> None:
    """Refuse a zip file that unpacks to more bytes than it has, or whose checksums do not hold; other files pass.

    torch writes its records as they are, and never looks at their checksums.

    Raises:
        ValueError, zipfile.BadZipFile: what is wrong; it may also only start like a zip file.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return
    with zipfile.ZipFile(path) as archive:
        size = sum(record.file_size for record in archive.infolist())
        if size > path.stat().st_size:
            raise ValueError(f"its records unpack to {size:,} bytes, more than the {path.stat().st_size:,} of the file")
        if damaged := archive.testzip():
            raise ValueError(
                f"the checksum of its record {damaged!r} does not hold: it is damaged, or was saved without checksums "
                "(torch.serialization.set_crc32_options(False)); save it with them"
            )


def _check_header(file: IO[bytes], size: int) -> None:
    """Whether an array's file is as large as its header says: numpy makes room for all of it first, and where it is
    larger, the checksum at its end is never reached."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"an array of version {version}; allowed: {', '.join(map(str, HEADERS))}")
    shape, _, kind = HEADERS[version](file)
    # Pickles are refused by numpy itself.
    if not kind.hasobject and math.prod(shape) * kind.itemsize != size - file.tell():
        raise ValueError(f"its header says {math.prod(shape) * kind.itemsize:,} bytes, it holds {size - file.tell():,}")


def _check_size(size: int) -> None:
    allowed = _memory() // SHARE
    if size > allowed:
        raise ValueError(f"it unpacks to {size:,} bytes; allowed here: {allowed:,}, a {SHARE}th of memory")


def _memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
