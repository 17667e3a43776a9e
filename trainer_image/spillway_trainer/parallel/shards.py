"""The optimizer of a sharded model: on each rank, a plain or offloaded optimizer of its shard.

The pieces are flat parts of parameters, which that optimizer treats as parameters of their own. So every placement of
states is possible here, too, and none can change a bit. A piece has as many dimensions as its parameter, because the
number of dimensions decides whether weights decay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from spillway.errors import UserError
from spillway.update_rules import MASTER, MomentType

from ..kernels.reference import SquareSum, widened
from ..models.chain import whole_shape
from ..optimizer.plain import GradientPart, Hyperparameters, StepOptimizer
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Lanes
from .deepspeed.layout import Layout
from .distributed import Peers


class PartOptimizer(StepOptimizer, Protocol):
    """The optimizer of one rank's pieces."""

    def square_sum(self) -> SquareSum:
        """Returns the sum whose root is `norm`."""


class DeviceTier(Protocol):
    """What a sharded model uses of the run's tiers (assemble.Tiers)."""

    @property
    def device(self) -> torch.device: ...
    @property
    def ledger(self) -> DeviceLedger: ...
    @property
    def lanes(self) -> Lanes: ...


class Division(Protocol):
    """How the model's parameters are sharded, and where they are. Implemented for DeepSpeed (adopted.py), FSDP2
    (fsdp.py) and whole parameters on CUDA devices (whole_parameters.py)."""

    @property
    def layout(self) -> Layout:
        """Every trained parameter, in declared order."""

    def complete(self) -> None:
        """Called when every rank's pieces have new values or are about to have them: brings them to the model's
        parameters."""

    def set(self, name: str, values: Tensor) -> None:
        """Sets the parameter (trained or not) to `values`, flat and whole, outside of training."""


def as_piece(values: Tensor, num_dimensions: int) -> Parameter:
    """Returns `values`, flat, as a parameter of its own that shares their memory and has `num_dimensions`
    dimensions."""
    return Parameter(values.detach().view(*[1] * (num_dimensions - 1), -1))


class ShardedOptimizer:
    """The optimizers of all ranks together, as the step loop sees them."""

    def __init__(
        self,
        own: PartOptimizer,
        division: Division,
        peers: Peers,
        parameters: Mapping[str, Parameter],
        settings: Hyperparameters,
        *,
        flushes: bool = True,
    ) -> None:
        """`flushes`: `step` returns when the update is complete; otherwise readers of a parameter call `wait` for it.
        Raises UserError for moments whose blocks would be split between pieces."""
        if settings.moments is MomentType.INT8:
            raise UserError(
                "spec.training.optimizer.moments = int8: 256 consecutive values of a parameter share a scale, but "
                "Zero1, Zero2, Zero3, Fsdp and DeepSpeed engines given to adopt() may put these values on different "
                "ranks; use Ddp, or moments: bfloat16"
            )
        self._own, self._division, self.peers = own, division, peers
        self._settings, self._flushes = settings, flushes
        self._parameters = parameters
        """The model's trained parameters, whole or sharded."""
        self._arrived: dict[str, None] = {}
        """The parameters with a gradient on any rank; the same on every rank."""

    def mark(self, name: str) -> None:
        """Records that a gradient of the parameter has arrived on every rank, whichever rank owns its pieces."""
        self._arrived[name] = None

    def take(self, name: str, gradient: Tensor) -> None:
        """Adds this rank's piece of one micro-batch's sum over ranks, flat float32."""
        self._own.take(name, gradient)

    def arrived(self) -> Collection[str]:
        return frozenset(self._arrived)

    def parts(self, names: Sequence[str]) -> Sequence[GradientPart]:
        """Returns no parts, because gradients are already sums over ranks."""
        return ()

    def norm(self) -> float:
        return self.peers.add(self._own.square_sum()).norm()

    def set(self, name: str, value: Tensor) -> None:
        """Sets a parameter that is not trained to its whole value, outside of training."""
        self._division.set(name, value)

    def begin(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """Does nothing: no update begins before `step`."""

    def wait(self, names: Sequence[str]) -> None:
        """Waits for this rank's pieces of these parameters; it has a piece of each."""
        if not self._flushes:
            self._own.wait(names)

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self._own.step(learning_rate, gradient_scale)
        if self._flushes:
            self._own.flush()
        self._division.complete()
        for parameter in self._parameters.values():
            increment_version(parameter)  # a backward of an earlier graph must raise an error
        self._arrived.clear()

    def skip(self) -> None:
        self._own.skip()
        self._arrived.clear()

    def flush(self) -> None:
        self._own.flush()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors, on every rank; every rank has to consume all of them."""
        own, rank = self._own.state(), self.peers.world.rank
        for state in self.state_shapes():
            kind, _, name = state.partition(".")
            sizes, dtype = [piece.size for piece in self._division.layout[name]], self._settings.state_dtype(kind)
            part = next(own)[1].reshape(-1) if sizes[rank] else torch.empty(0, dtype=dtype)
            joined = self.peers.joined(part.view(torch.uint8), [size * dtype.itemsize for size in sizes])
            yield state, joined.view(dtype).view(self.shape(name))

    def own_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's pieces of `state`, flat; a whole one has its own shape. Rank 0 has the empty ones."""
        own, rank = self._own.state(), self.peers.world.rank
        for state, shape in self.state_shapes().items():
            kind, _, name = state.partition(".")
            if size := self._division.layout[name][rank].size:
                yield state, next(own)[1].reshape(shape if size == shape.numel() else (-1,))
            elif not shape.numel() and rank == 0:
                yield state, torch.empty(shape, dtype=self._settings.state_dtype(kind))

    def own_ranges(self) -> dict[str, tuple[int, int]]:
        """Returns the range of values of each state, flattened, of which this rank has a piece."""
        rank, kinds = self.peers.world.rank, self._settings.rule.state_kinds
        own = {name: pieces[rank] for name, pieces in self._division.layout.items() if pieces[rank].size}
        return {f"{kind}.{name}": (piece.offset, piece.end) for name, piece in own.items() for kind in kinds}

    def load_pieces(self, pieces: Iterable[tuple[str, Tensor]]) -> None:
        """Sets this rank's pieces of all states (own_ranges). Every rank calls `complete` then."""
        for state, values in pieces:
            self._own.load(state, values)

    def complete(self) -> None:
        self._division.complete()

    def state_shapes(self) -> dict[str, torch.Size]:
        """Returns the names and shapes of `state`, in its order."""
        kinds = self._settings.rule.state_kinds
        return {f"{kind}.{name}": self.shape(name) for name in self._division.layout for kind in kinds}

    def load(self, name: str, value: Tensor) -> None:
        kind, _, parameter = name.partition(".")
        piece, flat = self._division.layout[parameter][self.peers.world.rank], value.reshape(-1)
        if piece.size:
            self._own.load(name, flat[piece.offset : piece.end])
        if kind == MASTER:
            self._division.set(parameter, flat)

    def own_states(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Returns parameter -> kind -> this rank's piece, flat float32, for the parameters of which it has a piece."""
        wanted, found = set(names), dict[str, dict[str, Tensor]]()
        for state, value in self._own.state():
            kind, _, name = state.partition(".")
            if name in wanted:
                found.setdefault(name, {})[kind] = widened(value.reshape(-1), kind)
        return found

    def load_own(self, kind: str, name: str, values: Tensor) -> None:
        """Sets this rank's piece of one state. A master also sets the piece of the parameter, rounded."""
        self._own.load(f"{kind}.{name}", values)

    def shape(self, name: str) -> torch.Size:
        return whole_shape(self._parameters[name])

    def scalars(self) -> dict[str, float]:
        return self._own.scalars()

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        self._own.load_scalars(scalars)

    def held_bytes(self) -> dict[str, int]:
        return self._own.held_bytes()


MakeOptimizer = Callable[[list[tuple[str, Parameter]]], PartOptimizer]
"""Named pieces -> their optimizer, which is given float32 gradients."""
