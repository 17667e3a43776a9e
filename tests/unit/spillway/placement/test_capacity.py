"""What is free decides: other pods, whole nodes, parts of GPUs, volumes, nodes with faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cases.job_documents import job
from spillway.placement.able_nodes import base_node, gpu_part, pod_tolerations
from spillway.placement.cluster_view import ClusterView, LiveBytes, NodeView, Requests, Reservation, Taint
from spillway.placement.place import Placement, Unplaceable, place
from spillway.planning.hardware import resolve_node
from spillway.units import GIB, MIB

GPU = "nvidia.com/gpu"
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40441"}
CUDA: dict[str, Any] = {"spec.parallelism.device": "Cuda"}


def gpu_node(name: str, labels: dict[str, str] = H100, taken: int = 0, **changes: Any) -> NodeView:
    """A node of 8 GPUs of which pods of others request `taken`."""
    view = NodeView(name, labels, (), 64.0, 512 * GIB, 1000 * GIB, {GPU: 8}, others=Requests(devices={GPU: taken}))
    return replace(view, **changes)


def cpu_node(name: str, **changes: Any) -> NodeView:
    return replace(NodeView(name, {}, (), 8.0, 16 * GIB, 100 * GIB, {}, others=Requests()), **changes)


def placed(*nodes: NodeView, changes: dict[str, Any] | None = None, **cluster: Any) -> Placement:
    found = place(job(CUDA if changes is None else changes), ClusterView(nodes, **cluster))
    assert isinstance(found, Placement), found
    return found


def order(found: Placement) -> list[str]:
    return [preference.node for preference in found.preferences]


# --- classes ----------------------------------------------------------------------------------------------------------


def test_job_takes_the_slower_class_if_pods_of_others_hold_the_faster_one() -> None:
    free, held = placed(gpu_node("h"), gpu_node("a", A100)), placed(gpu_node("h", taken=8), gpu_node("a", A100))
    assert (free.node.name, held.node.name) == ("8x-h100-80", "8x-a100-40")
    assert "times as fast, but other pods use it for an unknown time; " in held.reason


def test_faster_class_is_chosen_if_every_class_is_held() -> None:
    assert placed(gpu_node("h", taken=8), gpu_node("a", A100, taken=8)).node.name == "8x-h100-80"


def test_a_pod_takes_its_devices_share_of_a_gpu_node_unless_budgets_name_more() -> None:
    def budget(**names: str) -> tuple[int, int]:
        changes = {**CUDA, **{f"spec.memory.budget.{name}": size for name, size in names.items()}}
        found = placed(gpu_node("a"), changes=changes).plan.budget
        return found["host"] // GIB, found["nvme"] // GIB

    host, nvme = budget()
    assert 50 < host < 64 and 100 < nvme < 125, "an eighth, without what the pod's processes take"
    assert budget(host="200Gi", nvme="500Gi") == (200, 500)


def test_eight_pods_of_one_device_fit_the_node_that_they_are_planned_for() -> None:
    tight = gpu_node("a", allocatable_memory_bytes=64 * GIB)
    found = placed(tight, changes={**CUDA, "spec.memory.advanced.optimizer.placement": "Host"})
    assert 8 * found.pod.memory_bytes <= tight.allocatable_memory_bytes
    assert 8 * found.pod.ephemeral_storage_bytes <= tight.allocatable_ephemeral_bytes


def test_a_pod_of_given_memory_holds_its_plan_and_needs_a_node_that_has_as_much() -> None:
    found = placed(gpu_node("a"), changes={**CUDA, "spec.pod.resources.memory": "20Gi"})
    assert found.pod.memory_bytes == 20 * GIB
    assert 10 * GIB < found.node.host_bytes < 20 * GIB, "what the pod's processes leave"
    more = place(job({**CUDA, "spec.pod.resources.memory": "2Ti"}), ClusterView((gpu_node("a"),)))
    assert isinstance(more, Unplaceable) and "spec.pod.resources.memory requests 2.00 TiB" in more.message


def test_extended_resources_choose_the_nodes_that_have_them() -> None:
    rdma = replace(gpu_node("b"), allocatable_devices={"nvidia.com/gpu": 8, "rdma/hca": 3})
    changes = {**CUDA, "spec.pod.resources.extended": {"rdma/hca": 2}}
    assert order(placed(gpu_node("a"), rdma, changes=changes))[:1] in ([], ["b"])
    none = place(job(changes), ClusterView((gpu_node("a"),)))
    assert isinstance(none, Unplaceable) and "a has 0 rdma/hca, a pod needs 2" in none.message
    assert pod_tolerations(job(changes).spec, "Cuda")[-1].key == "rdma/hca"


def test_what_is_free_now_is_planned_for_on_request() -> None:
    full = cpu_node("a", others=Requests(memory_bytes=14 * GIB))
    whole, rest = placed(full, changes={}), placed(full, changes={}, as_free=True)
    assert rest.node.host_bytes < whole.node.host_bytes / 4
    assert rest.pod.memory_bytes <= 2 * GIB
    nothing = place(job(), ClusterView((cpu_node("a", others=Requests(cores=8.0)),), as_free=True))
    assert isinstance(nothing, Unplaceable)


# --- preferences ------------------------------------------------------------------------------------------------------


def test_partly_used_nodes_are_filled_before_whole_ones() -> None:
    found = placed(gpu_node("a"), gpu_node("b", taken=5), gpu_node("c", taken=8), gpu_node("d", taken=2))
    assert order(found) == ["b", "d", "a", "c"]
    assert found.preferences[0].weight == 100 > 2 * found.preferences[1].weight - 1
    assert found.reason.startswith(
        "b: 3 of 8 nvidia.com/gpu free (a pod requests 1), d: 6; emptier nodes are kept for larger pods"
    )


def test_a_pod_of_eight_devices_goes_to_a_whole_node() -> None:
    changes = {**CUDA, "spec.parallelism.devicesPerNode": 8, "spec.training.globalBatchSize": 64}
    assert order(placed(gpu_node("a", taken=1), gpu_node("b"), changes=changes))[0] == "b"


def test_placed_attempts_count_on_their_node_until_their_pods_are_listed() -> None:
    nodes = gpu_node("a"), gpu_node("b"), gpu_node("c")
    assert order(placed(*nodes, reservations=(Reservation("b", 0, 0, 0, devices=1),)))[0] == "b"
    assert order(placed(*nodes, reservations=(Reservation("b", 0, 0, 0, devices=8),)))[0] == "a"
    ours = replace(nodes[2], ours=Requests(devices={GPU: 3}))
    assert order(placed(nodes[0], ours))[0] == "c"


def test_200_jobs_of_one_device_fill_25_nodes_of_100() -> None:
    """Each takes the node of most weight that has room, as the scheduler does; nothing is listed meanwhile."""
    nodes = [gpu_node(f"node-{number:03d}") for number in range(100)]
    reservations: list[Reservation] = []
    for number in range(200):
        best = place(job(CUDA), ClusterView(tuple(nodes), reservations=tuple(reservations)))
        assert isinstance(best, Placement)
        reservations.append(Reservation(best.preferences[0].node, 0, 0, 0, devices=1, owner=str(number)))
    assert len({one.node for one in reservations}) == 25


def test_memory_of_busy_devices_says_nothing_of_the_free_one() -> None:
    """A node with 7 busy devices and a free one once counted as full."""
    busy = gpu_node("busy", taken=7, live=LiveBytes(devices=(MIB,) * 7 + (70 * GIB,)))
    empty = gpu_node("empty", live=LiveBytes(devices=(70 * GIB,) * 8))
    lost = gpu_node("lost", taken=6, live=LiveBytes(devices=(MIB,) * 7 + (70 * GIB,)))
    found = placed(busy, empty, lost, metrics_age_seconds=1.0)
    assert order(found) == ["busy", "empty", "lost"], "of the last, a device that no pod requests is in use"


def test_nodes_are_told_apart_by_headroom_if_requests_are_unknown() -> None:
    full = gpu_node("a", others=None, live=LiveBytes(devices=(MIB,) * 8))
    free = gpu_node("b", others=None, live=LiveBytes(devices=(70 * GIB,) * 8))
    assert order(placed(full, free, metrics_age_seconds=1.0))[0] == "b"


# --- parts of a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "labels", "name", "memory"),
    [
        (GPU, H100, "", 81559 * MIB),
        ("nvidia.com/mig-1g.5gb", A100 | {"nvidia.com/mig-1g.5gb.memory": "4864"}, "mig-1g.5gb", 4864 * MIB),
        ("nvidia.com/mig-3g.40gb", H100, "mig-3g.40gb", 38 * GIB),
        (GPU, {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-2g.10gb", "nvidia.com/gpu.memory": "9856"},
         "mig-2g.10gb", 9856 * MIB),
        (GPU, H100 | {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"},
         "1-of-4", 81559 * MIB // 4),
        (GPU, H100 | {"nvidia.com/gpu.replicas": "1"}, "", 81559 * MIB),
    ],
)  # fmt: skip
def test_part_of_a_gpu_has_its_own_memory(resource: str, labels: dict[str, str], name: str, memory: int) -> None:
    part = gpu_part(labels, resource)
    assert (part.name, part.memory_bytes) == (name, memory)
    node = base_node(replace(gpu_node("a", labels), allocatable_devices={resource: 7}), "Cuda", resource)
    whole = base_node(gpu_node("a", H100 if "H100" in labels["nvidia.com/gpu.product"] else A100), "Cuda", GPU)
    assert memory - 6 * GIB < node.device_bytes < memory
    assert (node.bfloat16_flops_per_second < whole.bfloat16_flops_per_second) is bool(name)
    assert node.name.endswith(name)


def test_several_ranks_get_no_parts_of_a_gpu() -> None:
    shared = gpu_node("a", H100 | {"nvidia.com/gpu.replicas": "4"})
    found = place(job({**CUDA, "spec.parallelism.devicesPerNode": 2}), ClusterView((shared,)))
    assert isinstance(found, Unplaceable)
    assert "a offers only parts of GPUs (1-of-4), but a pod with 2 devices needs whole GPUs" in found.message


def test_pods_with_devices_tolerate_the_taint_of_nodes_kept_for_them() -> None:
    kept = (Taint(GPU, "present", "NoSchedule"),)
    assert placed(gpu_node("a", taints=kept)).node.device_kind == "Cuda"
    assert isinstance(place(job(), ClusterView((cpu_node("a", taints=kept),))), Unplaceable)


# --- volumes ----------------------------------------------------------------------------------------------------------

VOLUME = {
    "spec.spill.storageClassName": "local-nvme",
    "spec.memory.advanced.activations.policy": "Nvme",
    "spec.memory.budget.nvme": "50Gi",
}


def test_spill_volume_is_bounded_by_what_its_driver_can_make() -> None:
    for volumes, budget in (({}, 50 * GIB), ({"local-nvme": 20 * GIB}, 20 * GIB), ({"other": GIB}, 50 * GIB)):
        found = placed(cpu_node("a", volumes=volumes), changes=VOLUME).plan.budget["nvme"]
        assert 0.9 * budget < found <= budget, volumes


def test_without_a_budget_a_volume_is_as_large_as_its_driver_says() -> None:
    unbounded = {name: value for name, value in VOLUME.items() if name != "spec.memory.budget.nvme"}
    catalog = resolve_node("cpu").nvme_bytes
    for volumes, largest in (({}, catalog), ({"local-nvme": 9 * catalog}, 9 * catalog), ({"local-nvme": GIB}, GIB)):
        found = placed(cpu_node("a", volumes=volumes), changes=unbounded).plan.budget["nvme"]
        assert 0.9 * largest < found <= largest, volumes


def test_nodes_are_ranked_by_their_volumes_not_their_root_disk() -> None:
    nodes = (
        cpu_node("a", volumes={"local-nvme": 60 * GIB}, live=LiveBytes(nvme=90 * GIB)),
        cpu_node("b", volumes={"local-nvme": 90 * GIB}, live=LiveBytes(nvme=MIB)),
    )
    found = placed(*nodes, changes=VOLUME, metrics_age_seconds=1.0)
    assert order(found) == ["b", "a"]
    assert "b: 90.0 GiB of NVMe space free, a 60.0 GiB" in found.reason


def test_drives_of_a_class_that_the_node_exporter_knows_count_and_of_two_figures_the_smaller() -> None:
    nodes = (
        cpu_node("a", volumes={"local-nvme": 95 * GIB}, live=LiveBytes(volumes={"local-nvme": 60 * GIB})),
        cpu_node("b", live=LiveBytes(nvme=MIB, volumes={"local-nvme": 90 * GIB, "other": MIB})),
    )
    found = placed(*nodes, changes=VOLUME, metrics_age_seconds=1.0)
    assert order(found) == ["b", "a"]
    assert "b: 90.0 GiB of NVMe space free, a 60.0 GiB" in found.reason


# --- faults -----------------------------------------------------------------------------------------------------------


def test_node_with_faults_is_not_used_while_another_can_carry_the_job() -> None:
    found = placed(gpu_node("a"), gpu_node("b"), avoided=frozenset({"a"}))
    assert (order(found), found.avoided) == (["b"], ("a",))
    assert found.reason.endswith("; not on a, where attempts failed")
    alone = placed(gpu_node("a"), avoided=frozenset({"a", "elsewhere"}))
    assert (order(alone), alone.avoided) == (["a"], ())


# --- strategies -------------------------------------------------------------------------------------------------------


def test_job_that_fits_only_sharded_is_sharded_and_stays_so() -> None:
    changes = {
        "spec.parallelism": {"device": "Cuda", "devicesPerNode": 8},
        "spec.model.config": {
            "architecture": "llama", "hiddenSize": 8192, "numLayers": 80, "numHeads": 64, "numKeyValueHeads": 8,
            "intermediateSize": 28672, "vocabSize": 128256,
        },
        "spec.training.globalBatchSize": 64, "spec.training.microBatchSize": 1, "spec.training.sequenceLength": 4096,
    }  # fmt: skip
    view = ClusterView((gpu_node("a", allocatable_memory_bytes=2000 * GIB, allocatable_ephemeral_bytes=28000 * GIB),))
    found = place(job(changes), view)
    assert isinstance(found, Placement)
    assert found.plan.strategy == "Fsdp"
    assert "strategy Fsdp: Ddp does not fit" in found.plan.reasons
    rejected = place(job(changes), replace(view, strategy="Ddp"))
    assert isinstance(rejected, Unplaceable), "earlier attempts ran with Ddp"
    two = job({"spec.parallelism": {"device": "Cuda", "devicesPerNode": 2}})
    small = place(two, replace(view, strategy="Fsdp"))
    assert isinstance(small, Placement)
    assert "strategy Fsdp: as in earlier attempts" in small.plan.reasons
    first = found.plan
    again = place(job(changes), replace(view, strategy=first.strategy))
    assert isinstance(again, Placement)
    assert (again.plan.budget, again.plan.bytes) == (first.budget, first.bytes), "the runtime of Fsdp counts each time"


# --- nodes that do not exist yet --------------------------------------------------------------------------------------


def declared(name: str = "8xh100", **labels: str) -> NodeView:
    node = resolve_node(name)
    devices = {GPU: node.num_devices} if node.device_kind == "Cuda" else {}
    return NodeView(
        "a new pool", labels, (), float(node.num_cores), node.host_bytes, node.nvme_bytes, devices, profile=node,
        is_declared=True,
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [(), (cpu_node("a"),)])
def test_without_a_fitting_node_a_job_is_planned_for_a_declared_class(nodes: tuple[NodeView, ...]) -> None:
    found = placed(*nodes, changes=CUDA, declared=(declared("cpu"), declared(pool="h100")))
    assert (found.node.name, dict(found.required_labels)) == ("8x-h100-80", {"pool": "h100"})
    assert found.reason == "no existing node can run the job; it is planned for a new pool, which does not exist yet"
    assert (found.preferences, found.at_once, found.pod.devices) == ((), True, 1)


def test_auto_takes_gpus_that_do_not_exist_yet() -> None:
    found = placed(cpu_node("a"), changes={"spec.parallelism.device": "Auto"}, declared=(declared(pool="h100"),))
    assert found.plan.device == "Cuda"
    on_cpus = {"spec.parallelism.device": "Cpu"}
    assert placed(cpu_node("a"), changes=on_cpus, declared=(declared(pool="h100"),)).preferences[0].node == "a"


def test_existing_nodes_go_before_declared_ones_and_their_problem_is_told_if_none_fits() -> None:
    assert placed(gpu_node("a", A100), declared=(declared(pool="h100"),)).node.name == "8x-a100-40"
    small = cpu_node("a", allocatable_memory_bytes=GIB)
    found = place(job({"spec.parallelism.device": "Cpu"}), ClusterView((small,), declared=(declared(),)))
    assert isinstance(found, Unplaceable)
    assert "the closest one: a has 1.00 GiB of memory" in found.message


def test_a_job_whose_class_is_held_moves_to_declared_nodes() -> None:
    found = placed(gpu_node("a", taken=8), declared=(declared(pool="new"),), as_free=True)
    assert dict(found.required_labels) == {"pool": "new"}
