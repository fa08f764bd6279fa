"""Gather a grid's metrics, their histories, or its evaluations out of distribution, into one table.

A script, since a shell line cannot hold thousands of paths.
"""

import sys
from pathlib import Path

# In an environment of its own the script finds the package in the clone, like every other job.
sys.path.insert(0, str(Path(snakemake.scriptdir).parents[1]))  # noqa: F821 - given by Snakemake

from linvit import incomplete, results
from linvit.config import UserError, study_from
from linvit.grid import evaluations, expand

sys.stderr = Path(snakemake.log[0]).open("w")  # noqa: F821, SIM115 - for as long as the script runs

collect, expected = {
    "runs": (results.collect, expand),
    "history": (results.collect_history, expand),
    "ood_table": (results.collect_ood, evaluations),
}[snakemake.rule]  # noqa: F821
try:
    frame = collect(snakemake.input.metrics, expected(study_from(snakemake.config)))  # noqa: F821
except UserError as error:
    sys.exit(f"linvit: error: {error}")
results.write_runs(frame, snakemake.output[0])  # noqa: F821
if left_out := incomplete.left_out(frame):
    # Where whoever started Snakemake sees it, too.
    print(f"{snakemake.output[0]}: {incomplete.in_short(left_out)}", file=sys.__stderr__)  # noqa: F821
