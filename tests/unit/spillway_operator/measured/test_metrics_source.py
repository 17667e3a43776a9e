"""Metrics are read in the background, believed within bounds, and never stand in the way."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from harness.patience import HANG_SECONDS, until
from spillway.api.progress import MAX_BYTES
from spillway.placement.place import LiveBytes
from spillway.units import GIB, MIB
from spillway_operator.measured import metrics_source
from spillway_operator.measured.metrics_source import Access, MetricsSnapshot, MetricsSource, ScrapeTarget, byte_count
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
            self.series.setdefault("DCGM_FI_DEV_FB_FREE", []).append(({"node": name}, str(device * GIB)))
        for mount, free in mounts.items():
            labels = {"node": name, "mountpoint": {"root": "/", "kubelet": "/var/lib/kubelet"}[mount]}
            self.series.setdefault("node_filesystem_avail_bytes", []).append((labels, str(free * GIB)))

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
            source = MetricsSource(Access(str(server.make_url("")).rstrip("/")), 15.0, clock=clock)
            await source.read(session)
            for step in steps:
                await step(source, session)
            return source

    return asyncio.run(run())


def snapshot(prometheus: FakePrometheus, clock: Clock) -> MetricsSnapshot:
    return with_source(prometheus, clock).snapshot()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_free_bytes_of_a_node_are_read_tier_by_tier(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 12.5, device=70.0, root=5.0, kubelet=90.0)
    found = snapshot(prometheus, clock)
    assert found.nodes["node-a"] == LiveBytes(
        devices=(70 * GIB,),
        host=int(12.5 * GIB),
        nvme=90 * GIB,
    )
    assert (found.source, found.problem, found.age_seconds) == ("Prometheus", "", 0.0)


def test_a_node_without_a_file_system_of_its_own_for_pods_has_the_root(
    prometheus: FakePrometheus, clock: Clock
) -> None:
    prometheus.node("node-a", 1.0, root=5.0)
    assert snapshot(prometheus, clock).nodes["node-a"].nvme == 5 * GIB


def test_of_the_drives_of_a_storage_class_the_emptiest_counts_and_none_is_an_emptydirs(
    prometheus: FakePrometheus, clock: Clock
) -> None:
    prometheus.node("node-a", 1.0, kubelet=5.0)
    for mountpoint, free in (("/mnt/a", 70), ("/mnt/b", 90), ("/", 10)):
        labels = {"node": "node-a", "mountpoint": mountpoint, "storage_class": "fast"}
        prometheus.series["node_filesystem_avail_bytes"].append((labels, str(free * GIB)))
    found = snapshot(prometheus, clock).nodes["node-a"]
    assert (found.nvme, found.volumes) == (5 * GIB, {"fast": 90 * GIB})


@pytest.mark.parametrize(
    ("share", "expected"),
    [("0", 0.0), ("0.0621", 0.0621), ("1.004", 1.0), ("+Inf", 1.0), ("NaN", None), ("-0.1", None), ("often", None)],
)
def test_how_long_a_nodes_memory_stalled_is_a_share_of_the_time_or_unknown(
    prometheus: FakePrometheus, clock: Clock, share: str, expected: float | None
) -> None:
    prometheus.node("node-a", 1.0)
    prometheus.stalled("node-a", share)
    assert snapshot(prometheus, clock).nodes["node-a"].memory_stalled == expected


def test_a_node_of_which_only_its_stalls_are_known_is_known(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.stalled("node-a", "0.5")
    assert snapshot(prometheus, clock).nodes["node-a"].memory_stalled == 0.5


def test_old_samples_are_left_out_by_every_query(prometheus: FakePrometheus, clock: Clock) -> None:
    """Prometheus would answer with a sample of five minutes ago as if it were of now."""
    snapshot(prometheus, clock)
    assert len(prometheus.queries) == len(metrics_source.QUESTIONS)
    for query in prometheus.queries:
        assert f"< {metrics_source.OLDEST_SAMPLE_SECONDS}" in query
        assert "time() - timestamp(" in query


def test_of_several_series_of_one_node_the_worst_counts() -> None:
    """So that a series too many can make a node less attractive, never more."""
    *free, stalled = [question() for question in metrics_source.QUESTIONS]
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
    assert found["node-a"] == LiveBytes(nvme=5 * GIB)
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
    assert (found.nodes, found.age_seconds) == ({}, None)


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


def test_a_rejected_query_says_what_prometheus_said(prometheus: FakePrometheus, clock: Clock) -> None:
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
    assert (
        "has no series spillway_node_memory_available_bytes or node_memory_MemAvailable_bytes with the label node"
        in found.problem
    )
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
    assert found.problem.endswith("answers with data from 10m00s ago; check the clock of this server")


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
    assert old.nodes == {}
    assert old.age_seconds == metrics_source.FORGET_SECONDS + 1.0


def test_the_age_counts_from_before_the_questions(prometheus: FakePrometheus, clock: Clock) -> None:
    prometheus.node("node-a", 2.0)
    source = with_source(prometheus, clock)
    assert source.snapshot(clock.now + 7.5).age_seconds == 7.5
    assert source.snapshot(clock.now - 7.5).age_seconds == 0.0


def test_nobody_listening_is_a_problem_that_shows_no_credentials(clock: Clock, unused_tcp_port: int) -> None:
    async def run() -> MetricsSnapshot:
        source = MetricsSource(Access(f"http://user:secret@127.0.0.1:{unused_tcp_port}"), clock=clock)
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
            source = MetricsSource(Access(str(server.make_url("")).rstrip("/")), clock=clock)
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
    found = MetricsSource(Access("http://prometheus:9090")).snapshot()
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
            reading = asyncio.create_task(
                MetricsSource(Access(str(server.make_url("")).rstrip("/")), 0.01, clock=clock).run()
            )
            await until(lambda: len(prometheus.queries) >= 3 * len(metrics_source.QUESTIONS))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())


# --- without Prometheus -----------------------------------------------------------------------------------------------

PAGE = """\
# TYPE spillway_node_memory_available_bytes gauge
spillway_node_memory_available_bytes{node="node-z"} 5e9
# TYPE spillway_node_memory_stalled_seconds counter
spillway_node_memory_stalled_seconds_total{node="node-z"} 100.0
# TYPE spillway_node_disk_free_bytes gauge
spillway_node_disk_free_bytes{node="node-z",mountpoint="/var/lib/kubelet",storage_class="",drive="sda"} 7e9
spillway_node_disk_free_bytes{node="node-z",mountpoint="/mnt/a",storage_class="fast",drive="sdb"} 9e9
# TYPE spillway_node_device_free_bytes gauge
spillway_node_device_free_bytes{node="node-z",gpu="0",UUID="GPU-0",GPU_I_ID=""} 3e9
spillway_node_device_free_bytes{node="node-z",gpu="1",UUID="GPU-1",GPU_I_ID=""} NaN
"""


class Exporters:
    """Node exporters that answer with these pages; None = with an error."""

    def __init__(self, *pages: str | None) -> None:
        self.pages = list(pages)

    async def answer(self, request: web.Request) -> web.Response:
        page = self.pages[int(request.match_info["number"])]
        return web.Response(text=page) if page is not None else web.Response(status=500)

    def read(self, clock: Clock, *steps: Step) -> MetricsSnapshot:
        """After one reading, and another after each step."""

        async def run() -> MetricsSnapshot:
            application = web.Application()
            application.router.add_get("/{number}/metrics", self.answer)
            async with TestServer(application) as server, aiohttp.ClientSession() as session:

                async def found() -> Sequence[ScrapeTarget]:
                    urls = [str(server.make_url(f"/{number}/metrics")) for number in range(len(self.pages))]
                    return [ScrapeTarget(f"node-{number}", url) for number, url in enumerate(urls)]

                source = MetricsSource(targets=found, clock=clock)
                await source.read(session)
                for step in steps:
                    await step(source, session)
                    await source.read(session)
                return source.snapshot()

        return asyncio.run(run())


def test_an_exporter_is_scraped_and_its_node_is_its_targets_whatever_it_says(clock: Clock) -> None:
    found = Exporters(PAGE).read(clock)
    free = LiveBytes(devices=(3 * 10**9,), host=5 * 10**9, nvme=7 * 10**9, volumes={"fast": 9 * 10**9})
    assert found.nodes == {"node-0": free}
    assert (found.source, found.problem, found.age_seconds) == ("Scrape", "", 0.0)


@pytest.mark.parametrize(("seconds", "share"), [("103.0", 0.1), ("100.0", 0.0), ("900.0", 1.0), ("5.0", None)])
def test_stalled_memory_is_its_growth_between_scrapes(clock: Clock, seconds: str, share: float | None) -> None:
    exporters = Exporters(PAGE)

    async def later(*_: object) -> None:
        clock.now += 30.0
        exporters.pages[0] = PAGE.replace("100.0", seconds)

    assert exporters.read(clock, later).nodes["node-0"].memory_stalled == share


def test_an_exporter_that_fails_counts_as_it_was_for_two_minutes_as_with_prometheus(clock: Clock) -> None:
    exporters = Exporters(PAGE, PAGE)

    async def fails(*_: object) -> None:
        clock.now += 100.0
        exporters.pages[1] = "no page of metrics {{{"

    found = exporters.read(clock, fails)
    assert (set(found.nodes), found.problem) == ({"node-0", "node-1"}, "")
    clock.now = 0.0
    exporters.pages[1] = PAGE
    assert set(exporters.read(clock, fails, fails).nodes) == {"node-0"}


def test_no_exporter_that_answers_is_a_problem(clock: Clock) -> None:
    problem = Exporters(None, None).read(clock).problem
    assert problem.startswith("the node exporter of node-0: ")
    assert "answers 500" in problem
    assert Exporters().read(clock).problem == "no node exporter runs in the operator's namespace"


def test_a_huge_page_is_not_read_to_its_end(clock: Clock) -> None:
    assert "answers with more than 1 MiB" in Exporters("#" * (2 * MIB)).read(clock).problem


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """Bound while the test runs, and not listened on."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_exporters_that_run_on_a_node_and_have_a_metrics_port_are_scraped() -> None:
    pod = {
        "metadata": {"namespace": "system", "name": "exporter-x"},
        "spec": {"nodeName": "node-a", "containers": [{"ports": [{"name": "metrics", "containerPort": 9402}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.7"},
    }
    assert target_of(pod) == ScrapeTarget("node-a", "http://10.0.0.7:9402/metrics")
    assert target_of({**pod, "status": {"phase": "Running", "podIP": "fd00::7"}}) == ScrapeTarget(
        "node-a", "http://[fd00::7]:9402/metrics"
    )
    assert target_of({**pod, "status": {"phase": "Pending"}}) is None
    assert target_of({**pod, "spec": {"containers": [{}]}}) is None


# --- access to Prometheus ---------------------------------------------------------------------------------------------


def test_every_request_carries_the_token_that_its_file_has_now(clock: Clock, tmp_path: Path) -> None:
    sent, file = [], tmp_path / "token"
    file.write_text("first\n", encoding="utf-8")

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers["Authorization"])
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})

    async def run() -> str:
        application = web.Application()
        application.router.add_get("/api/v1/query", answer)
        async with TestServer(application) as server, aiohttp.ClientSession() as session:
            source = MetricsSource(Access(str(server.make_url("")).rstrip("/"), token_file=file), clock=clock)
            await source.read(session)
            file.write_text("second", encoding="utf-8")
            await source.read(session)
            file.unlink()
            await source.read(session)
            return source.snapshot().problem

    assert "the token for Prometheus cannot be read: " in asyncio.run(run())
    assert sorted(sent) == ["Bearer first"] * 4 + ["Bearer second"] * 4


def test_a_prometheus_with_an_authority_of_its_own_is_trusted_only_if_that_is_named(
    prometheus: FakePrometheus, clock: Clock, tmp_path: Path
) -> None:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout tls.key -out tls.crt"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    prometheus.node("node-a", 2.0)

    async def problem(port: int, ca_file: Path | None) -> str:
        source = MetricsSource(Access(f"https://localhost:{port}", ca_file=ca_file), clock=clock)
        reading = asyncio.create_task(source.run())
        await until(lambda: source.snapshot().problem != "no reading yet")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return source.snapshot().problem

    async def run() -> tuple[str, str]:
        application = web.Application()
        application.router.add_get("/api/v1/query", prometheus.answer)
        server = TestServer(application)
        await server.start_server(ssl=context)
        assert server.port is not None
        found = await problem(server.port, None), await problem(server.port, tmp_path / "tls.crt")
        await server.close()
        return found

    unnamed, named = asyncio.run(run())
    assert "certificate" in unnamed.lower()
    assert named == ""


def test_matchers_select_in_every_series_of_every_question() -> None:
    for question in metrics_source.QUESTIONS:
        assert question('cluster="a"').count('cluster="a"') == question().count('node!=""')
