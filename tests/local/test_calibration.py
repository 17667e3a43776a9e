"""`spillway calibrate` on this machine makes a profile that plans can use, and leaves nothing behind. These tests do
not assert times: benchmarks/step_time.py measures how well predictions hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.local_runs import write_text
from harness.patience import wait_until
from spillway_cli.__main__ import run_app
from spillway_cli.machine.node_profile import read_profile

pytestmark = pytest.mark.ci

COMMAND = [sys.executable, "-m", "spillway_cli", "calibrate", "--quick"]
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  model:
    config: {{architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, vocabSize: 300}}
  data: {{text: {{path: {text}}}}}
  training: {{steps: 8, sequenceLength: 32, globalBatchSize: 4, microBatchSize: 2}}
  memory: {{budget: {{device: 8Mi, host: 32Mi, nvme: 32Mi}}, advanced: {{optimizer: {{placement: Host}}}}}}
  checkpoint: {{everySteps: 100}}
"""


class Calibrated:
    """A finished calibration: its profile, its output, and the directory to which it spilled."""

    def __init__(self, directory: Path) -> None:
        self.state, self.spill = directory / "state", directory / "spill"
        self.spill.mkdir()
        self.environment = {**os.environ, "XDG_STATE_HOME": str(self.state)}
        arguments = [*COMMAND, "--directory", str(self.spill), "-o", "json"]
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self.document: dict[str, Any] = json.loads(done.stdout)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return Calibrated(tmp_path_factory.mktemp("calibrated"))


def test_the_profile_has_every_rate_of_this_machine(calibrated: Calibrated) -> None:
    spec = read_profile(Path(calibrated.document["profile"])).spec
    assert spec.num_cores == len(os.sched_getaffinity(0)) or spec.num_cores is not None
    assert all(
        rate is not None and rate > 0.0
        for rate in (
            spec.bfloat16_flops_per_second,
            spec.float32_flops_per_second,
            spec.cpu_bytes_per_second,
            spec.dram_bytes_per_second,
            spec.device_bytes_per_second,
            spec.nvme_read_bytes_per_second,
            spec.nvme_write_bytes_per_second,
            spec.link.h2d_bytes_per_second,
            spec.link.d2h_bytes_per_second,
        )
    )
    assert spec.network_bytes_per_second is None


def test_every_figure_is_a_median_within_its_middle_half(calibrated: Calibrated) -> None:
    figures = calibrated.document["figures"]
    assert {"disk read", "disk write", "copy", "host memory", "optimizer update"} <= {*figures}
    assert all(one["low"] <= one["median"] <= one["high"] and one["samples"] > 1 for one in figures.values())
    assert any("noise" in note for note in calibrated.document["notes"])


def test_nothing_is_left_where_it_spilled(calibrated: Calibrated) -> None:
    assert list(calibrated.spill.iterdir()) == []


def test_a_run_is_planned_with_the_profile_and_then_corrects_it(calibrated: Calibrated, tmp_path: Path) -> None:
    job, output = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(JOB.format(text=write_text(tmp_path / "text")))
    command = [sys.executable, "-m", "spillway_cli"]
    run = subprocess.run([*command, "run", str(job), "--output", str(output)], env=calibrated.environment,
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "rates measured on" in run.stderr
    plan = json.loads((output / "plan.json").read_text())
    assert plan["node"] == "local-measured"
    corrected = tmp_path / "corrected.yaml"
    calibrate = [*command, "calibrate", "--from", str(output), "--output", str(corrected), "-o", "json"]
    done = subprocess.run(calibrate, env=calibrated.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["runs"]
    before, after, measured = (told[key] for key in ("predictedBefore", "predictedAfter", "measuredStepSeconds"))
    # Nearer, or near enough: steps of 30 ms vary on a busy machine. benchmarks/step_time.py measures how near.
    assert abs(after - measured) <= max(abs(before - measured), 0.25 * measured)
    assert read_profile(corrected).spec.source == "Training"


def test_a_killed_probe_leaves_no_file(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "spillway_trainer.probe", "--directory", str(spill), "--threads", "1", "--quick"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert "disk" in process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    assert list(spill.iterdir()) == []


def test_an_interrupted_command_says_so_and_writes_no_profile(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job and its children ignore it
    process = subprocess.Popen(
        [*COMMAND, "--directory", str(tmp_path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, process_group=0,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: process.poll() is not None or children.read_text())
    (child,) = children.read_text().split()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert said == "spillway: stopped on request\n"
    wait_until(lambda: not Path(f"/proc/{child}").exists())  # a new child ends once its parent is gone
    assert [*(tmp_path / "state").rglob("*.yaml")] == []


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_directory_that_cannot_be_spilled_to_is_rejected(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["calibrate", "--quick", "--directory", str(tmp_path / name), "--output", str(tmp_path / "node.yaml")]
    assert run_app(arguments) == 64
    assert "spill directory" in capsys.readouterr().err
    assert not (tmp_path / "node.yaml").exists()
