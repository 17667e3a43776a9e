"""Every way in which a segment saves its parameters, while they stream: the models that have broken offloading before,
and what cannot be exact, which raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from cases.parity_models import HIDDEN, PARITY_MODELS, Chain, FeedForward
from fakes.tracing import TracingLanes
from harness.parity_harness import BATCH, LANES, LENGTH, MINIMUM_BYTES, batches
from spillway.plan import ActivationPlan, ParameterPlan, Policy, Tier
from spillway_trainer import activation_spill, model_spill
from spillway_trainer.models import chain
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.segments import Position, wrap_segments
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

MakeModel = Callable[[], nn.Module]
ANSWERS = {answer.value: answer for answer in (Policy.KEEP, Policy.RECOMPUTE, Policy.HOST)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


class Streaming:
    """A model whose segments all stream from host memory, with the values it had."""

    def __init__(self, make_model: MakeModel, lanes: str, num_slots: int = 2, answer: Policy = Policy.KEEP) -> None:
        self.model = make_model()
        values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.parameters_of = MethodType(chain.Chain.parameters_of, self.model)
        segments = [name for name, _ in self.model.segments]
        host, ledger = HostSlab(8 << 20), DeviceLedger(None)
        self.lanes = LANES[lanes](host, ledger)
        plan = ParameterPlan(homes=(Tier.HOST,) * len(segments), num_slots=num_slots)
        spill = model_spill.build(plan, self.model, 97, self.lanes, None)
        assert spill is not None
        for name, value in values.items():
            if name not in self.model.tied:
                spill.set(name, value.reshape(-1))
        self.parameters = spill.source(ResidentParameters(self.model.named_buffers()))
        activations = ActivationPlan(answers=(answer,) * len(segments), minimum_bytes=MINIMUM_BYTES)
        self.technique = activation_spill.build(activations, segments, self.parameters, self.lanes, ledger, None)
        wrap_segments(self.model.segments, Position(3), self.technique.hook, residence=self.parameters)

    def gradients(self) -> dict[str, Tensor]:
        return gradients(self.model, self.technique.start_backward)


def gradients(model: nn.Module, start_backward: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Losses, and gradients summed over two micro-batches."""
    found = {}
    for number, (tokens, labels) in enumerate(batches(1, 2)[0]):
        loss = model(tokens, labels, BATCH * LENGTH)
        start_backward()
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        del loss
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def plain(name: str) -> dict[str, Tensor]:
    model = PARITY_MODELS[name]()
    wrap_segments(model.segments, Position(3), None)
    return gradients(model)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", PARITY_MODELS)
def test_every_view_of_a_streamed_parameter_comes_back(name: str, answer: str) -> None:
    for lanes in LANES:
        for num_slots in (1, 2):
            streaming = Streaming(PARITY_MODELS[name], lanes, num_slots, ANSWERS[answer])
            found, expected = streaming.gradients(), plain(name)
            assert found.keys() == expected.keys()
            assert [key for key in found if not torch.equal(found[key], expected[key])] == [], (lanes, num_slots)
            streaming.lanes.close()
            assert not isinstance(streaming.lanes, TracingLanes) or streaming.lanes.schedule().races == ()


def chain_of(make_block: Callable[[], nn.Module]) -> MakeModel:
    return partial(Chain, make_block)


class OwnHooks(FeedForward):
    """Saved-tensor hooks of its own: the innermost pair wins, and holds views of the slot (a CPU tensor is its own copy
    on the CPU)."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x_BTD)


class OwnHooksThatCopy(FeedForward):
    def forward(self, x_BTD: Tensor) -> Tensor:
        with saved_tensors_hooks(Tensor.clone, lambda tensor: tensor):
            return super().forward(x_BTD)


class OtherType(nn.Module):
    """Saves its weight's bytes as another type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x_BTD: Tensor) -> Tensor:
        as_integers = self.weight.detach().view(torch.int32)
        return x_BTD * self.weight + Keep.apply(x_BTD, as_integers)


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)  # type: ignore[attr-defined]
        return x * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_hooks_inside_a_segment_that_hold_its_parameters_are_rejected() -> None:
    with pytest.raises(RuntimeError, match=r"segment block0: \d+ view\(s\) of its parameters still exist"):
        Streaming(chain_of(OwnHooks), "lazy").gradients()


def test_hooks_inside_a_segment_that_copy_are_let_be() -> None:
    streaming, model = Streaming(chain_of(OwnHooksThatCopy), "lazy"), chain_of(OwnHooksThatCopy)()
    wrap_segments(model.segments, Position(3), None)
    found, expected = streaming.gradients(), gradients(model)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_parameter_saved_as_another_type_is_rejected() -> None:
    with pytest.raises(RuntimeError, match=r"int32.*shares memory with parameter blocks\.0\.weight"):
        Streaming(chain_of(OtherType), "lazy").gradients()


def loss_of(streaming: Streaming) -> Tensor:
    tokens, labels = batches(1, 1)[0, 0]
    loss: Tensor = streaming.model(tokens, labels, BATCH * LENGTH)
    streaming.technique.start_backward()
    return loss


def test_a_parameter_changed_between_forward_and_backward_raises() -> None:
    streaming = Streaming(PARITY_MODELS["transformer"], "lazy")
    loss = loss_of(streaming)
    with streaming.parameters.pinned("block0"), torch.no_grad():
        streaming.model.get_parameter("layers.0.mlp.up_proj.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tied_parameter_changed_through_its_owner_raises() -> None:
    streaming = Streaming(PARITY_MODELS["tied"], "lazy")
    loss = loss_of(streaming)
    with streaming.parameters.pinned("embedding"), torch.no_grad():
        streaming.model.get_parameter("embed_tokens.weight").mul_(2)
    with pytest.raises(RuntimeError, match=r"head.lm_head.weight.*modified by an inplace operation"):
        loss.backward()


def test_tensor_saved_without_hooks_raises_and_reads_no_other_segment() -> None:
    streaming = Streaming(PARITY_MODELS["transformer"], "lazy", num_slots=1)
    weight, x = streaming.model.get_parameter("layers.0.mlp.up_proj.weight"), torch.ones(1, HIDDEN, requires_grad=True)
    with streaming.parameters.pinned("block0"):
        y = F.linear(x, weight).sum()
    with pytest.raises(RuntimeError, match="still exist"), streaming.parameters.pinned("block1"):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_graph_can_be_gone_through_twice() -> None:
    streaming = Streaming(PARITY_MODELS["dropout"], "lazy")
    loss = loss_of(streaming)
    parameters = list(streaming.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    again = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_two_graphs_at_once_do_not_disturb_one_another() -> None:
    streaming = Streaming(PARITY_MODELS["dropout"], "lazy")
    tokens, labels = batches(1, 2)[0, 0], batches(1, 2)[0, 1]
    losses = []
    for first, second in (tokens, labels):
        losses.append(streaming.model(first, second, BATCH * LENGTH))
        streaming.technique.start_backward()
    (losses[1] + losses[0]).backward()
    model = PARITY_MODELS["dropout"]()
    wrap_segments(model.segments, Position(3), None)
    one, two = (model(first, second, BATCH * LENGTH) for first, second in (tokens, labels))
    (two + one).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(streaming.model.get_parameter(name).grad, parameter.grad), name
