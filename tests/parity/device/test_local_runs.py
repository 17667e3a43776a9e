"""`spillway run` on a machine with a GPU takes it, says so, and has the CPU's bits. The device is a fake, as in
test_attempts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import device_attempts, device_runs
from harness import fake_cuda, local_runs
from harness.depth import FULL

pytestmark = pytest.mark.ci


def job(directory: Path, steps: int = 4, **changes: Any) -> Path:
    document = yaml.safe_load(local_runs.JOB.replace("TEXT", str(local_runs.write_text(directory / "text"))))
    document["spec"]["model"] = device_attempts.MODELS["llama"]
    document["spec"]["training"] |= {"steps": steps, "schedule": {"name": "Constant"}}
    document["spec"]["data"] = {"text": {"path": str(directory / "text")}}
    document["spec"]["checkpoint"] = {"everySteps": 2, "keep": 2}
    document["spec"] |= changes
    made = directory / f"job-{steps}-{len(changes)}.yaml"
    made.write_text(yaml.safe_dump(document), encoding="utf-8")
    return made


def test_auto_takes_the_gpu_and_a_run_keeps_the_device_it_began_with(tmp_path: Path) -> None:
    on_gpu, on_cpu = tmp_path / "gpu", tmp_path / "cpu"
    code, said, found = fake_cuda.run(device_runs.run, job(tmp_path), on_gpu, mode="delayed", seed=1)
    assert code == 0, said
    assert "device: Cuda, Fake CUDA device, 8.00 GiB free" in said
    assert "a step on this GPU" in said
    code, said, then = fake_cuda.run(device_runs.run, job(tmp_path), on_cpu, devices=0)
    assert code == 0, said
    assert "device: Cpu, the driver finds no GPU" in said
    device_attempts.assert_same(found, then)
    code, said, _ = fake_cuda.run(device_runs.run, job(tmp_path, steps=5), on_cpu)
    assert code == 0, said
    assert "device: Cpu, as in earlier attempts" in said
    code, said, _ = fake_cuda.run(device_runs.run, job(tmp_path, steps=5), on_gpu, devices=0)
    assert code == 64
    assert "the run began on a GPU, but no GPU can be used here: the driver finds no GPU" in " ".join(said.split())


def test_memory_that_runs_out_on_the_device_costs_tries_and_no_bit(tmp_path: Path) -> None:
    """Attention saves far more here than the planner counts for a GPU: the fake has no fused kernel."""
    training = {"steps": 4, "sequenceLength": 512, "globalBatchSize": 8, "microBatchSize": 8}
    heavy = {"training": training, "memory": {"budget": {"device": "320Mi", "host": "2Gi"}}}
    code, said, found = fake_cuda.run(device_runs.run, job(tmp_path, **heavy), tmp_path / "gpu")
    assert code == 0, said
    assert "replanned: " in said
    plain = {"training": training, "memory": {"mode": "Disabled", "budget": {"host": "2Gi"}}}
    code, said, then = fake_cuda.run(device_runs.run, job(tmp_path, **plain), tmp_path / "cpu", devices=0)
    assert code == 0, said
    device_attempts.assert_same(found, then)


def test_calibrate_measures_the_gpu_and_plans_use_what_it_found(tmp_path: Path) -> None:
    figures, text, said = fake_cuda.run(device_runs.calibrated, tmp_path, job(tmp_path))
    assert {"h2d", "d2h", "both_ways", "on_device", "matrix product bfloat16 64", "host memory"} <= figures.keys()
    spec = yaml.safe_load(text)["spec"]
    assert spec["deviceKind"] == "Cuda"
    assert {"h2dBytesPerSecond", "d2hBytesPerSecond"} <= spec["link"].keys()
    assert {"operationOverheadSeconds", "deviceBytesPerSecond", "bfloat16FlopsPerSecond"} <= spec.keys()
    assert "this machine: rates measured on" in " ".join(said.split())
    assert "-measured" in said


def test_members_of_a_sweep_train_on_a_gpu_each_with_the_bits_of_the_cpu(tmp_path: Path) -> None:
    members = [{"name": f"seed-{seed}", "training": {"seed": seed}} for seed in range(3)]
    sweep, found = job(tmp_path, members=members), []
    for kind, devices in (("gpus", 2), ("cpus", 0)):
        root = tmp_path / kind
        code, said, outcomes = fake_cuda.run(device_runs.run_sweep, sweep, root, "--ranks", "2", devices=devices)
        assert code == 0, said
        assert f"device: {'Cuda' if devices else 'Cpu'}" in said
        assert {event["device"] for event in local_runs.events(root, "member_started")} == {0, 1}
        found.append(outcomes)
    for name in (one["name"] for one in members):
        device_attempts.assert_same(found[0][name], found[1][name])


@pytest.mark.parametrize("strategy", ["Ddp", "Fsdp", "Zero2", "Zero3"] if FULL else ["Fsdp"])
def test_ranks_take_a_gpu_each_with_the_bits_of_ranks_on_cpus(tmp_path: Path, strategy: str) -> None:
    ranks, two = ("--ranks", "2"), job(tmp_path, parallelism={"strategy": strategy})
    code, said, found = fake_cuda.run(device_runs.run, two, tmp_path / "gpus", *ranks, devices=2)
    assert code == 0, said
    assert "device: Cuda, Fake CUDA device" in said
    code, said, then = fake_cuda.run(device_runs.run, two, tmp_path / "cpus", *ranks)
    assert code == 0, said
    assert "device: Cpu, 2 ranks need a GPU each, but there are 1" in said
    device_attempts.assert_same(found, then)
