"""From a YAML file to a TrainingJob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway.api.manifest import parse, read_text
from spillway.api.rejections import refusals
from spillway.api.script import SCRIPT_IN_CLUSTER, ScriptJob, is_script
from spillway.api.training_job import TrainingJob
from spillway.errors import FieldProblem, InvalidJob

# Set by an API server; `kubectl get -o yaml > job.yaml` must load again.
_SERVER_FIELDS: tuple[tuple[str, ...], ...] = (
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
    """The job in a YAML file, to plan it or run it here. Raises InvalidJob with every wrong field, UserError when the
    file cannot be read."""
    return parse_job(read_text(path), str(path))


def load_for_cluster(path: Path) -> TrainingJob | ScriptJob:
    """As load_job, of either kind of job."""
    return _parsed(read_text(path), str(path))


def parse_job(text: str, source: str) -> TrainingJob:
    """The job in a YAML text; `source` names it in errors."""
    job = _parsed(text, source)
    if isinstance(job, ScriptJob):
        raise InvalidJob(source, [FieldProblem("spec.command", " ".join(job.spec.command), SCRIPT_IN_CLUSTER)])
    return job


def job_type(document: dict[str, Any]) -> type[TrainingJob] | type[ScriptJob]:
    """What a document is validated as."""
    return ScriptJob if is_script(document.get("spec")) else TrainingJob


def _parsed(text: str, source: str) -> TrainingJob | ScriptJob:
    job = parse(job_type, text, source, ignored=_SERVER_FIELDS)
    if isinstance(job, TrainingJob) and (problems := refusals(job)):
        raise InvalidJob(source, problems)
    return job
