"""The operator's /metrics: the declared names, nothing else of ours."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from spillway import metrics
from spillway.metrics import Metric
from spillway_operator.exporter import LEVELS, OperatorExporter, Values

GAUGES: dict[Metric, Values] = {
    metric: {tuple(f"a {label}" for label in metric.labels): 7.0}
    for metric in metrics.OPERATOR
    if metric.kind == "gauge"
}


def test_every_declared_metric_is_exported_and_no_other() -> None:
    exporter = OperatorExporter()
    exporter.collect_from(lambda: GAUGES)
    exporter.request("get", "pods", 200)
    exporter.reconcile("done", 0.1)
    exporter.decision(0.01)
    exporter.correction("ghost", 1)
    exporter.progress(200)
    exporter.event("posted")
    for level in LEVELS:
        exporter.count(level, 1.0, "team", "x" if level.labels[1:] else "")
    families = list(text_string_to_metric_families(exporter.text().decode()))
    kinds = {family.name: family.type for family in families if family.name.startswith(metrics.PREFIX)}
    assert kinds == {metric.name.removesuffix("_total"): metric.kind for metric in metrics.OPERATOR}
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for metric in metrics.OPERATOR:
        assert labels.get(metric.name, set(metric.labels)) == set(metric.labels), metric.name


def test_the_operators_metrics_are_not_a_trainers() -> None:
    assert not set(metrics.OPERATOR) & set(metrics.ALL)


def test_a_namespace_without_jobs_gives_its_place_and_its_series_to_another() -> None:
    exporter = OperatorExporter()
    jobs: dict[tuple[str, ...], float] = {(f"team-{n}", "Running"): 2 for n in range(metrics.MOST_NAMESPACES)}
    exporter.collect_from(lambda: {metrics.OPERATOR_JOBS: jobs})
    exporter.text()
    ends, read = metrics.OPERATOR_ATTEMPTS_ENDED, exporter.registry.get_sample_value

    def lost(namespace: str) -> float | None:
        return read(ends.name, {"namespace": namespace, "reason": "NodeLost"})

    exporter.count(ends, 1, "team-7", "NodeLost")
    exporter.count(ends, 1, "new", "NodeLost")
    assert (lost("team-7"), lost("new"), lost(metrics.OTHER)) == (1.0, None, 1.0)
    del jobs["team-7", "Running"]
    exporter.text()
    exporter.count(ends, 1, "new", "NodeLost")
    assert (lost("team-7"), lost("new"), lost(metrics.OTHER)) == (None, 1.0, 1.0)
    assert lost("team-6") == 0.0, "a rate sees the first one"
    assert read(ends.name, {"namespace": "team-6", "reason": "Completed"}) == 0.0
    ladder = {"namespace": "team-6", "reason": "DeviceOutOfMemory"}
    assert read(metrics.OPERATOR_LADDER_STEPS.name, ladder) == 0.0


def test_namespaces_beyond_the_bound_are_one_and_none_is_left_out() -> None:
    exporter = OperatorExporter()
    most, some = metrics.MOST_NAMESPACES, metrics.MOST_NAMESPACES + 7
    jobs: dict[tuple[str, ...], float] = {(f"team-{n}", "Running"): 2 for n in range(some)}
    exporter.collect_from(lambda: {metrics.OPERATOR_JOBS: jobs})
    exporter.text()
    for number in range(some):
        exporter.count(metrics.OPERATOR_QUEUE_WAIT, 45.0, f"team-{number}")
        exporter.count(metrics.OPERATOR_ATTEMPTS_ENDED, 3, f"team-{number}", "NodeLost")
    text = exporter.text().decode()
    read = exporter.registry.get_sample_value
    for name, of_one in (("attempts_ended_total", {"reason": "NodeLost"}), ("jobs", {"state": "Running"})):
        value = 3.0 if "reason" in of_one else 2.0
        assert read(f"spillway_operator_{name}", {"namespace": f"team-{most - 1}", **of_one}) == value
        assert read(f"spillway_operator_{name}", {"namespace": f"team-{most}", **of_one}) is None
        assert read(f"spillway_operator_{name}", {"namespace": metrics.OTHER, **of_one}) == value * 7
    assert read("spillway_operator_queue_wait_seconds_bucket", {"namespace": metrics.OTHER, "le": "60.0"}) == 7.0
    assert len({line for line in text.splitlines() if line.startswith("spillway_operator_jobs{")}) == most + 1
