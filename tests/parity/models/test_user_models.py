"""Models as users write them: the same bits as memory.mode Disabled under every plan, through the real assembly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.model_spill_cases import HOMES, RESIDENT, Laboratory, Model, Technique
from cases.user_models import BLOCKS, UserModel
from fakes.lazy_lanes import LazyLanes
from harness import local_runs
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Overlap, Policy
from spillway_trainer.optimizer_offload.place import Placed
from spillway_trainer.optimizer_offload.speculation import Speculation
from spillway_trainer.tiers.lanes import CpuLanes

torch.set_num_threads(1)

Shares = tuple[float, float, float, float]
KEEP, RECOMPUTE, HOST, NVME = Policy.KEEP, Policy.RECOMPUTE, Policy.HOST, Policy.NVME
SPLITS = {
    "all on the CPU, kept": ((1.0, 0.0, 0.0), (KEEP,)),
    "streamed, moved to host": ((0.0, 1.0, 0.0), (HOST,)),
    "a third each, recomputed": ((0.34, 0.33, 0.33), (RECOMPUTE,)),
    "half and half, mixed": ((0.5, 0.5, 0.0), (NVME, RECOMPUTE, HOST, KEEP)),
}
STREAMED = {
    "in slots": Technique("host", answers="keep"),
    "in slots from NVMe, recomputed": Technique("nvme", answers="recompute"),
    "one slot, mixed": Technique("mixed", num_slots=1, answers="mixed"),
    "segment by segment": Technique("mixed", order="WeightStationary", boundaries=HOST, answers="mixed"),
}


OVERLAPS: dict[str, Shares] = {"Forward": (0.4, 0.2, 0.1, 0.3), "Backward": (1.0, 0.0, 0.0, 0.0)}
"""CPU, streamed, resident and NVMe shares"""
OVERLAPPED = ("compiled", "re-entrant", "twice re-entrant", "branching")


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root = tmp_path_factory.mktemp("users")
    return Laboratory(root, local_runs.write_text(root / "text"))


def overlapped_plan(model: UserModel | Model, overlap: Overlap) -> MemoryPlan:
    """Every state moves, and with Backward a window smaller than the model is updated before its step."""
    cpu, streamed, resident, nvme = OVERLAPS[overlap]
    optimizer = OptimizerPlan(
        cpu_share=cpu, streamed_share=streamed, resident_share=resident, nvme_share=nvme, chunk_parameters=211,
        overlap=overlap, speculative_parameters=2000 if overlap == "Backward" else 0,
    )  # fmt: skip
    update = {
        "mode": "Auto",
        "num_segments": model.num_segments,
        "num_micro_batches": model.num_micro_batches,
        "optimizer": optimizer,
        "activations": ActivationPlan(answers=(KEEP,) * model.num_segments, minimum_bytes=256),
    }
    return RESIDENT.model_copy(update=update)


def split_plan(model: UserModel, split: str) -> MemoryPlan:
    (cpu, streamed, resident), answers = SPLITS[split]
    count = model.num_segments
    update = {
        "mode": "Auto",
        "num_segments": count,
        "num_micro_batches": model.num_micro_batches,
        "optimizer": OptimizerPlan(
            cpu_share=cpu, streamed_share=streamed, resident_share=resident, chunk_parameters=211
        ),
        "activations": ActivationPlan(
            answers=tuple(answers[index % len(answers)] for index in range(count)), minimum_bytes=256
        ),
    }
    return RESIDENT.model_copy(update=update)


@pytest.mark.sweep
@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_split_and_no_answer_changes_a_bit(laboratory: Laboratory, block: str, split: str, lanes: type) -> None:
    model = UserModel(block, torch.bfloat16 if lanes is LazyLanes else torch.float32)
    outcome = laboratory.run(model, split_plan(model, split), lanes)  # type: ignore[arg-type]
    assert outcome.differences(laboratory.resident(model)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("technique", STREAMED)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_home_of_a_parameter_changes_a_bit(laboratory: Laboratory, block: str, technique: str) -> None:
    model = UserModel(block)
    assert STREAMED[technique].homes in HOMES
    outcome = laboratory.streamed(model, STREAMED[technique])  # type: ignore[arg-type]
    assert outcome.differences(laboratory.resident(model)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("block", [*OVERLAPPED, "tied", "frozen"])
def test_no_overlap_of_the_update_changes_a_bit(
    laboratory: Laboratory, block: str, overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not clipped, so that what backward has updated counts; gradients come twice in a micro-batch, from one compiled
    graph, or not in every step."""
    made, submit = list[str](), Speculation._submit

    def counted(self: Speculation, placed: Placed, *given: Any) -> Any:
        made.append(placed.chunk.parameter)
        return submit(self, placed, *given)

    monkeypatch.setattr(Speculation, "_submit", counted)
    ours = {"tied": Model(tied=True, dropout=0.1), "frozen": Model(lora=True)}
    model = ours.get(block) or UserModel(block, clipping=None)
    outcome = laboratory.run(model, overlapped_plan(model, overlap), CpuLanes)  # type: ignore[arg-type]
    assert outcome.differences(laboratory.resident(model)) == []  # type: ignore[arg-type]
    assert bool(made) == (overlap == "Backward")


def test_the_models_are_different_runs(laboratory: Laboratory) -> None:
    """Else one passing test would say nothing about the others."""
    blocks = [block for block in BLOCKS if block not in ("selectively checkpointed", "re-entrant")]
    losses = {tuple(laboratory.resident(UserModel(block)).figures["loss"]) for block in blocks}  # type: ignore[arg-type]
    assert len(losses) == len(blocks)
