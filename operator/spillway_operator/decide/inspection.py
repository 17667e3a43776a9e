"""What a pod prepares before a job is planned: it fetches what the job reads (fetch), and builds a model whose sizes
the spec does not give (model.source, model.entrypoint), to find its shape.

    no shape yet          -> Job <job>-inspect: the trainer image fetches, then builds the model without allocating it
    its pod ended well    -> ConfigMap <job>-model, immutable: the shape, from which every attempt is planned
    its pod failed        -> condition Planned=False; deleting the Job starts another one

The pod's answer is its termination message, which only the kubelet can write into the status of the Job's pod: it needs
no permission, no token and no progress endpoint. The shape is checked, not trusted: it decides only how much memory the
job's own pods get.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from spillway.api.limits import FETCH_DEADLINE_SECONDS, INSPECTION_DEADLINE_SECONDS, INSPECTION_MEMORY_BYTES
from spillway.api.sweep.members import solo_specs
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import ExitCode
from spillway.placement.able_nodes import pod_tolerations
from spillway.planning.model_shape import ModelShape
from spillway.units import format_quantity, format_seconds

from . import conditions as c
from .answer import PATIENCE_SECONDS, write
from .case import Case
from .conditions import Finding, false, unknown
from .manifests import (
    CLAIMS_DIRECTORY,
    DOWNLOADS_LABEL,
    INSPECTION_LABEL,
    QUEUE_LABEL,
    inspection_pod,
    owner_reference,
    read_claims,
)
from .observed import Deletion, Desired, Inspection, Manifest

LOOK_SECONDS = 3.0
LARGEST_SIZE = 1 << 60
SHAPE_KEY = "shape"


def is_needed(spec: TrainingJobSpec) -> bool:
    return spec.model.config is None or bool(_fetched(spec))


def _fetched(spec: TrainingJobSpec) -> list[str]:
    return [place.fetch.uri for place in spec.places.values() if place.fetch is not None]


def _deadline_seconds(spec: TrainingJobSpec) -> int:
    return FETCH_DEADLINE_SECONDS if _fetched(spec) else INSPECTION_DEADLINE_SECONDS


def job_name(name: str) -> str:
    return f"{name}-inspect"


def shape_name(name: str) -> str:
    return f"{name}-model"


def inspected(case: Case, job: TrainingJob, seen: Inspection) -> ModelShape | Desired:  # noqa: PLR0911
    """The model's shape, or what to do until it is known: one line per case."""
    name = job.metadata.name
    if seen.shape:
        shape = read_shape(seen.shape)
        if shape is not None and all(shape.of_member(one, job.spec) for one in solo_specs(job.spec)):
            return shape
        what = "model sizes that this operator can read" if shape is None else "the sizes of all members' models"
        problem = (
            f"ConfigMap {shape_name(name)} does not hold {what}; delete it and the Job that made it: "
            f"kubectl delete configmap/{shape_name(name)} job/{job_name(name)} -n {job.metadata.namespace}"
        )
        return _waits(case, false(c.PLANNED, c.INSPECTION_FAILED, problem))
    if not seen.job_uid:
        return write(case.found(_inspecting(job, "")), creates=(_job(case, job),), look_again=LOOK_SECONDS)
    if not seen.outcome:
        return write(case.found(_inspecting(job, seen.obstacle)), look_again=LOOK_SECONDS)
    gone = Deletion("Job", job_name(name), seen.job_uid)
    if seen.ending is None and seen.reason != "DeadlineExceeded":  # the pod was lost; the model may be right
        return write(case.found(_inspecting(job, "its pod was lost")), deletes=(gone,), look_again=PATIENCE_SECONDS)
    if seen.outcome == "Complete" and seen.ending is not None and read_shape(seen.ending.message) is not None:
        return write(case, creates=(_config_map(case, seen.ending.message.strip()),), look_again=0.0)
    again = (
        "correct the cause (files, image, Secret or network), then delete the Job, and the operator tries again: "
        f"kubectl delete job {job_name(name)} -n {job.metadata.namespace}. A change of spec.model or spec.data needs a "
        "new TrainingJob"
    )
    why = c.clean(_why(seen, job), c.LONGEST_MESSAGE - len(again) - 2)
    return _waits(case, false(c.PLANNED, c.INSPECTION_FAILED, f"{why}; {again}"))


@lru_cache(maxsize=64)
def read_shape(text: str) -> ModelShape | None:
    """The shape in a packed text, if its sizes are positive and bounded."""
    try:
        shape = ModelShape.unpacked(text)
    except ValueError:
        return None
    every = [shape, *(other for _, other in shape.others)]
    return shape if all(map(_is_sound, every)) else None


def _is_sound(shape: ModelShape) -> bool:
    sizes = [shape.hidden_size, shape.vocab_size, shape.num_parameters, shape.compute_bytes, shape.trained_bytes]
    return all(0 < size < LARGEST_SIZE for size in sizes) and all(one.num_parameters >= 0 for one in shape.segments)


def _waits(case: Case, found: Finding) -> Desired:
    return write(case.found(found), look_again=PATIENCE_SECONDS)


def _inspecting(job: TrainingJob, obstacle: str) -> Finding:
    name, fetched = job_name(job.metadata.name), _fetched(job.spec)
    what = f"Job {name} builds the model without allocating it, to find its sizes"
    if fetched:
        log = f"kubectl logs -f job/{name} -n {job.metadata.namespace}"
        what = f"Job {name} fetches {', '.join(fetched)}, and finds the model's sizes; its progress: {log}"
    return unknown(c.PLANNED, c.INSPECTING, f"{what}: {obstacle}" if obstacle else what)


def _why(seen: Inspection, job: TrainingJob) -> str:
    name = job_name(job.metadata.name)
    if seen.reason == "DeadlineExceeded":
        what = "the download" if _fetched(job.spec) else "building the model"
        limit = format_seconds(_deadline_seconds(job.spec))
        return f"{what} took longer than {limit}, or the pod of Job {name} could not start"
    assert seen.ending is not None
    if seen.ending.reason == "OOMKilled":
        used = f"Job {name} used more than {format_quantity(INSPECTION_MEMORY_BYTES)} of memory"
        own = "; create the model's parameters without the argument device" if job.spec.model.entrypoint else ""
        return used + own
    if seen.ending.exit_code == ExitCode.USER_ERROR and seen.ending.message:
        return seen.ending.message
    return f"Job {name} ended with exit code {seen.ending.exit_code}: {seen.ending.message or 'no message'}"


def _job(case: Case, job: TrainingJob) -> Manifest:
    """Runs one pod once, where the job's pods may run."""
    spec, name, facts = job.spec, job.metadata.name, case.observed.facts
    labels = {INSPECTION_LABEL: name}  # not those by which attempts are watched
    if _fetched(spec):
        labels[DOWNLOADS_LABEL] = "true"
    if spec.scheduling.queue_name:
        labels[QUEUE_LABEL] = spec.scheduling.queue_name
    claims = {claim: f"{CLAIMS_DIRECTORY}/{claim}" for claim in read_claims(spec)}
    given = {"spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True), "claims": claims}
    pod = inspection_pod(spec, facts, pod_tolerations(spec, "Cuda"))
    template: dict[str, Any] = {
        "metadata": {
            "labels": {**spec.pod.labels, **labels},
            "annotations": {**spec.pod.annotations, INSPECTION_LABEL: json.dumps(given, separators=(",", ":"))},
        },
        "spec": pod,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(name), "namespace": job.metadata.namespace, "labels": labels,
            "ownerReferences": [owner_reference(case.observed.job)],
        },
        "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": _deadline_seconds(spec), "template": template,
        },
    }  # fmt: skip


def _config_map(case: Case, shape: str) -> Manifest:
    job = case.observed.job
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": shape_name(job.name), "namespace": job.namespace,
            "labels": {INSPECTION_LABEL: job.name},
            "ownerReferences": [owner_reference(job)],
        },
        "immutable": True,
        "data": {SHAPE_KEY: shape},
    }  # fmt: skip
