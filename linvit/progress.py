"""How far a run is, on disk: everything it needs to go on, all or nothing."""

import hashlib
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from linvit.checkpoints import load
from linvit.config import UserError
from linvit.files import replacing

log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that is damaged, or not the same for all ranks."""


@dataclass
class Progress:
    """How far a run is: a record for each epoch done, the epoch under way, and the seconds and images so far."""

    history: list[dict] = field(default_factory=list)
    step: int = 0
    """Steps done of the epoch under way, and their losses."""
    losses: list[tuple[float, float | None, int]] = field(default_factory=list)
    seconds: float = 0.0
    images: int = 0
    earlier_seconds: float = 0.0
    """Wall time of the processes that were interrupted, up to their last checkpoint."""

    @property
    def epochs(self) -> int:
        return len(self.history)

    def mean_losses(self) -> dict[str, float | None]:
        """Means over the images so far of the epoch: the task's loss, the weighted distillation loss, and their sum."""
        images = sum(n for *_, n in self.losses)
        task = sum(task * n for task, _, n in self.losses) / images
        if self.losses[0][1] is None:
            return {"loss": task, "task_loss": task, "distill_loss": None}
        extra = sum(extra * n for _, extra, n in self.losses) / images
        return {"loss": task + extra, "task_loss": task, "distill_loss": extra}

    def finish_epoch(self, record: dict) -> None:
        self.history.append(record)
        self.images += sum(n for *_, n in self.losses)
        self.step, self.losses = 0, []


def save(
    path: Path,
    identity: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    since: float | None = None,
) -> None:
    """Write everything a run needs to go on, all or nothing; `since` is when this process began, by perf_counter."""
    elapsed = time.perf_counter() - since if since is not None else 0.0
    progress = replace(progress, earlier_seconds=progress.earlier_seconds + elapsed)
    state = {"identity": identity, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save({**state, "progress": asdict(progress)}, file)
        except RuntimeError as error:  # what torch's writer makes of a full disk
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def exchange(path: Path, identity: str) -> None:
    """Set the checkpoint of another identity aside, and put that of this one in its place, if one was set aside."""
    if path.exists() and (other := load(path)["identity"]) != identity:
        log.warning(
            "the checkpoint is of a run with other settings: set aside as %s, for when they come back",
            path.replace(_aside(path, other)),
        )
    if not path.exists() and (own := _aside(path, identity)).exists():
        own.replace(path)


def _aside(path: Path, identity: str) -> Path:
    """Where a checkpoint waits while its folder is used by a run of other settings."""
    return path.with_suffix(f".{hashlib.sha256(identity.encode()).hexdigest()[:8]}.old")


def restore(path: Path, identity: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
    """Bring model and optimizer back to where `save` found them; None if that was in a run of another identity.

    Raises:
        CheckpointError: the file is damaged.
    """
    device = next(model.parameters()).device
    try:
        state = load(path, device)
        if not isinstance(state, dict):
            raise TypeError(f"holds a {type(state).__name__}")
        if state["identity"] != identity:
            return None
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
    except Exception as error:  # whatever damaged bytes make the readers raise
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}); delete it to start this run over") from error
