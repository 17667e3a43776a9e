"""Gradients of one segment at a time, whole on every rank -> ReducedGradients, once that segment's backward is over.

Ranks agree on what they exchange: a gradient that some of them have counts as 0 on the others, one that none has is not
exchanged. Segments end in the same order everywhere, between FSDP2's own exchanges (the last first; those whose inputs
need no gradient when the whole backward is over).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..tiers.device_ledger import DeviceLedger
from .distributed import Peers
from .reduced_gradients import ReducedGradients


class SegmentGradients:
    """Holds what backward has brought of the segment that it is in."""

    def __init__(
        self,
        segments: Mapping[str, Sequence[str]],
        likes: Mapping[str, Tensor],
        peers: Peers,
        reduced: ReducedGradients,
        mark: Callable[[str], None],
        ledger: DeviceLedger,
    ) -> None:
        """`segments`: names of the trained parameters of each, in forward order. `likes`: shape and type of each one's
        gradient. `mark` learns, on every rank, of a parameter that has a gradient on one."""
        self._segments, self._likes = segments, likes
        self._peers, self._reduced, self._mark, self._ledger = peers, reduced, mark, ledger
        self._to_come = [*segments]
        """Segments that this micro-batch's backward has not left yet."""
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, gradient: Tensor) -> None:
        """One more part of a parameter's gradient, which is nearly always all of it; parts are added in float32."""
        held = self._held.pop(name, None)
        if held is not None:  # a backward inside the backward (re-entrant checkpointing) brings them one by one
            self._ledger.release("gradients", _nbytes(held))
            gradient = held.float() + gradient.float()
        self._ledger.charge("gradients", _nbytes(gradient))
        self._held[name] = gradient

    def end(self, segment: str) -> None:
        """Backward has left `segment`, and so all segments after it."""
        while segment in self._to_come:
            self._exchange(self._to_come.pop())

    def finish(self) -> None:
        """The micro-batch's backward is over. Every rank calls it, each time."""
        while self._to_come:
            self._exchange(self._to_come.pop())
        self._to_come = [*self._segments]

    def _exchange(self, segment: str) -> None:
        names = self._segments[segment]
        if not names:
            return
        for name, is_there in zip(names, self._peers.any([name in self._held for name in names]), strict=True):
            if is_there:
                self._mark(name)
                self._reduced.take(name, self._taken(name))
        self._reduced.finish()

    def _taken(self, name: str) -> Tensor:
        gradient = self._held.pop(name, None)
        if gradient is None:
            like = self._likes[name]
            return torch.zeros(like.shape, dtype=like.dtype)
        self._ledger.release("gradients", _nbytes(gradient))
        return gradient


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
