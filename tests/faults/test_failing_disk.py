"""Whole runs on a disk whose writes begin to fail: every bit of the result is that of a run with everything resident,
as long as host memory has room for what the disk rejects; else the run ends with the error of the write."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases.model_spill_cases import LANES, Laboratory, Model, Technique
from cases.optimizer_cases import HOST_BYTES, Case, drive, offload, oracle, outcome, split
from fakes.fake_spill_file import FakeSpillFile
from harness import local_runs
from spillway.errors import DeviceOutOfMemory, ExitCode, HostOutOfMemory, SpillIOError, SpillVolumeFull
from spillway.plan import MemoryPlan, Policy, Tier
from spillway_trainer.assemble import Assembly
from spillway_trainer.run_job import survived
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab
from spillway_trainer.trainer import Run

torch.set_num_threads(1)


class Wearing(FakeSpillFile):
    """The writes from number `good` on fail, with EIO or for want of room."""

    def __init__(
        self, directory: Path, nbytes: int, *, num_threads: int, listed: bool = False, good: int = 0, full: bool = False
    ) -> None:
        super().__init__(directory, nbytes, num_threads=num_threads)
        self._left, self._full = good, full

    def write_batch(self, writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        self._left -= 1
        if self._left < 0 and self._full:
            offset, _, label = writes[0]
            raise SpillVolumeFull(f"{self.directory}: no room for {label} at offset {offset}", label=label)
        if self._left < 0:
            self.failing.add("write")
        return super().write_batch(writes)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root = tmp_path_factory.mktemp("failing_disk")
    return Laboratory(root, local_runs.write_text(root / "text"))


ON_NVME = Technique(homes="nvme", answers="nvme")
TECHNIQUES = {
    "in order": ON_NVME,
    "weight stationary": replace(ON_NVME, order="WeightStationary", boundaries=Policy.NVME),
    "overlapped": replace(ON_NVME, overlap="Forward"),
}


@pytest.mark.parametrize(
    ("name", "lanes", "full"),
    [*((name, "cpu", full) for name in TECHNIQUES for full in (False, True)), ("in order", "lazy", False)],
)
def test_a_disk_that_fails_at_any_write_changes_no_bit(
    name: str, lanes: str, full: bool, laboratory: Laboratory
) -> None:
    """While the model is loaded, in the first step, and in the last."""
    model, technique = Model(), replace(TECHNIQUES[name], lanes=lanes)
    seen: list[Assembly] = []

    def during(run: Run, assembly: Assembly) -> None:
        seen.append(assembly)

    for good in (3, 150, 290):
        outcome = laboratory.run(
            model, technique.plan(model), LANES[lanes], open_file=partial(Wearing, good=good, full=full), during=during
        )
        assert outcome.differences(laboratory.resident(model)) == []
        faults = seen[-1].spill_faults()
        assert faults["device_retired"] == 1
        assert faults["write_failed"] == (1 if full else 3)


def test_out_of_memory_after_a_failed_write_is_reported_as_the_write_error(laboratory: Laboratory) -> None:
    model = Model()
    plan: MemoryPlan = ON_NVME.plan(model)
    tight = plan.model_copy(
        update={
            "bytes": plan.bytes | {Tier.HOST: plan.bytes[Tier.HOST].model_copy(update={"buffers": 520_000})},
            "budget": plan.budget | {Tier.HOST: 520_000},
        }
    )
    seen: list[Assembly] = []

    def during(run: Run, assembly: Assembly) -> None:
        seen.append(assembly)

    laboratory.run(model, tight, LANES["cpu"], open_file=partial(Wearing, good=10**9))  # it fits
    with pytest.raises((SpillIOError, DeviceOutOfMemory, HostOutOfMemory)) as caught:
        laboratory.run(model, tight, LANES["cpu"], open_file=partial(Wearing, good=150), during=during)
    with pytest.raises(SpillIOError, match=r"write of .* at offset \d+: .*errno 5") as told, survived(seen[0]):
        raise caught.value
    assert told.value.exit_code is ExitCode.SPILL_IO_ERROR
    assert told.value.details["errno"] == errno.EIO


@pytest.mark.parametrize("good", [0, 7, 40])
@pytest.mark.parametrize("full", [False, True], ids=["EIO", "ENOSPC"])
def test_states_that_cannot_be_written_stay_in_host_memory_bit_for_bit(good: int, full: bool) -> None:
    case = Case(torch.bfloat16, clipping=1.0)
    host, ledger, said = HostSlab(HOST_BYTES), DeviceLedger(None), list[str]()
    nvme = NvmeSlab(
        Path("/spill"), HOST_BYTES, 1, open_file=partial(Wearing, good=good, full=full), host=host, tell=said.append
    )
    lanes = CpuLanes(host, ledger)
    parameters = case.parameters()
    optimizer = offload(parameters, case, split(0.2, 0, 0, 1009, nvme=0.8), lanes, ledger, nvme)
    result = outcome(optimizer, parameters, drive(optimizer, case))
    assert result.difference(oracle(case)) == []
    assert said[-1] == "spill: /spill is not written to any more; its contents can still be read"
    lanes.close()
    nvme.close()
