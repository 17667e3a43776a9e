"""MetricsSource: reads live memory of nodes in the background; decisions use the last snapshot.

    Prometheus   instant queries every interval
    Scrape       without Prometheus: /metrics of our node exporters (scrape_targets.py)

Both answer the questions of placement.node_signals: free device, host and NVMe bytes, and stalled memory. Reading never
raises into the caller, and nothing waits for it: after a failure the last snapshot remains, with its age and the
problem. A series belongs to the node that its scrape target names, never to one named in a payload. Figures that are
not byte counts are ignored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from spillway.api.progress import MAX_BYTES
from spillway.metrics import NODE_DEVICE_FREE, NODE_DISK_FREE, NODE_MEMORY_AVAILABLE, NODE_MEMORY_STALLED
from spillway.placement.node_signals import (
    HOST_SERIES,
    MOUNT_POINTS,
    OLDEST_SAMPLE_SECONDS,
    device_free_bytes,
    disk_free_bytes,
    host_free_bytes,
    memory_stalled,
)
from spillway.placement.place import LiveBytes
from spillway.units import MIB, format_seconds

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
LONGEST_ANSWER = 16 * MIB
LONGEST_PAGE = MIB
NUM_SCRAPES = 16
"""Pods that are scraped at the same time."""
FORGET_SECONDS = 600.0
"""Figures older than this are not used."""

Labels = Mapping[str, str]
Figure = TypeVar("Figure", int, float)
Samples = list[tuple[Labels, Figure]]


@dataclass(frozen=True, slots=True)
class Access:
    """How to query a Prometheus."""

    url: str = ""
    """Empty: there is no Prometheus."""
    matchers: tuple[str, ...] = ()
    """Further label matchers of every series, such as cluster="a"."""
    token_file: Path | None = None
    """Bearer token; read for each request, because it is replaced."""
    ca_file: Path | None = None
    """Authorities that are trusted instead of the system's."""


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """One of our node exporters."""

    node: str
    url: str
    """URL of its /metrics."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The last known figures and their age."""

    nodes: Mapping[str, LiveBytes] = field(default_factory=lambda: MappingProxyType({}))
    """Node -> its live figures."""
    taken_at: float | None = None
    """Monotonic seconds of the last complete reading; None = none yet."""
    age_seconds: float | None = None
    problem: str = ""
    """Why the last reading failed; empty = no problem."""
    source: str = ""
    """Prometheus, Scrape, or empty if nothing is configured."""


class _Unreadable(Exception):
    """A reading failed; the message is the snapshot's problem."""


NO_PROMETHEUS = Access()


class MetricsSource:
    """Reads in the background (`run`), answers at once (`snapshot`)."""

    def __init__(
        self,
        prometheus: Access = NO_PROMETHEUS,
        interval_seconds: float = 15.0,
        targets: Callable[[], Awaitable[Sequence[ScrapeTarget]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets` finds the pods to scrape; it is asked only when there is no Prometheus."""
        self._prometheus = prometheus
        self._interval = interval_seconds
        self._targets = targets
        self._clock = clock
        self._pages: dict[str, list[NodePage]] = {}
        """Node -> its pages of the last two minutes."""
        self._num_silent = 0
        source = "Prometheus" if prometheus.url else "Scrape" if targets is not None else ""
        self._last = MetricsSnapshot(source=source, problem="no reading yet" if source else "")

    @property
    def is_configured(self) -> bool:
        return bool(self._last.source)

    def snapshot(self, now: float | None = None) -> MetricsSnapshot:
        """The figures as of monotonic time `now`; mappings are the same objects until a new reading."""
        last = self._last
        if last.taken_at is None:
            return last
        age = max(0.0, (self._clock() if now is None else now) - last.taken_at)
        if age > FORGET_SECONDS:
            return replace(MetricsSnapshot(source=last.source), problem=last.problem, age_seconds=age)
        return replace(last, age_seconds=age)

    async def run(self) -> None:
        """Reads endlessly; returns at once if nothing is configured."""
        if not self.is_configured:
            return
        timeout = aiohttp.ClientTimeout(total=min(TIMEOUT_SECONDS, max(1.0, self._interval)))
        ca_file = self._prometheus.ca_file
        trusted = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                await self.read(session)
                await asyncio.sleep(self._interval)

    async def read(self, session: aiohttp.ClientSession) -> None:
        """Reads once; an error becomes the snapshot's problem."""
        try:
            self._last = await self._reading(session)
        except _Unreadable as error:
            self._fail(str(error))
        except Exception as error:  # this background task must continue
            logger.exception("reading metrics failed")
            self._fail(f"reading metrics failed: {type(error).__name__}: {error}")

    def _fail(self, problem: str) -> None:
        if problem != self._last.problem:
            logger.warning("no new metrics: %s", problem)
        self._last = replace(self._last, problem=problem)

    async def _reading(self, session: aiohttp.ClientSession) -> MetricsSnapshot:
        started, problem = self._clock(), ""
        if self._prometheus.url:
            nodes = await read_prometheus(session, self._prometheus)
            if not nodes:
                series = f"{NODE_MEMORY_AVAILABLE.name} or {HOST_SERIES}"
                problem = f"{_place(self._prometheus.url)} has no series {series} with the label node"
        else:
            assert self._targets is not None
            nodes = await self._scraped(session, await self._targets(), started)
        return MetricsSnapshot(
            nodes=MappingProxyType(nodes), taken_at=started, problem=problem, source=self._last.source
        )

    async def _scraped(
        self, session: aiohttp.ClientSession, targets: Sequence[ScrapeTarget], now: float
    ) -> dict[str, LiveBytes]:
        """Live bytes of the nodes whose exporter answered within the last two minutes, as Prometheus would give
        them."""
        pages, problems = await scrape(session, targets)
        for node, page in pages.items():
            self._pages.setdefault(node, []).append(replace(page, taken_at=now))
        oldest = now - OLDEST_SAMPLE_SECONDS
        recent = {node: [page for page in known if page.taken_at >= oldest] for node, known in self._pages.items()}
        self._pages = {node: known for node, known in recent.items() if known}
        if not pages:
            raise _Unreadable(problems[0] if problems else "no node exporter runs in the operator's namespace")
        if problems and len(problems) != self._num_silent:
            logger.warning("%d node exporters do not answer; one is %s", len(problems), problems[0])
        self._num_silent = len(problems)
        return {
            node: live
            for node, known in self._pages.items()
            for live in _live_bytes(*known[-1].free, _stalled_share(node, known)).values()
        }


# --- Prometheus -------------------------------------------------------------------------------------------------------


BYTE_QUESTIONS = (host_free_bytes, device_free_bytes, disk_free_bytes)
QUESTIONS = (*BYTE_QUESTIONS, memory_stalled)


async def read_prometheus(session: aiohttp.ClientSession, prometheus: Access) -> dict[str, LiveBytes]:
    """Node -> its live figures."""
    queries = [question(*prometheus.matchers) for question in BYTE_QUESTIONS]
    (host, device, disks), stalled = await asyncio.gather(
        asyncio.gather(*(_query(session, prometheus, query, byte_count) for query in queries)),
        _query(session, prometheus, memory_stalled(*prometheus.matchers), time_share),
    )
    return _live_bytes(host, device, disks, stalled)


async def _query(
    session: aiohttp.ClientSession, prometheus: Access, query: str, figure: Callable[[object], Figure | None]
) -> Samples[Figure]:
    """An instant query's vector: labels and figures."""
    url = prometheus.url
    token = _token(prometheus.token_file)
    body = await _get(session, f"{url}/api/v1/query", LONGEST_ANSWER, {"query": query}, token)
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            raise _Unreadable(f"{_place(url)} rejected a query: {str(answer.get('error', ''))[:200]}")
        samples = list(_samples(answer["data"]["result"], figure))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unreadable(f"{_place(url)} is not a Prometheus server: {body[:60]!r}") from error
    now = time.time()
    age = max((now - evaluated for evaluated, _, _ in samples), default=0.0)
    if age > OLDEST_SAMPLE_SECONDS:
        raise _Unreadable(
            f"{_place(url)} answers with data from {format_seconds(round(age))} ago; check the clock of this server"
        )
    return [(labels, found) for _, labels, found in samples]


def _samples(
    result: Iterable[Mapping[str, object]], figure: Callable[[object], Figure | None]
) -> Iterator[tuple[float, Labels, Figure]]:
    """Yields evaluation time (Unix seconds), labels and figure of each series with a valid figure."""
    for series in result:
        labels, value = series["metric"], series["value"]
        if not isinstance(labels, Mapping):
            raise TypeError("a series without labels")
        if not isinstance(value, Sequence) or len(value) < 2:
            continue
        evaluated, found = _number(value[0]), figure(value[1])
        if evaluated is not None and found is not None:
            yield evaluated, {str(name): str(text) for name, text in labels.items()}, found


def _number(value: object) -> float | None:
    """A number of zero or more; else None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if number >= 0.0 else None


def byte_count(value: object) -> int | None:
    """Bytes of a sample, at most MAX_BYTES; None if it is not a byte count."""
    number = _number(value)
    return None if number is None else int(min(number, MAX_BYTES))


def time_share(value: object) -> float | None:
    """Share of time of a sample, at most 1; None if it is not one."""
    number = _number(value)
    return None if number is None else min(number, 1.0)


def _live_bytes(
    host: Samples[int], device: Samples[int], disks: Samples[int], stalled: Samples[float]
) -> dict[str, LiveBytes]:
    hosts, stalls = _by_node(host), _by_node(stalled)
    devices: dict[str, list[int]] = {}
    for labels, free in device:
        devices.setdefault(labels.get("node", ""), []).append(free)
    mounts: dict[str, dict[str, int]] = {}
    volumes: dict[str, dict[str, int]] = {}
    for labels, free in disks:
        node, storage_class = labels.get("node", ""), labels.get("storage_class", "")
        if storage_class:
            of_class = volumes.setdefault(node, {})
            of_class[storage_class] = max(free, of_class.get(storage_class, 0))  # a volume lies on one of the drives
        else:
            mounts.setdefault(node, {})[labels.get("mountpoint", "")] = free
    return {
        node: LiveBytes(
            devices=tuple(devices.get(node, ())),
            host=hosts.get(node),
            nvme=_spill_room(mounts.get(node, {})),
            memory_stalled=stalls.get(node),
            volumes=volumes.get(node, {}),
        )
        for node in {**hosts, **devices, **mounts, **volumes, **stalls}
        if node
    }


def _by_node(samples: Samples[Figure]) -> dict[str, Figure]:
    return {labels["node"]: found for labels, found in samples if "node" in labels}


def _spill_room(mounts: Mapping[str, int]) -> int | None:
    return next((mounts[mount] for mount in MOUNT_POINTS if mount in mounts), None)


# --- without Prometheus -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodePage:
    """The figures of one scrape of a node exporter."""

    free: tuple[Samples[int], Samples[int], Samples[int]]
    """Free bytes of host memory, devices and disks, with labels."""
    stalled_seconds: float | None
    """Seconds in which memory stalled, since the node's boot."""
    taken_at: float = 0.0


async def scrape(
    session: aiohttp.ClientSession, targets: Sequence[ScrapeTarget]
) -> tuple[dict[str, NodePage], list[str]]:
    """The page of each node whose exporter answered, and a message about each that did not."""
    limit = asyncio.Semaphore(NUM_SCRAPES)

    async def read(target: ScrapeTarget) -> NodePage | str:
        async with limit:
            try:
                return node_page(await _get(session, target.url, LONGEST_PAGE), target.node)
            except _Unreadable as error:
                return f"the node exporter of {target.node}: {error}"

    answers = await asyncio.gather(*(read(target) for target in targets))
    pages = {target.node: page for target, page in zip(targets, answers, strict=True) if isinstance(page, NodePage)}
    return pages, [answer for answer in answers if isinstance(answer, str)]


def node_page(page: bytes, node: str) -> NodePage:
    """The figures of a node exporter's page; all of them are of its target's node."""
    found: dict[str, Samples[float]] = {}
    try:
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(({**sample.labels, "node": node}, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise _Unreadable(f"the answer is not a page of Prometheus metrics: {page[:60]!r}") from error
    host, devices, disks = (
        [(labels, free) for labels, value in found.get(metric.name, ()) if (free := byte_count(value)) is not None]
        for metric in (NODE_MEMORY_AVAILABLE, NODE_DEVICE_FREE, NODE_DISK_FREE)
    )
    stalled = found.get(NODE_MEMORY_STALLED.name)
    return NodePage((host, devices, disks), _number(stalled[0][1]) if stalled else None)


def _stalled_share(node: str, pages: Sequence[NodePage]) -> Samples[float]:
    """Share of the time between the first and the last page; empty if it is not known, as after a boot in between."""
    first, last = pages[0], pages[-1]
    if first.stalled_seconds is None or last.stalled_seconds is None or last.taken_at <= first.taken_at:
        return []
    share = time_share((last.stalled_seconds - first.stalled_seconds) / (last.taken_at - first.taken_at))
    return [] if share is None else [({"node": node}, share)]


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _token(file: Path | None) -> str:
    """The token to send; empty: none. Raises _Unreadable if the file cannot be read."""
    try:
        return "" if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _Unreadable(f"the token for Prometheus cannot be read: {error}") from error


async def _get(
    session: aiohttp.ClientSession, url: str, longest: int, query: Mapping[str, str] | None = None, token: str = ""
) -> bytes:
    """The body of a 200 response. Raises _Unreadable for everything else."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, params=query, headers=headers, allow_redirects=False) as response:
            body = await _bounded(response, longest)
            if response.status != 200:
                raise _Unreadable(f"{_place(url)} answers {response.status}: {body[:200].decode(errors='replace')}")
            return body
    except TimeoutError as error:
        raise _Unreadable(f"{_place(url)} does not answer in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _Unreadable(f"{_place(url)} does not answer: {str(error)[:200] or type(error).__name__}") from error


async def _bounded(response: aiohttp.ClientResponse, longest: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > longest:
            raise _Unreadable(f"{_place(str(response.url))} answers with more than {longest // MIB} MiB")
    return bytes(body)


def _place(url: str) -> str:
    """Host and port, without credentials in the URL."""
    return urlsplit(url).netloc.rpartition("@")[2]
