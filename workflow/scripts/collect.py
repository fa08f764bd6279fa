"""Gather a grid's metrics into its table of runs; a script, since a shell line cannot hold thousands of paths."""

from linvit import results

results.write_runs(results.collect(snakemake.input), snakemake.output[0])  # noqa: F821 - given by Snakemake
