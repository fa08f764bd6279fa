"""The printed numbers, and mistakes in a file of them."""

import pytest
from fakes import run

from linvit.config import ConfigError
from linvit.published import Runs, Table, load, tables


def values(name: str) -> dict[str, list[float]]:
    table = tables()[name]
    cells = {(cell.row, cell.column): cell.value for cell in table.cells()}
    return {row: [cells[row, column] for column in table.columns if (row, column) in cells] for row in table.rows}


def test_the_papers_tables_are_all_there():
    assert {name: sum(1 for _ in table.cells()) for name, table in tables().items()} == {
        "table1": 24,
        "table2": 20,
        "tableF": 17,
        "tableG": 14,
        "tableD": 27,
        "tableE": 27,
    }


def test_printed_numbers_agree_where_tables_repeat_each_other():
    """The paper prints ImageNet-1K results of ViT-Base several times."""
    table_1, table_f, table_g = values("table1"), values("tableF"), values("tableG")
    assert [table_f[row][0] for row in ("ReLU", "TTT")] == [table_1["Random"][i] for i in (1, 3)]
    assert [table_f[row][1] for row in ("ReLU", "TTT")] == [table_1["DeiT"][i] for i in (1, 3)]
    for i, row in enumerate(("ReLU", "ReLU w/ Distill")):
        assert [table_g[start][i] for start in ("Random", "Copy", "MLPCopy", "FullCopy")] == table_f[row]
    assert values("tableD")["Softmax"] == values("tableE")["Softmax"]


def test_distill_never_loses_in_print():
    for name in ("tableD", "tableE"):
        rows = values(name)
        for start in ("Random", "Copy", "MLPCopy", "FullCopy"):
            assert all(new > old for new, old in zip(rows[f"{start} w/ Distill"], rows[start], strict=True))


def test_cells_name_their_runs_and_how_many_there_are():
    cells = {(cell.row, cell.column): cell for cell in tables()["tableF"].cells()}
    assert cells["TTT w/ Distill", "MLPCopy"].runs == Runs(
        dataset="imagenet", size="base", variant="ttt", start="mlpcopy", distill=True, source="deit", seeds=3
    )
    assert (cells["TTT w/ Distill", "Copy"].value, cells["TTT w/ Distill", "Copy"].std) == (82.2, 0.2)
    assert cells["Softmax", "FullCopy"].runs.seeds == 1
    assert sum(cell.runs.seeds for cell in cells.values()) == 49
    assert all(cell.runs is None for cell in tables()["tableD"].cells())


def test_a_run_without_a_source_counts_beside_any():
    runs = Runs(dataset="pets", size="tiny", variant="relu", start="random", source="mae")
    assert runs.match(run("random"))
    assert not runs.match(run("random-distill"))
    assert not runs.match(run("random", dataset="stl10"))
    copied = runs.model_copy(update={"start": "copy"})
    assert copied.match(run("copy", source="mae"))
    assert not copied.match(run("copy", source="deit"))


GOOD = """
table1:
  title: t
  what: w
  runs: {dataset: pets, size: tiny, source: deit}
  columns: {ReLU: {variant: relu}}
  rows: {Copy: {runs: {start: copy}, values: [[80.0, 0.1]]}}
"""


def test_a_file_is_read(tmp_path):
    path = tmp_path / "published.yaml"
    path.write_text(GOOD)
    (cell,) = load(path)["table1"].cells()
    assert (cell.value, cell.std, cell.runs.start) == (80.0, 0.1, "copy")
    assert isinstance(load(path)["table1"], Table)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[80.0, 0.1]]", "[80.0, 81.0]", "rows.Copy.values: 2 values for 1 columns"),
        ("[80.0, 0.1]", "800.0", "table1.rows.Copy.values.0"),
        ("start: copy", "start: 3", "start: found 3; allowed: text"),
        ("{start: copy}", "{}", "start: missing"),
        ("title: t", "title: t\n  tpyo: 1", "table1.tpyo: unknown key; allowed: title, what, runs, columns, rows"),
        ("table1:", "table1: {}\ntable1:", "duplicate key 'table1'"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_the_file(tmp_path, old, new, message):
    path = tmp_path / "published.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
