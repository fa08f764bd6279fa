"""How jobs go out: arrays, chunks, callables, nested jobs, groups, ranks, refusals."""

import json
import re
from pathlib import Path

from toy_workflow import Workflow


def test_ready_jobs_of_a_rule_go_out_as_arrays_no_larger_than_slurm_allows(flow: Workflow) -> None:
    flow.write("""
        rule all:
            input: expand("out/{i}.json", i=range(13))
        rule count:
            output: "out/{i}.json"
            params: call="toy:Counter", steps=2, pause=0.1
            threads: 2
            resources: runtime=10, mem_mb=100
            shell: "false"
    """)
    said = flow.run(submitit_array_parallelism="4")
    assert re.findall(r"Submitted (\d+) x count", said) == ["10", "3"]
    scripts = list(flow.path(".snakemake/submitit/count").glob("*/*_submission.sh"))
    text = next(path for path in scripts if "0-9" in path.read_text()).read_text()
    for option in ("--array=0-9%4", "--mem=100M", "--cpus-per-task=2", "--time=10", "--requeue"):
        assert f"#SBATCH {option}\n" in text
    assert len(list(flow.path("out").glob("*.json"))) == 13


def test_nested_jobs_groups_and_ranks(flow: Workflow) -> None:
    flow.write("""
        envvars: "PASSED_ON"
        rule all:
            input: "nested.txt", "b.txt", "ranks/done"
        rule nested:
            output: "nested.txt"
            resources: runtime=10, slurm_extra="--nice=7 --exclusive=user", constraint="", slurm_partition="main"
            shell: "echo $SLURM_JOB_PARTITION $PASSED_ON > {output}"
        rule first:
            output: "a.txt"
            group: "pair"
            shell: "echo a > {output}"
        rule second:
            input: "a.txt"
            output: "b.txt"
            group: "pair"
            shell: "cat {input} > {output}; echo $SLURM_JOB_ID >> {output}"
        rule ranks:
            output: "ranks/done"
            params: call="toy:Ranks"
            resources: nodes=2, gpu=2, slurm_partition="wide", runtime=10
            shell: "false"
    """)
    flow.environment["PASSED_ON"] = "hush"
    said = flow.run()
    assert flow.path("nested.txt").read_text() == "main hush\n"
    pickles = list(flow.path(".snakemake/submitit").glob("*/*/*_submitted.pkl"))
    assert len(pickles) == 3
    assert not any(b"hush" in path.read_bytes() for path in pickles)
    assert said.count("Submitted 1 x pair") == 1
    assert flow.path("b.txt").read_text().startswith("a\n")
    script = next(flow.path(".snakemake/submitit/nested").glob("*/*_submission.sh")).read_text()
    assert "#SBATCH --nice=7\n" in script
    assert "constraint" not in script
    ranks = [json.loads(flow.path(f"ranks/rank{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["WORLD_SIZE"], rank["LOCAL_RANK"], rank["node"]) for rank in ranks] == [
        ("4", "0", "n1"),
        ("4", "1", "n1"),
        ("4", "0", "n2"),
        ("4", "1", "n2"),
    ]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("n1", ranks[0]["MASTER_PORT"])}


def test_failures_say_why_and_where(flow: Workflow) -> None:
    flow.write("""
        rule all:
            input: "raised", "forgotten", "nested", "refused", "malformed", "grouped", "peers"
        rule raised:
            output: "raised"
            log: "logs/raised.log"
            params: call="toy:Failing", message="worn out"
            shell: "false"
        rule forgotten:
            output: "forgotten"
            params: call="toy:Idle"
            shell: "false"
        rule nested:
            output: "nested"
            shell: "echo last words; exit 3"
        rule refused:
            output: "refused"
            resources: slurm_partition="nowhere"
            shell: "false"
        rule peers:
            output: "peers"
            params: call="toy:Peers"
            resources: tasks=2
            shell: "false"
        rule malformed:
            output: "malformed"
            params: call="toy:Failing", message=1j
            shell: "false"
        rule grouped:
            output: "grouped"
            group: "g"
            shell: "echo words of a group; exit 4"
    """)
    said = flow.run(code=1)
    assert "ValueError: worn out" in said
    assert "FileNotFoundError: toy:Idle ended without making forgotten" in said
    assert re.search(r"FAILED: .*; one of 2 ranks said: ConnectionError: connection closed by peer", said)
    assert "last words" in said
    assert "words of a group" in said
    assert "invalid partition specified: nowhere" in said
    assert "again in" not in said  # time does not make a partition
    assert "rule malformed: params.message is a complex" in said
    assert "about to fail" in flow.path("logs/raised.log").read_text()
    assert "ValueError: worn out" in flow.path("logs/raised.log").read_text()
    logs = re.findall(r"--- last lines of (\S+)", said)
    assert len(logs) >= 4
    assert all(re.search("Error|about", Path(log).read_text()) for log in logs)


def test_a_second_driver_in_the_folder_is_refused(flow: Workflow) -> None:
    flow.write("""
        rule all:
            input: "count.json"
        rule count:
            output: "{name}.json"
            params: call="toy:Counter", steps=1000
            shell: "false"
    """)
    flow.start()
    flow.wait_for(lambda: "Submitted 1 x count" in flow.said(), what="the first driver")
    assert "Directory cannot be locked" in flow.run(code=1)
    said = flow.run("other.json", code=1)  # Snakemake's lock is one for each output
    assert f"another driver works in this folder: process {flow.drivers[0].pid} on" in said
    assert "Traceback" not in said
