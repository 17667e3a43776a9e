"""The life of a TrainingJob, decision by decision: first on the model of a cluster, then on single observations."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.job_documents import TINY
from harness.cluster_model import (
    EPOCH_START,
    GRACE,
    KEY,
    NAME,
    UID,
    Fault,
    World,
    fail,
    rounds,
    running,
    termination,
    timestamp,
    writes,
)
from harness.depth import examples
from harness.observations import NOW, attempt, condition, decide, follow_up, observed
from spillway.api.progress import ProgressReport
from spillway.api.status import MAX_ATTEMPTS, TrainingJobStatus
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.place import Unplaceable
from spillway.units import GIB
from spillway_operator.decide.observed import Claim, Contract, Desired, PodObject
from spillway_operator.decide.reconcile import pause_seconds, reconcile
from spillway_operator.progress.outbox import Received

# --- on the model of a cluster ----------------------------------------------------------------------------------------


def test_a_start_is_four_requests_and_the_end_one() -> None:
    world = running()
    assert writes(world) == ["create configmaps", "create jobs", "patch trainingjobs", "patch trainingjobs"]
    for pod in world.pods():
        world.end_pod(pod, 0)
    rounds(world)
    assert len(writes(world)) == 5
    assert world.status["state"] == "Complete"
    assert world.status["progress"]["display"] == "100%"
    assert world.condition("Complete")["message"] == "100 steps in 1 attempt"


@pytest.mark.parametrize(("training", "trained"), [({"steps": 1}, "1 step"), ({"epochs": 2}, "completed")])
def test_what_a_complete_job_trained_is_counted_if_known(training: dict[str, int], trained: str) -> None:
    done = attempt(outcome="Complete", succeeded=1)
    seen = observed({"spec.training": {**training, "sequenceLength": 8}}, {"attempts": {"total": 1}}, attempts=(done,))
    assert condition(decide(seen), "Complete")["message"] == f"{trained} in 1 attempt"


def test_a_service_is_one_more_request() -> None:
    assert writes(running(num_nodes=2)) == [
        "create configmaps", "create services", "create jobs", "patch trainingjobs", "patch trainingjobs",
    ]  # fmt: skip


def test_a_retry_is_four_requests() -> None:
    world = running()
    before = len(writes(world))
    fail(world, 1)
    assert world.status["state"] == "Running"
    assert writes(world)[before:] == ["create configmaps", "create jobs", "patch trainingjobs", "patch trainingjobs"]
    counted = {name: value for name, value in world.status["attempts"].items() if not name.endswith("Time")}
    assert counted == {
        "total": 2, "ended": 1, "restarts": 1, "disruptions": 0, "memoryErrors": 0, "lastReason": "RankCrashed",
        "lastNode": "node-0", "lastRank": 0, "shortInARow": 1, "activeSeconds": 4,
        "lastActiveSeconds": 4,
    }  # fmt: skip


def test_nothing_is_written_in_a_steady_state_or_after_a_restart() -> None:
    world = running(num_nodes=2)
    before = len(writes(world))
    for _ in range(10):
        world.advance(60)
        rounds(world, 1)
        world.restart_operator()
    assert len(writes(world)) == before


@pytest.mark.parametrize("writes_before", range(4))
@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("dies", [True, False])
def test_start_interrupted_anywhere_continues_as_decided(writes_before: int, landed: bool, dies: bool) -> None:
    world = World(num_nodes=2)
    world.look(Fault(writes_before, landed, dies))
    committed = world.server.get("configmaps", "demo-1")
    before = None if committed is None else dict(committed["data"])
    rounds(world)
    assert world.status["state"] == "Running"
    assert world.status["attempts"]["total"] == 1
    after = world.server.get("configmaps", "demo-1")
    assert after is not None and before in (None, after["data"])
    reason = json.loads(after["data"]["decision.json"])["reason"]
    assert world.status["plan"]["reason"] == reason
    assert len(world.attempts()) == 1


@pytest.mark.parametrize("writes_before", range(3))
@pytest.mark.parametrize("landed", [True, False])
def test_a_retry_that_is_cut_short_anywhere_is_charged_once(writes_before: int, landed: bool) -> None:
    world = running()
    world.end_pod(world.pods()[0], 1, termination(1, "the reason"))
    world.control()
    world.control()
    world.operator.deliver_all()
    world.look(Fault(writes_before, landed, dies=True))
    rounds(world)
    assert world.status["state"] == "Running"
    assert (world.status["attempts"]["total"], world.status["attempts"]["restarts"]) == (2, 1)
    assert world.status["attempts"]["lastReason"] == "RankCrashed"


@pytest.mark.parametrize("code", [64, 71])
def test_failure_that_would_repeat_ends_the_job_with_the_trainers_message(code: int) -> None:
    world = running()
    fail(world, code, "lower spec.memory.budget.device")
    failed = world.condition("Failed")
    assert failed["status"] == "True"
    assert failed["reason"] == json.loads(termination(code, ""))["reason"]
    assert "lower spec.memory.budget.device" in failed["message"]
    assert world.condition("Stalled")["status"] == "True"
    assert world.status["completionTime"]
    assert len(world.attempts()) == 1


def test_a_disruption_is_not_counted() -> None:
    world = running(max_restarts=0)
    world.delete_pod(world.pods()[0])
    rounds(world, 4)
    assert world.status["state"] == "Running"
    assert (world.status["attempts"]["total"], world.status["attempts"]["restarts"]) == (2, 0)


def test_restarts_end_with_their_budget() -> None:
    world = running(max_restarts=1)
    fail(world, 1)
    fail(world, 1, "ValueError: again")
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "RankCrashed")
    assert failed["message"].endswith("ValueError: again; no restart is left (lifecycle.maxRestarts = 1)")
    assert "ValueError: again" in failed["message"]


def test_short_attempts_in_a_row_lengthen_the_pause_whatever_ended_them() -> None:
    assert [pause_seconds(count) for count in (0, 1, 2, 3, 4, 10, 11, 10**6)] == [0, 0, 1, 2, 4, 256, 300, 300]
    world = running()
    for _ in range(200):
        world.delete_pod(world.pods()[-1]) if world.pods() else None
        rounds(world, 2, seconds=5)
    assert world.status["attempts"]["total"] < 20


def test_a_long_attempt_ends_the_row() -> None:
    world = running()
    fail(world, 1)
    world.advance(700)
    fail(world, 1)
    assert world.status["attempts"]["shortInARow"] == 0


def test_between_two_attempts_the_status_says_why() -> None:
    world = running(max_restarts=5)
    for _ in range(4):
        fail(world, 1, "ValueError: again", rounds_after=1)
        rounds(world, 1, seconds=0.1)
        if world.status["state"] == "Restarting":
            break
        rounds(world)
    assert world.status["state"] == "Restarting"
    assert "ValueError: again" in world.condition("Running")["message"]
    assert any(note.action == "Restart" and note.reason == "RankCrashed" for note in world.operator.notes)


def test_a_job_that_somebody_deleted_is_followed_by_the_next_attempt() -> None:
    world = running()
    world.delete_attempt(world.attempts()[0], foreground=False)
    rounds(world, 3)
    assert world.status["attempts"]["lastReason"] == "JobDeleted"
    assert world.status["attempts"]["total"] == 2
    assert world.status["state"] == "Running"


def test_the_next_attempt_waits_for_the_pods_of_the_last() -> None:
    world = running()
    world.delete_attempt(world.attempts()[0], foreground=False)
    for _ in range(3):  # the garbage collector marks the pod; its kubelet takes its time
        world.control()
        world.operator.deliver_all()
        world.look()
        world.advance(5)
    assert len(world.pods()) == 1 and not world.attempts()
    rounds(world)
    assert world.status["attempts"]["total"] == 2


def test_only_pods_of_the_attempt_that_is_gone_are_waited_for() -> None:
    """An earlier attempt's Job is still there, and its pods have ended long ago."""
    world = running()
    fail(world, 1)
    world.delete_attempt(world.attempts()[-1], foreground=False)
    world.control()
    world.advance(5)
    world.settle()
    assert [pod["status"]["phase"] for pod in world.pods()] == ["Failed", "Running"]
    assert len(world.attempts()) == 1
    rounds(world)
    assert [job["metadata"]["name"] for job in world.attempts()] == ["demo-1", "demo-3"]


def test_a_lost_node_is_given_up_after_the_grace_period() -> None:
    world = running(num_nodes=2)
    world.lose_node(world.pods()[1])
    for _ in range(40):
        rounds(world, 1, seconds=20)
    assert world.status["attempts"]["total"] == 2
    assert world.status["attempts"]["lastReason"] == "NodeLost"
    assert world.status["attempts"]["restarts"] == 0
    assert world.status["state"] == "Running"


def test_suspend_stops_the_attempt_and_resume_begins_a_new_one() -> None:
    world = running()
    world.suspend(True)
    world.operator.deliver_all()
    world.look()
    assert world.condition("Suspended")["reason"] == "Stopping"
    assert world.status["state"] == "Running"
    rounds(world)
    assert world.status["state"] == "Suspended"
    assert world.condition("Suspended")["status"] == "True"
    assert not world.attempts() and not world.pods()
    world.suspend(False)
    rounds(world)
    assert world.status["state"] == "Running"
    assert world.status["attempts"]["total"] == 2
    assert world.status["attempts"]["lastReason"] == "Suspended"
    assert world.status["attempts"]["shortInARow"] == 0


def test_a_suspension_taken_back_while_the_pods_end_is_no_disruption() -> None:
    world = running()
    world.suspend(True)
    world.operator.deliver_all()
    world.look()
    world.suspend(False)
    rounds(world)
    known = world.status["attempts"]
    assert (world.status["state"], known["total"], known["lastReason"]) == ("Running", 2, "Suspended")
    assert known["disruptions"] == 0
    assert world.condition("Suspended")["reason"] == "NotSuspended"
    assert not [note for note in world.operator.notes if note.type == "Warning"]


RAN = {"attempts": {"total": 1, "ended": 1}}
SAVED = {**RAN, "checkpoint": {"step": 3, "epoch": 1}}


@pytest.mark.parametrize(
    ("checkpoint", "status", "does"),
    [
        ({"claim": "c"}, {}, "start"),
        ({"claim": "c"}, RAN, "continue"),
        ({"claim": "c"}, SAVED, "resume from the last checkpoint"),
        ({}, SAVED, "continue; checkpoint.claim is not set, so the next attempt starts from the beginning"),
    ],
)
def test_a_suspended_job_says_where_the_next_attempt_starts(checkpoint: Any, status: Any, does: str) -> None:
    desired = decide(observed({"spec.suspend": True, "spec.checkpoint": checkpoint}, status))
    assert condition(desired, "Suspended")["message"] == f"set spec.suspend to false to {does}"


def test_a_suspension_is_three_requests() -> None:
    world = running()
    before = len(writes(world))
    world.suspend(True)
    rounds(world, 5)
    assert writes(world)[before:] == ["delete jobs", "patch trainingjobs", "patch trainingjobs"]


def test_what_was_decided_before_a_suspension_is_decided_anew() -> None:
    world = World()
    world.look(Fault(1, landed=False, dies=True))
    assert world.server.get("configmaps", "demo-1") is not None and not world.attempts()
    world.suspend(True)
    rounds(world)
    world.suspend(False)
    rounds(world)
    assert [job["metadata"]["name"] for job in world.attempts()] == ["demo-2"]


def test_contract_left_open_by_a_resumption_is_void_after_a_new_suspension() -> None:
    world = World()
    world.suspend(True)
    rounds(world, 1)
    world.suspend(False)
    world.operator.deliver_all()
    world.look(Fault(0, landed=True, dies=True))
    assert world.server.get("configmaps", "demo-1") is not None
    world.suspend(True)
    rounds(world)
    assert world.status["attempts"]["ended"] == 1
    world.suspend(False)
    rounds(world)
    assert [job["metadata"]["name"] for job in world.attempts()] == ["demo-2"]


def test_attempt_hidden_from_the_status_by_a_crash_is_not_shown_suspended() -> None:
    world = running()
    world.suspend(True)
    rounds(world)
    world.suspend(False)
    world.operator.deliver_all()
    world.look(Fault(2, landed=False, dies=True))
    rounds(world)
    assert world.status["state"] == "Running"
    assert world.condition("Suspended")["reason"] == "NotSuspended"


def test_a_job_that_begins_suspended_starts_nothing() -> None:
    world = World()
    world.suspend(True)
    rounds(world)
    assert world.status["state"] == "Suspended"
    assert writes(world) == ["patch trainingjobs"]


def test_a_queued_job_is_never_written_again() -> None:
    world = World(queue="team-a")
    rounds(world)
    assert world.status["state"] == "Queued"
    assert world.condition("QuotaReserved")["message"] == "waiting for quota in the queue team-a"
    world.admit(world.attempts()[0])
    rounds(world)
    assert world.status["state"] == "Running"
    assert world.condition("QuotaReserved")["status"] == "True"
    assert [write for write in writes(world) if "jobs" in write and "training" not in write] == ["create jobs"]


def test_an_attempt_that_the_queue_takes_back_ends_and_the_next_one_queues() -> None:
    world = World(queue="team-a", max_restarts=0)
    rounds(world)
    world.admit(world.attempts()[0])
    rounds(world)
    world.evict(world.attempts()[0])
    rounds(world, 5)
    assert world.status["state"] == "Queued"
    assert (world.status["attempts"]["total"], world.status["attempts"]["lastReason"]) == (2, "Preempted")
    (queued,) = world.attempts()
    assert queued["metadata"]["name"] == "demo-2" and queued["spec"]["suspend"] is True


@pytest.mark.parametrize("plural", ["configmaps", "jobs", "services"])
def test_a_foreign_namesake_is_left_alone_and_named(plural: str) -> None:
    world = World(num_nodes=2)
    world.plant_foreign(plural, 1)
    foreign = dict(world.server.objects[plural, "demo-1"])
    rounds(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NameConflict")
    assert (
        f"{ {'configmaps': 'ConfigMap', 'jobs': 'Job', 'services': 'Service'}[plural] } demo-1" in accepted["message"]
    )
    assert world.server.objects[plural, "demo-1"] == foreign
    assert not world.attempts()
    world.remove_foreign()
    world.advance(300)
    rounds(world)
    assert world.status["state"] == "Running"


def test_api_server_rejection_is_shown_and_retried_with_growing_waits() -> None:
    world = World()
    world.server.rejects = {"jobs"}
    rounds(world, 1)
    assert world.condition("Scheduled")["reason"] == "Rejected"
    assert "exceeded quota" in world.condition("Scheduled")["message"]
    before = len(writes(world))
    waits = []
    for _ in range(8):
        world.look()
        assert world.operator.due is not None
        waits.append(world.operator.due - world.server.now)
        world.advance(waits[-1])
    assert waits == sorted(waits) and waits[0] == 10 and waits[-1] == 300
    assert len(writes(world)) == before
    world.server.rejects = set()
    rounds(world)
    assert world.status["state"] == "Running" and world.status["attempts"]["total"] == 1


def test_progress_reaches_the_status() -> None:
    world = running()
    own = {"epoch": 1, "step": 42, "steps": 100, "stepSeconds": 1.0, "loss": 5.5,
           "checkpoint": {"step": 40, "epoch": 1, "path": "/checkpoints/step-40.e1", "time": 1.0}}  # fmt: skip
    report = ProgressReport.model_validate({"spillway": own})
    world.operator.outbox.put(KEY, Received(report, UID, 1, timestamp(world.server.now)), world.server.now)
    world.operator.outbox.release(world.server.now)
    rounds(world, 1)
    assert world.status["progress"]["display"] == "42%"
    assert world.condition("Progressing")["status"] == "True"
    assert world.condition("CheckpointsDurable")["reason"] == "NoClaim"
    assert world.status["checkpoint"]["step"] == 40


def report(world: World, step: int, attempt: int = 1, release: bool = True) -> None:
    """As it comes from the trainer, with the checkpoint of that step."""
    own = {"epoch": attempt, "step": step, "steps": 100, "stepSeconds": 1.0,
           "lastStepTime": EPOCH_START + world.server.now,
           "checkpoint": {"step": step, "epoch": attempt, "path": f"/checkpoints/step-{step}.e{attempt}"}}  # fmt: skip
    received = Received(ProgressReport.model_validate({"spillway": own}), UID, attempt, timestamp(world.server.now))
    now = time.monotonic() + world.server.now  # the worker's clock for what it has written
    world.operator.outbox.put(KEY, received, now)
    if release:
        world.operator.outbox.release(now)


def test_silent_attempt_is_reported_once_and_checked_in_time() -> None:
    world = running(lifecycle={"stallSeconds": 10**9})
    report(world, 42)
    world.look()
    assert world.condition("Progressing")["reason"] == "Stepping"
    before, due = len(writes(world)), world.operator.due
    assert due is not None and 290 < due - world.server.now <= 301
    world.advance(due - world.server.now)
    for _ in range(3):
        world.look()
        world.advance(600)
    heard = world.condition("Progressing")
    assert (heard["status"], heard["reason"]) == ("Unknown", "NoReport")
    assert "for more than 5m00s" in heard["message"] and heard["message"].endswith("; see spillway logs demo")
    assert len(writes(world)) == before + 1
    assert world.operator.due is not None
    assert world.operator.due - world.server.now > 10**8, "the next report is what there is to wait for"
    report(world, 43)
    world.look()
    assert world.condition("Progressing")["reason"] == "Stepping"
    assert len(writes(world)) == before + 2


def test_a_step_may_take_as_long_as_was_planned() -> None:
    progress = {"step": 1, "steps": 100, "lastStepTime": "2026-11-21T10:00:00Z"}
    status = {"attempts": {"total": 1}, "progress": progress, "plan": {"stepSeconds": "1.5e+03"}}
    seen = observed(status=status, attempts=(attempt(ready=1),))
    assert condition(decide(seen, "2026-11-21T11:14:00Z"), "Progressing")["reason"] == "Stepping"
    assert condition(decide(seen, "2026-11-21T11:16:00Z"), "Progressing")["reason"] == "NoReport"


def test_the_last_report_is_kept_though_the_attempts_job_is_gone_already() -> None:
    world = running()
    report(world, 42)
    rounds(world, 1)
    world.suspend(True)
    world.operator.deliver_all()
    world.look()
    report(world, 57, release=False)  # in its last seconds, before its turn
    rounds(world)
    assert world.status["state"] == "Suspended"
    assert (world.status["progress"]["step"], world.status["checkpoint"]["step"]) == (57, 57)


def test_a_saved_step_in_the_termination_message_reaches_the_status() -> None:
    world = running()
    report(world, 42)
    rounds(world, 1)
    world.end_pod(world.pods()[0], 75, termination(75, "stopped on request", savedStep=57))
    rounds(world)
    assert world.status["attempts"]["lastReason"] == "Preempted"
    assert world.status["progress"]["step"] == 57
    found = world.status["checkpoint"]
    assert (found["step"], found["epoch"], found["path"]) == (57, 1, "/checkpoints/step-57.e1")


def test_wrong_image_is_fixed_by_deleting_the_job_the_message_names() -> None:
    world = World()
    world.look()
    world.control()
    (pod,) = world.pods()
    pod["status"] |= {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}]}
    world.server.put("pods", pod)
    world.advance(11)
    world.operator.deliver_all()
    world.look()
    message = world.condition("Running")["message"]
    assert message.endswith("After a change of the spec: kubectl delete job demo-1 -n team")
    world.job["spec"]["image"] = "mended"
    world.job["metadata"]["generation"] += 1
    world.server.put("trainingjobs", world.job)
    world.delete_attempt(world.attempts()[0], foreground=False)
    world.control()
    world.advance(GRACE)
    rounds(world, 4)
    assert world.status["attempts"]["lastReason"] == "JobDeleted"
    (job,) = world.attempts()
    assert job["metadata"]["name"] == "demo-2"
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "mended"


@pytest.mark.parametrize("suspended", [False, True])
def test_a_pod_that_a_deleted_job_left_behind_is_named(suspended: bool) -> None:
    world = running()
    (pod,) = world.pods()
    del pod["metadata"]["ownerReferences"]  # kubectl delete job --cascade=orphan
    world.server.take("jobs", "demo-1")
    world.suspend(suspended)
    for _ in range(3):
        world.operator.deliver_all()
        world.look()
        world.advance(10)
    said = world.condition("Running")
    name = pod["metadata"]["name"]
    assert said["reason"] == "JobGone"
    assert said["message"] == (
        "Job demo-1 was deleted, but its pods still run: kubectl delete pod -n team "
        "-l batch.kubernetes.io/job-name=demo-1"
    )
    assert world.status["state"] == "Running"
    before = len(writes(world))
    world.look()
    assert len(writes(world)) == before
    world.server.take("pods", name)
    rounds(world)
    assert world.status["state"] == ("Suspended" if suspended else "Running")
    assert world.condition("Running")["reason"] == ("Suspended" if suspended else "Running")


def test_a_pod_that_ends_with_its_deleted_job_is_not_worth_a_word() -> None:
    world = running()
    world.delete_attempt(world.attempts()[0], foreground=False)
    before = len(writes(world))
    world.operator.deliver_all()
    world.look()
    assert len(writes(world)) == before


@pytest.mark.parametrize("total", [10**9, 10**12 - 1])
def test_a_count_of_attempts_that_cannot_be_is_put_right(total: int) -> None:
    world = running()
    for field in ("total", "ended"):
        world.job["status"]["attempts"] |= {field: total}
        world.server.put("trainingjobs", world.job)
        rounds(world)
        assert world.status["attempts"]["total"] == 1 and world.status["state"] == "Running"
    world.delete_attempt(world.attempts()[0], foreground=False)
    world.control()
    world.job["status"]["attempts"] |= {"total": total}
    world.server.put("trainingjobs", world.job)
    world.server.take("pods", world.pods()[0]["metadata"]["name"])
    rounds(world)
    assert [job["metadata"]["name"] for job in world.attempts()] == ["demo-2"], "epoch 1 has run"


def test_a_count_of_attempts_that_leaves_no_number_is_said() -> None:
    seen = observed(status={"attempts": {"total": MAX_ATTEMPTS, "ended": MAX_ATTEMPTS}})
    desired = decide(seen)
    assert condition(desired, "Planned")["reason"] == "NoNumber"
    assert not desired.creates and desired.look_again_seconds == 10
    assert decide(follow_up(seen, desired)).changes_nothing


def test_a_new_generation_is_acknowledged_also_after_the_end() -> None:
    world = running()
    world.end_pod(world.pods()[0], 0)
    rounds(world)
    ended = world.status["completionTime"]
    world.suspend(True)
    rounds(world)
    assert world.status["observedGeneration"] == 2
    assert (world.status["state"], world.status["completionTime"]) == ("Complete", ended)


# --- on single observations -------------------------------------------------------------------------------------------


def test_a_job_of_another_controller_is_left_alone() -> None:
    assert decide(observed({"spec.managedBy": "kueue.x-k8s.io/multikueue"})) == Desired()


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    seen = observed()
    assert decide(replace(seen, job=replace(seen.job, deleting=True))) == Desired()


def test_a_new_attempt_is_decided_on_fresh_lists_only() -> None:
    assert decide(observed(contracts=None)).needs == {"contracts"}
    assert decide(observed({"spec.checkpoint": {"claim": "c"}}, contracts=None, claims=None)).needs == {
        "contracts", "claims",
    }  # fmt: skip


def test_wrong_fields_are_named_each_with_what_is_allowed() -> None:
    desired = decide(observed({"spec.training.steps": 0, "spec.memory.mode": "auto", "spec.typo": 1}))
    accepted = condition(desired, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    for words in ("spec.training.steps = 0: at least 1", "did you mean Auto?", "spec.typo: unknown field"):
        assert words in accepted["message"]
    assert "(line" not in accepted["message"]
    assert desired.status is not None and desired.status["state"] == "Rejected"
    assert condition(desired, "Stalled")["status"] == "True"
    assert not desired.creates


def test_a_spec_that_is_too_long_as_a_whole_is_rejected_with_its_size() -> None:
    notes = {f"note-{number}": "x" * 1000 for number in range(64)}
    accepted = condition(decide(observed({"spec.pod": {"annotations": notes}})), "Accepted")
    assert accepted["reason"] == "Valid", "64,000 characters are not too many"
    desired = decide(observed({"spec.pod": {"annotations": {**notes, "more": "x" * 1000}}}))
    accepted = condition(desired, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "bytes as JSON: at most 65,536" in accepted["message"]
    assert not desired.creates


@pytest.mark.parametrize(
    ("annotation", "is_free"),
    [
        ("container.apparmor.security.beta.kubernetes.io/trainer", False),
        ("seccomp.security.alpha.kubernetes.io/pod", False),
        ("cluster-autoscaler.kubernetes.io/safe-to-evict", True),
        ("kueue.x-k8s.io/podset-preferred-topology", True),
        ("kueue.x-k8s.io/podset-slice-size", True),
        ("kueue.x-k8s.io/podset-group-name", False),
    ],
)
def test_no_annotation_loosens_what_a_container_may_do(annotation: str, is_free: bool) -> None:
    """Where the CRD is older; a newer one rejects them at admission."""
    accepted = condition(decide(observed({"spec.pod": {"annotations": {annotation: "x"}}})), "Accepted")
    assert accepted["reason"] == ("Valid" if is_free else "InvalidSpec")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec.checkpoint": {"resume": "Never"}}, "spec.checkpoint.resume"),
        ({"spec.scheduling": {"gang": "Required"}, "spec.parallelism": {"nodes": 2}}, "spec.scheduling.gang"),
        ({"spec.scheduling": {"workloadPriorityClassName": "high"}}, "spec.scheduling.workloadPriorityClassName"),
    ],
)  # fmt: skip
def test_what_does_not_work_yet_is_rejected_with_a_sentence(changes: dict[str, Any], path: str) -> None:
    accepted = condition(decide(observed(changes)), "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "Unsupported")
    assert path in accepted["message"]


def test_an_entry_point_of_data_is_accepted_and_called_by_the_trainer_alone() -> None:
    desired = reconcile(observed({"spec.data": {"entrypoint": "a:b"}}), NOW)
    assert condition(desired, "Accepted")["status"] == "True"
    names = [made["metadata"]["name"] for made in desired.creates if made["kind"] == "Job"]
    assert len(names) == 1 and not names[0].endswith("-inspect")


def test_a_cuda_job_is_accepted() -> None:
    desired = reconcile(observed({"spec.parallelism": {"device": "Cuda"}}), NOW)
    assert condition(desired, "Accepted")["status"] == "True"
    (trainer,) = desired.creates[-1]["spec"]["template"]["spec"]["containers"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.pod.env": [{"name": "RANK", "value": "1"}]},
        {"spec.pod": {"labels": {"spillway.dev/job": "other"}}},
        {"spec.pod": {"annotations": {"kueue.x-k8s.io/queue-name": "other"}}},
        {"spec.checkpoint": {"claim": "c", "subPath": "../other"}},
        {"spec.checkpoint": {"claim": "c", "subPath": "/etc"}},
    ],
)
def test_what_the_operator_sets_itself_cannot_be_set(changes: dict[str, Any]) -> None:
    accepted = condition(decide(observed(changes)), "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")


def test_an_unknown_network_preset_is_rejected() -> None:
    """A known one was replaced by what it holds before the job is looked at."""
    desired = decide(observed({"spec.pod.networkPreset": "infiniband"}))
    accepted = condition(desired, "Accepted")
    assert (accepted["status"], accepted["reason"], desired.creates) == ("False", "InvalidSpec", ())
    assert accepted["message"].startswith("spec.pod.networkPreset = infiniband: not in the OperatorConfig")


def test_status_names_the_fields_that_the_attempt_inherited() -> None:
    desired = decide(observed(inherited=("pod.image", "scheduling.queueName")))
    assert desired.creates and desired.status is not None
    assert desired.status["inherited"] == ["pod.image", "scheduling.queueName"]


def test_an_invalid_spec_does_not_stop_an_attempt_that_lives() -> None:
    """A newer operator may be stricter; what runs goes on."""
    status = {"attempts": {"total": 1}}
    desired = decide(observed({"spec.typo": 1}, status, attempts=(attempt(ready=1, active=1),)))
    assert not desired.deletes
    assert desired.status is not None and condition(desired, "Running")["status"] == "True"


@pytest.mark.parametrize("cpu", ["0", 0, "0.0", "0m", "0e3"])
def test_a_pod_without_cores_is_rejected(cpu: Any) -> None:
    assert condition(decide(observed({"spec.pod.resources": {"cpu": cpu}})), "Accepted")["reason"] == "InvalidSpec"


@pytest.mark.parametrize("mode", ["Advise", "Disabled"])
def test_the_largest_job_that_can_be_written_down_has_a_status(mode: str) -> None:
    config = {
        "architecture": "llama", "hiddenSize": 1 << 17, "numLayers": 1024, "numHeads": 1024,
        "intermediateSize": 1 << 20, "vocabSize": 1 << 22,
    }  # fmt: skip
    training = {
        "steps": 10**12, "sequenceLength": 1 << 24, "globalBatchSize": 1 << 24, "microBatchSize": 1 << 20,
    }  # fmt: skip
    changes = {
        "spec.model.config": config, "spec.training": training,
        "spec.memory": {"mode": mode, "budget": {"host": "7E", "nvme": "7E"}},
    }  # fmt: skip
    desired = reconcile(observed(changes), NOW)
    assert desired.status is not None
    TrainingJobStatus.model_validate(desired.status)


def test_planning_that_fails_is_said_and_tried_again() -> None:
    def fails(*_: Any) -> Any:
        raise OverflowError("cannot convert float infinity to integer")

    desired = reconcile(observed(), NOW, fails)
    assert condition(desired, "Planned")["status"] == "False"
    assert "OverflowError" in condition(desired, "Planned")["message"]
    assert desired.look_again_seconds is not None


def test_a_job_that_no_node_can_carry_waits_with_the_sentence() -> None:
    seen = observed()
    unplaceable = Unplaceable("DoesNotFit", "host lacks 3 GiB; nearest: microBatchSize 1")
    desired = reconcile(seen, NOW, lambda job, cluster: unplaceable)
    planned = condition(desired, "Planned")
    assert (planned["status"], planned["reason"], planned["message"]) == ("False", "DoesNotFit", unplaceable.message)
    assert desired.look_again_seconds == 10
    assert desired.status is not None and desired.status["state"] == "Pending"
    again = reconcile(follow_up(seen, desired), "2026-11-21T10:02:30Z", lambda job, cluster: unplaceable)
    assert again.changes_nothing
    assert again.look_again_seconds == 120


def test_a_missing_claim_is_waited_for() -> None:
    changes = {"spec.checkpoint": {"claim": "checkpoints"}, "spec.data": {"text": {"claim": "corpus"}}}
    desired = decide(observed(changes, claims=(Claim("corpus", True, ("ReadOnlyMany",)), Claim("checkpoints", False))))
    assert condition(desired, "Planned")["reason"] == "ClaimNotFound"
    assert "PersistentVolumeClaim checkpoints" in condition(desired, "Planned")["message"]
    assert not desired.creates and desired.look_again_seconds == 10


@pytest.mark.parametrize(
    ("modes", "starts"),
    [
        (("ReadWriteOnce",), False),
        (("ReadWriteOncePod",), False),
        (("ReadWriteOnce", "ReadWriteMany"), True),
        ((), True),
    ],
)
def test_several_nodes_need_a_shared_checkpoint_claim(modes: tuple[str, ...], starts: bool) -> None:
    """No modes: the operator may not look at claims."""
    changes = {"spec.checkpoint": {"claim": "c"}, "spec.parallelism": {"nodes": 2}}
    desired = decide(observed(changes, claims=(Claim("c", True, modes),)))
    assert bool(desired.creates) is starts
    if not starts:
        assert condition(desired, "Planned")["reason"] == "ClaimNotShared"
        assert "must be ReadWriteMany" in condition(desired, "Planned")["message"]


@pytest.mark.parametrize(
    ("modes", "num_nodes", "starts"),
    [
        (("ReadWriteOnce",), 1, True),
        (("ReadWriteOnce",), 2, False),
        (("ReadOnlyMany",), 2, True),
        (("ReadWriteMany",), 2, True),
        ((), 2, True),
    ],
)
@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"text": {"claim": "c"}}, "spec.data.text.claim"),
        ({"builtin": "PythonStdlib", "evaluation": {"text": {"claim": "c"}}}, "spec.data.evaluation.text.claim"),
    ],
)
def test_several_nodes_need_a_claim_for_text_that_all_can_mount(
    data: dict[str, Any], field: str, modes: tuple[str, ...], num_nodes: int, starts: bool
) -> None:
    changes = {"spec.data": data, "spec.parallelism": {"nodes": num_nodes}}
    desired = decide(observed(changes, claims=(Claim("c", True, modes),)))
    assert bool(desired.creates) is starts
    if not starts:
        assert condition(desired, "Planned")["reason"] == "ClaimNotShared"
        assert f"{field} = c" in condition(desired, "Planned")["message"]


def test_checkpoints_are_not_written_to_a_claim_that_can_only_be_read() -> None:
    desired = decide(observed({"spec.checkpoint": {"claim": "c"}}, claims=(Claim("c", True, ("ReadOnlyMany",)),)))
    assert not desired.creates
    assert condition(desired, "Planned")["reason"] == "ClaimNotWritable"


FETCHED = {"spec.data": {"text": {"claim": "c", "subPath": "a", "fetch": {"uri": "https://host/a"}}}}


@pytest.mark.parametrize(
    ("changes", "num_nodes", "mode", "problem"),
    [
        ({"spec.pod.mounts": [{"path": "/m", "claim": "c", "writable": True}]}, 2, "ReadWriteOnce",
         "2 nodes write to it, so its access mode must be ReadWriteMany; it is ReadWriteOnce"),
        ({"spec.pod.mounts": [{"path": "/m", "claim": "c", "writable": True}]}, 1, "ReadOnlyMany",
         "writable is true, but its access mode is ReadOnlyMany; use a claim with ReadWriteOnce or ReadWriteMany"),
        (FETCHED, 2, "ReadWriteOnce",
         "2 nodes read the download from it, so its access mode must be ReadWriteMany; it is ReadWriteOnce"),
        (FETCHED, 2, "ReadOnlyMany",
         "the download must be written to it, but its access mode is ReadOnlyMany; use a claim with ReadWriteMany"),
    ],
)  # fmt: skip
def test_the_access_mode_that_is_asked_for_allows_every_use(
    changes: dict[str, Any], num_nodes: int, mode: str, problem: str
) -> None:
    seen = observed(changes | {"spec.parallelism": {"nodes": num_nodes}}, claims=(Claim("c", True, (mode,)),))
    assert condition(decide(seen), "Planned")["message"].endswith(f" = c: {problem}")


def test_every_claim_is_checked() -> None:
    changes = {
        "spec.checkpoint": {"claim": "good"}, "spec.data": {"text": {"claim": "bad"}}, "spec.parallelism": {"nodes": 2},
    }  # fmt: skip
    claims = (Claim("good", True, ("ReadWriteMany",)), Claim("bad", True, ("ReadWriteOnce",)))
    assert condition(decide(observed(changes, claims=claims)), "Planned")["reason"] == "ClaimNotShared"


@pytest.mark.parametrize("claim", ["../../victim/configmaps/plan", "a?watch=true", "A", "a/b", ".", "a..b"])
def test_the_name_of_a_claim_cannot_be_a_path(claim: str) -> None:
    for changes in ({"spec.checkpoint": {"claim": claim}}, {"spec.data": {"text": {"claim": claim}}}):
        assert condition(decide(observed(changes)), "Accepted")["reason"] == "InvalidSpec"


def test_without_a_claim_checkpoints_are_said_not_to_last() -> None:
    assert condition(decide(observed()), "CheckpointsDurable")["reason"] == "NoClaim"


def test_metrics_that_could_not_be_had_are_said_at_the_placement() -> None:
    stale = ClusterView(nodes=(), metrics_age_seconds=900.0, metrics_problem="no answer", metrics_source="Prometheus")
    for cluster, reason in (
        (ClusterView(), "NoNodeView"),
        (ClusterView(nodes=()), "NotConfigured"),
        (stale, "Stale"),
        (replace(stale, metrics_problem="", metrics_age_seconds=4.0), "Fresh"),
    ):
        desired = decide(replace(observed(), cluster=cluster))
        assert condition(desired, "MetricsAvailable")["reason"] == reason
        assert desired.creates


def test_epochs_are_counted_from_whatever_is_highest() -> None:
    desired = decide(observed(status={"attempts": {"total": 6, "ended": 6}}))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-7"
    desired = decide(observed(attempts=(attempt(4, outcome="Failed"),), status={"attempts": {"total": 4, "ended": 4}}))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-5"


def test_a_contract_that_cannot_be_read_is_never_used_again() -> None:
    """Of a newer operator, before a downgrade: its number stays taken, and the next attempt is planned."""
    unread = Contract(4, f"{NAME}-4", UID, '{"version": 9}', "{}", "{}", "{}")
    desired = decide(observed(contracts=(unread,), status={"attempts": {"total": 3, "ended": 3}}))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-5"


def forged(**job: Any) -> Contract:
    """A contract for attempt 2 that the operator would have written, but for some fields of job.json."""
    status = {"attempts": {"total": 1, "ended": 1}}
    data = decide(observed(status=status)).creates[0]["data"]
    told = json.dumps(json.loads(data["job.json"]) | job)
    return Contract(2, f"{NAME}-2", UID, told, data["plan.json"], data["decision.json"], data["attempt.json"])


def carried_on(contract: Contract, changes: dict[str, Any] | None = None) -> str:
    """Name of the children that are created while `contract` lies there."""
    desired = decide(observed(changes, contracts=(contract,), status={"attempts": {"total": 1, "ended": 1}}))
    names = {child["metadata"]["name"] for child in desired.creates}
    assert len(names) == 1
    assert "evil" not in json.dumps([dict(child) for child in desired.creates])
    return str(names.pop())


def test_a_contract_that_the_operator_would_have_written_is_carried_on() -> None:
    assert carried_on(forged()) == f"{NAME}-2"


def test_a_contract_that_somebody_forged_is_never_used() -> None:
    """Whoever may create ConfigMaps can copy the ownerReference; Jobs of the operator's are not theirs to make."""
    spec = json.loads(forged().job_json)["spec"]
    for changes in (
        {"spec": spec | {"pod": {"image": "evil"}}},
        {"spec": spec | {"pod": {"serviceAccountName": "evil"}}},
        {"namespace": "evil"},
        {"name": "evil"},
        {"uid": "evil"},
        {"master_address": "evil"},
        {"claims": {"evil": "/claims/evil"}},
        {"num_nodes": 4000},
    ):
        assert carried_on(forged(**changes)) == f"{NAME}-3"


def test_a_contract_of_a_spec_that_has_changed_since_is_not_carried_out() -> None:
    assert carried_on(forged(), {"spec.pod.resources": {"cpu": "3"}}) == f"{NAME}-3"


def test_a_contract_is_carried_out_with_fields_that_concern_no_attempt() -> None:
    assert carried_on(forged(), {"spec.lifecycle": {"maxRestarts": 7}}) == f"{NAME}-2"


def test_a_number_that_somebody_made_up_is_no_epoch() -> None:
    far = replace(forged(), attempt=10**12, name=f"{NAME}-{10**12}")
    assert carried_on(far) == f"{NAME}-2"


def test_a_contract_of_a_stranger_does_not_count() -> None:
    stranger = Contract(4, f"{NAME}-4", "another", "{}", "{}", "{}", "{}")
    desired = decide(observed(contracts=(stranger,), status={"attempts": {"total": 3, "ended": 3}}))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-4"


def test_a_resumed_run_keeps_its_number_of_threads() -> None:
    first = decide(observed()).creates[0]["data"]
    told = json.loads(first["job.json"]) | {"compute_threads": 17}
    contract = Contract(
        1, f"{NAME}-1", UID, json.dumps(told), first["plan.json"], first["decision.json"], first["attempt.json"]
    )
    second = decide(observed(contracts=(contract,), status={"attempts": {"total": 1, "ended": 1}}))
    assert json.loads(second.creates[0]["data"]["job.json"])["compute_threads"] == 17


@pytest.mark.parametrize("device", ["Cuda", "Cpu"])
def test_attempts_of_device_auto_keep_the_device_of_the_first(device: str) -> None:
    with_gpu = NodeView("node-a", {}, (), 8.0, 64 * GIB, 100 * GIB, {"nvidia.com/gpu": 1})
    without = replace(with_gpu, allocatable_devices={})
    before = ClusterView((with_gpu if device == "Cuda" else without,))
    desired = reconcile(replace(observed(), cluster=before), NOW)
    first = desired.creates[0]["data"]
    assert (json.loads(first["plan.json"])["device"], desired.status["plan"]["device"]) == (device, device)
    files = (first[name] for name in ("job.json", "plan.json", "decision.json", "attempt.json"))
    contracts = (Contract(1, f"{NAME}-1", UID, *files),)
    resumed = observed(contracts=contracts, status={"attempts": {"total": 1, "ended": 1}})
    second = reconcile(replace(resumed, cluster=ClusterView((with_gpu,))), NOW)
    plan = json.loads(second.creates[0]["data"]["plan.json"])
    assert (plan["device"], plan["reasons"][0]) == (device, f"device: {device}, as in earlier attempts")


def test_only_the_newest_attempt_lives() -> None:
    desired = decide(observed(attempts=(attempt(1), attempt(2)), status={"attempts": {"total": 2, "ended": 1}}))
    assert [deletion.name for deletion in desired.deletes] == [f"{NAME}-1"]
    assert desired.status is None


@pytest.mark.parametrize(("storage_class", "deleted"), [("fast", [f"{NAME}-1"]), ("", [])])
def test_ended_attempt_holding_volumes_is_deleted_when_the_next_begins(storage_class: str, deleted: list[str]) -> None:
    """Its spill claims go with its pods. The last one stays, for its logs."""
    changes = {"spec.spill": {"storageClassName": storage_class}}
    status = {"attempts": {"total": 2, "ended": 1}}
    ended = attempt(1, outcome="Failed")
    desired = decide(observed(changes, status, attempts=(ended, attempt(2, ready=1))))
    assert [deletion.name for deletion in desired.deletes] == deleted
    assert not decide(observed(changes, {"attempts": {"total": 1, "ended": 1}}, attempts=(ended,))).deletes


def test_an_ended_attempt_is_kept_until_its_cause_is_in_the_status() -> None:
    changes = {"spec.spill": {"storageClassName": "fast"}}
    seen = observed(
        changes, {"attempts": {"total": 1, "ended": 0}}, attempts=(attempt(1, outcome="Failed"), attempt(2))
    )
    assert not decide(seen).deletes


def test_a_clock_that_was_set_back_does_not_lengthen_a_pause() -> None:
    attempts = {"total": 1, "ended": 1, "shortInARow": 4}
    for end_time, starts in (
        ("2026-11-21T10:00:29Z", False),
        ("2026-11-21T10:00:32Z", False),
        ("2026-11-21T22:00:00Z", True),
    ):
        desired = decide(observed(status={"attempts": attempts | {"endTime": end_time}}))
        assert bool(desired.creates) is starts
        assert starts or (desired.look_again_seconds or 0.0) <= pause_seconds(4)


def test_a_clock_that_was_set_back_does_not_keep_pods_from_being_looked_at() -> None:
    seen = observed(
        status={"attempts": {"total": 1}}, attempts=(attempt(creation_time="2026-11-21T22:00:00Z"),), pods=None
    )
    assert decide(seen).needs == {"pods"}


def test_nothing_of_a_job_that_has_ended_lives_on() -> None:
    status = {"attempts": {"total": 1, "ended": 1}, "conditions": [{"type": "Complete", "status": "True"}]}
    desired = decide(observed(status=status, attempts=(attempt(2),)))
    assert [deletion.uid for deletion in desired.deletes] == ["job-2"]
    assert not desired.creates


def not_ready(pods: tuple[PodObject, ...] | None, seconds: int = 30, rejection: str = "") -> Desired:
    seen = observed(status={"attempts": {"total": 1}}, attempts=(attempt(active=1),), pods=pods)
    seen = replace(seen, pods_rejection=rejection)
    return decide(seen, f"2026-11-21T10:00:{seconds:02d}Z")


def test_an_attempt_is_given_ten_seconds_before_its_pods_are_looked_at() -> None:
    assert not_ready(None, 4).needs == frozenset()
    assert not_ready(None, 4).look_again_seconds == 6
    assert not_ready(None, 11).needs == {"pods"}


def test_the_schedulers_sentence_is_shown() -> None:
    pod = PodObject(
        "demo-1-0-x", "p", 0, "", "Pending", unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    )
    scheduled = condition(not_ready((pod,)), "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert scheduled["message"] == "demo-1-0-x: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def test_a_container_that_cannot_start_is_shown() -> None:
    pod = PodObject("demo-1-0-x", "p", 0, "node-0", "Pending", waiting="ImagePullBackOff: not found")
    desired = not_ready((pod,))
    assert condition(desired, "Scheduled")["status"] == "True"
    assert condition(desired, "Running")["reason"] == "ContainerWaiting"
    assert condition(desired, "Running")["message"] == (
        "demo-1-0-x: ImagePullBackOff: not found; check the image's name (spec.pod.image, by default the chart's "
        "trainer.image), the registry and spec.pod.imagePullSecrets; the kubelet tries again. "
        "After a change of the spec: kubectl delete job demo-1 -n team"
    )


@pytest.mark.parametrize("reason", ["FailedMount", "CreateContainerConfigError"])
def test_what_the_kubelet_tries_again_is_mended_in_place(reason: str) -> None:
    pod = PodObject("demo-1-0-x", "p", 0, "node-0", "Pending", waiting=f'{reason}: configmap "code" not found')
    assert condition(not_ready((pod,)), "Running")["message"] == (
        f'demo-1-0-x: {reason}: configmap "code" not found; fix the cause, for example create what is missing; the '
        "kubelet tries again. After a change of the spec: kubectl delete job demo-1 -n team"
    )


def test_the_advice_stays_whole_after_the_longest_sentence() -> None:
    pod = PodObject("demo-1-0-x", "p", 0, "node-0", "Pending", waiting="CreateContainerConfigError: " + "x" * 4000)
    message = condition(not_ready((pod,)), "Running")["message"]
    assert message.endswith("After a change of the spec: kubectl delete job demo-1 -n team")


def test_the_pod_that_is_not_ready_is_named() -> None:
    pods = (
        PodObject("demo-1-0-x", "p", 0, "node-0", "Running", ready=True),
        PodObject("demo-1-1-y", "q", 1, "node-1", "Running"),
    )
    running = condition(not_ready(pods), "Running")
    assert (running["reason"], running["message"]) == ("PodsNotReady", "demo-1-1-y is not running")


def test_an_attempt_without_pods_is_shown() -> None:
    scheduled = condition(not_ready(()), "Scheduled")
    assert scheduled["reason"] == "NoPods"
    assert "kubectl describe job demo-1 -n team" in scheduled["message"]


def test_rejected_pods_give_a_warning_and_a_condition_with_the_message() -> None:
    desired = not_ready((), rejection="exceeded quota: small, requested: limits.memory=2Gi")
    scheduled = condition(desired, "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "PodsRejected")
    assert scheduled["message"] == (
        "Job demo-1 cannot create its pods: exceeded quota: small, requested: limits.memory=2Gi"
    )
    assert condition(desired, "Running")["reason"] == "Starting"
    assert ("Warning", "PodsRejected") in {(note.type, note.reason) for note in desired.events}


def test_one_pod_that_came_through_hides_no_rejection_of_the_other() -> None:
    pair = {"spec.parallelism": {"nodes": 2}, "spec.training.globalBatchSize": 8}
    pod = PodObject("demo-1-0-x", "p", 0, "", "Pending", unschedulable="no room")
    seen = observed(pair, status={"attempts": {"total": 1}}, attempts=(attempt(active=1),), pods=(pod,))
    scheduled = condition(decide(replace(seen, pods_rejection="exceeded quota"), "2026-11-21T10:00:30Z"), "Scheduled")
    assert scheduled["message"] == "Job demo-1 cannot create more pods: exceeded quota"


def test_a_rejection_of_long_ago_says_nothing_once_every_pod_is_there() -> None:
    pod = PodObject("demo-1-0-x", "p", 0, "node-0", "Pending")
    assert condition(not_ready((pod,), rejection="of long ago"), "Scheduled")["reason"] == "Scheduled"


def test_pod_with_a_node_counts_as_scheduled_and_its_wait_is_reported() -> None:
    waiting = PodObject("a", "p", 0, "node-0", "Pending", waiting="ErrImagePull", unschedulable="of long ago")
    assert condition(not_ready((waiting,)), "Scheduled")["reason"] == "Scheduled"
    desired = not_ready((waiting, PodObject("b", "q", 1, "", "Pending", unschedulable="no room")))
    assert condition(desired, "Scheduled")["message"] == "b: no room"
    assert condition(desired, "Running")["reason"] == "ContainerWaiting"


def test_pods_that_do_not_run_are_looked_at_twice_a_minute() -> None:
    pod = PodObject("a", "p", 0, "", "Pending", unschedulable="no room")
    begun = {"type": "Running", "status": "False", "reason": "Starting", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    status = {"attempts": {"total": 1}, "conditions": [begun]}
    created = "2026-11-20T10:00:00Z"
    seen = observed(status=status, attempts=(attempt(active=1, creation_time=created),), pods=(pod,))
    assert decide(seen).look_again_seconds == 30


def test_a_pod_long_past_its_grace_period_is_on_a_lost_node() -> None:
    stuck = PodObject("demo-1-0-x", "p", 0, "node-0", "Running", deleting=True, deletion_time="2026-11-21T09:59:00Z")
    assert [deletion.name for deletion in not_ready((stuck,)).deletes] == [f"{NAME}-1"]
    within = replace(stuck, deletion_time="2026-11-21T10:00:10Z")
    assert not_ready((within,)).changes_nothing or not not_ready((within,)).deletes


def test_a_status_of_another_version_is_read_as_far_as_it_goes() -> None:
    status = {
        "attempts": {"total": 3, "ended": 3},
        "novelty": {"a": 1},
        "conditions": [{"type": "New", "status": "True"}],
    }
    desired = decide(observed(status=status))
    assert desired.creates[0]["metadata"]["name"] == f"{NAME}-4"


def test_every_status_is_valid_by_its_own_schema() -> None:
    for seen in (observed(), observed({"spec.typo": 1}), observed({"spec.suspend": True})):
        TrainingJobStatus.model_validate(decide(seen).status)


documents = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
changes_of_spec = st.dictionaries(
    st.sampled_from([
        "model", "data", "training", "parallelism", "memory", "checkpoint", "lifecycle", "scheduling", "suspend", "pod",
        "spill", "members",
    ]),
    documents, max_size=3,
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(changes_of_spec, documents, st.booleans(), st.sampled_from(["", "Complete", "Failed"]), st.text(max_size=12))
def test_reconcile_is_total(spec: Any, status: Any, lives: bool, outcome: Any, created: str) -> None:
    seen = observed()
    job = replace(seen.job, spec=json.dumps(TINY["spec"] | spec).encode(), status=json.dumps(status).encode())
    attempts = (attempt(1, outcome=outcome, creation_time=created, deletion_time=created),) if lives else ()
    desired = decide(replace(seen, job=job, attempts=attempts))
    if desired.status is not None:
        TrainingJobStatus.model_validate(desired.status)


def test_the_decision_about_a_running_job_is_little_work() -> None:
    seen = observed(status={"attempts": {"total": 1}}, attempts=(attempt(ready=1, active=1),))
    seen = follow_up(seen, decide(seen))
    assert decide(seen).changes_nothing
    assert num_calls(lambda: decide(seen)) < MOST_CALLS


MOST_CALLS = 1000
"""it takes 300, and a plan takes a million"""


def num_calls(work: Callable[[], object]) -> int:
    """Of functions written in Python."""
    calls: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls["call"]


def test_grace_of_the_model_is_that_of_a_pod() -> None:
    assert GRACE >= 30


# --- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "jobs"), [(2, 0), (4, 0), (5, 1), (30, 16)])
def test_jobs_of_attempts_that_ended_long_ago_are_deleted_with_the_next_start(number: int, jobs: int) -> None:
    ended = tuple(attempt(one, outcome="Failed", outcome_time="2026-11-21T09:00:00Z") for one in range(1, number))
    status = {"attempts": {"total": number - 1, "ended": number - 1}}
    desired = decide(observed(status=status, attempts=ended))
    assert [one["kind"] for one in desired.creates] == ["ConfigMap", "Job"]
    assert [one.name for one in desired.deletes] == [f"{NAME}-{old}" for old in range(number - 4, 0, -1)][:jobs]
    assert all((one.kind, one.uid) == ("Job", f"job-{one.name.rpartition('-')[2]}") for one in desired.deletes)


def test_old_contracts_are_deleted_but_those_of_attempts_that_ran_out_of_memory() -> None:
    two_pods = {"spec.parallelism.nodes": 2}
    kept = [Contract(one, f"{NAME}-{one}", UID, "{}", "{}", "{}", "{}", f"map-{one}") for one in range(1, 26)]
    ran_out = {"attempt": 2, "reason": "DeviceOutOfMemory"}
    status = {"attempts": {"total": 25, "ended": 25}, "escalations": [ran_out]}
    desired = decide(observed(two_pods, status=status, contracts=tuple(kept)))
    found = [(one.kind, one.name, one.uid) for one in desired.deletes]
    assert found == [
        *(("ConfigMap", f"{NAME}-{old}", f"map-{old}") for old in (5, 4, 3, 1)),
        *(("Service", f"{NAME}-{old}", "") for old in (5, 4, 3, 1)),
    ]
    stranger = tuple(replace(one, owner_uid="other") for one in kept)
    assert decide(observed(two_pods, status=status, contracts=stranger)).deletes == ()
