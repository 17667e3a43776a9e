"""The loss scale moves as that of torch.amp.GradScaler, and the step loop does with it what the docs say."""

from __future__ import annotations

import random
import re

import pytest
import torch

from spillway.errors import UserError
from spillway_trainer.optimizer.loss_scale import LossScaler, ScaleRule, float16_operations


@pytest.mark.parametrize("growth_interval", [1, 2, 5])
def test_the_scale_is_that_of_torchs_grad_scaler(growth_interval: int) -> None:
    """Over 300 steps, some of which overflow; and nowhere near the minimum, which torch has not."""
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=growth_interval)
    ours = LossScaler(ScaleRule(2.0**30, growth_interval, 2.0**-100))
    chance, weight = random.Random(growth_interval), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(300):
        assert ours.value == theirs.get_scale()
        overflows = chance.random() < 0.4
        weight.grad = torch.full((1,), torch.inf if overflows else 1.0)
        theirs.scale(torch.ones(1))
        theirs.step(optimizer)
        theirs.update()
        ours.back_off() if overflows else ours.grow()


def test_the_minimum_is_never_left_downwards() -> None:
    scale = LossScaler(ScaleRule(4.0, 2000, 2.0))
    assert not scale.is_least
    scale.back_off()
    assert scale.is_least
    scale.back_off()
    assert scale.value == 2.0


def test_without_a_rule_the_loss_is_itself_and_nothing_is_saved() -> None:
    scale, loss = LossScaler(), torch.ones(1)
    scale.grow()
    scale.back_off()
    assert (scale.value, scale.scalars(), scale.is_least) == (1.0, {}, False)
    assert scale.scaled(loss) is loss


def test_what_is_saved_goes_on_in_the_middle_of_an_interval() -> None:
    one, other = (LossScaler(ScaleRule(8.0, 3, 1.0)) for _ in range(2))
    one.grow()
    one.grow()
    other.load(one.scalars())
    other.grow()
    assert (other.value, other.num_finite) == (16.0, 0)


def test_a_checkpoint_without_a_scale_begins_with_the_first_one() -> None:
    scale = LossScaler(ScaleRule(8.0, 3, 1.0))
    scale.load({"num_updates": 3.0})
    assert scale.value == 8.0


@pytest.mark.parametrize(
    ("rule", "said", "raised"),
    [
        (ScaleRule(2.0**10, 5, 1.0), "\"cholesky\" not implemented for 'Half'", UserError),
        (ScaleRule(2.0**10, 5, 1.0), "out of range", RuntimeError),
        (None, "\"cholesky\" not implemented for 'Half'", RuntimeError),
    ],
)
def test_only_a_missing_float16_operation_becomes_a_user_error(
    rule: ScaleRule | None, said: str, raised: type[Exception]
) -> None:
    with pytest.raises(Exception, match=re.escape(said)) as found, float16_operations(LossScaler(rule)):
        raise RuntimeError(said)
    assert type(found.value) is raised
