"""The classes that variants name, and what they tell them: checked without importing anything, which runs do."""

import ast
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from linvit.config.constructors import Arguments, Trees, arguments_of
from linvit.config.errors import ConfigError, reason_of
from linvit.config.mistakes import meant, names
from linvit.config.parts import Variant

DYNAMIC = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}
"""Names in a file that may define others without their being in its text."""


def check_targets(variants: Mapping[str, Variant], origin: str = "config.yaml", folder: str | Path = ".") -> None:
    """Refuse a variant whose module is not there, whose class is not in its module's text, or does not take its kwargs.

    Modules are looked for in the folder, in the working directory, and where this process finds its own; none is
    imported, as those of operators import torch. What is no plain source file is left to the runs.

    Raises:
        ConfigError: one line with the key, what is not there, and where it was looked for or what is.
    """
    # As absolute paths: importlib remembers what it finds in each.
    path = [str(Path(folder).resolve()), str(Path.cwd()), *sys.path]
    trees = cache(partial(_tree_of, path=path))
    # Many variants may be of one class.
    for target, name in {variant.target: name for name, variant in variants.items()}.items():
        if reason := _missing(target, path, trees):
            raise ConfigError(f"{origin}: variants.{name}.target: {reason}")
    for name, variant in variants.items():
        arguments = arguments_of(variant.target, trees)
        if arguments and (reason := _not_taken(variant, arguments)):
            raise ConfigError(f"{origin}: variants.{name}.kwargs.{reason}")


def resolve_class(target: str) -> type:
    """The class that `package.module:Class` names."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"target {target!r} cannot be imported: {reason_of(error)}") from None


def _missing(target: str, path: Sequence[str], trees: Trees) -> str | None:
    """Why a target cannot be imported, where that can be told."""
    module, _, name = target.partition(":")
    spec = _spec_of(module, path)
    if spec is None:
        close = _meant_module(module, path)
        return f"no module {module!r}; allowed: one that is installed, or a file beside config.yaml{close}"
    try:
        tree = trees(module)
    except (SyntaxError, ValueError, OSError) as error:
        return f"{spec.origin} cannot be read as Python: {reason_of(error)}"
    if tree is None:
        return None
    words = set(_words(tree))
    if name in words or DYNAMIC & words:
        return None
    defined = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)]
    classes = [found.name for found in defined if not (found.name.startswith("_") or _is_abstract(found))]
    return f"no {name!r} in {spec.origin}; allowed: {names(classes)}{meant(name, classes)}"


def _not_taken(variant: Variant, arguments: Arguments) -> str | None:
    """Which of a variant's arguments its class does not take, or lacks."""
    allowed = sorted(arguments.allowed)
    for key in variant.kwargs.keys() - arguments.allowed:
        return f"{key}: unknown key; allowed: {names(allowed)}{meant(key, allowed)}"
    for key in arguments.required - variant.kwargs.keys():
        return f"{key}: missing; it has no default"
    return None


def _tree_of(module: str, path: Sequence[str]) -> ast.Module | None:
    """The text of a module; None where it is no source file, or is not there.

    Raises:
        SyntaxError, ValueError, OSError: a source file that cannot be read.
    """
    spec = _spec_of(module, path)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    return ast.parse(Path(spec.loader.path).read_bytes(), Path(spec.loader.path).name)


def _spec_of(module: str, path: Iterable[str]) -> ModuleSpec | None:
    """Like `importlib.util.find_spec`, which would import a module's packages."""
    spec, name = None, ""
    for part in module.split("."):
        if path is None:  # what should hold it is no package
            return None
        name = f"{name}.{part}".lstrip(".")
        finders: list[Any] = [PathFinder, *(finder for finder in sys.meta_path if hasattr(finder, "find_spec"))]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path))), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _meant_module(module: str, path: Sequence[str]) -> str:
    """The module that a misspelt one is close to, told by its first part that is not there."""
    parts = module.split(".")
    missing = next(n for n in range(len(parts)) if _spec_of(".".join(parts[: n + 1]), path) is None)
    parent = ".".join(parts[:missing])
    package = _spec_of(parent, path) if parent else None
    places = (package.submodule_search_locations or ()) if package else path
    siblings = [".".join([*parts[:missing], found.name]) for found in pkgutil.iter_modules(places)]
    return meant(".".join(parts[: missing + 1]), siblings)


def _is_abstract(found: ast.ClassDef) -> bool:
    """Whether a class leaves a method to others, by the text of its methods."""
    methods = [statement for statement in found.body if isinstance(statement, ast.FunctionDef)]
    return any(
        isinstance(statement, ast.Raise) and "NotImplementedError" in ast.dump(statement)
        for method in methods
        for statement in method.body
    )


def _words(tree: ast.AST) -> Iterable[str]:
    """The names that occur in a module's text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
