"""DeepSpeed's own engine with our optimizer in it: its checkpoints and accessors stay valid, for every stage and plan.

Two ranks; all cases are run first, by one process that has imported DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness import adopted_engines
from harness.adopted_engines import PLANS, STAGES

Found = dict[str, list[dict[str, Any]]]
pytestmark = pytest.mark.ci

TRAINED = [f"stage {stage}, {name}" for stage in STAGES for name in PLANS]
FACTS = (
    "accessors",
    "plain engine reads it",
    "adopted engine reads a plain one",
    "leaves out a step",
    "goes on alike",
    "loads weights alone",
    "set",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return adopted_engines.run_all(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("fact", FACTS)
def test_deepspeed_sees_the_states_that_we_hold(found: Found, case: str, fact: str) -> None:
    """Its accessors read and set; its checkpoint is read by an engine that is not adopted, and the other way round,
    after which training goes on with the same losses, also where one of the two has left out a step in between that
    was not finite on one rank."""
    assert [of_rank[fact] for of_rank in found[case]] == [True, True]


@pytest.mark.parametrize("case", TRAINED)
def test_no_stage_and_no_plan_changes_a_bit(found: Found, case: str) -> None:
    for of_rank, plain in zip(found[case], found[TRAINED[0]], strict=True):
        assert of_rank["losses"] == plain["losses"]
        assert of_rank["digest"] == plain["digest"]


REJECTED = (
    "optimizer",
    "optimizer's parameter groups",
    "zero_optimization",
    "zero_optimization.stage",
    "loss scale",
    "gradients",
    "features",
)


@pytest.mark.parametrize("field", REJECTED)
def test_an_engine_outside_of_the_support_matrix_is_rejected_by_field(found: Found, field: str) -> None:
    for of_rank in found["rejected"]:
        if of_rank[field] is None:
            pytest.skip("DeepSpeed makes no float16 engine on this CPU")
        assert f"\n  {field}: " in of_rank[field]


def test_a_type_to_exchange_gradients_in_is_not_ignored(found: Found) -> None:
    for of_rank in found["rejected"]:
        assert "\n  gradients: communication_data_type; " in of_rank["exchanged in"]


def test_an_engine_whose_adamw_has_other_settings_is_rejected_with_both(found: Found) -> None:
    for of_rank in found["rejected"]:
        assert (
            "AdamW has (beta1, beta2, eps) (0.9, 0.999, 1e-08) and weight_decay [0.1], but adopt() was given "
            "(0.9, 0.95, 1e-08) and 0.1" in (of_rank["settings"])
        )
