"""Converts NodeProfiles to NodeSpecs and observed peaks to MemoryProfiles. Pure.

A MemoryProfile belongs to a fingerprint: everything that a rank's bytes depend on. Reports are not trusted blindly: a
figure far from its prediction is cut to a plausible range and marked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from spillway.api.field_types import Fields
from spillway.api.model import ModelConfig
from spillway.api.profiles import LowerBound, MemoryProfile, NodeProfileSpec, ObservedBytes, ObservedTiers
from spillway.api.status import ProfileEvidence, TierQuantities
from spillway.api.training_job import TrainingJobSpec
from spillway.feedback.ladder import MARGINS, OBSERVED_MARGIN, MemoryFailure
from spillway.feedback.pod_evidence import POD_MARGIN, PodEvidence, PodPeak, evidence_of, with_peak
from spillway.feedback.recent_peaks import MOST_PLAUSIBLE, MOST_RECENT, plausible, quantile
from spillway.plan import MemoryPlan, Tier, TierBytes
from spillway.planning.corrections import Corrections
from spillway.planning.hardware import MEASURED, TIER_NAMES, NodeSpec
from spillway.planning.model_shape import model_shape
from spillway.units import format_bytes, format_count
from spillway.update_rules import MomentType, UpdateRule

FINGERPRINT_DIGITS = 16
DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
MOST_JOBS = 64
"""Most jobs whose last attempt a profile remembers."""
MOST_NAMED = 3
"""Most rates that a sentence names."""
LONGEST_PLAN = 512
LONGEST_MODEL = 256
"""Most characters of MemoryProfile.spec.plan and .model."""

# --- nodes ------------------------------------------------------------------------------------------------------------


def measured(profile: NodeProfileSpec, node: NodeSpec) -> NodeSpec:
    """Returns `node` with the profile's figures; those that the profile lacks stay. The name is the class's, not the
    node's, and rates are rounded to two digits, so that nodes with similar measurements are planned for as one
    class."""
    capacities = {
        "device_bytes": profile.device_memory,
        "host_bytes": profile.host_memory,
        "nvme_bytes": profile.nvme_capacity,
    }
    own = {name: value for name, value in profile if name in NodeSpec.__slots__ and name != "link"}
    figures = _given(own | capacities)
    return replace(node, **figures, name=_name(profile, node), link=replace(node.link, **_given(dict(profile.link))))


def with_rates(profile: NodeProfileSpec, node: NodeSpec) -> NodeSpec:
    """Returns `node` with the profile's rates as measured; its capacities stay, because they are the bytes that are
    free now."""
    own = {name: value for name, value in profile if name in RATES and value is not None}
    link = {name: value for name, value in profile.link if value is not None}
    return replace(node, **own, name=_name(profile, node), link=replace(node.link, **link))


def _name(profile: NodeProfileSpec, node: NodeSpec) -> str:
    return f"{node.name}{MEASURED}" if has_rates(profile) else node.name


RATES = tuple(
    name for name in NodeProfileSpec.model_fields if name.endswith(("_per_second", "_overhead_seconds"))
)  # fmt: skip
"""Fields that are rates, not capacities; those of the link are separate."""


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
"""Together with LINK_RATES, all rates that a plan for one device takes from the catalog if nothing was measured; the
cost of operations other than matrix products is part of the catalog's FLOP rates."""


def has_rates(profile: NodeProfileSpec) -> bool:
    """Whether any rate was measured; capacities are not rates."""
    return any(getattr(profile, name) is not None for name in RATES) or any(
        getattr(profile.link, name) is not None for name in LINK_RATES
    )


def rates_sentence(profile: NodeProfileSpec, where: str = "") -> str:
    """Says whether the rates are measured; if only some are, how many, and which are the catalog's. `where`: on which
    day or in which file they were measured."""
    given = {name: getattr(profile, name) for name in CATALOG_RATES}
    given |= {name: getattr(profile.link, name) for name in LINK_RATES}
    missing = [_camel(name) for name, rate in given.items() if rate is None]
    if not has_rates(profile):
        return "catalog rates"
    if not missing:
        return f"rates measured {where}" if where else "measured rates"
    shown = ", ".join(missing[:MOST_NAMED]) + (f" and {len(missing) - MOST_NAMED} more" * (len(missing) > MOST_NAMED))
    measured_there = f"rates measured {where}".rstrip()
    return f"{len(given) - len(missing)} of {len(given)} {measured_there}; from the catalog: {shown}"


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


class ProfileMetadata(Fields):
    name: Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)] = Field(description="Name of the node.")
    annotations: dict[str, str] = Field(default={}, description="How it was measured, for people.")


class NodeProfile(Fields):
    """The NodeProfile document that a cluster holds and that `spillway calibrate` writes."""

    api_version: Literal["spillway.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["NodeProfile"] = Field(description="Kind of the object.")
    metadata: ProfileMetadata = Field(description="Which node.")
    spec: NodeProfileSpec = Field(description="Its figures.")


def document(name: str, spec: NodeProfileSpec, annotations: Mapping[str, str]) -> dict[str, Any]:
    """Returns the NodeProfile as plain data, without figures that are not known."""
    metadata = {"name": name, "annotations": dict(annotations)} if annotations else {"name": name}
    figures = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    figures = {key: value for key, value in figures.items() if value != {}}
    return {"apiVersion": "spillway.dev/v1alpha1", "kind": "NodeProfile", "metadata": metadata, "spec": figures}


def rates_from(node: NodeSpec, before: NodeSpec, profile: NodeProfileSpec) -> NodeProfileSpec:
    """Returns `profile` with the rates in which `node` differs from `before`, rounded to three digits, because no
    measurement is more precise."""
    own = {name: _rounded(getattr(node, name)) for name in RATES if getattr(node, name) != getattr(before, name)}
    link = {
        name: _rounded(getattr(node.link, name))
        for name in (*LINK_RATES, "duplex_efficiency")
        if getattr(node.link, name) != getattr(before.link, name)
    }
    return profile.model_copy(update={**own, "link": profile.link.model_copy(update=link)})


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _given(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures that are known, rates with two digits."""
    return {
        name: float(f"{value:.2g}") if isinstance(value, float) else value
        for name, value in figures.items()
        if value is not None
    }


# --- memory of a model ------------------------------------------------------------------------------------------------


def memory_fingerprint(spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    """Returns 16 hexadecimal digits of a hash over everything that the bytes of a rank depend on: model, sequence
    length, micro-batch size, ranks, and what the plan does with them. Budgets, predictions and names do not count."""
    decides = {
        "model": spec.model.model_dump(mode="json", exclude_none=True),
        "sequenceLength": spec.training.sequence_length,
        "microBatchSize": plan.micro_batch_size,
        "worldSize": plan.world_size,
        "device": plan.device,
        "mode": plan.mode,
        "strategy": plan.strategy,
        "optimizer": plan.optimizer.model_dump(mode="json", exclude={"num_threads"}),
        "activations": plan.activations.model_dump(
            mode="json", exclude={"num_io_threads"} | (set() if plan.activations.lean else {"lean"})
        ),  # as in profiles from before `lean` existed
        "parameters": plan.parameters.model_dump(mode="json"),
    }
    if (moments := spec.training.optimizer.rule.moments) != UpdateRule.ADAMW.moments:  # as before other rules existed
        decides["moments"] = moments
    if (kept := spec.training.optimizer.moment_type) is not MomentType.FLOAT32:
        decides["momentType"] = kept
    if plan.snapshot_bytes:
        decides["snapshotBytes"] = plan.snapshot_bytes
    if plan.parameters.order == "WeightStationary":  # boundaries of all micro-batches are held
        decides["numMicroBatches"] = plan.num_micro_batches
    if plan.members:  # the bytes of a sweep are those of all members
        decides["members"] = [one.model_dump(mode="json", exclude_none=True) for one in spec.members]
        decides["plans"] = [memory_fingerprint(spec, one.plan) for one in plan.members]
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def model_fingerprint(spec: TrainingJobSpec, device: str) -> str:
    """Returns 16 hexadecimal digits of a hash over everything that the error of a prediction depends on, whatever the
    plan: model, sequence length, ranks, kind of device, kind of optimizer states, and members."""
    optimizer = spec.training.optimizer
    decides = {
        "model": spec.model.model_dump(mode="json", exclude_none=True),
        "sequenceLength": spec.training.sequence_length,
        "worldSize": spec.parallelism.world_size,
        "device": device,
        "states": [optimizer.rule.value, optimizer.moment_type.value],
    }
    if spec.members:  # the members of a sweep run out of memory together
        decides["members"] = [one.model_dump(mode="json", exclude_none=True) for one in spec.members]
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def profile_name(spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    """Returns the MemoryProfile's name, such as llama-6.5m-1f0c2a9d8b7e6543."""
    sizes = spec.model.config
    model = "model" if sizes is None else f"{sizes.architecture}-{_parameters(sizes, spec, plan)}"
    return f"{model}-{memory_fingerprint(spec, plan)}".replace(" ", "").lower()


def new_profile(spec: TrainingJobSpec, plan: MemoryPlan) -> MemoryProfile:
    """Returns the profile as it is before the first observation."""
    model, sizes = spec.model, spec.model.config
    if sizes is not None:
        what = f"{sizes.architecture}, {_parameters(sizes, spec, plan)} parameters"
    elif model.source is not None:
        what = model.source.path or f"{model.source.claim}/{model.source.sub_path}"
    else:
        what = model.entrypoint or ""
    return MemoryProfile(
        fingerprint=memory_fingerprint(spec, plan),
        model_fingerprint=model_fingerprint(spec, plan.device),
        model=f"{what}, {model.precision.compute}"[:LONGEST_MODEL],
        plan=summary(plan)[:LONGEST_PLAN],
        world_size=plan.world_size,
    )


def profile_update(
    existing: MemoryProfile | None,
    spec: TrainingJobSpec,
    plan: MemoryPlan,
    peaks: Mapping[str, int],
    attempt: str,
    now: str,
    pod: PodPeak | None = None,
) -> MemoryProfile | None:
    """Returns the profile after `attempt` (<job>-<number>) reported `peaks` (tier -> bytes of the rank that held most);
    None if nothing changes. A tier that was not reported, or that the plan does not use, is unchanged.

    Each attempt counts once, even if reports of several jobs alternate: it is new if the profile knows no attempt of
    its job, or an earlier one.

    `now` is RFC 3339. A figure outside of 0.25 to 4 times the planned bytes is cut to that range, and one above the
    peak of the whole pod (`pod`) to that peak.
    """
    profile = existing or new_profile(spec, plan)
    is_new, last_attempts = _counted(profile, attempt)
    rises = profile.attempt == attempt
    tiers, clamped, most = {}, profile.clamped, _most_in_the_pod(plan, pod)
    for tier in Tier:
        planned = plan.bytes[tier].predicted
        reported = _without_moved(peaks.get(tier, 0), plan.bytes[tier])
        before: ObservedBytes | None = getattr(profile.peaks, tier)
        tiers[tier.value] = before
        if planned and reported:
            believed = plausible(planned, min(reported, most.get(tier, reported)))
            clamped = clamped or believed != reported
            tiers[tier.value] = _observed(before, planned, believed, is_new=is_new, rises=rises)
    observed = ObservedTiers(**tiers)
    pods = None if pod is None else with_peak(profile.pod, spec, pod, attempt)
    if observed == profile.peaks and clamped == profile.clamped and not is_new and pods is None:
        return None
    if not any(tiers.values()):
        return None
    changes: dict[str, Any] = {
        "peaks": observed,
        "clamped": clamped,
        "pod": pods or profile.pod,
        "observed_time": now,
        "model_fingerprint": model_fingerprint(spec, plan.device),  # older profiles may lack it
    }
    if is_new:
        changes |= {"attempt": attempt, "last_attempts": last_attempts, "count": profile.count + 1}
    return profile.model_copy(update=changes)


def _without_moved(reported: int, held: TierBytes) -> int:
    """Subtracts the bytes that a live correction may have moved to this tier, at most the reserve: that part of a peak
    does not show that the prediction was wrong."""
    return reported - min(held.reserve, max(0, reported - held.predicted))


def _most_in_the_pod(plan: MemoryPlan, pod: PodPeak | None) -> dict[Tier, int]:
    """Returns tier -> most bytes that a rank can have held, by the peak of its pod: on a CPU the device is host memory,
    too. On a GPU there is no such bound, because drivers pin memory that no cgroup counts."""
    if pod is None or not pod.peak_bytes or not pod.is_its_own or plan.device != "Cpu":
        return {}
    return {Tier.DEVICE: pod.peak_bytes, Tier.HOST: pod.peak_bytes}


def _counted(profile: MemoryProfile, attempt: str) -> tuple[bool, tuple[str, ...]]:
    """Returns whether `attempt` is not counted yet, and the last attempts of all jobs, including it."""
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


def _observed(before: ObservedBytes | None, planned: int, peak: int, *, is_new: bool, rises: bool) -> ObservedBytes:
    if before is None:
        return _with_quantiles(ObservedBytes(planned=planned, max=peak, last=peak), (peak,))
    # Within one attempt peaks only rise: a late report of an early moment says nothing. `last` is the newest attempt's.
    last = peak if is_new else max(before.last, peak) if rises else before.last
    known = before.recent or (before.last,)
    recent = (*known, peak)[-MOST_RECENT:] if is_new else (*known[:-1], last) if rises else known
    return _with_quantiles(ObservedBytes(planned=planned, max=max(before.max, peak), last=last), recent)


def _with_quantiles(observed: ObservedBytes, recent: Sequence[int]) -> ObservedBytes:
    found = {"recent": tuple(recent), "p50": quantile(recent, 0.5), "p95": quantile(recent, 0.95)}
    return observed.model_copy(update=found)


def profile_after_failure(
    existing: MemoryProfile | None, spec: TrainingJobSpec, failure: MemoryFailure, now: str
) -> MemoryProfile | None:
    """Returns the profile of the plan that ran out of memory, with the lower bound from this failure; None if the
    failure says nothing new. It says nothing either if the plan was never expected to fit its limit, which is possible
    in modes other than Auto: its prediction was right. A pod that requested less than the counted bytes, because of
    evidence, is different: its request was too small."""
    profile = existing or new_profile(spec, failure.plan)
    kind = "pod" if failure.tier is None else failure.tier.value
    known: LowerBound | None = getattr(profile.lower_bounds, kind)
    predicted, limit = failure.predicted_bytes, failure.limit_bytes
    if predicted <= 0 or (limit < predicted and failure.tier is not None):
        return None
    bound = LowerBound(planned=predicted, held=plausible(predicted, limit))
    if known is not None and known.held * bound.planned >= bound.held * known.planned:
        return None
    changes: dict[str, Any] = {
        "lower_bounds": profile.lower_bounds.model_copy(update={kind: bound}),
        "clamped": profile.clamped or bound.held != limit,
        "observed_time": now,
        "model_fingerprint": model_fingerprint(spec, failure.plan.device),
    }
    return profile.model_copy(update=changes)


def ratio(bound: LowerBound) -> float:
    """Returns held over planned bytes, at most MOST_PLAUSIBLE; below 1 for a pod that requested less than the counted
    bytes."""
    return min(bound.held / max(1, bound.planned), MOST_PLAUSIBLE)


def observed_corrections(profiles: Iterable[MemoryProfile]) -> Corrections:
    """Returns the corrections of predictions for a model's next job, from all profiles of the model. An observed peak
    counts with a small margin. If memory ran out and no peak as high was observed since, the excess is unknown, so the
    lower bound counts with the ladder's first margin. No factor is below 1, because a low peak may have been luck."""
    known = tuple(profiles)
    factors, sentences = {}, []
    for kind in (*(tier.value for tier in Tier), "pod"):
        bound, seen = _most(known, kind)
        bound = bound if bound >= 1.0 else 0.0  # a bound below 1 does not show that the prediction is too low
        factor = seen * (1.0 + OBSERVED_MARGIN) if seen >= bound else bound * (1.0 + MARGINS[0])
        if seen > 1.0 or bound:
            factors[kind] = round(max(1.0, factor), 4)
            what = "pod memory" if kind == "pod" else TIER_NAMES[Tier(kind)]
            how = f"used at most {seen:.2f}" if seen >= bound else f"ran out at {bound:.2f}"
            sentences.append(
                f"predicted {what} is multiplied by {factors[kind]:.2f}: earlier jobs of the model {how} times the "
                f"prediction"
            )
    return Corrections(**factors, reasons=tuple(sentences))  # type: ignore[arg-type]


def _most(profiles: Sequence[MemoryProfile], kind: str) -> tuple[float, float]:
    """Returns the largest lower bound and the largest peak, in multiples of the predicted bytes; 0 where there is
    none."""
    bounds = [bound for one in profiles if (bound := getattr(one.lower_bounds, kind)) is not None]
    return max(map(ratio, bounds), default=0.0), max((_seen(one, kind) for one in profiles), default=0.0)


def _seen(profile: MemoryProfile, kind: str) -> float:
    """Returns the observed peak in multiples of the predicted bytes; 0 if none was observed."""
    if kind == "pod":
        pod = profile.pod
        peak, planned = (0, 0) if pod is None else (pod.p95, pod.counted)
    else:
        observed: ObservedBytes | None = getattr(profile.peaks, kind)
        peak, planned = (0, 0) if observed is None else (observed.p95 or observed.max, observed.planned)
    return min(peak / planned, MOST_PLAUSIBLE) if planned else 0.0


def observed_pods(profiles: Iterable[MemoryProfile]) -> dict[str, PodEvidence]:
    """Returns fingerprint -> evidence from pods, for the profiles of one model. Empty if memory ran out and no peak as
    high was observed since, because pods may then need more than any pod has shown."""
    known = tuple(profiles)
    most = (_most(known, kind) for kind in (Tier.DEVICE.value, Tier.HOST.value, "pod"))
    if any(bound > seen for bound, seen in most):
        return {}
    found = {one.fingerprint: evidence_of(one) for one in known}
    return {fingerprint: seen for fingerprint, seen in found.items() if seen is not None}


def observed_peaks(profile: MemoryProfile) -> dict[str, int]:
    """Returns tier -> largest peak, for the tiers that were observed."""
    return {tier: observed.max for tier, observed in profile.peaks if observed is not None}


def evidence(name: str, plan: MemoryPlan, peaks: Mapping[str, int], pod: PodEvidence | None = None) -> ProfileEvidence:
    """Returns, for status.plan, what the profile `name` shows for the plan; `pod` is given if it decided the pod's
    request."""
    shown = [
        f"{tier} {format_bytes(peaks[tier])} of {format_bytes(plan.bytes[tier].total)} planned"
        for tier in Tier
        if tier in peaks
    ]
    held = {tier.value: peaks[tier] for tier in Tier if tier in peaks}
    message = f"observed peaks: {', '.join(shown)}"
    if pod is None:
        return ProfileEvidence(profile=name, peak=TierQuantities(**held), message=message)
    message = (
        f"{message}; pods used at most {format_bytes(pod.peak_bytes)}, and a pod requests this plus {POD_MARGIN:.0%}"
    )
    return ProfileEvidence(
        profile=name, peak=TierQuantities(**held), message=message, pod_memory=pod.peak_bytes, runs=pod.num_runs
    )


def summary(plan: MemoryPlan) -> str:
    """Says in a sentence in which tiers the memory of a rank is."""
    held = [f"{format_bytes(plan.bytes[tier].total)} {tier}" for tier in Tier if plan.bytes[tier].total]
    return f"{', '.join(held)} a rank; {'; '.join(plan.reasons)}"


def _parameters(sizes: ModelConfig, spec: TrainingJobSpec, plan: MemoryPlan) -> str:
    shape = model_shape(sizes, spec.model.precision.compute, plan.device)
    return format_count(shape.num_parameters)
