"""What the planner decides, and that it never decides something that does not fit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.job_documents import LLAMA_70B, job
from cases.nodes import products_only
from harness.depth import at, examples
from harness.places import ROOT
from spillway.api.load import load_job
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import UserError
from spillway.feedback.profiles import with_rates
from spillway.plan import Infeasible, MemoryPlan, Policy, Tier
from spillway.planning.bounds import Bounds
from spillway.planning.candidates import TIE, Timed, best, timed
from spillway.planning.explain import lacking
from spillway.planning.hardware import Link, NodeSpec, local_node, resolve_node
from spillway.planning.model_shape import shape_of
from spillway.planning.planner import NO_OVERRIDES, Overrides, ask, make_plan, shared_memory
from spillway.planning.search import Search
from spillway.planning.workload import ALLOCATOR_BYTES
from spillway.units import MIB, parse_quantity

GIB = 1 << 30
PRICED = local_node(2, 4 * GIB, 4 * GIB, 64 * GIB)
LOCAL = products_only(2, 4 * GIB, 4 * GIB, 64 * GIB)
SLOW = replace(LOCAL, bfloat16_flops_per_second=1e10)
"""too slow to recompute anything"""
SMALL_HEAD = {"spec.model.config.vocabSize": 512, "spec.model.config.numLayers": 8}
"""a model whose blocks, not its logits, are what does not fit"""
LLAMA_8B = {
    "spec.model.config": {
        "architecture": "llama", "hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "numKeyValueHeads": 8,
        "intermediateSize": 14336, "vocabSize": 128256,
    },
    "spec.training.sequenceLength": 4096, "spec.training.globalBatchSize": 8, "spec.training.microBatchSize": 1,
}  # fmt: skip
TOLERANCE = 1.02
"""plans within 1 % count as equally fast, and shares have four digits"""


def plan(
    changes: dict[str, Any] | None = None, node: NodeSpec = LOCAL, overrides: Overrides = NO_OVERRIDES
) -> MemoryPlan:
    decided = make_plan(job(changes), node, overrides)
    assert isinstance(decided, MemoryPlan), decided
    return decided


def infeasible(changes: dict[str, Any], node: NodeSpec = LOCAL) -> Infeasible:
    decided = make_plan(job(changes), node)
    assert isinstance(decided, Infeasible), decided
    return decided


def budget(device: str, host: str = "4Gi", nvme: str = "64Gi") -> dict[str, Any]:
    return {"spec.memory.budget": {"device": device, "host": host, "nvme": nvme}}


def count(decided: MemoryPlan, answer: Policy) -> int:
    return sum(given is answer for given in decided.activations.answers)


def test_a_job_that_fits_keeps_everything_on_the_device() -> None:
    decided = plan()
    assert not decided.spills
    assert decided.optimizer.resident_share == 1.0
    assert decided.activations.answers == ()


GPU = resolve_node("h100")


@pytest.mark.parametrize(
    ("node", "asked", "placement", "expected"),
    [
        (GPU, "Auto", "Host", "Forward"),
        (GPU, "None", "Host", "None"),
        (LOCAL, "Auto", "Host", "None"),
        (LOCAL, "Forward", "Host", "Forward"),
        (LOCAL, "Forward", "Device", "None"),
    ],
)
def test_update_overlaps_forward_where_it_pays_or_the_spec_asks_for_it(
    node: NodeSpec, asked: str, placement: str, expected: str
) -> None:
    decided = plan({"spec.memory.advanced.optimizer": {"placement": placement, "overlap": asked}}, node)
    assert decided.optimizer.overlap == expected
    (reason,) = [reason for reason in decided.reasons if reason.startswith("overlap:")]
    if not decided.optimizer.offloads:
        assert reason == (
            "overlap: none, because all states are on the device, which updates them itself (the spec asks for Forward)"
        )
    alone = plan({"spec.memory.advanced.optimizer": {"placement": placement, "overlap": "None"}}, node)
    assert decided.bytes == alone.bytes
    if node is GPU and expected == "Forward":
        assert decided.prediction.step_seconds < alone.prediction.step_seconds


def test_a_plan_says_why_nothing_overlaps_its_update() -> None:
    host = {"spec.memory.advanced.optimizer.placement": "Host"}
    zero = {"spec.parallelism": {"devicesPerNode": 2, "strategy": "Zero2"}}
    for changes, node, why in ((host, LOCAL, "same cores"), (host | zero, resolve_node("8xh100"), "of all ranks")):
        (reason,) = [reason for reason in plan(changes, node).reasons if reason.startswith("overlap:")]
        assert reason.endswith(why)


UNCLIPPED = {"spec.training.gradientClipping": 0, "spec.memory.advanced.optimizer.placement": "Host"}


def test_backward_updates_where_nothing_is_clipped_or_the_spec_asks_for_it() -> None:
    clipped = {"spec.memory.advanced.optimizer.placement": "Host"}
    forward, backward = plan(clipped, GPU), plan(UNCLIPPED, GPU)
    asked = plan(clipped | {"spec.memory.advanced.optimizer.overlap": "Backward"}, LOCAL)
    assert [decided.optimizer.overlap for decided in (forward, backward, asked)] == ["Forward", "Backward", "Backward"]
    assert backward.optimizer.speculative_parameters > 0
    assert backward.prediction.step_seconds < forward.prediction.step_seconds
    more = backward.bytes[Tier.HOST].total - forward.bytes[Tier.HOST].total
    assert more >= 14 * backward.optimizer.speculative_parameters


def test_the_second_states_fit_in_the_host_memory_that_is_left() -> None:
    whole = plan(UNCLIPPED, GPU)
    needed, window = whole.bytes[Tier.HOST].total, whole.optimizer.speculative_parameters
    for missing in (4 * window, 13 * window):
        decided = plan(UNCLIPPED | budget("4Gi", host=str(needed - missing)), GPU)
        assert decided.bytes[Tier.HOST].total <= needed - missing
        assert decided.optimizer.speculative_parameters < window
    least = plan({"spec.memory.advanced.optimizer.placement": "Host"}, GPU).bytes[Tier.HOST].total
    assert plan(UNCLIPPED | budget("4Gi", host=str(least)), GPU).optimizer.overlap == "Forward"


def test_what_streams_cannot_be_updated_before_it_counts() -> None:
    changes = {
        "spec.memory.advanced.optimizer.overlap": "Backward",
        "spec.memory.advanced.parameters": {"placement": "Stream"},
    }
    with pytest.raises(UserError, match="streamed parameters cannot be updated during"):
        plan(changes)
    assert not plan(
        {"spec.memory.advanced.optimizer.overlap": "Backward", "spec.memory.advanced.optimizer.placement": "Host"}
    ).parameters.streams


def test_ranks_cannot_update_before_they_have_added_up_their_gradients() -> None:
    changes = {"spec.memory.advanced.optimizer.overlap": "Backward", "spec.parallelism": {"devicesPerNode": 2}}
    with pytest.raises(UserError, match="2 ranks must sum their gradients"):
        plan(changes, resolve_node("8xh100"))
    free = plan(UNCLIPPED | {"spec.parallelism": {"devicesPerNode": 2}}, resolve_node("8xh100"))
    assert free.optimizer.overlap == "Forward"


def test_a_small_budget_moves_or_recomputes_something() -> None:
    decided = plan(budget("100Mi"))
    assert decided.spills
    assert decided.bytes[Tier.DEVICE].total <= 100 * MIB


def test_plan_prefers_host_over_nvme_when_both_fit() -> None:
    decided = plan(SMALL_HEAD | budget("80Mi"), SLOW)
    assert count(decided, Policy.HOST) > 0
    assert count(decided, Policy.NVME) == 0


IN_HOST = {"spec.memory.advanced.optimizer.placement": "Host"}


def test_nvme_takes_what_host_memory_cannot() -> None:
    decided = plan(SMALL_HEAD | budget("50Mi", host="115Mi") | IN_HOST, SLOW)
    assert count(decided, Policy.NVME) > 0
    assert decided.bytes[Tier.HOST].total <= 115 * MIB


@pytest.mark.ci
def test_states_fill_host_memory_before_the_rest_goes_to_nvme() -> None:
    """The shorter host memory is, the more states are on NVMe; where it holds all, none."""
    shares = []
    to_host = {"spec.memory.advanced.activations.policy": "Host"}
    for host in ("180Mi", "170Mi", "160Mi", "150Mi", "140Mi"):
        decided = plan(SMALL_HEAD | to_host | budget("60Mi", host=host), SLOW)
        assert decided.bytes[Tier.HOST].total <= parse_quantity(host)
        shares.append(decided.optimizer.nvme_share)
    assert shares == sorted(shares)
    assert shares[0] == 0.0 < shares[1]


@pytest.mark.ci
def test_states_go_to_nvme_when_host_memory_fits_only_accumulators() -> None:
    """Nothing else fits: without NVMe host memory is what is missing, and so it is said."""
    short = SMALL_HEAD | budget("50Mi", host="60Mi")
    decided = plan(short, SLOW)
    assert decided.optimizer.nvme_share > 0.5
    assert any("each update reads and writes" in reason for reason in decided.reasons)
    without = infeasible(short | budget("50Mi", host="60Mi", nvme="0"), SLOW)
    assert without.missing_bytes[Tier.HOST] > 0
    assert "spec.memory.budget.nvme" in without.nearest


def test_states_forced_to_nvme_are_all_there_and_their_writes_are_counted() -> None:
    forced = {"spec.memory.advanced.optimizer.placement": "Nvme", "spec.training.steps": 10**8}
    decided = plan(forced)
    num_parameters = ask(job(forced), LOCAL).shape.num_trained
    assert decided.optimizer.nvme_share == 1.0
    assert decided.bytes[Tier.NVME].optimizer_states >= 12 * num_parameters
    steps_a_day = 86400 / decided.prediction.step_seconds
    assert decided.prediction.nvme_written_bytes_per_day == pytest.approx(12 * num_parameters * steps_a_day)
    assert decided.prediction.link_bytes["nvme_read"] == decided.prediction.link_bytes["nvme_write"]


@pytest.mark.ci
def test_states_are_not_sent_to_drives_that_they_would_wear_out() -> None:
    short = SMALL_HEAD | budget("50Mi", host="60Mi") | {"spec.training.steps": 10**8}
    sparing, worn = (
        infeasible(short, replace(SLOW, nvme_bytes=4 * GIB)),
        plan(short, replace(SLOW, nvme_bytes=GIB << 20)),
    )
    assert "driveWritesPerDay" in sparing.nearest
    assert lacking(sparing, "here").startswith(
        "tiny does not fit here: every plan within the budgets writes more than "
    )
    assert any("drive writes per day, above the limit of 1 (spec" in one.reason for one in sparing.alternatives)
    assert worn.optimizer.nvme_share > 0.5
    forced = {"spec.memory.advanced.activations.policy": "Recompute"}
    assert "driveWritesPerDay" in infeasible(short | forced, replace(SLOW, nvme_bytes=4 * GIB)).nearest


def test_nothing_fits_is_said_with_the_bytes_that_nvme_lacks() -> None:
    forced = {"spec.memory.advanced.optimizer.placement": "Nvme"}
    decided = infeasible(forced | budget("1Gi", nvme="20Mi"))
    assert decided.missing_bytes[Tier.NVME] > 12 * ask(job(forced), LOCAL).shape.num_trained - 20 * MIB
    assert set(decided.missing_bytes) == {Tier.NVME}
    field, _, amount = decided.nearest.split(" or ")[0].partition(": ")
    assert field == "spec.memory.budget.nvme"
    plan(forced | budget("1Gi", nvme=amount))


def test_a_fast_device_recomputes_instead_of_copying() -> None:
    decided = plan(SMALL_HEAD | budget("80Mi"), replace(LOCAL, bfloat16_flops_per_second=1e14))
    assert count(decided, Policy.RECOMPUTE) > 0
    assert count(decided, Policy.HOST) == 0


def test_the_first_blocks_go_farthest_and_the_last_are_kept() -> None:
    answers = list(plan(SMALL_HEAD | budget("80Mi", host="120Mi"), SLOW).activations.answers)
    order = [Policy.NVME, Policy.HOST, Policy.RECOMPUTE, Policy.KEEP]
    assert answers[1:-1] == sorted(answers[1:-1], key=order.index)


def test_of_equally_fast_plans_the_one_that_moves_least_wins() -> None:
    question = ask(job(SMALL_HEAD | budget("80Mi")), SLOW)
    search = Search(question)
    choices = [timed(question, one) for one in search.all_candidates() if not one.missing]
    chosen, fastest = best(choices), min(choices, key=lambda choice: choice.seconds)
    near = [choice.candidate.effort for choice in choices if choice.seconds <= TIE * fastest.seconds]
    assert chosen.candidate.effort == min(near) < fastest.candidate.effort


def test_where_memory_is_short_less_moves_because_blocks_are_lean() -> None:
    lean = plan(SMALL_HEAD | budget("80Mi"), SLOW)
    forced = plan(SMALL_HEAD | budget("80Mi") | {"spec.memory.advanced.activations.policy": "Host"}, SLOW)
    assert lean.activations.lean
    assert not forced.activations.lean, "a policy means just that"
    assert lean.bytes[Tier.HOST].activations < forced.bytes[Tier.HOST].activations
    assert any("recomputed in backward instead of stored" in reason for reason in lean.reasons)


def test_blocks_are_not_lean_where_moving_more_takes_less_time() -> None:
    """Recording and rerunning small operators costs more than the copies that it saves, and no fewer FLOPs."""
    changes = SMALL_HEAD | budget("80Mi") | {"spec.model.precision.compute": "float32"}
    lean, priced = plan(changes, LOCAL), plan(changes, PRICED)
    assert (lean.activations.lean, priced.activations.lean) == (True, False)
    assert priced.bytes[Tier.HOST].activations > lean.bytes[Tier.HOST].activations


def test_a_lean_twin_needs_less_memory_and_more_seconds() -> None:
    search = Search(ask(job(SMALL_HEAD), PRICED))
    kept = [one for one in search.all_candidates() if one.blocks.kept == one.blocks.num_layers]
    plain, lean = (next(one for one in kept if one.work.lean is is_lean) for is_lean in (False, True))
    assert lean.bytes[Tier.DEVICE].activations < 0.7 * plain.bytes[Tier.DEVICE].activations
    seconds = [timed(search.question, one).seconds for one in (plain, lean)]
    assert seconds[0] < seconds[1]


def test_nothing_is_rebuilt_where_everything_fits_or_where_no_run_could() -> None:
    assert not plan().activations.lean
    assert not plan(budget("300Mi"), resolve_node("1xh100")).activations.lean
    adapters = plan(SMALL_HEAD | budget("50Mi") | {"spec.model.lora": {"rank": 4}}, SLOW)
    assert not adapters.activations.lean
    assert any(
        reason.endswith("it is not known which of these operations the model has") for reason in adapters.reasons
    )
    divided = {"spec.parallelism.devicesPerNode": 2, "spec.parallelism.strategy": "Fsdp"}
    search = Search(ask(job(SMALL_HEAD | divided), SLOW))
    assert not any(one.work.lean for one in search.all_candidates())


def test_embedding_and_head_are_always_kept() -> None:
    answers = plan({"spec.memory.advanced.activations.policy": "Host"}).activations.answers
    assert (answers[0], answers[-1]) == (Policy.KEEP, Policy.KEEP)
    assert set(answers[1:-1]) == {Policy.HOST}
    assert len(answers) == 6


@pytest.mark.parametrize("policy", ["Keep", "Recompute", "Host", "Nvme"])
def test_a_policy_holds_for_every_block(policy: str) -> None:
    answers = plan({"spec.memory.advanced.activations.policy": policy}).activations.answers
    assert set(answers[1:-1]) <= {Policy(policy.lower())}


def test_a_model_too_small_for_its_policy_is_said_to_stay() -> None:
    tiny = {
        "spec.model.config": {
            "architecture": "llama", "hiddenSize": 32, "numLayers": 2, "numHeads": 2, "intermediateSize": 64,
            "vocabSize": 300,
        },
        "spec.training.sequenceLength": 32,
        "spec.memory.advanced.activations.policy": "Nvme",
    }  # fmt: skip
    decided = plan(tiny)
    assert decided.activations.answers == ()
    assert decided.bytes[Tier.NVME].total == 0
    assert any("too small to move" in reason for reason in decided.reasons)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("Device", (0.0, 0.0, 1.0)), ("Host", (1.0, 0.0, 0.0)), ("Nvme", (0.0, 0.0, 0.0)), ("Auto", (0.0, 0.0, 1.0))],
)
def test_a_placement_is_obeyed(placement: str, expected: tuple[float, float, float]) -> None:
    optimizer = plan({"spec.memory.advanced.optimizer.placement": placement}).optimizer
    assert (optimizer.cpu_share, optimizer.streamed_share, optimizer.resident_share) == expected


def test_interleaved_uses_cpu_and_device_whatever_is_faster() -> None:
    optimizer = plan({"spec.memory.advanced.optimizer.placement": "Interleaved"}).optimizer
    assert min(optimizer.cpu_share, optimizer.streamed_share) >= 0.0999
    assert optimizer.resident_share == 0.0


def test_spare_device_memory_is_filled_with_optimizer_states() -> None:
    decided = plan(budget("130Mi"))
    assert 0.0 < decided.optimizer.resident_share < 1.0
    assert decided.budget[Tier.DEVICE] - decided.bytes[Tier.DEVICE].total < 4 * MIB


def test_shares_sum_to_one() -> None:
    for device in ("90Mi", "120Mi", "160Mi", "200Mi"):
        optimizer = plan(budget(device)).optimizer
        assert optimizer.cpu_share + optimizer.streamed_share + optimizer.resident_share == pytest.approx(1, abs=1e-9)


def test_a_gpu_node_updates_on_cpu_and_device_at_once() -> None:
    """Eight devices share the host's memory bandwidth, so most is streamed there; one device has it for itself. (Beside
    forward, states on their way out would hold up the activations of these plans: then the CPU updates instead.)"""
    large = LLAMA_70B | {"spec.memory.advanced.optimizer.overlap": "None"}
    fields = large["spec.model.config"] | {"numLayers": 16}
    changes = large | {"spec.model.config": fields, "spec.parallelism": {"devicesPerNode": 1}}
    alone, shared = plan(changes, resolve_node("h100")), plan(large, resolve_node("h100"))
    assert alone.optimizer.cpu_share > 0.3
    assert shared.optimizer.streamed_share > 0.5


def test_a_70b_llama_on_eight_gpus_is_sharded_and_spills() -> None:
    decided = plan(LLAMA_70B, resolve_node("8xh100"))
    assert decided.strategy == "Fsdp"
    assert decided.spills


def test_a_gpu_plan_counts_what_its_allocator_takes_beyond_tensors() -> None:
    made = plan(LLAMA_8B | {"spec.memory.budget.device": str(16 * GIB)}, resolve_node("1xh100"))
    assert made.bytes[Tier.DEVICE].allocator >= ALLOCATOR_BYTES
    assert made.bytes[Tier.DEVICE].total <= made.budget[Tier.DEVICE] == 16 * GIB
    assert plan().bytes[Tier.DEVICE].allocator == 0


def test_the_budget_that_would_fit_on_a_gpu_has_the_allocator_in_it() -> None:
    node, small = resolve_node("1xh100"), {**LLAMA_8B, "spec.memory.advanced.parameters.placement": "Resident"}
    missed = infeasible(small | {"spec.memory.budget.device": "16Gi"}, node)
    assert missed.budget[Tier.DEVICE] == 16 * GIB
    (named,) = re.findall(r"spec.memory.budget.device: (\w+)", missed.nearest)
    made = plan(small | {"spec.memory.budget.device": named}, node)
    assert made.bytes[Tier.DEVICE].total <= made.budget[Tier.DEVICE]


def test_only_measured_nodes_have_calibrated_predictions() -> None:
    measured = with_rates(NodeProfileSpec.model_validate({"deviceKind": "Cpu", "dramBytesPerSecond": "1e10"}), LOCAL)
    assert not plan().prediction.calibrated
    assert plan().prediction.model_copy(update={"step_seconds": 0.31}).step == "about 310 ms"
    assert plan().prediction.model_copy(update={"step_seconds": 7e-5}).step == "under 1 ms"
    assert plan(node=measured).prediction.calibrated


def test_a_named_strategy_is_used() -> None:
    for strategy, runs in (("Fsdp", "Fsdp"), ("Zero3", "Fsdp"), ("Zero2", "Zero2")):
        spec = {"spec.parallelism": {"devicesPerNode": 2, "strategy": strategy}}
        assert plan(spec, resolve_node("8xh100")).strategy == runs
        assert plan(spec, resolve_node("cpu")).strategy == strategy


def test_float16_takes_as_many_bytes_as_bfloat16_and_is_never_sharded() -> None:
    found = [
        plan({"spec.parallelism": {"devicesPerNode": 2, "strategy": strategy}, "spec.model.precision": {"compute": of}})
        for of, strategy in (("float16", "Auto"), ("bfloat16", "Ddp"))
    ]
    assert found[0].strategy == "Ddp"
    assert found[0].reasons[0] == "strategy Ddp: the only one with a loss scale for float16"
    said = "predicted seconds: computed with the rates of bfloat16, but a CPU computes float16 more slowly"
    assert [said in each.reasons for each in found] == [True, False]
    assert found[0].bytes == found[1].bytes
    assert infeasible(LLAMA_70B | {"spec.model.precision": {"compute": "float16"}}, resolve_node("8xh100"))


def test_one_rank_needs_no_strategy() -> None:
    assert plan({"spec.parallelism": {"strategy": "Zero3"}}).strategy == "Ddp"


def test_host_memory_and_nvme_are_shared_by_the_ranks_of_a_node() -> None:
    decided = plan(LLAMA_70B, resolve_node("h100"))
    assert decided.budget[Tier.HOST] == resolve_node("h100").host_bytes // 8


def test_the_caller_goes_before_the_spec_and_the_node_before_both() -> None:
    overrides = Overrides(device_bytes=GIB, host_bytes=1 << 60)
    decided = plan(budget("2Gi"), overrides=overrides)
    assert (decided.budget[Tier.DEVICE], decided.budget[Tier.HOST]) == (GIB, 4 * GIB)


def test_a_local_run_keeps_the_global_batch_with_one_rank() -> None:
    changes = {"spec.parallelism": {"devicesPerNode": 2}}
    decided = plan(changes, overrides=Overrides(world_size=1))
    assert (decided.world_size, decided.num_micro_batches) == (1, 2)


def test_the_loop_runs_the_whole_global_batch() -> None:
    decided = plan(LLAMA_70B, resolve_node("h100"))
    assert decided.micro_batch_size * decided.num_micro_batches * decided.world_size == 64


# --- modes ------------------------------------------------------------------------------------------------------------


def test_disabled_keeps_everything_and_reports_what_is_missing() -> None:
    decided = plan({"spec.memory": {"mode": "Disabled", "budget": {"device": "60Mi", "host": "1Gi"}}})
    assert not decided.spills
    assert any("more device memory than the budget" in reason for reason in decided.reasons)


def test_advise_runs_the_spec_and_says_what_auto_would_do() -> None:
    changes = budget("120Mi") | {
        "spec.memory.mode": "Advise",
        "spec.memory.advanced.activations": {"policy": "Recompute"},
    }
    decided = plan(changes)
    assert set(decided.activations.answers[1:-1]) == {Policy.RECOMPUTE}
    assert decided.optimizer.resident_share == 1.0
    assert any("Auto would take" in reason for reason in decided.reasons)


# --- endurance --------------------------------------------------------------------------------------------------------


WEARING = SMALL_HEAD | budget("60Mi", host="90Mi") | {"spec.training.steps": 10**8}


@pytest.mark.ci
def test_auto_spares_the_drives() -> None:
    short = plan(WEARING | {"spec.training.steps": 10}, SLOW)
    forever = make_plan(job(WEARING), SLOW)
    assert short.bytes[Tier.NVME].total > 0
    assert isinstance(forever, Infeasible) or forever.prediction.drive_writes_per_day <= 1.0


def test_an_allowance_of_drive_writes_is_used() -> None:
    decided = plan(WEARING | {"spec.memory.endurance": {"driveWritesPerDay": "1e6"}}, SLOW)
    assert decided.prediction.drive_writes_per_day > 1.0


@cache
def wearing_and_sparing() -> tuple[Timed, Timed]:
    """A plan that writes to the drives, and one that does not."""
    question = ask(job(WEARING | {"spec.memory.endurance": {"driveWritesPerDay": "1e6"}}), SLOW)
    choices = [timed(question, one) for one in Search(question).all_candidates() if not one.missing]
    writing = next(choice for choice in choices if choice.prediction.drive_writes_per_day > 0.0)
    sparing = next(choice for choice in choices if choice.prediction.drive_writes_per_day == 0.0)
    return writing, sparing


@pytest.mark.parametrize(
    ("worn_share", "seconds", "spares"), [(1.0, 1.04, True), (1.0, 1.07, False), (0.5, 1.02, True), (0.5, 1.04, False)]
)
def test_nearly_as_fast_plan_without_writes_beats_one_that_wears_drives(
    worn_share: float, seconds: float, spares: bool
) -> None:
    writing, sparing = wearing_and_sparing()

    def taking(choice: Timed, step_seconds: float, worn: float) -> Timed:
        prediction = choice.prediction.model_copy(update={"step_seconds": step_seconds})
        return replace(choice, prediction=prediction, worn_share=worn)

    chosen = best([taking(writing, 1.0, worn_share), taking(sparing, seconds, 0.0)])
    assert (chosen.candidate is sparing.candidate) == spares


@pytest.mark.ci
def test_what_a_plan_wears_is_its_part_of_the_allowance() -> None:
    for limit in ("1e6", "2e6"):
        question = ask(job(WEARING | {"spec.memory.endurance": {"driveWritesPerDay": limit}}), SLOW)
        choices = Search(question).choices()
        assert any(choice.worn_share for choice in choices)
        for choice in choices:
            assert choice.worn_share == choice.prediction.drive_writes_per_day / float(limit)
            assert choice.priced_seconds == pytest.approx((1.0 + 0.05 * choice.worn_share) * choice.seconds)


def test_a_forced_policy_may_wear_the_drives_and_says_so() -> None:
    small_drive = replace(LOCAL, nvme_bytes=GIB)
    changes = SMALL_HEAD | {"spec.training.steps": 10**8, "spec.memory.advanced.activations.policy": "Nvme"}
    decided = plan(changes, small_drive)
    assert decided.prediction.drive_writes_per_day > 1.0
    assert any("drive writes per day" in reason for reason in decided.reasons)


# --- nothing fits -----------------------------------------------------------------------------------------------------


def test_infeasible_names_the_missing_bytes_and_a_budget_that_fits() -> None:
    decided = infeasible(budget("30Mi"))
    assert decided.missing_bytes[Tier.DEVICE] > 0
    field, _, amount = decided.nearest.split(" or ")[0].partition(": ")
    assert field == "spec.memory.budget.device"
    plan(budget(amount))


def test_the_proposed_budget_is_tight() -> None:
    amount = infeasible(budget("30Mi")).nearest.split(" or ")[0].partition(": ")[2]
    below = parse_quantity(amount) * 95 // 100
    infeasible(budget(str(below)))


def test_a_smaller_micro_batch_is_proposed_and_fits() -> None:
    remedies = dict(part.split(": ") for part in infeasible(budget("30Mi")).nearest.split(" or "))
    size = int(remedies["spec.training.microBatchSize"])
    plan(budget("30Mi") | {"spec.training.microBatchSize": size})


def test_forced_parts_that_do_not_fit_are_named() -> None:
    changes = budget("100Mi") | {"spec.memory.advanced.optimizer.placement": "Device"}
    assert "spec.memory.advanced.optimizer.placement: Auto" in infeasible(changes).nearest


def test_a_node_that_is_too_small_is_said_so_with_figures() -> None:
    tiny = replace(LOCAL, device_bytes=4 * MIB)
    nearest = infeasible({"spec.training.microBatchSize": 1, "spec.training.globalBatchSize": 1}, tiny).nearest
    assert "a node with" in nearest
    assert "(this node has 4.00 MiB)" in nearest


def test_alternatives_say_why_they_lost() -> None:
    decided = plan(budget("100Mi"))
    everything = next(other for other in decided.alternatives if other.summary == "everything on the device")
    assert everything.missing_bytes[Tier.DEVICE] > 0
    assert "does not fit" in everything.reason
    assert all(other.reason for other in decided.alternatives)


def test_more_devices_than_the_node_has_are_rejected() -> None:
    with pytest.raises(UserError, match="node 8x-h100-80 has 8 devices"):
        make_plan(job({"spec.parallelism": {"devicesPerNode": 16}, "spec.training.globalBatchSize": 64}),
                  resolve_node("h100"))  # fmt: skip


def test_a_gpu_job_is_not_planned_for_a_cpu() -> None:
    with pytest.raises(UserError, match="device = Cuda"):
        make_plan(job({"spec.parallelism": {"device": "Cuda"}}), LOCAL)


# --- properties -------------------------------------------------------------------------------------------------------

SHAPES = st.fixed_dictionaries(
    {
        "spec.model.config.hiddenSize": st.sampled_from([64, 256, 1024]),
        "spec.model.config.numLayers": st.integers(1, 12),
        "spec.model.config.vocabSize": st.sampled_from([512, 8192, 50000]),
        "spec.model.config.tieWordEmbeddings": st.booleans(),
        "spec.model.precision.compute": st.sampled_from(["bfloat16", "float32"]),
        "spec.training.sequenceLength": st.sampled_from([64, 512, 2048]),
        "spec.training.microBatchSize": st.sampled_from([1, 2, 8]),
        "spec.memory.advanced.optimizer.placement": st.sampled_from(
            ["Auto", "Auto", "Device", "Host", "Interleaved", "Nvme"]
        ),
        "spec.training.gradientClipping": st.sampled_from([0, 1]),
        "spec.memory.advanced.activations.policy": st.sampled_from(
            ["Auto", "Auto", "Keep", "Recompute", "Host", "Nvme"]
        ),
    }
)
BUDGETS = st.tuples(st.integers(1, 2000), st.integers(0, 4000), st.integers(0, 8000))
NODES = st.sampled_from([LOCAL, resolve_node("1xh100")])
MANY = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def decide(changes: dict[str, Any], mebibytes: tuple[int, int, int], node: NodeSpec) -> MemoryPlan | Infeasible:
    device, host, nvme = (amount * MIB for amount in mebibytes)
    return make_plan(job(changes), node, Overrides(device, host, nvme))


@MANY
@given(changes=SHAPES, mebibytes=BUDGETS, node=NODES)
def test_a_plan_fits_every_tier_or_says_what_is_missing(
    changes: dict[str, Any], mebibytes: tuple[int, int, int], node: NodeSpec
) -> None:
    decided = decide(changes, mebibytes, node)
    if isinstance(decided, Infeasible):
        assert decided.nearest
        return
    for tier in Tier:
        assert 0 <= decided.bytes[tier].total <= decided.budget[tier]
    assert decided.prediction.step_seconds > 0


@MANY
@given(changes=SHAPES, mebibytes=BUDGETS, more=BUDGETS, node=NODES)
def test_more_memory_is_never_slower(
    changes: dict[str, Any], mebibytes: tuple[int, int, int], more: tuple[int, int, int], node: NodeSpec
) -> None:
    small = decide(changes, mebibytes, node)
    large = decide(changes, tuple(map(sum, zip(mebibytes, more, strict=True))), node)  # type: ignore[arg-type]
    if isinstance(small, MemoryPlan):
        assert isinstance(large, MemoryPlan)
        assert large.prediction.step_seconds <= TOLERANCE * small.prediction.step_seconds


@MANY
@given(changes=SHAPES, mebibytes=BUDGETS, node=NODES)
def test_a_plan_survives_json(changes: dict[str, Any], mebibytes: tuple[int, int, int], node: NodeSpec) -> None:
    decided = decide(changes, mebibytes, node)
    assert type(decided).model_validate_json(decided.model_dump_json()) == decided


# --- ranks that share a node ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "changes", [{}, {"spec.memory.budget": {"device": "1Gi"}}, {"spec.memory.budget": {"host": "512Mi"}}]
)
def test_on_a_cpu_devices_and_host_tier_never_take_more_than_there_is(ranks: int, changes: dict[str, Any]) -> None:
    found = shared_memory(job(changes), 4 * GIB, ranks)
    assert found.device_bytes is not None
    assert found.host_bytes is not None
    assert ranks * found.device_bytes + found.host_bytes <= 4 * GIB


def test_ranks_get_equal_parts_of_three_quarters_for_their_devices() -> None:
    assert shared_memory(job(), 4 * GIB, 2) == Overrides(int(1.5 * GIB), GIB)


def test_what_a_device_budget_leaves_is_the_host_tiers() -> None:
    assert shared_memory(job({"spec.memory.budget": {"device": "1Gi"}}), 4 * GIB, 2).host_bytes == 2 * GIB
    assert shared_memory(job({"spec.memory.budget": {"device": "9Gi"}}), 4 * GIB, 2) == Overrides(2 * GIB, 0)


def test_ranks_of_a_cpu_node_are_planned_for_with_their_part_of_its_device() -> None:
    two = plan({"spec.parallelism.devicesPerNode": 2})
    assert two.budget[Tier.DEVICE] == LOCAL.device_bytes // 2


def test_a_caller_chooses_among_the_strategies_that_auto_tries() -> None:
    for forced in ("Ddp", "Fsdp"):
        assert plan({"spec.parallelism": {"nodes": 2}}, overrides=Overrides(strategy=forced)).strategy == forced
    assert plan(overrides=Overrides(strategy="Fsdp")).strategy == "Ddp", "one rank has nothing to shard"


def test_a_plan_says_why_it_has_its_strategy() -> None:
    asked = plan({"spec.parallelism": {"nodes": 2, "strategy": "Fsdp"}})
    assert asked.reasons[0] == "strategy Fsdp: the spec asks for it"
    assert plan({"spec.parallelism": {"nodes": 2}}).reasons[0] == "strategy Ddp: it fits"
    searched = make_plan(job(LLAMA_70B), resolve_node("8xh100"))
    assert isinstance(searched, MemoryPlan)
    assert searched.reasons[0] == "strategy Fsdp: Ddp does not fit"
    assert any(one.summary == "strategy Ddp" and one.missing_bytes for one in searched.alternatives)


def test_a_strategy_that_fits_but_is_not_the_kept_one_is_named() -> None:
    found = make_plan(job(LLAMA_70B), resolve_node("8xh100"), Overrides(kept="Ddp"))
    assert isinstance(found, Infeasible)
    assert any(one.reason == "fits, but earlier attempts used another strategy" for one in found.alternatives)


@pytest.mark.parametrize("changes", [
    {"spec.model.precision.compute": "float16"}, {"spec.training.optimizer.moments": "int8"},
    {"spec.memory.advanced.parameters.placement": "Stream"},
])  # fmt: skip
def test_what_only_ddp_can_do_is_not_planned_with_fsdp(changes: dict[str, Any]) -> None:
    tight = LLAMA_70B | changes | budget("1Gi", host="1Gi")
    found = make_plan(job(tight), resolve_node("8xh100"), explained=False)
    assert isinstance(found, Infeasible)


def test_a_budget_that_nccl_would_use_up_is_rejected_without_a_search_too() -> None:
    changes = LLAMA_8B | {"spec.memory": {"mode": "Disabled", "budget": {"device": "1Gi", "host": "64Gi"}}}
    with pytest.raises(UserError, match=r"budget.device = 1.00 GiB: .*NCCL alone needs 1.00 GiB of it"):
        plan(changes | {"spec.parallelism": {"devicesPerNode": 2}}, resolve_node("8xh100"))
    assert plan(changes, resolve_node("8xh100")).mode == "Disabled", "one rank has no NCCL"


def test_a_model_that_fsdp_cannot_shard_is_not_planned_with_it() -> None:
    """A scalar in place of the norm has no rows."""
    shape = shape_of(job(LLAMA_70B).spec, "Cuda")
    scalar = replace(shape.head.parameters[0], num_rows=0)
    changed = Overrides(shape=replace(shape, head=replace(shape.head, parameters=(scalar, *shape.head.parameters[1:]))))
    found = make_plan(job(LLAMA_70B), resolve_node("8xh100"), changed)
    assert isinstance(found, Infeasible)
    assert "strategy Fsdp" not in [one.summary for one in found.alternatives]
    with pytest.raises(UserError, match=r"strategy = Fsdp: segment head .* has a scalar or empty parameter"):
        make_plan(job(LLAMA_70B | {"spec.parallelism.strategy": "Fsdp"}), resolve_node("8xh100"), changed)


TWO_ON_DEVICES = {"spec.parallelism": {"devicesPerNode": 2, "strategy": "Zero3"}}


@pytest.mark.parametrize(
    ("changes", "node", "said"),
    [
        (TWO_ON_DEVICES, "8xh100", "strategy Fsdp: on Cuda devices it shards what Zero3 shards"),
        ({"spec.parallelism": {"strategy": "Zero3"}}, "cpu", "strategy Ddp: one rank has nothing to shard (the spec"),
    ],
)
def test_a_plan_says_where_a_run_would_do_something_else(changes: dict[str, Any], node: str, said: str) -> None:
    """In every mode."""
    reasons = plan(changes, resolve_node(node)).reasons
    assert sum(reason.startswith(said) for reason in reasons) == 1, reasons
    unplanned = {"spec.memory": {"mode": "Disabled", "budget": {"host": "8Gi"}}}
    as_specified = plan(changes | unplanned, resolve_node(node)).reasons
    assert any(reason.startswith(said) for reason in as_specified), as_specified


def test_deepspeed_cannot_update_beside_the_next_forward() -> None:
    forward = {"spec.memory.advanced.optimizer": {"placement": "Host", "overlap": "Forward"}}
    with pytest.raises(UserError, match=r"overlap = Forward: with .*strategy = Zero2.*Ddp or Fsdp"):
        plan(forward | {"spec.parallelism": {"nodes": 2, "strategy": "Zero2"}})
    assert plan(forward | {"spec.parallelism": {"nodes": 2, "strategy": "Fsdp"}}).optimizer.overlap == "Forward"


def test_a_plan_says_what_kind_of_device_it_is_for() -> None:
    assert plan().device == "Cpu"
    assert plan(node=resolve_node("1xh100")).device == "Cuda"


def test_unexplained_infeasible_reports_the_same_bytes_without_a_search() -> None:
    changes = budget("1Mi", host="1Mi", nvme="0")
    explained, bare = infeasible(changes), make_plan(job(changes), LOCAL, explained=False)
    assert isinstance(bare, Infeasible)
    assert bare.missing_bytes == explained.missing_bytes
    assert (bare.nearest, bare.alternatives) == ("", ())


def test_a_slab_has_slack_within_its_budget() -> None:
    decided = plan({"spec.memory.advanced.optimizer.placement": "Host"})
    planned = decided.bytes[Tier.HOST].total
    assert planned < decided.slab_bytes(Tier.HOST) <= 1.05 * planned + MIB
    tight = decided.model_copy(update={"budget": {**decided.budget, Tier.HOST: planned + 5}})
    assert tight.slab_bytes(Tier.HOST) == planned + 5
    assert decided.slab_bytes(Tier.NVME) == 0


# --- streamed parameters ----------------------------------------------------------------------------------------------

DEEP = {
    "spec.model.config.numLayers": 12, "spec.model.config.vocabSize": 512, "spec.training.microBatchSize": 1,
    "spec.training.globalBatchSize": 4,
}  # fmt: skip
"""18 MiB of parameters in bfloat16, most of them in 12 equal blocks"""
STREAMED = DEEP | budget("14Mi")


def streamed(changes: dict[str, Any] | None = None, node: NodeSpec = LOCAL) -> MemoryPlan:
    decided = plan(STREAMED | (changes or {}), node)
    assert decided.parameters.streams
    return decided


def test_a_model_larger_than_the_device_is_streamed() -> None:
    decided = streamed()
    assert decided.bytes[Tier.DEVICE].total <= 14 * MIB < 2 * ask(job(STREAMED), LOCAL).shape.num_parameters
    assert decided.bytes[Tier.HOST].parameters > 10 * MIB


def test_a_job_that_fits_without_streaming_is_not_streamed() -> None:
    for device in ("100Mi", "120Mi", "1Gi"):
        assert not plan(budget(device)).parameters.streams


@pytest.mark.ci
def test_plans_without_streaming_are_the_best_of_those_without() -> None:
    for changes in ({}, budget("100Mi"), budget("70Mi"), SMALL_HEAD | budget("80Mi", host="120Mi")):
        free, resident = plan(changes), plan(changes | {"spec.memory.advanced.parameters": {"placement": "Resident"}})
        assert free.prediction.step_seconds <= TIE * resident.prediction.step_seconds


def test_the_first_blocks_are_streamed_and_embedding_and_head_stay_longest() -> None:
    homes = plan(DEEP | budget("10Mi", host="155Mi")).parameters.homes
    assert list(homes[1:-1]) == sorted(homes[1:-1], key=[Tier.NVME, Tier.HOST, Tier.DEVICE].index)
    homes = streamed().parameters.homes
    assert homes[0] is homes[-1] is Tier.DEVICE
    assert list(homes[1:-1]) == sorted(homes[1:-1], key=lambda home: home is Tier.DEVICE)


def test_tied_embedding_and_head_have_the_same_home() -> None:
    for device in ("8Mi", "10Mi", "12Mi", "20Mi"):
        homes = plan(DEEP | budget(device) | {"spec.model.config.tieWordEmbeddings": True}).parameters.homes
        assert not homes or homes[0] is homes[-1]


@pytest.mark.ci
def test_more_memory_makes_more_segments_resident() -> None:
    counts = [sum(home is Tier.DEVICE for home in plan(DEEP | budget(f"{size}Mi")).parameters.homes) or 14
              for size in (8, 14, 40)]  # fmt: skip
    assert counts == sorted(counts)


def test_the_cpu_updates_what_is_streamed() -> None:
    decided = streamed()
    shape = ask(job(STREAMED), LOCAL).shape
    forced = sum(
        segment.num_trained
        for segment, home in zip(shape.segments, decided.parameters.homes, strict=True)
        if home is not Tier.DEVICE
    )
    assert decided.optimizer.cpu_share >= forced / shape.num_trained - 1e-9


def test_homes_go_to_nvme_where_host_memory_is_short() -> None:
    frozen = {"spec.model.lora": {"rank": 4}}
    decided = streamed(frozen | budget("12Mi", host="12Mi"))
    assert {Tier.NVME, Tier.HOST} <= set(decided.parameters.homes)
    assert decided.bytes[Tier.HOST].total <= 12 * MIB


def test_homes_of_trained_parameters_on_nvme_are_written_by_every_step() -> None:
    trained, frozen = (
        streamed(budget("10Mi", host="155Mi") | {"spec.memory.advanced.activations.policy": "Recompute"}),
        streamed(budget("12Mi", host="12Mi") | {"spec.model.lora": {"rank": 4}}),
    )
    blocks = sum(home is Tier.NVME for home in trained.parameters.homes)
    assert (
        trained.prediction.link_bytes["nvme_write"]
        == blocks * 2 * ask(job(STREAMED), LOCAL).shape.blocks[0].num_trained
    )
    assert frozen.prediction.link_bytes["nvme_write"] < trained.prediction.link_bytes["nvme_write"] / 20


def test_adapters_are_trained_on_a_frozen_streamed_base() -> None:
    """Nothing of the base has states or gradients: they may stay on the device."""
    decided = plan(STREAMED | {"spec.model.lora": {"rank": 4}})
    full = plan(STREAMED)
    assert decided.bytes[Tier.HOST].optimizer_states < full.bytes[Tier.HOST].optimizer_states / 10


LONG_STEP = {
    "spec.model.config.hiddenSize": 1024, "spec.model.config.numHeads": 8, "spec.model.config.intermediateSize": 4096,
    "spec.model.config.numLayers": 24, "spec.training.sequenceLength": 256, "spec.training.microBatchSize": 1,
    "spec.training.globalBatchSize": 32,
}  # fmt: skip


def test_many_small_micro_batches_pass_a_segment_while_it_is_there() -> None:
    """One micro-batch is too short to hide the loads of a segment, so that 64 loads a step would bound it."""
    decided = plan(LONG_STEP | budget("400Mi", host="64Gi"), resolve_node("1xh100"))
    assert decided.parameters.order == "WeightStationary"
    other = next(one for one in decided.alternatives if one.summary == "streamed one micro-batch after the other")
    assert other.step_seconds is None or other.step_seconds > decided.prediction.step_seconds


def test_one_micro_batch_has_one_order() -> None:
    changes = STREAMED | {"spec.training.globalBatchSize": 1}
    assert plan(changes).parameters.order == "InOrder"


def test_a_forced_placement_of_parameters_is_obeyed() -> None:
    resident = make_plan(job(STREAMED | {"spec.memory.advanced.parameters": {"placement": "Resident"}}), LOCAL)
    assert isinstance(resident, Infeasible)
    assert "spec.memory.advanced.parameters.placement: Auto" in resident.nearest
    all_streamed = plan(DEEP | {"spec.memory.advanced.parameters": {"placement": "Stream"}})
    assert set(all_streamed.parameters.homes[1:-1]) == {Tier.HOST}


def test_what_excludes_itself_is_rejected_with_what_to_change() -> None:
    stream = {"spec.memory.advanced.parameters": {"placement": "Stream"}}
    with pytest.raises(UserError, match=r"optimizer.placement = Device: conflicts .* the CPU updates streamed"):
        make_plan(job(stream | {"spec.memory.advanced.optimizer.placement": "Device"}), LOCAL)
    with pytest.raises(UserError, match=r"strategy = Fsdp: parameters cannot be streamed"):
        make_plan(job(stream | {"spec.parallelism": {"nodes": 2, "strategy": "Fsdp"}}), LOCAL)


def test_streaming_is_explained() -> None:
    text = " ".join(streamed().reasons)
    for words in ("layers offloaded to host (", "streamed through", "kept on device: ", "order:", "the CPU updates"):
        assert words in text
    slots = streamed().parameters.num_slots
    assert slots > 1
    assert f"streamed through {slots} slots of " in text
    summaries = {other.summary: other for other in streamed().alternatives}
    assert summaries["all parameters resident"].missing_bytes[Tier.DEVICE] > 0


def test_alternatives_that_fit_say_what_binds_them() -> None:
    fitting = [other for other in streamed().alternatives if other.step_seconds is not None]
    assert fitting
    assert all(other.bound_by for other in fitting)


@pytest.mark.ci
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=SHAPES, mebibytes=st.tuples(st.integers(1, 400), st.integers(0, 2000), st.integers(0, 4000)), node=NODES)
def test_the_search_finds_what_trying_everything_finds(
    changes: dict[str, Any], mebibytes: tuple[int, int, int], node: NodeSpec
) -> None:
    device, host, nvme = (amount * MIB for amount in mebibytes)
    search = Search(ask(job(changes), node, Overrides(device, host, nvme)))
    tried = list(search.all_candidates())
    fitting = [one for one in (timed(search.question, each) for each in tried if not each.missing) if not one.wears_out]
    assert search.fits() == bool(fitting)
    if fitting:
        assert best(search.choices()) == best(fitting)
    else:
        assert search.nearest_miss().weighted_missing == min(one.weighted_missing for one in tried)


@pytest.mark.ci
@pytest.mark.parametrize("changes", [budget("100Mi", host="1Gi"), *at([], [{}, budget("1Gi")], [{}, budget("1Gi")])])
def test_a_very_deep_model_is_planned_in_seconds(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are what planning takes its time for: the number that it tries is bounded."""
    tried = Counter[str]()
    settle, bound = Search._settled, Bounds.seconds

    def settled(*given: Any) -> Any:
        tried["settled"] += 1
        return settle(*given)

    def bounded(*given: Any, **options: Any) -> float:
        tried["bounded"] += 1
        return bound(*given, **options)

    monkeypatch.setattr(Search, "_settled", settled)
    monkeypatch.setattr(Bounds, "seconds", bounded)
    make_plan(job({"spec.model.config.numLayers": 1024} | changes), LOCAL)
    assert 0 < tried["settled"] < 20_000
    assert 0 < tried["bounded"] < 60_000


def test_more_host_memory_never_makes_the_fastest_plan_slower() -> None:
    """Inputs of recomputed blocks wait in host memory, too: what is moved there beside them must leave room for them,
    or a plan that fits with less memory is lost (by 1.3 % at 474 Mi)."""
    wanted = load_job(ROOT / "examples/larger-than-device.yaml")
    node = replace(
        resolve_node("cpu"), num_cores=2,
        bfloat16_flops_per_second=1.15e12, link=Link(7.62e9, 7.62e9, 0.5, 1), dram_bytes_per_second=1.24e10,
        cpu_bytes_per_second=1.24e10, nvme_read_bytes_per_second=1.82e9, nvme_write_bytes_per_second=1.56e9,
        bfloat16_values_per_second=1.34e9, operation_overhead_seconds=1.94e-5,
    )  # fmt: skip
    fastest = []
    for host in range(470, 482):
        search = Search(ask(wanted, node, Overrides(10 * MIB, host * MIB)))
        fastest.append(min(choice.seconds for choice in search.choices()))
    for less, more in pairwise(fastest):
        assert more <= less * 1.0001
