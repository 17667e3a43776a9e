"""Corrections: ratios of observed to predicted bytes of a model. Pure.

With factor f, a candidate of b predicted bytes counts as f x b. It fits a budget B if b <= B / f, so the search needs
only smaller budgets and no other arithmetic. The resulting plan says what was added (TierBytes.correction).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from spillway.plan import Infeasible, MemoryPlan, Tier, TierBytes

NOTHING_FITS = "not searched for, because the predictions are corrected; try a larger budget or a node with more memory"


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors of at least 1; 1 = as predicted."""

    device: float = 1.0
    host: float = 1.0
    nvme: float = 1.0
    pod: float = 1.0
    """Factor for the whole memory of a pod, which includes what no plan counts."""
    nvme_most_bytes: int | None = None
    """The most counted bytes of a rank for which its spill volume has space; None: as many as the node says."""
    reasons: tuple[str, ...] = ()
    """A sentence for each factor above 1."""
    after_failure: bool = False
    """Whether this job ran out of memory; then a smaller micro-batch is allowed if nothing else fits."""

    def of(self, tier: Tier) -> float:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]

    @property
    def change_nothing(self) -> bool:
        return max(self.device, self.host, self.nvme, self.pod) <= 1.0 and self.nvme_most_bytes is None

    def and_also(self, other: Corrections) -> Corrections:
        """The more cautious of both, factor by factor."""
        most = [bytes_ for bytes_ in (self.nvme_most_bytes, other.nvme_most_bytes) if bytes_ is not None]
        return Corrections(
            device=max(self.device, other.device),
            host=max(self.host, other.host),
            nvme=max(self.nvme, other.nvme),
            pod=max(self.pod, other.pod),
            nvme_most_bytes=min(most, default=None),
            reasons=tuple(dict.fromkeys((*self.reasons, *other.reasons))),
            after_failure=self.after_failure or other.after_failure,
        )

    def searched(self, budget: Mapping[Tier, int]) -> dict[Tier, int]:
        """The most predicted bytes that fit in `budget`."""
        room = dict(budget)
        if self.nvme_most_bytes is not None:
            room[Tier.NVME] = min(room[Tier.NVME], self.nvme_most_bytes)
        return {tier: int(size / self.of(tier)) for tier, size in room.items()}

    def counted(self, held: Mapping[Tier, TierBytes], budget: Mapping[Tier, int]) -> dict[Tier, TierBytes]:
        """`held` with the bytes that corrections add to the predicted bytes, which fit `searched(budget)`. The result
        never exceeds `budget`."""
        return {
            tier: found.model_copy(
                update={"correction": self._added(tier, found.predicted, budget[tier] - found.reserve)}
            )
            for tier, found in held.items()
        }

    def _added(self, tier: Tier, predicted: int, budget_bytes: int) -> int:
        return max(0, min(ceil(predicted * self.of(tier)), budget_bytes) - predicted)

    def lacking(self, outcome: Infeasible, budget: Mapping[Tier, int]) -> Infeasible:
        """`outcome`, of a search within `searched(budget)`, converted to counted bytes and `budget`."""
        missing = {
            tier: max(1, ceil((outcome.budget[tier] + amount) * self.of(tier)) - budget[tier])
            for tier, amount in outcome.missing_bytes.items()
        }
        nearest = NOTHING_FITS + (f" ({'; '.join(self.reasons)})" if self.reasons else "")
        return outcome.model_copy(update={"missing_bytes": missing, "budget": dict(budget), "nearest": nearest})

    def unplanned_bytes(self, pod_memory_bytes: int) -> int:
        """Bytes that a pod takes in addition to `pod_memory_bytes`, which it should take."""
        return ceil((self.pod - 1.0) * pod_memory_bytes)


NO_CORRECTIONS = Corrections()


def corrected(plan: MemoryPlan, corrections: Corrections) -> MemoryPlan:
    """`plan`, which was found within `corrections.searched(plan.budget)`, with corrections added to its bytes and
    reasons."""
    if corrections.change_nothing:
        return plan
    changes = {
        "bytes": corrections.counted(plan.bytes, plan.budget),
        "reasons": (*plan.reasons, *corrections.reasons),
    }
    return plan.model_copy(update=changes)
