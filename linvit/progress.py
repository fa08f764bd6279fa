"""How far a run is, on disk: everything it needs to go on, all or nothing."""

import hashlib
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from linvit.checkpoints import is_stored, load
from linvit.config import Part, UserError, first_mistake, reason_of
from linvit.files import replacing

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter beside the number of its steps."""


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


@dataclass(frozen=True)
class Schedule:
    """What a run does, beyond which its progress cannot be."""

    epochs: int
    steps: int
    """Of an epoch."""
    eval_every: int | None = None
    """Epochs between evaluations, the last of which is always evaluated; None for no evaluation at all."""
    distils: bool = False
    """Whether there is a distillation loss."""

    def is_evaluated(self, epoch: int) -> bool:
        return self.eval_every is not None and (epoch % self.eval_every == 0 or epoch == self.epochs)

    def check(self, progress: "_Progress") -> None:
        """Raises ValueError where a run of this schedule does not come by."""
        done, epochs = len(progress.history), f"{len(progress.history)} epochs and {progress.step} steps"
        if done * self.steps + progress.step > self.epochs * self.steps or progress.step > self.steps:
            raise ValueError(f"{epochs} of a run of {self.epochs} epochs of {self.steps} steps")
        if any((record.top1 is not None) != self.is_evaluated(record.epoch) for record in progress.history):
            raise ValueError("evaluations of other epochs than this run's")
        if any((extra is not None) != self.distils for extra in progress.distillation_losses):
            raise ValueError("distillation losses of another run")


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


def restore(
    path: Path, identity: str, model: nn.Module, optimizer: torch.optim.AdamW, schedule: Schedule | None = None
) -> Progress | None:
    """Bring model and optimizer back to where `save` found them; None if that was in a run of another identity.

    The optimizer's hyper-parameters stay as they are, but for the learning rate of its last step. A checkpoint may be
    a stranger's: fused AdamW writes into what it is given, whatever its shape, so that nothing is handed on unchecked.

    Raises:
        CheckpointError: the file is damaged, or not what `save` writes of these and of such a schedule.
    """
    device = next(model.parameters()).device
    try:
        content = load(path, device)
        if not isinstance(content, dict) or not isinstance(content.get("identity"), str):
            raise ValueError("not a run's checkpoint")
        if content["identity"] != identity:
            return None
        found = _Checkpoint.model_validate(content)
        if schedule:
            schedule.check(found.progress)
        _check_model(found.model, model.state_dict())
        state = _optimizer_state(found, optimizer)
        model.load_state_dict(found.model)
        optimizer.load_state_dict(state)
        return Progress(**content["progress"])
    except Exception as error:  # whatever damaged bytes make the readers raise
        raise CheckpointError(f"{path}: damaged ({_reason(error)}); delete it to start this run over") from error


class _Record(Part):
    """Of an epoch, as `Loop.record` and `evaluate` write it."""

    epoch: PositiveInt
    lr: NonNegativeFloat
    loss: float
    task_loss: float
    distill_loss: float | None
    top1: Annotated[float, Field(ge=0, le=100)] | None = None
    top5: Annotated[float, Field(ge=0, le=100)] | None = None


class _Progress(Part):
    """`Progress`, as it is in a file."""

    history: list[_Record]
    step: NonNegativeInt
    losses: list[tuple[float, float | None, PositiveInt]]
    seconds: NonNegativeFloat
    images: NonNegativeInt
    earlier_seconds: NonNegativeFloat

    @property
    def distillation_losses(self) -> list[float | None]:
        return [record.distill_loss for record in self.history] + [extra for _, extra, _ in self.losses]

    @model_validator(mode="after")
    def _counts(self) -> "_Progress":
        if [record.epoch for record in self.history] != list(range(1, len(self.history) + 1)):
            raise ValueError("its epochs are not counted from 1")
        if len(self.losses) != self.step:
            raise ValueError(f"{len(self.losses)} losses of {self.step} steps")
        if any((record.top1 is None) != (record.top5 is None) for record in self.history):
            raise ValueError("top1 without top5")
        return self


class _Group(Part):
    model_config = ConfigDict(extra="ignore")

    params: list[int]
    lr: NonNegativeFloat


class _Optimizer(Part):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    state: dict[int, dict[str, Tensor]]
    param_groups: list[_Group]


class _Checkpoint(Part):
    """What `save` writes."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    identity: str
    model: dict[str, Tensor]
    optimizer: _Optimizer
    progress: _Progress


def _check_model(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        raise ValueError(f"other parameters than the model's: {min(found.keys() ^ expected.keys())}")
    for name, tensor in found.items():
        _check_tensor(tensor, expected[name], name)


def _check_tensor(found: Tensor, expected: Tensor, name: str) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape or not is_stored(found):
        raise ValueError(f"{name} is no dense {expected.dtype} of shape {list(expected.shape)}")


def _optimizer_state(found: _Checkpoint, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """What the optimizer itself would give: its hyper-parameters, and what the file says of each parameter's past."""
    groups = optimizer.state_dict()["param_groups"]
    told = found.optimizer.param_groups
    if [group.params for group in told] != [group["params"] for group in groups]:
        raise ValueError("other parameters than the optimizer's")
    if (found.progress.history or found.progress.step) and not found.optimizer.state:
        raise ValueError("an optimizer that has done no step")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {number: _past(state, parameters[number]) for number, state in found.optimizer.state.items()},
        "param_groups": [group | {"lr": old.lr} for group, old in zip(groups, told, strict=True)],
    }


def _past(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """One parameter's, in memory of its own that is laid out as AdamW does it."""
    if state.keys() != {"step", *MOMENTS}:
        raise ValueError(f"an optimizer's state of {', '.join(sorted(state)) or 'nothing'}, not AdamW's")
    step = state["step"]
    _check_tensor(step, torch.zeros(()), "step")
    if not step.isfinite() or step < 0:
        raise ValueError(f"a number of steps of {step.item()}")
    for name in MOMENTS:
        _check_tensor(state[name], parameter, name)
    return {"step": step.clone()} | {name: torch.empty_like(parameter).copy_(state[name]) for name in MOMENTS}


def _reason(error: Exception) -> str:
    """What was found; of what torch says, which may go on for a page, the kind."""
    if isinstance(error, ValidationError):
        return " ".join(first_mistake(error, _Checkpoint).split())
    return reason_of(error) if isinstance(error, ValueError) else type(error).__name__
