"""Jobs killed at chosen and at random moments, and started again by Snakemake: the results are the same."""

import signal

import pytest
from tally import Tally
from victim import Victim

WRITES = {
    "data manifest": "fashion-1k.json",
    "decoded images": "train.bin",
    "index of decoded images": "test.npz",
    "source weights": "weights.safetensors",
    "source manifest": "source.json",
    "spec": "spec.json",
    "checkpoint": "checkpoint.pt",
    "model": "model.safetensors",
    "metrics": "metrics.json",
}
"""Each kind of file that a run and what it needs write."""
MOMENTS = ("begin", "half", "whole", "renamed")


@pytest.mark.torture
@pytest.mark.parametrize("kind", WRITES)
def test_a_run_killed_in_each_moment_of_a_write(victim: Victim, undisturbed: Victim, tally: Tally, kind: str) -> None:
    with tally.fault(f"SIGKILL, {kind} being written", len(MOMENTS)) as count:
        for moment in MOMENTS:
            victim.sabotage(write=WRITES[kind], at=moment, signal=signal.SIGKILL)
            assert victim.finish(victim.start()) != 0
            assert victim.struck
        assert victim.finish(victim.start()) == 0, victim.said()
        count.compare(victim.metrics(), undisturbed.metrics())
        assert victim.leftovers() == []
