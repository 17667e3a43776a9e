import gc

import pytest
import torch

from spillway.errors import DeviceOutOfMemory
from spillway_trainer.tiers.device_ledger import DeviceLedger


def storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()


def test_held_bytes_are_the_sum_of_charges_less_releases() -> None:
    ledger = DeviceLedger(1000)
    ledger.charge("parameters", 600)
    ledger.charge("gradients", 300)
    ledger.release("gradients", 300)
    assert ledger.held_bytes == 600
    assert ledger.by_purpose() == {"parameters": 600}


def test_peak_survives_releases_until_it_is_reset() -> None:
    ledger = DeviceLedger(None)
    ledger.charge("buffers", 500)
    ledger.release("buffers", 500)
    assert ledger.peak_bytes == 500
    ledger.reset_peak()
    assert ledger.peak_bytes == 0


def test_a_charge_beyond_the_budget_names_the_holders() -> None:
    ledger = DeviceLedger(1024)
    ledger.charge("parameters", 1000)
    with pytest.raises(DeviceOutOfMemory, match=r"25 B more .* limit of 1\.00 KiB .*parameters 1000 B.*in a new job"):
        ledger.charge("activations", 25)
    assert ledger.held_bytes == 1000


def test_a_charge_waits_for_releases_in_flight_before_it_fails() -> None:
    ledger = DeviceLedger(1000)
    ledger.charge("buffers", 1000)
    in_flight = [400, 300]

    def reclaim() -> bool:
        if in_flight:
            ledger.release("buffers", in_flight.pop())
            return True
        return False

    ledger.reclaim = reclaim
    ledger.charge("activations", 600)
    assert ledger.by_purpose() == {"activations": 600, "buffers": 300}


@pytest.mark.parametrize("is_saved", [False, True])
def test_within_the_budget_a_charge_beyond_the_plan_waits_first(is_saved: bool) -> None:
    """Copies that are late take no memory that the plan does not count; what it counts too little, the budget gives."""
    ledger, in_flight = DeviceLedger(2000, planned_bytes=1000), [300, 100]

    def reclaim() -> bool:
        if in_flight:
            ledger.release("copies", in_flight.pop())
            return True
        return False

    storages = [storage(size) for size in (200, 900, 901)]

    def charge(saved: torch.UntypedStorage) -> None:
        if is_saved:
            ledger.charge_saved(saved)
        else:
            ledger.charge("buffers", saved.nbytes())

    ledger.reclaim = reclaim
    ledger.charge("copies", 400)
    ledger.charge("parameters", 500)
    charge(storages[0])
    assert (in_flight, ledger.peak_bytes) == ([300], 1000)
    charge(storages[1])
    assert (in_flight, ledger.peak_bytes) == ([], 1600)
    with pytest.raises(DeviceOutOfMemory, match=r"limit of 1\.95 KiB"):
        charge(storages[2])


def test_a_saved_storage_is_charged_once_until_its_last_holder_leaves() -> None:
    ledger, saved = DeviceLedger(None), storage(256)
    first, second = ledger.charge_saved(saved), ledger.charge_saved(saved)
    ledger.release_saved(first)
    assert ledger.held_bytes == 256
    ledger.release_saved(second)
    assert ledger.held_bytes == 0


def test_saved_storage_waits_for_pending_releases_and_raises_if_none_help() -> None:
    ledger, saved, in_flight = DeviceLedger(1000), storage(256), [1000]
    ledger.charge("buffers", 1000)

    def reclaim() -> bool:
        if in_flight:
            ledger.release("buffers", in_flight.pop())
            return True
        return False

    ledger.reclaim = reclaim
    keys = [ledger.charge_saved(saved), ledger.charge_saved(saved)]
    assert (ledger.by_purpose(), ledger.peak_bytes) == ({"activations": 256}, 1000)
    with pytest.raises(DeviceOutOfMemory, match="activations 256 B"):
        ledger.charge_saved(storage(800))
    for key in keys:
        ledger.release_saved(key)
    assert ledger.by_purpose() == {}


def test_a_recycled_storage_address_is_a_new_charge() -> None:
    ledger = DeviceLedger(None)
    for nbytes in (128, 256, 64) * 50:
        saved = storage(nbytes)
        key = ledger.charge_saved(saved)
        assert ledger.held_bytes == nbytes
        ledger.release_saved(key)
        del saved


def test_a_release_inside_a_charge_does_not_lock_up() -> None:
    """The collector may run a destructor anywhere, also while the ledger's lock is held by the same thread."""

    class Holder:
        def __init__(self) -> None:
            ledger.charge("activations", 1)
            self.circle = self

        def __del__(self) -> None:
            ledger.release("activations", 1)

    ledger = DeviceLedger(None)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Holder()
            ledger.by_purpose()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert ledger.held_bytes == 0
