"""Collects the gradients of one segment at a time, whole on every rank, and passes them to ReducedGradients once that
segment's backward is over.

Ranks agree on what they exchange: a gradient that only some ranks have counts as 0 on the others, and one that no rank
has is not exchanged. Segments end in the same order on every rank, between FSDP2's own exchanges: the last first, and
those whose inputs need no gradient when the whole backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..models.chain import CPU
from ..tiers.device_ledger import DeviceLedger
from .distributed import Peers
from .reduced_gradients import ReducedGradients


class SegmentGradients:
    """Holds the gradients of the segment whose backward is running."""

    def __init__(
        self,
        segments: Mapping[str, Sequence[str]],
        likes: Mapping[str, Tensor],
        peers: Peers,
        reduced: ReducedGradients,
        mark: Callable[[str], None],
        ledger: DeviceLedger,
        device: torch.device = CPU,
    ) -> None:
        """`segments`: segment -> its trained parameters' names, in forward order. `likes`: tensors with the shape and
        type of each gradient. `mark` is called, on every rank, with each parameter that has a gradient on any rank.
        `device`: where gradients are."""
        self._segments, self._likes, self._device = segments, likes, device
        self._peers, self._reduced, self._mark, self._ledger = peers, reduced, mark, ledger
        self._to_come = [*segments]
        """Segments that this micro-batch's backward has not left yet."""
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, gradient: Tensor) -> None:
        """Takes one more part of a parameter's gradient, nearly always all of it; several parts are added in
        float32."""
        held = self._held.pop(name, None)
        if held is not None:  # a backward inside the backward (re-entrant checkpointing) brings several
            self._ledger.release("gradients", _nbytes(held))
            gradient = held.float() + gradient.float()
        self._ledger.charge("gradients", _nbytes(gradient))
        self._held[name] = gradient

    def end(self, segment: str) -> None:
        """Called when backward has left `segment`, and with it all segments after it."""
        while segment in self._to_come:
            self._exchange(self._to_come.pop())

    def finish(self) -> None:
        """Called when the micro-batch's backward is over, by every rank, after every micro-batch."""
        while self._to_come:
            self._exchange(self._to_come.pop())
        self._reduced.finish()
        self._to_come = [*self._segments]

    def _exchange(self, segment: str) -> None:
        names = self._segments[segment]
        if not names:
            return
        for name, is_there in zip(names, self._peers.any([name in self._held for name in names]), strict=True):
            if is_there:
                self._mark(name)
                self._reduced.take(name, self._taken(name))
        self._reduced.send()

    def _taken(self, name: str) -> Tensor:
        gradient = self._held.pop(name, None)
        if gradient is None:
            like = self._likes[name]
            return torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        self._ledger.release("gradients", _nbytes(gradient))
        return gradient


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
