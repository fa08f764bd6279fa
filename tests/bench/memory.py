"""The most memory that a call holds beyond what was there before it."""

import os
from collections.abc import Callable
from itertools import accumulate

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: the profiler says when it starts and stops

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """By the allocator's own count on a GPU; on the CPU by the profiler's record of every allocation and release.

    Libraries' own buffers are in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    # The public summaries add up what an operation allocates and releases; the peak needs their order.
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes, initial=0))
