"""Advances several runs together: all of them pass one segment before any passes the next.

    segment 0: run A, run B, ... | segment 1: A, B, ... | ... | backward of segment 0: A, B, ... | updates of A, B, ...

What the runs share (a frozen base) is loaded once for all of them. An order that runs the whole model for one
micro-batch after the other (trainer.in_order) has no place between segments where another run could continue: then the
runs take turns by whole steps. Every run has its own random state, step, gradients and update, as it has alone, so the
others do not affect it. A run that fails does not end the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from spillway.errors import Preempted

from ..trainer import LoopSettings, Run, RunProgress, StepOnItsWay, StopRequest, after_step


@dataclass(slots=True)
class Trainee:
    """A run that advances with others."""

    run: Run
    settings: LoopSettings
    progress: RunProgress
    until: int
    """The step up to which it trains."""
    random_state: Tensor
    """torch's random state, as if the run were alone."""
    failed: bool = False

    @property
    def trains(self) -> bool:
        return not self.failed and self.progress.step < self.until

    @contextmanager
    def at_its_own(self) -> Iterator[None]:
        """Inside, torch's random state is the run's own."""
        torch.set_rng_state(self.random_state)
        yield
        self.random_state = torch.get_rng_state()


Alone = Callable[[Trainee], AbstractContextManager[None]]
"""Context around a trainee's work: catches an error that ends only this trainee, and sets `failed`."""


def advance_together(trainees: Sequence[Trainee], stop: StopRequest, alone: Alone) -> None:
    """Trains each to its step. Raises Preempted after each has committed a checkpoint, and any error that ends all of
    them."""
    while training := [one for one in trainees if one.trains]:
        take_round(training, stop, alone)


def take_round(training: Sequence[Trainee], stop: StopRequest, alone: Alone) -> None:
    """Runs one step of each."""
    steps = [(one, StepOnItsWay(one.run, one.settings, one.progress)) for one in training]
    for one, step in steps:
        with alone(one), one.at_its_own(), step.counted():
            step.begin()
    visiting = steps
    while visiting := [(one, step) for one, step in visiting if not one.failed and goes_on(one, step, alone)]:
        pass
    stopping, preempted = stop.requested, list[Trainee]()
    for one, step in steps:
        if one.failed:
            continue
        with alone(one), one.at_its_own():
            with step.counted():
                step.end(stop)
            if after_step(one.run, one.settings, one.progress, stop, step.metrics(), stopping=stopping):
                preempted.append(one)
    if stopping and preempted:
        saved = ", ".join(f"step {one.progress.step}" for one in preempted)
        raise Preempted(f"stopped on request; all members that trained together have saved checkpoints: {saved}")


def goes_on(one: Trainee, step: StepOnItsWay, alone: Alone) -> bool:
    """Runs one more segment of the step. False if all its micro-batches have passed, or the run failed."""
    more = False
    with alone(one), one.at_its_own(), step.counted():
        more = step.go_on()
    if one.failed:
        gc.collect()  # otherwise what it saved would outlive its segment, whose slot the others need
    return more
