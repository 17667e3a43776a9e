"""Where one segment's graph begins."""

from __future__ import annotations

from spillway_trainer.model_spill.weight_stationary import Entrance


def test_prefetch_submits_every_reload() -> None:
    submitted: list[str] = []
    entrance = Entrance(reloads=[lambda: submitted.append("first"), lambda: submitted.append("second")])
    entrance.prefetch()
    assert submitted == ["first", "second"]
