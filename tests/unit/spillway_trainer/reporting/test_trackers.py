"""Trackers hold what run.jsonl records, each point once, whatever happened to the run or to the tracker."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness import local_runs, tracked_points
from harness.patience import wait_until
from harness.tracked_points import Curve
from spillway.api.job_file import JobFile
from spillway.api.tracking import Tracking
from spillway.metrics import StepMetrics
from spillway_trainer.reporting import trackers
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.reporting.trackers import Trackers

STEP = StepMetrics(
    step=1, loss=2.5, learning_rate=1e-3, gradient_norm=1.0, clip_factor=1.0, tokens=100, step_seconds=0.3,
    tier_peak_bytes={"device": 12345},
)  # fmt: skip
MEMBERS = [{"name": "low", "training": {"optimizer": {"learningRate": "1e-4"}}}, {"name": "high"}]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(trackers, name, 0.02)
    monkeypatch.setattr(trackers, "END_SECONDS", 120.0)
    monkeypatch.setattr(trackers, "EVENTS_AT_ONCE", 7)  # several deliveries


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tracked_points.mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


def job_of(output: Path, tracking: dict[str, Any], epoch: int = 1, **spec: Any) -> JobFile:
    job = local_runs.job_file(output, output / "text", output / "corpus", epoch)
    document = job.spec.model_dump(mode="json", exclude_none=True) | spec
    named = {**document, "tracking": Tracking.model_validate(tracking).model_dump(mode="json", exclude_none=True)}
    return job.model_copy(update={"spec": type(job.spec).model_validate(named), "uid": f"uid-{output.name}"})


def play(output: Path, epoch: int, first: int, last: int, *, ends: bool = True) -> None:
    """What an attempt records that resumes after step `first` and trains to `last`, with an evaluation every 4."""
    recorder = Recorder(output / "run.jsonl")
    recorder.preparing("initialising weights")
    recorder.start(job="small", epoch=epoch, resumed_from_step=first, parameters=1)
    for number in range(first + 1, last + 1):
        recorder.step(replace(STEP, step=number, loss=math.sin(number), gradient_norm=0.1 * number))
        if number % 4 == 0:
            recorder.evaluation(number, math.cos(number), 10, 0.1)
            recorder.checkpoint(number, 10, 0.1, 0.1)
    if ends:
        recorder.end(last, "Completed", 0, f"trained to step {last}")


def recorded(output: Path) -> dict[str, Curve]:
    """The points of run.jsonl, the first of each step."""
    found: dict[str, dict[int, float]] = {}
    for kind in ("step", "evaluation"):
        for event in local_runs.events(output, kind):
            for name, value in trackers.figures(event):
                found.setdefault(name, {}).setdefault(event["step"], value)
    return {name: sorted(curve.items()) for name, curve in found.items()}


def single(curves: dict[str, Curve]) -> dict[str, Curve]:
    """As TensorBoard stores them: in float32."""
    return {name: [(step, float(np.float32(value))) for step, value in curve] for name, curve in curves.items()}


def test_the_points_are_named_as_users_of_trackers_expect(tmp_path: Path) -> None:
    play(tmp_path, 1, 0, 4)
    assert {name: curve[-1] for name, curve in recorded(tmp_path).items()} == {
        "train/loss": (4, math.sin(4)), "train/learning_rate": (4, 1e-3), "train/gradient_norm": (4, 0.4),
        "train/tokens": (4, 100), "train/tokens_per_second": (4, 100 / 0.3), "memory/device_peak_bytes": (4, 12345),
        "eval/loss": (4, math.cos(4)), "eval/perplexity": (4, math.exp(math.cos(4))),
    }  # fmt: skip


def all_three(uri: str, name: str) -> dict[str, Any]:
    wandb = {"project": "p", "mode": "offline"}
    return {"tensorBoard": {}, "mlflow": {"uri": uri, "experiment": name}, "wandb": wandb}


@pytest.mark.ci
def test_every_tracker_holds_the_events_of_a_killed_and_resumed_run_once(server: str, tmp_path: Path) -> None:
    """The first attempt is killed after step 10, the second makes 9 and 10 again."""
    asked = all_three(server, tmp_path.name)
    killed = Trackers(job_of(tmp_path, asked), local_runs.spread_plan(), print)
    play(tmp_path, 1, 0, 10, ends=False)
    (tmp_path / "run.jsonl").open("a").write('{"event": "step", "ti')  # half a line
    for feed in killed._feeds:
        wait_until(lambda feed=feed: feed._cursors.get(f"uid-{tmp_path.name}", {}).get("step") == 10)
    killed.close(137)
    said: list[str] = []
    resumed = Trackers(job_of(tmp_path, asked, epoch=2), local_runs.spread_plan(), said.append)
    play(tmp_path, 2, 8, 16)
    resumed.close(0)
    assert said == []
    expected = recorded(tmp_path)
    assert [step for step, _ in expected["train/loss"]] == [*range(1, 17)]
    assert tracked_points.tensorboard_curves(tmp_path / "tensorboard") == single(expected)
    (run,) = tracked_points.mlflow_runs(server, tmp_path.name).values()
    assert tracked_points.mlflow_curves(server, run) == expected
    assert tracked_points.wandb_curves(tmp_path) == expected
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["training.optimizer.learningRate"] == "0.002"
    tags = {name: run.data.tags[f"spillway.{name}"] for name in ("start", "checkpoint", "end")}
    assert tags == {
        "start": "2, from step 8", "checkpoint": "step 16", "end": "step 16: Completed: trained to step 16"
    }  # fmt: skip
    assert "strategy: Ddp" in run.data.tags["mlflow.note.content"]


@pytest.mark.ci
def test_events_that_were_sent_and_not_noted_are_there_once(server: str, tmp_path: Path) -> None:
    """A process was killed between the two: the next attempt sends them again."""
    asked = all_three(server, tmp_path.name)
    play(tmp_path, 1, 0, 10)
    for epoch in (1, 2):
        for kind in trackers.KINDS:
            (tmp_path / f"tracker-{kind}.json").unlink(missing_ok=True)
        Trackers(job_of(tmp_path, asked, epoch), local_runs.spread_plan(), print).close(0)
    expected = recorded(tmp_path)
    (run,) = tracked_points.mlflow_runs(server, tmp_path.name).values()
    assert tracked_points.mlflow_curves(server, run) == expected
    assert tracked_points.wandb_curves(tmp_path) == expected
    assert tracked_points.tensorboard_curves(tmp_path / "tensorboard") == single(expected)


@pytest.mark.ci
def test_members_of_a_sweep_are_runs_of_their_own(server: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, all_three(server, tmp_path.name), members=MEMBERS)
    found = Trackers(job, local_runs.spread_plan(), print)
    for number, one in enumerate(MEMBERS):
        (tmp_path / "members" / one["name"]).mkdir(parents=True)
        play(tmp_path / "members" / one["name"], 1, 0, 5 + number)
    found.close(0)
    runs = tracked_points.mlflow_runs(server, tmp_path.name)
    assert sorted(runs) == ["small/high", "small/low"]
    for name in ("low", "high"):
        expected = recorded(tmp_path / "members" / name)
        assert tracked_points.mlflow_curves(server, runs[f"small/{name}"]) == expected
        assert tracked_points.tensorboard_curves(tmp_path / "tensorboard" / name) == single(expected)
    rates = {name: run.data.params["training.optimizer.learningRate"] for name, run in runs.items()}
    assert rates == {"small/low": "0.0001", "small/high": "0.002"}
    names = {
        one.run.display_name: one.run.run_group for one in tracked_points.wandb_records(tmp_path) if one.run.run_id
    }
    assert names == {"small/low": "small", "small/high": "small"}


class Unreachable(NamedTuple):
    """Trackers of an attempt whose MLflow rejects connections, which was reported."""

    trackers: Trackers
    asked: dict[str, Any]
    port: int
    said: list[str]


@contextmanager
def unreachable(output: Path) -> Iterator[Unreachable]:
    """Its port is free for a server at the end."""
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        asked = {"mlflow": {"uri": f"http://127.0.0.1:{port}", "experiment": "later"}}
        said: list[str] = []
        found = Trackers(job_of(output, asked), local_runs.spread_plan(), said.append)
        play(output, 1, 0, 9)
        wait_until(lambda: bool(said))
        yield Unreachable(found, asked, port, said)


@pytest.mark.ci
def test_a_server_that_is_down_is_one_warning_and_gets_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unreachable(tmp_path) as (found, asked, port, said):
        with monkeypatch.context() as soon:
            soon.setattr(trackers, "END_SECONDS", 0.1)
            found.close(0)
        for feed in found._feeds:
            feed._thread.join()
    assert len(said) == 2
    assert said[0].startswith("tracker mlflow: ") and "training continues" in said[0]
    assert said[1] == "tracker mlflow: 16 events not sent, kept in run.jsonl for the next attempt, if there is one"
    with tracked_points.mlflow_server(tmp_path, port) as uri:
        again = Trackers(job_of(tmp_path, asked, epoch=2), local_runs.spread_plan(), said.append)
        again.close(0)
        (run,) = tracked_points.mlflow_runs(uri, "later").values()
        assert tracked_points.mlflow_curves(uri, run) == recorded(tmp_path)
    assert len(said) == 2


@pytest.mark.ci
def test_last_events_are_sent_again_until_the_server_answers(tmp_path: Path) -> None:
    with unreachable(tmp_path) as (found, _, port, said):
        closing = threading.Thread(target=found.close, args=(0,))
        closing.start()
    with tracked_points.mlflow_server(tmp_path, port) as uri:
        closing.join()
        (run,) = tracked_points.mlflow_runs(uri, "later").values()
        assert tracked_points.mlflow_curves(uri, run) == recorded(tmp_path)
    assert said[-1] == "tracker mlflow: events are sent now"


@pytest.mark.parametrize(
    ("in_cluster", "where"),
    [(False, "kept in run.jsonl for the next attempt, if there is one"), (True, "lost with this pod")],
)
def test_a_server_that_never_answers_does_not_keep_the_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cluster: bool, where: str
) -> None:
    monkeypatch.setattr(trackers, "END_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said: list[str] = []
        asked = {"mlflow": {"uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        job = job_of(tmp_path, asked).model_copy(update={"in_cluster": in_cluster})
        found = Trackers(job, local_runs.spread_plan(), said.append)
        play(tmp_path, 1, 0, 2)
        found.close(0)  # or this test hangs
        assert said == [f"tracker mlflow: 5 events not sent, {where}"]


def test_a_new_pod_begins_with_an_empty_file_and_continues_the_run(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"tensorBoard": {}}).model_copy(update={"in_cluster": True})
    for epoch, first, last in ((1, 0, 10), (2, 8, 9), (3, 8, 12)):
        (tmp_path / "run.jsonl").unlink(missing_ok=True)
        found = Trackers(job.model_copy(update={"epoch": epoch}), local_runs.spread_plan(), print)
        play(tmp_path, epoch, first, last)
        found.close(0)
    curve = tracked_points.tensorboard_curves(tmp_path / "checkpoints" / "tensorboard")["train/loss"]
    assert curve == single({"": [(step, math.sin(step)) for step in range(1, 13)]})[""]


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    found = Trackers(job_of(tmp_path, {"tensorBoard": {}}), local_runs.spread_plan(), print)
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.step(replace(STEP, loss=math.nan))
    recorder.evaluation(1, math.inf, 10, 0.1)
    found.close(0)
    curves = tracked_points.tensorboard_curves(tmp_path / "tensorboard")
    assert curves.keys() & {"train/loss", "eval/loss", "eval/perplexity"} == set()
    assert curves["train/tokens"] == [(1, 100.0)]


def test_variables_of_the_pod_are_shown_to_nobody(tmp_path: Path) -> None:
    pod = {"env": [{"name": "KEY", "value": "a-secret"}]}
    found = Trackers(job_of(tmp_path, {"tensorBoard": {}}, pod=pod), local_runs.spread_plan(), print)
    play(tmp_path, 1, 0, 1)
    found.close(0)
    (written,) = (tmp_path / "tensorboard").iterdir()
    assert b"training.globalBatchSize" in written.read_bytes() and b"a-secret" not in written.read_bytes()


def test_a_job_without_trackers_starts_no_thread(tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, tmp_path / "text", tmp_path / "corpus", 1)
    before = threading.active_count()
    Trackers(job, local_runs.spread_plan(), print).close(0)
    assert threading.active_count() == before
    assert "tracking" not in job.model_dump_json()
