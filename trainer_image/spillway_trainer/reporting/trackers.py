"""Trackers: shows a run in TensorBoard, MLflow or Weights & Biases.

    run.jsonl -> Feed, a thread of rank 0 for each tracker -> Tracker

A feed reads run.jsonl while it grows, so the step loop neither knows nor waits for a tracker. How far the feed has come
is stored in tracker-KIND.json, from where the next attempt continues. A step that is trained again after a crash
computes the same numbers, so trackers keep the first ones.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from spillway.api import tracking
from spillway.api.job_file import JobFile
from spillway.api.pod import leaves
from spillway.api.sweep.members import member_job
from spillway.errors import ExitCode
from spillway.extras import need
from spillway.plan import MemoryPlan, Tier
from spillway.units import counted, format_bytes, format_seconds

INTERVAL_SECONDS, RETRY_SECONDS = 2.0, 30.0
END_SECONDS, END_RETRY_SECONDS = 10.0, 0.5
"""Seconds that all trackers together have for their last events, and the pause after a failed try."""
EVENTS_AT_ONCE = 100
"""MLflow takes 1000 figures in a request."""
STEP_FIGURES = {
    "train/loss": "loss", "train/learning_rate": "learning_rate", "train/gradient_norm": "gradient_norm",
    "train/tokens": "tokens", "train/tokens_per_second": "tokens_per_second",
}  # fmt: skip
"""Name in a tracker -> field of a step event."""
NOTES = {
    "start": "{epoch}, from step {resumed_from_step}", "checkpoint": "step {step}",
    "checkpoint_missed": "step {step}: {problem}", "end": "step {step}: {reason}: {message}",
}  # fmt: skip
"""Event of run.jsonl -> the text that a tracker shows under the event's name."""
HYPERPARAMETERS = {"model", "data", "training", "parallelism", "memory", "spill", "checkpoint"}
"""Sections of the spec that trackers show: never pod.env, which may hold secrets."""
MLFLOW_DEFAULTS = {
    "DISABLE_TELEMETRY": "true", "HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "0",
    "SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip
"""Environment variables MLFLOW_* that are set unless the user sets them. No retries: the feed itself tries again."""


class Point(NamedTuple):
    """Figures of one step or evaluation."""

    number: int
    """Rises from point to point, and is the same in every attempt."""
    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """One run of a tracker: a job, or a member of a sweep."""

    job: JobFile
    plan: MemoryPlan
    member: str
    directory: Path
    """Directory for the files of a tracker, which outlive the attempt."""

    @property
    def id(self) -> str:
        return f"{self.job.uid}-{self.member}".removesuffix("-")

    @property
    def name(self) -> str:
        return f"{self.job.name}/{self.member}".removesuffix("/")

    @property
    def log(self) -> Path:
        return Path(self.job.output_directory) / "run.jsonl"

    @property
    def hyperparameters(self) -> dict[str, str | float | bool]:
        """Fields of the spec by their path: {"training.steps": 100}."""
        spec = self.job.spec.model_dump(mode="json", by_alias=True, include=HYPERPARAMETERS, exclude_none=True)
        return {name: json.dumps(value) if isinstance(value, list) else value for name, value in leaves(spec)}

    @property
    def plan_text(self) -> str:
        planned = {tier.value: format_bytes(self.plan.bytes[tier].total) for tier in Tier if tier in self.plan.bytes}
        planned |= {"strategy": self.plan.strategy, "step": format_seconds(self.plan.prediction.step_seconds)}
        return "\n\n".join((*(f"{name}: {value}" for name, value in planned.items()), *self.plan.reasons))


class TensorBoard:
    """A new event file for this attempt."""

    def __init__(self, _: tracking.TensorBoard, run: TrackedRun, last_step: int) -> None:
        from tensorboardX import event_file_writer, summary  # noqa: PLC0415
        from tensorboardX.proto import event_pb2  # noqa: PLC0415

        self._summary, self._events, self._last_step = summary, event_pb2, last_step
        directory = run.directory / "tensorboard" / run.member
        directory.mkdir(parents=True, exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(directory / "events"), f".{run.job.epoch}.{time.time_ns()}")
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(last_step + 1, session_log=began)  # hides what a killed attempt wrote about later steps
        for content in summary.hparams(run.hyperparameters, {"train/loss": 0, "eval/loss": 0})[:2]:
            self._write(last_step, summary=content)
        self.send((), {"plan": run.plan_text})

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        for point in points:
            self._last_step = point.step
            for name, value in point.values.items():
                self._write(point.step, point.time, summary=self._summary.scalar(name, value))
        for name, text in notes.items():
            self._write(self._last_step, summary=self._summary.text(name, text))
        self._file.flush()

    def end(self, exit_code: int) -> None:
        self._file.close()

    def _write(self, step: int, when: float | None = None, **content: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=when or time.time(), step=step, **content))


class MLflow:
    """A run on the server; later attempts find it by its tag spillway.run."""

    def __init__(self, settings: tracking.MLflow, run: TrackedRun, _: int) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        from mlflow import MlflowClient, entities  # noqa: PLC0415

        self._entities, self._client = entities, MlflowClient(tracking_uri=settings.uri)
        experiment = self._client.get_experiment_by_name(settings.experiment)
        where = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        found = self._client.search_runs([where], f"tags.`spillway.run` = '{run.id}'", max_results=1)
        tags = {"spillway.run": run.id, "spillway.job": run.job.name, "mlflow.note.content": run.plan_text}
        one = found[0] if found else self._client.create_run(where, run_name=run.name, tags=tags)
        self._id = one.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        lacking = {name: str(value) for name, value in run.hyperparameters.items() if name not in one.data.params}
        params = [entities.Param(name, value) for name, value in lacking.items()]
        for first in range(0, len(params), EVENTS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + EVENTS_AT_ONCE])

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        figures = [
            self._entities.Metric(name, value, round(1000 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        tags = [self._entities.RunTag(f"spillway.{name}", text) for name, text in notes.items()]
        self._client.log_batch(self._id, figures, tags=tags)

    def end(self, exit_code: int) -> None:
        statuses = {int(ExitCode.COMPLETED): "FINISHED", int(ExitCode.PREEMPTED): "KILLED"}
        self._client.set_terminated(self._id, statuses.get(exit_code, "FAILED"))


class WeightsAndBiases:
    """A run whose id is made from the job's uid, so that every attempt continues it. wandb's service, a process that
    ends with this one, writes its file every second and uploads it. Points that are sent twice have the same number;
    W&B keeps the first."""

    def __init__(self, settings: tracking.WeightsAndBiases, run: TrackedRun, _: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # noqa: PLC0415

        options = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=30.0,
            disable_git=True,
            save_code=False,
            x_transaction_log_flush_interval=1.0,
        )
        try:
            self._run = wandb.init(
                project=settings.project, entity=settings.entity, mode=settings.mode, id=run.id, resume="allow",
                name=run.name, group=run.job.name if run.member else None, dir=str(run.directory), reinit="create_new",
                config={**run.hyperparameters, "plan": run.plan_text}, allow_val_change=True, settings=options,
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # else the service keeps the id, and the next try fails
            raise
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values}, step=point.number, commit=True)
        self._run.summary.update(dict(notes))

    def end(self, exit_code: int) -> None:
        self._run.finish(exit_code)


Tracker = TensorBoard | MLflow | WeightsAndBiases
"""One run in a tracker. Every method may raise any error: events that were not sent are sent again."""
KINDS: dict[str, tuple[str, type[Tracker], float]] = {
    "tensor_board": ("tensorboardX.summary", TensorBoard, 0.0),
    "mlflow": ("mlflow", MLflow, 0.0),
    "wandb": ("wandb", WeightsAndBiases, 5.0),
}
"""Field of spec.tracking -> the library; what opens a run, called with (settings, run, last step that was sent); and
the seconds until what was sent survives the death of this process."""
Cursors = dict[str, dict[str, int]]
"""Id of a run -> how far it has been sent: bytes of run.jsonl, the last step, and the last evaluation."""


class Feed:
    """The thread that feeds one tracker."""

    def __init__(self, kind: str, runs: Sequence[TrackedRun], directory: Path, report: Callable[[str], None]) -> None:
        self.kind = kind
        self._library, self._tracker, self._settle_seconds = KINDS[kind]
        self._settings = getattr(runs[0].job.spec.tracking, kind)
        self._runs, self._report, self._state = runs, report, directory / f"tracker-{kind}.json"
        self._cursors: Cursors = {}
        with suppress(OSError, ValueError):
            self._cursors = json.loads(self._state.read_bytes())
        for run in runs:
            cursor = self._cursors.setdefault(run.id, {"offset": 0, "step": 0, "evaluation": 0})
            if not run.log.is_file() or run.log.stat().st_size < cursor["offset"]:
                cursor["offset"] = 0  # a new pod begins with an empty file
        self._unsettled = deque[tuple[float, Cursors]]()
        self._opened: dict[str, Tracker] = {}
        self._problem, self._exit_code = "", 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name=f"tracker {kind}")
        self._thread.start()

    def close(self, exit_code: int, until: float) -> None:
        """Lets the thread send what is left, with retries until `until` (monotonic seconds), and end."""
        self._exit_code, self._until = exit_code, until
        self._closing.set()

    def join(self, seconds: float) -> None:
        """Waits at most `seconds` for the thread, and reports how many events are left."""
        self._thread.join(seconds)
        if left := sum(1 for run in self._runs for _ in events_after(run.log, self._cursors[run.id]["offset"])):
            kept = "kept in run.jsonl for the next attempt, if there is one"
            where = "lost with this pod" if self._runs[0].job.in_cluster else kept
            self._report(f"tracker {self.kind}: {counted(left, 'event')} not sent, {where}")

    def _follow(self) -> None:
        with suppress(Exception):
            import_module(self._library)  # before the first step, which this would slow down
        closing = False
        while not closing or (self._problem and time.monotonic() + END_RETRY_SECONDS < self._until):
            if closing:
                time.sleep(END_RETRY_SECONDS)
            closing = self._closing.wait(RETRY_SECONDS if self._problem else INTERVAL_SECONDS)
            self._note(self._problem_of(self._send_all))
        if problem := self._problem_of(self._end_all):
            self._note(problem)

    def _problem_of(self, action: Callable[[], None]) -> str:
        try:
            action()
        except Exception as error:  # whatever a library raises: it must not end the run
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            retried = f"{problem}; training continues, and the events are sent when this works"
            self._report(f"tracker {self.kind}: {retried if problem else 'events are sent now'}")
        self._problem = problem

    def _send_all(self) -> None:
        for run in self._runs:
            while self._send(run):
                pass

    def _end_all(self) -> None:
        try:
            for tracker in self._opened.values():
                tracker.end(self._exit_code)
        finally:
            self._store(self._cursors)

    def _send(self, run: TrackedRun) -> bool:
        """Sends the next events; returns False if there are none."""
        cursor, last_step = {**self._cursors[run.id]}, self._cursors[run.id]["step"]
        points, notes, end = list[Point](), dict[str, str](), None
        for offset, event in islice(events_after(run.log, cursor["offset"]), EVENTS_AT_ONCE):
            cursor["offset"], name = offset, event.get("event", "")
            if name in ("step", "evaluation") and event["step"] > cursor[name]:
                number = 2 * event["step"] + (name == "evaluation")
                points.append(Point(number, event["step"], event["time"], dict(figures(event))))
                cursor[name] = event["step"]
            elif name in NOTES:
                notes[name] = NOTES[name].format(**event)
            if name == "end":
                end = event["exit_code"]
                break
        if points or notes:
            tracker = self._opened.pop(run.id, None) or self._tracker(self._settings, run, last_step)
            tracker.send(points, notes)
            self._opened[run.id] = tracker  # one that raised is opened again
            if end is not None:
                self._opened.pop(run.id).end(end)
        if cursor == self._cursors[run.id]:
            return False
        self._cursors, now = {**self._cursors, run.id: cursor}, time.monotonic()
        self._unsettled.append((now + self._settle_seconds, self._cursors))
        while self._unsettled and self._unsettled[0][0] <= now:
            self._store(self._unsettled.popleft()[1])
        return True

    def _store(self, cursors: Cursors) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(cursors), encoding="utf-8")
        temporary.replace(self._state)


def figures(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields names and values of a step or evaluation event, without those that are not finite."""
    if event["event"] == "step":
        found = {name: event[field] for name, field in STEP_FIGURES.items()}
        found["memory/device_peak_bytes"] = event["tier_peak_bytes"].get(Tier.DEVICE)
    else:
        loss = event["loss"]
        found = {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss is not None and loss < 700 else None}
    yield from ((name, value) for name, value in found.items() if value is not None)


def events_after(log: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the offset of its end and the event of each complete line of a run.jsonl from `offset` on."""
    if not log.is_file():
        return
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            event: dict[str, Any] = {}
            with suppress(ValueError):  # half a line of a killed process
                event = json.loads(line)
            yield offset, event


class Trackers:
    """All trackers of a job. Raises UserError if their libraries are not installed."""

    def __init__(self, job: JobFile, plan: MemoryPlan, report: Callable[[str], None]) -> None:
        self._feeds: list[Feed] = []
        if job.spec.tracking is None:
            return
        need("trackers")
        directory = Path(job.checkpoint_directory if job.in_cluster else job.output_directory)
        plans = {one.name: one.plan for one in plan.members}
        jobs = {one.name: member_job(job, one) for one in job.spec.members} or {"": job}
        runs = [TrackedRun(one, plans.get(name, plan), name, directory) for name, one in jobs.items()]
        self._feeds = [Feed(kind, runs, directory, report) for kind in KINDS if getattr(job.spec.tracking, kind)]

    def close(self, exit_code: int) -> None:
        """Sends the last events within END_SECONDS, and ends all feeds."""
        until = time.monotonic() + END_SECONDS
        for feed in self._feeds:
            feed.close(exit_code, until)
        for feed in self._feeds:
            feed.join(max(0.0, until - time.monotonic()))
