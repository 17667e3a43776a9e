"""Chain: a model as consecutive segments, the form that the techniques work on.

    tokens -> segment 0 -> carried -> segment 1 -> carried -> ... -> last segment -> loss

A segment is called as `module(*carried, *arguments)`: `carried` is what the segment before it returned, and `arguments`
are further inputs (position tables, masks, labels), to which no gradient flows. So a technique may run the whole chain
for one micro-batch, or one segment for all micro-batches, and both do the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from spillway.planning.model_shape import ParameterShape

from ..corpus.objective import TrainingObjective
from ..corpus.packing import Documents

CPU = torch.device("cpu")


class Chain(nn.Module):
    """A model as segments. Knows no technique; every parameter belongs to exactly one segment."""

    initializer_range = 0.02
    """Standard deviation of the normal initialisation of every matrix."""
    objective = TrainingObjective.CAUSAL
    max_positions: int | None = None
    """Length of the longest sequence; None: any length."""
    autocast: torch.dtype | None = None
    """Type of torch.autocast, which is entered per segment; None: no autocast, everything runs in the parameters'
    type."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows: every token of the data must be smaller."""
        raise NotImplementedError

    @property
    def description(self) -> dict[str, Any]:
        """What the model is, as JSON values; checkpoints keep it, and export reads it."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in forward order; the names are unique and never change."""
        raise NotImplementedError

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of parameters that share storage: alias -> owner. Each has its own leaf and accumulator, because the
        sum of their gradients must not depend on the order in which segments run backward (docs/adr/0001)."""
        return {}

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        """What `segment` gets in addition to the carried tensors, for one micro-batch."""
        raise NotImplementedError

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, float32 value) of every parameter but the aliases, from `seed`: the same bits for every plan.

        Yields one tensor at a time, so that a model larger than memory can be filled.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name not in self.tied:
                value = torch.empty(whole_shape(parameter), dtype=torch.float32)
                self.fill_initial(name, value, generator)
                yield name, value

    def initial_trained(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Like `initial_values`, but only for trained parameters: for use when the frozen ones already have their
        values."""
        return ((name, value) for name, value in self.initial_values(seed) if self.get_parameter(name).requires_grad)

    def fill_initial(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills a vector with 0 (a bias) or 1 (a norm's scale), anything else with normal values of standard deviation
        `deviation`."""
        if value.dim() == 1:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            value.normal_(0.0, self.deviation(name), generator=generator)

    def deviation(self, name: str) -> float:
        """Standard deviation of the initial values of matrix `name`."""
        return self.initializer_range

    def tie(self) -> None:
        """Let every alias share its owner's storage; call this again whenever parameters were replaced or cast."""
        for alias, owner in self.tied.items():
            self.get_parameter(alias).data = self.get_parameter(owner).data

    def parameters_of(self) -> dict[str, list[str]]:
        """Returns the names of the parameters of each segment, in declared order."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return {segment: [names[id(p)] for p in module.parameters()] for segment, module in self.segments}

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int, *documents: Documents) -> Tensor:
        """Returns the loss of one micro-batch: the sum over its unmasked labels, divided by `num_tokens`; a float32
        scalar.

        `documents`: given if the rows of a batch hold several; only a StructuralChain gets such batches.
        """
        carried: tuple[Tensor, ...] = (tokens_BT,)
        for name, module in self.segments:
            carried = as_carried(module(*carried, *self.arguments(name, tokens_BT, labels_BT, num_tokens, *documents)))
        (loss,) = carried
        return loss


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the whole shape, also of a parameter that ZeRO-3 has sharded (parallel/deepspeed/), whose own tensor is
    empty while it is not used."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def parameter_shape(parameter: nn.Parameter, is_alias: bool) -> ParameterShape:
    """Returns what the planner knows of a parameter."""
    num_rows, row_values = parameter.shape[0] if parameter.dim() else 0, prod(parameter.shape[1:])
    return ParameterShape(num_rows, row_values, parameter.element_size(), parameter.requires_grad, is_alias)


def as_carried(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns what a segment returned in the form in which the next one gets it."""
    return output if isinstance(output, tuple) else (output,)


def allocate(model: nn.Module, device: torch.device = CPU, *, frozen_alone: bool = False) -> None:
    """Gives every parameter without memory (on device `meta`) memory of its own on `device`, unfilled, and moves the
    buffers there. `frozen_alone`: only parameters that are not trained."""

    def with_memory(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta or (frozen_alone and parameter.requires_grad):
            return parameter
        # empty_like of a tensor on meta imports sympy, which takes a second.
        memory = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=device)
        return nn.Parameter(memory, requires_grad=parameter.requires_grad)

    replace_parameters(model, with_memory)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new parameters are on device meta and, by default, of type `dtype`."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(default)


def replace_parameters(model: nn.Module, replacement: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replaces every parameter by a new one; modules that share a parameter share the new one."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the old one: its id must not come to mean another
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = parameter, replacement(parameter)
            module.register_parameter(name, made[id(parameter)][1])
