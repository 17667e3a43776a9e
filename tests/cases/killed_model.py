"""A user's model that kills its process once, in the middle of a run, when there is a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import Tensor, nn

from harness.patience import wait_until

MARKER = "TEST_KILLED_ONCE"
"""environment variable with the path of a file that is made before the kill, RUN.killed; without the variable, nothing
is killed"""
CALL = 14


class KilledOnce(nn.Module):
    calls = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        if MARKER in os.environ and self.calls == CALL and not Path(os.environ[MARKER]).exists():
            checkpoints = Path(os.environ[MARKER]).with_suffix("") / "checkpoints"
            wait_until(lambda: any(checkpoints.glob("step-*.e1")))
            Path(os.environ[MARKER]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x_BTD


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(300, 16), KilledOnce(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 300))
