"""The names that the package gives to others, and the README's example of them, run."""

import ast
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import models
import pytest
import timm
import torch

import linvit

torch.set_num_threads(1)

README = Path(__file__).parents[1] / "README.md"


def test_importing_the_package_imports_no_torch():
    """A login node builds the DAG without it."""
    code = "import linvit, linvit.config, sys; linvit.UserError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_what_type_checkers_see_is_what_is_imported():
    tree = ast.parse(Path(linvit.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: statement.module for statement in checked.body for alias in statement.names}
    assert seen == linvit._MODULES
    assert sorted(linvit._MODULES) == linvit.__all__
    assert (files("linvit") / "py.typed").is_file()


@pytest.mark.parametrize("name", linvit.__all__)
def test_every_name_is_there(name):
    assert getattr(linvit, name).__doc__
    assert name in dir(linvit)


def test_another_name_is_not():
    with pytest.raises(AttributeError, match="module 'linvit' has no attribute 'linearise'"):
        linvit.linearise  # noqa: B018


def test_the_readmes_example_runs(monkeypatch):
    """As it stands, on smaller models without downloads."""
    section = README.read_text().split("## Linearise your own ViT")[1].split("\n## ")[0]
    create = timm.create_model

    def smaller(name, pretrained=False, **options):
        return create(name, img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, **options)

    monkeypatch.setattr(timm, "create_model", smaller)
    names = {"loader": [(models.images(seed=seed), torch.tensor([0, 1])) for seed in (1, 2)]}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own README
    assert names["maps"].shape == (2, 2, 17, 17)
    assert names["student"].blocks[0].attn.qkv.weight.grad.any()
    assert names["hybrid"](models.images()).shape == (2, 10)
    assert type(names["model"].blocks[0].attn).__name__ == "MhlaAttention"
