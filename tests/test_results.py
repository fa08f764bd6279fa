"""Metrics files become one tidy frame, and the shared groupings do what they say."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from fakes import CONFIG, frame, grid_runs, metrics, run, write_metrics
from tiny import one_line

from linvit.config import load_study
from linvit.grid import Evaluation, evaluations, expand
from linvit.results import (
    DTYPES,
    HISTORY_DTYPES,
    MAY_LACK,
    MINUS,
    MISSING,
    OOD_DTYPES,
    ResultsError,
    beside_sources,
    collect,
    collect_ood,
    default_runs,
    in_order,
    label,
    read_history,
    read_ood,
    read_runs,
    references,
    signed,
    sizes_in_order,
    write_runs,
)


@pytest.fixture(scope="module")
def paper() -> dict:
    return expand(load_study(CONFIG), "paper")


@pytest.fixture
def spec(paper):
    return paper["pets/tiny/relu/copy-distill/deit/seed1"]


def test_a_row_holds_what_the_metrics_say(tmp_path, spec):
    path = write_metrics(tmp_path, spec, 81.25, best={"epoch": 80, "top1": 81.5, "top5": 99.1})
    runs = collect([path])
    assert runs.dtypes.astype(str).to_dict() == DTYPES
    assert runs.loc[0].to_dict() == {
        "run": "pets/tiny/relu/copy-distill/deit/seed1",
        "dataset": "pets",
        "size": "tiny",
        "variant": "relu",
        "init": "copy-distill",
        "start": "copy",
        "distill": True,
        "distill_target": "output",
        "distill_weight": 50.0,
        "source": "deit",
        "recipe": "transfer-long",
        "seed": 1,
        "top1": 81.25,
        "top5": 99.0,
        "best_top1": 81.5,
        "best_epoch": 80,
        "epochs": 600,
        "parameters": 5_700_000,
        "flops": 1_000_000,
        "train_images_per_second": 100.0,
        "eval_images_per_second": 200.0,
        "wall_seconds": 12.5,
        "peak_memory_bytes": 10_000_000,
        "commit": "abc",
    }


@pytest.mark.parametrize(
    ("init", "loss"),
    [
        ("copy", None),
        ("copy-distill", "output"),
        ("copy-map3e3", "map"),
        ("copy-transfer", "map-cross_entropy"),
        ("copy-lolcats", "heads"),
        ("copy-radlads", "output-l2"),
    ],
)
def test_a_row_names_its_loss(tmp_path, init, loss):
    spec = expand(load_study(CONFIG), "losses")[f"fashion-1k/mini/relu/{init}/fashion/seed0"]
    target = collect([write_metrics(tmp_path, spec, 50.0)]).loc[0, "distill_target"]
    assert (None if pd.isna(target) else target) == loss


def test_rows_are_sorted_whatever_the_order_of_files(tmp_path, paper):
    names = ["stl10/tiny/elu/copy/deit/seed0", "pets/tiny/elu/copy/deit/seed0", "pets/tiny/elu/random/none/seed0"]
    runs = collect([write_metrics(tmp_path, paper[name], 50.0) for name in names])
    assert list(runs["run"]) == sorted(names)


def test_a_source_that_is_only_evaluated_has_no_epochs(tmp_path, paper):
    path = write_metrics(tmp_path, paper["imagenet/base/softmax/pretrained/deit/seed0"], 81.8, best=None)
    row = collect([path]).loc[0]
    assert (row["start"], row["epochs"], row["best_epoch"], row["best_top1"]) == ("pretrained", 0, 0, 81.8)
    assert pd.isna(row["train_images_per_second"])


def test_another_recipe_is_another_data_set(tmp_path, spec):
    path = write_metrics(tmp_path, spec.model_copy(update={"other_recipe": True}), 50.0)
    assert collect([path]).loc[0, "dataset"] == "pets@transfer-long"


@pytest.mark.parametrize("missing", ["top1", "spec", "history", "flops", "best"])
def test_an_incomplete_file_is_named_with_its_key(tmp_path, spec, missing):
    content = metrics(spec, 50.0)
    del content[missing]
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=f"metrics.json: {missing}: missing"):
        collect([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "Invalid JSON"), ('{"name": "a', "Invalid JSON"), ("[]", "found an empty list; allowed: keys with values")],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=rf"metrics.json: .*({message})"):
        collect([path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top1": 101.0}, "top1: found 101.0; allowed: up to 100"),
        ({"top1": float("nan")}, "top1: "),
        ({"name": "other"}, "name 'other' is not its spec's"),
        ({"history": [{"epoch": 7}]}, "history ends at epoch 7 of 600"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, spec, changes, message):
    with pytest.raises(ResultsError, match=f"metrics.json: {message}"):
        collect([write_metrics(tmp_path, spec, 50.0, **changes)])


def test_missing_files_no_files_and_doubles_are_refused(tmp_path, spec):
    with pytest.raises(ResultsError, match=r"absent.json: No such file"):
        collect([tmp_path / "absent.json"])
    with pytest.raises(ResultsError, match="no metrics files"):
        collect([])
    twice = [write_metrics(tmp_path / name, spec, 50.0) for name in ("one", "two")]
    with pytest.raises(ResultsError, match=f"two.*already in .*{Path('one')}"):
        collect(twice)


def test_different_commits_are_warned_of(tmp_path, paper, caplog):
    names = ["pets/tiny/elu/copy/deit/seed0", "pets/tiny/elu/copy/deit/seed1"]
    first, second = (paper[name] for name in names)
    with caplog.at_level(logging.WARNING):
        collect([write_metrics(tmp_path, first, 50.0), write_metrics(tmp_path, second, 50.0)])
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        collect([write_metrics(tmp_path, first, 50.0), write_metrics(tmp_path, second, 50.0, commit=None)])
    assert "different commits: abc (1), unknown (1)" in caplog.text


def test_a_frame_survives_csv_exactly(tmp_path):
    runs = grid_runs(tmp_path, "mini")
    runs.loc[0, "top1"] = 100 / 3
    write_runs(runs, tmp_path / "runs.csv")
    pd.testing.assert_frame_equal(read_runs(tmp_path / "runs.csv"), runs)
    assert [path.name for path in tmp_path.glob("*runs*")] == ["runs.csv"]


def test_unusable_tables_are_named(tmp_path):
    csv = tmp_path / "runs.csv"
    with pytest.raises(ResultsError, match=r"runs.csv: cannot be read \(No such file or directory\)"):
        read_runs(csv)
    broken = {b"": "it is empty", b"\xe3\x00,": "it is no text in UTF-8", b'a,b\n1,"': "EOF inside string"}
    for content, why in broken.items():
        csv.write_bytes(content)
        with pytest.raises(ResultsError, match=rf"runs.csv: not a table of runs: .*{why}"):
            read_runs(csv)
    frame([run()]).drop(columns=["seed", "top1"]).to_csv(csv, index=False)
    with pytest.raises(ResultsError, match=r"runs.csv: missing columns: seed, top1"):
        read_runs(csv)
    csv.write_text("a,left_out\n1,why\n")
    with pytest.raises(ResultsError, match=r"runs.csv: missing columns: run, "):
        read_runs(csv)
    text = frame([run()]).to_csv(index=False)
    csv.write_text(text.replace("top5", "top1"))
    with pytest.raises(ResultsError, match=r"runs.csv: missing columns: top5"):
        read_runs(csv)
    csv.write_text(text.replace("commit", "commit,top1").rstrip() + ",50.0\n")
    with pytest.raises(ResultsError, match=r"runs.csv: columns that are there twice: top1"):
        read_runs(csv)
    csv.write_text(text.rstrip() + ",,\n")
    with pytest.raises(ResultsError, match=r"runs.csv: not a table of runs: rows have more cells than there are col"):
        read_runs(csv)


COUNT, AMOUNT, PERCENT = "a whole number (64 bits) from 0", "a number from 0", "a number from 0 to 100"
WRONG = {
    "text": ({""}, "text"),
    "bool": ({"", "maybe", "1.5"}, "True or False"),
    "count": ({"", "x", "-1", "1.5", "nan", "inf", "9" * 19, "9" * 30, "9" * 400}, COUNT),
    "amount": ({"x", "-1.0", "nan", "inf", "-inf", "1e999"}, AMOUNT),
    "percent": ({"", "x", "-0.5", "101", "nan", "inf"}, PERCENT),
    "finite": ({"x", "nan", "inf", "-inf"}, "a number"),
}
"""Cells that are none of a column's, by its kind, and what is allowed."""
KINDS = {
    **dict.fromkeys(DTYPES, "text"),
    **dict.fromkeys([column for column, dtype in DTYPES.items() if dtype == "int64"], "count"),
    **dict.fromkeys([column for column, dtype in DTYPES.items() if dtype == "float64"], "amount"),
    **dict.fromkeys(["top1", "top5", "best_top1"], "percent"),
    "distill": "bool",
}


def told_of(csv: Path, read: Callable[[Path], pd.DataFrame], rows: pd.DataFrame) -> str:
    """The one line that a reader refuses these rows with."""
    rows.to_csv(csv, index=False)
    with pytest.raises(ResultsError) as told:
        read(csv)
    return one_line(told.value).removeprefix(f"{csv}: ")


def with_cell(rows: pd.DataFrame, column: str, value: str) -> pd.DataFrame:
    """The rows as text, with another value in the second one."""
    rows = rows.astype(object).fillna("").astype(str)
    rows.loc[1, column] = value
    return rows


@pytest.mark.parametrize("column", [column for column in DTYPES if column not in MAY_LACK | {"run"}])
def test_a_cell_that_is_none_of_its_columns_is_named(tmp_path, column):
    rows = frame([run(), run("copy-distill"), run("copy")])
    values, allowed = WRONG[KINDS[column]]
    for value in values | {""}:
        found = told_of(tmp_path / "runs.csv", read_runs, with_cell(rows, column, value))
        assert found.startswith(f"{rows.loc[1, 'run']}: {column}: found ")
        assert found.endswith(f"; allowed: {allowed}")
        assert (": found nothing;" in found) == (value == "")


@pytest.mark.parametrize("column", ["distill_weight", "train_images_per_second"])
def test_a_number_that_may_be_missing_is_one_where_it_is_there(tmp_path, column):
    rows = frame([run(), run("copy-distill"), run("copy")])
    with_cell(rows, column, "").to_csv(tmp_path / "runs.csv", index=False)
    assert pd.isna(read_runs(tmp_path / "runs.csv").loc[1, column])
    for value in WRONG["amount"][0]:
        assert f": {column}: found " in told_of(tmp_path / "runs.csv", read_runs, with_cell(rows, column, value))


def test_a_row_without_a_run_is_told_by_its_number(tmp_path):
    rows = with_cell(frame([run(), run("copy")]), "run", "")
    assert told_of(tmp_path / "runs.csv", read_runs, rows) == "row 2: run: found nothing; allowed: text"
    rows.loc[1, ["run", "top1"]] = "a\nb"
    assert told_of(tmp_path / "runs.csv", read_runs, rows).startswith(r"'a\nb': top1: found 'a\nb'; ")


def test_the_same_run_twice_is_refused_whatever_it_is_called(tmp_path):
    rows = frame([run("random"), run("copy"), run("copy")])
    name, csv = rows.loc[1, "run"], tmp_path / "runs.csv"
    assert told_of(csv, read_runs, rows) == f"{name}: another row has the same run; allowed: one"
    rows.loc[2, "run"] = "mine"
    assert told_of(csv, read_runs, rows).startswith(
        "mine: another row has the same dataset, size, variant, init, source,"
    )


def test_values_at_the_bounds_are_read(tmp_path):
    bounds = {"top1": 0.0, "top5": 100.0, "parameters": 0, "wall_seconds": 0.0, "seed": 2**63 - 1}
    rows = frame([run() | bounds, run("copy") | bounds])
    write_runs(rows, tmp_path / "runs.csv")
    pd.testing.assert_frame_equal(read_runs(tmp_path / "runs.csv"), rows)


def test_a_history_may_lack_all_but_its_run_and_epoch_which_are_once_there(tmp_path):
    epochs = pd.DataFrame([{"run": "a", "epoch": epoch} for epoch in (1, 2)], columns=list(HISTORY_DTYPES))
    epochs = epochs.astype(HISTORY_DTYPES)
    csv = tmp_path / "history.csv"
    write_runs(epochs, csv)
    pd.testing.assert_frame_equal(read_history(csv), epochs)
    assert told_of(csv, read_history, epochs.assign(epoch=2)) == (
        "a, epoch 2: another row has the same run, epoch; allowed: one"
    )
    for column in list(HISTORY_DTYPES)[2:]:
        kind = {"images": "amount", "lr": "amount", "top1": "percent", "top5": "percent"}.get(column, "finite")
        for value in WRONG[kind][0] - {""}:
            found = told_of(csv, read_history, with_cell(epochs, column, value))
            assert found.startswith(f"a, epoch 2: {column}: found ")
    epochs.assign(loss=-1.0).to_csv(csv, index=False)
    assert read_history(csv)["loss"].tolist() == [-1.0, -1.0]


def test_names_and_orders():
    assert label("mlpcopy", True) == "MLPCopy w/ Distill"
    assert label("mine") == "mine"
    assert [signed(value, 1) for value in (1.25, -0.04, -2.0, float("nan"))] == ["+1.2", "+0.0", f"{MINUS}2.0", MISSING]
    assert in_order(["x", "b", "a", "b"], ["a", "b", "c"]) == ["a", "b", "x"]
    assert sizes_in_order(frame([run(size="small"), run(size="base"), run(size="tiny")])) == ["tiny", "small", "base"]


def test_default_runs_leave_the_loss_ablation_out():
    weights = [run("copy-distill", init=f"copy-output{w}", distill_weight=float(w)) for w in (10, 100)]
    others = {
        "copy-map3e3": "map",
        "copy-transfer": "map-cross_entropy",
        "copy-lolcats": "heads",
        "copy-rad": "output-l2",
    }
    losses = [run("copy-distill", init=init, distill_target=target) for init, target in others.items()]
    kept = default_runs(frame([run("copy"), run("copy-distill"), *weights, *losses]))
    assert list(kept["init"]) == ["copy", "copy-distill"]
    assert list(default_runs(frame([weights[0]]))["init"]) == ["copy-output10"]
    assert default_runs(frame(weights)).empty
    assert all(default_runs(frame([loss])).empty for loss in losses)


def test_the_reference_is_the_source_itself_where_it_was_evaluated():
    softmax = [run(init, variant="softmax") for init in ("fullcopy", "pretrained", "random", "fullcopy-distill")]
    other = run("fullcopy", variant="softmax", dataset="stl10")
    found = references(frame([*softmax, other, run("fullcopy")]))
    assert list(found["run"]) == ["pets/tiny/softmax/pretrained/deit/seed0", "stl10/tiny/softmax/fullcopy/deit/seed0"]
    assert references(frame([run("fullcopy")])).empty


def test_runs_without_a_source_stand_beside_each_source():
    rows = [run("random"), run("copy"), run("copy", source="mae"), run("random", dataset="stl10")]
    beside = beside_sources(frame(rows))
    assert list(zip(beside["dataset"], beside["init"], beside["source"], strict=True)) == [
        ("pets", "random", "deit"),
        ("pets", "random", "mae"),
        ("pets", "copy", "deit"),
        ("pets", "copy", "mae"),
        ("stl10", "random", "none"),
    ]


def test_reporting_needs_no_torch():
    code = "import sys, linvit.tables, linvit.figures, linvit.claims; print({'torch', 'timm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_run_of_other_settings_than_the_expected_is_refused(tmp_path, spec):
    path = write_metrics(tmp_path, spec, 81.25)
    assert len(collect([path], {spec.name: spec})) == 1
    other = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"lr": 0.1})})
    with pytest.raises(ResultsError, match=rf"{path}: was run with other settings"):
        collect([path], {spec.name: other})
    with pytest.raises(ResultsError, match="other settings"):
        collect([path], {})


# --- out of distribution ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_2() -> dict[str, Evaluation]:
    return evaluations(load_study(CONFIG), "paper")


def write_evaluation(folder: Path, evaluation: Evaluation, **changes) -> Path:
    content = {
        "run": json.loads(evaluation.run.to_json()),
        "dataset": json.loads(evaluation.dataset.model_dump_json(exclude_defaults=True)),
        "images": 7500,
        "top1": 19.1,
        "top5": 40.5,
        "versions": {"torch": "2.0"},
        "commit": "abc",
    }
    path = folder / f"{evaluation.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changes))
    return path


@pytest.fixture
def evaluation(table_2) -> Evaluation:
    return table_2["imagenet/base/elu/copy/deit/seed2/ood/imagenet-a"]


def test_an_evaluation_is_a_row_with_its_data_set_and_its_runs_cell(tmp_path, evaluation, table_2):
    frame = collect_ood([write_evaluation(tmp_path, evaluation)], table_2)
    assert frame.dtypes.astype(str).to_dict() == OOD_DTYPES
    assert pd.isna(frame.loc[0, "distill_target"])
    assert frame.loc[0].drop("distill_target").to_dict() == {
        "run": "imagenet/base/elu/copy/deit/seed2",
        "dataset": "imagenet-a",
        "size": "base",
        "variant": "elu",
        "init": "copy",
        "start": "copy",
        "distill": False,
        "source": "deit",
        "seed": 2,
        "top1": 19.1,
        "top5": 40.5,
        "images": 7500,
    }


def test_a_table_of_evaluations_is_read_as_it_was_written(tmp_path, table_2):
    frame = collect_ood([write_evaluation(tmp_path, evaluation) for evaluation in table_2.values()], table_2)
    assert len(frame) == 52
    assert list(frame["dataset"]) == sorted(frame["dataset"])
    write_runs(frame, tmp_path / "ood.csv")
    pd.testing.assert_frame_equal(read_ood(tmp_path / "ood.csv"), frame)


def test_evaluations_with_other_settings_or_twice_or_none_are_refused(tmp_path, evaluation, table_2):
    path = write_evaluation(tmp_path, evaluation)
    with pytest.raises(ResultsError, match="is there twice"):
        collect_ood([path, path])
    larger = evaluation.model_copy(update={"dataset": evaluation.dataset.model_copy(update={"test_size": 7501})})
    longer = evaluation.run.model_copy(update={"recipe": evaluation.run.recipe.model_copy(update={"epochs": 301})})
    for other in (larger, evaluation.model_copy(update={"run": longer})):
        with pytest.raises(ResultsError, match=r"imagenet-a.json: is of other settings than the configuration's"):
            collect_ood([path], table_2 | {evaluation.name: other})
    with pytest.raises(ResultsError, match="has the key ood"):
        collect_ood([])


@pytest.mark.parametrize(
    ("changes", "message"), [({"top1": 101.0}, "top1: "), ({"images": 0}, "images: "), ({"run": {}}, "run.")]
)
def test_evaluations_that_cannot_be_are_refused(tmp_path, evaluation, changes, message):
    with pytest.raises(ResultsError, match=rf"imagenet-a.json: {message}"):
        collect_ood([write_evaluation(tmp_path, evaluation, **changes)])


def test_a_table_of_runs_is_no_table_of_evaluations(tmp_path):
    write_runs(frame([run()]), tmp_path / "runs.csv")
    with pytest.raises(ResultsError, match="missing columns: images"):
        read_ood(tmp_path / "runs.csv")
