"""job.json + plan.json -> run_job -> exit code.

    python -m spillway_trainer DIRECTORY      DIRECTORY holds job.json and plan.json; all other paths are in them

Every end leaves a termination message (one JSON object) where job.json asks for it, and the documented exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from spillway.errors import ExitCode
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


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(__doc__ or "")
        return ExitCode.USER_ERROR
    directory = Path(arguments[0])
    job = JobFile.model_validate_json((directory / "job.json").read_text(encoding="utf-8"))
    plan = MemoryPlan.model_validate_json((directory / "plan.json").read_text(encoding="utf-8"))
    return attempt(job, plan)


def attempt(job: JobFile, plan: MemoryPlan) -> int:
    """Run one attempt and say how it ended, in run.jsonl, in the termination message and by the exit code."""
    native.return_freed_memory()
    stop, progress = StopRequest(), Progress()
    stop.listen()
    recorder = Recorder(Path(job.output_directory) / "run.jsonl")
    try:
        run_job(job, plan, recorder, progress, stop)
        ending = completed(f"trained to step {progress.step}")
    except Exception as error:
        ending = ending_of(error)
        if ending.expected:
            print(f"{ending.reason}: {ending.message}", flush=True)
        else:
            traceback.print_exc()
    recorder.end(progress.step, ending.reason, ending.exit_code, ending.message)
    write_termination(Path(job.termination_message_path), ending, RANK, progress.step)
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
