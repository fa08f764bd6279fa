"""The table of rates: which workloads a grid has, and what is refused of a file."""

import datetime

import pytest
from tiny import STUDY, one_line, study_config

from linvit.config import ConfigError, study_from
from linvit.grid import expand
from linvit.rates import (
    Rate,
    Rates,
    RatesError,
    Workload,
    default_path,
    read_rates,
    workload_of,
    workloads_of,
    write_rates,
)

ROW = Rate(
    size="wee",
    variant="relu",
    distill="output",
    precision="float32",
    batch_size=8,
    train_images_per_second=1.5,
    eval_images_per_second=None,
    error="out of memory with 16 images a batch",
)
TABLE = Rates(device="cpu", threads=2, versions={"torch": "2"}, date=datetime.date(2026, 1, 2), rates=(ROW,))


def test_the_demo_has_five_workloads():
    plain, output = None, "output"
    assert list(workloads_of(STUDY, "demo")) == [
        Workload("mini", variant, distill, "auto")
        for variant, distill in (("relu", plain), ("relu", output), ("ttt", plain), ("ttt", output), ("softmax", plain))
    ]


@pytest.mark.parametrize("grid", STUDY.grids)
def test_every_run_has_a_workload_of_its_grid(grid):
    found = workloads_of(STUDY, grid)
    assert set(found) == {workload_of(run) for run in expand(STUDY, grid).values()}
    assert all(workload_of(run) == workload for workload, run in found.items())


def test_maps_are_another_workload_than_outputs():
    targets = {(workload.variant, workload.distill) for workload in workloads_of(STUDY, "paper", sizes=["small"])}
    assert {(variant, target) for variant in ("elu", "relu", "inline") for target in (None, "output", "map")} < targets
    assert ("ttt", "map") not in targets


def test_the_training_of_a_source_is_a_workload(tmp_path):
    config = study_config(tmp_path / "bands.npz")
    config["sources"]["old"]["wee"] = {"train": {"dataset": "bands", "recipe": "short"}}
    assert [str(workload) for workload in workloads_of(study_from(config))] == ["wee/relu", "wee/softmax"]


def test_sizes_and_variants_are_picked_of_those_in_the_grid():
    picked = workloads_of(STUDY, "paper", sizes=["base"], variants=["ttt", "softmax"])
    assert [str(workload) for workload in picked] == ["base/ttt", "base/softmax", "base/ttt+output"]
    with pytest.raises(ConfigError) as caught:
        workloads_of(STUDY, "demo", variants=["relu", "elu"])
    assert one_line(caught.value) == "no run of the grid has variant 'elu'; allowed: relu, ttt, softmax"
    with pytest.raises(ConfigError, match="no run of the grid has size 'base'; allowed: mini"):
        workloads_of(STUDY, "demo", sizes=["base"])


def test_a_workload_is_named_by_what_makes_it_slow():
    names = [("relu", None, "auto"), ("relu", "map", "auto"), ("relu", "output", "bfloat16", True, True)]
    assert [str(Workload("tiny", *rest)) for rest in names] == [
        "tiny/relu",
        "tiny/relu+map",
        "tiny/relu+output bfloat16 compile grad_checkpointing",
    ]


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = default_path(STUDY.model_copy(update={"results": str(tmp_path)}))
    assert read_rates(path) is None
    write_rates(TABLE, path)
    assert read_rates(path) == TABLE
    assert read_rates(path).by_workload == {Workload("wee", "relu", "output", "float32"): ROW}
    assert path == tmp_path / "bench" / "throughput.json"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "Invalid JSON"),
        ("{}", "device: missing"),
        (TABLE.model_dump_json().replace("1.5", "-1.5"), "train_images_per_second: "),
        (TABLE.model_dump_json().replace('"threads":2', '"threads":"2"'), "threads: "),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path, text, wrong):
    path = tmp_path / "throughput.json"
    path.write_text(text)
    with pytest.raises(RatesError) as caught:
        read_rates(path)
    assert one_line(caught.value).startswith(f"{path}: no table of throughput: ")
    assert wrong in str(caught.value)


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(RatesError, match="directory"):
        read_rates(tmp_path)
