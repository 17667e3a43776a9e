"""Boundaries: outputs of segments for all micro-batches, kept between one segment's pass and the next.

An output stays on the device, or goes through the activation store: out after the pass that made it, in before the next
segment's forward, and out again. What that segment saves of it for backward is the same record, so it is copied out
once, and loaded once for each direction.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spillway.plan import Policy

from ..saved_tensors import ActivationStore, KeptTensor, SpilledHandle, has_storage, kept
from ..tiers.device_ledger import DeviceLedger


class Boundary:
    """One tensor on its way from one segment to the next, for one micro-batch."""

    def __init__(self, handle: KeptTensor | SpilledHandle, requires_grad: bool) -> None:
        self._handle: KeptTensor | SpilledHandle | None = handle
        self.requires_grad = requires_grad

    def tensor(self) -> Tensor:
        """The values, without autograd history."""
        assert self._handle is not None, "the pass that needs it is over"
        return self._handle.tensor()

    def prefetch(self) -> None:
        """Submits the reload: the next segment's forward needs the tensor soon."""
        if self._handle is not None and not isinstance(self._handle, KeptTensor):
            self._handle.prefetch()

    def leave(self) -> Callable[[], None]:
        """Called when the next segment's forward is done with it. Returns what brings it back for backward, if backward
        needs it."""
        handle, self._handle = self._handle, None
        return handle.unload() if handle is not None and not isinstance(handle, KeptTensor) else nothing


def nothing() -> None:
    return


class Boundaries:
    """Takes over the outputs of segments. `answer` (keep, host or nvme) says where they wait."""

    def __init__(self, answer: Policy, store: ActivationStore, ledger: DeviceLedger) -> None:
        self._answer = answer
        self._store = store
        self._ledger = ledger

    def hold(self, segment: str, outputs: tuple[Tensor, ...]) -> list[Boundary]:
        """Takes over what `segment` returned. The caller drops its tensors."""
        if self._answer is Policy.KEEP:
            return [Boundary(self._keep(segment, output), output.requires_grad) for output in outputs]
        batch = self._store.open(f"{segment}'s output", self._answer)
        handles = [(has_storage(output) and batch.put(output)) or self._keep(segment, output) for output in outputs]
        batch.flush()
        return [Boundary(handle, output.requires_grad) for handle, output in zip(handles, outputs, strict=True)]

    def given(self, tokens_BT: Tensor) -> list[Boundary]:
        """The input of the first segment, which stays where it is."""
        return [Boundary(self._keep("the data", tokens_BT), requires_grad=False)]

    def _keep(self, segment: str, output: Tensor) -> KeptTensor:
        return kept(output, segment, self._ledger)
