"""The resolved specs of the grid `paper`, held against the paper value by value [arXiv:2609.35745].

The numbers stand here a second time on purpose: a change of `config.yaml` or of a default that leaves the paper's
recipe, data or initialisations fails here.
"""

from collections import Counter

import pytest
from fakes import CONFIG

from linvit.config import load_study
from linvit.grid import evaluations, expand

PAPER = expand(load_study(CONFIG), "paper")

# Sec. B.1: DeiT's sizes.
SIZES = {
    "tiny": {"dim": 192, "heads": 3},
    "small": {"dim": 384, "heads": 6},
    "base": {"dim": 768, "heads": 12},
}
EVERY_SIZE = {"depth": 12, "patch_size": 16, "image_size": 224, "channels": 3}

# Sec. B.1, Table A: class token, positions, pooling; whether Mimetic and Impulse are defined, and an attention map.
SOFTMAX_LIKE = {"class_token": True, "positions": "learned", "pool": "token", "analytic_inits": True}
PATCHES_ONLY = {"class_token": False, "positions": "sincos", "pool": "avg"}
VARIANTS = {
    "softmax": SOFTMAX_LIKE,
    "elu": {**SOFTMAX_LIKE, "attention_map": True},
    "relu": {**SOFTMAX_LIKE, "attention_map": True},
    "inline": {**SOFTMAX_LIKE, "attention_map": True},
    "mhla": {**PATCHES_ONLY, "analytic_inits": True, "attention_map": False},
    "ttt": {**PATCHES_ONLY, "analytic_inits": False, "attention_map": False},
}

TARGETS = {
    "softmax": "linvit.attention.softmax:SoftmaxAttention",
    "elu": "linvit.attention.kernel:EluAttention",
    "relu": "linvit.attention.kernel:ReluAttention",
    "inline": "linvit.attention.inline:InlineAttention",
    "mhla": "linvit.attention.mhla:MhlaAttention",
    "ttt": "linvit.attention.ttt:TttAttention",
}

# Table B: classes, training and test images, epochs, warm-up, sizes.
DATASETS = {
    "imagenet": (1000, 1_281_167, 50_000, 300, 50, {"tiny", "small", "base"}),
    "cifar10": (10, 50_000, 10_000, 300, 50, {"tiny", "small"}),
    "cifar100": (100, 50_000, 10_000, 300, 50, {"tiny", "small"}),
    "stl10": (10, 5_000, 8_000, 300, 50, {"tiny", "small"}),
    "food101": (101, 75_750, 25_250, 300, 50, {"tiny", "small"}),
    "flowers102": (102, 1_020, 6_149, 600, 100, {"tiny", "small"}),
    "pets": (37, 3_680, 3_669, 600, 100, {"tiny", "small"}),
}

IMAGENET_STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SYNSETS = "timm.data:_info/imagenet_synsets.txt"
# The official splits, as torchvision names them. Flowers: its "val" has as many images as its "train".
READERS = {
    "imagenet": {"folder": "imagenet", "class_names": SYNSETS},
    "cifar10": {"torchvision": "CIFAR10", "train": {"train": True}, "test": {"train": False}},
    "cifar100": {"torchvision": "CIFAR100", "train": {"train": True}, "test": {"train": False}},
    "stl10": {"torchvision": "STL10", "train": {"split": "train"}, "test": {"split": "test"}},
    "food101": {"torchvision": "Food101", "train": {"split": "train"}, "test": {"split": "test"}},
    "flowers102": {"torchvision": "Flowers102", "train": {"split": "train"}, "test": {"split": "test"}},
    "pets": {"torchvision": "OxfordIIITPet", "train": {"split": "trainval"}, "test": {"split": "test"}},
}
# Table 2: sets, images, and the classes that they hold where it is not all.
SHIFTED = {
    "imagenet-a": (7_500, "timm.data:_info/imagenet_a_synsets.txt"),
    "imagenet-r": (30_000, "timm.data:_info/imagenet_r_synsets.txt"),
    "imagenet-sketch": (50_889, None),
    "imagenet-v2": (10_000, None),
}
# Sec. 4.3: where the weights of Table 1 come from, besides DeiT's.
SOURCES = {
    "dino": {"timm": "vit_base_patch16_224.dino"},
    "mae": {"timm": "vit_base_patch16_224.mae"},
    "mocov3": {"path": "checkpoints/vit-b-300ep.pth.tar"},
    "ibot": {"path": "checkpoints/checkpoint_teacher.pth"},
}

# Table C: both columns; what differs is below.
RECIPE = {
    "lr": 2e-3,
    "min_lr": 1e-6,
    "betas": (0.9, 0.999),
    "weight_decay": 0.05,
    "clip_grad": 3.0,
    "label_smoothing": 0.1,
    "flip": 0.5,
    "color_jitter": 0.4,
    "eval_crop": 0.9,
    "distill_weight": 50.0,
    # Not in the paper: timm's defaults, and the precision that the device has.
    "crop_scale": (0.08, 1.0),
    "crop_ratio": (3 / 4, 4 / 3),
    "interpolation": "bicubic",
    "precision": "auto",
    # Only random-resized crop, flip and colour jitter.
    "auto_augment": None,
    "mixup": 0.0,
    "cutmix": 0.0,
    "random_erasing": 0.0,
}
BATCH = {"imagenet": 4096}
TRANSFER_BATCH = 512
DROP_PATH = {("imagenet", "base"): 0.1}

# Table A; "all Softmax weights" but the head, which is new on every downstream set.
ALL = {"attention", "mlp", "norms", "patch_embed", "positions", "class_token"}
COPIED = {
    "random": set(),
    "mimetic": set(),
    "impulse": set(),
    "copy": {"attention"},
    "mlpcopy": {"mlp"},
    "fullcopy": ALL,
    # Table G: less and less of FullCopy.
    "fullcopy-notoken": ALL - {"class_token"},
    "fullcopy-notoken-nopos": ALL - {"class_token", "positions"},
    "fullcopy-notoken-nopos-nopatch": ALL - {"class_token", "positions", "patch_embed"},
}
# Sec. B.4: each target over its own range of weights; everywhere else outputs at 50.
SWEEPS = {
    **{f"copy-output{weight}": ("output", float(weight)) for weight in (10, 30, 100, 300)},
    "copy-map3e3": ("map", 3e3),
    "copy-map1e4": ("map", 1e4),
    "copy-map3e4": ("map", 3e4),
    "copy-map1e5": ("map", 1e5),
    "copy-map3e5": ("map", 3e5),
}
DISTILLED = {f"{start}-distill" for start in COPIED if start not in ("mimetic", "impulse")}


def values(part, keys) -> dict:
    return {key: getattr(part, key) for key in keys}


def distinct(key) -> set:
    return {key(spec) for spec in PAPER.values()}


def each(key):
    """One spec of each value, so that every value is looked at once."""
    return list({key(spec): spec for spec in PAPER.values()}.values())


def test_models():
    assert distinct(lambda spec: spec.size.name) == set(SIZES)
    for size in (spec.size for spec in each(lambda spec: spec.size)):
        expected = SIZES[size.name] | EVERY_SIZE
        assert values(size, expected) == expected


def test_operators():
    assert distinct(lambda spec: spec.variant.name) == set(VARIANTS)
    for variant in (spec.variant for spec in each(lambda spec: spec.variant.name)):
        assert variant.target == TARGETS[variant.name]
        assert values(variant, VARIANTS[variant.name]) == VARIANTS[variant.name]
        # Every operator as its authors have it, InLine without its local residual branch: no options.
        assert variant.kwargs == {}


def test_data_sets_and_schedules():
    assert distinct(lambda spec: spec.dataset.name) == set(DATASETS)
    for spec in each(lambda spec: (spec.dataset.name, spec.size.name)):
        classes, train, test, epochs, warmup, sizes = DATASETS[spec.dataset.name]
        assert (spec.dataset.classes, spec.dataset.train_size, spec.dataset.test_size) == (classes, train, test)
        assert (spec.recipe.epochs, spec.recipe.warmup_epochs) == (epochs, warmup)
        assert spec.size.name in sizes
    for name, (*_, sizes) in DATASETS.items():
        assert {spec.size.name for spec in PAPER.values() if spec.dataset.name == name} == sizes


def test_splits_and_statistics():
    for dataset in (spec.dataset for spec in each(lambda spec: spec.dataset.model_dump_json())):
        given = dataset.model_dump(exclude_none=True, exclude={"name", "classes", "train_size", "test_size"})
        assert given == READERS[dataset.name] | IMAGENET_STATISTICS


def test_sets_out_of_distribution():
    found = evaluations(load_study(CONFIG), "paper").values()
    assert {evaluation.dataset.name for evaluation in found} == set(SHIFTED)
    for evaluation in found:
        dataset = evaluation.dataset
        assert (dataset.test_size, dataset.subset) == SHIFTED[dataset.name]
        assert (dataset.test_of, dataset.classes, dataset.class_names) == ("imagenet", 1000, SYNSETS)
    # ELU and TTT, Random and Copy of three seeds, and the source; each on all sets.
    models = Counter(evaluation.run.name for evaluation in found)
    assert (len(models), set(models.values())) == (13, {4})


def test_recipe():
    for spec in each(lambda spec: (spec.dataset.name, spec.size.name, spec.recipe)):
        assert values(spec.recipe, RECIPE) == RECIPE
        assert spec.recipe.batch_size == BATCH.get(spec.dataset.name, TRANSFER_BATCH)
        assert spec.recipe.drop_path == DROP_PATH.get((spec.dataset.name, spec.size.name), 0.0)
        assert not spec.other_recipe


def test_one_recipe_for_all_that_is_compared():
    recipes = {}
    for spec in PAPER.values():
        recipes.setdefault((spec.dataset.name, spec.size.name), set()).add(spec.recipe)
    assert set(map(len, recipes.values())) == {1}


def test_xu_et_als_own_recipe():
    recipes = load_study(CONFIG).recipes
    for name, lr, batch in (("xu2024", 2e-3, 512), ("xu2024-imagenet", 4e-3, 4096)):
        expected = RECIPE | {"auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0}
        expected |= {"random_erasing": 0.25, "clip_grad": None, "eval_crop": 0.875, "lr": lr, "batch_size": batch}
        assert values(recipes[name], expected) == expected


@pytest.mark.parametrize("spec", each(lambda spec: spec.init.name), ids=lambda spec: spec.init.name)
def test_initialisations(spec):
    init = spec.init
    if init.name == "pretrained":
        assert (set(init.copied), init.train, init.distill) == (ALL | {"head"}, False, None)
        return
    start = "copy" if init.name in SWEEPS else init.name.removesuffix("-distill")
    assert set(init.copied) == COPIED[start]
    assert init.analytic == (start if start in ("mimetic", "impulse") else None)
    assert init.train
    if init.name not in DISTILLED | set(SWEEPS):
        assert init.distill is None
        return
    assert (init.distill.target, init.distill.weight) == SWEEPS.get(init.name, ("output", 50.0))
    assert init.distill.reduction == "mean"


def test_every_initialisation_of_the_paper_is_there():
    assert distinct(lambda spec: spec.init.name) == {*COPIED, *DISTILLED, *SWEEPS, "pretrained"}


def test_sources_are_deits_of_the_same_size_but_for_table_1():
    for spec in PAPER.values():
        if spec.source is None:
            assert spec.init.name in ("random", "mimetic", "impulse")
            continue
        assert spec.source.size == spec.size
        if spec.source.name == "deit":
            assert spec.source.timm == f"deit_{spec.size.name}_patch16_224.fb_in1k"
            continue
        assert spec.source.model_dump(include={"timm", "path"}, exclude_none=True) == SOURCES[spec.source.name]
        assert (spec.dataset.name, spec.size.name, spec.init.name) == ("imagenet", "base", "copy")
        assert spec.variant.name in ("elu", "relu", "mhla", "ttt")


def test_the_softmax_reference():
    softmax = [spec for spec in PAPER.values() if spec.variant.name == "softmax"]
    for spec in softmax:
        assert spec.init.name == ("pretrained" if spec.dataset.name == "imagenet" else "fullcopy")
    # Six sets of two sizes in three seeds; on ImageNet-1K one run a size.
    assert Counter(spec.init.name for spec in softmax) == {"fullcopy": 36, "pretrained": 3}


def test_the_loss_ablation():
    swept = [spec for spec in PAPER.values() if spec.init.name in SWEEPS]
    # Nine of ten losses are of this ablation alone; three sets, three operators, three seeds.
    assert len(swept) == 9 * 27
    assert {spec.size.name for spec in swept} == {"small"}
    assert {spec.variant.name for spec in swept} == {"elu", "relu", "inline"}
    assert {spec.dataset.name for spec in swept} == {"flowers102", "pets", "cifar100"}


def test_three_seeds_and_2274_runs():
    seeds = {}
    for name, spec in PAPER.items():
        seeds.setdefault(name.rsplit("/", 1)[0], set()).add(spec.seed)
    single = {cell for cell, found in seeds.items() if found != {0, 1, 2}}
    assert single == {f"imagenet/{size}/softmax/pretrained/deit" for size in SIZES}
    assert len(PAPER) == 2274
