"""Metrics are read in the background, believed within bounds, and never stand in the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from harness.patience import HANG_SECONDS, until
from spillway.api.progress import MAX_BYTES, TierFigures
from spillway.placement.place import LiveBytes
from spillway.units import GIB, MIB
from spillway_operator.measured import metrics_source
from spillway_operator.measured.metrics_source import MetricsSnapshot, MetricsSource, ScrapeTarget, byte_count
from spillway_operator.measured.scrape_targets import target_of

Series = tuple[dict[str, str], str]


class FakePrometheus:
    """Answers instant queries with what a test put there, by the series that a query names."""

    def __init__(self) -> None:
        self.series: dict[str, list[Series]] = {}
        self.queries: list[str] = []
        self.raw: bytes | None = None
        """sent instead of an answer"""
        self.status = 200
        self.answers = asyncio.Event()
        self.answers.set()
        self.seconds_ago = 0.0
        """when it evaluated what it answers"""

    def stalled(self, name: str, share: str) -> None:
        self.series.setdefault("node_pressure_memory_stalled_seconds_total", []).append(({"node": name}, share))

    def node(self, name: str, host: float | str, device: float | None = None, **mounts: float) -> None:
        """Free GiB; device in GiB, too."""
        shown = host if isinstance(host, str) else str(host * GIB)
        self.series.setdefault("node_memory_MemAvailable_bytes", []).append(({"node": name}, shown))
        if device is not None:
            self.series.setdefault("DCGM_FI_DEV_FB_FREE", []).append(({"node": name}, str(device * 1024)))
        for mount, free in mounts.items():
            labels = {"node": name, "mountpoint": {"root": "/", "kubelet": "/var/lib/kubelet"}[mount]}
            self.series.setdefault("node_filesystem_avail_bytes", []).append((labels, str(free * GIB)))

    def pod(self, namespace: str, name: str, **tiers: int) -> None:
        for tier, held in tiers.items():
            labels = {"namespace": namespace, "pod": name, "tier": tier}
            self.series.setdefault("spillway_tier_bytes", []).append((labels, str(held)))

    async def answer(self, request: web.Request) -> web.Response:
        query = request.query["query"]
        self.queries.append(query)
        await self.answers.wait()
        if self.raw is not None:
            return web.Response(body=self.raw, status=self.status)
        found = [series for name, of_name in self.series.items() if name in query for series in of_name]
        evaluated = time.time() - self.seconds_ago
        result = [{"metric": labels, "value": [evaluated, value]} for labels, value in found]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def prometheus() -> FakePrometheus:
    return FakePrometheus()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Step = Callable[[MetricsSource, aiohttp.ClientSession], Awaitable[None]]


def with_source(prometheus: FakePrometheus, clock: Clock, *steps: Step) -> MetricsSource:
    """A source that reads from the fake; each step runs after a reading."""

    async def run() -> MetricsSource:
        application = web.Application()
        application.router.add_get("/api/v1/query", prometheus.answer)
        async with TestServer(application) as server, aiohttp.ClientSession() as session:
            source = MetricsSource(str(server.make_url("")), 15.0, clock=clock)
            await source.read(session)
            for step in steps:
                await step(source, session)
            return source

    return asyncio.run(run())


def snapshot(prometheus: FakePrometheus, clock: Clock) -> MetricsSnapshot:
    return with_source(prometheus, clock).snapshot()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_free_bytes_of_a_node_come_with_the_names_of_their_series(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 12.5, device=70.0, root=5.0, kubelet=90.0)
    found = snapshot(prometheus, clock)
    assert found.nodes["node-a"] == LiveBytes(
        devices=(70 * GIB,),
        host=int(12.5 * GIB),
        nvme=90 * GIB,
        sources=("DCGM_FI_DEV_FB_FREE", "node_memory_MemAvailable_bytes", "node_filesystem_avail_bytes"),
    )
    assert (found.source, found.problem, found.age_seconds) == ("Prometheus", "", 0.0)


def test_a_node_without_a_file_system_of_its_own_for_pods_has_the_root(
    prometheus: FakePrometheus, clock: Clock
) -> None:
    prometheus.node("node-a", 1.0, root=5.0)
    assert snapshot(prometheus, clock).nodes["node-a"].nvme == 5 * GIB


def test_pods_have_the_bytes_that_they_hold(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 1.0)
    prometheus.pod("team", "demo-1-0-x", device=5, host=6, nvme=7)
    assert snapshot(prometheus, clock).pods == {("team", "demo-1-0-x"): TierFigures(device=5, host=6, nvme=7)}


def test_a_tier_that_does_not_exist_is_left_aside(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 1.0)
    prometheus.pod("team", "demo", device=5, tape=6)
    prometheus.pod("team", "other", tape=6)
    assert snapshot(prometheus, clock).pods == {("team", "demo"): TierFigures(device=5)}


@pytest.mark.parametrize(
    ("share", "expected"),
    [("0", 0.0), ("0.0621", 0.0621), ("1.004", 1.0), ("+Inf", 1.0), ("NaN", None), ("-0.1", None), ("often", None)],
)
def test_how_long_a_nodes_memory_stalled_is_a_share_of_the_time_or_unknown(
    prometheus: FakePrometheus, clock: Clock, share: str, expected: float | None
) -> None:
    prometheus.node("node-a", 1.0)
    prometheus.stalled("node-a", share)
    found = snapshot(prometheus, clock).nodes["node-a"]
    assert found.memory_stalled == expected
    assert ("node_pressure_memory_stalled_seconds_total" in found.sources) is (expected is not None)


def test_a_node_of_which_only_its_stalls_are_known_is_known(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.stalled("node-a", "0.5")
    assert snapshot(prometheus, clock).nodes["node-a"].memory_stalled == 0.5


def test_old_samples_are_left_out_by_every_query(prometheus: FakePrometheus, clock: Clock) -> None:
    """Prometheus would answer with a sample of five minutes ago as if it were of now."""
    snapshot(prometheus, clock)
    assert len(prometheus.queries) == len(metrics_source.QUERIES)
    for query in prometheus.queries:
        assert f"< {metrics_source.OLDEST_SAMPLE_SECONDS}" in query
        assert "time() - timestamp(" in query


def test_of_several_series_of_one_node_the_worst_counts() -> None:
    """So that a series too many can make a node less attractive, never more."""
    *free, stalled = [query for query in metrics_source.QUERIES if "by (node" in query]
    assert len(free) == 3
    assert all(query.startswith("min by (node") for query in free)
    assert "node_pressure_memory_stalled_seconds_total" in stalled
    assert stalled.startswith("max by (node)")


# --- garbage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0),
        ("12.9", 12),
        ("1e300", MAX_BYTES),
        ("+Inf", MAX_BYTES),
        ("-1", None),
        ("-Inf", None),
        ("NaN", None),
        ("many", None),
        (None, None),
        ([], None),
    ],
)
def test_a_figure_is_a_byte_count_within_bounds_or_no_figure(value: object, expected: int | None) -> None:
    assert byte_count(value) == expected


def test_a_node_with_a_garbage_figure_has_none(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", "NaN", root=5.0)
    prometheus.node("node-b", 3.0)
    found = snapshot(prometheus, clock).nodes
    assert found["node-a"] == LiveBytes((), None, 5 * GIB, ("node_filesystem_avail_bytes",))
    assert found["node-b"].host == 3 * GIB


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"status": "success"}',
        b'{"status": "success", "data": {"result": [1]}}',
        b'{"status": "success", "data": {"result": [{"metric": 3, "value": [1, "2"]}]}}',
        b'{"status": "success", "data": {"result": [{"metric": {}}]}}',
        b'{"status": "success", "data": {"result": {"metric": {}}}}',
        b"[" * 100_000,
    ],
)
def test_an_answer_of_another_kind_is_a_problem_and_no_figures(
    prometheus: FakePrometheus, clock: Clock, raw: bytes
) -> None:
    prometheus.raw = raw
    found = snapshot(prometheus, clock)
    assert "is not a Prometheus server" in found.problem
    assert (found.nodes, found.pods, found.age_seconds) == ({}, {}, None)


def test_values_of_another_form_are_no_figures(prometheus: FakePrometheus, clock: Clock) -> None:
    forms: list[Any] = ["x", [], [1], 5, None]
    forms += [[None, "5"], ["soon", "5"]]
    result = [{"metric": {"node": "node-a"}, "value": value} for value in forms]
    prometheus.raw = json.dumps({"status": "success", "data": {"result": result}}).encode()
    assert snapshot(prometheus, clock).nodes == {}


def test_labels_of_another_form_are_no_node(prometheus: FakePrometheus, clock: Clock) -> None:
    result = [{"metric": {"node": ["node-a"]}, "value": [time.time(), "5"]}]
    prometheus.raw = json.dumps({"status": "success", "data": {"result": result}}).encode()
    assert "node-a" not in snapshot(prometheus, clock).nodes


def test_a_refused_query_says_what_prometheus_said(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.raw = b'{"status": "error", "error": "parse error: unexpected end"}'
    assert "rejected a query: parse error: unexpected end" in snapshot(prometheus, clock).problem


def test_an_error_status_is_said(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.raw, prometheus.status = b"overloaded", 503
    assert "answers 503: overloaded" in snapshot(prometheus, clock).problem


def test_a_huge_answer_is_not_read_to_its_end(
    prometheus: FakePrometheus, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_source, "LONGEST_ANSWER", MIB)
    prometheus.raw = b" " * (3 * MIB)
    assert "answers with more than 1 MiB" in snapshot(prometheus, clock).problem


def test_a_prometheus_without_our_series_is_a_problem(prometheus: FakePrometheus, clock: Clock) -> None:
    found = snapshot(prometheus, clock)
    assert "has no series node_memory_MemAvailable_bytes with the label node" in found.problem
    assert found.age_seconds == 0.0


# --- outages ----------------------------------------------------------------------------------------------------------


def test_an_outage_leaves_the_last_figures_which_grow_older(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 12.5)

    async def outage(source: MetricsSource, session: aiohttp.ClientSession) -> None:
        prometheus.raw, prometheus.status = b"", 500
        clock.now += 42.0
        await source.read(session)

    found = with_source(prometheus, clock, outage).snapshot()
    assert found.nodes["node-a"].host == int(12.5 * GIB)
    assert found.age_seconds == 42.0
    assert "answers 500" in found.problem


def test_an_answer_of_ten_minutes_ago_is_no_reading(prometheus: FakePrometheus, clock: Clock) -> None:
    """As of a cache in between, or a Prometheus whose clock is wrong: its own filter of old samples cannot see it."""
    prometheus.node("node-a", 12.5)

    async def kept(source: MetricsSource, session: aiohttp.ClientSession) -> None:
        prometheus.seconds_ago = 600.0
        prometheus.series.clear()
        prometheus.node("node-a", 99.0)
        clock.now += 42.0
        await source.read(session)

    found = with_source(prometheus, clock, kept).snapshot()
    assert (found.nodes["node-a"].host, found.age_seconds) == (int(12.5 * GIB), 42.0)
    assert found.problem.endswith("answers with data of 10m00s ago; check its clock")


def test_an_answer_of_two_minutes_ago_is_one(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 12.5)
    prometheus.seconds_ago = metrics_source.OLDEST_SAMPLE_SECONDS - 10.0
    assert snapshot(prometheus, clock).problem == ""


def test_after_an_outage_figures_are_fresh_again(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.raw = b""

    async def back(source: MetricsSource, session: aiohttp.ClientSession) -> None:
        prometheus.raw = None
        prometheus.node("node-a", 2.0)
        clock.now += 60.0
        await source.read(session)

    found = with_source(prometheus, clock, back).snapshot()
    assert (found.problem, found.age_seconds, found.nodes["node-a"].host) == ("", 0.0, 2 * GIB)


def test_figures_are_given_up_after_ten_minutes(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 2.0)
    source = with_source(prometheus, clock)
    assert source.snapshot(clock.now + metrics_source.FORGET_SECONDS).nodes
    old = source.snapshot(clock.now + metrics_source.FORGET_SECONDS + 1.0)
    assert (old.nodes, old.pods) == ({}, {})
    assert old.age_seconds == metrics_source.FORGET_SECONDS + 1.0


def test_the_age_counts_from_before_the_questions(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 2.0)
    source = with_source(prometheus, clock)
    assert source.snapshot(clock.now + 7.5).age_seconds == 7.5
    assert source.snapshot(clock.now - 7.5).age_seconds == 0.0


def test_nobody_listening_is_a_problem_that_shows_no_credentials(clock: Clock, unused_tcp_port: int) -> None:
    async def run() -> MetricsSnapshot:
        source = MetricsSource(f"http://user:secret@127.0.0.1:{unused_tcp_port}", clock=clock)
        async with aiohttp.ClientSession() as session:
            await source.read(session)
        return source.snapshot()

    problem = asyncio.run(run()).problem
    assert problem.startswith(f"127.0.0.1:{unused_tcp_port} does not answer")
    assert "secret" not in problem


def test_a_prometheus_that_hangs_is_given_up(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.answers.clear()

    async def run() -> MetricsSnapshot:
        application = web.Application()
        application.router.add_get("/api/v1/query", prometheus.answer)
        timeout = aiohttp.ClientTimeout(total=0.1)
        async with TestServer(application) as server, aiohttp.ClientSession(timeout=timeout) as session:
            source = MetricsSource(str(server.make_url("")), clock=clock)
            async with asyncio.timeout(HANG_SECONDS):
                await source.read(session)
            prometheus.answers.set()
            return source.snapshot()

    assert "does not answer in time" in asyncio.run(run()).problem


def test_an_error_that_nobody_foresaw_is_a_problem_and_no_end(
    prometheus: FakePrometheus, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(metrics_source, "read_prometheus", broken)
    assert snapshot(prometheus, clock).problem == "reading metrics failed: RuntimeError: surprise"


def test_before_the_first_reading_there_is_nothing_and_it_is_said() -> None:
    found = MetricsSource("http://prometheus:9090").snapshot()
    assert (found.nodes, found.age_seconds, found.problem) == ({}, None, "no reading yet")


def test_without_anything_configured_nothing_is_read_and_nothing_is_wrong() -> None:
    source = MetricsSource()
    asyncio.run(source.run())
    assert source.snapshot() == MetricsSnapshot()


def test_mappings_stay_the_same_objects_until_a_new_reading(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 2.0)
    source = with_source(prometheus, clock)
    assert source.snapshot(clock.now + 1.0).nodes is source.snapshot(clock.now + 2.0).nodes


def test_it_reads_again_every_interval(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 2.0)

    async def run() -> None:
        application = web.Application()
        application.router.add_get("/api/v1/query", prometheus.answer)
        async with TestServer(application) as server:
            reading = asyncio.create_task(MetricsSource(str(server.make_url("")), 0.01, clock=clock).run())
            await until(lambda: len(prometheus.queries) >= 3 * len(metrics_source.QUERIES))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())


# --- without Prometheus -----------------------------------------------------------------------------------------------

PAGE = """\
# HELP spillway_tier_bytes Bytes held per memory tier.
# TYPE spillway_tier_bytes gauge
spillway_tier_bytes{training_job="demo",rank="0",tier="device"} 10.0
spillway_tier_bytes{training_job="demo",rank="1",tier="device"} 11.0
spillway_tier_bytes{training_job="demo",rank="0",tier="nvme",namespace="kube-system",pod="etcd"} 5.0
spillway_tier_bytes{training_job="demo",rank="0",tier="host"} NaN
"""


def found_at_once(targets: Sequence[ScrapeTarget]) -> Callable[[], Awaitable[Sequence[ScrapeTarget]]]:
    async def found() -> Sequence[ScrapeTarget]:
        return targets

    return found


def scraped(*pages: str | None) -> MetricsSnapshot:
    """After one reading of pods that answer with these pages; None = with an error."""

    async def run() -> MetricsSnapshot:
        async def answer(request: web.Request) -> web.Response:
            page = pages[int(request.match_info["number"])]
            return web.Response(text=page) if page is not None else web.Response(status=500)

        application = web.Application()
        application.router.add_get("/{number}/metrics", answer)
        async with TestServer(application) as server, aiohttp.ClientSession() as session:
            targets = [
                ScrapeTarget("team", f"demo-1-{number}", str(server.make_url(f"/{number}/metrics")), "node-a")
                for number in range(len(pages))
            ]
            source = MetricsSource(targets=found_at_once(targets))
            await source.read(session)
            return source.snapshot()

    return asyncio.run(run())


def test_pods_are_scraped_and_named_by_their_target_whatever_they_say() -> None:
    found = scraped(PAGE)
    assert found.pods == {("team", "demo-1-0"): TierFigures(device=21, nvme=5)}
    assert (found.source, found.problem, found.nodes) == ("Scrape", "", {})
    assert found.held_host_bytes == {"node-a": 21}, "on a CPU the device is host memory"


def test_a_pod_that_does_not_answer_does_not_hide_the_others() -> None:
    found = scraped(PAGE, None, "no page of metrics {{{")
    assert set(found.pods) == {("team", "demo-1-0")}
    assert found.problem.startswith("pod team/demo-1-1: ")
    assert "answers 500" in found.problem
    assert found.problem.endswith("(and 1 more)")


def test_a_huge_page_is_not_read_to_its_end() -> None:
    found = scraped("#" * (2 * MIB))
    assert found.pods == {}
    assert "answers with more than 1 MiB" in found.problem


def test_a_sum_of_ranks_stays_a_byte_count() -> None:
    line = 'spillway_tier_bytes{rank="%d",tier="host"} 1e30\n'
    assert scraped("".join(line % rank for rank in range(3))).pods["team", "demo-1-0"].host == MAX_BYTES


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """Bound while the test runs, and not listened on."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_pods_that_run_and_have_a_metrics_port_are_scraped() -> None:
    ports = [{"name": "metrics", "containerPort": 9400}]
    container = {"ports": ports, "resources": {"limits": {"memory": "1Gi", "nvidia.com/gpu": "2"}}}
    pod = {
        "metadata": {"namespace": "team", "name": "demo-1-0"},
        "spec": {"nodeName": "node-a", "containers": [container]},
        "status": {"phase": "Running", "podIP": "10.0.0.7"},
    }
    wanted = ScrapeTarget("team", "demo-1-0", "http://10.0.0.7:9400/metrics", "node-a", device_is_host_memory=False)
    assert target_of(pod) == wanted
    assert target_of({**pod, "status": {"phase": "Pending"}}) is None
    assert target_of({**pod, "spec": {"containers": [{}]}}) is None
