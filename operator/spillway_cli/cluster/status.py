"""`spillway status [JOB]`: shows the jobs of a namespace as a table, or one job in detail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from spillway.api.crd import TRAINING_JOB
from spillway.errors import UserError
from spillway.plan import Tier
from spillway.units import format_bytes, parse_quantity

from ..console import Format, message_console, print_json, printable, result_console, table
from ..record.member_values import values_in, values_table
from ..record.sweep_view import MemberView, members_table
from .api import CORE, ClusterClient, Object, RequestDenied, Unreachable, connect, get_job, jobs_path
from .job_status import age, event_time, exit_code, has_ended, newest_first, row, that_matter, value_at

POLL_SECONDS = 2.0
LAST_EVENTS = 5
BAR_WIDTH = 30
UNKNOWN = "-"
Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """The command line of `spillway status`."""

    job: str | None
    context: str | None
    namespace: str | None
    all_namespaces: bool
    watch: bool
    format: Format


def status(options: StatusOptions) -> int:
    """Prints the status; returns 0, or the documented code of the reason if the given job has failed."""
    if options.all_namespaces and (options.job or options.namespace):
        raise UserError("command line: -A lists all jobs; leave out the job's name and --namespace")
    if options.watch and options.format is Format.JSON:
        raise UserError("command line: -w prints repeatedly, but -o json is one document; leave one out")
    if options.job is not None and not (options.namespace or options.context) and Path(options.job).is_dir():
        raise UserError(
            f"{options.job}: is a directory, but this command shows jobs of a cluster; `spillway top {options.job}` "
            f"shows a local run; for the TrainingJob {options.job}, give its --namespace"
        )
    cluster = connect(options.context, "`spillway top DIRECTORY` shows a local run")
    namespace = options.namespace or cluster.namespace
    if options.job is not None:
        return one_job(cluster, namespace, options.job, options)
    return list_of_jobs(cluster, None if options.all_namespaces else namespace, options)


# --- several jobs -----------------------------------------------------------------------------------------------------


def list_of_jobs(cluster: ClusterClient, namespace: str | None, options: StatusOptions) -> int:
    for jobs in looks(lambda: cluster.items(jobs_path(namespace)), options.watch):
        if options.format is Format.JSON:
            print_json({"items": jobs})
        elif not jobs:
            message_console().print(f"no TrainingJob in {namespace or 'any namespace'}")
        else:
            picture_of_all = jobs_table(jobs, with_namespace=namespace is None, now=datetime.now(UTC))
            result_console(options.watch).print(picture_of_all)
    return 0


def jobs_table(jobs: Sequence[Object], with_namespace: bool, now: datetime) -> Table:
    """The columns of `kubectl get tjob -o wide`, without those that are empty for every job."""
    rows = [row(job, now) for job in jobs]
    headings = [name.upper() for name, *_ in TRAINING_JOB.columns]
    shown = [index for index in range(len(headings)) if any(cells[index] for cells in rows)]
    made = table(*(["NAMESPACE"] if with_namespace else []), "NAME", *(headings[index] for index in shown))
    for job, cells in zip(jobs, rows, strict=True):
        names = [job["metadata"].get("namespace", "")] if with_namespace else []
        made.add_row(*names, job["metadata"]["name"], *(cells[index] for index in shown))
    return made


# --- one job ----------------------------------------------------------------------------------------------------------


def one_job(cluster: ClusterClient, namespace: str, name: str, options: StatusOptions) -> int:
    job: Object = {}
    for job in looks(lambda: get_job(cluster, namespace, name), options.watch, has_ended):
        if options.format is Format.JSON:
            print_json(job)
        else:
            result_console(options.watch).print(picture(job, events_of(cluster, job), datetime.now(UTC)))
    return exit_code(job)


def looks(
    look: Callable[[], Seen], again: bool, enough: Callable[[Seen], bool] = lambda found: False
) -> Iterator[Seen]:
    """Yields what `look` returns; with `again`, each change until `enough`."""
    shown: Seen | None = None
    said = False
    while True:
        try:
            found, said = look(), False
        except Unreachable as error:
            if shown is None:
                raise
            if not said:
                message_console().print(f"{error}; trying again")
            found, said = shown, True
        if found != shown:
            yield found
            shown = found
        if not again or enough(found):
            return
        time.sleep(POLL_SECONDS)


def events_of(cluster: ClusterClient, job: Object) -> list[Object]:
    """The job's events, newest first; empty when the user may not list them or the server does not answer."""
    namespace = job["metadata"].get("namespace", cluster.namespace)
    selector = f"involvedObject.kind=TrainingJob,involvedObject.name={job['metadata']['name']}"
    if uid := job["metadata"].get("uid"):  # an earlier job may have had this name
        selector += f",involvedObject.uid={uid}"
    try:
        found = cluster.items(f"{CORE}/namespaces/{namespace}/events", fieldSelector=selector)
    except (RequestDenied, Unreachable):
        return []
    return [dict(event) for event in newest_first(found)[:LAST_EVENTS]]


def picture(job: Object, events: Sequence[Object], now: datetime) -> RenderableType:
    """One job in detail: progress, plan, memory, conditions, events."""
    parts: list[RenderableType] = [headline(job), *progress(job), *plan(job)]
    parts += [tiers(job)] if value_at(job, "status.plan.bytes") or value_at(job, "status.memory.peak") else []
    parts += [members_table(members)] if (members := status_members(job)) else []
    parts += [values_table(values)] if any((values := values_in(job.get("spec") or {})).values()) else []
    parts += [*facts(job, now)]
    if found := that_matter(job):
        parts += ["", "conditions", *(f"  {condition_line(one)}" for one in found)]
    if escalations := value_at(job, "status.escalations"):
        parts += ["", "changes of plan", *(f"  {escalation_line(one)}" for one in escalations)]
    if events:
        parts += ["", "events", *(f"  {event_line(one, now)}" for one in events)]
    return Group(*(printable(part) if isinstance(part, str) else part for part in parts))


def headline(job: Object) -> str:
    state = value_at(job, "status.state") or "not processed by the operator yet"
    total = value_at(job, "status.attempts.total")
    attempt = f", attempt {total}" if total else ""
    return f"{job['metadata']['name']} in {job['metadata'].get('namespace', '')}: {state}{attempt}"


def progress(job: Object) -> list[RenderableType]:
    found = value_at(job, "status.progress")
    if not found or not found.get("steps"):
        return []
    step, steps = found.get("step", 0), found["steps"]
    words = [f"step {step}/{steps}", found.get("display", "")]
    speed = "" if found.get("tokensPerSecond") == "0" else found.get("tokensPerSecond")  # an older operator writes "0"
    shown = {"loss": found.get("loss"), "eta": found.get("eta") if speed or step == steps else ""}
    words += [f"{label} {value}" for label, value in shown.items() if value]
    words += [f"{speed} tok/s"] if speed else []
    line = Table.grid(padding=(0, 2))
    line.add_row(bar(step, steps), printable("  ".join(word for word in words if word)))
    return [line]


def bar(step: int, steps: int) -> RenderableType:
    return ProgressBar(total=steps, completed=min(step, steps), width=BAR_WIDTH)


def plan(job: Object) -> list[str]:
    found = value_at(job, "status.plan") or {}
    lines = [f"plan       {found['summary']}"] if found.get("summary") else []
    if found.get("reason"):
        where = ", ".join(found.get("nodes") or []) or found.get("node", "")
        reason = str(found["reason"])  # mostly begins with the node
        lines.append("placed     " + (f"{where}: " if where and not reason.startswith(where) else "") + reason)
    return lines


def shown_bytes(quantity: object) -> str:
    """29992Ki -> 29.3 MiB; anything else unchanged."""
    if quantity is None:
        return UNKNOWN
    try:
        return format_bytes(parse_quantity(str(quantity)))
    except ValueError:
        return printable(str(quantity))


def tiers(job: Object) -> Table:
    """Planned and peak bytes of the rank that holds most."""
    made = table("tier", "planned", "peak")
    planned, peak = value_at(job, "status.plan.bytes") or {}, value_at(job, "status.memory.peak") or {}
    for tier in Tier:
        if planned.get(tier.value) or peak.get(tier.value):
            made.add_row(tier.value, shown_bytes(planned.get(tier.value)), shown_bytes(peak.get(tier.value)))
    return made


def status_members(job: Object) -> tuple[MemberView, ...]:
    """The members in a sweep's status; their objective is the evaluation loss unless spec.objective.metric is Loss."""
    compares_evaluation = value_at(job, "spec.objective.metric") != "Loss"
    return tuple(
        MemberView(
            name=str(one.get("name", "")),
            step=count(one.get("step")),
            steps=count(one.get("steps")),
            loss=figure(one.get("loss")),
            evaluation_loss=figure(one.get("objective")) if compares_evaluation else None,
            state=str(one.get("state", "")),
            message=str(one.get("message", "")),
            is_best=one.get("name") == value_at(job, "status.bestMember"),
        )
        for one in value_at(job, "status.members") or ()
    )


def count(value: object) -> int:
    return value if isinstance(value, int) else 0


def figure(text: object) -> float | None:
    """A number that the status holds as text; None if it is not one."""
    try:
        return float(str(text))
    except ValueError:
        return None


APART = {"disruptions": "disruptions", "memoryErrors": "memory errors"}
"""Fields of status.attempts that do not count as restarts."""


def facts(job: Object, now: datetime) -> list[str]:
    lines = []
    checkpoint, attempts = value_at(job, "status.checkpoint"), value_at(job, "status.attempts")
    if checkpoint:
        when = f", {age(checkpoint['time'], now)} ago" if checkpoint.get("time") else ""
        where = f" at {checkpoint['path']}" if checkpoint.get("path") else ""
        lines.append(f"checkpoint step {checkpoint.get('step', '?')}{where}{when}")
    if attempts and attempts.get("lastReason"):
        limit = value_at(job, "spec.lifecycle.maxRestarts")
        counted = [f"{attempts.get('restarts', 0)} of {'?' if limit is None else limit} restarts"]
        counted += [f"{attempts[name]} {words}" for name, words in APART.items() if attempts.get(name)]
        rank = "" if attempts.get("lastRank") is None else f"rank {attempts['lastRank']} "
        where = f" ({rank}on {attempts['lastNode']})" if attempts.get("lastNode") else ""
        lines.append(
            f"attempts   {attempts.get('total', '?')}, {', '.join(counted)}; the last one ended: "
            f"{attempts['lastReason']}{where}"
        )
    return lines


def condition_line(condition: Mapping[str, Any]) -> str:
    message = condition.get("message")
    reason = f" ({condition['reason']})" if condition.get("reason") else ""
    return f"{condition.get('type')}={condition.get('status')}{reason}" + (f": {message}" if message else "")


def escalation_line(one: Mapping[str, Any]) -> str:
    change = f"; next: {one['change']}" if one.get("change") else ""
    return f"attempt {one.get('attempt', '?')} ended: {one.get('reason', '')}{change}"


def event_line(event: Mapping[str, Any], now: datetime) -> str:
    note = event.get("message") or event.get("note") or ""
    return f"{age(event_time(event), now)} ago  {event.get('type', '')}  {event.get('reason', '')}: {note}"


# --- until it ends ----------------------------------------------------------------------------------------------------


def watch_to_the_end(cluster: ClusterClient, namespace: str, name: str, console: Console) -> int:
    """Prints each change in a line until the job has ended; returns its exit code."""
    job: Object = {}
    said = ""
    for job in looks(lambda: get_job(cluster, namespace, name), True, has_ended):
        line = one_line(job)
        if line != said:
            console.print(line)
            said = line
    for condition in that_matter(job):
        console.print(printable(condition_line(condition)))
    return exit_code(job)


def one_line(job: Object) -> str:
    """For example: demo: Running  step 120/1000  12%  loss 2.31  eta 3m"""
    found = value_at(job, "status.progress") or {}
    parts = [f"{job['metadata']['name']}: {value_at(job, 'status.state') or 'created'}"]
    parts += [f"step {found.get('step', 0)}/{found['steps']}"] if found.get("steps") else []
    parts += [
        f"{label}{found[key]}" for label, key in (("", "display"), ("loss ", "loss"), ("eta ", "eta")) if found.get(key)
    ]
    return printable("  ".join(parts))
