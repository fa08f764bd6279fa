"""What a grid's report can show, told from the specs of its runs alone.

The workflow asks for no table or figure that would be empty. Nothing here imports pandas or matplotlib: the machine
that plans the DAG need not have them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from linvit import published
from linvit.config import NO_SOURCE, Group, Init
from linvit.grid import Evaluation, RunSpec

Row = Mapping[str, Any]

GROUPS = frozenset(get_args(Group))
STARTS_BY_COPY = {
    frozenset(): "random",
    frozenset({"attention"}): "copy",
    frozenset({"mlp"}): "mlpcopy",
    GROUPS - {"head"}: "fullcopy",
    GROUPS: "pretrained",
}
ATTENTION_ONLY = ("random", "mimetic", "impulse", "copy")
"""The initialisations of Figure 2."""
COMPONENTS = ("random", "copy", "mlpcopy", "fullcopy")
"""The initialisations of Figures 4, A and B."""
PAPERS_LOSSES = ("output", "map")
"""What the paper distils, by mean-squared error; the other losses are of other works."""
SECTIONS = {
    "fig2": "4.2 Attention-only transfer: main results",
    "table1": "4.3 Robustness of the failure",
    "table2": "4.3 Robustness of the failure",
    "fig3": "5.1 Token routing, recovered through distillation",
    "fig4": "5.2 and 5.3 MLP weights; the recipe",
    "fig5": "5.4 The distillation loss",
    "losses": "5.4 The distillation loss",
    "figA": "C.1 More linear operators",
    "figB": "C.2 More model sizes",
    "tableG": "C.4 Copying the remaining components",
    "tableF": "C.5 Statistical significance",
}
"""The paper's section that each of its figures and tables is of."""
OWN_TITLES = {"top1": "Top-1 accuracy", "losses": "Losses of other works"}
"""Of what the paper has not."""


def title_of(name: str) -> str:
    """A table or figure as the paper calls it: "Table F", "Figure 2"."""
    if name in OWN_TITLES:
        return OWN_TITLES[name]
    kind, number = ("Table", name.removeprefix("table")) if name.startswith("table") else ("Figure", name[3:])
    return f"{kind} {number}"


def start_of(init: Init) -> str:
    """What the weights start from, whatever is distilled later: a name of Table A, or else the init's own."""
    copied = frozenset(init.copied)
    if init.analytic and not copied:
        return init.analytic
    if not init.analytic and copied in STARTS_BY_COPY:
        return STARTS_BY_COPY[copied]
    return init.name.removesuffix("-distill")


def identity(spec: RunSpec) -> dict[str, Any]:
    """The columns of a table of runs that are known before a run is made."""
    distill = spec.init.distill
    return {
        "run": spec.name,
        # As the name has it, so that runs of another recipe are another data set to every grouping.
        "dataset": spec.name.split("/")[0],
        "size": spec.size.name,
        "variant": spec.variant.name,
        "init": spec.init.name,
        "start": start_of(spec.init),
        "distill": distill is not None,
        "distill_target": distill.loss if distill else None,
        "distill_weight": (distill.weight or spec.recipe.distill_weight) if distill else None,
        "source": spec.source.name if spec.source else NO_SOURCE,
        "recipe": spec.recipe.name,
        "seed": spec.seed,
    }


def identity_of(evaluation: Evaluation) -> dict[str, Any]:
    """The same of an evaluation out of distribution: the run's, but for the data set."""
    return identity(evaluation.run) | {"dataset": evaluation.dataset.name}


def tables_of(specs: Iterable[RunSpec], evaluations: Iterable[Evaluation] = ()) -> list[str]:
    """The tables that these runs, and evaluations of them out of distribution, can fill, at least in part."""
    return ["top1", *printed_tables([*map(identity, specs), *map(identity_of, evaluations)])]


def figures_of(specs: Iterable[RunSpec]) -> list[str]:
    """The figures that these runs can fill, at least in part."""
    students = [row for row in map(identity, specs) if row["variant"] != "softmax"]
    return [name for name, has_panels in FIGURES.items() if has_panels(students)]


def printed_tables(rows: Iterable[Row]) -> list[str]:
    """The paper's tables with a cell that some of these rows are of."""
    rows = list(rows)
    return [
        name
        for name, table in published.tables().items()
        if any(cell.runs and any(map(cell.runs.match, rows)) for cell in table.cells())
    ]


def is_component(row: Row) -> bool:
    """Whether a run is one of Figures 4, A and B that Figure 2 has not."""
    return row["start"] in COMPONENTS and (row["distill"] or row["start"] not in ATTENTION_ONLY)


def _sweeps_weights(rows: Sequence[Row]) -> bool:
    copied = [row for row in rows if row["start"] == "copy" and row["distill_target"] in PAPERS_LOSSES]
    return len({(row["distill_target"], row["distill_weight"]) for row in copied}) > 1


def _has_other_losses(rows: Sequence[Row]) -> bool:
    return any(row["start"] == "copy" and row["distill_target"] not in (None, *PAPERS_LOSSES) for row in rows)


FIGURES: dict[str, Callable[[Sequence[Row]], bool]] = {
    "fig2": lambda rows: any(row["start"] in ATTENTION_ONLY and not row["distill"] for row in rows),
    "fig3": lambda rows: {row["distill"] for row in rows if row["start"] == "copy"} == {False, True},
    "fig4": lambda rows: any(map(is_component, rows)),
    "fig5": _sweeps_weights,
    "figA": lambda rows: any(is_component(row) and row["size"] == "small" for row in rows),
    "figB": lambda rows: any(is_component(row) and row["size"] == "tiny" for row in rows),
    "losses": _has_other_losses,
}
"""Whether the students' runs hold what a figure shows; the drawing functions of these names are in `linvit.figures`."""
