"""The lean set under the trainer's plan: the bits of plain autograd, and the bytes that the shape says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.huggingface_models import filled, small_model
from cases.job_documents import job
from cases.parity_models import PARITY_MODELS
from cases.sequential_models import VOCABULARY as TEXT_VOCABULARY
from cases.sequential_models import SequentialModel
from fakes.fake_spill_file import FakeSpillFile
from harness.parity_harness import ANSWERS, LANES, Outcome, Spilling, train
from spillway.api.job_file import JobFile
from spillway.errors import UserError
from spillway.plan import ActivationPlan, MemoryPlan, Policy
from spillway.planning.hardware import local_node
from spillway.planning.model_shape import ModelShape, shape_of
from spillway.planning.planner import make_plan
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import rebuilding
from spillway_trainer.activation_spill.rebuilding import Rebuilt
from spillway_trainer.assemble import assemble
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain, as_carried
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.saved_tensors import ParameterSource
from spillway_trainer.segments import Position, wrap_segments
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

KEEP, RECOMPUTE, HOST, NVME = Policy
SMALL_BYTES = 256
BATCH, LENGTH = 2, 16
GIB = 1 << 30


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a rebuild; operands of more than a few values are no copies, as in models of the usual size."""
    found: list[int] = []
    run = Rebuilt._run

    def counted(self: Rebuilt) -> Tensor:
        found.append(1)
        return run(self)

    monkeypatch.setattr(Rebuilt, "_run", counted)
    monkeypatch.setattr(rebuilding, "SMALL_BYTES", SMALL_BYTES)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("lanes", ["cpu", "lazy"])
@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("model", PARITY_MODELS)
def test_no_answer_changes_a_bit(model: str, answers: str, lanes: str, runs: list[int]) -> None:
    window_bytes = 4096 if lanes == "cpu" else 1 << 30
    attach = partial(Spilling, answers=ANSWERS[answers], make_lanes=LANES[lanes], window_bytes=window_bytes, lean=True)
    outcome = train(model, attach, micro_batches=2)
    assert outcome.differing(train(model, None, micro_batches=2)) == []
    assert outcome.left_behind == {"device": 0, "host": 0, "nvme": 0}
    assert bool(runs) == (answers != "recompute")


# --- models of the trainer --------------------------------------------------------------------------------------------


def of_text(name: str) -> Callable[[], Chain]:
    return lambda: filled(SequentialModel(name).build())


def family(architecture: str, compute: str = "float32", dropout: str = "0.0", **model: Any) -> Callable[[], Chain]:
    sizes = {"dropout": dropout, "numLayers": 3}
    return lambda: small_model(architecture, compute, config=sizes, **model)


MODELS: dict[str, Callable[[], Chain]] = {
    **{
        f"{architecture}, {compute}, dropout {dropout}": family(architecture, compute, dropout)
        for architecture in ("llama", "gpt2", "bert", "t5")
        for compute in ("float32", "bfloat16")
        for dropout in ("0.0", "0.1")
    },
    "adapters": family("llama", "bfloat16", lora={"rank": 4}),
    "perceptron": of_text("perceptron"),
    "convolutions": of_text("resnet"),
    "recurrent": of_text("recurrent"),
}
NOTHING_REBUILT = ("perceptron", "convolutions")
"""an activation function that is a segment of its own hands its result on; batch norms move statistics, and what ReLU
saves is its own result"""
BLOCKS: dict[str, Callable[[int], list[Policy]]] = {
    "keep": lambda count: [KEEP] * count,
    "host": lambda count: [HOST] * count,
    "nvme": lambda count: [NVME] * count,
    "mixed": lambda count: [(NVME, HOST, RECOMPUTE, KEEP)[index % 4] for index in range(count)],
}


def outcome(model: str, answers: str | None, *, lean: bool) -> Outcome:
    """Two micro-batches of `model`: losses and gradients. `answers` None: plain autograd without any hook."""
    chain, found, position = MODELS[model](), Outcome(), Position(seed=3)
    host, ledger = HostSlab(64 << 20), DeviceLedger(None)
    lanes, nvme = CpuLanes(host, ledger), NvmeSlab(Path("/spill"), 64 << 20, 1, open_file=FakeSpillFile)
    names = [name for name, _ in chain.segments]
    hook = None
    if answers is not None:
        given = (KEEP, *BLOCKS[answers](len(names) - 2), KEEP)
        plan = ActivationPlan(answers=given, minimum_bytes=SMALL_BYTES, lean=lean)
        parameters: ParameterSource = ResidentParameters([*chain.named_parameters(), *chain.named_buffers()])
        hook = activation_spill.build(plan, names, parameters, lanes, ledger, nvme)
    wrap_segments(chain.segments, position, None if hook is None else hook.hook, autocast=chain.autocast)
    for micro_batch in range(2):
        position.micro_batch = micro_batch
        generator = torch.Generator().manual_seed(micro_batch)
        tokens = torch.randint(0, TEXT_VOCABULARY, (BATCH, LENGTH), generator=generator)
        carried: tuple[Tensor, ...] = (tokens,)
        for name, module in chain.segments:
            carried = as_carried(module(*carried, *chain.arguments(name, tokens, tokens.clone(), BATCH * LENGTH)))
        found.tensors[f"loss.{micro_batch}"] = carried[0].detach()
        if hook is not None:
            hook.start_backward()
        carried[0].backward()
        del carried
    if hook is not None:
        hook.end_step()
        found.left_behind = {str(tier): nbytes for tier, nbytes in hook.held_bytes().items()}
    lanes.close()
    nvme.close()
    found.tensors |= {name: p.grad for name, p in chain.named_parameters() if p.grad is not None}
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("answers", BLOCKS)
@pytest.mark.parametrize("model", MODELS)
def test_a_lean_plan_changes_no_bit(model: str, answers: str, runs: list[int]) -> None:
    found = outcome(model, answers, lean=True)
    assert found.differing(outcome(model, None, lean=False)) == []
    assert set(found.left_behind.values()) == {0}
    assert bool(runs) == (model not in NOTHING_REBUILT)


# --- bytes ------------------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "gpt2", "bert", "t5")
every_family = pytest.mark.parametrize("architecture", FAMILIES)
every_type = pytest.mark.parametrize("compute", ["bfloat16", "float32"])


def large_job(architecture: str, compute: str, dropout: str = "0.0", **model: Any) -> Any:
    """Every storage that is as wide as a row of a model is above what is copied, and above what stays."""
    sizes = {
        "architecture": architecture, "hiddenSize": 128, "numLayers": 3, "numHeads": 4, "intermediateSize": 352,
        "vocabSize": 260, "maxPositions": 512, "dropout": dropout,
    }  # fmt: skip
    changes = {"spec.model.config": sizes, "spec.model.precision.compute": compute}
    changes |= {"spec.training.sequenceLength": 256, "spec.training.microBatchSize": 4}
    return job(changes | {f"spec.model.{name}": value for name, value in model.items()})


def held(wanted: Any, *, lean: bool) -> dict[str, int]:
    """Bytes that each segment of the model holds after its forward, weights excluded."""
    training, chain = wanted.spec.training, build_model(wanted.spec)
    filled(chain)
    names, ledger = [name for name, _ in chain.segments], DeviceLedger(None)
    parameters: ParameterSource = ResidentParameters([*chain.named_parameters(), *chain.named_buffers()])
    lanes = CpuLanes(HostSlab(1 << 20), ledger)
    hook = activation_spill.build(ActivationPlan(lean=lean), names, parameters, lanes, ledger, None)
    wrap_segments(chain.segments, Position(seed=3), hook.hook, autocast=chain.autocast)
    tokens = torch.randint(0, 260, (training.micro_batch_size, training.sequence_length))
    carried: tuple[Tensor, ...] = (tokens,)
    found = {}
    for name, module in chain.segments:
        before = ledger.held_bytes
        carried = as_carried(module(*carried, *chain.arguments(name, tokens, tokens.clone(), tokens.numel())))
        found[name] = ledger.held_bytes - before
    lanes.close()
    return found


@every_type
@every_family
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_blocks_rebuild_exactly_the_bytes_that_the_shape_says(architecture: str, compute: str, dropout: str) -> None:
    wanted = large_job(architecture, compute, dropout)
    shape, lean, others = shape_of(wanted.spec), held(wanted, lean=True), held(wanted, lean=False)
    tokens = wanted.spec.training.micro_batch_size * wanted.spec.training.sequence_length
    said = {block.name: tokens * sum(block.rebuilt_bytes) for block in shape.blocks}
    assert {name: others[name] - lean[name] for name in said} == said
    assert all(said.values())
    ends = (shape.segments[0].name, shape.segments[-1].name)
    assert [lean[name] for name in ends] == [others[name] for name in ends]


@every_type
@every_family
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_blocks_save_exactly_the_bytes_that_the_shape_says(architecture: str, compute: str, dropout: str) -> None:
    wanted = large_job(architecture, compute, dropout)
    found, tokens = (
        held(wanted, lean=False),
        wanted.spec.training.micro_batch_size * wanted.spec.training.sequence_length,
    )
    shape = shape_of(wanted.spec)
    said = {block.name: tokens * sum(block.saved_bytes) for block in shape.blocks}
    said[shape.blocks[0].name] += shape.table_bytes(wanted.spec.training.sequence_length)
    assert {name: found[name] for name in said} == said


EVERY_PRODUCT = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value", "dense"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
}


@every_type
@every_family
@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 64}, {"rank": 4, "targetModules": "all"}], ids=str)
def test_blocks_below_adapters_save_no_more_than_the_shape_says(
    architecture: str, compute: str, lora: dict[str, Any]
) -> None:
    targets = {"targetModules": EVERY_PRODUCT[architecture]} if "targetModules" in lora else {}
    wanted = large_job(architecture, compute, lora={**lora, **targets})
    found, shape, training = held(wanted, lean=False), shape_of(wanted.spec), wanted.spec.training
    tokens = training.micro_batch_size * training.sequence_length
    assert {
        block.name: found[block.name] for block in shape.blocks if found[block.name] > tokens * sum(block.saved_bytes)
    } == {}


@pytest.mark.parametrize("compute", ["float32"])
def test_what_a_shape_rebuilds_is_part_of_what_it_saves(compute: str) -> None:
    for architecture in FAMILIES:
        for dropout in ("0.0", "0.1"):
            shape: ModelShape = shape_of(large_job(architecture, compute, dropout).spec)
            for block in shape.blocks:
                assert all(block.saved_bytes.count(size) >= block.rebuilt_bytes.count(size) > 0
                           for size in block.rebuilt_bytes)  # fmt: skip


# --- where it cannot be -----------------------------------------------------------------------------------------------


def test_a_run_rejects_what_would_not_be_rebuilt(tmp_path: Path) -> None:
    wanted = large_job("llama", "bfloat16")
    plan = make_plan(wanted, local_node(1, GIB, GIB, GIB))
    assert isinstance(plan, MemoryPlan)
    assert not plan.activations.lean, "everything fits"
    lean = plan.model_copy(update={"activations": plan.activations.model_copy(update={"lean": True})})
    here = str(tmp_path)
    file = JobFile(
        name="job", uid="u", epoch=1, spec=wanted.spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=here, compute_threads=1,
    )  # fmt: skip
    for changes, why in (
        ({"mode": "Disabled"}, "keeps all tensors that autograd saves"),
        ({"strategy": "Fsdp"}, "of only one segment"),
    ):
        with pytest.raises(UserError, match=why):
            assemble(file, lean.model_copy(update=changes))
