"""ParameterPlan -> homes, slots, and parameters that pass through them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from spillway.plan import ParameterPlan, Tier

from ..models.chain import Chain, replace_parameters
from ..resident_parameters import ResidentParameters
from ..tiers.lanes import Lanes
from ..tiers.nvme_slab import NvmeSlab
from .homes import Chunk, Homes
from .layout import SegmentLayout, check_homes, lay_out
from .slots import Slots, stub
from .streamed_parameters import StreamedParameters

RESIDENT = Tier.DEVICE
CPU = torch.device("cpu")


class ModelSpill:
    """The technique, attached to a model. The optimizer sees it as the homes of its chunks."""

    def __init__(
        self, model: Chain, layouts: Mapping[str, SegmentLayout], homes: Homes, slots: Slots, lanes: Lanes
    ) -> None:
        self.streamed = frozenset(row.name for layout in layouts.values() for row in layout.rows)
        """Parameters without their own device memory, including aliases."""
        self._segments = [name for name, _ in model.segments]
        self._layouts = layouts
        self._homes = homes
        self._slots = slots
        self._lanes = lanes

    def source(self, resident: ResidentParameters) -> StreamedParameters:
        """The ParameterSource of the saved-tensor hooks; `resident` has all other parameters."""
        return StreamedParameters(resident, self._slots, self._layouts, self._segments, self._lanes)

    def of(self, parameter: str) -> Sequence[Chunk]:
        return self._homes.of(parameter)

    def set(self, parameter: str, values: Tensor) -> None:
        self.invalidate()
        self._homes.set(parameter, values)

    def invalidate(self) -> None:
        self._slots.clear()


def build(
    plan: ParameterPlan,
    model: Chain,
    chunk_parameters: int,
    lanes: Lanes,
    nvme: NvmeSlab | None,
    device: torch.device = CPU,
    *,
    frozen_alone: bool = False,
) -> ModelSpill | None:
    """Attach `plan` to a model whose parameters have no memory yet (device meta); those of streamed segments never get
    any. None when all segments are resident.

    Homes are cut into chunks of `chunk_parameters`, like the optimizer's update. Raises UserError for a plan that does
    not fit the model, and DeviceOutOfMemory, HostOutOfMemory or SpillVolumeFull if a tier is too small. `frozen_alone`:
    trained parameters stay on the device, even those of streamed segments.
    """
    home_of = check_homes(model, plan.homes) if plan.streams else {}
    names_of = {
        segment: [name for name in names if not (frozen_alone and model.get_parameter(name).requires_grad)]
        for segment, names in model.parameters_of().items()
        if home_of.get(segment, RESIDENT) != RESIDENT
    }
    evict(model, {name for names in names_of.values() for name in names}, device)
    layouts = {name: lay_out(model, name, home_of[name], names) for name, names in names_of.items() if names}
    if not layouts:
        return None
    homes = Homes(layouts, chunk_parameters, lanes, nvme)
    return ModelSpill(model, layouts, homes, Slots(layouts, plan.num_slots, homes.load, lanes), lanes)


def evict(model: nn.Module, names: Collection[str], device: torch.device = CPU) -> None:
    """Replaces these parameters, which are on device meta, by stubs on `device`, which have shape and type but no
    memory."""
    parameters = {id(parameter): parameter for parameter in map(model.get_parameter, names)}

    def evicted(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in parameters:
            return parameter
        # Created empty: Parameters created from the stub would all share its version counter.
        made = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=parameter.requires_grad)
        made.data = stub(parameter.shape, parameter.dtype, device)
        return made

    replace_parameters(model, evicted)
