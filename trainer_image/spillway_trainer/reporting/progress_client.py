"""Posts ProgressReports from rank 0 to the operator.

The step loop replaces one reference and sets a flag; a daemon thread turns the current figures into JSON and posts
them. If the operator is absent, that costs one line in the log, never a step.
"""

from __future__ import annotations

import dataclasses
import http.client
import math
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from spillway.api.job_file import JobFile
from spillway.api.progress import (
    CA_VARIABLE,
    MAX_BYTES,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    CommittedCheckpoint,
    MemberProgress,
    NamedValue,
    PodMemory,
    ProgressAnswer,
    ProgressReport,
    SpillVolume,
    TierFigures,
    TrainerStatus,
    TrainingProgress,
    steps_of,
)
from spillway.api.sweep.halving import steps_ahead
from spillway.api.sweep.members import member_directory
from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan, Tier
from spillway.units import format_bytes

from ..cgroup import peak_memory_bytes
from ..checkpoints.manifest import CheckpointName

POST_INTERVAL_SECONDS = 5.0
POST_TIMEOUT_SECONDS = 5.0
END_SECONDS = 5.0
"""Time limit of the last post."""
PACE_STEPS = 20
"""The remaining time is estimated from the pace of these steps, including evaluations and checkpoints between them."""
LONGEST_ANSWER = 64 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where progress goes, and what proves who we are."""

    url: SplitResult
    token_path: Path | None
    """Read at each post, because the kubelet renews the token."""
    ca_path: Path | None

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.url.hostname or "", self.url.port
        if self.url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=POST_TIMEOUT_SECONDS)
        context = ssl.create_default_context(cafile=None if self.ca_path is None else str(self.ca_path))
        return http.client.HTTPSConnection(host, port, timeout=POST_TIMEOUT_SECONDS, context=context)

    def headers(self) -> dict[str, str]:
        """Raises OSError if the token cannot be read, ValueError if the file holds none."""
        headers = {"Content-Type": "application/json"}
        if self.token_path is not None:
            headers["Authorization"] = f"Bearer {bearer_token(self.token_path)}"
        return headers


def bearer_token(path: Path) -> str:
    """Reads and checks a token: http.client's own error would quote the token, and the error goes to the log."""
    token = path.read_bytes().strip()
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueError(f"{path}: must contain the ServiceAccount's token, one word of printable ASCII")
    return token.decode("ascii")


def endpoint(environment: Mapping[str, str]) -> Endpoint | None:
    """Returns where to post; None without a URL. Raises UserError for a URL that would send the token unencrypted, or
    nowhere."""
    text = environment.get(URL_VARIABLE, "")
    if not text:
        return None
    url = url_of(text)
    token, ca = environment.get(TOKEN_VARIABLE), environment.get(CA_VARIABLE)
    if url is None or url.scheme not in ("http", "https") or not url.hostname or (url.scheme == "http" and token):
        raise UserError(
            f"environment variable {URL_VARIABLE} = {text}: must be an https URL; the operator sets this variable, so "
            "remove your own value"
        )
    return Endpoint(url, Path(token) if token else None, Path(ca) if ca else None)


def url_of(text: str) -> SplitResult | None:
    """Returns None if `text` is no URL, or if its port is not valid."""
    try:
        url = urlsplit(text)
        _ = url.port  # urllib checks it only now
    except ValueError:
        return None
    return url


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known so far; the step loop replaces it as a whole."""

    step: int
    last: StepMetrics | None = None
    last_time: float = 0.0
    evaluation_loss: float | None = None
    checkpoint: tuple[int, float] | None = None
    """Step and Unix time."""
    checkpoint_member: str = ""
    """In a sweep: the member that the checkpoint belongs to."""
    members: tuple[MemberProgress, ...] = ()
    """In a sweep: all members."""
    best_member: str = ""
    peak: Mapping[str, int] = field(default_factory=dict)
    built_in_bytes: int = 0
    """Peak bytes of the pod that built the corpus, this one or that of an earlier attempt; 0: unknown."""
    first_step: int = 0
    """The step before this attempt's first."""
    eta_seconds: float | None = None
    spill_volume: SpillVolume | None = None

    def steps(self, job: JobFile) -> tuple[int, int]:
        """Returns the steps made and the steps asked for: in a sweep, of all members together."""
        return steps_of(self.members) if self.members else (self.step, job.spec.training.num_steps)

    def steps_left(self, job: JobFile) -> float:
        """Returns the steps to come; in a sweep, of all members, where steps after a coming round count by the fraction
        of members that it lets continue."""
        if self.members:
            return sum(steps_ahead(self.members, job.spec.compared_by.halving).values())
        return max(0, job.spec.training.num_steps - self.step)


class ProgressClient:
    """A sink of the run's events like the Exporter: step, evaluation, checkpoint, close."""

    def __init__(
        self,
        where: Endpoint,
        job: JobFile,
        plan: MemoryPlan,
        resumed_step: int,
        report: Callable[[str], None],
        *,
        built_in_bytes: int = 0,
    ) -> None:
        self._where, self._job, self._plan, self._report = where, job, plan, report
        self._figures = Figures(resumed_step, built_in_bytes=built_in_bytes, first_step=resumed_step)
        self._step_times = deque([time.monotonic()], maxlen=PACE_STEPS + 1)
        self._news, self._closing = threading.Event(), threading.Event()
        self._problem = ""
        self._newest_epoch = job.epoch
        self._heard: int | None = None
        """The operator's last answer about activations, in bytes."""
        self._wanted = plan.bytes[Tier.NVME].activations
        self._connection: http.client.HTTPConnection | None = None
        self._news.set()  # the beginning is posted, too
        self._thread = threading.Thread(target=self._post_for_ever, daemon=True, name="progress")
        self._thread.start()

    @staticmethod
    def from_environment(
        environment: Mapping[str, str],
        job: JobFile,
        plan: MemoryPlan,
        resumed_step: int,
        report: Callable[[str], None],
        *,
        built_in_bytes: int = 0,
    ) -> ProgressClient | None:
        """Returns a client that has begun to post, or None if no operator asks for progress (a local run).

        `report` writes a line to the attempt's log. Raises UserError for a URL that cannot be used.
        """
        where = endpoint(environment)
        if where is None:
            return None
        return ProgressClient(where, job, plan, resumed_step, report, built_in_bytes=built_in_bytes)

    def step(self, step: StepMetrics) -> None:
        now, before = time.monotonic(), self._figures
        self._step_times.append(now)
        pace = (now - self._step_times[0]) / (len(self._step_times) - 1)
        after = dataclasses.replace(before, step=step.step)
        self._tell(
            step=step.step,
            last=step,
            last_time=time.time(),
            peak={tier: max(held, before.peak.get(tier, 0)) for tier, held in step.tier_peak_bytes.items()},
            eta_seconds=pace * after.steps_left(self._job),
        )

    def evaluation(self, loss: float) -> None:
        self._tell(evaluation_loss=loss)

    def checkpoint(self, step: int) -> None:
        self._tell(checkpoint=(step, time.time()))

    def sweep(self, members: tuple[MemberProgress, ...], best: str) -> None:
        self._tell(members=members, best_member=best)

    def member_checkpoint(self, member: str, step: int) -> None:
        self._tell(checkpoint=(step, time.time()), checkpoint_member=member)

    def spill_volume(self, volume: SpillVolume) -> None:
        self._tell(spill_volume=volume)

    @property
    def wanted_activations(self) -> int:
        """Bytes of each rank's spill file that activations may take: those of the plan, until an answer lowers them."""
        return self._wanted

    def close(self) -> None:
        """Posts the newest figures once more, within END_SECONDS; after that, nothing is posted."""
        self._closing.set()
        self._news.set()
        self._thread.join(END_SECONDS)

    def _tell(self, **changes: object) -> None:
        self._figures = dataclasses.replace(self._figures, **changes)  # type: ignore[arg-type]
        self._news.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _post_for_ever(self) -> None:
        closing = False
        while not closing:
            self._news.wait()
            self._news.clear()
            closing = self._closing.is_set()  # after clear(), which may undo close()'s set(), but not its request
            problem = self._attempt()
            if problem and not closing:
                self._news.set()  # what was not delivered is still news
            self._say(problem)
            self._closing.wait(POST_INTERVAL_SECONDS)
        self._disconnect()

    def _say(self, problem: str) -> None:
        """Reports one line when the cause changes, and none while it stays the same."""
        if problem != self._problem:
            where = self._where.url.geturl()
            self._report(f"progress is not delivered to {where}: {problem}" if problem else "progress is delivered now")
        self._problem = problem

    def _attempt(self) -> str:
        """Posts what is known now; returns why that failed, or an empty text."""
        try:
            figures, held = self._figures, peak_memory_bytes(Path("/"))
            body = progress_report(figures, self._job, self._plan, held).model_dump_json(by_alias=True).encode()
            status, content = self._post(body)
            if status != http.client.OK:
                return f"HTTP {status} {content[:200].decode(errors='replace').strip()}"
            self._hear(ProgressAnswer.model_validate_json(content))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._disconnect()
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Makes one request; a kept connection that was lost is reopened once."""
        kept = self._connection is not None
        try:
            return self._request(body)
        except (ConnectionError, http.client.HTTPException):
            self._disconnect()
            if not kept:
                raise
            return self._request(body)

    def _request(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._where.connect()
        path = self._where.url.path or "/"
        query = f"?{self._where.url.query}" if self._where.url.query else ""
        self._connection.request("POST", path + query, body, self._where.headers())
        answer = self._connection.getresponse()
        content = answer.read(LONGEST_ANSWER)
        if not answer.isclosed():  # longer than any answer of ours: the rest would be taken for the next one
            self._disconnect()
        return answer.status, content

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _hear(self, answer: ProgressAnswer) -> None:
        """A newer attempt is only logged, because the checkpoint directory decides who is fenced. Answers to another
        attempt are ignored."""
        if answer.epoch == self._job.epoch and answer.activations not in (None, self._heard):
            self._heard = answer.activations
            self._lower(answer.activations)
        if answer.epoch > self._newest_epoch:
            self._newest_epoch = answer.epoch
            self._report(
                f"the operator's current attempt is {answer.epoch}, but this process belongs to attempt "
                f"{self._job.epoch}"
            )

    def _lower(self, asked: int) -> None:
        before, plan = self._wanted, self._plan
        least = plan.bytes[Tier.NVME].activations - plan.movable_activations
        self._wanted = min(before, max(least, asked))  # one reference, which the step loop reads
        if asked >= before:
            return  # activations that have left NVMe do not return
        stays = f"; {format_bytes(self._wanted)} stay there, because the plan has no host memory for more"
        self._report(
            f"the operator asks activations to use only {format_bytes(asked)} of each rank's spill file instead of "
            f"{format_bytes(before)}{'' if self._wanted == asked else stays}"
        )


@contextmanager
def reporting(
    environment: Mapping[str, str],
    job: JobFile,
    plan: MemoryPlan,
    resumed_step: int,
    report: Callable[[str], None],
    *,
    built_in_bytes: int = 0,
) -> Iterator[ProgressClient | None]:
    """Yields the client during the run, and closes it with the last figures however the run ends; None without an
    operator."""
    client = ProgressClient.from_environment(
        environment, job, plan, resumed_step, report, built_in_bytes=built_in_bytes
    )
    try:
        yield client
    finally:
        if client is not None:
            client.close()


def progress_report(figures: Figures, job: JobFile, plan: MemoryPlan, pod_peak_bytes: int = 0) -> ProgressReport:
    """Raises ValidationError for figures that exceed their bounds."""
    last, (step, steps) = figures.last, figures.steps(job)
    return ProgressReport(
        trainer_status=TrainerStatus(
            progress_percentage=min(100, 100 * step // max(1, steps)),
            estimated_remaining_seconds=None if figures.eta_seconds is None else round(figures.eta_seconds),
            last_updated_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            metrics=tuple(NamedValue(name=name, value=f"{value:.6g}") for name, value in named(figures).items()),
        ),
        spillway=TrainingProgress(
            epoch=job.epoch,
            step=step,
            steps=steps,
            loss=loss_of(figures),
            tokens_per_second=0.0 if last is None else last.tokens_per_second,
            step_seconds=0.0 if last is None else last.step_seconds,
            last_step_time=figures.last_time,
            peak=TierFigures(**{tier.value: figures.peak.get(tier.value, 0) for tier in Tier}),
            budget=TierFigures(**{tier.value: plan.budget.get(tier, 0) for tier in Tier}),
            pod=pod_memory(figures, job, pod_peak_bytes),
            checkpoint=committed(figures, job),
            members=figures.members,
            best_member=figures.best_member,
            spill_volume=figures.spill_volume,
        ),
    )


def pod_memory(figures: Figures, job: JobFile, peak_bytes: int) -> PodMemory:
    """Returns the pod's memory. If the corpus existed already, the peak of the pod that built it counts, too."""
    peak = max(peak_bytes, figures.built_in_bytes) if peak_bytes else 0
    return PodMemory(peak=min(peak, MAX_BYTES), is_whole=saw_a_whole_run(figures, job))


def saw_a_whole_run(figures: Figures, job: JobFile) -> bool:
    """Whether the pod has done everything that takes memory, and will do no more: it made at least the second half of
    the steps including the last one, committed the checkpoint of that step, and evaluated if the job evaluates."""
    steps = job.spec.training.num_steps
    evaluated = job.spec.data.evaluation is None or figures.evaluation_loss is not None
    ended = figures.checkpoint is not None and figures.checkpoint[0] == steps
    return bool(figures.built_in_bytes) and 2 * figures.first_step <= steps and evaluated and ended


def loss_of(figures: Figures) -> float | None:
    """Returns the loss of the last step; in a sweep, the last loss of the best member."""
    best = next((one for one in figures.members if one.name == figures.best_member), None)
    if best is not None:
        return best.loss
    return None if figures.last is None else finite(figures.last.loss)


def named(figures: Figures) -> dict[str, float]:
    """Returns the figures that Kubeflow's tools show by name."""
    last = figures.last
    known = {"evaluation_loss": figures.evaluation_loss}
    if last is not None:
        known |= {
            "loss": last.loss,
            "learning_rate": last.learning_rate,
            "gradient_norm": last.gradient_norm,
            "tokens_per_second": last.tokens_per_second,
        }
    return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def committed(figures: Figures, job: JobFile) -> CommittedCheckpoint | None:
    """Returns the last checkpoint of this attempt."""
    if figures.checkpoint is None:
        return None
    step, when = figures.checkpoint
    directory = job.checkpoint_directory
    if figures.checkpoint_member:
        directory = str(member_directory(directory, figures.checkpoint_member))
    path = Path(directory) / str(CheckpointName(epoch=job.epoch, step=step))
    return CommittedCheckpoint(step=step, epoch=job.epoch, path=str(path), time=when)
