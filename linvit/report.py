"""What a grid's report can show, told from the specs of its runs alone.

The workflow asks for no table or figure that would be empty. Nothing here imports pandas or matplotlib: the machine
that plans the DAG need not have them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
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
SHOWN_STARTS = (*ATTENTION_ONLY, "mlpcopy", "fullcopy")
"""The initialisations of learning curves."""
PAPERS_LOSSES = ("output", "map")
"""What the paper distils, by mean-squared error; the other losses are of other works."""
ON_OUTPUTS = ("output", "output-sum")
"""The paper's loss, by either reduction over blocks."""
HISTORY_FIGURES = {
    "curves": "Learning curves",
    "savings": "Training that initialisations save",
    "recipes": "What shorter recipes reach",
}
"""Figures of histories, with their titles."""
BY_HAND = ("throughput", "blocks")
"""Further figures, which no report holds: they are of rates, or of what models show when they are run again."""
SECTIONS = {
    **dict.fromkeys(HISTORY_FIGURES, "0 Overview"),
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
NEEDS = {
    "fig2": "runs of Random, Mimetic, Impulse or Copy without Distill",
    "fig3": "Copy w/ Distill beside the same seed's Copy",
    "fig4": "runs of MLPCopy or FullCopy, or w/ Distill",
    "fig5": "Copy w/ Distill at several weights of the paper's losses, other things equal",
    "figA": "what Figure 4 needs, at size small",
    "figB": "what Figure 4 needs, at size tiny",
    "losses": "Copy with a loss of another work",
    "curves": "the histories of trained runs",
    "savings": "the histories of Random and of another initialisation",
    "recipes": "the histories of an initialisation that several recipes trained",
}
"""What a figure needs, in words; a table needs some of the runs of its cells."""
OWN_TITLES = {"top1": "Top-1 accuracy", "losses": "Losses of other works", **HISTORY_FIGURES}
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
    """The same of an evaluation out of distribution: the run's, but for the data set's name."""
    row = identity(evaluation.run)
    return row | {"dataset": row["dataset"].replace(evaluation.run.dataset.name, evaluation.dataset.name, 1)}


def are_default(rows: Iterable[Row]) -> list[bool]:
    """Which runs are none of the loss ablation's: of no other loss than on outputs and, where several inits share a
    start, of the one that is named after it (`copy`, `copy-distill`)."""
    rows = list(rows)
    on_outputs = [not row["distill"] or row["distill_target"] in ON_OUTPUTS for row in rows]
    inits: dict[tuple, set[str]] = defaultdict(set)
    for row, is_on_outputs in zip(rows, on_outputs, strict=True):
        if is_on_outputs:
            inits[_cell(row)].add(row["init"])
    return [
        is_on_outputs and (len(inits[_cell(row)]) == 1 or row["init"] == _default_init(row))
        for row, is_on_outputs in zip(rows, on_outputs, strict=True)
    ]


def most_used_source(rows: Iterable[Row]) -> str:
    """The source that figures of one source show."""
    used = Counter(row["source"] for row in rows if row["source"] != NO_SOURCE)
    return min(used, key=lambda source: (-used[source], source), default=NO_SOURCE)


def tables_of(specs: Iterable[RunSpec], evaluations: Iterable[Evaluation] = ()) -> list[str]:
    """The tables that these runs, and evaluations of them out of distribution, can fill, at least in part."""
    rows = _default(map(identity, specs)) + _default(map(identity_of, evaluations))
    return ["top1", *printed_tables(rows)]


def figures_of(specs: Iterable[RunSpec]) -> list[str]:
    """The figures that these runs can fill, at least in part."""
    return figures_in(map(identity, specs))


def figures_in(rows: Iterable[Row]) -> list[str]:
    """The same, of rows of a table of runs."""
    rows = list(rows)
    shown: dict[str, Sequence[Row]] = {"losses": rows, "fig5": _of_most_used_source(rows)}
    default = _of_most_used_source(_default(rows))
    return [name for name, has_panels in FIGURES.items() if has_panels(_students(shown.get(name, default)))]


def history_figures_of(specs: Iterable[RunSpec]) -> list[str]:
    """The figures that the histories of these runs can fill, at least in part."""
    return history_figures_in(identity(spec) for spec in specs if spec.init.train)


def history_figures_in(rows: Iterable[Row]) -> list[str]:
    """The same, of rows of a table of runs, of those that were trained."""
    rows = list(rows)
    shown = [row for row in _students(_of_most_used_source(_default(rows))) if row["start"] in SHOWN_STARTS]
    found = {
        "curves": bool(shown),
        "savings": _has_another_beside_random(shown),
        "recipes": _has_several_recipes(shown),
    }
    return [name for name, has_panels in found.items() if has_panels]


def printed_tables(rows: Iterable[Row]) -> list[str]:
    """The paper's tables with a cell that some of these rows are of."""
    rows = list(rows)
    return [
        name
        for name, table in published.tables().items()
        if any(cell.runs and any(map(cell.runs.match, rows)) for cell in table.cells())
    ]


def need_of(name: str) -> str:
    """What a figure, or a table of the paper, is made of."""
    if name in NEEDS:
        return NEEDS[name]
    table = published.tables()[name]
    return f"runs of {table.what.removeprefix('Top-1 accuracy (%) of ')} ({table.title})"


def _default(rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    return list(compress(rows, are_default(rows)))


def _of_most_used_source(rows: Sequence[Row]) -> list[Row]:
    source = most_used_source(rows)
    return [row for row in rows if row["source"] in (source, NO_SOURCE)]


def _students(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["variant"] != "softmax"]


def _cell(row: Row) -> tuple:
    return tuple(row[key] for key in ("dataset", "size", "source", "variant", "start", "distill"))


def _default_init(row: Row) -> str:
    return row["start"] + ("-distill" if row["distill"] else "")


def is_component(row: Row) -> bool:
    """Whether a run is one of Figures 4, A and B that Figure 2 has not."""
    return row["start"] in COMPONENTS and (row["distill"] or row["start"] not in ATTENTION_ONLY)


def _has_gains_over_copy(rows: Sequence[Row]) -> bool:
    """Whether Copy w/ Distill stands beside the same seed's Copy."""
    keys = [(row["dataset"], row["size"], row["variant"], row["seed"]) for row in rows]
    copies = {
        distill: set(compress(keys, (row["start"] == "copy" and row["distill"] == distill for row in rows)))
        for distill in (False, True)
    }
    return not copies[False].isdisjoint(copies[True])


def _has_another_beside_random(rows: Sequence[Row]) -> bool:
    starts = defaultdict(set)
    for row in rows:
        starts[row["dataset"], row["size"], row["variant"]].add((row["start"], row["distill"]))
    return any(("random", False) in of_cell and len(of_cell) > 1 for of_cell in starts.values())


def _has_several_recipes(rows: Sequence[Row]) -> bool:
    recipes = defaultdict(set)
    for row in rows:
        dataset = row["dataset"].partition("@")[0]
        recipes[dataset, *(row[key] for key in ("size", "variant", "start", "distill"))].add(row["recipe"])
    return any(len(of_cell) > 1 for of_cell in recipes.values())


def _sweeps_weights(rows: Sequence[Row]) -> bool:
    """Whether one of the panels has several of the paper's losses."""
    losses = defaultdict(set)
    for row in rows:
        if row["start"] == "copy" and row["distill_target"] in PAPERS_LOSSES:
            panel = row["dataset"], row["size"], row["variant"]
            losses[panel].add((row["distill_target"], row["distill_weight"]))
    return any(len(of_panel) > 1 for of_panel in losses.values())


def _has_other_losses(rows: Sequence[Row]) -> bool:
    return any(row["start"] == "copy" and row["distill"] and row["distill_target"] not in PAPERS_LOSSES for row in rows)


FIGURES: dict[str, Callable[[Sequence[Row]], bool]] = {
    "fig2": lambda rows: any(row["start"] in ATTENTION_ONLY and not row["distill"] for row in rows),
    "fig3": _has_gains_over_copy,
    "fig4": lambda rows: any(map(is_component, rows)),
    "fig5": _sweeps_weights,
    "figA": lambda rows: any(is_component(row) and row["size"] == "small" for row in rows),
    "figB": lambda rows: any(is_component(row) and row["size"] == "tiny" for row in rows),
    "losses": _has_other_losses,
}
"""Whether the students' runs hold what a figure shows; the drawing functions of these names are in `linvit.figures`."""
