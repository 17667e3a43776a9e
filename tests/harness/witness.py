"""Reads from this machine what a job's pods write and how much memory they use, for tests on the test bed."""

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
    """The journals and the highest memory use of a job's pods, collected while the pods exist."""

    journals: dict[str, TextIO] = field(default_factory=dict)
    """uid of a pod -> its run.jsonl, oldest pod first; the open file stays readable after the pod is gone"""
    highest_bytes: dict[str, int] = field(default_factory=dict)
    """uid of a pod -> highest memory use of its cgroup"""

    def look(self, uid: str) -> None:
        group = next(Path("/sys/fs/cgroup/memory/kubepods").rglob(f"pod{uid}"), None)
        if group is not None:
            peak = int((group / "memory.max_usage_in_bytes").read_text("ascii"))
            self.highest_bytes[uid] = max(peak, self.highest_bytes.get(uid, 0))
        folder = next(state().root.rglob(f"pods/{uid}/volumes/kubernetes.io~empty-dir/work"), None)
        if folder is not None and uid not in self.journals:
            self.journals[uid] = (folder / "output" / "run.jsonl").open(encoding="utf-8")

    def losses(self) -> list[dict[int, float]]:
        """Step -> loss, for each attempt that began to train."""
        curves = [{one["step"]: one["loss"] for one in found if one["event"] == "step"} for found in self.events()]
        return [curve for curve in curves if curve]

    def corrections(self) -> list[Document]:
        """The activations_corrected events of all attempts."""
        return [one for found in self.events() for one in found if one["event"] == "activations_corrected"]

    def events(self) -> list[list[Document]]:
        """The events of each attempt."""
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
                except OSError:  # the pod's files are not there yet, or already gone
                    continue

    thread = Thread(target=watch)
    thread.start()
    try:
        yield witness
    finally:
        ended.set()
        thread.join()


def files_of(folder: Path, name: str, steps: int) -> dict[str, str]:
    """File name -> hash for the last checkpoint: parameters, optimizer states and everything else that a resumed run
    needs."""
    (directory,) = (path for path in folder.iterdir() if path.name.startswith(f"{name}-"))
    parsed = [(found, path) for path in directory.iterdir() if (found := CheckpointName.parse(path.name)) is not None]
    newest, path = max(parsed)
    assert newest.step == steps
    return {entry.name: entry.xxh3_128 for entry in open_checkpoint(path).manifest.files}
