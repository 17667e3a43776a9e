"""Trains members on one device, a turn at a time: in the process of the sweep, or in the device's own (workers.py).

    turn = attach (model, assembly, states) -> train to a step -> park (states to NVMe) -> all of its memory is free

Members on one frozen base share a turn, as many as the plan attaches together: the base is loaded once per turn, and
all of them visit a segment before any visits the next (shared_base.py, together.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.api.pod import Objective
from spillway.api.sweep.halving import round_steps
from spillway.errors import CheckpointCorrupt, NonFinite, SpillwayError, UserError
from spillway.metrics import StepMetrics
from spillway.plan import MemberPlan, MemoryPlan, Tier

from .. import config
from ..assemble import FROZEN, Assembly, Base, check_device, initial_states
from ..cgroup import with_usable_threads
from ..checkpoints import tensors as checkpoint
from ..checkpoints.directory import CheckpointNotWritten, Epoch
from ..corpus.data import TokenBatches
from ..corpus.tokens import Corpus, CorpusNotWritten
from ..models.build import build_model
from ..models.chain import Chain
from ..optimizer.loss_scale import LossScaler
from ..ranks import ONE_RANK
from ..reporting.recorder import OutputNotWritten, Recorder, Sink
from ..run_job import RunCheckpoints, assembled, make_batches, prepared_corpus, run_of, say, start_of
from ..trainer import LoopSettings, Run, RunProgress, StopRequest, advance
from .parking import Parked, Parking
from .record import SweepNotWritten
from .shared_base import assemble_on, shared_base
from .together import Trainee, advance_together

OWN_ENDS = (NonFinite, UserError, CheckpointCorrupt)
"""Errors that end only the member that meets them. Memory and devices belong to all: a lack of them ends the
attempt."""
EVERYONES = (CheckpointNotWritten, CorpusNotWritten, OutputNotWritten, SweepNotWritten)
"""Those of `OWN_ENDS` that are errors of a disk, which the other members would meet, too."""


class Witness(Protocol):
    """Is told what happens to members while they train."""

    def sink(self, member: str) -> Sink:
        """The sink of the member's steps, evaluations and checkpoints."""

    def reported(self, member: str, step: int, value: float) -> None:
        """Called with a value that the objective compares. The value is durable on return, before the checkpoint of
        that step."""

    def failed(self, member: str, step: int, error: SpillwayError) -> None:
        """Called when `error` ends the member without ending the others."""


@dataclass(frozen=True, slots=True)
class Text:
    """The data that a member trains on, opened in its first turn."""

    corpus: Corpus
    batches: TokenBatches


@dataclass(slots=True)
class MemberStates:
    """The states of a member between two turns."""

    parked: Parked
    scalars: dict[str, float]


class Carried(NamedTuple):
    """All that a member takes from turn to turn, to whichever device has the next one."""

    progress: RunProgress
    epoch: Epoch
    loss_scale: LossScaler
    states: MemberStates | None = None
    """None: it has had no turn yet, or needs no further one."""
    random_state: str | None = None
    """torch's random state at the end of its last turn."""
    num_missed: int = 0
    """As Recorder.num_missed."""


@dataclass(slots=True)
class Member:
    """A member of this attempt."""

    name: str
    job: JobFile
    plan: MemoryPlan
    settings: LoopSettings
    recorder: Recorder
    carried: Carried
    base: str = ""
    """As in MemberPlan."""
    num_attached: int = 1
    """As in MemberPlan."""
    text: Text | None = None
    failed: bool = False
    """Whether it has ended, without ending the others."""

    @property
    def progress(self) -> RunProgress:
        return self.carried.progress


Turn = Sequence[tuple[Member, int]]
"""Members that train together, and the step that each trains up to."""


def member_of(
    job: JobFile,
    plan: MemoryPlan,
    planned: MemberPlan,
    carried: Carried,
    objective: Objective,
    witness: Witness,
    num_cores: int,
) -> Member:
    """`job`: the member's own. `plan` and `objective`: the sweep's. `num_cores`: the cores that a device may use."""
    budget = {tier: min(planned.plan.budget[tier], plan.budget[tier]) for tier in Tier}
    own = with_usable_threads(planned.plan.model_copy(update={"budget": budget}), num_cores, 1)
    rounds = round_steps(objective.halving, job.spec.training.num_steps)
    compares = rounds if objective.metric == "EvaluationLoss" else ()
    settings = config.loop_settings(job.spec, own, further_evaluations=compares)
    recorder = Recorder(Path(job.output_directory) / "run.jsonl")
    recorder.show(_Reports(witness, planned.name, objective, settings.num_steps, rounds), witness.sink(planned.name))
    return Member(planned.name, job, own, settings, recorder, carried, planned.base, planned.num_attached)


@dataclass(slots=True)
class _Reports:
    """A sink of a member's own Recorder: passes what the objective compares to the witness."""

    witness: Witness
    member: str
    objective: Objective
    num_steps: int
    rounds: Sequence[int]
    step_number: int = 0

    def step(self, step: StepMetrics) -> None:
        self.step_number = step.step
        if self.objective.metric == "Loss" and (step.step == self.num_steps or step.step in self.rounds):
            self.witness.reported(self.member, step.step, step.loss)

    def evaluation(self, loss: float) -> None:
        if self.objective.metric == "EvaluationLoss":
            self.witness.reported(self.member, self.step_number, loss)

    def checkpoint(self, step: int) -> None:
        """Nothing to do: the reported value was durable before."""


class Device:
    """Trains members on one device."""

    def __init__(
        self, device: torch.device, parking: Parking, stop: StopRequest, witness: Witness, num_devices: int = 1
    ) -> None:
        self.device, self.parking, self._num_devices = device, parking, num_devices
        self._stop, self._witness = stop, witness

    def train(self, turn: Turn) -> None:
        """Trains each to its step, and parks those with steps left. A member that ends alone gets `failed`; an error
        that ends all is raised."""
        try:
            (first, until), *others = turn
            if first.base:
                self._train_together(turn)
            else:
                assert not others, "only members on one base share a turn"
                with self._alone(first):
                    self._train(first, until)
        finally:
            gc.collect()  # hooks and modules refer to one another: uncollected, their memory would outlive the turn

    @contextmanager
    def _alone(self, *members: Member) -> Iterator[None]:
        """Inside, an error that ends only these members fails them; any other error ends the attempt."""
        try:
            yield
        except OWN_ENDS as error:
            if isinstance(error, EVERYONES):
                raise
            for member in members:
                if not member.failed:
                    self.leave(member)
                    member.failed = True
                    self._witness.failed(member.name, member.progress.step, error)

    def leave(self, member: Member) -> None:
        """Called when the member no longer needs what it has parked."""
        if member.carried.states is not None:
            self.parking.leave(member.carried.states.parked)
            member.carried = member.carried._replace(states=None)

    def _train(self, member: Member, until: int) -> None:
        model = self._model(member)
        text = member.text = member.text or self._text(member, model)
        with assembled(member.job, member.plan, model, ONE_RANK, self.device) as assembly:
            run = self._attached(member, text, assembly)
            self._stop.wait_for_step()
            advance(run, member.settings, member.progress, self._stop, until)
            self._end_turn(member, until, assembly)

    def _train_together(self, turn: Turn) -> None:
        """Trains members on one base, which exists from the first member to the end of the turn."""
        models, random_states = dict[str, Chain](), dict[str, Tensor]()
        for member, _ in turn:
            with self._alone(member):
                models[member.name] = self._model(member)
                member.text = member.text or self._text(member, models[member.name])
                random_states[member.name] = torch.get_rng_state()
        there = [(member, until) for member, until in turn if not member.failed]
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
            self._stop.wait_for_step()
            members = {member.name: member for member, _ in there}
            self._advance(trainees, members)
            for name, trainee in trainees.items():
                member = members[name]
                if trainee.failed:
                    continue
                with trainee.at_its_own():
                    self._end_turn(member, trainee.until, assemblies[name])

    def _advance(self, trainees: Mapping[str, Trainee], members: Mapping[str, Member]) -> None:
        of_trainee = {id(trainee): members[name] for name, trainee in trainees.items()}

        @contextmanager
        def alone(trainee: Trainee) -> Iterator[None]:
            member = of_trainee[id(trainee)]
            with self._alone(member):
                yield
            trainee.failed = member.failed

        advance_together(list(trainees.values()), self._stop, alone)

    def _model(self, member: Member) -> Chain:
        model = build_model(member.job.spec, member.job.claims)
        config.check_plan(member.job, member.plan, len(model.segments))
        return model

    def _attached(self, member: Member, text: Text, assembly: Assembly, base: Base | None = None) -> Run:
        """The member's run with its states, ready to continue training."""
        begins = member.carried.states is None and member.carried.epoch.resume.checkpoint is None
        start = start_of(member.job).checkpoint if begins else None
        checkpoints = RunCheckpoints(
            member.job, member.carried.epoch, assembly, text.batches, text.corpus,
            config.learning_rate(member.job.spec), ONE_RANK, member.carried.loss_scale, start,
            base_is_there=base is not None,
        )  # fmt: skip
        self._attach(member, assembly, checkpoints)
        # As in the plan, each device counts its part of what all members have parked.
        held, peak = (n // self._num_devices for n in (self.parking.held_bytes, self.parking.take_peak_bytes()))
        tiers = replace(assembly.tiers, parked_bytes=held, parked_peak_bytes=peak)
        checkpoints = replace(checkpoints, assembly=replace(assembly, tiers=tiers))
        return run_of(member.plan, checkpoints, member.recorder, self.device)

    def _text(self, member: Member, model: Chain) -> Text:
        self._stop.at_once = True  # the build may take long, and there is nothing to save
        with self.parking.alone():  # two devices must not build the same corpus
            corpus = prepared_corpus(member.job, model, ONE_RANK, member.recorder)
        batches = make_batches(member.job, corpus, model.objective)
        for line in batches.said:
            say(member.recorder, line)
        say(member.recorder, batches.evaluated)
        check_device(self.device, model, config.hyperparameters(member.job.spec, model))
        return Text(corpus, batches)

    def _attach(self, member: Member, assembly: Assembly, checkpoints: RunCheckpoints) -> None:
        """Loads the member's states: parked ones, or from its checkpoint, or from the seed. Also restores its random
        state."""
        states, random_state = member.carried.states, member.carried.random_state
        if states is None:
            member.recorder.preparing(checkpoints.origin)
            checkpoints.resume(member.progress)
            member.recorder.start(
                job=member.job.name, epoch=member.job.epoch, resumed_from_step=member.progress.step, member=member.name,
                parameters=sum(shape.numel() for shape in assembly.parameter_shapes().values()),
            )  # fmt: skip
            return
        if assembly.has_frozen and not checkpoints.base_is_there:
            for name, value in initial_states(assembly.model, member.job.spec.training.seed):
                if name.startswith(FROZEN):
                    assembly.load(name, value)
        for name, tensor in self.parking.tensors(states.parked):
            assembly.load(name, tensor)
        assembly.optimizer.load_scalars(states.scalars)
        assert random_state is not None, "it has had a turn"
        checkpoint.restore_random_state(random_state)
        self.leave(member)

    def _end_turn(self, member: Member, until: int, assembly: Assembly) -> None:
        states = None
        if until < member.settings.num_steps:
            assembly.optimizer.flush()
            parked = self.parking.park(member.name, assembly.states())
            states = MemberStates(parked, assembly.optimizer.scalars())
        member.carried = member.carried._replace(states=states, random_state=checkpoint.random_state())
