"""The command line: each subcommand by hand, and mistakes told in one line with exit code 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import environment, refusal
from fakes import frame, ood_frame, run
from tiny import CONFIG, RECIPE, TEST, TRAIN, changed, dataset, source, spec, study_config

import linvit
import linvit.run
import linvit.throughput
from linvit import results
from linvit.cli import main, parser
from linvit.fit import NonFiniteLoss
from linvit.grid import RunSpec
from linvit.ranks import Ranks
from linvit.results import read_ood

COMMANDS = ("convert", "train", "evaluate", "show", "grid", "plan", "status", "bench", "report", "maps", "blocks")
COMMANDS += ("dataset", "source", "collect", "tables", "figure", "claims")


# --- help -------------------------------------------------------------------------------------------------


def test_the_subcommands_are_those_documented():
    (commands,) = (action for action in parser()._actions if action.choices)
    assert sorted(commands.choices) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: linvit {command}")
    assert ("--config" if command in ("grid", "plan", "status", "show") else "--out") in out
    assert f"example:\n  linvit {command} " in out
    lines = out.splitlines()
    assert len(lines) <= 32, "a screen"
    assert max(map(len, lines)) <= 80


def test_the_overview_names_every_subcommand(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ")] == list(COMMANDS)
    assert len(lines) <= 28, "a screen"
    assert max(map(len, lines)) <= 80


BAD_ARGUMENTS = ["", "nosuch", "train", "grid --nosuch", "figure fig2", "train {} --out x --threads many"]
BAD_ARGUMENTS += ["train {} --out x --workers -1", "source {} --workers 1.5", "evaluate x x --workers 9999999"]
BAD_ARGUMENTS += ["bench", "bench --throughput --batch-size 0", "bench --throughput --threads many"]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_arguments_that_are_none_end_with_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"linvit( \w+)?: error: .*; see linvit( \w+)? --help$", line)


@pytest.mark.parametrize("workers", ["-1", "few", "1.5", "9" * 5000])
def test_a_number_of_processes_that_is_none_is_refused_with_those_allowed(capsys, workers):
    with pytest.raises(SystemExit):
        main(["train", "{}", "--out", "x", "--workers", workers])
    assert f"--workers: found {workers!r}; allowed: 0 to 999,999; see" in capsys.readouterr().err


def test_a_spec_that_is_no_regular_file_is_refused_rather_than_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("spec.json")
    assert main(["train", "spec.json", "--out", "x"]) == 2
    assert capsys.readouterr().err == "linvit: error: spec.json: no regular file\n"


def test_a_name_that_holds_a_line_break_is_told_on_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a\nb.json", "--out", "x"]) == 2
    assert capsys.readouterr().err == "linvit: error: a\\nb.json: No such file or directory\n"


# --- status -------------------------------------------------------------------------------------------------


def test_status_tells_a_failure_and_ends_when_nothing_is_left(folder, capsys):
    assert main(["grid"]) == 0
    names = capsys.readouterr().out.split()
    for name in names:
        log = folder / "results/runs" / name / "train.log"
        log.parent.mkdir(parents=True)
        log.write_text("linvit: error: worn out\n")
    assert main(["status", "--watch", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grid all: 0 of 4 runs done, 0% of the training\n")
    assert "  worn out\n" in out
    assert all(f"    {name}\n" in out for name in names)


# --- doing the work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "runs"), [("demo", 11), ("mini", 147), ("paper", 2274)])
def test_grid_lists_a_grids_runs_one_a_line(capsys, grid, runs):
    assert main(["grid", "--config", str(CONFIG), "--grid", grid]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == runs
    assert all(line.count("/") == 5 for line in lines)


def test_grid_lists_the_configurations_own_choice_from_the_working_directory(folder, capsys):
    assert main(["grid"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"bands/wee/relu/{start}/seed{seed}" for start in ("random/none", "copy/old") for seed in (0, 1)
    ]


def test_grid_lists_without_importing_torch(folder):
    """On a login node."""
    code = "import sys; from linvit.cli import main; main(['grid']); print({'torch', 'timm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert result.stdout.splitlines()[0] == "bands/wee/relu/random/none/seed0"
    assert result.stdout.splitlines()[4:] == ["set()"]


def test_plan_tells_what_a_grid_costs_without_importing_torch(folder):
    code = "import sys; from linvit.cli import main; main(['plan']); print({'torch', 'timm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert result.stdout.splitlines()[0] == "grid    all"
    assert result.stdout.splitlines()[-1] == "set()"


def test_bench_measures_what_plan_lacks(folder, monkeypatch, capsys):
    measured = []

    def pretending(run: RunSpec, batch_size: int, device: torch.device) -> tuple[float, float]:
        measured.append((run.variant.name, run.init.distill is not None, batch_size))
        return 2.0, 3.0

    monkeypatch.setattr(linvit.throughput, "pick_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(linvit.throughput, "rates_of", pretending)
    grid = ["--config", str(CONFIG), "--grid", "demo"]
    assert main(["bench", "--throughput", *grid, "--variants", "ttt", "--batch-size", "4"]) == 0
    assert measured == [("ttt", False, 4), ("ttt", True, 4)]
    assert main(["plan", *grid]) == 0
    lacking = " ".join(capsys.readouterr().out.splitlines())
    assert "having no rate in results/bench/throughput.json: mini/relu, mini/relu+output, mini/softmax." in lacking
    assert main(["bench", "--throughput", *grid]) == 0
    assert measured[2:] == [("relu", False, 64), ("relu", True, 64), ("softmax", False, 64)]
    assert main(["plan", *grid]) == 0
    hours = (11 * 45 * 1000 / 2 + 11 * 3 * 5000 / 3) / 3600
    assert f"hours   {hours:.0f} on one cpu (threads: 1), as measured " in capsys.readouterr().out


def test_the_commands_carry_a_run_from_its_data_to_the_table_of_runs(folder, capsys):
    made = spec(folder / "bands.npz", "relu", "mlpcopy-distill", source=source())
    (folder / "dataset.json").write_text(made.dataset.model_dump_json())
    assert main(["dataset", "dataset.json", "--out", "results/data/bands.json"]) == 0
    manifest = json.loads((folder / "results/data/bands.json").read_text())
    assert manifest["images"] == {"train": TRAIN, "test": TEST}
    assert manifest["dataset"]["name"] == "bands"

    stored = folder / "results/sources/old/wee/weights.safetensors"
    published = source(path=str(stored))
    assert main(["source", published.model_dump_json(exclude_defaults=True), "--out", "fetched"]) == 0
    assert (folder / "fetched/source.json").exists()

    assert main(["train", made.to_json(), "--out", f"results/runs/{made.name}"]) == 0
    metrics = folder / "results" / "runs" / made.name / "metrics.json"
    assert RunSpec.from_json(json.dumps(json.loads(metrics.read_text())["spec"])) == made

    assert main(["collect", "results/runs", "--out", "runs.csv"]) == 0
    header, row = (folder / "runs.csv").read_text().splitlines()
    assert row.split(",")[0] == made.name
    assert {"top1", "init", "source", "seed"} <= set(header.split(","))
    assert capsys.readouterr().out == ""

    further = changed(made.dataset, name="more", test_of="bands", train_size=None)
    run = f"results/runs/{made.name}"
    assert main(["dataset", further.model_dump_json(), "--out", "results/data/more.json"]) == 0
    assert json.loads((folder / "results/data/more.json").read_text())["images"] == {"test": TEST}
    text = further.model_dump_json(exclude_defaults=True)
    assert main(["evaluate", run, text, "--out", f"{run}/ood/more.json"]) == 0
    assert capsys.readouterr().out.startswith(f"{run} on more: top-1 ")
    assert main(["collect", "--ood", "results/runs", "--out", "ood.csv"]) == 0
    (row,) = read_ood("ood.csv").itertuples()
    assert (row.run, row.dataset, row.images) == (made.name, "more", TEST)
    assert row.top1 == json.loads(metrics.read_text())["top1"]
    assert capsys.readouterr().out == ""


def test_a_spec_may_be_given_as_a_file_and_the_sources_folder_by_option(folder):
    short = changed(RECIPE, epochs=1, warmup_epochs=0)
    made = spec(folder / "bands.npz", "relu", "copy", source=source(), recipe=short)
    (folder / "spec.json").write_text(made.to_json())
    (folder / "results" / "sources").rename(folder / "elsewhere")
    assert main(["train", "spec.json", "--out", "run", "--sources", "elsewhere", "--data", ".", "--workers", "0"]) == 0
    assert (folder / "run" / "metrics.json").exists()


def test_a_source_is_trained_by_command(folder):
    made = spec(folder / "bands.npz", "softmax", role="source", recipe=changed(RECIPE, epochs=1, warmup_epochs=0))
    trained = source(train=made)
    assert main(["source", trained.model_dump_json(exclude_defaults=True), "--out", "out"]) == 0
    assert json.loads((folder / "out" / "source.json").read_text())["spec"]["role"] == "source"


def test_threads_are_what_was_asked_for(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(linvit.run, "train", lambda *_, **__: {"top1": 1.0})
    assert main(["train", spec("x").to_json(), "--out", "run", "--threads", "3"]) == 0
    assert main(["train", spec("x").to_json(), "--out", "run"]) == 0
    assert asked == [3]


def test_options_reach_the_run(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(linvit.run, "train", lambda *a, **k: (calls.append((a, k)), {"top1": 1.0})[1])
    made = spec("x")
    main(["train", made.to_json(), "--out", "run", "--sources", "s", "--data", "d", "--decoded", "c", "--workers", "4"])
    (arguments, keywords) = calls[0]
    assert arguments == (made, Path("run"))
    assert keywords.pop("stop")() is False
    places = {"sources_folder": Path("s"), "data_root": Path("d"), "decoded_folder": Path("c")}
    assert keywords == {**places, "workers": 4, "ranks": Ranks(), "tensorboard": False}


@pytest.mark.parametrize(("threads", "workers"), [([], 0), (["--threads", "1"], 0), (["--threads", "4"], 3)])
def test_a_run_of_several_threads_decodes_with_all_but_one(folder, monkeypatch, threads, workers):
    calls = []
    monkeypatch.setattr(linvit.run, "train", lambda *a, **k: (calls.append(k), {"top1": 1.0})[1])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    main(["train", spec("x").to_json(), "--out", "run", *threads])
    assert calls[0]["workers"] == workers


def test_out_of_distribution_results_reach_tables_and_claims(folder, monkeypatch):
    base = {"dataset": "imagenet", "size": "base"}
    results.write_runs(frame([run("copy", 70.0, **base), run("random", 70.0, **base)]), "runs.csv")
    shifted = ood_frame(
        [run(init, 20.0, dataset="imagenet-a", size="base", variant="ttt") for init in ("copy", "random")]
    )
    monkeypatch.setattr(results, "read_ood", {Path("ood.csv"): shifted}.get)
    assert main(["tables", "runs.csv", "--ood", "ood.csv", "--out", "report"]) == 0
    assert main(["claims", "runs.csv", "--ood", "ood.csv", "--out", "report/claims.md", "report/claims.html"]) == 0
    assert "| ImageNet-A" in (folder / "report/table2.md").read_text()
    for name in ("claims.md", "claims.html"):
        assert "Out-of-distribution results: 2." in (folder / "report" / name).read_text()
    assert main(["tables", "runs.csv", "--out", "without"]) == 0
    assert not (folder / "without/table2.md").exists()
    assert (folder / "without/table1.md").exists()


# --- mistakes ---------------------------------------------------------------------------------------------

GOOD = json.loads(spec("bands.npz").to_json())
BAD_JSON = {
    "no json": "{",
    "nothing in it": "{}",
    "an unknown key": json.dumps(GOOD | {"tpyo": 1}),
    "another type": json.dumps(GOOD | {"seed": "0"}),
    "a nested mistake": json.dumps(GOOD | {"recipe": {"name": "x", "epochs": 1, "warmup_epochs": 2}}),
    "no such file": "nowhere.json",
    "a folder": ".",
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("command", ["train", "dataset", "source"])
def test_a_bad_spec_is_told_in_one_line(folder, capsys, command, text):
    line = refusal(capsys, command, text, "--out", folder / "out")
    if command == "train" and "tpyo" in text:
        assert "tpyo" in line
    if not text.startswith("{"):
        assert text in line
    assert not (folder / "out").exists()


def test_missing_data_is_told_in_one_line(folder, capsys):
    nowhere = dataset(folder / "nowhere.npz")
    line = refusal(capsys, "train", spec("x", dataset=nowhere).to_json(), "--out", "run")
    assert "'bands' not found" in line
    assert str(folder / "nowhere.npz") in line
    line = refusal(capsys, "dataset", nowhere.model_dump_json(), "--out", "bands.json")
    assert str(folder / "nowhere.npz") in line
    assert not (folder / "bands.json").exists()


def test_a_missing_source_is_told_in_one_line(folder, capsys):
    made = spec(folder / "bands.npz", "relu", "copy", source=source().model_copy(update={"name": "other"}))
    line = refusal(capsys, "train", made.to_json(), "--out", "run")
    assert "results/sources/other/wee/source.json" in line
    line = refusal(capsys, "source", source(path="nowhere.pth").model_dump_json(exclude_defaults=True), "--out", "out")
    assert "'nowhere.pth'" in line


def test_a_run_without_a_model_is_told_in_one_line(folder, capsys):
    further = dataset(folder / "bands.npz", test_of="bands", train_size=None).model_dump_json(exclude_defaults=True)
    assert "run: no such folder" in refusal(capsys, "evaluate", "run", further, "--out", "out.json")
    (folder / "run").mkdir()
    assert "run/model.safetensors" in refusal(capsys, "evaluate", "run", further, "--out", "out.json")
    assert not (folder / "out.json").exists()


def test_a_damaged_checkpoint_is_told_in_one_line(folder, capsys):
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint.pt").write_bytes(b"half")
    line = refusal(capsys, "train", spec(folder / "bands.npz").to_json(), "--out", "run")
    assert "run/checkpoint.pt" in line


def test_an_operator_that_cannot_be_built_is_told_in_one_line(folder, capsys):
    made = spec(folder / "bands.npz")
    lost = made.model_copy(update={"variant": changed(made.variant, target="nowhere.attention:Mine")})
    assert "nowhere.attention:Mine" in refusal(capsys, "train", lost.to_json(), "--out", "run")
    odd = made.model_copy(update={"variant": changed(made.variant, kwargs={"tpyo": 1})})
    assert "tpyo" in refusal(capsys, "train", odd.to_json(), "--out", "run")


def test_a_bad_configuration_is_told_in_one_line(folder, capsys):
    config = study_config(folder / "bands.npz")
    config["recipes"]["short"]["epohcs"] = 3
    (folder / "config.yaml").write_text(yaml.dump(config))
    assert "config.yaml: recipes.short.epohcs: unknown key; allowed: epochs, " in refusal(capsys, "grid")
    assert "nowhere.yaml" in refusal(capsys, "grid", "--config", "nowhere.yaml")


def test_a_grid_that_is_not_defined_is_told_in_one_line(folder, capsys):
    line = refusal(capsys, "grid", "--grid", "nosuch")
    assert "'nosuch'" in line
    assert "all" in line


def test_a_figure_of_a_source_of_ones_own_choice(folder, capsys):
    rows = [run("copy", source=source, seed=seed) for source, seed in (("deit", 0), ("deit", 1), ("mae", 0))]
    results.write_runs(frame(rows), "runs.csv")
    drawn = {}
    for name, choice in (("default", []), ("deit", ["--source", "deit"]), ("mae", ["--source", "mae"])):
        assert main(["figure", "fig2", "runs.csv", *choice, "--out", f"{name}.png"]) == 0
        drawn[name] = Path(f"{name}.png").read_bytes()
    assert drawn["default"] == drawn["deit"] != drawn["mae"]
    line = refusal(capsys, "figure", "losses", "runs.csv", "--source", "ibot", "--out", "x.png")
    assert "no run has the source 'ibot'; allowed: deit, mae" in line


def test_claims_in_a_format_that_is_not_known_are_told_in_one_line(folder, capsys):
    results.write_runs(frame([run("copy")]), "runs.csv")
    assert "claims.pdf: no format for suffix '.pdf'; allowed: .md, .html" in refusal(
        capsys, "claims", "runs.csv", "--out", "claims.pdf"
    )


def test_a_figure_that_is_not_defined_is_told_in_one_line(folder, capsys):
    assert "'fig9'" in refusal(capsys, "figure", "fig9", "runs.csv", "--out", "x.png")


@pytest.mark.parametrize("command", [["collect"], ["tables"], ["figure", "fig2"], ["claims"]], ids=lambda c: c[0])
def test_a_missing_table_or_list_of_runs_is_told_in_one_line(folder, capsys, command):
    assert "nowhere.csv" in refusal(capsys, *command, "nowhere.csv", "--out", "out.png")


def test_a_loss_that_is_no_number_ends_with_code_1_and_one_line(folder, capsys, monkeypatch):
    def diverge(*_, **__):
        raise NonFiniteLoss("loss is not finite at epoch 3, step 7")

    monkeypatch.setattr(linvit.run, "train", diverge)
    assert main(["train", spec("x").to_json(), "--out", "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("linvit: error: loss is not finite at epoch 3, step 7; lower the recipe's lr")


def test_a_mistake_of_the_programs_is_not_hidden(folder, monkeypatch):
    def crash(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr(linvit.run, "train", crash)
    with pytest.raises(KeyError, match="a bug"):
        main(["train", spec("x").to_json(), "--out", "run"])


def test_exit_codes_reach_the_shell(folder):
    """Snakemake sees nothing else."""
    command = [sys.executable, "-m", "linvit", "grid"]
    good = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (good.returncode, good.stderr) == (0, "")
    (folder / "config.yaml").write_text("grid: nosuch\n")
    bad = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (2, "", 1)


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    command = f"{sys.executable} -m linvit grid --config {CONFIG} --grid paper | head -n 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr, len(result.stdout.splitlines())) == (0, "", 1)
