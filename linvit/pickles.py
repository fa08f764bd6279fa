"""Pickles of torch's, followed before they are unpickled: what they make takes no more memory than they say it in.

`torch.load(weights_only=True)` runs no code, but lets a few bytes ask for any amount of memory: `bytearray(4 * 10**9)`,
a numpy dtype of 2 GB an element, a storage or a tensor larger than what is stored of it, a text or container that is
copied a million times, or encoded again and again. Here the same instructions are carried out on what is known of each
value, without making it, and only functions that checkpoints need pass, with arguments as torch and numpy write them.
"""

import pickletools
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

LEGACY = 5
"""Pickles at the start of files of before torch 1.6: a number, a version, the machine, the content, the storages."""

NEW = object()
"""A list, dictionary or set that the instructions just before have made."""
AGAIN = object()
"""A container that was there before: what copies it could do so any number of times."""

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
WRITTEN_OUT = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
EMPTY = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
# How many values they take off the stack; None for those since the last mark.
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
FILLING = {"APPEND": 1, "SETITEM": 2, "APPENDS": None, "SETITEMS": None}


@dataclass(frozen=True)
class Global:
    """A function or class by its name."""

    name: str


@dataclass(frozen=True)
class Made:
    """What a function or class made."""

    by: str


@dataclass(frozen=True)
class Storage:
    """A tensor's, of that many values."""

    values: int


@dataclass
class Pickle:
    """A pickle on its way through torch's restricted unpickler, which knows these instructions and no others."""

    stored: Callable[[str, int], None]
    """Told of each storage's key and size in bytes; refuses those that the file does not hold."""
    stack: list[Any] = field(default_factory=list)
    stacks_below: list[list[Any]] = field(default_factory=list)
    """Since each mark there is a new one."""
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    text: int = 0
    """Characters that were read, less those that were encoded."""

    def follow(self, file: IO[bytes] | bytes) -> None:
        """From where the file stands to the pickle's end.

        Raises:
            Exception: of many kinds, as damaged bytes make it raise; what is refused is a ValueError.
        """
        for instruction, argument, _ in pickletools.genops(file):
            self._step(instruction.name, argument)

    def _step(self, name: str, argument: Any) -> None:
        if name in WRITTEN_OUT:
            self.text += len(argument) if isinstance(argument, str) else 0
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in EMPTY:
            self.stack.append(NEW)
        elif name == "MARK":
            self.stacks_below.append(self.stack)
            self.stack = []
        elif name in TUPLES:
            values = self._taken(TUPLES[name])
            self.stack.append(tuple(values))
        elif name in FILLING:
            self._taken(FILLING[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            known = self.memo[argument]
            self.stack.append(AGAIN if known is NEW or isinstance(known, tuple) else known)
        elif name == "GLOBAL":
            self.stack.append(_allowed(argument.replace(" ", ".")))
        elif name in ("REDUCE", "NEWOBJ"):
            self.stack.append(self._call(*self._taken(2)))
        elif name == "BUILD":
            self._build(*self._taken(1))
        elif name == "BINPERSID":
            self.stack.append(self._storage(*self._taken(1)))
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"an instruction that torch does not write: {name}")

    def _taken(self, count: int | None) -> list[Any]:
        """The last values off the stack, or all since the last mark."""
        if count is None:
            taken, self.stack = self.stack, self.stacks_below.pop()
        else:
            taken, self.stack[-count:] = self.stack[-count:], []
        return taken

    def _call(self, function: Any, arguments: Any) -> Made:
        is_sound = CALLS.get(function.name) if isinstance(function, Global) else None
        if is_sound is None or not isinstance(arguments, tuple) or not is_sound(*arguments):
            name = function.name if isinstance(function, Global) else "a value"
            raise ValueError(f"it calls {name} as neither torch nor numpy does")
        if function.name == ENCODED.by:
            self.text -= len(arguments[0])
            if self.text < 0:
                raise ValueError("it encodes a text more than once")
        return Made(function.name)

    def _build(self, state: Any) -> None:
        """Set attributes of what was made last; numpy tells of a dtype's size there, too, which is its kind's."""
        of_numpy = [(3, order, None, None, None, -1, -1, 0) for order in "<>|="]
        made = self.stack[-1]
        if not (state in of_numpy if made == DTYPE else made in ATTRIBUTED and state is NEW):
            raise ValueError("it sets attributes as neither torch nor numpy does")

    def _storage(self, told: Any) -> Storage:
        match told:
            case ("storage", Global(kind), str(key), _, int(values), *view) if view in ([], [None]):
                if key not in self.storages:  # torch takes a later one of the same key for the first
                    self.stored(key, values * STORAGES[kind])
                    self.storages[key] = Storage(values)
                return self.storages[key]
        raise ValueError("a storage as torch does not write it")


def check_pickles(path: Path) -> None:
    """Refuse a file of torch's of which more would be made than is in it.

    Raises:
        Exception: of many kinds, as damaged bytes make the readers raise; what is refused is a ValueError.
    """
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            _check_archive(file)
        else:
            file.seek(0)
            _check_legacy(file, path.stat().st_size)


def _check_archive(file: IO[bytes]) -> None:
    with zipfile.ZipFile(file) as archive:
        # By the names that torch sees, which has no eyes for their case.
        records = {record.orig_filename.lower(): record for record in archive.infolist()}
        if len(records) < len(archive.infolist()):
            raise ValueError("it has two records of one name")

        def is_stored(folder: str, key: str, size: int) -> None:
            if (held := records[f"{folder}data/{key}".lower()].file_size) != size:
                raise ValueError(f"it tells of a storage of {size:,} bytes and holds {held:,} of it")

        for name, record in records.items():
            if name.endswith("data.pkl"):
                Pickle(partial(is_stored, name.removesuffix("data.pkl"))).follow(archive.read(record))


def _check_legacy(file: IO[bytes], size: int) -> None:
    """The storages follow behind the pickles."""
    told: list[int] = []

    def is_stored(_: str, size_of_one: int) -> None:
        told.append(size_of_one)
        if sum(told) > size:
            raise ValueError(f"it tells of storages of {sum(told):,} bytes and has {size:,}")

    for _ in range(LEGACY):
        Pickle(is_stored).follow(file)


def _allowed(name: str) -> Global:
    if name not in CALLS and name not in STORAGES and not re.fullmatch(r"torch\.[a-z0-9]+", name):  # dtypes
        raise ValueError(f"it refers to {name}, and only tensors are unpickled")
    return Global(name)


def _lies_within(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> bool:
    """Whether a tensor's storage has all of it; torch would make the storage larger."""
    if not isinstance(storage, Storage) or not all(map(_are_counts, ((offset,), size, stride))):
        return False
    reach = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return 0 in size or offset + reach < storage.values


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, int) and value >= 0 for value in values)


KINDS = {
    1: ("Bool", "Byte", "Char"),
    2: ("BFloat16", "Half", "Short"),
    4: ("Float", "Int"),
    8: ("ComplexFloat", "Double", "Long"),
    16: ("ComplexDouble",),
}
STORAGES = {f"torch.{kind}Storage": size for size, kinds in KINDS.items() for kind in kinds}
"""torch's kinds of storages, by bytes of a value."""
NUMBERS = frozenset(np.dtype(code).str[1:] for code in np.typecodes["AllInteger"] + np.typecodes["Float"])
"""numpy's kinds of numbers, such as f8."""
SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
"""What numpy's numbers are unpickled by, in its versions 1 and 2."""

DTYPE, ENCODED = Made("numpy.dtype"), Made("_codecs.encode")
ATTRIBUTED = (Made("collections.OrderedDict"), Made("argparse.Namespace"))
CALLS: dict[str, Callable[..., bool]] = {
    "torch._utils._rebuild_tensor": _lies_within,
    "torch._utils._rebuild_tensor_v2": _lies_within,
    "torch._utils._rebuild_parameter": lambda tensor, *_: isinstance(tensor, Made),
    "torch.Size": lambda *sizes: all(map(_are_counts, sizes)),
    "torch.device": lambda kind, *_: isinstance(kind, str),
    DTYPE.by: lambda code, *options: code in NUMBERS and set(options) <= {False, True},
    **dict.fromkeys(SCALARS, lambda *of: of == (DTYPE, ENCODED)),
    ENCODED.by: lambda text, encoding: isinstance(text, str) and encoding == "latin1",
    **{made.by: lambda *arguments: arguments == () for made in ATTRIBUTED},
    **dict.fromkeys(("__builtin__.set", "builtins.set", "collections.Counter"), lambda *of: of in [(), (NEW,)]),
}
"""What a file may call, and whether with these arguments."""
