"""Models of `transformers`, with and without adapters, whose segments stream: the bits of the resident run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.huggingface_models import BATCH, batch_for, spec_of
from cases.model_spill_cases import Laboratory, Technique
from harness import local_runs
from spillway.plan import Policy
from spillway_trainer.corpus.data import Batch
from spillway_trainer.corpus.objective import TrainingObjective
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "config": {"tieWordEmbeddings": True}},
    "gpt2": {"architecture": "gpt2", "config": {"dropout": "0.1"}},
    "bert": {"architecture": "bert", "config": {"dropout": "0.1"}},
    "t5": {"architecture": "t5", "config": {"dropout": "0.1"}},
    "llama, adapters": {"architecture": "llama", "lora": {"rank": 4}},
    "t5, adapters": {"architecture": "t5", "lora": {"rank": 4}},
}
TECHNIQUES = {
    "host, in order": Technique("host", 2, answers="recompute", lanes="cpu"),
    "NVMe, one slot": Technique("nvme", 1, answers="mixed", lanes="lazy"),
    "host, weight-stationary": Technique("host", 2, "WeightStationary", Policy.HOST, "mixed", "lazy"),
    "NVMe, weight-stationary": Technique("nvme", 2, "WeightStationary", Policy.NVME, "recompute", "cpu"),
}


@dataclass(frozen=True)
class HuggingFaceModel:
    """As model_spill_cases.Model."""

    name: str
    num_micro_batches: int = 2
    clipping: float | None = 0.3
    tied: bool = False

    def build(self) -> Chain:
        return build_model(spec_of(compute="bfloat16", **dict(ARCHITECTURES[self.name])))

    @property
    def num_segments(self) -> int:
        return len(self.build().segments)

    def batches(self) -> Any:
        return ObjectiveBatches(self.build().objective)


@dataclass(frozen=True)
class ObjectiveBatches:
    objective: TrainingObjective

    def batch(self, samples: Sequence[int]) -> Batch:
        return Batch(*batch_for(self.objective, seed=samples[0]))

    def num_unmasked(self, samples: Sequence[int]) -> int:
        batches = (samples[start : start + BATCH] for start in range(0, len(samples), BATCH))
        return sum(self.batch(each).num_unmasked for each in batches)

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        yield self.batch([10_000])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root: Path = tmp_path_factory.mktemp("huggingface")
    return Laboratory(root, local_runs.write_text(root / "text"))


@pytest.mark.sweep
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streaming_changes_no_bit(name: str, technique: str, laboratory: Laboratory) -> None:
    model: Any = HuggingFaceModel(name)
    outcome = laboratory.streamed(model, TECHNIQUES[technique])
    assert outcome.differences(laboratory.resident(model)) == []
