"""The real Snakefile on a tiny study: what is planned, what is run again, what a failure leaves behind."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import yaml
from fakes import plausible, write_evaluation, write_metrics
from study import CONFIG, ROOT, Study

from linvit import published
from linvit.config import load_study
from linvit.grid import evaluations, expand, sources_of
from linvit.report import FIGURES, HISTORY_FIGURES, SECTIONS, title_of

DRAWN = ("fig2", "fig4", "figB", "curves", "savings")
SYNSETS = [f"n{1440764 + 7 * number:08}" for number in range(12)]
SHIFTED = {"test_of": "nets", "test": ".", "classes": 12, "class_names": "synsets.txt"}
OOD = {
    **CONFIG,
    "grid": "shifted",
    "recipes": {
        "long": {
            "epochs": 40,
            "batch_size": 4,
            "lr": 5e-3,
            "eval_every": 40,
            "crop_scale": [1.0, 1.0],
            "flip": 0.0,
            "color_jitter": 0.0,
            "eval_crop": 1.0,
        }
    },
    "datasets": {
        "nets": {"folder": "nets", "classes": 12, "mean": [0.5], "std": [0.3], "recipe": "long"},
        "nets-a": {**SHIFTED, "folder": "nets-a", "subset": "some.txt", "test_size": 3},
        "nets-v2": {**SHIFTED, "folder": "nets-v2", "test_size": 12},
    },
    "sources": {},
    "grids": {
        "shifted": [
            {
                "datasets": ["nets"],
                "sizes": ["tiny"],
                "variants": ["relu"],
                "inits": ["random"],
                "seeds": [0],
                "ood": ["nets-a", "nets-v2"],
            },
            {"datasets": ["nets"], "sizes": ["tiny"], "variants": ["elu"], "inits": ["random"], "seeds": [0]},
        ],
    },
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    study = Study(tmp_path_factory.mktemp("study"))
    result = study.run()
    assert result.returncode == 0, result.stdout + result.stderr
    return study


def test_the_whole_line_runs_and_leaves_what_it_promises(study: Study) -> None:
    # Tiny has no Copy w/ Distill and no sweep: no Figures 3 and 5; its runs are no cells of the paper's tables.
    figures = [f"{name}.{suffix}" for name in DRAWN for suffix in ("png", "pdf")]
    tables = [f"top1.{suffix}" for suffix in ("csv", "md", "html", "tex")]
    reports = {"runs.csv", "history.csv", "runs.html", *tables, "claims.md", "claims.html", *figures}
    assert {path.name for path in study.grid().iterdir() if path.suffix != ".log"} == reports
    assert all((study.grid() / name).stat().st_size > 0 for name in reports)
    runs = sorted((study.folder / "results/runs").rglob("metrics.json"))
    assert [json.loads(path.read_text())["name"] for path in runs] == [
        "noise/tiny/relu/mlpcopy-distill/own/seed0",
        "noise/tiny/relu/random/none/seed0",
        "noise/tiny/softmax/fullcopy/own/seed0",
    ]
    assert not list((study.folder / "results").rglob("checkpoint.pt"))


def test_a_second_run_does_nothing(study: Study) -> None:
    assert study.planned() == {}


def test_event_files_make_no_run_stale(study: Study) -> None:
    assert study.planned("--config", "tensorboard=true") == {}


def test_snakemakes_report_is_one_page_that_fetches_nothing(study: Study) -> None:
    result = study.run("--report", "report.html")
    assert result.returncode == 0, result.stdout + result.stderr
    page = (study.folder / "report.html").read_text()
    for name in DRAWN:
        assert json.dumps(SECTIONS[name]) in page
        assert json.dumps({"result": title_of(name)}) in page
    for result in ("Claims C1 to C11", "Runs", "Top-1 accuracy"):
        assert json.dumps({"result": result}) in page
    assert "What each copied component brings to ReLU" in page
    assert re.search(r"results of the grid\s+<tt[^>]*>tiny</tt>", page.replace("\\n", " ").replace('\\"', '"'))
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=.https?:", page)


def test_every_figure_has_a_caption_and_every_output_a_section() -> None:
    captions = (ROOT / "workflow/report/figure.rst").read_text()
    assert set(re.findall(r'^    "(\w+)":', captions, re.MULTILINE)) == {*FIGURES, *HISTORY_FIGURES}
    printed = {name for name, table in published.tables().items() if any(cell.runs for cell in table.cells())}
    assert set(SECTIONS) == {*FIGURES, *HISTORY_FIGURES, *printed}


def test_a_new_variant_or_seed_plans_only_its_own_runs(study: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["grids"]["tiny"][0]["variants"].append("elu")
    study.configure(config)
    with_variant = study.planned()
    config["grids"]["tiny"][0]["seeds"].append(1)
    study.configure(config)
    with_seed = study.planned()
    study.configure(CONFIG)
    report = {"runs": 1, "history": 1, "tables": 1, "figure": 5, "claims": 1}
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
    code = study.folder / "linvit/figures/style.py"
    code.write_text(code.read_text() + "\n# edited\n")
    assert study.planned() == {"figure": 5}
    assert study.run().returncode == 0
    assert study.planned() == {}


def test_editing_the_printed_numbers_makes_tables_again_and_nothing_else(study: Study) -> None:
    printed = study.folder / "linvit/published.yaml"
    printed.write_text(printed.read_text() + "\n# edited\n")
    assert study.planned() == {"tables": 1}
    assert study.run().returncode == 0


def test_editing_what_columns_are_made_of_makes_the_tables_again(study: Study) -> None:
    code = study.folder / "linvit/results.py"
    code.write_text(code.read_text() + "\n# edited\n")
    assert study.planned() == {"runs": 1, "history": 1, "tables": 1, "figure": 5, "claims": 1}
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


def test_a_deleted_run_alone_is_trained_again(study: Study) -> None:
    shutil.move(study.folder / "results/runs/noise/tiny/relu/random", study.folder / "aside")
    planned = study.planned()
    shutil.move(study.folder / "aside", study.folder / "results/runs/noise/tiny/relu/random")
    assert planned == {"train": 1, "runs": 1, "history": 1, "tables": 1, "figure": 5, "claims": 1}
    assert study.planned() == {}


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


BROKEN = {
    "inits: &loop {mine: *loop}": "config.yaml:1: an alias inside of what it stands for; allowed: ",
    "evil: !!python/object/apply:os.mkdir [ran]": "config.yaml:1: not valid YAML: could not determine a constructor",
    "__use_yte__: true\n__definitions__: [import os; os.mkdir('ran')]": "config.yaml: __use_yte__: templates may run",
}


@pytest.mark.parametrize("line", BROKEN, ids=["alias", "tag", "template"])
def test_a_file_that_snakemake_should_not_even_read_is_refused_first(study: Study, line: str) -> None:
    (study.folder / "config.yaml").write_text(f"{line}\n{yaml.safe_dump(CONFIG)}")
    result = study.run("--dry-run")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert BROKEN[line] in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert not (study.folder / "ran").exists()


def test_a_variant_that_is_not_there_is_refused_before_any_job(study: Study) -> None:
    """That beside config.yaml is there; none is imported."""
    study.configure({**CONFIG, "variants": {**CONFIG["variants"], "fragile": {"target": "fragile:Agile"}}})
    result = study.run("--dry-run")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert "variants.fragile.target: no 'Agile' in " in result.stdout + result.stderr
    assert "fragile.py; allowed: Fragile" in result.stdout + result.stderr


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


def test_damaged_metrics_are_left_out_of_tables_that_say_so_and_are_made_again_where_deleted(study: Study) -> None:
    damaged = study.folder / "results/runs/noise/tiny/relu/random/none/seed0/metrics.json"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    result = study.run()
    assert result.returncode == 0, result.stdout + result.stderr
    sentence = "INCOMPLETE: 1 result is left out, damaged on disk."
    assert f"results/grids/tiny/runs.csv: {sentence}" in result.stdout + result.stderr
    for name in ("top1.md", "runs.html", "claims.md"):
        text = (study.grid() / name).read_text()
        assert sentence in text
        assert "results/runs/noise/tiny/relu/random/none/seed0/metrics.json: Invalid JSON" in text
    damaged.unlink()
    assert study.run().returncode == 0
    assert "INCOMPLETE" not in (study.grid() / "top1.md").read_text()


def test_a_grid_of_which_all_metrics_are_damaged_is_told_in_one_line(study: Study) -> None:
    files = {path: path.read_bytes() for path in (study.folder / "results/runs").rglob("metrics.json")}
    for path, content in files.items():
        path.write_bytes(content[:-100])
    result = study.run("--", f"{study.grid().relative_to(study.folder)}/runs.csv")
    for path, content in files.items():
        path.write_bytes(content)
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert re.search(r"^ *linvit: error: .*Invalid JSON.*, so that none is left\); deleted, they", said, re.MULTILINE)
    assert "Traceback" not in said
    assert study.run().returncode == 0


def test_a_duplicate_key_is_refused(study: Study) -> None:
    text = yaml.safe_dump(CONFIG)
    (study.folder / "config.yaml").write_text(text + "grid: breaking\n")
    result = study.run("--dry-run")
    study.configure(CONFIG)
    assert result.returncode != 0
    assert "duplicate key 'grid'" in result.stdout + result.stderr


# --- out of distribution ----------------------------------------------------------------------------------


def write_net(folder: Path, label: int) -> None:
    """An image of a class, which is told by its texture."""
    texture = np.random.default_rng(label).integers(0, 2, (4, 4), dtype=np.uint8)
    pixels = np.tile(255 * texture, (2, 2))
    folder.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(pixels).save(folder / "0.png")


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """ImageNet in miniature, with a test split of three of its classes and one in folders of numbers."""
    study = Study(tmp_path_factory.mktemp("shifted"))
    study.configure(OOD)
    some = [SYNSETS[label] for label in (2, 5, 11)]
    (study.folder / "synsets.txt").write_text("\n".join(SYNSETS))
    (study.folder / "some.txt").write_text("\n".join(some))
    for label, name in enumerate(SYNSETS):
        for folder in ("nets/train", "nets/val", *(["nets-a"] if name in some else [])):
            write_net(study.folder / "data" / folder / name, label)
        write_net(study.folder / "data/nets-v2" / str(label), label)
    result = study.run("ood")
    assert result.returncode == 0, result.stdout + result.stderr
    return study


@pytest.fixture
def run(shifted: Study) -> Path:
    """The folder of the one run that is evaluated out of distribution."""
    return shifted.folder / "results/runs/nets/tiny/relu/random/none/seed0"


def test_the_runs_that_ask_for_it_and_no_others_are_evaluated_out_of_distribution(shifted: Study, run: Path) -> None:
    table = pd.read_csv(shifted.grid("shifted") / "ood.csv")
    expected = [
        "run",
        "dataset",
        "size",
        "variant",
        "init",
        "start",
        "distill",
        "distill_target",
        "source",
        "seed",
        "top1",
        "top5",
        "images",
        "left_out",
    ]
    assert list(table.columns) == expected
    assert table[["dataset", "variant", "images"]].to_numpy().tolist() == [
        ["nets-a", "relu", 3],
        ["nets-v2", "relu", 12],
    ]
    assert [path.parent for path in shifted.folder.rglob("metrics.json")] == [run]


def test_folders_of_numbers_hold_the_classes_of_those_numbers(shifted: Study, run: Path) -> None:
    """The images are those of the run's own test split: sorted as text, 10 of 12 would have another label."""
    top1 = json.loads((run / "metrics.json").read_text())["top1"]
    assert top1 > 50
    found = pd.read_csv(shifted.grid("shifted") / "ood.csv").set_index("dataset")["top1"]
    assert found["nets-v2"] == top1
    assert found["nets-a"] > 50


def test_after_an_evaluation_out_of_distribution_nothing_is_left_to_do(shifted: Study) -> None:
    assert shifted.planned("ood") == {}


def test_the_whole_study_has_the_evaluations_out_of_distribution_in_it(shifted: Study) -> None:
    table = (shifted.grid("shifted") / "ood.csv").rename(shifted.folder / "aside.csv")
    planned = shifted.planned()
    table.rename(shifted.grid("shifted") / "ood.csv")
    assert planned == {"train": 1, "ood_table": 1, "runs": 1, "history": 1, "tables": 1, "figure": 2, "claims": 1}


def test_a_deleted_evaluation_alone_is_made_again_without_training(shifted: Study, run: Path) -> None:
    path = run / "ood/nets-a.json"
    found = json.loads(path.read_text())
    path.unlink()
    before = {other: other.stat().st_mtime_ns for other in (run / "ood/nets-v2.json", run / "metrics.json")}
    assert shifted.planned("ood") == {"evaluate_ood": 1, "ood_table": 1}
    assert shifted.run("ood").returncode == 0
    assert json.loads(path.read_text()) == found
    assert {other: other.stat().st_mtime_ns for other in before} == before


def test_one_more_test_split_plans_its_evaluations_and_no_training(shifted: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(OOD, sort_keys=False))
    config["datasets"]["nets-b"] = {**SHIFTED, "folder": "nets-v2"}
    config["grids"]["shifted"][0]["ood"].append("nets-b")
    shifted.configure(config)
    planned = shifted.planned("ood")
    shifted.configure(OOD)
    assert planned == {"dataset": 1, "evaluate_ood": 1, "ood_table": 1}


def test_a_run_that_is_trained_again_is_evaluated_again(shifted: Study) -> None:
    config = yaml.safe_load(yaml.safe_dump(OOD, sort_keys=False))
    config["recipes"]["long"]["lr"] = 1e-3
    shifted.configure(config)
    planned = shifted.planned("ood")
    shifted.configure(OOD)
    assert planned == {"train": 1, "evaluate_ood": 2, "ood_table": 1}


def test_a_deleted_model_fails_its_evaluation_with_what_to_do(shifted: Study, run: Path) -> None:
    (run / "model.safetensors").unlink()
    (run / "ood/nets-v2.json").unlink()
    result = shifted.run("ood")
    assert result.returncode != 0
    assert "delete metrics.json beside it, and Snakemake trains the run again" in result.stdout + result.stderr
    (run / "metrics.json").unlink()
    assert shifted.planned("ood") == {"train": 1, "evaluate_ood": 2, "ood_table": 1}


def test_a_cached_paper_grid_gives_every_table_and_figure_without_training(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.configure({**yaml.safe_load((ROOT / "config.yaml").read_text()), "grid": "paper"})
    paper = load_study(study.folder / "config.yaml")
    for spec in expand(paper).values():
        write_metrics(study.folder / "results/runs", spec, plausible(spec))
    for evaluation in evaluations(paper).values():
        write_evaluation(study.folder / "results/runs", evaluation, plausible(evaluation.run) - 40)
    manifests = [f"sources/{source}/source" for source in sources_of(paper)] + [
        f"data/{name}" for name in paper.datasets
    ]
    for path in (study.folder / f"results/{manifest}.json" for manifest in manifests):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    result = study.run()
    assert result.returncode == 0, result.stdout + result.stderr
    reports = {path.name: path.stat().st_mtime_ns for path in study.grid("paper").iterdir()}
    drawn = ("fig2", "fig3", "fig4", "fig5", "figA", "figB", "curves", "savings")
    tables = ("top1", "table1", "table2", "tableF", "tableG")
    assert {f"{name}.log" for name in (*drawn, "tables", "claims", "runs", "history", "ood")} < set(reports)
    assert {Path(name).stem for name in reports} == {*drawn, *tables, "tables", "claims", "runs", "history", "ood"}

    (study.grid("paper") / "figA.pdf").unlink()
    assert study.run().returncode == 0
    again = {path.name: path.stat().st_mtime_ns for path in study.grid("paper").iterdir()}
    assert {name for name in again if again[name] != reports[name]} <= {"figA.pdf", "figA.png", "figA.log"}


def test_snakemake_finds_nothing_to_criticise() -> None:
    command = [sys.executable, "-m", "snakemake", "--lint"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def test_snakemake_finds_the_executor_and_explains_its_settings() -> None:
    command = [sys.executable, "-m", "snakemake", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "--submitit-array-parallelism" in result.stdout
