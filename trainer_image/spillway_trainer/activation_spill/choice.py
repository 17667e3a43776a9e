"""Choice: which of the saved storages stay, are rebuilt, go to host memory or to NVMe. Pure: a profile and limits in,
answers and what they should cost out.

    what a forward saves + limits -> answers at a price -> played through the step -> the fastest within every limit

The price is that of a byte of the link that is short, in seconds. At a price, what is rebuilt for less is rebuilt, and
of the rest what lies longest between forward and backward leaves: it has the most time to go and come, and what stays
is the end of the forward, by itself. So one number is searched for; loads fall and recompute rises with it. Few
storages are lumpy, so at the end single answers are changed and exchanged as long as that pays.

A play goes through forward and backward storage by storage: one queue a lane, first in, first out; forward waits for
the oldest copy where the window or the device is full; reloads run ahead of backward by so many bytes; what is needed
before its write has begun is used where it is. The device's peak is that of the play, not a sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product

from spillway.plan import Answer, Tier
from spillway.units import format_bytes, format_seconds

KEEP, RECOMPUTE, HOST, NVME = Answer.KEEP, Answer.RECOMPUTE, Answer.HOST, Answer.NVME

TIE = 1.005
"""of answers that are so nearly as fast, those that write least to NVMe are taken"""
PRICES_AT_ONCE = 5
"""prices looked at in one round of the search; the next round lies between the neighbours of the best one"""
MAX_STORAGES = 128
"""more are bundled, neighbours together, and get one answer a bundle: lumps are small then, and a choice stays quick"""
MAX_POLISHED = 32
"""so few storages are lumpy enough for the last stage"""
POLISH_STORAGES = 30_000
"""storages that all plays of the last stage go through together: some 40 ms"""


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that a forward saves, on the clock of a step in which nothing waits."""

    nbytes: int
    produced_seconds: float
    needed_seconds: float
    """when backward comes to it first"""
    rebuild_seconds: float | None = None
    """what making it again in backward takes, of what stays anyway; None: it cannot be"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the storages of one forward may use. A rate of 0: there is no such way."""

    device_bytes: int
    """saved storages, those on their way out and those that are back, at any moment"""
    kept_bytes: float = math.inf
    """of them, that may stay from forward to backward"""
    host_bytes: int = 0
    nvme_bytes: int = 0
    written_bytes: float = math.inf
    """to NVMe by one forward, as endurance allows"""
    window_bytes: int = 256 << 20
    """on their way out, and again in staging on their way to NVMe; forward waits beyond"""
    ahead_bytes: int = 512 << 20
    """on their way back before backward comes to them"""
    d2h: float = 0.0
    """bytes per second, as the three below"""
    h2d: float = 0.0
    nvme_write: float = 0.0
    nvme_read: float = 0.0
    is_staged: bool = True
    """NVMe is reached through host memory; False: straight from the device's, which is host memory there"""

    @property
    def spillable_bytes(self) -> float:
        """That NVMe may take."""
        if not (self.nvme_write and self.nvme_read and (not self.is_staged or (self.d2h and self.h2d))):
            return 0
        return min(self.nvme_bytes, self.written_bytes)

    @property
    def offloadable_bytes(self) -> int:
        """That host memory may take."""
        return self.host_bytes if self.d2h and self.h2d else 0


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer for each storage, in the order given."""

    answers: tuple[Answer, ...]
    stall_seconds: float
    """that compute waits for copies"""
    recompute_seconds: float
    step_seconds: float
    """forward and backward, with both"""
    peak_bytes: int
    """on the device, of saved storages"""
    tier_bytes: dict[Tier, int]
    """host and nvme: what leaves"""
    price: float
    """seconds a byte: what was rebuilt for less was rebuilt; 0: nothing was"""
    reason: str


@dataclass(frozen=True, slots=True)
class NoChoice:
    """Nothing fits: a value, not an exception."""

    missing_bytes: int
    reason: str


def choose(storages: Sequence[SavedStorage], limits: Limits) -> Choice | NoChoice:
    """The fastest answers for `storages`, in the order in which forward saves them. Raises ValueError for figures that
    are none (negative, NaN, a need before its production)."""
    check(storages, limits)
    largest = max((storage.nbytes for storage in storages), default=0)
    if largest > limits.device_bytes:
        index = next(index for index, storage in enumerate(storages) if storage.nbytes == largest)
        return NoChoice(
            largest - limits.device_bytes,
            f"saved storage {index} takes {format_bytes(largest)} while it is made, and the device has "
            f"{format_bytes(limits.device_bytes)} for saved storages",
        )
    course = Course(storages, limits)
    if len(storages) > MAX_STORAGES:
        bundles = bundled(storages)
        found = searched(Course([bundle for bundle, _ in bundles], limits))
        if found is not None:
            of_each = {
                index: answer for answer, (_, members) in zip(found.answers, bundles, strict=True) for index in members
            }
            played = course.play([of_each[index] for index in range(len(storages))], found.price)
            if played is not None:
                return _told(course, played)
    found = searched(course)
    return _refusal(course) if found is None else _told(course, found)


def searched(course: Course) -> Played | None:
    """The stages of the search."""
    search = Search(course)
    search.by_price()
    search.all_out()
    search.polish()
    return search.spared()


def bundled(storages: Sequence[SavedStorage]) -> list[tuple[SavedStorage, list[int]]]:
    """Neighbours of one kind as if they were one, and which: made when the last of them is, needed when the first of
    them is."""
    size = -(-sum(storage.nbytes for storage in storages) // MAX_STORAGES)
    found: list[tuple[SavedStorage, list[int]]] = []
    last: dict[bool, int] = {}
    """of each kind, the place of its last bundle"""
    for index, storage in enumerate(storages):
        kind = storage.rebuild_seconds is not None
        if kind in last and found[last[kind]][0].nbytes + storage.nbytes <= size:
            bundle, members = found[last[kind]]
            found[last[kind]] = (together(bundle, storage), [*members, index])
        else:
            last[kind] = len(found)
            found.append((storage, [index]))
    return sorted(found, key=lambda one: one[0].produced_seconds)


def together(first: SavedStorage, second: SavedStorage) -> SavedStorage:
    rebuild = None
    if first.rebuild_seconds is not None and second.rebuild_seconds is not None:
        rebuild = first.rebuild_seconds + second.rebuild_seconds
    produced = max(first.produced_seconds, second.produced_seconds)
    needed = max(produced, min(first.needed_seconds, second.needed_seconds))
    return SavedStorage(first.nbytes + second.nbytes, produced, needed, rebuild)


UNBOUNDED = ("kept_bytes", "written_bytes")


def check(storages: Sequence[SavedStorage], limits: Limits) -> None:
    for index, storage in enumerate(storages):
        times = (storage.produced_seconds, storage.needed_seconds, storage.rebuild_seconds or 0.0)
        if storage.nbytes < 0 or not all(math.isfinite(time) and time >= 0.0 for time in times):
            raise ValueError(f"saved storage {index}: bytes and seconds are 0 or more, and finite; found {storage}")
        if storage.needed_seconds < storage.produced_seconds:
            raise ValueError(f"saved storage {index}: needed before it is produced; found {storage}")
        if index and storage.produced_seconds < storages[index - 1].produced_seconds:
            raise ValueError(f"saved storage {index}: produced before the one before it; found {storage}")
    for field in fields(Limits):
        value = getattr(limits, field.name)
        if math.isnan(value) or value < 0 or (math.isinf(value) and field.name not in UNBOUNDED):
            raise ValueError(f"limits: {field.name} = {value}; it is 0 or more, and finite")


# --- one play through a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    """What answers come to. Compares as they are preferred, but for what `Search.spared` allows for."""

    answers: tuple[Answer, ...]
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


class Course:
    """The storages of one forward and their limits, ready to be played."""

    def __init__(self, storages: Sequence[SavedStorage], limits: Limits) -> None:
        self.storages, self.limits = storages, limits
        self.sizes = [storage.nbytes for storage in storages]
        self.produced = [storage.produced_seconds for storage in storages]
        self.needed = [storage.needed_seconds for storage in storages]
        self.rebuild = [storage.rebuild_seconds for storage in storages]
        self.need_order = sorted(range(len(storages)), key=lambda index: (self.needed[index], -index))
        self.turn = max(self.produced, default=0.0)
        self.seconds = max(self.needed, default=0.0)
        self.num_played = 0
        """storages that plays went through so far"""

    def play(self, answers: Sequence[Answer], price: float = 0.0) -> Played | None:
        """None where the answers break a limit."""
        sizes, limits = self.sizes, self.limits
        host_bytes = sum(size for size, answer in zip(sizes, answers, strict=True) if answer is HOST)
        nvme_bytes = sum(size for size, answer in zip(sizes, answers, strict=True) if answer is NVME)
        kept_bytes = sum(size for size, answer in zip(sizes, answers, strict=True) if answer is KEEP)
        if (
            host_bytes > limits.offloadable_bytes
            or nvme_bytes > limits.spillable_bytes
            or kept_bytes > limits.kept_bytes
        ):
            return None
        self.num_played += len(sizes)
        out = Outward(limits)
        peak_bytes = self._forward(answers, out)
        back = self._backward(answers, out)
        peak_bytes = max(peak_bytes, back.peak_bytes)
        if peak_bytes > limits.device_bytes:
            return None
        recompute = sum(self.rebuild[index] or 0.0 for index, answer in enumerate(answers) if answer is RECOMPUTE)
        return Played(tuple(answers), back.stall, recompute, peak_bytes, host_bytes, nvme_bytes, price)

    def _forward(self, answers: Sequence[Answer], out: Outward) -> int:
        """Plays forward into `out`; the device's peak."""
        room, peak = self.limits.device_bytes, 0
        produced = self.produced
        for index, (size, answer) in enumerate(zip(self.sizes, answers, strict=True)):
            now = out.wait_for_room(produced[index] + out.stall, room - out.kept_bytes - size)
            held = out.kept_bytes + out.bytes + size
            peak = max(peak, held)
            if answer is KEEP:
                out.kept_bytes += size
            elif answer is not RECOMPUTE:
                out.send(index, size, now, spills=answer is NVME)
        return peak

    def _backward(self, answers: Sequence[Answer], out: Outward) -> Inward:
        limits, sizes, order = self.limits, self.sizes, self.need_order
        moved = [index for index in order if answers[index] is HOST or answers[index] is NVME]
        spills = [answers[index] is NVME for index in moved]
        rebuilt = max((sizes[i] for i, answer in enumerate(answers) if answer is RECOMPUTE), default=0)
        back = Inward(limits, out, rebuilt)
        now, next_one, num_moved = self.turn + out.stall, 0, len(moved)
        rebuilt_seconds = 0.0
        for index in order:
            size, answer = sizes[index], answers[index]
            while next_one < num_moved and back.has_room(now, sizes[moved[next_one]]):
                back.load(moved[next_one], sizes[moved[next_one]], now, spills=spills[next_one])
                next_one += 1
            now = max(now, self.needed[index] + back.stall + rebuilt_seconds)
            if answer is KEEP:
                out.kept_bytes -= size
            elif answer is RECOMPUTE:
                back.make_room(now, size)
                rebuilt_seconds += self.rebuild[index] or 0.0
                now += self.rebuild[index] or 0.0
            else:
                if index not in back.arrives:  # the next one: loads are in the order of needs
                    now = back.make_room(now, size)
                    back.load(index, size, now, spills=spills[next_one])
                    next_one += 1
                now = back.take(index, size, now)
        return back


class Outward:
    """Copies out of the device during one play."""

    __slots__ = (
        "_copied_at", "_copies", "_in_staging", "_limits", "_writes", "_written_at", "begins", "bytes", "forwarded",
        "kept_bytes", "stall", "stored",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._copies: deque[tuple[float, int, int]] = deque()
        """(end, bytes, storage) of what is on the device until then"""
        self._writes: deque[tuple[float, int]] = deque()
        self._copied_at = self._written_at = 0.0
        """when each lane is free"""
        self._in_staging = 0
        self.bytes = 0
        """on the device, on their way out"""
        self.kept_bytes = 0
        self.stall = 0.0
        self.begins: dict[int, float] = {}
        """when the copy of a storage begins that is on the device till it ends"""
        self.stored: dict[int, float] = {}
        self.forwarded: set[int] = set()
        """not copied after all: backward was faster"""

    def wait_for_room(self, now: float, room: int) -> float:
        """Forward waits until no more than `room` is on its way out, or nothing is."""
        copies = self._copies
        while copies and (copies[0][0] <= now or self.bytes > room):
            now = self._leave(now)
        return now

    def _leave(self, now: float) -> float:
        end, size, index = self._copies.popleft()
        if index not in self.forwarded:
            self.bytes -= size
            if end > now:
                self.stall += end - now
                return end
        return now

    def send(self, index: int, size: int, now: float, *, spills: bool) -> None:
        limits = self._limits
        if not spills or limits.is_staged:
            begin = max(now, self._copied_at)
            end = self._copied_at = begin + size / limits.d2h
            stored = end
            if spills:
                stored = self._written_at = max(end, self._written_at) + size / limits.nvme_write
                self._writes.append((stored, size))
                self._in_staging += size
        else:
            begin = max(now, self._written_at)
            end = stored = self._written_at = begin + size / limits.nvme_write
        self.begins[index], self.stored[index] = begin, stored
        self._copies.append((end, size, index))
        self.bytes += size
        now = self.wait_for_room(now, limits.window_bytes)
        writes = self._writes
        while writes and (writes[0][0] <= now or self._in_staging > limits.window_bytes):
            end, size = writes.popleft()
            self._in_staging -= size
            if end > now:
                self.stall += end - now
                now = end

    def leave_until(self, now: float) -> None:
        """What is complete by `now` is off the device."""
        while self._copies and self._copies[0][0] <= now:
            self._leave(now)

    def forward(self, index: int, size: int) -> None:
        """Not copied: it is needed before."""
        self.forwarded.add(index)
        self.bytes -= size


class Inward:
    """Reloads during one play."""

    __slots__ = ("_limits", "_loaded_at", "_out", "_read_at", "_room", "ahead_bytes", "arrives", "peak_bytes")

    def __init__(self, limits: Limits, out: Outward, reserved_bytes: int) -> None:
        """`reserved_bytes`: what is rebuilt needs so much at a time, and reloads leave it."""
        self._limits, self._out = limits, out
        self._room = limits.device_bytes - reserved_bytes
        self._read_at = self._loaded_at = 0.0
        self.ahead_bytes = 0
        self.arrives: dict[int, float] = {}
        self.peak_bytes = 0

    @property
    def stall(self) -> float:
        return self._out.stall

    def has_room(self, now: float, size: int) -> bool:
        """For one more, ahead of backward."""
        if self.ahead_bytes and self.ahead_bytes + size > self._limits.ahead_bytes:
            return False
        self._out.leave_until(now)
        return self._out.kept_bytes + self._out.bytes + self.ahead_bytes + size <= self._room

    def make_room(self, now: float, size: int) -> float:
        """Backward waits until copies on their way out leave room for `size`, or nothing is on its way."""
        out = self._out
        others = out.kept_bytes + self.ahead_bytes + size
        now = out.wait_for_room(now, self._limits.device_bytes - others)
        self.peak_bytes = max(self.peak_bytes, others + out.bytes)
        return now

    def load(self, index: int, size: int, now: float, *, spills: bool) -> None:
        limits, out = self._limits, self._out
        begins, stored = out.begins[index], out.stored[index]
        if begins >= now:
            out.forward(index, size)
            arrives = now
        else:
            ready = max(now, stored)
            if spills:
                ready = self._read_at = max(ready, self._read_at) + size / limits.nvme_read
            if not spills or limits.is_staged:
                ready = self._loaded_at = max(ready, self._loaded_at) + size / limits.h2d
            arrives = ready
        self.arrives[index] = arrives
        self.ahead_bytes += size
        self.peak_bytes = max(self.peak_bytes, out.kept_bytes + out.bytes + self.ahead_bytes)

    def take(self, index: int, size: int, now: float) -> float:
        """Backward has come to a reload: it waits for it, and then is done with it."""
        arrives = self.arrives[index]
        if arrives > now:
            self._out.stall += arrives - now
            now = arrives
        self.ahead_bytes -= size
        return now


# --- the search -------------------------------------------------------------------------------------------------------


class Search:
    """Plays answers and remembers the best."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._found: list[Played] = []
        self._tried: set[tuple[Answer, ...]] = set()
        self.best: Played | None = None
        storages = course.storages
        slack = [storage.needed_seconds - storage.produced_seconds for storage in storages]
        self._by_slack = sorted(range(len(storages)), key=lambda index: (-slack[index], index))
        """those with the most time between forward and backward first"""
        ratios = {
            index: storage.rebuild_seconds / max(1, storage.nbytes)
            for index, storage in enumerate(storages)
            if storage.rebuild_seconds is not None
        }
        self._rebuildable = sorted(ratios, key=lambda index: ratios[index])
        self._prices = [ratios[index] for index in self._rebuildable]
        self._largest = max(course.sizes, default=0)

    def spared(self) -> Played | None:
        """Of all that were found nearly as fast as the best, the one that writes least to NVMe."""
        if self.best is None:
            return None
        limit = TIE * (self._course.seconds + self.best.extra_seconds) - self._course.seconds
        near = (played for played in self._found if played.extra_seconds <= limit)
        return min(near, key=lambda played: (played.nvme_bytes, played.extra_seconds, played.host_bytes))

    def _try(self, answers: Sequence[Answer], price: float) -> Played | None:
        key = tuple(answers)
        if key in self._tried:
            return None
        self._tried.add(key)
        played = self._course.play(key, price)
        if played is not None:
            self._found.append(played)
            if self.best is None or played.rank < self.best.rank:
                self.best = played
        return played

    def by_price(self) -> None:
        """The number of storages that are rebuilt, cheapest first, is searched for, which is a search for the price."""
        low, high = 0, len(self._rebuildable)
        least = self._at(low)
        if least == 0.0:
            return  # nothing waits and nothing is rebuilt
        while high > low:
            steps = min(PRICES_AT_ONCE, high - low)
            counts = sorted({low + (high - low) * step // steps for step in range(steps + 1)})
            found = {count: self._at(count) for count in counts}
            best = min(found, key=lambda count: (found[count], count))
            position = counts.index(best)
            before, after = counts[max(0, position - 1)], counts[min(len(counts) - 1, position + 1)]
            if after - before <= 2 or (before, after) == (low, high):
                return
            low, high = before, after

    def _at(self, num_rebuilt: int) -> float:
        """Seconds beyond a step in which nothing waits, at the price at which so many are rebuilt."""
        price = self._prices[num_rebuilt - 1] if num_rebuilt else 0.0
        least = math.inf
        for answers in self._family(num_rebuilt):
            played = self._try(answers, price)
            if played is not None:
                least = min(least, played.extra_seconds)
                if least == 0.0:
                    break
        return least

    def _family(self, num_rebuilt: int) -> Iterator[list[Answer]]:
        """Answers at one price: by how much of the device is left for what is on its way, and by what goes to NVMe."""
        limits, course = self._course.limits, self._course
        rebuilt = self._rebuildable[:num_rebuilt]
        total = sum(course.sizes)
        ahead = (0, self._largest, limits.window_bytes, limits.ahead_bytes, limits.device_bytes // 2, total)
        rooms = {int(min(max(limits.device_bytes - left, 0), total, limits.kept_bytes)) for left in ahead}
        orders = [self._by_slack[::-1]]
        if len(course.sizes) <= MAX_POLISHED:  # large ones fit nowhere else, and leave small ones the link
            orders.append(sorted(orders[0], key=lambda index: -course.sizes[index]))
        for room in sorted(rooms, reverse=True):
            for order in orders:
                answers, moved = self._stay(rebuilt, room, order)
                yield from self._between_host_and_nvme(answers, moved)

    def _stay(self, rebuilt: Sequence[int], room: int, order: Sequence[int]) -> tuple[list[Answer], list[int]]:
        """As much as `room` holds stays, in `order`, then what is dearest to rebuild; and what moves, the most slack
        first."""
        sizes, answers = self._course.sizes, [NVME] * len(self._course.sizes)
        for index in rebuilt:
            answers[index] = RECOMPUTE
        others = [index for index in order if answers[index] is NVME]
        for index in (*others, *reversed(rebuilt)):
            if sizes[index] <= room:
                answers[index] = KEEP
                room -= sizes[index]
        return answers, [index for index in self._by_slack if answers[index] is NVME]

    def _between_host_and_nvme(self, answers: list[Answer], moved: Sequence[int]) -> Iterator[list[Answer]]:
        """Host memory is filled: by what has least slack, or in turn with NVMe, so that both lanes work all the time;
        or takes only what NVMe cannot."""
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
        """For what fits nowhere else: all that can leave the device does."""
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
        """Change one answer or two while that pays; from all that were found, the best first, because they differ."""
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


def with_host(answers: Sequence[Answer], indices: Sequence[int]) -> list[Answer]:
    found = list(answers)
    for index in indices:
        found[index] = HOST
    return found


def fitting(indices: Iterable[int], sizes: Sequence[int], room: float) -> list[int]:
    """Those that fit, in the order given; one that does not is passed over."""
    found = []
    for index in indices:
        if sizes[index] <= room:
            found.append(index)
            room -= sizes[index]
    return found


def in_turn(indices: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """Every so many bytes, so that the part that fits in `room` is spread evenly."""
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


def neighbours(answers: tuple[Answer, ...], course: Course) -> Iterator[list[Answer]]:
    """One answer changed; then two."""
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


def _told(course: Course, played: Played) -> Choice:
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


def _reason(course: Course, played: Played) -> str:
    parts = []
    for answer, where in ((KEEP, "kept"), (RECOMPUTE, "rebuilt"), (HOST, "to host memory"), (NVME, "to NVMe")):
        sizes = [size for size, given in zip(course.sizes, played.answers, strict=True) if given is answer]
        if sizes:
            parts.append(f"{format_bytes(sum(sizes))} in {len(sizes)} storages {where}")
    waits = f"{format_seconds(played.stall_seconds)} of waiting"
    if played.recompute_seconds:
        waits += f" and {format_seconds(played.recompute_seconds)} of rebuilding"
    price = f"; a MiB is rebuilt for up to {format_seconds(played.price * 2**20)}" if played.price else ""
    return (
        f"{', '.join(parts) or 'nothing is saved'}; {waits} in a step of {format_seconds(course.seconds)}{price}; "
        f"{format_bytes(played.peak_bytes)} of {format_bytes(course.limits.device_bytes)} on the device"
    )


def _refusal(course: Course) -> NoChoice:
    limits = course.limits
    total = sum(course.sizes)
    rebuilt = sum(size for size, rebuild in zip(course.sizes, course.rebuild, strict=True) if rebuild is not None)
    leaving = min(total, rebuilt + limits.offloadable_bytes + int(min(limits.spillable_bytes, total)))
    staying = int(min(limits.device_bytes, limits.kept_bytes))
    missing = max(1, total - leaving - staying)
    may = (
        f"the device {format_bytes(staying)}, host memory {format_bytes(limits.offloadable_bytes)}, NVMe "
        f"{format_bytes(min(limits.spillable_bytes, total))}"
    )
    return NoChoice(
        missing,
        f"{format_bytes(total)} in {len(course.sizes)} storages fit nowhere: {format_bytes(rebuilt)} of them can be "
        f"rebuilt, and there may be on {may}; {format_bytes(missing)} or more are missing",
    )
