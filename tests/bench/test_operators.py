"""What the operators' benchmark measures with, and what it makes of its figures."""

import json

import naive
import operators
import pytest
import torch
from memory import peak_bytes
from operators import LONG, LONGEST, OPERATORS, PASSES, SHORT, Row, Shape, call_of, crossover, goals, page

CPU = torch.device("cpu")
MIB = 1 << 20


def row(tokens: int = LONG, seconds: float = 0.8, **changes) -> Row:
    values = {"operator": "elu", "size": "small", "batch": 8, "precision": "float32", "passes": PASSES[1]}
    measures = {"softmax_seconds": 1.0, "reference_seconds": 1.0, "peak_bytes": 80, "reference_peak_bytes": 100}
    return Row(**values | measures | {"softmax_peak_bytes": 100, "tokens": tokens, "seconds": seconds} | changes)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_formula_gives_what_its_operator_gives(name: str, prefix: int) -> None:
    cls, own, formula = OPERATORS[name]
    if prefix and name in ("mhla", "ttt"):
        pytest.skip("patch tokens only")
    torch.manual_seed(0)
    operator = cls(12, 3, grid_size=(4, 6), num_prefix_tokens=prefix, **own).double()
    with torch.no_grad():  # off their start, at which the convolutions, norms and biases would hardly tell
        for parameter in operator.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter).abs())
    x = torch.randn(2, prefix + 24, 12, dtype=torch.float64, requires_grad=True)
    wanted = (x, *operator.parameters())
    ours, reference = operator(x), formula(operator, x)
    torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(ours)
    gradients = (torch.autograd.grad(output, wanted, cotangent) for output in (ours, reference))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_formulas_share_no_code_with_the_operators() -> None:
    assert not [name for name, value in vars(naive).items() if "linvit" in getattr(value, "__module__", "")]


def test_the_peak_is_what_a_call_holds_at_once() -> None:
    x = torch.ones(MIB // 4)  # 1 MiB
    assert peak_bytes(lambda: x * 2, CPU) == pytest.approx(MIB, rel=0.01)
    assert peak_bytes(lambda: x * 2 * 3 * 4 * 5, CPU) == pytest.approx(2 * MIB, rel=0.01)
    assert peak_bytes(lambda: [x * 2 for _ in range(5)], CPU) == pytest.approx(5 * MIB, rel=0.01)
    # What an operation holds inside itself counts too: softmax over a half-precision copy, in float32.
    square = x.reshape(512, 512)
    assert peak_bytes(lambda: (square @ square).sum(), CPU) == pytest.approx(MIB, rel=0.01)
    assert peak_bytes(lambda: x.add_(1), CPU) < 0.01 * MIB


@pytest.mark.parametrize("passes", PASSES)
def test_a_call_is_one_pass(passes: str) -> None:
    shape = Shape("tiny", 4, 2, "float32")
    operator = shape.operator(OPERATORS["elu"][0], {}, CPU)
    result = call_of(operator, operator, shape, passes, CPU)()
    if passes == "forward":
        assert not result.requires_grad
    else:
        assert [g.shape for g in result] == [(2, 16, 192), *(p.shape for p in operator.parameters())]


def test_goals_are_judged_by_the_worst_size() -> None:
    rows = [row(), row(size="base", seconds=0.95), row(SHORT), row(LONGEST, quarter_seconds=0.2)]
    verdicts = {goal.split(": ")[1]: (verdict["ratio"], verdict["met"]) for goal, verdict in goals(rows).items()}
    assert list(verdicts.values()) == [(0.8, True), (0.95, False), (0.8, True), (4.0, True)]


def test_goals_without_measurements_are_neither_met_nor_missed() -> None:
    assert [verdict["met"] for verdict in goals([row(tokens=400)]).values()] == [None, None, True, None]
    apart = goals([row(), row(operator="ttt", seconds=2), row(precision="bfloat16"), row(passes=PASSES[0])])
    assert [verdict["met"] for goal, verdict in apart.items() if "≤ 0.9" in goal] == [True, False, True, True]


def test_the_crossover_lies_between_the_last_slower_and_the_next_measurement() -> None:
    assert crossover([row(196, 2.0), row(784, 0.5)]) == "392"  # halfway on logarithmic axes
    assert crossover([row(100, 0.9), row(196, 2.0), row(784, 0.5)]) == "392"
    assert crossover([row(196, 0.9), row(784, 0.5)]) == "< 196"
    assert crossover([row(196, 0.9), row(784, 1.5)]) == "> 784"


def test_the_page_says_what_is_not_met() -> None:
    rows = [row(), row(SHORT, 1.2)]
    circumstances = {"date": "today", "device": "cpu", "cpus": 2, "threads": 1, "load": 0.1, "versions": {"torch": "2"}}
    text = page({"goals": goals(rows), "circumstances": circumstances}, rows)
    (line,) = [line for line in text.splitlines() if line.startswith("| elu, float32, with backward")]
    assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == [
        "**1.20 NOT met**",
        "0.80",
        "0.80",
        "not measured",
    ]
    assert "threads" in text.splitlines()[-1]


def test_a_small_run_writes_whole_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(operators.SIZES, "tiny", (24, 3))
    told = ["--sizes=tiny", "--sides", "4", "8", "--between=6", "--repeats=1", f"--out={tmp_path}"]
    operators.main(told)
    written = json.loads((tmp_path / "operators.json").read_text())
    # Operators, precisions and passes; two grids whole, and one against Softmax alone.
    assert len(written["rows"]) == 6 * 2 * 2 * 3
    assert {found["tokens"] for found in written["rows"] if found["reference_seconds"] is None} == {36}
    assert all(found["seconds"] > 0 and found["softmax_seconds"] > 0 for found in written["rows"])
    text = (tmp_path / "operators.md").read_text()
    assert text.startswith("# Operators")
    assert all(f"| {name} " in text for name in OPERATORS)
    assert (tmp_path / "operators.png").read_bytes().startswith(b"\x89PNG")
