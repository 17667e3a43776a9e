"""Trackers: shows a run in TensorBoard, MLflow or Weights & Biases.

    run.jsonl -> Feed, a thread of rank 0 for each tracker -> Tracker

A feed reads run.jsonl while it grows, so the step loop neither knows nor waits for a tracker. How far it came is stored
in tracker-KIND.json, where the next attempt continues. A step that is trained again after a crash computes the same
numbers: trackers keep the first.
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
from typing import Any, ClassVar, Protocol

from spillway.api import tracking
from spillway.api.job_file import JobFile
from spillway.api.members import member_job
from spillway.errors import ExitCode
from spillway.extras import need
from spillway.plan import MemoryPlan, Tier
from spillway.units import format_bytes, format_seconds

INTERVAL_SECONDS, RETRY_SECONDS = 2.0, 30.0
END_SECONDS = 10.0
"""Time limit of all trackers for their last events."""
EVENTS_AT_ONCE = 100
"""MLflow takes 1000 figures in a request."""
STEP_FIGURES = {
    "train/loss": "loss", "train/learning_rate": "learning_rate", "train/gradient_norm": "gradient_norm",
    "train/tokens": "tokens", "train/tokens_per_second": "tokens_per_second",
}  # fmt: skip
"""Name in a tracker -> field of a step event."""
DEVICE_PEAK, EVALUATION_LOSS, PERPLEXITY = "memory/device_peak_bytes", "eval/loss", "eval/perplexity"
HYPERPARAMETERS = {"model", "data", "training", "parallelism", "memory", "spill", "checkpoint"}
"""Sections of the spec that trackers show: never pod.env, which may hold secrets."""


@dataclass(frozen=True, slots=True)
class Point:
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
    """For the files of a tracker, which outlive the attempt."""

    @property
    def id(self) -> str:
        return f"{self.job.uid}-{self.member}" if self.member else self.job.uid

    @property
    def name(self) -> str:
        return f"{self.job.name}/{self.member}" if self.member else self.job.name

    @property
    def hyperparameters(self) -> dict[str, str | float | bool]:
        """Fields of the spec by their path: {"training.steps": 100}."""
        spec = self.job.spec.model_dump(mode="json", by_alias=True, include=HYPERPARAMETERS, exclude_none=True)
        return dict(flattened(spec))

    @property
    def plan_text(self) -> str:
        """The plan's summary, a line each for tiers and reasons."""
        plan = self.plan
        tiers = (
            f"{tier.value}: {format_bytes(plan.bytes[tier].total)} planned"
            + (f", budget {format_bytes(plan.budget[tier])}" if plan.budget.get(tier) else "")
            for tier in Tier
            if tier in plan.bytes
        )
        predicted = f"step: {format_seconds(plan.prediction.step_seconds)} predicted"
        return "\n\n".join((f"strategy: {plan.strategy}", *tiers, predicted, *plan.reasons))


def flattened(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str | float | bool]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", json.dumps(value) if isinstance(value, list) else value


class Tracker(Protocol):
    """One run in a tracker. Every method may raise any error: events not sent are sent again."""

    settle_seconds: ClassVar[float]
    """Until what was sent survives the death of this process."""

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None: ...

    def end(self, exit_code: int) -> None: ...


class TensorBoard:
    """An event file of this attempt."""

    settle_seconds: ClassVar[float] = 0.0

    def __init__(self, _: tracking.TensorBoard, run: TrackedRun, last_step: int) -> None:
        from tensorboardX import summary  # noqa: PLC0415
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415

        self._event, self._summary, self._last_step = Event, summary, last_step
        directory = run.directory / "tensorboard" / run.member
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"), f".{run.job.epoch}.{time.time_ns()}")
        # What a killed attempt wrote of later steps is written again.
        self._file.write_event(Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))
        experiment, start, _ = summary.hparams(run.hyperparameters, dict.fromkeys(("train/loss", EVALUATION_LOSS)))
        for content in (experiment, start, summary.text("plan", run.plan_text)):
            self._file.write_event(Event(wall_time=time.time(), step=last_step, summary=content))
        self._file.flush()

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        for point in points:
            self._last_step = point.step
            for name, value in point.values.items():
                content = self._summary.scalar(name, value)
                self._file.write_event(self._event(wall_time=point.time, step=point.step, summary=content))
        for name, text in notes.items():
            content = self._summary.text(name, text)
            self._file.write_event(self._event(wall_time=time.time(), step=self._last_step, summary=content))
        self._file.flush()

    def end(self, exit_code: int) -> None:
        self._file.close()


MLFLOW_DEFAULTS = {
    "DISABLE_TELEMETRY": "true", "HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "0",
    "SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip
"""Its environment variables MLFLOW_*, unless the user sets them: the feed itself tries again."""


class MLflow:
    """A run on the server, found again by its tag spillway.run."""

    settle_seconds: ClassVar[float] = 0.0

    def __init__(self, settings: tracking.MLflow, run: TrackedRun, _: int) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        from mlflow import MlflowClient  # noqa: PLC0415
        from mlflow.entities import Metric, Param, RunTag  # noqa: PLC0415

        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient(tracking_uri=settings.uri)
        experiment = self._client.get_experiment_by_name(settings.experiment)
        where = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        found = self._client.search_runs([where], f"tags.`spillway.run` = '{run.id}'", max_results=1)
        tags = {"spillway.run": run.id, "spillway.job": run.job.name, "mlflow.note.content": run.plan_text}
        one = found[0] if found else self._client.create_run(where, run_name=run.name, tags=tags)
        self._id = one.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        params = {name: str(value) for name, value in run.hyperparameters.items()}
        lacking = [Param(name, value) for name, value in params.items() if name not in one.data.params]
        for first in range(0, len(lacking), EVENTS_AT_ONCE):
            self._client.log_batch(self._id, params=lacking[first : first + EVENTS_AT_ONCE])

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        figures = [
            self._metric(name, value, round(1000 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._client.log_batch(
            self._id, figures, tags=[self._tag(f"spillway.{name}", text) for name, text in notes.items()]
        )

    def end(self, exit_code: int) -> None:
        statuses = {int(ExitCode.COMPLETED): "FINISHED", int(ExitCode.PREEMPTED): "KILLED"}
        self._client.set_terminated(self._id, statuses.get(exit_code, "FAILED"))


class WeightsAndBiases:
    """A run whose id is the job's uid: every attempt continues it. The service of wandb, a process that ends with this
    one, writes its file every second, and uploads it. Points sent twice have the same number; W&B keeps the first."""

    settle_seconds: ClassVar[float] = 5.0

    def __init__(self, settings: tracking.WeightsAndBiases, run: TrackedRun, _: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415

        self._run = wandb.init(
            project=settings.project, entity=settings.entity, mode=settings.mode, id=run.id, resume="allow",
            name=run.name, group=run.job.name if run.member else None, dir=str(run.directory),
            config={**run.hyperparameters, "plan": run.plan_text}, allow_val_change=True, reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_transaction_log_flush_interval=1.0
            ),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point], notes: Mapping[str, str]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.values}, step=point.number, commit=True)
        self._run.summary.update(dict(notes))

    def end(self, exit_code: int) -> None:
        self._run.finish(exit_code)


KINDS: dict[str, tuple[str, type[TensorBoard | MLflow | WeightsAndBiases]]] = {
    "tensor_board": ("tensorboardX.summary", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
}
"""Field of spec.tracking -> its library, and what opens a run: (settings, run, last step that was sent)."""


Cursor = dict[str, int]
Cursors = dict[str, Cursor]
"""By the id of a run."""


class Feed:
    """The thread of one tracker."""

    def __init__(self, kind: str, runs: Sequence[TrackedRun], directory: Path, report: Callable[[str], None]) -> None:
        self.kind = kind
        self._library, self._tracker = KINDS[kind]
        self._settings = getattr(runs[0].job.spec.tracking, kind)
        self._runs, self._report, self._state = runs, report, directory / f"tracker-{kind}.json"
        self._cursors: Cursors = {}
        self._unsettled = deque[tuple[float, Cursors]]()
        with suppress(OSError, ValueError):
            self._cursors = json.loads(self._state.read_bytes())
        self._opened: dict[str, Tracker] = {}
        self._problem = ""
        self._exit_code = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name=f"tracker {kind}")
        self._thread.start()

    def close(self, exit_code: int) -> None:
        """The thread sends what is left, and ends."""
        self._exit_code = exit_code
        self._closing.set()

    def join(self, seconds: float) -> None:
        """Waits at most that long; reports how many events are left."""
        self._thread.join(seconds)
        if left := sum(1 for run in self._runs for _ in events_after(run, self._cursor(run)["offset"])):
            self._report(
                f"tracker {self.kind}: {left} events are not sent; they stay in run.jsonl for the next attempt"
            )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        with suppress(Exception):
            import_module(self._library)  # before the first step, which it would slow
        closing = False
        while not closing:
            closing = self._closing.wait(RETRY_SECONDS if self._problem else INTERVAL_SECONDS)
            self._try(self._finish if closing else self._send_all)

    def _try(self, work: Callable[[], object]) -> None:
        """Reports a problem once, and when it is over."""
        try:
            work()
            problem = ""
        except Exception as error:  # whatever a library raises: it must not end the run
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        if problem != self._problem:
            retried = f"{problem}; training continues, and events are sent later"
            self._report(f"tracker {self.kind}: {retried if problem else 'events are sent'}")
        self._problem = problem

    def _send_all(self) -> None:
        for run in self._runs:
            while self._send(run):
                pass

    def _finish(self) -> None:
        try:
            self._send_all()
        finally:
            for tracker in self._opened.values():
                tracker.end(self._exit_code)
        self._store(self._cursors)

    def _cursor(self, run: TrackedRun) -> Cursor:
        """How far the run is sent: bytes of run.jsonl, the last step and evaluation."""
        return {"offset": 0, "step": 0, "evaluation": 0, **self._cursors.get(run.id, {})}

    def _send(self, run: TrackedRun) -> bool:
        """Sends the next events; False when there are none."""
        cursor = self._cursor(run)
        last_step = cursor["step"]
        points, notes, end = list[Point](), dict[str, str](), None
        events = list(islice(events_after(run, cursor["offset"]), EVENTS_AT_ONCE))
        for offset, event in events:
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
        if events:
            self._cursors = {**self._cursors, run.id: cursor}
            now = time.monotonic()
            self._unsettled.append((now + self._tracker.settle_seconds, self._cursors))
            while self._unsettled and self._unsettled[0][0] <= now:
                self._store(self._unsettled.popleft()[1])
        return bool(events)

    def _store(self, cursors: Cursors) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(cursors), encoding="utf-8")
        temporary.replace(self._state)


NOTES = {
    "start": "{epoch}, from step {resumed_from_step}",
    "checkpoint": "step {step}",
    "checkpoint_missed": "step {step}: {problem}",
    "end": "step {step}: {reason}: {message}",
}
"""Event of run.jsonl -> the text of that name in a tracker."""


def figures(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of a step or evaluation event, without those that are not finite."""
    if event["event"] == "step":
        found = {name: event[field] for name, field in STEP_FIGURES.items()}
        found[DEVICE_PEAK] = event["tier_peak_bytes"].get(Tier.DEVICE)
    else:
        loss = event["loss"]
        found = {EVALUATION_LOSS: loss, PERPLEXITY: math.exp(loss) if loss is not None and loss < 700 else None}
    yield from ((name, value) for name, value in found.items() if value is not None)


def events_after(run: TrackedRun, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines of run.jsonl from `offset` on, each with its end. A pod begins with a new file, which is
    shorter."""
    path = Path(run.job.output_directory) / "run.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        offset = offset if offset <= file.seek(0, os.SEEK_END) else 0
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
    """All trackers of a job. Raises UserError when their libraries are not installed."""

    def __init__(self, job: JobFile, plan: MemoryPlan, report: Callable[[str], None]) -> None:
        self._feeds: list[Feed] = []
        if job.spec.tracking is None:
            return
        need("trackers")
        directory = Path(job.checkpoint_directory if job.in_cluster else job.output_directory)
        plans = {one.name: one.plan for one in plan.members}
        members = {one.name: member_job(job, one) for one in job.spec.members} or {"": job}
        runs = [TrackedRun(one, plans.get(name, plan), name, directory) for name, one in members.items()]
        self._feeds = [
            Feed(kind, runs, directory, report) for kind in KINDS if getattr(job.spec.tracking, kind) is not None
        ]

    def close(self, exit_code: int) -> None:
        """Sends the last events, within END_SECONDS."""
        until = time.monotonic() + END_SECONDS
        for feed in self._feeds:
            feed.close(exit_code)
        for feed in self._feeds:
            feed.join(max(0.0, until - time.monotonic()))
