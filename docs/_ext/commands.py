"""The directive `linvit-commands`: every subcommand with its options, as argparse knows them."""

import argparse
import inspect
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from linvit.cli import parser


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("linvit-commands", Commands)
    return {"parallel_read_safe": True}


class Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        section = nodes.section()
        section.document = self.state.document
        text = "\n".join(_told(command) for command in _commands(parser())).splitlines()
        self.state.nested_parse(StringList(text, self.get_source_info()[0]), self.content_offset, section, True)
        return section.children


def _commands(of: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """All that have no subcommands of their own, in argparse's order."""
    below = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return [of]
    return [command for action in below for name in action.choices.values() for command in _commands(name)]


def _told(command: argparse.ArgumentParser) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in (command.description or "").split("\n\n")]
    example = ["```", inspect.cleandoc(command.epilog), "```", ""] if command.epilog else []
    arguments = [action for action in command._actions if action.dest != "help"]
    rows = [f"| `{_call(action)}` | {_meaning(action)} |" for action in arguments]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {command.prog}", "", "\n\n".join(paragraphs), "", *table, "", *example])


def _call(action: argparse.Action) -> str:
    """As it is written: `--out OUT ...`."""
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    repeated = " ..." if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        return f"{value}{repeated}"
    name = max(action.option_strings, key=len)
    return name if action.nargs == 0 else f"{name} {value}{repeated}"


def _meaning(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split()).replace("|", "\\|")
    has_default = action.default not in (None, False, argparse.SUPPRESS) and "default" not in text
    default = f"default: `{action.default}`" if has_default else ""
    needed = "needed" if action.required and action.option_strings else ""
    return "; ".join(part for part in (text, needed, default) if part)
