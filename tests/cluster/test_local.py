"""The local back end: one machine, no Slurm."""

import json
import signal
from itertools import pairwise

import psutil
from toy_workflow import Workflow

COUNT = """
    rule all:
        input: expand("{i}.json", i=range(%d))
    rule count:
        output: "{i}.json"
        log: "{i}.log"
        params: call="toy:Counter", steps=%d, pause=0.1
        threads: %d
        resources: gpu=1
        shell: "false"
"""


def test_jobs_share_the_machine_each_with_its_own_gpu(local_flow: Workflow) -> None:
    local_flow.environment["CUDA_VISIBLE_DEVICES"] = "3,5"
    local_flow.write("""
        rule all:
            input: expand("{i}.txt", i=range(3)), "nested.txt"
        rule gpu:
            output: "{i}.txt"
            params: call="local_toy:Gpu"
            resources: gpu=1
            shell: "false"
        rule nested:
            output: "nested.txt"
            shell: "echo {threads} > {output}"
    """)
    local_flow.path("local_toy.py").write_text(
        "import os, time\n"
        "class Gpu:\n"
        "    def __init__(self, output, **rest): self.output = output[0]\n"
        "    def __call__(self):\n"
        "        start = time.time(); time.sleep(3)\n"
        "        open(self.output, 'w').write(f\"{os.environ['CUDA_VISIBLE_DEVICES']} {start} {time.time()}\")\n"
    )
    local_flow.run(submitit_backend="local")
    runs = [local_flow.path(f"{i}.txt").read_text().split() for i in range(3)]
    assert {gpu for gpu, _, _ in runs} == {"3", "5"}
    for gpu in ("3", "5"):
        spans = sorted((float(start), float(end)) for device, start, end in runs if device == gpu)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_a_signal_makes_a_job_checkpoint_and_go_on(local_flow: Workflow) -> None:
    local_flow.write(COUNT % (1, 40, 1))
    driver = local_flow.start(submitit_backend="local")
    local_flow.wait_for(lambda: local_flow.path("0.started").exists(), what="the first step")
    controller = psutil.Process(int(local_flow.id_of("count")))
    controller.children()[0].send_signal(signal.SIGUSR2)
    assert local_flow.finish(driver) == 0, local_flow.said()
    state = json.loads(local_flow.path("0.json").read_text())
    assert state["step"] == 40
    assert len(state["resumed"]) == 1
    assert "step 40" in local_flow.path("0.log").read_text()


def test_ctrl_c_ends_all_and_a_killed_driver_is_succeeded(local_flow: Workflow) -> None:
    local_flow.write(COUNT % (1, 60, 1))
    driver = local_flow.start(submitit_backend="local", directory="elsewhere")
    local_flow.wait_for(lambda: local_flow.path("elsewhere/0.started").exists(), what="the first step")
    id = local_flow.id_of("count")
    driver.kill()
    driver.wait()
    assert psutil.pid_exists(int(id))
    said = local_flow.run(submitit_backend="local", directory="elsewhere")
    assert f"Attached to job {id}" in said
    assert json.loads(local_flow.path("elsewhere/0.json").read_text())["resumed"] == []

    local_flow.write(COUNT % (2, 1000, 1))
    driver = local_flow.start(submitit_backend="local")
    local_flow.wait_for(lambda: "Submitted" in local_flow.said(), what="a submission")
    driver.send_signal(signal.SIGINT)
    local_flow.finish(driver, 20)
    left = [
        p for p in psutil.process_iter(["cmdline"]) if any(str(local_flow.folder) in w for w in p.info["cmdline"] or [])
    ]
    assert left == []
