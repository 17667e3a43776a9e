"""Strategy Fsdp: FSDP2 divides by rows, gathers by segment, and a run has the bits of Ddp with one micro-batch a rank.

Every case runs with two or three ranks and the real `fully_shard`. All cases are run first, by one process.
"""

from __future__ import annotations

import pytest

from harness import rank_runs, zero_runs
from harness.depth import FULL
from harness.zero_runs import ONE_MICRO_BATCH, SHORT, UNTIED, Attempt, Case, Found
from spillway.errors import ExitCode
from spillway.plan import Tier

pytestmark = pytest.mark.ci

ALL_PLACEMENTS = [name for name in rank_runs.PLACEMENTS if name not in rank_runs.STREAMED]
FEW = ["half and half, NVMe", "interleaved, mixed"]
PLACEMENTS = ALL_PLACEMENTS if FULL else FEW
PLACED = [(placement, overlap) for placement in PLACEMENTS for overlap in ("None", "Forward")]
PLACED = PLACED if FULL else [(FEW[0], "Forward"), (FEW[1], "None")]
AS_DDP = {**SHORT, **ONE_MICRO_BATCH}
THREE = {**SHORT, "globalBatchSize: 8": "globalBatchSize: 6"}
CONFIG = """config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 4, numKeyValueHeads: 2,
             intermediateSize: 80, vocabSize: 300, tieWordEmbeddings: true, dropout: "0.1"}"""
MADE = ("odd", "branching", "overflowing", "reentrant")
OWN = {f"{name} model": {CONFIG: f'entrypoint: "cases.divided_models:{name}"'} for name in MADE}
ADAPTERS = {'tieWordEmbeddings: true, dropout: "0.1"}': "tieWordEmbeddings: false}\n    lora: {rank: 2}"}
SKIPPING = {"everySteps: 2}": "everySteps: 9}", 'Clipping: "0.5"': 'Clipping: "0.5", nonFinite: SkipStep'}
LONGER = {"gradientReduce: bfloat16": "gradientReduce: float32", "steps: 4": "steps: 6", **ONE_MICRO_BATCH} | {
    "checkpoint: {everySteps: 100}": "checkpoint: {everySteps: 2}"
}
NARROW = LONGER | {'learningRate: "2e-3"': 'learningRate: "2e-3", moments: bfloat16'}
UNEVEN = {**THREE, "hiddenSize: 32": "hiddenSize: 40", "intermediateSize: 80": "intermediateSize: 83"} | {
    "vocabSize: 300": "vocabSize: 301"
}
PLANS = {
    "resident": {"placement": "Device", "policy": "Keep"},
    "offloaded": {"placement": "Interleaved", "policy": "Recompute"},
    **({"on the CPU, moved": {"placement": "Host", "policy": "Host"}} if FULL else {}),
    **({"on NVMe, moved": {"placement": "Nvme", "policy": "Nvme"}} if FULL else {}),
}
MODELS: dict[str, tuple[dict[str, str], int, str | None]] = {
    "odd model": ({**THREE, **OWN["odd model"]}, 3, "all on the CPU, kept"),
    "branching model": ({**AS_DDP, **OWN["branching model"]}, 2, "interleaved, mixed"),
    "overflowing model": ({**AS_DDP, **SKIPPING, **OWN["overflowing model"]}, 2, "interleaved, mixed"),
}
if FULL:
    MODELS |= {
        "reentrant model": ({**AS_DDP, **OWN["reentrant model"]}, 2, "all streamed, host"),
        "adapters": ({**THREE, **ADAPTERS}, 3, "interleaved, mixed"),
        "bfloat16 wire": ({**ONE_MICRO_BATCH, "steps: 4": "steps: 2"}, 2, None),
        "float32": ({**AS_DDP, "compute: bfloat16": "compute: float32"}, 2, "a third each, recomputed"),
    }
CASES: dict[str, Case] = {
    "Ddp": Case([Attempt("Ddp")], AS_DDP),
    "Fsdp": Case([Attempt("Fsdp")], AS_DDP),
    **{f"{place}, {overlap}": Case([Attempt("Fsdp", place, overlap=overlap)], AS_DDP) for place, overlap in PLACED},
    **{
        f"{strategy}, {name}": Case(
            [Attempt(strategy, placement if strategy == "Fsdp" else None, world, keeps=CONFIG in changes)], changes
        )
        for name, (changes, world, placement) in MODELS.items()
        for strategy in ("Ddp", "Fsdp")
    },
    "uninterrupted": Case([Attempt("Ddp")], LONGER),
    "narrow, Ddp": Case([Attempt("Ddp")], NARROW),
    "narrow": Case([Attempt("Fsdp", FEW[0], overlap="Forward", stop_at=2), Attempt("Fsdp", FEW[1])], NARROW),
    "stopped": Case([Attempt("Fsdp", stop_at=2), Attempt("Ddp", stop_at=4), Attempt("Fsdp", FEW[1])], LONGER),
    **{f"planned, {name}": Case([Attempt("Fsdp", world=3, planned=plan)], UNEVEN) for name, plan in PLANS.items()},
}
if FULL:
    CASES |= {
        "several": Case([Attempt("Fsdp")]),
        "several, placed": Case([Attempt("Fsdp", "a third each, recomputed", overlap="Forward")]),
        "killed": Case([Attempt("Fsdp", kill_at=3), Attempt("Fsdp")], LONGER),
        "no room": Case([Attempt("Fsdp", block_step=4)], LONGER),
        "Zero3, several": Case([Attempt("Zero3")], {**SHORT, **UNTIED}),
        "Fsdp, several": Case([Attempt("Fsdp")], {**SHORT, **UNTIED}),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    if not FULL:
        placements = f"{len(PLACED)} of {2 * len(ALL_PLACEMENTS)} placements"
        print(f"\nreduced: {placements}, {len(MODELS)} of 7 models, {len(PLANS)} of 4 plans")
    results = zero_runs.run_all(list(CASES.values()), tmp_path_factory.mktemp("fsdp"))
    return dict(zip(CASES, results, strict=True))


def test_with_one_micro_batch_a_rank_a_run_under_fsdp_is_ddp(found: dict[str, Found]) -> None:
    """Dropout, clipping, evaluation, and tied embeddings, whose uses are exchanged apart."""
    assert found["Ddp"].exit_codes == found["Fsdp"].exit_codes == [[0, 0]], found["Fsdp"].logs
    assert len(found["Ddp"].tensors) == 60
    assert found["Fsdp"].figures == found["Ddp"].figures


@pytest.mark.parametrize(("placement", "overlap"), PLACED)
def test_no_placement_and_no_overlap_changes_a_bit(found: dict[str, Found], placement: str, overlap: str) -> None:
    placed = found[f"{placement}, {overlap}"]
    assert placed.exit_codes == [[0, 0]], placed.logs
    assert placed.figures == found["Ddp"].figures


@pytest.mark.parametrize("name", MODELS)
def test_what_is_hard_to_divide_has_the_bits_of_ddp(found: dict[str, Found], name: str) -> None:
    """Fewer rows than ranks, frozen and unused parameters; gradients on some ranks only; steps left out."""
    ours, theirs = found[f"Fsdp, {name}"], found[f"Ddp, {name}"]
    assert {code for codes in (*ours.exit_codes, *theirs.exit_codes) for code in codes} == {0}, ours.logs
    assert ours.figures == theirs.figures
    assert ours.tensors


def test_a_step_was_left_out(found: dict[str, Found]) -> None:
    assert found["Fsdp, overflowing model"].norms["2"] is None


def test_a_stopped_run_goes_on_as_ddp_and_back(found: dict[str, Found]) -> None:
    stopped = found["stopped"]
    assert stopped.exit_codes == [[ExitCode.PREEMPTED] * 2, [ExitCode.PREEMPTED] * 2, [0, 0]], stopped.logs
    assert stopped.figures == found["uninterrupted"].figures


def test_bfloat16_moments_are_those_of_ddp_and_resumed_as_they_are(found: dict[str, Found]) -> None:
    ours, theirs = found["narrow"], found["narrow, Ddp"]
    assert ours.exit_codes == [[ExitCode.PREEMPTED] * 2, [0, 0]], ours.logs
    assert ours.figures == theirs.figures
    assert theirs.tensors != found["uninterrupted"].tensors


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_with_the_most_rows_holds_no_more_than_planned(found: dict[str, Found], name: str) -> None:
    """Three ranks, and no row count that three divides; its budgets are the plan, so that any byte more is rejected."""
    planned = found[f"planned, {name}"]
    assert planned.exit_codes == [[0, 0, 0]], planned.logs
    for tier in Tier:
        assert planned.peaks[tier] <= planned.planned[tier], tier
    if name == "resident":  # no whole chunks, which are most of so small an optimizer
        assert planned.peaks[Tier.DEVICE] >= 0.7 * planned.planned[Tier.DEVICE]


def test_every_rank_holds_less_than_with_ddp(found: dict[str, Found]) -> None:
    assert found["Fsdp"].tier_bytes["device"] < found["Ddp"].tier_bytes["device"]


if FULL:

    def test_fsdp_sums_micro_batches_alike_whatever_the_placement(found: dict[str, Found]) -> None:
        """Micro-batches are added after the ranks."""
        assert found["several, placed"].exit_codes == [[0, 0]], found["several, placed"].logs
        assert found["several, placed"].figures == found["several"].figures

    def test_a_killed_rank_is_followed_and_the_run_goes_on_from_its_checkpoint(found: dict[str, Found]) -> None:
        killed = found["killed"]
        assert killed.exit_codes == [[1, -9], [0, 0]], killed.logs
        assert killed.terminations[0][0]["follower"] is True, killed.terminations
        assert killed.figures == found["uninterrupted"].figures

    def test_a_checkpoint_that_rank_0_cannot_write_is_missed_by_all(found: dict[str, Found]) -> None:
        blocked = found["no room"]
        assert (blocked.exit_codes, blocked.missed, blocked.checkpoints) == ([[0, 0]], [4], [2, 6]), blocked.logs
        assert blocked.figures == found["uninterrupted"].figures

    def test_without_ties_fsdp_and_zero3_give_the_same_bits(found: dict[str, Found]) -> None:
        assert found["Fsdp, several"].figures == found["Zero3, several"].figures
