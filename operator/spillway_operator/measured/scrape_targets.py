"""Finds our node exporters as scrape targets, for operators without Prometheus; lists pods once per reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kube.api_client import PODS, ApiClient, ApiError
from .metrics_source import ScrapeTarget

METRICS_PORT_NAME = "metrics"


class ScrapeTargets:
    """Called by MetricsSource before each reading."""

    def __init__(self, client: ApiClient, namespace: str, selector: str) -> None:
        """`namespace` is the operator's own: whoever may create pods there is trusted to say what a node has free."""
        self._client, self._namespace, self._selector = client, namespace, selector

    async def __call__(self) -> tuple[ScrapeTarget, ...]:
        """Running node exporters; none if the API server does not answer, because metrics can wait."""
        try:
            found = (await self._client.list(PODS, self._namespace, target_of, self._selector)).items
        except ApiError:
            return ()
        return tuple(target for target in found if target is not None)


def target_of(pod: Mapping[str, Any]) -> ScrapeTarget | None:
    """The pod's target; None if it has no address or node, or is not running."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    address, node = status.get("podIP"), spec.get("nodeName")
    ports = [
        port["containerPort"]
        for container in spec.get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == METRICS_PORT_NAME
    ]
    if status.get("phase") != "Running" or not address or not node or not ports:
        return None
    host = f"[{address}]" if ":" in address else address
    return ScrapeTarget(node, f"http://{host}:{ports[0]}/metrics")
