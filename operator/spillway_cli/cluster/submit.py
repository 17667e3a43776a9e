"""`spillway submit JOB`: validates a TrainingJob, creates it in a cluster, and with --wait waits until it has ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from spillway.api.limits import MANAGER
from spillway.api.load import load_for_cluster
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.errors import FieldProblem, InvalidJob, UserError
from spillway_operator.decide.acceptance import rejection

from ..console import message_console, print_json, result_console
from .api import ClusterClient, Object, RequestDenied, connect, jobs_path
from .job_status import value_at
from .status import watch_to_the_end

FIELD_MANAGER = "spillway-cli"


class SubmitFormat(StrEnum):
    """`-o`: how the created object is printed."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """The command line of `spillway submit`."""

    job: Path
    context: str | None
    namespace: str | None
    wait: bool
    dry_run: bool
    format: SubmitFormat


def submit(options: SubmitOptions) -> int:
    """Creates the job; returns 0, or with --wait the job's exit code. Raises UserError when it is rejected."""
    job = load_for_cluster(options.job)
    reject_what_no_cluster_does(job, str(options.job))
    if options.wait and options.dry_run:
        raise UserError(
            "command line: --wait and --dry-run cannot be combined, because a dry run creates no job; leave one out"
        )
    cluster = connect(options.context, f"to train here: spillway run {options.job}")
    namespace = namespace_of(job, options.namespace, cluster, str(options.job))
    created = create(cluster, namespace, manifest(job, namespace), options.dry_run, str(options.job))
    show(created, options)
    if not options.wait:
        return 0
    return watch_to_the_end(cluster, namespace, job.metadata.name, message_console())


def reject_what_no_cluster_does(job: TrainingJob | ScriptJob, source: str) -> None:
    """Raises InvalidJob, with the operator's own messages, if the operator would reject the job."""
    rejected = rejection(job) if job.spec.managed_by == MANAGER else None
    if rejected is not None:
        raise InvalidJob(source, rejected.problems)


def namespace_of(job: TrainingJob | ScriptJob, asked: str | None, cluster: ClusterClient, source: str) -> str:
    """The namespace of --namespace, the manifest or the context. Raises UserError when the first two differ."""
    written = job.metadata.namespace if "namespace" in job.metadata.model_fields_set else None
    if asked and written and asked != written:
        raise UserError(f"{source}: metadata.namespace = {written}, but --namespace is {asked}; keep one")
    return asked or written or cluster.namespace


def manifest(job: TrainingJob | ScriptJob, namespace: str) -> Object:
    """The object to create, with only what the user wrote: the API server fills in the defaults of its own version."""
    content: Object = job.model_dump(mode="json", exclude_unset=True)
    content["metadata"]["namespace"] = namespace
    return content


def create(cluster: ClusterClient, namespace: str, content: Object, dry_run: bool, source: str) -> Object:
    name = content["metadata"]["name"]
    try:
        return cluster.create(
            jobs_path(namespace),
            content,
            fieldManager=FIELD_MANAGER,
            fieldValidation="Strict",
            dryRun="All" if dry_run else None,
        )
    except RequestDenied as error:
        if error.status == 409:
            raise UserError(already_there(cluster, namespace, name)) from error
        if error.causes:
            raise InvalidJob(source, [FieldProblem(field, "", problem) for field, problem in error.causes]) from error
        raise


def already_there(cluster: ClusterClient, namespace: str, name: str) -> str:
    state = value_at(cluster.get_named(jobs_path(namespace, name)), "status.state") or "not processed yet"
    return (
        f"TrainingJob {name} already exists in namespace {namespace} ({state}); see `spillway status {name} -n "
        f"{namespace}`, delete it (kubectl delete tjob {name} -n {namespace}), or give another metadata.name"
    )


def show(created: Object, options: SubmitOptions) -> None:
    name, namespace = created["metadata"]["name"], created["metadata"]["namespace"]
    match options.format:
        case SubmitFormat.JSON:
            print_json(created)
        case SubmitFormat.YAML:
            sys.stdout.write(yaml.safe_dump(created, sort_keys=False))
        case SubmitFormat.NAME:
            sys.stdout.write(f"trainingjob.spillway.dev/{name}\n")
        case SubmitFormat.TEXT:
            done = "would be created (dry run)" if options.dry_run else "created"
            result_console().print(f"TrainingJob {name} {done} in namespace {namespace}")
            if not options.dry_run and not options.wait:
                message_console().print(f"follow it with: spillway status {name} -n {namespace} -w")
