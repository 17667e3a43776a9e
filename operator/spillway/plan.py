"""MemoryPlan: the planner's decision, which the trainer executes. plan.json is its JSON form.

A plan is a value. It says where every byte lives (`bytes`), which technique does what (`optimizer`, `activations`,
`parameters`), what it should cost (`prediction`), and why (`reasons`, `alternatives`). The result of training never
depends on it, except through `micro_batch_size` (rounding).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spillway.units import format_rough_seconds, format_seconds

PLAN_VERSION: Literal[1] = 1
SHARE_TOLERANCE = 1e-6
"""Rounding error that a sum of shares may have."""
SLAB_SLACK = 1.05
"""A slab is larger than the plan's bytes by this factor, up to the budget, because extents are rounded up to pages and
fragment."""
SLAB_EXTRA_BYTES = 2**20
"""Bytes added to every slab in addition, for slabs of only a few pages."""

PLAN_AGAIN = (
    "the plan was made by another version of Spillway or for other code, or it was edited. Start spillway run again, "
    "which makes a new plan; in a cluster, create a new TrainingJob, with a trainer image of the operator's version "
    "(spec.pod.image)"
)
"""Ends the messages about a plan that this trainer cannot execute."""


class Tier(StrEnum):
    """Where bytes live, ordered from the tier nearest to the device to the farthest; code relies on this order."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Policy(StrEnum):
    """What happens to the activations that one segment saves for backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    NVME = "nvme"


Strategy = Literal["Ddp", "Fsdp", "Zero1", "Zero2", "Zero3"]
DeviceKind = Literal["Cpu", "Cuda"]
Order = Literal["InOrder", "WeightStationary"]
"""Order of a step's micro-batches: one at a time through the model, or all through one segment at a time."""
Overlap = Literal["None", "Forward", "Backward"]
"""The phase that the optimizer's update may overlap (see OptimizerPlan.overlap)."""
NCCL_BYTES = 2**30
"""Device memory of NCCL's own buffers on each rank, outside torch's allocator. Assumed; not measured yet."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TierBytes(Frozen):
    """Peak bytes of one rank in one tier, by purpose. `total` is compared with the budget."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0
    """Staging buffers, activations being copied, slots of streamed parameters and optimizer states, gradients being
    exchanged."""
    workspace: int = 0
    """Transient tensors of forward and backward that no technique owns: logits, temporaries of one block."""
    allocator: int = Field(default=0, exclude_if=lambda size: not size)
    """On Cuda, what torch's allocator takes in addition to the tensors: partly filled pages, holes between blocks,
    cuBLAS's workspaces, and NCCL's buffers."""
    correction: int = 0
    """Bytes added to the predictions in the other rows, because earlier runs of the model took more than predicted."""
    reserve: int = Field(default=0, exclude_if=lambda size: not size)
    """Kept free for activations that a live correction moves here from a tier whose volume others fill."""

    @property
    def predicted(self) -> int:
        """Bytes predicted by arithmetic alone, without correction and reserve; observed bytes are compared with
        this."""
        held = (self.parameters, self.gradients, self.optimizer_states, self.activations, self.buffers)
        return sum(held) + self.workspace + self.allocator

    @property
    def total(self) -> int:
        return self.predicted + self.correction + self.reserve


class OptimizerPlan(Frozen):
    """Settings of optimizer_offload: shares of the parameters by where their update runs; the shares sum to 1."""

    cpu_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """c: states in host memory, updated by CPU threads."""
    streamed_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """g: states in host memory, streamed to the device, updated there, streamed back."""
    resident_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """s: states on the device."""
    nvme_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """n: states on NVMe, read into host memory, updated by CPU threads, written back."""
    chunk_parameters: int = Field(default=1 << 20, ge=1)
    """Parameters per chunk, the unit of assignment, update and copy (4 Mi parameters = 16 MiB in float32)."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the update"""
    overlap: Overlap = "None"
    """What the update overlaps. Forward: the next forward, in which each segment waits only for its own parameters.
    Backward: also backward, during which some parameters are updated before it is known whether their update is
    valid."""
    speculative_parameters: int = Field(default=0, ge=0)
    """With overlap Backward, the most parameters that are updated during backward; they have a second set of states in
    host memory."""

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        total = self.cpu_share + self.streamed_share + self.resident_share + self.nvme_share
        if abs(total - 1.0) > SHARE_TOLERANCE:
            raise ValueError(
                f"cpu_share, streamed_share, resident_share and nvme_share sum to {total}; they must sum to 1"
            )
        return self

    @property
    def offloads(self) -> bool:
        return self.resident_share < 1.0

    @property
    def updated_by_cpu(self) -> float:
        """c + n, the share that CPU threads update: its accumulators are in host memory, and its new values are copied
        to the device or to the parameters' homes."""
        return self.cpu_share + self.nvme_share


class ActivationPlan(Frozen):
    """Settings of activation_spill: one policy per segment of the model, in forward order."""

    answers: tuple[Policy, ...] = ()
    """Empty: all activations are kept on the device."""
    minimum_bytes: int = Field(default=64 * 1024, ge=0)
    """Smaller storages are kept on the device, because moving them costs more than it frees."""
    window_bytes: int = Field(default=256 * 2**20, ge=0)
    """The most bytes of spilled segments that may be on the device while they are being copied out; at this limit
    forward waits."""
    num_io_threads: int = Field(default=2, ge=1)
    lean: bool = False
    """Whether blocks that are not recomputed drop the outputs of norms, activation functions and products, which
    backward rebuilds."""

    @property
    def uses(self) -> frozenset[Policy]:
        return frozenset(self.answers)


class ParameterPlan(Frozen):
    """Settings of model_spill: where each segment's parameters live, and how parameters that are not resident pass
    through the device."""

    homes: tuple[Tier, ...] = ()
    """One per segment in forward order: device = resident; host, nvme = streamed from there. Empty: all resident."""
    num_slots: int = Field(default=2, ge=1)
    """Device slots, each as large as the largest streamed segment; with two, one is filled while the other is used."""
    order: Order = "InOrder"
    """One micro-batch at a time through all segments, or all micro-batches through one segment at a time."""
    boundaries: Policy = Policy.KEEP
    """With order WeightStationary, where the tensors that segments hand on wait for backward (keep, host or nvme)."""

    @property
    def streams(self) -> bool:
        return any(home is not Tier.DEVICE for home in self.homes)


class Prediction(Frozen):
    """Predicted seconds of one optimizer step of one rank, and the resource that bounds it."""

    step_seconds: float
    calibrated: bool = False
    """Whether the rates were measured on this machine or node. Catalog rates may be wrong by a factor of several, for
    small models by a factor of a hundred."""
    compute_seconds: float
    """Forward, backward and recomputation."""
    exposed_optimizer_seconds: float
    """Update time that is not hidden behind compute."""
    exposed_transfer_seconds: float
    """Time of copies, disk and exchange between ranks that is not hidden behind compute."""
    bound_by: str
    """The resource that bounds the step: compute, H2D, D2H, DRAM, disk read, disk write, CPU update or network."""
    link_bytes: dict[str, int] = Field(default_factory=dict)
    """Bytes per step: h2d, d2h, dram, nvme_read, nvme_write."""
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds of a step by measured phase: forward, backward, wait, exchange, optimizer."""
    work: dict[str, dict[str, float]] = Field(default_factory=dict)
    """What each phase of a step has to do, in bytes, FLOPs and counts; calibration compares it with measured
    seconds."""
    nvme_read_bytes_per_second: float = 0.0
    """The rate that the plan assumed for this rank's share of the node's drives; 0: nothing is on NVMe, or the rate is
    unknown."""
    nvme_write_bytes_per_second: float = 0.0
    nvme_written_bytes_per_day: float = 0.0
    """Bytes written by this rank in the busiest day; a job shorter than a day writes only what its steps write."""
    drive_writes_per_day: float = 0.0
    """The same in multiples of the capacity of this rank's share of the node's drives."""
    years_until_rated_writes: float | None = None
    """Years of such writing until the drives reach their rated total; None: nothing is written, or no rating is
    known."""

    def format(self, seconds: float) -> str:
        """`seconds` of this prediction as text, with only the digits that are meaningful."""
        return format_seconds(seconds) if self.calibrated else format_rough_seconds(seconds)

    @property
    def step(self) -> str:
        """The seconds of a step as text: 1.35 s, or from catalog rates about 310 ms."""
        is_exact = self.calibrated or self.step_seconds < 1e-3  # "under 1 ms"
        return f"{'' if is_exact else 'about '}{self.format(self.step_seconds)}"


class Alternative(Frozen):
    """A candidate that was not chosen, and why."""

    summary: str
    step_seconds: float | None = None
    """None when it does not fit"""
    bound_by: str = ""
    """As in Prediction."""
    missing_bytes: dict[Tier, int] = Field(default_factory=dict)
    reason: str


class MemoryPlan(Frozen):
    version: Literal[1] = PLAN_VERSION
    job: str
    node: str
    """Catalog name of the node class, for example 8x-h100-80 or local."""
    device: DeviceKind = "Cpu"
    """Kind of device; the memory of a Cpu device is host memory."""
    mode: Literal["Auto", "Advise", "Disabled"]
    strategy: Strategy = "Ddp"
    world_size: int = 1
    micro_batch_size: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    """Per rank and step: globalBatchSize = micro_batch_size x num_micro_batches x world_size."""
    num_segments: int
    """Embedding + blocks + head."""
    optimizer: OptimizerPlan
    activations: ActivationPlan
    parameters: ParameterPlan = ParameterPlan()
    bytes: dict[Tier, TierBytes]
    budget: dict[Tier, int]
    unplanned_bytes: int = Field(default=0, ge=0)
    """Memory of a pod in addition to everything that is counted, because a pod of this model was killed for exceeding
    its memory."""
    process_bytes: int = Field(default=0, ge=0)
    """Host memory that all processes of a node need in addition to the plan: interpreters, libraries, page cache,
    checkpoint buffers."""
    machine_bytes: int = Field(default=0, ge=0)
    """Host memory that a node needs for its processes and for the plans of its ranks; a pod requests this much, unless
    evidence from earlier runs lowers it."""
    checkpoint_bytes: int = Field(default=0, ge=0)
    """Size of one checkpoint; 0: the plan is of a version that did not record it."""
    snapshot_bytes: int = Field(default=0, ge=0, exclude_if=lambda size: not size)
    """Host memory in addition to the slab, within the budget, for a copy of the states from which a checkpoint is
    written while training goes on. 0: training stops while a checkpoint is written."""
    prediction: Prediction
    reasons: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    members: tuple[MemberPlan, ...] = ()
    """Members of a sweep, in the order of spec.members. `bytes` and `budget` then cover all members together,
    `prediction` is a step of the slowest, and the other fields are those of the member that needs most of the device.
    Empty: one model."""
    turns: Turns | None = None
    """How members take turns; None: one model."""

    @property
    def turn_steps(self) -> int:
        """Steps of a member's turn; 0 = one model."""
        return 0 if self.turns is None else self.turns.num_steps

    @property
    def member_devices(self) -> int:
        """Devices of a node on which members train at the same time."""
        return 1 if self.turns is None else self.turns.num_devices

    @property
    def nccl_bytes(self) -> int:
        """The part of the device's planned bytes that torch's allocator must leave to NCCL."""
        return NCCL_BYTES * (self.device == "Cuda" and self.world_size > 1)

    @property
    def ranks(self) -> str:
        """For example: 3 ranks, Fsdp."""
        return f"{self.world_size} ranks, {self.strategy}" if self.world_size > 1 else "1 rank"

    @property
    def kept_strategy(self) -> Strategy | None:
        """The strategy that further attempts keep, because others add gradients in another order; None for one rank,
        which shards nothing."""
        return self.strategy if self.world_size > 1 else None

    @property
    def spills(self) -> bool:
        """True when any byte leaves the device."""
        return any(self.bytes[tier].total > 0 for tier in (Tier.HOST, Tier.NVME) if tier in self.bytes)

    def slab_bytes(self, tier: Tier) -> int:
        """Size of one rank's slab in `tier`: the plan's bytes with some slack for rounding, never above the budget."""
        planned = self.bytes[tier].total
        return min(int(planned * SLAB_SLACK) + SLAB_EXTRA_BYTES, self.budget[tier]) if planned else 0

    @property
    def movable_activations(self) -> int:
        """Bytes of one rank's activations on NVMe that a live correction may move to host memory."""
        if Policy.NVME not in self.activations.uses:
            return 0
        return min(self.bytes[Tier.NVME].activations, self.bytes[Tier.HOST].reserve)


class Turns(Frozen):
    """How the members of a sweep share its devices."""

    policy: Literal["Sequential", "RoundRobin", "LongestFirst"]
    """Sequential: one member after the other; RoundRobin: the member with the fewest turns; LongestFirst: on several
    devices, the member with the longest remaining time."""
    num_devices: int = Field(default=1, ge=1)
    """Devices of the node; each trains members of its own at the same time."""
    num_steps: int = Field(ge=1)
    """Steps per turn; a turn ends early when its member completes its last step or waits for a round of successive
    halving."""
    num_attached: int = Field(default=1, ge=1)
    """The most members per device whose memory is allocated at the same time; the others are parked or have not
    begun."""
    seconds: float
    """Predicted seconds until all members have trained all their steps, including parking."""
    bound_seconds: float
    """A lower bound on the seconds of any schedule."""


class MemberPlan(Frozen):
    """One member of a sweep."""

    name: str
    plan: MemoryPlan
    """Plan of the member as a run of its own, within the sweep's budgets minus the bytes of parked members. For members
    on a shared base, its bytes are those of all attached members together, and its prediction is the member's part of a
    round."""
    parked_bytes: int = Field(ge=0)
    """Bytes on NVMe while another member has its turn: masters and moments."""
    num_steps: int = Field(ge=1)
    parking_seconds: float = 0.0
    """Predicted seconds of parking per turn: writing the states out, reading them in, rebuilding the model and its
    memory."""
    base: str = ""
    """Name of the first member that shares this member's frozen base model, of which all attached members use one copy;
    empty: the member has a model of its own."""
    num_attached: int = Field(default=1, ge=1)
    """The most members on that base that are attached at the same time."""


MemoryPlan.model_rebuild()


class Infeasible(Frozen):
    """The planner's answer when nothing fits: a value, not an exception."""

    job: str
    node: str
    missing_bytes: dict[Tier, int]
    """Bytes that the nearest candidate lacks, per tier."""
    budget: dict[Tier, int]
    nearest: str
    """The nearest configuration that fits, as a sentence with the YAML fields to change."""
    segment: str = ""
    """A sentence about a segment that no device with this budget can hold; empty: streaming could help."""
    alternatives: tuple[Alternative, ...] = ()
