"""PlanService: finds plans in separate processes, so that the event loop never waits for the planner.

Namespaces take turns, and one namespace never has all processes while another one waits: many expensive jobs of one
user do not delay a cheap job of another. If a plan takes too long or a process ends, that is an answer, too.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from spillway.errors import UserError
from spillway.planning.known_plans import PlanAnswer, PlanQuestion, forget, remember

from .kube.store import Key
from .plan_process import LENGTH_BYTES

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
DEADLINE_SECONDS = 60.0
"""Longest time for one plan; the slowest known ones take 6 s of a core."""
RETRY_SECONDS = 600.0
"""When a plan took too long, or its process ended, the time until it may be asked for again."""
MOST_BYTES = 160 << 20
"""Data memory of each process; plans of the largest jobs take about 60 MiB."""


class PlanService:
    def __init__(
        self,
        wake: Callable[[Key], None],
        count: Callable[[str], None],
        *,
        num_processes: int = NUM_PROCESSES,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """`wake` is called for each job whose plan is known; `count` with the result of each plan."""
        self._wake = wake
        self._count = count
        self._num_processes = num_processes
        self._deadline_seconds = deadline_seconds
        self._asked: dict[PlanQuestion, tuple[float, set[Key]]] = {}
        """Question -> (when it was asked, jobs that wait for its answer), oldest first."""
        self._queues: OrderedDict[str, deque[PlanQuestion]] = OrderedDict()
        """Namespace -> its questions, in the order of turns; no queue is empty."""
        self._working: Counter[str] = Counter()
        """Namespace -> number of processes that work for it."""
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest question has waited for its answer; 0 without any."""
        return max((time.monotonic() - asked for asked, _ in list(self._asked.values())[:1]), default=0.0)

    async def ask(self, key: Key, questions: Sequence[PlanQuestion]) -> None:
        for question in questions:
            if question not in self._asked:
                self._queues.setdefault(key[0], deque()).append(question)
            self._asked.setdefault(question, (time.monotonic(), set()))[1].add(key)
        async with self._changed:
            self._changed.notify_all()

    async def answered(self, questions: Sequence[PlanQuestion], seconds: float) -> bool:
        """Waits for at most `seconds`; returns whether all questions are answered."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: not any(question in self._asked for question in questions))
        return not any(question in self._asked for question in questions)

    async def run(self) -> None:
        """Answers questions until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_processes):
                group.create_task(self._serve())

    async def _serve(self) -> None:
        process = _PlanProcess()
        try:
            await process.start()
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._next_namespace() is not None)
                    namespace, question = self._take()
                try:
                    answer = await process.answer(question, self._deadline_seconds)
                finally:
                    self._working[namespace] -= 1
                remember(question, answer)
                self._count(_result(answer))
                if isinstance(answer, Exception) and not isinstance(answer, UserError):
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, forget, question)
                for key in self._asked.pop(question)[1]:
                    self._wake(key)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            await process.end()

    def _next_namespace(self) -> str | None:
        """The namespace whose turn it is: the first without a process. If all have one, the first gets one more, unless
        only one process is idle, which is kept free for others."""
        fresh = [namespace for namespace in self._queues if not self._working[namespace]]
        if fresh:
            return fresh[0]
        spare = self._num_processes - sum(self._working.values())
        return next(iter(self._queues), None) if spare > 1 or self._num_processes == 1 else None

    def _take(self) -> tuple[str, PlanQuestion]:
        namespace = self._next_namespace()
        assert namespace is not None
        queue = self._queues.pop(namespace)
        question = queue.popleft()
        if queue:
            self._queues[namespace] = queue  # behind the others
        self._working[namespace] += 1
        return namespace, question


def _result(answer: PlanAnswer) -> str:
    if isinstance(answer, TimeoutError):
        return "deadline"
    if isinstance(answer, UserError):
        return "rejected"
    return "failed" if isinstance(answer, Exception) else "answered"


class _PlanProcess:
    """One process, started again for the next question after it has ended."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._problem = ""

    async def answer(self, question: PlanQuestion, seconds: float) -> PlanAnswer:
        await self.start()
        process = self._process
        if process is None:
            return RuntimeError(f"no planner process can be started: {self._problem}")
        assert process.stdin is not None
        assert process.stdout is not None
        asked, is_answered = pickle.dumps(question), False
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(len(asked).to_bytes(LENGTH_BYTES) + asked)
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
                answer: PlanAnswer = pickle.loads(await process.stdout.readexactly(length))  # noqa: S301
                is_answered = True
                return answer
        except TimeoutError:
            return TimeoutError(
                f"no plan was found within {seconds:g} s; set fields of spec.memory.advanced that are Auto"
            )
        except (OSError, asyncio.IncompleteReadError):
            code = await process.wait()
            logger.warning("a planner process ended with code %d", code)
            return RuntimeError(f"the planner's process ended with code {code}")
        finally:
            if not is_answered:
                await self.end()

    async def start(self) -> None:
        """Starts the process, unless it runs. A failure becomes the answer to the next question."""
        if self._process is not None:
            return
        command = (sys.executable, "-P", "-m", "spillway_operator.plan_process", str(MOST_BYTES))
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        except OSError as error:
            self._problem = error.strerror or str(error)

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
