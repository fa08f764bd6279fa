"""Jobs of the workflow as classes, for executors that call them in the job's own process.

Unlike a command, such a job hears that its time is over: `stop()` ends it after its next step with a checkpoint and
`fit.Interrupted`, and called again it goes on from there. Several ranks may share one, started as torchrun does.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from linvit.data import default_workers
from linvit.grid import RunSpec, Source
from linvit.logs import set_up_logging
from linvit.ranks import joined
from linvit.run import prepare_source, train


class Job(ABC):
    """A rule's job: constructed with what Snakemake knows of it, called once, asked to stop at any time.

    Args:
        output: The files to make; their folder is the job's own.
        params: The rule's parameters.
        threads: CPU threads of each rank.
    """

    def __init__(self, *, output: Sequence[str], params: Mapping[str, Any], threads: int = 1, **_: object) -> None:
        self.folder = Path(output[0]).parent
        self.params = params
        self.threads = threads
        self._stopping = False

    def stop(self) -> None:
        # Called by a signal's handler, perhaps of a second signal within the first's: no lock, no wait.
        self._stopping = True

    def __call__(self) -> None:
        set_up_logging()
        torch.set_num_threads(self.threads)
        with joined() as ranks:
            self.work(
                data_root=Path(self.params["data"]),
                decoded_folder=Path(self.params["decoded"]),
                workers=default_workers(self.threads),
                stop=lambda: self._stopping,
                tensorboard=self.params.get("tensorboard", False),
                ranks=ranks,
            )

    @abstractmethod
    def work(self, **options: Any) -> None:
        """Do it; the options are those of `run.train`."""


class Train(Job):
    """Rule `train`: one run, from the parameter `spec` to its metrics."""

    def work(self, **options: Any) -> None:
        spec, sources_folder = RunSpec.from_json(self.params["spec"]), Path(self.params["sources"])
        train(spec, self.folder, sources_folder=sources_folder, **options)


class PrepareSource(Job):
    """Rule `source`: one source, fetched or trained by the parameter `source`."""

    def work(self, **options: Any) -> None:
        prepare_source(Source.model_validate_json(self.params["source"]), self.folder, **options)
