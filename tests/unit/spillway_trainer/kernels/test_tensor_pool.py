"""The pool of large tensors, in processes of its own: it stays with a process until its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from spillway_trainer.kernels import native

pytestmark = pytest.mark.skipif(native.load_library() is None, reason="no native library")

PROGRAM = """
import json, os, resource, tempfile
import torch
from spillway_trainer.kernels import native
from spillway_trainer.activation_spill import Spilling

MIB = 1 << 20
before = torch.arange(MIB)
found = {"pooled": native.attach_tensor_pool(), "held_before": native.tensor_pool_bytes()[0]}

def step():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.full((2 * MIB,), value, dtype=torch.uint8) for value in range(24)]
    kept[::2] = [None] * 12
    kept += [torch.full((2 * MIB,), 99, dtype=torch.uint8) for _ in range(12)]
    native.mark_tensor_pool()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

step()
found["faults"] = min(step() for _ in range(3))
found["resident_after"] = native.tensor_pool_bytes()[1]
found["early"] = int(before.sum())
del before
tensor = torch.ones(5 * MIB, dtype=torch.uint8)
found["held_with"] = native.tensor_pool_bytes()[0]
resized = tensor.resize_(9 * MIB)
found["held_resized"] = native.tensor_pool_bytes()[0]
child = os.fork()
if child == 0:
    os._exit(0 if int(torch.ones(MIB).sum()) == MIB and int(tensor[: 5 * MIB].sum(dtype=torch.int64)) == 5 * MIB else 1)
found["child"] = os.waitpid(child, 0)[1]
del tensor, resized
found["held_after"] = native.tensor_pool_bytes()[0]

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(32)))
inputs = torch.ones(2048, 256)
spilling = Spilling(model, tempfile.gettempdir(), nvme_bytes=512 * MIB, device_bytes=9 * MIB, lean=False)
peaks = []
for _ in range(3):
    with spilling:
        loss = model(inputs).sum()
    peaks.append(native.tensor_pool_bytes()[1])
    loss.backward()
    del loss
model.zero_grad()
spilling.close()
found["spilled_resident"], found["closed"] = peaks[-1], native.tensor_pool_bytes()
print(json.dumps(found))
"""
MIB = 1 << 20


@cache
def found(switch: str) -> dict[str, Any]:
    environment = {**os.environ, native.TENSOR_POOL: switch, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


@pytest.mark.ci
def test_a_step_like_the_one_before_it_faults_no_page() -> None:
    assert found("on")["faults"] < 8  # of 48 MiB, which are 24 huge pages


def test_tensors_are_counted_while_they_live() -> None:
    seen = found("on")
    assert (seen["held_before"], seen["held_with"], seen["held_after"]) == (0, 5 * MIB, 0)
    assert seen["held_resized"] == 9 * MIB


def test_no_more_is_resident_than_the_fullest_moment_and_the_slack() -> None:
    assert found("on")["resident_after"] <= 48 * MIB + native.POOL_SLACK_BYTES


def test_what_is_older_than_the_pool_is_whole_and_freed_as_before() -> None:
    assert found("on")["early"] == MIB * (MIB - 1) // 2


def test_a_child_process_goes_on_with_the_pool() -> None:
    assert found("on")["child"] == 0


def test_activations_that_were_spilled_occupy_nothing() -> None:
    """32 layers save 2 MiB each; 9 may stay, 16 may be on their way."""
    assert found("on")["spilled_resident"] <= (9 + 16) * 2 * MIB


def test_what_nothing_holds_goes_back_when_spilling_is_closed() -> None:
    held, resident = found("on")["closed"]  # weights and inputs
    assert held <= resident <= held + native.POOL_SLACK_BYTES < found("on")["spilled_resident"]


@pytest.mark.ci
def test_switched_off_torch_allocates_as_ever() -> None:
    seen = found("off")
    assert not seen["pooled"]
    assert seen["held_with"] == seen["resident_after"] == seen["spilled_resident"] == 0
