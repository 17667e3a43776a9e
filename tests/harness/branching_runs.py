"""Trains a model that branches, so that a parameter may get a gradient on one rank only. Each rank has a process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases.optimizer_cases import HOST_BYTES, SETTINGS, split
from harness import local_runs
from harness.after_backward import AfterBackward
from harness.no_techniques import NoTechniques
from spillway_trainer.corpus.data import Batch
from spillway_trainer.launch.launcher import free_ports
from spillway_trainer.optimizer.plain import ResidentOptimizer, StepOptimizer
from spillway_trainer.optimizer.schedule import LearningRate
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.parallel import distributed
from spillway_trainer.parallel.backward_exchange import BackwardExchange
from spillway_trainer.ranks import NO_EXCHANGE, World
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.segments import Position
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Lanes
from spillway_trainer.trainer import LoopSettings, Run, RunProgress, StopRequest, train_step

NUM_STEPS = 4
NO_TOKEN = 2 * NUM_STEPS
NUM_CALLS = "number of forwards"


class Branching(nn.Module):
    """Every token uses `both`. An even token also uses `even`; an odd one, and every fourth, also uses `odd`, which has
    another size. From token `again` on, `both` is used twice and gets two gradients in one backward."""

    def __init__(self, again: int) -> None:
        super().__init__()
        self.again, self.num_calls = again, 0
        generator = torch.Generator().manual_seed(3)
        self.even = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.odd = nn.Parameter(torch.randn(7, generator=generator))
        self.both = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        self.num_calls += 1
        token = int(tokens_BT[0, 0])
        value = (self.both * (token + 1)).sin().sum()
        if token >= self.again:
            start = torch.ones((), requires_grad=True)
            value = value + checkpoint(lambda x: (x * self.both).cos().sum(), start, use_reentrant=True)
        if token % 2 == 0:
            value = value + (self.even * token).cos().sum()
        if token % 2 == 1 or token % 4 == 0:
            value = value + (self.odd * self.both[0]).sin().sum()
        return value / num_tokens


class CountedTokens:
    """A dataset in which sample i is the token i."""

    def batch(self, samples: range) -> Batch:
        tokens = torch.tensor([[sample] for sample in samples])
        return Batch(tokens, tokens, tokens.numel())

    def num_unmasked(self, samples: range) -> int:
        return len(samples)


Shares = tuple[float, float, float] | None


def optimizer_of(model: nn.Module, shares: Shares, lanes: Lanes, ledger: DeviceLedger) -> StepOptimizer:
    parameters = list(model.named_parameters())
    if shares is None:
        return ResidentOptimizer(parameters, {}, SETTINGS, ledger)
    return OptimizerOffload(parameters, {}, SETTINGS, split(*shares, 4), lanes, ledger)


def states_after(
    directory: Path, world: World, shares: Shares, again: int = NO_TOKEN, *, behind: bool = True
) -> dict[str, Tensor]:
    """The optimizer's states after NUM_STEPS steps of this rank, and the number of forwards under NUM_CALLS."""
    model, ledger = Branching(again), DeviceLedger(None)
    lanes = CpuLanes(HostSlab(HOST_BYTES), ledger)
    optimizer = optimizer_of(model, shares, lanes, ledger)
    exchange: BackwardExchange | AfterBackward | None = None

    def take(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        optimizer.take(name, gradient)
        if exchange is not None:
            exchange.taken(name)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: take(name, p))  # type: ignore[no-untyped-call]
    progress = RunProgress()
    settings = LoopSettings(NUM_STEPS, 1, 2 // world.size, 0.5, True, 100, 0, 1)
    with distributed.joined(world) as ranks:
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        total = ranks.gradient_sum(15, torch.float32, partial(torch.empty, dtype=torch.uint8), 1, torch.device("cpu"))
        if total is not None:
            kind = BackwardExchange if behind else AfterBackward
            exchange = kind(total, optimizer, lanes, sizes, settings.num_micro_batches)
        run = Run(
            model=model,
            optimizer=optimizer,
            techniques=NoTechniques(),
            position=Position(0),
            batches=CountedTokens(),  # type: ignore[arg-type]
            learning_rate=LearningRate("Constant", 0.01, NUM_STEPS),
            checkpoints=None,  # type: ignore[arg-type]
            recorder=Recorder(directory / f"run-{world.rank}.jsonl"),
            ranks=ranks,
            sum_gradients=exchange or NO_EXCHANGE,
        )
        for _ in range(NUM_STEPS):
            train_step(run, settings, progress, StopRequest())
        return {**dict(optimizer.state()), NUM_CALLS: torch.tensor(model.num_calls)}


def rank(directory: Path, world: World, shares: Shares, again: int, behind: bool) -> None:
    distributed.EXCHANGE_PARAMETERS = 4
    torch.save(states_after(directory, world, shares, again, behind=behind), directory / f"{world.rank}.pt")


def states_of_ranks(
    directory: Path, shares: Shares, again: int = NO_TOKEN, *, behind: bool = True
) -> Iterator[dict[str, Tensor]]:
    (port,) = free_ports(1)
    worlds = [World(rank=number, local_rank=number, size=2, master_port=port) for number in range(2)]
    processes = [
        local_runs.CONTEXT.Process(target=rank, args=(directory, world, shares, again, behind)) for world in worlds
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for number in range(2):
        yield torch.load(directory / f"{number}.pt")
