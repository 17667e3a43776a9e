"""Fields that are valid but not supported yet, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spillway.api.limits import LORA_LLAMA_HAS_NO_DROPOUT, MIN_TEXT_VOCABULARY
from spillway.api.manifest import dotted, shown
from spillway.api.model import FETCHED_ON_CLAIM, Model, Precision
from spillway.api.pod import Checkpoint
from spillway.api.sweep.members import problems_of
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import FieldProblem

NOT_YET = {
    "checkpoint.resume": "Never does not work yet; use OwnOnly, and to start at step 0 give another --output or create "
    "a new job",
}
"""Fields that no run honours, each with what works instead. The CRD rejects them, too."""


def rejections(job: TrainingJob) -> list[FieldProblem]:
    """Fields that no run can honour yet, here or in a cluster, each with what works instead."""
    spec = job.spec
    sizes = spec.model.config
    masked = sizes is not None and sizes.architecture == "bert"
    smallest = MIN_TEXT_VOCABULARY + masked
    found = [
        (_drops_in_llama_with_lora(spec.model), "spec.model.config.dropout",
         LORA_LLAMA_HAS_NO_DROPOUT),
        (sizes is not None and sizes.vocab_size < smallest, "spec.model.config.vocabSize",
         f"must be at least {smallest} for text: one token for each byte, one for the end of "
         f"text{', and one for the mask' * masked}"),
    ]  # fmt: skip
    return [*_rejected(found, job), *_rejected_fields(NOT_YET, job), *problems_of(job)]


def rejections_in_cluster(job: TrainingJob) -> list[FieldProblem]:
    """Fields that `plan` understands but that an attempt in a cluster cannot honour yet, each with what works
    instead."""
    strategy, model, optimizer = job.spec.parallelism.strategy, job.spec.model, job.spec.memory.advanced.optimizer
    divides = strategy.startswith("Zero")
    found = [
        (divides and optimizer.overlap == "Forward", "spec.memory.advanced.optimizer.overlap",
         f"does not work with parallelism.strategy: {strategy}; use None or Auto, or strategy Fsdp"),
        (divides and model.lora, "spec.model.lora",
         f"does not work with parallelism.strategy: {strategy}, which needs all parameters to be trained; use Ddp or "
         f"Fsdp"),
    ]  # fmt: skip
    return _rejected(found, job) + [
        FieldProblem(f"spec.{field}.fetch", place.fetch.uri, FETCHED_ON_CLAIM)
        for field, place in job.spec.places.items()
        if place.fetch is not None and place.claim is None
    ]


def _drops_in_llama_with_lora(model: Model) -> bool:
    return bool(model.lora and model.config and model.config.architecture == "llama" and model.config.dropout)


def _rejected_fields(never: Mapping[str, str], job: TrainingJob) -> list[FieldProblem]:
    """One problem for each field of `never` whose value is not the default."""
    given, defaults = job.spec.model_dump(mode="json"), {"checkpoint": Checkpoint().model_dump(mode="json")}
    wrong = {path: _below(given, path) not in (None, [], _below(defaults, path)) for path in never}
    return _rejected([(wrong[path], f"spec.{path}", problem) for path, problem in never.items()], job)


def _rejected(found: Sequence[tuple[object, str, str]], job: TrainingJob) -> list[FieldProblem]:
    return [FieldProblem(path, _given(job, path), problem) for wrong, path, problem in found if wrong]


def _given(job: TrainingJob, path: str) -> str:
    value: Any = job.model_dump(mode="json")
    for part in path.split("."):
        value = value[part]
    return value if isinstance(value, str) else shown(value)


_CLUSTER_ONLY = (
    "parallelism.nodes", "parallelism.devicesPerNode", "parallelism.strategy", "model.precision.gradientReduce",
    "memory.advanced.activations.hostReserve", "spill.storageClassName", "spill.numVolumes",
    "checkpoint.subPath", "checkpoint.from.fetch.secretName",
    "model.source.fetch.secretName", "data.text.fetch.secretName", "data.chat.fetch.secretName",
    "data.tokens.fetch.secretName", "data.evaluation.text.fetch.secretName", "data.evaluation.chat.fetch.secretName",
    "pod", "scheduling", "lifecycle.activeDeadlineSeconds",
    "lifecycle.pendingDeadlineSeconds", "lifecycle.stallSeconds", "lifecycle.ttlSecondsAfterFinished", "managedBy",
    "suspend",
)  # fmt: skip


def not_used_locally(spec: TrainingJobSpec) -> list[str]:
    """Fields that have no meaning in a local run and that the user set to another value than the default, as
    spec.a.b."""
    given = spec.model_dump(mode="json", exclude_unset=True)
    default = TrainingJobSpec.model_construct(model=spec.model, data=spec.data, training=spec.training)
    defaults = default.model_dump(mode="json")
    defaults["model"] = {"precision": Precision().model_dump(mode="json")}
    return [
        dotted(("spec", *leaf))
        for field in _CLUSTER_ONLY
        for leaf, value in _leaves(_below(given, field), tuple(field.split(".")))
        if value not in (None, {}, [], _below(defaults, ".".join(leaf)))
    ]


def _below(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and path[-1] not in ("nodeSelector", "labels", "annotations"):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    return [(path, value)]
