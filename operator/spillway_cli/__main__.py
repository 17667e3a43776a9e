"""The `spillway` command: one function per subcommand, each of which imports its implementation when called.

`spillway --help` and `spillway plan` import no torch (a test checks this). Expected errors print one sentence and exit
with a documented code; unexpected ones print one line and write the traceback to a file.
"""

# ruff: noqa: E402 - the Ctrl-C handler is installed before anything large is imported
from __future__ import annotations

from spillway_cli import interrupts

interrupts.listen(__name__)

import contextlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from spillway import __version__
from spillway.errors import ExitCode, InvalidJob, Preempted, SpillwayError, UserError

from .console import Format, leave_reader, message_console, print_json
from .interrupts import wants_json

Choice = TypeVar("Choice", bound=StrEnum)


class Commands(TyperGroup):
    """Turns Ctrl-C into our Preempted error, before the library exits with its own code."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with interrupts_reported():
            return super().make_context(*arguments, **options)

    def invoke(self, context: Any) -> Any:
        with interrupts_reported():
            return super().invoke(context)


@contextlib.contextmanager
def interrupts_reported() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Preempted(interrupts.SENTENCE) from None


CLICK_USAGE_ERROR = 2
"""The command-line library's exit code for a wrong option; ours is UserError (64)."""
UNEXPECTED = 1

app = typer.Typer(
    cls=Commands,
    help="Train models under memory budgets, and see where the bytes go.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
checkpoints = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, verify, export and import checkpoints."
)
app.add_typer(checkpoints, name="ckpt")

FormatOption = Annotated[Format, typer.Option("-o", "--format", help="Output format.")]
NamespaceOption = Annotated[
    str | None, typer.Option("-n", "--namespace", metavar="NS", help="Namespace; default: that of the context.")
]
ContextOption = Annotated[str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]
MemberOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only this member of a sweep.")]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="QUANTITY", help="Memory budget of each device, for example 24Gi.")
]
HostOption = Annotated[str | None, typer.Option(metavar="QUANTITY", help="Host memory budget of the node.")]
NvmeOption = Annotated[str | None, typer.Option(metavar="QUANTITY", help="NVMe budget.")]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spillway {__version__}")
        raise typer.Exit


@app.callback()
def spillway(
    _: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(help="Show a job's memory plan, without running it.")
def plan(
    file: Annotated[Path, typer.Argument(metavar="JOB", help="A TrainingJob in YAML.")],
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="h100, 8xh100, a100-40, cpu or a NodeProfile file; default: this machine."),
    ] = None,
    device: DeviceOption = None,
    host: HostOption = None,
    nvme: NvmeOption = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine, as in run --ranks.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from . import plan_command  # noqa: PLC0415
    from .run.plan import BudgetOverrides  # noqa: PLC0415

    raise typer.Exit(plan_command.plan(file, node, BudgetOverrides(device, host, nvme), ranks, output))


@app.command(help="Train a job here; rerun to resume.")
def run(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A TrainingJob in YAML.")],
    directory: Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory of the run.")],
    claim: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Directory for a claim.")] = None,
    device: DeviceOption = None,
    host: HostOption = None,
    nvme: NvmeOption = None,
    spill: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Directory to spill to; default: --output. Repeat it to stripe over several disks."
        ),
    ] = None,
    node: Annotated[Path | None, typer.Option(metavar="FILE", help="Profile of this machine.")] = None,
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Trainer processes that share the batch; for a sweep, devices that train members at the same time.",
        ),
    ] = 1,
    metrics_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve /metrics on this port.")] = None,
    max_restarts: Annotated[int | None, typer.Option(min=0, help="Default: lifecycle.maxRestarts.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from .run import command as run_command  # noqa: PLC0415
    from .run.plan import BudgetOverrides  # noqa: PLC0415

    budget = BudgetOverrides(device, host, nvme)
    options = run_command.RunOptions(
        job, directory, claim or [], budget, spill or [], metrics_port, max_restarts, output, ranks, node
    )
    raise typer.Exit(run_command.run(options))


@app.command(help="Measure a machine, or correct its rates from runs.")
def calibrate(  # noqa: PLR0913, PLR0917 - one argument per option
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Cluster node, measured by a Job; default: this machine.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="NodeProfile file to write; default: the one that plan and run use."
        ),
    ] = None,
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs will spill; default: here.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure faster and less exactly: fewer models, fewer bytes.")
    ] = False,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Directory of a run, whose measured step times correct the hardware's rates. May be given repeatedly.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Trainer image for the Job that measures a cluster node.")
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    if node is not None:
        if runs or directory is not None:
            given = "--from" if runs else "--directory"
            raise UserError(
                f"{given}: only applies to this machine, but {node} is a cluster node; leave one of the two out"
            )
        if not image:
            raise UserError(f"--image: missing; give the trainer image, which the Job that measures node {node} runs")
        from .calibrate import node as calibrate_node  # noqa: PLC0415

        on_node = calibrate_node.NodeOptions(node, image, context, namespace, quick, file, output)
        raise typer.Exit(calibrate_node.calibrate_node(on_node))
    if image or namespace or context:
        given = "--image" if image else "--namespace" if namespace else "--context"
        raise UserError(
            f"{given}: only applies to a cluster node; name the node (`spillway calibrate NODE`), or leave {given} out"
        )
    from .calibrate import command as calibrate_command  # noqa: PLC0415

    if runs and (quick or directory is not None):
        ignored = "--quick" if quick else "--directory"
        raise UserError(f"{ignored}: has no effect with --from, which only reads runs; leave one of the two out")
    options = calibrate_command.CalibrateOptions(file, directory or Path(), quick, runs or [], output)
    raise typer.Exit(calibrate_command.calibrate(options))


@app.command(help="Train, kill, resume and compare under half the memory.")
def demo(
    directory: Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory to train in.")] = Path(
        "spillway-demo"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep corpus and checkpoints after the demo.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    from . import demo_command  # noqa: PLC0415

    raise typer.Exit(demo_command.demo(directory, keep, output))


@app.command(help="Write a run's report: one self-contained HTML page.")
def report(
    run: RunArgument,
    file: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Default: RUN/report.html.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from .report import command as report_command  # noqa: PLC0415

    raise typer.Exit(report_command.report(run, file, output))


@app.command(help="Compare runs: figures, jobs, curves and bits.")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN", help="Directories of runs.")],
    file: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="An HTML page with the curves.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from .report import compare as compare_command  # noqa: PLC0415

    raise typer.Exit(compare_command.compare(runs, file, output))


@app.command(help="Create a job in a cluster.")
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A TrainingJob in YAML.")],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job ends; exit with its exit code.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only let the API server check the job.")] = False,
    output: Annotated[
        str, typer.Option("-o", "--format", metavar="text|json|yaml|name", help="Output format.")
    ] = "text",
) -> None:
    from .cluster import submit as submit_command  # noqa: PLC0415

    formats = submit_command.SubmitFormat
    if output not in list(formats):
        raise typer.BadParameter(f"{output!r}: use {', '.join(formats)}", param_hint="--format")
    options = submit_command.SubmitOptions(job, context, namespace, wait, dry_run, formats(output))
    raise typer.Exit(submit_command.submit(options))


@app.command(help="Show the jobs of a cluster, or one job in detail.")
def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Name of a TrainingJob; default: all.")] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of every namespace.")] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Print again on every change.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    from .cluster import status as status_command  # noqa: PLC0415

    options = status_command.StatusOptions(job, context, namespace, all_namespaces, watch, output)
    raise typer.Exit(status_command.status(options))


@app.command(help="Print the log of a job's pods or a run's trainer.")
def logs(
    job: Annotated[str, typer.Argument(metavar="JOB|RUN", help="A TrainingJob, or the directory of a run.")],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until the end, through restarts.")] = False,
    rank_node: Annotated[
        int | None, typer.Option("--rank-node", min=0, metavar="I", help="Only the pod of this node: 0, 1, ...")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: the newest.")] = None,
) -> None:
    from .cluster import logs as logs_command  # noqa: PLC0415

    raise typer.Exit(logs_command.logs(logs_command.LogsOptions(job, context, namespace, follow, rank_node, attempt)))


@app.command(help="Watch a cluster's jobs, one job or a local run.")
def top(
    name: Annotated[
        str | None, typer.Argument(metavar="[JOB|RUN]", help="A TrainingJob, or the directory of a run; default: all.")
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of every namespace.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Refresh interval.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    from .top import command as top_command  # noqa: PLC0415

    options = top_command.TopOptions(name, context, namespace, all_namespaces, interval, once, output)
    raise typer.Exit(top_command.top(options))


@app.command(help="Diagnose this machine and cluster.")
def doctor(
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs will spill; default: here.")] = None,
    job: Annotated[Path | None, typer.Option(metavar="JOB", help="Also check the claims of this job.")] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from .doctor import command as doctor_command  # noqa: PLC0415

    options = doctor_command.DoctorOptions(directory, job, context, namespace, output)
    raise typer.Exit(doctor_command.doctor(options))


@checkpoints.command(help="List committed checkpoints, newest first.")
def ls(run: RunArgument, member: MemberOption = None, output: FormatOption = Format.TEXT) -> None:
    from . import checkpoint_command  # noqa: PLC0415

    raise typer.Exit(checkpoint_command.ls(run, output, member))


@checkpoints.command(help="Check every byte; exit 74 if any has changed.")
def verify(run: RunArgument, member: MemberOption = None, output: FormatOption = Format.TEXT) -> None:
    from . import checkpoint_command  # noqa: PLC0415

    raise typer.Exit(checkpoint_command.verify(run, output, member))


@checkpoints.command(help="Export weights (Hugging Face) or states (DeepSpeed, torch).")
def export(  # noqa: PLR0913, PLR0917 - one argument per option
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A new directory.")],
    step: Annotated[int | None, typer.Option(min=0, help="Default: the newest intact one.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint with the lowest evaluation loss.")
    ] = False,
    form: Annotated[str, typer.Option("--as", metavar="FORM", help="huggingface, universal or dcp.")] = "huggingface",
    dtype: Annotated[
        str | None, typer.Option(help="Type of exported weights: bfloat16 (default), float16 or float32.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer that will load --as universal: torch (default) or deepspeed.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights of their model.")] = False,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model directory that training started from. Default: its path at that time."),
    ] = None,
    member: MemberOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from . import checkpoint_command as command  # noqa: PLC0415

    options = command.ExportOptions(
        run,
        to,
        step,
        best,
        one_of(command.ExportForm, form, "--as"),
        None if dtype is None else one_of(command.ExportDtype, dtype, "--dtype"),
        None if optimizer is None else one_of(command.LoadingOptimizer, optimizer, "--optimizer"),
        output,
        member,
        merge,
        base,
    )
    raise typer.Exit(command.export(options))


@checkpoints.command(help="List, and delete, checkpoints of TrainingJobs that no longer exist.")
def gc(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory where a claim with checkpoints is mounted.")
    ],
    older_than: Annotated[
        str, typer.Option(help="Only directories not written to for this long: 30m, 12h, 7d.")
    ] = "1d",
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; default: only list.")] = False,
    context: ContextOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    from . import unused_checkpoints  # noqa: PLC0415

    raise typer.Exit(unused_checkpoints.collect(directory, older_than, context, output, delete=delete))


@checkpoints.command("import", help="Start a run from DeepSpeed or torch states.")
def import_(  # noqa: PLR0913, PLR0917 - one argument per option
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory of another program's checkpoint.")],
    job: Annotated[Path, typer.Option("--job", metavar="JOB", help="The TrainingJob to continue with.")],
    directory: Annotated[Path, typer.Option("--output", metavar="DIR", help="New directory for the run.")],
    claim: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Directory for a claim.")] = None,
    device: DeviceOption = None,
    host: HostOption = None,
    nvme: NvmeOption = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks with which the imported checkpoint will be trained on, as in run --ranks.")
    ] = 1,
    output: FormatOption = Format.TEXT,
) -> None:
    from . import import_command  # noqa: PLC0415
    from .run.plan import BudgetOverrides  # noqa: PLC0415

    budget = BudgetOverrides(device, host, nvme)
    options = import_command.ImportOptions(source, job, directory, claim or [], budget, output, ranks)
    raise typer.Exit(import_command.import_checkpoint(options))


def one_of(choices: type[Choice], given: str, option: str) -> Choice:
    """Returns the member of `choices`. Raises the library's BadParameter for any other word."""
    if given not in list(choices):
        *others, last = choices
        raise typer.BadParameter(f"{given!r}: use {', '.join(others)} or {last}", param_hint=option)
    return choices(given)


def main() -> None:
    """Runs the command: exit codes as documented, no traceback on the terminal."""
    prepare_streams()
    code = run_app(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        leave_reader(sys.stdout)
    except OSError as error:
        code = rejected_by_the_system(error, wants_json(sys.argv[1:]))
    interrupts.finish()
    sys.exit(code)


def prepare_streams() -> None:
    """Makes printing safe: escapes characters that the encoding lacks, sends a closed stream to /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run_app(arguments: list[str]) -> int:
    as_json = wants_json(arguments)
    try:
        reject_empty_words(arguments)
        return int(app(arguments, prog_name="spillway", standalone_mode=not as_json))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else UNEXPECTED
        return ExitCode.USER_ERROR if code == CLICK_USAGE_ERROR else code
    except (SpillwayError, KeyboardInterrupt) as error:
        expected = error if isinstance(error, SpillwayError) else Preempted(interrupts.SENTENCE)
        say_expected(expected, as_json)
        return expected.exit_code
    except OSError as error:
        return rejected_by_the_system(error, as_json)
    except Exception as error:
        if getattr(error, "exit_code", None) == CLICK_USAGE_ERROR and hasattr(error, "format_message"):
            say_expected(
                UserError(f"command line: {error.format_message().removesuffix('.')}; see spillway --help"), as_json
            )
            return ExitCode.USER_ERROR
        say_unexpected(error, as_json)
        return UNEXPECTED


def rejected_by_the_system(error: OSError, as_json: bool) -> int:
    if isinstance(error, BrokenPipeError):  # the reader has closed its end (`| head`)
        leave_reader(sys.stdout)
        return ExitCode.COMPLETED
    rejection = UserError(f"{error.filename or 'the result'}: {error.strerror}; check the disk and its permissions")
    with contextlib.suppress(OSError):  # the error may be that stdout cannot be written
        say_expected(rejection, as_json)
    if error.filename is None:
        leave_reader(sys.stdout)  # else Python would try to write the rest at exit
    return rejection.exit_code


def reject_empty_words(arguments: list[str]) -> None:
    """Rejects empty words: `--output "$UNSET"` would mean the current directory."""
    for before, word in pairwise(["", *arguments]):
        if not word or (word.startswith("--") and word.endswith("=")):
            option = word or before
            raise UserError(
                f"command line: empty value{f' after {option}' if option else ''}; is a shell variable unset?"
            )


def say_expected(error: SpillwayError, as_json: bool) -> None:
    """Prints one sentence on stderr, or with -o json a failure document on stdout."""
    if not as_json:
        message_console().print(f"spillway: {error}")
        return
    problems = error.problems if isinstance(error, InvalidJob) else ()
    fields = [{"path": one.path, "given": one.given, "problem": one.problem} for one in problems]
    code = error.exit_code
    failure: dict[str, object] = {"exitCode": int(code), "reason": code.reason, "message": str(error)}
    print_json({"error": {**failure, "fields": fields} if fields else failure})


def say_unexpected(error: Exception, as_json: bool) -> None:
    """Prints one line on stderr that names the traceback's file; with -o json also a document on stdout."""
    sentence = f"unexpected {type(error).__name__}: {error}; details in {keep_traceback()}"
    message_console().print(f"spillway: {sentence}")
    if as_json:
        print_json({"error": {"exitCode": UNEXPECTED, "reason": "Unexpected", "message": sentence}})


def keep_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="spillway-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(traceback.format_exc())
    return file.name


if __name__ == "__main__":
    main()
