"""What the authors of Deep Optimizer States measured (arXiv 2410.21316), as data.

Source of every row: their raw logs, github.com/mauryaavinash95/deep-optimizer-states-results, parsed by us; medians
over iterations without the first two. Four GPUs of one node, data parallel, ZeRO-3 with the optimizer on the CPU,
sequence 2048, micro-batch 1, activation checkpointing, subgroups of 1e8 parameters, every second of which is updated on
the GPU in the interleaved runs. The names overstate the sizes; `num_parameters` is from the logs.

Their interleaved runs do not train (the loss is that of uniform output), but they move the same bytes as runs that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

GpuClass = Literal["H100", "A100"]
NUM_RANKS, SEQUENCE_LENGTH, STRIDE = 4, 2048, 2
VOCABULARY = 50304


class Phases(NamedTuple):
    """Seconds of the phases of an iteration. In the logs an iteration takes 0.3 to 0.6 s more, which is in no phase."""

    forward: float
    backward: float
    step: float

    @property
    def iteration(self) -> float:
        return sum(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One run in three forms: original DeepSpeed ("base"); with non-blocking gradient copies ("flush"); and with every
    second subgroup updated on the GPU in addition ("interleaved")."""

    gpu: GpuClass
    model: str
    num_parameters: float
    resident_share: float
    """share of the subgroups whose states stay on the GPU, in all three forms"""
    base: Phases
    flush: Phases
    interleaved: Phases


ROWS = (
    Row("H100", "20B", 15.3e9, 0.0, Phases(0.21, 4.45, 2.27), Phases(0.21, 0.97, 2.28), Phases(0.26, 0.85, 1.30)),
    Row("H100", "20B", 15.3e9, 0.5, Phases(0.21, 2.53, 1.17), Phases(0.21, 0.83, 1.17), Phases(0.23, 0.76, 0.68)),
    Row("H100", "13B", 11.3e9, 0.2, Phases(0.17, 2.64, 1.30), Phases(0.17, 0.64, 1.30), Phases(0.18, 0.59, 0.72)),
    Row("H100", "30B", 27.9e9, 0.35, Phases(0.38, 5.84, 2.74), Phases(0.40, 1.58, 2.76), Phases(0.39, 1.54, 1.56)),
    Row("A100", "20B", 15.3e9, 0.0, Phases(0.87, 5.94, 5.20), Phases(0.87, 2.73, 5.20), Phases(0.86, 2.63, 3.50)),
    Row("A100", "7B", 5.95e9, 0.0, Phases(0.24, 1.56, 1.99), Phases(0.23, 0.79, 2.05), Phases(0.21, 0.70, 1.34)),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A llama with the published number of parameters within 1 %; shape and feed-forward width are our choice."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    intermediate_size: int

    def document(self) -> dict[str, object]:
        """Returns the model as in spec.model.config."""
        return {
            "architecture": "llama",
            "hiddenSize": self.hidden_size,
            "numLayers": self.num_layers,
            "numHeads": self.hidden_size // 128,
            "intermediateSize": self.intermediate_size,
            "vocabSize": VOCABULARY,
        }


def _model(name: str, num_parameters: float, num_layers: int, hidden_size: int) -> Model:
    of_layers = num_parameters - 2 * VOCABULARY * hidden_size
    width = (of_layers / num_layers - 4 * hidden_size**2) / (3 * hidden_size)
    return Model(name, num_parameters, num_layers, hidden_size, 64 * round(width / 64))


MODELS = (
    _model("7B", 5.95e9, 32, 4096),
    _model("8.3B", 9.14e9, 50, 4096),
    _model("10B", 9.92e9, 50, 4096),
    _model("13B", 11.3e9, 40, 5120),
    _model("20B", 15.3e9, 44, 6144),
)
