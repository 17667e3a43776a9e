"""GatheredParameters: finds ZeRO-3's parameters among saved tensors. They are whole while a module runs and in parts
otherwise.

DeepSpeed gathers a module's parameters before its forward and its backward. So a parameter that autograd saves is
recorded as a name, and backward looks the name up in the memory that the parameter has then.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ...models.chain import Chain
from ...resident_parameters import ParameterRef, ResidentParameters, check_version


class GatheredParameters:
    """Finds saved tensors that belong to parameters that are whole at the moment, or to buffers."""

    addresses: Collection[int] | None = None

    def __init__(self, model: Chain) -> None:
        self._by_name: dict[str, Any] = dict(model.named_parameters())
        self._buffers = ResidentParameters(list(model.named_buffers()))

    def find(self, tensor: Tensor) -> ParameterRef | None:
        storage = tensor.untyped_storage().data_ptr()
        for name, parameter in self._by_name.items():
            if not parameter.numel():  # it is in parts at the moment
                continue
            whole = parameter.data
            start = tensor.storage_offset() - whole.storage_offset()
            if whole.untyped_storage().data_ptr() == storage and 0 <= start < whole.numel():
                if whole.dtype != tensor.dtype:
                    return None
                return ParameterRef(name, tensor.shape, tensor.stride(), int(start), parameter._version)
        return self._buffers.find(tensor)

    def resolve(self, ref: ParameterRef) -> Tensor:
        """Returns the view that `ref` names. If the forward of a recompute has freed the parameter, gathers it
        again."""
        parameter = self._by_name.get(ref.name)
        if parameter is None:
            return self._buffers.resolve(ref)
        if not parameter.data.numel():
            parameter.all_gather([parameter])
        check_version(ref, parameter._version)
        whole: Tensor = parameter.data
        return whole.as_strided(ref.size, ref.stride, whole.storage_offset() + ref.offset)

    def enter_forward(self, segment: str) -> None:
        """Does nothing: DeepSpeed gathers, module by module."""

    def enter_backward(self, segment: str) -> None:
        """Does nothing: DeepSpeed gathers, module by module."""

    def prefetch(self, segment: str) -> None:
        """Does nothing: DeepSpeed gathers, module by module."""

    def pinned(self, segment: str) -> AbstractContextManager[None]:
        return nullcontext()
