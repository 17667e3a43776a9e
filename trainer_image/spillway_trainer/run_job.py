"""One attempt of a job, from its files to its last step: corpus, assembly, resume, loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from spillway.errors import UserError
from spillway.job import JobFile
from spillway.plan import MemoryPlan

from . import checkpoint, config, native
from .assemble import Assembly, assemble, fill
from .checkpoint_directory import CheckpointNotWritten, Epoch
from .checkpoint_manifest import TrainingState
from .data import TokenBatches
from .exporter import Exporter
from .recorder import Recorder
from .schedule import LearningRate
from .text_source import TextSource, python_stdlib, text_source
from .tokens import Corpus, prepare_corpus
from .trainer import Progress, Run, StopRequest, train

RANK = 0


def run_job(job: JobFile, plan: MemoryPlan, recorder: Recorder, progress: Progress, stop: StopRequest) -> None:
    """Train to the end; `progress` tells how far it came. Every other end is an exception (see ending.py)."""
    # Fixed before the first forward: the rounding of a matrix product depends on the number of threads.
    torch.set_num_threads(job.compute_threads)
    config.check_plan(job.spec, plan)
    epoch = Epoch.start(Path(job.checkpoint_directory), job.epoch)
    for problem in epoch.resume.passed_over:
        report(f"checkpoint passed over: {problem}")
    corpus = prepare_corpus(source_of(job), Path(job.corpus_directory), vocab_size(job), report)
    batches = make_batches(job, corpus)
    with assembled(job, plan) as assembly:
        learning_rate = config.learning_rate(job.spec)
        checkpoints = RunCheckpoints(job, epoch, assembly, batches, corpus, learning_rate)
        checkpoints.resume(progress)
        exporter = Exporter(job.name, RANK, job.spec.training.steps, plan, assembly.io_backend())
        if job.metrics_port is not None:
            exporter.serve(job.metrics_port)
        recorder.show(exporter)
        recorder.start(
            job=job.name,
            epoch=job.epoch,
            resumed_from_step=progress.step,
            isa=native.isa(),
            io_backend=assembly.io_backend(),
            parameters=sum(shape.numel() for shape in assembly.parameter_shapes().values()),
        )
        run = Run(
            model=assembly.model,
            optimizer=assembly.optimizer,
            techniques=assembly,
            position=assembly.position,
            batches=batches,
            learning_rate=learning_rate,
            checkpoints=checkpoints,
            recorder=recorder,
        )
        train(run, config.loop_settings(job.spec, plan), progress, stop)


@contextmanager
def assembled(job: JobFile, plan: MemoryPlan) -> Iterator[Assembly]:
    assembly = assemble(job, plan)
    try:
        yield assembly
    finally:
        assembly.tiers.close()


@dataclass(frozen=True, slots=True)
class RunCheckpoints:
    """The run's state into its epoch's checkpoints, and out of the one that the epoch resumes from."""

    job: JobFile
    epoch: Epoch
    assembly: Assembly
    batches: TokenBatches
    corpus: Corpus
    learning_rate: LearningRate

    def commit(self, progress: Progress) -> tuple[int, float]:
        started = time.perf_counter()
        committed = checkpoint.save(self.epoch, self._state(progress), self.assembly.optimizer.state())
        try:
            self.epoch.prune(self.job.spec.checkpoint.keep)
        except CheckpointNotWritten as error:  # the new one is committed all the same
            report(str(error))
        return committed.manifest.nbytes, time.perf_counter() - started

    def resume(self, progress: Progress) -> None:
        """Fill model and optimizer: from the epoch's checkpoint, or from the seed."""
        found = self.epoch.resume.checkpoint
        if found is None:
            fill(self.assembly, self.job.spec.training.seed)
            return
        state = found.manifest.state
        checkpoint.check_same_run(
            state,
            tokenizer_xxh3=self.corpus.index.tokenizer_xxh3,
            data_xxh3=self.batches.fingerprint,
            seed=self.job.spec.training.seed,
        )
        for name, tensor in checkpoint.load(found, self.assembly.parameter_shapes()):
            self.assembly.optimizer.load(name, tensor)
        self.assembly.optimizer.load_scalars(state.scalars)
        checkpoint.restore_random_state(state.random_state)
        progress.step, progress.samples = state.step, state.samples_consumed

    def _state(self, progress: Progress) -> TrainingState:
        training = self.job.spec.training
        return TrainingState(
            step=progress.step,
            seed=training.seed,
            samples_consumed=progress.samples,
            sequence_length=training.sequence_length,
            scalars=self.assembly.optimizer.scalars(),
            schedule=dataclasses.asdict(self.learning_rate),
            random_state=checkpoint.random_state(),
            data_xxh3=self.batches.fingerprint,
            tokenizer_xxh3=self.corpus.index.tokenizer_xxh3,
            model=dataclasses.asdict(config.transformer_config(self.job.spec)),
        )


def make_batches(job: JobFile, corpus: Corpus) -> TokenBatches:
    training, evaluation = job.spec.training, job.spec.data.evaluation
    return TokenBatches(
        corpus,
        sequence_length=training.sequence_length,
        evaluation_fraction=evaluation.fraction if evaluation else 0.0,
        seed=training.seed,
    )


def source_of(job: JobFile) -> TextSource:
    """The text of spec.data, as this process sees it."""
    data = job.spec.data
    if data.builtin is not None:
        return python_stdlib()
    if data.text is None:
        raise UserError("spec.data: only text and builtin can be trained on so far")
    if data.text.path is not None:
        return text_source(Path(data.text.path))
    assert data.text.claim is not None
    if data.text.claim not in job.claims:
        raise UserError(f"spec.data.text.claim = {data.text.claim}: not mounted; known claims: {sorted(job.claims)}")
    return text_source(Path(job.claims[data.text.claim]) / data.text.sub_path)


def vocab_size(job: JobFile) -> int:
    return job.spec.model.transformer.vocab_size


def report(line: str) -> None:
    """One line into the attempt's log."""
    print(line, flush=True)
