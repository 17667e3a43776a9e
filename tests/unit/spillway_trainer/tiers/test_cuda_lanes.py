"""CudaLanes against streams that only remember the order (`fake_streams`): what a device would have to keep."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fakes.fake_streams import FakeEvent, FakeStreams, RecordedLanes, host_and_ledger, recorded
from spillway.errors import DeviceOutOfMemory, HostOutOfMemory
from spillway.plan import Tier
from spillway_trainer.kernels.pinned import PINNED_BYTES, spans
from spillway_trainer.tiers import cuda_lanes
from spillway_trainer.tiers.cuda_lanes import DeviceBuffer, Stream, StreamOperation, Streams
from spillway_trainer.tiers.lanes import Event, Lane, QueuedOperation, Region

PAGE = 4096
NOTHING: Callable[[], None] = lambda: None  # noqa: E731


def region(label: str = "memory") -> Region:
    return Region(64, label)


class HeldLane(FakeStreams):
    """A device that does nothing of `lane` before `held` is set."""

    def __init__(self, lane: Lane, held: threading.Event) -> None:
        super().__init__()
        self._stream, self._held = f"lane-{lane}", held

    def record(self, stream: str, *, timed: bool = False) -> FakeEvent:
        event = super().record(stream, timed=timed)
        if stream == self._stream:
            event.synchronize = self._held.wait  # type: ignore[assignment]
        return event


def races_of(schedule: Callable[[RecordedLanes], object], kind: type[RecordedLanes] = RecordedLanes) -> list[str]:
    host, ledger = host_and_ledger(16 * PAGE)
    with recorded(host, ledger, kind=kind) as lanes:
        schedule(lanes)
    return lanes.fake.races


EDGES = [(first, second) for first in Lane for second in Lane if first is not second]


@pytest.mark.parametrize(("first", "second"), EDGES)
def test_an_operation_comes_after_its_event_on_every_pair_of_lanes(first: Lane, second: Lane) -> None:
    memory = region()

    def schedule(lanes: RecordedLanes) -> None:
        written = lanes.submit(first, NOTHING, writes=[memory])
        read = lanes.submit(second, NOTHING, reads=[memory], after=[written])
        lanes.submit(first, NOTHING, writes=[memory], after=[read]).wait()

    assert races_of(schedule) == []


@pytest.mark.parametrize(("first", "second"), EDGES)
def test_without_the_edge_there_is_a_race(first: Lane, second: Lane) -> None:
    memory = region()

    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        began = threading.Event()
        lanes.submit(first, began.set, writes=[memory])
        began.wait()  # a wait that the lanes do not know of
        lanes.submit(second, NOTHING, reads=[memory]).wait()
    assert len(lanes.fake.races) == 1, lanes.fake.races


@pytest.mark.parametrize("lane", Lane)
def test_compute_goes_on_after_the_event_that_it_waits_for(lane: Lane) -> None:
    memory = region()

    def schedule(lanes: RecordedLanes) -> None:
        lanes.wait(lanes.submit(lane, NOTHING, writes=[memory]))
        lanes.compute(reads=[memory])
        lanes.submit(lane, NOTHING, writes=[memory], after=[lanes.computed()]).wait()

    assert races_of(schedule) == []


@pytest.mark.parametrize("lane", Lane)
def test_what_reads_before_the_compute_stream_has_written_is_found(lane: Lane) -> None:
    memory = region()

    def schedule(lanes: RecordedLanes) -> None:
        lanes.compute(writes=[memory])
        lanes.submit(lane, NOTHING, reads=[memory]).wait()

    assert len(races_of(schedule)) == 1


def test_the_host_does_not_wait_for_a_stream_to_wait_for_another() -> None:
    """The compute stream is told to wait for an upload that the device has not done."""
    host, ledger = host_and_ledger()
    held = threading.Event()
    with recorded(host, ledger, HeldLane(Lane.H2D, held)) as lanes:
        upload = lanes.submit(Lane.H2D, NOTHING)
        lanes.wait(upload)
        assert not upload.done
        held.set()


def test_an_update_submitted_to_compute_does_not_hold_the_compute_stream() -> None:
    """It has a stream of its own: forward waits for the updates that it needs, and for no others."""
    memory, other = region("streamed"), region("other")

    def schedule(lanes: RecordedLanes) -> None:
        lanes.submit(Lane.COMPUTE, NOTHING, writes=[memory])
        lanes.compute(reads=[other])
        lanes.compute(reads=[memory])

    assert len(races_of(schedule)) == 1  # and the law of lanes.py gives no such order


def test_device_memory_is_used_after_what_the_compute_stream_had_there() -> None:
    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        before = Region(PAGE, "what lay there")
        lanes.compute(writes=[before])
        buffer = lanes.acquire(Tier.DEVICE, PAGE, "buffer")
        assert isinstance(buffer, DeviceBuffer)
        lanes.submit(Lane.H2D, NOTHING, reads=[before], writes=[buffer]).wait()
        lanes.release(buffer)
    assert lanes.fake.races == []


def test_what_an_operation_uses_is_held_until_the_stream_has_done_it() -> None:
    host, ledger = host_and_ledger()
    held, launched = threading.Event(), threading.Event()
    with recorded(host, ledger, HeldLane(Lane.D2H, held)) as lanes:
        gradient = torch.ones(3)
        alive = weakref.ref(gradient)

        def work(tensor: torch.Tensor = gradient) -> None:
            launched.set()

        copied = lanes.submit(Lane.D2H, work)
        del gradient, work
        launched.wait()
        assert alive() is not None
        held.set()
        copied.wait()
        assert alive() is None


def test_who_waits_goes_on_only_when_another_thread_has_let_go_of_all() -> None:
    host, ledger = host_and_ledger()
    letting_go, gone_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Held:
        def __del__(self) -> None:
            letting_go.set()
            gone_on.wait(0.2)
            ended.set()

    with recorded(host, ledger) as lanes:
        copied = lanes.submit(Lane.D2H, partial(id, Held()))  # type: ignore[arg-type]
        assert letting_go.wait(60)  # by the watcher
        copied.wait()
        found = ended.is_set()
        gone_on.set()
    assert found


@pytest.mark.parametrize("lane", Lane)
def test_released_memory_is_dropped_when_its_users_are_complete(lane: Lane) -> None:
    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        for tier in (Tier.HOST, Tier.DEVICE):
            buffer = lanes.acquire(tier, PAGE, "buffer")
            used = lanes.submit(lane, NOTHING, writes=[buffer])
            lanes.wait(used)
            lanes.compute(reads=[buffer])
            lanes.release(buffer, after=(used, lanes.computed()))
    assert lanes.fake.races == []
    assert (host.held_bytes, ledger.held_bytes) == (0, 0)


def test_a_release_that_waits_for_compute_alone_needs_nobody_to_look() -> None:
    host, ledger = host_and_ledger()
    dropped = threading.Event()

    class Told(Region):
        def drop(self) -> None:
            dropped.set()

    with recorded(host, ledger) as lanes:
        lanes.release(Told(1, "told"), after=[lanes.computed()])
        assert dropped.wait(60)


def test_an_error_of_the_launch_is_raised_by_every_wait_and_by_compute() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        failed = lanes.submit(Lane.H2D, fail)
        ran: list[int] = []
        after = [lanes.submit(lane, lambda: ran.append(1), after=[failed]) for lane in (Lane.D2H, Lane.CPU)]
        for wait in (failed.wait, failed.wait, lambda: lanes.wait(failed), *(event.wait for event in after)):
            with pytest.raises(RuntimeError, match="no such kernel"):
                wait()
    assert ran == []


def test_an_error_that_the_device_tells_late_is_raised_by_who_waits() -> None:
    class Failing(FakeStreams):
        def record(self, stream: str, *, timed: bool = False) -> FakeEvent:
            event = super().record(stream, timed=timed)
            event.error = RuntimeError("illegal address") if stream == "lane-h2d" else None
            return event

    host, ledger = host_and_ledger()
    with recorded(host, ledger, Failing()) as lanes, pytest.raises(RuntimeError, match="illegal address"):
        lanes.submit(Lane.H2D, NOTHING).wait()


def test_host_work_that_fails_keeps_what_follows_out_of_the_stream() -> None:
    def fail() -> None:
        raise OSError("cable")

    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        read, ran = lanes.submit(Lane.NVME_READ, fail), list[int]()
        with pytest.raises(OSError, match="cable"):
            lanes.submit(Lane.H2D, lambda: ran.append(1), after=[read]).wait()
    assert ran == []


def test_crossed_edges_between_all_lanes_do_not_lock_up() -> None:
    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        event: Event | None = None
        count: list[int] = []
        for number in range(120):
            lane = list(Lane)[number * 5 % len(Lane)]
            event = lanes.submit(lane, lambda: count.append(1), after=[event] if event else [])
            if number % 7 == 0:
                lanes.wait(event)
        assert event is not None
        event.wait()
    assert len(count) == 120


def test_a_ready_copy_passes_one_that_waits_for_the_host() -> None:
    host, ledger = host_and_ledger()
    held, copied = threading.Event(), threading.Event()
    with recorded(host, ledger) as lanes:
        updated = lanes.submit(Lane.CPU, lambda: assert_true(held.wait(60)))
        late = lanes.submit(Lane.H2D, NOTHING, after=[updated])
        behind = lanes.submit(Lane.COMPUTE, NOTHING, after=[late])
        lanes.submit(Lane.H2D, copied.set)
        assert copied.wait(60)
        assert not late.done
        held.set()
        behind.wait()
        late.wait()


def test_copies_behind_one_update_keep_the_order_of_their_submission() -> None:
    """Also one that the launcher comes to after the update has ended, and before it is told so."""
    host, ledger = host_and_ledger()
    before, held, order = threading.Event(), threading.Event(), list[int]()
    with recorded(host, ledger) as lanes:
        gate = lanes.submit(Lane.CPU, lambda: assert_true(before.wait(60)))
        update = lanes.submit(Lane.CPU, lambda: assert_true(held.wait(60)))
        events = [lanes.submit(Lane.D2H, NOTHING, after=[gate])]
        events += [lanes.submit(Lane.H2D, partial(order.append, number), after=[update]) for number in range(20)]
        assert isinstance(update, QueuedOperation)
        while not update.is_awaited:
            os.sched_yield()
        with lanes._launching[Lane.D2H]:  # the launcher stands here
            before.set()
            gate.wait()
            late = [lanes.submit(Lane.H2D, partial(order.append, number), after=[update]) for number in range(20, 40)]
            held.set()
            update.wait()
        for event in (*events, *late):
            event.wait()
    assert order == [*range(40)]


def assert_true(found: bool) -> None:
    assert found


def test_failed_device_allocation_reports_what_the_run_holds() -> None:
    host, ledger = host_and_ledger()
    with recorded(host, ledger, FakeStreams(room_bytes=PAGE)) as lanes:
        kept = lanes.acquire(Tier.DEVICE, PAGE, "kept")
        with pytest.raises(DeviceOutOfMemory, match=r"8\.00 KiB for big cannot be allocated; this rank holds"):
            lanes.acquire(Tier.DEVICE, 2 * PAGE, "big")
        assert ledger.held_bytes == PAGE
        lanes.release(kept)
    assert ledger.held_bytes == 0


def test_the_whole_host_slab_is_registered_and_given_back() -> None:
    host, ledger = host_and_ledger(16 * PAGE)
    with recorded(host, ledger) as lanes:
        assert lanes.fake.pinned_bytes == 16 * PAGE
    assert lanes.fake.pinned_bytes == 0
    lanes.close()
    assert lanes.fake.pinned_bytes == 0


def test_compute_stream_wait_is_counted_once_the_device_has_passed_it() -> None:
    host, ledger = host_and_ledger()
    held = threading.Event()
    with recorded(host, ledger, HeldLane(Lane.H2D, held)) as lanes:
        lanes.wait(lanes.submit(Lane.H2D, NOTHING))
        assert lanes.stalled_seconds() == 0.0
        held.set()
        mark = lanes.computed()
        mark.wait()
        for _, end in lanes._stalls:
            end.synchronize()
        assert lanes.stalled_seconds() == 0.25


def test_busy_seconds_are_the_devices_own() -> None:
    host, ledger = host_and_ledger()
    with recorded(host, ledger) as lanes:
        for _ in range(3):
            lanes.submit(Lane.D2H, NOTHING, nbytes=5)
    assert lanes.busy_seconds()["d2h"] == 0.75
    assert lanes.moved_bytes() == {"d2h": 15}


# --- planted races ----------------------------------------------------------------------------------------------------


def upload_after_update(lanes: RecordedLanes) -> None:
    """What every step does: a CPU update, its upload, the forward that reads it, the gradient on its way back."""
    staging, weights, gradient = region("staging"), region("weights"), region("gradient")
    for _ in range(3):
        updated = lanes.submit(Lane.CPU, NOTHING, writes=[staging])
        uploaded = lanes.submit(Lane.H2D, NOTHING, reads=[staging], writes=[weights], after=[updated])
        lanes.wait(uploaded)
        lanes.compute(reads=[weights], writes=[gradient])
        copied = lanes.submit(Lane.D2H, NOTHING, reads=[gradient], writes=[staging], after=[lanes.computed(), uploaded])
        buffer = lanes.acquire(Tier.DEVICE, PAGE, "slot")
        loaded = lanes.submit(Lane.H2D, NOTHING, reads=[staging], writes=[buffer], after=[copied])
        device = lanes.submit(Lane.COMPUTE, NOTHING, reads=[buffer], after=[loaded])
        lanes.release(buffer, after=(device,))
        device.wait()


def test_the_schedule_with_all_its_edges_has_no_race() -> None:
    assert races_of(upload_after_update) == []


def unordered(kind: type) -> Callable[[Streams, Stream, Event], None]:
    """`cuda_lanes.order` that forgets events of one kind."""
    whole = cuda_lanes.order

    def order(streams: Streams, stream: Stream, event: Event) -> None:
        if isinstance(event, kind):
            if isinstance(event, StreamOperation):
                event.wait_for_launch()
            return
        whole(streams, stream, event)

    return order


@pytest.mark.parametrize("kind", [StreamOperation, cuda_lanes.Mark])
def test_a_stream_that_does_not_wait_for_another_is_found(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_lanes, "order", unordered(kind))
    assert races_of(upload_after_update)


def test_a_stream_that_gets_work_before_the_host_work_is_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(lanes: RecordedLanes) -> None:
        staging = region("staging")
        updated = lanes.submit(Lane.CPU, NOTHING, writes=[staging])
        while not updated.done:  # late enough to see the work done, without its order
            pass
        lanes.submit(Lane.H2D, NOTHING, reads=[staging], after=[updated]).wait()

    assert races_of(schedule) == []
    monkeypatch.setattr(cuda_lanes, "order", unordered(QueuedOperation))
    assert races_of(schedule)


@pytest.fixture
def complete_when_launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The host takes an operation for done when it is in its stream."""
    whole = StreamOperation.complete

    def complete(operation: StreamOperation) -> None:
        operation.end = None
        whole(operation)

    return lambda: monkeypatch.setattr(StreamOperation, "complete", complete)


def test_host_work_that_does_not_wait_for_the_stream_is_found(complete_when_launched: Callable[[], None]) -> None:
    def schedule(lanes: RecordedLanes) -> None:
        staging = region("staging")
        copied = lanes.submit(Lane.D2H, NOTHING, writes=[staging])
        lanes.submit(Lane.CPU, NOTHING, reads=[staging], after=[copied]).wait()

    assert races_of(schedule) == []
    complete_when_launched()
    assert races_of(schedule)


def test_memory_that_is_dropped_while_a_stream_uses_it_is_found(complete_when_launched: Callable[[], None]) -> None:
    def schedule(lanes: RecordedLanes) -> None:
        buffer = lanes.acquire(Tier.DEVICE, PAGE, "slot")
        used = lanes.submit(Lane.H2D, NOTHING, writes=[buffer])
        lanes.release(buffer, after=(used,))

    assert races_of(schedule) == []
    complete_when_launched()
    assert any("dropped in use" in race for race in races_of(schedule))


def test_buffer_taken_by_other_streams_before_compute_is_done_is_detected() -> None:
    class Unborn(RecordedLanes):
        def acquire(self, tier: Tier, nbytes: int, label: str) -> Any:
            buffer = super().acquire(tier, nbytes, label)
            buffer.born = self.fake.record("a stream that did nothing")
            return buffer

    def schedule(lanes: RecordedLanes) -> None:
        before = region("what lay there")
        lanes.compute(writes=[before])
        buffer = lanes.acquire(Tier.DEVICE, PAGE, "slot")
        lanes.submit(Lane.H2D, NOTHING, reads=[before], writes=[buffer]).wait()
        lanes.release(buffer)

    assert races_of(schedule) == []
    assert races_of(schedule, Unborn)


# --- registered memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [0, 1, PAGE, PINNED_BYTES - 1, PINNED_BYTES, 5 * PINNED_BYTES + 17])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PINNED_BYTES, PINNED_BYTES + 1, 3 * PINNED_BYTES])
def test_a_copy_is_cut_where_registrations_end(address: int, nbytes: int) -> None:
    found = list(spans(address, nbytes))
    assert [first for first, _ in found] == [0, *(end for _, end in found)][: len(found)]
    assert sum(end - first for first, end in found) == nbytes
    assert all((address + first) // PINNED_BYTES == (address + end - 1) // PINNED_BYTES for first, end in found)
    assert len(found) <= nbytes // PINNED_BYTES + 2


def test_host_memory_that_cannot_be_pinned_fails_before_a_thread_starts() -> None:
    class Unregistered(FakeStreams):
        def pin(self, memory: torch.Tensor) -> None:
            raise HostOutOfMemory("registered")

    before = threading.active_count()
    host, ledger = host_and_ledger()
    with pytest.raises(HostOutOfMemory), recorded(host, ledger, Unregistered()):
        pass
    assert threading.active_count() == before
