"""What a step submits to the lanes, and what waits for what."""

from __future__ import annotations

import pytest
import torch

from cases.optimizer_cases import HOST_BYTES, NUM_STEPS, Case, drive, offload, outcome, resident, split
from fakes.lazy_lanes import LazyLanes, LazyOperation
from spillway.plan import OptimizerPlan
from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.optimizer_offload import gradients
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Event, Submission

CASE = Case(torch.bfloat16)


class ToldLanes(LazyLanes):
    """Lanes that remember what was submitted and what the compute lane waited for."""

    def __init__(self) -> None:
        super().__init__(HostSlab(HOST_BYTES), DeviceLedger(None))
        self.submitted: list[str] = []
        self.waited: list[str] = []

    def enqueue(self, given: Submission) -> Event:
        self.submitted.append(given.label)
        return super().enqueue(given)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LazyOperation)
        self.waited.append(event.label)
        super().wait(event)

    def num(self, label: str) -> int:
        return sum(one.startswith(label) for one in self.submitted)


def made(plan: OptimizerPlan, *, in_place: bool = False) -> tuple[ToldLanes, StepOptimizer]:
    lanes = ToldLanes()
    return lanes, offload(CASE.parameters(), CASE, plan, lanes, DeviceLedger(None), in_place=in_place)


def of_the_third_step(plan: OptimizerPlan, *, in_place: bool = False) -> ToldLanes:
    """The same gradients come as in the step before, but one."""
    lanes, optimizer = made(plan, in_place=in_place)
    drive(optimizer, CASE, 0, 2)
    lanes.submitted.clear()
    lanes.waited.clear()
    drive(optimizer, CASE, 2, 3)
    return lanes


def test_a_norm_is_made_with_the_last_gradients() -> None:
    lanes, optimizer = made(split(0.6, 0.4, 0, 1009))
    drive(optimizer, CASE, 0, 1)
    assert lanes.num("norm") > 0  # nobody knows yet which gradient is the last
    assert of_the_third_step(split(0.6, 0.4, 0, 1009)).num("norm") == 0


def test_a_gradient_more_than_in_the_step_before_is_in_the_norm() -> None:
    norms = []
    for optimizer in (resident(CASE.parameters(), CASE), made(split(0.6, 0.4, 0, 1009))[1]):
        drive(optimizer, CASE, 0, 2)
        optimizer.begin(1e-2)
        for _ in range(3):
            for name, gradient in CASE.gradients(1, 0):
                optimizer.wait([name])
                optimizer.take(name, gradient)
        norms.append(optimizer.norm())
    assert norms[0] == norms[1]


def test_gradients_of_two_chunks_in_a_row_come_down_together() -> None:
    lanes = of_the_third_step(split(1, 0, 0, 1009))
    of_up = [label for label in lanes.submitted if label.startswith("gradient up")]
    assert of_up == ["gradient up[0:2018]", "gradient up[2018:3071]"]
    assert lanes.num("accumulate up") == 2


def test_small_chunks_are_updated_and_uploaded_by_one_operation() -> None:
    lanes = of_the_third_step(split(1, 0, 0, 4096))
    updates, uploads = ([one for one in lanes.submitted if one.startswith(what)] for what in ("update", "upload"))
    assert updates == [
        "update embedding[0:2257] and 1 more",
        "update up[0:3071]",
        "update bias[0:83]",
        "update down[0:3071]",
    ]
    assert uploads == [label.replace("update", "upload") for label in updates]


def test_where_the_device_is_the_host_small_tensors_are_one_operation_and_nothing_is_copied() -> None:
    lanes = of_the_third_step(split(1, 0, 0, 4096), in_place=True)
    assert lanes.num("accumulate") == 4, "as many together as the window of gradients has room for"
    assert lanes.num("update") == 1
    assert (lanes.num("gradient"), lanes.num("upload")) == (0, 0)


def test_where_the_device_is_the_host_every_tensor_s_worth_of_a_batch_is_added_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "BATCH_BYTES", 1)
    lanes = of_the_third_step(split(1, 0, 0, 4096), in_place=True)
    assert lanes.num("accumulate") == 5, "one a gradient"


def test_forward_waits_for_a_streamed_chunks_update_and_not_for_its_way_back() -> None:
    lanes, optimizer = made(split(0, 1, 0, 4096, overlap="Forward"))
    drive(optimizer, CASE)
    assert lanes.waited
    assert all(label.startswith("update") for label in lanes.waited)
    parameters = CASE.parameters()
    plain = resident(parameters, CASE)
    expected = outcome(plain, parameters, drive(plain, CASE, 0, NUM_STEPS))
    assert dict(optimizer.state()).keys() == expected.states.keys()
    assert all(torch.equal(value, expected.states[name]) for name, value in optimizer.state())
