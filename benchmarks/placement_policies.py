"""Policies of the placement simulation, which decide what a pod requests and where it goes: the operator's and rivals'.

`Spillway` is the operator: placement.place, the ladder, profiles, evidence, headroom and its ledger of reservations,
called and not reimplemented here. The rivals get the same information: the plan and the pod that the operator counts
without evidence, the nodes' figures, why an attempt ended, what earlier pods took. All rivals run the trainer without
the plan's budgets, so that it can use the whole slack of a pod before the kernel kills it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from placement_simulation import METRICS_SECONDS, START_SECONDS, Ask, Ended, Policy
from spillway.api.profiles import MemoryProfile
from spillway.api.training_job import TrainingJob
from spillway.feedback.ladder import MOST_MEMORY_TRIES, MemoryFailure, corrections_after, repeats, tries_are_used_up
from spillway.feedback.pod_evidence import PodPeak, workload
from spillway.feedback.profiles import (
    memory_fingerprint,
    model_fingerprint,
    observed_corrections,
    observed_pods,
    profile_after_failure,
    profile_update,
)
from spillway.placement.cluster_view import ClusterView, NodeView, Reservation
from spillway.placement.place import Placement, place
from spillway.plan import Tier
from spillway.planning.planner import make_plan
from spillway.planning.pod_resources import pod_resources
from spillway.units import GIB
from spillway_operator.measured.reservations import READINGS, WARM_UP_SECONDS

IMAGE = "trainer@sha256:0"
"""the trainer image of all jobs"""
AFFINITY_WEIGHT = 2.0
"""weight of preferred nodes relative to that of free bytes, by kube-scheduler's defaults"""
MOST_SCORE = 100.0
MOVES_NO_BYTE: Any = {"training": {"seed", "steps"}, "checkpoint": True}
"""fields of a spec on which its plan does not depend"""


@contextmanager
def plans_remembered() -> Iterator[None]:
    """Caches the results of make_plan while the context is open: it is pure, and a trace often calls it with the same
    arguments. Leaves out the explanations of the plans that lost, which nothing reads here."""
    known: dict[Any, Any] = {}

    def remembered(job: TrainingJob, node: Any, overrides: Any, *, explained: bool = True) -> Any:
        key = (job.spec.model_dump_json(exclude=MOVES_NO_BYTE), node, overrides)
        if key not in known:
            known[key] = make_plan(job, node, overrides, explained=False)
        return known[key]

    with patch("spillway.placement.place.known_plan", remembered):
        yield


# --- scores of kube-scheduler -----------------------------------------------------------------------------------------


def least_allocated(ask: Ask, node: NodeView) -> float:
    """NodeResourcesFit's default score is the mean of the free shares of memory and cores. All pods request the same
    cores here, so memory alone decides."""
    return MOST_SCORE * (_unrequested(node) - ask.memory_bytes) / node.allocatable_memory_bytes


def best_fit(ask: Ask, node: NodeView) -> float:
    """The score of MostAllocated, which prefers the node with the least left."""
    return -least_allocated(ask, node)


def _unrequested(node: NodeView) -> int:
    free = None if node.live is None else node.live.host
    assert free is not None, "the simulation says what is free"
    return free


# --- the operator -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Debit:
    reservation: Reservation
    ready_since: float | None = None


class Spillway(Policy):
    """Does what the operator does: places, climbs the ladder, remembers in profiles, and reserves a pod's bytes until
    the metrics show them."""

    def __init__(self) -> None:
        self._profiles: dict[str, MemoryProfile] = {}
        self._debits: dict[int, _Debit] = {}
        self._placed: dict[int, Placement] = {}
        self._metrics_at = 0.0

    def ask(
        self, number: int, job: TrainingJob, failed: Sequence[tuple[Ask, str]], nodes: Sequence[NodeView], now: float
    ) -> Ask | None:
        if failed and tries_are_used_up([reason for _, reason in failed]):
            return None
        failures = [_failure(job, attempt, *one) for attempt, one in enumerate(failed, start=1)]
        placed = place(job, self._view(number, job, failures, nodes, now))
        if not isinstance(placed, Placement) or repeats(failures, placed.plan, placed.pod.memory_bytes):
            return None
        self._debits.pop(number, None)
        if placed.preferences:
            node, plan = placed.preferences[0].node, placed.plan
            reservation = Reservation(node, 0, placed.pod.memory_bytes, plan.bytes[Tier.NVME].total)
            self._debits[number] = _Debit(reservation)
        return asked(placed)

    def _view(
        self,
        number: int,
        job: TrainingJob,
        failures: Sequence[MemoryFailure],
        nodes: Sequence[NodeView],
        now: float,
    ) -> ClusterView:
        model = model_fingerprint(job.spec, "Cpu")
        known = [profile for profile in self._profiles.values() if profile.model_fingerprint == model]
        return ClusterView(
            nodes=tuple(nodes),
            metrics_age_seconds=METRICS_SECONDS,
            metrics_source="simulated",
            reservations=tuple(self._of_others(number, now)),
            model_corrections={model: observed_corrections(known)},
            observed_pods=observed_pods(known),
            trainer_image=IMAGE,
            corrections=corrections_after(failures),
        )

    def _of_others(self, number: int, now: float) -> Iterator[Reservation]:
        takeover = START_SECONDS + WARM_UP_SECONDS + READINGS * METRICS_SECONDS
        for other, debit in self._debits.items():
            if other != number and (debit.ready_since is None or now - debit.ready_since < takeover):
                yield debit.reservation

    def score(self, ask: Ask, node: NodeView) -> float:
        most = max(ask.weights.values(), default=1)
        preferred = MOST_SCORE * ask.weights.get(node.name, 0) / most
        return AFFINITY_WEIGHT * preferred + least_allocated(ask, node)

    def bound(self, number: int, now: float) -> None:
        if number in self._debits:
            self._debits[number].ready_since = now

    def ended(self, number: int, job: TrainingJob, ask: Ask, ended: Ended, held: Mapping[str, int]) -> None:
        self._debits.pop(number, None)
        spec, plan = job.spec, ask.plan
        fingerprint = memory_fingerprint(spec, plan)
        known = self._profiles.get(fingerprint)
        if ended.reason is not None:
            failure = _failure(job, ended.attempt, ask, ended.reason)
            found = profile_after_failure(known, spec, failure, "")
        else:
            peak = PodPeak(
                peak_bytes=ended.peak_bytes,
                counted_bytes=pod_resources(spec, plan, 1).memory_bytes - plan.unplanned_bytes,
                limit_bytes=ask.memory_bytes,
                is_whole=True,
                workload=workload(spec, plan, IMAGE),
            )
            found = profile_update(known, spec, plan, held, f"job{number}-{ended.attempt}", "", peak)
        if found is not None:
            self._profiles[fingerprint] = found


def _failure(job: TrainingJob, attempt: int, ask: Ask, reason: str) -> MemoryFailure:
    """Returns a failure as the operator reads it from the contract of an attempt."""
    spared = pod_resources(job.spec, ask.plan, 1).memory_bytes - ask.memory_bytes
    return MemoryFailure(attempt, reason, ask.plan, ask.memory_bytes, max(0, spared))


def asked(placed: Placement) -> Ask:
    return Ask(
        plan=placed.plan,
        memory_bytes=placed.pod.memory_bytes,
        ephemeral_bytes=placed.pod.ephemeral_storage_bytes,
        cores=placed.pod.cpu_cores,
        weights={best.node: best.weight for best in placed.preferences},
    )


def counted(job: TrainingJob, nodes: Sequence[NodeView]) -> Ask | None:
    """Returns what the operator requests for a job if it knows nothing of its model; None if no node has room."""
    placed = place(job, ClusterView(nodes=tuple(nodes)))
    return asked(placed) if isinstance(placed, Placement) else None


# --- its rivals -------------------------------------------------------------------------------------------------------

Score = Callable[[Ask, NodeView], float]


class Requests(Policy):
    """Requests `factor` times what the operator counts without evidence. After a kill it requests twice as much, but at
    most what the largest node has, and tries as often as the operator does."""

    def __init__(self, factor: float, score: Score) -> None:
        self._factor, self._score = factor, score

    def ask(
        self, number: int, job: TrainingJob, failed: Sequence[tuple[Ask, str]], nodes: Sequence[NodeView], now: float
    ) -> Ask | None:
        del number, now
        largest = max(node.allocatable_memory_bytes for node in nodes)
        if failed:
            before, _ = failed[-1]
            memory = min(self.grown(before.memory_bytes), largest)
            if len(failed) > MOST_MEMORY_TRIES or memory <= before.memory_bytes:
                return None
            return replace(before, memory_bytes=memory)
        own = counted(job, nodes)
        if own is None:
            return None
        memory = min(largest, self.first(job, own))
        return replace(own, memory_bytes=memory, weights={}, holds_tiers=False)

    def first(self, job: TrainingJob, own: Ask) -> int:
        """Returns the bytes to request for a job's first attempt."""
        del job
        return int(self._factor * own.memory_bytes)

    def grown(self, requested: int) -> int:
        """Returns the bytes to request after a pod with `requested` bytes was killed."""
        return 2 * requested

    def score(self, ask: Ask, node: NodeView) -> float:
        return self._score(ask, node)

    def bound(self, number: int, now: float) -> None:
        """Does nothing: this policy keeps no ledger."""

    def ended(self, number: int, job: TrainingJob, ask: Ask, ended: Ended, held: Mapping[str, int]) -> None:
        """Does nothing: this policy learns nothing from earlier jobs."""


class Dlrover(Requests):
    """DLRover's rule: requests the most that jobs like this one took, plus a fifth (its Brain's margin). Without such
    jobs it requests what is counted, where DLRover itself has a constant of 16 GiB. After a kill it doubles the memory,
    adding at most 8 GiB, up to 64 GiB."""

    MARGIN = 0.2
    MOST_STEP_BYTES, MOST_BYTES = 8 * GIB, 64 * GIB

    def __init__(self) -> None:
        super().__init__(1.0, least_allocated)
        self._taken: dict[str, int] = {}

    def first(self, job: TrainingJob, own: Ask) -> int:
        most = self._taken.get(_alike(job))
        return own.memory_bytes if most is None else int(most * (1.0 + self.MARGIN))

    def grown(self, requested: int) -> int:
        return min(2 * requested, requested + self.MOST_STEP_BYTES, self.MOST_BYTES)

    def ended(self, number: int, job: TrainingJob, ask: Ask, ended: Ended, held: Mapping[str, int]) -> None:
        if ended.reason is None:  # its Brain looks at jobs that completed
            self._taken[_alike(job)] = max(ended.peak_bytes, self._taken.get(_alike(job), 0))


def _alike(job: TrainingJob) -> str:
    return job.spec.model_dump_json(exclude={"training": {"seed"}})
