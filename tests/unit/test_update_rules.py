"""What the optimizers keep, move and are told: the facts that planner and trainer go by."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from job_documents import job

from spillway.api import Optimizer
from spillway.footprint import Workload, states_bytes_per_parameter
from spillway.hardware import resolve_node
from spillway.model_shape import model_shape
from spillway.plan import MemoryPlan, OptimizerPlan, Tier
from spillway.planner import make_plan
from spillway.profiles import memory_fingerprint
from spillway.step_time import Resource, rank_rates, update_loads
from spillway.update_rules import RULE_FIELDS, UpdateRule
from spillway_trainer.config import hyperparameters

OPTIMIZER = "spec.training.optimizer"
WIDE = {UpdateRule.ADAMW, UpdateRule.ADAM}
"""two moments; the others have one"""


def told(**fields: Any) -> Any:
    return hyperparameters(job({OPTIMIZER: fields}).spec)


def test_the_manifest_names_exactly_the_rules_that_there_are() -> None:
    assert set(get_args(Optimizer.model_fields["name"].annotation)) == set(UpdateRule)
    assert all(rule.fields <= set(RULE_FIELDS) for rule in UpdateRule)


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
