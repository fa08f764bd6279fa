"""The command line: what people do with models and grids, and one subcommand for each step of the workflow.

Exit codes: 0 done; 2 a mistake in the arguments, the configuration or the data, told in one line; 1 any other failure,
told in a line with what to do next; 130 after Ctrl-C, but for a training that could write its checkpoint first, and
ends with 1. A traceback is a mistake of the program's own.
"""

import argparse
import errno
import os
import sys

from linvit import __version__
from linvit.cli import grids, models, pictures, reports, show, steps
from linvit.cli.command import Command, Parser, end_with, limit_threads
from linvit.config import RunEnded, UserError, printable
from linvit.config.mistakes import meant
from linvit.files import WriteError
from linvit.logs import set_up_logging

GROUPS = {
    "models": models.COMMANDS,
    "grids of runs": (*show.COMMANDS, *grids.COMMANDS, *reports.COMMANDS, *pictures.COMMANDS),
    "steps of the workflow": steps.COMMANDS,
}
COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}


def main(arguments: list[str] | None = None) -> int:
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    set_up_logging()
    # Operators may be in files of the working directory, where `python -m` looks and an installed script does not.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    if options.parent:
        end_with(options.parent)
    try:
        limit_threads(getattr(options, "threads", None))
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `linvit grid | head` has seen enough; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _failed("interrupted; the same command begins again, a training at its last checkpoint", 130)
    except UserError as error:
        return _failed(str(error), 2)
    except RunEnded as error:
        return _failed("; ".join(filter(None, (str(error), error.advice))), 1)
    except OSError as error:
        return _failed(_of_the_system(error), 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _failed(
            "out of memory; lower the recipe's micro_batch_size, or set its grad_checkpointing: true, and run again", 1
        )
    return 0


def parser() -> Parser:
    """All subcommands and their arguments."""
    top = Parser(
        prog="linvit",
        usage="linvit [-h] [--version] command ...",
        description=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"linvit {__version__}")
    # For rules: end with the process of this number, which started this one.
    top.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    subparsers = top.add_subparsers(
        prog="linvit", required=True, metavar="command", dest="command", help=argparse.SUPPRESS
    )
    for command in COMMANDS.values():
        command.add_to(subparsers)
    return top


def _parsed(arguments: list[str]) -> argparse.Namespace:
    top = parser()
    first = next(iter(arguments), "-")
    if not first.startswith("-") and first not in COMMANDS:
        top.error(f"no command {first!r}{meant(first, COMMANDS)}")
    options, unknown = top.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"no argument {unknown[0]!r}{meant(unknown[0], options.parser.option_names)}")
    return options


def _overview() -> str:
    parts = ["Initialise linear vision transformers from Softmax ones."]
    parts += ["\n".join([f"{title}:", *map(_line, commands)]) for title, commands in GROUPS.items()]
    return "\n".join(parts)


def _line(command: Command) -> str:
    return f"    {command.name:9} {command.summary}"


def _failed(reason: str, code: int) -> int:
    print(f"linvit: error: {printable(reason)}", file=sys.stderr)
    return code


def _of_the_system(error: OSError) -> str:
    """What the operating system refused, where, and what can be done about it."""
    advice = {
        errno.ENOSPC: "free some space there, and run the same command again",
        errno.EDQUOT: "free some of your quota, and run the same command again",
        errno.EACCES: "check the path, or ask its owner for access",
        errno.EROFS: "choose a place that can be written to",
    }
    where = f"{error.filename}: " if error.filename else ""
    told = str(error) if isinstance(error, WriteError) else f"{where}{error.strerror or error}"
    return f"{told}; {advice.get(error.errno or 0, 'check the path, and run again')}"


def _is_out_of_memory(error: Exception) -> bool:
    """Told by name and text: torch, whose errors these are, is not imported for all commands."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
