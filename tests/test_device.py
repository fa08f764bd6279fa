"""Precision by device, and copies to one."""

import pytest
import torch
from tiny import RECIPE, changed, spec

from linvit.device import autocast, precision_on, to_device
from linvit.grid import RunSpec
from linvit.run import identity_on

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[True, False], ids=["has bfloat16", "emulates it"])
def bfloat16(request, monkeypatch) -> bool:
    """Whether GPUs have it."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or request.param
    )
    return request.param


def test_the_default_precision_is_bfloat16_on_gpus_that_have_it_alone(bfloat16):
    assert precision_on(GPU, "auto") == ("bfloat16" if bfloat16 else "float32")
    assert precision_on(CPU, "auto") == "float32"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_precision_that_is_asked_for_is_kept_everywhere(bfloat16, precision, device):
    assert precision_on(device, precision) == precision


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_products_are_in_the_precision(precision, dtype):
    matrix = torch.eye(2)
    with autocast(CPU, precision):
        assert (matrix @ matrix).dtype == dtype


def test_the_default_precision_is_no_part_of_a_runs_settings():
    """On the CPU, runs and checkpoints from before there was a choice stay what they are."""
    run = spec("a.npz")
    assert "precision" not in run.to_json()
    assert identity_on(CPU, run) == run.to_json()
    assert RunSpec.from_json(run.to_json()).recipe.precision == "auto"


def test_a_checkpoint_of_another_precision_is_another_runs(bfloat16):
    run = spec("a.npz")
    assert (identity_on(GPU, run) == identity_on(CPU, run)) == (not bfloat16)
    for precision in ("float32", "bfloat16"):
        settled = run.model_copy(update={"recipe": changed(RECIPE, precision=precision)})
        assert identity_on(GPU, settled) == identity_on(CPU, settled) == settled.to_json()


def test_a_tensor_that_is_there_is_not_copied():
    tensor = torch.zeros(3)
    assert to_device(tensor, CPU) is tensor
    assert to_device(tensor, torch.device("meta")).device.type == "meta"
