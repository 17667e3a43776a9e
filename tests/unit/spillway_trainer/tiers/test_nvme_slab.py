from pathlib import Path

import pytest
import torch

from fakes.fake_spill_file import FakeSpillFile
from spillway.errors import SpillIOError, SpillVolumeFull
from spillway_trainer.tiers.nvme_slab import NvmeExtent, NvmeSlab

PAGE = 4096


def make_slab(num_pages: int = 4) -> NvmeSlab:
    return NvmeSlab(Path("/spill"), num_pages * PAGE, 1, open_file=FakeSpillFile)


def offsets(extent: NvmeExtent) -> list[tuple[int, int]]:
    return [(piece.offset, piece.nbytes) for piece in extent.pieces]


def test_extents_are_whole_blocks_and_do_not_overlap() -> None:
    slab = make_slab()
    first, second = slab.allocate(5000, "block0"), slab.allocate(10, "block1")
    assert offsets(first) == [(0, 2 * PAGE)]
    assert offsets(second) == [(2 * PAGE, PAGE)]


def test_a_dropped_extent_is_used_again() -> None:
    slab = make_slab()
    slab.allocate(4 * PAGE, "block0").drop()
    assert slab.held_bytes == 0
    assert offsets(slab.allocate(4 * PAGE, "block1")) == [(0, 4 * PAGE)]


def test_a_full_file_says_what_was_wanted_and_what_is_free() -> None:
    slab = make_slab()
    slab.allocate(3 * PAGE, "block0")
    with pytest.raises(SpillVolumeFull, match=r"8\.00 KiB for block1.*largest free block is 4\.00 KiB.*budget\.nvme"):
        slab.allocate(2 * PAGE, "block1")


def test_an_allocation_waits_for_releases_in_flight_before_it_fails() -> None:
    slab = make_slab()
    in_flight = [slab.allocate(4 * PAGE, "block0")]

    def reclaim() -> bool:
        if in_flight:
            in_flight.pop().drop()
            return True
        return False

    slab.reclaim = reclaim
    assert offsets(slab.allocate(PAGE, "block1")) == [(0, PAGE)]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    slab = NvmeSlab(tmp_path, 4 * PAGE, 2)
    extent = slab.allocate(PAGE, "block0")
    memory = torch.empty(3 * PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][: 2 * PAGE]
    written, read = memory[:PAGE].random_(0, 256), memory[PAGE:].zero_()
    (stored,) = slab.write_batch([(extent.at(0), written, "block0")])
    slab.read_batch([(stored, read, "block0")])
    slab.close()
    assert torch.equal(written, read)


def test_a_wrong_bit_is_an_error_and_not_a_result() -> None:
    files: list[FakeSpillFile] = []

    def open_file(directory: Path, nbytes: int, *, num_threads: int) -> FakeSpillFile:
        files.append(FakeSpillFile(directory, nbytes, num_threads=num_threads))
        return files[0]

    slab = NvmeSlab(Path("/spill"), PAGE, 1, open_file=open_file)
    tensor = torch.arange(64, dtype=torch.uint8)
    (stored,) = slab.write_batch([(slab.allocate(64, "block0").at(0), tensor, "block0")])
    files[0].failing.add("flip")
    with pytest.raises(SpillIOError, match="block0"):
        slab.read_batch([(stored, tensor, "block0")])
