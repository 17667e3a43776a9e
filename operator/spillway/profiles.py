"""Profiles: measured nodes into NodeSpecs, and observed peaks into MemoryProfiles. Pure.

A MemoryProfile belongs to a fingerprint: everything that a rank's bytes depend on. What is reported is not believed
blindly: a figure far from its prediction is cut to a plausible range and marked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from spillway.api import (
    MemoryProfileSpec,
    NodeProfileSpec,
    ObservedBytes,
    ObservedTiers,
    TrainingJobSpec,
)
from spillway.field_types import Fields
from spillway.hardware import NodeSpec
from spillway.model_shape import model_shape
from spillway.plan import MemoryPlan, Tier
from spillway.status import ProfileEvidence, TierQuantities
from spillway.units import format_bytes, format_count
from spillway.update_rules import MomentType, UpdateRule

LEAST_PLAUSIBLE, MOST_PLAUSIBLE = 0.25, 4.0
"""times the planned bytes"""
FINGERPRINT_DIGITS = 16
DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
MEASURED = "-measured"
"""ends the name of a node whose rates are not the catalog's"""
MOST_JOBS = 64
"""whose last attempt a profile remembers"""
MOST_NAMED = 3
"""rates in a sentence"""
LONGEST_PLAN = 512
"""characters of MemoryProfile.spec.plan"""

# --- nodes ------------------------------------------------------------------------------------------------------------


def measured(profile: NodeProfileSpec, node: NodeSpec) -> NodeSpec:
    """`node` with the profile's figures; what it leaves out stays. The name is the class's, not the node's, and rates
    are rounded to two digits, so that nodes measured alike are planned for as one class."""
    capacities = {
        "device_bytes": profile.device_memory,
        "host_bytes": profile.host_memory,
        "nvme_bytes": profile.nvme_capacity,
    }
    own = {name: value for name, value in profile if name in NodeSpec.__slots__ and name != "link"}
    figures = _given(own | capacities)
    return replace(node, **figures, name=_name(profile, node), link=replace(node.link, **_given(dict(profile.link))))


def with_rates(profile: NodeProfileSpec, node: NodeSpec) -> NodeSpec:
    """`node` with the profile's rates as they were measured; its capacities stay, because they are what is free now."""
    own = {name: value for name, value in profile if name in RATES and value is not None}
    link = {name: value for name, value in profile.link if value is not None}
    return replace(node, **own, name=_name(profile, node), link=replace(node.link, **link))


def _name(profile: NodeProfileSpec, node: NodeSpec) -> str:
    return f"{node.name}{MEASURED}" if has_rates(profile) else node.name


RATES = tuple(
    name for name in NodeProfileSpec.model_fields if name.endswith(("_per_second", "_overhead_seconds"))
)  # fmt: skip
"""fields that say how fast, not how much; those of the link besides"""


LINK_RATES = ("h2d_bytes_per_second", "d2h_bytes_per_second")
CATALOG_RATES = (
    "bfloat16_flops_per_second",
    "float32_flops_per_second",
    "device_bytes_per_second",
    "dram_bytes_per_second",
    "cpu_bytes_per_second",
    "nvme_read_bytes_per_second",
    "nvme_write_bytes_per_second",
)
"""with LINK_RATES all that a plan of one device takes from the catalog where nothing was measured; what other
operations than matrix products cost is part of the catalog's FLOP rates"""


def has_rates(profile: NodeProfileSpec) -> bool:
    """Whether anything was measured; capacities say how much, not how fast."""
    return any(getattr(profile, name) is not None for name in RATES) or any(
        getattr(profile.link, name) is not None for name in LINK_RATES
    )


def rates_sentence(profile: NodeProfileSpec, where: str = "") -> str:
    """measured rates; or 3 of 9 measured, and whose the others are. `where`: on which day, in which file."""
    given = {name: getattr(profile, name) for name in CATALOG_RATES}
    given |= {name: getattr(profile.link, name) for name in LINK_RATES}
    missing = [_camel(name) for name, rate in given.items() if rate is None]
    if not has_rates(profile):
        return "catalog rates"
    if not missing:
        return f"rates measured {where}" if where else "measured rates"
    shown = ", ".join(missing[:MOST_NAMED]) + (f" and {len(missing) - MOST_NAMED} more" * (len(missing) > MOST_NAMED))
    measured_there = f"rates measured {where}".rstrip()
    return f"{len(given) - len(missing)} of {len(given)} {measured_there}; of the catalog: {shown}"


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


class ProfileMetadata(Fields):
    name: Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)] = Field(description="Name of the node.")
    annotations: dict[str, str] = Field(default={}, description="How it was measured, for people.")


class NodeProfile(Fields):
    """The document: what a cluster holds, and what `spillway calibrate` writes."""

    api_version: Literal["spillway.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["NodeProfile"] = Field(description="Kind of the object.")
    metadata: ProfileMetadata = Field(description="Which node.")
    spec: NodeProfileSpec = Field(description="Its figures.")


def document(name: str, spec: NodeProfileSpec, annotations: Mapping[str, str]) -> dict[str, Any]:
    """The NodeProfile as plain data; what is not known is left out."""
    metadata = {"name": name, "annotations": dict(annotations)} if annotations else {"name": name}
    figures = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    figures = {key: value for key, value in figures.items() if value != {}}
    return {"apiVersion": "spillway.dev/v1alpha1", "kind": "NodeProfile", "metadata": metadata, "spec": figures}


def rates_from(node: NodeSpec, before: NodeSpec, profile: NodeProfileSpec) -> NodeProfileSpec:
    """`profile` with the rates in which `node` differs from `before`, three digits each: no measurement has more."""
    own = {name: _rounded(getattr(node, name)) for name in RATES if getattr(node, name) != getattr(before, name)}
    link = {
        name: _rounded(getattr(node.link, name))
        for name in LINK_RATES
        if getattr(node.link, name) != getattr(before.link, name)
    }
    return profile.model_copy(update={**own, "link": profile.link.model_copy(update=link)})


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _given(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are there; rates with two digits."""
    return {
        name: float(f"{value:.2g}") if isinstance(value, float) else value
        for name, value in figures.items()
        if value is not None
    }


# --- memory of a model ------------------------------------------------------------------------------------------------


def memory_fingerprint(spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    """16 hexadecimal digits over all that the bytes of a rank depend on: model, sequence, micro-batch, ranks, and what
    the plan does with them. Budgets, predictions and names do not count."""
    decides = {
        "model": spec.model.model_dump(mode="json", exclude_none=True),
        "sequenceLength": spec.training.sequence_length,
        "microBatchSize": plan.micro_batch_size,
        "worldSize": plan.world_size,
        "device": plan.device,
        "mode": plan.mode,
        "strategy": plan.strategy,
        "optimizer": plan.optimizer.model_dump(mode="json", exclude={"num_threads"}),
        "activations": plan.activations.model_dump(mode="json", exclude={"num_io_threads"}),
        "parameters": plan.parameters.model_dump(mode="json"),
    }
    if (moments := spec.training.optimizer.rule.moments) != UpdateRule.ADAMW.moments:  # profiles of before other rules
        decides["moments"] = moments
    if (kept := spec.training.optimizer.moment_type) is not MomentType.FLOAT32:
        decides["momentType"] = kept
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def profile_name(spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    """Name of the MemoryProfile: llama-6.5m-1f0c2a9d8b7e6543."""
    model = f"{spec.model.transformer.architecture}-{_parameters(spec, plan)}"
    return f"{model}-{memory_fingerprint(spec, plan)}".replace(" ", "").lower()


def new_profile(spec: TrainingJobSpec, plan: MemoryPlan) -> MemoryProfileSpec:
    """The profile before the first observation."""
    model = spec.model
    return MemoryProfileSpec(
        fingerprint=memory_fingerprint(spec, plan),
        model=f"{model.transformer.architecture}, {_parameters(spec, plan)} parameters, {model.precision.compute}",
        plan=summary(plan)[:LONGEST_PLAN],
        world_size=plan.world_size,
    )


def profile_update(
    existing: MemoryProfileSpec | None,
    spec: TrainingJobSpec,
    plan: MemoryPlan,
    peaks: Mapping[str, int],
    attempt: str,
    now: str,
) -> MemoryProfileSpec | None:
    """The profile after `attempt` (<job>-<number>) reported `peaks`, bytes of its fullest rank by tier; None when that
    says nothing new. A tier without a report, or that the plan does not use, is left as it is.

    An attempt counts once, also when jobs report in turn: it is new when the profile knows none of its job, or an
    earlier one.

    `now` is RFC 3339. A figure outside of 0.25 to 4 times the planned is cut to that.
    """
    profile = existing or new_profile(spec, plan)
    is_new, last_attempts = _counted(profile, attempt)
    rises = profile.attempt == attempt
    tiers, clamped = {}, profile.clamped
    for tier in Tier:
        planned, reported = plan.bytes[tier].total, peaks.get(tier, 0)
        before: ObservedBytes | None = getattr(profile.peaks, tier)
        tiers[tier.value] = before
        if planned and reported:
            believed = plausible(planned, reported)
            clamped = clamped or believed != reported
            tiers[tier.value] = _observed(before, planned, believed, is_new=is_new, rises=rises)
    observed = ObservedTiers(**tiers)
    if observed == profile.peaks and clamped == profile.clamped and not is_new:
        return None
    if not any(tiers.values()):
        return None
    changes: dict[str, Any] = {"peaks": observed, "clamped": clamped, "observed_time": now}
    if is_new:
        changes |= {"attempt": attempt, "last_attempts": last_attempts, "count": profile.count + 1}
    return profile.model_copy(update=changes)


def _counted(profile: MemoryProfileSpec, attempt: str) -> tuple[bool, tuple[str, ...]]:
    """Whether `attempt` is not counted yet, and the last attempts of all jobs with it."""
    job, number = _job_and_number(attempt)
    known = profile.last_attempts or ((profile.attempt,) if profile.attempt else ())
    if number <= max((counted for name, counted in map(_job_and_number, known) if name == job), default=0):
        return False, known
    others = [one for one in known if _job_and_number(one)[0] != job]
    return True, (*others, attempt)[-MOST_JOBS:]


def _job_and_number(attempt: str) -> tuple[str, int]:
    """demo-3 -> demo, 3."""
    job, _, number = attempt.rpartition("-")
    return job, int(number) if number.isdecimal() else 0


def plausible(planned: int, reported: int) -> int:
    return min(max(reported, int(LEAST_PLAUSIBLE * planned)), int(MOST_PLAUSIBLE * planned))


def _observed(before: ObservedBytes | None, planned: int, peak: int, *, is_new: bool, rises: bool) -> ObservedBytes:
    if before is None:
        return ObservedBytes(planned=planned, max=peak, last=peak)
    # Within one attempt peaks only rise: a late report of an early moment says nothing. `last` is the newest attempt's.
    last = peak if is_new else max(before.last, peak) if rises else before.last
    return ObservedBytes(planned=planned, max=max(before.max, peak), last=last)


def observed_peaks(profile: MemoryProfileSpec) -> dict[str, int]:
    """Largest peak per tier, of those that were observed."""
    return {tier: observed.max for tier, observed in profile.peaks if observed is not None}


def evidence(name: str, plan: MemoryPlan, peaks: Mapping[str, int]) -> ProfileEvidence:
    """What the profile `name` says of the plan, for status.plan."""
    shown = [
        f"{tier} {format_bytes(peaks[tier])} of {format_bytes(plan.bytes[tier].total)} planned"
        for tier in Tier
        if tier in peaks
    ]
    held = {tier.value: peaks[tier] for tier in Tier if tier in peaks}
    return ProfileEvidence(profile=name, peak=TierQuantities(**held), message=f"observed at most: {', '.join(shown)}")


def summary(plan: MemoryPlan) -> str:
    """Where the memory of a rank lives, in a sentence."""
    held = [f"{format_bytes(plan.bytes[tier].total)} {tier}" for tier in Tier if plan.bytes[tier].total]
    return f"{', '.join(held)} a rank; {'; '.join(plan.reasons)}"


def _parameters(spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    shape = model_shape(spec.model.transformer, spec.model.precision.compute, plan.device)
    return format_count(shape.num_parameters)
