"""A simple play of a step, with plain objects for copies out of the device and back. `StepSimulation.play` must have
the same result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from spillway.plan import Policy
from spillway.planning.storage_choice import Played, PolicyLimits, StepSimulation

KEEP, RECOMPUTE, HOST, NVME = Policy.KEEP, Policy.RECOMPUTE, Policy.HOST, Policy.NVME


class PlainCourse(StepSimulation):
    """Plays every list of answers to the end, and ignores `bound_seconds`."""

    def play(self, answers: Sequence[Policy], price: float = 0.0, bound_seconds: float = math.inf) -> Played | None:
        """Plays the answers; None if they break a limit."""
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
        peak_bytes = self._play_forward(answers, out)
        back = self._play_backward(answers, out)
        peak_bytes = max(peak_bytes, back.peak_bytes)
        if peak_bytes > limits.device_bytes:
            return None
        recompute = sum(self.rebuild[index] or 0.0 for index, answer in enumerate(answers) if answer is RECOMPUTE)
        return Played(tuple(answers), back.stall, recompute, peak_bytes, host_bytes, nvme_bytes, price)

    def _play_forward(self, answers: Sequence[Policy], out: Outward) -> int:
        """Plays forward, with its copies in `out`; returns the device's peak bytes."""
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

    def _play_backward(self, answers: Sequence[Policy], out: Outward) -> Inward:
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
                if index not in back.arrives:  # it is the next to load, because loads are in the order of needs
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

    def __init__(self, limits: PolicyLimits) -> None:
        self._limits = limits
        self._copies: deque[tuple[float, int, int]] = deque()
        """(end, bytes, storage) of each copy out of the device; the storage is on the device until then"""
        self._writes: deque[tuple[float, int]] = deque()
        self._copied_at = self._written_at = 0.0
        """time at which each lane is free"""
        self._in_staging = 0
        self.bytes = 0
        """on the device, of storages that are being copied out"""
        self.kept_bytes = 0
        self.stall = 0.0
        self.begins: dict[int, float] = {}
        """storage -> time at which its copy begins; it is on the device until the copy ends"""
        self.stored: dict[int, float] = {}
        self.forwarded: set[int] = set()
        """storages that are not copied after all, because backward needed them earlier"""

    def wait_for_room(self, now: float, room: int) -> float:
        """Waits until at most `room` bytes are being copied out, or none are; returns the time then."""
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
        """Removes storages from the device whose copy is complete by `now`."""
        while self._copies and self._copies[0][0] <= now:
            self._leave(now)

    def forward(self, index: int, size: int) -> None:
        """Cancels the copy of a storage that is needed before the copy begins."""
        self.forwarded.add(index)
        self.bytes -= size


class Inward:
    """Reloads during one play."""

    __slots__ = ("_limits", "_loaded_at", "_out", "_read_at", "_room", "ahead_bytes", "arrives", "peak_bytes")

    def __init__(self, limits: PolicyLimits, out: Outward, reserved_bytes: int) -> None:
        """`reserved_bytes`: reloads leave so much free, for the largest storage that is rebuilt."""
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
        """Whether there is room for one more reload of `size` bytes ahead of backward."""
        if self.ahead_bytes and self.ahead_bytes + size > self._limits.ahead_bytes:
            return False
        self._out.leave_until(now)
        return self._out.kept_bytes + self._out.bytes + self.ahead_bytes + size <= self._room

    def make_room(self, now: float, size: int) -> float:
        """Waits in backward until the copies to the outside leave room for `size` bytes, or there are none; returns the
        time then."""
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
        """Waits in backward for the reload of a storage, which then leaves the device; returns the time then."""
        arrives = self.arrives[index]
        if arrives > now:
            self._out.stall += arrives - now
            now = arrives
        self.ahead_bytes -= size
        return now
