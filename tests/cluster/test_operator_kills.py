"""kill -9 of the operator, at every write of a start and at random moments: nothing twice, nothing missing."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crash_proxy import Crash, CrashProxy
from installed import OPERATOR_USER, RELEASE, SYSTEM_NAMESPACE, Document, Installed, example, named, running_for_an_hour
from operator_process import OperatorProcess, write_kubeconfig

from spillway_trainer.launch import free_ports
from testbed.layout import API_SERVER

RANDOM_KILLS = 20
JOBS = 20
SEED = 20261121
CONVERGENCE_SECONDS = 60.0
WRITES_OF_A_START = 5
MANY_JOBS = 100
LARGEST_RESIDENT_BYTES = 120_000_000
STEADY_SECONDS = {"reduced": 60, "full": 600}
"""SPILLWAY_SWEEPS=full, as in `make faults`"""


@pytest.fixture(scope="module")
def alone(spillway: Installed) -> Iterator[Installed]:
    """The release's rights, and no operator in the cluster."""
    with spillway.stopped():
        yield spillway


class Operators:
    """One operator process after the other, all before the same proxy."""

    def __init__(self, proxy: CrashProxy, kubeconfig: Path, log: Path, namespace: str) -> None:
        self.proxy, self._kubeconfig, self._log, self._namespace = proxy, kubeconfig, log, namespace
        self.current: OperatorProcess | None = None

    def start(self) -> OperatorProcess:
        environment = {
            "SPILLWAY_NAMESPACES": self._namespace, "SPILLWAY_TRAINER_IMAGE": "local/hostroot:1",
        }  # fmt: skip
        self.current = OperatorProcess.start(self._kubeconfig, self._log, free_ports(1)[0], environment)
        return self.current

    def kill(self) -> None:
        if self.current is not None:
            self.current.kill()
            self.current = None


@contextmanager
def operators(alone: Installed, namespace: str, folder: Path) -> Iterator[Operators]:
    token = alone.bed.kubectl("create", "token", RELEASE, "-n", SYSTEM_NAMESPACE, "--duration=1h").strip()
    with CrashProxy(API_SERVER, alone.bed.state.certificates / "ca.crt") as proxy:
        kubeconfig = write_kubeconfig(folder / "kubeconfig", proxy.url, None, token)
        found = Operators(proxy, kubeconfig, folder / "operator.log", namespace)
        try:
            yield found
        finally:
            found.kill()


def two_pods(namespace: str, name: str) -> Document:
    return running_for_an_hour(named(example("two-pod", namespace, checkpoint__claim=None), name))


def one_pod(namespace: str, name: str) -> Document:
    return running_for_an_hour(named(example("one-pod", namespace), name))


def counts(alone: Installed, namespace: str, kind: str) -> Counter[str]:
    return Counter(
        item["metadata"]["labels"]["spillway.dev/job"]
        for item in alone.bed.get(kind, "-n", namespace, "-l", "app.kubernetes.io/managed-by=spillway")["items"]
    )


def wait_for_running(alone: Installed, namespace: str, names: list[str], seconds: float = CONVERGENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while True:
        items = alone.bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"]
        states = {item["metadata"]["name"]: item.get("status", {}).get("state", "") for item in items}
        if all(states.get(name) == "Running" for name in names):
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.3)


def assert_one_of_each(alone: Installed, namespace: str, names: list[str]) -> None:
    for kind in ("jobs", "configmaps", "services"):
        assert counts(alone, namespace, kind) == Counter(names), kind
    for item in alone.bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"]:
        assert item["status"]["attempts"]["total"] == 1


@pytest.mark.parametrize("landed", [False, True], ids=["before the write", "after the write, unanswered"])
def test_a_crash_at_any_write_of_a_start_leaves_one_attempt(
    alone: Installed, namespace: str, tmp_path: Path, landed: bool
) -> None:
    names = [f"crash-{at}" for at in range(1, WRITES_OF_A_START + 1)]
    with operators(alone, namespace, tmp_path) as found:
        for at, name in enumerate(names, start=1):
            found.start().wait_ready()
            crash = Crash(at, landed, found.kill)
            found.proxy.arm(crash)
            alone.create(two_pods(namespace, name))
            deadline = time.monotonic() + 20
            while not crash.happened and time.monotonic() < deadline:
                time.sleep(0.05)
            found.proxy.arm(None)
            assert crash.happened, f"write {at} of {name} did not come"
            found.start().wait_ready()
            wait_for_running(alone, namespace, [name])
            found.kill()
    assert_one_of_each(alone, namespace, names)


def test_a_hundred_running_jobs_cost_no_write_and_little_memory(
    alone: Installed, namespace: str, tmp_path: Path
) -> None:
    seconds = STEADY_SECONDS["full" if os.environ.get("SPILLWAY_SWEEPS") == "full" else "reduced"]
    names = [f"steady-{index:03}" for index in range(MANY_JOBS)]
    documents = {"apiVersion": "v1", "kind": "List", "items": [one_pod(namespace, name) for name in names]}
    with operators(alone, namespace, tmp_path) as found:
        operator = found.start()
        operator.wait_ready()
        alone.bed.kubectl("create", "-f", "-", stdin=json.dumps(documents))
        wait_for_running(alone, namespace, names, 300)
        time.sleep(5)
        since = alone.bed.audit_position()
        time.sleep(seconds)
        assert alone.writes(since, namespace) == []
        resident = operator.resident_bytes()
        print(f"\n{MANY_JOBS} running jobs: no write in {seconds} s, operator resident {resident / 1e6:.0f} MB")
        assert resident <= LARGEST_RESIDENT_BYTES

        found.kill()
        since = alone.bed.audit_position()
        found.start().wait_ready()
        time.sleep(10)
        assert alone.writes(since, namespace) == [], "a restarted operator has nothing to write"


def test_kills_at_random_moments_leave_nothing_twice_and_nothing_out(
    alone: Installed, namespace: str, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    names = [f"burst-{index:02}" for index in range(JOBS)]
    print(f"\n{RANDOM_KILLS} kills, seed {SEED}")
    with operators(alone, namespace, tmp_path) as found:
        pending = list(names)
        for _ in range(RANDOM_KILLS):
            found.start()
            for _ in range(min(len(pending), 1 + len(names) // RANDOM_KILLS)):
                alone.create(two_pods(namespace, pending.pop()))
            time.sleep(rng.uniform(0.5, 3.0))
            found.kill()
        for name in pending:
            alone.create(two_pods(namespace, name))
        found.start().wait_ready()
        wait_for_running(alone, namespace, names)
        assert_one_of_each(alone, namespace, names)

        since = alone.bed.audit_position()
        found.kill()
        restarted = found.start()
        restarted.wait_ready()
        time.sleep(5)
        after_restart = [r for r in alone.writes(since, namespace) if r.user == OPERATOR_USER]
        assert after_restart == [], "a restarted operator has nothing to write"
        print(f"resident with {len(names)} jobs: {restarted.resident_bytes() / 2**20:.0f} MiB")
