"""The harness notices: each mutant takes one thing out of the technique, and lazy or tracing lanes must find it.

A mutant that nothing finds is a defect of the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.parity_models import PARITY_MODELS
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import RaceKind, TracingLanes
from harness.parity_harness import ANSWERS, BATCH, LENGTH, RATES, Outcome, Spilling, batches, train
from spillway.plan import Policy, Tier
from spillway_trainer import segments
from spillway_trainer.activation_spill.records import Sources
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.segments import Block, Position, SegmentHook, fork_seed
from spillway_trainer.tiers.device_ledger import ACTIVATIONS
from spillway_trainer.tiers.lanes import Buffer, Event, Lane, Lanes, Region, Submission

MODEL = "tied_dropout"


@cache
def plain() -> Outcome:
    return train(MODEL, None, micro_batches=2)


# --- schedules with one thing missing, as lanes that leave it out


def wait_for_nothing(self: Lanes, event: Event) -> None:
    """A reload that nobody waits for."""


def without_edges_into(lane: Lane) -> Callable[..., Event]:
    """Operations of `lane` that wait for nothing."""

    def enqueue(self: Any, given: Submission) -> Event:
        return super(type(self), self).enqueue(given._replace(after=()) if given.lane is lane else given)

    return enqueue


def release(
    chosen: Callable[[Region], bool], keep: Callable[[Sequence[Event]], Sequence[Event]]
) -> Callable[..., None]:
    """Releases of the chosen regions that wait for `keep(after)` only."""

    def mutant(self: Any, region: Region, after: Sequence[Event] = ()) -> None:
        super(type(self), self).release(region, keep(after) if chosen(region) else after)

    return mutant


def release_reloads_when_loaded(self: Any, given: Submission) -> Event:
    event = super(type(self), self).enqueue(given)
    if given.lane is Lane.H2D:
        for buffer in given.writes:
            super(type(self), self).release(buffer, (event,))
    return event


def is_sources(region: Region) -> bool:
    return isinstance(region, Sources)


def is_staging(region: Region) -> bool:
    return isinstance(region, Buffer) and region.tier is Tier.HOST and region.label.startswith("staging")


def is_reload(region: Region) -> bool:
    return isinstance(region, Buffer) and region.tier is Tier.DEVICE


def is_host_copy(region: Region) -> bool:
    return isinstance(region, Buffer) and region.label.startswith("activations of")


@dataclass(frozen=True)
class Mutant:
    overrides: dict[str, Any]
    answers: str
    by_lazy_lanes: bool
    """the lazy lanes must find it: a tensor differs, or the run raises"""
    race: RaceKind
    """the tracing lanes must report it"""


MUTANTS = {
    "reload not awaited": Mutant({"wait": wait_for_nothing}, "host", True, RaceKind.READ_BEFORE_WRITE),
    "nvme reload not awaited": Mutant({"wait": wait_for_nothing}, "nvme", True, RaceKind.READ_BEFORE_WRITE),
    "reload without an edge from its copy": Mutant(
        {"enqueue": without_edges_into(Lane.H2D)}, "host", True, RaceKind.READ_BEFORE_WRITE
    ),
    "upload without an edge from its read": Mutant(
        {"enqueue": without_edges_into(Lane.H2D)}, "nvme", True, RaceKind.READ_BEFORE_WRITE
    ),
    "read without an edge from its write": Mutant(
        {"enqueue": without_edges_into(Lane.NVME_READ)}, "nvme", True, RaceKind.READ_BEFORE_WRITE
    ),
    "write without an edge from its copy": Mutant(
        {"enqueue": without_edges_into(Lane.NVME_WRITE)}, "nvme", True, RaceKind.READ_BEFORE_WRITE
    ),
    # On a CPU the compute lane is the host itself: only the trace sees this edge.
    "copy without an edge from compute": Mutant(
        {"enqueue": without_edges_into(Lane.D2H)}, "host", False, RaceKind.READ_BEFORE_WRITE
    ),
    "source released before its copy": Mutant(
        {"release": release(is_sources, lambda _: ())}, "host", True, RaceKind.RELEASE_IN_FLIGHT
    ),
    "reload buffer released when it is loaded": Mutant(
        {"enqueue": release_reloads_when_loaded, "release": release(is_reload, lambda after: after)},
        "host",
        True,
        RaceKind.USE_AFTER_RELEASE,
    ),
    "reload buffer released before compute is done": Mutant(
        {"release": release(is_reload, lambda _: ())}, "host", False, RaceKind.RELEASE_IN_FLIGHT
    ),
    "staging reused before its write or upload": Mutant(
        {"release": release(is_staging, lambda _: ())}, "nvme", True, RaceKind.RELEASE_IN_FLIGHT
    ),
    "host copy released before its reload": Mutant(
        {"release": release(is_host_copy, lambda _: ())}, "host", False, RaceKind.RELEASE_IN_FLIGHT
    ),
}


def lazy_lanes_find(mutant: Mutant) -> bool:
    lanes = type("Mutant", (LazyLanes,), mutant.overrides)
    try:
        outcome = train(MODEL, partial(Spilling, answers=ANSWERS[mutant.answers], make_lanes=lanes), micro_batches=2)
    except Exception:
        return True
    return bool(outcome.differing(plain()))


def traced_races(mutant: Mutant) -> set[RaceKind]:
    lanes = type("Mutant", (TracingLanes,), mutant.overrides)
    made: list[TracingLanes] = []

    def make_lanes(*arguments: Any) -> Lanes:
        made.append(lanes(*arguments, RATES))
        return made[0]

    try:
        train(MODEL, partial(Spilling, answers=ANSWERS[mutant.answers], make_lanes=make_lanes), micro_batches=2)
    except Exception:
        assert made
    return {race.kind for race in made[0].schedule().races}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.by_lazy_lanes])
def test_lazy_lanes_find(name: str) -> None:
    assert lazy_lanes_find(MUTANTS[name])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_tracing_lanes_find(name: str) -> None:
    assert MUTANTS[name].race in traced_races(MUTANTS[name])


# --- a dispatcher that errs


def seeded_once(
    name: str, index: int, forward: Block, position: Position, hook: SegmentHook | None, again: segments.Around
) -> Block:
    """A segment wrapper that does not fork the random state again when the block is run again."""

    def run(*inputs: object) -> Tensor:
        torch.default_generator.manual_seed(fork_seed(position.seed, position.step, position.micro_batch, index))
        return forward(*inputs) if hook is None else hook.run(name, forward, *inputs)

    return run


def test_a_recompute_with_other_random_numbers_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_wrapped", seeded_once)
    outcome = train(MODEL, partial(Spilling, answers=ANSWERS["recompute"], make_lanes=LazyLanes), micro_batches=2)
    assert outcome.differing(plain())


class Yardstick:
    """Bytes of the distinct storages that autograd saves and that are no weights, without any of our classes."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._seen: dict[int, Tensor] = {}

    def run(self, segment: str, block: Block, *inputs: object) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            return block(*inputs)

    def _pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._weights:
            self._seen.setdefault(address, tensor.detach())  # held: the address stays its own
        return tensor.detach()

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._seen.values())


def charged_and_measured_bytes(answers: tuple[Policy, ...]) -> tuple[int, int]:
    """Activation bytes of one forward: in the ledger and the tiers, and by the yardstick."""

    tokens, labels = batches(1, 1)[0, 0]
    model = PARITY_MODELS[MODEL]()
    spilling = Spilling(model, answers, LazyLanes)
    segments.wrap_segments(model.segments, Position(3), spilling.technique.hook)
    loss = model(tokens, labels, BATCH * LENGTH)
    held = spilling.ledger.by_purpose()[ACTIVATIONS]
    del loss
    spilling.lanes.close()

    measured = PARITY_MODELS[MODEL]()
    yardstick = Yardstick(measured)
    segments.wrap_segments(measured.segments, Position(3), yardstick)
    measured(tokens, labels, BATCH * LENGTH)
    return held, yardstick.saved_bytes


@pytest.mark.parametrize("answers", [ANSWERS["keep"], ANSWERS["host"]])
def test_activations_are_charged_once_a_storage_and_weights_not_at_all(answers: tuple[Policy, ...]) -> None:
    charged, measured = charged_and_measured_bytes(answers)
    assert charged == measured


@pytest.mark.parametrize("answers", [ANSWERS["keep"], ANSWERS["host"]])
def test_weights_taken_for_activations_are_charged_twice(
    answers: tuple[Policy, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResidentParameters, "find", lambda self, tensor: None)
    charged, measured = charged_and_measured_bytes(answers)
    assert charged > measured
