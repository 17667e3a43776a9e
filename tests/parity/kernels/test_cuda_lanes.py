"""Every technique on CudaLanes over streams that record the order (`fake_streams`): no race, and no bit changes.

This is what can be held without a device: that each copy, update and release of the real schedules comes after what it
needs, by streams, events and threads alone. The kernels and copies themselves need one (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from cases.model_spill_cases import Laboratory, Model, Technique
from cases.optimizer_cases import HOST_BYTES, Case, drive, nvme_slab, offload, oracle, outcome, split
from cases.parity_models import PARITY_MODELS
from fakes.fake_streams import FakeStreams, RecordedLanes, handing_over
from harness import local_runs
from harness.parity_harness import ANSWERS, Spilling, train
from spillway.plan import Overlap, Policy
from spillway_trainer.model_spill.slots import Slots
from spillway_trainer.tiers.cuda_lanes import CudaLanes
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

SPLITS = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0.3, 0.3, 0.4, 0), (0.3, 0.2, 0.2, 0.3), (0, 0, 0, 1)]
OVERLAPS: tuple[Overlap, ...] = ("None", "Forward", "Backward")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def streams() -> Iterator[FakeStreams]:
    made = FakeStreams()
    with handing_over(made):
        yield made
    assert made.races == []


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("shares", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_split_has_the_plain_optimizers_bits_and_no_race(
    shares: tuple[float, float, float, float], overlap: Overlap, dtype: torch.dtype, streams: FakeStreams
) -> None:
    *in_memory, on_nvme = shares
    clipping = None if overlap == "Backward" else 1.0
    case = Case(dtype, num_micro_batches=2, clipping=clipping, tied=True)
    host, ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
    lanes, nvme, parameters = RecordedLanes(host, ledger, streams), nvme_slab(), case.parameters()
    window = 20_000 if overlap == "Backward" else 0
    plan = split(*in_memory, 1009, overlap=overlap, speculative_parameters=window, nvme=on_nvme)
    optimizer = offload(parameters, case, plan, lanes, ledger, nvme)
    found = outcome(optimizer, parameters, drive(optimizer, case))
    lanes.close()
    assert found.difference(oracle(case)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("model", PARITY_MODELS)
def test_no_answer_changes_a_bit_or_has_a_race(model: str, answers: str, streams: FakeStreams) -> None:
    make_lanes = partial(RecordedLanes, streams=streams)
    attach = partial(Spilling, answers=ANSWERS[answers], make_lanes=make_lanes, window_bytes=4096)
    found = train(model, attach, micro_batches=2)
    assert found.differing(train(model, None, micro_batches=2)) == []
    assert found.left_behind == {"device": 0, "host": 0, "nvme": 0}


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    directory = tmp_path_factory.mktemp("cuda-lanes")
    return Laboratory(directory, local_runs.write_text(directory / "text"))


TECHNIQUES = [
    Technique("host", overlap="Forward"),
    Technique("nvme", answers="mixed"),
    Technique("mixed", num_slots=3, answers="nvme", overlap="Forward"),
    Technique("host", order="WeightStationary", boundaries=Policy.NVME, answers="mixed"),
    Technique("mixed", order="WeightStationary", boundaries=Policy.HOST, answers="host", overlap="Forward"),
]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=str)
def test_parameters_that_stream_have_no_race_and_the_bits_of_resident_ones(
    technique: Technique, laboratory: Laboratory, streams: FakeStreams
) -> None:
    model = Model(num_micro_batches=2, tied=True, dropout=0.1, clipping=0.5)
    found = laboratory.run(model, technique.plan(model), partial(RecordedLanes, streams=streams))
    assert found.differences(laboratory.resident(model)) == []


def test_slot_is_refilled_before_the_host_sees_that_its_load_completed(
    laboratory: Laboratory, streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load's operation still holds views of the slot: no view of a parameter that outlives its segment."""
    waited: list[str] = []
    whole = Slots._unbind

    def unbind(slots: Slots, segment: str, slot: object) -> None:
        whole_load = slot.loaded  # type: ignore[attr-defined]
        view = slot.buffer.tensor[:1]  # type: ignore[attr-defined] # as the load's work has it until it is complete

        class Loaded:
            done = False

            def wait(self) -> None:
                nonlocal view
                waited.append(segment)
                whole_load.wait()
                view = None

        slot.loaded = Loaded()  # type: ignore[attr-defined]
        whole(slots, segment, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(Slots, "_unbind", unbind)
    model, technique = Model(num_micro_batches=1), Technique("host")
    found = laboratory.run(model, technique.plan(model), partial(RecordedLanes, streams=streams))
    assert found.differences(laboratory.resident(model)) == []
    assert waited


Plant = Callable[[pytest.MonkeyPatch], None]


def without_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaLanes, "wait", lambda lanes, event: None)


def without_marks(patch: pytest.MonkeyPatch) -> None:
    class Nothing:
        done = True

        def wait(self) -> None:
            return

    patch.setattr(CudaLanes, "computed", lambda lanes: Nothing())


@pytest.mark.parametrize("plant", [without_wait, without_marks])
def test_lanes_that_leave_out_an_order_are_found_in_a_real_step(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeStreams()
    plant(monkeypatch)
    with handing_over(made):
        attach = partial(
            Spilling, answers=ANSWERS["host"], make_lanes=partial(RecordedLanes, streams=made), window_bytes=1 << 30
        )
        train("tied_dropout", attach, micro_batches=2)
    assert made.races
