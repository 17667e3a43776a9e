"""float16: whatever the placement, the overlap and the step of a resume, the bits are those of memory.mode Disabled.

The scale begins where gradients overflow and doubles after every other step, so that every run backs off and grows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import local_runs
from harness.depth import FULL
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.errors import NonFinite, Preempted, UserError
from spillway.metrics import StepMetrics
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, ParameterPlan, Policy, Tier
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.models.transformer import Embedding
from spillway_trainer.optimizer.loss_scale import NUM_FINITE, SCALE
from spillway_trainer.optimizer_offload.speculation import Speculation
from spillway_trainer.ranks import World
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.run_job import run_job
from spillway_trainer.trainer import RunProgress, StopRequest

torch.set_num_threads(1)

STEPS = 8
RESUMES = tuple(range(1, STEPS)) if FULL else (1, 3, 4)
"""steps after which a run is resumed: after an overflow, after a growth, and between"""
CHANGES = {
    'dropout: "0.1"}': 'dropout: "0.1"}\n    precision: {compute: float16}',
    'gradientClipping: "0.5"': 'gradientClipping: "0", lossScale: {initial: 524288, growthInterval: 2}',
    "steps: 12": f"steps: {STEPS}",
    "sequenceLength: 64": "sequenceLength: 16",
    "everySteps: 7": f"everySteps: {STEPS + 1}",
    'fraction: "0.05"': 'fraction: "0.001"',
    "everySteps: 3": f"everySteps: {STEPS}",
}


def planned(overlap: str, *, streams: bool = False, **shares: float) -> MemoryPlan:
    optimizer = OptimizerPlan(
        **{"cpu_share": 0.0, "resident_share": 0.0, **shares},
        chunk_parameters=4001,
        overlap=overlap,
        speculative_parameters=60_000 if overlap == "Backward" else 0,
    )
    changes: dict[str, Any] = {"optimizer": optimizer}
    if streams:
        homes = (Tier.HOST,) * 6
        changes["parameters"] = ParameterPlan(homes=homes, order="WeightStationary")
        answers = (Policy.KEEP, *[Policy.RECOMPUTE] * 4, Policy.KEEP)
        changes["activations"] = ActivationPlan(
            answers=answers, minimum_bytes=1024, window_bytes=1 << 16, num_io_threads=1
        )
    return local_runs.spread_plan().model_copy(update=changes)


PLAIN = local_runs.disabled_plan()
PLANS = {
    "None": planned("None", cpu_share=0.5, streamed_share=0.2, resident_share=0.3),
    "Forward": planned("Forward", cpu_share=0.3, streamed_share=0.3, nvme_share=0.4),
    "Backward": planned("Backward", cpu_share=1.0),
    "parameters stream": planned("None", cpu_share=1.0, streams=True),
}


@dataclass(frozen=True)
class Outcome:
    steps: list[StepMetrics]
    hashes: list[str]
    scalars: dict[str, float]

    @property
    def bits(self) -> tuple[object, ...]:
        """To be compared; a NaN is itself."""
        figures = [(s.loss, s.gradient_norm, s.loss_scale, s.skipped) for s in self.steps]
        return repr(figures), self.hashes, self.scalars


class Runs:
    """Attempts of one job over one text, in this process."""

    def __init__(self, root: Path) -> None:
        self.root, self.text = root, local_runs.write_text(root / "text")

    def job(self, output: Path, epoch: int, changes: dict[str, str]) -> JobFile:
        document = local_runs.JOB.replace("TEXT", str(self.text))
        for old, new in (CHANGES | changes).items():
            assert old in document, old
            document = document.replace(old, new)
        job = local_runs.job_file(output, self.text, self.root / "corpus", epoch)
        (output / "spill").mkdir(exist_ok=True)
        spec = parse_job(document, "small job").spec
        return job.model_copy(update={"spec": spec, "spill_directory": str(output / "spill"), "metrics_port": None})

    def attempt(
        self, output: Path, plan: MemoryPlan, epoch: int = 1, last: int = STEPS, changes: dict[str, str] | None = None
    ) -> list[StepMetrics]:
        """To the end, or a checkpoint after step `last`."""
        found, stop = list[StepMetrics](), StopRequest()

        class Listener(Recorder):
            def step(self, step: StepMetrics) -> None:
                found.append(step)
                stop.requested = len(found) > 0 and step.step == last - 1 < STEPS - 1

        output.mkdir(exist_ok=True)
        stop.requested = last == 1
        try:
            run_job(self.job(output, epoch, changes or {}), plan, Listener(None), RunProgress(), stop, World())
        except Preempted:
            assert found[-1].step == last
        return found

    def outcome(self, output: Path, *parts: tuple[MemoryPlan, int]) -> Outcome:
        """Attempts one after the other, each with its plan up to a step."""
        steps = [s for epoch, (plan, last) in enumerate(parts, 1) for s in self.attempt(output, plan, epoch, last)]
        saved = choose_resume(output / "checkpoints").checkpoint
        assert saved is not None
        manifest = saved.manifest
        return Outcome(steps, [entry.xxh3_128 for entry in manifest.files], dict(manifest.state.scalars))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("float16"))


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Outcome:
    return runs.outcome(runs.root / "plain", (PLAIN, STEPS))


def test_the_plain_run_overflows_backs_off_and_grows(plain: Outcome) -> None:
    scales = [step.loss_scale for step in plain.steps]
    print([(s.loss_scale, s.skipped, s.gradient_norm) for s in plain.steps])
    assert [step.overflowed for step in plain.steps] == [step.skipped for step in plain.steps]
    assert any(step.skipped for step in plain.steps)
    assert any(later == 2 * earlier for earlier, later in itertools.pairwise(scales) if earlier and later)
    assert all(math.isfinite(step.loss) for step in plain.steps)
    assert plain.scalars["num_updates"] == sum(not step.skipped for step in plain.steps)


@pytest.mark.parametrize("plan", PLANS)
def test_every_placement_and_overlap_has_the_bits_of_the_plain_run(
    plan: str, runs: Runs, plain: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, commit = list[bool](), Speculation.commit

    def counted(self: Speculation, *given: Any) -> Any:
        found = commit(self, *given)
        committed.append(found is not None)
        return found

    monkeypatch.setattr(Speculation, "commit", counted)
    assert runs.outcome(tmp_path, (PLANS[plan], STEPS)).bits == plain.bits
    assert any(committed) == (plan == "Backward"), "its updates count once finiteness is known"


@pytest.mark.parametrize("step", RESUMES)
def test_a_resume_after_any_step_goes_on_with_the_same_scale_and_bits(
    step: int, runs: Runs, plain: Outcome, tmp_path: Path
) -> None:
    """In the middle of its growth interval, too; under another plan than before."""
    print(f"{len(RESUMES)} of {STEPS - 1} steps")
    names = list(PLANS)
    first, second = PLANS[names[step % 4]], PLANS[names[(step + 1) % 4]]
    assert runs.outcome(tmp_path, (first, step), (second, STEPS)).bits == plain.bits


def test_a_checkpoint_holds_the_scale_and_how_long_it_has_held(plain: Outcome) -> None:
    last = plain.steps[-1]
    assert {SCALE, NUM_FINITE} < set(plain.scalars)
    assert plain.scalars[SCALE] in (last.loss_scale, 2 * (last.loss_scale or 0), (last.loss_scale or 0) / 2)


def test_gradients_that_overflow_at_the_least_scale_end_the_run(runs: Runs, tmp_path: Path) -> None:
    clipping, scale = 'gradientClipping: "0.5"', "lossScale: {initial: 16777216, minimum: 16777216}"
    with pytest.raises(NonFinite, match=r"step 1: .*at the smallest loss scale, 1\.67772e\+07.*lossScale\.minimum"):
        runs.attempt(tmp_path, PLAIN, changes={clipping: f"{clipping}, nonFinite: SkipStep, {scale}"})


class WithoutFloat16(torch.autograd.Function):
    """As torch says it of an operation that has no such form."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("\"special_cpu\" not implemented for 'Half'")


def test_error_for_an_op_without_float16_support_suggests_bfloat16(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = Embedding.forward
    monkeypatch.setattr(Embedding, "forward", lambda self, tokens: WithoutFloat16.apply(embed(self, tokens)))
    with pytest.raises(UserError, match=r"in float16 on this device \(\"special_cpu\".*compute: bfloat16"):
        runs.attempt(tmp_path, PLAIN)
