"""Spillway installed by its chart on the test bed, and jobs for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.patience import wait_until
from harness.rendered_chart import settings_of
from testbed.bed import Wanted
from testbed.client import Bed, Request
from testbed.layout import PROMETHEUS, REPOSITORY

CHART = REPOSITORY / "charts" / "spillway"
EXAMPLES = REPOSITORY / "examples"
WANTED = Wanted(fake_nodes=4, fake_gpus=4, prometheus=True, kueue=True)
"""the parts of the test bed that the tests need"""
RELEASE = "spillway"
SYSTEM_NAMESPACE = "spillway-system"
OF_THE_OPERATOR = "app.kubernetes.io/name=spillway"
OPERATOR_USER = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{RELEASE}"
HOST_MOUNT_IMAGE = {"repository": "local/hostroot", "tag": "1"}
"""an image that has this machine's programs and this checkout's Python: quick to start; results mention it"""
KWOK_TOLERATION = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
ON_REAL_NODES = ("nodeExporter.tolerations=null",)
"""places node exporters on real nodes only, because no program runs on fake ones"""
TRAINERS = (
    "import os, signal; [os.kill(int(p), signal.{signal}) for p in os.listdir('/proc') if p.isdecimal() and "
    "b'spillway_trainer' in open(f'/proc/{{p}}/cmdline', 'rb').read().split(b'\\0')]"
)
"""Python code that sends a signal to the ranks of a pod, but not to the launcher"""
FILL = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        held = bytearray(b'1') * (48 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.05)
"""
"""Python code that fills a pod's memory with many small processes: the rank stays the largest process, so that the
kernel's OOM killer chooses it"""
REPLICAS = 2
"""of the operator, as in the chart"""
LONG = 100_000
"""steps of a job that runs until a test ends it"""
PAIR_SECONDS = 180.0
"""limit for two ranks of a tiny model on two busy cores, from creation to Complete"""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed release, and methods with which tests look at jobs."""

    bed: Bed

    def create(self, job: Document) -> Document:
        """Creates a job; returns the object as the API server has it."""
        text = self.bed.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(job))
        found: Document = json.loads(text)
        return found

    def job(self, namespace: str, name: str) -> Document:
        """The job as the API server has it; its status is empty if the operator has not looked at it yet."""
        found: Document = self.bed.get("trainingjobs.spillway.dev", name, "--namespace", namespace)
        found.setdefault("status", {})
        return found

    def change(self, namespace: str, name: str, spec: Document) -> None:
        """Merges `spec` into the job's spec."""
        kind_and_name, merge = f"trainingjobs.spillway.dev/{name}", ("--type=merge", "-p", json.dumps({"spec": spec}))
        self.bed.kubectl("patch", kind_and_name, "-n", namespace, *merge)

    def condition(self, namespace: str, name: str, kind: str) -> Document:
        conditions = self.job(namespace, name)["status"].get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def wait(self, namespace: str, name: str, condition: str, seconds: float = PAIR_SECONDS) -> Document:
        """Waits until the condition is True; returns the job."""
        self.bed.kubectl(
            "wait", f"--for=condition={condition}", f"trainingjobs.spillway.dev/{name}", "--namespace", namespace,
            f"--timeout={int(seconds)}s",
        )  # fmt: skip
        return self.job(namespace, name)

    def until_reason(self, namespace: str, name: str, reason: str, seconds: float = PAIR_SECONDS) -> None:
        """Waits until a condition of the job has that reason."""

        def has(job: Document) -> bool:
            return any(one.get("reason") == reason for one in job["status"].get("conditions", []))

        self.until(has, namespace, name, seconds)

    def until(
        self, what: Callable[[Document], bool], namespace: str, name: str, seconds: float = PAIR_SECONDS
    ) -> Document:
        """Waits until `what` returns True for the job; returns the job."""
        found: Document = {}

        def reached() -> bool:
            nonlocal found
            found = self.job(namespace, name)
            return what(found)

        wait_until(reached, why=lambda: yaml.safe_dump(found["status"]), seconds=seconds, pause=0.3)
        return found

    def until_measured(self, wanted: dict[str, float]) -> None:
        """Waits until Prometheus, which scrapes every two seconds, answers each query with one series of the wanted
        value."""
        found: dict[str, list[float]] = {}

        def reached() -> bool:
            found.update({query: [sample.value for sample in self.bed.query(query)] for query in wanted})
            return found == {query: [value] for query, value in wanted.items()}

        wait_until(reached, why=lambda: str(found), seconds=PAIR_SECONDS, pause=0.5)

    def children(self, kind: str, namespace: str, name: str) -> list[Document]:
        found: list[Document] = self.bed.get(kind, "-n", namespace, "-l", f"spillway.dev/job={name}")["items"]
        return found

    def until_gone(self, kind: str, namespace: str, name: str) -> None:
        """Waits until the job's children of this kind are deleted: pods end some time before their Job is gone."""
        wait_until(lambda: not self.children(kind, namespace, name), why=lambda: f"a {kind} is left", pause=0.5)

    def signal(self, namespace: str, name: str, signal: str) -> None:
        """Sends a signal to the ranks in the job's first pod."""
        pod = self.children("pod", namespace, name)[0]["metadata"]["name"]
        self.bed.kubectl("exec", pod, "-n", namespace, "--", "python", "-c", TRAINERS.format(signal=signal))

    def writes(self, since: int, namespace: str, user: str = OPERATOR_USER) -> list[Request]:
        """The operator's writing requests in a namespace, except those to events, memory profiles and token reviews."""
        return [
            request
            for request in self.bed.requests(since, user)
            if request.mutating
            and request.namespace == namespace
            and request.resource not in ("events", "memoryprofiles", "tokenreviews")
        ]

    def logs(self) -> str:
        return self.bed.kubectl("logs", "-l", OF_THE_OPERATOR, "-n", SYSTEM_NAMESPACE, "--tail=60", "--prefix")

    def operator_pods(self) -> list[Document]:
        """The operator's pods that are not being deleted."""
        found = self.bed.read(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?labelSelector={OF_THE_OPERATOR}")
        return [pod for pod in found.get("items", []) if "deletionTimestamp" not in pod["metadata"]]

    def lease(self) -> Document:
        """The spec of the operator's lease; empty if there is none."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases/{RELEASE}"
        found: Document = self.bed.read(path).get("spec", {})
        return found

    def leader(self, seconds: float = 60.0, other_than: str = "") -> str:
        """Waits until a pod other than `other_than` leads; returns its name."""
        names: list[str] = []

        def reached() -> bool:
            nonlocal names
            holder = self.lease().get("holderIdentity")
            names = [pod["metadata"]["name"] for pod in self.operator_pods() if pod["metadata"]["uid"] == holder]
            return bool(names) and names[0] != other_than

        wait_until(reached, why=lambda: f"no leader: {self.lease()}\n{self.logs()}", seconds=seconds, pause=0.1)
        return names[0]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Scales the operator to 0 replicas for the duration of the block."""
        with self.scaled(0):
            yield

    @contextmanager
    def scaled(self, replicas: int) -> Iterator[None]:
        self._scale(replicas)
        try:
            yield
        finally:
            self._scale(REPLICAS)

    def _scale(self, replicas: int) -> None:
        deployment = f"deployment/{RELEASE}"
        self.bed.kubectl("scale", deployment, "-n", SYSTEM_NAMESPACE, f"--replicas={replicas}")
        self.bed.kubectl("rollout", "status", deployment, "-n", SYSTEM_NAMESPACE, "--timeout=90s")
        wait_until(
            lambda: len(self.bed.get("pods", "-l", OF_THE_OPERATOR, "-n", SYSTEM_NAMESPACE)["items"]) == replicas,
            why=lambda: "pods of the operator that should be gone are there",
            pause=0.2,
        )
        if replicas:
            self.leader()


@dataclass(frozen=True, slots=True)
class OperatorImage:
    """The operator's image as imported into the bed's containerd."""

    name: str
    """repository:tag"""
    layers: tuple[int, ...]
    """uncompressed bytes of each"""


def install(bed: Bed, image: OperatorImage, values: tuple[str, ...] = ON_REAL_NODES) -> Installed:
    """Installs or upgrades the release. `values`: further values, as `--set` takes them."""
    bed.helm(
        "upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, "--create-namespace",
        "--values", write_values(bed, image), *settings_of(values), "--wait", "--timeout", "90s",
    )  # fmt: skip
    return Installed(bed)


def write_values(bed: Bed, image: OperatorImage) -> Path:
    """Writes a values file for this bed."""
    repository, tag = image.name.rsplit(":", 1)
    values = {
        "image": {"repository": repository, "tag": tag},
        "trainer": {"image": HOST_MOUNT_IMAGE},
        "prometheus": {"url": PROMETHEUS, "intervalSeconds": 2},
    }
    file = bed.state.data / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def example(name: str, namespace: str, **changes: object) -> Document:
    """A job of examples/ in a namespace. `changes`: fields below spec as dotted paths, with `__` for the dot."""
    documents = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    job: Document = next(document for document in documents if document["kind"] == "TrainingJob")
    return changed(job, namespace, **changes)


def changed(job: Document, namespace: str, **changes: object) -> Document:
    job = copy.deepcopy(job)
    job["metadata"]["namespace"] = namespace
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = job["spec"]
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return job


def named(job: Document, name: str) -> Document:
    return {**job, "metadata": {**job["metadata"], "name": name}}


def running_for_an_hour(job: Document) -> Document:
    """The job on fake nodes, with pods that outlast the test: if they ended, the operator would have to write."""
    delays = {f"pod-complete.stage.kwok.x-k8s.io/{part}": "1h" for part in ("delay", "jitter-delay")}
    job = copy.deepcopy(job)
    job["spec"].setdefault("pod", {})["annotations"] = delays
    return on_fake_nodes(job)


def on_fake_nodes(job: Document) -> Document:
    """The job for nodes that KWOK simulates: its pods exist in the API server only, and end as their annotations
    say."""
    job = copy.deepcopy(job)
    scheduling = job["spec"].setdefault("scheduling", {})
    scheduling["nodeSelector"] = {"type": "kwok", **scheduling.get("nodeSelector", {})}
    scheduling["tolerations"] = [KWOK_TOLERATION]
    # By default, each pod would request a quarter of the node's 96 cores.
    job["spec"].setdefault("pod", {})["resources"] = {"cpu": "100m"}
    return job


def read_json(path: Path) -> Document:
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found
