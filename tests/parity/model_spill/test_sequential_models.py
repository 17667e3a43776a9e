"""A plain nn.Sequential streams as any chain does, and a ResNet's running statistics move once a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.model_spill_cases import STEPS, Laboratory, RandomBatches, Technique
from cases.sequential_models import SequentialModel, perceptron, resnet
from harness import local_runs
from spillway.plan import Policy
from spillway_trainer import running_statistics
from spillway_trainer.models.chain import allocate
from spillway_trainer.models.sequential import SequentialChain

TECHNIQUES = {
    "host, recomputed": Technique("host", 2, answers="recompute", lanes="cpu"),
    "NVMe, one slot, mixed": Technique("nvme", 1, answers="mixed", lanes="lazy"),
    "weight-stationary": Technique("host", 2, "WeightStationary", Policy.HOST, "mixed", "lazy"),
    "weight-stationary from NVMe": Technique("nvme", 2, "WeightStationary", Policy.NVME, "recompute", "cpu"),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root: Path = tmp_path_factory.mktemp("sequential")
    return Laboratory(root, local_runs.write_text(root / "text"))


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", ["perceptron", "resnet"])
def test_streaming_changes_no_bit_and_no_running_statistic(name: str, technique: str, laboratory: Laboratory) -> None:
    model: Any = SequentialModel(name, num_micro_batches=3)
    outcome = laboratory.streamed(model, TECHNIQUES[technique])
    assert outcome.differences(laboratory.resident(model)) == []
    statistics = {name for name in outcome.tensors if name.startswith(running_statistics.PREFIX)}
    assert len(statistics) == (3 * 10 if model.name == "resnet" else 0)


def test_every_micro_batch_of_a_step_moves_the_statistics_once(laboratory: Laboratory) -> None:
    """Also where each forward runs twice; evaluation, in which they are read, moves nothing."""
    model: Any = SequentialModel("resnet", num_micro_batches=3)
    tensors = laboratory.streamed(model, TECHNIQUES["host, recomputed"]).tensors
    counts = [int(value) for name, value in tensors.items() if name.endswith("num_batches_tracked")]
    assert counts == [3 * STEPS] * len(counts)


@pytest.mark.parametrize("make", [perceptron, resnet])
def test_a_chain_of_an_nn_sequential_computes_what_it_computes(make: Any) -> None:
    """Same values in both; loss, every gradient and every running statistic bit for bit, dropout drawn alike."""
    torch.manual_seed(0)
    plain = make()
    with torch.device("meta"):
        chain = SequentialChain(make(), "here")
    running_statistics.allocate(chain)
    allocate(chain)
    ours = dict(zip((n for n, _ in plain.named_parameters()), chain.parameters(), strict=True))
    for name, parameter in plain.named_parameters():
        ours[name].data.copy_(parameter)
    batch = RandomBatches().batch([0, 1])
    torch.manual_seed(1)
    loss = chain(batch.tokens_BT, batch.labels_BT, batch.num_unmasked)
    loss.backward()
    torch.manual_seed(1)
    logits = plain(batch.tokens_BT)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="sum") / batch.num_unmasked
    expected.backward()
    assert torch.equal(loss, expected)
    assert [name for name, p in plain.named_parameters() if not torch.equal(p.grad, ours[name].grad)] == []
    moved = zip(chain.buffers(), plain.buffers(), strict=True)
    assert all(torch.equal(buffer, same) for buffer, same in moved)


def test_segments_begin_at_children_with_parameters() -> None:
    with torch.device("meta"):
        chains = [SequentialChain(make(), "here") for make in (perceptron, resnet)]
    assert [[name for name, _ in chain.segments] for chain in chains] == [
        ["1", "2", "5", "7", "8"],
        ["stem", "stage1", "stage2", "head"],
    ]
    assert [len(module._modules) for _, module in chains[0].segments] == [2, 3, 2, 1, 1]


def test_a_norm_that_is_not_torchs_own_may_not_write() -> None:
    class Renormed(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.running_mean.mean()  # type: ignore[union-attr]

    assert not running_statistics.buffers(Renormed(3))
    assert len(running_statistics.buffers(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(2)))) == 6
