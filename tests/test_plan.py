"""What a grid costs: runs counted by hand and against the documents, what is cached, hours by their formula."""

import datetime
import itertools
import json
from pathlib import Path

import pytest
import yaml
from tiny import CONFIG, STUDY, study_config

from linvit.config import Study, study_from
from linvit.files import write_sealed
from linvit.grid import evaluations, expand, source_of
from linvit.plan import WIDTH, Plan, plan_of, text
from linvit.rates import Rate, Rates, workloads_of

RAW = yaml.safe_load(CONFIG.read_text())
PAPER = {  # runs that a line needs, and those of them that are new: docs/decisions.md, last paragraph
    "Figure 2, Table 1 (DeiT)": (810, 810),
    "Softmax references": (36 + 3, 36 + 3),
    "Table 2": (13, 0),
    "Figures 3, 4, A, B": (1440, 1080),
    "Table F": (48, 36),
    "Table G": (18, 18),
    "Table 1 (other sources)": (48, 48),
    "Figure 5": (270, 243),
}
TABLE = Path("results/bench/throughput.json")


def study(folder: Path, blocks: list[dict] | None = None, recipe: dict | None = None, **dataset) -> Study:
    """Four runs on 21 images for 3 epochs, evaluated on 12 images every 2 epochs, with results in `folder`."""
    config = study_config(folder / "bands.npz") | {"results": str(folder)}
    config["datasets"]["bands"] |= {"train_size": 21, "test_size": 12} | dataset
    config["recipes"]["short"] |= {"eval_every": 2} | (recipe or {})
    config["inits"]["copy-distill"] = {"copy": ["attention"], "distill": {}}
    (block,) = config["grids"]["all"]
    config["grids"]["all"] = [block | changes for changes in blocks or [{}]]
    return study_from(config)


def rates(*rows: tuple[str, str | None, float | None, float | None], error: str | None = None) -> Rates:
    """A table for size `wee`: variant, target of distillation, images per second in training and in evaluation."""
    found = tuple(
        Rate(
            size="wee",
            variant=variant,
            distill=distill,
            precision="auto",
            batch_size=8,
            train_images_per_second=training,
            eval_images_per_second=evaluation,
            error=error,
        )
        for variant, distill, training, evaluation in rows
    )
    return Rates(device="cpu", threads=1, versions={}, date=datetime.date(2026, 1, 2), rates=found)


def hours(plan: Plan) -> list[float | None]:
    return [plan.hours(task) for task in plan.todo]


def keep(path: Path, **content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def keep_run(study: Study, name: str) -> Path:
    """A run's metrics, as far as a plan looks at them."""
    path = Path(study.results, "runs", name, "metrics.json")
    keep(path, name=name, spec=json.loads(expand(study)[name].to_json()))
    return path


def cells(block: dict) -> list[tuple]:
    """Every point of a block's product as what makes two of them the same run."""
    axes = [block[axis] for axis in ("datasets", "sizes", "variants", "seeds", "inits")]
    axes.insert(0, [block.get("recipe")])
    return [
        (*others, start, source if {"copy", "distill"} & (RAW["inits"][start] or {}).keys() else None)
        for *others, start, source in itertools.product(*axes, block.get("sources", [None]))
    ]


# --- runs -------------------------------------------------------------------------------------------------


def test_the_papers_lines_are_those_of_the_documents():
    plan = plan_of(STUDY, "paper")
    assert {line.name: (line.needed, len(line.tasks)) for line in plan.runs} == PAPER
    assert (plan.distinct, plan.points) == (2274, 2686)
    assert (plan.ood.needed, len(plan.sources.tasks)) == (52, 0)


def test_the_documentation_shows_the_papers_plan(tmp_path):
    told = text(plan_of(STUDY.model_copy(update={"results": str(tmp_path)}), "paper"), TABLE)
    shown, _, _ = told.rpartition("\n\n")
    assert f"```\n{shown}\n```" in (CONFIG.parent / "docs/plan.md").read_text()


@pytest.mark.parametrize("grid", RAW["grids"])
def test_runs_are_counted_as_by_hand(grid):
    plan = plan_of(STUDY, grid)
    points, seen, lines = 0, set(), {}
    for number, block in enumerate(RAW["grids"][grid]):
        found = cells(block)
        points += len(found)
        needed, new = lines.setdefault(block.get("for", f"grids.{grid}.{number}"), (set(), set()))
        needed |= set(found)
        new |= set(found) - seen
        seen |= set(found)
    assert plan.points == points
    assert plan.distinct == len(seen) == len(expand(STUDY, grid))
    assert [(line.name, line.needed, len(line.tasks)) for line in plan.runs] == [
        (name, len(needed), len(new)) for name, (needed, new) in lines.items()
    ]


def test_a_run_without_a_source_is_a_point_for_each_source_but_one_run():
    config = RAW | {"grids": {"demo": [RAW["grids"]["demo"][0] | {"sources": ["fashion", "fashion-trained"]}]}}
    plan = plan_of(study_from(config))
    assert (plan.points, plan.distinct) == (2 * 5 * 2, 2 * (1 + 4 * 2))


def test_blocks_for_the_same_share_a_line_and_others_are_named_by_their_place(tmp_path):
    blocks = [{"seeds": [0]}, {"for": "both", "seeds": [0, 1]}, {"seeds": [2]}, {"for": "both", "seeds": [2, 3]}]
    lines = plan_of(study(tmp_path, blocks)).runs
    assert [(line.name, line.needed, len(line.tasks)) for line in lines] == [
        ("grids.all.0", 2, 2),
        ("both", 8, 6),
        ("grids.all.2", 2, 0),
    ]


def test_what_a_block_is_for_changes_no_run(tmp_path):
    plain, labelled = (expand(study(tmp_path, [block])) for block in ({}, {"for": "Figure 1"}))
    assert [run.to_json() for run in plain.values()] == [run.to_json() for run in labelled.values()]


# --- what is cached ---------------------------------------------------------------------------------------


def test_a_run_is_cached_by_its_metrics_until_its_settings_change(tmp_path):
    here = study(tmp_path)
    keep_run(here, "bands/wee/relu/copy/old/seed1")
    (line,) = plan_of(here).lines
    assert (line.needed, line.cached, len(line.todo)) == (4, 1, 3)
    assert plan_of(study(tmp_path, recipe={"lr": 1e-4})).runs[0].cached == 0
    assert plan_of(study(tmp_path / "elsewhere")).runs[0].cached == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"spec": null}'])
def test_a_damaged_file_is_no_cached_run(tmp_path, content):
    here = study(tmp_path)
    keep_run(here, "bands/wee/relu/copy/old/seed1").write_text(content)
    assert plan_of(here).runs[0].cached == 0


def test_a_result_whose_values_were_changed_is_no_cached_run(tmp_path):
    here = study(tmp_path)
    path = keep_run(here, "bands/wee/relu/copy/old/seed1")
    write_sealed(path, json.loads(path.read_bytes()) | {"top1": 50.0})
    assert plan_of(here).runs[0].cached == 1
    path.write_text(path.read_text().replace("50.0", "60.0"))
    assert plan_of(here).runs[0].cached == 0


def test_a_cached_run_counts_in_its_first_line_alone(tmp_path):
    here = study(tmp_path, [{"for": "one"}, {"for": "other", "seeds": [0, 1, 2]}])
    keep_run(here, "bands/wee/relu/random/none/seed0")
    assert [(len(line.tasks), line.cached) for line in plan_of(here).runs] == [(4, 1), (2, 0)]


def test_a_source_that_is_trained_counts_until_its_manifest_holds_its_settings(tmp_path):
    config = study_config(tmp_path / "bands.npz") | {"results": str(tmp_path)}
    config["sources"]["old"]["wee"] = {"train": {"dataset": "bands", "recipe": "short"}}
    config["datasets"]["bands"] |= {"train_size": 21, "test_size": 12}
    here = study_from(config)
    (task,) = plan_of(here).sources.tasks
    assert (task.workload.variant, task.images, task.cached) == ("softmax", 63, False)
    assert [line.name for line in plan_of(here).lines] == ["grids.all.0", "Sources"]
    keep(tmp_path / "sources/old/wee/source.json", spec=json.loads(source_of(here, "old", "wee").train.to_json()))
    assert plan_of(here).sources.cached == 1


def test_an_evaluation_is_cached_with_its_run(tmp_path):
    config = study_config(tmp_path / "bands.npz") | {"results": str(tmp_path)}
    config["datasets"]["later"] = {"npz": "later.npz", "classes": 3, "test_of": "bands", "test_size": 50}
    config["grids"]["all"][0]["ood"] = ["later"]
    here = study_from(config)
    assert (plan_of(here).ood.needed, plan_of(here).ood.cached) == (4, 0)
    name = "bands/wee/relu/copy/old/seed1"
    dataset = evaluations(here)[f"{name}/ood/later"].dataset
    found = {"run": expand(here)[name], "dataset": dataset}
    keep(
        tmp_path / "runs" / name / "ood/later.json",
        **{key: json.loads(part.model_dump_json(exclude_defaults=True)) for key, part in found.items()},
    )
    assert plan_of(here).ood.cached == 0
    keep_run(here, name)
    assert plan_of(here).ood.cached == 1


# --- images and hours -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "evaluated"), [(1, 3), (2, 2), (3, 1), (7, 1)])
def test_hours_are_those_of_training_and_of_each_evaluation(tmp_path, every, evaluated):
    here = study(tmp_path, [{"inits": ["random"], "seeds": [0]}], recipe={"eval_every": every})
    plan = plan_of(here, rates=rates(("relu", None, 100.0, 50.0)))
    seconds = 3 * 21 / 100 + evaluated * 12 / 50
    assert hours(plan) == [pytest.approx(seconds / 3600)]
    assert [task.images for task in plan.todo] == [63]


def test_hours_follow_the_workload_and_leave_out_what_is_cached(tmp_path):
    here = study(tmp_path, [{"inits": ["random", "copy-distill"], "seeds": [0]}])
    table = rates(("relu", None, 100.0, 50.0), ("relu", "output", 10.0, 50.0))
    seconds = [63 / 100 + 24 / 50, 63 / 10 + 24 / 50]
    assert hours(plan_of(here, rates=table)) == pytest.approx([value / 3600 for value in seconds])
    keep_run(here, "bands/wee/relu/copy-distill/old/seed0")
    assert hours(plan_of(here, rates=table)) == pytest.approx([seconds[0] / 3600])


def test_a_model_that_is_not_trained_is_evaluated_once():
    line = next(line for line in plan_of(STUDY, "paper").runs if line.name == "Softmax references")
    untrained = [task for task in line.tasks if task.dataset.name == "imagenet"]
    rate = rates(("softmax", None, 1e-3, 2.0)).rates[0]
    assert [(task.images, task.hours(rate)) for task in untrained] == [(0, 50000 / 2 / 3600)] * 3


def test_evaluations_out_of_distribution_cost_their_images():
    line = plan_of(STUDY, "paper").ood
    sizes = {"imagenet-a": 7500, "imagenet-r": 30000, "imagenet-sketch": 50889, "imagenet-v2": 10000}
    assert sum(task.test_images for task in line.tasks) == 13 * sum(sizes.values())
    assert {task.images for task in line.tasks} == {0}


def test_what_no_rate_is_known_of_is_left_out_and_told(tmp_path):
    here = study(tmp_path, [{"inits": ["random", "copy-distill"], "seeds": [0]}])
    plan = plan_of(here, rates=rates(("relu", None, 360.0, 360.0)))
    assert hours(plan)[1] is None
    lines = text(plan, TABLE).splitlines()
    assert "hours   ≥ 0.00 on one cpu (threads: 1), as measured 2026-01-02" in lines
    assert f"Left out of hours, having no rate in {TABLE}: wee/relu+output." in " ".join(lines)
    assert lines[-1] == "linvit bench --throughput --grid all"


def test_without_a_table_no_hours_are_told(tmp_path):
    lines = text(plan_of(study(tmp_path)), TABLE).splitlines()
    assert "hours   ?" in lines
    assert f"having no rate in {TABLE}: wee/relu." in " ".join(lines)


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [((10.0, 20.0), "measured with 8"), ((None, None), "left out of hours")],
)
def test_a_model_that_did_not_fit_is_told(tmp_path, measured, outcome):
    table = rates(("relu", None, *measured), error="out of memory with 16 images a batch")
    plan = plan_of(study(tmp_path), rates=table)
    assert text(plan, TABLE).splitlines()[-1] == f"wee/relu: out of memory with 16 images a batch; {outcome}."
    assert (None in hours(plan)) == (measured[0] is None)


@pytest.mark.parametrize("unknown", ["train_size", "test_size"])
def test_a_data_set_that_does_not_tell_its_size_is_left_out_and_told(tmp_path, unknown):
    plan = plan_of(study(tmp_path, **{unknown: None}), rates=rates(("relu", None, 100.0, 50.0)))
    assert hours(plan) == [None] * 4
    told = text(plan, TABLE)
    assert "Left out, as datasets.*.train_size or test_size does not tell: bands." in told
    assert ("images  ? million" in told) == (unknown == "train_size")


# --- on one screen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", RAW["grids"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_plan_fits_on_a_screen_totals_first(grid, measured):
    known = [
        Rate(**workload._asdict(), batch_size=8, train_images_per_second=1e-2, eval_images_per_second=1e-2)
        for workload in workloads_of(STUDY, grid)
    ]
    table = rates().model_copy(update={"rates": tuple(known)}) if measured else None
    lines = text(plan_of(STUDY, grid, table), TABLE).splitlines()
    assert lines[0].split() == ["grid", grid]
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 32
