"""What happens after an attempt ends, by reason: one table for the operator and `spillway run`.

If it can help, another attempt starts from the last committed checkpoint; after memory ran out, it has another plan
(ladder.py). A failure that would only repeat (same bytes, same numbers) ends the job with the trainer's own message.
"""

from __future__ import annotations

from enum import Enum

from spillway.errors import RANK_CRASHED, ExitCode

OOM_KILLED = "OOMKilled"
"""The kernel killed a process of the pod; on cgroup v1 it may come with any exit code."""
NODE_LOST = "NodeLost"
POD_DELETED = "PodDeleted"
"""Deleted or evicted from outside: a disruption, not a failure."""
EVICTED = "Evicted"
"""Evicted by the kubelet, because the node or the pod's volume ran out of space."""
JOB_DELETED = "JobDeleted"
"""The attempt's Job was deleted."""
GANG_YIELDED = "GangYielded"
"""Only some of the attempt's pods had nodes, so the operator released these nodes."""
REPLANNED = "Replanned"
"""The scheduler found no node for the attempt's pods, and another plan fits what is free."""
NO_PROGRESS = "NoProgress"
"""No step for lifecycle.stallSeconds: the operator ended the attempt."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""Attempts ran for lifecycle.activeDeadlineSeconds."""
PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
"""No attempt ran for lifecycle.pendingDeadlineSeconds."""

MEMORY_ERRORS = frozenset(
    {
        ExitCode.DEVICE_OUT_OF_MEMORY.reason,
        ExitCode.HOST_OUT_OF_MEMORY.reason,
        ExitCode.SPILL_VOLUME_FULL.reason,
        OOM_KILLED,
    }
)
"""Counted separately from crashes and disruptions."""


class Retry(Enum):
    """Whether another attempt follows, and what it is charged to."""

    NEVER = "never"
    COUNTED = "counted"
    """Counts against lifecycle.maxRestarts."""
    FREE = "free"
    """A disruption: not the job's fault."""
    REPLANNED = "replanned"
    """Counts against the ladder's tries: only another plan can help, and mode Auto may choose one."""


RETRIES: dict[str, Retry] = {
    RANK_CRASHED: Retry.COUNTED,
    ExitCode.CHECKPOINT_CORRUPT.reason: Retry.COUNTED,
    ExitCode.SPILL_IO_ERROR.reason: Retry.COUNTED,
    ExitCode.FENCED.reason: Retry.COUNTED,
    ExitCode.DEVICE_FAULT.reason: Retry.COUNTED,
    NO_PROGRESS: Retry.COUNTED,
    ExitCode.PREEMPTED.reason: Retry.FREE,
    NODE_LOST: Retry.FREE,
    POD_DELETED: Retry.FREE,
    JOB_DELETED: Retry.FREE,
    GANG_YIELDED: Retry.FREE,
    REPLANNED: Retry.FREE,
    **dict.fromkeys(MEMORY_ERRORS, Retry.REPLANNED),
}
"""Reason -> whether another attempt follows; for every other reason, NEVER."""


FAULTS_OF_A_NODE = frozenset({ExitCode.DEVICE_FAULT.reason, ExitCode.SPILL_IO_ERROR.reason})
"""Reasons that speak against the node, which the job then avoids."""
CRASHES = frozenset({RANK_CRASHED, NO_PROGRESS})
"""Reasons that speak against a node if two attempts in a row end with them there."""


def is_fault_of_node(reason: str, node: str, reason_before: str, node_before: str) -> bool:
    """Whether the end of an attempt with `reason` on `node` counts as the node's fault."""
    again = reason in CRASHES and reason_before in CRASHES and node == node_before
    return bool(node) and (reason in FAULTS_OF_A_NODE or again)


def retry_of(reason: str) -> Retry:
    return RETRIES.get(reason, Retry.NEVER)
