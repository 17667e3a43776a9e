"""Writes run.jsonl: one JSON object per event, readable during the run and after a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway.plan import Tier

LONGEST_END_BYTES = 1 << 16
"""Most bytes of the line of an `end`, with its message."""


class OutputNotWritten(UserError):
    """The disk rejected the run's reports."""


class Sink(Protocol):
    """Shows the run elsewhere: /metrics, the operator. Never makes the step loop wait."""

    def step(self, step: StepMetrics) -> None: ...

    def evaluation(self, loss: float) -> None: ...

    def checkpoint(self, step: int) -> None: ...


class Recorder:
    """Appends events to run.jsonl and shows them to the sinks. Without a path it only shows them: a run has one
    run.jsonl, and rank 0 writes it.

    Events: preparing, start, activations_chosen, activations_corrected, step, evaluation, checkpoint,
    checkpoint_missed, end. After a resume, step numbers repeat: the last line of a step counts. Raises OutputNotWritten
    if the disk rejects a line.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            with rejections(path):
                self._file = open_for_append(path)
        self._sinks: tuple[Sink, ...] = ()
        self.num_missed = 0
        """Checkpoints that the disk rejected."""

    def show(self, *sinks: Sink) -> None:
        """From now on, every step, evaluation and checkpoint is shown to `sinks`, which replace the earlier ones."""
        self._sinks = sinks

    def preparing(self, doing: str) -> None:
        """Records what an attempt does before it trains."""
        self._write("preparing", {"doing": doing})

    def start(self, **fields: object) -> None:
        self._write("start", fields)

    def step(self, step: StepMetrics) -> None:
        for sink in self._sinks:
            sink.step(step)
        self._write("step", {**dataclasses.asdict(step), "tokens_per_second": step.tokens_per_second})

    def activations_chosen(
        self, reason: str, stall_seconds: float, pass_seconds: float, tier_bytes: Mapping[Tier, int]
    ) -> None:
        """Records where single storages of a forward wait from now on, and how long forward and backward should then
        take."""
        self._write(
            "activations_chosen",
            {
                "reason": reason,
                "stall_seconds": stall_seconds,
                "pass_seconds": pass_seconds,
                "tier_bytes": dict(tier_bytes),
            },
        )

    def activations_corrected(
        self, step: int, reason: str, activations: int, host_bytes: int, spill_file_bytes: int
    ) -> None:
        """Records that saved storages moved from the spill file, which is smaller now, to host memory after `step`, and
        how many bytes they may take of each from now on: of host memory, in addition to the plan's."""
        self._write(
            "activations_corrected",
            {
                "step": step,
                "reason": reason,
                "activations": activations,
                "host_bytes": host_bytes,
                "spill_file_bytes": spill_file_bytes,
            },
        )

    def evaluation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        for sink in self._sinks:
            sink.evaluation(loss)
        self._write("evaluation", {"step": step, "loss": loss, "tokens": tokens, "seconds": seconds})

    def checkpoint(self, step: int, nbytes: int, seconds: float, stalled_seconds: float) -> None:
        """Records a committed checkpoint. One that was written while training continued is recorded some steps
        later."""
        for sink in self._sinks:
            sink.checkpoint(step)
        seen = {"seconds": seconds, "stalled_seconds": stalled_seconds}
        self._write("checkpoint", {"step": step, "bytes": nbytes, **seen})

    def checkpoint_missed(self, step: int, problem: str) -> None:
        """Records that the disk rejected a checkpoint; training continues, and the earlier ones remain."""
        self.num_missed += 1
        self._write("checkpoint_missed", {"step": step, "problem": problem})

    def end(self, step: int, reason: str, exit_code: int, message: str) -> None:
        self._write("end", {"step": step, "reason": reason, "exit_code": exit_code, "message": message})

    @property
    def has_ended(self) -> bool:
        """Whether the last line is an `end`."""
        assert self._path is not None
        with self._path.open("rb") as written:
            written.seek(max(0, os.fstat(written.fileno()).st_size - LONGEST_END_BYTES))
            return written.read().rpartition(b'{"event": "')[2].startswith(b"end")

    def _write(self, event: str, fields: dict[str, object]) -> None:
        if self._path is None:
            return
        finite = {name: None if is_non_finite(value) else value for name, value in fields.items()}
        line = json.dumps({"event": event, "time": time.time(), **finite}, allow_nan=False)
        with rejections(self._path):
            self._file.write(line + "\n")
            self._file.flush()


@contextmanager
def rejections(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputNotWritten(
            f"{path}: cannot be written: {error.strerror or error}; free space, or use a writable output directory"
        ) from error


def is_non_finite(value: object) -> bool:
    """Whether `value` is infinite or NaN, which JSON cannot express: such a norm or loss is written as null."""
    return isinstance(value, float) and not math.isfinite(value)


def open_for_append(path: Path) -> TextIO:
    """Opens a file to append whole lines: a line that a killed process left half-written is ended first."""
    file = path.open("a+", encoding="utf-8")
    end = file.seek(0, 2)
    if end:
        with path.open("rb") as existing:
            existing.seek(end - 1)
            if existing.read(1) != b"\n":
                file.write("\n")
    return file
