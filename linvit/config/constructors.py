"""The arguments that an operator's constructor takes, told from the text of its class and of those it is made from."""

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

GIVEN = {"grid_size", "num_prefix_tokens", "qkv_bias"}
"""What a block's attention tells every operator, behind its width and number of heads (`linvit.attention.replace`)."""

DEEPEST = 16
"""Of the imports that a name is followed through, and of the bases of a class: a broken text may go in circles."""

Trees = Callable[[str], ast.Module | None]
"""A module's text, parsed, by its name; None where it has none. May raise SyntaxError, ValueError and OSError."""


class Arguments(NamedTuple):
    """Those of a constructor that a variant's `kwargs` may give, and those that they must."""

    allowed: set[str]
    required: set[str]


def arguments_of(target: str, trees: Trees) -> Arguments | None:
    """What the class that `package.module:Class` names takes; None where its text cannot tell.

    That is any class which is decorated, defined more than once or other than at the top of its module, or that hands
    arguments on to one of these.
    """
    module, _, name = target.partition(":")
    return _taken_by(module, name, trees, DEEPEST)


def _taken_by(module: str, name: str, trees: Trees, depth: int) -> Arguments | None:
    found = _definition(module, name, trees) if depth else None
    if found is None:
        return None
    module, kind = found
    constructors = [node for node in ast.walk(kind) if _binds(node, "__init__")]
    if kind.decorator_list or kind.keywords or len(constructors) > 1:
        return None
    if not constructors:
        return _inherited(module, kind, trees, depth)
    (constructor,) = constructors
    if not isinstance(constructor, ast.FunctionDef) or constructor.decorator_list or constructor not in kind.body:
        return None
    own = _arguments(constructor.args)
    if constructor.args.kwarg is None:
        return own
    handed_on = _inherited(module, kind, trees, depth)
    return handed_on and Arguments(own.allowed | handed_on.allowed, own.required)


def _definition(module: str, name: str, trees: Trees) -> tuple[str, ast.ClassDef] | None:
    """A class and the module whose text has it, followed through the imports of its name."""
    for _ in range(DEEPEST):
        try:
            tree = trees(module)
        except (SyntaxError, ValueError, OSError):
            return None
        bindings = [node for node in ast.walk(tree) if _binds(node, name)] if tree else []
        if tree is None or len(bindings) != 1 or bindings[0] not in tree.body:
            return None
        (node,) = bindings
        if isinstance(node, ast.ClassDef):
            return module, node
        if not isinstance(node, ast.ImportFrom) or node.level:
            return None
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        module = node.module or ""
    return None


def _inherited(module: str, kind: ast.ClassDef, trees: Trees, depth: int) -> Arguments | None:
    """Of the constructors that a class has from others: as much as all of them take, where each can be told."""
    allowed, required = set[str](), set[str]()
    for base in kind.bases:
        found = _taken_by(module, base.id, trees, depth - 1) if isinstance(base, ast.Name) else None
        if found is None:
            return None
        allowed |= found.allowed
        required |= found.required
    return Arguments(allowed, required if len(kind.bases) == 1 else set())


def _arguments(arguments: ast.arguments) -> Arguments:
    """Those of a function behind itself, the width and the number of heads."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    named = by_place[3:] + arguments.kwonlyargs
    without = by_place[3 : len(by_place) - len(arguments.defaults)]
    without += [name for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None]
    return Arguments({name.arg for name in named} - GIVEN, {name.arg for name in without} - GIVEN)


def _binds(node: ast.AST, name: str) -> bool:
    return name in _bound(node)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement or an expression gives a meaning."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
