"""The plan's bytes against what the assembled trainer really holds: peaks of ledger, host slab and spill file. How they
compare with the kernel's own figures: tests/local/test_predicted_peaks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.job_documents import job
from harness import peak_run
from harness.depth import some
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Policy, Tier
from spillway.planning import candidates, search
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan

GIB = 1 << 30
NODE = local_node(1, 2 * GIB, 2 * GIB, 2 * GIB)
SLOW = replace(NODE, bfloat16_flops_per_second=1e9, float32_flops_per_second=1e9)
"""too slow to recompute anything"""
FAST = replace(NODE, bfloat16_flops_per_second=1e15, float32_flops_per_second=1e15)
SMALL = {"spec.model.config.vocabSize": 512, "spec.model.config.numLayers": 5}


def budget(device: str, host: str = "2Gi") -> dict[str, Any]:
    return {"spec.memory.budget": {"device": device, "host": host}}


def forced(policy: str, placement: str) -> dict[str, Any]:
    return {"spec.memory.advanced.activations.policy": policy, "spec.memory.advanced.optimizer.placement": placement}


def family(architecture: str) -> dict[str, Any]:
    return {
        "spec.model.config": {
            "architecture": architecture, "hiddenSize": 256, "numLayers": 3, "numHeads": 4, "intermediateSize": 704,
            "vocabSize": 512, "maxPositions": 256,
        }
    }  # fmt: skip


STREAM = {"spec.memory.advanced.parameters.placement": "Stream"}
BFLOAT16_MOMENTS = {"spec.training.optimizer.moments": "bfloat16"}
INT8_MOMENTS = {"spec.training.optimizer.moments": "int8"}
MANY_BATCHES = {"spec.training.microBatchSize": 2, "spec.training.globalBatchSize": 8}
SLOW_LINK = replace(NODE, link=replace(NODE.link, h2d_bytes_per_second=1e7))
"""loads of parameters are what costs: micro-batches share each"""
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
    "updated in backward": (forced("Keep", "Host") | {"spec.memory.advanced.optimizer.overlap": "Backward"}, NODE),
    "streamed": (STREAM | forced("Recompute", "Host"), NODE),
    "streamed, tied": (STREAM | forced("Host", "Host") | {"spec.model.config.tieWordEmbeddings": True}, NODE),
    "streamed, float32": (STREAM | forced("Nvme", "Host") | {"spec.model.precision.compute": "float32"}, NODE),
    "streamed, partly resident": (
        {
            "spec.memory.budget": {"device": "24Mi"},
            "spec.model.config.numLayers": 10,
            "spec.training.microBatchSize": 1,
        },
        SLOW,
    ),
    "streamed from NVMe": (STREAM | forced("Recompute", "Host") | budget("60Mi", host="69Mi"), NODE),
    "weight-stationary": (STREAM | forced("Keep", "Host") | MANY_BATCHES, SLOW_LINK),
    "weight-stationary, recomputed": (STREAM | forced("Recompute", "Host") | MANY_BATCHES, SLOW_LINK),
    "weight-stationary, moved": (STREAM | forced("Host", "Host") | MANY_BATCHES, SLOW_LINK),
    "adapters": (budget("60Mi") | {"spec.model.lora": {"rank": 8}}, SLOW),
    "streamed base, adapters": (STREAM | forced("Recompute", "Host") | {"spec.model.lora": {"rank": 8}}, NODE),
    "gpt2": (family("gpt2"), NODE),
    "bert": (family("bert"), NODE),
    "t5": (family("t5"), NODE),
    "streamed gpt2": (STREAM | forced("Recompute", "Host") | family("gpt2"), NODE),
    "streamed t5": (STREAM | forced("Recompute", "Host") | family("t5"), NODE),
    "states on NVMe": (forced("Host", "Nvme"), NODE),
    "states on NVMe, float32": (forced("Recompute", "Nvme") | {"spec.model.precision.compute": "float32"}, NODE),
    "states on NVMe, tied": (forced("Keep", "Nvme") | {"spec.model.config.tieWordEmbeddings": True}, NODE),
    "states partly on NVMe": (budget("50Mi", host="60Mi"), SLOW),
    "bfloat16 moments": (budget("50Mi") | BFLOAT16_MOMENTS, SLOW),
    "bfloat16 moments, float32": (
        BFLOAT16_MOMENTS | forced("Keep", "Interleaved") | {"spec.model.precision.compute": "float32"},
        NODE,
    ),
    "bfloat16 moments, updated in backward": (
        BFLOAT16_MOMENTS | forced("Keep", "Host") | {"spec.memory.advanced.optimizer.overlap": "Backward"},
        NODE,
    ),
    "bfloat16 moments on NVMe": (BFLOAT16_MOMENTS | forced("Recompute", "Nvme"), NODE),
    "int8 moments": (budget("46Mi") | INT8_MOMENTS, SLOW),
    "int8 moments, float32": (
        INT8_MOMENTS | forced("Keep", "Device") | {"spec.model.precision.compute": "float32"},
        NODE,
    ),
    "int8 moments, odd sizes, updated in backward": (
        INT8_MOMENTS
        | {"spec.model.config.hiddenSize": 264, "spec.model.config.intermediateSize": 701}
        | forced("Keep", "Host")
        | {"spec.memory.advanced.optimizer.overlap": "Backward"},
        NODE,
    ),
    "int8 moments on NVMe": (INT8_MOMENTS | forced("Recompute", "Nvme"), NODE),
    "streamed, states on NVMe": (STREAM | forced("Recompute", "Nvme"), NODE),
    "streamed, states partly on NVMe": (STREAM | forced("Recompute", "Auto") | budget("40Mi", host="70Mi"), SLOW),
    "dropout": (budget("60Mi") | {"spec.model.config.dropout": "0.1"}, SLOW),
}


@pytest.mark.parametrize("case", some(CASES, 8))
def test_a_run_needs_no_more_than_planned_and_on_the_device_nearly_that(case: str, tmp_path: Path) -> None:
    changes, node = CASES[case]
    wanted = job(SMALL | changes | {"spec.training.steps": peak_run.STEPS})
    plan = make_plan(wanted, node)
    assert isinstance(plan, MemoryPlan), plan
    assert held_on_the_device(wanted, plan, tmp_path) >= 0.7 * plan.bytes[Tier.DEVICE].total


NO_OTHER_BUFFERS = {
    "all updated by the CPU": forced("Keep", "Host"),
    "half of them": forced("Keep", "Interleaved"),
    "streamed": STREAM | forced("Keep", "Host"),
    "float32": forced("Keep", "Host") | {"spec.model.precision.compute": "float32"},
}
"""plans that hold nothing else in the row"""


@pytest.mark.parametrize("case", NO_OTHER_BUFFERS)
def test_on_a_cpu_device_an_update_has_no_rings_and_none_are_planned(case: str, tmp_path: Path) -> None:
    """Gradients are added, and parameters written, where they are."""
    wanted = job(SMALL | NO_OTHER_BUFFERS[case] | {"spec.training.steps": peak_run.STEPS})
    plan = make_plan(wanted, NODE)
    assert isinstance(plan, MemoryPlan), plan
    torch.set_num_threads(1)
    assembly = peak_run.run(job_file(wanted, tmp_path), plan, peak_run.Listener())
    held = assembly.tiers.host.by_label()
    rings = {label: size for label, size in held.items() if label.startswith(("gradient staging", "uploads"))}
    assembly.tiers.close()
    assert (rings, plan.bytes[Tier.HOST].buffers) == ({}, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("num_layers", [3, 9])
@pytest.mark.parametrize("boundaries", [Policy.KEEP, Policy.HOST])
@pytest.mark.parametrize("policy", ["Recompute", "Keep", "Host"])
def test_t5_peak_matches_the_plan_when_some_boundary_tensors_cannot_move(
    policy: str, boundaries: Policy, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments hand on several tensors, some of them unchanged and too small to move."""
    changes = family("t5") | MANY_BATCHES | STREAM | forced(policy, "Host")
    changes |= {
        "spec.model.config.numLayers": num_layers,
        "spec.training.sequenceLength": 160,
    }  # 80 KiB, 50 KiB of bias
    wanted = job(SMALL | changes | {"spec.training.steps": peak_run.STEPS})
    every = candidates.groups
    monkeypatch.setattr(search, "groups", lambda question: stationary(every(question), boundaries))
    plan = make_plan(wanted, SLOW_LINK)
    assert isinstance(plan, MemoryPlan), plan
    assert held_on_the_device(wanted, plan, tmp_path) >= 0.9 * plan.bytes[Tier.DEVICE].total


@pytest.mark.parametrize("num_layers", [4, 16])
def test_t5_whose_boundaries_are_all_too_small_to_move(num_layers: int, tmp_path: Path) -> None:
    changes = family("t5") | STREAM | forced("Recompute", "Host") | MANY_BATCHES
    changes |= {"spec.model.config.hiddenSize": 128, "spec.model.config.numLayers": num_layers}
    wanted = job(SMALL | changes | {"spec.training.sequenceLength": 128, "spec.training.steps": peak_run.STEPS})
    plan = make_plan(wanted, SLOW_LINK)
    assert isinstance(plan, MemoryPlan), plan
    assert (plan.parameters.order, plan.parameters.boundaries) == ("WeightStationary", Policy.KEEP)
    held_on_the_device(wanted, plan, tmp_path)


LEAN = {
    "llama": {},
    "llama, float32, dropout": {
        "spec.model.precision.compute": "float32", "spec.model.config.dropout": "0.1",
    },
    "gpt2": family("gpt2"),
    "bert": family("bert"),
    "t5": family("t5"),
    "weight-stationary": STREAM | MANY_BATCHES,
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("moves", ["kept", "to host", "to NVMe"])
@pytest.mark.parametrize("case", LEAN)
def test_a_lean_run_needs_no_more_than_planned_and_nearly_that(
    case: str, moves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (
        SMALL | LEAN[case] | {"spec.training.steps": peak_run.STEPS, "spec.memory.advanced.optimizer.placement": "Host"}
    )
    every = candidates.groups
    monkeypatch.setattr(search, "groups", lambda question: lean(every(question), moves=moves != "kept"))
    plan = make_plan(job(changes), SLOW_LINK)
    assert isinstance(plan, MemoryPlan), plan
    if moves == "to NVMe":  # what host memory has no room for
        host = plan.bytes[Tier.HOST]
        changes["spec.memory.budget.host"] = str(host.total - host.activations // 4)
        plan = make_plan(job(changes), SLOW_LINK)
        assert isinstance(plan, MemoryPlan), plan
    assert plan.activations.lean
    answer = {"kept": Policy.KEEP, "to host": Policy.HOST, "to NVMe": Policy.NVME}[moves]
    assert answer in (plan.activations.uses or {Policy.KEEP})
    assert held_on_the_device(job(changes), plan, tmp_path) >= 0.7 * plan.bytes[Tier.DEVICE].total


def lean(groups: list[candidates.CandidateGroup], *, moves: bool) -> list[candidates.CandidateGroup]:
    """Those that rebuild, with blocks that are all moved, or all kept."""
    found = []
    for group in groups:
        layers = group.question.num_layers
        layouts = [one for one in group.layouts if (one.blocks.moved if moves else one.blocks.kept) == layers]
        if group.work.lean:
            found.append(replace(group, layouts=candidates.Layouts(layouts)))
    return found


def stationary(groups: list[candidates.CandidateGroup], boundaries: Policy) -> list[candidates.CandidateGroup]:
    wanted = ("WeightStationary", boundaries)
    return [group for group in groups if (group.streaming.order, group.streaming.boundaries) == wanted]


def held_on_the_device(wanted: TrainingJob, plan: MemoryPlan, tmp_path: Path) -> int:
    """Peak bytes of a run with no more than the planned bytes on the device, and the planned slabs: what is short waits
    for copies in flight, and anything beyond raises."""
    torch.set_num_threads(1)
    slabs = {tier: plan.slab_bytes(tier) for tier in (Tier.HOST, Tier.NVME)}
    tight = plan.model_copy(update={"budget": {Tier.DEVICE: plan.bytes[Tier.DEVICE].total, **slabs}})
    listener = peak_run.Listener()
    peak_run.run(job_file(wanted, tmp_path), tight, listener).tiers.close()
    for tier in (Tier.HOST, Tier.NVME):
        assert listener.peaks[tier] <= plan.bytes[tier].total, tier
    return listener.peaks[Tier.DEVICE]


def job_file(wanted: TrainingJob, directory: Path) -> JobFile:
    here = str(directory)
    return JobFile(
        name="job", uid="u", epoch=1, spec=wanted.spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=here, compute_threads=1,
    )  # fmt: skip
