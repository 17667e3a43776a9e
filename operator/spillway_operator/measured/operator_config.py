"""The OperatorConfig `default`: what jobs inherit, and nodes that do not exist yet."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from spillway.api.operator_config import CONFIG_NAME, NodeClass, OperatorConfigSpec, with_defaults
from spillway.errors import UserError
from spillway.placement.cluster_view import NodeView
from spillway.planning.hardware import resolve_node

from ..decide.observed import JobObject
from ..kube.api_client import OPERATOR_CONFIGS, ApiClient, ApiError, NotFound, RequestRejected
from ..kube.store import Key, canonical

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 15.0
NOTHING = OperatorConfigSpec()


class OperatorConfig:
    def __init__(self, client: ApiClient, may_read: bool, changed: Callable[[], None]) -> None:
        """`changed` is called when the object's content has changed."""
        self._client = client
        self._may_read = may_read
        self._changed = changed
        self._spec = OperatorConfigSpec()
        self._inherited: dict[Key, tuple[int, JobObject, tuple[str, ...]]] = {}
        """Cache: resourceVersion of a job, and the job with its defaults."""
        self.declared: tuple[NodeView, ...] = ()
        """A node of each declared class that the catalog has."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.load()
            except ApiError as error:
                logger.warning("cannot read the OperatorConfig; using the values of the last read: %s", error)

    async def load(self) -> None:
        """Reads the object. Raises ApiError if that fails; without the object, its kind or the permission, nothing is
        configured."""
        if not self._may_read:
            return
        try:
            found = await self._client.get(OPERATOR_CONFIGS, "", CONFIG_NAME)
            spec = OperatorConfigSpec.model_validate(found.get("spec") or {})
        except (NotFound, RequestRejected):
            spec = OperatorConfigSpec()
        except ValidationError as error:  # written by another version
            logger.warning("OperatorConfig %s is not used: %s", CONFIG_NAME, error.errors()[0]["msg"])
            return
        if spec != self._spec:
            self._spec, self._inherited = spec, {}
            self.declared = tuple(view for one in spec.node_classes if (view := _view(one)) is not None)
            logger.info("OperatorConfig %s changed", CONFIG_NAME)
            self._changed()

    def applied(self, job: JobObject) -> tuple[JobObject, tuple[str, ...]]:
        """The job with its inherited values, and the names of the inherited fields."""
        if (self._spec.job_defaults, self._spec.network_presets) == (NOTHING.job_defaults, NOTHING.network_presets):
            return job, ()
        known = self._inherited.get(job.key)
        if known is None or known[0] != job.resource_version or known[1].uid != job.uid:
            spec, fields = with_defaults(json.loads(job.spec), self._spec)
            known = self._inherited[job.key] = job.resource_version, replace(job, spec=canonical(spec)), fields
        return known[1], known[2]

    def forget(self, key: Key) -> None:
        self._inherited.pop(key, None)


def _view(one: NodeClass) -> NodeView | None:
    """A new node of the class; None if the catalog does not have it."""
    try:
        node = resolve_node(one.node)
    except UserError as error:
        logger.warning("node class %s of OperatorConfig %s is not used: %s", one.name, CONFIG_NAME, error)
        return None
    return NodeView(
        name=f"a new {one.name}",
        labels=dict(one.labels),
        taints=(),
        allocatable_cores=one.cpu or float(node.num_cores),
        allocatable_memory_bytes=one.memory or node.host_bytes,
        allocatable_ephemeral_bytes=one.ephemeral_storage or node.nvme_bytes,
        allocatable_devices={one.resource_name: node.num_devices} if node.device_kind == "Cuda" else {},
        profile=node,
        is_declared=True,
    )
