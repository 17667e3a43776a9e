"""The CustomResourceDefinition, generated from api.py: `python -m spillway.crd` writes crds/, `--check` compares.

A structural schema: references inlined, bounds kept, defaults only where they are static. What a schema cannot say
(immutability, unions, divisibility) is said in CEL; `load_job` says the same with better words.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from spillway.api import GROUP, MAX_NAME_LENGTH, VERSION, TrainingJobSpec
from spillway.field_types import quoted
from spillway.status import TrainingJobStatus

Schema = dict[str, Any]

PATH = Path("crds") / "trainingjobs.spillway.dev.yaml"
MAX_INT64 = 2**63 - 1


def _one_of(*names: str) -> Schema:
    found = ", ".join(f"has(self.{name})" for name in names)
    return _rule(f"[{found}].filter(given, given).size() == 1", f"exactly one of {', '.join(names)} is needed")


def _rule(rule: str, message: str) -> Schema:
    return {"rule": rule, "message": message}


def _immutable(field: str) -> Schema:
    return _rule("self == oldSelf", f"{field} never changes; make a new TrainingJob")


_LOCKED_UNLESS_SUSPENDED = ("memory", "scheduling", "spill")

RULES: dict[str, list[Schema]] = {
    "spec": [
        _rule(
            "oldSelf.suspend || ("
            + " && ".join(f"self.{field} == oldSelf.{field}" for field in _LOCKED_UNLESS_SUSPENDED)
            + ")",
            f"{', '.join(_LOCKED_UNLESS_SUSPENDED)} change only while suspended; set suspend: true first",
        ),
        _rule(
            "self.training.globalBatchSize % (self.training.microBatchSize * self.parallelism.nodes"
            " * self.parallelism.devicesPerNode) == 0",
            "training.globalBatchSize must be a multiple of microBatchSize x nodes x devicesPerNode",
        ),
    ],
    "spec.model": [_immutable("model"), _one_of("config", "source", "entrypoint")],
    "spec.model.config": [
        _rule("self.hiddenSize % self.numHeads == 0", "numHeads must divide hiddenSize"),
        _rule(
            "!has(self.numKeyValueHeads) || self.numHeads % self.numKeyValueHeads == 0",
            "numKeyValueHeads must divide numHeads",
        ),
    ],
    "spec.model.source": [_one_of("claim", "path")],
    "spec.data": [_immutable("data"), _one_of("text", "tokens", "huggingFace", "entrypoint", "builtin")],
    "spec.data.text": [_one_of("claim", "path")],
    "spec.data.tokens": [_one_of("claim", "path")],
    "spec.training": [
        _immutable("training"),
        _rule("self.schedule.warmupSteps <= self.steps", "schedule.warmupSteps must be at most steps"),
    ],
    "spec.parallelism": [_immutable("parallelism")],
    "spec.memory": [
        # The API server tries rules on the bare default, {}, too.
        _rule(
            "!has(self.mode) || self.mode != 'Disabled' || (has(self.budget) && has(self.budget.host))",
            "mode Disabled needs budget.host",
        ),
    ],
    "spec.env[]": [_one_of("value", "valueFrom")],
    "spec.managedBy": [_immutable("managedBy")],
}
"""CEL by field; transition rules see the stored object as oldSelf"""

COLUMNS = (
    ("State", ".status.state", "string", 0, "Where the job is."),
    ("Step", ".status.progress.step", "integer", 0, "Optimizer steps completed."),
    ("Progress", ".status.progress.display", "string", 0, "Share of the steps."),
    ("Loss", ".status.progress.loss", "string", 0, "Training loss of the last step."),
    ("Tok/s", ".status.progress.tokensPerSecond", "string", 0, "Tokens per second."),
    ("Device-Mem", ".status.memory.device", "string", 0, "Peak of budget on the device."),
    ("Spilled", ".status.memory.spilled", "string", 0, "Bytes outside the device."),
    ("Restarts", ".status.attempts.restarts", "integer", 1, "Restarts that count."),
    ("ETA", ".status.progress.eta", "string", 0, "Time left."),
    ("Best", ".status.bestMember", "string", 1, "Best member of a sweep."),
    ("Age", ".metadata.creationTimestamp", "date", 0, "Time since creation."),
)


def definition() -> Schema:
    """The whole CustomResourceDefinition as plain data."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"trainingjobs.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": "trainingjobs",
                "singular": "trainingjob",
                "kind": "TrainingJob",
                "listKind": "TrainingJobList",
                "shortNames": ["tjob"],
                "categories": ["training"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Schema:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "jsonPath": path, "type": kind, "priority": priority, "description": text}
            for name, path, kind, priority, text in COLUMNS
        ],
        "selectableFields": [{"jsonPath": ".spec.scheduling.queueName"}, {"jsonPath": ".status.state"}],
        "schema": {"openAPIV3Schema": _object_schema()},
    }


def _object_schema() -> Schema:
    return {
        "description": "A training run, and where its memory lives.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema."},
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": structural(TrainingJobSpec, "spec"),
            "status": structural(TrainingJobStatus, "status"),
        },
        "x-kubernetes-validations": [
            _rule(
                f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
                f"metadata.name is at most {MAX_NAME_LENGTH} characters: names of pods are made from it",
            )
        ],
    }


def structural(model: type[BaseModel], path: str) -> Schema:
    """The structural schema of a model; `path` selects its CEL rules."""
    schema = model.model_json_schema(by_alias=True)
    return _inlined(schema, schema.get("$defs", {}), path)


def _inlined(schema: Schema, definitions: Schema, path: str) -> Schema:
    schema = _resolved(schema, definitions)
    made = _described(schema) | _typed(schema)
    if "properties" in schema:
        made["properties"] = {
            name: _inlined(inner, definitions, f"{path}.{name}") for name, inner in schema["properties"].items()
        }
        if schema.get("required"):
            made["required"] = schema["required"]
    elif schema.get("type") == "object":
        made["additionalProperties"] = _inlined(schema["additionalProperties"], definitions, f"{path}.*")
        made["maxProperties"] = schema.get("maxProperties", 64)
    if schema.get("type") == "array":
        made["items"] = _inlined(schema["items"], definitions, f"{path}[]")
        made["x-kubernetes-list-type"] = schema.get("x-kubernetes-list-type", "atomic")
        made |= {key: schema[key] for key in ("x-kubernetes-list-map-keys", "minItems", "maxItems") if key in schema}
    if path in RULES:
        made["x-kubernetes-validations"] = RULES[path]
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
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": schema["pattern"],
            "maxLength": schema["maxLength"],
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


def text() -> str:
    """The file's contents."""
    body = yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated from operator/spillway/api.py by `make crds`. Do not edit.\n{body}"


def main(arguments: list[str]) -> int:
    """Write the file, or with --check say whether it is in step; run from the root of the repository."""
    if "--check" not in arguments:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(text(), encoding="utf-8")
        return 0
    if PATH.is_file() and PATH.read_text(encoding="utf-8") == text():
        return 0
    sys.stderr.write(f"{PATH} is out of step with operator/spillway/api.py: run `make crds`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
