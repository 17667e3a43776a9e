"""`spillway run` with optimizer states on NVMe, from the manifest to the report: it has the bits of a run without
techniques, even if the disk fails or is full in the middle."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.local_runs import write_text
from harness.places import TESTS
from spillway.errors import ExitCode
from spillway_cli.record.log import RunLog, read_run_log
from spillway_trainer.kernels.io_engine import Direction

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  model:
    config: {{architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, vocabSize: 300}}
  data: {{text: {{path: {text}}}}}
  training: {{steps: 6, sequenceLength: 32, globalBatchSize: 4, microBatchSize: 2}}
  memory: {memory}
  checkpoint: {{everySteps: 2, keep: 3}}
"""
ON_NVME = "{budget: {device: 8Mi, host: 32Mi, nvme: 32Mi}, advanced: {optimizer: {placement: Nvme}}}"
ENCRYPTED = f"{ON_NVME}\n  spill: {{encryption: Ephemeral}}"
DISABLED = "{mode: Disabled, budget: {host: 32Mi}}"
SPILLWAY = [sys.executable, "-m", "spillway_cli"]


@dataclass(frozen=True)
class Ended:
    code: int
    document: dict[str, Any]
    said: str
    directory: Path

    @property
    def log(self) -> RunLog:
        return read_run_log(self.directory / "run.jsonl")

    @property
    def figures(self) -> tuple[object, ...]:
        """Every step's loss and the bytes of the last checkpoint's tensors."""
        losses = {step: one.metrics.loss for step, one in self.log.steps.items()}
        (last,) = (self.directory / "checkpoints").glob("step-6.e*")
        return losses, {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def run(directory: Path, memory: str, text: Path, **environment: str) -> Ended:
    directory.mkdir(exist_ok=True)
    job, output = directory / "job.yaml", directory / "out"
    job.write_text(JOB.format(text=text, memory=memory))
    command = [*SPILLWAY, "run", str(job), "--output", str(output), "-o", "json"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return Ended(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr, output)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def on_nvme(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Ended:
    return run(tmp_path_factory.mktemp("nvme"), ON_NVME, text)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Ended:
    return run(tmp_path_factory.mktemp("plain"), DISABLED, text)


def failing(directory: Path, direction: Direction, error: int) -> dict[str, str]:
    """Environment of a run whose disk fails once after the first checkpoint."""
    return {
        "PYTHONPATH": str(TESTS / "fakes" / "failing_disk"),
        "TEST_DISK_DIRECTION": direction.name,
        "TEST_DISK_ERROR": str(error),
        "TEST_DISK_FAILS_AFTER": str(directory / "out" / "checkpoints" / "step-2.e1"),
    }


def test_states_on_nvme_change_no_bit_of_a_whole_run(on_nvme: Ended, plain: Ended) -> None:
    assert (on_nvme.code, plain.code) == (0, 0), on_nvme.said + plain.said
    assert on_nvme.figures == plain.figures


@pytest.mark.ci
def test_encrypted_states_change_no_bit_of_a_whole_run(tmp_path: Path, text: Path, plain: Ended) -> None:
    encrypted = run(tmp_path, ENCRYPTED, text)
    assert encrypted.code == 0, encrypted.said
    assert encrypted.log.starts[0].io_backend.endswith("+AES-256-XTS")
    assert encrypted.figures == plain.figures


def test_the_plan_had_all_states_on_nvme_and_the_run_moved_them(on_nvme: Ended) -> None:
    plan = json.loads((on_nvme.directory / "plan.json").read_text())
    assert plan["optimizer"]["nvme_share"] == 1.0
    states = plan["bytes"]["nvme"]["optimizer_states"]
    for step in list(on_nvme.log.steps.values())[1:]:  # the first update has no moments to read
        read, written = (step.metrics.moved_bytes[lane] for lane in ("nvme_read", "nvme_write"))
        assert 0 < read <= states
        assert 0 < written <= states
        assert 0 < step.metrics.tier_peak_bytes["nvme"] <= plan["budget"]["nvme"]


def test_report_and_checkpoints_of_such_a_run_are_whole(on_nvme: Ended) -> None:
    assert "nvme_write" in (on_nvme.directory / "report.html").read_text(encoding="utf-8")
    verify = [*SPILLWAY, "ckpt", "verify", str(on_nvme.directory)]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0


@pytest.mark.ci
def test_a_read_that_fails_costs_an_attempt_and_no_bit(plain: Ended, text: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, ON_NVME, text, **failing(tmp_path, Direction.READ, errno.EIO))
    first, second = ended.document["attempts"]
    assert first["exitCode"] == ExitCode.SPILL_IO_ERROR, ended.said
    assert "read of states of " in first["message"] and "Input/output error" in first["message"]
    assert (ended.code, second["exitCode"]) == (0, 0), ended.said
    assert ended.log.starts[-1].resumed_from_step == 2
    assert ended.figures == plain.figures


@pytest.mark.ci
def test_states_a_full_volume_rejects_stay_in_host_memory_if_there_is_room(
    plain: Ended, text: Path, tmp_path: Path
) -> None:
    ended = run(tmp_path, ON_NVME, text, **failing(tmp_path, Direction.WRITE, errno.ENOSPC))
    assert (ended.code, len(ended.document["attempts"])) == (0, 1), ended.said
    host = [step.metrics.tier_peak_bytes["host"] for _, step in sorted(ended.log.steps.items())]
    # The checkpoint that makes the disk fail is committed behind training: at step 3 or later, perhaps within a step.
    assert sorted(host) == host and host[0] == host[1] < host[-1], host
    assert ended.figures == plain.figures


@pytest.mark.ci
def test_full_volume_without_host_room_ends_the_run_and_a_rerun_resumes(
    plain: Ended, text: Path, tmp_path: Path
) -> None:
    full, tight = failing(tmp_path, Direction.WRITE, errno.ENOSPC), ON_NVME.replace("host: 32Mi", "host: 802Ki")
    ended = run(tmp_path, tight, text, **full)
    assert ended.code == ExitCode.SPILL_VOLUME_FULL, ended.said
    (only,) = ended.document["attempts"]
    assert "states of " in only["message"]
    again = run(tmp_path, tight, text, **full)
    assert again.code == 0, again.said
    assert again.log.starts[-1].resumed_from_step == 2
    assert again.figures == plain.figures


def test_volume_too_small_for_the_states_is_rejected_before_the_first_step(text: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, ON_NVME.replace("nvme: 32Mi", "nvme: 64Ki"), text)
    assert (ended.code, ended.document["error"]["reason"]) == (4, "DoesNotFit")
    assert re.match(r"tiny does not fit this machine: [0-9.]+ [KM]iB of NVMe space", ended.document["error"]["message"])
    assert not (tmp_path / "out" / "run.jsonl").exists()
