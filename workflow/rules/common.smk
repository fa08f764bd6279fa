# The checked study and the runs of the chosen grid. Nothing here imports torch.
import os
import sys
from pathlib import Path
from shlex import quote

import linvit
from linvit.config import ConfigError, check_targets, study_from
from linvit.grid import evaluations, expand as expand_grid, sources_of
from linvit.report import (
    SECTIONS,
    figures_of,
    history_figures_of,
    tables_of,
    title_of,
)
from snakemake.settings.types import DeploymentMethod

CONFIGFILES = " + ".join(map(str, workflow.configfiles))
IN_CONDA = DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method

# Snakemake's --config takes True and False for themselves, but true and false, as YAML has them, for text.
SWITCHES = {"true": True, "false": False}
for key, value in workflow.config_settings.config.items():
    if isinstance(value, str) and value in SWITCHES:
        config[key] = SWITCHES[value]

try:
    STUDY = study_from(config, CONFIGFILES)
    # Another environment may have other modules.
    if not IN_CONDA:
        check_targets(STUDY.variants, CONFIGFILES)
    # All of them, so that a mistake in a grid or a source is told before it is chosen.
    GRIDS = {grid: expand_grid(STUDY, grid) for grid in STUDY.grids}
    SOURCES = sources_of(STUDY)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

RUNS = GRIDS[STUDY.grid]
EVALUATIONS = evaluations(STUDY)
DATASETS = {name: entry.settings() for name, entry in STUDY.datasets.items()}

RESULTS = STUDY.results
GRID = f"{RESULTS}/grids/{STUDY.grid}"
PACKAGE = Path(linvit.__file__).parent
OOD = [f"{GRID}/ood.csv"] if EVALUATIONS else []
# The code that the columns of a table of runs come from.
COLLECTING = [
    f"{PACKAGE}/{file}" for file in ("incomplete.py", "report.py", "results.py")
]
ENVIRONMENT = f"{workflow.basedir}/envs/linvit.yaml"
if IN_CONDA:
    PYTHON = f"PYTHONPATH={quote(str(PACKAGE.parent))} exec python"
else:
    PYTHON = f"exec {quote(sys.executable)}"
# In place of the shell, so that a command sees when Snakemake itself is killed, and ends.
LINVIT = f"{PYTHON} -m linvit --parent $PPID"


wildcard_constraints:
    run=r".+/seed\d+",
    dataset=r"[^/]+",
    figure=r"\w+",


def data_of(run):
    """The manifest of a run's data set."""
    return ancient(f"{RESULTS}/data/{run.dataset.name}.json") if run else []


def source_of(run):
    """The manifest of a run's source."""
    return (
        ancient(f"{RESULTS}/sources/{run.source.folder}/source.json")
        if run.source
        else []
    )


def refuse_read_only():
    """Before any job: Snakemake would fail at its first output, with a page of its own code."""
    there = next(
        folder
        for folder in (Path(RESULTS), *Path(RESULTS).absolute().parents)
        if folder.exists()
    )
    if not os.access(there, os.W_OK):
        raise WorkflowError(
            f"results: {RESULTS} cannot be written: {there} is read-only"
        )


onstart:
    refuse_read_only()
