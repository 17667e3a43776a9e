"""ResidentParameters: recognises, among saved tensors, the parameters that stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor


class ParameterRef(NamedTuple):
    """Refers to a parameter, or to a view of it (a transpose, a chunk), by name instead of by address."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the storage (resident) or of the parameter (streamed)."""
    version: int
    """Number of in-place changes of the values before the view was saved."""


class ResidentParameters:
    """Finds saved tensors that are resident parameters or buffers. They are never moved nor charged a second time.

    `named` tensors may share storage (tied parameters). Their storages are held here, so that the address of one cannot
    come to mean another tensor.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._sharing: dict[int, list[tuple[str, Tensor]]] = {}
        self._values: dict[str, Tensor] = {}
        for name, tensor in named:
            value = tensor.detach()  # shares storage and version counter
            self._sharing.setdefault(value.untyped_storage().data_ptr(), []).append((name, value))
            self._values[name] = value
        self.addresses: Collection[int] | None = self._sharing.keys()

    def find(self, tensor: Tensor) -> ParameterRef | None:
        """Returns a reference to the parameter that `tensor` views. None for any other tensor, for a view in another
        dtype, and for a view that is lazily conjugated or negated, because a reference cannot hold that bit."""
        sharing = self._sharing.get(tensor.untyped_storage().data_ptr())
        if sharing is None:
            return None
        name, value = sharing[0]
        if value.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return ParameterRef(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()), _version(sharing))

    def resolve(self, ref: ParameterRef) -> Tensor:
        """Returns the view that `ref` names, with current values. Raises, as autograd does, if they have changed
        since."""
        value = self._values[ref.name]
        check_version(ref, _version(self._sharing[value.untyped_storage().data_ptr()]))
        return value.as_strided(ref.size, ref.stride, ref.offset)

    def enter_forward(self, segment: str) -> None:
        """Does nothing: every parameter is here already."""

    def enter_backward(self, segment: str) -> None:
        """Does nothing: every parameter is here already."""

    def prefetch(self, segment: str) -> None:
        """Does nothing: every parameter is here already."""

    def pinned(self, segment: str) -> AbstractContextManager[None]:
        return nullcontext()


def check_version(ref: ParameterRef, version: int) -> None:
    """Raises, as autograd does without hooks, if `version` is not the one at which `ref` was saved."""
    if version != ref.version:
        raise RuntimeError(
            f"{ref.name}: one of the variables needed for gradient computation has been modified by an inplace "
            "operation: the parameter was changed between forward and backward, for example by an optimizer step; run "
            "backward first"
        )


def _version(sharing: list[tuple[str, Tensor]]) -> int:
    """Counts the changes of a storage's values through any of its parameters: each tied parameter has its own
    counter."""
    return sum(value._version for _, value in sharing)
