"""Renders a run's report as one HTML page without external resources. Pure: log and plan in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from spillway.metrics import Phase, StepMetrics
from spillway.plan import MemoryPlan, Tier
from spillway.units import GIB, KIB, MIB, TIB, format_bytes, format_count, format_seconds

from ..record.attempt_ends import Attempt
from ..record.log import RunLog, StepEvent
from ..record.member_values import NO_VALUES, Values, fields_of, value_cells, values_sentence
from ..record.plan_reality import compared, sentence
from ..record.progress import format_eta
from ..record.summary import RunSummary, format_loss, median, summarize
from ..record.sweep_pace import left_seconds
from ..record.sweep_view import MemberView, best_of, joined, member_cells, member_views, steps_made
from .charts import ChartMark, Limit, Point, Series, Span, gantt_chart, line_chart, stacked_chart

TIER_COLOURS = {Tier.DEVICE: "c1", Tier.HOST: "c3", Tier.NVME: "c5"}
PHASE_COLOURS = {
    Phase.FORWARD: "c1", Phase.BACKWARD: "c5", Phase.EXCHANGE: "c7", Phase.OPTIMIZER: "c3", Phase.WAIT: "c2",
    Phase.DATA: "c4",
}  # fmt: skip
OTHER_COLOUR = "c6"
MEMBER_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c7", "c6")
"""Colours of the members' curves; the eighth member has the first colour again."""
MOST_LABELLED_MARKS = 6
BINARY_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run directory."""

    title: str
    directory: str
    """The run directory, as it is written on a command line."""
    version: str
    """Version of spillway, for the footer."""
    plan: MemoryPlan
    log: RunLog
    measured: Sequence[StepEvent]
    """The steps made under the plan; those of all members of a sweep."""
    ended: dict[int, Attempt]
    """Attempt number -> its end; one without an entry is running, or its end was not recorded."""
    member_logs: Mapping[str, RunLog] = field(default_factory=dict)
    """The logs of a sweep's members."""
    values: Values = field(default_factory=dict)
    """The own values of a sweep's members."""
    trains: bool = False
    """Whether a run is active in the directory."""

    @property
    def members(self) -> tuple[MemberView, ...]:
        """The members of a sweep, in the job's order."""
        return member_views(self.log, self.member_logs, self.trains)


def render_report(run: RunRecord) -> str:
    """The whole page. All text from the run is escaped."""
    if run.log.sweep is not None:
        return render_sweep(run)
    summary = summarize(run.log, run.plan, run.measured)
    charts = [loss_section(run), speed_section(run), phase_section(run), *tier_sections(run, summary)]
    return page(
        run,
        tiles(run, summary),
        charts,
        [
            reality_section(run, summary),
            attempts_section(run),
            reasons_section(
                run.plan,
                [correction.reason for correction in run.log.corrections]
                + [choice.reason for choice in run.log.choices[-1:]],
            ),
        ],
    )


def render_sweep(run: RunRecord) -> str:
    """The page of a sweep: curves by member; speed and bytes by the steps of all members in the order of time."""
    together = replace(run, log=joined(run.log, run.member_logs))
    summary = summarize(together.log, run.plan, run.measured)
    charts = [*curves_sections(run), speed_section(together), *tier_sections(together, summary)]
    return page(
        run,
        sweep_tiles(run, summary),
        charts,
        [
            members_section(run.members, run.values),
            *devices_sections(run),
            attempts_section(run),
            reasons_section(run.plan, []),
        ],
    )


def page(run: RunRecord, tiles: str, charts: Sequence[str], sections: Sequence[str]) -> str:
    footer = f"spillway {run.version}, plan for node {run.plan.node}; hover over a chart for values"
    return document(run.title, subtitle(run), footer, tiles, charts, sections)


def document(title: str, subtitle: str, footer: str, tiles: str, charts: Sequence[str], sections: Sequence[str]) -> str:
    """The whole page; `tiles`, `charts` and `sections` are HTML."""
    template = Template(files("spillway_cli").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        tiles=tiles,
        sections=f'<div class="grid2">{"".join(charts)}</div><div style="height:12px"></div>{"".join(sections)}',
        footer=escape(footer),
    )


def subtitle(run: RunRecord) -> str:
    """What was trained, how and when."""
    if not run.log.starts:
        return "The trainer has not started yet."
    start = run.log.starts[-1]
    began = datetime.fromtimestamp(run.log.starts[0].time, UTC)
    parts = [
        f"{format_count(start.parameters)} parameters" if run.log.sweep is None else f"{len(run.members)} members",
        run.plan.ranks if run.plan.world_size > 1 else "",
        f"memory mode {run.plan.mode}",
        f"started {began:%Y-%m-%d %H:%M} UTC",
        f"CPU kernels {start.isa}" if start.isa else "",
        f"I/O {start.io_backend}" if start.io_backend else "",
    ]
    return " · ".join(filter(None, parts))


def tiles(run: RunRecord, summary: RunSummary) -> str:
    device = next((use for use in summary.tiers if use.tier is Tier.DEVICE), None)
    loss_note = f"first step {format_loss(summary.first_loss)}"
    if summary.evaluation_loss is not None:
        loss_note += f", evaluation {format_loss(summary.evaluation_loss)}"
    shown = [
        ("final loss", format_loss(summary.final_loss), loss_note),
        ("steps", str(summary.num_steps), f"in {format_seconds(summary.attempt_seconds)}"),
        speed_tile(summary),
    ]
    if device is not None and summary.num_steps:
        budget = f"budget {format_bytes(device.budget_bytes)}" if device.budget_bytes else "no budget"
        uncounted = f"without {device.uncounted}, " if device.uncounted else ""
        shown.append(("device peak", format_bytes(device.peak_bytes), f"{uncounted}{budget}"))
    shown.append(("restarts", str(summary.num_restarts), "each from the last checkpoint"))
    return tiles_of(shown)


def speed_tile(summary: RunSummary) -> tuple[str, str, str]:
    if not summary.num_steps:
        return "speed", "-", "no step yet"
    seconds = format_seconds(summary.step_seconds)
    return "speed", f"{format_count(summary.tokens_per_second)} tok/s", f"{seconds} a step"


def tiles_of(shown: Sequence[tuple[str, str, str]]) -> str:
    return "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in shown
    )


def sweep_tiles(run: RunRecord, summary: RunSummary) -> str:
    members = run.members
    best, states = best_of(members), Counter(one.state for one in members)
    counted = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    left = left_seconds(run.log, run.member_logs, members) if run.trains else None
    eta = "" if left is None else f", eta {format_eta(left)}"
    shown = [
        ("best member", "none yet" if best is None else best.name, "" if best is None else about(best, run.values)),
        ("members", str(len(members)), counted),
        (
            "steps",
            f"{summary.num_steps} of {steps_made(members)[1]}",
            f"of all members, in {format_seconds(summary.attempt_seconds)}{eta}",
        ),
        speed_tile(summary),
        ("restarts", str(summary.num_restarts), "each member from its last checkpoint"),
    ]
    return tiles_of(shown)


def figures_of(member: MemberView) -> str:
    evaluated = member.evaluation_loss
    words = [] if evaluated is None else [f"evaluation {format_loss(evaluated)}"]
    words += [] if member.loss is None else [f"loss {format_loss(member.loss)}"]
    return ", ".join([*words, f"after {member.step} steps"])


def about(best: MemberView, values: Values) -> str:
    """The figures of the best member, and its own values."""
    return "; ".join(filter(None, (figures_of(best), values_sentence(values, best.name))))


def curves_sections(run: RunRecord) -> list[str]:
    """A loss curve for each member, and an evaluation curve if there are evaluations."""
    sweep = run.log.sweep
    halves = sweep is not None and sweep.halving and sweep.metric == "EvaluationLoss"
    return curves_of(
        [(member.name, run.member_logs.get(member.name, RunLog())) for member in run.members],
        ("Loss of each member", "Mean over the tokens of each step of the member."),
        (
            "Evaluation of each member",
            "On evaluation data." + (" Successive halving compares these." if halves else ""),
        ),
    )


def curves_of(
    logs: Sequence[tuple[str, RunLog]], of_loss: tuple[str, str], of_evaluation: tuple[str, str]
) -> list[str]:
    """A section with a loss curve for each log, by name, and one for evaluations if there are any. The pairs are
    heading and note."""
    losses, evaluations = [], []
    for index, (name, log) in enumerate(logs):
        colour = colour_of(index)
        losses.append(Series(name, colour, [(step.metrics.step, step.metrics.loss) for step in log.curve]))
        evaluated = [(step, each.loss) for step, each in sorted(log.evaluations.items())]
        evaluations.append(Series(name, colour, evaluated, dots=True))
    made = [section(*of_loss, line_chart("nats per token", losses, from_zero=False))]
    if any(one.points for one in evaluations):
        made.append(section(*of_evaluation, line_chart("nats per token", evaluations, from_zero=False)))
    return made


def members_section(members: Sequence[MemberView], values: Values = NO_VALUES) -> str:
    fields = fields_of(values)
    rows = [[*member_cells(one), *value_cells(values.get(one.name, {}), fields), one.message] for one in members]
    headings = ["member", "", "steps", "loss", "evaluation", "state", *fields.values(), "why"]
    return section("Members", "The best so far is marked with an asterisk.", html_table(headings, rows, 1))


def devices_sections(run: RunRecord) -> list[str]:
    """A section that shows when each device trained which member in the newest attempt; none before the first turn."""
    began = run.log.starts[-1].time if run.log.starts else 0.0
    turns = [turn for turn in run.log.turns if turn.begin >= began]
    if not turns:
        return []
    steps = (step.time for own in run.member_logs.values() for step in own.steps.values())
    ends = [event.time for event in run.log.members.values()] + [end.time for end in run.log.ends]
    last = max(*(turn.end or turn.begin for turn in turns), *ends, *steps)
    first, colours = turns[0].begin, {one.name: colour_of(index) for index, one in enumerate(run.members)}
    ends = [last if turn.end is None else turn.end for turn in turns]
    spans = [
        Span(turn.device, turn.begin - first, end - first, turn.member, colours[turn.member])
        for turn, end in zip(turns, ends, strict=True)
    ]
    rows = [f"device {index}" for index in range(1 + max(span.row for span in spans))]
    busy = busy_share(spans, len(rows), last - first)
    note = f"Turns of the newest attempt; devices were busy {busy:.0%} of the time from its first turn to its last."
    return [section("Devices", note, gantt_chart(rows, spans, "seconds"))]


def busy_share(spans: Sequence[Span], num_devices: int, seconds: float) -> float:
    """Share of the devices' time, `seconds` for each, in which they had a turn."""
    busy = sum(busy_seconds([span for span in spans if span.row == row]) for row in range(num_devices))
    return busy / max(1e-9, num_devices * seconds)


def busy_seconds(spans: Sequence[Span]) -> float:
    """Seconds in which one device had a turn. Its turns overlap if members share a base; such time counts once."""
    seconds, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        seconds += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return seconds


def colour_of(index: int) -> str:
    return MEMBER_COLOURS[index % len(MEMBER_COLOURS)]


def loss_section(run: RunRecord) -> str:
    series = [Series("training", "c1", points(run, lambda step: step.loss))]
    if run.log.evaluations:
        evaluated = sorted(run.log.evaluations.items())
        series.append(Series("evaluation", "c2", [(step, each.loss) for step, each in evaluated], dots=True))
    chart = line_chart("nats per token", series, resumes(run), from_zero=False)
    return section("Loss", "Mean over the step's tokens; dashed: resumed from a checkpoint.", chart)


def speed_section(run: RunRecord) -> str:
    series = [Series("tokens", "c1", points(run, lambda step: step.tokens_per_second))]
    return section("Speed", "Tokens per second of each step.", line_chart("tokens/s", series, resumes(run)))


def phase_section(run: RunRecord) -> str:
    scale, unit = (1e3, "ms") if median([step.metrics.step_seconds for step in run.log.curve]) < 1 else (1.0, "s")
    exchanges = run.plan.world_size > 1
    series = [
        Series(phase.value, colour, points(run, phase_value(phase, scale)))
        for phase, colour in PHASE_COLOURS.items()
        if exchanges or phase is not Phase.EXCHANGE  # one rank exchanges nothing
    ]
    series.append(Series("other", OTHER_COLOUR, points(run, lambda step: other_seconds(step) * scale)))
    chart = stacked_chart(unit, series, resumes(run))
    return section(
        "Step breakdown",
        "Time of a step by phase; wait = copies and I/O not hidden by compute; exchange = communication between ranks.",
        chart,
    )


def phase_value(phase: Phase, scale: float) -> Callable[[StepMetrics], float]:
    return lambda step: step.phase_seconds.get(phase.value, 0.0) * scale


def other_seconds(step: StepMetrics) -> float:
    return max(0.0, step.step_seconds - sum(step.phase_seconds.values()))


def tier_sections(run: RunRecord, summary: RunSummary) -> list[str]:
    """One chart per tier in use: tiers differ too much in size for one axis."""
    made = []
    for use in summary.tiers:
        if not use.peak_bytes and not use.planned_bytes:
            continue
        unit, size = binary_unit(max(use.peak_bytes, use.planned_bytes))
        peaks = points(run, tier_value(use.tier, size))
        near = 0 < use.budget_bytes <= 3 * max(use.peak_bytes, use.planned_bytes)
        limits = [Limit(use.budget_bytes / size, f"budget {format_bytes(use.budget_bytes)}")] if near else []
        colour = TIER_COLOURS[use.tier]
        chart = line_chart(unit, [Series(f"{use.tier} peak", colour, peaks)], resumes(run), limits)
        far = (
            ""
            if near or not use.budget_bytes
            else f" The budget, {format_bytes(use.budget_bytes)}, is above the drawn range."
        )
        made.append(section(f"Bytes in the {use.tier} tier", f"Peak bytes of each step.{far}", chart))
    return made


def tier_value(tier: Tier, size: int) -> Callable[[StepMetrics], float]:
    return lambda step: step.tier_peak_bytes.get(tier.value, 0) / size


def reality_section(run: RunRecord, summary: RunSummary) -> str:
    """Peak bytes, seconds by phase, CPU seconds and bytes by link, planned and measured, and the largest deviation."""
    rows, budgets = compared(run.measured, run.plan), {use.tier.value: use.budget_bytes for use in summary.tiers}
    names = {
        "tier": "{} peak",
        "step": "seconds per step",
        "phase": "phase {}",
        "cores": "CPU seconds per step",
        "link": "{} per step",
    }
    shown = [
        [
            names[row.kind].format(row.name),
            row.prediction,
            row.format(row.seen),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            format_bytes(budgets[row.name]) if row.kind == "tier" and budgets[row.name] else "none",
        ]
        for row in rows
    ]
    chart = html_table(["", "planned", "measured", "measured / planned", "budget"], shown)
    bound = f"Predicted to be bound by {run.plan.prediction.bound_by}. Measured: peak bytes, and medians of the steps."
    return section("Plan against reality", f"{bound} {sentence(rows, run.directory)}", chart)


def attempts_section(run: RunRecord) -> str:
    starts = {start.epoch: start for start in run.log.starts}
    rows = []
    for epoch in sorted({*starts, *run.ended}):
        start, ended = starts.get(epoch), run.ended.get(epoch)
        last = run.log.last_step_of_epoch.get(epoch)
        rows.append(
            [
                str(epoch),
                "never" if start is None else f"{datetime.fromtimestamp(start.time, UTC):%H:%M:%S}",
                "-" if start is None else str(start.resumed_from_step),
                "-" if last is None else str(last),
                "not recorded" if ended is None else ended.reason,
                "" if ended is None else ended.message,
            ]
        )
    headings = ["attempt", "started (UTC)", "from step", "to step", "ended", "message"]
    return section("Attempts", "Each starts from the newest intact checkpoint.", html_table(headings, rows, 2))


def reasons_section(plan: MemoryPlan, chosen: Sequence[str]) -> str:
    """Why this plan, and what the run chose itself; empty if the planner had no choice."""
    if not plan.reasons:
        return ""
    shown = plan.prediction.format
    lost = [[one.summary, "does not fit" if one.step_seconds is None else shown(one.step_seconds), one.reason]
            for one in plan.alternatives]  # fmt: skip
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in plan.reasons)
    reasons += "".join(f"<p>activations, chosen per storage: {escape(reason)}</p>" for reason in chosen)
    table = html_table(["alternative", "step", "why not"], lost, 1) if lost else ""
    return section("Why this plan", "", reasons + table)


def section(heading: str, note: str, body: str) -> str:
    paragraph = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(heading)}</h2>{paragraph}{body}</section>"


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 0) -> str:
    """The last `num_text_columns` columns hold text, which may wrap."""
    first_text = len(headings) - num_text_columns

    def cells(tag: str, values: Sequence[str]) -> str:
        styles = [' class="text"' if index >= first_text else "" for index in range(len(values))]
        return "".join(f"<{tag}{style}>{escape(value)}</{tag}>" for style, value in zip(styles, values, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<tr>{cells('th', headings)}</tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def points(run: RunRecord, value: Callable[[StepMetrics], float]) -> list[Point]:
    return [(step.metrics.step, value(step.metrics)) for step in run.log.curve]


def resumes(run: RunRecord) -> list[ChartMark]:
    """Marks where attempts resumed, without labels if there are too many."""
    marks = [start for start in run.log.starts if start.resumed_from_step]
    labelled = len(marks) <= MOST_LABELLED_MARKS
    return [
        ChartMark(start.resumed_from_step, f"resumed at {start.resumed_from_step}" if labelled else "")
        for start in marks
    ]


def binary_unit(num_bytes: int) -> tuple[str, int]:
    """The unit for small numbers on a chart's axis."""
    return next(((unit, size) for unit, size in BINARY_UNITS if num_bytes >= size), ("B", 1))
