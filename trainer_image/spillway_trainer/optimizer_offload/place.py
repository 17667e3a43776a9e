"""Allocates state blocks and accumulators of every chunk, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from spillway.plan import Tier
from spillway.update_rules import MASTER, UpdateRule

from ..kernels.master_halves import join, split
from ..optimizer.plain import FLOAT32_BYTES, Hyperparameters, OptimizerStates
from ..optimizer.trainable import flat, master_values
from ..tiers.arena import TORCH_ALIGNMENT_BYTES, Arena, MemorySlice, as_bytes
from ..tiers.extents import ALIGNMENT_BYTES
from ..tiers.lanes import Event, Region
from ..tiers.nvme_slab import NvmeSlab
from .assign import Chunk, Path
from .gradients import Accumulator
from .memory import StateRows, accumulator_bytes, rows_of
from .nvme_states import NvmeStates, place_on_nvme


class Home(Protocol):
    """Where one chunk's values live, in the parameter's type, when they do not stay on the device."""

    changed: tuple[Event, ...]
    """Complete when the last update of the values has reached the home: readers run after these."""

    @property
    def region(self) -> Region: ...

    @property
    def memory(self) -> Tensor | None:
        """The values as uint8 in host memory, into which the update writes directly; None: `store` takes them from
        staging."""

    def store(self, staged: Tensor) -> None:
        """Stores `staged` (uint8, whole blocks, the values first). Runs on lane nvme_write. Raises SpillIOError."""


class StreamedHomes(Protocol):
    """The homes of parameters that pass through the device instead of staying there; model_spill provides them."""

    def of(self, parameter: str) -> Sequence[Home]:
        """One home per chunk, in order; none for a parameter that stays on the device."""

    def set(self, parameter: str, values: Tensor) -> None:
        """Puts `values`, flat and in the parameter's type, into its homes; returns when they are there."""

    def invalidate(self) -> None:
        """Called before the homes change: existing copies of them are not used again, and new ones are made after
        `Home.changed`."""


class NoHomes:
    """Every parameter stays on the device."""

    def of(self, parameter: str) -> Sequence[Home]:
        return ()

    def set(self, parameter: str, values: Tensor) -> None:
        raise KeyError(parameter)

    def invalidate(self) -> None:
        return


@dataclass(slots=True)
class Placed:
    """One chunk with its memory, for the whole run. Only `block` may be replaced, by another one of the same size."""

    chunk: Chunk
    dtype: torch.dtype
    """The compute dtype."""
    parameter: Tensor | None
    """Flat slice of the device parameter; None: the chunk's values are at `home`."""
    home: Home | None
    weights: Region
    """The memory of `parameter`, or of the home."""
    block: MemorySlice | NvmeStates
    """The chunk's states between updates: in host memory, on the device for a resident chunk, or on NVMe."""
    rows: StateRows
    """Where the states are in `block`."""
    accumulator: Accumulator
    _viewed: tuple[MemorySlice, OptimizerStates] | None = None

    @property
    def held(self) -> MemorySlice:
        """`block` of a chunk whose states are in memory."""
        assert isinstance(self.block, MemorySlice), self.block.label
        return self.block

    @property
    def held_states(self) -> OptimizerStates:
        """`held` as states. The views are kept, because every step needs them, and making them costs more than handing
        them to a lane."""
        if self._viewed is None or self._viewed[0] is not self.block:
            self._viewed = self.held, self.states(self.held.tensor)
        return self._viewed[1]

    @property
    def on_nvme(self) -> NvmeStates:
        """`block` of a chunk whose states are on NVMe."""
        assert isinstance(self.block, NvmeStates), self.block.label
        return self.block

    @property
    def nbytes(self) -> int:
        """Bytes of the values in the compute dtype."""
        return self.chunk.size * self.dtype.itemsize

    @property
    def device_bytes(self) -> Tensor:
        """`parameter` as uint8, of a chunk whose values live on the device."""
        assert self.parameter is not None, self.chunk.label
        return as_bytes(self.parameter)

    @property
    def parameter_is_master(self) -> bool:
        """Whether the parameter is its own master: with float32 compute, for a chunk that the device updates."""
        return self.dtype == torch.float32 and not self.chunk.path.updates_on_cpu

    @property
    def is_split(self) -> bool:
        """Whether the master exists nowhere as a whole: `block` holds only what the weight, the parameter on the
        device, lacks."""
        return self.rows.is_split

    def state(self, rule: UpdateRule, kind: str) -> Tensor:
        """The values of one state of a chunk whose states are in memory; for a split master a copy, in host memory."""
        held = self.held_states.of(rule, kind)
        if kind != MASTER or not self.is_split:
            return held
        assert self.parameter is not None
        return join(self.parameter.to(held.device), held)

    def set_state(self, rule: UpdateRule, kind: str, values: Tensor) -> None:
        """Sets one state of a chunk whose states are in memory. For a split master the caller also sets the weight that
        the master rounds to; what is stored here is the rest that fits this weight."""
        held = self.held_states.of(rule, kind)
        if kind == MASTER and self.is_split:
            split(values, master_values(values, self.dtype), held)
        else:
            held.copy_(values)

    def states(self, block: Tensor) -> OptimizerStates:
        """`block` (uint8: this chunk's, or a buffer of a ring that holds its states) as states."""
        views = self.rows.views(block)
        if not self.parameter_is_master:
            return OptimizerStates(views[0], views[1:])
        assert self.parameter is not None
        return OptimizerStates(self.parameter, views)

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes: gradient, master and moments."""
        in_parameter = 2 * self.nbytes if self.parameter_is_master else self.nbytes if self.is_split else 0
        return FLOAT32_BYTES * self.chunk.size + in_parameter + self.rows.update_bytes

    @property
    def device_out(self) -> Tensor | None:
        """Where the device's update writes the rounded parameter; None when it is the master itself."""
        return None if self.parameter_is_master else self.parameter


def place_chunks(
    chunks: Sequence[Chunk],
    parameters: Mapping[str, Parameter],
    homes: StreamedHomes,
    arena: Arena,
    nvme: NvmeSlab | None,
    settings: Hyperparameters,
    *,
    splits: bool,
) -> list[Placed]:
    """Allocates state blocks and accumulators of `chunks`, in their order. `splits`: only that part of a streamed
    chunk's master that its weight lacks leaves the device."""
    to_come = {name: iter(homes.of(name)) for name in parameters}
    dtypes = [parameters[chunk.parameter].dtype for chunk in chunks]
    rows = [_rows(chunk, dtype, settings, splits) for chunk, dtype in zip(chunks, dtypes, strict=True)]
    blocks = _place_states(chunks, rows, arena, nvme)
    accumulators = place_accumulators(chunks, arena)
    placed = []
    for chunk, dtype, block, lies, accumulator in zip(chunks, dtypes, blocks, rows, accumulators, strict=True):
        home = next(to_come[chunk.parameter], None)
        piece = None if home else flat(parameters[chunk.parameter])[chunk.offset : chunk.end]
        weights = home.region if home else Region(chunk.size * dtype.itemsize, chunk.label)
        placed.append(Placed(chunk, dtype, piece, home, weights, block, lies, accumulator))
    return placed


def _rows(chunk: Chunk, dtype: torch.dtype, settings: Hyperparameters, splits: bool) -> StateRows:
    return rows_of(
        chunk.size,
        settings,
        has_master=chunk.path.updates_on_cpu or dtype != torch.float32,
        is_split=splits and chunk.path is Path.STREAMED and dtype == torch.bfloat16,
        unit_bytes=ALIGNMENT_BYTES if chunk.path is Path.NVME else TORCH_ALIGNMENT_BYTES,
    )


def _place_states(
    chunks: Sequence[Chunk], rows: Sequence[StateRows], arena: Arena, nvme: NvmeSlab | None
) -> list[MemorySlice | NvmeStates]:
    """One block per chunk, in memory or on NVMe."""
    in_memory = [(chunk, row.nbytes) for chunk, row in zip(chunks, rows, strict=True) if chunk.path is not Path.NVME]
    held, sizes = [chunk for chunk, _ in in_memory], [nbytes for _, nbytes in in_memory]
    parts = iter(_parts(arena, held, sizes, lambda path: path is Path.RESIDENT, "optimizer_states"))
    on_nvme = [(chunk, row) for chunk, row in zip(chunks, rows, strict=True) if chunk.path is Path.NVME]
    stored = iter(place_on_nvme(nvme, on_nvme))
    return [next(stored) if chunk.path is Path.NVME else next(parts) for chunk in chunks]


def place_accumulators(chunks: Sequence[Chunk], arena: Arena) -> list[Accumulator]:
    """One float32 accumulator per chunk: in host memory if the CPU updates the chunk, otherwise on the device."""
    sizes = [accumulator_bytes(chunk.size) for chunk in chunks]
    parts = _parts(arena, chunks, sizes, lambda path: not path.updates_on_cpu, "gradients")
    return [
        Accumulator(chunk, part, part.tensor[: FLOAT32_BYTES * chunk.size].view(torch.float32))
        for chunk, part in zip(chunks, parts, strict=True)
    ]


def _parts(
    arena: Arena, chunks: Sequence[Chunk], sizes_bytes: Sequence[int], on_device: Callable[[Path], bool], purpose: str
) -> list[MemorySlice]:
    """One part per chunk, in the order of the chunks, from one piece of memory per tier."""
    tiers = [Tier.DEVICE if on_device(chunk.path) else Tier.HOST for chunk in chunks]
    parts = {
        tier: iter(
            arena.parts(tier, [size for size, at in zip(sizes_bytes, tiers, strict=True) if at is tier], purpose)
        )
        for tier in (Tier.HOST, Tier.DEVICE)
    }
    return [next(parts[tier]) for tier in tiers]
