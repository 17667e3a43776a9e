"""A small API server for tests: objects by path, watches, pages, label selectors, and planned failures.

It implements what the operator relies on: rising resourceVersions, 409 for a taken name, uid preconditions, status as a
subresource. Other answers, such as 410 for expired pages, are planned failures. It checks nothing else: tests/cluster
use a real API server, which does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Object = dict[str, Any]

GROUPS = {
    "/api/v1": ["configmaps", "services", "pods", "persistentvolumeclaims", "nodes", "namespaces", "events"],
    "/apis/batch/v1": ["jobs"],
    "/apis/spillway.dev/v1alpha1": ["trainingjobs", "nodeprofiles", "memoryprofiles", "operatorconfigs"],
    "/apis/events.k8s.io/v1": ["events"],
    "/apis/coordination.k8s.io/v1": ["leases"],
    "/apis/discovery.k8s.io/v1": ["endpointslices"],
    "/apis/apiextensions.k8s.io/v1": ["customresourcedefinitions"],
    "/apis/authentication.k8s.io/v1": ["tokenreviews"],
    "/apis/storage.k8s.io/v1": ["csistoragecapacities"],
    "/apis/kueue.x-k8s.io/v1beta2": ["workloads"],
    "/apis/kueue.x-k8s.io/v1beta1": ["workloads"],
}
KINDS = {
    "configmaps": "ConfigMap", "services": "Service", "pods": "Pod", "persistentvolumeclaims": "PersistentVolumeClaim",
    "nodes": "Node", "namespaces": "Namespace", "events": "Event", "jobs": "Job", "trainingjobs": "TrainingJob",
    "leases": "Lease", "endpointslices": "EndpointSlice",
    "nodeprofiles": "NodeProfile", "memoryprofiles": "MemoryProfile", "csistoragecapacities": "CSIStorageCapacity",
    "operatorconfigs": "OperatorConfig", "workloads": "Workload",
    "customresourcedefinitions": "CustomResourceDefinition", "tokenreviews": "TokenReview",
}  # fmt: skip
CLUSTER_SCOPED = ("nodes", "nodeprofiles", "operatorconfigs", "namespaces", "customresourcedefinitions", "tokenreviews")


@dataclass(frozen=True, slots=True)
class Failure:
    """A planned answer to the next request that matches. The request is not carried out, unless `after` is set."""

    method: str
    path: str
    """a part of the request's path"""
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "planned"
    after: bool = False
    """carry the request out first, then answer with the failure, so that the client does not learn that it succeeded"""


@dataclass(slots=True)
class FakeApi:
    """The fake API server. `requests` holds (method, path) of all requests that arrived, in order."""

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    """(plural, namespace, name) -> object"""
    requests: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    review: Callable[[str], Object] = lambda _token: {"authenticated": False}
    """token -> status of its TokenReview"""
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """set at first; while a test has cleared it, requests arrive but are not answered"""
    deaf: bool = False
    """if True, watches stay open but report nothing"""
    thinks: set[str] = field(default_factory=set)
    """plurals of the resources for which requests of a watch are not answered"""
    status_defaults: Object = field(default_factory=dict)
    """fields that the server adds to every status that is written, like defaults of a schema"""
    undeclared: list[str] = field(default_factory=list)
    """fields of a status that the schema does not have, such as "attempts.ended"; an apply that has one is rejected"""
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    _versions: Any = field(default_factory=lambda: itertools.count(1000))
    _watchers: list[tuple[str, str, dict[str, str], asyncio.Queue[Object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers.set()

    # --- for tests ---

    def put(self, plural: str, found: Object, *, tell: bool = True) -> Object:
        """Creates or replaces an object, as another client would. With `tell`, watches report it."""
        metadata = found.setdefault("metadata", {})
        namespace = "" if plural in CLUSTER_SCOPED else metadata.setdefault("namespace", "team")
        known = self.objects.get((plural, namespace, metadata["name"]))
        metadata.setdefault("uid", known["metadata"]["uid"] if known else f"uid-{metadata['name']}")
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        metadata["resourceVersion"] = str(next(self._versions))
        found.setdefault("kind", KINDS[plural])
        self.objects[plural, namespace, metadata["name"]] = found
        if tell:
            self._tell("ADDED" if known is None else "MODIFIED", plural, found)
        return found

    def remove(self, plural: str, namespace: str, name: str, *, tell: bool = True) -> None:
        gone = self.objects.pop((plural, namespace, name))
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(next(self._versions))}}
        if tell:
            self._tell("DELETED", plural, gone)

    def get(self, plural: str, name: str, namespace: str = "team") -> Object:
        return self.objects[plural, namespace, name]

    def fail(self, method: str, path: str, status: int, *, times: int = 1, after: bool = False, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures += [Failure(method, path, status, named, after=after)] * times

    def is_watched(self, plural: str) -> bool:
        """Whether a watch is open. `end_watches` does not end a watch that has been requested but is not open yet."""
        return any(kind == plural for kind, *_ in self._watchers)

    def end_watches(self) -> None:
        """Ends all open watches, as a restart of the server would."""
        for _, _, _, news in self._watchers:
            news.put_nowait({})

    def count(self, method: str, part: str = "") -> int:
        return sum(1 for seen, path in self.requests if seen == method and part in path)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in self.requests if method != "GET" and "tokenreviews" not in path]

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeApi]:
        application = web.Application(client_max_size=4 << 20)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.answers.set()
            await runner.cleanup()

    # --- answers ---

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requests.append((request.method, path))
        self.authorizations.append(request.headers.get("Authorization", ""))
        await self.answers.wait()
        failure = next((f for f in self.failures if f.method == request.method and f.path in path), None)
        if failure is not None:
            self.failures.remove(failure)
            if not failure.after:
                return _status(failure.status, failure.message, failure.headers)
        response = await self._do(request)
        return _status(failure.status, failure.message, failure.headers) if failure is not None else response

    async def _do(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one line per kind of request
        path = request.path
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            return web.json_response({"groups": _groups()})
        if path in GROUPS:
            return web.json_response({"resources": _resources(path)})
        prefix = next((prefix for prefix in GROUPS if path.startswith(prefix + "/")), None)
        if prefix is None:
            return _status(404, "no such path")
        parts = path.removeprefix(prefix + "/").split("/")
        namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
        plural, *rest = parts[2:] if namespace else parts
        if request.method == "GET" and not rest:
            watching = request.query.get("watch") in ("true", "1")
            return await self._watch(request, plural, namespace) if watching else self._list(request, plural, namespace)
        body = json.loads(await request.read() or b"{}")
        self.bodies.append(body)
        if plural == "tokenreviews":
            return web.json_response({"status": self.review(body["spec"]["token"])}, status=201)
        if request.method == "POST":
            return self._create(plural, namespace, body)
        return self._one(request.method, plural, namespace, rest, body)

    def _create(self, plural: str, namespace: str, body: Object) -> web.Response:
        name = body["metadata"]["name"]
        if (plural, namespace, name) in self.objects:
            return _status(409, f'{plural} "{name}" already exists', reason="AlreadyExists")
        body["metadata"]["uid"] = f"uid-{name}-{next(self._versions)}"
        body["metadata"]["namespace"] = namespace
        return web.json_response(self.put(plural, body), status=201)

    def _one(  # noqa: PLR0911 - one line per kind of answer
        self, method: str, plural: str, namespace: str, rest: list[str], body: Object
    ) -> web.Response:
        found = self.objects.get((plural, namespace, rest[0]))
        if found is None and method == "PATCH" and len(rest) == 1:  # server-side apply creates
            return self._create(plural, namespace, body)
        if found is None:
            return _status(404, f'{plural} "{rest[0]}" not found', reason="NotFound")
        if method == "GET":
            return web.json_response(found)
        wanted = body.get("preconditions") or body.get("metadata") or {}
        for name in ("uid", "resourceVersion"):
            if wanted.get(name, found["metadata"][name]) != found["metadata"][name]:
                return _status(409, f"the {name} differs", reason="Conflict")
        if method == "DELETE":
            self.remove(plural, namespace, rest[0])
            return web.json_response({"status": "Success"})
        changed = {**found, "metadata": dict(found["metadata"])}
        if plural == "endpointslices":  # the only kind without a spec
            changed |= {name: value for name, value in body.items() if name != "metadata"}
        part = "status" if rest[1:] == ["status"] else "spec"
        changed[part] = body.get(part)
        if part == "status":
            unknown = next((field for field in self.undeclared if _has(changed[part], field)), None)
            if unknown is not None:  # the message of a real API server, which names one field at a time
                about = f"failed to create typed patch object ({namespace}/{rest[0]}; spillway.dev/v1alpha1)"
                return _status(500, f"{about}: .status.{unknown}: field not declared in schema")
            changed[part] = self.status_defaults | changed[part]
        return web.json_response(self.put(plural, changed))

    def _selected(self, plural: str, namespace: str, query: dict[str, str]) -> list[Object]:
        return [
            found
            for (kind, where, _), found in sorted(self.objects.items())
            if kind == plural and namespace in ("", where) and _matches(found, query)
        ]

    def _list(self, request: web.Request, plural: str, namespace: str) -> web.Response:
        found = self._selected(plural, namespace, dict(request.query))
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "0") or 0)
        end = start + limit if limit else len(found)
        metadata = {"resourceVersion": str(next(self._versions))}
        if end < len(found):
            metadata["continue"] = str(end)
        return web.json_response({"metadata": metadata, "items": found[start:end]})

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        response = web.StreamResponse()
        while plural in self.thinks:
            await asyncio.sleep(0.05)
        await response.prepare(request)
        news: asyncio.Queue[Object] = asyncio.Queue()
        entry = (plural, namespace, dict(request.query), news)
        self._watchers.append(entry)
        try:
            while event := await news.get():
                await response.write(json.dumps(event).encode() + b"\n")
            return response
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._watchers.remove(entry)

    def _tell(self, event: str, plural: str, found: Object) -> None:
        if self.deaf:
            return
        for kind, namespace, query, news in self._watchers:
            if kind == plural and namespace in ("", found["metadata"].get("namespace")) and _matches(found, query):
                news.put_nowait({"type": event, "object": found})


def _has(found: object, path: str) -> bool:
    name, _, below = path.partition(".")
    return isinstance(found, dict) and name in found and (not below or _has(found[name], below))


def _matches(found: Object, query: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels") or {}
    wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
    fields = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        (_field(found, path.removesuffix("!")) or "") != value if path.endswith("!") else _field(found, path) == value
        for path, value in fields.items()
    )


def _field(found: Object, path: str) -> object:
    value: Any = found
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _status(code: int, message: str, headers: dict[str, str] | None = None, reason: str = "") -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": code, "message": message, "reason": reason}, status=code, headers=headers
    )


def _groups() -> list[Object]:
    named = [path.removeprefix("/apis/").split("/") for path in GROUPS if path.startswith("/apis/")]
    return [
        {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
        for group, version in named
    ]


def _resources(path: str) -> list[Object]:
    return [
        {
            "name": plural, "singularName": plural.removesuffix("s"), "kind": KINDS[plural],
            "namespaced": plural not in CLUSTER_SCOPED, "verbs": ["get", "list", "watch", "create", "patch", "delete"],
        }
        for plural in GROUPS[path]
    ]  # fmt: skip
