"""The step loop. It knows no technique; what a plan changes is hidden behind the values of `Run`."""

from __future__ import annotations

import gc
import math
import signal
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from spillway.errors import NonFinite, Preempted
from spillway.metrics import Phase, StepMetrics

from .checkpoints.directory import CheckpointNotWritten
from .checkpoints.manifest import NO_EVALUATION, BestEvaluation
from .corpus.data import Batch, TokenBatches
from .optimizer.loss_scale import LossScaler, float16_operations
from .optimizer.plain import StepOptimizer
from .optimizer.schedule import LearningRate
from .ranks import NO_EXCHANGE, ONE_RANK, Exchange, Ranks, World, dealt
from .reporting.recorder import Recorder
from .segments import Position

CPU = torch.device("cpu")
Counter = TypeVar("Counter", int, float)
STEP_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EXCHANGE, Phase.OPTIMIZER, Phase.WAIT)


class Techniques(Protocol):
    """The step loop's calls into a plan's techniques; assemble.py combines them."""

    def start_backward(self) -> None: ...

    def end_step(self) -> None: ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes held now, per tier."""

    def peak_bytes(self) -> dict[str, int]:
        """Highest bytes held since the last call, per tier."""

    def allocator_retries(self) -> int:
        """Retries of the device's allocator since the last call."""

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved since the process started, per link."""

    def waited_seconds(self) -> float:
        """Seconds that compute waited for copies and I/O since the process started."""

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each lane worked since the process started."""


class Checkpoints(Protocol):
    """Commits the run's state; run_job.RunCheckpoints implements it."""

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        """Write and commit a checkpoint of `progress`. `behind`: training may continue while it is written, if the plan
        has memory for a copy; the result is then None, and `written` returns it later."""

    def written(self, *, wait: bool) -> Written | None:
        """Returns the checkpoint that was written while training continued, once. None if there is none, or (unless
        `wait`) if it is not complete yet."""


class Written(NamedTuple):
    """A checkpoint that is committed, or that the disk rejected."""

    step: int
    nbytes: int = 0
    seconds: float = 0.0
    """From the start of the commit to the end of pruning."""
    stalled_seconds: float = 0.0
    """How long training stopped for it: for all of `seconds`, or only for the copy and for waiting until it was
    written."""
    missed: CheckpointNotWritten | None = None


@dataclass(slots=True)
class RunProgress:
    """Progress of the run: everything that resume needs in addition to the tensors."""

    step: int = 0
    """Optimizer steps completed."""
    samples: int = 0
    """Sequences consumed."""
    best: BestEvaluation = NO_EVALUATION
    """Kept only if early stopping or checkpoints need it."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The settings that the loop takes from the manifest and the plan."""

    num_steps: int
    micro_batch_size: int
    num_micro_batches: int
    """Per rank."""
    gradient_clipping: float | None
    """Largest gradient norm; None: no clipping."""
    skip_non_finite: bool
    """Whether a step that is not finite is skipped (nonFinite: SkipStep) instead of ending the run."""
    checkpoint_every: int
    evaluate_every: int
    """0: never."""
    further_evaluations: Collection[int] = ()
    """Additional steps after which to evaluate, because members of a sweep are compared there."""
    patience: int | None = None
    """Training.patience"""
    min_delta: float = 0.0
    """By how much a loss must be lower, at least, to be an improvement."""
    keeps_best: bool = False
    """Whether a checkpoint follows each evaluation whose loss is the lowest so far."""

    def evaluates_after(self, step: int) -> bool:
        regular = self.evaluate_every and (step == self.num_steps or step % self.evaluate_every == 0)
        return bool(regular) or step in self.further_evaluations


TimedPhase = Callable[[Phase], AbstractContextManager[None]]


class MicroBatchOrder(Protocol):
    """The order in which the micro-batches of a step run. No result depends on it."""

    def __call__(self, run: Run, phase: TimedPhase, micro_batches: Mapping[int, Batch], num_tokens: int) -> Passes:
        """Runs forward and backward of each micro-batch, by number; hooks pass gradients to the optimizer. Yields where
        another model on the same frozen base may run, and returns the losses."""


Passes = Generator[None, None, list[float]]


def in_order(
    run: Run,
    phase: TimedPhase,
    micro_batches: Mapping[int, Batch],
    num_tokens: int,
    exchange: Callable[[], None] | None = None,
) -> Passes:
    """Runs one micro-batch after another through the whole model; `exchange` ends each of them."""
    yield from ()
    losses = list[Tensor]()
    for run.position.micro_batch, batch in micro_batches.items():
        with phase(Phase.FORWARD):
            loss: Tensor = run.model(*batch.given(num_tokens))
        with phase(Phase.BACKWARD):
            run.techniques.start_backward()
            run.loss_scale.scaled(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        del loss
        if exchange is not None:
            with phase(Phase.EXCHANGE):
                exchange()
    with phase(Phase.BACKWARD):
        return read(losses)


def read(losses: Sequence[Tensor]) -> list[float]:
    """Returns the values of scalars; on a CUDA device, the host waits for all of them at once."""
    return torch.stack(list(losses)).tolist() if losses else []


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the loop drives (run_job.run_of)."""

    model: nn.Module
    optimizer: StepOptimizer
    techniques: Techniques
    position: Position
    batches: TokenBatches
    learning_rate: LearningRate
    checkpoints: Checkpoints
    recorder: Recorder
    ranks: Ranks = ONE_RANK
    sum_gradients: Exchange = NO_EXCHANGE
    order: MicroBatchOrder = in_order
    device: torch.device = CPU
    """Where forward runs."""
    loss_scale: LossScaler = field(default_factory=LossScaler)
    runs_together: bool = False
    """Whether a forward gathers parameters from all ranks, so that all must run the same number of forwards."""


class StopRequest:
    """SIGTERM asks for a checkpoint at the next step boundary. Before training there is nothing to save, so it ends the
    attempt at once, even while a corpus is being built.

    With several ranks, a request to one is a request to all: it is sent with the losses, and ranks ask for it again
    after work that may take longer than a step, so that all stop after the same step.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = True
        """Whether a request raises Preempted at once, wherever the main thread is."""

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)

    def wait_for_step(self) -> None:
        """From now on a request waits for the end of a step."""
        self.at_once = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self.at_once:
            raise Preempted("stopped on request before training resumed")


class Stopwatch:
    """Seconds per phase of one step. Time that compute waited for copies and I/O counts as `wait`, in whatever phase it
    fell, so that the phases add up to the step."""

    def __init__(self, waited_seconds: Callable[[], float]) -> None:
        self._waited_seconds = waited_seconds
        self.seconds: dict[str, float] = {phase.value: 0.0 for phase in STEP_PHASES}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        started, waited_before = time.perf_counter(), self._waited_seconds()
        yield
        waited = self._waited_seconds() - waited_before
        self.seconds[Phase.WAIT] += waited
        self.seconds[phase] += time.perf_counter() - started - waited


@contextmanager
def settled_objects() -> Iterator[None]:
    """Inside, the garbage collector ignores all objects that exist now: one collection takes 5 ms instead of 95."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train(run: Run, settings: LoopSettings, progress: RunProgress, stop: StopRequest) -> None:
    """Train from `progress` to the last step; `progress` is kept current.

    Raises Preempted after committing a checkpoint if `stop` was requested, and NonFinite if the policy says so.
    """
    stop.wait_for_step()
    try:
        advance(run, settings, progress, stop, settings.num_steps)
    finally:  # a run that ends early must not lose the checkpoint that is being written
        record(run, run.checkpoints.written(wait=True))


def advance(run: Run, settings: LoopSettings, progress: RunProgress, stop: StopRequest, until: int) -> None:
    """Like `train`, but only to the end of step `until`: the run can continue from there, in another turn of its
    model."""
    while progress.step < until and not progress.best.stops(settings.patience):
        metrics, stopping = train_step(run, settings, progress, stop)
        if after_step(run, settings, progress, stop, metrics, stopping=stopping):
            step = progress.step
            raise Preempted(f"stopped on request at step {step}; the checkpoint of this step is saved", savedStep=step)


def after_step(
    run: Run, settings: LoopSettings, progress: RunProgress, stop: StopRequest, metrics: StepMetrics, *, stopping: bool
) -> bool:
    """Does what follows a step: records it, evaluates, commits a checkpoint. Returns whether the run is asked to stop
    before its last step; its checkpoint is then committed."""
    run.recorder.step(metrics)
    if settings.evaluates_after(progress.step):
        evaluate(run, settings, progress)
        stopping = any_asked_to_stop(run, stop)
    last = progress.step == settings.num_steps or progress.best.stops(settings.patience)
    ends = last or stopping
    is_best = settings.keeps_best and progress.best.step == progress.step
    due = ends or is_best or progress.step % settings.checkpoint_every == 0
    record(run, run.checkpoints.written(wait=due))
    if due and commit(run, progress, behind=not ends) and not ends and any_asked_to_stop(run, stop):
        stopping = record(run, run.checkpoints.written(wait=True))
    return stopping and not last


def any_asked_to_stop(run: Run, stop: StopRequest) -> bool:
    """Whether any rank was asked to stop; the same on all ranks."""
    return any(asked for (asked,) in run.ranks.gather([float(stop.requested)]))


def commit(run: Run, progress: RunProgress, *, behind: bool) -> bool:
    """Returns whether the checkpoint is committed or being written. Raises CheckpointNotWritten unless training may
    continue without it."""
    run.optimizer.flush()  # on every rank, although only one of them writes
    written = run.checkpoints.commit(progress, behind=behind)
    if written is not None and written.missed is not None and not behind:
        raise written.missed
    return record(run, written)


def record(run: Run, written: Written | None) -> bool:
    """Returns False if the disk rejected the checkpoint. Only this checkpoint is lost, not the run: earlier ones
    remain."""
    if written is None:
        return True
    if written.missed is not None:
        run.recorder.checkpoint_missed(written.step, str(written.missed))
        return False
    run.recorder.checkpoint(written.step, written.nbytes, written.seconds, written.stalled_seconds)
    return True


def train_step(run: Run, settings: LoopSettings, progress: RunProgress, stop: StopRequest) -> tuple[StepMetrics, bool]:
    """Takes one optimizer step and advances `progress`. Also returns whether any rank was asked to stop, which is the
    same on all."""
    step = StepOnItsWay(run, settings, progress)
    with step.counted():
        step.begin()
        while step.go_on():
            pass
        stopping = step.end(stop)
    return step.metrics(), stopping


class StepOnItsWay:
    """One optimizer step of one run: call `begin`, then `go_on` until it returns False, then `end`; then it has
    `metrics`.

    Other runs may take steps in between, so seconds and bytes are counted only inside `counted`.
    """

    def __init__(self, run: Run, settings: LoopSettings, progress: RunProgress) -> None:
        self._run, self._settings, self._progress = run, settings, progress
        self._watch = Stopwatch(run.techniques.waited_seconds)
        self._seconds = self._cpu_seconds = 0.0
        self._moved: dict[str, int] = {}
        self._busy: dict[str, float] = {}
        self._samples = samples_of_step(settings, run.ranks.world, progress)
        self._learning_rate = run.learning_rate(progress.step)
        self._scale = run.loss_scale.value
        self._num_tokens = 0
        self._losses: list[float] = []
        self._passes: Passes | None = None
        self._loss = self._norm = math.nan
        self._finite = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        techniques = self._run.techniques
        started, cpu_before = time.perf_counter(), time.process_time()
        moved_before, busy_before = techniques.moved_bytes(), techniques.busy_seconds()
        yield
        self._moved = added(self._moved, difference(techniques.moved_bytes(), moved_before))
        self._busy = added(self._busy, difference(techniques.busy_seconds(), busy_before))
        self._cpu_seconds += time.process_time() - cpu_before
        self._seconds += time.perf_counter() - started

    def begin(self) -> None:
        """Reads the step's micro-batches, which `go_on` then runs."""
        run = self._run
        run.position.step = self._progress.step
        run.optimizer.begin(self._learning_rate, 1.0 / self._scale)
        with self._watch.phase(Phase.DATA):
            micro_batches = next_micro_batches(run, self._settings, self._samples)
            self._num_tokens = run.batches.num_unmasked(self._samples)
        self._passes = run.order(run, self._watch.phase, micro_batches, self._num_tokens)

    def go_on(self) -> bool:
        """Continues to the next place where another run may run. Returns False when all micro-batches are done."""
        assert self._passes is not None, "begin() comes first"
        with float16_operations(self._run.loss_scale):
            try:
                next(self._passes)
            except StopIteration as ended:
                self._losses, self._passes = ended.value, None
                return False
        return True

    def end(self, stop: StopRequest) -> bool:
        """Sums over ranks, updates, and advances the run's progress. Returns whether any rank was asked to stop."""
        run, watch, progress, scale = self._run, self._watch, self._progress, self._scale
        with watch.phase(Phase.EXCHANGE):
            arrived = run.optimizer.arrived()
            told = [float(stop.requested), fingerprint(arrived), float(run.sum_gradients.is_late), *self._losses]
            stops, fingerprints, late, *all_losses = zip(*run.ranks.gather(told), strict=True)
            self._loss = math.fsum(loss for of_ranks in all_losses for loss in of_ranks)
            if len(set(fingerprints)) > 1:
                take_others_gradients(run, arrived)
            run.sum_gradients()
        if any(late):  # on any rank; in the repeated step, those uses will wait for the end of backward
            run.optimizer.skip()
            self.begin()
            while self.go_on():
                pass
            return self.end(stop)
        with watch.phase(Phase.OPTIMIZER):
            self._norm = run.optimizer.norm() / scale
            self._finite = math.isfinite(self._norm) and math.isfinite(self._loss)
            if self._finite:
                run.optimizer.step(self._learning_rate, self._clip_factor / scale)
                run.loss_scale.grow()
            else:
                reject_non_finite(run.loss_scale, self._settings, progress.step + 1, self._loss, self._norm)
                run.optimizer.skip()
                run.loss_scale.back_off()
        run.techniques.end_step()
        progress.step += 1
        progress.samples = self._samples.stop
        return any(stops)

    def metrics(self) -> StepMetrics:
        """Returns the metrics of the step that has ended."""
        techniques = self._run.techniques
        return StepMetrics(
            step=self._progress.step,
            loss=self._loss,
            learning_rate=self._learning_rate,
            gradient_norm=self._norm,
            clip_factor=self._clip_factor,
            tokens=self._num_tokens,
            step_seconds=self._seconds,
            phase_seconds=self._watch.seconds,
            tier_bytes=techniques.held_bytes(),
            tier_peak_bytes=techniques.peak_bytes(),
            allocator_retries=techniques.allocator_retries(),
            moved_bytes=self._moved,
            lane_seconds=self._busy,
            cpu_seconds=self._cpu_seconds,
            skipped=not self._finite,
            loss_scale=None if self._run.loss_scale.rule is None else self._scale,
        )

    @property
    def _clip_factor(self) -> float:
        return clip_factor_of(self._norm, self._settings.gradient_clipping)


def reject_non_finite(scale: LossScaler, settings: LoopSettings, step: int, loss: float, norm: float) -> None:
    """Raises NonFinite unless `step`, whose loss or gradients are not finite, is to be skipped.

    A loss scale that is too large makes such gradients with a finite loss: the step is skipped and the scale backs off,
    whatever nonFinite says. At the smallest scale the gradients themselves are too large, and that ends the run.
    """
    found = f"step {step}: loss {loss}, gradient norm {norm}"
    if scale.is_least:
        raise NonFinite(
            f"{found}, at the smallest loss scale, {scale.value:g}: {what_may_help(scale, loss)}", step=step
        )
    is_the_scales = scale.rule is not None and math.isfinite(loss)
    if not (is_the_scales or settings.skip_non_finite):
        raise NonFinite(
            f"{found}: not finite. Continue with a lower spec.training.optimizer.learningRate (in a cluster, in a new "
            "TrainingJob), or start a new job with spec.training.nonFinite: SkipStep, which skips such steps. A new "
            "job may begin at a checkpoint of this one (spec.checkpoint.from).",
            step=step,
        )


def what_may_help(scale: LossScaler, loss: float) -> str:
    """Returns what a run knows at the smallest scale: whether loss or gradients are at fault, and no more."""
    if not math.isfinite(loss):
        return (
            "the loss itself is not finite, which no loss scale can change. Values of the model may exceed float16's "
            "range (65504): try spec.model.precision.compute: bfloat16 in a new job."
        )
    lower = "lower spec.training.lossScale.minimum, or " if scale.value > 1.0 else ""
    return (
        "no smaller scale is tried, but gradients may be finite in a wider type: in a new job, "
        f"{lower}set spec.model.precision.compute: bfloat16, which has float32's range and needs no scale."
    )


def fingerprint(names: Collection[str]) -> float:
    """Returns a checksum that is short enough to be sent with the losses."""
    return float(zlib.crc32("\n".join(sorted(names)).encode()))


def take_others_gradients(run: Run, arrived: Collection[str]) -> None:
    """Adds a gradient of 0 for each use of a parameter for which only other ranks have one, as in a model that
    branches: gradients are handed out and added in order, so all ranks must hand out the same ones."""
    trained = [(name, parameter) for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    by_rank = run.ranks.gather([float(name in arrived) for name, _ in trained])
    for (name, parameter), elsewhere in zip(trained, map(any, zip(*by_rank, strict=True)), strict=True):
        if elsewhere and name not in arrived:
            run.optimizer.take(name, torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))


def evaluate(run: Run, settings: LoopSettings, progress: RunProgress) -> None:
    """Records the mean loss per label over the sequences of an evaluation. Of the run's state, it changes only
    `progress.best`."""
    started, world = time.perf_counter(), run.ranks.world
    losses, tokens = list[float](), 0
    run.optimizer.flush()
    run.model.eval()
    with torch.no_grad():
        for number, batch in enumerate(run.batches.evaluation_batches(settings.micro_batch_size)):
            tokens += batch.num_unmasked
            if number % world.size == 0:
                losses.append(0.0)  # every rank gives a value in every round, also in the last one, which may be short
            if number % world.size == world.rank:
                here = batch.on(run.device)
                losses[-1] = run.model(*here.given(1)).item()
        if run.runs_together and tokens and world.rank > number % world.size:
            here = batch.on(run.device)
            run.model(*here.given(1))  # for the other ranks, which have one batch more than this rank
    run.model.train()
    if tokens:
        total = math.fsum(dealt(run.ranks.gather(losses)))  # the same, whichever rank evaluated a batch
        if settings.keeps_best or settings.patience is not None:
            progress.best = progress.best.after(progress.step, total / tokens, settings.min_delta)
        run.recorder.evaluation(progress.step, total / tokens, tokens, time.perf_counter() - started)


def samples_of_step(settings: LoopSettings, world: World, progress: RunProgress) -> range:
    """The samples that all ranks together consume in the next step."""
    num_samples = settings.micro_batch_size * settings.num_micro_batches * world.size
    return range(progress.samples, progress.samples + num_samples)


def next_micro_batches(run: Run, settings: LoopSettings, samples: range) -> dict[int, Batch]:
    """Returns this rank's micro-batches of the step, by number. Micro-batch n is the same, with the same random
    numbers, however many ranks there are: it has samples n x micro_batch_size and on of the step."""
    size = settings.micro_batch_size
    return {
        number: run.batches.batch(samples[number * size : (number + 1) * size]).on(run.device)
        for number in run.ranks.world.share(settings.num_micro_batches)
    }


def clip_factor_of(norm: float, limit: float | None) -> float:
    """min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; 1 without a limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def difference(now: Mapping[str, Counter], before: Mapping[str, Counter]) -> dict[str, Counter]:
    """Returns the differences of counters that only rise; a counter that did not exist before began at 0."""
    return {name: count - before[name] if name in before else count for name, count in now.items()}


def added(counts: Mapping[str, Counter], more: Mapping[str, Counter]) -> dict[str, Counter]:
    return {name: counts[name] + count if name in counts else count for name, count in more.items()}
