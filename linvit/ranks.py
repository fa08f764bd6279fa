"""The processes that share one run, a GPU each, as torchrun, or a scheduler in its manner, starts them."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run. Every method must be called by all of them, in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def part(self, n: int) -> slice:
        """This rank's part of n images in a row; the parts differ by one image at most."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def total(self, n: int) -> int:
        """The sum of a number over all ranks."""
        return n if self.size == 1 else int(self.sum(torch.tensor(n)))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def wait(self) -> None:
        """Until all ranks are here."""
        self.any(False)

    def replica(self, model: nn.Module) -> nn.Module:
        """The model with gradients that are averaged over ranks as they are computed."""
        if self.size == 1:
            return model
        # Buffers are the same on all ranks from the start: they are constants.
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def averaging(self, replica: Any, now: bool) -> AbstractContextManager:
        """Whether backward passes average what gradients have been added up so far, or only go on adding."""
        return nullcontext() if now or self.size == 1 else replica.no_sync()


@contextmanager
def joined() -> Iterator[Ranks]:
    """All ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell of; without them, this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    # Two back ends in one group: gradients are on GPUs, what ranks agree on is not.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield Ranks(dist.get_rank(), dist.get_world_size())
    # Not after an error: the others may be waiting for this rank, and its end is what tells them.
    dist.destroy_process_group()
