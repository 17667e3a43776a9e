"""PID 1 of a trainer pod: starts the ranks of a node, forwards signals, reports how they ended.

    python -P -m spillway_trainer.launch DIRECTORY      DIRECTORY holds job.json and plan.json

    job.json -> Layout -> ranks, each with torchrun's environment -> ends, in order -> termination message, exit code

A rank is the trainer, or the script of spec.command. One rank that fails ends the attempt: restarting is the operator's
business (or `spillway run`'s). The launcher imports neither torch nor pydantic: it is there as long as the ranks and
takes its memory from them (docs/adr/0005-launcher.md).
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType

from spillway.errors import RANK_CRASHED, ExitCode, UserError

from ..ending import CRASHED, Ending
from . import merged_metrics
from .ending import RankEnd, decisive
from .merged_metrics import RankMetrics
from .output import PrefixedOutput

DEFAULT_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does: a lost peer is an error, not a hang
    "PYTHONUNBUFFERED": "1",  # a killed rank's last lines are the ones that are wanted
}
"""Set for the ranks unless the launcher's environment sets them."""
NODE_RANK_VARIABLE = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in the pods of an Indexed Job."""
METRICS_PORT_VARIABLE = "SPILLWAY_METRICS_PORT"
TERMINATION_VARIABLE = "SPILLWAY_TERMINATION_PATH"
CHECKPOINT_VARIABLE, SPILL_VARIABLE = "SPILLWAY_CHECKPOINT_DIRECTORY", "SPILLWAY_SPILL_DIRECTORY"
"""Variables for scripts: the directory that outlives the pod, if the job has a claim, and the spill volume."""
POD_TERMINATION_PATH = Path("/dev/termination-log")

FOLLOW_SECONDS = 10.0
"""Seconds that the other ranks have to end by themselves after a failure: they notice that a peer is gone."""
COMMIT_SECONDS = 120.0
"""The same after a rank has completed or was preempted: the others are committing the same checkpoint."""
STOP_SECONDS = 10.0
"""Seconds from SIGTERM to SIGKILL."""
DRAIN_SECONDS = 2.0
"""Seconds to wait for the last lines of the ranks' output."""
POLL_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

TRAINER = (sys.executable, "-P", "-m", "spillway_trainer")
"""-P: files in the current directory must not shadow modules of ours or of Python's."""


LOWEST = {"epoch": 1, "metrics_port": 1, "num_nodes": 1, "ranks_per_node": 1, "master_port": 0}
"""Least values of the numbers in LaunchSettings; its other fields are text."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What the launcher needs of job.json. A test keeps names and defaults equal to those of JobFile, whose import
    would cost 16 MB."""

    name: str
    epoch: int
    termination_message_path: str
    metrics_port: int | None = None
    num_nodes: int = 1
    ranks_per_node: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


def read_layout(path: Path) -> LaunchSettings:
    """Reads job.json. Raises UserError if it is missing, or does not say what is needed here; the ranks check the
    rest."""
    try:
        content = json.loads(path.read_bytes())
        layout = LaunchSettings(
            **{one.name: content[one.name] for one in fields(LaunchSettings) if one.name in content}
        )
        if (content.get("spec") or {}).get("members"):
            layout = replace(layout, ranks_per_node=1)  # one rank, which starts a process for each device
    except OSError as error:
        raise UserError(
            f"{path}: the job file cannot be read: {error.strerror or error}; start the job with spillway run, which "
            "writes this file"
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: is not a job file of this version of spillway: {error}; run the job again") from error
    for one in fields(LaunchSettings):
        value, wanted = getattr(layout, one.name), wanted_of(one.name)
        if not (is_wanted(one.name, value) or (value is None and one.default is None)):
            raise UserError(
                f"{path}: {one.name} = {value!r}: must be {wanted}; run the job again, which writes a new file"
            )
    if layout.num_nodes > 1 and not layout.master_port:
        raise UserError(
            f"{path}: master_port = 0, but the job has {layout.num_nodes} nodes; set master_port to the port on which "
            "their ranks connect"
        )
    return layout


def read_script(path: Path) -> list[str]:
    """Returns the command of a job that runs a script; empty if the job has none. Sets the script's directories as
    variables of this process, which its ranks inherit. The file has been read before."""
    content = json.loads(path.read_bytes())
    command = (content.get("spec") or {}).get("command") or []
    if command:
        kept, spill = content["checkpoint_directory"], content["spill_directory"]
        Path(kept).mkdir(parents=True, exist_ok=True)
        os.environ |= {CHECKPOINT_VARIABLE: kept} | ({SPILL_VARIABLE: spill} if Path(spill).is_dir() else {})
    return list(command)


def expanded(argument: str, variables: Mapping[str, str]) -> str:
    """Expands variables as Kubernetes does: $(NAME) is the variable if there is one, $$ is $."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda found: variables.get(found[1], found[0]) if found[1] else "$", argument)


def is_wanted(name: str, value: object) -> bool:
    """Whether `value` is possible for the field `name` of LaunchSettings."""
    if name in LOWEST:
        return isinstance(value, int) and not isinstance(value, bool) and value >= LOWEST[name]
    return isinstance(value, str) and value != ""


def wanted_of(name: str) -> str:
    return f"a number of at least {LOWEST[name]}" if name in LOWEST else "a text that is not empty"


def node_rank(layout: LaunchSettings, environment: Mapping[str, str]) -> int:
    """Returns the number of this node. Raises UserError for an index for which the job has no node."""
    text = environment.get(NODE_RANK_VARIABLE, "0")
    if not text.isdecimal() or int(text) >= layout.num_nodes:
        raise UserError(
            f"{NODE_RANK_VARIABLE} = {text!r}: the job has {layout.num_nodes} nodes, numbered from 0; set this "
            "environment variable to the number of one of them"
        )
    return int(text)


def free_ports(count: int) -> list[int]:
    """Returns free ports of 127.0.0.1; all are held until the last is found, so that no two are the same."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def torchrun_variables(layout: LaunchSettings, node: int, local_rank: int, master_port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for its workers, so that any script for torchrun runs here."""
    rank = node * layout.ranks_per_node + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(layout.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": layout.master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": f"{layout.name}-{layout.epoch}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


@dataclass(frozen=True, slots=True)
class RankStart:
    """How one rank is started."""

    rank: int
    environment: dict[str, str]
    """Variables in addition to the launcher's own."""

    @property
    def termination_path(self) -> Path:
        return Path(self.environment[TERMINATION_VARIABLE])


def plan_ranks(layout: LaunchSettings, node: int, scratch: Path) -> list[RankStart]:
    """Returns how to start the ranks of one node; their termination messages are written below `scratch`."""
    free_master_port, *metrics_ports = free_ports(1 + layout.ranks_per_node)
    starts = []
    for local_rank in range(layout.ranks_per_node):
        variables = torchrun_variables(layout, node, local_rank, layout.master_port or free_master_port)
        variables[TERMINATION_VARIABLE] = str(scratch / f"rank-{variables['RANK']}.json")
        if layout.metrics_port is not None:
            variables[METRICS_PORT_VARIABLE] = str(metrics_ports[local_rank])
        starts.append(RankStart(int(variables["RANK"]), variables))
    return starts


def rank_command(program: Sequence[str]) -> list[str]:
    """Returns the command that runs `program` as a child that dies with this process."""
    return [sys.executable, "-P", "-m", "spillway_trainer.launch.rank", str(os.getpid()), *program]


@dataclass(slots=True)
class LaunchedRanks:
    """The ranks of this node, from their start to the end of the last one."""

    program: Sequence[str]
    is_script: bool = False
    """Whether the ranks run a script, so that only its output says how a rank failed."""
    running: dict[int, RankStart] = field(default_factory=dict)
    """By process id."""
    ends: list[RankEnd] = field(default_factory=list)
    """In the order in which they were reaped."""
    output: PrefixedOutput = field(default_factory=PrefixedOutput)
    asked: bool = False
    """Whether the launcher was asked to stop, and has passed that on."""
    stopped: bool = False
    """Whether the launcher stopped the ranks that still ran after a failure."""
    _groups: set[int] = field(default_factory=set)
    """Process groups of a script's ranks that were asked to stop."""

    def start(self, starts: Sequence[RankStart]) -> None:
        """Starts all ranks. Raises OSError if the system has no room for another process."""
        for start in starts:
            prefix = f"[rank {start.rank}] " if len(starts) > 1 else ""
            piped = len(starts) > 1 or self.is_script
            sinks = [self.output.pipe(start.rank, target, prefix) for target in (1, 2)] if piped else []
            try:
                self.running[self._spawn(start, sinks)] = start
            finally:
                for sink in sinks:
                    os.close(sink)
        if self.output.streams:
            self.output.start()

    def is_running(self, rank: int) -> bool:
        return any(start.rank == rank for start in list(self.running.values()))

    def reap(self) -> None:
        """Reaps every process that has ended; those that are no ranks are orphans that PID 1 has inherited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            start = self.running.pop(pid, None)
            if start is not None:
                self.ends.append(self._end(start, status))

    def signal(self, number: int) -> None:
        """Signals every running rank. SIGKILL reaches its children, too, and so does every signal to a script, which
        may be a shell that waits for the program that saves."""
        for pid in self.running:
            if number == signal.SIGKILL or not self.is_script:
                os.kill(pid, number)
            if number == signal.SIGKILL or self.is_script:
                with suppress(ProcessLookupError):  # the rank left its group
                    os.killpg(pid, number)
                    self._groups.add(pid)

    def still_saves(self) -> bool:
        """Whether a script was asked to stop, and programs that it started are still running."""
        for group in tuple(self._groups):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                self._groups.remove(group)
        return bool(self._groups)

    def _spawn(self, start: RankStart, sinks: Sequence[int]) -> int:
        variables = {**DEFAULT_VARIABLES, **os.environ, **start.environment}
        program = [expanded(one, variables) for one in self.program] if self.is_script else self.program
        command = rank_command(program)
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        copies = [(os.POSIX_SPAWN_DUP2, sink, target) for target, sink in zip((1, 2), sinks, strict=False)]
        return os.posix_spawn(
            command[0],
            command,
            variables,
            file_actions=[*actions, *copies],
            setpgroup=0,  # a terminal's Ctrl-C reaches only the launcher, which passes it on
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )

    def _end(self, start: RankStart, status: int) -> RankEnd:
        try:
            message = start.termination_path.read_bytes()
        except OSError:
            message = b""
        return RankEnd(start.rank, status, message, self.stopped, self.asked, is_script=self.is_script)


class Wakeups:
    """Turns signals into something to wait for: SIGCHLD, and requests to stop. Handlers only note them; the loop
    acts."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @contextmanager
    def listening(self) -> Iterator[Wakeups]:
        previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._note) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(self._read)
            os.close(self._write)

    def wait(self, seconds: float) -> None:
        """Waits for a signal, at most `seconds`."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = self.stop_requested or number in STOP_SIGNALS


def supervise(ranks: LaunchedRanks, wakeups: Wakeups) -> None:
    """Waits until every rank has ended: by itself, on request, or because another one failed."""
    stop_at = kill_at = float("inf")
    while True:
        ranks.reap()
        if not ranks.running and not ranks.still_saves():
            return
        now = time.monotonic()
        if wakeups.stop_requested and not ranks.asked:
            ranks.asked = True
            ranks.signal(signal.SIGTERM)
        stop_at = min(stop_at, now + patience(ranks.ends))
        if now >= stop_at and not ranks.stopped:
            ranks.stopped = True
            ranks.signal(signal.SIGTERM)
            kill_at = now + STOP_SECONDS
        if now >= kill_at:
            ranks.signal(signal.SIGKILL)
        wakeups.wait(min(POLL_SECONDS, max(0.0, stop_at - now)) if not ranks.stopped else POLL_SECONDS)


def patience(ends: Sequence[RankEnd]) -> float:
    """Returns how many seconds the ranks that still run may continue after these ends: without limit as long as none
    has ended, or if other ranks of a script are done, because its rank 0 may evaluate for long."""
    codes = {end.exit_code for end in ends if not end.stopped_early}
    if any(end.stopped_early for end in ends) or codes - {ExitCode.COMPLETED, ExitCode.PREEMPTED}:
        return FOLLOW_SECONDS
    return COMMIT_SECONDS if codes and not ends[0].is_script else float("inf")


def launch(
    layout: LaunchSettings, program: Sequence[str], node: int, wakeups: Wakeups, *, is_script: bool = False
) -> RankEnd:
    """Run the ranks of one node to their end, and return the one that is the pod's.

    Raises UserError if the metrics port cannot be opened, OSError if a rank cannot be started (ranks that were started
    die with the launcher).
    """
    beside = Path(layout.termination_message_path).parent  # so that a killed launcher leaves nothing in /tmp
    scratch = Path(tempfile.mkdtemp(prefix="ranks-", dir=beside if os.access(beside, os.W_OK) else None))
    ranks = LaunchedRanks(program, is_script)
    try:
        starts = plan_ranks(layout, node, scratch)
        if layout.metrics_port is not None and not is_script:
            ports = {start.rank: int(start.environment[METRICS_PORT_VARIABLE]) for start in starts}
            merged_metrics.serve(layout.metrics_port, RankMetrics(layout.name, ports, ranks.is_running))
        ranks.start(starts)
        supervise(ranks, wakeups)
        ranks.output.finish(DRAIN_SECONDS)
        output = ranks.output
        waited = output.of_nccl - output.of_device
        end = decisive([replace(end, waited_in_nccl=end.rank in waited) for end in ranks.ends])
        return replace(end, last_line=output.last_lines.get(end.rank, ""))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: list[str], program: Sequence[str] = TRAINER) -> int:
    if len(arguments) != 1:
        sys.stderr.write(__doc__ or "")
        return ExitCode.USER_ERROR
    directory = Path(arguments[0])
    path = POD_TERMINATION_PATH if POD_TERMINATION_PATH.is_file() else None
    with Wakeups().listening() as wakeups:  # first of all: without a handler, PID 1 ignores SIGTERM
        try:
            layout = read_layout(directory / "job.json")
            path = Path(layout.termination_message_path)
            script = read_script(directory / "job.json")
            started = script or [*program, str(directory)]
            end = launch(layout, started, node_rank(layout, os.environ), wakeups, is_script=bool(script))
            code, message = end.exit_code, end.termination()
        except Exception as error:  # PID 1 says how the pod ended, whatever went wrong
            code, message = not_launched(error)
    if path is not None:
        write_message(path, message)
    return code


def not_launched(error: Exception) -> tuple[int, bytes]:
    """Returns exit code and termination message if no rank ran: the job is wrong, the system rejected a process, or the
    launcher failed."""
    ending = Ending(RANK_CRASHED, CRASHED, f"the launcher failed: {type(error).__name__}: {error}")
    if isinstance(error, UserError):
        ending = Ending(error.exit_code.reason, error.exit_code, str(error))
    elif isinstance(error, OSError):
        ending = Ending(RANK_CRASHED, CRASHED, f"the ranks could not be started: {error}")
    else:
        traceback.print_exception(error)
    print(f"{ending.reason}: {ending.message}", flush=True)
    return int(ending.exit_code), ending.to_json(rank=0, step=0).encode()


def write_message(path: Path, message: bytes) -> None:
    """Writes in place, because in a pod the path is a mounted file. An error is only reported: the exit code says the
    same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(message)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        print(f"termination message not written to {path}: {error}", flush=True)
