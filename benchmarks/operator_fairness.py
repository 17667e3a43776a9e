"""How long small jobs wait for the operator while another namespace submits expensive jobs.

Real: API server, etcd, scheduler and controller manager on this machine's loopback (the test bed, docs/test-bed.md:
Linux, root); the operator, as a process on this machine with the rights of its chart; its planner. Fake: nodes and pods
(KWOK). Everything shares this machine's cores.

Namespace `greedy` has GREEDY_JOBS jobs (`--quick`: a fifth), each of which takes seconds to plan and fits no node.
Meanwhile namespace `modest` gets a small job every second. Measured by the API server's audit log:

  start     from a small job's creation to that of its Job
  suspend   from `spec.suspend: true` of a small job to the suspension or deletion of its Job
  deadline  from the end of a small job's `lifecycle.pendingDeadlineSeconds`, in a namespace whose quota admits no pod,
            to the deletion of its Job

`b_p99_seconds` is the 99th percentile of all three together. `callback_max_cpu_seconds` is the longest callback of the
operator's event loop after its start, in CPU time of its thread (measured by a sitecustomize.py). `planner_bytes` is
the sum of the peak resident sizes of all planner processes; `plans_by_deadline` counts plans that were given up.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import operator_scale as scale
import paired
from harness.installed import OPERATOR_USER, RELEASE, SYSTEM_NAMESPACE, Document, example, running_for_an_hour
from harness.operator_process import write_kubeconfig
from processes import cpu_seconds, peak_resident_bytes
from synthetic_trainers import Server
from testbed.client import Bed, Request
from testbed.layout import API_SERVER

GREEDY, MODEST, BLOCKED = "fair-greedy", "fair-modest", "fair-blocked"
GREEDY_JOBS, MODEST_JOBS = 50, 60
NUM_NODES = 8
PENDING_SECONDS = 15
"""longer than ten seconds, after which the operator looks at a job's pods"""
PATH = "/apis/spillway.dev/v1alpha1/namespaces/{}/trainingjobs"
AT_MOST = {"b_p99_seconds": 2.0, "callback_max_cpu_seconds": 0.1, "planner_bytes": 400e6, "plans_by_deadline": 0.0}


def expensive(number: int) -> Document:
    """Returns a job for which the planner must consider every plan: 8 billion parameters on CPUs, states on NVMe, and
    drives that allow almost no writes."""
    model = {
        "architecture": "llama", "hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "numKeyValueHeads": 8,
        "intermediateSize": 14336, "vocabSize": 128256,
    }  # fmt: skip
    found = example("one-pod", GREEDY, checkpoint__claim=None, training__steps=1000 + number)
    found["metadata"]["name"] = f"greedy-{number:03}"
    spec = found["spec"]
    spec["model"]["config"] = model
    spec["training"] |= {"sequenceLength": 4096, "globalBatchSize": 8, "microBatchSize": 1}
    spec["memory"] = {
        "budget": {"device": "30Gi", "host": "70Gi", "nvme": "400Gi"},
        "endurance": {"driveWritesPerDay": "0.01"},
    }
    return found


def small(namespace: str, number: int, **changes: Any) -> Document:
    found = example("one-pod", namespace, checkpoint__claim=None, training__steps=100 + number, **changes)
    found["metadata"]["name"] = f"small-{number:03}"
    return running_for_an_hour(found)


async def submit(server: Server, num_modest: int) -> dict[str, float]:
    """Submits a small job every second and suspends every other one ten seconds later. Returns when it did so."""
    suspended: dict[str, float] = {}

    async def one(number: int) -> None:
        await asyncio.sleep(number)
        await server.create(PATH.format(MODEST), small(MODEST, number))
        blocked = small(BLOCKED, number, lifecycle__pendingDeadlineSeconds=PENDING_SECONDS)
        await server.create(PATH.format(BLOCKED), blocked)
        if number % 2:
            await asyncio.sleep(10.0)
            await server.merge(f"{PATH.format(MODEST)}/small-{number:03}", {"spec": {"suspend": True}})
            suspended[f"small-{number:03}"] = time.time()

    await asyncio.gather(*(one(number) for number in range(num_modest)))
    return suspended


def waits(
    requests: list[Request], suspended: dict[str, float], since_pending: dict[str, float]
) -> dict[str, list[float]]:
    """Returns the seconds of each wait by kind. Waits that the operator did not end are missing."""
    found: dict[str, list[float]] = {"suspend": [], "deadline": []}
    ends = [one for one in requests if one.resource == "jobs" and one.mutating and one.verb != "create"]
    for kind, namespace, begins in (("suspend", MODEST, suspended), ("deadline", BLOCKED, since_pending)):
        for name, begin in begins.items():
            of_job = (one for one in ends if one.namespace == namespace and one.name.rpartition("-")[0] == name)
            times = [scale.seconds_of(one) for one in of_job if scale.seconds_of(one) >= begin - 1.0]
            if times:
                found[kind].append(max(0.0, min(times) - begin))
    return found


async def deadlines(server: Server) -> dict[str, float]:
    """Returns when the deadline of each blocked job ended, counted from the pendingTime in its status."""
    jobs = await server.items(PATH.format(BLOCKED))
    since = {job["metadata"]["name"]: job.get("status", {}).get("attempts", {}).get("pendingTime") for job in jobs}
    return {name: datetime.fromisoformat(time).timestamp() + PENDING_SECONDS for name, time in since.items() if time}


def planner_bytes(operator: int) -> int:
    children = Path(f"/proc/{operator}/task/{operator}/children").read_text(encoding="ascii").split()
    return sum(peak_resident_bytes(int(pid)) for pid in children)


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


CALLBACKS = """
import asyncio.events, os, time
path, longest, run = os.environ.get("CALLBACKS"), 0.0, asyncio.events.Handle._run
def measured(self):
    global longest
    what, began = repr(self), time.thread_time()
    run(self)
    took = time.thread_time() - began
    if took > longest:
        longest = took
        with open(path, "w") as file:
            file.write(f"{took:.4f} {what}")
if path:
    asyncio.events.Handle._run = measured
"""
"""sitecustomize.py of the operator: writes the longest callback of its event loop, by CPU time of the thread"""


async def run(bed: Bed, operator: scale.Operator, num_greedy: int, num_modest: int) -> dict[str, float]:
    since = bed.audit_position()
    async with Server(API_SERVER, scale.administrator(bed)) as server:
        await scale.create(server, [expensive(number) for number in range(num_greedy)])
        suspended = await submit(server, num_modest)
        await asyncio.sleep(PENDING_SECONDS + 10.0)
        over = await deadlines(server)
    requests, own = bed.requests(since), bed.requests(since, OPERATOR_USER)
    starts = scale.create_to_child(requests, [MODEST])
    found = {"start": starts, **waits(own, suspended, over)}
    for kind, seconds in found.items():
        print(f"{kind}: {len(seconds)}, median {median(seconds):.2f} s, p99 {scale.p99(seconds):.2f} s")
    print(f"expected: {num_modest} starts, {len(suspended)} suspends, {num_modest} deadlines")
    seen = metrics(operator.current.health_port)
    plans = {name: count for name, count in seen.items() if name.startswith("spillway_operator_plans_total")}
    print(f"plans: {plans}; operator: {cpu_seconds(operator.current.process.pid):.1f} CPU-seconds")
    return {
        "num_greedy": num_greedy,
        "b_p99_seconds": scale.p99([seconds for each in found.values() for seconds in each]),
        "missed": 2 * num_modest + len(suspended) - sum(map(len, found.values())),
        "planner_bytes": planner_bytes(operator.current.process.pid),
        "plans_by_deadline": sum(count for name, count in plans.items() if "deadline" in name),
    }


def measure(quick: bool) -> dict[str, float]:
    num_greedy, num_modest = (GREEDY_JOBS // 5, MODEST_JOBS // 3) if quick else (GREEDY_JOBS, MODEST_JOBS)
    with ExitStack() as stack:
        bed = stack.enter_context(scale.running_bed(NUM_NODES))
        scale.install(bed)
        stack.enter_context(scale.namespaces(bed, GREEDY, MODEST, BLOCKED))
        no_pods = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": BLOCKED}}
        bed.apply(no_pods | {"spec": {"hard": {"pods": "0"}}})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="operator-fairness-")))
        token = bed.kubectl("create", "token", RELEASE, "-n", SYSTEM_NAMESPACE, "--duration=1h").strip()
        kubeconfig = write_kubeconfig(folder / "kubeconfig", API_SERVER, bed.state.certificates / "ca.crt", token)
        (folder / "sitecustomize.py").write_text(CALLBACKS, encoding="utf-8")
        environment = {
            "SPILLWAY_TRAINER_IMAGE": "local/hostroot:1", "PYTHONPATH": str(folder),
            "CALLBACKS": str(folder / "longest"),
        }  # fmt: skip
        operator = scale.Operator.start(kubeconfig, folder / "operator.log", environment)
        stack.callback(operator.kill)
        found = asyncio.run(run(bed, operator, num_greedy, num_modest))
        seconds, _, what = (folder / "longest").read_text(encoding="utf-8").partition(" ")
        print(f"longest callback: {seconds} CPU-seconds, {what}")
        return found | {"callback_max_cpu_seconds": float(seconds)}


if __name__ == "__main__":
    paired.main("operator_fairness", __doc__ or "", measure, AT_MOST)
