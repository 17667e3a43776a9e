"""The corpus of jobs, and the search against trying every candidate."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize(
    ("seed", "exchanges"),
    [*((seed, False) for seed in range(at(2, 8, 40))), *((seed, True) for seed in range(at(1, 4, 20)))],
)
def test_bounds_hold_for_every_candidate_that_fits(seed: int, exchanges: bool) -> None:
    """Of each layout, and of each of its splits: no fewer seconds than the bound, no more than the most. `exchanges`:
    between several devices, by slow links."""
    search = next(
        found
        for asked in benchmark.corpus(120 if exchanges else 40, 20_000 + 1000 * seed)
        if not asked.job.spec.members
        for node in [replace(asked.node, interconnect_bytes_per_second=1e8) if exchanges else asked.node]
        for overrides in [replace(asked.overrides, device_bytes=None) if exchanges else asked.overrides]
        for found in [Search(ask(asked.job, node, overrides))]
        if 0 < sum(len(group.layouts) for group in found.groups) <= 1000
        if not exchanges or (found.groups[0].work.exchanges_on_device and found.fits())
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
