"""The parameters that an optimizer updates, validated once at the start."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from spillway.errors import UserError

from ..kernels.reference import rounded


@dataclass(frozen=True, slots=True)
class Trainable:
    """The parameters that an optimizer updates, checked; frozen ones are left out."""

    parameters: dict[str, Parameter]
    """Owners only, in declared order."""
    tied: dict[str, str] = field(default_factory=dict)
    """Alias -> owner: both share one storage, but each has its own leaf and accumulator, summed once at the end of the
    step."""

    @classmethod
    def of(
        cls, parameters: Sequence[tuple[str, Parameter]], tied: Mapping[str, str], streamed: Container[str] = ()
    ) -> Trainable:
        """`streamed` parameters have no memory of their own: their layout, device and sharing are not checked."""
        trainable = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        for name, parameter in trainable.items():
            _check(name, parameter, is_streamed=name in streamed)
        _check_device({name: parameter for name, parameter in trainable.items() if name not in streamed})
        aliases = {alias: owner for alias, owner in tied.items() if alias in trainable}
        for alias, owner in aliases.items():
            if owner not in trainable or not _share(trainable[owner], trainable[alias], is_streamed=alias in streamed):
                raise UserError(
                    f"parameter {alias} is declared as tied to {owner}, but {owner} is frozen, or the two do not share "
                    f"memory. Set {alias}.data = {owner}.data after the last change of dtype, and train both or neither"
                )
        return cls({name: p for name, p in trainable.items() if name not in aliases}, aliases)

    def owner(self, name: str) -> str:
        return self.tied.get(name, name)


def _share(owner: Parameter, alias: Parameter, *, is_streamed: bool) -> bool:
    return is_streamed or owner.data_ptr() == alias.data_ptr()


def _check(name: str, parameter: Parameter, *, is_streamed: bool) -> None:
    if not (is_streamed or parameter.is_contiguous()):
        raise UserError(
            f"parameter {name}: strides {parameter.stride()} of shape {tuple(parameter.shape)} are not contiguous, but "
            "the optimizer updates parameters as contiguous arrays; set parameter.data = parameter.data.contiguous()"
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"parameter {name}: has dtype {parameter.dtype}, but the optimizer updates only float32, bfloat16 and "
            "float16; convert or freeze this parameter"
        )


def _check_device(parameters: Mapping[str, Parameter]) -> None:
    """Raises UserError unless all parameters that stay on the device are on the same one: a rank has one device, and
    every copy moves to and from that."""
    devices = {name: parameter.device for name, parameter in parameters.items()}
    first = next(iter(devices.values()), None)
    for name, device in devices.items():
        if device != first:
            raise UserError(
                f"parameter {name}: is on device {device}, but the model's first parameter is on {first}; move the "
                f"whole model to {first}, because a rank (training process) uses only one device"
            )


def cut(num_parameters: int, chunk_parameters: int) -> list[tuple[int, int]]:
    """(offset, size) of one parameter's chunks: all have `chunk_parameters` values, the last one what is left."""
    return [
        (offset, min(chunk_parameters, num_parameters - offset))
        for offset in range(0, num_parameters, chunk_parameters)
    ]


def flat(tensor: Tensor) -> Tensor:
    """The values of a contiguous parameter or gradient as one dimension, outside autograd; shares its memory."""
    return tensor.detach().view(-1)


def check_gradient(name: str, parameter: Parameter, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`gradient` flat and contiguous. Raises UserError unless it is dense and of `dtype` (None: the parameter's)."""
    expected = dtype or parameter.dtype
    if gradient.layout != torch.strided or gradient.dtype != expected:
        raise UserError(
            f"parameter {name}: its gradient has dtype {gradient.dtype} and layout {gradient.layout}, but must be "
            f"dense and of dtype {expected}; give nn.Embedding sparse=False"
        )
    return gradient.detach().reshape(-1)


def master_values(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 master as parameter values: unchanged, or rounded to bfloat16 or float16."""
    return rounded(master, dtype)
