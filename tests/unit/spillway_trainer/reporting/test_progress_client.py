"""Rank 0 tells the operator how far it is: the newest figures, seldom, and training never notices.

Against a server of the standard library; a test that needs a certificate makes one with openssl.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from fakes.progress_endpoint import Operator
from harness import local_runs
from harness.patience import HANG_SECONDS, wait_until
from spillway.api.field_types import MAX_MEMBERS
from spillway.api.job_file import JobFile
from spillway.api.model import Evaluation
from spillway.api.progress import LONGEST_REASON, LONGEST_REPORT, MemberProgress, MemberState, SpillVolume
from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan, Tier, TierBytes
from spillway_trainer.ending import shortened
from spillway_trainer.reporting import progress_client
from spillway_trainer.reporting.progress_client import Endpoint, Figures, ProgressClient, endpoint, progress_report

PLAN = local_runs.spread_plan()


@pytest.fixture
def operator() -> Iterator[Operator]:
    made = Operator()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_client, "POST_INTERVAL_SECONDS", 0.05)


class Watched(threading.Event):
    """Says how long it was waited for at most, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.limits.append(timeout)
        return super().wait(timeout)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's two events are."""
    monkeypatch.setattr(progress_client, "threading", SimpleNamespace(Event=Watched, Thread=threading.Thread))


def wait_for(operator: Operator, num_reports: int) -> None:
    wait_until(lambda: len(operator.reports) >= num_reports)


def job(tmp_path: Path) -> JobFile:
    return local_runs.job_file(tmp_path, tmp_path, tmp_path, epoch=1)


def job_of(tmp_path: Path, steps: int) -> JobFile:
    made = job(tmp_path)
    training = made.spec.training.model_copy(update={"steps": steps})
    data = made.spec.data.model_copy(update={"evaluation": None})
    return made.model_copy(update={"spec": made.spec.model_copy(update={"training": training, "data": data})})


@dataclass
class Started:
    client: ProgressClient
    said: list[str]


def start(operator: Operator, tmp_path: Path, token: Path | None = None, resumed_step: int = 0) -> Started:
    said: list[str] = []
    where = Endpoint(urlsplit(f"http://127.0.0.1:{operator.port}/progress"), token, None)
    return Started(ProgressClient(where, job(tmp_path), PLAN, resumed_step, said.append), said)


def step(number: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": number, "loss": 2.5, "learning_rate": 1e-3, "gradient_norm": 1.0, "clip_factor": 1.0, "tokens": 100,
        "step_seconds": 0.5, "tier_peak_bytes": {"device": 12, "host": 22},
    }  # fmt: skip
    return StepMetrics(**values | changes)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_beginning_and_end_are_told_at_once_and_nothing_between(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: None
) -> None:
    monkeypatch.setattr(progress_client, "POST_INTERVAL_SECONDS", 600.0)
    started = start(operator, tmp_path, resumed_step=3)
    pause: Any = started.client._closing
    wait_until(lambda: pause.limits == [600.0])
    for number in range(4, 9):
        started.client.step(step(number))
    started.client.close()
    assert operator.steps == [3, 8]


def test_the_newest_figures_win(operator: Operator, tmp_path: Path) -> None:
    operator.answers.clear()
    started = start(operator, tmp_path)
    wait_for(operator, 1)
    for number in range(1, 8):
        started.client.step(step(number))
    operator.answers.set()
    wait_for(operator, 2)
    assert operator.steps == [0, 7]
    started.client.close()


def test_nothing_new_is_not_told(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: None
) -> None:
    """Without a pause: who told it would tell it many times before the next step is there."""
    monkeypatch.setattr(progress_client, "POST_INTERVAL_SECONDS", 0.0)
    started = start(operator, tmp_path)
    for number in range(1, 11):
        wait_for(operator, number)
        started.client.step(step(number))
    started.client.close()
    assert operator.steps in ([*range(11)], [*range(11), 10])
    news: Any = started.client._news
    assert set(news.limits) == {None}, "it waits for news as long as there are none"


def test_a_report_says_all_that_the_operator_shows(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    started.client.step(step(5, tier_peak_bytes={"device": 30, "host": 1}))
    started.client.step(step(6))
    started.client.evaluation(2.25)
    started.client.checkpoint(6)
    started.client.close()
    report = operator.reports[-1]
    assert report.spillway is not None
    told = report.spillway
    assert (told.epoch, told.step, told.steps, told.loss, told.tokens_per_second) == (1, 6, 12, 2.5, 200.0)
    assert (told.peak.device, told.peak.host, told.budget.device) == (30, 22, PLAN.budget[Tier.DEVICE])
    assert told.checkpoint is not None
    assert told.checkpoint.path == str(tmp_path / "checkpoints" / "step-6.e1")
    assert report.trainer_status.progress_percentage == 50
    assert {one.name: one.value for one in report.trainer_status.metrics}["evaluation_loss"] == "2.25"


@pytest.mark.parametrize(
    ("built_in_bytes", "first_step", "committed", "peak", "is_whole"),
    [
        (1000, 0, 6, 4321, True),
        (5000, 3, 6, 5000, True),
        (0, 0, 6, 4321, False),
        (1000, 4, 6, 4321, False),
        (1000, 0, 5, 4321, False),
        (1000, 0, 0, 4321, False),
    ],
    ids=["all", "an-earlier-pod-built", "nobody-knows", "resumed-late", "not-over", "no-checkpoint"],
)
def test_pod_peak_is_whole_only_after_all_memory_heavy_work_was_done(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    built_in_bytes: int, first_step: int, committed: int, peak: int, is_whole: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress_client, "peak_memory_bytes", lambda root: 4321)
    where = Endpoint(urlsplit(f"http://127.0.0.1:{operator.port}/progress"), None, None)
    asked = job_of(tmp_path, steps=6)
    client = ProgressClient(where, asked, PLAN, first_step, lambda line: None, built_in_bytes=built_in_bytes)
    if committed:
        client.checkpoint(committed)
    client.close()
    told = operator.reports[-1].spillway
    assert told is not None
    assert (told.pod.peak, told.pod.is_whole) == (peak, is_whole)


def test_a_job_that_evaluates_has_not_shown_all_before_it_did(tmp_path: Path) -> None:
    asked = job_of(tmp_path, steps=6)
    data = asked.spec.data.model_copy(update={"evaluation": Evaluation.model_validate({"everySteps": 2})})
    asked = asked.model_copy(update={"spec": asked.spec.model_copy(update={"data": data})})
    figures = Figures(6, checkpoint=(6, 0.0), built_in_bytes=1)
    assert not progress_report(figures, asked, PLAN, 5).spillway.pod.is_whole  # type: ignore[union-attr]
    evaluated = replace(figures, evaluation_loss=1.0)
    assert progress_report(evaluated, asked, PLAN, 5).spillway.pod.is_whole  # type: ignore[union-attr]


def test_where_the_kernel_does_not_say_nothing_is_reported_of_the_pod(tmp_path: Path) -> None:
    told = progress_report(Figures(6, built_in_bytes=77), job_of(tmp_path, 6), PLAN, 0).spillway
    assert told is not None and told.pod.peak == 0


def test_a_sweep_tells_its_members_and_counts_their_steps_together(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    members = (
        MemberProgress(name="a", step=6, num_steps=12, loss=2.0, objective=3.0, state=MemberState.RUNNING),
        MemberProgress(name="b", step=4, num_steps=12, state=MemberState.STOPPED, reason="stopped after 4 steps"),
    )
    started.client.step(step(6, loss=9.0))
    started.client.sweep(members, "a")
    started.client.member_checkpoint("b", 4)
    started.client.close()
    report = operator.reports[-1]
    assert report.spillway is not None
    told = report.spillway
    assert (told.members, told.best_member) == (members, "a")
    assert (told.step, told.steps, report.trainer_status.progress_percentage) == (10, 16, 62)
    assert told.loss == 2.0
    assert told.checkpoint is not None
    assert told.checkpoint.path == str(tmp_path / "checkpoints" / "members" / "b" / "step-4.e1")


def test_a_report_of_the_largest_sweep_is_within_what_the_operator_reads(tmp_path: Path) -> None:
    """Names, figures and reasons as long as they can be, each letter of six bytes in JSON at most."""
    reason = shortened("\N{GRINNING FACE}" * 1000, LONGEST_REASON)
    members = tuple(
        MemberProgress(
            name=f"{index:063d}", step=10**12, num_steps=10**12, loss=-1.2345678901234567e-100,
            objective=-1.2345678901234567e-100, state=MemberState.COMPLETE, reason=reason,
        )
        for index in range(MAX_MEMBERS)
    )  # fmt: skip
    figures = Figures(10**12, members=members, best_member=members[0].name, last=step(1))
    body = progress_report(figures, job(tmp_path), PLAN).model_dump_json(by_alias=True).encode()
    assert len(body) <= LONGEST_REPORT


def test_a_loss_that_is_not_finite_is_left_out(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    started.client.step(step(1, loss=float("nan"), gradient_norm=float("inf")))
    started.client.close()
    report = operator.reports[-1]
    assert report.spillway is not None and report.spillway.loss is None
    assert {one.name for one in report.trainer_status.metrics} == {"learning_rate", "tokens_per_second"}


# --- live corrections -------------------------------------------------------------------------------------------------

MIB = 1 << 20
SPILLED = PLAN.model_copy(
    update={
        "bytes": {
            Tier.DEVICE: TierBytes(),
            Tier.HOST: TierBytes(reserve=40 * MIB),
            Tier.NVME: TierBytes(activations=64 * MIB),
        }
    }
)


def heard(operator: Operator, tmp_path: Path, plan: MemoryPlan, answers: list[int | None]) -> tuple[int, list[str]]:
    """What activations may take after these answers, and what was said of them."""
    said, left = list[str](), iter(answers)
    operator.activations = lambda _: next(left, None)
    where = Endpoint(urlsplit(f"http://127.0.0.1:{operator.port}/progress"), None, None)
    client = ProgressClient(where, job(tmp_path), plan, 0, said.append)
    for number in range(1, len(answers) + 1):
        wait_for(operator, number)
        client.step(step(number))
    client.close()
    return client.wanted_activations, said


def test_an_answer_lowers_what_activations_may_take_and_none_raises_it(operator: Operator, tmp_path: Path) -> None:
    wanted, said = heard(operator, tmp_path, SPILLED, [None, 48 * MIB, 48 * MIB, 60 * MIB, None])
    assert wanted == 48 * MIB
    assert said == ["the operator asks activations to use only 48.0 MiB of each rank's spill file instead of 64.0 MiB"]


@pytest.mark.parametrize(
    ("asked", "wanted"), [(0, 24 * MIB), (2**52, 64 * MIB), (24 * MIB - 1, 24 * MIB)], ids=["0", "huge", "a-byte"]
)
def test_what_is_asked_is_kept_within_the_plan(operator: Operator, tmp_path: Path, asked: int, wanted: int) -> None:
    found, said = heard(operator, tmp_path, SPILLED, [asked])
    assert found == wanted
    stays = "; 24.0 MiB stay there, because the plan has no host memory for more"
    assert [line.endswith(stays) for line in said] == ([] if asked > wanted else [True])


def test_without_a_reserve_nothing_is_lowered(operator: Operator, tmp_path: Path) -> None:
    planned = SPILLED.bytes | {Tier.HOST: TierBytes()}
    found, _ = heard(operator, tmp_path, SPILLED.model_copy(update={"bytes": planned}), [0])
    assert found == 64 * MIB


def test_what_another_attempt_is_told_is_not_for_this_one(operator: Operator, tmp_path: Path) -> None:
    operator.epoch = 2
    found, said = heard(operator, tmp_path, SPILLED, [48 * MIB])
    assert found == 64 * MIB
    assert [line.partition(", but")[0] for line in said] == ["the operator's current attempt is 2"]


def test_the_spill_volume_is_reported(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    wait_for(operator, 1)
    volume = SpillVolume(size=100, free_at_start=50, free=20, num_ranks=2, activations=10, host_room=5)
    started.client.spill_volume(volume)
    started.client.close()
    told = [report.spillway.spill_volume for report in operator.reports if report.spillway]
    assert (told[0], told[-1]) == (None, volume)


# --- connection, token ------------------------------------------------------------------------------------------------


def test_one_connection_serves_many_posts(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    for number in range(1, 4):
        started.client.step(step(number))
        wait_for(operator, number + 1)
    started.client.close()
    assert operator.connections == 1


def test_a_connection_that_was_dropped_is_opened_anew(operator: Operator, tmp_path: Path) -> None:
    started = start(operator, tmp_path)
    wait_for(operator, 1)
    operator.drops_next = True
    started.client.step(step(1))
    wait_for(operator, 2)
    started.client.close()
    assert (operator.connections, started.said) == (2, [])


def test_the_token_is_read_at_each_post(operator: Operator, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    started = start(operator, tmp_path, token)
    wait_for(operator, 1)
    token.write_text("new\n")
    started.client.step(step(1))
    wait_for(operator, 2)
    started.client.close()
    assert operator.tokens[:2] == ["Bearer old", "Bearer new"]


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("skipped: no openssl to make a certificate with")
    cert, key = directory / "ca.crt", directory / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=operator"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return cert, key


def test_the_operators_certificate_is_checked_against_the_given_authority(operator: Operator, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    operator.server.socket = context.wrap_socket(operator.server.socket, server_side=True)
    (tmp_path / "token").write_text("secret")
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{operator.port}/progress",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    said: list[str] = []
    stranger = ProgressClient.from_environment(variables, job(tmp_path), PLAN, 0, said.append)
    assert stranger is not None
    stranger.close()
    assert "CERTIFICATE_VERIFY_FAILED" in said[0] and operator.tokens == []
    variables["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(cert)
    known = ProgressClient.from_environment(variables, job(tmp_path), PLAN, 0, said.append)
    assert known is not None
    known.close()
    assert operator.tokens[0] == "Bearer secret" and len(said) == 1


def test_without_an_operator_there_is_no_client(tmp_path: Path) -> None:
    assert ProgressClient.from_environment({}, job(tmp_path), PLAN, 0, print) is None


def test_the_last_figures_are_told_however_the_run_ends(operator: Operator, tmp_path: Path) -> None:
    variables = {"KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{operator.port}/progress"}

    def train_until_it_breaks() -> None:
        with progress_client.reporting(variables, job(tmp_path), PLAN, 0, print) as client:
            assert client is not None
            client.step(step(7))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_until_it_breaks()
    assert operator.steps[-1] == 7


@pytest.mark.parametrize("token", [b"secret\nsecret", b"secret secret", b"secr\xc3\xa9t", b"secret\x00", b""])
def test_a_damaged_token_is_neither_sent_nor_said(operator: Operator, tmp_path: Path, token: bytes) -> None:
    (tmp_path / "token").write_bytes(token)
    started = start(operator, tmp_path, tmp_path / "token")
    started.client.close()
    assert operator.reports == []
    (line,) = started.said
    assert str(tmp_path / "token") in line and "printable ASCII" in line
    assert "secr" not in line and "xc3" not in line


@pytest.mark.parametrize("url", ["https://[::1", "https://operator:99999/", "https://operator:port/"])
def test_a_url_that_cannot_be_read_is_a_sentence(url: str) -> None:
    with pytest.raises(UserError, match="https"):
        endpoint({"KUBEFLOW_TRAINER_SERVER_URL": url})


@pytest.mark.parametrize("url", ["operator", "ftp://operator/x", "https:///progress", "http://operator/progress"])
def test_a_url_that_would_lose_the_token_is_rejected(url: str) -> None:
    with pytest.raises(UserError, match="https"):
        endpoint({"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": "/token"})


# --- an operator in trouble -------------------------------------------------------------------------------------------


def test_a_lasting_problem_is_one_line_and_its_end_another(operator: Operator, tmp_path: Path) -> None:
    operator.status = 503
    started = start(operator, tmp_path)
    wait_for(operator, 4)
    operator.status = 200
    wait_until(lambda: len(started.said) == 2)
    started.client.close()
    assert started.said[0].startswith("progress is not delivered to http://") and "503" in started.said[0]
    assert started.said[1] == "progress is delivered now"


def test_what_was_not_delivered_is_delivered_later_without_a_new_step(operator: Operator, tmp_path: Path) -> None:
    operator.status = 503
    started = start(operator, tmp_path)
    started.client.step(step(9))
    wait_for(operator, 3)
    operator.status = 200
    wait_until(lambda: "progress is delivered now" in started.said)
    assert operator.steps[-1] == 9
    started.client.close()


def test_nobody_listening_costs_a_line(operator: Operator, tmp_path: Path) -> None:
    operator.server.shutdown()
    operator.server.server_close()
    started = start(operator, tmp_path)
    started.client.step(step(1))
    started.client.close()
    assert len(started.said) == 1 and "refused" in started.said[0]


def test_an_operator_that_never_answers_does_not_delay_the_end(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for its answer would give it up in the end, and post once more."""
    monkeypatch.setattr(progress_client, "END_SECONDS", 0.0)
    monkeypatch.setattr(progress_client, "POST_TIMEOUT_SECONDS", HANG_SECONDS)
    operator.answers.clear()
    started = start(operator, tmp_path)
    wait_for(operator, 1)
    for number in range(1, 1001):
        started.client.step(step(number))
    started.client.close()
    assert operator.steps == [0]


def test_a_newer_attempt_is_said_once(operator: Operator, tmp_path: Path) -> None:
    operator.epoch = 4
    started = start(operator, tmp_path)
    wait_for(operator, 1)
    started.client.step(step(1))
    wait_for(operator, 2)
    started.client.close()
    assert started.said == ["the operator's current attempt is 4, but this process belongs to attempt 1"]
