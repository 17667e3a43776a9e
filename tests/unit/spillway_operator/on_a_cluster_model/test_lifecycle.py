"""spec.lifecycle and the life of children: deadlines, stalls, the time to live, counts, changes, and hands of others.

On the model of a cluster with the operator's real shell (cluster_model.py), or on single observations.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.cluster_model import (
    EPOCH_START,
    GRACE,
    Fault,
    World,
    fail,
    place,
    rounds,
    running,
    seconds_of,
    termination,
    timestamp,
    writes,
)
from harness.observations import NOW, attempt, condition, decide, observed
from spillway_operator.decide.observed import Contract, PodObject
from spillway_operator.decide.reconcile import case_of


def course(world: World, seconds: float, every: float = 5.0) -> None:
    """The ordinary course for so long."""
    for _ in range(int(seconds / every)):
        rounds(world, 1, every)


def attempts_of(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.status["attempts"]
    return found


# --- the active deadline ----------------------------------------------------------------------------------------------


def test_active_deadline_ends_the_job_after_its_attempt_checkpointed() -> None:
    world = running(lifecycle={"activeDeadlineSeconds": 60})
    before = len(writes(world))
    assert world.operator.due is not None and world.operator.due - world.server.now <= 60
    world.advance(60)
    world.operator.deliver_all()
    world.look()
    assert world.condition("Running") | {"status": "True", "reason": "DeadlineExceeded"} == world.condition("Running")
    assert world.attempts()[0]["metadata"]["deletionTimestamp"]
    assert not world.is_over(), "its pods still write the checkpoint"
    rounds(world)
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "DeadlineExceeded")
    assert failed["message"].startswith(
        "lifecycle.activeDeadlineSeconds = 60 is exceeded: the attempts of the job ran for 6"
    )
    assert not world.attempts() and not world.pods()
    assert attempts_of(world)["lastReason"] == "DeadlineExceeded"
    assert attempts_of(world)["restarts"] == attempts_of(world)["disruptions"] == 0
    assert writes(world)[before:] == ["patch trainingjobs", "delete jobs", "patch trainingjobs"]


def test_active_seconds_span_restarts_and_suspensions_but_exclude_waiting() -> None:
    world = World(queue="team-a", max_restarts=9, lifecycle={"activeDeadlineSeconds": 300})
    rounds(world)
    world.advance(1000)  # queued
    world.admit(world.attempts()[-1])
    rounds(world)
    course(world, 90)
    fail(world, 1, rounds_after=2)
    first = attempts_of(world)["activeSeconds"]
    assert 90 <= first <= 105
    world.advance(1000)  # queued again
    world.admit(world.attempts()[-1])
    rounds(world)
    course(world, 90)
    world.suspend(True)
    rounds(world)
    second = attempts_of(world)["activeSeconds"]
    assert 180 <= second <= 220
    world.advance(1000)  # suspended
    world.suspend(False)
    rounds(world)
    world.admit(world.attempts()[-1])
    course(world, 60)
    assert world.status["state"] == "Running"
    course(world, 90)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert 300 <= attempts_of(world)["activeSeconds"] <= 320


def test_a_deadline_is_raised_lowered_and_lifted_while_the_attempt_runs() -> None:
    world = running(lifecycle={"activeDeadlineSeconds": 60})
    world.edit(lifecycle={"activeDeadlineSeconds": 600})
    course(world, 120)
    world.edit(lifecycle={"activeDeadlineSeconds": 0})
    course(world, 600)
    assert (world.status["state"], attempts_of(world)["total"]) == ("Running", 1)
    world.edit(lifecycle={"activeDeadlineSeconds": 500})
    rounds(world)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert attempts_of(world)["total"] == 1


@pytest.mark.parametrize("writes_before", [0, 1, 2])
@pytest.mark.parametrize("landed", [True, False])
def test_a_deadline_that_a_crash_cut_short_is_carried_out(writes_before: int, landed: bool) -> None:
    world = running(lifecycle={"activeDeadlineSeconds": 60})
    world.advance(60)
    world.look(Fault(writes_before, landed, dies=True))
    rounds(world, 4)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert attempts_of(world)["total"] == 1


def test_a_job_that_ran_out_of_time_while_suspended_starts_no_attempt() -> None:
    world = running()
    course(world, 60)
    world.suspend(True)
    rounds(world)
    world.edit(lifecycle={"activeDeadlineSeconds": 30})
    rounds(world)
    assert world.status["state"] == "Suspended"
    world.suspend(False)
    rounds(world)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert attempts_of(world)["total"] == 1


def test_a_job_that_trains_its_last_step_in_the_grace_period_is_complete() -> None:
    world = running(lifecycle={"activeDeadlineSeconds": 60})
    world.advance(60)
    world.look()
    world.end_pod(world.pods()[0], 0)
    job = world.attempts()[0]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    world.server.put("jobs", job)
    rounds(world)
    assert world.status["state"] == "Complete"


def test_a_job_that_stopped_early_is_complete_at_that_step() -> None:
    world = World()
    world.edit(training={"earlyStopping": {"patience": 3}}, data={"evaluation": {}})
    rounds(world)
    world.end_pod(world.pods()[0], 0, termination(0, "stopped early at step 7", step=7))
    rounds(world)
    assert [world.status["progress"][name] for name in ("step", "steps", "display")] == [7, 7, "100%"]
    assert world.condition("Complete")["message"] == "7 steps in 1 attempt; stopped early at step 7"


def test_a_job_by_epochs_has_as_many_steps_as_its_trainer_says() -> None:
    world = World()
    world.edit(training={"epochs": 2, "steps": None})
    rounds(world)
    world.report(40)
    rounds(world)
    assert [world.status["progress"][name] for name in ("step", "steps", "display")] == [40, 100, "40%"]
    world.end_pod(world.pods()[0], 0, termination(0, "trained to step 100", step=100))
    rounds(world)
    assert world.condition("Complete")["message"] == "100 steps in 1 attempt"
    assert world.status["progress"]["step"] == 100


def test_what_ran_while_no_operator_looked_counts_by_what_the_pods_say() -> None:
    world = World(max_restarts=9)
    rounds(world, 1, 0)
    world.start_pods()
    world.advance(500)
    world.end_pod(world.pods()[0], 1)
    world.control()
    world.control()
    world.advance(5000)
    rounds(world, 1)
    assert attempts_of(world)["activeSeconds"] == 500


@pytest.mark.parametrize("active_time", ["garbage", "2027-01-01T00:00:00Z"])
def test_a_time_that_cannot_be_ends_no_job(active_time: str) -> None:
    status = {"attempts": {"total": 1, "activeTime": active_time}}
    seen = observed({"spec.lifecycle": {"activeDeadlineSeconds": 60}}, status, attempts=(attempt(ready=1),))
    assert condition(decide(seen), "Running")["reason"] == "Running"


# --- the pending deadline ---------------------------------------------------------------------------------------------


def test_pending_deadline_fails_the_job_and_says_what_was_in_the_way() -> None:
    world = World(lifecycle={"pendingDeadlineSeconds": 60})
    world.server.rejects = {"jobs"}
    course(world, 50)
    assert not world.is_over()
    course(world, 30)
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "PendingDeadlineExceeded")
    assert "lifecycle.pendingDeadlineSeconds = 60 is exceeded: the job waited 6" in failed["message"]
    assert "exceeded quota" in failed["message"]


def test_a_pending_deadline_withdraws_an_attempt_that_waits_in_a_queue() -> None:
    world = World(queue="team-a", lifecycle={"pendingDeadlineSeconds": 60})
    course(world, 80)
    assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
    assert "waiting for quota in the queue team-a" in world.condition("Failed")["message"]
    assert not world.attempts()
    assert attempts_of(world)["activeSeconds"] == 0


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ({"unschedulable": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}, "3 Insufficient nvidia.com/gpu"),
        ({"node": "node-0", "waiting": "ImagePullBackOff: not found"}, "ImagePullBackOff: not found"),
        (None, "has no pods yet"),
    ],
)
def test_a_pending_deadline_ends_an_attempt_whose_pods_never_ran(pod: dict[str, str] | None, said: str) -> None:
    pods = () if pod is None else (PodObject("demo-1-0-x", "p", 0, phase="Pending", **{"node": "", **pod}),)
    status = {"attempts": {"total": 1, "pendingTime": "2026-11-21T09:59:00Z"}}
    seen = observed(
        {"spec.lifecycle": {"pendingDeadlineSeconds": 60}}, status, attempts=(attempt(active=1),), pods=pods
    )
    ended = condition(decide(seen), "Running")
    assert (ended["status"], ended["reason"]) == ("False", "PendingDeadlineExceeded")
    assert said in ended["message"]


def test_a_rejected_spec_waits_no_longer_than_the_pending_deadline() -> None:
    world = World(lifecycle={"pendingDeadlineSeconds": 60})
    world.edit(checkpoint={"resume": "Never"})
    course(world, 80, every=10)
    assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
    assert "spec.checkpoint.resume" in world.condition("Failed")["message"]


def test_suspended_time_and_pauses_between_restarts_are_not_waiting() -> None:
    world = World(max_restarts=50, lifecycle={"pendingDeadlineSeconds": 60})
    world.suspend(True)
    course(world, 200, every=20)
    world.suspend(False)
    rounds(world)
    for _ in range(9):  # the pauses grow to minutes
        for _ in range(400):
            if world.status["state"] == "Running":
                break
            rounds(world, 1)
        fail(world, 1, rounds_after=2)
        assert not world.is_over(), world.condition("Failed")
    assert attempts_of(world)["shortInARow"] >= 9


def test_a_resumed_job_has_its_whole_time_to_wait() -> None:
    world = World(queue="team-a", lifecycle={"pendingDeadlineSeconds": 60})
    for _ in range(3):
        course(world, 40)
        world.suspend(True)
        course(world, 40)
        assert "pendingTime" not in attempts_of(world)
        world.suspend(False)
    course(world, 50)
    assert world.status["state"] == "Queued"
    course(world, 20)
    assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"


def test_every_wait_begins_anew_once_an_attempt_ran() -> None:
    world = World(queue="team-a", max_restarts=9, lifecycle={"pendingDeadlineSeconds": 60})
    for _ in range(4):
        course(world, 40)
        world.admit(world.attempts()[-1])
        course(world, 30)
        assert world.status["state"] == "Running"
        assert "pendingTime" not in attempts_of(world)
        fail(world, 1, rounds_after=2)
    course(world, 80)
    assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"


# --- the stall --------------------------------------------------------------------------------------------------------


def test_attempt_without_a_step_for_stall_seconds_counts_as_a_restart() -> None:
    world = running(lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    course(world, 50)
    assert attempts_of(world)["total"] == 1
    course(world, 30)
    assert attempts_of(world)["total"] == 2
    assert (attempts_of(world)["lastReason"], attempts_of(world)["restarts"]) == ("NoProgress", 1)
    assert attempts_of(world)["disruptions"] == 0
    restart = next(note for note in world.operator.notes if note.action == "Restart")
    assert (restart.type, restart.reason) == ("Warning", "NoProgress")
    said = next(note for note in world.operator.notes if note.action == "Run" and note.reason == "NoProgress")
    assert said.type == "Warning", "though every pod runs"
    assert "no step after step 42 for 6" in restart.note
    assert "lifecycle.stallSeconds = 60" in restart.note


def test_stalls_end_with_the_budget_of_restarts() -> None:
    world = running(max_restarts=1, lifecycle={"stallSeconds": 60})
    world.report(42)
    course(world, 300)
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "NoProgress")
    assert failed["message"].startswith("no step after step 42 for 6")
    assert failed["message"].endswith("; no restart is left (lifecycle.maxRestarts = 1)")


def test_the_earlier_reason_stalled_is_read_from_a_stored_status() -> None:
    """It is also a condition type of kstatus, so the reason has another name now."""
    running = {"type": "Running", "status": "True", "reason": "Stalled", "message": "no step"}
    ending = {"attempts": {"total": 1}, "conditions": [running]}
    (deleted,) = decide(observed(None, ending, attempts=(attempt(ready=1),))).deletes
    assert deleted.name == attempt().name
    ended = {"attempts": {"total": 2, "ended": 2, "lastReason": "Stalled", "lastNode": "a"}}
    assert case_of(observed(None, ended), NOW, place).attempts.last_reason == "NoProgress"


def test_progress_is_a_new_step_not_a_post() -> None:
    world = running(lifecycle={"stallSeconds": 60})
    for _ in range(20):
        world.report(42)
        rounds(world, 1, 5)
    assert attempts_of(world)["lastReason"] == "NoProgress"


@pytest.mark.parametrize("behind", [-100_000.0, 100_000.0])
def test_a_nodes_wrong_clock_makes_and_hides_no_stall(behind: float) -> None:
    world = running(lifecycle={"stallSeconds": 60})
    for step in range(1, 40):
        world.report(step, behind=behind)
        rounds(world, 1, 5)
    assert attempts_of(world)["total"] == 1
    course(world, 80)
    assert attempts_of(world)["lastReason"] == "NoProgress"


def test_the_newest_report_is_asked_before_an_attempt_is_ended() -> None:
    """Reports are written four times a minute at most; a step that waits for its turn is a step."""
    world = running(lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    world.advance(70)
    world.report(43, release=False)
    rounds(world)
    assert attempts_of(world)["total"] == 1
    assert world.condition("Progressing")["reason"] == "Stepping"


def test_a_job_that_was_never_heard_is_not_stalled_but_said_to_be_unheard() -> None:
    """A trainer that hangs from its start and one that cannot reach the operator look the same."""
    world = running(lifecycle={"stallSeconds": 60})
    course(world, 600, every=20)
    assert attempts_of(world)["total"] == 1
    said = world.condition("Progressing")
    assert (said["status"], said["reason"]) == ("Unknown", "NoReport")
    assert "cannot reach the operator" in said["message"]
    before = len(writes(world))
    course(world, 600, every=20)
    assert len(writes(world)) == before


def test_silent_attempt_counts_as_stalled_if_an_earlier_one_reported() -> None:
    world = running(max_restarts=9, lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    fail(world, 1)
    course(world, 40)
    assert attempts_of(world)["total"] == 2
    course(world, 40)
    assert (attempts_of(world)["total"], attempts_of(world)["lastReason"]) == (3, "NoProgress")


def test_silence_while_the_operator_could_not_hear_is_no_stall() -> None:
    world = running(lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    world.advance(3600)
    world.restart_operator()
    rounds(world)
    assert attempts_of(world)["total"] == 1
    course(world, 40)
    assert attempts_of(world)["total"] == 1
    course(world, 40)
    assert attempts_of(world)["lastReason"] == "NoProgress"


def test_without_a_progress_endpoint_nothing_stalls() -> None:
    status = {
        "attempts": {"total": 1, "activeTime": "2026-11-20T10:00:00Z"},
        "progress": {"step": 4, "lastStepTime": "2026-11-20T10:00:00Z", "advanceTime": "2026-11-20T10:00:00Z"},
        "conditions": [
            {"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": "2026-11-20T10:00:00Z"}
        ],
    }
    for hearing, reason in ((None, "Running"), (10.0, "Running"), (86_000.0, "NoProgress")):
        seen = observed(None, status, attempts=(attempt(ready=1),), hearing_seconds=hearing)
        assert condition(decide(seen), "Running")["reason"] == reason


def test_steps_whose_time_nobody_kept_are_no_stall() -> None:
    """An older CRD drops progress.advanceTime, and an older operator did not write it."""
    running = {"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    status = {
        "attempts": {"total": 1, "activeTime": "2026-11-20T10:00:00Z"}, "conditions": [running],
        "progress": {"step": 4, "lastStepTime": "2026-11-21T10:00:00Z"},
    }  # fmt: skip
    seen = observed(None, status, attempts=(attempt(ready=1),), hearing_seconds=1e6)
    assert condition(decide(seen), "Running")["reason"] == "Running"


def test_where_nobody_is_heard_nobody_is_ended() -> None:
    """A certificate that no pod trusts, or a Service that leads nowhere, must not end every job of the cluster."""
    running = {"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    status = {
        "attempts": {"total": 1, "activeTime": "2026-11-20T10:00:00Z"},
        "progress": {"step": 4, "lastStepTime": "2026-11-20T10:00:00Z", "advanceTime": "2026-11-21T09:00:00Z"},
        "conditions": [running],
    }
    for others, reason in (
        (float("inf"), "Running"),
        (3700.0, "Running"),
        (3600.0, "NoProgress"),
        (None, "NoProgress"),
    ):
        seen = observed(None, status, attempts=(attempt(ready=1),), hearing_seconds=1e6, others_silent_seconds=others)
        desired = decide(seen)
        assert condition(desired, "Running")["reason"] == reason, others
        if reason == "Running":
            assert condition(desired, "Progressing")["message"].startswith(
                "no job reports steps, so the operator itself"
            )
            assert desired.look_again_seconds == 30


@pytest.mark.parametrize(
    ("stall_seconds", "step_seconds", "ends_after"),
    [(60, "1500", 4500), (60, "1", 60), (1, "0.1", 15), (1800, "nan", 1800)],
)
def test_a_step_that_should_take_longer_than_stall_seconds_is_no_stall(
    stall_seconds: int, step_seconds: str, ends_after: int
) -> None:
    began = 1_795_255_200  # 2026-11-21T10:00:00Z
    at = lambda seconds: timestamp(began - EPOCH_START + seconds)  # noqa: E731
    status = {
        "attempts": {"total": 1, "activeTime": at(0)}, "plan": {"stepSeconds": step_seconds},
        "progress": {"step": 4, "lastStepTime": at(0), "advanceTime": at(0)},
    }  # fmt: skip
    for seconds, reason in ((ends_after - 1, "Running"), (ends_after, "NoProgress")):
        status["conditions"] = [{"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": at(0)}]
        seen = observed(
            {"spec.lifecycle": {"stallSeconds": stall_seconds}}, status, attempts=(attempt(ready=1),),
            hearing_seconds=1e6,
        )  # fmt: skip
        assert condition(decide(seen, at(seconds)), "Running")["reason"] == reason


def test_a_stall_is_judged_only_while_all_pods_run() -> None:
    """A node that does not answer is a lost node, which costs no restart."""
    world = running(num_nodes=2, lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    world.lose_node(world.pods()[1])
    for _ in range(40):
        rounds(world, 1, seconds=20)
        if attempts_of(world)["total"] == 2:
            break
    known = attempts_of(world)
    assert (known["lastReason"], known["lastNode"], known["restarts"]) == ("NodeLost", "node-1", 0)
    restart = next(note.note for note in world.operator.notes if note.action == "Restart")
    assert restart.endswith(" on node-1: did not end within its grace period, so its node counts as lost")


def test_a_suspension_in_the_grace_period_of_a_stall_is_a_suspension() -> None:
    world = running(lifecycle={"stallSeconds": 60})
    world.report(42)
    rounds(world, 1)
    world.advance(70)
    world.look()
    world.suspend(True)
    rounds(world)
    assert world.status["state"] == "Suspended"
    assert (attempts_of(world)["restarts"], attempts_of(world)["lastReason"]) == (0, "Suspended")


def test_zero_means_never() -> None:
    world = running(lifecycle={"stallSeconds": 0})
    world.report(42)
    rounds(world, 1)
    course(world, 40_000, every=1000)
    assert (attempts_of(world)["total"], world.status["state"]) == (1, "Running")


# --- the time to live -------------------------------------------------------------------------------------------------


def complete(**lifecycle: int) -> World:
    world = running(lifecycle=lifecycle)
    world.end_pod(world.pods()[0], 0)
    rounds(world)
    return world


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    world = complete(ttlSecondsAfterFinished=600)
    assert world.status["state"] == "Complete"
    left = seconds_of(world.status["completionTime"]) + 600 - world.server.now
    assert world.operator.due == world.server.now + left
    world.advance(left - 1)
    rounds(world, 1, 0)
    assert not world.is_gone
    world.advance(1)
    rounds(world)
    assert world.is_gone and not world.server.objects
    assert writes(world)[-1] == "delete trainingjobs"


def test_failed_job_with_a_ttl_of_zero_is_deleted_at_once() -> None:
    world = running(lifecycle={"ttlSecondsAfterFinished": 0})
    world.end_pod(world.pods()[0], 64, termination(64, "wrong"))
    rounds(world, 4)
    assert world.is_gone


def test_finished_job_never_runs_again_after_its_ttl_or_a_restart() -> None:
    """Kubeflow Trainer ran a finished job again when the child's own time to live had taken its record away."""
    world = complete()
    created = writes(world).count("create jobs")
    world.delete_attempt(world.attempts()[0], foreground=False)
    world.restart_operator()
    course(world, 600, every=30)
    for found in list(world.server.all("configmaps")):
        world.server.take("configmaps", found["metadata"]["name"])
    world.restart_operator()
    rounds(world)
    assert world.status["state"] == "Complete"
    world.edit(lifecycle={"ttlSecondsAfterFinished": 60})
    stale = world.operator
    rounds(world)
    assert world.is_gone
    world.operator = stale  # whose watch has not told it
    world.look()
    world.restart_operator()
    rounds(world)
    assert writes(world).count("create jobs") == created
    assert world.is_gone and not world.server.objects


def test_no_clock_and_no_forged_time_deletes_a_job_early() -> None:
    lifecycle = {"spec.lifecycle": {"ttlSecondsAfterFinished": 600}}
    ended = {"type": "Complete", "status": "True", "reason": "Completed", "lastTransitionTime": "2026-11-21T10:00:00Z"}
    for completion, transition, now, deleted in (
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z", "2026-11-21T10:09:59Z", False),
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z", "2026-11-21T10:10:00Z", True),
        ("2000-01-01T00:00:00Z", "2026-11-21T10:00:00Z", "2026-11-21T10:09:00Z", False),
        ("2000-01-01T00:00:00Z", "2000-01-01T00:00:00Z", "2026-11-21T10:09:00Z", False),  # older than the job
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z", "2026-11-20T10:00:00Z", False),
        (None, "2026-11-21T10:00:00Z", "2026-11-21T10:10:00Z", True),
        (None, None, "2026-11-21T23:00:00Z", False),
        ("garbage", None, "2026-11-21T23:00:00Z", False),
    ):
        status: dict[str, Any] = {"attempts": {"total": 1, "ended": 1}, "completionTime": completion}
        status["conditions"] = [ended | {"lastTransitionTime": transition}]
        desired = decide(observed(lifecycle, status), now)
        assert [deletion.kind for deletion in desired.deletes] == (["TrainingJob"] if deleted else []), (
            completion,
            now,
        )
        assert deleted or desired.look_again_seconds


def test_a_job_whose_end_nobody_recorded_lives_its_time_from_now_on() -> None:
    world = complete(ttlSecondsAfterFinished=600)
    del world.job["status"]["completionTime"]
    for found in world.job["status"]["conditions"]:
        found.pop("lastTransitionTime")
    world.server.put("trainingjobs", world.job)
    world.advance(5000)
    rounds(world)
    assert not world.is_gone and world.status["completionTime"]
    course(world, 580, every=20)
    assert not world.is_gone
    course(world, 40, every=20)
    assert world.is_gone


def test_only_the_job_that_was_decided_on_is_deleted() -> None:
    """The user takes the time to live away, or makes a namesake, while the deletion is on its way."""
    world = complete(ttlSecondsAfterFinished=60)
    world.advance(60)
    world.edit(lifecycle={"ttlSecondsAfterFinished": None})
    world.look()  # its watch has not told it yet
    assert not world.is_gone and "deletionTimestamp" not in world.job["metadata"]
    rounds(world)
    assert not world.is_gone
    world.edit(lifecycle={"ttlSecondsAfterFinished": 60})
    world.operator.deliver_all()
    world.delete_job()
    world.create_namesake("22222222-0000-0000-0000-000000000000")
    world.look()
    rounds(world)
    assert not world.is_gone and world.status["state"] == "Running"


@pytest.mark.parametrize("ttl", ["soon", True, -5, 1.5, None])
def test_a_time_to_live_that_is_no_number_deletes_nothing(ttl: Any) -> None:
    ended = {"type": "Failed", "status": "True", "reason": "UserError", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"attempts": {"total": 1, "ended": 1}, "conditions": [ended], "completionTime": "2026-01-01T00:00:00Z"}
    assert not decide(observed({"spec.lifecycle": {"ttlSecondsAfterFinished": ttl}}, status)).deletes


# --- counts -----------------------------------------------------------------------------------------------------------


def test_memory_errors_disruptions_and_crashes_are_counted_apart() -> None:
    world = running(max_restarts=9)
    fail(world, 1)
    world.delete_pod(world.pods(world.attempts()[-1])[0])
    rounds(world, 4)
    fail(world, 1, rounds_after=6)
    assert world.status["state"] == "Running"
    world.end_pod(world.pods(world.attempts()[-1])[0], 137, "", "OOMKilled")
    rounds(world, 4)
    counted = attempts_of(world)
    assert (counted["restarts"], counted["disruptions"], counted["memoryErrors"]) == (2, 1, 1)
    assert counted["lastReason"] == "OOMKilled"


def test_restart_counters_are_never_reset_by_suspend_and_resume() -> None:
    """Kubeflow Trainer began to count anew."""
    world = running(max_restarts=2)
    fail(world, 1)
    world.delete_pod(world.pods(world.attempts()[-1])[0])
    rounds(world, 4)
    before = attempts_of(world)
    world.suspend(True)
    rounds(world)
    world.suspend(False)
    rounds(world)
    after = attempts_of(world)
    assert world.status["state"] == "Running"
    for count in ("restarts", "disruptions", "memoryErrors"):
        assert after[count] == before[count]
    assert after["activeSeconds"] >= before["activeSeconds"] > 0
    fail(world, 1)
    fail(world, 1)
    assert "no restart is left (lifecycle.maxRestarts = 2)" in world.condition("Failed")["message"]


def test_the_state_of_a_resumed_job_is_not_stale() -> None:
    """Kubeflow Trainer went on to say Suspended of a job that ran, because that condition had come last."""
    world = running()
    for _ in range(2):
        world.suspend(True)
        rounds(world)
        assert world.status["state"] == "Suspended"
        world.suspend(False)
        world.operator.deliver_all()
        world.look()
        assert world.status["state"] == "Starting"
        assert world.condition("Suspended")["status"] == "False"
        rounds(world)
        assert world.status["state"] == "Running"


def test_the_first_failing_rank_and_its_node_are_named() -> None:
    world = running(num_nodes=2, max_restarts=9)
    world.end_pod(world.pods()[1], 1, termination(1, "ValueError", rank=1))
    rounds(world)
    assert (attempts_of(world)["lastRank"], attempts_of(world)["lastNode"]) == (1, "node-1")
    assert "on node-1 (rank 1, step 7)" in next(note.note for note in world.operator.notes if note.action == "Restart")
    world.suspend(True)
    rounds(world)
    assert "lastRank" not in attempts_of(world) and attempts_of(world)["lastNode"] == ""


def test_more_restarts_after_the_end_change_nothing() -> None:
    world = running(max_restarts=0)
    fail(world, 1)
    ending = world.condition("Failed")
    before = len(writes(world))
    world.edit(lifecycle={"maxRestarts": 100, "activeDeadlineSeconds": 10**6})
    course(world, 300, every=30)
    assert world.condition("Failed") | {"observedGeneration": 1} == ending
    assert writes(world)[before:] == ["patch trainingjobs"], "the generation is acknowledged"


# --- changes of the spec ----------------------------------------------------------------------------------------------


def test_lifecycle_change_causes_no_restart_and_no_message_about_fields() -> None:
    world = running()
    pods = [pod["metadata"]["uid"] for pod in world.pods()]
    world.edit(lifecycle={"maxRestarts": 7, "stallSeconds": 900, "activeDeadlineSeconds": 10**6})
    rounds(world)
    assert [pod["metadata"]["uid"] for pod in world.pods()] == pods
    assert world.condition("Accepted")["reason"] == "Valid"
    assert world.status["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory": {"budget": {"host": "2Gi"}}}, "spec.memory"),
        ({"scheduling": {"nodeSelector": {"a": "b"}}}, "spec.scheduling"),
        ({"pod": {"image": "mended"}}, "spec.pod.image"),
    ],
)
def test_what_is_used_is_said_where_a_running_job_was_changed(change: dict[str, Any], named: str) -> None:
    """memory, scheduling and spill by an older CRD; others may be changed at any time."""
    world = running()
    before = json.loads(json.dumps(world.job["spec"]))
    world.edit(**change)
    rounds(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "UsedLater")
    assert accepted["message"].startswith(f"{named} changed: attempt 1 continues with the values in ConfigMap demo-1")
    assert attempts_of(world)["total"] == 1 and world.status["state"] == "Running"
    world.job["spec"] = before
    world.edit()
    rounds(world)
    assert world.condition("Accepted")["reason"] == "Valid"
    world.edit(**change)
    fail(world, 1)
    assert world.condition("Accepted")["reason"] == "Valid", "the next attempt uses it"
    assert attempts_of(world)["total"] == 2


@pytest.mark.parametrize("field", ["model", "data", "training", "parallelism"])
def test_what_never_changes_is_rejected_where_an_older_crd_let_it_through(field: str) -> None:
    change: dict[str, Any] = {
        "model": {"config": {**World().job["spec"]["model"]["config"], "numLayers": 3}},
        "data": {"evaluation": {"everySteps": 3}},
        "training": {"steps": 77},
        "parallelism": {"nodes": 2},
    }[field]
    world = running()
    before = json.loads(json.dumps(world.job["spec"]))
    world.suspend(True)
    rounds(world)
    world.edit(**{field: change})
    world.suspend(False)
    rounds(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"] == (
        f"spec.{field}: changed since attempt 1 began, but is immutable; restore the value of that attempt (kubectl "
        "get configmap demo-1 -n team -o yaml, key job.json), or create a new TrainingJob"
    )
    assert not world.attempts()
    world.job["spec"] = before
    world.edit()
    rounds(world)
    assert world.status["state"] == "Running"


MEMBERS = [{"name": "a", "training": {"seed": 1}}, {"name": "b", "training": {"seed": 2}}]
UNLESS_SUSPENDED: dict[str, Any] = {
    "checkpoint": {"subPath": "elsewhere"},
    "members": MEMBERS[:1],
    "objective": {"metric": "Loss"},
}


@pytest.mark.parametrize("field", UNLESS_SUSPENDED)
def test_checkpoint_members_and_objective_change_only_while_suspended(field: str) -> None:
    world = World()
    world.edit(members=MEMBERS)
    rounds(world)
    world.edit(**{field: UNLESS_SUSPENDED[field]})
    fail(world, 1)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"] == (
        f"spec.{field}: changed since attempt 1 began, but can change only while the job is suspended; restore the "
        "value of that attempt (kubectl get configmap demo-1 -n team -o yaml, key job.json), or set "
        "spec.suspend to true"
    )
    assert attempts_of(world)["total"] == 1
    world.suspend(True)
    rounds(world)
    world.suspend(False)
    rounds(world)
    assert (world.status["state"], attempts_of(world)["total"]) == ("Running", 2)


def test_an_older_crd_costs_no_writes_for_ever_and_ends_no_attempt() -> None:
    """It drops what it does not know; the log says that the CRDs of this version are needed."""
    world = World(queue="team-a", lifecycle={"stallSeconds": 60, "activeDeadlineSeconds": 5000})
    world.server.pruned = {
        "pendingTime", "activeTime", "activeSeconds", "advanceTime", "disruptions", "memoryErrors", "lastNode",
    }  # fmt: skip
    course(world, 300, every=30)
    world.admit(world.attempts()[0])
    rounds(world)
    world.report(42)
    rounds(world, 1)
    before = len(world.operator.inbox["trainingjobs"]), world.server.version
    course(world, 600, every=30)
    assert (world.status["state"], attempts_of(world)["total"]) == ("Running", 1)
    assert (len(world.operator.inbox["trainingjobs"]), world.server.version) <= (before[0], before[1] + 1)


# --- hands of others --------------------------------------------------------------------------------------------------


def test_a_namesake_inherits_nothing() -> None:
    world = running(max_restarts=1)
    world.report(42)
    rounds(world, 1)
    fail(world, 1)
    world.delete_job()
    world.create_namesake("22222222-0000-0000-0000-000000000000")
    world.operator.deliver_all()
    world.look()
    assert world.condition("Accepted")["reason"] == "NameConflict", "children of the one before are left"
    rounds(world, 4)
    world.advance(300)
    rounds(world, 4)
    assert world.status["state"] == "Running"
    counted = attempts_of(world)
    assert (counted["total"], counted["restarts"], counted["activeSeconds"]) == (1, 0, 0)
    assert "checkpoint" not in world.status and world.status["progress"]["step"] == 0
    assert {pod["metadata"]["labels"]["spillway.dev/job-uid"] for pod in world.pods()} == {world.uid}


@pytest.mark.parametrize("plural", ["configmaps", "services"])
def test_deleted_configmap_or_service_returns_only_with_the_next_attempt(plural: str) -> None:
    world = running(num_nodes=2)
    world.server.take(plural, "demo-1")
    before = len(writes(world))
    course(world, 60)
    assert len(writes(world)) == before
    fail(world, 1)
    assert world.status["state"] == "Running" and attempts_of(world)["total"] == 2
    assert world.server.get(plural, "demo-2") is not None


def test_configmap_deleted_before_the_status_write_starts_no_new_attempt() -> None:
    world = World()
    world.look(Fault(2, landed=False, dies=True))
    world.server.take("configmaps", "demo-1")
    rounds(world)
    assert world.status["state"] == "Running"
    assert [job["metadata"]["name"] for job in world.attempts()] == ["demo-1"]


def test_a_status_that_somebody_wiped_is_made_anew_from_what_is_there() -> None:
    world = running()
    fail(world, 1)
    world.job["status"] = {}
    world.server.put("trainingjobs", world.job)
    rounds(world)
    assert world.status["state"] == "Running"
    assert attempts_of(world)["total"] == 2
    assert attempts_of(world)["restarts"] == 1, "the contract of the attempt says how the one before ended"


@pytest.mark.parametrize("controller_is_first", [False, True])
def test_a_job_that_somebody_suspended_by_hand_is_withdrawn_once_it_ran(controller_is_first: bool) -> None:
    """The Job controller may have taken the pods away before the operator looks."""
    world = running()
    (job,) = world.attempts()
    world.evict(job)
    if controller_is_first:
        for pod in world.pods():
            world.server.take("pods", pod["metadata"]["name"])
        job["status"] |= {"active": 0, "ready": 0}
        world.server.put("jobs", job)
    rounds(world, 5)
    assert attempts_of(world)["total"] == 2
    assert world.status["state"] == "Running"
    assert attempts_of(world)["restarts"] == 0
    evicted = next(note.note for note in world.operator.notes if note.reason == "EvictedByQueue")
    assert evicted == "another client suspended Job demo-1; another attempt follows"


def test_a_job_suspended_by_hand_before_it_ran_says_how_to_resume_it() -> None:
    world = World()
    world.look()
    (job,) = world.attempts()
    world.evict(job)
    rounds(world)
    said = world.condition("QuotaReserved")
    assert (said["reason"], said["message"]) == (
        "Waiting",
        "Job demo-1 has spec.suspend: true, which Spillway did not set; to resume it: "
        """kubectl patch job demo-1 -n team -p '{"spec":{"suspend":false}}'""",
    )


def test_labels_that_somebody_took_off_a_job_start_no_second_attempt() -> None:
    world = running()
    (job,) = world.attempts()
    kept = job["metadata"]["labels"]
    job["metadata"]["labels"] = {"spillway.dev/attempt": kept["spillway.dev/attempt"]}
    world.server.put("jobs", job)
    world.restart_operator()
    for _ in range(3):
        world.operator.deliver_all()
        world.look()
        world.advance(30)
    assert len(world.attempts()) == 1
    assert writes(world).count("create jobs") == 1


def test_a_namespace_that_is_deleted_is_left_in_peace() -> None:
    """Objects go in any order, and the API server forbids new ones."""
    world = running(num_nodes=2)
    world.server.rejects = {"jobs", "configmaps", "services"}
    world.server.take("configmaps", "demo-1")
    world.delete_attempt(world.attempts()[0], foreground=False)
    for pod in world.pods():
        world.delete_pod(pod)
    rounds(world, 3, seconds=GRACE)
    created = [write for write in writes(world) if write.startswith("create")]
    world.server.mark_deleted("trainingjobs", world.job)
    before = len(writes(world))
    rounds(world, 3)
    assert len(writes(world)) == before
    assert len(created) == 3
    assert not world.server.all("jobs") and not world.pods()


def test_a_contract_of_an_older_operator_is_carried_on() -> None:
    """Its status.attempts knows neither deadlines nor counts by reason."""
    data = decide(observed(status={"attempts": {"total": 1, "ended": 1}})).creates[0]["data"]
    decision = json.loads(data["attempt.json"])
    for new in ("pending_time", "active_time", "active_seconds", "disruptions", "memory_errors", "last_node"):
        decision["attempts"].pop(new, None)
    old = Contract(
        2,
        "demo-2",
        observed().job.uid,
        data["job.json"],
        data["plan.json"],
        data["decision.json"],
        json.dumps(decision),
    )
    desired = decide(observed(contracts=(old,), status={"attempts": {"total": 1, "ended": 1}}))
    assert {child["metadata"]["name"] for child in desired.creates} == {"demo-2"}


def test_end_is_counted_once_whatever_the_next_attempts_contract_says() -> None:
    """Its Job was rejected, so that the status was written by a later look, which saw another end than the contract:
    a crash where the contract has a disruption. Carrying the contract on must not give the restart back."""
    at_first = {"total": 1, "ended": 1, "disruptions": 1, "lastReason": "PodDeleted", "activeSeconds": 5}
    data = decide(observed(status={"attempts": at_first})).creates[0]["data"]
    files = (data["job.json"], data["plan.json"], data["decision.json"], data["attempt.json"])
    contract = Contract(2, "demo-2", observed().job.uid, *files)
    written = {"total": 1, "ended": 1, "restarts": 1, "lastReason": "RankCrashed", "activeSeconds": 6}
    desired = decide(observed(contracts=(contract,), status={"attempts": written}))
    assert {child["metadata"]["name"] for child in desired.creates} == {"demo-2"}
    assert desired.status is not None
    attempts = desired.status["attempts"]
    assert (attempts["total"], attempts["ended"]) == (2, 1)
    assert (attempts["restarts"], attempts["disruptions"]) == (1, 0)
    assert (attempts["lastReason"], attempts["activeSeconds"]) == ("RankCrashed", 6)
