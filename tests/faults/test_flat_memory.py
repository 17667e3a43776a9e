"""A step holds what the step before it held: host slab, spill file, device and bookkeeping, over 1,000 steps in
`make test-all`. Whatever leaks a byte or a record a step ends a run of days."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.depth import FULL
from spillway.plan import ActivationPlan, Policy
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import Spilling
from spillway_trainer.activation_spill.records import Record
from spillway_trainer.activation_spill.transfer import Transfer
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

NUM_STEPS = 1000 if FULL else 40
REDUCED = "" if FULL else " (of 1,000 with SPILLWAY_DEPTH=all)"
KIB = 1 << 10
ANSWERS = (Policy.NVME, Policy.HOST, Policy.RECOMPUTE, Policy.KEEP)
SAVED_BYTES = 3 * 4 * KIB
"""of one segment: three sines, each saves its input of 4 KiB"""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def sines(x: Tensor) -> Tensor:
    return x.sin().sin().sin()


def leaf() -> Tensor:
    return torch.linspace(-1, 1, KIB).requires_grad_()


def num_alive() -> int:
    """Records and transfers that somebody still refers to."""
    gc.collect()
    return sum(type(each) in (Record, Transfer) for each in gc.get_objects())


def test_every_tier_is_flat_over_the_steps_of_a_run(tmp_path: Path) -> None:
    host, ledger = HostSlab(256 * KIB), DeviceLedger(None)
    lanes = CpuLanes(host, ledger)
    nvme = NvmeSlab(tmp_path, 256 * KIB, 1, host=host)
    plan = ActivationPlan(answers=ANSWERS, minimum_bytes=KIB, window_bytes=2 * SAVED_BYTES)
    names = [f"block{index}" for index in range(len(ANSWERS))]
    technique = activation_spill.build(plan, names, ResidentParameters([]), lanes, ledger, nvme)
    before, x = num_alive(), leaf()
    between, after, peaks = set(), set(), set()
    for _ in range(NUM_STEPS):
        y = x * 1.0
        for name in names:
            y = technique.hook.run(name, sines, y)
        technique.start_backward()
        technique.end_step()
        between.add((host.held_bytes, nvme.held_bytes, ledger.held_bytes))
        y.sum().backward()
        del y
        technique.end_step()
        after.add((host.held_bytes, nvme.held_bytes, ledger.held_bytes, len(technique.store.records)))
        peaks.add(nvme.peak_bytes)
        # Beside what waits in host memory there is staging: of the segment's write, and of its read.
        assert host.peak_bytes <= 3 * SAVED_BYTES
    print(f"\n{NUM_STEPS} steps{REDUCED}: {between} between forward and backward, {after} after")
    assert between == {(SAVED_BYTES, SAVED_BYTES, SAVED_BYTES + 4 * KIB)}  # kept, and the input of what is recomputed
    assert after == {(0, 0, 0, 0)}
    assert peaks == {SAVED_BYTES}
    assert num_alive() == before
    lanes.close()
    nvme.close()


@pytest.mark.parametrize(("lean", "spilled_bytes"), [(False, 28 * KIB), (True, 0)])
def test_slab_and_file_are_flat_over_the_steps_of_a_loop_of_ones_own(
    lean: bool, spilled_bytes: int, tmp_path: Path
) -> None:
    spilling, x = (
        Spilling(
            nn.Module(), tmp_path, nvme_bytes=256 * KIB, device_bytes=12 * KIB, minimum_bytes=256,
            transfer_bytes=2 * KIB, ahead_bytes=4 * KIB, lean=lean,
        ),
        leaf(),
    )  # fmt: skip
    before, between, after = num_alive(), set(), set()
    for step in range(NUM_STEPS):
        with spilling:
            loss = sines(sines(sines(x.sin()))).sum()  # but for `x`, which the caller has
        spilling.store.drain()
        file_bytes = spilling.nvme.held_bytes
        loss.backward()
        del loss
        spilling.store.drain()
        if step > 1:  # the first one spills all, and the second keeps what it may
            between.add(file_bytes)
            after.add((spilling.nvme.held_bytes, spilling.host.held_bytes, spilling.ledger.held_bytes))
        assert len(spilling.store.records) < 40
    print(f"\n{NUM_STEPS} steps{REDUCED}: {between} between forward and backward, {after} after")
    assert between == {spilled_bytes}
    assert after == {(0, 0, 0)}
    assert num_alive() == before
    spilling.close()
