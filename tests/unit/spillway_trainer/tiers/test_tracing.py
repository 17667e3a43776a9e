import pytest

from fakes.tracing import CompletedSet, RaceKind, TracingLanes
from spillway.plan import Tier
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Lane, Region

RATES = {Lane.H2D: 100.0, Lane.D2H: 100.0, Lane.NVME_WRITE: 50.0, Lane.COMPUTE: 1000.0}


@pytest.fixture
def lanes() -> TracingLanes:
    return TracingLanes(HostSlab(1 << 20), DeviceLedger(None), RATES)


def nothing() -> None:
    pass


def kinds(lanes: TracingLanes) -> list[RaceKind]:
    return [race.kind for race in lanes.schedule().races]


def test_an_edge_orders_a_read_after_its_write(lanes: TracingLanes) -> None:
    host = lanes.acquire(Tier.HOST, 100, "host")
    copied = lanes.submit(Lane.D2H, nothing, writes=[host])
    lanes.submit(Lane.H2D, nothing, reads=[host], after=[copied])
    assert kinds(lanes) == []


def test_a_read_without_an_edge_is_a_race(lanes: TracingLanes) -> None:
    host = lanes.acquire(Tier.HOST, 100, "host")
    lanes.submit(Lane.D2H, nothing, writes=[host], label="copy")
    lanes.submit(Lane.H2D, nothing, reads=[host], label="reload")
    assert str(lanes.schedule().races[0]) == "host: read before its write is complete: 'reload' against 'copy'"


def test_one_lane_alone_orders_nothing(lanes: TracingLanes) -> None:
    region = Region(100, "extent")
    lanes.submit(Lane.NVME_WRITE, nothing, writes=[region])
    lanes.submit(Lane.NVME_WRITE, nothing, writes=[region])
    assert kinds(lanes) == [RaceKind.WRITE_OVER_WRITE]


def test_order_is_transitive(lanes: TracingLanes) -> None:
    host = lanes.acquire(Tier.HOST, 100, "host")
    first = lanes.submit(Lane.D2H, nothing, writes=[host])
    second = lanes.submit(Lane.CPU, nothing, after=[first])
    lanes.submit(Lane.H2D, nothing, reads=[host], after=[second])
    assert kinds(lanes) == []


def test_what_the_host_waited_for_comes_before_all_it_submits(lanes: TracingLanes) -> None:
    host = lanes.acquire(Tier.HOST, 100, "host")
    lanes.submit(Lane.D2H, nothing, writes=[host]).wait()
    lanes.submit(Lane.H2D, nothing, reads=[host])
    assert kinds(lanes) == []


def test_a_wait_of_the_compute_lane_is_no_wait_of_the_host(lanes: TracingLanes) -> None:
    host = lanes.acquire(Tier.HOST, 100, "host")
    lanes.wait(lanes.submit(Lane.D2H, nothing, writes=[host]))
    lanes.submit(Lane.H2D, nothing, reads=[host])
    assert kinds(lanes) == [RaceKind.READ_BEFORE_WRITE]


def test_compute_is_ordered_with_itself_and_by_its_waits(lanes: TracingLanes) -> None:
    device = lanes.acquire(Tier.DEVICE, 100, "reload")
    lanes.wait(lanes.submit(Lane.H2D, nothing, writes=[device]))
    lanes.compute(reads=[device])
    lanes.compute(writes=[device])
    assert kinds(lanes) == []


def test_compute_that_does_not_wait_races(lanes: TracingLanes) -> None:
    device = lanes.acquire(Tier.DEVICE, 100, "reload")
    lanes.submit(Lane.H2D, nothing, writes=[device])
    lanes.compute(reads=[device])
    assert kinds(lanes) == [RaceKind.READ_BEFORE_WRITE]


def test_a_write_under_a_read_in_flight_is_a_race(lanes: TracingLanes) -> None:
    source = Region(100, "source")
    lanes.compute(writes=[source])
    lanes.submit(Lane.D2H, nothing, reads=[source], after=[lanes.computed()])
    lanes.compute(writes=[source])
    assert kinds(lanes) == [RaceKind.WRITE_UNDER_READ]


def test_a_read_of_a_buffer_that_nothing_wrote_is_a_race(lanes: TracingLanes) -> None:
    lanes.submit(Lane.H2D, nothing, reads=[lanes.acquire(Tier.HOST, 100, "host")])
    assert kinds(lanes) == [RaceKind.READ_OF_NOTHING]


def test_a_release_names_the_user_that_it_does_not_wait_for(lanes: TracingLanes) -> None:
    staging = lanes.acquire(Tier.HOST, 100, "staging")
    copied = lanes.submit(Lane.D2H, nothing, writes=[staging], label="copy")
    lanes.submit(Lane.NVME_WRITE, nothing, reads=[staging], after=[copied], label="write")
    lanes.release(staging, after=[copied])
    (race,) = lanes.schedule().races
    assert (race.kind, race.first) == (RaceKind.RELEASE_IN_FLIGHT, "write")


def test_use_after_release_is_a_race(lanes: TracingLanes) -> None:
    buffer = lanes.acquire(Tier.HOST, 100, "staging")
    lanes.release(buffer)
    lanes.submit(Lane.D2H, nothing, writes=[buffer])
    assert kinds(lanes) == [RaceKind.USE_AFTER_RELEASE]


def test_makespan_is_the_pipelines_and_the_bound_is_the_busiest_lanes(lanes: TracingLanes) -> None:
    for _ in range(3):
        copied = lanes.submit(Lane.D2H, nothing, nbytes=100)  # 1 s each
        lanes.submit(Lane.NVME_WRITE, nothing, nbytes=100, after=[copied])  # 2 s each
    schedule = lanes.schedule()
    assert schedule.makespan_seconds == pytest.approx(1 + 3 * 2)
    assert schedule.bound_seconds == pytest.approx(6)
    assert schedule.busy_seconds[Lane.D2H] == pytest.approx(3)


def test_a_rate_that_changes_is_that_of_later_operations_alone(lanes: TracingLanes) -> None:
    lanes.submit(Lane.H2D, nothing, nbytes=100)
    lanes.set_rate(Lane.H2D, 10.0)
    lanes.submit(Lane.H2D, nothing, nbytes=100)
    assert lanes.schedule().busy_seconds[Lane.H2D] == 1.0 + 10.0


def test_compute_waits_in_virtual_time(lanes: TracingLanes) -> None:
    lanes.wait(lanes.submit(Lane.H2D, nothing, nbytes=300))
    lanes.compute(reads=[Region(1000, "activations")])
    assert lanes.schedule().makespan_seconds == pytest.approx(4)
    assert lanes.stalled_seconds() == pytest.approx(3)


def test_a_release_in_virtual_flight_holds_its_memory() -> None:
    host = HostSlab(1 << 20)
    lanes = TracingLanes(host, DeviceLedger(None), RATES)
    staging = lanes.acquire(Tier.HOST, 1 << 20, "staging")
    written = lanes.submit(Lane.NVME_WRITE, nothing, writes=[staging], nbytes=100)
    lanes.release(staging, after=[written])
    assert host.held_bytes == 1 << 20
    lanes.acquire(Tier.HOST, 1 << 20, "staging")
    assert lanes.host_seconds == pytest.approx(2)


def test_without_run_the_schedule_alone_is_traced() -> None:
    lanes, ran = TracingLanes(HostSlab(0), DeviceLedger(None), RATES, run=False), []
    lanes.submit(Lane.H2D, lambda: ran.append(1), nbytes=100).wait()
    assert ran == []
    assert lanes.schedule().makespan_seconds == pytest.approx(1)


def test_a_past_knows_what_was_joined_and_nothing_else() -> None:
    past = CompletedSet().including(0).including(1).including(5).joined(CompletedSet().including(7))
    assert [number for number in range(10) if past.knows(number)] == [0, 1, 5, 7]


def test_a_complete_prefix_costs_nothing() -> None:
    past = CompletedSet()
    for number in range(1000):
        past = past.including(number)
    assert past == CompletedSet(1000, 0)
