"""YAML as it is meant: what its reader would take for something else, or silently drop, is refused with its line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from linvit.config.errors import ConfigError, reason_of
from linvit.config.mistakes import dotted, shown

LARGEST_FILE = 2**18
"""Bytes; the repository's own has 15 kB."""
MOST_VALUES = 2**14
"""In all, with what stands behind an alias counted wherever the alias stands; the repository's own has 1,800."""
DEEPEST = 32
"""Levels of lists and mappings."""


def read_yaml(path: str | Path) -> Any:
    """Parse a YAML file; it runs no code, and its size and depth are limited.

    Refused beyond what is no YAML: a key that stands twice in one mapping (plain YAML keeps the last), an alias inside
    of what it stands for, aliases that multiply, and numbers that are not what they look like (`010`, `1:30`).

    Raises:
        ConfigError: one line with the file, where it can be told the line in it, and what is wrong.
    """
    text, loader = _text(path), None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except _Refused as error:
        raise ConfigError(f"{path}:{error.problem_mark.line + 1}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or error.context_mark).line + 1
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path}:{line}: not valid YAML: {' '.join(what.split())}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.reason}: {error.character!r}") from None
    finally:
        if loader:
            loader.dispose()


def refuse_exotic(value: Any, *steps: str | int) -> None:
    """Refuse what YAML reads from a slip of the pen: keys that are no text, dates, bytes, invisible characters."""
    place = dotted(steps) or "config"
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{place}: key {shown(key)} is read as {type(key).__name__}; allowed: text; quote it")
            refuse_exotic(key, *steps, key)
            refuse_exotic(entry, *steps, key)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            refuse_exotic(entry, *steps, index)
    elif isinstance(value, str):
        if not value.isprintable():
            odd = next(character for character in value if not character.isprintable())
            raise ConfigError(f"{place}: holds the character {odd!r}; allowed: printable characters, plain spaces")
    elif not isinstance(value, int | float | None):
        what = f"{shown(str(value))[1:-1]} is read as a {type(value).__name__}"
        raise ConfigError(f"{place}: {what}; allowed: text, numbers, true, false; quote it, if it is meant as text")


def _text(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL in it
        raise ConfigError(f"{str(path)!r}: {reason_of(error)}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"{path}: too large for a configuration; allowed: up to {LARGEST_FILE:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: byte {error.start} is no UTF-8; allowed: text in UTF-8") from None


class _Refused(yaml.MarkedYAMLError):
    """What is YAML, but not what it looks like."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.sizes: dict[Node, int] = {}
        """Values in each node that is whole, itself included."""

    def compose_node(self, parent: Node | None, index: Any) -> Node:
        mark = self.peek_event().start_mark
        self.depth += 1
        if self.depth > DEEPEST:
            raise _Refused(f"nested too deeply; allowed: {DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        # One whose content is still being read has no size yet.
        if node not in self.sizes and isinstance(node, CollectionNode) and node.end_mark is None:
            raise _Refused("an alias inside of what it stands for; allowed: aliases of what is whole before them", mark)
        if node not in self.sizes:
            self.sizes[node] = 1 + sum(self.sizes[child] for child in _children(node))
        if max(self.sizes[node], len(self.sizes)) > MOST_VALUES:
            raise _Refused(f"too many values, with those behind aliases; allowed: up to {MOST_VALUES:,}", mark)
        return node

    def compose_mapping_node(self, anchor: str | None) -> MappingNode:
        """As written: once merge keys (`<<`) are resolved, an overridden key stands twice too."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            if key.value in seen:
                raise _Refused(f"duplicate key {shown(key.value)}; allowed: each key once", key.start_mark)
            seen.add(key.value)
        return node

    def construct_scalar(self, node: Node) -> Any:
        value = super().construct_scalar(node)
        number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and re.search(r"^[-+]?0[\d_]+$|:", value):
            base = 60 if ":" in value else 8
            problem = f"{shown(value)} is a number of base {base} to YAML; allowed: decimal numbers, or quoted text"
            raise _Refused(problem, node.start_mark)
        return value

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError) as error:  # a date that is none, a number of thousands of digits
            raise _Refused(f"{shown(str(node.value))}: {reason_of(error)}", node.start_mark) from None
        except (LookupError, AttributeError) as error:  # by a tag: `!!bool x`, `!!int ""`, `!!timestamp x`
            problem = f"{shown(str(node.value))} is no {node.tag.rpartition(':')[2]}; allowed: values without tags"
            raise _Refused(problem, node.start_mark) from error


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, CollectionNode) else []
