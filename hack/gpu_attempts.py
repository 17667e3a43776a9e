"""The cells of gpu_session.py that run whole attempts on real lanes, each in a process of its own.

python hack/gpu_attempts.py --output DIR --cell NAME
"""

from __future__ import annotations

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import gpu_cells
from cases import device_attempts
from gpu_cells import is_fake, measured, say
from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.plan import MemoryPlan, Tier
from spillway_trainer import __main__ as trainer_program
from spillway_trainer import probe
from spillway_trainer.models.build import build_model

DEVICE_BYTES = 2 * 2**30
"""device budget of a small attempt; cuBLAS's workspace and whole segments of the allocator count, too"""
STEPS, SANITIZED_STEPS = 4, 3
MEASURED = ("PerSecond", "Seconds", "Efficiency")
"""endings of the names of measured values in a profile"""
TOOLS = ("memcheck", "racecheck")


def parity(output: Path, model: str, moments: str = "float32") -> None:
    """Runs attempts with every technique and compares each with an attempt of the same job without techniques."""
    gpu_cells.device()
    wanted: dict[str, Any] = {}
    for technique in device_attempts.TECHNIQUES:
        root = output / "parity" / f"{model} {moments}" / technique
        job, plan = attempt_of(root, technique, model, STEPS, moments=moments)
        same = job.spec.model_dump_json()
        if same not in wanted:
            root = root.with_name(f"{technique}, plain")
            wanted[same] = ended(*attempt_of(root, technique, model, STEPS, plan="disabled", moments=moments))
        found = differences(ended(job, plan), wanted[same])
        say(**{technique: found or "equal"})
        if found:
            sys.exit(f"{technique}: other bits than without any")


def attempt_of(
    root: Path, technique: str, model: str, steps: int, epoch: int = 1, plan: str = "", moments: str = "float32"
) -> tuple[JobFile, MemoryPlan]:
    """Returns job and plan of an attempt. For the first one (`epoch` 1), removes an old `root`."""
    if epoch == 1:
        shutil.rmtree(root, ignore_errors=True)
    job = device_attempts.job_of(root, technique, model, epoch, steps, moments)
    found = device_attempts.plan_of(plan or technique, len(build_model(job.spec).segments))
    return job, found.model_copy(update={"device": "Cuda", "budget": {**found.budget, Tier.DEVICE: DEVICE_BYTES}})


def ended(job: JobFile, plan: MemoryPlan) -> Any:
    """Runs an attempt. Returns its losses, and its weights and states; exits if the attempt fails."""
    code = trainer_program.attempt(job, lambda: plan)
    if code != 0:
        sys.exit(f"{job.output_directory}: exit code {code}")
    return device_attempts.outcome(Path(job.output_directory), job.spec.training.steps)


def differences(found: Any, wanted: Any) -> list[str]:
    (losses, tensors), (then, then_tensors) = found, wanted
    named = [f"the loss of step {step}" for step in then if losses.get(step) != then[step]]
    named += [f"{len(tensors)} tensors"] if tensors.keys() != then_tensors.keys() or not tensors else []
    named += [name for name, tensor in tensors.items() if (tensor != then_tensors.get(name)).any()]
    return [*named[:8], *([f"{len(named) - 8} more"] if len(named) > 8 else [])]


def killed(output: Path) -> None:
    """Runs a whole attempt in a trainer process; then one that is killed once it has a checkpoint, and the next one,
    which must end with the bits of the whole one."""
    gpu_cells.device()
    steps = 6 if is_fake() else 60
    whole, cut = (output / "killed" / name for name in ("whole", "cut"))
    trainer(written(whole, 1, steps)).wait()
    process = trainer(written(cut, 1, steps))
    while process.poll() is None and not [*(cut / "checkpoints").glob("step-*")]:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        sys.exit(f"it was over, with {process.returncode}, before it could be killed")
    say(killed_after_steps=len(device_attempts.outcome(cut, steps)[0]), of=steps)
    code = trainer(written(cut, 2, steps)).wait()
    different = differences(device_attempts.outcome(cut, steps), device_attempts.outcome(whole, steps))
    say(resumed="equal" if code == 0 and not different else different, exit_code=code)
    sys.exit(code != 0 or bool(different))


def sanitizer(output: Path, tool: str) -> None:
    """Runs compute-sanitizer over a few steps, in a process where every tensor has an allocation of its own."""
    found = shutil.which("compute-sanitizer")
    before: tuple[str, ...] = ()
    gpu_cells.device()
    if is_fake():
        say(run=False, why="a fake device has nothing to see: the attempt without it")
    elif found is None:
        say(run=False, why="no compute-sanitizer in PATH")
        return
    else:
        before = (found, "--tool", tool, "--error-exitcode", "99")
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    sys.exit(trainer(written(output / "sanitizer" / tool, 1, SANITIZED_STEPS), *before).wait())


def written(root: Path, epoch: int, steps: int) -> Path:
    """Writes job.json and plan.json of an attempt to `root` and returns `root`."""
    job, plan = attempt_of(root, "spread", "llama", steps, epoch)
    (root / "job.json").write_text(job.model_dump_json())
    (root / "plan.json").write_text(plan.model_dump_json())
    return root


def trainer(root: Path, *before: str) -> subprocess.Popen[bytes]:
    """Starts the trainer's own entry point in a new process."""
    return subprocess.Popen([*before, sys.executable, __file__, "--output", str(root), "--cell", "trainer"])


def train(root: Path) -> None:
    gpu_cells.device()
    trainer_program.leave(trainer_program.main([str(root)]))


def run_by_command(output: Path) -> None:
    """Runs `spillway run` with a job file that does not name the device."""
    gpu_cells.device()
    from spillway_cli import __main__ as cli  # noqa: PLC0415 - typer and rich are not everywhere
    from spillway_cli.run import local_run  # noqa: PLC0415

    if is_fake():  # the fake's operators compute real numbers only in a trainer process of this script
        local_run.trainer_command = lambda run, _: [  # type: ignore[assignment]
            *(sys.executable, "-m", "spillway_cli.run.trainer_process", "gpu_attempts"),
            *("--output", str(run.path), "--cell", "trainer"),
        ]
    root = output / "command"
    shutil.rmtree(root, ignore_errors=True)
    job = root.with_suffix(".yaml")
    job.write_text(local_runs.JOB.replace("TEXT", str(local_runs.write_text(output / "text"))))
    code = cli.run_app(["run", str(job), "--output", str(root)])
    device = json.loads((root / "plan.json").read_text())["device"]
    say(device=device, steps=len(local_runs.events(root, "step")), exit_code=code)
    sys.exit(code != 0 or device != "Cuda")


def calibrate_by_command(output: Path) -> None:
    gpu_cells.device()
    from spillway_cli import __main__ as cli  # noqa: PLC0415 - typer and rich are not everywhere
    from spillway_cli.calibrate import command as calibrate_command  # noqa: PLC0415

    if is_fake():  # run the probe in this process, where the fake's operators compute real numbers
        from cases import device_runs  # noqa: PLC0415

        device_runs.shrink_probe()
        device = probe.device_named("Cuda")
        calibrate_command.run_probe = lambda directory, threads, quick, _: probe.measure(directory, 1, quick, device)
    profile = output / "node-profile.yaml"
    code = cli.run_app(["calibrate", "--quick", "--directory", str(output), "--output", str(profile)])
    found = yaml.safe_load(profile.read_text())["spec"]
    say(exit_code=code, device=found["deviceKind"])
    rates = {**found, **found["link"]}
    measured(**{name: float(value) for name, value in rates.items() if name.endswith(MEASURED)})
    if is_fake():
        profile.unlink()
    sys.exit(code != 0 or found["deviceKind"] != "Cuda")


WORK: dict[str, Callable[[Path], None]] = {
    **{f"parity {model}": partial(parity, model=model) for model in device_attempts.MODELS},
    "parity llama with int8 moments": partial(parity, model="llama", moments="int8"),
    "killed and resumed": killed,
    "spillway run": run_by_command,
    "spillway calibrate": calibrate_by_command,
    **{f"sanitizer {tool}": partial(sanitizer, tool=tool) for tool in TOOLS},
    "trainer": train,
}


if __name__ == "__main__":
    gpu_cells.do(WORK, __doc__)
