"""The CustomResourceDefinitions: a structural schema for each kind, with the rules of rules.py.

References are inlined and bounds are kept. A field has a default only if the default does not depend on other fields.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from spillway.api.earlier import HUGGING_FACE_INSTEAD, MOVED, OVERRIDES, problem_of_earlier
from spillway.api.field_types import (
    NUMBER_SCHEMA,
    quoted,
)
from spillway.api.limits import (
    GROUP,
    VERSION,
)
from spillway.api.operator_config import OperatorConfigSpec
from spillway.api.profiles import MemoryProfileSpec, MemoryProfileStatus, NodeProfileSpec
from spillway.api.script import (
    ScriptSpec,
)
from spillway.api.status import TrainingJobStatus
from spillway.api.training_job import TrainingJobSpec

from .rules import CONFIG_RULES, JOB_RULES, MEMBER_SECTIONS, NO_MEMBERS_FIELDS, PROFILE_RULES, Schema, cel

DIRECTORY = Path("crds")
MAX_INT64 = 2**63 - 1
NO_FIELD = "Not a field any more"

# --- kinds ------------------------------------------------------------------------------------------------------------

Column = tuple[str, str, str, int, str]
"""A printer column: name, JSON path, type, priority (1: shown only with -o wide), description."""


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
    description="A training job with memory budgets for device memory, host memory and NVMe.",
    spec=TrainingJobSpec,
    status=TrainingJobStatus,
    rules=JOB_RULES,
    categories=("training",),
    selectable=(".spec.scheduling.queueName", ".status.state"),
    columns=(
        ("State", ".status.state", "string", 0, "State of the job in one word."),
        ("Step", ".status.progress.step", "integer", 0, "Number of optimizer steps completed."),
        ("Progress", ".status.progress.display", "string", 0, "Share of the steps that is completed."),
        ("Loss", ".status.progress.loss", "string", 0, "Training loss of the last step."),
        ("Tok/s", ".status.progress.tokensPerSecond", "string", 0, "Tokens per second, of all ranks."),
        ("Device-Mem", ".status.memory.device", "string", 0, "Peak memory use of a device, and its budget."),
        ("Spilled", ".status.memory.spilled", "string", 0, "Peak bytes of a rank in host memory and on NVMe."),
        ("Restarts", ".status.attempts.restarts", "integer", 1, "Restarts that count against lifecycle.maxRestarts."),
        ("ETA", ".status.progress.eta", "string", 0, "Estimated time until the last step."),
        ("Best", ".status.bestMember", "string", 1, "Name of the best member so far."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the object was created."),
    ),
)
MEMORY_PROFILE = Kind(
    kind="MemoryProfile",
    short_name="mprof",
    scope="Namespaced",
    description="Observed memory use of jobs with one model and one plan. The operator writes it and keeps it when "
    "the jobs are deleted.",
    spec=MemoryProfileSpec,
    status=MemoryProfileStatus,
    rules=PROFILE_RULES,
    selectable=(".spec.fingerprint",),
    columns=(
        ("Model", ".spec.model", "string", 0, "The model in words."),
        ("Ranks", ".spec.worldSize", "integer", 0, "Number of ranks (training processes)."),
        ("Device", ".status.peaks.device.max", "string", 0, "Largest peak bytes of a rank in device memory."),
        ("Host", ".status.peaks.host.max", "string", 0, "Largest peak bytes of a rank in host memory."),
        ("NVMe", ".status.peaks.nvme.max", "string", 0, "Largest peak bytes of a rank on NVMe."),
        ("Attempts", ".status.count", "integer", 0, "Number of attempts that were observed."),
        ("Last", ".status.attempt", "string", 1, "Attempt that was observed last."),
        (
            "Clamped",
            ".status.clamped",
            "boolean",
            1,
            "Whether a peak that a trainer reported was implausible and was limited.",
        ),
        ("Plan", ".spec.plan", "string", 1, "The plan in words."),
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
        ("Device", ".spec.deviceKind", "string", 0, "Kind of device that was measured."),
        ("Devices", ".spec.numDevices", "integer", 0, "Number of devices of the node."),
        ("Device-Mem", ".spec.deviceMemory", "string", 0, "Usable memory of each device."),
        ("Host", ".spec.hostMemory", "string", 0, "Host memory of the node for pods."),
        ("NVMe", ".spec.nvmeCapacity", "string", 0, "Disk space of the node for spilling."),
        ("H2D", ".spec.link.h2dBytesPerSecond", "string", 0, "Bytes per second from host memory to a device."),
        ("Write", ".spec.nvmeWriteBytesPerSecond", "string", 1, "Bytes per second to all NVMe drives."),
        ("Source", ".spec.source", "string", 0, "Where the figures come from: Probe, Training or User."),
        ("Measured", ".spec.measuredTime", "date", 0, "Time since the measurement."),
    ),
)
OPERATOR_CONFIG = Kind(
    kind="OperatorConfig",
    short_name="opconf",
    scope="Cluster",
    description="Defaults and other settings for all TrainingJobs of the cluster. Only the object named default is "
    "used.",
    spec=OperatorConfigSpec,
    rules=CONFIG_RULES,
    columns=(
        ("Image", ".spec.jobDefaults.pod.image", "string", 0, "Trainer image of jobs that do not set pod.image."),
        ("Queue", ".spec.jobDefaults.scheduling.queueName", "string", 0, "Kueue LocalQueue of jobs without one."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the object was created."),
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
    if kind.spec is TrainingJobSpec:
        _add_earlier(made["properties"]["spec"])
        _add_command(made["properties"]["spec"])
    if kind.status is not None:
        made["properties"]["status"] = structural(kind.status, "status", kind.rules)
    if "" in kind.rules:
        made["x-kubernetes-validations"] = kind.rules[""]
    return made


def _add_command(spec: Schema) -> None:
    """Adds `command`, which a script sets instead of model, data and training. The schema then no longer requires these
    three; a rule requires them where there is no command."""
    properties = spec["properties"]
    del spec["required"]
    first = {name: properties.pop(name) for name in ("model", "data", "training")}
    command = structural(ScriptSpec, "spec", {})["properties"]["command"]
    spec["properties"] = first | {"command": command} | properties


def _add_earlier(spec: Schema) -> None:
    """Adds the fields of earlier schemas (earlier.py): stored objects keep them, but a new value is rejected. Each has
    the type of the field that replaced it; without the type, the API server could not tell that a stored value is
    unchanged."""
    for old, new in MOVED.items():
        owner, _, name = old.rpartition(".")
        _properties(spec, owner)[name] = _bare(_node(spec, new)) | _rejected(problem_of_earlier(old) or "")
    _properties(spec, "data")["huggingFace"] = {
        "type": "object", "x-kubernetes-preserve-unknown-fields": True,
    } | _rejected(HUGGING_FACE_INSTEAD)  # fmt: skip
    overrides = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1024}, "maxProperties": 64}
    _properties(spec, "members")["overrides"] = overrides | _rejected(OVERRIDES)


def _rejected(problem: str) -> Schema:
    return {"description": f"{NO_FIELD}: {problem}.", "x-kubernetes-validations": [cel("false", problem)]}


def _node(spec: Schema, path: str) -> Schema:
    for name in path.split(".") if path else ():
        spec = spec["properties"][name]
    return spec


def _properties(spec: Schema, path: str) -> Schema:
    node = _node(spec, path)
    found: Schema = node.get("items", node)["properties"]
    return found


def _bare(schema: Schema) -> Schema:
    """The schema with its types, bounds and descriptions only: without defaults, required fields and rules."""
    left = ("default", "required", "x-kubernetes-validations", "x-kubernetes-list-map-keys")
    made = {key: value for key, value in schema.items() if key not in left}
    if "x-kubernetes-list-type" in made:
        made["x-kubernetes-list-type"] = "atomic"
    if "properties" in made:
        made["properties"] = {name: _bare(inner) for name, inner in made["properties"].items()}
    return made | {key: _bare(made[key]) for key in ("items", "additionalProperties") if key in made}


def structural(model: type[BaseModel], path: str, rules: Mapping[str, list[Schema]]) -> Schema:
    """The structural schema of a model; `path` is its place in the object."""
    schema = model.model_json_schema(by_alias=True)
    return _Inlining(schema.get("$defs", {}), rules, dict(_bounds(model, path))).inlined(schema, path)


@dataclass(frozen=True, slots=True)
class _Inlining:
    definitions: Schema
    rules: Mapping[str, list[Schema]]
    bounds: Mapping[str, list[Schema]]

    def inlined(self, schema: Schema, path: str) -> Schema:
        schema = _resolved(schema, self.definitions)
        made = _described(schema) | _typed(schema)
        if "properties" in schema:
            made["properties"] = {
                name: self.inlined(inner, f"{path}.{name}") for name, inner in schema["properties"].items()
            }
            if schema.get("required"):
                made["required"] = schema["required"]
        elif path in MEMBER_SECTIONS:
            whole = structural(MEMBER_SECTIONS[path], path, {})
            made |= {"properties": _optional(whole["properties"]), "default": {}}
            for name in NO_MEMBERS_FIELDS.get(path, ()):
                del made["properties"][name]
        elif schema.get("type") == "object":
            made["additionalProperties"] = self.inlined(schema["additionalProperties"], f"{path}.*")
            made["maxProperties"] = schema.get("maxProperties", 64)
        if schema.get("type") == "array":
            made["items"] = self.inlined(schema["items"], f"{path}[]")
            made["x-kubernetes-list-type"] = schema.get("x-kubernetes-list-type", "atomic")
            keys = ("x-kubernetes-list-map-keys", "minItems", "maxItems")
            made |= {key: schema[key] for key in keys if key in schema}
        rules = [*self.rules.get(path, ()), *self.bounds.get(path, ())]
        if rules:
            made["x-kubernetes-validations"] = rules
        return made


_COMPARED = {Gt: (">", "gt", "more than"), Ge: (">=", "ge", "at least"), Lt: ("<", "lt", "less than"),
             Le: ("<=", "le", "at most")}  # fmt: skip


def _bounds(annotation: Any, path: str, metadata: Sequence[Any] = ()) -> Iterator[tuple[str, list[Schema]]]:
    """Yields (path, rules) for each float that has bounds. Floats are strings in a manifest, so rules must check their
    bounds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field_ in annotation.model_fields.values():
            yield from _bounds(field_.annotation, f"{path}.{field_.alias}", field_.metadata)
    elif annotation is float and WithJsonSchema(NUMBER_SCHEMA) in metadata:
        compared = [(*_COMPARED[type(one)], one) for one in metadata if type(one) in _COMPARED and one != Ge(0.0)]
        limits = [(sign, words, getattr(one, name)) for sign, name, words, one in compared]
        if limits:
            rule = " && ".join(f"double(self) {sign} {limit!r}" for sign, _, limit in limits)
            allowed = ", ".join(f"{words} {limit:g}" for _, words, limit in limits)
            yield path, [cel(rule, allowed, f"%s: {allowed}", "self")]
    elif get_origin(annotation) is Annotated:
        base, *own = get_args(annotation)
        flat = [inner for one in own for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
        yield from _bounds(base, path, [*metadata, *flat])
    elif get_origin(annotation) in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _bounds(choice, path, metadata)
    elif get_origin(annotation) is tuple:
        yield from _bounds(get_args(annotation)[0], f"{path}[]")


def _optional(properties: Schema) -> Schema:
    """The same fields without `required` and defaults: a field that a member leaves out has the job's value."""
    made = {}
    for name, schema in properties.items():
        made[name] = {key: value for key, value in schema.items() if key not in ("required", "default")}
        made[name]["description"] = f"{schema['description'].partition(' Default:')[0]} Default: as in the job."
        if "properties" in schema:
            made[name]["properties"] = _optional(schema["properties"])
    return made


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    """Resolves $ref, and reduces `X | null` to X, because the API server treats null like an absent field."""
    while "$ref" in schema or "anyOf" in schema:
        outer = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
        if "$ref" in schema:
            inner = definitions[schema["$ref"].rpartition("/")[2]]
        else:
            (inner,) = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        schema = inner | outer
    return schema


def _described(schema: Schema) -> Schema:
    """The description, which states the default, and the default itself if it does not depend on other fields."""
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
    """A default as a manifest spells it, where floats are strings."""
    if isinstance(default, list):
        return [_as_yaml(schema.get("items", {}), value) for value in default]
    return quoted(default) if isinstance(default, float) else default


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(schema: Schema) -> Schema:
    """Type and bounds, in the keywords of a structural schema."""
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


# PyYAML takes 1e-08 for a string and writes it without quotes, but every other YAML parser reads it as a number.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE][-+]?[0-9]+$"), list("0123456789"))


def text(kind: Kind = TRAINING_JOB) -> str:
    """The contents of the kind's file in crds/."""
    body = yaml.dump(definition(kind), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated from operator/spillway/api/training_job.py by `make crds`. Do not edit.\n{body}"


def main(arguments: list[str]) -> int:
    """Writes the files or, with --check, reports those that are out of date. Must run in the root of the repository."""
    if "--check" not in arguments:
        DIRECTORY.mkdir(exist_ok=True)
        for kind in KINDS:
            kind.path.write_text(text(kind), encoding="utf-8")
        return 0
    stale = [kind.path for kind in KINDS if not kind.path.is_file() or kind.path.read_text("utf-8") != text(kind)]
    for path in stale:
        sys.stderr.write(f"{path} is out of step with operator/spillway/api/training_job.py: run `make crds`\n")
    return 1 if stale else 0
