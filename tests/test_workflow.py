"""The real Snakefile on a tiny study: what is planned, what is run again, what a failure leaves behind."""

import json
import subprocess
import sys

import pytest
import yaml
from study import CONFIG, ROOT, Study


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
