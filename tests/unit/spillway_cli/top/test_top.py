"""`spillway top`: run directories that were made up, and jobs of an API server of the standard library."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakes.fake_api_server import FakeApiServer, rejection
from fakes.fake_trainer import attempt_lines, step_line
from harness.run_records import plan as made_plan
from spillway.metrics import Phase
from spillway_cli.__main__ import run_app
from spillway_cli.record.attempt_ends import Attempt, record_end
from spillway_cli.record.directory import LOCK_TRIES, RunDirectory, exclusive, is_taken
from spillway_cli.top import cluster as top_cluster
from spillway_cli.top import command as top_command
from spillway_cli.top import view as top_view
from spillway_cli.top.run import Life, RunSource, state_of
from spillway_cli.top.view import RunView, TierView

NOW = datetime(2026, 11, 21, 12, 5, tzinfo=UTC)
MIB = 2**20
STATUS: dict[str, Any] = {
    "state": "Running",
    "progress": {"step": 42, "steps": 100, "loss": "5.549", "tokensPerSecond": "8100", "eta": "3m"},
    "plan": {"nodes": ["node-b"], "bytes": {"device": "1Gi", "host": "2Gi"}},
    "memory": {"peak": {"device": "900Mi", "host": "1Gi"}},
    "attempts": {"total": 2, "restarts": 1},
    "conditions": [{"type": "MetricsAvailable", "status": "False", "reason": "Stale", "message": "no answer for 40 s"}],
}
COMPLETE = {"state": "Complete", "conditions": [{"type": "Complete", "status": "True", "reason": "Completed"}]}


def job(name: str = "tiny", namespace: str = "team-a", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-21T12:00:00Z"}
    spec = {"training": {"steps": 100}, "memory": {"budget": {"device": "2Gi"}}}
    return {"metadata": metadata, "spec": spec, "status": status}


def page(step: int, seconds: float, moved: int, rank: int = 0) -> str:
    """As the trainer's exporter writes it."""
    lines = [f'spillway_step{{training_job="tiny"}} {step}']
    for phase, share in {"forward": 0.25, "backward": 0.5, "wait": 0.25}.items():
        lines.append(f'spillway_phase_seconds_total{{training_job="tiny",phase="{phase}"}} {seconds * share}')
    for link in ("h2d", "nvme_write"):
        lines.append(f'spillway_moved_bytes_total{{training_job="tiny",rank="{rank}",link="{link}"}} {moved}')
    for name, held in {"tier_bytes": 300, "tier_peak_bytes": 950, "tier_budget_bytes": 1000}.items():
        lines.append(f'spillway_{name}{{training_job="tiny",rank="0",tier="device"}} {held * MIB}')
        lines.append(f'spillway_{name}{{training_job="tiny",rank="1",tier="device"}} {(held - 10) * MIB}')
    return "\n".join(lines) + "\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    fake = FakeApiServer()
    fake.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.chdir(tmp_path)
    yield fake
    fake.close()


def screen(width: int, height: int = 40, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=height, color_system=None)


def text_of(console: Console, shown: Any) -> str:
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- a run directory --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.plan_file.write_text(made_plan().model_dump_json())
    return directory


def write(run: RunDirectory, epoch: int, first: int, last: int, torn: str = "") -> None:
    run.attempt(epoch).mkdir(parents=True, exist_ok=True)
    with run.log.open("a", encoding="utf-8") as log:
        log.write("".join(json.dumps(line) + "\n" for line in attempt_lines(epoch, first, last)) + torn)


@contextmanager
def training(run: RunDirectory) -> Iterator[None]:
    with exclusive(run):
        yield


def test_a_look_reads_only_what_was_appended(run: RunDirectory) -> None:
    write(run, 1, 1, 30)
    source = RunSource(run)
    assert source.look().step == 30
    with run.log.open("r+b") as log:
        log.write(b" " * run.log.stat().st_size)  # who reads it again finds nothing
    with run.log.open("a") as log:
        log.write(json.dumps(step_line(31, 1_700_001_016.0)) + "\n")
    view = source.look()
    assert view.step == 31
    assert view.rates is not None and view.rates.over == "a step (mean of the last 20)"


def test_a_torn_last_line_waits_for_its_end(run: RunDirectory) -> None:
    line = json.dumps(step_line(6, 1_700_001_003.0))
    write(run, 1, 1, 5, torn=line[:40])
    with training(run):
        source = RunSource(run)
        assert (source.look().step, source.look().state) == (5, "Running")
        with run.log.open("a") as log:
            log.write(line[40:] + "\n")
        assert source.look().step == 6


def test_after_a_resume_the_newest_step_is_the_resumed_ones(run: RunDirectory) -> None:
    write(run, 1, 1, 30)
    write(run, 2, 25, 26)
    view = RunSource(run).look()
    assert (view.step, view.restarts, view.attempt) == (26, 1, 2)
    assert view.rates is not None and view.rates.over == "a step (mean of the last 2)"


def test_a_directory_that_was_begun_anew_is_read_anew(run: RunDirectory) -> None:
    write(run, 1, 1, 30)
    source = RunSource(run)
    source.look()
    run.log.unlink()
    write(run, 1, 1, 2)
    assert source.look().step == 2


def test_rates_are_bytes_per_second_of_the_steps(run: RunDirectory) -> None:
    write(run, 1, 1, 8)
    rates = RunSource(run).look().rates
    assert rates is not None
    assert rates.link_bytes_per_second == {"h2d": 2 * MIB, "d2h": 2 * MIB, "nvme_read": 6 * MIB, "nvme_write": 6 * MIB}
    assert rates.seconds == pytest.approx(0.5)
    assert rates.phase_seconds["other"] == pytest.approx(0.05)
    assert set(rates.phase_seconds) - {"other"} <= {phase.value for phase in Phase}


def test_tiers_are_planned_peak_and_now(run: RunDirectory) -> None:
    write(run, 1, 1, 8)
    device = RunSource(run).look().tiers[0]
    assert (device.planned_bytes, device.budget_bytes) == (58 * MIB, 64 * MIB)
    assert (device.peak_bytes, device.now_bytes) == (60 * MIB, 40 * MIB)


CRASH = Attempt(1, 137, "RankCrashed", "killed by SIGKILL")


@pytest.mark.parametrize(
    ("life", "state", "words"),
    [
        (Life(True, 0, None, False), "Starting", "being prepared"),
        (Life(True, 1, None, False), "Starting", "attempt 1 has not trained yet"),
        (Life(True, 1, None, True), "Running", ""),
        (Life(True, 1, CRASH, True), "Restarting", "attempt 1 ended: RankCrashed: killed by SIGKILL"),
        (Life(False, 0, None, False), "NotStarted", "no attempt was ever started here"),
        (Life(False, 1, None, True), "Killed", "attempt 1 was killed after step 7"),
        (Life(False, 1, Attempt(1, 0, "Completed", ""), True), "Complete", ""),
        (Life(False, 1, Attempt(1, 75, "Preempted", "stopped"), True), "Stopped", "resume from the last checkpoint"),
        (Life(False, 1, CRASH, True), "Failed", "attempts/attempt-1/trainer.log"),
    ],
)
def test_the_state_of_a_run_says_what_became_of_it(life: Life, state: str, words: str) -> None:
    found, sentence = state_of(life, 7)
    assert found == state and words in sentence


def test_a_run_that_ended_was_killed_or_never_began_is_told_so(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log.touch()
    assert run_app(["top", str(run.path)]) == 0
    assert "NotStarted" in capsys.readouterr().out
    write(run, 1, 1, 5)
    assert run_app(["top", str(run.path)]) == 0
    assert "was killed after step 5" in capsys.readouterr().out
    record_end(run, Attempt(1, 0, "Completed", ""))
    assert run_app(["top", str(run.path)]) == 0
    assert "at the end" in capsys.readouterr().out
    assert run_app(["top", str(run.path), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["ended"], document["step"]) == ("Complete", True, 5)


def test_an_end_that_only_the_trainer_wrote_counts(run: RunDirectory) -> None:
    end = {"event": "end", "time": 1_700_002_000.0, "step": 5, "reason": "NonFinite", "exit_code": 71, "message": "NaN"}
    write(run, 1, 1, 5, torn=json.dumps(end) + "\n")
    assert RunSource(run).look().state == "Failed"


def test_peaks_are_those_of_the_attempt_whose_plan_is_shown(run: RunDirectory) -> None:
    write(run, 1, 1, 9)
    write(run, 2, 5, 6)
    nvme = RunSource(run).look().tiers[2]
    assert nvme.peak_bytes == (30 << 20) + 6 * 4096


def test_a_running_run_is_shown_until_ctrl_c_and_that_is_no_error(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 1, 1, 5)
    pauses = itertools.count()

    def interrupted(seconds: float) -> None:
        if next(pauses) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_command.time, "sleep", interrupted)
    with training(run):
        assert run_app(["top", str(run.path), "-o", "json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["Running", "Running"]


@pytest.mark.parametrize("words", ["", " -o json"])
def test_a_reader_that_goes_away_ends_the_view(run: RunDirectory, words: str) -> None:
    import subprocess
    import sys

    write(run, 1, 1, 5)
    command = f"{sys.executable} -m spillway_cli top {run.path} --interval 0.1{words} | head -1"
    bash = ["bash", "-o", "pipefail", "-c", command]
    with training(run):
        done = subprocess.run(bash, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_directory_that_is_no_run_is_an_error_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_app(["top", str(tmp_path)]) == 64
    assert "no run here" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    assert run_app(["top", "corpus"]) == 64
    assert "for the TrainingJob corpus, give its --namespace" in capsys.readouterr().err
    assert run_app(["status", "corpus"]) == 64
    assert "`spillway top corpus` shows a local run" in capsys.readouterr().err
    assert run_app(["top", "./nowhere"]) == 64
    assert "nowhere: no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--interval", "nan"], ["--interval", "0"], ["-A", "-n", "x"], ["-A", "tiny"]])
def test_what_makes_no_sense_is_rejected(
    words: list[str], run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, 1, 5)
    target = [] if "-n" in words or "tiny" in words else [str(run.path)]
    assert run_app(["top", *words, *target]) == 64
    assert "command line: " in capsys.readouterr().err or "--interval" in words


def test_looking_turns_no_run_away(run: RunDirectory) -> None:
    descriptor = os.open(run.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as a look does, for a moment

    def let_go(seconds: float) -> None:
        os.close(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spillway_cli.record.directory.time.sleep", let_go)
        with exclusive(run):
            assert is_taken(run)
    assert not is_taken(run)
    other = os.open(run.path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_SH)
    assert not is_taken(run), "somebody else who looks is no run"
    os.close(other)
    assert LOCK_TRIES > 1


# --- one job of a cluster ---------------------------------------------------------------------------------------------


def metrics_of(pod: str) -> str:
    return f"/api/v1/namespaces/team-a/pods/{pod}:9400/proxy/metrics"


def test_a_job_is_shown_with_what_its_trainer_says(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**STATUS)
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", [])
    server.add_pod("tiny-1-0", "tiny", 1, 7, "Failed", [])
    server.pages[metrics_of("tiny-2-0")] = page(42, seconds=100.0, moved=400 * MIB)
    assert run_app(["top", "tiny", "--once"]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "tiny in team-a: Running, attempt 2, 1 restart, on node-0, age",
        "step 42/100  42 %  loss 5.549  8.1 k tok/s  eta 3m",
        "device  1.00 GiB  1000 MiB   950 MiB  300 MiB",
        "backward",
        "50 s   50 %",
        "nvme_write  4.00 MiB/s",
        "MetricsAvailable=False (Stale)",
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rejection(403, "Forbidden", "pods/proxy is forbidden"), "pods/proxy is forbidden"),
        (rejection(503, "ServiceUnavailable", "no route to host"), "no route to host"),
    ],
)
def test_what_the_trainer_cannot_be_asked_is_said(
    server: FakeApiServer, answer: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**STATUS)
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", [])
    server.objects[metrics_of("tiny-2-0")] = answer
    assert run_app(["top", "tiny", "--once", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rates"] is None and words in document["unknown"][0]
    assert document["tiers"]["device"]["peakBytes"] == 900 * MIB


def test_rates_are_those_between_two_looks() -> None:
    first, last = (top_cluster.read_page(text) for text in (page(10, 10.0, 100), page(14, 18.0, 100 + 80 * MIB)))
    assert first is not None and last is not None
    rates = top_cluster.rates_between(first, last)
    assert rates is not None
    assert rates.link_bytes_per_second["h2d"] == 10 * MIB
    assert rates.seconds == pytest.approx(2.0)
    assert rates.over == "a step (mean of the last 4)"
    assert top_cluster.rates_between(first, first) is None, "no step between them"
    evaluated = replace(first, phase_seconds={**first.phase_seconds, "evaluation": 3.0})
    assert top_cluster.rates_between(first, evaluated) is None, "seconds, and still no step"
    assert top_cluster.rates_between(last, first) is None, "another process"


def test_ranks_of_a_page_are_summed_by_link_and_the_fullest_by_tier() -> None:
    both = page(10, 10.0, 100) + page(10, 10.0, 50, rank=1).split("\n", 4)[-1]
    found = top_cluster.read_page(both)
    assert found is not None
    assert found.moved_bytes["h2d"] == 150
    assert found.tiers["spillway_tier_bytes"]["device"] == 300 * MIB


@pytest.mark.parametrize("text", ["", "<html>", "spillway_step 1e999", 'spillway_phase_seconds_total{x="y"} 1'])
def test_what_is_no_page_of_a_trainer_is_none(text: str) -> None:
    assert top_cluster.read_page(text) is None


def test_an_unknown_job_is_a_sentence_with_the_nearest(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny-llama"] = job("tiny-llama")
    assert run_app(["top", "tiny-lama"]) == 64
    assert "did you mean tiny-llama?" in capsys.readouterr().err
    assert run_app(["top", "zebra"]) == 64
    assert "did you mean" not in capsys.readouterr().err


def test_no_cluster_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.chdir(tmp_path)
    for arguments in (["top"], ["top", "tiny"], ["top", "-A"]):
        assert run_app(arguments) == 64
        assert "no cluster" in capsys.readouterr().err


def test_a_directory_beside_a_job_of_its_name_is_the_run(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**COMPLETE)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "run.jsonl").touch()
    assert run_app(["top", "tiny"]) == 0
    assert "NotStarted" in capsys.readouterr().out
    assert run_app(["top", "tiny", "-n", "team-a"]) == 0
    assert "tiny in team-a: Complete" in capsys.readouterr().out


def test_the_view_of_a_job_ends_with_it_and_outlives_the_api_server(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = itertools.count()
    server.jobs["team-a", "tiny"] = job(**STATUS)

    def trouble(path: str) -> None:
        if not path.endswith("/tiny"):
            return
        look = next(looks)
        server.rejects = {"GET": rejection(503, "ServiceUnavailable", "shutting down")} if look == 1 else {}
        server.jobs["team-a", "tiny"] = job(**(STATUS if look < 3 else COMPLETE))

    server.before = trouble
    assert run_app(["top", "tiny", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "shutting down; try again later; showing the last known state" in text
    last = text[text.rindex("tiny in team-a") :]
    assert "Complete=True (Completed)" in last and "last known" not in last


def test_a_job_that_is_deleted_ends_the_view(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**STATUS)
    looks = itertools.count()

    def delete(path: str) -> None:
        if path.endswith("/tiny") and next(looks) == 1:
            server.jobs.clear()

    server.before = delete
    assert run_app(["top", "tiny", "--interval", "0.1"]) == 64
    assert capsys.readouterr().err == "spillway: TrainingJob tiny was deleted\n"


# --- the fleet --------------------------------------------------------------------------------------------------------


def test_the_fleet_has_a_row_per_job_and_where_it_runs(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "done"] = job("done", **COMPLETE)
    server.jobs["team-a", "tiny"] = job(**STATUS)
    server.jobs["team-b", "new"] = job("new", "team-b")
    server.add_pod("tiny-2-0", "tiny", 2, 0, "Running", [])
    server.add_pod("tiny-2-1", "tiny", 2, 1, "Running", [])
    assert run_app(["top", "-A", "--once"]) == 0
    total, heading, *rows = capsys.readouterr().out.splitlines()
    assert total.startswith("all namespaces: 3 jobs: 1 Running, 1 ")
    assert heading.split()[:4] == ["NAMESPACE", "NAME", "STATE", "STEP"]
    assert "900 MiB/1.00 GiB" in rows[0] and "1.00/2.00 GiB" in rows[0] and "node-0 +1" in rows[0]
    assert [row.split()[1] for row in rows] == ["tiny", "new", "done"], "what moves first, what ended last"
    assert run_app(["top", "--once"]) == 0
    assert "team-b" not in capsys.readouterr().out


def test_without_a_terminal_no_cell_and_no_column_is_cut(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    long, place = "n" * 56, "p" * 63
    server.jobs[place, long] = job(long, place, **STATUS)
    server.jobs["team-a", long] = job(long, **STATUS)
    server.add_pod("tiny-2-0", long, 2, 0, "Running", [])
    assert run_app(["top", "-A", "--once"]) == 0
    text = capsys.readouterr().out
    assert long in text and place in text and "…" not in text
    assert text.splitlines()[1].split()[-2:] == ["NODE", "AGE"]


def test_without_the_right_to_pods_the_planned_node_is_shown_as_such(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["team-a", "tiny"] = job(**STATUS)
    server.objects["/api/v1/namespaces/team-a/pods"] = rejection(403, "Forbidden", "pods is forbidden")
    assert run_app(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert "~node-b" in text and "not known: the pods' nodes" in text and "pods is forbidden" in text


def test_json_of_the_fleet_is_one_document(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["team-a", "tiny"] = job(**STATUS)
    assert run_app(["top", "--once", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (one,) = document["jobs"]
    assert (one["step"], one["steps"], one["loss"], one["tokensPerSecond"]) == (42, 100, 5.549, 8100.0)
    assert one["tiers"]["host"] == {
        "plannedBytes": 2048 * MIB, "budgetBytes": None, "peakBytes": 1024 * MIB, "nowBytes": None,
    }  # fmt: skip


def test_no_jobs_is_said(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["top", "--once"]) == 0
    assert capsys.readouterr().out == "team-a: no TrainingJob\n"


def test_a_status_of_another_operator_is_shown_as_far_as_it_is_understood(server: FakeApiServer) -> None:
    odd = {
        "state": 7,
        "progress": {"step": "many", "steps": None, "loss": "none"},
        "plan": {"bytes": {"device": "lots"}, "nodes": None},
        "memory": "none",
        "attempts": [],
    }
    view = top_cluster.job_view(job(**odd), [], NOW)
    assert (view.state, view.step, view.loss) == ("7", 0, None)


def view(name: str, state: str = "Running", **changes: Any) -> RunView:
    from spillway.plan import Tier

    tiers = (TierView(Tier.DEVICE, 64 * MIB, None, 60 * MIB), TierView(Tier.HOST, 512 * MIB, None, 400 * MIB))
    fields: dict[str, Any] = {
        "step": 1, "steps": 9, "loss": 1.5, "tokens_per_second": 99.0, "eta": "3m", "tiers": tiers, "restarts": 2,
        "nodes": ("node-a",), "age": "5m00s",
    }  # fmt: skip
    return RunView(name, "team-a", state, **{**fields, **changes})


def test_on_a_screen_the_fleet_is_cut_and_the_rest_counted() -> None:
    views = [view(f"job-{number:02d}", "Queued" if number > 20 else "Running") for number in range(30)]
    console = screen(200, height=12)
    lines = text_of(console, top_view.fleet(views, (), "team-a", console)).splitlines()
    assert len(lines) <= 12
    assert lines[0] == "team-a: 30 jobs: 21 Running, 9 Queued"
    assert lines[-1] == "... and 22 jobs: 13 Running, 9 Queued"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_a_narrow_screen_keeps_whole_columns(width: int) -> None:
    console = screen(width)
    text = text_of(console, top_view.fleet([view("tiny")], (), "team-a", console))
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text
    assert lines[1].split()[:3] == ["NAME", "STATE", "STEP"]
    assert ("AGE" in lines[1]) == (width >= 120)
    assert ("DEVICE" in lines[1]) == (width >= 60) and ("LOSS" in lines[1]) == (width >= 80)


def test_without_a_terminal_nothing_is_cut_and_there_is_no_bar() -> None:
    console = screen(160, height=5, terminal=False)
    text = text_of(console, top_view.fleet([view(f"job-{n}") for n in range(50)], (), "team-a", console))
    assert len(text.splitlines()) == 52 and "━" not in text


def test_what_others_wrote_moves_no_cursor() -> None:
    console = screen(200)
    evil = view("\x1b[2Jtiny", sentences=("\x1b[2Jgone",), nodes=("\x1b]0;x\x07",))
    for shown in (top_view.picture(evil, console), top_view.fleet([evil], (), "team-a", console)):
        assert "\x1b[2J" not in text_of(console, shown) and "\x07" not in text_of(console, shown)
