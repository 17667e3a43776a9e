"""What a sweep and the processes of its devices say to each other, pickled over a socket pair."""

from __future__ import annotations

from typing import NamedTuple

from spillway.api.job_file import JobFile
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan

from ..ending import Ending
from .turn import Carried


class Start(NamedTuple):
    """The first, to a worker."""

    job: JobFile
    plan: MemoryPlan
    device: int
    descriptors: tuple[int, ...]
    """Of the files of parked states, which it has inherited."""


class Ready(NamedTuple):
    """The first, from a worker."""


class Part(NamedTuple):
    """A member of a turn."""

    name: str
    until: int
    carried: Carried


class TurnMessage(NamedTuple):
    parts: tuple[Part, ...]
    parked_bytes: int
    """Of all members."""


class Finish(NamedTuple):
    """There are no further turns."""


class Stepped(NamedTuple):
    member: str
    metrics: StepMetrics


class Evaluated(NamedTuple):
    member: str
    loss: float


class Committed(NamedTuple):
    member: str
    step: int


class Reported(NamedTuple):
    """Is answered, once it is durable."""

    member: str
    step: int
    value: float


class Failed(NamedTuple):
    """A member ended alone."""

    member: str
    step: int
    ending: Ending


class TurnEnded(NamedTuple):
    carried: dict[str, Carried]


class Ended(NamedTuple):
    """The worker ends, and with it the attempt."""

    ending: Ending
