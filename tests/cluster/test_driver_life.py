"""What can happen to the driver, and what becomes of its jobs."""

import os
import signal
import time

import pytest
from toy_workflow import Workflow

pytestmark = pytest.mark.slow

# A job counts at least so many steps, and until the file <name>.go is there.
COUNT = """
    STEPS = {steps}
    rule all:
        input: expand("{{name}}.json", name=STEPS), {more}
    rule count:
        output: "{{name}}.json"
        params:
            call="toy:Counter",
            steps=lambda wildcards: STEPS[wildcards.name],
            until=lambda wildcards: wildcards.name + ".go",
        resources: runtime=30
        shell: "false"
    rule nested:
        output: "nested.txt"
        resources: runtime=30
        shell: "echo start >> nested.starts; until [ -e nested.go ]; do sleep 0.3; done; echo done > {{output}}"
"""


def write(flow: Workflow, steps: dict[str, int], more: str = "[]") -> None:
    flow.write(COUNT.format(steps=steps, more=more))


def release(flow: Workflow, *names: str) -> None:
    for name in names:
        flow.path(f"{name}.go").touch()


def starts(flow: Workflow) -> dict[str, int]:
    return {path.stem: flow.starts(path.stem) for path in flow.folder.glob("*.starts")}


def test_ctrl_c_cancels_everything_within_seconds(flow: Workflow) -> None:
    write(flow, {f"job{i}": 1 for i in range(12)}, '"nested.txt"')
    driver = flow.start(submitit_array_parallelism="3")
    flow.wait_for(lambda: flow.said().count("Submitted") == 3, what="all submissions")
    flow.wait_for(lambda: len(starts(flow)) > 1, what="some jobs to run")
    os.killpg(driver.pid, signal.SIGINT)
    began = time.monotonic()
    flow.finish(driver, 20)
    flow.wait_for(lambda: not flow.cluster.query("squeue", "-h"), 10, "an empty queue")
    assert time.monotonic() - began < 15
    assert "Cancelled 13 jobs." in flow.said()


def test_ctrl_c_while_the_controller_is_away_forgets_no_job(flow: Workflow) -> None:
    write(flow, {"job": 1})
    driver = flow.start()
    flow.wait_for(lambda: len(starts(flow)) == 1, what="the job to run")
    flow.cluster.end("slurmctld")
    os.killpg(driver.pid, signal.SIGINT)
    flow.finish(driver, 120)
    assert "1 jobs could not be cancelled" in flow.said()
    flow.cluster.daemon("slurmctld")
    driver = flow.start()
    flow.wait_for(lambda: flow.said().count("Attached to job") == 1, what="the second driver to find the job")
    release(flow, "job")
    assert flow.finish(driver) == 0, flow.said()
    assert starts(flow) == {"job": 1}


def test_a_killed_driver_is_succeeded_by_the_same_command(flow: Workflow) -> None:
    write(flow, {"short": 1, "long": 1, "longer": 1}, '"nested.txt"')
    flow.start()
    flow.wait_for(lambda: len(starts(flow)) == 4, what="all jobs to run")
    flow.drivers[0].kill()
    release(flow, "short")
    flow.wait_for(lambda: flow.path("short.json").exists(), what="the short job to end")
    driver = flow.start()
    flow.wait_for(lambda: flow.said().count("Attached to job") == 3, what="the second driver to find the jobs")
    assert "Adopted short.json" in flow.said()
    release(flow, "long", "longer", "nested")
    assert flow.finish(driver) == 0, flow.said()
    assert flow.submissions() == 2
    assert starts(flow) == {"short": 1, "long": 1, "longer": 1, "nested": 1}
    # Adopted and attached runs are recorded with their parameters like any others: nothing is stale.
    assert "Nothing to be done" in flow.run()


def test_a_job_with_old_parameters_is_replaced_not_adopted(flow: Workflow) -> None:
    write(flow, {"changed": 1, "same": 1})
    flow.start()
    flow.wait_for(lambda: len(starts(flow)) == 2, what="both jobs to run")
    flow.drivers[0].kill()
    write(flow, {"changed": 2, "same": 1})
    driver = flow.start()
    flow.wait_for(lambda: starts(flow) == {"changed": 2, "same": 1}, what="the new job")
    assert flow.said().count("Attached to job") == 1
    assert flow.said().count("makes the same files from other inputs or settings") == 1
    release(flow, "changed", "same")
    assert flow.finish(driver) == 0, flow.said()


def test_a_driver_killed_while_it_submits_doubles_nothing(flow: Workflow) -> None:
    write(flow, {"one": 1, "two": 1})
    release(flow, "one", "two")
    sbatch = flow.path("bin/sbatch")
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/bash\n/usr/bin/env -S PATH="${PATH#*:}" sbatch "$@"; touch submitted; sleep 60\n')
    sbatch.chmod(0o755)
    path = flow.environment["PATH"]
    flow.environment["PATH"] = f"{sbatch.parent}:{path}"
    driver = flow.start()
    flow.wait_for(lambda: flow.path("submitted").exists(), what="sbatch")
    os.killpg(driver.pid, signal.SIGKILL)
    flow.environment["PATH"] = path
    flow.run()
    assert starts(flow) == {"one": 1, "two": 1}
    flow.wait_for(lambda: not flow.cluster.query("squeue", "-h"), 10, "an empty queue")


def test_jobs_are_seen_whatever_the_users_shell_filters(flow: Workflow) -> None:
    flow.environment |= {"SQUEUE_PARTITION": "low", "SQUEUE_NAMES": "other", "SCANCEL_PARTITION": "low"}
    flow.write("""
        rule all:
            input: "count.json", "ranks/done"
        rule count:
            output: "count.json"
            params: call="toy:Counter", steps=40
            resources: runtime=10
            shell: "false"
        rule ranks:
            output: "ranks/done"
            params: call="toy:Ranks"
            resources: runtime=10, gres="gpu:toy:2"
            shell: "false"
    """)
    flow.run()  # eight seconds, of which the job would be gone for four
    assert flow.starts("count") == 1
    # A type of GPU has a rank each like any other.
    assert sorted(path.name for path in flow.path("ranks").glob("*.json")) == ["rank0.json", "rank1.json"]
