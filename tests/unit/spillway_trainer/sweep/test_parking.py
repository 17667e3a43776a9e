"""Parking: states of members that wait, out and in again bit for bit; room that is given back; what disks do wrong."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.fake_spill_file import FakeSpillFile
from harness import sweep_runs
from spillway.errors import SpillIOError, SpillVolumeFull
from spillway.plan import MemoryPlan
from spillway_trainer.sweep import parking
from spillway_trainer.sweep.parking import Parking

BLOCK = 4096
BUFFER_BYTES = 4 * BLOCK
"""small, so that a few tensors cross its end"""
MEMBERS = ("slow", "other-seed", "deeper")


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PARKING_BUFFER_BYTES", BUFFER_BYTES)


def plan_of(job: Any, parked_bytes: int) -> MemoryPlan:
    plan = sweep_runs.sweep_plan(job, 2)
    members = tuple(one.model_copy(update={"parked_bytes": parked_bytes}) for one in plan.members)
    return plan.model_copy(update={"members": members})


def opened(directory: Path, parked_bytes: int = 1 << 20, **changes: object) -> Parking:
    job = sweep_runs.sweep_file(directory, directory, directory, 1)
    return Parking(job.model_copy(update=changes), plan_of(job, parked_bytes))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Parking]:
    made = opened(tmp_path)
    yield made
    made.close()


def states(seed: int, *sizes: int) -> list[tuple[str, Tensor]]:
    """Of every type that a member has, cut where nothing is even: scalars, nothing at all, more than the buffer."""
    made = torch.Generator().manual_seed(seed)
    floats = [(f"f{index}", torch.randn(size, generator=made)) for index, size in enumerate(sizes)]
    codes = torch.randint(0, 255, (3 * BLOCK + 7,), dtype=torch.uint8, generator=made)
    return [
        ("none", torch.empty(0, 3)),
        ("scalar", torch.tensor(float(seed))),
        *floats,
        ("codes", codes),
        ("halves", torch.randn(5, 7, generator=made).bfloat16()),
        ("count", torch.tensor(seed, dtype=torch.int64)),
    ]


def same(found: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in found] == [name for name, _ in expected] and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        for (_, one), (_, other) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "sizes", [(), (1,), (1023, 1), (1024,), (3 * BLOCK,), (BUFFER_BYTES // 4 - 1, 2), (10 * BUFFER_BYTES + 3, 5)]
)
def test_what_is_parked_comes_back_bit_for_bit(place: Parking, sizes: tuple[int, ...]) -> None:
    expected = states(1, *sizes)
    assert same(list(place.tensors(place.park("slow", iter(expected)))), expected)


def test_states_that_fill_the_buffer_to_its_last_byte_are_one_piece(place: Parking) -> None:
    exactly = [("all", torch.arange(BUFFER_BYTES // 8))]
    parked = place.park("slow", exactly)
    assert [piece.nbytes for piece in parked.pieces] == [BUFFER_BYTES]
    assert same(list(place.tensors(parked)), exactly)


def test_several_members_are_parked_at_once_and_each_may_be_read_again(place: Parking) -> None:
    expected = {name: states(seed, 5000, 77) for seed, name in enumerate(MEMBERS)}
    parked = {name: place.park(name, one) for name, one in expected.items()}
    for name in (*MEMBERS[1:], *MEMBERS):
        assert same(list(place.tensors(parked[name])), expected[name]), name


def test_held_bytes_are_the_whole_blocks_of_the_members_still_parked(place: Parking) -> None:
    assert place.held_bytes == 0
    one = place.park("slow", [("a", torch.zeros(BLOCK + 1, dtype=torch.uint8))])
    assert place.held_bytes == 2 * BLOCK
    two = place.park("deeper", [("a", torch.zeros(BUFFER_BYTES + 1, dtype=torch.uint8))])
    assert place.held_bytes == 2 * BLOCK + BUFFER_BYTES + BLOCK
    place.leave(one)
    assert place.held_bytes == BUFFER_BYTES + BLOCK
    place.leave(two)
    assert place.held_bytes == 0
    most = 2 * BLOCK + BUFFER_BYTES + BLOCK
    assert (place.take_peak_bytes(), place.take_peak_bytes()) == (most, 0)


def test_members_come_and_go_for_ever_in_the_room_that_the_plan_has(tmp_path: Path) -> None:
    place = opened(tmp_path, parked_bytes=BUFFER_BYTES)
    expected = states(3, 2 * BLOCK)
    for _ in range(100):  # what is left behind would be more than there is
        parked = place.park("slow", expected)
        place.leave(parked)
    assert same(list(place.tensors(place.park("slow", expected))), expected)
    place.close()


def test_bytes_beyond_the_room_are_rejected_and_nothing_of_them_stays(tmp_path: Path) -> None:
    place = opened(tmp_path, parked_bytes=BLOCK)
    stays = place.park("slow", [("a", torch.arange(100))])
    held = place.held_bytes
    with pytest.raises(SpillVolumeFull, match="states of member deeper are larger than planned"):
        place.park("deeper", [("b", torch.zeros(8 << 20, dtype=torch.uint8))])
    assert place.held_bytes == held
    assert same(list(place.tensors(stays)), [("a", torch.arange(100))])
    place.close()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Parking, FakeSpillFile]]:
    """A place whose file does what it is told to."""
    made: list[FakeSpillFile] = []

    def fake(directory: Path, nbytes: int, *, num_threads: int, listed: bool) -> FakeSpillFile:
        assert not listed
        made.append(FakeSpillFile(directory, nbytes, num_threads=num_threads))
        return made[0]

    monkeypatch.setattr(parking, "SpillFile", fake)
    place = opened(tmp_path)
    place.leave(place.park("slow", [("a", torch.zeros(1))]))
    yield place, made[0]
    place.close()


def test_a_write_that_fails_says_whose_states_and_leaves_nothing(failing: tuple[Parking, FakeSpillFile]) -> None:
    place, file = failing
    file.failing = {"write"}
    with pytest.raises(SpillIOError, match="states of member deeper"):
        place.park("deeper", states(1, 3 * BUFFER_BYTES))
    assert place.held_bytes == 0
    file.failing = set()
    expected = states(2, 9)
    assert same(list(place.tensors(place.park("deeper", expected))), expected)


def test_one_bit_that_is_wrong_is_an_error_and_no_state(failing: tuple[Parking, FakeSpillFile]) -> None:
    place, file = failing
    parked = place.park("deeper", states(1, 100))
    file.failing = {"flip"}
    with pytest.raises(SpillIOError, match="states of member deeper"):
        list(place.tensors(parked))


def test_other_processes_read_what_one_has_parked_and_park_beside_it(tmp_path: Path) -> None:
    job = sweep_runs.sweep_file(tmp_path, tmp_path, tmp_path, 1)
    plan = plan_of(job, 1 << 20)
    (file,) = parking.shared_files(job, plan)
    one, other = (Parking(job, plan, [os.dup(file.descriptor)]) for _ in range(2))
    expected = {name: states(seed, 5 * BUFFER_BYTES, 77) for seed, name in enumerate(MEMBERS)}
    parked = {name: (one, other)[number % 2].park(name, expected[name]) for number, name in enumerate(MEMBERS)}
    for name, found in pickle.loads(pickle.dumps(parked)).items():  # as it travels
        for place in (one, other):
            assert same(list(place.tensors(found)), expected[name]), name
    for each in (one, other, file):
        each.close()


def test_states_that_cannot_be_given_leave_nothing(place: Parking) -> None:
    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2 * BUFFER_BYTES, dtype=torch.uint8)
        raise RuntimeError("the optimizer")

    with pytest.raises(RuntimeError, match="the optimizer"):
        place.park("slow", breaks_off())
    assert place.held_bytes == 0


def test_the_place_is_gone_with_its_end_and_ends_twice(tmp_path: Path) -> None:
    place = opened(tmp_path, spill_is_listed=True)
    place.park("slow", [("a", torch.zeros(10))])
    assert len(list(tmp_path.glob("slab-*"))) == 1
    place.close()
    place.close()
    assert list(tmp_path.glob("slab-*")) == []
    assert place.held_bytes == 0


@pytest.mark.parametrize("encryption", ["None", "Ephemeral"])
def test_parked_states_are_encrypted_where_the_job_says_so(tmp_path: Path, encryption: str) -> None:
    job = sweep_runs.sweep_file(tmp_path, tmp_path, tmp_path, 1)
    spill = job.spec.spill.model_copy(update={"encryption": encryption})
    spec = job.spec.model_copy(update={"spill": spill})
    place = opened(tmp_path, spill_is_listed=True, spec=spec)
    words = [("a", torch.frombuffer(bytearray(b"plain words " * 1000), dtype=torch.uint8))]
    parked = place.park("slow", words)
    (file,) = tmp_path.glob("slab-*")
    assert (b"plain words" in file.read_bytes()) == (encryption == "None")
    assert same(list(place.tensors(parked)), words)
    place.close()
