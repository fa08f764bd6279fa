"""What can happen to a job, and what becomes of it. All of it happens in one run, at the same time."""

import re
import time

import pytest
from toy_workflow import Workflow

pytestmark = pytest.mark.slow

LIVES = """
    COUNTED = ["preempted", "requeued", "broken", "signalled", "suspended", "limited", "helped"]

    rule all:
        input: expand("{name}.json", name=COUNTED), "nested.txt", "cancelled.json", "exited.json"

    def partition(wildcards):
        return {"preempted": "low", "broken": "fragile"}.get(wildcards.name, "main")

    rule count:
        output: "{name}.json"
        wildcard_constraints: name="|".join(COUNTED[:3] + COUNTED[4:5])
        log: "{name}.log"
        params: call="toy:Counter", steps=10, until="go", every=5
        resources: runtime=30, slurm_partition=partition
        shell: "false"

    rule limited:
        output: "limited.json"
        params: call="toy:Counter", steps=10, until="go"
        resources: runtime=1
        shell: "false"

    rule signalled:
        output: "signalled.json"
        params: call="toy:Deaf", steps=10, until="go", every=5
        resources: runtime=30
        shell: "false"

    rule helped:
        output: "helped.json"
        params: call="toy:Helped", steps=10, until="go", every=5
        resources: runtime=30
        shell: "false"

    rule cancelled:
        output: "cancelled.json"
        retries: 0
        params: call="toy:Helped", steps=10, until="never"
        resources: runtime=30
        shell: "false"

    rule exited:
        output: "exited.json"
        retries: 1
        params: call="toy:Counter", steps=15, exit=100
        resources: runtime=30, mem_mb=lambda wildcards, attempt: 100 * attempt
        shell: "false"

    rule nested:
        output: "nested.txt"
        resources: runtime=30
        shell: "echo $SLURM_JOB_ID >> nested.starts; until [ -e go ]; do sleep 0.3; done; echo done > {output}"
"""


@pytest.fixture(scope="module")
def lived(tmp_path_factory, cluster) -> Workflow:
    flow = Workflow(tmp_path_factory.mktemp("lives"), cluster)
    try:
        live(flow)
        yield flow
    finally:
        flow.stop()
        cluster.query("scancel", "--quiet", "--me")


def job_ids(flow: Workflow) -> dict[str, str]:
    """Toy job -> its own job id, which is told by the job itself."""
    return {path.stem: path.read_text().split()[0] for path in flow.folder.glob("*.starts")}


def live(flow: Workflow) -> None:
    """Lets everything happen."""
    flow.write(LIVES)
    driver = flow.start(submitit_signal_delay_seconds="5")
    names = ("preempted", "requeued", "broken", "signalled", "suspended", "cancelled", "limited", "helped")
    flow.wait_for(lambda: all(flow.steps(name) >= 7 for name in names), what="all jobs to be under way")
    flow.wait_for(lambda: flow.starts("nested") == 1, what="the nested job")
    run, ids = flow.cluster.run, job_ids(flow)
    run("scontrol", "suspend", ids["suspended"])
    run("scancel", "--signal=USR2", ids["nested"])
    run("scancel", "--signal=USR2", ids["signalled"])
    run("scontrol", "requeue", ids["requeued"])
    run("scontrol", "requeue", ids["helped"])
    run("scancel", ids["cancelled"])
    run("sbatch", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    time.sleep(6)  # longer suspended than the grace that vanished jobs have
    flow.cluster.query("scontrol", "update", "NodeName=n3", "State=RESUME")  # refused where it is back already
    run("scontrol", "resume", ids["suspended"])
    resumed = ("preempted", "requeued", "broken", "signalled", "limited", "nested", "helped")
    flow.wait_for(lambda: all(flow.starts(name) >= 2 for name in resumed), what="all jobs to be resumed")
    flow.path("go").touch()
    flow.code = flow.finish(driver)


@pytest.mark.parametrize("name", ["preempted", "requeued", "broken", "signalled", "limited", "helped"])
def test_jobs_resume_from_their_last_checkpoint(lived: Workflow, name: str) -> None:
    state = lived.state(name)
    assert len(state["resumed"]) >= 1
    assert state["resumed"][0] >= 5


def test_jobs_that_were_asked_to_stop_lost_no_step(lived: Workflow) -> None:
    for name in ("preempted", "requeued"):
        steps = re.findall(r"^step (\d+)$", lived.path(f"{name}.log").read_text(), re.MULTILINE)
        assert [int(step) for step in steps] == list(range(1, len(steps) + 1))


def test_a_job_whose_helpers_slurm_ended_is_requeued_once_and_not_failed(lived: Workflow) -> None:
    assert len(set(lived.path("helped.starts").read_text().split())) == 1
    assert lived.starts("helped") == 2
    said = next(lived.path(".snakemake/submitit/helped").glob("*/*_log.out")).read_text()
    assert "RuntimeError: the helper exited unexpectedly" in said
    assert "Submitted job triggered an exception" not in said


def test_a_suspended_job_is_left_alone(lived: Workflow) -> None:
    assert lived.state("suspended")["resumed"] == []
    assert lived.starts("suspended") == 1


def test_a_preempted_nested_job_starts_anew_in_the_same_job(lived: Workflow) -> None:
    first, second = lived.path("nested.starts").read_text().split()
    assert first == second
    assert lived.path("nested.txt").read_text() == "done\n"


def test_a_job_that_was_cancelled_from_outside_fails_and_says_so(lived: Workflow) -> None:
    assert "CANCELLED: somebody cancelled it (scancel)" in lived.said()
    assert not lived.path("cancelled.json").exists()
    assert lived.starts("cancelled") == 1
    assert lived.code == 1


def test_a_hard_exit_fails_with_its_code_and_the_second_attempt_has_more_memory(lived: Workflow) -> None:
    assert "FAILED: exit code 137 (killed; perhaps for memory)" in lived.said()
    assert "Trying to restart job" in lived.said()
    assert lived.state("exited")["mem_mb"] == 200


def test_a_controller_that_is_away_is_no_verdict(flow: Workflow) -> None:
    flow.write("""
        rule all:
            input: "count.json"
        rule count:
            output: "count.json"
            params: call="toy:Counter", steps=10, until="go"
            shell: "false"
    """)
    driver = flow.start()
    flow.wait_for(lambda: flow.steps("count") > 2, what="the job to be under way")
    flow.cluster.end("slurmctld")
    flow.wait_for(lambda: flow.said().count("squeue does not answer") > 0, what="the driver to notice")
    time.sleep(5)  # longer than the grace that vanished jobs have
    flow.cluster.daemon("slurmctld")
    flow.path("go").touch()
    assert flow.finish(driver) == 0, flow.said()
    assert flow.state("count")["resumed"] == []
