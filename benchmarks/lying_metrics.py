"""Seconds from a TrainingJob to its Job while Prometheus fails or lies, compared with a healthy Prometheus.

There is one real operator process for each state of Prometheus. In each round every operator gets the same TrainingJob,
one after the other, in an order that rotates. The figures are differences, round by round, to the operator with the
healthy Prometheus, in the seconds between the TrainingJob and the POST of its Job.

  killed   nothing listens on its port any more
  hanging  accepts each query and never answers
  garbage  answers with web pages, half answers and random bytes
  empty    answers that it has no series
  stale    answers with what was true ten minutes ago
  lying    reports ten times the truth, or a tenth, so that the worse node looks better and the better one stalled

Prometheus and API server are fakes of the tests (`tests/fakes`), over HTTP on this machine: the seconds are the
operator's own, without those of a real API server. Each operator reads Prometheus every two seconds, not every 15, and
has read good figures before the fault begins, so that it can keep using them wrongly.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import paired

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases.job_documents import document
from fakes.fake_api import FakeApi
from fakes.lying_prometheus import Health, LyingPrometheus, NodeTruth
from harness.operator_process import OperatorProcess, write_kubeconfig
from spillway_operator.measured.metrics_source import QUESTIONS
from spillway_trainer.launch.launcher import free_ports

Object = dict[str, Any]

FAULTS = tuple(health for health in Health if health is not Health.WELL)
NUM_ROUNDS = 30
NUM_QUICK_ROUNDS = 8
INTERVAL_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
"""long, because on a loaded machine processes start slowly"""
POLL_SECONDS = 0.01
GIB = 2**30
NODES = {
    "node-a": NodeTruth(3.0 * GIB, 50.0 * GIB, memory_stalled=0.04, lies=10.0),
    "node-b": NodeTruth(12.0 * GIB, 90.0 * GIB, memory_stalled=0.01, lies=0.1),
}
"""in truth node-b has more room and neither node stalls; the lie is that node-a has more and node-b's memory stalls"""
NODE_STATUS: Object = {
    "allocatable": {"cpu": "8", "memory": "16Gi", "ephemeral-storage": "100Gi"},
    "conditions": [{"type": "Ready", "status": "True"}],
}
BYSTANDER = "bystander"
NAMESPACE = "team"
OF_A_START = {
    ("POST", "configmaps"), ("POST", "jobs"), ("POST", "events"), ("PATCH", "trainingjobs/status"),
}  # fmt: skip
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
KNOWN = tuple(fault for fault in FAULTS if fault is not Health.LYING)
"""faults that an operator can notice"""


class TimedApi(FakeApi):
    """An API server that records when the Job of a TrainingJob is created."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, asyncio.Future[float]] = {}

    def put(self, plural: str, found: Object, *, tell: bool = True) -> Object:
        if plural == "jobs":
            waiting = self.waiting.get(found["metadata"]["labels"]["spillway.dev/job"])
            if waiting is not None and not waiting.done():
                waiting.set_result(time.perf_counter())
        return super().put(plural, found, tell=tell)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of one job."""

    seconds: float
    template: Object
    """its pod template, without preferences for nodes"""
    preferred: tuple[str, ...]
    """nodes, most preferred first"""
    plan: str
    metrics_available: str
    writes: frozenset[tuple[str, str]]
    status: Object


@dataclass(slots=True)
class Site:
    """One operator with an API server and a Prometheus of its own."""

    health: Health
    api: TimedApi
    prometheus: LyingPrometheus
    operator: OperatorProcess
    at_rest: Object = field(default_factory=dict)
    """the bystander's state, which must not change"""

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if self.operator.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.health}: not {what} in {PATIENCE_SECONDS:.0f} s: {self.operator.tail()}")
            await asyncio.sleep(POLL_SECONDS)

    def state(self, name: str) -> str:
        return str((self.api.get("trainingjobs", name).get("status") or {}).get("state", ""))

    async def readings(self, count: int) -> None:
        """Waits for `count` complete readings of the metrics from now on."""
        enough = self.prometheus.num_questions + (count + 1) * len(QUESTIONS)
        await self.until(f"{count} readings", lambda: self.prometheus.num_questions >= enough)

    async def prepare(self) -> None:
        """Waits until the operator has good figures and a job runs."""
        await asyncio.to_thread(self.operator.wait_ready)
        await self.readings(1)
        await self.start_bystander()

    async def break_prometheus(self) -> None:
        """Begins the fault. Returns when the operator must have noticed it."""
        if self.health is Health.WELL:
            return
        self.prometheus.become(self.health)
        if self.health in (Health.KILLED, Health.HANGING):
            await self.until("a failed reading", lambda: "no new metrics" in self.operator.log.read_text())
        else:
            await self.readings(2)

    async def start_bystander(self) -> None:
        """Starts a job on good figures and lets it run."""
        await self.start(BYSTANDER)
        job = self.api.get("jobs", f"{BYSTANDER}-1")
        self.api.put("jobs", job | {"status": {"active": 1, "ready": 1}})
        await self.until("a job that runs", lambda: self.state(BYSTANDER) == "Running")
        self.at_rest = self.bystander()

    def bystander(self) -> Object:
        """Returns the bystander's objects; of its status only the fields that the operator's decisions set."""
        names = {"trainingjobs": BYSTANDER, "jobs": f"{BYSTANDER}-1", "configmaps": f"{BYSTANDER}-1"}
        found = {kind: self.api.objects.get((kind, NAMESPACE, name), {}) for kind, name in names.items()}
        status = found["trainingjobs"].get("status") or {}
        decided = {name: status.get(name) for name in ("state", "attempts", "escalations", "plan")}
        at_rest: Object = json.loads(json.dumps(found | {"trainingjobs": decided}))
        return at_rest

    async def start(self, name: str) -> Start:
        arrives = self.api.waiting[name] = asyncio.get_running_loop().create_future()
        before = len(self.api.requests)
        created = time.perf_counter()
        self.api.put("trainingjobs", document({"metadata.name": name}))
        async with asyncio.timeout(PATIENCE_SECONDS):
            arrived = await arrives
        await self.until("a job that starts", lambda: self.state(name) == "Starting")
        job, files = self.api.get("jobs", f"{name}-1"), self.api.get("configmaps", f"{name}-1")
        status = self.api.get("trainingjobs", name)["status"]
        template, preferred = without_preferences(job["spec"]["template"])
        return Start(
            seconds=arrived - created,
            template=template,
            preferred=preferred,
            plan=files["data"]["plan.json"],
            metrics_available=next(
                (found["status"] for found in status["conditions"] if found["type"] == "MetricsAvailable"), ""
            ),
            writes=frozenset(
                (method, resource_of(path)) for method, path in self.api.requests[before:] if method != "GET"
            ),
            status=status,
        )

    def forget(self, name: str) -> None:
        """Deletes a job as its owner and then the garbage collector would, so that it reserves nothing any more."""
        self.api.remove("trainingjobs", NAMESPACE, name)
        for plural in ("jobs", "configmaps"):
            self.api.remove(plural, NAMESPACE, f"{name}-1")


def without_preferences(template: Object) -> tuple[Object, tuple[str, ...]]:
    """Returns a copy of a pod template without preferences, and the preferred nodes, the most preferred first."""
    copied: Object = json.loads(json.dumps(template))
    affinity = copied["spec"].get("affinity", {}).get("nodeAffinity", {})
    preferred = affinity.pop(PREFERRED, ())
    best = sorted(preferred, key=lambda term: -term["weight"])
    return copied, tuple(term["preference"]["matchFields"][0]["values"][0] for term in best)


def resource_of(path: str) -> str:
    """/apis/batch/v1/namespaces/team/jobs/x/status -> jobs/status"""
    _, _, inside = path.partition("/namespaces/")
    _, plural, *rest = inside.split("/")
    return "/".join([plural, *rest[1:]])


@asynccontextmanager
async def site(health: Health, folder: Path) -> AsyncIterator[Site]:
    folder.mkdir()
    prometheus = LyingPrometheus(NODES)
    try:
        async with TimedApi().running() as api:
            assert isinstance(api, TimedApi)
            for name in NODES:
                api.put("nodes", {"metadata": {"name": name}, "status": dict(NODE_STATUS)})
            environment = {
                "SPILLWAY_TRAINER_IMAGE": "trainer:1", "SPILLWAY_PROMETHEUS_URL": prometheus.url,
                "SPILLWAY_METRICS_INTERVAL_SECONDS": str(INTERVAL_SECONDS),
            }  # fmt: skip
            kubeconfig = write_kubeconfig(folder / "kubeconfig", api.url, None, "secret")
            operator = OperatorProcess.start(kubeconfig, folder / "log", free_ports(1)[0], environment)
            try:
                yield Site(health, api, prometheus, operator)
            finally:
                operator.kill()
    finally:
        prometheus.close()


@dataclass(frozen=True, slots=True)
class Run:
    """All rounds of all operators, and what the operators did that they must not do."""

    starts: Mapping[Health, Sequence[Start]]
    touched: Sequence[Health]
    """states of Prometheus in which the bystander changed"""
    wrong_writes: Mapping[Health, Sequence[tuple[str, str]]]
    """writes that do not belong to a start"""

    def differences(self, fault: Health) -> list[float]:
        """Returns by round how many seconds later a job started than with a healthy Prometheus."""
        pairs = zip(self.starts[fault], self.starts[Health.WELL], strict=True)
        return [start.seconds - well.seconds for start, well in pairs]


async def rounds(num_rounds: int, folder: Path) -> Run:
    """Runs `num_rounds` rounds after one that warms up and is not counted."""
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(site(health, folder / health)) for health in Health]
        await asyncio.gather(*(each.prepare() for each in sites))
        begun = {each.health: len(each.api.requests) for each in sites}
        await asyncio.gather(*(each.break_prometheus() for each in sites))
        starts: dict[Health, list[Start]] = {health: [] for health in Health}
        for number in range(-1, num_rounds):
            name = f"job-{number + 1:02d}"
            for position in range(len(sites)):
                each = sites[(position + number) % len(sites)]
                found = await each.start(name)
                each.forget(name)
                if number >= 0:
                    starts[each.health].append(found)
        return Run(
            starts,
            touched=[each.health for each in sites if each.bystander() != each.at_rest],
            wrong_writes={each.health: wrong_writes(each, begun[each.health]) for each in sites},
        )


def wrong_writes(each: Site, since: int) -> list[tuple[str, str]]:
    made = ((method, resource_of(path)) for method, path in each.api.requests[since:] if method != "GET")
    return [write for write in made if write not in OF_A_START]


def complaints(run: Run) -> list[str]:
    """Returns a sentence for everything that metrics must not decide but did."""
    found = [f"{health}: the job that ran all the time was touched" for health in run.touched]
    found += [f"{health}: wrote {writes}" for health, writes in run.wrong_writes.items() if writes]
    for health, starts in run.starts.items():
        for number, (start, well) in enumerate(zip(starts, run.starts[Health.WELL], strict=True)):
            where = f"{health}, round {number}"
            if start.template != well.template or start.plan != well.plan:
                found.append(f"{where}: pods or plan are others than beside a Prometheus that is well")
            if start.status.get("escalations"):
                found.append(f"{where}: escalated")
            if "requiredDuringSchedulingIgnoredDuringExecution" in json.dumps(start.template):
                found.append(f"{where}: requires a node")
            if health in KNOWN and start.metrics_available != "False":
                found.append(f"{where}: MetricsAvailable={start.metrics_available}")
    return found


def run_rounds(num_rounds: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(rounds(num_rounds, Path(folder)))


def table(run: Run) -> str:
    lines = [f"{'':10}{'create -> Job':>16}{'difference: median':>22}{'max':>10}{'prefers':>20}"]
    for health, starts in run.starts.items():
        middle = 1e3 * median(start.seconds for start in starts)
        differences = [1e3 * seconds for seconds in run.differences(health)]
        first = {start.preferred[0] if start.preferred else "nobody" for start in starts}
        lines.append(
            f"{health:10}{middle:13.1f} ms{median(differences):19.1f} ms{max(differences):7.1f} ms"
            f"{', '.join(sorted(first)):>20}"
        )
    return "\n".join(lines)


def figures(run: Run) -> dict[str, float]:
    medians = {fault: median(run.differences(fault)) for fault in FAULTS}
    worst = {fault: max(run.differences(fault)) for fault in FAULTS}
    return {
        **{f"{fault}_median_difference_seconds": medians[fault] for fault in FAULTS},
        **{f"{fault}_max_difference_seconds": worst[fault] for fault in FAULTS},
        "median_difference_seconds": max(medians.values()),
        "max_difference_seconds": max(worst.values()),
        "wrong_decisions": float(len(complaints(run))),
    }


AT_MOST = {"median_difference_seconds": 0.2, "max_difference_seconds": 2.0, "wrong_decisions": 0.0}


def measure(quick: bool) -> Mapping[str, float]:
    num_rounds = NUM_QUICK_ROUNDS if quick else NUM_ROUNDS
    run = run_rounds(num_rounds)
    print(f"{num_rounds} paired rounds\n\n{table(run)}", flush=True)
    for complaint in complaints(run):
        print(complaint)
    return figures(run)


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("lying_metrics", __doc__, measure, at_most=AT_MOST)
