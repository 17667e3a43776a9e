"""A frozen base model shared by several members: loaded once for all of them.

    base = tiers of all + homes and slots (or memory on the device) of the frozen parameters
    each model = the base's own Parameter objects in place of its frozen ones; its own adapters, gradients and states

A slot that is filled, bound or emptied is so for every model, because all have the same Parameter objects. Trained
parameters stay on the device and do not pass through slots. Frozen parameters never change, so no update invalidates a
slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.api.job_file import JobFile
from spillway.errors import UserError
from spillway.plan import PLAN_AGAIN, MemoryPlan, Tier

from .. import model_spill
from ..assemble import Assembly, Base, assemble, make_tiers
from ..models.chain import Chain, allocate, replace_parameters
from ..ranks import ONE_RANK
from ..run_job import survived


@contextmanager
def shared_base(job: JobFile, plan: MemoryPlan, model: Chain, device: torch.device) -> Iterator[Base]:
    """The base of `model`, which has no memory yet, with its values loaded. `plan`: its bytes on `device` are those of
    all models that will be attached. Raises as `assemble` does, and UserError for values that cannot be read."""
    tiers = make_tiers(job, plan, device)
    try:
        streaming = model_spill.build(
            plan.parameters, model, plan.optimizer.chunk_parameters, tiers.lanes, tiers.nvme, device, frozen_alone=True
        )
        streamed = streaming.streamed if streaming else frozenset[str]()
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        resident = [model.get_parameter(name) for name in frozen if name not in model.tied and name not in streamed]
        tiers.ledger.charge("parameters", sum(p.numel() * p.element_size() for p in resident))
        tiers.ledger.charge("workspace", plan.bytes[Tier.DEVICE].workspace)
        allocate(model, device, frozen_alone=True)
        model.tie()
        base = Base(tiers, streaming, {name: model.get_parameter(name) for name in frozen})
        load(base, model, job.spec.training.seed)
        with survived(tiers):
            yield base
    finally:
        tiers.close()


def load(base: Base, model: Chain, seed: int) -> None:
    """Loads the values of all frozen parameters; they are read only this once."""
    for name, value in model.initial_values(seed):
        parameter = base.frozen.get(name)
        if parameter is None:
            continue
        if base.streaming is not None and name in base.streamed:
            base.streaming.set(name, value.reshape(-1).to(parameter.dtype))
        else:
            parameter.data.copy_(value)


def assemble_on(base: Base, job: JobFile, plan: MemoryPlan, model: Chain) -> Assembly:
    """Like `assemble`, for one more model on `base`. Raises UserError if that is not the model's base."""
    adopt(base, model)
    return assemble(job, plan, model, ONE_RANK, base.tiers.device, base)


def adopt(base: Base, model: Chain) -> None:
    """Replaces the model's frozen parameters by the base's. Raises UserError if they do not match."""
    own = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    of_base = {name: (parameter.shape, parameter.dtype) for name, parameter in base.frozen.items()}
    of_model = {name: (parameter.shape, parameter.dtype) for name, parameter in own.items()}
    if of_model != of_base:
        wrong = sorted(name for name in of_base.keys() | of_model if of_base.get(name) != of_model.get(name))
        raise UserError(
            "spec.members: by the plan, this member shares the frozen parameters of another member, but parameter "
            f"{wrong[0]} is missing from one of the two models or differs in shape or dtype; "
            f"{PLAN_AGAIN}"
        )
    names = {id(parameter): name for name, parameter in own.items()}

    def of_the_base(parameter: nn.Parameter) -> nn.Parameter:
        name = names.get(id(parameter))
        return parameter if name is None else base.frozen[name]

    replace_parameters(model, of_the_base)
