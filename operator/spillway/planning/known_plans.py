"""Caches make_plan: jobs with the same question share one answer.

A plan takes a third of a second to find, and jobs come in crowds that differ in name, seed and learning rate. make_plan
is pure, so what it said holds for ever; the last MOST_KNOWN answers are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from spillway.api.training_job import TrainingJob
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning.hardware import NodeSpec
from spillway.planning.planner import NO_OVERRIDES, NOT_PLANNED_FOR, Overrides, make_plan

MOST_KNOWN = 128
"""Number of plans; a plan with its alternatives takes some tens of KiB."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A job, equal to all others that get the same plan."""

    spec: str
    name: str
    """Name of a sweep, which its plan contains in several places; empty for one model."""
    job: TrainingJob = field(compare=False)


def known_plan(
    job: TrainingJob, node: NodeSpec, overrides: Overrides = NO_OVERRIDES, *, explained: bool = True
) -> MemoryPlan | Infeasible:
    """The cached result of make_plan, in the name of `job`. Raises UserError like make_plan."""
    name = job.metadata.name
    is_sweep = bool(job.spec.members)
    asked = _Asked(job.spec.model_dump_json(exclude=NOT_PLANNED_FOR), name if is_sweep else "", job)
    found = _decided(asked, node, overrides, explained)
    return found if is_sweep else found.model_copy(update={"job": name})


@lru_cache(maxsize=MOST_KNOWN)
def _decided(asked: _Asked, node: NodeSpec, overrides: Overrides, explained: bool) -> MemoryPlan | Infeasible:
    return make_plan(asked.job, node, overrides, explained=explained)
