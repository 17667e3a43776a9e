"""How much of a spill volume a running attempt's activations may still use when others fill the volume. Pure.

    SpillVolume, in rank 0's report -> lowered() -> ProgressAnswer.activations -> all ranks, at one step

Only the placement of bytes changes: activations that may no longer be on NVMe go to host memory that the plan reserved
for them (TierBytes.reserve), so the pod's requests cover every plan that corrections can lead to. A cap is never raised
again within an attempt: otherwise neighbours that come and go would move bytes back and forth.
"""

from __future__ import annotations

from math import ceil

from spillway.api.progress import SpillVolume
from spillway.planning.workload import PAGE_BYTES, padded
from spillway.units import MIB

MARGIN = 0.15
"""Share of a file system that is kept free: the kubelet evicts below 10 % (nodefs.available), and a neighbour continues
to write for one report and one step until all ranks have made room."""
LEAST_DEFICIT = 0.01
"""Share of a file system; a smaller deficit is ignored, so that journals and logs cause no correction."""
LEAST_BYTES = MIB
"""Bytes per rank; fewer are not worth a correction."""


def lowered(volume: SpillVolume) -> int | None:
    """Returns how many bytes of its spill file the activations of each rank may use from now on; None: as many as
    before.

    The free bytes that are wanted never exceed those right after the spill files were created: space that is missing
    because of the spill files is planned.
    """
    if volume.free > volume.size or volume.free_at_start > volume.size:
        return None
    deficit = min(ceil(MARGIN * volume.size), volume.free_at_start) - volume.free
    if deficit < max(LEAST_DEFICIT * volume.size, 1):
        return None
    wanted = padded(ceil(deficit / volume.num_ranks), MIB)
    given_back = min(wanted, volume.host_room, volume.activations) // PAGE_BYTES * PAGE_BYTES
    return volume.activations - given_back if given_back >= LEAST_BYTES else None
