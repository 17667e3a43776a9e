"""SweepRecord: values and failures of members, stored next to their checkpoints.

A value is on disk before the checkpoint of its step, so however the process ends, rounds of halving are decided again
from the same values. Each attempt writes its own file, `sweep-E.json`, with every known value of the metric that it
compares by. A reader takes the union of the files of its own metric, so a superseded attempt that still writes takes
nothing away, and a loss is never compared with an evaluation loss.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillway.api.sweep.halving import Value
from spillway.errors import UserError

from ..checkpoints.durable_files import DurableFiles
from ..checkpoints.sealed_json import Unsealed, seal, unseal

SWEEP_VERSION = 2
_NAME = re.compile(r"sweep-([0-9]+)\.json")


class SweepNotWritten(UserError):
    """The disk rejected the values that members reported. A round must not be decided by values that a crash can take
    back."""


@dataclass(frozen=True, slots=True)
class MemberFailure:
    """How a member ended, without ending the others."""

    step: int
    exit_code: int
    message: str


@dataclass(slots=True)
class SweepRecord:
    """What members reported, and who failed. `directory`: the sweep's checkpoints. `epoch`: this attempt's; only its
    file is written. `metric`: of the objective, EvaluationLoss or Loss."""

    directory: Path
    epoch: int
    metric: str
    values: dict[tuple[str, int], float] = field(default_factory=dict)
    """Values of the metric, by member and step."""
    failures: dict[str, MemberFailure] = field(default_factory=dict)

    @staticmethod
    def read(directory: Path, epoch: int, metric: str) -> SweepRecord:
        """What earlier attempts left: values of this metric, and who failed. A damaged file is left out: members report
        again what they train after their checkpoints, and a later file has the rest."""
        found = SweepRecord(directory, epoch, metric)
        for path in sorted(directory.glob("sweep-*.json"), key=_epoch_of) if directory.is_dir() else ():
            try:
                found._take(unseal(path.read_bytes()))
            except Unsealed as error:
                print(f"{path}: ignored: expected the values that members reported, found {error}", flush=True)
        return found

    def of(self, names: Collection[str]) -> list[Value]:
        """The values of the members `names`; those of a member in the order of its steps."""
        return [Value(name, step, value) for (name, step), value in sorted(self.values.items()) if name in names]

    def write(self) -> None:
        """Writes this attempt's file durably. Raises SweepNotWritten if the disk rejects."""
        files, path = DurableFiles(), self.directory / f"sweep-{self.epoch}.json"
        temporary = path.with_name(f"{path.name}.tmp")
        content = seal(
            {
                "version": SWEEP_VERSION,
                "metric": self.metric,
                # as text: JSON has no infinity
                "values": [[name, step, repr(value)] for (name, step), value in sorted(self.values.items())],
                "failures": {
                    name: {"step": one.step, "exit_code": one.exit_code, "message": one.message}
                    for name, one in self.failures.items()
                },
            }
        )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            files.remove_tree(temporary)
            files.write(temporary, [memoryview(content)])
            files.rename(temporary, path)
            files.sync_directory(self.directory)
        except OSError as error:
            raise SweepNotWritten(
                f"{path}: cannot store the values that members reported: {error.strerror or error}; free space on "
                "that disk"
            ) from error

    def _take(self, fields: dict[str, Any]) -> None:
        if fields.get("version") != SWEEP_VERSION:
            raise Unsealed(f"version {fields.get('version')}")
        if fields["metric"] == self.metric:
            self.values |= {(name, step): float(value) for name, step, value in fields["values"]}
        self.failures |= {name: MemberFailure(**one) for name, one in fields["failures"].items()}


def _epoch_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0
