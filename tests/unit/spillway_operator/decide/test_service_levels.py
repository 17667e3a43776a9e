"""What a status change counts, once; and what the statuses of all jobs say at a scrape."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from cases.job_documents import document
from harness.cluster_model import EPOCH_START, KEY, UID, World, fail, place, rounds, running, timestamp
from harness.observations import job_object, observed
from spillway import metrics
from spillway.api.progress import ProgressReport
from spillway.api.status import TrainingJobStatus
from spillway_operator.decide.case import Case
from spillway_operator.decide.observed import JobObject
from spillway_operator.decide.service_levels import FAILED_SECONDS, MOST_JOBS, counts, fleet_of
from spillway_operator.progress.outbox import Received

NOW = EPOCH_START + 1000.0
PROBLEM, ENDED = metrics.OPERATOR_JOB_PROBLEM, metrics.OPERATOR_JOB_ENDED_ATTEMPTS


def post(world: World, step: int, attempt: int = 1, checkpoint: int | None = None, rate: float = 10.0) -> None:
    """A report, which the next look writes."""
    own: dict[str, Any] = {"epoch": attempt, "step": step, "steps": 100, "stepSeconds": 2.0, "tokensPerSecond": rate,
                           "lastStepTime": EPOCH_START + world.server.now}  # fmt: skip
    if checkpoint is not None:
        own["checkpoint"] = {"step": checkpoint, "epoch": attempt, "time": EPOCH_START + world.server.now}
    report = ProgressReport.model_validate({"spillway": own})
    received, now = Received(report, UID, attempt, timestamp(world.server.now)), time.monotonic() + world.server.now
    world.operator.outbox.put(KEY, received, now)
    world.operator.outbox.release(now)
    world.look()


def counted(world: World, name: str, label: str = "") -> float:
    return sum(world.operator.counted.get((name, label), ()))


def test_a_life_counts_waits_steps_and_ends_once_and_the_status_says_the_same() -> None:
    world = running(num_nodes=2)
    assert len(world.operator.counted["queue_wait_seconds", ""]) == 1
    world.advance(30)
    post(world, 0, rate=0.0)
    assert ("first_step_seconds", "") not in world.operator.counted, "no step is trained yet"
    world.advance(5)
    post(world, 3)
    (first,) = world.operator.counted["first_step_seconds", ""]
    assert 35 <= first <= 39
    world.advance(40)
    post(world, 20, checkpoint=20)
    world.advance(10)
    post(world, 25)
    assert counted(world, "device_seconds_total", "committed") == 2 * 20 * 2.0
    fail(world, 1)
    assert counted(world, "attempts_ended_total", "RankCrashed") == 1
    assert counted(world, "device_seconds_total", "held") == 2 * world.status["attempts"]["activeSeconds"]
    post(world, 20, attempt=2, rate=0.0)
    post(world, 20, attempt=2, rate=0.0)
    assert counted(world, "lost_steps_total", "RankCrashed") == 5
    world.suspend(True)
    rounds(world, 6)
    assert world.status["state"] == "Suspended"
    assert counted(world, "attempts_ended_total", "Suspended") == 1
    world.suspend(False)
    rounds(world, 4)
    for pod in world.pods(world.attempts()[-1]):
        world.end_pod(pod, 0)
    rounds(world)
    assert world.status["state"] == "Complete"
    assert counted(world, "attempts_ended_total", "Completed") == 1
    assert len(world.operator.counted["queue_wait_seconds", ""]) == 3
    known = world.status["attempts"]
    ends = sum(sum(values) for (name, _), values in world.operator.counted.items() if name == "attempts_ended_total")
    assert (known["total"], known["restarts"]) == (ends, 1)


def test_a_new_operator_counts_from_zero_and_nothing_of_what_was_written_before() -> None:
    world = running()
    post(world, 10, checkpoint=10)
    fail(world, 1)
    world.restart_operator()
    rounds(world)
    assert world.operator.counted == {}
    post(world, 10, attempt=2)
    assert counted(world, "attempts_ended_total", "RankCrashed") == 0


def test_restoring_a_status_that_was_wiped_counts_nothing() -> None:
    world = running()
    world.advance(60)
    post(world, 20, checkpoint=20)
    before = {key: list(values) for key, values in world.operator.counted.items()}
    job = world.job
    job["status"] = {}
    world.server.put("trainingjobs", job)
    rounds(world)
    assert world.status["attempts"]["total"] == 1
    assert world.operator.counted == before


def test_committed_seconds_are_at_most_the_time_that_passed_and_no_step_counts_twice() -> None:
    world = running()
    world.advance(10)
    post(world, 50, checkpoint=50)  # 50 steps of 2 s are not what happened in these seconds
    first = counted(world, "device_seconds_total", "committed")
    assert 10 <= first <= 14
    fail(world, 1)
    world.advance(20)
    post(world, 45, attempt=2, checkpoint=45)
    assert counted(world, "device_seconds_total", "committed") == first
    world.advance(60)
    post(world, 55, attempt=2, checkpoint=55)
    assert counted(world, "device_seconds_total", "committed") - first == (55 - 45) * 2.0


def test_a_ladder_step_counts_with_the_attempt_that_has_the_new_plan() -> None:
    world = running(max_restarts=0)
    fail(world, 70, rounds_after=6)
    assert world.status["attempts"]["total"] == 2
    assert counted(world, "ladder_steps_total", "DeviceOutOfMemory") == 1
    assert counted(world, "attempts_ended_total", "DeviceOutOfMemory") == 1
    advised = running(memory={"mode": "Advise"})
    fail(advised, 70, rounds_after=6)
    assert advised.status["state"] == "Failed"
    assert ("ladder_steps_total", "DeviceOutOfMemory") not in advised.operator.counted


# --- one change ------------------------------------------------------------------------------------------------------


def change(
    before: dict[str, Any], after: dict[str, Any], step_seconds: float = 0.0, **spec: Any
) -> dict[tuple[str, str], float]:
    """What one change of a status counts."""
    own = {"epoch": 1, "step": 1, "steps": 9, "stepSeconds": step_seconds}
    first, second = TrainingJobStatus.model_validate(before), TrainingJobStatus.model_validate(after)
    seen = replace(observed(), progress=ProgressReport.model_validate({"spillway": own}))
    found = counts(Case(seen, timestamp(1000), {**document()["spec"], **spec}, first, second, place), second)
    keys = [(one.metric.name.removeprefix("spillway_operator_"), one.label) for one in found]
    assert len(set(keys)) == len(keys), "counted twice"
    return dict(zip(keys, (one.value for one in found), strict=True))


def attempts(total: int = 1, ended: int = 0, **more: Any) -> dict[str, Any]:
    return {"attempts": {"total": total, "ended": ended, **more}}


def progress(step: int, at: float | None = None, rate: str = "") -> dict[str, Any]:
    known = {} if at is None else {"lastStepTime": timestamp(at), "advanceTime": timestamp(at)}
    return {"progress": {"step": step, "steps": 100, "tokensPerSecond": rate, **known}}


def checkpoint(step: int, at: float, epoch: int = 1) -> dict[str, Any]:
    return {"checkpoint": {"step": step, "epoch": epoch, "time": timestamp(at)}}


def escalations(*changes: str) -> dict[str, Any]:
    return {
        "escalations": [
            {"attempt": n, "reason": "OOMKilled", "change": text} for n, text in enumerate(changes, start=1)
        ]
    }


ACTIVE = {"activeTime": timestamp(100)}
LOST, STARTED = attempts(2, 1, lastReason="NodeLost"), attempts(startTime=timestamp(90))
HELD, COMMITTED = ("device_seconds_total", "held"), ("device_seconds_total", "committed")


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        (attempts(ended=0), attempts(ended=1, endTime=timestamp(5), lastReason="NodeLost"),
         {("attempts_ended_total", "NodeLost"): 1}),
        (attempts(ended=0), attempts(ended=1, endTime=timestamp(5), lastReason="OfALaterVersion"),
         {("attempts_ended_total", "RankCrashed"): 1}),
        # a contract that never ran is void after a suspension
        (attempts(1, 1, endTime=timestamp(5)), attempts(2, 2, endTime=timestamp(5)), {}),
        (attempts(1, 1) | escalations("a", ""), attempts(2, 1) | escalations("a", "b"),
         {("ladder_steps_total", "OOMKilled"): 1}),
        (attempts(1, 1) | escalations(""), attempts(1, 1) | escalations("mode Auto would"), {}),
        (attempts(pendingTime=timestamp(10)), attempts(activeTime=timestamp(35)), {("queue_wait_seconds", ""): 25.0}),
        (attempts(pendingTime=timestamp(10)), attempts(activeTime=timestamp(10)), {("queue_wait_seconds", ""): 0.0}),
        (LOST | progress(50), LOST | progress(40, 500),
         {("lost_steps_total", "NodeLost"): 10}),
        # early stopping lowered the steps of a running attempt
        (attempts() | progress(50, 400), attempts() | progress(40, 500), {}),
        (attempts(**ACTIVE) | progress(0, 150), attempts(**ACTIVE) | progress(1, 160, "9"),
         {("first_step_seconds", ""): 60.0, HELD: 10.0}),
        (attempts(**ACTIVE) | progress(1, 160, "9"), attempts(**ACTIVE) | progress(2, 170, "9"), {HELD: 10.0}),
        (STARTED | progress(0, 150), STARTED | progress(1, 160, "9"),
         {("first_step_seconds", ""): 70.0}),
        # an attempt ends 15 s after its newest step; 300 s are earlier attempts'
        (attempts(activeSeconds=300, **ACTIVE) | progress(9, 185), attempts(activeSeconds=400) | progress(9, 185),
         {HELD: 15.0}),
    ],
)  # fmt: skip
def test_a_change_counts(before: dict[str, Any], after: dict[str, Any], counted: dict[tuple[str, str], float]) -> None:
    assert change(before, after) == counted


@pytest.mark.parametrize(
    ("before", "after", "step_seconds", "seconds"),
    [
        ({}, checkpoint(20, 400), 2.0, 40.0),
        ({}, checkpoint(20, 130), 2.0, 30.0),  # no more than passed since the pods run
        ({}, checkpoint(20, 130), 0.0, 30.0),  # the report does not say how long a step takes
        (checkpoint(20, 150), checkpoint(30, 160), 2.0, 10.0),  # nor since the last checkpoint
        (checkpoint(20, 150), checkpoint(30, 190), 2.0, 20.0),
        (checkpoint(20, 50), checkpoint(30, 110, epoch=2), 2.0, 10.0),  # of another attempt: since its own pods run
        (checkpoint(20, 50), checkpoint(20, 190, epoch=2), 0.0, 0.0),  # written again
        (checkpoint(20, 50), checkpoint(10, 190, epoch=2), 2.0, 0.0),  # an older one was resumed
    ],
)
def test_committed_seconds(before: dict[str, Any], after: dict[str, Any], step_seconds: float, seconds: float) -> None:
    now = attempts(**ACTIVE)
    assert change(now | before, now | after, step_seconds).get(COMMITTED, 0.0) == seconds
    four = {"nodes": 2, "devicesPerNode": 2}
    assert change(now | before, now | after, step_seconds, parallelism=four).get(COMMITTED, 0.0) == 4 * seconds
    members = [{"name": "a"}, {"name": "b"}]
    assert change(now | before, now | after, step_seconds, members=members) == {}, "steps of members do not add up"


# --- at a scrape ------------------------------------------------------------------------------------------------------


def job(name: str = "demo", spec: dict[str, Any] | None = None, **status: Any) -> JobObject:
    found = job_object(None, status)
    return replace(found, name=name, spec=json.dumps(spec or document()["spec"]).encode())


def conditions(*found: tuple[str, str, str], since: float = 0.0) -> list[dict[str, str]]:
    names = ("type", "status", "reason")
    return [dict(zip(names, one, strict=True)) | {"lastTransitionTime": timestamp(since)} for one in found]


RUNNING = (("Accepted", "True", "Valid"), ("Planned", "True", "Planned"), ("Scheduled", "True", "Scheduled"),
           ("Running", "True", "Running"))  # fmt: skip


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([("Accepted", "False", "InvalidSpec")], {("Accepted", "InvalidSpec"): 900.0}),
        ([("Accepted", "True", "Valid"), ("Planned", "False", "DoesNotFit")], {("Planned", "DoesNotFit"): 900.0}),
        ([*RUNNING[:2], ("Scheduled", "False", "Unschedulable")], {("Scheduled", "Unschedulable"): 900.0}),
        ([*RUNNING[:2], ("Scheduled", "False", "NoAttempt"), ("Running", "False", "Restarting")],
         {("Running", "Restarting"): 900.0}),
        ([*RUNNING, ("Progressing", "Unknown", "NoReport")], {("Progressing", "NoReport"): 1000.0}),
        ([*RUNNING, ("Progressing", "True", "Stepping")], {}),
        ([("Suspended", "True", "SuspendedByUser"), ("Running", "False", "Suspended")], {}),
        ([("Complete", "True", "Completed"), ("Running", "False", "Ended")], {}),
        ([("Accepted", "True", "Valid"), ("Failed", "True", "UserError")], {("Failed", "UserError"): 1000.0}),
        ([], {}),
    ],
)  # fmt: skip
def test_a_problem_is_the_first_condition_that_a_wanted_job_does_not_meet(
    found: list[tuple[str, str, str]], problem: dict[tuple[str, str], float]
) -> None:
    one = job(conditions=conditions(*found), attempts={"pendingTime": timestamp(100)})
    expected = {(*one.key, *labels): seconds for labels, seconds in problem.items()}
    assert fleet_of([one], NOW)[PROBLEM] == expected


def test_a_trainer_is_not_heard_since_its_pods_run_and_not_since_its_attempt_waits_for_them() -> None:
    late = job(
        conditions=conditions(*RUNNING, ("Progressing", "Unknown", "Waiting")), attempts={"activeTime": timestamp(990)}
    )
    assert fleet_of([late], NOW)[PROBLEM] == {(*late.key, "Progressing", "Waiting"): 10.0}


def test_a_failed_job_is_a_problem_for_a_day() -> None:
    failed = job(conditions=conditions(("Failed", "True", "UserError")))
    assert fleet_of([failed], EPOCH_START + FAILED_SECONDS - 1)[PROBLEM]
    assert not fleet_of([failed], EPOCH_START + FAILED_SECONDS)[PROBLEM]


def test_jobs_with_series_are_bounded_failed_ones_first_then_the_longest_waits() -> None:
    waits = [job(f"w{n}", conditions=conditions(("Planned", "False", "NoNode"), since=n)) for n in range(MOST_JOBS)]
    failed = job("failed", conditions=conditions(("Failed", "True", "UserError"), since=999))
    restarted = [job(f"w{n}", attempts={"restarts": n}) for n in range(MOST_JOBS + 2)]
    found = fleet_of([*waits, failed, *restarted], NOW)
    assert len(found[PROBLEM]) == MOST_JOBS
    names = {key[1] for key in found[PROBLEM]}
    assert "failed" in names
    assert f"w{MOST_JOBS - 1}" not in names, "the one that waits shortest"
    assert len(found[ENDED]) == MOST_JOBS * 3
    assert found[ENDED]["team", f"w{MOST_JOBS + 1}", "restart"] == MOST_JOBS + 1
    assert ("team", "w1", "restart") not in found[ENDED]


def test_waste_is_of_all_ranks_of_running_jobs_that_have_reported() -> None:
    spec = document()["spec"] | {"parallelism": {"nodes": 2, "devicesPerNode": 4}}
    plan, peak = {"bytes": {"device": "100Ki", "host": "50"}}, {"peak": {"device": "61440", "host": "70Mi"}}
    now = conditions(*RUNNING)
    runs = job(spec=spec, state="Running", conditions=now, plan=plan, memory=peak)
    silent = job("silent", spec=spec, state="Running", conditions=now, plan=plan)
    ended = job(
        "ended", state="Complete", conditions=conditions(("Complete", "True", "Completed")), plan=plan, memory=peak
    )
    found = fleet_of([runs, silent, ended], NOW)
    assert found[metrics.OPERATOR_WASTED_BYTES] == {("team", "device"): 8 * 40 * 1024, ("team", "host"): 0}
    assert found[metrics.OPERATOR_JOBS] == {("team", "Running"): 2, ("team", "Complete"): 1}


def test_a_status_of_anybody_is_survived() -> None:
    strange = job(attempts={"restarts": "3", "pendingTime": 7}, memory=[], conditions=[{"type": "Running"}], plan=None)
    assert fleet_of([strange, job()], NOW)[ENDED]["team", "demo", "restart"] == 0
