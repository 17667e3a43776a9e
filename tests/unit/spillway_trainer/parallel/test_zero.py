"""Strategies Zero1 to Zero3 and Fsdp without their libraries: who has what, what is summed where, what is rejected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness import local_runs
from spillway.errors import UserError
from spillway.plan import MemoryPlan, OptimizerPlan, ParameterPlan
from spillway_trainer.models.chain import Chain
from spillway_trainer.parallel import reduced_gradients
from spillway_trainer.parallel.deepspeed.layout import ShardPiece, cut_evenly, cut_group
from spillway_trainer.parallel.deepspeed.support import SUPPORT, check_version
from spillway_trainer.parallel.fsdp import cut_rows
from spillway_trainer.parallel.reduced_gradients import ReducedGradients
from spillway_trainer.parallel.run import reject, tie
from spillway_trainer.parallel.segment_gradients import SegmentGradients
from spillway_trainer.ranks import World
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.trainer import RunProgress, evaluate

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
RANKS = st.integers(1, 5)


def whole(pieces: list[ShardPiece]) -> list[int]:
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), RANKS)
def test_rows_are_cut_as_torch_cuts_them(shape: list[int], world: int) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = cut_rows(shape, world)
    assert whole(pieces) == values.flatten().tolist()
    chunks = [chunk.flatten().tolist() for chunk in torch.chunk(values, world)]
    assert [list(range(p.offset, p.end)) for p in pieces] == chunks + [[]] * (world - len(chunks))


@dataclass
class Together:
    """Stands for the ranks: each of them brings what this one brings, times its number."""

    world: World
    agrees: bool = True
    elsewhere: tuple[bool, ...] = ()
    """which gradients another rank has"""
    exchanged: list[list[int]] = field(default_factory=list)

    def same(self, value: int) -> bool:
        return self.agrees

    def any(self, own: list[bool]) -> list[bool]:
        return [here or there for here, there in zip(own, self.elsewhere or own, strict=True)]

    def scatter(self, received: Tensor, sent: Tensor, sizes: list[int]) -> Callable[[], None]:
        self.exchanged.append(list(sizes))

        def arrive() -> None:
            own = torch.split(sent, list(sizes))[self.world.rank]
            received.copy_(torch.cat([own * (rank + 1) for rank in range(self.world.size)]))

        return arrive


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


def test_a_gradient_that_other_ranks_have_not_is_rejected_by_name() -> None:
    gradients = reduced(Together(World(rank=1, size=2), agrees=False), {"expert.weight": 10}, {})
    gradients.take("expert.weight", torch.zeros(10))
    with pytest.raises(UserError, match=r"rank 1 has a gradient \(of expert\.weight\).*use strategy Ddp"):
        gradients.finish()


SEGMENTS = {"first": ["a"], "second": ["b", "c"], "none": [], "third": ["d"]}
LIKES = {"a": torch.empty(5), "b": torch.empty(3, 2), "c": torch.empty(4), "d": torch.empty(2)}


def of_segments(peers: Any, ledger: DeviceLedger, taken: dict[str, Tensor], marked: list[str]) -> SegmentGradients:
    layout = {name: cut_rows(like.shape, peers.world.size) for name, like in LIKES.items()}
    reduced = ReducedGradients(layout, peers, torch.float32, ledger, taken.__setitem__)
    return SegmentGradients(SEGMENTS, LIKES, peers, reduced, marked.append, ledger)


def test_gradients_are_held_until_backward_leaves_a_segment_then_summed() -> None:
    ledger, taken, marked = DeviceLedger(None), dict[str, Tensor](), list[str]()
    gradients = of_segments(Together(World(rank=0, size=2)), ledger, taken, marked)
    held = ledger.held_bytes
    for _ in range(2):
        gradients.take("d", torch.ones(2))
        gradients.end("third")
        gradients.take("c", torch.ones(4))
        gradients.take("b", torch.ones(3, 2))
        assert (list(taken), ledger.held_bytes - held) == ([], 4 * 10), "the sum of d is on its way"
        gradients.end("second")
        assert (taken["d"].tolist(), marked) == ([3.0], ["d", "b", "c"])
        gradients.take("a", torch.ones(5))
        gradients.finish()  # nothing before the first segment needs a gradient
        assert (list(taken), ledger.held_bytes) == (["d", "b", "c", "a"], held)
        taken.clear()
        marked.clear()


def test_gradient_only_another_rank_has_is_zero_and_one_nobody_has_is_none() -> None:
    taken, marked = dict[str, Tensor](), list[str]()
    peers = Together(World(rank=0, size=2), elsewhere=(True, False))
    gradients = of_segments(peers, DeviceLedger(None), taken, marked)
    gradients._to_come = ["second"]
    gradients.finish()
    assert (marked, taken["b"].tolist()) == (["b"], [0.0] * 4)


def test_a_gradient_that_comes_after_its_segment_was_exchanged_is_an_error() -> None:
    """An earlier segment uses the parameter, too."""
    gradients = of_segments(Together(World(rank=0, size=2)), DeviceLedger(None), {}, [])
    gradients.end("second")
    gradients.take("b", torch.ones(3, 2))
    with pytest.raises(UserError, match=r"parameter b is used by a segment .* before its own.*use Ddp"):
        gradients.finish()


def test_parts_of_a_gradient_are_added_in_float32() -> None:
    taken = dict[str, Tensor]()
    gradients = of_segments(Together(World(rank=0, size=1)), DeviceLedger(None), taken, [])
    gradients.take("d", torch.tensor([256.0, 1.0], dtype=torch.bfloat16))
    gradients.take("d", torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    gradients.finish()
    assert taken["d"].tolist() == [257.0, 2.0]


@pytest.mark.parametrize("version", ["0.19.5", "0.19.7", "0.20.0", "1.0", "0.18.9"])
def test_another_deepspeed_is_rejected(version: str) -> None:
    with pytest.raises(UserError, match=rf"DeepSpeed {version}.*0\.19\.8 or later, below 0\.20"):
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

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("one", self.one), ("other", self.other)]


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
REJECTED: dict[str, tuple[MemoryPlan, Chain, World]] = {
    "one rank has nothing to shard": (PLAN, Tied(), World()),
    "the plan streams parameters": (
        PLAN.model_copy(update={"parameters": ParameterPlan(order="WeightStationary")}),
        Tied(),
        World(size=2),
    ),
    "overlap = Forward, which does not work with this strategy": (
        PLAN.model_copy(update={"optimizer": OptimizerPlan(overlap="Forward")}),
        Tied(),
        World(size=2),
    ),
    "some are frozen": (PLAN, frozen(), World(size=2)),
    "parameters of several types": (PLAN, mixed(), World(size=2)),
}


@pytest.mark.parametrize("said", REJECTED)
def test_what_cannot_be_divided_is_rejected_before_it_has_memory(said: str) -> None:
    with pytest.raises(UserError, match=f"strategy = Zero2: .*{said}"):
        reject(*REJECTED[said])


def of_several_types() -> Chain:
    model = Tied()
    model.one.register_parameter("more", nn.Parameter(torch.empty(3, dtype=torch.bfloat16)))
    return model


def scalar() -> Chain:
    model = Tied()
    model.other.register_parameter("scale", nn.Parameter(torch.empty(())))
    return model


FSDP = PLAN.model_copy(update={"strategy": "Fsdp"})
REJECTED_BY_FSDP: dict[str, tuple[MemoryPlan, Chain, World]] = {
    "one rank has nothing to shard": (FSDP, Tied(), World()),
    "the plan streams parameters": (
        FSDP.model_copy(update={"parameters": ParameterPlan(order="WeightStationary")}),
        Tied(),
        World(size=2),
    ),
    "overlap = Backward, which does not work with this strategy": (
        FSDP.model_copy(update={"optimizer": OptimizerPlan(overlap="Backward")}),
        Tied(),
        World(size=2),
    ),
    "segment other .* has a scalar or empty parameter": (FSDP, scalar(), World(size=2)),
    "segment one .* trains parameters of several types": (FSDP, of_several_types(), World(size=2)),
    "2 of 5 ranks would have no row": (FSDP, Tied(), World(size=5)),
}


@pytest.mark.parametrize("said", REJECTED_BY_FSDP)
def test_what_fsdp2_cannot_divide_is_rejected_before_it_has_memory(said: str) -> None:
    with pytest.raises(UserError, match=f"strategy = Fsdp: .*{said}"):
        reject(*REJECTED_BY_FSDP[said])


def test_only_these_strategies_import_deepspeed_and_fsdp2() -> None:
    code = "import sys, spillway_trainer.run_job; sys.exit(any(name in sys.modules for name in "
    code += "('deepspeed', 'torch.distributed.fsdp')))"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


@pytest.mark.parametrize(("rank", "calls"), [(0, 2), (1, 2)])
def test_evaluation_with_a_short_last_round_runs_equal_forwards_per_rank(rank: int, calls: int) -> None:
    """Three batches, two ranks: a forward that gathers parameters needs them both in the last round too."""
    batch = SimpleNamespace(num_unmasked=1, given=lambda _: (), on=lambda device: batch)
    run: Any = MagicMock(runs_together=True)
    run.batches.evaluation_batches.return_value = [batch] * 3
    run.ranks.world, run.ranks.gather.return_value = World(rank=rank, size=2), [[1.0, 1.0], [1.0, 0.0]]
    run.model.return_value.item.return_value = 1.0
    evaluate(run, MagicMock(keeps_best=False, patience=None), RunProgress())
    assert run.model.call_count == calls


METHODS: dict[str, object] = {
    "fp16_enabled": False,
    "postscale_gradients": True,
    "gradient_predivide_factor": 1.0,
    "zero_optimization_stage": 2,
}


def engine(**changes: Any) -> SimpleNamespace:
    """Stands for a DeepSpeed engine, as far as these rules look."""
    answers = {name: Mock(return_value=changes.pop(name, value)) for name, value in METHODS.items()}
    found = {
        "module": nn.Linear(2, 3),
        "optimizer": SimpleNamespace(custom_loss_scaler=False),
        "_config": SimpleNamespace(communication_data_type=None),
    }
    return SimpleNamespace(**{**answers, **found, **changes})


@pytest.mark.parametrize(
    ("field", "changes", "said"),
    [
        ("model", {"module": nn.Linear(2, 3, device="meta")}, "weight and 1 more on the meta device"),
        ("loss scale", {"fp16_enabled": True}, "fp16.enabled"),
        ("loss scale", {"optimizer": SimpleNamespace(custom_loss_scaler=True)}, "a custom loss scale"),
        ("gradients", {"postscale_gradients": False}, "prescale_gradients"),
        ("gradients", {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ("gradients", {"_config": SimpleNamespace(communication_data_type=torch.bfloat16)}, "communication_data_type"),
        ("zero_optimization.stage", {"zero_optimization_stage": 0}, "0"),
    ],
)
def test_an_engine_is_rejected_by_the_field_that_is_outside(field: str, changes: dict[str, Any], said: str) -> None:
    (rule,) = [rule for rule in SUPPORT if rule.field == field]
    assert rule.found(engine(**changes)) == said
    assert rule.found(engine()) == ""


def test_the_piece_of_a_divided_parameter_is_looked_at_for_values() -> None:
    """Under ZeRO-3 the parameter itself is empty."""
    (rule,) = [rule for rule in SUPPORT if rule.field == "model"]
    module = nn.Linear(2, 3)
    module.weight.ds_tensor = torch.empty(3, device="meta")  # type: ignore[assignment]
    assert rule.found(engine(module=module)) == "weight on the meta device"
