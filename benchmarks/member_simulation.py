"""Members in virtual time: simulates the schedule of member_schedule.py event by event.

The resources are compute of each device, both directions of each root port (shared by its devices), and the host's
update (shared by all). Each serves work in the order in which it becomes ready, except under Readiness: there the
update of the longest chain goes first, and the upload whose device will be the first to have nothing to compute. A
device uploads in the order in which it took work up, into `num_slots` slots, and takes up the next step (or segment) as
soon as the last upload has begun: so the policy is asked when a trainer would ask it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from member_schedule import (
    Machine,
    MemberWork,
    Readiness,
    SegmentVisit,
    TurnPolicy,
    WaitingMember,
    choose,
    waits_seconds,
)


@dataclass(frozen=True, slots=True)
class Span:
    """What a device computed, and when."""

    device: int
    member: int
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one simulation."""

    seconds: float
    """until all members are finished"""
    finished_seconds: tuple[float, ...]
    """by member"""
    busy_seconds: dict[str, float]
    """by resource: compute (all devices), h2d and d2h (all ports), update"""
    num_switches: int
    """how often a member's resident segments moved to another device"""
    spans: tuple[Span, ...]


def simulate(works: Sequence[MemberWork], machine: Machine, policy: TurnPolicy) -> Outcome:
    """Simulates all members to their end. Raises ValueError for a machine without devices or slots, and for a member
    without steps or segments or with a number of parts that `policy` or `machine` does not allow."""
    if machine.num_devices < 1 or machine.num_slots < 1:
        raise ValueError(f"a machine needs a device and a slot: {machine}")
    for work in works:
        if work.num_steps < 1 or not work.segments or not 1 <= work.num_parts <= machine.num_devices:
            raise ValueError(
                f"member {work.name} needs steps, segments, and at most as many parts as there are devices"
            )
        if work.num_parts > 1 and policy.takes_segments:
            raise ValueError(f"member {work.name} has {work.num_parts} parts: {policy} takes members up whole")
    return _Simulation(works, machine, policy).run()


STEPWISE = (TurnPolicy.READINESS, TurnPolicy.ROUND_ROBIN, TurnPolicy.SEQUENTIAL)
"""policies under which a device holds the activations of only one member at a time"""


def fastest(works: Sequence[MemberWork], machine: Machine) -> tuple[TurnPolicy, Outcome]:
    """Returns the policy of STEPWISE that ends first, and its outcome; of equals the first one."""
    outcomes = {policy: simulate(works, machine, policy) for policy in STEPWISE}
    policy = min(STEPWISE, key=lambda one: outcomes[one].seconds)
    return policy, outcomes[policy]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (seconds, self._number, then))

    def run(self) -> None:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class _Queue:
    """A resource that does one piece of work at a time: that of the highest worth, and of equal worth the oldest."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, float, Callable[[], None]]] = []
        self._number = 0
        self._is_busy = False
        self.busy_seconds = 0.0

    def put(self, seconds: float, then: Callable[[], None], worth: float = 0.0) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (-worth, self._number, seconds, then))
        self._serve()

    def _serve(self) -> None:
        if self._is_busy or not self._waiting:
            return
        _, _, seconds, then = heapq.heappop(self._waiting)
        self._is_busy = True
        self.busy_seconds += seconds
        self._clock.at(self._clock.now + seconds, partial(self._served, then))

    def _served(self, then: Callable[[], None]) -> None:
        self._is_busy = False
        self._serve()
        then()


@dataclass(slots=True, eq=False)
class _Task:
    """A visit that a device has taken up."""

    member: _Member
    visit: SegmentVisit
    step: int
    before: _Task | None
    """the visit before it in the same part"""
    moved_from: int | None = None
    is_uploaded: bool = False
    is_computed: bool = False


@dataclass(slots=True, eq=False)
class _Member:
    index: int
    work: MemberWork
    visits: tuple[SegmentVisit, ...]
    updated: list[int]
    """by segment: the number of steps that have updated it"""
    step: int = 0
    num_started: int = 0
    """number of parts of this step that were taken up"""
    num_down: int = 0
    """number of visits of this step whose gradients have arrived"""
    compute_seconds: float = 0.0
    """remaining compute seconds"""
    waits_seconds: float = 0.0
    """seconds per step for which it waits for its own update when it is alone"""
    device: int | None = None
    """where its resident segments are"""
    last: _Task | None = None
    """the visit that was taken up last, if devices take up segment by segment"""
    next_visit: int = 0
    finished_seconds: float = 0.0

    def is_elsewhere(self, device: _Device) -> bool:
        """Whether its resident segments must move to `device`. A member in parts has a copy on each device."""
        return self.work.num_parts == 1 and self.device not in (None, device.index)

    @property
    def chain_seconds(self) -> float:
        steps = self.work.num_steps - self.step
        return self.compute_seconds / self.work.num_parts + steps * self.waits_seconds

    def readiness(self) -> Readiness:
        if self.updated[0] < self.step:
            return Readiness.WAITS
        return Readiness.READY if self.updated[-1] >= self.step else Readiness.BEGINS


@dataclass(slots=True, eq=False)
class _Device:
    index: int
    port: int
    free_slots: int
    waiting: deque[_Task] = field(default_factory=deque)
    """tasks that wait for their upload, in order"""
    uploaded: deque[_Task] = field(default_factory=deque)
    """tasks that are uploaded or being uploaded, in the order of compute"""
    is_computing: bool = False
    last: int | None = None


class _Simulation:
    def __init__(self, works: Sequence[MemberWork], machine: Machine, policy: TurnPolicy) -> None:
        self._machine, self._policy, self._clock = machine, policy, _Clock()
        self._h2d = [_Queue(self._clock) for _ in range(machine.num_ports)]
        self._d2h = [_Queue(self._clock) for _ in range(machine.num_ports)]
        self._update = _Queue(self._clock)
        self._devices = [
            _Device(index, index // machine.devices_per_root_port, machine.num_slots)
            for index in range(machine.num_devices)
        ]
        self._members = [
            _Member(index, work, work.visits(), [0] * len(work.segments),
                    compute_seconds=work.num_steps * work.compute_seconds, waits_seconds=waits_seconds(work, machine))
            for index, work in enumerate(works)
        ]  # fmt: skip
        self._spans: list[Span] = []
        self._num_switches = 0

    def run(self) -> Outcome:
        self._go_on()
        self._clock.run()
        assert all(member.step == member.work.num_steps for member in self._members), "the schedule stands still"
        finished = tuple(member.finished_seconds for member in self._members)
        busy = {
            "compute": sum(span.end_seconds - span.begin_seconds for span in self._spans),
            "h2d": sum(queue.busy_seconds for queue in self._h2d),
            "d2h": sum(queue.busy_seconds for queue in self._d2h),
            "update": self._update.busy_seconds,
        }
        return Outcome(max(finished), finished, busy, self._num_switches, tuple(self._spans))

    def _go_on(self) -> None:
        """Lets every device do what it can after a change."""
        for device in self._devices:
            if not device.waiting and device.free_slots:
                self._take_up(device)
            self._upload(device)
            self._compute(device)

    # --- taking up ---

    def _take_up(self, device: _Device) -> None:
        chosen = choose(self._policy, self._candidates(device), device.last, self._machine.num_devices)
        if chosen is None:
            return
        member = self._members[chosen]
        device.last = chosen
        if self._policy.takes_segments:
            device.waiting.append(self._next_visit(member, device))
        else:
            device.waiting.extend(self._next_part(member, device))

    def _candidates(self, device: _Device) -> list[WaitingMember]:
        return [
            WaitingMember(
                member.index,
                member.compute_seconds,
                member.chain_seconds,
                (member.work.num_steps - member.step) * member.work.update_seconds,
                member.work.compute_seconds / member.work.num_parts,
                member.waits_seconds,
                self._is_free(member, device),
                member.readiness(),
                member.is_elsewhere(device),
                self._switch_seconds(member) if member.is_elsewhere(device) else 0.0,
            )
            for member in self._members
            if member.step < member.work.num_steps
        ]

    def _is_free(self, member: _Member, device: _Device) -> bool:
        if not self._policy.takes_segments:
            return member.num_started < member.work.num_parts
        if member.next_visit == len(member.visits):
            return False
        return member.last is None or member.last.is_computed or member.device == device.index

    def _switch_seconds(self, member: _Member) -> float:
        machine = self._machine
        return member.work.resident_bytes * (1 / machine.d2h_bytes_per_second + 1 / machine.h2d_bytes_per_second)

    def _next_part(self, member: _Member, device: _Device) -> list[_Task]:
        member.num_started += 1
        moved_from = self._moves(member, device)
        tasks = list[_Task]()
        for visit in member.visits:
            before = tasks[-1] if tasks else None
            tasks.append(_Task(member, visit, member.step, before, moved_from if before is None else None))
        return tasks

    def _next_visit(self, member: _Member, device: _Device) -> _Task:
        visit = member.visits[member.next_visit]
        member.next_visit += 1
        member.last = _Task(member, visit, member.step, member.last, self._moves(member, device))
        return member.last

    def _moves(self, member: _Member, device: _Device) -> int | None:
        """Assigns `member` to `device`. Returns the device from which its resident segments must move, or None."""
        moves, left, member.device = member.is_elsewhere(device), member.device, device.index
        if not moves or not member.work.resident_bytes:
            return None
        self._num_switches += 1
        return left

    # --- one visit's way ---

    def _upload(self, device: _Device) -> None:
        while device.waiting and device.free_slots:
            task = device.waiting[0]
            if task.member.updated[task.visit.segment] < task.step:
                return
            device.waiting.popleft()
            device.uploaded.append(task)
            device.free_slots -= 1
            nbytes, arrived = task.visit.upload_bytes, partial(self._arrived, task)
            if task.moved_from is not None:
                resident = task.member.work.resident_bytes
                bring = partial(self._into, device.port, resident + nbytes, arrived)
                old = self._devices[task.moved_from].port
                self._d2h[old].put(resident / self._machine.d2h_bytes_per_second, bring)
            elif nbytes:
                deadline = self._clock.now + sum(one.visit.compute_seconds for one in list(device.uploaded)[:-1])
                self._into(device.port, nbytes, arrived, deadline)
            else:
                task.is_uploaded = True
            if not device.waiting and device.free_slots:
                self._take_up(device)

    def _into(self, port: int, nbytes: int, then: Callable[[], None], deadline: float = 0.0) -> None:
        worth = -deadline if self._policy is TurnPolicy.READINESS else 0.0
        self._h2d[port].put(nbytes / self._machine.h2d_bytes_per_second, then, worth)

    def _worth(self, member: _Member) -> float:
        return member.chain_seconds if self._policy is TurnPolicy.READINESS else 0.0

    def _arrived(self, task: _Task) -> None:
        task.is_uploaded = True
        self._go_on()

    def _compute(self, device: _Device) -> None:
        if device.is_computing or not device.uploaded:
            return
        task = device.uploaded[0]
        if not task.is_uploaded or (task.before is not None and not task.before.is_computed):
            return
        device.is_computing = True
        end = self._clock.now + task.visit.compute_seconds
        self._spans.append(Span(device.index, task.member.index, self._clock.now, end))
        self._clock.at(end, partial(self._computed, device, task))

    def _computed(self, device: _Device, task: _Task) -> None:
        device.uploaded.popleft()
        device.is_computing, task.is_computed, task.before = False, True, None
        device.free_slots += 1
        task.member.compute_seconds -= task.visit.compute_seconds
        if task.visit.download_bytes:
            seconds = task.visit.download_bytes / self._machine.d2h_bytes_per_second
            self._d2h[device.port].put(seconds, partial(self._down, task.member))
            self._go_on()
        else:
            self._down(task.member)

    def _down(self, member: _Member) -> None:
        member.num_down += 1
        if member.num_down == member.work.num_parts * len(member.visits):
            self._end_step(member)
        self._go_on()

    def _end_step(self, member: _Member) -> None:
        """All gradients have arrived, so the norm is known: updates segment after segment."""
        member.step += 1
        member.num_started = member.num_down = member.next_visit = 0
        member.last = None
        worth = self._worth(member)
        for segment, one in enumerate(member.work.segments):
            if one.update_seconds:
                self._update.put(one.update_seconds, partial(self._updated, member, segment, member.step), worth)
            else:
                self._updated(member, segment, member.step, alone=False)

    def _updated(self, member: _Member, segment: int, step: int, *, alone: bool = True) -> None:
        member.updated[segment] = step
        member.finished_seconds = self._clock.now
        if alone:
            self._go_on()
