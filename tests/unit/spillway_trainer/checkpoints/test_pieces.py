"""Checkpoints in pieces: each rank writes its own, readers get whole tensors, and a rank that fails leaves nothing."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.checkpoint_cases import flip_bit, training_state
from spillway.errors import Fenced, SpillwayError
from spillway_trainer.checkpoints import directory
from spillway_trainer.checkpoints.directory import CheckpointNotWritten, Epoch, choose_resume, verify
from spillway_trainer.checkpoints.durable_files import DurableFiles, FileEntry
from spillway_trainer.checkpoints.manifest import PIECES_VERSION, StoredCheckpoint
from spillway_trainer.checkpoints.sealed_json import seal, unseal
from spillway_trainer.checkpoints.tensors import read, read_ranges, save, save_in_pieces
from spillway_trainer.ranks import World

WORLD = 3
WHOLE = {
    "master.a": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "exp_avg.a": torch.arange(7 * 5).to(torch.bfloat16).view(7, 5),
    "master.b": torch.tensor([float("nan"), -0.0]),
    "master.none": torch.empty(0, 4),
}
"""`b` has fewer values than there are ranks."""
SHAPES = {name: tensor.shape for name, tensor in WHOLE.items()}


@dataclass
class Shared:
    """What ranks in threads have in common."""

    barrier: Barrier = field(default_factory=lambda: Barrier(WORLD))
    said: list[Any] = field(default_factory=lambda: [None] * WORLD)


@dataclass
class ThreadRank:
    """A rank that is a thread of this process."""

    world: World
    shared: Shared

    def each(self, label: str, work: Callable[[], str]) -> list[str]:
        try:
            self.shared.said[self.world.rank] = work()
        except SpillwayError as error:
            self.shared.said[self.world.rank] = error
        self.shared.barrier.wait(60)
        found = list(self.shared.said)
        self.shared.barrier.wait(60)
        for one in found:
            if isinstance(one, SpillwayError):
                raise one
        return found

    def first(self, label: str, work: Callable[[], Any]) -> Any:
        found = self.each(label, work if self.world.is_first else str)[0]
        return found if self.world.is_first else None

    def tell(self, label: str, work: Callable[[], str]) -> str:
        return self.each(label, work if self.world.is_first else str)[0]


def pieces(rank: int) -> Iterator[tuple[str, Tensor]]:
    for name, whole in WHOLE.items():
        piece = whole.reshape(-1).tensor_split(WORLD)[rank]
        if piece.numel() or (not whole.numel() and rank == 0):
            yield name, piece.clone().view(whole.shape if piece.numel() == whole.numel() else (-1,))


def saved(epoch: Epoch, of: Callable[[int], Iterable[tuple[str, Tensor]]] = pieces) -> list[Any]:
    """What every rank gets: a checkpoint, None, or an error."""
    shared = Shared()

    def attempt(rank: int) -> StoredCheckpoint | SpillwayError | None:
        ranks: Any = ThreadRank(World(rank, rank, WORLD), shared)
        try:
            own = epoch if rank == 0 else None
            return save_in_pieces(ranks, own, training_state(10), of(rank), SHAPES, lambda committed: committed)
        except SpillwayError as error:
            return error

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(attempt, range(WORLD)))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_readers_get_whole_tensors(tmp_path: Path) -> None:
    committed, *others = saved(Epoch.start(tmp_path, 1))
    assert others == [None, None]
    assert choose_resume(tmp_path).checkpoint == committed
    found = dict(read(committed, committed.manifest.tensors))
    assert list(found) == list(WHOLE)
    for name, whole in WHOLE.items():
        assert (found[name].shape, found[name].dtype) == (whole.shape, whole.dtype)
        assert found[name].view(-1).view(torch.uint8).tolist() == whole.view(-1).view(torch.uint8).tolist(), name


@pytest.mark.parametrize("in_pieces", [False, True])
def test_ranges_are_those_of_the_whole_tensor(tmp_path: Path, in_pieces: bool) -> None:
    epoch = Epoch.start(tmp_path, 1)
    whole = {**WHOLE, "master.scalar": torch.tensor(2.5)}
    stored = saved(epoch)[0] if in_pieces else save(epoch, training_state(10), iter(whole.items()))
    for name in stored.manifest.tensors.keys() & whole:
        values, size = whole[name].reshape(-1), whole[name].numel()
        for start, end in itertools.combinations(range(size + 1), 2):
            ((_, found),) = read_ranges(stored, {name: (start, end)})
            assert torch.equal(found.view(torch.uint8), values[start:end].view(torch.uint8)), (name, start, end)


def test_each_rank_writes_files_of_its_own(tmp_path: Path) -> None:
    committed = saved(Epoch.start(tmp_path, 1))[0]
    assert names(committed.path) == ["manifest.json", *(f"rank-{rank}-00000.safetensors" for rank in range(WORLD))]
    manifest = unseal((committed.path / "manifest.json").read_bytes())
    assert manifest["version"] == PIECES_VERSION
    b = {"files": ["rank-0-00000.safetensors", "rank-1-00000.safetensors"], "sizes": [1, 1], "shape": [2]}
    assert manifest["tensors"]["master.b"] == b


def test_what_was_read_back_needs_no_further_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = Epoch.start(tmp_path, 1)
    stored = saved(epoch)[0]
    monkeypatch.setattr(directory, "verify_checkpoint", lambda path: pytest.fail(f"reads {path}"))
    assert epoch.verified == {stored.manifest.name}
    assert epoch.prune(keep=1) == []


@pytest.mark.parametrize("change", [{"sizes": [2, 1]}, {"sizes": [2]}, {"sizes": [3, -1]}, {"files": [], "sizes": []}])
def test_pieces_that_do_not_make_up_their_tensor_are_a_damaged_manifest(tmp_path: Path, change: dict[str, Any]) -> None:
    path = saved(Epoch.start(tmp_path, 1))[0].path / "manifest.json"
    manifest = unseal(path.read_bytes())
    manifest["tensors"]["master.b"] |= change
    path.write_bytes(seal(manifest))
    (problem,) = verify(path.parent)
    assert (problem.file, problem.expected) == ("manifest.json", "an intact manifest")


def test_a_damaged_piece_is_a_problem_of_its_file(tmp_path: Path) -> None:
    committed = saved(Epoch.start(tmp_path, 1))[0]
    flip_bit(committed.path / "rank-2-00000.safetensors", 1500)
    (problem,) = verify(committed.path)
    assert problem.file == "rank-2-00000.safetensors"


@pytest.mark.parametrize("full", range(WORLD))
def test_a_rank_with_a_full_disk_makes_all_miss_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int) -> None:
    write = DurableFiles.write

    def rejected(files: DurableFiles, path: Path, chunks: Iterable[memoryview]) -> Any:
        if path.name.startswith(f"rank-{full}"):
            raise OSError(28, "No space left on device", str(path))
        return write(files, path, chunks)

    epoch = Epoch.start(tmp_path, 1)
    monkeypatch.setattr(DurableFiles, "write", rejected)
    found = saved(epoch)
    assert [type(one) for one in found] == [CheckpointNotWritten] * WORLD
    assert f"step-10.e1: this checkpoint was not written: No space left on device ({tmp_path}" in str(found[0])
    assert names(tmp_path) == ["epoch-1.json"]


def test_a_directory_that_is_removed_is_not_called_a_full_disk(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    epoch = Epoch.start(directory, 1)
    shutil.rmtree(directory)
    found = saved(epoch)
    assert [type(one) for one in found] == [CheckpointNotWritten] * WORLD
    assert str(found[0]).endswith(
        f"not written: No such file or directory ({directory}/step-10.e1.tmp). The directory with the checkpoints was "
        "removed or unmounted: restore it"
    )


def test_all_are_fenced_when_a_later_attempt_removes_their_directory(tmp_path: Path) -> None:
    epoch = Epoch.start(tmp_path, 1)

    def late(rank: int) -> Iterator[tuple[str, Tensor]]:
        if rank == 2:
            Epoch.start(tmp_path, 2)
        yield from pieces(rank)

    assert [type(one) for one in saved(epoch, late)] == [Fenced] * WORLD
    assert names(tmp_path) == ["epoch-1.json", "epoch-2.json"]


def test_a_file_that_reads_back_differently_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = DurableFiles.write

    def damaged(files: DurableFiles, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        entry = write(files, path, chunks)
        if path.name.startswith("rank-1"):
            flip_bit(path, 1500)
        return entry

    epoch = Epoch.start(tmp_path, 1)
    monkeypatch.setattr(DurableFiles, "write", damaged)
    found = saved(epoch)
    assert [type(one) for one in found] == [CheckpointNotWritten] * WORLD
    assert "what was read back differs from what was written" in str(found[0])
    assert names(tmp_path) == ["epoch-1.json"]


def test_a_rank_that_still_writes_does_not_stop_the_next_attempt(tmp_path: Path) -> None:
    class Late(DurableFiles):
        """A file appears while its directory is removed."""

        def remove_tree(self, path: Path) -> None:
            if path.is_dir():
                raise OSError(39, "Directory not empty", str(path))
            super().remove_tree(path)

    (tmp_path / "step-10.e1.tmp").mkdir()
    Epoch.start(tmp_path, 2, Late())
    assert names(tmp_path) == ["epoch-2.json", "step-10.e1.tmp"]
    Epoch.start(tmp_path, 3)
    assert names(tmp_path) == ["epoch-2.json", "epoch-3.json"]
