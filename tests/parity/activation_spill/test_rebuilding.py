"""What Spilling does not hold and rebuilds in backward has autograd's bits, and raises what autograd raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.spillings import spillings
from spillway.plan import Tier
from spillway_trainer.activation_spill import Spilling, rebuilding
from spillway_trainer.activation_spill.rebuilding import Rebuilt

KIB = 1 << 10
ROWS, WIDTH = 512, 64
NBYTES = 4 * ROWS * WIDTH
"""of one activation: above what is copied, and above what stays as small"""
SMALL = 4 * WIDTH * WIDTH
"""of the one weight, which belongs to no module: it stays"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Spilling]]:
    with spillings(tmp_path, minimum_bytes=NBYTES, transfer_bytes=NBYTES, ahead_bytes=NBYTES) as make:
        yield make


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a rebuild."""
    found: list[int] = []
    run = Rebuilt._run

    def counted(self: Rebuilt) -> Tensor:
        found.append(1)
        return run(self)

    monkeypatch.setattr(Rebuilt, "_run", counted)
    return found


def start(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def weight(seed: int = 2) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def function_then_product(x: Tensor, w: Tensor, function: Callable[[Tensor], Tensor] = F.gelu) -> Tensor:
    """Saves what goes into the function, and what comes out."""
    return (function(x * 2) @ w).square().mean()


def gradients(loss: Callable[[Tensor, Tensor], Tensor], spilling: Spilling | None) -> list[Tensor]:
    x, w = start(), weight()
    if spilling is None:
        found = loss(x, w)
    else:
        with spilling:
            found = loss(x, w)
    found.backward()
    return [grad(x), grad(w)]


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def written_out(x: Tensor) -> Tensor:
    """GELU as older models have it, eight operators."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu written out": written_out,
    "silu times": lambda x: F.silu(x) * x.cos(),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,), torch.ones(WIDTH), torch.zeros(WIDTH)),
    "group norm": lambda x: F.group_norm(x, 4),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "rms norm written out": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.ones(WIDTH),
    "dropout": lambda x: F.dropout(F.gelu(x), 0.3),
    "softmax of a function": lambda x: torch.softmax(x.sin().exp(), -1),
    "transposed": lambda x: torch.tanh(x.sin()).t().contiguous().t(),
    "joined": lambda x: torch.cat([x.sin()[:, : WIDTH // 2].cos(), x[:, WIDTH // 2 :].sin()], -1).exp(),
    "in bfloat16": lambda x: F.silu(x.sin().bfloat16()).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_rebuilt_has_autograds_bits(
    name: str, make: Callable[..., Spilling], runs: list[int]
) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        torch.manual_seed(5)  # dropout
        return function_then_product(x, w, FUNCTIONS[name])

    spilling = make(minimum_bytes=NBYTES // 2)
    for _ in range(2):
        assert same(gradients(loss, spilling), gradients(loss, None))
    assert runs


COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conjugated parameter": lambda z, w: z * w.conj(),
    "conjugated result": lambda z, w: (z * z).conj() * w,
    "conjugated operand, made whole": lambda z, w: (z * w) * z.conj().resolve_conj(),
    "negated imaginary part": lambda z, w: torch.complex((z * z).conj().imag * w.real, z.real * w.imag),
}


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", COMPLEX)
def test_a_lazily_conjugated_or_negated_tensor_comes_back_as_it_was(
    name: str, lean: bool, make: Callable[..., Spilling]
) -> None:
    """Its storage and its strides do not tell: the bit is of the tensor alone."""
    module = nn.Module()
    module.w = nn.Parameter(torch.complex(start(3).detach(), start(4).detach()))
    spilling = make(module, lean=lean, minimum_bytes=1)

    def found(around: AbstractContextManager[object]) -> list[Tensor]:
        z = torch.complex(start().detach().cos(), start().detach().sin()).requires_grad_()
        module.w.grad = None
        with around:
            loss = torch.view_as_real(COMPLEX[name](z, module.w)).square().sum()
        loss.backward()
        return [loss.detach(), *(torch.view_as_real(grad(x).resolve_conj()) for x in (z, module.w))]

    for _ in range(2):
        assert all(torch.equal(ours, plain) for ours, plain in zip(found(spilling), found(nullcontext()), strict=True))


def test_recomputed_tensors_are_freed_in_forward_and_counted_in_backward(make: Callable[..., Spilling]) -> None:
    spilling, (x, w) = make(), (start(), weight())
    for lean in (spilling, make(lean=False)):
        with lean:
            loss = function_then_product(x, w)
        lean.store.drain()
        # A factor, or a factor and the function of it, and the square's operand.
        assert lean.held_bytes() == {Tier.DEVICE: SMALL, Tier.NVME: (2 if lean is spilling else 3) * NBYTES}
        del loss
    with spilling:
        loss = function_then_product(x, w)
    spilling.store.drain()
    spilling.ledger.reset_peak()
    loss.backward()
    assert spilling.ledger.peak_bytes == 2 * NBYTES + SMALL  # what is rebuilt, and from what
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}


def test_a_number_that_changes_from_forward_to_forward_is_that_of_its_own(make: Callable[..., Spilling]) -> None:
    spilling, found = make(), []
    for step in range(1, 5):

        def loss(x: Tensor, w: Tensor, factor: float = 1.0 / step) -> Tensor:
            return function_then_product(x, w, lambda x: F.leaky_relu(x.sin(), factor) * factor + factor)

        found.append(gradients(loss, spilling))
        assert same(found[-1], gradients(loss, None))
    assert not same(found[0], found[1])


def test_one_rebuild_serves_all_views_that_are_in_use_at_a_time(make: Callable[..., Spilling], runs: list[int]) -> None:
    spilling, x = make(), start()
    with spilling:
        y = F.gelu(x * 2)
        loss = (y.unflatten(1, (2, -1)) * y.unflatten(1, (2, -1))).sum()
        del y
    (gradient,) = torch.autograd.grad(loss, x)
    assert len(runs) == 1
    plain = start()
    y = F.gelu(plain * 2)
    assert torch.equal(gradient, torch.autograd.grad((y * y).sum(), plain)[0])


def test_an_output_that_somebody_has_is_used_where_it_is(make: Callable[..., Spilling], runs: list[int]) -> None:
    spilling, x, w = make(), start(), weight()
    with spilling:
        y = F.gelu(x * 2)
        loss = (y @ w).sum()
    loss.backward()
    assert not runs
    del y


@pytest.mark.parametrize("what", ["what it is made from", "itself"])
def test_a_change_in_place_after_the_save_raises_as_in_autograd(what: str, make: Callable[..., Spilling]) -> None:
    for spilling in (None, make()):
        x, w = start(), weight()
        if spilling is not None:
            spilling.__enter__()
        doubled = x * 2
        function = F.gelu(doubled)
        loss = (function @ w).sum()
        if spilling is not None:
            spilling.__exit__(None, None, None)
        with torch.no_grad():
            (doubled if what == "what it is made from" else function).add_(1)
        del doubled, function
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("held", [True, False])
def test_a_change_in_place_before_the_save_is_seen(held: bool, make: Callable[..., Spilling]) -> None:
    """Of what it would be made from, and of itself: then it is held as any other."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        doubled = x * 2
        z = doubled.sin()  # saves its operand
        y = doubled.exp() if held else doubled.neg()
        with torch.no_grad():
            y.mul_(3)
        return ((y.detach() * w[0]) @ w).sum() + z.sum().detach() + x.sum()

    assert same(gradients(loss, make()), gradients(loss, None))


def test_what_is_written_through_data_in_the_forward_is_seen(make: Callable[..., Spilling]) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x * 2)
        y.data.mul_(0.5)  # no version counter tells of it
        return (y @ w).square().sum()

    assert same(gradients(loss, make()), gradients(loss, None))


def test_a_small_operand_may_change_once_it_was_used(make: Callable[..., Spilling]) -> None:
    scale = torch.full((WIDTH,), 2.0)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x * 2) * scale.detach()
        found = (y @ w).square().sum()
        scale.data.mul_(1.5)
        return found

    found = gradients(loss, make())
    scale.fill_(2.0)
    assert same(found, gradients(loss, None))


def test_a_changed_parameter_raises_as_in_autograd(make: Callable[..., Spilling]) -> None:
    for lean in (None, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        if lean is None:
            loss = model(start()).square().sum()
        else:
            with make(model):
                loss = model(start()).square().sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


def test_a_retained_graph_and_a_second_derivative_have_autograds_bits(make: Callable[..., Spilling]) -> None:
    def twice(x: Tensor, w: Tensor) -> list[Tensor]:
        loss = function_then_product(x, w, torch.tanh)
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        again = torch.autograd.grad(loss, (x, w), create_graph=True)
        return [*first, *again, *torch.autograd.grad(sum(each.square().sum() for each in again), (x, w))]

    with make():
        found = twice(start(), weight())
    assert same(found, twice(start(), weight()))


def test_an_operator_that_gives_other_bits_the_second_time_is_held(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    monkeypatch.setitem(rebuilding.KINDS, torch.ops.aten.rand_like.default, None)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        torch.manual_seed(5)
        doubled = x * 2
        return (torch.rand_like(doubled) @ w).square().sum() + doubled.sin().sum()

    plain = gradients(loss, None)
    spilling = make()
    torch.manual_seed(5)
    x, w = start(), weight()
    with spilling:
        doubled = x * 2
        kept = doubled.sin().sum()
        random = torch.rand_like(doubled)
        found = (random @ w).square().sum() + kept
    copied = random.clone()
    del random
    (gradient,) = torch.autograd.grad(found, w)
    assert not runs
    assert torch.equal(gradient, torch.autograd.grad((copied @ (v := weight())).square().sum(), v)[0])
    assert len(plain) == 2


@pytest.mark.parametrize(
    ("given", "minimum_bytes", "expected"),
    [
        ({"device_bytes": 10 * NBYTES}, NBYTES, [True, False, False]),  # all may stay
        ({"device_bytes": 3 * NBYTES}, NBYTES, [True, True, True]),
        ({}, NBYTES, [True, True, True]),
        ({}, NBYTES + 1, [True, False, False]),  # nothing is large enough
        ({"lean": False}, NBYTES, [False, False, False]),
    ],
    ids=str,
)
def test_operators_are_looked_at_only_while_there_is_need(
    given: dict[str, Any], minimum_bytes: int, expected: list[bool], make: Callable[..., Spilling]
) -> None:
    spilling = make(minimum_bytes=minimum_bytes, **given)
    seen = []
    for _ in range(3):
        x, w = start(), weight()
        with spilling:
            loss = function_then_product(x, w)
            seen.append(bool(torch.utils._python_dispatch.is_in_torch_dispatch_mode()))
        loss.backward()
    assert seen == expected


def test_larger_forward_is_recorded_again_after_one_without_recomputation(make: Callable[..., Spilling]) -> None:
    spilling, held = make(), []
    for loss in (lambda x, _: x.sin().sum(), *[function_then_product] * 3):
        x, w = start(), weight()
        with spilling:
            found = loss(x, w)
        spilling.store.drain()
        held.append(sum(spilling.held_bytes().values()) // NBYTES)
        found.backward()
        del found
    assert held == [1, 3, 2, 2]


def test_only_what_cannot_stay_is_recomputed_and_nothing_is_moved(make: Callable[..., Spilling]) -> None:
    # Of 9 activations 4 are functions. 7 may stay beside two transfers.
    spilling = make(device_bytes=9 * NBYTES)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = F.gelu(x * 2) @ w
        return x.square().mean()

    for _ in range(3):
        x, w = start(), weight()
        with spilling:
            found = loss(x, w)
        spilling.store.drain()
        held = spilling.held_bytes()
        assert same(list(torch.autograd.grad(found, (x, w))), gradients(loss, None))
        del found
    assert held == {Tier.DEVICE: 7 * NBYTES + SMALL, Tier.NVME: 0}


def test_a_forward_that_fails_leaves_no_mode_and_nothing_held(make: Callable[..., Spilling]) -> None:
    spilling = make()
    with pytest.raises(ValueError, match="bad"), spilling:
        raise ValueError(f"bad: {function_then_product(start(), weight())}")
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    spilling.store.drain()
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}


def test_a_compiled_layer_runs_as_compiled_and_is_compiled_once(make: Callable[..., Spilling]) -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(1)
        return graph.forward  # type: ignore[no-any-return]

    def layer(x: Tensor) -> Tensor:
        return torch.tanh(x.sin())

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (compiled(x * 2) @ w).square().sum()

    spilling = make()
    found = [gradients(loss, spilling) for _ in range(2)]
    plain = gradients(loss, None)
    assert same(found[0], plain)
    assert same(found[1], plain)
    assert len(graphs) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_region_beside_it_is_exact(use_reentrant: bool, make: Callable[..., Spilling]) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(lambda x: F.gelu(x).sin(), x * 2, use_reentrant=use_reentrant)
        return (F.silu(y) @ w).square().sum()

    assert same(gradients(loss, make()), gradients(loss, None))


def test_threads_of_backward_are_those_of_forward_while_it_rebuilds(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    run = rebuilding.Result.run
    monkeypatch.setattr(rebuilding.Result, "run", lambda self: (seen.append(torch.get_num_threads()), run(self))[1])
    x, w = start(), weight()
    with make():
        loss = function_then_product(x, w)
    torch.set_num_threads(2)
    try:
        loss.backward()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1]
