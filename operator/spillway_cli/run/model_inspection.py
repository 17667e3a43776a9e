"""Finds the shape of a model that must be built to know its sizes, in a trainer process: torch is not imported here."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from spillway.api.limits import INSPECTION_DEADLINE_SECONDS
from spillway.api.model import Model
from spillway.api.training_job import TrainingJob
from spillway.errors import ExitCode, UserError
from spillway.extras import need_for
from spillway.planning.model_shape import ModelShape

from ..console import status_if_slow


def needs_inspection(model: Model) -> bool:
    """Whether the model must be built: the YAML has no sizes for a source or an entrypoint, and adapters change which
    activations each module saves."""
    return model.config is None or model.lora is not None


def inspected_shape(file: Path, job: TrainingJob, claims: Mapping[str, Path]) -> ModelShape | None:
    """The shape of the model of `job`, which was read from `file`; None if the job gives the model's sizes.

    Raises UserError when the model cannot be built.
    """
    if not needs_inspection(job.spec.model):
        return None
    need_for(job.spec, num_ranks=1)
    stands_for = [f"--claim={name}={directory}" for name, directory in claims.items()]
    # -P: files in the current directory must not shadow modules.
    command = [sys.executable, "-P", "-m", "spillway_trainer.inspect", str(file), *stands_for]
    with status_if_slow("building the model without allocating it, to find its sizes"):
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                timeout=INSPECTION_DEADLINE_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"spec.model: building the model took more than {INSPECTION_DEADLINE_SECONDS} s, the limit in a "
                f"cluster, too; run {shlex.join(command)} to see what it waits for"
            ) from error
    if done.returncode == ExitCode.USER_ERROR:
        raise UserError(done.stderr.strip())
    try:
        if done.returncode == 0:
            return ModelShape.from_json(done.stdout)
    except (ValueError, TypeError, KeyError):
        pass  # it exited before it answered: os._exit in the model's own code
    said = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
    raise UserError(
        f"spec.model: python -m spillway_trainer.inspect {file} exited with code {done.returncode} and no result"
        f"{said}; run that command to see its full output"
    )
