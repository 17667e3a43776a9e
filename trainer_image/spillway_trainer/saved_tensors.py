"""The one saved-tensor dispatcher: decides what is held for each tensor that autograd saves.

torch runs only the innermost pair of saved-tensor hooks, so there is one pair, and all techniques share it:

    a parameter or a view of it   a reference, resolved at backward by the ParameterSource
    recompute                     only the segment's inputs; its forward runs again at first need (RecomputedSegment)
    host, nvme                    a handle of the ActivationStore, when the tensor is large, floating and an activation
    everything else               the tensor itself, charged to the device once per storage

Two rules hold for all of them. The destructor of what `pack` returned is the only release, so a finished backward, a
dropped graph and an exception need no further signal. And because hooks switch autograd's version check off, each
handle repeats it: a tensor changed in place after it was saved raises at backward, as it would without hooks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from spillway.plan import Policy

from .resident_parameters import ParameterRef
from .segments import Block, device_of
from .tiers.cuda import generator
from .tiers.device_ledger import DeviceLedger


class Handle(Protocol):
    """Represents one saved tensor until backward."""

    def tensor(self) -> Tensor:
        """Returns the saved tensor, without autograd history; may be called again (retain_graph). Raises if its values
        have changed."""


class ParameterSource(Protocol):
    """Knows the model's parameters, and where they currently are."""

    addresses: Collection[int] | None
    """Addresses of the parameters' storages: a tensor with any other storage is no parameter. None: only `find` can
    tell."""

    def find(self, tensor: Tensor) -> ParameterRef | None: ...

    def resolve(self, ref: ParameterRef) -> Tensor: ...

    def enter_forward(self, segment: str) -> None:
        """The forward of `segment` runs next."""

    def enter_backward(self, segment: str) -> None:
        """Backward has reached `segment`."""

    def prefetch(self, segment: str) -> None:
        """`segment` will be needed soon."""


class SpilledHandle(Handle, Protocol):
    """A tensor that an ActivationStore has taken over."""

    def prefetch(self) -> None:
        """The tensor will be needed soon: submits its reload."""

    def unload(self) -> Callable[[], None]:
        """The compute lane is done with the tensor for now. Returns a function that submits its reload, if it is still
        held then."""


class ActivationBatch(Protocol):
    """Takes from one forward through one segment the tensors that an ActivationStore is to hold."""

    minimum_bytes: int
    """Smaller storages are not taken."""

    def put(self, tensor: Tensor, storage: UntypedStorage | None = None) -> SpilledHandle | KeptTensor | None:
        """Takes the tensor's storage over and queues it (no copy and no I/O yet); returns None if the tensor is better
        kept. `storage`: the tensor's own, if the caller already has it."""

    def flush(self) -> None:
        """The segment's forward is over: submits the copies of what was put."""

    def prefetch(self) -> None:
        """Backward will reach this segment soon: submits the reloads."""


class ActivationStore(Protocol):
    def open(self, segment: str, answer: Policy) -> ActivationBatch:
        """Opens a batch for one forward through `segment`; `answer` is HOST or NVME."""


def changed_in_place(segment: str, size: Sequence[int], saved: int, now: int) -> RuntimeError:
    """Returns the error that autograd raises without hooks."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(size)}, which {segment} saved for backward, is at version {now}; expected version "
        f"{saved} instead. Change a copy of the tensor (x * 2 instead of x.mul_(2))"
    )


class KeptTensor:
    """Holds the tensor itself, detached: a handle that held an output of its own graph would never be released."""

    __slots__ = ("__weakref__", "_charge", "_release", "_segment", "_tensor", "_version")

    def __init__(self, tensor: Tensor, segment: str, charge: int | None, release: Callable[[int], object]) -> None:
        """`charge`: the ledger's key for the tensor's storage, which `release` takes back; None without a storage."""
        self._charge = charge
        self._release = release
        self._segment = segment
        self._tensor = tensor.detach()
        self._version = tensor._version

    def tensor(self) -> Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            raise changed_in_place(self._segment, tensor.shape, self._version, tensor._version)
        return tensor

    def __del__(self) -> None:
        if self._charge is not None:
            self._release(self._charge)


def kept(tensor: Tensor, segment: str, ledger: DeviceLedger) -> KeptTensor:
    """Keeps `tensor`, and charges the ledger if it has a storage."""
    charge = ledger.charge_saved(tensor.untyped_storage()) if has_storage(tensor) else None
    return KeptTensor(tensor, segment, charge, ledger.release_saved)


class SavedParameter:
    """A reference to a parameter, which its source resolves."""

    __slots__ = ("__weakref__", "_ref", "_source")

    def __init__(self, source: ParameterSource, ref: ParameterRef) -> None:
        self._source = source
        self._ref = ref

    def tensor(self) -> Tensor:
        return self._source.resolve(self._ref)


class ForwardVisit:
    """One forward through one segment, and which visit backward reaches after it.

    That is the visit before it in the forward pass, unless the code that runs a step in another order sets another one.
    The first unpack of a visit is the signal to bring back what the next visit needs, so no module hooks are needed,
    and several graphs that are alive at once do not disturb one another.
    """

    __slots__ = ("__weakref__", "_parameters", "batch", "following", "needs_parameters", "saved", "segment", "unpacked")

    def __init__(
        self,
        segment: str,
        following: weakref.ref[ForwardVisit] | None,
        batch: ActivationBatch | None,
        parameters: ParameterSource,
    ) -> None:
        self.segment = segment
        self.following = following
        self.batch = batch
        self.saved = False
        self.needs_parameters = False
        """False for a segment such as an embedding, whose backward needs only its indices."""
        self.unpacked = False
        self._parameters = parameters

    def enter_backward(self) -> None:
        self.unpacked = True
        self.prefetch()
        if self.needs_parameters:
            self._parameters.enter_backward(self.segment)
        following = self.following() if self.following is not None else None
        if following is not None:
            following.prefetch()

    def prefetch(self) -> None:
        if self.needs_parameters:
            self._parameters.prefetch(self.segment)
        if self.batch is not None:
            self.batch.prefetch()


Packed = tuple[ForwardVisit, Handle]


def unpack(packed: Packed) -> Tensor:
    visit, handle = packed
    if not visit.unpacked:
        visit.enter_backward()
    return handle.tensor()


class Keeper:
    """Makes the handles that need no ActivationStore."""

    __slots__ = ("ledger", "parameters", "segment")

    def __init__(self, segment: str, parameters: ParameterSource, ledger: DeviceLedger) -> None:
        self.segment = segment
        self.parameters = parameters
        self.ledger = ledger

    def parameter(self, tensor: Tensor) -> Handle | None:
        """Returns a reference if `tensor` is a parameter or a view of one, else None."""
        ref = self.parameters.find(tensor) if has_storage(tensor) else None
        return None if ref is None else SavedParameter(self.parameters, ref)

    def keep(self, tensor: Tensor) -> Handle:
        return kept(tensor, self.segment, self.ledger)


PLAIN = frozenset({Tensor, nn.Parameter})
"""Types of tensors that may have a storage. Tensors of subclasses (distributed, quantised, nested) may have none and
are kept unchanged."""


def has_storage(tensor: Tensor) -> bool:
    """Whether `tensor` has a storage. Nested tensors have none, nor do the zeros that forward-mode differentiation
    leaves unallocated."""
    is_strided = type(tensor) in PLAIN and tensor.layout is torch.strided
    return is_strided and not (tensor.is_nested or tensor._is_zerotensor())


class RecomputedSegment:
    """A segment whose saved tensors are recomputed: its inputs, and how to run it again.

    The second run has the grad mode and the autocast state of the first run and, because a segment's wrapper forks it,
    its random state. The random state around the second run is restored, so that recomputing leaves no trace in the
    run.
    """

    __slots__ = ("_autocast", "_block", "_device", "_inputs", "_keeper", "_saved", "_values")

    def __init__(self, keeper: Keeper, block: Block, inputs: Sequence[object], batch: ActivationBatch | None) -> None:
        self._keeper = keeper
        self._block = block
        self._inputs = [_Input(value, keeper, batch) if isinstance(value, Tensor) else value for value in inputs]
        self._device = device_of(inputs)
        kind = self._device.type
        self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._values: list[Handle] | None = None

    def reserve(self, tensor: Tensor) -> Handle:
        """Returns a handle for the next tensor that the first run saves."""
        self._saved.append((tensor.shape, tensor.dtype))
        # The reference holds the parameter's version now: the second run could not tell that it changed in between.
        return self._keeper.parameter(tensor) or RecomputedTensor(self, len(self._saved) - 1)

    def tensor(self, index: int) -> Tensor:
        if self._values is None:
            self._values = self._run_again()
        return self._values[index].tensor()

    def _run_again(self) -> list[Handle]:
        values: list[Handle] = []
        found: list[tuple[torch.Size, torch.dtype]] = []

        def capture(tensor: Tensor) -> None:
            found.append((tensor.shape, tensor.dtype))
            values.append(self._keeper.parameter(tensor) or self._keeper.keep(tensor))

        enabled, dtype = self._autocast
        random_numbers = generator(self._device)
        random_state = random_numbers.get_state()
        try:
            inputs = [value.restore() if isinstance(value, _Input) else value for value in self._inputs]
            with (
                torch.enable_grad(),
                torch.autocast(self._device.type, dtype=dtype, enabled=enabled),
                saved_tensors_hooks(capture, _never_unpacked),
            ):
                self._block(*inputs)
        finally:
            random_numbers.set_state(random_state)
        if found != self._saved:
            raise RuntimeError(
                f"segment {self._keeper.segment} (a group of layers): its forward saved {len(self._saved)} "
                f"tensors, but saved {len(found)} or different ones when it was recomputed in backward. Make the "
                "forward do the same operations each time, with random numbers only from torch's generator, or set "
                "spec.memory.advanced.activations.policy: Keep."
            )
        return values


class _Input:
    """A tensor argument of a recomputed segment. In the second run it is a leaf, at which that run's graph ends."""

    __slots__ = ("_handle", "_requires_grad")

    def __init__(self, tensor: Tensor, keeper: Keeper, batch: ActivationBatch | None) -> None:
        """Puts the tensor into `batch` if there is one. A tensor without gradient belongs to the caller, and stays."""
        moves = batch is not None and tensor.requires_grad and has_storage(tensor)
        self._handle: Handle = (batch.put(tensor) if batch is not None and moves else None) or keeper.keep(tensor)
        self._requires_grad = tensor.requires_grad

    def restore(self) -> Tensor:
        return self._handle.tensor().detach().requires_grad_(self._requires_grad)


class RecomputedTensor:
    """One of the tensors that a recomputed segment saves."""

    __slots__ = ("_frame", "_index")

    def __init__(self, frame: RecomputedSegment, index: int) -> None:
        self._frame = frame
        self._index = index

    def tensor(self) -> Tensor:
        return self._frame.tensor(self._index)


def _never_unpacked(_: None) -> Tensor:
    raise RuntimeError(
        "a segment (group of layers) that is recomputed in backward computes gradients inside its own forward (for "
        "example a gradient penalty), which recomputation does not support. Set "
        "spec.memory.advanced.activations.policy: Keep."
    )


def _nothing_moves(tensor: Tensor, storage: UntypedStorage) -> None:
    """Stands in for a batch's `put` if there is no batch."""


class Packer:
    """The pack hook of one visit."""

    __slots__ = (
        "_addresses",
        "_charge",
        "_constants",
        "_find",
        "_frame",
        "_keeper",
        "_moves_from_bytes",
        "_parameters",
        "_put",
        "_release",
        "_segment",
        "_visit",
    )

    def __init__(
        self, visit: ForwardVisit, keeper: Keeper, inputs: Sequence[object], frame: RecomputedSegment | None
    ) -> None:
        self._visit, self._segment = visit, visit.segment
        self._moves_from_bytes = math.inf if visit.batch is None else visit.batch.minimum_bytes
        self._put = _nothing_moves if visit.batch is None else visit.batch.put
        self._keeper = keeper
        self._parameters = keeper.parameters
        self._charge, self._release = keeper.ledger.charge_saved, keeper.ledger.release_saved
        self._addresses, self._find = keeper.parameters.addresses, keeper.parameters.find
        self._frame = frame
        # Inputs without gradient (position tables, masks, labels) belong to the caller and stay where they are.
        self._constants = frozenset(
            value.untyped_storage()._cdata
            for value in inputs
            if isinstance(value, Tensor) and not value.requires_grad and has_storage(value)
        )

    def pack(self, tensor: Tensor) -> Packed:
        # Called about 40 times per block, on the thread that launches compute: so torch is asked for each fact once.
        visit = self._visit
        if not visit.needs_parameters:
            visit.saved = True
            visit.needs_parameters = tensor.is_floating_point() or tensor.is_complex()
        if self._frame is not None:
            return visit, self._frame.reserve(tensor)
        if not has_storage(tensor):
            return visit, self._keeper.keep(tensor)
        storage = tensor.untyped_storage()  # held: torch returns the same object again as long as one exists
        addresses = self._addresses
        if addresses is None or storage.data_ptr() in addresses:
            ref = self._find(tensor)
            if ref is not None:
                return visit, SavedParameter(self._parameters, ref)
        if storage.nbytes() >= self._moves_from_bytes and storage._cdata not in self._constants:
            handle = self._put(tensor, storage)
            if handle is not None:
                return visit, handle
        return visit, KeptTensor(tensor, self._segment, self._charge(storage), self._release)


class Recording(Protocol):
    """Surrounds one forward. Its pack hook replaces the Packer's, because it rebuilds some of the saved tensors."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> object: ...

    def pack(self, tensor: Tensor) -> Packed: ...


Record = Callable[[Packer, ForwardVisit], Recording]


class SavedTensors:
    """The SegmentHook: applies each segment's answer, refers to parameters, and gives activations to the store."""

    def __init__(
        self,
        answers: Mapping[str, Policy],
        parameters: ParameterSource,
        store: ActivationStore,
        ledger: DeviceLedger,
        inputs: Policy = Policy.KEEP,
        lean: Collection[str] = (),
        record: Record | None = None,
    ) -> None:
        """`inputs`: where the inputs of a recomputed segment wait for its second run (keep, host or nvme). `lean`:
        segments whose forwards `record` surrounds."""
        self._answers = answers
        self._inputs = inputs
        self._parameters = parameters
        self._store = store
        self._ledger = ledger
        self._lean, self._record = frozenset(lean), record
        self._last: weakref.ref[ForwardVisit] | None = None
        self.last_visit: weakref.ref[ForwardVisit] | None = None
        """Visit of the last `run`; None if it saved nothing, so that backward never reaches it."""

    def run(self, segment: str, block: Block, *inputs: object) -> Tensor:
        """Runs one forward of `block`, and packs what it saves by the segment's answer."""
        answer = self._answers[segment]
        recomputes = answer is Policy.RECOMPUTE
        moves_to = self._inputs if recomputes else answer
        batch = self._store.open(segment, moves_to) if moves_to in (Policy.HOST, Policy.NVME) else None
        self._parameters.enter_forward(segment)
        visit = ForwardVisit(segment, self._last, batch, self._parameters)
        keeper = Keeper(segment, self._parameters, self._ledger)
        frame = RecomputedSegment(keeper, block, inputs, batch) if recomputes else None
        packer = Packer(visit, keeper, inputs, frame)
        if self._record is not None and segment in self._lean and torch.is_grad_enabled():
            with self._record(packer, visit) as recording, saved_tensors_hooks(recording.pack, unpack):
                output = block(*inputs)
        else:
            with saved_tensors_hooks(packer.pack, unpack):
                output = block(*inputs)
        if batch is not None:
            batch.flush()
        self.last_visit = weakref.ref(visit) if visit.saved else None
        if self.last_visit is not None:  # else backward never reaches this visit, and the chain skips it
            self._last = self.last_visit
        return output

    def start_backward(self) -> None:
        """The forward pass is complete: the next one begins a chain of visits of its own."""
        self._last = None
