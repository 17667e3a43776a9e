"""Whole attempts on the fake CUDA device, and the same on the CPU. To be called in a process over the fake."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from fakes import cuda_kernels
from harness import local_runs, sweep_runs
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway.plan import MemoryPlan, OptimizerPlan, ParameterPlan, Policy, Tier
from spillway_trainer import trainer
from spillway_trainer.activation_spill import rebuilding
from spillway_trainer.activation_spill.records import Record
from spillway_trainer.models.build import build_model
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.parallel import numa
from spillway_trainer.tiers import cuda, cuda_lanes
from spillway_trainer.tiers.arena import Ring
from spillway_trainer.tiers.cuda import CudaStreams
from spillway_trainer.tiers.cuda_lanes import CudaLanes, StreamOperation
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import DONE, Lane

SIZES = {"hiddenSize": 32, "numLayers": 3, "numHeads": 4, "intermediateSize": 48, "vocabSize": 300, "maxPositions": 64}
LLAMA = {name: size for name, size in SIZES.items() if name != "maxPositions"} | {
    "architecture": "llama",
    "dropout": "0.1",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": LLAMA | {"numKeyValueHeads": 2}},
    "llama in float32": {"config": LLAMA, "precision": {"compute": "float32"}},
    "llama in float16": {"config": LLAMA, "precision": {"compute": "float16"}},
    "gpt2": {"config": SIZES | {"architecture": "gpt2", "dropout": "0.1"}},
    "bert": {"config": SIZES | {"architecture": "bert", "dropout": "0.1"}},
    "t5": {"config": SIZES | {"architecture": "t5", "dropout": "0.1"}},
    "adapters": {"config": LLAMA | {"dropout": "0"}, "lora": {"rank": 4}},
}
STREAMED = OptimizerPlan(cpu_share=1.0, resident_share=0.0, chunk_parameters=4096, num_threads=1, overlap="Forward")
"""the optimizer plan for streamed parameters: the CPU updates weights that are not on the device"""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "disabled": {},
    "spread": {},
    "backward": {"overlap": "Backward", "speculative_parameters": 20000},
    "states on nvme": {"cpu_share": 0.2, "streamed_share": 0.3, "resident_share": 0.1, "nvme_share": 0.4},
    "streamed": {"order": "InOrder", "boundaries": Policy.KEEP},
    "weight-stationary": {"order": "WeightStationary", "boundaries": Policy.NVME},
}


def plan_of(technique: str, num_segments: int) -> MemoryPlan:
    changes = TECHNIQUES[technique]
    if technique == "disabled":
        return local_runs.disabled_plan(num_segments - 2)
    plan = local_runs.spread_plan(num_segments - 2)
    answers = itertools.islice(itertools.cycle((Policy.NVME, Policy.HOST, Policy.RECOMPUTE)), num_segments - 2)
    activations = plan.activations.model_copy(update={"answers": (Policy.KEEP, *answers, Policy.KEEP)})
    plan = plan.model_copy(update={"activations": activations})
    if "order" in changes:
        homes = tuple(Tier.NVME if index in (1, 2) else Tier.HOST for index in range(num_segments))  # not tied
        parameters = ParameterPlan(homes=homes, num_slots=2, **changes)
        return plan.model_copy(update={"optimizer": STREAMED, "parameters": parameters})
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update=changes)})


def job_of(root: Path, technique: str, model: str, epoch: int, steps: int, moments: str = "float32") -> JobFile:
    document = yaml.safe_load(local_runs.JOB.replace("TEXT", str(local_runs.write_text(root.parent / "text"))))
    document["spec"]["model"] = MODELS[model]
    document["spec"]["training"]["steps"] = steps
    document["spec"]["training"]["optimizer"]["moments"] = moments
    document["spec"]["data"]["evaluation"] = {"fraction": "0.05", "everySteps": 2, "sequences": 4}
    document["spec"]["checkpoint"] = {"everySteps": 2, "keep": 2}
    if technique == "backward":
        del document["spec"]["training"]["gradientClipping"]
    job = local_runs.job_file(root, root.parent / "text", root.parent / f"corpus of {model}", epoch)
    return job.model_copy(update={"spec": TrainingJob.model_validate(document).spec})


def write_contract(root: Path, technique: str, model: str) -> None:
    """Writes the job and plan files with which a trainer on a device is started."""
    job = job_of(root, technique, model, 1, 4)
    plan = plan_of(technique, len(build_model(job.spec).segments)).model_copy(update={"device": "Cuda"})
    for name, content in (("job", job), ("plan", plan)):
        (root / f"{name}.json").write_text(content.model_dump_json(), encoding="utf-8")


def attempt(
    root: Path, technique: str, model: str, on_device: bool, epoch: int = 1, steps: int = 4, moments: str = "float32"
) -> Any:
    """Runs one attempt; returns (exit code, what the fake counted, races, (losses, weights and states))."""
    job = job_of(root, technique, model, epoch, steps, moments)
    plan = plan_of(technique, len(build_model(job.spec).segments))
    return *carried_out(job, plan, on_device), outcome(root, steps)


def carried_out(job: JobFile, plan: MemoryPlan, on_device: bool) -> tuple[int, dict[str, int], list[str]]:
    """Runs `job` under `plan`; returns (exit code, what the fake counted, races)."""
    from fakes import fake_streams
    from spillway_trainer.__main__ import attempt as run

    with ExitStack() as stack:
        cuda_kernels.compose_attention()
        if on_device:
            cuda_kernels.install()
            stack.enter_context(fake_streams.handing_over(SimpleNamespace(clocks=cuda_kernels.Clocks())))
            plan = for_device(plan)
        code = run(job, lambda: plan)
    cuda_kernels.raise_failed()
    return code, cuda_kernels.take_counts(), cuda_kernels.take_races()


def for_device(plan: MemoryPlan) -> MemoryPlan:
    members = tuple(one.model_copy(update={"plan": for_device(one.plan)}) for one in plan.members)
    return plan.model_copy(update={"device": "Cuda", "members": members})


def lean_attempt(root: Path, model: str, on_device: bool) -> Any:
    """As `attempt`, under a plan that rebuilds what it can; also returns the number of rebuilds."""
    num_rebuilt, run = 0, rebuilding.Rebuilt._run

    def counted(rebuilt: Any) -> Any:
        nonlocal num_rebuilt
        num_rebuilt += 1
        return run(rebuilt)

    rebuilding.Rebuilt._run = counted  # type: ignore[method-assign]
    job = job_of(root, "spread", model, 1, 4)
    plan = plan_of("spread", len(build_model(job.spec).segments))
    lean = plan.activations.model_copy(update={"lean": True, "minimum_bytes": 512})
    found = carried_out(job, plan.model_copy(update={"activations": lean}), on_device)
    return *found, outcome(root, 4), num_rebuilt


SWEEPS = ("turns", "one resident base", "one base")


def sweep_attempt(root: Path, kind: str, on_device: bool) -> Any:
    """As `attempt`, for a sweep: members of several sizes and update rules that take turns, or adapters that are
    attached together to one frozen base. Returns the outcome of each member by name."""
    text, corpus = local_runs.write_text(root.parent / "text"), root.parent / f"corpus of {kind}"
    document = sweep_runs.JOB
    if kind != "turns":
        made = yaml.safe_load(document.replace("OBJECTIVE", ""))
        made["spec"] |= {"model": MODELS["adapters"], "members": ADAPTERS}
        document = yaml.safe_dump(made)
    job = sweep_runs.sweep_file(root, text, corpus, 1, document)
    plan = sweep_runs.sweep_plan(job, 3)
    if kind != "turns":
        homes = (Tier.HOST, Tier.NVME, Tier.HOST, Tier.HOST, Tier.HOST) if kind == "one base" else ()
        order = {"order": "WeightStationary", "num_slots": 2, "boundaries": Policy.HOST} if homes else {}
        members = tuple(
            one.model_copy(
                update={
                    "base": ADAPTERS[0]["name"],
                    "num_attached": len(ADAPTERS),
                    "plan": one.plan.model_copy(
                        update={"optimizer": STREAMED, "parameters": ParameterPlan(homes=homes, **order)}
                    ),
                }
            )
            for one in plan.members
        )
        turns = plan.turns.model_copy(update={"num_attached": len(ADAPTERS)}) if plan.turns else None
        plan = members[0].plan.model_copy(update={"members": members, "turns": turns})
    found, names = carried_out(job, plan, on_device), [one.name for one in plan.members]
    outputs = [(sweep_runs.member_output(job, name), sweep_runs.member_checkpoints(job, name)) for name in names]
    return *found, {name: outcome_in(*directories, 8) for name, directories in zip(names, outputs, strict=True)}


ADAPTERS = [
    {"name": "low", "training": {"optimizer": {"learningRate": "1e-3"}}},
    {"name": "high", "training": {"optimizer": {"learningRate": "5e-2"}}},
]


def outcome(root: Path, steps: int) -> tuple[dict[int, float], dict[str, Any]]:
    """Losses by step, and weights and states of the checkpoint of step `steps`, as bytes."""
    return outcome_in(root, root / "checkpoints", steps)


def outcome_in(root: Path, checkpoints: Path, steps: int) -> tuple[dict[int, float], dict[str, Any]]:
    tensors = sweep_runs.final_tensors(checkpoints, steps) if [*checkpoints.glob(f"step-{steps}.e*")] else {}
    return sweep_runs.losses(root), {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}


def contexts_before_placement(root: Path) -> list[int]:
    """The number of contexts that the process has made each time it chooses its cores."""
    place, found = numa.place, []

    def noted(*arguments: Any) -> numa.CoreBinding:
        found.append(cuda_kernels.take_counts().get("contexts", 0))
        return place(*arguments)

    numa.place = noted
    code, *_ = attempt(root, "disabled", "llama", True)
    assert code == 0
    return found


def assert_same(found: Any, then: Any) -> None:
    """Asserts that two outcomes are equal in every bit."""
    (losses, tensors), (then_losses, then_tensors) = found, then
    assert losses == then_losses
    assert tensors.keys() == then_tensors.keys()
    assert tensors
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, then_tensors[name]), name


def killed_attempt(root: Path, technique: str, model: str, steps: int = 4) -> int:
    """Runs the first attempt and kills it once a checkpoint exists; returns the number of steps that it had made."""
    child = os.fork()
    if child == 0:
        attempt(root, technique, model, True, 1, steps)
        os._exit(0)
    while not [*(root / "checkpoints").glob("step-*")]:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return len(sweep_runs.losses(root))


def attempt_on_the_second_device(root: Path) -> dict[str, int]:
    """Runs an attempt on the second device; returns what the fake counted."""
    cuda.device_of = lambda _: torch.device("cuda", 1)
    code, counts, _, _ = attempt(root, "spread", "llama", True)
    assert code == 0
    return dict(counts)


def counts_of_steps(root: Path, technique: str) -> list[dict[str, int]]:
    """Runs an attempt; returns what the fake counted in each of its four steps."""
    found, step = [], trainer.train_step

    def counted(*arguments: Any) -> Any:
        cuda_kernels.take_counts()
        ended = step(*arguments)
        found.append(dict(cuda_kernels.take_counts()))
        return ended

    trainer.train_step = counted
    attempt(root, technique, "llama", True)
    return found


def mark_made_in_a_lane() -> None:
    """Makes and waits for a mark in a lane's thread, as a destructor that the garbage collector runs there does. Raises
    its error."""
    lanes = CudaLanes(HostSlab(1 << 20), DeviceLedger(None), CudaStreams(torch.device("cuda", 0)))
    lanes.submit(Lane.H2D, lambda: lanes.computed().wait()).wait()
    lanes.close()


def reductions_in_lower_precision() -> tuple[bool, ...]:
    cuda.prepare(torch.device("cuda", 0), 1 << 30)
    chosen = torch.backends.cuda.matmul
    return (
        chosen.allow_tf32,
        chosen.allow_bf16_reduced_precision_reduction,
        chosen.allow_fp16_reduced_precision_reduction,
        chosen.allow_fp16_accumulation,
    )


# --- planted defects --------------------------------------------------------------------------------------------------


def lose_waits() -> None:
    """The compute stream waits for nothing."""
    CudaLanes.wait = lambda *_: None  # type: ignore[method-assign]


def lose_marks() -> None:
    """Marks of the compute stream are lost, so that nothing waits for it."""
    CudaLanes.computed = lambda _: DONE  # type: ignore[method-assign]


def lose_births() -> None:
    """Streams use memory before the compute stream has finished with its earlier contents."""
    wait, acquire = CudaStreams.wait, CudaLanes.acquire

    def without_birth(*arguments: Any) -> Any:
        found = acquire(*arguments)
        if isinstance(found, cuda_lanes.DeviceBuffer):
            found.born = None  # type: ignore[assignment]
        return found

    CudaLanes.acquire = without_birth  # type: ignore[method-assign]
    CudaStreams.wait = lambda self, stream, event: event and wait(self, stream, event)  # type: ignore[method-assign]


def lose_edges() -> None:
    """Streams do not wait for each other."""

    def order(streams: object, stream: object, event: Any) -> None:
        if isinstance(event, cuda_lanes.StreamOperation):
            event.wait_for_launch()
        elif not isinstance(event, cuda_lanes.Mark):
            event.wait()

    cuda_lanes.order = order


def complete_early() -> None:
    """The host takes an operation as complete as soon as the operation is in its stream."""

    def complete(operation: Any) -> None:
        operation._work, operation._after, operation.regions, operation.done = None, (), (), True

    cuda_lanes.StreamOperation.complete = complete  # type: ignore[method-assign]


def release_at_once() -> None:
    """Memory is released while operations still use it."""
    release = CudaLanes.release
    CudaLanes.release = lambda self, region, after=(): release(self, region)  # type: ignore[method-assign]


def let_go_at_launch() -> None:
    """Nothing keeps the tensors of an operation alive while it runs."""
    launch, allocate = StreamOperation.launch, cuda_kernels.allocate

    def launched(operation: StreamOperation, *where: Any) -> None:
        launch(operation, *where)
        operation._work, operation.regions = None, ()

    def allocated(*arguments: Any) -> Tensor:
        """It could get any of the free memory, not only what this run's timing gives it."""
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    cuda_kernels.tell_of_memory(segment["stream"], block["address"], block["size"], "free memory")
        return allocate(*arguments)

    cuda_kernels.allocate = allocated
    StreamOperation.launch = launched  # type: ignore[method-assign]


def mark_the_beginning() -> None:
    """Waiting for an operation waits only for what came before it in its stream."""
    launch = StreamOperation.launch

    def launched(operation: StreamOperation, *where: Any) -> None:
        launch(operation, *where)
        operation.end = operation.begin

    StreamOperation.launch = launched  # type: ignore[method-assign]


def mix_up_streams() -> None:
    """All work goes to the compute stream of the model."""
    CudaStreams.launch = lambda self, stream, work: work()  # type: ignore[method-assign]


def lose_turns() -> None:
    """A buffer of a ring is filled again while it is still being read."""
    take = Ring.take

    def taken(ring: Ring) -> Any:
        slot = take(ring)
        slot.free = ()
        return slot

    Ring.take = taken  # type: ignore[method-assign]


def read_norms_early() -> None:
    """The host takes an operation of a stream as complete without waiting for it."""
    StreamOperation.wait = lambda self: self.wait_for_launch()  # type: ignore[method-assign]


def forget_updates() -> None:
    """Forward does not wait for the updates of its parameters."""
    OptimizerOffload.wait = lambda *_: None  # type: ignore[method-assign]


def forget_reloads() -> None:
    """Backward uses saved activations before they have been loaded back."""
    load_into = Record.load_into

    def loaded_into(record: Record, *loaded: Any) -> None:
        load_into(record, *loaded)
        record._awaited = True

    Record.load_into = loaded_into  # type: ignore[method-assign]


def register_nothing() -> None:
    """Copies use host memory that is not registered with the device."""
    CudaStreams.pin = CudaStreams.unpin = lambda *_: None  # type: ignore[method-assign]


def miscompile() -> None:
    """The device's update of a state has one wrong bit."""
    update = cuda_kernels.TRITON.update

    def updated(scalars: Any, master: Any, moments: Any, gradient: Any, out: Any) -> None:
        update(scalars, master, moments, gradient, out)
        moments[0].view(torch.int32)[-1] += 1

    cuda_kernels.TRITON.update = updated


DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", " "): one
    for one in (
        *(lose_waits, lose_marks, lose_births, lose_edges, let_go_at_launch, mark_the_beginning),
        *(lose_turns, read_norms_early, forget_updates, forget_reloads),
    )
}
"""defects of streams, which the judge finds in every run"""
HOST_DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", " "): one for one in (complete_early, release_at_once, mix_up_streams)
}
"""defects in which the host continues too early, which shows only if a stream is late"""
OTHER_DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", " "): one for one in (register_nothing, miscompile)
}


def attempt_with(root: Path, defect: str) -> Any:
    """As `attempt`, with a planted defect."""
    (DEFECTS | HOST_DEFECTS | OTHER_DEFECTS)[defect]()
    return attempt(root, "backward" if defect == "forget updates" else "spread", "llama", True)


def waits_for_another_stream(is_correct: bool) -> bool:
    other, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    with torch.cuda.stream(other):
        if is_correct:
            other.wait_stream(torch.cuda.default_stream())
        x.add_(1)
        event = other.record_event()
    if is_correct:
        event.wait()
    return bool((x + 1).cpu().eq(2).all())


def frees_what_another_stream_uses(is_correct: bool) -> bool:
    other, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    other.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(other):
        y = x + 1
    if is_correct:
        x.record_stream(other)
    del x
    z = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    return bool(y.cpu().eq(2).all()) and bool(z.cpu().eq(0).all())


def reads_before_the_copy_is_done(is_correct: bool) -> bool:
    host, x = torch.zeros(1000).pin_memory(), torch.ones(1000, device="cuda")
    host.copy_(x, non_blocking=True)
    if is_correct:
        torch.cuda.synchronize()
    return bool(host.eq(1).all())


def writes_what_is_still_being_copied(is_correct: bool) -> bool:
    host, x = torch.ones(1000).pin_memory(), torch.empty(1000, device="cuda")
    x.copy_(host, non_blocking=True)
    if is_correct:
        torch.cuda.synchronize()
    host.zero_()
    return bool(x.cpu().eq(1).all())


def copies_a_storage_to_where_a_lane_freed(is_correct: bool) -> bool:
    """Copies a storage into memory that a lane has just freed, like a model's buffers after a spilled boundary. Only
    the lane knows that its copy to the host is complete; the next user of the memory relies on the allocator."""
    other, host, y = torch.cuda.Stream(), torch.zeros(1 << 20).pin_memory(), torch.zeros(1 << 20, device="cuda")
    freed = [torch.ones(1 << 20, device="cuda")]
    address = freed[0].data_ptr()
    other.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(other):
        host.copy_(freed[0], non_blocking=True)
        event = other.record_event()

    def let_go() -> None:
        cuda_kernels.fake().fake_cuda_own_clock()
        if is_correct:
            event.synchronize()
        freed.clear()

    lane = threading.Thread(target=let_go)
    lane.start()
    lane.join()
    copied = copy.deepcopy(y)
    assert copied.data_ptr() == address
    torch.cuda.synchronize()
    return bool(host.eq(1).all())


PROGRAMS: dict[str, Callable[[bool], bool]] = {
    one.__name__.replace("_", " "): one
    for one in (
        waits_for_another_stream,
        frees_what_another_stream_uses,
        reads_before_the_copy_is_done,
        writes_what_is_still_being_copied,
        copies_a_storage_to_where_a_lane_freed,
    )
}


def run_program(program: str, is_correct: bool) -> tuple[bool, list[str]]:
    """Runs one of PROGRAMS; returns (whether its result is right, races)."""
    cuda_kernels.install()
    found = PROGRAMS[program](is_correct)
    torch.cuda.synchronize()
    cuda_kernels.raise_failed()
    return found, cuda_kernels.take_races()
