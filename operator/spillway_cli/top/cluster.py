"""Reads TrainingJobs for `spillway top`: their status, their pods' nodes, and the trainer's own /metrics.

Only /metrics needs more rights (`pods/proxy`) than `spillway status` and `logs`: without that right, or if the API
server cannot reach the pod, the view says what is not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

from spillway import metrics
from spillway.plan import Tier
from spillway.units import parse_quantity

from ..cluster.api import CORE, ClusterClient, Object, RequestDenied, Unreachable, get_job, jobs_path
from ..cluster.job_status import age, has_ended, that_matter, value_at
from ..cluster.logs import JOB_LABEL, attempt_of, node_of
from ..cluster.status import condition_line, count, figure, status_members
from .run import LINKS, mean_of
from .view import LiveRates, RunView, TierView

OWN_PODS = "app.kubernetes.io/managed-by=spillway"
METRICS_PORT_NAME = "metrics"
PAGE_SECONDS = 4.0
LONGEST_PAGE_LINES = 20_000
WINDOW_PAGES = 15
"""Number of kept metrics pages; rates are differences between the newest and the oldest."""
NOT_LOOKED_AT = "not processed"
"""State of a job before the operator first processes it."""
JobKey = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Page:
    """One reading of the trainer's /metrics: counters since its process began, summed over the pod's ranks."""

    step: int
    phase_seconds: Mapping[str, float]
    """Phase -> seconds of rank 0."""
    moved_bytes: Mapping[str, float]
    tiers: Mapping[str, Mapping[Tier, int]]
    """Metric name -> bytes of the pod's rank that holds most."""


# --- pure -------------------------------------------------------------------------------------------------------------


def quantity(text: object) -> int | None:
    if text is None:
        return None
    try:
        return parse_quantity(str(text))
    except ValueError:
        return None


def job_view(
    job: Object, pods: Sequence[Object] | None, now: datetime, pages: Sequence[Page] = (), unknown: Iterable[str] = ()
) -> RunView:
    """The view of a job. `pods`: those of its newest attempt, None = could not be listed; `pages`: oldest first."""
    status = job.get("status") or {}
    placed = tuple(sorted({str(node) for pod in pods or () if (node := value_at(pod, "spec.nodeName"))}))
    planned = tuple(str(node) for node in value_at(job, "status.plan.nodes") or ())[:1]
    ended = has_ended(job)
    return RunView(
        name=str(job["metadata"]["name"]),
        namespace=str(job["metadata"].get("namespace", "")),
        state=str(status.get("state") or NOT_LOOKED_AT),
        attempt=count(value_at(job, "status.attempts.total")),
        step=count(value_at(job, "status.progress.step")),
        steps=count(value_at(job, "status.progress.steps")) or count(value_at(job, "spec.training.steps")),
        loss=figure(value_at(job, "status.progress.loss")),
        tokens_per_second=figure(value_at(job, "status.progress.tokensPerSecond")),
        eta="" if ended else str(value_at(job, "status.progress.eta") or ""),
        restarts=count(value_at(job, "status.attempts.restarts")),
        tiers=tuple(tier_view(tier, job, pages[-1] if pages else None) for tier in Tier),
        nodes=placed or ((() if ended else planned) if pods is None else ()),
        nodes_are_planned=not placed and pods is None and bool(planned) and not ended,
        age=age(str(job["metadata"].get("creationTimestamp", "")), now),
        rates=None if not pages else rates_between(pages[0], pages[-1]) or since_the_start(pages[-1]),
        members=status_members(job),
        sentences=tuple(condition_line(one) for one in that_matter(job)),
        unknown=tuple(unknown),
        is_over=ended,
    )


def tier_view(tier: Tier, job: Object, page: Page | None) -> TierView:
    """One tier's bytes: the trainer's own page is newer than the status."""
    live = {} if page is None else {name: held.get(tier) for name, held in page.tiers.items()}
    budget = live.get(metrics.TIER_BUDGET_BYTES.name) or quantity(value_at(job, f"spec.memory.budget.{tier.value}"))
    peak = live.get(metrics.TIER_PEAK_BYTES.name)
    reported = quantity(value_at(job, f"status.memory.peak.{tier.value}"))
    return TierView(
        tier,
        quantity(value_at(job, f"status.plan.bytes.{tier.value}")),
        budget or None,
        reported if peak is None else max(peak, reported or 0),
        live.get(metrics.TIER_BYTES.name),
    )


def newest_pods(pods: Iterable[Object]) -> dict[JobKey, list[Object]]:
    """Job -> the pods of its newest attempt that has any, by node."""
    of_jobs: dict[JobKey, list[Object]] = {}
    for pod in pods:
        metadata = pod["metadata"]
        key = str(metadata.get("namespace", "")), str((metadata.get("labels") or {}).get(JOB_LABEL, ""))
        of_jobs.setdefault(key, []).append(pod)
    return {key: newest_attempt(own) for key, own in of_jobs.items()}


def newest_attempt(pods: Sequence[Object]) -> list[Object]:
    newest = max(map(attempt_of, pods))
    return sorted((pod for pod in pods if attempt_of(pod) == newest), key=node_of)


def key_of(job: Object) -> JobKey:
    return str(job["metadata"].get("namespace", "")), str(job["metadata"]["name"])


def metrics_path(pod: Object) -> str | None:
    """Path to the pod's /metrics through the API server; None if the pod does not run or serves none."""
    ports = [
        port.get("containerPort")
        for container in value_at(pod, "spec.containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == METRICS_PORT_NAME
    ]
    if value_at(pod, "status.phase") != "Running" or not ports:
        return None
    metadata = pod["metadata"]
    return f"{CORE}/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{ports[0]}/proxy/metrics"


def read_page(text: str) -> Page | None:
    """Parses a page of metrics; None if it is not a trainer's, or before its first step."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    step, phases, moved = -1, dict[str, float](), dict[str, float]()
    tiers: dict[str, dict[Tier, int]] = {}
    gauges = {one.name for one in (metrics.TIER_BYTES, metrics.TIER_PEAK_BYTES, metrics.TIER_BUDGET_BYTES)}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels, value = sample.labels, sample.value
                if sample.name == metrics.STEP.name:
                    step = int(value)
                elif sample.name == metrics.PHASE_SECONDS.name:
                    phases[labels["phase"]] = value
                elif sample.name == metrics.MOVED_BYTES.name:
                    moved[labels["link"]] = moved.get(labels["link"], 0.0) + value
                elif sample.name in gauges and labels.get("tier") in set(Tier):
                    held, tier = tiers.setdefault(sample.name, {}), Tier(labels["tier"])
                    held[tier] = max(int(value), held.get(tier, 0))
    except (ValueError, KeyError, IndexError, OverflowError):
        return None
    return None if step < 0 else Page(step, phases, moved, tiers)


def rates_between(first: Page, last: Page) -> LiveRates | None:
    """Rates between two pages; None if no step ended between them, or the second is from another process."""
    phases = {phase: value - first.phase_seconds.get(phase, 0.0) for phase, value in last.phase_seconds.items()}
    moved = {link: last.moved_bytes.get(link, 0.0) - first.moved_bytes.get(link, 0.0) for link in LINKS}
    steps, seconds = last.step - first.step, sum(phases.values())
    if steps <= 0 or seconds <= 0 or min(*phases.values(), *moved.values()) < 0:
        return None
    return rates(mean_of(steps), phases, moved, steps)


def since_the_start(page: Page) -> LiveRates | None:
    """Sums over all steps of the trainer's process: it may have resumed, so their number is not known."""
    if not sum(page.phase_seconds.values()):
        return None
    return rates("all steps since the trainer started", page.phase_seconds, page.moved_bytes, 1)


def rates(over: str, phases: Mapping[str, float], moved: Mapping[str, float], steps: int) -> LiveRates:
    seconds = sum(phases.values())
    links = {link: moved.get(link, 0.0) / seconds for link in LINKS if moved.get(link)}
    return LiveRates(over, links, {phase: value / steps for phase, value in phases.items()})


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FleetSource:
    """Every TrainingJob of a namespace, or (None) of all namespaces."""

    cluster: ClusterClient
    namespace: str | None

    def look(self) -> tuple[list[RunView], tuple[str, ...]]:
        """The jobs, and what could not be read."""
        now = datetime.now(UTC)
        jobs = self.cluster.items(jobs_path(self.namespace))
        pods, unknown = list_pods(self.cluster, self.namespace, OWN_PODS) if jobs else ([], ())
        if pods is None:
            return [job_view(job, None, now) for job in jobs], unknown
        own = newest_pods(pods)
        return [job_view(job, own.get(key_of(job), []), now) for job in jobs], unknown


def list_pods(
    cluster: ClusterClient, namespace: str | None, selector: str
) -> tuple[list[Object] | None, tuple[str, ...]]:
    """The pods; None and a sentence if they cannot be listed."""
    inner = "" if namespace is None else f"/namespaces/{namespace}"
    try:
        return cluster.items(f"{CORE}{inner}/pods", labelSelector=selector), ()
    except (RequestDenied, Unreachable) as error:
        return None, (f"the pods' nodes (~ = planned node): {error}",)


@dataclass(slots=True)
class JobSource:
    """One TrainingJob and its trainer."""

    cluster: ClusterClient
    namespace: str
    name: str
    _pages: deque[Page] = field(default_factory=lambda: deque(maxlen=WINDOW_PAGES))
    _pod: str = ""
    """Path of the pod that the pages are from."""

    def look(self) -> RunView:
        """Raises Gone when there is no such job."""
        job = get_job(self.cluster, self.namespace, self.name)
        pods, unknown = list_pods(self.cluster, self.namespace, f"{JOB_LABEL}={self.name}")
        own = newest_pods(pods or ()).get(key_of(job), [])
        missing = "" if has_ended(job) else self._ask_trainer(own)
        if missing:
            unknown = (*unknown, f"rates, phases and current bytes: {missing}")
        return job_view(job, None if pods is None else own, datetime.now(UTC), tuple(self._pages), unknown)

    def _ask_trainer(self, pods: Sequence[Object]) -> str:
        """Reads and keeps the page of the first node's pod; returns why that failed, or an empty string."""
        path = metrics_path(pods[0]) if pods else None
        if path is None:
            self._pages.clear()
            return "no trainer is running"
        if path != self._pod:
            self._pages.clear()
            self._pod = path
        try:
            lines = [*islice(self.cluster.lines(path, PAGE_SECONDS), LONGEST_PAGE_LINES)]
        except (RequestDenied, Unreachable) as error:
            self._pages.clear()
            return f"cannot read the trainer's metrics: {error}"
        page = read_page("\n".join(line.decode(errors="replace") for line in lines) + "\n")
        if page is None:
            self._pages.clear()
            return "the trainer has not finished a step yet"
        if self._pages and page.step < self._pages[-1].step:
            self._pages.clear()
        self._pages.append(page)
        return ""
