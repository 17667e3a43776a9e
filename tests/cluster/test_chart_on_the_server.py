"""The API server reads what the chart renders: its strict schemas know every field."""

from __future__ import annotations

import json

import pytest
import yaml

from harness.rendered_chart import CHART, MATRIX, RELEASE, settings_of
from testbed.client import Bed

FOREIGN = ("PodMonitor", "ServiceMonitor", "PrometheusRule")
"""kinds of the Prometheus operator, which the test bed does not have"""


@pytest.mark.parametrize("cell", MATRIX)
def test_the_api_server_knows_every_field_of_every_object(testbed: Bed, namespace: str, cell: str) -> None:
    text = testbed.helm("template", RELEASE, str(CHART), "--namespace", namespace, *settings_of(MATRIX[cell]))
    objects = [found for found in yaml.safe_load_all(text) if found and found["kind"] not in FOREIGN]
    for found in objects:  # watched namespaces need not exist
        if "namespace" in found["metadata"]:
            found["metadata"]["namespace"] = namespace
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    flags = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    said = testbed.kubectl("apply", *flags, "-f", "-", stdin=listed)
    assert said.count("serverside-applied (server dry run)") == len(objects)
