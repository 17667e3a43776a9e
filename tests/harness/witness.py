"""What the machine shows of a job's pods while they live, for tests on the test bed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from harness.installed import Document, Installed
from spillway_trainer.checkpoints.manifest import CheckpointName, open_checkpoint
from testbed.layout import state


@dataclass
class Witness:
    """What the machine shows of a job's pods while they live."""

    journals: dict[str, TextIO] = field(default_factory=dict)
    """uid of a pod -> its run.jsonl, oldest first: an open file outlives its pod"""
    highest_bytes: dict[str, int] = field(default_factory=dict)
    """uid of a pod -> what its memory cgroup held at most"""

    def look(self, uid: str) -> None:
        group = next(Path("/sys/fs/cgroup/memory/kubepods").rglob(f"pod{uid}"), None)
        if group is not None:
            peak = int((group / "memory.max_usage_in_bytes").read_text("ascii"))
            self.highest_bytes[uid] = max(peak, self.highest_bytes.get(uid, 0))
        folder = next(state().root.rglob(f"pods/{uid}/volumes/kubernetes.io~empty-dir/work"), None)
        if folder is not None and uid not in self.journals:
            self.journals[uid] = (folder / "output" / "run.jsonl").open(encoding="utf-8")

    def losses(self) -> list[dict[int, float]]:
        """Of each attempt that began to train, by step."""
        curves = [{one["step"]: one["loss"] for one in found if one["event"] == "step"} for found in self.events()]
        return [curve for curve in curves if curve]

    def corrections(self) -> list[Document]:
        """Of all attempts."""
        return [one for found in self.events() for one in found if one["event"] == "activations_corrected"]

    def events(self) -> list[list[Document]]:
        """Of each attempt."""
        for journal in self.journals.values():
            journal.seek(0)
        return [[json.loads(line) for line in journal if line.endswith("\n")] for journal in self.journals.values()]


@contextmanager
def watched(spillway: Installed, namespace: str, name: str) -> Iterator[Witness]:
    witness, ended = Witness(), Event()

    def watch() -> None:
        while not ended.wait(0.2):
            for pod in spillway.children("pod", namespace, name):
                try:
                    witness.look(pod["metadata"]["uid"])
                except OSError:  # not there yet, or gone
                    continue

    thread = Thread(target=watch)
    thread.start()
    try:
        yield witness
    finally:
        ended.set()
        thread.join()


def files_of(folder: Path, name: str, steps: int) -> dict[str, str]:
    """Hashes of the last checkpoint: parameters, optimizer states and all else that training goes on from."""
    (directory,) = (path for path in folder.iterdir() if path.name.startswith(f"{name}-"))
    parsed = [(found, path) for path in directory.iterdir() if (found := CheckpointName.parse(path.name)) is not None]
    newest, path = max(parsed)
    assert newest.step == steps
    return {entry.name: entry.xxh3_128 for entry in open_checkpoint(path).manifest.files}
