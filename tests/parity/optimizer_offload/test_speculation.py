"""Updates made during backward leave the bits of those made afterwards: committed, aborted or taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.optimizer_cases import HOST_BYTES, LANES, Case, Named, Outcome, offload, outcome, resident, split
from cases.planted_races import Defect, LanesThatGoOn, LanesWithDefect
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import RaceKind, TracingLanes
from harness.depth import sweep
from spillway.plan import OptimizerPlan
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.optimizer_offload.speculation import Speculation
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Event, Lane, Lanes, Submission

torch.set_num_threads(1)

STEPS: list[tuple[int, int, float | None]] = [
    (0, 1, 1.0), (1, 1, 1.0), (2, 2, 1.0), (5, 2, 0.5), (4, 2, 1.0), (6, 2, 1.0), (7, 1, None), (8, 1, 1.0),
    (9, 1, 1.0),
]  # fmt: skip
"""seed of the gradients, micro-batches, factor (None = skipped)"""
COMMITTED = [1, 5, 7, 8]
"""steps in which as many gradients came as in the step before, after a factor of 1, and the factor is 1 again"""
EVERYTHING = 10**6


def follow(
    optimizer: StepOptimizer, case: Case, first: int = 0, last: int = len(STEPS), *, takes_norm: bool = True
) -> list[float]:
    norms = []
    for step, (seed, num_micro_batches, factor) in enumerate(STEPS[first:last], first):
        optimizer.begin(1e-2 / (step + 1))
        for micro_batch in range(num_micro_batches):
            for name in case.uses:
                optimizer.wait([name])
            for name, gradient in case.gradients(seed, micro_batch):
                optimizer.take(name, gradient)
        if takes_norm:
            norms.append(optimizer.norm())
        if factor is None:
            optimizer.skip()
        else:
            optimizer.step(1e-2 / (step + 1), factor)
    return norms


def plain(case: Case) -> Outcome:
    parameters = case.parameters()
    optimizer = resident(parameters, case)
    return outcome(optimizer, parameters, follow(optimizer, case))


def speculating(case: Case, plan: OptimizerPlan, lanes: Lanes, ledger: DeviceLedger) -> tuple[OptimizerOffload, Named]:
    parameters = case.parameters()
    return offload(parameters, case, plan, lanes, ledger), parameters


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Chunks that were committed, by step."""
    steps: list[list[str]] = [[]]
    commit, end = Speculation.commit, Speculation.end

    def counted(self: Speculation, placed: Any, factor: float) -> Any:
        found = commit(self, placed, factor)
        steps[-1] += [] if found is None else [placed.chunk.label]
        return found

    def ended(self: Speculation, factor: float | None) -> None:
        end(self, factor)
        steps.append([])

    monkeypatch.setattr(Speculation, "commit", counted)
    monkeypatch.setattr(Speculation, "end", ended)
    return steps


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lanes_name", LANES)
@pytest.mark.parametrize("shares", [(1, 0, 0), (0.5, 0.3, 0.2)], ids=str)
def test_speculation_leaves_the_bits_of_the_plain_optimizer(
    shares: tuple[float, float, float], lanes_name: str, dtype: torch.dtype, commits: list[list[str]]
) -> None:
    for tied, chunk, window in sweep((False, True), (257, 4096), (700, EVERYTHING)):
        case = Case(dtype, tied=tied)
        ledger = DeviceLedger(None)
        lanes = LANES[lanes_name](HostSlab(HOST_BYTES), ledger)
        plan = split(*shares, chunk, overlap="Backward", speculative_parameters=window)
        optimizer, parameters = speculating(case, plan, lanes, ledger)
        commits[:] = [[]]
        result = outcome(optimizer, parameters, follow(optimizer, case))
        lanes.close()
        assert result.difference(plain(case)) == [], (case, chunk, window)
        assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == (), (case, chunk, window)
        if chunk == 257 or window == EVERYTHING:
            assert [step for step, chunks in enumerate(commits) if chunks] == COMMITTED


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
def test_speculation_leaves_the_bits_under_every_rule(
    rule: UpdateRule, moments: MomentType, commits: list[list[str]]
) -> None:
    case, ledger = Case(torch.bfloat16, tied=True, rule=rule, moments=moments), DeviceLedger(None)
    chunk = 256 if moments is MomentType.INT8 else 257
    plan = split(0.7, 0.3, 0, chunk, overlap="Backward", speculative_parameters=EVERYTHING)
    optimizer, parameters = speculating(case, plan, LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger)
    assert outcome(optimizer, parameters, follow(optimizer, case)).difference(plain(case)) == []
    assert [step for step, chunks in enumerate(commits) if chunks] == COMMITTED


def test_the_window_is_the_end_of_the_forward_order_and_is_kept(commits: list[list[str]]) -> None:
    case, ledger = Case(torch.bfloat16, tied=True), DeviceLedger(None)
    host = HostSlab(HOST_BYTES)
    plan = split(1, 0, 0, 1009, overlap="Backward", speculative_parameters=2500)
    optimizer, _ = speculating(case, plan, LANES["lazy"](host, ledger), ledger)
    without, _ = speculating(case, split(1, 0, 0, 1009), LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger)
    follow(optimizer, case)
    assert commits[1] == ["down[1009:2018]", "down[2018:3027]", "down[3027:3071]"]
    chunks = [1009, 1009, 44]
    more = sum(3 * -(-4 * size // 64) * 64 + -(-2 * size // 64) * 64 for size in chunks)
    assert optimizer.held_bytes()["host"] - without.held_bytes()["host"] == more


class CountingLanes(LazyLanes):
    """Remembers the bytes that each kind of work on the CPU moves."""

    def __init__(self, host: HostSlab, ledger: DeviceLedger) -> None:
        super().__init__(host, ledger)
        self.by_label: dict[str, set[int]] = {}

    def enqueue(self, given: Submission) -> Event:
        self.by_label.setdefault(given.label, set()).add(given.nbytes)
        return super().enqueue(given)


@pytest.mark.parametrize("rule", UpdateRule)
def test_an_update_in_backward_reads_and_writes_each_state_once(rule: UpdateRule) -> None:
    """As many bytes as an update in its turn, which is in place; and nothing is copied beside it."""
    case, ledger = Case(torch.bfloat16, rule=rule), DeviceLedger(None)
    plan = split(1, 0, 0, 257, overlap="Backward", speculative_parameters=EVERYTHING)
    lanes, places = CountingLanes(HostSlab(HOST_BYTES), ledger), list[tuple[set[int], set[int]]]()

    def update(scalars: UpdateScalars, master: Tensor, moments: Any, *rest: Any, after: Any = None) -> None:
        kernels.update(scalars, master, moments, *rest, after=after)
        if after is not None:
            places.append(({t.data_ptr() for t in (master, *moments)}, {t.data_ptr() for t in after}))

    parameters = case.parameters()
    optimizer = OptimizerOffload(parameters, {}, case.settings, plan, lanes, ledger, cpu_update=update)
    follow(optimizer, case)
    speculated = {label.removeprefix("speculate "): n for label, n in lanes.by_label.items() if "speculate" in label}
    alone = {chunk: lanes.by_label[f"update {chunk}"] for chunk in speculated if f"update {chunk}" in lanes.by_label}
    assert {chunk: speculated[chunk] for chunk in alone} == alone
    assert len(alone) > 5
    assert places
    assert all(not before & after for before, after in places)


@pytest.mark.parametrize("middle", range(1, len(STEPS)))
def test_a_checkpoint_between_any_two_steps_is_the_plain_one(middle: int) -> None:
    case, ledger = Case(torch.bfloat16, tied=True), DeviceLedger(None)
    plan = split(0.7, 0.3, 0, 257, overlap="Backward", speculative_parameters=EVERYTHING)
    first, _ = speculating(case, plan, LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger)
    norms = follow(first, case, 0, middle)
    saved, scalars = dict(first.state()), first.scalars()
    second, parameters = speculating(case, plan, LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger)
    for name, value in saved.items():
        second.load(name, value)
    second.load_scalars(scalars)
    norms += follow(second, case, middle)
    assert outcome(second, parameters, norms).difference(plain(case)) == []


def test_sums_that_others_add_to_and_another_learning_rate_commit_nothing(commits: list[list[str]]) -> None:
    case, results = Case(torch.bfloat16), []
    plan = split(1, 0, 0, 257, overlap="Backward", speculative_parameters=EVERYTHING)
    ledger = DeviceLedger(None)
    parameters = case.parameters()
    for optimizer, named in (
        (resident(parameters, case), parameters),
        speculating(case, plan, LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger),
    ):
        follow(optimizer, case, 0, 2)
        for adds, learning_rate in ((True, 1e-2), (False, 2e-2)):
            optimizer.begin(1e-2)
            for name in case.uses:
                optimizer.wait([name])
            for name, gradient in case.gradients(2, 0):
                optimizer.take(name, gradient)
            for part in optimizer.parts([*optimizer.arrived()]) if adds else ():
                for event in part.settled:
                    event.wait()
                part.values.mul_(3.0)
            optimizer.norm()
            optimizer.step(learning_rate, 1.0)
        results.append(outcome(optimizer, named, []))
    assert [bool(chunks) for chunks in commits] == [False, True, False, False, False]
    assert results[1].difference(results[0]) == []


# --- what each wait and each condition is for


def traced(case: Case, plan: OptimizerPlan, wrap: Callable[[Lanes], Lanes]) -> set[tuple[str, RaceKind]]:
    ledger = DeviceLedger(None)
    tracing = TracingLanes(HostSlab(HOST_BYTES), ledger, {})
    optimizer, _ = speculating(case, plan, wrap(tracing), ledger)
    follow(optimizer, case, takes_norm=False)
    return {(race.region.rsplit(" ", 1)[0], race.kind) for race in tracing.schedule().races}


DEFECTS = [
    (Defect("speculated before the gradient is there", Lane.CPU, "speculate", lambda after: ()),
     "gradients", RaceKind.READ_BEFORE_WRITE),
    (Defect("values go up before they are made", Lane.H2D, "upload", lambda after: after[1:]),
     "spare values", RaceKind.READ_BEFORE_WRITE),
    (Defect("values overwritten while they go up", Lane.CPU, "speculate", lambda after: after[:1]),
     "spare values", RaceKind.WRITE_UNDER_READ),
]  # fmt: skip


@pytest.mark.parametrize(("defect", "region", "kind"), DEFECTS, ids=str)
def test_tracing_lanes_find_a_missing_edge(defect: Defect, region: str, kind: RaceKind) -> None:
    """Forward waits for nothing here, and no norm is taken: what they wait for implies some of the edges."""
    case, plan = Case(torch.bfloat16), split(1, 0, 0, 257, overlap="Backward", speculative_parameters=EVERYTHING)
    assert (region, kind) in traced(case, plan, lambda lanes: LanesThatGoOn(LanesWithDefect(lanes, defect)))
    assert (region, kind) not in traced(case, plan, LanesThatGoOn)


def commit_whatever_the_norm(commit: Any) -> Any:
    return lambda self, placed, factor: commit(self, placed, 1.0)


def never_taken_back(taken: Any) -> Any:
    def mutant(self: Any, chunks: Any, *rest: Any, **more: Any) -> None:
        spares = [self._spares[placed.chunk] for placed in chunks]
        before = [spare.made for spare in spares]
        taken(self, chunks, *rest, **more)
        for spare, made in zip(spares, before, strict=True):
            spare.made = spare.made or made

    return mutant


MUTANTS = {
    "commit before the norm is known": ("commit", commit_whatever_the_norm),
    "a gradient that comes after the last one": ("taken", never_taken_back),
}


@pytest.fixture
def _mutant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name, made = MUTANTS[request.param]
    monkeypatch.setattr(Speculation, name, made(getattr(Speculation, name)))
    return


@pytest.mark.usefixtures("_mutant")
@pytest.mark.parametrize("_mutant", MUTANTS, indirect=True)
def test_a_condition_that_is_left_out_changes_bits() -> None:
    case, ledger = Case(torch.bfloat16), DeviceLedger(None)
    plan = split(1, 0, 0, 257, overlap="Backward", speculative_parameters=EVERYTHING)
    optimizer, parameters = speculating(case, plan, LANES["lazy"](HostSlab(HOST_BYTES), ledger), ledger)
    assert outcome(optimizer, parameters, follow(optimizer, case)).difference(plain(case)) != []
