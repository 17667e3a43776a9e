"""ApiClient: requests to the API server over one aiohttp session; the hot path of the operator.

Answers are plain data. Errors carry the server's sentence, one class per way of reacting. Only 429 is repeated here,
after the time that the server asked for; everything else is repeated by the key queue, from a new observation.
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
"""of a request that is answered with 429"""
LONGEST_WAIT_SECONDS = 10.0
"""that a Retry-After is obeyed for"""
PAGE_SIZE = 50
"""of objects that are ten times as large decoded as they are sent, and then projected to a few fields"""
MOST_LISTINGS = 3
"""of one list, when its pages expire meanwhile"""
UNDECLARED = re.compile(r"(\.[\w.\[\]=\"-]+): field not declared in schema")
"""what server-side apply says to a field that an older CRD does not have; it names one or some of them"""
MOST_UNDECLARED = 32
"""tries to apply one object without the fields that were named"""
UNDECLARED_SECONDS = 300.0
"""for which they are left out from the start; then newer CRDs may be there"""
FIELD_MANAGER = "spillway-operator"
JSON_TYPE = "application/json"
APPLY_TYPE = "application/apply-patch+yaml"

T = TypeVar("T")
Answer = dict[str, Any]


class ApiError(Exception):
    """The API server did not do it. `code` is the HTTP status, 0 when there was no answer; `reason` is CamelCase."""

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
    """410: the pages of a list are too old to go on."""


class RequestRejected(ApiError):
    """400, 403, 405, 413, 422: the same request would be refused again until something else changes."""


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
    """A kind as its URLs and RBAC rules name it."""

    prefix: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """`namespace` "" for all namespaces, and for what has none. Raises Refused for what no object is called."""
        scope = ["namespaces", _segment(namespace)] if namespace else []
        below = [_segment(part) for part in (name, subresource) if part]
        return "/".join([self.prefix, *scope, self.plural, *below])


def _segment(name: str) -> str:
    """`name` as one part of a path. The API server takes an escaped slash for a slash, so that it is no way out."""
    if not is_path_segment(name):
        raise RequestRejected(
            "not sent", 0, "InvalidName", f"{name[:253]!r} names no object: '.', '..', '/' and '%' do not occur"
        )
    return quote(name, safe="")


def is_path_segment(name: str) -> bool:
    """Whether an object can have this name, as far as paths go: the API server's own rule."""
    return name not in ("", ".", "..") and "/" not in name and "%" not in name


TRAINING_JOBS = ApiResource("/apis/spillway.dev/v1alpha1", "trainingjobs")
NODE_PROFILES = ApiResource("/apis/spillway.dev/v1alpha1", "nodeprofiles")
MEMORY_PROFILES = ApiResource("/apis/spillway.dev/v1alpha1", "memoryprofiles")
JOBS = ApiResource("/apis/batch/v1", "jobs")
CONFIG_MAPS = ApiResource("/api/v1", "configmaps")
SERVICES = ApiResource("/api/v1", "services")
PODS = ApiResource("/api/v1", "pods")
CLAIMS = ApiResource("/api/v1", "persistentvolumeclaims")
NODES = ApiResource("/api/v1", "nodes")
WORKLOADS = ApiResource("/apis/kueue.x-k8s.io/v1beta2", "workloads")
EVENTS = ApiResource("/apis/events.k8s.io/v1", "events")
LEASES = ApiResource("/apis/coordination.k8s.io/v1", "leases")
ENDPOINT_SLICES = ApiResource("/apis/discovery.k8s.io/v1", "endpointslices")
TOKEN_REVIEWS = ApiResource("/apis/authentication.k8s.io/v1", "tokenreviews")

RESOURCE_OF = {"ConfigMap": CONFIG_MAPS, "Service": SERVICES, "Job": JOBS, "TrainingJob": TRAINING_JOBS}
"""kinds that a TrainingJob's children have"""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All objects of one kind, as they were at one resourceVersion."""

    resource_version: int
    items: tuple[T, ...]


class ApiClient:
    """`count(verb, resource, code)` is called once per request that went out. `seconds_left()` is the time for which
    writing is allowed: a write is not sent after it, and given up at its end."""

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
        """plural -> until when these fields are left out of what is applied"""

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
        """A path that is no resource, such as a discovery document."""
        return await self._request("get", ApiResource("", path), "GET", path)

    async def list(
        self,
        resource: ApiResource,
        namespace: str,
        project: Callable[[Answer], T],
        label_selector: str = "",
        field_selector: str = "",
    ) -> Listing[T]:
        """Every object, page by page; each is projected as its page arrives, so that no whole list is ever held."""
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
        """The whole object; `metadata.resourceVersion` in `body` is a precondition."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("update", resource, "PUT", resource.path(namespace, name), body, query)

    async def apply(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Answer:
        """Server-side apply of an object that is the operator's own."""
        return await self._apply(resource, resource.path(namespace, name), body)

    async def apply_status(self, resource: ApiResource, namespace: str, name: str, body: Mapping[str, Any]) -> Answer:
        """Server-side apply of the whole status; `metadata.uid` in `body` is a precondition."""
        return await self._apply(resource, resource.path(namespace, name, "status"), body)

    async def _apply(self, resource: ApiResource, path: str, body: Mapping[str, Any]) -> Answer:
        """Without the fields that the installed CRD does not declare: other writes lose those, an apply is refused."""
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
        """The object stays, marked, until all that it owns is gone; only the one with this uid, and only as it was
        at this resourceVersion (0 = any)."""
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
            await asyncio.sleep(0)  # a long list does not hold up the loop

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
                raise Unavailable(where, 0, "NotLeading", "not sent: another operator may lead by now")
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
        # A proxy's page, for example: nothing is known of the cluster.
        raise Unavailable(where, code, "NotKubernetes", f"no answer of an API server: {said['message']}")
    reason, message = (str(said.get(name) or "") for name in ("reason", "message"))
    raise ERRORS.get(code, Unavailable)(where, code, reason, message)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds; the header may also hold a date, which the API server never sends."""
    try:
        return min(LONGEST_WAIT_SECONDS, max(0.0, float(response.headers.get("Retry-After", "1"))))
    except ValueError:
        return 1.0


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
