"""Slots and layouts: which segment is where, what an evicted parameter is, what is rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fakes.lazy_lanes import LazyLanes
from spillway.errors import UserError
from spillway.plan import ParameterPlan, Tier
from spillway_trainer import inspect, model_spill
from spillway_trainer.model_spill.layout import SegmentLayout, check_homes, lay_out
from spillway_trainer.model_spill.slots import Slots, stub
from spillway_trainer.model_spill.spill import evict
from spillway_trainer.models.chain import Chain, allocate
from spillway_trainer.models.transformer import Transformer, TransformerConfig
from spillway_trainer.optimizer_offload.assign import Path, Shares, assign_chunks
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import DONE, Buffer, Event


class Layers(Chain):
    """Linear segments "a", "b" and so on."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("abcdef"[index], layer) for index, layer in enumerate(self.layers)]


def meta(sizes: Sequence[tuple[int, int]]) -> Layers:
    with torch.device("meta"):
        return Layers(sizes)


class Loads:
    """Fills a slot with the segment's letter; remembers in which order."""

    def __init__(self) -> None:
        self.segments: list[str] = []

    def __call__(self, segment: str, slot: Buffer, after: Sequence[Event]) -> Event:
        self.segments.append(segment)
        slot.tensor.fill_(ord(segment))
        return DONE


def slots_of(model: Layers, num_slots: int) -> tuple[Slots, Loads, DeviceLedger]:
    ledger, loads = DeviceLedger(None), Loads()
    evict(model, [name for name, _ in model.named_parameters()])
    layouts = {name: lay_out(model, name, Tier.HOST, names) for name, names in model.parameters_of().items()}
    return Slots(layouts, num_slots, loads, LazyLanes(HostSlab(0), ledger)), loads, ledger


def letter(parameter: nn.Parameter) -> str:
    return chr(int(parameter.data.reshape(-1).view(torch.uint8)[0]))


class Twice(nn.Module):
    """Two modules of one segment, and two names in one of them, share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.other.again = self.one.weight


def test_what_modules_of_a_segment_share_they_still_share_wherever_it_is() -> None:
    for replace in (
        allocate,
        lambda model: evict(model, ["layers.0.one.weight"]),
        inspect._make_fake,
    ):
        model = meta([])
        with torch.device("meta"):
            model.layers.append(Twice())
        replace(model)
        one, other = model.layers[0].one, model.layers[0].other
        assert one.weight is other.weight is other.again
        assert not one.weight.is_meta and [name for name, _ in model.named_parameters()] == ["layers.0.one.weight"]


def test_parameters_are_bound_while_in_a_slot_and_nan_afterwards() -> None:
    model = meta([(4, 4), (4, 4)])
    slots, _, _ = slots_of(model, 1)
    first, second = model.layers[0].weight, model.layers[1].weight
    slots.ensure("a")
    assert letter(first) == "a"
    assert second.isnan().all()
    slots.ensure("b")
    assert letter(second) == "b"
    assert first.isnan().all()
    assert first.shape == (4, 4)


def test_an_evicted_parameter_takes_no_memory_and_cannot_be_written() -> None:
    evicted = stub(torch.Size((1000, 1000)), torch.bfloat16, torch.device("cpu"))
    assert evicted.untyped_storage().nbytes() == 2
    with pytest.raises(RuntimeError, match="single memory location"):
        evicted.add_(1)


def test_slots_are_as_large_as_the_largest_segment_and_never_grow() -> None:
    model = meta([(4, 4), (64, 64), (4, 4)])
    slots, _, ledger = slots_of(model, 2)
    assert ledger.by_purpose() == {"buffers": 2 * (4 * 64 * 64 + 4096)}
    for segment in "abcab":
        slots.ensure(segment)
    assert ledger.held_bytes == 2 * (4 * 64 * 64 + 4096)


def test_a_prefetched_segment_is_loaded_once_and_not_bound_yet() -> None:
    model = meta([(4, 4)] * 3)
    slots, loads, _ = slots_of(model, 2)
    slots.ensure("a")
    slots.prefetch("b")
    assert loads.segments == ["a", "b"]
    assert model.layers[1].weight.isnan().all()
    slots.ensure("b")
    assert loads.segments == ["a", "b"]
    assert letter(model.layers[1].weight) == "b"


def test_a_prefetch_never_takes_the_slot_in_use() -> None:
    model = meta([(4, 4)] * 2)
    slots, loads, _ = slots_of(model, 1)
    slots.ensure("a")
    slots.prefetch("b")
    assert loads.segments == ["a"]


def test_the_segment_used_longest_ago_goes_first() -> None:
    model = meta([(4, 4)] * 4)
    slots, loads, _ = slots_of(model, 3)
    for segment in "abcad":
        slots.ensure(segment)
    slots.ensure("a")
    slots.ensure("c")
    assert loads.segments == ["a", "b", "c", "d"]


def test_a_pinned_segment_stays() -> None:
    model = meta([(4, 4)] * 3)
    slots, _, _ = slots_of(model, 2)
    with slots.pinned("a"):
        slots.ensure("b")
        slots.ensure("c")
        assert letter(model.layers[0].weight) == "a"
        with slots.pinned("c"), pytest.raises(RuntimeError, match=r"every slot .* is pinned"):
            slots.ensure("b")


def test_each_parameter_has_a_version_of_its_own() -> None:
    model = meta([(4, 4)] * 2)
    slots, _, _ = slots_of(model, 1)
    slots.ensure("a")
    slots.ensure("b")
    assert [p._version for p in model.layers[0].parameters()] == [1, 1]
    assert [p._version for p in model.layers[1].parameters()] == [0, 0]


# --- layouts


def layouts_of(model: Chain) -> dict[str, SegmentLayout]:
    return {name: lay_out(model, name, Tier.HOST, names) for name, names in model.parameters_of().items()}


def transformer(*, tied: bool) -> Transformer:
    with torch.device("meta"):
        return Transformer(TransformerConfig(16, 2, 2, 1, 24, 61, tied))


def test_rows_start_where_a_cuda_allocation_may_and_segments_end_on_pages() -> None:
    for layout in layouts_of(transformer(tied=True)).values():
        assert all(row.offset % 512 == 0 for row in layout.rows)
        assert layout.nbytes % 4096 == layout.home_bytes % 4096 == 0
        ends = [row.offset + row.nbytes for row in layout.rows]
        assert all(end <= row.offset for end, row in zip(ends, layout.rows[1:], strict=False))


def test_an_alias_is_in_the_slot_and_not_at_home() -> None:
    tied, untied = (layouts_of(transformer(tied=tied))["head"] for tied in (True, False))
    assert [row.name for row in tied.own] == ["head.norm.weight"]
    assert [row.owner for row in tied.rows] == ["head.norm.weight", "embed_tokens.weight"]
    assert (tied.home_bytes, tied.nbytes) == (4096, 8192)
    assert untied.home_bytes == untied.nbytes


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        ((Tier.HOST,) * 3, r"for a model with 3 segments \(embedding, blocks, head\), but this model has 4"),
        (
            (Tier.HOST, Tier.HOST, Tier.HOST, Tier.DEVICE),
            "tied to embed_tokens.weight, so both segments must be in the same memory",
        ),
        (
            (Tier.HOST, Tier.HOST, Tier.HOST, Tier.NVME),
            "tied to embed_tokens.weight, so both segments must be in the same memory",
        ),
    ],
)
def test_homes_that_do_not_fit_the_model_are_rejected(homes: tuple[Tier, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_homes(transformer(tied=True), homes)


def test_a_parameter_of_two_segments_is_rejected() -> None:
    model = meta([(4, 4), (4, 4)])
    model.layers[1].weight = model.layers[0].weight
    with pytest.raises(UserError, match=r"layers\.0\.weight belongs to several segments"):
        check_homes(model, (Tier.HOST, Tier.HOST))


def test_a_parameter_that_is_not_contiguous_is_rejected() -> None:
    model = meta([(4, 8)])
    model.layers[0].weight = nn.Parameter(torch.empty(4, 8, device="meta").t())
    with pytest.raises(UserError, match="not contiguous"):
        check_homes(model, (Tier.HOST,))
    check_homes(model, (Tier.DEVICE,))


def test_a_plan_that_streams_nothing_attaches_nothing() -> None:
    host, ledger = HostSlab(0), DeviceLedger(None)
    plan = ParameterPlan(homes=(Tier.DEVICE,) * 4)
    assert model_spill.build(plan, transformer(tied=True), 1 << 20, LazyLanes(host, ledger), None) is None


# --- shares beside streamed parameters


def test_cpu_updates_streamed_parameters_and_the_others_share_the_rest() -> None:
    counts = {"a": 4000, "b": 4000, "c": 2000}
    chunks = assign_chunks(counts, 100, Shares(0.6, 0.2, 0.2), streamed={"b"})
    sizes = {path: sum(chunk.size for chunk in chunks if chunk.path is path) for path in Path}
    assert {chunk.path for chunk in chunks if chunk.parameter == "b"} == {Path.CPU}
    assert all(abs(sizes[path] - expected) <= 100 for path, expected in zip(Path, (6000, 2000, 2000, 0), strict=True))


def test_free_parameters_avoid_the_cpu_when_streamed_ones_fill_its_share() -> None:
    chunks = assign_chunks({"a": 3000, "b": 1000}, 100, Shares(0.25, 0.0, 0.75), streamed={"b"})
    assert {chunk.path for chunk in chunks if chunk.parameter == "a"} == {Path.RESIDENT}
