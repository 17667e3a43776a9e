"""Peaks of recent attempts: plausibility limits, and quantiles that weight recent attempts more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_PLAUSIBLE, MOST_PLAUSIBLE = 0.25, 4.0
"""Multiples of the planned bytes."""
MOST_RECENT = 16
"""Most peaks that a profile remembers for each tier, and for the pod."""
HALF_LIFE = 4.0
"""Number of attempts after which a peak counts half."""


def plausible(planned: int, reported: int) -> int:
    return min(max(reported, int(LEAST_PLAUSIBLE * planned)), int(MOST_PLAUSIBLE * planned))


def quantile(recent: Sequence[int], share: float) -> int:
    """Returns the smallest peak that, together with all smaller ones, has at least `share` of the weight; the newest
    peak, which is last, weighs most."""
    weights = [0.5 ** (age / HALF_LIFE) for age in range(len(recent) - 1, -1, -1)]
    reached, wanted = 0.0, share * sum(weights)
    for peak, weight in sorted(zip(recent, weights, strict=True)):
        reached += weight
        if reached >= wanted:
            return peak
    return max(recent)
