"""Bounds: lower bounds on the seconds of a group's candidates, in a few operations for each layout of its blocks.

Every load, and the bytes in host memory, are a sum of three parts: of the blocks, of the streamed parameters and of the
optimizer's shares. They are linear in each. So the formulas of `footprint` and `step_time` are evaluated once for each
number of moved and of recomputed blocks, and once for each path of the update; for a layout these results are added.
Terms that only add seconds or bytes (homes on NVMe, rounding to chunks and pages) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from spillway.plan import OptimizerPlan, Policy, Tier
from spillway.planning.compute_work import update_work
from spillway.planning.footprint import (
    accumulator_bytes,
    cpu_accumulated,
    home_staging_bytes,
    host_home_bytes,
    kept_boundary_bytes,
    nvme_staging_bytes,
    spilled_boundary_bytes,
    staging_bytes,
    states_bytes_per_parameter,
    streamed_bytes_per_parameter,
    upload_bytes,
)
from spillway.planning.step_time import (
    Rates,
    Resource,
    backward_loads,
    exposed_exchange_seconds,
    forward_loads,
    parameter_loads,
    stored_bytes,
    update_loads,
    update_seconds,
)
from spillway.planning.workload import Blocks, Streaming, Workload, chunk_parameters

if TYPE_CHECKING:
    from spillway.planning.candidates import BlockLayout, CandidateGroup

ROUNDED = 1.0 + 1e-9
"""Sums of the same terms in another order differ by less than this factor."""
Passes = tuple[float, ...]
"""Loads of forward, in the order of `_RESOURCES`, then those of backward."""
_RESOURCES = (
    Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.CPU,
    Resource.WRITE, Resource.READ, Resource.DRAM, Resource.NETWORK,
)  # fmt: skip
_NUM, _CORES, _WRITE = len(_RESOURCES), 4, 4
"""_NUM: number of resources. _CORES: on a CPU device so many of them, the first ones, are work of the same cores.
_WRITE: index of disk write."""


class BlockLoads:
    """Loads of one pass of a model whose parameters are all resident and updated by the device."""

    def __init__(self, work: Workload, rates: Rates, waits: Streaming) -> None:
        self._work, self._rates, self._waits = work, rates, waits
        self._one: dict[Blocks, Passes] = {}
        self._both: dict[tuple[int, int, bool], Passes] = {}

    def of(self, recomputed: int, moved: int, *, spills: bool) -> Passes:
        """The least loads with `recomputed` and `moved` blocks: with all moved blocks in host memory; if some may be on
        NVMe (`spills`), of each resource the least with all of them in either. Recomputed blocks follow the moved ones,
        so their part is the loads of recomputing the first moved + recomputed blocks, minus those of recomputing the
        first `moved` ones."""
        key = (recomputed, moved, spills)
        if key not in self._both:
            layers = self._work.shape.num_layers
            without = self._of_one(Blocks(layers, recomputed=moved))
            with_them = self._of_one(Blocks(layers, recomputed=moved + recomputed))
            ours = self._of_one(Blocks(layers, host=moved))
            if spills and moved:
                ours = tuple(map(min, ours, self._of_one(Blocks(layers, nvme=moved))))
            self._both[key] = tuple(a + b - c for a, b, c in zip(ours, with_them, without, strict=True))
        return self._both[key]

    def _of_one(self, blocks: Blocks) -> Passes:
        if blocks not in self._one:
            self._one[blocks] = passes_of(self._work, self._rates, blocks, OptimizerPlan(), self._waits)
        return self._one[blocks]


def passes_of(work: Workload, rates: Rates, blocks: Blocks, optimizer: OptimizerPlan, streaming: Streaming) -> Passes:
    forward = forward_loads(work, rates, blocks, streaming)
    backward = backward_loads(work, rates, blocks, optimizer, streaming)
    return tuple(loads.get(resource, 0.0) for loads in (forward, backward) for resource in _RESOURCES)


@lru_cache(maxsize=64)
def block_loads(work: Workload, rates: Rates, waits: Streaming) -> BlockLoads:
    """Cached, because alternatives, other budgets and every number of streamed units share it."""
    return BlockLoads(work, rates, waits)


class Bounds:
    """Bounds of one group. The CPU must update the share x of the parameters (`forced`); another share is resident on
    the device."""

    def __init__(self, group: CandidateGroup) -> None:
        work, streaming, x = group.work, group.streaming, group.forced
        self._rates = rates = replace(group.rates, read=group.rates.read or inf, write=group.rates.write or inf)
        self._group, self._forced, self._on_cores = group, x, rates.copies_use_cores
        self._in_place = work.in_place
        self._num_passes = work.num_micro_batches // work.alive(streaming)
        self._blocks = block_loads(work, rates, Streaming(order=streaming.order, boundaries=streaming.boundaries))
        nothing, chunk, none_streamed = (
            Blocks(work.shape.num_layers),
            chunk_parameters(work),
            self._blocks.of(0, 0, spills=False),
        )

        def plan(**shares: float) -> OptimizerPlan:
            return OptimizerPlan.model_validate({"resident_share": 0.0, "chunk_parameters": chunk} | shares)

        def added(optimizer: OptimizerPlan) -> Passes:
            found = passes_of(work, rates, nothing, optimizer, streaming)
            return tuple(a - b for a, b in zip(found, none_streamed, strict=True))

        by_cpu, resident = plan(cpu_share=1.0), plan(resident_share=1.0)
        self._resident, least = added(resident), added(plan(cpu_share=x, streamed_share=1.0 - x))
        """Loads that streamed parameters add to the passes of blocks. With states off the device, gradients add loads,
        too."""
        all_by_cpu = added(by_cpu)
        of_cpu = (a - b for a, b in zip(all_by_cpu, least, strict=True))
        self._least, self._by_cpu = least, [(index, load) for index, load in enumerate(of_cpu) if load]
        self._fewest = tuple(map(min, self._resident, least, all_by_cpu))
        self._of_passes: dict[tuple[int, int, bool, bool | None], list[float]] = {}
        single = streaming.units and streaming.num_slots == 1 and not self._on_cores
        loaded = parameter_loads(work, streaming)
        self._slot = (loaded.forward + loaded.backward) / rates.h2d if single else 0.0

        states = plan(streamed_share=1.0), plan(nvme_share=1.0)
        self._paths = tuple(self._path(each) for each in (by_cpu, states[0], resident, states[1]))
        self._operations = [update_work(work, each).seconds(rates) for each in (resident, by_cpu)]
        self._longest_update = sum(map(sum, self._paths)) / rates.duplex
        self._longest_update += update_work(work, plan(nvme_share=1.0)).seconds(rates)
        copied = 2 * work.rank_parameters * work.shape.trained_bytes if work.in_place and group.may_speculate else 0
        exchanged = exposed_exchange_seconds(work, rates, 0.0, work.shape.num_accumulated, 0.0)
        self._more = copied / rates.cpu + copied / rates.dram + exchanged - group.exchange_seconds
        """The most seconds that lower bounds leave out: for copying the values that backward updates out of place, and
        of an exchange that backward might hide."""
        spared = 0.0 if work.in_place else x * work.rank_parameters * work.shape.trained_bytes
        self._spared = (0.0, spared / rates.h2d, 0.0, spared / rates.dram, 0.0, 0.0)
        """Seconds, by load of `_path`, that an update saves because new values of streamed parameters are not copied to
        the device."""

        self._states = states_bytes_per_parameter(work, on_cpu=True) * work.rank_parameters
        self._streamed = streamed_bytes_per_parameter(work) * work.rank_parameters
        self._gradients = [
            accumulator_bytes(work, cpu_accumulated(work, each, streaming)) for each in (resident, by_cpu)
        ]
        self._buffers = staging_bytes(work, by_cpu) + upload_bytes(work, by_cpu, streaming)
        self._homes = host_home_bytes(work, streaming)
        stored = stored_bytes(work, replace(streaming, host=0, nvme=streaming.units))
        self._stored = stored / rates.dram + stored / rates.write
        self._updates: dict[tuple[float, float, float], float] = {}
        self._spilling: dict[int, float] = {}
        self.unwritten = max(0, self._homes - stored)
        """Bytes of homes that no update writes to NVMe, because their parameters are frozen."""
        self._beside: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._waiting = spilled_boundary_bytes(work, nothing, streaming)

    def _path(self, plan: OptimizerPlan) -> tuple[float, ...]:
        """Loads of an update of all parameters with `plan`, of which the largest bounds it. Work that shares host
        memory or the drives is added up."""
        loads = update_loads(self._group.work, self._rates, plan)
        on_device = loads[Resource.COMPUTE]
        shared = loads[Resource.DRAM] + on_device * self._on_cores
        disk = loads[Resource.READ] + loads[Resource.WRITE]
        return (loads[Resource.CPU], loads[Resource.H2D], loads[Resource.D2H], shared, disk, on_device)

    def prefers_device(self, ratio: float) -> bool:
        """Whether a larger resident share never makes the update slower, wherever the rest is updated."""
        cpu, _, resident, _ = self._paths
        return max(resident) <= (1.0 - ratio) * max(cpu)

    def seconds(self, layout: BlockLayout, budget: Mapping[Tier, int], within: float = inf, *, spare: bool) -> float:
        """A lower bound on the priced seconds of the candidates of `layout` that fit `budget`; infinite if none fits.
        Candidates that take more than `within` seconds do not count; with `spare`, neither do those that wear out the
        drives."""
        if (least := self._total(layout, self._forced, 0.0, "None", None, spills=budget[Tier.NVME] > 0)) > within:
            return least
        shares = self._group.most_resident(budget[Tier.DEVICE] - layout.peak.total)
        return min((self._of_shares(layout, budget, *each, within, spare) for each in shares), default=inf)

    def beside_states(self, layout: BlockLayout) -> tuple[int, int, int]:
        """Bytes of host memory: for boundaries, which stay there; for activations and homes, if all of them are there;
        and the least that activations and homes need, because those that go to NVMe pass through buffers."""
        key = layout.blocks.recomputed, layout.blocks.moved, layout.window_bytes
        if key not in self._beside:
            work, streaming, blocks = self._group.work, self._group.streaming, layout.blocks
            kept = kept_boundary_bytes(work, blocks, Policy.HOST) if streaming.boundaries is Policy.HOST else 0
            moved = work.alive(streaming) * work.sum_of("moved_host", 0, blocks.moved)
            staged = nvme_staging_bytes(work, layout.window_bytes)
            if self._group.question.policy == "Nvme":
                moved = 0
            ways = [moved + self._homes]
            if moved:
                ways.append(staged)
            if self._homes:
                ways.append(home_staging_bytes(work, replace(streaming, host=streaming.units - 1, nvme=1)))
            self._beside[key] = kept, moved + self._homes, min(ways)
        return self._beside[key]

    def _of_shares(
        self,
        layout: BlockLayout,
        budget: Mapping[Tier, int],
        ratio: float,
        resident: float,
        within: float,
        spare: bool,
    ) -> float:
        group, question, x = self._group, self._group.question, self._forced
        streamed = ratio * (1.0 - x - resident)
        by_cpu = 1.0 - resident - streamed
        all_spilled = question.placement == "Nvme"
        states = 0.0 if all_spilled else self._states * by_cpu + self._streamed * streamed
        may_spill = question.placement == "Auto" and budget[Tier.NVME] and resident < 1.0
        of_cpu = (by_cpu - x) / (1.0 - x) if x < 1.0 else 0.0
        held = states + self._gradients[0] + of_cpu * (self._gradients[1] - self._gradients[0]) + self._waiting
        if by_cpu and by_cpu > x:
            held += self._buffers
        # What host memory cannot hold is on NVMe, where it takes no fewer bytes: first homes and activations, then
        # states.
        kept, others, least = self.beside_states(layout)
        lacking, part = held + kept + least - budget[Tier.HOST], float(all_spilled)
        if lacking > 0:
            if not may_spill or lacking > states:
                return inf
            part = lacking / states
        lacking += others - least
        written = max(0.0, lacking - self.unwritten)
        if spare and written and within == inf:
            within = self._most(layout)
        if lacking > budget[Tier.NVME] or (spare and group.surely_wears_out(written, within)):
            return inf
        cpu, through, on_device, on_nvme = self._paths
        update = 0.0
        for c, g, s, n, spared in zip(cpu, through, on_device, on_nvme, self._spared, strict=True):
            spilled = (1.0 - resident) * n
            seconds = (1.0 - part) * (by_cpu * c + streamed * g) + part * spilled
            if streamed and may_spill:  # with more on NVMe the link has less to do
                seconds = min(seconds, spilled)
            update = max(update, seconds + resident * s - spared)
        update += resident * self._operations[0] + (1.0 - resident) * self._operations[1]
        # Nothing is hidden behind forward if the update's copies would delay others (step_time.hidden_seconds).
        queues = (group.streaming.units and resident < 1.0 - x) or (layout.blocks.moved and streamed and not may_spill)
        overlap = "None" if queues else question.overlap
        spills = budget[Tier.NVME] > 0
        seconds = self._total(layout, by_cpu + part * streamed, update, overlap, resident < 1.0, spills=spills)
        return group.priced(seconds, written, within)

    def of_split(self, layout: BlockLayout, optimizer: OptimizerPlan, *, spills: bool) -> tuple[float, float]:
        """A lower and an upper bound on the seconds of the candidates of `layout` with this split. `spills`: whether
        some activations or homes are on NVMe."""
        split = optimizer.streamed_share, optimizer.resident_share, optimizer.nvme_share
        if split not in self._updates:
            self._updates[split] = update_seconds(self._group.work, self._rates, optimizer, self._group.streaming)
        shares = optimizer.updated_by_cpu, self._updates[split]
        least = self._total(layout, *shares, optimizer.overlap, optimizer.offloads, spills=spills)
        most = self._total(layout, *shares, "None", optimizer.offloads, spills=spills) + self._more
        return least, most + (self._spilled(layout) if spills else 0.0)

    def _most(self, layout: BlockLayout) -> float:
        """An upper bound on the seconds of the candidates of `layout`: with everything on NVMe, and one path of the
        update after another."""
        most = self._total(layout, 1.0, self._longest_update, "None", True, spills=True)
        return most + self._more + self._spilled(layout)

    def _spilled(self, layout: BlockLayout) -> float:
        """The most seconds that are added by the choice of memory for moved blocks and homes."""
        moved, layers, homes = layout.blocks.moved, layout.blocks.num_layers, self._group.streaming
        if moved not in self._spilling:
            on_nvme = Blocks(layers, nvme=moved), OptimizerPlan(), replace(homes, host=0, nvme=homes.units)
            in_host = Blocks(layers, host=moved), OptimizerPlan(), homes
            both = (passes_of(self._group.work, self._rates, *each) for each in (on_nvme, in_host))
            differences = sum(abs(a - b) for a, b in zip(*both, strict=True))
            self._spilling[moved] = self._num_passes * differences + self._stored
        return self._spilling[moved]

    def _total(
        self, layout: BlockLayout, by_cpu: float, update: float, overlap: str, offloads: bool | None, *, spills: bool
    ) -> float:
        """Seconds of a step whose update takes `update` seconds by itself. `offloads` None: each load is the least that
        any update has. `spills`: blocks may be on NVMe."""
        spills = spills and self._in_place  # blocks on NVMe are then read directly to where backward uses them
        x, key = self._forced, (layout.blocks.recomputed, layout.blocks.moved, spills, offloads)
        if key not in self._of_passes:
            added = {True: self._least, False: self._resident, None: self._fewest}[offloads]
            self._of_passes[key] = [a + b for a, b in zip(self._blocks.of(*key[:2], spills=spills), added, strict=True)]
        loads = self._of_passes[key]
        if offloads and by_cpu > x and x < 1.0:
            loads, more = loads.copy(), (by_cpu - x) / (1.0 - x)
            for index, added_by_cpu in self._by_cpu:
                loads[index] += more * added_by_cpu
        forward, backward = max(loads[:_NUM]), max(loads[_NUM:])
        if self._on_cores:
            forward, backward = max(forward, sum(loads[:_CORES])), max(backward, sum(loads[_NUM : _NUM + _CORES]))
        if layout.blocks.moved and not layout.window_bytes:
            forward = sum(loads[:3]) + loads[_WRITE]
        if overlap != "None" and not self._on_cores:  # one pass of forward may hide it
            update = max(0.0, update - forward)
        if overlap != "None" and self._group.may_speculate:
            update = 0.0
        return self._num_passes * (forward + backward + self._slot) + update + self._group.exchange_seconds
