"""Snakemake's jobs through submitit: arrays, checkpoints and requeueing on Slurm, or several at once on one machine."""

from .executor import Executor
from .settings import ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
