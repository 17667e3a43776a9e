"""Adopts DeepSpeed's ZeRO optimizers after DeepSpeed has sharded the model.

`adopt` gives the engine's optimizer a class of ours (hooks and engine call its methods) and frees DeepSpeed's float32
states. From then on

    gradients   go to ReducedGradients as soon as autograd has them
    the update  is that of ShardedOptimizer, with states where the plan puts them
    parameters  are gathered by DeepSpeed as before
    states      DeepSpeed's own tensors have values only while they are used: its checkpoints are written from and read
                into them (`published`), its accessors (safe_get_full_fp32_param ...) get copies
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.nn import Parameter

from spillway.errors import UserError
from spillway.update_rules import MASTER, UpdateRule

from ...models.chain import whole_shape
from ...optimizer.plain import Hyperparameters
from ...optimizer.trainable import flat, master_values
from ...ranks import World
from ...tiers.device_ledger import DeviceLedger
from ...trainer import clip_factor_of
from ..distributed import Peers
from ..reduced_gradients import ReducedGradients
from ..shards import MakeOptimizer, ShardedOptimizer, as_piece
from .layout import Layout, ShardPiece, cut_evenly, cut_group
from .support import check_engine, check_settings

Engine = Any
"""deepspeed.DeepSpeedEngine, which has no types."""
MOMENTS = UpdateRule.ADAMW.moments


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """Where this rank's piece of a parameter lies in DeepSpeed's own flat float32 tensors."""

    group: int
    """Index in `flats`."""
    offset: int


def adopt(
    engine: Engine,
    world: World,
    make: MakeOptimizer,
    ledger: DeviceLedger,
    wire: torch.dtype = torch.float32,
    num_threads: int = 1,
    settings: Hyperparameters | None = None,
) -> ShardedOptimizer:
    """Makes `engine`, including `engine.step()`, update with the optimizer that `make` builds of this rank's pieces.
    Every rank calls it, before the first forward. `settings`: those of `make`'s optimizer; if absent, the defaults
    (AdamW with float32 moments).

    Raises UserError for an engine outside the support matrix, and for one whose AdamW has other settings.
    """
    check_engine(engine)
    settings = settings or Hyperparameters()
    check_settings(engine, settings)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    weights = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    found = _of_stage_3(optimizer, names, world) if weights else _of_stages_1_and_2(optimizer, names, world)
    peers = Peers(world)
    own = make([(name, as_piece(*piece)) for name, piece in found.pieces.items()])
    sharded = ShardedOptimizer(own, found, peers, found.parameters, settings)

    def take(name: str, values: Tensor) -> None:
        sharded.take(name, values.view(-1))

    reduced = ReducedGradients(found.layout, peers, wire, ledger, take, num_threads)
    average = 1.0 / world.size if engine.gradient_average else 1.0
    optimizer.spillway = Adoption(sharded, reduced, found, world, average, names)
    optimizer.__class__ = AdoptedStage3 if weights else AdoptedStages1And2
    optimizer.forget_states()
    return sharded


@dataclass(frozen=True, slots=True)
class Divided:
    """A model as DeepSpeed has sharded it. Implements shards.Division."""

    layout: Layout
    parameters: Mapping[str, Parameter]
    """Every trained parameter, in declared order."""
    pieces: Mapping[str, tuple[Tensor, int]]
    """This rank's pieces: flat values in DeepSpeed's memory, and the number of dimensions (2 or 1) with which our
    optimizer decays them, or does not, like their group in DeepSpeed's optimizer."""
    places: Mapping[str, FlatPlace]
    """The places of these pieces."""
    flat_sizes: Sequence[int]
    """Sizes of DeepSpeed's own float32 tensors, including padding."""
    complete_parameters: Callable[[], None]
    is_whole: bool
    """Whether every rank has whole parameters."""

    def complete(self) -> None:
        self.complete_parameters()

    def set(self, name: str, values: Tensor) -> None:
        """Sets whole parameters only: ZeRO-3 has only pieces, which are set with their masters."""
        if self.is_whole:
            parameter = self.parameters[name]
            flat(parameter).copy_(master_values(values.float(), parameter.dtype))


def _of_stages_1_and_2(optimizer: Any, names: Mapping[int, str], world: World) -> Divided:
    layout: dict[str, Sequence[ShardPiece]] = {}
    parameters, pieces, places = dict[str, Parameter](), dict[str, tuple[Tensor, int]](), dict[str, FlatPlace]()
    for group, (members, offsets) in enumerate(
        zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
    ):
        size = int(optimizer.partition_size[group])
        starts = {names[id(p)]: (int(offset), p.numel()) for p, offset in zip(members, offsets, strict=True)}
        cut = cut_group(starts, size, world.size)
        layout |= cut
        decays = optimizer.optimizer.param_groups[group].get("weight_decay", 0.0) != 0.0
        for parameter in members:
            name = names[id(parameter)]
            parameters[name], own = parameter, cut[name][world.rank]
            if own.size:
                start = starts[name][0] + own.offset
                values = optimizer.bit16_groups_flat[group].narrow(0, start, own.size)
                pieces[name] = values, 2 if decays else 1
                places[name] = FlatPlace(group, start - world.rank * size)

    def complete() -> None:
        for group, whole in enumerate(optimizer.bit16_groups_flat):
            Peers(world).complete(whole, optimizer.parallel_partitioned_bit16_groups[group][world.rank])()

    sizes = [int(size) for size in optimizer.partition_size]
    return _in_declared_order(Divided(layout, parameters, pieces, places, sizes, complete, is_whole=True), names)


def _of_stage_3(optimizer: Any, names: Mapping[int, str], world: World) -> Divided:
    layout: dict[str, Sequence[ShardPiece]] = {}
    parameters, pieces, places = dict[str, Parameter](), dict[str, tuple[Tensor, int]](), dict[str, FlatPlace]()
    for group, members in enumerate(optimizer.fp16_groups):
        settings = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[group]]
        decays = settings.get("weight_decay", 0.0) != 0.0
        for parameter in members:
            name = names[id(parameter)]
            parameters[name], layout[name] = parameter, cut_evenly(parameter.ds_numel, world.size)
            own = layout[name][world.rank]
            if own.size:
                pieces[name] = parameter.ds_tensor.narrow(0, 0, own.size), 2 if decays else 1
                places[name] = FlatPlace(group, int(optimizer.grad_position[optimizer.get_param_id(parameter)][1]))

    def complete() -> None:
        optimizer._post_step(set())

    sizes = [int(size) for size in optimizer.fp16_partitioned_groups_flat_numel]
    return _in_declared_order(Divided(layout, parameters, pieces, places, sizes, complete, is_whole=False), names)


def _in_declared_order(divided: Divided, names: Mapping[int, str]) -> Divided:
    """Returns `divided` in the order of the model, in which states are written and the parts' optimizers work."""
    order = [name for name in names.values() if name in divided.layout]
    return Divided(
        {name: divided.layout[name] for name in order},
        {name: divided.parameters[name] for name in order},
        {name: divided.pieces[name] for name in order if name in divided.pieces},
        divided.places,
        divided.flat_sizes,
        divided.complete_parameters,
        divided.is_whole,
    )


@dataclass(frozen=True, slots=True)
class Adoption:
    """The objects with which an adopted optimizer works."""

    sharded: ShardedOptimizer
    reduced: ReducedGradients
    divided: Divided
    world: World
    average: float
    """Factor by which engine.step() multiplies sums over ranks."""

    names: Mapping[int, str]
    """Names by the id of their parameter."""

    def take(self, parameter: Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            name = self.names[id(parameter)]
            self.reduced.take(name, gradient)
            self.sharded.mark(name)

    def flats(self) -> list[dict[str, Tensor]]:
        """Returns this rank's states in DeepSpeed's layout, one entry per group: kind -> flat tensor, padded with 0."""
        found = [{kind: torch.zeros(size) for kind in (MASTER, *MOMENTS)} for size in self.divided.flat_sizes]
        for name, states in self.sharded.own_states(self.divided.places).items():
            place = self.divided.places[name]
            for kind, values in states.items():
                found[place.group][kind][place.offset : place.offset + values.numel()].copy_(values)
        return found

    def load_flats(self, flats: Sequence[Mapping[str, Tensor]]) -> None:
        rank = self.world.rank
        for name, place in self.divided.places.items():
            size = self.divided.layout[name][rank].size
            for kind, values in flats[place.group].items():
                self.sharded.load_own(kind, name, values[place.offset : place.offset + size])

    def own(self, name: str, kind: str) -> Tensor:
        """Returns this rank's piece; empty if it has none."""
        states = self.sharded.own_states([name])
        return states[name][kind] if name in states else torch.empty(0)

    def full(self, parameter: Parameter, key: str | None) -> Tensor:
        """Returns one whole state, on every rank; every rank has to call it."""
        name, kind = self.names[id(parameter)], _kind(key)
        sizes = [piece.size for piece in self.divided.layout[name]]
        joined = Peers(self.world).joined(self.own(name, kind), sizes)
        return joined.view(whole_shape(parameter))

    def own_padded(self, parameter: Parameter, key: str | None) -> Tensor:
        """Returns this rank's piece of one state, padded to the length of the longest piece, as ZeRO-3 has it."""
        name = self.names[id(parameter)]
        own = self.own(name, _kind(key))
        padded = torch.zeros(max(piece.size for piece in self.divided.layout[name]))
        padded[: own.numel()].copy_(own)
        return padded

    def set_own(self, parameter: Parameter, value: Tensor, key: str | None) -> None:
        name = self.names[id(parameter)]
        size = self.divided.layout[name][self.world.rank].size
        if size:
            self.sharded.load_own(_kind(key), name, value.detach().reshape(-1)[:size].float())

    def set_full(self, parameter: Parameter, value: Tensor, key: str | None) -> None:
        name = self.names[id(parameter)]
        piece = self.divided.layout[name][self.world.rank]
        if piece.size:
            values = value.detach().reshape(-1)[piece.offset : piece.end]
            self.sharded.load_own(_kind(key), name, values.float())

    def step(self, learning_rate: float, clip_grad: float) -> float:
        """Performs the update. Returns the norm of the averaged gradients; if it is not finite, nothing was updated."""
        norm = self.sharded.norm() * self.average
        if math.isfinite(norm):
            scale = clip_factor_of(norm, clip_grad or None)
            self.sharded.step(learning_rate, scale * self.average)
        else:
            self.sharded.skip()
        return norm


def _kind(key: str | None) -> str:
    """Translates DeepSpeed's name of a state, where None is the float32 parameter. Raises UserError."""
    if key not in (None, *MOMENTS):
        raise UserError(
            f"optimizer state {key}: unknown; a DeepSpeed engine given to Spillway's adopt() has only the states "
            f"{', '.join(MOMENTS)}"
        )
    return key or MASTER


MOVED_BY_PLAN = (
    "offload_states, reload_states: Spillway's plan decides where an adopted engine's states are; do not call these"
)


class Adopted:
    """The methods that we give to both of DeepSpeed's classes, which come after this class in the method resolution
    order."""

    spillway: Adoption
    optimizer: torch.optim.Optimizer
    clip_grad: float
    overflow: bool
    _global_grad_norm: float

    def step(self, closure: object = None) -> None:
        """Called by engine.step() at the end of an accumulation."""
        rates = {group["lr"] for group in self.optimizer.param_groups}
        if len(rates) != 1:
            raise UserError(
                f"DeepSpeed's parameter groups have learning rates {sorted(rates)}, but an engine given to "
                "Spillway's adopt() supports only one; set the same learning rate in all groups"
            )
        self.before_update()
        self._global_grad_norm = self.spillway.step(float(rates.pop()), self.clip_grad)
        self.overflow = not math.isfinite(self._global_grad_norm)

    def before_update(self) -> None:
        """Does nothing where every rank has whole parameters."""

    def finish(self) -> None:
        self.spillway.reduced.finish()
        self._epilogue_ran_this_backward = True

    def independent_gradient_partition_epilogue(self) -> None:
        self.finish()

    @contextmanager
    def published(self) -> Iterator[None]:
        """Inside the block, DeepSpeed's own tensors have the states and may be changed; see `take_back`."""
        own, steps = self.own_flats(), torch.tensor(self.spillway.sharded.scalars()["num_updates"])
        for tensor, states in zip(own, self.spillway.flats(), strict=True):
            tensor.data = states.pop(MASTER)
            self.optimizer.state[tensor] = {"step": steps.clone(), **states}
        self.link()
        try:
            yield
        finally:
            self.forget_states()

    def take_back(self) -> None:
        """Inside `published`: sets our states to those that DeepSpeed's tensors have now."""
        own = self.own_flats()
        states = [self.optimizer.state[tensor] for tensor in own]
        self.spillway.load_flats(
            [
                {MASTER: tensor.data, **{kind: found[kind] for kind in MOMENTS}}
                for tensor, found in zip(own, states, strict=True)
            ]
        )
        self.spillway.sharded.load_scalars(scalars_after(int(states[0]["step"]), self.optimizer.param_groups[0]))
        self.spillway.divided.complete()

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        with self.published():
            super().load_state_dict(*arguments, **options)  # type: ignore[misc]  # DeepSpeed's
            self.take_back()

    def _restore_from_bit16_weights(self) -> None:
        """Called by refresh_fp32_params, and when a checkpoint is loaded without its states."""
        if any(tensor.numel() for tensor in self.own_flats()):  # inside `published` already
            super()._restore_from_bit16_weights()  # type: ignore[misc]
            return
        with self.published():
            super()._restore_from_bit16_weights()  # type: ignore[misc]
            self.take_back()

    def offload_states(self, *arguments: Any, **options: Any) -> None:
        raise UserError(MOVED_BY_PLAN)

    def reload_states(self, *arguments: Any, **options: Any) -> None:
        raise UserError(MOVED_BY_PLAN)

    def forget_states(self) -> None:
        for tensor in self.own_flats():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
            tensor.grad = None
        self.optimizer.state.clear()
        self.unlink()

    def own_flats(self) -> list[Tensor]:
        """Returns DeepSpeed's float32 tensors of this rank, one per group."""
        raise TypeError("own_flats: defined only in AdoptedStages1And2 and AdoptedStage3; use one of these classes")

    def link(self) -> None:
        """Makes DeepSpeed's views of these tensors point into them again."""

    def unlink(self) -> None:
        """Makes these views hold nothing any more."""


def scalars_after(num_updates: int, group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the optimizer's scalars: powers of the betas by repeated fp64 product, as updates compute them."""
    powers = [1.0, 1.0]
    for _ in range(num_updates):
        powers = [power * beta for power, beta in zip(powers, group["betas"], strict=True)]
    return {"num_updates": float(num_updates), "beta1_power": powers[0], "beta2_power": powers[1]}


class AdoptedStages1And2(Adopted, DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no types
    """A parameter's gradient is taken by `process_gradients`, which DeepSpeed's hooks call."""

    def process_gradients(self, parameter: Parameter, group: int) -> None:
        self.spillway.take(parameter)

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        self.finish()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        self.finish()

    def state_dict(self) -> dict[str, Any]:
        with self.published():
            found: dict[str, Any] = super().state_dict()
        return found

    def own_flats(self) -> list[Tensor]:
        return list(self.single_partition_of_fp32_groups)

    def link(self) -> None:
        self._hp_optimizer_states_linked = False
        self._link_all_hp_params()
        self._lazy_init_hp_params_optimizer_state()

    def unlink(self) -> None:
        for group in self.bit16_groups:
            for parameter in group:
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.hp_fragment = None
                    parameter._hp_mapping.optim_fragment = None
                parameter.get_full_hp_param = types.MethodType(_full, parameter)
                parameter.set_full_hp_param = types.MethodType(_set_full, parameter)
                parameter.get_full_hp_grad = types.MethodType(_no_gradient, parameter)
                parameter.set_full_hp_grad = types.MethodType(_no_gradient, parameter)
                parameter._spillway = self.spillway


def _full(parameter: Any, optim_state_key: str | None = None) -> Tensor:
    found: Tensor = parameter._spillway.full(parameter, optim_state_key)
    return found


def _set_full(parameter: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    parameter._spillway.set_full(parameter, value, optim_state_key)


def _no_gradient(parameter: object, *arguments: object) -> Tensor:
    raise UserError(
        "DeepSpeed's functions cannot read or set gradients of an engine given to adopt(), because Spillway "
        "holds the gradients; read parameter.grad in a hook of your own"
    )


class AdoptedStage3(Adopted, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]  # DeepSpeed has no types
    """A parameter's gradient is taken by `reduce_ready_partitions_and_remove_grads`, which DeepSpeed's hooks call."""

    def reduce_ready_partitions_and_remove_grads(self, parameter: Parameter) -> None:
        self.spillway.take(parameter)

    def before_update(self) -> None:
        """Frees whole copies, which would still have the values from before the update."""
        self._partition_all_parameters()

    def state_dict(self) -> dict[str, Any]:
        with self.published():
            found: dict[str, Any] = super().state_dict()
            found["fp32_flat_groups"] = [tensor.detach() for tensor in self.own_flats()]  # ours are emptied later
        return found

    def get_full_hp_param(self, param: Parameter, optim_state_key: str | None = None) -> Tensor | None:
        return self.spillway.full(param, optim_state_key) if param.requires_grad else None

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            self.spillway.set_full(param, value, optim_state_key)

    def get_local_fp32_param(self, param: Parameter, optim_state_key: str | None = None) -> Tensor | None:
        return self.spillway.own_padded(param, optim_state_key) if param.requires_grad else None

    def set_local_hp_param(self, value: Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            self.spillway.set_own(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: Parameter) -> Tensor:
        return _no_gradient(param)

    get_local_fp32_grad_for_param = get_fp32_grad_for_param

    def set_fp32_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        _no_gradient(param)

    set_local_grad_for_param = set_fp32_grad_for_param

    def get_hp_param_device(self, param: Parameter, optim_state_key: str | None = None) -> torch.device | None:
        return torch.device("cpu") if param.requires_grad else None

    def own_flats(self) -> list[Tensor]:
        return list(self.fp32_partitioned_groups_flat)

    def forget_states(self) -> None:
        """Also frees the partitions in which DeepSpeed would have added up gradients."""
        super().forget_states()
        self.grad_partitions_flat_buffer = torch.empty(0)
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = dict[int, Tensor]()
