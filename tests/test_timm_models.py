"""The registered models by timm's own checks: forward, backward, features, classifiers, export, checkpoints."""

import subprocess
import sys
import warnings

import models
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import load_checkpoint
from timm.models._hub import save_for_hf
from torch import nn

import linvit
from linvit.catalogue import SIZES, VARIANTS
from linvit.vit import build_vit

torch.set_num_threads(1)

NAMES = linvit.register()
TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}


def create(variant: str, **options) -> nn.Module:
    """A registered model, its dimensions made small by timm's own arguments."""
    torch.manual_seed(0)
    return timm.create_model(f"linvit_{variant}_small_patch16_224", **{"num_classes": 3, **TINY, **options})


def test_every_variant_and_size_is_there_once():
    assert timm.list_models("linvit_*", include_tags=False) == sorted(NAMES)
    assert len(NAMES) == len(VARIANTS) * len(SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # timm warns of a name that is registered again
        assert linvit.register() == NAMES


def test_nothing_is_registered_before_it_is_asked_for():
    code = "import timm, linvit, linvit.timm_models; assert not timm.list_models('linvit*'); linvit.register()"
    code += "; assert len(timm.list_models('linvit*')) == 19; from linvit.timm_models import *"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_its_dimensions(size):
    with torch.device("meta"):
        ours = timm.create_model(f"linvit_relu_{size}_patch16_224", num_classes=10)
        reference = build_vit(SIZES[size], VARIANTS["relu"], num_classes=10)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in reference.named_parameters()}


def test_a_model_says_how_its_images_are_prepared():
    """As DeiT's are, of which it is made."""
    deit = timm.create_model("deit_small_patch16_224", depth=1)
    assert timm.data.resolve_model_data_config(create("relu")) == timm.data.resolve_model_data_config(deit)


def test_there_are_no_weights_to_download():
    with pytest.raises(RuntimeError, match="pretrained weights"):
        create("relu", pretrained=True)
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("linvit_relu_small_patch16_224.deit", **TINY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_backward_reach_every_parameter(variant):
    model = create(variant, drop_path_rate=0.2).train()
    models.perturb(model, 0.1, seed=1)
    torch.manual_seed(0)
    logits = model(models.images(batch=4))
    assert logits.shape == (4, 3)
    logits.square().sum().backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in learning.items() if p.grad is None or not p.grad.any()} == set()
    assert all(p.grad.isfinite().all() for p in learning.values())
    assert [block.drop_path1.drop_prob for block in model.blocks[1:]] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_blocks_give_the_same_gradients(variant):
    gradients = []
    for enable in (False, True):
        model = create(variant).train()
        model.set_grad_checkpointing(enable)
        model(models.images()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_are_those_of_the_blocks(variant):
    model, images = create(variant).eval(), models.images()
    prefix, tokens = model.num_prefix_tokens, []
    handles = [block.register_forward_hook(lambda *call: tokens.append(call[2][:, prefix:])) for block in model.blocks]
    final, maps = model.forward_intermediates(images)
    for handle in handles:
        handle.remove()
    assert [m.shape for m in maps] == [(2, 16, 4, 4)] * 3
    assert all(torch.equal(m.flatten(2).mT, t) for m, t in zip(maps, tokens, strict=True))
    assert torch.equal(final, model.forward_features(images))
    assert torch.equal(model.forward_head(final), model(images))
    (last,) = model.get_intermediate_layers(images, 1)
    assert torch.equal(last, tokens[-1])
    extractor = create(variant, features_only=True, out_indices=[0, 2]).eval()
    extractor.model.load_state_dict({n: t for n, t in model.state_dict().items() if n in extractor.model.state_dict()})
    assert extractor.feature_info.channels() == [16, 16]
    assert extractor.feature_info.reduction() == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(extractor(images), (maps[0], maps[2]), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_classifier_is_replaced_or_left_out(variant):
    model, images = create(variant).eval(), models.images()
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert features.shape == (2, model.num_features)
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    model.reset_classifier(0)
    assert torch.equal(model(images), features)
    headless = create(variant, num_classes=0).eval()
    headless.load_state_dict(model.state_dict())
    assert torch.equal(headless(images), features)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_program_computes_the_same_for_any_batch(variant):
    """The graph that `torch.onnx.export` starts from too; ONNX itself is not needed here."""
    model = create(variant).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (models.images(),), dynamic_shapes=({0: batch},)).module()
    for size in (2, 5):
        images = models.images(batch=size)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_in_bfloat16_is_close_to_itself_in_float32(variant):
    model, images = create(variant).eval(), models.images()
    expected = model(images)
    logits = model.bfloat16()(images.bfloat16())
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).norm() < 0.03 * expected.norm()
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_are_read_by_timm(variant, name, tmp_path):
    model = create(variant)
    models.perturb(model, 0.1, seed=1)
    if name.endswith("pt"):
        torch.save({"state_dict": model.state_dict()}, tmp_path / name)
    else:
        save_file(model.state_dict(), tmp_path / name)
    others = [create(variant), create(variant, checkpoint_path=str(tmp_path / name))]
    load_checkpoint(others[0], str(tmp_path / name))
    for other in others:
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in other.state_dict().items())


@pytest.mark.parametrize("variant", ["relu", "ttt"])
def test_a_checkpoint_goes_over_to_another_grid_and_other_classes(variant, tmp_path):
    model = create(variant)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    file = {"file": str(tmp_path / "model.safetensors"), "num_classes": 3}
    larger = create(variant, img_size=32, num_classes=5, pretrained=True, pretrained_cfg_overlay=file)
    assert torch.equal(larger.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    assert larger(models.images(models.SIZE.model_copy(update={"image_size": 32}))).shape == (2, 5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_that_timm_saved_opens_as_the_same_operator(variant, tmp_path):
    """Its config.json holds the architecture's name without a tag."""
    model = create(variant).eval()
    save_for_hf(model, tmp_path, model_args=TINY, safe_serialization=True)
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(opened.blocks[0].attn) is type(model.blocks[0].attn)
    assert torch.equal(opened(models.images()), model(models.images()))
