"""The memory ladder: how the next attempt is planned after memory ran out. Pure; shared by operator and `spillway run`.

    attempts that ran out -> lower bounds -> Corrections -> the planner takes the fastest plan whose counted bytes fit

Memory that ran out gives a lower bound: the plan held at least its limit of that tier and needed more, so its bytes
count at least limit / predicted times. How many times more is unknown, so each further failure of a tier adds a larger
margin: a prediction of one tier that is too low by a factor of three is corrected within MOST_MEMORY_TRIES. Every later
plan counts more than the bound and must fit its limit, so none needs as much of the failed tier, within the same limit,
as a plan that failed. `repeats` is that rule by itself, for tiers for which nothing was predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway.feedback.retries import OOM_KILLED
from spillway.plan import MemoryPlan, Policy, Tier
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.hardware import TIER_NAMES
from spillway.planning.pod_resources import tier_memory_bytes
from spillway.units import format_bytes, format_seconds

MOST_MEMORY_TRIES = 3
"""Most attempts with another plan after one kind of memory ran out; they do not count against lifecycle.maxRestarts."""
MOST_TRIES_IN_ALL = 6
"""Most such attempts for all kinds of memory, enough for two: if the prediction was wrong for the device it may be
wrong for the host, too, and a failure of one says nothing about the other."""
MARGINS = (0.25, 0.5, 1.0)
"""Margins above the lower bound after the first, the second and each further failure of a tier: 1.25 x 1.5 x 2 =
3.75."""
OBSERVED_MARGIN = 0.03
"""Margin above an observed peak."""
ROOM_TO_RELAX = 0.25
"""Share of every tier that once ran out which must have been unused before a cheaper plan is tried again."""
SECONDS_TO_RELAX = 1800.0
"""How long the attempt with that unused share must have trained."""
GAIN_TO_RELAX = 0.9
"""Largest step time of the cheaper plan, as a share of the other plan's."""

_TIERS = {
    ExitCode.DEVICE_OUT_OF_MEMORY.reason: Tier.DEVICE,
    ExitCode.HOST_OUT_OF_MEMORY.reason: Tier.HOST,
    ExitCode.SPILL_VOLUME_FULL.reason: Tier.NVME,
}


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """An attempt that ran out of memory."""

    attempt: int
    reason: str
    plan: MemoryPlan
    pod_memory_bytes: int
    """The pod's memory limit; for a local run, the memory that it should have used."""
    spared_bytes: int = 0
    """Bytes counted for the pod that it did not get, because earlier pods had not used them."""

    @property
    def tier(self) -> Tier | None:
        """The tier that ran out; None: memory of the pod that the plan does not count."""
        tier = None if self.reason == OOM_KILLED else _TIERS.get(self.reason)
        return tier if tier is not None and self.plan.bytes[tier].predicted else None

    @property
    def predicted_bytes(self) -> int:
        if self.tier is None:
            return self.pod_memory_bytes - self.plan.unplanned_bytes + self.spared_bytes
        return self.plan.bytes[self.tier].predicted

    @property
    def limit_bytes(self) -> int:
        """The limit that was reached."""
        if self.tier is None:
            return self.pod_memory_bytes
        if self.tier is Tier.DEVICE:
            return self.plan.budget[Tier.DEVICE]
        # Without the reserve, which may have held bytes that a live correction moved there.
        return self.plan.slab_bytes(self.tier) - self.plan.bytes[self.tier].reserve

    @property
    def bound(self) -> float:
        """The real bytes were at least this many times the predicted ones."""
        return max(1.0, self.limit_bytes / max(1, self.predicted_bytes))


def tries_are_used_up(reasons: Sequence[str], num_failures: int = 0) -> bool:
    """Whether no further attempt follows those that ran out of memory for these `reasons`; the last reason decides
    which kind is counted. `num_failures` counts all of them, including those whose reasons are no longer known."""
    most = max(len(reasons), num_failures)
    of_this_kind = reasons.count(reasons[-1]) if reasons else 0
    return of_this_kind > MOST_MEMORY_TRIES or most > MOST_TRIES_IN_ALL


def next_failure_may_be_last(reasons: Sequence[str], num_failures: int = 0) -> bool:
    """Whether one more failure, of a kind of memory that ran out before, would end the job."""
    most = max(len(reasons), num_failures)
    return any(tries_are_used_up((*reasons, reason), most + 1) for reason in set(reasons))


def corrections_after(failures: Sequence[MemoryFailure]) -> Corrections:
    """Returns the corrections for the attempt after these `failures` of one job; without failures, nothing is
    corrected."""
    if not failures:
        return NO_CORRECTIONS
    own = {tier: [failure for failure in failures if failure.tier is tier] for tier in (*Tier, None)}
    return Corrections(
        device=_factor(own[Tier.DEVICE]),
        host=_factor(own[Tier.HOST]),
        nvme=_factor(own[Tier.NVME]),
        pod=_factor(own[None]),
        nvme_most_bytes=_room_of_volume(own[Tier.NVME]),
        reasons=tuple(_sentence(failure, _factor(own[failure.tier])) for failure in _last_of_each(own.values())),
        after_failure=True,
    )


def _factor(failures: Sequence[MemoryFailure]) -> float:
    if not failures:
        return 1.0
    margin = MARGINS[min(len(failures), len(MARGINS)) - 1]
    return round(max(failure.bound for failure in failures) * (1.0 + margin), 4)


def _room_of_volume(failures: Sequence[MemoryFailure]) -> int | None:
    """Returns the most bytes that may be counted for a spill volume that was full, because it has less space than the
    plan assumed, whatever the node reports; None if none was full."""
    rooms = (int(failure.predicted_bytes / (1.0 + MARGINS[0])) for failure in failures)
    return min(rooms, default=None)


def _last_of_each(kinds: Iterable[Sequence[MemoryFailure]]) -> Iterable[MemoryFailure]:
    return (failures[-1] for failures in kinds if failures)


def _sentence(failure: MemoryFailure, factor: float) -> str:
    held = "pod memory" if failure.tier is None else f"{TIER_NAMES[failure.tier]} of a rank"
    return (
        f"predicted {held} is multiplied by {factor:.2f}: attempt {failure.attempt} ran out at "
        f"{format_bytes(failure.limit_bytes)} where {format_bytes(failure.predicted_bytes)} were predicted"
    )


def repeats(failures: Iterable[MemoryFailure], plan: MemoryPlan, pod_memory_bytes: int) -> bool:
    """Whether `plan` would fail like one of `failures`: it needs at least as much of the memory that ran out, and has
    no more of it."""
    return any(_repeats(failure, MemoryFailure(0, failure.reason, plan, pod_memory_bytes)) for failure in failures)


def _repeats(failure: MemoryFailure, then: MemoryFailure) -> bool:
    if failure.tier is None:
        held = tier_memory_bytes(then.plan, 1) >= tier_memory_bytes(failure.plan, 1)
        return held and then.pod_memory_bytes <= failure.pod_memory_bytes
    if then.tier is not failure.tier:  # the plan needs nothing of that tier
        return False
    if failure.tier is Tier.NVME:  # a larger slab does not help if the volume is full
        return then.predicted_bytes >= failure.predicted_bytes
    return then.predicted_bytes >= failure.predicted_bytes and then.limit_bytes <= failure.limit_bytes


def smaller_micro_batches(job: TrainingJob, world_size: int) -> Iterator[TrainingJob]:
    """Yields the job with ever smaller micro-batches, each at most half of the one before: the last resort. They change
    only the rounding."""
    training = job.spec.training
    per_rank, size = training.global_batch_size // world_size, training.micro_batch_size
    while size > 1:
        size = next(found for found in range(size // 2, 0, -1) if per_rank % found == 0)
        changed = training.model_copy(update={"micro_batch_size": size})
        yield job.model_copy(update={"spec": job.spec.model_copy(update={"training": changed})})


# --- down again -------------------------------------------------------------------------------------------------------


def relaxed(failures: Sequence[MemoryFailure], last: MemoryPlan, peaks: dict[Tier, int], seconds: float) -> Corrections:
    """Returns the corrections for an attempt after one that did not run out: its plan `last` held `peaks` at most and
    it trained for `seconds`. If every tier that once ran out had much room for long enough, the observed peaks replace
    the margins; otherwise, the corrections stay. No attempt is ended for this: the next one begins at a checkpoint
    anyway."""
    careful = corrections_after(failures)
    tiers = {failure.tier for failure in failures}
    if None in tiers or Tier.NVME in tiers or seconds < SECONDS_TO_RELAX:
        return careful  # memory that no plan counts and the room of a full volume are not measured
    seen: dict[str, float] = {}
    for tier in tiers:
        assert tier is not None
        counted, peak = last.bytes[tier].total, peaks.get(tier, 0)
        if not counted or not peak or peak > (1.0 - ROOM_TO_RELAX) * counted:
            return careful
        bound = max(failure.bound for failure in failures if failure.tier is tier)
        observed = max(bound, peak / max(1, last.bytes[tier].predicted))
        seen[tier.value] = round(observed * (1.0 + OBSERVED_MARGIN), 4)
    sentences = tuple(
        f"predicted {TIER_NAMES[Tier(tier)]} is multiplied by {factor:.2f}, to cover the measured peaks"
        for tier, factor in seen.items()
    )
    return Corrections(**seen, reasons=sentences, after_failure=True)  # type: ignore[arg-type]


def worth_relaxing(careful: MemoryPlan, cheaper: MemoryPlan) -> bool:
    """Whether `cheaper` is so much faster that it replaces `careful`; a plan is not changed for a small gain."""
    return cheaper.prediction.step_seconds <= GAIN_TO_RELAX * careful.prediction.step_seconds


# --- the sentence -----------------------------------------------------------------------------------------------------


def change(before: MemoryPlan, after: MemoryPlan) -> str:
    """Says in a sentence what the next attempt does differently."""
    parts = [
        *_moved(before, after),
        *(
            f"{tier} {format_bytes(before.bytes[tier].total)} -> {format_bytes(after.bytes[tier].total)} a rank"
            for tier in Tier
            if before.bytes[tier].total != after.bytes[tier].total
        ),
    ]
    if before.unplanned_bytes != after.unplanned_bytes:
        parts.append(f"each pod gets {format_bytes(after.unplanned_bytes)} more than its plan needs")
    seconds = format_seconds(after.prediction.step_seconds)
    return f"{', '.join(parts)}; predicted: {seconds} per step"


def _moved(before: MemoryPlan, after: MemoryPlan) -> list[str]:
    parts = []
    if before.micro_batch_size != after.micro_batch_size:
        parts.append(f"micro-batch size {before.micro_batch_size} -> {after.micro_batch_size} (changes only rounding)")
    shares = [(plan.optimizer.resident_share, plan.optimizer.nvme_share) for plan in (before, after)]
    if shares[0] != shares[1]:
        parts.append(f"optimizer states on the device {shares[0][0]:.0%} -> {shares[1][0]:.0%}")
        parts.extend(
            [f"optimizer states on NVMe {shares[0][1]:.0%} -> {shares[1][1]:.0%}"] * (shares[0][1] != shares[1][1])
        )
    for answer, what in (
        (Policy.RECOMPUTE, "recomputed"), (Policy.HOST, "with activations in host memory"),
        (Policy.NVME, "with activations on NVMe"),
    ):  # fmt: skip
        was, is_now = (plan.activations.answers.count(answer) for plan in (before, after))
        parts.extend([f"blocks {what} {was} -> {is_now}"] * (was != is_now))
    streamed = [sum(home is not Tier.DEVICE for home in plan.parameters.homes) for plan in (before, after)]
    parts.extend([f"segments streamed {streamed[0]} -> {streamed[1]}"] * (streamed[0] != streamed[1]))
    return parts or ["the same placement with more memory"]
