"""What a progress report makes of the status: bounded, never backwards, readable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from spillway.api.field_types import MAX_COUNT
from spillway.api.progress import CommittedCheckpoint, ProgressReport
from spillway.api.status import CheckpointStatus, MemoryStatus, Progress
from spillway_operator.decide.progress_status import (
    ReportedStatus,
    at_the_end,
    at_the_start,
    correction_notes,
    duration,
    percent,
    short_bytes,
    with_report,
    with_saved_step,
)

NOTHING = ReportedStatus(None, None, None)
NOW = "2026-11-21T10:00:00Z"
GIB = 1 << 30
MIB = 1 << 20


def report(step: int = 42, epoch: int = 2, **more: object) -> ProgressReport:
    own = {
        "version": 1,
        "epoch": epoch,
        "step": step,
        "steps": 100,
        "stepSeconds": 2.0,
        "tokensPerSecond": 1234.5,
    } | more
    return ProgressReport.model_validate({"spillway": own})


def after(before: ReportedStatus, said: ProgressReport, attempt: int = 2) -> ReportedStatus:
    return with_report(before, said, attempt, 100, NOW)


def progress(found: ReportedStatus) -> Progress:
    assert found.progress is not None
    return found.progress


def test_a_report_becomes_figures_for_people() -> None:
    found = progress(after(NOTHING, report(loss=5.54912)))
    assert (found.step, found.steps, found.display) == (42, 100, "42%")
    assert (found.loss, found.tokens_per_second, found.eta) == ("5.549", "1234", "1m56s")
    assert found.last_step_time == NOW


def test_the_estimate_of_the_trainer_goes_before_ours() -> None:
    said = ProgressReport.model_validate(
        report().model_dump(by_alias=True) | {"trainerStatus": {"estimatedRemainingSeconds": 11520}}
    )
    assert progress(after(NOTHING, said)).eta == "3h12m"


def test_no_rate_or_estimate_is_shown_before_a_step_was_measured() -> None:
    found = progress(after(NOTHING, report(step=0, stepSeconds=0.0, tokensPerSecond=0.0)))
    assert (found.eta, found.tokens_per_second) == ("", "")
    said = ProgressReport.model_validate(
        report(step=0, stepSeconds=0.0).model_dump(by_alias=True) | {"trainerStatus": {"estimatedRemainingSeconds": 0}}
    )
    assert progress(after(NOTHING, said)).eta == ""
    assert progress(after(NOTHING, report(step=100, stepSeconds=0.0))).eta == "0s"


def test_a_step_that_was_saved_at_the_end_is_never_ahead_of_the_status() -> None:
    before = after(NOTHING, report(42, checkpoint={"step": 40, "epoch": 2, "path": "/c/demo/step-40.e2"}))
    found = with_saved_step(before, 57, 2, 100)
    assert progress(found).step == 57 and progress(found).display == "57%"
    assert found.checkpoint == CheckpointStatus(step=57, epoch=2, path="/c/demo/step-57.e2")
    assert with_saved_step(found, 50, 2, 100) == found
    assert progress(with_saved_step(NOTHING, 10**9, 1, 100)).step == 100


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_report_of_another_attempt_changes_nothing(epoch: int) -> None:
    before = ReportedStatus(Progress(step=7, steps=100), MemoryStatus(device="1Gi"), CheckpointStatus(step=5))
    assert after(before, report(epoch=epoch)) is before


def test_steps_never_go_back_within_an_attempt() -> None:
    first = after(NOTHING, report(50))
    assert progress(after(first, report(40))).step == 50


def test_a_new_attempt_may_go_back_to_its_checkpoint() -> None:
    first = after(NOTHING, report(50))
    begun = ReportedStatus(at_the_start(first.progress, 100), first.memory, first.checkpoint)
    assert progress(begun).step == 50 and progress(begun).last_step_time is None
    assert progress(after(begun, report(40))).step == 40


def test_steps_and_their_number_are_the_specs() -> None:
    found = progress(after(NOTHING, report(10**9, steps=10**9)))
    assert (found.step, found.steps, found.display) == (100, 100, "100%")


def test_memory_shows_the_device_against_its_budget_and_what_is_outside() -> None:
    said = report(peak={"device": 71 * GIB, "host": 3 * GIB, "nvme": GIB // 2}, budget={"device": 80 * GIB})
    memory = after(NOTHING, said).memory
    assert memory is not None
    assert (memory.device, memory.spilled) == ("71Gi/80Gi", "3.5Gi")
    assert memory.peak is not None and memory.peak.host == 3 * GIB


def test_a_checkpoint_is_kept_until_a_newer_one_comes() -> None:
    first = after(NOTHING, report(checkpoint={"step": 40, "epoch": 2, "path": "/checkpoints/step-40.e2", "time": 1.0}))
    assert first.checkpoint == CheckpointStatus(
        step=40, epoch=2, path="/checkpoints/step-40.e2", time="1970-01-01T00:00:01Z"
    )
    for older in ({"step": 39, "epoch": 2}, {"step": 90, "epoch": 1}, None):
        assert after(first, report(checkpoint=older)).checkpoint == first.checkpoint


def test_a_checkpoint_of_a_later_attempt_is_not_believed() -> None:
    assert after(NOTHING, report(checkpoint={"step": 40, "epoch": 3})).checkpoint is None


def test_a_script_that_knows_only_kubeflows_protocol_shows_its_percentage() -> None:
    said = ProgressReport.model_validate(
        {"trainerStatus": {"progressPercentage": 30, "estimatedRemainingSeconds": 75,
                           "metrics": [{"name": "mfu", "value": "0.4"}, {"name": "step_seconds", "value": "3"},
                                       {"name": "loss", "value": "1.2\n\x1b[31m"}]}}
    )  # fmt: skip
    found = progress(after(NOTHING, said))
    assert (found.step, found.display, found.eta, found.loss) == (30, "30%", "1m15s", "1.2 [31m")


def test_an_empty_report_changes_nothing() -> None:
    assert after(NOTHING, ProgressReport()) == NOTHING


def test_a_complete_job_shows_all_its_steps() -> None:
    found = at_the_end(progress(after(NOTHING, report(98))), 100)
    assert (found.step, found.display, found.eta, found.loss) == (100, "100%", "0s", "")


def test_no_report_is_larger_than_the_status_can_hold() -> None:
    largest = report(step=MAX_COUNT, checkpoint={"step": MAX_COUNT, "epoch": 2})
    found = with_report(ReportedStatus(None, None, None), largest, 2, MAX_COUNT, "2026-11-21T12:00:00Z")
    assert found.checkpoint is not None
    assert (progress(found).step, found.checkpoint.step) == (MAX_COUNT, MAX_COUNT)
    with pytest.raises(ValidationError):
        report(checkpoint={"step": MAX_COUNT + 1, "epoch": 2})


def test_figures_that_do_not_fit_change_nothing() -> None:
    before = after(ReportedStatus(None, None, None), report())
    own = report().spillway
    assert own is not None
    odd = report().model_copy(update={"spillway": own.model_copy(update={"step_seconds": float("nan")})})
    wide = report().model_copy(update={"spillway": own.model_copy(update={"last_step_time": float("inf")})})
    large = {"checkpoint": CommittedCheckpoint.model_construct(step=2 * MAX_COUNT, epoch=2, path="", time=0.0)}
    too_large = report().model_copy(update={"spillway": own.model_copy(update=large)})
    assert after(before, too_large) == before
    for said in (odd, wide):
        after(before, said)


def test_times_beyond_the_calendar_are_bounded() -> None:
    assert progress(after(NOTHING, report(lastStepTime=9e10))).last_step_time is not None
    assert progress(after(NOTHING, report(lastStepTime=1e11))).last_step_time is not None


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0"), (1023, "1023"), (1536, "1.5Ki"), (71 * GIB, "71Gi"), (GIB, "1Gi"), (5 * (1 << 40), "5Ti")],
)
def test_bytes_are_short(num_bytes: int, shown: str) -> None:
    assert short_bytes(num_bytes) == shown


def test_durations_and_shares_are_readable() -> None:
    assert [duration(seconds) for seconds in (0, 0.4, 59, 311, 11520)] == ["0s", "0s", "59s", "5m11s", "3h12m"]
    assert [percent(0, 0), percent(1, 3)] == ["", "33%"]


VOLUME = {
    "size": 400 * MIB, "freeAtStart": 200 * MIB, "free": 100 * MIB, "numRanks": 2, "activations": 48 * MIB,
    "hostRoom": 48 * MIB,
}  # fmt: skip
LOW = VOLUME | {"free": 20 * MIB}
CORRECTED = VOLUME | {"free": 60 * MIB, "activations": 28 * MIB, "hostRoom": 28 * MIB}


def memory(
    before: ReportedStatus, volume: dict[str, int] | None, *, is_corrected: bool = True
) -> tuple[ReportedStatus, list[str]]:
    """After a report, and the reasons of its events."""
    found = with_report(before, report(spillVolume=volume), 2, 100, NOW, is_corrected=is_corrected)
    return found, [note.reason for note in correction_notes(before.memory, found.memory, is_corrected=is_corrected)]


def told(found: ReportedStatus) -> tuple[int | None, str]:
    assert found.memory is not None
    return found.memory.activations, found.memory.correction


SENTENCE = "other data fills the spill volume: activations use 28Mi of each rank's spill file instead of 48Mi, and the rest of them stays in host memory"  # noqa: E501


def test_a_live_correction_is_told_once() -> None:
    found, events = memory(NOTHING, VOLUME)
    assert (told(found), events) == ((48 * MIB, ""), [])
    found, events = memory(found, LOW)
    assert (told(found), events) == ((28 * MIB, SENTENCE), ["Corrected"])
    for volume in (LOW, CORRECTED, CORRECTED):
        again, events = memory(found, volume)
        assert (again, events) == (found, [])
    found, events = memory(found, CORRECTED | {"free": 20 * MIB})
    assert told(found)[0] == 8 * MIB and events == ["Corrected"]


def test_a_correction_between_two_writes_is_told_too() -> None:
    found, _ = memory(NOTHING, VOLUME)
    found, events = memory(found, CORRECTED)
    assert (told(found), events) == ((28 * MIB, SENTENCE), ["Corrected"])


def test_a_correction_before_the_first_write_is_told_too() -> None:
    said = report(spillVolume=CORRECTED)
    found = with_report(NOTHING, said, 2, 100, NOW, planned_activations=48 * MIB)
    assert told(found) == (28 * MIB, SENTENCE)
    assert [note.reason for note in correction_notes(None, found.memory, is_corrected=True)] == ["Corrected"]
    assert with_report(found, said, 2, 100, NOW, planned_activations=48 * MIB) == found


def test_advice_is_told_once_and_again_only_when_less_would_be_left() -> None:
    found, _ = memory(NOTHING, VOLUME, is_corrected=False)
    found, events = memory(found, LOW, is_corrected=False)
    sentence = (
        "other data fills the spill volume: mode Auto would let activations use 28Mi of each rank's spill file instead "
        "of 48Mi"
    )
    assert (told(found), events) == ((28 * MIB, sentence), ["SpillVolumeLow"])
    for free in (20, 21, 40, 100):
        again, events = memory(found, VOLUME | {"free": free * MIB}, is_corrected=False)
        assert (again, events) == (found, [])
    found, events = memory(found, VOLUME | {"free": 10 * MIB}, is_corrected=False)
    assert told(found)[0] == 23 * MIB and events == ["SpillVolumeLow"]


def test_a_new_attempt_begins_with_its_plan() -> None:
    corrected, _ = memory(memory(NOTHING, VOLUME)[0], LOW)
    begun = replace(corrected, progress=at_the_start(corrected.progress, 100))
    found, events = memory(begun, VOLUME)
    assert (told(found), events) == ((48 * MIB, ""), [])
    assert told(memory(corrected, None)[0]) == (None, "")
