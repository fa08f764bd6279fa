"""What people do with grids of runs."""

import argparse
import sys
import time
from pathlib import Path

from linvit.cli.command import Command, add_grid, add_out, positive
from linvit.config import load_study
from linvit.grid import expand


def grid(options: argparse.Namespace) -> None:
    """List a grid's runs."""
    study = load_study(options.config)
    for name in expand(study, options.grid):
        print(name)


def plan(options: argparse.Namespace) -> None:
    """Tell what a grid costs before it is run.

    Its runs by table and figure, what of them is cached, images to train on, and hours of one device.
    """
    from linvit.plan import plan_of, text
    from linvit.rates import default_path, read_rates

    study = load_study(options.config)
    table = options.rates or default_path(study)
    print(text(plan_of(study, options.grid, read_rates(table)), table))


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_grid(parser)
    parser.add_argument("--rates", type=Path, metavar="FILE", help="table of rates; default: that of linvit bench")


def status(options: argparse.Namespace) -> None:
    """Tell how far a grid is, by its files alone.

    What is done, running, interrupted, failed and why, or waiting, and the time left; from any machine that sees them.
    """
    from linvit.rates import default_path, read_rates
    from linvit.screen import text
    from linvit.status import status_of

    study = load_study(options.config)
    rates = read_rates(options.rates or default_path(study))
    while True:
        found = status_of(study, options.grid, rates, silent=60 * options.silent)
        is_screen = options.watch and sys.stdout.isatty()
        print(("\x1b[H\x1b[2J" if is_screen else "") + text(found, everything=options.all), flush=True)
        if not options.watch or found.is_over:
            return
        time.sleep(options.watch)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    _plan_arguments(parser)
    parser.add_argument(
        "--silent", type=positive, default=15, metavar="MINUTES", help="without news a run is interrupted; default: 15"
    )
    parser.add_argument("--all", action="store_true", help="list all runs, however many there are")
    parser.add_argument(
        "--watch", type=positive, nargs="?", const=10, metavar="SECONDS", help="look again and again; default: 10"
    )


def bench(options: argparse.Namespace) -> None:
    """Measure how fast this device trains and evaluates a grid's models.

    What the table of rates lacks is measured and entered, for linvit plan.
    """
    from linvit.rates import default_path, workloads_of
    from linvit.throughput import fill

    study = load_study(options.config)
    wanted = workloads_of(study, options.grid, sizes=options.sizes, variants=options.variants)
    fill(options.out or default_path(study), wanted, batch_size=options.batch_size)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--throughput", action="store_true", required=True, help="in images per second")
    add_grid(parser)
    parser.add_argument("--sizes", nargs="+", metavar="NAME", help="of the grid's, only these")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of the grid's, only these")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="images a pass; default: each recipe's")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads for torch, as many as runs will have"
    )
    add_out(parser, "the table to extend; default: results/bench/throughput.json")


COMMANDS = (
    Command(grid, add_grid, "linvit grid --grid paper"),
    Command(plan, _plan_arguments, "linvit plan --grid paper"),
    Command(status, _status_arguments, "linvit status --grid mini --watch"),
    Command(bench, _bench_arguments, "linvit bench --throughput --grid mini --threads 1"),
)
