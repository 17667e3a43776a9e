"""Chooses a policy for each saved storage: keep, recompute, host or NVMe. Pure: from a profile and limits it computes
answers and what they should cost.

    what a forward saves + limits -> answers at a price -> played through the step -> the fastest within every limit

The price is what a byte of the scarce link is worth, in seconds. At a given price, storages that can be rebuilt for
less are rebuilt. Of the others, those that wait longest between forward and backward leave the device, because they
have the most time for their copies; so what stays is the end of the forward. One number is searched for: as it rises,
loads fall and recomputation rises. With few storages these change in large jumps, so at the end single answers are
changed and exchanged as long as that helps.

A play simulates forward and backward storage by storage. Each lane is a queue, first in, first out. Forward waits for
the oldest copy if the window or the device is full; reloads run ahead of backward by at most `ahead_bytes`; a storage
that is needed before its copy out has begun is used where it is. The device's peak is that of the play, not a sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import NamedTuple

from spillway.plan import Policy, Tier
from spillway.units import counted, format_bytes, format_seconds

KEEP, RECOMPUTE, HOST, NVME = Policy.KEEP, Policy.RECOMPUTE, Policy.HOST, Policy.NVME

TIE = 1.005
"""Among choices that are nearly as fast, the one that writes least to NVMe is taken."""
PRICES_AT_ONCE = 5
"""Prices per round of the search; the next round lies between the neighbours of the best one."""
MAX_STORAGES = 128
"""If there are more storages, neighbours are bundled and have one policy per bundle; bundles are small then, and the
choice stays quick."""
MAX_POLISHED = 32
"""The last stage runs only with up to this many storages, of which single ones are large enough to matter there."""
POLISH_STORAGES = 30_000
"""The most storages in all simulations of the last stage together: about 40 ms."""


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that a forward saves; times are those of a step in which nothing waits."""

    nbytes: int
    produced_seconds: float
    needed_seconds: float
    """When backward first needs it."""
    rebuild_seconds: float | None = None
    """Seconds to rebuild it in backward from what is kept; None: impossible."""


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What the storages of one forward may use. A rate of 0: there is no such link."""

    device_bytes: int
    """The most bytes on the device at any moment: saved storages, including those being copied out and those
    reloaded."""
    kept_bytes: float = math.inf
    """The most of these bytes that may stay from forward to backward."""
    host_bytes: int = 0
    nvme_bytes: int = 0
    written_bytes: float = math.inf
    """The most bytes that one forward may write to NVMe, as endurance allows."""
    window_bytes: int = 256 << 20
    """The most bytes being copied out, and the most in staging on their way to NVMe; at this limit forward waits."""
    ahead_bytes: int = 512 << 20
    """The most bytes being reloaded before backward needs them."""
    d2h: float = 0.0
    """Bytes per second, like the three below."""
    h2d: float = 0.0
    nvme_write: float = 0.0
    nvme_read: float = 0.0
    is_staged: bool = True
    """Whether storages reach NVMe through host memory; False: directly from the device's memory, which is host
    memory."""

    @property
    def spillable_bytes(self) -> float:
        """Bytes that NVMe may take."""
        if not (self.nvme_write and self.nvme_read and (not self.is_staged or (self.d2h and self.h2d))):
            return 0
        return min(self.nvme_bytes, self.written_bytes)

    @property
    def offloadable_bytes(self) -> int:
        """Bytes that host memory may take."""
        return self.host_bytes if self.d2h and self.h2d else 0


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer for each storage, in the order given."""

    answers: tuple[Policy, ...]
    stall_seconds: float
    """Seconds that compute waits for copies."""
    recompute_seconds: float
    step_seconds: float
    """Seconds of forward and backward, including stalls and recomputation."""
    peak_bytes: int
    """Peak bytes of saved storages on the device."""
    tier_bytes: dict[Tier, int]
    """Bytes moved to host and nvme."""
    price: float
    """In seconds per byte: storages that can be rebuilt for less are rebuilt; 0: none is."""
    reason: str


@dataclass(frozen=True, slots=True)
class NoChoice:
    """The answer when nothing fits: a value, not an exception."""

    missing_bytes: int
    reason: str


def choose(storages: Sequence[SavedStorage], limits: PolicyLimits) -> Choice | NoChoice:
    """The fastest answers for `storages`, in the order in which forward saves them. Raises ValueError for impossible
    figures (negative, NaN, needed before produced)."""
    check(storages, limits)
    largest = max((storage.nbytes for storage in storages), default=0)
    if largest > limits.device_bytes:
        index = next(index for index, storage in enumerate(storages) if storage.nbytes == largest)
        return NoChoice(
            largest - limits.device_bytes,
            f"a tensor of {format_bytes(largest)} saved for backward (number {index}) does not fit: the device has "
            f"only {format_bytes(limits.device_bytes)} for such tensors",
        )
    course = StepSimulation(storages, limits)
    if len(storages) > MAX_STORAGES:
        bundles = bundled(storages)
        found = searched(StepSimulation([bundle for bundle, _ in bundles], limits))
        if found is not None:
            of_each = {
                index: answer for answer, (_, members) in zip(found.answers, bundles, strict=True) for index in members
            }
            played = course.play([of_each[index] for index in range(len(storages))], found.price)
            if played is not None:
                return _told(course, played)
    found = searched(course)
    return _rejection(course) if found is None else _told(course, found)


def searched(course: StepSimulation) -> Played | None:
    """Runs the stages of the search; None if nothing fits."""
    search = PolicySearch(course)
    search.by_price()
    search.all_out()
    search.polish()
    return search.spared()


class Bundle:
    """Neighbouring storages of one kind, treated as one storage: produced with the last of them, needed with the
    first."""

    __slots__ = ("members", "nbytes", "needed_seconds", "produced_seconds", "rebuild_seconds")

    def __init__(self, index: int, storage: SavedStorage) -> None:
        self.members = [index]
        self.nbytes, self.rebuild_seconds = storage.nbytes, storage.rebuild_seconds
        self.produced_seconds, self.needed_seconds = storage.produced_seconds, storage.needed_seconds

    def add(self, index: int, storage: SavedStorage) -> None:
        """Adds a storage that is produced after the members, and can be rebuilt if they can."""
        self.members.append(index)
        self.nbytes += storage.nbytes
        self.produced_seconds = storage.produced_seconds
        self.needed_seconds = max(self.produced_seconds, min(self.needed_seconds, storage.needed_seconds))
        if self.rebuild_seconds is not None:
            self.rebuild_seconds += storage.rebuild_seconds or 0.0

    def storage(self) -> SavedStorage:
        return SavedStorage(self.nbytes, self.produced_seconds, self.needed_seconds, self.rebuild_seconds)


def bundled(storages: Sequence[SavedStorage]) -> list[tuple[SavedStorage, list[int]]]:
    """Bundles of neighbouring storages of one kind, as storages, each with the indices of its members."""
    size = -(-sum(storage.nbytes for storage in storages) // MAX_STORAGES)
    found: list[Bundle] = []
    last: dict[bool, Bundle] = {}
    for index, storage in enumerate(storages):
        kind = storage.rebuild_seconds is not None
        bundle = last.get(kind)
        if bundle is not None and bundle.nbytes + storage.nbytes <= size:
            bundle.add(index, storage)
        else:
            last[kind] = bundle = Bundle(index, storage)
            found.append(bundle)
    found.sort(key=lambda bundle: bundle.produced_seconds)
    return [(bundle.storage(), bundle.members) for bundle in found]


UNBOUNDED = ("kept_bytes", "written_bytes")


def check(storages: Sequence[SavedStorage], limits: PolicyLimits) -> None:
    for index, storage in enumerate(storages):
        produced, needed, rebuild = storage.produced_seconds, storage.needed_seconds, storage.rebuild_seconds or 0.0
        # Written in this way, the condition is also false for NaN.
        if not (
            storage.nbytes >= 0
            and 0.0 <= produced < math.inf
            and 0.0 <= needed < math.inf
            and 0.0 <= rebuild < math.inf
        ):
            raise ValueError(f"saved storage {index}: bytes and seconds must be finite and at least 0; found {storage}")
        if storage.needed_seconds < storage.produced_seconds:
            raise ValueError(f"saved storage {index}: needed_seconds is less than produced_seconds; found {storage}")
        if index and storage.produced_seconds < storages[index - 1].produced_seconds:
            raise ValueError(
                f"saved storage {index}: produced before storage {index - 1}; sort storages by produced_seconds; found "
                f"{storage}"
            )
    for field in fields(PolicyLimits):
        value = getattr(limits, field.name)
        if math.isnan(value) or value < 0 or (math.isinf(value) and field.name not in UNBOUNDED):
            raise ValueError(f"limits: {field.name} = {value}: must be finite and at least 0")


# --- one play through a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a play. `rank` orders results by preference, apart from the tolerance of `PolicySearch.spared`."""

    answers: tuple[Policy, ...]
    stall_seconds: float
    recompute_seconds: float
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    price: float

    @property
    def extra_seconds(self) -> float:
        return self.stall_seconds + self.recompute_seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        return (self.extra_seconds, self.nvme_bytes, self.host_bytes)


class Sent(NamedTuple):
    """The state after a play's forward, with which its backward begins."""

    copies: deque[tuple[float, int, int]]
    """(end, bytes, storage) of each copy out; the storage is on the device until its end."""
    leaving_bytes: int
    """Bytes of the storages in `copies`."""
    kept_bytes: int
    stall_seconds: float
    begins: list[float]
    """When the copy of a storage begins; it is on the device until the copy ends."""
    stored: list[float]
    peak_bytes: int


class StepSimulation:
    """The storages of one forward and their limits, ready to be played."""

    def __init__(self, storages: Sequence[SavedStorage], limits: PolicyLimits) -> None:
        self.storages, self.limits = storages, limits
        self.sizes = [storage.nbytes for storage in storages]
        self.produced = [storage.produced_seconds for storage in storages]
        self.needed = [storage.needed_seconds for storage in storages]
        self.rebuild = [storage.rebuild_seconds for storage in storages]
        self.need_order = sorted(range(len(storages)), key=lambda index: (self.needed[index], -index))
        self.turn = max(self.produced, default=0.0)
        self.seconds = max(self.needed, default=0.0)
        self.num_played = 0
        """Storages simulated so far."""

    def play(self, answers: Sequence[Policy], price: float = 0.0, bound_seconds: float = math.inf) -> Played | None:
        """The result of `answers`; None if they break a limit, or cost more than `bound_seconds`.

        A search plays hundreds of answers, so each pass is one loop over numbers in local variables.
        tests/harness/plain_play.py does the same with objects and calls, and gets the same numbers.
        """
        limits = self.limits
        held_bytes = dict.fromkeys((KEEP, RECOMPUTE, HOST, NVME), 0)
        for size, answer in zip(self.sizes, answers, strict=True):
            held_bytes[answer] += size
        if (
            held_bytes[HOST] > limits.offloadable_bytes
            or held_bytes[NVME] > limits.spillable_bytes
            or held_bytes[KEEP] > limits.kept_bytes
        ):
            return None
        self.num_played += len(self.sizes)
        recompute = sum(self.rebuild[index] or 0.0 for index, answer in enumerate(answers) if answer is RECOMPUTE)
        sent = self._forward(answers, recompute, bound_seconds) if recompute <= bound_seconds else None
        if sent is None:
            return None
        back = self._backward(answers, sent, recompute, bound_seconds)
        if back is None:
            return None
        stall, peak_bytes = back
        return Played(tuple(answers), stall, recompute, peak_bytes, held_bytes[HOST], held_bytes[NVME], price)

    def _forward(self, answers: Sequence[Policy], recompute: float, bound_seconds: float) -> Sent | None:  # noqa: PLR0912, PLR0915 - one loop, see `play`
        """Plays the forward; None if it exceeds the device or the bound."""
        limits = self.limits
        room, window, is_staged = limits.device_bytes, limits.window_bytes, limits.is_staged
        d2h, nvme_write = limits.d2h, limits.nvme_write
        copies: deque[tuple[float, int, int]] = deque()
        writes: deque[tuple[float, int]] = deque()
        begins, stored = [0.0] * len(answers), [0.0] * len(answers)
        copied_at = written_at = stall = 0.0
        """When the lanes of copies and writes are free, and the seconds that compute has waited."""
        leaving = staging = kept = peak = 0
        for index, (made, size, answer) in enumerate(zip(self.produced, self.sizes, answers, strict=True)):
            now, limit = made + stall, room - kept - size
            while copies and (copies[0][0] <= now or leaving > limit):
                end, left, _ = copies.popleft()
                leaving -= left
                if end > now:
                    stall += end - now
                    now = end
            if kept + leaving + size > peak:
                peak = kept + leaving + size
                if peak > room:
                    return None
            if answer is KEEP:
                kept += size
                continue
            if answer is RECOMPUTE:
                continue
            if answer is HOST or is_staged:
                begins[index] = max(now, copied_at)
                end = arrived = copied_at = begins[index] + size / d2h
                if answer is NVME:
                    arrived = written_at = max(end, written_at) + size / nvme_write
                    writes.append((arrived, size))
                    staging += size
            else:
                begins[index] = max(now, written_at)
                end = arrived = written_at = begins[index] + size / nvme_write
            stored[index] = arrived
            copies.append((end, size, index))
            leaving += size
            while copies and (copies[0][0] <= now or leaving > window):
                end, left, _ = copies.popleft()
                leaving -= left
                if end > now:
                    stall += end - now
                    now = end
            while writes and (writes[0][0] <= now or staging > window):
                end, left = writes.popleft()
                staging -= left
                if end > now:
                    stall += end - now
                    now = end
            if stall + recompute > bound_seconds:
                return None
        return Sent(copies, leaving, kept, stall, begins, stored, peak)

    def _backward(  # noqa: PLR0912, PLR0915 - one loop, see `play`
        self, answers: Sequence[Policy], sent: Sent, recompute: float, bound_seconds: float
    ) -> tuple[float, int] | None:
        """Seconds that compute waited in both passes, and the device's peak; None if they exceed the bound or the
        device."""
        limits, sizes, needed, rebuild = self.limits, self.sizes, self.needed, self.rebuild
        device, ahead_bytes, is_staged = limits.device_bytes, limits.ahead_bytes, limits.is_staged
        copies, leaving, kept, stall, begins, stored, peak = sent
        room = device - max((size for size, way in zip(sizes, answers, strict=True) if way is RECOMPUTE), default=0)
        moved = [index for index in self.need_order if answers[index] is HOST or answers[index] is NVME]
        arrives: dict[int, float] = {}
        forwarded: set[int] = set()
        now, next_one, num_moved = self.turn + stall, 0, len(moved)
        read_at = loaded_at = rebuilt_seconds = 0.0
        ahead = 0

        def load(index: int, size: int, now: float) -> None:
            nonlocal leaving, ahead, peak, read_at, loaded_at
            if begins[index] >= now:  # not copied after all: backward was faster
                forwarded.add(index)
                leaving -= size
                arrives[index] = now
            else:
                ready = max(now, stored[index])
                spilled = answers[index] is NVME
                if spilled:
                    ready = read_at = max(ready, read_at) + size / limits.nvme_read
                if not spilled or is_staged:
                    ready = loaded_at = max(ready, loaded_at) + size / limits.h2d
                arrives[index] = ready
            ahead += size
            peak = max(peak, kept + leaving + ahead)

        for index in self.need_order:
            size, answer = sizes[index], answers[index]
            while next_one < num_moved:
                one = moved[next_one]
                nbytes = sizes[one]
                fits = not ahead or ahead + nbytes <= ahead_bytes
                if fits:
                    while copies and copies[0][0] <= now:
                        _, left, gone = copies.popleft()
                        if gone not in forwarded:
                            leaving -= left
                    fits = kept + leaving + ahead + nbytes <= room
                if not fits:
                    break
                next_one += 1
                load(one, nbytes, now)
            now = max(now, needed[index] + stall + rebuilt_seconds)
            if answer is KEEP:
                kept -= size
                continue
            if answer is RECOMPUTE or index not in arrives:
                others = kept + ahead + size
                limit, at = device - others, now
                while copies and (copies[0][0] <= at or leaving > limit):
                    end, left, gone = copies.popleft()
                    if gone not in forwarded:
                        leaving -= left
                        if end > at:
                            stall += end - at
                            at = end
                peak = max(peak, others + leaving)
            if answer is RECOMPUTE:
                seconds = rebuild[index] or 0.0
                rebuilt_seconds += seconds
                now += seconds
                continue
            if index not in arrives:
                now = at
                next_one += 1
                load(index, size, now)
            if arrives[index] > now:
                stall += arrives[index] - now
                now = arrives[index]
            if stall + recompute > bound_seconds:
                return None
            ahead -= size
        return None if peak > device or stall + recompute > bound_seconds else (stall, peak)


# --- the search -------------------------------------------------------------------------------------------------------


class PolicySearch:
    """Plays answers and remembers the best."""

    def __init__(self, course: StepSimulation) -> None:
        self._course = course
        self._found: list[Played] = []
        self._tried: set[tuple[Policy, ...]] = set()
        self.best: Played | None = None
        storages = course.storages
        slack = [storage.needed_seconds - storage.produced_seconds for storage in storages]
        self._by_slack = sorted(range(len(storages)), key=lambda index: (-slack[index], index))
        """Storages, those with the most time between forward and backward first."""
        ratios = {
            index: storage.rebuild_seconds / max(1, storage.nbytes)
            for index, storage in enumerate(storages)
            if storage.rebuild_seconds is not None
        }
        self._rebuildable = sorted(ratios, key=lambda index: ratios[index])
        self._prices = [ratios[index] for index in self._rebuildable]
        self._largest = max(course.sizes, default=0)

    def spared(self) -> Played | None:
        """Of all results that are nearly as fast as the best, the one that writes least to NVMe."""
        if self.best is None:
            return None
        limit = self._near_seconds()
        near = (played for played in self._found if played.extra_seconds <= limit)
        return min(near, key=lambda played: (played.nvme_bytes, played.extra_seconds, played.host_bytes))

    def _near_seconds(self) -> float:
        """The most seconds, beyond a step in which nothing waits, of a result that may still be taken."""
        if self.best is None:
            return math.inf
        return TIE * (self._course.seconds + self.best.extra_seconds) - self._course.seconds

    def _try(self, answers: Sequence[Policy], price: float, least_seconds: float = 0.0) -> Played | None:
        """Plays `answers`, unless they were tried before. With more than MAX_POLISHED storages no later stage starts
        from the result, so a play ends as soon as it costs more than both `least_seconds` and what may still be
        taken."""
        key = tuple(answers)
        if key in self._tried:
            return None
        self._tried.add(key)
        bound = math.inf if len(key) <= MAX_POLISHED else max(least_seconds, self._near_seconds())
        played = self._course.play(key, price, bound)
        if played is not None:
            self._found.append(played)
            if self.best is None or played.rank < self.best.rank:
                self.best = played
        return played

    def by_price(self) -> None:
        """Searches for the number of storages that are rebuilt, cheapest first, which is a search for the price."""
        low, high = 0, len(self._rebuildable)
        least = self._at(low)
        if least == 0.0:
            return  # nothing waits and nothing is rebuilt
        while high > low:
            steps = min(PRICES_AT_ONCE, high - low)
            counts = sorted({low + (high - low) * step // steps for step in range(steps + 1)})
            found: dict[int, float] = {}
            for count in counts:
                found[count] = self._at(count, min(found.values(), default=math.inf))
            best = min(found, key=lambda count: (found[count], count))
            position = counts.index(best)
            before, after = counts[max(0, position - 1)], counts[min(len(counts) - 1, position + 1)]
            if after - before <= 2 or (before, after) == (low, high):
                return
            low, high = before, after

    def _at(self, num_rebuilt: int, least_of_round: float = math.inf) -> float:
        """The least seconds beyond a step in which nothing waits, at the price at which `num_rebuilt` storages are
        rebuilt. May be infinite if other prices of the round are known to have less."""
        price = self._prices[num_rebuilt - 1] if num_rebuilt else 0.0
        least = math.inf
        for answers in self._family(num_rebuilt):
            played = self._try(answers, price, min(least, least_of_round))
            if played is not None:
                least = min(least, played.extra_seconds)
                if least == 0.0:
                    break
        return least

    def _family(self, num_rebuilt: int) -> Iterator[list[Policy]]:
        """Answers at one price, with different parts of the device left for storages that are being copied, and with
        different storages on NVMe."""
        limits, course = self._course.limits, self._course
        rebuilt = self._rebuildable[:num_rebuilt]
        total = sum(course.sizes)
        ahead = (0, self._largest, limits.window_bytes, limits.ahead_bytes, limits.device_bytes // 2, total)
        rooms = {int(min(max(limits.device_bytes - left, 0), total, limits.kept_bytes)) for left in ahead}
        orders = [self._by_slack[::-1]]
        if len(course.sizes) <= MAX_POLISHED:  # large ones first: they fit nowhere else, and leave small ones the link
            orders.append(sorted(orders[0], key=lambda index: -course.sizes[index]))
        for room in sorted(rooms, reverse=True):
            for order in orders:
                answers, moved = self._stay(rebuilt, room, order)
                yield from self._between_host_and_nvme(answers, moved)

    def _stay(self, rebuilt: Sequence[int], room: int, order: Sequence[int]) -> tuple[list[Policy], list[int]]:
        """Answers with which `room` bytes stay: storages in `order`, then those that are most expensive to rebuild.
        Also the storages that move, those with the most slack first."""
        sizes, answers = self._course.sizes, [NVME] * len(self._course.sizes)
        for index in rebuilt:
            answers[index] = RECOMPUTE
        others = [index for index in order if answers[index] is NVME]
        for index in (*others, *reversed(rebuilt)):
            if sizes[index] <= room:
                answers[index] = KEEP
                room -= sizes[index]
        return answers, [index for index in self._by_slack if answers[index] is NVME]

    def _between_host_and_nvme(self, answers: list[Policy], moved: Sequence[int]) -> Iterator[list[Policy]]:
        """Variants of `answers` with some of `moved` in host memory: it is filled with those that have least slack, or
        in turn with NVMe, so that both lanes work all the time; or it takes only what NVMe cannot."""
        sizes, limits = self._course.sizes, self._course.limits
        host_bytes = limits.offloadable_bytes
        total = sum(sizes[index] for index in moved)
        yield with_host(answers, fitting(reversed(moved), sizes, host_bytes))
        if not host_bytes or total <= host_bytes:
            return
        yield with_host(answers, in_turn(moved, sizes, host_bytes))
        spilled = set(fitting(moved, sizes, limits.spillable_bytes))
        yield with_host(answers, [index for index in moved if index not in spilled])

    def all_out(self) -> None:
        """Tries answers with which everything that can leave the device does, for storages that fit in no other way."""
        sizes, limits = self._course.sizes, self._course.limits
        answers = [KEEP] * len(sizes)
        for index in self._rebuildable:
            answers[index] = RECOMPUTE
        others = [index for index in self._by_slack if answers[index] is KEEP]
        for order in (others, sorted(others, key=lambda index: -sizes[index])):
            spilled = set(fitting(order, sizes, limits.spillable_bytes))
            left = [index for index in order if index not in spilled]
            some = [NVME if index in spilled else answer for index, answer in enumerate(answers)]
            offloaded = fitting(left, sizes, limits.offloadable_bytes)
            self._try(with_host(some, offloaded), max(self._prices, default=0.0))

    def polish(self) -> None:
        """Changes one answer or two as long as that helps, starting from every result, the best first, because results
        differ."""
        course = self._course
        limit = course.num_played + POLISH_STORAGES
        if self.best is None or self.best.extra_seconds == 0.0 or len(course.sizes) > MAX_POLISHED:
            return
        for start in sorted(self._found, key=lambda played: played.rank):
            better: Played | None = start
            while better is not None:
                at, better = better, None
                for answers in neighbours(at.answers, course):
                    if course.num_played + len(answers) > limit:
                        return
                    played = self._try(answers, at.price)
                    if played is not None and played.rank < at.rank:
                        better = played
                        break


def with_host(answers: Sequence[Policy], indices: Sequence[int]) -> list[Policy]:
    found = list(answers)
    for index in indices:
        found[index] = HOST
    return found


def fitting(indices: Iterable[int], sizes: Sequence[int], room: float) -> list[int]:
    """Those of `indices` that fit in `room` together, in the order given; one that does not fit is skipped."""
    found = []
    for index in indices:
        if sizes[index] <= room:
            found.append(index)
            room -= sizes[index]
    return found


def in_turn(indices: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """Those of `indices` that go into `room` bytes, spread evenly over all of them by bytes; then others that still
    fit."""
    share = room / max(1, sum(sizes[index] for index in indices))
    found, owed = [], 0.0
    for index in indices:
        size = sizes[index]
        owed += share * size
        if size <= room and 2.0 * owed >= size:
            found.append(index)
            owed -= size
            room -= size
    taken = set(found)
    left = sorted((index for index in indices if index not in taken), key=lambda index: -sizes[index])
    return found + fitting(left, sizes, room)


def neighbours(answers: tuple[Policy, ...], course: StepSimulation) -> Iterator[list[Policy]]:
    """`answers` with one of them changed; then with two."""
    others = [
        [each for each in (KEEP, HOST, NVME, RECOMPUTE) if each is not now and (each is not RECOMPUTE or can_rebuild)]
        for now, can_rebuild in zip(answers, (rebuild is not None for rebuild in course.rebuild), strict=True)
    ]
    for index, instead in enumerate(others):
        for answer in instead:
            yield [*answers[:index], answer, *answers[index + 1 :]]
    for first, second in combinations(range(len(answers)), 2):
        for one, other in product(others[first], others[second]):
            yield [*answers[:first], one, *answers[first + 1 : second], other, *answers[second + 1 :]]


# --- in words ---------------------------------------------------------------------------------------------------------


def _told(course: StepSimulation, played: Played) -> Choice:
    return Choice(
        answers=played.answers,
        stall_seconds=played.stall_seconds,
        recompute_seconds=played.recompute_seconds,
        step_seconds=course.seconds + played.extra_seconds,
        peak_bytes=played.peak_bytes,
        tier_bytes={Tier.HOST: played.host_bytes, Tier.NVME: played.nvme_bytes},
        price=played.price,
        reason=_reason(course, played),
    )


def _reason(course: StepSimulation, played: Played) -> str:
    parts = []
    for answer, where in ((KEEP, "kept"), (RECOMPUTE, "recomputed"), (HOST, "to host memory"), (NVME, "to NVMe")):
        sizes = [size for size, given in zip(course.sizes, played.answers, strict=True) if given is answer]
        if sizes:
            parts.append(f"{format_bytes(sum(sizes))} in {counted(len(sizes), 'tensor')} {where}")
    waits = f"compute waits {format_seconds(played.stall_seconds)} for copies"
    if played.recompute_seconds:
        waits += f" and recomputes for {format_seconds(played.recompute_seconds)}"
    most = format_seconds(played.price * 2**20)
    price = f"; tensors that take less than {most} per MiB to recompute are recomputed" if played.price else ""
    return (
        f"{', '.join(parts) or 'nothing is saved'}; {waits} in a step of {format_seconds(course.seconds)}{price}; "
        f"peak {format_bytes(played.peak_bytes)} of {format_bytes(course.limits.device_bytes)} on the device"
    )


def _rejection(course: StepSimulation) -> NoChoice:
    limits = course.limits
    total = sum(course.sizes)
    rebuilt = sum(size for size, rebuild in zip(course.sizes, course.rebuild, strict=True) if rebuild is not None)
    leaving = min(total, rebuilt + limits.offloadable_bytes + int(min(limits.spillable_bytes, total)))
    staying = int(min(limits.device_bytes, limits.kept_bytes))
    missing = max(1, total - leaving - staying)
    may = (
        f"{format_bytes(staying)} on the device, {format_bytes(limits.offloadable_bytes)} in host memory, "
        f"{format_bytes(min(limits.spillable_bytes, total))} on NVMe"
    )
    return NoChoice(
        missing,
        f"{format_bytes(total)} in {counted(len(course.sizes), 'tensor')} do not fit: {format_bytes(rebuilt)} can be "
        f"recomputed, and the limits are {may}; at least {format_bytes(missing)} are missing",
    )
