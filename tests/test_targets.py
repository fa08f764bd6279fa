"""Targets of variants: a module, a class or an argument that is not there is told without importing anything."""

import inspect
import pkgutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from test_config import CONFIG

from linvit.config import ConfigError, Variant, check_targets, load_study
from linvit.config.constructors import GIVEN, arguments_of
from linvit.config.targets import _tree_of

OPERATORS = """
from pathlib import Path
from collections import OrderedDict as Renamed
Path("imported").touch()
class Mine: pass
def made(): return Mine
if True:
    class Nested: pass
Assigned = made()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "pack" / "deep.py").write_text(OPERATORS)
    (tmp_path / "mine.py").write_text(OPERATORS)
    (tmp_path / "spaces").mkdir()
    (tmp_path / "spaces" / "mine.py").write_text(OPERATORS)
    (tmp_path / "star.py").write_text("from nowhere import *\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): return type\n")
    (tmp_path / "broken.py").write_text("class Mine\n")
    (tmp_path / "binary.so").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(target: str, *folders, kwargs=None) -> None:
    check_targets({"own": Variant(name="own", target=target, kwargs=kwargs or {})}, "config.yaml", *folders)


@pytest.mark.parametrize(
    "target",
    [
        *[f"{module}:{name}" for module in ("mine", "pack.deep") for name in ("Mine", "Nested", "Renamed", "Assigned")],
        "spaces.mine:Mine",
        "star:Whatever",
        "lazy:Whatever",
        "linvit.attention.kernel:ReluAttention",
        "torch.nn:Linear",
        "math:sin",  # a module without a source file is left to the runs
        "sys:path",
    ],
)
def test_what_may_be_there_is_accepted_and_not_imported(folder, target):
    check(target)
    assert not (folder / "imported").exists()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("mine:Mien", "no 'Mien' in {folder}/mine.py; allowed: Mine; did you mean 'Mine'?"),
        ("pack.deep:Other", "no 'Other' in {folder}/pack/deep.py; allowed: Mine"),
        (
            "mien:Mine",
            "no module 'mien'; allowed: one that is installed, or a file beside config.yaml; did you mean 'mine'?",
        ),
        ("pack.dep:Mine", "or a file beside config.yaml; did you mean 'pack.deep'?"),
        (
            "pakc.deep:Mine",
            "no module 'pakc.deep'; allowed: one that is installed, or a file beside config.yaml; did you mean 'pack'?",
        ),
        ("mine.deep:Mine", "no module 'mine.deep'; allowed: "),
        ("linvit.attention.kernel:Relu", "; allowed: EluAttention, ReluAttention"),
        ("broken:Mine", "{folder}/broken.py cannot be read as Python: expected ':' (broken.py, line 1)"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(folder, target, told):
    with pytest.raises(ConfigError) as caught:
        check(target)
    text = str(caught.value)
    assert text.startswith("config.yaml: variants.own.target: ")
    assert told.format(folder=folder) in text
    assert len(text.splitlines()) == 1
    assert not (folder / "imported").exists()


CONSTRUCTORS = """
from pathlib import Path
from mixins import Mixin, Unfindable, plain as renamed
from torch import nn
from linvit.attention import Attention
Path("imported").touch()
class Closed:
    def __init__(self, dim, num_heads, power=2.0, *, grid_size, num_prefix_tokens, qkv_bias=True, gate): pass
class Open(Attention):
    def __init__(self, dim, num_heads, *, power=2.0, **skeleton): super().__init__(dim, num_heads, **skeleton)
class Deeper(Open):
    scale = 1
class Both(Mixin, Open):
    def __init__(self, dim, num_heads, **skeleton): super().__init__(dim, num_heads, **skeleton)
class Renamed(renamed.Attention):
    def __init__(self, dim, num_heads, **skeleton): pass
class Module(nn.Module):
    def __init__(self, dim, num_heads, **skeleton): pass
class Unknown(Unfindable):
    pass
class Broken(Unfindable):
    def __init__(self, dim, num_heads, **skeleton): pass
class Assigned(Attention):
    __init__ = Attention.__init__
class Either(Attention):
    if True:
        def __init__(self, dim, num_heads, *, power): pass
    else:
        def __init__(self, dim, num_heads): pass
@renamed
class Decorated(Attention): pass
class Meta(Attention, metaclass=type): pass
class Twice: pass
class Twice(Open): pass
class Itself(Itself): pass
from mixins import Circle
"""
MIXINS = """
from broken import Unfindable
from constructors import Circle
class Mixin:
    def helper(self): pass
"""


@pytest.fixture
def constructors(folder) -> Path:
    (folder / "constructors.py").write_text(CONSTRUCTORS)
    (folder / "mixins.py").write_text(MIXINS)
    return folder


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *[("Closed", {"gate": 1, **more}) for more in ({}, {"power": "x"})],
        *[(name, kwargs) for name in ("Open", "Deeper", "Both") for kwargs in ({}, {"power": 1})],
        *[
            (name, {"any": 1})
            for name in ("Renamed", "Module", "Unknown", "Broken", "Assigned", "Either", "Decorated", "Meta")
        ],
        *[(name, {"any": 1}) for name in ("Twice", "Itself", "Circle")],
    ],
)
def test_arguments_that_may_be_taken_are_accepted_and_nothing_is_imported(constructors, name, kwargs):
    check(f"constructors:{name}", kwargs=kwargs)
    assert not (constructors / "imported").exists()


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("Closed", {"gate": 1, "pwoer": 1}, "pwoer: unknown key; allowed: gate, power; did you mean 'power'?"),
        ("Closed", {"gate": 1, "grid_size": 1}, "grid_size: unknown key; allowed: gate, power"),
        ("Closed", {"gate": 1, "dim": 1}, "dim: unknown key; allowed: gate, power"),
        ("Closed", {"power": 1}, "gate: missing; it has no default"),
        *[
            (name, {"pwoer": 1}, "pwoer: unknown key; allowed: power; did you mean 'power'?")
            for name in ("Open", "Deeper", "Both")
        ],
        ("Deeper", {"qkv_bias": False}, "qkv_bias: unknown key; allowed: power"),
    ],
)
def test_arguments_that_are_not_taken_are_told_with_those_that_are(constructors, name, kwargs, told):
    with pytest.raises(ConfigError) as caught:
        check(f"constructors:{name}", kwargs=kwargs)
    assert str(caught.value) == f"config.yaml: variants.own.kwargs.{told}"
    assert not (constructors / "imported").exists()


@pytest.mark.parametrize("target", sorted({variant.target for variant in load_study(CONFIG).variants.values()}))
def test_the_text_of_an_operator_tells_what_its_constructor_takes(target):
    told = arguments_of(target, partial(_tree_of, path=sys.path))
    taken, required = set(), set()
    for kind in pkgutil.resolve_name(target).__mro__:
        parameters = list(inspect.signature(kind.__init__).parameters.values())[3:]
        taken |= {one.name for one in parameters if one.kind != one.VAR_KEYWORD}
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            break
    assert told == (taken - GIVEN, required)


def test_a_file_beside_the_configuration_is_found_from_elsewhere(folder, monkeypatch):
    monkeypatch.chdir("/")
    check("mine:Mine", folder)
    with pytest.raises(ConfigError, match="no module 'mine'"):
        check("mine:Mine")
    text = CONFIG.read_text().replace("linvit.attention.kernel:EluAttention", "mine:Mine")
    (folder / "config.yaml").write_text(text)
    assert load_study(folder / "config.yaml").variants["elu"].target == "mine:Mine"


def test_looking_for_classes_imports_neither_their_packages_nor_torch(folder):
    code = f"""
import sys
from linvit.config import load_study
load_study({str(CONFIG)!r})
print([name for name in sys.modules if name.startswith(("torch", "linvit.attention"))])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout == "[]\n"
