"""Grids: the numbers of runs the paper implies, specs that survive JSON, seeds that never meet."""

import copy
import itertools
import json
import math
import re

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import CONFIG, RECIPE, STUDY, spec, store_source

from linvit import sources
from linvit.cli import main
from linvit.config import DISTANCES, ConfigError, Dataset, Distill, Init, Recipe, Size, Variant, read_yaml, study_from
from linvit.grid import RANDOM, RunSpec, Source, evaluations, expand, source_of, sources_of
from linvit.run import build_student

RAW = yaml.safe_load(CONFIG.read_text())
PAPER = expand(STUDY, "paper")
TRANSFERS = ("cifar10", "cifar100", "stl10", "food101", "flowers102", "pets")
LINEAR = ("elu", "relu", "inline", "mhla", "ttt")
ATTENTION_ONLY = ("random", "mimetic", "impulse", "copy")
STARTS = ("random", "copy", "mlpcopy", "fullcopy")
COMPONENTS = (*STARTS, *(f"{start}-distill" for start in STARTS))


def of(run: RunSpec) -> tuple[str, str, str, str, str]:
    return run.dataset.name, run.size.name, run.variant.name, run.init.name, run.source.name if run.source else "none"


def is_fig2(run: RunSpec) -> bool:
    _, _, variant, start, source = of(run)
    return variant in LINEAR and start in ATTENTION_ONLY and source in ("none", "deit")


def is_reference(run: RunSpec) -> bool:
    return run.variant.name == "softmax"


def is_figs34ab(run: RunSpec) -> bool:
    name, _, variant, start, source = of(run)
    new = set(COMPONENTS) - {"random", "copy"}
    return name in TRANSFERS and variant in LINEAR and start in new and source == "deit"


def is_table_f(run: RunSpec) -> bool:
    name, size, variant, start, _ = of(run)
    return (name, size) == ("imagenet", "base") and variant in ("relu", "ttt") and start in set(COMPONENTS[2:])


def is_table_g(run: RunSpec) -> bool:
    return run.init.name.startswith("fullcopy-notoken")


def is_table_1(run: RunSpec) -> bool:
    return of(run)[4] in ("dino", "mocov3", "ibot", "mae")


def is_fig5(run: RunSpec) -> bool:
    return re.fullmatch(r"copy-(output|map)\w+", run.init.name) is not None


PARTS = {
    is_fig2: 810,
    is_figs34ab: 1080,
    is_table_f: 36,
    is_table_g: 18,
    is_table_1: 48,
    is_fig5: 243,
}


# --- how many runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "runs"), [("paper", 2274), ("mini", 147), ("losses", 66), ("quick", 48), ("demo", 11)]
)
def test_a_grid_has_as_many_runs_as_the_documents_say(grid, runs):
    assert len(expand(STUDY, grid)) == runs


@pytest.mark.parametrize(("part", "runs"), PARTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_each_figure_and_table_of_the_paper_needs_its_number_of_runs(part, runs):
    assert sum(part(run) for run in PAPER.values() if not is_reference(run)) == runs


def test_the_softmax_reference_is_36_trainings_and_3_evaluations():
    references = [run for run in PAPER.values() if is_reference(run)]
    assert len(references) == 36 + 3
    evaluated = [run for run in references if not run.init.train]
    assert sorted(run.name for run in evaluated) == [
        f"imagenet/{size}/softmax/pretrained/deit/seed0" for size in ("base", "small", "tiny")
    ]
    assert {run.init.name for run in references if run.init.train} == {"fullcopy"}
    assert {run.dataset.name for run in references if run.init.train} == set(TRANSFERS)


def test_table_2_is_the_evaluation_of_runs_that_are_there_anyway():
    found = evaluations(STUDY, "paper")
    assert {evaluation.dataset.name for evaluation in found.values()} == {
        f"imagenet-{name}" for name in ("a", "r", "sketch", "v2")
    }
    runs = {evaluation.run.name: evaluation.run for evaluation in found.values()}
    assert all(PAPER[name] == run for name, run in runs.items())
    trained = itertools.product(["elu", "ttt"], ["random", "copy"], range(3))
    cells = {(*of(run)[:4], run.seed) for run in runs.values()}
    assert cells == {("imagenet", "base", *cell) for cell in (*trained, ("softmax", "pretrained", 0))}
    assert len(found) == 4 * len(runs)
    assert "imagenet/base/ttt/copy/deit/seed2/ood/imagenet-v2" in found


def test_a_block_that_asks_for_evaluations_has_the_same_runs_as_one_that_does_not():
    """So that no run becomes stale when its table is wanted."""
    (block,) = (block for block in STUDY.grids["paper"] if block.ood and "elu" in block.variants)
    plain = block.model_copy(update={"ood": ()})
    runs = [
        [run.to_json() for run in expand(STUDY.model_copy(update={"grids": {"x": (blocks,)}}), "x").values()]
        for blocks in (block, plain)
    ]
    assert runs[0] == runs[1]
    assert not any("ood" in run or "test_of" in run for run in runs[0])


@pytest.mark.parametrize("grid", ["demo", "mini"])
def test_a_grid_without_the_key_has_no_evaluations(grid):
    assert evaluations(STUDY, grid) == {}


def test_every_run_of_the_paper_belongs_to_exactly_one_part():
    parts = [*PARTS, is_reference]
    strays = [name for name, run in PAPER.items() if sum(part(run) for part in parts) != 1]
    assert strays == []


def test_figure_5_matches_outputs_and_maps_over_the_papers_weights():
    found = {}
    for run in PAPER.values():
        distill = run.init.distill
        if of(run)[:3] == ("pets", "small", "inline") and distill and run.init.copied == ("attention",):
            found.setdefault(distill.target, set()).add(distill.weight)
    assert found == {"output": {10, 30, 50, 100, 300}, "map": {3e3, 1e4, 3e4, 1e5, 3e5}}


def test_the_losses_grid_has_figure_5s_weights_and_the_losses_of_other_works_with_their_own():
    found = {}
    for run in expand(STUDY, "losses").values():
        if run.init.distill:
            loss = (run.init.distill.target, run.init.distill.distance, run.init.distill.reduction)
            found.setdefault(loss, set()).add(run.init.distill.weight)
            assert run.init.copied == ("attention",)
    assert found == {
        ("output", "mse", "mean"): {10, 30, 50, 100, 300},
        ("map", "mse", "mean"): {3e3, 1e4, 3e4, 1e5, 3e5},
        ("map", "cross_entropy", "sum"): {0.3, 3, 30},
        ("heads", "mse", "mean"): {10, 100, 1000},
        ("output", "l2", "mean"): {1, 10, 100, 1000},
    }
    own = {name: STUDY.inits[f"copy-{name}"].distill.weight for name in ("transfer", "lolcats", "radlads")}
    assert own == {"transfer": 3, "lolcats": 1000, "radlads": 1}


@pytest.mark.parametrize("grid", RAW["grids"])
def test_names_are_unique_and_are_paths_of_six_parts(grid):
    runs = expand(STUDY, grid)
    assert len({run.name for run in runs.values()}) == len(runs)
    for name, run in runs.items():
        assert name == run.name
        assert re.fullmatch(r"[\w@-]+(/[\w-]+){4}/seed\d", name)
        dataset, *others = of(run)
        dataset += f"@{run.recipe.name}" if run.other_recipe else ""
        assert name == "/".join((dataset, *others, f"seed{run.seed}"))


def test_equal_specs_never_stand_under_two_names():
    assert len({run.to_json() for run in PAPER.values()}) == len(PAPER)


def test_the_grid_of_the_configuration_is_the_default():
    assert list(expand(STUDY)) == list(expand(STUDY, STUDY.grid)) == list(expand(STUDY, "demo"))


# --- de-duplication and sources ---------------------------------------------------------------------------


def grid_of(*blocks: dict, **changes) -> dict[str, RunSpec]:
    """The runs of a grid of blocks, over the repository's catalogue."""
    block = {"datasets": ["pets"], "sizes": ["base"], "variants": ["relu"], "inits": ["random"], "seeds": [0]}
    return expand(study_from(RAW | {"grids": {"x": [block | b for b in blocks]}, "grid": "x"} | changes))


@pytest.mark.parametrize("start", ["random", "mimetic", "impulse"])
def test_a_run_that_uses_no_source_is_trained_once_however_many_are_compared(start):
    every = ["deit", "dino", "mae", "mocov3", "ibot"]
    runs = grid_of({"inits": [start, "copy"], "sources": every})
    assert [name for name, run in runs.items() if run.init.name == start] == [f"pets/base/relu/{start}/none/seed0"]
    assert runs[f"pets/base/relu/{start}/none/seed0"].source is None
    assert [run.source.name for run in runs.values() if run.init.name == "copy"] == every


def test_a_random_start_with_distillation_has_a_source():
    assert list(grid_of({"inits": ["random-distill"], "sources": ["mae"]})) == [
        "pets/base/relu/random-distill/mae/seed0"
    ]


def test_overlapping_blocks_are_united_in_the_order_of_their_first_mention():
    names = list(grid_of({"seeds": [1, 0]}, {"seeds": [2, 0, 1]}, {"seeds": [3]}))
    assert names == [f"pets/base/relu/random/none/seed{seed}" for seed in (1, 0, 2, 3)]


def test_a_grid_is_the_product_of_its_axes():
    runs = grid_of({"datasets": ["pets", "stl10"], "variants": ["relu", "elu"], "seeds": [0, 1]})
    expected = itertools.product(("pets", "stl10"), ("relu", "elu"), (0, 1))
    assert list(runs) == [f"{data}/base/{variant}/random/none/seed{seed}" for data, variant, seed in expected]


def test_every_source_is_resolved_for_every_size_it_has():
    assert set(sources_of(STUDY)) == {f"{name}/{size}" for name, sizes in RAW["sources"].items() for size in sizes}
    assert sources_of(STUDY)["deit/small"] == Source(
        name="deit", size=STUDY.sizes["small"], timm="deit_small_patch16_224.fb_in1k"
    )


def test_a_source_that_is_trained_holds_its_training_as_a_spec_of_its_own_role():
    run = source_of(STUDY, "fashion-trained", "mini").train
    assert (run.role, run.variant.name, run.init, run.seed) == ("source", "softmax", RANDOM, 0)
    assert (run.dataset.name, run.recipe.name, run.source) == ("fashion-mnist", "fashion-source", None)


def test_a_changed_source_changes_the_specs_that_use_it_and_no_other():
    changed = json.loads(json.dumps(RAW))
    changed["sources"]["fashion"]["mini"]["path"] = "elsewhere.safetensors"
    before, after = expand(STUDY, "demo"), expand(study_from(changed), "demo")
    for name, run in before.items():
        assert (after[name].to_json() == run.to_json()) == (run.source is None)


# --- the weight of the distillation -----------------------------------------------------------------------


def test_the_weight_is_the_recipes_unless_the_init_gives_one():
    recipes = RAW["recipes"] | {"transfer-long": RAW["recipes"]["transfer-long"] | {"distill_weight": 7.0}}
    inits = ["copy-distill", "copy-output30", "copy-map1e4", "copy"]
    runs = grid_of({"inits": inits, "sources": ["deit"]}, recipes=recipes)
    weights = {run.init.name: run.init.distill and run.init.distill.weight for run in runs.values()}
    assert weights == {"copy-distill": 7.0, "copy-output30": 30.0, "copy-map1e4": 1e4, "copy": None}


def test_the_weight_is_50_everywhere_in_the_papers_own_grids():
    weights = {run.init.distill.weight for run in PAPER.values() if run.init.name.endswith("-distill")}
    assert weights == {50.0}


# --- recipes ----------------------------------------------------------------------------------------------


def test_a_recipe_that_is_not_the_data_sets_own_appears_in_the_name():
    runs = grid_of({"recipe": "xu2024"}, {})
    assert list(runs) == ["pets@xu2024/base/relu/random/none/seed0", "pets/base/relu/random/none/seed0"]
    assert [run.recipe.name for run in runs.values()] == ["xu2024", "transfer-long"]


def test_naming_the_data_sets_own_recipe_changes_nothing():
    named, default = grid_of({"recipe": "transfer-long"}), grid_of({})
    assert [(name, run.to_json()) for name, run in named.items()] == [(n, r.to_json()) for n, r in default.items()]


def test_a_recipe_by_size_is_taken_by_size():
    recipes = {run.size.name: run.recipe.name for run in PAPER.values() if run.dataset.name == "imagenet"}
    assert recipes == {"tiny": "imagenet", "small": "imagenet", "base": "imagenet-base"}


# --- JSON -------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9_-])?", fullmatch=True)
# Neither numbers written as text, which kwargs refuse, nor an empty line.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Nd", "Cc", "Cs"]), min_size=1, max_size=20)
FRACTIONS = st.floats(0, 1)
POSITIVE = st.floats(0, 1e9, exclude_min=True)
COUNTS = st.integers(1, 10**6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=5,
)


@st.composite
def sizes(draw) -> Size:
    heads, patch = draw(st.integers(1, 16)), draw(st.integers(1, 32))
    return Size(
        name=draw(NAMES),
        dim=4 * heads * draw(st.integers(1, 16)),
        depth=draw(st.integers(1, 40)),
        heads=heads,
        patch_size=patch,
        image_size=patch * draw(st.integers(1, 20)),
        channels=draw(st.sampled_from([1, 3])),
    )


@st.composite
def datasets(draw, channels: int) -> Dataset:
    reader = draw(st.sampled_from(["torchvision", "folder", "npz", "idx"]))
    arguments = st.dictionaries(TEXTS, PLAIN, max_size=2) if reader == "torchvision" else TEXTS
    return Dataset(
        name=draw(NAMES),
        train=draw(st.none() | arguments),
        test=draw(st.none() | arguments),
        classes=draw(COUNTS),
        train_size=draw(st.none() | COUNTS),
        mean=tuple(draw(st.lists(FRACTIONS, min_size=channels, max_size=channels))),
        std=tuple(draw(st.lists(st.floats(0, 1, exclude_min=True), min_size=channels, max_size=channels))),
        **{reader: draw(TEXTS)},
    )


@st.composite
def recipes(draw) -> Recipe:
    epochs = draw(st.integers(1, 1000))
    low, high = sorted(draw(st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1))))
    lr = draw(POSITIVE)
    options = {
        "warmup_epochs": st.integers(0, epochs - 1),
        "batch_size": COUNTS,
        "min_lr": st.floats(0, lr),
        "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        "clip_grad": st.none() | POSITIVE,
        "label_smoothing": FRACTIONS,
        "drop_path": FRACTIONS,
        "distill_weight": POSITIVE,
        "crop_scale": st.just((low, high)),
        "auto_augment": st.sampled_from([None, "rand-m9-mstd0.5-inc1", "original"]),
        "mixup": st.just(0.0) | st.floats(0.01, 1),
        "interpolation": st.sampled_from(["bilinear", "bicubic"]),
        "precision": st.sampled_from(["float32", "bfloat16"]),
        "eval_every": COUNTS,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(options))))
    return Recipe(
        name=draw(NAMES), epochs=epochs, lr=lr, **({"min_lr": 0.0} | {key: draw(options[key]) for key in chosen})
    )


@st.composite
def inits(draw) -> Init:
    analytic = draw(st.sampled_from([None, "mimetic", "impulse"]))
    groups = ["mlp", "norms", "patch_embed", "class_token", "positions", "head", *([] if analytic else ["attention"])]
    target = draw(st.sampled_from(list(DISTANCES)))
    distill = st.builds(
        Distill,
        target=st.just(target),
        distance=st.sampled_from(DISTANCES[target]),
        weight=st.none() | POSITIVE,
        reduction=st.sampled_from(["mean", "sum"]),
    )
    return Init(
        name=draw(NAMES),
        copy=tuple(draw(st.lists(st.sampled_from(groups), unique=True))),
        analytic=analytic,
        distill=draw(st.none() | distill),
    )


def variants(analytic_inits: st.SearchStrategy) -> st.SearchStrategy:
    return st.builds(
        Variant,
        name=NAMES,
        target=st.just("some.package:Class"),
        kwargs=st.dictionaries(TEXTS, PLAIN, max_size=3),
        positions=st.sampled_from(["learned", "sincos"]),
        pool=st.sampled_from(["token", "avg"]),
        analytic_inits=analytic_inits,
        attention_map=st.booleans(),
    )


@st.composite
def specs(draw, role: str = "student") -> RunSpec:
    trained = st.deferred(lambda: specs("source"))
    origin = st.one_of(
        st.fixed_dictionaries({"timm": TEXTS}),
        st.fixed_dictionaries({"url": TEXTS, "sha256": st.just("0" * 64)}),
        st.fixed_dictionaries({"path": TEXTS}),
        *([st.fixed_dictionaries({"train": trained})] if role == "student" else []),
    )
    size, init = draw(sizes()), draw(inits())
    has_source = init.needs_source or draw(st.booleans())
    return RunSpec(
        dataset=draw(datasets(size.channels)),
        size=size,
        variant=draw(variants(st.just(True) if init.analytic else st.booleans())),
        init=init,
        source=Source(name=draw(NAMES), size=size, **draw(origin)) if has_source else None,
        recipe=draw(recipes()),
        seed=draw(st.integers(0, 2**40)),
        other_recipe=draw(st.booleans()),
        role=role,
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(specs())
def test_a_spec_survives_json_exactly(run):
    text = run.to_json()
    again = RunSpec.from_json(text)
    assert again == run
    assert again.to_json() == text
    assert again.name == run.name
    assert again.stream("order", 3) == run.stream("order", 3)
    assert RunSpec.from_json(json.dumps(json.loads(text), indent=1)) == run


NEEDS = "needs a source"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"init": {"name": "x", "distill": {}}}, f"init 'x' {NEEDS}"),
        ({"init": {"name": "x", "copy": ["mlp"]}}, f"init 'x' {NEEDS}"),
        ({"recipe": {"name": "short", "epochs": 1, "align": {"epochs": 1}}}, "recipe 'short' aligns attentions"),
        ({"init": {"name": "x", "analytic": "mimetic"}, "variant": {"analytic_inits": False}}, "is not defined for"),
        *[({"dataset": {"mean": [0.5] * n, "std": [0.5] * n}}, f"mean: {n} values, but size") for n in (0, 2, 3)],
        (
            {"size": {"dim": 6, "heads": 1}, "variant": {"positions": "sincos"}},
            "dim 6 of size 'wee' is no multiple of 4",
        ),
    ],
)
def test_a_spec_by_hand_whose_parts_do_not_go_together_is_refused_in_one_line(tmp_path, capsys, changes, told):
    parts = json.loads(spec("bands.npz").to_json())
    for part, change in changes.items():
        parts[part] = change if "name" in change else parts[part] | change
    (tmp_path / "spec.json").write_text(json.dumps(parts))
    assert main(["train", str(tmp_path / "spec.json"), "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"linvit: error: {tmp_path}/spec.json: not a RunSpec: ")
    assert told in line


def test_a_source_whose_training_would_be_of_other_channels_is_refused_by_name():
    raw = copy.deepcopy(RAW)
    raw["sources"]["fashion-trained"]["mini"]["train"]["dataset"] = "pets"
    with pytest.raises(ConfigError) as caught:
        sources_of(study_from(raw))
    assert str(caught.value) == (
        "sources.fashion-trained.mini.train: datasets.pets.mean: 3 values, but size 'mini' has 1 channels"
    )


def test_every_run_of_the_paper_survives_json():
    assert all(RunSpec.from_json(run.to_json()) == run for run in PAPER.values())


def test_what_decides_which_losses_are_defined_is_no_part_of_a_run():
    for name, variant in STUDY.variants.items():
        (run,) = grid_of({"variants": [name]}).values()
        assert type(run.variant) is Variant
        assert run.variant == variant.settings()
        assert not {"head_outputs", "map_distribution"} & set(json.loads(run.to_json())["variant"])


def test_defaults_are_left_out_of_the_json():
    run = spec("bands.npz", recipe=Recipe(name="bare", epochs=1))
    assert json.loads(run.to_json()) == {
        "dataset": {
            "name": "bands",
            "npz": "bands.npz",
            "classes": 3,
            "train_size": 21,
            "test_size": 12,
            "mean": [0.4],
            "std": [0.2],
        },
        "size": {
            "name": "wee",
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "channels": 1,
        },
        "variant": {
            "name": "relu",
            "target": "linvit.attention.kernel:ReluAttention",
            "attention_map": True,
        },
        "init": {"name": "random"},
        "recipe": {"name": "bare", "epochs": 1},
        "seed": 0,
    }


def test_an_option_added_with_a_default_leaves_old_specs_as_they_were():
    class LaterRecipe(Recipe):
        layer_decay: float = 1.0

    class LaterSpec(RunSpec):
        recipe: LaterRecipe
        note: str = ""

    for run in itertools.islice(PAPER.values(), 0, None, 100):
        assert LaterSpec.model_validate_json(run.to_json()).to_json() == run.to_json()


@pytest.mark.parametrize(
    ("table", "name", "entry"),
    [
        ("variants", "mine", {"target": "my.package:Attention", "kwargs": {"window": 7}}),
        ("inits", "mine", {"copy": ["norms"]}),
        ("sizes", "mine", {"dim": 8, "depth": 1, "heads": 1}),
        ("recipes", "mine", {"epochs": 3}),
        ("sources", "mine", {"tiny": {"timm": "x"}}),
        ("datasets", "mine", {"npz": "x.npz", "classes": 2, "recipe": "transfer"}),
    ],
)
def test_adding_a_part_leaves_the_json_of_every_other_run_as_it_was(table, name, entry):
    config = RAW | {table: {name: entry, **RAW[table]}}
    before = {run: spec.to_json() for run, spec in PAPER.items()}
    assert {run: spec.to_json() for run, spec in expand(study_from(config), "paper").items()} == before


def test_a_variant_added_to_a_block_adds_its_runs_alone():
    config = json.loads(json.dumps(RAW))
    config["variants"]["mine"] = {"target": "my.package:Attention"}
    config["grids"]["demo"][0]["variants"].append("mine")
    before, after = expand(STUDY, "demo"), expand(study_from(config), "demo")
    assert {name: after[name].to_json() for name in before} == {name: run.to_json() for name, run in before.items()}
    assert {after[name].variant.name for name in set(after) - set(before)} == {"mine"}
    assert len(after) == len(before) + 5


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"seed": 0}', "null", '{"seed": "0"}'], ids=lambda text: text.replace(" ", "")
)
def test_json_that_is_no_spec_is_refused(text):
    with pytest.raises(ValueError, match="RunSpec"):
        RunSpec.from_json(text)


def test_json_with_an_unknown_key_or_another_type_is_refused():
    good = json.loads(spec("bands.npz").to_json())
    RunSpec.from_json(json.dumps(good))
    for change in ({"tpyo": 1}, {"seed": "0"}, {"seed": -1}, {"recipe": {"name": "a/b", "epochs": 1}}):
        with pytest.raises(ValueError, match="RunSpec"):
            RunSpec.from_json(json.dumps(good | change))


# --- seeds ------------------------------------------------------------------------------------------------

PURPOSES = [("model",), ("analytic",)] + [
    (purpose, *numbers)
    for purpose in ("order", "augment", "step")
    for numbers in [(epoch,) for epoch in range(1, 4)] + [(epoch, step) for epoch in range(1, 4) for step in range(3)]
]


def test_streams_of_sources_and_students_never_meet():
    student = spec("bands.npz")
    seeds = {
        (role, seed, purpose): student.model_copy(update={"role": role, "seed": seed}).stream(*purpose)
        for role in ("student", "source")
        for seed in range(100)
        for purpose in PURPOSES
    }
    assert len(seeds) == 2 * 100 * len(PURPOSES)
    assert len(set(seeds.values())) == len(seeds)
    # What torch.manual_seed takes.
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    # numpy's and random's generators are seeded with the lower 32 bits.
    assert len({seed % 2**32 for seed in seeds.values()}) == len(seeds)


@pytest.mark.parametrize("purpose", [("model",), ("order", 2), ("augment", 2, 5), ("step", 1, 0)])
def test_a_stream_depends_on_role_seed_and_purpose_alone(purpose):
    """Runs that differ in variant, initialisation or data set are paired by seed."""
    for seed in (0, 1, 2):
        assert len({run.stream(*purpose) for run in PAPER.values() if run.seed == seed}) == 1
    assert len({run.stream(*purpose) for run in PAPER.values()}) == 3


def test_streams_are_the_same_on_every_machine():
    """Python's own hash is salted; these must not be."""
    assert spec("bands.npz").stream("order", 1) == 7621309790581952986  # sha256 of student/0/order/1


# --- a student that has its source's seed -----------------------------------------------------------------


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0).item()


@pytest.mark.parametrize("variant", ["softmax", *LINEAR])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_student_does_not_draw_the_numbers_its_source_started_from(variant, seed):
    """Otherwise "random" positions are those the source was trained from: once worth seven points of accuracy."""
    made = spec("bands.npz", "softmax", seed=seed, role="source", init=RANDOM)
    student = spec("bands.npz", variant, seed=seed)
    start, drawn = (dict(build_student(run, None).named_parameters()) for run in (made, student))
    compared = 0
    for name in start.keys() & drawn.keys():
        # Vectors start as constants, and fixed positions are nobody's draw.
        if start[name].std() > 0 and drawn[name].requires_grad and start[name].shape == drawn[name].shape:
            assert abs(cosine(start[name], drawn[name])) < 6 / math.sqrt(start[name].numel()), name
            compared += 1
    assert compared >= (7 if variant == "ttt" else 11)
    assert {"patch_embed.proj.weight", "head.weight", "blocks.1.mlp.fc2.weight"} <= start.keys() & drawn.keys()


def test_the_comparison_of_draws_would_notice_the_trap():
    """Without the roles, the two draw alike."""
    made = spec("bands.npz", "softmax", role="source")
    trapped = spec("bands.npz", "relu", role="source")
    start, drawn = (dict(build_student(run, None).named_parameters()) for run in (made, trapped))
    for name in ("pos_embed", "patch_embed.proj.weight"):
        assert cosine(start[name], drawn[name]) > 0.999, name


def test_building_a_student_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    build_student(spec("bands.npz", "ttt"), None)
    assert torch.equal(torch.rand(3), expected)


def test_a_student_is_built_from_its_seed_whatever_ran_before():
    torch.manual_seed(1)
    first = build_student(spec("bands.npz", "mhla"), None).state_dict()
    torch.manual_seed(2)
    again = build_student(spec("bands.npz", "mhla"), None).state_dict()
    other = build_student(spec("bands.npz", "mhla", seed=1), None).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_what_an_init_does_not_copy_is_the_same_draw_as_at_random(tmp_path):
    """Initialisations are paired: they differ in what they copy, in nothing else."""
    prepared = store_source(tmp_path)
    weights = sources.load(tmp_path / prepared.folder)
    plain = build_student(spec("bands.npz", "relu"), None).state_dict()
    copied = build_student(spec("bands.npz", "relu", "mlpcopy", source=prepared), weights).state_dict()
    for name, tensor in plain.items():
        expected = weights.tensors[name] if ".mlp." in name else tensor
        assert torch.equal(copied[name], expected), name


def test_two_different_runs_under_one_name_are_refused():
    """Two sources of one name cannot be; two specs can differ when a catalogue is built by hand."""
    block = STUDY.grids["demo"][0]
    study = STUDY.model_copy(update={"grids": {"x": (block, block)}})
    calls = iter([RECIPE, RECIPE.model_copy(update={"epochs": 4})] * 100)

    class Recipes(dict):
        def __getitem__(self, name):
            return next(calls)

    odd = block.model_copy(update={"inits": ("random",), "variants": ("relu",)})
    study = study.model_copy(update={"grids": {"x": (odd, odd)}, "recipes": Recipes()})
    with pytest.raises(ConfigError, match="two different runs would be named 'fashion-1k/mini/relu/random/none/seed0'"):
        expand(study, "x")


def test_runs_from_a_source_of_other_statistics_see_images_normalised_by_those():
    config = read_yaml(CONFIG)
    own = {"mean": [0.5, 0.5, 0.5], "std": [0.4, 0.4, 0.4]}
    config["sources"]["other"] = {"tiny": {"timm": "a_vit", **own}}
    block = {"datasets": ["pets"], "sizes": ["tiny"], "variants": ["relu"], "inits": ["random", "copy"], "seeds": [0]}
    runs = expand(study_from({**config, "grids": {"g": [block | {"sources": ["deit", "other"]}]}, "grid": "g"}))
    statistics = {name: (spec.dataset.mean[0], spec.dataset.std[0]) for name, spec in runs.items()}
    assert statistics == {
        "pets/tiny/relu/random/none/seed0": (0.485, 0.229),
        "pets/tiny/relu/copy/deit/seed0": (0.485, 0.229),
        "pets/tiny/relu/copy/other/seed0": (0.5, 0.4),
    }
    assert "mean" not in json.loads(runs["pets/tiny/relu/copy/other/seed0"].source.model_dump_json())


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "sources.other.tiny: mean and std go together"),
        ({"mean": [0.5], "std": [0.5, 0.5]}, "sources.other.tiny: mean and std go together"),
        ({"mean": [0.5], "std": [0.5]}, "sources.other.tiny.mean: needs a value for each of 3 channels"),
    ],
)
def test_statistics_of_a_source_are_whole(entry, told):
    config = read_yaml(CONFIG)
    config["sources"]["other"] = {"tiny": {"timm": "a_vit", **entry}}
    with pytest.raises(ConfigError, match=re.escape(told)):
        study_from(config)
