"""Search: the fastest candidate that fits the budgets of all tiers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import ceil, inf
from operator import itemgetter

from spillway.plan import OptimizerPlan, Order, Policy, Tier, TierBytes
from spillway.planning.bounds import ROUNDED
from spillway.planning.candidates import (
    _WEIGHTS,
    ROUNDING,
    TIE,
    BlockLayout,
    Candidate,
    CandidateGroup,
    Question,
    Timed,
    groups,
    timed,
)
from spillway.planning.footprint import (
    device_bytes,
    home_staging_bytes,
    host_bytes,
    host_home_bytes,
    kept_boundary_bytes,
    nvme_bytes,
    nvme_home_bytes,
    nvme_staging_bytes,
    nvme_states_bytes,
    upload_bytes,
)
from spillway.planning.step_time import stored_states_bytes, written_bytes
from spillway.planning.workload import Blocks, Streaming, Workload


class Search:
    """The candidates of one question, under its budgets."""

    def __init__(self, question: Question, space: Sequence[CandidateGroup] | None = None) -> None:
        self.question = question
        self.groups = groups(question) if space is None else space

    def within(self, budget: dict[Tier, int]) -> Search:
        """The same space under other budgets."""
        return Search(replace(self.question, budget=budget), self.groups)

    def not_in(self, order: Order) -> Search:
        """The search of only those candidates that stream parameters in an order of micro-batches other than
        `order`."""
        return Search(
            self.question,
            [group for group in self.groups if group.streaming.units and group.streaming.order != order],
        )

    def visited_once(self) -> Search:
        """The search of only those candidates that do not load segments once per micro-batch: they do not stream, or
        stream weight-stationary."""
        return Search(
            self.question,
            [group for group in self.groups if not group.streaming.units or group.streaming.order != "InOrder"],
        )

    @property
    def is_empty(self) -> bool:
        """Whether no candidate has all that the question forces, because the forced parts exclude one another."""
        return not self.groups

    def all_candidates(self) -> Iterator[Candidate]:
        """Every candidate, also those that do not fit: the simple reference for the search below."""
        for group in self.groups:
            for layout in group.layouts:
                yield from self.candidates(group, layout)

    def candidates(self, group: CandidateGroup, layout: BlockLayout) -> Iterator[Candidate]:
        return (self._candidate(group, layout, split) for split in self._splits(group, layout))

    def _fitting(
        self, group: CandidateGroup, layout: BlockLayout, *, spare_drives: bool = True, limit: float = inf
    ) -> Iterator[Timed]:
        """Those of `candidates` that fit every budget and, with `spare_drives`, do not wear out the drives: at least
        all that take up to `limit` priced seconds. Slower ones are skipped, if possible before their bytes and seconds
        are counted."""
        kept, others, needed = group.bounds.beside_states(layout)
        for split in self._splits(group, layout):
            free = self.question.budget[Tier.HOST] - group.host_bytes_beside_homes(split) - kept
            if free < needed or (others > free and not self.question.budget[Tier.NVME]):
                continue
            spilled = stored_states_bytes(group.work, split) + max(0, others - free - group.bounds.unwritten)
            spills = others > free or self.question.policy == "Nvme"
            least, most = group.bounds.of_split(layout, split, spills=spills)
            if spare_drives and group.surely_wears_out(spilled, min(limit, most)):
                continue
            if group.priced(least, spilled, limit) > ROUNDED * limit:
                continue
            one = self._candidate(group, layout, split)
            if one.missing:
                continue
            written = written_bytes(one.work, one.optimizer, one.blocks, one.streaming)
            if spare_drives and group.surely_wears_out(written, limit):
                continue
            choice = timed(self.question, one)
            if not (spare_drives and choice.wears_out):
                yield choice

    def _splits(self, group: CandidateGroup, layout: BlockLayout) -> Iterator[OptimizerPlan]:
        for optimizer in group.optimizers(self.question.budget[Tier.DEVICE] - layout.peak.total):
            yield from self._splits_of(group, layout, optimizer)

    def _splits_of(
        self, group: CandidateGroup, layout: BlockLayout, optimizer: OptimizerPlan
    ) -> Iterator[OptimizerPlan]:
        yield optimizer
        if self.question.placement == "Auto" and optimizer.offloads and self.question.budget[Tier.NVME]:
            yield from self._between_host_and_nvme(group, layout, optimizer)

    def _between_host_and_nvme(
        self, group: CandidateGroup, layout: BlockLayout, optimizer: OptimizerPlan
    ) -> Iterator[OptimizerPlan]:
        """Splits with states on NVMe that are worth comparing with `optimizer` if host memory cannot hold everything
        that leaves the device: with as few states on NVMe as possible; with so many that homes and activations fit in
        host memory; with all."""
        budget, streaming = self.question.budget, group.streaming
        others = host_home_bytes(group.work, streaming)
        if self.question.policy != "Nvme":
            others += group.work.alive(streaming) * group.work.sum_of("moved_host", 0, layout.blocks.moved)
        else:
            others += self._largest_reserve(group, layout.blocks)
        needed = [held for held in (0, others) if group.host_bytes_beside_homes(optimizer) + held > budget[Tier.HOST]]
        parts = {self._least_spilled(group, optimizer, budget[Tier.HOST] - held) for held in needed}
        if parts:
            yield from (group.spilled(optimizer, part) for part in sorted(parts | {1.0}))

    def _least_spilled(self, group: CandidateGroup, optimizer: OptimizerPlan, room: int) -> float:
        """The smallest part of the states that must be on NVMe so that, without homes, `room` bytes of host memory are
        enough (their number falls linearly with the part); 1 if no smaller part is enough."""
        low, high = 0.25, 0.75
        at_low, at_high = (group.host_bytes_beside_homes(group.spilled(optimizer, part)) for part in (low, high))
        if at_low == at_high:
            return 1.0
        part = low + (at_low - room) * (high - low) / (at_low - at_high)
        part = max(ceil(part * 1e4) / 1e4, 0.0) + ROUNDING
        fits = part < 1.0 and group.host_bytes_beside_homes(group.spilled(optimizer, part)) <= room
        return part if fits else 1.0

    def choices(self, *, spare_drives: bool = True) -> list[Timed]:
        """Candidates that fit every budget and, with `spare_drives`, do not wear out the drives; at least all that
        `best` could choose."""
        found = list[tuple[tuple[int, int], Timed]]()
        limit = inf

        def bound(group: CandidateGroup, layout: BlockLayout) -> float:
            return self._bound(group, layout, limit, spare_drives=spare_drives) / ROUNDED

        def look_at(index: int, group: CandidateGroup) -> None:
            """Looks at the rows of a group's layouts in the order of their bounds, and at the layouts of a row if one
            may be better."""
            nonlocal limit
            waiting = [(bound(group, least), row, -1) for row, (least, _) in enumerate(group.layouts.rows)]
            heapify(waiting)
            while waiting and waiting[0][0] <= limit and waiting[0][0] < inf:
                _, row, number = heappop(waiting)
                layout, numbers = (group.layouts[number], []) if number >= 0 else group.layouts.rows[row]
                for each in numbers:
                    heappush(waiting, (bound(group, group.layouts[each]), row, each))
                for choice in (
                    self._fitting(group, layout, spare_drives=spare_drives, limit=limit) if number >= 0 else ()
                ):
                    found.append(((index, number), choice))
                    limit = min(limit, TIE * choice.priced_seconds)

        for least, index in sorted((bound(group, group.least), index) for index, group in enumerate(self.groups)):
            if least <= limit and least < inf and self._may_fit(self.groups[index]):
                look_at(index, self.groups[index])
        return [choice for _, choice in sorted(found, key=itemgetter(0))]

    def fits(self) -> bool:
        """Whether any candidate fits every budget and does not wear out the drives."""
        lean = {(group.work.strategy, group.streaming) for group in self.groups if group.work.lean}
        for group in filter(self._may_fit, self.groups):
            has_twin = not group.work.lean and (group.work.strategy, group.streaming) in lean
            for layout in group.layouts:
                if has_twin and layout.blocks.recomputed < layout.blocks.num_layers:
                    continue  # its lean twin needs no more of anything
                if self._bound(group, layout) == inf:
                    continue
                if any(True for _ in self._fitting(group, layout)):
                    return True
        return False

    def _bound(
        self, group: CandidateGroup, layout: BlockLayout, limit: float = inf, *, spare_drives: bool = True
    ) -> float:
        """A lower bound on the priced seconds of the candidates of `layout` that take up to `limit` seconds; infinite
        if none of them fits."""
        budget = self.question.budget
        if group.least_device_bytes + layout.peak.total > budget[Tier.DEVICE]:
            return inf
        return group.bounds.seconds(layout, budget, limit, spare=spare_drives)

    def _may_fit(self, group: CandidateGroup) -> bool:
        """Whether the candidate of `group` that needs least on the device might fit if all homes are on NVMe and no
        activations are in host memory."""
        budget = self.question.budget
        left = budget[Tier.DEVICE] - group.least.peak.total
        if group.least_device_bytes > left or group.least_host_bytes > budget[Tier.HOST]:
            return False
        return any(group.least_host_bytes_of(split) <= budget[Tier.HOST] for split in group.optimizers(left))

    def nearest_miss(self) -> Candidate:
        """The candidate that lacks least, by `weighted_missing`."""
        budget, found = self.question.budget, list[Candidate]()
        bounds = []
        for group in self.groups:
            host = _WEIGHTS[Tier.HOST] * max(0, group.least_host_bytes - budget[Tier.HOST])
            for layout in group.layouts:
                needed = group.least_device_bytes + layout.peak.total - budget[Tier.DEVICE]
                bounds.append((_WEIGHTS[Tier.DEVICE] * max(0, needed) + host, group, layout))
        for bound, group, layout in sorted(bounds, key=itemgetter(0)):
            if found and bound >= found[0].weighted_missing:
                break
            for optimizer in group.optimizers(budget[Tier.DEVICE] - layout.peak.total):
                needed = group.optimizer_device_bytes(optimizer) + layout.peak.total - budget[Tier.DEVICE]
                host = group.least_host_bytes_of(optimizer) - budget[Tier.HOST]
                least = _WEIGHTS[Tier.DEVICE] * max(0, needed) + _WEIGHTS[Tier.HOST] * max(0, host)
                if found and least >= found[0].weighted_missing:
                    continue
                for split in self._splits_of(group, layout, optimizer):
                    one = self._candidate(group, layout, split)
                    if not found or one.weighted_missing < found[0].weighted_missing:
                        found = [one]
        return found[0]

    def _candidate(self, group: CandidateGroup, layout: BlockLayout, optimizer: OptimizerPlan) -> Candidate:
        work, window_bytes = group.work, layout.window_bytes
        blocks, streaming = self._settled(group, optimizer, layout.blocks, window_bytes)
        on_nvme = nvme_bytes(work, optimizer, blocks, streaming)
        reserve = min(self._reserve(group), on_nvme.activations)

        def in_host(optimizer: OptimizerPlan) -> TierBytes:
            found = host_bytes(work, optimizer, blocks, window_bytes, streaming)
            return found.model_copy(update={"reserve": reserve}) if reserve else found

        held = {
            Tier.DEVICE: device_bytes(work, optimizer, layout.peak, streaming),
            Tier.HOST: in_host(optimizer),
            Tier.NVME: on_nvme,
        }
        budget = self.question.budget
        if optimizer.overlap == "Backward":
            optimizer = group.speculating(optimizer, blocks, budget[Tier.HOST] - held[Tier.HOST].total)
            held[Tier.HOST] = in_host(optimizer)
        missing = {tier: held[tier].total - budget[tier] for tier in Tier if held[tier].total > budget[tier]}
        return Candidate(work, optimizer, blocks, streaming, window_bytes, held, missing)

    def _settled(
        self, group: CandidateGroup, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int
    ) -> tuple[Blocks, Streaming]:
        """Where activations and homes go; the reserve is kept free if some activations go to NVMe."""
        found = self._divided(group, optimizer, blocks, window_bytes, 0)
        reserve = self._largest_reserve(group, blocks)
        return self._divided(group, optimizer, blocks, window_bytes, reserve) if reserve and found[0].nvme else found

    def _largest_reserve(self, group: CandidateGroup, blocks: Blocks) -> int:
        """The reserve if all moved blocks were on NVMe."""
        on_nvme = group.work.alive(group.streaming) * group.work.sum_of("moved_nvme", 0, blocks.moved)
        return min(self._reserve(group), on_nvme)

    def _reserve(self, group: CandidateGroup) -> int:
        """The most host memory to reserve. In weight-stationary order it is 0, because trainers do not place single
        storages, so none can be moved."""
        return self.question.host_reserve if group.streaming.order == "InOrder" else 0

    def _divided(
        self, group: CandidateGroup, optimizer: OptimizerPlan, blocks: Blocks, window_bytes: int, reserve: int
    ) -> tuple[Blocks, Streaming]:
        """Divides homes and moved blocks between host memory and NVMe. As many as fit are in host memory, the others on
        NVMe if they fit there. Homes come first, because an activation without space can be recomputed."""
        work = group.work
        policy, moved, budget = self.question.policy, blocks.moved, self.question.budget
        room = budget[Tier.HOST] - group.host_bytes_beside_homes(optimizer) - reserve
        if group.streaming.boundaries is Policy.HOST:
            room -= kept_boundary_bytes(work, blocks, Policy.HOST)
        states = nvme_states_bytes(work, optimizer, group.streaming)
        streaming = _homes_between(work, optimizer, group.streaming, room, budget[Tier.NVME] - states)
        room -= host_home_bytes(work, streaming) + home_staging_bytes(work, streaming)
        nvme_room = budget[Tier.NVME] - states - nvme_home_bytes(work, streaming)
        if policy == "Nvme":
            return replace(blocks, host=0, nvme=moved), streaming
        if policy == "Host" or not moved:
            return blocks, streaming
        alive = work.alive(streaming)
        if alive * work.sum_of("moved_host", 0, moved) <= room and not streaming.nvme:
            return blocks, streaming
        host_room = 0 if streaming.nvme else room - nvme_staging_bytes(work, window_bytes)
        nvme = _fewest(moved, lambda count: alive * work.sum_of("moved_host", count, moved) <= host_room)
        if alive * work.sum_of("moved_nvme", 0, nvme) > nvme_room:
            return blocks, streaming  # no room on NVMe either: report what is missing in host memory
        return replace(blocks, host=moved - nvme, nvme=nvme), streaming


def _homes_between(
    work: Workload, optimizer: OptimizerPlan, streaming: Streaming, room: int, nvme_room: int
) -> Streaming:
    """`streaming` with as few homes on NVMe as are needed for the others to fit in the `room` bytes of host memory that
    the optimizer leaves; with all homes in host memory if NVMe has no space for them either."""
    num_units = streaming.units
    beside = upload_bytes(work, optimizer, streaming)

    def divided(nvme: int) -> Streaming:
        return Streaming(num_units - nvme, nvme, streaming.num_slots, streaming.order, streaming.boundaries)

    def fits(nvme: int) -> bool:
        split = divided(nvme)
        stored = upload_bytes(work, optimizer, split) - beside
        return host_home_bytes(work, split) + home_staging_bytes(work, split) + stored <= room

    if not num_units or fits(0):
        return streaming
    # After the first home on NVMe, each further one frees host memory: staging grows only with the largest of them.
    nvme = 1 + _fewest(num_units - 1, lambda count: fits(count + 1))
    split = divided(nvme)
    return split if nvme_home_bytes(work, split) <= nvme_room and fits(nvme) else streaming


def _fewest(largest: int, enough: Callable[[int], bool]) -> int:
    """The smallest count up to `largest` for which `enough` is true, else `largest`. If `enough` is true for a count,
    it must be true for all larger ones."""
    return bisect_left(range(largest), True, key=enough)


def as_specified(question: Question) -> Candidate:
    """The candidate that modes Disabled and Advise run: what the spec names, everything else on the device. Budgets are
    not checked."""
    streams = question.parameters == "Stream" and question.mode != "Disabled"
    placement = ("Host" if streams else "Device") if question.placement == "Auto" else question.placement
    named = replace(
        question,
        placement=placement,
        policy="Keep" if question.policy == "Auto" else question.policy,
        parameters="Stream" if streams else "Resident",
    )
    space = groups(named)
    group = max(space, key=lambda group: (group.streaming.units, group.streaming.num_slots))
    return next(Search(named, [group]).all_candidates())
