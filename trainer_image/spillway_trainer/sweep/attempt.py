"""One attempt of a sweep: members take turns on its devices, each training exactly as it would alone.

    whose turn it is (here) -> a turn on a device (turn.py), in this process or in one of the device's own (workers.py)

A member is an ordinary run with a directory, a run.jsonl, an epoch and checkpoints of its own; between two turns its
states are parked (parking.py). Whose turn it is follows from what all members have trained and reported, so a sweep
that was killed continues as it would have: each member from its own checkpoint, rounds of halving from the sweep's
record. On several devices the order of turns also depends on time; what a member computes does not.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from spillway.api.job_file import JobFile
from spillway.api.sweep.halving import METRIC_WORDS, Contender, Standing, standing
from spillway.api.sweep.members import member_job, member_spec
from spillway.errors import ExitCode, Preempted, SpillwayError, UserError
from spillway.plan import PLAN_AGAIN, MemberPlan, MemoryPlan

from .. import config
from ..cgroup import usable_cores
from ..ending import ending_of
from ..kernels import half_products
from ..ranks import ONE_RANK, World
from ..reporting.exporter import Exporter
from ..reporting.progress_client import reporting
from ..reporting.recorder import Sink, rejections
from ..run_job import on_device, operators_environment, report, serve_metrics, start_epoch
from ..trainer import RunProgress, StopRequest, settled_objects
from .parking import Parking
from .record import MemberFailure, SweepRecord
from .recorder import SweepRecorder
from .turn import EVERYONES, OWN_ENDS, Carried, Device, Member, Turn, member_of
from .workers import Devices, Here, Workers


def contenders(job: JobFile) -> list[Contender]:
    """All members, in the order of the list."""
    return [Contender(one.name, member_spec(job.spec, one).training.num_steps) for one in job.spec.members]


def open_sweep_recorder(job: JobFile) -> SweepRecorder:
    """The recorder of the sweep's own run.jsonl. Raises UserError if the output directory cannot be created."""
    output = Path(job.output_directory)
    with rejections(output):
        output.mkdir(parents=True, exist_ok=True)
    return SweepRecorder(output / "run.jsonl", contenders(job), job.spec.compared_by)


def run_sweep(
    job: JobFile, plan: MemoryPlan, recorder: SweepRecorder, progress: RunProgress, stop: StopRequest, world: World
) -> str:
    """Trains all members to their ends and returns a sentence about the end; `progress` counts the steps of all. Any
    other end of the attempt is an exception (see ending.py): if every member failed, the error of the first one."""
    half_products.fix_products(job.compute_threads)
    check(job, plan, world)
    sweep = Sweep(job, plan, recorder, progress, stop)
    with ExitStack() as opened:
        opened.callback(sweep.count)
        if plan.member_devices > 1:
            sweep.devices = Workers(job, plan, sweep, stop)
        else:
            sweep.devices = Here(Device(on_device(plan, 1, world)[1], Parking(job, plan), stop, sweep))
            opened.enter_context(settled_objects())  # each turn ends with a garbage collection
        return sweep.run()


def check(job: JobFile, plan: MemoryPlan, world: World) -> None:
    """Raises UserError if the plan is for other members, or asks for what members do not support."""
    config.check_world(job, world)
    planned, named = [one.name for one in plan.members], [one.name for one in job.spec.members]
    if planned != named:
        raise UserError(
            f"spec.members: the plan of {plan.job} is for the members {', '.join(planned) or 'none'}, but the job has "
            f"{', '.join(named)}; {PLAN_AGAIN}"
        )
    if plan.strategy != "Ddp":
        raise UserError(
            f"spec.members: each member trains on one device with strategy Ddp, but the plan of {plan.job} has "
            f"strategy {plan.strategy}; {PLAN_AGAIN}"
        )


class Sweep:
    """The members of one attempt, and what they reported."""

    devices: Devices

    def __init__(
        self, job: JobFile, plan: MemoryPlan, recorder: SweepRecorder, progress: RunProgress, stop: StopRequest
    ) -> None:
        self.job, self.plan, self.recorder, self.stop, self.progress = job, plan, recorder, stop, progress
        self.objective = job.spec.compared_by
        self.record = SweepRecord(Path(job.checkpoint_directory), job.epoch, self.objective.metric)
        self.members: dict[str, Member] = {}
        self._contenders = contenders(job)
        self._training: dict[int, Turn] = {}
        """Turns in progress, by device."""
        self._said: set[str] = set()

    def run(self) -> str:
        self._begin()
        exporter = Exporter(
            self.job,
            0,
            self.plan,
            "none",
            missed_checkpoints=lambda: sum(one.recorder.num_missed for one in self.members.values()),
        )
        serve_metrics(exporter, self.job)
        environment = operators_environment(ONE_RANK)
        with reporting(environment, self.job, self.plan, self.progress.step, report) as client, self.devices:
            self.recorder.show_sweep(*(sink for sink in (exporter, client) if sink is not None))
            while True:
                now = self._standing()
                self._say(now)
                if not self._training and not self._next(now):
                    return self._end(now)
                if self.stop.requested:
                    raise Preempted("stopped on request; members resume from their checkpoints")
                while (device := self._free_device()) is not None and (turn := self._next(now)):
                    self._start(turn, device)
                for device in self.devices.ended():
                    self._ended(self._training.pop(device))

    def _begin(self) -> None:
        """Begins every member's epoch with the attempt, which fences earlier writers."""
        self.recorder.sweep(self.job.epoch)
        self.record = SweepRecord.read(self.record.directory, self.job.epoch, self.objective.metric)
        named = {one.name for one in self.job.spec.members}  # members may join and leave between attempts
        self.record.failures = {
            name: one for name, one in self.record.failures.items() if name in named and not self._is_mended(one)
        }
        self.recorder.known(self.record.of(named))
        for member, planned in zip(self.job.spec.members, self.plan.members, strict=True):
            failure = self.record.failures.get(member.name)
            if failure is not None:
                self.recorder.member_failed(member.name, failure.step, failure.message)
                continue
            try:
                opened = self.members[member.name] = self._opened(member_job(self.job, member), planned)
            except OWN_ENDS as error:
                if isinstance(error, EVERYONES):
                    raise
                self.failed(member.name, 0, error)
                continue
            if opened.progress.step == opened.settings.num_steps:
                self._completed(opened)
            elif opened.progress.step:
                self.recorder.member_parked(member.name, opened.progress.step)
        self.count()

    def _is_mended(self, failure: MemberFailure) -> bool:
        """Whether the member may try again: what was wrong with the user's input may be right by now. With halving it
        stays out, because rounds may have been decided without it, and a decision is never taken back."""
        return failure.exit_code == ExitCode.USER_ERROR and not self.objective.halving

    def _opened(self, job: JobFile, planned: MemberPlan) -> Member:
        output = Path(job.output_directory)
        with rejections(output):
            output.mkdir(parents=True, exist_ok=True)
        carried = Carried(RunProgress(), start_epoch(job), config.loss_scale(job.spec))
        if carried.epoch.resume.checkpoint is not None:
            carried.progress.step = carried.epoch.resume.checkpoint.manifest.state.step
        return member_of(job, self.plan, planned, carried, self.objective, self, usable_cores(Path("/")))

    # --- whose turn it is ---

    def _standing(self) -> Standing:
        failures = self.record.failures
        all_members = [replace(one, failed=one.name in failures) for one in self._contenders]
        return standing(all_members, self.record.of([one.name for one in all_members]), self.objective)

    @property
    def _in_turns(self) -> set[str]:
        """Names of the members that devices train now."""
        return {member.name for turn in self._training.values() for member, _ in turn}

    def _free_device(self) -> int | None:
        return next((device for device in range(self.plan.member_devices) if device not in self._training), None)

    def _next(self, now: Standing) -> Turn:
        """The next turn, empty if there is none: of the members that may continue, the first in the order of turns,
        with those on its base that are attached with it; and for each the step at which its turn ends. If no other
        member waits for a turn, each trains as far as it may."""
        due = [
            one
            for one in self.members.values()
            if one.name not in self._in_turns and one.progress.step < now.until.get(one.name, 0)
        ]
        if not due:
            return []

        def order(member: Member) -> float:
            """Fewest turns first, so that every member reports early; on several devices the longest remaining time
            first, so that no device is left with a long member at the end."""
            if self.plan.member_devices == 1:
                return self._num_turns(member)
            return (member.progress.step - now.until[member.name]) * member.plan.prediction.step_seconds

        first = min(due, key=order)
        beside = [one for one in due if first.base and one.base == first.base and one is not first]
        turn = [first, *sorted(beside, key=order)[: first.num_attached - 1]]
        num_free = self.plan.member_devices - len(self._training)
        waits = len(due) > num_free * len(turn)
        return [(one, min(now.until[one.name], self._turn_end(one)) if waits else now.until[one.name]) for one in turn]

    def _num_turns(self, member: Member) -> int:
        return member.progress.step // self.plan.turn_steps

    def _turn_end(self, member: Member) -> int:
        """The step at which the member's turn ends: the same steps, wherever an attempt begins."""
        return (self._num_turns(member) + 1) * self.plan.turn_steps

    def _start(self, turn: Turn, device: int) -> None:
        self._training[device] = turn
        for member, _ in turn:
            self.recorder.member_started(member.name, member.progress.step, device)
        self.devices.start(device, turn)

    def _ended(self, turn: Turn) -> None:
        self.count()
        for member, _ in turn:
            if member.failed:
                continue
            if member.progress.step == member.settings.num_steps:
                self._completed(member)
            else:
                self.recorder.member_parked(member.name, member.progress.step)

    def _completed(self, member: Member) -> None:
        """Records the member's end once; a later attempt does, if this one was killed after the member's last
        checkpoint."""
        step = member.progress.step
        if not member.recorder.has_ended:
            member.recorder.end(step, "Completed", 0, f"trained to step {step}")
        self.recorder.member_completed(member.name, step)

    # --- what is reported ---

    def sink(self, member: str) -> Sink:
        return self.recorder.sink(member)

    def reported(self, member: str, step: int, value: float) -> None:
        """Records what the objective compares, durably, before the checkpoint of that step is written."""
        if self.record.values.get((member, step)) == value:
            return
        self.record.values[member, step] = value
        self.record.write()

    def _say(self, now: Standing) -> None:
        """Reports the members that rounds have stopped, and the best member."""
        for stop in now.stops:
            member = self.members.get(stop.member)
            if stop.member in self._said | self._in_turns or member is None:
                continue
            self._said.add(stop.member)
            self.devices.leave(member)
            self.recorder.member_stopped(stop)
            if not member.recorder.has_ended:  # an earlier attempt may have recorded it
                member.recorder.end(stop.step, "Stopped", 0, stop.reason)
        if now.best:
            self.recorder.best(now.best)

    def failed(self, name: str, step: int, error: SpillwayError) -> None:
        """Records that `error` ended this member and no other."""
        ending = ending_of(error)
        report(f"member {name} failed, other members continue: {ending.reason}: {ending.message}")
        if name in self.members:
            self.members[name].failed = True
            self.members[name].recorder.end(step, ending.reason, ending.exit_code, ending.message)
        self.record.failures[name] = MemberFailure(step, ending.exit_code, ending.message)
        self.record.write()
        self.recorder.member_failed(name, step, f"{ending.reason}: {ending.message}")

    def count(self) -> None:
        self.progress.step = sum(one.progress.step for one in self.members.values())

    def _end(self, now: Standing) -> str:
        """A sentence about the end. Raises the first member's error if all failed, and UserError if members wait for a
        value that is missing from the record."""
        failures, num_members = self.record.failures, len(self.job.spec.members)
        if len(failures) == num_members:
            name = next(one.name for one in self.job.spec.members if one.name in failures)
            raise _error_of(name, failures[name], num_members)
        waiting = [
            one.name
            for one in self.members.values()
            if one.name in now.until and one.progress.step < one.settings.num_steps
        ]
        if waiting:
            raise UserError(
                f"members {', '.join(waiting)} wait for the end of a round of successive halving, but the "
                f"{METRIC_WORDS[self.objective.metric]} that another member reported in this round is missing from "
                f"{self.record.directory}. Restore the sweep-*.json files there, restore the earlier spec.objective, "
                "or train the sweep in another directory"
            )
        num_complete = num_members - len(failures) - len(now.stops)
        stopped = f", {len(now.stops)} stopped" if now.stops else ""
        failed = "".join(f"; {name} failed: {one.message}" for name, one in failures.items())
        return f"{num_complete} of {num_members} members complete{stopped}{failed}"


def _error_of(name: str, failure: MemberFailure, num_members: int) -> SpillwayError:
    error = SpillwayError(f"all {num_members} members failed; the first, {name}: {failure.message}", member=name)
    error.exit_code = ExitCode(failure.exit_code)
    return error
