"""Optimizer states on a spill file that fails, on every engine: the step ends with the error's own words, and nothing
of it can be saved."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest
import torch

from cases.optimizer_cases import HOST_BYTES, Case, drive, offload, split
from spillway.errors import ExitCode, SpillIOError, SpillVolumeFull, SpillwayError
from spillway_trainer.kernels.io_engine import Direction, system_call
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab
from spillway_trainer.tiers.spill_file import SpillFile

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("engine")


class Disk:
    """In place of pread and pwrite: `fault` takes effect once it is set, on every transfer of its direction."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.broken = False

    def __call__(self, direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        fails = self.broken and self._fault.startswith(direction.name.lower())
        if fails and "error" in self._fault:
            return -errno.EIO
        if fails and "full" in self._fault:
            return -errno.ENOSPC
        moved = system_call(direction, file, memory, offset)
        if fails and "flip" in self._fault:
            memory[moved - 1] ^= 0x10
        return moved


FAULTS = {
    "read error": (SpillIOError, ExitCode.SPILL_IO_ERROR, "read of states of .* Input/output error"),
    "read flip": (
        SpillIOError,
        ExitCode.SPILL_IO_ERROR,
        "bytes that were read differ from those written .checksum: expected",
    ),
    "write error": (SpillIOError, ExitCode.SPILL_IO_ERROR, "write of states of .* Input/output error"),
    "write full": (SpillVolumeFull, ExitCode.SPILL_VOLUME_FULL, "no room for states of .* free some"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nvme_fault_fails_the_step_and_every_later_read_of_the_states(fault: str, tmp_path: Path) -> None:
    kind, code, words = FAULTS[fault]
    disk, case = Disk(fault), Case(torch.bfloat16, clipping=1.0)
    host, ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
    nvme = NvmeSlab(tmp_path, HOST_BYTES, 2, open_file=partial(SpillFile, call=disk))
    lanes = CpuLanes(host, ledger)
    optimizer = offload(case.parameters(), case, split(0.2, 0, 0, 1009, nvme=0.8), lanes, ledger, nvme)
    drive(optimizer, case, 0, 1)
    disk.broken = True
    with pytest.raises(kind, match=words) as raised:
        drive(optimizer, case, 1, 2)
    assert isinstance(raised.value, SpillwayError)
    assert raised.value.exit_code is code
    disk.broken = False
    with pytest.raises(kind, match=words):
        list(optimizer.state())
    lanes.close()
    nvme.close()
