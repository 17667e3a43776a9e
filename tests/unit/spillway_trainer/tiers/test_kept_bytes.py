"""What a spill device rejects stays in host memory, comes back as it was, and is told once; without room the write's
error is the step's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.fake_spill_file import FakeSpillFile
from spillway.errors import SpillIOError, SpillVolumeFull
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.nvme_slab import NvmeSlab, PlannedRates, divided

PAGE = 4096
MIB = 1 << 20


class Setup:
    """A slab on so many directories, and host memory of `host_pages`, which may grow by `spare_pages`."""

    def __init__(
        self, directories: int = 1, host_pages: int = 64, spare_pages: int = 0, nbytes: int = 64 * PAGE
    ) -> None:
        self.files: dict[Path, FakeSpillFile] = {}
        self.said: list[str] = []
        self.seconds = 0.0
        self.host = HostSlab(host_pages * PAGE, lambda: spare_pages * PAGE)
        self.paths = [Path(f"/spill{index}") for index in range(directories)]
        self.slab = NvmeSlab(
            self.paths, nbytes, 1, open_file=self._open, host=self.host, tell=self.said.append,
            planned=PlannedRates(1e9, 1e9), clock=lambda: self.seconds,
        )  # fmt: skip

    def _open(self, directory: Path, nbytes: int, *, num_threads: int) -> FakeSpillFile:
        self.files[directory] = FakeSpillFile(directory, nbytes, num_threads=num_threads)
        return self.files[directory]

    @property
    def file(self) -> FakeSpillFile:
        (file,) = self.files.values()
        return file


def pattern(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_failed_write_stays_in_host_memory_and_reads_back_bit_for_bit() -> None:
    setup = Setup()
    extent = setup.slab.allocate(2 * PAGE, "block0")
    setup.file.failing.add("write")
    written, found = pattern(2 * PAGE, 1), torch.empty(2 * PAGE, dtype=torch.uint8)
    (stored,) = setup.slab.write_batch([(extent.at(0), written, "block0")])
    setup.slab.read_batch([(stored, found, "block0")])
    assert torch.equal(found, written)
    assert setup.host.held_bytes == 2 * PAGE
    extent.drop()
    assert setup.host.held_bytes == 0


def test_log_names_each_bad_extent_once_and_the_retired_device_once() -> None:
    setup = Setup()
    setup.file.failing.add("write")
    extents = [setup.slab.allocate(PAGE, f"block{index}") for index in range(10)]
    for index, extent in enumerate(extents):
        setup.slab.write_batch([(extent.at(0), pattern(PAGE, index), f"block{index}")])
    assert [line for line in setup.said if "offset" in line] == [
        f"spill: /spill0: write of block{index} at offset {index * PAGE}: Input/output error (errno 5). The bytes of "
        "this write stay in host memory, and its place in the file is not used again"
        for index in range(3)
    ]
    assert setup.said[3:] == ["spill: /spill0 is not written to any more; its contents can still be read"]
    assert setup.slab.faults() == {"write_failed": 3, "device_retired": 1}
    assert not setup.slab.takes_spills


def test_an_extent_that_failed_is_never_handed_out_again() -> None:
    setup = Setup()
    setup.file.failing.add("write")
    bad = setup.slab.allocate(2 * PAGE, "block0")
    setup.slab.write_batch([(bad.at(0), pattern(PAGE, 1), "block0")])
    setup.file.failing.clear()
    bad.drop()
    later = [setup.slab.allocate(2 * PAGE, "later") for _ in range(31)]
    assert all(piece.offset >= 2 * PAGE for extent in later for piece in extent.pieces)
    with pytest.raises(SpillVolumeFull):
        setup.slab.allocate(PAGE, "one more")
    assert setup.slab.held_bytes == 62 * PAGE


def test_a_retired_device_still_reads_what_it_holds_and_is_written_no_more() -> None:
    setup = Setup()
    good = setup.slab.allocate(PAGE, "good")
    (stored,) = setup.slab.write_batch([(good.at(0), pattern(PAGE, 1), "good")])
    setup.file.failing.add("write")
    for index in range(3):
        bad = setup.slab.allocate(PAGE, f"bad{index}")
        setup.slab.write_batch([(bad.at(0), pattern(PAGE, 2), "bad")])
    setup.file.failing = {"any further write is a mistake"}
    setup.file.write_batch = None  # type: ignore[method-assign, assignment]
    (again,) = setup.slab.write_batch([(good.at(0), pattern(PAGE, 3), "good")])
    found, kept = torch.empty(PAGE, dtype=torch.uint8), torch.empty(PAGE, dtype=torch.uint8)
    setup.slab.read_batch([(stored, found, "good"), (again, kept, "good")])
    assert torch.equal(found, pattern(PAGE, 1))
    assert torch.equal(kept, pattern(PAGE, 3))


def test_what_is_kept_is_overwritten_in_place() -> None:
    setup = Setup(host_pages=1)
    setup.file.failing.add("write")
    extent, found = setup.slab.allocate(PAGE, "states"), torch.empty(PAGE, dtype=torch.uint8)
    for seed in range(5):
        (stored,) = setup.slab.write_batch([(extent.at(0), pattern(PAGE, seed), "states")])
    setup.slab.read_batch([(stored, found, "states")])
    assert torch.equal(found, pattern(PAGE, 4))
    assert setup.slab.faults() == {"write_failed": 1}


def test_write_error_without_host_room_names_tensor_offset_and_errno() -> None:
    setup = Setup(host_pages=1)
    extent = setup.slab.allocate(2 * PAGE, "block0")
    setup.file.failing.add("write")
    with pytest.raises(SpillIOError, match=r"write of block0 at offset 0: .*errno 5") as caught:
        setup.slab.write_batch([(extent.at(0), pattern(2 * PAGE, 1), "block0")])
    assert caught.value.details == {"label": "block0", "offset": 0, "errno": errno.EIO}
    assert (setup.said, setup.slab.faults()) == ([], {})  # nothing was survived


def test_retired_device_without_host_room_reports_the_first_failure() -> None:
    setup = Setup(host_pages=3)
    setup.file.failing.add("write")
    for index in range(3):
        extent = setup.slab.allocate(PAGE, f"block{index}")
        setup.slab.write_batch([(extent.at(0), pattern(PAGE, 1), f"block{index}")])
    with pytest.raises(
        SpillVolumeFull, match=r"/spill0 is not written to any more after this failure: .*of block0 at offset 0"
    ):
        setup.slab.allocate(PAGE, "block3")
    with pytest.raises(SpillIOError, match=r"of block0 at offset 0.*no space for 4\.00 KiB of states") as caught:
        setup.slab.write_batch([(extent.at(PAGE), pattern(PAGE, 1), "states")])
    assert caught.value.details["errno"] == errno.EIO


def test_the_host_slab_grows_once_and_only_for_what_a_device_rejected() -> None:
    setup = Setup(host_pages=0, spare_pages=2)
    assert setup.host.capacity_bytes == 0
    setup.file.failing.add("write")
    extent = setup.slab.allocate(3 * PAGE, "block0")
    for index in range(2):
        setup.slab.write_batch([(extent.at(index * PAGE), pattern(PAGE, index), "block0")])
    assert setup.host.capacity_bytes == setup.host.held_bytes == setup.host.peak_bytes == 2 * PAGE
    assert setup.host.by_label() == {"kept block0": 2 * PAGE}
    with pytest.raises(SpillIOError):
        setup.slab.write_batch([(extent.at(2 * PAGE), pattern(PAGE, 2), "block0")])
    extent.drop()
    assert setup.host.held_bytes == 0
    assert setup.host.allocate(2 * PAGE, "staging").numel() == 2 * PAGE


def test_a_read_that_fails_is_never_survived() -> None:
    setup = Setup()
    extent = setup.slab.allocate(PAGE, "block0")
    (stored,) = setup.slab.write_batch([(extent.at(0), pattern(PAGE, 1), "block0")])
    for fault in ("read", "flip"):
        setup.file.failing = {fault}
        with pytest.raises(SpillIOError, match="block0 at offset 0"):
            setup.slab.read_batch([(stored, torch.empty(PAGE, dtype=torch.uint8), "block0")])


def test_a_slow_device_is_told_once_and_a_quick_transfer_ends_it() -> None:
    setup = Setup()
    extent = setup.slab.allocate(PAGE, "block0")

    def took(seconds: float) -> None:
        readings = iter((0.0, seconds))
        setup.slab._clock = lambda: next(readings)
        setup.slab.write_batch([(extent.at(0), pattern(PAGE, 1), "block0")])

    took(9.0)
    assert not setup.slab.is_slow
    took(1.0)
    assert setup.slab.is_slow
    took(5.0)
    assert [line for line in setup.said if "planned 954 MiB/s" in line and "block0 at offset 0" in line] == setup.said
    assert len(setup.said) == 1
    took(1e-6)
    assert not setup.slab.is_slow


# --- several devices --------------------------------------------------------------------------------------------------


def test_an_extent_is_striped_over_all_devices_and_comes_back_whole() -> None:
    setup = Setup(directories=3, nbytes=12 * MIB)
    extent = setup.slab.allocate(6 * MIB, "block0")
    assert [piece.nbytes for piece in extent.pieces] == [2 * MIB] * 3
    whole, found = pattern(6 * MIB, 1), torch.empty(6 * MIB, dtype=torch.uint8)
    cuts = [(0, 3 * MIB), (3 * MIB, 5 * MIB), (5 * MIB, 6 * MIB)]
    stored = setup.slab.write_batch([(extent.at(a), whole[a:b], f"{a}") for a, b in cuts])
    assert [len(each) for each in stored] == [2, 2, 1]  # type: ignore[arg-type]
    setup.slab.read_batch([(each, found[a:b], f"{a}") for each, (a, b) in zip(stored, cuts, strict=True)])
    assert torch.equal(found, whole)
    assert all(file._blocks for file in setup.files.values())
    extent.drop()
    assert setup.slab.held_bytes == 0
    setup.slab.close()
    assert all(file.is_closed for file in setup.files.values())


def test_what_is_smaller_than_a_stripe_goes_to_the_device_that_holds_least() -> None:
    setup = Setup(directories=2)
    extents = [setup.slab.allocate(PAGE, f"block{index}") for index in range(6)]
    assert all(len(extent.pieces) == 1 for extent in extents)
    assert [extents[0].pieces[0].device.directory, extents[1].pieces[0].device.directory] == setup.paths
    assert {device.extents.held_bytes for device in setup.slab._devices} == {3 * PAGE}


def test_one_failing_device_of_two_is_left_out_and_the_other_goes_on() -> None:
    setup = Setup(directories=2, host_pages=1024, nbytes=16 * MIB)
    setup.files[setup.paths[0]].failing.add("write")
    for seed in range(5):
        extent = setup.slab.allocate(2 * MIB, f"block{seed}")
        (stored,) = setup.slab.write_batch([(extent.at(0), pattern(2 * MIB, seed), f"block{seed}")])
        found = torch.empty(2 * MIB, dtype=torch.uint8)
        setup.slab.read_batch([(stored, found, "x")])
        assert torch.equal(found, pattern(2 * MIB, seed))
        extent.drop()
    assert setup.slab.takes_spills
    assert [piece.device.directory for piece in setup.slab.allocate(4 * MIB, "later").pieces] == [setup.paths[1]]
    assert setup.slab.faults() == {"write_failed": 3, "device_retired": 1}


def test_a_full_device_leaves_its_share_to_the_others() -> None:
    setup = Setup(directories=2, nbytes=8 * MIB)
    first = setup.slab._devices[0]
    assert first.extents.allocate(7 * MIB // 2, "somebody else") is not None
    extent = setup.slab.allocate(4 * MIB, "block0")
    assert [(piece.device.directory, piece.nbytes) for piece in extent.pieces] == [(setup.paths[1], 2 * MIB)] * 2


@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [3.0, 1.0, 1.0], [1.0, 100.0], [5.0]], ids=str)
def test_shares_are_whole_blocks_by_rate_and_add_up(weights: list[float]) -> None:
    for nbytes in (PAGE, 7 * PAGE, 3 * MIB + PAGE):
        sizes = divided(nbytes, weights)
        assert sum(sizes) == nbytes
        assert all(size % PAGE == 0 and size >= 0 for size in sizes)
    sizes = divided(1024 * PAGE, weights)
    expected = [min(w or 1.0, 4.0 * min(v or 1.0 for v in weights)) for w in weights]
    assert all(abs(s - 1024 * PAGE * w / sum(expected)) <= 2 * PAGE for s, w in zip(sizes, expected, strict=True))


def test_a_child_process_is_rejected_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=r"was used in its forked child -1; the two would write to the same place"):
        setup.slab.allocate(PAGE, "block0")
