"""States on NVMe change no bit: every share, chunk size and kind of lanes against the plain optimizer; what is read is
what was written, or the step ends with an error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cases.optimizer_cases import (
    HOST_BYTES,
    LANES,
    NUM_STEPS,
    SETTINGS,
    SHAPES,
    UNTIL_MIDDLE,
    Case,
    drive,
    nvme_slab,
    odd_chunk,
    offload,
    oracle,
    outcome,
    split,
)
from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import TracingLanes
from harness import local_runs
from harness.depth import sweep
from spillway.errors import ExitCode, SpillIOError, SpillVolumeFull
from spillway.plan import ActivationPlan, OptimizerPlan, Overlap
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer import assemble as assembly_module
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.optimizer_offload.assign import Path as Path_
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

torch.set_num_threads(1)

Shares = tuple[float, float, float, float]
SPLITS: list[Shares] = [(0, 0, 0, 1), (0.5, 0, 0, 0.5), (0.3, 0.2, 0.2, 0.3), (0, 0.4, 0.2, 0.4)]
"""c, g, s, n"""
CHUNKS = (1009, 1 << 20)
OVERLAPS: tuple[Overlap, ...] = ("None", "Forward")
DTYPES = (torch.bfloat16, torch.float32)
STATES = sum(math.prod(shape) for shape in SHAPES.values())


def plan(shares: Shares, chunk_parameters: int, num_threads: int = 1, overlap: Overlap = "None") -> OptimizerPlan:
    cpu, streamed, resident_share, nvme = shares
    return split(cpu, streamed, resident_share, chunk_parameters, num_threads, overlap, nvme=nvme)


def memory() -> tuple[HostSlab, DeviceLedger]:
    return HostSlab(HOST_BYTES), DeviceLedger(None)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lanes_name", LANES)
@pytest.mark.parametrize("shares", SPLITS, ids=str)
def test_every_share_on_nvme_leaves_the_bits_of_the_plain_optimizer(
    shares: Shares, lanes_name: str, dtype: torch.dtype
) -> None:
    """Over 5 steps with a skipped one, and with a parameter that has no gradient in most of them."""
    for num_micro_batches, tied, chunk, overlap in sweep((1, 4), (False, True), CHUNKS, OVERLAPS, quick=2, ci=3):
        case = Case(dtype, num_micro_batches, clipping=1.0 if tied else None, tied=tied)
        host, ledger = memory()
        lanes = LANES[lanes_name](host, ledger)
        parameters = case.parameters()
        optimizer = offload(parameters, case, plan(shares, chunk, 1, overlap), lanes, ledger, nvme_slab())
        result = outcome(optimizer, parameters, drive(optimizer, case))
        lanes.close()
        assert result.difference(oracle(case)) == [], (case, chunk, overlap)
        assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == (), (case, chunk)


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", list(UpdateRule))
def test_every_rule_of_update_leaves_the_bits_of_the_plain_optimizer(rule: UpdateRule, moments: MomentType) -> None:
    """Those with one moment have a row less on NVMe."""
    case = Case(torch.bfloat16, num_micro_batches=2, clipping=1.0, tied=True, rule=rule, moments=moments)
    host, ledger = memory()
    parameters, lanes, nvme = case.parameters(), LazyLanes(host, ledger), nvme_slab()
    chunk = odd_chunk(moments)
    optimizer = offload(parameters, case, plan((0.2, 0.2, 0, 0.6), chunk), lanes, ledger, nvme)
    pages = [-(-nbytes // 4096) for nbytes in (4 * chunk, *(moments.bytes_of(chunk) for _ in rule.moments))]
    chunks = [placed for placed in optimizer._placed if placed.chunk.path is Path_.NVME]
    whole = [placed for placed in chunks if placed.chunk.size == chunk]
    assert {placed.block.nbytes for placed in whole} == {4096 * sum(pages)}
    assert nvme.held_bytes == sum(placed.block.nbytes for placed in chunks)
    assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_real_spill_file_leaves_the_bits_of_the_plain_optimizer(
    num_threads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    case = Case(dtype, num_micro_batches=2, clipping=1.0, tied=True)
    host, ledger = memory()
    nvme = NvmeSlab(tmp_path, HOST_BYTES, 2)
    lanes, parameters = CpuLanes(host, ledger), case.parameters()
    optimizer = offload(parameters, case, plan((0.2, 0, 0, 0.8), 1009, num_threads), lanes, ledger, nvme)
    result = outcome(optimizer, parameters, drive(optimizer, case))
    lanes.close()
    nvme.close()
    assert result.difference(oracle(case)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 0, 0, 1), (1, 0, 0, 0)),
        ((1, 0, 0, 0), (0, 0, 0, 1)),
        ((0.3, 0.2, 0.2, 0.3), (0, 0.4, 0.2, 0.4)),
        ((0, 0, 1, 0), (0.5, 0, 0, 0.5)),
    ],
    ids=str,
)
def test_what_one_plan_saved_another_continues_bitwise(before: Shares, after: Shares, dtype: torch.dtype) -> None:
    case = Case(dtype, num_micro_batches=2, clipping=1.0, tied=True)
    host, ledger = memory()
    first_parameters = case.parameters()
    first = offload(first_parameters, case, plan(before, 1009), LazyLanes(host, ledger), ledger, nvme_slab())
    norms = drive(first, case, 0, UNTIL_MIDDLE)
    saved, scalars = dict(first.state()), first.scalars()

    parameters = Case(dtype, tied=True, seed=7).parameters()  # other weights: all must come from the checkpoint
    host, ledger = memory()
    second = offload(parameters, case, plan(after, 4096), LazyLanes(host, ledger), ledger, nvme_slab())
    for name, value in saved.items():
        second.load(name, value)
    second.load_scalars(scalars)
    result = outcome(second, parameters, norms + drive(second, case, UNTIL_MIDDLE, NUM_STEPS))
    assert result.difference(oracle(case)) == []


def test_states_can_be_reloaded_after_updates_and_read_between_steps() -> None:
    """As a run is put back: what the file holds is replaced, and reading it changes nothing."""
    case = Case(torch.bfloat16, clipping=1.0)
    host, ledger = memory()
    parameters = case.parameters()
    optimizer = offload(parameters, case, plan((0, 0, 0, 1), 1009), CpuLanes(host, ledger), ledger, nvme_slab())
    start, scalars = {name: value.clone() for name, value in optimizer.state()}, optimizer.scalars()
    drive(optimizer, case, 0, 2)
    for name, value in start.items():
        optimizer.load(name, value)
    optimizer.load_scalars(scalars)
    norms = drive(optimizer, case, 0, 1)
    assert dict(optimizer.state()).keys() == start.keys()
    result = outcome(optimizer, parameters, norms + drive(optimizer, case, 1, NUM_STEPS))
    assert result.difference(oracle(case)) == []


def test_moments_are_read_only_once_they_were_written() -> None:
    """Before the first update only masters are in the file; the first update reads them alone."""
    read: list[int] = []

    class Counting(FakeSpillFile):
        def read_batch(self, reads):  # type: ignore[no-untyped-def]
            read.append(len(reads))
            super().read_batch(reads)

    case = Case(torch.bfloat16)
    host, ledger = memory()
    optimizer = offload(
        case.parameters(), case, plan((0, 0, 0, 1), 1 << 20), LazyLanes(host, ledger), ledger,
        nvme_slab(open_file=Counting),
    )  # fmt: skip
    drive(optimizer, case, 0, 1)
    first, read[:] = list(read), []
    drive(optimizer, case, 2, 3)
    assert set(first) == {1}
    assert set(read) == {3}


def test_a_fresh_run_writes_each_of_its_masters_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's memory takes no bytes of a parameter that nobody has filled yet."""
    monkeypatch.setattr(
        assembly_module, "SpillFile", lambda directory, nbytes, *, num_threads, listed: FakeSpillFile(
            directory, nbytes, num_threads=num_threads
        )
    )  # fmt: skip
    job = local_runs.job_file(tmp_path, tmp_path / "text", tmp_path / "corpus", epoch=1)
    changes = {"optimizer": plan((0.3, 0, 0, 0.7), 1009), "activations": ActivationPlan()}
    assembly = assembly_module.assemble(job, local_runs.spread_plan().model_copy(update=changes))
    optimizer, nvme = assembly.optimizer, assembly.tiers.nvme
    assert isinstance(optimizer, OptimizerOffload) and nvme is not None
    assert nvme._devices[0].moved_bytes == 0
    assembly_module.fill(assembly, seed=1)
    masters = [placed.rows.begin(1) for placed in optimizer._placed if placed.chunk.path is Path_.NVME]
    assert nvme._devices[0].moved_bytes == sum(masters) > 0
    first = dict(assembly_module.initial_states(assembly.model, 1))
    loaded = {name: value for name, value in optimizer.state() if name in first}
    assert all(torch.equal(value, first[name]) for name, value in loaded.items())
    assert any(value.any() for value in loaded.values())
    assembly.tiers.close()


def test_host_memory_holds_the_window_in_place_of_the_states() -> None:
    """Four buffers of the largest chunk in whole pages, beside what the CPU's update takes in any case."""
    case, held = Case(torch.bfloat16), []
    for shares in ((0, 0, 0, 1), (1, 0, 0, 0)):
        host, ledger = memory()
        nvme = nvme_slab()
        optimizer = offload(case.parameters(), case, plan(shares, 1 << 20), LazyLanes(host, ledger), ledger, nvme)
        assert optimizer.held_bytes()["nvme"] == nvme.held_bytes
        held.append((host.held_bytes, nvme.held_bytes))
    (with_window, stored), (with_states, nothing) = held
    rows = [4096 * -(-4 * math.prod(shape) // 4096) for shape in SHAPES.values()]
    assert (stored, nothing) == (3 * sum(rows), 0)
    assert 0 <= with_states - with_window - (12 * STATES - 4 * 3 * max(rows)) <= 4096


# --- faults -----------------------------------------------------------------------------------------------------------


def failing(fault: str) -> tuple[CpuLanes, OptimizerOffload, Case, FakeSpillFile]:
    """An optimizer after one good step, whose file has `fault` from now on."""
    files: list[FakeSpillFile] = []

    def opened(directory: Path, nbytes: int, *, num_threads: int) -> FakeSpillFile:
        files.append(FakeSpillFile(directory, nbytes, num_threads=num_threads))
        return files[-1]

    case = Case(torch.bfloat16)
    host, ledger = memory()
    lanes = CpuLanes(host, ledger)
    optimizer = offload(
        case.parameters(), case, plan((0.2, 0, 0, 0.8), 1009), lanes, ledger, nvme_slab(open_file=opened)
    )
    drive(optimizer, case, 0, 1)
    files[0].failing.add(fault)
    return lanes, optimizer, case, files[0]


@pytest.mark.parametrize("fault", ["read", "write", "flip"])
def test_a_fault_of_the_disk_ends_the_step_and_no_state_leaves_afterwards(fault: str) -> None:
    """Also when the disk works again: nothing that the failed step left behind can reach a checkpoint."""
    lanes, optimizer, case, file = failing(fault)
    with pytest.raises(SpillIOError, match=r"states of \w+\[\d+:\d+\]") as raised:
        drive(optimizer, case, 1, 2)
    assert raised.value.exit_code is ExitCode.SPILL_IO_ERROR
    file.failing.clear()
    with pytest.raises(SpillIOError, match=r"states of"):
        list(optimizer.state())
    lanes.close()


def test_a_fault_while_a_checkpoint_is_read_is_raised() -> None:
    lanes, optimizer, _, _ = failing("flip")
    with pytest.raises(SpillIOError, match="checksum"):
        list(optimizer.state())
    lanes.close()


def test_volume_too_small_is_rejected_before_any_step_with_both_sizes() -> None:
    case = Case(torch.bfloat16)
    host, ledger = memory()
    with pytest.raises(
        SpillVolumeFull, match=r"optimizer states do not fit .* Raise spec.memory.budget.nvme"
    ) as raised:
        offload(case.parameters(), case, plan((0, 0, 0, 1), 1009), LazyLanes(host, ledger), ledger, nvme_slab(1 << 16))
    assert raised.value.details["budget_bytes"] == 1 << 16
    assert raised.value.details["wanted_bytes"] > 12 * 8652


def test_shares_on_nvme_without_a_spill_file_are_rejected() -> None:
    case = Case(torch.bfloat16)
    host, ledger = memory()
    with pytest.raises(ValueError, match="no bytes for a spill file"):
        OptimizerOffload(case.parameters(), {}, SETTINGS, plan((0, 0, 0, 1), 1009), LazyLanes(host, ledger), ledger)
