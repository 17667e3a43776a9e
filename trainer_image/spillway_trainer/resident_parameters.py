"""ResidentParameters: recognises parameters that stay on the device among saved tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor


class ParameterRef(NamedTuple):
    """A parameter, or a view of it (a transpose, a chunk), by name instead of by address."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the storage (resident) or of the parameter (streamed)."""
    version: int
    """In-place changes of the values when the view was saved."""


class ResidentParameters:
    """Finds saved tensors that are resident parameters or buffers. They are never moved nor charged a second time.

    `named` tensors may share storage (tied parameters). Their storages are held here, so the address of one cannot come
    to mean another tensor.
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
        """The parameter that `tensor` views; None for any other tensor, for a view in another dtype, and
        for one that is lazily conjugated or negated: a reference has no place for that bit."""
        sharing = self._sharing.get(tensor.untyped_storage().data_ptr())
        if sharing is None:
            return None
        name, value = sharing[0]
        if value.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return ParameterRef(name, tensor.shape, tensor.stride(), int(tensor.storage_offset()), _version(sharing))

    def resolve(self, ref: ParameterRef) -> Tensor:
        """The view that `ref` names, with present values. Raises, as autograd does, when they changed since."""
        value = self._values[ref.name]
        check_version(ref, _version(self._sharing[value.untyped_storage().data_ptr()]))
        return value.as_strided(ref.size, ref.stride, ref.offset)

    def enter_forward(self, segment: str) -> None:
        """Every parameter is here already."""

    def enter_backward(self, segment: str) -> None:
        """Every parameter is here already."""

    def prefetch(self, segment: str) -> None:
        """Every parameter is here already."""

    def pinned(self, segment: str) -> AbstractContextManager[None]:
        return nullcontext()


def check_version(ref: ParameterRef, version: int) -> None:
    """Raises, as autograd does without hooks, when `version` is not the one that `ref` was saved at."""
    if version != ref.version:
        raise RuntimeError(
            f"{ref.name}: one of the variables needed for gradient computation has been modified by an inplace "
            "operation: the parameter was changed between forward and backward, for example by an optimizer step; run "
            "backward first"
        )


def _version(sharing: list[tuple[str, Tensor]]) -> int:
    """Changes of a storage's values through any of its parameters: each tied one has a counter of its own."""
    return sum(value._version for _, value in sharing)
