"""kopf handlers: watches that update the store. kopf decides and writes nothing here.

kopf is imported with this module, before the event loop runs: it takes a second, which a running loop would feel.
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
"""of one watch request; the API server ends them between 5 and 10 minutes otherwise"""
IDLE_SECONDS = 0.2
"""until the task that kopf keeps for each object ends; at its default of 5 s a relist of thousands fills the memory"""

KOPF_SECONDS = 2.0
"""for kopf to end its tasks"""

Heard = Callable[[str], None]
"""is told the plural of the kind that an event came of"""

IDENTITY: Any = "spillway-operator"
"""for kopf's peering, which is not used; without it kopf asks for the user's name, and a pod's uid has none"""


async def watch(
    kinds: Sequence[Watched[Any]],
    credentials: Credentials,
    namespaces: Sequence[str],
    enqueue: Callable[[Key], None],
    heard: Heard,
    ready: asyncio.Event,
) -> None:
    """Feed the store from watches, for ever; `ready` is set once kopf runs. Raises what ends kopf."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(credentials))
    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(
            _on_event(kind, enqueue, heard)
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
    """As `whole` ends, which ends all others when one of its `tasks` does; but it waits for ever for a watch that is
    being asked for just then (kopf's stream() cannot cancel that request), and we would be alive and deaf."""
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
        if kind.label_selector:  # by item: another mapping in its place would end every watch
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.label_selector
    return settings


def _login(credentials: Credentials) -> Callable[..., Any]:
    """kopf asks again when the API server answers 401, and has a session of its own."""

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


def _on_event(kind: Watched[Any], enqueue: Callable[[Key], None], heard: Heard) -> Callable[..., Any]:
    async def on_event(event: Any, **_: Any) -> None:
        heard(kind.plural)
        keep = kind.remove if event["type"] == "DELETED" else kind.put
        for key in keep(kind.project(event["object"])):
            enqueue(key)

    return on_event
