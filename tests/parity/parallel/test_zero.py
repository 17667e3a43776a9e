"""Strategies Zero1, Zero2 and Zero3: which rank has what changes no bit, and they fail, stop and go on as Ddp does.

Every case runs with two ranks and real DeepSpeed. All cases are run first, by one process that has imported it.
"""

from __future__ import annotations

import pytest

from harness import rank_runs, zero_runs
from harness.depth import FULL
from harness.zero_runs import ONE_MICRO_BATCH, SHORT, UNTIED, Attempt, Case, Found
from spillway.errors import ExitCode
from spillway.planning.workload import SHARDS
from spillway.update_rules import UpdateRule

pytestmark = pytest.mark.ci

STRATEGIES = ("Zero1", "Zero2", "Zero3")
ALL_PLACEMENTS = [name for name in rank_runs.PLACEMENTS if name not in rank_runs.STREAMED]
FEW = {
    "Zero1": ["half and half, NVMe"],
    "Zero2": ["all on the CPU, kept", "states everywhere, mixed"],
    "Zero3": ["a third each, recomputed", "all states on NVMe, kept"],
}
PLACED = [(strategy, placement) for strategy in STRATEGIES for placement in (ALL_PLACEMENTS if FULL else FEW[strategy])]
AS_DDP = {**SHORT, **ONE_MICRO_BATCH, **UNTIED}
LONGER = {"gradientReduce: bfloat16": "gradientReduce: float32", "steps: 4": "steps: 8"} | {
    "checkpoint: {everySteps: 100}": "checkpoint: {everySteps: 2}"
}
NARROW = LONGER | {'learningRate: "2e-3"': 'learningRate: "2e-3", moments: bfloat16'}
GROUPS = '[{match: "embed*", learningRateFactor: "0.5"}, {match: "*norm*", weightDecay: "0.01"}]'
RULES = {
    rule: {
        'optimizer: {learningRate: "2e-3"}': f'optimizer: {{name: {rule.value}, learningRate: "2e-3", '
        f'weightDecay: "0.05", groups: {GROUPS}}}'
    }
    for rule in UpdateRule
}
"""every rule of update, with groups that DeepSpeed's optimizer knows nothing of"""
FEW_RULES = dict(zip(UpdateRule, ("Zero3", "Zero2", "Zero3", "Zero1"), strict=True))
RULED = [(rule, strategy) for rule in UpdateRule for strategy in STRATEGIES] if FULL else list(FEW_RULES.items())
RULES_PLACEMENT = "states everywhere, mixed"
CASES: dict[str, Case] = {
    **{strategy: Case([Attempt(strategy)]) for strategy in ("Ddp", *STRATEGIES)},
    **{f"{strategy}, {placement}": Case([Attempt(strategy, placement)]) for strategy, placement in PLACED},
    **{f"{strategy} as Ddp": Case([Attempt(strategy)], AS_DDP) for strategy in ("Ddp", *STRATEGIES)},
    **{f"{rule} as Ddp": Case([Attempt("Ddp")], {**AS_DDP, **RULES[rule]}) for rule in UpdateRule},
    **{
        f"{strategy} with {rule}": Case([Attempt(strategy, RULES_PLACEMENT)], {**AS_DDP, **RULES[rule]})
        for rule, strategy in RULED
    },
    "uninterrupted": Case([Attempt("Zero2")], LONGER),
    "stopped": Case([Attempt("Zero2", stop_at=2), Attempt("Zero3", "interleaved, mixed")], LONGER),
    "killed": Case([Attempt("Zero3", kill_at=3), Attempt("Zero1")], LONGER),
    "no room": Case([Attempt("Zero2", block_step=6)], LONGER),
    "narrow": Case([Attempt("Zero2")], NARROW),
    "narrow, placed and resumed": Case(
        [Attempt("Zero3", "interleaved, mixed", stop_at=2), Attempt("Zero1", "half and half, NVMe")], NARROW
    ),
    "one rank": Case([Attempt("Zero2", world=1)]),
    "own disks": Case([Attempt("Zero2", own_disk=True)]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    if not FULL:
        print(f"\nreduced: {len(PLACED)} of {len(STRATEGIES) * len(ALL_PLACEMENTS)} placements", end=", ")
        print(f"{len(RULED)} of {len(STRATEGIES) * len(UpdateRule)} rules of update")
    results = zero_runs.run_all(list(CASES.values()), tmp_path_factory.mktemp("zero"))
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize(("strategy", "placement"), PLACED)
def test_no_placement_changes_a_bit_of_a_divided_run(found: dict[str, Found], strategy: str, placement: str) -> None:
    """Dropout, tied embeddings, clipping, two micro-batches a rank; against memory.mode Disabled."""
    placed, plain = found[f"{strategy}, {placement}"], found[strategy]
    assert placed.exit_codes == plain.exit_codes == [[0, 0]], placed.logs
    assert len(plain.tensors) == 60
    assert placed.figures == plain.figures


@pytest.mark.parametrize("strategy", ["Zero1", "Zero3"])
def test_all_three_strategies_give_the_same_bits(found: dict[str, Found], strategy: str) -> None:
    assert found[strategy].figures == found["Zero2"].figures


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_one_micro_batch_a_rank_a_divided_run_is_ddp(found: dict[str, Found], strategy: str) -> None:
    """Without tied parameters, whose uses autograd adds up before ranks do."""
    assert found[f"{strategy} as Ddp"].figures == found["Ddp as Ddp"].figures


@pytest.mark.parametrize(("rule", "strategy"), RULED)
def test_every_rule_and_its_groups_are_those_of_ddp(found: dict[str, Found], rule: UpdateRule, strategy: str) -> None:
    """States on all four paths, NVMe among them; against Ddp in memory.mode Disabled."""
    placed, plain = found[f"{strategy} with {rule}"], found[f"{rule} as Ddp"]
    assert placed.exit_codes == plain.exit_codes == [[0, 0]], placed.logs
    assert len(plain.tensors) == len(rule.state_kinds) * 21
    assert placed.figures == plain.figures


def test_rules_and_groups_are_different_runs(found: dict[str, Found]) -> None:
    """Else the test above would say less than it seems to."""
    runs = [found["Ddp as Ddp"], *(found[f"{rule} as Ddp"] for rule in UpdateRule)]
    assert len({tuple(sorted(run.tensors.items())) for run in runs}) == len(runs)


def test_several_micro_batches_are_added_in_another_order_than_ddps(found: dict[str, Found]) -> None:
    """Else the tests above would say less than they seem to."""
    assert found["Zero2"].tensors != found["Ddp"].tensors
    losses = [(found["Zero2"].losses[step], loss) for step, loss in found["Ddp"].losses.items()]
    assert all(abs(ours - loss) / loss <= 1e-5 for ours, loss in losses)


def test_a_stopped_run_goes_on_under_another_strategy_and_placement(found: dict[str, Found]) -> None:
    stopped = found["stopped"]
    assert stopped.exit_codes == [[ExitCode.PREEMPTED, ExitCode.PREEMPTED], [0, 0]], stopped.logs
    assert stopped.figures == found["uninterrupted"].figures


def test_sharded_bfloat16_moments_are_saved_and_resumed_unchanged(found: dict[str, Found]) -> None:
    placed, plain = found["narrow, placed and resumed"], found["narrow"]
    assert placed.exit_codes == [[ExitCode.PREEMPTED, ExitCode.PREEMPTED], [0, 0]], placed.logs
    assert placed.figures == plain.figures
    assert plain.tensors != found["uninterrupted"].tensors


def test_a_killed_rank_is_followed_and_the_run_goes_on_from_its_checkpoint(found: dict[str, Found]) -> None:
    killed = found["killed"]
    (survivor, victim), last = killed.exit_codes
    assert (survivor, victim, last) == (1, -9, [0, 0]), killed.logs
    assert killed.terminations[0][0]["follower"] is True, killed.terminations
    assert killed.figures == found["uninterrupted"].figures


def test_ranks_write_pieces_or_rank_0_all_if_disks_are_their_own(found: dict[str, Found]) -> None:
    pieces, whole = found["Zero2"], found["own disks"]
    assert pieces.files == ["rank-0-00000.safetensors", "rank-1-00000.safetensors"]
    assert whole.files == ["tensors-00000.safetensors"], whole.logs
    assert whole.figures == pieces.figures


def test_a_checkpoint_that_rank_0_cannot_write_is_missed_by_all(found: dict[str, Found]) -> None:
    blocked = found["no room"]
    assert (blocked.exit_codes, blocked.missed, blocked.checkpoints) == ([[0, 0]], [6], [2, 4, 8]), blocked.logs
    assert blocked.figures == found["uninterrupted"].figures


def test_one_rank_has_nothing_to_divide(found: dict[str, Found]) -> None:
    assert found["one rank"].exit_codes == [[ExitCode.USER_ERROR]]
    assert "one rank has nothing to shard" in found["one rank"].logs[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_holds_less_than_with_ddp(found: dict[str, Found], strategy: str) -> None:
    assert found[strategy].tier_bytes["device"] < found["Ddp"].tier_bytes["device"]


def test_zero1_holds_what_zero2_holds(found: dict[str, Found]) -> None:
    """Also of accumulators, as the planner counts them."""
    assert found["Zero1"].tier_bytes == found["Zero2"].tier_bytes
    assert SHARDS["Zero1"] == SHARDS["Zero2"]
