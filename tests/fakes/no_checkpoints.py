"""A stand-in for checkpoints, for tests that need none."""

from __future__ import annotations

from spillway_trainer.trainer import RunProgress, Written


class NoCheckpoints:
    """Writes no checkpoints, and reports each as committed."""

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        return Written(progress.step)

    def written(self, *, wait: bool) -> Written | None:
        return None
