"""The Lease: what one process does with what it knows, and that no two of them ever write at the same time."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.virtual_time import run_in_virtual_time
from harness.depth import examples
from harness.operator_parts import credentials
from spillway_operator.kube.api_client import ApiResource, Conflict, NotFound, Unavailable
from spillway_operator.kube.lease import (
    GIVE_UP_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    Election,
    LeaseLost,
    LeaseStep,
    LeaseView,
    decide,
    first,
    seen,
    taken,
)

Object = dict[str, Any]
NOW = datetime(2026, 11, 22, 1, 2, 3, 456789, tzinfo=UTC)


def lease(holder: str, version: int = 1, **spec: Any) -> Object:
    return {
        "metadata": {"name": "spillway", "resourceVersion": str(version)},
        "spec": spec | {"holderIdentity": holder},
    }


# --- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("standing", "now", "step"),
    [
        (LeaseView("a"), 0.0, LeaseStep.ACQUIRE),
        (LeaseView("a", holder=""), 0.0, LeaseStep.ACQUIRE),
        (LeaseView("a", holder="a", changed=0.0), 1.0, LeaseStep.ACQUIRE),
        (LeaseView("a", holder="b", changed=0.0), 15.0, LeaseStep.WAIT),
        (LeaseView("a", holder="b", changed=0.0), 15.1, LeaseStep.ACQUIRE),
        (LeaseView("a", holder="b", changed=0.0, lasts=60.0), 59.0, LeaseStep.WAIT),
        (LeaseView("a", holder=None, changed=0.0), 14.0, LeaseStep.WAIT),
        (LeaseView("a", holder="a", renewed=0.0), 11.9, LeaseStep.RENEW),
        (LeaseView("a", holder="a", renewed=0.0), 12.0, LeaseStep.LOST),
        (LeaseView("a", holder="b", renewed=0.0), 1.0, LeaseStep.LOST),
        (LeaseView("a", holder=None, renewed=0.0), 1.0, LeaseStep.LOST),
    ],
    ids=[
        "none yet", "handed back", "own pod's", "another's", "another's that ran out", "another's that lasts longer",
        "deleted under a leader", "own, renewed", "own, not renewed in time", "taken by another", "own, deleted",
    ],
)  # fmt: skip
def test_what_is_done_follows_from_the_record_and_the_own_clock(
    standing: LeaseView, now: float, step: LeaseStep
) -> None:
    assert decide(standing, now) is step


def test_wait_restarts_only_when_the_lease_record_changes() -> None:
    standing = seen(LeaseView("a"), lease("b", 1), 100.0)
    assert seen(standing, lease("b", 1), 108.0).changed == 100.0
    assert seen(standing, lease("b", 2), 108.0).changed == 108.0


def test_after_an_outage_the_one_who_led_comes_first_again() -> None:
    """Nobody could renew while the API server was away: who leads on has the address that trainers know."""
    standing = seen(LeaseView("a"), lease("b", 1), 100.0)
    back = seen(standing, lease("b", 1), 160.0)
    assert decide(back, 160.0) is LeaseStep.WAIT and decide(back, 175.1) is LeaseStep.ACQUIRE
    restarted = seen(LeaseView("b"), lease("b", 1), 160.0)
    assert decide(restarted, 160.0) is LeaseStep.ACQUIRE


def test_a_lease_that_was_deleted_is_waited_for_as_if_it_were_there() -> None:
    standing = seen(seen(LeaseView("a"), lease("b", 1), 100.0), None, 105.0)
    assert decide(standing, 114.0) is LeaseStep.WAIT
    assert decide(standing, 115.1) is LeaseStep.ACQUIRE
    assert decide(seen(LeaseView("a"), None, 105.0), 105.0) is LeaseStep.ACQUIRE, "there never was one"


def test_the_clock_of_the_holder_is_not_looked_at() -> None:
    old = lease("b", 1, renewTime="1999-01-01T00:00:00.000000Z", leaseDurationSeconds=15)
    assert decide(seen(LeaseView("a"), old, 100.0), 101.0) is LeaseStep.WAIT


def test_who_stopped_renewing_may_not_write_before_anybody_else_may() -> None:
    leader = LeaseView("a", holder="a", renewed=0.0)
    assert leader.seconds_left(11.0) == pytest.approx(1.0)
    assert leader.seconds_left(GIVE_UP_SECONDS) == 0.0
    assert GIVE_UP_SECONDS + 2 < LEASE_SECONDS
    assert 2 * RENEW_SECONDS < GIVE_UP_SECONDS, "one failed renewal costs no leader its lease"


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_first_holder_begins_the_record() -> None:
    made = taken(first("spillway", None), "a", NOW)
    assert made["spec"] == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 0,
        "acquireTime": "2026-11-22T01:02:03.456789Z",
        "renewTime": "2026-11-22T01:02:03.456789Z",
    }


def test_the_lease_goes_with_the_release() -> None:
    claims = {"kubernetes.io": {"namespace": "system", "serviceaccount": {"name": "spillway", "uid": "account-uid"}}}
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    account = credentials("http://api", f"head.{payload}.signature").account
    assert account == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "spillway", "uid": "account-uid"}
    assert first("spillway", account)["metadata"]["ownerReferences"] == [account]
    assert credentials("http://api", "opaque").account is None
    assert "ownerReferences" not in first("spillway", None)["metadata"]


def test_a_renewal_moves_the_renew_time_alone() -> None:
    before = taken(first("spillway", None), "a", NOW)
    after = taken(before, "a", NOW.replace(second=7))
    assert after["spec"] == before["spec"] | {"renewTime": "2026-11-22T01:02:07.456789Z"}


def test_change_of_holder_is_counted_and_foreign_metadata_is_kept() -> None:
    found = lease("b", 7, leaseTransitions=4)
    found["metadata"]["labels"] = {"team": "ml"}
    after = taken(found, "a", NOW)
    assert after["spec"]["leaseTransitions"] == 5
    assert after["metadata"] == found["metadata"]


def test_a_lease_that_is_handed_back_has_no_holder() -> None:
    after = taken(lease("a", 7), "", NOW)
    assert "holderIdentity" not in after["spec"]
    assert re.fullmatch(r"\S+\.\d{6}Z", after["spec"]["renewTime"])


# --- the process, in virtual time -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Server:
    """Holds the one Lease. `delay()` is drawn on the way there and on the way back; `fails()` loses an answer."""

    delay: Callable[[], float] = lambda: 0.01
    fails: Callable[[], bool] = lambda: False
    lease: Object | None = None
    version: int = 0
    on_write: Callable[[str], None] = lambda holder: None
    writes: list[tuple[float, str]] = field(default_factory=list)

    async def get(self, resource: ApiResource, namespace: str, name: str) -> Object:
        return await self._answer(self._found)

    async def create(self, resource: ApiResource, namespace: str, body: Object) -> Object:
        return await self._answer(lambda: self._write(body, self.lease is None))

    async def replace(self, resource: ApiResource, namespace: str, name: str, body: Object) -> Object:
        def write() -> Object:
            found = self._found()
            return self._write(body, body["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"])

        return await self._answer(write)

    async def _answer(self, do: Callable[[], Object]) -> Object:
        """What was sent arrives, also when who sent it has given up meanwhile."""
        there, back, lost = self.delay(), self.delay(), self.fails()
        answer: asyncio.Future[Object] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            try:
                found = copy.deepcopy(do())
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(found)

        asyncio.get_running_loop().call_later(there, arrive)
        try:
            found = await asyncio.shield(answer)
        finally:
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(back)
        if lost:
            raise Unavailable("lease", 0, "Lost", "no answer")
        return found

    def _found(self) -> Object:
        if self.lease is None:
            raise NotFound("lease", 404, "NotFound", "none")
        return self.lease

    def _write(self, body: Object, is_current: bool) -> Object:
        if not is_current:
            raise Conflict("lease", 409, "Conflict", "changed meanwhile")
        self.version += 1
        self.lease = {**body, "metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        holder = body["spec"].get("holderIdentity", "")
        self.writes.append((asyncio.get_running_loop().time(), holder))
        self.on_write(holder)
        return self.lease


def election(server: Server, identity: str, offset: float = 0.0) -> Election:
    loop = asyncio.get_running_loop()
    return Election(server, "ns", "spillway", identity, clock=lambda: loop.time() + offset)  # type: ignore[arg-type]


async def until_lost(found: Election) -> str:
    try:
        await found.run()
    except LeaseLost as error:
        return str(error)
    raise AssertionError


def test_a_leader_costs_one_write_every_four_seconds() -> None:
    async def scenario() -> int:
        server = Server()
        task = asyncio.create_task(election(server, "a").run())
        await asyncio.sleep(59)
        task.cancel()
        return len(server.writes)

    assert run_in_virtual_time(scenario()) == 15


def test_leadership_counts_from_sending_the_renewal_not_from_the_answer() -> None:
    async def scenario() -> float:
        ways = iter([0.0, 0.0, 0.0, 4.0])  # to read and back, to write and back
        leader = election(Server(lambda: next(ways, 0.0)), "a")
        task = asyncio.create_task(leader.run())
        await leader.leads.wait()
        task.cancel()
        return leader.seconds_left()

    assert run_in_virtual_time(scenario()) == pytest.approx(GIVE_UP_SECONDS - 4.0)


def test_a_handed_back_lease_is_taken_within_a_second_or_so() -> None:
    async def scenario() -> float:
        server = Server()
        one, second = election(server, "a"), election(server, "b", offset=1e6)
        tasks = [asyncio.create_task(one.run())]
        await one.leads.wait()
        tasks.append(asyncio.create_task(second.run()))
        await asyncio.sleep(30)
        assert not second.leads.is_set()
        tasks[0].cancel()
        began = asyncio.get_running_loop().time()
        await one.release()
        assert one.seconds_left() == 0.0
        await second.leads.wait()
        tasks[1].cancel()
        return asyncio.get_running_loop().time() - began

    assert run_in_virtual_time(scenario()) < 1.2


def test_dead_leaders_lease_is_taken_on_expiry_and_ones_own_at_once() -> None:
    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        server = Server()
        one, second, again = election(server, "a"), election(server, "b"), election(server, "b")
        task = asyncio.create_task(one.run())
        await one.leads.wait()
        waiting = asyncio.create_task(second.run())
        await asyncio.sleep(2)
        task.cancel()
        died = loop.time()
        await second.leads.wait()
        waiting.cancel()
        taken_after, restarted = loop.time() - died, loop.time()
        task = asyncio.create_task(again.run())
        await again.leads.wait()
        task.cancel()
        return taken_after, loop.time() - restarted

    after_death, after_restart = run_in_virtual_time(scenario())
    assert 12 < after_death < LEASE_SECONDS + 2
    assert after_restart < 0.1


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda server: setattr(server, "fails", lambda: True), "was not renewed for 12 s"),
        (lambda server: setattr(server, "lease", lease("b", 9)), "is held by b"),
        (lambda server: setattr(server, "lease", None), "was deleted"),
    ],
    ids=["no answers", "somebody else's", "deleted"],
)
def test_a_lost_lease_ends_the_process_with_a_sentence(harm: Callable[[Server], None], sentence: str) -> None:
    async def scenario() -> tuple[str, float]:
        server = Server()
        leader = election(server, "a")
        task = asyncio.create_task(until_lost(leader))
        await leader.leads.wait()
        await asyncio.sleep(9)
        harm(server)
        began = asyncio.get_running_loop().time()
        return await task, asyncio.get_running_loop().time() - began

    why, seconds = run_in_virtual_time(scenario())
    assert why.startswith("Lease ns/spillway ")
    assert sentence in why
    assert seconds < GIVE_UP_SECONDS + 0.5


@dataclass(slots=True)
class Pauses:
    """A process that stands still now and then, as SIGSTOP or a busy machine make it."""

    rng: random.Random
    longest: float

    async def sleep(self, seconds: float) -> None:
        late = self.rng.uniform(0, self.longest) if self.rng.random() < 0.2 else 0.0
        await asyncio.sleep(seconds + late)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    processes=st.integers(2, 4),
    slowest=st.sampled_from([0.05, 2.0, 8.0, 40.0]),
    losses=st.sampled_from([0.0, 0.1, 0.5]),
    pause=st.sampled_from([0.0, 10.0, 60.0]),
)
def test_no_two_processes_may_write_at_the_same_time(
    seed: int, processes: int, slowest: float, losses: float, pause: float
) -> None:
    """Requests late by up to 40 s or unanswered, processes that stop and go on, end, hand back and are started anew,
    clocks that agree on nothing but the length of a second: whenever somebody leads, nobody else may write."""

    async def scenario() -> int:
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        server = Server(lambda: rng.uniform(0.001, slowest), lambda: rng.random() < losses)
        living: dict[str, Election] = {}
        leaders: set[str] = set()
        beside: list[str] = []

        def alone(_: str = "") -> None:
            writers = [name for name, one in living.items() if one.seconds_left() > 0]
            leaders.update(writers)
            if len(writers) > 1:
                beside.append(f"{writers} at {loop.time():.3f}: {server.writes[-4:]}")

        server.on_write = alone

        async def live(name: str) -> None:
            for life in range(40):
                one = election(server, f"{name}-{life // 3}", offset=rng.uniform(-1e6, 1e6))
                one.sleep = Pauses(rng, pause).sleep
                living[name] = one
                task = asyncio.create_task(until_lost(one))
                await asyncio.wait([task], timeout=rng.uniform(5, 200))
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
                    if rng.random() < 0.5:
                        await one.release()
                del living[name]  # a process that has ended writes nothing
                await asyncio.sleep(rng.uniform(0, 5))

        async def look() -> None:
            while True:
                alone()
                await asyncio.sleep(0.5)

        looking = asyncio.create_task(look())
        await asyncio.wait([asyncio.create_task(live(f"p{n}")) for n in range(processes)], timeout=600)
        looking.cancel()
        assert beside == []
        return len(leaders)

    led = run_in_virtual_time(scenario())
    assert led or slowest >= 8.0 or losses >= 0.5
