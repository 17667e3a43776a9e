"""ApiClient: requests to the API server over one aiohttp session; the hot path of the operator.

Answers are plain data. Errors carry the server's message; there is one class per kind of reaction. Only 429 is retried
here, after the time that the server asks for; everything else is retried by the key queue, from a new observation.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import aiohttp

from spillway.json_text import json_object

from .credentials import Credentials

NUM_CONNECTIONS = 16
TIMEOUT_SECONDS = 30.0
MOST_TRIES = 6
"""Most tries of a request that is answered with 429."""
LONGEST_WAIT_SECONDS = 10.0
"""Longest Retry-After that is respected."""
PAGE_SIZE = 50
"""Objects per page: decoded, they are ten times as large as in transit, before they are projected to a few fields."""
MOST_LISTINGS = 3
"""Most tries of a list whose pages expire meanwhile."""
UNDECLARED = re.compile(r"(\.[\w.\[\]=\"-]+): field not declared in schema")
"""Error of server-side apply for fields that an older CRD does not have; it names one or some of them."""
MOST_UNDECLARED = 32
"""Most tries to apply an object without the named fields."""
UNDECLARED_SECONDS = 300.0
"""How long these fields are left out from the start; newer CRDs may be installed meanwhile."""
FIELD_MANAGER = "spillway-operator"
JSON_TYPE = "application/json"
APPLY_TYPE = "application/apply-patch+yaml"

T = TypeVar("T")
Answer = dict[str, Any]


class ApiError(Exception):
    """A failed request. `code` is the HTTP status, 0 without an answer; `reason` is CamelCase."""

    def __init__(self, request: str, code: int, reason: str, message: str) -> None:
        super().__init__(f"{request}: {code or 'no answer'} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """404: the object, its namespace or its kind does not exist."""


class Conflict(ApiError):
    """409: the name is taken, or a precondition does not hold."""


class Expired(ApiError):
    """410: the remaining pages of a list have expired."""


class RequestRejected(ApiError):
    """400, 403, 405, 413, 415, 422: the same request would be rejected again until something else changes."""


class Unavailable(ApiError):
    """401, 429, 5xx, no answer: try again later. A write may have happened."""


ERRORS: dict[int, type[ApiError]] = {
    400: RequestRejected,
    403: RequestRejected,
    404: NotFound,
    405: RequestRejected,
    409: Conflict,
    410: Expired,
    413: RequestRejected,
    415: RequestRejected,
    422: RequestRejected,
}


@dataclass(frozen=True, slots=True)
class ApiResource:
    """A kind, as named in URLs and RBAC rules."""

    prefix: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The URL path. `namespace` "" means all namespaces, or a cluster-scoped kind. Raises RequestRejected for an
        invalid name."""
        scope = ["namespaces", _segment(namespace)] if namespace else []
        below = [_segment(part) for part in (name, subresource) if part]
        return "/".join([self.prefix, *scope, self.plural, *below])


def _segment(name: str) -> str:
    """`name` as one part of a path. The API server unescapes slashes, so escaping them would not help."""
    if not is_path_segment(name):
        raise RequestRejected(
            "request not sent",
            0,
            "InvalidName",
            f"{name[:253]!r} is not a valid name; a name must not be empty, '.' or '..', or contain '/' or '%'",
        )
    return quote(name, safe="")


def is_path_segment(name: str) -> bool:
    """Whether the name is valid as a path segment, by the API server's own rule."""
    return name not in ("", ".", "..") and "/" not in name and "%" not in name


TRAINING_JOBS = ApiResource("/apis/spillway.dev/v1alpha1", "trainingjobs")
NODE_PROFILES = ApiResource("/apis/spillway.dev/v1alpha1", "nodeprofiles")
MEMORY_PROFILES = ApiResource("/apis/spillway.dev/v1alpha1", "memoryprofiles")
OPERATOR_CONFIGS = ApiResource("/apis/spillway.dev/v1alpha1", "operatorconfigs")
JOBS = ApiResource("/apis/batch/v1", "jobs")
CONFIG_MAPS = ApiResource("/api/v1", "configmaps")
SERVICES = ApiResource("/api/v1", "services")
PODS = ApiResource("/api/v1", "pods")
CLAIMS = ApiResource("/api/v1", "persistentvolumeclaims")
NODES = ApiResource("/api/v1", "nodes")
STORAGE_CAPACITIES = ApiResource("/apis/storage.k8s.io/v1", "csistoragecapacities")
WORKLOADS = tuple(ApiResource(f"/apis/kueue.x-k8s.io/{version}", "workloads") for version in ("v1beta2", "v1beta1"))
"""Kueue's versions, the preferred one first. What is read (spec.active, conditions, labels) is the same in all."""
EVENTS = ApiResource("/apis/events.k8s.io/v1", "events")
LEASES = ApiResource("/apis/coordination.k8s.io/v1", "leases")
ENDPOINT_SLICES = ApiResource("/apis/discovery.k8s.io/v1", "endpointslices")
TOKEN_REVIEWS = ApiResource("/apis/authentication.k8s.io/v1", "tokenreviews")

RESOURCE_OF = {"ConfigMap": CONFIG_MAPS, "Service": SERVICES, "Job": JOBS, "TrainingJob": TRAINING_JOBS}
"""Resources of TrainingJobs and their children, by kind."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All objects of one kind at one resourceVersion."""

    resource_version: int
    items: tuple[T, ...]


class ApiClient:
    """Sends requests. `count(verb, resource, code)` is called once per request that was sent. `seconds_left()` is the
    time for which writing is allowed: later writes are not sent, and those in progress are given up at its end."""

    def __init__(
        self,
        credentials: Credentials,
        count: Callable[[str, str, int], None],
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._credentials = credentials
        self._count = count
        self._seconds_left = seconds_left
        self._session: aiohttp.ClientSession | None = None
        self._undeclared: dict[str, tuple[float, frozenset[str]]] = {}
        """Plural -> (time until which these fields are left out when applying, fields)."""

    async def __aenter__(self) -> ApiClient:
        secure = self._credentials.server.startswith("https:")
        connector = aiohttp.TCPConnector(
            limit=NUM_CONNECTIONS, ssl=self._credentials.ssl_context() if secure else False
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"User-Agent": FIELD_MANAGER, "Accept": JSON_TYPE},
            json_serialize=_compact,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, resource: ApiResource, namespace: str, name: str) -> Answer:
        return await self._request("get", resource, "GET", resource.path(namespace, name))

    async def read(self, path: str) -> Answer:
        """Reads a path that is not a resource, such as a discovery document."""
        return await self._request("get", ApiResource("", path), "GET", path)

    async def list(
        self,
        resource: ApiResource,
        namespace: str,
        project: Callable[[Answer], T],
        label_selector: str = "",
        field_selector: str = "",
    ) -> Listing[T]:
        """Lists all objects; each is projected when its page arrives, so that the whole list is never in memory."""
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        query = {name: selector for name, selector in selectors.items() if selector}
        for listing in range(1, MOST_LISTINGS + 1):
            try:
                return await self._list_once(resource, namespace, project, query)
            except Expired:
                if listing == MOST_LISTINGS:
                    raise
        raise AssertionError

    async def create(self, resource: ApiResource, namespace: str, body: Mapping[str, Any]) -> Answer:
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("create", resource, "POST", resource.path(namespace), body, query)

    async def replace(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Answer:
        """Replaces the whole object; `metadata.resourceVersion` in `body` is a precondition."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("update", resource, "PUT", resource.path(namespace, name), body, query)

    async def apply(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Answer:
        """Server-side apply of an object that belongs to the operator."""
        return await self._apply(resource, resource.path(namespace, name), body)

    async def apply_status(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Answer:
        """Server-side apply of the whole status; `metadata.uid` in `body` is a precondition."""
        return await self._apply(resource, resource.path(namespace, name, "status"), body)

    async def _apply(self, resource: ApiResource, path: str, body: Mapping[str, Any]) -> Answer:
        """Applies without fields that the installed CRD does not declare: other writes drop them, apply is rejected."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        until, left_out = self._undeclared.get(resource.plural, (0.0, frozenset[str]()))
        if monotonic() > until:
            left_out = frozenset()
        for left in reversed(range(MOST_UNDECLARED)):
            try:
                sent = without_fields(body, left_out)
                return await self._request("patch", resource, "PATCH", path, sent, query, APPLY_TYPE)
            except Unavailable as error:
                named = {re.sub(r"\[[^\]]*\]", "", found) for found in UNDECLARED.findall(error.message)}
                if not left or not named - left_out:
                    raise
                left_out |= named
                self._undeclared[resource.plural] = (monotonic() + UNDECLARED_SECONDS, left_out)
        raise AssertionError

    async def delete(
        self, resource: ApiResource, namespace: str, name: str, uid: str, resource_version: int = 0
    ) -> Answer:
        """Deletes in the foreground: the object remains, marked, until its dependents are deleted. Preconditions: the
        uid, and the resourceVersion (0 = any)."""
        version = {"resourceVersion": str(resource_version)} if resource_version else {}
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid} | version,
        }
        return await self._request("delete", resource, "DELETE", resource.path(namespace, name), body)

    async def _list_once(
        self, resource: ApiResource, namespace: str, project: Callable[[Answer], T], selectors: Mapping[str, str]
    ) -> Listing[T]:
        query = {"limit": str(PAGE_SIZE), **selectors}
        items: list[T] = []
        while True:
            page = await self._request("list", resource, "GET", resource.path(namespace), None, query)
            items += map(project, page.get("items") or ())
            if not (following := page["metadata"].get("continue")):
                return Listing(int(page["metadata"]["resourceVersion"]), tuple(items))
            query = query | {"continue": following}
            del page
            await asyncio.sleep(0)  # do not block the loop with a long list

    async def _request(
        self,
        verb: str,
        resource: ApiResource,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON_TYPE,
    ) -> Answer:
        assert self._session is not None
        headers = {"Content-Type": content_type} if body is not None else {}
        if token := self._credentials.token:
            headers["Authorization"] = f"Bearer {token}"
        counted = resource.plural + ("/status" if path.endswith("/status") else "")
        where = f"{verb} {path}"
        for left in reversed(range(MOST_TRIES)):
            seconds = min(TIMEOUT_SECONDS, self._seconds_left() if method != "GET" else TIMEOUT_SECONDS)
            if seconds <= 0:
                raise Unavailable(
                    where, 0, "NotLeading", "the request was not sent, because another operator may be the leader now"
                )
            try:
                async with self._session.request(
                    method, self._credentials.server + path, json=body, params=query, headers=headers,
                    timeout=aiohttp.ClientTimeout(total=seconds),
                ) as response:  # fmt: skip
                    found = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._count(verb, counted, 0)
                raise Unavailable(where, 0, type(error).__name__, str(error) or "the request timed out") from error
            self._count(verb, counted, response.status)
            if response.status == 429 and left:
                await asyncio.sleep(_retry_after(response))
                continue
            return _checked(where, response.status, found)
        raise AssertionError


def without_fields(body: Mapping[str, Any], fields: frozenset[str], at: str = "") -> dict[str, Any]:
    """A copy without the fields of these paths (".status.attempts.ended"); items of a list have the list's own path."""

    def inner(value: object, path: str) -> object:
        if isinstance(value, Mapping):
            return without_fields(value, fields, path)
        return [inner(item, path) for item in value] if isinstance(value, list) else value

    return {name: inner(value, f"{at}.{name}") for name, value in body.items() if f"{at}.{name}" not in fields}


def _checked(where: str, code: int, found: bytes) -> Answer:
    answer = json_object(found)
    said = {"message": found[:200].decode(errors="replace")} if answer is None else answer
    if 200 <= code < 300:
        if answer is not None:
            return answer
        # For example a proxy's page, which says nothing about the cluster.
        raise Unavailable(
            where, code, "NotKubernetes", f"the answer is not from a Kubernetes API server: {said['message']}"
        )
    reason, message = (str(said.get(name) or "") for name in ("reason", "message"))
    raise ERRORS.get(code, Unavailable)(where, code, reason, message)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds to wait. The header may also hold a date, which the API server never sends."""
    try:
        return min(LONGEST_WAIT_SECONDS, max(0.0, float(response.headers.get("Retry-After", "1"))))
    except ValueError:
        return 1.0


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
