"""Ranks add what belongs together, also where a model that branches gives a parameter no gradient on some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.branching_runs import states_after, states_of_ranks
from spillway_trainer.ranks import World

SHARES = {"resident": None, "offloaded": (0.4, 0.3, 0.3)}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_a_gradient_that_comes_on_some_ranks_only_is_the_sum(
    tmp_path: Path, shares: tuple[float, float, float] | None
) -> None:
    """One micro-batch a rank, so the sum is that of one rank's two micro-batches, bit by bit."""
    expected = states_after(tmp_path, World(), None)
    for states in states_of_ranks(tmp_path, shares):
        assert [name for name, value in states.items() if not torch.equal(value, expected[name])] == []
