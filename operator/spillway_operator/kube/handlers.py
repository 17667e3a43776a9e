"""Watches through kopf, which only feed the store: kopf writes nothing and decides nothing here.

kopf is imported with this module, before the event loop runs: it takes a second, which would block a running loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import kopf

from .api_client import PAGE_SIZE
from .credentials import Credentials
from .store import Key
from .watched import Watched

logger = logging.getLogger(__name__)

WATCH_SECONDS = 290
"""Duration of one watch request; otherwise the API server ends it after 5 to 10 minutes."""
IDLE_SECONDS = 0.2
"""How long kopf keeps a task per object; with its default of 5 s, a relist of thousands would fill the memory."""

KOPF_SECONDS = 2.0
"""Time for kopf to end its tasks."""

IDENTITY: Any = "spillway-operator"
"""For kopf's peering, which is not used; without it kopf looks up the user's name, and a pod's uid may have none."""


async def watch(
    kinds: Sequence[Watched[Any]],
    credentials: Credentials,
    namespaces: Sequence[str],
    enqueue: Callable[[Key], None],
    ready: asyncio.Event,
) -> None:
    """Feeds the store from watches, endlessly; sets `ready` once kopf runs. Raises what ends kopf."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(credentials))
    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(
            _on_event(kind, enqueue)
        )
    everywhere = list(namespaces) == [""]
    older = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_settings(kinds),
        identity=IDENTITY,
        standalone=True,
        clusterwide=everywhere,
        namespaces=[] if everywhere else list(namespaces),
        ready_flag=ready,
    )
    await _until_one_ends(tasks, asyncio.create_task(kopf.run_tasks(tasks, ignored=older), name="kopf"))


async def _until_one_ends(tasks: Collection[asyncio.Task[Any]], whole: asyncio.Task[None]) -> None:
    """Waits until `whole` or one of its `tasks` ends. `whole` should end with them, but it hangs if a watch is just
    being requested (kopf's stream() cannot cancel that), and the process would run without watches."""
    try:
        ended, _ = await asyncio.wait([whole, *tasks], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([whole], timeout=KOPF_SECONDS)
    except asyncio.CancelledError:
        whole.cancel()
        await asyncio.wait([whole])
        raise
    whole.cancel()
    for task in {whole, *ended}:
        if task.done() and not task.cancelled():
            task.result()


def _settings(kinds: Sequence[Watched[Any]]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.process.ultimate_exiting_timeout = None
    settings.execution.max_workers = 1
    settings.networking.enforce_retry_after = True
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.chunk_size = PAGE_SIZE
    for kind in kinds:
        if kind.label_selector:  # set single items: replacing the mapping would end every watch
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.label_selector
    return settings


def _login(credentials: Credentials) -> Callable[..., Any]:
    """kopf's login handler: kopf has its own session and calls this again after a 401."""

    async def login(**_: Any) -> kopf.ConnectionInfo:
        certificate, key = credentials.client_certificate or (None, None)
        return kopf.ConnectionInfo(
            server=credentials.server,
            ca_path=credentials.authority,
            insecure=not credentials.configuration.verify_ssl,
            scheme="Bearer" if credentials.token else None,
            token=credentials.token or None,
            certificate_path=certificate,
            private_key_path=key,
        )

    return login


def _on_event(kind: Watched[Any], enqueue: Callable[[Key], None]) -> Callable[..., Any]:
    async def on_event(event: Any, **_: Any) -> None:
        seen = kind.project(event["object"])
        keep = kind.remove if event["type"] == "DELETED" else kind.put
        for key in keep(seen):
            enqueue(key)
        kind.table.delivered(seen)

    return on_event
