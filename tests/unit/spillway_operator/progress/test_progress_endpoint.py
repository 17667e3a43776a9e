"""The progress endpoint over real TLS: who may post, what is rejected, and how often a status is written."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, child, fake_cluster, pod, put_job
from harness.patience import HANG_SECONDS, until
from spillway.api.progress import LONGEST_REPORT, TOKEN_AUDIENCE, ProgressReport
from spillway.errors import UserError
from spillway_operator.kube.api_client import ApiClient
from spillway_operator.kube.store import Key, Store, project_attempt
from spillway_operator.progress import endpoint as progress_endpoint
from spillway_operator.progress.endpoint import Certificate, ProgressEndpoint
from spillway_operator.progress.outbox import JOB_SECONDS, ProgressOutbox, Received
from spillway_operator.progress.token_reviews import ACCEPTED_SECONDS, REVIEWS_PER_SECOND, Cache, TokenReviews

REPORT = {"trainerStatus": {"progressPercentage": 42}, "spillway": {"epoch": 1, "step": 420, "steps": 1000}}


def review(pod_name: str = "demo-1-0", uid: str | None = None, **changes: Any) -> dict[str, Any]:
    extra = {
        "authentication.kubernetes.io/pod-name": [pod_name],
        "authentication.kubernetes.io/pod-uid": [uid or f"uid-{pod_name}"],
    }
    user = {"username": "system:serviceaccount:team:default", "extra": extra}
    return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user} | changes


TOKENS: dict[str, dict[str, Any]] = {
    "good": review(),
    "old": review("demo-0-0"),
    "stranger": review("stranger"),
    "gone": review("gone"),
    "namesake": review(uid="uid-of-another"),
    "other audience": review(audiences=["https://kubernetes.default.svc"]),
    "no pod": review(user={"username": "system:serviceaccount:team:default"}),
    "a person": review(user={"username": "jane", "extra": review()["user"]["extra"]}),
}


def self_signed(folder: Path, days: int) -> Path:
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days {days} -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {folder}/tls.key -out {folder}/tls.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories as the Secret would be mounted: one/ and two/."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        (folder / name).mkdir()
        self_signed(folder / name, 2)
    return folder


@pytest.mark.parametrize("days", [2, 20000])  # since 2050 the time is written with four digits
def test_the_certificates_expiry_is_what_openssl_says(days: int, tmp_path: Path) -> None:
    made = self_signed(tmp_path, days)
    command = ["openssl", "x509", "-enddate", "-noout", "-in", made / "tls.crt"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert Certificate(made).expiry == ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))


class Bench:
    """The endpoint as pods see it, on a fake API server; `seconds` is its clock."""

    def __init__(self, api: FakeApi, client: ApiClient, certificate: Certificate) -> None:
        self.api = api
        self.seconds = 1000.0
        self.knows_attempts = True
        self.is_corrected = True
        self.store = Store()
        self.certificate = certificate
        self.outbox = ProgressOutbox()
        self.enqueued: list[Key] = []
        self.codes: list[int] = []
        reviews = TokenReviews(client, self.store, lambda: self.seconds)
        self.believed: list[tuple[Key, int]] = []
        self.endpoint = ProgressEndpoint(
            reviews,
            self.outbox,
            self.enqueued.append,
            lambda key, received: self.believed.append((key, received.attempt)),
            self.codes.append,
            lambda: self.seconds,
            lambda: self.knows_attempts,
            lambda key: self.is_corrected and key == KEY,
        )
        self.url = ""
        api.review = lambda token: TOKENS.get(token, {"authenticated": False})
        self.store.put_job(put_job(api))
        for number in (0, 1):
            self.store.put_attempt(project_attempt(api.put("jobs", child("Job", number))))
            api.put("pods", pod(number))
        api.put("pods", {"metadata": {"name": "stranger", "uid": "uid-stranger"}})

    def trusting(self, authority: str | None = None) -> aiohttp.TCPConnector:
        context = ssl.create_default_context(cadata=authority or self.certificate.authority)
        return aiohttp.TCPConnector(ssl=context)

    async def post(self, token: str | None = "good", body: Any = REPORT) -> tuple[int, dict[str, Any]]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession(connector=self.trusting()) as session,
            session.post(self.url, data=data, headers=headers) as response,
        ):
            return response.status, await response.json()


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Bench]:
    async with fake_cluster() as (api, client, _):
        bench = Bench(api, client, Certificate(directory))
        runner = await bench.endpoint.serve(0, bench.certificate.context)
        port = next(address[1] for address in runner.addresses if address[0] == "0.0.0.0")
        bench.url = f"https://127.0.0.1:{port}/progress"
        try:
            yield bench
        finally:
            await runner.cleanup()


def at_the_endpoint(directory: Path, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(directory) as bench:
            await scenario(bench)

    asyncio.run(run())


def test_report_of_the_current_attempt_is_kept_and_answered_with_its_epoch(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.post() == (200, {"version": 1, "epoch": 1})
        assert bench.outbox.release(bench.seconds) == KEY
        received = bench.outbox.released(KEY)
        assert received is not None
        assert received.report.spillway is not None
        assert received.report.spillway.step == 420
        assert (received.job_uid, received.attempt) == ("uid-demo", 1)
        assert bench.codes == [200]
        assert bench.believed == [(KEY, 1)]

    at_the_endpoint(certificates / "one", scenario)


def test_live_correction_is_in_the_answer_to_every_report_that_needs_it(certificates: Path) -> None:
    volume = {"size": 400, "freeAtStart": 200, "free": 20, "numRanks": 2, "activations": 48, "hostRoom": 48}
    low = {name: figure << 20 if name != "numRanks" else figure for name, figure in volume.items()}
    enough = low | {"free": 60 << 20}

    def body(said: dict[str, int] | None, epoch: int = 1) -> dict[str, Any]:
        return {"spillway": {"epoch": epoch, "step": 1, "steps": 9, "spillVolume": said}}

    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            assert await bench.post(body=body(low)) == (200, {"version": 1, "epoch": 1, "activations": 28 << 20})
        for said in (enough, None):
            assert await bench.post(body=body(said)) == (200, {"version": 1, "epoch": 1})
        assert await bench.post("old", body=body(low, 0) | {"spillway": None}) == (200, {"version": 1, "epoch": 1})
        bench.is_corrected = False  # mode Advise
        assert await bench.post(body=body(low)) == (200, {"version": 1, "epoch": 1})
        wrong = body(low | {"free": -1})
        assert (await bench.post(body=wrong))[0] == 422

    at_the_endpoint(certificates / "one", scenario)


def test_a_script_that_knows_only_kubeflows_protocol_is_heard(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        status, _ = await bench.post(body={"trainerStatus": {"progressPercentage": 7, "metrics": []}})
        assert status == 200
        assert bench.outbox.newest(KEY) is not None

    at_the_endpoint(certificates / "one", scenario)


def test_a_zombie_is_told_the_present_epoch_and_not_believed(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.post("old", body={"trainerStatus": {}}) == (200, {"version": 1, "epoch": 1})
        assert bench.outbox.newest(KEY) is None
        assert bench.believed == []

    at_the_endpoint(certificates / "one", scenario)


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (None, 401),
        ("forged", 401),
        ("other audience", 401),
        ("no pod", 403),
        ("a person", 403),
        ("stranger", 403),
        ("gone", 403),
        ("namesake", 403),
    ],
)
def test_only_pods_of_attempts_may_post(certificates: Path, token: str | None, status: int) -> None:
    async def scenario(bench: Bench) -> None:
        code, answer = await bench.post(token)
        assert code == status
        assert len(answer["error"]) > 20
        assert bench.outbox.newest(KEY) is None

    at_the_endpoint(certificates / "one", scenario)


def test_a_job_of_somebody_elses_with_our_labels_may_not_post(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        theirs = child("Job", 1)
        theirs["metadata"]["ownerReferences"] = []
        bench.store.put_attempt(project_attempt(bench.api.put("jobs", theirs)))
        assert (await bench.post())[0] == 403

    at_the_endpoint(certificates / "one", scenario)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 422, "JSON"),
        (b"[]", 422, "object"),
        (b'{"spillway": {"epoch": 1, "step": -1, "steps": 5}}', 422, "spillway.step"),
        (b'{"spillway": {"epoch": 1, "step": 1, "steps": 5, "loss": NaN}}', 422, ""),
        (b'{"spillway": {"epoch": 2, "step": 1, "steps": 5}}', 422, "the pod belongs to attempt 1"),
        (b'{"trainerStatus": {"lastUpdatedTime": "' + b"x" * 1000 + b'"}}', 422, "lastUpdatedTime"),
        (b"[" * 60_000, 422, ""),
        (b" " * (LONGEST_REPORT + 1), 413, str(LONGEST_REPORT)),
    ],
)
def test_a_report_that_is_none_is_rejected_with_a_short_sentence(
    certificates: Path, body: bytes, status: int, sentence: str
) -> None:
    async def scenario(bench: Bench) -> None:
        code, answer = await bench.post(body=body)
        assert code == status
        assert sentence in answer["error"]
        assert len(answer["error"]) <= 500
        assert bench.outbox.newest(KEY) is None

    at_the_endpoint(certificates / "one", scenario)


def test_a_job_that_posts_too_often_is_told_to_wait(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        codes = [(await bench.post())[0] for _ in range(12)]
        assert codes == [200] * 10 + [429] * 2
        bench.seconds += 1.0
        assert [(await bench.post())[0] for _ in range(3)] == [200, 200, 429]

    at_the_endpoint(certificates / "one", scenario)


def test_connections_beyond_the_limit_are_answered_and_closed(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_endpoint, "MOST_KEPT", 2)

    async def scenario(bench: Bench) -> None:
        headers = {"Authorization": "Bearer good"}
        async with AsyncExitStack() as stack:
            connections = [aiohttp.ClientSession(connector=bench.trusting()) for _ in range(3)]
            found = []
            for session in [*connections, *connections]:
                if len(found) < len(connections):
                    await stack.enter_async_context(session)
                answer = await session.post(bench.url, json=REPORT, headers=headers)
                found.append((answer.status, answer.headers.get("Connection")))
        assert found == [(200, None), (200, None), (200, "close")] * 2

    at_the_endpoint(certificates / "one", scenario)


def test_a_token_is_reviewed_once_a_minute_and_its_pod_read_once(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for _post in range(3):
            await bench.post()
        assert (bench.api.count("POST", "tokenreviews"), bench.api.count("GET", "pods/")) == (1, 1)
        bench.seconds += ACCEPTED_SECONDS + 1.0
        await bench.post()
        assert bench.api.count("POST", "tokenreviews") == 2

    at_the_endpoint(certificates / "one", scenario)


def test_a_rejected_token_is_remembered_for_a_while(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for _post in range(3):
            assert (await bench.post("forged"))[0] == 401
        assert bench.api.count("POST", "tokenreviews") == 1

    at_the_endpoint(certificates / "one", scenario)


def test_unknown_tokens_cost_the_api_server_a_bounded_number_of_reviews(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        codes = [(await bench.post(f"forged {number}"))[0] for number in range(int(REVIEWS_PER_SECOND) + 5)]
        assert codes.count(401) == REVIEWS_PER_SECOND
        assert codes.count(429) == 5
        bench.seconds += 1.0
        assert (await bench.post())[0] == 200

    at_the_endpoint(certificates / "one", scenario)


def test_strangers_cannot_crowd_out_a_token_that_was_accepted(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert (await bench.post())[0] == 200
        bench.seconds += ACCEPTED_SECONDS + 1.0
        forged = [(await bench.post(f"forged {number}"))[0] for number in range(int(REVIEWS_PER_SECOND) + 1)]
        assert forged[-1] == 429
        before = bench.api.count("POST", "tokenreviews")
        bench.api.answers.clear()
        renewing = asyncio.create_task(bench.post())
        await until(lambda: bench.api.count("POST", "tokenreviews") > before)
        async with asyncio.timeout(HANG_SECONDS):
            assert [(await bench.post())[0] for _ in range(4)] == [200] * 4, "nobody waits for the one that asks"
        bench.api.answers.set()
        assert (await renewing)[0] == 200
        assert bench.api.count("POST", "tokenreviews") == before + 1

    at_the_endpoint(certificates / "one", scenario)


def test_a_token_that_is_accepted_no_more_loses_its_privilege(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert (await bench.post())[0] == 200
        bench.api.review = lambda _token: {"authenticated": False}
        bench.seconds += ACCEPTED_SECONDS + 1.0
        assert (await bench.post())[0] == 401
        bench.seconds += ACCEPTED_SECONDS
        for number in range(int(REVIEWS_PER_SECOND)):
            await bench.post(f"forged {number}")
        assert (await bench.post())[0] == 429

    at_the_endpoint(certificates / "one", scenario)


def test_without_the_api_server_a_post_is_told_to_come_again(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.api.fail("POST", "tokenreviews", 500)
        assert (await bench.post())[0] == 503
        assert (await bench.post())[0] == 200

    at_the_endpoint(certificates / "one", scenario)


def test_post_we_failed_to_verify_restarts_the_hearing_time(certificates: Path) -> None:
    """Silence within that time says something about a trainer; before it, nothing does."""

    async def scenario(bench: Bench) -> None:
        bench.seconds += 500.0
        assert bench.endpoint.hearing_seconds() == 500.0
        await bench.post(token=None)
        assert bench.endpoint.hearing_seconds() == 500.0, "a stranger's post is no reason"
        bench.api.fail("POST", "tokenreviews", 500, times=9)
        assert (await bench.post())[0] == 503
        assert bench.endpoint.hearing_seconds() == 0.0
        bench.seconds += 7.0
        assert bench.endpoint.hearing_seconds() == 7.0

    at_the_endpoint(certificates / "one", scenario)


def test_who_else_was_heard_is_known(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        other = ("team", "another")
        assert bench.endpoint.others_silent_seconds(KEY) == float("inf")
        await bench.post()
        bench.seconds += 9.0
        assert bench.endpoint.others_silent_seconds(KEY) == float("inf"), "its own post is no other's"
        assert bench.endpoint.others_silent_seconds(other) == 9.0

    at_the_endpoint(certificates / "one", scenario)


def test_reports_get_503_not_a_denial_until_the_attempts_are_known(certificates: Path) -> None:
    """As in the first second of an operator that begins to lead."""

    async def scenario(bench: Bench) -> None:
        bench.knows_attempts = False
        bench.seconds += 500.0
        assert (await bench.post())[0] == 503
        assert bench.endpoint.hearing_seconds() == 0.0
        assert bench.api.count("POST", "tokenreviews") == 0
        bench.knows_attempts = True
        assert (await bench.post())[0] == 200

    at_the_endpoint(certificates / "one", scenario)


def test_an_endpoint_that_serves_nothing_hears_nothing() -> None:
    unused: Any = None
    endpoint = ProgressEndpoint(unused, ProgressOutbox(), unused, unused, unused)
    assert endpoint.hearing_seconds() is None


def test_other_paths_and_methods_answer_in_json(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with aiohttp.ClientSession(connector=bench.trusting()) as session:
            async with session.get(bench.url) as response:
                assert (response.status, "error" in await response.json()) == (405, True)
            async with session.post(bench.url + "/more") as response:
                assert (response.status, "error" in await response.json()) == (404, True)
        assert bench.codes == [405, 404]

    at_the_endpoint(certificates / "one", scenario)


def test_plain_http_is_not_answered(certificates: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post(bench.url.replace("https:", "http:"))

    at_the_endpoint(certificates / "one", scenario)


def test_a_renewed_certificate_is_used_for_new_connections(certificates: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    shutil.copytree(certificates / "one", mounted)
    old = (certificates / "one" / "ca.crt").read_text()

    async def scenario(bench: Bench) -> None:
        assert (await bench.post())[0] == 200
        (mounted / "tls.key").write_bytes((certificates / "two" / "tls.key").read_bytes())
        bench.certificate.reload()  # only half of it is there yet
        assert (await bench.post())[0] == 200
        for name in ("tls.crt", "ca.crt"):
            (mounted / name).write_bytes((certificates / "two" / name).read_bytes())
        bench.certificate.reload()
        assert bench.certificate.authority == (certificates / "two" / "ca.crt").read_text()
        assert (await bench.post())[0] == 200
        async with aiohttp.ClientSession(connector=bench.trusting(old)) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.post(bench.url)

    at_the_endpoint(mounted, scenario)


def test_a_directory_without_a_certificate_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the directory must contain tls\.crt, tls\.key and ca\.crt"):
        Certificate(tmp_path)


def test_the_cache_of_tokens_is_bounded() -> None:
    cache: Cache[int] = Cache(3)
    for number in range(10):
        cache.put(bytes([number]), number, expiry=10.0)
    assert len(cache) == 3
    assert cache.get(b"\x09", now=5.0) == 9
    assert cache.get(b"\x09", now=10.0) is None


# --- when a report is written -----------------------------------------------------------------------------------------


def received(
    step: int, attempt: int = 1, steps: int = 1000, uid: str = "uid-demo", last_step_time: float = 1e9
) -> Received:
    said = {"epoch": attempt, "step": step, "steps": steps, "lastStepTime": last_step_time}
    report = ProgressReport.model_validate({"spillway": said})
    return Received(report, uid, attempt, "2026-11-21T12:00:00Z")


def write(outbox: ProgressOutbox, key: Key, now: float) -> Received | None:
    """As the worker does with what was released."""
    found = outbox.released(key)
    if found is not None:
        outbox.written(key, found, now)
    return found


def test_first_report_is_released_at_once_and_the_next_after_15_seconds() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    assert outbox.release(100.0) == KEY
    write(outbox, KEY, 100.0)
    outbox.put(KEY, received(2), now=101.0)
    outbox.put(KEY, received(3), now=102.0)
    assert outbox.release(114.9) is None
    assert outbox.release(100.0 + JOB_SECONDS) == KEY
    found = write(outbox, KEY, 115.0)
    assert found is not None
    assert found.report.spillway is not None
    assert found.report.spillway.step == 3
    assert outbox.seconds_to_next(115.0) is None


def test_the_report_after_the_last_step_does_not_wait() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    assert outbox.release(100.0) == KEY
    write(outbox, KEY, 100.0)
    outbox.put(KEY, received(1000), now=101.0)
    assert outbox.release(101.0) == KEY
    write(outbox, KEY, 101.0)
    outbox.put(KEY, received(1000), now=102.0)  # but only once
    assert outbox.release(102.0) is None


def test_the_report_after_the_first_step_of_an_attempt_does_not_wait() -> None:
    """Also of one that resumes: its first report says where it begins."""
    outbox = ProgressOutbox()
    for attempt, begins_at, now in ((1, 0, 100.0), (2, 71, 103.0)):
        for step, at, last_step_time in ((begins_at, now, 0.0), (begins_at + 1, now + 1, 1e9)):
            outbox.put(KEY, received(step, attempt, last_step_time=last_step_time), now=at)
            assert outbox.release(at) == KEY
            write(outbox, KEY, at)
    outbox.put(KEY, received(73, 2), now=105.0)
    assert outbox.release(105.0) is None
    assert outbox.release(104.0 + JOB_SECONDS) == KEY


def test_a_job_is_written_four_times_a_minute_however_often_it_posts() -> None:
    outbox, writes = ProgressOutbox(), 0
    for tenth in range(600):
        now = 100.0 + tenth / 10
        outbox.put(KEY, received(tenth), now)
        if outbox.release(now) is not None:
            writes += 1
            write(outbox, KEY, now)
    assert writes == 4


def test_reports_of_all_jobs_are_written_ten_per_second_in_arrival_order() -> None:
    outbox = ProgressOutbox()
    keys = [("team", f"job-{number}") for number in range(100)]
    for key in keys:
        outbox.put(key, received(1), now=100.0)
    released = []
    for hundredth in range(1000):
        now = 100.0 + hundredth / 100
        if (key := outbox.release(now)) is not None:
            released.append((now, key))
            write(outbox, key, now)
    assert [key for _, key in released] == keys
    assert all(later - earlier > 0.099 for (earlier, _), (later, _) in pairwise(released))


def test_a_report_that_went_along_with_another_write_is_not_written_again() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    assert outbox.release(100.0) == KEY
    write(outbox, KEY, 100.0)
    outbox.put(KEY, received(2), now=101.0)
    newest = outbox.newest(KEY)
    assert newest is not None
    outbox.written(KEY, newest, now=102.0)
    assert outbox.newest(KEY) is None
    assert outbox.release(200.0) is None


def test_a_report_that_came_during_a_write_waits_for_the_next_turn() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    outbox.release(100.0)
    first = outbox.released(KEY)
    assert first is not None
    outbox.put(KEY, received(2), now=100.1)
    outbox.written(KEY, first, now=100.2)
    assert outbox.release(101.0) is None
    assert outbox.release(100.2 + JOB_SECONDS) == KEY


def test_a_place_in_the_queue_that_was_given_up_releases_nothing() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    assert outbox.release(100.0) == KEY
    write(outbox, KEY, 100.0)
    second = received(2)
    outbox.put(KEY, second, now=101.0)  # its turn would be at 115
    outbox.written(KEY, second, now=114.0)
    outbox.put(KEY, received(3), now=114.5)
    assert outbox.release(115.0) is None
    assert outbox.release(114.0 + JOB_SECONDS) == KEY


def test_a_namesake_waits_for_nothing_that_its_predecessor_wrote() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    assert outbox.release(100.0) == KEY
    write(outbox, KEY, 100.0)
    outbox.put(KEY, received(2), now=101.0)
    outbox.put(KEY, received(1, uid="uid-of-the-namesake"), now=102.0)
    assert outbox.release(102.0) == KEY
    found = outbox.released(KEY)
    assert found is not None
    assert found.job_uid == "uid-of-the-namesake"


def test_a_forgotten_job_is_not_released() -> None:
    outbox = ProgressOutbox()
    outbox.put(KEY, received(1), now=100.0)
    outbox.forget(KEY)
    assert outbox.release(100.0) is None
    assert len(outbox) == 0


def test_the_flusher_releases_what_is_posted() -> None:
    async def scenario() -> None:
        async with fake_cluster() as (_, client, _counts):
            outbox, enqueued = ProgressOutbox(), asyncio.Queue[Key]()
            endpoint = ProgressEndpoint(
                TokenReviews(client, Store()), outbox, enqueued.put_nowait, lambda *_: None, lambda _code: None
            )
            flusher = asyncio.create_task(endpoint.flush())
            await asyncio.sleep(0)
            outbox.put(KEY, received(1), endpoint._clock())
            endpoint._arrived.set()
            assert await asyncio.wait_for(enqueued.get(), 5.0) == KEY
            flusher.cancel()

    asyncio.run(scenario())


def raw_post(bench: Bench, head: bytes, body: bytes, hangs_up: bool = False) -> bytes:
    """What is answered to these bytes; nothing where the sender hangs up after them."""
    port = int(bench.url.split(":")[2].split("/")[0])
    context = ssl.create_default_context(cadata=bench.certificate.authority)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        secure.sendall(b"POST /progress HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + body)
        return b"" if hangs_up else secure.recv(65536)


def test_bytes_that_are_no_text_are_no_token_and_end_no_time_of_hearing(certificates: Path) -> None:
    """Anybody can send them: a stranger must not be able to keep stalls of other jobs from being seen."""

    async def scenario(bench: Bench) -> None:
        bench.seconds += 500.0
        answer = await asyncio.to_thread(
            raw_post, bench, b"Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n", b"{}"
        )
        assert b" 401 " in answer.splitlines()[0], answer
        assert bench.endpoint.hearing_seconds() == 500.0

    at_the_endpoint(certificates / "one", scenario)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 5000\r\n", b'{"trainerStatus": {}}'),
        (b"Content-Length: 21\r\nContent-Encoding: gzip\r\n", b'{"trainerStatus": {}}'),
        (b"Transfer-Encoding: chunked\r\n", b"zzzz\r\nnonsense"),
    ],
)
def test_a_body_that_cannot_be_read_is_the_senders_fault(certificates: Path, head: bytes, body: bytes) -> None:
    """A trainer that dies while it posts, or one that means harm, ends no time of hearing either."""

    async def scenario(bench: Bench) -> None:
        bench.seconds += 500.0
        await asyncio.to_thread(raw_post, bench, b"Authorization: Bearer good\r\n" + head, body, hangs_up=True)
        await until(lambda: bench.codes or b"chunked" in head)  # aiohttp itself answers what is no HTTP
        assert all(400 <= code < 500 for code in bench.codes)
        assert bench.endpoint.hearing_seconds() == 500.0

    at_the_endpoint(certificates / "one", scenario)


def test_a_pod_where_nothing_is_served_is_a_stranger(certificates: Path) -> None:
    """The operator may not even look at pods there; that says nothing about those whom it serves."""

    async def scenario(bench: Bench) -> None:
        bench.seconds += 500.0
        elsewhere = review()
        elsewhere["user"]["username"] = "system:serviceaccount:elsewhere:default"
        bench.api.review = lambda token: elsewhere
        bench.api.fail("GET", "pods/", 403, times=9)
        assert (await bench.post())[0] == 403
        assert (await bench.post())[0] == 403
        assert bench.endpoint.hearing_seconds() == 500.0
        assert bench.api.count("POST", "tokenreviews") == 1, "the answer is kept"

    at_the_endpoint(certificates / "one", scenario)
