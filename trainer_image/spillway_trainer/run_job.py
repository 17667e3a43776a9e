"""One attempt of a job, from its files to its last step: corpus, assembly, resume, loop."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from spillway.api.job_file import JobFile
from spillway.api.training import EarlyStopping
from spillway.errors import CheckpointCorrupt, DeviceOutOfMemory, HostOutOfMemory, UserError
from spillway.plan import MemoryPlan, Tier
from spillway.planning.workload import ZERO_STRATEGIES
from spillway.units import counted

from . import config, running_statistics
from .activation_spill import Chosen, live_correction
from .activation_spill.live_correction import MovedBytes
from .assemble import FROZEN, Assembly, Tiers, assemble, check_device, initial_states
from .cgroup import usable_cores, with_usable_threads
from .checkpoints import tensors as checkpoint
from .checkpoints.directory import CheckpointNotWritten, Epoch, Owner, Resume, newest_at, tokenizer_of
from .checkpoints.manifest import StoredCheckpoint, TrainingState, open_checkpoint
from .checkpoints.sealed_json import Unsealed
from .corpus.building_peak import peak_of_building, room_for_more_text
from .corpus.data import TokenBatches
from .corpus.objective import TrainingObjective
from .corpus.text_source import TextSource, directory_of, entry_point, python_stdlib, text_source
from .corpus.tokens import Corpus, TokenizerRecipe, has_corpus, prepare_corpus
from .kernels import half_products, native
from .models.build import build_model, source_directory
from .models.chain import Chain
from .optimizer.loss_scale import LossScaler
from .optimizer.schedule import LearningRate
from .parallel import numa
from .parallel.distributed import abort_exchanges, joined
from .parallel.shards import ShardedOptimizer
from .ranks import Ranks, World
from .reporting.exporter import Exporter
from .reporting.progress_client import reporting
from .reporting.recorder import Recorder
from .tiers import cuda
from .tiers.host_slab import HostSlab
from .trainer import Run, RunProgress, StopRequest, Written, settled_objects, train

METRICS_PORT_VARIABLE = "SPILLWAY_METRICS_PORT"
"""Set by the launcher, which alone serves job.json's port and reads the metrics of its node's ranks on 127.0.0.1."""


def run_job(
    job: JobFile, plan: MemoryPlan, recorder: Recorder, progress: RunProgress, stop: StopRequest, world: World
) -> str:
    """Train to the end; `progress` says how far training came. Returns a sentence about the end; every other end is an
    exception (see ending.py)."""
    half_products.fix_products(job.compute_threads)
    config.check_world(job, world)
    recorder.preparing("building the model")
    model = build_model(job.spec, job.claims)
    config.check_plan(job, plan, len(model.segments))
    usable = with_usable_threads(plan, usable_cores(Path("/")), job.ranks_per_node)
    if usable != plan:
        report(
            f"optimizer update: {usable.optimizer.num_threads} threads instead of the plan's "
            f"{plan.optimizer.num_threads}, because this process may not use more cores"
        )
    usable, device = on_device(usable, job.ranks_per_node, world)
    if world.size > 1:
        recorder.preparing(f"waiting for all {world.size} ranks")
    with joined(world) as ranks:
        ranks.agree("job.json", digest(job.model_dump_json()))
        ranks.agree("plan.json", digest(plan.model_dump_json()))
        ranks.agree("model", digest(json.dumps(model.description)))
        steps = run_ranks(job, usable, model, recorder, progress, stop, ranks, device)
    return ending_sentence(progress, steps, job.spec.training.early_stopping)


def ending_sentence(progress: RunProgress, steps: int, stopping: EarlyStopping | None) -> str:
    best = progress.best
    if stopping is None or progress.step == steps:
        return f"trained to step {steps}"
    improvement = f"an improvement of {stopping.min_delta:g}" if stopping.min_delta else "improvement"
    return (
        f"stopped early at step {progress.step} of {steps}: {counted(best.since, 'evaluation')} without {improvement}; "
        f"the lowest evaluation loss, {best.loss:.4f}, is that of step {best.step}"
    )


def run_ranks(
    job: JobFile,
    plan: MemoryPlan,
    model: Chain,
    recorder: Recorder,
    progress: RunProgress,
    stop: StopRequest,
    ranks: Ranks,
    device: torch.device,
) -> int:
    """Does what `run_job` does once all ranks are there. `model` has no memory yet. Returns how many steps were asked
    for."""
    epoch = ranks.first("start of the epoch", lambda: start_epoch(job))
    builds_corpus = not has_corpus(Path(job.corpus_directory))
    corpus = prepared_corpus(job, model, ranks, recorder)
    room = room_for_more_text(sources_of(job)[0].nbytes) if builds_corpus and job.spec.data.builtin is None else 0
    built_in_bytes = peak_of_building(Path(job.corpus_directory), room, is_new=builds_corpus)
    batches = make_batches(job, corpus, model.objective)
    epochs, job = job.spec.training.epochs, in_steps(job, batches)
    training = job.spec.training
    if ranks.world.is_first:
        each = f"{counted(batches.num_sequences, 'sequence')}: {counted(training.num_steps, 'step')}"
        say(recorder, f"{counted(epochs, 'epoch')} of {each}" if epochs else "")
        for line in (*batches.said, longer_than_trained(model, job.spec.training.sequence_length)):
            say(recorder, line)
        say(recorder, batches.evaluated)
    ranks.agree("tokens and their order", batches.fingerprint)
    check_device(device, model, config.hyperparameters(job.spec, model))
    imports = {"Fsdp": "importing FSDP2, "}
    if plan.device == "Cpu":
        imports |= dict.fromkeys(ZERO_STRATEGIES, "importing DeepSpeed, ")
    recorder.preparing(f"{imports.get(plan.strategy, '')}allocating memory")
    with assembled(job, plan, model, ranks, device) as assembly, ExitStack() as opened:
        learning_rate = config.learning_rate(job.spec)
        loss_scale = config.loss_scale(job.spec)
        start = start_of(job) if epoch is not None and epoch.resume.checkpoint is None else Resume(None, ())
        checkpoints = RunCheckpoints(
            job, epoch, assembly, batches, corpus, learning_rate, ranks, loss_scale, start.checkpoint
        )
        if ranks.world.size == 1:
            checkpoints.memory = HostSlab(plan.snapshot_bytes).memory.zero_()  # resident from the start, as planned
        recorder.preparing(checkpoints.origin)
        checkpoints.resume(progress)
        if progress.step > training.num_steps:
            asked = counted(training.num_steps, "step")
            field = f"steps is {training.num_steps}" if epochs is None else f"epochs is {epochs}, which is {asked}"
            raise UserError(
                f"spec.training.{field}, but {counted(progress.step, 'step')} are already trained; raise it (in a "
                "cluster, in a new TrainingJob)"
            )
        exporter = Exporter(
            job,
            ranks.world.rank,
            plan,
            assembly.io_backend(),
            assembly.spill_faults,
            assembly.spill_file_bytes,
            lambda: recorder.num_missed,
        )
        serve_metrics(exporter, job)
        report_progress = reporting(
            operators_environment(ranks), job, plan, progress.step, report, built_in_bytes=built_in_bytes
        )
        client = opened.enter_context(report_progress)
        recorder.show(*(sink for sink in (exporter, client) if sink is not None))
        recorder.start(
            job=job.name,
            epoch=job.epoch,
            resumed_from_step=progress.step,
            steps=training.num_steps,
            sequences=batches.num_sequences,
            isa=native.isa(),
            io_backend=assembly.io_backend(),
            parameters=sum(shape.numel() for shape in assembly.parameter_shapes().values()),
            passed_over=[] if epoch is None else [*map(str, (*epoch.resume.passed_over, *start.passed_over))],
        )
        assembly.tell_choices(partial(tell_choice, recorder))
        live_correction.attach(
            plan,
            assembly.spill,
            assembly.tiers.nvme,
            ranks,
            partial(tell_correction, recorder, progress),
            client,
        )
        run = run_of(plan, checkpoints, recorder, device)
        with settled_objects():
            train(run, config.loop_settings(job.spec, plan), progress, stop)
    return training.num_steps


def run_of(plan: MemoryPlan, checkpoints: RunCheckpoints, recorder: Recorder, device: torch.device) -> Run:
    """Returns everything that the step loop drives, for an assembly that `checkpoints` has filled."""
    assembly, ranks, spec = checkpoints.assembly, checkpoints.ranks, checkpoints.job.spec
    return Run(
        model=assembly.called,
        optimizer=assembly.optimizer,
        techniques=assembly,
        position=assembly.position,
        batches=checkpoints.batches,
        learning_rate=checkpoints.learning_rate,
        checkpoints=checkpoints,
        recorder=recorder,
        ranks=ranks,
        sum_gradients=assembly.exchange(
            ranks, config.gradient_wire(spec), plan.optimizer.num_threads, plan.num_micro_batches
        ),
        order=assembly.order,
        device=device,
        loss_scale=checkpoints.loss_scale,
        runs_together=assembly.gathers,
    )


def tell_choice(recorder: Recorder, chosen: Chosen) -> None:
    report(f"activations: {chosen.reason}")
    recorder.activations_chosen(chosen.reason, chosen.stall_seconds, chosen.pass_seconds, chosen.tier_bytes)


def tell_correction(recorder: Recorder, progress: RunProgress, correction: MovedBytes) -> None:
    """Reports a correction at the end of the step that is running."""
    step = progress.step + 1
    report(correction.said(step))
    recorder.activations_corrected(
        step, correction.said(step), correction.activations, correction.host, correction.spill_file
    )


def device_for(plan: MemoryPlan, world: World) -> torch.device:
    """Returns this rank's device. Raises UserError if the plan needs one that is not there."""
    return torch.device("cpu") if plan.device == "Cpu" else cuda.device_of(world.local_rank)


def on_device(plan: MemoryPlan, num_local_ranks: int, world: World) -> tuple[MemoryPlan, torch.device]:
    """Returns the plan with threads that are near this rank's device, and that device, prepared."""
    device = device_for(plan, world)
    if device.type == "cuda":
        plan = near_device(plan, num_local_ranks, world)
        cuda.prepare(device, plan.budget[Tier.DEVICE] - plan.nccl_bytes)
    return plan, device


def near_device(plan: MemoryPlan, num_local_ranks: int, world: World) -> MemoryPlan:
    """Keeps this process, its threads and its memory on the NUMA node of its device, and reports it. Must come before
    CUDA makes its context, which has threads and host memory of its own."""
    root = Path("/")
    addresses = [cuda.bus_address(rank) for rank in range(num_local_ranks)]
    placement = numa.place(root, addresses, world.local_rank, os.sched_getaffinity(0), usable_cores(root))
    report(placement.said)
    if placement.cores:
        os.sched_setaffinity(0, placement.cores)
    return numa.with_placed_threads(plan, placement)


def operators_environment(ranks: Ranks) -> Mapping[str, str]:
    """Returns the environment that says where the operator listens. Only rank 0 reports, so others get an empty one."""
    return os.environ if ranks.world.is_first else {}


def start_epoch(job: JobFile) -> Epoch:
    owner = Owner(job.namespace, job.name, job.uid) if job.in_cluster else None
    epoch = Epoch.start(Path(job.checkpoint_directory), job.epoch, owner=owner)
    for problem in epoch.resume.passed_over:
        report(f"damaged checkpoint skipped: {problem}")
    return epoch


def start_of(job: JobFile) -> Resume:
    """Returns the checkpoint that spec.checkpoint.from names; none if the field is absent. Raises UserError."""
    place, field = job.spec.checkpoint.from_, "spec.checkpoint.from"
    if place is None:
        return Resume(None, ())
    directory = directory_of(place, job.claims, field)
    try:
        return newest_at(directory)
    except UserError as error:
        raise UserError(f"{field} = {directory}: {error}") from error


def prepared_corpus(job: JobFile, model: Chain, ranks: Ranks, recorder: Recorder) -> Corpus:
    """Returns the corpus. If it is missing, rank 0 builds it, then every other node that does not see rank 0's disk."""

    def prepare() -> Corpus:
        directory, recipe = Path(job.corpus_directory), tokenizer_recipe(job, model.objective)
        text, *held_out = sources_of(job)
        return prepare_corpus(text, directory, model.vocab_size, partial(say, recorder), recipe, *held_out)

    corpus = ranks.first("corpus", prepare)
    for turn in (1, 2):
        if ranks.world.corpus_turn == turn:
            corpus = prepare()
        ranks.agree("corpus of every node", "complete")
    assert corpus is not None, "every rank has its turn"
    return corpus


def longer_than_trained(model: Chain, sequence_length: int) -> str:
    limit = model.description.get("config", {}).get("max_position_embeddings")
    if not isinstance(limit, int) or sequence_length <= limit:
        return ""
    return (
        f"spec.training.sequenceLength {sequence_length} is more than max_position_embeddings {limit} in the model's "
        "config.json: its pretraining had no such positions"
    )


def say(recorder: Recorder, line: str) -> None:
    """Reports one line about what comes before training, to log and console; does nothing if it is empty."""
    if line:
        report(line)
        recorder.preparing(line)


def serve_metrics(exporter: Exporter, job: JobFile) -> None:
    """Serves metrics on this rank's own port if a launcher gave it one, else on the job's.

    The launcher's port was free when the launcher looked. If it has been taken since, only this rank's series are lost
    (spillway_rank_up says so), and the run continues: nobody asked for that very port.
    """
    port = os.environ.get(METRICS_PORT_VARIABLE)
    if port is not None:
        try:
            exporter.serve(int(port), "127.0.0.1")
        except UserError as error:
            report(f"training continues without the metrics of this rank: {error}")
    elif job.metrics_port is not None:
        exporter.serve(job.metrics_port)


@contextmanager
def assembled(job: JobFile, plan: MemoryPlan, model: Chain, ranks: Ranks, device: torch.device) -> Iterator[Assembly]:
    assembly = assemble(job, plan, model, ranks, device)
    try:
        with survived(assembly.tiers):
            yield assembly
    except BaseException:
        abort_exchanges()  # for the operations in which another rank may never take part
        raise
    finally:
        assembly.tiers.close()


@contextmanager
def survived(tiers: Tiers) -> Iterator[None]:
    """Turns exhausted memory into the failure of a spill device, if bytes had to stay in memory because it failed."""
    try:
        yield
    except (DeviceOutOfMemory, HostOutOfMemory) as error:
        cause = tiers.cause_of(error)
        if cause is error:
            raise
        raise cause from error


@dataclass(slots=True)
class RunCheckpoints:
    """Writes the run's state into its epoch's checkpoints, and reads it from the one that the epoch resumes from."""

    job: JobFile
    epoch: Epoch | None
    """Only rank 0 has it."""
    assembly: Assembly
    batches: TokenBatches
    corpus: Corpus
    learning_rate: LearningRate
    ranks: Ranks
    loss_scale: LossScaler
    start: StoredCheckpoint | None = None
    """Another run's checkpoint, from whose parameters this run starts (spec.checkpoint.from)."""
    base_is_there: bool = False
    """Whether the frozen parameters of a shared base already have their values."""
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Memory for a copy from which a checkpoint is written while training continues. Empty in runs of several ranks,
    and for members of a sweep."""
    _writer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "checkpoint", native.compute_alone)
    )
    _writing: Future[Written] | None = None

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        """Writes a checkpoint of `progress`. If every rank has the same state, only rank 0 writes; if states are
        divided, every rank writes its pieces. If a rank cannot write, no rank has committed."""
        assert self._writing is None, "written() comes first"
        started, step, tensors = time.perf_counter(), progress.step, self.assembly.states()
        if behind and self.memory.nbytes:
            copies, left = checkpoint.copied(tensors, self.memory)
            if not left:
                state, stalled = self._state(progress), time.perf_counter() - started
                self._writing = self._writer.submit(self._commit_behind, state, copies, started, stalled)
                return None
            tensors = chain(copies, left, tensors)
        divided = self.assembly.divided
        try:
            if divided is not None and self._is_shared():
                return self._commit_pieces(divided.optimizer, progress, started)
            if divided is not None and not self.ranks.world.is_first:
                exhaust(tensors)

            def work() -> Written:
                try:
                    return self._commit(self._state(progress), tensors, started)
                finally:
                    if divided is not None:
                        exhaust(tensors)

            return self.ranks.first("checkpoint", work) or Written(step)
        except CheckpointNotWritten as error:
            return Written(step, missed=error)

    def written(self, *, wait: bool) -> Written | None:
        """Implements Checkpoints.written. Raises the exception that ended the writing (Fenced)."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        started = time.perf_counter()
        wait_for([self._writing])
        writing, self._writing = self._writing, None
        found = writing.result()
        return found._replace(stalled_seconds=found.stalled_seconds + time.perf_counter() - started)

    @property
    def origin(self) -> str:
        """What `resume` is about to do, for the recorder. Ranks without an epoch (all but 0) do not know of a
        checkpoint."""
        found = None if self.epoch is None else self.epoch.resume.checkpoint
        if found is not None:
            return f"loading the checkpoint of step {found.manifest.state.step}"
        if self.epoch is not None and self.start is not None:
            return f"loading the parameters of {self.start.path}"
        return "loading the model" if self.job.spec.model.source else "initialising weights"

    def resume(self, progress: RunProgress) -> None:
        """Fill model and optimizer from the epoch's checkpoint, from the parameters of another run's checkpoint, or
        from the model's source or seed. Frozen parameters, which no checkpoint holds, always come from source or seed.
        Every rank gets rank 0's bits, because nodes may have no disk in common, and their processors may draw other
        random numbers. Only ranks of a sharded model that see the checkpoint read their pieces themselves."""
        found = json.loads(self.ranks.tell("checkpoint to resume from", self._found_state))
        divided = self.assembly.divided
        in_pieces = bool(found) and divided is not None and self._is_shared()
        if divided is not None and in_pieces:
            read = partial(self._read_pieces, divided.optimizer, found["checkpoint"])
            self.ranks.each("the reading of the checkpoint", read)
            divided.optimizer.complete()
        for name, tensor in self.ranks.share(self._found_tensors(frozen_alone=in_pieces)):
            self.assembly.load(name, tensor)
        if found:
            state = TrainingState.from_json(found["state"])
            self.assembly.optimizer.load_scalars(state.scalars)
            self.loss_scale.load(state.scalars)
            checkpoint.restore_random_state(state.random_state)
            progress.step, progress.samples, progress.best = state.step, state.samples_consumed, state.best

    def _commit_behind(
        self, state: TrainingState, copies: Iterable[tuple[str, Tensor]], started: float, stalled_seconds: float
    ) -> Written:
        """Commits the copy. Runs in the writer's thread."""
        try:
            return self._commit(state, copies, started, stay=True)._replace(stalled_seconds=stalled_seconds)
        except CheckpointNotWritten as error:
            return Written(state.step, missed=error)

    def _commit(
        self, state: TrainingState, tensors: Iterable[tuple[str, Tensor]], started: float, *, stay: bool = False
    ) -> Written:
        assert self.epoch is not None
        return self._pruned(checkpoint.save(self.epoch, state, tensors, stay=stay), started)

    def _is_shared(self) -> bool:
        """Whether every rank sees the directory in which rank 0 has begun this epoch, so that no node has a disk of its
        own there."""
        begun = Path(self.job.checkpoint_directory) / f"epoch-{self.job.epoch}.json"

        def seen() -> str:
            try:
                return str(begun.stat().st_mtime_ns)
            except OSError:
                return ""

        found = self.ranks.each("checkpoint directory", seen)
        return bool(found[0]) and len({*found}) == 1

    def _commit_pieces(self, optimizer: ShardedOptimizer, progress: RunProgress, started: float) -> Written:
        """Every rank writes its pieces, and rank 0 the manifest."""
        pieces, shapes = optimizer.own_pieces(), optimizer.state_shapes()
        state, then = self._state(progress), partial(self._pruned, started=started)
        found = checkpoint.save_in_pieces(self.ranks, self.epoch, state, pieces, shapes, then)
        return found or Written(progress.step)

    def _pruned(self, written: StoredCheckpoint, started: float) -> Written:
        """Removes older checkpoints. `started`: when this one was begun."""
        assert self.epoch is not None
        state = written.manifest.state
        try:
            kept = self.job.spec.checkpoint
            self.epoch.prune(kept.keep, state.best.step if kept.keep_best else 0)
        except CheckpointNotWritten as error:  # the new checkpoint is committed all the same
            report(str(error))
        seconds = time.perf_counter() - started
        return Written(state.step, written.manifest.nbytes, seconds, seconds)

    def _found_state(self) -> str:
        """Returns as JSON the name of the checkpoint that the epoch resumes from, and its state; an empty object if it
        has none. Raises UserError if the checkpoint is not of the same run."""
        assert self.epoch is not None
        if self.epoch.resume.checkpoint is None:
            return "{}"
        state = self.epoch.resume.checkpoint.manifest.state
        checkpoint.check_same_run(
            state,
            tokenizer_xxh3=self.corpus.index.tokenizer_xxh3,
            data_xxh3=self.batches.fingerprint,
            seed=self.job.spec.training.seed,
            rule=self.job.spec.training.optimizer.name,
            moments=self.job.spec.training.optimizer.moments,
            source_xxh3=self.assembly.model.description.get("source_xxh3", ""),
        )
        return json.dumps({"checkpoint": str(self.epoch.resume.checkpoint), "state": state.to_json()})

    def _read_pieces(self, optimizer: ShardedOptimizer, name: str) -> str:
        """Reads this rank's pieces of the states. Raises CheckpointCorrupt."""
        path = Path(self.job.checkpoint_directory) / name
        try:
            found, shapes = open_checkpoint(path), self.assembly.parameter_shapes()
            optimizer.load_pieces(checkpoint.load(found, shapes, ranges=optimizer.own_ranges()))
        except (Unsealed, SafetensorError) as error:
            raise CheckpointCorrupt(
                f"{path}: rank {self.ranks.world.rank} finds another checkpoint than rank 0 has verified: {error}; "
                "check that all nodes see the same files there"
            ) from error
        return ""

    def _found_tensors(self, *, frozen_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
        if self.epoch is None or (frozen_alone and not self.assembly.has_frozen):
            return iter(())
        initial = initial_states(self.assembly.model, self.job.spec.training.seed, trained_alone=self.base_is_there)
        shapes = self.assembly.parameter_shapes(), running_statistics.shapes(self.assembly.model)
        if frozen_alone:
            found: Iterator[tuple[str, Tensor]] = iter(())
        elif self.epoch.resume.checkpoint is not None:
            found = checkpoint.load(self.epoch.resume.checkpoint, *shapes)
        elif self.start is not None:
            seed, tokenizer = self.job.spec.training.seed, self.corpus.index.tokenizer_xxh3
            checkpoint.check_same_base(self.start, self.assembly.model.description, seed, tokenizer)
            found = checkpoint.load_parameters(self.start, *shapes)
        else:
            return initial
        frozen = ((name, value) for name, value in initial if name.startswith(FROZEN))
        return chain(found, frozen)

    def _state(self, progress: RunProgress) -> TrainingState:
        training = self.job.spec.training
        return TrainingState(
            step=progress.step,
            seed=training.seed,
            samples_consumed=progress.samples,
            sequence_length=training.sequence_length,
            scalars={**self.assembly.optimizer.scalars(), **self.loss_scale.scalars()},
            schedule=dataclasses.asdict(self.learning_rate),
            random_state=checkpoint.random_state(),
            data_xxh3=self.batches.fingerprint,
            tokenizer_xxh3=self.corpus.index.tokenizer_xxh3,
            model=self.assembly.model.description,
            special_tokens=self.corpus.special_tokens,
            rule=training.optimizer.name,
            moments=training.optimizer.moments,
            best=progress.best,
        )


def exhaust(tensors: Iterator[object]) -> None:
    for _ in tensors:
        pass


def digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def make_batches(job: JobFile, corpus: Corpus, objective: TrainingObjective) -> TokenBatches:
    training, data = job.spec.training, job.spec.data
    return TokenBatches(corpus, training.sequence_length, training.seed, objective, data.evaluation, packs=data.packing)


def in_steps(job: JobFile, batches: TokenBatches) -> JobFile:
    """Returns the job with its epochs converted to steps. Raises UserError if its warm-up is longer than that."""
    training = job.spec.training.in_steps(batches.num_sequences)
    if (warmup := training.schedule.warmup_steps) > training.num_steps:
        raise UserError(
            f"spec.training.schedule.warmupSteps is {warmup}, and {counted(job.spec.training.epochs or 0, 'epoch')} of "
            f"this data are only {training.num_steps} steps; lower warmupSteps, or use warmupRatio"
        )
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})


def tokenizer_recipe(job: JobFile, objective: TrainingObjective) -> TokenizerRecipe:
    """Returns where the tokenizer comes from: a model or checkpoint to start from has its own; otherwise one is trained
    on the text."""
    source = job.spec.model.source
    if source is not None:
        return TokenizerRecipe(model_directory=source_directory(source, job.claims))
    start = None if has_corpus(Path(job.corpus_directory)) else start_of(job).checkpoint
    if start is not None:
        return TokenizerRecipe(model_directory=tokenizer_of(start).parent)
    return TokenizerRecipe(has_mask=objective is TrainingObjective.MASKED)


def sources_of(job: JobFile) -> list[TextSource]:
    """Returns the text or chats to train on, as this process sees them, and that of spec.data.evaluation, if it has
    one."""
    data, places = job.spec.data, {f"spec.{field}": place for field, place in job.spec.texts.items()}
    found = [text_source(directory_of(place, job.claims, field), field) for field, place in places.items()]
    if data.entrypoint is not None:
        return [entry_point(data.entrypoint), *found]
    return found if data.builtin is None else [python_stdlib(), *found]


def report(line: str) -> None:
    """Writes one line to the attempt's log."""
    print(line, flush=True)
