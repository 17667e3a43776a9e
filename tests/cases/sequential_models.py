"""Plain nn.Sequential models, as entry points return them. Some convolve over the tokens of a text as over an image."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.huggingface_models import spec_of
from cases.model_spill_cases import RandomBatches
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain

VOCABULARY, WIDTH = 61, 8
"""the vocabulary of model_spill_cases.RandomBatches, and the number of channels"""


class ToImage(nn.Module):
    """[B, T, C] -> [B, C, 2, T / 2]"""

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        return x_BTC.transpose(1, 2).reshape(B, C, 2, T // 2)


class BasicBlock(nn.Module):
    """The basic block of ResNet-18 (He et al., arXiv 1512.03385)."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels, momentum=None)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out_channels:
            projection = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class Predictions(nn.Module):
    """Computes logits of every token from an image of half the width and height."""

    def __init__(self, channels: int, vocabulary: int) -> None:
        super().__init__()
        self.output = nn.Conv2d(channels, 4 * vocabulary, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.output(x), 2).flatten(2).transpose(1, 2)


def resnet(vocabulary: int = VOCABULARY) -> nn.Sequential:
    stem = nn.Sequential(nn.Embedding(vocabulary, WIDTH), ToImage(), nn.BatchNorm2d(WIDTH), nn.ReLU())
    first = nn.Sequential(BasicBlock(WIDTH, WIDTH), BasicBlock(WIDTH, WIDTH))
    second = nn.Sequential(BasicBlock(WIDTH, 2 * WIDTH, stride=2), BasicBlock(2 * WIDTH, 2 * WIDTH))
    layers = OrderedDict(
        stem=stem, stage1=first, pool=nn.Identity(), stage2=second, head=Predictions(2 * WIDTH, vocabulary)
    )
    return nn.Sequential(layers)


def resnet_of_text() -> nn.Sequential:
    """A resnet for text, whose tokenizer has a token for every byte."""
    return resnet(300)


def perceptron() -> nn.Sequential:
    """Uses one activation module in several places, as users do."""
    act = nn.GELU()
    return nn.Sequential(
        nn.Identity(), nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 24), act, nn.Dropout(0.1),
        nn.Linear(24, WIDTH), act, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD, _ = self.cells(x_BTD)
        return x_BTD + torch.tanh(y_BTD) * torch.sigmoid(x_BTD)


def recurrent() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Recurrent(), Recurrent(), nn.Linear(WIDTH, VOCABULARY))


@dataclass(frozen=True)
class SequentialModel:
    """A model for model_spill_cases.Laboratory."""

    name: str
    num_micro_batches: int = 2
    clipping: float | None = 0.5
    compute: str = "float32"
    tied: bool = False

    def batches(self) -> Any:
        return RandomBatches()

    def build(self) -> Chain:
        return build_model(spec_of(entrypoint=f"cases.sequential_models:{self.name}", compute=self.compute))

    @property
    def num_segments(self) -> int:
        return len(self.build().segments)
