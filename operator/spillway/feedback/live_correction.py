"""How much of a spill volume a running attempt's activations may still use when others fill the volume. Pure.

    SpillVolume, in rank 0's report -> lowered() -> ProgressAnswer.activations -> all ranks, at one step

Only byte placement changes: what may no longer be on NVMe goes to host memory that the plan reserved for it
(TierBytes.reserve), so that every request is the envelope of all plans that can be reached. A cap is never raised
again within an attempt: neighbours that come and go would make bytes do so, too.
"""

from __future__ import annotations

from math import ceil

from spillway.api.progress import SpillVolume
from spillway.planning.workload import PAGE_BYTES, padded
from spillway.units import MIB

MARGIN = 0.15
"""Share of a file system that stays free: the kubelet evicts below 10 % (nodefs.available), and a neighbour goes on
writing for a report and a step until all ranks have made room."""
LEAST_DEFICIT = 0.01
"""Share of a file system; a smaller deficit is ignored, so that journals and logs cause no correction."""
LEAST_BYTES = MIB
"""Per rank; less is not worth a correction."""


def lowered(volume: SpillVolume) -> int | None:
    """What the activations of each rank may take of its spill file from now on; None = as before.

    No more is wanted free than was when the spill files had been made: what a volume lacks because of them is planned.
    """
    if volume.free > volume.size or volume.free_at_start > volume.size:
        return None
    deficit = min(ceil(MARGIN * volume.size), volume.free_at_start) - volume.free
    if deficit < max(LEAST_DEFICIT * volume.size, 1):
        return None
    wanted = padded(ceil(deficit / volume.num_ranks), MIB)
    given_back = min(wanted, volume.host_room, volume.activations) // PAGE_BYTES * PAGE_BYTES
    return volume.activations - given_back if given_back >= LEAST_BYTES else None
