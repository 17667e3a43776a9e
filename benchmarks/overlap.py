"""How much of a CPU update is hidden behind the next forward if compute leaves a core free.

One compute thread, one update thread, a model of 100 million parameters (--quick: 26 million) whose optimizer states
are all updated by the CPU. One run takes its steps in four ways, in turn:

  free     without the update: gradients are accumulated, the norm is computed, and the step is skipped
  none     overlap: None, forward begins when the update is done
  forward  overlap: Forward, each segment of the next forward waits for its own parameters
  bound    `free`, while during its forward a bare C loop calls our kernel over all chunks, on a thread of its own: no
           lanes, no events, no Python, and forward waits for nothing. Its cost is due to the machine, whose memory both
           threads share.

Seconds are from the norm, before an update, to the end of the forward after it; by then its last segment has waited for
the last update. The time of a way beyond that of `free` is exposed update, whatever its cause: waiting, passing work
between threads, slower compute. hidden_share = 1 - exposed of `forward` / exposed of `none`, the median over rounds;
the goal is 0.8, with 512 tokens a step on a quiet machine with two cores. hidden_bound is the same for `bound`,
hidden_share_of_steps the same over whole steps, whose backward adds noise. hidden_by_waits = 1 - the time that forward
waited / the update of `none`: this is measured inside the run and does not see slower compute. If other processes use
the second core, nothing can be hidden.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import paired
from compiled import compiled
from measured_runs import HUNDRED_MILLION, MeasuredRun, MeasuredRuns
from spillway.units import format_bytes, format_seconds
from spillway_trainer import probe
from spillway_trainer.kernels import native
from spillway_trainer.kernels.reference import UpdateScalars
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.optimizer_offload.place import Placed
from spillway_trainer.probe import Cell
from spillway_trainer.tiers.lanes import Lane

CELL = replace(HUNDRED_MILLION, optimizer="Host")
QUICK_CELL = Cell(512, 8, 1024, 512, 1, optimizer="Host", num_micro_batches=1)
SECONDS_BY_TOKENS = {1024: 90.0, 512: 150.0}
"""seconds of measuring by tokens per step; the last entry gives the figures without a suffix. With 512 tokens forward
takes only twice as long as the update, which is 11 % of the step: so the waits of the first segments and the shared
memory weigh most there. With 1,024 tokens the update is 6 % of the step, and the step varies by a good part of that."""
WAYS = ("free", "none", "forward", "bound")


class Piece(ctypes.Structure):
    """`struct piece` of update_loop.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "moment1", "moment2", "gradient", "out")),
        ("n", ctypes.c_int64),
    )


class UpdateLoop:
    """Runs update_loop.c over an optimizer's own states and gradients; writes parameters that nobody reads."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._outs = [bytearray(one.nbytes) for one in placed]
        self._pieces = (Piece * len(placed))(*map(self._piece, placed, self._outs))
        self._scalars = native._scalars_struct(UpdateScalars(1e-5, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.95))
        self._run = compiled("update_loop").update_loop
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = self._thread.submit(self._work)

    def join(self) -> None:
        if self._running is not None:
            self._running.result()

    def _work(self) -> None:
        kernel, isa = native._library().spillway_update, native.ISA_CODES[native.isa()]
        self._run(
            kernel, ctypes.byref(self._scalars), self._pieces, ctypes.c_int64(len(self._pieces)), ctypes.c_int32(isa)
        )

    def _piece(self, placed: Placed, out: bytearray) -> Piece:
        states = placed.states(placed.held.tensor)
        tensors = (states.master, *states.moments, placed.accumulator.values)
        start = ctypes.addressof(ctypes.c_char.from_buffer(out))
        return Piece(*(tensor.data_ptr() for tensor in tensors), start, placed.chunk.size)


@dataclass(slots=True)
class Turn:
    """One update and everything after it, up to the next norm."""

    marks: dict[str, float] = field(default_factory=dict)
    """clock readings in seconds: begun, updated (end of phase optimizer), forwarded (end of forward), ended"""
    waited: float = 0.0
    cpu_seconds: float = 0.0
    cpu_bytes: int = 0
    """bytes that the CPU's work on gradients and states touched, except that of `bound`"""

    def seconds(self, first: str, last: str) -> float:
        return self.marks[last] - self.marks[first]


class InTurns:
    """An optimizer that makes its next update in the way `way` and records the marks of each turn."""

    def __init__(self, optimizer: OptimizerOffload) -> None:
        self._optimizer = optimizer
        self._loop = UpdateLoop(optimizer._placed)
        self.way = "free"
        self.turn = self.before = Turn()
        self.counters: Callable[[], tuple[float, float, int]] = lambda: (0.0, 0.0, 0)

    def norm(self) -> float:
        self._count(self.turn, +1)
        self.before, self.turn = self.turn, Turn()
        self._count(self.turn, -1)
        self.before.marks["ended"] = self.turn.marks["begun"] = time.perf_counter()
        return self._optimizer.norm()

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        if self.way in ("free", "bound"):
            self._optimizer.skip()
        else:
            self._optimizer.step(learning_rate, gradient_scale)
        if self.way == "none":
            self._optimizer.flush()
        elif self.way == "bound":
            self._loop.start()
        self.turn.marks["updated"] = time.perf_counter()

    def forwarded(self) -> None:
        self._loop.join()
        self.turn.marks["forwarded"] = time.perf_counter()

    def _count(self, turn: Turn, sign: int) -> None:
        waited, cpu_seconds, cpu_bytes = self.counters()
        turn.waited += sign * waited
        turn.cpu_seconds += sign * cpu_seconds
        turn.cpu_bytes += sign * cpu_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Marking:
    """Wraps techniques and tells an optimizer when forward has ended."""

    def __init__(self, techniques: Any) -> None:
        self._techniques = techniques
        self.forwarded: Callable[[], None] = lambda: None

    def start_backward(self) -> None:
        self.forwarded()
        self._techniques.start_backward()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._techniques, name)


def run_in_turns(runs: MeasuredRuns) -> tuple[MeasuredRun, InTurns]:
    marking = list[Marking]()

    def marked(techniques: Any) -> Marking:
        marking.append(Marking(techniques))
        return marking[0]

    run = runs.make("Forward", InTurns, marked)
    optimizer, assembly = run.optimizer, run.assembly
    marking[0].forwarded = optimizer.forwarded
    optimizer.counters = lambda: (
        assembly.waited_seconds(), time.process_time(), assembly.moved_bytes().get(Lane.CPU, 0)
    )  # fmt: skip
    return run, optimizer


def turns(cell: Cell, seconds: float) -> dict[str, list[Turn]]:
    """Returns the turns of each way, by round."""
    with ExitStack() as opened:
        run, optimizer = run_in_turns(MeasuredRuns(cell, opened))
        run.step()

        def one(way: str) -> Turn:
            """Takes a step. The turn that it returns ends during the next step."""
            optimizer.way = way
            run.step()
            turn: Turn = optimizer.turn
            return turn

        rounds = paired.alternate({way: lambda way=way: one(way) for way in WAYS}, seconds=seconds)  # type: ignore[misc]
        one("free")
        return rounds


def measure(quick: bool) -> dict[str, float]:
    probe.as_the_trainer(1)
    figures: dict[str, float] = {}
    cell, seconds_by_tokens = (QUICK_CELL, {512: 30.0}) if quick else (CELL, SECONDS_BY_TOKENS)
    for tokens, seconds in seconds_by_tokens.items():
        rounds = turns(replace(cell, micro_batch_size=tokens // cell.sequence_length), seconds)
        show(tokens, rounds)
        found = figures_of(rounds)
        last = tokens == [*seconds_by_tokens][-1]
        figures |= found if last else {f"{name}_{tokens}": value for name, value in found.items()}
    return figures


def show(tokens: int, rounds: dict[str, list[Turn]]) -> None:
    print(f"{tokens} tokens; medians of {len(rounds['free'])} rounds")
    print(f"{'':10}{'optimizer':>11}{'forward':>10}{'waited':>10}{'a step':>10}{'CPU':>10}{'CPU touched':>14}")
    for way, all_turns in rounds.items():

        def median(of: Callable[[Turn], float], all_turns: list[Turn] = all_turns) -> float:
            return paired.median(of(turn) for turn in all_turns)

        columns = (
            f"{format_seconds(median(lambda turn: turn.seconds('begun', 'updated'))):>11}",
            f"{format_seconds(median(lambda turn: turn.seconds('updated', 'forwarded') - turn.waited)):>10}",
            f"{format_seconds(median(lambda turn: turn.waited)):>10}",
            f"{format_seconds(median(lambda turn: turn.seconds('begun', 'ended'))):>10}",
            f"{format_seconds(median(lambda turn: turn.cpu_seconds)):>10}",
            f"{format_bytes(median(lambda turn: turn.cpu_bytes)):>14}",
        )
        print(f"{way:10}{''.join(columns)}")


def figures_of(rounds: dict[str, list[Turn]]) -> dict[str, float]:
    """Computes shares by round, so that changes of the machine's speed cancel. Returns their medians, and for
    hidden_share and hidden_bound the intervals."""

    def exposed(way: str, last: str) -> list[float]:
        pairs = zip(rounds[way], rounds["free"], strict=True)
        return [turn.seconds("begun", last) - free.seconds("begun", last) for turn, free in pairs]

    def exposed_share(way: str, last: str) -> paired.Ratio:
        return paired.paired_ratio(exposed("none", last), exposed(way, last))

    ours, bound = exposed_share("forward", "forwarded"), exposed_share("bound", "forwarded")
    alone = exposed("none", "updated")
    waits = [turn.waited / update for turn, update in zip(rounds["forward"], alone, strict=True)]
    whole = [turn.seconds("begun", "ended") for turn in rounds["none"]]
    update = [more / step for more, step in zip(exposed("none", "ended"), whole, strict=True)]
    return {
        "hidden_share": 1.0 - ours.median,
        "hidden_share_low": 1.0 - ours.high,
        "hidden_share_high": 1.0 - ours.low,
        "hidden_bound": 1.0 - bound.median,
        "hidden_bound_low": 1.0 - bound.high,
        "hidden_bound_high": 1.0 - bound.low,
        "hidden_share_of_steps": 1.0 - exposed_share("forward", "ended").median,
        "hidden_by_waits": 1.0 - paired.median(waits),
        "update_share_of_step": paired.median(update),
        "rounds": float(len(waits)),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("overlap", __doc__, measure, at_least={"hidden_share": 0.8})
