"""The fakes around the operator in benchmarks/operator_scale.py: trainers, ends of pods, a Prometheus.

Each trainer is one coroutine. It posts to the operator's own endpoint over HTTPS, on a connection that it keeps, with a
token that the API server issued for its pod. So the operator makes all of its usual checks.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from spillway.api.progress import TOKEN_AUDIENCE
from spillway.placement.node_signals import DISK_SERIES, HOST_SERIES
from spillway.units import parse_quantity

Document = dict[str, Any]
Key = tuple[str, str]
"""namespace and name of a TrainingJob"""

JOBS_PATH = "/apis/spillway.dev/v1alpha1/trainingjobs"
NUM_CONNECTIONS = 16
PAGE_SIZE = "500"
POST_SECONDS = 15.0
"""seconds between two posts of a trainer; a real one posts every 5 s"""
LONGEST_LINE = 1 << 20
"""the most bytes that an event of a watch may have"""
STEPS_A_POST = 10
PROGRESS_FIELDS = frozenset({"progress", "memory", "checkpoint", "members", "bestMember"})
PROGRESS_CONDITIONS = frozenset({"Progressing", "CheckpointsDurable"})
"""fields and conditions of a status that only progress reports change"""


class Server:
    """A client of the API server with the administrator's rights, who is exempt from priority and fairness."""

    def __init__(self, address: str, credentials: ssl.SSLContext) -> None:
        self._address, self._credentials = address, credentials

    async def __aenter__(self) -> Server:
        connector = aiohttp.TCPConnector(limit=NUM_CONNECTIONS + 1, ssl=self._credentials)  # one more for the watch
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LONGEST_LINE)
        self._limit = asyncio.Semaphore(NUM_CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def create(self, path: str, body: Document) -> Document:
        return await self._send("POST", path, body, "application/json")

    async def merge(self, path: str, body: Document) -> Document:
        return await self._send("PATCH", path, body, "application/merge-patch+json")

    async def items(self, path: str, **query: str) -> list[Document]:
        """Returns all objects of a list, which it reads page by page."""
        found: list[Document] = []
        wanted = {"limit": PAGE_SIZE, **query}
        while True:
            async with self._limit, self._session.get(self._address + path, params=wanted) as answer:
                page = await _checked(answer)
            found += page["items"]
            if not (following := page["metadata"].get("continue")):
                return found
            wanted["continue"] = following

    async def events(self, path: str, since: str) -> AsyncIterator[tuple[str, Document]]:
        """Watches until the API server ends the watch. Yields types and objects after resourceVersion `since`, or all
        present ones first if it is empty."""
        wanted, timeout = {"watch": "1", "resourceVersion": since}, aiohttp.ClientTimeout(total=None)
        async with self._session.get(self._address + path, params=wanted, timeout=timeout) as answer:
            if answer.status != 200:
                raise RuntimeError(f"watch {path}: {answer.status} {await answer.text()}")
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"]

    async def _send(self, method: str, path: str, body: Document, content_type: str) -> Document:
        headers = {"Content-Type": content_type}
        async with (
            self._limit,
            self._session.request(method, self._address + path, data=json.dumps(body), headers=headers) as answer,
        ):
            return await _checked(answer)


async def _checked(answer: aiohttp.ClientResponse) -> Document:
    found: Document = json.loads(await answer.read())
    if answer.status >= 300:
        raise RuntimeError(f"{answer.method} {answer.url.path}: {answer.status} {found.get('message')}")
    return found


# --- what statuses become ---------------------------------------------------------------------------------------------


def lifecycle(status: Mapping[str, Any]) -> Document:
    """Returns a status without the parts that only progress reports change."""
    kept = {name: value for name, value in status.items() if name not in PROGRESS_FIELDS}
    conditions = status.get("conditions") or ()
    return kept | {"conditions": [one for one in conditions if one["type"] not in PROGRESS_CONDITIONS]}


def is_progress(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a status write was made only for a progress report."""
    return before != after and lifecycle(before) == lifecycle(after)


@dataclass(slots=True)
class Statuses:
    """The newest statuses of the TrainingJobs, and how often they were written, by a watch of this benchmark."""

    newest: dict[Key, Document] = field(default_factory=dict)
    progress_writes: Counter[str] = field(default_factory=Counter)
    """by namespace"""
    other_writes: Counter[str] = field(default_factory=Counter)

    async def follow(self, server: Server) -> None:
        """Watches forever. The API server may end a watch at any time, and does so soon after a CRD is created; then
        the next watch continues."""
        since = ""
        while True:
            async for kind, found in server.events(JOBS_PATH, since):
                if kind == "ERROR":
                    raise RuntimeError(f"the watch of the benchmark ended: {found.get('message')}")
                since = found["metadata"]["resourceVersion"]
                if kind != "DELETED":
                    self.see(found)
            await asyncio.sleep(0.1)

    def see(self, found: Document) -> None:
        namespace = found["metadata"]["namespace"]
        key, status = (namespace, found["metadata"]["name"]), found.get("status") or {}
        before = self.newest.get(key, {})
        if status != before:
            (self.progress_writes if is_progress(before, status) else self.other_writes)[namespace] += 1
        self.newest[key] = status

    def states(self, namespace: str) -> Counter[str]:
        return Counter(str(status.get("state")) for (space, _), status in self.newest.items() if space == namespace)


# --- trainers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trainers:
    """The fake rank 0 of each job. `posts` counts answers by HTTP status; 0 means no answer."""

    server: Server
    statuses: Statuses
    url: str
    server_name: str
    """name in the endpoint's certificate"""
    trust: ssl.SSLContext
    num_steps: int
    """number of steps of a job, which no trainer here reaches"""
    posts: Counter[int] = field(default_factory=Counter)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @asynccontextmanager
    async def posting(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, namespace: str) -> None:
        """Starts a trainer for the first pod of each job of a namespace. Their posts are spread over POST_SECONDS."""
        first = "batch.kubernetes.io/job-completion-index=0"
        pods = await self.server.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=first)
        tokens = await asyncio.gather(*(self._token(pod["metadata"]) for pod in pods))
        for number, (pod, token) in enumerate(zip(pods, tokens, strict=True)):
            key = (namespace, pod["metadata"]["labels"]["spillway.dev/job"])
            trainer = self._train(key, token, POST_SECONDS * number / len(pods))
            self._tasks.append(asyncio.create_task(trainer, name=f"trainer {key[1]}"))

    async def _token(self, pod: Document) -> str:
        """Requests a token as the kubelet does for the pod's volume."""
        bound = {"apiVersion": "v1", "kind": "Pod", "name": pod["name"], "uid": pod["uid"]}
        wanted = {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": 3600, "boundObjectRef": bound}
        path = f"/api/v1/namespaces/{pod['namespace']}/serviceaccounts/default/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": wanted}
        return str((await self.server.create(path, request))["status"]["token"])

    async def _train(self, key: Key, token: str, wait: float) -> None:
        planned = self.statuses.newest[key]["plan"]["bytes"]
        peak = {tier: peak_bytes(held, key) for tier, size in planned.items() if (held := parse_quantity(str(size)))}
        step = 0
        await asyncio.sleep(wait)
        # Each trainer has a connection of its own.
        connector = aiohttp.TCPConnector(limit=1, ssl=self.trust, keepalive_timeout=4 * POST_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                began, step = time.monotonic(), step + STEPS_A_POST
                await self._post(session, token, report(step, self.num_steps, peak))
                await asyncio.sleep(max(0.0, POST_SECONDS - (time.monotonic() - began)))

    async def _post(self, session: aiohttp.ClientSession, token: str, body: Document) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with session.post(self.url, json=body, headers=headers, server_hostname=self.server_name) as answer:
                await answer.read()
                self.posts[answer.status] += 1
        except (aiohttp.ClientError, TimeoutError, OSError):  # the operator is being killed
            self.posts[0] += 1


def peak_bytes(planned: int, key: Key) -> int:
    """Returns a peak below the planned bytes that no other job of the profile has, so that each job gives it news."""
    number = int(key[1].rpartition("-")[2])
    return planned * 9 // 10 + number


def report(step: int, num_steps: int, peak: Mapping[str, int]) -> Document:
    training = {
        "epoch": 1, "step": step, "steps": num_steps, "loss": 2.0 + 1.0 / step, "tokensPerSecond": 1000.0 + step,
        "stepSeconds": POST_SECONDS / STEPS_A_POST, "lastStepTime": time.time(), "peak": dict(peak),
    }  # fmt: skip
    return {"trainerStatus": {"progressPercentage": 100 * step // num_steps}, "spillway": training}


async def end_pods(server: Server, namespace: str) -> None:
    """Sets the phase of every pod of a namespace to Succeeded; nothing ever ran in them."""
    pods = await server.items(f"/api/v1/namespaces/{namespace}/pods")
    ended = {"status": {"phase": "Succeeded"}}
    path = f"/api/v1/namespaces/{namespace}/pods"
    await asyncio.gather(*(server.merge(f"{path}/{pod['metadata']['name']}/status", ended) for pod in pods))


# --- Prometheus -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def prometheus(nodes: Iterable[str], host_bytes: int, disk_bytes: int) -> AsyncIterator[str]:
    """Runs a fake Prometheus and yields its URL. It always reports the same free bytes for every node."""
    names = list(nodes)

    async def query(request: web.Request) -> web.Response:
        asked, now = request.query["query"], time.time()
        of_series = {HOST_SERIES: ({}, host_bytes), DISK_SERIES: ({"mountpoint": "/"}, disk_bytes)}
        found = [
            {"metric": {"node": node, **labels}, "value": [now, str(free)]}
            for series, (labels, free) in of_series.items() if series in asked
            for node in names
        ]  # fmt: skip
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": found}})

    application = web.Application()
    application.router.add_get("/api/v1/query", query)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
