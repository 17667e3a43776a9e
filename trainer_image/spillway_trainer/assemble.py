"""MemoryPlan -> model, optimizer, hooks: the one place that branches on the plan.

ledger, slabs, lanes   what the plan allows in each tier
model                  unchanged; parameters of its streamed segments never get memory on the device; its segments are
                       wrapped to fork the random state and, unless Disabled, to handle saved tensors
optimizer              resident, or offloaded with the plan's shares and the homes of streamed parameters
hooks                  the optimizer takes every parameter's gradient as soon as it is complete, and every segment's
                       forward waits for the updates of its parameters
order                  one micro-batch after another, or one segment after another
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from spillway.api.job_file import JobFile
from spillway.errors import SpillwayError, UserError
from spillway.plan import PLAN_AGAIN, SHARE_TOLERANCE, MemoryPlan, Policy, Tier
from spillway.planning.workload import LEAN_STRATEGIES, PAGE_BYTES

from . import activation_spill, config, device_check, model_spill, running_statistics
from .cgroup import spare_host_bytes
from .kernels import dispatch as kernels
from .kernels import native
from .models.build import build_model
from .models.chain import Chain, allocate, whole_shape
from .optimizer.plain import Hyperparameters, ResidentOptimizer, StepOptimizer
from .optimizer_offload import OptimizerOffload
from .parallel import fsdp, whole_parameters
from .parallel import run as zero
from .parallel.backward_exchange import BackwardExchange
from .ranks import NO_EXCHANGE, ONE_RANK, Exchange, Ranks
from .resident_parameters import ResidentParameters
from .saved_tensors import ParameterSource
from .segments import Position, Ready, Residence, wrap_segments
from .tiers import cuda
from .tiers.cuda_lanes import CudaLanes
from .tiers.device_ledger import DeviceLedger
from .tiers.encrypted_file import encrypted
from .tiers.host_slab import HostSlab
from .tiers.lanes import CpuLanes, Lanes
from .tiers.nvme_slab import FAULT_KINDS, NvmeSlab, OpenFile, PlannedRates
from .tiers.spill_file import SpillFile
from .trainer import MicroBatchOrder, in_order

CPU = torch.device("cpu")
EXCHANGE = "gradient exchange"
FROZEN = "frozen."
"""Prefix of the states of frozen parameters: these are only their values, and no checkpoint holds them."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory that a run may use."""

    ledger: DeviceLedger
    host: HostSlab
    nvme: NvmeSlab | None
    lanes: Lanes
    device: torch.device = CPU
    nccl_bytes: int = 0
    """Device memory of NCCL, which torch's allocator does not count."""
    parked_bytes: int = 0
    """Bytes that other members of a sweep hold on NVMe."""
    parked_peak_bytes: int = 0
    """Highest `parked_bytes` since the last turn began."""

    def held_bytes(self) -> dict[str, int]:
        nvme = self.parked_bytes + (self.nvme.held_bytes if self.nvme else 0)
        return {Tier.DEVICE: self.ledger.held_bytes, Tier.HOST: self.host.held_bytes, Tier.NVME: nvme}

    def peak_bytes(self) -> dict[str, int]:
        """Returns the highest bytes held since the last call, by tier; on a CUDA device, no less than the peak of
        torch's allocator."""
        nvme = max(self.parked_peak_bytes, self.parked_bytes + (self.nvme.peak_bytes if self.nvme else 0))
        peaks: dict[str, int] = {Tier.DEVICE: self.ledger.peak_bytes, Tier.HOST: self.host.peak_bytes, Tier.NVME: nvme}
        for tier in (self.ledger, self.host, self.nvme):
            if tier is not None:
                tier.reset_peak()
        if self.device.type == "cuda":
            peaks[Tier.DEVICE] = max(peaks[Tier.DEVICE], cuda.peak_bytes(self.device) + self.nccl_bytes)
        return peaks

    def allocator_retries(self) -> int:
        """Returns the retries of the device's allocator since the last call."""
        return cuda.allocator_retries(self.device) if self.device.type == "cuda" else 0

    def exchange_buffer(self, nbytes: int) -> Tensor:
        """Allocates the buffer for exchanging gradients, on the device."""
        self.ledger.charge(EXCHANGE, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def cause_of(self, error: SpillwayError) -> SpillwayError:
        """Returns `error`, which says that memory ran out, or the failure of a spill device that made bytes stay in
        that memory."""
        if self.nvme is None or self.nvme.first_failure is None:
            return error
        return self.nvme.no_room_left(f"all that the step needs: {error}")

    def close(self) -> None:
        self.lanes.close()
        if self.nvme is not None:
            self.nvme.close()


@dataclass(frozen=True, slots=True)
class Base:
    """What the assemblies of several models share: frozen parameters and the tiers (sweep/shared_base.py)."""

    tiers: Tiers
    streaming: model_spill.ModelSpill | None
    """Streams the frozen parameters of streamed segments; None if all of them stay on the device."""
    frozen: Mapping[str, nn.Parameter]
    """By name. Every model has these same objects, so that all models see the slot that one of them has loaded."""

    @property
    def streamed(self) -> frozenset[str]:
        return self.streaming.streamed if self.streaming else frozenset()


@dataclass(frozen=True, slots=True)
class Assembly:
    """The assembled run: a model to call, an optimizer to step, and the techniques' part of the step loop."""

    model: Chain
    optimizer: StepOptimizer
    position: Position
    tiers: Tiers
    spill: activation_spill.ActivationSpill | None
    """None in mode Disabled, which has no saved-tensor hooks."""
    streaming: model_spill.ModelSpill | None
    """None if the parameters of every segment stay on the device."""
    residence: Residence
    order: MicroBatchOrder
    divided: zero.DividedModel | None = None
    """None if every rank has the whole model."""

    @property
    def called(self) -> nn.Module:
        """The module that is called with a micro-batch."""
        return self.model if self.divided is None else self.divided.engine

    @property
    def gathers(self) -> bool:
        """Whether every forward needs the parameters of all ranks."""
        return self.divided is not None and self.divided.parameters is not None

    def exchange(self, ranks: Ranks, wire: torch.dtype, num_threads: int, num_micro_batches: int) -> Exchange:
        """Returns the sum over `ranks` of gradients that are sent as `wire`, and allocates its buffers. It runs during
        backward, which calls it after the hooks of `send_gradients`. A sharded model sums its own gradients."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        sizes = {name: parameter.numel() for name, parameter in trained.items()}
        total = None
        if self.divided is None:
            tiers, num_values = self.tiers, sum(sizes.values())
            total = ranks.gradient_sum(num_values, wire, tiers.exchange_buffer, num_threads, tiers.device)
        if total is None:
            return NO_EXCHANGE
        exchange = BackwardExchange(total, self.optimizer, self.tiers.lanes, sizes, num_micro_batches)
        for name, parameter in trained.items():
            hook = partial(_taken, weakref.ref(exchange), name)  # weak, as in send_gradients
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return exchange

    def tell_choices(self, tell: Callable[[activation_spill.Chosen], None]) -> None:
        """From now on, `tell` is called with each decision about a single saved storage."""
        if self.spill is not None:
            self.spill.tell = tell

    def start_backward(self) -> None:
        if self.tiers.device.type == "cuda" and isinstance(self.optimizer, OptimizerOffload):
            self.optimizer.start_backward()
        if self.spill is not None:
            self.spill.start_backward()

    def end_step(self) -> None:
        if self.spill is not None:
            self.spill.end_step()
        native.mark_tensor_pool()

    def held_bytes(self) -> dict[str, int]:
        return self.tiers.held_bytes()

    def peak_bytes(self) -> dict[str, int]:
        return self.tiers.peak_bytes()

    def allocator_retries(self) -> int:
        return self.tiers.allocator_retries()

    def moved_bytes(self) -> dict[str, int]:
        return self.tiers.lanes.moved_bytes()

    def waited_seconds(self) -> float:
        return self.tiers.lanes.stalled_seconds()

    def busy_seconds(self) -> dict[str, float]:
        return self.tiers.lanes.busy_seconds()

    def spill_faults(self) -> dict[str, int]:
        """Returns how many faults of spill devices the run has survived so far, by kind. Kinds without a fault are
        included, so that a rate over time has a first value."""
        return dict.fromkeys(FAULT_KINDS, 0) | (self.tiers.nvme.faults() if self.tiers.nvme else {})

    def spill_file_bytes(self) -> int:
        """Returns the current size of the spill files on all volumes."""
        return self.tiers.nvme.capacity_bytes if self.tiers.nvme else 0

    def io_backend(self) -> str:
        return self.tiers.nvme.backend if self.tiers.nvme else "none"

    @property
    def has_frozen(self) -> bool:
        """Whether the model has parameters that are not trained."""
        return any(not parameter.requires_grad for parameter in self.model.parameters())

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that have states of their own, that is, of all but frozen ones and tied aliases."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return {name: whole_shape(p) for name, p in trained if name not in self.model.tied}

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yields everything that a checkpoint holds: the optimizer's states and running statistics."""
        yield from self.optimizer.state()
        yield from running_statistics.states(self.model)

    def load(self, name: str, value: Tensor) -> None:
        """Loads one state: "frozen.<parameter>" goes to where the parameter is held, "buffer.<name>" to a running
        statistic, and everything else to the optimizer."""
        if name.startswith(running_statistics.PREFIX):
            running_statistics.load(self.model, name, value)
            return
        if not name.startswith(FROZEN):
            self.optimizer.load(name, value)
            return
        name = name.removeprefix(FROZEN)
        parameter = self.model.get_parameter(name)
        if self.divided is not None:
            self.divided.optimizer.set(name, value)
        elif self.streaming is not None and name in self.streaming.streamed:
            self.streaming.set(name, value.reshape(-1).to(parameter.dtype))
        else:
            parameter.data.copy_(value)


def assemble(
    job: JobFile,
    plan: MemoryPlan,
    model: Chain | None = None,
    ranks: Ranks = ONE_RANK,
    device: torch.device = CPU,
    base: Base | None = None,
) -> Assembly:
    """Build everything that `plan` asks for. Parameters are allocated but not filled: `fill` or a checkpoint does that.
    `model`: the job's model, without memory; None: build it. `ranks`: they divide the model if the strategy says so.
    `device`: where forward runs; it is prepared already (tiers.cuda.prepare). `base`: frozen parameters that exist
    already, with their tiers.

    Raises DeviceOutOfMemory, HostOutOfMemory or SpillVolumeFull before the first step if a tier is too small.
    """
    reject_lean(plan)
    model = model or build_model(job.spec, job.claims)
    reject_divided_statistics(plan, model)
    settings = config.hyperparameters(job.spec, model)
    tiers = make_tiers(job, plan, device) if base is None else base.tiers
    if plan.strategy != "Ddp":
        return assemble_divided(job, plan, model, settings, ranks, tiers)
    if base is None:
        streaming = model_spill.build(
            plan.parameters, model, plan.optimizer.chunk_parameters, tiers.lanes, tiers.nvme, device
        )
        streamed = streaming.streamed if streaming else frozenset[str]()
        allocate_resident(model, streamed, tiers.ledger, device)
        tiers.ledger.charge("workspace", plan.bytes[Tier.DEVICE].workspace)
        tiers.ledger.charge("allocator", plan.bytes[Tier.DEVICE].allocator)
    else:
        streaming = base.streaming
        allocate_resident(model, base.frozen, tiers.ledger, device)
    position = Position(job.spec.training.seed)
    optimizer = make_optimizer(settings, plan, model, streaming if base is None else None, tiers)
    send_gradients(model, optimizer)
    parameters = parameter_source(model, streaming)
    ready = updated(model, optimizer)
    reserve(plan, device)
    spill = None
    order: MicroBatchOrder = in_order
    if plan.mode == "Disabled":
        reject_streaming(plan)
        wrap_segments(model.segments, position, None, autocast=model.autocast, ready=ready)
    else:
        spill, order = attach(plan, model, parameters, tiers, ranks)
        wrap_segments(model.segments, position, spill.hook, autocast=model.autocast, residence=parameters, ready=ready)
    return Assembly(model, optimizer, position, tiers, spill, streaming, parameters, order)


def assemble_divided(
    job: JobFile, plan: MemoryPlan, model: Chain, settings: Hyperparameters, ranks: Ranks, tiers: Tiers
) -> Assembly:
    """Like `assemble`, for a model whose states, gradients or parameters are sharded among `ranks` (parallel/)."""

    def of_pieces(pieces: list[tuple[str, nn.Parameter]]) -> OptimizerOffload | ResidentOptimizer:
        return optimizer_of(pieces, model.tied, settings, plan, tiers, gradient_dtype=torch.float32)

    wire = config.gradient_wire(job.spec)
    if plan.strategy == "Fsdp":
        divide = fsdp.divide
    else:
        divide = whole_parameters.divide if tiers.device.type == "cuda" else zero.divide
    divided = divide(plan, model, ranks.world, settings, tiers, of_pieces, wire)
    tiers.ledger.charge("workspace", plan.bytes[Tier.DEVICE].workspace)
    tiers.ledger.charge("allocator", plan.bytes[Tier.DEVICE].allocator)
    reserve(plan, tiers.device)
    position, parameters = Position(job.spec.training.seed), divided.parameters or parameter_source(model, None)
    spill, ready = None, divided.ready
    if plan.mode == "Disabled":
        wrap_segments(model.segments, position, None, autocast=model.autocast, ready=ready)
    else:
        spill, _ = attach(plan, model, parameters, tiers, ranks)
        wrap_segments(model.segments, position, spill.hook, autocast=model.autocast, residence=parameters, ready=ready)
    return Assembly(model, divided.optimizer, position, tiers, spill, None, parameters, divided.order, divided)


def reserve(plan: MemoryPlan, device: torch.device) -> None:
    """Takes the planned memory of a CUDA device now."""
    if device.type == "cuda":
        cuda.reserve(device, min(plan.bytes[Tier.DEVICE].total, plan.budget[Tier.DEVICE]) - plan.nccl_bytes)


def parameter_source(
    model: Chain, streaming: model_spill.ModelSpill | None
) -> ResidentParameters | model_spill.StreamedParameters:
    """Returns what finds parameters among saved tensors. Buffers are always resident."""
    streamed = streaming.streamed if streaming else frozenset[str]()
    own = [(name, p) for name, p in model.named_parameters() if name not in streamed]
    resident = ResidentParameters([*own, *model.named_buffers()])
    return streaming.source(resident) if streaming else resident


def attach(
    plan: MemoryPlan, model: Chain, parameters: ParameterSource, tiers: Tiers, ranks: Ranks
) -> tuple[activation_spill.ActivationSpill, MicroBatchOrder]:
    """Builds the saved-tensor hooks, and the order of micro-batches that goes with them."""
    names = [name for name, _ in model.segments]
    stationary, boundaries = plan.parameters.order == "WeightStationary", plan.parameters.boundaries
    times_passes, may_move = tiers.device.type == "cpu", plan.movable_activations > 0
    spill = activation_spill.build(
        plan.activations,
        names,
        parameters,
        tiers.lanes,
        tiers.ledger,
        tiers.nvme,
        inputs=boundaries if stationary else Policy.KEEP,
        # No Chooser in segment order, in which no pass is one forward. On a GPU it does not time passes: launch times
        # do not tell when kernels run.
        choosing=None
        if stationary or not (times_passes or may_move)
        else partial(
            activation_spill.Chooser,
            limits=storage_limits(plan),
            lanes=tiers.lanes,
            agree=ranks.gather,
            watches=times_passes,
        ),
        may_move=may_move,
    )
    if not stationary:
        return spill, in_order
    held = model_spill.Boundaries(boundaries, spill.store, tiers.ledger)
    return spill, model_spill.WeightStationary(spill.hook, held)


def storage_limits(plan: MemoryPlan) -> activation_spill.PolicyLimits:
    """Returns what the plan allows the storages of segments that move: the plan's bytes of each tier, and the part of
    the spill file that no other technique uses."""
    device, host, nvme = (plan.bytes[tier] for tier in Tier)
    num_moving = sum(answer in (Policy.HOST, Policy.NVME) for answer in plan.activations.answers)
    moved_bytes = host.activations + nvme.activations
    return activation_spill.PolicyLimits(
        device_bytes=device.activations + device.buffers,
        kept_bytes=0,
        host_bytes=max(0, host.activations - PAGE_BYTES * num_moving),
        nvme_bytes=max(0, plan.slab_bytes(Tier.NVME) - (nvme.predicted - nvme.activations)),
        window_bytes=plan.activations.window_bytes,
        ahead_bytes=moved_bytes // max(1, num_moving),
        is_staged=plan.device != "Cpu",
    )


def reject_divided_statistics(plan: MemoryPlan, model: Chain) -> None:
    """Raises UserError if several ranks would each have running statistics of only their own micro-batches."""
    if plan.world_size > 1 and (found := running_statistics.buffers(model)):
        raise UserError(
            f"spec.model: {next(iter(found))} is a running statistic of a batch norm, and the {plan.world_size} ranks "
            "(training processes) would each compute other values from their own micro-batches; train with one rank, "
            "or use a norm without running statistics (track_running_stats=False, or GroupNorm)"
        )


def reject_lean(plan: MemoryPlan) -> None:
    """Raises UserError if the plan rebuilds activations in backward, but in a mode or with a strategy that cannot do
    so."""
    if not plan.activations.lean:
        return
    if plan.mode == "Disabled":
        why = "its memory.mode is Disabled, which keeps all tensors that autograd saves"
    elif plan.strategy not in LEAN_STRATEGIES:
        why = (
            f"with strategy {plan.strategy}, a rank (training process) has the whole parameters of only one segment "
            "(group of layers) at a time"
        )
    else:
        return
    raise UserError(
        f"the plan of {plan.job} recomputes the outputs of norms and activation functions in backward, but {why}; "
        f"{PLAN_AGAIN}"
    )


def reject_streaming(plan: MemoryPlan) -> None:
    """Raises UserError if a plan of mode Disabled streams parameters: this mode has no saved-tensor hooks, and without
    them no weight may leave the device."""
    if plan.parameters.streams or plan.parameters.order != "InOrder":
        raise UserError(
            f"the plan of {plan.job} has memory.mode Disabled, but it streams parameters, or runs all micro-batches "
            f"through one segment (group of layers) before the next segment, which Disabled cannot do; {PLAN_AGAIN}"
        )


def make_tiers(job: JobFile, plan: MemoryPlan, device: torch.device) -> Tiers:
    ledger = DeviceLedger(plan.budget[Tier.DEVICE], plan.bytes[Tier.DEVICE].total)
    spare = partial(spare_host_bytes, plan, job.ranks_per_node, Path("/"))
    host = HostSlab(plan.slab_bytes(Tier.HOST), spare, plan.bytes[Tier.HOST].total)
    nvme = None
    if uses_nvme(plan):
        open_file: OpenFile = partial(SpillFile, listed=job.spill_is_listed)
        nvme = NvmeSlab(
            [Path(directory) for directory in job.spill_directories],
            plan.slab_bytes(Tier.NVME),
            plan.activations.num_io_threads,
            open_file=open_file if job.spec.spill.encryption == "None" else encrypted(open_file),
            host=host,
            tell=partial(print, flush=True),
            planned=PlannedRates(
                plan.prediction.nvme_read_bytes_per_second, plan.prediction.nvme_write_bytes_per_second
            ),
        )
    if device.type == "cpu":
        return Tiers(ledger, host, nvme, CpuLanes(host, ledger))
    return Tiers(ledger, host, nvme, CudaLanes(host, ledger, cuda.CudaStreams(device)), device, plan.nccl_bytes)


def check_device(device: torch.device, model: Chain, settings: Hyperparameters) -> None:
    """Checks every lane, and the kernels that train `model`, with lanes and memory of its own. Raises DeviceFault."""
    if device.type == "cpu":
        return
    with device_check.faults():
        host, ledger = HostSlab(device_check.HOST_BYTES), DeviceLedger(None)
        lanes = CudaLanes(host, ledger, cuda.CudaStreams(device))
        try:
            dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
            device_check.check(lanes, device, settings, dtypes)
        finally:
            lanes.close()


def uses_nvme(plan: MemoryPlan) -> bool:
    return (
        Policy.NVME in plan.activations.uses
        or Tier.NVME in plan.parameters.homes
        or plan.parameters.boundaries is Policy.NVME
        or plan.optimizer.nvme_share > 0.0
    )


def allocate_resident(model: Chain, streamed: Collection[str], ledger: DeviceLedger, device: torch.device) -> None:
    """Allocates every parameter that stays on the device, and charges the ledger; tied parameters share storage."""
    own = [p for name, p in model.named_parameters() if name not in model.tied and name not in streamed]
    ledger.charge("parameters", sum(p.numel() * p.element_size() for p in own))
    allocate(model, device)
    model.tie()


def make_optimizer(
    settings: Hyperparameters,
    plan: MemoryPlan,
    model: Chain,
    streaming: model_spill.ModelSpill | None,
    tiers: Tiers,
) -> StepOptimizer:
    parameters = list(model.named_parameters())
    if streaming is not None:
        check_cpu_share(plan, model, streaming.streamed)
    return optimizer_of(parameters, model.tied, settings, plan, tiers, homes=streaming)


def optimizer_of(
    parameters: Sequence[tuple[str, nn.Parameter]],
    tied: Mapping[str, str],
    settings: Hyperparameters,
    plan: MemoryPlan,
    tiers: Tiers,
    *,
    homes: model_spill.ModelSpill | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> OptimizerOffload | ResidentOptimizer:
    """Returns the optimizer that the plan asks for, with these parameters."""
    if plan.optimizer.offloads:
        return OptimizerOffload(
            parameters,
            tied,
            settings,
            plan.optimizer,
            tiers.lanes,
            tiers.ledger,
            homes=homes,
            gradient_dtype=gradient_dtype,
            nvme=tiers.nvme,
            in_place=all(parameter.device.type in ("cpu", "meta") for _, parameter in parameters),
            loads_masters=True,
        )
    update = partial(kernels.update, num_threads=plan.optimizer.num_threads)
    return ResidentOptimizer(parameters, tied, settings, tiers.ledger, update, gradient_dtype)


def check_cpu_share(plan: MemoryPlan, model: Chain, streamed: Collection[str]) -> None:
    """Raises UserError if the CPU does not update all streamed parameters: their new values are written to their homes,
    not to the device."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in model.tied}
    fraction = sum(size for name, size in sizes.items() if name in streamed) / max(1, sum(sizes.values()))
    if plan.optimizer.updated_by_cpu < fraction - SHARE_TOLERANCE:
        raise UserError(
            f"the plan of {plan.job} streams a share of {fraction:.4f} of the trained parameters, but lets the CPU "
            f"update a share of only {plan.optimizer.updated_by_cpu:.4f}. The CPU must update all streamed parameters, "
            f"because they are stored off the device; {PLAN_AGAIN}"
        )


def send_gradients(model: Chain, optimizer: StepOptimizer) -> None:
    """From now on, the optimizer takes each gradient as soon as autograd has completed it; none stays on a parameter.

    The hooks hold the optimizer weakly, because Python's garbage collector does not see hooks of this kind. If they
    held the optimizer, which holds the parameters, the memory of each turn of a sweep would be kept as long as the
    process lives.
    """
    taker = weakref.ref(optimizer)

    def take(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        alive = taker()
        assert gradient is not None
        assert alive is not None
        alive.take(name, gradient)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]


def _taken(exchange: weakref.ref[BackwardExchange], name: str, parameter: Tensor) -> None:
    alive = exchange()
    assert alive is not None
    alive.taken(name)


def updated(model: Chain, optimizer: StepOptimizer) -> Ready:
    """Returns a function by which a segment's forward waits for the updates of its own parameters, and of no others."""
    trained = {
        segment: [name for name in names if model.get_parameter(name).requires_grad]
        for segment, names in model.parameters_of().items()
    }

    def ready(segment: str) -> None:
        optimizer.wait(trained[segment])

    return ready


def initial_states(model: Chain, seed: int, *, trained_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields the states of a run that begins from `seed`: masters and (unless `trained_alone`) the values of frozen
    parameters. Moments, which begin at 0, are not among them."""
    for name, value in model.initial_trained(seed) if trained_alone else model.initial_values(seed):
        yield f"master.{name}" if model.get_parameter(name).requires_grad else FROZEN + name, value


def fill(assembly: Assembly, seed: int) -> None:
    """Begin the run from `seed`; parameters are rounded from the masters."""
    for name, value in initial_states(assembly.model, seed):
        assembly.load(name, value)
