"""What jobs inherit from the OperatorConfig."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from spillway.api.operator_config import OperatorConfigSpec, with_defaults


def config(defaults: dict[str, Any], *presets: dict[str, Any]) -> OperatorConfigSpec:
    return OperatorConfigSpec.model_validate({"jobDefaults": defaults, "networkPresets": presets})


DEFAULTS = config(
    {
        "pod": {
            "image": "registry/trainer:2",
            "imagePullSecrets": [{"name": "pull"}],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "HF_HOME", "value": "/cache"}],
            "securityContext": {"assignedByCluster": True},
        },
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
    "pod.image", "pod.imagePullSecrets", "pod.env", "pod.securityContext", "scheduling.queueName",
    "scheduling.gangWaitSeconds",
    "scheduling.nodeSelector", "scheduling.tolerations",
    "spill.storageClassName",
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {
            "pod": {"image": "", "env": [], "securityContext": {"assignedByCluster": False}},
            "scheduling": {"queueName": "", "gang": "Auto"},
            "spill": {"numVolumes": 1},
        },
    ],
)
def test_job_inherits_what_it_leaves_empty(spec: dict[str, Any]) -> None:
    found, inherited = with_defaults(spec, DEFAULTS)
    assert found["pod"]["image"] == "registry/trainer:2"
    assert [one["name"] for one in found["pod"]["env"]] == ["NCCL_DEBUG", "HF_HOME"]
    assert found["scheduling"]["nodeSelector"] == {"pool": "training", "zone": "a"}
    assert found["scheduling"]["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    assert found["scheduling"]["gangWaitSeconds"] == 900
    assert found["scheduling"].get("gang") == spec.get("scheduling", {}).get("gang")
    assert sorted(inherited) == sorted(ALL)


def test_what_a_job_names_wins_and_lists_are_joined() -> None:
    spec = {
        "pod": {
            "image": "mine",
            "imagePullSecrets": [{"name": "own"}],
            "env": [{"name": "HF_HOME", "value": "/mine"}],
            "securityContext": {"assignedByCluster": True},
        },
        "scheduling": {
            "queueName": "q", "gangWaitSeconds": 60, "nodeSelector": {"zone": "b"}, "tolerations": [{"key": "other"}],
        },
        "spill": {"storageClassName": "slow"},
    }  # fmt: skip
    before = str(spec)
    found, inherited = with_defaults(spec, DEFAULTS)
    assert (found["pod"]["image"], found["spill"], found["scheduling"]["queueName"]) == ("mine", spec["spill"], "q")
    assert [one["name"] for one in found["pod"]["imagePullSecrets"]] == ["own", "pull"]
    assert [(one["name"], one["value"]) for one in found["pod"]["env"]] == [
        ("HF_HOME", "/mine"),
        ("NCCL_DEBUG", "WARN"),
    ]
    assert found["scheduling"]["nodeSelector"] == {"pool": "training", "zone": "b"}
    assert [one["key"] for one in found["scheduling"]["tolerations"]] == ["other", "dedicated"]
    assert sorted(inherited) == ["pod.env", "pod.imagePullSecrets", "scheduling.nodeSelector", "scheduling.tolerations"]
    assert str(spec) == before, "the job itself is left alone"
    assert with_defaults(found, DEFAULTS) == (found, ()), "nothing is inherited twice"


def test_without_defaults_nothing_changes() -> None:
    assert with_defaults({"pod": {"image": ""}}, OperatorConfigSpec()) == ({"pod": {"image": ""}}, ())


@pytest.mark.parametrize("spec", [{"nodeClasses": [{"name": "a"}]}, {"jobDefaults": {"command": ["x"]}}])
def test_config_with_unknown_or_missing_fields_is_invalid(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OperatorConfigSpec.model_validate(spec)


def test_a_network_preset_is_replaced_by_what_it_holds_and_an_unknown_one_stays() -> None:
    infiniband = {
        "name": "ib", "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "A", "value": "preset"}],
        "resources": {"extended": {"rdma/hca": 2}}, "annotations": {"networks": "ib0"}, "hostNetwork": True,
    }  # fmt: skip
    both = config({"pod": {"env": [{"name": "A", "value": "default"}, {"name": "B", "value": "default"}]}}, infiniband)
    spec = {"pod": {"networkPreset": "ib", "env": [{"name": "C", "value": "own"}], "hostNetwork": False}}
    found, inherited = with_defaults(spec, both)
    values = {one["name"]: one["value"] for one in found["pod"].pop("env")}
    assert values == {"C": "own", "NCCL_IB_HCA": "mlx5", "A": "preset", "B": "default"}
    expected = {"resources": {"extended": {"rdma/hca": 2}}, "annotations": {"networks": "ib0"}, "hostNetwork": True}
    assert found == {"pod": expected}
    assert sorted(inherited) == ["pod.annotations", "pod.env", "pod.hostNetwork", "pod.resources"]
    unknown = {"pod": {"networkPreset": "other"}}
    assert with_defaults(unknown, config({}, infiniband)) == (unknown, ())
