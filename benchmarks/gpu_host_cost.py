"""What a step costs the host of a GPU: CPU seconds of threads, operations, events and launches, compared with an older
commit.

    PYTHONPATH=operator:trainer_image python benchmarks/gpu_host_cost.py [--quick] [--json FILE]

A llama of 7 B parameters on one rank, optimizer states in host memory. Needs no GPU: torch's own CUDA build and
allocator run on the tests' fake CUDA device in its virtual mode, in which kernels and large copies do nothing and
finish at once, and memory is addressed but not used. So this measures the work of the host and none of the device's.

Time is the kernel's count of nanoseconds on a core of the threads of Python and autograd, over steps that end with a
flush, minus the cost of forward and backward alone of the same model in the same process. The arithmetic of lane cpu
(update, sum, norm) is left out, and so are Triton's launches, which are counted instead. Both commits run on the same
fake device in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "e53d713"
"""the commit that ours is compared with"""
CELLS = {
    "updated by the CPU": "optimizer: {placement: Host}",
    "interleaved": "optimizer: {placement: Interleaved}",
    "weights streamed": "optimizer: {placement: Host}\n      parameters: {placement: Stream}",
}
STEPS = 3
"""steps in a row that are measured together; results are divided by this number"""
DEVICE_GIB, HOST_GIB = 80, 200
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: benchmark}
spec:
  model:
    config:
      {architecture: llama, hiddenSize: 4096, numLayers: 32, numHeads: 32, intermediateSize: 11008, vocabSize: 32000}
    precision: {compute: bfloat16}
  data: {builtin: PythonStdlib}
  training: {steps: 100, sequenceLength: 512, globalBatchSize: 1, microBatchSize: 1, gradientClipping: "1.0"}
  memory:
    budget: {device: 72Gi, host: 190Gi}
    advanced:
      activations: {policy: Keep}
      CELL
"""


# --- one commit and cell, in a process of its own ---------------------------------------------------------------------


def either(now: str, before: str, package: str = "spillway") -> Any:
    """Imports a module by its name `now`, or by its name `before` in commit BEFORE."""
    with suppress(ModuleNotFoundError):
        return importlib.import_module(f"{package}.{now}")
    return importlib.import_module(f"{package}.{before}")


class Play:
    """Steps of the trainer whose code is on PYTHONPATH."""

    def __init__(self, cell: str) -> None:
        import torch  # noqa: PLC0415

        from spillway.plan import Tier  # noqa: PLC0415
        from spillway_trainer import assemble  # noqa: PLC0415
        from spillway_trainer.models.build import build_model  # noqa: PLC0415
        from spillway_trainer.models.chain import allocate  # noqa: PLC0415
        from spillway_trainer.tiers import cuda  # noqa: PLC0415

        self.launches: Counter[str] = Counter()
        self._without_arithmetic()
        job = either("api.load", "api").parse_job(JOB.replace("CELL", CELLS[cell]), "the benchmark's job")
        node = either("planning.hardware", "hardware").resolve_node("1xh100")
        plan: Any = either("planning.planner", "planner").make_plan(job, node, explained=False)
        place = tempfile.mkdtemp()
        names = ("output_directory", "corpus_directory", "checkpoint_directory", "spill_directory")
        directories = dict.fromkeys(names, place)
        file = either("api.job_file", "job").JobFile(
            name="benchmark", uid="benchmark", epoch=1, spec=job.spec, **directories,
            termination_message_path=f"{place}/end.json", compute_threads=1,
        )  # fmt: skip
        device = torch.device("cuda", 0)
        cuda.prepare(device, plan.budget[Tier.DEVICE])
        self._bare = build_model(job.spec)
        self._assembly = assemble.assemble(file, plan, device=device)
        allocate(self._bare, device)
        for parameter in self._bare.parameters():
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        tokens = torch.zeros((1, job.spec.training.sequence_length), dtype=torch.int64, device=device)
        self._batch = tokens, tokens, tokens.numel()
        self.plan = {
            "chunk values": plan.optimizer.chunk_parameters,
            "share of the device": plan.optimizer.streamed_share,
            "weights streamed": plan.parameters.streams,
        }

    def _without_arithmetic(self) -> None:
        from spillway_trainer import assemble  # noqa: PLC0415
        from spillway_trainer.optimizer_offload import offload  # noqa: PLC0415
        from spillway_trainer.tiers import host_slab  # noqa: PLC0415

        kernels = either("kernels.dispatch", "kernels", "spillway_trainer")
        triton_kernels = either("kernels.triton_kernels", "triton_kernels", "spillway_trainer")
        square_sum = either("kernels.reference", "reference", "spillway_trainer").SquareSum

        def nothing(*_: object, **__: object) -> None:
            return

        class Kernel:
            """A kernel whose launches are counted and do nothing."""

            def __init__(self, name: str, launches: Counter[str]) -> None:
                self._name, self._launches = name, launches

            def __getitem__(self, grid: object) -> Callable[..., None]:
                self._launches[self._name] += 1
                return nothing

        host_slab._PRIVATE |= 0x4000  # MAP_NORESERVE
        assemble.check_device = nothing
        offload._initialise = nothing
        for name in ("update_kernel", "accumulate_kernel", "square_sum_kernel"):
            assert hasattr(triton_kernels, name)
            setattr(triton_kernels, name, Kernel(name, self.launches))
        kernels.native = SimpleNamespace(
            available=lambda: True, update=nothing, accumulate=nothing, copy_batch=nothing,
            square_sum=lambda *_, **__: square_sum(),
        )  # fmt: skip

    def steps(self) -> None:
        """Takes STEPS steps as the trainer's loop does, then waits for everything that they started."""
        ours = self._assembly
        for _ in range(STEPS):
            ours.optimizer.begin(1e-5)
            loss = ours.model(*self._batch)
            ours.start_backward()
            loss.backward()
            loss.item()
            norm = ours.optimizer.norm()
            ours.optimizer.step(1e-5, min(1.0, 1.0 / (norm + 1e-6)))
            ours.end_step()
        ours.optimizer.flush()

    def bare_steps(self) -> None:
        for _ in range(STEPS):
            loss = self._bare(*self._batch)
            loss.backward()
            loss.item()

    def measured(self) -> dict[str, float]:
        """Returns milliseconds of a core per step."""
        from spillway_trainer import trainer  # noqa: PLC0415

        with getattr(trainer, "settled_objects", nullcontext)():  # as the trainer's loop does, if this commit has it
            whole, bare = spent(self.steps), spent(self.bare_steps)
        found = {"lanes": whole["lanes"], "beside the model": whole["model"] - bare["model"]}
        return {"all": sum(found.values()), **found, "the model": bare["model"]}

    def counts(self) -> dict[str, Any]:
        """Returns how many operations, events, copies and launches a step has."""
        from ctypes import CDLL, c_char_p  # noqa: PLC0415

        take = CDLL("libcuda.so.1").fake_cuda_take_counts
        take.restype = c_char_p
        take()
        self.launches.clear()
        with submitted(type(self._assembly.tiers.lanes)) as operations:
            self.steps()
        of_fake = {
            name: int(number) for number, _, name in (line.partition(" ") for line in take().decode().splitlines())
        }
        wanted = ("events made", "events recorded", "h2d copies", "d2h copies")
        found = {"operations": sum(operations.values()), **operations}
        found |= {name: of_fake.get(name, 0) for name in wanted}
        found["Triton launches"] = sum(self.launches.values())
        return {name: number / STEPS for name, number in found.items()}


def drop_gradient(parameter: Any) -> None:
    parameter.grad = None


@contextmanager
def submitted(lanes: Any) -> Iterator[Counter[str]]:
    """Counts submitted operations by lane while the context is open."""
    counts: Counter[str] = Counter()
    submit = lanes.submit

    def counted(self: Any, lane: Any, *given: Any, **more: Any) -> Any:
        counts[f"on lane {lane}"] += 1
        return submit(self, lane, *given, **more)

    lanes.submit = counted
    try:
        yield counts
    finally:
        lanes.submit = submit


def spent(work: Callable[[], None]) -> dict[str, float]:
    """Returns milliseconds of a core per step: those of the main thread and autograd's, and those of the lanes'."""
    before = core_nanoseconds()
    work()
    after = core_nanoseconds()
    return {name: (after[name] - before[name]) / STEPS / 1e6 for name in after}


def core_nanoseconds() -> dict[str, int]:
    tasks = Path("/proc/self/task")
    lanes = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("lane-")}
    names = {task.name: (task / "comm").read_text() for task in tasks.iterdir()}
    autograd = {int(number) for number, name in names.items() if name.startswith("pt_autograd")}

    def of(threads: set[Any]) -> int:
        return sum(int((tasks / str(number) / "schedstat").read_text().split()[0]) for number in threads)

    return {"lanes": of(lanes), "model": of({os.getpid(), *autograd})}


def child(cell: str) -> None:
    """Writes a line of JSON with plan and counts, then a line of measurements for every line of standard input."""
    # An editable installation finds its own tree, whatever PYTHONPATH says.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    importlib.import_module("spillway_trainer.environment")  # before torch
    play = Play(cell)
    play.steps()
    play.bare_steps()
    answers = os.fdopen(os.dup(1), "w")
    for answer in iter([{"plan": play.plan, "counts": play.counts()}]):
        print(json.dumps(answer), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(play.measured()), file=answers, flush=True)


# --- both beside each other -------------------------------------------------------------------------------------------


class Contestant:
    def __init__(self, tree: Path, cell: str) -> None:
        from harness import fake_cuda  # noqa: PLC0415 - the tests' own

        code = os.pathsep.join([str(tree / "operator"), str(tree / "trainer_image")])
        environment = {
            **fake_cuda.environment(), "PYTHONPATH": code, "FAKE_CUDA_VIRTUAL": "1",
            "FAKE_CUDA_MIB": str(2 * DEVICE_GIB << 10),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--cell", cell],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.facts = self._answer()

    def measured(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process over the fake CUDA has ended: see its output above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(quick: bool) -> Mapping[str, float]:
    from paired import alternate, median  # noqa: PLC0415

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(
            ["git", "archive", BEFORE, "operator", "trainer_image"], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(place, filter="data")
        for cell in CELLS:
            both = {"ours": Contestant(ROOT, cell), BEFORE: Contestant(Path(place), cell)}
            found = alternate({name: one.measured for name, one in both.items()}, seconds=15 if quick else 60)
            for one in both.values():
                one.close()
            print(f"{cell}: {json.dumps({name: one.facts['plan'] for name, one in both.items()})}")
            rows = {name: one.facts["counts"] for name, one in both.items()}
            for name, rounds in found.items():
                rows[name] |= {f"ms of a core, {part}": median(one[part] for one in rounds) for part in rounds[0]}
            for row in dict.fromkeys([*rows["ours"], *rows[BEFORE]]):
                print(f"  {row:32} {rows['ours'].get(row, 0):10.1f} {rows[BEFORE].get(row, 0):10.1f}")
            ratios = [ours["all"] / theirs["all"] for ours, theirs in zip(found["ours"], found[BEFORE], strict=True)]
            figures[f"{cell}: core seconds, ours over {BEFORE}"] = median(ratios)
            figures[f"{cell}: operations a step"] = rows["ours"]["operations"]
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--cell")
    if cell := parser.parse_known_args()[0].cell:
        child(cell)
    else:
        sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "hack", "benchmarks")]
        import paired

        limits = {f"{cell}: core seconds, ours over {BEFORE}": 0.25 for cell in CELLS}
        paired.main("gpu_host_cost", __doc__, measure, limits)
