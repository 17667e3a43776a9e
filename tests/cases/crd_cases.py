"""Manifests for every constraint of the CRDs, generated from the schema, by path.

A constraint is one bound, enum, format, required field, list key or CEL rule of one field. For each there is a manifest
at its edge that must be accepted, and one just beyond it that must be rejected with a message that names the field, the
value (where the API server shows it) and what is allowed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spillway.api import crd
from spillway.api.crd import (
    MEMORY_PROFILE,
    NO_FIELD,
    NODE_PROFILE,
    OPERATOR_CONFIG,
    REQUIRED,
    TRAINING_JOB,
    WRONG_IN_SCRIPTS,
    WRONG_TOGETHER,
    Kind,
)
from spillway.api.earlier import MOVED
from spillway.api.field_types import (
    EXTENDED_RESOURCE_NEEDED,
    MAX_DOMAIN_LENGTH,
    MAX_DOMAIN_NAME_LENGTH,
    NUMBER_PATTERN,
    RESOURCE_PATTERN,
)
from spillway.api.limits import GROUP, MANAGER, MAX_NAME_LENGTH, NOT_MOUNTED_THERE, VERSION
from spillway.api.model import FETCHED
from spillway.api.operator_config import CONFIG_NAME
from spillway.api.pod import MOUNT_PATH, ONLY_CLAIMS_ARE_WRITTEN
from spillway.api.rejections import NOT_YET
from spillway.api.sweep.search_space import BOTH_ENDS, PATH_PATTERN, STEP_OF_RANGE, TRIALS_NEEDED
from spillway.api.tracking import ONE_TRACKER, TRACKING_URI
from spillway.units import BYTES_PATTERN, POSITIVE_BYTES_PATTERN, POSITIVE_QUANTITY_PATTERN, QUANTITY_PATTERN

Document = dict[str, Any]
Schema = dict[str, Any]

KEYWORDS = (
    "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "maxProperties",
)  # fmt: skip
FETCHING = {"claim": "any", "subPath": "a", "fetch": {"uri": "s3://a/b"}}
NOBODY = "crd-cases.test/nobody"
"""managedBy of stored jobs, so that no operator touches them"""


@dataclass(frozen=True)
class Constraint:
    kind: str
    path: str
    """of the field, as in the schema: spec.pod.env[].name"""
    name: str
    """keyword of the schema, `required`, `unique`, `format`, or `rule N` counting from 0"""


@dataclass(frozen=True)
class Case:
    constraint: Constraint
    kind: Kind
    accepted: bool
    manifest: Document
    words: tuple[str, ...] = ()
    """texts that the rejection must contain"""
    stored: Document | None = None
    """the stored object that the manifest replaces, for rules about changes"""

    @property
    def in_status(self) -> bool:
        return self.constraint.path.startswith("status")

    def __str__(self) -> str:
        answer = "accepted" if self.accepted else "rejected"
        return f"{self.constraint.kind} {self.constraint.path or 'metadata'} {self.constraint.name}: {answer}"


# --- contents of the schema -------------------------------------------------------------------------------------------


def schema_of(kind: Kind) -> Schema:
    found: Schema = crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yields every schema node with its path, except metadata, which belongs to the API server."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if (path, name) != ("", "metadata"):
            yield from fields(inner, f"{path}.{name}" if path else name)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(key), dict):
            yield from fields(schema[key], path + mark)


def constraints(kind: Kind) -> Iterator[Constraint]:
    earlier = ""
    for path, node in fields(schema_of(kind)):
        names = [keyword for keyword in KEYWORDS if keyword in node]
        names += [f"required {name}" for name in node.get("required", [])]
        names += ["unique"] if node.get("x-kubernetes-list-type") == "map" else []
        names += ["format"] if node.get("format") == "date-time" else []
        names += [f"rule {number}" for number in range(len(node.get("x-kubernetes-validations", [])))]
        if node.get("description", "").startswith(NO_FIELD):
            names, earlier = ["rule 0"], path
        elif earlier and path.startswith(earlier):
            continue
        for name in names:
            yield Constraint(kind.kind, path, name)


# --- documents --------------------------------------------------------------------------------------------------------

SPECS: dict[str, Document] = {
    TRAINING_JOB.kind: {
        "model": {
            "config": {
                "architecture": "llama", "hiddenSize": 1024, "numLayers": 2, "numHeads": 1, "intermediateSize": 64,
                "vocabSize": 512,
            }
        },
        "data": {"builtin": "PythonStdlib"},
        # A power of two that is a multiple of every number of devices and every micro-batch.
        "training": {"steps": 10, "sequenceLength": 64, "globalBatchSize": 1 << 20},
        # With it, edges of fields that our operator never honours can also be tested.
        "managedBy": NOBODY,
    },
    MEMORY_PROFILE.kind: {"fingerprint": "0123456789abcdef"},
    NODE_PROFILE.kind: {"deviceKind": "Cpu"},
    OPERATOR_CONFIG.kind: {},
}  # fmt: skip
GPT2 = {"spec.model.config.architecture": "gpt2"}
CHAT = {"spec.model": {"source": {"claim": "any"}}, "spec.data": {"chat": {"path": "/chats"}}}
FLOAT16 = {"spec.model.precision.compute": "float16"}
COMPARED = {"spec.members": [{"name": "a"}], "spec.data.evaluation": {"fraction": "0.1"}}
SEARCHED = {
    "spec.search": {
        "algorithm": "Grid", "trials": 3, "parameters": [{"path": "training.seed", "min": 1, "max": 3, "step": 1}],
    }
}  # fmt: skip
LISTED = {"spec.search": {"algorithm": "Grid", "parameters": [{"path": "training.seed", "values": [1]}]}}
EVALUATED = {"spec.data.evaluation": {"fraction": "0.1"}}
IN_EPOCHS = {"spec.training.epochs": 3}
NO_MODEL: dict[str, Any] = {
    "spec.model": None, "spec.data": None, "spec.training": None, "spec.pod.resources.memory": "1Gi",
}  # fmt: skip
STOPS_EARLY = {"spec.training.earlyStopping": {"patience": 1}}
FETCHED_AT: dict[str, dict[str, Any]] = {
    "spec.model.source": {"spec.model": {"source": FETCHING}},
    "spec.data.text": {"spec.data": {"text": FETCHING}},
    "spec.data.chat": CHAT | {"spec.data": {"chat": FETCHING}},
    "spec.data.tokens": CHAT | {"spec.data": {"tokens": FETCHING}},
    "spec.data.evaluation.text": {"spec.data.evaluation": {"text": FETCHING}},
    "spec.data.evaluation.chat": CHAT | {"spec.data.evaluation": {"chat": FETCHING}},
    "spec.checkpoint.from": {"spec.checkpoint": {"from": FETCHING}},
}
"""field that a download may fill -> fields of a job that has a download there"""
SEARCH_FIELDS = tuple(
    f"spec.search.{name}"
    for name in (
        "algorithm", "seed", "trials", "parameters", "parameters[].path", "parameters[].min",
        "parameters[].max", "parameters[].step", "parameters[].distribution",
    )
)  # fmt: skip
COMPANIONS: dict[str, dict[str, Any]] = {
    "spec.model.config.hiddenSize": GPT2,
    "spec.model.config.numHeads": GPT2,
    "spec.model.config.numKeyValueHeads": {"spec.model.config.hiddenSize": 2048, "spec.model.config.numHeads": 1024},
    "spec.model.source.subPath": {"spec.model": {"source": {"claim": "any"}}},
    "spec.data.text.subPath": {"spec.data": {"text": {"claim": "any"}}},
    "spec.data.tokens.subPath": CHAT | {"spec.data": {"tokens": {"claim": "any"}}},
    "spec.data.evaluation.text.subPath": {"spec.data.evaluation": {"text": {"claim": "any"}}},
    "spec.checkpoint.from.subPath": {"spec.checkpoint": {"from": {"claim": "any"}}},
    **{f"{path}.fetch.{name}": companions for path, companions in FETCHED_AT.items() for name in ("uri", "secretName")},
    **dict.fromkeys(("spec.data.tokens.claim", "spec.data.tokens.path"), CHAT | {"spec.data": {"tokens": {}}}),
    **dict.fromkeys(("spec.data.chat.claim", "spec.data.chat.path", "spec.data.evaluation.chat.path"), CHAT),
    "spec.data.chat.subPath": CHAT | {"spec.data.chat": {"claim": "any"}},
    "spec.data.evaluation.chat.claim": CHAT,
    "spec.data.evaluation.chat.subPath": CHAT | {"spec.data.evaluation": {"chat": {"claim": "any"}}},
    **{f"spec.training.lossScale.{name}": FLOAT16 for name in ("initial", "growthInterval")},
    "spec.training.lossScale.minimum": FLOAT16 | {"spec.training.lossScale": {"initial": 1 << 24}},
    "spec.training.optimizer.momentum": {"spec.training.optimizer.name": "SgdMomentum"},
    **{f"spec.objective.{name}": COMPARED for name in ("metric", "direction", "halving")},
    "spec.scheduling.workloadPriorityClassName": {"spec.scheduling.queueName": "team"},
    "spec.training.schedule.warmupSteps": {"spec.training.steps": 10**12},
    "spec.memory.mode": {"spec.memory.budget.host": "1Gi"},
    **{f"spec.tracking.mlflow.{name}": {"spec.tracking.mlflow.uri": "http://a"} for name in ("uri", "experiment")},
    **{f"spec.tracking.wandb.{name}": {"spec.tracking.wandb.project": "a"} for name in ("project", "entity", "mode")},
    "spec.spill.numVolumes": {"spec.spill.storageClassName": "fast"},
    **dict.fromkeys(("spec.command", "spec.command[]"), NO_MODEL),
    "spec.training.earlyStopping.patience": EVALUATED,
    **dict.fromkeys(SEARCH_FIELDS, SEARCHED),
    **dict.fromkeys(("spec.search.parameters[].values", "spec.search.parameters[].values[]"), LISTED),
    "spec.training.earlyStopping.minDelta": EVALUATED | STOPS_EARLY,
}
"""path -> fields that must be set with the field's edges, so that no other rule is violated"""
SAMPLES = {
    NUMBER_PATTERN: "1", QUANTITY_PATTERN: "1Gi", POSITIVE_QUANTITY_PATTERN: "1", BYTES_PATTERN: "1Gi",
    POSITIVE_BYTES_PATTERN: "1",
}  # fmt: skip
"""pattern -> a value that it allows; other patterns allow letters"""
WHOLE = {"^([0-9a-f]{16})?$": "0123456789abcdef", FETCHED: "s3://a/b", TRACKING_URI: "http://a", MOUNT_PATH: "/a",
         PATH_PATTERN: "training.seed"}  # fmt: skip
"""the same for patterns that allow only some lengths"""
BEGINS = {FETCHED: "s3://", TRACKING_URI: "http://", MOUNT_PATH: "/", PATH_PATTERN: "training."}
MISFITS = {
    NUMBER_PATTERN: "-1", QUANTITY_PATTERN: "1 GB", POSITIVE_QUANTITY_PATTERN: "0", BYTES_PATTERN: "64m",
    POSITIVE_BYTES_PATTERN: "64m",
}  # fmt: skip
TIME = "2026-11-21T14:00:00Z"
LONGEST_TIME = "2026-11-21T14:00:00.000000+00:00"


def manifest(kind: Kind, name: str = "crd-case") -> Document:
    metadata: Document = {"name": CONFIG_NAME if kind is OPERATOR_CONFIG else name}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind.kind,
        "metadata": metadata,
        "spec": copy.deepcopy(SPECS[kind.kind]),
    }


def with_field(document: Document, schema: Schema, path: str, value: Any) -> Document:
    """A copy of `document` with `value` at `path`. Missing parents get the smallest allowed values, and the other
    members of a union are removed."""
    made = copy.deepcopy(document)
    _put(made, schema, _steps(path), value)
    return made


def _steps(path: str) -> list[str]:
    """spec.pod.env[].name -> spec, env, [], name."""
    return [step for step in re.split(r"\.|(\[\])", path) if step]


def _put(holder: Any, schema: Schema, steps: list[str], value: Any) -> None:
    step, rest = steps[0], steps[1:]
    key, inner = _inside(schema, step)
    if isinstance(holder, dict):
        for other in _union(schema) - {key} if key in _union(schema) else ():
            holder.pop(other, None)
    if not rest:
        if isinstance(key, int) and len(holder) <= key:
            holder.append(value)
        else:
            holder[key] = value
        return
    present = key in holder if isinstance(holder, dict) else len(holder) > key
    if not present:
        filled = sample(inner)
        if isinstance(key, int):
            holder.append(filled)
        else:
            holder[key] = filled
    _put(holder[key], inner, rest, value)


def _inside(schema: Schema, step: str) -> tuple[Any, Schema]:
    if step == "[]":
        return 0, schema["items"]
    if step == "*":
        return f"{_prefix(schema)}key", schema["additionalProperties"]
    return step, schema["properties"][step]


def _prefix(schema: Schema) -> str:
    """The prefix of a map's keys, because names of extended resources have a domain."""
    rules = schema.get("x-kubernetes-validations", [])
    return "a/" if any(rule["message"] == EXTENDED_RESOURCE_NEEDED for rule in rules) else ""


def _union(schema: Schema) -> set[str]:
    """The members of a union, of which exactly one must be given; empty if the schema is no union."""
    for rule in schema.get("x-kubernetes-validations", []):
        if rule["rule"].endswith(".size() == 1"):
            return set(re.findall(r"has\(self\.(\w+)\)", rule["rule"]))
    return set()


def sample(schema: Schema) -> Any:
    """The smallest value that a field allows."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("x-kubernetes-int-or-string"):
        return SAMPLES.get(schema.get("pattern", ""), "a")
    kind = schema["type"]
    if kind == "object":
        names = list(schema.get("required", []))
        union = sorted(_union(schema))
        names += [] if not union or set(names) & set(union) else [union[-1]]
        return {name: sample(schema["properties"][name]) for name in names}
    if kind == "array":
        return [sample(schema["items"])] * schema.get("minItems", 0)
    if kind == "string":
        bounded = _limits_of(schema)
        whole = TIME if schema.get("format") else WHOLE.get(schema.get("pattern", ""))
        whole = bounded.inside[0] if bounded else whole
        return whole or text(schema, max(1, schema.get("minLength", 0)))
    return schema.get("minimum", 0) if kind == "integer" else True


def text(schema: Schema, length: int) -> str:
    """A text of this length that the field's pattern allows."""
    if schema.get("format") == "date-time":
        return LONGEST_TIME + "0" * (length - len(LONGEST_TIME))
    if (bounded := _limits_of(schema)) is not None and length:
        mantissa, e, exponent = bounded.inside[0].partition("e")
        mantissa += "" if "." in mantissa else "."
        return f"{mantissa}{'0' * (length - len(mantissa) - len(e + exponent))}{e}{exponent}"
    if (scheme := BEGINS.get(schema.get("pattern", ""))) and length:
        return scheme + "a" * (length - len(scheme))
    if schema.get("pattern") == RESOURCE_PATTERN and length:
        name = "a" * min(MAX_DOMAIN_NAME_LENGTH, max(1, length - len("a/")))
        return f"{'a' * max(1, length - len(name) - 1)}/{name}"
    return ("1" if schema.get("pattern") in SAMPLES else "a") * length


# --- edges ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """Values on both sides of one constraint."""

    inside: tuple[Any, ...]
    outside: Any
    words: tuple[str, ...]


def edge(schema: Schema, keyword: str) -> Edge:
    """The edge at which a keyword of the schema begins to reject, and the API server's words for the rejection."""
    bound: Any = schema.get(keyword)
    match keyword:
        case "enum":
            shown = tuple(f'"{value}"' for value in bound if value)
            found = Edge(tuple(bound), "Elsewhere", ('"Elsewhere"', *shown))
        case "minimum":
            found = Edge((bound,), bound - 1, (str(bound - 1), f"should be greater than or equal to {bound}"))
        case "maximum":
            found = Edge((bound,), bound + 1, (str(bound + 1), f"should be less than or equal to {bound}"))
        case "minLength":
            found = Edge((text(schema, bound),), text(schema, bound - 1), (f"at least {bound} chars long",))
        case "maxLength":
            found = Edge((text(schema, bound),), text(schema, bound + 1), (f"may not be more than {bound} bytes",))
        case "pattern":
            misfit = MISFITS.get(bound, "?" * max(1, schema.get("minLength", 1)))
            found = Edge((sample(schema),), misfit, (f'"{misfit}"', "should match"))
        case "format":
            found = Edge((TIME,), "yesterday", ('"yesterday"', "date-time"))
        case "maxProperties":
            value = sample(schema["additionalProperties"])
            full, beyond = ({f"{_prefix(schema)}k{n}": value for n in range(count)} for count in (bound, bound + 1))
            found = Edge((full,), beyond, (str(bound + 1), f"must have at most {bound} items"))
        case "minItems":
            found = Edge((items(schema, bound),), items(schema, bound - 1), (f"at least {bound} items",))
        case "maxItems":
            found = Edge((items(schema, bound),), items(schema, bound + 1), (str(bound + 1), f"at most {bound} items"))
        case _:
            assert keyword == "unique", keyword
            found = Edge((items(schema, 2),), [sample(schema["items"])] * 2, ("Duplicate value",))
    return found


def _limits_of(schema: Schema) -> Edge | None:
    """The edge of a float's limits; None if it has none."""
    rules = [one for one in schema.get("x-kubernetes-validations", []) if one["rule"].startswith("double(self)")]
    return limits(rules[0]["rule"], rules[0]["message"]) if rules else None


def limits(rule: str, allowed: str) -> Edge:
    """The edge of a float's limits, from a rule such as "double(self) > 0.0 && double(self) <= 10.0"."""
    found = {sign: float(limit) for sign, limit in re.findall(r"double\(self\) (>=|>|<=|<) ([-+.e\d]+)", rule)}
    inside = found.get("<=", found.get(">=", found.get("<", 2.0) / 2 or found[">"] + 1.0))
    beyond = {"<=": 2.0, "<": 1.0, ">=": 0.5, ">": 1.0}
    sign, limit = next(iter(found.items()))
    return Edge((f"{inside!r}",), f"{limit * beyond[sign]!r}", (allowed,))


def items(schema: Schema, count: int) -> list[Any]:
    """`count` items of a list, with different keys if the list has keys."""
    made = [copy.deepcopy(sample(schema["items"])) for _ in range(count)]
    for number, item in enumerate(made):
        for key in schema.get("x-kubernetes-list-map-keys", []):
            begin = BEGINS.get(schema["items"]["properties"][key].get("pattern", ""), "")
            item[key] = f"{begin}a{number}"
    return made


def concrete(path: str) -> str:
    """A path of the schema as the API server writes it in messages."""
    return path.replace("[]", "[0]").replace("extended.*", "extended.a/key").replace(".*", ".key")


# --- rules ------------------------------------------------------------------------------------------------------------

Changes = Mapping[str, Any]
"""path -> value; None = left out"""


@dataclass(frozen=True)
class RuleCase:
    """Two manifests, one on each side of a CEL rule; with `stored`, they are changes of that object."""

    inside: Changes
    outside: Changes
    words: tuple[str, ...]
    stored: Changes | None = None
    stored_outside: Changes | None = None
    """the object that the rejected manifest changes, if it is another one"""


def _never_changes(path: str, field: str, value: Any) -> RuleCase:
    words = (path, f"{path.removeprefix('spec.')} is immutable; create a new TrainingJob")
    return RuleCase({"spec.lifecycle.maxRestarts": 1}, {field: value}, words, stored={})


def _one_of(path: str, inside: Changes, outside: Changes, found: str) -> RuleCase:
    return RuleCase(inside, outside, (path, "exactly one of", f"found {found}"))


def _stays_on_its_claim(owner: str) -> RuleCase:
    """`owner`: a field that holds a claim and a subPath."""
    above, _, name = owner.rpartition(".")

    def at(sub_path: str) -> Changes:
        location = {"claim": "any", "subPath": sub_path}
        own = {owner: location} if owner == "spec.checkpoint" else {above: {name: location}}
        return {**CHAT, **own} if name in ("chat", "tokens") else own

    words = (f"{owner}.subPath", "en/../../other must be a relative path on the claim")
    return RuleCase(at("en/..wiki"), at("en/../../other"), words)


EARLIER_VALUES: dict[str, Any] = {
    "image": "a", "resourceName": "a/b", "runtimeClassName": "a", "imagePullSecrets": [], "env": [],
}  # fmt: skip
"""values of those fields of earlier schemas that are not maps"""
NEVER: dict[str, tuple[str, Any]] = {
    "checkpoint.resume": ("spec.checkpoint.resume", "Never"),
}
"""field that our operator never honours, in the order of their rules -> its path and value"""


def _by_others_alone(path: str, problem: str) -> RuleCase:
    field, value = NEVER[path]
    return RuleCase({field: value}, {field: value, "spec.managedBy": MANAGER}, (f"spec.{path}", problem))


LORA, OURS = {"spec.model.lora": {"rank": 8}}, {"spec.managedBy": MANAGER}
TWO_MEMBERS: Changes = {"spec.members": [{"name": "a"}, {"name": "b"}]}
TOGETHER: list[tuple[Changes, Changes]] = [
    ({"spec.model.precision.compute": "float16"}, {"spec.parallelism.strategy": "Zero2"}),
    ({"spec.training.optimizer.moments": "int8"}, {"spec.parallelism.strategy": "Fsdp"}),
    (
        {"spec.training.lossScale": {"initial": 1024}, "spec.model.precision.compute": "float16"},
        {"spec.model.precision.compute": "bfloat16"},
    ),
    (
        {"spec.model.config.architecture": "gpt2", "spec.model.config.maxPositions": 64},
        {"spec.training.sequenceLength": 65},
    ),
    (LORA, {"spec.model.config.dropout": "0.1"}),
    (GPT2 | {"spec.model.config.vocabSize": 257}, {"spec.model.config.architecture": "bert"}),
    (CHAT, {"spec.model": {"entrypoint": "a:b"}}),
    (CHAT | {"spec.data": {"tokens": {"path": "/t"}}}, {"spec.model": {"entrypoint": "a:b"}}),
    (CHAT | {"spec.data": {"entrypoint": "a:b", "packing": True}}, {"spec.model": {"entrypoint": "a:b"}}),
    (CHAT | {"spec.data.packing": True}, {"spec.data": {"builtin": "PythonStdlib", "packing": True}}),
    (CHAT | {"spec.data.evaluation": {"chat": {"path": "/held"}}}, {"spec.data.text": {"path": "/text"}}),
    (CHAT | {"spec.data.evaluation": {"fraction": "0.1"}}, {"spec.data.evaluation": {"text": {"path": "/held"}}}),
    (EVALUATED | STOPS_EARLY, {"spec.data.evaluation": None}),
    (EVALUATED | {"spec.checkpoint.keepBest": True}, {"spec.data.evaluation": None}),
    (IN_EPOCHS, {"spec.members": [{"name": "a"}]}),
    (EVALUATED | STOPS_EARLY, {"spec.members": [{"name": "a"}]}),
    (EVALUATED | {"spec.checkpoint.keepBest": True}, {"spec.members": [{"name": "a"}]}),
    (
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
        {"spec.memory.advanced.optimizer.placement": "Host"},
    ),
    (
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
        {"spec.memory.advanced.optimizer.overlap": "Forward"},
    ),
    (
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
        {"spec.memory.advanced.activations.policy": "Nvme"},
    ),
    ({"spec.memory.advanced.activations.hostReserve": "1Mi"}, {"spec.memory.advanced.activations.policy": "Keep"}),
    (SEARCHED, {"spec.members": [{"name": "a"}]}),
    ({"spec.members": [{"name": "a"}], "spec.objective": {"metric": "Loss"}}, {"spec.members": []}),
    ({"spec.members": [{"name": "a"}]}, {"spec.parallelism.nodes": 2}),
    (TWO_MEMBERS | {"spec.parallelism.devicesPerNode": 2}, {"spec.parallelism.devicesPerNode": 3}),
    (TWO_MEMBERS | {"spec.spill.encryption": "Ephemeral"}, {"spec.parallelism.devicesPerNode": 2}),
    ({"spec.members": [{"name": "a"}]}, {"spec.parallelism.strategy": "Fsdp"}),
    ({"spec.members": [{"name": "a"}]}, {"spec.memory.advanced.activations.hostReserve": "1Mi"}),
    (
        {"spec.members": [{"name": "a"}], "spec.objective": {"metric": "Loss"}},
        {"spec.objective": {"metric": "EvaluationLoss"}},
    ),
    ({**OURS, "spec.parallelism.strategy": "Zero3"}, {"spec.memory.advanced.optimizer.overlap": "Forward"}),
    ({**OURS, "spec.parallelism.strategy": "Zero2"}, LORA),
    ({"spec.parallelism.nodes": 2, "spec.scheduling.gang": "Auto"}, {"spec.scheduling.gang": "Required"}),
    (
        {"spec.scheduling.queueName": "team", "spec.scheduling.workloadPriorityClassName": "high"},
        {"spec.scheduling.queueName": ""},
    ),
]
"""for each rule of WRONG_TOGETHER, fields of a right manifest, and the change that makes it wrong"""


SCRIPT: dict[str, Any] = {**NO_MODEL, "spec.command": ["python", "a.py"]}
WRONG_SCRIPTS: list[Changes] = [
    {"spec.model": SPECS["TrainingJob"]["model"]},
    {"spec.data": {"builtin": "PythonStdlib"}},
    {"spec.training": SPECS["TrainingJob"]["training"]},
    SEARCHED,
    {"spec.members": [{"name": "a"}]},
    {"spec.objective": {"metric": "Loss"}},
    {"spec.tracking": {"tensorBoard": {}}},
    {"spec.command": ["", "a.py"]},
    {"spec.pod.resources": {"cpu": 1}},
    {"spec.memory.mode": "Advise"},
    {"spec.memory.budget.device": "1Gi"},
    {"spec.memory.budget.host": "1Gi"},
    {"spec.memory.advanced.activations.policy": "Keep"},
    {"spec.memory.endurance.driveWritesPerDay": "2"},
    {"spec.checkpoint.everySteps": 100},
    {"spec.checkpoint.keep": 3},
    {"spec.checkpoint.keepBest": True},
    {"spec.checkpoint.from": {"path": "/run"}},
    {"spec.parallelism.strategy": "Ddp"},
    {"spec.spill.encryption": "Ephemeral"},
]
"""for each rule of WRONG_IN_SCRIPTS, the change that makes a script wrong"""
AFTER_NOT_YET = 4 + len(WRONG_TOGETHER) + len(NOT_YET)


def _wrong_together(number: int, at: str, problem: str) -> RuleCase:
    right, wrong = TOGETHER[number]
    return RuleCase(right, {**right, **wrong}, (f"spec{at}", problem))


RULE_CASES: dict[tuple[str, str, int], RuleCase] = {
    **{
        (TRAINING_JOB.kind, "spec", 4 + number): _wrong_together(number, at, problem)
        for number, (_, at, problem) in enumerate(WRONG_TOGETHER)
    },
    **{
        (TRAINING_JOB.kind, path, 1): RuleCase(
            {path: {"claim": "any", "subPath": "en"}}, {path: {"path": "/data", "subPath": "en"}},
            (f"{path}.subPath", "only applies to a claim"),
        )
        for path in ("spec.model.source", "spec.data.text", "spec.data.evaluation.text", "spec.checkpoint.from")
    },
    **{
        (TRAINING_JOB.kind, path, 1): RuleCase(
            {**CHAT, path: {"claim": "any", "subPath": "en"}}, {**CHAT, path: {"path": "/data", "subPath": "en"}},
            (f"{path}.subPath", "only applies to a claim"),
        )
        for path in ("spec.data.chat", "spec.data.evaluation.chat", "spec.data.tokens")
    },
    **{
        (TRAINING_JOB.kind, path, 0): _one_of(path, {**CHAT, path: {"claim": "any"}}, {**CHAT, path: {}}, "[]")
        for path in ("spec.data.chat", "spec.data.evaluation.chat", "spec.data.tokens")
    },
    **{
        (TRAINING_JOB.kind, path, number): RuleCase(
            companions, {**companions, path: {**place, "fetch": {"uri": "s3://a/b"}}}, (f"{path}.{field}", words)
        )
        for path, companions in FETCHED_AT.items()
        for number, place, field, words in (
            (2, {"path": "/data"}, "fetch", "needs a claim"),
            (3, {"claim": "any"}, "subPath", "needs a directory of its own"),
        )
    },
    (TRAINING_JOB.kind, "spec.model.config", 2): RuleCase(
        {"spec.model.config.numHeads": 512}, {"spec.model.config.numHeads": 1024},
        ("spec.model.config.numHeads", "rotary embeddings need an even number"),
    ),
    (TRAINING_JOB.kind, "spec.model.config", 3): RuleCase(
        {"spec.model.config.architecture": "gpt2", "spec.model.config.numHeads": 4,
         "spec.model.config.numKeyValueHeads": 4},
        {"spec.model.config.architecture": "gpt2", "spec.model.config.numHeads": 4,
         "spec.model.config.numKeyValueHeads": 2},
        ("spec.model.config.numKeyValueHeads", "gpt2 has one key and value head per attention head; leave it out"),
    ),
    (TRAINING_JOB.kind, "spec.model.config", 4): RuleCase(
        {"spec.model.config.architecture": "t5", "spec.model.config.tieWordEmbeddings": True},
        {"spec.model.config.architecture": "t5", "spec.model.config.tieWordEmbeddings": False},
        ("spec.model.config.tieWordEmbeddings", "t5 has one matrix"),
    ),
    (TRAINING_JOB.kind, "spec.tracking", 0): RuleCase(
        {"spec.tracking": {"tensorBoard": {}}}, {"spec.tracking": {}}, ("spec.tracking", ONE_TRACKER)
    ),
    (TRAINING_JOB.kind, "spec.training.lossScale", 0): RuleCase(
        {"spec.model.precision.compute": "float16", "spec.training.lossScale": {"initial": 8, "minimum": 8}},
        {"spec.model.precision.compute": "float16", "spec.training.lossScale": {"initial": 8, "minimum": 16}},
        ("spec.training.lossScale.minimum", "16: must be at most lossScale.initial (8)"),
    ),
    (TRAINING_JOB.kind, "spec.training.optimizer", 0): RuleCase(
        {"spec.training.optimizer": {"name": "Lion", "betas": ["0.9", "0.9"]}},
        {"spec.training.optimizer": {"name": "SgdMomentum", "betas": ["0.9", "0.9"]}},
        ("spec.training.optimizer.betas", "SgdMomentum does not use it"),
    ),
    (TRAINING_JOB.kind, "spec.training.optimizer", 1): RuleCase(
        {"spec.training.optimizer": {"name": "Adam", "eps": "1e-8"}},
        {"spec.training.optimizer": {"name": "Lion", "eps": "1e-8"}},
        ("spec.training.optimizer.eps", "Lion does not use it"),
    ),
    (TRAINING_JOB.kind, "spec.training.optimizer", 2): RuleCase(
        {"spec.training.optimizer": {"name": "SgdMomentum", "momentum": "0.9"}},
        {"spec.training.optimizer": {"name": "AdamW", "momentum": "0.9"}},
        ("spec.training.optimizer.momentum", "AdamW does not use it"),
    ),
    **{
        (TRAINING_JOB.kind, "spec", number): _by_others_alone(path, problem)
        for number, (path, problem) in enumerate(NOT_YET.items(), start=4 + len(WRONG_TOGETHER))
    },
    **{
        (TRAINING_JOB.kind, "spec", AFTER_NOT_YET + number): RuleCase(
            SCRIPT, {**SCRIPT, **WRONG_SCRIPTS[number]}, (f"spec{at}", problem)
        )
        for number, (_, at, problem) in enumerate(WRONG_IN_SCRIPTS)
    },
    **{
        (TRAINING_JOB.kind, "spec", AFTER_NOT_YET + len(WRONG_IN_SCRIPTS) + number): RuleCase(
            {}, {f"spec.{name}": None}, (f"spec.{name}", REQUIRED)
        )
        for number, name in enumerate(("model", "data", "training"))
    },
    (TRAINING_JOB.kind, "spec", AFTER_NOT_YET + len(WRONG_IN_SCRIPTS) + 3): RuleCase(
        {"spec.lifecycle.maxRestarts": 1}, {"spec.command": ["python", "b.py"]},
        ("spec.command", "command is immutable"), stored=SCRIPT,
    ),
    (TRAINING_JOB.kind, "spec.pod.mounts[]", 0): _one_of(
        "spec.pod.mounts[0]", {"spec.pod.mounts": [{"path": "/code", "configMap": "a"}]},
        {"spec.pod.mounts": [{"path": "/code", "configMap": "a", "secret": "b"}]}, '["configMap", "secret"]',
    ),
    (TRAINING_JOB.kind, "spec.pod.mounts[]", 1): RuleCase(
        {"spec.pod.mounts": [{"path": "/worker", "claim": "a"}]},
        {"spec.pod.mounts": [{"path": "/work/mine", "claim": "a"}]},
        ("spec.pod.mounts[0].path", f"/work/mine: {NOT_MOUNTED_THERE}"),
    ),
    (TRAINING_JOB.kind, "spec.pod.mounts[]", 2): RuleCase(
        {"spec.pod.mounts": [{"path": "/data", "claim": "a", "writable": True}]},
        {"spec.pod.mounts": [{"path": "/data", "secret": "a", "writable": True}]},
        ("spec.pod.mounts[0].writable", ONLY_CLAIMS_ARE_WRITTEN),
    ),
    (TRAINING_JOB.kind, "spec.pod.mounts[].subPath", 0): RuleCase(
        {"spec.pod.mounts": [{"path": "/data", "claim": "a", "subPath": "en/..wiki"}]},
        {"spec.pod.mounts": [{"path": "/data", "claim": "a", "subPath": "en/../../other"}]},
        ("spec.pod.mounts[0].subPath", "en/../../other must be a relative path on the claim"),
    ),
    (TRAINING_JOB.kind, "", 0): RuleCase(
        {"metadata.name": "n" * MAX_NAME_LENGTH},
        {"metadata.name": "n" * (MAX_NAME_LENGTH + 1)},
        ("metadata.name", "n" * (MAX_NAME_LENGTH + 1), f"has {MAX_NAME_LENGTH + 1} characters", f"{MAX_NAME_LENGTH}"),
    ),
    (TRAINING_JOB.kind, "", 1): RuleCase(
        {"metadata.name": "my-job"}, {"metadata.name": "my.job"}, ("metadata.name my.job", "no dot")
    ),
    (TRAINING_JOB.kind, "spec", 0): RuleCase(
        {"spec.memory.budget.host": "2Gi", "spec.spill.storageClassName": "fast", "spec.checkpoint.claim": "other"},
        {"spec.suspend": False, "spec.memory.budget.host": "2Gi", "spec.checkpoint.claim": "other",
         **SEARCHED, "spec.objective": {"metric": "Loss"}},
        ("spec", '["memory", "checkpoint", "search", "objective"] can change only while the job is suspended',
         "apply suspend: true alone first"),
        stored={"spec.suspend": True},
        stored_outside={},
    ),
    (TRAINING_JOB.kind, "spec", 1): RuleCase(
        {"spec.training.globalBatchSize": 24, "spec.training.microBatchSize": 2, "spec.parallelism.nodes": 3},
        {"spec.training.globalBatchSize": 20, "spec.training.microBatchSize": 2, "spec.parallelism.nodes": 3},
        ("spec.training.globalBatchSize", "20 must be a multiple of microBatchSize x ranks (6)"),
    ),
    (TRAINING_JOB.kind, "spec.model", 0): _never_changes("spec.model", "spec.model.config.vocabSize", 1024),
    (TRAINING_JOB.kind, "spec.model", 1): _one_of(
        "spec.model", {}, {"spec.model": {"config": SPECS["TrainingJob"]["model"]["config"], "entrypoint": "a:b"}},
        '["config", "entrypoint"]',
    ),
    (TRAINING_JOB.kind, "spec.model.config", 0): RuleCase(
        {"spec.model.config.numHeads": 8},
        {"spec.model.config.numHeads": 3},
        ("spec.model.config.numHeads", "3 must divide hiddenSize (1024)"),
    ),
    (TRAINING_JOB.kind, "spec.model.config", 1): RuleCase(
        {"spec.model.config.numHeads": 8, "spec.model.config.numKeyValueHeads": 2},
        {"spec.model.config.numHeads": 8, "spec.model.config.numKeyValueHeads": 3},
        ("spec.model.config.numKeyValueHeads", "3 must divide numHeads (8)"),
    ),
    (TRAINING_JOB.kind, "spec.model.source", 0): _one_of(
        "spec.model.source", {"spec.model": {"source": {"claim": "models"}}}, {"spec.model": {"source": {}}}, "[]"
    ),
    **{
        (TRAINING_JOB.kind, f"{owner}.subPath", 0): _stays_on_its_claim(owner)
        for owner in (
            "spec.model.source", "spec.data.text", "spec.data.tokens", "spec.data.evaluation.text", "spec.checkpoint",
            "spec.data.chat", "spec.data.evaluation.chat", "spec.checkpoint.from",
        )
    },
    (TRAINING_JOB.kind, "spec.data", 0): _never_changes("spec.data", "spec.data.evaluation.everySteps", 7),
    (TRAINING_JOB.kind, "spec.data", 1): _one_of("spec.data", {}, {"spec.data": {}}, "[]"),
    (TRAINING_JOB.kind, "spec.data.text", 0): _one_of(
        "spec.data.text",
        {"spec.data": {"text": {"path": "/data"}}},
        {"spec.data": {"text": {"path": "/data", "claim": "corpus"}}},
        '["claim", "path"]',
    ),
    (TRAINING_JOB.kind, "spec.data.evaluation", 0): RuleCase(
        {"spec.data.evaluation": {"text": {"path": "/held"}}},
        {"spec.data.evaluation": {"text": {"path": "/held"}, "fraction": "0.1"}},
        ("spec.data.evaluation", "at most one of text, chat, fraction is allowed"),
    ),
    (TRAINING_JOB.kind, "spec.data.evaluation.text", 0): _one_of(
        "spec.data.evaluation.text",
        {"spec.data.evaluation": {"text": {"claim": "held"}}},
        {"spec.data.evaluation": {"text": {}}},
        "[]",
    ),
    (TRAINING_JOB.kind, "spec.checkpoint.from", 0): _one_of(
        "spec.checkpoint.from",
        {"spec.checkpoint": {"from": {"path": "/run"}}},
        {"spec.checkpoint": {"from": {"path": "/run", "claim": "runs"}}},
        '["claim", "path"]',
    ),
    (TRAINING_JOB.kind, "spec.training", 0): _never_changes("spec.training", "spec.training.steps", 11),
    (TRAINING_JOB.kind, "spec.training", 2): _one_of(
        "spec.training",
        {"spec.training": {"epochs": 3, "sequenceLength": 64, "globalBatchSize": 1 << 20}},
        {"spec.training": {"epochs": 3, "steps": 10, "sequenceLength": 64, "globalBatchSize": 1 << 20}},
        '["steps", "epochs"]',
    ),
    (TRAINING_JOB.kind, "spec.training", 1): RuleCase(
        {"spec.training.schedule.warmupSteps": 10},
        {"spec.training.schedule.warmupSteps": 11},
        ("spec.training.schedule.warmupSteps", "11 must be at most training.steps (10)"),
    ),
    (TRAINING_JOB.kind, "spec.training.schedule", 0): RuleCase(
        {"spec.training.schedule": {"warmupRatio": "0.1"}},
        {"spec.training.schedule": {"warmupRatio": "0.1", "warmupSteps": 1}},
        ("spec.training.schedule.warmupRatio", "schedule.warmupSteps is set, too"),
    ),
    (TRAINING_JOB.kind, "spec.parallelism", 0): _never_changes("spec.parallelism", "spec.parallelism.nodes", 2),
    (TRAINING_JOB.kind, "spec", 2): RuleCase(
        {"spec.parallelism.nodes": 128, "spec.parallelism.devicesPerNode": 8},
        {"spec.parallelism.nodes": 256, "spec.parallelism.devicesPerNode": 8},
        ("spec.parallelism", "at most 1024 ranks; nodes x devicesPerNode is 256 x 8 = 2048"),
    ),
    **{
        (TRAINING_JOB.kind, f"spec.{old}", 0): RuleCase(
            {}, {f"spec.{old}": EARLIER_VALUES.get(old, {})}, (f"spec.{old}", f"moved to spec.{new}")
        )
        for old, new in MOVED.items()
    },
    (TRAINING_JOB.kind, "spec.data.huggingFace", 0): RuleCase(
        {"spec.data": {"entrypoint": "a:b"}}, {"spec.data": {"huggingFace": {"name": "wikitext"}}},
        ("spec.data.huggingFace", "fetch: {uri: hf://datasets/organisation/name}"),
    ),
    (TRAINING_JOB.kind, "spec.members[].overrides", 0): RuleCase(
        {}, {"spec.members": [{"name": "a", "overrides": {"training.seed": "1"}}]},
        ("spec.members[0].overrides", "write the fields of the member directly"),
    ),
    (TRAINING_JOB.kind, "spec", 3): RuleCase(
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi", "spec.pod.resources.cpu": 1},
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi", "spec.pod.resources.memory": "2Gi"},
        ("spec.pod.resources.memory", "mode Disabled makes no plan that could be fitted"),
    ),
    (TRAINING_JOB.kind, "spec.pod", 0): RuleCase(
        {"spec.pod": {"resources": {"extended": {"rdma/hca": 1}}}},
        {"spec.pod": {"resources": {"extended": {"nvidia.com/gpu": 1}}}},
        ("spec.pod.resources.extended", "the plan decides how many of resourceName"),
    ),
    (TRAINING_JOB.kind, "spec.pod.resources.extended", 0): RuleCase(
        {"spec.pod.resources.extended": {"rdma/hca": 1}},
        {"spec.pod.resources.extended": {"memory": 1}},
        ("spec.pod.resources.extended", "must be an extended resource"),
    ),
    (TRAINING_JOB.kind, "spec.pod.securityContext", 0): RuleCase(
        {"spec.pod.securityContext": {"assignedByCluster": True, "supplementalGroups": [5]}},
        {"spec.pod.securityContext": {"assignedByCluster": True, "fsGroup": 5}},
        ("spec.pod.securityContext.assignedByCluster", "the cluster assigns"),
    ),
    (TRAINING_JOB.kind, "spec.memory", 0): RuleCase(
        {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"},
        {"spec.memory.mode": "Disabled"},
        ("spec.memory.budget.host", "required with mode Disabled"),
    ),
    (TRAINING_JOB.kind, "spec.spill", 0): RuleCase(
        {"spec.spill": {"storageClassName": "fast", "numVolumes": 2}},
        {"spec.spill": {"numVolumes": 2}},
        ("spec.spill.numVolumes", "without storageClassName there is only one volume"),
    ),
    (TRAINING_JOB.kind, "spec.pod.env", 0): RuleCase(
        {"spec.pod.env": [{"name": f"V{number}", "value": "x" * 8192} for number in range(4)]},
        {"spec.pod.env": [{"name": f"V{number}", "value": "x" * 8000} for number in range(5)]},
        ("spec.pod.env", "all values together have 40000 characters, at most 32768 are allowed"),
    ),
    (TRAINING_JOB.kind, "spec.pod.env[]", 1): RuleCase(
        {"spec.pod.env": [{"name": "MASTER", "value": "1"}]},
        {"spec.pod.env": [{"name": "MASTER_ADDR", "value": "1"}]},
        ("spec.pod.env[0].name", "the operator sets MASTER_ADDR itself"),
    ),
    (TRAINING_JOB.kind, "spec.pod.labels", 0): RuleCase(
        {"spec.pod.labels": {"team": "a", "spillway.dev": "b"}},
        {"spec.pod.labels": {"spillway.dev/job-uid": "another"}},
        ("spec.pod.labels", "spillway.dev/job-uid is reserved"),
    ),
    (TRAINING_JOB.kind, "spec.pod.annotations", 0): RuleCase(
        {"spec.pod.annotations": {"team": "a", "kueue.x-k8s.io/podset-required-topology": "rack"}},
        {"spec.pod.annotations": {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}},
        ("spec.pod.annotations", "container.apparmor.security.beta.kubernetes.io/trainer is reserved"),
    ),
    (TRAINING_JOB.kind, "spec.pod.env[]", 0): _one_of(
        "spec.pod.env[0]",
        {"spec.pod.env": [{"name": "A", "value": "1"}]},
        {"spec.pod.env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
        '["value", "valueFrom"]',
    ),
    (TRAINING_JOB.kind, "spec.pod.resourceName", 0): RuleCase(
        {"spec.pod.resourceName": "d" * MAX_DOMAIN_LENGTH + "/gpu"},
        {"spec.pod.resourceName": "d" * (MAX_DOMAIN_LENGTH + 1) + "/gpu"},
        ("spec.pod.resourceName", "d/gpu: must be an extended resource", f"at most {MAX_DOMAIN_LENGTH} characters"),
    ),
    (TRAINING_JOB.kind, "spec.search", 0): RuleCase(
        {"spec.search": {"trials": 2, "parameters": [{"path": "training.seed", "values": [1, 2]}]}},
        {"spec.search": {"parameters": [{"path": "training.seed", "values": [1, 2]}]}},
        ("spec.search.trials", TRIALS_NEEDED),
    ),
    (TRAINING_JOB.kind, "spec.search.parameters[]", 0): _one_of(
        "spec.search.parameters[0]",
        {"spec.search": {"trials": 2, "parameters": [{"path": "training.seed", "values": [1, "a"]}]}},
        {"spec.search": {"trials": 2, "parameters": [{"path": "training.seed", "values": [1], "min": 1, "max": 2}]}},
        '["values", "min"]',
    ),
    (TRAINING_JOB.kind, "spec.search.parameters[]", 1): RuleCase(
        {"spec.search": {"trials": 2, "parameters": [{"path": "training.optimizer.eps", "min": "1e-9", "max": 1}]}},
        {"spec.search": {"trials": 2, "parameters": [{"path": "training.optimizer.eps", "min": "1e-9"}]}},
        ("spec.search.parameters[0].max", BOTH_ENDS),
    ),
    (TRAINING_JOB.kind, "spec.search.parameters[]", 2): RuleCase(
        SEARCHED,
        {"spec.search": {"trials": 1, "parameters": [{"path": "training.seed", "values": [1], "step": 1}]}},
        ("spec.search.parameters[0].step", STEP_OF_RANGE),
    ),
    (TRAINING_JOB.kind, "spec.managedBy", 0): RuleCase(
        {"spec.lifecycle.maxRestarts": 1},
        {"spec.managedBy": "another.test/operator"},
        ("spec.managedBy", f"immutable: {NOBODY} cannot become another.test/operator"),
        stored={},
    ),
    (OPERATOR_CONFIG.kind, "", 0): RuleCase(
        {"metadata.name": CONFIG_NAME}, {"metadata.name": "other"}, ("metadata.name other", "only default is used")
    ),
    (OPERATOR_CONFIG.kind, "spec.jobDefaults.pod.env[]", 0): _one_of(
        "spec.jobDefaults.pod.env[0]",
        {"spec.jobDefaults.pod.env": [{"name": "A", "value": "1"}]},
        {"spec.jobDefaults.pod.env": [
            {"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
        ]},
        '["value", "valueFrom"]',
    ),
    (OPERATOR_CONFIG.kind, "spec.networkPresets[].env[]", 0): _one_of(
        "spec.networkPresets[0].env[0]",
        {"spec.networkPresets": [{"name": "ib", "env": [{"name": "A", "value": "1"}]}]},
        {"spec.networkPresets": [{"name": "ib", "env": [{"name": "A"}]}]},
        "[]",
    ),
    (OPERATOR_CONFIG.kind, "spec.networkPresets[].resources.extended", 0): RuleCase(
        {"spec.networkPresets": [{"name": "ib", "resources": {"extended": {"rdma/hca": 1}}}]},
        {"spec.networkPresets": [{"name": "ib", "resources": {"extended": {"cpu": 1}}}]},
        ("spec.networkPresets[0].resources.extended", "must be an extended resource"),
    ),
    (OPERATOR_CONFIG.kind, "spec.networkPresets[].annotations", 0): RuleCase(
        {"spec.networkPresets": [{"name": "ib", "annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"}}]},
        {"spec.networkPresets": [{"name": "ib", "annotations": {"spillway.dev/attempt": "1"}}]},
        ("spec.networkPresets[0].annotations", "spillway.dev/attempt is reserved"),
    ),
    (MEMORY_PROFILE.kind, "spec.fingerprint", 0): RuleCase(
        {"spec.model": "another"},
        {"spec.fingerprint": "fedcba9876543210"},
        ("spec.fingerprint", "immutable: 0123456789abcdef cannot become fedcba9876543210"),
        stored={},
    ),
}  # fmt: skip


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass
class CaseBuilder:
    kind: Kind
    schema: Schema = field(init=False)
    nodes: dict[str, Schema] = field(init=False)

    def __post_init__(self) -> None:
        self.schema = schema_of(self.kind)
        self.nodes = dict(fields(self.schema))

    def build(self) -> Iterator[Case]:
        for constraint in constraints(self.kind):
            name = constraint.name
            if name.startswith("rule "):
                yield from self._rule(constraint, int(name.removeprefix("rule ")))
            elif name.startswith("required "):
                yield from self._required(constraint, self.nodes[constraint.path], name.removeprefix("required "))
            else:
                yield from self._edge(constraint, edge(self.nodes[constraint.path], name))

    def _edge(self, constraint: Constraint, found: Edge) -> Iterator[Case]:
        companions = COMPANIONS.get(constraint.path, {})
        for value in found.inside:
            yield Case(constraint, self.kind, True, self._changed({**companions, constraint.path: value}))
        words = (concrete(constraint.path), *found.words)
        outside = self._changed({**companions, constraint.path: found.outside})
        yield Case(constraint, self.kind, False, outside, words)

    def _required(self, constraint: Constraint, node: Schema, name: str) -> Iterator[Case]:
        path = f"{constraint.path}.{name}".lstrip(".")
        companions = COMPANIONS.get(path, {})
        whole = self._changed({**companions, path: sample(node["properties"][name])} if path not in _GIVEN else {})
        yield Case(constraint, self.kind, True, whole)
        lacking = copy.deepcopy(whole)
        holder = _at(lacking, _steps(constraint.path))
        del holder[name]
        yield Case(constraint, self.kind, False, lacking, (concrete(path), "Required value"))

    def _rule(self, constraint: Constraint, number: int) -> Iterator[Case]:
        rule = self.nodes[constraint.path]["x-kubernetes-validations"][number]
        if rule["rule"].startswith("double(self)"):
            yield from self._edge(constraint, limits(rule["rule"], rule["message"]))
            return
        case = RULE_CASES[self.kind.kind, constraint.path, number]
        inside = self._stored(case.stored)
        outside = inside if case.stored_outside is None else self._stored(case.stored_outside)
        yield Case(constraint, self.kind, True, self._changed(case.inside, inside), stored=inside)
        yield Case(constraint, self.kind, False, self._changed(case.outside, outside), case.words, outside)

    def _stored(self, changes: Changes | None) -> Document | None:
        if changes is None:
            return None
        own = {"spec.managedBy": NOBODY} if self.kind is TRAINING_JOB else {}
        return self._changed({**own, **changes})

    def _changed(self, changes: Changes, document: Document | None = None) -> Document:
        made = manifest(self.kind) if document is None else document
        for path, value in changes.items():
            if path == "metadata.name":
                made = {**made, "metadata": {"name": value}}
            else:
                made = with_field(made, self.schema, path, value)
        return made


_GIVEN = {
    "spec", "spec.model", "spec.data", "spec.training", "spec.fingerprint", "spec.deviceKind",
    *(f"spec.model.config.{name}" for name in SPECS["TrainingJob"]["model"]["config"]),
    *(f"spec.training.{name}" for name in SPECS["TrainingJob"]["training"]),
}  # fmt: skip
"""fields that SPECS has"""


def _at(document: Document, steps: list[str]) -> Any:
    found: Any = document
    for step in steps:
        found = found[{"[]": 0, "*": "key"}.get(step, step)]
    return found


def cases(kind: Kind) -> list[Case]:
    return list(CaseBuilder(kind).build())


# --- the server -------------------------------------------------------------------------------------------------------

Request = Callable[[str, str, Document | None], tuple[int, Document]]
"""method, path with query, body -> HTTP status, answer"""


@dataclass(frozen=True)
class Answer:
    accepted: bool
    message: str


@dataclass(frozen=True)
class Server:
    """An API server that has the CRDs, possibly under another group than ours."""

    request: Request
    namespace: str
    group: str = GROUP
    stored: dict[str, Document] = field(default_factory=dict)
    """content -> object that was created on the server; all other requests are dry runs"""

    def run(self, case: Case) -> Answer:
        query = "dryRun=All&fieldValidation=Strict"
        if case.in_status or case.stored is not None:
            metadata = self._store(case.kind, case.stored or manifest(case.kind))["metadata"]
            kept = {"name": metadata["name"], "resourceVersion": metadata["resourceVersion"]}
            part = "/status" if case.in_status else ""
            path = f"{self.path(case.kind)}/{metadata['name']}{part}?{query}"
            code, answer = self.request("PUT", path, self._grouped({**case.manifest, "metadata": kept}))
        else:
            code, answer = self.request("POST", f"{self.path(case.kind)}?{query}", self._grouped(case.manifest))
        return Answer(code in (200, 201), str(answer.get("message", "")))

    def _store(self, kind: Kind, document: Document) -> Document:
        """The object with this content, which is created when it is first needed."""
        content = json.dumps(document, sort_keys=True)
        if content not in self.stored:
            named = {**document, "metadata": {"name": f"stored-{len(self.stored)}"}}
            code, self.stored[content] = self.request("POST", self.path(kind), self._grouped(named))
            assert code == 201, self.stored[content]
        return self.stored[content]

    def path(self, kind: Kind) -> str:
        scope = f"/namespaces/{self.namespace}" if kind.scope == "Namespaced" else ""
        return f"/apis/{self.group}/{VERSION}{scope}/{kind.plural}"

    def definition(self, kind: Kind) -> Document:
        """The CRD under this server's group."""
        made = crd.definition(kind)
        made["metadata"]["name"] = f"{kind.plural}.{self.group}"
        made["spec"]["group"] = self.group
        return made

    def _grouped(self, document: Document) -> Document:
        return {**document, "apiVersion": f"{self.group}/{VERSION}"}
