"""spec.parallelism, spec.memory and spec.spill of a TrainingJob: budgets, and what the user fixes of a plan."""

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
        default="Auto", description="Kind of device. Auto: a GPU where one is that can run the job, else a CPU."
    )
    strategy: Literal["Auto", Strategy] = Field(
        default="Auto",
        description="What ranks divide among them: nothing (Ddp); optimizer states and sums of gradients (Zero1, "
        "Zero2), parameters too (Zero3), by DeepSpeed; the same as Zero3 by torch's FSDP2 (Fsdp). Auto is Ddp in a "
        "run.",
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

    device: SomeBytes | None = Field(default=None, description="Memory of each device, bytes.")
    host: Quantity | None = Field(default=None, description="Host memory of each node, bytes; its ranks share it.")
    nvme: Quantity | None = Field(default=None, description="NVMe space of each node, bytes; its ranks share it.")


class OptimizerMemory(Fields):
    """optimizer_offload."""

    placement: Literal["Auto", "Device", "Host", "Interleaved", "Nvme"] = Field(
        default="Auto",
        description="Where optimizer states live and are updated. Device: all there. Host: in host memory, by the CPU. "
        "Interleaved: in host memory, by CPU and device in turn. Nvme: on NVMe, read for every update by the CPU and "
        "written back. Auto: any split of these, whatever is fastest; NVMe for what host memory does not hold.",
    )
    overlap: Literal["Auto", Overlap] = Field(
        default="Auto",
        description="What the update may run beside. None: nothing. Forward: the next step's forward, each segment of "
        "which waits for its own parameters; on a CPU that pays where cores are left free. Backward: besides, the CPU "
        "updates some parameters in backward, out of place in host memory; it counts if the norm turns out to need no "
        "clipping. Auto: whatever is faster; Backward only without gradientClipping.",
    )


class ActivationMemory(Fields):
    """activation_spill."""

    policy: Literal["Auto", "Keep", "Recompute", "Host", "Nvme"] = Field(
        default="Auto",
        description="What becomes of the activations that backward needs, in every block: kept on the device, "
        "recomputed, or moved to host memory or NVMe and back. Auto: block by block, whatever is fastest.",
    )
    host_reserve: Quantity | None = Field(
        default=None,
        # job.json as every version before knows it, where there is none
        exclude_if=lambda given: given is None,
        description="Host memory of each node, bytes, that stays empty where activations go to NVMe; its ranks share "
        "it. When others fill the spill volume, as many of them move there while the job runs. Default: none, and "
        "nothing moves.",
    )

    @model_validator(mode="after")
    def _reserve_is_of_use(self) -> Self:
        if self.host_reserve and self.policy not in ("Auto", "Nvme"):
            never = f"policy {self.policy} moves nothing to NVMe, from where it could come: leave it out, or use Nvme"
            refuse([("hostReserve", never)])
        return self


class ParameterMemory(Fields):
    """model_spill."""

    placement: Literal["Auto", "Resident", "Stream"] = Field(
        default="Auto", description="Resident: parameters stay on the device. Stream: they pass through it."
    )


class Endurance(Fields):
    """Protection of flash from being worn out."""

    drive_writes_per_day: Annotated[Number, Field(gt=0.0)] = Field(
        default=1.0,
        description="Plans that write more than this many drive capacities a day are not chosen by Auto; one that "
        "writes as many is only where it is more than 5 % faster than one that writes nothing, in proportion below.",
    )


class Memory(Fields):
    """Where bytes may live."""

    mode: Literal["Auto", "Advise", "Disabled"] = Field(
        default="Auto",
        description="Auto: plan and run the plan. Advise: plan and report, run what the fields below say. "
        "Disabled: everything on the device, nothing planned; budget.host is required.",
    )
    budget: Budget = Field(default=Budget(), description="Bytes that the job may use.")
    optimizer: OptimizerMemory = Field(default=OptimizerMemory(), description="Optimizer states.")
    activations: ActivationMemory = Field(default=ActivationMemory(), description="Saved activations.")
    parameters: ParameterMemory = Field(default=ParameterMemory(), description="Parameters.")
    endurance: Endurance = Field(default=Endurance(), description="Protection of flash.")

    @model_validator(mode="after")
    def _disabled_is_bounded(self) -> Self:
        problems = []
        if self.mode == "Disabled":
            if self.budget.host is None:
                problems.append(("budget.host", "required with mode Disabled, because nothing is planned"))
            if self.optimizer.placement not in ("Auto", "Device"):
                problems.append(("optimizer.placement", "mode Disabled keeps everything on the device: Auto or Device"))
            if self.optimizer.overlap in ("Forward", "Backward"):
                problems.append(("optimizer.overlap", "mode Disabled has no update to overlap: Auto or None"))
            if self.activations.policy not in ("Auto", "Keep"):
                problems.append(("activations.policy", "mode Disabled keeps everything on the device: Auto or Keep"))
            if self.activations.host_reserve:
                kept = "mode Disabled keeps everything on the device, so that nothing can move there: leave it out"
                problems.append(("activations.hostReserve", kept))
        elif self.budget.host is not None and (self.activations.host_reserve or 0) > self.budget.host:
            most = f"at most budget.host ({format_quantity(self.budget.host)}), which it is part of"
            problems.append(("activations.hostReserve", most))
        refuse(problems)
        return self


class Spill(Fields):
    """The volumes for NVMe spill."""

    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="", description="Class of an ephemeral volume. Default: an emptyDir."
    )
    num_volumes: Annotated[Positive, Field(le=MAX_SPILL_VOLUMES)] = Field(
        default=1, description="Volumes of that class, striped; each should be a drive of its own."
    )
    encryption: Literal["None", "Ephemeral"] = Field(
        default="None",
        description="Ephemeral: encrypted (AES-256-XTS) with a random key that only the process holds, and that ends "
        "with it.",
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
