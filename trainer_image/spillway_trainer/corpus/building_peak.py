"""What the pod that built a corpus took until it was there, kept beside the shards: a later attempt finds the corpus
built, and its own cgroup has not seen what that takes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from spillway.planning.pod_resources import CORPUS_BUILD_BYTES

from ..cgroup import peak_memory_bytes, read_text
from .tokens import SAMPLE_BYTES

PEAK_FILE = "pod-peak"
"""In the corpus' directory: bytes, as decimal digits."""
MOST_DIGITS = 18


def room_for_more_text(text_bytes: int) -> int:
    """What building takes more, at most, of a text that has grown: the tokenizer is trained on a sample."""
    return int(CORPUS_BUILD_BYTES * max(0.0, 1.0 - text_bytes / SAMPLE_BYTES))


def peak_of_building(directory: Path, room_bytes: int, *, is_new: bool, root: Path = Path("/")) -> int:
    """Bytes, with `room_bytes`, when this attempt has just built the corpus (`is_new`); else as they were kept. 0 where
    nobody said, or nothing limits the process.

    What cannot be kept is no evidence for a later attempt, and no error.
    """
    file = directory / PEAK_FILE
    if not is_new:
        said = read_text(file)
        return int(said) if said.isdecimal() and said.isascii() and len(said) <= MOST_DIGITS else 0
    peak = peak_memory_bytes(root)
    if peak:
        peak += room_bytes
        with suppress(OSError):
            written = file.with_name(f"{PEAK_FILE}.{os.getpid()}.tmp")
            written.write_text(str(peak), encoding="ascii")
            written.replace(file)  # a part of the digits would be a lie
    return peak
