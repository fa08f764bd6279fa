"""Results whose files are damaged: left out, and told wherever the others are shown."""

import csv
import logging
from pathlib import Path

import pandas as pd
import pytest
from fakes import CONFIG, frame, metrics, plausible, run, write_metrics

from linvit import incomplete
from linvit.claims import claims_text
from linvit.cli import main
from linvit.config import load_study
from linvit.figures import FIGURES, draw
from linvit.files import write_sealed
from linvit.grid import expand
from linvit.results import ResultsError, collect, collect_history, read_history, read_runs, write_runs
from linvit.tables import write_tables

GONE = "fashion-1k/mini/relu/copy/fashion/seed0"
WHY = "Invalid JSON"
SENTENCE = "INCOMPLETE: 1 result is left out, damaged on disk."


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    specs = expand(load_study(CONFIG), "mini").values()
    return [write_metrics(tmp_path / "runs", spec, plausible(spec)) for spec in specs]


@pytest.fixture
def damaged(paths: list[Path], tmp_path: Path) -> Path:
    path = tmp_path / "runs" / GONE / "metrics.json"
    path.write_bytes(path.read_bytes()[:100])
    return path


def test_a_damaged_run_is_left_out_by_name_and_warned_of_with_its_file(paths, damaged, caplog):
    with caplog.at_level(logging.WARNING):
        runs = collect(paths)
    assert len(runs) == len(paths) - 1
    assert GONE not in set(runs["run"])
    ((name, why),) = incomplete.left_out(runs).items()
    assert name == GONE
    assert why.startswith(f"{damaged}: ")
    assert WHY in why
    assert f"1 of {len(paths)} results are LEFT OUT" in caplog.text
    assert why in caplog.text


def test_a_table_of_whole_runs_lacks_nothing(paths, caplog):
    with caplog.at_level(logging.WARNING):
        runs = collect(paths)
    assert incomplete.left_out(runs) == {}
    assert not caplog.records
    assert incomplete.in_short({}) == incomplete.note({}) == ""


def test_what_is_left_out_stands_in_the_tables_file_and_is_read_again(paths, damaged, tmp_path):
    runs = collect(paths)
    write_runs(runs, tmp_path / "runs.csv")
    found = read_runs(tmp_path / "runs.csv")
    pd.testing.assert_frame_equal(found, runs)
    assert incomplete.left_out(found) == incomplete.left_out(runs)
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows if row["left_out"]] == [GONE]
    assert [row["run"] for row in rows if not row["top1"]] == [GONE]


def test_a_table_of_histories_tells_whose_is_left_out(paths, damaged, tmp_path):
    history = collect_history(paths)
    write_runs(history, tmp_path / "history.csv")
    found = read_history(tmp_path / "history.csv")
    pd.testing.assert_frame_equal(found, history)
    assert list(incomplete.left_out(found)) == list(incomplete.left_out(history)) == [GONE]


def test_the_figure_of_throughput_says_that_it_is_incomplete(paths, damaged, tmp_path):
    write_runs(collect(paths), tmp_path / "runs.csv")
    assert draw("throughput", tmp_path / "runs.csv").get_supxlabel().startswith(f"{SENTENCE}\n")


def test_a_report_counts_the_runs_that_it_shows_and_warns_of_the_others_once(paths, damaged, tmp_path, capsys, caplog):
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    told, left_out, *_ = capsys.readouterr().out.splitlines()
    assert told.endswith(f": {len(paths) - 1} runs of {tmp_path / 'runs'}")
    assert left_out.startswith(SENTENCE)
    assert caplog.text.count("LEFT OUT") == 1
    assert list(incomplete.left_out(read_history(tmp_path / "report/history.csv"))) == [GONE]


def test_blank_lines_of_a_table_that_was_edited_hide_no_run(paths, damaged, tmp_path):
    runs = collect(paths)
    write_runs(runs, tmp_path / "runs.csv")
    (tmp_path / "runs.csv").write_text((tmp_path / "runs.csv").read_text().replace("\n", "\n\n"))
    found = read_runs(tmp_path / "runs.csv")
    pd.testing.assert_frame_equal(found, runs)
    assert incomplete.left_out(found) == incomplete.left_out(runs)


def test_a_table_of_before_that_column_is_read_as_it_is(tmp_path):
    runs = frame([run("copy"), run("random")])
    runs.to_csv(tmp_path / "runs.csv", index=False)
    pd.testing.assert_frame_equal(read_runs(tmp_path / "runs.csv"), runs)


def test_tables_claims_and_figures_say_that_they_are_incomplete(paths, damaged, tmp_path):
    write_runs(collect(paths), tmp_path / "runs.csv")
    runs = read_runs(tmp_path / "runs.csv")
    write_tables(runs, tmp_path)
    for name in ("top1.md", "top1.html", "runs.html"):
        text = (tmp_path / name).read_text()
        assert SENTENCE in text
        assert str(damaged) in text
    assert SENTENCE in (tmp_path / "top1.tex").read_text()
    assert set(pd.read_csv(tmp_path / "top1.csv")["left_out"]) == {1}
    claims = claims_text(runs)
    assert SENTENCE in claims
    assert str(damaged) in claims
    for name in ("fig2", "fig3", "fig4"):
        assert FIGURES[name](runs).get_supxlabel().startswith(f"{SENTENCE}\n")


def test_whole_tables_claims_and_figures_say_nothing_of_it(paths, tmp_path):
    runs = collect(paths)
    write_tables(runs, tmp_path)
    files = [path.read_text() for path in tmp_path.glob("*.*")]
    assert "left_out" not in pd.read_csv(tmp_path / "top1.csv")
    assert not any("INCOMPLETE" in text for text in (*files, claims_text(runs)))
    assert "INCOMPLETE" not in FIGURES["fig4"](runs).get_supxlabel()


def test_many_are_named_up_to_a_number_and_all_in_the_table_of_runs(paths, tmp_path, caplog):
    for path in paths[:25]:
        path.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        runs = collect(paths)
    assert len(caplog.records) == 1 + incomplete.NAMED + 1
    assert "and 15 more, named in the table of runs" in caplog.text
    write_tables(runs, tmp_path)
    named = {
        name: [str(path) in (tmp_path / name).read_text() for path in paths[:25]] for name in ("top1.md", "runs.html")
    }
    assert sum(named["top1.md"]) == incomplete.NAMED
    assert all(named["runs.html"])


def test_nothing_but_damaged_files_is_an_error(paths):
    for path in paths:
        path.unlink()
        path.mkdir()
    with pytest.raises(ResultsError, match=rf"metrics.json: Is a directory \(and {len(paths) - 1} more, so that none"):
        collect(paths)


def test_a_value_edited_by_hand_is_damage_unless_the_checksum_is_gone_too(tmp_path):
    specs = list(expand(load_study(CONFIG), "demo").values())[:2]
    paths = [write_metrics(tmp_path, spec, 50.0) for spec in specs]
    write_sealed(paths[0], metrics(specs[0], 50.0))
    assert len(collect(paths)) == 2
    paths[0].write_text(paths[0].read_text().replace('"top1": 50.0', '"top1": 60.0'))
    ((name, why),) = incomplete.left_out(collect(paths)).items()
    assert (name, why) == (specs[0].name, f"{paths[0]}: its values are not those that were written (sha256)")
    lines = [line for line in paths[0].read_text().splitlines() if '"sha256"' not in line]
    paths[0].write_text("\n".join(lines).replace('"commit": "abc",', '"commit": "abc"'))
    assert 60.0 in set(collect(paths)["top1"])


@pytest.mark.parametrize("value", ["-1.0", "8125.0", ""])
def test_a_table_whose_accuracies_are_none_is_refused(tmp_path, value):
    frame([run("copy", 81.25), run("random", 70.0)]).to_csv(tmp_path / "runs.csv", index=False)
    text = (tmp_path / "runs.csv").read_text().replace(",81.25,", f",{value},")
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(ResultsError, match=r"runs.csv: pets/tiny/relu/copy/deit/seed0: top1: found .*; allowed: a num"):
        read_runs(tmp_path / "runs.csv")
