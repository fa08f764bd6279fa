"""The workflow's other rules, each usable by hand."""

import argparse
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from linvit.catalogue import named
from linvit.cli.command import (
    Command,
    add_compute,
    add_config,
    add_data,
    add_out,
    add_training,
    compute_of,
    dataset_and_places,
    part_and_places,
)
from linvit.grid import Source, sources_of
from linvit.report import BY_HAND, FIGURES, HISTORY_FIGURES

if TYPE_CHECKING:
    from pandas import DataFrame


def dataset(options: argparse.Namespace) -> None:
    """Check that a data set is there and whole, and write a manifest.

    A small one is decoded into a folder beside the manifest, for the runs that will use it.
    """
    from linvit import datasets
    from linvit.decoded import decoded
    from linvit.files import write_text

    part, places = dataset_and_places(options)
    data, download = options.data or places.data, options.download or places.download
    out, sizes = options.out or places.results / "data" / f"{part.name}.json", {}
    for split in part.splits:
        found = datasets.read(part, split, data, download=download)
        sizes[split] = len(decoded(found, part, split, data, out.parent))
    write_text(out, json.dumps({"dataset": json.loads(part.model_dump_json()), "images": sizes}, indent=2) + "\n")


def _dataset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="a name of the configuration, JSON, or a file with it")
    add_config(parser)
    add_data(parser)
    parser.add_argument("--download", action="store_true", help="fetch it, if torchvision can")
    add_out(parser, "the manifest; default: results/data/ and its name")


def source(options: argparse.Namespace) -> None:
    """Bring a pre-trained Softmax ViT into a folder: fetched or trained."""
    from linvit.ranks import joined
    from linvit.run import prepare_source

    part, places = part_and_places(
        Source, options.source, options.config, lambda study, name: named(sources_of(study), name, "source")
    )
    out = options.out or places.results / "sources" / part.folder
    with joined() as ranks:
        prepare_source(part, out, ranks=ranks, **compute_of(options, places))


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="name/size in the configuration, JSON, or a file with it")
    add_config(parser)
    add_compute(parser)
    add_training(parser)
    add_out(parser, "its folder; default: results/sources/ and its name")


def collect(options: argparse.Namespace) -> None:
    """Gather metrics of runs into one tidy table."""
    from linvit import results

    pattern = "ood/*.json" if options.ood else "metrics.json"
    found = (sorted(path.rglob(pattern)) if path.is_dir() else [path] for path in options.metrics)
    of_runs = results.collect_history if options.history else results.collect
    gather = results.collect_ood if options.ood else of_runs
    results.write_runs(gather(itertools.chain.from_iterable(found)), options.out)


def _collect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.json files, or folders of runs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--history", action="store_true", help="gather a row an epoch instead of a row a run")
    what.add_argument("--ood", action="store_true", help="gather evaluations out of distribution instead")
    add_out(parser, "the table to write (csv)", required=True)


def tables(options: argparse.Namespace) -> None:
    """Write the tables of a table of runs: top-1, and the paper's."""
    from linvit import results
    from linvit.tables import write_tables

    write_tables(results.read_runs(options.runs), options.out, _ood(options))


def _tables_arguments(parser: argparse.ArgumentParser) -> None:
    _add_tables_of_runs(parser)
    add_out(parser, "the folder to write them into", required=True)


def figure(options: argparse.Namespace) -> None:
    """Draw one figure into files, by suffix png or pdf."""
    from linvit.figures import draw, save

    tables = {"history": options.history, "rates": options.rates}
    drawn = draw(options.name, options.runs, source=options.source, **tables)
    for path in options.out:
        save(drawn, path)


def _figure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=", ".join((*FIGURES, *HISTORY_FIGURES, *BY_HAND)))
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a table of runs (csv); of blocks for blocks")
    parser.add_argument("--source", metavar="NAME", help="show runs of this source; default: the most used one")
    parser.add_argument("--history", type=Path, metavar="FILE", help="a table of histories (csv), for those of them")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="of throughput; default: as runs measured it")
    add_out(parser, "the files to write (png, pdf)", required=True, nargs="+")


def claims(options: argparse.Namespace) -> None:
    """Judge the paper's claims on a table of runs.

    A file's suffix, md or html, is the format.
    """
    from linvit import page, results
    from linvit.claims import claims_text

    text = claims_text(results.read_runs(options.runs), _ood(options))
    for path in options.out:
        page.write(path, text)


def _claims_arguments(parser: argparse.ArgumentParser) -> None:
    _add_tables_of_runs(parser)
    add_out(parser, "the files to write (md, html)", required=True, nargs="+")


def _add_tables_of_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="a table of runs (csv)")
    parser.add_argument("--ood", type=Path, metavar="FILE", help="a table of out-of-distribution results (csv)")


def _ood(options: argparse.Namespace) -> "DataFrame | None":
    from linvit import results

    return results.read_ood(options.ood) if options.ood else None


COMMANDS = (
    Command(dataset, _dataset_arguments, "linvit dataset cifar100 --download"),
    Command(source, _source_arguments, "linvit source deit/small"),
    Command(collect, _collect_arguments, "linvit collect results/runs --out runs.csv"),
    Command(tables, _tables_arguments, "linvit tables runs.csv --out tables"),
    Command(figure, _figure_arguments, "linvit figure fig4 runs.csv --out fig4.pdf fig4.png"),
    Command(claims, _claims_arguments, "linvit claims runs.csv --out claims.md"),
)
