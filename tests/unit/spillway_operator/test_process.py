"""How the operator's process begins and ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from spillway.metrics import OPERATOR_NODE_AVOIDED
from spillway.placement.cluster_view import ClusterView
from spillway_operator.decide.planning import metrics_seen
from spillway_operator.exporter import OperatorExporter
from spillway_operator.log import JsonFormatter
from spillway_operator.process import Operator, live_metrics
from spillway_operator.settings import load_settings


class NotServed(Exception):
    """As kopf's error of a watch."""

    status = 404


def ends_of(error: Exception) -> int:
    """The exit code when a background task raised `error`."""

    async def fail() -> None:
        raise error

    async def supervise() -> int:
        operator = Operator.__new__(Operator)
        operator._stop = asyncio.Event()
        return await operator._supervise([asyncio.create_task(fail(), name="watches")])

    return asyncio.run(supervise())


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("a task of kopf's has failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize("error", [NotServed("not found"), wrapped(NotServed("not found"))])
def test_a_crd_that_was_deleted_is_named_in_a_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert ends_of(error) == 1
    (record,) = caplog.records
    assert "install the CRD trainingjobs.spillway.dev again" in record.getMessage()
    assert record.exc_info is None


def test_any_other_end_is_said_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert ends_of(ZeroDivisionError("oops")) == 1
    (record,) = caplog.records
    assert record.getMessage() == "task watches ended, so the process ends: oops"
    assert "exception" in JsonFormatter().format(record)


def test_what_kopf_logs_of_a_kind_that_is_gone_has_no_traceback() -> None:
    error = NotServed("not found")
    record = logging.LogRecord("kopf", logging.ERROR, "", 0, "has failed", None, (NotServed, error, None))
    assert "exception" not in JsonFormatter().format(record)


EXPORTERS = {"node_exporters": "app=exporter", "pod_namespace": "system", "node_reader": True}


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, ""),
        (EXPORTERS, "Scrape"),
        ({**EXPORTERS, "node_reader": False}, ""),
        ({**EXPORTERS, "prometheus_url": "http://prometheus:9090"}, "Prometheus"),
    ],
)
def test_without_a_source_of_live_memory_metrics_are_not_configured(given: dict[str, Any], source: str) -> None:
    found = live_metrics(load_settings({"trainer_image": "trainer:1", **given}), Mock()).snapshot()
    seen = ClusterView(nodes=(), metrics_problem=found.problem, metrics_source=found.source)
    assert (found.source, metrics_seen(seen).reason) == (source, "Stale" if source else "NotConfigured")


def test_each_node_that_all_jobs_avoid_is_a_series_of_value_1() -> None:
    operator = Operator.__new__(Operator)
    for part in ("_election", "_certificate"):
        setattr(operator, part, None)
    operator._lag, operator._audit, operator._metrics = Mock(longest=0.0), Mock(last_time=None), Mock()
    operator._metrics.snapshot.return_value.age_seconds = None
    operator._queue = operator._plans = MagicMock(oldest_seconds=0.0)
    operator._kinds, operator._store = (), Mock(jobs=())
    operator._cluster = Mock(avoided_nodes=frozenset({"node-7", "node-8"}))
    exporter = OperatorExporter()
    exporter.collect_from(operator._gauges)
    found = [exporter.registry.get_sample_value(OPERATOR_NODE_AVOIDED.name, {"node": f"node-{n}"}) for n in (7, 8, 9)]
    assert found == [1.0, 1.0, None]
