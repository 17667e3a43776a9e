"""Two ranks that train while the operator lowers the number of bytes that activations may use in the spill files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fakes.progress_endpoint import Operator
from harness import local_runs, rank_runs
from harness.depth import at
from spillway.api.job_file import JobFile
from spillway.api.progress import ProgressReport
from spillway.plan import MemoryPlan, Tier, TierBytes
from spillway.units import KIB, MIB

pytestmark = pytest.mark.ci

PLANNED_BYTES, CORRECTED_BYTES = MIB, 128 * KIB
"""bytes that activations may use in each rank's spill file"""
CHANGES = {
    "steps: 4": "steps: 80",
    "evaluation: {": "# {",
    "hiddenSize: 32": "hiddenSize: 64",
    "sequenceLength: 32": "sequenceLength: 64",
}


@dataclass
class Neighbour:
    """A neighbour on the spill volume, on whose account the operator's answers lower the bytes from the second report
    about the volume on."""

    job: JobFile
    volumes: list[Any] = field(default_factory=list)
    """the spill volumes in reports, in order"""
    on_disk: list[tuple[int, list[int]]] = field(default_factory=list)
    """at each report: the bytes that activations may use, and the bytes of each rank's file"""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, report: ProgressReport) -> int | None:
        volume = report.spillway.spill_volume if report.spillway else None
        if volume is None:
            return None
        with self.lock:
            self.volumes.append(volume)
            files = sorted(Path(self.job.spill_directory).glob("slab-*"))
            self.on_disk.append((volume.activations, [file.stat().st_blocks * 512 for file in files]))
        return CORRECTED_BYTES if len(self.volumes) > 1 else None


@pytest.fixture
def operator() -> Iterator[Operator]:
    made = Operator()
    yield made
    made.close()


def planned(job: JobFile, placement: str) -> MemoryPlan:
    """The plan of a placement whose activations on NVMe may move to host memory."""
    plan = rank_runs.plan_for(job, placement)
    nvme = TierBytes(activations=PLANNED_BYTES, optimizer_states=8 * MIB)
    host = plan.bytes[Tier.HOST].model_copy(update={"reserve": 4 * MIB})
    return plan.model_copy(update={"bytes": plan.bytes | {Tier.HOST: host, Tier.NVME: nvme}})


def spilled(step: dict[str, Any]) -> int:
    """Peak bytes of activations in the spill file, without the bytes that stay there between steps."""
    return int(step["tier_peak_bytes"]["nvme"]) - int(step["tier_bytes"]["nvme"])


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFile, list[rank_runs.Ended]]:
    """A run that keeps everything on the device, and its ranks' ends."""
    root = tmp_path_factory.mktemp("untouched")
    job = rank_runs.job_file(root / "run", local_runs.write_text(root / "text"), root / "corpus", 1, 2, CHANGES)
    return job, rank_runs.complete(job, rank_runs.plan_for(job))


@pytest.mark.parametrize("placement", ["half and half, NVMe", "states everywhere, mixed"][: at(1, 1, 2)])
def test_activations_move_to_host_memory_at_one_step_and_no_bit_changes(
    operator: Operator, tmp_path: Path, untouched: tuple[JobFile, list[rank_runs.Ended]], placement: str
) -> None:
    alone, expected = untouched
    text = Path(alone.output_directory).parent / "text"
    job = rank_runs.job_file(tmp_path, text, Path(alone.corpus_directory), 1, 2, CHANGES)
    job = job.model_copy(update={"spill_is_listed": True})
    neighbour = Neighbour(job)
    operator.activations = neighbour.answer
    ended = rank_runs.complete(
        job,
        planned(job, placement),
        KUBEFLOW_TRAINER_SERVER_URL=f"http://127.0.0.1:{operator.port}/progress",
        **{rank_runs.POST_VARIABLE: "0.05"},
    )
    assert rank_runs.losses(job) == rank_runs.losses(alone)
    assert [each.state for each in ended] == [each.state for each in expected]
    (correction,) = local_runs.events(tmp_path, "activations_corrected")
    assert correction["activations"] == CORRECTED_BYTES
    assert all(correction["reason"] in each.log for each in ended), [each.log for each in ended]
    spilled_bytes = {step["step"]: spilled(step) for step in local_runs.events(tmp_path, "step")}
    before = [spilled_bytes[step] for step in spilled_bytes if step <= correction["step"]]
    after = [spilled_bytes[step] for step in spilled_bytes if step > correction["step"]]
    assert min(before) > CORRECTED_BYTES >= max(after)
    check_volumes(neighbour)


def check_volumes(neighbour: Neighbour) -> None:
    """Checks the volumes as they were reported, and the bytes of the files at that time."""
    assert {volume.num_ranks for volume in neighbour.volumes} == {2}
    assert {volume.activations for volume in neighbour.volumes} == {PLANNED_BYTES, CORRECTED_BYTES}
    assert neighbour.volumes[0].host_room == PLANNED_BYTES
    # The first entry for each: after a correction, reports show the volume's earlier state until the next look at it.
    files = {allowed: sizes for allowed, sizes in reversed(neighbour.on_disk) if len(sizes) == 2}
    for larger, smaller in zip(files[PLANNED_BYTES], files[CORRECTED_BYTES], strict=True):
        assert larger - smaller == PLANNED_BYTES - CORRECTED_BYTES
