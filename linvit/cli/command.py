"""What subcommands are made of: their parser, and the arguments and readings that several of them share."""

import argparse
import inspect
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from linvit.config import ConfigError, Part, first_mistake

WIDTH = 78
CONFIG = Path("config.yaml")


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
        return inspect.getdoc(self.run).split("\n\n")[0]

    def add_to(self, subparsers: argparse._SubParsersAction) -> None:
        paragraphs = inspect.getdoc(self.run).split("\n\n")
        parser = subparsers.add_parser(
            self.name,
            description="\n".join(textwrap.fill(paragraph, WIDTH) for paragraph in paragraphs),
            epilog=f"example:\n  {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.arguments(parser)
        parser.set_defaults(run=self.run, parser=parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="default: config.yaml")


def add_grid(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--grid", metavar="NAME", help="default: the configuration's own choice")


def add_out(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    parser.add_argument("--out", type=Path, metavar="PATH", help=text, **options)


def add_compute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets; default: data")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads for torch")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that decode; default: threads - 1")


def add_decoded(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoded", type=Path, metavar="DIR", help="folder of decoded data sets, to share")


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def limit_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def workers_of(options: argparse.Namespace) -> int:
    from linvit.data import default_workers

    return options.workers if options.workers is not None else default_workers(options.threads)


def compute_of(options: argparse.Namespace) -> dict[str, Any]:
    """What `run.train` and `run.prepare_source` are told of the machine."""
    return {
        "data_root": options.data or Path("data"),
        "decoded_folder": options.decoded,
        "workers": workers_of(options),
        "stop": stop_on_signal(),
    }


def stop_on_signal() -> Callable[[], bool]:
    """True from the first SIGTERM or SIGUSR2 on: what schedulers send before they take a job's machine away."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: received.append(number))
    return lambda: bool(received)


def read_part(part: type[Part], argument: str) -> Part:
    """A part given as JSON, or as a file that holds it."""
    try:
        return part.model_validate_json(argument if is_json(argument) else Path(argument).read_bytes())
    except ValidationError as error:
        raise ConfigError(f"not a {part.__name__}: {first_mistake(error, part)}") from None
    except OSError as error:
        raise ConfigError(f"{argument}: {error.strerror}") from None


def is_json(argument: str) -> bool:
    return argument.lstrip().startswith("{")
