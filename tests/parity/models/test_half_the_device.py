"""Families of `transformers` train in half of the device memory that they take, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases.huggingface_models import of_structure, spec_of
from harness import peak_run
from harness.depth import some
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB
from spillway_trainer.inspect import shape_of_chain
from spillway_trainer.models.build import build_model

BATCH, LENGTH = 8, 64
HEAD = {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "small"}}
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt", "mixtral", "qwen2_moe",
    "gpt2", "bert", "falcon",
]  # fmt: skip


def trained(job: TrainingJob, plan: MemoryPlan, directory: Path) -> tuple[dict[str, Tensor], int]:
    """The states at the end, and the peak of the device that the trainer counts."""
    here, listener = str(directory), peak_run.Listener()
    file = JobFile(
        name="small", uid="u", epoch=1, spec=job.spec, output_directory=here, corpus_directory=here,
        checkpoint_directory=here, spill_directory=here, termination_message_path=here, compute_threads=1,
    )  # fmt: skip
    assembly = peak_run.run(file, plan, listener)
    states = {name: value.clone() for name, value in assembly.optimizer.state()}
    assembly.tiers.close()
    return states, listener.peaks[Tier.DEVICE]


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_a_family_trains_in_half_of_its_device_memory_with_equal_bits(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    of_structure(family).save_pretrained(tmp_path / "source")
    spec = spec_of(source={"path": str(tmp_path / "source")})
    training = {"micro_batch_size": BATCH, "global_batch_size": BATCH, "sequence_length": LENGTH, "num_steps": 1}
    spec = spec.model_copy(update={"training": spec.training.model_copy(update=training)})
    job = TrainingJob.model_validate({**HEAD, "spec": spec})
    shape = shape_of_chain(build_model(spec), BATCH, LENGTH)
    ample = make_plan(job, local_node(1, GIB, GIB, GIB), Overrides(shape=shape))
    assert isinstance(ample, MemoryPlan) and not ample.spills, ample
    plain, peak = trained(job, ample, tmp_path)
    half = make_plan(job, local_node(1, GIB, GIB, GIB), Overrides(shape=shape, device_bytes=peak // 2))
    assert isinstance(half, MemoryPlan), half
    found, spilled_peak = trained(job, half, tmp_path)
    print(f"\n{family}: {peak} -> {spilled_peak} ({spilled_peak / peak:.2f})")
    assert spilled_peak <= peak / 2
    assert found.keys() == plain.keys()
    assert [name for name, value in plain.items() if not torch.equal(value, found[name])] == []
