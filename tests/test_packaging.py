"""The package as others get it: what is in it, that it works where it is installed, and that it says one version."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml

import linvit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {
    "linvit/py.typed",
    "linvit/published.yaml",
    "linvit/embedded/fashion_mnist.npz",
    "linvit/embedded/fashion_vit.safetensors",
    "snakemake_executor_plugin_submitit/__init__.py",
    f"linvit-{linvit.__version__}.dist-info/licenses/LICENSE",
    f"linvit-{linvit.__version__}.dist-info/licenses/linvit/embedded/LICENSE.fashion-mnist",
    f"linvit-{linvit.__version__}.dist-info/entry_points.txt",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made of it: what an index would offer."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    build(folder / sdist.name.removesuffix(".tar.gz"), folder, "wheel")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The programs of a new environment with the wheel in it, and this one's other packages behind."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", built[1], cwd=folder)
    (site,) = folder.glob("lib/*/site-packages")
    # After its own; editable installations among them are not followed.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin"


def build(project: Path, folder: Path, target: str) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=project)


def run(*command: str | Path, cwd: Path) -> str:
    """What it prints, away from this checkout."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_what_runs_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert names >= NEEDED
    packages = {PurePosixPath(name).parts[0] for name in names}
    assert packages == {"linvit", "snakemake_executor_plugin_submitit", f"linvit-{linvit.__version__}.dist-info"}
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "linvit").rglob("*.py")}
    assert {name for name in names if name.startswith("linvit/") and name.endswith(".py")} == code


def test_the_sdist_has_the_study_and_its_tests(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "config.yaml", "Snakefile", "workflow/rules/train.smk", "docs/conf.py"}
    assert names >= {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")}
    made = {name for name in names if name.startswith(("results/", "site/", ".venv/"))}
    assert made <= {"results/.gitkeep"}


def test_the_command_works_where_it_is_installed(installed, tmp_path):
    assert "plan" in run(installed / "linvit", "--help", cwd=tmp_path)
    names = run(installed / "linvit", "grid", "--config", ROOT / "config.yaml", "--grid", "demo", cwd=tmp_path).split()
    assert len(names) == 11


def test_the_installed_package_is_whole(installed, tmp_path):
    """Its own files and not this checkout's: models, embedded images and weights, the plugin."""
    code = """
import linvit, linvit.catalogue, linvit.datasets, linvit.files, timm
from importlib.resources import as_file
from linvit.config import Dataset
from safetensors.torch import load_file
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

vit = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4)
print(type(linvit.linearize(vit, "relu").blocks[0].attn).__name__)
part = Dataset(name="embedded", npz="linvit.embedded:fashion_mnist.npz", classes=10, mean=(0.3,), std=(0.3,))
print(len(linvit.datasets.read(part, "test", ".")))
with as_file(linvit.files.resource("linvit.embedded:fashion_vit.safetensors")) as path:
    print(len(load_file(path)) > 50)
print(ExecutorPluginRegistry().is_installed("submitit"))
print(linvit.__file__, linvit.__version__)
"""
    *found, origin = run(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert found == ["ReluAttention", "5000", "True", "True"]
    path, version = origin.split()
    assert Path(path).is_relative_to(installed.parent)
    assert version == linvit.__version__


def test_one_version_is_said():
    assert re.fullmatch(r"\d+\.\d+\.\d+", linvit.__version__)  # semantic, as pyproject.toml reads it from there
    assert "version" in PROJECT["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == linvit.__version__
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == linvit.__version__


def test_the_pythons_that_are_declared_are_those_that_are_allowed():
    declared = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert declared == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in declared


def test_the_licence_is_one():
    assert PROJECT["license"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
