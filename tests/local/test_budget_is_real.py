"""The budget holds by the kernel's own figures: the peak RSS of a fresh process, and a cgroup limit that kills.

On a CPU, device and host memory are the same RAM, so a plan only saves what it moves to NVMe. Therefore this job's
memory is mostly activations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.memory import Advanced
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import Overrides, make_plan
from spillway.units import GIB, MIB

MARGIN_BYTES = 64 * MIB
"""memory in addition to the budgets: the C allocator's free lists, matrix products' scratch, pages of checkpoint and
corpus"""

# In float32, because CPUs without bfloat16 instructions take minutes for these products.
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: wide}
spec:
  model:
    config: {architecture: llama, hiddenSize: 256, numLayers: 16, numHeads: 4, intermediateSize: 688, vocabSize: 512}
    precision: {compute: float32}
  data: {text: {path: TEXT}}
  training: {steps: 2, sequenceLength: 256, globalBatchSize: 8, microBatchSize: 8}
  memory: {mode: Auto, budget: {device: 160Mi, host: 352Mi, nvme: 2Gi},
           advanced: {optimizer: {placement: Host}, activations: {policy: Nvme}}}
"""
DEVICE_BYTES, HOST_BYTES = 160 * MIB, 352 * MIB


@dataclass(frozen=True)
class Measured:
    exit_code: int
    """negative if killed by a signal: minus its number"""
    peak_bytes: int


MEASURING = """
import os, sys
null = os.open(os.devnull, os.O_WRONLY)
actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def measure(command: list[str], cgroup: Path | None = None) -> Measured:
    """Runs a fresh process; returns its exit code and its own peak RSS, from the kernel."""
    if cgroup is not None:
        script = f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"'
        command = ["sh", "-c", script, "sh", *command]
    # A small process runs it: a child's figure begins with its parent's peak, and the tests' process may be large.
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURING, *command], stdout=subprocess.PIPE, check=True, text=True
    )
    exit_code, peak_kib = map(int, done.stdout.split())
    return Measured(exit_code, peak_kib * 1024)


def trainer(directory: Path) -> list[str]:
    return [sys.executable, "-m", "spillway_trainer", str(directory)]


@pytest.fixture(scope="module")
def idle_bytes() -> int:
    """Peak RSS of a process that imports the trainer and does nothing."""
    return measure([sys.executable, "-c", "import spillway_trainer.__main__"]).peak_bytes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text and its corpus, which is built before the measurements, in another process."""
    root = tmp_path_factory.mktemp("wide")
    text = local_runs.write_text(root / "text")
    subprocess.run(
        [sys.executable, "-m", "spillway_trainer.corpus.tokens", "--text", str(text), str(root / "corpus"), "512"],
        check=True,
    )
    return text, root / "corpus"


def write_run(directory: Path, corpus: tuple[Path, Path], *, disabled: bool) -> Path:
    """Writes job.json and plan.json as `spillway run` would for two cores and plenty of memory; returns `directory`."""
    job = parse_job(JOB.replace("TEXT", str(corpus[0])), "wide job")
    if disabled:
        memory = job.spec.memory.model_copy(
            update={
                "mode": "Disabled",
                "advanced": Advanced.model_validate(
                    {"optimizer": {"placement": "Device"}, "activations": {"policy": "Keep"}}
                ),
                "budget": job.spec.memory.budget.model_copy(update={"device": 4 * GIB}),
            }
        )
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"memory": memory})})
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(plan_of(job).model_dump_json())
    (directory / "job.json").write_text(job_file(job, directory, corpus[1]).model_dump_json(by_alias=True))
    return directory


def plan_of(job: TrainingJob) -> MemoryPlan:
    outcome = make_plan(job, local_node(2, 4 * GIB, 4 * GIB, 16 * GIB), Overrides(world_size=1))
    assert isinstance(outcome, MemoryPlan), outcome
    return outcome


def job_file(job: TrainingJob, directory: Path, corpus: Path) -> JobFile:
    return JobFile(
        name="wide",
        uid="test",
        epoch=1,
        spec=job.spec,
        output_directory=str(directory),
        corpus_directory=str(corpus),
        checkpoint_directory=str(directory / "checkpoints"),
        spill_directory=str(directory),
        termination_message_path=str(directory / "termination.json"),
        compute_threads=2,
    )


@pytest.mark.ci
def test_peak_rss_stays_within_device_and_host_budget(
    idle_bytes: int, corpus: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = measure(trainer(write_run(tmp_path / "planned", corpus, disabled=False)))
    plain = measure(trainer(write_run(tmp_path / "plain", corpus, disabled=True)))
    above_idle, plain_above_idle = planned.peak_bytes - idle_bytes, plain.peak_bytes - idle_bytes
    allowed = DEVICE_BYTES + HOST_BYTES + MARGIN_BYTES
    budgets = f"device {DEVICE_BYTES // MIB} + host {HOST_BYTES // MIB} + margin {MARGIN_BYTES // MIB}"
    with capsys.disabled():
        print(
            f"\npeak RSS above an idle import: {above_idle / MIB:.0f} MiB with NVMe spill "
            f"(allowed {allowed // MIB} = {budgets}), {plain_above_idle / MIB:.0f} MiB plain"
        )
    assert (planned.exit_code, plain.exit_code) == (0, 0)
    assert above_idle <= allowed < plain_above_idle


@pytest.mark.ci
def test_plain_run_needs_more_than_twice_the_device_budget(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    plan = MemoryPlan.model_validate_json((write_run(tmp_path / "x", corpus, disabled=True) / "plan.json").read_text())
    assert plan.bytes[Tier.DEVICE].total > 2 * DEVICE_BYTES


def test_device_budget_below_the_plan_raises_device_out_of_memory(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    """The ledger acts as the device's allocator: with a plan that predicted too little, a run ends as on a GPU, with
    exit code 70."""
    directory = write_run(tmp_path / "small", corpus, disabled=True)
    plan = MemoryPlan.model_validate_json((directory / "plan.json").read_text())
    small = plan.model_copy(update={"budget": {**plan.budget, Tier.DEVICE: 64 * MIB}})
    (directory / "plan.json").write_text(small.model_dump_json())
    assert measure(trainer(directory)).exit_code == ExitCode.DEVICE_OUT_OF_MEMORY


@dataclass(frozen=True)
class MemoryCgroup:
    """A memory cgroup, version 1 or 2."""

    path: Path
    limit_file: str
    peak_file: str

    def limit(self, nbytes: int) -> None:
        (self.path / self.limit_file).write_text(str(nbytes))

    def peak_bytes(self) -> int:
        return int((self.path / self.peak_file).read_text())


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    name = f"spillway-test-{os.getpid()}"
    group = (
        MemoryCgroup(v1 / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        if v1.is_dir()
        else MemoryCgroup(v2 / name, "memory.max", "memory.peak")
    )
    try:
        group.path.mkdir()
        group.peak_bytes()
    except OSError as error:
        if group.path.is_dir():
            group.path.rmdir()
        pytest.skip(f"skipped: no memory cgroup can be made here ({error})")
    yield group
    group.path.rmdir()


@pytest.mark.ci
def test_job_finishes_under_a_cgroup_limit_that_kills_the_plain_run(
    cgroup: MemoryCgroup, corpus: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is the charge of an idle import, plus budgets and margin. (RSS does not measure the charge, because
    file pages of libraries are charged to the cgroup that reads them first.)"""
    measure([sys.executable, "-c", "import spillway_trainer.__main__"], cgroup.path)
    idle = cgroup.peak_bytes()
    cgroup.limit(idle + DEVICE_BYTES + HOST_BYTES + MARGIN_BYTES)
    planned = measure(trainer(write_run(tmp_path / "planned", corpus, disabled=False)), cgroup.path)
    plain = measure(trainer(write_run(tmp_path / "plain", corpus, disabled=True)), cgroup.path)
    with capsys.disabled():
        print(
            f"\ncgroup limit {(DEVICE_BYTES + HOST_BYTES + MARGIN_BYTES) // MIB} MiB above idle ({idle // MIB} MiB): "
            f"the planned run ends with {planned.exit_code}, the plain one with {plain.exit_code}"
        )
    assert planned.exit_code == 0
    assert plain.exit_code == -9
