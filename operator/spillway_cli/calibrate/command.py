"""`spillway calibrate`: measures this machine, or corrects its rates from runs; writes a NodeProfile.

probe   a process with torch measures (spillway_trainer.probe) -> medians and fitted costs -> profile
--from  run.jsonl and its plan -> factor per resource -> the existing profile, else the catalog's rates, corrected
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from spillway.api.job_file import JobFile
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import ExitCode, SpillIOError, SpillVolumeFull, UserError
from spillway.extras import need
from spillway.feedback.calibration import (
    Correction,
    MeasuredPrices,
    MeasuredStep,
    Sample,
    corrected,
    corrections,
    fitted,
    measured_step,
    medians,
    not_told,
    predicted_seconds,
)
from spillway.feedback.profiles import document, rates_from, with_rates
from spillway.metrics import Phase, StepMetrics
from spillway.plan import DeviceKind, Overlap
from spillway.planning.hardware import NodeSpec, local_node
from spillway.planning.step_time import Rates, rank_rates
from spillway.units import format_bytes, format_count, format_seconds
from spillway_trainer.cgroup import usable_cores
from spillway_trainer.tiers.volumes import memory_kind

from ..console import Format, message_console, print_json, result_console, table
from ..machine.gpus import Gpus, find_gpus
from ..machine.local_node import LocalResources
from ..machine.node_profile import check_writable, default_path, own_profile, write_profile
from ..record.directory import existing_run
from ..record.log import read_run_log, step_metrics
from ..report.command import measured_under
from ..run.local_run import read_job_file
from ..run.plan import cuda_node

NOISY_SPREAD = 0.15
"""Spread of the samples' middle half around their median above which the machine counts as busy."""
MATRIX = "matrix product "
ERRORS = {kind.exit_code: kind for kind in (UserError, SpillVolumeFull, SpillIOError)}


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """The command line of `spillway calibrate`."""

    output: Path | None
    """None = the file from which plans for this machine take their rates."""
    directory: Path
    """Where to put the spill file."""
    quick: bool
    runs: Sequence[Path]
    """The runs of --from; empty = probe."""
    format: Format


def calibrate(options: CalibrateOptions) -> int:
    cores = usable_cores(Path("/"))
    read, gpus = [read_evidence(run, cores) for run in options.runs], find_gpus()
    device: DeviceKind = read[0].device if read else "Cpu" if gpus.lacking(1) else "Cuda"
    path = options.output or default_path(device)
    check_writable(path)
    node = node_here(device, cores, gpus)
    found = from_runs(read, path, cores, node) if read else from_probe(options, cores, node)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    profile = found.profile.model_copy(update={"num_cores": cores, "measured_time": now})
    made = document(host_name(), profile, {})
    write_profile(path, made, found.comment)
    if options.format is Format.JSON:
        print_json({"profile": str(path), "nodeProfile": made, **found.document})
    else:
        console = result_console()
        for shown in found.tables:
            console.print(shown)
        console.print("\n".join([*found.notes, f"profile: {path}", used_by(path, device)]))
    return int(ExitCode.COMPLETED)


@dataclass(frozen=True, slots=True)
class Found:
    """A profile, and what to print about it."""

    profile: NodeProfileSpec
    comment: str
    tables: Sequence[Table]
    notes: Sequence[str]
    document: Mapping[str, object]
    """Fields of -o json in addition to the profile."""


def node_here(device: DeviceKind, cores: int, gpus: Gpus) -> NodeSpec:
    """This machine with the catalog's rates. Raises UserError if it has no such device."""
    if device == "Cpu":
        return local_node(cores, 0, 0, 0)
    if gpus.lacking(1):
        raise UserError(
            f"--from: the runs used a GPU, but no GPU is usable here ({gpus.lacking(1)}); see `spillway doctor`"
        )
    return cuda_node(LocalResources(cores, 0, 0, gpus=gpus), 0, 1)


def used_by(path: Path, device: DeviceKind) -> str:
    try:
        automatic = path.resolve() == default_path(device).resolve()
    except UserError:
        automatic = False
    if automatic:
        return "`spillway plan JOB` and `spillway run` use it from now on"
    return f"used by `spillway plan JOB --node {path}` and `spillway run JOB --node {path}`"


def host_name() -> str:
    """The host name in the form of a Kubernetes node name."""
    return re.sub(r"[^a-z0-9.-]+", "-", platform.node().lower()).strip(".-")[:253] or "this-machine"


# --- the probe --------------------------------------------------------------------------------------------------------


def from_probe(options: CalibrateOptions, cores: int, before: NodeSpec) -> Found:
    need("trainer")
    result = run_probe(options.directory, cores, options.quick, before.device_kind)
    node = probed_node(result, before)
    samples = [sample for cell in result["cells"] for sample in samples_of(cell)]
    prices = fitted(samples, rank_rates(node, 1, 1, "bfloat16"), fastest(result["figures"]))
    node = priced(node, prices)
    spreads = {name: spread(values) for name, values in result["figures"].items()}
    notes = probe_notes(result, prices, max(spreads.values()), options.directory)
    shown = table("", "median", "middle half", "samples", title="measured")
    for name, values in result["figures"].items():
        low, median, high = quartiles(values)
        shown.add_row(name, rate(name, median), f"{rate(name, low)} to {rate(name, high)}", str(len(values)))
    costs = table("", "", title="\nfitted to training steps of small models")
    for name, text in price_texts(node):
        costs.add_row(name, text)
    return Found(
        profile=rates_from(
            node, before, NodeProfileSpec.model_validate({"deviceKind": before.device_kind, "source": "Probe"})
        ),
        comment="\n".join(["Measured by `spillway calibrate`.", *notes]),
        tables=[shown, costs],
        notes=["", *notes],
        document={
            "figures": {name: figure(values) for name, values in result["figures"].items()},
            "fitError": prices.error,
            "notes": list(notes),
        },
    )


def run_probe(directory: Path, cores: int, quick: bool, device: DeviceKind) -> dict[str, Any]:
    """Runs the probe in a process that ends with this one; its spill file has no name, so nothing is left behind."""
    arguments = ["spillway_trainer.probe", "--directory", str(directory), "--threads", str(cores), "--device", device]
    command = [
        sys.executable,
        "-P",
        "-m",
        "spillway_cli.run.trainer_process",
        *arguments,
        *(["--quick"] if quick else []),
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        result, exit_code = followed(command, errors)
        errors.seek(0)
        return outcome(result, exit_code, errors.read())


def followed(command: Sequence[str], errors: TextIO) -> tuple[dict[str, Any] | None, int]:
    """The last line that was not a progress message, and the exit code; kills the process in any case."""
    result = None
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            with message_console().status("starting") as status:
                for line in process.stdout or ():
                    message = json.loads(line)
                    status.update(str(message.get("doing", "")))
                    result = message if "doing" not in message else result
            return result, process.wait()
        finally:
            process.kill()


def outcome(result: dict[str, Any] | None, exit_code: int, errors: str) -> dict[str, Any]:
    """The measurements. Raises the probe's own error, or UserError when it died without one."""
    if result is not None and "error" in result:
        kind = ERRORS.get(result["error"]["exitCode"], UserError)
        raise kind(result["error"]["message"])
    if result is None or exit_code:
        last = errors.strip().splitlines()[-1:] or ["no output"]
        raise UserError(
            f"the measuring process (python -m spillway_trainer.probe) exited with code {exit_code} ({last[0]}); see "
            "`spillway doctor`"
        )
    measured: dict[str, Any] = result["result"]
    return measured


def probed_node(result: Mapping[str, Any], node: NodeSpec) -> NodeSpec:
    """`node` with the measured medians; compute rates are still the catalog's."""
    at = {name: statistics.median(values) for name, values in result["figures"].items()}
    up, down = at.get("h2d", at["copy"]), at.get("d2h", at["copy"])
    duplex = at["both_ways"] / (up + down) if "both_ways" in at else node.link.duplex_efficiency
    return replace(
        node,
        link=replace(node.link, h2d_bytes_per_second=up, d2h_bytes_per_second=down, duplex_efficiency=min(1.0, duplex)),
        device_bytes_per_second=at.get("on_device", at["optimizer update"]),
        cpu_bytes_per_second=at["optimizer update"],
        dram_bytes_per_second=max(at["host memory"], at["optimizer update"]),
        nvme_read_bytes_per_second=at["disk read"],
        nvme_write_bytes_per_second=at["disk write"],
    )


def fastest(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Type -> FLOPs per second of its fastest matrix product."""
    found: dict[str, float] = {}
    for name, rates in figures.items():
        if name.startswith(MATRIX):
            compute = name.removeprefix(MATRIX).split()[0]
            found[compute] = max(found.get(compute, 0.0), *rates)
    return found


def samples_of(cell: Mapping[str, Any]) -> list[Sample]:
    """Samples for forward, backward and optimizer of a cell's median step; forward and backward together if copies
    overlap both."""
    step = measured_step([[step_metrics(fields) for fields in cell["steps"]]])
    work, seconds = cell["work"], step.phase_seconds
    optimizer = Sample(cell["compute"], work[Phase.OPTIMIZER], seconds[Phase.OPTIMIZER])
    passes = (Phase.FORWARD, Phase.BACKWARD)
    if cell["device"] == "Cuda":  # kernels run asynchronously: only the time of the whole step is meaningful
        names = {name for phase in (*passes, Phase.OPTIMIZER) for name in work[phase]}
        sums = {name: sum(work[phase].get(name, 0.0) for phase in (*passes, Phase.OPTIMIZER)) for name in names}
        return [Sample(cell["compute"], sums, step.step_seconds)]
    if cell["activations"] in {"Keep", "Recompute"} and cell["optimizer"] == "Device":
        return [*(Sample(cell["compute"], work[phase], seconds[phase]) for phase in passes), optimizer]
    both = {name: sum(work[phase].get(name, 0.0) for phase in passes) for name in {*work[passes[0]], *work[passes[1]]}}
    whole = sum(seconds[phase] for phase in (*passes, Phase.WAIT))
    return [Sample(cell["compute"], both, whole), optimizer]


def priced(node: NodeSpec, prices: MeasuredPrices) -> NodeSpec:
    return replace(
        node,
        bfloat16_flops_per_second=1.0 / prices.flop["bfloat16"],
        float32_flops_per_second=1.0 / prices.flop["float32"],
        bfloat16_values_per_second=inverse(prices.value["bfloat16"]),
        float32_values_per_second=inverse(prices.value["float32"]),
        operation_overhead_seconds=prices.operation,
    )


FREE = 1e18
"""Rate of what has no price of its own; a profile can hold it, which it cannot an infinite one."""


def inverse(price: float) -> float:
    return 1.0 / price if price else FREE


def price_texts(node: NodeSpec) -> list[tuple[str, str]]:
    return [
        ("bfloat16", flops(node.bfloat16_flops_per_second)),
        ("float32", flops(node.float32_flops_per_second)),
        ("other operators, bfloat16", values_per_second(node.bfloat16_values_per_second)),
        ("other operators, float32", values_per_second(node.float32_values_per_second)),
        ("overhead per operation", format_seconds(node.operation_overhead_seconds)),
    ]


def probe_notes(result: Mapping[str, Any], prices: MeasuredPrices, worst_spread: float, directory: Path) -> list[str]:
    load = result["loadBefore"]
    noise = (
        f"noise: the middle half of the samples differs by up to {worst_spread:.0%} from the median; load average "
        f"{load:.1f}"
    )
    fit = f"fit: the prediction of half of the training phases is within {prices.error:.0%} of the measurement"
    notes = [noise, fit, f"CPU kernels {result['isa']}, I/O {result['backend']}, {result['threads']} cores"]
    if worst_spread > NOISY_SPREAD or load > result["threads"]:
        notes.append("the machine was busy; measure again when it is idle")
    kind = memory_kind(directory)
    if kind:
        notes.append(f"{directory} is in memory ({kind}): its rates are not those of a disk")
    elif "O_DIRECT" not in result["backend"]:
        notes.append(f"{directory} does not support O_DIRECT: its rates are those of the page cache, not of a disk")
    return notes


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: Sequence[float]) -> float:
    low, median, high = quartiles(values)
    return (high - low) / median / 2.0


def figure(values: Sequence[float]) -> dict[str, float | int]:
    low, median, high = quartiles(values)
    return {"median": median, "low": low, "high": high, "samples": len(values)}


def rate(name: str, value: float) -> str:
    return flops(value) if name.startswith(MATRIX) else bytes_per_second(value)


def flops(rate: float) -> str:
    return f"{rate / 1e9:.3g} GFLOP/s"


def bytes_per_second(rate: float) -> str:
    return f"{format_bytes(rate)}/s"


def values_per_second(rate: float) -> str:
    return f"{format_count(rate)} values/s" if rate < FREE else "included in the FLOP rates"


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """One run: its measured step, and the work that its plan predicted."""

    job: str
    num_nodes: int
    step: MeasuredStep
    work: Mapping[str, Mapping[str, float]]
    local_ranks: int
    compute: str
    overlap: Overlap
    """What the optimizer update overlaps with: backward only if parameters are updated there."""
    num_cipher_threads: int
    device: DeviceKind = "Cpu"

    def rates(self, node: NodeSpec) -> Rates:
        return rank_rates(node, self.local_ranks, self.num_nodes, self.compute, self.num_cipher_threads)


def from_runs(read: Sequence[RunEvidence], target: Path, cores: int, node: NodeSpec) -> Found:
    """Corrects, from the runs, the machine's profile (--output, if it exists) or else the catalog's rates."""
    device = node.device_kind
    if any(run.device != device for run in read):
        raise UserError("--from: some runs used a GPU and some the CPU; pass runs of one kind at a time")
    own = own_profile(cores, device, given=target if target.exists() else None)
    before = node if own.spec is None else with_rates(own.spec, node)
    found = medians([corrections(run.work, run.rates(before), run.step, run.overlap) for run in read])
    kept = [f"{run.job}: {one}" for run in read for one in not_told(run.work, run.rates(before), run.overlap)]
    after = corrected(before, found, across_nodes=any(run.num_nodes > 1 for run in read))
    shown = table("", "predicted", "measured", "factor", title="a step's seconds by resource")
    for one in found:
        seconds = (format_seconds(one.predicted_seconds), format_seconds(one.measured_seconds))
        shown.add_row(one.resource, *seconds, f"{one.factor:.2f}{' (cut)' if one.is_cut else ''}")
    steps = table("", "before", "after", "measured", title="\nseconds of a step")
    for run in read:
        predicted = [predicted_seconds(run.work, run.rates(node)) for node in (before, after)]
        steps.add_row(run.job, *map(format_seconds, (*predicted, run.step.step_seconds)))
    names = ", ".join(f"{run.job} ({run.step.num_steps} steps)" for run in read)
    base = own.spec or NodeProfileSpec.model_validate({"deviceKind": device})
    return Found(
        profile=rates_from(after, before, base.model_copy(update={"source": "Training"})),
        comment=f"Corrected by `spillway calibrate --from`: {names}.",
        tables=[shown, steps],
        notes=["", f"started from: {own.sentence}", *(f"not corrected by {one}" for one in kept)],
        document={
            "corrections": [correction_document(one) for one in found],
            "runs": [
                {"job": run.job, "steps": run.step.num_steps, "measuredStepSeconds": run.step.step_seconds,
                 "predictedBefore": predicted_seconds(run.work, run.rates(before)),
                 "predictedAfter": predicted_seconds(run.work, run.rates(after))}
                for run in read
            ],
            "notCorrected": kept,
            "startedFrom": own.sentence,
        },
    )  # fmt: skip


def correction_document(one: Correction) -> dict[str, object]:
    return {
        "resource": one.resource,
        "predictedSeconds": one.predicted_seconds,
        "measuredSeconds": one.measured_seconds,
        "factor": one.factor,
        "cut": one.is_cut,
    }


def read_evidence(path: Path, cores: int) -> RunEvidence:
    """What the run measured. Raises UserError if its measurements do not apply to this machine."""
    run = existing_run(path)
    job, (plan, measured_steps) = read_job_file(run.job_file), measured_under(run, read_run_log(run.log))
    if job is None:
        raise UserError(f"{path}: no job.json; name the --output of a `spillway run`")
    if not plan.prediction.work:
        raise UserError(
            f"{path}: the plan of this run is from an older version of spillway and lacks the predicted amounts of "
            "work (FLOPs, bytes) of a step; run the job again with this version"
        )
    reject_other_threads(path, job, cores)
    attempts: dict[int, list[StepMetrics]] = {}
    for step in measured_steps:
        attempts.setdefault(step.epoch, []).append(step.metrics)
    try:
        measured = measured_step(list(attempts.values()))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    compute = job.spec.model.precision.compute
    backward = plan.optimizer.overlap == "Backward" and not plan.optimizer.speculative_parameters
    overlap = "Forward" if backward else plan.optimizer.overlap
    work = plan.prediction.work
    threads = job.spec.spill.num_cipher_threads
    ranks = job.ranks_per_node
    return RunEvidence(job.name, job.num_nodes, measured, work, ranks, compute, overlap, threads, plan.device)


def reject_other_threads(path: Path, job: JobFile, cores: int) -> None:
    used = job.compute_threads * job.ranks_per_node
    if used != max(1, cores // job.ranks_per_node) * job.ranks_per_node:
        raise UserError(
            f"{path}: this run used {used} threads, but {cores} cores are usable now, so its times cannot be "
            f"compared; use a run with {cores} threads"
        )
