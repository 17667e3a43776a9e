"""Generates the CustomResourceDefinitions: `python -m spillway.api.crd` writes crds/, `--check` compares.

A structural schema: references inlined, bounds kept, defaults only where they are static. What a schema cannot say
(immutability, unions, divisibility) is said in CEL; `load_job` says the same with better words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from spillway.api.field_types import (
    EXTENDED_RESOURCE_NEEDED,
    MAX_DOMAIN_LENGTH,
    NATIVE_RESOURCES,
    QUOTA_PREFIX,
    STAYS_ON_CLAIM,
    quoted,
)
from spillway.api.limits import (
    GROUP,
    MANAGER,
    MAX_ENV_BYTES,
    MAX_NAME_LENGTH,
    MAX_RANKS,
    QUEUE_ANNOTATIONS,
    RESERVED_KEYS,
    RESERVED_PREFIXES,
    RESERVED_VARIABLES,
    VERSION,
)
from spillway.api.memory import Parallelism
from spillway.api.model import Data, Model
from spillway.api.operator_config import CONFIG_NAME, OperatorConfigSpec
from spillway.api.profiles import MemoryProfileSpec, NodeProfileSpec
from spillway.api.rejections import NOT_IN_CLUSTER, NOT_YET
from spillway.api.status import TrainingJobStatus
from spillway.api.training import Training
from spillway.api.training_job import TrainingJobSpec

Schema = dict[str, Any]

DIRECTORY = Path("crds")
MAX_INT64 = 2**63 - 1

# --- rules ------------------------------------------------------------------------------------------------------------


def _rule(rule: str, message: str, shown: str = "", values: str = "", at: str = "") -> Schema:
    """A validation rule. `message` says what is allowed; `shown` does so with the `values` found (CEL, separated by
    commas) in place of %s and %d. The API server rejects texts joined in other ways, because it cannot bound their
    cost. `at` is the wrong field below this one."""
    made = {"rule": rule, "message": message}
    if shown:
        made["messageExpression"] = f"'{shown}'.format([{values}])"
    if at:
        made["fieldPath"] = at
    return made


def _one_of(*names: str) -> Schema:
    given = ", ".join(f"has(self.{name})" for name in names)
    found = ", ".join(f"has(self.{name}) ? '{name}' : ''" for name in names)
    needed = f"exactly one of {', '.join(names)} is needed"
    rule = f"[{given}].filter(given, given).size() == 1"
    return _rule(rule, needed, f"{needed}; found %s", f"[{found}].filter(name, name != '')")


def _immutable(name: str, model: type[BaseModel]) -> Schema:
    changed = ", ".join(_if_changed(field.alias or "", field.default is None) for field in model.model_fields.values())
    never = f"{name} is immutable; create a new TrainingJob"
    return _rule("self == oldSelf", never, f"%s changed, but {never}", f"[{changed}].filter(name, name != '')")


def _if_changed(name: str, may_lack: bool = False) -> str:
    """CEL: the field's name when its value changed, else ''."""
    differs = f"self.{name} != oldSelf.{name}"
    if may_lack:
        differs = f"has(self.{name}) != has(oldSelf.{name}) || (has(self.{name}) && {differs})"
    return f"{differs} ? '{name}' : ''"


def _immutable_text(kind: str) -> Schema:
    return _rule(
        "self == oldSelf", "is immutable", f"immutable: %s cannot become %s; create a new {kind}", "oldSelf, self"
    )


def _no_reserved_keys(*allowed: str) -> Schema:
    reserved = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES)
    reserved += "".join(f" || key == '{key}'" for key in RESERVED_KEYS)
    if allowed:
        reserved = f"!(key in {list(allowed)}) && ({reserved})"
    return _rule(
        f"!self.exists(key, {reserved})",
        f"reserved keys: {', '.join((*RESERVED_PREFIXES, *RESERVED_KEYS))}",
        "%s is reserved; use another key",
        f"self.filter(key, {reserved})[0]",
    )


def _never(path: str, problem: str) -> Schema:
    """A field below spec that this operator never honours; other managers may."""
    given = {"checkpoint.resume": "self.checkpoint.resume != 'OwnOnly'", "command": "size(self.command) > 0"}
    rule = f"self.managedBy != '{MANAGER}' || !has(self.{path})"
    return _rule(f"{rule} || !({given[path]})" if path in given else rule, problem, at=f".{path}")


_SUB_PATH = [
    _rule(
        "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
        STAYS_ON_CLAIM,
        f"%s {STAYS_ON_CLAIM}",
        "self",
    )
]
_LOCKED_UNLESS_SUSPENDED = {
    "memory": False, "scheduling": False, "spill": False, "checkpoint": False, "members": True, "objective": True
}  # fmt: skip
"""Field of a spec -> whether it may be left out."""
_CHANGED = ", ".join(_if_changed(name, may_lack) for name, may_lack in _LOCKED_UNLESS_SUSPENDED.items())
_WORLD = "self.parallelism.nodes * self.parallelism.devicesPerNode"

JOB_RULES: dict[str, list[Schema]] = {
    "": [
        _rule(
            f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            f"metadata.name: at most {MAX_NAME_LENGTH} characters",
            f"metadata.name %s has %d characters; at most {MAX_NAME_LENGTH}, because names of pods are made from it",
            "self.metadata.name, size(self.metadata.name)",
        ),
        _rule(
            "!self.metadata.name.contains('.')",
            "metadata.name: lower-case letters, digits and hyphens, no dot",
            "metadata.name %s: lower-case letters, digits and hyphens, no dot: names of Services are made from it",
            "self.metadata.name",
        ),
    ],
    "spec": [
        _rule(
            f"oldSelf.suspend || [{_CHANGED}].all(name, name == '')",
            f"{', '.join(_LOCKED_UNLESS_SUSPENDED)} change only while suspended; set suspend: true first",
            "%s cannot change while suspend is false; set suspend: true first",
            f"[{_CHANGED}].filter(name, name != '')",
        ),
        _rule(
            f"self.training.microBatchSize * {_WORLD} < 1 || "  # refused by their minima; nothing is divided by 0
            f"self.training.globalBatchSize % (self.training.microBatchSize * {_WORLD}) == 0",
            "must be a multiple of microBatchSize x nodes x devicesPerNode",
            "%d must be a multiple of microBatchSize x nodes x devicesPerNode (%d)",
            f"self.training.globalBatchSize, self.training.microBatchSize * {_WORLD}",
            ".training.globalBatchSize",
        ),
        _rule(
            f"{_WORLD} <= {MAX_RANKS}",
            f"at most {MAX_RANKS} ranks, nodes x devicesPerNode",
            f"at most {MAX_RANKS} ranks; nodes x devicesPerNode is %d x %d = %d",
            f"self.parallelism.nodes, self.parallelism.devicesPerNode, {_WORLD}",
            ".parallelism",
        ),
        *(_never(path, problem) for path, problem in (NOT_YET | NOT_IN_CLUSTER).items()),
    ],
    "spec.model": [_immutable("model", Model), _one_of("config", "source", "entrypoint")],
    "spec.model.config": [
        _rule(
            "self.numHeads < 1 || self.hiddenSize % self.numHeads == 0",
            "must divide hiddenSize",
            "%d must divide hiddenSize (%d)",
            "self.numHeads, self.hiddenSize",
            ".numHeads",
        ),
        _rule(
            "!has(self.numKeyValueHeads) || self.numKeyValueHeads < 1 || self.numHeads % self.numKeyValueHeads == 0",
            "must divide numHeads",
            "%d must divide numHeads (%d)",
            "self.numKeyValueHeads, self.numHeads",
            ".numKeyValueHeads",
        ),
    ],
    "spec.model.source": [_one_of("claim", "path")],
    "spec.model.source.subPath": _SUB_PATH,
    "spec.data": [_immutable("data", Data), _one_of("text", "tokens", "huggingFace", "entrypoint", "builtin")],
    "spec.data.text": [_one_of("claim", "path")],
    "spec.data.text.subPath": _SUB_PATH,
    "spec.data.tokens": [_one_of("claim", "path")],
    "spec.data.tokens.subPath": _SUB_PATH,
    "spec.data.evaluation": [
        _rule("!has(self.text) || !has(self.fraction)", "exactly one of text, fraction is needed; found both")
    ],
    "spec.data.evaluation.text": [_one_of("claim", "path")],
    "spec.data.evaluation.text.subPath": _SUB_PATH,
    "spec.checkpoint.subPath": _SUB_PATH,
    "spec.training": [
        _immutable("training", Training),
        _rule(
            "self.schedule.warmupSteps <= self.steps",
            "warmupSteps must be at most training.steps",
            "%d must be at most training.steps (%d)",
            "self.schedule.warmupSteps, self.steps",
            ".schedule.warmupSteps",
        ),
    ],
    "spec.parallelism": [_immutable("parallelism", Parallelism)],
    "spec.memory": [
        # The API server tries rules on the bare default, {}, too.
        _rule(
            "!has(self.mode) || self.mode != 'Disabled' || (has(self.budget) && has(self.budget.host))",
            "required with mode Disabled, which plans nothing",
            at=".budget.host",
        ),
    ],
    "spec.spill": [
        _rule(
            "!has(self.numVolumes) || self.numVolumes <= 1 || "
            "(has(self.storageClassName) && size(self.storageClassName) > 0)",
            "without storageClassName there is one, an emptyDir: set that, or leave this out",
            at=".numVolumes",
        ),
    ],
    "spec.env": [
        _rule(
            f"self.map(one, has(one.value) ? size(one.value) : 0).sum() <= {MAX_ENV_BYTES}",
            f"the values have {MAX_ENV_BYTES} characters at most, together: refer to a Secret",
            f"the values have %d characters; at most {MAX_ENV_BYTES}: refer to a Secret",
            "self.map(one, has(one.value) ? size(one.value) : 0).sum()",
        )
    ],
    "spec.env[]": [
        _one_of("value", "valueFrom"),
        _rule(
            f"!(self.name in {list(RESERVED_VARIABLES)})",
            f"the operator sets these itself: {', '.join(RESERVED_VARIABLES)}",
            "the operator sets %s itself; leave it out",
            "self.name",
            ".name",
        ),
    ],
    "spec.podOverrides.labels": [_no_reserved_keys()],
    "spec.podOverrides.annotations": [_no_reserved_keys(*QUEUE_ANNOTATIONS)],
    "spec.resourceName": [
        _rule(
            f"self.indexOf('/') <= {MAX_DOMAIN_LENGTH} && !self.startsWith('{QUOTA_PREFIX}') && "
            f"!self.contains('{NATIVE_RESOURCES}')",
            EXTENDED_RESOURCE_NEEDED,
            f"%s: {EXTENDED_RESOURCE_NEEDED}",
            "self",
        )
    ],
    "spec.managedBy": [_immutable_text("TrainingJob")],
}
"""CEL by field; transition rules see the stored object as oldSelf"""

CONFIG_RULES: dict[str, list[Schema]] = {
    "": [
        _rule(
            f"self.metadata.name == '{CONFIG_NAME}'",
            f"metadata.name: only {CONFIG_NAME} is used",
            f"metadata.name %s: only {CONFIG_NAME} is used",
            "self.metadata.name",
        )
    ],
    "spec.jobDefaults.env[]": [_one_of("value", "valueFrom")],
}
PROFILE_RULES: dict[str, list[Schema]] = {"spec.fingerprint": [_immutable_text("MemoryProfile")]}

# --- kinds ------------------------------------------------------------------------------------------------------------

Column = tuple[str, str, str, int, str]
"""Name, JSON path, type, priority (1: only with -o wide), description."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One CustomResourceDefinition."""

    kind: str
    short_name: str
    scope: str
    description: str
    spec: type[BaseModel]
    columns: tuple[Column, ...]
    status: type[BaseModel] | None = None
    rules: Mapping[str, list[Schema]] = field(default_factory=dict)
    categories: tuple[str, ...] = ()
    selectable: tuple[str, ...] = ()

    @property
    def plural(self) -> str:
        return f"{self.kind.lower()}s"

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.plural}.{GROUP}.yaml"


TRAINING_JOB = Kind(
    kind="TrainingJob",
    short_name="tjob",
    scope="Namespaced",
    description="A training run, and where its memory lives.",
    spec=TrainingJobSpec,
    status=TrainingJobStatus,
    rules=JOB_RULES,
    categories=("training",),
    selectable=(".spec.scheduling.queueName", ".status.state"),
    columns=(
        ("State", ".status.state", "string", 0, "Where the job is."),
        ("Step", ".status.progress.step", "integer", 0, "Optimizer steps completed."),
        ("Progress", ".status.progress.display", "string", 0, "Share of the steps."),
        ("Loss", ".status.progress.loss", "string", 0, "Training loss of the last step."),
        ("Tok/s", ".status.progress.tokensPerSecond", "string", 0, "Tokens per second."),
        ("Device-Mem", ".status.memory.device", "string", 0, "Peak of budget on the device."),
        ("Spilled", ".status.memory.spilled", "string", 0, "Bytes offloaded to host memory and NVMe."),
        ("Restarts", ".status.attempts.restarts", "integer", 1, "Restarts that count."),
        ("ETA", ".status.progress.eta", "string", 0, "Time left."),
        ("Best", ".status.bestMember", "string", 1, "Best member of a sweep."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since creation."),
    ),
)
MEMORY_PROFILE = Kind(
    kind="MemoryProfile",
    short_name="mprof",
    scope="Namespaced",
    description="What was observed of a model's memory under one plan; outlives the jobs.",
    spec=MemoryProfileSpec,
    rules=PROFILE_RULES,
    selectable=(".spec.fingerprint",),
    columns=(
        ("Model", ".spec.model", "string", 0, "The model."),
        ("Ranks", ".spec.worldSize", "integer", 0, "Number of ranks."),
        ("Device", ".spec.peaks.device.max", "string", 0, "Largest peak on each device."),
        ("Host", ".spec.peaks.host.max", "string", 0, "Largest peak in host memory, per rank."),
        ("NVMe", ".spec.peaks.nvme.max", "string", 0, "Largest peak on NVMe, per rank."),
        ("Attempts", ".spec.count", "integer", 0, "Attempts that were observed."),
        ("Last", ".spec.attempt", "string", 1, "The last of them."),
        ("Clamped", ".spec.clamped", "boolean", 1, "A reported figure was implausible and was cut."),
        ("Plan", ".spec.plan", "string", 1, "Summary of the plan whose memory use was measured."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the first observation."),
    ),
)
NODE_PROFILE = Kind(
    kind="NodeProfile",
    short_name="nprof",
    scope="Cluster",
    description="Measured capacities and rates of the node of the same name.",
    spec=NodeProfileSpec,
    columns=(
        ("Device", ".spec.deviceKind", "string", 0, "Kind of device."),
        ("Devices", ".spec.numDevices", "integer", 0, "Number of devices."),
        ("Device-Mem", ".spec.deviceMemory", "string", 0, "Usable memory of a device."),
        ("Host", ".spec.hostMemory", "string", 0, "Host memory for pods."),
        ("NVMe", ".spec.nvmeCapacity", "string", 0, "Space for spill."),
        ("H2D", ".spec.link.h2dBytesPerSecond", "string", 0, "Bytes per second to the device."),
        ("Write", ".spec.nvmeWriteBytesPerSecond", "string", 1, "Bytes per second to NVMe."),
        ("Source", ".spec.source", "string", 0, "Who measured."),
        ("Measured", ".spec.measuredTime", "date", 0, "Time since the measurement."),
    ),
)
OPERATOR_CONFIG = Kind(
    kind="OperatorConfig",
    short_name="opconf",
    scope="Cluster",
    description="What an administrator sets for all TrainingJobs; the object is named default.",
    spec=OperatorConfigSpec,
    rules=CONFIG_RULES,
    columns=(
        ("Image", ".spec.jobDefaults.image", "string", 0, "Trainer image of jobs that name none."),
        ("Queue", ".spec.jobDefaults.scheduling.queueName", "string", 0, "LocalQueue of jobs that name none."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since creation."),
    ),
)
KINDS = (TRAINING_JOB, MEMORY_PROFILE, NODE_PROFILE, OPERATOR_CONFIG)

# --- the definition ---------------------------------------------------------------------------------------------------


def definition(kind: Kind = TRAINING_JOB) -> Schema:
    """The whole CustomResourceDefinition as plain data."""
    singular = kind.kind.lower()
    names: Schema = {
        "plural": kind.plural,
        "singular": singular,
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "shortNames": [kind.short_name],
    }
    if kind.categories:
        names["categories"] = list(kind.categories)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": kind.scope, "names": names, "versions": [_version(kind)]},
    }


def _version(kind: Kind) -> Schema:
    made: Schema = {"name": VERSION, "served": True, "storage": True}
    if kind.status is not None:
        made["subresources"] = {"status": {}}
    made["additionalPrinterColumns"] = [
        {"name": name, "jsonPath": path, "type": type_, "priority": priority, "description": text}
        for name, path, type_, priority, text in kind.columns
    ]
    if kind.selectable:
        made["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    return made | {"schema": {"openAPIV3Schema": _object_schema(kind)}}


def _object_schema(kind: Kind) -> Schema:
    made: Schema = {
        "description": kind.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema."},
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec, "spec", kind.rules),
        },
    }
    if kind.status is not None:
        made["properties"]["status"] = structural(kind.status, "status", kind.rules)
    if "" in kind.rules:
        made["x-kubernetes-validations"] = kind.rules[""]
    return made


def structural(model: type[BaseModel], path: str, rules: Mapping[str, list[Schema]]) -> Schema:
    """The structural schema of a model; `path` is its place in the object."""
    schema = model.model_json_schema(by_alias=True)
    return _Inlining(schema.get("$defs", {}), rules).inlined(schema, path)


@dataclass(frozen=True, slots=True)
class _Inlining:
    definitions: Schema
    rules: Mapping[str, list[Schema]]

    def inlined(self, schema: Schema, path: str) -> Schema:
        schema = _resolved(schema, self.definitions)
        made = _described(schema) | _typed(schema)
        if "properties" in schema:
            made["properties"] = {
                name: self.inlined(inner, f"{path}.{name}") for name, inner in schema["properties"].items()
            }
            if schema.get("required"):
                made["required"] = schema["required"]
        elif schema.get("type") == "object":
            made["additionalProperties"] = self.inlined(schema["additionalProperties"], f"{path}.*")
            made["maxProperties"] = schema.get("maxProperties", 64)
        if schema.get("type") == "array":
            made["items"] = self.inlined(schema["items"], f"{path}[]")
            made["x-kubernetes-list-type"] = schema.get("x-kubernetes-list-type", "atomic")
            keys = ("x-kubernetes-list-map-keys", "minItems", "maxItems")
            made |= {key: schema[key] for key in keys if key in schema}
        if path in self.rules:
            made["x-kubernetes-validations"] = self.rules[path]
        return made


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    """Follow $ref and `X | null`: an absent field and null are the same to the API server."""
    while "$ref" in schema or "anyOf" in schema:
        outer = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
        if "$ref" in schema:
            inner = definitions[schema["$ref"].rpartition("/")[2]]
        else:
            (inner,) = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        schema = inner | outer
    return schema


def _described(schema: Schema) -> Schema:
    """Description with the default's value, and the default itself where it is static."""
    made: Schema = {}
    text, default = " ".join(schema.get("description", "").split()), _as_yaml(schema, schema.get("default"))
    if schema.get("type") == "object" and isinstance(default, dict) and "properties" in schema:
        made["default"] = {}
    elif default not in (None, "", [], {}):
        made["default"] = default
        shown = ", ".join(map(str, default)) if isinstance(default, list) else _shown(default)
        if shown and "Default" not in text:
            text += f" Default: {shown}."
    if text:
        made["description"] = text
    return made


def _as_yaml(schema: Schema, default: Any) -> Any:
    """Numbers are strings in the manifest."""
    if isinstance(default, list):
        return [_as_yaml(schema.get("items", {}), value) for value in default]
    return quoted(default) if isinstance(default, float) else default


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(schema: Schema) -> Schema:
    """Type and bounds in the words of a structural schema."""
    if schema.get("x-kubernetes-int-or-string"):
        bounds: Schema = {key: schema[key] for key in ("pattern", "maxLength", "minimum") if key in schema}
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **bounds,
        }
    kind = schema["type"]
    made: Schema = {"type": kind}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if kind == "integer":
        made["format"] = "int64"
        made["minimum"] = schema.get("minimum", 0)
        made["maximum"] = min(schema.get("maximum", MAX_INT64), MAX_INT64)
    keys = ("enum", "pattern", "minLength", "maxLength", "format") if kind == "string" else ()
    return made | {key: schema[key] for key in keys if key in schema}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


# PyYAML takes 1e-08 for a string and leaves it bare; every other YAML parser takes it for a number.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE][-+]?[0-9]+$"), list("0123456789"))


def text(kind: Kind = TRAINING_JOB) -> str:
    """The file's contents."""
    body = yaml.dump(definition(kind), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated from operator/spillway/api/training_job.py by `make crds`. Do not edit.\n{body}"


def main(arguments: list[str]) -> int:
    """Write the files, or with --check say which are out of step; run from the root of the repository."""
    if "--check" not in arguments:
        DIRECTORY.mkdir(exist_ok=True)
        for kind in KINDS:
            kind.path.write_text(text(kind), encoding="utf-8")
        return 0
    stale = [kind.path for kind in KINDS if not kind.path.is_file() or kind.path.read_text("utf-8") != text(kind)]
    for path in stale:
        sys.stderr.write(f"{path} is out of step with operator/spillway/api/training_job.py: run `make crds`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
