import random

import pytest
import torch

from spillway.errors import HostOutOfMemory
from spillway_trainer.tiers.host_slab import HostSlab

PAGE = 4096


def test_extents_are_page_aligned_and_have_the_length_asked_for() -> None:
    tensor = HostSlab(8 * PAGE).allocate(5000, "moments")
    assert tensor.data_ptr() % PAGE == 0
    assert tensor.numel() == 5000


def test_a_large_slab_is_aligned_too() -> None:
    slab = HostSlab(32 << 20)
    assert slab.allocate(10, "moments").data_ptr() % (2 << 20) == 0


def test_held_bytes_count_whole_pages() -> None:
    slab = HostSlab(8 * PAGE)
    slab.allocate(1, "moments")
    assert slab.held_bytes == PAGE


def test_freed_neighbours_become_one_free_run() -> None:
    slab = HostSlab(3 * PAGE)
    parts = [slab.allocate(PAGE, "moments") for _ in range(3)]
    for index in (0, 2, 1):
        slab.free(parts[index])
    assert slab.allocate(3 * PAGE, "masters").numel() == 3 * PAGE


def test_low_addresses_are_reused_first() -> None:
    slab = HostSlab(4 * PAGE)
    first = slab.allocate(PAGE, "moments")
    slab.allocate(PAGE, "moments")
    slab.free(first)
    assert slab.allocate(PAGE, "masters").data_ptr() == first.data_ptr()


def test_an_extent_of_no_bytes_comes_back_like_any_other() -> None:
    slab = HostSlab(32 << 20)
    slab.free(slab.allocate(0, "nothing"))
    assert slab.held_bytes == 0


def test_a_full_slab_names_its_holders() -> None:
    slab = HostSlab(4 * PAGE)
    slab.allocate(3 * PAGE, "exp_avg")
    with pytest.raises(HostOutOfMemory, match=r"8\.00 KiB for masters.*exp_avg 12\.0 KiB.*budget\.host"):
        slab.allocate(2 * PAGE, "masters")


def test_a_slab_of_nothing_rejects_every_allocation() -> None:
    with pytest.raises(HostOutOfMemory):
        HostSlab(0).allocate(1, "masters")


def test_an_allocation_waits_for_releases_in_flight_before_it_fails() -> None:
    slab = HostSlab(2 * PAGE)
    in_flight = [slab.allocate(2 * PAGE, "staging")]
    slab.reclaim = lambda: bool(in_flight) and (slab.free(in_flight.pop()) or True)
    assert slab.allocate(PAGE, "masters").numel() == PAGE


def test_an_allocation_beyond_the_plan_waits_for_releases_in_flight() -> None:
    slab = HostSlab(6 * PAGE, planned_bytes=3 * PAGE)
    in_flight = [slab.allocate(PAGE, "staging"), slab.allocate(PAGE, "staging")]
    slab.reclaim = lambda: bool(in_flight) and (slab.free(in_flight.pop()) or True)
    slab.allocate(PAGE + 1, "staging")
    assert (len(in_flight), slab.peak_bytes) == (1, 3 * PAGE)
    slab.allocate(3 * PAGE, "more than was planned")
    assert (len(in_flight), slab.peak_bytes) == (0, 5 * PAGE)


def test_random_allocations_never_overlap_and_all_space_comes_back() -> None:
    slab, generator = HostSlab(64 * PAGE), random.Random(1)
    live: list[tuple[torch.Tensor, int]] = []
    for number in range(600):
        if live and generator.random() < 0.5:
            tensor, mark = live.pop(generator.randrange(len(live)))
            assert bool((tensor == mark).all())
            slab.free(tensor)
        else:
            try:
                tensor = slab.allocate(generator.randrange(1, 6 * PAGE), "random")
            except HostOutOfMemory:
                continue
            live.append((tensor.fill_(number % 256), number % 256))
    for tensor, _ in live:
        slab.free(tensor)
    assert slab.held_bytes == 0
    assert slab.allocate(64 * PAGE, "all").numel() == 64 * PAGE


def test_pages_given_back_are_those_of_nobody() -> None:
    slab = HostSlab(32 << 20)
    kept, freed = slab.allocate(4 << 20, "states"), slab.allocate(4 << 20, "window")
    kept.fill_(1)
    freed.fill_(2)
    address = freed.data_ptr() - kept.data_ptr()
    slab.free(freed)
    slab.give_pages_back()
    assert kept.min() == 1
    assert slab.memory[address : address + (4 << 20)].max() == 0
