"""Finds out why an attempt ended, from the state of its pods.

A pod's own failure takes precedence over a disruption, and earlier failures over later ones. Ranks that only lost their
peers ("follower" in the message) are ignored, as are pods that were deleted because another one failed. For a follower
whose peer is missing see `cause_of_end`.

    reason OOMKilled                     -> OOMKilled; on cgroup v1 it comes with any exit code
    exit code with a matching message    -> the reason of that code (spillway.errors.ExitCode)
    evicted, node lost, pod deleted      -> a disruption, by the pod's status
    else                                 -> RankCrashed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from spillway.errors import RANK_CRASHED, ExitCode, reason_of
from spillway.feedback.retries import EVICTED, NODE_LOST, OOM_KILLED, POD_DELETED
from spillway.json_text import json_object

from .conditions import clean
from .observed import ContainerEnding, PodObject

TERMINATION_VERSION = 1
"""Version of the trainer's message; this one and the one before can be read."""
LONGEST_TERMINATION = 4096
"""Longest message that the kubelet keeps, in characters."""
_NODE_GONE = ("DeletionByTaintManager", "DeletionByPodGC")
"""Reasons of DisruptionTarget: the node stopped answering, or its object was deleted."""
_NODE_SHUT_DOWN = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated")
"""Reasons in a pod's status, from the kubelet or the node controller."""
FREE_SHORT_ATTEMPTS = 3
"""After this many short attempts in a row, a pod that vanished without a trace no longer counts as a disruption."""


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    message: str
    node: str = ""
    """Node of the pod that ended the attempt."""
    rank: int | None = None
    """The rank that failed first, if the trainer reports it."""


@dataclass(frozen=True, slots=True)
class Termination:
    """The validated part of the trainer's termination message."""

    reason: str = ""
    message: str = ""
    rank: int | None = None
    step: int | None = None
    follower: bool = False
    never_joined: bool = False
    """A follower that waited for its whole time limit for a rank that did not appear."""
    saved_step: int | None = None
    """Step of the checkpoint that it committed before it stopped on request."""


def cause_of_end(pods: Iterable[PodObject], num_nodes: int, job_name: str, short_in_a_row: int = 0) -> Cause:
    """The cause of a failed attempt, whose Job is `job_name`; `pods` are those that still exist, finished or not.
    `short_in_a_row` counts the short attempts just before it.

    If no pod failed by itself, either somebody deleted a follower's peer (a disruption, not counted as a restart), or
    the follower failed without its peer and the Job controller then deleted that peer (counted: the network or the job
    is at fault). The Job controller does not record which came first, except:

    - a peer that still exists: its deletion was requested before or after the follower ended;
    - a follower that waited for its whole time limit: had its peer been deleted meanwhile, the Job would have failed
      within seconds and the follower been stopped long before its limit;
    - repetition: pods deleted by hand or by a drain nearly always stop on request or have a condition. After
      FREE_SHORT_ATTEMPTS short attempts in a row the end counts as a restart, so that no attempt is repeated
      indefinitely without being counted.
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
        return Cause(POD_DELETED, f"pod {min(missing)} of Job {job_name} was deleted")
    if followers:
        return _own_failure(followers[0])
    gone = f"Job {job_name} failed, but its pods are gone or ended without an error"
    return Cause(RANK_CRASHED, f"{gone}; see kubectl describe job {job_name}")


def saved_step(pods: Iterable[PodObject]) -> int | None:
    """The step of the checkpoint that the attempt committed before it stopped on request; None if no pod has one."""
    said = (read_termination(pod.ending).saved_step for pod in pods if pod.ending is not None)
    return max((step for step in said if step is not None), default=None)


def completed_rank(pods: Iterable[PodObject]) -> Termination | None:
    """The termination message of a complete attempt's first rank; None if its pod is gone."""
    said = (read_termination(pod.ending) for pod in pods if pod.ending is not None and pod.index == 0)
    return next((each for each in said if each.reason == ExitCode.COMPLETED.reason), None)


def read_termination(ending: ContainerEnding) -> Termination:
    """The trainer's message; mostly empty unless it is JSON of a known version and has this exit code."""
    said = json_object(ending.message[:LONGEST_TERMINATION]) or {}
    if said.get("v") not in (TERMINATION_VERSION - 1, TERMINATION_VERSION) or isinstance(said.get("v"), bool):
        return Termination()
    code, reason = said.get("exitCode", ending.exit_code), said.get("reason")
    if code != ending.exit_code or reason != reason_of(ending.exit_code):
        return Termination(follower=said.get("follower") is True, never_joined=said.get("neverJoined") is True)
    message = said.get("message")
    return Termination(
        reason=str(reason),
        message=clean(message) if isinstance(message, str) else "",
        rank=_count(said.get("rank")),
        step=_count(said.get("step")),
        follower=said.get("follower") is True,
        never_joined=said.get("neverJoined") is True,
        saved_step=_count(said.get("savedStep")) if code == ExitCode.PREEMPTED else None,
    )


# --- which pod --------------------------------------------------------------------------------------------------------


def _exit_code(pod: PodObject) -> int:
    return pod.ending.exit_code if pod.ending else 0


def _is_out_of_memory(pod: PodObject) -> bool:
    """Whether it exceeded its own memory limit. When the kubelet evicts a pod because its node is out of memory, the
    kernel may also have killed a process, and the reason is OOMKilled, too."""
    of_the_node = pod.status_reason == EVICTED and bool(pod.disruption)
    return pod.ending is not None and pod.ending.reason == OOM_KILLED and not of_the_node


def _is_disrupted(pod: PodObject) -> bool:
    return bool(pod.deleting or pod.disruption or pod.status_reason)


def _exceeded_its_disk(pod: PodObject) -> bool:
    """Whether it was evicted for exceeding its own limit: evictions for lack of space on the node are disruptions."""
    return pod.status_reason == EVICTED and not pod.disruption


def _stopped_on_request(pod: PodObject) -> bool:
    return _exit_code(pod) == ExitCode.PREEMPTED and not _is_out_of_memory(pod)


def _was_taken_first(pod: PodObject, followers: Sequence[PodObject]) -> bool:
    """Whether it was disrupted before any follower ended, which would make the Job fail. Within the same second it
    counts as before."""
    if not _is_disrupted(pod):
        return False
    if not followers or pod.disruption or pod.status_reason:
        return True
    ended = followers[0].ending
    assert ended is not None
    asked, lost = _seconds(pod.deletion_time), _seconds(ended.finished_at)
    return asked is None or lost is None or asked - pod.grace_seconds <= lost


def _waited_in_vain(pod: PodObject) -> bool:
    return pod.ending is not None and read_termination(pod.ending).never_joined


def _failed_by_itself(pod: PodObject) -> bool:
    """Whether it ended with a failure of its own: not a follower, and not killed from outside without a message."""
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
    """Sort key: the earliest first; within the same second out of memory first, a stop on request last."""
    assert pod.ending is not None
    return (pod.ending.finished_at, not _is_out_of_memory(pod), _stopped_on_request(pod), pod.index)


# --- messages ---------------------------------------------------------------------------------------------------------


def where_is(pod: PodObject) -> str:
    return f"{pod.name} on {pod.node}" if pod.node else pod.name


def _own_failure(pod: PodObject) -> Cause:
    ending, where = pod.ending, where_is(pod)
    assert ending is not None
    if ending.reason == OOM_KILLED:
        killed = f"the kernel killed a process, because the pod reached its memory limit (exit code {ending.exit_code})"
        return Cause(OOM_KILLED, f"{where}: {killed}", pod.node)
    termination = read_termination(ending)
    if termination.reason:
        rank = "" if termination.rank is None else f"rank {termination.rank}"
        step = "" if termination.step is None else f"step {termination.step}"
        place = ", ".join(part for part in (rank, step) if part)
        said = termination.message or f"exit code {ending.exit_code}"
        message = clean(f"{where}{f' ({place})' if place else ''}: {said}")
        return Cause(termination.reason, message, pod.node, termination.rank)
    message = clean(f"{where}: the trainer exited with code {ending.exit_code}{_last_words(ending)}")
    return Cause(RANK_CRASHED, message, pod.node)


def _disruption(pod: PodObject) -> Cause:
    where = where_is(pod)
    said = clean(pod.status_message) if pod.status_message else ""
    because = f": {said}" if said else ""
    if pod.disruption in _NODE_GONE or pod.status_reason in _NODE_SHUT_DOWN:
        lost = f"{where}: its node was lost ({pod.disruption or pod.status_reason}){because}"
        return Cause(NODE_LOST, clean(lost), pod.node)
    if _exceeded_its_disk(pod):
        more = "; for more disk space, raise spec.pod.resources.scratch" if "ephemeral" in said else ""
        return Cause(EVICTED, clean(f"{where}: evicted by the kubelet{because}{more}"), pod.node)
    how = pod.disruption or pod.status_reason or "deleted"
    return Cause(POD_DELETED, clean(f"{where}: removed ({how}){because}"), pod.node)


def _last_words(ending: ContainerEnding) -> str:
    """For a process that left no message of ours: the last line of its log that the kubelet kept."""
    said = (json_object(ending.message[:LONGEST_TERMINATION]) or {}).get("message")
    text = said if isinstance(said, str) else ending.message[-LONGEST_TERMINATION:]
    lines = [line for line in (clean(line, 300) for line in text.splitlines()) if line]
    return f"; last log line: {lines[-1]}" if lines else ""


def _seconds(time: str) -> float | None:
    """Unix seconds of an RFC 3339 time; None if it is invalid."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
