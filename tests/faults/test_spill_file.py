"""SpillFile under faults, on every engine: an operation succeeds with the right bytes or raises; never wrong bytes."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import random
import resource
import stat
import threading
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.depth import FULL
from spillway.errors import SpillIOError, SpillVolumeFull, UserError
from spillway_trainer.kernels import native
from spillway_trainer.kernels.io_engine import Direction, SystemCall, system_call
from spillway_trainer.tiers import spill_file
from spillway_trainer.tiers.spill_file import BLOCK_BYTES, Read, SpillFile, Write

MIB = 1 << 20
NUM_OPERATIONS, SEED = (200_000 if FULL else 10_000), 1


pytestmark = pytest.mark.usefixtures("engine")


def memory(nbytes: int, seed: int | None = None) -> Tensor:
    """Page-aligned bytes, random for a seed."""
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if seed is not None:
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return tensor


class Calls:
    """In place of pread and pwrite: the first calls answer from `script` (None: go through), the rest go through."""

    def __init__(self, *script: int | None) -> None:
        self.script = list(script)
        self.made: list[tuple[Direction, int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        with self._lock:
            self.made.append((direction, offset, len(memory)))
            answer = self.script.pop(0) if self.script else None
        if answer is None:
            return system_call(direction, file, memory, offset)
        if answer <= 0:
            return answer
        return system_call(direction, file, memory[:answer], offset)


def opened(directory: Path, nbytes: int = 16 * MIB, call: SystemCall | None = None, num_threads: int = 2) -> SpillFile:
    return SpillFile(directory, nbytes, num_threads=num_threads, call=call)


def test_bytes_written_come_back(tmp_path: Path) -> None:
    file = opened(tmp_path, 20 * MIB)
    written = [memory(9 * MIB + BLOCK_BYTES, seed=1), memory(BLOCK_BYTES, seed=2), memory(5 * MIB, seed=3)]
    offsets = [0, 10 * MIB, 11 * MIB]
    checksums = file.write_batch(list(zip(offsets, written, strict=True)))
    found = [memory(len(tensor)) for tensor in written]
    file.read_batch([(o, t, c, "x") for o, t, c in zip(offsets, found, checksums, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(found, written, strict=True))
    file.close()


def test_checksum_of_many_pieces_is_that_of_the_whole(tmp_path: Path, engine: str) -> None:
    written = memory(13 * MIB, seed=1)
    [checksum] = opened(tmp_path).write_batch([(0, written)])
    known = zlib.crc32(written.numpy()) if engine == "python" else native.crc32c(written)
    assert checksum == known


def test_large_requests_are_cut_into_pieces_of_4_mib(tmp_path: Path) -> None:
    calls = Calls()
    opened(tmp_path, call=calls).write_batch([(0, memory(9 * MIB)), (12 * MIB, memory(BLOCK_BYTES))])
    pieces = sorted((offset, nbytes) for _, offset, nbytes in calls.made)
    assert pieces == [(0, 4 * MIB), (4 * MIB, 4 * MIB), (8 * MIB, MIB), (12 * MIB, BLOCK_BYTES)]


@pytest.mark.parametrize("answer", [512, 4096, 12288, 1000, -errno.EINTR, -errno.EAGAIN])
@pytest.mark.parametrize("direction", list(Direction))
def test_short_and_interrupted_transfers_are_completed(tmp_path: Path, direction: Direction, answer: int) -> None:
    buffered_only = answer == 1000  # O_DIRECT gives no such count; the rest of the sector is moved again
    calls = Calls()
    file = opened(tmp_path, call=calls)
    if buffered_only and file.is_direct:
        answer = 1024
    written, found = memory(64 * 1024, seed=1), memory(64 * 1024)
    calls.script = [answer] if direction is Direction.WRITE else [None, answer]
    [checksum] = file.write_batch([(8192, written)])
    file.read_batch([(8192, found, checksum, "x")])
    assert torch.equal(found, written)
    assert len(calls.made) == 3


def test_a_count_inside_a_sector_resumes_at_the_start_of_that_sector(tmp_path: Path) -> None:
    calls: list[int] = []

    def call(direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        calls.append(offset)
        moved = system_call(direction, file, memory, offset)
        return 1000 if len(calls) == 1 else moved

    opened(tmp_path, call=call).write_batch([(8192, memory(8192))])
    assert calls == [8192, 8192 + 512]


@pytest.mark.parametrize("answer", [-errno.EINTR, -errno.EAGAIN, 0])
def test_a_write_that_never_moves_is_given_up(tmp_path: Path, answer: int) -> None:
    file = opened(tmp_path, call=lambda *_: answer)
    with pytest.raises(SpillIOError):
        file.write_batch([(0, memory(BLOCK_BYTES))])


@pytest.mark.parametrize("direction", list(Direction))
def test_eio_names_label_offset_and_errno(tmp_path: Path, direction: Direction) -> None:
    calls = Calls()
    file = opened(tmp_path, call=calls)
    [checksum] = file.write_batch([(0, memory(8192))])
    calls.script = [4096, -errno.EIO]
    write = functools.partial(file.write_batch, [Write(0, memory(8192), "block3.mlp")])
    read = functools.partial(file.read_batch, [Read(0, memory(8192), checksum, "block3.mlp")])
    perform = write if direction is Direction.WRITE else read
    with pytest.raises(SpillIOError, match=r"of block3.mlp at offset 4096: Input/output error \(errno 5\)") as caught:
        perform()
    assert caught.value.details == {"label": "block3.mlp", "offset": 4096, "errno": errno.EIO}


@pytest.mark.parametrize("os_error", [errno.ENOSPC, errno.EDQUOT])
def test_a_volume_that_fills_up_is_named_with_wanted_and_free_bytes(tmp_path: Path, os_error: int) -> None:
    file = opened(tmp_path, call=Calls(-os_error))
    with pytest.raises(
        SpillVolumeFull, match=rf"{tmp_path}: no room for block0 .* 8192 bytes .* are needed, \d+ bytes"
    ):
        file.write_batch([Write(0, memory(8192), "block0")])


def test_a_flipped_bit_is_a_checksum_error_naming_expected_and_found(tmp_path: Path) -> None:
    file = opened(tmp_path)
    written = memory(8 * MIB, seed=1)
    [checksum] = file.write_batch([(0, written)])
    written[5 * MIB] ^= 1
    [other] = file.write_batch([(0, written)])
    with pytest.raises(SpillIOError, match=f"block1.*expected {checksum:#010x}, found {other:#010x}"):
        file.read_batch([Read(0, memory(8 * MIB), checksum, "block1")])


def test_an_extent_that_was_never_written_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    with pytest.raises(SpillIOError, match="checksum"):
        opened(tmp_path).read_batch([Read(0, memory(8192), 0x12345678, "block0")])


def test_a_truncated_file_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    file = opened(tmp_path)
    [checksum] = file.write_batch([(0, memory(8192))])
    os.ftruncate(file._file, 4096)
    with pytest.raises(SpillIOError, match="at offset 4096: the spill file is shorter"):
        file.read_batch([Read(0, memory(8192), checksum, "block0")])


def test_the_first_failure_in_request_order_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def call(direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        return -errno.EIO if offset >= 8192 else system_call(direction, file, memory, offset)

    with pytest.raises(SpillIOError, match="second"):
        opened(tmp_path, call=call).write_batch(
            [Write(i * 8192, memory(8192), name) for i, name in enumerate(("first", "second", "third"))]
        )


class RandomFaults:
    """Every call fails with the given probability, in one of five ways."""

    def __init__(self, probability: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._probability = probability
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, direction: Direction, file: int, memory: memoryview, offset: int) -> int:
        with self._lock:
            self.counts["calls"] += 1
            fault = ""
            if self._random.random() < self._probability:
                fault = self._random.choice(["short", "eintr", "eio", "enospc", "flip"])
                self.counts[fault] += 1
            bit = self._random.randrange(8 * len(memory))
        if fault == "short":
            return system_call(direction, file, memory[: max(512, len(memory) // 2 // 512 * 512)], offset)
        if fault in ("eintr", "eio", "enospc"):
            return -{"eintr": errno.EINTR, "eio": errno.EIO, "enospc": errno.ENOSPC}[fault]
        if fault == "flip" and direction is Direction.WRITE:
            with mmap.mmap(-1, len(memory)) as wrong, memoryview(wrong) as view:
                view[:] = memory
                view[bit // 8] ^= 1 << bit % 8
                return system_call(direction, file, view, offset)
        moved = system_call(direction, file, memory, offset)
        if fault == "flip" and moved > 0:
            memory[bit // 8 % moved] ^= 1 << bit % 8
        return moved


def test_operations_with_one_percent_of_faults_have_no_silent_error(tmp_path: Path, engine: str) -> None:
    """Random batches over 64 extents; a model in memory says what each extent must hold. In full: 200,000."""
    faults = RandomFaults(0.01, SEED)
    file = opened(tmp_path, 64 * 8192, call=faults)
    choose = random.Random(SEED + 1)
    contents = [memory(8192, seed=seed) for seed in range(32)]
    targets = [memory(8192) for _ in range(8)]
    held: dict[int, tuple[int, int]] = {}  # extent -> (content, checksum)
    silent = raised = 0
    while faults.counts["calls"] < NUM_OPERATIONS:
        extents = choose.sample(range(64), 8)
        if choose.random() < 0.5 or not all(extent in held for extent in extents):
            picked = [choose.randrange(32) for _ in extents]
            try:
                checksums = file.write_batch([(e * 8192, contents[c]) for e, c in zip(extents, picked, strict=True)])
                held |= {e: (c, s) for e, c, s in zip(extents, picked, checksums, strict=True)}
            except (SpillIOError, SpillVolumeFull):
                raised += 1
                held = {extent: content for extent, content in held.items() if extent not in extents}
        else:
            try:
                file.read_batch([(e * 8192, t, held[e][1], str(e)) for e, t in zip(extents, targets, strict=True)])
                wanted = [contents[held[e][0]] for e in extents]
                silent += sum(not torch.equal(t, w) for t, w in zip(targets, wanted, strict=True))
            except (SpillIOError, SpillVolumeFull):
                raised += 1
                held = {extent: content for extent, content in held.items() if extent not in extents}
    print(f"\n{engine}, seed {SEED}: {dict(faults.counts)}; operations that raised: {raised}; silent errors: {silent}")
    assert min(faults.counts[kind] for kind in ("short", "eintr", "eio", "enospc", "flip")) > 0
    assert raised > 0
    assert silent == 0


def test_several_threads_may_use_one_file_at_a_time(tmp_path: Path) -> None:
    file = opened(tmp_path, 64 * MIB, num_threads=3)
    failures: list[str] = []

    def work(index: int) -> None:
        written, found = memory(2 * MIB, seed=index), memory(2 * MIB)
        for _ in range(10):
            [checksum] = file.write_batch([(index * 4 * MIB, written)])
            file.read_batch([(index * 4 * MIB, found, checksum, "x")])
            if not torch.equal(written, found):
                failures.append(f"thread {index} read other bytes")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_file_has_no_name_and_its_bytes_are_reserved(tmp_path: Path) -> None:
    file = opened(tmp_path, 8 * MIB)
    status = os.fstat(file._file)
    assert os.listdir(tmp_path) == []
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 8 * MIB
    assert not os.get_inheritable(file._file)


def test_closing_frees_the_descriptor_and_may_be_repeated(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file = opened(tmp_path)
    file.write_batch([(0, memory(8192))])
    file.close()
    file.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="closed"):
        file.write_batch([(0, memory(8192))])


def test_the_backend_says_engine_and_mode(tmp_path: Path, engine: str) -> None:
    assert opened(tmp_path).backend in (f"{engine}+O_DIRECT", f"{engine}+buffered")


@pytest.fixture
def without_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that rejects O_DIRECT, as tmpfs did before Linux 6.6."""
    real_open = os.open

    def reject(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(spill_file.os, "open", reject)


@pytest.mark.usefixtures("without_direct_io")
def test_without_o_direct_the_file_is_buffered_and_says_so(tmp_path: Path, engine: str) -> None:
    file = opened(tmp_path)
    written, found = memory(8192, seed=1), memory(8192)
    [checksum] = file.write_batch([(0, written)])
    file.read_batch([(0, found, checksum, "x")])
    assert torch.equal(found, written)
    assert file.backend == f"{engine}+buffered"


def test_without_o_tmpfile_the_file_is_created_and_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def reject(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(spill_file.os, "open", reject)
    file = opened(tmp_path)
    assert os.listdir(tmp_path) == []
    assert os.fstat(file._file).st_nlink == 0


@pytest.fixture
def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_more_bytes_than_the_volume_has_are_rejected_and_nothing_is_left(tmp_path: Path, open_files: set[str]) -> None:
    wanted = 1 << 60
    with pytest.raises(SpillVolumeFull, match=rf"{tmp_path}: no room for the spill file .*{wanted} bytes") as caught:
        opened(tmp_path, wanted)
    assert caught.value.details["wanted_bytes"] == wanted
    assert caught.value.details["free_bytes"] == pytest.approx(os.statvfs(tmp_path).f_bavail * 4096, rel=0.5)
    assert (os.listdir(tmp_path), set(os.listdir("/proc/self/fd"))) == ([], open_files)


def test_file_larger_than_rlimit_fsize_is_rejected_and_leaves_nothing(tmp_path: Path, open_files: set[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))
    try:
        file = opened(tmp_path, 8 * MIB)
        file.close()
        with pytest.raises(SpillVolumeFull, match=rf"{tmp_path}: .* 8392704 .* 8388608 .*RLIMIT_FSIZE") as caught:
            opened(tmp_path, 8 * MIB + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.details["wanted_bytes"], caught.value.details["limit_bytes"]) == (8392704, 8 * MIB)
    assert (os.listdir(tmp_path), set(os.listdir("/proc/self/fd"))) == ([], open_files)


@pytest.mark.parametrize(
    ("os_error", "advice"),
    [
        (errno.ENOSPC, "free; free some space, give another directory"),
        (
            errno.EDQUOT,
            "free; raise the quota of this user or project, which is used up even if the disk has free space",
        ),
        (errno.EFBIG, "free; use more directories, because the file system allows no file of this size"),
    ],
)
def test_an_allocation_that_fails_says_what_helps(
    tmp_path: Path, os_error: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(file: int, offset: int, nbytes: int) -> None:
        raise OSError(os_error, os.strerror(os_error))

    monkeypatch.setattr(spill_file.os, "posix_fallocate", rejected)
    with pytest.raises(SpillVolumeFull, match=advice):
        opened(tmp_path)


def test_volume_that_fills_during_allocation_is_rejected_and_cleaned_up(
    tmp_path: Path, open_files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_file.os, "posix_fallocate", full)
    with pytest.raises(SpillVolumeFull, match="no room for the spill file"):
        opened(tmp_path)
    assert (os.listdir(tmp_path), set(os.listdir("/proc/self/fd"))) == ([], open_files)


def test_without_fallocate_the_bytes_are_reserved_by_writing_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(spill_file.os, "posix_fallocate", unsupported)
    file = opened(tmp_path, 9 * MIB + BLOCK_BYTES)
    assert os.fstat(file._file).st_size == 9 * MIB + BLOCK_BYTES


def test_a_directory_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"spill directory {tmp_path}/absent cannot be used .No such file or directory"):
        opened(tmp_path / "absent")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As root (who may write anywhere) this is tried with the effective user `nobody`."""
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=f"spill directory {tmp_path} cannot be used .Permission denied"):
            opened(tmp_path)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift"), [(100, 4096, 0), (0, 5000, 0), (0, 4096, 64), (16 * MIB, 4096, 0)]
)
def test_transfers_off_the_blocks_or_outside_the_file_are_rejected(
    tmp_path: Path, offset: int, nbytes: int, shift: int
) -> None:
    with pytest.raises(ValueError, match="block9"):
        opened(tmp_path).write_batch([Write(offset, memory(16384)[shift : shift + nbytes], "block9")])


def test_a_child_process_can_read_what_its_parent_wrote(tmp_path: Path) -> None:
    file = opened(tmp_path)
    written = memory(9 * MIB, seed=1)
    [checksum] = file.write_batch([(0, written)])
    child = os.fork()
    if child == 0:
        file.read_batch([(0, written, checksum, "x")])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_listed_file_has_a_private_name_until_it_is_closed(tmp_path: Path) -> None:
    """So the kubelet sees an emptyDir's bytes; `du` does, too."""
    file = SpillFile(tmp_path, 4 * MIB, listed=True)
    (found,) = tmp_path.iterdir()
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert found.stat().st_blocks * 512 >= 4 * MIB
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_listed_file_that_finds_no_room_leaves_no_name(tmp_path: Path) -> None:
    with pytest.raises(SpillVolumeFull):
        SpillFile(tmp_path, 1 << 60, listed=True)
    assert list(tmp_path.iterdir()) == []
