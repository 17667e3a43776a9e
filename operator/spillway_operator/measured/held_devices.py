"""Devices that other TrainingJobs hold, and the remaining time of these jobs according to their status."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spillway.api.status import PlanStatus, Progress
from spillway.placement.cluster_view import HeldDevices
from spillway.placement.place import DEFAULT_RESOURCE

from ..decide.acceptance import given
from ..decide.case import num_ranks, num_steps, whole
from ..decide.observed import JobObject
from ..kube.store import Store

M = TypeVar("M", bound=BaseModel)


class Holders:
    """Finds held devices. Each version of a job is parsed once, because plans may be made for a thousand jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[int, HeldDevices | None]] = {}
        """Uid -> (resourceVersion, devices) of the jobs that had a current attempt at the last call."""

    def besides(self, job: JobObject) -> tuple[HeldDevices, ...]:
        """Devices of all other TrainingJobs on GPUs with a current attempt, including waiting pods."""
        attempts = self._store.attempts
        owners = {one.owner_uid for one in attempts if one.owner_uid and not one.outcome and not one.suspended}
        found = (self._store.jobs.by_uid(uid) for uid in owners)
        self._known = {one.uid: self._read(one) for one in found if one is not None}
        return tuple(held for uid, (_, held) in self._known.items() if held is not None and uid != job.uid)

    def _read(self, job: JobObject) -> tuple[int, HeldDevices | None]:
        known = self._known.get(job.uid)
        if known is not None and known[0] == job.resource_version:
            return known
        return job.resource_version, _held(job)


def _held(job: JobObject) -> HeldDevices | None:
    """The job's devices; None for a job on CPUs."""
    spec, status = json.loads(job.spec), json.loads(job.status)
    plan = _read(PlanStatus, status.get("plan"))
    if (plan.device or given(spec, "parallelism.device")) != "Cuda":
        return None
    devices = num_ranks(spec)
    return HeldDevices(
        node_class=plan.node,
        nodes=plan.nodes,
        resource_name=str(given(spec, "pod.resourceName") or DEFAULT_RESOURCE),
        devices=devices,
        seconds_left=_seconds_left(spec, plan, _read(Progress, status.get("progress"))),
    )


def _seconds_left(spec: dict[str, Any], plan: PlanStatus, progress: Progress) -> float | None:
    """Remaining seconds at the reported rate, else at the planned one; None if unknown, for example while a job that
    trains by epochs has not reported its number of steps."""
    steps = progress.steps or num_steps(spec)
    if not steps:
        return None
    left = max(0, steps - progress.step)
    tokens = whole(given(spec, "training.globalBatchSize"), 0) * whole(given(spec, "training.sequenceLength"), 0)
    rate = _number(progress.tokens_per_second)
    seconds = tokens / rate if rate and tokens else _number(plan.step_seconds)
    return None if seconds is None else left * seconds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(kind: type[M], found: object) -> M:
    """The model; with defaults if it is missing or of another version."""
    try:
        return kind.model_validate(found or {})
    except ValidationError:
        return kind()
