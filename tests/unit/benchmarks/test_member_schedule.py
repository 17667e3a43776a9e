"""Members that take turns: policies as pure functions, and the simulation that plays them through."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from member_schedule import (
    Machine,
    MemberWork,
    Readiness,
    SegmentWork,
    TurnPolicy,
    WaitingMember,
    bound_seconds,
    ceiling_seconds,
    choose,
    machine_of,
    merged,
    parted,
    pilot_shards,
    visited_together,
)
from member_simulation import STEPWISE, Outcome, fastest, simulate
from spillway.planning.hardware import resolve_node

ONE_DEVICE = Machine(1, 10.0, 10.0, 1)


def member(
    name: str = "m", num_segments: int = 4, num_steps: int = 3, *, upload: int = 10, update: float = 1.0
) -> MemberWork:
    """A segment takes 1 s forward, 3 s backward, and `upload` / 10 s to come."""
    return MemberWork(name, (SegmentWork(1.0, 3.0, upload, upload, update),) * num_segments, num_steps)


def random_members(seed: int) -> tuple[list[MemberWork], Machine]:
    rng = random.Random(seed)

    def segment() -> SegmentWork:
        forward = rng.uniform(0.1, 2.0)
        return SegmentWork(forward, rng.uniform(1.0, 3.0) * forward, rng.randrange(20), rng.randrange(20), rng.random())

    works = [
        MemberWork(
            f"m{index}",
            tuple(segment() for _ in range(rng.randrange(1, 6))),
            rng.randrange(1, 6),
            rng.choice((0, rng.randrange(40))),
        )
        for index in range(rng.randrange(1, 7))
    ]
    return works, Machine(rng.randrange(1, 5), 10.0, 10.0, rng.choice((1, 2)), rng.randrange(1, 4))


def overlaps(outcome: Outcome, key: str) -> bool:
    """Whether two spans of one device, or of one member, overlap."""
    spans = sorted(outcome.spans, key=lambda span: (getattr(span, key), span.begin_seconds))
    return any(
        getattr(first, key) == getattr(second, key) and second.begin_seconds < first.end_seconds - 1e-9
        for first, second in pairwise(spans)
    )


def test_single_member_runs_its_uploads_visits_and_updates_in_sequence() -> None:
    # Upload of the first segment, two steps of 4 segments of 1 + 3 s, download of the last gradient and update between
    # them, of which the visits of the second step hide three quarters, and at the end.
    outcome = simulate([member(num_steps=1)], ONE_DEVICE, TurnPolicy.READINESS)
    assert outcome.seconds == 1.0 + 4 * 4.0 + 1.0 + 4.0
    again = simulate([member(num_steps=2)], ONE_DEVICE, TurnPolicy.READINESS)
    # The second step: its first segment is updated after 1 s and comes in 1 s, the others arrive while it computes.
    assert again.seconds == 1.0 + 16.0 + 1.0 + (1.0 + 1.0) + 16.0 + 1.0 + 4.0


def test_two_members_hide_one_anothers_updates() -> None:
    alone = simulate([member()], ONE_DEVICE, TurnPolicy.READINESS).seconds
    both = simulate([member("a"), member("b")], ONE_DEVICE, TurnPolicy.READINESS)
    after = simulate([member("a"), member("b")], ONE_DEVICE, TurnPolicy.SEQUENTIAL)
    assert both.seconds < after.seconds < 2 * alone + 1e-9
    assert both.busy_seconds == after.busy_seconds
    compute = both.busy_seconds["compute"]
    assert compute == 2 * 3 * 16.0
    # First upload, and the last download and update.
    assert both.seconds <= compute + 1.0 + 1.0 + 4.0


@pytest.mark.parametrize("policy", TurnPolicy)
def test_no_schedule_beats_the_bound_or_double_books_a_device_or_member(policy: TurnPolicy) -> None:
    for seed in range(60):
        works, machine = random_members(seed)
        outcome = simulate(works, machine, policy)
        assert outcome.seconds >= bound_seconds(works, machine) * (1 - 1e-9), seed
        assert bound_seconds(works, machine) >= ceiling_seconds(works, machine)
        assert not overlaps(outcome, "device") and not overlaps(outcome, "member"), seed
        computed = sum(work.num_steps * work.compute_seconds for work in works)
        assert outcome.busy_seconds["compute"] == pytest.approx(computed), seed
        assert outcome.busy_seconds["update"] == pytest.approx(sum(w.num_steps * w.update_seconds for w in works)), seed
        assert simulate(works, machine, policy) == outcome


def test_the_fastest_is_never_behind_any_policy_that_it_may_take() -> None:
    for seed in range(30):
        works, machine = random_members(seed)
        if seed % 2:
            works = [replace(work, num_parts=1 + seed % machine.num_devices) for work in works]
        policy, outcome = fastest(works, machine)
        assert policy in STEPWISE
        assert outcome.seconds == min(simulate(works, machine, one).seconds for one in STEPWISE)


def streamed(node_class: str, sizes: Sequence[float], num_devices: int) -> tuple[list[MemberWork], Machine]:
    """Members of so many parameters, all streamed and updated by the host, 8,192 tokens a step."""
    node = resolve_node(node_class)

    def one(name: str, num_parameters: float) -> MemberWork:
        of_one = num_parameters / 16
        forward = 2 * of_one * 8192 / node.bfloat16_flops_per_second
        update = 28 * of_one / node.cpu_bytes_per_second
        return MemberWork(name, (SegmentWork(forward, 3 * forward, int(2 * of_one), int(2 * of_one), update),) * 16, 12)

    works = [one(str(index), size) for index, size in enumerate(sizes)]
    return works, replace(machine_of(node), num_devices=num_devices, num_slots=8)


def test_mixed_members_end_within_seven_percent_of_the_bound() -> None:
    works, machine = streamed("a100-40", (6e9, 3e9, 3e9, 1.5e9, 1.5e9, 0.7e9), 1)
    ours, bound = fastest(works, machine)[1].seconds, bound_seconds(works, machine)
    assert ours <= 1.07 * bound
    assert simulate(works, machine, TurnPolicy.SEQUENTIAL).seconds > 1.1 * bound


def test_the_update_of_the_longest_chain_goes_first() -> None:
    """Behind those of the four small members it would make the large one, whose chain is the bound, end later."""
    works, machine = streamed("h200", (4e9, 1e9, 1e9, 1e9, 1e9), 4)
    bound = bound_seconds(works, machine)
    assert simulate(works, machine, TurnPolicy.READINESS).seconds <= 1.03 * bound
    assert simulate(works, machine, TurnPolicy.ROUND_ROBIN).seconds > 1.1 * bound


def test_resident_members_move_only_when_they_would_end_last() -> None:
    """Three equal members on two devices: without moving, the third waits for a whole one."""
    resident = [MemberWork(name, (SegmentWork(1.0, 3.0, 0, 0, 0.0),) * 2, 100, resident_bytes=10) for name in "abc"]
    machine = Machine(2, 10.0, 10.0, 1)
    outcome = simulate(resident, machine, TurnPolicy.READINESS)
    assert outcome.seconds <= 1.03 * ceiling_seconds(resident, machine)
    assert 1 <= outcome.num_switches <= 10
    assert simulate(resident, machine, TurnPolicy.SEQUENTIAL).num_switches == 0


def test_members_on_one_base_pay_its_upload_once() -> None:
    apart = [MemberWork(str(index), (SegmentWork(0.1, 0.2, 20, 0, 0.0),) * 8, 5) for index in range(4)]
    together = visited_together(apart)
    assert together.upload_bytes == apart[0].upload_bytes
    assert together.compute_seconds == pytest.approx(4 * apart[0].compute_seconds)
    ratio = (
        simulate(apart, ONE_DEVICE, TurnPolicy.SEQUENTIAL).seconds
        / simulate([together], ONE_DEVICE, TurnPolicy.READINESS).seconds
    )
    assert ratio == pytest.approx(4.0, rel=0.05)
    with pytest.raises(ValueError, match="equally many"):
        visited_together([apart[0], replace(apart[1], num_steps=6)])


def test_micro_batches_are_split_when_there_are_fewer_members_than_devices() -> None:
    machine = Machine(8, 1000.0, 1000.0, 1)
    works = [member("a", update=0.0), member("b", update=0.0)]
    parts = parted(works, machine, 16)
    assert [one.num_parts for one in parts] == [4, 4]
    assert [one.num_parts for one in parted(works, machine, 6)] == [3, 3]
    assert [one.num_parts for one in parted([*works] * 4, machine, 16)] == [1] * 8
    assert (
        simulate(parts, machine, TurnPolicy.READINESS).seconds
        < 0.3 * simulate(works, machine, TurnPolicy.READINESS).seconds
    )
    assert sum(one.num_steps * one.upload_bytes for one in parts) == 4 * sum(
        one.num_steps * one.upload_bytes for one in works
    )


def test_pilot_shards_are_as_large_as_fit() -> None:
    assert pilot_shards([3, 3, 3, 5, 1], 6) == [range(2), range(2, 3), range(3, 5)]
    with pytest.raises(ValueError, match="segment 1 needs 7 bytes and the budget is 6"):
        pilot_shards([3, 7], 6)
    shards = merged(member().segments, [range(3), range(3, 4)])
    assert [one.forward_seconds for one in shards] == [3.0, 1.0]
    assert [one.upload_bytes for one in shards] == [30, 10]


def candidate(index: int, chain: float, readiness: Readiness = Readiness.READY, **other: object) -> WaitingMember:
    values: dict[str, object] = {
        "compute_seconds": chain, "update_seconds": 1.0, "step_seconds": 1.0, "waits_seconds": 0.0, "is_free": True,
    }  # fmt: skip
    return WaitingMember(index=index, chain_seconds=chain, readiness=readiness, **{**values, **other})  # type: ignore[arg-type]


def test_who_is_updated_comes_before_who_waits_for_its_update() -> None:
    waits, begins = candidate(0, 9.0, Readiness.WAITS), candidate(1, 8.0, Readiness.BEGINS)
    ready = [candidate(2, 6.0), candidate(3, 7.0)]
    others = [candidate(4, 9.0, is_free=False)]
    assert choose(TurnPolicy.READINESS, [waits, begins, *ready, *others], None, 1) == 3
    assert choose(TurnPolicy.READINESS, [waits, begins, *others], None, 1) == 1
    assert choose(TurnPolicy.READINESS, [waits, *others], None, 1) is None
    assert choose(TurnPolicy.SHARD_LRTF, [waits, begins, *ready, *others], None, 1) == 1
    assert choose(TurnPolicy.ROUND_ROBIN, [waits, begins, *ready, *others], 2, 1) == 3
    assert choose(TurnPolicy.SEQUENTIAL, [waits, begins, *ready, *others], 2, 1) == 2
    assert choose(TurnPolicy.SEQUENTIAL, [waits, begins, *ready, *others], 4, 1) is None


def test_device_waits_for_the_longest_chain_unless_a_step_fits_the_wait() -> None:
    longest = candidate(0, 100.0, is_free=False, waits_seconds=2.0)
    short, long = candidate(1, 10.0, step_seconds=1.5), candidate(2, 20.0, step_seconds=2.5)
    assert choose(TurnPolicy.READINESS, [longest, short, long], 0, 2) == 1
    assert choose(TurnPolicy.READINESS, [longest, long], 0, 2) is None
    assert choose(TurnPolicy.READINESS, [longest, short, long], 2, 2) == 2, "another device has it"


def test_a_schedule_that_cannot_be_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="needs a device and a slot"):
        simulate([member()], replace(ONE_DEVICE, num_devices=0), TurnPolicy.READINESS)
    with pytest.raises(ValueError, match="member empty needs steps"):
        simulate([MemberWork("empty", (), 1)], ONE_DEVICE, TurnPolicy.READINESS)
    with pytest.raises(ValueError, match="takes members up whole"):
        simulate([replace(member(), num_parts=2)], Machine(2, 1.0, 1.0, 1), TurnPolicy.SHARD_LRTF)
