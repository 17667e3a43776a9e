"""`spillway submit`, `status` and `logs` against an API server of the standard library."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from urllib3.exceptions import InsecureRequestWarning

from cases.job_documents import TINY
from fakes.fake_api_server import FakeApiServer, rejection
from spillway_cli.__main__ import run_app
from spillway_cli.cluster import api as cluster
from spillway_cli.cluster import job_status
from spillway_cli.cluster import logs as logs_command
from spillway_cli.cluster import status as status_command

NO_TEXT = b"\xff\xfe\x00".decode(errors="surrogateescape")
NOW = datetime(2026, 11, 21, 12, 5, tzinfo=UTC)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    fake = FakeApiServer()
    fake.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(status_command, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(logs_command, "POLL_SECONDS", 0.01)
    yield fake
    fake.close()


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(TINY))
    return str(path)


def job(name: str = "tiny", namespace: str = "team-a", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-21T12:00:00Z"}
    return {"metadata": metadata, "spec": {"lifecycle": {"maxRestarts": 5}}, "status": status}


def condition(type_: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def failed(reason: str) -> dict[str, Any]:
    return {"state": "Failed", "conditions": [condition("Failed", "True", reason, "rank 1: why")]}


RUNNING = {
    "state": "Running",
    "progress": {"step": 42, "steps": 100, "display": "42%", "loss": "5.549", "tokensPerSecond": "8.1k", "eta": "3m"},
    "plan": {
        "summary": "optimizer on host 60 %",
        "nodes": ["node-b"],
        "reason": "node-b has 12Gi more free host memory",
        "bytes": {"device": "1Gi", "host": "2Gi"},
    },
    "memory": {"peak": {"device": "900Mi"}},
    "attempts": {
        "total": 2,
        "restarts": 1,
        "disruptions": 3,
        "memoryErrors": 0,
        "lastReason": "RankCrashed",
        "lastRank": 1,
        "lastNode": "node-b",
    },
    "checkpoint": {"step": 40, "epoch": 2, "path": "/checkpoints/tiny/step-40.e2", "time": "2026-11-21T12:04:00Z"},
    "conditions": [
        condition("Accepted", "True", "Valid"),
        condition("MetricsAvailable", "False", "Stale", "no answer for 40 s"),
        condition("Suspended", "False", "NotSuspended"),
    ],
}


# --- finding the cluster ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["status"], ["logs", "tiny"], ["status", "--context", "nowhere"]])
def test_no_cluster_is_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run_app(arguments) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spillway: no cluster: ") and "--context" in line
    assert ("give the run's directory" in line) is (arguments[0] == "logs")


@pytest.mark.parametrize("content", ["{a: [b", "a: b: c", "hello", "[1, 2]", "{clusters: 3}", "\x00", NO_TEXT])
def test_a_kubeconfig_that_is_none_is_one_sentence(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubeconfig").write_bytes(content.encode(errors="surrogateescape"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert run_app(["status"]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spillway: no cluster: ") and str(tmp_path / "kubeconfig") in line


def test_a_cluster_that_does_not_answer_is_one_sentence(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    assert run_app(["status"]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert "no cluster answers at http://127.0.0.1" in line


def test_the_namespace_is_the_contexts(server: FakeApiServer) -> None:
    run_app(["status"])
    run_app(["status", "--context", "there"])
    run_app(["status", "-n", "mine"])
    assert [path.split("/")[5] for _, path, *_ in server.requests] == ["team-a", "default", "mine"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rejection(401, "Unauthorized", "Unauthorized"), "not authenticated"),
        (rejection(403, "Forbidden", "trainingjobs is forbidden"), "not permitted: trainingjobs is forbidden"),
        (rejection(404, "NotFound", "the server could not find the requested resource"), "install Spillway first"),
        (rejection(500, "InternalError", "etcd is away"), "cannot answer now: etcd is away"),
        (rejection(429, "TooManyRequests", "slow down."), "cannot answer now: slow down; try again later"),
        (rejection(422, "Invalid", "no such thing"), "rejected the request: no such thing"),
    ],
)
def test_what_the_server_rejects_is_a_sentence(
    server: FakeApiServer, answer: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.rejects["GET"] = answer
    assert run_app(["status"]) == 64
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["submit", "/nonexistent.yaml"]])
def test_the_kubernetes_client_is_imported_only_for_a_cluster(arguments: list[str]) -> None:
    code = f"import sys; from spillway_cli.__main__ import run_app; run_app({arguments!r}); "
    code += "sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- submit -----------------------------------------------------------------------------------------------------------


def test_submit_creates_what_the_user_wrote(
    server: FakeApiServer, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["submit", manifest]) == 0
    created = server.jobs["team-a", "tiny"]
    assert created["spec"] == TINY["spec"]
    assert server.requests[0][2] == {"fieldManager": "spillway-cli", "fieldValidation": "Strict"}
    captured = capsys.readouterr()
    assert captured.out == "TrainingJob tiny created in namespace team-a\n"
    assert "spillway status tiny -n team-a -w" in captured.err


def test_a_wrong_job_never_reaches_the_cluster(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(json.dumps(TINY).replace('"steps": 100', '"steps": -1'))
    assert run_app(["submit", str(tmp_path / "wrong.yaml")]) == 64
    assert "spec.training.steps" in capsys.readouterr().err
    assert server.requests == []


def test_a_job_that_exists_is_rejected_with_its_state(
    server: FakeApiServer, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    assert run_app(["submit", manifest]) == 64
    assert "TrainingJob tiny already exists in namespace team-a (Running)" in capsys.readouterr().err


def test_what_the_server_rejects_is_said_field_by_field(
    server: FakeApiServer, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = [
        {"reason": "FieldValueInvalid", "field": "spec.training", "message": "schedule.warmupSteps must be at most"},
        {"reason": "FieldValueForbidden", "field": "spec.pod.image", "message": "not from this registry"},
    ]
    server.rejects["POST"] = rejection(422, "Invalid", "tiny is invalid", causes=causes)
    assert run_app(["submit", manifest, "-o", "json"]) == 64
    fields = json.loads(capsys.readouterr().out)["error"]["fields"]
    assert [one["path"] for one in fields] == ["spec.training", "spec.pod.image"]


def test_dry_run_asks_the_server_and_creates_nothing(
    server: FakeApiServer, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["submit", manifest, "--dry-run", "-o", "name"]) == 0
    assert server.requests[0][2]["dryRun"] == "All" and server.jobs == {}
    assert capsys.readouterr().out == "trainingjob.spillway.dev/tiny\n"


def test_two_namespaces_that_differ_are_rejected(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {**TINY, "metadata": {"name": "tiny", "namespace": "mine"}}
    (tmp_path / "job.yaml").write_text(json.dumps(named))
    assert run_app(["submit", str(tmp_path / "job.yaml"), "-n", "other"]) == 64
    assert run_app(["submit", str(tmp_path / "job.yaml")]) == 0
    assert ("mine", "tiny") in server.jobs


@pytest.mark.parametrize(
    ("ended", "code"),
    [({"state": "Complete", "conditions": [condition("Complete", "True")]}, 0), (failed("NonFinite"), 71)],
)
def test_submit_with_wait_ends_as_the_job_does(
    server: FakeApiServer, manifest: str, ended: dict[str, Any], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([{}, RUNNING, RUNNING, ended])

    def move_on(path: str) -> None:
        if ("team-a", "tiny") in server.jobs and path.endswith("/tiny"):
            server.jobs["team-a", "tiny"]["status"] = next(looks)

    server.before = move_on
    assert run_app(["submit", manifest, "--wait"]) == code
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["tiny: created", "tiny: Running  step 42/100  42%  loss 5.549  eta 3m"]
    assert said[2].startswith(f"tiny: {ended['state']}")


# --- status -----------------------------------------------------------------------------------------------------------


def test_the_list_has_the_printer_columns_that_say_something(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.jobs["team-b", "new"] = job("new", "team-b")
    assert run_app(["status", "-A"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["NAMESPACE", "NAME", "STATE", "STEP"]
    assert "BEST" not in heading and heading.split()[-1] == "AGE"
    assert rows[0].split()[:3] == ["team-a", "tiny", "Running"]


def test_no_jobs_is_said(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["status"]) == 0
    assert capsys.readouterr().err == "no TrainingJob in team-a\n"


def test_a_job_is_shown_with_what_a_person_wants(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    series = {"series": {"lastObservedTime": "2026-11-21T12:03:00Z"}, "type": "Normal", "reason": "Running"}
    server.events = [series | {"metadata": {"name": "tiny.1"}, "message": "every pod runs"}]
    assert run_app(["status", "tiny"]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "tiny in team-a: Running, attempt 2",
        "step 42/100  42%  loss 5.549  eta 3m  8.1k tok/s",
        "optimizer on host 60 %",
        "placed     node-b has 12Gi more free host memory",
        "checkpoint step 40 at /checkpoints/tiny/step-40.e2",
        "attempts   2, 1 of 5 restarts, 3 disruptions; the last one ended: RankCrashed (rank 1 on node-b)",
        "MetricsAvailable=False (Stale): no answer for 40 s",
        "Running: every pod runs",
    ):
        assert wanted in text, wanted
    assert "NotSuspended" not in text and "Accepted" not in text


def test_a_job_that_nobody_looked_at_is_shown_too(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = {"metadata": {"name": "tiny", "namespace": "team-a"}, "spec": {}}
    assert run_app(["status", "tiny"]) == 0
    assert capsys.readouterr().out == "tiny in team-a: not processed by the operator yet\n"


@pytest.mark.parametrize(
    ("reason", "code"), [("DeviceOutOfMemory", 70), ("SpillIOError", 73), ("OOMKilled", 1), ("RankCrashed", 1)]
)
def test_status_of_a_failed_job_exits_with_the_reasons_code(
    server: FakeApiServer, reason: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**failed(reason))
    assert run_app(["status", "tiny"]) == code
    assert f"Failed=True ({reason}): rank 1: why" in capsys.readouterr().out


def test_status_of_a_job_that_restarts_is_fine(server: FakeApiServer) -> None:
    server.jobs["team-a", "tiny"] = job(state="Restarting", conditions=[condition("Failed", "False", "NotFailed")])
    assert run_app(["status", "tiny"]) == 0


def test_a_job_that_is_not_there_is_a_sentence(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["status", "gone"]) == 64
    assert "TrainingJob gone: not found in namespace team-a" in capsys.readouterr().err


def test_json_is_the_object_itself(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    assert run_app(["status", "tiny", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.jobs["team-a", "tiny"]


def test_watching_shows_each_change_once_until_the_end(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([RUNNING, RUNNING, RUNNING, failed("NonFinite")])
    server.jobs["team-a", "tiny"] = job()

    def move_on(path: str) -> None:
        if path.endswith("/tiny"):
            server.jobs["team-a", "tiny"]["status"] = next(looks)

    server.before = move_on
    assert run_app(["status", "tiny", "-w"]) == 71
    assert capsys.readouterr().out.count("tiny in team-a") == 2


def hiccup(server: FakeApiServer, numbers: set[int], code: int) -> None:
    """The requests of those numbers (from 0) are answered with `code`."""
    count = itertools.count()

    def trouble(path: str) -> None:
        server.rejects.pop("GET", None)
        if next(count) in numbers:
            server.rejects["GET"] = rejection(code, "ServiceUnavailable", "apiserver is shutting down")

    server.before = trouble


@pytest.mark.parametrize("code", [429, 500, 503, 504])
def test_watching_goes_on_through_a_server_in_trouble(
    server: FakeApiServer, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    hiccup(server, {1, 2, 3}, code)
    monkeypatch.setattr(status_command.time, "sleep", lambda _: sleeps.append(0) or complete())
    sleeps: list[int] = []

    def complete() -> None:
        if len(sleeps) > 4:
            server.jobs["team-a", "tiny"]["status"] = {"conditions": [condition("Complete", "True")]}

    assert run_app(["status", "tiny", "-w"]) == 0
    assert "apiserver is shutting down; try again later; trying again" in capsys.readouterr().err


def test_events_of_an_earlier_job_of_the_name_are_not_asked_for(server: FakeApiServer) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.jobs["team-a", "tiny"]["metadata"]["uid"] = "u-7"
    assert run_app(["status", "tiny"]) == 0
    asked = server.requests[-1][2]["fieldSelector"]
    assert asked == "involvedObject.kind=TrainingJob,involvedObject.name=tiny,involvedObject.uid=u-7"


def test_an_attempt_of_which_nothing_is_heard_is_shown(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = [condition("Progressing", "Unknown", "NoReport", "no step was reported since noon")]
    server.jobs["team-a", "tiny"] = job(state="Running", conditions=heard)
    server.jobs["team-a", "other"] = job("other", conditions=[condition("Progressing", "Unknown", "Waiting")])
    assert run_app(["status", "tiny"]) == 0
    assert "Progressing=Unknown (NoReport): no step was reported since noon" in capsys.readouterr().out
    run_app(["status", "other"])
    assert "Progressing" not in capsys.readouterr().out


def test_what_was_not_measured_yet_is_not_shown(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    begun = {"step": 0, "steps": 100, "display": "0%", "tokensPerSecond": "0", "eta": "0s"}
    server.jobs["team-a", "tiny"] = job(state="Running", progress=begun)
    assert run_app(["status", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "step 0/100" in shown and "tok/s" not in shown and "eta" not in shown


def test_a_status_without_its_events_is_still_shown(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    hiccup(server, {1}, 503)
    assert run_app(["status", "tiny"]) == 0
    assert "tiny in team-a: Running" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["tiny", "-A"], ["-A", "-n", "x"], ["-w", "-o", "json"]])
def test_options_that_exclude_each_other_are_rejected(server: FakeApiServer, words: list[str]) -> None:
    assert run_app(["status", *words]) == 64
    assert server.requests == []


def test_what_a_terminal_would_obey_is_not_printed(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[2J\x07evil"
    status = RUNNING | {"state": bad, "conditions": [condition("Planned", "False", "NoNode", bad)]}
    server.jobs["team-a", "tiny"] = job(**status)
    run_app(["status", "tiny"])
    run_app(["status"])
    assert "\x1b[2J" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("time", "shown"), [("2026-11-21T12:04:00Z", "1m00s"), ("2026-11-21T12:06:00Z", "0 s"), ("x", "?")]
)
def test_ages_are_for_people(time: str, shown: str) -> None:
    assert job_status.age(time, NOW) == shown


# --- logs -------------------------------------------------------------------------------------------------------------


def test_logs_are_those_of_the_newest_attempt(server: FakeApiServer, capfdbinary: Any) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Failed", ["old"])
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", ["new", "", "last"])
    server.add_pod("other-3-0", "other", 3, 0, "Running", ["stranger"])
    assert run_app(["logs", "tiny"]) == 0
    assert capfdbinary.readouterr().out == b"new\n\nlast\n"
    assert run_app(["logs", "tiny", "--attempt", "1"]) == 0
    assert capfdbinary.readouterr().out == b"old\n"


def test_lines_of_several_pods_carry_their_node(server: FakeApiServer, capfdbinary: Any) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-1", "tiny", 1, 1, "Running", ["b"])
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Running", ["a"])
    assert run_app(["logs", "tiny"]) == 0
    assert capfdbinary.readouterr().out == b"[node 0] a\n[node 1] b\n"
    assert run_app(["logs", "tiny", "--rank-node", "1"]) == 0
    assert capfdbinary.readouterr().out == b"b\n"


def test_no_pod_is_a_sentence(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(state="Queued")
    assert run_app(["logs", "tiny"]) == 64
    assert "TrainingJob tiny (Queued): no pod found" in capsys.readouterr().err


def test_following_goes_on_through_a_restart_to_the_end(server: FakeApiServer, capfdbinary: Any) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Running", ["one"])
    asked = {"tiny-1-0": 0, "tiny-2-0": 0}

    def move_on(path: str) -> None:
        """Each pod runs for two looks and says one line more; then the next attempt comes, then the end."""
        name = path.rpartition("/")[2]
        if name not in asked:
            return
        asked[name] += 1
        if asked[name] == 3:
            pod = next(pod for pod in server.pods if pod["metadata"]["name"] == name)
            pod["status"]["phase"] = "Failed"
            server.logs[name].append("its last line")
            if name == "tiny-1-0":
                server.add_pod("tiny-2-0", "tiny", 2, 0, "Pending", ["two"])
                server.logs.pop("tiny-2-0")  # its container has not started
            else:
                server.jobs["team-a", "tiny"]["status"] = {"conditions": [condition("Complete", "True")]}
        elif name == "tiny-2-0" and asked[name] == 2:
            server.logs[name] = ["two"]

    server.before = move_on
    assert run_app(["logs", "tiny", "-f"]) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == b"one\nits last line\ntwo\nits last line\n"
    assert captured.err == b"attempt 1\nattempt 2\n"


def test_a_broken_stream_is_taken_up_where_it_broke(server: FakeApiServer, capfdbinary: Any) -> None:
    server.jobs["team-a", "tiny"] = job(conditions=[condition("Complete", "True")])
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Running", [f"line {number}" for number in range(9)])
    server.breaks_logs_after = 4

    def end(path: str) -> None:
        if path.endswith("/log") and server.breaks_logs_after is None:
            server.pods[0]["status"]["phase"] = "Succeeded"

    server.before = end
    assert run_app(["logs", "tiny", "-f"]) == 0
    assert capfdbinary.readouterr().out.decode().splitlines() == [f"line {number}" for number in range(9)]


@pytest.mark.parametrize("number", range(5))
def test_following_goes_on_through_a_server_in_trouble(server: FakeApiServer, number: int, capfdbinary: Any) -> None:
    """Of the job, its pods, the pod, its log; the first look is the command's own and may fail."""
    server.jobs["team-a", "tiny"] = job(conditions=[condition("Complete", "True")])
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Succeeded", ["one", "two"])
    hiccup(server, {number + 1}, 503)
    assert run_app(["logs", "tiny", "-f"]) == 0
    assert capfdbinary.readouterr().out == b"one\ntwo\n"


def test_the_log_of_an_ended_pod_whose_node_is_gone_is_given_up_in_words(
    server: FakeApiServer, capfdbinary: Any
) -> None:
    server.jobs["team-a", "tiny"] = job(conditions=[condition("Complete", "True")])
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Failed", ["one"])

    def node_is_gone(path: str) -> None:
        server.rejects = {"GET": rejection(500, "InternalError", "no route to node")} if path.endswith("/log") else {}

    server.before = node_is_gone
    assert run_app(["logs", "tiny", "-f"]) == 0
    assert b"pod tiny-1-0: cannot read the rest of its log" in capfdbinary.readouterr().err


def send_as_they_are(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def send(handler: Any, name: str, query: dict[str, str]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    monkeypatch.setattr(server, "send_log", send)


STAMPED = b"2026-11-21T12:00:%02d.000000000Z %s\n"


@pytest.mark.parametrize("follow", [[], ["-f"]])
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (
            b"unable to retrieve container logs\n" + STAMPED % (1, b"real"),
            b"unable to retrieve container logs\nreal\n",
        ),
        (
            b"".join(STAMPED % line for line in ((9, b"before"), (5, b"clock set back"), (9, b"same stamp"))),
            b"before\nclock set back\nsame stamp\n",
        ),
    ],
    ids=["a line of the kubelet's own", "a clock that is set back"],
)
def test_no_line_is_lost_to_its_time_stamp(
    server: FakeApiServer,
    monkeypatch: pytest.MonkeyPatch,
    follow: list[str],
    content: bytes,
    shown: bytes,
    capfdbinary: Any,
) -> None:
    server.jobs["team-a", "tiny"] = job(conditions=[condition("Complete", "True")])
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Succeeded", [])
    send_as_they_are(server, monkeypatch, content)
    assert run_app(["logs", "tiny", *follow]) == 0
    assert capfdbinary.readouterr().out == shown


def test_a_stream_is_never_taken_up_at_what_is_no_time(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = logs_command.Reader(
        cluster.connect(), "team-a", logs_command.LogsOptions("x", None, None, True, None, None)
    )
    send_as_they_are(server, monkeypatch, STAMPED % (1, b"real") + b"unable to retrieve container logs\n")
    server.logs["x"] = []
    assert reader._print_since("x", b"", b"", follow=True) == b"2026-11-21T12:00:01.000000000Z"


def test_following_one_attempt_ends_with_it(server: FakeApiServer, capfdbinary: Any) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Failed", ["one"])
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", ["two"])
    assert run_app(["logs", "tiny", "-f", "--attempt", "1"]) == 0
    assert capfdbinary.readouterr().out == b"one\n"


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_an_attempt_that_does_not_exist_is_a_sentence(
    server: FakeApiServer, follow: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", ["two"])
    assert run_app(["logs", "tiny", "--attempt", "7", *follow]) == 64
    assert capsys.readouterr().err == (
        "spillway: TrainingJob tiny (Running): no pod of attempt 7 found; its newest attempt is 2\n"
    )


@pytest.mark.parametrize("successor", [None, {"uid": "u-2"}])
def test_a_job_that_is_deleted_while_it_is_followed_is_said_to_be(
    server: FakeApiServer, successor: dict[str, str] | None, capfdbinary: Any
) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Running", ["one"])

    def delete(path: str) -> None:
        if path.endswith("/log"):
            server.pods.clear()
            del server.jobs["team-a", "tiny"]
            if successor is not None:
                server.jobs["team-a", "tiny"] = job(**RUNNING)
                server.jobs["team-a", "tiny"]["metadata"] |= successor

    server.before = delete
    assert run_app(["logs", "tiny", "-f"]) == 64
    captured = capfdbinary.readouterr()
    assert captured.out == b"one\n"
    assert b"spillway: TrainingJob tiny was deleted" in captured.err


def test_a_reader_that_has_seen_enough_is_no_error(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.jobs["team-a", "tiny"] = job(**RUNNING)
    server.add_pod("tiny-1-0", "tiny", 1, 0, "Running", ["one", "two"])
    code = "import sys; from spillway_cli.__main__ import main; sys.argv[1:] = ['logs', 'tiny', '-f']; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(20) == 0
    assert b"Traceback" not in process.stderr.read()


def test_paths_hold_any_name() -> None:
    assert cluster.jobs_path("a b", "c?d#").endswith("/namespaces/a%20b/trainingjobs/c%3Fd%23")


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "tjob/tiny"],
        ["logs", "../tiny", "-n", "team-a"],
        ["status", "-n", "a/pods"],
        ["top", "-n", "..", "--once"],
        ["logs", "tiny%2f", "-n", "team-a"],
    ],
)
def test_a_name_that_would_lead_to_another_path_is_never_sent(
    server: FakeApiServer, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As kubectl's `tjob/tiny`: the server's 404 would be taken for a cluster without Spillway."""
    assert run_app(arguments) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert "contain / or %" in line and server.requests == []


# --- what is no API server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["<html>\nPlease log in", "", "[]", "null", '{"items": [', "[" * 200_000])
@pytest.mark.parametrize("arguments", [["status"], ["status", "tiny"], ["logs", "tiny"], ["top", "--once"]])
def test_a_page_that_no_api_server_wrote_is_one_sentence(
    server: FakeApiServer, arguments: list[str], page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A proxy's login page with code 200 is neither an empty list nor a job."""
    for path in (cluster.jobs_path("team-a"), cluster.jobs_path("team-a", "tiny")):
        server.pages[path] = page
    assert run_app([*arguments, "-n", "team-a"]) == 64
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("spillway: http://127.0.0.1") and output.out == ""


@pytest.mark.parametrize("items", ['["a", 3]', "[{}]", '{"a": 1}', '[{"metadata": {"name": 3}}]', '[{"metadata": []}]'])
@pytest.mark.parametrize("arguments", [["status"], ["status", "-A"], ["top", "--once"]])
def test_a_list_of_what_are_no_objects_is_one_sentence(
    server: FakeApiServer, arguments: list[str], items: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (cluster.jobs_path("team-a"), cluster.jobs_path(None)):
        server.pages[path] = f'{{"items": {items}}}'
    assert run_app([*arguments, "-o", "json"]) == 64
    assert "list of objects" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_list_without_items_is_an_empty_one(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.pages[cluster.jobs_path("team-a")] = '{"items": null}'
    assert run_app(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": []}


def test_what_a_server_says_is_one_line_without_what_a_terminal_obeys(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.rejects["GET"] = rejection(403, "Forbidden", "no\n\x1b]0;title\x07\x1b[31m" + 5000 * "x")
    assert run_app(["status"]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line and "\x07" not in line and len(line) < 1500


@pytest.mark.parametrize(("token", "code"), [("secret\n", 0), ("sec\nret", 64), ("gehe\u00efm", 64)])
def test_a_token_of_a_file_ends_with_a_line_break_and_is_never_shown(
    server: FakeApiServer, token: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(token)
    text = (tmp_path / "kubeconfig").read_text()
    (tmp_path / "kubeconfig").write_text(text.replace("token: secret", f"tokenFile: {tmp_path}/token"))
    assert run_app(["status"]) == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and token not in said and repr(token)[1:-1] not in said


def test_a_server_that_need_not_be_who_it_says_is_not_warned_of_each_time(
    server: FakeApiServer, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """As the kubeconfig asks for; a warning would be printed into the view of `top`."""
    text = (tmp_path / "kubeconfig").read_text()
    (tmp_path / "kubeconfig").write_text(text.replace("{server", "{insecure-skip-tls-verify: true, server"))
    assert run_app(["status"]) == 0
    warnings.warn("what urllib3 says of such a request", InsecureRequestWarning, stacklevel=1)
    assert not recwarn.list


def test_an_outage_is_said_once(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([job(**RUNNING), *[cluster.Unreachable("away")] * 5, job(**failed("OOMKilled"))])

    def look() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert len([*status_command.looks(look, True, job_status.has_ended)]) == 2
    assert capsys.readouterr().err == "away; trying again\n"
