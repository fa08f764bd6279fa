"""A run's curves as TensorBoard's event files, in the run's folder: `tensorboard --logdir results/runs`."""

from pathlib import Path

from linvit.config import UserError
from linvit.watch import Standing, View

SCALARS = {
    "loss/total": "loss",
    "loss/task": "task_loss",
    "loss/distillation": "distill_loss",
    "accuracy/top1": "top1",
    "accuracy/top5": "top5",
    "learning_rate": "lr",
}
"""Tags, and the keys of an epoch's record; a step of TensorBoard's is an epoch. The loss of a stage before the main one
has a tag by the stage's name."""
PACE = "images_per_second"


class Events(View):
    """Scalars of each epoch. A run that goes on takes the place of what it had written after its last checkpoint.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tensorboard is not installed; pip install 'linvit[tensorboard]', or do without") from None
        self.folder, self.kind = folder, SummaryWriter
        self.writer: SummaryWriter | None = None

    def begin(self, standing: Standing) -> None:
        self.end(None)  # of the stage before
        self.writer = self.kind(self.folder, purge_step=standing.epoch + 1)

    def epoch(self, standing: Standing, record: dict) -> None:
        if self.writer is None:
            return
        tags = SCALARS if standing.stage is None else {f"loss/{standing.stage}": "loss", "learning_rate": "lr"}
        scalars = {tag: record.get(key) for tag, key in tags.items()} | {PACE: standing.images_per_second}
        for tag, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(tag, value, standing.epoch)
        self.writer.flush()

    def end(self, error: BaseException | None) -> None:
        if self.writer:
            self.writer.close()
