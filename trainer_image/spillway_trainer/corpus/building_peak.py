"""Peak memory of the pod that built a corpus, kept beside the shards: a later attempt finds the corpus built, so its
own cgroup has not seen what building takes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from spillway.planning.pod_resources import CORPUS_BUILD_BYTES

from ..cgroup import peak_memory_bytes, read_text
from .tokens import SAMPLE_BYTES

PEAK_FILE = "pod-peak"
"""File in the corpus directory that holds the bytes as decimal digits."""
MOST_DIGITS = 18


def room_for_more_text(text_bytes: int) -> int:
    """Returns the most bytes that building takes in addition if the text grows: a sample of limited size trains the
    tokenizer."""
    return int(CORPUS_BUILD_BYTES * max(0.0, 1.0 - text_bytes / SAMPLE_BYTES))


def peak_of_building(directory: Path, room_bytes: int, *, is_new: bool, root: Path = Path("/")) -> int:
    """Returns the peak in bytes: measured and increased by `room_bytes` if this attempt has just built the corpus
    (`is_new`), else as it was kept; 0 if no value was kept, or if nothing limits the process.

    If the value cannot be written, a later attempt has none; that is no error.
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
            written.replace(file)  # atomic: no reader sees only some of the digits
    return peak
