"""Every edge between lanes of CudaLanes is needed: without it a schedule of some technique has a race.

Edges between two operations of one lane are not looked at. A host lane keeps its order; a stream takes a ready
operation before one that waits for the host, so what its edges are needed for is not shown here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from cases.lane_edges import Edge, Edges, function_of, lane_of
from cases.model_spill_cases import Laboratory, Model, Technique
from cases.optimizer_cases import HOST_BYTES, Case, drive, nvme_slab, offload, outcome, split
from fakes.fake_streams import FakeStreams, RecordedLanes, handing_over
from harness import local_runs
from harness.parity_harness import ANSWERS, Spilling, train
from spillway.plan import Overlap, Policy
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab

Schedule = Callable[[FakeStreams], object]

UNTESTED = {
    ("UpdatePipeline.submit", "UpdatePipeline._upload"): "a weight that is read without a gradient (detached)",
    ("UpdatePipeline.submit", "UpdatePipeline._update_in_slot"): "the same",
    ("UpdatePipeline.submit", "UpdatePipeline._update_resident"): "the same",
    ("UpdatePipeline.submit", "UpdatePipeline._submit_cpu"): "the same",
    ("_copy_out", "Window._wait_for_oldest"): "bounds memory, not order",
    ("copy_to_nvme", "Window._wait_for_oldest"): "bounds memory, not order",
    ("StateWindow._write", "StateWindow.fetch_row"): "whoever reads states has waited for the writes (flush)",
    ("Homes._set", "Homes.load"): "whoever sets values waits for them; updates of homes come here, too",
    (
        "OptimizerOffload._initialise_states",
        "OptimizerOffload._initialise",
    ): "memory that the allocator hands out again",
    (
        "Speculation._submit",
        "UpdatePipeline._upload",
    ): "here the host has waited for room for gradients, which is later",
    ("UpdatePipeline._upload", "Speculation._submit"): "the gradient comes of a forward that waited for the upload",
}
"""edges between functions that no schedule here needs, and why they stay"""


def optimizer(
    shares: tuple[float, float, float, float],
    overlap: Overlap,
    chunk_parameters: int,
    streams: FakeStreams,
) -> None:
    *in_memory, on_nvme = shares
    case = Case(torch.bfloat16, num_micro_batches=2, clipping=None if overlap == "Backward" else 1.0, tied=True)
    ledger = DeviceLedger(None)
    lanes, parameters = RecordedLanes(HostSlab(HOST_BYTES), ledger, streams), case.parameters()
    window = 20_000 if overlap == "Backward" else 0
    plan = split(*in_memory, chunk_parameters, overlap=overlap, speculative_parameters=window, nvme=on_nvme)
    made = offload(parameters, case, plan, lanes, ledger, nvme_slab())
    outcome(made, parameters, drive(made, case))
    lanes.close()


def activations(answers: str, window_bytes: int, streams: FakeStreams) -> None:
    make_lanes = partial(RecordedLanes, streams=streams)
    attach = partial(Spilling, answers=ANSWERS[answers], make_lanes=make_lanes, window_bytes=window_bytes)
    train("tied_dropout", attach, micro_batches=2)


def streamed(laboratory: Laboratory, technique: Technique, streams: FakeStreams) -> None:
    model = Model(num_micro_batches=2, tied=True, dropout=0.1, clipping=0.5)
    laboratory.run(model, technique.plan(model), partial(RecordedLanes, streams=streams))


EVERY: tuple[Overlap, ...] = ("None", "Forward", "Backward")
SCHEDULES: dict[str, Schedule] = {
    **{f"mixed, {overlap}": partial(optimizer, (0.3, 0.2, 0.2, 0.3), overlap, 1009) for overlap in EVERY},
    **{f"whole parameters, {overlap}": partial(optimizer, (0, 1, 0, 0), overlap, 1 << 20) for overlap in EVERY},
    **{f"nvme, {overlap}": partial(optimizer, (0, 0, 0, 1), overlap, 499) for overlap in EVERY},
    **{f"{answers}, {size}": partial(activations, answers, size) for answers in ANSWERS for size in (4096, 1 << 30)},
}
TECHNIQUES = [
    Technique("host", overlap="Forward"),
    Technique("mixed", num_slots=3, answers="nvme", overlap="Forward", chunk_parameters=53),
    Technique("host", order="WeightStationary", boundaries=Policy.NVME, answers="mixed"),
    Technique("mixed", order="WeightStationary", boundaries=Policy.HOST, answers="host", overlap="Forward"),
]


def played(schedule: Schedule, missing: Edge | None = None) -> tuple[Edges, list[str]]:
    """(its edges, its races or its error)."""
    streams, edges = FakeStreams(), Edges(missing)
    with pytest.MonkeyPatch.context() as patch, handing_over(streams):
        edges.watch(patch)
        try:
            schedule(streams)
        except Exception as error:
            return edges, [*streams.races, repr(error)]
    return edges, [*streams.races, *edges.early]


def not_needed(schedules: list[Schedule]) -> set[Edge]:
    """Edges without which no schedule has a race."""
    having: dict[Edge, list[Schedule]] = {}
    for schedule in schedules:
        edges, races = played(schedule)
        assert races == []
        for edge in edges.found:
            having.setdefault(edge, []).append(schedule)
    assert having
    between = {edge: found for edge, found in having.items() if lane_of(edge[0]) != lane_of(edge[1])}
    return {edge for edge, found in between.items() if not any(played(one, edge)[1] for one in found)}


def assert_all_needed(schedules: list[Schedule]) -> None:
    torch.set_num_threads(1)
    found = not_needed(schedules)
    assert {edge for edge in found if tuple(map(function_of, edge)) not in UNTESTED} == set()


@pytest.mark.ci
def test_without_any_edge_of_optimizer_or_activations_there_is_a_race() -> None:
    assert_all_needed(list(SCHEDULES.values()))


@pytest.mark.full
def test_without_any_edge_of_streamed_parameters_there_is_a_race(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, local_runs.write_text(tmp_path / "text"))
    assert_all_needed([*SCHEDULES.values(), *(partial(streamed, laboratory, one) for one in TECHNIQUES)])
