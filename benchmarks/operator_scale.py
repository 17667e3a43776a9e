"""The operator with 1,000 TrainingJobs (`--quick`: 100; OPERATOR_SCALE_JOBS: any number): its writes, memory, failures.

Real: API server, etcd, scheduler, controller manager and Kubernetes' own objects, all on this machine's loopback (the
test bed, docs/test-bed.md: Linux, root); the operator, as a process on this machine with the rights of its chart; its
planning and placement of every job; its HTTPS endpoint, the trainers' tokens and the operator's reviews of them;
kill -9.

Fake: nodes and the start of pods (KWOK), the ends of pods (this benchmark writes them), the trainers (one coroutine per
job, which posts every 15 s, with peaks that no other job of its profile has), and Prometheus, which reports the same
free bytes for every node. No container runs and nothing is trained. The operator shares two cores with everything else.

Requests are counted in the API server's audit log, by the operator's user name. Not in the figures, but counted and
printed: writes of the Lease, Events, token reviews (which store nothing), MemoryProfiles, and status writes that only
report progress, as the benchmark's own watch sees them. Four fifths of the jobs have two pods and a Service, the others
one pod.

  calibration  a client that only creates makes ConfigMap, Service and suspended Job of a quarter as many jobs;
               `calibration_p99_seconds` is the time until 99 % of them exist, times four
  burst        all jobs are created at once: `create_to_child_p99_seconds` is from a TrainingJob's arrival at the API
               server to that of its Job, both by the audit log
  progress     all trainers post for a minute, and continue until the end
  steady       half a minute: `writes_steady_state`
  restart      kill -9 and a new process: `writes_after_restart`, and its memory
  kills        a quarter more jobs; kill -9 when a quarter, a half and three quarters of them are served;
               then the children of all jobs are counted: `duplicates`, `missing`
  ends         every pod of the first jobs succeeds: `writes_per_job` counts the writes of their whole life

`operator_rss_bytes` is the highest resident size (VmHWM) of any operator process; `lease_losses` counts processes that
ended by themselves; `profile_writes_in_30_seconds` is for the profile with the most writes in any 30 s.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import itertools
import json
import math
import os
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import paired
from processes import cpu_seconds, peak_resident_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("hack", "tests")]

from harness.installed import (  # noqa: E402
    CHART,
    HOST_MOUNT_IMAGE,
    LONG,
    OPERATOR_USER,
    RELEASE,
    SYSTEM_NAMESPACE,
    Document,
    example,
    named,
    running_for_an_hour,
)
from harness.operator_process import OperatorProcess, write_kubeconfig  # noqa: E402
from spillway_operator.measured.memory_profiles import PROFILE_SECONDS  # noqa: E402
from spillway_trainer.launch.launcher import free_ports  # noqa: E402
from synthetic_trainers import JOBS_PATH, Server, Statuses, Trainers, end_pods, prometheus  # noqa: E402
from testbed.bed import runs as bed_runs  # noqa: E402
from testbed.certificates import ADMINISTRATOR, AUTHORITY  # noqa: E402
from testbed.client import Bed, Request  # noqa: E402
from testbed.layout import API_SERVER, state  # noqa: E402

FULL_JOBS, QUICK_JOBS = 1000, 100
PODS_OF_A_NODE = 110
NODE_HOST_BYTES, NODE_DISK_BYTES = 900 << 30, 900 << 30
TWO_PODS, ONE_POD, KILLED, CALIBRATION = (f"scale-{name}" for name in ("two-pods", "one-pod", "killed", "calibration"))
LENGTHS = (64, 96, 112, 128)
"""lengths of sequences: jobs of one length share a profile"""
KILLS = 3
LONGEST_WAIT_SECONDS = 400.0
"""limit for all jobs to reach a state"""
SETTLE_SECONDS = 5.0
"""time for writes under way to end, and for the watch to deliver them"""
PROGRESS_SECONDS, STEADY_SECONDS, RESTART_SECONDS = 60.0, 30.0, 20.0
APART = ("leases", "events", "tokenreviews", "memoryprofiles")
AT_MOST = {
    "writes_per_job": 6.05,
    "writes_per_one_pod_job": 5.05,
    "writes_steady_state": 0.0,
    "writes_after_restart": 0.0,
    "profile_writes_in_30_seconds": 1.0,
    "operator_rss_bytes": 140e6,
    "duplicates": 0.0,
    "missing": 0.0,
    "lease_losses": 0.0,
}


# --- figures ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The number of mutating requests of the operator in some time."""

    apart: Counter[str]
    """requests for the resources in APART, by resource"""
    status: Counter[str]
    """status writes of TrainingJobs by namespace, including those for progress"""
    others: Counter[str]
    """all other requests, by namespace"""


def written(requests: Iterable[Request]) -> Written:
    found = Written(Counter(), Counter(), Counter())
    for request in requests:
        if not request.mutating:
            continue
        if request.resource in APART:
            found.apart[request.resource] += 1
        elif request.resource == "trainingjobs" and request.subresource == "status":
            found.status[request.namespace] += 1
        else:
            found.others[request.namespace] += 1
    return found


def seconds_of(request: Request) -> float:
    return datetime.fromisoformat(request.at).timestamp()


def create_to_child(requests: Iterable[Request], namespaces: Sequence[str]) -> list[float]:
    """Returns the seconds from each TrainingJob's creation to that of its first Job; infinite if it has none."""
    began: dict[tuple[str, str], float] = {}
    children: dict[tuple[str, str], float] = {}
    for request in requests:
        if request.verb == "create" and request.code == 201 and request.namespace in namespaces:
            if request.resource == "trainingjobs":
                began[request.namespace, request.name] = seconds_of(request)
            elif request.resource == "jobs":
                children.setdefault((request.namespace, request.name.rpartition("-")[0]), seconds_of(request))
    return [children.get(key, math.inf) - begin for key, begin in began.items()]


def p99(values: Sequence[float]) -> float:
    """Returns the least value that at least 99 % of `values` do not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else math.nan


def most_within(times: Sequence[float], seconds: float) -> int:
    """Returns the largest number of `times` within an interval shorter than `seconds`."""
    ordered = sorted(times)
    return max((bisect.bisect_left(ordered, begin + seconds) - at for at, begin in enumerate(ordered)), default=0)


def busiest_profile(requests: Iterable[Request]) -> int:
    """Returns the most writes of one profile within 99 % of PROFILE_SECONDS: requests take a varying time to the API
    server, so two of them may arrive a little closer than they were sent."""
    times: dict[tuple[str, str], list[float]] = {}
    for request in requests:
        if request.mutating and request.resource == "memoryprofiles":
            times.setdefault((request.namespace, request.name), []).append(seconds_of(request))
    return max((most_within(of_one, 0.99 * PROFILE_SECONDS) for of_one in times.values()), default=0)


def longest_gap(requests: Iterable[Request]) -> float:
    """Returns the longest time in seconds between two renewals of the Lease."""
    times = sorted(seconds_of(one) for one in requests if one.resource == "leases" and one.mutating and one.code < 300)
    return max((after - before for before, after in itertools.pairwise(times)), default=math.nan)


class Balance(NamedTuple):
    duplicates: int
    missing: int


def balance(expected: Counter[str], found: Counter[str]) -> Balance:
    """Compares the objects that belong to each job with the expected ones, both counted by the job's name."""
    return Balance((found - expected).total(), (expected - found).total())


# --- the operator -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Operator:
    """The operator: one process after the other, with their highest memory and how many ended by themselves."""

    kubeconfig: Path
    log: Path
    environment: dict[str, str]
    current: OperatorProcess
    peak_bytes: int = 0
    ended_by_itself: int = 0

    @classmethod
    def start(cls, kubeconfig: Path, log: Path, environment: dict[str, str]) -> Operator:
        return cls(kubeconfig, log, environment, cls._process(kubeconfig, log, environment))

    @staticmethod
    def _process(kubeconfig: Path, log: Path, environment: dict[str, str]) -> OperatorProcess:
        process = OperatorProcess.start(kubeconfig, log, free_ports(1)[0], environment)
        try:
            process.wait_ready()
        except AssertionError:
            process.kill()
            raise
        return process

    def kill(self) -> None:
        """Ends the process by kill -9 and notes its peak memory, or notes that it ended by itself before."""
        if self.current.process.poll() is not None:
            self.ended_by_itself += 1
            return
        self.peak_bytes = max(self.peak_bytes, peak_resident_bytes(self.current.process.pid))
        self.current.kill()

    def replace(self) -> None:
        self.kill()
        self.current = self._process(self.kubeconfig, self.log, self.environment)


# --- the bed ----------------------------------------------------------------------------------------------------------


@contextmanager
def running_bed(num_nodes: int) -> Iterator[Bed]:
    """Starts the test bed if it does not run. Ends it only if it was started here."""
    found = state()
    ran = bed_runs(found)
    try:
        testbed_command("up", "--fake-nodes", str(num_nodes))
        yield Bed(found)
    finally:
        if not ran:
            testbed_command("down")


def testbed_command(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "hack")}
    ended = subprocess.run([sys.executable, "-m", "testbed", *arguments], env=environment, check=False)
    if ended.returncode:
        sys.exit(f"operator_scale needs the test bed (docs/test-bed.md): `testbed {arguments[0]}` did not work")


def install(bed: Bed) -> None:
    """Installs the chart's rights, CRDs and certificate, with 0 replicas of its operator."""
    values = {"image": HOST_MOUNT_IMAGE, "trainer": {"image": HOST_MOUNT_IMAGE}, "replicas": 0}
    file = bed.state.data / "scale-values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    bed.helm(
        "upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--values", file
    )
    bed.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.spillway.dev", "--timeout=30s")
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while "items" not in bed.read(JOBS_PATH):  # established CRDs are served only a moment later
        if time.monotonic() > deadline:
            sys.exit("the API server does not serve TrainingJobs")
        time.sleep(0.2)


def write_certificate(bed: Bed, folder: Path) -> Path:
    """Writes the certificate of the progress endpoint, which the chart made, to `folder`."""
    data = bed.get("secrets", "-n", SYSTEM_NAMESPACE, "--field-selector", "type=kubernetes.io/tls")["items"][0]["data"]
    folder.mkdir()
    for name, encoded in data.items():
        (folder / name).write_bytes(base64.b64decode(encoded))
    return folder


@contextmanager
def namespaces(bed: Bed, *names: str) -> Iterator[None]:
    bed.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names))
    for name in names:
        bed.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=30s")
    try:
        yield
    finally:
        bed.kubectl("delete", "namespace", *names, "--wait=false")


def administrator(bed: Bed) -> ssl.SSLContext:
    folder = bed.state.certificates
    context = ssl.create_default_context(cafile=str(folder / f"{AUTHORITY}.crt"))
    context.load_cert_chain(folder / f"{ADMINISTRATOR.name}.crt", folder / f"{ADMINISTRATOR.name}.key")
    return context


# --- jobs -------------------------------------------------------------------------------------------------------------


def jobs(namespace: str, count: int) -> list[Document]:
    """Returns `count` jobs: with one pod each in namespace ONE_POD, with two pods and a Service in the others."""
    kind = "one-pod" if namespace == ONE_POD else "two-pod"
    models = [
        running_for_an_hour(
            example(kind, namespace, checkpoint__claim=None, training__steps=LONG, training__sequenceLength=length)
        )
        for length in LENGTHS
    ]
    return [named(models[number % len(LENGTHS)], f"job-{number:04}") for number in range(count)]


async def create(server: Server, documents: Iterable[Document]) -> None:
    path = "/apis/spillway.dev/v1alpha1/namespaces/{}/trainingjobs"
    await asyncio.gather(*(server.create(path.format(one["metadata"]["namespace"]), one) for one in documents))


async def calibrated(server: Server, count: int) -> float:
    """Creates the objects of `count` jobs by a client that only creates. Returns the 99th percentile of the seconds
    from the beginning until a Job exists."""
    metadata = {"namespace": CALIBRATION}
    container = {"name": "none", "image": "none"}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    begin, seconds = time.monotonic(), []

    async def make(number: int) -> None:
        own = {"metadata": {**metadata, "name": f"job-{number:04}"}}
        core, batch = (f"{group}/namespaces/{CALIBRATION}" for group in ("/api/v1", "/apis/batch/v1"))
        await server.create(f"{core}/configmaps", {"apiVersion": "v1", "kind": "ConfigMap", **own, "data": {"x": "y"}})
        service = {"clusterIP": "None", "selector": {"job": f"{number}"}}
        await server.create(f"{core}/services", {"apiVersion": "v1", "kind": "Service", **own, "spec": service})
        job = {"suspend": True, "template": pod}
        await server.create(f"{batch}/jobs", {"apiVersion": "batch/v1", "kind": "Job", **own, "spec": job})
        seconds.append(time.monotonic() - begin)

    await asyncio.gather(*map(make, range(count)))
    return p99(seconds)


async def balanced(server: Server, counts: dict[str, int]) -> Balance:
    """Counts duplicate and missing children of all jobs. An attempt beyond the first counts as a duplicate, too."""
    duplicates = missing = 0
    for namespace, count in counts.items():
        names = Counter(f"job-{number:04}" for number in range(count))
        services = Counter() if namespace == ONE_POD else names
        for path, expected in (
            (f"/api/v1/namespaces/{namespace}/configmaps", names),
            (f"/apis/batch/v1/namespaces/{namespace}/jobs", names),
            (f"/api/v1/namespaces/{namespace}/services", services),
        ):
            owned = await server.items(path, labelSelector="app.kubernetes.io/managed-by=spillway")
            found = balance(expected, Counter(one["metadata"]["labels"]["spillway.dev/job"] for one in owned))
            duplicates, missing = duplicates + found.duplicates, missing + found.missing
        for job in await server.items(f"/apis/spillway.dev/v1alpha1/namespaces/{namespace}/trainingjobs"):
            duplicates += job["status"]["attempts"]["total"] - 1
    return Balance(duplicates, missing)


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """What the phases of the benchmark share."""

    bed: Bed
    server: Server
    statuses: Statuses
    trainers: Trainers
    operator: Operator
    watch: asyncio.Task[None]
    """the task that watches TrainingJobs for `statuses`"""
    num_jobs: int

    @property
    def counts(self) -> dict[str, int]:
        """The number of jobs whose whole life is measured, by namespace."""
        return {TWO_PODS: self.num_jobs * 4 // 5, ONE_POD: self.num_jobs - self.num_jobs * 4 // 5}

    def requests(self, since: int) -> list[Request]:
        return self.bed.requests(since, OPERATOR_USER)

    async def until(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while not reached():
            if self.watch.done():
                self.watch.result()
            if self.operator.current.process.poll() is not None:
                sys.exit(f"the operator ended by itself while {what}: {self.operator.current.tail()}")
            if time.monotonic() > deadline:
                states = {namespace: dict(self.statuses.states(namespace)) for namespace in (*self.counts, KILLED)}
                sys.exit(f"{what}: not within {LONGEST_WAIT_SECONDS:.0f} s: {states}; {self.operator.current.tail()}")
            await asyncio.sleep(0.05)

    async def all_are(self, wanted: str, counts: dict[str, int]) -> None:
        def reached() -> bool:
            return all(self.statuses.states(namespace)[wanted] == count for namespace, count in counts.items())

        await self.until(f"jobs become {wanted}", reached)

    async def burst(self) -> list[float]:
        since, began = self.bed.audit_position(), time.monotonic()
        await create(self.server, [job for namespace, count in self.counts.items() for job in jobs(namespace, count)])
        created = time.monotonic() - began
        await self.all_are("Running", self.counts)
        process = self.operator.current.process.pid
        print(
            f"burst: {self.num_jobs} jobs created in {created:.1f} s, all Running after "
            f"{time.monotonic() - began:.1f} s; operator: {cpu_seconds(process):.1f} s of CPU, "
            f"{peak_resident_bytes(process) / 1e6:.0f} MB at most",
            flush=True,
        )
        # Requests of all users, because the administrator creates the TrainingJobs.
        return create_to_child(self.bed.requests(since), list(self.counts))

    async def progress(self) -> None:
        since, before = self.bed.audit_position(), self.statuses.progress_writes.total()
        for namespace in self.counts:
            await self.trainers.begin(namespace)
        began, cpu = time.monotonic(), cpu_seconds(self.operator.current.process.pid)
        await asyncio.sleep(PROGRESS_SECONDS)
        seconds = time.monotonic() - began
        apart = written(self.requests(since)).apart
        posts, status = self.trainers.posts.total(), self.statuses.progress_writes.total() - before
        share = (cpu_seconds(self.operator.current.process.pid) - cpu) / seconds
        print(
            f"progress: {posts} posts in {seconds:.0f} s ({dict(self.trainers.posts)}), {status / seconds:.1f} status "
            f"writes/s, {share:.0%} of a core; apart: {dict(apart)}",
            flush=True,
        )

    async def writes_in(self, seconds: float, before: Callable[[], None] = lambda: None) -> int:
        """Calls `before` and returns the operator's writes in `seconds`, without those of APART and for progress."""
        await asyncio.sleep(SETTLE_SECONDS)
        since, statuses = self.bed.audit_position(), self.statuses.other_writes.total()
        await asyncio.to_thread(before)
        await asyncio.sleep(seconds)
        found = written(self.requests(since))
        if found.others:
            print(f"writes where there should be none: {dict(found.others)}", flush=True)
        return found.others.total() + self.statuses.other_writes.total() - statuses

    async def kills(self, count: int) -> None:
        creating = asyncio.create_task(create(self.server, jobs(KILLED, count)))
        for kill in range(1, KILLS + 1):
            served = count * kill // (KILLS + 1)
            await self.until("jobs begin", lambda at_least=served: self._served() >= at_least)
            await asyncio.to_thread(self.operator.replace)
        await creating
        await self.all_are("Running", {KILLED: count})

    def _served(self) -> int:
        """The number of jobs of KILLED whose status an operator has written."""
        return sum(key[0] == KILLED and "state" in status for key, status in self.statuses.newest.items())

    async def ends(self) -> None:
        began = time.monotonic()
        for namespace in self.counts:
            await end_pods(self.server, namespace)
        await self.all_are("Complete", self.counts)
        await asyncio.sleep(SETTLE_SECONDS)
        print(f"ends: all Complete after {time.monotonic() - began:.1f} s", flush=True)

    def writes_of_a_life(self, requests: Sequence[Request]) -> dict[str, float]:
        """Returns the writes per job by namespace, without those for progress."""
        found, per_job = written(requests), {}
        for namespace, count in self.counts.items():
            status, progress = found.status[namespace], self.statuses.progress_writes[namespace]
            per_job[namespace] = (found.others[namespace] + status - progress) / count
            print(
                f"{namespace}: {count} jobs, children and deletions {found.others[namespace] / count:.3f} a job, "
                f"status {(status - progress) / count:.3f}, for progress {progress / count:.3f}"
            )
        print(f"counted apart, all jobs: {dict(found.apart)}")
        return per_job


@asynccontextmanager
async def set_up(num_jobs: int, num_killed: int) -> AsyncIterator[Run]:
    num_nodes = math.ceil(2 * (num_jobs + num_killed) / PODS_OF_A_NODE) + 4
    async with AsyncExitStack() as stack:
        bed = stack.enter_context(running_bed(num_nodes))
        install(bed)
        stack.enter_context(namespaces(bed, TWO_PODS, ONE_POD, KILLED, CALIBRATION))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="operator-scale-")))
        tls = write_certificate(bed, folder / "tls")
        token = bed.kubectl("create", "token", RELEASE, "-n", SYSTEM_NAMESPACE, "--duration=1h").strip()
        kubeconfig = write_kubeconfig(folder / "kubeconfig", API_SERVER, bed.state.certificates / "ca.crt", token)
        nodes = [f"fake-{number:03}" for number in range(num_nodes)]
        metrics = await stack.enter_async_context(prometheus(nodes, NODE_HOST_BYTES, NODE_DISK_BYTES))
        server = await stack.enter_async_context(Server(API_SERVER, administrator(bed)))
        statuses = Statuses()
        following = asyncio.create_task(statuses.follow(server))
        stack.callback(following.cancel)
        port, name = free_ports(1)[0], f"{RELEASE}.{SYSTEM_NAMESPACE}.svc"
        trust = ssl.create_default_context(cafile=str(tls / "ca.crt"))
        trainers = Trainers(server, statuses, f"https://127.0.0.1:{port}/progress", name, trust, LONG)
        await stack.enter_async_context(trainers.posting())
        environment = {
            "SPILLWAY_TRAINER_IMAGE": "local/hostroot:1", "SPILLWAY_PROMETHEUS_URL": metrics,
            "SPILLWAY_LEASE_NAME": RELEASE, "SPILLWAY_POD_NAMESPACE": SYSTEM_NAMESPACE,
            "SPILLWAY_POD_UID": str(uuid.uuid4()), "SPILLWAY_TLS_DIRECTORY": str(tls),
            "SPILLWAY_PROGRESS_URL": f"https://{name}:8443/progress", "SPILLWAY_PROGRESS_PORT": str(port),
        }  # fmt: skip
        operator = await asyncio.to_thread(Operator.start, kubeconfig, folder / "operator.log", environment)
        stack.callback(lambda: end_operator(operator))
        yield Run(bed, server, statuses, trainers, operator, following, num_jobs)


def end_operator(operator: Operator) -> None:
    with suppress(OSError):
        operator.current.kill()


async def run(num_jobs: int) -> dict[str, float]:
    num_killed = max(num_jobs // 4, KILLS + 1)
    async with set_up(num_jobs, num_killed) as found:
        since = found.bed.audit_position()
        calibration = await calibrated(found.server, num_killed)
        waits = await found.burst()
        await found.progress()
        steady = await found.writes_in(STEADY_SECONDS)
        gap = longest_gap(found.requests(since))
        restarted = await found.writes_in(RESTART_SECONDS, found.operator.replace)
        peak = peak_resident_bytes(found.operator.current.process.pid)
        print(f"restart: {peak / 1e6:.0f} MB at most with {num_jobs} running jobs", flush=True)
        await found.kills(num_killed)
        counts = found.counts | {KILLED: num_killed}
        children = await balanced(found.server, counts)
        await found.ends()
        found.operator.kill()
        requests = found.requests(since)
        per_job = found.writes_of_a_life(requests)
    print(f"longest time between two renewals of the Lease before the first kill: {gap:.1f} s")
    return {
        "num_jobs": num_jobs,
        "writes_per_job": per_job[TWO_PODS],
        "writes_per_one_pod_job": per_job[ONE_POD],
        "writes_steady_state": steady,
        "writes_after_restart": restarted,
        "profile_writes_in_30_seconds": busiest_profile(requests),
        "operator_rss_bytes": found.operator.peak_bytes,
        "duplicates": children.duplicates,
        "missing": children.missing,
        "lease_losses": found.operator.ended_by_itself,
        "create_to_child_p99_seconds": p99(waits),
        "calibration_p99_seconds": calibration * num_jobs / num_killed,
    }


def measure(quick: bool) -> dict[str, float]:
    default = QUICK_JOBS if quick else FULL_JOBS
    return asyncio.run(run(int(os.environ.get("OPERATOR_SCALE_JOBS", default))))


if __name__ == "__main__":
    paired.main("operator_scale", __doc__ or "", measure, AT_MOST)
