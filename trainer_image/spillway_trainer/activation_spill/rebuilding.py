"""Records the operators of a forward and reruns the cheap ones when backward needs their results.

A saved tensor is rebuilt only if all of the following holds; otherwise it is held like any other:

    the operator     is in `lean.REPLAYABLE`, and was seen in this forward with its actual arguments: numbers that
                     change from step to step are those of this step
    its operands     are saved tensors of the same forward, at the version at which they were saved; or are small, and
                     copied; or can themselves be rebuilt from such operands
    its bits         came out the same when it was run twice; checked once for each operator, layout and number

A rebuilt tensor costs time in backward, and no memory before. A tensor that was changed in place raises as it would
without rebuilding, because the tensor that backward gets shares the version counter of the saved one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels import native
from ..saved_tensors import ForwardVisit, Handle, Packed, Packer, SavedParameter, changed_in_place, has_storage
from ..tiers.arena import TORCH_ALIGNMENT_BYTES
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from .lean import REPLAYABLE, Cost, Operator, TensorLayout, is_cheap, total
from .records import counted_with, empty, origin, share_counter

SMALL_BYTES = 64 << 10
"""Operands up to this size are copied: weights of norms, statistics of rows. Later changes to them do not matter."""
NOTHING = torch.empty(0)
NEVER = -1
"""A version that no tensor has."""
MAX_PROVEN = 4096
"""Most combinations of operator, layouts and numbers to remember: a number that changes in every step would otherwise
fill memory."""


def is_plain(tensor: Tensor) -> bool:
    """Whether storage and TensorLayout describe `tensor` completely: a lazily conjugated or negated tensor has one more
    bit."""
    return has_storage(tensor) and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


class NotHeld(Exception):
    """An operand that backward will not have."""


class Held:
    """A tensor that autograd saved in this forward, by a weak reference to its handle, which autograd owns."""

    __slots__ = ("_origin", "handle", "layout", "version", "witness")

    def __init__(self, handle: Handle, tensor: Tensor, witness: Tensor) -> None:
        self.handle = weakref.ref(handle)
        self.layout = TensorLayout.of(tensor)
        self.version = tensor._version
        self.witness = witness
        self._origin = weakref.ref(origin(tensor))

    def is_unchanged(self) -> bool:
        return self.witness._version == self.version

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the bytes that were saved, and cannot change unnoticed."""
        if tensor._version != self.version or self.handle() is None:
            return False
        return share_counter(tensor, self.witness, self._origin)


class Leaf(NamedTuple):
    """An operand that backward will have. `layout`: given if the operand is another view of the saved storage."""

    held: Held
    layout: TensorLayout | None
    checksum: int

    def tensor(self) -> Tensor:
        handle = self.held.handle()
        assert handle is not None, "whoever rebuilds owns the handles"
        tensor = view_of(handle.tensor(), self.layout)
        if checksum(tensor) != self.checksum:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} was changed after forward used it (through .data or numpy, "
                "which autograd cannot detect), but backward must recompute other tensors from its old values. "
                "Change a copy, or create the Spilling with lean=False (in a TrainingJob: "
                "spec.memory.advanced.activations.policy: Keep)"
            )
        return tensor


class Copied(NamedTuple):
    """A copy of a small operand."""

    value: Tensor

    def tensor(self) -> Tensor:
        return self.value


class NestedOperand(NamedTuple):
    """An operand that is itself the result of a replayable operator, and is not held."""

    result: Result
    layout: TensorLayout | None

    def tensor(self) -> Tensor:
        return view_of(self.result.run(), self.layout)


Operand = Leaf | Copied | NestedOperand


def view_of(tensor: Tensor, layout: TensorLayout | None) -> Tensor:
    if layout is None:
        return tensor
    dtype, size, stride, offset = layout
    return empty(dtype, tensor.device).set_(tensor.untyped_storage(), offset, size, stride)


def checksum(tensor: Tensor) -> int:
    """Checksum of the tensor's values, at some 30 GB/s. 0 for every tensor on a device, where the host would have to
    wait for each."""
    if tensor.device.type != "cpu":
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != tensor.numel():  # has gaps, which may belong to other tensors, or repeats values
        tensor = tensor.contiguous()
    # Not through numpy: torch then regards the storage as one that others may write into.
    return xxhash.xxh3_64_intdigest(native.bytes_of(tensor))


class Pin:
    """Keeps the address of a storage from being reused for another one, but does not keep its bytes."""

    __slots__ = ("_address",)

    def __init__(self, storage: UntypedStorage) -> None:
        self._address = storage._weak_ref()

    def storage(self) -> UntypedStorage | None:
        """The storage, if anything still holds it."""
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self._address)
        return found

    def __del__(self) -> None:
        UntypedStorage._free_weak_ref(self._address)  # type: ignore[no-untyped-call]


class Result:
    """The result of one operator, and how to compute it again."""

    __slots__ = (
        "_arguments",
        "_keywords",
        "_operator",
        "_pin",
        "_which",
        "cost",
        "layout",
        "nbytes",
        "rebuilt",
        "version",
    )

    def __init__(
        self,
        operator: Operator,
        which: int | None,
        arguments: Sequence[object],
        keywords: Mapping[str, object],
        tensor: Tensor,
        cost: Cost,
    ) -> None:
        """`arguments`, `keywords`: with an Operand in place of each tensor."""
        self._operator, self._which = operator, which
        self._arguments, self._keywords = arguments, keywords
        self._pin = Pin(tensor.untyped_storage())
        self.layout = TensorLayout.of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.cost = cost
        self.rebuilt: weakref.ref[Rebuilt] | None = None
        """What rebuilds it, once autograd has saved it."""

    def run(self) -> Tensor:
        arguments = [value_of(each) for each in self._arguments]
        keywords = {name: value_of(each) for name, each in self._keywords.items()}
        with torch._C._AutoDispatchBelowAutograd():
            return chosen(self._operator(*arguments, **keywords), self._which)

    def hold(self) -> None:
        """Makes its Rebuilt keep the original storage, if that still exists, because others may write into it."""
        if self.rebuilt is not None and (rebuilt := self.rebuilt()) is not None:
            rebuilt.original = self._pin.storage()

    def leaves(self) -> Iterator[Held]:
        for operand in operands_of((*self._arguments, *self._keywords.values())):
            if isinstance(operand, Leaf):
                yield operand.held
            elif isinstance(operand, NestedOperand):
                yield from operand.result.leaves()


def operands_of(values: Iterable[object]) -> Iterator[Operand]:
    for value in values:
        if isinstance(value, list):
            yield from operands_of(value)
        elif isinstance(value, Leaf | Copied | NestedOperand):
            yield value


def value_of(value: object) -> object:
    if isinstance(value, list):
        return [value_of(each) for each in value]
    return value.tensor() if isinstance(value, Leaf | Copied | NestedOperand) else value


def chosen(results: Any, which: int | None) -> Tensor:
    result: Tensor = results if which is None else results[which]
    return result


class Charge:
    """Bytes that are charged to the ledger for as long as this object lives; it is an attribute of the storage that has
    them."""

    __slots__ = ("_ledger", "_nbytes")

    def __init__(self, ledger: DeviceLedger, nbytes: int) -> None:
        ledger.charge(ACTIVATIONS, nbytes)
        self._ledger, self._nbytes = ledger, nbytes

    def __del__(self) -> None:
        if hasattr(self, "_nbytes"):  # else the charge was rejected
            self._ledger.release(ACTIVATIONS, self._nbytes)


class Rebuilt:
    """A storage that is rebuilt instead of held. One rebuild serves all its views, for as long as any of them is in
    use.

    While the original still exists (in use by the forward, or as an output), views get the original.
    """

    __slots__ = ("__weakref__", "_handles", "_ledger", "_num_threads", "_pin", "_result", "original")

    def __init__(
        self, result: Result, handles: list[Handle], storage: UntypedStorage, ledger: DeviceLedger, num_threads: int
    ) -> None:
        self._result = result
        self._handles = handles
        self._pin = Pin(storage)
        self.original: UntypedStorage | None = None
        self._ledger = ledger
        self._num_threads = num_threads
        """The forward's number of threads: kernels divide their work by it, and remainders take another path."""

    def storage(self) -> UntypedStorage:
        storage = self._pin.storage()
        if storage is None:
            storage = self._run().untyped_storage()
            storage._charge = Charge(self._ledger, storage.nbytes())  # type: ignore[attr-defined]
            self._pin = Pin(storage)
        return storage

    def _run(self) -> Tensor:
        now = torch.get_num_threads()
        if now != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
                return self._result.run()
        finally:
            if now != self._num_threads:
                torch.set_num_threads(now)


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


class RebuiltTensor:
    """A view of a storage that is rebuilt: what `pack` returned for one saved tensor."""

    __slots__ = ("__weakref__", "_layout", "_rebuilt", "_segment", "_version", "_witness")

    def __init__(self, rebuilt: Rebuilt, tensor: Tensor, witness: Tensor, segment: str) -> None:
        self._rebuilt = rebuilt
        self._layout = TensorLayout.of(tensor)
        self._version = tensor._version
        self._witness = witness
        self._segment = segment

    @property
    def cost(self) -> Cost:
        return self._rebuilt._result.cost

    def tensor(self) -> Tensor:
        if self._witness._version != self._version:
            raise changed_in_place(self._segment, self._layout.size, self._version, self._witness._version)
        dtype, size, stride, offset = self._layout
        storage = self._rebuilt.storage()
        found = empty(dtype, storage.device).set_(storage, offset, size, stride)
        return counted_with(self._witness, found)


class OperatorTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, around one forward, how each large result of a cheap operator came about; also provides its pack hook.

    Regions compiled by torch.compile run as compiled: the tape sees nothing inside them, and what they save is held.
    """

    def __init__(
        self,
        packer: Packer,
        visit: ForwardVisit,
        ledger: DeviceLedger,
        minimum_bytes: int,
        limit_bytes: int | None,
        proven: dict[object, bool],
    ) -> None:
        """`limit_bytes`: how much is rebuilt (None: all that can be). `proven`: whether an operator with certain
        layouts and numbers gave the same bits twice; kept from forward to forward."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._packer = packer
        self._visit = visit
        self._ledger = ledger
        self._minimum_bytes = minimum_bytes
        self._limit_bytes = limit_bytes
        self._proven = proven
        self._num_threads = torch.get_num_threads()
        self._held: dict[int, Held] = {}
        """By the address of a storage object, which the handle keeps from being reused."""
        self.results: dict[int, Result] = {}
        """By the address of a storage object, which a Pin keeps from being reused."""
        self.rebuilt_bytes = 0
        self.rebuildable_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator would import the compiler: 150 MiB, for a mode that it never sees

    def __torch_dispatch__(
        self, operator: Operator, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = operator(*args, **kwargs) if kwargs else operator(*args)
        which = KINDS.get(operator, UNKNOWN)
        if which is UNKNOWN:
            which = KINDS[operator] = kind_of(operator)
        if which is OTHER:
            return found
        if isinstance(which, Writes):
            self._forget(which.into(args, kwargs or {}))
        else:
            tensor = chosen(found, which)
            if has_storage(tensor) and tensor.nbytes >= self._minimum_bytes:
                self._note(operator, which, args, kwargs or {}, tensor)
        return found

    def pack(self, tensor: Tensor) -> Packed:
        if not is_plain(tensor):
            return self._packer.pack(tensor)
        guard = torch._C._DisableTorchDispatch()  # this mode need not see what a pack does
        try:
            key: int = tensor.untyped_storage()._cdata
            witness = tensor.detach()
            witness.data = NOTHING
            result = self.results.get(key)
            handle = self._rebuildable(result, tensor, witness) if result is not None else None
            packed = self._packer.pack(tensor) if handle is None else (self._visit, handle)
            self._held[key] = Held(packed[1], tensor, witness)
            return packed
        finally:
            del guard

    def _rebuildable(self, result: Result, tensor: Tensor, witness: Tensor) -> RebuiltTensor | None:
        if tensor._version != result.version:
            return None
        rebuilt = result.rebuilt() if result.rebuilt is not None else None
        if rebuilt is None:
            handles = [handle for held in result.leaves() if (handle := held.handle()) and held.is_unchanged()]
            if len(handles) != sum(1 for _ in result.leaves()) or not is_cheap(result.cost, result.nbytes):
                return None
            self.rebuildable_bytes += result.nbytes
            if self._limit_bytes is not None and self.rebuilt_bytes >= self._limit_bytes:
                del self.results[tensor.untyped_storage()._cdata]  # from now on it is held, for every view
                return None
            self.rebuilt_bytes += result.nbytes
            rebuilt = Rebuilt(result, handles, tensor.untyped_storage(), self._ledger, self._num_threads)
            result.rebuilt = weakref.ref(rebuilt)
        visit = self._visit
        visit.saved = visit.needs_parameters = True
        return RebuiltTensor(rebuilt, tensor, witness, visit.segment)

    def _forget(self, written: Iterable[Tensor]) -> None:
        """Forgets what is known of the storages of `written`, because their values have changed."""
        for tensor in written:
            if has_storage(tensor):
                key = tensor.untyped_storage()._cdata
                if (result := self.results.pop(key, None)) is not None:
                    result.hold()
                if (held := self._held.pop(key, None)) is not None:
                    held.version = NEVER  # results not packed yet cannot be rebuilt from it any more

    def _note(
        self, operator: Operator, which: int | None, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor
    ) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        self.results.pop(key, None)
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() % TORCH_ALIGNMENT_BYTES or not is_plain(tensor):
            return
        seen = ReplayArguments(self)
        try:
            arguments = [seen.take(each) for each in args]
            keywords = {name: seen.take(each) for name, each in kwargs.items()}
        except NotHeld:
            return
        cost = total(tensor.nbytes, seen.operand_bytes, seen.costs)
        result = Result(operator, which, arguments, keywords, tensor, cost)
        if self._is_proven((operator, *seen.facts, result.layout), operator, which, args, kwargs, tensor):
            self.results[key] = result

    def _is_proven(
        self,
        facts: object,
        operator: Operator,
        which: int | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensor: Tensor,
    ) -> bool:
        try:
            known = self._proven.get(facts)
        except TypeError:  # a number without a hash: a symbol
            return False
        if known is None:
            again = chosen(operator(*args, **kwargs), which)
            if len(self._proven) >= MAX_PROVEN:
                self._proven.clear()
            known = self._proven[facts] = TensorLayout.of(again) == TensorLayout.of(tensor) and same_bytes(
                again, tensor
            )
        return known

    def operand(self, tensor: Tensor) -> tuple[Operand, list[Cost]]:
        """How backward will get `tensor`, and what that costs. Raises NotHeld if it will not have it."""
        if not is_plain(tensor):
            raise NotHeld
        if tensor.nbytes <= SMALL_BYTES and tensor.is_contiguous():
            return Copied(tensor.detach().clone()), []
        storage = tensor.untyped_storage()
        if storage.data_ptr() % TORCH_ALIGNMENT_BYTES:
            raise NotHeld
        key: int = storage._cdata
        layout = TensorLayout.of(tensor)
        held = self._held.get(key)
        if held is not None and held.holds(tensor):
            is_same = held.layout == layout
            handle = held.handle()
            if is_same or not isinstance(handle, SavedParameter):  # a parameter may have moved by then
                costs = [handle.cost] if isinstance(handle, RebuiltTensor) else []
                return Leaf(held, None if is_same else layout, checksum(tensor)), costs
        result = self.results.get(key)
        if result is None or tensor._version != result.version:
            raise NotHeld
        return NestedOperand(result, None if result.layout == layout else layout), [result.cost]


class ReplayArguments:
    """Converts the arguments of one call to what backward will have."""

    def __init__(self, recorder: OperatorTape) -> None:
        self._operand = recorder.operand
        self.facts: list[object] = []
        """Everything except the values of tensors: layouts and numbers."""
        self.operand_bytes: list[int] = []
        self.costs: list[Cost] = []

    def take(self, value: Any) -> object:
        if isinstance(value, Tensor):
            operand, costs = self._operand(value)
            self.facts.append(TensorLayout.of(value))
            self.operand_bytes.append(value.nbytes)
            self.costs += costs
            return operand
        if isinstance(value, list | tuple):
            self.facts.append(len(value))
            return [self.take(each) for each in value]
        self.facts.append((type(value), value))
        return value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def same_bytes(first: Tensor, second: Tensor) -> bool:
    whole = [
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage()) for each in (first, second)
    ]
    return torch.equal(*whole)


class Writes(NamedTuple):
    """The arguments that an operator writes into: by position, and by name."""

    places: tuple[int, ...]
    names: tuple[str, ...]

    def into(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        given = [args[place] for place in self.places if place < len(args)]
        return tensors_in([*given, *(kwargs[name] for name in self.names if name in kwargs)])


UNKNOWN, OTHER = object(), object()
KINDS: dict[Operator, Any] = dict(REPLAYABLE)
"""For every operator seen so far: the index of the result that can be rebuilt, or what it Writes, or OTHER."""


def kind_of(operator: Operator) -> object:
    if not operator._schema.is_mutable:
        return OTHER
    written = [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return Writes(tuple(place for place, _ in written), tuple(name for _, name in written))
