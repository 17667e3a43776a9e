"""Small SVG charts: lines, stacked areas, axes with units. Numbers in, an SVG string out.

Colours are CSS classes of report.html (`c1`..`c7`), so that one file serves light and dark mode. All text is escaped.
A chart with too many points shows the means of equal buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40
LARGEST_COLUMNS = 200
"""Maximum number of points and hover strips per chart."""

Point = tuple[float, float]
"""(step, value)."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: str
    """CSS class: c1..c7."""
    points: Sequence[Point]
    dots: bool = False
    """Mark each point: for series with few of them."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line at a step, for example where an attempt resumed."""

    step: float
    label: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line, for example a budget."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of a Gantt chart."""

    row: int
    begin: float
    end: float
    name: str
    colour: str
    """CSS class: c1..c7."""


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """The coordinates of one chart: maps steps and values to pixels."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def line_chart(
    unit: str,
    series: Sequence[Series],
    marks: Sequence[ChartMark] = (),
    limits: Sequence[Limit] = (),
    from_zero: bool = True,
) -> str:
    """Lines over steps; gaps where a value is not finite. `unit` labels the vertical axis."""
    drawn = [Series(one.name, one.colour, thin(one.points), one.dots) for one in series]
    values = [value for one in drawn for _, value in one.points if math.isfinite(value)]
    frame = frame_of(drawn, [*values, *(limit.value for limit in limits)], from_zero)
    parts = [axes(frame, unit), *(mark_line(frame, mark) for mark in marks)]
    parts += [limit_line(frame, limit) for limit in limits]
    parts += [line(frame, one) for one in drawn]
    parts.append(hover_strips(frame, drawn, unit))
    return figure("".join(parts), drawn, unit)


def picture(unit: str, across: str, series: Sequence[Series], style: str) -> str:
    """A standalone SVG file with a legend: lines over `across`, any number, instead of steps. `style`: the CSS rules of
    the classes, as in report.html."""
    values = [value for one in series for _, value in one.points]
    frame = frame_of(series, values, from_zero=False)
    keys = "".join(
        f'<rect class="dot {one.colour}" x="{WIDTH - RIGHT - 150}" y="{TOP + 16 * row}" width="10" height="10"/>'
        f'<text class="note" x="{WIDTH - RIGHT - 134}" y="{TOP + 16 * row + 9}">{escape(one.name)}</text>'
        for row, one in enumerate(series)
    )
    body = axes(frame, unit, across) + "".join(line(frame, one) for one in series) + keys
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
        f'<style>{style}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="var(--card)"/>{body}</svg>\n'
    )


def stacked_chart(unit: str, series: Sequence[Series], marks: Sequence[ChartMark] = ()) -> str:
    """Areas on top of one another; all series have the same steps."""
    drawn = [Series(one.name, one.colour, thin(one.points)) for one in series]
    steps = [step for step, _ in drawn[0].points] if drawn else []
    floors = [0.0] * len(steps)
    bands: list[tuple[Series, list[float], list[float]]] = []
    for one in drawn:
        ceilings = [floor + max(0.0, value) for floor, (_, value) in zip(floors, one.points, strict=True)]
        bands.append((one, floors, ceilings))
        floors = ceilings
    frame = frame_of(drawn, floors, from_zero=True)
    parts = [axes(frame, unit), *(band(frame, steps, *each) for each in bands)]
    parts += [mark_line(frame, mark) for mark in marks]
    parts.append(hover_strips(frame, drawn, unit))
    return figure("".join(parts), drawn, unit)


def gantt_chart(rows: Sequence[str], spans: Sequence[Span], across: str) -> str:
    """A row of bars for each name in `rows`, over `across`, for example seconds; each bar has its name as a tooltip."""
    frame = ChartFrame(min(span.begin for span in spans), max(span.end for span in spans), 0.0, float(len(rows)))
    height = (HEIGHT - TOP - BOTTOM) / len(rows)
    parts = [axis_below(frame, across, whole=False)]
    for index, name in enumerate(rows):
        y = TOP + (index + 0.5) * height + 4
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    for span in spans:
        x, width = frame.x(span.begin), max(0.5, frame.x(span.end) - frame.x(span.begin) - 0.5)
        said = f"{span.name}: {format_value(span.begin)} to {format_value(span.end)} {across}"
        parts.append(
            f'<rect class="dot {span.colour}" x="{x:.1f}" y="{TOP + span.row * height + 2:.1f}" width="{width:.1f}" '
            f'height="{height - 4:.1f}"><title>{escape(said)}</title></rect>'
        )
    named = {span.name: Series(span.name, span.colour, ()) for span in spans}
    return figure("".join(parts), list(named.values()), across, over="")


def figure(body: str, series: Sequence[Series], unit: str, over: str = " over steps") -> str:
    names = ", ".join(one.name for one in series)
    keys = "".join(f'<span class="key {one.colour}">{escape(one.name)}</span>' for one in series)
    legend = f'<div class="legend">{keys}</div>' if len(series) > 1 else ""
    label = escape(f"{names} in {unit}{over}", quote=True)
    return f'{legend}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg>'


def thin(points: Sequence[Point]) -> list[Point]:
    """At most LARGEST_COLUMNS points: means of equal buckets, each at its last step."""
    if len(points) <= LARGEST_COLUMNS:
        return list(points)
    edges = [round(index * len(points) / LARGEST_COLUMNS) for index in range(LARGEST_COLUMNS + 1)]
    return [mean_point(points[start:end]) for start, end in pairwise(edges)]


def mean_point(bucket: Sequence[Point]) -> Point:
    return bucket[-1][0], math.fsum(value for _, value in bucket) / len(bucket)


def frame_of(series: Sequence[Series], values: Sequence[float], from_zero: bool) -> ChartFrame:
    """Bounds on round numbers; a chart without values still has axes."""
    steps = [step for one in series for step, _ in one.points] or [0.0, 1.0]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    spacing = tick_spacing(low, high)
    return ChartFrame(min(steps), max(steps), math.floor(low / spacing) * spacing, ceiling(low, high, spacing))


def ceiling(low: float, high: float, spacing: float) -> float:
    top = math.ceil(high / spacing) * spacing
    return top if top > low else low + spacing


def tick_spacing(low: float, high: float, wanted: int = 4) -> float:
    """1, 2 or 5 times a power of ten, for about `wanted` intervals."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * wanted >= span)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    spacing = tick_spacing(low, high, wanted)
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's label, with as few digits as possible."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.10g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def axes(frame: ChartFrame, unit: str, across: str = "step") -> str:
    rows = []
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        rows.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        rows.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    rows.append(f'<text class="unit" x="{LEFT}" y="{TOP - 4}" text-anchor="start">{escape(unit)}</text>')
    return "".join(rows) + axis_below(frame, across, whole=across == "step")


def axis_below(frame: ChartFrame, across: str, *, whole: bool) -> str:
    """The horizontal axis with its labels. `whole`: only whole numbers are labelled."""
    rows = []
    for step in ticks(frame.first, frame.last, 6):
        if not whole or step == int(step):
            x, y = frame.x(step), HEIGHT - BOTTOM + 16
            rows.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{number(step)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    rows.append(f'<text class="unit" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>')
    return "".join(rows)


def line(frame: ChartFrame, series: Series) -> str:
    """A line, broken where a value is not finite; a single point is drawn as a dot."""
    pieces: list[list[Point]] = [[]]
    for step, value in series.points:
        if math.isfinite(value):
            pieces[-1].append((frame.x(step), frame.y(value)))
        elif pieces[-1]:
            pieces.append([])
    drawn = []
    for piece in filter(None, pieces):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
        drawn.append(f'<polyline class="line {series.colour}" points="{path}"/>')
        if series.dots or len(piece) == 1:
            drawn += [f'<circle class="dot {series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in piece]
    return "".join(drawn)


def band(frame: ChartFrame, steps: Sequence[float], series: Series, floors: list[float], ceilings: list[float]) -> str:
    upper = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in zip(steps, ceilings, strict=True)]
    lower = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in zip(steps, floors, strict=True)]
    return f'<polygon class="band {series.colour}" points="{" ".join([*upper, *reversed(lower)])}"/>'


def mark_line(frame: ChartFrame, mark: ChartMark) -> str:
    if not frame.first <= mark.step <= frame.last:
        return ""
    x, y = frame.x(mark.step), HEIGHT - BOTTOM
    anchor, shift = ("end", -4) if x > WIDTH * 0.8 else ("start", 4)
    text = f'<text class="note" x="{x + shift:.1f}" y="{TOP + 9}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    return f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}"/>{text}'


def limit_line(frame: ChartFrame, limit: Limit) -> str:
    y = frame.y(limit.value)
    x = WIDTH - RIGHT
    text = f'<text class="note" x="{x}" y="{y - 5:.1f}" text-anchor="end">{escape(limit.label)}</text>'
    return f'<line class="limit" x1="{LEFT}" x2="{x}" y1="{y:.1f}" y2="{y:.1f}"/>{text}'


def hover_strips(frame: ChartFrame, series: Sequence[Series], unit: str) -> str:
    """An invisible strip per step that shows its values as a native tooltip, without a script."""
    values: dict[float, list[str]] = {}
    for one in series:
        for step, value in one.points:
            values.setdefault(step, []).append(f"{one.name} {format_value(value)} {unit}")
    steps = sorted(values)
    strips = []
    for index, step in enumerate(steps):
        left = frame.x((steps[index - 1] + step) / 2) if index else LEFT
        right = frame.x((step + steps[index + 1]) / 2) if index + 1 < len(steps) else WIDTH - RIGHT
        text = escape("\n".join([f"step {step:.0f}", *values[step]]))
        strips.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{max(0.5, right - left):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{text}</title></rect>'
        )
    return "".join(strips)


def format_value(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
