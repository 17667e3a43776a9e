"""NodeProfile and MemoryProfile: measurements of nodes and of models."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from spillway.api.field_types import Count, Fields, Flag, Number, Positive, Quantity, SomeBytes, Text, Written
from spillway.plan import DeviceKind

Rate = Annotated[Number, Field(ge=1e3, le=1e24)]
"""A rate per second. No hardware exceeds these bounds, and predictions stay finite within them."""
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
    """Rates of copies between device and host, one direction at a time."""

    h2d_bytes_per_second: Rate | None = Field(
        default=None,
        alias="h2dBytesPerSecond",
        description=(
            "Rate of copies from host memory to a device, bytes per second. Default: the value in Spillway's "
            "hardware catalog."
        ),
    )
    d2h_bytes_per_second: Rate | None = Field(
        default=None,
        alias="d2hBytesPerSecond",
        description=(
            "Rate of copies from a device to host memory, bytes per second. Default: the value in Spillway's "
            "hardware catalog."
        ),
    )
    duplex_efficiency: Annotated[Number, Field(gt=0.0, le=1.0)] | None = Field(
        default=None,
        description=(
            "Fraction of its rate that each direction of the link keeps when both directions are busy. Default: "
            "the value in Spillway's hardware catalog."
        ),
    )
    devices_per_root_port: Annotated[Positive, Field(le=64)] | None = Field(
        default=None,
        description=(
            "Number of devices that share h2dBytesPerSecond and d2hBytesPerSecond. Default: the value in "
            "Spillway's hardware catalog."
        ),
    )


class NodeProfileSpec(Fields):
    """Measured capacities and rates. Figures of devices are per device, all others per node. Capacities that are left
    out are taken from the node itself, rates from Spillway's hardware catalog."""

    device_kind: DeviceKind = Field(description="Kind of device that was measured.")
    num_devices: Annotated[Positive, Field(le=64)] | None = Field(
        default=None, description="Number of devices of the node. Default: the node's allocatable devices."
    )
    device_memory: SomeBytes | None = Field(
        default=None, description="Usable memory of each device, bytes. On a CPU node it is part of hostMemory."
    )
    bfloat16_flops_per_second: Rate | None = Field(
        default=None,
        description=(
            "FLOP/s that bfloat16 training reaches on one device (on a CPU node: on all cores together). Default: "
            "the value in Spillway's hardware catalog."
        ),
    )
    float32_flops_per_second: Rate | None = Field(
        default=None,
        description=(
            "FLOP/s that float32 training reaches on one device (on a CPU node: on all cores together). Default: "
            "the value in Spillway's hardware catalog."
        ),
    )
    device_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate at which a device reads and writes its own memory, bytes per second. Default: the value in "
            "Spillway's hardware catalog."
        ),
    )
    link: LinkRates = Field(default=LinkRates(), description="Rates of copies between the devices and host memory.")
    interconnect_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate between devices of the node, per device and direction, bytes per second. Default: the value in "
            "Spillway's hardware catalog."
        ),
    )
    network_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate between this node and others, per device and direction, bytes per second. Default: the value in "
            "Spillway's hardware catalog."
        ),
    )
    num_cores: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Number of cores of the node. Default: the node's allocatable cores."
    )
    host_memory: SomeBytes | None = Field(
        default=None, description="Host memory of the node for pods, bytes. Default: the node's allocatable memory."
    )
    dram_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate at which the node's cores and the copies to and from devices together read and write host "
            "memory, bytes per second. Default: the value in Spillway's hardware catalog."
        ),
    )
    cpu_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate at which the node's cores alone, without copies to and from devices, read and write host "
            "memory, bytes per second. Default: the value in Spillway's hardware catalog."
        ),
    )
    nvme_capacity: Quantity | None = Field(
        default=None,
        description="Disk space of the node for spilling, bytes. Default: the node's allocatable ephemeral storage.",
    )
    nvme_read_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Rate of sequential reads from all NVMe drives of the node together, bytes per second. Default: the "
            "value in Spillway's hardware catalog."
        ),
    )
    nvme_write_bytes_per_second: Rate | None = Field(
        default=None,
        description=(
            "Sustained rate of sequential writes to all NVMe drives of the node together, bytes per second. "
            "Default: the value in Spillway's hardware catalog."
        ),
    )
    bfloat16_values_per_second: Rate | None = Field(
        default=None,
        description=(
            "Number of values per second that one device reads and writes in bfloat16 training, in operations "
            "other than matrix products. Default: none; bfloat16FlopsPerSecond then includes the time of these "
            "operations."
        ),
    )
    float32_values_per_second: Rate | None = Field(
        default=None,
        description=(
            "Number of values per second that one device reads and writes in float32 training, in operations "
            "other than matrix products. Default: none; float32FlopsPerSecond then includes the time of these "
            "operations."
        ),
    )
    operation_overhead_seconds: Overhead | None = Field(
        default=None,
        description=(
            "Fixed cost of each operation, in seconds: the time to hand one piece of work to a kernel or to a "
            "copy queue. Default: none; the FLOP rates then include it."
        ),
    )
    source: Literal["Probe", "Training", "User"] = Field(
        default="User",
        description=(
            "Where the figures come from. Probe: `spillway calibrate` measured them. Training: they were "
            "corrected by a training run. User: whoever wrote the object set them."
        ),
    )
    measured_time: Moment | None = Field(
        default=None, description="When the figures were measured. Default: not known."
    )


class ObservedBytes(Written):
    """Observed peak bytes of one tier on one rank."""

    planned: Quantity = Field(description="Peak that the plan predicted, bytes.")
    max: Quantity = Field(description="Largest peak of all observed attempts, bytes.")
    last: Quantity = Field(description="Peak of the attempt that was observed last, bytes.")
    recent: tuple[Quantity, ...] = Field(
        default=(),
        max_length=16,
        description="Peaks of the attempts that were observed last, bytes, newest last; at most 16.",
    )
    p50: Quantity | None = Field(
        default=None,
        description=(
            "Weighted median of the peaks in `recent`, bytes. The weight of a peak halves with every four later "
            "attempts."
        ),
    )
    p95: Quantity | None = Field(
        default=None,
        description=(
            "Weighted 95th percentile of the peaks in `recent`, bytes; it corrects the predictions of later "
            "plans. The weight of a peak halves with every four later attempts."
        ),
    )


class LowerBound(Written):
    """Memory that ran out: an attempt needed more than the limit that it reached."""

    planned: Quantity = Field(
        description="Bytes that were predicted for this memory, without the corrections that later observations bring."
    )
    held: Quantity = Field(description="Limit at which this memory ran out, bytes. The attempt needed more.")


class LowerBounds(Written):
    """For each kind of memory, the attempt under this plan with the largest limit in proportion to its prediction."""

    device: LowerBound | None = Field(
        default=None,
        description=(
            "An attempt ran out of device memory (DeviceOutOfMemory). planned is what was predicted for a rank "
            "(training process), held is the rank's device budget, which was not enough. If this happened to "
            "several attempts, they are those of the attempt with the largest ratio of held to planned."
        ),
    )
    host: LowerBound | None = Field(
        default=None,
        description=(
            "An attempt ran out of host memory (HostOutOfMemory). planned is what was predicted for a rank "
            "(training process), held is the host memory that the rank got, which was not enough. If this "
            "happened to several attempts, they are those of the attempt with the largest ratio of held to "
            "planned."
        ),
    )
    nvme: LowerBound | None = Field(
        default=None,
        description=(
            "An attempt ran out of space for spilling (SpillVolumeFull). planned is what was predicted for a rank "
            "(training process), held is the size of the rank's spill file, which was not enough. If this "
            "happened to several attempts, they are those of the attempt with the largest ratio of held to "
            "planned."
        ),
    )
    pod: LowerBound | None = Field(
        default=None,
        description=(
            "A pod of an attempt reached its memory limit and was killed (OOMKilled). planned is what was "
            "predicted for the pod, held is the pod's memory limit, which was not enough. If this happened to "
            "several attempts, they are those of the attempt with the largest ratio of held to planned."
        ),
    )


class ObservedPod(Written):
    """Peak memory of pods under this plan, from their cgroups. Only pods that did all the work of a run count."""

    workload: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="",
        description=(
            "Hash of what a pod's memory depends on in addition to model and plan, such as data, trainer image "
            "and number of threads. When it changes, earlier observations are dropped."
        ),
    )
    counted: Quantity = Field(
        description="Memory that the operator computes for a pod with this model and plan, without observations, bytes."
    )
    attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(),
        max_length=16,
        description=(
            "Attempts whose pods had the peaks in status.pod.recent, in the same order, each as <job>-<number of "
            "the attempt>."
        ),
    )
    recent: tuple[Quantity, ...] = Field(
        default=(),
        max_length=16,
        description="Peak memory of the pods of the last runs, bytes, newest last; at most 16.",
    )
    p95: Quantity = Field(
        description=(
            "Weighted 95th percentile of the peaks in status.pod.recent, bytes; memory requests of later pods are "
            "based on it. The weight of a peak halves with every four later runs."
        )
    )
    count: Count = Field(default=0, description="Number of runs whose pods were observed.")


class ObservedTiers(Written):
    """Peak per tier, of the rank with the highest; tiers that the plan does not use are left out."""

    device: ObservedBytes | None = Field(
        default=None, description="Peak bytes of a rank (training process) in device memory."
    )
    host: ObservedBytes | None = Field(
        default=None, description="Peak bytes of a rank (training process) in host memory."
    )
    nvme: ObservedBytes | None = Field(default=None, description="Peak bytes of a rank (training process) on NVMe.")


class MemoryProfileSpec(Written):
    """Model and plan whose memory use the profile describes."""

    fingerprint: Annotated[str, Field(min_length=16, max_length=16, pattern=r"^[0-9a-f]{16}$")] = Field(
        description=(
            "Hash of all that a rank's memory depends on: model, sequence length, micro-batch size, number of "
            "ranks, and plan."
        )
    )
    model: Annotated[Text, Field(max_length=256)] = Field(default="", description="The model in words, for people.")
    model_fingerprint: Annotated[str, Field(max_length=16, pattern=r"^([0-9a-f]{16})?$")] = Field(
        default="",
        description=(
            "Hash of the model, sequence length, number of ranks, kind of device and optimizer, but not of the "
            "plan. Profiles with the same value correct each other's plans."
        ),
    )
    plan: Annotated[Text, Field(max_length=512)] = Field(default="", description="The plan in words, for people.")
    world_size: Annotated[Positive, Field(le=1 << 18)] = Field(
        default=1, description="Number of ranks (training processes)."
    )


class MemoryProfileStatus(Written):
    """Memory use that was observed in attempts. An attempt is one start of a job's pods."""

    peaks: ObservedTiers = Field(
        default=ObservedTiers(),
        description="Observed peak bytes per tier, of the rank (training process) with the highest.",
    )
    lower_bounds: LowerBounds = Field(
        default=LowerBounds(),
        description=(
            "For each kind of memory that an attempt ran out of: the limit that was not enough, and the prediction."
        ),
    )
    pod: ObservedPod | None = Field(
        default=None, description="Observed memory use of pods. It can lower the memory requests of later pods."
    )
    count: Count = Field(default=0, description="Number of attempts that were observed.")
    attempt: Annotated[str, Field(max_length=63)] = Field(
        default="", description="Attempt that was observed last, as <job>-<number of the attempt>."
    )
    last_attempts: tuple[Annotated[str, Field(max_length=63)], ...] = Field(
        default=(),
        max_length=64,
        description=(
            "For each job the attempt that was observed last, as <job>-<number of the attempt>, newest last; at "
            "most 64 jobs."
        ),
    )
    observed_time: Moment | None = Field(default=None, description="When an attempt was last observed.")
    clamped: Flag = Field(
        default=False,
        description=(
            "Whether any reported figure was implausible (outside 0.25 to 4 times the planned figure, or more "
            "than the whole pod used) and was cut to the nearest plausible value."
        ),
    )


class MemoryProfile(MemoryProfileSpec, MemoryProfileStatus):
    """Observed memory use of a model under one plan: spec and status of an object together. The operator writes it; it
    outlives the jobs."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> MemoryProfile:
        """Reads an object of the API server. Raises ValidationError."""
        return cls.model_validate({**(found.get("spec") or {}), **(found.get("status") or {})})

    def part(self, of: type[Written]) -> dict[str, Any]:
        """The fields of `of`, the type of its spec or of its status, as JSON."""
        return self.model_dump(mode="json", include=set(of.model_fields), exclude_none=True)
