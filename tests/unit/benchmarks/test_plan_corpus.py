"""The corpus of jobs, and the search against trying every candidate."""

from __future__ import annotations

import pytest

import plan_corpus as benchmark
from harness.depth import at
from spillway.planning.candidates import timed
from spillway.planning.planner import ask
from spillway.planning.search import Search


def test_a_seed_makes_one_job_and_every_kind_can_be_drawn() -> None:
    assert str(benchmark.corpus(3)[2]) == str(benchmark.corpus(3)[2])
    for kind in ("deep", "uneven", "too large", "wearing", "sweep", "shapes"):
        assert benchmark.corpus(1, kind=kind)[0].kind == kind


def test_the_search_finds_exactly_what_trying_every_candidate_finds() -> None:
    assert all(benchmark.compared(at(1, 12, 500)))


@pytest.mark.parametrize("seed", range(at(2, 8, 40)))
def test_bounds_hold_for_every_candidate_that_fits(seed: int) -> None:
    """Of each layout, and of each of its splits: no fewer seconds than the bound, no more than the most."""
    search = next(
        found
        for asked in benchmark.corpus(40, 20_000 + 1000 * seed)
        if not asked.job.spec.members
        for found in [Search(ask(asked.job, asked.node, asked.overrides))]
        if 0 < sum(len(group.layouts) for group in found.groups) <= 1000
    )
    budget = search.question.budget
    for group in search.groups:
        for layout in group.layouts:
            bound = group.bounds.seconds(layout, budget, spare=True)
            for one in search.candidates(group, layout):
                if one.missing:
                    continue
                choice = timed(search.question, one)
                spills = bool(one.blocks.nvme or one.streaming.nvme)
                least, most = group.bounds.of_split(layout, one.optimizer, spills=spills)
                assert least <= choice.seconds * (1 + 1e-9)
                assert choice.seconds <= most * (1 + 1e-9)
                assert choice.wears_out or bound <= choice.priced_seconds * (1 + 1e-9)
