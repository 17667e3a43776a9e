"""StreamedParameters: resolves saved parameters by name when backward needs them, and prefetches the next segment.

forward of k            k in its slot, then the load of k+1 starts: it takes the slot of k-1
backward comes to k     k in its slot, then the load of k-1 starts: it takes the slot of k+1, which is finished
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..resident_parameters import ParameterRef, ResidentParameters, check_version
from ..tiers.lanes import Lanes
from .layout import SegmentLayout, SlotRow
from .slots import Slot, Slots


class StreamedParameters:
    """A ParameterSource: slots for the streamed segments, `resident` for all other parameters."""

    addresses: Collection[int] | None = None

    def __init__(
        self,
        resident: ResidentParameters,
        slots: Slots,
        layouts: Mapping[str, SegmentLayout],
        segments: Sequence[str],
        lanes: Lanes,
    ) -> None:
        self._resident = resident
        self._slots = slots
        self._layouts = layouts
        self._following = dict(pairwise(segments))
        self._lanes = lanes
        self._places = {row.name: (segment, row) for segment, layout in layouts.items() for row in layout.rows}
        self._sharing = _sharing([row for _, row in self._places.values()])
        self._offsets = {segment: [row.offset for row in layout.rows] for segment, layout in layouts.items()}

    def find(self, tensor: Tensor) -> ParameterRef | None:
        """The parameter that `tensor` views; None if it views none. Raises RuntimeError for a view that no reference
        can name."""
        slot = self._slots.at(tensor)
        if slot is None:
            return self._resident.find(tensor)
        if slot.segment is None:
            raise RuntimeError(
                "the model's forward saves an old view of a parameter for backward, but the parameter's layer is no "
                "longer on the device; create the view again in each forward instead of keeping it"
            )
        first_byte = int(tensor.storage_offset()) * tensor.element_size()
        row = self._layouts[slot.segment].rows[bisect_right(self._offsets[slot.segment], first_byte) - 1]
        _check_view(tensor, row, first_byte)
        offset = (first_byte - row.offset) // row.dtype.itemsize
        return ParameterRef(row.name, tensor.shape, tensor.stride(), offset, self._version(row.name))

    def resolve(self, ref: ParameterRef) -> Tensor:
        """The view that `ref` names, after loading its segment into a slot. Raises, as autograd does, if the values
        changed since."""
        if ref.name not in self._places:
            return self._resident.resolve(ref)
        segment, row = self._places[ref.name]
        check_version(ref, self._version(ref.name))
        slot = self._slots.ensure(segment)
        self._use(slot, f"backward of {segment}")
        start = row.offset // row.dtype.itemsize + ref.offset
        storage = slot.buffer.tensor.untyped_storage()
        return torch.empty(0, dtype=row.dtype, device=storage.device).set_(storage, start, ref.size, ref.stride)

    def enter_forward(self, segment: str) -> None:
        if segment in self._layouts:
            self._slots.ensure(segment)
        if segment in self._following:
            self.prefetch(self._following[segment])

    def enter_backward(self, segment: str) -> None:
        # Even for a segment that saved no parameter by name: it may rerun what it saved by its own means.
        if segment in self._layouts:
            self._slots.ensure(segment)

    def prefetch(self, segment: str) -> None:
        if segment in self._layouts:
            self._slots.prefetch(segment)

    @contextmanager
    def pinned(self, segment: str) -> Iterator[None]:
        """Inside, the segment's parameters are bound and stay so; for its forward, run for the first time or again."""
        if segment not in self._layouts:
            yield
            return
        with self._slots.pinned(segment) as slot:
            self._use(slot, f"forward of {segment}")
            yield

    def _use(self, slot: Slot, label: str) -> None:
        self._lanes.compute(reads=(slot.buffer,), label=label)

    def _version(self, name: str) -> int:
        """Number of changes of the values through any parameter that shares them: by the optimizer or a user, not by
        evictions."""
        return sum(row.parameter._version - self._slots.num_evictions(row.name) for row in self._sharing[name])


def _sharing(rows: Sequence[SlotRow]) -> dict[str, list[SlotRow]]:
    by_owner: dict[str, list[SlotRow]] = {}
    for row in rows:
        by_owner.setdefault(row.owner, []).append(row)
    return {row.name: by_owner[row.owner] for row in rows}


def _check_view(tensor: Tensor, row: SlotRow, first_byte: int) -> None:
    base = tensor._base
    if isinstance(base, nn.Parameter) and base is not row.parameter:
        raise RuntimeError(
            f"the model's forward saves an old view of a parameter for backward, but the view's memory now holds "
            f"another parameter, {row.name}; create the view again in each forward instead of keeping it"
        )
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = first_byte + (reach + 1) * tensor.element_size() if tensor.numel() else first_byte
    if tensor.dtype != row.dtype or end > row.offset + row.nbytes:
        raise RuntimeError(
            f"a tensor of type {tensor.dtype} and shape {tuple(tensor.shape)} that is saved for backward shares memory "
            f"with parameter {row.name} ({row.dtype}), but is not a plain view of it. Streaming of layers does not "
            "support this; keep the layers on the device (spec.memory.advanced.parameters.placement: Resident)."
        )
