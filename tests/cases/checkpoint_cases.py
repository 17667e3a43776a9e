"""Small checkpoints for tests: a state, bytes in files, and a history of commits."""

from __future__ import annotations

from pathlib import Path

from spillway_trainer.checkpoints.directory import Epoch
from spillway_trainer.checkpoints.durable_files import DurableFiles
from spillway_trainer.checkpoints.manifest import StoredCheckpoint, TrainingState


def training_state(step: int, **changes: object) -> TrainingState:
    fields: dict[str, object] = {
        "step": step,
        "seed": 7,
        "samples_consumed": 8 * step,
        "sequence_length": 16,
        "scalars": {"beta1_power": 0.9**step, "num_updates": float(step)},
        "schedule": {"name": "Cosine", "warmup_steps": 10},
        "random_state": "AAAA",
        "data_xxh3": "d" * 32,
        "tokenizer_xxh3": "e" * 32,
        "model": {"hidden_size": 8},
    }
    return TrainingState(**{**fields, **changes})  # type: ignore[arg-type]


def commit(epoch: Epoch, step: int) -> StoredCheckpoint:
    """Commits a checkpoint of two files whose bytes depend on the step, the epoch and the file."""
    with epoch.pending(step) as pending:
        for number in range(2):
            content = f"{step} {epoch.number} {number} ".encode() * 40
            path = pending.path / f"tensors-{number:05d}.safetensors"
            pending.written.append(pending.files.write(path, [memoryview(content)]))
        return pending.commit(training_state(step))


def history(directory: Path, *epochs: tuple[int, tuple[int, ...]], files: DurableFiles | None = None) -> Epoch:
    """Runs epochs one after another, each of which commits the given steps; returns the last one, which is still
    open."""
    for number, steps in epochs:
        epoch = Epoch.start(directory, number, files)
        for step in steps:
            commit(epoch, step)
    return epoch


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
