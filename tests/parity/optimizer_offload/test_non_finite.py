"""Gradients that are not finite on one rank alone: every strategy does what the policy says, on all ranks.

The loss is finite, so the norm of all ranks' gradients alone can tell. Two ranks; one process runs all cases first.
"""

from __future__ import annotations

import pytest

from harness import zero_runs
from harness.depth import FULL
from harness.zero_runs import ONE_MICRO_BATCH, Attempt, Case, Found
from spillway.errors import ExitCode

pytestmark = pytest.mark.ci

STRATEGIES = ("Ddp", "Fsdp", "Zero1", "Zero2", "Zero3")
MODELS = {"bfloat16": "infinite", "float32": "undefined"}
"""by compute type; what the second step's gradients are"""
ALL = [(strategy, compute) for compute in MODELS for strategy in STRATEGIES]
SKIPPED = ALL if FULL else [*ALL[:5], ("Ddp", "float32"), ("Fsdp", "float32"), ("Zero3", "float32")]
FAILED = ALL if FULL else [("Fsdp", "bfloat16"), ("Zero2", "bfloat16")]
CONFIG = """config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 4, numKeyValueHeads: 2,
             intermediateSize: 80, vocabSize: 300, tieWordEmbeddings: true, dropout: "0.1"}"""


def case(strategy: str, compute: str, policy: str) -> Case:
    changes = {
        **ONE_MICRO_BATCH,
        CONFIG: f'entrypoint: "cases.divided_models:{MODELS[compute]}"',
        "compute: bfloat16, gradientReduce: bfloat16": f"compute: {compute}, gradientReduce: float32",
        'gradientClipping: "0.5"': f'gradientClipping: "0.5", nonFinite: {policy}',
        "steps: 4": "steps: 3",
    }
    return Case([Attempt(strategy, keeps=True)], changes)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Found]:
    if not FULL:
        print(f"\nreduced: {len(SKIPPED)} + {len(FAILED)} of 2 x {len(ALL)} strategies and types")
    keys = [(*each, "SkipStep") for each in SKIPPED] + [(*each, "Fail") for each in FAILED]
    results = zero_runs.run_all([case(*key) for key in keys], tmp_path_factory.mktemp("non-finite"))
    return dict(zip(keys, results, strict=True))


@pytest.mark.parametrize(("strategy", "compute"), SKIPPED)
def test_skip_step_leaves_the_step_out_on_all_ranks_and_training_goes_on(
    found: dict[tuple[str, str, str], Found], strategy: str, compute: str
) -> None:
    run = found[strategy, compute, "SkipStep"]
    assert run.exit_codes == [[0, 0]], run.logs
    assert [norm is None for norm in run.norms.values()] == [False, True, False]
    assert None not in run.losses.values()


@pytest.mark.parametrize("compute", MODELS)
def test_fsdp_leaves_out_what_ddp_does(found: dict[tuple[str, str, str], Found], compute: str) -> None:
    """Bit by bit, after it as before."""
    ours, theirs = (found[strategy, compute, "SkipStep"] for strategy in ("Fsdp", "Ddp"))
    assert ours.tensors
    assert ours.figures == theirs.figures


@pytest.mark.parametrize("strategy", ["Zero1", "Zero3"])
def test_all_of_deepspeeds_stages_leave_out_the_same(found: dict[tuple[str, str, str], Found], strategy: str) -> None:
    """Of a model whose products have biases, which DeepSpeed would round apart under ZeRO-3."""
    ours, theirs = (found[each, "bfloat16", "SkipStep"] for each in (strategy, "Zero2"))
    assert ours.tensors
    assert ours.figures == theirs.figures


@pytest.mark.parametrize(("strategy", "compute"), FAILED)
def test_fail_ends_all_ranks_with_the_step_and_saves_nothing(
    found: dict[tuple[str, str, str], Found], strategy: str, compute: str
) -> None:
    run = found[strategy, compute, "Fail"]
    assert run.exit_codes == [[ExitCode.NON_FINITE] * 2], run.logs
    assert all("step 2: loss " in message["message"] for message in run.terminations[0])
    assert run.checkpoints == []
