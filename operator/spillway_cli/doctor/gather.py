"""Gathers the facts of `spillway doctor`: one task per question; command.py runs them at the same time."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from spillway import DISTRIBUTION
from spillway.api.crd import KINDS
from spillway.api.limits import GROUP, VERSION
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.errors import SpillwayError
from spillway.extras import EXTRAS
from spillway.plan import DeviceKind
from spillway_operator.decide.acceptance import claim_names
from spillway_trainer.cgroup import meminfo_bytes, read_text, usable_cores

from ..cluster.api import CORE, JOBS, ClusterClient, Object, RequestDenied, jobs_path, segment
from ..machine.gpus import Gpus, find_gpus
from ..machine.local_node import probe
from ..machine.node_profile import default_path_or_none, own_profile, read_profile
from .cluster import CREATE_PODS, RIGHTS, ClusterFacts, Right, named_by
from .findings import Missing
from .machine import Cores, Disk, MachineFacts, MachineMemory, Native, Profile

NATIVE_SECONDS = 7.0
"""Time limit of a process that imports torch."""
BLOCK_BYTES = 4096
FORBIDDEN, NOT_FOUND = 403, 404
ROOT = Path("/")
Fact = TypeVar("Fact")
Task = Callable[[], object]


def missing(error: SpillwayError) -> Missing:
    status = error.status if isinstance(error, RequestDenied) else 0
    return Missing(str(error), is_forbidden=status == FORBIDDEN, is_absent=status == NOT_FOUND)


def fact(found: Mapping[str, object], name: str, kind: type[Fact]) -> Fact | Missing:
    """The result of the task `name`."""
    value = found[name]
    assert isinstance(value, (kind, Missing))
    return value


# --- this machine -----------------------------------------------------------------------------------------------------


def machine_tasks(directory: Path | None) -> dict[str, Task]:
    return {
        "versions": versions,
        "native": native,
        "huge_pages": huge_pages,
        "disk": partial(disk, directory or Path(), directory is not None),
        "memory": memory,
        "cores": cores,
        "memlock": locked_memory,
        "gpus": find_gpus,
        "profile": profile,
    }


def as_machine(found: Mapping[str, object]) -> MachineFacts:
    installed = fact(found, "versions", dict)
    limit = fact(found, "memlock", int)
    return MachineFacts(
        python=platform.python_version(),
        versions={} if isinstance(installed, Missing) else installed,
        minima=minima(),
        native=fact(found, "native", Native),
        huge_pages=fact(found, "huge_pages", str),
        disk=fact(found, "disk", Disk),
        memory=fact(found, "memory", MachineMemory),
        cores=fact(found, "cores", Cores),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        profile=fact(found, "profile", Profile),
        gpus=fact(found, "gpus", Gpus),
    )


def versions() -> dict[str, str]:
    """Versions of the installed distributions of all extras."""
    found = {}
    for name in [name for names in EXTRAS.values() for name in names]:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def minima() -> dict[str, str]:
    """Distribution -> the lowest version that this spillway requires."""
    matches = (re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", line) for line in metadata.requires(DISTRIBUTION) or ())
    return {match[1].lower(): match[2] for match in matches if match}


def native() -> Native | Missing:
    """Asks another process, so that this one does not import torch."""
    command = [sys.executable, "-P", "-m", "spillway_trainer.kernels.native"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=NATIVE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Missing(
            f"python -m spillway_trainer.kernels.native, which imports torch, took more than {NATIVE_SECONDS:.0f} s"
        )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return Missing(said[0], is_absent=True)
    answer = json.loads(done.stdout)
    return Native(answer["isa"], tuple(answer["instructionSets"]))


def huge_pages(root: Path = ROOT) -> str:
    found = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else ""


def disk(directory: Path, is_named: bool = True) -> Disk:
    """Writes one block to a temporary file."""
    try:
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(BLOCK_BYTES))
            file.flush()
        return Disk(str(directory), free, writes_directly(directory), is_named)
    except OSError as error:
        return Disk(str(directory), 0, False, is_named, error.strerror or str(error))


def writes_directly(directory: Path) -> bool:
    """Whether O_DIRECT works: a file system may reject the flag, or the first transfer."""
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".spillway-doctor-")
    os.close(descriptor)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK_BYTES) as page:  # O_DIRECT needs an aligned buffer
                return os.pwrite(descriptor, page, 0) == BLOCK_BYTES
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        os.unlink(name)


def memory(root: Path = ROOT) -> MachineMemory:
    available = probe(root, root).memory_bytes
    return MachineMemory(meminfo_bytes(root, "MemTotal"), available, available < meminfo_bytes(root, "MemAvailable"))


def cores() -> Cores:
    return Cores(usable_cores(ROOT), os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", ""))


def locked_memory() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def profile() -> Profile:
    """The profile that plans for this machine use."""
    device: DeviceKind = "Cpu" if find_gpus().lacking(1) else "Cuda"
    path = default_path_or_none(device)
    if path is None or not path.exists():
        return Profile("" if path is None else str(path), exists=False)
    own = own_profile(usable_cores(ROOT), device)
    if own.spec is None:
        return Profile(
            str(path),
            exists=True,
            problem=own.sentence.removeprefix("profile not used: ").partition("; run `spillway calibrate`")[0],
        )
    return Profile(str(path), exists=True, measured_time=read_profile(path).spec.measured_time or "")


# --- the cluster ------------------------------------------------------------------------------------------------------


def cluster_tasks(cluster: ClusterClient, namespace: str, job: TrainingJob | ScriptJob | None) -> dict[str, Task]:
    """The tasks about a cluster. They create nothing: access reviews and dry runs are not stored."""
    inside = f"{CORE}/namespaces/{segment('namespace', namespace)}"
    tasks: dict[str, Task] = {
        "server": lambda: cluster.get("/version"),
        "resources": lambda: [str(one["name"]) for one in cluster.get(JOBS)["resources"]],
        "schemas": lambda: schemas(cluster.get(f"/openapi/v3/apis/{GROUP}/{VERSION}")),
        "deployments": lambda: items(
            cluster, "/apis/apps/v1/deployments", labelSelector="app.kubernetes.io/name=spillway"
        ),
        "rights": lambda: rights(cluster, namespace),
        "node profiles": lambda: items(cluster, f"{JOBS}/nodeprofiles"),
        "jobs": lambda: items(cluster, jobs_path(namespace)),
        "namespace": lambda: cluster.get(inside),
        "pod": lambda: pod_rejection(cluster, namespace),
    }
    for claim in claim_names(job.spec) if job is not None else ():
        tasks[f"claim {claim}"] = partial(cluster.get, f"{inside}/persistentvolumeclaims/{claim}")
    if job is not None and (name := job.spec.spill.storage_class_name):
        tasks[f"class {name}"] = partial(cluster.get, f"/apis/storage.k8s.io/v1/storageclasses/{name}")
    for named in {named for named, _, _ in named_by(job)} if job is not None else ():
        kind, _, name = named.partition("/")
        tasks[f"named {named}"] = partial(cluster.get, f"{inside}/{kind.lower()}s/{segment('name', name)}")
    return tasks


def as_cluster(found: Mapping[str, object], host: str, namespace: str) -> ClusterFacts:
    return ClusterFacts(
        host=host,
        namespace=namespace,
        version=fact(found, "server", dict),
        resources=fact(found, "resources", list),
        schemas=fact(found, "schemas", dict),
        deployments=fact(found, "deployments", list),
        rights=fact(found, "rights", dict),
        node_profiles=fact(found, "node profiles", list),
        jobs=fact(found, "jobs", list),
        namespace_object=fact(found, "namespace", dict),
        pod_rejection=fact(found, "pod", str),
        claims=dict(of_prefix(found, "claim ")),
        storage_classes=dict(of_prefix(found, "class ")),
        named=dict(of_prefix(found, "named ")),
    )


def of_prefix(found: Mapping[str, object], prefix: str) -> Iterable[tuple[str, Object | Missing]]:
    return ((name.removeprefix(prefix), fact(found, name, dict)) for name in found if name.startswith(prefix))


def items(cluster: ClusterClient, path: str, **query: object) -> list[Object]:
    return cluster.items(path, **query)


def schemas(openapi: Object) -> dict[str, Object]:
    """Kind -> schema, from the API server's OpenAPI document."""
    found = (openapi.get("components") or {}).get("schemas") or {}
    by_kind = {name.rpartition(".")[2]: schema for name, schema in found.items()}
    return {kind.kind: by_kind[kind.kind] for kind in KINDS if kind.kind in by_kind}


def rights(cluster: ClusterClient, namespace: str) -> dict[Right, bool]:
    wanted = {right for _, _, of_command in RIGHTS.values() for right in of_command}
    return {right: may(cluster, namespace, right) for right in wanted}


def may(cluster: ClusterClient, namespace: str, right: Right) -> bool:
    attributes = {
        "namespace": namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
    }
    review: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = cluster.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool((answer.get("status") or {}).get("allowed"))


def pod_rejection(cluster: ClusterClient, namespace: str) -> str | Missing:
    """Why the API server would reject a trainer's pod; empty = it would not. Missing: the user may not create pods."""
    if not may(cluster, namespace, CREATE_PODS):
        return Missing("you may not create pods (the Job controller does)", is_forbidden=True)
    try:
        cluster.create(f"{CORE}/namespaces/{namespace}/pods", sample_pod(), dryRun="All")
    except RequestDenied as error:
        return str(error.answer.get("message") or error)
    return ""


def sample_pod() -> Object:
    """A minimal pod with the security settings of a trainer's pod."""
    bounded = {"memory": "64Mi", "ephemeral-storage": "64Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "spillway-doctor-"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "trainer",
                    "image": "spillway-doctor",
                    "resources": {"requests": {"cpu": "100m", **bounded}, "limits": bounded},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
