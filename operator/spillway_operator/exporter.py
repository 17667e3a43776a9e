"""/metrics of the operator: its API requests, durations and backlog.

Counters are incremented when something happens; gauges are computed at each scrape (`collect_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from spillway import metrics
from spillway.errors import ExitCode
from spillway.feedback.retries import MEMORY_ERRORS, RETRIES
from spillway.metrics import JOB_LABEL, MOST_NAMESPACES, NAMESPACE_LABEL, OTHER, Metric

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LEVELS = (
    metrics.OPERATOR_QUEUE_WAIT,
    metrics.OPERATOR_FIRST_STEP,
    metrics.OPERATOR_ATTEMPTS_ENDED,
    metrics.OPERATOR_LADDER_STEPS,
    metrics.OPERATOR_LOST_STEPS,
    metrics.OPERATOR_DEVICE_SECONDS,
)
"""Metrics that `count` counts, by namespace."""
LONG_SECONDS = (10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


Values = Mapping[tuple[str, ...], float]
"""Values of a metric's labels -> value."""


EXPECTED: dict[Metric, tuple[tuple[str, ...], ...]] = {
    metrics.OPERATOR_ATTEMPTS_ENDED: tuple(
        (reason,) for reason in (*RETRIES, ExitCode.COMPLETED.reason, ExitCode.USER_ERROR.reason)
    ),
    metrics.OPERATOR_LADDER_STEPS: tuple((reason,) for reason in MEMORY_ERRORS),
    metrics.OPERATOR_LOST_STEPS: tuple((reason,) for reason in RETRIES),
    metrics.OPERATOR_DEVICE_SECONDS: (("held",), ("committed",)),
    metrics.OPERATOR_QUEUE_WAIT: ((),),
    metrics.OPERATOR_FIRST_STEP: ((),),
}
"""Values of the labels after the namespace's for which each namespace has series from the beginning."""


class OperatorExporter(Collector):
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # it would add a series for each counter
        self.registry = CollectorRegistry()
        self._requests = self._counter(metrics.OPERATOR_API_REQUESTS)
        self._reconciles = self._counter(metrics.OPERATOR_RECONCILES)
        self._reconcile_seconds = self._histogram(metrics.OPERATOR_RECONCILE_SECONDS)
        self._decision_seconds = self._histogram(metrics.OPERATOR_DECISION_SECONDS)
        self._plans = self._counter(metrics.OPERATOR_PLANS)
        self._corrections = self._counter(metrics.OPERATOR_WATCH_CORRECTIONS)
        self._progress = self._counter(metrics.OPERATOR_PROGRESS_REPORTS)
        self._events = self._counter(metrics.OPERATOR_EVENTS)
        self._levels: dict[str, Counter | Histogram] = {
            one.name: self._counter(one) if one.kind == "counter" else self._histogram(one, LONG_SECONDS)
            for one in LEVELS
        }
        self._namespaces: dict[str, None] = {}
        """Namespaces with series of their own, oldest first."""
        self._with_jobs: set[str] = set()
        """Namespaces that had jobs at the last scrape."""
        self._gauges: Callable[[], Mapping[Metric, Values]] | None = None
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def collect_from(self, gauges: Callable[[], Mapping[Metric, Values]]) -> None:
        self._gauges = gauges
        self.registry.register(self)

    def request(self, verb: str, resource: str, code: int) -> None:
        self._requests.labels(verb, resource, str(code)).inc()

    def reconcile(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def decision(self, seconds: float) -> None:
        self._decision_seconds.observe(seconds)

    def plan(self, result: str) -> None:
        self._plans.labels(result).inc()

    def correction(self, kind: str, count: int) -> None:
        self._corrections.labels(kind).inc(count)

    def progress(self, code: int) -> None:
        self._progress.labels(str(code)).inc()

    def event(self, result: str) -> None:
        self._events.labels(result).inc()

    def count(self, metric: Metric, value: float, namespace: str, label: str = "") -> None:
        """Adds to a metric for service levels."""
        level = self._levels[metric.name].labels(self._namespace(namespace), *([label] if label else []))
        level.observe(value) if isinstance(level, Histogram) else level.inc(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Family]:
        for metric, values in self._gauges().items() if self._gauges is not None else ():
            if metric == metrics.OPERATOR_JOBS:
                self._with_jobs = {namespace for namespace, _ in values}
            yield self._gauge(metric, values)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=buckets)

    def _gauge(self, metric: Metric, values: Values) -> Family:
        """A gauge family; the keys of `values` are the values of its labels. Values of namespaces beyond
        MOST_NAMESPACES are added up, unless each series belongs to one job: then the number of jobs bounds that of
        namespaces."""
        if metric.labels[:1] == (NAMESPACE_LABEL,) and JOB_LABEL not in metric.labels:
            summed: dict[tuple[str, ...], float] = {}
            for (namespace, *rest), value in values.items():
                key = (self._namespace(namespace), *rest)
                summed[key] = summed.get(key, 0) + value
            values = summed
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for key, value in values.items():
            family.add_metric(key, value)
        return family

    def _namespace(self, name: str) -> str:
        """The label of a namespace: its name for the first MOST_NAMESPACES, OTHER beyond that. A further one takes the
        place of one that has no jobs."""
        if name in self._namespaces:
            return name
        if len(self._namespaces) >= MOST_NAMESPACES:
            gone = next((one for one in self._namespaces if one not in self._with_jobs), None)
            if gone is None:
                return OTHER
            del self._namespaces[gone]
            for level in self._levels.values():
                level.remove_by_labels({NAMESPACE_LABEL: gone})
        self._namespaces[name] = None
        for metric, labels in EXPECTED.items():
            for label in labels:
                self._levels[metric.name].labels(name, *label)  # starts at 0, so that a rate sees the first event
        return name
