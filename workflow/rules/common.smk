# The checked study and the runs of the chosen grid. Nothing here imports torch.
import sys
from pathlib import Path

import linvit
from linvit.config import ConfigError, read_yaml, study_from
from linvit.grid import expand as expand_grid, sources_of

try:
    for path in workflow.configfiles:
        read_yaml(path)  # refuses duplicate keys, which Snakemake's own reader drops silently
    STUDY = study_from(config, " + ".join(map(str, workflow.configfiles)))
    RUNS = expand_grid(STUDY)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

SOURCES = sources_of(STUDY)
DATASETS = {name: entry.settings() for name, entry in STUDY.datasets.items()}

RESULTS = STUDY.results
GRID = f"{RESULTS}/grids/{STUDY.grid}"
LINVIT = f"{sys.executable} -m linvit"
PACKAGE = Path(linvit.__file__).parent


wildcard_constraints:
    run=r".+/seed\d+",
    figure=r"\w+",
