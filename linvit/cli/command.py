"""What subcommands are made of: their parser, and the arguments and readings that several of them share."""

import argparse
import inspect
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import ValidationError

from linvit.catalogue import INITS, SIZES, VARIANTS, named
from linvit.config import ConfigError, Dataset, Part, Study, first_mistake, load_study
from linvit.files import regular
from linvit.signals import ENDINGS, when_gone

_PartT = TypeVar("_PartT", bound=Part)

WIDTH = 78
MOST = 999_999  # of whatever is counted in an argument
CONFIG = Path("config.yaml")
PACKAGED: dict[str, Mapping[str, Part]] = {"variants": VARIANTS, "inits": INITS, "sizes": SIZES}
"""The tables of a configuration that come with the package too."""


class Parser(argparse.ArgumentParser):
    """One that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)

    @property
    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


@dataclass(frozen=True)
class Command:
    """A subcommand: a function of its parsed options, whose name it has and whose docstring is its help."""

    run: Callable[[argparse.Namespace], None]
    arguments: Callable[[argparse.ArgumentParser], None]
    example: str

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        return self._paragraphs[0]

    @property
    def _paragraphs(self) -> list[str]:
        return (inspect.getdoc(self.run) or "").split("\n\n")

    def add_to(self, subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser(
            self.name,
            description="\n".join(textwrap.fill(paragraph, WIDTH) for paragraph in self._paragraphs),
            epilog=f"example:\n  {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.arguments(parser)
        parser.usage = f"linvit {self.name} [options] {' '.join(_required(parser))}".rstrip()
        parser.set_defaults(run=self.run, parser=parser)


def _required(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        name = str(action.metavar or action.dest)
        if action.required or not action.option_strings:
            text = " ".join([*action.option_strings[:1], *([] if action.nargs == 0 else [name])])
            yield {"+": f"{text} ...", "?": f"[{text}]"}.get(str(action.nargs), text)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="default: config.yaml")


def add_grid(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--grid", metavar="NAME", help="default: the configuration's own choice")


def add_out(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    parser.add_argument("--out", type=Path, metavar="PATH", help=text, **options)


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets; default: as configured")


def add_compute(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads for torch")
    parser.add_argument("--workers", type=natural, metavar="N", help="processes that decode; default: threads - 1")


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoded", type=Path, metavar="DIR", help="folder of decoded data sets, to share")
    parser.add_argument("--tensorboard", action="store_true", help="write event files into the run's folder, too")


def positive(text: str) -> int:
    return _number(text, 1)


def natural(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    number = int(text) if text.isdecimal() and len(text) <= len(str(MOST)) else -1
    if not least <= number <= MOST:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {least} to {MOST:,}")
    return number


def limit_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def workers_of(options: argparse.Namespace) -> int:
    from linvit.data import default_workers

    return options.workers if options.workers is not None else default_workers(options.threads)


def compute_of(options: argparse.Namespace, places: "Places") -> dict[str, Any]:
    """What `run.train` and `run.prepare_source` are told of the machine."""
    return {
        "data_root": options.data or places.data,
        "decoded_folder": options.decoded or places.decoded,
        "workers": workers_of(options),
        "stop": stop_on_signal(),
        "tensorboard": options.tensorboard,
    }


def stop_on_signal() -> Callable[[], bool]:
    """True from the first signal on that asks to end: a scheduler's SIGTERM or SIGUSR2, Ctrl-C, a terminal that closes.

    It listens from its first call on: before a training's first step, which asks it, such a signal ends the process as
    any other. A second Ctrl-C ends it at once.
    """
    received: list[int] = []

    def hear(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @cache
    def listen() -> None:
        for number in ENDINGS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, hear)

    def stop() -> bool:
        listen()
        return bool(received)

    return stop


def end_with(parent: int) -> None:
    """Send this process SIGTERM once the one that started it is no more: a killed Snakemake leaves no jobs behind."""
    when_gone(parent, lambda: os.kill(os.getpid(), signal.SIGTERM))


class Places(NamedTuple):
    """Where a study has its things, for want of options that say so."""

    results: Path = Path("results")
    data: Path = Path("data")
    decoded: Path | None = None
    download: bool = False


def part_and_places(
    kind: type[_PartT], argument: str, config: Path, find: Callable[[Study, str], _PartT]
) -> tuple[_PartT, Places]:
    """A part given as JSON, as a file that holds it, or by its name in the configuration, whose places it then has."""
    if _is_json(argument) or Path(argument).is_file() or not config.exists():
        return _read(kind, argument), Places()
    study = load_study(config)
    return find(study, argument), _places_of(study)


def configured_places(config: Path) -> Places:
    """Those of the configuration; the usual ones where none lies here."""
    return _places_of(load_study(config)) if config != CONFIG or config.exists() else Places()


def _places_of(study: Study) -> Places:
    results = Path(study.results)
    return Places(results, Path(study.data), results / "data", study.download)


def dataset_and_places(options: argparse.Namespace) -> tuple[Dataset, Places]:
    return part_and_places(
        Dataset, options.dataset, options.config, lambda study, name: named(study.datasets, name, "data set").settings()
    )


def parts_of(table: str, config: Path) -> Mapping[str, Any]:
    """The entries of one of the configuration's tables; those of the package where no configuration lies here."""
    if config != CONFIG or config.exists():
        return getattr(load_study(config), table)
    if table not in PACKAGED:
        raise ConfigError(f"no {CONFIG} here, which would tell of {table}; name one by --config")
    return PACKAGED[table]


def _is_json(argument: str) -> bool:
    return argument.lstrip().startswith("{")


def _read(kind: type[_PartT], argument: str) -> _PartT:
    try:
        return kind.model_validate_json(argument if _is_json(argument) else regular(argument).read_bytes())
    except ValidationError as error:
        where = "" if _is_json(argument) else f"{argument}: "
        raise ConfigError(f"{where}not a {kind.__name__}: {first_mistake(error, kind)}") from None
    except OSError as error:
        raise ConfigError(f"{argument}: {error.strerror}") from None
