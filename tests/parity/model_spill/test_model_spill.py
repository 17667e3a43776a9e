"""Parameters that stream through slots give the bits of parameters that stay: the seam matrix, through the real
assembly and step loop (docs/adr/0001, docs/model-spill.md)."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.model_spill_cases import ANSWERS, HOMES, LANES, RATES, RESIDENT, Laboratory, Model, Outcome, Technique
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import RaceKind, TracedSchedule, TracingLanes
from harness import local_runs
from harness.depth import at, sweep
from spillway.errors import DeviceOutOfMemory
from spillway.plan import MemoryPlan, Policy, Tier
from spillway_trainer.assemble import Assembly
from spillway_trainer.model_spill import ModelSpill
from spillway_trainer.model_spill.homes import HostChunk, NvmeChunk
from spillway_trainer.tiers.lanes import Event, Lane, Lanes, Submission
from spillway_trainer.trainer import Run

CELLS_PER_MODEL = at(2, 2, 16)
"""ways to run each model, drawn by its number"""

MODELS = [
    Model(num_segments, num_micro_batches, dropout, tied, clipping, lora, dtype)
    for num_segments, num_micro_batches, dropout, tied, (lora, dtype) in sweep(
        (1, 2, 4, 8),
        (1, 2, 4),
        (0.0, 0.1),
        (False, True),
        ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)),
        quick=2,
        ci=0,
    )
    for clipping in (None if num_micro_batches == 2 else 0.3,)
    if not (tied and lora)
]
ORDERS = [
    ("InOrder", Policy.KEEP),
    ("WeightStationary", Policy.KEEP),
    ("WeightStationary", Policy.HOST),
    ("WeightStationary", Policy.NVME),
]
TECHNIQUES = [
    Technique(homes, num_slots, order, boundaries, answers, lanes, overlap=overlap)
    for homes, num_slots, (order, boundaries), answers, lanes, overlap in itertools.product(
        HOMES, (1, 2, 3), ORDERS, ANSWERS, ("cpu", "lazy"), ("None", "Forward")
    )
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root = tmp_path_factory.mktemp("model_spill")
    return Laboratory(root, local_runs.write_text(root / "text"))


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_streaming_changes_no_bit(number: int, laboratory: Laboratory) -> None:
    model = MODELS[number]
    for technique in random.Random(number).sample(TECHNIQUES, CELLS_PER_MODEL):
        outcome = laboratory.streamed(model, technique)
        assert outcome.differences(laboratory.resident(model)) == [], (model, technique)


def test_the_matrix_has_every_answer_to_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [
        cell for number in range(len(MODELS)) for cell in random.Random(number).sample(TECHNIQUES, CELLS_PER_MODEL)
    ]
    with capsys.disabled():
        print(f"\nmodel_spill matrix: {len(drawn)} of {len(MODELS) * len(TECHNIQUES)} cells, {len(MODELS)} models")
    for question in dataclasses.fields(Technique):
        every = {getattr(cell, question.name) for cell in TECHNIQUES}
        assert {getattr(cell, question.name) for cell in drawn} == every


@pytest.mark.parametrize("technique", [None, Technique(), Technique(homes="nvme", answers="mixed", overlap="Forward")])
def test_nothing_of_a_run_stays_in_memory(technique: Technique | None, laboratory: Laboratory) -> None:
    """A sweep makes one for each turn, all in one process."""
    left = list[weakref.ref[Any]]()

    def during(run: Run, assembly: Assembly) -> None:
        left.extend(map(weakref.ref, (assembly.optimizer, assembly.model, assembly.tiers.host)))

    plan = RESIDENT if technique is None else technique.plan(Model())
    laboratory.run(Model(), plan, LANES["cpu"], during=during)
    gc.collect()
    assert [made() for made in left] == [None, None, None]


def test_the_models_are_different_runs(laboratory: Laboratory) -> None:
    """Else one passing cell would say nothing about the others."""
    models = [
        Model(),
        Model(num_micro_batches=4),
        Model(dropout=0.1),
        Model(dropout=0.1, num_segments=4),
        Model(tied=True),
        Model(clipping=0.3),
        Model(lora=True),
        Model(dtype=torch.bfloat16),
    ]
    assert len({tuple(laboratory.resident(model).figures["norm"]) for model in models}) == len(models)


TRACED = [
    Technique(homes, num_slots, order, boundaries, "mixed", "tracing", overlap=overlap)
    for homes, num_slots, (order, boundaries), overlap in itertools.product(
        HOMES, (1, 2), ORDERS[::2], ("None", "Forward")
    )
]
TRACED_MODEL = Model(dropout=0.1, num_micro_batches=4, tied=True)


def schedule_of(outcome: Outcome) -> TracedSchedule:
    assert isinstance(outcome.lanes, TracingLanes)
    return outcome.lanes.schedule()


@pytest.mark.ci
def test_no_schedule_has_a_race(laboratory: Laboratory, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for technique in TRACED:
        outcome = laboratory.streamed(TRACED_MODEL, technique)
        schedule = schedule_of(outcome)
        assert schedule.races == (), technique
        assert outcome.differences(laboratory.resident(TRACED_MODEL)) == []
        ratio = schedule.makespan_seconds / schedule.bound_seconds
        how = f"{technique.homes}, {technique.num_slots} slots, {technique.order}, overlap {technique.overlap}"
        lines.append(f"  {how}: {ratio:.2f} x the busiest lane")
    with capsys.disabled():
        print("\nmodelled makespan of two steps with four micro-batches\n" + "\n".join(lines))


def test_a_second_slot_hides_loads_behind_compute(laboratory: Laboratory) -> None:
    one, two = (
        schedule_of(laboratory.streamed(TRACED_MODEL, Technique(num_slots=num_slots, lanes="tracing")))
        for num_slots in (1, 2)
    )
    assert two.makespan_seconds < 0.9 * one.makespan_seconds


def loaded_bytes(laboratory: Laboratory, num_micro_batches: int, order: str) -> int:
    """By lane h2d in two steps: with everything kept, parameters alone."""
    model, technique = Model(num_micro_batches=num_micro_batches), Technique(num_slots=1, order=order)
    return laboratory.streamed(model, technique).moved_bytes[Lane.H2D]


def test_weight_stationary_loads_do_not_grow_with_micro_batches(laboratory: Laboratory) -> None:
    assert loaded_bytes(laboratory, 4, "WeightStationary") == loaded_bytes(laboratory, 1, "WeightStationary")
    assert loaded_bytes(laboratory, 4, "InOrder") > 2 * loaded_bytes(laboratory, 4, "WeightStationary")


def test_nothing_is_written_back(laboratory: Laboratory) -> None:
    """Gradients are added where backward wrote them, and updates write the homes."""
    moved = laboratory.streamed(Model(num_micro_batches=2), Technique()).moved_bytes
    assert moved[Lane.H2D] > 0
    assert Lane.D2H not in moved


def test_a_boundary_leaves_the_device_once_and_comes_back_twice(laboratory: Laboratory) -> None:
    model = Model(num_micro_batches=4)
    kept, moved = (
        laboratory.streamed(
            model, Technique(num_slots=2, order="WeightStationary", boundaries=boundaries, answers="recompute")
        ).moved_bytes
        for boundaries in (Policy.KEEP, Policy.HOST)
    )
    boundaries = 2 * 7 * 4 * (2 * 8 * 16 * 4)  # steps, boundaries, micro-batches, float32 values
    assert (Lane.D2H in kept, moved[Lane.D2H]) == (False, boundaries)
    assert moved[Lane.H2D] - kept[Lane.H2D] == 2 * boundaries


@pytest.mark.parametrize("order", ["InOrder", "WeightStationary"])
def test_a_skipped_step_leaves_streamed_parameters_as_they_are(order: str, laboratory: Laboratory) -> None:
    def first_norm_is_infinite(run: Run, assembly: Assembly) -> None:
        norm, norms = assembly.optimizer.norm, iter([float("inf")])
        assembly.optimizer.norm = lambda: (norm(), next(norms, norm()))[1]  # type: ignore[method-assign]

    model = Model(dropout=0.1, tied=True, clipping=0.3)
    technique = Technique(order=order)
    plain = laboratory.run(model, resident_plan(model), LazyLanes, during=first_norm_is_infinite)
    streamed = laboratory.run(model, technique.plan(model), LazyLanes, during=first_norm_is_infinite)
    assert plain.figures["skipped"] == [1.0, 0.0]
    assert streamed.differences(plain) == []


def resident_plan(model: Model) -> MemoryPlan:
    return RESIDENT.model_copy(update={"num_micro_batches": model.num_micro_batches})


# --- four times the device


LARGE = Model(num_segments=8, num_micro_batches=2, dropout=0.1, num_blocks=30, hidden=64)


@pytest.mark.parametrize(
    "technique",
    [
        Technique(answers="recompute", lanes="cpu", chunk_parameters=4099),
        Technique("nvme", 2, "WeightStationary", Policy.HOST, "recompute", "lazy", chunk_parameters=4099),
    ],
    ids=["host, in order", "NVMe, weight-stationary"],
)
def test_a_model_four_times_larger_than_the_device_trains_to_the_same_bits(
    technique: Technique, laboratory: Laboratory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dataclasses.replace(LARGE, num_segments=LARGE.num_blocks + 2)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.build().parameters())
    plan = technique.plan(model)
    budget = {**plan.budget, Tier.DEVICE: parameter_bytes // 4}
    outcome = laboratory.run(model, plan.model_copy(update={"budget": budget}), LANES[technique.lanes])
    assert outcome.differences(laboratory.resident(model)) == []
    with capsys.disabled():
        print(
            f"\n{parameter_bytes} bytes of parameters, a device of {budget[Tier.DEVICE]}: "
            f"at most {outcome.peak_bytes[Tier.DEVICE]} were held"
        )
    with pytest.raises(DeviceOutOfMemory):
        laboratory.run(model, resident_plan(model).model_copy(update={"budget": budget}), LazyLanes)


# --- mutants: each takes one thing out, and lazy or tracing lanes must find it


def without_edges_into(label: str) -> Callable[..., Event]:
    """Operations of this label wait for nothing."""

    def enqueue(self: Any, given: Submission) -> Event:
        if given.label.startswith(label):
            given = given._replace(after=())
        return super(type(self), self).enqueue(given)  # type: ignore[no-any-return]

    return enqueue


def wait_for_nothing(self: Lanes, event: Event) -> None:
    """A load that nobody waits for."""


@dataclass(frozen=True)
class Mutant:
    technique: Technique
    race: RaceKind
    by_lazy_lanes: bool = True
    """found there, too: a tensor differs, or the run raises"""
    lanes: dict[str, Any] = field(default_factory=dict)
    patches: tuple[tuple[type, str, Any], ...] = ()


class NoEvents:
    """An attribute that forgets what it is set to."""

    def __get__(self, holder: object, owner: type) -> tuple[()]:
        return ()

    def __set__(self, holder: object, value: object) -> None:
        return


MUTANTS = {
    "load not awaited": Mutant(Technique(), RaceKind.READ_BEFORE_WRITE, lanes={"wait": wait_for_nothing}),
    "upload without an edge from its read": Mutant(
        Technique("nvme"), RaceKind.READ_BEFORE_WRITE, lanes={"enqueue": without_edges_into("parameters of")}
    ),
    # On a CPU the compute lane is the host itself: only the trace sees this edge.
    "slot refilled while compute reads it": Mutant(
        Technique(), RaceKind.WRITE_UNDER_READ, False, {"enqueue": without_edges_into("parameters of")}
    ),
    # Lazily a load runs whole, read and upload, before the next one is waited for.
    "staging reused before its upload": Mutant(
        Technique("nvme"), RaceKind.WRITE_UNDER_READ, False, {"enqueue": without_edges_into("read of parameters")}
    ),
    "homes read before the update wrote them": Mutant(
        Technique(overlap="Forward"), RaceKind.READ_BEFORE_WRITE, patches=((HostChunk, "changed", NoEvents()),)
    ),
    "NVMe homes read before the update was stored": Mutant(
        Technique("nvme", overlap="Forward"),
        RaceKind.READ_BEFORE_WRITE,
        patches=((NvmeChunk, "changed", NoEvents()),),
    ),
    "NVMe homes written before the update is done": Mutant(
        Technique("nvme"), RaceKind.READ_BEFORE_WRITE, lanes={"enqueue": without_edges_into("store")}
    ),
}


def mutant_run(
    mutant: Mutant, laboratory: Laboratory, base: type, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome | None, Any]:
    for owner, name, value in mutant.patches:
        monkeypatch.setattr(owner, name, value)
    made: list[Any] = []

    def make_lanes(*arguments: Any) -> Lanes:
        rates = (RATES,) if base is TracingLanes else ()
        made.append(type("Mutant", (base,), mutant.lanes)(*arguments, *rates))
        return made[0]  # type: ignore[no-any-return]

    model = Model(num_micro_batches=2, tied=True)
    try:
        return laboratory.run(model, mutant.technique.plan(model), make_lanes), made[0]
    except Exception:
        return None, made[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.by_lazy_lanes])
def test_lazy_lanes_find(name: str, laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = laboratory.resident(Model(num_micro_batches=2, tied=True))
    outcome, _ = mutant_run(MUTANTS[name], laboratory, LazyLanes, monkeypatch)
    assert outcome is None or outcome.differences(expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_tracing_lanes_find(name: str, laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lanes = mutant_run(MUTANTS[name], laboratory, TracingLanes, monkeypatch)
    assert MUTANTS[name].race in {race.kind for race in lanes.schedule().races}


def test_slots_that_are_not_refilled_after_an_update_are_found(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelSpill, "invalidate", lambda self: None)
    model = Model(num_segments=2)
    assert laboratory.streamed(model, Technique()).differences(laboratory.resident(model))


def test_a_view_that_outlives_its_segment_is_named(laboratory: Laboratory) -> None:
    kept: list[Tensor] = []

    def keep_a_view(run: Run, assembly: Assembly) -> None:
        _, module = assembly.model.segments[2]
        forward = module.forward

        def forward_and_keep(*inputs: object) -> object:
            output = forward(*inputs)
            kept.append(next(module.parameters()).detach())
            return output

        module.forward = forward_and_keep

    model = Model(num_micro_batches=1)
    with pytest.raises(RuntimeError, match=r"segment block1: 1 view\(s\) of its parameters still exist"):
        laboratory.run(model, Technique().plan(model), LazyLanes, during=keep_a_view)
