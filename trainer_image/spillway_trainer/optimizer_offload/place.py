"""Gives every chunk its memory, before the first step: state blocks and accumulators on the tier of its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from spillway.plan import Tier

from ..tiers.lanes import Region
from ..trainable import flat
from .assign import Chunk, Path
from .gradients import Accumulator
from .memory import FLOAT32_BYTES, Arena, Part, States, accumulator_bytes, states_bytes, view_states


@dataclass(frozen=True, slots=True)
class Placed:
    """One chunk with its memory, for the whole run."""

    chunk: Chunk
    parameter: Tensor
    """flat slice of the device parameter, in the compute dtype"""
    weights: Region
    """the memory of `parameter`"""
    block: Part
    """the chunk's states where they live between updates: host memory, or the device for a resident chunk"""
    accumulator: Accumulator

    @property
    def parameter_is_master(self) -> bool:
        """With float32 compute the master of a chunk that the device updates never exists twice."""
        return self.parameter.dtype == torch.float32 and self.chunk.path is not Path.CPU

    def states(self, block: Tensor) -> States:
        """`block` (uint8: this chunk's, or a slot that holds its states) as states."""
        return view_states(block, self.chunk.size, self.parameter if self.parameter_is_master else None)

    @property
    def device_out(self) -> Tensor | None:
        """Where the device's update writes the rounded parameter; None when it is the master itself."""
        return None if self.parameter_is_master else self.parameter


def place_chunks(chunks: Sequence[Chunk], parameters: Mapping[str, Parameter], arena: Arena) -> list[Placed]:
    """State blocks and accumulators of `chunks`, in their order."""
    slices = [flat(parameters[chunk.parameter])[chunk.offset : chunk.end] for chunk in chunks]
    has_master = [
        chunk.path is Path.CPU or piece.dtype != torch.float32 for chunk, piece in zip(chunks, slices, strict=True)
    ]
    sizes = [states_bytes(chunk.size, has) for chunk, has in zip(chunks, has_master, strict=True)]
    blocks = _parts(arena, chunks, sizes, lambda path: path is Path.RESIDENT, "optimizer_states")
    accumulators = place_accumulators(chunks, arena)
    return [
        Placed(chunk, piece, Region(piece.numel() * piece.element_size(), chunk.label), block, accumulator)
        for chunk, piece, block, accumulator in zip(chunks, slices, blocks, accumulators, strict=True)
    ]


def place_accumulators(chunks: Sequence[Chunk], arena: Arena) -> list[Accumulator]:
    """One float32 accumulator a chunk: in host memory where the CPU updates it, else on the device."""
    sizes = [accumulator_bytes(chunk.size) for chunk in chunks]
    parts = _parts(arena, chunks, sizes, lambda path: path is not Path.CPU, "gradients")
    return [
        Accumulator(chunk, part, part.tensor[: FLOAT32_BYTES * chunk.size].view(torch.float32))
        for chunk, part in zip(chunks, parts, strict=True)
    ]


def _parts(
    arena: Arena, chunks: Sequence[Chunk], sizes_bytes: Sequence[int], on_device: Callable[[Path], bool], purpose: str
) -> list[Part]:
    """One part a chunk, in the order of the chunks; one piece of memory a tier."""
    tiers = [Tier.DEVICE if on_device(chunk.path) else Tier.HOST for chunk in chunks]
    parts = {
        tier: iter(
            arena.parts(tier, [size for size, at in zip(sizes_bytes, tiers, strict=True) if at is tier], purpose)
        )
        for tier in (Tier.HOST, Tier.DEVICE)
    }
    return [next(parts[tier]) for tier in tiers]
