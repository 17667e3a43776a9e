"""job.json + plan.json -> run_job -> exit code.

    python -m spillway_trainer DIRECTORY      DIRECTORY holds job.json and plan.json; all other paths are in them

Every end leaves a termination message (one JSON object) where job.json asks for it, and the documented exit code.
spillway_trainer.launch starts one such process per rank, says by torchrun's variables which one it is, and gives it a
termination message and a metrics port of its own (SPILLWAY_TERMINATION_PATH, SPILLWAY_METRICS_PORT).
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

from spillway.api.job_file import JobFile
from spillway.errors import ExitCode, FieldProblem, InvalidJob, UserError
from spillway.plan import MemoryPlan

from .ending import completed, ending_of, leave, write_termination
from .kernels import native
from .ranks import World
from .reporting.recorder import Recorder, rejections
from .reporting.trackers import Trackers
from .run_job import report, run_job
from .sweep.attempt import open_sweep_recorder, run_sweep
from .trainer import RunProgress, StopRequest

TERMINATION_VARIABLE = "SPILLWAY_TERMINATION_PATH"

Contract = TypeVar("Contract", bound=BaseModel)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(__doc__ or "")
        return ExitCode.USER_ERROR
    directory = Path(arguments[0])
    try:
        job = read(directory / "job.json", JobFile)
    except UserError as error:  # without job.json, nothing says where a termination message goes
        print(f"{error.exit_code.reason}: {error}", flush=True)
        return error.exit_code
    return attempt(job, lambda: read(directory / "plan.json", MemoryPlan))


def attempt(job: JobFile, read_plan: Callable[[], MemoryPlan]) -> int:
    """Run one rank of an attempt and say how it ended: in the termination message, by the exit code, and (rank 0) in
    run.jsonl."""
    native.return_freed_memory()
    stop, progress, world = StopRequest(), RunProgress(), World()
    recorder: Recorder | None = None
    trackers: Trackers | None = None
    try:
        stop.listen()
        world = World.of(os.environ)
        sweep_recorder = open_sweep_recorder(job) if job.spec.members else None
        recorder = sweep_recorder or open_recorder(Path(job.output_directory), world)
        plan = read_plan()
        if world.is_first:
            trackers = Trackers(job, plan, report)
        if sweep_recorder is not None:
            ending = completed(run_sweep(job, plan, sweep_recorder, progress, stop, world))
        else:
            ending = completed(run_job(job, plan, recorder, progress, stop, world))
    except BaseException as error:  # also Ctrl-C, and what a lane raised
        stop.at_once = False  # not a call: SIGTERM, which must not interrupt what follows, would be handled during it
        ending = ending_of(error)
        if not ending.expected:
            traceback.print_exc()
    termination = Path(os.environ.get(TERMINATION_VARIABLE, job.termination_message_path))
    write_termination(termination, ending, world.rank, progress.step)
    with suppress(UserError):  # the attempt may have ended because the disk rejects this very line
        if recorder is not None:
            recorder.end(progress.step, ending.reason, ending.exit_code, ending.message)
    if trackers is not None:
        trackers.close(ending.exit_code)
    print(f"{ending.reason}: {ending.message}", flush=True)
    return ending.exit_code


def open_recorder(output: Path, world: World) -> Recorder:
    """Opens rank 0's run.jsonl, and creates its directory, because a pod's volume is empty; other ranks record
    nothing."""
    if not world.is_first:
        return Recorder(None)
    with rejections(output):
        output.mkdir(parents=True, exist_ok=True)
    return Recorder(output / "run.jsonl")


def read(path: Path, contract: type[Contract]) -> Contract:
    """Reads one of the two files that say what to do. Raises UserError if it is absent or not valid."""
    try:
        return contract.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror or error}; start the job with spillway run, or in a cluster with "
            "spillway submit: then this file is written before the trainer starts"
        ) from error
    except ValidationError as error:
        wrong = [FieldProblem(".".join(map(str, e["loc"])) or "content", "", e["msg"]) for e in error.errors()]
        raise InvalidJob(str(path), wrong) from error


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
