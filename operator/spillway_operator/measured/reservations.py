"""Reservations: bytes that placed attempts will use, until the metrics show them.

An attempt is debited from its decision until a while after all its pods are ready, when the node's figures include it.
Reservations are only in memory: after a restart they are rebuilt from the status of current attempts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from spillway.api.status import PlanStatus
from spillway.placement.place import Reservation

from ..decide.manifests import DECISION_KEY
from ..decide.observed import AttemptObject, JobObject, Manifest
from ..kube.store import Key, attempt_number

WARM_UP_SECONDS = 60.0
"""Time from ready pods to the peak of the first steps."""
READINGS = 2
"""Readings of the metrics after that, before the debit ends."""


@dataclass(frozen=True, slots=True)
class Debit:
    """The reservations of one attempt."""

    attempt: int
    reservations: tuple[Reservation, ...]
    ready_since: float | None = None
    """Monotonic seconds."""


class Reservations:
    def __init__(self, metrics_interval_seconds: float) -> None:
        self._takeover_seconds = WARM_UP_SECONDS + READINGS * metrics_interval_seconds
        self._debits: dict[Key, Debit] = {}
        self._settled: dict[Key, int] = {}
        """Job -> the attempt that the metrics already include."""

    def __len__(self) -> int:
        return len(self._debits)

    def decided(self, job: JobObject, manifests: Iterable[Manifest]) -> None:
        """Reserves for an attempt that is about to be created; its ConfigMap has the decision."""
        for manifest in manifests:
            if manifest["kind"] == "ConfigMap":
                attempt = attempt_number(manifest["metadata"].get("labels") or {})
                self._debit(job, attempt, _decided_plan(manifest["data"].get(DECISION_KEY, "")))

    def settle(self, job: JobObject, attempts: Iterable[AttemptObject], now: float) -> None:
        """Updates the debit of `job` to the state of its attempts at monotonic time `now`.

        A suspended attempt (spec.suspend, or waiting in a queue) reserves nothing.
        """
        own = (found for found in attempts if found.owner_uid == job.uid)
        live = [found for found in own if not found.outcome and not found.suspended]
        if not live:
            self.forget(job.key)
            return
        newest = max(live, key=lambda found: found.attempt)
        if self._settled.get(job.key) == newest.attempt:
            return
        debit = self._debits.get(job.key)
        if debit is None or debit.attempt < newest.attempt:
            debit = self._debit(job, newest.attempt, _known_plan(job))
        if debit.ready_since is None and newest.ready >= _num_nodes(job):
            debit = self._debits[job.key] = replace(debit, ready_since=now)
        if debit.ready_since is not None and now - debit.ready_since >= self._takeover_seconds:
            self._settled[job.key] = newest.attempt
            del self._debits[job.key]

    def forget(self, key: Key) -> None:
        self._debits.pop(key, None)
        self._settled.pop(key, None)

    def of_others(self, key: Key, now: float) -> tuple[Reservation, ...]:
        """All reservations except the job's own, whose next attempt replaces the last one."""
        return tuple(
            reservation
            for other, debit in self._debits.items()
            if other != key and (debit.ready_since is None or now - debit.ready_since < self._takeover_seconds)
            for reservation in debit.reservations
        )

    def _debit(self, job: JobObject, attempt: int, plan: PlanStatus | None) -> Debit:
        debit = self._debits[job.key] = Debit(attempt, () if plan is None else _reservations(job, plan))
        return debit


# A plan of another version reserves nothing: its bytes appear in the metrics as soon as they are used.


def _decided_plan(decision_json: str) -> PlanStatus | None:
    try:
        return PlanStatus.model_validate_json(decision_json)
    except ValidationError:
        return None


def _known_plan(job: JobObject) -> PlanStatus | None:
    try:
        return PlanStatus.model_validate(json.loads(job.status).get("plan") or {})
    except ValidationError:
        return None


def _reservations(job: JobObject, plan: PlanStatus) -> tuple[Reservation, ...]:
    """One per node of the job, on the preferred nodes; none without preferences."""
    if plan.bytes is None:
        return ()
    ranks_per_node = _parallelism(job).get("devicesPerNode") or 1
    return tuple(
        Reservation(
            node=node,
            device=plan.bytes.device or 0,
            host=plan.pod_memory or 0,
            nvme=(plan.bytes.nvme or 0) * ranks_per_node,
            devices=ranks_per_node if plan.device == "Cuda" else 0,
            owner=job.uid,
        )
        for node in plan.nodes[: _num_nodes(job)]
    )


def _num_nodes(job: JobObject) -> int:
    return int(_parallelism(job).get("nodes") or 1)


def _parallelism(job: JobObject) -> dict[str, Any]:
    return dict(json.loads(job.spec).get("parallelism") or {})
