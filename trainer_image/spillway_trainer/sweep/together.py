"""Advances several runs together: all of them pass one segment before any passes the next.

    segment 0: run A, run B, ... | segment 1: A, B, ... | ... | backward of segment 0: A, B, ... | updates of A, B, ...

What they share (a frozen base) is loaded once for all of them. Whoever runs one model after the other in one step gives
no place to go on in between: then whole steps take turns. Every run has what it has alone: its own random state, step,
gradients and update; so none sees that there are others. One that fails ends without them.
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
    """torch's, as in a run of its own."""
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
"""Context of a trainee's work: keeps an error that ends only this one, and sets `failed`."""


def advance_together(trainees: Sequence[Trainee], stop: StopRequest, alone: Alone) -> None:
    """Train each to its step. Raises Preempted after a committed checkpoint of each, and what ends all of them."""
    while training := [one for one in trainees if one.trains]:
        take_round(training, stop, alone)


def take_round(training: Sequence[Trainee], stop: StopRequest, alone: Alone) -> None:
    """A step of each."""
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
    """Through one more segment; False: all of its micro-batches have passed, or it failed."""
    more = False
    with alone(one), one.at_its_own(), step.counted():
        more = step.go_on()
    if one.failed:
        gc.collect()  # what it had saved would outlive its segment, whose slot the others need
    return more
