"""Schedules several models on the devices of one node: decides which model a device runs next. No job does this yet.

A member's step is a chain of visits. A visit computes one segment on a device in one direction; the segment's
parameters are uploaded before it unless they are resident. The norm needs all gradients, so only after the last visit
the host updates the segments one after the other, in forward order; a segment can be visited again once it is updated.
So a single member leaves the device idle during its update, while two or more members fill each other's waits
(model_spill; Hydra, arXiv 2110.08633).

The policies are pure functions of the present state: the simulator (benchmarks/member_simulation.py) calls `choose`
when a trainer would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from spillway.planning.hardware import NodeSpec

CRITICAL_SHARE = 0.02
"""A member comes first if its own chain takes the whole remaining time, less at most this share of it."""


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What one segment needs of each resource in one step, for all micro-batches together (weight-stationary)."""

    forward_seconds: float
    backward_seconds: float
    """Including recomputation."""
    upload_bytes: int
    """Bytes of its parameters, which are uploaded before each visit; 0 if they are resident."""
    download_bytes: int
    """Bytes of its gradients, or of its parameters if the device updates them."""
    update_seconds: float
    """Seconds of its update on all of the host's cores; 0 if the device updates it within backward."""


@dataclass(frozen=True, slots=True)
class SegmentVisit:
    """One segment on a device, in one direction."""

    segment: int
    upload_bytes: int
    compute_seconds: float
    download_bytes: int


@dataclass(frozen=True, slots=True)
class MemberWork:
    """One member: its segments in forward order, and how many steps it has."""

    name: str
    segments: tuple[SegmentWork, ...]
    num_steps: int
    resident_bytes: int = 0
    """Bytes that move if another device continues the member."""
    num_parts: int = 1
    """Number of devices that share each of its steps; each computes a part of the micro-batches."""

    def visits(self) -> tuple[SegmentVisit, ...]:
        """Returns the visits of one part of one step. Backward of the last segment directly follows its forward, so
        both are one visit with one upload."""
        last = len(self.segments) - 1
        forward = [
            SegmentVisit(index, one.upload_bytes, one.forward_seconds / self.num_parts, 0)
            for index, one in enumerate(self.segments[:last])
        ]
        turn = self.segments[last]
        both = (turn.forward_seconds + turn.backward_seconds) / self.num_parts
        backward = [
            SegmentVisit(
                index,
                self.segments[index].upload_bytes,
                self.segments[index].backward_seconds / self.num_parts,
                self.segments[index].download_bytes,
            )
            for index in reversed(range(last))
        ]  # fmt: skip
        return (*forward, SegmentVisit(last, turn.upload_bytes, both, turn.download_bytes), *backward)

    @property
    def compute_seconds(self) -> float:
        """Compute seconds of all parts of one step."""
        return sum(one.forward_seconds + one.backward_seconds for one in self.segments)

    @property
    def update_seconds(self) -> float:
        return sum(one.update_seconds for one in self.segments)

    @property
    def upload_bytes(self) -> int:
        """Bytes that all parts of one step upload."""
        return self.num_parts * sum(visit.upload_bytes for visit in self.visits())

    @property
    def download_bytes(self) -> int:
        return self.num_parts * sum(visit.download_bytes for visit in self.visits())


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of one node and what they share."""

    num_devices: int
    h2d_bytes_per_second: float
    """Rate of one root port."""
    d2h_bytes_per_second: float
    devices_per_root_port: int
    num_slots: int = 2
    """Number of visits whose parameters can be on the device at the same time, including those being uploaded."""

    @property
    def num_ports(self) -> int:
        return -(-self.num_devices // self.devices_per_root_port)


def machine_of(node: NodeSpec) -> Machine:
    link = node.link
    return Machine(node.num_devices, link.h2d_bytes_per_second, link.d2h_bytes_per_second, link.devices_per_root_port)


class TurnPolicy(StrEnum):
    """How devices choose members."""

    SEQUENTIAL = "Sequential"
    """One member after the other, each to its end."""
    ROUND_ROBIN = "RoundRobin"
    """After each step the next member in the list."""
    SHARD_LRTF = "ShardLrtf"
    """After each segment the member with the longest remaining time (Hydra's Sharded-LRTF)."""
    READINESS = "Readiness"
    """After each step the member with the longest remaining time among those whose update is done; if there is none, a
    member whose update has begun."""

    @property
    def takes_segments(self) -> bool:
        return self is TurnPolicy.SHARD_LRTF


class Readiness(IntEnum):
    """The state of the update of a member's last step."""

    WAITS = 0
    """Not even its first segment is updated."""
    BEGINS = 1
    """Its first segment is updated: visits can begin and follow the update from segment to segment."""
    READY = 2


@dataclass(frozen=True, slots=True)
class WaitingMember:
    """A member that is not finished, as one device sees it."""

    index: int
    """Index of the member in the list of all members."""
    compute_seconds: float
    """Remaining compute seconds of all parts."""
    chain_seconds: float
    """Remaining seconds if it had the node to itself, including waits for its own updates."""
    update_seconds: float
    """Remaining update seconds of the host."""
    step_seconds: float
    """Compute seconds of one part of a step."""
    waits_seconds: float
    """Seconds per step for which it waits for its own update if it has the node to itself."""
    is_free: bool
    """Whether this device could take up a part of its step, or its next segment: no device has it yet."""
    readiness: Readiness
    is_elsewhere: bool = False
    """Whether another device ran it last."""
    switch_seconds: float = 0.0
    """Seconds to bring its resident segments to this device; 0 if they are here."""


def choose(policy: TurnPolicy, candidates: Sequence[WaitingMember], last: int | None, num_devices: int) -> int | None:
    """Returns the index of the member that a device takes up next; None if it waits until something changes.

    `candidates` are all members that are not finished, `last` is the member that the device took up last. In a tie the
    member that comes first in the list wins.
    """
    free = [one for one in candidates if one.is_free]
    if policy is TurnPolicy.SEQUENTIAL:
        mine = [one for one in candidates if one.index == last] or [one for one in free if not one.is_elsewhere]
        return next((one.index for one in mine if one.is_free), None)
    if policy is TurnPolicy.ROUND_ROBIN:
        return min(free, key=lambda one: (last is not None and one.index <= last, one.index)).index if free else None
    if policy is TurnPolicy.SHARD_LRTF:
        begun = [one for one in free if one.readiness is not Readiness.WAITS]
        return max(begun, key=lambda one: (one.compute_seconds, -one.index)).index if begun else None
    return _choose_ready(candidates, last, num_devices)


def _choose_ready(candidates: Sequence[WaitingMember], last: int | None, num_devices: int) -> int | None:
    left = left_seconds(candidates, num_devices)
    eligible = [one for one in candidates if is_eligible(one, last, left)]
    first = max(eligible, key=lambda one: (rank(one, left), -one.index), default=None)
    if first is not None and not first.is_free:
        # It runs here, and its update comes next: a member whose step is short enough fits into that wait.
        short = [one for one in eligible if one.is_free and one.step_seconds <= first.waits_seconds]
        first = max(short, key=lambda one: (rank(one, left), -one.index), default=None)
    return first.index if first is not None and first.readiness is not Readiness.WAITS else None


def is_eligible(candidate: WaitingMember, last: int | None, left: float) -> bool:
    """Whether a member can start now or is worth waiting for. Only the member that the device has now is worth waiting
    for: if it would end last of all, or if the host has nothing to update for it, so that it continues at once."""
    if candidate.is_free and candidate.readiness is not Readiness.WAITS:
        return True
    return candidate.index == last and (candidate.update_seconds == 0.0 or is_critical(candidate, left))


def is_critical(candidate: WaitingMember, left: float) -> bool:
    return candidate.chain_seconds + CRITICAL_SHARE * left + candidate.switch_seconds >= left


def left_seconds(candidates: Sequence[WaitingMember], num_devices: int) -> float:
    """A lower bound of the seconds until all are finished: of the devices together, the host, and the longest chain."""
    return max(
        sum(one.compute_seconds for one in candidates) / num_devices,
        sum(one.update_seconds for one in candidates),
        *(one.chain_seconds for one in candidates),
    )


def rank(candidate: WaitingMember, left: float) -> tuple[bool, Readiness, bool, float]:
    """The sort key of a member. First come members that would end last of all if they waited; then those that need not
    wait for their update; then those on this device; then those with the most remaining seconds."""
    stays = candidate.switch_seconds == 0.0
    return is_critical(candidate, left), candidate.readiness, stays, candidate.chain_seconds


# --- what no schedule can beat ----------------------------------------------------------------------------------------


def bound_seconds(works: Sequence[MemberWork], machine: Machine) -> float:
    """A lower bound of the seconds until all members are finished: the most that one resource or one member needs."""
    uploads = sum(work.num_steps * work.upload_bytes for work in works)
    downloads = sum(work.num_steps * work.download_bytes for work in works)
    return max(
        ceiling_seconds(works, machine),
        uploads / (machine.num_ports * machine.h2d_bytes_per_second),
        downloads / (machine.num_ports * machine.d2h_bytes_per_second),
        sum(work.num_steps * work.update_seconds for work in works),
        *(alone_seconds(work, machine) for work in works),
    )


def ceiling_seconds(works: Sequence[MemberWork], machine: Machine) -> float:
    """The lower bound if transfers and updates took no time: compute over all devices, or the longest member."""
    total = sum(work.num_steps * work.compute_seconds for work in works)
    longest = max(work.num_steps * work.compute_seconds / work.num_parts for work in works)
    return max(total / machine.num_devices, longest)


def alone_seconds(work: MemberWork, machine: Machine) -> float:
    """Seconds of a member that has the node to itself: its first upload, and visits, waits and updates of its steps."""
    compute = work.num_steps * work.compute_seconds / work.num_parts
    first_upload = work.segments[0].upload_bytes / machine.h2d_bytes_per_second
    return first_upload + compute + (work.num_steps - 1) * waits_seconds(work, machine) + work.update_seconds


def waits_seconds(work: MemberWork, machine: Machine) -> float:
    """Seconds per step that a member alone on the node waits for its update, beyond its own compute."""
    updated, done = list[float](), 0.0
    for one in work.segments:
        done += one.update_seconds
        updated.append(done)
    return _chain_seconds(work, machine, updated) - work.compute_seconds / work.num_parts


def _chain_seconds(work: MemberWork, machine: Machine, updated: Sequence[float]) -> float:
    """Seconds from the norm of one step to that of the next. `updated` says when each segment is updated, in seconds
    after the first norm."""
    clock = 0.0
    for visit in work.visits():
        clock = max(clock, updated[visit.segment] + visit.upload_bytes / machine.h2d_bytes_per_second)
        clock += visit.compute_seconds
    return clock


# --- members made from members ----------------------------------------------------------------------------------------


def visited_together(works: Sequence[MemberWork]) -> MemberWork:
    """Joins members on one frozen base into one member. They visit each segment together, so the base is uploaded once
    for all of them. Raises ValueError unless they have equally many segments and steps.
    """
    if len({(len(work.segments), work.num_steps) for work in works}) != 1:
        raise ValueError("members that share a base visit its segments together: equally many segments and steps")
    segments = tuple(
        SegmentWork(
            forward_seconds=sum(one.forward_seconds for one in alike),
            backward_seconds=sum(one.backward_seconds for one in alike),
            upload_bytes=max(one.upload_bytes for one in alike),
            download_bytes=sum(one.download_bytes for one in alike),
            update_seconds=sum(one.update_seconds for one in alike),
        )
        for alike in zip(*(work.segments for work in works), strict=True)
    )
    name, resident = "+".join(work.name for work in works), max(work.resident_bytes for work in works)
    return MemberWork(name, segments, works[0].num_steps, resident)


def parted(works: Sequence[MemberWork], machine: Machine, num_micro_batches: int) -> list[MemberWork]:
    """Divides the micro-batches of each member among several devices if there are fewer members than devices.

    Only numbers of parts that divide the number of micro-batches are used, so that parts are equal.
    """
    most = max(1, machine.num_devices // len(works))
    num_parts = max(number for number in range(1, most + 1) if num_micro_batches % number == 0)
    return [replace(work, num_parts=num_parts) for work in works]


def pilot_shards(segment_bytes: Sequence[int], budget_bytes: int) -> list[range]:
    """Returns the shards that Hydra's partitioner finds by pilot runs: each has as many consecutive segments as fit the
    budget. Raises ValueError if one segment alone does not fit.
    """
    shards, start, used = list[range](), 0, 0
    for index, nbytes in enumerate(segment_bytes):
        if nbytes > budget_bytes:
            raise ValueError(f"segment {index} needs {nbytes} bytes and the budget is {budget_bytes}")
        if used + nbytes > budget_bytes:
            shards.append(range(start, index))
            start, used = index, 0
        used += nbytes
    return [*shards, range(start, len(segment_bytes))]


def merged(segments: Sequence[SegmentWork], shards: Iterable[range]) -> tuple[SegmentWork, ...]:
    """Joins the segments of each shard, which is visited as one segment."""
    return tuple(
        SegmentWork(
            forward_seconds=sum(segments[index].forward_seconds for index in shard),
            backward_seconds=sum(segments[index].backward_seconds for index in shard),
            upload_bytes=sum(segments[index].upload_bytes for index in shard),
            download_bytes=sum(segments[index].download_bytes for index in shard),
            update_seconds=sum(segments[index].update_seconds for index in shard),
        )
        for shard in shards
    )
