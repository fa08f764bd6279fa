"""A report of finished runs, without the workflow."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, refusal
from fakes import frame, ood_frame, plausible, run, write_evaluation, write_metrics
from test_report import texts_of
from tiny import CONFIG, STUDY

from linvit import results
from linvit.cli import main
from linvit.figures import FIGURES
from linvit.grid import evaluations, expand
from linvit.report import NEEDS, figures_in, figures_of, history_figures_of, tables_of


def finished(folder: Path, grid: str, leave: int = 0) -> list:
    """The metrics of a grid's runs but for the last ones, made up."""
    specs = list(expand(STUDY, grid).values())
    specs = specs[: len(specs) - leave]
    for spec in specs:
        write_metrics(folder / "results/runs", spec, plausible(spec))
    return specs


def report(capsys, *arguments: str | Path) -> list[str]:
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_a_grids_finished_runs_fill_what_the_workflow_would_fill(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    specs = finished(tmp_path, "demo", leave=1)
    told, written, *rest = report(capsys, "--config", CONFIG, "--grid", "demo")
    assert told == "report: 10 of the 11 runs of grid demo"
    filled = [*tables_of(specs), *figures_of(specs), *history_figures_of(specs)]
    assert written == f"written: {', '.join(['runs', *filled, 'claims'])}"
    assert files(Path("report")) == {*written.removeprefix("written: ").split(", "), "history"}
    assert "not filled: Figure A, which needs what Figure 4 needs, at size small" in rest
    assert rest[-1].startswith("not testable on these runs, as claims.md tells: C1, C2, ")
    assert len(results.read_runs("report/runs.csv")) == 10


def test_a_folder_of_runs_and_a_table_of_them_give_the_same_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path, "demo")
    first = report(capsys, "results/runs", "--out", "folder")
    second = report(capsys, "folder/runs.csv", "--out", "table")
    assert first[1:] == second[1:]
    for path in Path("folder").iterdir():
        assert path.read_bytes() == Path("table", path.name).read_bytes(), path


def test_results_out_of_distribution_come_along(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = list(evaluations(STUDY, "paper").values())[:4]
    write_metrics(Path("results/runs"), found[0].run, 80.0)
    for evaluation in found:
        write_evaluation(Path("results/runs"), evaluation, 20.0)
    lines = report(capsys, "results/runs")
    assert "table2" in lines[1]
    assert "table2" in report(capsys, "report/runs.csv", "--out", "again")[1]
    assert "Out-of-distribution results: 4." in Path("again/claims.md").read_text()


def test_what_no_run_fills_is_named_with_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results.write_runs(frame([run("pretrained", variant="softmax")]), "runs.csv")
    lines = report(capsys, "runs.csv")
    unfilled = [line for line in lines if line.startswith("not filled: ")]
    assert {need for need in NEEDS.values() if any(line.endswith(need) for line in unfilled)} == set(NEEDS.values())
    assert sum("not filled: Table" in line for line in unfilled) == 4


def test_what_rows_of_a_table_fill_is_what_their_specs_fill(tmp_path):
    """A table read from a file has NaN where a spec has nothing."""
    for grid in ("demo", "mini", "losses"):
        specs = finished(tmp_path / grid, grid)
        runs = results.collect((tmp_path / grid).rglob("metrics.json"))
        results.write_runs(runs, tmp_path / "runs.csv")
        assert figures_in(results.read_runs(tmp_path / "runs.csv").to_dict("records")) == figures_of(specs)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_is_promised_is_drawn(name, tmp_path):
    """And one that is not shows that it has no runs, or none that it is about."""
    finished(tmp_path, "demo")
    runs = results.collect(tmp_path.rglob("metrics.json"))
    is_empty = any("No runs of these" in text for text in texts_of(FIGURES[name](runs)))
    assert is_empty <= (name not in figures_in(runs.to_dict("records")))


def test_no_runs_are_told_with_what_makes_them(folder, capsys):
    assert refusal(capsys, "report").endswith(
        "grid 'all' has no finished runs under results/runs; "
        "snakemake --profile workflow/profiles/local --config grid=all makes them"
    )
    assert "results: no finished runs there" in refusal(capsys, "report", "results")
    assert "nowhere: no finished runs there" in refusal(capsys, "report", "nowhere")
    assert not Path("report").exists()


def test_a_report_needs_no_torch(tmp_path):
    results.write_runs(frame([run("copy")]), tmp_path / "runs.csv")
    results.write_runs(ood_frame([run("copy", dataset="imagenet-a")]), tmp_path / "ood.csv")
    code = "import sys; from linvit.cli import main; main(['report', 'runs.csv'])"
    code += "; print({'torch', 'timm'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment())
    assert made.stdout.splitlines()[-1] == "set()"
