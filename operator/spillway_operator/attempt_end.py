"""Why an attempt ended, from what its pods left behind.

A pod's own failure counts before one that was done to it, the earliest before later ones; ranks that only lost their
peers ("follower" in the message) are passed over, and so are pods that were deleted because another one failed.

    reason OOMKilled                     -> OOMKilled; on cgroup v1 it comes with any exit code
    exit code with the message that fits -> the reason of that code (spillway.errors.ExitCode)
    evicted, node lost, pod deleted      -> a disruption, by what Kubernetes says of the pod
    else                                 -> RankCrashed
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spillway.errors import RANK_CRASHED, ExitCode, reason_of
from spillway.retries import EVICTED, NODE_LOST, OOM_KILLED, POD_DELETED

from .conditions import clean
from .observed import ContainerEnding, PodObject

TERMINATION_VERSION = 1
"""of the trainer's message; this one and the one before are read"""
LONGEST_TERMINATION = 4096
"""characters; the kubelet keeps no more"""
_NODE_GONE = ("DeletionByTaintManager", "DeletionByPodGC")
"""reasons of DisruptionTarget: the node stopped answering, or its object is gone"""
_NODE_SHUT_DOWN = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
"""reasons in a pod's status that the kubelet or the node controller gives"""


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Termination:
    """The trainer's message, as far as it can be believed."""

    reason: str = ""
    message: str = ""
    rank: int | None = None
    step: int | None = None
    follower: bool = False


def cause_of_end(pods: Iterable[PodObject], num_nodes: int) -> Cause:
    """The cause of a failed attempt; `pods` are those that are still there, finished or not."""
    there = tuple(pods)
    own = sorted((pod for pod in there if _failed_by_itself(pod)), key=_precedence)
    if own:
        return _own_failure(own[0])
    disrupted = sorted((pod for pod in there if _is_disrupted(pod)), key=lambda pod: pod.index)
    if disrupted:
        return _disruption(disrupted[0])
    if len({pod.index for pod in there}) < num_nodes:
        missing = min(set(range(num_nodes)) - {pod.index for pod in there})
        return Cause(POD_DELETED, f"the pod of node {missing} was deleted")
    followers = sorted((pod for pod in there if _exit_code(pod)), key=_precedence)
    if followers:
        return _own_failure(followers[0])
    return Cause(RANK_CRASHED, "the attempt's Job failed, and no pod says why")


def read_termination(ending: ContainerEnding) -> Termination:
    """What the trainer said, when it is JSON of a known version and speaks of this exit code."""
    said = _object(ending.message[:LONGEST_TERMINATION])
    if said.get("v") not in (TERMINATION_VERSION - 1, TERMINATION_VERSION) or isinstance(said.get("v"), bool):
        return Termination()
    code, reason = said.get("exitCode", ending.exit_code), said.get("reason")
    if code != ending.exit_code or reason != reason_of(ending.exit_code):
        return Termination(follower=said.get("follower") is True)
    message = said.get("message")
    return Termination(
        reason=str(reason),
        message=clean(message) if isinstance(message, str) else "",
        rank=_count(said.get("rank")),
        step=_count(said.get("step")),
        follower=said.get("follower") is True,
    )


# --- which pod --------------------------------------------------------------------------------------------------------


def _exit_code(pod: PodObject) -> int:
    return pod.ending.exit_code if pod.ending else 0


def _is_out_of_memory(pod: PodObject) -> bool:
    return pod.ending is not None and pod.ending.reason == OOM_KILLED


def _is_disrupted(pod: PodObject) -> bool:
    return bool(pod.deleting or pod.disruption or pod.status_reason)


def _failed_by_itself(pod: PodObject) -> bool:
    """Ended with a failure of its own: not a follower, and not killed from outside before it could say anything."""
    if pod.ending is None or (not pod.ending.exit_code and not _is_out_of_memory(pod)):
        return False
    if _is_out_of_memory(pod):
        return True
    termination = read_termination(pod.ending)
    if termination.follower:
        return False
    documented = termination.reason not in ("", RANK_CRASHED)
    return documented or not _is_disrupted(pod)


def _precedence(pod: PodObject) -> tuple[str, bool, bool, int]:
    """The earliest first; within its second out of memory first, an orderly stop last."""
    assert pod.ending is not None
    stopped = pod.ending.exit_code == ExitCode.PREEMPTED
    return (pod.ending.finished_at, not _is_out_of_memory(pod), stopped, pod.index)


# --- what it says -----------------------------------------------------------------------------------------------------


def _own_failure(pod: PodObject) -> Cause:
    ending = pod.ending
    assert ending is not None
    where = f"{pod.name} on {pod.node}" if pod.node else pod.name
    if ending.reason == OOM_KILLED:
        return Cause(
            OOM_KILLED,
            f"{where}: the kernel killed a process, because the pod reached its memory limit (exit code "
            f"{ending.exit_code}); lower spec.memory.budget.host, or the batch, so that less is held",
        )
    termination = read_termination(ending)
    if termination.reason:
        rank = "" if termination.rank is None else f"rank {termination.rank}"
        step = "" if termination.step is None else f"step {termination.step}"
        place = ", ".join(part for part in (rank, step) if part)
        said = termination.message or f"exit code {ending.exit_code}"
        return Cause(termination.reason, clean(f"{where}{f' ({place})' if place else ''}: {said}"))
    return Cause(
        RANK_CRASHED, clean(f"{where}: the trainer ended with exit code {ending.exit_code}{_last_words(ending)}")
    )


def _disruption(pod: PodObject) -> Cause:
    where = f"{pod.name} on {pod.node}" if pod.node else pod.name
    said = clean(pod.status_message) if pod.status_message else ""
    because = f": {said}" if said else ""
    if pod.disruption in _NODE_GONE or pod.status_reason in _NODE_SHUT_DOWN:
        return Cause(NODE_LOST, clean(f"{where}: its node was lost ({pod.disruption or pod.status_reason}){because}"))
    if pod.status_reason == EVICTED and not pod.disruption:
        # The kubelet marks an eviction for want of space on the node as a disruption; this pod exceeded its own limit.
        return Cause(EVICTED, clean(f"{where}: evicted by the kubelet{because}"))
    how = pod.disruption or pod.status_reason or "deleted"
    return Cause(POD_DELETED, clean(f"{where}: taken away ({how}){because}"))


def _last_words(ending: ContainerEnding) -> str:
    """Of a process that left no message of ours: the last line that the kubelet kept of its log."""
    said = _object(ending.message[:LONGEST_TERMINATION]).get("message")
    text = said if isinstance(said, str) else ending.message[-LONGEST_TERMINATION:]
    lines = [line for line in (clean(line, 300) for line in text.splitlines()) if line]
    return f"; it last said: {lines[-1]}" if lines else ""


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
