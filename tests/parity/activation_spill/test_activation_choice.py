"""activation_spill.chooser: what is watched, what is chosen, when again; by ranks together; and never another bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from spillway.plan import ActivationPlan, Policy, Tier
from spillway.planning.storage_choice import Choice
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import Chooser, Chosen, PolicyLimits
from spillway_trainer.activation_spill.chooser import WATCHED_STEPS, WINDOW_STEPS
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

SIZE = 4096
NBYTES = 4 * SIZE
HOST, NVME = Policy.HOST, Policy.NVME
PLANNED = (NVME, NVME, HOST, HOST)
SINES = 3
LIMITS = PolicyLimits(
    device_bytes=8 * NBYTES, kept_bytes=0, host_bytes=6 * NBYTES, nvme_bytes=7 * NBYTES, window_bytes=NBYTES,
    ahead_bytes=4 * NBYTES,
)  # fmt: skip


RATES = {"d2h": 80e3, "h2d": 80e3, "nvme_write": 8e3, "nvme_read": 40e3}


class Slow(CpuLanes):
    """Whose lanes say that they took so long, whatever they took: bytes a second by lane."""

    def busy_seconds(self) -> dict[str, float]:
        return {lane: moved / RATES[lane] for lane, moved in self.moved_bytes().items()}

    def stalled_seconds(self) -> float:
        return 0.0


@dataclass
class Clock:
    """Seconds that pass when it is told so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Run:
    """Four segments of three sines each, which save 16 KiB each; a sine takes a second, its gradient two."""

    lanes_type: type = Slow
    agree: Callable[[Sequence[float]], Sequence[Sequence[float]]] = lambda values: [list(values)]
    limits: PolicyLimits = LIMITS
    speed: float = 1.0
    told: list[Chosen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock()
        host, ledger = HostSlab(1 << 22), DeviceLedger(None)
        self.lanes = self.lanes_type(host, ledger)
        self.nvme = NvmeSlab(Path("/spill"), 1 << 22, 1, open_file=FakeSpillFile)
        self.segments = [f"block{index}" for index in range(len(PLANNED))]
        choosing = partial(Chooser, limits=self.limits, lanes=self.lanes, agree=self.agree, clock=self.clock)
        plan = ActivationPlan(answers=PLANNED, minimum_bytes=1024, window_bytes=1 << 30)
        self.technique = activation_spill.build(
            plan, self.segments, ResidentParameters([]), self.lanes, ledger, self.nvme, choosing=choosing
        )
        self.technique.tell = self.told.append
        assert self.technique.chooser is not None
        self.chooser = self.technique.chooser
        self.held: list[dict[Tier, int]] = []

    def step(self, size: int = SIZE) -> Tensor:
        x = torch.linspace(-1, 1, size, requires_grad=True)
        y = x * 1.0
        for segment in self.segments:
            y = self.technique.hook.run(segment, self._sines, y)
        self.technique.start_backward()
        self.technique.store.drain()
        self.held.append(self.technique.held_bytes())
        y.sum().backward()
        self.technique.end_step()
        assert x.grad is not None
        return x.grad

    def _sines(self, x: Tensor) -> Tensor:
        for _ in range(SINES):
            x = x.sin()
            x.register_hook(lambda _: self._pass(2.0))
            self._pass(1.0)
        return x

    def _pass(self, seconds: float) -> None:
        self.clock.seconds += self.speed * seconds


def expected(size: int = SIZE) -> Tensor:
    x = torch.linspace(-1, 1, size, requires_grad=True)
    y = x * 1.0
    for _ in range(SINES * len(PLANNED)):
        y = y.sin()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


def test_host_memory_and_nvme_take_turns_after_a_few_watched_steps() -> None:
    run = Run()
    gradients = [run.step() for _ in range(WATCHED_STEPS + 2)]
    assert all(torch.equal(gradient, expected()) for gradient in gradients)
    assert len(run.told) == 1
    choice = run.chooser.choice
    assert choice is not None
    assert sum(a is not b for a, b in pairwise(choice.answers)) > 3  # the plan's: once
    assert run.told[0].tier_bytes == {Tier.HOST: 6 * NBYTES, Tier.NVME: 6 * NBYTES}
    assert run.held[0] == run.held[-1] == {Tier.DEVICE: 0, Tier.HOST: 6 * NBYTES, Tier.NVME: 6 * NBYTES}
    assert "6 tensors to host memory" in run.told[0].reason


def test_what_was_watched_is_when_forward_saves_and_when_backward_comes() -> None:
    run = Run()
    seen: list[list[float]] = []

    def agree(values: Sequence[float]) -> Sequence[Sequence[float]]:
        seen.append(list(values))
        return [list(values)]

    run.chooser._agree = agree
    for _ in range(WATCHED_STEPS):
        run.step()
    times, rates = seen[-1][: 2 * 12], seen[-1][2 * 12 :]
    assert times[::2] == [float(index) for index in range(12)]
    assert times[1::2] == [12.0 + 2.0 * (12 - index) for index in range(12)]
    assert rates == pytest.approx([RATES[lane] for lane in ("d2h", "h2d", "nvme_write", "nvme_read")])


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_no_bit_depends_on_the_choice_and_nothing_is_left(lanes: type) -> None:
    run = Run(lanes_type=lanes)
    for _ in range(WATCHED_STEPS + WINDOW_STEPS + 3):
        assert torch.equal(run.step(), expected())
    assert sum(run.technique.held_bytes().values()) == 0
    assert run.nvme.held_bytes == 0


def test_forward_that_saves_other_storages_stays_within_the_tier_limits() -> None:
    run = Run()
    for _ in range(WATCHED_STEPS):
        run.step()
    assert torch.equal(run.step(SIZE // 2), expected(SIZE // 2))
    assert torch.equal(run.step(), expected())
    for held in run.held:
        assert held[Tier.HOST] <= LIMITS.host_bytes
        assert held[Tier.NVME] <= LIMITS.nvme_bytes
    assert run.held[-1] == run.held[-3]


def test_forwards_of_changing_sizes_are_not_chosen_for() -> None:
    run = Run()
    for step in range(WATCHED_STEPS):
        run.step(SIZE >> (step % 2))
    assert run.chooser.choice is None
    assert [told.reason for told in run.told] == [
        "the tensors saved for backward differ between steps or ranks, so the plan's policies stay in force"
    ]


def test_limits_that_nothing_fits_leave_the_plans_answers() -> None:
    run = Run(limits=replace(LIMITS, nvme_bytes=NBYTES))
    for _ in range(WATCHED_STEPS + 1):
        assert torch.equal(run.step(), expected())
    assert run.chooser.choice is None
    assert run.told[0].reason.endswith("are missing; so the plan's policies stay in force")
    assert run.held[-1] == run.held[0]


def test_steps_that_slow_down_are_watched_again_and_an_equal_choice_stands() -> None:
    run = Run()
    for _ in range(WATCHED_STEPS + 2 * WINDOW_STEPS):
        run.step()
    assert not run.chooser.is_watching
    assert len(run.told) == 1
    run.speed = 1.05  # no drift
    for _ in range(WINDOW_STEPS):
        run.step()
    assert not run.chooser.is_watching
    run.speed = 1.3
    for _ in range(WINDOW_STEPS):
        run.step()
    assert run.chooser.is_watching
    for _ in range(WATCHED_STEPS):
        run.step()
    assert not run.chooser.is_watching
    assert len(run.told) == 2
    assert run.told[1].reason.startswith("the choice is unchanged")
    assert run.told[1].pass_seconds > run.told[0].pass_seconds


def test_ranks_that_saw_different_times_choose_the_same() -> None:
    """Each sees the other, twice as fast, beside itself."""
    said: dict[int, list[Sequence[float]]] = {0: [], 1: []}

    def alone(rank: int, values: Sequence[float]) -> Sequence[Sequence[float]]:
        said[rank].append(list(values))
        return [list(values)]

    def choice_of(speed: float, agree: Callable[[Sequence[float]], Sequence[Sequence[float]]]) -> Choice | None:
        run = Run(speed=speed, agree=agree)
        for _ in range(WATCHED_STEPS):
            run.step()
        return run.chooser.choice

    by_itself = [choice_of(speed, partial(alone, rank)) for rank, speed in enumerate((1.0, 2.0))]
    heard = [iter(zip(said[0], said[1], strict=True)) for _ in range(2)]
    together = [choice_of(speed, lambda _, of=of: next(of)) for speed, of in zip((1.0, 2.0), heard, strict=True)]
    assert by_itself[0] != by_itself[1]
    assert together[0] == together[1] != by_itself[0]
    assert together[0] is not None


def test_ranks_whose_forwards_differ_keep_the_plans_answers() -> None:
    run = Run(agree=lambda values: [list(values), [values[0], *(value + 1.0 for value in values[1:])]])
    for _ in range(WATCHED_STEPS):
        run.step()
    assert run.chooser.choice is None


def test_a_plan_with_one_tier_has_nothing_to_choose() -> None:
    host, ledger = HostSlab(1 << 20), DeviceLedger(None)
    lanes = CpuLanes(host, ledger)
    choosing = partial(Chooser, limits=LIMITS, lanes=lanes)
    plan = ActivationPlan(answers=(HOST, HOST))
    built = activation_spill.build(plan, ["a", "b"], ResidentParameters([]), lanes, ledger, None, choosing=choosing)
    assert built.chooser is None
