"""Every field of every part of config.yaml, broken in each way that its type can be; its valid neighbours are accepted.

The variants are made from the models, so that a new field is broken, too, without a test of its own.
"""

import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from test_config import CONFIG, RAW, dotted, refusal, with_value, without_guess

from linvit.cli import main
from linvit.config import ConfigError, Study, load_study, study_from
from linvit.grid import expand, sources_of

SMALL = RAW | {"grids": {name: RAW["grids"][name][:1] for name in ("demo", "paper")}}
"""Enough to have every part in it."""
Path = tuple[str | int, ...]


class Field(typing.NamedTuple):
    """A key of a part: where it stands in the configuration, whether it must, and what its values may be."""

    path: Path
    model: type[BaseModel]
    kind: Any
    bounds: tuple
    required: bool


def fields(kind: Any = Study, value: Any = SMALL, path: Path = ()) -> Iterator[Field]:
    """Every key of every part of a configuration, those that it leaves out included."""
    (kind, *_), _ = members(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            key = field.alias or name
            if key != "name":
                yield Field((*path, key), kind, field.annotation, tuple(field.metadata), field.is_required())
                if value and key in value:
                    yield from fields(field.annotation, value[key], (*path, key))
    elif get_origin(kind) is dict and isinstance(value, dict):
        for key, entry in value.items():
            yield from fields(get_args(kind)[1], entry, (*path, key))
    elif get_origin(kind) is tuple:
        for index, entry in enumerate(value):
            yield from fields(get_args(kind)[0], entry, (*path, index))


def members(kind: Any) -> tuple[list[Any], tuple]:
    """The types that a value may have, None left out, and the bounds of the first."""
    if get_origin(kind) is Annotated:
        return members(get_args(kind)[0])[0], get_args(kind)[1:]
    if get_origin(kind) in (Union, types.UnionType):
        parts = [members(part) for part in get_args(kind) if part is not types.NoneType]
        return [kind for kinds, _ in parts for kind in kinds], parts[0][1]
    return [kind], ()


def limits(bounds: tuple) -> list:
    """Those that a field's metadata and its type's hold, pydantic's groups taken apart."""
    return [limit for bound in bounds for limit in (getattr(bound, "metadata", None) or [bound])]


WRONG = {
    int: ("a whole number", ["3", "3e2", "x", 3.5, True, [3], {"a": 1}, math.nan]),
    float: ("a number", ["2e-3", "0.1", "x", True, [0.1], {"a": 1}]),
    bool: ("true or false", ["no", "on", "true", 0, 1, 1.5, [True], {"a": 1}]),
    str: ("text", [False, True, 3, 1.5, ["a"], {"a": 1}]),
    Literal: ("' or '", ["nosuch", "", False, 3, ["a"], {"a": 1}]),
    tuple: ("a list", ["a", 3, False, {"a": 1}]),
    dict: ("keys with values", ["a", 3, False, ["a"]]),
    BaseModel: ("keys with values", ["a", 3, False, ["a"]]),
}
"""By what a value may be: how a message says so, and what it may not be."""


def sort_of(kind: Any) -> type:
    origin = get_origin(kind) or kind
    return BaseModel if isinstance(origin, type) and issubclass(origin, BaseModel) else origin


def wrong_values(field: Field) -> Iterator[tuple[Any, str]]:
    """Values that a field cannot have, each with what the refusal must say is allowed."""
    kinds, bounds = members(field.kind)
    sorts = [sort_of(kind) for kind in kinds]
    for sort in sorts:
        said, values = WRONG[sort]
        yield from ((value, said) for value in values if type(value) not in sorts)
    if str in sorts:
        yield from ((text, "printable characters") for text in ("a\0b", "a\u2028b", "\u202e"))
    if sorts[0] is float:
        yield from ((value, "a finite number") for value in (math.nan, math.inf, -math.inf))
    for limit in limits((*field.bounds, *bounds)) if sorts[0] in (int, float) else ():
        yield from out_of(limit)
    if types.NoneType not in get_args(field.kind) and sorts[0] is not BaseModel:
        yield None, WRONG[sorts[0]][0]
    if sorts[0] is tuple:
        yield from wrong_lists(field, kinds[0])


def wrong_lists(field: Field, kind: Any) -> Iterator[tuple[Any, str]]:
    element, *others = (part for part in get_args(kind) if part is not Ellipsis)
    (inner,), bounds = members(element)
    if inner in (int, float) or get_origin(inner) is Literal:
        said, values = WRONG[sort_of(inner)]
        yield from (([value] * (1 + len(others)), said) for value in values)
        for bound in limits(bounds):
            yield from (([value] * (1 + len(others)), said) for value, said in out_of(bound))
    if others:
        yield [0.5] * 3, "up to 2 entries"
    if any(isinstance(limit, MinLen) for limit in limits(field.bounds)):
        yield [], "at least 1"


def out_of(bound: Any) -> Iterator[tuple[float, str]]:
    """Numbers that a bound excludes."""
    if isinstance(bound, Gt):
        yield bound.gt, f"above {bound.gt}"
        yield bound.gt - 1, f"above {bound.gt}"
    elif isinstance(bound, Ge):
        yield bound.ge - 1, f"{bound.ge} or above"
    elif isinstance(bound, Lt):
        yield bound.lt, f"below {bound.lt}"
    elif isinstance(bound, Le):
        yield bound.le + 1, f"up to {bound.le}"
        yield 10**40, f"up to {bound.le}"


def one_of_each() -> dict[str, Field]:
    """A field for each key of each model; the first place of config.yaml that has it."""
    found: dict[str, Field] = {}
    for field in fields():
        found.setdefault(f"{field.model.__name__}.{field.path[-1]}", field)
    return found


FIELDS = one_of_each()


def changed(config: Any, path: Path, change: typing.Callable[[Any], None]) -> Any:
    """The configuration with what stands at the path changed; only what is on the way there is copied."""
    copied = dict(config or {}) if isinstance(config, dict | None) else list(config)
    if path:
        copied[path[0]] = changed(copied[path[0]], path[1:], change)
    else:
        change(copied)
    return copied


RAW_WORDING = re.compile(
    r"Input should|valid (array|dictionary|string|integer|number|boolean)|String should|items? after|pydantic"
)


def told(config: dict) -> str | None:
    """The refusal of a configuration or of one of its grids, if there is one."""
    try:
        study = study_from(config)
        sources_of(study)
        for grid in study.grids:
            expand(study, grid)
    except ConfigError as error:
        return str(error)
    return None


def check(text: str, path: Path, said: str) -> None:
    """A refusal names the key, or one inside its value, and what is allowed, in words that are not pydantic's."""
    assert text.startswith((f"{dotted(path)}: ", f"{dotted(path)}.")), text
    assert said in text.partition("allowed: ")[2], text
    assert not RAW_WORDING.search(text), text
    assert len(text) < 1000


def test_every_part_has_its_fields_here():
    assert len(FIELDS) > 70
    assert {name.partition(".")[0] for name in FIELDS} == {
        "Study",
        "Size",
        "VariantEntry",
        "Init",
        "Distill",
        "Recipe",
        "Align",
        "DatasetEntry",
        "SourceEntry",
        "TrainEntry",
        "Block",
    }
    assert sum(1 for field in FIELDS.values() for _ in wrong_values(field)) > 500


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_wrong_value_is_refused_with_what_is_allowed(field):
    for value, said in wrong_values(field):
        check(refusal(with_value(field.path, value, SMALL)), field.path, said)


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_misspelt_key_is_refused_with_the_one_that_is_meant(field):
    key = str(field.path[-1])
    known = {info.alias or name for name, info in field.model.model_fields.items()}
    for typo in {key + "s", key[:-1] + "x", key.upper(), "é" + key, " " + key, key + "-"} - known:
        broken = {typo: (at(SMALL, field.path[:-1]) or {}).get(key)}
        text = refusal(changed(SMALL, field.path[:-1], lambda parent, broken=broken: parent.update(broken)))
        place, _, told = text.partition(": unknown key; allowed: ")
        assert place == dotted((*field.path[:-1], typo))
        allowed = re.sub(r" \(and .*", "", without_guess(told)).split(", ")
        assert key in allowed
        if len(key) > 4 and typo != key.upper():
            assert "; did you mean " in text


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.required])
def test_a_missing_key_is_named(name):
    path = FIELDS[name].path
    text = refusal(changed(SMALL, path[:-1], lambda parent: parent.pop(path[-1])))
    assert text.startswith(f"{dotted(path)}: missing; it has no default")


def at(config: Any, path: Path) -> Any:
    for step in path:
        config = config[step]
    return config


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_valid_neighbours_are_accepted(field):
    """At a bound, or left empty where that is allowed; another rule of the part may speak of other keys."""
    for value in neighbours(field):
        text = told(with_value(field.path, value, SMALL)) or ""
        assert not text.startswith(f"config.yaml: {dotted(field.path)}: found"), text


def neighbours(field: Field) -> Iterator[Any]:
    (kind, *_), bounds = members(field.kind)
    if types.NoneType in get_args(field.kind):
        yield None
    for limit in limits((*field.bounds, *bounds)) if kind in (int, float) else ():
        if isinstance(limit, Ge | Le):
            yield getattr(limit, "ge", None) if isinstance(limit, Ge) else limit.le
        elif isinstance(limit, Gt | Lt):
            yield 1 if kind is int else limit.gt + 1e-9 if isinstance(limit, Gt) else limit.lt - 1e-9


NAMES = [
    "../../x",
    "..",
    ".",
    "a/b",
    "/etc",
    "a\\b",
    "a\0",
    "a.",
    "a..",
    ".a",
    "-a",
    "~",
    "a b",
    "é",
    "a\u200b",
    "x" * 65,
    "x" * 9999,
]


@pytest.mark.parametrize("table", ["sizes", "variants", "inits", "recipes", "datasets", "sources", "grids"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_that_is_no_plain_folder_name_is_refused(table, name):
    text = refusal(changed(SMALL, (table,), lambda entries: entries.update({name: next(iter(entries.values()))})))
    assert text.startswith(f"{table}."), text
    assert "allowed: up to 64 of the letters a to z" in text or "allowed: printable characters" in text
    assert len(text) < 1000


# --- as a user meets it -----------------------------------------------------------------------------------

TRAPS = {
    "lr: 4.0e-3": [("lr: 2e-3", "recipes.xu2024-imagenet.lr: found '2e-3'; allowed: a number; write 2.0e-3 or 0.002")],
    "epochs: 45": [
        ("epochs: 3e2", "recipes.fashion-mini.epochs: found '3e2'; allowed: a whole number; write 300"),
        ("epochs: 1e99", "recipes.fashion-mini.epochs: found '1e99'; allowed: a whole number\n"),
        ("epochs: 1.5e0", "recipes.fashion-mini.epochs: found '1.5e0'; allowed: a whole number\n"),
        ("epochs: '" + 4300 * "9" + "'", "recipes.fashion-mini.epochs: found '99"),
        ("epochs: " + 4000 * "9", "recipes.fashion-mini.epochs: found 99"),
        ("epochs: 45, lr: 1e999", "recipes.fashion-mini.lr: found '1e999'; allowed: a number; write 1.0e+999\n"),
        ("epochs: 45, lr: 1.0e+999", "recipes.fashion-mini.lr: found inf; allowed: a finite number\n"),
        ("epochs: yes", "recipes.fashion-mini.epochs: found true; allowed: a whole number"),
        ("epochs: 0o10", "recipes.fashion-mini.epochs: found '0o10'; allowed: a whole number"),
        ("epochs: .nan", "recipes.fashion-mini.epochs: found nan; allowed: a whole number"),
        ("epochs: 2020-01-01", "recipes.fashion-mini.epochs: 2020-01-01 is read as a date; allowed: "),
        ("epochs: 2020-01-01 10:00:00", "2020-01-01 10:00:00 is read as a datetime; allowed: "),
        ("epochs: !!binary aGk=", "is read as a bytes; allowed: "),
        ("epochs: !!set {a}", "is read as a set; allowed: "),
        ("epochs:45", "recipes.fashion-mini.epochs:45: unknown key; allowed: epochs, warmup_epochs, "),
        ("epochs: 45, epochs: 45", "{line}: duplicate key 'epochs'; allowed: each key once"),
        ("epochs: !!int ''", "{line}: '' is no int; allowed: values without tags"),
        ("epochs: !!bool x", "{line}: 'x' is no bool; allowed: values without tags"),
        ("epochs: !!timestamp x", "{line}: 'x' is no timestamp; allowed: values without tags"),
        ("epochs: 045", "{line}: '045' is a number of base 8 to YAML"),
        ("epochs: 1:30", "{line}: '1:30' is a number of base 60 to YAML"),
        ("epochs: *nosuch", "{line}: not valid YAML: found undefined alias 'nosuch'"),
        ("epochs: !!python/object/apply:os.getcwd []", "{line}: not valid YAML: could not determine a constructor"),
        ("<<: 3, epochs: 45", "{line}: not valid YAML: while constructing a mapping, expected a mapping or list"),
        ("epochs: \t'45", "{line}: not valid YAML: while scanning for the next token, found character"),
    ],
    "variants: [relu, ttt]": [
        ("variants: relu", "grids.demo.0.variants: found 'relu'; allowed: a list; write [relu]"),
        ("variants: [relu, no]", "grids.demo.0.variants.1: found false; allowed: text; quote it"),
        ("variants: [relu, ~]", "grids.demo.0.variants.1: found nothing; allowed: text"),
        ("variants: [rleu, ttt]", "grids.demo.0.variants: 'rleu' is not defined; allowed: softmax, elu, relu, "),
        ("variants: [relu, relu]", "grids.demo.0.variants: named twice: relu"),
    ],
    "  elu: {": [
        ("  no: {", "variants: key false is read as bool; allowed: text; quote it"),
        ("  1: {", "variants: key 1 is read as int; allowed: text; quote it"),
        ("  ~: {", "variants: key nothing is read as NoneType; allowed: text; quote it"),
        ("  'a/b': {", "variants.a/b: found 'a/b'; allowed: up to 64 of"),
        ("  ../../x: {", "variants.../../x: found '../../x'; allowed: up to 64 of"),
        ("  [elu]: {", "{line}: not valid YAML: while constructing a mapping, found unhashable key"),
        ("\telu: {", "{line}: not valid YAML: "),
    ],
    "kernel:EluAttention": [
        ("kernel:EluAtention", "variants.elu.target: no 'EluAtention' in "),
        ("kernels:EluAttention", "variants.elu.target: no module 'linvit.attention.kernels'; allowed: "),
        ("kernel.sub:EluAttention", "variants.elu.target: no module 'linvit.attention.kernel.sub'; allowed: "),
        ("kernel.EluAttention", "variants.elu.target: found 'linvit.attention.kernel.EluAttention'; allowed: package"),
    ],
    "analytic_inits: false": [
        (
            "analytic_inits: false, kwargs: {lr: 1e-6}",
            "variants.ttt.kwargs: lr is the text '1e-6'; allowed: the number",
        ),
        ("analytic_inits: false, kwargs: {lr: 1.0e-6}", "variants.ttt.kwargs.lr: unknown key; allowed: none\n"),
        ("analytic_inits: false, kwargs: {a: [{b: -2E5}]}", "variants.ttt.kwargs: a.0.b is the text '-2E5'; allowed:"),
    ],
    "results: results": [
        ("results:", "results: found nothing; allowed: text"),
        ("results: ''", "results: found ''; allowed: the path of a folder"),
        ("results: ~/results", "results: found '~/results'; allowed: the path of a folder, "),
        ("results: 'r/{run}'", "results: found 'r/{run}'; allowed: the path of a folder, without { and }"),
        ('results: "a\\0b"', r"results: holds the character '\x00'; allowed: printable"),
        ("results: results\n--- {}", "{line+1}: not valid YAML: expected a single document"),
    ],
    "grid: demo": [
        ("grid: dmeo", "grid: 'dmeo' is not defined; allowed: demo, mini, losses, quick, paper; did you mean 'demo'?"),
        ("grid: on", "grid: found true; allowed: text; quote it"),
        ("grid: [demo]", "grid: found a list; allowed: text"),
        ("grid", "{line+1}: not valid YAML: "),
        ("Grid: demo", "Grid: unknown key; allowed: grid, results, "),
        ("gr\u0456d: demo", "gr\u0456d: unknown key; allowed: grid, results, "),
        ("grid\u200b: demo", r"'grid\u200b': holds the character '\u200b'; allowed: printable characters"),
    ],
}
"""Lines of config.yaml with what they are broken to, and the start of what is told of it."""
FLAT = [(text, broken, told) for text, cases in TRAPS.items() for broken, told in cases]


@pytest.mark.parametrize(("text", "broken", "told"), FLAT, ids=[ascii(broken) for _, broken, _ in FLAT])
def test_the_command_line_refuses_a_broken_file_in_one_line(tmp_path, capsys, text, broken, told):
    original, path = CONFIG.read_text(encoding="utf-8"), tmp_path / "broken.yaml"
    assert text in original
    path.write_text(original.replace(text, broken, 1), encoding="utf-8")
    line = original[: original.index(text)].count("\n") + 1
    assert main(["grid", "--config", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert "linvit: error: " in err
    err = re.sub(r" \(and \d+ more mistakes?\)$", "", err, flags=re.MULTILINE)  # of recipes that take it over (<<)
    place = f"{path}:" if told.startswith("{line") else f"{path}: "
    assert place + told.replace("{line}", str(line)).replace("{line+1}", str(line + 1)) in err or (
        "read as" in told and f"{path}: " in err and told in err
    )
    assert not RAW_WORDING.search(err), err


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("lr: 4.0e-3", "lr: 0.004"),
        ("lr: 4.0e-3", "lr: 4e-3".replace("4e", "4.e")),
        ("epochs: 45", "epochs: 4_5"),
        ("epochs: 45", "epochs: 0x2d"),
        ("epochs: 45", "epochs: +45"),
        ("grid: demo", "'grid': \"demo\""),
        ("grid: demo", "\ufeffgrid: demo"),
        ("grid: demo", "%YAML 1.1\n---\ngrid: demo"),
        ("results: results", "results: /a folder/with ümläuts"),
        ("results: results", "results: ../elsewhere"),
        ("variants: [relu, ttt]", "variants:\n      - relu\n      - ttt"),
        ("kernel:EluAttention", "kernel:ReluAttention"),
        ('mhla:MhlaAttention"', 'mhla:MhlaAttention", kwargs: {norms: false, mixing: exp, window: 0x2}'),
        # Its module's text does not tell what it takes.
        ('linvit.attention.mhla:MhlaAttention"', 'torch.nn:Linear", kwargs: {a: 1.0e-6, b: t, c: [1, {d: ~}]}'),
    ],
)
def test_the_command_line_accepts_what_is_sound(tmp_path, capsys, text, sound):
    original, path = CONFIG.read_text(encoding="utf-8"), tmp_path / "sound.yaml"
    assert text in original
    changed = original[original.index(text) :] if sound[0] in "\ufeff%" else original
    path.write_text(changed.replace(text, sound, 1), encoding="utf-8")
    assert main(["grid", "--config", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11


# --- whatever else is written -----------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
    max_leaves=6,
)


def places(value: Any = SMALL, path: Path = ()) -> Iterator[Path]:
    """Of everything in a configuration."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(entry, (*path, key))


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(list(places())), value=VALUES)
def test_any_value_anywhere_is_accepted_whole_or_refused_in_one_line(path, value):
    text = told(with_value(path, value, SMALL))
    assert text is None or len(text.splitlines()) == 1
    assert text is None or (not RAW_WORDING.search(text) and len(text) < 2000), text


SCALAR_TAGS = ("int", "float", "bool", "null", "timestamp", "str", "binary")
TAGS = st.sampled_from([*SCALAR_TAGS, "set", "omap", "pairs", "map", "seq", "merge", "value", "nosuch"])
TAGGED = st.text("0123456789abx.:_-+TZ~ ", max_size=12).map("'{}'".format) | st.sampled_from(
    ["[]", "[a]", "{}", "{a: 1}", "[{a: 1}]", "[a, a]", "{a, b}", "*x", ""]
)


@settings(max_examples=300, deadline=None)
@given(tag=TAGS, value=TAGGED, where=st.sampled_from(["value", "key", "part of a list"]))
def test_any_tag_on_any_value_is_refused_in_one_line(tmp_path_factory, tag, value, where):
    path = tmp_path_factory.getbasetemp() / "tagged.yaml"
    text = f"!!{tag} {value}"
    path.write_text({"value": f"grid: {text}", "key": f"? {text}\n: 1", "part of a list": f"grid: [{text}]"}[where])
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}:")
    assert len(str(caught.value).splitlines()) == 1


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60) | st.text("ab:&*<-?![]{}'\"|>%#,~1.e \n\t", max_size=60).map(str.encode))
def test_any_file_is_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}:")
    assert len(str(caught.value).splitlines()) == 1
