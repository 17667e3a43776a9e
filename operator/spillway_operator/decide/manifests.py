"""The children of one attempt as plain data: ConfigMap, Service (more than one node), Indexed Job.

    TrainingJob + plan + Decision -> AttemptFiles (the ConfigMap's content) -> its three manifests

The ConfigMap is written first and never changed; the other two are built from its content, maybe by a later operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from spillway.api.job_file import JOB_VERSION, AttemptFile, JobFile, ScriptFile
from spillway.api.job_spec import JobSpec
from spillway.api.limits import GROUP, INSPECTION_MEMORY_BYTES, RESERVED_KEYS, RESERVED_PREFIXES, USER_ID, VERSION
from spillway.api.pod import Mount, SecurityContext, Toleration
from spillway.api.progress import CA_VARIABLE, TOKEN_AUDIENCE, TOKEN_VARIABLE, URL_VARIABLE
from spillway.api.script import ScriptJob, is_script
from spillway.api.status import Attempts, Escalation, PlanStatus
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import UserError
from spillway.feedback.recent_peaks import LEAST_PLAUSIBLE
from spillway.json_text import json_object
from spillway.placement.able_nodes import pod_tolerations, tolerates
from spillway.placement.cluster_view import Taint
from spillway.plan import PLAN_VERSION, MemoryPlan
from spillway.planning.pod_resources import PodResources, pod_resources, script_resources
from spillway.units import format_bytes, format_cores, format_quantity

from .observed import Contract, JobObject, Manifest, OperatorFacts

JOB_LABEL = "spillway.dev/job"
JOB_UID_LABEL = "spillway.dev/job-uid"
ATTEMPT_LABEL = "spillway.dev/attempt"
INSPECTION_LABEL = "spillway.dev/inspection"
"""Label of a Job that is not an attempt: it builds a model to find its sizes. As annotation: the spec, for its pod."""
DOWNLOADS_LABEL = "spillway.dev/downloads"
"""Label of an inspection's pod that fetches something; the chart's network policies allow its egress."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

CONTAINER = "trainer"
CONTRACT_DIRECTORY = "/etc/spillway"
JOB_KEY, PLAN_KEY, CA_KEY = "job.json", "plan.json", "ca.crt"
DECISION_KEY, ATTEMPT_KEY = "decision.json", "attempt.json"
SPILL_DIRECTORY = "/spill"
WORK_DIRECTORY = "/work"
CHECKPOINT_MOUNT = "/checkpoints"
CLAIMS_DIRECTORY = "/claims"
SCRATCH_DIRECTORY = "/tmp"  # noqa: S108 - a volume of the pod
TOKEN_DIRECTORY = "/var/run/spillway"  # noqa: S105
TOKEN_FILE = "token"  # noqa: S105
TOKEN_SECONDS = 3600
TERMINATION_MESSAGE_PATH = "/dev/termination-log"
NODE_LOST_SECONDS = 60
"""Time from the taint of a node that does not answer to the deletion of its pods."""
NODE_LOST_TAINTS = tuple(Taint(f"node.kubernetes.io/{key}", "", "NoExecute") for key in ("not-ready", "unreachable"))
LARGEST_CONTRACT = 1_000_000
"""Most bytes of a ConfigMap's data; the API server rejects 1 MiB."""


class Preferred(BaseModel):
    """One term of the pod's preferred node affinity."""

    model_config = ConfigDict(frozen=True)

    node: str
    weight: int


class MetricsSeen(BaseModel):
    """Condition MetricsAvailable as it was when the attempt was placed."""

    model_config = ConfigDict(frozen=True)

    status: Literal["True", "False"]
    reason: str
    message: str


class Decision(BaseModel):
    """attempt.json: a decision without its plan, so that a later look repeats it instead of deciding again."""

    model_config = ConfigDict(frozen=True)

    attempts: Attempts
    """status.attempts once the attempt exists; it includes how earlier attempts ended."""
    preferences: tuple[Preferred, ...] = ()
    required_labels: dict[str, str] = {}
    """Labels of the node class that the plan is for."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes with faults, on which no pod may run."""
    metrics: MetricsSeen | None = None
    because: str = ""
    """Why the previous attempt ended, if this one is a restart."""
    escalations: tuple[Escalation, ...] = ()
    """status.escalations once the attempt exists."""


@dataclass(frozen=True, slots=True)
class AttemptFiles:
    """The content of an attempt's ConfigMap."""

    job: JobFile | ScriptFile
    plan: MemoryPlan
    plan_status: PlanStatus
    """The attempt's status.plan."""
    decision: Decision

    @property
    def name(self) -> str:
        return attempt_name(self.job.name, self.job.epoch)

    @property
    def resources(self) -> PodResources:
        counted = self.counted
        decided = decided_memory(counted.memory_bytes, self.plan_status.pod_memory or 0)
        return replace(counted, memory_bytes=decided)

    @property
    def counted(self) -> PodResources:
        if isinstance(self.job, ScriptFile):
            return script_resources(self.job.spec, self.plan.device)
        return pod_resources(self.job.spec, self.plan, self.job.ranks_per_node)

    @property
    def spared_bytes(self) -> int:
        """Bytes that are counted for a pod but not requested, because of evidence from earlier pods."""
        return self.counted.memory_bytes - self.resources.memory_bytes


def decided_memory(counted_bytes: int, decided_bytes: int) -> int:
    """Memory of a pod: `decided_bytes` if evidence (pod_evidence.py) lowered the counted bytes. Larger values are
    ignored, as are those below LEAST_PLAUSIBLE of the counted bytes, which no operator decides."""
    is_less = LEAST_PLAUSIBLE * counted_bytes <= decided_bytes < counted_bytes
    return decided_bytes if is_less else counted_bytes


def attempt_name(job: str, attempt: int) -> str:
    """Name of all three children."""
    return f"{job}-{attempt}"


def attempt_files(
    job: TrainingJob | ScriptJob,
    uid: str,
    plan: MemoryPlan,
    plan_status: PlanStatus,
    decision: Decision,
    threads: int,
    facts: OperatorFacts,
) -> AttemptFiles:
    """The files of the last attempt in `decision.attempts`; `threads` are torch's intra-op threads per rank."""
    spec, attempt = job.spec, decision.attempts.total
    several = spec.parallelism.nodes > 1
    name = attempt_name(job.metadata.name, attempt)
    kept = checkpoint_directory(spec, job.metadata.name, uid)
    attempt_file = AttemptFile(
        name=job.metadata.name,
        namespace=job.metadata.namespace,
        uid=uid,
        in_cluster=True,
        epoch=attempt,
        spec=spec,
        output_directory=f"{WORK_DIRECTORY}/output",
        corpus_directory=f"{kept}/corpus" if spec.checkpoint.claim else f"{WORK_DIRECTORY}/corpus",
        checkpoint_directory=kept,
        spill_directory=SPILL_DIRECTORY,
        further_spill_directories=tuple(f"{SPILL_DIRECTORY}-{n}" for n in range(1, spec.spill.num_volumes)),
        spill_is_listed=not spec.spill.storage_class_name,
        claims={claim: f"{CLAIMS_DIRECTORY}/{claim}" for claim in read_claims(spec)},
        termination_message_path=TERMINATION_MESSAGE_PATH,
        compute_threads=threads,
        metrics_port=facts.metrics_port,
        num_nodes=spec.parallelism.nodes,
        ranks_per_node=spec.parallelism.devices_per_node,
        master_address=f"{name}-0.{name}" if several else "127.0.0.1",
        master_port=facts.master_port if several else 0,
    )
    made = ScriptFile if isinstance(job, ScriptJob) else JobFile
    job_file = made.model_validate(dict(attempt_file) | {"spec": spec})
    return AttemptFiles(job_file, plan, plan_status.model_copy(update={"config_map": name}), decision)


def checkpoint_directory(spec: JobSpec, name: str, uid: str) -> str:
    """The job's own directory on the claim, so that a later job of the same name does not resume its checkpoints;
    without a claim, a directory in the pod."""
    if spec.checkpoint.claim is None:
        return f"{WORK_DIRECTORY}/checkpoints"
    return f"{CHECKPOINT_MOUNT}/{spec.checkpoint.sub_path or f'{name}-{uid[:8]}'}"


def read_claims(spec: JobSpec) -> dict[str, str]:
    """Claim with text to train or evaluate on, or with a model -> the first field that names it."""
    return {place.claim: f"spec.{field}.claim" for field, place in reversed(spec.places.items()) if place.claim}


def read_contract(contract: Contract) -> AttemptFiles | None:
    """The files of a contract; None if this operator cannot read them."""
    try:
        made = ScriptFile if is_script((json_object(contract.job_json) or {}).get("spec")) else JobFile
        return AttemptFiles(
            made.model_validate_json(contract.job_json),
            MemoryPlan.model_validate_json(contract.plan_json),
            PlanStatus.model_validate_json(contract.decision_json),
            Decision.model_validate_json(contract.attempt_json),
        )
    except ValidationError:
        return None


def why_not_read(contract: Contract) -> str:
    """Why `read_contract` cannot read the contract."""
    for name, text, version in (
        (JOB_KEY, contract.job_json, JOB_VERSION),
        (PLAN_KEY, contract.plan_json, PLAN_VERSION),
    ):
        try:
            said = json.loads(text).get("version")
        except (ValueError, RecursionError, AttributeError):
            continue
        if isinstance(said, int) and said > version:
            return (
                f"ConfigMap {contract.name}: {name} has version {said}, but this operator reads up to {version}; a "
                "newer operator created the attempt, which continues. Upgrade the operator before changing the job"
            )
    return f"ConfigMap {contract.name} was not written by an operator; the attempt continues"


# --- ConfigMap, Service, Job ------------------------------------------------------------------------------------------


def children(files: AttemptFiles, owner: JobObject, facts: OperatorFacts) -> tuple[Manifest, ...]:
    """The manifests in the order of creation. Raises UserError when the files do not fit in a ConfigMap."""
    made: list[Manifest] = [config_map(files, owner, facts)]
    if files.job.num_nodes > 1:
        made.append(service(files, owner))
    return (*made, indexed_job(files, owner, facts))


def config_map(files: AttemptFiles, owner: JobObject, facts: OperatorFacts) -> Manifest:
    data = {
        JOB_KEY: files.job.model_dump_json(),
        PLAN_KEY: files.plan.model_dump_json(),
        DECISION_KEY: files.plan_status.model_dump_json(exclude_none=True),
        ATTEMPT_KEY: files.decision.model_dump_json(exclude_none=True),
        CA_KEY: facts.progress_ca,
    }
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > LARGEST_CONTRACT:
        raise UserError(
            f"spec and plan are {format_bytes(size)} as JSON, but a ConfigMap holds 1 MiB: shorten spec.pod.env, or "
            "move long values to a Secret"
        )
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(files, owner), "immutable": True, "data": data,
    }  # fmt: skip


def service(files: AttemptFiles, owner: JobObject) -> Manifest:
    """Gives the pods their host names. It lists the addresses of the pods that are ready, from which trainers see
    whether all of them are (JoinDeadline)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(files, owner),
        "spec": {
            "clusterIP": "None",
            "selector": {JOB_UID_LABEL: files.job.uid, ATTEMPT_LABEL: str(files.job.epoch)},
            "ports": [{"name": "rendezvous", "port": files.job.master_port}],
        },
    }


def indexed_job(files: AttemptFiles, owner: JobObject, facts: OperatorFacts) -> Manifest:
    """Runs every pod once: a failure ends the attempt, and the operator decides about restarts.

    With a queue it is created suspended and never written again: the queue resumes it.
    """
    scheduling = files.job.spec.scheduling
    queue = scheduling.queue_name
    metadata = _metadata(files, owner)
    if queue:
        metadata["labels"][QUEUE_LABEL] = queue
    if queue and scheduling.workload_priority_class_name:
        metadata["labels"][QUEUE_PRIORITY_LABEL] = scheduling.workload_priority_class_name
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": files.job.num_nodes,
        "parallelism": files.job.num_nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "template": {"metadata": _pod_metadata(files), "spec": pod_spec(files, facts)},
    }
    if queue:
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _metadata(files: AttemptFiles, owner: JobObject) -> dict[str, Any]:
    # blockOwnerDeletion would need the right to update trainingjobs/finalizers if the API server runs the admission
    # plugin OwnerReferencesPermissionEnforcement; nothing here needs it.
    return {
        "name": files.name,
        "namespace": owner.namespace,
        "labels": own_labels(files),
        "ownerReferences": [owner_reference(owner)],
    }


def owner_reference(owner: JobObject) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}", "kind": "TrainingJob", "name": owner.name, "uid": owner.uid,
        "controller": True, "blockOwnerDeletion": False,
    }  # fmt: skip


def own_labels(files: AttemptFiles) -> dict[str, str]:
    return {
        JOB_LABEL: files.job.name,
        JOB_UID_LABEL: files.job.uid,
        ATTEMPT_LABEL: str(files.job.epoch),
        MANAGED_BY_LABEL: "spillway",
    }


def is_own_key(key: str) -> bool:
    """Whether a label or annotation is reserved for the operator."""
    return key in RESERVED_KEYS or key.startswith(RESERVED_PREFIXES)


# --- the pod ----------------------------------------------------------------------------------------------------------


def _pod_metadata(files: AttemptFiles) -> dict[str, Any]:
    overrides = files.job.spec.pod
    metadata: dict[str, Any] = {"labels": {**overrides.labels, **own_labels(files)}}
    if overrides.annotations:
        metadata["annotations"] = dict(overrides.annotations)
    return metadata


def pod_spec(files: AttemptFiles, facts: OperatorFacts) -> dict[str, Any]:
    """The pod of an attempt: no token except the one for progress, and request = limit where exceeding it ends the
    pod."""
    spec, resources, volumes = files.job.spec, files.resources, _volumes(files, files.resources, facts)
    command = ["python", "-m", "spillway_trainer.launch", CONTRACT_DIRECTORY]
    container = _container(spec, facts, command, _requests(resources), volumes)
    if isinstance(files.job, JobFile):  # a script serves no metrics
        container["ports"] = [{"name": "metrics", "containerPort": files.job.metrics_port or facts.metrics_port}]
    pod = _pod(spec, container, volumes) | _scheduling(files)
    pod["terminationGracePeriodSeconds"] = resources.grace_seconds
    if files.job.num_nodes > 1:
        pod["subdomain"] = files.name
    if spec.pod.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod


def inspection_pod(spec: TrainingJobSpec, facts: OperatorFacts, tolerations: Sequence[Toleration]) -> dict[str, Any]:
    """A pod that fetches what the job reads, and builds its model: on a CPU, with the mounts that these need, and
    without a token."""
    source = {"path": "job.json", "fieldRef": {"fieldPath": f"metadata.annotations['{INSPECTION_LABEL}']"}}
    volumes = [
        _mounted("job", {"downwardAPI": {"items": [source]}}, CONTRACT_DIRECTORY, read_only=True),
        _mounted("tmp", {"emptyDir": {}}, SCRATCH_DIRECTORY),
    ]
    fetched = [place for place in spec.places.values() if place.fetch is not None]
    written = {place.claim for place in fetched}
    for claim, field in read_claims(spec).items():
        if claim in written or (spec.model.source is not None and claim == spec.model.source.claim):
            at = f"{CLAIMS_DIRECTORY}/{claim}"
            volumes.append(_mounted(READ_VOLUMES[field], _claim(claim), at, read_only=claim not in written))
    volumes += [_mount(number, mount) for number, mount in enumerate(spec.pod.mounts)]
    bounded = {"memory": format_quantity(INSPECTION_MEMORY_BYTES), "ephemeral-storage": "256Mi"}
    resources = {"requests": {"cpu": "500m", **bounded}, "limits": bounded}
    asked = f"{CONTRACT_DIRECTORY}/job.json"
    command = ["python", "-P", "-m", "spillway_trainer.inspect", asked, "--in-pod", TERMINATION_MESSAGE_PATH]
    container = _container(spec, facts, command, resources, volumes)
    if secrets := sorted({place.fetch.secret_name for place in fetched if place.fetch and place.fetch.secret_name}):
        container["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    pod = _pod(spec, container, volumes)
    pod["tolerations"] = [_without_empty(one) for one in tolerations]
    if spec.scheduling.node_selector:
        pod["nodeSelector"] = dict(spec.scheduling.node_selector)
    return pod


def _pod(spec: JobSpec, container: dict[str, Any], volumes: list[Mounted]) -> dict[str, Any]:
    """A pod that meets Pod Security `restricted` and has no API token."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security_context(spec.pod.security_context),
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }
    optional = {
        "serviceAccountName": spec.pod.service_account_name,
        "priorityClassName": spec.scheduling.priority_class_name,
        "runtimeClassName": spec.pod.runtime_class_name,
        "imagePullSecrets": [{"name": secret.name} for secret in spec.pod.image_pull_secrets],
    }
    return pod | {key: value for key, value in optional.items() if value}


def _security_context(asked: SecurityContext) -> dict[str, Any]:
    made: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if not asked.assigned_by_cluster:
        made |= {
            "runAsUser": asked.run_as_user or USER_ID,
            "runAsGroup": asked.run_as_group or USER_ID,
            "fsGroup": asked.fs_group or USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    if asked.supplemental_groups:
        made["supplementalGroups"] = list(asked.supplemental_groups)
    return made


def _container(
    spec: JobSpec,
    facts: OperatorFacts,
    command: list[str],
    resources: dict[str, Any],
    volumes: list[Mounted],
) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": spec.pod.image or facts.trainer_image,
        "imagePullPolicy": facts.image_pull_policy,
        "command": command,
        "workingDir": SCRATCH_DIRECTORY,
        "env": _environment(spec, facts),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": TERMINATION_MESSAGE_PATH,
        # A process that dies without our termination message leaves the end of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount for _, mount in volumes],
    }


def _environment(spec: JobSpec, facts: OperatorFacts) -> list[dict[str, Any]]:
    """The job's variables, then ours, which take precedence."""
    given = [variable.model_dump(mode="json", exclude_none=True) for variable in spec.pod.env]
    own = {"TMPDIR": SCRATCH_DIRECTORY, "HOME": SCRATCH_DIRECTORY}
    if facts.progress_url:
        own |= {
            URL_VARIABLE: facts.progress_url,
            TOKEN_VARIABLE: f"{TOKEN_DIRECTORY}/{TOKEN_FILE}",
            CA_VARIABLE: f"{CONTRACT_DIRECTORY}/{CA_KEY}",
        }
    return given + [{"name": name, "value": value} for name, value in own.items()]


def _requests(resources: PodResources) -> dict[str, Any]:
    bounded = {
        "memory": format_quantity(resources.memory_bytes),
        "ephemeral-storage": format_quantity(resources.ephemeral_storage_bytes),
    }
    if resources.devices:
        bounded[resources.resource_name] = str(resources.devices)
    bounded |= {name: str(count) for name, count in resources.extended}
    return {"requests": {"cpu": format_cores(resources.cpu_cores), **bounded}, "limits": bounded}


Mounted = tuple[dict[str, Any], dict[str, Any]]
"""A volume, and its mount."""


def _volumes(files: AttemptFiles, resources: PodResources, facts: OperatorFacts) -> list[Mounted]:
    """Every volume with its mount."""
    spec = files.job.spec
    found = [
        _mounted("contract", {"configMap": {"name": files.name}}, CONTRACT_DIRECTORY, read_only=True),
        _mounted("work", {"emptyDir": {}}, WORK_DIRECTORY),
        _mounted("tmp", {"emptyDir": {}}, SCRATCH_DIRECTORY),
        _mounted(
            "shared-memory",
            {"emptyDir": {"medium": "Memory", "sizeLimit": format_quantity(resources.shared_memory_bytes)}},
            "/dev/shm",  # noqa: S108 - a volume of the pod
        ),
    ]
    if resources.spill_volume_bytes:
        for directory in files.job.spill_directories:
            found.append(_mounted(directory.removeprefix("/"), _spill_volume(spec, resources), directory))
    if spec.checkpoint.claim is not None:
        found.append(_mounted("checkpoints", _claim(spec.checkpoint.claim), CHECKPOINT_MOUNT))
    for claim, field in read_claims(spec).items():
        volume = READ_VOLUMES[field]
        found.append(_mounted(volume, _claim(claim), f"{CLAIMS_DIRECTORY}/{claim}", read_only=True))
    found += [_mount(number, mount) for number, mount in enumerate(spec.pod.mounts)]
    if facts.progress_url:
        source = {
            "serviceAccountToken": {
                "audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": TOKEN_FILE,
            }
        }  # fmt: skip
        found.append(_mounted("token", {"projected": {"sources": [source]}}, TOKEN_DIRECTORY, read_only=True))
    return found


READ_VOLUMES = {
    "spec.data.text.claim": "text", "spec.data.evaluation.text.claim": "evaluation-text",
    "spec.data.chat.claim": "chat", "spec.data.evaluation.chat.claim": "evaluation-chat",
    "spec.data.tokens.claim": "tokens",
    "spec.model.source.claim": "model", "spec.checkpoint.from.claim": "from",
}  # fmt: skip
"""Field that names a claim -> name of its volume."""


def _mounted(name: str, source: dict[str, Any], path: str, *, read_only: bool = False) -> Mounted:
    mount: dict[str, Any] = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return {"name": name, **source}, mount


def _mount(number: int, mount: Mount) -> Mounted:
    """The volume and mount of one of the user's own mounts."""
    if mount.claim is not None:
        source = _claim(mount.claim)
    elif mount.config_map is not None:
        source = {"configMap": {"name": mount.config_map}}
    else:
        source = {"secret": {"secretName": mount.secret}}
    volume, at = _mounted(f"mount-{number}", source, mount.path, read_only=not mount.writable)
    return volume, at | ({"subPath": mount.sub_path} if mount.sub_path else {})


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def _spill_volume(spec: JobSpec, resources: PodResources) -> dict[str, Any]:
    size = format_quantity(resources.spill_volume_bytes)
    if not spec.spill.storage_class_name:
        return {"emptyDir": {"sizeLimit": size}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": spec.spill.storage_class_name,
        "resources": {"requests": {"storage": size}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _without_empty(toleration: Toleration) -> dict[str, Any]:
    return {key: value for key, value in toleration.model_dump(mode="json", exclude_none=True).items() if value != ""}


def _scheduling(files: AttemptFiles) -> dict[str, Any]:
    """The user's selector, tolerations and the node class are required; live headroom is only a preference, because it
    changes.

    A pod on a node that stops answering is deleted after NODE_LOST_SECONDS, not after the API server's five minutes:
    its peers wait for it, and a checkpoint exists. The user's own tolerations of these taints replace ours, because
    otherwise the shorter one would apply.
    """
    scheduling = files.job.spec.scheduling
    tolerations = pod_tolerations(files.job.spec, files.plan.device)
    found: dict[str, Any] = {}
    if scheduling.node_selector:
        found["nodeSelector"] = dict(scheduling.node_selector)
    found["tolerations"] = [_without_empty(toleration) for toleration in tolerations] + [
        {"key": taint.key, "operator": "Exists", "effect": taint.effect, "tolerationSeconds": NODE_LOST_SECONDS}
        for taint in NODE_LOST_TAINTS
        if not any(tolerates(toleration, taint) for toleration in tolerations)
    ]
    terms = [
        {
            "weight": preferred.weight,
            "preference": {
                "matchFields": [{"key": "metadata.name", "operator": "In", "values": [preferred.node]}],
            },
        }
        for preferred in files.decision.preferences
    ]  # fmt: skip
    required = [
        {"key": key, "operator": "In", "values": [value]} for key, value in files.decision.required_labels.items()
    ]
    excluded = [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in files.decision.avoided_nodes
    ]
    affinity: dict[str, Any] = {}
    if required or excluded:
        term = {"matchExpressions": required, "matchFields": excluded}
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{name: found for name, found in term.items() if found}]
        }
    if terms:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = terms
    return found | ({"affinity": {"nodeAffinity": affinity}} if affinity else {})


def same_content(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two ConfigMaps have the same contract."""
    return all(one.get(key) == other.get(key) for key in (JOB_KEY, PLAN_KEY, DECISION_KEY, ATTEMPT_KEY))
