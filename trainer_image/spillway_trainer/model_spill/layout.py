"""Offsets of a streamed segment's parameters, equal in device slots and host homes.

    own parameters in declared order, each padded to 512 bytes | padding to whole pages | aliases of other parameters

A tied alias has no home: its place in the slot is filled from its owner's home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spillway.errors import UserError
from spillway.plan import PLAN_AGAIN, Tier
from spillway.planning.workload import PARAMETER_UNIT_BYTES, padded

from ..models.chain import Chain
from ..tiers.extents import round_up


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One parameter in a slot."""

    name: str
    parameter: nn.Parameter
    offset: int
    """Bytes from the start of the slot."""
    owner: str
    """Whose values these are: `name`, or the parameter it is tied to."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    def view(self, slot: Tensor) -> Tensor:
        """The parameter's values in `slot` (uint8)."""
        return slot[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.parameter.shape)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    segment: str
    home: Tier
    rows: tuple[SlotRow, ...]
    """In the order of their offsets."""
    home_bytes: int
    nbytes: int
    """Bytes in a slot."""

    @property
    def own(self) -> list[SlotRow]:
        return [row for row in self.rows if row.owner == row.name]


def lay_out(model: Chain, segment: str, home: Tier, names: Sequence[str]) -> SegmentLayout:
    """The layout of a streamed segment with the parameters `names`."""
    rows, end, home_bytes = list[SlotRow](), 0, 0
    for are_aliases in (False, True):
        for name in names:
            if (name in model.tied) is are_aliases:
                row = SlotRow(name, model.get_parameter(name), end, model.tied.get(name, name))
                rows.append(row)
                end += padded(row.nbytes, PARAMETER_UNIT_BYTES)
        end = round_up(end)
        if not are_aliases:
            home_bytes = end
    return SegmentLayout(segment, home, tuple(rows), home_bytes, end)


def check_homes(model: Chain, homes: Sequence[Tier]) -> Mapping[str, Tier]:
    """The home of each segment, by name. Raises UserError if the model cannot be placed so."""
    segments = [name for name, _ in model.segments]
    if len(homes) != len(segments):
        raise UserError(
            f"the plan is for a model with {len(homes)} segments (embedding, blocks, head), but this model has "
            f"{len(segments)} ({', '.join(segments)}); {PLAN_AGAIN}"
        )
    home_of = dict(zip(segments, homes, strict=True))
    names_of = model.parameters_of()
    uses = Counter(name for names in names_of.values() for name in names)
    if shared := [name for name, count in uses.items() if count > 1]:
        raise UserError(
            f"parameter {shared[0]} belongs to several segments (embedding, blocks, head) of the model; give each "
            "segment its own parameter, and list these parameters in the property `tied` of the Chain"
        )
    segment_of = {name: segment for segment, names in names_of.items() for name in names}
    for name, segment in segment_of.items():
        parameter = model.get_parameter(name)
        if home_of[segment] is not Tier.DEVICE and not parameter.is_contiguous():
            raise UserError(
                f"parameter {name}: is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}), "
                "but its layer is streamed, which needs contiguous parameters; create it from tensor.contiguous()"
            )
    for alias, owner in model.tied.items():
        of_alias, of_owner = home_of[segment_of[alias]], home_of[segment_of[owner]]
        if of_alias is not of_owner:
            raise UserError(
                f"the plan keeps segment {segment_of[alias]} of the model in {of_alias} memory and segment "
                f"{segment_of[owner]} in {of_owner} memory, but parameter {alias} is tied to {owner}, so both segments "
                f"must be in the same memory; {PLAN_AGAIN}"
            )
    return home_of
