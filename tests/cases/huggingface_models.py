"""Small models of `transformers` for tests, built as the trainer builds them and filled with values."""

from __future__ import annotations

from typing import Any

import torch
import yaml
from torch import Tensor

from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway_trainer.corpus.objective import IGNORED_LABEL, TrainingObjective, prefix_length
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain, allocate

VOCABULARY, LENGTH, BATCH = 97, 16, 2
SPEC = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: small}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 4, intermediateSize: 48, vocabSize: 97}
    precision: {compute: float32}
  data: {builtin: PythonStdlib}
  training: {steps: 2, sequenceLength: 16, globalBatchSize: 4, microBatchSize: 2}
"""


def spec_of(architecture: str = "llama", compute: str = "float32", **model: Any) -> TrainingJobSpec:
    """A job's spec; `model` replaces or adds fields of spec.model (None removes one), `config` those of its sizes."""
    document = yaml.safe_load(SPEC)
    fields = document["spec"]["model"]
    fields["config"] |= {"architecture": architecture, **(model.pop("config", None) or {})}
    fields["precision"]["compute"] = compute
    if model.keys() & {"source", "entrypoint"}:
        del fields["config"]
    fields |= model
    return TrainingJob.model_validate(document).spec


def filled(chain: Chain, seed: int = 1, scale: float = 3.0) -> Chain:
    """With memory and values; matrices larger than initialised, so that a wrong bit does not get lost."""
    allocate(chain)
    for name, value in chain.initial_values(seed):
        chain.get_parameter(name).data.copy_(value * scale if value.dim() > 1 else value)
    chain.tie()
    return chain


def small_model(architecture: str = "llama", compute: str = "float32", scale: float = 3.0, **model: Any) -> Chain:
    return filled(build_model(spec_of(architecture, compute, **model)), scale=scale)


def batch_for(
    objective: TrainingObjective, seed: int = 5, batch: int = BATCH, length: int = LENGTH
) -> tuple[Tensor, Tensor, int]:
    """Tokens, labels and the number of labels; some labels are left out."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, VOCABULARY, (2, batch, length), generator=generator)
    left_out = torch.rand(labels.shape, generator=generator) < (0.8 if objective is TrainingObjective.MASKED else 0.2)
    if objective is TrainingObjective.PREFIX:
        left_out[:, : prefix_length(length)] = True
        labels = tokens.clone()
    labels = labels.masked_fill(left_out, IGNORED_LABEL)
    return tokens.clone(), labels, int((labels != IGNORED_LABEL).sum())
