"""What trained models show when they are run again, beside their sources."""

import argparse
from pathlib import Path
from typing import Any

from linvit.cli.command import Command, add_config, add_data, add_out, configured_places, positive


def blocks(options: argparse.Namespace) -> None:
    """Measure how far each block's attention is from its source's.

    Before and after training, into a table for linvit figure blocks.
    """
    import pandas as pd

    from linvit import results
    from linvit.blocks import block_errors

    found = block_errors(_models_in(options.runs), images=options.images, **_where(options))
    results.write_runs(pd.DataFrame(found, columns=list(results.BLOCK_DTYPES)), options.out)


def _blocks_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser, "folders of runs, or of many", images=256)
    add_out(parser, "the table to write (csv)", required=True)


def maps(options: argparse.Namespace) -> None:
    """Draw what a source and runs that start from it attend to.

    Side by side on test images; an operator without a map (mhla, ttt) is shown as such.
    """
    from linvit.blocks import maps_beside
    from linvit.figures import save
    from linvit.figures.maps import maps as draw

    drawn = draw(maps_beside(options.runs, images=options.images, blocks=options.blocks, **_where(options)))
    for path in options.out:
        save(drawn, path)


def _maps_arguments(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser, "folders of runs", images=4)
    parser.add_argument("--blocks", type=int, nargs="+", metavar="I", help="from 0; default: first, middle and last")
    add_out(parser, "the files to write (png, pdf)", required=True, nargs="+")


def _add_runs(parser: argparse.ArgumentParser, what: str, *, images: int) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help=what)
    add_config(parser)
    add_data(parser)
    parser.add_argument("--sources", type=Path, metavar="DIR", help="prepared sources; default: as configured")
    parser.add_argument("--images", type=positive, metavar="N", default=images, help=f"of the test; default: {images}")


def _where(options: argparse.Namespace) -> dict[str, Any]:
    places = configured_places(options.config)
    return {
        "sources_folder": options.sources or places.results / "sources",
        "data_root": options.data or places.data,
    }


def _models_in(folders: list[Path]) -> list[Path]:
    """The folders of trained models in and below these; one without any stays, and is refused when it is opened."""
    from linvit.trained import MODEL

    return [folder for given in folders for folder in [path.parent for path in sorted(given.rglob(MODEL))] or [given]]


COMMANDS = (
    Command(maps, _maps_arguments, "linvit maps results/runs/fashion-1k/mini/relu/*/fashion/seed0 --out maps.png"),
    Command(blocks, _blocks_arguments, "linvit blocks results/runs --out blocks.csv"),
)
