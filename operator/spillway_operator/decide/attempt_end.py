"""Determines why an attempt ended, from the states of its pods.

A pod's own failure counts before one that was done to it, the earliest before later ones; ranks that only lost their
peers ("follower" in the message) are passed over, and so are pods that were deleted because another one failed. A
follower whose peer is gone is the hard case, see `cause_of_end`.

    reason OOMKilled                     -> OOMKilled; on cgroup v1 it comes with any exit code
    exit code with the message that fits -> the reason of that code (spillway.errors.ExitCode)
    evicted, node lost, pod deleted      -> a disruption, by what Kubernetes says of the pod
    else                                 -> RankCrashed
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from spillway.errors import RANK_CRASHED, ExitCode, reason_of
from spillway.feedback.retries import EVICTED, NODE_LOST, OOM_KILLED, POD_DELETED
from spillway.json_text import json_object

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
_WAITED_IN_VAIN = re.compile(r"rank \d+ waited ")
"""how the trainer's sentence begins when a rank gave up waiting for one that never came; of a rank that was there and
went away it says "waited for ..., and a rank was gone" """
FREE_SHORT_ATTEMPTS = 3
"""short attempts in a row after which a pod that is gone without a trace is no excuse any more"""


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    message: str
    node: str = ""
    """of the pod that ended the attempt"""
    rank: int | None = None
    """that failed first, where the trainer says so"""


@dataclass(frozen=True, slots=True)
class Termination:
    """The trainer's message, as far as it can be believed."""

    reason: str = ""
    message: str = ""
    rank: int | None = None
    step: int | None = None
    follower: bool = False
    saved_step: int | None = None
    """of the checkpoint that it committed before it stopped on request"""


def cause_of_end(pods: Iterable[PodObject], num_nodes: int, short_in_a_row: int = 0) -> Cause:
    """The cause of a failed attempt; `pods` are those that are still there, finished or not. `short_in_a_row` counts
    the short attempts just before it.

    When nobody failed of its own accord, a follower may have lost a pod that somebody deleted (free of charge), or it
    ended for want of a peer and the Job controller deleted that peer because of it (counted: nobody is at fault but the
    network or the job). The Job controller leaves no trace of which came first, except:

    - a peer that is still there: its deletion was asked for before the follower ended, or after it;
    - a follower that waited in vain for the whole time limit: had its peer been deleted meanwhile, the Job would have
      failed within seconds and the follower been asked to stop, long before its limit;
    - repetition: pods that are deleted by hand or by a drain end in an orderly stop or with a condition, nearly always.
      After FREE_SHORT_ATTEMPTS short attempts in a row the benefit of the doubt ends, so that no attempt is repeated
      for ever free of charge.
    """
    there = tuple(pods)
    own = sorted((pod for pod in there if _failed_by_itself(pod)), key=_precedence)
    evicted = sorted((pod for pod in there if _exceeded_its_disk(pod)), key=lambda pod: pod.index)
    if evicted and all(_stopped_on_request(pod) for pod in own):  # the eviction was the request
        return _disruption(evicted[0])
    if own:
        return _own_failure(own[0])
    followers = sorted((pod for pod in there if _exit_code(pod) and not _is_disrupted(pod)), key=_precedence)
    disrupted = sorted((pod for pod in there if _was_taken_first(pod, followers)), key=lambda pod: pod.index)
    if disrupted:
        return _disruption(disrupted[0])
    missing = set(range(num_nodes)) - {pod.index for pod in there}
    excused = short_in_a_row < FREE_SHORT_ATTEMPTS and not any(_waited_in_vain(pod) for pod in followers)
    if missing and (excused or not followers):
        return Cause(POD_DELETED, f"the pod of node {min(missing)} was deleted")
    if followers:
        return _own_failure(followers[0])
    return Cause(RANK_CRASHED, "the attempt's Job failed, and no pod says why")


def saved_step(pods: Iterable[PodObject]) -> int | None:
    """The step of the checkpoint that the attempt committed before it stopped on request; None when no pod says so."""
    said = (read_termination(pod.ending).saved_step for pod in pods if pod.ending is not None)
    return max((step for step in said if step is not None), default=None)


def read_termination(ending: ContainerEnding) -> Termination:
    """What the trainer said, when it is JSON of a known version and speaks of this exit code."""
    said = json_object(ending.message[:LONGEST_TERMINATION]) or {}
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
        saved_step=_count(said.get("savedStep")) if code == ExitCode.PREEMPTED else None,
    )


# --- which pod --------------------------------------------------------------------------------------------------------


def _exit_code(pod: PodObject) -> int:
    return pod.ending.exit_code if pod.ending else 0


def _is_out_of_memory(pod: PodObject) -> bool:
    """For its own limit: of a pod that the kubelet evicted because its node ran out, the kernel may have killed a
    process for the same want, and says so in the same word."""
    of_the_node = pod.status_reason == EVICTED and bool(pod.disruption)
    return pod.ending is not None and pod.ending.reason == OOM_KILLED and not of_the_node


def _is_disrupted(pod: PodObject) -> bool:
    return bool(pod.deleting or pod.disruption or pod.status_reason)


def _exceeded_its_disk(pod: PodObject) -> bool:
    """The kubelet marks an eviction for want of space on the node as a disruption; this pod exceeded its own limit."""
    return pod.status_reason == EVICTED and not pod.disruption


def _stopped_on_request(pod: PodObject) -> bool:
    return _exit_code(pod) == ExitCode.PREEMPTED and not _is_out_of_memory(pod)


def _was_taken_first(pod: PodObject, followers: Sequence[PodObject]) -> bool:
    """Taken away, and not because a follower had ended and the Job failed of it. Within the same second it counts as
    the reason of the follower's end."""
    if not _is_disrupted(pod):
        return False
    if not followers or pod.disruption or pod.status_reason:
        return True
    ended = followers[0].ending
    assert ended is not None
    asked, lost = _seconds(pod.deletion_time), _seconds(ended.finished_at)
    return asked is None or lost is None or asked - pod.grace_seconds <= lost


def _waited_in_vain(pod: PodObject) -> bool:
    return pod.ending is not None and _WAITED_IN_VAIN.match(read_termination(pod.ending).message) is not None


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
    return (pod.ending.finished_at, not _is_out_of_memory(pod), _stopped_on_request(pod), pod.index)


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
            pod.node,
        )
    termination = read_termination(ending)
    if termination.reason:
        rank = "" if termination.rank is None else f"rank {termination.rank}"
        step = "" if termination.step is None else f"step {termination.step}"
        place = ", ".join(part for part in (rank, step) if part)
        said = termination.message or f"exit code {ending.exit_code}"
        message = clean(f"{where}{f' ({place})' if place else ''}: {said}")
        return Cause(termination.reason, message, pod.node, termination.rank)
    message = clean(f"{where}: the trainer ended with exit code {ending.exit_code}{_last_words(ending)}")
    return Cause(RANK_CRASHED, message, pod.node)


def _disruption(pod: PodObject) -> Cause:
    where = f"{pod.name} on {pod.node}" if pod.node else pod.name
    said = clean(pod.status_message) if pod.status_message else ""
    because = f": {said}" if said else ""
    if pod.disruption in _NODE_GONE or pod.status_reason in _NODE_SHUT_DOWN:
        lost = f"{where}: its node was lost ({pod.disruption or pod.status_reason}){because}"
        return Cause(NODE_LOST, clean(lost), pod.node)
    if _exceeded_its_disk(pod):
        return Cause(EVICTED, clean(f"{where}: evicted by the kubelet{because}"), pod.node)
    how = pod.disruption or pod.status_reason or "deleted"
    return Cause(POD_DELETED, clean(f"{where}: taken away ({how}){because}"), pod.node)


def _last_words(ending: ContainerEnding) -> str:
    """Of a process that left no message of ours: the last line that the kubelet kept of its log."""
    said = (json_object(ending.message[:LONGEST_TERMINATION]) or {}).get("message")
    text = said if isinstance(said, str) else ending.message[-LONGEST_TERMINATION:]
    lines = [line for line in (clean(line, 300) for line in text.splitlines()) if line]
    return f"; it last said: {lines[-1]}" if lines else ""


def _seconds(time: str) -> float | None:
    """Unix seconds of an RFC 3339 time; None for what is none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
