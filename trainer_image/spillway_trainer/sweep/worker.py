"""The process of one device of a sweep: trains the turns that it is given.

python -P -m spillway_trainer.sweep.worker DESCRIPTOR      of its end of the connection (workers.py)
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spillway.api.sweep.members import member_job
from spillway.errors import ExitCode, Preempted, SpillwayError
from spillway.metrics import StepMetrics

from ..cgroup import usable_cores
from ..ending import ending_of, leave
from ..kernels import half_products, native
from ..ranks import World
from ..reporting.recorder import Sink
from ..run_job import on_device
from ..trainer import StopRequest, settled_objects
from .messages import Committed, Ended, Evaluated, Failed, Finish, Ready, Reported, Start, Stepped, TurnEnded
from .parking import Parking
from .turn import Device, Member, Turn, member_of


class SweepGone(Exception):
    """The sweep's process has ended, or needs nothing more from this worker."""


class RemoteSweep:
    """The sweep, as a worker sees it: a turn.Witness that passes on what it is told."""

    def __init__(self, connection: Connection, stop: StopRequest) -> None:
        self._connection, self._stop = connection, stop

    def send(self, message: object) -> None:
        """Sends a whole message: a request to stop waits until it is sent."""
        at_once, self._stop.at_once = self._stop.at_once, False
        self._connection.send(message)
        self._stop.at_once = at_once
        if at_once and self._stop.requested:
            raise Preempted("stopped on request before training resumed")

    def receive(self) -> Any:
        """The next message of the sweep. Raises SweepGone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise SweepGone from error

    def sink(self, member: str) -> Sink:
        return RemoteSink(self, member)

    def reported(self, member: str, step: int, value: float) -> None:
        self.send(Reported(member, step, value))
        self.receive()

    def failed(self, member: str, step: int, error: SpillwayError) -> None:
        self.send(Failed(member, step, ending_of(error)))


@dataclass(frozen=True, slots=True)
class RemoteSink:
    sweep: RemoteSweep
    member: str

    def step(self, step: StepMetrics) -> None:
        self.sweep.send(Stepped(self.member, step))

    def evaluation(self, loss: float) -> None:
        self.sweep.send(Evaluated(self.member, loss))

    def checkpoint(self, step: int) -> None:
        self.sweep.send(Committed(self.member, step))


def main(arguments: Sequence[str]) -> int:
    """Runs a worker. `arguments`: the descriptor of its end of the connection."""
    native.return_freed_memory()
    connection, stop = Connection(int(arguments[0])), StopRequest()
    sweep = RemoteSweep(connection, stop)
    try:
        stop.listen()
        start: Start = sweep.receive()
        half_products.fix_products(start.job.compute_threads)
        num_cores = max(1, usable_cores(Path("/")) // start.plan.member_devices)
        if start.plan.device == "Cpu":
            os.sched_setaffinity(0, cores_of(start.device, start.plan.member_devices, os.sched_getaffinity(0)))
        parking = Parking(start.job, start.plan, start.descriptors)
        world = World(local_rank=start.device, size=start.plan.member_devices)
        placed, where = on_device(start.plan, world.size, world)
        num_cores = min(num_cores, placed.optimizer.num_threads) if where.type == "cuda" else num_cores
        device = Device(where, parking, stop, sweep, world.size)
        sweep.send(Ready())
        with settled_objects():
            for turn in turns(start, stop, sweep, parking, num_cores):
                device.train(turn)
                carried = {
                    member.name: member.carried._replace(num_missed=member.recorder.num_missed) for member, _ in turn
                }
                sweep.send(TurnEnded(carried))
    except SweepGone:
        return ExitCode.PREEMPTED
    except BaseException as error:
        stop.at_once = False
        ending = ending_of(error)
        if not ending.expected:
            traceback.print_exc()
        try:
            sweep.send(Ended(ending))
        except OSError:
            print(f"{ending.reason}: {ending.message}", flush=True)
        return ending.exit_code
    return ExitCode.COMPLETED


def cores_of(device: int, num_devices: int, cores: Collection[int]) -> set[int]:
    """A CPU device's own part of `cores`; all of them if there are fewer cores than devices."""
    own = sorted(cores)[device * len(cores) // num_devices : (device + 1) * len(cores) // num_devices]
    return set(own if len(cores) >= num_devices else cores)


def turns(start: Start, stop: StopRequest, sweep: RemoteSweep, parking: Parking, num_cores: int) -> Iterator[Turn]:
    """Yields the turns that the sweep has for this device."""
    members: dict[str, Member] = {}
    jobs = {one.name: one for one in start.job.spec.members}
    plans = {one.name: one for one in start.plan.members}
    while True:
        stop.at_once = True
        if stop.requested:
            raise Preempted("stopped on request; members resume from their checkpoints")
        message = sweep.receive()
        if isinstance(message, Finish):
            return
        for name, _, carried in message.parts:
            if name not in members:
                job = member_job(start.job, jobs[name])
                members[name] = member_of(
                    job, start.plan, plans[name], carried, start.job.spec.compared_by, sweep, num_cores
                )
            members[name].carried = carried
            members[name].recorder.num_missed = carried.num_missed
        parking.held_bytes = message.parked_bytes
        yield [(members[name], until) for name, until, _ in message.parts]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
