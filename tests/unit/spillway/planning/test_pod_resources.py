"""What a pod requests: enough for its plan, figure by figure; what may be planned for a limit is its inverse."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.job_documents import job, member
from spillway.api.limits import ENTRY_POINT_MEMORY_BYTES
from spillway.api.model import Lora
from spillway.api.sweep.members import inspected_as, solo_specs
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.placement.cluster_view import ClusterView, NodeView
from spillway.placement.place import Placement, Unplaceable, place
from spillway.plan import MemoryPlan, Tier
from spillway.planning import pod_resources as pods
from spillway.planning.corrections import Corrections
from spillway.planning.hardware import NodeSpec, local_node, resolve_node
from spillway.planning.model_shape import model_shape
from spillway.planning.planner import Overrides, make_plan, shared_memory
from spillway.planning.pod_resources import PodResources, pod_resources
from spillway.units import GIB, MIB

H100 = resolve_node("8xh100")
HEAVY = {"spec.model.config.numLayers": 60}
"""takes more memory than building a corpus"""
MODEL = job().spec.model
GPT2 = {"spec.model.config.architecture": "gpt2", "spec.model.config.numKeyValueHeads": 4}
SPILLED = {"spec.memory.advanced.activations.policy": "Nvme", "spec.memory.advanced.optimizer.placement": "Host"}


def plan(changes: dict[str, Any] | None = None, ranks: int = 1, node: NodeSpec | None = None) -> MemoryPlan:
    asked = job(changes)
    if node is None:
        node = local_node(4, 16 * GIB, 16 * GIB, 64 * GIB)
        decided = make_plan(asked, node, shared_memory(asked, 16 * GIB, ranks))
    else:
        decided = make_plan(asked, node)
    assert isinstance(decided, MemoryPlan), decided
    return decided


def resources(
    changes: dict[str, Any] | None = None, ranks: int = 1, node: NodeSpec | None = None, text_bytes: int | None = None
) -> PodResources:
    changes = {"spec.training.globalBatchSize": 64, "spec.parallelism.devicesPerNode": ranks, **(changes or {})}
    return pod_resources(job(changes).spec, plan(changes, ranks, node), ranks, text_bytes)


def test_on_a_cpu_the_device_tier_is_memory_of_the_pod() -> None:
    kept = resources(HEAVY)
    held = plan(HEAVY).bytes[Tier.DEVICE].total
    assert held > pods.CORPUS_BUILD_BYTES
    without = pods.runtime_bytes(MODEL, 1, "Cpu") + pods.SHARED_MEMORY_BYTES
    assert kept.memory_bytes - without == pytest.approx(held * (1 + pods.PLANNED_MARGIN), abs=MIB)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_says_what_its_pod_will_request(ranks: int) -> None:
    changes = HEAVY | {"spec.parallelism.devicesPerNode": ranks}
    made = plan(changes, node=local_node(4, 16 * GIB, 16 * GIB, 64 * GIB))
    assert made.machine_bytes == pod_resources(job(changes).spec, made, ranks).memory_bytes
    assert made.process_bytes == pods.runtime_bytes(MODEL, ranks, "Cpu", made.strategy)


def test_on_a_gpu_the_device_tier_is_not() -> None:
    gpu = resources({"spec.parallelism.device": "Cuda"}, node=H100)
    assert gpu.memory_bytes == least_memory_bytes(1, "Cuda")


def test_every_rank_has_its_own_process_and_its_own_tiers() -> None:
    one, four = resources(HEAVY), resources(HEAVY, ranks=4)
    held = pods.tier_memory_bytes(plan(HEAVY), 1)
    process = pods.RANK_BYTES + pods.CHECKPOINT_BUFFER_BYTES
    assert four.memory_bytes - one.memory_bytes >= 3 * (process + held)


def test_libraries_and_launcher_are_counted_once() -> None:
    once = pods.CODE_BYTES + pods.LAUNCHER_BYTES + pods.PAGE_CACHE_BYTES
    assert pods.runtime_bytes(MODEL, 3, "Cpu") == once + 3 * (pods.RANK_BYTES + pods.CHECKPOINT_BUFFER_BYTES)


def test_a_family_of_transformers_brings_its_libraries() -> None:
    for changes in (GPT2, {"spec.model.lora": {"rank": 2}}):
        more = pods.runtime_bytes(job(changes).spec.model, 3, "Cpu") - pods.runtime_bytes(MODEL, 3, "Cpu")
        assert more == pods.FAMILY_CODE_BYTES + 3 * pods.FAMILY_RANK_BYTES


def test_while_a_corpus_is_built_no_checkpoint_is_written() -> None:
    building = pods.CODE_BYTES + pods.LAUNCHER_BYTES + pods.PAGE_CACHE_BYTES + pods.SHARED_MEMORY_BYTES
    building += 2 * pods.RANK_BYTES + pods.CORPUS_BUILD_BYTES
    assert least_memory_bytes(2, "Cpu") == building
    assert pods.corpus_build_bytes(spec_of(8), 64) == 0


def test_what_an_entry_point_may_take_while_the_corpus_is_built_is_the_pods() -> None:
    spec = job({"spec.data": {"entrypoint": "mine:data"}}).spec
    assert pods.corpus_build_bytes(spec, 1) - pods.corpus_build_bytes(spec_of(1), 1) == ENTRY_POINT_MEMORY_BYTES


def test_a_small_model_still_gets_what_building_its_corpus_takes() -> None:
    assert resources().memory_bytes == least_memory_bytes(1, "Cpu")


def test_a_host_slab_counts_with_its_slack() -> None:
    offloaded = HEAVY | {"spec.memory.advanced.optimizer.placement": "Host"}
    decided = plan(offloaded)
    slab = decided.slab_bytes(Tier.HOST)
    assert slab > decided.bytes[Tier.HOST].total
    held = slab + decided.bytes[Tier.DEVICE].total
    assert pods.tier_memory_bytes(decided, 1) == pytest.approx(1.05 * held, abs=1)


def test_what_is_spilled_is_disk_and_not_memory() -> None:
    spilled, kept = resources(SPILLED), resources()
    slab = plan(SPILLED).slab_bytes(Tier.NVME)
    assert kept.spill_volume_bytes == 0
    assert slab < spilled.spill_volume_bytes < 1.05 * slab + MIB
    assert spilled.ephemeral_storage_bytes - kept.ephemeral_storage_bytes == spilled.spill_volume_bytes


def test_a_volume_of_a_storage_class_is_no_ephemeral_storage() -> None:
    claimed = resources(SPILLED | {"spec.spill.storageClassName": "fast"})
    assert claimed.spill_volume_bytes == resources(SPILLED).spill_volume_bytes
    assert claimed.ephemeral_storage_bytes == resources().ephemeral_storage_bytes


def test_several_volumes_have_equal_shares_of_the_slab() -> None:
    slab = plan(SPILLED).slab_bytes(Tier.NVME)
    volumes = {"spec.spill": {"storageClassName": "fast", "numVolumes": 3}}
    striped = resources(SPILLED | volumes)
    assert slab / 3 < striped.spill_volume_bytes < 1.05 * slab / 3 + MIB
    assert striped.ephemeral_storage_bytes == resources().ephemeral_storage_bytes


def test_checkpoints_without_a_claim_lie_in_the_pod_one_more_than_are_kept() -> None:
    spec = job().spec
    without, claimed = resources(), resources({"spec.checkpoint.claim": "checkpoints"})
    three = 3 * pods.checkpoint_bytes(spec, "Cpu")
    corpus = pods.corpus_bytes(spec, None)
    assert spec.checkpoint.keep == 2
    assert without.ephemeral_storage_bytes - claimed.ephemeral_storage_bytes == pytest.approx(three + corpus, abs=MIB)


def test_a_text_of_known_size_takes_no_more_than_twice_its_size() -> None:
    text = {"spec.data": {"text": {"claim": "corpus"}}}
    known, unknown = resources(text, text_bytes=10 * MIB), resources(text)
    assert unknown.ephemeral_storage_bytes - known.ephemeral_storage_bytes == pods.CORPUS_FALLBACK_BYTES - 20 * MIB


def test_a_job_without_planning_gets_the_host_memory_that_it_names() -> None:
    disabled = {"spec.memory.mode": "Disabled", "spec.memory.budget.host": "3Gi"}
    assert resources(disabled).memory_bytes == pods.runtime_bytes(MODEL, 1, "Cpu") + 3 * GIB + pods.SHARED_MEMORY_BYTES


def test_devices_are_requested_on_a_gpu_only() -> None:
    gpu = resources({"spec.parallelism.device": "Cuda", "spec.pod.resourceName": "example.com/gpu"}, node=H100)
    assert (gpu.devices, gpu.resource_name) == (1, "example.com/gpu")
    assert (resources().devices, resources().resource_name) == (0, "")


def test_nccl_gets_shared_memory_where_several_gpus_talk() -> None:
    several = resources({"spec.parallelism.device": "Cuda"}, ranks=8, node=H100)
    assert several.shared_memory_bytes == pods.SHARED_MEMORY_BYTES + 8 * pods.NCCL_SHARED_MEMORY_BYTES
    assert resources(ranks=4).shared_memory_bytes == pods.SHARED_MEMORY_BYTES


def test_cores_are_a_quarter_of_the_threads_unless_the_job_says_more() -> None:
    assert plan().optimizer.num_threads == 4
    assert resources().cpu_cores == 1.0
    assert resources({"spec.pod.resources.cpu": "1500m"}).cpu_cores == 1.5


def test_the_grace_period_has_room_for_a_slow_step_and_a_checkpoint() -> None:
    changes = {"spec.training.globalBatchSize": 64, "spec.parallelism.devicesPerNode": 1}
    decided = plan(changes)
    slow = decided.model_copy(update={"prediction": decided.prediction.model_copy(update={"step_seconds": 100.0})})
    spec = job(changes).spec
    slower = pods.STEP_PATIENCE * (100.0 - decided.prediction.step_seconds)
    assert pods.grace_seconds(spec, slow) - pods.grace_seconds(spec, decided) == pytest.approx(slower, abs=1)
    assert pods.grace_seconds(spec, decided) > pods.GRACE_SECONDS


def test_the_grace_period_has_room_for_a_checkpoint_that_is_on_its_way() -> None:
    spec = job(HEAVY).spec
    decided = plan(HEAVY).model_copy(update={"snapshot_bytes": 0})
    behind = decided.model_copy(update={"snapshot_bytes": int(50 * pods.CHECKPOINT_BYTES_PER_SECOND)})
    assert pods.grace_seconds(spec, behind) - pods.grace_seconds(spec, decided) == pytest.approx(50, abs=1)


EVERY_FIVE = HEAVY | {"spec.checkpoint.everySteps": 5, "spec.training.steps": 10}
ONLY_THE_LAST = EVERY_FIVE | {"spec.checkpoint.everySteps": 10}


def snapshot_of(host_bytes: int, changes: dict[str, Any] | None = None, ranks: int = 1) -> MemoryPlan:
    asked, node = job(EVERY_FIVE | (changes or {})), local_node(4, 16 * GIB, 16 * GIB, 64 * GIB)
    made = make_plan(asked, node, Overrides(device_bytes=8 * GIB, host_bytes=host_bytes, world_size=ranks))
    assert isinstance(made, MemoryPlan), made
    return made


def test_a_copy_of_the_states_is_the_last_use_of_the_host_budget() -> None:
    with_room = snapshot_of(4 * GIB)
    needed = with_room.snapshot_bytes
    assert 0 <= needed - with_room.checkpoint_bytes - pods.SNAPSHOT_SLACK_BYTES < 4096
    assert snapshot_of(needed).snapshot_bytes == needed
    short = snapshot_of(needed - 4096)
    assert short.snapshot_bytes == 0
    assert short.reasons[-1].endswith("host memory lacks 4.00 KiB for a copy of the states")
    beside = {"spec.memory.advanced.optimizer.placement": "Host"}
    host = snapshot_of(4 * GIB, beside)
    assert host.snapshot_bytes == needed and host.bytes[Tier.HOST].total > 0
    full = host.slab_bytes(Tier.HOST) + needed
    assert (snapshot_of(full, beside).snapshot_bytes, snapshot_of(full - 4096, beside).snapshot_bytes) == (needed, 0)


def test_the_copy_changes_nothing_else_of_a_plan_and_the_pod_has_room_for_it() -> None:
    behind, last = snapshot_of(4 * GIB), snapshot_of(4 * GIB, ONLY_THE_LAST)
    assert last.snapshot_bytes == 0
    more = behind.machine_bytes - last.machine_bytes
    assert more == pytest.approx(behind.snapshot_bytes * (1 + pods.PLANNED_MARGIN), abs=MIB)
    same = behind.model_copy(update={"snapshot_bytes": 0, "machine_bytes": last.machine_bytes})
    assert same == last


def test_several_ranks_say_that_training_stops_for_checkpoints() -> None:
    ranks = snapshot_of(8 * GIB, {"spec.training.globalBatchSize": 64}, ranks=2)
    assert ranks.snapshot_bytes == 0
    assert (
        ranks.reasons[-1]
        == "checkpoints: training stops while one is written, because only a run with one rank copies its states first"
    )


def test_after_an_attempt_ran_out_of_memory_there_is_no_copy() -> None:
    node = local_node(4, 8 * GIB, 8 * GIB, 64 * GIB)
    made = make_plan(job(EVERY_FIVE), node, Overrides(corrections=Corrections(after_failure=True)))
    assert isinstance(made, MemoryPlan) and made.snapshot_bytes == 0


@pytest.mark.parametrize(("num_pods", "has_copy"), [(1.9, True), (2.0, False)])
def test_a_copy_for_which_fewer_pods_fit_a_node_is_left_out(num_pods: float, has_copy: bool) -> None:
    def placed(changes: dict[str, Any], memory_bytes: int) -> Placement:
        node = NodeView("node", {}, (), 8.0, memory_bytes, 100 * GIB, {})
        found = place(job(changes), ClusterView((node,), None, "", "Prometheus"))
        assert isinstance(found, Placement), found
        return found

    without = placed(ONLY_THE_LAST, 64 * GIB).pod.memory_bytes
    found = placed(EVERY_FIVE, int(num_pods * without))
    assert (found.plan.snapshot_bytes > 0, found.pod.memory_bytes > without) == (has_copy, has_copy)
    assert (
        found.plan.reasons[-1].endswith("with memory for a copy of the states, fewer pods would fit on a node")
        is not has_copy
    )


@settings(deadline=None)
@given(limit=st.integers(8 * GIB, 64 * GIB), ranks=st.sampled_from([1, 2, 4]))
def test_a_plan_for_what_a_limit_leaves_makes_a_pod_within_the_limit(limit: int, ranks: int) -> None:
    changes = {
        "spec.training.globalBatchSize": 64, "spec.parallelism.devicesPerNode": ranks,
        "spec.memory.advanced.optimizer.placement": "Host", "spec.memory.advanced.activations.policy": "Host",
    }  # fmt: skip
    asked = job(changes)
    left = pods.plannable_memory_bytes(spec_of(ranks), limit, pods.runtime_bytes(MODEL, ranks, "Cpu"), "Cpu")
    decided = make_plan(asked, local_node(4, left, left, 64 * GIB), shared_memory(asked, left, ranks))
    assert isinstance(decided, MemoryPlan)
    # The fullest plan that the budgets allow.
    full = {tier: replace_total(decided, tier) for tier in (Tier.DEVICE, Tier.HOST)}
    fullest = decided.model_copy(update={"bytes": {**decided.bytes, **full}, "snapshot_bytes": 0})
    assert pod_resources(asked.spec, fullest, ranks).memory_bytes <= limit


def replace_total(decided: MemoryPlan, tier: Tier) -> Any:
    held = decided.bytes[tier]
    return held.model_copy(update={"workspace": held.workspace + decided.budget[tier] - held.total})


@pytest.mark.ci
@settings(deadline=None)
@given(limit=st.integers(2 * GIB, 64 * GIB))
def test_a_plan_for_what_a_disk_leaves_makes_a_pod_within_the_disk(limit: int) -> None:
    spec = job().spec
    left = pods.plannable_spill_bytes(limit, pods.emptydir_bytes(spec, "Cpu"))
    decided = plan(SPILLED)
    held = decided.bytes[Tier.NVME].model_copy(update={"activations": left})
    fullest = decided.model_copy(
        update={"bytes": {**decided.bytes, Tier.NVME: held}, "budget": {**decided.budget, Tier.NVME: left}}
    )
    assert left > 0
    assert pod_resources(spec, fullest, 1).ephemeral_storage_bytes <= limit


def test_all_figures_are_whole_mebibytes() -> None:
    made = resources(SPILLED)
    figures = (made.memory_bytes, made.spill_volume_bytes, made.ephemeral_storage_bytes)
    assert all(figure % MIB == 0 for figure in figures)


def test_homes_of_streamed_parameters_are_memory_and_volume_of_the_pod() -> None:
    stream = {"spec.memory.advanced.parameters.placement": "Stream", "spec.memory.advanced.optimizer.placement": "Host"}
    decided = plan(HEAVY | stream)
    held = decided.bytes[Tier.HOST].parameters
    assert held > 80 * MIB
    assert resources(HEAVY | stream).memory_bytes > pods.runtime_bytes(MODEL, 1, "Cpu") + decided.bytes[Tier.HOST].total
    short = HEAVY | stream | {"spec.model.lora": {"rank": 8}, "spec.memory.budget": {"host": "80Mi"}}
    on_nvme = plan(short).bytes[Tier.NVME].parameters
    assert resources(short).spill_volume_bytes > on_nvme > 0


def test_a_checkpoint_holds_what_is_trained() -> None:
    whole, adapters = (pods.checkpoint_bytes(job(c).spec, "Cpu") for c in ({}, {"spec.model.lora": {"rank": 8}}))
    assert 0 < adapters < whole / 20


def test_strategies_that_divide_bring_their_libraries() -> None:
    for strategy in ("Zero1", "Zero2", "Zero3"):
        more = pods.runtime_bytes(MODEL, 3, "Cpu", strategy) - pods.runtime_bytes(MODEL, 3, "Cpu")
        assert more == pods.DEEPSPEED_CODE_BYTES + 3 * pods.DEEPSPEED_RANK_BYTES
    fsdp = pods.runtime_bytes(MODEL, 3, "Cpu", "Fsdp") - pods.runtime_bytes(MODEL, 3, "Cpu")
    assert fsdp == pods.FSDP_CODE_BYTES + 3 * pods.FSDP_RANK_BYTES
    two = {"spec.parallelism": {"nodes": 2}}
    divided = {"spec.parallelism": {"nodes": 2, "strategy": "Zero2"}}
    assert resources(divided).memory_bytes > resources(two).memory_bytes + pods.DEEPSPEED_RANK_BYTES


# --- a sweep ----------------------------------------------------------------------------------------------------------


def sweep(*overrides: dict[str, str], **changes: Any) -> TrainingJob:
    made = job(changes)
    members = tuple(member(f"m{index}", one) for index, one in enumerate(overrides))
    return made.model_copy(update={"spec": made.spec.model_copy(update={"members": members})})


def planned(asked: TrainingJob) -> MemoryPlan:
    decided = make_plan(asked, local_node(4, 16 * GIB, 16 * GIB, 64 * GIB), shared_memory(asked, 16 * GIB, 1))
    assert isinstance(decided, MemoryPlan), decided
    return decided


SEED, DEEP = {"training.seed": "1"}, {"model.config.numLayers": "8"}


def test_the_pod_of_a_sweep_has_the_memory_of_its_plan_and_no_more() -> None:
    asked = sweep(SEED, DEEP)
    found, plan = pod_resources(asked.spec, planned(asked), 1), planned(asked)
    deeper = pod_resources(job({"spec.model.config.numLayers": 8}).spec, plan, 1)
    assert found.memory_bytes == deeper.memory_bytes
    assert found.spill_volume_bytes == deeper.spill_volume_bytes == pods.spill_volume_bytes(plan, 1)


def test_every_member_keeps_checkpoints_of_its_own_on_the_emptydir() -> None:
    base, deep = job().spec, job({"spec.model.config.numLayers": 8}).spec
    kept = base.checkpoint.keep + 1
    expected = kept * (pods.checkpoint_bytes(base, "Cpu") + pods.checkpoint_bytes(deep, "Cpu"))
    corpus = pods.corpus_bytes(base, None)
    assert pods.emptydir_bytes(sweep(SEED, DEEP).spec, "Cpu") == pods.SCRATCH_BYTES + expected + corpus
    claimed = sweep(SEED, DEEP, **{"spec.checkpoint.claim": "kept"}).spec
    assert pods.emptydir_bytes(claimed, "Cpu") == pods.SCRATCH_BYTES


def test_members_of_other_vocabularies_have_corpora_of_their_own() -> None:
    same, other = sweep(SEED, SEED).spec, sweep(SEED, {"model.config.vocabSize": "512"}).spec
    kept = job().spec.checkpoint.keep + 1
    apart = [kept * pods.checkpoint_bytes(one, "Cpu") for one in (*solo_specs(same), *solo_specs(other))]
    beside = pods.emptydir_bytes(other, "Cpu") - sum(apart[2:]) - pods.emptydir_bytes(same, "Cpu") + sum(apart[:2])
    assert beside == pods.corpus_bytes(same, None)


def test_text_to_evaluate_on_has_room_for_tokens_of_its_own() -> None:
    held = job({"spec.data": {"builtin": "PythonStdlib", "evaluation": {"text": {"claim": "held"}}}}).spec
    more = pods.emptydir_bytes(held, "Cpu") - pods.emptydir_bytes(job().spec, "Cpu")
    assert more == pods.CORPUS_FALLBACK_BYTES


def test_members_of_an_inspected_model_keep_checkpoints_of_their_own_sizes() -> None:
    model = {"source": {"path": "/models/a"}, "lora": {"rank": 4}}
    members = [{"name": f"r{rank}", "model": {"lora": {"rank": rank}}} for rank in (4, 8)]
    document = job().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = TrainingJobSpec.model_validate(document | {"model": model, "members": members})
    wide, narrow = (model_shape(job().spec.model.transformer, "bfloat16", lora=Lora(rank=rank)) for rank in (8, 4))
    shape = replace(narrow, others=((inspected_as(solo_specs(spec)[1]), wide),))
    alike = replace(narrow, others=((inspected_as(solo_specs(spec)[1]), narrow),))
    more = pods.emptydir_bytes(spec, "Cpu", shape=shape) - pods.emptydir_bytes(spec, "Cpu", shape=alike)
    own, other = (pods.checkpoint_bytes(solo_specs(spec)[1], "Cpu", one) for one in (wide, narrow))
    assert more >= own - other > 0


def test_sweep_grace_period_covers_its_largest_members_checkpoint() -> None:
    asked = sweep(SEED, {"model.config.numLayers": "64", "model.config.hiddenSize": "1024"})
    plan = planned(asked)
    sizes = pods.planned_checkpoint_bytes(asked.spec, plan)
    assert list(sizes.values()) == [pods.checkpoint_bytes(one, "Cpu") for one in solo_specs(asked.spec)]
    quick = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"step_seconds": 0.0})})
    assert pods.grace_seconds(asked.spec, quick) == 30 + ceil(max(sizes.values()) / 250e6)


def test_one_member_of_another_family_brings_its_libraries() -> None:
    gpt2 = {"model.config.architecture": "gpt2", "model.config.numKeyValueHeads": "4"}
    asked, plan = sweep(SEED, gpt2), planned(sweep(SEED))
    more = pod_resources(asked.spec, plan, 1).memory_bytes - pod_resources(sweep(SEED).spec, plan, 1).memory_bytes
    assert more == pods.FAMILY_CODE_BYTES + pods.FAMILY_RANK_BYTES


def test_trackers_take_memory_once_per_pod() -> None:
    tracked = job({"spec.tracking": {"tensorBoard": {}}}).spec
    for ranks in (1, 4):
        more = pods.pod_runtime_bytes(tracked, ranks, "Cpu") - pods.pod_runtime_bytes(job().spec, ranks, "Cpu")
        assert more == pods.TRACKERS_BYTES


def test_a_sweep_is_planned_for_what_its_largest_member_leaves_of_a_node() -> None:
    family = {name.removeprefix("spec."): str(value) for name, value in GPT2.items()}
    own, mixed = sweep(SEED, SEED), sweep(SEED, family)
    small, large = (pods.pod_runtime_bytes(one.spec, 1, "Cpu") for one in (own, mixed))
    assert large == pods.runtime_bytes(job(GPT2).spec.model, 1, "Cpu") > small
    limit = sum(pods.least_memory_bytes(spec_of(1), one, "Cpu") for one in (small, large)) // 2
    nodes = (NodeView("node", {}, (), 8.0, limit, 100 * GIB, {}),)
    found = [place(one, ClusterView(nodes, None, "", "Prometheus")) for one in (own, mixed)]
    assert isinstance(found[0], Placement)
    assert isinstance(found[1], Unplaceable) and found[1].reason == "NoNode", found[1]
    roomy = replace(nodes[0], allocatable_memory_bytes=limit + large)
    fits = place(mixed, ClusterView((roomy,), None, "", "Prometheus"))
    assert isinstance(fits, Placement) and fits.pod.memory_bytes <= limit + large


def least_memory_bytes(num_local_ranks: int, device: str) -> int:
    runtime = pods.runtime_bytes(MODEL, num_local_ranks, device)
    return pods.least_memory_bytes(spec_of(num_local_ranks), runtime, device)


def spec_of(ranks: int) -> TrainingJobSpec:
    return job({"spec.parallelism.devicesPerNode": ranks, "spec.training.microBatchSize": 1}).spec
