"""Sources: every origin ends as one checked safetensors file with its provenance, or as one line why not."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import CLASSES, RGB, SIZE, changed, one_line, softmax_weights, source, spec, store_source, write_npz

from linvit import sources
from linvit.config import IMAGENET_MEAN, IMAGENET_STD
from linvit.files import sha256_of
from linvit.grid import RANDOM, Source
from linvit.run import prepare_source
from linvit.sources import MANIFEST, WEIGHTS, SourceError, fetch, load, store
from linvit.vit import build_vit


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return softmax_weights()


def refusal(prepared: Source, folder: Path) -> str:
    """The one line with which fetching is refused; nothing that could be taken for a source is left behind."""
    with pytest.raises(SourceError) as caught:
        fetch(prepared, folder)
    assert not (folder / WEIGHTS).exists()
    assert not (folder / MANIFEST).exists()
    return one_line(caught.value)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def provenance(folder: Path) -> dict:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return json.loads(file.metadata()["linvit"])


# --- origins ----------------------------------------------------------------------------------------------


def write(tensors: dict[str, torch.Tensor], path: Path, kind: str) -> Path:
    """A checkpoint as people publish them."""
    if kind == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file(tensors, path)
        return path
    wrapped = {
        "plain": tensors,
        "model": {"model": tensors, "epoch": 3},
        "state_dict": {"state_dict": tensors},
        "module": {"state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}},
    }[kind]
    path = path.with_suffix(".pth")
    torch.save(wrapped, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "plain", "model", "state_dict", "module"])
@pytest.mark.parametrize("by_url", [False, True], ids=["path", "url"])
def test_a_checkpoint_is_fetched_by_path_or_by_url(tmp_path, weights, kind, by_url):
    path = write(weights, tmp_path / "published", kind)
    origin = {"url": path.as_uri()} if by_url else {"path": str(path)}
    prepared = source(**origin, sha256=sha256_of(path))
    folder = tmp_path / "sources" / prepared.folder
    manifest = fetch(prepared, folder)
    assert same(load(folder).tensors, weights)
    assert load(folder).grid_size == (4, 4)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, WEIGHTS}
    assert manifest == json.loads((folder / MANIFEST).read_text())
    assert manifest == {
        "name": "old/wee",
        "grid_size": [4, 4],
        **origin,
        "sha256": sha256_of(path),
        "weights_sha256": sha256_of(folder / WEIGHTS),
    }
    assert provenance(folder) == {key: value for key, value in manifest.items() if key != "weights_sha256"}


def test_a_checkpoint_inside_a_package_is_found(tmp_path, weights, monkeypatch):
    package = tmp_path / "my_weights"
    package.mkdir()
    (package / "__init__.py").touch()
    save_file(weights, package / "vit.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    fetch(source(path="my_weights:vit.safetensors"), tmp_path / "out")
    assert same(load(tmp_path / "out").tensors, weights)


def test_a_timm_tag_is_fetched_from_timm(tmp_path, monkeypatch, weights):
    calls = []

    def create_model(tag, **options):
        calls.append((tag, options))
        model = build_vit(SIZE, num_classes=CLASSES)
        model.load_state_dict(weights)
        model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "crop_pct": 0.875}
        return model

    monkeypatch.setattr(timm, "create_model", create_model)
    manifest = fetch(source(timm="some_vit.in1k"), tmp_path / "out")
    assert calls == [("some_vit.in1k", {"pretrained": True})]
    assert (manifest["timm"], manifest["timm_version"]) == ("some_vit.in1k", timm.__version__)
    assert provenance(tmp_path / "out")["timm"] == "some_vit.in1k"
    assert manifest["images"] == {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.2, 0.2, 0.2],
        "interpolation": "bicubic",
        "crop_pct": 0.875,
    }
    assert load(tmp_path / "out").statistics == ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    assert same(load(tmp_path / "out").tensors, weights)


def test_a_timm_tag_that_does_not_exist_is_told_in_one_line(tmp_path):
    text = refusal(source(timm="vit_of_nowhere"), tmp_path / "out")
    assert "vit_of_nowhere" in text
    assert "old/wee" in text


def test_a_source_is_trained_by_the_pipeline_with_its_spec_as_provenance(tmp_path):
    npz = write_npz(tmp_path / "bands.npz")
    made = spec(npz, "softmax", RANDOM, seed=3, role="source")
    prepared = source(train=made)
    folder = tmp_path / "sources" / prepared.folder
    prepare_source(prepared, folder, data_root=tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text())
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert manifest["spec"] == json.loads(made.to_json()) == metrics["spec"]
    assert manifest["top1"] == metrics["top1"]
    assert manifest["versions"]["timm"] == timm.__version__
    assert same(load(folder).tensors, load_file(folder / "run" / "model.safetensors"))
    assert provenance(folder)["spec"]["role"] == "source"
    # Published from there, it keeps its history.
    again = fetch(source(path=str(folder / WEIGHTS)), tmp_path / "again")
    assert again["provenance"] == provenance(folder)
    assert again["sha256"] == manifest["weights_sha256"]
    # The statistics of its training images, from either.
    assert load(folder).statistics == load(tmp_path / "again").statistics == ((0.4,), (0.2,))


def test_the_same_weights_and_origin_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        store(softmax_weights(), source(), tmp_path / name, {"path": "x"})
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("suffix", ["?download=true", "?a=1&b=2", "#main"])
def test_an_address_with_a_query_is_read_by_the_format_of_its_path(tmp_path, weights, monkeypatch, suffix):
    """As Hugging Face and Zenodo give them."""
    path = write(weights, tmp_path / "published", "safetensors")

    def download(url, destination, **options):
        assert url == f"https://example.org/vit.safetensors{suffix}"
        Path(destination).write_bytes(path.read_bytes())

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    prepared = source(url=f"https://example.org/vit.safetensors{suffix}", sha256=sha256_of(path))
    fetch(prepared, tmp_path / "out")
    assert same(load(tmp_path / "out").tensors, weights)


# --- what is not there, or not what it should be ----------------------------------------------------------


@pytest.mark.parametrize("by_url", [False, True], ids=["path", "url"])
def test_a_wrong_checksum_is_refused_with_both(tmp_path, weights, by_url):
    path = write(weights, tmp_path / "published", "plain")
    origin = {"url": path.as_uri()} if by_url else {"path": str(path)}
    text = refusal(source(**origin, sha256="0" * 64), tmp_path / "out")
    assert sha256_of(path) in text
    assert "0" * 64 in text
    assert next(iter(origin.values())) in text
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("path", ["nowhere.pth", "linvit.embedded:nowhere.safetensors", "linvit.embeded:x.safetensors"])
def test_a_missing_file_is_told_in_one_line(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    text = refusal(source(path=path), tmp_path / "out")
    assert repr(path) in text
    assert "'old/wee'" in text


def test_an_address_that_cannot_be_fetched_is_told_in_one_line(tmp_path):
    url = (tmp_path / "nowhere.pth").as_uri()
    text = refusal(source(url=url, sha256="0" * 64), tmp_path / "out")
    assert url in text


DAMAGES = {
    "empty": b"",
    "html": b"<!doctype html>\n<html>\n404\n</html>\n",
    "a byte": b"\x80",
    "a pickle without content": b"\x80\x02",
    "zeros": bytes(1000),
    "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_no_checkpoint_is_told_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"published{suffix}"
    path.write_bytes(content)
    assert str(path) in refusal(source(path=str(path)), tmp_path / "out")


@pytest.mark.parametrize("kind", ["safetensors", "model"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_checkpoint_is_told_in_one_line(tmp_path, weights, kind, share):
    path = write(weights, tmp_path / "published", kind)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert str(path) in refusal(source(path=str(path)), tmp_path / "out")


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"model": x}, lambda x: {"model": {"cls_token": x}}])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_a_malicious_pickle_is_refused_and_its_code_is_not_run(tmp_path, wrap, suffix):
    path, trace = tmp_path / f"published{suffix}", tmp_path / "it ran"
    torch.save(wrap(Malicious(trace)), path)
    assert str(path) in refusal(source(path=str(path)), tmp_path / "out")
    assert not trace.exists()
    # It would have run.
    with path.open("rb") as file:
        torch.load(file, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("name", ["pos_embed", "cls_token", "blocks.1.attn.qkv.bias", "norm.weight"])
def test_a_missing_parameter_is_named(tmp_path, weights, name):
    del weights[name]
    with pytest.raises(SourceError, match=f"'old/wee' lacks parameter '{name}'") as caught:
        store(weights, source(), tmp_path / "out", {})
    one_line(caught.value)


@pytest.mark.parametrize(
    "name", ["dist_token", "blocks.2.attn.qkv.weight", "decoder.weight", "fc_norm.weight", "epoch"]
)
def test_an_unknown_parameter_is_named(tmp_path, weights, name):
    weights[name] = torch.zeros(3) if name != "epoch" else 3
    with pytest.raises(SourceError, match=f"'old/wee' has an unknown parameter '{name}'") as caught:
        store(weights, source(), tmp_path / "out", {})
    one_line(caught.value)


@pytest.mark.parametrize("name", [name for name in softmax_weights() if not name.startswith("head.")])
def test_a_parameter_of_another_shape_is_named_with_both_shapes(tmp_path, weights, name):
    expected = list(weights[name].shape)
    weights[name] = torch.zeros(*expected[:-1], expected[-1] + 1)
    with pytest.raises(SourceError) as caught:
        store(weights, source(), tmp_path / "out", {})
    text = one_line(caught.value)
    assert name in text
    assert str(expected) in text
    assert str([*expected[:-1], expected[-1] + 1]) in text


@pytest.mark.parametrize(
    "shape", [(16 * 17,), (17, 16), (1, 16, 16), (1, 18, 16), (2, 17, 16), (1, 1, 16), (1, 0, 16), ()], ids=str
)
def test_positions_that_lie_on_no_square_grid_are_refused(tmp_path, weights, shape):
    weights["pos_embed"] = torch.zeros(shape)
    with pytest.raises(SourceError) as caught:
        store(weights, source(), tmp_path / "out", {})
    assert "'old/wee'" in one_line(caught.value)
    assert "position" in str(caught.value) or "pos_embed" in str(caught.value)


@pytest.mark.parametrize("side", [1, 2, 3, 7])
def test_positions_of_another_square_grid_are_kept_as_they_are(tmp_path, weights, side):
    weights["pos_embed"] = torch.randn(1, 1 + side**2, 16)
    manifest = store(weights, source(), tmp_path / "out", {})
    assert manifest["grid_size"] == [side, side]
    assert load(tmp_path / "out").grid_size == (side, side)
    assert torch.equal(load(tmp_path / "out").tensors["pos_embed"], weights["pos_embed"])


@pytest.mark.parametrize("size", [RGB, changed(SIZE, depth=3), changed(SIZE, dim=32), changed(SIZE, patch_size=2)])
def test_a_source_of_another_size_is_refused(tmp_path, weights, size):
    with pytest.raises(SourceError, match="old/wee"):
        store(weights, source(size), tmp_path / "out", {})
    assert not (tmp_path / "out" / WEIGHTS).exists()


def test_a_training_on_images_of_the_usual_statistics_has_those(tmp_path):
    """A spec leaves out what is the default."""
    store(softmax_weights(), source(), tmp_path / "out", {"spec": {"dataset": {"name": "imagenet"}}})
    assert load(tmp_path / "out").statistics == (IMAGENET_MEAN, IMAGENET_STD)


def test_a_file_without_history_has_no_statistics(tmp_path):
    store(softmax_weights(), source(), tmp_path / "out", {"path": "x"})
    assert load(tmp_path / "out").statistics is None


HISTORIES = {
    '{"images": {"mean": "x", "std": 3}}': "mean: found 'x'; allowed: a list",
    '{"images": {"mean": [0.1], "std": [0]}}': "std.0: found 0; allowed: above 0",
    '{"images": {"mean": [0.1, 0.2], "std": [1.0]}}': "mean and std differ in length",
    '{"images": {"mean": [0.1]}}': "std: missing",
    '{"images": 3}': "",
    '{"images": {"mean": [NaN], "std": [1.0]}}': "not JSON compliant",
    '{"spec": {"dataset": {"std": [-1.0, 1.0, 1.0]}}}': "std.0: found -1.0; allowed: above 0",
    '{"spec": {"dataset": []}}': "",
    '{"spec": []}': "",
    '{"provenance": {"provenance": {"images": "x"}}}': "",
    '{"anything": NaN}': "not JSON compliant",
    '{"anything": 1e999}': "not JSON compliant",
    '{"provenance": 3}': "",
    "3": "",
    '{"a": ' * 900 + "1" + "}" * 900: "more than 64 levels",
}


@pytest.mark.parametrize(("history", "told"), HISTORIES.items(), ids=[text[:40] for text in HISTORIES])
def test_a_history_that_could_not_be_read_again_is_refused_when_it_is_fetched(tmp_path, weights, history, told):
    """It would be told as damage then, for which no other fetch is a remedy."""
    path = tmp_path / "published.safetensors"
    path.write_bytes(sources.to_safetensors(weights, {"linvit": history}))
    text = refusal(source(path=str(path)), tmp_path / "out")
    assert f"{path}: its metadata 'linvit' is " in text
    assert told in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("history", ["{}", "[1]", '"text"', '{"images": {"mean": [0], "std": [1], "x": null}}'])
def test_any_other_history_is_kept_and_read_again(tmp_path, weights, history):
    path = tmp_path / "published.safetensors"
    path.write_bytes(sources.to_safetensors(weights, {"linvit": history}))
    fetch(source(path=str(path)), tmp_path / "out")
    assert load(tmp_path / "out").statistics == (((0.0,), (1.0,)) if "images" in history else None)


@pytest.mark.parametrize("classes", [0, 1, 1000])
def test_a_source_may_have_any_head_or_none(tmp_path, classes):
    tensors = softmax_weights(classes=classes)
    store(tensors, source(), tmp_path / "out", {})
    assert same(load(tmp_path / "out").tensors, tensors)


def test_tensors_that_share_memory_or_lie_askew_are_stored_as_what_they_are(tmp_path, weights):
    weights["blocks.0.norm1.weight"] = weights["blocks.0.norm2.weight"]
    weights["head.weight"] = torch.randn(16, CLASSES).T
    store(weights, source(), tmp_path / "out", {})
    assert same(load(tmp_path / "out").tensors, weights)


# --- loading ----------------------------------------------------------------------------------------------


def test_tampered_weights_are_detected_on_load(tmp_path):
    prepared = store_source(tmp_path)
    path = tmp_path / prepared.folder / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SourceError, match="sha256") as caught:
        load(tmp_path / prepared.folder)
    assert str(path) in one_line(caught.value)


def test_an_edited_manifest_is_told_apart_from_tampered_weights(tmp_path):
    prepared = store_source(tmp_path)
    path = tmp_path / prepared.folder / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"name": "other"}))
    with pytest.raises(SourceError, match=r"source.json: is not what .*weights.safetensors says of itself") as caught:
        load(tmp_path / prepared.folder)
    assert "sha256" not in one_line(caught.value)


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_a_source_that_is_not_there_is_told_in_one_line_with_the_remedy(tmp_path, name):
    prepared = store_source(tmp_path)
    path = tmp_path / prepared.folder / name
    path.unlink()
    with pytest.raises(SourceError) as caught:
        load(tmp_path / prepared.folder)
    assert str(path) in one_line(caught.value)
    assert "linvit source old/wee " in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"weights_sha256": 3}'])
def test_a_damaged_manifest_is_told_in_one_line(tmp_path, content):
    prepared = store_source(tmp_path)
    path = tmp_path / prepared.folder / MANIFEST
    path.write_text(content)
    with pytest.raises(SourceError) as caught:
        load(tmp_path / prepared.folder)
    assert str(tmp_path / prepared.folder) in one_line(caught.value)


class NoSpace(Exception):
    pass


def test_the_manifest_comes_after_the_weights(tmp_path, monkeypatch):
    """Snakemake takes the manifest as the sign that the weights are there."""

    def fail(path, text):
        assert (tmp_path / "out" / WEIGHTS).exists()
        raise NoSpace

    monkeypatch.setattr(sources, "write_text", fail)
    with pytest.raises(NoSpace):
        store(softmax_weights(), source(), tmp_path / "out", {})
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_model_of_other_heads_is_refused(tmp_path, monkeypatch):
    """No shape tells."""
    other = build_vit(SIZE.model_copy(update={"heads": 2 * SIZE.heads}), num_classes=CLASSES)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: other)
    told = refusal(source(timm="some_vit.in1k"), tmp_path / "out")
    assert f"some_vit.in1k has {2 * SIZE.heads} heads, size {SIZE.name!r} {SIZE.heads}" in told
