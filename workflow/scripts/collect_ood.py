"""Gather a grid's evaluations out of distribution into one table; a script for the same reason as collect.py."""

import sys
from pathlib import Path

# In an environment of its own the script finds the package in the clone, like every other job.
sys.path.insert(0, str(Path(snakemake.scriptdir).parents[1]))  # noqa: F821 - given by Snakemake

from linvit import results
from linvit.config import study_from
from linvit.grid import evaluations

results.write_runs(
    results.collect_ood(snakemake.input, evaluations(study_from(snakemake.config))),  # noqa: F821
    snakemake.output[0],  # noqa: F821
)
