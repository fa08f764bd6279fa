"""A trained run out of distribution: which model, which images, which of its answers count."""

import json
import math
from pathlib import Path

import PIL.Image
import pytest
import timm.data
import torch
from tiny import RECIPE, changed, dataset, one_line, spec

from linvit import accuracy
from linvit.accuracy import Restricted, accuracy_of
from linvit.config import Dataset, UserError
from linvit.convert import export
from linvit.device import pick_device
from linvit.files import is_whole, write_sealed
from linvit.grid import Evaluation, RunSpec
from linvit.results import collect_ood
from linvit.run import build_student
from linvit.sources import to_safetensors
from linvit.trained import ModelError, load_model, save_model

NAMES = [f"n{number:02}" for number in range(7)]
SPEC = spec("unused.npz", dataset=dataset("unused.npz", name="pictures", classes=len(NAMES)))


def write_run(folder: Path, bias: list[float], run: RunSpec = SPEC) -> Path:
    """A run's folder with a model that gives every image these logits."""
    model = build_student(run, None)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor(bias))
    save_model(model, run, folder / "model.safetensors")
    return folder


def write_shifted(root: Path, images: dict[str, int], **changes) -> Dataset:
    """A further test split: as many images of each class as asked for."""
    for name, n in images.items():
        for number in range(n):
            (root / "shifted" / name).mkdir(parents=True, exist_ok=True)
            PIL.Image.new("L", (20, 20), 100).save(root / "shifted" / name / f"{number}.png")
    (root / "names.txt").write_text("\n".join(NAMES))
    (root / "subset.txt").write_text("\n".join(images))
    fields = {"name": "shifted", "npz": None, "folder": "shifted", "test": ".", "classes": len(NAMES)}
    lists = {"class_names": str(root / "names.txt"), "subset": str(root / "subset.txt")}
    sizes = {"train_size": None, "test_size": sum(images.values())}
    return dataset("unused", **fields | lists | sizes | {"test_of": "pictures"} | changes)


def test_only_the_classes_of_the_subset_can_be_answered(tmp_path):
    """All images look alike: class 1 has the highest logit, of the subset class 4."""
    run = write_run(tmp_path / "run", [0.0, 9.0, 1.0, 0.0, 3.0, 0.0, 2.0])
    shifted = write_shifted(tmp_path, {"n02": 2, "n04": 5, "n06": 1})
    found = accuracy_of(run, shifted, data_root=tmp_path)
    assert (found["images"], found["top1"], found["top5"]) == (8, 100 * 5 / 8, 100)


def test_without_a_subset_every_class_can_be_answered(tmp_path):
    run = write_run(tmp_path / "run", [0.0, 9.0, 1.0, 0.5, 3.0, 0.1, 2.0])
    shifted = write_shifted(tmp_path, dict.fromkeys(NAMES, 1), subset=None)
    found = accuracy_of(run, shifted, data_root=tmp_path)
    assert found["top1"] == pytest.approx(100 / 7)
    assert found["top5"] == pytest.approx(100 * 5 / 7)


def test_dropped_logits_are_below_all_others_and_the_rest_are_as_they_were():
    logits = torch.tensor([[-5.0, 3.0, -7.0, 8.0]])
    answers = Restricted(torch.nn.Identity(), [0, 2], classes=4)(logits)
    assert answers.tolist() == [[-5.0, -torch.inf, -7.0, -torch.inf]]


def test_what_is_written_is_what_the_table_reads(tmp_path):
    run = write_run(tmp_path / "run", [0.0] * 7)
    shifted = write_shifted(tmp_path, {"n02": 2, "n04": 1})
    out = tmp_path / "run" / "ood" / "shifted.json"
    found = accuracy_of(run, shifted, data_root=tmp_path)
    write_sealed(out, found)
    written = json.loads(out.read_text())
    assert is_whole(out.read_bytes())
    assert {key: written[key] for key in written if key != "sha256"} == found
    assert set(found) == {"run", "dataset", "images", "top1", "top5", "versions", "commit"}
    evaluation = Evaluation(run=SPEC, dataset=shifted)
    row = collect_ood([out], {evaluation.name: evaluation}).loc[0]
    assert (row["run"], row["dataset"], row["top1"]) == (SPEC.name, "shifted", found["top1"])


def test_images_are_prepared_as_for_the_runs_own_test_split(tmp_path, monkeypatch):
    """By its statistics and its recipe, whatever the further split's own entry says."""
    recipe = changed(RECIPE, batch_size=2, precision="bfloat16")
    run = write_run(tmp_path / "run", [0.0] * 7, SPEC.model_copy(update={"recipe": recipe}))
    shifted = write_shifted(tmp_path, {"n02": 2, "n04": 1}, mean=(0.1,), std=(0.9,))
    seen = []

    def look(model, batches, precision):
        seen.append((precision, *batches))
        return {"top1": 0.0, "top5": 0.0}

    monkeypatch.setattr(accuracy, "evaluate", look)
    accuracy_of(run, shifted, data_root=tmp_path)
    ((precision, (images, labels), (_, last)),) = seen
    assert precision == "bfloat16"
    assert torch.cat([labels, last]).tolist() == [2, 2, 4]
    assert images.shape == (2, 1, 16, 16)
    assert torch.allclose(images.cpu(), torch.tensor((100 / 255 - 0.4) / 0.2))


TOLD = {
    "mean": [[0.4, 0.5], "x", None, [math.nan], [], ["x"], 3],
    "std": [[-1.0], [0.0], [math.nan], [0.1, 0.2], "x", None],
    "crop_pct": [0, 1e-9, 2.0, "x", math.nan, True],
    "interpolation": ["random", 3, ""],
    "input_size": ["x", [1], [1, 16, -16], [1.5, 16, 16]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in TOLD.items() for value in values], ids=repr)
def test_images_that_cannot_be_prepared_as_a_configuration_says_are_told_with_file_and_key(tmp_path, key, value):
    export(write_run(tmp_path / "run", [0.0] * 7), tmp_path / "out")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    del config["sha256"]  # on purpose
    config["pretrained_cfg"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        accuracy_of(tmp_path / "out", write_shifted(tmp_path, {"n02": 2}), data_root=tmp_path)
    assert one_line(caught.value).startswith(f"{path}: pretrained_cfg.{key}")


def test_what_a_configuration_leaves_out_is_as_timm_has_it(tmp_path):
    export(write_run(tmp_path / "run", [0.0] * 7), tmp_path / "out")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    del config["sha256"], config["pretrained_cfg"]["crop_pct"]
    config["pretrained_cfg"]["interpolation"] = None
    path.write_text(json.dumps(config))
    opened = accuracy._converted(tmp_path / "out", SPEC.dataset)
    assert (opened.recipe.eval_crop, opened.recipe.interpolation) == (timm.data.DEFAULT_CROP_PCT, "bicubic")


def test_a_split_of_another_data_set_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [0.0] * 7)
    for other in (write_shifted(tmp_path, {"n02": 1}, test_of="imagenet"), dataset("x.npz")):
        with pytest.raises(UserError, match="is no test split of 'pictures'") as caught:
            accuracy_of(run, other, data_root=tmp_path)
        one_line(caught.value)


def test_a_deleted_model_is_told_with_what_to_do(tmp_path):
    run = tmp_path / "run"
    for make, told in (
        (lambda: None, "run: no such folder$"),
        (run.mkdir, "run/model.safetensors: not found; allowed: the folder of a finished run"),
        ((run / "metrics.json").touch, "run/model.safetensors: not found; delete metrics.json beside it"),
    ):
        make()
        with pytest.raises(ModelError, match=told) as caught:
            accuracy_of(run, dataset("x.npz"), data_root=tmp_path)
        one_line(caught.value)


def test_a_model_comes_back_with_its_spec_and_every_parameter(tmp_path):
    run = SPEC.model_copy(update={"seed": 3})
    model = build_student(run, None).to(pick_device())
    save_model(model, run, tmp_path / "model.safetensors")
    found, loaded = load_model(tmp_path / "model.safetensors")
    assert found == run
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].cpu()) for name, tensor in loaded.state_dict().items())


def test_a_model_of_before_there_were_checksums_is_read(tmp_path):
    model = build_student(SPEC, None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_safetensors(model.state_dict(), {"spec": SPEC.to_json()}))
    found, loaded = load_model(path)
    assert found == SPEC
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_another_weight_or_spec_than_was_saved_is_damage(tmp_path):
    path = write_run(tmp_path, [0.0] * 7) / "model.safetensors"
    content = path.read_bytes()
    for changed_bytes in (content[:-1] + b"\1", content.replace(b"bilinear", b"bicubic ")):
        path.write_bytes(changed_bytes)
        with pytest.raises(ModelError, match=r"model.safetensors: not a trained model"):
            load_model(path)


@pytest.mark.parametrize("damage", ["cut off", "no model", "of another shape", "without a spec"])
def test_a_damaged_model_is_named_in_one_line(tmp_path, damage):
    path = write_run(tmp_path, [0.0] * 7) / "model.safetensors"
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "no model":
        path.write_bytes(b"<!doctype html>")
    elif damage == "of another shape":
        save_model(torch.nn.Linear(2, 2), SPEC, path)
    else:
        path.write_bytes(to_safetensors({"x": torch.zeros(1)}, {"a": "b"}))
    with pytest.raises(UserError) as caught:
        load_model(path)
    assert str(path) in one_line(caught.value)
