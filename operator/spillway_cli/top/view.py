"""RunView: what `spillway top` shows of a run, and how it is drawn. Pure.

status of a TrainingJob, /metrics of its trainer   -> RunView -> a row of the fleet, a picture, or JSON
run.jsonl, plan.json and the lock of a directory   -> RunView
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table

from spillway.plan import Tier
from spillway.units import format_bytes, format_count, format_seconds

from ..console import printable, table
from ..record.summary import finite, format_loss
from ..record.sweep_view import MemberView, members_json, members_table

UNKNOWN = "-"
WIDEST = 10_000
"""Width without a terminal, so that no cell is cut."""
BAR_WIDTH, SMALL_BAR_WIDTH = 30, 6
STATES = (
    "Running", "Restarting", "Starting", "Planning", "Pending", "Queued", "Rejected", "Suspended", "Failed", "Complete",
)  # fmt: skip
"""Order of the job list: active jobs first, ended ones last."""


@dataclass(frozen=True, slots=True)
class TierView:
    """Bytes of the rank that holds most; None = not known."""

    tier: Tier
    planned_bytes: int | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    now_bytes: int | None = None

    @property
    def is_used(self) -> bool:
        return bool(self.planned_bytes or self.peak_bytes or self.now_bytes)


@dataclass(frozen=True, slots=True)
class LiveRates:
    """How fast bytes move and how a step's time is divided, over some steps."""

    over: str
    """Which steps, for people, such as "a step (mean of the last 20)"."""
    link_bytes_per_second: Mapping[str, float]
    """Bytes by h2d, d2h, nvme_read and nvme_write per second of the steps' own time."""
    phase_seconds: Mapping[str, float]
    """Phase -> seconds of what `over` names; the rest is "other"."""

    @property
    def seconds(self) -> float:
        return sum(self.phase_seconds.values())


@dataclass(frozen=True, slots=True)
class RunView:
    """One run at one moment."""

    name: str
    namespace: str
    """Empty for a local run."""
    state: str
    attempt: int = 0
    """0 = none yet."""
    step: int = 0
    steps: int = 0
    """Steps of the job; 0 = not known."""
    loss: float | None = None
    tokens_per_second: float | None = None
    eta: str = ""
    restarts: int = 0
    tiers: tuple[TierView, ...] = ()
    nodes: tuple[str, ...] = ()
    nodes_are_planned: bool = False
    """Whether `nodes` are the planned ones, because the pods' nodes are not known."""
    age: str = ""
    rates: LiveRates | None = None
    members: tuple[MemberView, ...] = ()
    """Members of a sweep; `step` and `steps` are then sums over them."""
    sentences: tuple[str, ...] = ()
    """Sentences about problems, or about how the run ended."""
    unknown: tuple[str, ...] = ()
    """What could not be read, and why."""
    is_over: bool = False
    """Whether it will not change any more by itself."""


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_json(view: RunView) -> dict[str, object]:
    """One run, as documented in docs/cli.md."""
    rates = view.rates
    return {
        "name": view.name,
        "namespace": view.namespace or None,
        "state": view.state,
        "attempt": view.attempt,
        "step": view.step,
        "steps": view.steps or None,
        "loss": finite(view.loss),
        "tokensPerSecond": finite(view.tokens_per_second),
        "eta": view.eta or None,
        "restarts": view.restarts,
        "nodes": list(view.nodes),
        "nodesArePlanned": view.nodes_are_planned,
        "tiers": {
            one.tier.value: {
                "plannedBytes": one.planned_bytes,
                "budgetBytes": one.budget_bytes,
                "peakBytes": one.peak_bytes,
                "nowBytes": one.now_bytes,
            }
            for one in view.tiers
        },
        "rates": None
        if rates is None
        else {
            "over": rates.over,
            "linkBytesPerSecond": dict(rates.link_bytes_per_second),
            "phaseSeconds": dict(rates.phase_seconds),
        },
        **members_json(view.members),
        "sentences": list(view.sentences),
        "unknown": list(view.unknown),
        "ended": view.is_over,
    }


# --- one run ----------------------------------------------------------------------------------------------------------


def picture(view: RunView, console: Console) -> RenderableType:
    """One run in detail: progress, problems, members, memory, phases of a step, link rates."""
    bars = console.is_terminal
    parts: list[RenderableType] = [headline(view)]
    parts += [progress(view, bars)] if view.steps or view.step else []
    parts += ["", *view.sentences] if view.sentences else []  # early, so that a small screen does not cut them off
    parts += ["", members_table(view.members)] if view.members else []
    if any(one.is_used for one in view.tiers):
        parts += ["", tiers_table(view.tiers, bars, "at the end" if view.is_over else "now")]
    if view.rates is not None:
        parts += ["", phases_table(view.rates, bars)]
        parts += ["", links_table(view.rates)] if view.rates.link_bytes_per_second else []
    parts += ["", *(f"not known: {one}" for one in view.unknown)] if view.unknown else []
    return Group(*(printable(part) if isinstance(part, str) else part for part in parts))


def headline(view: RunView) -> str:
    """For example: tiny in team-a: Running, attempt 2, 1 restart, on node-b, age 5m00s"""
    where = f" in {view.namespace}" if view.namespace else ""
    words = [f"{view.name}{where}: {view.state}"]
    words += [f"attempt {view.attempt}"] if view.attempt else []
    words += [f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"] if view.restarts else []
    words += [f"{'planned ' if view.nodes_are_planned else ''}on {', '.join(view.nodes)}"] if view.nodes else []
    words += [f"age {view.age}"] if view.age else []
    return ", ".join(words)


def progress(view: RunView, bars: bool) -> RenderableType:
    words = [f"step {view.step}/{view.steps}" if view.steps else f"step {view.step}"]
    words += [f"{100 * view.step // view.steps} %"] if view.steps else []
    words += [f"loss {format_loss(view.loss)}"] if view.loss is not None else []
    words += [f"{format_count(view.tokens_per_second)} tok/s"] if view.tokens_per_second else []
    words += [f"eta {view.eta}"] if view.eta else []
    line = printable("  ".join(words))
    if not bars or not view.steps:
        return line
    grid = Table.grid(padding=(0, 2))
    grid.add_row(bar(view.step, view.steps, BAR_WIDTH), line)
    return grid


def bar(part: float, whole: float, width: int) -> RenderableType:
    return ProgressBar(total=max(whole, 1e-9), completed=min(part, whole), width=width)


def tiers_table(tiers: Sequence[TierView], bars: bool, last: str) -> Table:
    """Planned, budget, peak and current bytes; the bar is the peak's share of the plan."""
    made = table("tier", "planned", "budget", "peak", last, *(["peak of planned"] if bars else []))
    for one in tiers:
        if one.is_used:
            cells = [shown(one.planned_bytes), shown(one.budget_bytes), shown(one.peak_bytes), shown(one.now_bytes)]
            filled = [bar(one.peak_bytes or 0, one.planned_bytes or 0, BAR_WIDTH)] if bars else []
            made.add_row(one.tier.value, *cells, *filled)
    return made


def shown(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def phases_table(rates: LiveRates, bars: bool) -> Table:
    """Seconds by phase, and their share."""
    whole = rates.seconds
    made = table("phase", "seconds", "share", *([""] if bars else []), title=f"time by phase of {rates.over}")
    for phase, seconds in rates.phase_seconds.items():
        share = seconds / whole if whole else 0.0
        filled = [bar(share, 1.0, BAR_WIDTH)] if bars else []
        made.add_row(phase, format_seconds(seconds) if seconds else "0 s", f"{100 * share:.0f} %", *filled)
    return made


def links_table(rates: LiveRates) -> Table:
    made = table("link", "rate")
    for link, rate in rates.link_bytes_per_second.items():
        made.add_row(link, f"{format_bytes(rate)}/s")
    return made


# --- all jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the job list."""

    heading: str
    weight: int
    """On a narrow screen, columns with the largest weight are dropped first; 0 is never dropped."""
    cell: Callable[[RunView, bool], RenderableType] = field(repr=False)
    """Returns the cell of a run; the flag asks for a bar."""


def fleet(views: Sequence[RunView], unknown: Sequence[str], place: str, console: Console) -> RenderableType:
    """A line of totals and a row per run; on a terminal only as many rows as fit, and a count of the rest."""
    ordered = in_order(views)
    rows = ordered
    if console.is_terminal:
        rows = ordered[: max(1, console.height - 4 - len(unknown))]
    parts: list[RenderableType] = [f"{place}: {totals(ordered)}"]
    if rows:
        with_namespace = len({view.namespace for view in views}) > 1
        parts.append(fitting(rows, [one for one in COLUMNS if with_namespace or one.heading != "NAMESPACE"], console))
    if len(rows) < len(ordered):
        parts.append(f"... and {totals(ordered[len(rows) :])}")
    return Group(*(printable(part) if isinstance(part, str) else part for part in [*parts, *unknown]))


def in_order(views: Sequence[RunView]) -> list[RunView]:
    return sorted(views, key=lambda view: (state_rank(view.state), view.namespace, view.name))


def state_rank(state: str) -> int:
    return STATES.index(state) if state in STATES else STATES.index("Planning")


def totals(views: Sequence[RunView]) -> str:
    """For example: 3 jobs: 2 Running, 1 Failed"""
    if not views:
        return "no TrainingJob"
    counted = Counter(view.state for view in views)
    states = ", ".join(f"{counted[state]} {state}" for state in sorted(counted, key=state_rank))
    return f"{len(views)} job{'' if len(views) == 1 else 's'}: {states}"


def fitting(views: Sequence[RunView], columns: Sequence[Column], console: Console) -> Table:
    """The table with as many columns as fit on the terminal; the least important ones are dropped."""
    kept = [one for one in columns if any(one.cell(view, False) != "" for view in views)]
    while True:
        made = table(*(one.heading for one in kept))
        for view in views:
            made.add_row(*(one.cell(view, console.is_terminal) for one in kept))
        removable = max((one.weight for one in kept), default=0)
        if not removable or not console.is_terminal or width_of(made, console) <= console.width:
            return made
        kept = [one for one in kept if one.weight != removable]


def width_of(made: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=WIDEST), made).maximum


def tier_cell(tier: Tier) -> Callable[[RunView, bool], RenderableType]:
    def cell(view: RunView, with_bar: bool) -> RenderableType:
        found = next((one for one in view.tiers if one.tier is tier), None)
        if found is None or not found.is_used:
            return ""
        text = occupancy(found.peak_bytes, found.planned_bytes)
        if not with_bar or not found.planned_bytes:
            return text
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar(found.peak_bytes or 0, found.planned_bytes, SMALL_BAR_WIDTH), text)
        return grid

    return cell


def occupancy(used_bytes: int | None, planned_bytes: int | None) -> str:
    """`0.9/1.0 GiB`: used and planned bytes; the unit is shown once if it is the same."""
    if planned_bytes is None:
        return shown(used_bytes)
    number, unit = format_bytes(planned_bytes).split()
    if used_bytes is None:
        return f"{UNKNOWN}/{number} {unit}"
    used_number, used_unit = format_bytes(used_bytes).split()
    return f"{used_number}/{number} {unit}" if used_unit == unit else f"{used_number} {used_unit}/{number} {unit}"


def nodes_cell(view: RunView, _: bool) -> str:
    """`node-a +1`: a node and the number of others; `~node-a`: the planned node."""
    if not view.nodes:
        return ""
    more = f" +{len(view.nodes) - 1}" if len(view.nodes) > 1 and not view.nodes_are_planned else ""
    return printable(f"{'~' if view.nodes_are_planned else ''}{view.nodes[0]}{more}")


def progress_cell(view: RunView, _: bool) -> str:
    return f"{view.step}/{view.steps} {100 * view.step // view.steps:3d} %" if view.steps else ""


COLUMNS = (
    Column("NAMESPACE", 0, lambda view, _: printable(view.namespace)),
    Column("NAME", 0, lambda view, _: printable(view.name)),
    Column("STATE", 0, lambda view, _: printable(view.state)),
    Column("STEP", 0, progress_cell),
    Column("LOSS", 4, lambda view, _: "" if view.loss is None else format_loss(view.loss)),
    Column("TOK/S", 3, lambda view, _: "" if not view.tokens_per_second else format_count(view.tokens_per_second)),
    Column("DEVICE", 1, tier_cell(Tier.DEVICE)),
    Column("HOST", 5, tier_cell(Tier.HOST)),
    Column("NVME", 6, tier_cell(Tier.NVME)),
    Column("RESTARTS", 7, lambda view, _: str(view.restarts) if view.restarts else ""),
    Column("ETA", 2, lambda view, _: printable(view.eta)),
    Column("NODE", 8, nodes_cell),
    Column("AGE", 9, lambda view, _: view.age),
)
"""Columns of the job list; those of tiers show the peak and planned bytes of the rank that holds most."""
