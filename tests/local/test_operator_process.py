"""The operator as a process, with a fake API server: start, probes, stop, failure of a part, and memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from cases.job_documents import document
from fakes.fake_api import FakeApi
from harness.patience import until
from spillway_operator.health import LoopLag
from spillway_operator.settings import Settings, variable
from spillway_trainer.launch.launcher import free_ports

MOST_RESIDENT_BYTES = 120 * 1024**2
"""limit of the operator with NUM_JOBS active jobs"""
NUM_JOBS = 100
PATIENCE_SECONDS = 240.0
"""long, because processes start slowly on a busy machine"""


@dataclass
class Running:
    api: FakeApi
    process: asyncio.subprocess.Process
    log: Path
    health_url: str = ""

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.health_url + path) as response:
            return response.status, await response.text()

    async def until(self, holds: Callable[[], bool | Awaitable[bool]]) -> None:
        def look() -> None:
            assert self.process.returncode is None, self.log.read_text()

        await until(holds, look, self.log.read_text, PATIENCE_SECONDS)

    async def ready(self) -> bool:
        try:
            return (await self.get("/readyz"))[0] == 200
        except aiohttp.ClientError:
            return False

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def operator(api: FakeApi, folder: Path, **settings: str) -> AsyncIterator[Running]:
    kubeconfig = folder / "kubeconfig"
    named = [{"name": "test", "cluster": {"server": api.url}}]
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    user = {"name": "test", "user": {"token": "secret"}}
    kubeconfig.write_text(
        yaml.safe_dump({"clusters": named, "contexts": [context], "users": [user], "current-context": "test"})
    )
    known = {variable(name) for name in Settings.model_fields}
    port = free_ports(1)[0]
    environment = {name: value for name, value in os.environ.items() if name not in known}
    environment |= {"SPILLWAY_TRAINER_IMAGE": "trainer:1", "SPILLWAY_HEALTH_PORT": str(port)} | settings
    log = folder / "log"
    with log.open("w") as lines:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spillway_operator", "--kubeconfig", str(kubeconfig), env=environment, stderr=lines
        )
        try:
            yield Running(api, process, log, f"http://127.0.0.1:{port}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def put_jobs(api: FakeApi, numbers: range) -> None:
    for number in numbers:
        api.put("trainingjobs", document() | {"metadata": {"name": f"job-{number}"}})


def count(api: FakeApi, plural: str) -> int:
    return sum(1 for kind, _, _ in api.objects if kind == plural)


def all_are(state: str, api: FakeApi, expected: int) -> Callable[[], bool]:
    def holds() -> bool:
        jobs = [found for (kind, _, _), found in api.objects.items() if kind == "trainingjobs"]
        return sum((job.get("status") or {}).get("state") == state for job in jobs) == expected

    return holds


def run_all_pods(api: FakeApi) -> None:
    """Marks all attempts as running, as kubelets and the Job controller would, because the operator polls attempts that
    are not ready."""
    for (kind, _, _), job in list(api.objects.items()):
        if kind == "jobs":
            api.put("jobs", job | {"status": {"active": 1, "ready": 1}})


def test_100_jobs_start_within_the_memory_limit_and_sigterm_exits_cleanly(tmp_path: Path) -> None:
    """Half of the jobs exist at the start; the other half arrive by the watch."""

    async def scenario() -> None:
        async with FakeApi().running() as api:
            put_jobs(api, range(NUM_JOBS // 2))
            async with operator(api, tmp_path) as running:
                await running.until(running.ready)
                put_jobs(api, range(NUM_JOBS // 2, NUM_JOBS))
                await running.until(all_are("Starting", api, NUM_JOBS))
                assert count(api, "jobs") == count(api, "configmaps") == NUM_JOBS
                assert running.resident_bytes() <= MOST_RESIDENT_BYTES
                assert (await running.get("/healthz")) == (200, "ok")
                starting = f'spillway_operator_jobs{{namespace="team",state="Starting"}} {NUM_JOBS}.0'
                assert starting in (await running.get("/metrics"))[1]
                assert await running.stop() == 0
            for line in running.log.read_text().splitlines():
                assert {"time", "level", "logger", "message"} <= json.loads(line).keys()

    asyncio.run(scenario())


@pytest.mark.ci
def test_a_restart_writes_nothing_and_a_kill_doubles_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api:
            put_jobs(api, range(20))
            for kill_after in (5, 15, 25):
                async with operator(api, tmp_path) as running:
                    await running.until(lambda limit=kill_after: len(api.writes) >= limit)
                    await running.stop(signal.SIGKILL)
            async with operator(api, tmp_path) as running:
                await running.until(all_are("Starting", api, 20))
                run_all_pods(api)
                await running.until(all_are("Running", api, 20))
                assert await running.stop() == 0
            assert count(api, "jobs") == count(api, "configmaps") == 20
            api.requests.clear()
            async with operator(api, tmp_path, SPILLWAY_RELIST_SECONDS="1") as running:
                await running.until(running.ready)
                await running.until(lambda: api.count("GET", "/apis/batch/v1/jobs") >= 4)
                assert await running.stop() == 0
            assert api.writes == []

    asyncio.run(scenario())


@pytest.mark.ci
def test_without_the_crds_it_says_so_and_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api:
            api.fail("GET", "/apis/spillway.dev/v1alpha1", 404)
            async with operator(api, tmp_path) as running:
                await running.until(lambda: "planned" in running.log.read_text())
                assert (await running.get("/readyz"))[0] == 503
                assert (await running.get("/healthz"))[0] == 200
                await running.until(running.ready)
                assert await running.stop() == 0

    asyncio.run(scenario())


@pytest.mark.ci
@pytest.mark.parametrize("thinks", [set(), {"jobs"}])
def test_kind_that_is_no_longer_served_ends_the_process_naming_its_crd(tmp_path: Path, thinks: set[str]) -> None:
    """This also holds if the server has not yet answered the watch of another kind; kopf alone would wait for it for
    ever."""

    async def scenario() -> None:
        async with FakeApi().running() as api:
            async with operator(api, tmp_path) as running:
                await running.until(running.ready)
                await running.until(lambda: api.is_watched("trainingjobs"))  # ready after a list, just before the watch
                api.thinks |= thinks
                api.fail("GET", "trainingjobs", 404, times=100)
                api.end_watches()
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert await running.process.wait() == 1
            said = [json.loads(line) for line in running.log.read_text().splitlines()]
            (last,) = [line for line in said if line["level"] == "CRITICAL"]
            assert "install the CRD trainingjobs.spillway.dev again" in last["message"]

    asyncio.run(scenario())


@pytest.mark.ci
def test_a_watch_that_hears_nothing_fails_liveness(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api, operator(api, tmp_path, SPILLWAY_RELIST_SECONDS="1") as running:
            await running.until(running.ready)
            api.deaf = True
            lists = 0

            async def is_dead() -> bool:
                """Adds a job after each list, so that every list has a job that the watch did not report; returns
                whether the probe fails."""
                nonlocal lists
                if api.count("GET", "/trainingjobs") > lists:
                    lists = api.count("GET", "/trainingjobs")
                    put_jobs(api, range(count(api, "trainingjobs"), count(api, "trainingjobs") + 1))
                return (await running.get("/healthz"))[0] == 503

            await running.until(is_dead)
            assert "watch" in (await running.get("/healthz"))[1]
            assert count(api, "jobs") > 0  # meanwhile, it works with complete lists

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"SPILLWAY_WORKERS": "many"}, "SPILLWAY_WORKERS"),
        ({"SPILLWAY_TRAINER_IMAGE": ""}, "SPILLWAY_TRAINER_IMAGE is not set"),
    ],
)
def test_wrong_settings_are_exit_code_64_and_a_sentence(
    tmp_path: Path, settings: dict[str, str], sentence: str
) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api, operator(api, tmp_path, **settings) as running:
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await running.process.wait() == 64
            assert sentence in running.log.read_text()
            assert "Traceback" not in running.log.read_text()

    asyncio.run(scenario())


def elected(folder: Path, api: FakeApi, uid: str) -> AbstractAsyncContextManager[Running]:
    """One of several operators, as the pod `uid`."""
    (folder / uid).mkdir()
    names = {"SPILLWAY_LEASE_NAME": "spillway", "SPILLWAY_POD_NAMESPACE": "system", "SPILLWAY_POD_UID": uid}
    return operator(api, folder / uid, **names)


def holder(api: FakeApi) -> str:
    lease = api.objects.get(("leases", "system", "spillway"))
    return "" if lease is None else str(lease["spec"].get("holderIdentity", ""))


@pytest.mark.ci
def test_of_two_operators_one_works_and_the_other_is_ready_to_take_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api, elected(tmp_path, api, "first") as first:
            await first.until(lambda: "attempts found" in first.log.read_text())
            await first.until(first.ready)
            async with elected(tmp_path, api, "second") as second:
                await second.until(second.ready)
                assert "attempts found" not in second.log.read_text(), "who stands by lists and watches nothing"
                assert "spillway_operator_leader 1.0" in (await first.get("/metrics"))[1]
                assert "spillway_operator_leader 0.0" in (await second.get("/metrics"))[1]
                put_jobs(api, range(3))
                await first.until(all_are("Starting", api, 3))
                began = time.monotonic()
                assert await first.stop() == 0
                await second.until(lambda: holder(api) == "second")
                put_jobs(api, range(3, 6))
                await second.until(all_are("Starting", api, 6))
                print(f"6 jobs are served {time.monotonic() - began:.1f} s after SIGTERM of the leader")
                assert count(api, "jobs") == count(api, "configmaps") == 6
                assert api.get("leases", "spillway", "system")["spec"]["leaseTransitions"] == 1
                assert await second.stop() == 0
                assert holder(api) == ""

    asyncio.run(scenario())


@pytest.mark.ci
def test_operator_that_lost_its_lease_exits_with_one_error_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api, elected(tmp_path, api, "first") as first:
            await first.until(first.ready)
            lease = api.get("leases", "spillway", "system")
            api.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "second"}})
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await first.process.wait() == 1
            assert holder(api) == "second"
            last = json.loads(first.log.read_text().splitlines()[-1])
            assert last["level"] == "CRITICAL"
            assert "Lease system/spillway is held by second" in last["message"]
            assert "exception" not in last

    asyncio.run(scenario())


@pytest.mark.ci
def test_an_operator_that_may_not_read_the_lease_is_not_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeApi().running() as api:
            api.fail("GET", "leases", 403, times=1000)
            async with elected(tmp_path, api, "first") as first:
                await first.until(lambda: "403" in first.log.read_text())
                assert (await first.get("/readyz")) == (503, "the Lease has not been read yet")
                assert (await first.get("/healthz"))[0] == 200
                assert await first.stop() == 0

    asyncio.run(scenario())


def test_the_longest_lag_of_the_last_minute_is_remembered_and_no_longer() -> None:
    now = 0.0
    lag = LoopLag(lambda: now)
    for at, seconds in ((0.0, 0.5), (10.0, 31.0), (20.0, 0.2), (30.0, 0.1)):
        now = at
        lag.saw(seconds)
    assert lag.longest == 31.0
    now = 71.0
    assert lag.longest == 0.2
    now = 1000.0
    assert lag.longest == 0.0
