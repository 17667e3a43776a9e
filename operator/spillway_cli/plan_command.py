"""`spillway plan FILE [--node NODE]`: prints the memory plan, the predicted step time and the reasons. Starts nothing.

Exit 0: fits on the device. 3: fits with spilling. 4: does not fit. 64: the manifest or a flag is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spillway.api.limits import MANAGER
from spillway.api.load import load_job
from spillway.errors import ExitCode, UserError
from spillway.feedback.profiles import rates_sentence
from spillway.plan import Infeasible, MemoryPlan, Prediction, Tier, Turns
from spillway.planning.explain import TOO_MANY_WRITES, endurance
from spillway.planning.planner import Overrides, make_plan
from spillway.units import counted, format_bytes, format_rough_seconds
from spillway_operator.decide.acceptance import rejection

from .console import message_console, print_result, result_console, status_if_slow, table
from .machine.local_node import probe
from .machine.node_profile import named_node, own_profile
from .record.member_values import NO_VALUES, Values, values_of, values_table
from .run import local_run
from .run.model_inspection import inspected_shape
from .run.plan import BudgetOverrides, decided_for_this_machine, local_devices, quantity, with_budget

PARTS = (
    *("parameters", "gradients", "optimizer_states", "activations", "buffers", "workspace", "allocator", "correction"),
    "reserve",
)
SEARCHING = "comparing plans"


def plan(file: Path, node: str | None, budgets: BudgetOverrides, num_ranks: int | None, output: str) -> int:
    """Plans the job in `file` for a node class, a NodeProfile or (None) this machine; prints the result as `output`
    ("text" or "json"). `num_ranks`: ranks on this machine, default 1. Returns the exit code.

    Raises UserError (InvalidJob with every wrong field) for what cannot be planned, and without `node` also for what
    `spillway run` would reject here.
    """
    job = load_job(file)
    if node is None:
        local_run.reject_wrong_fields(job, None, str(file))
    elif num_ranks is not None:
        raise UserError("--ranks: with --node, spec.parallelism says how many ranks there are; leave --ranks out")
    shape = inspected_shape(file, job, {})
    if node is not None and job.spec.managed_by == MANAGER and (rejected := rejection(job)) is not None:
        for problem in rejected.problems:
            message_console().print(f"planned, but a cluster would reject it: {problem}", markup=False)
    if node is None:
        resources = probe(Path())
        profiles = partial(own_profile, resources.cores)
        local, ranks = with_budget(job, budgets), num_ranks or 1
        with status_if_slow(SEARCHING):
            decided = decided_for_this_machine(local, resources, ranks, shape, profiles)
        best, _ = local_devices(local.spec, resources.gpus, ranks)[0]
        own = profiles(decided.device if isinstance(decided, MemoryPlan) else best)
        rates = "run `spillway calibrate`" if own.spec is None else rates_sentence(own.spec)
        message_console().print(f"this machine: {own.sentence}")
    else:
        device, host, nvme = (_bytes(tier, getattr(budgets, tier)) for tier in ("device", "host", "nvme"))
        overrides = Overrides(device, host, nvme, shape=shape)
        named = named_node(node)
        with status_if_slow(SEARCHING):
            rates, decided = named.rates, make_plan(job, named.node, overrides)
    if output == "json":
        print_result(decided.model_dump_json(indent=2) + "\n")
    else:
        show(result_console(), decided, rates, values_of(job.spec.members))
    return int(exit_code(decided))


def _bytes(tier: str, text: str | None) -> int | None:
    return None if text is None else quantity(tier, text)


def exit_code(decided: MemoryPlan | Infeasible) -> ExitCode:
    if isinstance(decided, Infeasible):
        return ExitCode.DOES_NOT_FIT
    return ExitCode.FITS_WITH_SPILLING if decided.spills else ExitCode.COMPLETED


def show(console: Console, decided: MemoryPlan | Infeasible, rates: str, values: Values = NO_VALUES) -> None:
    """Prints the plan for people; `rates` says where the rates come from, `values` are the members' own values."""
    if isinstance(decided, Infeasible):
        _show_infeasible(console, decided)
    else:
        _show_plan(console, decided, rates, values)


def _show_plan(console: Console, plan: MemoryPlan, rates: str, values: Values) -> None:
    ranks, each = (f"{plan.member_devices} devices", "device") if plan.member_devices > 1 else (plan.ranks, "rank")
    batches = f"{counted(plan.num_micro_batches, 'micro-batch', 'es')} of {plan.micro_batch_size}"
    console.print(f"{plan.job} on {plan.node}: {ranks}, {batches} per step; bytes of one {each}:")
    console.print(tier_table(plan))
    console.print(
        f"\nthe machine needs {format_bytes(plan.machine_bytes)} of memory: {format_bytes(plan.process_bytes)} for the "
        "processes (interpreter, libraries, page cache, checkpoint buffers), the rest for the plan of all ranks, or to "
        "tokenize the text if that needs more"
    )
    if plan.turns is not None:
        console.print()
        console.print(member_table(plan))
        console.print(turns_sentence(plan.turns, plan.prediction))
    if any(values.values()):
        console.print()
        console.print(values_table(values))
    _show_prediction(console, plan, rates)
    _show_list(console, "why", plan.reasons)
    _show_alternatives(console, plan)


def tier_table(plan: MemoryPlan) -> Table:
    """Bytes by part and tier, with budget and headroom."""
    made = table("", *Tier)
    for part in PARTS:
        held = [getattr(plan.bytes[tier], part) for tier in Tier]
        if any(held):
            made.add_row(part.replace("_", " "), *(format_bytes(amount) if amount else "-" for amount in held))
    totals = {tier: plan.bytes[tier].total for tier in Tier}
    made.add_row("total", *(format_bytes(totals[tier]) for tier in Tier), style="bold")
    made.add_row("budget", *(format_bytes(plan.budget[tier]) for tier in Tier))
    made.add_row("headroom", *(format_bytes(plan.budget[tier] - totals[tier]) for tier in Tier))
    return made


def member_table(plan: MemoryPlan) -> Table:
    """A row for each member of a sweep: bytes while it is loaded, bytes while parked, and seconds. If members that
    share a base are loaded together, the bytes are those of all of them, and the seconds are the member's share of
    their steps."""
    shares = any(one.base for one in plan.members)
    made = table("member", *Tier, "parked", "steps", "step", "alone", *(["base"] if shares else []))
    for one in plan.members:
        held = [format_bytes(one.plan.bytes[tier].total) if one.plan.bytes[tier].total else "-" for tier in Tier]
        step_seconds = one.plan.prediction.step_seconds
        made.add_row(
            one.name,
            *held,
            format_bytes(one.parked_bytes),
            str(one.num_steps),
            *(one.plan.prediction.format(seconds) for seconds in (step_seconds, one.num_steps * step_seconds)),
            *([f"{one.base}, {one.num_attached} together" if one.base else "-"] if shares else []),
        )
    return made


def turns_sentence(turns: Turns, prediction: Prediction) -> str:
    """For example: RoundRobin, turns of 30 steps: 1.2 s until all have trained, 1.01 of the bound (1.19 s)."""
    share = turns.seconds / turns.bound_seconds if turns.bound_seconds else 1.0
    return (
        f"{turns.policy}, turns of {turns.num_steps} steps: {prediction.format(turns.seconds)} until all members have "
        f"trained all their steps, {share:.3g} times the lower bound ({prediction.format(turns.bound_seconds)})"
    )


def _show_prediction(console: Console, plan: MemoryPlan, rates: str) -> None:
    prediction = plan.prediction
    parts = [
        f"{prediction.format(seconds)} {what}"
        for seconds, what in (
            (prediction.compute_seconds, "compute"),
            (prediction.exposed_transfer_seconds, "waiting for copies, disk and network"),
            (prediction.exposed_optimizer_seconds, "optimizer"),
        )
        if seconds
    ]
    mark, source = ("", f"; predicted from {rates}") if prediction.calibrated else (f" (uncalibrated: {rates})", "")
    console.print(f"\nstep: {prediction.step}{mark}, bound by {prediction.bound_by} ({', '.join(parts)}){source}")
    writes = endurance(prediction) if prediction.nvme_written_bytes_per_day else "none"
    of_one = " of one device" if plan.member_devices > 1 else " of one rank" if plan.world_size > 1 else ""
    console.print(f"NVMe writes{of_one}: {writes}")


def _show_infeasible(console: Console, decided: Infeasible) -> None:
    why = "The plan that comes closest lacks, per rank:" if decided.missing_bytes else f"Reason: {TOO_MANY_WRITES}."
    console.print(f"{decided.job} does not fit on {decided.node}. {why}")
    made = table("", *decided.missing_bytes)
    made.add_row("missing", *(format_bytes(amount) for amount in decided.missing_bytes.values()), style="bold")
    made.add_row("budget", *(format_bytes(decided.budget[tier]) for tier in decided.missing_bytes))
    if decided.missing_bytes:
        console.print(made)
    if decided.segment:
        console.print(decided.segment)
    console.print(f"\nfits with: {decided.nearest}")
    _show_alternatives(console, decided)


def _show_list(console: Console, heading: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{heading}:")
    for line in lines:
        console.print(f"  {line}")


def _show_alternatives(console: Console, decided: MemoryPlan | Infeasible) -> None:
    lines, shown = [], decided.prediction.format if isinstance(decided, MemoryPlan) else format_rough_seconds
    for other in decided.alternatives:
        seconds = f"{shown(other.step_seconds)}, " if other.step_seconds is not None else ""
        lines.append(f"{other.summary}: {seconds}{other.reason}")
    _show_list(console, "not chosen" if isinstance(decided, MemoryPlan) else "tried", lines)
