"""The benchmark of the workflow: what it counts, when a goal counts as met, and that a small grid goes through it."""

import json

import pytest

from workflow import Call, goals, main, medians


def calls(**changes: float) -> dict[str, Call]:
    seconds = {"plan": 6.0, "plan, bare": 2.0, "report": 59.0, "one figure": 14.0, "page": 9.0} | changes
    return {what: Call(what, 2, value, 250.0) for what, value in seconds.items()}


def test_of_repeated_calls_the_median_time_and_the_most_memory_count() -> None:
    found = medians([Call("plan", 5, seconds, mib) for seconds, mib in ((9.0, 100.0), (2.0, 300.0), (3.0, 200.0))])
    assert found == {"plan": Call("plan", 5, 3.0, 300.0)}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [({}, None), ({"plan": 6.1}, 0), ({"report": 90.0}, 2), ({"one figure": 15.0}, 3)],
)
def test_a_goal_is_met_up_to_its_bound(changes, missed) -> None:
    assert list(goals(calls(**changes)).values()) == [number != missed for number in range(4)]


def test_a_figure_made_again_with_more_misses_its_goal() -> None:
    found = calls() | {"one figure": Call("one figure", 3, 10.0, 250.0)}
    assert list(goals(found).values()) == [True, True, True, False]


def test_a_small_grid_goes_through(tmp_path, capsys) -> None:
    main(["--grid", "demo", "--repeats", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "workflow.json").read_text())
    jobs = {call["what"]: call["jobs"] for call in results["calls"]}
    # 11 runs, the embedded set, its source; runs, tables, two figures, claims, all.
    assert jobs == {"plan": 22, "plan, bare": 22, "report": 9, "one figure": 2, "page": 0}
    assert all(call["seconds"] > 0 and call["mib"] > 10 for call in results["calls"])
    assert (tmp_path / "workflow.md").read_text() in capsys.readouterr().out
