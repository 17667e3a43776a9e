"""The key queue: at most one worker per key, at most one turn waiting, and delays that are kept."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spillway_operator.kube.key_queue import LONGEST_RETRY_SECONDS, LONGEST_UNANSWERED_SECONDS, KeyQueue


@dataclass(order=True)
class Alarm:
    due: float
    callback: Callable[..., Any] = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class VirtualClock:
    now: float = 100.0
    alarms: list[Alarm] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *arguments: Any) -> Alarm:
        alarm = Alarm(when, callback, arguments)
        heapq.heappush(self.alarms, alarm)
        return alarm

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self.alarms and self.alarms[0].due <= self.now:
            alarm = heapq.heappop(self.alarms)
            if not alarm.cancelled:
                alarm.callback(*alarm.arguments)


def drained(queue: KeyQueue[str]) -> list[str]:
    """What a worker would get now, one after the other."""

    async def drain() -> list[str]:
        found = []
        while not queue._ready.empty():
            found.append(await queue.get())
            queue.done(found[-1])
        return found

    return asyncio.run(drain())


def test_a_key_that_waits_is_not_queued_twice() -> None:
    queue: KeyQueue[str] = KeyQueue(VirtualClock())
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    assert drained(queue) == ["a", "b"]


def test_a_key_is_given_to_one_worker_at_a_time_and_comes_back_once() -> None:
    async def scenario() -> None:
        queue: KeyQueue[str] = KeyQueue(VirtualClock())
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("a")
        queue.add("a")
        assert queue._ready.empty()  # nobody else gets it
        assert queue.num_working == 1
        queue.done("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert queue._ready.empty()
        assert len(queue) == queue.num_working == 0

    asyncio.run(scenario())


def test_a_delayed_key_comes_when_it_is_due_and_the_earliest_delay_counts() -> None:
    clock = VirtualClock()
    queue: KeyQueue[str] = KeyQueue(clock)
    queue.add_after("a", 10.0)
    queue.add_after("a", 30.0)
    queue.add_after("b", 20.0)
    queue.add_after("b", 5.0)
    clock.advance(5.0)
    assert drained(queue) == ["b"]
    clock.advance(5.0)
    assert drained(queue) == ["a"]
    clock.advance(100.0)
    assert drained(queue) == []


def test_failures_in_a_row_double_the_pause_up_to_a_minute() -> None:
    queue: KeyQueue[str] = KeyQueue(VirtualClock())
    pauses = [queue.retry("a") for _ in range(12)]
    assert pauses[:4] == [0.4, 0.8, 1.6, 3.2]
    assert pauses[-1] == LONGEST_RETRY_SECONDS
    queue.succeeded("a")
    assert queue.retry("a") == 0.4


def test_an_api_server_that_is_back_is_asked_within_a_quarter_of_a_minute() -> None:
    assert LONGEST_UNANSWERED_SECONDS <= 15.0
    clock = VirtualClock()
    queue: KeyQueue[str] = KeyQueue(clock)
    for _ in range(12):
        queue.retry("a", unanswered=True)
        clock.advance(LONGEST_UNANSWERED_SECONDS)
        assert drained(queue) == ["a"]
        queue.done("a")


def test_a_rejection_after_an_outage_is_the_first_failure() -> None:
    """An API server that has just begun answers 403 until it has read its roles."""
    queue: KeyQueue[str] = KeyQueue(VirtualClock())
    for _ in range(12):
        queue.retry("a", unanswered=True)
    assert [queue.retry("a"), queue.retry("a")] == [0.4, 0.8]
    assert queue.retry("a", unanswered=True) == 0.4


def test_nothing_of_a_forgotten_key_stays() -> None:
    clock = VirtualClock()
    queue: KeyQueue[str] = KeyQueue(clock)
    queue.retry("a")
    queue.forget("a")
    clock.advance(1000.0)
    assert drained(queue) == []
    assert not queue._timers
    assert not queue._failures


def test_a_closed_queue_gives_nothing_more() -> None:
    async def scenario() -> None:
        queue: KeyQueue[str] = KeyQueue(VirtualClock())
        queue.add("a")
        queue.close()
        waiting = asyncio.create_task(queue.get())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())


def test_many_workers_never_share_a_key() -> None:
    async def scenario() -> None:
        queue: KeyQueue[int] = KeyQueue()
        busy: set[int] = set()
        seen: dict[int, int] = {}

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in busy
                busy.add(key)
                for _ in range(key % 3 + 1):
                    await asyncio.sleep(0)
                seen[key] = seen.get(key, 0) + 1
                busy.discard(key)
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(8)]
        for turn in range(200):
            queue.add(turn % 10)
            if turn % 7 == 0:
                await asyncio.sleep(0)
        while len(queue) or queue.num_working:
            await asyncio.sleep(0)
        assert set(seen) == set(range(10))
        assert sum(seen.values()) < 200  # turns were put together
        assert not any(worker.done() for worker in workers)
        for worker in workers:
            worker.cancel()

    asyncio.run(scenario())
