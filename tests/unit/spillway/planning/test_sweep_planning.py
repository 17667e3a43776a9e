"""A sweep of many members is planned as quickly as the operator's loop allows, and fits into its ConfigMap."""

from __future__ import annotations

import re
from math import ceil

import pytest

from cases.job_documents import job, member
from spillway.api.field_types import MAX_MEMBERS
from spillway.api.training_job import TrainingJob
from spillway.errors import UserError
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning import model_shape, planner
from spillway.planning.explain import lacking
from spillway.planning.hardware import local_node, resolve_node
from spillway.planning.planner import Overrides, make_plan, shared_memory
from spillway.planning.sweep_plan import SECONDS_PER_PARKED_BYTE, SECONDS_PER_TENSOR
from spillway.planning.workload import PAGE_BYTES, padded
from spillway.units import GIB, MIB, format_bytes, parse_quantity
from spillway_operator.decide.manifests import LARGEST_CONTRACT

NODE = local_node(4, 16 * GIB, 16 * GIB, 64 * GIB)
GRID = [
    {"training.seed": str(index), "training.optimizer.learningRate": f"{index + 1}e-5", "training.schedule.name": name}
    for index, name in zip(range(MAX_MEMBERS), ["Cosine", "Constant"] * MAX_MEMBERS, strict=False)
]


def sweep(*overrides: dict[str, str], **changes: object) -> TrainingJob:
    made = job(changes)
    members = tuple(member(f"m{index}", one) for index, one in enumerate(overrides))
    return made.model_copy(update={"spec": made.spec.model_copy(update={"members": members})})


def planned(asked: TrainingJob) -> MemoryPlan | Infeasible:
    return make_plan(asked, NODE, shared_memory(asked, 16 * GIB, 1))


def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs that are planned from now on."""
    found: list[str] = []
    plan = planner._plan_of_one

    def counted(asked: TrainingJob, *rest: object, **more: object) -> object:
        found.append(asked.metadata.name)
        return plan(asked, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "_plan_of_one", counted)
    return found


def test_members_that_differ_in_rates_schedules_and_seeds_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = searches(monkeypatch)
    planned(sweep(*GRID))
    assert len(made) == 1


def test_members_that_differ_in_anything_else_are_planned_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = searches(monkeypatch)
    planned(sweep({}, {"training.microBatchSize": "2"}, {"training.optimizer.name": "Lion"}, {"training.steps": "7"}))
    assert len(made) == 4


def test_a_shared_plan_is_the_one_that_each_member_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sweep(*GRID[:3], {"training.optimizer.name": "Lion"})
    shared = planned(asked)
    monkeypatch.setattr(planner, "NOT_PLANNED_FOR", {})
    assert shared == planned(asked)


def test_members_of_64_shapes_take_their_shapes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time for the plan, where they are known."""
    model_shape.model_shape.cache_clear()
    planned(sweep(*({"model.config.intermediateSize": str(64 * index)} for index in range(1, MAX_MEMBERS + 1))))
    assert model_shape.model_shape.cache_info().misses <= MAX_MEMBERS + 1


def test_a_reason_of_several_members_is_said_once_with_their_names() -> None:
    plan = planned(sweep({}, {"training.seed": "1"}, {"training.microBatchSize": "2"}))
    assert isinstance(plan, MemoryPlan)
    own = [reason.partition(": ") for reason in plan.reasons[1:]]
    said = {(name, text) for names, _, text in own for name in names.replace("all members", "m0, m1, m2").split(", ")}
    assert said == {(one.name, reason) for one in plan.members for reason in one.plan.reasons}
    assert len({text for _, _, text in own}) == len(own)
    assert {names for names, _, _ in own} >= {"m0, m1", "m2"}


def test_a_sweep_is_planned_for_one_gpu_of_a_node() -> None:
    found = make_plan(sweep({}, {"training.seed": "1"}), resolve_node("8xh100"))
    assert isinstance(found, MemoryPlan)
    assert {found.device, *(one.plan.device for one in found.members)} == {"Cuda"}


def on_devices(num_devices: int, num_members: int) -> TrainingJob:
    steps = [{"training.steps": str(1_000_000 + 50 * index)} for index in range(num_members)]
    asked = sweep(*steps)
    parallelism = asked.spec.parallelism.model_copy(update={"devices_per_node": num_devices})
    return asked.model_copy(update={"spec": asked.spec.model_copy(update={"parallelism": parallelism})})


def test_each_of_several_devices_has_a_members_bytes_and_its_part_of_parked_states() -> None:
    one, two = (make_plan(on_devices(number, 4), resolve_node("8xh100")) for number in (1, 2))
    assert isinstance(one, MemoryPlan) and isinstance(two, MemoryPlan)
    assert one.turns and two.turns
    assert (two.turns.policy, two.turns.num_devices, two.world_size) == ("LongestFirst", 2, 1)
    assert two.bytes[Tier.DEVICE] == one.bytes[Tier.DEVICE]
    parked = sum(member.parked_bytes for member in two.members)
    of_members = max(member.plan.bytes[Tier.NVME].optimizer_states for member in two.members)
    assert one.bytes[Tier.NVME].optimizer_states == of_members + parked
    assert two.bytes[Tier.NVME].optimizer_states == of_members + padded(ceil(parked / 2), PAGE_BYTES)
    assert two.turns.seconds < one.turns.seconds
    assert two.turns.bound_seconds <= two.turns.seconds
    # The sweep takes less than a day: each device parks half of it, on its half of the drives.
    assert two.prediction.nvme_written_bytes_per_day == pytest.approx(one.prediction.nvme_written_bytes_per_day / 2)
    assert two.prediction.drive_writes_per_day == pytest.approx(one.prediction.drive_writes_per_day)


def test_members_on_two_devices_of_a_cpu_share_its_memory_and_cores() -> None:
    asked = on_devices(2, 4)
    found = make_plan(asked, NODE, shared_memory(asked, 16 * GIB, 2))
    assert isinstance(found, MemoryPlan)
    alone = planned(on_devices(1, 4))
    assert isinstance(alone, MemoryPlan)
    assert found.budget[Tier.DEVICE] <= alone.budget[Tier.DEVICE] // 2
    steps = [one.members[0].plan.prediction.step_seconds for one in (alone, found)]
    assert steps[1] > steps[0]


@pytest.mark.parametrize(
    ("num_devices", "changes", "problem"),
    [
        (3, {}, "spec.parallelism.devicesPerNode = 3: .*use at most 2"),
        (
            2,
            {"encryption": "Ephemeral"},
            "spec.spill.encryption = Ephemeral: paused members are stored in one spill file",
        ),
    ],
)
def test_devices_that_members_cannot_use_are_an_error(num_devices: int, changes: dict[str, str], problem: str) -> None:
    """Also where the number of devices is that of a local run."""
    asked = on_devices(1, 2)
    spill = asked.spec.spill.model_copy(update=changes)
    asked = asked.model_copy(update={"spec": asked.spec.model_copy(update={"spill": spill})})
    with pytest.raises(UserError, match=problem):
        make_plan(asked, NODE, Overrides(world_size=num_devices))


def test_a_turn_costs_states_out_and_in_and_a_model_made_anew() -> None:
    found = planned(sweep({}, {"model.config.numLayers": "8"}))
    assert isinstance(found, MemoryPlan)
    for one in found.members:
        disk = one.parked_bytes * (1 / NODE.nvme_write_bytes_per_second + 1 / NODE.nvme_read_bytes_per_second)
        memory = one.parked_bytes * SECONDS_PER_PARKED_BYTE
        num_tensors = 9 * (one.plan.num_segments - 2) + 3
        assert one.parking_seconds == pytest.approx(disk + memory + num_tensors * SECONDS_PER_TENSOR)


def test_segment_that_fits_no_device_is_named_with_its_member_and_size() -> None:
    wide = {"model.config.vocabSize": "65536"}
    found = planned(sweep(wide, {}, **{"spec.memory.budget": {"device": 16 * MIB, "host": 4 * GIB, "nvme": 60 * GIB}}))
    assert isinstance(found, Infeasible)
    assert found.job == "member m0 of tiny"
    assert found.segment == "the parameters of segment head alone take 32.0 MiB; the device budget is 16.0 MiB"
    assert found.segment in lacking(found, "this machine")


def test_the_budget_that_is_suggested_for_a_member_fits() -> None:
    """It includes what is reserved for parked members: more than what was missing."""
    on_nvme = {"spec.memory.advanced.optimizer.placement": "Nvme"}
    members = [{"training.seed": str(seed), "training.globalBatchSize": str(8 * seed)} for seed in range(1, 5)]
    fits = planned(sweep(*members, **on_nvme))
    assert isinstance(fits, MemoryPlan)
    nvme = sum(one.parked_bytes for one in fits.members) + 2 * MIB

    def with_budget(nvme: int | str) -> MemoryPlan | Infeasible:
        return planned(sweep(*members, **on_nvme, **{"spec.memory.budget.nvme": nvme}))

    found = with_budget(nvme)
    assert isinstance(found, Infeasible)
    amount, parked = re.findall(
        r"spec.memory.budget.nvme: (\w+) \(with ([0-9.]+ MiB) for parked members\)", found.nearest
    )[0]
    assert parked == format_bytes(nvme - 2 * MIB)
    assert isinstance(with_budget(amount), MemoryPlan)
    assert parse_quantity(amount) < 1.02 * (nvme + found.missing_bytes[Tier.NVME]) + MIB


@pytest.mark.ci
def test_a_member_that_does_not_fit_is_explained() -> None:
    large = {"model.config.hiddenSize": "4096", "model.config.numLayers": "32"}
    found = planned(
        sweep({}, large, **{"spec.memory.budget": {"device": 64 * MIB, "host": 64 * MIB, "nvme": 60 * GIB}})
    )
    assert isinstance(found, Infeasible)
    assert "m1" in found.job
    assert found.nearest


def test_the_largest_sweep_fits_into_a_config_map() -> None:
    asked = sweep(*({**one, "training.steps": str(100 + index)} for index, one in enumerate(GRID)))
    found = planned(asked)
    assert isinstance(found, MemoryPlan)
    assert len(found.members) == MAX_MEMBERS
    assert len(found.model_dump_json()) + len(asked.model_dump_json()) < LARGEST_CONTRACT / 4
