"""Real trainer processes whose parameters stream from NVMe, under a hand-written plan: the model has four times the
device's size."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import local_runs
from harness.patience import wait_until
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.errors import ExitCode
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, ParameterPlan, Policy, Tier, TierBytes
from spillway.units import MIB
from spillway_trainer.checkpoints.directory import choose_resume

NUM_LAYERS, STEPS = 24, 6
CHANGES = {
    "numLayers: 4": f"numLayers: {NUM_LAYERS}",
    "steps: 12": f"steps: {STEPS}",
    "sequenceLength: 64": "sequenceLength: 16",
    "microBatchSize: 4": "microBatchSize: 2",
    "warmupSteps: 3": "warmupSteps: 1",
    "everySteps: 7": f"everySteps: {STEPS}",
    'fraction: "0.05"': 'fraction: "0.001"',
}
PARAMETER_BYTES = 2 * (512 * 64 + 64 + NUM_LAYERS * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160))
"""bytes in bfloat16; the head is tied to the embedding"""
DEVICE_BYTES = PARAMETER_BYTES // 4


def job_file(output: Path, text: Path, corpus: Path, epoch: int) -> JobFile:
    document = local_runs.JOB.replace("TEXT", str(text))
    for old, new in CHANGES.items():
        assert old in document, old
        document = document.replace(old, new)
    job = local_runs.job_file(output, text, corpus, epoch)
    spill = output / "spill"
    spill.mkdir(exist_ok=True)
    spec = parse_job(document, "deep job").spec
    return job.model_copy(update={"spec": spec, "spill_directory": str(spill)})


def plan(mode: str, device_bytes: int) -> MemoryPlan:
    """A plan in which all parameters stream (mode Auto) or all are resident."""
    count, update = NUM_LAYERS + 2, dict[str, object]()
    if mode == "Auto":
        update = {
            "optimizer": OptimizerPlan(cpu_share=1.0, resident_share=0.0, chunk_parameters=5003),
            "activations": ActivationPlan(
                answers=(Policy.KEEP, *[Policy.RECOMPUTE] * NUM_LAYERS, Policy.KEEP),
                minimum_bytes=1024,
                window_bytes=1 << 16,
                num_io_threads=1,
            ),
            "parameters": ParameterPlan(homes=(Tier.NVME,) * count, order="WeightStationary", boundaries=Policy.HOST),
        }
    return local_runs.disabled_plan(NUM_LAYERS).model_copy(
        update={
            "mode": mode,
            "micro_batch_size": 2,
            "num_micro_batches": 4,
            "bytes": {
                Tier.DEVICE: TierBytes(),
                Tier.HOST: TierBytes(buffers=32 * MIB),
                Tier.NVME: TierBytes(buffers=8 * MIB),
            },
            "budget": {Tier.DEVICE: device_bytes, Tier.HOST: 64 * MIB, Tier.NVME: 64 * MIB},
            **update,
        }
    )


STREAMED = plan("Auto", DEVICE_BYTES)


@dataclass(frozen=True)
class Reference:
    """A run whose parameters stay on a device that is large enough."""

    text: Path
    corpus: Path
    losses: dict[int, float]
    evaluations: dict[int, float]
    hashes: list[str]


def curve(output: Path, event: str) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in local_runs.events(output, event)}


def hashes(output: Path) -> list[str]:
    found = choose_resume(output / "checkpoints").checkpoint
    assert found is not None
    return [entry.xxh3_128 for entry in found.manifest.files]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("deep")
    text = local_runs.write_text(root / "text")
    job = job_file(root / "run", text, root / "corpus", epoch=1)
    assert local_runs.complete(job, plan("Disabled", 64 * MIB)) == 0, local_runs.log_of(root / "run", 1)
    run = root / "run"
    return Reference(text, root / "corpus", curve(run, "step"), curve(run, "evaluation"), hashes(run))


def same(output: Path, reference: Reference) -> bool:
    figures = curve(output, "step"), curve(output, "evaluation"), hashes(output)
    return figures == (reference.losses, reference.evaluations, reference.hashes)


def test_a_model_four_times_the_device_ends_with_the_same_bits(reference: Reference, tmp_path: Path) -> None:
    job = job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    assert local_runs.complete(job, STREAMED) == 0, local_runs.log_of(tmp_path, 1)
    assert same(tmp_path, reference)
    peaks = [entry["tier_peak_bytes"] for entry in local_runs.events(tmp_path, "step")]
    assert max(peak["device"] for peak in peaks) <= DEVICE_BYTES
    assert min(peak["nvme"] for peak in peaks) >= PARAMETER_BYTES


@pytest.mark.ci
def test_a_slab_on_three_volumes_gives_the_same_bits_and_leaves_nothing(reference: Reference, tmp_path: Path) -> None:
    job = job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    further = [tmp_path / name for name in ("second", "third")]
    for directory in further:
        directory.mkdir()
    job = job.model_copy(update={"further_spill_directories": tuple(map(str, further))})
    assert local_runs.complete(job, STREAMED) == 0, local_runs.log_of(tmp_path, 1)
    assert same(tmp_path, reference)
    (start,) = local_runs.events(tmp_path, "start")
    assert start["io_backend"].endswith(" x3")
    assert [path for directory in job.spill_directories for path in Path(directory).iterdir()] == []


def test_the_resident_run_does_not_fit_into_that_device(reference: Reference, tmp_path: Path) -> None:
    job = job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    assert local_runs.complete(job, plan("Disabled", DEVICE_BYTES)) == ExitCode.DEVICE_OUT_OF_MEMORY


@pytest.mark.ci
def test_kill_leaves_no_parameter_bytes_and_the_next_attempt_resumes(reference: Reference, tmp_path: Path) -> None:
    """Homes are in the same nameless file as spilled activations, so the end of the process frees them."""
    job = job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    process = local_runs.start_attempt(job, STREAMED)

    def look() -> None:
        assert process.is_alive(), local_runs.log_of(tmp_path, 1)

    wait_until(lambda: len(local_runs.events(tmp_path, "step")) >= STEPS - 2, look)
    assert list(Path(job.spill_directory).iterdir()) == []
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(Path(job.spill_directory).iterdir()) == []
    assert local_runs.complete(job_file(tmp_path, reference.text, reference.corpus, epoch=2), STREAMED) == 0
    assert same(tmp_path, reference)


def test_homes_for_another_number_of_segments_are_rejected(reference: Reference, tmp_path: Path) -> None:
    job = job_file(tmp_path, reference.text, reference.corpus, epoch=1)
    wrong = STREAMED.model_copy(update={"parameters": ParameterPlan(homes=(Tier.HOST,) * 3)})
    assert local_runs.complete(job, wrong) == ExitCode.USER_ERROR
    assert "places for the parameters of 3 segments" in local_runs.log_of(tmp_path, 1)
