"""ComputeWork: what a phase demands of the compute device, in units with one price each per node.

    flops        matrix products                                       NodeSpec.flops_per_second
    values       read and written by everything else: norms, activations, the loss, weights on their way into a matrix
                 product                                               NodeSpec.values_per_second
    operations   pieces of work handed to torch, to a kernel or to a lane, and all that Python does for them

The catalog's achieved FLOP rates include the cost of the other two units, so on a catalog node these cost nothing. A
measured node has separate prices for them, because a small model spends its time on them and a large one does not. The
number of units was fitted once to forwards and backwards of segments on one core (docs/calibration.md); the price of a
unit is measured on every node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from spillway.plan import OptimizerPlan
from spillway.planning.workload import RESIDENT, Blocks, Streaming, Workload

FORWARD_PASSES, BACKWARD_PASSES = 2, 6
"""Passes over each saved value. Forward writes it, and the next operation reads it. Backward reads it, and makes, sums
and reads the gradients of the operation's input and output."""
LARGE_WEIGHT = 1.5
"""Weight of a value in a large storage, relative to a value in a storage that fits in caches."""
LOGIT_VALUES = 4
"""Values that forward reads or writes per logit in addition to the saved one: written in the compute type, read,
widened to float32, read."""
FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 6, 8
"""Operations per parameter tensor: a matrix product, the operations around it, its hooks. If the CPU updates the
parameter, its gradient is also copied, which doubles the operations of backward."""
MOVED_OPERATIONS = 8
"""Operations per copy of a segment's saved tensors (about a dozen storages are recorded), and per transfer to or from
disk."""
RECORD_OPERATIONS, REBUILD_OPERATIONS = 90, 50
"""Operations per block for recording its operators in forward, and for its rebuilds in backward, if it is lean."""
RESIDENT_OPERATIONS, UPDATE_OPERATIONS, STREAMED_OPERATIONS, NVME_OPERATIONS = 2, 3, 4, 5
"""Operations per chunk and step, by path. Resident: norm, update. CPU: these and the upload. Streamed: norm, states in,
update, states out. NVMe: all of these."""


class Prices(Protocol):
    """The rates of step_time.Rates that are prices of compute."""

    @property
    def flops(self) -> float: ...
    @property
    def elementwise(self) -> float: ...
    @property
    def operation_overhead(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """Amounts of each unit; they can be added."""

    flops: float = 0.0
    values: float = 0.0
    operations: float = 0.0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        return ComputeWork(
            self.flops + other.flops,
            self.values + other.values,
            self.operations + other.operations,
        )

    def times(self, count: float) -> ComputeWork:
        return ComputeWork(count * self.flops, count * self.values, count * self.operations)

    def seconds(self, prices: Prices) -> float:
        return (
            self.flops / prices.flops + self.values / prices.elementwise + self.operations * prices.operation_overhead
        )


def forward_work(work: Workload, blocks: Blocks, streaming: Streaming = RESIDENT) -> ComputeWork:
    """Work of one forward pass. Each moved block adds a copy out (and a write if it goes to NVMe), each streamed
    segment a copy in (and a read if its home is on NVMe)."""
    shape, batches = work.shape, work.alive(streaming)
    saved = FORWARD_PASSES * _weighed_bytes(work) + shape.parameter_bytes
    # The host hashes what it will rebuild from, which is half of what a rebuild reads and writes.
    hashed = rebuilding_bytes(work, blocks) / 2 if work.in_place else 0
    moved = MOVED_OPERATIONS * (blocks.moved + blocks.nvme) + RECORD_OPERATIONS * _lean_blocks(work, blocks)
    return ComputeWork(
        flops=batches * work.forward_flops,
        values=batches * ((saved + hashed) / shape.compute_bytes + LOGIT_VALUES * work.tokens * shape.vocab_size),
        operations=batches * (FORWARD_OPERATIONS * shape.num_tensors + moved)
        + MOVED_OPERATIONS * _loads(work, streaming),
    )


def backward_work(
    work: Workload, blocks: Blocks, optimizer: OptimizerPlan, streaming: Streaming = RESIDENT
) -> ComputeWork:
    """Work of one backward pass: all gradients, and the forward of recomputed blocks."""
    shape, batches = work.shape, work.alive(streaming)
    recomputed = (blocks.moved, blocks.moved + blocks.recomputed)
    saved = BACKWARD_PASSES * _weighed_bytes(work) + FORWARD_PASSES * work.sum_of("saved", *recomputed)
    saved += rebuilding_bytes(work, blocks) if work.in_place else 0
    gradients = BACKWARD_OPERATIONS * (1.0 + optimizer.updated_by_cpu) * num_chunks(work, optimizer)
    again = FORWARD_OPERATIONS * shape.num_tensors * blocks.recomputed / shape.num_segments
    moved = MOVED_OPERATIONS * (blocks.moved + blocks.nvme) + REBUILD_OPERATIONS * _lean_blocks(work, blocks)
    return ComputeWork(
        flops=batches * (work.backward_flops + work.sum_of("flops", *recomputed)),
        values=batches * (saved + 2 * shape.parameter_bytes) / shape.compute_bytes,
        operations=batches * (gradients + again + moved) + MOVED_OPERATIONS * _loads(work, streaming),
    )


def _lean_blocks(work: Workload, blocks: Blocks) -> int:
    return (blocks.num_layers - blocks.recomputed) * work.lean


def rebuilding_bytes(work: Workload, blocks: Blocks) -> int:
    """Bytes that backward of one micro-batch reads and writes to rebuild what is not held."""
    first, end = blocks.moved, blocks.moved + blocks.recomputed
    return work.sum_of("rebuilding", 0, first) + work.sum_of("rebuilding", end, blocks.num_layers)


def rebuilding_on_device(work: Workload, blocks: Blocks) -> int:
    """The same for a device with its own memory; on a CPU they are values like those of other operators."""
    return 0 if work.in_place else rebuilding_bytes(work, blocks)


def _weighed_bytes(work: Workload) -> float:
    return work.saved_bytes + (LARGE_WEIGHT - 1.0) * work.large_saved_bytes


def _loads(work: Workload, streaming: Streaming) -> int:
    """Number of copies and reads that bring the streamed segments to the device once."""
    return work.units.count[streaming.units] + work.units.count[streaming.nvme]


def update_work(work: Workload, optimizer: OptimizerPlan) -> ComputeWork:
    """Work of the update of one step: operations per chunk, without its bytes, for which CPU and device have rates."""
    each = (
        RESIDENT_OPERATIONS * optimizer.resident_share
        + UPDATE_OPERATIONS * optimizer.cpu_share
        + STREAMED_OPERATIONS * optimizer.streamed_share
        + NVME_OPERATIONS * optimizer.nvme_share
    )
    return ComputeWork(operations=each * num_chunks(work, optimizer))


def num_chunks(work: Workload, optimizer: OptimizerPlan) -> float:
    """Number of pieces in which gradients arrive and updates are made: tensors and, if the optimizer offloads, chunks
    of large tensors."""
    chunks = work.rank_parameters / optimizer.chunk_parameters if optimizer.offloads else 0.0
    return work.shape.num_tensors + ceil(chunks)
