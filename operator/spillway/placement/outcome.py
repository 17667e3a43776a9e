"""The results of placement: where a job should run and under which plan, or why it can run nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spillway.api.status import ProfileEvidence
from spillway.placement.headroom import Preference
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.hardware import NodeSpec
from spillway.planning.pod_resources import PodResources


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job should run, under which plan, and why."""

    plan: MemoryPlan
    node: NodeSpec
    """The class that the plan is made for."""
    preferences: tuple[Preference, ...]
    """Most preferred first; equal weights if the nodes do not differ."""
    reason: str
    """One sentence with the deciding figure."""
    headroom: Mapping[Tier, int]
    """Free bytes of the preferred node, after reservations."""
    pod: PodResources
    """Requests of each pod, for a training text of unknown size."""
    required_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the class (the GPU product), for a required affinity; only labels are required."""
    observed: ProfileEvidence | None = None
    """What earlier attempts of this model with this plan showed; None: there were none."""
    avoided: tuple[str, ...] = ()
    """Nodes with faults that no pod may run on."""
    at_once: bool = True
    """Whether the nodes have room for all pods at once, by the capacities that were planned for."""


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No node class can carry the job. A value, not an exception, with the message for condition Planned=False."""

    reason: str
    """CamelCase: NoNode, DoesNotFit"""
    message: str
    infeasible: Infeasible | None = None
