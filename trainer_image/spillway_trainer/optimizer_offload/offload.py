"""OptimizerOffload: keeps states in host memory and updates them where the plan says, chunk by chunk.

The idea is Deep Optimizer States (Maurya et al., arXiv 2410.21316): the update is interleaved between CPU and device,
and overlapped with the copies between them. Here the split is real-valued, ordering is by events, and the result is
bitwise that of ResidentOptimizer for every split, chunk size, thread count and instruction set
(docs/optimizer-offload.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from spillway.errors import UserError
from spillway.plan import PLAN_AGAIN, OptimizerPlan, Tier
from spillway.planning.workload import NUM_SLOTS, NUM_STAGING_BUFFERS, NUM_STATE_BUFFERS
from spillway.update_rules import BLOCK_VALUES, MASTER, MomentType

from ..kernels import dispatch as kernels
from ..kernels.reference import SquareSum
from ..optimizer.plain import FLOAT32_BYTES, GradientPart, Hyperparameters, Update, UpdateCount, as_loaded, shaped
from ..optimizer.trainable import Trainable, check_gradient, master_values
from ..tiers.arena import Arena, Ring, as_bytes, padded
from ..tiers.device_ledger import DeviceLedger
from ..tiers.extents import round_up
from ..tiers.lanes import Event, Lane, Lanes
from ..tiers.nvme_slab import NvmeSlab
from .assign import Assignment, Chunk, Path, Shares, assign_by_size, assign_chunks
from .gradients import BATCH_BYTES, Gradients, GradientWindow
from .nvme_states import StateWindow
from .place import NoHomes, Placed, StreamedHomes, place_accumulators, place_chunks
from .speculation import Speculation, window_of
from .update import UpdatePipeline


class OptimizerOffload:
    """One rank's optimizer. Its memory is allocated at construction, which raises when a budget is too small.

    `cpu_update` and `device_update` are the kernels of the two sides; tests give them different code. `by` chooses the
    paths of the chunks: `assign_by_size`, or for comparison `stride`.
    """

    def __init__(  # noqa: PLR0913 - three of them are for tests and comparison alone
        self,
        parameters: Sequence[tuple[str, Parameter]],
        tied: Mapping[str, str],
        settings: Hyperparameters,
        plan: OptimizerPlan,
        lanes: Lanes,
        ledger: DeviceLedger,
        *,
        homes: StreamedHomes | None = None,
        nvme: NvmeSlab | None = None,
        cpu_update: Update | None = None,
        device_update: Update | None = None,
        by: Assignment = assign_by_size,
        gradient_dtype: torch.dtype | None = None,
        in_place: bool = False,
        splits: bool = True,
        loads_masters: bool = False,
    ) -> None:
        """`gradient_dtype`: the dtype of gradients; None: that of their parameter. `in_place`: device memory is host
        memory, so the CPU's update writes the parameter itself, and nothing is uploaded. `splits`: only that part of a
        streamed bfloat16 chunk's master that the weight lacks crosses the link; where there is no link, the master
        stays whole. `loads_masters`: all masters are loaded before the first step, so that none is first written to
        NVMe from a parameter."""
        self._gradient_dtype, self._in_place = gradient_dtype, in_place
        self._homes = homes or NoHomes()
        streamed = {name for name, _ in parameters if self._homes.of(name)}
        self._trainable = Trainable.of(parameters, tied, streamed | {a for a, o in tied.items() if o in streamed})
        self._count, self._settings, self._rule = UpdateCount(settings), settings, settings.rule
        self._lanes = lanes
        owners = self._trainable.parameters
        shares = Shares(plan.cpu_share, plan.streamed_share, plan.resident_share, plan.nvme_share)
        sizes = {name: p.numel() for name, p in owners.items()}
        chunks = assign_chunks(sizes, plan.chunk_parameters, shares, streamed, by)
        _check_blocks(chunks, plan, settings)
        # DeepSpeed, too, may write the weights of a divided model's parts: their masters stay whole.
        divided = gradient_dtype is not None
        self._arena = Arena(lanes, ledger, next(iter(owners.values())).device)
        self._placed = place_chunks(
            chunks, owners, self._homes, self._arena, nvme, settings, splits=splits and not in_place and not divided
        )
        self._of: dict[str, list[Placed]] = {name: [] for name in owners}  # an empty parameter has no chunk
        for placed in self._placed:
            self._of[placed.chunk.parameter].append(placed)
        self._weights = {name: [p.weights for p in parts if p.home is None] for name, parts in self._of.items()}
        """The regions of each parameter that the compute lane reads; regions of homes are declared by whoever owns the
        homes."""
        self._gradients = self._new_gradients(ledger, plan.num_threads)
        native = partial(kernels.update, num_threads=plan.num_threads)
        self._window = StateWindow(lanes, self._window_ring())
        uploads, slots = self._upload_ring(), self._slot_ring()
        apart = self._apart()
        largest = max((padded(placed.nbytes) for placed in apart or self._placed), default=0)
        self._pipeline = UpdatePipeline(
            lanes,
            uploads,
            slots,
            self._window,
            cpu_update or native,
            device_update or native,
            largest if apart else max(largest, BATCH_BYTES),
            in_place,
        )
        window = plan.speculative_parameters if plan.overlap == "Backward" else 0
        self._speculation = Speculation(
            lanes, self._arena, window_of(self._placed, self._trainable.tied, window), cpu_update or native
        )
        self._begun: tuple[float, float, UpdateCount] | None = None
        """Learning rate and factor of the step in progress, and the count of updates after it."""
        self._overlaps = plan.overlap != "None"
        self._updating: dict[str, list[Event]] = {}
        """By parameter: updates that the compute lane has not waited for yet."""
        self._initialise_states(loads_masters)

    def wait(self, names: Sequence[str]) -> None:
        owners = [self._trainable.owner(name) for name in names]
        events = dict.fromkeys(event for owner in owners for event in self._updating.pop(owner, ()))
        for event in reversed(events):  # the last one first: while waiting, lanes may run what is ahead of it
            self._lanes.wait(event)
        for name, owner in zip(names, owners, strict=True):
            self._lanes.compute(reads=self._weights[owner], label=f"forward of {name}")

    def begin(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        self._begun = learning_rate, gradient_scale, self._count.following()
        self._speculation.begin(gradient_scale)

    def take(self, name: str, gradient: Tensor) -> None:
        owner = self._trainable.owner(name)
        parameter = self._trainable.parameters[owner]
        assert owner not in self._updating, "wait() or flush() comes between step() and the next forward"
        self._lanes.compute(reads=self._weights[owner], label=f"backward of {name}")
        is_last = self._gradients.take(name, check_gradient(name, parameter, gradient, self._gradient_dtype))
        if self._begun is not None and self._speculation:
            learning_rate, gradient_scale, count = self._begun
            scalars = count.scalars(owner, parameter, learning_rate, gradient_scale)
            self._gradients.hand_over()
            self._speculation.taken(self._of[owner], scalars, self._pipeline.ends, is_last=is_last)

    def start_backward(self) -> None:
        """Waits until the last micro-batch's gradients are read: on a CUDA device, backward needs their memory at its
        start (footprint.device_peak)."""
        self._gradients.leave()

    def arrived(self) -> Collection[str]:
        return self._gradients.all_arrived()

    def parts(self, names: Sequence[str]) -> Sequence[GradientPart]:
        self._speculation.discard()
        return self._gradients.parts(names)

    def norm(self) -> float:
        return self.square_sum().norm()

    def square_sum(self) -> SquareSum:
        self._gradients.sum_tied_uses()
        return self._gradients.square_sum()

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self._gradients.sum_tied_uses()
        self._homes.invalidate()
        self._count.advance()
        updates = []
        for name, parameter in self._trainable.parameters.items():
            if self._gradients.arrived(name):  # no gradient: no decay and no moment update either, as in torch.optim
                scalars = self._count.scalars(name, parameter, learning_rate, gradient_scale)
                updates += [(placed, scalars) for placed in self._of[name]]
                increment_version(parameter)  # backward of a graph from before this step must raise
        if self._begun is None or self._begun[0] != learning_rate:
            self._speculation.discard()
        ready = ((placed.chunk, self._speculation.commit(placed, gradient_scale)) for placed, _ in updates)
        committed = {chunk: values for chunk, values in ready if values is not None}
        for (placed, _), end in zip(updates, self._pipeline.submit(updates, committed), strict=True):
            if placed.home is None:  # else whoever loads the values from their home waits for the update
                self._updating.setdefault(placed.chunk.parameter, []).append(end)
        self._end_step(gradient_scale)
        if not self._overlaps:
            self.flush()

    def skip(self) -> None:
        self._end_step(None)

    def flush(self) -> None:
        for event in dict.fromkeys(self._pipeline.ends.values()):
            event.wait()
        for placed in self._placed:
            if placed.chunk.path is Path.NVME:  # its states may still be on their way back when its values have arrived
                for event in placed.on_nvme.settled:
                    event.wait()
        self._pipeline.ends.clear()
        self._updating.clear()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        self.flush()
        for name, parameter in self._trainable.parameters.items():
            for kind in self._rule.state_kinds:
                yield f"{kind}.{name}", shaped(self._gathered(name, kind), parameter.shape)

    def load(self, name: str, value: Tensor) -> None:
        self.flush()
        kind, _, parameter_name = name.partition(".")
        values, ends = as_loaded(value, kind, self._settings).contiguous(), list[Event]()
        for placed in self._of[parameter_name]:
            part = values[self._kept(kind, placed.chunk)]
            if placed.chunk.path is Path.NVME:
                fill, index = partial(_fill, as_bytes(part)), self._rule.state_kinds.index(kind)
                ends.append(self._window.store_row(placed.on_nvme, index, Lane.CPU, fill))
            else:
                placed.set_state(self._rule, kind, part)
            if kind == MASTER and placed.parameter is not None and not placed.parameter_is_master:
                placed.parameter.copy_(master_values(part, placed.dtype))
        for event in ends:
            event.wait()
        if kind == MASTER and self._homes.of(parameter_name):
            of_parameter = self._trainable.parameters[parameter_name].dtype
            self._homes.set(parameter_name, master_values(values, of_parameter))

    def scalars(self) -> dict[str, float]:
        return self._count.as_dict()

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        self._count.load(scalars)

    def held_bytes(self) -> dict[str, int]:
        on_nvme = sum(placed.block.nbytes for placed in self._placed if placed.chunk.path is Path.NVME)
        return {**self._arena.held_bytes(), Tier.NVME.value: on_nvme}

    def _end_step(self, factor: float | None) -> None:
        self._gradients.drop()
        self._speculation.end(factor)
        self._begun = None

    def _gathered(self, name: str, kind: str) -> Tensor:
        """One kind of state of a whole parameter, flat, a copy in host memory."""
        size = self._settings.state_elements(kind, self._trainable.parameters[name].numel())
        found = torch.empty(size, dtype=self._settings.state_dtype(kind))
        ends = []
        for placed in self._of[name]:
            target = found[self._kept(kind, placed.chunk)]
            if placed.chunk.path is Path.NVME:
                index = self._rule.state_kinds.index(kind)
                ends.append(self._window.fetch_row(placed.on_nvme, index, as_bytes(target)))
            else:
                target.copy_(placed.state(self._rule, kind))
        for event in ends:
            event.wait()
        return found

    def _kept(self, kind: str, chunk: Chunk) -> slice:
        """The slice of a parameter's flat state that belongs to a chunk: chunks begin at blocks."""
        elements = partial(self._settings.state_elements, kind)
        return slice(elements(chunk.offset), elements(chunk.end))

    def _new_gradients(self, ledger: DeviceLedger, num_threads: int) -> Gradients:
        accumulators = {name: [placed.accumulator for placed in parts] for name, parts in self._of.items()}
        for alias, owner in self._trainable.tied.items():
            accumulators[alias] = place_accumulators([placed.chunk for placed in self._of[owner]], self._arena)
        parameters = self._trainable.parameters.values()
        largest = max((p.numel() * self._gradient_bytes(p.dtype) for p in parameters), default=0)
        return Gradients(
            self._lanes,
            accumulators,
            self._trainable.tied,
            self._gradient_ring([p for p in self._placed if p.chunk.path.updates_on_cpu]),
            GradientWindow(ledger, largest),
            num_threads,
        )

    def _gradient_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per value of a gradient of a parameter of `dtype`."""
        return (self._gradient_dtype or dtype).itemsize

    def _gradient_ring(self, chunks: Sequence[Placed]) -> Ring:
        """The ring for gradients on their way to the host; empty where the CPU reads them in place."""
        on_device = [] if self._in_place else chunks
        sizes = [placed.chunk.size * self._gradient_bytes(placed.dtype) for placed in on_device]
        return self._staging_ring(sizes, "gradient staging")

    def _upload_ring(self) -> Ring:
        """The ring for updated values that the CPU cannot write to where they live: a device with its own memory, or
        NVMe."""
        return self._staging_ring([placed.nbytes for placed in self._apart()], "uploads")

    def _apart(self) -> list[Placed]:
        """The chunks that the CPU updates but whose values it cannot write to where they live."""
        on_cpu = [placed for placed in self._placed if placed.chunk.path.updates_on_cpu]
        return [p for p in on_cpu if (not self._in_place if p.home is None else p.home.memory is None)]

    def _staging_ring(self, sizes_bytes: Sequence[int], label: str) -> Ring:
        """Host buffers that each can hold any one of `sizes_bytes`, in whole blocks."""
        largest = max(sizes_bytes, default=0)
        return self._arena.ring(Tier.HOST, min(NUM_STAGING_BUFFERS, len(sizes_bytes)), round_up(largest), label)

    def _slot_ring(self) -> Ring:
        sizes = [placed.held.nbytes for placed in self._placed if placed.chunk.path is Path.STREAMED]
        return self._arena.ring(Tier.DEVICE, min(NUM_SLOTS, len(sizes)), max(sizes, default=0), "streamed states")

    def _window_ring(self) -> Ring:
        sizes = [placed.on_nvme.nbytes for placed in self._placed if placed.chunk.path is Path.NVME]
        return self._arena.ring(Tier.HOST, min(NUM_STATE_BUFFERS, len(sizes)), max(sizes, default=0), "states of NVMe")

    def _initialise_states(self, loads_masters: bool) -> None:
        """Sets moments to 0, and masters to the values of their parameters, or to 0 if those are streamed or masters
        will be loaded. Submitted to lanes, so that virtual lanes can leave it out."""
        events, allocated = [], self._lanes.computed()
        for placed in self._placed:
            if placed.chunk.path is not Path.NVME:
                events.append(self._initialise(placed, allocated, loads_masters))
            elif placed.parameter is not None and not loads_masters:  # else 0, like any row never written
                master, fill = self._rule.state_kinds.index(MASTER), partial(_widen, placed.parameter)
                weights = [placed.weights]
                events.append(self._window.store_row(placed.on_nvme, master, Lane.COMPUTE, fill, weights))
        for event in events:
            event.wait()

    def _initialise(self, placed: Placed, allocated: Event, loads_masters: bool) -> Event:
        reads_parameter = placed.parameter is not None and not loads_masters
        return self._lanes.submit(
            Lane.COMPUTE,
            partial(_initialise, placed, loads_masters),
            reads=[placed.weights] if reads_parameter else [],
            writes=[placed.held],
            after=[allocated],
            label=f"initialise {placed.chunk.label}",
        )


def _check_blocks(chunks: Sequence[Chunk], plan: OptimizerPlan, settings: Hyperparameters) -> None:
    """Raises UserError if a chunk would begin inside a block, because two updates would then share the block's
    scale."""
    if settings.moments is MomentType.INT8 and any(chunk.offset % BLOCK_VALUES for chunk in chunks):
        raise UserError(
            f"the plan updates parameters in chunks of {plan.chunk_parameters} values, but with "
            f"spec.training.optimizer.moments: int8 chunks must be multiples of {BLOCK_VALUES} values, because "
            f"{BLOCK_VALUES} values share a scale; {PLAN_AGAIN}"
        )


def _fill(values: Tensor, row: Tensor) -> None:
    kernels.copy(row[: values.numel()], values)


def _widen(parameter: Tensor, row: Tensor) -> None:
    row[: FLOAT32_BYTES * parameter.numel()].view(torch.float32).copy_(parameter)


def _initialise(placed: Placed, loads_masters: bool) -> None:
    states = placed.states(placed.held.tensor)
    if placed.parameter is None or placed.is_split or (loads_masters and not placed.parameter_is_master):
        states.master.zero_()  # a split master equals its widened weight: the rest is 0
    elif not placed.parameter_is_master:
        states.master.copy_(placed.parameter)
    for moment in states.moments:
        moment.zero_()
