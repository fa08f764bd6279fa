"""A copy of the workflow with a tiny study, to run and to break."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
FRAGILE = '''
from linvit.attention.kernel import ReluAttention


class Fragile(ReluAttention):
    """Breaks in its third training step, after a checkpoint."""

    steps = 0

    def forward(self, x, attn_mask=None, is_causal=False):
        Fragile.steps += self.training
        if Fragile.steps > 2:
            raise RuntimeError("worn out")
        return super().forward(x)
'''

CONFIG = {
    "grid": "tiny",
    "sizes": {"tiny": {"dim": 16, "depth": 1, "heads": 2, "patch_size": 4, "image_size": 8, "channels": 1}},
    "variants": {
        "softmax": {"target": "linvit.attention.softmax:SoftmaxAttention"},
        "relu": {"target": "linvit.attention.kernel:ReluAttention"},
        "elu": {"target": "linvit.attention.kernel:EluAttention"},
        "fragile": {"target": "fragile:Fragile"},
    },
    "inits": {
        "random": None,
        "fullcopy": {"copy": ["attention", "mlp", "norms", "patch_embed", "positions", "class_token"]},
        "mlpcopy-distill": {"copy": ["mlp"], "distill": {}},
    },
    "recipes": {"short": {"epochs": 4, "batch_size": 32, "interpolation": "bilinear"}},
    "datasets": {"noise": {"npz": "noise.npz", "classes": 2, "mean": [0.5], "std": [0.2], "recipe": "short"}},
    "sources": {"own": {"tiny": {"train": {"dataset": "noise", "recipe": "short"}}}},
    "grids": {
        "tiny": [
            {
                "datasets": ["noise"],
                "sizes": ["tiny"],
                "variants": ["relu"],
                "inits": ["random", "mlpcopy-distill"],
                "sources": ["own"],
                "seeds": [0],
            },
            {
                "datasets": ["noise"],
                "sizes": ["tiny"],
                "variants": ["softmax"],
                "inits": ["fullcopy"],
                "sources": ["own"],
                "seeds": [0],
            },
        ],
        "breaking": [
            {"datasets": ["noise"], "sizes": ["tiny"], "variants": ["fragile"], "inits": ["random"], "seeds": [0]},
            {"datasets": ["noise"], "sizes": ["tiny"], "variants": ["relu"], "inits": ["random"], "seeds": [1]},
        ],
    },
}


class Study:
    """A copy of the workflow and the package in a folder of its own, so that tests may touch its code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "linvit", folder / "linvit", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "workflow", folder / "workflow")
        shutil.copytree(ROOT / "envs", folder / "envs")
        shutil.copy(ROOT / "Snakefile", folder)
        (folder / "fragile.py").write_text(FRAGILE)
        self.configure(CONFIG)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (48, 8, 8), dtype=np.uint8)
        labels = np.arange(48) % 2
        np.savez(folder / "noise.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)

    def configure(self, config: dict) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def run(self, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/local", "--cores", "2", *options]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600)

    def planned(self, *options: str) -> dict[str, int]:
        """Jobs that a dry run would start, by rule."""
        result = self.run("--dry-run", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        jobs = dict(re.findall(r"^(\w+) +(\d+)$", result.stdout + result.stderr, re.MULTILINE))
        return {rule: int(count) for rule, count in jobs.items() if rule not in ("total", "all", "ood")}

    def grid(self, name: str = "tiny") -> Path:
        return self.folder / "results/grids" / name
