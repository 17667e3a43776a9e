"""`spillway calibrate NODE`: runs the probe as a Job on a cluster node and writes its result as a NodeProfile.

The pod has no rights and no token: this command creates the Job, reads its log, deletes it and writes the profile with
the user's rights. A Job that is not deleted (the terminal was closed) ends within PROBE_SECONDS and is removed by the
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spillway.api.limits import USER_ID
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import ExitCode, Preempted, UserError
from spillway.feedback.profiles import document, has_rates
from spillway.json_text import json_object
from spillway.units import GIB, format_quantity, parse_cores

from ..cluster.api import CORE, JOBS, ClusterClient, Object, RequestDenied, connect, segment
from ..cluster.job_status import value_at
from ..console import Format, message_console, print_json, printable, result_console, table
from ..machine.node_profile import check_writable, write_profile
from .command import rate

BATCH = "/apis/batch/v1"
PROFILES = f"{JOBS}/nodeprofiles"
NOT_FOUND = 404
POLL_SECONDS = 1.0
PROBE_SECONDS = 600
"""Time limit of the Job, including waiting for the node."""
KEPT_SECONDS = 300
"""How long an ended Job is kept if it is not deleted."""
MEMORY_BYTES, DISK_BYTES = 4 * GIB, 2 * GIB
"""The pod's limits: memory for torch and the probe's models; disk for the spill file and its free-space margin."""
CONTAINER = "probe"
LONGEST_LINE = 300
"""Longest pod message in an error, in characters."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The command line of `spillway calibrate NODE`."""

    node: str
    image: str
    """The trainer's image."""
    context: str | None
    namespace: str | None
    """Namespace of the Job; None = the context's."""
    quick: bool
    output: Path | None
    """File for the profile; None = write it to the cluster."""
    format: Format


def calibrate_node(options: NodeOptions) -> int:
    """Measures the node and writes its profile. Raises UserError, and then writes no profile."""
    cluster = connect(options.context)
    namespace = options.namespace or cluster.namespace
    if options.output:
        check_writable(options.output)
    node = read_node(cluster, options.node)
    existing = None if options.output else existing_profile(cluster, options.node)
    with probing(cluster, namespace, probe_job(options.node, options.image, options.quick)) as name:
        found = result(cluster, namespace, name)
    spec = measured_spec(found, node)
    made = document(options.node, spec, {})
    if options.output:
        write_profile(
            options.output, made, "\n".join(["Measured by `spillway calibrate NODE`.", *map(printable, found["notes"])])
        )
    else:
        write(cluster, made, existing)
    show(options, made, found)
    return int(ExitCode.COMPLETED)


# --- before -----------------------------------------------------------------------------------------------------------


def read_node(cluster: ClusterClient, name: str) -> Object:
    try:
        return cluster.get_named(f"{CORE}/nodes/{segment('node', name)}")
    except RequestDenied as error:
        if error.status == NOT_FOUND:
            raise UserError(f"node {name}: not found in the cluster; see `kubectl get nodes`") from error
        raise


def existing_profile(cluster: ClusterClient, name: str) -> Object | None:
    """The node's profile, or None. Raises UserError if it describes GPUs: a CPU profile would replace it."""
    try:
        found = cluster.get_named(f"{PROFILES}/{segment('node', name)}")
    except RequestDenied as error:
        if error.status == NOT_FOUND and (error.answer.get("details") or {}).get("name"):
            return None
        raise
    if value_at(found, "spec.deviceKind") != "Cpu":
        raise UserError(
            f"NodeProfile {name} describes GPUs, but this command measures only the CPU of a node; correct the "
            "profile from a run (`spillway calibrate --from`), or write to a file with --output"
        )
    return found


def probe_job(node: str, image: str, quick: bool) -> Object:
    """The Job: one pod on the node, under Pod Security `restricted`, that spills to an emptyDir as trainers do."""
    bounded = {"memory": format_quantity(MEMORY_BYTES), "ephemeral-storage": format_quantity(DISK_BYTES)}
    command = ["python", "-m", "spillway_cli", "calibrate", "--output", "/tmp/profile.yaml", "--directory", "/spill"]  # noqa: S108 - a volume of the pod
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "spillway-probe-", "labels": {"app.kubernetes.io/name": "spillway-probe"}},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": PROBE_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 1,
                    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": USER_ID,
                        "runAsGroup": USER_ID,
                        "fsGroup": USER_ID,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [
                        {
                            "name": CONTAINER,
                            "image": image,
                            "command": [*command, "-o", "json", *(["--quick"] if quick else [])],
                            "workingDir": "/tmp",  # noqa: S108
                            "env": [{"name": name, "value": "/tmp"} for name in ("HOME", "TMPDIR")],  # noqa: S108
                            # No CPU limit: all cores are measured.
                            "resources": {"requests": {"cpu": "1", **bounded}, "limits": bounded},
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "readOnlyRootFilesystem": True,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "volumeMounts": [
                                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
                                {"name": "spill", "mountPath": "/spill"},
                            ],
                        }
                    ],
                    "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "spill", "emptyDir": {}}],
                }
            },
        },
    }


# --- meanwhile --------------------------------------------------------------------------------------------------------


@contextmanager
def probing(cluster: ClusterClient, namespace: str, manifest: Object) -> Iterator[str]:
    """Creates the Job and yields its name; deletes it afterwards in any case."""
    path = f"{BATCH}/namespaces/{segment('namespace', namespace)}/jobs"
    name = cluster.create(path, manifest)["metadata"]["name"]
    try:
        yield name
    except KeyboardInterrupt:
        raise Preempted(
            "calibration was stopped; the Job that measured the node is deleted, and no profile was written"
        ) from None
    finally:
        with suppress(UserError):  # the Job's own time limit ends it
            cluster.delete(f"{path}/{name}", propagationPolicy="Background")


def result(cluster: ClusterClient, namespace: str, name: str) -> Object:
    """Waits for the probe and returns what it printed. Raises UserError when it failed."""
    pod: Object = {}
    with message_console().status(f"Job {name}") as status:
        while True:
            job = cluster.get(f"{BATCH}/namespaces/{namespace}/jobs/{name}")
            pods = cluster.items(f"{CORE}/namespaces/{namespace}/pods", labelSelector=f"job-name={name}")
            pod = pods[0] if pods else pod
            ended = condition(job, "Complete") or condition(job, "Failed")
            if ended:
                break
            status.update(f"Job {name}: {state_of(pod)}")
            time.sleep(POLL_SECONDS)
    log = b"".join(line + b"\n" for line in log_lines(cluster, namespace, pod)).decode(errors="replace")
    found = printed(log)
    if "error" in found:
        raise UserError(f"measuring the node failed: {printable(str(value_at(found, 'error.message')))[:LONGEST_LINE]}")
    if ended["type"] == "Failed" or "nodeProfile" not in found:
        last = (log.strip().splitlines() or ["no output"])[-1]
        why = f"{ended.get('reason', '')} {ended.get('message', '')}".strip() if ended["type"] == "Failed" else "ended"
        raise UserError(
            f"the Job that measures the node failed: {why} ({state_of(pod)}; {printable(last)[:LONGEST_LINE]}); check "
            "that --image is the trainer image and that the node accepts pods"
        )
    return found


def condition(job: Object, type_: str) -> Mapping[str, Any] | None:
    for one in value_at(job, "status.conditions") or ():
        if one.get("type") == type_ and one.get("status") == "True":
            return dict(one)
    return None


def state_of(pod: Object) -> str:
    """Why the pod does not run or, if that is not known, its phase."""
    for one in value_at(pod, "status.containerStatuses") or ():
        waiting = value_at(one, "state.waiting")
        if waiting:
            return printable(f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip())[:LONGEST_LINE]
    for one in value_at(pod, "status.conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return printable(str(one.get("message", "")))[:LONGEST_LINE]
    return str(value_at(pod, "status.phase") or "no pod yet")


def log_lines(cluster: ClusterClient, namespace: str, pod: Object) -> list[bytes]:
    """The pod's log; empty if it never ran or was deleted."""
    name = value_at(pod, "metadata.name")
    if name is None:
        return []
    try:
        return list(cluster.lines(f"{CORE}/namespaces/{namespace}/pods/{name}/log", 30.0, container=CONTAINER))
    except RequestDenied:
        return []


def printed(log: str) -> Object:
    """The document of `-o json`, which is printed last; empty if there is none."""
    begin = 0 if log.startswith("{") else log.rfind("\n{") + 1
    return json_object(log[begin:]) or {}


# --- afterwards -------------------------------------------------------------------------------------------------------


def measured_spec(found: Object, node: Object) -> NodeProfileSpec:
    """The measured profile. Raises UserError for figures that do not describe the whole node."""
    try:
        spec = NodeProfileSpec.model_validate(value_at(found, "nodeProfile.spec") or {})
    except ValidationError as error:
        raise UserError(
            f"the figures that the Job measured are not valid ({error.errors()[0]['msg']}); use an --image of the same "
            f"version as this command"
        ) from error
    if not has_rates(spec):
        raise UserError(
            "the Job that measured the node printed no rate; use an --image of the same version as this command"
        )
    has = int(parse_cores(str(value_at(node, "status.allocatable.cpu") or "1")))
    if spec.num_cores is not None and spec.num_cores < has:
        raise UserError(
            f"the measuring pod could use only {spec.num_cores} of the node's {has} cores, so its rates are too low; "
            "if a LimitRange limits the CPU, name another --namespace"
        )
    return spec


def write(cluster: ClusterClient, made: Object, existing: Object | None) -> None:
    """Writes the measured fields; keeps fields that the probe does not measure (capacities, rates between devices)."""
    if existing is None:
        cluster.create(PROFILES, made)
        return
    before = existing.get("spec") or {}
    link = {**(before.get("link") or {}), **(made["spec"].get("link") or {})}
    spec = {**before, **made["spec"], **({"link": link} if link else {})}
    cluster.replace(f"{PROFILES}/{made['metadata']['name']}", {**existing, "spec": spec})


def notes_of(found: Object) -> list[str]:
    return [printable(str(one)) for one in found.get("notes") or ()]


def show(options: NodeOptions, made: Object, found: Object) -> None:
    written, figures = str(options.output or f"NodeProfile {options.node}"), found.get("figures") or {}
    if options.format is Format.JSON:
        print_json({"profile": written, "nodeProfile": made, "figures": figures, "notes": notes_of(found)})
        return
    console = result_console()
    shown = table("", "median", "middle half", "samples", title=f"measured on {options.node}")
    for name, one in figures.items():
        middle = f"{rate(name, one['low'])} to {rate(name, one['high'])}"
        shown.add_row(printable(name), rate(name, one["median"]), middle, str(one["samples"]))
    console.print(shown)
    used = "apply it with `kubectl apply -f`" if options.output else "plans of later attempts use it"
    console.print("\n".join(["", *notes_of(found), f"profile: {written}; {used}"]))
