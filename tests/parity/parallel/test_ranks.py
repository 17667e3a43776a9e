"""Several ranks are one run: the same samples, the same random numbers, sums in a declared order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cases.optimizer_cases import HOST_BYTES, LANES, SKIPPED_STEP, Case, offload, outcome, resident, split
from fakes.tracing import TracingLanes
from harness import local_runs, rank_runs
from harness.after_backward import AfterBackward
from harness.depth import some
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.corpus.objective import TrainingObjective
from spillway_trainer.corpus.tokens import build_corpus, open_corpus
from spillway_trainer.optimizer.plain import StepOptimizer
from spillway_trainer.parallel.backward_exchange import BackwardExchange
from spillway_trainer.parallel.distributed import buckets
from spillway_trainer.run_job import make_batches, text_source
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import Lanes

LOSS_TOLERANCE = 1e-5
"""relative, per step"""
STATE_TOLERANCE = 1e-4
"""of the largest value of each parameter and state: an Adam update divides, so a gradient near 0 turns rounding into
a part of one learning rate"""
BFLOAT16_WIRE_TOLERANCE = 2e-4
"""relative loss where each rank's sum over several micro-batches is rounded to bfloat16: measured 6e-5 over 30 steps"""

SMALL_BUCKET = "5003"
"""values: several buckets, whose ends fall into chunks and parameters; used with every placement"""

FLOAT32_WIRE = {"gradientReduce: bfloat16": "gradientReduce: float32"}
FLOAT32_COMPUTE = {"compute: bfloat16": "compute: float32"}
TWELVE = {"globalBatchSize: 8": "globalBatchSize: 12", "microBatchSize: 2": "microBatchSize: 1"}
UNTIED = {'tieWordEmbeddings: true, dropout: "0.1"': 'tieWordEmbeddings: false, dropout: "0.1"'}
UNCLIPPED = {'gradientClipping: "0.5"': 'gradientClipping: "0"'}
EXACT: list[Mapping[str, str]] = [
    {**FLOAT32_COMPUTE, **TWELVE, **FLOAT32_WIRE},
    {**UNTIED, **UNCLIPPED, **TWELVE, **FLOAT32_WIRE},
]


@dataclass(frozen=True)
class Outcome:
    losses: dict[int, float]
    evaluations: dict[int, float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    """of the last checkpoint"""
    ranks: list[dict[str, str]]
    """digests of what each rank held at the end"""

    def differences(self, other: Outcome) -> list[str]:
        """Names of what differs in a bit."""
        figures = ("losses", "evaluations", "norms")
        found = [name for name in figures if getattr(self, name) != getattr(other, name)]
        return found + [name for name in self.tensors if not torch.equal(self.tensors[name], other.tensors[name])]

    def relative_loss_error(self, other: Outcome) -> float:
        """The largest over steps and evaluations."""
        pairs = [(self.losses, other.losses), (self.evaluations, other.evaluations)]
        assert all(mine.keys() == theirs.keys() for mine, theirs in pairs)
        return max(abs(mine[step] - theirs[step]) / theirs[step] for mine, theirs in pairs for step in theirs)

    def state_error(self, other: Outcome) -> float:
        """The largest difference in a tensor as a part of the tensor's largest value."""
        return max(
            float((mine - other.tensors[name]).abs().max() / other.tensors[name].abs().max())
            for name, mine in self.tensors.items()
        )


@dataclass
class Laboratory:
    """Runs jobs of any number of ranks on one corpus; each of them once. No placement: memory.mode Disabled, and
    gradients are exchanged after backward."""

    root: Path
    text: Path
    corpus: Path
    _known: dict[object, Outcome] = field(default_factory=dict)

    def run(self, world: int, changes: Mapping[str, str], placement: str | None = None) -> Outcome:
        key = (world, tuple(changes.items()), placement)
        if key not in self._known:
            output = self.root / str(len(self._known))
            job = rank_runs.job_file(output, self.text, self.corpus, 1, world, changes)
            bucket = {rank_runs.BUCKET_VARIABLE: SMALL_BUCKET} if placement else {rank_runs.AFTER_VARIABLE: "1"}
            ended = rank_runs.complete(job, rank_runs.plan_for(job, placement), **bucket)
            last = choose_resume(output / "checkpoints").checkpoint
            assert last is not None
            self._known[key] = Outcome(
                rank_runs.losses(job),
                rank_runs.evaluations(job),
                [entry["gradient_norm"] for entry in local_runs.events(output, "step")],
                {k: v for file in sorted(last.path.glob("*.safetensors")) for k, v in load_file(file).items()},
                [each.state for each in ended],
            )
        return self._known[key]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    root = tmp_path_factory.mktemp("ranks")
    text = local_runs.write_text(root / "text")
    build_corpus(text_source(text), root / "corpus", 300, lambda line: None)
    return Laboratory(root, text, root / "corpus")


BUSIEST = ("all on the CPU, kept", "interleaved, mixed")
WIRES: dict[str, Mapping[str, str]] = {"bfloat16": {}, "float32": FLOAT32_WIRE}


@pytest.mark.parametrize(
    ("wire", "placement"),
    some([*(("bfloat16", each) for each in rank_runs.PLACEMENTS), *(("float32", each) for each in BUSIEST)], 4),
)
def test_two_ranks_give_the_same_bits_in_every_placement(laboratory: Laboratory, wire: str, placement: str) -> None:
    """Dropout, tied embeddings, clipping, two micro-batches a rank, exchanged behind backward; against memory.mode
    Disabled in one bucket after backward."""
    plain = laboratory.run(2, WIRES[wire])
    assert laboratory.run(2, WIRES[wire], placement).differences(plain) == []


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_hold_the_same_bits(laboratory: Laboratory, world: int) -> None:
    first, *others = laboratory.run(world, EXACT[1]).ranks
    assert len(first) > 50
    assert all(other == first for other in others)


@pytest.mark.parametrize("model", EXACT, ids=["tied, float32", "untied, unclipped, bfloat16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_ranks_are_one_rank_within_rounding(laboratory: Laboratory, world: int, model: Mapping[str, str]) -> None:
    """With gradients in float32 on the wire: only the order of additions differs."""
    many, one = laboratory.run(world, model), laboratory.run(1, model)
    assert many.relative_loss_error(one) <= LOSS_TOLERANCE
    assert many.state_error(one) <= STATE_TOLERANCE


@pytest.mark.parametrize("changes", [{}, {**FLOAT32_COMPUTE, **FLOAT32_WIRE}], ids=["bfloat16", "float32"])
def test_one_micro_batch_a_rank_gives_the_bits_of_one_rank(laboratory: Laboratory, changes: Mapping[str, str]) -> None:
    """Gradients lose nothing on a wire of their own type, and are added in the order of one rank's micro-batches."""
    assert laboratory.run(4, changes).differences(laboratory.run(1, changes)) == []


FLOAT16 = {
    "compute: bfloat16, gradientReduce: bfloat16": "compute: float16",
    'gradientClipping: "0.5"': 'gradientClipping: "0.5", lossScale: {initial: 16777216, growthInterval: 2}',
    "globalBatchSize: 8": "globalBatchSize: 4",
    "steps: 4": "steps: 6",
}


def test_float16_ranks_skip_the_same_steps_and_match_one_rank_bit_for_bit(laboratory: Laboratory) -> None:
    """The scale is the same on all of them, or their sums would not be; `complete` compares what they hold."""
    two, one = laboratory.run(2, FLOAT16), laboratory.run(1, FLOAT16)
    left_out = [norm is None for norm in two.norms]
    assert any(left_out) and not all(left_out), two.norms
    assert two.differences(one) == []
    assert laboratory.run(2, FLOAT16, "interleaved, mixed").differences(two) == []


ADAPTERS = {', dropout: "0.1"}': "}\n    lora: {rank: 64}"}


def test_adapters_are_exchanged_behind_backward_to_the_same_bits(laboratory: Laboratory) -> None:
    after = laboratory.run(2, ADAPTERS)
    assert laboratory.run(2, ADAPTERS, "resident, kept").differences(after) == []


def test_four_ranks_on_one_host_have_spill_files_of_their_own(laboratory: Laboratory, tmp_path: Path) -> None:
    """Ranks of Ddp hold the same states at the same places, so one file for two of them would change no bit."""
    expected = laboratory.run(4, {})
    job = rank_runs.job_file(tmp_path, laboratory.text, laboratory.corpus, 1, 4, {})
    started = rank_runs.start(job, rank_runs.plan_for(job, "all states on NVMe, kept"))
    files = dict[int, set[int]]()
    while len(files) < 4 and all(process.is_alive() for process in started.processes.values()):
        found = {rank: spill_files(started.pid(rank), tmp_path) for rank in started.processes}
        files |= {rank: inodes for rank, inodes in found.items() if inodes}
    ended = started.join()
    assert [each.exit_code for each in ended] == [0] * 4, "\n".join(each.log for each in ended)
    assert [len(files[rank]) for rank in range(4)] == [1] * 4
    assert len(set.union(*files.values())) == 4
    assert rank_runs.losses(job) == expected.losses
    assert [each.state for each in ended] == expected.ranks


def spill_files(pid: int, directory: Path) -> set[int]:
    """Inodes of the nameless files in `directory` that a process has open."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(file)
            if target.startswith(f"{directory}/") and target.endswith(" (deleted)"):
                found.add(file.stat().st_ino)
    return found


def test_a_bfloat16_wire_rounds_the_sum_of_several_micro_batches(laboratory: Laboratory) -> None:
    many, one = laboratory.run(2, {}), laboratory.run(1, {})
    assert many.losses != one.losses
    assert many.relative_loss_error(one) <= BFLOAT16_WIRE_TOLERANCE


def test_the_same_run_again_gives_the_same_bits(laboratory: Laboratory, tmp_path: Path) -> None:
    again = Laboratory(tmp_path, laboratory.text, laboratory.corpus)
    assert again.run(3, EXACT[0]).differences(laboratory.run(3, EXACT[0])) == []


def test_the_runs_are_different_ones(laboratory: Laboratory) -> None:
    """Else one passing test would say nothing about the others."""
    changes: list[Mapping[str, str]] = [{}, FLOAT32_WIRE, *EXACT]
    assert len({tuple(laboratory.run(2, each).losses.values()) for each in changes}) == len(changes)


def test_unmasked_labels_are_counted_without_reading_a_token(laboratory: Laboratory, tmp_path: Path) -> None:
    """Also those of the corpus's last window, which is short."""
    job = rank_runs.job_file(tmp_path, laboratory.text, laboratory.corpus, 1, 1, {"evaluation: {": "# {"})
    batches = make_batches(
        job, open_corpus(laboratory.corpus, text_source(laboratory.text), 300), TrainingObjective.CAUSAL
    )
    samples = range(batches.num_sequences - 40, batches.num_sequences + 40)
    assert batches.num_unmasked(samples) == batches.batch(samples).num_unmasked
    everything = range(batches.num_sequences)
    assert batches.num_unmasked(everything) == batches.batch(everything).num_unmasked


class OtherRanks:
    """Stands in for them: something that is not linear, so that it matters when it is done."""

    bucket = 777

    def __call__(self, gradients: Iterable[torch.Tensor]) -> None:
        for pieces in buckets(gradients, self.bucket):
            for piece in pieces:
                piece.copy_(piece.abs().sqrt() + 1.0)

    def sent_bytes(self, num_values: int) -> int:
        return num_values


def drive(
    optimizer: StepOptimizer, case: Case, lanes: Lanes, kind: type[BackwardExchange | AfterBackward]
) -> list[float]:
    norms, sizes = [], {name: parameter.numel() for name, parameter in case.parameters() if parameter.requires_grad}
    exchange = kind(OtherRanks(), optimizer, lanes, sizes, case.num_micro_batches)
    for step in range(SKIPPED_STEP):
        for micro_batch in range(case.num_micro_batches):
            for name, gradient in case.gradients(step, micro_batch):
                optimizer.take(name, gradient)
                exchange.taken(name)
        exchange()
        norms.append(optimizer.norm())
        optimizer.step(1e-2, 0.5)
        optimizer.flush()
    return norms


@pytest.mark.parametrize("shares", [(1, 0, 0), (0, 1, 0), (0.3, 0.3, 0.4)], ids=str)
@pytest.mark.parametrize("lanes_name", LANES)
@pytest.mark.parametrize("behind", [False, True], ids=["after backward", "behind backward"])
def test_an_exchange_sees_whole_sums_wherever_they_live(
    lanes_name: str, behind: bool, shares: tuple[float, float, float]
) -> None:
    """Each use of a tied parameter by itself; with lanes as lazy as they may be, and without a race."""
    case = Case(torch.bfloat16, num_micro_batches=3, tied=True)
    parameters = case.parameters()
    plain = resident(parameters, case)
    host, ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
    lanes = LANES[lanes_name](host, ledger)
    expected = outcome(plain, parameters, drive(plain, case, lanes, AfterBackward))
    parameters = case.parameters()
    optimizer = offload(parameters, case, split(*shares, 1009), lanes, ledger)
    exchange = BackwardExchange if behind else AfterBackward
    found = outcome(optimizer, parameters, drive(optimizer, case, lanes, exchange))
    lanes.close()
    assert found.difference(expected) == []
    assert not isinstance(lanes, TracingLanes) or lanes.schedule().races == ()
