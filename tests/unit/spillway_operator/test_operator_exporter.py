"""The operator's /metrics: the declared names, nothing else of ours."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from spillway import metrics
from spillway_operator.exporter import Gauges, OperatorExporter


def test_every_declared_metric_is_exported_and_no_other() -> None:
    exporter = OperatorExporter()
    exporter.collect_from(lambda: Gauges(True, 3, 0.1, {"jobs": 2.0}, 5.0, 7.0, {"Running": 4}, 2))
    exporter.request("get", "pods", 200)
    exporter.reconcile("done", 0.1)
    exporter.decision(0.01)
    exporter.correction("ghost", 1)
    exporter.progress(200)
    exporter.event("posted")
    families = list(text_string_to_metric_families(exporter.text().decode()))
    kinds = {family.name: family.type for family in families if family.name.startswith(metrics.PREFIX)}
    assert kinds == {metric.name.removesuffix("_total"): metric.kind for metric in metrics.OPERATOR}
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for metric in metrics.OPERATOR:
        assert labels.get(metric.name, set(metric.labels)) == set(metric.labels), metric.name


def test_the_operators_metrics_are_not_a_trainers() -> None:
    assert not set(metrics.OPERATOR) & set(metrics.ALL)


def test_what_is_not_known_is_left_out() -> None:
    exporter = OperatorExporter()
    exporter.collect_from(lambda: Gauges(False, 0, 0.0, {}, None, None, {}, 0))
    text = exporter.text().decode()
    assert f"{metrics.OPERATOR_METRICS_AGE.name} " not in text
    assert f"{metrics.OPERATOR_QUEUE_DEPTH.name} 0.0" in text
