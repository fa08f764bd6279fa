"""The page of every key of `config.yaml`, from the models that check it: `python docs/_ext/config_keys.py` writes it.

A test holds the page that is committed, for those who read it beside the code, against the models.
"""

import ast
import inspect
import json
import math
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from linvit.config import Part, Study
from linvit.config.mistakes import number_of
from linvit.config.parts import LARGEST

PAGE = Path(__file__).parents[1] / "config.md"
INTRODUCTION = """# Every key of config.yaml

`config.yaml` is a catalogue (sizes, variants, inits, datasets, recipes, sources) and the grids that pick from it. An
entry of the catalogue is a name with these keys. A key without a default must be there; any other key is refused, and
so are values of another type. `linvit grid` checks a file without running anything.

Snakemake's `--config` replaces keys of the top level: `--config grid=mini download=true`.

<!-- Written by docs/_ext/config_keys.py from the models in linvit/config; a test tells where they differ. -->
"""
PLAIN: dict[Any, str] = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Any: "anything"}


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(title, model) for title, model in sections().items())])


def sections(title: str = "", model: type[Part] = Study) -> dict[str, type[Part]]:
    """The models of all tables, by the keys that lead to them: a model, then those within it."""
    found = {title or "Top level": model}
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            found |= sections(f"{title}: {field.alias or name}".removeprefix(": "), inner)
    return found


def _models_in(kind: Any) -> list[type[Part]]:
    if isinstance(kind, type) and issubclass(kind, Part):
        return [kind]
    return [model for inner in get_args(kind) for model in _models_in(inner)]


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The texts under a model's fields, and those of the models that it is of, by the fields' names."""
    texts: dict[str, str] = {}
    for kind in _kinds(model):
        body = ast.parse(inspect.getsource(kind)).body[0].body
        for field, text in pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    texts[name] = " ".join(words.split())
    return texts


def _kinds(model: type[BaseModel]) -> list[type[Part]]:
    """The model and those that it extends, these first."""
    return [kind for kind in reversed(model.__mro__) if issubclass(kind, Part) and kind is not Part]


def _section(title: str, model: type[Part]) -> str:
    told = descriptions(model)
    fields = {name: field for name, field in model.model_fields.items() if name != "name"}  # an entry's key
    rows = [
        f"| `{f.alias or name}` | {_allowed(f)} | {_default(f)} | {told.get(name, '')} |" for name, f in fields.items()
    ]
    text = " ".join(" ".join((kind.__doc__ or "").split()) for kind in _kinds(model))
    head = ["| key | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", text, "", *head, *rows, ""])


def _allowed(field: FieldInfo) -> str:
    return _words(field.annotation, tuple(field.metadata))


def _words(kind: Any, bounds: tuple = ()) -> str:
    """A type as a person would say it, with its limits."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        (inner, *more) = arguments
        inside = [one for bound in more for one in (bound.metadata if isinstance(bound, FieldInfo) else [bound])]
        return _words(inner, (*bounds, *inside))
    if validator := next((bound for bound in bounds if isinstance(bound, AfterValidator)), None):
        return _told_by(validator)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(member, bounds) for member in arguments if member is not NoneType)
    if origin is tuple:
        several = "list, each" if arguments[-1] is Ellipsis else f"list of {len(arguments)}, each"
        return f"{several} {_words(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of names to {_words(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, Part):
        title = next(title for title, model in sections().items() if model is kind)
        return f"[{title}](#{title.replace(': ', '-').replace(' ', '-').lower()})"
    return " ".join([PLAIN[kind], *_limits(bounds)])


def _told_by(validator: AfterValidator) -> str:
    """What a validator of text or numbers names as allowed where it refuses."""
    for nothing in ("", math.nan):
        try:
            validator.func(nothing)  # type: ignore[call-arg]
        except TypeError:
            continue
        except ValueError as error:
            return str(error).partition("allowed: ")[2]
    raise AssertionError("a name or a path may be empty, or a number none")


def _limits(bounds: tuple) -> list[str]:
    words = []
    for bound in bounds:
        match bound:
            case Gt(gt=low):
                words.append(f"above {low}")
            case Ge(ge=low):
                words.append(f"from {low}")
            case Lt(lt=high) if high < LARGEST:
                words.append(f"below {high}")
            case Le(le=high) if high < LARGEST:
                words.append(f"up to {high}")
    return words


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return "none" if field.default is None else f"`{_yaml(field.default)}`"


def _yaml(value: Any) -> str:
    """As it would be written: numbers with exponents need a dot, or YAML takes them for text."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, float):
        short = f"{value:.4g}"
        return (number_of(short) or short).partition(" or ")[0] if "e" in short else short
    return json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(page())
