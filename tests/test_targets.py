"""Targets of variants: a module or class that is not there is told without importing anything."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_config import CONFIG

from linvit.config import ConfigError, Variant, check_targets, load_study

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


def check(target: str, *folders) -> None:
    check_targets({"own": Variant(name="own", target=target)}, "config.yaml", *folders)


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
