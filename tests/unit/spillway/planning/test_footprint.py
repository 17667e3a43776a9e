"""Bytes per tier, row by row, against figures that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.api.model import ModelConfig
from spillway.plan import NCCL_BYTES, OptimizerPlan, Policy, Tier
from spillway.planning.footprint import (
    accumulator_bytes,
    cpu_accumulated,
    device_peak,
    exchange_bytes,
    host_bytes,
    nvme_bytes,
    parameter_bytes,
    slot_bytes,
    staging_bytes,
    states_bytes,
    tier_bytes,
    transient_gradient_bytes,
    upload_bytes,
)
from spillway.planning.model_shape import model_shape
from spillway.planning.workload import LOSS_BYTES, BlockBytes, Blocks, Streaming, Workload, chunk_parameters

CONFIG = {
    "architecture": "llama",
    "hiddenSize": 256,
    "numLayers": 4,
    "numHeads": 4,
    "numKeyValueHeads": 2,
    "intermediateSize": 704,
    "vocabSize": 4096,
}
RESIDENT = OptimizerPlan()
ON_CPU = OptimizerPlan(cpu_share=1.0, resident_share=0.0)
STREAMED = OptimizerPlan(streamed_share=1.0, resident_share=0.0)


def work(compute: str = "bfloat16", **fields: Any) -> Workload:
    shape_fields = {key: fields.pop(key) for key in ("tieWordEmbeddings", "numLayers", "vocabSize") if key in fields}
    shape = model_shape(ModelConfig.model_validate(CONFIG | shape_fields), compute)
    return Workload(shape, **{"micro_batch_size": 4, "sequence_length": 256, "num_micro_batches": 2} | fields)


def block(workload: Workload) -> BlockBytes:
    """Of its equal blocks."""
    (run,) = workload.runs
    return run.block


P = work().shape.num_parameters


def test_parameters_are_two_bytes_each_and_the_rotary_tables() -> None:
    assert parameter_bytes(work()) == 2 * P + 2 * 256 * 64 * 2


def test_accumulators_are_float32_per_use() -> None:
    tied = work(tieWordEmbeddings=True)
    assert accumulator_bytes(work(), P) == 4 * P
    assert cpu_accumulated(tied, ON_CPU) == tied.shape.num_parameters + 4096 * 256


def test_states_take_12_bytes_or_8_where_the_parameter_is_its_own_master() -> None:
    assert states_bytes(work(), RESIDENT, 1.0, on_cpu=False) == 12 * P
    assert states_bytes(work("float32"), RESIDENT, 1.0, on_cpu=False) == 8 * P
    assert states_bytes(work("float32"), ON_CPU, 1.0, on_cpu=True) == pytest.approx(12 * P, rel=1e-3)


def test_chunks_of_a_device_apart_are_large_and_those_of_a_cpu_small() -> None:
    large = {"numLayers": 800}
    assert chunk_parameters(work(**large)) == 1 << 23
    assert chunk_parameters(work(**large, in_place=True)) == 1 << 22
    assert chunk_parameters(work(numLayers=999, vocabSize=4_000_000)) == 1 << 25
    assert chunk_parameters(work()) == chunk_parameters(work(in_place=True)) == 1 << 17


def test_a_path_may_hold_one_chunk_beyond_its_share() -> None:
    half = OptimizerPlan(cpu_share=0.5, resident_share=0.5, chunk_parameters=1 << 16)
    beyond = states_bytes(work(), half, 0.5, on_cpu=True) - 12 * P // 2
    assert 12 * (1 << 16) <= beyond < 13 * (1 << 16)


def test_streamed_states_pass_through_two_slots_of_the_device() -> None:
    chunk = STREAMED.model_copy(update={"chunk_parameters": 1000})
    assert slot_bytes(work(), chunk) == 2 * (2176 + 2 * 4032)  # 2125 bytes of the master
    assert slot_bytes(work(is_float16=True), chunk) == slot_bytes(work(in_place=True), chunk) == 2 * 3 * 4032
    assert slot_bytes(work("float32"), chunk) == 2 * 2 * 4032
    assert slot_bytes(work(), ON_CPU) == 0


def test_chunks_are_never_larger_than_the_largest_parameter() -> None:
    assert slot_bytes(work(), STREAMED.model_copy(update={"chunk_parameters": 1 << 30})) == 2 * 10.125 * 4096 * 256


def test_gradients_and_parameters_pass_through_four_staging_buffers_each() -> None:
    for nbytes in (staging_bytes, upload_bytes):
        assert nbytes(work(), ON_CPU.model_copy(update={"chunk_parameters": 1000})) == 4 * 4096
        assert nbytes(work(), STREAMED) == 0


def test_in_place_update_stages_only_homes_on_nvme() -> None:
    in_place, chunk = work(in_place=True), ON_CPU.model_copy(update={"chunk_parameters": 1000})
    assert staging_bytes(in_place, chunk) == 0
    assert [upload_bytes(in_place, chunk, Streaming(host, nvme)) for host, nvme in ((0, 0), (3, 0), (2, 1))] == [
        0, 0, 4 * 4096,
    ]  # fmt: skip


def test_the_largest_gradient_is_on_the_device_once() -> None:
    assert transient_gradient_bytes(work()) == 2 * 4096 * 256


def test_disabled_holds_everything_on_the_device() -> None:
    held = tier_bytes(work(), RESIDENT, Blocks(4), 0)
    assert (held[Tier.HOST].total, held[Tier.NVME].total) == (0, 0)


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "states"),
    [("Ddp", 1, 1, 1), ("Zero1", 1, 8, 8), ("Zero2", 1, 8, 8), ("Zero3", 8, 8, 8), ("Fsdp", 8, 8, 8)],
)
def test_each_strategy_shards_its_parts(strategy: Any, parameters: int, gradients: int, states: int) -> None:
    shared = work(world_size=8, strategy=strategy)
    parts = (shared.shards("parameters"), shared.shards("gradients"), shared.shards("states"))
    assert parts == (parameters, gradients, states)
    assert states_bytes(shared, RESIDENT, 1.0, on_cpu=False) == 12 * -(-P // states)


def test_fsdp_counts_the_rows_of_the_rank_that_has_most() -> None:
    """Three ranks divide neither 256 nor 4096 rows."""
    shared, rows = work(world_size=3, strategy="Fsdp", tieWordEmbeddings=True), [-(-256 // 3), -(-4096 // 3)]
    one = next(p for p in shared.shape.head.parameters if p.is_alias)
    assert (one.num_rows, one.row_values, shared.most_rows(one)) == (4096, 256, rows[1] * 256)
    assert shared.rank_parameters > -(-shared.shape.num_trained // 3)
    assert shared.rank_accumulated == shared.rank_parameters + rows[1] * 256
    assert accumulator_bytes(shared, shared.shape.num_accumulated) == 4 * shared.rank_accumulated
    assert shared.rank_parameter_bytes == 2 * shared.rank_accumulated
    assert shared.largest_gathered_bytes == 3 * 2 * rows[1] * 256 + 3 * 2 * rows[0]  # the head's norm
    assert transient_gradient_bytes(shared) == 2 * shared.largest_segment + 2 * 4 * rows[1] * 256


def test_on_devices_two_neighbouring_segments_have_gradients_at_once() -> None:
    """The head is exchanged behind the backward of the last block."""
    shared = work(world_size=4, strategy="Zero2", on_cuda=True, vocabSize=16384)
    block, head = (segment.num_accumulated for segment in shared.shape.segments[-2:])
    assert head > 2 * block
    assert transient_gradient_bytes(shared) == 2 * (block + head) + 4 * head // 4


# --- activations ------------------------------------------------------------------------------------------------------


def test_small_storages_are_not_moved() -> None:
    """Roots of the norms (4 KiB) and log-sum-exp (16 KiB) stay; everything else of a block moves."""
    assert block(work()).saved - block(work()).moved == 1024 * (4 + 4 + 4 * 4)


def test_nvme_extents_are_whole_pages() -> None:
    odd = work(sequence_length=255)
    assert block(odd).moved_nvme > block(odd).moved
    assert block(odd).moved_nvme % 4096 == 0


def test_keeping_all_holds_every_block_and_the_head() -> None:
    kept = device_peak(work(), Blocks(4), 0)
    assert (
        kept.activations == 4 * block(work()).saved + 1024 * (8 + work().shape.head.saved_bytes_per_token) + LOSS_BYTES
    )


def test_a_kept_block_gives_back_its_bytes_before_spilled_ones_return() -> None:
    """Event sweep: half kept, half spilled peaks at the kept half and its surroundings, not at the sum."""
    w = work(numLayers=8, vocabSize=512)
    peak = device_peak(w, Blocks(8, host=4), block(w).moved)
    assert peak.activations + peak.buffers < 6 * block(w).saved
    assert peak.activations >= 4 * block(w).saved


def test_recompute_keeps_the_input_of_each_block_and_one_saved_set() -> None:
    w = work(numLayers=16, vocabSize=512)
    peak = device_peak(w, Blocks(16, recomputed=16), 0)
    assert peak.activations == 1024 * 8 + 16 * 1024 * 512 + block(w).saved


def test_two_spilled_blocks_are_back_at_once() -> None:
    w = work(numLayers=16, vocabSize=512)
    peak = device_peak(w, Blocks(16, host=16), 0)
    assert peak.buffers == 2 * block(w).moved


def test_what_returns_waits_for_what_is_still_in_flight() -> None:
    w = work(numLayers=16, vocabSize=512)
    waiting, in_flight = (device_peak(w, Blocks(16, host=16), window) for window in (0, block(w).moved))
    assert in_flight.activations + in_flight.buffers <= waiting.activations + waiting.buffers + 16 * 24576


def test_nvme_is_staged_in_host_memory_out_and_back() -> None:
    w = work()
    assert host_bytes(w, RESIDENT, Blocks(4, nvme=1), block(w).moved).buffers == 2 * block(w).moved_nvme
    assert host_bytes(w, RESIDENT, Blocks(4, host=1), block(w).moved).buffers == 0


def test_host_and_nvme_blocks_are_counted_where_they_lie() -> None:
    w = work()
    blocks = Blocks(4, host=1, nvme=2)
    assert host_bytes(w, RESIDENT, blocks, 0).activations == block(w).moved
    assert nvme_bytes(w, RESIDENT, blocks).activations == 2 * block(w).moved_nvme


def test_blocks_lie_in_the_order_in_which_backward_needs_them_last() -> None:
    assert Blocks(4, recomputed=1, host=1, nvme=1).answers == (Policy.NVME, Policy.HOST, Policy.RECOMPUTE, Policy.KEEP)


@given(layers=st.integers(1, 12), data=st.data())
def test_moving_or_recomputing_exceeds_keeping_by_at_most_three_blocks(layers: int, data: st.DataObject) -> None:
    recomputed = data.draw(st.integers(0, layers))
    moved = data.draw(st.integers(0, layers - recomputed))
    w = work(numLayers=layers)
    kept = device_peak(w, Blocks(layers), 0)
    peak = device_peak(w, Blocks(layers, recomputed=recomputed, host=moved), block(w).moved)
    assert peak.activations + peak.buffers <= kept.activations + kept.buffers + 3 * block(w).saved


@pytest.mark.parametrize("on_cuda", [False, True])
def test_ranks_exchange_gradients_through_the_device(on_cuda: bool) -> None:
    works = [replace(work(world_size=size), on_cuda=on_cuda) for size in (1, 4)]
    one, four = (tier_bytes(each, RESIDENT, Blocks(4), 0) for each in works)
    added = {each: four[each].buffers - one[each].buffers for each in Tier}
    assert added == dict.fromkeys(Tier, 0) | {Tier.DEVICE: exchange_bytes(works[1])}
    assert four[Tier.DEVICE].allocator - one[Tier.DEVICE].allocator == NCCL_BYTES * on_cuda


def test_on_a_gpu_the_gradients_of_logits_leave_a_hole_and_precede_others() -> None:
    w = work(vocabSize=32000, num_micro_batches=1)
    on_cpu, on_gpu = (device_peak(replace(w, on_cuda=on), Blocks(4), 0) for on in (False, True))
    assert on_cpu.workspace - on_gpu.workspace == transient_gradient_bytes(w)
    assert (on_cpu.holes, on_gpu.holes) == (0, w.tokens * w.shape.compute_bytes * 32000)


def test_on_a_gpu_gradients_of_the_micro_batch_before_leave_a_hole() -> None:
    one, two = (device_peak(replace(work(num_micro_batches=n), on_cuda=True), Blocks(4), 0) for n in (1, 2))
    assert two.holes - one.holes == transient_gradient_bytes(work())


def test_on_a_gpu_activations_that_move_leave_holes_of_two_blocks() -> None:
    w = replace(work(num_micro_batches=1), on_cuda=True)
    kept, moved = (device_peak(w, Blocks(4, host=host), 0) for host in (0, 4))
    assert moved.holes - kept.holes >= 2 * block(w).moved
