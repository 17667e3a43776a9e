"""The law of the house: whatever the plan, the same bits as memory.mode Disabled, through the real assembly."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.optimizer_cases import odd_chunk
from fakes.lazy_lanes import LazyLanes
from fakes.no_checkpoints import NoCheckpoints
from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Overlap, Policy, Tier, TierBytes
from spillway_trainer import assemble as assembly_module
from spillway_trainer import config, run_job
from spillway_trainer.activation_spill import Chooser, Chosen
from spillway_trainer.assemble import assemble, fill
from spillway_trainer.corpus.tokens import Corpus, build_corpus, open_corpus
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.trainer import Run, RunProgress, StopRequest, train

torch.set_num_threads(1)

KEEP, RECOMPUTE, HOST, NVME = Policy.KEEP, Policy.RECOMPUTE, Policy.HOST, Policy.NVME
STEPS = 3
SPECULATIVE = 50_000
"""parameters updated in backward, of about 150,000"""


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]

    def differences(self, other: Outcome) -> list[str]:
        pairs = (("loss", self.losses, other.losses), ("norm", self.norms, other.norms))
        found = [what for what, ours, theirs in pairs if repr(ours) != repr(theirs)]  # nan is itself: float16 overflows
        return found + [name for name, tensor in self.state.items() if not torch.equal(tensor, other.state[name])]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("plans") / "text")


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    source = run_job.text_source(text)
    build_corpus(source, text.parent / "corpus", 512, lambda line: None)
    return open_corpus(text.parent / "corpus", source, 512)


def job_of(text: Path, output: Path, changes: dict[str, str]) -> JobFile:
    document = local_runs.JOB.replace("TEXT", str(text)).replace("steps: 12", f"steps: {STEPS}")
    for old, new in changes.items():
        assert old in document, old
        document = document.replace(old, new)
    job = local_runs.job_file(output, text, output / "corpus", epoch=1)
    return job.model_copy(update={"spec": parse_job(document, "small job").spec})


def outcome(job: JobFile, plan: MemoryPlan, corpus: Corpus, look: Callable[[Run], None] = lambda run: None) -> Outcome:
    """Train the job under the plan in this process, and look at the run at its end."""
    shutil.rmtree(job.checkpoint_directory, ignore_errors=True)
    assembly = assemble(job, plan)
    fill(assembly, job.spec.training.seed)
    losses, norms = [], []

    class Listener(Recorder):
        def step(self, step) -> None:  # type: ignore[no-untyped-def]
            losses.append(step.loss)
            norms.append(step.gradient_norm)

    run = Run(
        model=assembly.model,
        optimizer=assembly.optimizer,
        techniques=assembly,
        position=assembly.position,
        batches=run_job.make_batches(job, corpus, assembly.model.objective),
        learning_rate=config.learning_rate(job.spec),
        checkpoints=NoCheckpoints(),
        recorder=Listener(Path(job.output_directory) / "run.jsonl"),
        loss_scale=config.loss_scale(job.spec),
    )
    train(run, config.loop_settings(job.spec, plan), RunProgress(), StopRequest())
    look(run)
    state = {name: tensor.clone() for name, tensor in assembly.optimizer.state()}
    state |= {f"parameter.{name}": p.detach().clone() for name, p in assembly.model.named_parameters()}
    held = assembly.held_bytes()
    assembly.tiers.close()
    assert (held[Tier.NVME] > 0) == (plan.optimizer.nvme_share > 0.0), "states alone stay there between steps"
    return Outcome(losses, norms, state)


MODELS = {
    "tied, dropout, bfloat16": {},
    "untied, no dropout, float32": {
        'tieWordEmbeddings: true, dropout: "0.1"}': "}\n    precision: {compute: float32}",
    },
    "one micro-batch, no clipping": {"microBatchSize: 4": "microBatchSize: 8", '"0.5"': '"0"'},
    "eight micro-batches": {"microBatchSize: 4": "microBatchSize: 1"},
    "Lion, groups": {
        'learningRate: "2e-3"': 'name: Lion, learningRate: "3e-4", groups: [{match: "*norm*", weightDecay: "0.5"}, '
        '{match: "layers.[01].*", learningRateFactor: "0.5"}]'
    },
    "float16, no clipping": {
        'dropout: "0.1"}': 'dropout: "0.1"}\n    precision: {compute: float16}',
        'gradientClipping: "0.5"': 'gradientClipping: "0", lossScale: {initial: 262144, growthInterval: 1}',
    },
    "float16, clipped": {
        'dropout: "0.1"}': 'dropout: "0.1"}\n    precision: {compute: float16}',
        "microBatchSize: 4": "microBatchSize: 2",
    },
    "bfloat16 moments": {'learningRate: "2e-3"': 'learningRate: "2e-3", moments: bfloat16'},
    "int8 moments": {'learningRate: "2e-3"': 'learningRate: "2e-3", moments: int8'},
}
PLANS: dict[str, tuple[tuple[float, ...], Overlap, list[Policy]]] = {
    "kept, resident": ((0.0, 0.0, 1.0), "None", [KEEP] * 4),
    "kept, all on the CPU": ((1.0, 0.0, 0.0), "Backward", [KEEP] * 4),
    "host, all streamed": ((0.0, 1.0, 0.0), "None", [HOST] * 4),
    "nvme, half and half": ((0.5, 0.5, 0.0), "Forward", [NVME] * 4),
    "recomputed, a third each": ((0.34, 0.33, 0.33), "None", [RECOMPUTE] * 4),
    "mixed": ((0.61, 0.17, 0.22), "Forward", [NVME, RECOMPUTE, KEEP, HOST]),
    "kept, states on NVMe": ((0.0, 0.0, 0.0, 1.0), "None", [KEEP] * 4),
    "mixed, states on NVMe": ((0.2, 0.2, 0.2, 0.4), "Forward", [NVME, RECOMPUTE, KEEP, HOST]),
}
LANES = {"threads": CpuLanes, "lazy": LazyLanes}


def plan_of(job: JobFile, shares: tuple[float, ...], overlap: Overlap, answers: list[Policy]) -> MemoryPlan:
    micro_batch_size = job.spec.training.micro_batch_size
    cpu, streamed, resident, *nvme = shares
    return local_runs.spread_plan().model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "num_micro_batches": job.spec.training.global_batch_size // micro_batch_size,
            "optimizer": OptimizerPlan(
                cpu_share=cpu,
                streamed_share=streamed,
                resident_share=resident,
                nvme_share=sum(nvme),
                chunk_parameters=odd_chunk(job.spec.training.optimizer.moment_type),
                overlap=overlap,
                speculative_parameters=SPECULATIVE if overlap == "Backward" else 0,
            ),
            "activations": ActivationPlan(
                answers=(KEEP, *answers, KEEP), minimum_bytes=1024, window_bytes=1 << 18, num_io_threads=1
            ),
        }
    )


@pytest.fixture(scope="module")
def plain(text: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every model with all techniques off."""
    found = {}
    for name, changes in MODELS.items():
        job = job_of(text, tmp_path_factory.mktemp("plain"), changes)
        plan = plan_of(job, (0.0, 0.0, 1.0), "None", []).model_copy(
            update={"mode": "Disabled", "activations": ActivationPlan()}
        )
        found[name] = outcome(job, plan, corpus)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_changes_no_bit(
    model: str,
    plan: str,
    lanes: str,
    plain: dict[str, Outcome],
    text: Path,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly_module, "CpuLanes", LANES[lanes])
    job = job_of(text, tmp_path, MODELS[model])
    assert outcome(job, plan_of(job, *PLANS[plan]), corpus).differences(plain[model]) == []


@pytest.mark.sweep
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("plan", ["host, all streamed", "recomputed, a third each", "mixed"])
@pytest.mark.parametrize("model", ["tied, dropout, bfloat16", "Lion, groups", "bfloat16 moments"])
def test_on_a_device_apart_too(
    model: str,
    plan: str,
    lanes: str,
    plain: dict[str, Outcome],
    text: Path,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose memory is not the host's: values go up, and streamed masters leave a half of them there."""

    def apart(*arguments: Any, **how: Any) -> OptimizerOffload:
        made = OptimizerOffload(*arguments, **(how | {"in_place": False}))
        assert any(placed.is_split for placed in made._placed)
        return made

    monkeypatch.setattr(assembly_module, "CpuLanes", LANES[lanes])
    monkeypatch.setattr(assembly_module, "OptimizerOffload", apart)
    job = job_of(text, tmp_path, MODELS[model])
    assert outcome(job, plan_of(job, *PLANS[plan]), corpus).differences(plain[model]) == []


def test_the_models_are_different_runs(plain: dict[str, Outcome]) -> None:
    """Else one passing test would say nothing about the others."""
    assert len({tuple(outcome.losses) for outcome in plain.values()}) == len(plain)


def test_storages_that_the_run_places_one_by_one_change_no_bit(
    text: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps are watched, three have what was chosen."""
    told: list[Chosen] = []
    decide = Chooser.end_step

    def end_step(self: Chooser) -> Chosen | None:
        chosen = decide(self)
        told.extend([chosen] if chosen is not None else [])
        return chosen

    monkeypatch.setattr(Chooser, "end_step", end_step)
    job = job_of(text, tmp_path, {"steps: 3": "steps: 6"})
    placed = plan_of(job, (0.0, 0.0, 1.0), "None", [NVME, NVME, HOST, HOST])
    room = TierBytes(activations=2 << 20, buffers=1 << 20)
    placed = placed.model_copy(update={"bytes": placed.bytes | dict.fromkeys(Tier, room)})
    kept = plan_of(job, (0.0, 0.0, 1.0), "None", []).model_copy(
        update={"mode": "Disabled", "activations": ActivationPlan()}
    )
    assert outcome(job, placed, corpus).differences(outcome(job, kept, corpus)) == []
    assert [(chosen.reason, sum(chosen.tier_bytes.values()) > 0) for chosen in told] == [(told[0].reason, True)]


@pytest.mark.parametrize("plan", ["kept, resident", "mixed"])
def test_evaluation_loss_is_that_of_a_plain_loop_over_untrained_windows(
    plan: str, text: Path, corpus: Corpus, tmp_path: Path
) -> None:
    job = job_of(text, tmp_path, {"everySteps: 7": f"everySteps: {STEPS}, sequences: 0"})
    losses, windows, T = list[float](), set[int](), job.spec.training.sequence_length
    tokens = corpus.tokens(0, corpus.index.num_tokens)

    def plain_loop(run: Run) -> None:
        trained = run.batches.batch(range(run.batches.num_sequences)).tokens_BT.numpy()
        seen = {row.tobytes() for row in trained}
        windows.update(w for w in range((len(tokens) - 1) // T) if tokens[w * T : (w + 1) * T].tobytes() not in seen)
        run.model.eval()
        for start in range(0, len(windows), 4):
            rows = sorted(windows)[start : start + 4]
            inputs = torch.tensor([tokens[w * T : (w + 1) * T].tolist() for w in rows])
            labels = torch.tensor([tokens[w * T + 1 : (w + 1) * T + 1].tolist() for w in rows])
            with torch.no_grad():
                losses.append(run.model(inputs, labels, 1).item())

    outcome(job, plan_of(job, *PLANS[plan]), corpus, plain_loop)
    (event,) = local_runs.events(tmp_path, "evaluation")
    assert (event["step"], event["tokens"]) == (STEPS, len(windows) * T)
    assert event["loss"] == math.fsum(losses) / (len(windows) * T)
