"""The real Snakefile on a tiny study: what is planned, what is run again, what a failure leaves behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)

    def planned(self, *options: str) -> dict[str, int]:
        """Jobs that a dry run would start, by rule."""
        result = self.run("--dry-run", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        jobs = dict(re.findall(r"^(\w+) +(\d+)$", result.stdout + result.stderr, re.MULTILINE))
        return {rule: int(count) for rule, count in jobs.items() if rule not in ("total", "all")}

    def grid(self) -> Path:
        return self.folder / "results/grids/tiny"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    study = Study(tmp_path_factory.mktemp("study"))
    result = study.run()
    assert result.returncode == 0, result.stdout + result.stderr
    return study


def test_the_whole_line_runs_and_leaves_what_it_promises(study: Study) -> None:
    for name in ("runs.csv", "top1.csv", "top1.md", "top1.tex", "fig2.png", "fig2.pdf", "fig4.png", "claims.md"):
        assert (study.grid() / name).stat().st_size > 0
    runs = sorted((study.folder / "results/runs").rglob("metrics.json"))
    assert [json.loads(path.read_text())["name"] for path in runs] == [
        "noise/tiny/relu/mlpcopy-distill/own/seed0",
        "noise/tiny/relu/random/none/seed0",
        "noise/tiny/softmax/fullcopy/own/seed0",
    ]
    assert not list((study.folder / "results").rglob("checkpoint.pt"))


def test_a_second_run_does_nothing(study: Study) -> None:
    assert study.planned() == {}


def test_a_new_variant_or_seed_plans_only_its_own_runs(study: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["grids"]["tiny"][0]["variants"].append("elu")
    study.configure(config)
    with_variant = study.planned()
    config["grids"]["tiny"][0]["seeds"].append(1)
    study.configure(config)
    with_seed = study.planned()
    study.configure(CONFIG)
    report = {"runs": 1, "tables": 1, "figure": 2, "claims": 1}
    assert with_variant == {"train": 2, **report}
    assert with_seed == {"train": 6, **report}


def test_a_grid_with_other_losses_than_the_papers_has_their_figure(study: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["inits"]["copy-l2"] = {"copy": ["attention"], "distill": {"distance": "l2"}}
    config["grids"]["tiny"][0]["inits"].append("copy-l2")
    study.configure(config)
    planned = study.planned()
    study.configure(CONFIG)
    assert planned == {"train": 1, "runs": 1, "tables": 1, "figure": 3, "claims": 1}


def test_a_changed_setting_trains_exactly_the_runs_that_use_it(study: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["inits"]["mlpcopy-distill"]["distill"] = {"weight": 3.0}
    study.configure(config)
    planned = study.planned()
    study.configure(CONFIG)
    assert planned["train"] == 1


def test_editing_plot_code_makes_plots_again_and_nothing_else(study: Study) -> None:
    code = study.folder / "linvit/figures.py"
    code.write_text(code.read_text() + "\n# edited\n")
    assert study.planned() == {"figure": 2}
    assert study.run().returncode == 0
    assert study.planned() == {}


def test_editing_training_code_trains_nothing_again(study: Study) -> None:
    (study.folder / "linvit/fit.py").touch()
    rule = study.folder / "workflow/rules/train.smk"
    rule.write_text(rule.read_text().replace("--threads", " --threads"))
    assert study.planned() == {}


def test_editing_the_rules_of_evidence_judges_the_claims_again(study: Study) -> None:
    code = study.folder / "linvit/evidence.py"
    code.write_text(code.read_text() + "\n# edited\n")
    assert study.planned() == {"claims": 1}
    assert study.run().returncode == 0


def test_a_deleted_figure_alone_is_made_again_from_cached_results(study: Study) -> None:
    figure = study.grid() / "fig4.png"
    figure.unlink()
    before = {path: path.stat().st_mtime_ns for path in study.grid().iterdir() if "fig4" not in path.name}
    assert study.planned() == {"figure": 1}
    assert study.run().returncode == 0
    assert figure.exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_deleted_weights_of_a_source_train_nothing_again(study: Study) -> None:
    (study.folder / "results/sources/own/tiny/weights.safetensors").unlink()
    assert study.planned() == {}


def test_a_failed_run_leaves_its_checkpoint_and_the_others_go_on(study: Study) -> None:
    result = study.run("--config", "grid=breaking")
    assert result.returncode != 0
    assert "worn out" in result.stdout + result.stderr
    runs = study.folder / "results/runs/noise/tiny"
    assert (runs / "relu/random/none/seed1/metrics.json").exists()
    assert (runs / "fragile/random/none/seed0/checkpoint.pt").exists()
    assert not (runs / "fragile/random/none/seed0/metrics.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": "none"}, "grid: 'none' is not defined; allowed: tiny, breaking"),
        ({"grids": {"tiny": [{"variants": ["relu"]}]}}, "grids.tiny.0.datasets: missing"),
    ],
)
def test_a_bad_configuration_is_refused_before_any_job(study: Study, change: dict, message: str) -> None:
    study.configure({**CONFIG, **change})
    result = study.run()
    study.configure(CONFIG)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert "Job stats" not in result.stdout + result.stderr


def test_a_mistake_in_a_grid_that_is_not_chosen_is_refused_too(study: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG, sort_keys=False))
    config["grids"]["breaking"][0]["inits"] = ["fullcopy"]
    study.configure(config)
    result = study.run("--dry-run")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert "grids.breaking.0: init 'fullcopy' needs a source" in result.stdout + result.stderr


def test_cached_metrics_of_other_settings_are_not_reported(study: Study) -> None:
    """As after copying results without Snakemake's own records of them."""
    config = yaml.safe_load(yaml.safe_dump(CONFIG, sort_keys=False))
    config["recipes"]["short"]["lr"] = 1e-3
    study.configure(config)
    (study.grid() / "runs.csv").unlink()
    result = study.run("--rerun-triggers", "mtime")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert "was run with other settings" in result.stdout + result.stderr
    assert study.run("--rerun-triggers", "mtime").returncode == 0


def test_a_duplicate_key_is_refused(study: Study) -> None:
    text = yaml.safe_dump(CONFIG)
    (study.folder / "config.yaml").write_text(text + "grid: breaking\n")
    result = study.run("--dry-run")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert "duplicate key 'grid'" in result.stdout + result.stderr


def test_snakemake_finds_nothing_to_criticise() -> None:
    command = [sys.executable, "-m", "snakemake", "--lint"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def test_snakemake_finds_the_executor_and_explains_its_settings() -> None:
    command = [sys.executable, "-m", "snakemake", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "--submitit-array-parallelism" in result.stdout
