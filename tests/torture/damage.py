"""Files damaged on purpose: cut off, with a bit flipped, emptied, replaced, or edited by hand."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = tuple[str, Callable[[Path], None]]
"""What it is called, and what does it to a file."""
EDGE = 1000
"""Bytes at either end of a file, where its headers are."""


def damages(content: bytes, flips: int) -> Iterator[Damage]:
    """Every kind of damage that a file of any format may suffer, some at random places, the same each time."""
    chance = random.Random(flips)
    size = len(content)
    yield "zero length", writes(b"")
    for keep in sorted({1, size // 100, size // 4, size // 2, size - EDGE, size - 40, size - 2, size - 1}):
        if 0 < keep < size:
            yield "truncated", writes(content[:keep])
    for number in range(flips):
        yield "a bit flipped", writes(flipped(content, _place(size, chance, at_an_edge=number % 2 == 1)))
    for length in (size, 64):
        yield "random bytes", writes(chance.randbytes(length))
    yield "zeros", writes(bytes(size))
    yield "a page of zeros", writes(content[: size // 2] + bytes(512) + content[size // 2 + 512 :])
    yield "bytes after its end", writes(content + chance.randbytes(100))
    yield "a folder in its place", become_a_folder
    yield "a link to nowhere", lead_nowhere
    if os.geteuid() != 0:
        yield "no permission to read", lambda path: path.chmod(0)


def edits(content: bytes) -> Iterator[Damage]:
    """Each value of a JSON file as a hand might change it: a number is another, a text longer, a key gone."""
    whole = json.loads(content)
    for place in _places(whole):
        for change in (_other, None):
            edited = copy.deepcopy(whole)
            *way, last = place
            parent = edited
            for key in way:
                parent = parent[key]
            if change:
                parent[last] = change(parent[last])
            else:
                del parent[last]
            yield "edited by hand", writes(json.dumps(edited, indent=1).encode())


def writes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lead_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


class Kept:
    """A folder's files as they are now, to be brought back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore(self) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if path in self.files or not any(path in other.parents for other in self.files):
                    shutil.rmtree(path)
            elif path not in self.files or path.is_symlink():
                path.unlink()
        for path, content in self.files.items():
            if path.exists():
                path.chmod(0o644)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


def _place(size: int, chance: random.Random, *, at_an_edge: bool) -> int:
    """A bit of a file; half of those at an edge are in its last bytes."""
    byte = chance.randrange(min(EDGE, size)) if at_an_edge else chance.randrange(size)
    if at_an_edge and chance.random() < 0.5:
        byte = size - 1 - byte
    return 8 * byte + chance.randrange(8)


def _places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The way to each value in nested mappings and lists."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*at, key))


def _other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {} if isinstance(value, dict) else []
