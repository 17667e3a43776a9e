"""Sequential model parallelism, really run: one model is cut over two processes, only one of which works at a time.

    rank 0: embedding, first half of the blocks  --activation-->  rank 1: second half, head, loss; update
    backward of the first half; update           <---gradient---

Plain torch: autograd, torch.optim.SGD (as in Hydra's own runs), `send` and `recv` of gloo. `measured` returns the time
that the benchmark's arithmetic must predict, and the two times from which it predicts: a step of the same layers in one
process, and one hop of a boundary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import torch
from torch import Tensor, distributed, nn

import paired
from spillway_trainer import probe
from spillway_trainer.models.chain import allocate
from spillway_trainer.models.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    hidden_size=256, num_layers=8, num_heads=4, num_key_value_heads=4, intermediate_size=688, vocab_size=4096
)
SEQUENCES, LENGTH = 2, 256
"""per step"""
BOUNDARY_SHAPE = (SEQUENCES, LENGTH, CONFIG.hidden_size)
BOUNDARY_BYTES = 4 * SEQUENCES * LENGTH * CONFIG.hidden_size
NUM_RANKS = 2
LEARNING_RATE = 0.1
STEPS_A_ROUND, HOPS_A_ROUND = 2, 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds by round, and whether all losses agree."""

    whole: list[float]
    """seconds of a step of all layers in one process, while the other one is idle"""
    cut: list[float]
    """seconds of a step of the same layers over two processes"""
    hop: list[float]
    """seconds to send a boundary from one process to the other"""
    are_same_losses: bool
    """whether the losses of cut and whole are equal bit for bit"""


class Layers:
    """Consecutive segments of the model with an optimizer of their own. All processes use the same seed."""

    def __init__(self, part: slice) -> None:
        self._chain = Transformer(CONFIG)
        allocate(self._chain)
        for name, value in self._chain.initial_values(seed=0):
            self._chain.get_parameter(name).data.copy_(value)
        self._segments = self._chain.segments[part]
        parameters = nn.ModuleList(module for _, module in self._segments).parameters()
        self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        drawn = torch.Generator().manual_seed(1)
        rows_BT = torch.randint(0, CONFIG.vocab_size, (SEQUENCES, LENGTH + 1), generator=drawn)
        self.tokens_BT, self._labels_BT = rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous()

    def forward(self, carried: Tensor) -> Tensor:
        for name, module in self._segments:
            arguments = self._chain.arguments(name, self.tokens_BT, self._labels_BT, self._labels_BT.numel())
            carried = module(carried, *arguments)
        return carried

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


HALF = CONFIG.num_layers // 2 + 1
"""number of segments of rank 0: the embedding and half of the blocks"""


def joined(rank: int, rendezvous: Path) -> None:
    probe.as_the_trainer(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS)


def second_rank(rendezvous: Path, asked: Connection) -> None:
    """Answers each request ("steps" or "hops", number) with the losses of its steps, until it gets None."""
    joined(1, rendezvous)
    layers, received = Layers(slice(HALF, None)), torch.empty(BOUNDARY_SHAPE)
    while (request := asked.recv()) is not None:
        what, number = request
        losses = list[float]()
        for _ in range(number):
            distributed.recv(received, 0)
            if what == "hops":
                distributed.send(received, 0)
                continue
            boundary = received.requires_grad_()
            loss = layers.forward(boundary)
            loss.backward()  # type: ignore[no-untyped-call]
            layers.update()  # before the gradient is sent: only one process works at a time
            assert boundary.grad is not None
            distributed.send(boundary.grad, 0)
            losses.append(loss.item())
            received = torch.empty(BOUNDARY_SHAPE)
        asked.send(losses)
    distributed.destroy_process_group()


@contextmanager
def second_process() -> Iterator[Connection]:
    """Makes this process rank 0 and yields a connection through which rank 1 gets its requests."""
    with TemporaryDirectory() as directory:
        ours, theirs = get_context("spawn").Pipe()
        rendezvous = Path(directory) / "rendezvous"
        process = get_context("spawn").Process(target=second_rank, args=(rendezvous, theirs), daemon=True)
        process.start()
        try:
            joined(0, rendezvous)
            yield ours
            ours.send(None)
            distributed.destroy_process_group()
            process.join()
        finally:
            process.kill()


def measured(seconds: float) -> Measured:
    """Measures all three in turns, for about `seconds`."""
    with second_process() as asked:
        whole, first = Layers(slice(None)), Layers(slice(HALF))
        boundary, gradient = torch.zeros(BOUNDARY_SHAPE), torch.empty(BOUNDARY_SHAPE)
        whole_losses, cut_losses = list[float](), list[float]()

        def whole_steps() -> float:
            begin = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                loss = whole.forward(whole.tokens_BT)
                loss.backward()  # type: ignore[no-untyped-call]
                whole.update()
                whole_losses.append(loss.item())
            return (time.perf_counter() - begin) / STEPS_A_ROUND

        def cut_steps() -> float:
            asked.send(("steps", STEPS_A_ROUND))
            begin = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                handed_on = first.forward(first.tokens_BT)
                distributed.send(handed_on.detach(), 1)
                distributed.recv(gradient, 1)
                handed_on.backward(gradient)  # type: ignore[no-untyped-call]
                first.update()
            ended = time.perf_counter()
            cut_losses.extend(asked.recv())
            return (ended - begin) / STEPS_A_ROUND

        def hops() -> float:
            asked.send(("hops", HOPS_A_ROUND))
            begin = time.perf_counter()
            for _ in range(HOPS_A_ROUND):
                distributed.send(boundary, 1)
                distributed.recv(boundary, 1)
            ended = time.perf_counter()
            asked.recv()
            return (ended - begin) / (2 * HOPS_A_ROUND)

        rounds = paired.alternate({"whole": whole_steps, "cut": cut_steps, "hop": hops}, seconds=seconds)
        return Measured(rounds["whole"], rounds["cut"], rounds["hop"], are_same(whole_losses, cut_losses))


def are_same(whole: Sequence[float], cut: Sequence[float]) -> bool:
    """Whether the losses are equal and those of a model that learns: if none learned, equality would prove nothing."""
    return list(whole) == list(cut) and len(set(whole)) == len(whole) and whole[-1] < whole[0]
