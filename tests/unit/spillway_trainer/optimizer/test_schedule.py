"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.job_documents import job
from spillway_trainer.config import learning_rate
from spillway_trainer.optimizer.schedule import LearningRate, ScheduleName

NAMES: tuple[ScheduleName, ...] = ("Constant", "Linear", "Cosine")


@pytest.mark.parametrize("name", NAMES)
def test_warmup_rises_in_equal_steps_from_the_first(name: ScheduleName) -> None:
    rate = LearningRate(name, peak=1.0, num_steps=100, warmup_steps=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_peak_follows_the_warmup(name: ScheduleName) -> None:
    assert LearningRate(name, peak=3e-4, num_steps=100, warmup_steps=10)(10) == 3e-4


def test_constant_stays_at_the_peak() -> None:
    rate = LearningRate("Constant", peak=0.5, num_steps=10)
    assert {rate(step) for step in range(10)} == {0.5}


def test_linear_is_half_way_down_at_half_time() -> None:
    assert LearningRate("Linear", peak=1.0, num_steps=110, warmup_steps=10)(60) == 0.5


def test_cosine_is_half_way_down_at_half_time() -> None:
    assert LearningRate("Cosine", peak=1.0, num_steps=110, warmup_steps=10)(60) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("name", ["Linear", "Cosine"])
def test_decay_ends_at_the_final_fraction(name: ScheduleName) -> None:
    assert LearningRate(name, peak=2.0, num_steps=10, final_fraction=0.1)(10) == pytest.approx(0.2)


@given(st.sampled_from(NAMES), st.integers(1, 500), st.data())
def test_every_step_of_a_run_learns(name: ScheduleName, num_steps: int, data: st.DataObject) -> None:
    warmup_steps = data.draw(st.integers(0, num_steps))
    rate = LearningRate(name, peak=1e-3, num_steps=num_steps, warmup_steps=warmup_steps)
    rates = [rate(step) for step in range(num_steps)]
    assert all(0.0 < value <= 1e-3 for value in rates)
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)


def test_warmup_longer_than_the_run_is_rejected() -> None:
    with pytest.raises(ValueError, match="warmup of 11 steps"):
        LearningRate("Cosine", peak=1.0, num_steps=10, warmup_steps=11)


@pytest.mark.parametrize(("ratio", "steps", "expected"), [(0.03, 100, 3), (0.03, 101, 4), (0.0, 100, 0), (1.0, 7, 7)])
def test_a_share_of_the_steps_is_rounded_up_as_in_transformers(ratio: float, steps: int, expected: int) -> None:
    spec = job({"spec.training.steps": steps, "spec.training.schedule": {"warmupRatio": str(ratio)}}).spec
    assert learning_rate(spec).warmup_steps == expected
