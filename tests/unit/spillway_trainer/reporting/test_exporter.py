"""/metrics: the declared names, nothing else, and the last step's figures."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from harness import local_runs
from spillway import metrics
from spillway.api.progress import MemberProgress, MemberState
from spillway.errors import UserError
from spillway.metrics import StepMetrics
from spillway_trainer.reporting.exporter import Exporter


def step(tokens: int = 100, skipped: bool = False, loss: float = 2.5, loss_scale: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=7,
        loss=loss,
        loss_scale=loss_scale,
        learning_rate=1e-3,
        gradient_norm=1.0,
        clip_factor=1.0,
        tokens=tokens,
        step_seconds=0.5,
        phase_seconds={"forward": 0.2, "wait": 0.1},
        tier_bytes={"device": 10, "host": 20, "nvme": 0},
        tier_peak_bytes={"device": 12, "host": 22, "nvme": 5},
        moved_bytes={"h2d": 3},
        allocator_retries=2,
        skipped=skipped,
    )


def new_exporter(checkpoints: str = "/") -> Exporter:
    job = local_runs.job_file(Path(), Path("text"), Path("corpus"), 1)
    return Exporter(
        job.model_copy(update={"checkpoint_directory": checkpoints}),
        0,
        local_runs.spread_plan(),
        "threads+O_DIRECT",
        lambda: {"write_failed": 2},
        lambda: 80,
    )


def scrape(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(exporter)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def names(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> set[str]:
    return {name for name, _ in samples}


def test_before_the_first_step_only_the_plan_is_shown() -> None:
    assert names(scrape(new_exporter())) == {
        metric.name
        for metric in (
            metrics.STEPS_PLANNED,
            metrics.PREDICTED_STEP_SECONDS,
            metrics.IO_BACKEND,
            metrics.TIER_BUDGET_BYTES,
            metrics.PREDICTED_TIER_BYTES,
            metrics.SPILL_FILE_BYTES,
            metrics.SPILL_FAULTS,
            metrics.CHECKPOINTS_MISSED,
        )
    }


@pytest.mark.parametrize("loss_scale", [65536.0, None])
def test_every_declared_metric_but_the_launchers_is_exported_and_no_other(loss_scale: float | None) -> None:
    """Also the loss scale's where there is none: dashboards of every job have the same panels."""
    exporter = new_exporter()
    exporter.step(step(loss_scale=loss_scale))
    exporter.evaluation(2.0)
    exporter.checkpoint(6)
    samples = scrape(exporter)
    assert names(samples) == {metric.name for metric in metrics.ALL if metric is not metrics.RANK_UP}
    assert samples[metrics.LOSS_SCALE.name, (("training_job", "small"),)] == (loss_scale or 1.0)


def test_the_volume_of_checkpoints_is_measured_after_each(tmp_path: Path) -> None:
    exporter = new_exporter(str(tmp_path / "checkpoints"))
    exporter.checkpoint(6)
    assert metrics.CHECKPOINT_VOLUME_FREE.name not in names(scrape(exporter)), "no checkpoint is there to ask about"
    (tmp_path / "checkpoints").mkdir()
    exporter.checkpoint(12)
    free = scrape(exporter)[metrics.CHECKPOINT_VOLUME_FREE.name, (("training_job", "small"),)]
    volume = os.statvfs(tmp_path)
    assert free == pytest.approx(volume.f_bavail / volume.f_blocks, rel=0.01)


def test_sweep_exports_series_per_member_and_sums_their_steps() -> None:
    exporter = new_exporter()
    exporter.step(step())
    exporter.sweep(
        (
            MemberProgress(name="a", step=4, num_steps=10, loss=2.0, objective=3.0, state=MemberState.RUNNING),
            MemberProgress(name="b", step=2, num_steps=10, state=MemberState.STOPPED),
        ),
        "a",
    )
    samples = scrape(exporter)
    job = ("training_job", "small")
    of_members = {name for name in names(samples) if name.startswith(metrics.MEMBER_PREFIX)}
    assert of_members == {metric.name for metric in metrics.SWEEP}
    found = {key: value for key, value in samples.items() if key[0] in of_members}
    assert found == {
        (metrics.MEMBER_STEP.name, (("member", "a"), job)): 4.0,
        (metrics.MEMBER_STEP.name, (("member", "b"), job)): 2.0,
        (metrics.MEMBER_STEPS_PLANNED.name, (("member", "a"), job)): 10.0,
        (metrics.MEMBER_STEPS_PLANNED.name, (("member", "b"), job)): 10.0,
        (metrics.MEMBER_LOSS.name, (("member", "a"), job)): 2.0,
        (metrics.MEMBER_OBJECTIVE.name, (("member", "a"), job)): 3.0,
        (metrics.MEMBER_STATE.name, (("member", "a"), ("state", "Running"), job)): 1.0,
        (metrics.MEMBER_STATE.name, (("member", "b"), ("state", "Stopped"), job)): 1.0,
        (metrics.MEMBER_BEST.name, (("member", "a"), job)): 1.0,
        (metrics.MEMBER_BEST.name, (("member", "b"), job)): 0.0,
    }
    assert samples[metrics.STEP.name, (job,)] == 6.0
    assert samples[metrics.STEPS_PLANNED.name, (job,)] == 12.0


def test_counters_add_up_over_steps() -> None:
    exporter = new_exporter()
    exporter.step(step(tokens=100))
    exporter.step(step(tokens=50, skipped=True))
    samples = scrape(exporter)
    job = ("training_job", "small")
    assert samples[metrics.TOKENS.name, (job,)] == 150
    assert samples[metrics.NON_FINITE.name, (job,)] == 1
    assert samples[metrics.PHASE_SECONDS.name, (("phase", "forward"), job)] == 0.4
    assert samples[metrics.MOVED_BYTES.name, (("link", "h2d"), ("rank", "0"), job)] == 6
    assert samples[metrics.ALLOCATOR_RETRIES.name, (("rank", "0"), job)] == 4


def test_tier_series_carry_rank_and_tier() -> None:
    exporter = new_exporter()
    exporter.step(step())
    labels = (("rank", "0"), ("tier", "nvme"), ("training_job", "small"))
    assert scrape(exporter)[metrics.TIER_PEAK_BYTES.name, labels] == 5


def test_faults_of_spill_devices_carry_rank_and_kind() -> None:
    (metric,) = [m for m in new_exporter().collect() if m.name + "_total" == metrics.SPILL_FAULTS.name]
    (sample,) = metric.samples
    assert (sample.labels, sample.value) == ({"training_job": "small", "rank": "0", "kind": "write_failed"}, 2.0)


def test_the_bytes_of_spill_files_are_those_of_now() -> None:
    assert scrape(new_exporter())[metrics.SPILL_FILE_BYTES.name, (("rank", "0"), ("training_job", "small"))] == 80.0


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"metrics port {port}.*in use"):
            new_exporter().serve(port)


def test_a_link_that_is_first_used_during_a_scrape_does_not_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = new_exporter()
    exporter.step(step())
    original = CounterMetricFamily.add_metric

    def meanwhile(family: CounterMetricFamily, *arguments: Any) -> None:
        exporter._totals.moved_bytes[f"link {len(exporter._totals.moved_bytes)}"] = 1
        original(family, *arguments)

    monkeypatch.setattr(CounterMetricFamily, "add_metric", meanwhile)
    scrape(exporter)


def test_the_loss_scale_is_shown_with_the_steps_that_it_overflowed() -> None:
    """A loss that is not finite was not the scale's doing."""
    exporter = new_exporter()
    for one in (step(loss_scale=1024.0, skipped=True), step(loss_scale=512.0, skipped=True, loss=float("nan"))):
        exporter.step(one)
    exporter.step(step(loss_scale=256.0))
    samples, job = scrape(exporter), (("training_job", "small"),)
    assert samples[metrics.LOSS_SCALE.name, job] == 256.0
    assert samples[metrics.NON_FINITE.name, job] == 2
    assert samples[metrics.LOSS_SCALE_OVERFLOWS.name, job] == 1
