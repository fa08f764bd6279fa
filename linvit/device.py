"""Where and in what precision a model runs."""

import resource
from contextlib import AbstractContextManager

import torch


def pick_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Mixed precision for the forward pass; with "float32" nothing is cast."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
