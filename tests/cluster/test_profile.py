"""The profile that users start with."""

import shutil
from pathlib import Path

from toy_workflow import Workflow

ROOT = Path(__file__).parent.parent.parent


def test_the_profile_is_found_by_its_name_from_the_root() -> None:
    assert (ROOT / "slurm").is_symlink()
    assert (ROOT / "slurm" / "config.yaml").samefile(ROOT / "workflow/profiles/slurm/config.yaml")


def test_the_profile_runs_a_workflow_with_the_resources_it_says(flow: Workflow) -> None:
    shutil.copytree(ROOT / "workflow/profiles/slurm", flow.path("slurm"))
    flow.write("""
        rule all:
            input: "run.json"
        rule dataset:
            output: "data.json"
            shell: "touch {output}"
        rule train:
            input: "data.json"
            output: "run.json"
            params: call="toy:Counter", steps=2
            shell: "false"
    """)
    flow.run("--profile", "slurm", defaults={}, seconds_between_status_checks="1", latency_wait="5")
    script = next(flow.path(".snakemake/submitit/train").glob("*/*_submission.sh")).read_text()
    for option in ("--gpus-per-node=1", "--mem=8000M", "--cpus-per-task=4", "--time=240", "--signal=USR2@120"):
        assert f"#SBATCH {option}\n" in script
    script = next(flow.path(".snakemake/submitit/dataset").glob("*/*_submission.sh")).read_text()
    assert "#SBATCH --mem=4000M\n" in script
    assert "#SBATCH --signal=USR2@1\n" in script  # it could not use more notice
    assert "gpus" not in script
