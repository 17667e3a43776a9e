"""A model of the user's whose process is killed once, in the middle of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import Tensor, nn

MARKER = "TEST_KILLED_ONCE"
"""environment: a file that appears when it was killed; without the variable it is not"""
CALL = 14


class KilledOnce(nn.Module):
    calls = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        if MARKER in os.environ and self.calls == CALL and not Path(os.environ[MARKER]).exists():
            Path(os.environ[MARKER]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x_BTD


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(300, 16), KilledOnce(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 300))
