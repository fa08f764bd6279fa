"""The study itself on the cluster: what befalls its runs leaves no trace in their metrics; the demo as users run it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import start_ranks
from study import CONFIG, ROOT, Study
from tiny import repeatable
from tiny_slurm import Cluster
from toy_workflow import OPTIONS, PLUGIN, Workflow

from linvit.config import load_study
from linvit.grid import expand

pytestmark = pytest.mark.slow

# Says in which job it is, and trains in slow motion until the file `go` is there.
PATIENT = """
import os, pathlib, sys, time
from linvit.attention.kernel import ReluAttention


class PatientAttention(ReluAttention):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        job = [os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK")]
        print("in job", "_".join(job) if all(job) else os.environ.get("SLURM_JOB_ID"), file=sys.stderr, flush=True)

    def forward(self, x, attn_mask=None, is_causal=False):
        if self.training and not pathlib.Path("go").exists():
            time.sleep(1)
        return super().forward(x)
"""
FATES = {"undisturbed": 0, "requeued": 1, "preempted": 2, "broken": 3, "limited": 4, "shared": 5}
"""What happens to the run of each seed; `shared` is one of two ranks, which is requeued."""
SEEDS = "int(wildcards.run.rpartition('seed')[2])"
RESOURCES = {
    "slurm_partition": f"{{2: 'low', 3: 'fragile'}}.get({SEEDS}, 'main')",
    "runtime": f"3 if {SEEDS} == 4 else 30",
    "gpu": f"2 if {SEEDS} == 5 else 0",
}


class Lives:
    """A study whose runs, one a seed, each meet their fate."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.study = Study(folder)
        (folder / "patient.py").write_text(PATIENT)
        config = yaml.safe_load(yaml.safe_dump(CONFIG))
        config["variants"]["patient"] = {"target": "patient:PatientAttention"}
        config["recipes"]["short"] |= {"epochs": 100, "batch_size": 10}
        block = {"variants": ["patient"], "inits": ["mlpcopy-distill"], "seeds": list(FATES.values())}
        config["grids"]["tiny"] = [config["grids"]["tiny"][0] | block]
        config["recipes"]["source"] = {"epochs": 2, "batch_size": 32, "interpolation": "bilinear"}
        config["sources"]["own"]["tiny"]["train"]["recipe"] = "source"
        self.study.configure(config)
        self.runs = {fate: self.spec(seed) for fate, seed in FATES.items()}
        self.flow = Workflow(folder, cluster)
        self.flow.environment["PYTHONPATH"] = f"{folder}:{PLUGIN}"

    def spec(self, seed: int):
        runs = expand(load_study(self.study.folder / "config.yaml"))
        return next(spec for spec in runs.values() if spec.seed == seed)

    def folder(self, fate: str) -> Path:
        return self.study.folder / "results/runs" / self.runs[fate].name

    def job_id(self, fate: str) -> str:
        """The cluster's id, from what the run says of itself."""
        return re.search(r"^in job (\S+)$", (self.folder(fate) / "train.log").read_text(), re.MULTILINE)[1]

    def starts(self, fate: str) -> int:
        log = self.folder(fate) / "train.log"
        return 1 + log.read_text().count("resumed after epoch") if log.exists() else 0

    def live(self) -> int:
        """Lets everything happen at the same time."""
        flow, run = self.flow, self.flow.cluster.run
        flow.path("profile").mkdir()
        options = {"set-resources": {"train": RESOURCES}, "submitit-signal-delay-seconds": 15}
        flow.path("profile/config.yaml").write_text(yaml.safe_dump(options))
        driver = flow.start("--profile", "profile", defaults=OPTIONS)
        under_way = [self.folder(fate) / "checkpoint.pt" for fate in FATES]
        flow.wait_for(lambda: all(path.exists() for path in under_way), what="all runs to be under way")
        run("scontrol", "requeue", self.job_id("requeued"))
        run("scontrol", "requeue", self.job_id("shared"))
        run("sbatch", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
        run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
        time.sleep(3)
        flow.cluster.query("scontrol", "update", "NodeName=n3", "State=RESUME")
        disturbed = [fate for fate in FATES if fate != "undisturbed"]
        flow.wait_for(lambda: all(self.starts(fate) >= 2 for fate in disturbed), 600, "all runs to be resumed")
        flow.path("go").touch()
        return flow.finish(driver)

    def alone(self, fate: str, ranks: int = 1) -> dict:
        """The metrics of the same run, undisturbed, without a cluster."""
        command = [sys.executable, "-m", "linvit", "train", self.runs[fate].to_json(), "--out", f"alone/{fate}"]
        command += ["--data", ".", "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(self.study.folder)}
        processes = start_ranks([command] * ranks, environment, cwd=self.study.folder)
        assert [process.wait(timeout=300) for process in processes] == [0] * ranks
        return json.loads((self.study.folder / "alone" / fate / "metrics.json").read_text())


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives"), cluster)
    try:
        assert lives.live() == 0, lives.flow.said()
        yield lives
    finally:
        lives.flow.stop()
        cluster.query("scancel", "--quiet", "--me")


@pytest.mark.parametrize("fate", FATES)
def test_a_run_ends_bit_identical_to_an_undisturbed_one(lived: Lives, fate: str) -> None:
    metrics = json.loads((lived.folder(fate) / "metrics.json").read_text())
    ranks = 2 if fate == "shared" else 1
    assert metrics["ranks"] == ranks
    assert repeatable(metrics) == repeatable(lived.alone(fate, ranks))
    assert (lived.starts(fate) >= 2) == (fate != "undisturbed")


def test_a_run_on_two_gpus_is_one_job_of_two_ranks(lived: Lives) -> None:
    scripts = (lived.study.folder / ".snakemake/submitit/train").glob("*/*_submission.sh")
    shared = [text for text in (path.read_text() for path in scripts) if "--gpus-per-node=2\n" in text]
    assert len(shared) == 1
    assert "#SBATCH --ntasks-per-node=2\n" in shared[0]
    assert "--array" not in shared[0]


def test_the_demo_as_users_start_it(tmp_path: Path, cluster: Cluster) -> None:
    """A fresh clone, the literal command, and once more."""
    clone = tmp_path / "linvit"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    environment = cluster.environment | {"PYTHONPATH": f"{clone}:{clone}/workflow/executor", "HOME": str(tmp_path)}

    def drive() -> str:
        command = [sys.executable, "-m", "snakemake", "--profile", "slurm"]
        result = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    said = drive()
    # Those that need no source may go first.
    arrays = [int(jobs) for jobs in re.findall(r"Submitted (\d+) x train", said)]
    assert sum(arrays) == 11
    assert len(arrays) <= 2
    runs = sorted((clone / "results/runs").rglob("metrics.json"))
    assert len(runs) == 11
    assert all("epoch 45/45" in (path.parent / "train.log").read_text() for path in runs)
    for name in ("runs.csv", "top1.md", "fig2.png", "fig4.pdf", "claims.md"):
        assert (clone / "results/grids/demo" / name).stat().st_size > 0
    assert "Nothing to be done" in drive()


@pytest.mark.parametrize("grid", ["mini", "paper"])
def test_the_other_grids_are_planned_by_the_same_command(cluster: Cluster, grid: str, tmp_path: Path) -> None:
    options = ["--config", f"grid={grid}", f"results={tmp_path}", "--dry-run", "--quiet", "rules"]
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "slurm", *options],
        cwd=ROOT,
        env=cluster.environment | {"PYTHONPATH": f"{ROOT}:{PLUGIN}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    planned = len(expand(load_study(ROOT / "config.yaml"), grid))
    assert re.search(rf"^train +{planned}$", result.stdout + result.stderr, re.MULTILINE)
