"""What an encrypted spill file leaves on the device, and that faults are found as without: on every engine."""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spillway.errors import SpillIOError, SpillVolumeFull
from spillway_trainer.kernels.io_engine import Direction, SystemCall, system_call
from spillway_trainer.tiers import encrypted_file, nvme_slab
from spillway_trainer.tiers.encrypted_file import encrypted
from spillway_trainer.tiers.nvme_slab import NvmeSlab, ScratchFile
from spillway_trainer.tiers.spill_file import SpillFile

PAGE, AES_BLOCK = 4096, 16
FILE_PAGES = 16

pytestmark = pytest.mark.usefixtures("engine")


def memory(num_pages: int, seed: int | None = None) -> Tensor:
    tensor = torch.frombuffer(mmap.mmap(-1, num_pages * PAGE), dtype=torch.uint8)
    return tensor if seed is None else tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def opened(directory: Path, call: SystemCall | None = None) -> ScratchFile:
    return encrypted(partial(SpillFile, call=call))(directory, FILE_PAGES * PAGE, num_threads=2)


def on_device(directory: Path, process: int | str = "self") -> list[bytes]:
    """What lies in each file that a process has open there."""
    links = [Path(f"/proc/{process}/fd", name) for name in sorted(os.listdir(f"/proc/{process}/fd"), key=int)]
    return [link.read_bytes() for link in links if os.path.realpath(link).startswith(f"{directory}/")]


def blocks(content: bytes) -> set[bytes]:
    return {content[at : at + AES_BLOCK] for at in range(0, len(content), AES_BLOCK)}


def test_no_block_of_what_was_written_lies_in_the_file(tmp_path: Path) -> None:
    file, written = opened(tmp_path), memory(4, seed=1)
    before = written.clone()
    file.write_batch([(2 * PAGE, written, "x")])
    [content] = on_device(tmp_path)
    assert len(blocks(content)) >= 4 * PAGE // AES_BLOCK, "it was written"
    assert not blocks(content) & blocks(bytes(written.tolist()))
    assert torch.equal(written, before), "what is written stays as it is: others may still need it"
    file.close()


def test_equal_blocks_and_repeated_writes_never_encrypt_to_the_same_bytes(tmp_path: Path) -> None:
    file = opened(tmp_path)
    same = memory(4).fill_(7)
    found: Counter[bytes] = Counter()
    for _ in range(3):  # the third write of one place
        file.write_batch([(0, same, "a"), (4 * PAGE, same, "b")])
        [content] = on_device(tmp_path)
        found.update(blocks(content[: 8 * PAGE]))
    assert set(found.values()) == {1}
    assert len(found) == 3 * 8 * PAGE // AES_BLOCK
    file.close()


def test_every_file_and_every_process_has_a_key_of_its_own(tmp_path: Path) -> None:
    written, contents = memory(1, seed=1), []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        file = opened(tmp_path / name)
        file.write_batch([(0, written, "x")])
        contents += on_device(tmp_path / name)
        file.close()
    (tmp_path / "child").mkdir()
    done, child_end = os.pipe()
    go_on, parent_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            opened(tmp_path / "child").write_batch([(0, written, "x")])
            os.write(child_end, b".")
            os.read(go_on, 1)
        finally:
            os._exit(0)
    os.close(child_end)
    assert os.read(done, 1) == b"."
    contents += on_device(tmp_path / "child", child)
    os.write(parent_end, b".")
    os.waitpid(child, 0)
    assert len({content[:PAGE] for content in contents}) == 3
    for descriptor in (done, go_on, parent_end):
        os.close(descriptor)


def test_what_was_written_comes_back_over_several_bounce_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted_file, "BOUNCE_BYTES", 2 * PAGE)
    file = opened(tmp_path)
    written = [memory(5, seed=1), memory(1, seed=2), memory(2, seed=3), memory(1, seed=4)]
    offsets = [0, 5 * PAGE, 6 * PAGE, 9 * PAGE]
    tokens = file.write_batch([(o, t, "x") for o, t in zip(offsets, written, strict=True)])
    found = [memory(tensor.numel() // PAGE) for tensor in written]
    file.read_batch([(o, t, token, "x") for o, t, token in zip(offsets, found, tokens, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(found, written, strict=True))
    file.close()


def test_a_bit_that_the_device_flipped_is_an_error(tmp_path: Path) -> None:
    def flip(direction: Direction, file: int, view: memoryview, offset: int) -> int:
        moved = system_call(direction, file, view, offset)
        if direction is Direction.READ:
            view[777] ^= 4
        return moved

    file = opened(tmp_path, flip)
    [token] = file.write_batch([(0, memory(1, seed=1), "x")])
    with pytest.raises(
        SpillIOError, match=r"read of layer 3 at offset 0: .* differ from those written .checksum: expected"
    ):
        file.read_batch([(0, memory(1), token, "layer 3")])
    file.close()


def test_bytes_of_an_older_write_are_an_error(tmp_path: Path) -> None:
    file = opened(tmp_path)
    [old] = file.write_batch([(0, memory(1, seed=1), "x")])
    file.write_batch([(0, memory(1, seed=1), "x")])  # the same ones
    with pytest.raises(SpillIOError, match="differ from those written"):
        file.read_batch([(0, memory(1), old, "x")])
    file.close()


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, SpillIOError), (errno.ENOSPC, SpillVolumeFull)])
def test_a_rejected_write_is_the_error_that_it_is_without(tmp_path: Path, number: int, error: type[Exception]) -> None:
    file = opened(tmp_path, lambda *_: -number)
    with pytest.raises(error, match="layer 3 at offset 4096"):
        file.write_batch([(PAGE, memory(1, seed=1), "layer 3")])
    file.close()


def test_a_child_process_reads_and_is_rejected_a_write(tmp_path: Path) -> None:
    """A write there would have a key and a tweak that its parent uses for other bytes."""
    file, written = opened(tmp_path), memory(1, seed=1)
    [token] = file.write_batch([(0, written, "x")])
    child = os.fork()
    if child == 0:
        try:
            found = memory(1)
            file.read_batch([(0, found, token, "x")])
            with pytest.raises(RuntimeError, match="written to in its child"):
                file.write_batch([(0, written, "x")])
            os._exit(0 if torch.equal(found, written) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file.close()


def test_the_backend_says_so_and_closing_may_be_repeated(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.backend.endswith("+AES-256-XTS")
    file.close()
    file.close()
    assert on_device(tmp_path) == []


def test_a_slab_of_several_encrypted_files_gives_back_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_slab, "STRIPE_BYTES", PAGE)
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    slab = NvmeSlab(places, 16 * PAGE, 1, open_file=encrypted(SpillFile))
    written, found = memory(8, seed=1), memory(8)
    [stored] = slab.write_batch([(slab.allocate(8 * PAGE, "x").at(0), written, "x")])
    slab.read_batch([(stored, found, "x")])
    assert torch.equal(found, written)
    assert isinstance(stored, tuple)
    assert len(stored) == 2, "striped"
    plain = blocks(bytes(written.tolist()))
    for place in places:
        assert not blocks(on_device(place)[0]) & plain
    slab.close()
