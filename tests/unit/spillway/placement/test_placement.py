"""Where a job should run: by plan first, then by headroom; and one sentence that names the figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.job_documents import job
from harness.depth import examples
from spillway.api.profiles import NodeProfileSpec
from spillway.feedback.profiles import memory_fingerprint, model_fingerprint
from spillway.placement import headroom
from spillway.placement.cluster_view import HeldDevices
from spillway.placement.place import (
    ClusterView,
    LiveBytes,
    NodeView,
    Placement,
    Preference,
    Reservation,
    Taint,
    Unplaceable,
    place,
    profiled,
)
from spillway.plan import Tier
from spillway.planning.corrections import Corrections
from spillway.planning.hardware import resolve_node
from spillway.planning.pod_resources import LONGEST_GRACE_SECONDS, pod_resources
from spillway.units import GIB, MIB, format_bytes

GPU = "nvidia.com/gpu"
H100_LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
A100_LABELS = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40441"}
CUDA = {"spec.parallelism.device": "Cuda"}


def node(name: str, host: float | None = None, nvme: float | None = None, **changes: Any) -> NodeView:
    """A CPU node; `host` and `nvme` are free GiB from metrics, None without series."""
    live = None
    if host is not None or nvme is not None:
        live = LiveBytes((), gib(host), gib(nvme))
    view = NodeView(name, {}, (), 8.0, 16 * GIB, 100 * GIB, {}, live=live)
    return replace(view, **changes)


def stalling(view: NodeView, share: float) -> NodeView:
    """The node, whose memory stalled for that share of the time."""
    return replace(view, live=replace(view.live or LiveBytes(), memory_stalled=share))


def gib(size: float | None) -> int | None:
    return None if size is None else int(size * GIB)


def gpu_node(name: str, labels: dict[str, str], device: float | None = None, count: int = 8) -> NodeView:
    live = LiveBytes(devices=(int(device * GIB),) * count) if device is not None else None
    return NodeView(name, labels, (), 64.0, 512 * GIB, 1000 * GIB, {GPU: count}, live=live)


def cluster(*nodes: NodeView, age: float | None = 4.0, **changes: Any) -> ClusterView:
    return replace(ClusterView(nodes, age, "", "Prometheus"), **changes)


def placed(view: ClusterView, changes: dict[str, Any] | None = None) -> Placement:
    found = place(job(changes), view)
    assert isinstance(found, Placement), found
    return found


def unplaceable(view: ClusterView, changes: dict[str, Any] | None = None) -> Unplaceable:
    found = place(job(changes), view)
    assert isinstance(found, Unplaceable), found
    return found


def weights(found: Placement) -> dict[str, int]:
    return {preference.node: preference.weight for preference in found.preferences}


# --- headroom ---------------------------------------------------------------------------------------------------------


def test_node_with_more_free_memory_is_preferred_and_figures_are_named() -> None:
    found = placed(cluster(node("node-a", host=3.2), node("node-b", host=12.1)))
    planned = format_bytes(found.pod.memory_bytes)
    assert found.preferences[0] == Preference("node-b", 100)
    assert found.reason == (
        f"node-b: 12.1 GiB of host memory free, node-a 3.20 GiB (planned {planned}); metrics 4 s old"
    )


IN_HOST_MEMORY = {"spec.memory.advanced.optimizer.placement": "Host"}


@pytest.mark.parametrize(("share", "fits"), [(0.2, True), (0.5, True), (0.9, False)])
def test_cpu_node_gives_the_host_most_of_its_memory_if_the_plan_needs_it(share: float, fits: bool) -> None:
    """benchmarks/placement.py: jobs ended as one that no node can carry, on nodes half of which were empty."""
    plan = placed(cluster(node("node-a")), IN_HOST_MEMORY).plan
    factor = share * 4 * plan.budget[Tier.HOST] / plan.bytes[Tier.HOST].predicted
    view = cluster(node("node-a"), corrections=Corrections(host=factor))
    found = place(job(IN_HOST_MEMORY), view)
    assert isinstance(found, Placement) is fits
    if isinstance(found, Placement):
        assert found.plan.bytes[Tier.HOST].total == pytest.approx(share * 4 * plan.budget[Tier.HOST], rel=0.01)
        assert found.pod.memory_bytes <= node("node-a").allocatable_memory_bytes


def test_a_device_budget_is_not_moved_to_the_host() -> None:
    named = {**IN_HOST_MEMORY, "spec.memory.budget.device": "10Gi"}
    plan = placed(cluster(node("node-a")), named).plan
    factor = 1.5 * plan.budget[Tier.HOST] / plan.bytes[Tier.HOST].predicted
    assert unplaceable(cluster(node("node-a"), corrections=Corrections(host=factor)), named).reason == "DoesNotFit"


def test_when_the_sides_swap_the_preference_swaps() -> None:
    one = placed(cluster(node("node-a", host=3.0), node("node-b", host=12.0)))
    other = placed(cluster(node("node-a", host=12.0), node("node-b", host=3.0)))
    assert [preference.node for preference in one.preferences] == ["node-b", "node-a"]
    assert [preference.node for preference in other.preferences] == ["node-a", "node-b"]


@pytest.mark.parametrize("host", [8.0, 8.1])
def test_equal_nodes_get_equal_weights(host: float) -> None:
    found = placed(cluster(node("node-a", host=8.0), node("node-b", host=host)))
    assert set(weights(found).values()) == {100}
    assert found.reason.startswith("no preference among 2 nodes")


def test_a_tenth_of_the_pod_is_a_difference() -> None:
    found = placed(cluster(node("node-a", host=4.0), node("node-b", host=4.2)))
    assert weights(found)["node-b"] == 100
    assert weights(found)["node-a"] <= headroom.WEIGHT_OF_OTHERS


def test_equal_nodes_get_equal_weights_also_behind_the_best() -> None:
    found = placed(cluster(node("node-a", host=4.0), node("node-b", host=4.05), node("node-c", host=12.0)))
    assert weights(found)["node-a"] == weights(found)["node-b"] < weights(found)["node-c"]


@pytest.mark.parametrize(("other", "same"), [(302.0, True), (320.0, False)])
def test_of_much_free_memory_a_fiftieth_is_noise(other: float, same: bool) -> None:
    large = {"allocatable_memory_bytes": 400 * GIB}
    found = placed(cluster(node("node-a", host=300.0, **large), node("node-b", host=other, **large)))
    assert (len(set(weights(found).values())) == 1) is same


def test_the_scarcest_tier_decides_not_the_sum() -> None:
    spilled = {"spec.memory.advanced.activations.policy": "Nvme"}
    found = placed(cluster(node("node-a", host=15.0, nvme=0.01), node("node-b", host=4.0, nvme=50.0)), spilled)
    assert found.preferences[0].node == "node-b"
    assert "of NVMe space free" in found.reason


def test_disk_does_not_matter_to_a_job_that_spills_nothing() -> None:
    found = placed(cluster(node("node-a", host=15.0, nvme=0.01), node("node-b", host=4.0, nvme=50.0)))
    assert found.preferences[0].node == "node-a"


def test_a_reservation_is_debited_and_said() -> None:
    view = cluster(node("node-a", host=8.0), node("node-b", host=9.0))
    taken = replace(view, reservations=(Reservation("node-b", 0, 5 * GIB, 0),))
    assert placed(view).preferences[0].node == "node-b"
    found = placed(taken)
    assert found.preferences[0].node == "node-a"
    assert "node-b 4.00 GiB after 5.00 GiB reserved" in found.reason


def test_headroom_is_what_is_left_of_the_preferred_node() -> None:
    view = cluster(node("node-a", host=8.0, nvme=20.0), reservations=(Reservation("node-a", 0, GIB, 2 * GIB),))
    found = placed(view).headroom
    assert found == {Tier.HOST: 7 * GIB, Tier.NVME: 18 * GIB}


def test_free_device_memory_counts_on_gpus() -> None:
    view = cluster(gpu_node("node-a", H100_LABELS, device=70.0), gpu_node("node-b", H100_LABELS, device=0.3))
    found = placed(view, CUDA)
    assert found.preferences[0].node == "node-a"
    assert "of device memory free" in found.reason
    assert found.headroom[Tier.DEVICE] == 70 * GIB


def test_a_node_without_series_counts_as_one_that_just_fits() -> None:
    roomy = placed(cluster(node("node-a"), node("node-b", host=12.0)))
    full = placed(cluster(node("node-a"), node("node-b", host=0.1)))
    assert roomy.preferences[0].node == "node-b"
    assert full.preferences[0].node == "node-a"
    assert "node-a unknown" in roomy.reason


def test_no_more_is_believed_free_than_a_node_has() -> None:
    lying = cluster(node("node-a", host=1000.0), node("node-b", host=15.9))
    assert set(weights(placed(lying)).values()) == {100}


@pytest.mark.parametrize(
    ("age", "problem", "said"),
    [
        (None, "Prometheus does not answer", "no metrics (Prometheus does not answer)"),
        (400.0, "Prometheus does not answer", "metrics 6m40s old, too old to be used (Prometheus does not answer)"),
    ],
)
def test_without_young_metrics_nothing_is_preferred_and_the_job_is_placed(
    age: float | None, problem: str, said: str
) -> None:
    view = cluster(node("node-a", host=3.0), node("node-b", host=12.0), age=age, metrics_problem=problem)
    found = placed(view)
    assert set(weights(found).values()) == {100}
    assert found.reason == f"no preference among 2 nodes; {said}"
    assert found.headroom == {}


def test_metrics_that_say_nothing_of_the_nodes_are_not_called_young() -> None:
    one = placed(cluster(node("node-a", host=None)))
    assert one.reason == "node-a is the only node of its class; no metrics of this node"
    two = placed(cluster(node("node-a", host=None), node("node-b", host=None)))
    assert two.reason == "no preference among 2 nodes; no metrics of these nodes"
    assert "metrics 4 s old" in placed(cluster(node("node-a", host=None), node("node-b", host=12.0))).reason


def test_stale_metrics_widen_margins_and_say_so() -> None:
    fresh = placed(cluster(node("node-a", host=4.0), node("node-b", host=4.2)))
    stale = placed(cluster(node("node-a", host=4.0), node("node-b", host=4.2), age=90.0))
    assert set(weights(fresh).values()) != {100}
    assert set(weights(stale).values()) == {100}
    assert "metrics 1m30s old, so the pod is counted as 15% larger and small differences are ignored" in stale.reason
    assert f"(planned {format_bytes(1.15 * stale.pod.memory_bytes)})" in stale.reason


def test_metrics_change_neither_plan_nor_class() -> None:
    without = placed(cluster(node("node-a"), node("node-b"), age=None))
    scarce = placed(cluster(node("node-a", host=0.01), node("node-b", host=0.02)))
    assert (scarce.plan, scarce.node) == (without.plan, without.node)


def test_many_equal_nodes_are_not_told_apart_by_their_names() -> None:
    found = placed(cluster(*(node(f"node-{number:03}", host=8.0) for number in range(40))))
    assert found.preferences == ()


def test_preferences_are_bounded_and_the_best_are_named() -> None:
    found = placed(cluster(*(node(f"node-{number:03}", host=2.0 + number) for number in range(14)), *(
        node(f"other-{number:03}", host=1.0 + number / 2) for number in range(14))))  # fmt: skip
    assert len(found.preferences) == headroom.MAX_PREFERENCES
    assert found.preferences[0].node == "node-013"


@settings(deadline=None)
@given(free=st.lists(st.integers(0, 16), min_size=1, max_size=20), age=st.floats(0.0, 250.0))
def test_weights_never_contradict_headroom(free: list[int], age: float) -> None:
    found = placed(cluster(*(node(f"n{number}", host=size) for number, size in enumerate(free)), age=age))
    known = dict(zip((f"n{number}" for number in range(len(free))), free, strict=True))
    listed = [known[preference.node] for preference in found.preferences]
    given_weights = [preference.weight for preference in found.preferences]
    assert listed == sorted(listed, reverse=True)
    assert given_weights == sorted(given_weights, reverse=True)
    assert all(1 <= weight <= 100 for weight in given_weights)
    assert not given_weights or given_weights[0] == 100


# --- stalled memory ---------------------------------------------------------------------------------------------------


def test_stalling_node_is_not_preferred_however_much_memory_is_free() -> None:
    found = placed(cluster(stalling(node("node-a", host=15.0), 0.12), node("node-b", host=3.0)))
    planned = format_bytes(found.pod.memory_bytes)
    assert found.preferences == (Preference("node-b", 100),)
    assert found.headroom[Tier.HOST] == 3 * GIB
    assert found.reason == (
        f"node-b: 3.00 GiB of host memory free, node-a 15.0 GiB (planned {planned}); "
        "not preferred because programs there wait for memory: node-a (12% of the time); metrics 4 s old"
    )


@pytest.mark.parametrize(("share", "age", "stalls"), [
    (0.05, 4.0, False), (0.051, 4.0, True), (0.0, 4.0, False), (1.0, 4.0, True),
    (0.09, 90.0, False), (0.11, 90.0, True), (1.0, 400.0, False),
])  # fmt: skip
def test_stall_counts_above_5_percent_or_10_if_stale_and_never_if_too_old(
    share: float, age: float, stalls: bool
) -> None:
    found = placed(cluster(stalling(node("node-a", host=8.0), share), node("node-b", host=8.0), age=age))
    assert set(weights(found)) == ({"node-b"} if stalls else {"node-a", "node-b"})
    assert ("programs there wait for memory: node-a" in found.reason) is stalls


def test_job_is_placed_without_preference_when_every_node_stalls() -> None:
    found = placed(cluster(*(stalling(node(f"node-{name}", host=8.0), 0.5) for name in "abcde")))
    assert found.preferences == ()
    assert "no preference among 5 nodes" in found.reason
    named = "node-a (50% of the time), node-b (50% of the time), node-c (50% of the time) and 2 more"
    assert f"not preferred because programs there wait for memory: {named}" in found.reason
    alone = placed(cluster(stalling(node("node-a", host=8.0), 0.5)))
    assert alone.preferences == ()


def test_a_stall_is_said_where_nothing_else_is_known() -> None:
    found = placed(cluster(stalling(node("node-a"), 0.5), node("node-b")))
    assert found.preferences == (Preference("node-b", 100),)
    assert found.reason == (
        "node-b is preferred to node-a; not preferred because programs there wait for memory: "
        "node-a (50% of the time); metrics 4 s old"
    )


def test_stall_changes_neither_plan_class_nor_pod_and_requires_no_node() -> None:
    calm = (gpu_node("node-a", H100_LABELS, device=70.0), gpu_node("node-b", H100_LABELS, device=70.0))
    without = placed(cluster(*calm), CUDA)
    found = placed(cluster(*(stalling(view, 1.0) for view in calm)), CUDA)
    assert found.required_labels == without.required_labels == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert (found.plan, found.node, found.pod) == (without.plan, without.node, without.pod)


@settings(deadline=None, max_examples=examples(50))
@given(
    nodes=st.lists(st.tuples(st.integers(0, 16), st.floats(0.0, 1.0)), min_size=1, max_size=8),
    age=st.floats(0.0, 250.0),
)
def test_calm_nodes_are_preferred_as_if_stalling_ones_did_not_exist(nodes: list[tuple[int, float]], age: float) -> None:
    views = [stalling(node(f"n{number}", host=free), share) for number, (free, share) in enumerate(nodes)]
    most = headroom.MOST_STALLED * (headroom.STALE_PATIENCE if age > headroom.FRESH_SECONDS else 1.0)
    calm = [view for view, (_, share) in zip(views, nodes, strict=True) if share <= most]
    found = placed(cluster(*views, age=age))
    assert found.preferences == (placed(cluster(*calm, age=age)).preferences if calm else ())
    assert found.pod == placed(cluster(node("n0"), age=None)).pod


# --- classes ----------------------------------------------------------------------------------------------------------


def test_nodes_that_differ_by_a_few_mebibytes_are_one_class() -> None:
    found = placed(cluster(node("node-a"), node("node-b", allocatable_memory_bytes=16 * GIB - 7 * MIB)))
    assert set(weights(found)) == {"node-a", "node-b"}


def test_a_gpu_is_planned_for_by_its_product() -> None:
    found = placed(cluster(gpu_node("node-a", A100_LABELS)), CUDA)
    assert found.node.name == "8x-a100-40"
    assert found.required_labels == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}
    assert found.plan.device == "Cuda"


def test_the_faster_class_wins() -> None:
    found = placed(cluster(gpu_node("node-a", A100_LABELS), gpu_node("node-h", H100_LABELS)), CUDA)
    assert found.node.name == "8x-h100-80"
    assert [preference.node for preference in found.preferences] == ["node-h"]


def holding(node_class: str, devices: int, seconds_left: float | None, *nodes: str) -> HeldDevices:
    return HeldDevices(node_class, nodes, GPU, devices, seconds_left)


TWO_CLASSES = cluster(gpu_node("node-a", A100_LABELS), gpu_node("node-h", H100_LABELS))
"""of 8 devices each"""


def test_a_job_does_not_wait_for_the_faster_class_longer_than_that_saves() -> None:
    free, slower = placed(TWO_CLASSES, CUDA), placed(cluster(gpu_node("node-a", A100_LABELS)), CUDA)
    steps = job(CUDA).spec.training.steps
    saved = steps * (slower.plan.prediction.step_seconds - free.plan.prediction.step_seconds)
    for seconds_left, expected in ((0.9 * saved, "8x-h100-80"), (1.2 * saved, "8x-a100-40")):
        found = placed(replace(TWO_CLASSES, held=(holding("8x-h100-80", 8, seconds_left, "node-h"),)), CUDA)
        assert found.node.name == expected
    ratio = slower.plan.prediction.step_seconds / free.plan.prediction.step_seconds
    assert found.reason.startswith(f"8x-h100-80 would be {ratio:.2g} times as fast, but other pods use it for ")
    assert not free.reason.startswith("8x")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ((holding("8x-h100-80", 7, 1e9),), "8x-h100-80"),
        ((holding("8x-h100-80", 7, 1e9), holding("8x-h100-80", 1, 1e-6)), "8x-h100-80"),
        ((holding("8x-h100-80", 7, 1e9), holding("8x-h100-80", 1, 1e8)), "8x-a100-40"),
        ((holding("8x-h100-80", 8, None),), "8x-a100-40"),
        ((holding("8x-h100-80", 8, None), holding("8x-a100-40", 8, 1e9)), "8x-a100-40"),
        ((holding("8x-h100-80", 8, None), holding("8x-a100-40", 8, None)), "8x-h100-80"),
        ((holding("8x-h100-80", 8, 1e9, "another-node"),), "8x-h100-80"),
        ((replace(holding("8x-h100-80", 8, 1e9), resource_name="example.com/gpu"),), "8x-h100-80"),
    ],
    ids=["one is free", "one ends soon", "none ends soon", "nobody knows when", "nobody knows when, known elsewhere",
         "nobody knows anything", "elsewhere", "another resource"],
)  # fmt: skip
def test_a_job_waits_until_as_many_devices_are_free_as_it_takes(held: tuple[HeldDevices, ...], expected: str) -> None:
    assert placed(replace(TWO_CLASSES, held=held), CUDA).node.name == expected


def test_a_gang_waits_for_the_devices_of_all_of_its_pods() -> None:
    two = {
        **CUDA,
        "spec.parallelism.nodes": 2,
        "spec.parallelism.devicesPerNode": 2,
        "spec.training.globalBatchSize": 16,
    }
    for devices, expected in ((4, "8x-h100-80"), (5, "8x-a100-40")):
        view = replace(TWO_CLASSES, held=(holding("8x-h100-80", devices, 1e9),))
        assert placed(view, two).node.name == expected


def test_what_is_held_changes_nothing_where_there_is_one_class() -> None:
    alone = cluster(gpu_node("node-h", H100_LABELS))
    assert placed(replace(alone, held=(holding("8x-h100-80", 8, None),)), CUDA) == placed(alone, CUDA)


@settings(deadline=None, max_examples=examples(60))
@given(waits=st.tuples(*[st.none() | st.floats(0.0, 1e7)] * 2))
def test_class_with_a_longer_wait_and_slower_training_is_never_chosen(waits: tuple[float | None, ...]) -> None:
    names = ("8x-h100-80", "8x-a100-40")
    held = tuple(holding(name, 8, wait) for name, wait in zip(names, waits, strict=True))
    found = placed(replace(TWO_CLASSES, held=held), CUDA)
    known = [float("inf") if wait is None else wait for wait in waits]
    if known[0] <= known[1]:
        assert found.node.name == names[0]


def test_plan_of_the_chosen_class_is_explained_as_if_it_were_the_only_one() -> None:
    alone = placed(cluster(gpu_node("node-h", H100_LABELS)), CUDA).plan
    among_others = placed(cluster(gpu_node("node-a", A100_LABELS), gpu_node("node-h", H100_LABELS)), CUDA).plan
    assert among_others == alone
    assert among_others.alternatives


def test_class_that_fits_all_pods_beats_a_faster_one_that_does_not() -> None:
    view = cluster(
        gpu_node("node-h", H100_LABELS, count=1), gpu_node("a-1", A100_LABELS, count=1),
        gpu_node("a-2", A100_LABELS, count=1),
    )  # fmt: skip
    two = {**CUDA, "spec.parallelism.nodes": 2}
    assert placed(view, CUDA).node.name == "1x-h100-80"
    assert placed(view, two).node.name == "1x-a100-40"


def test_a_class_too_small_for_all_pods_is_taken_when_there_is_no_other() -> None:
    found = placed(cluster(gpu_node("node-h", H100_LABELS, count=1)), {**CUDA, "spec.parallelism.nodes": 2})
    assert found.node.name == "1x-h100-80"


def test_an_unknown_gpu_is_planned_for_as_the_smallest_of_the_catalog() -> None:
    found = placed(cluster(gpu_node("node-x", {})), CUDA)
    assert (found.node.name, found.required_labels) == ("8x-rtx-4090", {})


def test_unknown_product_is_planned_with_the_memory_its_driver_reports() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-Z900", "nvidia.com/gpu.memory": "97000"}
    found = placed(cluster(gpu_node("node-x", labels)), CUDA)
    assert found.node.name == "8x-h100-80"
    assert found.node.device_bytes == 97000 * MIB - 2 * GIB


MIXED = cluster(node("node-a"), gpu_node("node-h", H100_LABELS))
NO_GPU_FITS = {"spec.scheduling.nodeSelector": {"pool": "cpu"}}


@pytest.mark.parametrize(
    ("view", "changes", "device", "why"),
    [
        (MIXED, {}, "Cuda", "device: Cuda, nodes have nvidia.com/gpu"),
        (cluster(node("node-a")), {}, "Cpu", "device: Cpu, no node has nvidia.com/gpu"),
        (MIXED, {"spec.pod.resourceName": "example.com/gpu"}, "Cpu", "device: Cpu, no node has example.com/gpu"),
        (cluster(node("node-a", labels={"pool": "cpu"}), gpu_node("node-h", H100_LABELS)), NO_GPU_FITS, "Cpu",
         "device: Cpu, Cuda is not possible: none of 2 nodes can run a pod of this job; the closest one: node-a has 0 "
         "nvidia.com/gpu, a pod needs 1"),
        (ClusterView(), {}, "Cpu", "device: Cpu, the operator has no permission to list nodes"),
        (replace(MIXED, device="Cpu"), {}, "Cpu", "device: Cpu, as in earlier attempts"),
    ],
    ids=["a node has one", "no node has one", "of another resource", "none for this job", "no view", "as before"],
)  # fmt: skip
def test_auto_takes_a_gpu_where_one_is_and_says_why(
    view: ClusterView, changes: dict[str, Any], device: str, why: str
) -> None:
    found = placed(view, changes)
    assert found.plan.device == device
    assert found.plan.reasons[0] == why
    assert found.pod.devices == (1 if device == "Cuda" else 0)


def test_a_job_that_names_its_device_is_told_nothing_of_a_choice() -> None:
    assert not any("device:" in reason for reason in placed(MIXED, CUDA).plan.reasons)


def test_attempts_on_gpus_are_followed_by_none_on_cpus() -> None:
    found = unplaceable(replace(cluster(node("node-a")), device="Cuda"))
    assert found.message.endswith("node-a has 0 nvidia.com/gpu, a pod needs 1")


def test_auto_takes_the_cpu_where_the_model_does_not_fit_the_gpus() -> None:
    view = cluster(node("node-a"), gpu_node("node-g", {"nvidia.com/gpu.memory": "100"}))
    found = placed(view)
    assert found.plan.device == "Cpu"
    assert found.plan.reasons[0].startswith("device: Cpu, Cuda is not possible: tiny does not fit node class 8x-")
    both = unplaceable(view, {"spec.memory.budget.device": "1Mi", "spec.memory.budget.host": "0"})
    assert "node class 8x-" in both.message


def test_a_profile_goes_before_the_catalog() -> None:
    slow = NodeProfileSpec.model_validate({"deviceKind": "Cpu", "bfloat16FlopsPerSecond": "1e9"})
    view = cluster(profiled(node("node-a"), slow), node("node-b"))
    found = placed(view)
    assert [preference.node for preference in found.preferences] == ["node-b"]
    only = placed(cluster(profiled(node("node-a"), slow)))
    assert only.node.bfloat16_flops_per_second == 1e9
    assert only.node.name == "cpu-8-cores-measured"


def test_nodes_measured_alike_are_one_class() -> None:
    profiles = [
        NodeProfileSpec.model_validate({"deviceKind": "Cpu", "dramBytesPerSecond": rate}) for rate in ("50.1e9", "50e9")
    ]
    view = cluster(*(profiled(node(f"node-{number}"), profile) for number, profile in enumerate(profiles)))
    assert set(weights(placed(view))) == {"node-0", "node-1"}


def test_a_profile_of_another_kind_of_device_is_left_aside() -> None:
    gpus = NodeProfileSpec.model_validate({"deviceKind": "Cuda", "deviceMemory": "10Gi"})
    assert placed(cluster(profiled(node("node-a"), gpus))).node.name == "cpu-8-cores"


def test_a_profile_bounds_the_memory_that_is_planned_for() -> None:
    small = NodeProfileSpec.model_validate({"deviceKind": "Cpu", "hostMemory": "2Gi"})
    found = placed(cluster(profiled(node("node-a"), small)))
    assert found.node.host_bytes < 2 * GIB


def test_one_wrong_profile_does_not_keep_a_job_from_the_other_nodes() -> None:
    wrong = NodeProfileSpec.model_validate({"deviceKind": "Cuda", "numDevices": 1})
    bad = profiled(gpu_node("node-bad", A100_LABELS), wrong)
    two_devices = CUDA | {"spec.parallelism.devicesPerNode": 2}
    found = placed(cluster(gpu_node("node-good", H100_LABELS), bad), two_devices)
    assert [preference.node for preference in found.preferences] == ["node-good"]
    alone = unplaceable(cluster(bad), two_devices)
    assert alone.reason == "NoNode"
    assert "node-bad" in alone.message


def test_a_class_that_cannot_be_planned_for_is_left_aside_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("spillway.placement.place.known_plan", fails)
    found = unplaceable(cluster(node("node-a")))
    assert found.reason == "NoNode"
    assert "node-a" in found.message and "ZeroDivisionError" in found.message


def test_devices_are_those_of_the_resource_that_the_job_asks_for() -> None:
    plain = gpu_node("node-h", H100_LABELS)
    shared = replace(plain, allocatable_devices={GPU: 8, "devices.kubevirt.io/kvm": 1000})
    assert placed(cluster(shared), CUDA).plan == placed(cluster(plain), CUDA).plan
    assert placed(cluster(shared), CUDA).node.num_devices == 8


@pytest.mark.parametrize("rate", ["1e-300", "999", "1e300"])
def test_a_rate_that_no_hardware_has_is_rejected(rate: str) -> None:
    with pytest.raises(ValueError, match="float32FlopsPerSecond"):
        NodeProfileSpec.model_validate({"deviceKind": "Cpu", "float32FlopsPerSecond": rate})


@pytest.mark.parametrize("rate", ["1e3", "1e24"])
def test_with_any_rate_that_is_allowed_a_plan_is_made(rate: str) -> None:
    rates = ("float32FlopsPerSecond", "bfloat16FlopsPerSecond", "cpuBytesPerSecond", "dramBytesPerSecond")
    profile = NodeProfileSpec.model_validate({"deviceKind": "Cpu", **dict.fromkeys(rates, rate)})
    found = placed(cluster(profiled(node("node-a"), profile)))
    assert 30 < found.pod.grace_seconds <= LONGEST_GRACE_SECONDS


def test_the_same_view_gives_the_same_placement() -> None:
    view = cluster(node("b", host=4.0), node("a", host=4.0), gpu_node("c", H100_LABELS))
    assert placed(view) == placed(replace(view, nodes=tuple(reversed(view.nodes or ()))))


# --- pods that the plan's node can carry ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(50))
@given(
    memory=st.integers(GIB, 64 * GIB), disk=st.integers(GIB, 200 * GIB), cores=st.integers(1, 64),
    ranks=st.sampled_from([1, 2, 4]), policy=st.sampled_from(["Auto", "Host", "Nvme"]),
)  # fmt: skip
def test_a_pod_of_the_plan_fits_its_node(memory: int, disk: int, cores: int, ranks: int, policy: str) -> None:
    changes = {
        "spec.training.globalBatchSize": 64, "spec.parallelism.devicesPerNode": ranks,
        "spec.memory.advanced.activations.policy": policy, "spec.model.config.hiddenSize": 1024,
    }  # fmt: skip
    asked = job(changes)
    view = node("node-a", allocatable_memory_bytes=memory, allocatable_ephemeral_bytes=disk, allocatable_cores=cores)
    found = place(asked, cluster(view))
    if isinstance(found, Placement):
        pod = pod_resources(asked.spec, found.plan, ranks)
        assert pod.memory_bytes <= memory
        assert pod.ephemeral_storage_bytes <= disk
        assert pod.cpu_cores <= cores


def test_device_and_host_tier_of_a_cpu_node_share_its_memory() -> None:
    found = placed(cluster(node("node-a")), {"spec.memory.advanced.optimizer.placement": "Host"})
    assert found.plan.budget[Tier.DEVICE] + found.plan.budget[Tier.HOST] < 16 * GIB


def test_the_device_budget_ends_where_the_pods_limit_does() -> None:
    found = placed(cluster(node("node-a")))
    planned = found.plan.bytes[Tier.DEVICE].total
    assert planned < found.plan.budget[Tier.DEVICE] <= planned * 1.05


def test_the_users_budget_stays_where_it_is_smaller() -> None:
    found = placed(cluster(node("node-a")), {"spec.memory.budget.device": "100Mi"})
    assert found.plan.budget[Tier.DEVICE] <= 100 * MIB


@pytest.mark.parametrize("device", ["Cpu", "Cuda"])
def test_several_ranks_get_ddp_where_it_fits(device: str) -> None:
    view = cluster(node("node-a"), gpu_node("node-b", H100_LABELS))
    found = placed(view, {"spec.parallelism": {"nodes": 2, "device": device}})
    assert found.plan.strategy == "Ddp"
    assert "strategy Ddp: it fits" in found.plan.reasons


def test_spill_on_a_storage_class_is_not_bounded_by_the_nodes_disk() -> None:
    claimed = {
        "spec.spill.storageClassName": "fast", "spec.memory.advanced.activations.policy": "Nvme",
        "spec.memory.budget.nvme": "200Gi", "spec.checkpoint.claim": "checkpoints",
    }  # fmt: skip
    found = placed(cluster(node("node-a", allocatable_ephemeral_bytes=GIB)), claimed)
    assert found.plan.budget[Tier.NVME] >= 190 * GIB


# --- nodes that cannot ------------------------------------------------------------------------------------------------


def test_unready_and_cordoned_nodes_are_avoided_while_another_will_do() -> None:
    view = cluster(node("node-a", host=15.0, ready=False), node("node-b", host=2.0), node("node-c", unschedulable=True))
    assert set(weights(placed(view))) == {"node-b"}


def test_job_waits_for_an_unready_node_when_no_other_could_carry_it() -> None:
    taint = Taint("node.kubernetes.io/not-ready", "", "NoSchedule")
    found = placed(cluster(node("node-a", ready=False, taints=(taint,))))
    assert found.reason.startswith("waiting for a node, because none of the 1 that can run the job is ready")


def test_a_cluster_without_nodes_carries_nothing() -> None:
    found = unplaceable(cluster())
    assert (found.reason, found.message) == ("NoNode", "the cluster has no nodes")


@pytest.mark.parametrize(
    ("view", "changes", "words"),
    [
        (node("node-a"), {"spec.scheduling.nodeSelector": {"disk": "nvme"}}, "node-a has no label disk, but spec.sch"),
        (
            node("node-a", taints=(Taint("team", "b", "NoSchedule"),)),
            {},
            "node-a has the taint team=b:NoSchedule, which spec.scheduling.tolerations does not tolerate",
        ),
        (gpu_node("node-a", H100_LABELS, count=2), {**CUDA, "spec.parallelism.devicesPerNode": 4,
         "spec.training.globalBatchSize": 16}, "node-a has 2 nvidia.com/gpu, a pod needs 4"),
        (node("node-a", allocatable_memory_bytes=GIB), {}, "node-a has 1.00 GiB of memory for pods, a pod needs 1.19"),
        (node("node-a", allocatable_ephemeral_bytes=MIB), {}, "node-a has 1.00 MiB of ephemeral storage, a pod needs"),
    ],
)  # fmt: skip
def test_what_keeps_every_node_away_is_said_with_its_figures(
    view: NodeView, changes: dict[str, Any], words: str
) -> None:
    found = unplaceable(cluster(view), changes)
    assert found.reason == "NoNode"
    assert words in found.message


def test_the_nearest_miss_is_named() -> None:
    far = node("node-a", taints=(Taint("team", "b", "NoSchedule"),))
    near = node("node-b", allocatable_memory_bytes=GIB)
    assert "the closest one: node-b" in unplaceable(cluster(far, near)).message


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "team", "operator": "Exists"},
        {"key": "team", "value": "b"},
        {"key": "team", "value": "b", "effect": "NoSchedule"},
    ],
)
def test_a_tolerated_taint_keeps_nothing_away(toleration: dict[str, str]) -> None:
    view = cluster(node("node-a", taints=(Taint("team", "b", "NoSchedule"),)))
    placed(view, {"spec.scheduling.tolerations": [toleration]})


@pytest.mark.parametrize(
    "toleration",
    [{"key": "team"}, {"key": "other", "operator": "Exists"}, {"key": "team", "value": "b", "effect": "NoExecute"}],
)
def test_a_toleration_of_something_else_does_not_help(toleration: dict[str, str]) -> None:
    view = cluster(node("node-a", taints=(Taint("team", "b", "NoSchedule"),)))
    unplaceable(view, {"spec.scheduling.tolerations": [toleration]})


def test_a_taint_that_only_asks_is_no_obstacle() -> None:
    placed(cluster(node("node-a", taints=(Taint("team", "b", "PreferNoSchedule"),))))


def test_unplaceable_model_error_says_what_is_missing_and_what_would_fit() -> None:
    large = {"spec.model.config.hiddenSize": 16384, "spec.checkpoint.claim": "checkpoints"}
    found = unplaceable(cluster(node("node-a", allocatable_memory_bytes=2 * GIB)), large)
    assert found.reason == "DoesNotFit"
    assert "tiny does not fit node class cpu-8-cores: " in found.message
    assert "what would fit: " in found.message
    assert found.infeasible is not None


def test_an_unplanned_pod_that_no_node_could_hold_is_not_placed() -> None:
    disabled = {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "64Gi"}
    found = unplaceable(cluster(node("node-a")), disabled)
    assert found.reason == "NoNode"
    assert "needs 64.8 GiB of memory" in found.message
    assert "the largest node, node-a, has 16.0 GiB" in found.message


# --- what was observed before ---------------------------------------------------------------------------------------


def test_memory_profile_of_the_same_plan_is_shown_but_changes_no_byte() -> None:
    without = placed(cluster(node("node-a")))
    key = memory_fingerprint(job().spec, without.plan)
    found = placed(cluster(node("node-a"), observed_peaks={key: {"device": 5 * MIB}, "another": {"device": 7 * MIB}}))
    assert (without.observed, found.plan, found.pod) == (None, without.plan, without.pod)
    assert found.observed is not None
    assert found.observed.message.startswith("observed peaks: device 5.00 MiB of ")
    assert found.observed.profile.endswith(key)


# --- without a view of the nodes --------------------------------------------------------------------------------------


def test_without_a_view_of_nodes_the_catalog_is_planned_for() -> None:
    found = placed(ClusterView())
    assert found.preferences == ()
    assert found.node.name == "cpu"
    assert found.reason == "planned for the catalog's cpu: the operator has no permission to list nodes (NoNodeView)"


def test_without_a_view_the_selected_or_else_the_smallest_gpu_is_planned() -> None:
    selected = {**CUDA, "spec.scheduling.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
    assert placed(ClusterView(), selected).node.name == "1x-h100-80"
    assert placed(ClusterView(), CUDA).node.name == "1x-rtx-4090"


def test_without_a_view_a_model_too_large_for_the_catalog_is_rejected() -> None:
    found = unplaceable(ClusterView(), {"spec.model.config.hiddenSize": 65536})
    assert found.reason == "DoesNotFit"
    assert "node class cpu of the catalog" in found.message


def test_the_catalogs_cpu_node_is_planned_for_with_all_its_memory() -> None:
    catalog = resolve_node("cpu")
    assert placed(ClusterView()).node.device_bytes == catalog.device_bytes + catalog.host_bytes


# --- what profiles of the model say -----------------------------------------------------------------------------------


def test_corrections_from_profiles_apply_only_to_jobs_of_that_model() -> None:
    known = {model_fingerprint(job().spec, "Cpu"): Corrections(device=1.5, pod=1.2, reasons=("seen before",))}
    nodes = (node("node-a"),)
    plain, corrected = placed(cluster(*nodes)), placed(cluster(*nodes, model_corrections=known))
    device = corrected.plan.bytes[Tier.DEVICE]
    assert device.predicted == plain.plan.bytes[Tier.DEVICE].predicted
    assert device.total == pytest.approx(1.5 * device.predicted, abs=1)
    assert corrected.plan.reasons[-1] == "seen before"
    assert corrected.plan.unplanned_bytes == pytest.approx(0.2 * corrected.pod.memory_bytes / 1.2, rel=0.01)
    another = {"spec.model.config.numLayers": 3}
    assert placed(cluster(*nodes, model_corrections=known), another) == placed(cluster(*nodes), another)


def test_modes_without_a_planner_get_no_other_pod_from_profiles() -> None:
    for changes in ({"spec.memory.mode": "Advise"}, {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "1Gi"}):
        known = {model_fingerprint(job(changes).spec, "Cpu"): Corrections(device=1.5, pod=1.5)}
        found = placed(cluster(node("node-a"), model_corrections=known), changes)
        plain = placed(cluster(node("node-a")), changes)
        assert (found.pod, found.plan.bytes) == (plain.pod, plain.plan.bytes)
