"""The operators, forward and with backward: time and peak memory against their formulas and Softmax attention.

The formulas are those of `naive.py`; Softmax is timm's, fused. What a ratio is made of took turns in one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import naive
import torch
from curves import draw
from matplotlib import rc_context
from matplotlib.figure import Figure
from memory import peak_bytes
from tabulate import tabulate
from timing import circumstances, described, interleaved, write
from torch import Tensor, nn

from linvit.attention.inline import InlineAttention
from linvit.attention.kernel import EluAttention, ReluAttention
from linvit.attention.mhla import MhlaAttention
from linvit.attention.softmax import SoftmaxAttention
from linvit.attention.ttt import TttAttention
from linvit.device import autocast, pick_device
from linvit.figures.style import REFERENCE, STYLE, save

# name -> (class, its own arguments, its formula)
OPERATORS: dict[str, tuple[type[nn.Module], dict[str, Any], Callable[[nn.Module, Tensor], Tensor]]] = {
    "elu": (EluAttention, {}, naive.elu),
    "relu": (ReluAttention, {}, naive.relu),
    "inline": (InlineAttention, {}, naive.inline),
    "inline, local": (InlineAttention, {"local_residual": True}, naive.inline),
    "mhla": (MhlaAttention, {}, naive.mhla),
    "ttt": (TttAttention, {}, naive.ttt),
}
SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # DeiT's widths and heads
PRECISIONS = ("float32", "bfloat16")
PASSES = ("forward", "with backward")
SIDES = (14, 28, 56)
BETWEEN = (8, 10, 12, 18, 22)  # further grids, on which the operators are timed against Softmax alone
SHORT, LONG, LONGEST = (side**2 for side in SIDES)

DRAWN = ("softmax_seconds", "reference_seconds")

NOTES = """
÷: ours divided by the formula's (`tests/bench/naive.py`) or by Softmax's (timm's, fused). MiB: the most that our call
holds beyond weights and tokens, gradients included. Bfloat16 is autocast; there our operators take sums and divisions
in float32, the formulas do not.
"""


@dataclass(frozen=True)
class Shape:
    size: str
    side: int
    """Of the grid, in tokens."""
    batch: int
    precision: str

    @property
    def tokens(self) -> int:
        return self.side**2

    def operator(self, cls: type[nn.Module], own: dict[str, Any], device: torch.device) -> nn.Module:
        dim, heads = SIZES[self.size]
        return cls(dim, heads, grid_size=(self.side, self.side), num_prefix_tokens=0, **own).to(device)

    def x(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch, self.tokens, SIZES[self.size][0], generator=generator)
        return x.to(device).requires_grad_()


@dataclass(frozen=True)
class Row:
    """An operator on a shape. `reference` is its formula, `quarter` itself on a quarter of the tokens."""

    operator: str
    size: str
    tokens: int
    batch: int
    precision: str
    passes: str
    seconds: float
    softmax_seconds: float
    reference_seconds: float | None = None
    quarter_seconds: float | None = None
    peak_bytes: int | None = None
    reference_peak_bytes: int | None = None
    softmax_peak_bytes: int | None = None

    def over(self, of: str) -> float | None:
        """A measure of ours over another one, such as `seconds` over `softmax_seconds`."""
        ours, other = getattr(self, "peak_bytes" if of.endswith("bytes") else "seconds"), getattr(self, of)
        return None if other is None else ours / other


def batch_of(size: str, side: int, device: torch.device) -> int:
    """A call takes about a second on one CPU at most; a GPU needs more images to have something to do."""
    images = {"tiny": 8, "small": 8, "base": 2}[size] if side <= 28 else {"tiny": 2, "small": 2, "base": 1}[size]
    return images * (32 if device.type == "cuda" else 1)


def call_of(forward: Callable[[Tensor], Tensor], module: nn.Module, shape: Shape, passes: str, device: torch.device):
    """One pass of an operator or its formula over random tokens, ready to be called again and again."""
    x = shape.x(device)
    wanted = (x, *module.parameters())

    def forwards() -> Tensor:
        with autocast(device, shape.precision):
            return forward(x)

    if passes == "forward":
        return torch.no_grad()(forwards)
    cotangent = torch.randn_like(forwards())
    return lambda: torch.autograd.grad(forwards(), wanted, cotangent)


def measure(shape: Shape, passes: str, device: torch.device, repeats: int) -> list[Row]:
    """Every operator, its formula and Softmax, in turns; on the largest grid also ours on a quarter of it."""
    softmax = shape.operator(SoftmaxAttention, {}, device)
    calls = {"softmax": call_of(softmax, softmax, shape, passes, device)}
    quarter = Shape(shape.size, shape.side // 2, shape.batch, shape.precision)
    for name, (cls, own, formula) in OPERATORS.items():
        ours = shape.operator(cls, own, device)
        calls[name] = call_of(ours, ours, shape, passes, device)
        calls[f"{name} reference"] = call_of(partial(formula, ours), ours, shape, passes, device)
        if shape.tokens == LONGEST:
            small = quarter.operator(cls, own, device)
            calls[f"{name} quarter"] = call_of(small, small, quarter, passes, device)
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    seconds = interleaved(calls, device, repeats=repeats)
    return [
        Row(
            *(name, shape.size, shape.tokens, shape.batch, shape.precision, passes),
            seconds=seconds[name],
            softmax_seconds=seconds["softmax"],
            reference_seconds=seconds[f"{name} reference"],
            quarter_seconds=seconds.get(f"{name} quarter"),
            peak_bytes=peaks[name],
            reference_peak_bytes=peaks[f"{name} reference"],
            softmax_peak_bytes=peaks["softmax"],
        )
        for name in OPERATORS
    ]


def compare_with_softmax(shape: Shape, passes: str, device: torch.device, repeats: int) -> list[Row]:
    """The operators and Softmax alone, for the number of tokens from which an operator is the faster."""
    calls = {}
    for name, (cls, own, *_) in {"softmax": (SoftmaxAttention, {}), **OPERATORS}.items():
        module = shape.operator(cls, own, device)
        calls[name] = call_of(module, module, shape, passes, device)
    seconds = interleaved(calls, device, repeats=repeats)
    shared = (shape.size, shape.tokens, shape.batch, shape.precision, passes)
    return [Row(name, *shared, seconds[name], seconds["softmax"]) for name in OPERATORS]


def worst(rows: Iterable[Row], of: str, tokens: int) -> float | None:
    """The largest ratio at this number of tokens; None if it was not measured."""
    ratios = [ratio for row in rows if row.tokens == tokens and (ratio := row.over(of)) is not None]
    return max(ratios, default=None)


def goals(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Goal -> the worst ratio over sizes, and whether it is met; None if nothing was measured that could tell.

    A goal is of one operator in one precision, forward or with backward.
    """
    found = {}
    for name, precision, passes in groups(rows):
        of = [row for row in rows if (row.operator, row.precision, row.passes) == (name, precision, passes)]
        peaks = [ratio for row in of if (ratio := row.over("reference_peak_bytes")) is not None]
        limits = {
            f"time ÷ formula at {SHORT} tokens ≤ 1.0": (worst(of, "reference_seconds", SHORT), 1.0),
            f"time ÷ formula at {LONG} tokens ≤ 0.9": (worst(of, "reference_seconds", LONG), 0.9),
            "peak memory ÷ formula ≤ 1.0": (max(peaks, default=None), 1.0),
            f"time at {LONGEST:,} ÷ at {LONG} tokens ≤ 4.4": (worst(of, "quarter_seconds", LONGEST), 4.4),
        }
        for goal, (ratio, limit) in limits.items():
            met = None if ratio is None else round(ratio, 2) <= limit
            found[f"{name}, {precision}, {passes}: {goal}"] = {"ratio": ratio, "met": met}
    return found


def groups(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Operator, precision and passes, as measured."""
    return list(dict.fromkeys((row.operator, row.precision, row.passes) for row in rows))


def crossover(rows: Iterable[Row]) -> str:
    """The number of tokens from which one operator of one size stays faster than Softmax, between measured ones."""
    ratios = sorted((row.tokens, row.over("softmax_seconds")) for row in rows)
    slower = [i for i, (_, ratio) in enumerate(ratios) if ratio > 1]
    if not slower:
        return f"< {ratios[0][0]:,}"
    if slower[-1] == len(ratios) - 1:
        return f"> {ratios[-1][0]:,}"
    (n, high), (m, low) = ratios[slower[-1]], ratios[slower[-1] + 1]
    share = math.log(high) / (math.log(high) - math.log(low))
    return f"{math.exp(math.log(n) + share * math.log(m / n)):,.0f}"


def page(results: dict[str, Any], rows: list[Row]) -> str:
    """The results as Markdown."""
    return "\n\n".join(
        [
            "# Operators",
            "![Time against Softmax attention and against the formulas](operators.png)",
            "## Goals",
            goal_table(results["goals"]),
            "The worst ratio over sizes; bold: NOT met.",
            "## Tokens from which an operator is faster than Softmax attention",
            crossover_table(rows),
            "## All measurements",
            table([row for row in rows if row.reference_seconds is not None]),
            NOTES.strip(),
            described(results["circumstances"]) + "\n",
        ]
    )


def goal_table(verdicts: dict[str, dict[str, Any]]) -> str:
    """A row an operator, precision and passes; a column a goal."""
    cells: dict[str, dict[str, str]] = {}
    for goal, verdict in verdicts.items():
        who, what = goal.split(": ", 1)
        ratio = f"{verdict['ratio']:.2f}" if verdict["ratio"] is not None else "not measured"
        cells.setdefault(who, {})[what] = f"**{ratio} NOT met**" if verdict["met"] is False else ratio
    columns = list(next(iter(cells.values())))
    return markdown([[who, *of.values()] for who, of in cells.items()], ["", *columns])


def crossover_table(rows: list[Row]) -> str:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for name, precision, passes in groups(rows):
        for size in dict.fromkeys(row.size for row in rows):
            of = [r for r in rows if (r.operator, r.precision, r.passes, r.size) == (name, precision, passes, size)]
            cells.setdefault((size, precision, passes), {})[name] = crossover(of) if of else "–"
    return markdown([[", ".join(who), *of.values()] for who, of in cells.items()], ["", *OPERATORS])


def table(rows: list[Row]) -> str:
    """One row a measurement."""
    headers = ["operator", "size", "tokens", "batch", "precision", "passes", "ms", "÷ formula", "÷ Softmax"]
    headers += ["MiB", "÷ formula", "÷ Softmax"]
    shares = ("reference_seconds", "softmax_seconds", "reference_peak_bytes", "softmax_peak_bytes")
    cells = []
    for row in rows:
        time, softmax_time, peak, softmax_peak = (f"{row.over(of):.2f}" for of in shares)
        who = [row.operator, row.size, f"{row.tokens:,}", row.batch, row.precision, row.passes]
        cells.append(
            [*who, f"{1e3 * row.seconds:.1f}", time, softmax_time, f"{row.peak_bytes / 2**20:.0f}", peak, softmax_peak]
        )
    return markdown(cells, headers)


def markdown(cells: list[list], headers: list[str]) -> str:
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=align)


def figure(rows: list[Row]) -> Figure:
    """Time against Softmax and against the formula, by the number of tokens; one size, forward and backward."""
    size = "small" if any(row.size == "small" for row in rows) else rows[0].size
    shown = [row for row in rows if (row.size, row.precision, row.passes) == (size, rows[0].precision, PASSES[1])]
    with rc_context(STYLE):
        drawn = Figure(figsize=(7, 3), layout="constrained")
        for ax, of, other in zip(drawn.subplots(1, 2), DRAWN, ("Softmax attention", "formula"), strict=True):
            curves: dict[str, dict[float, float]] = {}
            for row in shown:
                if (ratio := row.over(of)) is not None:
                    curves.setdefault(row.operator, {})[row.tokens] = ratio
            draw(ax, curves, sorted({tokens for points in curves.values() for tokens in points}))
            if of == "reference_seconds":
                ax.set_yscale("linear")  # all lie near one
            ax.axhline(1, **REFERENCE)
            ax.set(title=f"Time ÷ {other}'s", xlabel="tokens")
        drawn.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=len(OPERATORS))
        batches = ", ".join(
            f"{n} at {tokens:,}" for tokens, n in sorted({row.tokens: row.batch for row in shown}.items())
        )
        drawn.supxlabel(
            f"{size}, {rows[0].precision}, forward and backward; images in a batch: {batches}", fontsize=6.5
        )
    return drawn


def carry_out(told: argparse.Namespace, device: torch.device) -> list[Row]:
    rows = []
    for size in told.sizes:
        for precision in told.precisions:
            for side in sorted({*told.sides, *told.between}):
                shape = Shape(size, side, batch_of(size, side, device), precision)
                print(f"{shape} ...", flush=True)
                compare = measure if side in told.sides else compare_with_softmax
                repeats = told.repeats if side <= 28 else max(1, told.repeats // 2)
                for passes in PASSES:
                    rows += compare(shape, passes, device, repeats)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the operators on this device.")
    add = partial(parser.add_argument, nargs="+")
    add("--sizes", choices=SIZES, default=list(SIZES), help="DeiT's sizes (%(default)s)")
    add("--precisions", choices=PRECISIONS, default=list(PRECISIONS), help="(%(default)s)")
    add("--sides", type=int, default=list(SIDES), help="sides of the grids, in tokens, even (%(default)s)")
    parser.add_argument(
        "--between", type=int, nargs="*", default=list(BETWEEN), help="against Softmax alone (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of which a median is (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the smallest size, two grids, two turns: a minute")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for the results (%(default)s)")
    told = parser.parse_args(arguments)
    if told.quick:
        told.sizes, told.sides, told.between, told.repeats = ["tiny"], [14, 28], [], 2
    device = pick_device()
    found = circumstances(device)
    rows = carry_out(told, device)
    results = {"circumstances": found, "goals": goals(rows), "rows": [asdict(row) for row in rows]}
    write(told.out, "operators", results, page(results, rows))
    save(figure(rows), told.out / "operators.png")
    print(told.out / "operators.md")


if __name__ == "__main__":
    main()
