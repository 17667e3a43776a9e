"""Findings about an attempt from its pods."""

from __future__ import annotations

from . import conditions as c
from .case import seconds_of
from .conditions import Finding, false, true, unknown
from .observed import AttemptObject, PodObject

TERMINATION_SLACK_SECONDS = 30.0
"""A pod that exists this long after its grace period will not end by itself: its node is lost."""
CHECK_IMAGE = (
    "check the image's name (spec.pod.image, by default the chart's trainer.image), the registry and "
    "spec.pod.imagePullSecrets"
)


def pod_findings(
    pods: tuple[PodObject, ...], num_nodes: int, attempt: AttemptObject, rejection: str
) -> tuple[Finding, ...]:
    if rejection and len(pods) < num_nodes:
        why = f"Job {attempt.name} cannot create {'its' if not pods else 'more'} pods: {rejection}"
        return false(c.SCHEDULED, c.PODS_REJECTED, why), false(c.RUNNING, "Starting")
    if not pods:
        why = f"Job {attempt.name} has no pods yet; see kubectl describe job {attempt.name} -n {attempt.namespace}"
        return false(c.SCHEDULED, "NoPods", why), false(c.RUNNING, "Starting")
    all_have_nodes = len(pods) >= num_nodes and all(pod.node for pod in pods)
    scheduled = true(c.SCHEDULED, "Scheduled") if all_have_nodes else unknown(c.SCHEDULED, "Waiting")
    # A pod with a node was schedulable, even if its condition still says otherwise.
    unschedulable = next((pod for pod in pods if pod.unschedulable and not pod.node), None)
    if unschedulable is not None:
        scheduled = false(c.SCHEDULED, "Unschedulable", f"{unschedulable.name}: {unschedulable.unschedulable}")
    waiting = next((pod for pod in pods if pod.waiting), None)
    if waiting is not None:
        of_the_image = "image" in waiting.waiting.partition(":")[0].lower()
        fix = CHECK_IMAGE if of_the_image else "fix the cause, for example create what is missing"
        mend = (
            f"{fix}; the kubelet tries again. "
            f"After a change of the spec: kubectl delete job {attempt.name} -n {attempt.namespace}"
        )
        said = c.clean(waiting.waiting, c.LONGEST_MESSAGE - len(waiting.name) - len(mend) - 4)
        return scheduled, false(c.RUNNING, "ContainerWaiting", f"{waiting.name}: {said}; {mend}")
    if unschedulable is not None:
        return scheduled, false(c.RUNNING, "Starting")
    behind = next((f"{pod.name} is not running" for pod in pods if not pod.ready), "not every pod is running")
    return scheduled, false(c.RUNNING, "PodsNotReady", behind)


def is_finished(pod: PodObject) -> bool:
    return pod.ending is not None or pod.phase in ("Failed", "Succeeded")


def is_lost(pod: PodObject, now: float) -> bool:
    """Whether it is long past its grace period: the kubelet that should end it does not answer."""
    if is_finished(pod) or not (pod.deleting and pod.deletion_time):
        return False
    return now > seconds_of(pod.deletion_time) + TERMINATION_SLACK_SECONDS


def waits_for_lost_nodes(pods: tuple[PodObject, ...], now: float) -> bool:
    """Whether the Job only waits for pods on lost nodes."""
    lost = [pod for pod in pods if is_lost(pod, now)]
    return bool(lost) and all(is_finished(pod) or is_lost(pod, now) for pod in pods)
