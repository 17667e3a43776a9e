"""What activation_spill does with memory, in which order, and what happens when a tier fails."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.parity_models import transformer
from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from harness.parity_harness import ANSWERS, LANES, Spilling, train
from spillway.errors import DeviceOutOfMemory, HostOutOfMemory, SpillIOError, SpillVolumeFull
from spillway.plan import ActivationPlan, Policy, Tier
from spillway_trainer import activation_spill
from spillway_trainer.activation_spill import ActivationSpill, records
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.tiers.device_ledger import ACTIVATIONS, DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Event, Lane, Submission
from spillway_trainer.tiers.nvme_slab import NvmeSlab
from spillway_trainer.tiers.spill_health import MAX_BAD_EXTENTS, SLOW_SECONDS, DeviceHealth

SIZE = 4096
"""floats of one activation: 16 KiB"""


class Pipeline:
    """`answers` segments of three sines each: every sine saves its input, 16 KiB."""

    def __init__(
        self,
        *answers: Policy,
        lanes: type = CpuLanes,
        device_bytes: int | None = None,
        host_bytes: int = 1 << 22,
        nvme_bytes: int = 1 << 22,
        window_bytes: int = 1 << 30,
        keeps: bool = False,
    ) -> None:
        """`keeps`: host memory takes what the disk rejects."""
        self.host, self.ledger = HostSlab(host_bytes), DeviceLedger(device_bytes)
        self.lanes = lanes(self.host, self.ledger)
        self.said: list[str] = []
        self.nvme = NvmeSlab(
            Path("/spill"),
            nvme_bytes,
            1,
            open_file=self._open,
            host=self.host if keeps else None,
            tell=self.said.append,
        )
        self.segments = [f"block{index}" for index in range(len(answers))]
        plan = ActivationPlan(answers=answers, minimum_bytes=1024, window_bytes=window_bytes)
        self.technique: ActivationSpill = activation_spill.build(
            plan, self.segments, ResidentParameters([]), self.lanes, self.ledger, self.nvme
        )
        self.x = torch.linspace(-1, 1, SIZE, requires_grad=True)

    def _open(self, directory: Path, nbytes: int, *, num_threads: int) -> FakeSpillFile:
        self.file = FakeSpillFile(directory, nbytes, num_threads=num_threads)
        return self.file

    def forward(self, *, drains: bool = False) -> Tensor:
        """`drains`: each segment is written, or has failed to be, before the next one runs."""
        y = self.x * 1.0
        for segment in self.segments:
            y = self.technique.hook.run(segment, lambda z: z.sin().sin().sin(), y)
            if drains:
                self.technique.store.drain()
        self.technique.start_backward()
        return y.sum()

    def expected(self) -> Tensor:
        x = self.x.detach().clone().requires_grad_()
        y = x * 1.0
        for _ in range(3 * len(self.segments)):
            y = y.sin()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient


def test_bytes_are_held_where_the_plan_says() -> None:
    pipeline = Pipeline(Policy.KEEP, Policy.HOST, Policy.NVME, Policy.RECOMPUTE)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    activation = SIZE * 4
    assert pipeline.technique.held_bytes() == {
        Tier.DEVICE: 3 * activation + activation,  # kept: three; recomputed: its input
        Tier.HOST: 3 * activation,
        Tier.NVME: 3 * activation,
    }
    loss.backward()
    assert sum(pipeline.technique.held_bytes().values()) == 0


def test_each_byte_moves_once_each_way() -> None:
    """Straight between device memory and the file."""
    pipeline = Pipeline(Policy.HOST, Policy.NVME)
    loss = pipeline.forward()
    pipeline.technique.store.drain()  # what backward needs before it is written is not written
    loss.backward()
    pipeline.technique.end_step()
    half = 3 * SIZE * 4
    assert pipeline.lanes.moved_bytes() == {"d2h": half, "h2d": half, "nvme_write": half, "nvme_read": half}


def test_a_storage_saved_many_times_moves_once() -> None:
    pipeline = Pipeline(Policy.HOST)
    y = pipeline.x * 1.0
    run = pipeline.technique.hook.run
    run("block0", lambda z: (z.sin() + z.view(64, 64).t().cos().flatten() + z[:100].exp().sum()).sum(), y).backward()
    pipeline.technique.end_step()
    # Saved: z by sin, cos and exp (one storage), and the result of exp (400 bytes: too small to move).
    assert pipeline.lanes.moved_bytes()["d2h"] == SIZE * 4


class Noting(LazyLanes):
    """Lazy lanes that write down what is submitted."""

    def __init__(self, host: HostSlab, ledger: DeviceLedger) -> None:
        super().__init__(host, ledger)
        self.notes: list[str] = []
        self.reloaded_bytes: list[int] = []

    def enqueue(self, given: Submission) -> Event:
        self.notes.append(given.label)
        if given.lane is Lane.H2D:
            self.reloaded_bytes.append(given.nbytes)
        return super().enqueue(given)

    def compute(self, **rest: Any) -> None:
        if not self.notes or self.notes[-1] != rest["label"]:
            self.notes.append(rest["label"])


def test_a_storage_that_two_segments_save_moves_once_and_reloads_alone() -> None:
    def network(run: Callable[..., Tensor], x: Tensor) -> Tensor:
        shared = x * 1.0
        first = run("block0", lambda z: z.sin().cos(), shared)  # saves shared, sin(shared)
        second = run("block1", lambda y: y.sin(), first)  # saves first
        return run("block2", lambda y, z: (y.exp() * z).sum(), second, shared)  # saves exp(second), shared

    pipeline = Pipeline(Policy.HOST, Policy.HOST, Policy.HOST, lanes=Noting)
    network(pipeline.technique.hook.run, pipeline.x).backward()
    pipeline.technique.end_step()
    one = SIZE * 4
    assert pipeline.lanes.moved_bytes()["d2h"] == 4 * one
    assert pipeline.lanes.reloaded_bytes == [one, one, one, one]  # block2, block1, shared alone, the rest of block0
    x = pipeline.x.detach().clone().requires_grad_()
    network(lambda _, block, *inputs: block(*inputs), x).backward()
    assert torch.equal(x.grad, pipeline.x.grad)


def test_a_source_is_freed_when_its_copy_is_complete() -> None:
    sources: list[int] = []

    def block(z: Tensor) -> Tensor:
        y = z.sin()
        sources.append(y.untyped_storage()._weak_ref())
        return y.sin()

    pipeline = Pipeline(Policy.HOST)
    result = pipeline.technique.hook.run("block0", block, pipeline.x * 1.0)
    pipeline.technique.end_step()
    assert torch.UntypedStorage._expired(sources[0])
    del result


def test_storage_objects_are_not_leaked() -> None:
    """A record's weak reference keeps the address of a storage object from being used again; gone, it is.

    Leaked, every step would have an address of its own. How often the allocator gives one again is its own affair.
    """
    addresses: set[int] = set()

    def block(z: Tensor) -> Tensor:
        y = z.sin()
        addresses.add(y.untyped_storage()._cdata)
        return y.sin()

    pipeline = Pipeline(Policy.HOST)
    for _ in range(300):
        pipeline.technique.hook.run("block0", block, pipeline.x * 1.0).sum().backward()
        pipeline.technique.end_step()
    assert len(addresses) < 270


def test_tables_and_labels_of_the_caller_stay_where_they_are() -> None:
    pipeline = Pipeline(Policy.HOST)
    table = torch.rand(SIZE)
    pipeline.technique.hook.run("block0", lambda z, t: (z * t).sum(), pipeline.x * 1.0, table).backward()
    assert pipeline.lanes.moved_bytes() == {}


def test_backward_reloads_the_segment_before_the_one_it_enters() -> None:
    pipeline = Pipeline(Policy.HOST, Policy.HOST, Policy.HOST, lanes=Noting)
    loss = pipeline.forward()
    pipeline.lanes.notes.clear()
    torch.autograd.grad(loss, pipeline.x)
    assert pipeline.lanes.notes == [
        *("reload of block2", "reload of block1", "backward of block2"),
        *("reload of block0", "backward of block1"),
        "backward of block0",
    ]


def test_at_most_two_segments_are_back_on_the_device() -> None:
    pipeline = Pipeline(*[Policy.HOST] * 6)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    pipeline.ledger.reset_peak()
    loss.backward()
    assert pipeline.ledger.peak_bytes <= 2 * 3 * SIZE * 4


def test_forward_waits_for_copies_instead_of_running_out_of_memory() -> None:
    segment = 3 * SIZE * 4
    pipeline = Pipeline(*[Policy.HOST] * 8, device_bytes=2 * segment)
    pipeline.forward().backward()
    assert torch.equal(pipeline.x.grad, pipeline.expected())
    assert pipeline.ledger.peak_bytes <= 2 * segment


def test_the_window_bounds_what_is_in_flight() -> None:
    segment = 3 * SIZE * 4
    pipeline = Pipeline(*[Policy.NVME] * 8, window_bytes=segment)
    loss = pipeline.forward()
    assert pipeline.ledger.peak_bytes <= 2 * segment
    assert pipeline.host.peak_bytes <= 2 * segment
    del loss


def test_a_device_too_full_to_prefetch_loads_at_the_first_need() -> None:
    segment = 3 * SIZE * 4
    pipeline = Pipeline(*[Policy.HOST] * 4, device_bytes=segment + SIZE * 4, lanes=LazyLanes)
    pipeline.forward().backward()
    assert torch.equal(pipeline.x.grad, pipeline.expected())


def test_a_device_too_small_for_one_segment_raises_from_backward() -> None:
    segment = 3 * SIZE * 4
    pipeline = Pipeline(Policy.HOST, device_bytes=segment)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    pipeline.ledger.charge("parameters", segment)
    with pytest.raises(DeviceOutOfMemory):
        loss.backward()


def test_reloads_have_the_alignment_and_the_offsets_of_the_originals() -> None:
    pipeline, seen = Pipeline(Policy.HOST), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, part: Tensor) -> Tensor:
            ctx.save_for_backward(part)
            return part.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            (part,) = ctx.saved_tensors
            seen.append((part.storage_offset(), part.stride(), part.data_ptr() % 64))
            return gradient

    y = pipeline.x * 1.0
    part = y.view(64, 64)[3:7, 5:].t()
    offset, stride, misalignment = part.storage_offset(), part.stride(), part.data_ptr() % 64
    pipeline.technique.hook.run("block0", Look.apply, part).sum().backward()
    assert seen == [(offset, stride, misalignment)]


def test_sources_and_buffers_are_really_poisoned_under_lazy_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix proves nothing if poison does not reach the memory: most sources must be solely ours by then."""
    answers: list[bool] = []

    def noting(tensor: Tensor) -> bool:
        answers.append(owned_once(tensor))
        return answers[-1]

    owned_once = records.owned_once
    monkeypatch.setattr(records, "owned_once", noting)
    outcome = train("transformer", partial(Spilling, answers=ANSWERS["host"], make_lanes=LazyLanes))
    assert outcome.moved_bytes["d2h"] > 0
    assert len(answers) > 40
    assert sum(answers) > 0.8 * len(answers)


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_a_failed_read_raises_with_tensor_offset_and_errno(lanes: type) -> None:
    pipeline = Pipeline(Policy.NVME, Policy.NVME, lanes=lanes)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    pipeline.file.failing.add("read")
    with pytest.raises(SpillIOError, match=r"saved storage \d of block1 at offset \d+.*errno 5") as caught:
        loss.backward()
    assert caught.value.details["errno"] == errno.EIO
    assert pipeline.x.grad is None


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_a_wrong_bit_on_the_disk_stops_the_step(lanes: type) -> None:
    pipeline = Pipeline(Policy.NVME, lanes=lanes)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    pipeline.file.failing.add("flip")
    with pytest.raises(SpillIOError, match="checksum"):
        loss.backward()
    assert pipeline.x.grad is None


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_a_failed_write_stops_the_step(lanes: type) -> None:
    pipeline = Pipeline(Policy.NVME, lanes=lanes)
    pipeline.file.failing.add("write")
    loss = pipeline.forward()
    with pytest.raises(SpillIOError, match=r"write of saved storage \d of block0 at offset \d+.*errno 5"):
        pipeline.technique.end_step()
    del loss


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_a_failed_write_stays_in_host_memory_and_changes_no_bit(lanes: type) -> None:
    pipeline = Pipeline(*[Policy.NVME] * 6, lanes=lanes, keeps=True)
    pipeline.file.failing.add("write")
    for _ in range(3):
        pipeline.x.grad = None
        loss = pipeline.forward()
        pipeline.technique.store.drain()
        loss.backward()
        pipeline.technique.end_step()
        assert torch.equal(pipeline.x.grad, pipeline.expected())
    assert pipeline.host.held_bytes == 0
    assert [re.sub(r"\d+", "#", line) for line in pipeline.said] == [
        *["spill: /spill: write of saved storage # of block# at offset #: Input/output error (errno #). The bytes "
          "of this write stay in host memory, and its place in the file is not used again"] * 3,
        "spill: /spill is not written to any more; its contents can still be read",
        "spill: activations of block#: goes to host memory instead of NVMe, because a device failed (/spill: write of "
        "saved storage # of block# at offset #: Input/output error (errno #)); later spills go there, too",
    ]  # fmt: skip
    assert pipeline.nvme.faults()["redirected"] >= 12


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_where_host_memory_is_full_too_activations_stay_on_the_device(lanes: type) -> None:
    """Room for the bytes of one segment, and their staging."""
    pipeline = Pipeline(*[Policy.NVME] * 6, lanes=lanes, keeps=True, host_bytes=2 * 3 * SIZE * 4)
    pipeline.file.failing.add("write")
    pipeline.nvme._devices[0].writes = DeviceHealth(num_bad_extents=MAX_BAD_EXTENTS - 1)
    for _ in range(3):
        pipeline.x.grad = None
        pipeline.forward(drains=True).backward()
        pipeline.technique.end_step()
        assert torch.equal(pipeline.x.grad, pipeline.expected())
    assert sum("goes to the device" in line for line in pipeline.said) == 1
    assert sum(pipeline.technique.held_bytes().values()) == pipeline.ledger.held_bytes == 0


def test_in_place_change_of_a_resident_activation_is_still_detected() -> None:
    pipeline = Pipeline(Policy.NVME, keeps=True, host_bytes=0)
    pipeline.nvme._devices[0].writes = DeviceHealth(is_retired=True)
    pipeline.nvme.first_failure = SpillIOError("write failed", errno=errno.EIO)
    y = pipeline.x * 1.0
    loss = pipeline.technique.hook.run("block0", lambda z: z.sin(), y).sum()
    assert pipeline.technique.held_bytes()[Tier.DEVICE] == SIZE * 4
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("lanes", [CpuLanes, LazyLanes])
def test_a_slow_disk_has_activations_go_to_host_memory_while_it_has_room(lanes: type) -> None:
    pipeline = Pipeline(Policy.NVME, Policy.NVME, lanes=lanes, keeps=True)
    pipeline.nvme._devices[0].writes = DeviceHealth(slow_seconds=SLOW_SECONDS)
    pipeline.forward().backward()
    assert "nvme_write" not in pipeline.lanes.moved_bytes()
    assert torch.equal(pipeline.x.grad, pipeline.expected())
    full = Pipeline(Policy.NVME, Policy.NVME, lanes=lanes, keeps=True, host_bytes=2 * 3 * SIZE * 4)
    full.nvme._devices[0].writes = DeviceHealth(slow_seconds=SLOW_SECONDS)
    full.forward(drains=True).backward()
    assert full.lanes.moved_bytes()["nvme_write"] == 2 * 3 * SIZE * 4
    assert full.said == []


def test_failed_write_that_is_never_read_is_raised_at_the_end_of_the_step() -> None:
    pipeline = Pipeline(Policy.NVME, lanes=LazyLanes)
    pipeline.file.failing.add("write")
    loss = pipeline.forward()
    del loss
    with pytest.raises(SpillIOError):
        pipeline.technique.end_step()


def test_a_full_spill_file_raises_out_of_the_forward() -> None:
    with pytest.raises(SpillVolumeFull, match="activations of block1"):
        Pipeline(Policy.NVME, Policy.NVME, nvme_bytes=4 * SIZE * 4).forward()


def test_a_full_host_slab_raises_out_of_the_forward() -> None:
    with pytest.raises(HostOutOfMemory, match="activations of block1"):
        Pipeline(Policy.HOST, Policy.HOST, host_bytes=4 * SIZE * 4).forward()


def test_a_stalled_disk_delays_and_changes_nothing() -> None:
    pipeline = Pipeline(Policy.NVME, Policy.NVME)
    pipeline.file.stalled = threading.Event()
    loss = pipeline.forward()
    assert pipeline.nvme.held_bytes == 6 * SIZE * 4
    pipeline.file.stalled.set()
    loss.backward()
    assert torch.equal(pipeline.x.grad, pipeline.expected())


def test_after_a_failed_step_all_memory_comes_back() -> None:
    pipeline = Pipeline(Policy.NVME, Policy.HOST)
    loss = pipeline.forward()
    pipeline.technique.end_step()
    pipeline.file.failing.add("read")
    with pytest.raises(SpillIOError):
        loss.backward()
    del loss
    pipeline.lanes.close()
    assert (pipeline.ledger.held_bytes, pipeline.host.held_bytes, pipeline.nvme.held_bytes) == (0, 0, 0)


def test_kept_and_spilled_views_of_one_storage_are_charged_once() -> None:
    pipeline = Pipeline(Policy.KEEP, Policy.HOST, lanes=LazyLanes)
    run, shared = pipeline.technique.hook.run, pipeline.x * 1.0
    losses = [run("block0", torch.sin, shared), run("block1", torch.cos, shared)]
    assert pipeline.ledger.by_purpose() == {ACTIVATIONS: SIZE * 4}
    del losses


def test_a_plan_for_another_number_of_segments_is_rejected() -> None:
    with pytest.raises(ValueError, match="policies for 2 segments, but the model has 4"):
        Spilling(transformer(), (Policy.HOST,) * 2, LANES["cpu"])


def test_a_plan_that_spills_without_a_spill_file_is_rejected() -> None:
    host, ledger = HostSlab(0), DeviceLedger(None)
    plan = ActivationPlan(answers=(Policy.NVME,))
    parameters = ResidentParameters(nn.Linear(2, 2).named_parameters())
    with pytest.raises(ValueError, match="no bytes for a spill file"):
        activation_spill.build(plan, ["s"], parameters, LazyLanes(host, ledger), ledger, None)
