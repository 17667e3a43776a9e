"""Requests to the API server: what is repeated, what is raised, what is counted."""

from __future__ import annotations

import asyncio
import time

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import Counts, credentials, with_cluster
from harness.patience import HANG_SECONDS
from spillway_operator.kube import api_client
from spillway_operator.kube.api_client import (
    CLAIMS,
    CONFIG_MAPS,
    JOBS,
    PAGE_SIZE,
    TRAINING_JOBS,
    ApiClient,
    ApiError,
    Conflict,
    Expired,
    NotFound,
    RequestRejected,
    Unavailable,
)


def name_of(found: dict[str, dict[str, str]]) -> str:
    return found["metadata"]["name"]


def test_request_has_the_token_and_is_counted_by_verb_resource_and_code() -> None:
    async def scenario(api: FakeApi, client: ApiClient, counts: Counts) -> None:
        api.put("configmaps", {"metadata": {"name": "a"}})
        assert name_of(await client.get(CONFIG_MAPS, "team", "a")) == "a"
        with pytest.raises(NotFound):
            await client.get(CONFIG_MAPS, "team", "b")
        assert api.authorizations == ["Bearer secret", "Bearer secret"]
        assert dict(counts) == {("get", "configmaps", 200): 1, ("get", "configmaps", 404): 1}

    with_cluster(scenario)


@pytest.mark.parametrize("name", ["..", ".", "../../victim/configmaps/secret-plan", "a/b", "%2e%2e", "a%2fb"])
def test_a_name_that_would_lead_to_another_path_is_never_sent(name: str) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        for namespace, called in (("team", name), (name, "a")):
            with pytest.raises(RequestRejected, match="is not a valid name"):
                await client.get(CLAIMS, namespace, called)
        assert api.requests == []

    with_cluster(scenario)


def test_a_name_cannot_add_a_query_or_a_fragment() -> None:
    assert CLAIMS.path("team", "a?watch=true#b c").endswith("/persistentvolumeclaims/a%3Fwatch%3Dtrue%23b%20c")
    assert CLAIMS.path("team", "my.claim-1").endswith("/namespaces/team/persistentvolumeclaims/my.claim-1")


def test_429_is_repeated_after_the_time_that_the_server_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    asleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asleep(0)

    async def scenario(api: FakeApi, client: ApiClient, counts: Counts) -> None:
        api.fail("POST", "configmaps", 429, Retry_After="3")
        api.fail("POST", "configmaps", 429, Retry_After="3600")
        monkeypatch.setattr(api_client.asyncio, "sleep", sleep)
        await client.create(CONFIG_MAPS, "team", {"metadata": {"name": "a"}})
        monkeypatch.undo()
        assert [wait for wait in waits if wait] == [3.0, api_client.LONGEST_WAIT_SECONDS]
        assert counts["create", "configmaps", 429] == 2
        assert counts["create", "configmaps", 201] == 1

    with_cluster(scenario)


def test_429_for_ever_is_raised() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        api.fail("GET", "jobs", 429, times=api_client.MOST_TRIES, Retry_After="0")
        with pytest.raises(Unavailable):
            await client.get(JOBS, "team", "a")

    with_cluster(scenario)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, RequestRejected),
        (403, RequestRejected),
        (409, Conflict),
        (422, RequestRejected),
        (500, Unavailable),
        (503, Unavailable),
        (401, Unavailable),
    ],
)
def test_each_way_of_failing_has_its_class_and_the_servers_sentence(code: int, error: type[ApiError]) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        api.fail("POST", "jobs", code)
        with pytest.raises(error, match=f"create /apis/batch/v1/namespaces/team/jobs: {code} .*planned"):
            await client.create(JOBS, "team", {"metadata": {"name": "a"}})

    with_cluster(scenario)


def test_a_server_that_does_not_answer_is_unavailable_and_counted_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "TIMEOUT_SECONDS", 0.05)

    async def scenario(api: FakeApi, client: ApiClient, counts: Counts) -> None:
        api.answers.clear()
        with pytest.raises(Unavailable, match="no answer TimeoutError"):
            await client.get(JOBS, "team", "a")
        assert counts["get", "jobs", 0] == 1

    with_cluster(scenario)


def test_an_answer_that_is_no_json_is_an_error_with_its_beginning() -> None:
    with pytest.raises(Unavailable, match="<html>"):
        api_client._checked("get /x", 502, b"<html>Bad gateway")


@pytest.mark.parametrize("page", [b"<html>Please log in", b"", b"[]", b"null", b'{"items": [', b"[" * 200_000])
def test_a_page_that_no_api_server_wrote_is_no_answer_whatever_its_code(page: bytes) -> None:
    """Else a proxy in the way would end the process: nobody expects a list without `metadata`."""
    with pytest.raises(Unavailable, match="not from a Kubernetes API server"):
        api_client._checked("list /x", 200, page)


def test_a_list_is_read_in_pages() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        for number in range(2 * PAGE_SIZE + 1):
            api.put("trainingjobs", {"metadata": {"name": f"job-{number}"}})
        found = await client.list(TRAINING_JOBS, "", name_of)
        assert len(set(found.items)) == 2 * PAGE_SIZE + 1
        assert api.count("GET", "trainingjobs") == 3
        assert found.resource_version > 1000

    with_cluster(scenario)


def test_a_list_whose_pages_expire_begins_again() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        for number in range(PAGE_SIZE + 1):
            api.put("trainingjobs", {"metadata": {"name": f"job-{number}"}})
        api.fail("GET", "trainingjobs", 410)
        found = await client.list(TRAINING_JOBS, "team", name_of)
        assert len(found.items) == len(set(found.items)) == PAGE_SIZE + 1
        api.fail("GET", "trainingjobs", 410, times=3)
        with pytest.raises(Expired):
            await client.list(TRAINING_JOBS, "team", name_of)

    with_cluster(scenario)


def test_a_list_can_be_selected_by_label() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        api.put("jobs", {"metadata": {"name": "ours", "labels": {"a": "b"}}})
        api.put("jobs", {"metadata": {"name": "theirs"}})
        assert (await client.list(JOBS, "", name_of, "a=b")).items == ("ours",)

    with_cluster(scenario)


def test_a_field_that_the_crd_lacks_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        api.put("trainingjobs", {"metadata": {"name": "a"}})
        body = {"metadata": {"name": "a"}, "status": {"state": "Running", "plan": {"node": "x"}}}
        api.undeclared = ["plan.node"]
        await client.apply_status(TRAINING_JOBS, "team", "a", body)
        assert api.get("trainingjobs", "a")["status"] == {"state": "Running", "plan": {}}
        api.undeclared = []  # newer CRDs were installed
        await client.apply_status(TRAINING_JOBS, "team", "a", body)
        assert api.get("trainingjobs", "a")["status"] == {"state": "Running", "plan": {}}
        later = time.monotonic() + api_client.UNDECLARED_SECONDS + 1
        monkeypatch.setattr(api_client, "monotonic", lambda: later)
        await client.apply_status(TRAINING_JOBS, "team", "a", body)
        assert api.get("trainingjobs", "a")["status"] == body["status"]

    with_cluster(scenario)


def test_an_error_that_names_no_new_field_is_no_reason_to_leave_one_out() -> None:
    async def scenario(api: FakeApi, client: ApiClient, counts: Counts) -> None:
        api.put("trainingjobs", {"metadata": {"name": "a"}})
        api.fail("PATCH", "trainingjobs", 500)
        with pytest.raises(Unavailable):
            await client.apply_status(TRAINING_JOBS, "team", "a", {"metadata": {"name": "a"}, "status": {}})
        assert counts["patch", "trainingjobs/status", 500] == 1

    with_cluster(scenario)


def test_fields_are_left_out_below_lists_too() -> None:
    body = {"status": {"conditions": [{"type": "Ready", "new": 1}, {"type": "Failed"}], "plan": {"new": 2}}}
    assert api_client.without_fields(body, frozenset({".status.conditions.new"})) == {
        "status": {"conditions": [{"type": "Ready"}, {"type": "Failed"}], "plan": {"new": 2}}
    }
    assert body["status"]["conditions"][0] == {"type": "Ready", "new": 1}, "a copy"


def test_fenced_client_sends_no_write_and_abandons_one_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence of a leader: `seconds_left` comes from its lease."""
    monkeypatch.setattr(api_client, "TIMEOUT_SECONDS", 10 * HANG_SECONDS)
    left = 0.0

    async def scenario() -> None:
        nonlocal left
        async with FakeApi().running() as api, ApiClient(credentials(api.url), lambda *_: None, lambda: left) as client:
            config_map, other = ({"metadata": {"name": name, "namespace": "team"}} for name in ("one", "other"))
            with pytest.raises(Unavailable, match="another operator may be the leader now"):
                await client.create(CONFIG_MAPS, "team", config_map)
            assert api.requests == []
            await client.list(CONFIG_MAPS, "team", dict)
            left = 0.1
            api.answers.clear()
            with pytest.raises(Unavailable):
                async with asyncio.timeout(HANG_SECONDS):
                    await client.create(CONFIG_MAPS, "team", config_map)
            api.answers.set()
            left = HANG_SECONDS
            await client.create(CONFIG_MAPS, "team", other)

    asyncio.run(scenario())
