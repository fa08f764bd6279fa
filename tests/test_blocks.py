"""How far blocks are from their source's, by formula, and what maps are shown side by side."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from test_cli import refusal
from tiny import CONFIG, SIZE, changed, spec, store_source, write_npz

from linvit.blocks import BlocksError, block_errors, maps_beside, relative_errors, shown_images
from linvit.cli import main
from linvit.datasets import read
from linvit.figures.blocks import read_blocks
from linvit.figures.maps import Maps, maps
from linvit.grid import RunSpec
from linvit.maps import attention_map
from linvit.run import build_student, build_teacher, load_weights
from linvit.trained import MODEL, load_model, save_model


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    """Runs that were trained for no step, and the source that copies start from."""
    monkeypatch.chdir(tmp_path)
    npz = write_npz(tmp_path / "bands.npz")
    old = store_source(tmp_path / "results/sources")
    weights = load_weights(old, tmp_path / "results/sources")
    for variant, start in (("relu", "copy"), ("relu", "random"), ("inline", "fullcopy"), ("ttt", "copy")):
        chosen = spec(npz, variant, start, source=None if start == "random" else old)
        model = build_student(chosen, weights if chosen.source else None)
        save_model(model, chosen, folder(variant, start) / MODEL)
    return tmp_path


def folder(variant: str, start: str) -> Path:
    return Path("runs", variant, start)


def where(study: Path) -> dict[str, Path]:
    return {"sources_folder": study / "results/sources", "data_root": study}


def test_a_blocks_error_is_the_mean_square_of_the_difference_over_the_teachers(study):
    chosen, student = load_model(folder("relu", "copy") / MODEL)
    teacher = build_teacher(SIZE, load_weights(chosen.source, study / "results/sources"))
    images = shown_images(chosen, 6, study)
    outputs = {model: [] for model in (student, teacher)}
    for model, found in outputs.items():
        for block in model.blocks:
            block.attn.register_forward_hook(lambda module, inputs, output, found=found: found.append(output))
        with torch.no_grad():
            model.eval().forward_features(images)
    expected = [
        ((s - t).square().mean() / t.square().mean()).item()
        for s, t in zip(outputs[student], outputs[teacher], strict=True)
    ]
    assert relative_errors(student, teacher, images.split(4)) == pytest.approx(expected)
    assert relative_errors(teacher, teacher, [images]) == [0.0, 0.0]


def test_a_block_that_gives_out_nothing_has_an_error_of_one(study):
    chosen, student = load_model(folder("ttt", "copy") / MODEL)
    teacher = build_teacher(SIZE, load_weights(chosen.source, study / "results/sources"))
    for block in student.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
        torch.nn.init.zeros_(block.attn.proj.bias)
    assert student.num_prefix_tokens < teacher.num_prefix_tokens
    assert relative_errors(student, teacher, [shown_images(chosen, 4, study)]) == pytest.approx([1.0, 1.0])


def test_errors_before_and_after_are_the_same_of_a_model_that_no_step_changed(study):
    rows = pd.DataFrame(block_errors([folder("relu", "copy"), folder("relu", "random")], images=6, **where(study)))
    before, after = (rows[rows["trained"] == trained] for trained in (False, True))
    assert list(before["error"]) == pytest.approx(list(after["error"]))
    assert list(before["block"]) == [1, 2, 1, 2]
    assert set(rows["source"]) == {"old"}  # that of the others, for a run without


def test_images_are_spread_over_the_split_and_prepared_as_for_evaluation(study):
    chosen, _ = load_model(folder("relu", "copy") / MODEL)
    images, split = shown_images(chosen, 4, study), read(chosen.dataset, "test", study).images[::3]
    assert images.shape == (4, 1, 16, 16)
    mean, std = chosen.dataset.mean[0], chosen.dataset.std[0]
    torch.testing.assert_close(images, (split / 255 - mean) / std)
    assert len(shown_images(chosen, 1000, study)) == 12


def test_maps_are_what_the_pooled_query_attends_to(study):
    found = maps_beside([folder("inline", "fullcopy"), folder("ttt", "copy")], images=2, blocks=[-1], **where(study))
    assert found.names == ("Softmax", "InLine\nFullCopy", "TTT\nCopy")
    assert found.blocks == (2,)
    assert found.maps[2] == (None,)
    assert found.images.shape == (2, 16, 16, 1)
    chosen, student = load_model(folder("inline", "fullcopy") / MODEL)
    expected = attention_map(student, shown_images(chosen, 2, study)).mean(1)[:, 0, 1:].reshape(2, 4, 4)
    torch.testing.assert_close(torch.from_numpy(found.maps[1][0]), expected)


def test_what_is_negative_is_green_and_is_told_where_there_is_any():
    positive = np.linspace(0.0, 1.0, 16).reshape(1, 4, 4)
    for shown, is_signed in ((positive, False), (positive - 0.4, True)):
        figure = maps(Maps(np.zeros((1, 8, 8, 1)), (1,), ("Softmax", "TTT"), ((shown,), (None,)), "old"))
        (image,) = (image for ax in figure.axes for image in ax.images if image.get_array().shape == (4, 4))
        red, green, blue = np.moveaxis(image.to_rgba(shown[0])[..., :3], -1, 0)
        assert ("Green: negative" in figure.get_supxlabel()) == is_signed
        np.testing.assert_array_equal(green - np.maximum(red, blue) > 0.05, shown[0] < 0)


def test_runs_that_cannot_stand_side_by_side_are_refused(study):
    with pytest.raises(BlocksError, match="random/none/seed0: uses no source; name a run"):
        maps_beside([folder("relu", "random")], images=1, **where(study))
    with pytest.raises(BlocksError, match="block 2 is none of the models'; allowed: -2 to 1"):
        maps_beside([folder("relu", "copy")], images=1, blocks=[2], **where(study))
    chosen, model = load_model(folder("relu", "copy") / MODEL)
    other: RunSpec = changed(chosen, dataset=json.loads(changed(chosen.dataset, mean=[0.1]).model_dump_json()))
    save_model(model, other, folder("relu", "other") / MODEL)
    with pytest.raises(BlocksError, match="differ in dataset: draw them apart"):
        maps_beside([folder("relu", "copy"), folder("relu", "other")], images=1, **where(study))


def test_the_commands_measure_and_draw(study, capsys):
    assert main(["blocks", "runs", "--data", ".", "--images", "4", "--out", "blocks.csv"]) == 0
    found = read_blocks(Path("blocks.csv"))
    assert len(found) == 4 * 2 * 2
    assert main(["figure", "blocks", "blocks.csv", "--out", "blocks.png"]) == 0
    runs = [str(folder("inline", "fullcopy")), str(folder("ttt", "copy"))]
    assert main(["maps", *runs, "--data", ".", "--images", "2", "--out", "maps.png", "maps.pdf"]) == 0
    assert all(Path(name).stat().st_size > 1000 for name in ("blocks.png", "maps.png", "maps.pdf"))
    config = yaml.safe_load(CONFIG.read_text()) | {"data": "."}
    Path("config.yaml").write_text(yaml.safe_dump(config | {"results": "elsewhere"}))
    line = refusal(capsys, "maps", *runs, "--out", "maps.png")
    assert "elsewhere/sources/" in line
    Path("other.yaml").write_text(yaml.safe_dump(config))
    assert main(["maps", *runs, "--config", "other.yaml", "--images", "1", "--out", "configured.png"]) == 0
    assert "nosuch: no such folder" in refusal(capsys, "maps", "nosuch", "--out", "maps.png")
    assert "nosuch: no such folder" in refusal(capsys, "blocks", runs[0], "nosuch", "--out", "blocks.csv")
