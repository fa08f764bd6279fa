"""The command line: one subcommand for each rule of the workflow, each usable by hand.

Exit codes: 0 done; 2 a mistake in the arguments, the configuration or the data, told in one line; 1 any failure.
"""

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from linvit.config import ConfigError, Dataset, Part, RunEnded, UserError, first_mistake, load_study
from linvit.files import WriteError
from linvit.grid import RunSpec, Source, expand
from linvit.logs import set_up_logging
from linvit.report import FIGURES

if TYPE_CHECKING:
    from pandas import DataFrame


def grid(options: argparse.Namespace) -> None:
    """List a grid's runs."""
    study = load_study(options.config)
    for name in expand(study, options.grid):
        print(name)


def plan(options: argparse.Namespace) -> None:
    """Tell what a grid costs before it is run: its runs by table and figure, what is cached, images, hours."""
    from linvit.plan import plan_of, text
    from linvit.rates import default_path, read_rates

    study = load_study(options.config)
    table = options.rates or default_path(study)
    print(text(plan_of(study, options.grid, read_rates(table)), table))


def bench(options: argparse.Namespace) -> None:
    """Measure how fast this device trains and evaluates the models of a grid, for its plan."""
    from linvit.rates import default_path, workloads_of
    from linvit.throughput import fill

    study = load_study(options.config)
    wanted = workloads_of(study, options.grid, sizes=options.sizes, variants=options.variants)
    fill(options.out or default_path(study), wanted, batch_size=options.batch_size)


def dataset(options: argparse.Namespace) -> None:
    """Check that a data set is there and of the expected size (with --download, fetch it), and write a manifest.

    A small one is decoded into a folder beside the manifest, for the runs that will use it.
    """
    from linvit import datasets
    from linvit.decoded import decoded
    from linvit.files import write_text

    part = _read(Dataset, options.dataset)
    sizes = {}
    for split in part.splits:
        found = datasets.read(part, split, options.data, download=options.download)
        sizes[split] = len(decoded(found, part, split, options.data, options.out.parent))
    write_text(
        options.out, json.dumps({"dataset": json.loads(part.model_dump_json()), "images": sizes}, indent=2) + "\n"
    )


def source(options: argparse.Namespace) -> None:
    """Bring a pre-trained Softmax ViT into a folder: fetched, or trained by the pipeline."""
    from linvit.ranks import joined
    from linvit.run import prepare_source

    part = _read(Source, options.source)
    with joined() as ranks:
        prepare_source(part, options.out, ranks=ranks, **_compute(options))


def train(options: argparse.Namespace) -> None:
    """Carry out one run, from its spec to its metrics."""
    from linvit.ranks import joined
    from linvit.run import train as train_run

    spec = _read(RunSpec, options.spec)
    with joined() as ranks:
        metrics = train_run(spec, options.out, sources_folder=options.sources, ranks=ranks, **_compute(options))
    if ranks.first:
        logging.getLogger("linvit").info("%s: top-1 %.2f", spec.name, metrics["top1"])


def ood(options: argparse.Namespace) -> None:
    """Evaluate a trained run on a further test split of its data set, out of distribution."""
    from linvit.ood import evaluate_ood

    part = _read(Dataset, options.dataset)
    found = evaluate_ood(options.run, part, options.out, data_root=options.data, workers=_workers(options))
    logging.getLogger("linvit").info("%s on %s: top-1 %.2f", options.run, part.name, found["top1"])


def collect(options: argparse.Namespace) -> None:
    """Gather metrics files, or those of whole folders, into one tidy table (with --ood, those out of distribution)."""
    from linvit import results

    pattern = "ood/*.json" if options.ood else "metrics.json"
    found = (sorted(path.rglob(pattern)) if path.is_dir() else [path] for path in options.metrics)
    gather = results.collect_ood if options.ood else results.collect
    results.write_runs(gather(itertools.chain.from_iterable(found)), options.out)


def tables(options: argparse.Namespace) -> None:
    """Write the tables: top-1 of all runs, and the paper's, ours beside the printed numbers."""
    from linvit import results
    from linvit.tables import write_tables

    write_tables(results.read_runs(options.runs), options.out, _ood(options))


def figure(options: argparse.Namespace) -> None:
    """Draw one figure into a file; its suffix, png or pdf, is the format."""
    from linvit import results
    from linvit.figures import FIGURES, save

    if options.name not in FIGURES:
        raise ConfigError(f"no figure {options.name!r}; allowed: {', '.join(FIGURES)}")
    choice = {"source": options.source} if options.source else {}
    drawn = FIGURES[options.name](results.read_runs(options.runs), **choice)
    for path in options.out:
        save(drawn, path)


def claims(options: argparse.Namespace) -> None:
    """Judge the paper's claims on a table of runs; a file's suffix, md or html, is the format."""
    from linvit import page, results
    from linvit.claims import claims_text

    text = claims_text(results.read_runs(options.runs), _ood(options))
    for path in options.out:
        page.write(path, text)


def stop_on_signal() -> Callable[[], bool]:
    """True from the first signal on that asks to end: a scheduler's SIGTERM or SIGUSR2, Ctrl-C, a terminal that closes.

    A second Ctrl-C ends the process at once.
    """
    received: list[int] = []

    def hear(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, hear)
    return lambda: bool(received)


def end_with(parent: int) -> None:
    """Send this process SIGTERM once the one that started it is no more: a killed Snakemake leaves no jobs behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments."""
    top = argparse.ArgumentParser(prog="linvit", description="Initialise linear vision transformers from Softmax ones.")
    top.add_argument("--parent", type=int, help="end with the process of this number, which started this one")
    commands = top.add_subparsers(required=True, metavar="command")

    _add_grid(_command(commands, grid))

    command = _command(commands, plan)
    _add_grid(command)
    command.add_argument("--rates", type=Path, help="table of rates; default: that of linvit bench")

    command = _command(commands, bench)
    command.add_argument("--throughput", action="store_true", required=True, help="in images per second")
    _add_grid(command)
    command.add_argument("--sizes", nargs="+", help="of the grid's, only these")
    command.add_argument("--variants", nargs="+", help="of the grid's, only these")
    command.add_argument("--batch-size", type=_positive, help="images in a forward pass; default: each recipe's")
    command.add_argument("--threads", type=_positive, help="CPU threads for torch, as many as runs will have")
    command.add_argument("--out", type=Path, help="the table to extend; default: results/bench/throughput.json")

    command = _command(commands, dataset)
    command.add_argument("dataset", help="the data set as JSON, or a file with it")
    command.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    command.add_argument("--download", action="store_true")
    command.add_argument("--out", type=Path, required=True, help="the manifest to write")

    command = _command(commands, source)
    command.add_argument("source", help="the source as JSON, or a file with it")
    _add_compute(command)
    _add_decoded(command)
    command.add_argument("--out", type=Path, required=True, help="folder for the weights and their manifest")

    command = _command(commands, train)
    command.add_argument("spec", help="the run as JSON, or a spec.json")
    _add_compute(command)
    _add_decoded(command)
    command.add_argument("--sources", type=Path, default=Path("results/sources"), help="folder of prepared sources")
    command.add_argument("--out", type=Path, required=True, help="the run's folder")

    command = _command(commands, ood)
    command.add_argument("run", type=Path, help="the run's folder")
    command.add_argument("dataset", help="the data set as JSON, or a file with it")
    _add_compute(command)
    command.add_argument("--out", type=Path, required=True, help="the file to write (json)")

    command = _command(commands, collect)
    command.add_argument("metrics", type=Path, nargs="+", help="metrics.json files, or folders of runs")
    command.add_argument("--ood", action="store_true", help="gather evaluations out of distribution instead")
    command.add_argument("--out", type=Path, required=True, help="the table to write (csv)")

    for function in (tables, figure, claims):
        command = _command(commands, function)
        if function is figure:
            command.add_argument("name", help=", ".join(FIGURES))
            command.add_argument("--source", help="show runs of this source; default: the most used one")
        else:
            command.add_argument("--ood", type=Path, help="a table of out-of-distribution results (csv)")
        command.add_argument("runs", type=Path, help="a table of runs (csv)")
        command.add_argument("--out", type=Path, required=True, nargs=None if function is tables else "+")
    return top


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    set_up_logging()
    if options.parent:
        end_with(options.parent)
    try:
        _limit_threads(getattr(options, "threads", None))
        options.function(options)
        sys.stdout.flush()
    except (UserError, RunEnded, WriteError) as error:
        print(f"linvit: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:  # `linvit grid | head` has seen enough; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _command(commands: argparse._SubParsersAction, function: Callable) -> argparse.ArgumentParser:
    command = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
    command.set_defaults(function=function)
    return command


def _add_grid(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, default=Path("config.yaml"))
    command.add_argument("--grid", help="default: the configuration's own choice")


def _add_compute(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    command.add_argument("--threads", type=int, help="CPU threads for torch")
    command.add_argument("--workers", type=int, help="processes that decode images; default: one fewer than threads")


def _add_decoded(command: argparse.ArgumentParser) -> None:
    command.add_argument("--decoded", type=Path, help="folder of decoded data sets, to share; default: none")


def _compute(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "data_root": options.data,
        "decoded_folder": options.decoded,
        "workers": _workers(options),
        "stop": stop_on_signal(),
    }


def _ood(options: argparse.Namespace) -> "DataFrame | None":
    from linvit import results

    return results.read_ood(options.ood) if options.ood else None


def _workers(options: argparse.Namespace) -> int:
    from linvit.data import default_workers

    return options.workers if options.workers is not None else default_workers(options.threads)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def _limit_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _read(part: type[Part], argument: str) -> Part:
    """A part given as JSON, or as a file that holds it."""
    try:
        return part.model_validate_json(argument if argument.lstrip().startswith("{") else Path(argument).read_bytes())
    except ValidationError as error:
        where = "" if argument.lstrip().startswith("{") else f"{argument}: "
        raise ConfigError(f"{where}not a {part.__name__}: {first_mistake(error, part)}") from None
    except OSError as error:
        raise ConfigError(f"{argument}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
