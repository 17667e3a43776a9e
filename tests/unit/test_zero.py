"""Strategies Zero1 to Zero3 without DeepSpeed: who has what, what is summed where, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import local_runs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spillway.errors import UserError
from spillway.plan import MemoryPlan, OptimizerPlan, ParameterPlan
from spillway_trainer.models.chain import Chain
from spillway_trainer.ranks import World
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.zero import reduced_gradients
from spillway_trainer.zero.layout import Piece, cut_evenly, cut_group
from spillway_trainer.zero.reduced_gradients import ReducedGradients
from spillway_trainer.zero.run import refuse, tie
from spillway_trainer.zero.support import check_version

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
RANKS = st.integers(1, 5)


def whole(pieces: list[Piece]) -> list[int]:
    return [value for piece in pieces for value in range(piece.offset, piece.end)]


@given(SIZES, RANKS)
def test_every_value_of_a_group_has_one_owner_and_every_rank_equally_many(sizes: list[int], world: int) -> None:
    part = -(-sum(sizes) // world)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cut = cut_group({str(n): place for n, place in enumerate(zip(starts, sizes, strict=True))}, part, world)
    assert [whole(cut[str(n)]) for n in range(len(sizes))] == [list(range(size)) for size in sizes]
    assert all(sum(pieces[rank].size for pieces in cut.values()) <= part for rank in range(world))


@given(st.integers(1, 200), RANKS)
def test_every_value_of_a_parameter_has_one_owner(size: int, world: int) -> None:
    pieces = cut_evenly(size, world)
    assert whole(pieces) == list(range(size))
    assert max(piece.size for piece in pieces) == -(-size // world)


@dataclass
class Together:
    """Stands for the ranks: each of them brings what this one brings, times its number."""

    world: World
    agrees: bool = True
    exchanged: list[list[int]] = field(default_factory=list)

    def same(self, value: int) -> bool:
        return self.agrees

    def scatter(self, received: Tensor, sent: Tensor, sizes: list[int]) -> None:
        self.exchanged.append(list(sizes))
        own = torch.split(sent, list(sizes))[self.world.rank]
        received.copy_(torch.cat([own * (rank + 1) for rank in range(self.world.size)]))


def reduced(peers: Any, sizes: dict[str, int], taken: dict[str, Tensor]) -> ReducedGradients:
    layout = {name: cut_evenly(size, peers.world.size) for name, size in sizes.items()}
    return ReducedGradients(layout, peers, torch.float32, DeviceLedger(None), taken.__setitem__)


@pytest.mark.parametrize("bucket", [1, 7, 64, 1 << 20])
def test_each_rank_gets_the_whole_sum_of_its_pieces_whatever_the_bucket(
    monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(reduced_gradients, "EXCHANGE_PARAMETERS", bucket)
    sizes, taken = {"a": 33, "b": 2, "c": 100}, dict[str, Tensor]()
    peers = Together(World(rank=1, size=3))
    gradients = reduced(peers, sizes, taken)
    values = {name: torch.randn(size) for name, size in sizes.items()}
    for name in ("c", "a", "b"):  # backward's order is not the model's
        gradients.take(name, values[name].view(1, -1))
    gradients.finish()
    for name, value in values.items():
        piece = cut_evenly(value.numel(), 3)[1]
        own = value[piece.offset : piece.end]
        assert torch.equal(taken[name], (own + own * 2) + own * 3)
    assert sum(map(sum, peers.exchanged)) == sum(sizes.values())


def test_gradients_are_charged_until_they_are_exchanged() -> None:
    ledger, peers = DeviceLedger(None), Together(World(rank=0, size=2))
    layout = {"a": cut_evenly(1000, 2)}
    gradients = ReducedGradients(layout, peers, torch.float32, ledger, lambda name, values: None)  # type: ignore[arg-type]
    before = ledger.held_bytes
    gradients.take("a", torch.zeros(1000))
    gradients.finish()
    assert ledger.held_bytes == before
    assert ledger.peak_bytes >= before + 4000


def test_a_gradient_that_other_ranks_have_not_is_refused_by_name() -> None:
    gradients = reduced(Together(World(rank=1, size=2), agrees=False), {"expert.weight": 10}, {})
    with pytest.raises(UserError, match=r"rank 1, at expert\.weight.*use spec\.parallelism\.strategy: Ddp"):
        gradients.take("expert.weight", torch.zeros(10))


@pytest.mark.parametrize("version", ["0.19.5", "0.19.7", "0.20.0", "1.0", "0.18.9"])
def test_another_deepspeed_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=rf"DeepSpeed {version}.*0\.19\.8 up to, but not with, 0\.20"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+cpu", "0.19.10"])
def test_deepspeeds_that_the_adapter_stands_on_are_taken(version: str) -> None:
    check_version(version)


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    @property
    def tied(self) -> dict[str, str]:
        return {"other.weight": "one.weight"}


def test_tied_parameters_become_one() -> None:
    model = Tied()
    tie(model)
    assert model.other.weight is model.one.weight
    assert [name for name, _ in model.named_parameters()] == ["one.weight"]


def frozen() -> Chain:
    model = Tied()
    model.one.weight.requires_grad_(False)
    return model


def mixed() -> Chain:
    model = Tied()
    model.one.bfloat16()
    return model


PLAN = local_runs.disabled_plan().model_copy(update={"strategy": "Zero2"})
REFUSED: dict[str, tuple[MemoryPlan, Chain, World]] = {
    "one rank has nothing to divide": (PLAN, Tied(), World()),
    "parameters cannot be streamed": (
        PLAN.model_copy(update={"parameters": ParameterPlan(order="WeightStationary")}),
        Tied(),
        World(size=2),
    ),
    "overlap: Forward is not for this strategy": (
        PLAN.model_copy(update={"optimizer": OptimizerPlan(overlap="Forward")}),
        Tied(),
        World(size=2),
    ),
    "one.weight is frozen": (PLAN, frozen(), World(size=2)),
    "parameters of torch.bfloat16 and torch.float32": (PLAN, mixed(), World(size=2)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_divided_is_refused_before_it_has_memory(said: str) -> None:
    with pytest.raises(UserError, match=f"strategy = Zero2: .*{said}"):
        refuse(*REFUSED[said])


def test_only_these_strategies_import_deepspeed() -> None:
    code = "import sys, spillway_trainer.run_job; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
