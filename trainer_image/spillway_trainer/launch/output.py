"""Forwards the output of ranks in whole lines. If there are several ranks, each line is prefixed with its rank.

A thread reads and writes, so that a slow reader makes the ranks wait, but never the launcher.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from dataclasses import dataclass, field

LONGEST_LINE = 16 * 1024
"""Bytes; a longer line is split."""
AT_ONCE = 64 * 1024


@dataclass(slots=True)
class Stream:
    """One stream of one rank on its way to `target`."""

    rank: int
    source: int
    target: int
    prefix: bytes
    begun: bytes = b""
    """Beginning of a line whose end has not come yet."""


OF_NCCL, OF_DEVICE = (b"ProcessGroupNCCL",), (b"CUDA error", b"Cuda failure")
"""in torch's messages"""


@dataclass(slots=True)
class PrefixedOutput:
    """Pipes from the ranks to stdout and stderr. Nothing is lost while `finish` waits, except what a full disk rejects;
    a target without a reader is dropped, and its ranks continue."""

    streams: list[Stream] = field(default_factory=list)
    last_lines: dict[int, str] = field(default_factory=dict)
    """Rank -> its last line that is not empty."""
    of_nccl: set[int] = field(default_factory=set)
    of_device: set[int] = field(default_factory=set)
    """Ranks in whose output torch's NCCL group reports something, and those whose output has an error of CUDA."""
    _thread: threading.Thread | None = None

    def pipe(self, rank: int, target: int, prefix: str) -> int:
        """Returns the writing end for a stream of `rank`; the caller closes it once the rank has it."""
        source, sink = os.pipe()
        self.streams.append(Stream(rank, source, target, prefix.encode()))
        return sink

    def start(self) -> None:
        self._thread = threading.Thread(target=self._relay, daemon=True, name="output")
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Waits at most `seconds` for what is still in the pipes; a child of a rank may hold one open for longer."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _relay(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self.streams:
                selector.register(stream.source, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select():
                    stream = key.data
                    if not self._pass_on(stream, os.read(stream.source, AT_ONCE)):
                        selector.unregister(stream.source)
                        os.close(stream.source)

    def _pass_on(self, stream: Stream, content: bytes) -> bool:
        """Writes the lines that are complete by now; returns False at the stream's end."""
        lines, stream.begun = cut(stream.begun + content, ended=not content)
        if said := [line for line in lines if line.strip()]:
            self.last_lines[stream.rank] = said[-1].decode(errors="replace").strip()
        for ranks, marks in ((self.of_nccl, OF_NCCL), (self.of_device, OF_DEVICE)):
            if any(mark in line for mark in marks for line in said):
                ranks.add(stream.rank)
        write_all(stream, b"".join(stream.prefix + line + b"\n" for line in lines))
        return bool(content)


def cut(content: bytes, ended: bool) -> tuple[list[bytes], bytes]:
    """Returns whole lines of at most LONGEST_LINE bytes, and the beginning of the next line (empty if the stream has
    ended). A carriage return, with which progress bars begin again, ends a line, too."""
    *whole, rest = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    lines = [line[at : at + LONGEST_LINE] for line in whole for at in range(0, len(line) or 1, LONGEST_LINE)]
    while len(rest) > LONGEST_LINE or (ended and rest):
        lines.append(rest[:LONGEST_LINE])
        rest = rest[LONGEST_LINE:]
    return lines, rest


def write_all(stream: Stream, content: bytes) -> None:
    while content and stream.target >= 0:
        try:
            content = content[os.write(stream.target, content) :]
        except BlockingIOError:  # a process that shares our stdout may have made it non-blocking
            select.select([], [stream.target], [])
        except BrokenPipeError:
            stream.target = -1
        except OSError:  # a full disk, which may have room for the next lines: training matters more than its output
            return
