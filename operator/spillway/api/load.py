"""Loads TrainingJobs from YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway.api.manifest import parse, read_text
from spillway.api.rejections import rejections
from spillway.api.script import SCRIPT_IN_CLUSTER, ScriptJob, is_script
from spillway.api.training_job import TrainingJob
from spillway.errors import FieldProblem, InvalidJob

# Fields that an API server sets. They are ignored, so that the output of `kubectl get -o yaml` can be loaded again.
SET_BY_THE_SERVER: tuple[tuple[str, ...], ...] = (
    ("status",),
    *(
        ("metadata", field)
        for field in (
            "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences",
            "finalizers", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds",
        )
    ),
)  # fmt: skip


def load_job(path: Path) -> TrainingJob:
    """Reads the job in a YAML file, to plan it or run it on this machine. Raises InvalidJob with every wrong field, and
    UserError if the file cannot be read."""
    return parse_job(read_text(path), str(path))


def load_for_cluster(path: Path) -> TrainingJob | ScriptJob:
    """Like load_job, but also accepts a job that runs a script."""
    return _parsed(read_text(path), str(path))


def parse_job(text: str, source: str) -> TrainingJob:
    """The job in a YAML text; `source` names it in errors."""
    job = _parsed(text, source)
    if isinstance(job, ScriptJob):
        raise InvalidJob(source, [FieldProblem("spec.command", " ".join(job.spec.command), SCRIPT_IN_CLUSTER)])
    return job


def job_type(document: dict[str, Any]) -> type[TrainingJob] | type[ScriptJob]:
    """The model against which a document is validated."""
    return ScriptJob if is_script(document.get("spec")) else TrainingJob


def _parsed(text: str, source: str) -> TrainingJob | ScriptJob:
    job = parse(job_type, text, source, ignored=SET_BY_THE_SERVER)
    if isinstance(job, TrainingJob) and (problems := rejections(job)):
        raise InvalidJob(source, problems)
    return job
