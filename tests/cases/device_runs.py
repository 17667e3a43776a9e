"""`spillway run` on a machine with the fake CUDA device. To be called in a process over the fake."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

from cases import device_attempts
from fakes import cuda_kernels
from harness.places import TESTS
from spillway_cli import __main__ as cli
from spillway_cli.calibrate import command as calibrate_command
from spillway_trainer import probe


def spillway(*arguments: str) -> tuple[int, str, str]:
    """Runs the command; its trainers have the fake device's kernels. Returns (exit code, stdout, stderr)."""
    os.environ["PYTHONPATH"] = f"{TESTS / 'fakes' / 'cuda_trainer'}{os.pathsep}{os.environ['PYTHONPATH']}"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run_app([*arguments])
    return code, out.getvalue(), err.getvalue()


def run(job: Path, root: Path, *options: str) -> tuple[int, str, tuple[object, object]]:
    """Runs a job; returns (exit code, stderr, (losses, weights and states of step 4))."""
    code, _, said = spillway("run", str(job), "--output", str(root), *options)
    return code, said, device_attempts.outcome(root, 4)


def run_sweep(job: Path, root: Path, *options: str) -> tuple[int, str, dict[str, tuple[object, object]]]:
    """As `run`, for a sweep; the outcomes are by member."""
    code, _, said = spillway("run", str(job), "--output", str(root), *options)
    members = sorted((root / "members").iterdir()) if code == 0 else []
    outcomes = {
        one.name: device_attempts.outcome_in(one, root / "checkpoints" / "members" / one.name, 4) for one in members
    }
    return code, said, outcomes


def calibrated(root: Path, job: Path) -> tuple[dict[str, list[float]], str, str]:
    """Calibrates with tiny models; returns (figures, profile that `spillway calibrate` writes, output of `spillway
    plan` with that profile)."""
    os.environ["XDG_STATE_HOME"] = str(root)
    cuda_kernels.compose_attention()
    cuda_kernels.install()
    shrink_probe()
    probe.as_the_trainer(1)
    result = json.loads(json.dumps(probe.measure(root, 1, True, probe.device_named("Cuda"))))
    cuda_kernels.raise_failed()
    calibrate_command.run_probe = lambda *_: result
    code, out, err = spillway("calibrate", "--directory", str(root))
    assert code == 0, out + err
    _, planned, said = spillway("plan", str(job))
    profile = (root / "spillway" / "node-profile-cuda.yaml").read_text(encoding="utf-8")
    return result["figures"], profile, said + planned


def shrink_probe() -> None:
    """Makes `spillway calibrate` measure little, with models that take no time."""
    probe.MATRIX_SIZES, probe.COPY_BYTES, probe.DISK_BYTES = (8, 16, 24), 1 << 20, 1 << 24
    probe.QUICK_CELLS = tuple(
        probe.Cell(32 * size, 2, 300, 32, 2, compute, *where)
        for compute, size, where in (
            ("bfloat16", 1, ()), ("bfloat16", 2, ()), ("bfloat16", 1, ("Host", "Host")), ("float32", 1, ()),
            ("float32", 2, ()),
        )
    )  # fmt: skip
    probe.DEVICE_CELLS = ()
