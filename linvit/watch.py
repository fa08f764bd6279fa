"""What is told of a run while it trains: a line on the terminal or in the log, and a small file for `linvit status`.

Whoever looks on gets numbers that training has read from the device anyway, and changes nothing of the run.
"""

import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import tqdm

from linvit.config import reason_of
from linvit.files import write_text

if TYPE_CHECKING:
    from linvit.progress import Progress

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
"""In a run's folder, from its first step to its metrics."""
EVERY = 20.0
"""Seconds between two looks at a run's file, unless an epoch ends."""


@dataclass
class Standing:
    """How far a run is."""

    epochs: int
    """Of the whole run; `steps` are an epoch's."""
    steps: int
    epoch: int = 0
    """Epochs done; `step` counts those of the one under way."""
    step: int = 0
    loss: float | None = None
    """A mean: of the last steps that were read from the device or, between epochs, of the last one."""
    top1: float | None = None
    """Of the last evaluation, in percent."""
    images_per_second: float | None = None
    """In training, by this process."""
    seconds: float = 0.0
    """Of this process and, up to their last checkpoints, those before it."""
    seconds_left: float | None = None
    stage: str | None = None
    """Before the main one, whose loss is another."""

    @property
    def taken(self) -> int:
        """Steps of all epochs so far."""
        return self.epoch * self.steps + self.step

    @property
    def total(self) -> int:
        return self.epochs * self.steps

    @property
    def line(self) -> str:
        """All of it on one line, without what is not known yet."""
        parts = (f"epoch {min(self.epoch + 1, self.epochs)}/{self.epochs}", f"step {self.step}/{self.steps}")
        known = (
            ("loss {:.3f}", self.loss),
            ("top-1 {:.1f}", self.top1),
            ("{:,.0f} images/s", self.images_per_second),
            ("{} left", None if self.seconds_left is None else duration(self.seconds_left)),
        )
        return ", ".join((*parts, *(text.format(value) for text, value in known if value is not None)))


class View:
    """One who looks on. Each method is told how far the run is."""

    def begin(self, standing: Standing) -> None:
        """Training begins or goes on."""

    def step(self, standing: Standing) -> None:
        """A step is done."""

    def epoch(self, standing: Standing, record: dict) -> None:
        """An epoch is done, and evaluated if it was its turn."""

    def end(self, error: BaseException | None) -> None:
        """The run is over; its training need not have begun."""


class Watch:
    """All who look on at one run, as a context that lasts as long as the run does."""

    def __init__(
        self,
        *views: View,
        before: int = 0,
        epochs: int | None = None,
        seconds: float = 0.0,
        stage: str | None = None,
    ) -> None:
        self.views, self.before, self.epochs, self.seconds, self.stage = views, before, epochs, seconds, stage

    def part(self, before: int, epochs: int, seconds: float = 0.0, stage: str | None = None) -> Self:
        """Of one stage of a run: the epochs and seconds `before` it, the epochs of all stages, and its name."""
        return type(self)(*self.views, before=before, epochs=epochs, seconds=seconds, stage=stage)

    def begin(self, progress: "Progress", epochs: int, steps: int) -> None:
        last = {key: value for record in progress.history for key, value in record.items()}
        done, epochs = self.before + progress.epochs, self.epochs or epochs
        loss, top1 = last.get("loss"), last.get("top1")
        self._standing = Standing(epochs, steps, done, progress.step, loss, top1, stage=self.stage)
        self._earlier_seconds, self._earlier_steps = self.seconds + progress.earlier_seconds, self._standing.taken
        self._images, self._seconds = 0, 0.0
        self._start = self._last = time.perf_counter()
        for view in self.views:
            view.begin(self._standing)

    def step(self, images: int, loss: float | None) -> None:
        """Of so many images; `loss` where there is a newer mean than before."""
        now = time.perf_counter()
        self._images, self._seconds, self._last = self._images + images, self._seconds + now - self._last, now
        self._standing.step += 1
        self._standing.loss = self._standing.loss if loss is None else loss
        self._standing.images_per_second = self._images / self._seconds
        self._take_time(now)
        for view in self.views:
            view.step(self._standing)

    def epoch(self, record: dict) -> None:
        self._last = time.perf_counter()  # evaluations and checkpoints are no training
        self._standing.epoch, self._standing.step = self.before + record["epoch"], 0
        self._standing.loss, self._standing.top1 = record["loss"], record.get("top1", self._standing.top1)
        self._take_time(self._last)
        for view in self.views:
            view.epoch(self._standing, record)

    def _take_time(self, now: float) -> None:
        elapsed, standing = now - self._start, self._standing
        standing.seconds = self._earlier_seconds + elapsed
        taken = standing.taken - self._earlier_steps
        standing.seconds_left = elapsed / taken * (standing.total - standing.taken) if taken else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for view in self.views:
            view.end(error)


class Terminal(View):
    """A line that changes with every step on a terminal, and a line an epoch in a log."""

    bar = tqdm.tqdm(disable=True)

    def begin(self, standing: Standing) -> None:
        self.bar.close()  # the line of the stage before
        self.bar = tqdm.tqdm(
            total=standing.total,
            initial=standing.taken,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% {bar:16} {desc}",
        )

    def step(self, standing: Standing) -> None:
        if not self.bar.disable:
            self.bar.set_description_str(standing.line, refresh=False)
            self.bar.update()

    def epoch(self, standing: Standing, record: dict) -> None:
        if self.bar.disable:
            text = f"loss {record['loss']:.3f}" + (f", top-1 {record['top1']:.1f}" if "top1" in record else "")
            log.info("epoch %d/%d: %s", standing.epoch, standing.epochs, text)
        else:
            self.bar.set_description_str(standing.line)

    def end(self, error: BaseException | None) -> None:
        self.bar.close()


class Journal(View):
    """The run's `progress.json`: where it stands and, if it ended before its time, why. Gone when the run is done."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS
        self.standing: Standing | None = None

    def begin(self, standing: Standing) -> None:
        self.standing = standing
        self._write()

    def step(self, standing: Standing) -> None:
        if time.monotonic() - self._written > EVERY:
            self._write()

    def epoch(self, standing: Standing, record: dict) -> None:
        self._write()

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self.path.unlink(missing_ok=True)
            return
        stopped = getattr(error, "interrupted", not isinstance(error, Exception))
        self._write(error=f"{type(error).__name__}: {reason_of(error)}", interrupted=stopped)

    def _write(self, **ended: object) -> None:
        self._written = time.monotonic()
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        content = (asdict(self.standing) if self.standing else {}) | process | ended
        with suppress(OSError):  # a full disk ends a run where something would be lost: at its checkpoint
            write_text(self.path, json.dumps(content) + "\n")


def duration(seconds: float) -> str:
    """In one unit, of at least two digits where that is not too long."""
    minutes, hours, days = round(seconds / 60), round(seconds / 3600), round(seconds / 86400)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    return f"{hours} h" if hours < 100 else f"{days} d"
