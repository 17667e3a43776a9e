"""Findings of `spillway doctor` about a cluster, from the API server's answers to this user. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from spillway import DISTRIBUTION
from spillway.api.crd import KINDS, Kind, definition
from spillway.api.limits import GROUP, VERSION
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.units import counted
from spillway_operator.decide.acceptance import access_problem, claim_uses

from ..cluster.api import NO_CLUSTER
from ..cluster.job_status import conditions, has_ended, that_matter, value_at
from ..console import printable
from .findings import STALE_DAYS, Diagnosis, Missing, Severity, days_since

OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
Object = Mapping[str, Any]
LEAST_MINOR = 31
"""Lowest minor version of Kubernetes 1.x that has selectable fields of custom resources. The chart also requires it."""
ENFORCE = "pod-security.kubernetes.io/enforce"
MOST_NAMED = 5
HELM = "helm upgrade --install spillway charts/spillway (docs/install.md)"


@dataclass(frozen=True, slots=True)
class Right:
    """A permission that a command needs."""

    verb: str
    group: str
    resource: str
    subresource: str = ""

    @property
    def label(self) -> str:
        return f"{self.verb} {self.resource}{'/' + self.subresource if self.subresource else ''}"


RIGHTS: dict[str, tuple[Severity, str, tuple[Right, ...]]] = {
    "status": (ERROR, "view", (Right("get", GROUP, "trainingjobs"), Right("list", GROUP, "trainingjobs"))),
    "submit": (WARNING, "edit", (Right("create", GROUP, "trainingjobs"),)),
    "logs": (WARNING, "view", (Right("list", "", "pods"), Right("get", "", "pods", "log"))),
    "top": (NOTE, "edit", (Right("get", "", "pods", "proxy"),)),
}
"""Command -> severity if they are missing, the role that grants them, and the rights."""
CREATE_PODS = Right("create", "", "pods")

FIXES = {
    "InvalidSpec": "correct the fields named in the message; immutable fields need a new TrainingJob",
    "Unsupported": "use the alternative named in the message",
    "NameConflict": "delete or rename the object that has the name, or give the job another name",
    "NoNode": "free or add a node, or relax scheduling.nodeSelector and tolerations",
    "DoesNotFit": "make a change that the message names: spec.memory while the job is suspended, "
    "spec.training only in a new TrainingJob",
    "ClaimNotFound": "create the PersistentVolumeClaim, or name an existing one",
    "ClaimNotShared": "use a claim with access mode ReadWriteMany",
    "ClaimNotWritable": "use a claim with access mode ReadWriteOnce or ReadWriteMany",
    "InspectionFailed": "do what the message says; a change of spec.model or spec.data needs a new TrainingJob",
    "NoNumber": "restore status.attempts, as the message says",
    "JobGone": "delete the pods, as the message says",
    "NoPods": "see `kubectl describe job`, as the message says",
    "ContractTooLarge": "shorten spec.pod.env, or move long values to a Secret",
    "NoReport": "see `spillway logs`; if the trainer makes steps, check the progress Service of the operator, its "
    "certificate and the network policies",
    "NoProgress": "see `spillway logs` for what the trainer waited for; another attempt follows",
    "Unschedulable": "free or add a node, or request less",
    "Rejected": "fix what the message names: quota, LimitRange, Pod Security or an admission policy",
    "PodsRejected": "fix what the message names: raise the quota or the LimitRange's maximum, or request less",
    "ContainerWaiting": "do what the message says",
}
"""Reason -> what to do."""
STUCK = (
    "InvalidSpec", "Unsupported", "NameConflict", "NoNode", "DoesNotFit", "InspectionFailed", "NoNumber", "JobGone",
    "NoProgress",
)  # fmt: skip
"""Reasons with which a job does not continue without help."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The API server's answers; Missing if there was none or the user may not see it."""

    host: str
    namespace: str
    version: Object | Missing
    resources: Sequence[str] | Missing = ()
    """Plurals that the API group serves."""
    schemas: Mapping[str, Object] | Missing = field(default_factory=dict)
    """Kind -> its OpenAPI schema."""
    deployments: Sequence[Object] | Missing = ()
    rights: Mapping[Right, bool] | Missing = field(default_factory=dict)
    node_profiles: Sequence[Object] | Missing = ()
    jobs: Sequence[Object] | Missing = ()
    namespace_object: Object | Missing = field(default_factory=dict)
    pod_rejection: str | Missing = ""
    """Why the API server would reject a pod like the trainer's (dry run); empty = it would not."""
    claims: Mapping[str, Object | Missing] = field(default_factory=dict)
    """The claims of --job."""
    storage_classes: Mapping[str, Object | Missing] = field(default_factory=dict)
    named: Mapping[str, Object | Missing] = field(default_factory=dict)
    """The Secrets, ConfigMaps and ServiceAccount of --job, by kind/name."""


def cluster_findings(
    facts: ClusterFacts, client: str, now: datetime, job: TrainingJob | ScriptJob | None
) -> list[Diagnosis]:
    """All findings; `client` is the version of this spillway."""
    found = [*server(facts)]
    if isinstance(facts.version, Missing):
        return found  # everything else would fail in the same way
    found += definitions(facts)
    if isinstance(facts.resources, Missing) and facts.resources.is_absent:
        return [*found, *operator(facts, client)]
    found += [*operator(facts, client), *rights(facts), *profiles(facts, now), *pods(facts)]
    found += [*metrics_source(facts), *stuck_jobs(facts)]
    return [*found, *volumes(facts, job), *named_objects(facts, job)] if job is not None else found


def finding(check: str, severity: Severity, message: str, fix: str = "") -> Diagnosis:
    return Diagnosis("cluster", check, severity, printable(message), fix)


def unseen(check: str, what: str, missing: Missing) -> Diagnosis:
    """The finding for a missing answer: a note if the user lacks the right, else a warning."""
    if missing.is_forbidden:
        return finding(check, NOTE, f"you may not read {what}", "ask the cluster's administrator")
    return finding(check, WARNING, f"{what}: {missing.why}", "check that the API server is healthy, then try again")


def server(facts: ClusterFacts) -> Iterator[Diagnosis]:
    if isinstance(facts.version, Missing):
        fix = "repair the connection, or choose another kubeconfig (KUBECONFIG) or --context"
        yield finding("api server", ERROR, facts.version.why.removesuffix(f"; {NO_CLUSTER}"), fix)
        return
    version = str(facts.version.get("gitVersion", "?"))
    minor = re.match(r"v?1\.(\d+)", version)
    if minor and int(minor[1]) < LEAST_MINOR:
        message = f"{facts.host} is Kubernetes {version}, but Spillway needs 1.{LEAST_MINOR}"
        yield finding("api server", ERROR, message, "upgrade the cluster")
    else:
        yield finding("api server", OK, f"{facts.host}, Kubernetes {version}, namespace {facts.namespace}")


# --- what is installed ------------------------------------------------------------------------------------------------


def definitions(facts: ClusterFacts) -> Iterator[Diagnosis]:
    """Whether the CRDs are installed, with the fields that this client knows."""
    check = "crds"
    if isinstance(facts.resources, Missing):
        if facts.resources.is_absent:
            yield finding(check, ERROR, f"Spillway is not installed: the cluster has no {GROUP}/{VERSION}", HELM)
        else:
            yield unseen(check, "the API group", facts.resources)
        return
    absent = [kind.kind for kind in KINDS if kind.plural not in facts.resources]
    if absent:
        yield finding(check, ERROR, f"not installed: {', '.join(absent)}", HELM)
        return
    if isinstance(facts.schemas, Missing):
        yield unseen(check, "the CRDs' schemas", facts.schemas)
        return
    lacking, newer = [], []
    for kind in KINDS:
        ours, theirs = own_fields(kind), fields_of(facts.schemas.get(kind.kind, {}))
        lacking += [f"{kind.kind} {path}" for path in sorted(ours - theirs)]
        newer += [f"{kind.kind} {path}" for path in sorted(theirs - ours)]
    if lacking:
        message = f"the cluster's CRDs are of another version and lack {some(lacking)}"
        yield finding(check, ERROR, message, f"kubectl apply --server-side -f crds, or {HELM}")
    elif newer:
        message = f"the cluster's CRDs are newer than this client, which lacks {some(newer)}"
        yield finding(check, WARNING, message, f"install {DISTRIBUTION} of the operator's version here")
    else:
        yield finding(check, OK, f"{', '.join(kind.kind for kind in KINDS)}: same fields as this client")


def own_fields(kind: Kind) -> set[str]:
    version = definition(kind)["spec"]["versions"][0]
    return fields_of(version["schema"]["openAPIV3Schema"])


def fields_of(schema: Object, path: str = "") -> set[str]:
    """Dotted paths of all fields below spec and status."""
    found: set[str] = set()
    for name, inner in (schema.get("properties") or {}).items():
        if path or name in ("spec", "status"):
            below = f"{path}.{name}" if path else name
            found |= {below} | fields_of(inner, below)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            found |= fields_of(schema[key], f"{path}[]")
    return found


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def operator(facts: ClusterFacts, client: str) -> Iterator[Diagnosis]:
    check = "operator"
    if isinstance(facts.deployments, Missing):
        yield unseen(check, "the operator's Deployment", facts.deployments)
        return
    if not facts.deployments:
        yield finding(check, ERROR, "no Deployment of the operator (app.kubernetes.io/name=spillway)", HELM)
        return
    for deployment in facts.deployments:
        yield one_operator(deployment, client)


def one_operator(deployment: Object, client: str) -> Diagnosis:
    metadata = deployment["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    wanted = value_at(deployment, "spec.replicas")
    ready = value_at(deployment, "status.readyReplicas") or 0
    image = next((one.get("image", "") for one in value_at(deployment, "spec.template.spec.containers") or ()), "")
    version = (metadata.get("labels") or {}).get("app.kubernetes.io/version", "")
    what = f"{namespace}/{name}, image {image}"
    if wanted == 0:
        fix = f"kubectl scale deployment/{name} -n {namespace} --replicas=1"
        return finding("operator", ERROR, f"{what}: scaled to 0 replicas, so jobs are not processed", fix)
    if not ready:
        why = next(
            (str(one.get("message", "")) for one in value_at(deployment, "status.conditions") or ()
             if one.get("type") == "Available" and one.get("status") != "True"), "",
        )  # fmt: skip
        fix = f"kubectl logs deployment/{name} -n {namespace}; kubectl describe pods -n {namespace}"
        return finding("operator", ERROR, f"{what}: no replica is ready{': ' + why if why else ''}", fix)
    if version and version != client:
        fix = f"install {DISTRIBUTION} {version} here, or helm upgrade"
        return finding("operator", WARNING, f"{what}: version {version}, but this client is {client}", fix)
    return finding("operator", OK, f"{what}: {ready} of {wanted or 1} ready, version {version or 'not labelled'}")


# --- what this user may do, and what pods may -------------------------------------------------------------------------


def rights(facts: ClusterFacts) -> Iterator[Diagnosis]:
    if isinstance(facts.rights, Missing):
        yield unseen("rights", "your rights", facts.rights)
        return
    allowed = []
    for command, (severity, role, wanted) in RIGHTS.items():
        lacking = [right.label for right in wanted if not facts.rights.get(right, False)]
        if not lacking:
            allowed.append(command)
            continue
        message = f"`spillway {command}`: you may not {', '.join(lacking)} in {facts.namespace}"
        if command == "top":
            message += "; `spillway top JOB` shows no rates"
        fix = f"kubectl create rolebinding NAME --clusterrole={role} --user=YOU -n {facts.namespace}"
        yield finding("rights", severity, message, fix)
    if allowed:
        yield finding("rights", OK, f"you may use spillway {', '.join(allowed)} in {facts.namespace}")


def pods(facts: ClusterFacts) -> Iterator[Diagnosis]:
    """Whether the namespace admits trainer pods, which comply with Pod Security `restricted`."""
    check = "pods"
    labels = {} if isinstance(facts.namespace_object, Missing) else facts.namespace_object
    level = (value_at(labels, "metadata.labels") or {}).get(ENFORCE, "")
    enforced = f"; Pod Security enforces {level}" if level else ""
    if isinstance(facts.namespace_object, Missing) and facts.namespace_object.is_absent:
        fix = f"kubectl create namespace {facts.namespace}"
        yield finding(check, ERROR, f"namespace {facts.namespace} does not exist", fix)
    elif isinstance(facts.pod_rejection, Missing):
        note = f"not tried: {facts.pod_rejection.why}{enforced}"
        yield finding(check, OK if facts.pod_rejection.is_forbidden else NOTE, note)
    elif facts.pod_rejection:
        message = f"{facts.namespace} rejects a pod like the trainer's{enforced}: {facts.pod_rejection}"
        yield finding(check, ERROR, message, "change the quota, limit range or policy named in the message")
    else:
        yield finding(check, OK, f"{facts.namespace} accepts a pod like the trainer's (dry run){enforced}")


# --- what the operator plans with -------------------------------------------------------------------------------------


def profiles(facts: ClusterFacts, now: datetime) -> Iterator[Diagnosis]:
    check, measure = "nodes", "spillway calibrate NODE --image IMAGE (docs/calibration.md)"
    if isinstance(facts.node_profiles, Missing):
        yield unseen(check, "NodeProfiles", facts.node_profiles)
        return
    if not facts.node_profiles:
        what = "no NodeProfile: plans use the rates of the built-in hardware catalog, not measured ones"
        yield finding(check, NOTE, what, measure)
        return
    times = {str(one["metadata"]["name"]): str(value_at(one, "spec.measuredTime") or "") for one in facts.node_profiles}
    stale = [name for name, time in times.items() if time and (days_since(time, now) or 0) > STALE_DAYS]
    undated = [name for name, time in times.items() if not time]
    if stale:
        yield finding(check, WARNING, f"NodeProfiles older than {STALE_DAYS} days: {some(sorted(stale))}", measure)
    if undated:
        yield finding(check, NOTE, f"NodeProfiles without a spec.measuredTime: {some(sorted(undated))}")
    if not stale and not undated:
        yield finding(check, OK, f"{counted(len(times), 'NodeProfile')}, all younger than {STALE_DAYS} days")


def metrics_source(facts: ClusterFacts) -> Iterator[Diagnosis]:
    """What the operator reports about live metrics in the conditions of jobs that have not ended."""
    if isinstance(facts.jobs, Missing):
        return  # stuck_jobs reports it
    by_reason: dict[tuple[str, str], list[Object]] = {}
    for job in facts.jobs:
        found = conditions(job).get("MetricsAvailable")
        if found is not None and not has_ended(job):
            by_reason.setdefault((str(found.get("status")), str(found.get("reason"))), []).append(job)
    for (status, reason), jobs in by_reason.items():
        names = some([str(job["metadata"]["name"]) for job in jobs])
        if status == "True":
            sources = {str(value_at(job, "status.plan.metricsSource") or "?") for job in jobs}
            yield finding("metrics", OK, f"placed with live metrics ({', '.join(sorted(sources))}): {names}")
            continue
        message = conditions(jobs[0])["MetricsAvailable"].get("message") or "placed without live metrics"
        if reason == "NotConfigured":
            yield finding(
                "metrics",
                NOTE,
                f"{names}: {message}",
                "set nodeExporter.enabled or prometheus.url in the chart's values",
            )
        elif reason == "NoNodeView":
            yield finding("metrics", NOTE, f"{names}: {message}", "set nodeReader.enabled in the chart's values")
        else:
            fix = "check that Prometheus answers at the chart's prometheus.url; without one, that node exporters run"
            yield finding("metrics", WARNING, f"{names}: {message}", fix)


def stuck_jobs(facts: ClusterFacts) -> Iterator[Diagnosis]:
    if isinstance(facts.jobs, Missing):
        yield unseen("jobs", f"TrainingJobs in {facts.namespace}", facts.jobs)
        return
    troubled = 0
    for job in facts.jobs:
        name = f"{job['metadata'].get('namespace', '')}/{job['metadata']['name']}"
        for one in () if has_ended(job) else that_matter(job):
            reason = str(one.get("reason"))
            if reason in FIXES:
                troubled += 1
                severity = ERROR if reason in STUCK else WARNING
                message = f"{name}: {one.get('type')}={one.get('status')} ({reason}): {one.get('message', '')}"
                yield finding("jobs", severity, message, FIXES[reason])
    if not troubled:
        yield finding("jobs", OK, f"{counted(len(facts.jobs), 'TrainingJob')} in {facts.namespace}, none stuck")


# --- what --job names -------------------------------------------------------------------------------------------------


def volumes(facts: ClusterFacts, job: TrainingJob | ScriptJob) -> Iterator[Diagnosis]:
    for path, claim, written in claim_uses(job.spec):
        if claim in facts.claims:
            where, nodes = f"{path} = {claim}", job.spec.parallelism.nodes
            yield one_claim(where, facts.claims[claim], facts.namespace, nodes, written)
    for name, found in facts.storage_classes.items():
        path = f"spec.spill.storageClassName = {name}"
        if not isinstance(found, Missing):
            yield finding("volumes", OK, f"{path}: provisioned by {found.get('provisioner', '?')}")
        elif found.is_absent:
            yield finding("volumes", ERROR, f"{path}: StorageClass not found", "see kubectl get storageclass")
        else:
            yield unseen("volumes", path, found)
    if job.spec.checkpoint.claim is None:
        yield finding("volumes", NOTE, "spec.checkpoint.claim is not set: checkpoints are lost with the pod")


def one_claim(path: str, found: Object | Missing, namespace: str, nodes: int, written: str) -> Diagnosis:
    if isinstance(found, Missing):
        if found.is_absent:
            fix = "create it, or name an existing one (kubectl get pvc)"
            return finding("volumes", ERROR, f"{path}: claim not found in {namespace}", fix)
        return unseen("volumes", path, found)
    modes = [str(mode) for mode in value_at(found, "spec.accessModes") or ()]
    phase = str(value_at(found, "status.phase") or "?")
    problem = access_problem(path, nodes, tuple(modes), written)
    if problem is not None:
        return finding("volumes", ERROR, problem.message, FIXES[problem.reason])
    if phase == "Lost":
        return finding("volumes", ERROR, f"{path}: its volume is lost", "restore it, or create another claim")
    if phase != "Bound":
        message = f"{path}: {phase}; a StorageClass with WaitForFirstConsumer binds it when the first pod starts"
        return finding("volumes", NOTE, message, "see kubectl describe pvc if the job's pods wait for it")
    return finding("volumes", OK, f"{path}: bound, {', '.join(modes)}")


def named_by(job: TrainingJob | ScriptJob) -> Iterator[tuple[str, str, str]]:
    """What pods cannot start without, besides claims: kind/name, the field that names it, and the key that it must
    have, or an empty string."""
    pod = job.spec.pod
    for number, secret in enumerate(pod.image_pull_secrets):
        yield f"Secret/{secret.name}", f"spec.pod.imagePullSecrets[{number}]", ""
    for number, variable in enumerate(pod.env):
        if variable.value_from is not None:
            key = variable.value_from.secret_key_ref
            yield f"Secret/{key.name}", f"spec.pod.env[{number}]", key.key
    for number, mount in enumerate(pod.mounts):
        for kind, name in (("Secret", mount.secret), ("ConfigMap", mount.config_map)):
            if name:
                yield f"{kind}/{name}", f"spec.pod.mounts[{number}]", mount.sub_path
    for field_, place in job.spec.places.items():
        if place.fetch is not None and place.fetch.secret_name:
            yield f"Secret/{place.fetch.secret_name}", f"spec.{field_}.fetch.secretName", ""
    if pod.service_account_name:
        yield f"ServiceAccount/{pod.service_account_name}", "spec.pod.serviceAccountName", ""


def named_objects(facts: ClusterFacts, job: TrainingJob | ScriptJob) -> Iterator[Diagnosis]:
    check, present = "pod inputs", dict[str, None]()
    for which, path, key in dict.fromkeys(named_by(job)):
        found, (kind, _, name) = facts.named.get(which, {}), which.partition("/")
        where = f"{path}: {kind} {name}"
        if isinstance(found, Missing):
            if found.is_absent:
                fix = f"create it, or name an existing one (kubectl get {kind.lower()}s -n {facts.namespace})"
                yield finding(check, ERROR, f"{where} not found in {facts.namespace}", fix)
            else:
                yield unseen(check, where, found)
        elif key and key not in {**(found.get("data") or {}), **(found.get("binaryData") or {})}:
            yield finding(check, ERROR, f"{where} has no key {key}", "add the key, or name one that it has")
        else:
            present[f"{kind} {name}"] = None
    if present:
        yield finding(check, OK, f"found {', '.join(present)}")
