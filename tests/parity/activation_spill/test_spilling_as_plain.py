"""What programs do around Spilling that autograd does not mind: odd tensors, threads, .data, interrupts."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from harness.depth import at
from harness.spillings import spillings
from spillway.errors import UserError
from spillway.plan import Tier
from spillway_trainer.activation_spill import Spilling

ROWS, WIDTH = 512, 64
NBYTES = 4 * ROWS * WIDTH
"""of one activation: above what is copied to be rebuilt from"""
LEAN = pytest.mark.parametrize("lean", [True, False])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Spilling]]:
    """Spilling that writes each large tensor as soon as it may."""
    with spillings(tmp_path, minimum_bytes=NBYTES, transfer_bytes=NBYTES, ahead_bytes=NBYTES) as make:
        yield make


def model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH)


def start(seed: int = 2) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


Loss = Callable[[nn.Module, Tensor], Tensor]


def gradients(loss: Loss, make: Callable[..., Spilling] | None, **given: Any) -> list[Tensor]:
    module, x = model(), start()
    with make(module, **given) if make is not None else nullcontext():
        found = loss(module, x)
    found.backward()
    return [found.detach(), grad(x), grad(module.weight)]


def doubled(x: Tensor) -> Tensor:
    return x + x


def jagged(module: nn.Module, x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(module(x).sin(), torch.tensor([0, 100, ROWS]))
    return (nested.sin() * nested).values().sum()


def strided(module: nn.Module, x: Tensor) -> Tensor:
    nested = F.gelu(torch.nested.as_nested_tensor([module(x)[:100], module(x)[100:]]))
    return torch.nested.to_padded_tensor(nested @ nested.transpose(-1, -2), 0.0).sin().sum()


LAYOUTS: dict[str, Loss] = {
    "coo": lambda module, x: doubled(module(x).to_sparse()).to_dense().sin().sum(),
    "csr": lambda module, x: (module(x).to_sparse_csr() * 2).to_dense().sin().sum(),
    "sparse factor": lambda module, x: torch.sparse.mm(torch.eye(ROWS).to_sparse(), module(x).sin()).sin().sum(),
    "jagged": jagged,
    "nested": strided,
}


@LEAN
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_and_nested_tensors_pass_through(layout: str, lean: bool, make: Callable[..., Spilling]) -> None:
    assert same(gradients(LAYOUTS[layout], make, lean=lean), gradients(LAYOUTS[layout], None))


def jvp(module: nn.Module, x: Tensor) -> Tensor:
    layers = nn.Sequential(module, nn.Tanh(), module)
    return torch.func.jvp(lambda x: layers(x).sin(), (x,), (torch.ones_like(x),))[1].sum()


def dual(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        pair = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(torch.tanh(module(torch.tanh(module(pair).sin())))).tangent.sum()


def dual_of_gradient(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        pair = forward_ad.make_dual(x, torch.ones_like(x))
        (found,) = torch.autograd.grad(torch.tanh(module(pair.sin())).sum(), pair, create_graph=True)
        return forward_ad.unpack_dual(found).tangent.sum()


@LEAN
@pytest.mark.parametrize("loss", [jvp, dual, dual_of_gradient])
def test_forward_mode_differentiation_has_autograds_bits(loss: Loss, lean: bool, make: Callable[..., Spilling]) -> None:
    assert same(gradients(loss, make, lean=lean), gradients(loss, None))


@LEAN
def test_two_threads_in_one_spilling_at_once_are_exact(lean: bool, make: Callable[..., Spilling]) -> None:
    """Entered one after the other and left in the same order, so neither is the inner one."""
    module = model()
    spilling = make(module, lean=lean)
    found: dict[str, Tensor] = {}
    entered = {"trains": threading.Event(), "evaluates": threading.Event()}
    left = threading.Event()

    def loss(x: Tensor) -> Tensor:
        return (F.gelu(module(x).sin()) @ module.weight).square().sum()

    def trains() -> None:
        x = start()
        with spilling:
            entered["trains"].set()
            entered["evaluates"].wait(60)
            outcome = loss(x)
        left.set()
        found["trains"] = torch.autograd.grad(outcome, x)[0]

    def evaluates() -> None:
        entered["trains"].wait(60)
        with torch.no_grad(), spilling:
            entered["evaluates"].set()
            left.wait(60)
            outcome = loss(start())
        found["evaluates"] = outcome

    threads = [threading.Thread(target=each) for each in (trains, evaluates)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = loss(x := start())
    assert torch.equal(found["evaluates"], plain)
    assert torch.equal(found["trains"], torch.autograd.grad(plain, x)[0])
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}


def clamped(y: Tensor) -> None:
    y.data.clamp_(-0.5, 0.5)


def written_by_numpy(y: Tensor) -> None:
    y.detach().numpy()[: ROWS // 2] *= 0.5


def refilled(y: Tensor) -> None:
    y.data.copy_(torch.full_like(y, 0.25))


UNCOUNTED = pytest.mark.parametrize("change", [clamped, written_by_numpy, refilled])


@UNCOUNTED
@pytest.mark.parametrize("when", ["in the forward", "after it"])
def test_a_change_that_no_counter_tells_of_has_plains_bits(
    change: Callable[[Tensor], None], when: str, make: Callable[..., Spilling]
) -> None:
    def found(spilling: Spilling | None) -> list[Tensor]:
        x, y = start(), start(3).detach()
        with spilling or nullcontext():
            z = (x * 2).exp()
            loss = (z * y).sum()
            if spilling is not None:
                spilling.store.drain()  # whatever may be written is
            if when == "in the forward":
                change(z)
                change(y)
                del z, y
        if when != "in the forward":
            change(z)
            change(y)
        loss.backward()
        return [grad(x)]

    assert same(found(make(lean=False)), found(None))


def test_memory_of_numpy_that_is_refilled_has_plains_bits(make: Callable[..., Spilling]) -> None:
    def found(around: AbstractContextManager[object]) -> Tensor:
        x, batch = start(), start(3).detach().numpy().copy()
        with around:
            loss = (x * torch.from_numpy(batch)).sum()
        if isinstance(around, Spilling):
            around.store.drain()
        batch[:] = 0.25
        loss.backward()
        return grad(x)

    assert torch.equal(found(make(lean=False)), found(nullcontext()))


@UNCOUNTED
@pytest.mark.parametrize("when", ["in the forward", "after it"])
def test_an_uncounted_change_of_what_is_rebuilt_from_raises(
    change: Callable[[Tensor], None], when: str, make: Callable[..., Spilling]
) -> None:
    x = start()
    with make():
        doubled = x * 2
        loss = (F.gelu(doubled) @ torch.eye(WIDTH, requires_grad=True)).square().sum()
        if when == "in the forward":
            change(doubled)
    if when != "in the forward":
        change(doubled)
    with pytest.raises(RuntimeError, match=r"which autograd cannot detect.*lean=False"):
        loss.backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(start(5).detach()), model()


def parameter_of_an_operator(module: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * module.scale).sum(), module.scale


def parameter_by_a_view(module: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    return module.linear(x).square().sum(), module.linear.weight


def leaf_of_nobody(module: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    other = start(6)
    return (x * other).sum(), other


def operand(module: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    doubled = x * 2
    return doubled.sin().sum(), doubled


def output(module: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    power = (x * 2).exp()
    return power.sum(), power


@LEAN
@pytest.mark.parametrize("what", [parameter_of_an_operator, parameter_by_a_view, leaf_of_nobody, operand, output])
def test_other_memory_given_to_a_saved_tensor_has_plains_bits(
    what: Callable[[Scaled, Tensor], tuple[Tensor, Tensor]], lean: bool, make: Callable[..., Spilling]
) -> None:
    def found(spill: bool) -> Tensor:
        module, x = Scaled(), start()
        with make(module, lean=lean) if spill else nullcontext():
            loss, changed = what(module, x)
        changed.data = torch.full_like(changed, 0.25)
        loss.backward()
        return grad(x)

    assert torch.equal(found(True), found(False))


def test_what_somebody_still_holds_is_not_written(make: Callable[..., Spilling]) -> None:
    """It would free nothing."""
    spilling, x = make(lean=False), start()
    with spilling:
        held = (x * 2).exp()
        loss = held.sin().sum()
    assert spilling.lanes.moved_bytes() == {}
    assert spilling.held_bytes() == {Tier.DEVICE: NBYTES, Tier.NVME: 0}
    loss.backward()


def test_an_empty_path_is_rejected() -> None:
    with pytest.raises(UserError, match="directory is an empty string; give a directory"):
        Spilling(nn.Module(), "", nvme_bytes=1 << 20)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_entering_in_compiled_code_is_rejected(fullgraph: bool, make: Callable[..., Spilling]) -> None:
    module = model()
    spilling = make(module)

    def step(x: Tensor) -> Tensor:
        with spilling:
            return module(x).sin().sum()

    torch.compiler.reset()
    with pytest.raises(Exception, match=r"with block runs inside a function that torch\.compile compiles"):
        torch.compile(step, backend="eager", fullgraph=fullgraph)(start())
    x = start()
    torch.compiler.disable(step)(x).backward()
    assert torch.equal(grad(x), torch.autograd.grad(module(y := start()).sin().sum(), y)[0])


def interrupted_at(number: int, seen: list[str]) -> Callable[..., Any]:
    """A trace function that raises KeyboardInterrupt at this line of the trainer, and counts its lines in `seen`.

    Not at a `with`: its line comes again before `__exit__` is called, where Python handles no signal; an exception
    there would leave a lock taken for ever. Nor in what torch calls while it enters a mode: it would leave the mode
    half entered, with us or without.
    """

    def line(frame: FrameType, event: str, argument: object) -> Any:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        name = frame.f_code.co_name
        if event == "line" and not source.lstrip().startswith("with ") and name != "ignore_compile_internals":
            seen.append(name)
            if len(seen) == number:
                raise KeyboardInterrupt
        return line

    return lambda frame, *_: line if "spillway_trainer" in frame.f_code.co_filename else None


def traced_step(spilling: Spilling, module: nn.Module, tracer: Callable[..., Any] | None) -> Tensor:
    x, before = start(), sys.gettrace()
    sys.settrace(tracer)
    try:
        with spilling:
            loss = (F.silu(module(x * 1)) * x.sin()).square().mean()
        return torch.autograd.grad(loss, x)[0]
    finally:
        sys.settrace(before)


@LEAN
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    lean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own keeps the frames of a destructor

    def made() -> Spilling:
        sizes = {"minimum_bytes": NBYTES, "transfer_bytes": NBYTES, "ahead_bytes": NBYTES}
        return Spilling(module, tmp_path, nvme_bytes=1 << 24, lean=lean, **sizes)

    module = nn.Sequential(model(), nn.LayerNorm(WIDTH), nn.GELU(), model())
    spilling, seen = made(), list[str]()
    plain = traced_step(spilling, module, None)
    traced_step(spilling, module, interrupted_at(0, seen))
    for number in range(1, len(seen), max(1, len(seen) // at(60, 400, 4000))):
        lines: list[str] = []
        with suppress(KeyboardInterrupt):
            traced_step(spilling, module, interrupted_at(number, lines))
        if lines[-1] != "__exit__":  # before its first line is run Python has left the block, and nobody knows it yet
            assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        if number % 2 or lines[-1] == "__exit__":  # else the next forward mends what is left
            spilling.close()
            spilling = made()
        assert torch.equal(traced_step(spilling, module, None), plain)
        spilling.store.drain()
        assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}
    spilling.close()


def test_close_forgets_the_graph_of_a_backward_that_raised(make: Callable[..., Spilling]) -> None:
    """torch itself does at some later backward."""
    spilling, x = make(), start()

    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the user")

    def step() -> None:
        with spilling:
            other, failing = (x * 2).exp(), x.sin()
            failing.register_hook(fail)
            loss = (other * failing).square().sum()
        with pytest.raises(ValueError, match="a hook of the user"):
            loss.backward()

    step()
    assert any(spilling.held_bytes().values())
    spilling.close()
    assert not any(spilling.held_bytes().values())


def test_close_ends_what_an_interrupt_left_entered(make: Callable[..., Spilling]) -> None:
    spilling, x = make(), start()
    spilling.__enter__()
    loss = (x * 2).sin().sum()
    del loss
    spilling.close()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
