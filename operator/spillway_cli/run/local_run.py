"""A job on this machine: checks before the first attempt, and the files that the attempts read.

job -> claims and paths exist -> plan -> same run as the directory's? -> job.json, plan.json -> attempts
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from spillway.api.job_file import JobFile
from spillway.api.model import Location
from spillway.api.progress import MemberState
from spillway.api.rejections import not_used_locally
from spillway.api.sweep.members import named_specs
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import CheckpointCorrupt, ExitCode, FieldProblem, InvalidJob, UserError
from spillway.plan import MemoryPlan, Tier
from spillway_trainer.checkpoints import directory as checkpoint_directory
from spillway_trainer.corpus.text_source import text_source
from spillway_trainer.tiers.volumes import reject_memory

from ..record.attempt_ends import Attempt, Rung
from ..record.directory import RunDirectory, is_text, write_atomic
from ..record.log import RunLog, read_run_log
from .attempts import StopSignals, Trainer, Watcher, run_attempts

IDENTITY = ("model", "data", "training", "objective")
"""Sections of the spec that a run's numbers depend on; they depend on no other section."""
MAY_CHANGE = (
    "spec.training.steps", "spec.training.epochs", "spec.training.schedule", "spec.training.optimizer.learningRate",
    "spec.training.earlyStopping",
)  # fmt: skip
"""Fields in these sections that affect only later steps; checkpoints record their values. A sweep's members are
identified by their learning rates, so only the steps may change there, and nothing if halving compares members."""
RANK_COUNTS = ("spec.parallelism.nodes", "spec.parallelism.devicesPerNode")


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job that this machine can run, with the local settings that are not in its YAML."""

    job: TrainingJob
    claims: Mapping[str, Path]
    corpus: Path
    spill: tuple[Path, ...]
    """One directory per volume, at least one."""
    metrics_port: int | None = None
    num_ranks: int = 1


def reject_wrong_fields(job: TrainingJob, claims: Mapping[str, Path] | None, source: str) -> None:
    """Raises InvalidJob with every field that a run on this machine cannot honour, including missing text and models.
    `claims`: name -> directory; None: unknown, so their contents are not checked."""
    if problems := _missing_locations(job, claims):
        raise InvalidJob(source, problems)


def unused_fields(spec: TrainingJobSpec, num_ranks: int = 1) -> list[str]:
    """Fields that a local run ignores; checkpoints always go below --output, not to a claim.

    Nodes and devices per node are used when --ranks equals their product, a strategy when there are several ranks.
    """
    claim = ["spec.checkpoint.claim"] if spec.checkpoint.claim else []
    counts = RANK_COUNTS if num_ranks == spec.parallelism.world_size else ()
    divides = num_ranks > 1 and spec.parallelism.strategy != "Auto"
    return sorted({*not_used_locally(spec), *claim} - {*counts, *(["spec.parallelism.strategy"] if divides else [])})


def parse_claims(texts: Sequence[str]) -> dict[str, Path]:
    """Parses `--claim NAME=DIR`, repeated. Raises UserError for another form or a missing directory."""
    claims: dict[str, Path] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if not name or not equals or not directory:
            raise UserError(f"--claim {text}: write NAME=DIRECTORY, for example --claim corpus=/data/corpus")
        if name in claims:
            raise UserError(f"--claim {text}: {name} is given twice; keep one")
        if not Path(directory).is_dir():
            raise UserError(f"--claim {text}: {directory} is not a directory; name the claim's local directory")
        if not is_text(Path(directory)):
            raise UserError(f"--claim {text}: the path is not valid UTF-8; name another directory")
        claims[name] = Path(directory).resolve()
    return claims


def _missing_locations(job: TrainingJob, claims: Mapping[str, Path] | None) -> list[FieldProblem]:
    texts = job.spec.texts
    problems = [
        _missing(f"spec.{name}", place, claims, is_text=name in texts) for name, place in job.spec.places.items()
    ]
    return [problem for problem in problems if problem is not None]


def _missing(
    field: str, location: Location, claims: Mapping[str, Path] | None, *, is_text: bool
) -> FieldProblem | None:
    if location.path is not None:
        path, name, value, wanted = Path(location.path), "path", location.path, "no such file or directory"
    elif claims is None:
        return None
    elif location.claim is None or location.claim not in claims:
        wanted = f"give its directory: --claim {location.claim}=DIRECTORY"
        return FieldProblem(f"{field}.claim", str(location.claim), wanted)
    else:
        path, name, value = claims[location.claim] / location.sub_path, "subPath", location.sub_path
        wanted = f"{path} does not exist; correct it, or the --claim"
    if not path.exists() and location.fetch is not None:
        not_yet = "not fetched yet; spillway run fetches it before it plans"
        return FieldProblem(f"{field}.{name}", value, not_yet) if claims is None else None
    if not path.exists():
        return FieldProblem(f"{field}.{name}", value, wanted)
    try:
        if is_text:
            text_source(path, field)
        if field == "spec.checkpoint.from":
            checkpoint_directory.checkpoints_at(path)
    except UserError as error:
        return FieldProblem(f"{field}.{name}", value, str(error).removeprefix(f"{field}: "))
    return None


def reject_taken_port(port: int | None) -> None:
    """Raises UserError when the port cannot be used: every attempt of the trainer would crash."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise UserError(f"--metrics-port {port}: {error.strerror}; name a free port") from error


def read_job_file(path: Path) -> JobFile | None:
    """The job.json of an earlier invocation, or None. Raises UserError when it cannot be read."""
    try:
        return JobFile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, ValueError, OSError) as error:
        raise UserError(
            f"{path}: damaged, or written by another version of spillway; name another --output, or use that version"
        ) from error


def reject_another_run(run: RunDirectory, job: TrainingJob, earlier: JobFile | None) -> list[str]:
    """Raises UserError with every differing field when the directory holds a run that this job does not continue.
    Returns the differences in MAY_CHANGE fields, each with both values.

    If no step was trained, a corrected job may reuse the directory; the earlier job's token corpora are deleted.
    """
    if earlier is None:
        if run.checkpoints.exists():
            raise UserError(f"--output {run.path}: has checkpoints but no job.json; name another directory")
        return []
    log, places = read_run_log(run.log), checkpoint_places(run).values()
    with_start = not any(map(checkpoint_directory.names_in, places))
    there, here = (
        identity_of(one, other, with_start=with_start)
        for one, other in ((earlier.spec, job.spec), (job.spec, earlier.spec))
    )
    differing = [*differing_fields(earlier.name, job.metadata.name, "metadata.name")]
    differing += differing_fields(there, here, "spec")
    lines = {path: f"{path} was {shown(before)}, is now {shown(now)}" for path, before, now in differing}
    if bool(earlier.spec.members) != bool(job.spec.members):
        was, now = ("a sweep", "one run") if earlier.spec.members else ("one run", "a sweep")
        lines = {"spec.members": f"spec.members: {was} was trained there, but this job is {now}", **lines}
    if not (trained := steps_trained(run, log)):
        if lines or any(end.exit_code == ExitCode.USER_ERROR for end in log.ends[-1:]):
            forget_text(run)
        return []
    sweeps_may = () if job.spec.compared_by.halving else MAY_CHANGE[:1]
    may_change = sweeps_may if job.spec.members else MAY_CHANGE
    wrong = [line for path, line in lines.items() if not path.startswith(may_change)]
    for name, one in named_specs(job.spec).items():
        steps, epochs = log.steps_planned(one.training), one.training.epochs
        if steps and steps < trained.get(name, 0):
            of_member = f" of member {name}" if name else ""
            asked = f"steps{of_member} is {steps}" if epochs is None else f"epochs is {epochs}, which is {steps} steps"
            wrong.append(f"spec.training.{asked}, but {trained[name]} steps are already trained")
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong)
        raise UserError(
            f"--output {run.path}: contains a run that this job does not continue:{listed}\n"
            "to continue that run, restore these values (steps or epochs: at least as many as are trained); else name "
            "another directory"
        )
    return [*lines.values()]


def checkpoint_places(run: RunDirectory) -> dict[str, Path]:
    """Member ("" unless a sweep) -> directory of its checkpoints."""
    return {"": run.checkpoints} | {directory.name: directory for directory in run.member_checkpoints.glob("*")}


def steps_trained(run: RunDirectory, log: RunLog) -> dict[str, int]:
    """Member ("" unless a sweep) -> the last step with a log line or a checkpoint from any attempt."""
    found = [("", step) for step in log.steps] + [(one.member, one.step) for one in log.members.values()]
    places = checkpoint_places(run).items()
    found += [(member, name.step) for member, place in places for name in checkpoint_directory.names_in(place)]
    return {member: step for member, step in sorted(found) if step}


def forget_text(run: RunDirectory) -> None:
    """Deletes the directory's token corpora, on which no step was trained, and the plans of attempts: the text and the
    model may have changed."""
    for index in (*run.path.glob("corpus/index.json"), *run.path.glob("corpus-*/index.json")):
        if (index.parent / "tokenizer.json").is_file():  # else it is the user's own folder
            shutil.rmtree(index.parent, ignore_errors=True)
    for plan in run.attempts.glob("attempt-*/plan.json"):
        plan.unlink(missing_ok=True)


def identity_of(spec: TrainingJobSpec, others: TrainingJobSpec, *, with_start: bool) -> dict[str, Any]:
    """The parts of the spec that identify a run, including what members change. Members may join and leave a sweep
    unless halving rounds compare them: without halving, only members that are also in `others` are included."""
    fixed = spec.model_dump(mode="json", by_alias=True, include=set(IDENTITY))
    halves = any(one.objective is not None and one.objective.halving for one in (spec, others))
    there = {member.name for member in others.members}
    members = {one.name: one.changes for one in spec.members if halves or one.name in there}
    return {**fixed, "members": members, **(start_of(spec) if with_start else {})}


def start_of(spec: TrainingJobSpec) -> dict[str, Any]:
    """What a run begins from, as long as it has no checkpoint of its own."""
    place = spec.checkpoint.from_
    return {"checkpoint": {"from": None if place is None else place.model_dump(mode="json", by_alias=True)}}


def differing_fields(there: object, here: object, path: str) -> Iterator[tuple[str, object, object]]:
    """Yields unequal leaves as (dotted path, there, here)."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from differing_fields(there.get(key), here.get(key), f"{path}.{key}")
    elif there != here:
        yield path, there, here


def shown(value: object) -> str:
    return "absent" if value is None else json.dumps(value) if isinstance(value, dict | list) else str(value)


def is_complete(run: RunDirectory, job: TrainingJob) -> bool:
    """Whether an earlier invocation trained to the end and its checkpoint is intact, or ended every member of a
    sweep. Raises CheckpointCorrupt when there are checkpoints but none is usable."""
    log = read_run_log(run.log)
    if not log.ends or log.ends[-1].exit_code != 0:
        return False
    if job.spec.members:
        over = {name: one for name, one in log.members.items() if one.state.is_over}
        return all(
            name in over and (over[name].state is not MemberState.COMPLETE or over[name].step >= one.training.num_steps)
            for name, one in named_specs(job.spec).items()
        )
    training, steps = job.spec.training, log.steps_planned(job.spec.training)
    if log.ends[-1].step < steps and training.early_stopping is None:
        return False
    found = checkpoint_directory.choose_resume(run.checkpoints).checkpoint
    if found is None:
        return False
    return found.manifest.name.step == steps or found.manifest.state.best.stops(training.patience)


def reject_lost_checkpoints(run: RunDirectory) -> None:
    """Raises CheckpointCorrupt when earlier attempts wrote checkpoints and all are missing. Their content is checked
    when the trainer resumes."""
    written = read_run_log(run.log).checkpoints
    if written and not checkpoint_directory.list_checkpoints(run.checkpoints):
        raise CheckpointCorrupt(
            f"{run.checkpoints}: the checkpoint of step {written[-1].step} is missing; restore it, or train from the "
            "start in another directory"
        )


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Writes the files that an attempt reads; uid and threads stay those of the run's first invocation."""

    run: RunDirectory
    local: LocalJob
    plan: MemoryPlan
    uid: str
    compute_threads: int
    """A resumed run keeps it, because the rounding of a matrix product depends on it."""

    def write(self, epoch: int) -> None:
        job, run = self.local.job, self.run
        job_file = JobFile(
            name=job.metadata.name,
            namespace=job.metadata.namespace,
            uid=self.uid,
            epoch=epoch,
            spec=job.spec,
            output_directory=str(run.path),
            corpus_directory=str(self.local.corpus),
            checkpoint_directory=str(run.checkpoints),
            spill_directory=str(self.local.spill[0]),
            further_spill_directories=tuple(str(directory) for directory in self.local.spill[1:]),
            claims={name: str(directory) for name, directory in self.local.claims.items()},
            termination_message_path=str(run.attempt(epoch) / "termination.json"),
            compute_threads=self.compute_threads,
            metrics_port=self.local.metrics_port,
            ranks_per_node=self.local.num_ranks,
        )
        write_atomic(run.plan_file, self.plan.model_dump_json(indent=2) + "\n")
        write_atomic(run.job_file, job_file.model_dump_json(indent=2) + "\n")


def reject_spill_in_memory(directory: Path, plan: MemoryPlan, advice: str) -> None:
    """Raises UserError when a plan spills to --output and that directory is in memory."""
    if plan.slab_bytes(Tier.NVME) > 0:
        reject_memory(directory, f"--output {directory}", advice)


def local_files(
    run: RunDirectory, local: LocalJob, plan: MemoryPlan, cores: int, earlier: JobFile | None
) -> LocalFiles:
    if earlier is None:
        return LocalFiles(run, local, plan, str(uuid.uuid4()), max(1, cores // local.num_ranks))
    return LocalFiles(run, local, plan, earlier.uid, earlier.compute_threads)


def trainer_command(run: RunDirectory, num_ranks: int) -> list[str]:
    """The trainer for one rank, a launcher for several. -P: files in the current directory must not shadow modules."""
    module = "spillway_trainer" if num_ranks == 1 else "spillway_trainer.launch"
    return [sys.executable, "-P", "-m", "spillway_cli.run.trainer_process", module, str(run.path)]


class Ladder(Protocol):
    """Supplies the plan of each attempt (ladder.py)."""

    files: LocalFiles

    def write(self, epoch: int) -> None: ...

    def replan(self, ended: Attempt) -> Rung: ...


def train(ladder: Ladder, watcher: Watcher, lock: int, max_restarts: int) -> list[Attempt]:
    """Runs attempts until the job is done or restarting cannot help; needs the directory's lock."""
    run = ladder.files.run
    trainer = Trainer(ladder.write, trainer_command(run, ladder.files.local.num_ranks), ladder.replan, lock)
    stop = StopSignals()
    with stop.listening():
        return run_attempts(run, trainer, watcher, stop, max_restarts)
