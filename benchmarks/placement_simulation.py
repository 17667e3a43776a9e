"""Simulates a cluster under a trace of jobs in virtual time: which jobs fit, run out of memory, and waste what they
request.

    a job arrives -> the policy decides what its pod requests -> the pod waits for a node that has room -> the attempt
    ends or runs out of memory -> the policy is told -> the job's next attempt, the model's next job

Pure: the same arrivals, nodes and policy give the same outcome. No policy sees what a job really takes (`Truth`). Each
job has one pod, on CPU nodes. kube-scheduler is a filter by requests and the policy's scores; pods wait in the order in
which they were created, and a pod that does not fit does not block those behind it. The request of a pod is decided
once per attempt, when its Job is created, as in the operator: what is learned later changes no waiting pod.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway.feedback.retries import OOM_KILLED
from spillway.placement.cluster_view import LiveBytes, NodeView
from spillway.plan import MemoryPlan, Tier

START_SECONDS = 30.0
"""duration of an attempt before its first step: image, imports, process group, checkpoint"""
METRICS_SECONDS = 15.0
"""between two readings of the nodes' free bytes"""
RAN_OUT = {
    Tier.DEVICE: ExitCode.DEVICE_OUT_OF_MEMORY.reason,
    Tier.HOST: ExitCode.HOST_OUT_OF_MEMORY.reason,
    Tier.NVME: ExitCode.SPILL_VOLUME_FULL.reason,
}


@dataclass(frozen=True, slots=True)
class Truth:
    """What a job really takes."""

    tiers: Mapping[Tier, float] = field(default_factory=dict)
    """held bytes of a tier over the predicted ones; 1 for a tier that is missing"""
    beside_bytes: int = 0
    """bytes of its pod beside the tiers"""
    building_bytes: int = 0
    """bytes of its pod until the corpus is built, before it holds any tier"""
    cached_bytes: int = 0
    """page cache in addition, which the kernel takes back before it kills anything"""
    seconds: float = 1.0
    """seconds of a step over the predicted ones"""

    def held(self, plan: MemoryPlan, tier: Tier) -> int:
        return int(plan.bytes[tier].predicted * self.tiers.get(tier, 1.0))

    def needed_bytes(self, plan: MemoryPlan) -> int:
        """Returns the bytes below which the kernel kills the pod. On a CPU node device memory is host memory, too."""
        return max(self.building_bytes, self.beside_bytes + self.held(plan, Tier.DEVICE) + self.held(plan, Tier.HOST))

    def peak_bytes(self, plan: MemoryPlan, limit_bytes: int) -> int:
        """Returns the peak that its cgroup counts, including page cache."""
        return min(limit_bytes, self.needed_bytes(plan) + self.cached_bytes)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job of one rank, and when it is created."""

    job: TrainingJob
    seconds: float
    truth: Truth


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy requests for an attempt."""

    plan: MemoryPlan
    memory_bytes: int
    """request and limit of the pod"""
    ephemeral_bytes: int
    cores: float
    weights: Mapping[str, int] = field(default_factory=dict)
    """weights of preferred nodes"""
    holds_tiers: bool = True
    """whether the trainer knows the budgets and raises when they are exceeded; if not, only the kernel ends it"""


@dataclass(frozen=True, slots=True)
class Ended:
    """One attempt that has ended."""

    job: int
    """index of the job among the arrivals"""
    attempt: int
    node: str
    began_seconds: float
    ended_seconds: float
    reason: str | None
    """why it ran out of memory; None if the job is complete"""
    requested_bytes: int
    peak_bytes: int
    """peak of its cgroup, including page cache"""
    used_bytes: int
    """bytes without those that the kernel could have taken back; at most the requested ones"""

    @property
    def wasted_byte_seconds(self) -> float:
        return (self.requested_bytes - self.used_bytes) * (self.ended_seconds - self.began_seconds)


class Policy(Protocol):
    def ask(
        self, number: int, job: TrainingJob, failed: Sequence[tuple[Ask, str]], nodes: Sequence[NodeView], now: float
    ) -> Ask | None:
        """Returns what to request for the attempt after those in `failed`; None gives the job up. `live` of each node
        says what is free."""

    def score(self, ask: Ask, node: NodeView) -> float:
        """Returns the score of a node that has room; the highest score gets the pod. `live` of the node says what is
        not requested there."""

    def bound(self, number: int, now: float) -> None:
        """Is told that the job's pod has a node."""

    def ended(self, number: int, job: TrainingJob, ask: Ask, ended: Ended, held: Mapping[str, int]) -> None:
        """Is told how an attempt ended and how many bytes of each tier it held."""


@dataclass(frozen=True, slots=True)
class Outcome:
    attempts: tuple[Ended, ...]
    """in the order in which they ended"""
    given_up: tuple[int, ...]
    """jobs that did not complete"""
    num_jobs: int
    makespan_seconds: float
    """from the first arrival to the last end"""

    @property
    def completed(self) -> float:
        """The share of all jobs that completed."""
        return 1.0 - len(self.given_up) / self.num_jobs

    @property
    def first_attempt_success(self) -> float:
        """The share of all jobs that completed in their first attempt."""
        return sum(one.reason is None and one.attempt == 1 for one in self.attempts) / self.num_jobs

    @property
    def wasted_byte_seconds(self) -> float:
        return sum(one.wasted_byte_seconds for one in self.attempts)


def why_it_runs_out(ask: Ask, truth: Truth) -> str | None:
    """Returns why the attempt runs out of memory in its first step; None if it does not."""
    limits = {Tier.DEVICE: ask.plan.budget[Tier.DEVICE], **{tier: ask.plan.slab_bytes(tier) for tier in SLABS}}
    if ask.holds_tiers:
        for tier, limit in limits.items():
            if truth.held(ask.plan, tier) > limit:
                return RAN_OUT[tier]
    return OOM_KILLED if truth.needed_bytes(ask.plan) > ask.memory_bytes else None


SLABS = (Tier.HOST, Tier.NVME)


# --- the cluster ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    """A job that has no pod now, and its failed attempts."""

    number: int
    failed: tuple[tuple[Ask, str], ...] = ()


@dataclass(slots=True)
class _Node:
    """A node: what is not requested on it, and what its pods really hold."""

    view: NodeView
    memory: int
    ephemeral: int
    cores: float
    held: int = 0

    def fits(self, ask: Ask) -> bool:
        return self.memory >= ask.memory_bytes and self.ephemeral >= ask.ephemeral_bytes and self.cores >= ask.cores

    def take(self, ask: Ask, peak_bytes: int, sign: int = 1) -> None:
        self.memory -= sign * ask.memory_bytes
        self.ephemeral -= sign * ask.ephemeral_bytes
        self.cores -= sign * ask.cores
        self.held += sign * peak_bytes
        if min(self.memory, self.ephemeral, self.cores, self.view.allocatable_memory_bytes - self.held) < 0:
            raise AssertionError(f"{self.view.name} has less than its pods: a defect of the simulation")

    def unrequested(self) -> NodeView:
        return replace(self.view, live=LiveBytes(host=self.memory, nvme=self.ephemeral))

    def measured(self) -> NodeView:
        free = self.view.allocatable_memory_bytes - self.held
        return replace(self.view, live=LiveBytes(host=free, nvme=self.ephemeral))


def simulate(arrivals: Sequence[Arrival], nodes: Sequence[NodeView], policy: Policy) -> Outcome:
    """Plays the trace to its end. Raises ValueError without jobs or nodes, and for two nodes with the same name."""
    if not arrivals or not nodes or len({view.name for view in nodes}) < len(nodes):
        raise ValueError(f"{len(arrivals)} jobs on {len(nodes)} nodes: both are needed, and names of their own")
    return _Cluster(arrivals, nodes, policy).run()


class _Cluster:
    def __init__(self, arrivals: Sequence[Arrival], nodes: Sequence[NodeView], policy: Policy) -> None:
        self._arrivals, self._policy = arrivals, policy
        self._nodes = {
            view.name: _Node(
                view, view.allocatable_memory_bytes, view.allocatable_ephemeral_bytes, view.allocatable_cores
            )
            for view in nodes
        }
        self._pending: list[tuple[_Waiting, Ask]] = []
        self._counter = itertools.count()
        self._events: list[tuple[float, int, _Waiting, tuple[Ask, Ended] | None]] = []
        self._attempts: list[Ended] = []
        self._given_up: list[int] = []
        self._seen: tuple[float, tuple[NodeView, ...]] = (float("-inf"), ())

    def run(self) -> Outcome:
        for number, arrival in enumerate(self._arrivals):
            self._at(arrival.seconds, _Waiting(number), None)
        while self._events:
            now, _, job, over = heapq.heappop(self._events)
            if over is not None:
                self._end(job, *over)
            else:
                self._create(job, now)
            self._schedule(now)
        self._given_up += [job.number for job, _ in self._pending]  # no event that could make room is left
        begin = min(arrival.seconds for arrival in self._arrivals)
        last = max((one.ended_seconds for one in self._attempts), default=begin)
        return Outcome(tuple(self._attempts), tuple(sorted(self._given_up)), len(self._arrivals), last - begin)

    def _at(self, seconds: float, job: _Waiting, over: tuple[Ask, Ended] | None) -> None:
        heapq.heappush(self._events, (seconds, next(self._counter), job, over))

    def _create(self, job: _Waiting, now: float) -> None:
        ask = self._policy.ask(job.number, self._arrivals[job.number].job, job.failed, self._metrics(now), now)
        if ask is None:
            self._given_up.append(job.number)
        else:
            self._pending.append((job, ask))

    def _metrics(self, now: float) -> tuple[NodeView, ...]:
        """Returns the nodes by the last reading, which may be METRICS_SECONDS old."""
        if now - self._seen[0] >= METRICS_SECONDS:
            self._seen = (now, tuple(node.measured() for node in self._nodes.values()))
        return self._seen[1]

    def _schedule(self, now: float) -> None:
        self._pending = [(job, ask) for job, ask in self._pending if not self._binds(job, ask, now)]

    def _binds(self, job: _Waiting, ask: Ask, now: float) -> bool:
        able = [node for node in self._nodes.values() if node.fits(ask)]
        if not able:
            return False
        node = max(able, key=lambda node: (self._policy.score(ask, node.unrequested()), node.view.name))
        arrival = self._arrivals[job.number]
        truth, reason = arrival.truth, why_it_runs_out(ask, arrival.truth)
        steps = 1 if reason is not None else arrival.job.spec.training.steps
        seconds = START_SECONDS + steps * ask.plan.prediction.step_seconds * truth.seconds
        peak = truth.peak_bytes(ask.plan, ask.memory_bytes)
        node.take(ask, peak)
        ended = Ended(
            job=job.number,
            attempt=len(job.failed) + 1,
            node=node.view.name,
            began_seconds=now,
            ended_seconds=now + seconds,
            reason=reason,
            requested_bytes=ask.memory_bytes,
            peak_bytes=peak,
            used_bytes=min(ask.memory_bytes, truth.needed_bytes(ask.plan)),
        )
        self._at(now + seconds, job, (ask, ended))
        self._policy.bound(job.number, now)
        return True

    def _end(self, job: _Waiting, ask: Ask, ended: Ended) -> None:
        arrival = self._arrivals[job.number]
        self._nodes[ended.node].take(ask, ended.peak_bytes, -1)
        self._attempts.append(ended)
        # An attempt that ran out did so in its first step, of which the trainer reports nothing.
        held = {tier.value: arrival.truth.held(ask.plan, tier) for tier in Tier if ended.reason is None}
        self._policy.ended(job.number, arrival.job, ask, ended, held)
        if ended.reason is not None:
            self._create(_Waiting(job.number, (*job.failed, (ask, ended.reason))), ended.ended_seconds)
