"""One attempt of a sweep: members take turns in this process, each training exactly as it would alone.

    turn = attach (model, assembly, states) -> train to a step -> park (states to NVMe) -> all of its memory is free

Members on one frozen base share a turn, as many as the plan attaches together: the base is loaded once in it, and each
of its segments is visited by all of them before the next (shared_base.py, together.py).

A member is an ordinary run with a directory, a run.jsonl, an epoch and checkpoints of its own; between two turns its
states are parked (parking.py). Whose turn it is follows from what all have trained and reported, so a sweep that was
killed goes on as it would have: each member from its own checkpoint, rounds of halving from the sweep's record.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from spillway.api.halving import METRIC_WORDS, Contender, Standing, round_steps, standing
from spillway.api.job_file import JobFile
from spillway.api.members import member_job, member_spec
from spillway.errors import CheckpointCorrupt, ExitCode, NonFinite, Preempted, SpillwayError, UserError
from spillway.metrics import StepMetrics
from spillway.plan import MemberPlan, MemoryPlan, Tier

from .. import config
from ..assemble import FROZEN, Assembly, Base, check_device, initial_states
from ..cgroup import usable_cores, with_usable_threads
from ..checkpoints import tensors as checkpoint
from ..checkpoints.directory import CheckpointNotWritten, Epoch
from ..corpus.data import TokenBatches
from ..corpus.tokens import Corpus, CorpusNotWritten
from ..ending import ending_of
from ..models.build import build_model
from ..models.chain import Chain
from ..optimizer.loss_scale import LossScaler
from ..ranks import ONE_RANK, World
from ..reporting.exporter import Exporter
from ..reporting.progress_client import reporting
from ..reporting.recorder import OutputNotWritten, Recorder, refusals
from ..run_job import (
    RunCheckpoints,
    assembled,
    make_batches,
    on_device,
    operators_environment,
    prepared_corpus,
    report,
    run_of,
    say,
    serve_metrics,
    start_epoch,
    start_of,
)
from ..trainer import LoopSettings, Run, RunProgress, StopRequest, advance, settled_objects
from .parking import Parked, Parking
from .record import MemberFailure, SweepNotWritten, SweepRecord
from .recorder import SweepRecorder
from .shared_base import assemble_on, shared_base
from .together import Trainee, advance_together

OWN_ENDS = (NonFinite, UserError, CheckpointCorrupt)
"""Errors that end only this member. Memory and devices belong to all: a lack of them ends the attempt."""
EVERYONES = (CheckpointNotWritten, CorpusNotWritten, OutputNotWritten, SweepNotWritten)
"""Of these, errors of a disk, which the other members would meet, too."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a member trains on, opened in its first turn."""

    corpus: Corpus
    batches: TokenBatches


@dataclass(slots=True)
class MemberStates:
    """A member between two turns."""

    parked: Parked
    scalars: dict[str, float]


@dataclass(slots=True)
class MemberRun:
    """A member of this attempt: what it keeps from turn to turn."""

    name: str
    job: JobFile
    plan: MemoryPlan
    settings: LoopSettings
    epoch: Epoch
    recorder: Recorder
    loss_scale: LossScaler
    base: str = ""
    """As in MemberPlan."""
    num_attached: int = 1
    """As in MemberPlan."""
    random_state: str | None = None
    """At the end of its last turn."""
    progress: RunProgress = field(default_factory=RunProgress)
    text: Text | None = None
    states: MemberStates | None = None


def contenders(job: JobFile) -> list[Contender]:
    """All members in their order."""
    return [Contender(one.name, member_spec(job.spec, one).training.num_steps) for one in job.spec.members]


def open_sweep_recorder(job: JobFile) -> SweepRecorder:
    """The sweep's own run.jsonl. Raises UserError for an output directory that cannot be had."""
    output = Path(job.output_directory)
    with refusals(output):
        output.mkdir(parents=True, exist_ok=True)
    return SweepRecorder(output / "run.jsonl", contenders(job), job.spec.compared_by)


def run_sweep(
    job: JobFile, plan: MemoryPlan, recorder: SweepRecorder, progress: RunProgress, stop: StopRequest, world: World
) -> str:
    """Train all members to their ends; `progress` counts the steps of all. Every end but that of all members is an
    exception (see ending.py): where every member failed, the first one's error. Returns a sentence about the end."""
    torch.set_num_threads(job.compute_threads)
    check(job, plan, world)
    sweep = Sweep(job, plan, recorder, progress, stop, on_device(plan, 1, world)[1])
    try:
        with settled_objects():  # a turn ends with a collection
            return sweep.run()
    finally:
        sweep.parking.close()


def check(job: JobFile, plan: MemoryPlan, world: World) -> None:
    """Raises UserError for a plan of other members, and for what members cannot have."""
    config.check_world(job, world)
    planned, named = [one.name for one in plan.members], [one.name for one in job.spec.members]
    if planned != named:
        raise UserError(
            f"the plan of {plan.job} has members {', '.join(planned) or 'none'}, the job {', '.join(named)}: plan it "
            "again (spillway plan)"
        )
    if world.size > 1 or plan.strategy != "Ddp":
        raise UserError(
            f"spec.members: members take turns on one device; the plan of {plan.job} has {world.size} ranks, strategy "
            f"{plan.strategy}: write one TrainingJob per model"
        )


class Sweep:
    """The members of one attempt, and what they reported."""

    def __init__(
        self,
        job: JobFile,
        plan: MemoryPlan,
        recorder: SweepRecorder,
        progress: RunProgress,
        stop: StopRequest,
        device: torch.device,
    ) -> None:
        self.device = device
        self.job, self.plan, self.recorder, self.stop, self.progress = job, plan, recorder, stop, progress
        self.objective = job.spec.compared_by
        self.parking = Parking(job, plan)
        self.record = SweepRecord(Path(job.checkpoint_directory), job.epoch, self.objective.metric)
        self.members: dict[str, MemberRun] = {}
        self._contenders = contenders(job)
        self._fresh = checkpoint.random_state()
        """Random state of a new process, in which a solo run builds its model."""
        self._said: set[str] = set()

    def run(self) -> str:
        self._begin()
        exporter = Exporter(self.job.name, 0, self.job.spec.training.num_steps, self.plan, "none")
        serve_metrics(exporter, self.job)
        environment = operators_environment(ONE_RANK)
        with reporting(environment, self.job, self.plan, self.progress.step, report) as client:
            self.recorder.show_sweep(*(sink for sink in (exporter, client) if sink is not None))
            while True:
                now = self._standing()
                self._say(now)
                turn = self._next(now)
                if not turn:
                    return self._end(now)
                if self.stop.requested:
                    raise Preempted("stopped on request between two turns; members resume from their checkpoints")
                self._turn(turn)

    def _begin(self) -> None:
        """Every member's epoch begins with the attempt, which fences earlier writers."""
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
                self._fail(member.name, RunProgress(), error)
                continue
            if opened.progress.step == opened.settings.num_steps:
                self.recorder.member_completed(member.name, opened.progress.step)
            elif opened.progress.step:
                self.recorder.member_parked(member.name, opened.progress.step)
        self._count()

    def _is_mended(self, failure: MemberFailure) -> bool:
        """Perhaps: what was wrong with what the user gave may be right by now. Where rounds were decided without the
        member, it stays out: a decision is never taken back."""
        return failure.exit_code == ExitCode.USER_ERROR and not self.objective.halving

    def _opened(self, job: JobFile, planned: MemberPlan) -> MemberRun:
        output = Path(job.output_directory)
        with refusals(output):
            output.mkdir(parents=True, exist_ok=True)
        plan = member_plan(self.plan, planned)
        own = Recorder(output / "run.jsonl")
        epoch = start_epoch(job)
        rounds = round_steps(self.objective.halving, job.spec.training.num_steps)
        compares = rounds if self.objective.metric == "EvaluationLoss" else ()
        settings = config.loop_settings(job.spec, plan, further_evaluations=compares)
        member = MemberRun(
            planned.name,
            job,
            plan,
            settings,
            epoch,
            own,
            config.loss_scale(job.spec),
            planned.base,
            planned.num_attached,
        )
        own.show(_Reports(self, member), self.recorder.sink(planned.name))
        if epoch.resume.checkpoint is not None:
            member.progress.step = epoch.resume.checkpoint.manifest.state.step
        return member

    # --- whose turn it is ---

    def _standing(self) -> Standing:
        failures = self.record.failures
        all_members = [replace(one, failed=one.name in failures) for one in self._contenders]
        return standing(all_members, self.record.of([one.name for one in all_members]), self.objective)

    def _next(self, now: Standing) -> list[tuple[MemberRun, int]]:
        """Of those that may train on the one with the fewest turns behind it, the first of equals, with those on its
        base that are attached with it; of each the step that its turn ends at: where no other waits for one, it trains
        as far as it may."""
        due = [one for one in self.members.values() if one.progress.step < now.until.get(one.name, 0)]
        if not due:
            return []
        first = min(due, key=self._num_turns)
        beside = [one for one in due if first.base and one.base == first.base and one is not first]
        turn = [first, *sorted(beside, key=self._num_turns)[: first.num_attached - 1]]
        return [
            (one, now.until[one.name] if len(due) == len(turn) else min(now.until[one.name], self._turn_end(one)))
            for one in turn
        ]

    def _num_turns(self, member: MemberRun) -> int:
        return member.progress.step // self.plan.turn_steps

    def _turn_end(self, member: MemberRun) -> int:
        """Turns end at the same steps, wherever an attempt begins."""
        return (self._num_turns(member) + 1) * self.plan.turn_steps

    def _turn(self, turn: Sequence[tuple[MemberRun, int]]) -> None:
        for member, _ in turn:
            self.recorder.member_started(member.name, member.progress.step)
        try:
            (first, until), *others = turn
            if first.base:
                self._train_together(turn)
            else:
                assert not others, "only members on one base share a turn"
                with self._alone(first):
                    self._train(first, until)
        finally:
            gc.collect()  # hooks and modules refer to one another: without it their memory would outlive the turn
            self._count()
        for member, _ in turn:
            if member.name in self.record.failures:
                continue
            if member.progress.step == member.settings.num_steps:
                self._leave(member)
                member.recorder.end(member.progress.step, "Completed", 0, f"trained to step {member.progress.step}")
                self.recorder.member_completed(member.name, member.progress.step)
            else:
                self.recorder.member_parked(member.name, member.progress.step)

    @contextmanager
    def _alone(self, *members: MemberRun) -> Iterator[None]:
        """Inside, what ends these members and no others ends them; all else ends the attempt."""
        try:
            yield
        except OWN_ENDS as error:
            if isinstance(error, EVERYONES):
                raise
            for member in members:
                if member.name not in self.record.failures:
                    self._fail(member.name, member.progress, error)

    def _train(self, member: MemberRun, until: int) -> None:
        model = self._model(member)
        text = member.text = member.text or self._text(member, model)
        with assembled(member.job, member.plan, model, ONE_RANK, self.device) as assembly:
            run = self._attached(member, text, assembly)
            self.stop.wait_for_step()
            advance(run, member.settings, member.progress, self.stop, until)
            member.random_state = checkpoint.random_state()
            if until < member.settings.num_steps:
                self._park(member, assembly)

    def _train_together(self, turn: Sequence[tuple[MemberRun, int]]) -> None:
        """Members on one base, which is there from the first of them on to the end of the turn."""
        models, random_states = dict[str, Chain](), dict[str, Tensor]()
        for member, _ in turn:
            with self._alone(member):
                models[member.name] = self._model(member)
                member.text = member.text or self._text(member, models[member.name])
                random_states[member.name] = torch.get_rng_state()
        there = [(member, until) for member, until in turn if member.name not in self.record.failures]
        if not there:
            return
        first, _ = there[0]
        with (
            self._alone(*(member for member, _ in there)),
            shared_base(first.job, first.plan, models[first.name], self.device) as base,
        ):
            assemblies, trainees = dict[str, Assembly](), dict[str, Trainee]()
            for member, until in there:
                with self._alone(member):
                    torch.set_rng_state(random_states[member.name])
                    assembly = assemblies[member.name] = assemble_on(base, member.job, member.plan, models[member.name])
                    assert member.text is not None, "those without one have failed"
                    run = self._attached(member, member.text, assembly, base)
                    state = torch.get_rng_state()
                    trainees[member.name] = Trainee(run, member.settings, member.progress, until, state)
            self.stop.wait_for_step()
            self._advance(trainees)
            for name, trainee in trainees.items():
                member = self.members[name]
                if trainee.failed:
                    continue
                with trainee.at_its_own():
                    member.random_state = checkpoint.random_state()
                    if trainee.until < member.settings.num_steps:
                        self._park(member, assemblies[name])

    def _advance(self, trainees: Mapping[str, Trainee]) -> None:
        names = {id(trainee): name for name, trainee in trainees.items()}

        @contextmanager
        def alone(trainee: Trainee) -> Iterator[None]:
            name = names[id(trainee)]
            with self._alone(self.members[name]):
                yield
            trainee.failed = name in self.record.failures

        advance_together(list(trainees.values()), self.stop, alone)

    def _model(self, member: MemberRun) -> Chain:
        checkpoint.restore_random_state(self._fresh)  # the model may draw buffers
        model = build_model(member.job.spec, member.job.claims)
        config.check_plan(member.job, member.plan, len(model.segments))
        return model

    def _attached(self, member: MemberRun, text: Text, assembly: Assembly, base: Base | None = None) -> Run:
        """The member with its states, ready to train on."""
        begins = member.states is None and member.epoch.resume.checkpoint is None
        start = start_of(member.job).checkpoint if begins else None
        checkpoints = RunCheckpoints(
            member.job, member.epoch, assembly, text.batches, text.corpus, config.learning_rate(member.job.spec),
            ONE_RANK, member.loss_scale, start, base_is_there=base is not None,
        )  # fmt: skip
        self._attach(member, assembly, checkpoints)
        held, peak = self.parking.held_bytes, self.parking.take_peak_bytes()
        tiers = replace(assembly.tiers, parked_bytes=held, parked_peak_bytes=peak)
        checkpoints = replace(checkpoints, assembly=replace(assembly, tiers=tiers))
        return run_of(member.plan, checkpoints, member.recorder, self.device)

    def _text(self, member: MemberRun, model: Chain) -> Text:
        self.stop.at_once = True  # the build may take long, and there is nothing to save
        corpus = prepared_corpus(member.job, model, ONE_RANK, member.recorder)
        batches = make_batches(member.job, corpus, model.objective)
        say(member.recorder, batches.cut)
        say(member.recorder, batches.evaluated)
        check_device(self.device, model, config.hyperparameters(member.job.spec, model))
        return Text(corpus, batches)

    def _attach(self, member: MemberRun, assembly: Assembly, checkpoints: RunCheckpoints) -> None:
        """Its states: parked, from its checkpoint, or from the seed. And the random state that it left."""
        states, member.states = member.states, None
        if states is None:
            member.recorder.preparing(checkpoints.origin)
            checkpoints.resume(member.progress)
            member.recorder.start(
                job=member.job.name, epoch=member.job.epoch, resumed_from_step=member.progress.step, member=member.name,
                parameters=sum(shape.numel() for shape in assembly.parameter_shapes().values()),
            )  # fmt: skip
            return
        has_frozen = any(not parameter.requires_grad for parameter in assembly.model.parameters())
        if has_frozen and not checkpoints.base_is_there:
            for name, value in initial_states(assembly.model, member.job.spec.training.seed):
                if name.startswith(FROZEN):
                    assembly.load(name, value)
        for name, tensor in self.parking.tensors(states.parked):
            assembly.load(name, tensor)
        assembly.optimizer.load_scalars(states.scalars)
        assert member.random_state is not None, "it has had a turn"
        checkpoint.restore_random_state(member.random_state)
        self.parking.leave(states.parked)

    def _park(self, member: MemberRun, assembly: Assembly) -> None:
        assembly.optimizer.flush()
        parked = self.parking.park(assembly.states(), f"states of member {member.name}")
        member.states = MemberStates(parked, assembly.optimizer.scalars())

    def _leave(self, member: MemberRun) -> None:
        states, member.states = member.states, None
        if states is not None:
            self.parking.leave(states.parked)

    # --- what is reported ---

    def reported(self, member: MemberRun, step: int, value: float) -> None:
        """Durable before the checkpoint of that step."""
        if self.record.values.get((member.name, step)) == value:
            return
        self.record.values[member.name, step] = value
        self.record.write()

    def _say(self, now: Standing) -> None:
        """Rounds that were decided, and the best."""
        for stop in now.stops:
            member = self.members.get(stop.member)
            if stop.member in self._said or member is None:
                continue
            self._said.add(stop.member)
            self._leave(member)
            self.recorder.member_stopped(stop)
            member.recorder.end(stop.step, "Stopped", 0, stop.reason)
        if now.best:
            self.recorder.best(now.best)

    def _fail(self, name: str, progress: RunProgress, error: SpillwayError) -> None:
        ending = ending_of(error)
        report(f"member {name} ended alone: {ending.reason}: {ending.message}")
        member = self.members.get(name)
        if member is not None:
            self._leave(member)
            member.recorder.end(progress.step, ending.reason, ending.exit_code, ending.message)
        self.record.failures[name] = MemberFailure(progress.step, ending.exit_code, ending.message)
        self.record.write()
        self.recorder.member_failed(name, progress.step, f"{ending.reason}: {ending.message}")

    def _count(self) -> None:
        self.progress.step = sum(one.progress.step for one in self.members.values())

    def _end(self, now: Standing) -> str:
        """Raises the first member's error where all failed."""
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
                f"members {', '.join(waiting)} wait for a round of halving that another member has trained past, and "
                f"{self.record.directory} has no {METRIC_WORDS[self.objective.metric]} of it: put its sweep-*.json "
                "back, or spec.objective as it was when they trained, or train the sweep in another directory"
            )
        num_complete = num_members - len(failures) - len(now.stops)
        stopped = f", {len(now.stops)} stopped" if now.stops else ""
        failed = "".join(f"; {name} failed: {one.message}" for name, one in failures.items())
        return f"{num_complete} of {num_members} members complete{stopped}{failed}"


def _error_of(name: str, failure: MemberFailure, num_members: int) -> SpillwayError:
    error = SpillwayError(f"all {num_members} members failed, first {name}: {failure.message}", member=name)
    error.exit_code = ExitCode(failure.exit_code)
    return error


def member_plan(plan: MemoryPlan, member: MemberPlan) -> MemoryPlan:
    """The member's plan, never beyond the budget that the whole sweep has here, with the threads that are here."""
    budget = {tier: min(member.plan.budget[tier], plan.budget[tier]) for tier in Tier}
    return with_usable_threads(member.plan.model_copy(update={"budget": budget}), usable_cores(Path("/")), 1)


@dataclass(slots=True)
class _Reports:
    """A sink of a member's own Recorder: what the objective compares goes to the sweep's record."""

    sweep: Sweep
    member: MemberRun
    step_number: int = 0

    def step(self, step: StepMetrics) -> None:
        self.step_number = step.step
        objective, num_steps = self.sweep.objective, self.member.settings.num_steps
        compared = step.step == num_steps or step.step in round_steps(objective.halving, num_steps)
        if objective.metric == "Loss" and compared:
            self.sweep.reported(self.member, step.step, step.loss)

    def evaluation(self, loss: float) -> None:
        if self.sweep.objective.metric == "EvaluationLoss":
            self.sweep.reported(self.member, self.step_number, loss)

    def checkpoint(self, step: int) -> None:
        """Nothing: it was durable before."""
