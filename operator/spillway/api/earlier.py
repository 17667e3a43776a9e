"""Specs written for earlier versions of the schema (docs/api-versions.md lists what changed).

New manifests that use an earlier field are rejected with a message that names the new one. Objects that are stored in a
cluster, and job.json of running attempts, are converted to today's fields when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml

MOVED = {
    "image": "pod.image",
    "imagePullSecrets": "pod.imagePullSecrets",
    "env": "pod.env",
    "resources": "pod.resources",
    "resourceName": "pod.resourceName",
    "runtimeClassName": "pod.runtimeClassName",
    "podOverrides": "pod",
    "memory.optimizer": "memory.advanced.optimizer",
    "memory.activations": "memory.advanced.activations",
    "memory.parameters": "memory.advanced.parameters",
}
"""Field of spec -> where it is now. podOverrides.labels is pod.labels, and so on."""
HUGGING_FACE = "data.huggingFace"
"""Field of spec that no run ever honoured."""
HUGGING_FACE_INSTEAD = (
    "write data.text or data.chat with fetch: {uri: hf://datasets/organisation/name}; to choose a split or other "
    "columns, load the data in a function of your own (data.entrypoint)"
)
OVERRIDES = "write the fields of the member directly, as in spec; for example training: {seed: 1}"
"""What to write instead of members[].overrides, which was a map such as {"training.seed": "1"}."""
_NO_LIMIT = ("lifecycle.activeDeadlineSeconds", "lifecycle.pendingDeadlineSeconds", "objective.halving")
"""Fields in which 0 had the meaning that leaving them out has now."""
_NEVER_SECONDS = 10**9
"""Today's value for stallSeconds: 0, which meant never."""


def problem_of_earlier(path: str) -> str | None:
    """Returns what to do about a field of an earlier schema; `path` is below spec. None if there never was such a
    field."""
    if path in MOVED:
        return f"moved to spec.{MOVED[path]}"
    if path == HUGGING_FACE:
        return HUGGING_FACE_INSTEAD
    return OVERRIDES if path.startswith("members[") and path.endswith("].overrides") else None


def as_today(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an unvalidated spec of any version to today's fields. A value at a new place wins over one at the old
    place."""
    if not _is_earlier(spec):
        return dict(spec)
    made = deepcopy(dict(spec))
    for old, new in MOVED.items():
        owner, _, name = old.rpartition(".")
        if isinstance(parent := _at(made, owner), dict) and (value := parent.pop(name, None)) not in (None, "", [], {}):
            join(made, new.split("."), value)
    for path in _NO_LIMIT:
        owner, _, name = path.rpartition(".")
        if isinstance(parent := _at(made, owner), dict) and parent.get(name) == 0:
            del parent[name]
    if isinstance(lifecycle := made.get("lifecycle"), dict) and lifecycle.get("stallSeconds") == 0:
        lifecycle["stallSeconds"] = _NEVER_SECONDS
    members = made.get("members")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, dict) and isinstance(overrides := member.pop("overrides", None), dict):
            for path, text in overrides.items():
                join(member, path.split("."), _value_of(text) if isinstance(text, str) else text)
    return made


def _is_earlier(spec: Mapping[str, Any]) -> bool:
    zeros = (*_NO_LIMIT, "lifecycle.stallSeconds")
    members = spec.get("members")
    return (
        any(_at(spec, path) is not None for path in MOVED)
        or any(_at(spec, path) == 0 for path in zeros)
        or any("overrides" in one for one in (members if isinstance(members, list) else ()) if isinstance(one, dict))
    )


def _at(spec: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        spec = spec.get(name) if isinstance(spec, Mapping) else None
    return spec


def _value_of(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def join(spec: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets `value` at `path`. Maps are merged; any other value that is already there stays."""
    name, *rest = path
    if rest:
        if not isinstance(spec.get(name), dict):
            spec[name] = {}
        join(spec[name], rest, value)
    elif isinstance(value, dict) and isinstance(known := spec.get(name), dict):
        for inner, one in value.items():
            join(known, [inner], one)
    else:
        spec.setdefault(name, value)
