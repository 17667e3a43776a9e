"""The devices of a sweep, each of which trains one turn at a time.

    Sweep -> Here: the one device of this process
          -> Workers: a process for each device --(Start, TurnMessage)--> it trains --(what it did)--> Sweep

A worker is a process of its own, started like a rank so that it dies with the sweep; the two exchange pickled messages
over a socket pair. A worker knows a member by what the member carries (turn.Carried): progress, epoch, where its states
are parked. All workers share the files of parked states, so any of them can take any member's next turn.

A member that ends alone does not disturb the others. Anything else that ends a worker ends the attempt, after the
others have finished their step and committed their checkpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import NoReturn, Protocol, Self

from spillway.api.job_file import JobFile
from spillway.errors import RANK_CRASHED, ExitCode, Preempted, SpillwayError
from spillway.plan import MemoryPlan

from ..ending import Ending
from ..tiers.spill_file import SpillFile
from ..trainer import StopRequest
from .messages import (
    Committed,
    Ended,
    Evaluated,
    Failed,
    Finish,
    Part,
    Reported,
    Start,
    Stepped,
    TurnEnded,
    TurnMessage,
)
from .parking import shared_files
from .turn import Device, Member, Turn, Witness

POLL_SECONDS = 0.5
"""Seconds until a request to stop is noticed while all devices train."""
STOP_SECONDS = 120.0
"""Seconds for a worker to finish its step and commit its checkpoint, after another one has ended the attempt."""


class Devices(Protocol):
    """The devices that a sweep trains on."""

    def start(self, device: int, turn: Turn) -> None:
        """Begins a turn on a device that has none."""

    def ended(self) -> list[int]:
        """Waits until turns have ended, and returns the devices that had them. Raises Preempted if a stop is requested,
        and whatever else ends the attempt."""

    def leave(self, member: Member) -> None:
        """Called when the member will have no further turn."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Here:
    """The one device of this process, for a sweep without workers."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, device: int, turn: Turn) -> None:
        self._device.train(turn)

    def ended(self) -> list[int]:
        return [0]

    def leave(self, member: Member) -> None:
        self._device.leave(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.parking.close()


class WorkerLost(Exception):
    """A worker ended without being able to tell why."""


@dataclass(slots=True)
class Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    turn: Turn = ()


class Workers:
    """The devices of a sweep, each with a process of its own."""

    def __init__(self, job: JobFile, plan: MemoryPlan, witness: Witness, stop: StopRequest) -> None:
        self._witness, self._stop, self._job, self._plan = witness, stop, job, plan
        self._files: list[SpillFile] = []
        self._workers: list[Worker] = []
        self._members: dict[str, Member] = {}

    def __enter__(self) -> Self:
        try:
            self._files = shared_files(self._job, self._plan)
            descriptors = tuple(file.descriptor for file in self._files)
            for _ in range(self._plan.member_devices):
                self._workers.append(self._started(descriptors))
            for device, worker in enumerate(self._workers):
                self._send(worker, Start(self._job, self._plan, device, descriptors))
            for worker in self._workers:
                self._receive(worker)
        except BaseException:
            self._end_all(early=True)
            raise
        self._stop.wait_for_step()  # from now on a request to stop is passed on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all(early=kind is not None)

    def _end_all(self, *, early: bool) -> None:
        """Ends all workers. Those in a turn finish their step and commit their checkpoints first."""
        self._stop.at_once = False
        for worker in self._workers:
            if early and worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
            if not worker.turn and not worker.connection.closed:
                with suppress(OSError):
                    worker.connection.send(Finish())
        self._take_rest()
        for worker in self._workers:
            worker.connection.close()
            try:
                worker.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for file in self._files:
            file.close()

    def start(self, device: int, turn: Turn) -> None:
        worker = self._workers[device]
        worker.turn = turn
        self._members |= {member.name: member for member, _ in turn}
        parts = tuple(Part(member.name, until, member.carried) for member, until in turn)
        self._send(worker, TurnMessage(parts, self._parked_bytes))

    def ended(self) -> list[int]:
        while not self._stop.requested:
            ready = wait([worker.connection for worker in self._workers], POLL_SECONDS)
            done = [
                device
                for device, worker in enumerate(self._workers)
                if worker.connection in ready and self._has_ended_its_turn(worker)
            ]
            if done:
                return done
        raise Preempted("stopped on request; members resume from their checkpoints")

    def leave(self, member: Member) -> None:
        member.carried = member.carried._replace(states=None)

    @property
    def _parked_bytes(self) -> int:
        states = (member.carried.states for member in self._members.values())
        return sum(one.parked.nbytes for one in states if one is not None)

    def _started(self, descriptors: tuple[int, ...]) -> Worker:
        ours, theirs = Pipe()
        try:
            command = [sys.executable, "-P", "-m", "spillway_trainer.launch.rank", str(os.getpid())]
            command += [sys.executable, "-P", "-m", "spillway_trainer.sweep.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(), *descriptors))
        finally:
            theirs.close()
        return Worker(process, ours)

    def _send(self, worker: Worker, message: object) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            self._raise_end_of(worker)

    def _has_ended_its_turn(self, worker: Worker) -> bool:
        """Takes one message from the worker; returns whether its turn has ended."""
        message = self._receive(worker)
        try:
            return self._take(worker, message)
        except OSError:  # it ended before it got its answer
            self._raise_end_of(worker)

    def _receive(self, worker: Worker) -> object:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._raise_end_of(worker)
        if isinstance(message, Ended):
            raise_ending(message.ending)
        return message

    def _take(self, worker: Worker, message: object) -> bool:
        """Handles a message of the worker; returns whether its turn has ended."""
        match message:
            case Stepped(member, metrics):
                self._members[member].progress.step = metrics.step
                self._witness.sink(member).step(metrics)
            case Evaluated(member, loss):
                self._witness.sink(member).evaluation(loss)
            case Committed(member, step):
                self._witness.sink(member).checkpoint(step)
            case Reported(member, step, value):
                try:
                    self._witness.reported(member, step, value)
                except SpillwayError:
                    worker.connection.close()  # otherwise it would wait for the answer
                    raise
                worker.connection.send(None)
            case Failed(member, step, ending):
                self._witness.failed(member, step, error_of(ending))
            case TurnEnded(carried):
                for trained, _ in worker.turn:
                    trained.carried = carried[trained.name]
                    trained.recorder.num_missed = trained.carried.num_missed
                worker.turn = ()
                return True
        return False

    def _raise_end_of(self, worker: Worker) -> NoReturn:
        """Raises the error of a worker that ended without a message. If the kernel killed the worker, this process
        kills itself the same way: whoever started it knows what that means."""
        code, device = worker.process.wait(), self._workers.index(worker)
        if self._stop.requested or code == -signal.SIGTERM:
            raise Preempted("stopped on request before training resumed")
        if code == -signal.SIGKILL:
            print(f"the process of device {device} was killed", flush=True)
            self._end_all(early=True)
            os.kill(os.getpid(), signal.SIGKILL)
        raise WorkerLost(
            f"the training process of device {device} ended unexpectedly with exit code {code}; see the log of this run"
        )

    def _take_rest(self) -> None:
        """Handles the messages that workers still send, so that everything they trained is on record. Has no time limit
        of its own if a stop was requested."""
        left = {worker.connection: worker for worker in self._workers if not worker.connection.closed}
        while left and (ready := wait([*left], None if self._stop.requested else STOP_SECONDS)):
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                    if not isinstance(message, Ended):
                        self._take(left[connection], message)
                except (EOFError, OSError, SpillwayError):
                    connection.close()
                    del left[connection]


def error_of(ending: Ending) -> SpillwayError:
    error = SpillwayError(ending.message, **ending.details)
    error.exit_code = ExitCode(ending.exit_code)
    return error


def raise_ending(ending: Ending) -> NoReturn:
    """Raises an error with this ending."""
    if ending.reason == RANK_CRASHED:
        raise WorkerLost(ending.message)
    raise error_of(ending)
