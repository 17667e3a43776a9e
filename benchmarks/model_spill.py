"""Several models on one node: *simulated* in virtual time, with the catalog's rates and shared root ports; and
*measured*, as far as two cores can really run it.

Simulated:

sets     equal and mixed members that the host updates, on one device and on several, under every policy of
         member_schedule.py. `simulated_vs_bound_max` is the makespan over the bound that no schedule can beat
         (bound_seconds), for the policy that `fastest` chooses by this simulation among those that hold one member's
         activations at a time. `simulated_vs_best_max` is its makespan over the better of two rivals: one member after
         another, and shard-level LRTF.
parts    2 members on 8 devices, each step's micro-batches divided among 4 devices, over LRTF with whole members.
         `parts_vs_lrtf` is that of the cell that compute limits (32,768 tokens); where the host's update or shared
         ports are the limit, parts gain nothing.
base     LoRA members on one frozen base that visit each segment together, compared with one at a time. The expected
         gain is min(members, H / C) where transfer H is the limit (`shared_base_error_max` is the error).
grid     Hydra's grid (arXiv 2110.08633): 6 learning rates x 2 batch sizes of GPT-2-XL, context 512, on the catalog's
         node of eight A100 of 40 GB, as the planner places it. Compared with the zero-transfer ceiling (compute over
         devices, or the longest member), sequential model parallelism (a model cut over all devices, one works at a
         time), a pipeline with a flush (micro-batches of 1), and shard-level LRTF with the pilot runs' shards. SGD
         without momentum as in Hydra's scripts, updated on the device. The same grid with AdamW, whose host update has
         its own bound, is printed without a limit.

Simulated seconds leave out what a real device adds (launches, contention of host memory between copies and update).

Measured:

two processes   sequential model parallelism, the grid's rival, really run (model_parallel.py): a chain cut over two
                processes, and the same chain in one. `model_parallel_vs_simulated` is a step over what the grid's
                arithmetic predicts for it from the rates of the same round; `model_parallel_identical`: all losses
                are `==`.

sweep           12 small models on real text (6 learning rates, with and without dropout) with a device budget for
                one (measured_sweep.py): one sweep, over training one after the other (`sweep_total_vs_sequential`);
                the time until all have reported after 20 % of their steps, over the whole time of one after the other
                (`sweep_signal_vs_sequential`), or over the time until all have reported there (`..._of_signal`); the
                whole sweep with halving at 12.5, 25 and 50 % (`sweep_halving_vs_sequential`). `members_identical`:
                losses, evaluations and final tensors of every member are `==` those of its solo run.
                `halving_misses`: the number of seeds, of 5, with which halving finds another best member than the
                full sweep.

Compute and update share one core here, so turns cannot be faster than one after the other; but parking must not make
them slower, either.

--quick simulates one cell of the sets instead of five, and the grid with SGD under one policy only; its sweep has 2
members of 10 steps, which shows that they are identical but is too short for ratios.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import measured_sweep
import model_parallel
import paired
from member_schedule import (
    Machine,
    MemberWork,
    SegmentWork,
    TurnPolicy,
    bound_seconds,
    ceiling_seconds,
    machine_of,
    merged,
    parted,
    pilot_shards,
    visited_together,
)
from member_simulation import STEPWISE, Outcome, fastest, simulate
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import NodeSpec, resolve_node
from spillway.planning.model_shape import ModelShape, shape_of
from spillway.planning.planner import make_plan
from spillway.units import format_bytes, format_seconds

AT_MOST = {
    "simulated_vs_bound_max": 1.07,
    "simulated_vs_best_max": 1.01,
    "shared_base_error_max": 0.05,
    "model_parallel_vs_simulated": 1.25,
    "sweep_total_vs_sequential": 1.05,
    "sweep_signal_vs_sequential": 0.23,
    "sweep_halving_vs_sequential": 0.35,
}
AT_LEAST = {
    "grid_fraction_of_ceiling": 0.9,
    "grid_vs_sequential": 7.0,
    "grid_vs_pipeline": 1.5,
    "model_parallel_vs_simulated": 0.8,
    "model_parallel_identical": 1.0,
    "members_identical": 1.0,
}
NOT_QUICK = ("sweep_total_vs_sequential", "sweep_signal_vs_sequential", "sweep_halving_vs_sequential")
NUM_SEGMENTS, NUM_STEPS, NUM_MICRO_BATCHES = 32, 24, 16
NUM_SLOTS = 8
"""slots of one segment each: 3 % of an A100's memory for a member of 3e9 parameters. With two slots, a shared root port
is idle in backward and too slow in forward"""
SETS: Mapping[str, tuple[float, ...]] = {
    "4 equal": (3e9,) * 4,
    "2, 4 : 1": (4e9, 1e9),
    "1 large, 4 small": (4e9, 1e9, 1e9, 1e9, 1e9),
    "6 mixed": (6e9, 3e9, 3e9, 1.5e9, 1.5e9, 0.7e9),
}
"""parameters of each member"""
Cells = Sequence[tuple[str, int]]
CELLS = (("h200", 8192), ("h200", 16384), ("h200", 32768), ("a100", 8192), ("rtx-4090", 8192))
"""node class and tokens of a step"""
QUICK_CELLS = CELLS[2:3]
DEVICES = (1, 2, 4)
UPDATE_BYTES = 28
"""bytes of host memory traffic per parameter: AdamW with gradients of 2 bytes"""
LEARNING_RATES = ("3e-4", "1e-4", "5e-5", "6e-5", "1e-5", "2e-5")
BATCH_SIZES = (16, 8)
CONTEXT, HIDDEN = 512, 1600
GRIDS = (("Sgd", "grid"), ("AdamW", "grid_adamw"))
"""optimizer, and prefix of its figures"""
QUICK_GRIDS = GRIDS[:1]
SECONDS, QUICK_SECONDS = 60.0, 5.0
"""for which model parallelism is measured"""
ROUNDS, SEEDS = 3, range(5)
"""rounds and seeds of the sweep"""
GRID_TOKENS = 16 * CONTEXT * 120
"""tokens that each member of the grid trains on"""


# --- sets -------------------------------------------------------------------------------------------------------------


def streamed_member(name: str, num_parameters: float, tokens: int, node: NodeSpec) -> MemberWork:
    """Returns a member whose parameters are streamed in bfloat16, with recomputed blocks and updates on the host."""
    of_one = num_parameters / NUM_SEGMENTS
    pass_seconds = 2 * of_one * tokens / node.bfloat16_flops_per_second
    moved, update = int(2 * of_one), UPDATE_BYTES * of_one / node.cpu_bytes_per_second
    return MemberWork(
        name, (SegmentWork(pass_seconds, 3 * pass_seconds, moved, moved, update),) * NUM_SEGMENTS, NUM_STEPS
    )


def sets(cells: Cells) -> Iterator[tuple[str, list[MemberWork], Machine]]:
    for name, tokens in cells:
        node = resolve_node(name)
        for label, sizes in SETS.items():
            for num_devices in [number for number in DEVICES if number <= len(sizes)]:
                machine = replace(machine_of(node), num_devices=num_devices, num_slots=NUM_SLOTS)
                works = [streamed_member(f"m{i}", size, tokens, node) for i, size in enumerate(sizes)]
                yield f"{name:9}{tokens:6}  {label:18}{num_devices}", works, machine


def measure_sets(cells: Cells) -> dict[str, float]:
    print(f"makespan over the bound, {NUM_STEPS} steps each\n{'node':9}{'tokens':>6}  {'members':18}devices", end="")
    print("".join(f"{policy:>12}" for policy in TurnPolicy))
    over_bound, over_best = list[float](), list[float]()
    for label, works, machine in sets(cells):
        bound = bound_seconds(works, machine)
        found = {policy: simulate(works, machine, policy).seconds / bound for policy in TurnPolicy}
        ours = min(found[policy] for policy in STEPWISE)
        print(f"{label:42}" + "".join(f"{found[policy]:12.3f}" for policy in TurnPolicy))
        over_bound.append(ours)
        over_best.append(ours / min(found[TurnPolicy.SEQUENTIAL], found[TurnPolicy.SHARD_LRTF]))
    return {"simulated_vs_bound_max": max(over_bound), "simulated_vs_best_max": max(over_best)}


def measure_parts(cells: Cells) -> dict[str, float]:
    """Compares members in parts with whole members segment by segment (LRTF), for fewer members than devices."""
    ratios = dict[tuple[int, str], float]()
    print("\nfewer members than devices: seconds of members in parts over shard-level LRTF's of whole ones")
    for name, tokens in cells:
        node = resolve_node(name)
        machine = replace(machine_of(node), num_devices=8, num_slots=NUM_SLOTS)
        works = [streamed_member(f"m{i}", 3e9, tokens, node) for i in range(2)]
        parts = parted(works, machine, NUM_MICRO_BATCHES)
        ours, whole = fastest(parts, machine)[1].seconds, simulate(works, machine, TurnPolicy.SHARD_LRTF).seconds
        ratios[tokens, name] = ours / whole
        print(f"{name:9}{tokens:6}  2 members in {parts[0].num_parts} parts each, 8 devices  {ours / whole:.3f}")
    return {"parts_vs_lrtf": ratios[max(ratios)]}


# --- a shared base ----------------------------------------------------------------------------------------------------


def adapter(name: str, num_parameters: float, tokens: int, node: NodeSpec) -> MemberWork:
    """Returns a LoRA member on a streamed frozen base: no gradients of the base, and an update too small to count."""
    of_one = num_parameters / NUM_SEGMENTS
    pass_seconds = 2 * of_one * tokens / node.bfloat16_flops_per_second
    return MemberWork(
        name, (SegmentWork(pass_seconds, 2 * pass_seconds, int(2 * of_one), 0, 0.0),) * NUM_SEGMENTS, NUM_STEPS
    )


def measure_shared_base() -> dict[str, float]:
    node = resolve_node("h200")
    machine = replace(machine_of(node), num_devices=1)
    print(f"\nadapters on one base of 14e9 parameters, {node.name}: one at a time over together (and min(M, H / C))")
    errors = list[float]()
    for tokens in (256, 512, 1024, 2048, 4096, 8192):
        line = f"{tokens:6} tokens"
        for count in (1, 2, 4, 8, 16):
            works = [adapter(f"a{i}", 14e9, tokens, node) for i in range(count)]
            apart = simulate(works, machine, TurnPolicy.SEQUENTIAL).seconds
            together = simulate([visited_together(works)], machine, TurnPolicy.READINESS).seconds
            transfer = works[0].upload_bytes / machine.h2d_bytes_per_second
            compute = works[0].compute_seconds
            expected = count * max(transfer, compute) / max(transfer, count * compute)
            errors.append(abs(apart / together / expected - 1.0))
            line += f"{apart / together:8.2f} ({expected:5.2f})"
        print(line)
    return {"shared_base_error_max": max(errors)}


# --- Hydra's grid -----------------------------------------------------------------------------------------------------


def grid_job(batch_size: int, learning_rate: str, optimizer: str) -> TrainingJob:
    rules = {"Sgd": {"name": "SgdMomentum", "momentum": "0"}, "AdamW": {"name": "AdamW"}}
    return TrainingJob.model_validate({
        "apiVersion": "spillway.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "grid"},
        "spec": {
            "model": {
                "config": {
                    "architecture": "gpt2", "hiddenSize": HIDDEN, "numLayers": 48, "numHeads": 25, "vocabSize": 50257,
                },
            },
            "data": {"text": {"claim": "corpus"}},
            "training": {
                "steps": GRID_TOKENS // (batch_size * CONTEXT),
                "sequenceLength": CONTEXT,
                "globalBatchSize": batch_size,
                "microBatchSize": 1,
                "optimizer": {**rules[optimizer], "learningRate": learning_rate, "weightDecay": "0"},
            },
            "parallelism": {"nodes": 1, "devicesPerNode": 1},
        },
    })  # fmt: skip


def planned_member(name: str, job: TrainingJob, node: NodeSpec) -> tuple[MemberWork, MemoryPlan]:
    """Returns a member as the planner places it on one device of `node`, and its plan."""
    plan, shape = make_plan(job, node, explained=False), shape_of(job.spec, "Cuda")
    assert isinstance(plan, MemoryPlan), plan
    tokens, spec = job.spec.training.global_batch_size * CONTEXT, job.spec.training
    homes = plan.parameters.homes or (Tier.DEVICE,) * shape.num_segments
    answers = plan.activations.answers or ("keep",) * shape.num_segments
    segments = []
    for one, home, answer in zip(shape.segments, homes, answers, strict=True):
        forward = tokens * one.forward_flops_per_token(CONTEXT) / node.bfloat16_flops_per_second
        backward = tokens * one.backward_flops_per_token(CONTEXT) / node.bfloat16_flops_per_second
        again = forward if answer == "recompute" else 0.0
        by_host = plan.optimizer.updated_by_cpu
        update = by_host * UPDATE_BYTES * one.num_trained / node.cpu_bytes_per_second
        moved = 0 if home is Tier.DEVICE else one.parameter_bytes
        down = int(2 * one.num_trained * by_host)
        # Parameters that the host updated are uploaded even if their segment is resident.
        segments.append(
            SegmentWork(forward, backward + again, moved or int(by_host * one.parameter_bytes / 2), down, update)
        )
    resident = sum(one.parameter_bytes for one, home in zip(shape.segments, homes, strict=True) if home is Tier.DEVICE)
    return MemberWork(name, tuple(segments), spec.steps, resident), plan


def grid(optimizer: str, node: NodeSpec) -> list[MemberWork]:
    found = []
    for batch_size in BATCH_SIZES:
        for rate in LEARNING_RATES:
            member, plan = planned_member(f"{batch_size}-{rate}", grid_job(batch_size, rate, optimizer), node)
            found.append(member)
        placed = "resident" if not plan.parameters.streams else "streamed"
        print(
            f"  batch {batch_size:2}: parameters {placed}, update by the host {plan.optimizer.updated_by_cpu:.0%}, "
            f"a step {member.compute_seconds:.2f} s of compute, {member.num_steps} steps"
        )
    return found


def model_parallel_seconds(works: Sequence[MemberWork], node: NodeSpec) -> float:
    """Seconds of all members, one after the other, each cut over all devices."""
    rate = node.interconnect_bytes_per_second
    return sum(
        work.num_steps * model_parallel_step(work.compute_seconds, node.num_devices, boundary_bytes(work) / rate)
        for work in works
    )


def model_parallel_step(compute_seconds: float, num_devices: int, hop_seconds: float) -> float:
    """Seconds of a step of a model that is cut over all devices, one of which works at a time: each sends a boundary to
    the next one and gets its gradient back."""
    return compute_seconds + 2 * (num_devices - 1) * hop_seconds


def pipeline_seconds(works: Sequence[MemberWork], node: NodeSpec) -> float:
    """Seconds of all members, one after the other, in a pipeline with one flush per step (GPipe). The stages are cut so
    that the longest one is as short as possible."""
    total = 0.0
    for work in works:
        seconds = [one.forward_seconds + one.backward_seconds for one in work.segments]
        batches = batch_of(work)
        total += work.num_steps * (batches + node.num_devices - 1) * longest_stage(seconds, node.num_devices) / batches
    return total


def longest_stage(seconds: Sequence[float], num_stages: int) -> float:
    """Returns the seconds of the longest of `num_stages` consecutive stages, cut so that it is as short as possible.
    Uses bisection."""
    low, high = max(seconds), sum(seconds)
    for _ in range(60):
        middle = (low + high) / 2
        stages, used = 1, 0.0
        for one in seconds:
            if used + one > middle:
                stages, used = stages + 1, 0.0
            used += one
        low, high = (low, middle) if stages <= num_stages else (middle, high)
    return high


def batch_of(work: MemberWork) -> int:
    return int(work.name.split("-")[0])


def boundary_bytes(work: MemberWork) -> int:
    """Bytes that a layer passes to the next one for a whole batch in bfloat16."""
    return 2 * HIDDEN * CONTEXT * batch_of(work)


def measure_grid(optimizer: str, quick: bool) -> dict[str, float]:
    node = resolve_node("a100-40")
    machine = machine_of(node)
    print(f"\nHydra's grid with {optimizer}, {node.num_devices} devices of {node.name}")
    works = grid(optimizer, node)
    if quick:
        policy, ours = TurnPolicy.READINESS, simulate(works, machine, TurnPolicy.READINESS)
    else:
        policy, ours = fastest(works, machine)
    rivals = {
        "zero-transfer ceiling": ceiling_seconds(works, machine),
        "bound": bound_seconds(works, machine),
        "shard-level LRTF, pilot shards": lrtf_seconds(works, machine, node),
        "pipeline": pipeline_seconds(works, node),
        "sequential model parallelism": model_parallel_seconds(works, node),
    }  # fmt: skip
    print(
        f"  {f'ours ({policy})':32}{ours.seconds:10.1f} s, {utilisation(ours, machine):.1%} busy, "
        f"{ours.num_switches} moves"
    )
    for name, seconds in rivals.items():
        print(f"  {name:32}{seconds:10.1f} s   {seconds / ours.seconds:.3f} of ours")
    return {
        "fraction_of_ceiling": rivals["zero-transfer ceiling"] / ours.seconds,
        "vs_bound": ours.seconds / rivals["bound"],
        "vs_lrtf": rivals["shard-level LRTF, pilot shards"] / ours.seconds,
        "vs_pipeline": rivals["pipeline"] / ours.seconds,
        "vs_sequential": rivals["sequential model parallelism"] / ours.seconds,
    }


def lrtf_seconds(works: Sequence[MemberWork], machine: Machine, node: NodeSpec) -> float:
    """Seconds of Hydra's own way: shards as large as fit beside the double buffer, uploaded and brought back at each
    visit (in float32 8 bytes per parameter and step, up and down)."""
    shape = shape_of(grid_job(8, "1e-4", "Sgd").spec, "Cuda")
    shards = pilot_shards(training_bytes(shape), node.device_bytes // 3)
    moved = [2 * one.parameter_bytes for one in shape.segments]  # float32
    sharded = [
        replace(work, resident_bytes=0, segments=merged(
            [replace(one, upload_bytes=nbytes, download_bytes=nbytes, update_seconds=0.0)
             for one, nbytes in zip(work.segments, moved, strict=True)], shards,
        ))
        for work in works
    ]  # fmt: skip
    return simulate(sharded, machine, TurnPolicy.SHARD_LRTF).seconds


def training_bytes(shape: ModelShape) -> list[int]:
    """Bytes of each segment while it runs: float32 parameters and gradients, and the saved tensors of 16 sequences."""
    return [8 * one.num_parameters + 16 * CONTEXT * one.saved_bytes_per_token for one in shape.segments]


def utilisation(outcome: Outcome, machine: Machine) -> float:
    return outcome.busy_seconds["compute"] / (outcome.seconds * machine.num_devices)


# --- measured ---------------------------------------------------------------------------------------------------------


def measure_model_parallel(seconds: float) -> dict[str, float]:
    found = model_parallel.measured(seconds)
    predicted = [
        model_parallel_step(whole, model_parallel.NUM_RANKS, hop)
        for whole, hop in zip(found.whole, found.hop, strict=True)
    ]
    ratio = paired.paired_ratio(predicted, found.cut)
    print(
        f"\ntwo processes, measured: a chain in one {format_seconds(paired.median(found.whole))} a step, cut over both "
        f"{format_seconds(paired.median(found.cut))}, a hop of {format_bytes(model_parallel.BOUNDARY_BYTES)} "
        f"{format_seconds(paired.median(found.hop))}\n  measured over simulated: {ratio}"
    )
    return {
        "model_parallel_vs_simulated": ratio.median,
        "model_parallel_vs_simulated_low": ratio.low,
        "model_parallel_vs_simulated_high": ratio.high,
        "model_parallel_identical": float(found.are_same_losses),
    }


def measure_sweep(quick: bool) -> dict[str, float]:
    if quick:
        found = measured_sweep.measured(measured_sweep.QUICK, 1)
        measured_sweep.show(found)
        return {"members_identical": float(not found.differences)}
    found = measured_sweep.measured(measured_sweep.FULL, ROUNDS)
    measured_sweep.show(found)
    misses = measured_sweep.halving_misses(measured_sweep.OF_SEEDS, SEEDS)
    print(f"  halving ended with another best member than the full sweep with {len(misses)} of {len(SEEDS)} seeds")
    for line in misses:
        print(f"    {line}")
    alone = [one.seconds for one in found.alone]
    ratios = {
        "total_vs_sequential": (alone, [one.seconds for one in found.turns]),
        "signal_vs_sequential": (alone, [one.reported_seconds for one in found.turns]),
        "signal_vs_sequential_of_signal": (
            [one.reported_seconds for one in found.alone], [one.reported_seconds for one in found.turns],
        ),
        "halving_vs_sequential": (alone, [one.seconds for one in found.halving]),
    }  # fmt: skip
    figures = dict[str, float]()
    for name, (sequential, ours) in ratios.items():
        ratio = paired.paired_ratio(sequential, ours)
        print(f"  {name}: {ratio}")
        figures[f"sweep_{name}"] = ratio.median
    return figures | {"members_identical": float(not found.differences), "halving_misses": float(len(misses))}


def measure(quick: bool) -> dict[str, float]:
    figures = measure_model_parallel(QUICK_SECONDS if quick else SECONDS)
    figures |= measure_sweep(quick)
    cells = QUICK_CELLS if quick else CELLS
    figures |= measure_sets(cells) | measure_parts(cells) | measure_shared_base()
    for optimizer, prefix in QUICK_GRIDS if quick else GRIDS:
        figures |= {f"{prefix}_{name}": value for name, value in measure_grid(optimizer, quick).items()}
    return figures


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("model_spill", __doc__, measure, at_most=AT_MOST, at_least=AT_LEAST, not_quick=NOT_QUICK)
