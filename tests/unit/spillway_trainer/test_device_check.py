"""The check before the first step: sound lanes and kernels pass it, every kind of wrong one is told in a sentence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from fakes.fake_streams import FakeStreams, recorded
from harness import local_runs
from spillway.errors import DeviceFault, ExitCode, UserError
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer import device_check, run_job
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import reference
from spillway_trainer.kernels.reference import SquareSum
from spillway_trainer.optimizer.plain import Hyperparameters
from spillway_trainer.ranks import World
from spillway_trainer.tiers import cuda
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

CPU = torch.device("cpu")
ADAMW = Hyperparameters()
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(settings: Hyperparameters = ADAMW, dtypes: Collection[torch.dtype] = TYPES) -> FakeStreams:
    host, ledger = HostSlab(1 << 20), DeviceLedger(None)
    with recorded(host, ledger) as lanes, device_check.faults():
        device_check.check(lanes, CPU, settings, dtypes)
    assert (host.held_bytes, ledger.held_bytes) == (0, 0)
    return lanes.fake


@pytest.mark.parametrize("rule", UpdateRule)
def test_sound_lanes_and_kernels_pass_and_the_check_has_no_race(rule: UpdateRule) -> None:
    assert check(Hyperparameters(rule=rule, moments=MomentType.BFLOAT16)).races == []


def test_only_kernels_that_the_run_uses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(scalars: Any, master: Any, moments: Any, gradient: Any, out: Any, **how: Any) -> None:
        used.add((scalars.rule, master.numel(), out is not None))
        right(scalars, master, moments, gradient, out, **how)

    used, right = set[Any](), kernels.update
    monkeypatch.setattr(kernels, "update", update)
    check(Hyperparameters(rule=UpdateRule.LION), [torch.float32])
    assert used == {(UpdateRule.LION, 20_003, False), (UpdateRule.LION, 20_480, False)}


def test_a_kernel_that_cannot_be_compiled_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "accumulate", accumulate)
    with pytest.raises(DeviceFault, match="before the first step: RuntimeError: Failed to find C compiler"):
        check()


def test_memory_that_runs_out_in_the_check_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "accumulate", accumulate)
    with pytest.raises(torch.OutOfMemoryError):
        check()


def test_the_check_needs_no_more_host_memory_than_it_says() -> None:
    with recorded(HostSlab(device_check.HOST_BYTES), DeviceLedger(None)) as lanes:
        device_check.check_lanes(lanes)


def one_more(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)[-7] += 1


def test_a_copy_that_loses_a_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernels.copy

    def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        whole(dst, src)
        dst[-1] = 0

    monkeypatch.setattr(kernels, "copy", copy)
    with pytest.raises(DeviceFault, match=r"block 0 of 6 test blocks .* came back with wrong values"):
        check()


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_an_update_with_one_other_bit_is_found(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(scalars: Any, master: Any, moments: Any, gradient: Any, out: Any, **how: Any) -> None:
        reference.update(scalars, master, moments, gradient, out)
        one_more([master, *moments, out][which])

    monkeypatch.setattr(kernels, "update", update)
    with pytest.raises(DeviceFault, match=r"an update by \w+ in torch\.\w+: 1 of 20003 values of \w+ differ"):
        check(dtypes=[torch.bfloat16])


def test_a_wrong_half_of_a_master_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_split(*arguments: Any) -> None:
        right(*arguments)
        arguments[2][0] ^= 1

    right = kernels.update_split
    monkeypatch.setattr(kernels, "update_split", update_split)
    with pytest.raises(
        DeviceFault, match="of float32 master parameters stored in two halves: 1 of 20003 values of master"
    ):
        check()


def test_a_wrong_sum_of_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def accumulate(accumulator: torch.Tensor, gradient: torch.Tensor, first: bool) -> None:
        reference.accumulate(accumulator, gradient, first)
        one_more(accumulator)

    monkeypatch.setattr(kernels, "accumulate", accumulate)
    with pytest.raises(DeviceFault, match=r"a sum of gradients in torch.\w+: 1 of 20003 values of accumulator"):
        check()


def test_a_wrong_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "square_sum", lambda values: reference.square_sum(values) + SquareSum(1))
    with pytest.raises(DeviceFault, match="the sum of squares of 20003 gradients"):
        check()


def test_a_fault_has_its_exit_code() -> None:
    assert DeviceFault("").exit_code is ExitCode.DEVICE_FAULT


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_plan_is_rejected_where_no_device_is() -> None:
    plan = local_runs.spread_plan().model_copy(update={"device": "Cuda"})
    with pytest.raises(
        UserError, match=r"for Cuda devices, but rank 3 of this node finds only 0 of them; give the pod"
    ):
        run_job.device_for(plan, World(rank=3, size=4, local_rank=3))
    assert run_job.device_for(local_runs.spread_plan(), World()) == CPU


def test_the_cpu_has_the_generator_that_it_always_had() -> None:
    assert cuda.generator(CPU) is torch.default_generator
