"""Finds our trainer pods as scrape targets, for operators without Prometheus; lists pods once per reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..decide.manifests import MANAGED_BY_LABEL
from ..kube.api_client import PODS, ApiClient, ApiError
from .metrics_source import ScrapeTarget
from .pod_requests import extended_resources

METRICS_PORT_NAME = "metrics"


class ScrapeTargets:
    """Called by MetricsSource before each reading."""

    def __init__(self, client: ApiClient, namespaces: Sequence[str]) -> None:
        self._client = client
        self._namespaces = namespaces

    async def __call__(self) -> tuple[ScrapeTarget, ...]:
        """Running pods of attempts; none if the API server does not answer, because metrics can wait."""
        found: list[ScrapeTarget | None] = []
        try:
            for namespace in self._namespaces:
                selector = f"{MANAGED_BY_LABEL}=spillway"
                found += (await self._client.list(PODS, namespace, target_of, selector)).items
        except ApiError:
            return ()
        return tuple(target for target in found if target is not None)


def target_of(pod: Mapping[str, Any]) -> ScrapeTarget | None:
    """The pod's target; None if it has no address or is not running."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    address, containers = status.get("podIP"), spec.get("containers") or ()
    ports = [
        port["containerPort"]
        for container in containers
        for port in container.get("ports") or ()
        if port.get("name") == METRICS_PORT_NAME
    ]
    if status.get("phase") != "Running" or not address or not ports:
        return None
    host = f"[{address}]" if ":" in address else address
    return ScrapeTarget(
        namespace=metadata["namespace"],
        pod=metadata["name"],
        url=f"http://{host}:{ports[0]}/metrics",
        node=spec.get("nodeName", ""),
        device_is_host_memory=not any(_has_devices(container) for container in containers),
    )


def _has_devices(container: Mapping[str, Any]) -> bool:
    return bool(extended_resources((container.get("resources") or {}).get("limits") or {}))
