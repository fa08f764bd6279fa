"""What people do with single models."""

import argparse
import logging
from pathlib import Path

from linvit.cli.command import (
    Command,
    add_compute,
    add_decoded,
    add_out,
    compute_of,
    read_part,
    workers_of,
)
from linvit.config import Dataset
from linvit.grid import RunSpec

log = logging.getLogger("linvit")


def train(options: argparse.Namespace) -> None:
    """Carry out one run, from its spec to its metrics."""
    from linvit.ranks import joined
    from linvit.run import train as train_run

    spec = read_part(RunSpec, options.spec)
    with joined() as ranks:
        metrics = train_run(spec, options.out, sources_folder=options.sources, ranks=ranks, **compute_of(options))
    if ranks.first:
        log.info("%s: top-1 %.2f", spec.name, metrics["top1"])


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", help="the run as JSON, or a spec.json")
    add_compute(parser)
    add_decoded(parser)
    parser.add_argument("--sources", type=Path, default=Path("results/sources"), help="folder of prepared sources")
    add_out(parser, "the run's folder", required=True)


def ood(options: argparse.Namespace) -> None:
    """Evaluate a trained run on a further test split of its data set."""
    from linvit.ood import evaluate_ood

    part = read_part(Dataset, options.dataset)
    found = evaluate_ood(
        options.run_folder, part, options.out, data_root=options.data or Path("data"), workers=workers_of(options)
    )
    log.info("%s on %s: top-1 %.2f", options.run_folder, part.name, found["top1"])


def _ood_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="run", type=Path, help="the run's folder")
    parser.add_argument("dataset", help="the data set as JSON, or a file with it")
    add_compute(parser)
    add_out(parser, "the file to write (json)", required=True)


COMMANDS = (
    Command(train, _train_arguments, "linvit train spec.json --out results/runs/mine"),
    Command(ood, _ood_arguments, "linvit ood results/runs/mine further.json --out found.json"),
)
