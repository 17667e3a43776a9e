"""`spillway doctor`: examines this machine and the cluster, and prints findings with fixes.

    gather (a thread per task, one deadline) -> MachineFacts, ClusterFacts -> findings -> table or JSON, exit code

The command ends within 10 s even if something hangs (a dead NFS mount, an API server that never answers): what is
missing at the deadline is itself a finding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from spillway import __version__
from spillway.api.load import load_for_cluster
from spillway.api.script import ScriptJob
from spillway.api.training_job import TrainingJob
from spillway.errors import SpillwayError
from spillway.units import counted

from ..cluster.api import ClusterClient, connect, is_configured
from ..console import Format, print_json, result_console
from . import gather as doctor_gather
from .cluster import cluster_findings
from .findings import Diagnosis, Missing, Severity, num_errors
from .machine import machine_findings

LONGEST_SECONDS = 8.0
"""Limit for all tasks together, without Python's start and printing."""
CREDENTIALS_SECONDS = 3.0
COLOURS = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The command line of `spillway doctor`."""

    directory: Path | None
    """Where runs would spill; None = here."""
    job: Path | None
    """The job whose claims are checked."""
    context: str | None
    namespace: str | None
    format: Format


def doctor(options: DoctorOptions) -> int:
    """Prints findings; returns 1 if any is an error, else 0. Raises UserError for a wrong --job."""
    started = time.monotonic()
    job = None if options.job is None else load_for_cluster(options.job)
    findings = examined(options, job)
    seconds = time.monotonic() - started
    if options.format is Format.JSON:
        shown = [finding.as_json() for finding in findings]
        print_json({"findings": shown, "errors": num_errors(findings), "seconds": round(seconds, 2)})
    else:
        say(result_console(), findings, seconds)
    return 1 if num_errors(findings) else 0


def examined(options: DoctorOptions, job: TrainingJob | ScriptJob | None) -> list[Diagnosis]:
    deadline, now = time.monotonic() + LONGEST_SECONDS, datetime.now(UTC)
    of_machine = Gathering(doctor_gather.machine_tasks(options.directory))
    cluster = the_cluster(options)
    if isinstance(cluster, Diagnosis):
        return [*machine_findings(doctor_gather.as_machine(of_machine.answers(deadline)), now), cluster]
    namespace = options.namespace or own_namespace(job) or cluster.namespace
    of_cluster = Gathering(doctor_gather.cluster_tasks(cluster, namespace, job))
    machine = doctor_gather.as_machine(of_machine.answers(deadline))
    facts = doctor_gather.as_cluster(of_cluster.answers(deadline), str(cluster.configuration.host), namespace)
    return [*machine_findings(machine, now), *cluster_findings(facts, __version__, now, job)]


def own_namespace(job: TrainingJob | ScriptJob | None) -> str | None:
    """The namespace in the job's file, if any."""
    return job.metadata.namespace if job and "namespace" in job.metadata.model_fields_set else None


def the_cluster(options: DoctorOptions) -> ClusterClient | Diagnosis:
    """Connects to the cluster; returns a note if none is configured, an error if connecting fails. It has a time limit,
    because a kubeconfig may name a program that fetches credentials."""
    if not is_configured() and options.context is None:
        message = "no kubeconfig, and not in a pod: the cluster was not examined"
        return Diagnosis("cluster", "kubeconfig", Severity.NOTE, message)
    gathering = Gathering({"credentials": lambda: connect(options.context)})
    found = gathering.answers(time.monotonic() + CREDENTIALS_SECONDS)["credentials"]
    if isinstance(found, ClusterClient):
        return found
    assert isinstance(found, Missing)
    fix = "correct the kubeconfig, choose another (KUBECONFIG), or one of its contexts (--context)"
    return Diagnosis("cluster", "kubeconfig", Severity.ERROR, found.why, fix)


class Gathering:
    """Runs tasks at the same time, in daemon threads: one that hangs in a system call must not block the exit."""

    def __init__(self, tasks: Mapping[str, doctor_gather.Task]) -> None:
        self._answers: dict[str, object] = {}
        self._threads = {
            name: threading.Thread(target=self._work, args=(name, task), daemon=True) for name, task in tasks.items()
        }
        for thread in self._threads.values():
            thread.start()

    def answers(self, deadline: float) -> dict[str, object]:
        """Each task's result at the deadline (monotonic seconds), or Missing with the reason. Never raises."""
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        late = Missing("no answer in time")
        return {name: self._answers.get(name, late) for name in self._threads}

    def _work(self, name: str, task: doctor_gather.Task) -> None:
        try:
            self._answers[name] = task()
        except SpillwayError as error:
            self._answers[name] = doctor_gather.missing(error)
        except OSError as error:
            self._answers[name] = Missing(f"{error.filename or name}: {error.strerror or error}")
        except Exception as error:  # a failing task must not hide the others
            self._answers[name] = Missing(f"{type(error).__name__}: {error}")


# --- printing ---------------------------------------------------------------------------------------------------------


def say(console: Console, findings: Sequence[Diagnosis], seconds: float) -> None:
    """Prints findings by area, each with its fix below. The severity is a word as well as a colour."""
    check_width = max(len(finding.check) for finding in findings)
    for area in dict.fromkeys(finding.area for finding in findings):
        console.print(area)
        for finding in findings:
            if finding.area == area:
                begin = f"  {finding.severity.value:<7}  {finding.check:<{check_width}}  "
                console.print(f"{begin}{finding.message}", style=COLOURS[finding.severity])
                if finding.fix:
                    console.print(f"{'':<{len(begin)}}fix: {finding.fix}")
    numbers = [
        counted(sum(finding.severity is severity for finding in findings), severity.value)
        for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE)
    ]
    console.print(f"{', '.join(numbers)} in {seconds:.1f} s")
