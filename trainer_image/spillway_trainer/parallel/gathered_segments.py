"""GatheredSegments: finds FSDP2's parameters among saved tensors. A segment's parameters are whole only during its
forward and its backward.

FSDP2 makes one whole parameter for each DTensor when its segment first runs; later it only gives this parameter memory
and takes the memory away. So a parameter that autograd saves is recorded as a name, and backward looks the name up in
the memory that the parameter has then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ..models.chain import Chain
from ..resident_parameters import ParameterRef, ResidentParameters, check_version
from .segment_gradients import TakeGradient, pass_on_gradient


class GatheredSegments:
    """Tracks the whole parameters of every segment that has run, and passes their gradients on."""

    addresses: Collection[int] | None = None

    def __init__(self, model: Chain, segments: Mapping[str, Sequence[str]], take: TakeGradient) -> None:
        """`segments`: segment -> the names of all its parameters."""
        self._model, self._segments, self._take = model, segments, take
        self._seen: set[str] = set()
        self._whole: dict[str, Parameter] = {}
        self._by_storage: dict[int, str] = {}
        """Parameter name by torch's storage object, which stays the same while its memory comes and goes."""
        self._buffers = ResidentParameters(list(model.named_buffers()))

    def ready(self, segment: str) -> None:
        """Called when the forward of `segment` begins: its parameters are whole, and the first time they are new
        objects."""
        if segment in self._seen:
            return
        self._seen.add(segment)
        for name in self._segments[segment]:
            whole = self._model.get_parameter(name)
            self._whole[name] = whole
            self._by_storage[whole.untyped_storage()._cdata] = name
            if whole.requires_grad:
                pass_on_gradient(whole, name, self._take)  # otherwise FSDP2 would reduce it in its own way

    def changed(self) -> None:
        """Records that all parameters have new values, so that the backward of an earlier graph raises an error."""
        for whole in self._whole.values():
            increment_version(whole)

    def find(self, tensor: Tensor) -> ParameterRef | None:
        name = self._by_storage.get(tensor.untyped_storage()._cdata)
        if name is None:
            return self._buffers.find(tensor)
        whole = self._whole[name]
        if whole.dtype != tensor.dtype:
            return None
        return ParameterRef(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()), whole._version)

    def resolve(self, ref: ParameterRef) -> Tensor:
        """Returns the view that `ref` names. FSDP2 gathers a segment's parameters before any part of its backward
        runs."""
        whole = self._whole.get(ref.name)
        if whole is None:
            return self._buffers.resolve(ref)
        check_version(ref, whole._version)
        if not whole.untyped_storage().size() and whole.numel():
            raise RuntimeError(
                f"parameter {ref.name}: the loss uses this parameter outside its own segment (group of layers), but "
                "FSDP2 has already freed it after backward of that segment; set spec.parallelism.strategy: Ddp"
            )
        return whole.detach().as_strided(ref.size, ref.stride, ref.offset)

    def enter_forward(self, segment: str) -> None:
        """Does nothing: FSDP2 gathers the segment before it runs."""

    def enter_backward(self, segment: str) -> None:
        """Does nothing: FSDP2 gathers the segment before it runs."""

    def prefetch(self, segment: str) -> None:
        """Does nothing: FSDP2 itself gathers the next segment."""

    def pinned(self, segment: str) -> AbstractContextManager[None]:
        return nullcontext()
