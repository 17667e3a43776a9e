"""Progress goes to the pod that leads: the EndpointSlice that only it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import Counts, with_cluster
from harness.patience import until
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.progress import address as progress_address
from spillway_operator.progress.address import ProgressAddress


def service(api: FakeApi) -> None:
    api.put("services", {"metadata": {"name": "spillway", "namespace": "system", "uid": "service-uid"}})


def addresses(api: FakeApi, name: str = "spillway-leader-ipv4") -> list[str]:
    found = api.get("endpointslices", name, "system")
    return [address for endpoint in found["endpoints"] for address in endpoint["addresses"]]


async def runs_until(address: ProgressAddress, reached: Callable[[], object]) -> None:
    task = asyncio.create_task(address.run())
    await until(reached)
    task.cancel()


def test_the_slice_names_the_leaders_pod_and_belongs_to_the_service() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        service(api)
        address = ProgressAddress(client, "system", "spillway", "10.1.2.3", 8443)
        await runs_until(address, lambda: ("endpointslices", "system", "spillway-leader-ipv4") in api.objects)
        found = api.get("endpointslices", "spillway-leader-ipv4", "system")
        assert addresses(api) == ["10.1.2.3"]
        assert (found["addressType"], found["ports"]) == (
            "IPv4", [{"name": "progress", "port": 8443, "protocol": "TCP"}],
        )  # fmt: skip
        assert found["metadata"]["labels"] == {
            "kubernetes.io/service-name": "spillway",
            "endpointslice.kubernetes.io/managed-by": "spillway-operator",
        }
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["blockOwnerDeletion"]) == ("Service", "service-uid", False)

    with_cluster(scenario)


def test_a_slice_that_says_so_already_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look has ended when the next one reads."""
    monkeypatch.setattr(progress_address, "LOOK_SECONDS", 0.0)

    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        service(api)
        address = ProgressAddress(client, "system", "spillway", "10.1.2.3", 8443)
        for _ in range(2):
            reads = api.count("GET", "endpointslices")
            await runs_until(address, lambda reads=reads: api.count("GET", "endpointslices") > reads + 1)
        assert api.count("PATCH", "endpointslices") == 1

    with_cluster(scenario)


def test_next_leader_takes_the_address_over_and_a_leaving_one_withdraws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_address, "RETRY_SECONDS", 0.01)

    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        service(api)
        first = ProgressAddress(client, "system", "spillway", "10.1.2.3", 8443)
        second = ProgressAddress(client, "system", "spillway", "10.1.2.4", 8443)
        await runs_until(first, lambda: ("endpointslices", "system", first.name) in api.objects)
        await first.withdraw()
        assert addresses(api) == []
        api.fail("GET", "endpointslices", 500)
        await runs_until(second, lambda: addresses(api) == ["10.1.2.4"])

    with_cluster(scenario)


def test_each_family_of_addresses_has_a_slice_of_its_own() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        address = ProgressAddress(client, "system", "spillway", "fd00::7", 8443)
        assert address.name == "spillway-leader-ipv6"
        assert address.slice("u", ("fd00::7",))["addressType"] == "IPv6"

    with_cluster(scenario)
