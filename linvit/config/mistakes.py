"""What pydantic finds wrong, in the words of whoever wrote the file: `key: what was found; allowed: ...`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

LONGEST = 60
"""Characters of a key or a value that a message shows."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?", re.IGNORECASE | re.ASCII)
"""What a person means as a number; of those with an exponent YAML reads only such as `1.0e-3`, with dot and sign."""
BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
ALLOWED = {
    "bool_type": "true or false",
    "date_from_datetime_parsing": "a date, such as 2026-01-31",
    "date_type": "a date, such as 2026-01-31",
    "dict_type": "keys with values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or above",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "up to {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "keys with values",
    "model_type": "keys with values",
    "string_too_long": "up to {max_length} characters",
    "string_type": "text",
    "too_long": "up to {max_length} entries",
    "too_short": "at least {min_length}",
    "tuple_type": "a list",
}
"""What is allowed instead, by pydantic's kinds of errors."""


def first_mistake(error: ValidationError, kind: Any) -> str:
    """The first mistake as `key: what was found; allowed: ...`, and how many more there are.

    Args:
        kind: What the data was held against: a model, or a type made of models.
    """
    by_key: dict[tuple, list[ErrorDetails]] = {}
    # Unknown keys first: the one that was meant is often missing, too.
    for found in sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden"):
        by_key.setdefault(tuple(_steps(kind, found["loc"])), []).append(found)
    meant_otherwise = set(_misspelt(by_key, kind))
    told = [key for key, errors in by_key.items() if not _is_outdone(key, errors, by_key)]
    first, *more = [key for key in told if key not in meant_otherwise]
    rest = f" (and {len(more)} more {'mistakes' if len(more) > 1 else 'mistake'})" if more else ""
    return (f"{dotted(first)}: " if first else "") + _told(by_key[first], kind, first) + rest


def dotted(steps: Iterable[str | int]) -> str:
    """A place as `table.entry.key`, short and on one line whatever its keys hold."""
    return ".".join(
        text if (text := str(step)).isprintable() and 0 < len(text) <= 70 else shown(text) for step in steps
    )


def names(values: Iterable[str]) -> str:
    return ", ".join(values) or "none"


def meant(word: str, allowed: Iterable[str]) -> str:
    """Which of the known names a misspelt one is close to, if any."""
    close = get_close_matches(word[:LONGEST], allowed, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def undefined(key: str, name: str, allowed: Iterable[str]) -> str:
    """What is told of a name that nothing has: where it stands, those that there are, the one that was meant."""
    return f"{key}: {name!r} is not defined; allowed: {names(allowed)}{meant(name, allowed)}"


def shown(value: Any) -> str:
    """A value on one short line: text and numbers as they are, anything else by its kind."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple):
        return ("a" if value else "an empty") + (" mapping" if isinstance(value, Mapping) else " list")
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def number_of(text: str) -> str | None:
    """How YAML wants the number written that a text looks like; None where it looks like none."""
    if len(text) > 24 or not NUMBER.fullmatch(text):
        return None
    plain = f"{Decimal(text):f}"
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:
        return plain
    scientific = f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent):+d}"
    return f"{scientific} or {plain}" if len(plain) <= 12 else scientific


def _is_outdone(key: tuple, errors: list[ErrorDetails], others: Iterable[tuple]) -> bool:
    """Where a value may be of several kinds, what is wrong inside of it tells more than that it is of no other kind."""
    of_a_kind = errors[0]["loc"][-1:] not in (key[-1:], ("[key]",))
    return of_a_kind and any(len(other) > len(key) and other[: len(key)] == key for other in others)


def _misspelt(by_key: Mapping[tuple, list[ErrorDetails]], kind: Any) -> Iterator[tuple]:
    """The places of keys that are missing because another one beside them is misspelt: one mistake, not two."""
    for key, errors in by_key.items():
        if errors[0]["type"] == "extra_forbidden":
            for name in get_close_matches(str(key[-1])[:LONGEST], _known_keys(kind, key), 1):
                if any(error["type"] == "missing" for error in by_key.get((*key[:-1], name), [])[:1]):
                    yield (*key[:-1], name)


def _known_keys(kind: Any, key: tuple) -> list[str]:
    """What a key could have been, beside those of its entry."""
    known = [field.alias or name for name, field in _model_at(kind, key[:-1]).model_fields.items()]
    return [name for name in known if name != "name"]  # an entry's key is its name


def _told(errors: list[ErrorDetails], kind: Any, key: tuple) -> str:
    """What is wrong at one place."""
    first = errors[0]
    if first["type"] == "extra_forbidden":
        keys = _known_keys(kind, key)
        return f"unknown key; allowed: {names(keys)}{meant(str(key[-1]), keys)}"
    if first["type"] == "missing":
        return "missing; it has no default"
    if first["type"] not in ALLOWED:
        return " ".join(re.sub(r"^(Value error|Assertion failed), ", "", first["msg"]).split())
    allowed = dict.fromkeys(ALLOWED[error["type"]].format(**_rounded(error.get("ctx", {}))) for error in errors)
    return f"found {shown(first['input'])}; allowed: {' or '.join(allowed)}{_advice(first)}"


def _rounded(bounds: dict[str, Any]) -> dict[str, Any]:
    """As people write them: 1, not 1.0."""
    return {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in bounds.items()}


def _advice(error: ErrorDetails) -> str:
    """How to write what was probably meant."""
    value, kind = error["input"], error["type"]
    if isinstance(value, str):
        if kind == "float_type" and (number := number_of(value)):
            return f"; write {number}"
        if kind == "int_type" and number_of(value) and abs(count := float(value)) < 1e12 and count.is_integer():
            return f"; write {int(count)}"
        if kind == "bool_type" and value.lower() in BOOLEANS:
            return f"; write {BOOLEANS[value.lower()]}"
        if kind == "literal_error":
            return meant(value, re.findall(r"'(.*?)'", error["ctx"]["expected"]))
    if kind == "tuple_type" and isinstance(value, str | int | float):
        return f"; write [{value if isinstance(value, str) else shown(value)}]"[: LONGEST + 10]
    if kind == "string_type" and isinstance(value, int | float):
        return "; quote it, if it is meant as text (YAML reads no, off, yes and on as false and true)"
    return ""


def _steps(kind: Any, location: tuple) -> Iterator[str | int]:
    """A place without what pydantic adds to it: which member of a union it tried, and that a key is meant."""
    for step in location:
        members = _members(kind)
        if len(members) > 1:
            tag = str(step).removeprefix("constrained-")
            kind = next((member for member in members if tag.startswith(_name(member))), Any)
        elif step != "[key]":
            yield step
            kind = _within(members[0], step)


def _model_at(kind: Any, steps: tuple) -> type[BaseModel]:
    for step in steps:
        kind = _within(_members(kind)[0], step)
    return _members(kind)[0]


def _within(kind: Any, step: str | int) -> Any:
    """The type of what stands at one key or index of a value of this type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        return fields.get(str(step), Any)
    arguments = get_args(kind)
    return Any if not arguments else arguments[1] if get_origin(kind) is dict else arguments[0]


def _members(kind: Any) -> list[Any]:
    """The types of a union but None; else the type itself."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    return [member for part in get_args(kind) if part is not NoneType for member in _members(part)]


def _name(kind: Any) -> str:
    return getattr(get_origin(kind) or kind, "__name__", "")
