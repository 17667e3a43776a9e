"""Parts of the operator for tests: objects as the API server sends them, and a client of the fake API server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.client.configuration import Configuration

from fakes.fake_api import FakeApi
from spillway_operator.decide.observed import JobObject
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.kube.credentials import Credentials
from spillway_operator.kube.store import project_job

Object = dict[str, Any]
KEY = ("team", "demo")
Counts = Counter[tuple[str, str, int]]


def credentials(url: str, token: str = "secret") -> Credentials:
    configuration = Configuration()
    configuration.host = url
    configuration.api_key = {"BearerToken": f"Bearer {token}"}
    return Credentials(configuration)


@asynccontextmanager
async def fake_cluster() -> AsyncIterator[tuple[FakeApi, ApiClient, Counts]]:
    counts: Counts = Counter()
    async with (
        FakeApi().running() as api,
        ApiClient(credentials(api.url), lambda verb, resource, code: counts.update([(verb, resource, code)])) as client,
    ):
        yield api, client, counts


def with_cluster(scenario: Callable[[FakeApi, ApiClient, Counts], Awaitable[None]]) -> None:
    async def run() -> None:
        async with fake_cluster() as (api, client, counts):
            await scenario(api, client, counts)

    asyncio.run(run())


def training_job(name: str = "demo", **spec: Any) -> Object:
    return {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}


def put_job(api: FakeApi, name: str = "demo", status: Object | None = None, **spec: Any) -> JobObject:
    found = training_job(name, **spec)
    if status is not None:
        found["status"] = status
    return project_job(api.put("trainingjobs", found))


def labels(number: int = 1, name: str = "demo") -> dict[str, str]:
    return {
        "spillway.dev/job": name,
        "spillway.dev/attempt": str(number),
        "spillway.dev/job-uid": f"uid-{name}",
        "app.kubernetes.io/managed-by": "spillway",
    }


def owned(name: str = "demo", uid: str | None = None) -> list[Object]:
    return [
        {
            "apiVersion": "spillway.dev/v1alpha1",
            "kind": "TrainingJob",
            "name": name,
            "uid": uid or f"uid-{name}",
            "controller": True,
        }
    ]


def child(kind: str, number: int = 1, **parts: Any) -> Object:
    """A ConfigMap, Service or Job of an attempt of `demo`."""
    metadata = {"name": f"demo-{number}", "namespace": "team", "labels": labels(number), "ownerReferences": owned()}
    return {"kind": kind, "metadata": metadata} | parts


def pod(number: int = 1, index: int = 0, **status: Any) -> Object:
    name = f"demo-{number}-{index}"
    job = {"apiVersion": "batch/v1", "kind": "Job", "name": f"demo-{number}", "uid": f"uid-demo-{number}"}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": labels(number) | {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [job | {"controller": True}],
        },
        "spec": {"nodeName": "node-0"},
        "status": status,
    }
