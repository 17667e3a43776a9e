"""What jobs inherit from the OperatorConfig."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from spillway.api.operator_config import JobDefaults, OperatorConfigSpec, with_defaults

DEFAULTS = JobDefaults.model_validate(
    {
        "image": "registry/trainer:2",
        "imagePullSecrets": [{"name": "pull"}],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HF_HOME", "value": "/cache"}],
        "scheduling": {
            "queueName": "default-queue",
            "gangWaitSeconds": 900,
            "nodeSelector": {"pool": "training", "zone": "a"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        },
        "spill": {"storageClassName": "local-nvme"},
    }
)
ALL = (
    "image", "imagePullSecrets", "env", "scheduling.queueName", "scheduling.gangWaitSeconds", "scheduling.nodeSelector",
    "scheduling.tolerations", "spill.storageClassName",
)  # fmt: skip


@pytest.mark.parametrize(
    "spec", [{}, {"image": "", "env": [], "scheduling": {"queueName": "", "gang": "Auto"}, "spill": {"numVolumes": 1}}]
)
def test_job_inherits_what_it_leaves_empty(spec: dict[str, Any]) -> None:
    found, inherited = with_defaults(spec, DEFAULTS)
    assert found["image"] == "registry/trainer:2"
    assert [one["name"] for one in found["env"]] == ["NCCL_DEBUG", "HF_HOME"]
    assert found["scheduling"]["nodeSelector"] == {"pool": "training", "zone": "a"}
    assert found["scheduling"]["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    assert found["scheduling"]["gangWaitSeconds"] == 900
    assert found["scheduling"].get("gang") == spec.get("scheduling", {}).get("gang")
    assert sorted(inherited) == sorted(ALL)


def test_what_a_job_names_wins_and_lists_are_joined() -> None:
    spec = {
        "image": "mine",
        "imagePullSecrets": [{"name": "own"}],
        "env": [{"name": "HF_HOME", "value": "/mine"}],
        "scheduling": {
            "queueName": "q", "gangWaitSeconds": 0, "nodeSelector": {"zone": "b"}, "tolerations": [{"key": "other"}],
        },
        "spill": {"storageClassName": "slow"},
    }  # fmt: skip
    before = str(spec)
    found, inherited = with_defaults(spec, DEFAULTS)
    assert (found["image"], found["spill"], found["scheduling"]["queueName"]) == ("mine", spec["spill"], "q")
    assert found["scheduling"]["gangWaitSeconds"] == 0, "no limit is a value, too"
    assert [one["name"] for one in found["imagePullSecrets"]] == ["own", "pull"]
    assert [(one["name"], one["value"]) for one in found["env"]] == [("HF_HOME", "/mine"), ("NCCL_DEBUG", "WARN")]
    assert found["scheduling"]["nodeSelector"] == {"pool": "training", "zone": "b"}
    assert [one["key"] for one in found["scheduling"]["tolerations"]] == ["other", "dedicated"]
    assert sorted(inherited) == ["env", "imagePullSecrets", "scheduling.nodeSelector", "scheduling.tolerations"]
    assert str(spec) == before, "the job itself is left alone"
    assert with_defaults(found, DEFAULTS) == (found, ()), "nothing is inherited twice"


def test_without_defaults_nothing_changes() -> None:
    assert with_defaults({"image": ""}, JobDefaults()) == ({"image": ""}, ())


@pytest.mark.parametrize("spec", [{"nodeClasses": [{"name": "a"}]}, {"jobDefaults": {"command": ["x"]}}])
def test_config_with_unknown_or_missing_fields_is_invalid(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OperatorConfigSpec.model_validate(spec)
