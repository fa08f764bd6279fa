"""Convert, train and evaluate by hand."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from commands import refusal
from test_convert import DEIT, SMALL, source
from tiny import CLASSES, TEST, dataset, repeatable, spec

import linvit
import linvit.run
from linvit.cli import main
from linvit.grid import RunSpec
from linvit.run import build_student
from linvit.trained import MODEL, save_model

RUN = "bands/wee/relu/copy/old/seed1"


def test_a_folder_is_converted_opened_and_evaluated(folder, capsys):
    source(folder / "teacher", in_chans=1, num_classes=CLASSES)
    command = ["convert", "teacher", "--variant", "relu", "--init", "copy", "--blocks", "0", "-1", "--out", "mine"]
    assert main(command) == 0
    told = "mine: 3 blocks (ReluAttention, Attention), 3 classes, 0.01 M parameters; copied: attention; "
    told += "fresh: mlp, norms, patch_embed, class_token, positions, head\n"
    assert capsys.readouterr().out == told
    assert main(["evaluate", "mine", "bands", "--out", "found.json"]) == 0
    found = json.loads((folder / "found.json").read_text())
    line = f"mine on bands: top-1 {found['top1']:.2f} %, top-5 100.00 %, {TEST} images\n"
    assert capsys.readouterr().out == line
    assert (found["model"]["linvit"]["init"]["name"], found["dataset"]["name"]) == ("copy", "bands")


def test_a_file_is_converted_by_its_architecture(folder):
    torch.save(source(folder / "teacher").state_dict(), "deit.pth")
    arguments = [f"{key}={value}" for key, value in SMALL.items()]
    command = [
        "convert",
        "deit.pth",
        "--model",
        DEIT,
        "--model-kwargs",
        *arguments,
        "--variant",
        "elu",
        "--out",
        "mine",
    ]
    (folder / "config.yaml").unlink()  # the package has the variants and inits too
    assert main(command) == 0
    assert type(linvit.load("mine").blocks[0].attn).__name__ == "EluAttention"


def test_a_run_is_converted_as_it_is_and_evaluates_as_it_did(folder, capsys):
    assert main(["train", RUN]) == 0
    metrics = json.loads(Path("results/runs", RUN, "metrics.json").read_text())
    assert main(["convert", f"results/runs/{RUN}", "--out", "mine"]) == 0
    capsys.readouterr()
    for model in (f"results/runs/{RUN}", "mine"):
        assert main(["evaluate", model, "bands"]) == 0
        assert f" on bands: top-1 {metrics['top1']:.2f} %" in capsys.readouterr().out
    unused = ["--variant", "relu", "--init", "copy", "--num-classes", "3", "--seed", "0", "--model-kwargs", "depth=2"]
    line = refusal(capsys, "convert", f"results/runs/{RUN}", *unused, "--out", "other")
    assert line.endswith("leave out --variant, --init, --num-classes, --seed, --model-kwargs")
    assert "its own source" in refusal(capsys, "convert", f"results/runs/{RUN}", "--out", f"results/runs/{RUN}/.")


def test_a_run_is_trained_by_its_name_in_its_studys_places(folder, monkeypatch):
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"results": "made", "data": "images"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    calls = []
    monkeypatch.setattr(linvit.run, "train", lambda *a, **k: (calls.append((a, k)), {"top1": 1.0})[1])
    assert main(["train", RUN]) == main(["train", f"made/runs/{RUN}/"]) == 0
    (made, out), options = calls[0]
    assert (made.name, out) == (RUN, Path("made/runs", RUN))
    places = {"sources_folder": "made/sources", "data_root": "images", "decoded_folder": "made/data"}
    assert {name: str(options[name]) for name in places} == places
    assert calls[1][0] == (made, out)
    assert isinstance(made, RunSpec)


def test_what_is_no_run_is_told_with_the_one_that_was_meant(folder, capsys):
    line = refusal(capsys, "train", RUN.replace("relu", "rleu"))
    assert f"did you mean '{RUN}'?; linvit grid --grid NAME lists them" in line


def test_a_missing_source_is_told_with_the_command_that_prepares_it(folder, capsys):
    (folder / "results/sources/old/wee/source.json").unlink()
    assert "linvit source old/wee prepares it" in refusal(capsys, "train", RUN)
    assert not list(Path("results").rglob("*.bin")), "images were decoded first"


def test_sources_and_data_sets_are_prepared_by_name(folder):
    Path("results/sources/old/wee/weights.safetensors").rename("old.safetensors")
    Path("results/sources/old/wee/source.json").unlink()
    assert main(["source", "old/wee"]) == main(["dataset", "bands"]) == 0
    assert Path("results/sources/old/wee/source.json").exists()
    assert json.loads(Path("results/data/bands.json").read_text())["images"]["test"] == TEST


def test_mistakes_of_a_conversion_are_told_in_one_line(folder, capsys):
    assert "--variant: missing; allowed: relu" in refusal(capsys, "convert", DEIT, "--out", "mine")
    line = refusal(capsys, "convert", DEIT, "--variant", "rleu", "--out", "mine")
    assert "no variant 'rleu'; allowed: relu; did you mean 'relu'?" in line
    assert not Path("mine").exists()


def test_a_data_set_that_is_none_of_the_models_is_told_in_one_line(folder, capsys):
    made = spec("x")
    save_model(build_student(made, None), made, folder / "run" / MODEL)
    other = dataset(folder / "bands.npz", name="other")
    assert "is no test split of 'bands'" in refusal(capsys, "evaluate", "run", other.model_dump_json())
    assert "no data set 'bnds'; allowed: bands; did you mean 'bands'?" in refusal(capsys, "evaluate", "run", "bnds")
    source(folder / "teacher", num_classes=9)
    assert main(["convert", "teacher", "--variant", "relu", "--out", "mine"]) == 2  # this study has no fullcopy
    assert main(["convert", "teacher", "--variant", "relu", "--init", "copy", "--out", "mine"]) == 0
    assert "the model has 9 classes, data set 'bands' 3" in refusal(capsys, "evaluate", "mine", "bands")


@pytest.mark.parametrize("text", ["img_size", "=3", "a b=3"])
def test_arguments_of_timm_are_assignments(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["convert", DEIT, "--variant", "relu", "--out", "x", "--model-kwargs", text])
    assert caught.value.code == 2
    assert "allowed: key=value" in capsys.readouterr().err


def test_a_run_that_is_done_is_left_as_it_is(folder, capsys):
    made = spec(folder / "bands.npz")
    assert main(["train", made.to_json(), "--out", "run"]) == 0
    before = (folder / "run" / "metrics.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["train", made.to_json(), "--out", "run"]) == 0
    assert capsys.readouterr().out == "run: this run is done; to train it anew, delete its metrics.json\n"
    assert (folder / "run" / "metrics.json").stat().st_mtime_ns == before
    assert main(["train", spec(folder / "bands.npz", seed=1).to_json(), "--out", "run"]) == 0
    assert json.loads((folder / "run" / "metrics.json").read_text())["spec"]["seed"] == 1


def test_a_run_whose_metrics_are_not_those_that_were_written_is_trained_anew(folder):
    made, metrics = spec(folder / "bands.npz"), folder / "run" / "metrics.json"
    assert main(["train", made.to_json(), "--out", "run"]) == 0
    whole = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(whole | {"top5": 99.9}))
    assert main(["train", made.to_json(), "--out", "run"]) == 0
    assert repeatable(json.loads(metrics.read_text())) == repeatable(whole)
