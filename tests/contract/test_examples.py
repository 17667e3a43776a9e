"""Every example is a valid manifest whose plan fits where its comment says it runs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cases.job_documents import EXAMPLE_SCRIPT
from harness.places import ROOT
from spillway.api.load import load_job, parse_job
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import resolve_node
from spillway.planning.planner import make_plan

FOLDER = ROOT / "examples"
NODES = {
    "demo": "cpu",
    "tiny-llama": "cpu",
    "lora": "cpu",
    "lion": "cpu",
    "narrow-moments": "cpu",
    "larger-than-device": "cpu",
    "sweep": "cpu",
    "search": "cpu",
    "shared-base": "cpu",
    "llama-70b": "8xh100",
    "one-pod": "cpu",
    "two-pod": "cpu",
    "gpu": "4xa100-40",
}
"""where each one runs"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def plan_of(name: str) -> MemoryPlan:
    plan = make_plan(load_job(FOLDER / f"{name}.yaml"), resolve_node(NODES[name]))
    assert isinstance(plan, MemoryPlan), plan
    return plan


def test_no_example_is_left_out_here() -> None:
    jobs = {path.stem for path in FOLDER.glob("*.yaml") if documents(path.stem)[-1]["kind"] == "TrainingJob"}
    assert jobs == {*NODES, EXAMPLE_SCRIPT.stem}


@pytest.mark.parametrize("name", NODES)
def test_it_fits_its_budgets(name: str) -> None:
    plan = plan_of(name)
    for tier in Tier:
        assert plan.bytes[tier].total <= plan.budget[tier]


@pytest.mark.parametrize("name", NODES)
def test_the_comment_names_the_file_itself(name: str) -> None:
    comment = [line for line in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    assert f"examples/{name}.yaml" in "\n".join(comment) or name == "demo"


def test_two_pods_use_every_tier_because_the_device_is_too_small_for_them() -> None:
    plan = plan_of("two-pod")
    assert plan.world_size == 2
    assert all(plan.bytes[tier].total > 0 for tier in Tier)
    assert plan.bytes[Tier.NVME].activations > 0
    kept = (FOLDER / "two-pod.yaml").read_text(encoding="utf-8").replace("policy: Nvme", "policy: Keep")
    assert not isinstance(make_plan(parse_job(kept, "kept"), resolve_node("cpu")), MemoryPlan)


def test_the_claim_of_two_pods_is_the_one_that_is_made_for_them() -> None:
    volume, claim = documents("two-pod-claim")
    (job,) = documents("two-pod")
    assert job["spec"]["checkpoint"]["claim"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", ["one-pod", "two-pod"])
def test_jobs_for_a_first_try_need_nothing_but_a_cpu(name: str) -> None:
    (job,) = documents(name)
    assert job["spec"]["parallelism"]["device"] == "Cpu"
    assert job["spec"]["data"] == job["spec"]["data"] | {"builtin": "PythonStdlib"}


def test_the_larger_model_is_four_devices_of_parameters() -> None:
    plan = plan_of("larger-than-device")
    assert sum(plan.bytes[tier].parameters for tier in Tier) >= 4 * plan.budget[Tier.DEVICE]


def test_members_on_one_base_stream_it_once_for_all_of_them() -> None:
    plan = plan_of("shared-base")
    assert {one.base for one in plan.members} == {"slow"}
    assert plan.turns is not None
    assert plan.turns.num_attached == len(plan.members)
    assert plan.parameters.order == "WeightStationary"
