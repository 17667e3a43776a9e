"""Plans are found in processes: in turn among namespaces, within a deadline, whatever happens to a process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from cases.job_documents import job
from harness.patience import HANG_SECONDS
from spillway.errors import UserError
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning.hardware import local_node
from spillway.planning.known_plans import PlanMissing, PlanQuestion, forget_plans, gathered, known_plan, only_known
from spillway.planning.planner import make_plan
from spillway.units import GIB
from spillway_operator import plan_service
from spillway_operator.plan_service import PlanService

NODE = local_node(4, 8 * GIB, 8 * GIB, 64 * GIB)


def question(steps: int = 10, changes: dict[str, Any] | None = None) -> PlanQuestion:
    """Of a job whose plan is not known."""
    with pytest.raises(PlanMissing) as missing, only_known():
        known_plan(job({"spec.training.steps": steps, **(changes or {})}), NODE)
    return missing.value.questions[0]


class Bench:
    def __init__(self, **options: Any) -> None:
        self.woken: list[tuple[str, str]] = []
        self.results: list[str] = []
        self.plans = PlanService(self.woken.append, self.results.append, **options)

    async def ask(self, namespace: str, *questions: PlanQuestion) -> None:
        await self.plans.ask((namespace, "job"), questions)

    async def known(self, *questions: PlanQuestion) -> None:
        assert await self.plans.answered(questions, HANG_SECONDS)


def on_a_bench(scenario: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        bench = Bench(**options)
        plans = asyncio.create_task(bench.plans.run())
        try:
            await scenario(bench)
        finally:
            plans.cancel()
            await asyncio.wait([plans])

    forget_plans()
    asyncio.run(run())


def test_an_asked_plan_is_make_plans_and_wakes_all_that_wait_for_it() -> None:
    async def scenario(bench: Bench) -> None:
        asked = question()
        await bench.ask("a", asked)
        await bench.ask("b", asked)
        assert len(bench.plans) == 1
        assert bench.plans.oldest_seconds > 0
        await bench.known(asked)
        assert sorted(bench.woken) == [("a", "job"), ("b", "job")]
        assert bench.results == ["answered"], "asked once"
        assert (len(bench.plans), bench.plans.oldest_seconds) == (0, 0.0)
        with only_known():
            assert known_plan(asked.job, NODE) == make_plan(asked.job, NODE)

    on_a_bench(scenario)


def test_an_infeasible_job_and_one_that_is_wrong_are_answers() -> None:
    async def scenario(bench: Bench) -> None:
        small = question(changes={"spec.memory.budget": {"device": "1Mi", "host": "1Mi", "nvme": "0"}})
        wrong = question(
            changes={
                "spec.memory.advanced.parameters.placement": "Stream",
                "spec.memory.advanced.optimizer.placement": "Device",
            }
        )
        await bench.ask("a", small, wrong)
        await bench.known(small, wrong)
        assert sorted(bench.results) == ["answered", "rejected"]
        assert isinstance(known_plan(small.job, NODE), Infeasible)
        with pytest.raises(UserError) as expected:
            make_plan(wrong.job, NODE)
        with pytest.raises(UserError) as found, only_known():
            known_plan(wrong.job, NODE)
        assert str(found.value) == str(expected.value)

    on_a_bench(scenario)


def test_a_namespace_leaves_a_process_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    order, hold = list[str](), asyncio.Event()

    async def answer(process: Any, asked: PlanQuestion, seconds: float) -> MemoryPlan | Infeasible:
        order.append(asked.job.metadata.namespace)
        if asked.job.metadata.namespace == "greedy":
            await hold.wait()
        return make_plan(asked.job, NODE, explained=False)

    async def scenario(bench: Bench) -> None:
        greedy = [question(steps, {"metadata.namespace": "greedy"}) for steps in range(10, 15)]
        modest = [question(steps, {"metadata.namespace": "modest"}) for steps in range(20, 23)]
        await bench.ask("greedy", *greedy)
        await bench.ask("modest", *modest)
        await bench.known(*modest)
        assert order == ["greedy", *["modest"] * 3], "one plan of the other namespace waits, none of this one"
        hold.set()
        await bench.known(*greedy)

    monkeypatch.setattr(plan_service._PlanProcess, "answer", answer)
    on_a_bench(scenario)


def test_three_namespaces_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    async def answer(process: Any, asked: PlanQuestion, seconds: float) -> MemoryPlan | Infeasible:
        order.append(asked.job.metadata.namespace)
        return make_plan(asked.job, NODE, explained=False)

    async def scenario(bench: Bench) -> None:
        asked = [question(10 * number + first, {"metadata.namespace": namespace})
                 for first, namespace in enumerate("abc", 1) for number in range(1, 4)]  # fmt: skip
        for one in asked:
            await bench.ask(one.job.metadata.namespace, one)
        await bench.known(*asked)
        assert order == [*"abc"] * 3

    monkeypatch.setattr(plan_service._PlanProcess, "answer", answer)
    on_a_bench(scenario, num_processes=1)


def is_missing(asked: PlanQuestion) -> bool:
    with suppress(TimeoutError), only_known():
        try:
            known_plan(asked.job, NODE)
        except PlanMissing:
            return True
    return False


def test_a_plan_that_takes_too_long_is_an_answer_for_a_while_and_the_next_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(bench: Bench) -> None:
        late, next_one = question(), question(11)
        later = list[Callable[[], None]]()
        loop, call_later = asyncio.get_running_loop(), asyncio.get_running_loop().call_later

        def noted(seconds: float, callback: Callable[..., Any], *arguments: Any) -> asyncio.TimerHandle:
            if seconds == plan_service.RETRY_SECONDS:
                later.append(partial(callback, *arguments))
            return call_later(seconds, callback, *arguments)

        monkeypatch.setattr(loop, "call_later", noted)
        bench.plans._deadline_seconds = 0.0
        await bench.ask("a", late)
        await bench.known(late)
        with pytest.raises(TimeoutError, match="no plan was found within 0 s"), only_known():
            known_plan(late.job, NODE)
        bench.plans._deadline_seconds = HANG_SECONDS
        await bench.ask("a", next_one)
        await bench.known(next_one)
        assert bench.results == ["deadline", "answered"]
        assert not is_missing(late)
        for retry in later:
            retry()
        assert is_missing(late)

    on_a_bench(scenario)


def test_after_a_deadline_the_process_is_ended_and_its_late_answer_unread() -> None:
    async def scenario() -> None:
        process = plan_service._PlanProcess()
        late, next_one = question(changes={"metadata.name": "late"}), question()
        await process.start()
        first = process._process
        assert first is not None
        assert isinstance(await process.answer(late, 0.0), TimeoutError)
        assert first.returncode == -signal.SIGKILL, "its answer may be in the pipe already"
        try:
            assert await process.answer(next_one, HANG_SECONDS) == next_one.answer() != late.answer()
            assert process._process is not None and process._process.pid != first.pid
        finally:
            await process.end()

    forget_plans()
    asyncio.run(scenario())


def test_the_processes_leave_memory_to_the_operator_itself() -> None:
    """The chart's limit is 512Mi."""
    assert plan_service.NUM_PROCESSES * plan_service.MOST_BYTES <= 400e6


def test_a_process_that_ends_is_an_answer_and_the_next_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(plan_service, "MOST_BYTES", 1 << 20)
        killed, next_one = question(), question(11)
        await bench.ask("a", killed)
        await bench.known(killed)
        monkeypatch.undo()
        await bench.ask("a", next_one)
        await bench.known(next_one)
        assert bench.results == ["failed", "answered"]

    on_a_bench(scenario, num_processes=1)


def test_questions_of_several_calls_are_one_missing_plan() -> None:
    forget_plans()

    def ask(steps: int) -> MemoryPlan | Infeasible:
        return known_plan(job({"spec.training.steps": steps}), NODE)

    with pytest.raises(PlanMissing) as missing, only_known():
        gathered(lambda steps=steps: ask(steps) for steps in (1, 2, 3))  # type: ignore[misc]
    assert len(missing.value.questions) == 3
