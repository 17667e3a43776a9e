"""Seconds of a step, against bounds that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spillway.api.model import ModelConfig
from spillway.plan import OptimizerPlan, Prediction
from spillway.planning.hardware import resolve_node
from spillway.planning.model_shape import model_shape
from spillway.planning.step_time import (
    Drives,
    Rates,
    Resource,
    backward_loads,
    balanced_streamed_share,
    beside_copies,
    exchange_loads,
    exposed_exchange_seconds,
    forward_loads,
    hidden_seconds,
    phase_seconds,
    predict,
    rank_rates,
    scatter_seconds,
    speculative_window,
    update_loads,
    update_seconds,
)
from spillway.planning.workload import Blocks, Streaming, Workload

LLAMA_8B = ModelConfig.model_validate(
    {"architecture": "llama", "hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "numKeyValueHeads": 8,
     "intermediateSize": 14336, "vocabSize": 128256}
)  # fmt: skip
WORK = Workload(model_shape(LLAMA_8B, "bfloat16", "Cuda"), 1, 8192, 4)
P = 8030261248
MOVED, SPILLED = WORK.largest_block.moved, WORK.largest_block.moved_nvme
"""bytes of one block and micro-batch"""
RATES = Rates(
    flops=400e12, device=2.7e12, h2d=50e9, d2h=50e9, duplex=1.0, dram=240e9, cpu=120e9, read=6e9, write=5e9,
    network=300e9, copies_use_cores=False,
)  # fmt: skip
RESIDENT = OptimizerPlan()
ON_CPU = OptimizerPlan(cpu_share=1.0, resident_share=0.0)
ALL_KEPT = Blocks(32)


def prediction(
    optimizer: OptimizerPlan = RESIDENT, blocks: Blocks = ALL_KEPT, rates: Rates = RATES, overlapped: bool = True
) -> Prediction:
    return predict(WORK, rates, optimizer, blocks, overlapped=overlapped, steps=10**6, drives=Drives(3.84e12))


def test_backward_costs_twice_the_forward() -> None:
    forward = forward_loads(WORK, RATES, Blocks(32))[Resource.COMPUTE]
    assert backward_loads(WORK, RATES, Blocks(32), RESIDENT)[Resource.COMPUTE] == pytest.approx(2 * forward)


def test_recomputing_every_block_costs_a_third_more() -> None:
    ratio = prediction(blocks=Blocks(32, recomputed=32)).compute_seconds / prediction().compute_seconds
    assert 1.30 < ratio < 1.34


def test_the_cpu_update_is_bound_by_its_bytes() -> None:
    """28 bytes of states and gradient, 2 of the bfloat16 copy, at 120 GB/s: 0.25 ns a parameter."""
    assert update_seconds(WORK, RATES, ON_CPU) == pytest.approx(30 * P / 120e9)


def test_a_streamed_update_is_bound_by_ten_bytes_and_a_bit_each_way() -> None:
    """Two moments and 17 bits of the master; all of it where the weight is no half of it."""
    streamed = OptimizerPlan(streamed_share=1.0, resident_share=0.0)
    assert update_seconds(WORK, RATES, streamed) == pytest.approx(10.125 * P / 50e9)
    for whole in (replace(WORK, is_float16=True), replace(WORK, in_place=True)):
        assert update_seconds(whole, RATES, streamed) == pytest.approx(12 * P / 50e9)


OVERLAPPED = ON_CPU.model_copy(update={"overlap": "Forward"})


def played_through(update: float, forward: float) -> float:
    """Seconds of an update and the forward behind it, segment by segment: each begins when it has been updated."""
    segments, now, updated = WORK.shape.segments, 0.0, 0.0
    for segment in segments:
        updated += update * segment.num_trained / P
        flops = segment.forward_flops_per_token(8192)
        now = max(now, updated) + forward * WORK.tokens * flops / WORK.forward_flops
    return now


@pytest.mark.parametrize("cpu", [30e9, 120e9, 480e9, 4800e9])
def test_forward_waits_for_what_it_reads_of_the_update_and_for_no_more(cpu: float) -> None:
    rates = replace(RATES, cpu=cpu, dram=2 * cpu, h2d=cpu)
    update = update_seconds(WORK, rates, ON_CPU)
    forward = phase_seconds(forward_loads(WORK, rates, ALL_KEPT), rates)
    exposed = update - hidden_seconds(WORK, rates, OVERLAPPED, ALL_KEPT)
    assert exposed == pytest.approx(played_through(update, forward) - forward)
    assert 0 < exposed < update
    together = prediction(OVERLAPPED, rates=rates)
    assert together.exposed_optimizer_seconds == pytest.approx(exposed)
    assert sum(together.phase_seconds.values()) == pytest.approx(together.step_seconds)


@pytest.mark.parametrize(
    ("what", "rates", "blocks", "streaming"),
    [
        ("both take the same cores", replace(RATES, copies_use_cores=True), ALL_KEPT, Streaming()),
        ("loads of streamed segments queue behind uploads", RATES, ALL_KEPT, Streaming(host=4)),
        ("activations queue behind states", RATES, Blocks(32, host=8), Streaming()),
    ],
)
def test_an_update_hides_behind_nothing_that_needs_the_same(
    what: str, rates: Rates, blocks: Blocks, streaming: Streaming
) -> None:
    split = OptimizerPlan(cpu_share=0.5, streamed_share=0.5, resident_share=0.0, overlap="Forward")
    assert hidden_seconds(WORK, rates, split, blocks, streaming) == 0.0, what
    assert hidden_seconds(WORK, RATES, split, ALL_KEPT) > 0.0


def test_what_backward_has_updated_is_not_waited_for() -> None:
    window = speculative_window(WORK, RATES, ON_CPU, backward_loads(WORK, RATES, ALL_KEPT, ON_CPU))
    both = OVERLAPPED.model_copy(update={"overlap": "Backward", "speculative_parameters": window})
    assert 0 < window < P
    waited = update_seconds(WORK, RATES, ON_CPU) - hidden_seconds(WORK, RATES, OVERLAPPED, ALL_KEPT)
    rest = update_seconds(WORK, RATES, ON_CPU) - hidden_seconds(WORK, RATES, both, ALL_KEPT)
    assert waited - rest == pytest.approx(window / P * update_seconds(WORK, RATES, ON_CPU))


def test_backward_updates_no_more_than_the_cpu_has_time_for() -> None:
    """28 + 2 bytes a parameter, beside the gradients that arrive: out of place as in place."""
    backward = backward_loads(WORK, RATES, ALL_KEPT, ON_CPU)
    window = speculative_window(WORK, RATES, ON_CPU, backward)
    took = phase_seconds(backward, RATES)
    assert backward[Resource.CPU] + 30 * window / RATES.cpu == pytest.approx(took, rel=1e-6)
    slow = replace(RATES, cpu=10e9)
    assert speculative_window(WORK, slow, ON_CPU, backward_loads(WORK, slow, ALL_KEPT, ON_CPU)) == 0


def test_forward_is_not_hidden_twice() -> None:
    """What both ask of host memory takes its time, however little each waits for the other."""
    rates, blocks = replace(RATES, dram=40e9), Blocks(32, host=32)
    update, forward = update_loads(WORK, rates, ON_CPU), forward_loads(WORK, rates, blocks)
    exposed = update_seconds(WORK, rates, ON_CPU) - hidden_seconds(WORK, rates, OVERLAPPED, blocks)
    least = update[Resource.DRAM] + forward[Resource.DRAM] - phase_seconds(forward, rates)
    assert exposed >= least * (1 - 1e-9)


def test_the_balanced_split_lets_cpu_and_link_end_together() -> None:
    share = balanced_streamed_share(WORK, RATES)
    loads = update_loads(WORK, RATES, OptimizerPlan(cpu_share=1 - share, streamed_share=share, resident_share=0.0))
    assert loads[Resource.CPU] == pytest.approx(loads[Resource.H2D])
    assert 0.4 < share < 0.6


def test_in_place_update_uploads_nothing_and_copies_only_backward_updates() -> None:
    in_place, both = replace(WORK, in_place=True), ON_CPU.model_copy(update={"speculative_parameters": 10**9})
    assert update_loads(in_place, RATES, ON_CPU)[Resource.H2D] == 0.0 < update_loads(WORK, RATES, ON_CPU)[Resource.H2D]
    plain, copied = (update_loads(in_place, RATES, optimizer) for optimizer in (ON_CPU, both))
    assert plain[Resource.DRAM] * RATES.dram == pytest.approx(30 * P)
    for resource, rate in ((Resource.CPU, RATES.cpu), (Resource.DRAM, RATES.dram)):
        assert (copied[resource] - plain[resource]) * rate == pytest.approx(4 * 10**9)


def test_more_is_streamed_where_host_memory_is_the_bound() -> None:
    """A streamed parameter moves 20 bytes of host memory, one updated by the CPU 32."""
    bound = replace(RATES, dram=120e9)
    share = balanced_streamed_share(WORK, bound)
    loads = update_loads(WORK, bound, OptimizerPlan(cpu_share=1 - share, streamed_share=share, resident_share=0.0))
    assert loads[Resource.DRAM] == pytest.approx(loads[Resource.H2D])
    assert share > balanced_streamed_share(WORK, RATES)


def test_nothing_is_streamed_on_a_cpu() -> None:
    """The device is the same memory: streaming only adds copies."""
    assert balanced_streamed_share(WORK, replace(RATES, device=50e9, copies_use_cores=True, cpu=50e9, dram=50e9)) == 0.0


def test_the_balanced_split_beats_both_ends() -> None:
    share = balanced_streamed_share(WORK, RATES)
    best = update_seconds(WORK, RATES, OptimizerPlan(cpu_share=1 - share, streamed_share=share, resident_share=0.0))
    for other in (0.0, share - 0.1, share + 0.1, 1.0):
        split = OptimizerPlan(cpu_share=1 - other, streamed_share=other, resident_share=0.0)
        assert best < update_seconds(WORK, RATES, split)


def test_the_cpu_gets_what_copies_leave_of_host_memory() -> None:
    """Where host memory is the bound, what it moves in the update's time less the copies' 20.25 and 2 bytes."""
    bound = replace(RATES, dram=120e9)
    share = balanced_streamed_share(WORK, bound)
    split = OptimizerPlan(cpu_share=1 - share, streamed_share=share, resident_share=0.0)
    copied = (20.25 * share + 2 * (1 - share)) * P / update_seconds(WORK, bound, split)
    assert beside_copies(WORK, bound, split) == pytest.approx(120e9 - copied)
    assert beside_copies(WORK, bound, split) < 40e9


def test_the_cpu_never_gets_more_than_its_cores_stream() -> None:
    assert beside_copies(WORK, RATES, ON_CPU) == RATES.cpu
    assert beside_copies(WORK, RATES, RESIDENT) == RATES.cpu


def test_short_sequences_outrun_the_link() -> None:
    """Spilling all of an 8 B model at 4 k tokens would need about 140 GB/s: PCIe is the bound, not compute."""
    short = replace(WORK, sequence_length=4096)
    loads = forward_loads(short, RATES, Blocks(32, host=32))
    needed = loads[Resource.D2H] * 50e9 / loads[Resource.COMPUTE]
    assert 120e9 < needed < 180e9
    assert loads[Resource.D2H] > loads[Resource.COMPUTE]


def test_a_few_spilled_blocks_hide_behind_compute() -> None:
    assert prediction(blocks=Blocks(32, host=8)).step_seconds == pytest.approx(prediction().step_seconds)


def test_nvme_is_bound_by_its_writes() -> None:
    predicted = prediction(blocks=Blocks(32, nvme=32))
    assert predicted.bound_by == "disk write"
    assert predicted.exposed_transfer_seconds > 0


def test_without_a_window_copies_come_on_top_of_forward() -> None:
    blocks = Blocks(32, host=8)
    hidden, exposed = prediction(blocks=blocks), prediction(blocks=blocks, overlapped=False)
    extra = 4 * 8 * MOVED / 50e9
    assert exposed.step_seconds - hidden.step_seconds == pytest.approx(extra)


def test_copies_take_the_cores_that_compute_on_a_cpu() -> None:
    loads = {Resource.COMPUTE: 3.0, Resource.D2H: 1.0}
    assert phase_seconds(loads, RATES) == 3.0
    assert phase_seconds(loads, replace(RATES, copies_use_cores=True)) == 4.0


def test_written_bytes_per_day_and_drive_writes() -> None:
    """A job shorter than a day writes what its steps write."""
    blocks = Blocks(32, nvme=1)
    day = predict(WORK, RATES, RESIDENT, blocks, overlapped=True, steps=10**9, drives=Drives(1e12, 5e15))
    short = predict(WORK, RATES, RESIDENT, blocks, overlapped=True, steps=10, drives=Drives(1e12, 5e15))
    per_step = WORK.num_micro_batches * SPILLED
    assert short.nvme_written_bytes_per_day == 10 * per_step
    assert day.nvme_written_bytes_per_day == pytest.approx(per_step * 86400 / day.step_seconds)
    assert day.drive_writes_per_day == day.nvme_written_bytes_per_day / 1e12
    assert day.years_until_rated_writes == pytest.approx(5e15 / (365 * day.nvme_written_bytes_per_day))
    assert prediction().years_until_rated_writes is None


def test_drives_live_as_long_as_the_paper_has_it() -> None:
    """SSDTrain (arXiv 2408.10013), III-D: life = endurance x step time / activations of a step; four drives rated for
    600 TB each. At its 12.1 GB/s through half of every step that is 4.6 days; only with 2.5 times the rating, for
    writes in sequence, and 86 times the cycles, for a day's retention, it is the paper's more than two years."""
    rated_bytes = 4 * 600e12
    found = predict(
        WORK, RATES, RESIDENT, Blocks(32, nvme=8), overlapped=True, steps=10**9, drives=Drives(4e12, rated_bytes)
    )
    activation_bytes = WORK.num_micro_batches * 8 * SPILLED
    life_seconds = rated_bytes * found.step_seconds / activation_bytes
    assert found.years_until_rated_writes == pytest.approx(life_seconds / 86400 / 365)
    assert found.nvme_written_bytes_per_day == pytest.approx(activation_bytes * 86400 / found.step_seconds)
    years_per_rate = found.years_until_rated_writes * activation_bytes / found.step_seconds
    days = 365 * years_per_rate / (12.1e9 / 2)
    assert days == pytest.approx(4.6, abs=0.05)
    assert 2.5 * days == pytest.approx(11.5, abs=0.05)
    assert 2.5 * 86 * days / 365 > 2.0


def test_link_bytes_are_those_of_the_techniques() -> None:
    moved = prediction(ON_CPU, Blocks(32, host=3, nvme=1)).link_bytes
    assert moved["h2d"] == 4 * 4 * MOVED + 2 * P
    assert moved["d2h"] == 4 * 4 * MOVED + 4 * 2 * P
    assert moved["nvme_write"] == moved["nvme_read"] == 4 * SPILLED


def test_one_rank_exchanges_nothing() -> None:
    assert exchange_loads(WORK, RATES)[Resource.NETWORK] == 0.0


def test_ddp_sends_wire_type_gradients_and_receives_float32_sums_per_step() -> None:
    for wire_bytes in (2, 4):
        eight = replace(WORK, world_size=8, wire_bytes=wire_bytes)
        assert exchange_loads(eight, RATES)[Resource.NETWORK] == pytest.approx(7 / 8 * (wire_bytes + 4) * P / 300e9)


def test_backward_hides_the_exchange_between_nodes_but_for_the_first_segments() -> None:
    nodes = replace(WORK, world_size=2)
    whole, layer = exchange_loads(nodes, RATES)[Resource.NETWORK], (P - 2 * 128256 * 4096 - 4096) / 32
    first = (128256 * 4096 + layer) / P  # an embedding costs no FLOPs: both are final when backward ends
    assert exposed_exchange_seconds(nodes, RATES) == pytest.approx(first * whole)
    assert exposed_exchange_seconds(nodes, RATES, 0.0) == pytest.approx(whole)
    slow = replace(RATES, network=1e9)
    left = exposed_exchange_seconds(nodes, slow, 1.0)
    assert 300 * whole - 1.0 <= left <= 300 * whole
    made = predict(nodes, slow, RESIDENT, ALL_KEPT, overlapped=True, steps=9, drives=Drives(1e12))
    backward = phase_seconds(backward_loads(nodes, slow, ALL_KEPT, RESIDENT), slow)
    assert made.phase_seconds["exchange"] == exposed_exchange_seconds(nodes, slow, backward) < 300 * whole
    assert sum(made.phase_seconds.values()) == pytest.approx(made.step_seconds)


def test_nothing_hides_an_exchange_by_the_cores_that_compute() -> None:
    two = replace(WORK, world_size=2, local_ranks=2)
    assert exposed_exchange_seconds(two, RATES, 1e9) == exchange_loads(two, RATES)[Resource.NETWORK]


def test_sharded_on_devices_only_the_first_segment_is_waited_for() -> None:
    """In backward for its gradients, and in the next forward for its parameters, if they are gathered then."""
    embedding = 128256 * 4096 / P
    for strategy, gathers in (("Fsdp", False), ("Zero2", True)):
        two = replace(WORK, world_size=2, local_ranks=2, on_cuda=True, strategy=strategy, wire_bytes=4)
        gathered, scattered = (sent * P / 2 / RATES.network for sent in (2 * gathers, 4))
        assert exchange_loads(two, RATES)[Resource.NETWORK] == pytest.approx(gathered)
        assert scatter_seconds(two, RATES) == pytest.approx(scattered)
        waits = two.num_micro_batches * embedding * scattered
        assert exposed_exchange_seconds(two, RATES, forward_seconds=0.0) == pytest.approx(gathered + waits)
        left = exposed_exchange_seconds(two, RATES) - waits
        assert embedding * gathered <= left <= 1.5 * embedding * gathered + 1e-9  # and one layer


def test_sums_in_host_memory_pass_through_a_cuda_device_in_the_exchange() -> None:
    two = replace(WORK, world_size=2, local_ranks=2, on_cuda=True)
    loads = exchange_loads(two, RATES, P)
    assert (loads[Resource.H2D], loads[Resource.D2H]) == (4 * P / RATES.h2d, 4 * P / RATES.d2h)
    assert exposed_exchange_seconds(two, RATES, 0.0, P) == sum(loads.values())
    assert exposed_exchange_seconds(two, RATES, 1e9, P) < 0.1 * sum(loads.values())  # behind backward
    on_cpus = exchange_loads(replace(two, on_cuda=False), RATES, P)
    assert (on_cpus[Resource.H2D], on_cpus[Resource.D2H]) == (0.0, 0.0)


def test_fsdp_gathers_parameters_in_every_forward() -> None:
    eight = replace(WORK, world_size=8, strategy="Fsdp")
    assert forward_loads(eight, RATES, Blocks(32))[Resource.NETWORK] == pytest.approx(7 / 8 * 2 * P / 300e9)
    assert exchange_loads(eight, RATES)[Resource.NETWORK] == 0.0


def test_parts_of_the_prediction_add_up() -> None:
    predicted = prediction(ON_CPU, Blocks(32, recomputed=4, host=20))
    parts = predicted.compute_seconds + predicted.exposed_transfer_seconds + predicted.exposed_optimizer_seconds
    assert parts == pytest.approx(predicted.step_seconds)


@pytest.mark.parametrize(("architecture", "extra_uses"), [("gpt2", 1), ("bert", 1), ("llama", 1)])
def test_a_tied_table_sends_a_gradient_down_for_each_use(architecture: str, extra_uses: int) -> None:
    config = {"architecture": architecture, "hiddenSize": 64, "numLayers": 4, "numHeads": 4, "vocabSize": 512}
    found = {}
    for tied in (False, True):
        shape = model_shape(ModelConfig.model_validate({**config, "tieWordEmbeddings": tied}), "bfloat16", "Cpu")
        work = Workload(shape, 4, 128, 2)
        made = predict(work, RATES, ON_CPU, Blocks(4), overlapped=True, steps=10, drives=Drives(1e12))
        found[tied] = made.link_bytes["d2h"] - 2 * 2 * shape.num_trained
    assert found == {False: 0, True: 2 * 2 * extra_uses * 512 * 64}


def test_ranks_beyond_the_cores_of_a_cpu_share_them_also_for_what_an_operation_costs() -> None:
    node = replace(resolve_node("cpu"), num_cores=2)
    alone, both, six = (rank_rates(node, ranks, 1, "bfloat16").operation_overhead for ranks in (1, 2, 6))
    assert 0 < alone == both == six / 3


def test_encrypted_bytes_pass_the_cipher_and_the_disk_one_after_the_other() -> None:
    """Two ranks share a disk of 6 GB/s; each has a thread for each of two volumes, of 4 GB/s: 1 / (1/3 + 1/8)."""
    node = resolve_node("cpu")
    node = replace(node, nvme_read_bytes_per_second=6e9, nvme_write_bytes_per_second=6e9, cipher_bytes_per_second=4e9)
    plain, encrypted = (rank_rates(node, 2, 1, "bfloat16", threads) for threads in (0, 2))
    assert (plain.read, plain.write) == (3e9, 3e9)
    assert (encrypted.read, encrypted.write) == (pytest.approx(24e9 / 11), pytest.approx(24e9 / 11))
    assert rank_rates(replace(node, nvme_read_bytes_per_second=0.0), 1, 1, "bfloat16", 1).read == 0, "no disk"
