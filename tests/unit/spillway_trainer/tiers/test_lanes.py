import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from fakes.lazy_lanes import LazyLanes
from fakes.tracing import TracingLanes
from spillway.errors import DeviceOutOfMemory, HostOutOfMemory
from spillway.plan import Tier
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Buffer, CpuLanes, Lane, Lanes, Region
from spillway_trainer.tiers.releases import Releases

PAGE = 4096


def tracing(host: HostSlab, ledger: DeviceLedger) -> TracingLanes:
    return TracingLanes(host, ledger, {})


EVERY_KIND = pytest.mark.parametrize("make", [CpuLanes, LazyLanes, tracing])


def make_lanes(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> Lanes:
    return make(HostSlab(4 * PAGE), DeviceLedger(4 * PAGE))


@EVERY_KIND
def test_an_operation_runs_after_its_events(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes, order = make_lanes(make), []
    first = lanes.submit(Lane.D2H, lambda: order.append("d2h"))
    second = lanes.submit(Lane.NVME_WRITE, lambda: order.append("write"), after=[first])
    lanes.submit(Lane.H2D, lambda: order.append("h2d"), after=[second]).wait()
    lanes.close()
    assert order == ["d2h", "write", "h2d"]


@EVERY_KIND
def test_crossed_edges_between_two_lanes_do_not_lock_up(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes, event, count = make_lanes(make), None, []
    for number in range(50):
        lane = Lane.H2D if number % 2 else Lane.D2H
        event = lanes.submit(lane, lambda: count.append(1), after=[event] if event else [])
    event.wait()
    lanes.close()
    assert len(count) == 50


@EVERY_KIND
def test_an_error_is_raised_by_each_wait(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    def fail() -> None:
        raise OSError("cable")

    lanes = make_lanes(make)
    event = lanes.submit(Lane.NVME_READ, fail)
    for _ in range(2):
        with pytest.raises(OSError, match="cable"):
            event.wait()
    lanes.close()


@EVERY_KIND
def test_an_operation_after_a_failed_one_does_not_run(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    def fail() -> None:
        raise OSError("cable")

    lanes, ran = make_lanes(make), []
    read = lanes.submit(Lane.NVME_READ, fail)
    with pytest.raises(OSError, match="cable"):
        lanes.submit(Lane.H2D, lambda: ran.append(1), after=[read]).wait()
    lanes.close()
    assert ran == []


@EVERY_KIND
def test_moved_bytes_are_counted_by_lane(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes = make_lanes(make)
    for nbytes in (10, 20):
        lanes.submit(Lane.D2H, lambda: None, nbytes=nbytes).wait()
    lanes.close()
    assert lanes.moved_bytes() == {"d2h": 30}


@EVERY_KIND
def test_a_device_buffer_is_charged_until_it_is_released(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    ledger = DeviceLedger(None)
    lanes = make(HostSlab(0), ledger)
    buffer = lanes.acquire(Tier.DEVICE, 100, "reload")
    assert ledger.by_purpose() == {"buffers": 100}
    assert buffer.tensor.data_ptr() % 64 == 0
    lanes.release(buffer)
    assert ledger.held_bytes == 0


@EVERY_KIND
def test_acquire_waits_for_releases_in_flight(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes = make_lanes(make)
    for _ in range(20):
        buffer = lanes.acquire(Tier.HOST, 3 * PAGE, "staging")
        write = lanes.submit(Lane.NVME_WRITE, lambda: None, writes=[buffer])
        lanes.release(buffer, after=[write])
    lanes.close()


@EVERY_KIND
def test_acquire_raises_when_nothing_in_flight_can_help(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes = make_lanes(make)
    with pytest.raises(HostOutOfMemory):
        lanes.acquire(Tier.HOST, 5 * PAGE, "staging")
    with pytest.raises(DeviceOutOfMemory):
        lanes.acquire(Tier.DEVICE, 5 * PAGE, "reload")
    lanes.close()


@EVERY_KIND
def test_close_is_idempotent(make: Callable[[HostSlab, DeviceLedger], Lanes]) -> None:
    lanes = make_lanes(make)
    lanes.submit(Lane.CPU, lambda: None)
    lanes.close()
    lanes.close()


def test_lanes_of_the_cpu_work_side_by_side() -> None:
    lanes, meeting = make_lanes(CpuLanes), threading.Barrier(2, timeout=30)
    events = [lanes.submit(lane, meeting.wait) for lane in (Lane.H2D, Lane.D2H)]
    for event in events:
        event.wait()
    lanes.close()


def test_memory_is_free_when_a_waiter_wakes_up() -> None:
    ledger = DeviceLedger(None)
    lanes, gate = CpuLanes(HostSlab(0), ledger), threading.Event()
    buffer = lanes.acquire(Tier.DEVICE, 100, "reload")
    event = lanes.submit(Lane.H2D, gate.wait)
    lanes.release(buffer, after=[event])
    assert ledger.held_bytes == 100
    gate.set()
    event.wait()
    assert ledger.held_bytes == 0
    lanes.close()


def test_a_lazy_operation_runs_only_when_it_is_waited_for() -> None:
    lanes, ran = make_lanes(LazyLanes), []
    event = lanes.submit(Lane.H2D, lambda: ran.append(1))
    assert (ran, event.done) == ([], False)
    lanes.wait(event)
    assert (ran, event.done) == ([1], True)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_lazy_buffers_are_poisoned_when_acquired(tier: Tier) -> None:
    buffer = make_lanes(LazyLanes).acquire(tier, 256, "reload")
    assert bool((buffer.tensor == 0xFF).all())
    assert bool(buffer.tensor.view(torch.bfloat16).isnan().all())


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_lazy_release_takes_effect_with_its_last_event_and_poisons(tier: Tier) -> None:
    freed: list[bool] = []
    buffer = Buffer(
        tier, torch.zeros(256, dtype=torch.uint8), "b", lambda bytes_: freed.append(bool((bytes_ == 0xFF).all()))
    )
    lanes = make_lanes(LazyLanes)
    write = lanes.submit(Lane.NVME_WRITE, lambda: None)
    lanes.release(buffer, after=[write])
    assert freed == []
    write.wait()
    assert freed == [True]


def test_released_device_buffer_still_held_by_autograd_is_not_poisoned() -> None:
    lanes = make_lanes(LazyLanes)
    buffer = lanes.acquire(Tier.DEVICE, 256, "reload")
    gradient = buffer.tensor.zero_().view(torch.float32)
    lanes.release(buffer)
    assert bool((gradient == 0).all())


class Stuck(Region):
    def drop(self) -> None:
        raise RuntimeError("cannot be dropped")


def test_a_region_that_cannot_be_dropped_leaves_nobody_waiting() -> None:
    lanes, hold = make_lanes(CpuLanes), threading.Event()
    held = lanes.submit(Lane.CPU, hold.wait)
    lanes.release(Stuck(1, "stuck"), after=[held])
    hold.set()
    with pytest.raises(RuntimeError, match="cannot be dropped"):
        held.wait()
    lanes.submit(Lane.CPU, lambda: None).wait()
    lanes.close()


class Finished:
    """An event that is complete once somebody waited."""

    done = False

    def wait(self) -> None:
        self.done = True


def test_a_release_may_come_between_any_two_steps_of_waiting_for_one() -> None:
    """A worker's destructors and the collector add without the lock, whatever the waiting thread is at."""
    releases = Releases()
    releases.add(Region(1, "oldest"), [Finished()])

    def add(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not Releases.wait_for_one.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            releases.add(Region(1, "newer"), [Finished()])
        return add

    before = sys.gettrace()
    sys.settrace(add)
    try:
        assert releases.wait_for_one()
    finally:
        sys.settrace(before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_work_of_a_lane_has_no_team_of_threads() -> None:
    """libgomp gives each thread a team of its own, and with more threads than cores regions of compute become slow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    lanes = CpuLanes(HostSlab(0), DeviceLedger(None))
    try:
        lanes.submit(Lane.CPU, lambda: None).wait()
        before = len(list(Path("/proc/self/task").iterdir()))
        lanes.submit(Lane.CPU, lambda: torch.ones(1 << 22).add_(1)).wait()
        assert len(list(Path("/proc/self/task").iterdir())) == before
    finally:
        lanes.close()
        torch.set_num_threads(num_threads)
