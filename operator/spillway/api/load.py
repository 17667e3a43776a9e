"""From a YAML file to a TrainingJob."""

from __future__ import annotations

from pathlib import Path

from spillway.api.manifest import parse, read_text
from spillway.api.rejections import refusals
from spillway.api.training_job import TrainingJob
from spillway.errors import InvalidJob

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
    """The job in a YAML file. Raises InvalidJob with every wrong field, UserError when the file cannot be read."""
    return parse_job(read_text(path), str(path))


def parse_job(text: str, source: str) -> TrainingJob:
    """The job in a YAML text; `source` names it in errors."""
    job = parse(TrainingJob, text, source, ignored=_SERVER_FIELDS)
    problems = refusals(job)
    if problems:
        raise InvalidJob(source, problems)
    return job
