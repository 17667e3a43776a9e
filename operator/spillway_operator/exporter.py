"""/metrics of the operator: its API requests, durations and backlog.

Counters are incremented when something happens; gauges are computed at each scrape (`collect_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
from spillway.metrics import Metric

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Gauges:
    """The values at the moment of a scrape."""

    leads: bool
    queue_depth: int
    loop_lag_seconds: float
    watch_age_seconds: Mapping[str, float]
    list_age_seconds: float | None
    metrics_age_seconds: float | None
    jobs: Mapping[str, int]
    avoided_nodes: int


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
        self._gauges: Callable[[], Gauges] | None = None
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def collect_from(self, gauges: Callable[[], Gauges]) -> None:
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

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Family]:
        if self._gauges is None:
            return
        now = self._gauges()
        yield _gauge(metrics.OPERATOR_LEADER, {"": int(now.leads)})
        yield _gauge(metrics.OPERATOR_QUEUE_DEPTH, {"": now.queue_depth})
        yield _gauge(metrics.OPERATOR_LOOP_LAG, {"": now.loop_lag_seconds})
        yield _gauge(metrics.OPERATOR_WATCH_AGE, now.watch_age_seconds)
        yield _gauge(metrics.OPERATOR_JOBS, now.jobs)
        yield _gauge(metrics.OPERATOR_AVOIDED_NODES, {"": now.avoided_nodes})
        if now.list_age_seconds is not None:
            yield _gauge(metrics.OPERATOR_LIST_AGE, {"": now.list_age_seconds})
        if now.metrics_age_seconds is not None:
            yield _gauge(metrics.OPERATOR_METRICS_AGE, {"": now.metrics_age_seconds})

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=SECONDS)


def _gauge(metric: Metric, values: Mapping[str, float]) -> Family:
    """A gauge family; the keys of `values` are values of the metric's only label, or "" without labels."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for key, value in values.items():
        family.add_metric([key] if metric.labels else [], value)
    return family
