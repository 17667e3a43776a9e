"""Updates status.progress, .memory, .checkpoint and .members from a progress report: bounded, never backwards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from spillway.api.field_types import MAX_COUNT
from spillway.api.progress import (
    MemberProgress,
    MemberState,
    ProgressReport,
    SpillVolume,
    TierFigures,
    TrainingProgress,
)
from spillway.api.status import (
    CheckpointStatus,
    MemberStatus,
    MemoryStatus,
    Progress,
    TierQuantities,
    TrainingJobStatus,
)
from spillway.feedback.live_correction import LEAST_BYTES, lowered
from spillway.units import GIB, KIB, MIB, TIB, counted, format_seconds

from .conditions import clean
from .observed import EventNote

MOST_MEMBER_NOTES = 8
"""Most events about members per status update."""


@dataclass(frozen=True, slots=True)
class ReportedStatus:
    """The parts of the status that come from reports."""

    progress: Progress | None
    memory: MemoryStatus | None
    checkpoint: CheckpointStatus | None
    members: tuple[MemberStatus, ...] = ()
    """Members of a sweep, in the order of the report."""
    best_member: str = ""


def reported(status: TrainingJobStatus) -> ReportedStatus:
    return ReportedStatus(status.progress, status.memory, status.checkpoint, status.members, status.best_member)


def with_report(
    before: ReportedStatus,
    report: ProgressReport,
    attempt: int,
    steps: int,
    time: str,
    members: Collection[str] = (),
    *,
    is_corrected: bool = True,
    planned_activations: int | None = None,
) -> ReportedStatus:
    """The status after a report that arrived at `time` (RFC 3339). Reports of another attempt, or with figures that do
    not fit the status, change nothing. `members`: the names in the spec; others are ignored. `planned_activations`:
    from status.plan. Never raises: a bad report must not block a job."""
    try:
        after = _with_report(before, report, attempt, steps, time, members)
        own = report.spillway
        if own is None or after is before or after.memory is None:
            return after
        told = before.memory if _was_heard(before) else None
        memory = _with_correction(told, after.memory, own.spill_volume, planned_activations, is_corrected=is_corrected)
        return replace(after, memory=memory)
    except (ValueError, ArithmeticError):
        return before


def _with_report(
    before: ReportedStatus, report: ProgressReport, attempt: int, steps: int, time: str, members: Collection[str]
) -> ReportedStatus:
    own = report.spillway
    if own is not None and own.epoch != attempt:
        return before
    if own is None:
        return replace(before, progress=_of_a_stranger(before.progress, report, steps, time))
    known = tuple(_member(one) for one in own.members if one.name in members)
    return ReportedStatus(
        progress=_progress(before.progress, own, report, steps if steps and not known else own.steps, time),
        memory=_memory(before.memory, own),
        checkpoint=_checkpoint(before.checkpoint, own, attempt),
        members=known or before.members,
        best_member=own.best_member if own.best_member in members else before.best_member,
    )


def with_saved_step(before: ReportedStatus, step: int, attempt: int, steps: int) -> ReportedStatus:
    """The status after an attempt that committed a checkpoint of `step` before it stopped: at least that step."""
    step = min(step, steps) if steps else step  # a job by epochs that has not reported
    progress, known = before.progress or Progress(steps=steps), before.checkpoint
    if step > progress.step:
        progress = progress.model_copy(update={"step": step, "display": percent(step, steps)})
    if known is not None and (known.epoch, known.step) >= (attempt, step):
        return replace(before, progress=progress)
    folder = known.path.rpartition("/")[0] if known is not None else ""
    path = f"{folder}/step-{step}.e{attempt}" if folder else ""
    return replace(before, progress=progress, checkpoint=CheckpointStatus(step=step, epoch=attempt, path=path))


def at_the_start(before: Progress | None, steps: int) -> Progress:
    """Progress of an attempt that has not reported yet: the step of earlier attempts, without a rate.

    `lastStepTime` is missing until its first report, which may go back to the checkpoint that it resumed from.
    """
    step = 0 if before is None else min(before.step, steps)
    return Progress(step=step, steps=steps, display=percent(step, steps), loss="" if before is None else before.loss)


def at_the_end(before: Progress | None, steps: int) -> Progress:
    """Progress of a complete job: exit code 0 means that the last of `steps` was trained; early stopping may have
    lowered them."""
    known = before or Progress()
    return known.model_copy(update={"step": steps, "steps": steps, "display": percent(steps, steps), "eta": "0s"})


# --- members ----------------------------------------------------------------------------------------------------------


def _member(said: MemberProgress) -> MemberStatus:
    return MemberStatus(
        name=said.name,
        step=said.step,
        steps=said.num_steps,
        loss=_figure(said.loss),
        objective=_figure(said.objective),
        state=said.state.value,
        message=clean(said.reason, 256),
    )


def at_rest(members: tuple[MemberStatus, ...]) -> tuple[MemberStatus, ...]:
    """The members after the attempt has ended: none is Running."""
    return tuple(
        one.model_copy(update={"state": MemberState.PARKED.value}) if one.state == MemberState.RUNNING else one
        for one in members
    )


def member_notes(before: tuple[MemberStatus, ...], after: tuple[MemberStatus, ...]) -> tuple[EventNote, ...]:
    """An event for each member that newly failed or was stopped; if there are many, one event lists the rest."""
    states = {one.name: one.state for one in before}
    ended = [
        one
        for one in after
        if one.state in (MemberState.FAILED, MemberState.STOPPED) and states.get(one.name) != one.state
    ]
    ended.sort(key=lambda one: one.state != MemberState.FAILED)  # failures first
    notes = tuple(_member_note(one) for one in ended[:MOST_MEMBER_NOTES])
    rest = ended[MOST_MEMBER_NOTES:]
    if not rest:
        return notes
    said = f"{counted(len(rest), 'more member')} failed or stopped: {', '.join(one.name for one in rest)}"
    return (*notes, replace(_member_note(rest[0]), reason="MembersEnded", note=clean(said)))


def _member_note(member: MemberStatus) -> EventNote:
    note = clean(f"member {member.name}: {member.message or member.state}")
    if member.state == MemberState.FAILED:
        return EventNote("Warning", "MemberFailed", "EndMember", note)
    return EventNote("Normal", "MemberStopped", "EndMember", note)


# --- parts ------------------------------------------------------------------------------------------------------------


def _progress(
    before: Progress | None, own: TrainingProgress, report: ProgressReport, steps: int, time: str
) -> Progress:
    reached = before.step if before is not None and before.last_step_time is not None else 0
    step = min(max(own.step, reached), steps)
    known = before.advance_time if before is not None and before.last_step_time is not None else None
    return Progress(
        step=step,
        steps=steps,
        display=percent(step, steps),
        loss=_figure(own.loss),
        tokens_per_second=_rate(own.tokens_per_second),
        eta=_eta(report.trainer_status.estimated_remaining_seconds, own.step_seconds, steps - step),
        last_step_time=_timestamp(own.last_step_time) or time,
        advance_time=known if known is not None and step == reached else time,
    )


def _of_a_stranger(before: Progress | None, report: ProgressReport, steps: int, time: str) -> Progress | None:
    """Progress from a script that only uses Kubeflow's protocol: a percentage and metrics."""
    said = report.trainer_status
    if said.progress_percentage is None:
        return before
    counted = {metric.name: int(metric.value) for metric in said.metrics if metric.value.isdecimal()}
    known = before or Progress()
    steps = steps or min(counted.get("total_steps", known.steps), MAX_COUNT)  # a script's, from Hugging Face's callback
    reached = known.step if known.last_step_time is not None else 0
    step = max(min(counted.get("current_step", steps * said.progress_percentage // 100), steps), reached)
    loss = next((_rounded(metric.value) for metric in said.metrics if metric.name == "loss"), known.loss)
    eta = "" if said.estimated_remaining_seconds is None else duration(said.estimated_remaining_seconds)
    same = known.last_step_time is not None and step == reached and known.advance_time is not None
    changes = {
        "step": step, "steps": steps, "display": percent(step, steps), "loss": loss, "eta": eta, "last_step_time": time,
        "advance_time": known.advance_time if same else time,
    }  # fmt: skip
    return known.model_copy(update=changes)


def _memory(before: MemoryStatus | None, own: TrainingProgress) -> MemoryStatus | None:
    if own.peak == TierFigures() and before is not None:
        return before
    budget = f"/{short_bytes(own.budget.device)}" if own.budget.device else ""
    return MemoryStatus(
        device=f"{short_bytes(own.peak.device)}{budget}",
        spilled=short_bytes(own.peak.host + own.peak.nvme),
        peak=TierQuantities(device=own.peak.device, host=own.peak.host, nvme=own.peak.nvme),
    )


def _was_heard(before: ReportedStatus) -> bool:
    """Whether the current attempt has reported."""
    return before.progress is not None and before.progress.last_step_time is not None


def _with_correction(
    told: MemoryStatus | None,
    memory: MemoryStatus,
    volume: SpillVolume | None,
    planned: int | None,
    *,
    is_corrected: bool,
) -> MemoryStatus:
    """Sets the bytes of the spill volume for activations: the reported ones, lowered by a correction. They only fall
    within an attempt, starting from the plan or `told`; a change below LEAST_BYTES is not reported."""
    if volume is None:
        return memory.model_copy(update={"activations": None, "correction": ""})
    told = told or MemoryStatus()
    known = told.activations if told.activations is not None else max(planned or 0, volume.activations)
    decided = lowered(volume)
    left = volume.activations if decided is None else min(decided, volume.activations)
    if known - left < LEAST_BYTES:
        return memory.model_copy(update={"activations": known, "correction": told.correction})
    what = f"use {short_bytes(left)} of each rank's spill file instead of {short_bytes(known)}"
    does = f"activations {what}, and the rest of them stays in host memory"
    would = f"mode Auto would let activations {what}"
    sentence = f"other data fills the spill volume: {does if is_corrected else would}"
    return memory.model_copy(update={"activations": left, "correction": sentence})


def correction_notes(
    before: MemoryStatus | None, after: MemoryStatus | None, *, is_corrected: bool
) -> tuple[EventNote, ...]:
    """An event for each live correction, or in mode Advise for each that Auto would make."""
    if after is None or not after.correction or (before is not None and before.correction == after.correction):
        return ()
    if is_corrected:
        return (EventNote("Normal", "Corrected", "Correct", after.correction),)
    return (EventNote("Warning", "SpillVolumeLow", "Advise", after.correction),)


def _checkpoint(before: CheckpointStatus | None, own: TrainingProgress, attempt: int) -> CheckpointStatus | None:
    committed = own.checkpoint
    if committed is None or committed.epoch > attempt:
        return before
    if before is not None and (committed.epoch, committed.step) < (before.epoch, before.step):
        return before
    return CheckpointStatus(
        step=committed.step,
        epoch=committed.epoch,
        path=clean(committed.path, 1024),
        time=_timestamp(committed.time),
    )


# --- figures for people -----------------------------------------------------------------------------------------------


def percent(step: int, steps: int) -> str:
    return f"{100 * step // steps}%" if steps else ""


def duration(seconds: float) -> str:
    """311 -> "5m11s", 0 -> "0s"."""
    return format_seconds(round(seconds)).replace(" ", "") if seconds >= 1 else "0s"


def short_bytes(num_bytes: int) -> str:
    """A short quantity: 76235669504 -> "71Gi", 1610612736 -> "1.5Gi"."""
    for suffix, size in (("Ti", TIB), ("Gi", GIB), ("Mi", MIB), ("Ki", KIB)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f}{suffix}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0") + suffix
    return str(num_bytes)


def _rounded(value: str) -> str:
    """A script's figure in the format of our trainer's figures; unchanged if it is not a number."""
    try:
        return _figure(float(value))
    except ValueError:
        return clean(value, 64)


def _figure(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4g}"


def _eta(said: int | None, step_seconds: float, left: int) -> str:
    """Remaining time; empty before a step was measured."""
    if left and not said and not step_seconds:
        return ""
    seconds = left * step_seconds if said is None else float(said)
    return duration(min(seconds, 1e9))


def _rate(tokens_per_second: float) -> str:
    """Tokens per second; empty before the first step was measured."""
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


def _timestamp(unix_seconds: float) -> str | None:
    """RFC 3339; None for 0, which means no time."""
    if not unix_seconds:
        return None
    bounded = min(unix_seconds, 253402300799.0)  # the end of the year 9999
    return datetime.fromtimestamp(bounded, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def as_fields(found: ReportedStatus) -> dict[str, Any]:
    return {
        "progress": found.progress,
        "memory": found.memory,
        "checkpoint": found.checkpoint,
        "members": found.members,
        "best_member": found.best_member,
    }
