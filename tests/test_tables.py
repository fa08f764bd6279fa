"""Top-1 tables against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from fakes import frame, grid_runs, ood_frame, run

from linvit import published
from linvit.results import MINUS, MISSING
from linvit.tables import compare, summarise, write_tables

FORMATS = ("csv", "md", "html", "tex")


def tables(runs: pd.DataFrame, folder) -> tuple[pd.DataFrame, str, str]:
    write_tables(runs, folder)
    csv = pd.read_csv(folder / "top1.csv", keep_default_na=False, na_values=[""])
    return csv, (folder / "top1.md").read_text(), (folder / "top1.tex").read_text()


def rows_of(markdown: str) -> list[list[str]]:
    """The cells of all table rows but the rulers."""
    lines = [line for line in markdown.splitlines() if line.startswith("|") and not line.startswith("|:")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_mean_sample_deviation_and_n():
    runs = frame([run("copy", top1, seed) for seed, top1 in enumerate((80.0, 81.0, 84.0))] + [run("random", 70.0)])
    summary = summarise(runs).set_index("start")
    assert summary.loc["copy", "mean"] == pytest.approx(245 / 3)
    # Deviations -5/3, -2/3, 7/3: squares sum to 78/9, over n - 1 = 2.
    assert summary.loc["copy", "std"] == pytest.approx(np.sqrt(13 / 3))
    assert summary.loc["copy", "n"] == 3
    assert summary.loc["random", "n"] == 1
    assert np.isnan(summary.loc["random", "std"])


def test_the_loss_ablation_stays_apart():
    ablation = [
        run("copy-distill", 60.0, init="copy-output10", distill_weight=10.0),
        run("copy-distill", 50.0, init="copy-map3e3", distill_target="map", distill_weight=3e3),
    ]
    summary = summarise(frame([run("copy-distill", 80.0), *ablation]))
    assert dict(zip(summary["init"], summary["mean"], strict=True)) == {
        "copy-distill": 80.0,
        "copy-map3e3": 50.0,
        "copy-output10": 60.0,
    }


def test_the_layout_is_the_papers(tmp_path):
    runs = grid_runs(tmp_path, "mini")
    csv, markdown, latex = tables(runs, tmp_path)
    header, *body = rows_of(markdown)
    assert header == ["Initialisation", "ELU", "ReLU", "InLine", "MHLA", "TTT"]
    starts = ["Random", "Mimetic", "Impulse", "Copy", "MLPCopy", "FullCopy"]
    distilled = [f"{start} w/ Distill" for start in ("Random", "Copy", "MLPCopy", "FullCopy")]
    assert [row[0] for row in body] == starts + distilled
    assert body[1][5] == body[2][5] == MISSING
    assert markdown.count("\n## ") == 1
    assert "## Fashion-1K, mini, source fashion" in markdown
    assert "Softmax reference (FullCopy): " in markdown
    assert "(n = 3). Mean ± standard deviation over n = 3 seeds." in markdown
    assert set(csv["source"]) == {"none", "fashion"}
    assert len(csv) == len(runs) / 3
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 1


def test_cells_are_rounded_and_name_n_only_where_it_differs(tmp_path):
    rows = [run("copy", top1, seed) for seed, top1 in enumerate((81.04, 81.34))]
    same = [run("random", 70.0, seed) for seed in (0, 1)]
    *_, uniform = rows_of(tables(frame(rows + same), tmp_path)[1])
    assert uniform == ["Copy", "81.2 ± 0.2"]
    _, random, copy = rows_of(tables(frame(rows + same[:1]), tmp_path)[1])
    assert random == ["Random", "70.0 (n = 1)"]
    assert copy == ["Copy", "81.2 ± 0.2 (n = 2)"]
    assert "One seed (n = 1)" in tables(frame(same[:1]), tmp_path)[1]


def test_rows_without_a_source_stand_in_each_sources_section(tmp_path):
    rows = [run("random", 70.0), run("copy", 71.0), run("copy", 72.0, source="mae"), run("copy", 60.0, dataset="stl10")]
    csv, markdown, _ = tables(frame(rows), tmp_path)
    sections = markdown.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "STL-10, tiny, source deit",
        "Oxford-IIIT Pets, tiny, source deit",
        "Oxford-IIIT Pets, tiny, source mae",
    ]
    assert [rows_of(section)[1:] for section in sections] == [
        [["Copy", "60.0"]],
        [["Random", "70.0"], ["Copy", "71.0"]],
        [["Random", "70.0"], ["Copy", "72.0"]],
    ]
    assert len(csv) == 4


def test_sections_follow_data_set_and_size(tmp_path):
    rows = [run("copy", dataset=d, size=s) for d in ("zzz", "imagenet", "pets") for s in ("base", "small", "tiny")]
    summary = summarise(frame(rows))
    assert list(summary["dataset"].unique()) == ["imagenet", "pets", "zzz"]
    assert list(summary["size"])[:3] == ["tiny", "small", "base"]


def test_the_reference_alone_and_a_frame_without_one(tmp_path):
    _, markdown, _ = tables(frame([run("fullcopy", 90.0, variant="softmax")]), tmp_path)
    assert "Softmax reference (FullCopy): 90.0 (n = 1)." in markdown
    assert rows_of(markdown)[1] == ["FullCopy", "90.0"]
    _, markdown, _ = tables(frame([run("copy")]), tmp_path)
    assert "Softmax reference: not run." in markdown


def test_names_are_escaped_in_latex(tmp_path):
    _, _, latex = tables(frame([run("copy", dataset="my_set", variant="my_op", source="a&b")]), tmp_path)
    assert r"my\_set, tiny, source a\&b" in latex
    assert r"Initialisation & my\_op \\" in latex
    assert r"\label{tab:top1-my-set-tiny-source-a-b}" in latex
    assert "±" not in latex


BASE = {"dataset": "imagenet", "size": "base"}


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_ours_stand_beside_the_papers(tmp_path):
    rows = [run("copy", top1, seed, **BASE) for seed, top1 in enumerate((76.0, 76.2, 76.7))]
    rows += [run("copy", 90.0, source="mae", **BASE), run("random", 75.0, **BASE), run("copy", 10.0)]
    numbers = compare(published.tables()["table1"], frame(rows)).set_index(["row", "column"])
    ours = numbers.loc["DeiT", "ReLU"]
    assert (ours["mean"], ours["n"], ours["runs"]) == (pytest.approx(76.3), 3, 3)
    assert (ours["paper"], ours["difference"]) == (75.6, pytest.approx(0.7))
    assert numbers.loc["MAE", "ReLU"]["mean"] == 90.0
    assert numbers.loc["Random", "ReLU"]["difference"] == pytest.approx(-1.5)
    assert numbers.loc["DeiT", "ELU"][["mean", "std", "difference"]].isna().all()

    _, markdown, latex = tables_of(frame(rows), tmp_path, "table1")
    by_row = {(row[0], row[1]): row for row in rows_of(markdown)}
    assert by_row["DeiT", "ours"][2:] == [f"{MISSING} (0 of 3 runs)", "76.3 ± 0.4", *[f"{MISSING} (0 of 3 runs)"] * 2]
    assert by_row["Random", "ours"][3] == "75.0 (1 of 3 runs)"
    assert [row[3] for row in rows_of(markdown) if row[1] == "paper"] == [
        "76.5",
        "75.6",
        "75.2",
        "75.7",
        "75.3",
        "76.0",
    ]
    lines = [row[3] for row in rows_of(markdown) if row[1] == "difference"]
    assert lines == [f"{MINUS}1.5", "+0.7", *[MISSING] * 3, "+14.0"]
    # Three of DeiT's, one of MAE's, one of Random's.
    assert "5 of 72 runs are there; 67 are missing." in markdown
    assert "DeiT & ours & -- (0 of 3 runs) & 76.3 $\\pm$ 0.4 &" in latex
    assert "& paper & 79.6 & 76.5 & 81.8 & 82.2 \\\\" in latex
    assert " & difference & -- & $-$1.5 & -- & -- \\\\" in latex
    assert r"\label{tab:table1}" in latex


def tables_of(runs: pd.DataFrame, folder, name: str) -> tuple[pd.DataFrame, str, str]:
    write_tables(runs, folder)
    return pd.read_csv(folder / f"{name}.csv"), *((folder / f"{name}{end}").read_text() for end in (".md", ".tex"))


def test_more_runs_than_the_papers_are_not_missing_ones():
    rows = [run("copy", 76.0, seed, **BASE) for seed in range(5)]
    numbers = compare(published.tables()["table1"], frame(rows))
    assert numbers["n"].max() == 5


def test_a_whole_paper_grid_fills_all_tables_but_the_one_of_other_images(tmp_path, paper_runs):
    write_tables(paper_runs, tmp_path)
    names = ("top1", "table1", "tableF", "tableG")
    assert files(tmp_path) == {"runs.html", *(f"{name}.{suffix}" for name in names for suffix in FORMATS)}
    for name, count in (("table1", 72), ("tableF", 49), ("tableG", 42)):
        assert f"{count} of {count} runs are there.\n" in (tmp_path / f"{name}.md").read_text()
    softmax = rows_of((tmp_path / "tableF.md").read_text())[-3:]
    assert [row[0] for row in softmax] == ["Softmax", "", ""]
    assert [row[2:5] for row in softmax] == [[""] * 3] * 3
    assert softmax[1][5] == "81.8"
    reference = paper_runs.loc[paper_runs["run"] == "imagenet/base/softmax/pretrained/deit/seed0", "top1"].item()
    assert softmax[0][5] == f"{reference:.1f}"


def test_a_grid_with_no_run_of_a_table_has_no_such_file(tmp_path):
    write_tables(frame([run("copy"), run("random")]), tmp_path)
    assert files(tmp_path) == {"runs.html", *(f"top1.{suffix}" for suffix in FORMATS)}


def test_the_page_of_a_table_holds_what_its_markdown_does(tmp_path):
    write_tables(frame([run("copy", 71.25), run("random", 70.0)]), tmp_path)
    page, cells = (tmp_path / "top1.html").read_text(), rows_of((tmp_path / "top1.md").read_text())
    assert page.count("<tr>") == len(cells) == 3
    for row in cells[1:]:
        assert all(f">{cell}</td>" in page for cell in row)


def test_every_run_has_a_line_of_its_own(tmp_path):
    rows = [run("copy", 71.25, seed=seed, wall_seconds=3600.0 * (seed + 1), commit=None) for seed in range(3)]
    write_tables(frame(rows), tmp_path)
    page = (tmp_path / "runs.html").read_text()
    assert "3 runs; accuracies are the last epoch's." in page
    assert page.count("<tr>") == 4
    for row, hours in zip(rows, ("1.00", "2.00", "3.00"), strict=True):
        line = page[page.index(f'<td style="text-align:left">{row["run"]}</td>') :].split("</tr>")[0]
        assert ">71.25<" in line
        assert f">{hours}<" in line
        assert ">unknown<" in line


def test_table_2_is_of_out_of_distribution_results(tmp_path):
    results = [
        run("copy", 20.0, dataset="imagenet-a", size="base", variant="elu"),
        run("pretrained", 30.0, dataset="imagenet-a", size="base", variant="softmax"),
    ]
    write_tables(frame([run("copy", 81.0, **BASE, variant="elu")]), tmp_path, ood_frame(results))
    lines = rows_of((tmp_path / "table2.md").read_text())
    assert lines[0][2:] == ["ELU, Random", "ELU, Copy", "TTT, Random", "TTT, Copy", "Softmax"]
    assert lines[1][3] == "20.0 (1 of 3 runs)"
    assert lines[1][6] == "30.0"
    assert lines[3][2:] == [MISSING, "+0.9", MISSING, MISSING, "+0.8"]
    assert "2 of 52 runs are there; 50 are missing." in (tmp_path / "table2.md").read_text()
    assert (tmp_path / "table1.md").exists()


def test_the_loss_ablation_is_no_part_of_the_papers_tables(tmp_path):
    rows = [run("copy-distill", 80.0, **BASE)]
    rows += [run("copy-distill", 10.0, 1, init="copy-output10", distill_weight=10.0, **BASE)]
    write_tables(frame(rows), tmp_path)
    assert "80.0 (1 of 3 runs)" in (tmp_path / "tableF.md").read_text()
