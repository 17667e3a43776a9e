"""Peaks of recent attempts: plausibility limits, and quantiles that weight recent attempts more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_PLAUSIBLE, MOST_PLAUSIBLE = 0.25, 4.0
"""Multiples of the planned bytes."""
MOST_RECENT = 16
"""Peaks that a profile remembers per tier, or per pod."""
HALF_LIFE = 4.0
"""Attempts after which a peak counts half."""


def plausible(planned: int, reported: int) -> int:
    return min(max(reported, int(LEAST_PLAUSIBLE * planned)), int(MOST_PLAUSIBLE * planned))


def quantile(recent: Sequence[int], share: float) -> int:
    """The least peak that, with all smaller ones, has `share` of the weight; the newest, which is last, weighs most."""
    weights = [0.5 ** (age / HALF_LIFE) for age in range(len(recent) - 1, -1, -1)]
    reached, wanted = 0.0, share * sum(weights)
    for peak, weight in sorted(zip(recent, weights, strict=True)):
        reached += weight
        if reached >= wanted:
            return peak
    return max(recent)
