"""kill -9 at any time leaves no byte of a spill file behind, whatever moves its bytes."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from harness.depth import FULL
from harness.patience import wait_until
from spillway_trainer.tiers.nvme_slab import NvmeSlab

pytestmark = pytest.mark.ci

MIB = 1 << 20
NUM_KILLS, SEED = (100 if FULL else 15), 1


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, so that nobody else's bytes are counted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4 for a file system of its own")
    image, mounted = tmp_path / "image", tmp_path / "volume"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    ended = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        pytest.skip(f"no loop device can be mounted here: {ended.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)  # rejected while anything, also in the kernel, holds a file


def write_and_read_for_ever(directories: Sequence[Path], progress: int) -> None:
    """A byte to `progress` at each step: opened, and after every batch, which is striped over all directories."""
    slab = NvmeSlab(directories, 32 * MIB, 4)
    memory = torch.frombuffer(mmap.mmap(-1, 16 * MIB), dtype=torch.uint8)
    extent = slab.allocate(8 * MIB, "x")
    while True:
        os.write(progress, b".")
        [stored] = slab.write_batch([(extent.at(0), memory[: 8 * MIB], "x")])
        os.write(progress, b".")
        slab.read_batch([(stored, memory[8 * MIB :], "x")])


def started(*directories: Path) -> tuple[int, int]:
    """A child process that does so: its id, and the pipe that its progress comes from."""
    progress, child_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_and_read_for_ever(directories, child_end)
        finally:
            os._exit(1)
    os.close(child_end)
    return child, progress


def used_bytes(directory: Path) -> int:
    volume = os.statvfs(directory)
    return (volume.f_blocks - volume.f_bfree) * volume.f_frsize


@pytest.mark.parametrize("num_directories", [1, 3])
def test_a_killed_process_leaves_no_byte_in_any_spill_directory(
    volume: Path, engine: str, num_directories: int
) -> None:
    choose = random.Random(SEED)
    directories = [volume / name for name in "abc"[:num_directories]]
    for directory in directories:
        directory.mkdir()
    before = used_bytes(volume)
    for _ in range(NUM_KILLS):
        child, progress = started(*directories)
        for _ in range(choose.randrange(12)):  # none: while the file is being opened
            assert os.read(progress, 1) == b".", "the child ended by itself"
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(progress)
        assert [path for directory in directories for path in directory.iterdir()] == []
        # The kernel takes rings down after the process has ended.
        wait_until(lambda: used_bytes(volume) <= before, why=lambda: f"{used_bytes(volume) - before} bytes are in use")
    print(f"\n{engine}, {num_directories} directories, seed {SEED}: {NUM_KILLS} kills, 0 bytes left")


def test_a_killed_process_leaves_no_name_and_no_open_file(tmp_path: Path, engine: str) -> None:
    """What can be seen without a file system of one's own."""
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    child, progress = started(*directories)
    assert os.read(progress, 3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(progress)
    assert [path for directory in directories for path in directory.iterdir()] == []
    assert not [link for link in open_files() if link.startswith(str(tmp_path))]


def open_files() -> Iterator[str]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(link)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.ESRCH):
                raise
