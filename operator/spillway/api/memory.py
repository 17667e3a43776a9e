"""spec.parallelism, spec.memory and spec.spill of a TrainingJob: budgets, and parts of the plan that the user fixes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, Number, Positive, Quantity, SomeBytes, Text, refuse
from spillway.api.limits import MAX_RANKS, MAX_SPILL_VOLUMES
from spillway.plan import Overlap, Strategy
from spillway.units import format_quantity


class Parallelism(Fields):
    """How many devices, and what each of them holds."""

    nodes: Annotated[Positive, Field(le=MAX_RANKS)] = Field(default=1, description="Nodes; one pod each.")
    devices_per_node: Annotated[Positive, Field(le=64)] = Field(default=1, description="Devices, and ranks, per node.")
    device: Literal["Auto", "Cuda", "Cpu"] = Field(
        default="Auto", description="Kind of device. Auto: a GPU if one is available and can run the job, else a CPU."
    )
    strategy: Literal["Auto", Strategy] = Field(
        default="Auto",
        description=(
            "What is sharded among ranks. Ddp: nothing. Zero1, Zero2: optimizer states and gradients, by "
            "DeepSpeed. Zero3: parameters too. Fsdp: as Zero3, by torch's FSDP2. Auto: Ddp."
        ),
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.world_size > MAX_RANKS:
            found = f"nodes x devicesPerNode is {self.nodes} x {self.devices_per_node} = {self.world_size}"
            refuse([("", f"at most {MAX_RANKS} ranks; {found}")])
        return self

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class Budget(Fields):
    """Bytes that the job may use. Default of each: what the node has."""

    device: SomeBytes | None = Field(default=None, description="Memory per device, bytes.")
    host: Quantity | None = Field(default=None, description="Host memory per node, bytes; shared by its ranks.")
    nvme: Quantity | None = Field(default=None, description="NVMe space per node, bytes; shared by its ranks.")


class OptimizerMemory(Fields):
    """optimizer_offload."""

    placement: Literal["Auto", "Device", "Host", "Interleaved", "Nvme"] = Field(
        default="Auto",
        description=(
            "Where optimizer states are kept and updated. Device: on the device. Host: in host memory, by the "
            "CPU. Interleaved: in host memory, by CPU and device in turn. Nvme: on NVMe, read and written back by"
            " the CPU for each update. Auto: the fastest split of these; NVMe only for what host memory cannot "
            "hold."
        ),
    )
    overlap: Literal["Auto", Overlap] = Field(
        default="Auto",
        description=(
            "What the optimizer update overlaps with. None: nothing. Forward: the next forward pass; each segment "
            "waits only for its own parameters. Backward: also the backward pass; the CPU updates some parameters "
            "early, into separate buffers, and discards the result if gradients need clipping. Auto: the fastest of "
            "None, Forward and, without gradientClipping, Backward."
        ),
    )


class ActivationMemory(Fields):
    """activation_spill."""

    policy: Literal["Auto", "Keep", "Recompute", "Host", "Nvme"] = Field(
        default="Auto",
        description=(
            "What happens in each block to the activations that backward needs: kept on the device, recomputed, "
            "or moved to host memory or NVMe and back. Auto: the fastest choice per block."
        ),
    )
    host_reserve: Quantity | None = Field(
        default=None,
        # job.json as every version before knows it, where there is none
        exclude_if=lambda given: given is None,
        description=(
            "Host memory per node, bytes, kept free for activations that are spilled to NVMe. When others fill "
            "the spill volume, activations move here while the job runs. Default: none; nothing moves."
        ),
    )

    @model_validator(mode="after")
    def _reserve_is_of_use(self) -> Self:
        if self.host_reserve and self.policy not in ("Auto", "Nvme"):
            never = f"policy {self.policy} puts no activations on NVMe: leave it out, or use Nvme"
            refuse([("hostReserve", never)])
        return self


class ParameterMemory(Fields):
    """model_spill."""

    placement: Literal["Auto", "Resident", "Stream"] = Field(
        default="Auto",
        description=(
            "Resident: parameters stay on the device. Stream: layers are loaded into device slots when needed. "
            "Auto: stream what does not fit."
        ),
    )


class Advanced(Fields):
    """Parts of the plan that the user fixes, in the planner's terms."""

    optimizer: OptimizerMemory = Field(default=OptimizerMemory(), description="Optimizer states.")
    activations: ActivationMemory = Field(
        default=ActivationMemory(), description="Where activations that are saved for backward are kept."
    )
    parameters: ParameterMemory = Field(default=ParameterMemory(), description="Parameters.")


class Endurance(Fields):
    """Protection of flash from being worn out."""

    drive_writes_per_day: Annotated[Number, Field(gt=0.0)] = Field(
        default=1.0,
        description=(
            "Largest number of drive capacities written per day. Auto rejects plans above it, and prefers plans "
            "that write less unless writing saves time: 5 % at the limit, in proportion below it."
        ),
    )


class Memory(Fields):
    """Where bytes may live."""

    mode: Literal["Auto", "Advise", "Disabled"] = Field(
        default="Auto",
        description=(
            "Auto: run the planner's choice. Advise: run what the fields below say and report what Auto would "
            "choose. Disabled: keep everything on the device; budget.host is required."
        ),
    )
    budget: Budget = Field(default=Budget(), description="Bytes that the job may use.")
    endurance: Endurance = Field(default=Endurance(), description="Protection of flash.")
    advanced: Advanced = Field(default=Advanced(), description="Parts of the plan that the user fixes.")

    @model_validator(mode="after")
    def _disabled_is_bounded(self) -> Self:
        problems = []
        if self.mode == "Disabled":
            if self.budget.host is None:
                problems.append(("budget.host", "required with mode Disabled, which plans nothing"))
            if self.advanced.optimizer.placement not in ("Auto", "Device"):
                problems.append(
                    ("advanced.optimizer.placement", "mode Disabled keeps everything on the device: Auto or Device")
                )
            if self.advanced.optimizer.overlap in ("Forward", "Backward"):
                problems.append(("advanced.optimizer.overlap", "mode Disabled has no update to overlap: Auto or None"))
            if self.advanced.activations.policy not in ("Auto", "Keep"):
                problems.append(
                    ("advanced.activations.policy", "mode Disabled keeps everything on the device: Auto or Keep")
                )
            if self.advanced.activations.host_reserve:
                kept = "mode Disabled keeps everything on the device, so nothing can move there; leave it out"
                problems.append(("advanced.activations.hostReserve", kept))
        elif self.budget.host is not None and (self.advanced.activations.host_reserve or 0) > self.budget.host:
            most = f"at most budget.host ({format_quantity(self.budget.host)}), which it is part of"
            problems.append(("advanced.activations.hostReserve", most))
        refuse(problems)
        return self


class Spill(Fields):
    """The volumes for NVMe spill."""

    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="Class of an ephemeral volume. Default: an emptyDir."
    )
    num_volumes: Annotated[Positive, Field(le=MAX_SPILL_VOLUMES)] = Field(
        default=1, description="Number of striped volumes of that class; each should be a separate drive."
    )
    encryption: Literal["None", "Ephemeral"] = Field(
        default="None",
        description="Ephemeral: AES-256-XTS with a random key that exists only in the process.",
    )

    @property
    def num_cipher_threads(self) -> int:
        """Of a rank, at a time, in one direction."""
        return self.num_volumes if self.encryption == "Ephemeral" else 0

    @model_validator(mode="after")
    def _several_need_a_class(self) -> Self:
        if self.num_volumes > 1 and not self.storage_class_name:
            refuse([("numVolumes", "without storageClassName there is one, an emptyDir: set that, or leave this out")])
        return self
