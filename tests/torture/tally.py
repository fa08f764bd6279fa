"""What the suite counts: faults it injected, those that were survived, results it compared, differences it found."""

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from tabulate import tabulate

SEED = os.environ.get("TORTURE_SEED") or str(random.SystemRandom().randrange(10**6))
"""Of all random moments; given in the environment, they are the same again."""


@dataclass
class Count:
    """Of one kind of fault."""

    injected: int = 0
    survived: int = 0
    compared: int = 0
    different: int = 0

    def compare(self, found: Any, expected: Any) -> None:
        """Count a result, and fail where it is not the one expected."""
        self.compared += 1
        self.different += found != expected
        assert found == expected


class Tally:
    """The counts of a session, by kind of fault."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Count] = defaultdict(Count)

    @contextmanager
    def fault(self, kind: str, times: int = 1) -> Iterator[Count]:
        """A block that injects faults of this kind; they are survived where it ends without an error."""
        count = self.counts[kind]
        count.injected += times
        yield count
        count.survived += times

    def __str__(self) -> str:
        rows = [(kind, *astuple(count)) for kind, count in self.counts.items()]
        rows.append(("in all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
        return f"TORTURE_SEED={SEED}\n" + tabulate(
            rows, ("fault", "injected", "survived", "results compared", "differences")
        )
