"""/metrics of one trainer process: the last step as plain floats, which are formatted only when somebody scrapes.

The loop never waits for a scrape: it replaces one reference, and the collector reads the one that is current.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from shutil import disk_usage

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spillway import metrics
from spillway.api.job_file import JobFile
from spillway.api.progress import MemberProgress, steps_of
from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan


@dataclass(slots=True)
class Totals:
    """Counters since the process started."""

    tokens: int = 0
    non_finite: int = 0
    overflows: int = 0
    allocator_retries: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)


class Exporter(Collector):
    """Serves the series of spillway.metrics for one rank. Series without a rank label are served only by rank 0."""

    def __init__(
        self,
        job: JobFile,
        rank: int,
        plan: MemoryPlan,
        io_backend: str,
        spill_faults: Callable[[], Mapping[str, int]] = dict,
        spill_file_bytes: Callable[[], int] = int,
        missed_checkpoints: Callable[[], int] = int,
    ) -> None:
        """`spill_faults`: faults survived so far, by kind. `spill_file_bytes`: what the files take now.
        `missed_checkpoints`: how many the disk has rejected so far."""
        self._missed_checkpoints = missed_checkpoints
        self._spill_file_bytes = spill_file_bytes
        self._spill_faults = spill_faults
        self._job, self._num_steps, self._checkpoints = job.name, job.spec.training.num_steps, job.checkpoint_directory
        self._rank, self._plan, self._io_backend = rank, plan, io_backend
        self._last: StepMetrics | None = None
        self._last_time = 0.0
        self._evaluation_loss: float | None = None
        self._checkpoint: tuple[int, float] | None = None
        self._volume_free: float | None = None
        self._totals = Totals()
        self._members: tuple[MemberProgress, ...] = ()
        self._best = ""

    def serve(self, port: int, address: str = "0.0.0.0") -> None:  # noqa: S104 - Prometheus asks from outside the pod
        """Start answering on `port` from a daemon thread. Raises UserError if the port cannot be opened."""
        registry = CollectorRegistry()
        registry.register(self)
        try:
            start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"metrics port {port}: cannot be opened: {error}; choose another port (spillway run --metrics-port)"
            ) from error

    def step(self, step: StepMetrics) -> None:
        totals = self._totals
        totals.tokens += step.tokens
        totals.non_finite += step.skipped
        totals.overflows += step.overflowed
        totals.allocator_retries += step.allocator_retries
        for phase, seconds in step.phase_seconds.items():
            totals.phase_seconds[phase] = totals.phase_seconds.get(phase, 0.0) + seconds
        for link, moved in step.moved_bytes.items():
            totals.moved_bytes[link] = totals.moved_bytes.get(link, 0) + moved
        self._last, self._last_time = step, time.time()

    def evaluation(self, loss: float) -> None:
        self._evaluation_loss = loss

    def checkpoint(self, step: int) -> None:
        self._checkpoint = (step, time.time())
        with suppress(OSError):
            volume = disk_usage(self._checkpoints)
            self._volume_free = volume.free / volume.total

    def member_checkpoint(self, member: str, step: int) -> None:
        self.checkpoint(step)

    def sweep(self, members: tuple[MemberProgress, ...], best: str) -> None:
        """Shows a sweep: `step` and `steps_planned` are then those of all members together."""
        self._members, self._best = members, best

    def collect(self) -> Iterator[Metric]:
        members = self._members
        yield from self._gauge(metrics.STEPS_PLANNED, steps_of(members)[1] if members else self._num_steps)
        yield from self._member_series(members, self._best)
        yield from self._gauge(metrics.PREDICTED_STEP_SECONDS, self._plan.prediction.step_seconds)
        yield from self._labelled(metrics.IO_BACKEND, {self._io_backend: 1.0})
        budget = {tier.value: float(size) for tier, size in self._plan.budget.items()}
        predicted = {tier.value: float(size.total) for tier, size in self._plan.bytes.items()}
        yield from self._labelled(metrics.TIER_BUDGET_BYTES, budget)
        yield from self._labelled(metrics.PREDICTED_TIER_BYTES, predicted)
        yield from self._labelled(metrics.SPILL_FILE_BYTES, {"": float(self._spill_file_bytes())})
        yield from self._labelled(
            metrics.SPILL_FAULTS, {kind: float(number) for kind, number in self._spill_faults().items()}
        )
        yield from self._labelled(metrics.CHECKPOINTS_MISSED, {"": float(self._missed_checkpoints())})
        if self._evaluation_loss is not None:
            yield from self._gauge(metrics.EVALUATION_LOSS, self._evaluation_loss)
        if self._checkpoint is not None:
            step, committed = self._checkpoint
            yield from self._gauge(metrics.CHECKPOINT_STEP, step)
            yield from self._gauge(metrics.CHECKPOINT_TIMESTAMP, committed)
        if self._volume_free is not None:
            yield from self._gauge(metrics.CHECKPOINT_VOLUME_FREE, self._volume_free)
        if self._last is not None:
            yield from self._step_series(self._last)

    def _member_series(self, members: tuple[MemberProgress, ...], best: str) -> Iterator[Metric]:
        if not members:
            return
        losses = {one.name: one.loss for one in members if one.loss is not None}
        values = {one.name: one.objective for one in members if one.objective is not None}
        yield from self._labelled(metrics.MEMBER_STEP, {one.name: float(one.step) for one in members})
        yield from self._labelled(metrics.MEMBER_STEPS_PLANNED, {one.name: float(one.num_steps) for one in members})
        yield from self._labelled(metrics.MEMBER_LOSS, losses)
        yield from self._labelled(metrics.MEMBER_OBJECTIVE, values)
        yield from self._labelled(metrics.MEMBER_STATE, {(one.name, one.state.value): 1.0 for one in members})
        yield from self._labelled(metrics.MEMBER_BEST, {one.name: float(one.name == best) for one in members})

    def _step_series(self, last: StepMetrics) -> Iterator[Metric]:
        yield from self._gauge(metrics.STEP, steps_of(self._members)[0] if self._members else last.step)
        yield from self._gauge(metrics.LAST_STEP_TIMESTAMP, self._last_time)
        yield from self._gauge(metrics.LOSS, last.loss)
        yield from self._gauge(metrics.GRADIENT_NORM, last.gradient_norm)
        yield from self._gauge(metrics.LEARNING_RATE, last.learning_rate)
        yield from self._labelled(metrics.TOKENS, {"": float(self._totals.tokens)})
        yield from self._labelled(metrics.NON_FINITE, {"": float(self._totals.non_finite)})
        yield from self._gauge(metrics.LOSS_SCALE, 1.0 if last.loss_scale is None else last.loss_scale)
        yield from self._labelled(metrics.LOSS_SCALE_OVERFLOWS, {"": float(self._totals.overflows)})
        yield from self._labelled(metrics.PHASE_SECONDS, self._totals.phase_seconds)
        yield from self._labelled(metrics.TIER_BYTES, last.tier_bytes)
        yield from self._labelled(metrics.TIER_PEAK_BYTES, last.tier_peak_bytes)
        yield from self._labelled(metrics.ALLOCATOR_RETRIES, {"": float(self._totals.allocator_retries)})
        yield from self._labelled(metrics.MOVED_BYTES, self._totals.moved_bytes)

    def _gauge(self, metric: metrics.Metric, value: float) -> Iterator[Metric]:
        return self._labelled(metric, {"": float(value)})

    def _labelled(
        self, metric: metrics.Metric, values: Mapping[str, float] | Mapping[tuple[str, str], float]
    ) -> Iterator[Metric]:
        """Yields one family, or nothing if this rank does not serve it. A key of `values` is the value of the metric's
        own label (tier, link, phase), or of its two labels; "" if it has none."""
        if self._rank != 0 and metrics.RANK_LABEL not in metric.labels:
            return
        family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = family_type(metric.name, metric.help, labels=[metrics.JOB_LABEL, *metric.labels])
        for key, value in dict(values).items():  # the loop may add a key meanwhile
            labels = [self._job]
            if metrics.RANK_LABEL in metric.labels:
                labels.append(str(self._rank))
            labels += [key] if isinstance(key, str) and key else []
            labels += key if isinstance(key, tuple) else ()
            family.add_metric(labels, value)
        yield family
