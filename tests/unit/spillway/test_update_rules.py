"""What the optimizers keep, move and are told: the facts that planner and trainer go by."""

from __future__ import annotations

from math import ceil
from typing import Any, get_args

import pytest
import torch

from cases.job_documents import job
from spillway.api.training import Optimizer
from spillway.errors import UserError
from spillway.feedback.profiles import memory_fingerprint
from spillway.parameter_groups import Group
from spillway.plan import MemoryPlan, OptimizerPlan, Tier
from spillway.planning.footprint import states_bytes_per_parameter
from spillway.planning.hardware import NodeSpec, resolve_node
from spillway.planning.model_shape import model_shape
from spillway.planning.planner import make_plan
from spillway.planning.step_time import QUANTIZING_BYTES, Resource, rank_rates, update_loads
from spillway.planning.workload import Workload
from spillway.units import MIB
from spillway.update_rules import RULE_FIELDS, MomentType, UpdateRule
from spillway_trainer.config import hyperparameters
from spillway_trainer.kernels.reference import rounded
from spillway_trainer.models.build import build_model
from spillway_trainer.optimizer.plain import Hyperparameters

OPTIMIZER = "spec.training.optimizer"
NODE, CPU = resolve_node("8xh100"), resolve_node("cpu")
WIDE = {UpdateRule.ADAMW, UpdateRule.ADAM}
"""two moments; the others have one"""


def told(**fields: Any) -> Hyperparameters:
    spec = job({OPTIMIZER: fields}).spec
    return hyperparameters(spec, build_model(spec))


def test_the_manifest_names_exactly_the_rules_that_there_are() -> None:
    assert set(get_args(Optimizer.model_fields["name"].annotation)) == set(UpdateRule)
    for rule in UpdateRule:
        assert set(rule.defaults) <= {"weightDecay", *RULE_FIELDS}


def test_optimizer_defaults_are_explicit_so_older_job_files_mean_the_same() -> None:
    before = {"name": "AdamW", "learningRate": "0.0003", "betas": ["0.9", "0.95"], "eps": "1e-08", "weightDecay": "0.1"}
    assert job({OPTIMIZER: before}).spec == job().spec
    assert job({OPTIMIZER: {"betas": None, "weightDecay": None}}).spec == job().spec
    assert job().spec.training.model_dump(mode="json")["optimizer"]["betas"] == ["0.9", "0.95"]


@pytest.mark.parametrize(
    ("name", "betas", "weight_decay"),
    [("AdamW", (0.9, 0.95), 0.1), ("Adam", (0.9, 0.95), 0.0), ("Lion", (0.9, 0.99), 0.1)],
)
def test_defaults_of_betas_and_decay_depend_on_the_name(
    name: str, betas: tuple[float, float], weight_decay: float
) -> None:
    found = told(name=name)
    assert (found.rule, found.beta1, found.beta2, found.weight_decay) == (name, *betas, weight_decay)


def test_what_is_given_is_what_the_trainer_uses_zeros_too() -> None:
    assert told(name="SgdMomentum").momentum == 0.9
    assert told(name="SgdMomentum", momentum="0").momentum == 0.0
    assert told(weightDecay="0").weight_decay == 0.0
    assert told(name="Lion", betas=["0", "0.5"]).beta2 == 0.5
    assert told(eps="1e-6").eps == 1e-6


def test_groups_reach_the_trainer_in_their_order() -> None:
    groups = [{"match": "*norm*", "weightDecay": "0"}, {"match": "layers.0.*", "learningRateFactor": "0.5"}]
    found = told(groups=groups).groups
    assert found["layers.0.input_layernorm.weight"] == found["head.norm.weight"] == Group("*norm*", 1.0, 0.0)
    assert found["layers.0.mlp.up_proj.weight"] == Group("layers.0.*", 0.5, None)
    assert "layers.1.mlp.up_proj.weight" not in found


def test_group_that_matches_no_trained_parameter_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"groups\[0\]\.match = layers\.9\.\*: matches no trained parameter; .*layers\."
    ):
        told(groups=[{"match": "layers.9.*"}])
    spec = job({f"{OPTIMIZER}.groups": [{"match": "embed_tokens.*"}]}).spec
    model = build_model(spec)
    assert hyperparameters(spec, model).groups
    model.get_parameter("embed_tokens.weight").requires_grad_(False)
    with pytest.raises(UserError, match="matches no trained parameter"):
        hyperparameters(spec, model)


BYTES = {
    MomentType.FLOAT32: {True: (28, 12, 8), False: (20, 8, 4)},
    MomentType.BFLOAT16: {True: (20, 8, 4), False: (16, 6, 2)},
    MomentType.INT8: {True: (16.0625, 6.03125, 2.03125), False: (14.03125, 5.015625, 1.015625)},
}
"""moved by an update, states with a master and without, of a parameter; whether there are two moments"""


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
def test_an_update_reads_the_gradient_and_reads_and_writes_every_state(rule: UpdateRule, moments: MomentType) -> None:
    moved, states, without_master = BYTES[moments][rule in WIDE]
    assert rule.update_bytes(moments) == moved
    assert rule.states_bytes(True, moments) == states
    assert rule.states_bytes(False, moments) == without_master


def workload(compute: str, rule: UpdateRule, moments: MomentType) -> Workload:
    return Workload(model_shape(job().spec.model.transformer, compute), 4, 256, 2, rule=rule, moments=moments)


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
@pytest.mark.parametrize(("compute", "on_device"), [("bfloat16", True), ("float32", False)])
def test_predicted_states_and_seconds_are_the_rules(
    compute: str, on_device: bool, rule: UpdateRule, moments: MomentType
) -> None:
    work = workload(compute, rule, moments)
    assert states_bytes_per_parameter(work, on_cpu=True) == rule.states_bytes(True, moments)
    assert states_bytes_per_parameter(work, on_cpu=False) == rule.states_bytes(on_device, moments)
    num_parameters, rates = work.shape.num_trained, rank_rates(resolve_node("8xh100"), 1, 1, compute)
    loads = update_loads(work, rates, OptimizerPlan(cpu_share=1.0, resident_share=0.0))
    moved = rule.update_bytes(moments) + (2 if compute == "bfloat16" else 4)
    if moments is MomentType.INT8:  # is computed with, beside
        moved += QUANTIZING_BYTES * len(rule.moments)
    assert loads[Resource.CPU] * rates.cpu == pytest.approx(moved * num_parameters)


def planned(name: str, moments: str = "float32", node: NodeSpec = NODE) -> MemoryPlan:
    on_device = {"spec.memory.advanced.optimizer.placement": "Device"}
    decided = make_plan(job(on_device | {OPTIMIZER: {"name": name, "moments": moments}}), node)
    assert isinstance(decided, MemoryPlan)
    return decided


def test_a_plan_counts_the_states_of_its_rule() -> None:
    held = {rule: planned(rule.value).bytes[Tier.DEVICE].optimizer_states for rule in UpdateRule}
    assert held[UpdateRule.ADAMW] == held[UpdateRule.ADAM]
    assert held[UpdateRule.LION] == held[UpdateRule.SGD_MOMENTUM] == held[UpdateRule.ADAMW] * 8 // 12


def test_a_plan_counts_the_bytes_of_the_declared_moments() -> None:
    held = {kind: planned("AdamW", kind.value, CPU).bytes[Tier.DEVICE].optimizer_states for kind in MomentType}
    assert held[MomentType.BFLOAT16] == held[MomentType.FLOAT32] * 8 // 12
    shape = model_shape(job().spec.model.transformer, "bfloat16")
    short_blocks = held[MomentType.INT8] - ceil(held[MomentType.FLOAT32] * 6.03125 / 12)
    assert short_blocks == 2 * 4 * shape.num_tensors


def test_int8_moments_are_planned_for_gpus_and_ranks_that_divide_nothing() -> None:
    assert planned("AdamW", "int8").device == "Cuda"
    ranks = {"spec.parallelism": {"devicesPerNode": 2}, f"{OPTIMIZER}.moments": "int8"}
    decided = make_plan(job(ranks), CPU)
    assert isinstance(decided, MemoryPlan)
    assert decided.strategy == "Ddp"


def test_small_budget_never_narrows_float32_moments_automatically() -> None:
    on_device = {
        "spec.memory.advanced.optimizer.placement": "Device",
        "spec.memory.advanced.activations.policy": "Keep",
    }
    roomy = make_plan(job(on_device | {f"{OPTIMIZER}.moments": "bfloat16"}), NODE)
    assert isinstance(roomy, MemoryPlan)
    budget = {"device": f"{roomy.bytes[Tier.DEVICE].total // MIB + 1}Mi"}
    decided = [
        make_plan(job(on_device | {"spec.memory.budget": budget, f"{OPTIMIZER}.moments": kind}), NODE)
        for kind in ("float32", "bfloat16")
    ]
    assert [type(found).__name__ for found in decided] == ["Infeasible", "MemoryPlan"]


def test_a_mean_that_rounding_would_hold_is_rejected() -> None:
    assert told(moments="bfloat16", betas=["0.9", "0.99609375"]).beta2 == 0.99609375
    for fields in (
        {"betas": ["0.9", "0.999"]},
        {"betas": ["0.998", "0.95"]},
        {"name": "Lion", "betas": ["0.9", "0.999"]},
        {"name": "SgdMomentum", "momentum": "0.999"},
    ):
        assert told(**fields)
        with pytest.raises(UserError, match="too large for moments: bfloat16"):
            told(moments="bfloat16", **fields)
    assert told(name="Lion", betas=["0.999", "0.99"], moments="bfloat16").beta1 == 0.999


def test_what_rounding_would_hold_is_what_is_rejected() -> None:
    """Every bfloat16 from 1 to 2, kept by the factor for a step and rounded: all shrink at the bound, and one stays a
    hundredth beyond it."""
    values = (torch.arange(128) / 128 + 1).bfloat16()

    def stays(kept: float) -> bool:
        return bool((rounded(values.float() * kept, torch.bfloat16) == values).any())

    most = MomentType.BFLOAT16.most_kept
    assert (stays(most), stays(1 - (1 - most) / 1.01)) == (False, True)


def test_peaks_observed_with_one_number_of_states_apply_to_no_other() -> None:
    specs = {rule: job({OPTIMIZER: {"name": rule.value}}).spec for rule in UpdateRule}
    digests = {rule: memory_fingerprint(spec, planned("AdamW")) for rule, spec in specs.items()}
    assert digests[UpdateRule.ADAM] == digests[UpdateRule.ADAMW]
    assert len(set(digests.values())) == 3
    narrow = job({f"{OPTIMIZER}.moments": "bfloat16"}).spec
    assert memory_fingerprint(narrow, planned("AdamW")) not in set(digests.values())
