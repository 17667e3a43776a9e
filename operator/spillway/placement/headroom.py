"""Ranks nodes that could run a pod by their free devices and memory, and explains the ranking.

Among nodes with enough unrequested devices, a pod with devices prefers the one with the fewest, so that empty nodes
stay empty. Otherwise, and among nodes with equally many, headroom decides: a node's free bytes minus what is reserved
there, as a multiple of what the pod will take, for the scarcest tier. Differences within the tolerance are noise. A
node whose memory stalls is not preferred, however much is free. Figures that are old or missing widen margins or do not
count, and never keep a job from starting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spillway.placement.cluster_view import ClusterView, LiveBytes, NodeView
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import TIER_NAMES, NodeSpec
from spillway.planning.pod_resources import PodResources
from spillway.units import format_bytes, format_seconds

FRESH_SECONDS = 60.0
"""Metrics up to this age count in full."""
STALE_SECONDS = 300.0
"""Metrics older than this do not count."""
STALE_MARGIN = 1.15
"""Between these ages, a pod is assumed to need this many times its bytes, and differences must be STALE_PATIENCE times
as large."""
STALE_PATIENCE = 2.0
TOLERANCE_OF_DEMAND = 0.1
TOLERANCE_OF_FREE = 0.02
"""Two nodes are equally good if their free bytes differ by at most the larger of these shares, of the pod's demand and
of the free bytes: noise is no reason to prefer a node."""
MOST_STALLED = 0.05
"""Share of the time; if all tasks wait for memory longer than this, the kernel is about to reclaim the free bytes."""
MAX_PREFERENCES = 16
PACKING_DECAY = 0.8
"""Weight of a node as a share of the previous node's weight, if nodes are packed."""
BEST_WEIGHT = 100
WEIGHT_OF_OTHERS = 50
"""Highest weight of other nodes: half of the scale outweighs kube-scheduler's own scores of otherwise equal nodes."""
MOST_NAMED = 3
"""Most nodes with memory stalls that the sentence names."""


@dataclass(frozen=True, slots=True)
class Preference:
    node: str
    weight: int
    """1 to 100, as in a preferred node affinity"""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Nodes of one class by headroom."""

    preferences: tuple[Preference, ...]
    """Most preferred first."""
    reason: str
    headroom: Mapping[Tier, int]
    """Free bytes of the first node, after reservations; without tiers that have no series, and without the device tier
    if the pod takes nothing of it."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """Bytes that one pod will take of a node; tiers of which it takes none are left out."""

    tiers: Mapping[Tier, int]
    patience: float
    devices: int
    """Number of devices."""
    resource_name: str
    volume_class: str
    """StorageClass of the spill volume; empty: the node's own disk."""

    def tolerance(self, tier: Tier, free_bytes: float) -> float:
        return self.patience * max(TOLERANCE_OF_DEMAND * self.tiers[tier], TOLERANCE_OF_FREE * free_bytes)


@dataclass(frozen=True, slots=True)
class _Room:
    """One node: free bytes after reservations, and how many times the pod fits into the scarcest tier."""

    node: str
    free: Mapping[Tier, int]
    reserved: Mapping[Tier, int]
    scarcest: Tier | None
    """None: no tier that the pod needs has a series."""
    multiple: float
    stalled: float | None
    """Share of the time in which its memory stalled; None: no series."""
    stalls: bool
    """Whether its memory stalls for longer than noise would explain."""
    devices: int | None
    """Devices that no pod requests; None: not known, or the pod has no devices or does not fit on the node."""
    all_devices: int


def rank(
    views: Sequence[NodeView],
    node: NodeSpec,
    plan: MemoryPlan,
    pod: PodResources,
    cluster: ClusterView,
    volume_class: str = "",
) -> Ranking:
    """Ranks the nodes of the class `node`, at least one, by their headroom for one pod of `plan`."""
    demand = _demand(plan, pod, cluster, volume_class)
    rooms = [_room(view, node, demand, cluster) for view in views]
    ranked = sorted(rooms, key=_order)
    best = ranked[0]
    headroom = {tier: size for tier, size in best.free.items() if tier is not Tier.DEVICE or tier in demand.tiers}
    reason = f"{_comparison(ranked, demand)}{_stalls(ranked)}; {_metrics(cluster, ranked)}"
    return Ranking(_preferences([room for room in ranked if not room.stalls], demand), reason, headroom)


def counts(cluster: ClusterView) -> bool:
    """Whether the live figures are recent enough to be used."""
    return cluster.metrics_age_seconds is not None and cluster.metrics_age_seconds <= STALE_SECONDS


def _is_stale(cluster: ClusterView) -> bool:
    return cluster.metrics_age_seconds is not None and cluster.metrics_age_seconds > FRESH_SECONDS


def _order(room: _Room) -> tuple[bool, bool, int, float, str]:
    return room.stalls, room.devices is None, room.devices or 0, -room.multiple, room.node


def _demand(plan: MemoryPlan, pod: PodResources, cluster: ClusterView, volume_class: str) -> _Demand:
    tiers = {Tier.HOST: pod.memory_bytes, Tier.NVME: pod.spill_volume_bytes}
    if plan.device == "Cuda":
        tiers[Tier.DEVICE] = plan.bytes[Tier.DEVICE].total
    margin, patience = (STALE_MARGIN, STALE_PATIENCE) if _is_stale(cluster) else (1.0, 1.0)
    found = {tier: int(margin * size) for tier, size in tiers.items() if size}
    return _Demand(found, patience, pod.devices, pod.resource_name, volume_class)


def _room(view: NodeView, node: NodeSpec, demand: _Demand, cluster: ClusterView) -> _Room:
    live = view.live if counts(cluster) and view.live is not None else LiveBytes()
    own = [reservation for reservation in cluster.reservations if reservation.node == view.name]
    devices = None
    if demand.devices and view.others is not None:
        left = view.free.allocatable_devices.get(demand.resource_name, 0)
        devices = left - sum(reservation.devices for reservation in own)
    # Free bytes cannot exceed the capacity, whatever a series says.
    of_class = (found.get(demand.volume_class) for found in (view.volumes, live.volumes))
    volume = min((size for size in of_class if size is not None), default=None)
    seen = {
        Tier.DEVICE: _at_most(live.of_devices(devices), node.device_bytes),
        Tier.HOST: _at_most(live.host, view.allocatable_memory_bytes),
        Tier.NVME: volume if demand.volume_class else _at_most(live.nvme, view.allocatable_ephemeral_bytes),
    }
    reserved = {
        # Other jobs' devices are not among the unrequested ones; only if these are not known, their bytes must be
        # subtracted.
        Tier.DEVICE: sum(reservation.device for reservation in own) if devices is None else 0,
        Tier.HOST: sum(reservation.host for reservation in own),
        Tier.NVME: sum(reservation.nvme for reservation in own),
    }
    free = {tier: found - reserved[tier] for tier, found in seen.items() if found is not None}
    multiples = {tier: free[tier] / size for tier, size in demand.tiers.items() if tier in free}
    scarcest = min(multiples, key=lambda tier: multiples[tier], default=None)
    # A node without series counts as one where the pod just fits, and whose memory does not stall.
    stalls = live.memory_stalled is not None and live.memory_stalled > demand.patience * MOST_STALLED
    multiple = multiples[scarcest] if scarcest else 1.0
    fits = devices is not None and devices >= demand.devices and multiple >= 1.0
    return _Room(
        view.name, free, reserved, scarcest, multiple, live.memory_stalled, stalls,
        devices if fits else None, view.allocatable_devices.get(demand.resource_name, 0),
    )  # fmt: skip


def _at_most(free: int | None, capacity: int) -> int | None:
    return None if free is None else min(free, capacity)


# --- preferences ------------------------------------------------------------------------------------------------------


def _preferences(ranked: Sequence[_Room], demand: _Demand) -> tuple[Preference, ...]:
    """Returns equal weights for equal headroom; no preferences if more nodes are equally good than can be named. If
    nodes are packed, even equal nodes get decreasing weights, because the scheduler spreads pods that prefer many
    nodes."""
    if not ranked:
        return ()
    best = head = ranked[0]
    if best.devices is not None:
        weights = [WEIGHT_OF_OTHERS * PACKING_DECAY**number for number in range(MAX_PREFERENCES - 1)]
        others = zip(ranked[1:MAX_PREFERENCES], weights, strict=False)
        return Preference(best.node, BEST_WEIGHT), *(Preference(room.node, round(weight)) for room, weight in others)
    made = []
    for room in ranked:
        if not _equal(head, room, demand):
            head = room
        made.append(Preference(room.node, BEST_WEIGHT if head is best else _weight(head, best)))
    if sum(preference.weight == BEST_WEIGHT for preference in made) > MAX_PREFERENCES:
        return ()
    return tuple(made[:MAX_PREFERENCES])


def _weight(room: _Room, best: _Room) -> int:
    share = max(0.0, room.multiple) / best.multiple if best.multiple > 0.0 else 0.0
    return max(1, round(WEIGHT_OF_OTHERS * share))


def _equal(larger: _Room, smaller: _Room, demand: _Demand) -> bool:
    """Whether the scarcest tiers are equally scarce within the tolerance. A node without series equals only other such
    nodes, and a node whose memory stalls only others whose memory stalls."""
    if larger.stalls is not smaller.stalls or larger.devices != smaller.devices:
        return False
    if larger.scarcest is None or smaller.scarcest is None:
        return larger.scarcest is smaller.scarcest
    size = demand.tiers[smaller.scarcest]
    difference = (larger.multiple - smaller.multiple) * size
    return difference <= demand.tolerance(smaller.scarcest, larger.multiple * size)


# --- the sentence -----------------------------------------------------------------------------------------------------


def _comparison(ranked: Sequence[_Room], demand: _Demand) -> str:
    """Says how the best node differs from the next one that is not equal, with both figures of the scarcest tier."""
    best = ranked[0]
    other = next((room for room in ranked if not _equal(best, room, demand)), None)
    if best.devices is not None and (other is None or other.devices not in (None, best.devices)):
        what = f"of {best.all_devices} {demand.resource_name} free (a pod requests {demand.devices})"
        kept = "emptier nodes are kept for larger pods"
        others = f", {other.node}: {other.devices}; {kept}" if other is not None else ""
        return f"{best.node}: {best.devices} {what}{others}"
    tier = best.scarcest if other is None else other.scarcest or best.scarcest
    if tier is None and other is not None:  # as far as is known, they differ only in stalls
        return f"{best.node} is preferred to {other.node}"
    if tier is None:
        only = f"{best.node} is the only node of its class"
        return only if len(ranked) == 1 else f"no preference among {len(ranked)} nodes"
    planned, what = f"(planned {format_bytes(demand.tiers[tier])})", f"of {TIER_NAMES[tier]} free"
    if other is not None:
        return f"{best.node}: {_free(best, tier, what)}, {other.node} {_free(other, tier)} {planned}"
    if len(ranked) == 1:
        return f"{best.node}: {_free(best, tier, what)} {planned}"
    return f"no preference among {len(ranked)} nodes with {_range(ranked, tier)} {what} {planned}"


def _stalls(ranked: Sequence[_Room]) -> str:
    """Says which nodes are not preferred because of stalls, with figures of the first ones; empty if none stalls."""
    found = [f"{room.node} ({room.stalled:.0%} of the time)" for room in ranked if room.stalls]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    why = "not preferred because programs there wait for memory"
    return f"; {why}: {', '.join(found[:MOST_NAMED])}{more}" if found else ""


def _free(room: _Room, tier: Tier, what: str = "") -> str:
    shown = format_bytes(room.free[tier]) if tier in room.free else "unknown"
    reserved = f"after {format_bytes(room.reserved[tier])} reserved" if room.reserved[tier] else ""
    return " ".join(part for part in (shown, what, reserved) if part)


def _range(rooms: Sequence[_Room], tier: Tier) -> str:
    found = [room.free[tier] for room in rooms if tier in room.free]
    least, most = format_bytes(min(found)), format_bytes(max(found))
    return least if least == most else f"{least} to {most}"


def _metrics(cluster: ClusterView, rooms: Sequence[_Room]) -> str:
    age = cluster.metrics_age_seconds
    why = f" ({cluster.metrics_problem})" if cluster.metrics_problem else ""
    if age is None:
        return f"no metrics{why}" if why or cluster.metrics_source else "no metrics are configured"
    if counts(cluster) and not any(room.free or room.stalled is not None for room in rooms):
        return f"no metrics of {'this node' if len(rooms) == 1 else 'these nodes'}{why}"
    shown = f"metrics {format_age(age)} old"
    if not counts(cluster):
        return f"{shown}, too old to be used{why}"
    if _is_stale(cluster):
        return (
            f"{shown}, so the pod is counted as {STALE_MARGIN - 1.0:.0%} larger and small differences are ignored{why}"
        )
    return shown


def format_age(seconds: float) -> str:
    """Whole seconds: 4.2 -> "4 s", 150 -> "2m30s"."""
    return format_seconds(max(1.0, round(seconds)))
