"""Which members of a sweep have one frozen base, and how many of them are planned to be attached together."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cases.job_documents import REMOVED, job, member
from spillway.api.sweep.members import member_spec
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.planning.shared_base import bases
from spillway.units import GIB, MIB
from spillway_cli.plan_command import member_table

NODE = local_node(4, 16 * GIB, 16 * GIB, 64 * GIB)
ADAPTERS = {
    "spec.model.config": {"architecture": "gpt2", "hiddenSize": 256, "numLayers": 12, "numHeads": 4, "vocabSize": 4096},
    "spec.model.lora": {"rank": 4},
}
RATES = [{"training.optimizer.learningRate": f"{index + 1}e-4"} for index in range(8)]


def sweep(*overrides: Mapping[str, str], **changes: object) -> TrainingJob:
    made = job({name: one for name, one in {**ADAPTERS, **changes}.items() if one is not None})
    members = tuple(member(f"m{index}", one) for index, one in enumerate(overrides))
    return made.model_copy(update={"spec": made.spec.model_copy(update={"members": members})})


def bases_of(asked: TrainingJob) -> dict[str, tuple[str, ...]]:
    return bases({one.name: member_spec(asked.spec, one) for one in asked.spec.members})


def planned(asked: TrainingJob) -> MemoryPlan:
    plan = make_plan(asked, NODE)
    assert isinstance(plan, MemoryPlan), plan
    return plan


def budget(device: int, host: int = GIB) -> dict[str, object]:
    return {"spec.memory.budget": {"device": device, "host": host, "nvme": 8 * GIB}}


def test_adapters_share_one_base_whatever_their_rates_ranks_and_steps() -> None:
    several = [*RATES[:2], {"model.lora.rank": "16"}, {"training.steps": "7"}, {"training.schedule.name": "Constant"}]
    assert bases_of(sweep(*several)) == {"m0": ("m0", "m1", "m2", "m3", "m4")}


def test_two_models_below_adapters_are_two_bases() -> None:
    deeper = {"model.config.numLayers": "6"}
    assert bases_of(sweep({}, deeper, RATES[0], {**deeper, **RATES[1]})) == {"m0": ("m0", "m2"), "m1": ("m1", "m3")}


@pytest.mark.parametrize(
    "other",
    [
        {"training.seed": "3"},
        {"training.microBatchSize": "2"},
        {"training.optimizer.name": "Lion"},
        {"model.precision.compute": "float32"},
        {"training.sequenceLength": "32"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_settings_that_change_frozen_values_or_step_shape_split_the_base(other: dict[str, str]) -> None:
    """A seed draws the values of a model that has no source."""
    assert bases_of(sweep({}, other)) == {}


def test_the_values_of_a_source_do_not_depend_on_the_seed() -> None:
    asked = sweep(
        {}, {"training.seed": "3"}, **{"spec.model.config": REMOVED, "spec.model.source": {"path": "/models"}}
    )
    assert bases_of(asked) == {"m0": ("m0", "m1")}


def test_models_that_are_trained_whole_share_nothing() -> None:
    assert bases_of(sweep(*RATES, **{"spec.model.lora": None})) == {}


def test_members_that_all_fit_attach_together_and_count_the_base_once() -> None:
    alone, of_eight = (planned(sweep(*rates, **budget(GIB))) for rates in (RATES[:1], RATES))
    assert of_eight.turns is not None
    assert of_eight.turns.num_attached == 8
    assert {one.base for one in of_eight.members} == {"m0"}
    base_bytes = 2 * (4096 * 256 + 12 * 12 * 256 * 256)
    more = of_eight.bytes[Tier.DEVICE].total - alone.bytes[Tier.DEVICE].total
    assert more < base_bytes


def test_streamed_members_on_one_base_load_it_once_a_round() -> None:
    streamed = {"spec.memory.advanced.parameters": {"placement": "Stream"}, **budget(GIB)}
    alone, shared = (planned(sweep(*rates, **streamed)).members[0] for rates in (RATES[:1], RATES))
    assert shared.num_attached > 1
    assert shared.plan.parameters.order == "WeightStationary"
    loaded = alone.plan.prediction.link_bytes["h2d"]
    assert loaded > 0
    assert shared.num_attached * shared.plan.prediction.link_bytes["h2d"] <= loaded


def test_where_not_all_fit_fewer_are_attached_together() -> None:
    sizes = [planned(sweep(*RATES, **budget(device))).members[0].num_attached for device in (64 * MIB, GIB)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(RATES)
    assert sizes[0] < len(RATES)


def test_each_members_micro_batches_are_its_own() -> None:
    alone, of_eight = (planned(sweep(*rates, **budget(GIB))) for rates in (RATES[:1], RATES))
    assert {one.plan.num_micro_batches for one in of_eight.members} == {alone.members[0].plan.num_micro_batches}


def test_the_plan_stays_within_the_budgets() -> None:
    for device in (64 * MIB, 80 * MIB, GIB):
        plan = planned(sweep(*RATES, **budget(device)))
        for tier in Tier:
            assert plan.bytes[tier].total <= plan.budget[tier]
        assert plan.budget[Tier.DEVICE] == device


def test_the_view_shows_the_base_and_the_reasons_say_who_shares_it() -> None:
    plan = planned(sweep(*RATES[:2], **budget(GIB)))
    assert [column.header for column in member_table(plan).columns][-1] == "base"
    assert any(
        reason.startswith("m0, m1 share a frozen base model: 2 of them train together") for reason in plan.reasons
    )


def test_without_members_that_share_the_view_has_no_such_column() -> None:
    plan = planned(sweep(*RATES[:2], **budget(GIB), **{"spec.model.lora": None}))
    assert [column.header for column in member_table(plan).columns][-1] == "alone"
