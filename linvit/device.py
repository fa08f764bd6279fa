"""Where and in what precision a model runs."""

import os
import resource
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def pick_device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show a rank all GPUs of its node or its own alone.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def name_of(device: torch.device) -> str:
    """The GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; on a GPU the host does not wait, for the copy nor for what is queued."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def precision_on(device: torch.device, precision: str) -> str:
    """The precision that "auto" means on a device: bfloat16 on a GPU that has it, else float32."""
    if precision != "auto":
        return precision
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_bfloat16 else "float32"


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Mixed precision for the forward pass; with "float32" nothing is cast."""
    enabled = precision_on(device, precision) == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
