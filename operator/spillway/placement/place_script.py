"""Placement of a script: nodes that can carry what its pods request, ranked by what is free. Nothing is planned.
Pure."""

from __future__ import annotations

from spillway.api.script import ScriptJob
from spillway.placement.able_nodes import (
    Needs,
    base_node,
    could_carry,
    no_node,
    pods_on,
    ready_now,
    sound_nodes,
    without,
)
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.headroom import rank
from spillway.placement.outcome import Placement, Unplaceable
from spillway.plan import (
    ActivationPlan,
    DeviceKind,
    MemoryPlan,
    OptimizerPlan,
    Prediction,
    Tier,
    TierBytes,
)
from spillway.planning.hardware import NodeSpec, gpu_node, resolve_node
from spillway.planning.pod_resources import PodResources, script_resources
from spillway.units import format_bytes


def place_script(
    job: ScriptJob, device: DeviceKind, cluster: ClusterView, nodes: tuple[NodeView, ...]
) -> Placement | Unplaceable:
    """Places the script on those of `nodes` that can carry a pod, with most room first."""
    spec, pod = job.spec, script_resources(job.spec, device)
    needs = Needs(device, pod.memory_bytes, pod.ephemeral_storage_bytes)
    able, misses = could_carry(spec, needs, nodes)
    able = [view for view in able if pods_on(view, pod)]
    if not able:
        return Unplaceable("NoNode", no_node(nodes, misses) if misses else f"no node has {pod.cpu_cores:g} cores")
    sound, avoided = sound_nodes(able, cluster.avoided)
    now = ready_now(sound) or sound
    now = now[:1] if now[0].is_declared else now
    node = base_node(now[0], device, spec.pod.resource_name)
    plan = _nothing_planned(job, device, node, pod)
    ranking = rank(now, node, plan, pod, cluster, spec.spill.storage_class_name)
    return Placement(
        plan=plan,
        node=node,
        preferences=ranking.preferences,
        reason=ranking.reason + without(avoided),
        headroom=ranking.headroom,
        pod=pod,
        required_labels=dict(now[0].labels) if now[0].is_declared else {},
        avoided=avoided,
        at_once=sum(pods_on(view, pod) for view in now) >= spec.parallelism.nodes,
    )


def place_script_unseen(job: ScriptJob, device: DeviceKind) -> Placement:
    """Places the script if the operator may not list nodes."""
    pod = script_resources(job.spec, device)
    node = gpu_node("", None, job.spec.parallelism.devices_per_node) if device == "Cuda" else resolve_node("cpu")
    return Placement(
        plan=_nothing_planned(job, device, node, pod),
        node=node,
        preferences=(),
        reason="the operator has no permission to list nodes (NoNodeView)",
        headroom={},
        pod=pod,
    )


def _nothing_planned(job: ScriptJob, device: DeviceKind, node: NodeSpec, pod: PodResources) -> MemoryPlan:
    """Returns an empty plan, because a contract always has a plan."""
    spill = f", {format_bytes(pod.spill_volume_bytes)} of spill volume" if pod.spill_volume_bytes else ""
    return MemoryPlan(
        job=job.metadata.name,
        node=node.name,
        device=device,
        mode="Disabled",
        world_size=job.spec.parallelism.world_size,
        micro_batch_size=1,
        num_micro_batches=1,
        num_segments=0,
        optimizer=OptimizerPlan(),
        activations=ActivationPlan(),
        bytes={tier: TierBytes() for tier in Tier},
        budget=dict.fromkeys(Tier, 0),
        prediction=Prediction(
            step_seconds=0.0, compute_seconds=0.0, exposed_optimizer_seconds=0.0, exposed_transfer_seconds=0.0,
            bound_by="",
        ),
        reasons=(f"a script, whose memory is not planned: {format_bytes(pod.memory_bytes)} of memory{spill} per pod",),
    )  # fmt: skip
