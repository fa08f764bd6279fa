"""The command line for tests: how a refusal looks, and what a child process needs."""

import os
from pathlib import Path

import linvit
from linvit.cli import main


def environment() -> dict[str, str]:
    """A child's environment, in which it finds the package that is tested here."""
    return os.environ | {"PYTHONPATH": str(Path(linvit.__file__).parents[1])}


def refusal(capsys, *arguments: str | Path) -> str:
    """The one line on stderr with which a command ends with exit code 2; nothing is on stdout."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("linvit: error: ")
    return err.strip()
