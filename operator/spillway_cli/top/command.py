"""`spillway top [NAME]`: a live view of a cluster's jobs, of one job, or of a run directory.

On a terminal the view uses the alternate screen, and Ctrl-C restores the terminal; elsewhere each update is printed in
plain lines.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live

from spillway.errors import UserError

from ..cluster.api import READ_A_RUN, Gone, Unreachable, connect
from ..console import Format, leave_reader, print_json, result_console
from ..record.directory import names_a_directory, run_at
from .cluster import FleetSource, JobSource
from .run import RunSource
from .view import WIDEST, RunView, as_json, fleet, picture

Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class TopOptions:
    """The command line of `spillway top`."""

    name: str | None
    """A TrainingJob, or the directory of a run; None = every job."""
    context: str | None
    namespace: str | None
    all_namespaces: bool
    interval_seconds: float
    once: bool
    format: Format


@dataclass(frozen=True, slots=True)
class Look:
    """The state at one moment."""

    document: Document
    draw: Callable[[Console], RenderableType]
    is_over: bool = False
    """Whether nothing will change any more."""


def top(options: TopOptions) -> int:
    """Shows until Ctrl-C, or until the run or job has ended; returns 0. Raises UserError when nothing can be shown."""
    if options.all_namespaces and (options.name or options.namespace):
        raise UserError("command line: -A lists the jobs of all namespaces; leave out the name and --namespace")
    with ended_by_signals():
        try:
            look = source(options)
            if options.format is Format.JSON:
                print_documents(look, options)
            else:
                show(look, options, result_console(watches=True))
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:
            leave_reader(sys.stdout)
    return 0


def source(options: TopOptions) -> Callable[[], Look]:
    """Returns the function that reads the state. Raises UserError for a directory without a run, or no cluster."""
    name = options.name
    of_a_cluster = options.namespace is not None or options.context is not None
    if name is not None and not of_a_cluster and names_a_directory(name):
        run = RunSource(run_at(name))
        return lambda: look_at_one(run.look())
    cluster = connect(options.context, READ_A_RUN)
    namespace = options.namespace or cluster.namespace
    if name is not None:
        job = JobSource(cluster, namespace, name)
        return lambda: look_at_one(job.look())
    everything = FleetSource(cluster, None if options.all_namespaces else namespace)
    place = "all namespaces" if options.all_namespaces else namespace
    return lambda: look_at_all(*everything.look(), place)


def look_at_one(view: RunView) -> Look:
    return Look({"time": now(), **as_json(view)}, lambda console: picture(view, console), view.is_over)


def look_at_all(views: list[RunView], unknown: tuple[str, ...], place: str) -> Look:
    document: Document = {"time": now(), "jobs": [as_json(view) for view in views], "unknown": list(unknown)}
    notes = [f"not known: {one}" for one in unknown]
    return Look(document, lambda console: fleet(views, notes, place, console))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- again and again --------------------------------------------------------------------------------------------------


def looks(look: Callable[[], Look], options: TopOptions) -> Iterator[tuple[Look, str]]:
    """Yields each look, with a message if it is out of date: after the first, an unreachable API server is retried."""
    seen: Look | None = None
    while True:
        problem = ""
        try:
            seen = look()
        except Gone as error:
            if seen is None:
                raise
            raise UserError(f"TrainingJob {options.name} was deleted") from error
        except Unreachable as error:
            if seen is None:
                raise
            problem = f"{error}; showing the last known state"
        yield seen, problem
        if options.once or (seen.is_over and not problem):
            return
        time.sleep(options.interval_seconds)


def print_documents(look: Callable[[], Look], options: TopOptions) -> None:
    """Prints one document with --once, else one line per look (JSON Lines)."""
    for seen, problem in looks(look, options):
        if options.once:
            print_json(seen.document)
        elif not problem:
            sys.stdout.write(json.dumps(seen.document, allow_nan=False) + "\n")
            sys.stdout.flush()


def show(look: Callable[[], Look], options: TopOptions, console: Console) -> None:
    """Draws on the alternate screen of a terminal; prints the last state, or that of --once, on the normal one."""
    live: Live | None = None
    if not console.is_terminal:
        console.width = WIDEST
    redraws = console.is_terminal and not console.is_dumb_terminal
    with ExitStack() as screen:
        for seen, problem in looks(look, options):
            drawn = Group(seen.draw(console), *([problem] if problem else []))
            if options.once or seen.is_over or not redraws:
                screen.close()
                console.print(drawn)
                if not (options.once or seen.is_over):
                    console.print()
                sys.stdout.flush()
            elif live is None:
                live = screen.enter_context(Live(drawn, console=console, screen=True, auto_refresh=False))
            else:
                live.update(drawn, refresh=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and a closed terminal end the view as Ctrl-C does, restoring the terminal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
