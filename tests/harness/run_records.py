"""Made-up plans and run logs for tests of the CLI."""

from __future__ import annotations

import json
from typing import Any

from fakes.fake_trainer import attempt_lines
from spillway.plan import (
    ActivationPlan,
    Alternative,
    MemoryPlan,
    OptimizerPlan,
    Policy,
    Prediction,
    Tier,
    TierBytes,
)
from spillway_cli.record.log import RunLog

MIB = 2**20


def plan(**changes: Any) -> MemoryPlan:
    """A plan that uses all three tiers."""
    fields: dict[str, Any] = {
        "job": "tiny",
        "node": "local",
        "mode": "Auto",
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "num_segments": 6,
        "optimizer": OptimizerPlan(cpu_share=1.0, resident_share=0.0),
        "activations": ActivationPlan(answers=(Policy.NVME,) * 6),
        "bytes": {
            Tier.DEVICE: TierBytes(parameters=20 * MIB, workspace=38 * MIB),
            Tier.HOST: TierBytes(optimizer_states=80 * MIB),
            Tier.NVME: TierBytes(activations=32 * MIB),
        },
        "budget": {Tier.DEVICE: 64 * MIB, Tier.HOST: 256 * MIB, Tier.NVME: 2048 * MIB},
        "prediction": Prediction(
            step_seconds=0.4,
            compute_seconds=0.3,
            exposed_optimizer_seconds=0.1,
            exposed_transfer_seconds=0.0,
            bound_by="compute",
            link_bytes={"dram": 9 * MIB, "nvme_write": 3 * MIB, "nvme_read": 3 * MIB},
        ),
        "reasons": ("optimizer states go to host memory: they do not fit the device",),
        "alternatives": (Alternative(summary="keep everything", reason="180 MiB too large for the device"),),
    }
    return MemoryPlan(**{**fields, **changes})


def run_log(*attempts: tuple[int, int], torn: bool = False) -> RunLog:
    """The log of attempts, each given as (first step, last step); `torn` adds a half-written line."""
    log = RunLog()
    for epoch, (first, last) in enumerate(attempts, start=1):
        for line in attempt_lines(epoch, first, last):
            log.add(json.dumps(line))
    if torn:
        log.add('{"event": "step", "ti')
    return log
