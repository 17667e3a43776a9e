"""Device check before the first step: runs chunks through every lane and kernel and compares them with the CPU.

A device, driver or compiler that computes other results would change a run silently; with this check, it ends the run
with an error (exit code 78). Most of the check's time goes into compiling kernels, which the run needs anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from spillway.errors import DeviceFault, SpillwayError
from spillway.plan import Tier
from spillway.update_rules import UpdateRule

from .ending import is_device_out_of_memory, is_out_of_memory
from .kernels import dispatch as kernels
from .kernels import reference
from .kernels.master_halves import join, rest_bytes, split
from .kernels.reference import UpdateScalars, narrowed
from .optimizer.plain import Hyperparameters
from .tiers.extents import round_up
from .tiers.lanes import Event, Lane, Lanes

NUM_VALUES = 20_003
"""Spans several blocks of a kernel and is a multiple of no block size."""
SIZES = (NUM_VALUES, 20_480)
"""Sizes of the arrays. Multiples of 16, such as nearly all chunks, have a separate kernel."""
NUM_CHUNKS, NUM_BUFFERS = 6, 2
HOST_BYTES = 2 * NUM_BUFFERS * round_up(4 * NUM_VALUES)
"""Host memory of the lanes that the check uses; it is freed afterwards."""


def check(lanes: Lanes, device: torch.device, settings: Hyperparameters, dtypes: Collection[torch.dtype]) -> None:
    """Raises DeviceFault at the first bit that differs. `dtypes`: types of the parameters that are trained by
    `settings`."""
    check_lanes(lanes)
    for n in SIZES:
        for dtype in dtypes:
            check_update(device, settings, dtype, n)
            check_accumulate(device, dtype, n)
        if torch.bfloat16 in dtypes:
            check_update_split(device, settings, n)
        check_square_sum(device, n)


@contextmanager
def faults() -> Iterator[None]:
    """Turns an exception inside into DeviceFault, the fault of the device, its driver or its compiler. Exhausted memory
    is no such fault: that exception and any SpillwayError pass unchanged."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SpillwayError) or is_device_out_of_memory(error) or is_out_of_memory(error):
            raise
        found = f"{type(error).__name__}: {error}"
        raise DeviceFault(
            f"the check of the device failed before the first step: {found}. Nothing was trained. Run the job on "
            "another device; if it fails there, too, check that the versions of the driver and of triton are compatible"
        ) from error


def check_lanes(lanes: Lanes) -> None:
    """Copies chunks to the device, adds to them there, copies them back and compares them on the cpu lane. Each buffer
    is used several times. Raises DeviceFault."""
    nbytes = 4 * NUM_VALUES
    pairs = [(Tier.HOST, "sent"), (Tier.DEVICE, "on the device"), (Tier.HOST, "received")]
    sets = [[lanes.acquire(tier, nbytes, f"check: {name}") for tier, name in pairs] for _ in range(NUM_BUFFERS)]
    wrong: list[int] = []
    free: list[tuple[Event, ...]] = [() for _ in sets]
    for number in range(NUM_CHUNKS):
        index = number % NUM_BUFFERS
        sent, there, received = sets[index]
        values = numbers(number)
        fill = partial(kernels.copy, sent.tensor, values.view(torch.uint8))
        filled = lanes.submit(Lane.CPU, fill, writes=[sent], after=free[index])
        up = partial(kernels.copy, there.tensor, sent.tensor)
        loaded = lanes.submit(Lane.H2D, up, reads=[sent], writes=[there], after=[filled])
        add = partial(_add, there.tensor.view(torch.int32), number + 1)
        added = lanes.submit(Lane.COMPUTE, add, reads=[there], writes=[there], after=[loaded])
        down = partial(kernels.copy, received.tensor, there.tensor)
        copied = lanes.submit(Lane.D2H, down, reads=[there], writes=[received], after=[added])
        look = partial(_compare, wrong, number, received.tensor.view(torch.int32), values + (number + 1))
        free[index] = (lanes.submit(Lane.CPU, look, reads=[received], after=[copied]),)
    for events in free:
        for event in events:
            event.wait()
    for buffer, events in zip(sets, free, strict=True):
        for one in buffer:
            lanes.release(one, after=events)
    if wrong:
        raise fault(
            f"block {wrong[0]} of {NUM_CHUNKS} test blocks was copied to the device and came back with wrong values"
        )


def numbers(seed: int) -> Tensor:
    """Returns random int32 values that are far from overflow."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**30), 2**30, (NUM_VALUES,), generator=generator, dtype=torch.int32)


def _add(values: Tensor, addend: int) -> None:
    values.add_(addend)


def _compare(wrong: list[int], number: int, found: Tensor, wanted: Tensor) -> None:
    if not torch.equal(found, wanted):
        wrong.append(number)


def step_scalars(rule: UpdateRule, step: int) -> UpdateScalars:
    powers = {"beta1_power": 0.9**step, "beta2_power": 0.95**step} if rule.corrects_bias else {}
    return UpdateScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, gradient_scale=0.37, momentum=0.8, rule=rule, **powers)


def check_update(device: torch.device, settings: Hyperparameters, dtype: torch.dtype, n: int) -> None:
    """Compares two update steps of parameters in `dtype`; those in float32 are their own masters."""
    rule = settings.rule
    wanted = initial(settings, n)
    found = [state.to(device, copy=True) for state in wanted]
    out = None if dtype == torch.float32 else torch.zeros(n, dtype=dtype)
    found_out = None if out is None else out.to(device, copy=True)
    for step in (1, 2):
        scalars, gradient = step_scalars(rule, step), values(10 + step, n)
        kernels.update(scalars, found[0], found[1:], gradient.to(device), found_out)
        reference.update(scalars, wanted[0], wanted[1:], gradient, out)
    pairs, names = [*zip(found, wanted, strict=True)], [*rule.state_kinds]
    if out is not None and found_out is not None:
        pairs, names = [*pairs, (found_out, out)], [*names, "parameter"]
    same(pairs, names, f"an update by {rule} in {dtype}")


def check_update_split(device: torch.device, settings: Hyperparameters, n: int) -> None:
    """Compares two update steps with master parameters that are stored in two halves."""
    rule = settings.rule
    wanted = initial(settings, n)
    weights, rest = reference.bfloat16(wanted[0]), torch.empty(rest_bytes(n), dtype=torch.uint8)
    split(wanted[0], weights, rest)
    found = [tensor.to(device, copy=True) for tensor in (weights, rest, *wanted[1:])]
    for step in (1, 2):
        gradient = values(10 + step, n)
        kernels.update_split(
            kernels.update, step_scalars(rule, step), found[1], found[2:], gradient.to(device), found[0]
        )
        reference.update(step_scalars(rule, step), wanted[0], wanted[1:], gradient, weights)
    joined = join(found[0].cpu(), found[1].cpu())
    same(
        zip([joined, *found[2:]], wanted, strict=True),
        rule.state_kinds,
        f"an update by {rule} of float32 master parameters stored in two halves",
    )


def check_accumulate(device: torch.device, dtype: torch.dtype, n: int) -> None:
    found, wanted = torch.empty(n, device=device), torch.empty(n)
    for number in range(2):
        gradient = values(20 + number, n).to(dtype)
        kernels.accumulate(found, gradient.to(device), number == 0)
        reference.accumulate(wanted, gradient, number == 0)
    same([(found, wanted)], ["accumulator"], f"a sum of gradients in {dtype}")


def check_square_sum(device: torch.device, n: int) -> None:
    gradient = values(30, n)
    if kernels.square_sum(gradient.to(device)) != reference.square_sum(gradient):
        raise fault(f"the sum of squares of {n} gradients does not match the CPU's")


def initial(settings: Hyperparameters, n: int) -> list[Tensor]:
    """Returns initial values of master and moments."""
    kinds = settings.rule.state_kinds
    return [narrowed(values(seed, n), settings.state_dtype(kind), kind) for seed, kind in enumerate(kinds)]


def values(seed: int, n: int) -> Tensor:
    """Returns float32 values as in training, with denormals, zeros of both signs, exact ties when rounded to bfloat16,
    and a NaN."""
    found = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.02
    found[1::7] *= 1e-38
    found[2::7] = (found[2::7].view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    found[3::7], found[4::70], found[-1] = 0.0, -0.0, torch.nan
    return found


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same(pairs: Iterable[tuple[Tensor, Tensor]], names: Sequence[str], what: str) -> None:
    """Raises DeviceFault unless the bits of each pair are equal. `pairs`: found on the device, wanted."""
    for name, (on_device, theirs) in zip(names, pairs, strict=True):
        ours, integers = on_device.cpu(), INTEGERS[theirs.itemsize]
        differing = ours.view(integers) != theirs.view(integers)
        if bool(differing.any()):
            at = int(differing.nonzero()[0])
            raise fault(
                f"{what}: {int(differing.sum())} of {theirs.numel()} values of {name} differ; the first is "
                f"{ours[at].item()!r} on the device and {theirs[at].item()!r} on the CPU"
            )


def fault(found: str) -> DeviceFault:
    return DeviceFault(
        f"the device's results differ from the CPU's: {found}. Nothing was trained. Run the job on another device; "
        "if it fails there, too, this version of the driver or of the kernel compiler (triton) does not "
        "work with this trainer: use another version"
    )
