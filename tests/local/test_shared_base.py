"""Real runs of adapters that train together on one frozen base: each member equals its solo run bit for bit, and a
round of all members moves the bytes of the base once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases.huggingface_models import spec_of
from harness import killed_runs, local_runs, sweep_runs
from harness.depth import FULL
from harness.killed_runs import Kill
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.errors import UserError
from spillway.plan import (
    ActivationPlan,
    MemberPlan,
    MemoryPlan,
    OptimizerPlan,
    ParameterPlan,
    Policy,
    Tier,
    TierBytes,
    Turns,
)
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.units import GIB, MIB
from spillway_trainer.assemble import Base, Tiers
from spillway_trainer.models.build import build_model
from spillway_trainer.sweep.shared_base import adopt
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes

pytestmark = pytest.mark.ci

LAYERS, STEPS = 2, 8
NAMES = ("low", "high", "other-seed")
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: adapters}
spec:
  model:
    source: {path: MODEL}
    lora: {rank: 4}
  data:
    text: {path: TEXT}
    evaluation: {fraction: "0.02", everySteps: 4}
  training: {steps: 8, sequenceLength: 32, globalBatchSize: 4, microBatchSize: 2, gradientClipping: "0.5",
             optimizer: {learningRate: "2e-2"}, schedule: {name: Cosine, warmupSteps: 3}}
  checkpoint: {everySteps: 3}
  objective: {OBJECTIVE}
  members:
  - {name: low, training: {optimizer: {learningRate: "1e-3"}}}
  - {name: high, training: {optimizer: {learningRate: "5e-2"}, gradientClipping: "0"}}
  - {name: other-seed, model: {lora: {rank: 8}}, training: {seed: 7}}
"""
FAILING = """  - name: exploding
    training: {optimizer: {learningRate: "10", weightDecay: "10"}, nonFinite: Fail, gradientClipping: "0",
               schedule: {name: Constant, warmupSteps: 0}}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A directory with a model to start from, and the tokenizer of a first run."""
    root = tmp_path_factory.mktemp("model")
    document = local_runs.JOB.replace("steps: 12", "steps: 1").replace("warmupSteps: 3", "warmupSteps: 1")
    job = local_runs.job_file(root / "first", text, root / "corpus", 1)
    first = job.model_copy(update={"spec": parse_job(document.replace("TEXT", str(text)), "first").spec})
    assert local_runs.complete(first, local_runs.disabled_plan()) == 0, local_runs.log_of(root / "first", 1)
    torch.manual_seed(3)
    sizes = LlamaConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        vocab_size=512, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(root / "model")
    shutil.copy(root / "corpus" / "tokenizer.json", root / "model")
    return root / "model"


def sweep_file(output: Path, text: Path, model: Path, epoch: int = 1, objective: str = "", job: str = JOB) -> JobFile:
    document = job.replace("MODEL", str(model))
    return sweep_runs.sweep_file(output, text, model.parent / "tokens", epoch, document, objective)


def together(
    job: JobFile,
    num_attached: int,
    homes: Sequence[Tier] = (Tier.HOST, Tier.NVME, Tier.HOST, Tier.HOST),
    boundaries: Policy = Policy.HOST,
    num_slots: int = 2,
    turn_steps: int = 2,
) -> MemoryPlan:
    """A plan in which every member streams its frozen parameters and updates its states on the CPU. Without homes,
    everything is resident."""
    parameters = ParameterPlan(homes=homes, num_slots=num_slots, order="WeightStationary", boundaries=boundaries)
    plan = local_runs.disabled_plan(LAYERS).model_copy(
        update={
            "mode": "Auto",
            "micro_batch_size": 2,
            "optimizer": OptimizerPlan(cpu_share=1.0, resident_share=0.0, chunk_parameters=211, num_threads=1),
            "activations": ActivationPlan(
                answers=(Policy.KEEP, *[Policy.RECOMPUTE] * LAYERS, Policy.KEEP), minimum_bytes=256, num_io_threads=1
            ),
            "parameters": parameters if homes else ParameterPlan(),
            "bytes": {tier: TierBytes(buffers=32 * MIB) for tier in Tier} | {Tier.DEVICE: TierBytes()},
        }
    )
    members = tuple(
        MemberPlan(
            name=one.name, plan=plan, parked_bytes=MIB, num_steps=STEPS,
            base=job.spec.members[0].name, num_attached=num_attached,
        )
        for one in job.spec.members
    )  # fmt: skip
    turns = Turns(policy="RoundRobin", num_steps=turn_steps, num_attached=num_attached, seconds=1.0, bound_seconds=1.0)
    return plan.model_copy(update={"members": members, "turns": turns})


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory, text: Path, model: Path) -> dict[str, Path]:
    """The output directory of each member's solo run, in which everything stays on the device."""
    job, outputs = sweep_file(tmp_path_factory.mktemp("none"), text, model), dict[str, Path]()
    plan = local_runs.disabled_plan(LAYERS).model_copy(update={"micro_batch_size": 2})
    for name in NAMES:
        outputs[name] = tmp_path_factory.mktemp(name)
        file = sweep_runs.solo_file(job, name, outputs[name])
        assert local_runs.complete(file, plan) == 0, local_runs.log_of(outputs[name], 1)
    return outputs


def run(job: JobFile, plan: MemoryPlan) -> None:
    assert local_runs.complete(job, plan) == 0, local_runs.log_of(Path(job.output_directory), job.epoch)


def all_as_alone(job: JobFile, solo: dict[str, Path]) -> None:
    for name, alone in solo.items():
        output = sweep_runs.member_output(job, name)
        assert sweep_runs.losses(output) == sweep_runs.losses(alone), name
        assert sweep_runs.evaluations(output) == sweep_runs.evaluations(alone), name
        now = sweep_runs.final_tensors(sweep_runs.member_checkpoints(job, name), STEPS)
        then = sweep_runs.final_tensors(alone / "checkpoints", STEPS)
        assert now.keys() == then.keys()
        assert [tensor for tensor in now if not torch.equal(now[tensor], then[tensor])] == [], name


def moved(job: JobFile, link: str, step: int) -> int:
    """Bytes that all members together moved over a link in their step number `step`."""
    names = [one.name for one in job.spec.members]
    steps = [local_runs.events(sweep_runs.member_output(job, name), "step") for name in names]
    return sum(event["moved_bytes"].get(link, 0) for events in steps for event in events if event["step"] == step)


def test_solo_runs_differ_so_that_a_member_that_took_anothers_would_show(solo: dict[str, Path]) -> None:
    curves = [tuple(sweep_runs.losses(output).values()) for output in solo.values()]
    assert len(set(curves)) == len(NAMES)


ALL_STREAM = (Tier.HOST, Tier.NVME, Tier.HOST, Tier.HOST)
CASES = {
    "all three, every segment streams": (3, ALL_STREAM, Policy.HOST, 2),
    "two of three, boundaries stay": (2, ALL_STREAM, Policy.KEEP, 2),
    "one slot, boundaries on NVMe": (3, ALL_STREAM, Policy.NVME, 1),
    "some segments stay": (3, (Tier.HOST, Tier.DEVICE, Tier.NVME, Tier.HOST), Policy.HOST, 2),
    "all segments stay": (2, (), Policy.KEEP, 2),
}
REDUCED = ("all three, every segment streams", "two of three, boundaries stay", "all segments stay")


@pytest.mark.parametrize("case", CASES if FULL else REDUCED)
def test_members_on_one_base_are_their_solo_runs_bit_for_bit(
    case: str, tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    num_attached, homes, boundaries, num_slots = CASES[case]
    job = sweep_file(tmp_path, text, model)
    run(job, together(job, num_attached, homes, boundaries, num_slots))
    all_as_alone(job, solo)


def test_members_attached_together_load_and_read_the_base_once_per_round(
    tmp_path: Path, text: Path, model: Path
) -> None:
    jobs, reads = dict[int, JobFile](), dict[int, int]()
    for num_attached in (1, 3):
        job = jobs[num_attached] = sweep_file(tmp_path / str(num_attached), text, model)
        plan = together(job, num_attached, (Tier.NVME,) * (LAYERS + 2), Policy.KEEP, turn_steps=STEPS)
        process = killed_runs.start(job, plan, [Kill("the load of a base")])
        process.join()
        assert process.exitcode == 0, local_runs.log_of(Path(job.output_directory), 1)
        reads[num_attached] = killed_runs.num_calls(job, "the load of a base")
    assert reads == {1: len(NAMES), 3: 1}
    for link in ("h2d", "nvme_read"):
        alone = moved(jobs[1], link, 2)
        assert alone > 0
        assert moved(jobs[3], link, 2) * len(NAMES) == alone, link


def on_two_devices(plan: MemoryPlan) -> MemoryPlan:
    assert plan.turns is not None
    return plan.model_copy(update={"turns": plan.turns.model_copy(update={"num_devices": 2})})


def test_members_on_the_base_of_two_devices_are_their_solo_runs(
    tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    """Two of three members train together, and the third trains on the other device."""
    job = sweep_file(tmp_path, text, model)
    run(job, on_two_devices(together(job, 2)))
    all_as_alone(job, solo)
    assert {event["device"] for event in local_runs.events(tmp_path, "member_started")} == {0, 1}


NUM_ADAPTERS = 16 if FULL else 4


def test_each_device_loads_the_base_once_per_round_for_all_its_members(tmp_path: Path, text: Path, model: Path) -> None:
    """Uses adapters of three ranks with different learning rates, half of them on each device."""
    listed = "".join(
        f"  - {{name: a{index:02}, model: {{lora: {{rank: {(2, 4, 8)[index % 3]}}}}}, "
        f'training: {{optimizer: {{learningRate: "{index + 1}e-3"}}}}}}\n'
        for index in range(NUM_ADAPTERS)
    )
    document = JOB[: JOB.index("  - {name: low")] + listed
    loads = dict[int, int]()
    for num_devices, num_attached in ((1, 1), (2, NUM_ADAPTERS // 2)):
        job = sweep_file(tmp_path / str(num_devices), text, model, job=document)
        plan = together(job, num_attached, (Tier.NVME,) * (LAYERS + 2), Policy.KEEP, turn_steps=STEPS)
        run(job, on_two_devices(plan) if num_devices == 2 else plan)
        loads[num_devices] = moved(job, "h2d", 2)
    assert 0 < loads[2] * NUM_ADAPTERS == 2 * loads[1]


KILLS = range(1, 9 * 2 * LAYERS * len(NAMES), 5) if FULL else (25,)
"""numbers of the calls at which a run is killed: three members x 2 x segments in each round, up to the last ones"""


@pytest.mark.parametrize("call", KILLS)
def test_members_killed_between_two_segments_train_the_same_curves(
    call: int, tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    job = sweep_file(tmp_path, text, model)
    process = killed_runs.start(job, together(job, 2), [Kill("a segment of one of several", call)])
    process.join()
    assert process.exitcode == -9, local_runs.log_of(tmp_path, 1)
    again = sweep_file(tmp_path, text, model, epoch=2)
    run(again, together(again, 3))
    all_as_alone(again, solo)


def test_a_member_that_fails_ends_alone_and_the_others_on_its_base_go_on(
    tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    job = sweep_file(tmp_path, text, model, job=JOB + FAILING)
    run(job, together(job, 4))
    all_as_alone(job, solo)
    states = sweep_runs.states(tmp_path)
    assert states["exploding"]["event"] == "member_failed"
    assert "NonFinite" in states["exploding"]["reason"]


def test_member_stopped_by_a_round_leaves_the_others_as_they_train_alone(
    tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    job = sweep_file(tmp_path, text, model, objective="halving: 4")
    run(job, together(job, 3))
    values = {name: sweep_runs.evaluations(alone)[4] for name, alone in solo.items()}
    best = min(values, key=lambda name: values[name])
    states = sweep_runs.states(tmp_path)
    assert states[best]["event"] == "member_completed"
    for name, alone in solo.items():
        steps = STEPS if name == best else 4
        expected = {step: loss for step, loss in sweep_runs.losses(alone).items() if step <= steps}
        assert sweep_runs.losses(sweep_runs.member_output(job, name)) == expected


def test_a_member_on_another_base_than_the_plan_says_is_rejected() -> None:
    one, other = (build_model(spec_of(config={"numLayers": layers}, lora={"rank": 4})) for layers in (2, 3))
    frozen = {name: parameter for name, parameter in one.named_parameters() if not parameter.requires_grad}
    tiers = Tiers(DeviceLedger(None), HostSlab(0), None, CpuLanes(HostSlab(0), DeviceLedger(None)))
    with pytest.raises(
        UserError, match=r"layers\.2.* is missing from one of the two models .*; the plan was made by another"
    ):
        adopt(Base(tiers, None, frozen), other)
    tiers.close()


def test_a_planned_sweep_on_one_base_stays_within_its_plan(
    tmp_path: Path, text: Path, model: Path, solo: dict[str, Path]
) -> None:
    """The ledger and the slabs raise errors beyond their budgets, which are the planner's."""
    sizes = (
        "config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, "
        "vocabSize: 512, tieWordEmbeddings: true}"
    )
    document = JOB.replace("OBJECTIVE", "").replace("TEXT", str(text))
    document = document.replace("source: {path: MODEL}", sizes)
    document = document.replace(", training: {seed: 7}", "")
    document += (
        "  memory: {advanced: {parameters: {placement: Stream}}, budget: {device: 8Mi, host: 64Mi, nvme: 64Mi}}\n"
    )
    asked = parse_job(document, "adapters")
    plan = make_plan(asked, local_node(2, GIB, GIB, GIB))
    assert isinstance(plan, MemoryPlan)
    assert plan.turns is not None and plan.turns.num_attached == len(NAMES)
    job = sweep_file(tmp_path, text, model).model_copy(update={"spec": asked.spec})
    job = job.model_copy(update={"corpus_directory": str(tmp_path / "corpus")})
    run(job, plan)
    planned = plan.members[0].plan
    for name in NAMES:
        for event in local_runs.events(sweep_runs.member_output(job, name), "step"):
            for tier in (Tier.DEVICE, Tier.HOST):
                assert event["tier_peak_bytes"][tier] <= planned.bytes[tier].total, tier
