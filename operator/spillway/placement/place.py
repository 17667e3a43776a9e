"""Placement: a job and a view of the cluster -> a plan and the preferred nodes. Pure.

    nodes -> those that could carry a pod -> classes of equal nodes -> a plan for each -> the fastest class
          -> its nodes by headroom -> preferences, and one sentence with the figure that decided

The answer is a node class and preferences, never a required host name: kube-scheduler decides, and an outdated figure
can only make a preference worse. A pod's requests come from the plan (pod_resources.py), never from live figures.
docs/placement.md explains each rule and its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spillway.api.job_spec import JobSpec
from spillway.api.pod import Pod
from spillway.api.profiles import NodeProfileSpec
from spillway.api.script import ScriptJob
from spillway.api.status import ProfileEvidence
from spillway.api.sweep.members import solo_specs
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import UserError
from spillway.feedback.ladder import smaller_micro_batches
from spillway.feedback.pod_evidence import NO_PODS_SEEN, PodEvidence, SeenPods, may_be_seen
from spillway.feedback.profiles import evidence, measured, memory_fingerprint, model_fingerprint, profile_name
from spillway.placement.able_nodes import (
    GPU_PRODUCT,
    Needs,
    base_node,
    could_carry,
    no_node,
    pods_on,
    ready_now,
    sound_nodes,
    without,
)
from spillway.placement.cluster_view import (
    NO_REQUESTS,
    ClusterView,
    HeldDevices,
    LiveBytes,
    NodeView,
    Reservation,
    Taint,
)
from spillway.placement.device_choice import because, devices, on_device
from spillway.placement.headroom import Preference, rank
from spillway.placement.outcome import Placement, Unplaceable
from spillway.placement.place_script import place_script, place_script_unseen
from spillway.plan import DeviceKind, Infeasible, MemoryPlan, Strategy, Tier
from spillway.planning.candidates import TIE, run_strategies
from spillway.planning.corrections import NO_CORRECTIONS, Corrections
from spillway.planning.explain import lacking
from spillway.planning.hardware import NodeSpec, gpu_node, resolve_node
from spillway.planning.known_plans import gathered, known_plan
from spillway.planning.model_shape import ModelShape
from spillway.planning.planner import Overrides, plan_run
from spillway.planning.pod_resources import (
    PLANNED_MARGIN,
    PodResources,
    emptydir_bytes,
    least_memory_bytes,
    plannable_memory_bytes,
    plannable_spill_bytes,
    pod_resources,
    pod_runtime_bytes,
    stopping_for_checkpoints,
)
from spillway.units import MIB, format_bytes, format_seconds

MAX_CLASSES = 8
"""Most node classes that are planned for, those with most nodes first: a plan takes up to half a second."""
CAPACITY_DIGITS = 5
"""Binary digits to which a class's capacities are rounded down, so that nodes that differ by a few MiB are one
class."""
DEFAULT_RESOURCE: str = Pod.model_fields["resource_name"].default
"""Resource by which a profile's devices are counted, if the node has it and the profile does not say how many there
are."""

__all__ = [
    "ClusterView",
    "LiveBytes",
    "NodeView",
    "Placement",
    "Preference",
    "Reservation",
    "Taint",
    "Unplaceable",
    "place",
    "profiled",
]

Place = Callable[[TrainingJob | ScriptJob, ClusterView], Placement | Unplaceable]
"""`place`, or a function that replaces it."""


def place(job: TrainingJob | ScriptJob, cluster: ClusterView) -> Placement | Unplaceable:
    """Returns the plan for `job` and the nodes it should run on.

    Returns Unplaceable with NoNode when no node could ever carry one of its pods (the message has the nearest miss,
    with figures), and with DoesNotFit when there is no plan for any class. With device Auto, the job runs on GPUs if
    any can carry it.
    """
    found, name = list[Unplaceable](), job.spec.pod.resource_name
    for device, why in devices(job.spec, _no_devices(name, cluster), f"nodes have {name}", cluster.device):
        placed = _place(on_device(job, device), cluster)
        if isinstance(placed, Placement):
            said = f"Cuda is not possible: {found[0].message}" if found else why
            return replace(placed, plan=because(placed.plan, said))
        found.append(placed)
    return found[0]


def _no_devices(name: str, cluster: ClusterView) -> str:
    if cluster.nodes is None:
        return "the operator has no permission to list nodes"
    has_one = any(view.allocatable_devices.get(name) for view in (*cluster.nodes, *cluster.declared))
    return "" if has_one else f"no node has {name}"


def _place(job: TrainingJob | ScriptJob, cluster: ClusterView) -> Placement | Unplaceable:
    """Places the job on the kind of device that it names."""
    device = device_kind(job.spec)
    if cluster.nodes is None:
        return place_script_unseen(job, device) if isinstance(job, ScriptJob) else _without_view(job, cluster)
    nodes = cluster.nodes
    if cluster.as_free:
        nodes = tuple(replace(view.free, others=NO_REQUESTS, ours=NO_REQUESTS) for view in nodes)

    def among(views: tuple[NodeView, ...]) -> Placement | Unplaceable:
        return place_script(job, device, cluster, views) if isinstance(job, ScriptJob) else _among(job, cluster, views)

    placed = among(nodes)
    if isinstance(placed, Unplaceable) and cluster.declared:
        new = among(cluster.declared)
        if isinstance(new, Placement):
            reason = (
                f"no existing node can run the job; it is planned for {new.preferences[0].node}, which does not "
                "exist yet"
            )
            return replace(new, preferences=(), headroom={}, at_once=True, reason=reason)
    return placed


def _among(job: TrainingJob, cluster: ClusterView, nodes: tuple[NodeView, ...]) -> Placement | Unplaceable:
    needs = _needs(job.spec, cluster.shape)
    able, misses = could_carry(job.spec, needs, nodes)
    if not able:
        return Unplaceable("NoNode", no_node(nodes, misses))
    able, avoided = sound_nodes(able, cluster.avoided)
    now = ready_now(able)
    corrections = _corrections(job.spec, cluster)
    groups = [
        replace(group, shape=cluster.shape, kept=cluster.strategy)
        for group in _classes(job.spec, needs, now or able, corrections, _pods_seen(job.spec, cluster))
    ]
    # Explaining a plan takes as long as finding it: if there are several classes, only the chosen plan is explained.
    alone = len(groups) == 1
    outcomes = gathered(partial(_outcome, job, group, explained=alone) for group in groups)
    fitting = [outcome for outcome in outcomes if isinstance(outcome, _Choice)]
    for smaller in () if fitting else _smaller(job, corrections):
        found = gathered(partial(_outcome, smaller, group, explained=alone) for group in groups)
        fitting = [outcome for outcome in found if isinstance(outcome, _Choice)]
        if fitting:
            job = smaller
            break
    if not fitting:
        return _nothing_fits(job, groups, [outcome for outcome in outcomes if isinstance(outcome, Unplaceable)])
    best, waiting_for = _best(fitting, job.spec, cluster.held)
    plan = best.plan if alone else _explained(job, best.group)
    ranking = rank(best.group.views, best.group.node, plan, best.pod, cluster, job.spec.spill.storage_class_name or "")
    waiting = f"waiting for a node, because none of the {len(able)} that can run the job is ready and schedulable now; "
    return Placement(
        plan=plan,
        node=best.group.node,
        preferences=ranking.preferences,
        reason=("" if now else waiting) + waiting_for + ranking.reason + without(avoided),
        headroom=ranking.headroom,
        pod=best.pod,
        required_labels=dict(best.group.required_labels),
        observed=_observed(job.spec, plan, cluster, best.seen),
        avoided=avoided,
        at_once=best.num_pods >= job.spec.parallelism.nodes,
    )


def device_kind(spec: JobSpec) -> DeviceKind:
    """Returns what the pods run on, for a job of exactly one kind of device."""
    return "Cuda" if spec.parallelism.device == "Cuda" else "Cpu"


def _needs(spec: TrainingJobSpec, shape: ModelShape | None) -> Needs:
    """Returns what one pod needs in addition to its plan; for a sweep, what all members need."""
    device = device_kind(spec)
    strategy = run_strategies(spec, spec.num_ranks, device)[0]
    runtime = pod_runtime_bytes(spec, spec.parallelism.devices_per_node, device, strategy)
    storage = emptydir_bytes(spec, device, shape=shape)
    return Needs(device, least_memory_bytes(spec, runtime, device), storage, runtime)


# --- classes of equal nodes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NodeClass:
    """Nodes that are equal enough for one plan."""

    node: NodeSpec
    """Its capacities are what a pod can use for the plan on every node of the class, rounded down."""
    shared_bytes: int
    """On a CPU: memory that device and host tier share; 0 on a GPU."""
    required_labels: tuple[tuple[str, str], ...]
    corrections: Corrections = NO_CORRECTIONS
    """Corrections of predictions, the same for every class."""
    pods: SeenPods = field(default=NO_PODS_SEEN, compare=False)
    """Evidence from pods, the same for every class."""
    shape: ModelShape | None = field(default=None, compare=False)
    """Shape of the job's model, if it was inspected; the same for every class."""
    kept: Strategy | None = field(default=None, compare=False)
    """Strategy of earlier attempts; the same for every class."""
    views: tuple[NodeView, ...] = ()


def _corrections(spec: TrainingJobSpec, cluster: ClusterView) -> Corrections:
    """Returns the corrections from this job's attempts and from jobs of the same model. In mode Advise they apply to
    the plan but do not enlarge the pod; in mode Disabled nothing is planned."""
    if spec.memory.mode == "Disabled":
        return NO_CORRECTIONS
    known = cluster.model_corrections.get(model_fingerprint(spec, device_kind(spec)), NO_CORRECTIONS)
    found = cluster.corrections.and_also(known)
    return found if spec.memory.mode == "Auto" else replace(found, pod=1.0, after_failure=False)


def _smaller(job: TrainingJob, corrections: Corrections) -> Iterable[TrainingJob]:
    """Yields the job with smaller micro-batches, if these are allowed: after this job ran out of memory."""
    return smaller_micro_batches(job, job.spec.num_ranks) if corrections.after_failure else ()


def _pods_seen(spec: TrainingJobSpec, cluster: ClusterView) -> SeenPods:
    """Returns the evidence from pods; none for a job that ran out of memory itself, because it needs more than any pod
    has shown."""
    if not may_be_seen(spec) or cluster.corrections != NO_CORRECTIONS:
        return NO_PODS_SEEN
    return SeenPods(cluster.observed_pods, spec.pod.image or cluster.trainer_image)


def _classes(
    spec: TrainingJobSpec, needs: Needs, views: Sequence[NodeView], corrections: Corrections, pods: SeenPods
) -> list[_NodeClass]:
    groups: dict[_NodeClass, list[NodeView]] = {}
    for view in views:
        own = replace(_class_of(spec, needs, view, corrections.pod), corrections=corrections, pods=pods)
        groups.setdefault(own, []).append(view)
    found = [
        replace(group, views=tuple(sorted(members, key=lambda view: view.name))) for group, members in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group.views), group.views[0].name))[:MAX_CLASSES]


def _class_of(spec: TrainingJobSpec, needs: Needs, view: NodeView, pod_factor: float = 1.0) -> _NodeClass:
    """Returns the class of a node, without views yet: equal for nodes that differ only by noise. A pod takes
    `pod_factor` times the memory that is counted for it."""
    device = device_kind(spec)
    node = base_node(view, device, spec.pod.resource_name)
    limit = view.allocatable_memory_bytes
    if node is view.profile:
        limit = min(limit, node.host_bytes)
    if spec.pod.resources.memory is not None:
        limit = min(limit, spec.pod.resources.memory)
    elif spec.memory.budget.host is None:
        limit = _share(spec, view, limit)
    limit = limit if pod_factor <= 1.0 else int(limit / pod_factor) - MIB
    plannable = plannable_memory_bytes(spec, limit, needs.runtime_bytes, device)
    memory = rounded_down(plannable)
    spill = rounded_down(_spill_capacity(spec, needs, view))
    names = view.labels if view.is_declared else (GPU_PRODUCT,) if device == "Cuda" else ()
    labels = tuple((name, view.labels[name]) for name in sorted(names) if view.labels.get(name))
    if device == "Cuda":
        return _NodeClass(replace(node, host_bytes=memory, nvme_bytes=spill), 0, labels)
    return _NodeClass(replace(node, device_bytes=memory, host_bytes=memory, nvme_bytes=spill), memory, labels)


def _share(spec: TrainingJobSpec, view: NodeView, num_bytes: int) -> int:
    """Returns what a pod may take of `num_bytes` of a node if the job names no budget: on GPUs, the same share as of
    the devices."""
    devices, ranks = view.allocatable_devices.get(spec.pod.resource_name, 0), spec.parallelism.devices_per_node
    return num_bytes * ranks // devices if device_kind(spec) == "Cuda" and devices > ranks else num_bytes


def profiled(view: NodeView, profile: NodeProfileSpec) -> NodeView:
    """Returns the node with the figures of its NodeProfile."""
    devices = view.allocatable_devices
    most = max(devices, key=lambda name: devices[name], default=DEFAULT_RESOURCE)
    resource_name = DEFAULT_RESOURCE if DEFAULT_RESOURCE in devices else most
    node = base_node(replace(view, profile=None), profile.device_kind, resource_name)
    memory, storage = view.allocatable_memory_bytes, view.allocatable_ephemeral_bytes
    return replace(view, profile=measured(profile, replace(node, host_bytes=memory, nvme_bytes=storage)))


def _spill_capacity(spec: TrainingJobSpec, needs: Needs, view: NodeView) -> int:
    """Returns the bytes that slabs may take: of the node's ephemeral storage, or of volumes of the storage class, which
    are as large as requested unless its driver names the largest."""
    if spec.spill.storage_class_name:
        largest, budget = view.volumes.get(spec.spill.storage_class_name), spec.memory.budget.nvme
        if largest is None:
            return budget or resolve_node("cpu").nvme_bytes
        made = spec.spill.num_volumes * plannable_spill_bytes(largest, 0)
        return min(budget or made, made)
    storage = view.allocatable_ephemeral_bytes
    storage = _share(spec, view, storage) if spec.memory.budget.nvme is None else storage
    room = plannable_spill_bytes(storage, needs.storage_bytes)
    profile = view.profile
    return max(0, min(room, profile.nvme_bytes) if profile is not None else room)


def rounded_down(num_bytes: int) -> int:
    """Rounds down to CAPACITY_DIGITS binary digits; 0 for negative numbers."""
    if num_bytes <= 0:
        return 0
    unit: int = 1 << max(0, num_bytes.bit_length() - CAPACITY_DIGITS)
    return num_bytes // unit * unit


# --- a plan for each --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """A class with the plan that fits it."""

    group: _NodeClass
    plan: MemoryPlan
    pod: PodResources
    seen: PodEvidence | None = None
    """Evidence for the pod's request; None: it is computed."""

    @property
    def seconds(self) -> float:
        return self.plan.prediction.step_seconds

    @property
    def bytes_off_device(self) -> int:
        return self.plan.bytes[Tier.HOST].total + self.plan.bytes[Tier.NVME].total

    @property
    def num_pods(self) -> int:
        """Pods that the nodes of the class could carry at once if they were empty."""
        return sum(pods_on(view, self.pod) for view in self.group.views)


def _outcome(job: TrainingJob, group: _NodeClass, *, explained: bool) -> _Choice | Unplaceable:
    """Plans for one class. Never raises: one odd node, or a wrong NodeProfile, must not keep a job from the others."""
    try:
        return _planned(job, group, explained=explained)
    except (UserError, TimeoutError) as error:
        why = str(error)
    except Exception as error:
        why = (
            f"planning failed, which is a bug in Spillway: {type(error).__name__}: {error}; the operator tries again; "
            "please report it with this job's spec"
        )
    return Unplaceable("NoNode", f"node class {group.node.name} (for example {group.views[0].name}): {why}")


def _planned(job: TrainingJob, group: _NodeClass, *, explained: bool) -> _Choice | Unplaceable:
    decided = _decided(job, group, explained=explained)
    if isinstance(decided, Infeasible):
        return Unplaceable("DoesNotFit", f"does not fit node class {group.node.name}", decided)
    plan, pod, seen = _for_its_pod(job.spec, decided, group)
    if not any(pods_on(view, pod) for view in group.views):  # modes other than Auto are not held to the budgets
        return Unplaceable("NoNode", _too_large(job, group, pod))
    return _Choice(group, plan, pod, seen)


def _explained(job: TrainingJob, group: _NodeClass) -> MemoryPlan:
    """Returns the plan of a class that has one, with the alternatives that lost."""
    plan = _decided(job, group, explained=True)
    assert isinstance(plan, MemoryPlan)
    return _for_its_pod(job.spec, plan, group)[0]


def _decided(job: TrainingJob, group: _NodeClass, *, explained: bool) -> MemoryPlan | Infeasible:
    ranks, own = job.spec.parallelism.devices_per_node, on_device(job, group.node.device_kind)
    overrides = _overrides(job, group)
    return plan_run(own, group.node, overrides, group.shared_bytes, ranks, planned=known_plan, explained=explained)


def _overrides(job: TrainingJob, group: _NodeClass) -> Overrides:
    """Returns the planner's overrides for the class. The capacities of a GPU class are already the share that a pod may
    take."""
    budget, node = job.spec.memory.budget, group.node
    if node.device_kind == "Cpu":
        return Overrides(corrections=group.corrections, shape=group.shape, kept=group.kept)
    return Overrides(
        corrections=group.corrections,
        shape=group.shape,
        kept=group.kept,
        host_bytes=node.host_bytes if budget.host is None else None,
        nvme_bytes=node.nvme_bytes if budget.nvme is None else None,
    )


def _for_its_pod(
    spec: TrainingJobSpec, plan: MemoryPlan, group: _NodeClass
) -> tuple[MemoryPlan, PodResources, PodEvidence | None]:
    """Returns the plan and its pod, and the evidence that decided the pod's memory. Without evidence the memory is
    computed, plus what pods of the model took beyond that; if pods with exactly this plan were observed, it is what
    they took."""

    def observed(one: MemoryPlan) -> PodEvidence | None:
        return group.pods.of(memory_fingerprint(spec, one), spec, one) if group.pods.known else None

    plan, ranks = _within_its_pod(plan), spec.parallelism.devices_per_node
    counted, seen = pod_resources(spec, plan, ranks), observed(plan)
    if plan.snapshot_bytes:
        stopping = plan.model_copy(update={"snapshot_bytes": 0})
        smaller, evidence_without = pod_resources(spec, stopping, ranks), observed(stopping)
        why = ""
        if _takes_a_place(group, counted, smaller):
            why = "with memory for a copy of the states, fewer pods would fit on a node"
        elif seen is None and evidence_without is not None:
            why = "the request is based on earlier pods, which had no memory for a copy"
        if why:
            plan, counted, seen = stopping_for_checkpoints(plan, why), smaller, evidence_without
    if seen is None:
        more = group.corrections.unplanned_bytes(counted.memory_bytes)
        plan = plan.model_copy(update={"unplanned_bytes": more})
        return plan, pod_resources(spec, plan, ranks), None
    request = seen.request_bytes(counted.memory_bytes)
    decided = {
        "unplanned_bytes": max(0, request - counted.memory_bytes),
        "reasons": (*plan.reasons, seen.sentence(counted.memory_bytes)),
    }
    return plan.model_copy(update=decided), replace(counted, memory_bytes=request), seen


def _takes_a_place(group: _NodeClass, pod: PodResources, smaller: PodResources) -> bool:
    """Whether fewer of these pods than of the `smaller` ones fit on a node of the class, as it is or empty."""
    seen = [nodes for view in group.views for nodes in (view, view.beside_others, view.free)]
    return not seen or any(pods_on(view, pod) < pods_on(view, smaller) for view in seen)


def _within_its_pod(plan: MemoryPlan) -> MemoryPlan:
    """Lowers the device's budget on a CPU to the planned bytes and their margin, which the pod's limit covers: the
    trainer then raises DeviceOutOfMemory with a message before the kernel kills it."""
    if plan.device != "Cpu":
        return plan
    allowed = int(plan.bytes[Tier.DEVICE].total * (1.0 + PLANNED_MARGIN))
    budget = {**plan.budget, Tier.DEVICE: min(plan.budget[Tier.DEVICE], allowed)}
    return plan.model_copy(update={"budget": budget})


def _too_large(job: TrainingJob, group: _NodeClass, pod: PodResources) -> str:
    view = max(group.views, key=lambda view: view.allocatable_memory_bytes)
    return (
        f"a pod of {job.metadata.name} needs {format_bytes(pod.memory_bytes)} of memory, "
        f"{format_bytes(pod.ephemeral_storage_bytes)} of ephemeral storage and {pod.cpu_cores:g} cores; the largest "
        f"node, {view.name}, has {format_bytes(view.allocatable_memory_bytes)}, "
        f"{format_bytes(view.allocatable_ephemeral_bytes)} and {view.allocatable_cores:g}"
    )


def _best(choices: Sequence[_Choice], spec: TrainingJobSpec, held: Sequence[HeldDevices]) -> tuple[_Choice, str]:
    """Returns the class on which the job ends first, including the wait; of those within 1 %, the one that keeps most
    on the device. Classes that can carry all pods at once go before those that cannot. Also returns a sentence, empty
    unless waiting decided."""
    num_nodes, steps = spec.parallelism.nodes, sum(one.training.num_steps for one in solo_specs(spec))
    able = [choice for choice in choices if choice.num_pods >= num_nodes] or list(choices)
    waits = [_wait_seconds(choice, num_nodes, held) for choice in able]
    if min(waits) == math.inf:  # nobody knows when any of them is free
        waits = [0.0] * len(able)
    ends = [wait + steps * choice.seconds for wait, choice in zip(waits, able, strict=True)]
    first, fastest = _first(able, ends), _first(able, [choice.seconds for choice in able])
    if first == fastest:
        return able[first], ""
    ratio, wait = able[first].seconds / able[fastest].seconds, waits[fastest]
    until = " for an unknown time" if wait == math.inf else f" for {format_seconds(wait)}"
    name = able[fastest].group.node.name
    return able[first], f"{name} would be {ratio:.2g} times as fast, but other pods use it{until}; "


def _first(choices: Sequence[_Choice], ends: Sequence[float]) -> int:
    near = (number for number, end in enumerate(ends) if end <= TIE * min(ends))
    return min(near, key=lambda number: _tie_break(choices[number]))


def _tie_break(choice: _Choice) -> tuple[int, str, str]:
    return choice.bytes_off_device, choice.group.node.name, choice.group.views[0].name


def _wait_seconds(choice: _Choice, num_nodes: int, held: Sequence[HeldDevices]) -> float:
    """Seconds until the class has room for all pods, if other jobs of the operator take as long as their status says;
    infinite if unknown. How devices are spread over nodes is not considered."""
    name, group, pod = choice.pod.resource_name, choice.group, choice.pod
    if sum(pods_on(view.beside_others, pod) for view in group.views) < num_nodes:
        return math.inf
    if not pod.devices:
        return 0.0 if sum(pods_on(view.free, pod) for view in group.views) >= num_nodes else math.inf
    here = [one for one in held if one.resource_name == name and _holds_in(one, group)]
    there = sum(view.beside_others.allocatable_devices.get(name, 0) for view in group.views)
    free = there - sum(one.devices for one in here)
    wait = 0.0
    for one in sorted(here, key=lambda one: math.inf if one.seconds_left is None else one.seconds_left):
        if free >= num_nodes * pod.devices:
            break
        free += one.devices
        wait = math.inf if one.seconds_left is None else one.seconds_left
    return wait


def _holds_in(held: HeldDevices, group: _NodeClass) -> bool:
    if held.nodes:
        return not {view.name for view in group.views}.isdisjoint(held.nodes)
    return held.node_class == group.node.name


def _nothing_fits(job: TrainingJob, groups: Sequence[_NodeClass], found: Sequence[Unplaceable]) -> Unplaceable:
    """Reports the class that lacks least; what would fit is worked out only for that one."""
    nearest = min(range(len(found)), key=lambda number: _missing(found[number]))
    missing = found[nearest].infeasible
    if missing is None:
        return found[nearest]
    explained = missing if missing.nearest else _decided(job, groups[nearest], explained=True)
    group = groups[nearest]
    return _does_not_fit(explained, f"node class {group.node.name}")


def _missing(outcome: Unplaceable) -> float:
    return sum(outcome.infeasible.missing_bytes.values()) if outcome.infeasible is not None else float("inf")


def _does_not_fit(decided: MemoryPlan | Infeasible, where: str) -> Unplaceable:
    assert isinstance(decided, Infeasible)
    return Unplaceable("DoesNotFit", lacking(decided, where), decided)


def _observed(
    spec: TrainingJobSpec, plan: MemoryPlan, cluster: ClusterView, seen: PodEvidence | None
) -> ProfileEvidence | None:
    """Returns what the MemoryProfile of exactly this plan shows, for people; the corrections from all profiles of the
    model are in the plan already."""
    peaks = cluster.observed_peaks.get(memory_fingerprint(spec, plan))
    return evidence(profile_name(spec, plan), plan, peaks, seen) if peaks else None


# --- without a view of the nodes --------------------------------------------------------------------------------------


def _without_view(job: TrainingJob, cluster: ClusterView) -> Placement | Unplaceable:
    """Places the job if the operator may not list nodes: on a class of the catalog, with the catalog's capacities."""
    pods = _pods_seen(job.spec, cluster)
    group = replace(_catalog_class(job.spec), corrections=_corrections(job.spec, cluster), pods=pods)
    decided = _decided(job, group, explained=True)
    for smaller in _smaller(job, group.corrections):
        if isinstance(decided, Infeasible):
            job, decided = smaller, _decided(smaller, group, explained=True)
    if isinstance(decided, Infeasible):
        return _does_not_fit(decided, f"node class {group.node.name} of the catalog")
    plan, pod, seen = _for_its_pod(job.spec, decided, group)
    return Placement(
        plan=plan,
        node=group.node,
        preferences=(),
        reason=f"planned for the catalog's {group.node.name}: the operator has no permission to list nodes "
        f"(NoNodeView)",
        headroom={},
        pod=pod,
        required_labels=dict(group.required_labels),
        observed=_observed(job.spec, plan, cluster, seen),
    )


def _catalog_class(spec: TrainingJobSpec) -> _NodeClass:
    if device_kind(spec) == "Cpu":
        node = resolve_node("cpu")
        memory = node.device_bytes + node.host_bytes
        return _NodeClass(replace(node, device_bytes=memory, host_bytes=memory), memory, ())
    product = spec.scheduling.node_selector.get(GPU_PRODUCT, "")
    return _NodeClass(gpu_node(product, None, spec.parallelism.devices_per_node), 0, ())
