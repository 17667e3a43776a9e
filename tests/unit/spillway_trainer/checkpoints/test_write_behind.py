"""Checkpoints that are written while training goes on: from a copy, by one thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.checkpoint_cases import training_state
from cases.job_documents import job
from spillway.errors import Fenced
from spillway.plan import MemoryPlan
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer import config as trainer_config
from spillway_trainer import run_job
from spillway_trainer.checkpoints.directory import CheckpointNotWritten, Epoch, choose_resume, names_in
from spillway_trainer.checkpoints.durable_files import DurableFiles, FileEntry
from spillway_trainer.checkpoints.manifest import MANIFEST
from spillway_trainer.checkpoints.tensors import copied
from spillway_trainer.models.build import build_model
from spillway_trainer.ranks import ONE_RANK
from spillway_trainer.run_job import RunCheckpoints
from spillway_trainer.trainer import RunProgress

EVERY_TEN = {"spec.checkpoint.everySteps": 10}


class GatedFiles(DurableFiles):
    """A disk that takes no byte of a tensor before `opened`, and may be full then."""

    def __init__(self) -> None:
        self.opened, self.full = threading.Event(), False

    def write(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        if path.suffix == ".safetensors":
            assert self.opened.wait(timeout=60)
            if self.full:
                raise OSError(28, "No space left on device")
        return super().write(path, chunks)


class States:
    """Tensors of several types and sizes, which every step changes."""

    def __init__(self) -> None:
        self.tensors = {
            "master.a": torch.arange(300, dtype=torch.float32).view(3, 100),
            "exp_avg.a": torch.full((3, 100), 0.5, dtype=torch.bfloat16),
            "master.none": torch.empty(0, 4),
            "master.large": torch.full((17 * MIB,), 0.25),  # more than a file has
            "exp_avg.large": torch.ones(17, dtype=torch.uint8),
            "buffer.count": torch.tensor(3),
        }
        self.divided = None

    def states(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def train(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1)


def checkpoints_in(directory: Path, files: DurableFiles, memory_bytes: int, number: int = 1) -> tuple[Any, States]:
    """What commits to `directory`, and the states that it takes."""
    states, nothing = States(), SimpleNamespace()
    job: Any = SimpleNamespace(spec=SimpleNamespace(checkpoint=SimpleNamespace(keep=10, keep_best=False)))
    made: Any = RunCheckpoints(job, Epoch.start(directory, number, files), states, *[nothing] * 3, ONE_RANK, nothing)  # type: ignore[arg-type]
    made.memory = torch.empty(memory_bytes, dtype=torch.uint8)
    return made, states


@pytest.fixture(autouse=True)
def known_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunCheckpoints, "_state", lambda _, progress: training_state(progress.step))


@pytest.fixture
def files() -> Iterator[GatedFiles]:
    made = GatedFiles()
    yield made
    made.opened.set()


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_is_written_behind_is_byte_for_byte_what_was_there_at_the_step(tmp_path: Path, files: GatedFiles) -> None:
    inline, _ = checkpoints_in(tmp_path / "inline", DurableFiles(), 0)
    done = inline.commit(RunProgress(step=2), behind=True)
    assert done is not None and done.stalled_seconds == done.seconds
    behind, states = checkpoints_in(tmp_path / "behind", files, 80 * MIB)
    assert behind.commit(RunProgress(step=2), behind=True) is None
    states.train()
    files.opened.set()
    written = behind.written(wait=True)
    assert written[:2] == done[:2] and written.missed is None
    assert bytes_in(tmp_path / "behind") == bytes_in(tmp_path / "inline")
    states.train()
    assert behind.commit(RunProgress(step=4), behind=True) is None  # from the same memory
    assert behind.written(wait=True).step == 4


@pytest.mark.parametrize("memory_bytes", [1000, 68 * MIB])
def test_without_memory_for_all_states_the_same_bytes_are_written_before_training_goes_on(
    tmp_path: Path, memory_bytes: int
) -> None:
    inline, _ = checkpoints_in(tmp_path / "inline", DurableFiles(), 0)
    small, _ = checkpoints_in(tmp_path / "small", DurableFiles(), memory_bytes)
    for made in (inline, small):
        assert made.commit(RunProgress(step=2), behind=True).missed is None
    assert bytes_in(tmp_path / "small") == bytes_in(tmp_path / "inline")


def test_the_last_checkpoint_is_committed_when_commit_returns(tmp_path: Path) -> None:
    made, _ = checkpoints_in(tmp_path, DurableFiles(), 80 * MIB)
    assert made.commit(RunProgress(step=2), behind=False).nbytes > 68 * MIB
    assert [name.step for name in names_in(tmp_path)] == [2]


def test_nothing_is_told_and_nothing_has_its_name_before_the_commit(tmp_path: Path, files: GatedFiles) -> None:
    made, _ = checkpoints_in(tmp_path, files, 80 * MIB)
    assert made.written(wait=True) is None, "none was begun"
    made.commit(RunProgress(step=2), behind=True)
    assert made.written(wait=False) is None
    assert names_in(tmp_path) == []
    files.opened.set()
    assert made.written(wait=True).step == 2
    assert (tmp_path / "step-2.e1" / MANIFEST).exists()
    assert made.written(wait=True) is None, "told once"


def test_a_full_disk_in_the_thread_costs_only_that_checkpoint(tmp_path: Path, files: GatedFiles) -> None:
    made, _ = checkpoints_in(tmp_path, files, 80 * MIB)
    files.full = True
    files.opened.set()
    made.commit(RunProgress(step=2), behind=True)
    missed = made.written(wait=True)
    assert (missed.step, missed.nbytes) == (2, 0) and isinstance(missed.missed, CheckpointNotWritten)
    files.full = False
    made.commit(RunProgress(step=4), behind=True)
    assert made.written(wait=True).missed is None
    assert bytes_in(tmp_path).keys() == {"epoch-1.json", *(f"step-4.e1/{name}" for name in names_of(tmp_path))}


def names_of(directory: Path) -> list[str]:
    found = choose_resume(directory).checkpoint
    assert found is not None
    return [MANIFEST, *(entry.name for entry in found.manifest.files)]


def test_a_writer_that_is_fenced_meanwhile_ends_the_run(tmp_path: Path, files: GatedFiles) -> None:
    made, _ = checkpoints_in(tmp_path, files, 80 * MIB)
    made.commit(RunProgress(step=2), behind=True)
    Epoch.start(tmp_path, 2)
    files.opened.set()
    with pytest.raises(Fenced):
        made.written(wait=True)
    assert names_in(tmp_path) == []


def test_whatever_else_the_thread_meets_is_raised_in_the_step_loop(
    tmp_path: Path, files: GatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run_job.checkpoint, "save", fail)
    made, _ = checkpoints_in(tmp_path, files, 80 * MIB)
    made.commit(RunProgress(step=2), behind=True)
    with pytest.raises(ZeroDivisionError):
        made.written(wait=True)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rule", ["AdamW", "Lion", "SgdMomentum"])
def test_what_the_plan_counts_holds_all_states(rule: str, moments: str, architecture: str) -> None:
    config: dict[str, Any] = {"spec.model.config.architecture": architecture, "spec.model.config.hiddenSize": 40}
    if architecture == "gpt2":
        config["spec.model.config.numKeyValueHeads"] = 4
    asked = job({**config, "spec.training.optimizer": {"name": rule, "moments": moments}, **EVERY_TEN})
    plan = make_plan(asked, local_node(1, GIB, GIB, GIB))
    assert isinstance(plan, MemoryPlan)
    model = build_model(asked.spec)
    settings = trainer_config.hyperparameters(asked.spec, model)
    states = (
        (f"{kind}.{name}", torch.empty(settings.state_shape(kind, p.shape), dtype=settings.state_dtype(kind)))
        for name, p in model.named_parameters() if name not in model.tied for kind in settings.rule.state_kinds
    )  # fmt: skip
    copies, left = copied(states, torch.empty(plan.snapshot_bytes, dtype=torch.uint8))
    assert not left
    assert sum(tensor.nbytes for _, tensor in copies) > plan.snapshot_bytes - 1.01 * MIB - 4096
