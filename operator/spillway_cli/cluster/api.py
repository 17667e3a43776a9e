"""ClusterClient: the API server for commands that need a cluster. Plain dicts in, plain dicts out.

The Kubernetes client library handles credentials, certificates and proxies; it is imported only here, when needed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from spillway.errors import UserError
from spillway.extras import need
from spillway.json_text import json_object

from ..console import printable

Object = dict[str, Any]
"""An API object, parsed from JSON."""

JOBS = "/apis/spillway.dev/v1alpha1"
CORE = "/api/v1"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
TOO_MANY_REQUESTS, INTERNAL_ERROR = 429, 500
LONGEST_SAID = 1000
"""Longest server message that is printed, in characters; those of CRD validation are the longest."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NO_CLUSTER = "set KUBECONFIG or choose a --context"
READ_A_RUN = "to read a local run, give the run's directory"


class RequestDenied(UserError):
    """The API server rejected the request."""

    def __init__(self, status: int, answer: Object, path: str) -> None:
        super().__init__(sentence(status, answer, path))
        self.status = status
        self.answer = answer

    @property
    def causes(self) -> list[tuple[str, str]]:
        """(field, problem) of each rejected field."""
        found = (self.answer.get("details") or {}).get("causes") or []
        return [(cause.get("field", ""), cause.get("message", "")) for cause in found]


class Gone(UserError):
    """The TrainingJob does not exist."""


class Unreachable(UserError):
    """The API server did not answer, or is overloaded: commands that watch try again."""


def rejection(status: int, answer: Object, path: str) -> RequestDenied | Unreachable:
    """The error for an HTTP status of 400 or above: 429 and 5xx are temporary, not rejections."""
    if status == TOO_MANY_REQUESTS or status >= INTERNAL_ERROR:
        return Unreachable(f"the cluster cannot answer now: {said_in(status, answer)}; try again later")
    return RequestDenied(status, answer, path)


def sentence(status: int, answer: Object, path: str) -> str:
    """The error message for a rejected request: what the server said, and what to do."""
    said = said_in(status, answer)
    if status == 401:
        return f"not authenticated: {said}; renew the credentials in the kubeconfig"
    if status == 403:
        return f"not permitted: {said}; ask for that right, or use another --context or --namespace"
    if status == 404 and path.startswith(JOBS) and not (answer.get("details") or {}).get("name"):
        return "the cluster has no TrainingJob CRD; install Spillway first (docs/install.md)"
    return f"the cluster rejected the request: {said}"


def said_in(status: int, answer: Object) -> str:
    """The server's message as one short line without control characters."""
    said = " ".join(printable(str(answer.get("message") or "")).split())
    return (said[:LONGEST_SAID] or f"HTTP {status}").rstrip(".")


@dataclass(slots=True)
class ClusterClient:
    """One API server, with one user's rights."""

    configuration: Any
    """A kubernetes.client.Configuration."""
    namespace: str
    """The context's namespace, or "default"."""
    _rest: Any = field(init=False)

    def __post_init__(self) -> None:
        from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415

        self.configuration.retries = False  # commands that watch try again and report it
        if not self.configuration.verify_ssl:  # the kubeconfig asks for it: no warning with each request
            import urllib3  # noqa: PLC0415

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self._rest = RESTClientObject(self.configuration)

    def get(self, path: str, **query: object) -> Object:
        return self._answer("GET", path, query)

    def items(self, path: str, **query: object) -> list[Object]:
        """The objects of a collection, each with a name."""
        found = self.get(path, **query).get("items") or []
        if not isinstance(found, list) or not all(has_name(one) for one in found):
            raise Unreachable(f"{self.configuration.host}: the answer is not a list of objects; {NO_CLUSTER}")
        return found

    def get_named(self, path: str) -> Object:
        """One object, which must have a name."""
        found = self.get(path)
        if not has_name(found):
            raise Unreachable(f"{self.configuration.host}: the answer is not a Kubernetes object; {NO_CLUSTER}")
        return found

    def create(self, path: str, content: Object, **query: object) -> Object:
        return self._answer("POST", path, query, content)

    def replace(self, path: str, content: Object) -> Object:
        """Replaces the object. Rejected (409) if it changed since `content` was read."""
        return self._answer("PUT", path, {}, content)

    def delete(self, path: str, **query: object) -> None:
        self._answer("DELETE", path, query)

    def lines(self, path: str, idle_seconds: float, **query: object) -> Iterator[bytes]:
        """Yields lines of text as they arrive. Raises Unreachable after `idle_seconds` without one."""
        with self._connection():
            response = self._request("GET", path, query, None, idle_seconds)
            if response.status >= 400:
                raise rejection(response.status, as_object(response.response.data), path)
            begun = b""
            try:
                for piece in response.response.stream(2**16):
                    *lines, begun = (begun + piece).split(b"\n")
                    yield from lines
            finally:
                response.response.release_conn()
            if begun:
                yield begun

    def _answer(self, method: str, path: str, query: Mapping[str, object], content: Object | None = None) -> Object:
        with self._connection():
            response = self._request(method, path, query, content, ANSWER_SECONDS)
            found = response.response.data
        if response.status >= 400:
            raise rejection(response.status, as_object(found), path)
        if response.status >= 300 or (answer := json_object(found)) is None:
            raise Unreachable(f"{self.configuration.host} is not a Kubernetes API server: "
                              f"{said_in(response.status, as_object(found))}; {NO_CLUSTER}")  # fmt: skip
        return answer

    def _request(
        self, method: str, path: str, query: Mapping[str, object], content: Object | None, answer_seconds: float
    ) -> Any:
        url = f"{str(self.configuration.host).rstrip('/')}{path}"
        given = {name: value for name, value in query.items() if value is not None}
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json", "User-Agent": "spillway"}
        token = self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = header_value(token)
        return self._rest.request(
            method,
            f"{url}?{urlencode(given)}" if given else url,
            headers=headers,
            body=content,
            _request_timeout=(CONNECT_SECONDS, answer_seconds),
        )

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Turns every connection error into Unreachable."""
        import urllib3  # noqa: PLC0415
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415

        try:
            yield
        except (urllib3.exceptions.HTTPError, OSError, ApiException) as error:
            said = str(getattr(error, "reason", None) or error).splitlines()[-1]
            raise Unreachable(f"no cluster answers at {self.configuration.host}: {said}; {NO_CLUSTER}") from error


def header_value(token: str) -> str:
    """The token without its final line break. Raises UserError, which does not show the token, for invalid characters:
    the HTTP library's error would show it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the kubeconfig's token has invalid characters; {NO_CLUSTER}")
    return token


def has_name(found: object) -> bool:
    metadata = found.get("metadata") if isinstance(found, dict) else None
    return isinstance(metadata, dict) and isinstance(metadata.get("name"), str)


def as_object(content: bytes) -> Object:
    """The answer's JSON; any other content, such as a proxy's error page, as its message."""
    found = json_object(content)
    return {"message": content[:300].decode(errors="replace")} if found is None else found


def connect(context: str | None = None, local: str = "") -> ClusterClient:
    """Connects to the kubeconfig's cluster, or the one that this process runs in. Raises UserError if there is none;
    `local`: what its message says about a local run."""
    need("operator")
    from kubernetes.client.configuration import Configuration  # noqa: PLC0415
    from kubernetes.config import ConfigException  # noqa: PLC0415
    from yaml import YAMLError  # noqa: PLC0415

    configuration, remedy = Configuration(), f"{NO_CLUSTER}; {local}" if local else NO_CLUSTER
    try:
        namespace = load(configuration, context)
        return ClusterClient(configuration, namespace)
    except (YAMLError, TypeError, KeyError, AttributeError, UnicodeError) as error:
        # what the library raises for an invalid kubeconfig
        raise UserError(f"no cluster: {kubeconfig_files()} is not a valid kubeconfig; {remedy}") from error
    except (ConfigException, OSError, ValueError) as error:
        raise UserError(f"no cluster: {str(error).splitlines()[0].rstrip('.')}; {remedy}") from error


def kubeconfig_files() -> str:
    """One path, or several joined by the system's separator."""
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def is_configured() -> bool:
    """Whether there is a kubeconfig, or this process runs in a pod."""
    return any(Path(file).exists() for file in kubeconfig_files().split(os.pathsep)) or runs_in_pod()


def runs_in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def load(configuration: Any, context: str | None) -> str:
    """Fills `configuration`; returns the context's namespace."""
    from kubernetes import config  # noqa: PLC0415

    library: Any = config  # its functions carry no types
    files = kubeconfig_files()
    if context is None and runs_in_pod() and not any(Path(file).exists() for file in files.split(os.pathsep)):
        library.load_incluster_config(configuration)
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else "default"
    library.load_kube_config(files, context, configuration, persist_config=False)
    contexts, current = library.list_kube_config_contexts(files)
    chosen = next((one for one in contexts if one["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def jobs_path(namespace: str | None, name: str = "") -> str:
    """The API path of one TrainingJob, of those in a namespace, or (None) of all."""
    inner = "" if namespace is None else f"/namespaces/{segment('namespace', namespace)}"
    return f"{JOBS}{inner}/trainingjobs" + (f"/{segment('TrainingJob', name)}" if name else "")


def segment(kind: str, name: str) -> str:
    """`name` as one part of a path. Raises UserError if it is not a name, because the API server unescapes slashes."""
    if name in ("", ".", "..") or "/" in name or "%" in name:
        raise UserError(f"{kind} {name!r}: not a valid name; a name must not be empty, '.' or '..', or contain / or %")
    return quote(name, safe="")


def get_job(cluster: ClusterClient, namespace: str, name: str) -> Object:
    """The TrainingJob. Raises Gone when it does not exist."""
    try:
        return cluster.get_named(jobs_path(namespace, name))
    except RequestDenied as error:
        if error.status == 404 and (error.answer.get("details") or {}).get("name"):
            wanted = f"{nearest(cluster, namespace, name)}see `spillway status -A`, or give its --namespace"
            raise Gone(f"TrainingJob {name}: not found in namespace {namespace}; {wanted}") from error
        raise


def nearest(cluster: ClusterClient, namespace: str, name: str) -> str:
    """`did you mean tiny-llama? Else `; empty when no job has a similar name, or jobs cannot be listed."""
    try:
        jobs = cluster.items(jobs_path(namespace))
    except (RequestDenied, Unreachable):
        return ""
    near = difflib.get_close_matches(name, [job["metadata"]["name"] for job in jobs], n=1, cutoff=0.6)
    return f"did you mean {near[0]}? Else " if near else ""
