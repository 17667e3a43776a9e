"""`spillway logs JOB`: prints the logs of a job's pods, with -f through restarts until the job ends; for a run
directory, its trainer's log.

A broken stream is resumed after the last printed line, by the kubelet's time stamps, which are not shown.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from spillway.errors import UserError

from ..console import message_console
from ..record.directory import RunDirectory, epochs_of, is_taken, names_a_directory, run_at
from .api import CORE, READ_A_RUN, ClusterClient, Gone, Object, RequestDenied, Unreachable, connect, get_job
from .job_status import has_ended, value_at

JOB_LABEL = "spillway.dev/job"
ATTEMPT_LABEL = "spillway.dev/attempt"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
CONTAINER = "trainer"
LOG = "trainer.log"
"""Log file of an attempt in a run directory."""
NOT_FOUND = 404
POLL_SECONDS = 1.0
Answer = TypeVar("Answer")
STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
"""A time stamp as in RFC 3339."""
LAST_TRIES = 5
"""Tries to read the log of an ended pod; its node may be gone."""
IDLE_SECONDS = 60.0
"""A stream without a line for this long is reopened: the connection may be lost."""


@dataclass(frozen=True, slots=True)
class LogsOptions:
    """The command line of `spillway logs`."""

    job: str
    """A TrainingJob, or the directory of a run."""
    context: str | None
    namespace: str | None
    follow: bool
    node: int | None
    """Node of the attempt, counted from 0; None = all."""
    attempt: int | None
    """None = the newest, and with `follow` those after it."""


def logs(options: LogsOptions) -> int:
    """Prints logs; returns 0. Raises UserError when the job, run, attempt or pod does not exist."""
    if options.namespace is None and options.context is None and names_a_directory(options.job):
        return logs_of_run(run_at(options.job), options)
    cluster = connect(options.context, READ_A_RUN)
    namespace = options.namespace or cluster.namespace
    job = get_job(cluster, namespace, options.job)
    reader = Reader(cluster, namespace, options)
    if not options.follow:
        pods = reader.pods(options.attempt)
        if not pods:
            raise UserError(nothing_to_show(job, options))
        for pod in pods:
            reader.print_log(pod, prefix_of(pod, len(pods)))
        return 0
    return follow(reader, options, job)


def logs_of_run(run: RunDirectory, options: LogsOptions) -> int:
    """Prints the log of the newest attempt, or of the given one; with `follow` as it grows, then those of later
    attempts, until no run uses the directory."""
    if options.node is not None:
        raise UserError(f"--rank-node {options.node}: a local run has only one log; leave --rank-node out")
    known = attempts_with_log(run)
    attempt, offset = options.attempt or max(known, default=1), 0
    if attempt not in known:
        there = ", ".join(map(str, known)) or "none"
        raise UserError(f"{run.path}: attempt {attempt} has no log; attempts with a log: {there}")
    while True:
        newer = [one for one in attempts_with_log(run) if one > attempt]
        goes_on = options.follow and (options.attempt is None if newer else is_taken(run))
        with (run.attempt(attempt) / LOG).open("rb") as log:  # read last, so that an ended attempt's log is complete
            log.seek(offset)
            shutil.copyfileobj(log, sys.stdout.buffer)
            offset = log.tell()
        sys.stdout.buffer.flush()
        if not goes_on:
            return 0
        if newer:
            attempt, offset = newer[0], 0
            message_console().print(f"attempt {attempt}")
        else:
            time.sleep(POLL_SECONDS)


def attempts_with_log(run: RunDirectory) -> list[int]:
    return [epoch for epoch in epochs_of(run.attempts) if (run.attempt(epoch) / LOG).is_file()]


def nothing_to_show(job: Object, options: LogsOptions) -> str:
    wanted = f"of attempt {options.attempt} " if options.attempt is not None else ""
    node = f"of node {options.node} " if options.node is not None else ""
    state = value_at(job, "status.state") or "not processed by the operator yet"
    advice = "use -f to wait for a pod, or `spillway status` to see why there is none"
    if options.attempt is not None:
        advice = f"its newest attempt is {newest_attempt(job)}"
    return f"TrainingJob {options.job} ({state}): no pod {wanted}{node}found; {advice}"


def newest_attempt(job: Object) -> int:
    """The newest attempt's number; 0 before the first."""
    total = value_at(job, "status.attempts.total")
    return total if isinstance(total, int) else 0


@dataclass(slots=True)
class Reader:
    """Prints the logs of one job's pods."""

    cluster: ClusterClient
    namespace: str
    options: LogsOptions
    nobody_reads: bool = False
    """Whether stdout was closed (`| head`)."""
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def pods(self, attempt: int | None) -> list[Object]:
        """The pods of one attempt (None: the newest that has pods), by node."""
        selector = f"{JOB_LABEL}={self.options.job}"
        if attempt is not None:
            selector += f",{ATTEMPT_LABEL}={attempt}"
        found = self.cluster.items(f"{CORE}/namespaces/{self.namespace}/pods", labelSelector=selector)
        newest = max(map(attempt_of, found), default=0)
        wanted = [pod for pod in found if attempt_of(pod) == newest and self.options.node in (None, node_of(pod))]
        return sorted(wanted, key=node_of)

    def is_over(self, name: str) -> bool:
        """Whether the pod will print nothing more."""
        try:
            pod = self.cluster.get(f"{CORE}/namespaces/{self.namespace}/pods/{name}")
        except RequestDenied as error:
            if error.status == NOT_FOUND:
                return True
            raise
        return value_at(pod, "status.phase") in ("Succeeded", "Failed")

    def print_log(self, pod: Object, prefix: bytes) -> None:
        """Prints the pod's log so far. Raises UserError when its container has not started."""
        try:
            self._print_since(pod["metadata"]["name"], prefix, b"", follow=False)
        except Interrupted as error:
            raise error.reason from error

    def follow_log(self, pod: Object, prefix: bytes) -> None:
        """Prints every line of the pod, first to last, through interrupted connections."""
        name, last, tries = pod["metadata"]["name"], b"", 0
        while not self.nobody_reads:
            over = patiently(lambda: self.is_over(name))  # asked first, so that an ended pod's log is read to its end
            try:
                last = self._print_since(name, prefix, last, follow=not over)
            except Interrupted as error:
                tries = tries + 1 if over and error.last == last else 0
                if tries == LAST_TRIES:
                    message_console().print(f"pod {name}: cannot read the rest of its log: {error.reason}")
                    return
                last = error.last
            except RequestDenied as error:
                if over or error.status == NOT_FOUND:
                    return  # else its container has not started
            else:
                if over:
                    return
            time.sleep(POLL_SECONDS)

    def _print_since(self, name: str, prefix: bytes, last: bytes, follow: bool) -> bytes:
        """Prints lines after the time stamp `last`; returns the new last stamp. Raises Interrupted.

        The API resumes at the beginning of a second, so lines up to `last` come again and are skipped. Later stamps are
        not compared, because the clock may be set back. A line without a stamp is the kubelet's own.
        """
        seen = last
        lines = self.cluster.lines(
            f"{CORE}/namespaces/{self.namespace}/pods/{name}/log",
            IDLE_SECONDS,
            container=CONTAINER,
            timestamps="true",
            follow="true" if follow else None,
            sinceTime=last.decode() or None,
        )
        try:
            for line in lines:
                stamp, _, text = line.partition(b" ")
                if not STAMP.fullmatch(stamp):
                    self._write(prefix + line + b"\n")
                elif stamp > seen:
                    self._write(prefix + text + b"\n")
                    last, seen = stamp, b""
                if self.nobody_reads:
                    break
        except Unreachable as error:
            raise Interrupted(last, error) from error
        return last

    def _write(self, line: bytes) -> None:
        try:
            with self._writing:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        except BrokenPipeError:
            self.nobody_reads = True


class Interrupted(Exception):
    """A stream broke or was idle for too long."""

    def __init__(self, last: bytes, reason: Unreachable) -> None:
        super().__init__()
        self.last = last
        """Time stamp of the last printed line."""
        self.reason = reason


def follow(reader: Reader, options: LogsOptions, job: Object) -> int:
    """Prints attempt after attempt, each pod from its first line, until the job, or the given attempt, has ended.
    Raises UserError when `job` was deleted meanwhile, or the given attempt has no pods and will get none."""
    shown, uid = -1, value_at(job, "metadata.uid")
    while not reader.nobody_reads:
        try:
            job = patiently(lambda: get_job(reader.cluster, reader.namespace, options.job))
        except Gone as error:
            raise UserError(f"TrainingJob {options.job} was deleted") from error
        if value_at(job, "metadata.uid") != uid:
            raise UserError(
                f"TrainingJob {options.job} was deleted; a new TrainingJob has this name now, so run the command again"
            )
        over = has_ended(job)
        pods = patiently(lambda: reader.pods(options.attempt))
        attempt = attempt_of(pods[0]) if pods else -1
        if attempt > shown:
            shown = attempt
            if options.attempt is None:
                message_console().print(f"attempt {attempt}")
            follow_pods(reader, pods)
            continue
        if options.attempt is not None and shown < 0 and (over or options.attempt != max(1, newest_attempt(job))):
            raise UserError(nothing_to_show(job, options))
        if over or (options.attempt is not None and shown >= 0):
            return 0
        time.sleep(POLL_SECONDS)
    return 0


def follow_pods(reader: Reader, pods: list[Object]) -> None:
    """Prints the pods' logs until each pod has ended."""
    threads = [
        threading.Thread(target=reader.follow_log, args=(pod, prefix_of(pod, len(pods))), daemon=True) for pod in pods
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # join() without a limit would block Ctrl-C
            thread.join(POLL_SECONDS)


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Retries while the cluster does not answer; prints that once."""
    said = False
    while True:
        try:
            return ask()
        except Unreachable as error:
            if not said:
                message_console().print(f"{error}; trying again")
            said = True
            time.sleep(POLL_SECONDS)


def attempt_of(pod: Object) -> int:
    text = (value_at(pod, "metadata.labels") or {}).get(ATTEMPT_LABEL, "")
    return int(text) if text.isdecimal() else 0


def node_of(pod: Object) -> int:
    text = (value_at(pod, "metadata.labels") or {}).get(INDEX_LABEL, "")
    return int(text) if text.isdecimal() else 0


def prefix_of(pod: Object, num_pods: int) -> bytes:
    return f"[node {node_of(pod)}] ".encode() if num_pods > 1 else b""
