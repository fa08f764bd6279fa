"""Many runs: they are planned and finished in bounded memory, and a table of them says what it lacks."""

import copy
import csv
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from damage import damages, writes
from fakes import CONFIG, metrics, plausible
from study import CONFIG as TINY
from study import Study
from tally import Tally

from linvit import incomplete
from linvit.config import load_study
from linvit.files import write_sealed
from linvit.grid import RunSpec, expand
from linvit.results import collect, read_runs, write_runs
from linvit.tables import write_tables

SIZES, SEEDS = 20, 250
MANY = 2 * 2 * SIZES * SEEDS
"""Runs of the grid, of two operators and two initialisations."""
LEFT = int(os.environ.get("TORTURE_JOBS", MANY))
"""Those of them that Snakemake carries out; fewer are sooner done."""
AT_ONCE = 64
"""Jobs, which do next to nothing: each round of Snakemake's looks at all that are left."""
DAMAGED = 125
MOST_KIB = 50
"""Of memory that Snakemake may take for each run, beside what it takes for none."""
FAKE = """#!/bin/sh
# In Python's place, which takes longer to start than all else of a job, a trainer that makes its accuracy up:
# -m linvit --parent PROCESS train SPEC --out FOLDER ...
if [ "$5" = train ]; then
    read -r made_up < made_up.json
    printf '{{"name": "%s", "spec": %s, %s\\n' "${{8#results/runs/}}" "$6" "$made_up" > "$8/metrics.json"
else
    exec {python} "$@"
fi
"""
SWAP = """
import sys

if "snakemake" in sys.orig_argv:
    sys.executable = {fake!r}
"""


def many_runs() -> dict:
    """A configuration with a grid of `MANY` runs, none of which needs a source."""
    config = copy.deepcopy(TINY)
    tiny = config["sizes"]["tiny"]
    config["sizes"] = {f"size{number}": {**tiny, "dim": 2 * (number + 8)} for number in range(SIZES)}
    config["inits"]["mimetic"] = {"analytic": "mimetic"}
    config["sources"] = {}
    block = {"datasets": ["noise"], "sizes": list(config["sizes"]), "variants": ["relu", "elu"]}
    block |= {"inits": ["random", "mimetic"], "seeds": list(range(SEEDS))}
    return {**config, "grids": {"many": [block]}, "grid": "many"}


class Call:
    """A call of Snakemake, as it went."""

    def __init__(self, study: Study, *options: str) -> None:
        log, begin = study.folder / "said.log", time.monotonic()
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--profile",
            "workflow/profiles/local",
            "--cores",
            str(AT_ONCE),
            *options,
        ]
        with log.open("w") as said:
            process = psutil.Popen(command, cwd=study.folder, stdout=said, stderr=subprocess.STDOUT)
            self.peak = 0
            while process.poll() is None:
                self.peak = max(self.peak, process.memory_info().rss)
                time.sleep(0.1)
        self.code, self.said, self.seconds = process.returncode, log.read_text(), time.monotonic() - begin

    @property
    def jobs(self) -> dict[str, int]:
        return {rule: int(n) for rule, n in re.findall(r"^(\w+) +(\d+)$", self.said, re.MULTILINE)}

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, {self.peak / 2**20:.0f} MiB"


def made_up(spec: RunSpec) -> dict:
    return metrics(spec, 50 + spec.stream("fake", spec.variant.name, spec.init.name) % 1000 / 100)


def fake_training(study: Study) -> None:
    """Jobs of this study that train make their metrics up; a data set is not needed."""
    fake, (spec, *_) = study.folder / "fake", expand(load_study(study.folder / "config.yaml")).values()
    fake.write_text(FAKE.format(python=shlex.quote(sys.executable)))
    fake.chmod(0o755)
    (study.folder / "sitecustomize.py").write_text(SWAP.format(fake=str(fake)))
    of_all = {key: value for key, value in made_up(spec).items() if key not in ("name", "spec")}
    (study.folder / "made_up.json").write_text(json.dumps(of_all)[1:] + "\n")
    (study.folder / "results/data").mkdir(parents=True)
    (study.folder / "results/data/noise.json").write_text("{}")


@pytest.mark.torture
def test_a_grid_of_20_000_runs_is_planned_finished_and_gathered(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch, record_property: Callable
) -> None:
    study = Study(tmp_path)
    study.configure(many_runs())
    fake_training(study)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    specs = list(expand(load_study(tmp_path / "config.yaml")).values())

    with tally.fault(f"a grid of {MANY:,} runs") as count:
        plan = Call(study, "--dry-run", "--quiet", "rules")
        count.compare((plan.code, plan.jobs.get("train")), (0, MANY))
        for spec in specs[LEFT:]:
            path = tmp_path / "results/runs" / spec.name / "metrics.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(made_up(spec)))
        whole = Call(study)
        assert whole.code == 0, whole.said[-2000:]
        count.compare(whole.jobs["train"], LEFT)
        runs = read_runs(study.grid("many") / "runs.csv")
        count.compare(sorted(runs["run"]), sorted(spec.name for spec in specs))
        count.compare(incomplete.left_out(runs), {})
        assert max(plan.peak, whole.peak) < MANY * MOST_KIB * 2**10, f"plan: {plan}; run: {whole}"
    record_property("plan", str(plan))
    record_property("run", str(whole))


def test_of_2_500_results_the_damaged_ones_are_named_and_the_others_are_there(tmp_path: Path, tally: Tally) -> None:
    specs = list(expand(load_study(CONFIG), "paper").values())
    specs += [spec.model_copy(update={"seed": spec.seed + 100}) for spec in specs[: 2_500 - len(specs)]]
    paths = {spec.name: tmp_path / "runs" / spec.name / "metrics.json" for spec in specs}
    # Records of epochs make files long, and the last one alone is read.
    contents = {spec.name: metrics(spec, plausible(spec)) | {"history": last_epoch(spec)} for spec in specs}
    for name, path in paths.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(contents[name]))
    whole = collect(paths.values())
    chosen = random.Random(0).sample(sorted(paths), DAMAGED)
    for number, name in enumerate(chosen):
        write_sealed(paths[name], contents[name])
        ways = ways_to_spoil(paths[name].read_bytes())
        ways[number % len(ways)](paths[name])
    with tally.fault("a damaged file of metrics among 2,500", len(chosen)) as count:
        write_runs(collect(paths.values()), tmp_path / "runs.csv")
        runs = read_runs(tmp_path / "runs.csv")
        count.compare(sorted(incomplete.left_out(runs)), sorted(chosen))
        assert all(why.startswith(f"{paths[name]}: ") for name, why in incomplete.left_out(runs).items())
        kept = whole[~whole["run"].isin(chosen)].reset_index(drop=True)
        count.compare(runs.to_csv(), kept.to_csv())
        write_tables(runs, tmp_path)
        for page in ("top1.md", "runs.html", "table1.md", "tableF.tex"):
            assert "INCOMPLETE: 125 results are left out, damaged on disk." in (tmp_path / page).read_text()
        with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
            count.compare(sum(bool(row["left_out"]) for row in csv.DictReader(file)), len(chosen))


def last_epoch(spec: RunSpec) -> list[dict]:
    return [{"epoch": spec.recipe.epochs}] if spec.init.train else []


def ways_to_spoil(content: bytes) -> list[Callable[[Path], None]]:
    """Of metrics with a checksum. A file that is not there is no damage, but a mistake of who names it."""
    ways = [damage for kind, damage in damages(content, 0) if kind not in ("a link to nowhere", "truncated")]
    return [*ways, writes(content[: len(content) // 3]), writes(content.replace(b'"top5": 99', b'"top5": 98', 1))]
