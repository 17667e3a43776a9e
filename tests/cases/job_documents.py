"""Manifests for tests: a small complete one, and functions that change it by dotted path."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from harness.places import ROOT
from spillway.api.earlier import as_today
from spillway.api.load import parse_job
from spillway.api.pod import Member
from spillway.api.training_job import TrainingJob

EXAMPLES = ROOT / "examples"
EXAMPLE_SCRIPT = EXAMPLES / "script.yaml"
EXAMPLE_JOBS = sorted(
    file
    for file in EXAMPLES.glob("*.yaml")
    if "kind: TrainingJob" in file.read_text("utf-8") and file != EXAMPLE_SCRIPT
)

TINY: dict[str, Any] = {
    "apiVersion": "spillway.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {
            "config": {
                "architecture": "llama",
                "hiddenSize": 256,
                "numLayers": 4,
                "numHeads": 4,
                "numKeyValueHeads": 2,
                "intermediateSize": 704,
                "vocabSize": 4096,
            }
        },
        "data": {"builtin": "PythonStdlib"},
        "training": {"steps": 100, "sequenceLength": 256, "globalBatchSize": 8, "microBatchSize": 4},
    },
}

LLAMA_70B = {
    "spec.model.config": {
        "architecture": "llama",
        "hiddenSize": 8192,
        "numLayers": 80,
        "numHeads": 64,
        "numKeyValueHeads": 8,
        "intermediateSize": 28672,
        "vocabSize": 128256,
    },
    "spec.training.sequenceLength": 4096,
    "spec.training.globalBatchSize": 64,
    "spec.training.microBatchSize": 1,
    "spec.parallelism": {"devicesPerNode": 8},
}

REMOVED = object()
"""a value that removes the field"""


def document(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """TINY with values set at dotted paths."""
    made = copy.deepcopy(TINY)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        inner = made
        for part in parents:
            inner = inner.setdefault(part, {})
        if value is REMOVED:
            del inner[last]
        else:
            inner[last] = value
    return made


def text(changes: dict[str, Any] | None = None) -> str:
    return yaml.safe_dump(document(changes), sort_keys=False)


def job(changes: dict[str, Any] | None = None) -> TrainingJob:
    return parse_job(text(changes), "job.yaml")


def member(name: str, changes: Mapping[str, Any]) -> Member:
    """A member with its own values, given by dotted field below spec: {"training.seed": 1}."""
    earlier = as_today({"members": [{"name": name, "overrides": dict(changes)}]})
    return Member.model_validate(earlier["members"][0])
