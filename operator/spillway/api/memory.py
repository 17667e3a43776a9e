"""spec.parallelism, spec.memory and spec.spill of a TrainingJob: budgets, and parts of the plan that the user fixes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, Number, Positive, Quantity, SomeBytes, Text, reject
from spillway.api.limits import MAX_RANKS, MAX_SPILL_VOLUMES
from spillway.plan import Overlap, Strategy
from spillway.units import format_quantity


class Parallelism(Fields):
    """How many devices, and what each of them holds."""

    nodes: Annotated[Positive, Field(le=MAX_RANKS)] = Field(
        default=1, description="Number of nodes; the job has one pod for each."
    )
    devices_per_node: Annotated[Positive, Field(le=64)] = Field(
        default=1,
        description=(
            "Number of devices per node; each has one rank (training process). In a job with several members: "
            "number of devices that train members at the same time."
        ),
    )
    device: Literal["Auto", "Cuda", "Cpu"] = Field(
        default="Auto",
        description="Kind of device to train on. Auto: a GPU if one is available and can run the job, else a CPU.",
    )
    strategy: Literal["Auto", Strategy] = Field(
        default="Auto",
        description=(
            "What is sharded among ranks (training processes). Ddp: nothing. Zero1, Zero2: optimizer states and "
            "gradients. Zero3, Fsdp: also the parameters. Fsdp is torch's FSDP2. On CPUs, Zero1 to Zero3 are "
            "DeepSpeed's; on Cuda devices, Zero3 is the same as Fsdp. Auto: Ddp where it fits, else Fsdp; all "
            "attempts of a job use the same."
        ),
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.world_size > MAX_RANKS:
            found = f"nodes x devicesPerNode is {self.nodes} x {self.devices_per_node} = {self.world_size}"
            reject([("", f"at most {MAX_RANKS} ranks; {found}")])
        return self

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


class Budget(Fields):
    """Bytes that the job may use. Default of each: what the node has."""

    device: SomeBytes | None = Field(
        default=None, description="Bytes that the plan may use on each device. Default: what the device has."
    )
    host: Quantity | None = Field(
        default=None,
        description=(
            "Bytes of host memory that the plan may use on each node, for all ranks (training processes) of that "
            "node together. What the processes themselves need, such as interpreter and libraries, comes on top. "
            "Default: what the node has."
        ),
    )
    nvme: Quantity | None = Field(
        default=None,
        description=(
            "Bytes that the plan may spill to NVMe on each node, for all ranks (training processes) of that node "
            "together. Default: what the node has."
        ),
    )


class OptimizerMemory(Fields):
    """Optimizer states (technique optimizer_offload)."""

    placement: Literal["Auto", "Device", "Host", "Interleaved", "Nvme"] = Field(
        default="Auto",
        description=(
            "Where optimizer states are kept, and what updates them. Device: kept on the device and updated by "
            "it. Host: kept in host memory, updated by the CPU. Interleaved: kept in host memory; the CPU updates "
            "one part and the device the other. Nvme: kept on NVMe; for each update the CPU reads them and writes "
            "them back. Auto: the fastest combination of these, with states on NVMe only if host memory cannot "
            "hold them."
        ),
    )
    overlap: Literal["Auto", Overlap] = Field(
        default="Auto",
        description=(
            "What the optimizer update runs in parallel with. None: nothing. Forward: the next forward pass; each "
            "segment (embedding, layer or head) waits only for the update of its own parameters. Backward: like "
            "Forward, and the CPU also updates some parameters during the backward pass, into separate buffers; "
            "it discards these updates if the gradients are clipped or the step is skipped. Auto: the fastest of "
            "None, Forward and, with training.gradientClipping: 0, Backward."
        ),
    )


class ActivationMemory(Fields):
    """Activations between forward and backward (technique activation_spill)."""

    policy: Literal["Auto", "Keep", "Recompute", "Host", "Nvme"] = Field(
        default="Auto",
        description=(
            "What happens, in each transformer block, to the activations that backward needs. Keep: they stay on "
            "the device. Recompute: they are computed again. Host, Nvme: they are moved to host memory or to "
            "NVMe, and back. Auto: the fastest choice for each block."
        ),
    )
    host_reserve: Quantity | None = Field(
        default=None,
        # if there is none, job.json is as in every earlier version
        exclude_if=lambda given: given is None,
        description=(
            "Bytes of host memory per node that are reserved for activations which the plan spills to NVMe. If "
            "other programs fill the spill volume, activations move to this memory while the job runs. Default: "
            "none; activations then never move from NVMe to host memory."
        ),
    )

    @model_validator(mode="after")
    def _reserve_is_of_use(self) -> Self:
        if self.host_reserve and self.policy not in ("Auto", "Nvme"):
            never = (
                f"only activations that are spilled to NVMe can move to this memory, and policy {self.policy} spills "
                "none to NVMe; leave it out, or use policy Nvme"
            )
            reject([("hostReserve", never)])
        return self


class ParameterMemory(Fields):
    """Parameters (technique model_spill)."""

    placement: Literal["Auto", "Resident", "Stream"] = Field(
        default="Auto",
        description=(
            "Where parameters are kept. Resident: on the device. Stream: in host memory or on NVMe; each layer is "
            "loaded into a buffer on the device when it is needed. Auto: only the layers that do not fit on the "
            "device are streamed."
        ),
    )


class Advanced(Fields):
    """Parts of the plan that the user fixes, in the planner's terms."""

    optimizer: OptimizerMemory = Field(
        default=OptimizerMemory(), description="Where optimizer states are kept, and when they are updated."
    )
    activations: ActivationMemory = Field(
        default=ActivationMemory(), description="Where activations that are saved for backward are kept."
    )
    parameters: ParameterMemory = Field(default=ParameterMemory(), description="Where parameters are kept.")


class Endurance(Fields):
    """Protection of flash drives from wear."""

    drive_writes_per_day: Annotated[Number, Field(gt=0.0)] = Field(
        default=1.0,
        description=(
            "Largest number of drive writes per day; one drive write is as many bytes as the node's drives hold "
            "together. Auto rejects plans above this limit. When Auto compares the others, it adds 5 % to the "
            "step time of a plan that writes as much as the limit allows, and proportionally less to that of a "
            "plan that writes less."
        ),
    )


class Memory(Fields):
    """Memory budgets, and how the plan uses them."""

    mode: Literal["Auto", "Advise", "Disabled"] = Field(
        default="Auto",
        description=(
            "Auto: run the planner's choice. Advise: run the placement that the fields of memory.advanced ask "
            "for, and report in the plan's reasons what Auto would choose. Disabled: keep everything on the "
            "device; memory.budget.host is then required."
        ),
    )
    budget: Budget = Field(
        default=Budget(),
        description="Largest number of bytes that the plan may use on a device, in host memory and on NVMe.",
    )
    endurance: Endurance = Field(
        default=Endurance(), description="Limit on how much is written to flash drives, to protect them from wear."
    )
    advanced: Advanced = Field(
        default=Advanced(),
        description="Parts of the plan that you fix yourself. Default: the planner decides all of them.",
    )

    @model_validator(mode="after")
    def _disabled_is_bounded(self) -> Self:
        problems = []
        if self.mode == "Disabled":
            if self.budget.host is None:
                problems.append(("budget.host", "required with mode Disabled, because no plan computes it"))
            if self.advanced.optimizer.placement not in ("Auto", "Device"):
                problems.append(
                    ("advanced.optimizer.placement", "mode Disabled keeps everything on the device; use Auto or Device")
                )
            if self.advanced.optimizer.overlap in ("Forward", "Backward"):
                problems.append(
                    ("advanced.optimizer.overlap", "mode Disabled does not overlap the update; use Auto or None")
                )
            if self.advanced.activations.policy not in ("Auto", "Keep"):
                problems.append(
                    ("advanced.activations.policy", "mode Disabled keeps everything on the device; use Auto or Keep")
                )
            if self.advanced.activations.host_reserve:
                kept = (
                    "mode Disabled keeps all activations on the device, so none can move to host memory; leave it out"
                )
                problems.append(("advanced.activations.hostReserve", kept))
        elif self.budget.host is not None and (self.advanced.activations.host_reserve or 0) > self.budget.host:
            most = (
                f"must be at most budget.host ({format_quantity(self.budget.host)}), because it is part of that budget"
            )
            problems.append(("advanced.activations.hostReserve", most))
        reject(problems)
        return self


class Spill(Fields):
    """The volumes for NVMe spill."""

    storage_class_name: Annotated[Text, Field(max_length=253)] = Field(
        default="",
        description=(
            "StorageClass of the volumes to spill to, which are created and deleted with the pod. Default: that "
            "of the OperatorConfig, else none; without one the job spills to an emptyDir."
        ),
    )
    num_volumes: Annotated[Positive, Field(le=MAX_SPILL_VOLUMES)] = Field(
        default=1,
        description=(
            "Number of spill volumes per pod. The spill file is striped over them, so each should be a separate "
            "drive. More than one volume needs storageClassName."
        ),
    )
    encryption: Literal["None", "Ephemeral"] = Field(
        default="None",
        description=(
            "Encryption of spilled bytes. Ephemeral: AES-256-XTS with a random key that exists only in the "
            "training process."
        ),
    )

    @property
    def num_cipher_threads(self) -> int:
        """Number of threads of a rank that encrypt or decrypt at the same time, in one direction."""
        return self.num_volumes if self.encryption == "Ephemeral" else 0

    @model_validator(mode="after")
    def _several_need_a_class(self) -> Self:
        if self.num_volumes > 1 and not self.storage_class_name:
            reject(
                [
                    (
                        "numVolumes",
                        "without storageClassName there is only one volume, an emptyDir; set "
                        "storageClassName, or leave numVolumes out",
                    )
                ]
            )
        return self
