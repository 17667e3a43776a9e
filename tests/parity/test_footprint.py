"""The plan's bytes against what the assembled trainer really holds: peaks of ledger, host slab and spill file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from job_documents import job

from spillway.hardware import local_node
from spillway.job import JobFile
from spillway.plan import MemoryPlan, Tier
from spillway.planner import make_plan
from spillway_trainer.assemble import Assembly, assemble, fill

GIB = 1 << 30
NODE = local_node(1, 2 * GIB, 2 * GIB, 2 * GIB)
SLOW = replace(NODE, bfloat16_flops_per_second=1e9, float32_flops_per_second=1e9)
"""too slow to recompute anything"""
FAST = replace(NODE, bfloat16_flops_per_second=1e15, float32_flops_per_second=1e15)
SMALL = {"spec.model.config.vocabSize": 512, "spec.model.config.numLayers": 5}


def budget(device: str, host: str = "2Gi") -> dict[str, Any]:
    return {"spec.memory.budget": {"device": device, "host": host}}


def forced(policy: str, placement: str) -> dict[str, Any]:
    return {"spec.memory.activations.policy": policy, "spec.memory.optimizer.placement": placement}


CASES = {
    "everything fits": ({}, NODE),
    "logits": ({"spec.model.config.vocabSize": 8192, "spec.model.config.numLayers": 1}, NODE),
    "host and resident states": (budget("60Mi"), SLOW),
    "recompute": (budget("50Mi"), FAST),
    "NVMe": (budget("60Mi", host="96Mi"), SLOW),
    "all to host": (forced("Host", "Host"), NODE),
    "all to NVMe": (forced("Nvme", "Interleaved"), NODE),
    "recompute, interleaved": (forced("Recompute", "Interleaved"), NODE),
    "float32": (budget("90Mi") | {"spec.model.precision.compute": "float32"}, SLOW),
    "tied": (budget("60Mi") | {"spec.model.config.tieWordEmbeddings": True}, SLOW),
    "odd sizes": (
        budget("60Mi")
        | {"spec.model.config.hiddenSize": 264, "spec.model.config.intermediateSize": 701}
        | forced("Host", "Host"),
        NODE,
    ),
    "dropout": (budget("60Mi") | {"spec.model.config.dropout": "0.1"}, SLOW),
}


def run_two_steps(assembly: Assembly, plan: MemoryPlan, vocab_size: int) -> None:
    tokens = torch.zeros(plan.micro_batch_size, 256, dtype=torch.int64)
    for step in range(2):
        for micro_batch in range(plan.num_micro_batches):
            assembly.position.step, assembly.position.micro_batch = step, micro_batch
            tokens = (tokens * 31 + torch.arange(256) + micro_batch) % vocab_size
            loss = assembly.model(tokens, tokens.clone(), tokens.numel())
            assembly.start_backward()
            loss.backward()
        assembly.optimizer.norm()
        assembly.optimizer.step(1e-3, 1.0)
        assembly.optimizer.flush()
        assembly.end_step()


@pytest.mark.parametrize("case", CASES)
def test_no_tier_holds_more_than_planned_and_the_device_nearly_that(case: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    changes, node = CASES[case]
    wanted = job(SMALL | changes)
    plan = make_plan(wanted, node)
    assert isinstance(plan, MemoryPlan)
    here = str(tmp_path)
    file = JobFile(
        name="job", uid="u", epoch=1, spec=wanted.spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=here, compute_threads=1,
    )  # fmt: skip
    assembly = assemble(file, plan)
    try:
        fill(assembly, seed=0)
        run_two_steps(assembly, plan, wanted.spec.model.transformer.vocab_size)
        peaks = assembly.peak_bytes()
    finally:
        assembly.tiers.close()
    for tier in Tier:
        assert peaks[tier] <= plan.bytes[tier].total, tier
    assert peaks[Tier.DEVICE] >= 0.7 * plan.bytes[Tier.DEVICE].total
