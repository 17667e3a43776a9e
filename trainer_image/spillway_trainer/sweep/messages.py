"""What a sweep and the processes of its devices say to each other, pickled over a socket pair."""

from __future__ import annotations

from typing import NamedTuple

from spillway.api.job_file import JobFile
from spillway.metrics import StepMetrics
from spillway.plan import MemoryPlan

from ..ending import Ending
from .turn import Carried


class Start(NamedTuple):
    """The first message to a worker."""

    job: JobFile
    plan: MemoryPlan
    device: int
    descriptors: tuple[int, ...]
    """Descriptors of the files of parked states, which the worker has inherited."""


class Ready(NamedTuple):
    """The first message from a worker: it waits for turns."""


class Part(NamedTuple):
    """One member's part of a turn."""

    name: str
    until: int
    carried: Carried


class TurnMessage(NamedTuple):
    parts: tuple[Part, ...]
    parked_bytes: int
    """Bytes that all members have parked."""


class Finish(NamedTuple):
    """There are no further turns for the worker."""


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
    """A value that the objective compares. Answered with None once it is durable."""

    member: str
    step: int
    value: float


class Failed(NamedTuple):
    """A member ended, without ending the others."""

    member: str
    step: int
    ending: Ending


class TurnEnded(NamedTuple):
    carried: dict[str, Carried]


class Ended(NamedTuple):
    """The worker ends, and with it the attempt."""

    ending: Ending
