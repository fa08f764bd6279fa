"""Published checkpoints: stand-ins with the keys of the authors' own files give the ViT that is in them, or a reason.

Each stand-in is built as its authors' training code builds and saves it, from modules of the same names, but wee.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import Block
from tiny import CLASSES, SIZE, one_line, softmax_weights, source
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.checkpoints import CheckpointError, convert, read
from linvit.files import sha256_of
from linvit.sources import MANIFEST, SourceError, fetch, load
from linvit.vit import build_vit, fix_positions

DIM = SIZE.dim


def vit(seed: int = 3, *, classes: int = 0, positions: str = "learned") -> nn.Module:
    """timm's ViT: what MoCo v3 and DeiT derive from, and what DINO, iBOT and MAE copy."""
    model = build_vit(SIZE, num_classes=classes)
    state = softmax_weights(classes=classes, seed=seed)
    if positions == "sincos":
        fix_positions(model)
        state["pos_embed"] = model.pos_embed.data
    model.load_state_dict(state)
    return model


def projector(layers: int, width: int, hidden: int = 8, out: int = 6) -> nn.Sequential:
    """moco/builder.py: `_build_mlp`."""
    mlp = []
    for layer in range(layers):
        last = layer == layers - 1
        mlp.append(nn.Linear(width if layer == 0 else hidden, out if last else hidden, bias=False))
        mlp += [nn.BatchNorm1d(out, affine=False)] if last else [nn.BatchNorm1d(hidden), nn.ReLU()]
    return nn.Sequential(*mlp)


def multicrop(seed: int) -> nn.Module:
    """main_ibot.py: a backbone and the head of models/head.py, with two weight-normalised last layers."""
    head = nn.Module()
    head.mlp = nn.Sequential(nn.Linear(DIM, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    for name in ("last_layer", "last_layer2"):
        layer = nn.Module()
        layer.weight_g, layer.weight_v = nn.Parameter(torch.ones(9, 1)), nn.Parameter(torch.randn(9, 4))
        setattr(head, name, layer)
    model = nn.Module()
    model.backbone, model.head = vit(seed), head
    return model


def distributed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `DistributedDataParallel` names it."""
    return {f"module.{name}": tensor for name, tensor in state.items()}


def optimizer_state(model: nn.Module, optimizer: type = torch.optim.AdamW, lr: float = 1e-4) -> dict:
    """After a step of length zero, so that it holds moments."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = optimizer(parameters, lr=0.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trained.step()
    trained.param_groups[0]["lr"] = lr
    return trained.state_dict()


def moco() -> dict:
    """main_moco.py, as published: `vit-b-300ep.pth.tar`."""
    model = nn.Module()
    for name, seed in (("base_encoder", 3), ("momentum_encoder", 4)):
        encoder = vit(seed, positions="sincos")
        encoder.head = projector(3, DIM)
        setattr(model, name, encoder)
    model.predictor = projector(2, 6)
    model.momentum_encoder.requires_grad_(False)
    return {
        "epoch": 300,
        "arch": "vit_base",
        "state_dict": distributed(model.state_dict()),
        "optimizer": optimizer_state(model),
    }


def moco_linear() -> dict:
    """main_lincls.py, as published: `linear-vit-b-300ep.pth.tar`."""
    model = vit(classes=CLASSES, positions="sincos")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head.")
    return {
        "epoch": 90,
        "arch": "vit_base",
        "state_dict": distributed(model.state_dict()),
        "best_acc1": torch.tensor(76.7),
        "optimizer": optimizer_state(model, torch.optim.SGD),
    }


def ibot_full() -> dict:
    """main_ibot.py: `checkpoint.pth`."""
    student, teacher = multicrop(4), multicrop(3)
    student.backbone.masked_embed = nn.Parameter(torch.zeros(1, DIM))
    return {
        "student": distributed(student.state_dict()),
        "teacher": teacher.state_dict(),
        # Its schedules are numpy arrays.
        "optimizer": optimizer_state(student, lr=np.linspace(0, 1, 5)[3]),
        "epoch": 400,
        "args": argparse.Namespace(arch="vit_base", global_crops_scale=(0.14, 1.0), seed=0),
        "ibot_loss": {"center": torch.zeros(1, 9), "center2": torch.zeros(1, 1, 9)},
        "fp16_scaler": {"scale": 65536.0, "growth_interval": 2000},
    }


def mae(decoder: bool) -> dict:
    """models_mae.py: `mae_visualize_vit_base.pth`, or `mae_pretrain_vit_base.pth` without its decoder."""
    model = vit(positions="sincos")
    if decoder:
        model.decoder_embed = nn.Linear(DIM, 8)
        model.mask_token = nn.Parameter(torch.randn(1, 1, 8))
        model.decoder_pos_embed = nn.Parameter(torch.randn(1, 17, 8), requires_grad=False)
        model.decoder_blocks = nn.ModuleList([Block(8, 2, qkv_bias=True) for _ in range(2)])
        model.decoder_norm, model.decoder_pred = nn.LayerNorm(8), nn.Linear(8, 16)
    return {"model": model.state_dict()}


def training_of_deit() -> dict:
    """main.py of DeiT, from which MAE's is derived, saves more than is published."""
    model = vit(classes=CLASSES)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer_state(model),
        "lr_scheduler": {"base_values": [1e-4]},
        "epoch": 299,
        "scaler": {"scale": 65536.0},
        "args": argparse.Namespace(model="deit_base_patch16_224"),
    }


def deit_distilled() -> dict:
    """models.py of DeiT: `deit_base_distilled_patch16_224`."""
    model = vit(classes=CLASSES)
    model.dist_token = nn.Parameter(torch.zeros(1, 1, DIM))
    model.pos_embed = nn.Parameter(torch.zeros(1, 18, DIM))
    model.head_dist = nn.Linear(DIM, CLASSES)
    return {"model": model.state_dict()}


def plain(prefix: str = "", seed: int = 3, **options) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in vit(seed, **options).state_dict().items()}


def features(state: dict[str, Tensor], images: Tensor, prefix: str = "") -> Tensor:
    """A pre-norm ViT [B, N, C] written out, from the keys of a published state dict."""

    def weights(name: str) -> tuple[Tensor, Tensor]:
        return state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (DIM,), *weights(name), eps=1e-6)

    x = F.conv2d(images, *weights("patch_embed.proj"), stride=SIZE.patch_size).flatten(2).mT
    x = torch.cat([state[f"{prefix}cls_token"].expand(len(x), 1, DIM), x], dim=1) + state[f"{prefix}pos_embed"]
    for block in range(SIZE.depth):
        name = f"blocks.{block}"
        qkv = F.linear(norm(x, f"{name}.norm1"), *weights(f"{name}.attn.qkv"))
        q, k, v = qkv.reshape(*qkv.shape[:2], 3, SIZE.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        x = x + F.linear((attention @ v).transpose(1, 2).flatten(2), *weights(f"{name}.attn.proj"))
        hidden = F.gelu(F.linear(norm(x, f"{name}.norm2"), *weights(f"{name}.mlp.fc1")))
        x = x + F.linear(hidden, *weights(f"{name}.mlp.fc2"))
    return norm(x, "norm")


# What is saved; entry and prefix of the ViT that must come out of it; its layout; what is left out.
PUBLISHED: dict[str, tuple[Callable[[], dict], str | None, str, str, dict[str, int]]] = {
    "MoCo v3": (
        moco,
        "state_dict",
        "module.base_encoder.",
        "MoCo v3",
        # 16 parameters of two blocks and patch embedding, token, positions, norm; a layer's BatchNorm has 3 buffers.
        {"projector": 16, "momentum_encoder": 30 + 16, "predictor": 10},
    ),
    "iBOT, backbone of the teacher": (lambda: {"state_dict": plain()}, "state_dict", "", "timm", {}),
    "iBOT, backbone of the student": (
        lambda: {"state_dict": plain() | {"masked_embed": torch.zeros(1, DIM)}},
        "state_dict",
        "",
        "timm",
        {"mask_token": 1},
    ),
    "iBOT, whole": (ibot_full, "teacher", "backbone.", "DINO, iBOT", {"head": 10, "student": 41, "ibot_loss": 2}),
    "DINO, backbone": (plain, None, "", "timm", {}),
    "MAE": (lambda: mae(decoder=False), "model", "", "timm", {}),
    "MAE with its decoder": (
        lambda: mae(decoder=True),
        "model",
        "",
        "timm",
        {"decoder": 2 * 12 + 7, "mask_token": 1},
    ),
    "DeiT": (lambda: {"model": plain(classes=CLASSES)}, "model", "", "timm", {}),
    "DeiT, while training": (training_of_deit, "model", "", "timm", {}),
    "compiled and distributed": (
        lambda: {"state_dict": plain("_orig_mod.module.")},
        "state_dict",
        "_orig_mod.module.",
        "timm",
        {},
    ),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(("raw", "entry", "prefix", "layout", "dropped"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_file_gives_the_vit_that_is_in_it(tmp_path, raw, entry, prefix, layout, dropped, zipped):
    raw = raw()
    torch.save(raw, tmp_path / "published.pth.tar", _use_new_zipfile_serialization=zipped)
    found = read(tmp_path / "published.pth.tar")

    state = raw[entry] if entry else raw
    classes = CLASSES if "head.weight" in found.tensors else 0
    model = build_vit(SIZE, num_classes=classes).eval()
    model.load_state_dict(found.tensors)  # strict: these keys and no other
    images = torch.randn(2, SIZE.channels, SIZE.image_size, SIZE.image_size)
    torch.testing.assert_close(model.forward_features(images), features(state, images, prefix), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(tensor, state[f"{prefix}{name}"]) for name, tensor in found.tensors.items())

    moments = {"optimizer": 3 * len(raw["optimizer"]["state"])} if "optimizer" in raw else {}
    assert (found.layout, found.dropped) == (layout, dropped | moments)
    kept = len(found.tensors)
    assert kept + sum(found.dropped.values()) == count(raw), "a tensor is neither kept nor left out"


def count(value: object) -> int:
    if isinstance(value, dict):
        return sum(count(entry) for entry in value.values())
    return int(isinstance(value, Tensor))


@pytest.mark.parametrize("by_url", [False, True], ids=["path", "url"])
def test_a_source_is_fetched_from_the_authors_own_file(tmp_path, by_url):
    raw, path = moco(), tmp_path / "vit-b-300ep.pth.tar"
    torch.save(raw, path)
    origin = {"url": path.as_uri(), "sha256": sha256_of(path)} if by_url else {"path": str(path)}
    manifest = fetch(source(**origin), tmp_path / "out")
    assert manifest["converted"] == {
        "layout": "MoCo v3",
        "dropped": {
            "projector": 16,
            "momentum_encoder": 46,
            "predictor": 10,
            "optimizer": 3 * len(raw["optimizer"]["state"]),
        },
    }
    assert manifest == json.loads((tmp_path / "out" / MANIFEST).read_text())
    stored = load(tmp_path / "out").tensors
    assert set(stored) == set(plain())
    assert torch.equal(stored["pos_embed"], raw["state_dict"]["module.base_encoder.pos_embed"])
    assert not stored["pos_embed"][:, 0].any(), "the class token's position is zero"


def test_safetensors_are_converted_too(tmp_path):
    save_file(plain("backbone."), tmp_path / "ibot.safetensors")
    found = read(tmp_path / "ibot.safetensors")
    assert found.tensors.keys() == plain().keys()
    assert (found.layout, found.dropped) == ("DINO, iBOT", {})


def test_averaged_weights_come_before_the_last_ones_as_in_timm():
    found = convert({"model": plain(seed=1), "model_ema": plain(seed=2)})
    assert torch.equal(found.tensors["cls_token"], plain(seed=2)["cls_token"])
    assert found.dropped == {"model": len(plain())}


# --- what is refused --------------------------------------------------------------------------------------


def refusal(raw: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(raw)
    return one_line(caught.value)


def test_the_linear_probe_of_moco_is_recognised_and_refused():
    text = refusal(moco_linear())
    assert "linear probe" in text
    assert "linear-vit-b-300ep" in text


def test_a_classifier_trained_as_a_whole_is_no_linear_probe():
    assert "head.weight" in convert(training_of_deit()).tensors


def test_a_distilled_deit_is_refused_with_the_reason():
    text = refusal(deit_distilled())
    assert "distilled" in text
    assert "dist_token" in text


def test_a_refusal_names_source_and_file(tmp_path):
    path = tmp_path / "linear-vit-b-300ep.pth.tar"
    torch.save(moco_linear(), path)
    with pytest.raises(SourceError, match="linear probe") as caught:
        fetch(source(path=str(path)), tmp_path / "out")
    assert "'old/wee'" in one_line(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [moco, ibot_full], ids=["MoCo v3", "iBOT"])
def test_parameters_that_no_layout_accounts_for_are_named_and_counted(make):
    raw = make()
    state = raw.get("state_dict") or raw["teacher"]
    state |= {"queue": torch.zeros(3), "queue_ptr": torch.zeros(1)}
    text = refusal(raw)
    assert "'queue' (2 in all)" in text


def test_tensors_in_an_unknown_entry_are_named():
    assert "'queue'" in refusal({"model": plain(), "epoch": 3, "queue": [torch.zeros(3)]})


def test_a_parameter_that_is_there_twice_is_refused():
    assert "module." in refusal(plain() | {"module.cls_token": torch.zeros(1, 1, DIM)})


def test_a_layout_of_blocks_that_a_softmax_vit_lacks_is_refused(tmp_path):
    """Layer scale, as in DINOv2, whose mask token is MAE's by name."""
    extra = {"mask_token": torch.zeros(1, DIM), "blocks.0.ls1.gamma": torch.ones(DIM)}
    torch.save(plain() | extra, tmp_path / "dinov2.pth")
    with pytest.raises(SourceError, match=r"unknown parameter 'blocks\.0\.ls1\.gamma' \(1 in all\)"):
        fetch(source(path=str(tmp_path / "dinov2.pth")), tmp_path / "out")


@pytest.mark.parametrize("raw", [[], 3, None, torch.zeros(3), {}, {"model": {}}, {0: torch.zeros(3)}], ids=repr)
def test_what_holds_no_state_dict_is_refused(raw):
    refusal(raw)


def test_a_projector_is_no_classifier(tmp_path):
    """A MoCo v3 file, converted by hand with its projector left in."""
    torch.save(plain() | {"head.0.weight": torch.zeros(3, DIM)}, tmp_path / "by_hand.pth")
    with pytest.raises(SourceError, match=r"unknown parameter 'head\.0\.weight'"):
        fetch(source(path=str(tmp_path / "by_hand.pth")), tmp_path / "out")


# --- what a file is pickled with --------------------------------------------------------------------------


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("entry", ["args", "optimizer", "state_dict"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, entry, zipped):
    path, trace = tmp_path / "published.pth.tar", tmp_path / "it ran"
    torch.save(moco() | {entry: {"x": Malicious(trace)}}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="mkdir") as caught:
        read(path)
    one_line(caught.value)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "it would have run"


def test_arguments_hold_no_code_either(tmp_path):
    path, trace = tmp_path / "published.pth", tmp_path / "it ran"
    torch.save({"model": plain(), "args": argparse.Namespace(model=Malicious(trace))}, path)
    with pytest.raises(CheckpointError, match="mkdir"):
        read(path)
    assert not trace.exists()


@pytest.mark.parametrize("number", [np.float64(0.3), np.float32(0.3), np.int64(3)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("core", ["core", "_core"], ids=["numpy 1", "numpy 2"])
def test_numpy_numbers_are_read_whatever_numpy_wrote_them(tmp_path, number, core):
    path = tmp_path / "published.pth"
    torch.save({"teacher": plain("backbone."), "lr": number}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    assert b"numpy._core.multiarray\n" in content or b"numpy.core.multiarray\n" in content
    for name in (b"numpy._core.", b"numpy.core."):
        content = content.replace(name + b"multiarray\n", f"numpy.{core}.multiarray\n".encode())
    path.write_bytes(content)
    assert read(path).tensors.keys() == plain().keys()


def test_a_checkpoint_is_read_onto_the_cpu_in_its_own_precision(tmp_path):
    torch.save({"model": {name: tensor.half() for name, tensor in plain().items()}}, tmp_path / "half.pth")
    found = read(tmp_path / "half.pth").tensors
    assert {(tensor.dtype, tensor.device.type) for tensor in found.values()} == {(torch.float16, "cpu")}
