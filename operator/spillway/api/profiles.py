"""NodeProfile and MemoryProfile: measurements of nodes and of models."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from spillway.api.field_types import Count, Fields, Flag, Number, Positive, Quantity, SomeBytes, Text, Written
from spillway.plan import DeviceKind

Rate = Annotated[Number, Field(ge=1e3, le=1e24)]
"""Per second; no hardware exceeds the bounds, and predictions stay finite within them."""
Overhead = Annotated[Number, Field(le=10.0)]
"""Seconds."""


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"a time is needed, for example 2026-11-21T19:09:46Z ({error})") from None
    return text


Moment = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"}), AfterValidator(_moment)]


class LinkRates(Fields):
    """Between device and host, one direction at a time."""

    h2d_bytes_per_second: Rate | None = Field(
        default=None, alias="h2dBytesPerSecond", description="Host to device, bytes per second."
    )
    d2h_bytes_per_second: Rate | None = Field(
        default=None, alias="d2hBytesPerSecond", description="Device to host, bytes per second."
    )
    duplex_efficiency: Annotated[Number, Field(gt=0.0, le=1.0)] | None = Field(
        default=None, description="What remains of each direction when both are busy, as a fraction."
    )
    devices_per_root_port: Annotated[Positive, Field(le=64)] | None = Field(
        default=None, description="Devices that share the rates."
    )


class NodeProfileSpec(Fields):
    """Capacities and achieved rates of the node of the same name. Figures of devices are per device, all others per
    node. What is left out is taken from the node itself (capacities) or from the catalog (rates)."""

    device_kind: DeviceKind = Field(description="Kind of device that the figures are about.")
    num_devices: Annotated[Positive, Field(le=64)] | None = Field(
        default=None, description="Devices. Default: what the node can allocate."
    )
    device_memory: SomeBytes | None = Field(
        default=None, description="Usable memory of a device, bytes; on a CPU it is part of hostMemory."
    )
    bfloat16_flops_per_second: Rate | None = Field(default=None, description="Achieved rate of bfloat16 training.")
    float32_flops_per_second: Rate | None = Field(default=None, description="Achieved rate of float32 training.")
    device_bytes_per_second: Rate | None = Field(default=None, description="Device memory, bytes per second.")
    link: LinkRates = Field(default=LinkRates(), description="Between device and host.")
    interconnect_bytes_per_second: Rate | None = Field(
        default=None, description="Between devices of the node, one direction, bytes per second."
    )
    network_bytes_per_second: Rate | None = Field(
        default=None, description="Between nodes, per device, one direction, bytes per second."
    )
    num_cores: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Cores. Default: what the node can allocate."
    )
    host_memory: SomeBytes | None = Field(
        default=None, description="Host memory for pods, bytes. Default: what the node can allocate."
    )
    dram_bytes_per_second: Rate | None = Field(
        default=None, description="Host memory, cores and copies together, bytes per second."
    )
    cpu_bytes_per_second: Rate | None = Field(
        default=None, description="Host memory, what the cores alone can stream, bytes per second."
    )
    nvme_capacity: Quantity | None = Field(
        default=None, description="Space for spill, bytes. Default: what the node can allocate."
    )
    nvme_read_bytes_per_second: Rate | None = Field(default=None, description="Sequential reads, bytes per second.")
    nvme_write_bytes_per_second: Rate | None = Field(
        default=None, description="Sustained sequential writes, bytes per second."
    )
    bfloat16_values_per_second: Rate | None = Field(
        default=None,
        description="Values of bfloat16 training that operations other than matrix products read and write on the "
        "device, per second. Default: part of the FLOP rates.",
    )
    float32_values_per_second: Rate | None = Field(default=None, description="The same of float32 training.")
    operation_overhead_seconds: Overhead | None = Field(
        default=None, description="Fixed cost of handing one piece of work to a kernel or a lane. Default: none."
    )
    source: Literal["Probe", "Training", "User"] = Field(
        default="User", description="Who measured: the probe, a training run on the node, or whoever wrote the object."
    )
    measured_time: Moment | None = Field(default=None, description="When it was measured. Default: not known.")


class ObservedBytes(Written):
    """One tier of one rank."""

    planned: Quantity = Field(description="Peak that the plan predicted, bytes.")
    max: Quantity = Field(description="Largest peak of all attempts, bytes.")
    last: Quantity = Field(description="Peak of the last attempt, bytes.")
    recent: tuple[Quantity, ...] = Field(
        default=(), max_length=16, description="Peaks of the last attempts, newest last; at most 16."
    )
    p50: Quantity | None = Field(
        default=None, description="Weighted median of `recent`; a weight halves every four attempts."
    )
    p95: Quantity | None = Field(default=None, description="Weighted 95th percentile; corrects plans.")


class LowerBound(Written):
    """Memory that ran out: there was at least so much."""

    planned: Quantity = Field(description="What was predicted without corrections, bytes.")
    held: Quantity = Field(description="The limit that was reached, bytes.")


class LowerBounds(Written):
    """The largest in proportion of each kind; of attempts under this plan."""

    device: LowerBound | None = Field(default=None, description="DeviceOutOfMemory: the device budget of a rank.")
    host: LowerBound | None = Field(default=None, description="HostOutOfMemory: the host slab of a rank.")
    nvme: LowerBound | None = Field(default=None, description="SpillVolumeFull: the spill file of a rank.")
    pod: LowerBound | None = Field(default=None, description="OOMKilled: the memory limit of a pod.")


class ObservedPod(Written):
    """What pods under this plan took at most, by their cgroups; of runs that did all that a run does."""

    workload: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="", description="Hash of what a pod's memory depends on beside model and plan: data, image, overrides."
    )
    counted: Quantity = Field(description="What arithmetic gives such a pod, bytes.")
    attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(), max_length=16, description="Attempts of `recent`, as <job>-<attempt>."
    )
    recent: tuple[Quantity, ...] = Field(
        default=(), max_length=16, description="Peaks of the last attempts, newest last; at most 16."
    )
    p95: Quantity = Field(description="95 % of the weight of `recent`; an attempt counts half four later.")
    count: Count = Field(default=0, description="Runs that were seen.")


class ObservedTiers(Written):
    """Peak per tier, of the rank with the highest; tiers that the plan does not use are left out."""

    device: ObservedBytes | None = Field(default=None, description="Peak bytes on a device.")
    host: ObservedBytes | None = Field(default=None, description="Peak bytes in host memory, per rank.")
    nvme: ObservedBytes | None = Field(default=None, description="Peak bytes on NVMe, per rank.")


class MemoryProfileSpec(Written):
    """Which model and plan a profile is about."""

    fingerprint: Annotated[str, Field(min_length=16, max_length=16, pattern=r"^[0-9a-f]{16}$")] = Field(
        description="Hash of model, sequence, plan and number of ranks: what the bytes depend on."
    )
    model: Annotated[Text, Field(max_length=256)] = Field(default="", description="The model, for people.")
    model_fingerprint: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="", description="The same hash without the plan: profiles of one model correct each other's plans."
    )
    plan: Annotated[Text, Field(max_length=512)] = Field(default="", description="The plan, for people.")
    world_size: Annotated[Positive, Field(le=1 << 18)] = Field(default=1, description="Ranks.")


class MemoryProfileStatus(Written):
    """What was observed."""

    peaks: ObservedTiers = Field(default=ObservedTiers(), description="Bytes of a rank, per tier.")
    lower_bounds: LowerBounds = Field(default=LowerBounds(), description="What was not enough.")
    pod: ObservedPod | None = Field(default=None, description="What pods took: what their requests are lowered by.")
    count: Count = Field(default=0, description="Attempts that were observed.")
    attempt: Annotated[str, Field(max_length=63)] = Field(
        default="", description="The last of them, as <job>-<attempt>."
    )
    last_attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(), max_length=64, description="The last of each job, newest last; at most 64 jobs."
    )
    observed_time: Moment | None = Field(default=None, description="When it was last observed.")
    clamped: Flag = Field(
        default=False, description="A reported figure was implausible (not 0.25 to 4 times the planned) and was cut."
    )


class MemoryProfile(MemoryProfileSpec, MemoryProfileStatus):
    """What was observed of a model's memory under one plan: an object's spec and status. Written by the operator;
    outlives the jobs."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> MemoryProfile:
        """From an object of the API server. Raises ValidationError."""
        return cls.model_validate({**(found.get("spec") or {}), **(found.get("status") or {})})

    def part(self, of: type[Written]) -> dict[str, Any]:
        """The fields of its spec, or of its status, as JSON."""
        return self.model_dump(mode="json", include=set(of.model_fields), exclude_none=True)
