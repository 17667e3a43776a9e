"""What the optimizers keep, move and are told: the facts that planner and trainer go by."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from job_documents import job

from spillway.api import Optimizer
from spillway.errors import UserError
from spillway.footprint import Workload, states_bytes_per_parameter
from spillway.hardware import resolve_node
from spillway.model_shape import model_shape
from spillway.parameter_groups import Group
from spillway.plan import MemoryPlan, OptimizerPlan, Tier
from spillway.planner import make_plan
from spillway.profiles import memory_fingerprint
from spillway.step_time import Resource, rank_rates, update_loads
from spillway.update_rules import RULE_FIELDS, UpdateRule
from spillway_trainer.config import hyperparameters
from spillway_trainer.models.build import build_model
from spillway_trainer.optimizer import Hyperparameters

OPTIMIZER = "spec.training.optimizer"
WIDE = {UpdateRule.ADAMW, UpdateRule.ADAM}
"""two moments; the others have one"""


def told(**fields: Any) -> Hyperparameters:
    spec = job({OPTIMIZER: fields}).spec
    return hyperparameters(spec, build_model(spec))


def test_the_manifest_names_exactly_the_rules_that_there_are() -> None:
    assert set(get_args(Optimizer.model_fields["name"].annotation)) == set(UpdateRule)
    for rule in UpdateRule:
        assert set(rule.defaults) <= {"weightDecay", *RULE_FIELDS}


def test_defaults_are_written_down_so_a_job_file_of_before_other_rules_is_the_same_job() -> None:
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


def test_a_group_that_no_trained_parameter_of_the_model_belongs_to_is_refused() -> None:
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


@pytest.mark.parametrize("rule", UpdateRule)
def test_an_update_reads_the_gradient_and_reads_and_writes_every_state(rule: UpdateRule) -> None:
    assert rule.update_bytes == (28 if rule in WIDE else 20)
    assert rule.states_bytes(has_master=True) == (12 if rule in WIDE else 8)
    assert rule.states_bytes(has_master=False) == (8 if rule in WIDE else 4)


def workload(compute: str, rule: UpdateRule) -> Workload:
    return Workload(model_shape(job().spec.model.transformer, compute), 4, 256, 2, rule=rule)


@pytest.mark.parametrize("rule", UpdateRule)
@pytest.mark.parametrize(("compute", "on_device"), [("bfloat16", True), ("float32", False)])
def test_predicted_states_and_seconds_are_the_rules(compute: str, on_device: bool, rule: UpdateRule) -> None:
    work = workload(compute, rule)
    assert states_bytes_per_parameter(work, on_cpu=True) == rule.states_bytes(has_master=True)
    assert states_bytes_per_parameter(work, on_cpu=False) == rule.states_bytes(has_master=on_device)
    num_parameters, rates = work.shape.num_trained, rank_rates(resolve_node("8xh100"), 1, 1, compute)
    loads = update_loads(work, rates, OptimizerPlan(cpu_share=1.0, resident_share=0.0))
    moved = rule.update_bytes + (2 if compute == "bfloat16" else 4)
    assert loads[Resource.CPU] * rates.cpu == pytest.approx(moved * num_parameters)


def planned(name: str) -> MemoryPlan:
    decided = make_plan(job({OPTIMIZER: {"name": name}}), resolve_node("8xh100"))
    assert isinstance(decided, MemoryPlan)
    return decided


def test_a_plan_counts_the_states_of_its_rule() -> None:
    held = {rule: planned(rule.value).bytes[Tier.DEVICE].optimizer_states for rule in UpdateRule}
    assert held[UpdateRule.ADAMW] == held[UpdateRule.ADAM]
    assert held[UpdateRule.LION] == held[UpdateRule.SGD_MOMENTUM] == held[UpdateRule.ADAMW] * 8 // 12


def test_what_was_observed_of_one_number_of_states_is_nothing_known_of_another() -> None:
    specs = {rule: job({OPTIMIZER: {"name": rule.value}}).spec for rule in UpdateRule}
    digests = {rule: memory_fingerprint(spec, planned("AdamW")) for rule, spec in specs.items()}
    assert digests[UpdateRule.ADAM] == digests[UpdateRule.ADAMW]
    assert len(set(digests.values())) == 3
