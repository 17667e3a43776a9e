"""job.json + plan.json -> run_job -> exit code.

    python -m spillway_trainer DIRECTORY      DIRECTORY holds job.json and plan.json; all other paths are in them

Every end leaves a termination message (one JSON object) where job.json asks for it, and the documented exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from spillway.errors import ExitCode, FieldProblem, InvalidJob, UserError
from spillway.job import JobFile
from spillway.plan import MemoryPlan

# Before torch is imported. An OpenMP worker spins for some 10 µs before it sleeps: for ever, it would fight the I/O and
# update threads for the cores; not at all, every small operation would pay for waking it (small models: steps x 1.6).
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# Tensors in huge pages: large blocks go back to the system when they are freed (native.return_freed_memory), and this
# makes getting new ones cheap again.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from . import native
from .ending import completed, ending_of, write_termination
from .recorder import Recorder
from .run_job import RANK, run_job
from .trainer import Progress, StopRequest

Contract = TypeVar("Contract", bound=BaseModel)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(__doc__ or "")
        return ExitCode.USER_ERROR
    directory = Path(arguments[0])
    try:
        job = read(directory / "job.json", JobFile)
    except UserError as error:  # nothing says where a termination message goes
        print(f"{error.exit_code.reason}: {error}", flush=True)
        return error.exit_code
    return attempt(job, lambda: read(directory / "plan.json", MemoryPlan))


def attempt(job: JobFile, read_plan: Callable[[], MemoryPlan]) -> int:
    """Run one attempt and say how it ended, in run.jsonl, in the termination message and by the exit code."""
    native.return_freed_memory()
    stop, progress = StopRequest(), Progress()
    recorder: Recorder | None = None
    try:
        stop.listen()
        recorder = Recorder(Path(job.output_directory) / "run.jsonl")
        run_job(job, read_plan(), recorder, progress, stop)
        ending = completed(f"trained to step {progress.step}")
    except BaseException as error:  # also Ctrl-C and what a lane threw
        ending = ending_of(error)
        if not ending.expected:
            traceback.print_exc()
    write_termination(Path(job.termination_message_path), ending, RANK, progress.step)
    with suppress(UserError):  # the disk that refuses a line may be what ended the attempt
        if recorder is not None:
            recorder.end(progress.step, ending.reason, ending.exit_code, ending.message)
    print(f"{ending.reason}: {ending.message}", flush=True)
    return ending.exit_code


def read(path: Path, contract: type[Contract]) -> Contract:
    """One of the two files that say what to do. Raises UserError when it is absent or not what it should be."""
    try:
        return contract.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; spillway run writes it") from error
    except ValidationError as error:
        wrong = [FieldProblem(".".join(map(str, e["loc"])) or "content", "", e["msg"]) for e in error.errors()]
        raise InvalidJob(str(path), wrong) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
