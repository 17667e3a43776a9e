"""Live corrections on one rank: the slab that becomes smaller, forwards that keep to it, what is gathered and told."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.fake_spill_file import FakeSpillFile
from harness.local_runs import PREDICTION
from spillway.api.progress import SpillVolume
from spillway.errors import SpillIOError
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Policy, Tier, TierBytes
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import Chooser, PolicyLimits
from spillway_trainer.activation_spill.chooser import WATCHED_STEPS
from spillway_trainer.activation_spill.live_correction import CHECK_STEPS, MovedBytes, RankSample, Volume, attach
from spillway_trainer.ranks import ONE_RANK, OneRank, Ranks
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.encrypted_file import encrypted
from spillway_trainer.tiers.extents import Extents
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab, OpenFile
from spillway_trainer.tiers.spill_file import SpillFile

PAGE = 4096
HOST, NVME = Policy.HOST, Policy.NVME


# --- the slab ---------------------------------------------------------------------------------------------------------


def test_free_runs_are_withdrawn_from_the_top_and_never_handed_out_again() -> None:
    extents = Extents(8 * PAGE)
    offsets = [extents.allocate(2 * PAGE, "states") for _ in range(3)]
    assert offsets == [0, 2 * PAGE, 4 * PAGE]
    extents.free(2 * PAGE)
    assert extents.withdraw(3 * PAGE - 5) == [(6 * PAGE, 2 * PAGE), (3 * PAGE, PAGE)]
    assert (extents.capacity_bytes, extents.held_bytes, extents.largest_free_bytes) == (5 * PAGE, 4 * PAGE, PAGE)
    assert extents.allocate(2 * PAGE, "activations") is None
    assert extents.allocate(PAGE, "activations") == 2 * PAGE
    assert extents.withdraw(PAGE) == []
    extents.free(4 * PAGE)
    assert extents.allocate(2 * PAGE, "activations") == 4 * PAGE


def filled(num_pages: int) -> Tensor:
    memory = torch.empty((num_pages + 1) * PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][: num_pages * PAGE].random_(0, 256)


def bytes_on_disk(directories: Sequence[Path]) -> list[int]:
    return [sum(file.stat().st_blocks * 512 for file in directory.glob("slab-*")) for directory in directories]


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_smaller_slab_gives_the_volume_its_bytes_and_keeps_what_is_held(
    tmp_path: Path, num_devices: int, is_encrypted: bool
) -> None:
    directories = [tmp_path / str(number) for number in range(num_devices)]
    for directory in directories:
        directory.mkdir()
    open_file: OpenFile = partial(SpillFile, listed=True)
    slab = NvmeSlab(
        directories, 96 * PAGE, 1, open_file=encrypted(open_file) if is_encrypted else open_file, host=HostSlab(0)
    )
    low, gap, high = (slab.allocate(size * PAGE, label) for size, label in ((6, "states"), (12, "gone"), (9, "more")))
    contents = {extent: filled(extent.nbytes // PAGE) for extent in (low, high)}
    stored = {extent: slab.write_batch([(extent.at(0), own, "own")])[0] for extent, own in contents.items()}
    gap.drop()
    before = bytes_on_disk(directories)
    assert slab.give_back(75 * PAGE) == 75 * PAGE
    assert (slab.capacity_bytes, slab.held_bytes) == (21 * PAGE, 15 * PAGE)
    assert sum(before) - sum(bytes_on_disk(directories)) == 75 * PAGE
    assert slab.give_back(96 * PAGE) == 6 * PAGE
    assert slab.held_bytes == slab.capacity_bytes
    for extent, own in contents.items():
        read = filled(own.numel() // PAGE).zero_()
        slab.read_batch([(stored[extent], read, "own")])
        assert torch.equal(read, own)
    slab.close()


def test_file_system_that_cannot_free_space_costs_capacity_but_not_the_run() -> None:
    class Stubborn(FakeSpillFile):
        def give_back(self, runs: Sequence[tuple[int, int]]) -> None:
            raise SpillIOError("/spill: Operation not supported")

    said: list[str] = []
    slab = NvmeSlab(Path("/spill"), 4 * PAGE, 1, open_file=Stubborn, tell=said.append)
    assert slab.give_back(3 * PAGE) == 3 * PAGE
    assert slab.capacity_bytes == PAGE
    assert len(said) == 1 and "Operation not supported" in said[0]


# --- forwards ---------------------------------------------------------------------------------------------------------

SIZE = 4096
NBYTES = 4 * SIZE
SINES, BLOCKS = 3, 4
NUM_STORAGES = SINES * BLOCKS
SPILLED = NUM_STORAGES * NBYTES
STATES = 8 * NBYTES


@dataclass
class Asked:
    """The operator of rank 0."""

    wanted_activations: int = SPILLED
    volumes: list[SpillVolume] = field(default_factory=list)

    def spill_volume(self, volume: SpillVolume) -> None:
        self.volumes.append(volume)


@dataclass
class Run:
    """Four blocks of three sines each, which save 16 KiB each, beside states that are on NVMe for good."""

    directory: Path
    answers: tuple[Policy, ...] = (NVME,) * BLOCKS
    reserve: int = 17 * NBYTES
    watches: bool = True
    ranks: Ranks = ONE_RANK
    operator: Asked = field(default_factory=Asked)
    told: list[MovedBytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.plan = plan_of(self.answers, self.reserve)
        host, ledger = HostSlab(self.plan.slab_bytes(Tier.HOST)), DeviceLedger(None)
        lanes = CpuLanes(host, ledger)
        file: OpenFile = partial(SpillFile, listed=True)
        self.nvme = NvmeSlab(self.directory, SPILLED + STATES, 1, open_file=file, host=host)
        self.states = self.nvme.allocate(STATES, "states")
        limits = PolicyLimits(
            device_bytes=8 * NBYTES, kept_bytes=0, host_bytes=self.plan.bytes[Tier.HOST].activations,
            nvme_bytes=SPILLED, window_bytes=NBYTES, ahead_bytes=4 * NBYTES,
        )  # fmt: skip
        choosing = partial(Chooser, limits=limits, lanes=lanes, agree=self.ranks.gather, watches=self.watches)
        self.segments = [f"block{index}" for index in range(BLOCKS)]
        self.technique = activation_spill.build(
            self.plan.activations, self.segments, ResidentParameters([]), lanes, ledger, self.nvme,
            choosing=choosing, may_move=self.plan.movable_activations > 0,
        )  # fmt: skip
        attach(self.plan, self.technique, self.nvme, self.ranks, self.told.append, self.operator)
        self.held: list[dict[Tier, int]] = []

    def step(self, size: int = SIZE) -> Tensor:
        x = torch.linspace(-1, 1, size, requires_grad=True)
        y = x * 1.0
        for segment in self.segments:
            y = self.technique.hook.run(segment, sines, y)
        self.technique.start_backward()
        self.technique.store.drain()
        self.held.append(self.technique.held_bytes())
        y.sum().backward()
        self.technique.end_step()
        assert x.grad is not None
        return x.grad


def plan_of(answers: tuple[Policy, ...], reserve: int) -> MemoryPlan:
    share = SPILLED // len(answers)
    return MemoryPlan(
        job="small", node="local", mode="Auto", micro_batch_size=1, num_micro_batches=1, num_segments=len(answers),
        optimizer=OptimizerPlan(),
        activations=ActivationPlan(answers=answers, minimum_bytes=1024, window_bytes=1 << 30),
        bytes={
            Tier.DEVICE: TierBytes(),
            Tier.HOST: TierBytes(activations=share * answers.count(HOST), buffers=1 << 20, reserve=reserve),
            Tier.NVME: TierBytes(activations=share * answers.count(NVME), optimizer_states=STATES),
        },
        budget=dict.fromkeys(Tier, 1 << 26),
        prediction=PREDICTION,
    )  # fmt: skip


def sines(x: Tensor) -> Tensor:
    for _ in range(SINES):
        x = x.sin()
    return x


def expected(size: int = SIZE) -> Tensor:
    x = torch.linspace(-1, 1, size, requires_grad=True)
    y = x * 1.0
    for _ in range(NUM_STORAGES):
        y = y.sin()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


def corrected(run: Run, activations: int) -> None:
    """Steps until activations may take so much."""
    run.operator.wanted_activations = activations
    for _ in range(CHECK_STEPS + 1):
        assert torch.equal(run.step(), expected())
        if run.told:
            return
    pytest.fail("no correction at any look")


@pytest.mark.parametrize("answers", [(NVME, NVME, NVME, NVME), (NVME, HOST, NVME, NVME)], ids=["nvme", "both"])
def test_from_the_next_step_on_forwards_keep_to_what_was_corrected(tmp_path: Path, answers: tuple[Policy, ...]) -> None:
    run = Run(tmp_path, answers)
    cap = 4 * NBYTES + 100
    corrected(run, cap)
    since = len(run.held)
    for _ in range(2 * WATCHED_STEPS):
        assert torch.equal(run.step(), expected())
    assert torch.equal(run.step(SIZE // 2), expected(SIZE // 2))
    assert run.held[0][Tier.NVME] == NBYTES * SINES * answers.count(NVME)
    for held in run.held[since:-1]:
        assert held[Tier.NVME] <= cap
        assert held[Tier.HOST] + held[Tier.NVME] >= SPILLED
    assert run.held[since][Tier.NVME] == 4 * NBYTES
    assert run.held[-1][Tier.NVME] <= cap
    assert run.nvme.held_bytes == STATES


def test_where_nothing_can_be_timed_forwards_keep_to_it_all_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path, watches=False)
    corrected(run, 4 * NBYTES)
    since = len(run.held)
    for _ in range(WATCHED_STEPS + 1):
        assert torch.equal(run.step(), expected())
    assert {held[Tier.NVME] for held in run.held[:since]} == {SPILLED}
    assert {held[Tier.NVME] for held in run.held[since:]} == {4 * NBYTES}
    assert run.technique.chooser is not None and run.technique.chooser.choice is None


def test_the_file_is_smaller_and_states_are_what_they_were(tmp_path: Path) -> None:
    run = Run(tmp_path)
    states = filled(STATES // PAGE)
    (stored,) = run.nvme.write_batch([(run.states.at(0), states, "states")])
    before = bytes_on_disk([tmp_path])
    corrected(run, NBYTES)
    (told,) = run.told
    assert (told.activations_before, told.activations, told.spill_file) == (SPILLED, NBYTES, STATES + NBYTES)
    assert before[0] - bytes_on_disk([tmp_path])[0] == told.spill_file_before - told.spill_file == SPILLED - NBYTES
    assert told.said(7) == (
        "correction at step 7: activations may now use 16.0 KiB of the spill file instead of 192 KiB, and 240 KiB "
        "more host memory than planned; spill file 320 KiB -> 144 KiB"
    )
    read = filled(STATES // PAGE)
    run.nvme.read_batch([(stored, read, "states")])
    assert torch.equal(read, states)


def test_no_more_moves_than_the_reserve_has_room_for(tmp_path: Path) -> None:
    run = Run(tmp_path, reserve=9 * NBYTES)
    room = 9 * NBYTES - NBYTES - PAGE * (NUM_STORAGES + BLOCKS)
    run.step()
    assert run.operator.volumes[-1].host_room == room
    corrected(run, 0)
    assert run.told[0].activations == SPILLED - room
    for _ in range(CHECK_STEPS):
        assert torch.equal(run.step(), expected())
    assert len(run.told) == 1
    assert run.operator.volumes[-1].host_room == 0


def test_a_second_correction_takes_the_rest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    corrected(run, 8 * NBYTES)
    run.told.clear()
    corrected(run, 0)
    assert torch.equal(run.step(), expected())
    assert run.held[-1] == {Tier.DEVICE: 0, Tier.HOST: SPILLED, Tier.NVME: 0}
    assert run.nvme.capacity_bytes == STATES


def test_without_a_reserve_nothing_is_gathered(tmp_path: Path) -> None:
    run = Run(tmp_path, reserve=0)
    run.operator.wanted_activations = 0
    for _ in range(CHECK_STEPS + 1):
        run.step()
    assert run.technique.chooser is None
    assert (run.told, run.operator.volumes) == ([], [])


# --- ranks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOfTwo(OneRank):
    """Beside another that says what it is told to, of every gathering about volumes."""

    other: RankSample = field(kw_only=True)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), list(self.other) if len(values) == len(RankSample._fields) else list(values)]


def seen(directory: Path, **changes: float) -> RankSample:
    volume = Volume.of(directory)
    return RankSample(*volume, volume.free, 4 * NBYTES, float("inf"), 10.0)._replace(**changes)


def test_the_volume_with_the_least_free_bytes_is_told_and_the_ranks_on_it(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=OneOfTwo(other=seen(tmp_path, free=5.0)))
    run.step()
    (told,) = run.operator.volumes
    statistics = os.statvfs(tmp_path)
    assert told.size == statistics.f_blocks * statistics.f_frsize
    assert (told.free, told.num_ranks, told.activations, told.host_room) == (5, 2, SPILLED, 4 * NBYTES)
    elsewhere = Run(tmp_path, ranks=OneOfTwo(other=seen(tmp_path, free=5.0, identity=1.0, size=9.0)))
    elsewhere.step()
    assert (elsewhere.operator.volumes[0].num_ranks, elsewhere.operator.volumes[0].size) == (1, 9)


def test_a_volume_that_cannot_be_asked_is_never_the_fullest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, ranks=OneOfTwo(other=seen(tmp_path, free=7.0)))

    def reject(directory: Path) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "statvfs", reject)
    run.step()
    assert [(told.free, told.num_ranks) for told in run.operator.volumes] == [(7, 1)]


def test_what_is_held_at_a_correction_is_given_back_at_a_later_look(tmp_path: Path) -> None:
    """As of a graph that somebody keeps."""
    run = Run(tmp_path)
    run.step()
    kept, run.operator.wanted_activations = run.nvme.allocate(SPILLED, "a graph"), 0
    correction = run.technique.after_step
    while not run.told:
        correction()
    assert run.told[0].spill_file == run.nvme.capacity_bytes == STATES + SPILLED
    kept.drop()
    for _ in range(CHECK_STEPS):
        correction()
    assert run.nvme.capacity_bytes == STATES


def test_rank_applies_a_correction_heard_by_another_within_the_least_room(tmp_path: Path) -> None:
    """This one hears nothing, and has more room than the other."""
    run = Run(tmp_path, ranks=OneOfTwo(other=seen(tmp_path, wanted=0.0)))
    run.step()
    assert [told.activations for told in run.told] == [SPILLED - 4 * NBYTES]
