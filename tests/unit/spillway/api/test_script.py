"""spec.command: what a job that runs a script has, and what it cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.job_documents import EXAMPLE_SCRIPT, REMOVED, TINY, document
from spillway.api.job_file import JobFile, ScriptFile
from spillway.api.load import job_type, load_for_cluster, load_job
from spillway.api.manifest import validate
from spillway.api.script import (
    COMMAND_IS_EMPTY,
    SCRIPT_ENCRYPTS,
    SCRIPT_IN_CLUSTER,
    SCRIPT_NEEDS_MEMORY,
    SCRIPT_PLANS,
    SCRIPT_SAVES,
    SCRIPT_SHARDS,
    SCRIPT_TRAINS,
    ScriptJob,
)
from spillway.api.training_job import TrainingJob
from spillway.errors import InvalidJob

SCRIPT: dict[str, Any] = {
    "spec.model": REMOVED, "spec.data": REMOVED, "spec.training": REMOVED, "spec.command": ["python", "/code/train.py"],
    "spec.pod": {"resources": {"memory": "1Gi"}, "mounts": [{"path": "/code", "configMap": "code"}]},
}  # fmt: skip


def script(changes: dict[str, Any] | None = None) -> ScriptJob:
    found = document({**SCRIPT, **(changes or {})})
    assert job_type(found) is ScriptJob
    return validate(ScriptJob, found, "script.yaml")


def test_a_script_has_no_model() -> None:
    job = script()
    assert job.spec.command == ("python", "/code/train.py")
    assert job.spec.places == {}


def test_an_empty_command_is_none() -> None:
    """As every job.json of earlier versions has it."""
    found = document({"spec.command": []})
    assert job_type(found) is TrainingJob
    assert validate(TrainingJob, found, "job.yaml") == validate(TrainingJob, document(), "job.yaml")


@pytest.mark.parametrize(
    ("changes", "path", "problem"),
    [
        ({"spec.model": TINY["spec"]["model"]}, "spec.model", SCRIPT_TRAINS),
        ({"spec.members": []}, "spec.members", SCRIPT_TRAINS),
        ({"spec.command": [""]}, "spec.command", COMMAND_IS_EMPTY),
        ({"spec.pod": {}}, "spec.pod.resources.memory", SCRIPT_NEEDS_MEMORY),
        ({"spec.memory": {"mode": "Disabled", "budget": {"host": "1Gi"}}}, "spec.memory.mode", SCRIPT_PLANS),
        ({"spec.memory": {"budget": {"device": "1Gi"}}}, "spec.memory.budget.device", SCRIPT_PLANS),
        ({"spec.memory": {"advanced": {"activations": {"policy": "Keep"}}}}, "spec.memory.advanced", SCRIPT_PLANS),
        ({"spec.memory": {"endurance": {"driveWritesPerDay": "2"}}}, "spec.memory.endurance", SCRIPT_PLANS),
        ({"spec.checkpoint": {"claim": "c", "everySteps": 7}}, "spec.checkpoint.everySteps", SCRIPT_SAVES),
        ({"spec.checkpoint": {"from": {"path": "/run"}}}, "spec.checkpoint.from", SCRIPT_SAVES),
        ({"spec.parallelism": {"strategy": "Fsdp"}}, "spec.parallelism.strategy", SCRIPT_SHARDS),
        ({"spec.spill": {"encryption": "Ephemeral"}}, "spec.spill.encryption", SCRIPT_ENCRYPTS),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("spec") else "",
)
def test_what_a_script_cannot_have_is_named(changes: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        script(changes)
    assert (path, problem) in [(found.path, found.problem) for found in caught.value.problems]


OF_THE_POD = ["/work", "/work/mine", "/tmp/x", "/x/../tmp", "/etc", "/usr", "/run/spillway", "/spill-1", "/var/run/a"]


@pytest.mark.parametrize("path", OF_THE_POD)
def test_the_pods_own_directories_are_not_mounted_over(path: str) -> None:
    with pytest.raises(InvalidJob, match="the pod itself uses this path"):
        script({"spec.pod": {"resources": {"memory": "1Gi"}, "mounts": [{"path": path, "claim": "a"}]}})


@pytest.mark.parametrize("path", ["data", "/data/", "/a//b", "/", "/a:b"])
def test_a_path_has_one_spelling(path: str) -> None:
    with pytest.raises(InvalidJob, match="must match"):
        script({"spec.pod": {"resources": {"memory": "1Gi"}, "mounts": [{"path": path, "claim": "a"}]}})


@pytest.mark.parametrize("path", ["/data", "/worker", "/spillway", "/etc/ssl/mine", "/home/me/tmp", "/a/..b"])
def test_other_directories_are(path: str) -> None:
    pod = {"resources": {"memory": "1Gi"}, "mounts": [{"path": path, "claim": "a", "writable": True}]}
    assert script({"spec.pod": pod}).spec.pod.mounts[0].path == path


def test_a_script_is_submitted_and_not_run_here(tmp_path: Path) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(yaml.safe_dump(document(SCRIPT)))
    assert isinstance(load_for_cluster(file), ScriptJob)
    with pytest.raises(InvalidJob) as caught:
        load_job(file)
    assert [(found.path, found.problem) for found in caught.value.problems] == [("spec.command", SCRIPT_IN_CLUSTER)]


def test_the_example_loads() -> None:
    assert isinstance(load_for_cluster(EXAMPLE_SCRIPT), ScriptJob)


def test_its_job_file_is_another_type() -> None:
    fields = {
        "name": "a", "uid": "u", "epoch": 1, "spec": script().spec, "output_directory": "o", "corpus_directory": "c",
        "checkpoint_directory": "k", "spill_directory": "s", "termination_message_path": "t", "compute_threads": 1,
    }  # fmt: skip
    written = ScriptFile.model_validate(fields).model_dump_json()
    assert ScriptFile.model_validate_json(written).spec.command == ("python", "/code/train.py")
    with pytest.raises(ValueError, match="spec"):
        JobFile.model_validate_json(written)
