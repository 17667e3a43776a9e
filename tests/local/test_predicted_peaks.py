"""A plan's predictions for each tier agree with what the kernel and torch measure, within 10 %.

Every cell is a fresh process (`harness/peak_run.py`) that assembles a real run under the plan that `make_plan` made:
    device + host   growth of the process's peak resident set; on a CPU both are its memory
    host            resident pages of the slab's mapping
    device          the trainer's ledger, which is compared with the peak of torch's memory tracker if nothing moves
                    (that tracker sees only the main thread) and, plus the host slab, always with the first row
    NVMe            extents in use, and blocks of the spill file on disk, compared with the plan's slab

Host memory may be less than planned if activations wait for NVMe, because the number of waiting buffers depends on the
machine.

CI runs seven cells, and `make test-all` runs twenty. The same measures show the use of homes on NVMe: parameters there
train while memory holds less than half of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job
from cases.nodes import products_only
from harness import peak_run
from harness.depth import FULL
from harness.places import IMPORTABLE
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Policy, Tier
from spillway.planning.hardware import NodeSpec
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer.kernels import native

pytestmark = pytest.mark.ci

TOLERANCE = 0.10
NODE = products_only(1, 8 * GIB, 8 * GIB, 16 * GIB)
SLOW_LINK = replace(NODE, link=replace(NODE.link, h2d_bytes_per_second=1e7))
"""a node on which loading parameters is expensive, so that many micro-batches share each load"""


SLOW = replace(NODE, bfloat16_flops_per_second=1e9)
"""a node that is too slow to recompute anything"""


def model(**sizes: Any) -> dict[str, Any]:
    return {f"spec.model.config.{name}": value for name, value in sizes.items()}


BASE = model(hiddenSize=512, numLayers=6, numHeads=8, numKeyValueHeads=8, intermediateSize=1408, vocabSize=2048) | {
    "spec.training.sequenceLength": 256, "spec.training.microBatchSize": 8, "spec.training.globalBatchSize": 16,
    "spec.training.steps": peak_run.STEPS,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    changes: dict[str, Any] = field(default_factory=dict)
    node: NodeSpec = NODE
    holds: tuple[str, ...] = ()
    """properties that the plan must have; otherwise, the cell would test something else"""

    @property
    def in_one_thread(self) -> bool:
        """Whether nothing moves on other threads, which torch's tracker does not see."""
        return not {*self.holds} - {"lean"}


def forced(placement: str, policy: str, **more: Any) -> dict[str, Any]:
    return {
        "spec.memory.advanced.optimizer.placement": placement,
        "spec.memory.advanced.activations.policy": policy,
        **more,
    }


MANY = {"spec.training.globalBatchSize": 48}
"""many micro-batches, so that reads and writes overlap in all possible ways"""
FLOAT32 = {"spec.model.precision.compute": "float32"}
STREAM = {"spec.memory.advanced.parameters.placement": "Stream"}
T5 = {"spec.model.config": {"architecture": "t5", "hiddenSize": 512, "numLayers": 6, "numHeads": 8,
                            "intermediateSize": 1408, "vocabSize": 2048}}  # fmt: skip
LEAN = {"spec.memory.advanced.optimizer.placement": "Device"}
CELLS = {
    "bfloat16, all resident": Cell(forced("Device", "Keep")),
    "float32, all resident": Cell(forced("Device", "Keep") | FLOAT32),
    "states on the CPU": Cell(forced("Host", "Keep"), holds=("host",)),
    "states interleaved, recomputed": Cell(forced("Interleaved", "Recompute"), holds=("host", "recompute")),
    "activations to host memory": Cell(forced("Host", "Host"), holds=("host",)),
    "states on NVMe": Cell(forced("Nvme", "Keep"), holds=("nvme",)),
    "activations to NVMe": Cell(forced("Host", "Nvme") | MANY, holds=("nvme",)),
    "float32, interleaved, NVMe": Cell(forced("Interleaved", "Nvme") | FLOAT32 | MANY, holds=("nvme",)),
    "large vocabulary": Cell(forced("Device", "Keep") | model(vocabSize=16384, numLayers=2)),
    "lean": Cell(LEAN | {"spec.memory.budget.device": "620Mi"}, holds=("lean",)),
    "lean, float32": Cell(LEAN | FLOAT32 | {"spec.memory.budget.device": "700Mi"}, holds=("lean",)),
    "lean, to host memory": Cell(
        LEAN | {"spec.memory.budget.device": "480Mi"}, SLOW, holds=("lean", "host")
    ),
    "wide": Cell(model(hiddenSize=1024, intermediateSize=2816, numLayers=3) | {"spec.memory.budget.device": "600Mi"},
                 holds=("host",)),
    "tied, dropout": Cell(forced("Host", "Recompute") | model(tieWordEmbeddings=True, dropout="0.1", vocabSize=8192),
                           holds=("host", "recompute")),
    "streamed": Cell(forced("Host", "Recompute") | STREAM, holds=("streams",)),
    "streamed, float32, activations to host": Cell(forced("Host", "Host") | STREAM | FLOAT32, holds=("streams",)),
    "streamed from NVMe": Cell(
        forced("Host", "Recompute") | STREAM | {"spec.memory.budget.host": "360Mi"}, holds=("streams", "nvme")
    ),
    "streamed, partly resident": Cell(
        {"spec.memory.budget.device": "130Mi", "spec.memory.advanced.activations.policy": "Host"}, holds=("streams",)
    ),
    "weight-stationary": Cell(
        forced("Host", "Recompute") | STREAM | {"spec.training.globalBatchSize": 32}, SLOW_LINK,
        ("streams", "stationary"),
    ),
    "t5, weight-stationary": Cell(
        forced("Host", "Recompute") | STREAM | T5, SLOW_LINK, ("streams", "stationary")
    ),
}  # fmt: skip
DIFFERENT = ("large vocabulary", "states interleaved, recomputed", "activations to NVMe", "lean", "tied, dropout",
             "streamed from NVMe", "weight-stationary")  # fmt: skip
"""cells that CI measures; each of the others is similar to one of these"""
NAMES = [*CELLS] if FULL else [*DIFFERENT]


def plan_of(cell: Cell) -> tuple[MemoryPlan, TrainingJob]:
    wanted = job(BASE | cell.changes)
    plan = make_plan(wanted, cell.node)
    assert isinstance(plan, MemoryPlan), plan
    does = {
        "host": plan.bytes[Tier.HOST].total > 0,
        "nvme": plan.bytes[Tier.NVME].total > 0,
        "recompute": Policy.RECOMPUTE in plan.activations.answers,
        "lean": plan.activations.lean,
        "streams": plan.parameters.streams,
        "stationary": plan.parameters.order == "WeightStationary",
    }
    assert all(does[what] for what in cell.holds), plan
    return plan, wanted


def write(directory: Path, name: str, wanted: TrainingJob, plan: MemoryPlan) -> None:
    here = str(directory)
    file = JobFile(
        name="peaks", uid="u", epoch=1, spec=wanted.spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=f"{here}/end", compute_threads=1,
    )  # fmt: skip
    (directory / f"{name}-job.json").write_text(file.model_dump_json(by_alias=True))
    (directory / f"{name}-plan.json").write_text(plan.model_dump_json())


def measured(cell: Cell, directory: Path) -> tuple[MemoryPlan, dict[str, int]]:
    plan, wanted = plan_of(cell)
    write(directory, "cell", wanted, plan)
    write(directory, "tiny", *tiny(cell))
    yardsticks = ["torch"] if cell.in_one_thread else []
    command = [sys.executable, "-m", "harness.peak_run", str(directory), *yardsticks]
    environment = os.environ | IMPORTABLE | {"THP_MEM_ALLOC_ENABLE": "1"}  # the trainer sets the same for itself
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return plan, json.loads(done.stdout.splitlines()[-1])


def tiny(cell: Cell) -> tuple[TrainingJob, MemoryPlan]:
    """The cell's job and plan with a tiny model."""
    changes = dict(cell.changes)
    changes = {name: value for name, value in changes.items() if not name.startswith("spec.memory.budget")}
    small = model(hiddenSize=64, numLayers=2, intermediateSize=160, vocabSize=512)
    wanted = job(BASE | changes | small | {"spec.training.sequenceLength": 64})
    plan = make_plan(wanted, cell.node)
    assert isinstance(plan, MemoryPlan), plan
    return wanted, plan


def staging_bytes(plan: MemoryPlan) -> int:
    """Bytes of buffers that may wait for the volume. The plan counts all of them, but how many wait at once depends on
    the machine."""
    return plan.bytes[Tier.HOST].buffers if Policy.NVME in plan.activations.answers else 0


@pytest.mark.parametrize("name", NAMES)
def test_every_tiers_predicted_peak_is_what_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, found = measured(CELLS[name], tmp_path)
    device, host, nvme = (plan.bytes[tier].total for tier in Tier)
    # The pool's slack is part of the process's own memory (pod_resources.RANK_BYTES).
    rows = [
        ("device + host", device + host, found["rss"] - native.POOL_SLACK_BYTES),
        ("device", device, found["own_device"]),
    ]
    if "torch" in found:
        rows.append(("device by torch", device, found["torch"]))
    if host:
        rows.append(("host", host, found["host"]))
    if nvme:
        rows += [("NVMe", nvme, found["own_nvme"]), ("spill file", plan.slab_bytes(Tier.NVME), found["nvme"])]
    with capsys.disabled():
        figures = [f"{what} {predicted / MIB:.0f} / {real / MIB:.0f} MiB ({predicted / real - 1:+.1%})"
                   for what, predicted, real in rows]  # fmt: skip
        print(f"\n{name}: predicted / measured: {', '.join(figures)}")
    for what, predicted, real in rows:
        assert real <= predicted * (1 + TOLERANCE), what
        untouched = staging_bytes(plan) if what in ("device + host", "host") else 0
        assert real >= (predicted - untouched) / (1 + TOLERANCE), what
    assert found["own_host"] <= host


# --- homes on NVMe ----------------------------------------------------------------------------------------------------

DEEP = model(hiddenSize=384, numLayers=16, numHeads=4, numKeyValueHeads=4, intermediateSize=1056) | {
    "spec.training.sequenceLength": 64, "spec.training.microBatchSize": 1, "spec.training.globalBatchSize": 2,
}  # fmt: skip
"""many small segments and few tokens, so that memory holds mostly parameters, gradients and states"""
STREAMED = {
    "trained, states on NVMe too": DEEP | STREAM | forced("Nvme", "Recompute"),
    "frozen below adapters": DEEP | STREAM | forced("Host", "Recompute") | {"spec.model.lora": {"rank": 4}},
}
STREAMED_NAMES = [*STREAMED] if FULL else [*STREAMED][:1]


@pytest.mark.parametrize("name", STREAMED_NAMES)
def test_nvme_parameters_train_with_less_than_half_of_them_in_memory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Makes the same run twice: with homes in host memory, and with a host budget that has no room for most of them.
    Both need the same memory in addition to the parameters (gradients, states, slots, activations)."""
    plan, with_all = grown(STREAMED[name], tmp_path / "host")
    nbytes = sum(held.parameters for held in plan.bytes.values())
    assert plan.bytes[Tier.HOST].parameters > nbytes * 0.8
    budget = {"spec.memory.budget.host": str(plan.bytes[Tier.HOST].total - int(nbytes * 0.75))}
    plan, without = grown(STREAMED[name] | budget, tmp_path / "nvme")
    held = without - (with_all - nbytes)
    with capsys.disabled():
        print(f"\n{name}: memory holds {held / MIB:.0f} of {nbytes / MIB:.0f} MiB of parameters")
    assert plan.bytes[Tier.NVME].parameters > nbytes / 2
    assert held < nbytes / 2


def grown(changes: dict[str, Any], directory: Path) -> tuple[MemoryPlan, int]:
    """The plan, and the growth of the process's peak resident set: device and host together."""
    directory.mkdir()
    plan, found = measured(Cell(changes, holds=("streams", "recompute")), directory)
    return plan, found["rss"]
