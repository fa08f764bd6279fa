"""The stage before training, in which attentions alone learn their teacher's outputs on its own tokens."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from models import SIZE, STUDY, images, student
from test_tensorboard import scalars
from tiny import RECIPE, changed, one_line, repeatable, source, spec, store_source, write_npz

from linvit import run
from linvit.align import Alignment, alignment_of
from linvit.config import ConfigError, Recipe, study_from
from linvit.distill import DistillError
from linvit.fit import Interrupted, NonFiniteLoss
from linvit.grid import SOFTMAX, RunSpec, runs_of
from linvit.plan import plan_of
from linvit.trained import MODEL
from linvit.vit import build_vit
from linvit.watch import PROGRESS

ALIGNED = changed(RECIPE, align={"epochs": 2})
VARIANTS = ("softmax", "elu", "relu", "inline", "mhla", "ttt")


@pytest.fixture
def study(tmp_path) -> Path:
    write_npz(tmp_path / "bands.npz")
    store_source(tmp_path)
    return tmp_path


def aligned_spec(study: Path, variant: str = "relu", start: str = "fullcopy-distill", **recipe) -> RunSpec:
    return spec(study / "bands.npz", variant, start, source=source(), recipe=changed(ALIGNED, **recipe))


def teacher(**options):
    return student(SOFTMAX, seed=50, num_classes=0, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_by_its_formula(variant):
    """Each block's attention, on what its teacher's takes, by hand."""
    old, new = teacher(), student(variant)
    extra = old.num_prefix_tokens - new.num_prefix_tokens
    x = images()
    with torch.no_grad():
        tokens, errors = old.norm_pre(old._pos_embed(old.patch_embed(x))), []
        for theirs, ours in zip(old.blocks, new.blocks, strict=True):
            taken = theirs.norm1(tokens)
            errors.append((ours.attn(taken[:, extra:]) - theirs.attn(taken)[:, extra:]).square().mean())
            tokens = theirs(tokens)
        with Alignment(old, new) as alignment:
            torch.testing.assert_close(alignment(x), torch.stack(errors).mean())
    if variant == "softmax":  # and zero where the attentions are the teacher's
        new.load_state_dict(old.state_dict(), strict=False)
        with Alignment(old, new) as alignment:
            assert alignment(x) == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_attentions_learn_and_each_from_its_own_error(variant):
    old, new = teacher(), student(variant)
    with Alignment(old, new) as alignment:
        alignment(images()).backward()
    moved = {name for name, parameter in new.named_parameters() if parameter.grad is not None}
    assert moved == {name for name, parameter in new.named_parameters() if ".attn." in name and parameter.requires_grad}
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in old.parameters())

    grads = [parameter.grad.clone() for parameter in new.blocks[1].attn.parameters()]
    for parameter in new.blocks[0].parameters():  # the teacher's tokens come to block 1, whatever block 0 does
        torch.nn.init.normal_(parameter)
    new.zero_grad()
    with Alignment(old, new) as alignment:
        alignment(images()).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, new.blocks[1].attn.parameters(), strict=True))


def test_hooks_are_gone_afterwards_even_after_an_error():
    old, new = teacher(), student("relu")
    with pytest.raises(RuntimeError, match="on purpose"), Alignment(old, new):
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks for module in old.modules())


def test_models_that_do_not_match_are_refused():
    with pytest.raises(DistillError, match="blocks") as error:
        Alignment(teacher(), build_vit(changed(SIZE, depth=1), STUDY.variants["relu"], num_classes=3))
    one_line(error.value)


def test_the_compiled_stage_gives_the_same_loss_and_gradients():
    old, new = teacher(), student("relu")
    with Alignment(old, new) as alignment:
        plain = alignment(images())
        plain.backward()
        grads = [parameter.grad.clone() for parameter in new.blocks.parameters() if parameter.grad is not None]
        new.zero_grad()
        compiled = torch.compile(alignment, backend="aot_eager")(images())
        compiled.backward()
    torch.testing.assert_close(compiled, plain)
    found = [parameter.grad for parameter in new.blocks.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, grads)


def test_a_run_aligns_first_and_then_trains_everything(study):
    """Alignment brings the attentions nearer to the teacher's; the run's metrics tell both stages."""
    one = aligned_spec(study)
    metrics = run.train(one, study / "run", sources_folder=study, data_root=study)
    assert [record["epoch"] for record in metrics["alignment"]] == [1, 2]
    assert metrics["alignment"][1]["loss"] < metrics["alignment"][0]["loss"]
    assert [record["epoch"] for record in metrics["history"]] == [1, 2, 3]
    assert {path.name for path in (study / "run").iterdir()} == {"spec.json", "metrics.json", MODEL}
    without = spec(study / "bands.npz", "relu", "fullcopy-distill", source=source())
    plain = run.train(without, study / "plain", sources_folder=study, data_root=study)
    assert "alignment" not in plain
    assert plain["history"][0]["distill_loss"] > metrics["history"][0]["distill_loss"]


def test_both_stages_have_random_numbers_of_their_own(study):
    one = aligned_spec(study)
    assert {partial(one.stream, "align")("epoch", 1), one.stream("epoch", 1)} != {one.stream("epoch", 1)}


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_an_interrupted_run_ends_as_an_undisturbed_one(study, steps):
    """Stopped in the first stage's first epoch, in its second one, and in the second stage (three steps an epoch)."""
    one = aligned_spec(study)
    options = {"sources_folder": study, "data_root": study}
    whole = run.train(one, study / "whole", **options)
    left, epoch, step = iter([False] * (steps - 1) + [True]), *divmod(steps - 1, 3)
    with pytest.raises(Interrupted, match=f"stopped in epoch {epoch + 1} after step {step + 1}$"):
        run.train(one, study / "run", **options, stop=lambda: next(left))
    assert json.loads((study / "run" / PROGRESS).read_text())["epoch"] == epoch
    resumed = run.train(one, study / "run", **options)
    assert repeatable(resumed) == repeatable(whole)
    assert (study / "run" / MODEL).read_bytes() == (study / "whole" / MODEL).read_bytes()


def test_seconds_and_curves_of_a_run_that_goes_on_in_its_second_stage_hold_the_first(study):
    pytest.importorskip("tensorboard")
    one = aligned_spec(study)
    options = {"sources_folder": study, "data_root": study, "tensorboard": True}

    def stopped(steps: int) -> dict:
        left = iter([False] * (steps - 1) + [True])
        with pytest.raises(Interrupted):
            run.train(one, study / "run", **options, stop=lambda: next(left))
        return json.loads((study / "run" / PROGRESS).read_text())

    assert stopped(5)["stage"] == "alignment"
    checkpoint = study / "run" / "checkpoint.align.pt"
    state = torch.load(checkpoint)
    state["progress"]["earlier_seconds"] += 1000.0
    torch.save(state, checkpoint)
    for steps in (6, 1):  # in the process that ends the first stage, and in one that finds it ended
        found = stopped(steps)
        assert found["stage"] is None
        assert 1000 < found["seconds"] < 2000
    metrics = run.train(one, study / "run", **options)
    found = scalars(study / "run")
    assert [step for step, _ in found["learning_rate"]] == [1, 2, 3, 4, 5]
    for tag, stage, before in (("loss/alignment", "alignment", 0), ("loss/total", "history", 2)):
        assert found[tag] == [(before + record["epoch"], pytest.approx(record["loss"])) for record in metrics[stage]]


def test_the_stage_has_the_recipe_but_for_what_it_sets_itself():
    recipe = changed(ALIGNED, mixup=0.8, cutmix=1.0, grad_checkpointing=True, align={"epochs": 4, "lr": 0.01})
    stage = alignment_of(recipe, recipe.align)
    assert (stage.epochs, stage.lr, stage.warmup_epochs, stage.align) == (4, 0.01, 0, None)
    assert (stage.mixup, stage.cutmix, stage.grad_checkpointing) == (0, 0, False)
    assert (stage.batch_size, stage.weight_decay, stage.crop_scale) == (recipe.batch_size, 0.05, recipe.crop_scale)
    Recipe.model_validate(stage.model_dump())


def test_passes_count_both_stages():
    assert (RECIPE.passes, ALIGNED.passes) == (3, 5)
    lines = plan_of(STUDY, "quick").runs
    assert {task.epochs for line in lines for task in line.tasks} == {45, 7}
    assert json.loads(ALIGNED.model_dump_json())["align"] == {"epochs": 2, "lr": 0.002}


def test_a_stage_without_a_teacher_is_refused():
    config = json.loads(STUDY.model_dump_json(by_alias=True))
    block = STUDY.grids["quick"][2]
    with pytest.raises(ConfigError, match=r"recipe 'fashion-quick' aligns .* init 'random' has none") as error:
        list(runs_of(STUDY, block.model_copy(update={"inits": ("random",)})))
    one_line(error.value)
    for table in ("sizes", "variants", "inits", "recipes", "datasets"):
        for entry in config[table].values():
            del entry["name"]
    config["sources"]["fashion-trained"]["mini"]["train"]["recipe"] = "fashion-quick"
    with pytest.raises(
        ConfigError, match=r"sources\.fashion-trained\.mini\.train\.recipe: 'fashion-quick' aligns"
    ) as error:
        study_from(config)
    one_line(error.value)


def test_a_stage_that_diverges_ends_the_run_by_name(study):
    with pytest.raises(NonFiniteLoss, match="loss is not finite at epoch") as error:
        run.train(
            aligned_spec(study, align={"epochs": 2, "lr": 1e30}), study / "run", sources_folder=study, data_root=study
        )
    one_line(error.value)
    assert "align.lr" in error.value.advice
    assert not (study / "run" / "metrics.json").exists()
