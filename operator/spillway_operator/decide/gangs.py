"""Gangs: keeps jobs of several pods from blocking each other's nodes permanently.

    a queue       admits the whole attempt or nothing of it
    without one   an attempt that has nodes for only some of its pods releases them: soon if an older job waits for
                  nodes, and in any case when no further pod gets a node for scheduling.gangWaitSeconds

A pod that pulls its image, or cannot, has its node. Trainers wait for their peers until all pods are ready.

Waiting jobs have one order across namespaces and operators, by creation time and uid. So if two jobs each hold half of
what they need, only the younger one yields, and the oldest never yields to another job.
"""

from __future__ import annotations

from typing import Any, Literal

from spillway.api.job_spec import JobSpec
from spillway.api.pod import DEFAULT_GANG_WAIT_SECONDS
from spillway.feedback.retries import GANG_YIELDED

from . import conditions as c
from .acceptance import given
from .attempt_end import Cause
from .case import Case, seconds_of, whole
from .observed import PodObject, WaitingGang

YIELD_SECONDS = 30.0
"""How long two attempts wait for nodes before the younger one yields: ending pods and new nodes may solve it."""
LONGEST_HOLD_SECONDS = 300.0
"""How long a job that yielded waits for older ones, which may wait for a node that never becomes available."""

Kind = Literal["Queue", "Yield", ""]


def kind_of(spec: JobSpec) -> Kind:
    """The value of status.plan.gang: how attempts of the job get nodes for all pods or none."""
    if spec.parallelism.nodes == 1 or spec.scheduling.gang == "Disabled":
        return ""
    return "Queue" if spec.scheduling.queue_name else "Yield"


def is_gang(spec: dict[str, Any]) -> bool:
    """Whether a job with this unvalidated spec releases its nodes if they are too few."""
    return whole(given(spec, "parallelism.nodes"), 1) > 1 and given(spec, "scheduling.gang") != "Disabled"


def holds_in_part(case: Case, pods: tuple[PodObject, ...]) -> bool:
    """Whether the attempt has nodes for some of its pods, and the scheduler finds none for another one."""
    if not is_gang(case.spec):
        return False
    return any(pod.node for pod in pods) and any(pod.unschedulable and not pod.node for pod in pods)


def yields(case: Case, pods: tuple[PodObject, ...]) -> Cause | None:
    """Why an attempt with nodes for only some of its pods releases them now; None while it may wait."""
    if not holds_in_part(case, pods):
        return None
    waited = case.seconds_since(c.SCHEDULED, "False")
    limit = whole(given(case.spec, "scheduling.gangWaitSeconds"), DEFAULT_GANG_WAIT_SECONDS)
    # Its pods may all have waited for new nodes, which come one after the other.
    in_vain = min(waited, case.seconds_now - max(seconds_of(pod.scheduled_at) for pod in pods if pod.node))
    older = goes_first(case)
    held = f"{sum(bool(pod.node) for pod in pods)} of {case.num_nodes} pods have nodes"
    if older is not None and waited >= YIELD_SECONDS:
        return Cause(GANG_YIELDED, f"{held}, and the older TrainingJob {older.namespace}/{older.name} also waits")
    if in_vain >= limit:
        over = f"no other pod got one for {in_vain:.0f} s (scheduling.gangWaitSeconds = {limit})"
        return Cause(GANG_YIELDED, f"{held}, and {over}")
    return None


def goes_first(case: Case) -> WaitingGang | None:
    """The oldest job that is older than this one and has waited for nodes for YIELD_SECONDS."""
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
