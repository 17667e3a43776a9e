"""The OperatorConfig: read once in a while, joined to jobs when they are looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import Counts, put_job, with_cluster
from spillway.units import GIB
from spillway_operator.kube.api_client import ApiClient, Unavailable
from spillway_operator.measured.operator_config import OperatorConfig


def put(api: FakeApi, **spec: Any) -> None:
    api.put("operatorconfigs", {"metadata": {"name": "default"}, "spec": spec})


def test_jobs_are_looked_at_with_what_they_inherit_and_again_when_that_changes() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        changes = list[int]()
        config = OperatorConfig(client, True, lambda: changes.append(1))
        job = put_job(api)
        await config.load()
        assert config.applied(job) == (job, ())
        for image, count in (("one", 1), ("one", 1), ("two", 2)):
            put(api, jobDefaults={"pod": {"image": image}})
            await config.load()
            merged, inherited = config.applied(job)
            assert (json.loads(merged.spec)["pod"]["image"], inherited, len(changes)) == (image, ("pod.image",), count)
            assert config.applied(job)[0] is merged
        config.forget(job.key)
        api.remove("operatorconfigs", "", "default")
        await config.load()
        assert config.applied(job) == (job, ())

    with_cluster(scenario)


@pytest.mark.parametrize("code", [403, 404])
def test_without_the_right_or_the_kind_nothing_is_set(code: int) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        config = OperatorConfig(client, True, lambda: None)
        put(api, jobDefaults={"pod": {"image": "one"}})
        api.fail("GET", "/operatorconfigs", code)
        await config.load()
        assert config.applied(put_job(api))[1] == ()

    with_cluster(scenario)


def test_an_operator_without_the_right_does_not_ask() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        put(api, jobDefaults={"pod": {"image": "one"}})
        await OperatorConfig(client, False, lambda: None).load()
        assert api.count("GET", "operatorconfigs") == 0

    with_cluster(scenario)


def test_what_was_read_before_stays_if_it_cannot_be_read() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        config = OperatorConfig(client, True, lambda: None)
        put(api, jobDefaults={"pod": {"image": "one"}})
        await config.load()
        put(api, jobDefaults={"unheard": "of"})
        await config.load()
        api.fail("GET", "/operatorconfigs", 500)
        with pytest.raises(Unavailable):
            await config.load()
        assert config.applied(put_job(api))[1] == ("pod.image",)

    with_cluster(scenario)


def test_a_node_class_is_a_node_of_the_catalog_with_the_sizes_that_it_names() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        config = OperatorConfig(client, True, lambda: None)
        whole = {"name": "whole", "node": "8xh100", "labels": {"pool": "h100"}}
        sized = {"name": "sized", "node": "cpu", "cpu": "4", "memory": "32Gi", "ephemeralStorage": "1Ti"}
        put(api, nodeClasses=[whole, sized, {"name": "odd", "node": "8xunheard"}])
        await config.load()
        first, second = config.declared
        assert (first.name, first.allocatable_devices, first.labels) == (
            "a new whole", {"nvidia.com/gpu": 8}, {"pool": "h100"},
        )  # fmt: skip
        assert first.profile is not None and first.allocatable_memory_bytes == first.profile.host_bytes
        assert (second.allocatable_cores, second.allocatable_memory_bytes) == (4.0, 32 * GIB)
        assert second.allocatable_devices == {}

    with_cluster(scenario)
