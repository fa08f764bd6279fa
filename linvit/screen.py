"""A grid's status on one screen."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import get_args

from tabulate import tabulate

from linvit.status import Look, State, Status
from linvit.watch import Standing, duration

SHOWN = 20
"""Lines of each list, unless all are asked for."""


def text(status: Status, *, everything: bool = False) -> str:
    """The status on one screen; with `everything`, however long its lists are."""
    shown = None if everything else SHOWN
    counts = Counter(look.state for look in status.runs)
    running = [look for look in (*status.others, *status.of("running")) if look.state == "running"]
    failed = [look for look in (*status.others, *status.of("failed")) if look.state == "failed"]
    parts = [
        _headline(status, counts),
        _counted(counts),
        _table(running, shown),
        _by_note("interrupted", status.of("interrupted"), shown),
        _by_note("failed", failed, shown),
    ]
    return "\n\n".join(part for part in parts if part)


def _headline(status: Status, counts: Counter[State]) -> str:
    done = f"{counts['done']:,} of {len(status.runs):,} runs done"
    head = f"grid {status.grid}: {done}, {status.share:.0%} of the training"
    if status.is_over:
        return head
    if status.seconds_left is None:
        return f"{head}; time left unknown"
    at_least = "at least " if status.untimed else ""
    if not counts["running"]:
        return f"{head}; nothing is running, {at_least}{duration(status.seconds_left)} of one device left"
    longest = max((look.standing.seconds_left or 0 for look in status.of("running") if look.standing), default=0)
    left = max(longest, status.seconds_left / counts["running"])
    return f"{head}; {at_least}{duration(left)} left, {counts['running']:,} at a time"


def _counted(counts: Counter[State]) -> str:
    rows = [(state, f"{counts[state]:,}") for state in get_args(State)]
    return tabulate(rows, tablefmt="plain", colalign=("left", "right"), disable_numparse=True)


def _table(running: Sequence[Look], shown: int | None) -> str:
    if not running:
        return ""
    headers = ("running", "done", "epoch", "loss", "top-1", "images/s", "left")
    rows = [(look.name, f"{look.share:.0%}", *_cells(look.standing)) for look in running[:shown]]
    table = tabulate(rows, headers, colalign=("left", *["right"] * 6), disable_numparse=True)
    return table + _more(len(running), shown)


def _cells(standing: Standing | None) -> tuple[str, ...]:
    if standing is None:
        return ("",) * 5
    epoch = f"{min(standing.epoch + 1, standing.epochs)}/{standing.epochs}"
    known = (
        ("{:.3f}", standing.loss),
        ("{:.1f}", standing.top1),
        ("{:,.0f}", standing.images_per_second),
        ("{}", None if standing.seconds_left is None else duration(standing.seconds_left)),
    )
    return (epoch, *("" if value is None else form.format(value) for form, value in known))


def _by_note(title: str, looks: Sequence[Look], shown: int | None) -> str:
    """Names under what they have in common."""
    if not looks:
        return ""
    names = defaultdict(list)
    for look in looks[:shown]:
        names[look.note].append(look.name)
    lines = [line for note, of_note in names.items() for line in (f"  {note}", *(f"    {name}" for name in of_note))]
    return "\n".join((title, *lines)) + _more(len(looks), shown)


def _more(n: int, shown: int | None) -> str:
    return f"\n... and {n - shown:,} more: --all" if shown and n > shown else ""
