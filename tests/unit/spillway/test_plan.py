"""A plan that cannot be executed cannot be written down."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from harness import local_runs
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan


@pytest.mark.parametrize(
    "fields",
    [
        {"cpu_share": 0.9},
        {"cpu_share": -0.5, "streamed_share": 0.5},
        {"chunk_parameters": 0},
        {"num_threads": 0},
    ],
    ids=str,
)
def test_impossible_optimizer_plans_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimizerPlan(**fields)


@pytest.mark.parametrize("fields", [{"num_io_threads": 0}, {"window_bytes": -1}, {"answers": ("dram",)}], ids=str)
def test_impossible_activation_plans_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ActivationPlan(**fields)


def test_shares_may_carry_rounding() -> None:
    assert OptimizerPlan(cpu_share=0.1, streamed_share=0.2, resident_share=0.7).offloads


def test_a_plan_of_no_micro_batches_is_rejected() -> None:
    document = local_runs.spread_plan().model_dump() | {"num_micro_batches": 0}
    with pytest.raises(ValidationError, match="num_micro_batches"):
        MemoryPlan.model_validate(document)
