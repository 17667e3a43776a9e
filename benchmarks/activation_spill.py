"""Spilling activations: resident bytes and seconds of a step, compared with the other ways to save that memory.

Models of `transformers` in float32: BERT, GPT and T5 in the paper's shapes (SSDTrain, arXiv 2408.10013), an eighth as
wide and twice as deep: (hidden, layers) = (1024, 8), (1536, 6), (2048, 4); and llama (1024, 8). A micro-batch has 512
tokens, t5's 2 x 512. One thread computes, so that the bytes per FLOP on this processor and disk are near the paper's,
and the other core moves the bytes. The models are twice as deep because every peak contains the gradients of the layer
that backward is in, which no mode can move. t5 has half as many tokens as it is wide, as bert has, because a weight's
gradient grows with the square of the width; the paper's micro-batches, 8 to 32 times 1,024 tokens, are no smaller.
--quick: bert and llama, half as deep, two pairs of steps: peaks and bits are valid, seconds are rough.

  keep          what autograd does by itself
  checkpoint    torch.utils.checkpoint around every layer
  save_on_cpu   torch.autograd.graph.save_on_cpu; saves no memory here, because the CPU itself computes
  cut           the paper's plan: all layers but the last are spilled whole and reloaded one layer ahead
  torch.save    one file per tensor, as in torch's tutorial
  ours          spillway_trainer.activation_spill.Spilling with a budget of 40 % of the saved bytes (`low`: 5 %). It
                rebuilds what need not be held before it moves anything

Each mode runs in a process of its own. All train the same steps in turn, and each step is paired with keep's step of
the same round. Columns: peak is the highest resident bytes of a step (by the kernel) beyond the idle bytes, including
everything that the mode needs; ledger is the mode's own count of saved tensors. *_prediction_error compares the step
with a prediction: for forward and for backward, the larger of keep's seconds and the disk's time for the bytes, at
rates that are measured beforehand. Rivals use torch's allocator as it is; Spilling uses its own pool (ADR 22), as it
does for users, and so does `cut`. tokens/s is for a micro-batch twice as large, within the memory that keep needs for
one. bit_identical is 1 if the loss and every parameter after the last step equal keep's in all modes that spill. Goals:
*_peak_ratio 0.53 at *_step_ratio 1.03 and *_cpu_ratio 1.05, stall 0.02; *_low_peak_ratio 0.30 at *_low_step_ratio 1.10;
*_step_vs_checkpoint below 1.

hook_kept_us, hook_spilled_us: microseconds of the computing thread for one save and its restore, beyond plain autograd,
for tensors so small that copying them does not matter. Goals: 5 and 15. *_hook_share: the share of keep's step that the
hooks of all its saves would take if everything large enough were spilled. Goal: 0.005.

On a busy machine the second core is not free, so less of the work is hidden: the load is printed.
ACTIVATION_SPILL_DIRECTORY names the directory to spill to (default: this one), ACTIVATION_SPILL_MODELS some of
bert,gpt,t5,llama, ACTIVATION_SPILL_CURVE a file for the picture of recompute, offload and keep.
"""

from __future__ import annotations

from spillway_trainer import environment  # isort: skip # noqa: F401  first: torch reads it

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

import activation_modes
import paired
from activation_modes import Built, Mode, Shape, StepFigures
from paired import median, paired_ratio
from spillway.units import format_bytes, format_seconds
from spillway_cli.report.charts import Series, picture
from spillway_trainer.activation_spill import Spilling
from spillway_trainer.tiers.nvme_slab import NvmeSlab

DIRECTORY = Path(os.environ.get("ACTIVATION_SPILL_DIRECTORY", "."))
FAMILIES = os.environ.get("ACTIVATION_SPILL_MODELS", "bert,gpt,t5,llama").split(",")
QUICK_FAMILIES = ("bert", "llama")
CURVE = os.environ.get("ACTIVATION_SPILL_CURVE")
SHAPES = (
    Shape("bert", 1024, 8, 512, 1),
    Shape("gpt", 1536, 6, 512, 1),
    Shape("t5", 2048, 4, 512, 2),
    Shape("llama", 1024, 8, 512, 1),
)
PAIRS, QUICK_PAIRS, CURVE_PAIRS = 15, 2, 6
WARM_UP = 2
"""steps that are not counted: the first one spills everything, to find out what is saved"""
NUM_SAVES = 2000
HEADLINE, LOW = 0.40, 0.05
"""shares of the saved bytes that may be in memory, including those on their way out; gradients add to the peak"""
LARGER = Mode("ours", 0.40, batch_factor=2)
"""twice the tokens of keep, in less memory than keep takes"""
MODES: Mapping[str, Mode] = {
    "keep": Mode("keep"),
    "checkpoint": Mode("checkpoint"),
    "save_on_cpu": Mode("save_on_cpu"),
    "cut": Mode("cut"),
    "torch.save": Mode("torch.save"),
    "ours": Mode("ours", HEADLINE),
    "low": Mode("ours", LOW),
    "larger": LARGER,
}
QUICK_MODES = ("keep", "checkpoint", "ours", "low")
WAVES = (QUICK_MODES, ("keep", "cut", "save_on_cpu", "torch.save", "larger"))
"""modes whose processes run at the same time; each wave has its own keep to compare with"""


class Rates(NamedTuple):
    """Bytes per second of the disk under DIRECTORY, through the spill file."""

    write: float
    read: float


class Taken(NamedTuple):
    """What one mode gave: figures by round, and the digest of its final state."""

    built: Built
    steps: list[StepFigures]
    digest: str

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.steps)

    def each(self, figure: Callable[[StepFigures], float]) -> list[float]:
        return [figure(step) for step in self.steps]


class Worker:
    """A fresh process that trains one model in one mode."""

    def __init__(self, context: Any, shape: Shape, mode: Mode) -> None:
        self._connection, theirs = context.Pipe()
        arguments = (shape, mode, str(DIRECTORY), theirs)
        self._process = context.Process(target=activation_modes.serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.built: Built = self._connection.recv()

    def ask(self, word: str) -> Any:
        self._connection.send(word)
        return self._connection.recv()

    def close(self) -> None:
        self.ask("close")
        self._process.join()


@contextmanager
def workers(shape: Shape, modes: Mapping[str, Mode]) -> Iterator[dict[str, Worker]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["activation_modes"])
    started = {name: Worker(context, shape, mode) for name, mode in modes.items()}
    yield started
    for worker in started.values():
        worker.close()


def trained(shape: Shape, modes: Mapping[str, Mode], num_pairs: int) -> dict[str, Taken]:
    """Trains `num_pairs` steps of every mode in turn, after WARM_UP steps that do not count."""
    with workers(shape, modes) as started:
        for worker in started.values():
            for _ in range(WARM_UP - 1):  # `alternate` makes one more
                worker.ask("step")
        contestants = {name: partial(worker.ask, "step") for name, worker in started.items()}
        steps = paired.alternate(contestants, seconds=0.0, min_rounds=num_pairs)
        return {name: Taken(worker.built, steps[name], worker.ask("digest")) for name, worker in started.items()}


def disk_rates(nbytes: int = 64 << 20) -> Rates:
    """Measures writing and reading three times each and takes the best: the rates of an undisturbed disk."""
    slab = NvmeSlab(DIRECTORY, nbytes, 2)
    extent = slab.allocate(nbytes, "probe")
    memory = torch.ones(nbytes, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    piece = 4 << 20
    parts = [memory[start + at : start + at + piece] for at in range(0, nbytes - piece, piece)]
    writes, reads = [], []
    for _ in range(3):
        begin = time.perf_counter()
        stored = slab.write_batch([(extent.at(index * piece), part, "") for index, part in enumerate(parts)])
        middle = time.perf_counter()
        slab.read_batch([(each, part, "") for each, part in zip(stored, parts, strict=True)])
        writes.append(middle - begin)
        reads.append(time.perf_counter() - middle)
    slab.close()
    moved = len(parts) * piece
    return Rates(moved / min(writes), moved / min(reads))


def hook_costs() -> dict[str, float]:
    """Returns microseconds per save and restore, by the CPU clock of the computing thread."""
    torch.set_num_threads(1)
    nothing, ones = torch.nn.Module(), torch.ones(64, requires_grad=True)
    kept = Spilling(nothing, DIRECTORY, nvme_bytes=1 << 20, lean=False)
    spilled = Spilling(nothing, DIRECTORY, nvme_bytes=1 << 28, minimum_bytes=1, lean=False)

    def chain(around: AbstractContextManager[object]) -> float:
        begin, y = time.thread_time(), ones
        with around:
            for _ in range(NUM_SAVES):
                y = y.sin()
        y.sum().backward()
        seconds = time.thread_time() - begin
        spilled.store.drain()
        return seconds * 1e6 / NUM_SAVES

    contestants = {"plain": nullcontext(), "kept": kept, "spilled": spilled}
    runs = {name: partial(chain, around) for name, around in contestants.items()}
    found = paired.alternate(runs, seconds=0.0, min_rounds=PAIRS)
    costs = {
        f"hook_{name}_us": median(
            [with_it - without for with_it, without in zip(found[name], found["plain"], strict=True)]
        )
        for name in ("kept", "spilled")
    }
    kept.close()
    spilled.close()
    return costs


def predicted_seconds(keep: Sequence[StepFigures], moved_bytes: float, rates: Rates) -> float:
    """Predicts a step that writes `moved_bytes` during keep's forward and reads them during keep's backward."""
    forward = median([step.forward_seconds for step in keep])
    backward = median([step.seconds - step.forward_seconds for step in keep])
    return max(forward, moved_bytes / rates.write) + max(backward, moved_bytes / rates.read)


def shown(shape: Shape, waves: Sequence[Mapping[str, Taken]]) -> None:
    built = waves[0]["keep"].built
    print(
        f"{shape.family} ({shape.hidden}, {shape.num_layers}), {shape.batch} x {shape.sequence} tokens, "
        f"{format_bytes(built.saved_bytes)} saved, idle step {format_bytes(built.idle_bytes)}"
    )
    print(f"  {'':12}{'peak':>11}{'of keep':>9}{'ledger':>11}{'written':>11}{'step':>9}   step / keep's, CPU, stalled")
    for wave in waves:
        for name, each in wave.items():
            if wave is waves[0] or name != "keep":
                print(f"  {name:12}{line_of(each, wave['keep'])}")


def line_of(taken: Taken, keep: Taken) -> str:
    step = paired_ratio(keep.each(seconds_of), taken.each(seconds_of))
    cpu = paired_ratio(keep.each(cpu_seconds_of), taken.each(cpu_seconds_of))
    return (
        f"{format_bytes(taken.peak_bytes):>11}{taken.peak_bytes / keep.peak_bytes:9.3f}"
        f"{format_bytes(taken.steps[-1].saved_bytes):>11}{format_bytes(taken.steps[-1].written_bytes):>11}"
        f"{format_seconds(median(taken.each(seconds_of))):>9}   {step}  {cpu.median:.3f}  {stall_share(taken):.3f}"
    )


def seconds_of(step: StepFigures) -> float:
    return step.seconds


def cpu_seconds_of(step: StepFigures) -> float:
    return step.cpu_seconds


def stall_share(taken: Taken) -> float:
    return median([step.stalled_seconds / step.seconds for step in taken.steps])


def figures_of(shape: Shape, taken: Mapping[str, Taken], rates: Rates) -> dict[str, float]:
    """The figures of `shape`. `paired_ratio(a, b)` is b over a, so keep, or checkpoint as the rival, comes first."""
    keep, checkpoint, found = taken["keep"], taken["checkpoint"], {}
    for setting, mode in (("", "ours"), ("low_", "low")):
        ours = taken[mode]
        seconds = median(ours.each(seconds_of))
        moved = median([float(step.written_bytes) for step in ours.steps])
        found |= {
            f"{setting}peak_ratio": ours.peak_bytes / keep.peak_bytes,
            f"{setting}step_ratio": paired_ratio(keep.each(seconds_of), ours.each(seconds_of)).median,
            f"{setting}cpu_ratio": paired_ratio(keep.each(cpu_seconds_of), ours.each(cpu_seconds_of)).median,
            f"{setting}stall_share": stall_share(ours),
            f"{setting}prediction_error": abs(predicted_seconds(keep.steps, moved, rates) / seconds - 1.0),
        }
    # Compare checkpointing with the setting of ours whose peak is no higher.
    rival = taken["ours"] if taken["ours"].peak_bytes <= checkpoint.peak_bytes else taken["low"]
    found["step_vs_checkpoint"] = paired_ratio(checkpoint.each(seconds_of), rival.each(seconds_of)).median
    found["peak_vs_checkpoint"] = rival.peak_bytes / checkpoint.peak_bytes
    return {f"{shape.family}_{name}": value for name, value in found.items()}


def hook_share(keep: Taken, figures: Mapping[str, float]) -> float:
    built = keep.built
    microseconds = (built.num_saves - built.num_large_saves) * figures["hook_kept_us"]
    microseconds += built.num_large_saves * figures["hook_spilled_us"]
    return microseconds / 1e6 / median(keep.each(seconds_of))


def larger_batch(shape: Shape, taken: Mapping[str, Taken]) -> dict[str, float]:
    """Shows what the saved memory is worth: more tokens at once."""
    keep, larger, factor = taken["keep"], taken["larger"], LARGER.batch_factor
    tokens = shape.batch * shape.sequence
    print(
        f"  tokens/s: keep {tokens / median(keep.each(seconds_of)):.0f}, ours with {factor} x the micro-batch "
        f"{factor * tokens / median(larger.each(seconds_of)):.0f}"
    )
    return {
        f"{shape.family}_larger_batch_tokens_ratio": factor
        * paired_ratio(larger.each(seconds_of), keep.each(seconds_of)).median,
        f"{shape.family}_larger_batch_peak_ratio": larger.peak_bytes / keep.peak_bytes,
    }


def curve(shape: Shape, file: Path) -> None:
    """Draws the seconds of a step at each peak for recompute, offload and keep."""
    layers = shape.num_layers
    waves = (
        {f"recompute {n}": Mode("checkpoint", num_layers=n) for n in range(1, layers + 1)},
        {f"cut {n}": Mode("cut", num_layers=n) for n in range(1, layers)},
        {f"ours {share}": Mode("ours", share) for share in (0.9, 0.7, HEADLINE, 0.2, LOW)},
    )
    points = {"keep": (1.0, 1.0)}
    for wave in waves:  # one after the other: processes that run at the same time need memory at the same time
        taken = trained(shape, {"keep": Mode("keep")} | wave, CURVE_PAIRS)
        keep = taken["keep"]
        points |= {
            name: (
                taken[name].peak_bytes / keep.peak_bytes,
                paired_ratio(keep.each(seconds_of), taken[name].each(seconds_of)).median,
            )
            for name in wave
        }
    kinds = {"recompute": ("layers recomputed", "c2"), "cut": ("layers spilled", "c4"), "ours": ("ours", "c1")}
    series = [
        Series(label, colour, sorted([(1.0, 1.0), *(at for name, at in points.items() if name.startswith(kind))]), True)
        for kind, (label, colour) in kinds.items()
    ]
    style = re.search("<style>(.*?)</style>", resources.files("spillway_cli").joinpath("report.html").read_text(), re.S)
    assert style is not None
    drawn = picture("step / keep's", f"activation peak / keep's, {shape.family}", series, style[1])
    file.write_text(drawn, encoding="utf-8")
    print(f"  recompute, offload, keep ({file}):")
    for name, (peak, step) in sorted(points.items(), key=lambda item: item[1]):
        print(f"    {name:14} peak {peak:.3f}  step {step:.3f}")


def measure(quick: bool) -> dict[str, float]:
    rates = disk_rates()
    print(f"disk: writes {rates.write / 1e9:.2f} GB/s, reads {rates.read / 1e9:.2f} GB/s\n")
    figures = hook_costs()
    identical = True
    for shape in SHAPES:
        if shape.family not in FAMILIES or (quick and shape.family not in QUICK_FAMILIES):
            continue
        if quick:
            shape = replace(shape, num_layers=shape.num_layers // 2)  # noqa: PLW2901
        waves = [
            trained(shape, {name: MODES[name] for name in names}, QUICK_PAIRS if quick else PAIRS)
            for names in (WAVES[:1] if quick else WAVES)
        ]
        shown(shape, waves)
        figures |= figures_of(shape, waves[0], rates)
        figures[f"{shape.family}_hook_share"] = hook_share(waves[0]["keep"], figures)
        if not quick:
            figures |= larger_batch(shape, waves[1])
        ends = {name: each.digest for wave in waves for name, each in wave.items() if name != "larger"}
        others = [name for name, digest in ends.items() if digest != ends["keep"]]
        identical &= not {"ours", "low", "cut"}.intersection(others)
        print(f"  other bits than keep's: {', '.join(others) or 'none'}\n")
        if CURVE and shape.family == (QUICK_FAMILIES[0] if quick else "gpt"):
            curve(shape, Path(CURVE))
    return {**figures, "bit_identical": float(identical)}


if __name__ == "__main__":
    assert __doc__ is not None
    paired.main("activation_spill", __doc__, measure, at_least={"bit_identical": 1.0})
