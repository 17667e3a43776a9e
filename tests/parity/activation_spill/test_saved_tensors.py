"""The dispatcher does to a graph what autograd alone does to it: results, errors, and lifetimes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from spillway.errors import DeviceOutOfMemory
from spillway.plan import ActivationPlan, Policy
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import records
from spillway_trainer.activation_spill.records import Record
from spillway_trainer.activation_spill.transfer import Transfer
from spillway_trainer.resident_parameters import ParameterRef, ResidentParameters
from spillway_trainer.saved_tensors import KeptTensor, RecomputedSegment, SavedTensors
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

EVERY_ANSWER = pytest.mark.parametrize("answer", list(Policy))
EVERY_LANES = pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
IN_PLACE = "modified by an inplace operation"


class Run:
    """One segment "s" under one answer, with weight `w`."""

    def __init__(self, answer: Policy, lanes: type = LazyLanes, budget_bytes: int | None = None) -> None:
        torch.manual_seed(7)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.host, self.ledger = HostSlab(1 << 20), DeviceLedger(budget_bytes)
        self.lanes = lanes(self.host, self.ledger)
        self.nvme = NvmeSlab(Path("/spill"), 1 << 20, 1, open_file=FakeSpillFile)
        self.technique = activation_spill.build(
            ActivationPlan(answers=(answer,), minimum_bytes=1),
            ["s"],
            ResidentParameters([("w", self.w)]),
            self.lanes,
            self.ledger,
            self.nvme,
        )

    def __call__(self, block: object, *inputs: object) -> Tensor:
        return self.technique.hook.run("s", block, *inputs)

    def held_bytes(self) -> tuple[int, int, int]:
        self.technique.end_step()
        return self.ledger.held_bytes, self.host.held_bytes, self.nvme.held_bytes


def leaf() -> Tensor:
    return torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_()


def block(w: Tensor, x: Tensor) -> Tensor:
    y = torch.tanh(x @ w.t())
    return (F.silu(y) * y.exp()).sum()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def all_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@EVERY_LANES
@EVERY_ANSWER
def test_a_graph_may_be_run_backward_twice(answer: Policy, lanes: type) -> None:
    run, x = Run(answer, lanes), leaf()
    loss = run(partial(block, run.w), x)
    first = list(torch.autograd.grad(loss, (x, run.w), retain_graph=True))
    assert all_equal(first, gradients(loss, x, run.w))
    assert all_equal(first, gradients(block(run.w, x), x, run.w))


@EVERY_LANES
@EVERY_ANSWER
def test_double_backward_is_exact(answer: Policy, lanes: type) -> None:
    def second_order(loss: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return gradients(gradient.pow(2).sum(), x, w)

    run, x = Run(answer, lanes), leaf()
    assert all_equal(second_order(run(partial(block, run.w), x), x, run.w), second_order(block(run.w, x), x, run.w))


@EVERY_LANES
@EVERY_ANSWER
def test_backward_may_run_in_another_thread(answer: Policy, lanes: type) -> None:
    run, x = Run(answer, lanes), leaf()
    loss = run(partial(block, run.w), x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert all_equal([x.grad, run.w.grad], gradients(block(run.w, x), x, run.w))


@EVERY_LANES
@EVERY_ANSWER
def test_two_graphs_alive_at_once_are_both_exact(answer: Policy, lanes: type) -> None:
    run, x, other = Run(answer, lanes), leaf(), leaf().detach().mul(0.5).requires_grad_()
    first, second = run(partial(block, run.w), x), run(partial(block, run.w), other)
    assert all_equal(gradients(second, other), gradients(block(run.w, other), other))
    assert all_equal(gradients(first, x), gradients(block(run.w, x), x))


def penalised(w: Tensor, x: Tensor) -> Tensor:
    loss = block(w, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.pow(2).sum()


@pytest.mark.parametrize("answer", [Policy.KEEP, Policy.HOST, Policy.NVME])
def test_a_gradient_taken_inside_the_segment_is_exact(answer: Policy) -> None:
    run, x = Run(answer), leaf()
    assert all_equal(gradients(run(partial(penalised, run.w), x), x), gradients(penalised(run.w, x), x))


def test_recomputed_segment_that_takes_gradients_in_forward_is_rejected() -> None:
    run = Run(Policy.RECOMPUTE)
    with pytest.raises(RuntimeError, match=r"gradients inside its own forward.*policy: Keep"):
        run(partial(penalised, run.w), leaf())


@EVERY_LANES
@EVERY_ANSWER
def test_a_tensor_changed_in_place_after_it_was_saved_raises(answer: Policy, lanes: type) -> None:
    def careless(x: Tensor) -> Tensor:
        doubled = x * 2
        result = doubled.sin()
        doubled.add_(1)
        return result.sum()

    loss = Run(answer, lanes)(careless, leaf())
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


class Careless(torch.autograd.Function):
    """cos, whose backward writes into what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(gradient)


@EVERY_LANES
@EVERY_ANSWER
def test_a_backward_that_writes_into_what_another_node_saved_raises(answer: Policy, lanes: type) -> None:
    def block(x: Tensor) -> Tensor:
        y = x * 2
        return (y.sin() + Careless.apply(y)).sum()

    run, x = Run(answer, lanes), leaf()
    with pytest.raises(RuntimeError, match=IN_PLACE):
        block(x).backward()
    loss = run(block, x)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


@EVERY_ANSWER
def test_a_backward_that_writes_into_what_it_saved_alone_is_exact_once(answer: Policy) -> None:
    def block(x: Tensor) -> Tensor:
        return Careless.apply(x * 2).sum()

    run, x = Run(answer), leaf()
    assert all_equal(gradients(run(block, x), x), gradients(block(x), x))
    loss = run(block, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


@EVERY_ANSWER
def test_a_tensor_that_other_threads_may_read_keeps_its_version(
    answer: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved again and again, also as a view: its counter is never touched, or their backward would see that."""

    def touched(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
        raise AssertionError(f"the version of {tensors} is set to {versions}")

    monkeypatch.setattr(records, "_set_version", touched)
    run, shared = Run(answer), torch.randn(64, 64)

    def block(x: Tensor) -> Tensor:
        return (x @ shared).sum() + (x * shared).sum() + (x @ shared.t()).sum() + (x * shared[::1]).sum()

    x = torch.randn(64, 64, requires_grad=True)
    assert all_equal(gradients(run(block, x), x), gradients(block(x), x))


@EVERY_LANES
@EVERY_ANSWER
def test_a_segment_input_changed_in_place_after_the_copy_raises(answer: Policy, lanes: type) -> None:
    run, x = Run(answer, lanes), leaf()
    doubled = x * 2
    loss = run(lambda y: y.sin().sum(), doubled)
    run.technique.end_step()  # the copy has long been taken, and the source given up
    with torch.no_grad():
        doubled.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        loss.backward()


@EVERY_ANSWER
def test_a_change_in_place_without_a_backward_is_nobodys_business(answer: Policy) -> None:
    run = Run(answer)
    doubled = leaf() * 2
    run(torch.sin, doubled)
    doubled.add_(1)
    run.technique.end_step()


@EVERY_ANSWER
def test_a_tensor_saved_again_after_a_change_in_place_comes_back_changed(answer: Policy) -> None:
    aside: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = x * 2
        aside.append(y.sin())  # saves y, and never runs backward
        return y.add_(1).cos().sum()

    run, x = Run(answer), leaf()
    assert all_equal(gradients(run(block, x), x), gradients(block(x), x))
    aside.clear()  # a circle through the graph, which the collector cannot see


@EVERY_ANSWER
def test_an_optimizer_step_between_forward_and_backward_raises(answer: Policy) -> None:
    run = Run(answer)
    loss = run(partial(block, run.w), leaf())
    with torch.no_grad():
        run.w.add_(1)
    with pytest.raises(RuntimeError, match=r"w: one of the variables.*optimizer step"):
        loss.backward()


def test_a_step_through_the_owner_of_a_tied_parameter_is_seen_by_its_alias() -> None:
    owner, alias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.empty(4, 4))
    alias.data = owner.data
    parameters = ResidentParameters([("owner", owner), ("alias", alias)])
    ref = parameters.find(alias.t())
    with torch.no_grad():
        owner.add_(1)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        parameters.resolve(ref)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w[2:5],
        lambda w: w.chunk(2, dim=1)[1],
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.view(4, 16),
        lambda w: w[:1].expand(8, 8),
    ],
)
def test_every_view_of_a_parameter_is_recognised(view: object) -> None:
    w = nn.Parameter(torch.randn(8, 8))
    parameters = ResidentParameters([("w", w)])
    ref = parameters.find(view(w))
    assert ref is not None
    assert torch.equal(parameters.resolve(ref), view(w))


def test_an_activation_is_no_parameter() -> None:
    w = nn.Parameter(torch.randn(8, 8))
    assert ResidentParameters([("w", w)]).find(w * 2) is None


class MovingParameters(ResidentParameters):
    """A source whose parameters go elsewhere between forward and backward, and whose old memory is overwritten."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__([("w", parameter)])
        self._parameter = parameter

    def resolve(self, ref: ParameterRef) -> Tensor:
        return self._parameter.data.as_strided(ref.size, ref.stride, ref.offset)

    def move(self) -> None:
        old = self._parameter.data
        self._parameter.data = old.clone()
        old.fill_(float("nan"))


@pytest.mark.parametrize("answer", [Policy.KEEP, Policy.RECOMPUTE])
def test_a_saved_parameter_is_a_name_and_not_an_address(answer: Policy) -> None:
    w, x, ledger = nn.Parameter(torch.randn(8, 8)), leaf(), DeviceLedger(None)
    expected = gradients(block(w, x), x, w)
    source = MovingParameters(w)
    loss = SavedTensors({"s": answer}, source, None, ledger).run("s", partial(block, w), x)
    source.move()
    assert all_equal(gradients(loss, x, w), expected)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live() -> int:
    kinds = {Record, Transfer, RecomputedSegment, KeptTensor}
    return sum(type(found) in kinds for found in gc.get_objects())


@pytest.mark.sweep
@pytest.mark.usefixtures("without_collector")
@EVERY_LANES
@EVERY_ANSWER
class TestNothingIsLeftWithoutTheCollector:
    """The destructor of the handle is the only release."""

    def test_after_backward(self, answer: Policy, lanes: type) -> None:
        run = Run(answer, lanes)
        run(partial(block, run.w), leaf()).backward()
        assert run.held_bytes() == (0, 0, 0)
        assert live() == 0

    def test_after_a_dropped_graph(self, answer: Policy, lanes: type) -> None:
        run = Run(answer, lanes)
        loss = run(partial(block, run.w), leaf())
        assert run.ledger.held_bytes > 0 or answer in (Policy.HOST, Policy.NVME)
        del loss
        assert run.held_bytes() == (0, 0, 0)
        assert live() == 0

    def test_after_a_retained_graph(self, answer: Policy, lanes: type) -> None:
        run = Run(answer, lanes)
        loss = run(partial(block, run.w), leaf())
        loss.backward(retain_graph=True)
        del loss
        assert run.held_bytes() == (0, 0, 0)
        assert live() == 0

    def test_after_an_exception_in_forward(self, answer: Policy, lanes: type) -> None:
        def failing(x: Tensor) -> Tensor:
            y = x.sin().cos()
            raise ValueError(f"bad batch of {y.numel()}")

        run = Run(answer, lanes)
        with pytest.raises(ValueError, match="bad batch"):
            run(failing, leaf())
        assert run.held_bytes() == (0, 0, 0)

    def test_after_a_forward_without_gradients(self, answer: Policy, lanes: type) -> None:
        run = Run(answer, lanes)
        with torch.no_grad():
            run(partial(block, run.w), leaf())
        assert run.held_bytes() == (0, 0, 0)
        assert run.lanes.moved_bytes() == {}
        assert live() == 0


def test_a_recomputed_segment_keeps_its_inputs_only() -> None:
    run, x = Run(Policy.RECOMPUTE), leaf()
    loss = run(partial(block, run.w), x)
    assert run.ledger.held_bytes == x.nbytes
    del loss


def test_recomputing_leaves_the_random_state_where_it_was() -> None:
    run = Run(Policy.RECOMPUTE)

    def seeded(x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(1)
        return F.dropout(x.sin(), 0.5).sum()

    loss = run(seeded, leaf())
    torch.rand(3)
    before = torch.default_generator.get_state()
    loss.backward()
    assert torch.equal(torch.default_generator.get_state(), before)


def test_recomputing_enters_the_autocast_of_the_forward() -> None:
    run, x = Run(Policy.RECOMPUTE), leaf()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(partial(block, run.w), x)
        plain = block(run.w, x)
    assert all_equal(gradients(loss, x, run.w), gradients(plain, x, run.w))


def test_a_segment_that_does_something_else_the_second_time_raises() -> None:
    calls: list[int] = []

    def fickle(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().sum() if len(calls) == 1 else x.sin().cos().sum()

    loss = Run(Policy.RECOMPUTE)(fickle, leaf())
    with pytest.raises(
        RuntimeError, match=r"segment s \(a group of layers\): its forward saved .* the same operations each time"
    ):
        loss.backward()


def test_a_budget_too_small_for_what_is_kept_raises_out_of_the_forward() -> None:
    run = Run(Policy.KEEP, budget_bytes=200)
    with pytest.raises(DeviceOutOfMemory, match="for activations"):
        run(partial(block, run.w), leaf())
