"""Conversions: what comes back from a folder is what was written, bit by bit, by linvit and by timm."""

import json
from pathlib import Path

import models
import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from timm.models.vision_transformer import VisionTransformer
from tiny import changed, one_line, softmax_weights, spec

import linvit
from linvit import trained
from linvit.catalogue import INITS, VARIANTS
from linvit.config import UserError, Variant
from linvit.convert import convert, export
from linvit.run import build_student

torch.set_num_threads(1)

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
DEIT = "deit_small_patch16_224"
FULLCOPY = INITS["fullcopy"]


def source(folder: Path, architecture: str = DEIT, **options) -> VisionTransformer:
    """A ViT with random weights in a folder that timm opens."""
    torch.manual_seed(0)
    model = timm.create_model(architecture, **(SMALL | {"num_classes": 5} | options)).eval()
    models.perturb(model, 0.1, seed=1)
    save_for_hf(model, folder, model_args=SMALL | options, safe_serialization=True)
    return model


def refused(*arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        convert(*arguments, **options)
    return one_line(caught.value)


def same_when_opened(folder: Path, model: VisionTransformer, images: torch.Tensor | None = None) -> None:
    images = models.images() if images is None else images
    linvit.register()
    for opened in (linvit.load(folder), timm.create_model(f"local-dir:{folder}", pretrained=True).eval()):
        assert not opened.training
        assert torch.equal(opened(images), model(images))
        assert [type(block.attn) for block in opened.blocks] == [type(block.attn) for block in model.blocks]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_vit_opens_with_the_same_outputs(variant, tmp_path):
    teacher = source(tmp_path / "teacher")
    converted = convert(str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS[variant], init=FULLCOPY)
    same_when_opened(tmp_path / "out", converted)
    assert torch.equal(converted.blocks[1].mlp.fc1.weight, teacher.blocks[1].mlp.fc1.weight)
    # The classifier is none of FullCopy's.
    assert not torch.equal(converted.head.weight, teacher.head.weight)


FAMILY = {
    "registers": (DEIT, {"reg_tokens": 2}),
    "distilled": ("deit_small_distilled_patch16_224", {}),
    "norms of queries and keys": (DEIT, {"qk_norm": True}),
    "LayerScale": (DEIT, {"init_values": 0.1}),
    "pooling": (DEIT, {"class_token": False, "global_pool": "avg"}),
    "another norm": ("vit_base_patch16_clip_224", {}),
    "any image size": (DEIT, {"dynamic_img_size": True}),
    "no classifier": (DEIT, {"num_classes": 0}),
    "one channel": (DEIT, {"in_chans": 1}),
}


@pytest.mark.parametrize(("architecture", "options"), FAMILY.values(), ids=FAMILY)
def test_the_family_comes_along(architecture, options, tmp_path):
    source(tmp_path / "teacher", architecture, **options)
    converted = convert(str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS["inline"], init=FULLCOPY)
    same_when_opened(tmp_path / "out", converted, models.images()[:, : options.get("in_chans", 3)])


def test_pooling_that_a_variant_needs_is_left_where_it_is(tmp_path):
    """With its norm, which is then copied."""
    teacher = source(tmp_path / "teacher", class_token=False, global_pool="avg")
    converted = convert(str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS["mhla"], init=FULLCOPY)
    assert torch.equal(converted.fc_norm.weight, teacher.fc_norm.weight)
    same_when_opened(tmp_path / "out", converted)


@pytest.mark.parametrize("variant", ["relu", "mhla"])
def test_a_hybrid_keeps_its_blocks(variant, tmp_path):
    source(tmp_path / "teacher")
    init = INITS["fullcopy"]
    converted = convert(
        str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS[variant], init=init, blocks=[0, -1]
    )
    same_when_opened(tmp_path / "out", converted)
    kinds = [type(block.attn).__name__ for block in converted.blocks]
    assert kinds[0] == kinds[2] != kinds[1] == "Attention"


def test_a_checkpoint_of_a_file_is_of_the_architecture_that_is_named(tmp_path):
    teacher = source(tmp_path / "teacher")
    torch.save({"model": teacher.state_dict()}, tmp_path / "deit.pth")
    options = {"variant": VARIANTS["softmax"], "init": changed(FULLCOPY, copy=[*FULLCOPY.copied, "head"])}
    converted = convert(str(tmp_path / "deit.pth"), tmp_path / "out", architecture=DEIT, model_kwargs=SMALL, **options)
    same_when_opened(tmp_path / "out", converted)
    torch.testing.assert_close(converted(models.images()), teacher(models.images()))


def test_a_folders_own_classifier_is_copied_where_that_is_asked_for(tmp_path):
    """Its number of classes is the folder's, not the architecture's."""
    teacher = source(tmp_path / "teacher")
    whole = changed(FULLCOPY, name="whole", copy=[*FULLCOPY.copied, "head"])
    converted = convert(str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS["relu"], init=whole)
    assert torch.equal(converted.head.weight, teacher.head.weight)


def test_what_is_not_copied_starts_by_the_seed(tmp_path):
    source(tmp_path / "teacher")
    options = {"variant": VARIANTS["relu"], "init": INITS["copy"], "num_classes": 9}
    made = [
        convert(str(tmp_path / "teacher"), tmp_path / f"{n}", seed=seed, **options) for n, seed in enumerate((3, 3, 4))
    ]
    assert made[0].head.out_features == 9
    assert torch.equal(made[0].blocks[0].mlp.fc1.weight, made[1].blocks[0].mlp.fc1.weight)
    assert not torch.equal(made[0].blocks[0].mlp.fc1.weight, made[2].blocks[0].mlp.fc1.weight)
    assert torch.equal(made[0].blocks[0].attn.qkv.weight, made[2].blocks[0].attn.qkv.weight)


def test_a_folder_says_how_images_are_prepared_and_what_it_was_made_of(tmp_path):
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", variant=VARIANTS["relu"], init=FULLCOPY)
    told = json.loads((tmp_path / "out/config.json").read_text())
    images = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "crop_pct": 0.9, "input_size": [3, 16, 16]}
    assert images.items() <= told["pretrained_cfg"].items()
    assert timm.data.resolve_model_data_config(linvit.load(tmp_path / "out"))["crop_pct"] == 0.9
    assert (told["linvit"]["source"], told["linvit"]["init"]["name"]) == ("teacher", "fullcopy")


@pytest.mark.parametrize("variant", ["relu", "ttt"])
def test_a_finished_run_is_exported_as_it_is(variant, tmp_path):
    made = spec("unused.npz", variant)
    model = build_student(made, None).eval()
    models.perturb(model, 0.1, seed=1)
    trained.save_model(model, made, tmp_path / "run/model.safetensors")
    exported = export(tmp_path / "run", tmp_path / "out")
    images = models.images()[:, :1]
    assert torch.equal(exported(images), model(images))
    same_when_opened(tmp_path / "out", exported, images)
    assert torch.equal(linvit.load(tmp_path / "run")(images), model(images))
    config = timm.data.resolve_model_data_config(linvit.load(tmp_path / "out"))
    assert (config["mean"], config["std"], config["crop_pct"]) == ([0.4], [0.2], 1.0)


def test_an_operator_of_ones_own_comes_back(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "from linvit.attention.kernel import ReluAttention\nclass Mine(ReluAttention):\n    pass\n"
    (tmp_path / "own_operator.py").write_text(code)
    source(tmp_path / "teacher")
    mine = Variant(name="mine", target="own_operator:Mine")
    same_when_opened(
        tmp_path / "out", convert(str(tmp_path / "teacher"), tmp_path / "out", variant=mine, init=FULLCOPY)
    )


# --- refusals, each before weights are read ------------------------------------------------------------------

RELU = {"variant": VARIANTS["relu"], "init": FULLCOPY}


def test_what_cannot_be_converted_is_refused_in_one_line_before_weights_are_fetched(tmp_path, monkeypatch):
    create = timm.create_model

    def creating(*arguments, pretrained=False, **options):
        assert not pretrained, "weights were fetched"
        return create(*arguments, **options)

    monkeypatch.setattr(timm, "create_model", creating)
    out = tmp_path / "out"
    assert "did you mean 'deit_small_patch16_224'" in refused("deit_smal_patch16_224", out, **RELU)
    tagged = refused("deit_small_patch16_224.fb_in2k", out, **RELU)
    assert "no weights of this tag; allowed: deit_small_patch16_224.fb_in1k" in tagged
    assert "cannot be linearised; allowed: timm's VisionTransformer" in refused("resnet18", out, **RELU)
    distilled = changed(FULLCOPY, name="fullcopy-distill", distill={})
    assert "distils while it trains" in refused(DEIT, out, variant=VARIANTS["relu"], init=distilled)
    mhla = {"variant": VARIANTS["mhla"], "init": FULLCOPY}
    assert "takes patch tokens alone" in refused("deit_small_distilled_patch16_224", out, **mhla)
    assert "dist_token[0]" in refused("deit_small_distilled_patch16_224", out, **mhla)
    assert "blocks: 12 is none" in refused(DEIT, out, blocks=[12], **RELU)
    assert "refused its arguments" in refused(DEIT, out, model_kwargs={"nosuch": 1}, **RELU)
    whole = {"variant": VARIANTS["relu"], "init": changed(FULLCOPY, name="whole", copy=[*FULLCOPY.copied, "head"])}
    assert "head.weight: the source's shape [1000, 384]" in refused(DEIT, out, num_classes=7, **whole)
    assert "positions sincos" in refused(DEIT, out, model_kwargs={"pos_embed": "none"}, **mhla)
    assert not out.exists()


def test_a_file_that_does_not_fit_is_told_in_one_line(tmp_path):
    torch.save(softmax_weights(), tmp_path / "old.pth")
    out, file = tmp_path / "out", str(tmp_path / "old.pth")
    assert "name it by --model" in refused(file, out, **RELU)
    assert "no model of timm's: 'deit_smal" in refused(file, out, architecture="deit_smal", **RELU)
    assert "lacks 'blocks.10." in refused(file, out, architecture=DEIT, **RELU)
    odd = {**SMALL, "depth": 2}
    assert "has shape [16, 1, 4, 4]" in refused(file, out, architecture=DEIT, model_kwargs=odd, **RELU)
    (tmp_path / "bad.pth").write_bytes(b"half")
    assert "bad.pth: cannot be read" in refused(str(tmp_path / "bad.pth"), out, architecture=DEIT, **RELU)
    assert not out.exists()


def test_a_folder_without_a_model_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no model; allowed: a folder with config.json") as caught:
        linvit.load(tmp_path)
    one_line(caught.value)
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    weights = tmp_path / "out/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(UserError, match=r"out/model.safetensors: cannot be read: ") as caught:
        linvit.load(tmp_path / "out")
    one_line(caught.value)


def edit(folder: Path, **changes) -> None:
    """Change the configuration on purpose: without its checksum it is believed."""
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_bit_that_has_flipped_is_noticed_unless_the_checksum_is_gone(tmp_path):
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    weights = tmp_path / "out/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 64
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors or .*config.json is damaged: .* removes the key sha256"):
        linvit.load(tmp_path / "out")
    edit(tmp_path / "out")
    linvit.load(tmp_path / "out")


def test_an_edited_configuration_is_noticed_unless_the_checksum_is_gone(tmp_path):
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    path = tmp_path / "out/config.json"
    path.write_text(path.read_text().replace('"crop_pct": 0.9', '"crop_pct": 0.8'))
    with pytest.raises(UserError, match=r"config.json is damaged"):
        linvit.load(tmp_path / "out")
    edit(tmp_path / "out")
    assert timm.data.resolve_model_data_config(linvit.load(tmp_path / "out"))["crop_pct"] == 0.8


@pytest.mark.parametrize("place", ["num_classes", "pretrained_cfg.num_classes"])
def test_other_classes_than_the_models_are_refused(tmp_path, place):
    """timm would put a new classifier, random, in the place of the stored one."""
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    told = json.loads((tmp_path / "out/config.json").read_text())["pretrained_cfg"] | {"num_classes": 7}
    edit(tmp_path / "out", **({"num_classes": 7} if place == "num_classes" else {"pretrained_cfg": told}))
    with pytest.raises(UserError, match=f"config.json: {place}: found 7; allowed: 5") as caught:
        linvit.load(tmp_path / "out")
    one_line(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_a_pickle_that_asks_for_memory_is_refused_before_timm_reads_it(tmp_path, name, monkeypatch):
    class Asks:
        def __reduce__(self):
            return bytearray, (4 * 10**9,)

    source(tmp_path / "teacher")
    (tmp_path / "teacher/model.safetensors").unlink()
    torch.save({"x": Asks()}, tmp_path / "teacher" / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpickled"))
    with pytest.raises(UserError, match=f"{name}: cannot be read: it refers to __builtin__.bytearray") as caught:
        linvit.load(tmp_path / "teacher")
    one_line(caught.value)
    assert f"{name}: cannot be read: it refers to" in refused(str(tmp_path / "teacher"), tmp_path / "out", **RELU)


def test_a_second_conversion_is_refused(tmp_path):
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    assert "linearised already" in refused(str(tmp_path / "out"), tmp_path / "again", **RELU)


def test_neither_a_source_nor_a_run_is_written_over(tmp_path):
    teacher = tmp_path / "teacher"
    source(teacher)
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    before = (teacher / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(teacher)
    for folder in (teacher, tmp_path / "link", run / "../teacher"):
        assert "over its own source" in refused(str(teacher), folder, **RELU)
    assert "over its own source" in refused(str(teacher / "model.safetensors"), teacher, architecture=DEIT, **RELU)
    assert "is a run's folder" in refused(str(teacher), run, **RELU)
    assert (teacher / "model.safetensors").read_bytes() == before
    assert [path.name for path in run.iterdir()] == ["spec.json"]


STRANGE = {
    "no JSON": "{",
    "nothing in it": "{}",
    "a list": "[]",
    "no architecture of timm's": {"architecture": "nosuch"},
    "another kind of model": {"architecture": "resnet18", "model_args": {}},
    "a base on timm's hub": {"base": "hf-hub:someone/vit"},
    "a base in another folder": {"base": "local-dir:.."},
    "no class": {"variant": {"name": "x", "target": "os:system"}},
    "no module": {"variant": {"name": "x", "target": "nosuch.module:X"}},
    "no variant": {"variant": 3},
    "an unknown argument": {"nosuch": 1},
    "other sizes": {"embed_dim": 32},
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_a_strange_configuration_is_told_in_one_line(change, tmp_path, monkeypatch):
    source(tmp_path / "teacher")
    convert(str(tmp_path / "teacher"), tmp_path / "out", **RELU)
    edit(tmp_path / "out")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    if isinstance(change, dict):
        # An argument of the model, unless it is a key of the whole file.
        config = config | change if "architecture" in change else config | {"model_args": config["model_args"] | change}
        path.write_text(json.dumps(config))
    else:
        path.write_text(change)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    with pytest.raises(UserError) as caught:
        linvit.load(tmp_path / "out")
    assert one_line(caught.value).startswith(str(tmp_path / "out"))
