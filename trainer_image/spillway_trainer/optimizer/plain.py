"""The optimizer interface of the step loop, and its plain form: all states on the device, one parameter at a time.

    begin, wait (per segment, before its forward), take (per gradient, during backward) ... -> parts -> norm -> step
                                                             or, when the norm is not finite, -> skip
    flush, before anything but the next forward reads parameters or states

`ResidentOptimizer` is what `memory.mode: Disabled` runs, and what every placement is compared with, bit for bit. Its
arithmetic is that of reference.py; the number of updates belongs to the optimizer, not to a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from spillway.parameter_groups import Group
from spillway.plan import Tier
from spillway.update_rules import MASTER, MomentType, UpdateRule

from ..kernels import dispatch as kernels
from ..kernels.reference import SquareSum, UpdateScalars, kept_elements, narrowed, quiet
from ..tiers.device_ledger import DeviceLedger
from ..tiers.lanes import Event, Region
from .trainable import Trainable, check_gradient, flat, master_values


class Update(Protocol):
    """The signature of reference.update: flat tensors, updated in place. Only speculation asks for the new states in
    other tensors (`after`)."""

    def __call__(
        self,
        scalars: UpdateScalars,
        master: Tensor,
        moments: Sequence[Tensor],
        gradient: Tensor,
        out: Tensor | None,
        /,
        *,
        after: Sequence[Tensor] | None = None,
    ) -> None: ...


FLOAT32_BYTES = 4
MOMENT_DTYPES = {
    MomentType.FLOAT32: torch.float32,
    MomentType.BFLOAT16: torch.bfloat16,
    MomentType.INT8: torch.uint8,
}
"""Types of the tensors that hold moments; uint8: the bytes of reference.quantized, so more elements than values."""
NO_GROUP = Group("")
"""Settings of a parameter that is in no group."""


class GradientPart(Protocol):
    """The float32 sum over a rank's micro-batches of the gradients of a part of one use of a parameter. Its receiver
    may change it in place."""

    settled: tuple[Event, ...]
    """Complete when everything submitted so far is in `values`; whoever submits a change replaces it."""

    @property
    def values(self) -> Tensor:
        """The sum, flat."""

    @property
    def memory(self) -> Region: ...


@dataclass(slots=True)
class WholeSum:
    """The GradientPart of a whole parameter. No asynchronous operation changes it."""

    values: Tensor
    memory: Region
    settled: tuple[Event, ...] = ()


class StepOptimizer(Protocol):
    """The optimizer as the step loop uses it. Parameters are named as in the model; `take` is called from the
    post-accumulate hook of a parameter."""

    def begin(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """Announces a step: its update, if there is one, will have this learning rate, and this factor unless it is
        clipped. Optional: for optimizers that update before `step` is called."""

    def wait(self, names: Sequence[str]) -> None:
        """Makes the compute lane, which is about to read these parameters, wait for their updates. Raises the error of
        an update that failed."""

    def take(self, name: str, gradient: Tensor) -> None:
        """Adds one micro-batch's gradient. The caller drops `p.grad` afterwards and never touches `gradient` again."""

    def arrived(self) -> Collection[str]:
        """The uses of parameters (a tied alias is a use) for which `take` has received a gradient in this step."""

    def parts(self, names: Sequence[str]) -> Sequence[GradientPart]:
        """The step's sums of these uses, which have arrived, for a caller that adds those of other ranks: all parts of
        the first use, then of the next. Called before `norm`."""

    def norm(self) -> float:
        """Order-free norm of the step's gradients, after waiting for them. nan if one of them is not finite."""

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        """Starts the update of every parameter that has received a gradient. Whoever reads a parameter calls `wait` or
        `flush` first."""

    def skip(self) -> None:
        """Drops the step's gradients; states, parameters and the number of updates stay as they are."""

    def flush(self) -> None:
        """Returns when every update is done and visible in the parameters."""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Canonical state, the same for every plan: "<kind>.<name>" for the kinds of the rule ("master.<name>" first),
        copies in the parameter's shape (quantized ones flat). Masters are float32, moments have the type in which they
        are stored; aliases are absent. Flushes first."""

    def load(self, name: str, value: Tensor) -> None:
        """Sets one entry of `state`. A moment may also be given in float32; it is then narrowed to the type in which it
        is stored. A master also sets the parameter, rounded to its dtype, and its NaNs become the declared one
        (reference.py)."""

    def scalars(self) -> dict[str, float]: ...

    def load_scalars(self, scalars: Mapping[str, float]) -> None: ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes of states, accumulators and buffers, per tier."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Settings that do not change from step to step; a rule reads those that it has. Vectors (dim < 2) do not decay,
    unless their group says so."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    rule: UpdateRule = UpdateRule.ADAMW
    moments: MomentType = MomentType.FLOAT32
    groups: Mapping[str, Group] = field(default_factory=dict)
    """By parameter: the groups of those with their own learning rate or decay."""

    def state_dtype(self, kind: str) -> torch.dtype:
        return torch.float32 if kind == MASTER else MOMENT_DTYPES[self.moments]

    def state_elements(self, kind: str, num_values: int) -> int:
        """Elements of state_dtype in the state of a parameter of `num_values`, or of a part of one that begins at a
        block."""
        return kept_elements(num_values, self.state_dtype(kind))

    def state_shape(self, kind: str, shape: torch.Size) -> tuple[int, ...]:
        """The shape of a parameter's state as `StepOptimizer.state` gives it."""
        quantized = self.state_dtype(kind) == torch.uint8
        return (self.state_elements(kind, shape.numel()),) if quantized else tuple(shape)


@dataclass(slots=True)
class UpdateCount:
    """The number of updates done and, for a rule that corrects bias, beta^t as a repeated fp64 product. Stored in the
    checkpoint, so that a resumed run repeats the same bits."""

    settings: Hyperparameters
    num_updates: int = 0
    powers: dict[str, float] = field(init=False)
    """beta1^t and beta2^t, by the names of UpdateScalars; empty without correction."""

    def __post_init__(self) -> None:
        self.powers = {"beta1_power": 1.0, "beta2_power": 1.0} if self.settings.rule.corrects_bias else {}

    def advance(self) -> None:
        self.num_updates += 1
        betas = {"beta1_power": self.settings.beta1, "beta2_power": self.settings.beta2}
        for name in self.powers:
            self.powers[name] *= betas[name]

    def following(self) -> UpdateCount:
        """The count after one more update."""
        found = UpdateCount(self.settings)
        found.load(self.as_dict())
        found.advance()
        return found

    def scalars(self, name: str, parameter: Parameter, learning_rate: float, gradient_scale: float) -> UpdateScalars:
        """Scalars of the current update of one parameter, after `advance`."""
        s, group = self.settings, self.settings.groups.get(name, NO_GROUP)
        weight_decay = s.weight_decay if parameter.dim() >= 2 else 0.0
        if group.weight_decay is not None:
            weight_decay = group.weight_decay
        return UpdateScalars(
            learning_rate=learning_rate * group.learning_rate_factor,
            beta1=s.beta1,
            beta2=s.beta2,
            eps=s.eps,
            weight_decay=weight_decay,
            gradient_scale=gradient_scale,
            momentum=s.momentum,
            rule=s.rule,
            **self.powers,
        )

    def as_dict(self) -> dict[str, float]:
        return {"num_updates": float(self.num_updates), **self.powers}

    def load(self, scalars: Mapping[str, float]) -> None:
        self.num_updates = int(scalars["num_updates"])
        self.powers = {name: scalars[name] for name in self.powers}


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """One parameter's or chunk's states, flat. `master` is float32; it is the parameter's memory if the parameter is
    its own master."""

    master: Tensor
    """If the parameter has its upper half: only the rest, uint8 (master_halves.py)."""
    moments: tuple[Tensor, ...]
    """In the rule's order of moments, in the type in which they are stored."""

    def of(self, rule: UpdateRule, kind: str) -> Tensor:
        """The state of this `kind`, one of rule.state_kinds."""
        return (self.master, *self.moments)[rule.state_kinds.index(kind)]


class ResidentOptimizer:
    """Masters, moments and float32 accumulators on the device, charged to its ledger.

    On a CPU the first float32 gradient of a step becomes its accumulator: nothing is copied, and before backward there
    is no accumulator.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        tied: Mapping[str, str],
        settings: Hyperparameters,
        ledger: DeviceLedger,
        update: Update = kernels.update,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """`gradient_dtype`: the dtype of gradients; None: that of their parameter."""
        self._trainable = Trainable.of(parameters, tied)
        self._gradient_dtype = gradient_dtype
        self._count, self._rule, self._settings = UpdateCount(settings), settings.rule, settings
        self._update = update
        self._states_bytes = sum(_states_bytes(p, settings) for p in self._trainable.parameters.values())
        ledger.charge("optimizer_states", self._states_bytes)
        self._states = {name: _new_states(p, settings) for name, p in self._trainable.parameters.items()}
        uses = [*self._trainable.parameters, *self._trainable.tied]
        owners = {name: self._trainable.parameters[self._trainable.owner(name)] for name in uses}
        self._accumulator_bytes = FLOAT32_BYTES * sum(owner.numel() for owner in owners.values())
        ledger.charge("gradients", self._accumulator_bytes)
        self._adopted = {
            name
            for name, owner in owners.items()
            # Sharded models, which set `gradient_dtype`, pass pieces of their own buffers.
            if gradient_dtype is None and owner.device.type == "cpu" and owner.dtype == torch.float32
        }
        """Uses whose first gradient becomes the accumulator."""
        self._accumulators = {
            name: torch.empty(owner.numel(), dtype=torch.float32, device=owner.device)
            for name, owner in owners.items()
            if name not in self._adopted
        }
        self._arrived: set[str] = set()

    def begin(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """Nothing to do: nothing is updated before `step`."""

    def wait(self, names: Sequence[str]) -> None:
        """Nothing to do: `step` returns when every update is done."""

    def take(self, name: str, gradient: Tensor) -> None:
        parameter = self._trainable.parameters[self._trainable.owner(name)]
        flat_gradient = check_gradient(name, parameter, gradient, self._gradient_dtype)
        self._add(name, flat_gradient)

    def arrived(self) -> Collection[str]:
        return frozenset(self._arrived)

    def parts(self, names: Sequence[str]) -> Sequence[GradientPart]:
        sums = ((name, self._accumulators[name]) for name in names)
        return [WholeSum(values, Region(values.nbytes, f"gradient of {name}")) for name, values in sums]

    def norm(self) -> float:
        return self.square_sum().norm()

    def square_sum(self) -> SquareSum:
        self._sum_tied_uses()
        names = [name for name in self._trainable.parameters if name in self._arrived]
        return kernels.finish_square_sums([kernels.begin_square_sum(self._accumulators[name]) for name in names])

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self._sum_tied_uses()
        self._count.advance()
        for name, parameter in self._trainable.parameters.items():
            if name not in self._arrived:  # no gradient: no decay and no moment update either, as in torch.optim
                continue
            states = self._states[name]
            scalars = self._count.scalars(name, parameter, learning_rate, gradient_scale)
            out = None if parameter.dtype == torch.float32 else flat(parameter)
            self._update(scalars, states.master, states.moments, self._accumulators[name], out)
            increment_version(parameter)  # backward of a graph from before this step must raise
        self.skip()

    def skip(self) -> None:
        for name in self._adopted:
            self._accumulators.pop(name, None)
        self._arrived.clear()

    def flush(self) -> None:
        """Nothing to do: nothing is ever in flight."""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trainable.parameters.items():
            for kind in self._rule.state_kinds:
                state = shaped(self._states[name].of(self._rule, kind), parameter.shape)
                yield f"{kind}.{name}", state.to("cpu", copy=True)

    def load(self, name: str, value: Tensor) -> None:
        kind, _, parameter_name = name.partition(".")
        states = self._states[parameter_name]
        held = states.of(self._rule, kind)
        held.copy_(as_loaded(value, kind, self._settings))
        parameter = self._trainable.parameters[parameter_name]
        if kind == MASTER and parameter.dtype != torch.float32:
            flat(parameter).copy_(master_values(states.master, parameter.dtype))

    def scalars(self) -> dict[str, float]:
        return self._count.as_dict()

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        self._count.load(scalars)

    def held_bytes(self) -> dict[str, int]:
        return {Tier.DEVICE.value: self._states_bytes + self._accumulator_bytes, Tier.HOST.value: 0}

    def _sum_tied_uses(self) -> None:
        """accumulator[owner] += accumulator[alias], in declared order; an alias counts once."""
        for alias, owner in self._trainable.tied.items():
            if alias in self._arrived:
                self._add(owner, self._accumulators[alias])
                self._arrived.remove(alias)

    def _add(self, name: str, gradient: Tensor) -> None:
        first = name not in self._arrived
        if first and name in self._adopted:
            self._accumulators[name] = gradient
        else:
            kernels.accumulate(self._accumulators[name], gradient, first)
        self._arrived.add(name)


def as_loaded(value: Tensor, kind: str, settings: Hyperparameters) -> Tensor:
    """A state that `StepOptimizer.load` is given, flat and in the type in which it is stored; a master's NaNs become
    the declared one."""
    values = in_dtype(value.reshape(-1), settings.state_dtype(kind), kind)
    return quiet(values) if kind == MASTER and bool(values.isnan().any()) else values


def in_dtype(value: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    """A state that `StepOptimizer.load` is given, in the type in which it is stored."""
    return value if value.dtype == dtype else narrowed(value.float(), dtype, kind)


def shaped(state: Tensor, shape: torch.Size) -> Tensor:
    """A flat state in the shape in which `StepOptimizer.state` gives it; quantized ones stay flat bytes."""
    return state if state.dtype == torch.uint8 else state.view(shape)


def _states_bytes(parameter: Parameter, settings: Hyperparameters) -> int:
    """Bytes of a parameter's states. With float32 compute the parameter is its own master."""
    n, has_master = parameter.numel(), parameter.dtype != torch.float32
    return FLOAT32_BYTES * n * has_master + settings.moments.bytes_of(n) * len(settings.rule.moments)


def _new_states(parameter: Parameter, settings: Hyperparameters) -> OptimizerStates:
    master = flat(parameter) if parameter.dtype == torch.float32 else flat(parameter).float()
    n, dtypes = master.numel(), {kind: settings.state_dtype(kind) for kind in settings.rule.moments}
    zeros = (torch.zeros(kept_elements(n, dtype), dtype=dtype, device=master.device) for dtype in dtypes.values())
    return OptimizerStates(master, tuple(zeros))
