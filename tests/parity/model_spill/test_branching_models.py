"""Ranks add what belongs together, also where a model that branches gives a parameter no gradient on some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.branching_runs import NUM_CALLS, NUM_STEPS, Shares, states_after, states_of_ranks
from spillway_trainer.ranks import World

SHARES = {"resident": None, "offloaded": (0.4, 0.3, 0.3)}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_a_gradient_that_comes_on_some_ranks_only_is_the_sum(tmp_path: Path, shares: Shares) -> None:
    """One micro-batch a rank, so the sum is that of one rank's two micro-batches, bit by bit."""
    expected = states_after(tmp_path, World(), None)
    for states in states_of_ranks(tmp_path, shares):
        assert states.pop(NUM_CALLS) == NUM_STEPS
        assert [name for name, value in states.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize(("again", "num_repeated"), [(0, 0), (5, 2)], ids=["in every step", "in later steps"])
def test_a_step_is_repeated_when_a_gradient_comes_after_its_sum_was_begun(
    tmp_path: Path, shares: Shares, again: int, num_repeated: int
) -> None:
    """Of rank 1 first, then of rank 0: both repeat the step, and that rank waits for the end of backward then."""
    expected = list(states_of_ranks(tmp_path, shares, again, behind=False))
    for states, plain in zip(states_of_ranks(tmp_path, shares, again), expected, strict=True):
        assert (states.pop(NUM_CALLS), plain.pop(NUM_CALLS)) == (NUM_STEPS + num_repeated, NUM_STEPS)
        assert [name for name, value in states.items() if not torch.equal(value, plain[name])] == []
