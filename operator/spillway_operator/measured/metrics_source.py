"""MetricsSource: reads live memory of nodes and our pods in the background; decisions use the last snapshot.

    Prometheus   instant queries every interval: free device, host and NVMe bytes and stalled memory per node, tier
                 bytes per trainer pod
    Scrape       without Prometheus: /metrics of our own pods; a node's free host memory is its allocatable memory minus
                 what they hold there (cluster.py), and other tiers have no figures

Reading never raises into the caller, and nothing waits for it: after a failure the last snapshot remains, with its age
and the problem. A series belongs to the node or pod that its scrape target names, never to one named in a payload.
Figures that are not byte counts are ignored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from spillway.api.progress import MAX_BYTES, TierFigures
from spillway.metrics import TIER_BYTES
from spillway.placement.node_signals import (
    DEVICE_FREE_MEBIBYTES,
    DEVICE_SERIES,
    DISK_FREE_BYTES,
    DISK_SERIES,
    HOST_FREE_BYTES,
    HOST_SERIES,
    MEMORY_STALLED,
    MOUNT_POINTS,
    OLDEST_SAMPLE_SECONDS,
    STALLED_SERIES,
    recent,
)
from spillway.placement.place import LiveBytes
from spillway.plan import Tier
from spillway.units import MIB, format_seconds

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
LONGEST_ANSWER = 16 * MIB
LONGEST_PAGE = MIB
NUM_SCRAPES = 16
"""Pods that are scraped at the same time."""
FORGET_SECONDS = 600.0
"""Older figures are not used."""

PodKey = tuple[str, str]
"""Namespace and name."""
Labels = Mapping[str, str]
Figure = TypeVar("Figure")


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """One of our trainer pods."""

    namespace: str
    pod: str
    url: str
    """URL of its /metrics."""
    node: str = ""
    device_is_host_memory: bool = True
    """The pod has no discrete device, so its device tier is host memory, too."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The last known figures and their age."""

    nodes: Mapping[str, LiveBytes] = field(default_factory=lambda: MappingProxyType({}))
    """Free bytes."""
    pods: Mapping[PodKey, TierFigures] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes held per tier, summed over the pod's ranks."""
    held_host_bytes: Mapping[str, int] | None = None
    """Node -> host memory that our pods hold there; None if Prometheus reports free memory."""
    taken_at: float | None = None
    """Monotonic seconds of the last complete reading; None = none yet."""
    age_seconds: float | None = None
    problem: str = ""
    """Why the last reading failed or was incomplete; empty = no problem."""
    source: str = ""
    """Prometheus, Scrape, or empty if nothing is configured."""


class _Unreadable(Exception):
    """A reading failed; the message is the snapshot's problem."""


class MetricsSource:
    """Reads in the background (`run`), answers at once (`snapshot`)."""

    def __init__(
        self,
        prometheus_url: str = "",
        interval_seconds: float = 15.0,
        targets: Callable[[], Awaitable[Sequence[ScrapeTarget]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets` finds the pods to scrape; it is asked only when there is no `prometheus_url`."""
        self._url = prometheus_url.rstrip("/")
        self._interval = interval_seconds
        self._targets = targets
        self._clock = clock
        source = "Prometheus" if self._url else "Scrape" if targets is not None else ""
        self._last = MetricsSnapshot(source=source, problem="no reading yet" if source else "")

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
        if not self._last.source:
            return
        timeout = aiohttp.ClientTimeout(total=min(TIMEOUT_SECONDS, max(1.0, self._interval)))
        async with aiohttp.ClientSession(timeout=timeout) as session:
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
        started, held = self._clock(), None
        if self._url:
            nodes, pods = await read_prometheus(session, self._url)
            problem = "" if nodes else f"{_place(self._url)} has no series {HOST_SERIES} with the label node"
        else:
            assert self._targets is not None
            nodes, targets = {}, await self._targets()
            pods, problem = await scrape(session, targets)
            held = MappingProxyType(held_per_node(targets, pods))
        return MetricsSnapshot(
            nodes=MappingProxyType(nodes),
            pods=MappingProxyType(pods),
            held_host_bytes=held,
            taken_at=started,
            problem=problem,
            source=self._last.source,
        )


# --- Prometheus -------------------------------------------------------------------------------------------------------


_PODS = f'{TIER_BYTES.name}{{namespace!="",pod!=""}}'
BYTE_QUERIES = (
    HOST_FREE_BYTES,
    DEVICE_FREE_MEBIBYTES,
    DISK_FREE_BYTES,
    f"sum by (namespace, pod, tier) ({recent(_PODS)})",
)
QUERIES = (*BYTE_QUERIES, MEMORY_STALLED)


async def read_prometheus(
    session: aiohttp.ClientSession, url: str
) -> tuple[dict[str, LiveBytes], dict[PodKey, TierFigures]]:
    """Free bytes of the nodes, and bytes held by the trainer pods."""
    (host, device, disks, pods), stalled = await asyncio.gather(
        asyncio.gather(*(_query(session, url, query, byte_count) for query in BYTE_QUERIES)),
        _query(session, url, MEMORY_STALLED, time_share),
    )
    return _live_bytes(host, device, disks, stalled), _pod_figures(pods)


async def _query(
    session: aiohttp.ClientSession, url: str, query: str, figure: Callable[[object], Figure | None]
) -> list[tuple[Labels, Figure]]:
    """An instant query's vector: labels and figures."""
    body = await _get(session, f"{url}/api/v1/query", LONGEST_ANSWER, {"query": query})
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
        raise _Unreadable(f"{_place(url)} answers with data of {format_seconds(round(age))} ago; check its clock")
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
    host: Iterable[tuple[Labels, int]],
    device: Iterable[tuple[Labels, int]],
    disks: Iterable[tuple[Labels, int]],
    stalled: Iterable[tuple[Labels, float]],
) -> dict[str, LiveBytes]:
    hosts, stalls = _by_node(host), _by_node(stalled)
    devices: dict[str, list[int]] = {}
    for labels, free in device:
        devices.setdefault(labels.get("node", ""), []).append(min(free * MIB, MAX_BYTES))
    devices.pop("", None)
    mounts: dict[str, dict[str, int]] = {}
    for labels, free in disks:
        if "node" in labels:
            mounts.setdefault(labels["node"], {})[labels.get("mountpoint", "")] = free
    return {
        node: _live(devices.get(node, []), hosts.get(node), _spill_room(mounts.get(node, {})), stalls.get(node))
        for node in {**hosts, **devices, **mounts, **stalls}
    }


def _by_node(samples: Iterable[tuple[Labels, Figure]]) -> dict[str, Figure]:
    return {labels["node"]: found for labels, found in samples if "node" in labels}


def _live(devices: Sequence[int], host: int | None, nvme: int | None, stalled: float | None) -> LiveBytes:
    found = ((DEVICE_SERIES, devices or None), (HOST_SERIES, host), (DISK_SERIES, nvme), (STALLED_SERIES, stalled))
    sources = tuple(series for series, figure in found if figure is not None)
    return LiveBytes(tuple(devices), host, nvme, sources, memory_stalled=stalled)


def _spill_room(mounts: Mapping[str, int]) -> int | None:
    return next((mounts[mount] for mount in MOUNT_POINTS if mount in mounts), None)


def _pod_figures(samples: Iterable[tuple[Labels, int]]) -> dict[PodKey, TierFigures]:
    held: dict[PodKey, dict[str, int]] = {}
    for labels, num_bytes in samples:
        key, tier = (labels.get("namespace", ""), labels.get("pod", "")), labels.get("tier", "")
        if all(key) and tier in set(Tier):
            held.setdefault(key, {})[tier] = num_bytes
    return {key: TierFigures.model_validate(tiers) for key, tiers in held.items()}


# --- without Prometheus -----------------------------------------------------------------------------------------------


async def scrape(
    session: aiohttp.ClientSession, targets: Sequence[ScrapeTarget]
) -> tuple[dict[PodKey, TierFigures], str]:
    """Bytes held by each pod that answered, and a message about those that did not."""
    limit = asyncio.Semaphore(NUM_SCRAPES)

    async def read(target: ScrapeTarget) -> TierFigures | str:
        async with limit:
            try:
                return held_bytes(await _get(session, target.url, LONGEST_PAGE))
            except _Unreadable as error:
                return f"pod {target.namespace}/{target.pod}: {error}"

    answers = await asyncio.gather(*(read(target) for target in targets))
    found = {
        (target.namespace, target.pod): answer
        for target, answer in zip(targets, answers, strict=True)
        if isinstance(answer, TierFigures)
    }
    problems = [answer for answer in answers if isinstance(answer, str)]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return found, problems[0] + more if problems else ""


def held_per_node(targets: Iterable[ScrapeTarget], pods: Mapping[PodKey, TierFigures]) -> dict[str, int]:
    """Node -> host memory that the scraped pods hold there."""
    held: dict[str, int] = {}
    for target in targets:
        figures = pods.get((target.namespace, target.pod))
        if figures is not None and target.node:
            num_bytes = figures.host + (figures.device if target.device_is_host_memory else 0)
            held[target.node] = held.get(target.node, 0) + num_bytes
    return held


def held_bytes(page: bytes) -> TierFigures:
    """Bytes per tier on a trainer's /metrics page, summed over ranks."""
    held = dict.fromkeys((tier.value for tier in Tier), 0)
    try:
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples if family.name == TIER_BYTES.name else ():
                tier, num_bytes = sample.labels.get("tier", ""), byte_count(sample.value)
                if tier in held and num_bytes is not None:
                    held[tier] = min(held[tier] + num_bytes, MAX_BYTES)
    except (ValueError, KeyError, IndexError) as error:
        raise _Unreadable(f"not a page of metrics: {page[:60]!r}") from error
    return TierFigures.model_validate(held)


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def _get(session: aiohttp.ClientSession, url: str, longest: int, query: Mapping[str, str] | None = None) -> bytes:
    """The body of a 200 response. Raises _Unreadable for everything else."""
    try:
        async with session.get(url, params=query, allow_redirects=False) as response:
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
