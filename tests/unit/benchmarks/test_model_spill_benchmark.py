"""benchmarks/model_spill.py: what it calls identical is; a quick run is held to the figures that it gives."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import paired
from measured_sweep import Outcome, differences, in_rotation
from model_parallel import are_same

pytestmark = pytest.mark.ci

LOSSES, EVALUATIONS = {1: 6.0, 2: 5.5, 3: 5.25, 4: 5.0}, {2: 5.6, 4: 5.1}
ALONE = Outcome(
    seconds=4.0, reported_seconds=3.0, best="a", curves=dict.fromkeys("ab", (LOSSES, EVALUATIONS)),
    tensors={name: {"w": torch.tensor([1.0, 2.0])} for name in "ab"}, device_bytes=1,
)  # fmt: skip


def with_curves(losses: dict[int, float], evaluations: dict[int, float]) -> Outcome:
    return replace(ALONE, curves={**ALONE.curves, "b": (losses, evaluations)})


DIFFERENT = {
    "turns: loss of b": with_curves({**LOSSES, 3: 5.250000001}, EVALUATIONS),
    "turns: evaluation of b": with_curves(LOSSES, {2: 5.6, 4: 5.2}),
    "turns: final tensors of b": replace(ALONE, tensors={**ALONE.tensors, "b": {"w": torch.tensor([1.0, 2.5])}}),
    "turns: steps of b": with_curves({**LOSSES, 5: 4.9}, EVALUATIONS),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_members_that_differ_in_anything_are_named(what: str) -> None:
    assert differences(ALONE, DIFFERENT[what], "turns") == [what]


def test_a_complete_member_has_every_step_and_evaluation_and_the_tensors() -> None:
    assert differences(ALONE, ALONE, "turns") == []
    lacking = with_curves({1: 6.0, 2: 5.5}, {2: 5.6})
    assert differences(ALONE, lacking, "turns") == ["turns: loss of b", "turns: evaluation of b"]
    empty = replace(ALONE, tensors={**ALONE.tensors, "b": {}})
    assert differences(ALONE, empty, "turns") == ["turns: final tensors of b"]


def test_a_member_that_halving_stopped_is_the_same_as_far_as_it_trained() -> None:
    stopped = replace(with_curves({1: 6.0}, {1: 5.9}), tensors={"a": ALONE.tensors["a"]})
    assert differences(ALONE, stopped, "halving") == []
    assert differences(ALONE, replace(stopped, curves={**stopped.curves, "b": ({}, {})}), "h") == ["h: steps of b"]


def test_who_begins_a_round_changes() -> None:
    order = list[str]()
    ways = {name: lambda name=name: order.append(name) or ALONE for name in "abc"}  # type: ignore[func-returns-value]
    assert {name: len(found) for name, found in in_rotation(ways, 3).items()} == dict.fromkeys("abc", 3)  # type: ignore[arg-type]
    assert "".join(order) == "abcbcacab"


def test_losses_that_stand_still_or_rise_are_no_training() -> None:
    assert are_same([3.0, 2.0], [3.0, 2.0])
    assert not are_same([3.0, 2.0], [3.0, 2.5])
    assert not are_same([3.0, 3.0], [3.0, 3.0])
    assert not are_same([2.0, 3.0], [2.0, 3.0])


def test_a_quick_run_is_held_to_the_figures_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str, **figures: float) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        paired.main(
            "benchmark", "what it is", lambda quick: figures, at_most={"ratio": 1.05}, at_least={"same": 1.0},
            not_quick=("ratio",),
        )  # fmt: skip

    run("--quick", same=1.0)
    run(same=1.0, ratio=1.0)
    with pytest.raises(SystemExit, match=r"same is 0\.000"):
        run("--quick", same=0.0)
    with pytest.raises(SystemExit, match="ratio is nan"):
        run(same=1.0)
