"""Failures that are no mistake of the program's: one line with what to do next, and no traceback."""

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from commands import environment
from tiny import spec

import linvit.run
from linvit import __version__
from linvit.cli import main
from linvit.fit import Interrupted

TRAIN = ["train", spec("x").to_json(), "--out", "run"]
FAILURES = {
    "a full disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/a"), 1, "run/a: No space .* free some space"),
    "no permission": (PermissionError(errno.EACCES, "Permission denied", "run"), 1, "run: Permission denied; check"),
    "an error without a number": (OSError("the pipe is gone"), 1, "the pipe is gone; check"),
    "the GPU's memory": (
        torch.OutOfMemoryError("CUDA out of memory.\nTried"),
        1,
        "out of memory; lower .* micro_batch",
    ),
    "the host's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory; lower"),
    "Python's memory": (MemoryError(), 1, "out of memory; lower"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "interrupted; the same command begins again"),
    "a stop": (Interrupted("stopped in epoch 1 after step 2"), 1, "after step 2; the same command goes on from there"),
}


@pytest.mark.parametrize(("error", "code", "told"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_line_with_what_to_do(tmp_path, monkeypatch, capsys, error, code, told):
    def fail(*_, **__):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(linvit.run, "train", fail)
    assert main(TRAIN) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("linvit: error: ")
    assert re.search(told, line)


def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("shapes differ")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(linvit.run, "train", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(TRAIN)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"linvit {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plna"], "linvit: error: no command 'plna'; did you mean 'plan'?; see linvit --help"),
        (
            ["plan", "--gird", "x"],
            "linvit plan: error: no argument '--gird'; did you mean '--grid'?; see linvit plan --help",
        ),
        (["train"], "linvit train: error: the following arguments are required: RUN; see linvit train --help"),
        ([], "linvit: error: the following arguments are required: command; see linvit --help"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_with_a_suggestion(capsys, arguments, told):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == told + "\n"


def test_an_operator_beside_the_configuration_is_found_by_the_installed_command(folder):
    """Its script's folder is where Python looks first, not the working directory."""
    (folder / "mine.py").write_text("from linvit.attention.kernel import ReluAttention as Mine\n")
    text = (folder / "config.yaml").read_text().replace("linvit.attention.kernel:ReluAttention", "mine:Mine")
    (folder / "config.yaml").write_text(text)
    script = folder / "bin" / "linvit"
    script.parent.mkdir()
    script.write_text("import sys\nfrom linvit.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "train", "bands/wee/relu/random/none/seed0"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=300)
    assert made.returncode == 0, made.stderr


def test_a_second_ctrl_c_ends_a_training_at_once_with_its_code(folder):
    """The first one asks it to stop after a step."""
    code = "import linvit.run, signal, sys, time\nfrom linvit.cli import main\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in the background it may be ignored
    code += "def train(*_, stop, **__):\n    stop()\n    print('begun', flush=True)\n"
    code += "    while not stop():\n        time.sleep(0.1)\n"
    code += "    print('asked to stop', flush=True)\n    time.sleep(300)\n"
    code += f"linvit.run.train = train\nsys.exit(main({TRAIN}))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked to stop\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("linvit: error: interrupted")
    assert "Traceback" not in err
