"""Gangs: prevent jobs of several pods from blocking each other's nodes permanently.

    a queue       admits the whole attempt or nothing of it
    without one   an attempt that has nodes for some of its pods and not for all gives them back: soon where an older
                  job waits for nodes, and in any case before its trainers give up waiting for their peers

Among jobs that wait there is one order, by creation time and uid, in every namespace and for every operator that looks.
So of two that hold half of what they need only the younger yields; the oldest never does because of another one.
"""

from __future__ import annotations

from typing import Any, Literal

from spillway.api.training_job import TrainingJobSpec
from spillway.feedback.retries import GANG_YIELDED

from . import conditions as c
from .acceptance import given
from .attempt_end import Cause
from .case import Case, seconds_of, whole
from .observed import PodObject, WaitingGang

YIELD_SECONDS = 30.0
"""that two attempts wait for nodes before the younger yields: pods that end, and nodes that come, may settle it"""
INCOMPLETE_SECONDS = 240.0
"""that an attempt may hold nodes in vain: less than a trainer waits for its peers, which would count as a crash"""
LONGEST_HOLD_SECONDS = 300.0
"""that a job which yielded lets older ones go first: one of them may wait for a node that never comes"""

Kind = Literal["Queue", "Yield", ""]


def kind_of(spec: TrainingJobSpec) -> Kind:
    """What status.plan.gang says: how the attempts of the job start with all pods or none."""
    if spec.parallelism.nodes == 1 or spec.scheduling.gang == "Disabled":
        return ""
    return "Queue" if spec.scheduling.queue_name else "Yield"


def is_gang(spec: dict[str, Any]) -> bool:
    """Whether a job with this spec, as found, gives nodes back that are too few for it."""
    return whole(given(spec, "parallelism.nodes"), 1) > 1 and given(spec, "scheduling.gang") != "Disabled"


def holds_in_part(case: Case, pods: tuple[PodObject, ...]) -> bool:
    """The attempt has nodes for some of its pods, and the scheduler finds none for another one."""
    if not is_gang(case.spec):
        return False
    return any(pod.node for pod in pods) and any(pod.unschedulable and not pod.node for pod in pods)


def yields(case: Case, pods: tuple[PodObject, ...]) -> Cause | None:
    """Why an attempt that holds nodes in part gives them back now; None while it may wait."""
    if not holds_in_part(case, pods):
        return None
    waited = case.seconds_since(c.SCHEDULED, "False")
    older = goes_first(case)
    held = f"{sum(bool(pod.node) for pod in pods)} of {case.num_nodes} pods have nodes"
    if older is not None and waited >= YIELD_SECONDS:
        return Cause(GANG_YIELDED, f"{held}, and TrainingJob {older.namespace}/{older.name}, which is older, waits too")
    if waited >= INCOMPLETE_SECONDS:
        return Cause(GANG_YIELDED, f"{held}, and after {INCOMPLETE_SECONDS:.0f} s there is none for the others")
    return None


def goes_first(case: Case) -> WaitingGang | None:
    """The oldest of those that are older than this job and have waited for nodes for a while."""
    job = case.observed.job
    own = (seconds_of(job.creation_time), job.uid)
    waiting = [
        gang
        for gang in case.observed.waiting_gangs or ()
        if _place(gang) < own and case.seconds_now - seconds_of(gang.since) >= YIELD_SECONDS
    ]
    return min(waiting, key=_place, default=None)


def _place(gang: WaitingGang) -> tuple[float, str]:
    return (seconds_of(gang.creation_time), gang.uid)
