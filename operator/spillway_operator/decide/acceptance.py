"""Acceptance: decides whether a TrainingJob from the API server can run, and lists its problems if not.

The CRD rejects most invalid jobs first; but it may be older than the operator, and some rules need more than a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from spillway.api.job_spec import JobSpec
from spillway.api.limits import GROUP, MAX_SPEC_BYTES, QUEUE_ANNOTATIONS, RESERVED_VARIABLES, VERSION
from spillway.api.load import job_type
from spillway.api.manifest import validate
from spillway.api.rejections import rejections, rejections_in_cluster
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.errors import FieldProblem, InvalidJob

from . import conditions as c
from .conditions import Finding, false
from .manifests import AttemptFiles, is_own_key
from .observed import Claim, JobObject

RWX, ROX, RWO = "ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce"
DOWNLOAD = "the download must be written to it"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Fields that prevent a job from running until they are changed."""

    reason: str
    """InvalidSpec or Unsupported."""
    problems: tuple[FieldProblem, ...]

    def finding(self) -> Finding:
        return false(c.ACCEPTED, self.reason, "; ".join(map(str, self.problems)))


def accept(job: JobObject) -> TrainingJob | ScriptJob | Rejection:
    """The job with every default filled in, or all its problems."""
    return _accept(job.spec, job.name, job.namespace)


@lru_cache(maxsize=256)
def _accept(spec: bytes, name: str, namespace: str) -> TrainingJob | ScriptJob | Rejection:
    if len(spec) > MAX_SPEC_BYTES:
        allowed = f"at most {MAX_SPEC_BYTES:,}; move long values to a Secret, an image or a claim"
        return Rejection(c.INVALID_SPEC, (FieldProblem("spec", f"{len(spec):,} bytes as JSON", allowed),))
    document = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": json.loads(spec),
    }
    try:
        job: TrainingJob | ScriptJob = validate(job_type(document), document, name)
    except InvalidJob as error:
        return Rejection(c.INVALID_SPEC, error.problems)
    if preset := job.spec.pod.network_preset:  # an existing preset was already replaced by its content
        missing = "not in the OperatorConfig (kubectl get opconf default -o yaml); use one that is, or leave it out"
        return Rejection(c.INVALID_SPEC, (FieldProblem("spec.pod.networkPreset", preset, missing),))
    return rejection(job) or job


def rejection(job: TrainingJob | ScriptJob) -> Rejection | None:
    """Why a valid job cannot run in a cluster; also used by `spillway submit`."""
    of_its_model = [] if isinstance(job, ScriptJob) else rejections(job) or rejections_in_cluster(job)
    problems = [*of_its_model, *_without_guarantee(job.spec)]
    if problems:
        return Rejection(c.UNSUPPORTED, tuple(problems))
    taken = tuple(_taken(job.spec))
    return Rejection(c.INVALID_SPEC, taken) if taken else None


def _without_guarantee(spec: JobSpec) -> Iterator[FieldProblem]:
    """Scheduling requests that cannot be guaranteed for this job, and the alternatives."""
    scheduling, nodes = spec.scheduling, spec.parallelism.nodes
    if scheduling.workload_priority_class_name and not scheduling.queue_name:
        yield FieldProblem(
            "spec.scheduling.workloadPriorityClassName",
            scheduling.workload_priority_class_name,
            "only applies to jobs in a queue; set scheduling.queueName, or use priorityClassName",
        )
    if scheduling.gang == "Required" and nodes > 1 and not scheduling.queue_name:
        yield FieldProblem(
            "spec.scheduling.gang",
            "Required",
            f"Required needs a queue that starts all {nodes} pods or none; set scheduling.queueName (Kueue), or use "
            f"Auto: then an attempt that gets nodes for only some of its pods releases them",
        )


def _taken(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yields a problem for each name that the operator sets itself."""
    for variable in spec.pod.env:
        if variable.name in RESERVED_VARIABLES:
            yield FieldProblem("spec.pod.env", variable.name, "the operator sets this variable; leave it out")
    for field, keys in (("labels", spec.pod.labels), ("annotations", spec.pod.annotations)):
        for key in keys:
            if is_own_key(key) and not (field == "annotations" and key in QUEUE_ANNOTATIONS):
                yield FieldProblem(f"spec.pod.{field}", key, "reserved; use another key")


# --- changes ----------------------------------------------------------------------------------------------------------

NEVER_CHANGE = ("model", "data", "training", "command", "parallelism")
UNLESS_SUSPENDED = ("checkpoint", "search", "members", "objective")
"""Fields that can change only while the job is suspended: otherwise the next attempt would not find the job's
checkpoints, or would train other members. The CRD locks memory, scheduling and spill as well; changing these between
two attempts does no harm."""
ANY_TIME = ("lifecycle", "suspend", "managed_by")
"""Fields whose changes take effect at once, or do not concern attempts."""


def changed_fields(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Fields of `after` whose values differ from those of a running attempt (`before`), as the API spells them."""
    found = tuple(name for name in _unequal(before, after) if name not in ANY_TIME)
    inner = tuple(f"pod.{_alias(after.pod, name)}" for name in _unequal(before.pod, after.pod))
    return (*(_alias(after, name) for name in found if name != "pod"), *inner)


def _unequal(before: BaseModel, after: BaseModel) -> tuple[str, ...]:
    return tuple(name for name in type(after).model_fields if getattr(before, name, None) != getattr(after, name))


def _alias(fields: BaseModel, name: str) -> str:
    return type(fields).model_fields[name].alias or name


def forbidden_change(begun: AttemptFiles, after: JobSpec, *, was_suspended: bool) -> Rejection | None:
    """Returns the rejection of a change that an older CRD did not reject: of immutable fields, to which the job's
    checkpoints would not fit, or of fields in UNLESS_SUSPENDED although the job was not suspended after the attempt."""
    job, since = begun.job, f"changed since attempt {begun.job.epoch} began, but"
    show = f"kubectl get configmap {begun.name} -n {job.namespace} -o yaml, key job.json"
    restore = f"restore the value of that attempt ({show}), or"
    wrong = dict.fromkeys(NEVER_CHANGE, f"{since} is immutable; {restore} create a new TrainingJob")
    if not was_suspended:
        only = f"{since} can change only while the job is suspended"
        wrong |= dict.fromkeys(UNLESS_SUSPENDED, f"{only}; {restore} set spec.suspend to true")
    problems = [
        FieldProblem(f"spec.{name}", "", wrong[name]) for name in changed_fields(job.spec, after) if name in wrong
    ]
    return Rejection(c.INVALID_SPEC, tuple(problems)) if problems else None


# --- claims -----------------------------------------------------------------------------------------------------------


def claim_names(spec: JobSpec) -> tuple[str, ...]:
    """Names of the PersistentVolumeClaims that the pods mount."""
    return tuple(sorted({name for _, name, _ in claim_uses(spec)}))


def claim_uses(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yields each field that names a claim, the name, and why the claim must be writable (empty: it is only read)."""
    if spec.checkpoint.claim is not None:
        yield "spec.checkpoint.claim", spec.checkpoint.claim, "checkpoints must be written to it"
    for field, place in spec.places.items():
        if place.claim is not None:
            yield f"spec.{field}.claim", place.claim, DOWNLOAD if place.fetch is not None else ""
    for number, mount in enumerate(spec.pod.mounts):
        if mount.claim is not None:
            yield f"spec.pod.mounts[{number}].claim", mount.claim, "writable is true" if mount.writable else ""


def claim_problem(spec: JobSpec, claims: tuple[Claim, ...]) -> Finding | None:
    """Returns a problem with the claims that can be corrected without a change of the job; None if there is none."""
    found = {claim.name: claim for claim in claims}
    missing = [
        f"{field} = {name}: PersistentVolumeClaim {name} not found; create it"
        for field, name, _ in claim_uses(spec)
        if name not in found or not found[name].exists
    ]
    if missing:
        return false(c.PLANNED, c.CLAIM_NOT_FOUND, "; ".join(missing))
    problems = (
        access_problem(f"{field} = {name}", spec.parallelism.nodes, found[name].access_modes, written)
        for field, name, written in claim_uses(spec)
    )
    return next((problem for problem in problems if problem is not None), None)


def access_problem(field: str, num_nodes: int, modes: tuple[str, ...], written: str) -> Finding | None:
    """Returns the problem with a claim's access modes; `written` as in `claim_uses`."""
    if not modes or RWX in modes:
        return None
    only_read = written in ("", DOWNLOAD)  # by the job's nodes: one pod downloads before they start
    if num_nodes > 1 and not (only_read and ROX in modes):
        use = "read from" if not written else "read the download from" if only_read else "write to"
        needed = RWX if written else f"{ROX} or {RWX}"
        why = f"{num_nodes} nodes {use} it, so its access mode must be {needed}; it is {', '.join(modes)}"
        return false(c.PLANNED, c.CLAIM_NOT_SHARED, f"{field}: {why}")
    if written and set(modes) == {ROX}:
        other = RWX if num_nodes > 1 else f"{RWO} or {RWX}"
        why = f"{written}, but its access mode is {ROX}; use a claim with {other}"
        return false(c.PLANNED, c.CLAIM_NOT_WRITABLE, f"{field}: {why}")
    return None


def given(spec: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of an unvalidated spec; None if it is missing."""
    value: Any = spec
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
