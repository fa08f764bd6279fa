"""The configuration: whatever is wrong with it is told in one line that names the key and what is allowed."""

import copy
import datetime
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
import yaml
from pydantic import BaseModel
from timm.data import create_transform

from linvit.config import (
    Block,
    ConfigError,
    DatasetEntry,
    Distill,
    Init,
    Recipe,
    Size,
    SourceEntry,
    Study,
    TrainEntry,
    VariantEntry,
    load_study,
    read_yaml,
    resolve_class,
    study_from,
)
from linvit.files import resource, sha256_of
from linvit.grid import expand, sources_of

CONFIG = Path(__file__).parents[1] / "config.yaml"
RAW = yaml.safe_load(CONFIG.read_text())
TABLES = {"sizes": Size, "variants": VariantEntry, "inits": Init, "recipes": Recipe, "datasets": DatasetEntry}
PATH_TYPE = tuple[str | int, ...]


def without_aliases(config: dict) -> dict:
    """A deep copy in which no two places share one object, as YAML anchors make them do."""
    return yaml.load(yaml.dump(config, Dumper=_Plain, sort_keys=False), Loader=yaml.SafeLoader)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


RAW = without_aliases(RAW)


def parts() -> Iterator[tuple[PATH_TYPE, type[BaseModel]]]:
    """Every mapping of config.yaml that has keys of its own, with the model of its keys."""
    yield (), Study
    for table, model in TABLES.items():
        for name in RAW[table]:
            yield (table, name), model
    for name, init in RAW["inits"].items():
        if init and "distill" in init:
            yield ("inits", name, "distill"), Distill
    for name, sizes in RAW["sources"].items():
        for size, entry in sizes.items():
            yield ("sources", name, size), SourceEntry
            if "train" in entry:
                yield ("sources", name, size, "train"), TrainEntry
    for name, blocks in RAW["grids"].items():
        for number in range(len(blocks)):
            yield ("grids", name, number), Block


def references() -> Iterator[tuple[PATH_TYPE, str, str]]:
    """Every place of config.yaml that holds a name: the path, the key an error shows, and the table named."""
    yield ("grid",), "grid", "grids"
    for name, entry in RAW["datasets"].items():
        if "test_of" in entry:
            yield ("datasets", name, "test_of"), f"datasets.{name}.test_of", "datasets"
        elif isinstance(entry["recipe"], str):
            yield ("datasets", name, "recipe"), f"datasets.{name}.recipe", "recipes"
        else:
            for size in entry["recipe"]:
                yield ("datasets", name, "recipe", size), f"datasets.{name}.recipe", "recipes"
    for table in ("datasets", "recipes"):
        key = table.removesuffix("s")
        yield ("sources", "fashion-trained", "mini", "train", key), f"sources.fashion-trained.mini.train.{key}", table
    for name, blocks in RAW["grids"].items():
        for number, block in enumerate(blocks):
            for axis in ("datasets", "sizes", "variants", "inits", "sources"):
                if axis in block:
                    yield ("grids", name, number, axis, len(block[axis]) - 1), f"grids.{name}.{number}.{axis}", axis
            if "ood" in block:
                yield ("grids", name, number, "ood", 0), f"grids.{name}.{number}.ood", "datasets"


def keys_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or key for key, field in model.model_fields.items()} - {"name"}


def at(config: dict, path: PATH_TYPE) -> typing.Any:
    for step in path:
        config = config[step]
    return config


def with_value(path: PATH_TYPE, value: object, config: typing.Any = RAW) -> typing.Any:
    """The configuration with one value replaced or added; only what is on the way there is copied."""
    if not path:
        return value
    first, *rest = path
    copied = list(config) if isinstance(config, list) else dict(config or {})
    copied[first] = with_value(tuple(rest), value, copied[first] if rest else None)
    return copied


def without(path: PATH_TYPE) -> dict:
    config = copy.deepcopy(RAW)
    del at(config, path[:-1])[path[-1]]
    return config


def refusal(config: dict) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        study_from(config)
    text = str(caught.value)
    assert "\n" not in text, text
    assert text.startswith("config.yaml: ")
    return text.removeprefix("config.yaml: ")


def refused_grid(**changes) -> str:
    """The one line with which expanding a grid is refused, less its place: a block made of what `changes` give."""
    config = changes.pop("config", RAW)
    block = {"datasets": ["fashion-1k"], "sizes": ["mini"], "variants": ["relu"], "inits": ["random"], "seeds": [0]}
    study = study_from(with_value(("grids", "x"), [block | changes], config))
    with pytest.raises(ConfigError) as caught:
        expand(study, "x")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("grids.x.0: ")
    return text.removeprefix("grids.x.0: ")


def without_guess(allowed: str) -> str:
    return allowed.partition("; did you mean ")[0]


def dotted(path: PATH_TYPE) -> str:
    return ".".join(map(str, path))


def ids(value: object) -> str:
    """A test's name from its parameters: paths alone."""
    return dotted(value) if isinstance(value, tuple) else ""


# --- what is accepted -------------------------------------------------------------------------------------


def test_the_repositorys_own_configuration_is_accepted():
    study = load_study(CONFIG)
    assert study == study_from(RAW)
    assert (study.grid, study.results, study.data, study.download) == ("demo", "results", "data", False)
    assert {name: len(getattr(study, name)) for name in (*TABLES, "sources", "grids")} == {
        name: len(RAW[name]) for name in (*TABLES, "sources", "grids")
    }


def test_each_entry_knows_its_own_name():
    study = study_from(RAW)
    for table in TABLES:
        assert all(entry.name == key for key, entry in getattr(study, table).items())


def test_overrides_replace_top_level_keys_and_are_checked_too():
    assert load_study(CONFIG, grid="paper").grid == "paper"
    with pytest.raises(ConfigError, match=r"grid: 'papr' is not defined; allowed: demo, mini, losses, quick, paper"):
        load_study(CONFIG, grid="papr")
    with pytest.raises(ConfigError, match=r"grids_: unknown key"):
        load_study(CONFIG, grids_={})


def test_a_parsed_study_cannot_be_changed():
    study = study_from(RAW)
    with pytest.raises(ValueError, match="frozen"):
        study.sizes["mini"].depth = 5


def test_integers_are_taken_where_a_float_is_wanted():
    study = study_from(with_value(("inits", "copy-output10", "distill", "weight"), 7))
    assert study.inits["copy-output10"].distill.weight == 7.0


@pytest.mark.parametrize("recipe", [name for name in RAW["recipes"] if not name.startswith("fashion")])
def test_a_recipe_of_the_paper_is_what_the_paper_says(recipe):
    """Tables B and C, and Xu et al.'s own recipe."""
    found = study_from(RAW).recipes[recipe]
    xu = recipe.startswith("xu2024")
    assert (found.epochs, found.warmup_epochs) == ((600, 100) if recipe == "transfer-long" else (300, 50))
    assert found.batch_size == (4096 if "imagenet" in recipe else 512)
    assert found.lr == (4e-3 if recipe == "xu2024-imagenet" else 2e-3)
    assert (found.min_lr, found.betas, found.weight_decay) == (1e-6, (0.9, 0.999), 0.05)
    assert found.clip_grad == (None if xu else 3.0)
    assert (found.label_smoothing, found.color_jitter, found.distill_weight) == (0.1, 0.4, 50)
    assert found.drop_path == (0.1 if recipe == "imagenet-base" else 0)
    assert found.eval_crop == (0.875 if xu else 0.9)
    assert (found.auto_augment, found.mixup, found.cutmix, found.random_erasing) == (
        ("rand-m9-mstd0.5-inc1", 0.8, 1.0, 0.25) if xu else (None, 0, 0, 0)
    )
    assert found.eval_every == 1


def test_a_misspelt_key_and_the_one_that_it_leaves_missing_are_one_mistake():
    sizes = RAW["sizes"]["mini"]
    misspelt = {{"depth": "detph"}.get(key, key): value for key, value in sizes.items()}
    text = refusal(with_value(("sizes", "mini"), misspelt))
    assert text.endswith("; did you mean 'depth'?")
    # One that is missing for itself is another.
    del misspelt["heads"]
    assert refusal(with_value(("sizes", "mini"), misspelt)).endswith("(and 1 more mistake)")


# --- unknown keys, dangling names, missing keys -----------------------------------------------------------


@pytest.mark.parametrize(("path", "model"), list(parts()), ids=ids)
def test_an_unknown_key_is_refused_with_the_allowed_ones(path, model):
    text = refusal(with_value((*path, "tpyo"), 1))
    key, _, allowed = text.partition(": unknown key; allowed: ")
    assert key == dotted((*path, "tpyo"))
    assert set(without_guess(allowed).split(", ")) == keys_of(model)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (("inits", "distill"), Init),
        (("datasets", "train"), DatasetEntry),
        (("recipes", "train"), Recipe),
        (("sources", "train", "mini"), SourceEntry),
        (("sources", "distill", "mini"), SourceEntry),
    ],
    ids=ids,
)
def test_an_entry_that_is_named_like_a_key_does_not_confuse_the_allowed_ones(path, model):
    config = with_value(path, {"tpyo": 1}, with_value(path[:-1], {}) if path[0] == "sources" else RAW)
    allowed = refusal(config).partition(f"{dotted(path)}.tpyo: unknown key; allowed: ")[2].partition(" (and")[0]
    assert set(without_guess(allowed).split(", ")) == keys_of(model)


def test_an_entrys_name_is_its_key_and_nothing_else():
    assert refusal(with_value(("sizes", "mini", "name"), "other")).startswith("sizes.mini.name: unknown key")


def test_the_pythonic_spelling_of_an_alias_is_no_key():
    text = refusal(with_value(("inits", "copy", "copied"), ["mlp"]))
    assert text.startswith("inits.copy.copied: unknown key; allowed: copy, ")


@pytest.mark.parametrize(("path", "key", "table"), list(references()), ids=ids)
def test_a_dangling_name_is_refused_with_the_defined_ones(path, key, table):
    text = refusal(with_value(path, "nosuch"))
    found, _, allowed = text.partition(": 'nosuch' is not defined; allowed: ")
    assert found == key
    assert set(without_guess(allowed).split(", ")) == set(RAW[table])


def test_a_source_of_an_undefined_size_is_refused():
    text = refusal(with_value(("sources", "deit", "smal"), {"timm": "x"}))
    assert text == "sources.deit: 'smal' is not defined; allowed: tiny, small, base, mini; did you mean 'small'?"


def test_a_source_cannot_have_the_name_of_no_source():
    """Two different runs would share a folder."""
    assert refusal(with_value(("sources", "none"), {"mini": {"timm": "x"}})).startswith("sources.none: ")


def test_a_recipe_for_an_undefined_size_is_refused():
    text = refusal(with_value(("datasets", "imagenet", "recipe", "smal"), "imagenet"))
    assert "datasets.imagenet.recipe" in text
    assert "'smal' is not defined; allowed: tiny, small, base, mini" in text


def test_a_dangling_recipe_of_a_block_is_refused():
    text = refusal(with_value(("grids", "demo", 0, "recipe"), "nosuch"))
    assert text.startswith("grids.demo.0.recipe: 'nosuch' is not defined; allowed: transfer, ")


REQUIRED = [
    *[(key,) for key in ("grid", "sizes", "variants", "inits", "recipes", "datasets", "grids")],
    *[("sizes", "mini", key) for key in ("dim", "depth", "heads")],
    ("variants", "relu", "target"),
    ("recipes", "transfer", "epochs"),
    *[("datasets", "pets", key) for key in ("classes", "recipe")],
    *[("sources", "fashion-trained", "mini", "train", key) for key in ("dataset", "recipe")],
    *[("grids", "demo", 0, key) for key in ("datasets", "sizes", "variants", "inits", "seeds")],
]


@pytest.mark.parametrize("path", REQUIRED, ids=ids)
def test_a_missing_key_is_named(path):
    assert refusal(without(path)).startswith(f"{dotted(path)}: missing; it has no default")


# --- wrong types and values -------------------------------------------------------------------------------

WRONG = {
    "integer": ("3", 3.5, True, [3], {"a": 1}, "1e3"),
    "float": ("1e-3", "0.1", True, [0.1], {"a": 1}, float("nan"), float("inf")),
    "bool": ("no", "true", 0, 1, None, [True]),
    "string": (False, True, 3, 1.5, ["a"], {"a": 1}, None),
    "mapping": ("a", 3, ["a"], False),
    "list": ("a", 3, {"a": 1}, None),
}
RECIPE_FLOATS = [key for key, field in Recipe.model_fields.items() if isinstance(field.default, float)]
TYPED = {
    "integer": [
        *[("sizes", "mini", key) for key in ("dim", "depth", "heads", "patch_size", "image_size", "channels")],
        *[("recipes", "transfer", key) for key in ("epochs", "warmup_epochs", "batch_size", "eval_every")],
        *[("datasets", "pets", key) for key in ("classes", "train_size", "test_size")],
        ("sources", "fashion-trained", "mini", "train", "seed"),
        ("grids", "demo", 0, "seeds", 0),
    ],
    "float": [
        *[("recipes", "transfer", key) for key in RECIPE_FLOATS],
        ("recipes", "fashion-mini", "crop_scale", 0),
        ("inits", "copy-output10", "distill", "weight"),
        ("datasets", "fashion-1k", "mean", 0),
        ("datasets", "fashion-1k", "std", 0),
    ],
    "bool": [
        ("recipes", "transfer", "compile"),
        ("recipes", "transfer", "grad_checkpointing"),
        ("download",),
        ("variants", "mhla", "class_token"),
        ("variants", "softmax", "attention_map"),
        ("variants", "softmax", "map_distribution"),
        ("variants", "ttt", "head_outputs"),
        ("variants", "ttt", "analytic_inits"),
        ("inits", "pretrained", "train"),
    ],
    "string": [
        ("grid",),
        ("results",),
        ("data",),
        ("variants", "relu", "target"),
        ("variants", "mhla", "positions"),
        ("variants", "mhla", "pool"),
        ("recipes", "fashion-mini", "interpolation"),
        ("recipes", "transfer", "precision"),
        ("inits", "copy-map3e3", "distill", "target"),
        ("inits", "copy-map3e3", "distill", "reduction"),
        ("inits", "copy-radlads", "distill", "distance"),
        ("sources", "fashion-trained", "mini", "train", "dataset"),
        ("grids", "demo", 0, "inits", 0),
        ("grids", "demo", 0, "for"),
    ],
    "mapping": [
        *[(key,) for key in (*TABLES, "sources", "grids")],
        ("sizes", "mini"),
        ("inits", "copy"),
        ("inits", "copy-distill", "distill"),
        ("sources", "deit"),
        ("sources", "deit", "tiny"),
        ("sources", "fashion-trained", "mini", "train"),
        ("grids", "demo", 0),
    ],
    "list": [
        ("grids", "demo"),
        ("inits", "copy", "copy"),
        ("recipes", "fashion-mini", "crop_scale"),
        ("recipes", "transfer", "betas"),
        ("datasets", "fashion-1k", "mean"),
        *[("grids", "demo", 0, axis) for axis in ("datasets", "sizes", "variants", "inits", "sources", "seeds")],
    ],
}
WRONGLY_TYPED = [(path, value) for kind, paths in TYPED.items() for path in paths for value in WRONG[kind]]


@pytest.mark.parametrize(("path", "value"), WRONGLY_TYPED, ids=lambda v: ids(v) if isinstance(v, tuple) else repr(v))
def test_a_value_of_another_type_is_refused_never_converted(path, value):
    assert refusal(with_value(path, value)).startswith(dotted(path))


@pytest.mark.parametrize(
    ("key", "text", "named"),
    [
        ("lr: 4.0e-3", "lr: 4e-3", "recipes.xu2024-imagenet.lr"),
        ("download: false", "download: 'no'", "download"),
        ("results: results", "results: no", "results"),
        ("epochs: 300,", "epochs: 3e2,", "recipes.transfer.epochs"),
        ("batch_size: 4096}", "batch_size: yes}", "recipes.imagenet.batch_size"),
        ("warmup_epochs: 50,", "warmup_epochs: 2020-01-01,", "recipes.transfer.warmup_epochs"),
    ],
)
def test_what_yaml_makes_of_a_slip_is_refused(tmp_path, key, text, named):
    """`4e-3` and `3e2` are strings to YAML, `no` is a boolean, `2020-01-01` a date."""
    written = tmp_path / "config.yaml"
    original = CONFIG.read_text()
    assert key in original
    written.write_text(original.replace(key, text, 1))
    with pytest.raises(ConfigError) as caught:
        load_study(written)
    assert str(caught.value).startswith(f"{written}: {named}: ")
    assert "\n" not in str(caught.value)


SHARDS = {"timm": "hfds/x", "classes": 3, "recipe": "transfer"}
OUT_OF_RANGE = [
    *[(("sizes", "mini", key), 0, "above 0") for key in ("dim", "depth", "heads", "patch_size", "image_size")],
    *[(("recipes", "transfer", key), 0, "above 0") for key in ("epochs", "batch_size", "lr", "clip_grad")],
    *[(("recipes", "transfer", key), 0, "above 0") for key in ("eval_every", "distill_weight")],
    *[(("recipes", "transfer", "eval_crop"), value, "0.1 or above") for value in (0, 1e-9, 0.09)],
    *[(("recipes", "transfer", key), 1e-300, "0, or 0.01 and above") for key in ("mixup", "cutmix")],
    *[(("sizes", "mini", "channels"), value, "1 or 3") for value in (0, 2, 4)],
    *[
        (("recipes", "transfer", key), -0.1, "0 or above")
        for key in ("min_lr", "weight_decay", "label_smoothing", "drop_path", "flip", "color_jitter", "mixup", "cutmix")
    ],
    *[
        (("recipes", "transfer", key), 1.5, "up to 1")
        for key in ("label_smoothing", "drop_path", "flip", "random_erasing", "eval_crop")
    ],
    (("recipes", "transfer", "warmup_epochs"), -1, "0 or above"),
    (("recipes", "transfer", "warmup_epochs"), 300, "warmup_epochs 300 must be below epochs 300"),
    (("recipes", "transfer", "min_lr"), 1.0, "min_lr 1.0 is above lr 0.002"),
    (("recipes", "transfer", "betas"), [0.9, -0.1], "0 or above"),
    (("recipes", "transfer", "betas"), [0.9, 1.0], "below 1"),
    (("recipes", "transfer", "betas"), [0.9], "betas.1: missing"),
    (("recipes", "transfer", "crop_scale"), [0.5, 0.2], "crop_scale [0.5, 0.2] is not [low, high]"),
    (("recipes", "transfer", "crop_scale"), [0.5, 1.2], "must lie within (0, 1]"),
    (("recipes", "transfer", "crop_scale"), [0.0, 1.0], "above 0"),
    (("recipes", "transfer", "crop_ratio"), [2.0, 1.0], "crop_ratio [2.0, 1.0] is not [low, high]"),
    (("recipes", "transfer", "interpolation"), "lanczos", "'bilinear' or 'bicubic'"),
    (("recipes", "transfer", "precision"), "float16", "'auto', 'float32' or 'bfloat16'"),
    (("sizes", "mini", "heads"), 5, "dim 64 is not a multiple of heads 5"),
    (("sizes", "mini", "patch_size"), 7, "image_size 32 is not a multiple of patch_size 7"),
    (("variants", "relu", "positions"), "rope", "'learned' or 'sincos'"),
    (("variants", "relu", "pool"), "max", "'token' or 'avg'"),
    (("variants", "relu", "target"), "no-colon", "package.module:Class"),
    (("variants", "mhla", "pool"), "token", "pool 'token' needs class_token: true; allowed without one: 'avg'"),
    (("inits", "copy", "copy"), ["attention", "attn"], "'attention', 'mlp', 'norms', 'patch_embed', 'class_token'"),
    (("inits", "copy", "copy"), ["mlp", "mlp"], "copy names a group twice"),
    (("inits", "copy", "analytic"), "xavier", "'mimetic' or 'impulse'"),
    (("inits", "copy", "analytic"), "mimetic", "analytic 'mimetic' and copy of 'attention'"),
    (("inits", "copy", "train"), False, "train: false needs copy to hold 'head'"),
    (("inits", "pretrained", "distill"), {}, "train: false needs copy to hold 'head' and no distill"),
    (("inits", "copy", "distill"), {"weight": 0}, "above 0"),
    (("inits", "copy", "distill"), {"target": "logits"}, "'output', 'heads' or 'map'"),
    (("inits", "copy", "distill"), {"reduction": "max"}, "'mean' or 'sum'"),
    (("inits", "copy", "distill"), {"distance": "cosine"}, "'mse', 'l2' or 'cross_entropy'"),
    (
        ("inits", "copy", "distill"),
        {"distance": "cross_entropy"},
        "distance 'cross_entropy' is not defined for target 'output'; allowed: mse, l2",
    ),
    (("inits", "copy", "distill"), {"target": "heads", "distance": "l2"}, "for target 'heads'; allowed: mse"),
    (("inits", "copy", "distill"), {"target": "map", "distance": "l2"}, "'map'; allowed: mse, cross_entropy"),
    (("variants", "mhla", "map_distribution"), True, "map_distribution: true needs attention_map: true"),
    (("datasets", "pets", "classes"), 0, "above 0"),
    (("datasets", "pets", "std"), [0.1, 0.2, 0.0], "above 0"),
    (("datasets", "pets", "mean"), [0.5], "mean and std differ in length"),
    (("datasets", "pets", "train"), "trainval", "mapping"),
    (("datasets", "pets", "test"), "test", "mapping"),
    (("datasets", "pets", "npz"), "a.npz", "exactly one of torchvision, timm, folder, npz, idx is needed"),
    (("datasets", "pets"), {"classes": 3, "recipe": "transfer"}, "found none"),
    (("datasets", "imagenet", "timm"), "hfds/x", "found timm, folder"),
    (("datasets", "pets"), SHARDS | {"train": "train"}, "train of a timm data set is a mapping"),
    (("datasets", "pets"), SHARDS | {"timm": "wds/x"}, "images in no fixed order; allowed: hfds/ and a folder"),
    (("datasets", "pets"), SHARDS | {"timm": "hfds/"}, "allowed: hfds/ and a folder"),
    (("datasets", "pets", "subset"), "a.txt", "subset needs class_names and test_of"),
    (("datasets", "imagenet-v2", "train"), "x", "a test split of 'imagenet' has neither train nor train_size"),
    (("datasets", "imagenet-v2", "train_size"), 3, "a test split of 'imagenet' has neither train nor train_size"),
    (("datasets", "imagenet-v2", "recipe"), "transfer", "nothing is trained on a test split of 'imagenet'"),
    (("datasets", "imagenet-v2", "classes"), 999, "not those of 'imagenet'"),
    (("datasets", "imagenet-v2", "test_of"), "imagenet-a", "'imagenet-a' is a test split of 'imagenet'"),
    (("sources", "fashion-trained", "mini", "train", "dataset"), "imagenet-a", "it has no training"),
    (("grids", "demo", 0, "datasets"), ["imagenet-a"], "it has no training"),
    (("grids", "demo", 0, "ood"), ["imagenet-a"], "'imagenet-a' is no test split of 'fashion-1k' (test_of)"),
    (("grids", "demo", 0, "ood"), ["pets"], "'pets' is no test split of 'fashion-1k' (test_of)"),
    (("grids", "demo", 0, "ood"), ["pets", "pets"], "named twice: pets"),
    (("sources", "deit", "tiny"), {}, "exactly one of timm, url, path, train is needed, found none"),
    (("sources", "deit", "tiny"), {"timm": "a", "path": "b"}, "found timm, path"),
    (("sources", "deit", "tiny"), {"url": "https://example.org/a.pth"}, "url needs sha256"),
    (("sources", "deit", "tiny"), {"timm": "a", "sha256": "0" * 64}, "sha256 is for url and path"),
    (("sources", "deit", "tiny"), {"path": "a", "sha256": "0" * 63}, "64 digits 0 to 9 and a to f"),
    (("sources", "deit", "tiny"), {"path": "a", "sha256": "G" * 64}, "64 digits 0 to 9 and a to f"),
    (("sources", "fashion-trained", "mini", "train", "seed"), -1, "0 or above"),
    (("grids", "demo", 0, "seeds"), [-1], "0 or above"),
    (("grids", "demo", 0, "seeds"), [], "at least 1"),
    (("grids", "demo", 0, "datasets"), [], "at least 1"),
    (("grids", "demo", 0, "inits"), [], "at least 1"),
    (("grids", "demo", 0, "for"), "a label that is too long for a line of linvit plan", "up to 48 characters"),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"), OUT_OF_RANGE, ids=[f"{ids(path)}={value}"[:60] for path, value, _ in OUT_OF_RANGE]
)
def test_a_value_out_of_range_is_refused_with_the_range(path, value, reason):
    text = refusal(with_value(path, value))
    # A mistake that takes two keys to make is named by the entry that holds both.
    assert text.startswith((dotted(path), dotted(path[:-1])))
    assert reason in text


@pytest.mark.parametrize("axis", ["datasets", "sizes", "variants", "inits", "sources", "seeds"])
def test_an_axis_that_holds_a_value_twice_is_refused(axis):
    values = RAW["grids"]["demo"][0][axis]
    text = refusal(with_value(("grids", "demo", 0, axis), [*values, values[0]]))
    assert text == f"grids.demo.0.{axis}: named twice: {values[0]}"


@pytest.mark.parametrize("table", [*TABLES, "sources", "grids"])
@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/b",
        "/a",
        ".hidden",
        "..",
        "",
        " a",
        "a b",
        "-x",
        "x" * 65,
        "é",
        "a\nb",
        "a.",
        "a..",
        "a\0",
        "a\u2028b",
    ],
)
def test_a_name_that_is_no_plain_folder_name_is_refused(table, name):
    config = copy.deepcopy(RAW)
    first = next(iter(config[table]))
    config[table] = {name: config[table].pop(first), **config[table]}
    text, plain = refusal(config), name.isprintable() and 0 < len(name) < 65
    assert text.startswith(f"{table}.{name if plain or len(name) == 65 else repr(name)}: ")
    assert "allowed: up to 64 of the letters" in text or "allowed: printable characters" in text


@pytest.mark.parametrize("table", [*TABLES, "sources", "grids"])
@pytest.mark.parametrize("name", [1, False])
def test_a_name_that_yaml_does_not_read_as_a_string_is_refused(table, name):
    """`no: {...}` among the sources must not become a source called "false"."""
    config = copy.deepcopy(RAW)
    config[table][name] = next(iter(config[table].values()))
    assert table in refusal(config)


A_DATE = datetime.date(2020, 1, 1)  # what YAML makes of 2020-01-01
JUNK = (None, True, -1, 0, 1.5, "nosuch", "", [], ["nosuch"], {}, {"nosuch": 1}, float("nan"), A_DATE)


def leaves(config: object, path: PATH_TYPE = ()) -> Iterator[PATH_TYPE]:
    """The path of every value, whether scalar, list or mapping."""
    if path:
        yield path
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


SMALL = RAW | {"grids": {"demo": RAW["grids"]["demo"]}}


@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_no_replaced_value_gets_anything_but_a_one_line_refusal(value):
    """Each value of the configuration in turn is replaced; what is accepted must also expand."""
    accepted = 0
    for path in leaves(SMALL):
        try:
            study = study_from(with_value(path, value, SMALL))
            sources_of(study)
            for grid in study.grids:
                expand(study, grid)
            accepted += 1
        except ConfigError as error:
            assert "\n" not in str(error), path  # noqa: PT017
            assert str(error).strip(), path  # noqa: PT017
    assert accepted < len(list(leaves(SMALL))) / 3


# --- YAML -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", "a"),
        ("a: {b: 1, c: 2, b: 3}\n", "b"),
        ("a:\n  - {x: 1}\n  - {y: 1, y: 1}\n", "y"),
        ("x: &x {p: 1}\na: {<<: *x, q: 1, q: 2}\n", "q"),
        ("1: a\n1: b\n", "1"),
    ],
)
def test_a_key_that_stands_twice_in_one_mapping_is_refused(tmp_path, text, key):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"duplicate key '{key}'; allowed: each key once") as caught:
        read_yaml(path)
    assert re.match(rf"{re.escape(str(path))}:\d: ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("table", [*TABLES, "sources", "grids"])
def test_an_entry_that_stands_twice_in_the_configuration_is_refused(tmp_path, table):
    path = tmp_path / "config.yaml"
    name = next(iter(RAW[table]))
    path.write_text(yaml.dump(RAW, Dumper=_Plain) + f"\n{table}:\n  {name}: {{}}\n")
    with pytest.raises(ConfigError, match=f"duplicate key '{table}'"):
        load_study(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one: &one {lr: 1, clip: 2}\nlast: {<<: *one}\n", {"lr": 1, "clip": 2}),
        ("one: &one {lr: 1, clip: 2}\nlast: {<<: *one, clip: 3}\n", {"lr": 1, "clip": 3}),
        ("one: &one {lr: 1}\ntwo: &two {<<: *one, lr: 2, flip: 1}\nlast: {<<: *two}\n", {"lr": 2, "flip": 1}),
        (
            "one: &one {lr: 1}\ntwo: &two {clip: 2}\nlast: {<<: [*one, *two], flip: 3}\n",
            {"lr": 1, "clip": 2, "flip": 3},
        ),
        # PyYAML builds the outer mapping first here, and in doing so writes the keys of `one` into `two`.
        ("one: &one {lr: 1}\ndeep: {two: &two {<<: *one, lr: 2}}\nlast: {<<: *two, clip: 2}\n", {"lr": 2, "clip": 2}),
    ],
)
def test_merged_keys_are_no_duplicates(tmp_path, text, expected):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_yaml(path)["last"] == expected
    assert read_yaml(path) == yaml.safe_load(text)


# Each level holds the one before twenty times.
LAUGHS = b"a0: &a0 [1]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 20)) for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1, 2\n", "2: not valid YAML: "),
        (b"a: b: c\n", "1: not valid YAML: "),
        (b"a:\n\tb: c\n", "2: not valid YAML: "),
        (b"---\na: 1\n---\nb: 2\n", "3: not valid YAML: expected a single document"),
        (b"\xff\xfe\x00", "1: byte 0 is no UTF-8; allowed: text in UTF-8"),
        (b"a: 1\nb: \xe9\n", "2: byte 8 is no UTF-8"),
        (b"a: 1\nb: \x00\n", "2: not valid YAML: special characters are not allowed"),
        (b"a: !!python/object/apply:os.getcwd []\n", "1: not valid YAML: could not determine a constructor"),
        (b"? [1]\n: 2\n", "1: not valid YAML: "),
        (b"a: 1\nb: 2020-13-45\n", "2: '2020-13-45': month must be in 1..12"),
        (b"a: " + b"9" * 5000, "1: '999"),
        (b"a: 010\n", "1: '010' is a number of base 8 to YAML; allowed: decimal numbers"),
        (b"a: 1:30\n", "1: '1:30' is a number of base 60 to YAML; allowed: decimal numbers"),
        (b"a: 1:30.5\n", "1: '1:30.5' is a number of base 60 to YAML; allowed: decimal numbers"),
        (b"a: &a [*a]\n", "1: an alias inside of what it stands for; allowed: "),
        (b"a: &a\n  b: {c: *a}\n", "2: an alias inside of what it stands for; allowed: "),
        (b"a: &a {<<: *a}\n", "1: an alias inside of what it stands for; allowed: "),
        (b"[" * 50_000, "1: nested too deeply; allowed: 32 levels"),
        (LAUGHS, "4: too many values, with those behind aliases; allowed: up to 16,384"),
        (
            LAUGHS.replace(b"[", b"{<<: [").replace(b"]", b"]}").replace(b"{<<: [1]}", b"{a: 1}"),
            "4: too many values, with those behind aliases",
        ),
        (b"a: [\n" + b"1,\n" * 20_000 + b"]\n", "16385: too many values, with those behind aliases"),
        (b"a: " + b"1" * 2**20, " too large for a configuration; allowed: up to 262,144 bytes"),
        (b"- 1\n- 2\n", " found a list; allowed: keys with values"),
        (b"text", " found 'text'; allowed: keys with values"),
        (b"", " found nothing; allowed: keys with values"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}:{reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        load_study(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["linvit.attention.kernel:NoSuch", "linvit.nosuch:Class", "nosuch:Class", "linvit..x:Y", "a:1"]
)
def test_a_target_that_cannot_be_imported_is_named_in_one_line(target):
    with pytest.raises(ConfigError) as caught:
        resolve_class(target)
    assert repr(target) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_may_lie_outside_of_the_package():
    assert resolve_class("collections:OrderedDict").__name__ == "OrderedDict"


# --- combinations, refused when a grid is expanded --------------------------------------------------------


@pytest.mark.parametrize("init", ["mimetic", "impulse", "mimetic-distill", "impulse-distill"])
def test_an_analytic_start_is_refused_where_the_variant_does_not_define_it(init):
    text = refused_grid(variants=["ttt"], inits=[init], sources=["fashion"])
    assert f"init {init!r}" in text
    assert "variant 'ttt'" in text
    assert "analytic_inits: false" in text


TARGETS = {name: init.distill.target for name, init in study_from(RAW).inits.items() if init.distill}


@pytest.mark.parametrize(("variant", "allowed"), [("mhla", "output, heads"), ("ttt", "output")])
@pytest.mark.parametrize("init", [name for name, target in TARGETS.items() if target == "map"])
def test_map_distillation_is_refused_where_the_variant_has_no_map(variant, allowed, init):
    text = refused_grid(variants=[variant], inits=[init], sources=["fashion"])
    assert text == (
        f"init {init!r} distils attention maps, but variant {variant!r} has none (attention_map: false); "
        f"allowed: target {allowed}"
    )


@pytest.mark.parametrize("init", [name for name, target in TARGETS.items() if target == "heads"])
def test_distilling_head_outputs_is_refused_where_the_projection_takes_something_else(init):
    text = refused_grid(variants=["ttt"], inits=[init], sources=["fashion"])
    assert text == (
        f"init {init!r} distils head outputs, but variant 'ttt' has none (head_outputs: false); allowed: target output"
    )


def test_cross_entropy_is_refused_where_the_maps_are_no_distributions():
    text = refused_grid(variants=["inline"], inits=["copy-transfer"], sources=["fashion"])
    assert text == (
        "init 'copy-transfer' matches maps by cross-entropy, but those of variant 'inline' are no distributions "
        "(map_distribution: false); allowed: distance mse"
    )


@pytest.mark.parametrize("init", [name for name in RAW["inits"] if name not in ("random", "mimetic", "impulse")])
def test_an_init_that_needs_a_source_is_refused_in_a_block_without_one(init):
    text = refused_grid(inits=[init], variants=["softmax"])
    assert f"init {init!r} needs a source" in text
    assert "sources" in text


@pytest.mark.parametrize("init", ["random", "mimetic", "impulse"])
def test_an_init_that_needs_no_source_is_fine_without_one(init):
    block = {"datasets": ["pets"], "sizes": ["tiny"], "variants": ["relu"], "inits": [init], "seeds": [3]}
    assert list(expand(study_from(with_value(("grids", "x"), [block])), "x")) == [f"pets/tiny/relu/{init}/none/seed3"]


def test_a_source_without_the_size_is_refused_with_the_sizes_it_has():
    text = refused_grid(datasets=["pets"], sizes=["tiny"], inits=["copy"], sources=["fashion"])
    assert text == "sources.fashion: no checkpoint of size 'tiny'; it has mini"


def test_a_data_set_without_a_recipe_for_the_size_is_refused_with_those_it_has():
    config = with_value(("sizes", "big"), {"dim": 8, "depth": 1, "heads": 1})
    text = refused_grid(datasets=["imagenet"], sizes=["big"], config=config)
    assert text == "datasets.imagenet.recipe: none for size 'big'; it has tiny, small, base"


@pytest.mark.parametrize(("dataset", "size"), [("fashion-1k", "tiny"), ("pets", "mini")])
def test_statistics_of_other_channels_than_the_sizes_are_refused(dataset, size):
    text = refused_grid(datasets=[dataset], sizes=[size])
    assert text.startswith(f"datasets.{dataset}.mean: ")
    assert f"size {size!r}" in text


def test_a_grid_that_is_not_defined_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'nosuch' is not defined; allowed: demo, mini, losses, quick, paper"):
        expand(study_from(RAW), "nosuch")


# --- login nodes ------------------------------------------------------------------------------------------


def test_what_builds_the_dag_imports_neither_torch_nor_timm():
    code = f"""
import json, sys
from pathlib import Path
import linvit.config, linvit.grid, linvit.results, linvit.tables, linvit.figures, linvit.claims, linvit.cli
import linvit.plan
study = linvit.config.load_study({str(CONFIG)!r})
runs = linvit.grid.expand(study, "paper")
[run.to_json() for run in runs.values()], linvit.grid.sources_of(study)
print(json.dumps([len(runs), sorted({{"torch", "timm", "torchvision"}} & set(sys.modules))]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [2274, []]


def test_a_source_may_not_be_named_like_no_source():
    config = read_yaml(CONFIG)
    config["sources"]["none"] = config["sources"].pop("dino")
    with pytest.raises(ConfigError, match=r"sources\.none: the name of runs without a source"):
        study_from(config)


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        ("rand-m9-mstd0.5-inc1", True),
        ("augmix-m5-w4-d2", True),
        ("augmix-a0.5-b1-mstd2", True),
        ("v0", True),
        ("v0r-mstd0.5", True),
        ("original", True),
        ("originalr", True),
        ("3a", True),
        ("rand", True),
        ("rand-n3-p0.5-mmax12-tweights", True),
        ("rand-t3a-m5", True),
        ("rnad-m9", False),
        ("rand_m9", False),
        ("", False),
        *[(f"rand-{odd}", False) for odd in ("mm", "zz9", "w7", "n1.5", "n0", "m", "m9-inc", "inc2", "m9.5", "p1.5")],
        *[(f"rand-{odd}", False) for odd in ("m9-msd0.5", "m9-", "tmine", "mstd", "mstd1.", "m-9")],
        *[(f"augmix-{odd}", False) for odd in ("q3", "m", "w0", "a0", "a0.0", "b2", "n2")],
        *[(f"{policy}-{odd}", False) for policy in ("v0", "original", "3a") for odd in ("zz9", "m9", "mstd", "x1")],
    ],
)
def test_an_augmentation_policy_that_timm_does_not_read_whole_is_refused(policy, allowed):
    config = read_yaml(CONFIG)
    config["recipes"]["transfer"]["auto_augment"] = policy
    if allowed:
        assert study_from(config).recipes["transfer"].auto_augment == policy
        image = PIL.Image.new("RGB", (8, 8), "red")
        assert create_transform(8, is_training=True, auto_augment=policy)(image).shape == (3, 8, 8)
    else:
        with pytest.raises(ConfigError, match=r"recipes\.transfer\.auto_augment"):
            study_from(config)


def test_the_shipped_source_is_the_one_the_configuration_names():
    """Its sum is in the runs' settings, so that another file makes them stale."""
    entry = load_study(CONFIG).sources["fashion"]["mini"]
    assert entry.sha256 == sha256_of(str(resource(entry.path)))
