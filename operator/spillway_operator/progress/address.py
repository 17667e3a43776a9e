"""Points the progress Service to the leader's pod, through an EndpointSlice that only the leader writes.

The Service has no selector, so that no post reaches a standby. The slice is owned by the Service and deleted with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kube.api_client import ENDPOINT_SLICES, FIELD_MANAGER, SERVICES, ApiClient, ApiError, NotFound

logger = logging.getLogger(__name__)

PORT_NAME = "progress"
"""Name of the Service's port."""
LOOK_SECONDS = 30.0
"""Interval between checks of the slice."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProgressAddress:
    client: ApiClient
    namespace: str
    service: str
    pod_address: str
    port: int

    @property
    def name(self) -> str:
        """The slice's name, one per IP family, because a slice cannot change its family."""
        return f"{self.service}-leader-ipv{ipaddress.ip_address(self.pod_address).version}"

    async def run(self) -> None:
        """Keeps this pod's address in the slice, endlessly."""
        while True:
            try:
                if not self._is_there(await self._read()):
                    await self._write((self.pod_address,))
                    logger.info("Service %s/%s now points to this pod", self.namespace, self.service)
            except ApiError as error:
                logger.warning("EndpointSlice %s/%s: %s", self.namespace, self.name, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await asyncio.sleep(LOOK_SECONDS)

    async def withdraw(self) -> None:
        """Removes the address, so that posts fail at once until another operator leads, instead of timing out."""
        try:
            await self._write(())
        except ApiError as error:
            logger.warning("EndpointSlice %s/%s still names this pod: %s", self.namespace, self.name, error)

    async def _read(self) -> Mapping[str, Any]:
        try:
            return await self.client.get(ENDPOINT_SLICES, self.namespace, self.name)
        except NotFound:
            return {}

    def _is_there(self, found: Mapping[str, Any]) -> bool:
        addresses = [address for endpoint in found.get("endpoints") or () for address in endpoint["addresses"]]
        ports = [(port.get("name"), port.get("port")) for port in found.get("ports") or ()]
        labels = (found.get("metadata") or {}).get("labels") or {}
        return (
            addresses == [self.pod_address]
            and ports == [(PORT_NAME, self.port)]
            and labels.get("kubernetes.io/service-name") == self.service
        )

    async def _write(self, addresses: tuple[str, ...]) -> None:
        service = await self.client.get(SERVICES, self.namespace, self.service)
        await self.client.apply(
            ENDPOINT_SLICES, self.namespace, self.name, self.slice(service["metadata"]["uid"], addresses)
        )

    def slice(self, service_uid: str, addresses: tuple[str, ...]) -> dict[str, Any]:
        owner = {"apiVersion": "v1", "kind": "Service", "name": self.service, "uid": service_uid}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {
                    "kubernetes.io/service-name": self.service,
                    "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
                },
                "ownerReferences": [owner | {"blockOwnerDeletion": False}],
            },
            "addressType": f"IPv{ipaddress.ip_address(self.pod_address).version}",
            "ports": [{"name": PORT_NAME, "port": self.port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
        }
