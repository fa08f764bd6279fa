"""What a profile or the command line may say: every field is `--submitit-<field>` and a profile key."""

# No `from __future__ import annotations` here: Snakemake reads the types of these fields.
import argparse
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from .driver import forget_dead_driver

FOLDER = Path(".snakemake/submitit")

common_settings = CommonSettings(
    job_deploy_sources=False,
    non_local_exec=True,
    implies_no_shared_fs=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=False,  # jobs inherit them; a command is for everybody to read
    auto_deploy_default_storage_provider=False,
)


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    backend: str | None = field(
        default=None,
        metadata={
            "help": "Where jobs run: slurm or local. Default: slurm where there is an sbatch, else local.",
            "type": str,
            "choices": ["slurm", "local"],
        },
    )
    folder: Path = field(
        default=FOLDER,
        metadata={"help": "Folder, on a file system that all nodes share, for the jobs' pickles and logs."},
    )
    array_parallelism: int = field(
        default=256,
        metadata={"help": "Jobs of one array that run at the same time."},
    )
    max_array_size: int | None = field(
        default=None,
        metadata={"help": "Largest array to submit. Default: what scontrol show config allows.", "type": int},
    )
    grace_seconds: int = field(
        default=60,
        metadata={"help": "Seconds that a job without a result must have been gone before it counts as dead."},
    )
    submit_retries: int = field(
        default=3,
        metadata={"help": "How often to try again when sbatch refuses; pauses are 2 s, 4 s, 8 s and so on."},
    )
    signal_delay_seconds: int = field(
        default=120,
        metadata={"help": "Notice, in seconds, that a job gets before its time limit to write a checkpoint."},
    )
    max_timeouts: int = field(
        default=100,
        metadata={"help": "How often a job that reached its time limit is continued from its checkpoint."},
    )
    setup: str = field(
        default="",
        metadata={"help": "Shell commands before each job, such as 'module load cuda' (slurm only)."},
    )

    def __post_init__(self) -> None:
        # The one moment before Snakemake's lock at which a plugin is heard.
        options = snakemake_options()
        forget_dead_driver(options.directory / self.folder, options.unlock)


def snakemake_options() -> argparse.Namespace:
    """Of Snakemake's own options those that matter here: it goes to its directory only after it has made settings."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--directory", "-d", type=Path, default=Path())
    parser.add_argument("--unlock", action="store_true")
    return parser.parse_known_args()[0]
