"""Conditions of a TrainingJob: all types and reasons with their meaning, and how findings become conditions and events.

    findings of one look -> merged into the list -> kstatus summary (Ready, Reconciling, Stalled), state, events

docs/conditions.md has the same table; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from spillway.api.status import Condition
from spillway.errors import RANK_CRASHED, ExitCode
from spillway.feedback import retries

from .observed import EventNote

ACCEPTED = "Accepted"
PLANNED = "Planned"
QUOTA_RESERVED = "QuotaReserved"
SCHEDULED = "Scheduled"
RUNNING = "Running"
PROGRESSING = "Progressing"
CHECKPOINTS_DURABLE = "CheckpointsDurable"
METRICS_AVAILABLE = "MetricsAvailable"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"
READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"

SUSPENDED_BY_USER = "SuspendedByUser"
STOPPING = "Stopping"
"""The attempt was asked to stop; its pods may still be writing a checkpoint."""
RESTARTING = "Restarting"
EVICTED_BY_QUEUE = "EvictedByQueue"
UNSUPPORTED = "Unsupported"
INVALID_SPEC = "InvalidSpec"
NAME_CONFLICT = "NameConflict"
INSPECTING, INSPECTION_FAILED = "Inspecting", "InspectionFailed"
CLAIM_NOT_FOUND = "ClaimNotFound"
CLAIM_NOT_SHARED = "ClaimNotShared"
CLAIM_NOT_WRITABLE = "ClaimNotWritable"
CONTRACT_TOO_LARGE = "ContractTooLarge"
NO_NUMBER = "NoNumber"
NO_REPORT = "NoReport"
USED_LATER = "UsedLater"
CONTRACT_NOT_READ = "ContractNotRead"
JOB_GONE = "JobGone"
PODS_REJECTED = "PodsRejected"

CAUSES: dict[str, str] = {
    RANK_CRASHED: "a rank exited with an undocumented code, or was killed by a signal",
    ExitCode.USER_ERROR.reason: "the trainer found an invalid field, dataset or claim (exit code 64)",
    ExitCode.DEVICE_OUT_OF_MEMORY.reason: "the device budget was exceeded (70)",
    ExitCode.NON_FINITE.reason: "loss or gradients were not finite, and training.nonFinite is Fail or the loss scale "
    "was at its minimum (71)",
    ExitCode.SPILL_VOLUME_FULL.reason: "the spill volume has too little space for the spill file (72)",
    ExitCode.SPILL_IO_ERROR.reason: "a read or write on the spill volume failed (73)",
    ExitCode.CHECKPOINT_CORRUPT.reason: "no checkpoint of the job is intact (74)",
    ExitCode.PREEMPTED.reason: "stopped on request, after a committed checkpoint (75)",
    ExitCode.HOST_OUT_OF_MEMORY.reason: "an allocation of host memory failed (76)",
    ExitCode.FENCED.reason: "a newer attempt had taken over the run (77)",
    ExitCode.DEVICE_FAULT.reason: "a device failed, or its results differed from the CPU's before the first step (78)",
    retries.OOM_KILLED: "the kernel killed a process, because the pod's memory limit was reached",
    retries.NODE_LOST: "the node was lost or shut down",
    retries.POD_DELETED: "a pod was deleted, drained, preempted, or evicted because its node ran out of space",
    retries.EVICTED: "the kubelet evicted a pod, because it used more disk than its limit",
    retries.JOB_DELETED: "the attempt's Job was deleted",
    retries.GANG_YIELDED: "only some of the attempt's pods had nodes, and these nodes were released for an older job "
    "or after scheduling.gangWaitSeconds",
    retries.REPLANNED: "the scheduler found no node for the attempt's pods, and another plan fits the free nodes",
    retries.NO_PROGRESS: "no step was reported for lifecycle.stallSeconds",
    retries.DEADLINE_EXCEEDED: "attempts ran for lifecycle.activeDeadlineSeconds",
    retries.PENDING_DEADLINE_EXCEEDED: "the job waited for an attempt to run for lifecycle.pendingDeadlineSeconds; "
    "the message says why",
}
"""Why an attempt ended: reasons of Failed, and of attempts.lastReason."""

ENDINGS = (
    retries.NO_PROGRESS,
    retries.DEADLINE_EXCEEDED,
    retries.PENDING_DEADLINE_EXCEEDED,
    retries.GANG_YIELDED,
    retries.REPLANNED,
)
"""Reasons of Running while the operator ends an attempt; they are written before the attempt is ended."""

REASONS: dict[str, dict[str, str]] = {
    ACCEPTED: {
        "Valid": "the spec can be run",
        USED_LATER: "the spec was changed; the current attempt continues with the old values; the message names the "
        "fields",
        CONTRACT_NOT_READ: "the current attempt was created by a newer operator, or its ConfigMap was made by hand: it "
        "continues, and is not compared with changes of the spec",
        INVALID_SPEC: "False: fields are wrong; the message names each with what was found and what is allowed",
        UNSUPPORTED: "False: fields ask for unsupported features; the message names alternatives",
        NAME_CONFLICT: "False: an object that does not belong to this job has the name of one of the attempt's "
        "objects; nothing was created",
    },
    PLANNED: {
        "Planned": "a memory plan was made; the message says where the attempt should run, and why",
        INSPECTING: "Unknown: a pod downloads what the job reads, and builds the model to find its sizes",
        INSPECTION_FAILED: "False: the download failed, or the model could not be built; to try again, delete the Job "
        "that the message names",
        "NoNode": "False: no node can run a pod of this job now; the operator tries again",
        "DoesNotFit": "False: no plan fits the existing nodes; the message has the missing bytes and the nearest "
        "configuration that fits; the operator tries again, because nodes change",
        CLAIM_NOT_FOUND: "False: a PersistentVolumeClaim that the spec names does not exist; the operator tries again",
        CLAIM_NOT_SHARED: "False: more than one node uses a claim that only one can mount",
        CLAIM_NOT_WRITABLE: "False: the job writes to the claim, but its access mode is ReadOnlyMany",
        CONTRACT_TOO_LARGE: "False: spec and plan do not fit in a ConfigMap (1 MiB)",
        NO_NUMBER: "False: somebody changed status.attempts to the highest possible number, so no further attempt can "
        "be numbered",
    },
    QUOTA_RESERVED: {
        "Waiting": "False: the queue has not admitted the attempt yet",
        "Admitted": "the queue admitted the attempt",
        EVICTED_BY_QUEUE: "False: Kueue evicted the attempt, or another client suspended its Job; the attempt ends and "
        "another one follows",
    },
    SCHEDULED: {
        "Waiting": "Unknown: the attempt was created, its pods are not examined yet",
        "Scheduled": "every pod has a node",
        "NoPods": "False: the attempt's Job has no pods yet; its events say why",
        PODS_REJECTED: "False: the API server rejects pods of the attempt (quota, LimitRange, Pod Security, another "
        "policy); the message is the server's; the Job controller tries again",
        "Unschedulable": "False: the scheduler finds no node; the message is the scheduler's",
        "Rejected": "False: the API server rejected an object of the attempt; the message is the server's",
        "NoAttempt": "False: there is no current attempt",
    },
    RUNNING: {
        "Starting": "False: the attempt was created",
        "Running": "every pod runs",
        "ContainerWaiting": "False: a container cannot start, for example because its image cannot be pulled",
        "PodsNotReady": "False: a pod has a node but is not running (yet, or any more)",
        retries.NO_PROGRESS: "no step was reported for lifecycle.stallSeconds: the attempt is being ended, and another "
        "one follows",
        retries.DEADLINE_EXCEEDED: "lifecycle.activeDeadlineSeconds is exceeded: the attempt writes a checkpoint and "
        "ends",
        retries.PENDING_DEADLINE_EXCEEDED: "False: lifecycle.pendingDeadlineSeconds is exceeded: the attempt is "
        "withdrawn",
        retries.GANG_YIELDED: "False: only some of the attempt's pods have nodes: the attempt releases them, and "
        "another attempt follows",
        retries.REPLANNED: "False: the scheduler finds no node for the attempt's pods, and another plan fits the free "
        "nodes: the attempt is withdrawn, and one with that plan follows",
        JOB_GONE: "False: the attempt's Job was deleted, but its pods still run; the message says how to delete them",
        "Queued": "False: the attempt waits in a queue",
        RESTARTING: "False: the last attempt ended and another one follows",
        "NotStarted": "False: no attempt was started yet",
        "Suspended": "False: the job is suspended",
        "Ended": "False: the job has ended",
    },
    PROGRESSING: {
        "Waiting": "Unknown: the attempt has not reported a step yet",
        "Stepping": "steps are reported",
        NO_REPORT: "Unknown: no step was reported for five minutes, or for three predicted steps if these take longer. "
        "Or no step was reported for lifecycle.stallSeconds, but the attempt is not ended, because no other job "
        "reports either or because this job has never reported",
        retries.NO_PROGRESS: "False: no step for lifecycle.stallSeconds",
        "NotRunning": "False: there is no current attempt",
    },
    CHECKPOINTS_DURABLE: {
        "NoClaim": "False: checkpoint.claim is not set, so checkpoints are lost with the pod",
        "NoCheckpoint": "Unknown: the job has not reported a checkpoint yet",
        "Committed": "there is a checkpoint on the claim",
    },
    METRICS_AVAILABLE: {
        "Fresh": "live metrics were used for the placement of the current attempt",
        "Stale": "False: live metrics were too old or not available; the attempt was placed without them",
        "NotConfigured": "False: the operator has no source of metrics; the attempt was placed without them",
        "NoNodeView": "False: the operator has no permission to list nodes; the attempt is planned for a node of the "
        "built-in catalog of hardware",
    },
    SUSPENDED: {
        SUSPENDED_BY_USER: "spec.suspend is true and nothing runs",
        STOPPING: "False: spec.suspend was set to true and the attempt is ending",
        "NotSuspended": "False: spec.suspend is false",
    },
    COMPLETE: {
        "Completed": "every step was trained",
        "NotComplete": "False: steps are left, or the job failed",
    },
    FAILED: {"NotFailed": "False: the job has not failed", **CAUSES},
    READY: {
        "Running": "every pod runs and is not about to be ended, or the job is complete or suspended",
        "NotReady": "False: the job waits for something, or failed",
    },
    RECONCILING: {
        "InProgress": "the operator, the queue or the scheduler is working on the job",
        "Settled": "False: the job does not wait for anything",
    },
    STALLED: {
        "Failed": "the job failed",
        "Rejected": "the spec is rejected; the job does not continue until it changes",
        "NotStalled": "False: nothing blocks the job permanently",
    },
}
"""Type -> reason -> meaning, in the order of the list. A prefix names the reason's status unless it is True."""

Truth = Literal["True", "False", "Unknown"]
LONGEST_MESSAGE = 1024
"""Longest message, in characters; those from other programs can be longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition's new status, as found by one look."""

    type: str
    status: Truth
    reason: str
    message: str = ""

    def __post_init__(self) -> None:
        assert self.reason in REASONS[self.type], f"{self.type}/{self.reason} is not documented"


def true(type_: str, reason: str, message: str = "") -> Finding:
    return Finding(type_, "True", reason, clean(message))


def false(type_: str, reason: str, message: str = "") -> Finding:
    return Finding(type_, "False", reason, clean(message))


def unknown(type_: str, reason: str, message: str = "") -> Finding:
    return Finding(type_, "Unknown", reason, clean(message))


def clean(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """`text` as one printable line of at most `longest` characters."""
    words = "".join(letter if letter.isprintable() else " " for letter in text[: 8 * longest]).split()
    line = " ".join(words)
    return line if len(line) <= longest else line[: longest - 1] + "…"


# --- the list ---------------------------------------------------------------------------------------------------------


def find(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == type_), None)


def holds(conditions: Iterable[Condition], type_: str, reason: str | None = None) -> bool:
    """Whether the condition is True (or, with a reason, has that reason)."""
    found = find(conditions, type_)
    if found is None:
        return False
    return found.status == "True" if reason is None else found.reason == reason


def merge(old: tuple[Condition, ...], findings: Iterable[Finding], generation: int, now: str) -> tuple[Condition, ...]:
    """The new list: findings replace old conditions, plus the summary. lastTransitionTime changes only with status."""
    before = {condition.type: condition for condition in old}
    held = {c.type: Finding(c.type, c.status, c.reason, c.message) for c in old if c.reason in REASONS.get(c.type, ())}
    held |= {finding.type: finding for finding in findings}
    held |= {finding.type: finding for finding in _summary(held)}
    return tuple(
        _condition(held[type_], before.get(type_), generation, now) for type_ in REASONS if type_ in held
    )  # fmt: skip


def _condition(finding: Finding, before: Condition | None, generation: int, now: str) -> Condition:
    same = before is not None and before.status == finding.status and before.last_transition_time is not None
    return Condition(
        type=finding.type,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if same and before else now,
    )


def _summary(held: dict[str, Finding]) -> tuple[Finding, ...]:
    """kstatus: Ready, Reconciling and Stalled from the other conditions, for tools that do not know TrainingJobs."""

    def is_(type_: str, status: Truth = "True") -> bool:
        return type_ in held and held[type_].status == status

    if is_(FAILED):
        message = held[FAILED].message
        return false(READY, "NotReady", message), false(RECONCILING, "Settled"), true(STALLED, "Failed", message)
    if is_(ACCEPTED, "False") and held[ACCEPTED].reason in (INVALID_SPEC, UNSUPPORTED):
        message = held[ACCEPTED].message
        return false(READY, "NotReady", message), false(RECONCILING, "Settled"), true(STALLED, "Rejected", message)
    ending = (SUSPENDED in held and held[SUSPENDED].reason == STOPPING) or (
        RUNNING in held and held[RUNNING].reason in ENDINGS
    )
    if is_(COMPLETE) or is_(SUSPENDED) or (is_(RUNNING) and not ending):
        return true(READY, "Running"), false(RECONCILING, "Settled"), false(STALLED, "NotStalled")
    return false(READY, "NotReady"), true(RECONCILING, "InProgress"), false(STALLED, "NotStalled")


# --- for people -------------------------------------------------------------------------------------------------------


def state(conditions: tuple[Condition, ...]) -> str:
    """One word for `kubectl get`; for display only."""
    accepted, running = find(conditions, ACCEPTED), find(conditions, RUNNING)
    for type_ in (FAILED, COMPLETE, SUSPENDED):
        if holds(conditions, type_):
            return type_
    if accepted is None or accepted.status != "True":
        return "Rejected" if accepted is not None and accepted.status == "False" else "Planning"
    if running is not None and (running.status == "True" or running.reason == JOB_GONE):
        return "Running"
    if running is not None and running.reason in (RESTARTING, "Queued"):
        return running.reason
    planned, scheduled = find(conditions, PLANNED), find(conditions, SCHEDULED)
    if scheduled is not None and scheduled.reason == "Rejected":
        return "Pending"
    return {"True": "Starting", "False": "Pending"}.get(planned.status if planned else "", "Planning")


_ACTIONS = {
    ACCEPTED: "Accept", PLANNED: "Plan", QUOTA_RESERVED: "Queue", SCHEDULED: "Schedule", RUNNING: "Run",
    SUSPENDED: "Suspend", COMPLETE: "Complete", FAILED: "Fail",
}  # fmt: skip
_QUIET = {"Valid", "Waiting", "Starting", "NotStarted", "NotSuspended", "NotComplete", "NotFailed", "NoAttempt",
          "Ended", "Queued", "Suspended", "Scheduled", STOPPING}  # fmt: skip
"""Reasons that emit no event."""
_BAD = {FAILED}
"""Types that are bad when True."""


def notes(old: tuple[Condition, ...], new: tuple[Condition, ...]) -> tuple[EventNote, ...]:
    """One event for each condition whose status or reason changed, except quiet ones."""
    before = {condition.type: (condition.status, condition.reason) for condition in old}
    return tuple(
        _note(condition)
        for condition in new
        if condition.type in _ACTIONS
        and condition.reason not in _QUIET
        and before.get(condition.type) != (condition.status, condition.reason)
    )


def _note(condition: Condition) -> EventNote:
    good = (condition.status == "True") != (condition.type in _BAD) and condition.reason not in ENDINGS
    return EventNote(
        type="Normal" if good else "Warning",
        reason=condition.reason,
        action=_ACTIONS[condition.type],
        note=condition.message or f"{condition.type} is {condition.status}",
    )
